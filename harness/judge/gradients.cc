#include "harness/judge/gradients.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "core/status.h"
#include "harness/judge/errors.h"

namespace tfb {
namespace {

constexpr double kStep = 1e-5;
constexpr double kDeviations = 3;

double Square(double x) { return x * x; }

double Norm(const ConstTensorView& view) { return std::sqrt(InnerProduct(view, view)); }

// x += factor d, of contiguous f64 tensors.
void Move(double factor, const ConstTensorView& d, Tensor* x) {
  double* to = x->span<double>().data();
  for (int64_t n = 0; n < x->num_elements(); ++n) to[n] += factor * d.Get(n);
}

// Returns the tensors with all floating-point numbers in f64.
NamedTensors InDouble(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) {
    copies[name] = IsFloating(tensor.dtype()) ? tensor.CloneAs(DType::kF64) : tensor.Clone();
  }
  return copies;
}

// Returns the tensors with each number x of f64 changed to x (1 + deviation n), n normal, but for
// the tensors `fixed`.
NamedTensors Near(const NamedTensors& tensors, double deviation, absl::string_view stream,
                  const std::set<std::string>& fixed = {}) {
  NamedTensors near;
  for (const auto& [name, tensor] : tensors) {
    Tensor& moved = near[name] = tensor.Clone();
    if (tensor.dtype() != DType::kF64 || fixed.count(name) > 0) continue;
    const RandomStream random(0, absl::StrCat(stream, "/", name));
    for (int64_t n = 0; n < moved.num_elements(); ++n) {
      moved.span<double>()[n] *= 1 + deviation * random.Normal(n);
    }
  }
  return near;
}

// Returns (a - b) / width, where equal infinities differ by 0.
double Quotient(double a, double b, double width) { return a == b ? 0 : (a - b) / width; }

}  // namespace

absl::StatusOr<DefinitionGradient> DefinitionGradient::At(const Job& job, const Point& point,
                                                          ThreadPool* pool) {
  DefinitionGradient gradient;
  gradient.job_ = &job;
  gradient.pool_ = pool;
  gradient.error_ =
      AbsoluteBound(job.problem.dtype, std::max(job.problem.kv_tokens, job.problem.query_tokens));
  TFB_ASSIGN_OR_RETURN(const std::vector<TensorSpec> specs,
                       job.technique->InputSpecs(job.problem, job.options));
  std::set<std::string> noise;  // of a distribution, which the definition may rely on
  for (const TensorSpec& spec : specs) {
    if (spec.noise.has_value()) noise.insert(spec.name);
  }
  gradient.points_.push_back(
      {InDouble(*point.inputs), InDouble(*point.parameters), InDouble(*point.output_gradients)});
  Numbers& point_itself = gradient.points_.front();
  TFB_RETURN_IF_ERROR(gradient.Define(&point_itself, point.computed).status());
  point_itself.is_stopped = true;
  for (int n = 0; n < kPoints; ++n) {
    const Numbers& here = gradient.points_.front();
    const auto near = [&](absl::string_view kind, const NamedTensors& tensors) {
      return Near(tensors, gradient.error_, absl::StrCat("near ", n, "/", kind), noise);
    };
    gradient.points_.push_back({near("inputs", here.inputs), near("parameters", here.parameters),
                                near("gradients", here.output_gradients),
                                here.stopped.WithChoices()});
  }
  return gradient;
}

absl::StatusOr<NamedTensors> DefinitionGradient::Define(Numbers* numbers,
                                                        const NamedTensors* computed) const {
  Problem problem = job_->problem;
  problem.dtype = DType::kF32;
  DefinitionRequest request;
  request.pool = pool_;
  request.stopped = &numbers->stopped;
  request.computed = computed;
  NamedTensors outputs;
  TFB_RETURN_IF_ERROR(job_->technique->Define(problem, job_->options, numbers->parameters,
                                              ViewsOf(numbers->inputs), request, &outputs));
  TFB_RETURN_IF_ERROR(numbers->stopped.Rewind());
  return outputs;
}

