// Tests that layers of a device run and go backward in the memory of that device.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/status.h"
#include "core/tested_devices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/evaluate.h"
#include "harness/testing/tiny_functors.h"

namespace tfb {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 5, kChannels = 8;
constexpr int64_t kNumbers = kTokens * kChannels;

// Says which memory of a backward pass a layer leaves by one element.
enum class Overrun { kNone, kGradient, kParameter, kKept, kWorkspace };

// A layer whose kernels access all memory of a backward pass: the output is the input, which a run
// keeps; the gradient of the input is that of the output, by way of the workspace, and the gradient
// of the parameter is what the run has kept.
class CopyingLayer : public Layer {
 public:
  CopyingLayer(const Problem& problem, CudaTarget target, Overrun overrun)
      : Layer(problem, HiddenInputs(problem), HiddenOutputs(problem)),
        target_(target),
        overrun_(overrun) {
    parameters_["w"] = Tensor(DType::kF32, {kTokens, kChannels});
    Fill(parameters_["w"].view(), 1);
  }
  size_t workspace_bytes(int) const override { return 0; }
  size_t backward_workspace_bytes(int) const override { return kNumbers * sizeof(float); }
  size_t kept_bytes() const override { return kNumbers * sizeof(float); }
  Cost cost() const override { return {}; }
  absl::Status CheckBackward() const override { return absl::OkStatus(); }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    const ConstTensorView x = inputs.Get("x");
    TFB_RETURN_IF_ERROR(Copy(x.data, outputs.Get("out").mutable_data(), Overrun::kNone, execution));
    if (execution.kept.empty()) return absl::OkStatus();
    return Copy(x.data, execution.kept.data(), Overrun::kKept, execution);
  }
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    std::byte* const workspace = execution.workspace.data();
    TFB_RETURN_IF_ERROR(
        Copy(call.output_gradients.Get("out").data, workspace, Overrun::kWorkspace, execution));
    TFB_RETURN_IF_ERROR(Copy(workspace, call.input_gradients.Get("x").mutable_data(),
                             Overrun::kGradient, execution));
    return Copy(execution.kept.data(), call.parameter_gradients.Get("w").mutable_data(),
                Overrun::kParameter, execution);
  }

 private:
  // Copies all numbers by a kernel, shifted by one where the destination is the one to leave.
  absl::Status Copy(const void* from, void* to, Overrun place, const Execution& execution) const {
    const Shape shape = {1, 1, kTokens, kChannels};
    const ptrdiff_t shift = place == overrun_ && place != Overrun::kNone ? 1 : 0;
    const TinyCopy copy = {
        ToDeviceView(ConstTensorView(from, DType::kF32, shape)),
        ToDeviceView(TensorView(static_cast<float*>(to) + shift, DType::kF32, shape)),
        /*heads=*/1, kTokens};
    return ToStatus(KernelsOn<ForEachKernel<TinyCopy>>(target_).run(copy, kTokens, kChannels,
                                                                    execution.stream));
  }

  const CudaTarget target_;
  const Overrun overrun_;
};

std::vector<float> Numbers(const Tensor& tensor) {
  return {tensor.span<float>().begin(), tensor.span<float>().end()};
}

class RunOnceOnADevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<CudaRuntime*> runtime = CudaRuntime::For(KernelDevice());
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    target_ = (*runtime)->target();
    FillNormal(&(inputs_["x"] = Tensor(DType::kF32, {1, kTokens, kChannels})), 1, "x");
    FillNormal(&(gradients_["out"] = Tensor(DType::kF32, {1, kTokens, kChannels})), 1, "g");
  }
  absl::StatusOr<LayerRun> Run(Overrun overrun) {
    CopyingLayer layer(Problem::SelfAttention(1, 2, kTokens, kChannels / 2), target_, overrun);
    TFB_ASSIGN_OR_RETURN(const DeviceTensors read,
                         DeviceTensors::Of(KernelDevice(), ViewsOf(inputs_)));
    return RunOnce(&layer, KernelDevice(), read.inputs(), &pool_, &gradients_);
  }

  CudaTarget target_ = CudaTarget::kSimulator;
  NamedTensors inputs_, gradients_;
  ThreadPool pool_{1};
};

TEST_F(RunOnceOnADevice, ABackwardPassHasTheMemoryOfTheDevice) {
  const absl::StatusOr<LayerRun> run = Run(Overrun::kNone);
  ASSERT_TRUE(run.ok()) << run.status();
  const std::vector<float> x = Numbers(inputs_.at("x")), g = Numbers(gradients_.at("out"));
  EXPECT_THAT(Numbers(run->outputs.at("out")), ElementsAreArray(x));
  EXPECT_THAT(Numbers(run->input_gradients.at("x")), ElementsAreArray(g));
  EXPECT_THAT(Numbers(run->parameter_gradients.at("w")), ElementsAreArray(x));
}

// The simulator reports the kernel itself; a GPU writes into the band.
TEST_F(RunOnceOnADevice, ABackwardPassThatLeavesItsMemoryIsAnError) {
  for (const auto& [overrun, what] : {std::pair(Overrun::kGradient, "gradient of input x"),
                                      {Overrun::kParameter, "gradient of parameter w"},
                                      {Overrun::kKept, "kept memory"},
                                      {Overrun::kWorkspace, "workspace of Backward"}}) {
    const absl::Status status = Run(overrun).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << what << ": " << status;
    const bool is_simulated = KernelDevice() == Device::kSimulator;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(is_simulated ? "no device memory: 0 bytes behind a buffer" : what));
  }
}

TEST(BoundLayer, IsOfTheDeviceOfItsRuntime) {
  BoundLayer bound;
  EXPECT_EQ(bound.device(), Device::kCpu);
  bound.runtime = CudaRuntime::For(KernelDevice()).value();
  EXPECT_EQ(bound.device(), KernelDevice());
}

}  // namespace
}  // namespace tfb
