#include "adaptive/decision_transformer/decision_transformer_functors.h"
#include "core/cuda/for_each.cuh"

namespace tfb::decision_transformer {

TFB_FOR_EACH_IN_ROWS(EmbeddingOfTimesteps);
TFB_FOR_EACH(LinkTokens);
TFB_FOR_EACH_IN_ROWS(AddChains);

}  // namespace tfb::decision_transformer
