#include "core/cuda/for_each.cuh"
#include "core/linear/linear_backward_steps.h"

namespace tfb {

TFB_FOR_EACH(LinearSummariseKeys);
TFB_FOR_EACH(LinearRunThroughKeys);
TFB_FOR_EACH(LinearRunThroughChunk);
TFB_FOR_EACH(LinearScanKeys);
TFB_FOR_EACH(LinearSummariseQueries);
TFB_FOR_EACH(LinearRunThroughQueries);
TFB_FOR_EACH(LinearScanQueries);
TFB_FOR_EACH(LinearSummariseChain);
TFB_FOR_EACH(LinearRunThroughChain);
TFB_FOR_EACH(LinearFinishChain);
TFB_FOR_EACH(LinearAddMatrixParts);
TFB_FOR_EACH(LinearAddGateParts);
TFB_FOR_EACH(LinearStoreSums);
TFB_FOR_EACH(ThroughChannelScale);

}  // namespace tfb