absl::StatusOr<DefinitionGradient::Derivative> DefinitionGradient::DerivativeAt(
    Numbers* numbers, const Variable& variable, const ConstTensorView& direction) const {
  if (!std::exchange(numbers->is_stopped, true)) {
    TFB_RETURN_IF_ERROR(Define(numbers).status());
  }
  Tensor& x = numbers->at(variable);
  const Tensor before = x.Clone();
  const double length = Norm(before.view());
  const double h = kStep * (length > 0 ? length : 1);
  Move(h, direction, &x);
  TFB_ASSIGN_OR_RETURN(const NamedTensors ahead, Define(numbers));
  CopyElements(before.view(), x.view());
  Move(-h, direction, &x);
  TFB_ASSIGN_OR_RETURN(const NamedTensors behind, Define(numbers));
  CopyElements(before.view(), x.view());

  Derivative derivative;
  double outputs = 0, gradients = 0;
  for (const auto& [name, y] : ahead) {
    const auto found = numbers->output_gradients.find(name);
    if (found == numbers->output_gradients.end()) continue;
    const double* g = found->second.span<double>().data();
    for (int64_t n = 0; n < y.num_elements(); ++n) {
      const double after = y.view().Get(n);
      derivative.value += g[n] * Quotient(after, behind.at(name).view().Get(n), 2 * h);
      if (std::isfinite(after)) outputs += after * after;
      gradients += g[n] * g[n];
    }
  }
  derivative.resolution = std::ldexp(std::sqrt(outputs * gradients), -52) / h;

  const auto g = numbers->output_gradients.find("out");
  const auto lse = ahead.find("log_sum_exp");
  if (g == numbers->output_gradients.end() || lse == ahead.end()) return derivative;
  const ConstTensorView out = ahead.at("out").view(), out_behind = behind.at("out").view();
  const ConstTensorView l = lse->second.view(), l_behind = behind.at("log_sum_exp").view();
  const int64_t rows = l.num_elements(), channels = rows == 0 ? 0 : out.num_elements() / rows;
  for (int64_t row = 0; row < rows; ++row) {
    const double slope = Quotient(l.Get(row), l_behind.Get(row), 2 * h);
    double of_row = 0;
    for (int64_t n = row * channels; n < (row + 1) * channels; ++n) {
      const double gradient = g->second.view().Get(n);
      of_row += gradient * Quotient(out.Get(n), out_behind.Get(n), 2 * h);
      derivative.variance += Square(error_ * gradient * out.Get(n) * slope);
    }
    if (std::isinf(l.Get(row))) continue;  // no key
    derivative.variance += Square(LogSumExpBound(keys_, std::abs(l.Get(row))) * of_row);
  }
  return derivative;
}

absl::StatusOr<std::vector<Slope>> DefinitionGradient::Along(
    const Variable& variable, const std::vector<Tensor>& directions) {
  std::vector<Slope> slopes;
  double squares = 0;  // of s, over the directions
  for (const Tensor& direction : directions) {
    TFB_ASSIGN_OR_RETURN(const Derivative here,
                         DerivativeAt(&points_[0], variable, direction.view()));
    double changes = 0;
    for (int n = 1; n <= kPoints; ++n) {
      TFB_ASSIGN_OR_RETURN(const Derivative there,
                           DerivativeAt(&points_[n], variable, direction.view()));
      changes += Square(there.value - here.value);
    }
    squares += changes / kPoints + here.variance;
    slopes.push_back({here.value, here.resolution});
  }
  double deviation = std::sqrt(squares / static_cast<double>(directions.size()));
  const bool vanishes = std::all_of(slopes.begin(), slopes.end(), [&](const Slope& slope) {
    return deviation <= slope.bound && std::abs(slope.value) <= slope.bound;
  });
  if (vanishes) deviation = largest_deviation_;
  largest_deviation_ = std::max(largest_deviation_, deviation);
  for (Slope& slope : slopes) slope.bound += kDeviations * deviation;
  return slopes;
}

absl::StatusOr<Tensor> DefinitionGradient::Partial(const Variable& variable) {
  const Shape shape = points_[0].at(variable).shape();
  Tensor partial(DType::kF64, shape);
  for (int64_t n = 0; n < partial.num_elements(); ++n) {
    const Tensor direction = CoordinateDirection(shape, n);
    TFB_ASSIGN_OR_RETURN(const Derivative derivative,
                         DerivativeAt(&points_[0], variable, direction.view()));
    partial.span<double>()[n] = derivative.value;
  }
  return partial;
}

std::vector<Tensor> RandomDirections(const Shape& shape, int count, uint64_t seed,
                                     absl::string_view name) {
  std::vector<Tensor> directions;
  for (int n = 0; n < count; ++n) {
    Tensor& direction = directions.emplace_back(DType::kF64, shape);
    FillNormal(&direction, seed, absl::StrCat("direction ", n, " of ", name));
    const double length = Norm(direction.view());
    for (double& element : direction.span<double>()) element /= length;
  }
  return directions;
}

Tensor CoordinateDirection(const Shape& shape, int64_t index) {
  Tensor direction(DType::kF64, shape);
  Fill(direction.view(), 0);
  direction.span<double>()[index] = 1;
  return direction;
}

double InnerProduct(const ConstTensorView& a, const ConstTensorView& b) {
  double sum = 0;
  ForEachOffset(a, b, [&](int64_t x, int64_t y) { sum += a.Get(x) * b.Get(y); });
  return sum;
}

}  // namespace tfb
