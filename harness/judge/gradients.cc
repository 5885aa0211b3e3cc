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

constexpr double kStep = 1e-6;
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

// Returns the gradients, in f64, of the rows that a definition's outputs have.
absl::StatusOr<NamedTensors> OfRows(const NamedTensors& gradients, const NamedTensors& outputs,
                                    absl::Span<const int64_t> rows) {
  NamedTensors of_rows;
  for (const auto& [name, gradient] : gradients) {
    const auto output = outputs.find(name);
    if (output == outputs.end()) continue;
    TFB_ASSIGN_OR_RETURN(const ComparedRows compared,
                         ComparedRows::Of(gradient.view(), output->second.view(), rows));
    Tensor& some = of_rows[name] = Tensor(DType::kF64, output->second.shape());
    for (int64_t n = 0; n < some.num_elements(); ++n) {
      some.span<double>()[n] = gradient.view().Get(compared.OutputOffset(n));
    }
  }
  return of_rows;
}

// Returns (a - b) / width, where equal infinities differ by 0.
double Quotient(double a, double b, double width) { return a == b ? 0 : (a - b) / width; }

}  // namespace

absl::StatusOr<DefinitionGradient> DefinitionGradient::At(const Job& job, const Point& point,
                                                          ThreadPool* pool) {
  DefinitionGradient gradient;
  gradient.job_ = &job;
  gradient.pool_ = pool;
  gradient.keys_ = std::max(job.problem.kv_tokens, job.problem.query_tokens);
  gradient.error_ = AbsoluteBound(job.problem.dtype, gradient.keys_);
  gradient.output_error_ = gradient.error_;
  if (!point.reads_rounded_output && job.problem.dtype != DType::kF32) {
    gradient.output_error_ = Fp32Bound(gradient.keys_) + Square(UnitRoundoff(job.problem.dtype));
  }
  TFB_ASSIGN_OR_RETURN(const std::vector<TensorSpec> specs,
                       job.technique->InputSpecs(job.problem, job.options));
  std::set<std::string> noise;  // of a distribution, which the definition may rely on
  for (const TensorSpec& spec : specs) {
    if (spec.noise.has_value()) noise.insert(spec.name);
  }
  gradient.rows_.assign(point.rows.begin(), point.rows.end());
  gradient.points_.push_back({InDouble(*point.inputs), InDouble(*point.parameters), {}});
  Numbers& point_itself = gradient.points_.front();
  TFB_ASSIGN_OR_RETURN(const NamedTensors outputs, gradient.Define(&point_itself, point.computed));
  TFB_ASSIGN_OR_RETURN(point_itself.output_gradients,
                       OfRows(*point.output_gradients, outputs, point.rows));
  point_itself.is_stopped = true;
  gradient.is_network_ = outputs.count("log_sum_exp") == 0;
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
  request.rows = rows_;
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
    Numbers* numbers, const Direction& direction) const {
  if (!std::exchange(numbers->is_stopped, true)) {
    TFB_RETURN_IF_ERROR(Define(numbers).status());
  }
  std::vector<Tensor> before;
  double squares = 0;
  for (const auto& [variable, tensor] : direction) {
    before.push_back(numbers->at(variable).Clone());
    squares += InnerProduct(before.back().view(), before.back().view());
  }
  const double h = kStep * (squares > 0 ? std::sqrt(squares) : 1);
  const auto outputs_at = [&](double step) {
    for (const auto& [variable, tensor] : direction) {
      Move(step, tensor.view(), &numbers->at(variable));
    }
    absl::StatusOr<NamedTensors> defined = Define(numbers);
    for (size_t n = 0; n < direction.size(); ++n) {
      CopyElements(before[n].view(), numbers->at(direction[n].first).view());
    }
    return defined;
  };
  TFB_ASSIGN_OR_RETURN(const NamedTensors ahead, outputs_at(h));
  TFB_ASSIGN_OR_RETURN(const NamedTensors behind, outputs_at(-h));

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
      derivative.variance += Square(output_error_ * gradient * out.Get(n) * slope);
    }
    if (std::isinf(l.Get(row))) continue;  // no key
    derivative.variance += Square(LogSumExpBound(keys_, std::abs(l.Get(row))) * of_row);
  }
  return derivative;
}

absl::StatusOr<std::vector<Slope>> DefinitionGradient::Along(
    const Variable& variable, const std::vector<Tensor>& directions) {
  std::vector<Direction> of_one(directions.size());
  for (size_t n = 0; n < directions.size(); ++n) {
    of_one[n].emplace_back(variable, directions[n].Clone());
  }
  return Along(of_one);
}

absl::StatusOr<std::vector<Slope>> DefinitionGradient::Along(
    const std::vector<Direction>& directions) {
  std::vector<Slope> slopes;
  double squares = 0;  // of s, over the directions
  for (const Direction& direction : directions) {
    TFB_ASSIGN_OR_RETURN(const Derivative here, DerivativeAt(&points_[0], direction));
    double changes = 0;
    for (int n = 1; n <= kPoints; ++n) {
      TFB_ASSIGN_OR_RETURN(const Derivative there, DerivativeAt(&points_[n], direction));
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
  if (is_network_ && directions.front().size() == 1) {
    const std::string variable = directions.front().front().first.ToString();
    deviation = std::max(deviation, first_deviations_.emplace(variable, deviation).first->second);
  }
  largest_deviation_ = std::max(largest_deviation_, deviation);
  for (Slope& slope : slopes) {
    slope.bound += kDeviations * deviation;
    slope.terms = deviation / error_;
  }
  return slopes;
}

Direction DefinitionGradient::RandomDirection(const std::vector<Variable>& variables, uint64_t seed,
                                              absl::string_view name) {
  Direction direction;
  double squares = 0;
  for (const Variable& variable : variables) {
    const Tensor& x = points_.front().at(variable);
    const double length = Norm(x.view());
    std::vector<Tensor> drawn =
        RandomDirections(x.shape(), 1, seed, absl::StrCat(name, " of ", variable.ToString()));
    for (double& element : drawn[0].span<double>()) element *= length > 0 ? length : 1;
    squares += InnerProduct(drawn[0].view(), drawn[0].view());
    direction.emplace_back(variable, std::move(drawn[0]));
  }
  for (auto& [variable, tensor] : direction) {
    for (double& element : tensor.span<double>()) element /= std::sqrt(squares);
  }
  return direction;
}

absl::StatusOr<Tensor> DefinitionGradient::Partial(const Variable& variable) {
  const Shape shape = points_[0].at(variable).shape();
  Tensor partial(DType::kF64, shape);
  for (int64_t n = 0; n < partial.num_elements(); ++n) {
    Direction direction;
    direction.emplace_back(variable, CoordinateDirection(shape, n));
    TFB_ASSIGN_OR_RETURN(const Derivative derivative, DerivativeAt(&points_[0], direction));
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
