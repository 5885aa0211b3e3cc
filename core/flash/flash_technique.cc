#include "core/flash/flash_technique.h"

#include <utility>

#include "core/random.h"

namespace tfb {

absl::StatusOr<NamedTensors> DrawNormal(uint64_t seed,
                                        const std::vector<NormalParameter>& parameters) {
  NamedTensors drawn;
  for (const NormalParameter& parameter : parameters) {
    TFB_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(parameter.dtype, parameter.shape));
    FillNormal(&tensor, seed, parameter.name, /*mean=*/0, parameter.deviation);
    drawn[parameter.name] = std::move(tensor);
  }
  return drawn;
}

TechniqueInfo SparseSelfAttention(TechniqueInfo info, std::string budget_option, double growth,
                                  Masking masking) {
  info.budget_option = std::move(budget_option);
  info.growth = growth;
  info.supports_causal = masking != Masking::kBidirectional;
  info.supports_noncausal = masking != Masking::kCausal;
  info.self_attention = true;
  return info;
}

}  // namespace tfb
