#include "positional/sinusoidal/sinusoidal.h"

#include <cmath>
#include <memory>
#include <utility>

#include "attention/multi_head/encoded_attention.h"
#include "core/status.h"

namespace tfb::sinusoidal {
namespace {

const bool registered = RegisterTechnique<Sinusoidal>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "sinusoidal";
  info.family = "positional";
  info.title = "Sinusoidal position encoding";
  info.citation = "Vaswani et al. 2017, arXiv:1706.03762v7, section 3.5";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.growth = 2;
  return info;
}

multi_head::EncodedAttentionPlan PlanOf(const Problem& problem, const SinusoidalOptions& options) {
  multi_head::EncodedAttentionPlan plan;
  plan.inner = options.inner;
  plan.bias = options.bias;
  if (options.embedding_scale == SinusoidalOptions::Scale::kSqrtModelDim) {
    plan.scale = std::sqrt(static_cast<double>(problem.model_dim()));
  }
  return plan;
}

}  // namespace

double DefineSinusoid(const SinusoidForm& form, int64_t channels, int64_t p, int64_t c) {
  const int64_t sines = channels - channels / 2;
  const bool interleaved = form.layout == SinusoidLayout::kInterleaved;
  const bool is_sine = interleaved ? c % 2 == 0 : c < sines;
  const int64_t j = interleaved ? c / 2 : c % sines;
  double wavelengths = static_cast<double>(channels) / 2;
  if (form.frequencies == SinusoidFrequencies::kInclusive) {
    wavelengths = static_cast<double>(sines) - 1;
  }
  const double exponent = j == 0 ? 0 : static_cast<double>(j) / wavelengths;
  const double angle = static_cast<double>(p) / std::pow(form.base, exponent);
  return is_sine ? std::sin(angle) : std::cos(angle);
}

Sinusoidal::Sinusoidal() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Sinusoidal::ReadTensors(const Problem& problem,
                                                const SinusoidalOptions& options) const {
  return multi_head::EncodedAttentionInputs(problem, PlanOf(problem, options));
}

absl::StatusOr<std::unique_ptr<Layer>> Sinusoidal::MakeLayer(const Problem& problem,
                                                             const SinusoidalOptions& options,
                                                             Device device, uint64_t seed) const {
  const auto encode = [=](const NamedTensors&) -> absl::StatusOr<multi_head::Encodings> {
    TFB_ASSIGN_OR_RETURN(Tensor table, Sinusoids(options.position_offset, problem.query_tokens,
                                                 problem.model_dim(), options.form));
    multi_head::Encodings encodings;
    encodings.positions = std::move(table);
    return encodings;
  };
  return multi_head::CreateEncodedAttention(problem, PlanOf(problem, options), {}, encode, device,
                                            seed);
}

absl::Status Sinusoidal::Definition(const Problem& problem, const SinusoidalOptions& options,
                                    const NamedTensors& parameters, const Inputs& inputs,
                                    const DefinitionRequest& request, NamedTensors* outputs) const {
  const auto encoding = [&](int64_t, int64_t p, int64_t c) {
    return DefineSinusoid(options.form, problem.model_dim(), options.position_offset + p, c);
  };
  return multi_head::DefineEncodedAttention(problem, PlanOf(problem, options), encoding, parameters,
                                            inputs, request, outputs);
}

absl::StatusOr<TechniqueSpec> Sinusoidal::Counterpart(const Problem& problem,
                                                      const Options& options) const {
  return multi_head::WithCounterpartInside<SinusoidalOptions>(*this, problem, options);
}

}  // namespace tfb::sinusoidal
