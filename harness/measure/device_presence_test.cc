#include "harness/measure/device_presence.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "core/cuda/device_probe.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(DevicePresence, IsAskedByAnotherProcessWhoseEndDecides) {
  const pid_t own = getpid();
  EXPECT_TRUE(CudaDeviceIsPresent([own] { return getpid() != own; }));
  EXPECT_FALSE(CudaDeviceIsPresent([own] { return getpid() == own; }));
  EXPECT_FALSE(CudaDeviceIsPresent([]() -> bool { abort(); }));
  EXPECT_EQ(CudaDeviceIsPresent(), ProbeCudaMachine().ok());
  // No process is left behind.
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace
}  // namespace tfb
