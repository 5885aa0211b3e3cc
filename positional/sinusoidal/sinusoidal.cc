#include "positional/sinusoidal/sinusoidal.h"

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "core/layers/attention/encoded_attention.h"
#include "core/layers/layer_definitions.h"
#include "core/status.h"

namespace tfb::sinusoidal {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "sinusoidal";
  info.family = "positional";
  info.title = "Sinusoidal position encoding";
  info.citation = "Vaswani et al. 2017, arXiv:1706.03762v7, section 3.5";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.self_attention = true;
  return info;
}

layers::EncodedAttentionPlan PlanOf(const Problem& problem, const SinusoidalOptions& options) {
  layers::EncodedAttentionPlan plan;
  plan.inner.specs = {options.inner};
  plan.bias = options.bias;
  if (options.embedding_scale == SinusoidalOptions::Scale::kSqrtModelDim) {
    plan.scale = std::sqrt(static_cast<double>(problem.model_dim()));
  }
  return plan;
}

class Sinusoidal : public TechniqueOf<SinusoidalOptions> {
 public:
  Sinusoidal() : TechniqueOf(Info()) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    return layers::WithCounterpartInside<SinusoidalOptions>(*this, problem, options);
  }

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const SinusoidalOptions& options) const override {
    return layers::EncodedAttentionInputs(problem, PlanOf(problem, options));
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const SinusoidalOptions& options, Device device,
                                                   uint64_t seed) const override {
    const auto encode = [=](const NamedTensors&) -> absl::StatusOr<layers::Encodings> {
      TFB_ASSIGN_OR_RETURN(Tensor table, Sinusoids(options.position_offset, problem.query_tokens,
                                                   problem.model_dim(), options.form));
      layers::Encodings encodings;
      encodings.positions = std::move(table);
      return encodings;
    };
    return layers::CreateEncodedAttention(problem, PlanOf(problem, options), {}, encode, device,
                                          seed);
  }

  absl::Status Definition(const Problem& problem, const SinusoidalOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const auto encoding = [&](int64_t, int64_t p, int64_t c) {
      return layers::DefineSinusoid(options.form, problem.model_dim(), options.position_offset + p,
                                    c);
    };
    return layers::DefineEncodedAttention(problem, PlanOf(problem, options), encoding, parameters,
                                          inputs, request, outputs);
  }
};

const bool registered = RegisterTechnique<Sinusoidal>();

}  // namespace
}  // namespace tfb::sinusoidal
