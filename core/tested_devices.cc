#include "core/tested_devices.h"

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "absl/status/statusor.h"

namespace tfb {
namespace {

constexpr char kVariable[] = "TFB_KERNEL_DEVICE";

// Returns the device that the environment names, if it does.
std::optional<Device> NamedDevice() {
  const char* name = std::getenv(kVariable);
  if (name == nullptr || *name == '\0') return std::nullopt;
  const absl::StatusOr<Device> device = ParseDevice(name);
  if (!device.ok() || *device == Device::kCpu) {
    std::fprintf(stderr, "%s=%s: allowed are cuda and simulator\n", kVariable, name);
    std::abort();
  }
  return *device;
}

}  // namespace

Device KernelDevice() { return NamedDevice().value_or(Device::kSimulator); }

bool IsTested(Device device) { return device == NamedDevice().value_or(device); }

std::vector<Device> TestedDevices() {
  std::vector<Device> devices;
  for (const Device device : {Device::kCpu, KernelDevice()}) {
    if (IsTested(device)) devices.push_back(device);
  }
  return devices;
}

}  // namespace tfb
