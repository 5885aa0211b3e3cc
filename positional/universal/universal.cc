#include "positional/universal/universal.h"

#include <memory>
#include <utility>

#include "attention/multi_head/encoded_attention.h"
#include "core/definition.h"
#include "core/status.h"
#include "positional/sinusoidal/sinusoidal.h"

namespace tfb {
namespace {

using Time = UniversalOptions::Time;

const bool registered = RegisterTechnique<Universal>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "universal";
  info.family = "positional";
  info.title = "Universal Transformer's encoding of position and time";
  info.citation = "Dehghani et al. 2019, arXiv:1807.03819v3, section 2.1";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

EncodedAttentionPlan PlanOf(const UniversalOptions& options) {
  EncodedAttentionPlan plan;
  plan.inner = options.inner;
  plan.bias = options.bias;
  plan.applications = options.steps;
  plan.shared = true;
  plan.rows_added = options.time == Time::kLearned ? options.steps : 0;
  return plan;
}

absl::StatusOr<Encodings> PositionsAndTimes(const Problem& problem, const UniversalOptions& options,
                                            const NamedTensors& parameters) {
  const int64_t width = problem.model_dim();
  Encodings encodings;
  encodings.repeat = true;
  TFB_ASSIGN_OR_RETURN(encodings.positions, Sinusoids(options.position_offset, problem.query_tokens,
                                                      width, options.form));
  if (options.time == Time::kLearned) {
    encodings.times = parameters.at("t").Clone();
    return encodings;
  }
  TFB_ASSIGN_OR_RETURN(encodings.times,
                       Sinusoids(options.first_step, options.steps, width, options.form));
  return encodings;
}

}  // namespace

Universal::Universal() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Universal::ReadTensors(const Problem& problem,
                                               const UniversalOptions&) const {
  return EncodedAttentionInputs(problem);
}

absl::StatusOr<std::unique_ptr<Layer>> Universal::MakeLayer(const Problem& problem,
                                                            const UniversalOptions& options,
                                                            Device device, uint64_t seed) const {
  std::vector<ParameterSpec> own;
  if (options.time == Time::kLearned) {
    own.push_back({"t", {options.steps, problem.model_dim()}, 0, 1});
  }
  const auto encode = [=](const NamedTensors& parameters) {
    return PositionsAndTimes(problem, options, parameters);
  };
  return CreateEncodedAttention(problem, PlanOf(options), own, encode, device, seed);
}

absl::Status Universal::Definition(const Problem& problem, const UniversalOptions& options,
                                   const NamedTensors& parameters, const Inputs& inputs,
                                   const DefinitionRequest& request, NamedTensors* outputs) const {
  const bool learned = options.time == Time::kLearned;
  const DoubleTensor times(learned ? parameters.at("t").view() : ConstTensorView());
  const auto sinusoid = [&](int64_t p, int64_t c) {
    return DefineSinusoid(options.form, problem.model_dim(), p, c);
  };
  const auto encoding = [&](int64_t n, int64_t p, int64_t c) {
    const double time = learned ? times.Row(n)[c] : sinusoid(options.first_step + n, c);
    return sinusoid(options.position_offset + p, c) + time;
  };
  return DefineEncodedAttention(problem, PlanOf(options), encoding, parameters, inputs, request,
                                outputs);
}

absl::StatusOr<TechniqueSpec> Universal::Counterpart(const Problem& problem,
                                                     const Options& options) const {
  return WithCounterpartInside<UniversalOptions>(*this, problem, options);
}

}  // namespace tfb
