#include "harness/measure/device_monitor.h"

#include <dlfcn.h>

#include <string>

#include "core/runfiles.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kBusId[] = "00000000:01:00.0";

std::string FakeLibrary() { return RunfilePath("harness/measure/libfake_nvml.so").value(); }

void Set(unsigned long long throttle_reasons, bool power) {
  void* const library = dlopen(FakeLibrary().c_str(), RTLD_NOW);
  ASSERT_NE(library, nullptr) << dlerror();
  reinterpret_cast<void (*)(unsigned long long, bool)>(dlsym(library, "FakeNvmlSet"))(
      throttle_reasons, power);
}

TEST(DeviceMonitor, ReadsClocksTemperatureAndPower) {
  Set(0, true);
  const auto monitor = OpenNvml(kBusId, FakeLibrary());
  ASSERT_TRUE(monitor.ok()) << monitor.status();
  const DeviceState state = (*monitor)->Read();
  EXPECT_EQ(state.clock_mhz(), 1755);
  EXPECT_EQ(state.memory_clock_mhz(), 2619);
  EXPECT_EQ(state.temperature_celsius(), 41);
  EXPECT_EQ(state.power_watts(), 312.5);
  EXPECT_FALSE(IsThrottled(state));
}

TEST(DeviceMonitor, WhatIsNotToldIsAbsent) {
  Set(0, false);
  const DeviceState state = OpenNvml(kBusId, FakeLibrary()).value()->Read();
  EXPECT_FALSE(state.has_power_watts());
  EXPECT_TRUE(state.has_clock_mhz());
}

TEST(DeviceMonitor, IdlenessAndChosenClocksAreNoThrottling) {
  Set(0x01 | 0x02 | 0x10 | 0x100, true);
  EXPECT_FALSE(IsThrottled(OpenNvml(kBusId, FakeLibrary()).value()->Read()));
  Set(0x01 | 0x04 | 0x40, true);
  const DeviceState state = OpenNvml(kBusId, FakeLibrary()).value()->Read();
  EXPECT_TRUE(IsThrottled(state));
  EXPECT_THAT(state.throttle_reasons(), ElementsAre("power cap", "thermal, hardware"));
}

TEST(DeviceMonitor, AMissingLibraryOrGpuIsAReason) {
  const auto missing = OpenNvml(kBusId, "libno_such_nvml.so.1");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("libno_such_nvml.so.1"));
  const auto other = OpenNvml("00000000:02:00.0", FakeLibrary());
  EXPECT_THAT(std::string(other.status().message()),
              HasSubstr("does not know the GPU at 00000000:02:00.0"));
  const auto strange = OpenNvml(kBusId, "libdl.so.2");
  EXPECT_THAT(std::string(strange.status().message()), HasSubstr("has no function nvmlInit_v2"));
}

TEST(DeviceMonitor, TheLibraryIsShutDown) {
  void* const library = dlopen(FakeLibrary().c_str(), RTLD_NOW);
  const auto shutdowns = reinterpret_cast<int (*)()>(dlsym(library, "FakeNvmlShutdowns"));
  const int before = shutdowns();
  OpenNvml(kBusId, FakeLibrary()).value().reset();
  EXPECT_EQ(shutdowns() - before, 1);
}

}  // namespace
}  // namespace tfb
