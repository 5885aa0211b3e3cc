#include "core/cuda/shared_opt_in.h"

#include "gtest/gtest.h"

namespace tfb {
namespace {

size_t asked = 0;  // by the last call of one of these

int Admit(const void*, size_t bytes) {
  asked = bytes;
  return 0;
}
int Refuse(const void*, size_t bytes) {
  asked = bytes;
  return 7;
}

TEST(SharedOptIn, AKernelAsksOnceOnEachGpuAndAgainForMore) {
  const char kernels[2] = {};
  const auto asks = [&](int gpu, int kernel, size_t bytes) {
    asked = 0;
    EXPECT_EQ(OptInOnce(gpu, &kernels[kernel], bytes, Admit), 0);
    return asked == bytes;
  };
  EXPECT_TRUE(asks(0, 0, 100));
  EXPECT_FALSE(asks(0, 0, 100));
  EXPECT_FALSE(asks(0, 0, 50));
  EXPECT_TRUE(asks(0, 0, 101));
  EXPECT_TRUE(asks(0, 1, 100));
  EXPECT_TRUE(asks(1, 0, 100));
  EXPECT_FALSE(asks(0, 0, 101));
}

TEST(SharedOptIn, ARefusalIsReturnedAndAskedAnew) {
  const char kernel = 0;
  EXPECT_EQ(OptInOnce(0, &kernel, 100, Refuse), 7);
  EXPECT_EQ(OptInOnce(0, &kernel, 100, Refuse), 7);
  EXPECT_EQ(OptInOnce(0, &kernel, 90, Admit), 0);
  EXPECT_EQ(asked, 90u);
  EXPECT_EQ(OptInOnce(0, &kernel, 100, Refuse), 7);
  EXPECT_EQ(OptInOnce(0, &kernel, 90, Refuse), 0);
}

}  // namespace
}  // namespace tfb
