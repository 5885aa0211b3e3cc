#include "positional/universal/universal.h"

#include <memory>
#include <utility>
#include <vector>

#include "core/layers/attention/encoded_attention.h"

namespace tfb::universal {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "universal";
  info.family = "positional";
  info.title = "Universal Transformer's encoding of position and time";
  info.citation = "Dehghani et al. 2019, arXiv:1807.03819v3, section 2.1";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.self_attention = true;
  return info;
}

layers::EncodedAttentionPlan PlanOf(const UniversalOptions& options) {
  layers::EncodedAttentionPlan plan;
  plan.inner.specs = {options.inner};
  plan.bias = options.bias;
  plan.recompute = options.recompute;
  plan.applications = options.steps;
  plan.shared = true;
  plan.rows_added =
      options.encoding.time == layers::PositionTime::Time::kLearned ? options.steps : 0;
  plan.times_parameter = "t";
  return plan;
}

class Universal : public TechniqueOf<UniversalOptions> {
 public:
  Universal() : TechniqueOf(Info()) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    return layers::WithCounterpartInside<UniversalOptions>(*this, problem, options);
  }

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const UniversalOptions& options) const override {
    return layers::EncodedAttentionInputs(problem, PlanOf(options));
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const UniversalOptions& options, Device device,
                                                   uint64_t seed) const override {
    const int64_t width = problem.model_dim();
    const auto encode = [=](const NamedTensors& parameters) {
      return layers::PositionsAndTimes(options.encoding, problem.query_tokens, options.steps, width,
                                       parameters);
    };
    return layers::CreateEncodedAttention(
        problem, PlanOf(options), layers::TimeParameters(options.encoding, options.steps, width),
        encode, device, seed);
  }

  absl::Status Definition(const Problem& problem, const UniversalOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    return layers::DefineEncodedAttention(
        problem, PlanOf(options),
        layers::DefinedPositionTime(options.encoding, problem.model_dim(), parameters), parameters,
        inputs, request, outputs);
  }
};

const bool registered = RegisterTechnique<Universal>();

}  // namespace
}  // namespace tfb::universal
