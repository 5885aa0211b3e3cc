#include "adaptive/calm/calm.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "adaptive/calm/confidence_rule.h"
#include "core/layers/double_rows.h"
#include "core/layers/exits/exit_probabilities.h"
#include "core/layers/exits/exit_stack_definition.h"

namespace tfb::calm {
namespace {

using layers::ExitScore;
using layers::ParameterSpec;
using layers::Rows;

const bool registered = RegisterTechnique<Calm>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "calm";
  info.family = "adaptive";
  info.title = "Confident adaptive language modeling";
  info.citation = "Schuster et al. 2022, arXiv:2207.07061v2, sections 3 and 4";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kApproximate;
  info.budget_option = "threshold";
  info.growth = 1;
  info.supports_noncausal = false;
  info.selection = layers::kExits;
  return info;
}

std::vector<ParameterSpec> ConfidenceParameters(const Problem& problem,
                                                const CalmOptions& options) {
  const int64_t width = problem.model_dim();
  const double deviation = 1 / std::sqrt(static_cast<double>(width));
  if (options.confidence == Confidence::kSoftmax) {
    return {{"output", {options.vocabulary, width}, 0, 4 * deviation}};
  }
  std::vector<ParameterSpec> specs;
  for (int64_t n = 1; options.confidence == Confidence::kClassifier && n < options.layers; ++n) {
    specs.push_back({layers::ExitPrefix(n - 1) + ".confidence.w", {width}, 0, deviation});
    specs.push_back({layers::ExitPrefix(n - 1) + ".confidence.b", {1}, 0, 0});
  }
  return specs;
}

// ---- The definition ----

double DefinedThreshold(const CalmOptions& options, int64_t t, int64_t tokens) {
  const double lambda = options.threshold;
  if (options.schedule == CalmOptions::Schedule::kConstant || lambda > 1) return lambda;
  const double decayed =
      std::exp(-options.temperature * static_cast<double>(t) / static_cast<double>(tokens));
  const double first = options.schedule == CalmOptions::Schedule::kT5x ? lambda : 1;
  return std::clamp(0.9 * lambda + 0.1 * first * decayed, 0.0, 1.0);
}

constexpr char kLogitScale[] = "confidence_logits.scale";

// The confidences of one sequence in float64, with bounds of the error of a layer's: its states
// have an error of `state_error` of the largest channel. Where `outputs` have the logits of classifiers,
// it writes those of this batch row.
class DefinedConfidence : public layers::DefinedRule {
 public:
  DefinedConfidence(const Problem& problem, const CalmOptions& options,
                    const NamedTensors& parameters, NamedTensors* outputs, int64_t row)
      : tokens_(problem.query_tokens),
        options_(options),
        parameters_(parameters),
        state_error_(layers::StateError(problem.dtype)),
        outputs_(outputs),
        row_(row) {
    if (options.confidence == Confidence::kSoftmax) distribution_.emplace(parameters);
  }

  // The error is in units of the bound of outputs in f32 (see Technique::Define).
  void Read(int64_t n, const Rows& after) override {
    if (n == options_.layers || outputs_->count(kConfidenceLogits) == 0) return;
    const TensorView logits = outputs_->at(kConfidenceLogits).view();
    for (int64_t t = 0; t < after.rows(); ++t) {
      const ExitScore z = Logit(n, after[t], after.channels());
      *logits.MutableAt<double>(row_, t, n - 1) = z.value;
      double& scale = *outputs_->at(kLogitScale).view().MutableAt<double>(row_, t);
      const double error = z.error / layers::StateError(DType::kF32);
      scale = n == 1 ? error : std::max(scale, error);
    }
  }

  ExitScore Of(int64_t n, int64_t t, const Rows& after, const Rows& before) override {
    ExitScore score = ConfidenceOf(n, t, after, before);
    score.value -= DefinedThreshold(options_, t, tokens_);
    return score;
  }

 private:
  ExitScore ConfidenceOf(int64_t n, int64_t t, const Rows& after, const Rows& before) const {
    switch (options_.confidence) {
      case Confidence::kSoftmax:
        return Softmax(n, after[t], after.channels());
      case Confidence::kSaturation:
        return Saturation(n, after[t], before[t], after.channels());
      default:
        return Classifier(n, after[t], after.channels());
    }
  }

  static double Largest(const double* x, int64_t channels) {
    double largest = 0;
    for (int64_t c = 0; c < channels; ++c) largest = std::max(largest, std::abs(x[c]));
    return largest;
  }

