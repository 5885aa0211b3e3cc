#include "positional/alibi/alibi.h"

#include <cmath>
#include <cstdlib>
#include <memory>

#include "core/definition.h"
#include "core/flash/flash_layer.h"

namespace tfb::alibi {
namespace {

const bool registered = RegisterTechnique<Alibi>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "alibi";
  info.family = "positional";
  info.title = "ALiBi linear biases";
  info.citation = "Press, Smith, Lewis 2022, arXiv:2108.12409v2, section 3";
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

class AlibiLayer : public FlashLayer {
 public:
  AlibiLayer(const Problem& problem, Device device)
      : FlashLayer(problem, QkvInputs(problem), AttentionOutputs(problem), device,
                   std::make_unique<FullPattern>(problem.kv_tokens)) {
    Tensor slopes(DType::kF32, {problem.query_heads});
    const std::vector<double> values = AlibiSlopes(problem.query_heads);
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      slopes.span<float>()[h] = static_cast<float>(values[h]);
    }
    parameters_["slopes"] = std::move(slopes);
  }

 protected:
  absl::Status BuildRule(const Inputs&, const Execution&, ScoreRule* rule) override {
    const absl::Span<const float> slopes = parameters_.at("slopes").span<float>();
    const Problem& p = problem();
    bias_ =
        DistanceTable(p.query_heads, p.query_tokens, p.kv_tokens, [&](int64_t h, int64_t offset) {
          return -slopes[h] * static_cast<float>(std::abs(p.causal_offset() - offset));
        });
    rule->bias = &bias_;
    return absl::OkStatus();
  }
  double FlopsPerPair() const override { return FlashLayer::FlopsPerPair() + 1; }

 private:
  DistanceTable bias_;
};

}  // namespace

std::vector<double> AlibiSlopes(int64_t heads) {
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  const auto slope = [](int64_t h, int64_t of) {
    return std::exp2(-8.0 * static_cast<double>(h) / static_cast<double>(of));
  };
  std::vector<double> slopes;
  for (int64_t h = 1; h <= power; ++h) slopes.push_back(slope(h, power));
  for (int64_t h = 1; static_cast<int64_t>(slopes.size()) < heads; h += 2) {
    slopes.push_back(slope(h, 2 * power));
  }
  return slopes;
}

Alibi::Alibi() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Alibi::MakeLayer(const Problem& problem, const AlibiOptions&,
                                                        Device device, uint64_t) const {
  return std::make_unique<AlibiLayer>(problem, device);
}

absl::Status Alibi::Definition(const Problem& problem, const AlibiOptions&,
                               const NamedTensors& parameters, const Inputs& inputs,
                               const DefinitionRequest& request, NamedTensors* outputs) const {
  const DoubleTensor slopes(parameters.at("slopes").view());
  DefineMaskedAttention(
      problem, inputs, request, 0, [](int64_t, int64_t, int64_t) { return true; },
      [&](int64_t, int64_t h, int64_t i, int64_t j) {
        return -slopes.at(h) * std::abs(static_cast<double>(i + problem.causal_offset() - j));
      },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::alibi
