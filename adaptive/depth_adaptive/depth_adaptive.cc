#include "adaptive/depth_adaptive/depth_adaptive.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "adaptive/depth_adaptive/classifier_rule.h"
#include "adaptive/depth_adaptive/max_probability_rule.h"
#include "core/layers/double_rows.h"
#include "core/layers/exits/exit_probabilities.h"
#include "core/layers/exits/exit_stack_definition.h"

namespace tfb::depth_adaptive {
namespace {

using layers::Rows;

using Classifier = DepthAdaptiveOptions::Classifier;

const bool registered = RegisterTechnique<DepthAdaptive>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "depth_adaptive";
  info.family = "adaptive";
  info.title = "Depth-adaptive Transformer";
  info.citation = "Elbayad et al. 2020, arXiv:1910.10073v4, section 3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kApproximate;
  info.budget_option = "level";
  info.growth = 1;
  info.supports_noncausal = false;
  info.selection = layers::kExits;
  return info;
}

std::vector<layers::ParameterSpec> ClassifierParameters(const Problem& problem,
                                                        const DepthAdaptiveOptions& options) {
  if (options.classifier == Classifier::kFixed) return {};
  const int64_t width = problem.model_dim(), layers = options.layers;
  const double deviation = 2 / std::sqrt(static_cast<double>(width));
  if (options.classifier == Classifier::kConfidence) {
    return {{"output", {options.vocabulary, width}, 0, 2 * deviation}};
  }
  const std::string prefix = ClassifierPrefix(options);
  if (options.classifier == Classifier::kGeometric) {
    return {{prefix + "w", {layers - 1, width}, 0, deviation}, {prefix + "b", {layers - 1}, 0, 1}};
  }
  return {{prefix + "w", {width, layers}, 0, deviation}, {prefix + "b", {layers}, 0, 1}};
}

// ---- The definition ----

// The definition's output with the scale of the probabilities' errors, f64 [batch, tokens].
constexpr char kProbabilityScale[] = "exit_probabilities.scale";

// The decisions about one sequence in float64, and its probabilities.
class DefinedClassifier : public layers::DefinedRule {
 public:
  // Where `outputs` have the probabilities, it writes those of this batch row.
  DefinedClassifier(const DepthAdaptiveOptions& options, const NamedTensors& parameters,
                    DType dtype, NamedTensors* outputs, int64_t row, StoppedValues* stopped)
      : options_(options),
        state_error_(layers::StateError(dtype)),
        outputs_(outputs),
        row_(row),
        stopped_(stopped) {
    if (options.classifier == Classifier::kFixed) return;
    if (options.classifier == Classifier::kConfidence) {
      distribution_.emplace(parameters);
      return;
    }
    const ConstTensorView w = parameters.at(ClassifierPrefix(options) + "w").view();
    const ConstTensorView b = parameters.at(ClassifierPrefix(options) + "b").view();
    const bool by_class = options.classifier == Classifier::kGeometric;
    for (int64_t n = 0; n < b.dim(0); ++n) {
      bias_.push_back(b.Get(n));
      weights_.emplace_back();
      for (int64_t c = 0; c < w.dim(by_class ? 1 : 0); ++c) {
        weights_.back().push_back(w.Get(by_class ? w.Offset(n, c) : w.Offset(c, n)));
      }
    }
  }

  void Read(int64_t n, const Rows& after) override {
    if (n == 1 && options_.classifier == Classifier::kMultinomial) RememberStates(after);
    if (n == 1 && options_.classifier == Classifier::kSequence) RememberMeans(after);
    if (!HasProbabilities(options_)) return;
    for (int64_t t = 0; t < after.rows(); ++t) {
      if (options_.classifier == Classifier::kGeometric) {
        ReadGeometric(n, t, after);
      } else if (n == 1) {
        WriteSoftmax(t);
      }
    }
  }

  layers::ExitScore Of(int64_t n, int64_t t, const Rows& after, const Rows&) override {
    switch (options_.classifier) {
      case Classifier::kFixed:
        return {n >= options_.exit ? 1.0 : -1.0, 0};
      case Classifier::kGeometric: {
        const layers::ExitScore z =
            Logit(n - 1, StateOf(after, t));  // above 0 where chi is above 1/2
        return {z.value > 0 ? z.value : std::min(z.value, -DBL_MIN), z.error};
      }
      case Classifier::kConfidence: {
        const layers::ExitProbabilities p = distribution_->Of(
            layers::ExitNorm(n, options_.layers), after[t], after.channels(), state_error_);
        return {p.ascending.back() - ConfidenceThreshold(options_, n), p.error};
      }
      default:
        return ClassifiedState(t) == nullptr ? layers::ExitScore{-1, 0}
                                             : AtMost(n, *ClassifiedState(t));
    }
  }

