#include "positional/transformer_xl_relative/transformer_xl_relative.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"
#include "core/layers/attention/relative_positions.h"

namespace tfb::transformer_xl_relative {
namespace {

constexpr int64_t kMaxWidth = 16384;  // the largest width, at which W_r is 1 GiB

// The terms of relative positions: u, v, and the keys r_d W_r of the distances.
class PositionTerm : public ScoreTerm {
 public:
  PositionTerm(const NamedTensors& parameters, int64_t max_distance)
      : parameters_(parameters), max_distance_(max_distance) {}

  absl::Status Build(const Problem& p, ThreadPool* pool) override {
    here_ = p.causal_offset();
    sinusoids_ = layers::SinusoidsOf(RangeOf(p), p.model_dim());
    TFB_ASSIGN_OR_RETURN(
        positions_, layers::RelativePositions::Create(Parameters(), RangeOf(p), sinusoids_.view(),
                                                      here_, p.dtype, pool));
    return absl::OkStatus();
  }
  void AddTo(ScoreRule* rule) const override { positions_.AddTo(rule); }
  double FlopsPerPair(const Problem& p) const override {
    return 2.0 * static_cast<double>(p.head_dim);
  }
  bool has_relative_keys() const override { return true; }

  void LayOutGradients(Device device, const Problem& p, Workspace* workspace) override {
    device_ = device;
    if (device == Device::kCpu) return gradients_.LayOut(p, RangeOf(p), p.model_dim(), workspace);
    problem_ = p;
    device_sums_ = layers::DevicePositionGradients::Sums(p, RangeOf(p), workspace);
  }
  ScoreSums sums() const override {
    ScoreSums sums = ScoreSums::OfRelativeKeys();
    sums.content_bias = true;
    return sums;
  }
  void BindGradients(const Outputs&, ScoreGradients* gradients) const override {
    if (device_ == Device::kCpu) return gradients_.Bind(gradients);
    device_sums_.Bind(gradients);
  }
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients) override {
    if (device == Device::kCpu) return absl::OkStatus();
    return on_device_.SetUp(device, problem_, RangeOf(problem_), Parameters(), positions_,
                            sinusoids_.view(), here_, gradients);
  }
  double GradientFlops(const Problem& p) const override {
    const double width = static_cast<double>(p.model_dim());
    return 2 * static_cast<double>(RangeOf(p).rows()) * width * width;  // dW_r
  }
  absl::Status AddGradients(const ParameterGradients& gradients,
                            const Execution& execution) const override {
    if (device_ != Device::kCpu) return on_device_.AddTo(device_sums_, gradients, execution);
    gradients_.AddTo(Parameters(), positions_, sinusoids_.view(), here_, gradients, execution.pool);
    return absl::OkStatus();
  }

 private:
  layers::DistanceRange RangeOf(const Problem& p) const {
    layers::DistanceRange range;
    range.first = p.causal ? std::max<int64_t>(0, 1 - p.query_tokens) : 1 - p.query_tokens;
    range.last = p.kv_tokens - 1;
    range.clamp = max_distance_;
    return range;
  }
  layers::RelativePositions::Parameters Parameters() const {
    return {parameters_.at("w_r").view(), parameters_.at("u").view(), parameters_.at("v").view()};
  }

  const NamedTensors& parameters_;
  int64_t max_distance_;
  int64_t here_ = 0;
  Tensor sinusoids_;
  layers::RelativePositions positions_;
  Device device_ = Device::kCpu;
  layers::RelativePositionGradients gradients_;
  Problem problem_;  // of the backward pass on CUDA
  layers::DevicePositionGradients on_device_;
  layers::DevicePositionGradients::Sums device_sums_;
};

// Returns r_d W_r for the distances first, first + 1, ..., [heads, distances, head_dim]. In 16-bit
// problems r_d is rounded to fp32, and the product to the problem's dtype.
DoubleTensor DefinePositions(const Problem& problem, int64_t clamp, const DoubleTensor& w_r,
                             int64_t first, int64_t distances) {
  const int64_t width = problem.model_dim(), sines = (width + 1) / 2;
  const bool rounds = problem.dtype != DType::kF32;
  Tensor table(rounds ? problem.dtype : DType::kF64,
               {problem.query_heads, distances, problem.head_dim});
  for (int64_t n = 0; n < distances; ++n) {
    int64_t d = first + n;
    if (clamp > 0) d = std::min(std::max(d, -clamp), clamp);
    std::vector<double> product(width);
    for (int64_t m = 0; m < width; ++m) {
      const double exponent = 2 * static_cast<double>(m % sines) / static_cast<double>(width);
      const double angle = static_cast<double>(d) / std::pow(10000, exponent);
      double r = m < sines ? std::sin(angle) : std::cos(angle);
      if (rounds) r = static_cast<float>(r);
      for (int64_t c = 0; c < width; ++c) product[c] += r * w_r.Row(m)[c];
    }
    for (int64_t c = 0; c < width; ++c) {
      const int64_t h = c / problem.head_dim;
      table.view().Set(table.view().Offset(h, n, c % problem.head_dim), product[c]);
    }
  }
  return DoubleTensor(table.view());
}

class TransformerXlRelative : public FlashTechnique<TransformerXlRelativeOptions> {
 public:
  TransformerXlRelative()
      : FlashTechnique({"transformer_xl_relative", "positional",
                        "Transformer-XL relative positions",
                        "Dai et al. 2019, arXiv:1901.02860v3, section 3.3"}) {}

 private:
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    const Problem& p = job.problem;
    if (p.query_heads > kMaxWidth / p.head_dim) {
      return absl::UnimplementedError(absl::StrCat(
          "transformer_xl_relative has a matrix of (query_heads head_dim)^2 numbers: query_heads "
          "is ",
          p.query_heads, "; allowed with head_dim ", p.head_dim, " are 1 to ",
          kMaxWidth / p.head_dim));
    }
    constexpr double kDeviation = 0.02;
    const Shape of_heads = {p.query_heads, p.head_dim};
    return DrawNormal(job.seed, {{"w_r", {p.model_dim(), p.model_dim()}, kDeviation},
                                 {"u", of_heads, kDeviation},
                                 {"v", of_heads, kDeviation}});
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    return FlashPlan(job.problem).Add<PositionTerm>(job.parameters, job.options.max_distance);
  }

  absl::Status Definition(const Problem& problem, const TransformerXlRelativeOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k")), w_r(parameters, "w_r"),
        u(parameters, "u"), v(parameters, "v");
    const KeyMask is_token(inputs);
    const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
    const int64_t nearest = problem.causal ? 0 : -problem.query_tokens;
    const DoubleTensor positions = DefinePositions(problem, options.max_distance, w_r, nearest,
                                                   problem.kv_tokens - nearest + 1);
    DefineAttention(
        problem, inputs, request,
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const int64_t d = i + problem.causal_offset() - j;
          if ((problem.causal && d < 0) || !is_token(b, j)) return kNotSeen;
          const double* query = q.Row(b, h, i);
          const double* key = k.Row(b, h / problem.group(), j);
          const double* position = positions.Row(h, d - nearest);
          double score = 0;
          for (int64_t c = 0; c < problem.head_dim; ++c) {
            score += (query[c] + u.Row(h)[c]) * key[c] + (query[c] + v.Row(h)[c]) * position[c];
          }
          return scale * score;
        },
        outputs);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<TransformerXlRelative>();

}  // namespace
}  // namespace tfb::transformer_xl_relative
