// Tests DepthAdaptive with trained weights against PyTorch.
#include "adaptive/depth_adaptive/depth_adaptive.h"
#include "adaptive/depth_adaptive/trained_exits.h"
#include "gtest/gtest.h"

namespace tfb::depth_adaptive {
namespace {

TEST(TrainedDepthAdaptive, BytesLeaveWhereTheyDoInPyTorchAndAreAsLikely) {
  ExpectTrainedExits(
      DepthAdaptive(), "adaptive/depth_adaptive/testdata/trained.safetensors",
      {{"geometric", {{"classifier", "geometric"}, {"level", "2"}}},
       {"multinomial", {{"classifier", "multinomial"}, {"oracle", "correctness"}, {"level", "3"}}},
       {"sequence", {{"classifier", "sequence"}, {"level", "1"}}},
       {"confidence", {{"classifier", "confidence"}, {"thresholds", "900/800/700/600/500"}}}});
}

}  // namespace
}  // namespace tfb::depth_adaptive
