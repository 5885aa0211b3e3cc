#include "core/cuda/simulator/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/cuda/simulator/broken_kernels.h"

namespace tfb {
namespace {

using ::cuda_simulator::FindingKind;
using ::cuda_simulator::Findings;

TEST(Simulator, AReductionWithBarriersIsFineAndOneWithoutRaces) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  std::vector<float> values(64, 1.5f);
  const DeviceBuffer input = runtime->Upload(values.data(), 64 * sizeof(float)).value();
  const DeviceBuffer sum = runtime->Allocate(sizeof(float)).value();
  const BrokenKernels& kernels = KernelsOn<BrokenKernels>(runtime->target());
  ASSERT_STREQ(kernels.reduce(input.As<float>(), sum.As<float>(), true), nullptr);
  float result = 0;
  ASSERT_TRUE(runtime->CopyToHost(&result, sum.data(), sizeof(result)).ok());
  EXPECT_EQ(result, 96);

  const char* error = kernels.reduce(input.As<float>(), sum.As<float>(), false);
  ASSERT_NE(error, nullptr);
  const auto is_race = [](const auto& finding) { return finding.kind == FindingKind::kRace; };
  EXPECT_TRUE(std::any_of(Findings().begin(), Findings().end(), is_race)) << error;
}

}  // namespace
}  // namespace tfb