  ExitScore Softmax(int64_t n, const double* h, int64_t channels) const {
    const layers::ExitProbabilities p =
        distribution_->Of(layers::ExitNorm(n, options_.layers), h, channels, state_error_);
    return {p.ascending.back() - p.ascending[p.ascending.size() - 2], 2 * p.error};
  }

  // The directions of both states change by at most their error over their length.
  ExitScore Saturation(int64_t n, const double* h, const double* before, int64_t channels) const {
    if (n == 1) return {-1, 0};
    double dot = 0, of_h = 0, of_before = 0;
    for (int64_t c = 0; c < channels; ++c) {
      dot += h[c] * before[c];
      of_h += h[c] * h[c];
      of_before += before[c] * before[c];
    }
    const double length = std::sqrt(static_cast<double>(channels)) * state_error_;
    return {dot / std::sqrt(of_h * of_before),
            length * (Largest(h, channels) / std::sqrt(of_h) +
                      Largest(before, channels) / std::sqrt(of_before))};
  }

  // A sigmoid is nowhere steeper than 1/4.
  ExitScore Classifier(int64_t n, const double* h, int64_t channels) const {
    const ExitScore z = Logit(n, h, channels);
    return {1 / (1 + std::exp(-z.value)), z.error / 4};
  }

  ExitScore Logit(int64_t n, const double* h, int64_t channels) const {
    const std::string prefix = layers::ExitPrefix(n - 1) + ".confidence.";
    const ConstTensorView w = parameters_.at(prefix + "w").view();
    double z = parameters_.at(prefix + "b").view().Get(0), magnitude = 0;
    for (int64_t c = 0; c < channels; ++c) {
      z += w.Get(c) * h[c];
      magnitude += std::abs(w.Get(c));
    }
    return {z, magnitude * state_error_ * Largest(h, channels)};
  }

  int64_t tokens_;
  const CalmOptions& options_;
  const NamedTensors& parameters_;
  double state_error_;
  NamedTensors* outputs_;
  int64_t row_;
  std::optional<layers::ExitDistribution> distribution_;  // of the softmax
};

}  // namespace

Calm::Calm() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Calm::ReadTensors(const Problem& problem,
                                          const CalmOptions& options) const {
  return layers::ExitStackInputs(problem, options);
}
std::vector<TensorSpec> Calm::WrittenTensors(const Problem& problem,
                                             const CalmOptions& options) const {
  return layers::ExitStackOutputs(problem, options, LogitsOf(options));
}

absl::Status Calm::Check(const Problem& problem, const CalmOptions& options) const {
  return layers::CheckRelativeStack("calm", problem, options);
}

absl::StatusOr<std::unique_ptr<Layer>> Calm::MakeLayer(const Problem& problem,
                                                       const CalmOptions& options, Device device,
                                                       uint64_t seed) const {
  return layers::MakeExitStack(problem, options, device, seed,
                               std::make_unique<ConfidenceRule>(device, problem, options),
                               ConfidenceParameters(problem, options));
}

absl::Status Calm::Definition(const Problem& problem, const CalmOptions& options,
                              const NamedTensors& parameters, const Inputs& inputs,
                              const DefinitionRequest& request, NamedTensors* outputs) const {
  std::vector<ParameterSpec> specs =
      layers::ExitStackParameters(layers::ShapeOf(problem, options).sizes);
  for (ParameterSpec& spec : ConfidenceParameters(problem, options)) specs.push_back(spec);
  TFB_RETURN_IF_ERROR(layers::CheckParameters(specs, parameters));
  NamedTensors logits;
  if (const layers::RuleOutput output = LogitsOf(options); output.exists()) {
    const int64_t batch = problem.batch, tokens = problem.query_tokens;
    logits[output.name] = Tensor(DType::kF64, {batch, tokens, output.columns});
    logits[kLogitScale] = Tensor(DType::kF64, {batch, tokens});
  }
  const auto rule = [&](int64_t b) {
    return std::make_unique<DefinedConfidence>(problem, options, parameters, &logits, b);
  };
  TFB_ASSIGN_OR_RETURN(
      *outputs, layers::DefineExitStack(problem, options, parameters, inputs, request, rule));
  outputs->merge(std::move(logits));
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> Calm::Counterpart(const Problem&, const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole, Canonical(options));
  whole["threshold"] = "2";
  return TechniqueSpec{info().name, std::move(whole)};
}

}  // namespace tfb::calm
