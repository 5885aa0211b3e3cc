// Tests Calm with trained weights against PyTorch.
#include "adaptive/calm/calm.h"
#include "adaptive/depth_adaptive/trained_exits.h"
#include "gtest/gtest.h"

namespace tfb::calm {
namespace {

TEST(TrainedCalm, BytesLeaveWhereTheyDoInPyTorchAndAreAsLikely) {
  depth_adaptive::ExpectTrainedExits(
      Calm(), "adaptive/calm/testdata/trained.safetensors",
      {{"softmax", {{"confidence", "softmax"}, {"threshold", "0.8"}}},
       {"saturation", {{"confidence", "saturation"}, {"threshold", "0.95"}}},
       {"classifier", {{"confidence", "classifier"}, {"threshold", "0.9"}}}});
}

}  // namespace
}  // namespace tfb::calm
