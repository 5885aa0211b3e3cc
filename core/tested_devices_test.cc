#include "core/tested_devices.h"

#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;

class TestedDevicesTest : public ::testing::Test {
 protected:
  TestedDevicesTest() { unsetenv("TFB_KERNEL_DEVICE"); }
  ~TestedDevicesTest() override { unsetenv("TFB_KERNEL_DEVICE"); }

  static void Name(const char* device) { setenv("TFB_KERNEL_DEVICE", device, /*overwrite=*/1); }
};

TEST_F(TestedDevicesTest, AreTheCpuAndTheSimulatorOnEveryMachine) {
  for (const char* nothing : {"", static_cast<const char*>(nullptr)}) {
    if (nothing != nullptr) Name(nothing);
    EXPECT_EQ(KernelDevice(), Device::kSimulator);
    EXPECT_THAT(TestedDevices(), ElementsAre(Device::kCpu, Device::kSimulator));
    EXPECT_TRUE(IsTested(Device::kCuda)) << "by tests that name it";
  }
}

TEST_F(TestedDevicesTest, AreOneAloneWhereTheEnvironmentNamesIt) {
  for (const Device named : {Device::kCuda, Device::kSimulator}) {
    Name(named == Device::kCuda ? "cuda" : "simulator");
    EXPECT_EQ(KernelDevice(), named);
    EXPECT_THAT(TestedDevices(), ElementsAre(named));
    for (const Device device : {Device::kCpu, Device::kCuda, Device::kSimulator}) {
      EXPECT_EQ(IsTested(device), device == named);
    }
  }
}

TEST_F(TestedDevicesTest, ADeviceWithoutKernelsEndsTheTest) {
  for (const char* name : {"cpu", "gpu"}) {
    Name(name);
    EXPECT_DEATH(TestedDevices(), "TFB_KERNEL_DEVICE=.*: allowed are cuda and simulator");
  }
}

}  // namespace
}  // namespace tfb
