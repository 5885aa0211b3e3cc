#include "core/cuda/device_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <iostream>

namespace tfb {
namespace {

using ::testing::AnyOf;
using ::testing::StartsWith;

TEST(DeviceProbe, DevicesAreDescribedOrTheirAbsenceExplained) {
  const absl::StatusOr<CudaMachine> machine = ProbeCudaMachine();
  if (!machine.ok()) {
    EXPECT_THAT(machine.status().code(),
                AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kUnimplemented));
    EXPECT_THAT(std::string(machine.status().message()), StartsWith("no CUDA device: "));
    GTEST_SKIP() << machine.status();
  }
  EXPECT_GE(machine->driver_version / 1000, machine->runtime_version / 1000);
  ASSERT_FALSE(machine->devices.empty());
  for (const CudaDevice& device : machine->devices) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_EQ(device.pci_bus_id.size(), 16u) << device.pci_bus_id;
    EXPECT_GE(device.compute_capability_major, 5);
    EXPECT_GT(device.memory_bytes, int64_t{1} << 30) << "in bytes, not MiB";
    EXPECT_GT(device.memory_bytes, device.l2_cache_bytes);
    EXPECT_GE(device.shared_memory_bytes_per_block, 48 << 10) << "every GPU has 48 KiB";
    EXPECT_GE(device.multiprocessors, 1);
    EXPECT_GE(device.clock_khz, 0);
    EXPECT_GE(device.memory_clock_khz, 0);
    std::cout << device.name << ", compute capability " << device.compute_capability_major << "."
              << device.compute_capability_minor << ", " << device.multiprocessors
              << " multiprocessors, " << device.memory_bytes << " bytes\n";
  }
}

TEST(DeviceProbe, WithoutADriverThereIsNoDevice) {
  for (const char* file : {"/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg"}) {
    if (std::filesystem::exists(file)) GTEST_SKIP() << file << " says that there is a driver";
  }
  EXPECT_FALSE(ProbeCudaMachine().ok());
}

// The test runs in a process of its own, since the driver reads the variable once.
TEST(DeviceProbeDeathTest, HiddenDevicesAreNotCounted) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
        const absl::StatusOr<CudaMachine> machine = ProbeCudaMachine();
        std::cerr << machine.status() << std::endl;
        exit(machine.ok() ? 1 : 0);
      },
      testing::ExitedWithCode(0), "no CUDA device: ");
}

}  // namespace
}  // namespace tfb
