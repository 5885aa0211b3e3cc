#include "core/cuda/blas.h"

#include <gtest/gtest.h>

#include "gmock/gmock.h"

namespace tfb {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(CudaBlas, TheSimulatorAndTheCpuHaveNone) {
  for (const Device device : {Device::kCpu, Device::kSimulator}) {
    EXPECT_EQ(CudaBlas::For(device).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// Opening the library needs no GPU.
TEST(CudaBlas, HasEveryFunctionOrSaysWhatIsMissing) {
  const absl::StatusOr<CublasFunctions> functions = OpenCublas();
  if (functions.ok()) {
    EXPECT_STREQ(functions->status_string(kCublasSuccess), "success");
  } else {
    EXPECT_EQ(functions.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(functions.status().message()), HasSubstr("libcublas.so.12: cannot"));
  }
}

TEST(CudaBlas, IsThereOrSaysWhyNot) {
  const absl::StatusOr<CudaBlas*> blas = CudaBlas::For(Device::kCuda);
  if (blas.ok()) {
    EXPECT_THAT((*blas)->name(), AnyOf(StartsWith("cuBLAS 12."), StartsWith("cuBLAS 13.")));
    EXPECT_GT((*blas)->workspace_bytes(), 0u);
  } else {
    EXPECT_FALSE(blas.status().message().empty());
    GTEST_SKIP() << blas.status().message();
  }
}

}  // namespace
}  // namespace tfb
