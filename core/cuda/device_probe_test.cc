#include "core/cuda/device_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <iostream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/cuda/device_query.h"
#include "core/tested_devices.h"

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
    ASSERT_NE(KernelDevice(), Device::kCuda) << machine.status();
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

// A driver for CUDA 12.4 without devices, or with two that are asked about.
const char* Versions(int* driver, int* runtime) {
  *driver = 12040;
  *runtime = 13000;
  return nullptr;
}
const char* NoDriver(int* driver, int* runtime) {
  *driver = 0;
  *runtime = 13000;
  return nullptr;
}
const char* NoDevices(int* count) {
  *count = 0;
  return nullptr;
}
const char* HiddenDevices(int*) { return "no CUDA-capable device is detected"; }
const char* TwoDevices(int* count) {
  *count = 2;
  return nullptr;
}
const char* Describe(int ordinal, CudaDeviceQuery* query) {
  *query = {"GPU", 1, 0x3b, ordinal, 9, 0, size_t{80} << 30, 50 << 20, 227 << 10, 132, 1, 2};
  return nullptr;
}
const char* FailsAtTheSecond(int ordinal, CudaDeviceQuery* query) {
  return ordinal == 1 ? "it fell off the bus" : Describe(ordinal, query);
}

TEST(DeviceProbe, ADriverWithoutDevicesIsUnavailableAndBothVersionsAreSaid) {
  for (const auto& [count, reason] :
       {std::pair{&NoDevices, "the driver counts none"},
        std::pair{&HiddenDevices, "no CUDA-capable device is detected"}}) {
    const absl::Status status = ProbeCudaMachine({"nvcc", &Versions, count, &Describe}).status();
    EXPECT_EQ(status,
              absl::UnavailableError(absl::StrCat(
                  "no CUDA device: ", reason, " (driver for CUDA 12.4, built with CUDA 13.0)")));
  }
}

TEST(DeviceProbe, AMissingDriverIsUnavailableToo) {
  EXPECT_EQ(
      ProbeCudaMachine({"nvcc", &NoDriver, &HiddenDevices, &Describe}).status(),
      absl::UnavailableError("no CUDA device: no CUDA-capable device is detected (no driver is "
                             "installed)"));
}

TEST(DeviceProbe, EveryDeviceIsDescribedAndOneThatFailsIsAnError) {
  const absl::StatusOr<CudaMachine> machine =
      ProbeCudaMachine({"nvcc", &Versions, &TwoDevices, &Describe});
  ASSERT_TRUE(machine.ok()) << machine.status();
  ASSERT_EQ(machine->devices.size(), 2u);
  EXPECT_EQ(machine->devices[1].pci_bus_id, "00000001:3b:01.0");
  EXPECT_EQ(machine->devices[0].memory_bytes, int64_t{80} << 30);
  EXPECT_EQ(ProbeCudaMachine({"nvcc", &Versions, &TwoDevices, &FailsAtTheSecond}).status(),
            absl::InternalError("no CUDA device: it fell off the bus, asking about device 1 of 2"));
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