 private:
  static std::vector<double> StateOf(const Rows& h, int64_t t) {
    return std::vector<double>(h[t], h[t] + h.channels());
  }
  // Returns what a classifier that decides once reads for token t; null where there is nothing.
  const std::vector<double>* ClassifiedState(int64_t t) const {
    if (options_.classifier == Classifier::kMultinomial) return &states_[t];
    const int64_t segment = t / options_.segment;
    return segment == 0 ? nullptr : &states_[segment - 1];
  }

  layers::ExitScore Logit(int64_t n, const std::vector<double>& state) const {
    layers::ExitScore z = {bias_[n], 0};
    double magnitude = 0, largest = 0;
    for (size_t c = 0; c < state.size(); ++c) {
      z.value += weights_[n][c] * state[c];
      magnitude += std::abs(weights_[n][c]);
      largest = std::max(largest, std::abs(state[c]));
    }
    z.error = magnitude * state_error_ * largest;
    return z;
  }

  // Returns a score of at least 0 where the largest logit is one of the first n.
  layers::ExitScore AtMost(int64_t n, const std::vector<double>& state) const {
    double first = -DBL_MAX, rest = -DBL_MAX, error = 0;
    for (int64_t m = 0; m < options_.layers; ++m) {
      const layers::ExitScore z = Logit(m, state);
      double& largest = m < n ? first : rest;
      largest = std::max(largest, z.value);
      error = std::max(error, z.error);
    }
    return {first - rest, 2 * error};
  }

  void RememberStates(const Rows& h) {
    for (int64_t t = 0; t < h.rows(); ++t) states_.push_back(StateOf(h, t));
  }
  void RememberMeans(const Rows& h) {
    for (int64_t begin = 0; begin < h.rows(); begin += options_.segment) {
      const int64_t tokens = std::min(options_.segment, h.rows() - begin);
      std::vector<double>& mean = states_.emplace_back(h.channels());
      for (int64_t t = begin; t < begin + tokens; ++t) {
        for (int64_t c = 0; c < h.channels(); ++c) mean[c] += h[t][c] / static_cast<double>(tokens);
      }
      if (stopped_ != nullptr) stopped_->Hold(absl::MakeSpan(mean));
    }
  }

  // Parts what layers below n have left of the probability of token t. The errors of logits move a
  // probability by at most 1/e of the largest error: the magnitudes of its derivatives sum to
  // (chi (1 - chi) + chi S) prod (1 - chi'), where S = sum chi' and prod (1 - chi') <= exp(-S),
  // which is largest with chi = S = 1.
  void ReadGeometric(int64_t n, int64_t t, const Rows& after) {
    if (n == 1) rest_.resize(after.rows(), {1, 0});
    layers::ExitScore& rest = rest_[t];
    if (n == options_.layers) {
      Write(n, t, rest.value);
      WriteScale(t, rest.error / std::exp(1.0));
      return;
    }
    const layers::ExitScore z = Logit(n - 1, StateOf(after, t));
    const double chi = 1 / (1 + std::exp(-z.value));
    Write(n, t, chi * rest.value);
    rest.value *= 1 - chi;
    rest.error = std::max(rest.error, z.error);
  }

  // A softmax is the sigmoid of a logit less the log-sum-exp of the others, which moves by at most
  // twice their error, and a sigmoid is nowhere steeper than 1/4.
  void WriteSoftmax(int64_t t) {
    std::vector<double> q(options_.layers, 0);
    double error = 0, sum = 0;
    if (const std::vector<double>* state = ClassifiedState(t); state == nullptr) {
      q.back() = sum = 1;
    } else {
      for (int64_t n = 0; n < options_.layers; ++n) {
        const layers::ExitScore z = Logit(n, *state);
        error = std::max(error, z.error);
        q[n] = z.value;
      }
      const double largest = *std::max_element(q.begin(), q.end());
      for (double& each : q) sum += each = std::exp(each - largest);
    }
    for (int64_t n = 0; n < options_.layers; ++n) Write(n + 1, t, q[n] / sum);
    WriteScale(t, error / 2);
  }

  void Write(int64_t n, int64_t t, double q) {
    *outputs_->at(kExitProbabilities).view().MutableAt<double>(row_, t, n - 1) = q;
  }
  // The error is in units of the bound of outputs in f32 (see Technique::Define).
  void WriteScale(int64_t t, double error) {
    *outputs_->at(kProbabilityScale).view().MutableAt<double>(row_, t) =
        error / layers::StateError(DType::kF32);
  }

  const DepthAdaptiveOptions& options_;
  double state_error_;
  NamedTensors* outputs_;
  int64_t row_;
  StoppedValues* stopped_;                                // null where no derivatives are taken
  std::optional<layers::ExitDistribution> distribution_;  // with classifier=confidence
  std::vector<std::vector<double>> weights_;              // of each class
  std::vector<double> bias_;
  std::vector<std::vector<double>> states_;  // h^1 of tokens, or its means over segments
  // Of the geometric classifier: prod (1 - chi) of each token, and the largest error of a logit.
  std::vector<layers::ExitScore> rest_;
};

}  // namespace

double ConfidenceThreshold(const DepthAdaptiveOptions& options, int64_t n) {
  const int64_t last = static_cast<int64_t>(options.thresholds.size()) - 1;
  return static_cast<double>(options.thresholds[std::min(n - 1, last)]) / 1000;
}

DepthAdaptive::DepthAdaptive() : TechniqueOf(Info()) {}

std::vector<TensorSpec> DepthAdaptive::ReadTensors(const Problem& problem,
                                                   const DepthAdaptiveOptions& options) const {
  return layers::ExitStackInputs(problem, options);
}
std::vector<TensorSpec> DepthAdaptive::WrittenTensors(const Problem& problem,
                                                      const DepthAdaptiveOptions& options) const {
  return layers::ExitStackOutputs(problem, options, ProbabilitiesOf(options));
}

absl::Status DepthAdaptive::Check(const Problem& problem,
                                  const DepthAdaptiveOptions& options) const {
  return layers::CheckRelativeStack("depth_adaptive", problem, options);
}

absl::StatusOr<std::unique_ptr<Layer>> DepthAdaptive::MakeLayer(const Problem& problem,
                                                                const DepthAdaptiveOptions& options,
                                                                Device device,
                                                                uint64_t seed) const {
  std::unique_ptr<layers::ExitRule> rule;
  if (options.classifier == Classifier::kConfidence) {
    rule = std::make_unique<MaxProbabilityRule>(device, problem, options);
  } else {
    TFB_ASSIGN_OR_RETURN(rule, ClassifierRule::Create(device, problem, options));
  }
  return layers::MakeExitStack(problem, options, device, seed, std::move(rule),
                               ClassifierParameters(problem, options));
}

absl::Status DepthAdaptive::Definition(const Problem& problem, const DepthAdaptiveOptions& options,
                                       const NamedTensors& parameters, const Inputs& inputs,
                                       const DefinitionRequest& request,
                                       NamedTensors* outputs) const {
  std::vector<layers::ParameterSpec> specs =
      layers::ExitStackParameters(layers::ShapeOf(problem, options).sizes);
  for (layers::ParameterSpec& spec : ClassifierParameters(problem, options)) specs.push_back(spec);
  TFB_RETURN_IF_ERROR(layers::CheckParameters(specs, parameters));
  NamedTensors probabilities;
  if (HasProbabilities(options)) {
    const int64_t batch = problem.batch, tokens = problem.query_tokens;
    probabilities[kExitProbabilities] = Tensor(DType::kF64, {batch, tokens, options.layers});
    probabilities[kProbabilityScale] = Tensor(DType::kF64, {batch, tokens});
  }
  const auto rule = [&](int64_t b) {
    return std::make_unique<DefinedClassifier>(options, parameters, problem.dtype, &probabilities,
                                               b, request.stopped);
  };
  TFB_ASSIGN_OR_RETURN(
      *outputs, layers::DefineExitStack(problem, options, parameters, inputs, request, rule));
  outputs->merge(std::move(probabilities));
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> DepthAdaptive::Counterpart(const Problem&,
                                                         const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole, Canonical(options));
  whole["classifier"] = "fixed";
  whole["exit"] = "32";
  return TechniqueSpec{info().name, std::move(whole)};
}

}  // namespace tfb::depth_adaptive
