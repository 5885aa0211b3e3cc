#include "harness/measure/device_monitor.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/cuda/dynamic_library.h"
#include "core/status.h"

namespace tfb {
namespace {

// The part of nvml.h that this file uses. Its numbers are part of NVML's binary interface.
using NvmlDevice = void*;
constexpr int kSuccess = 0;
constexpr unsigned kClockOfMultiprocessors = 1;  // NVML_CLOCK_SM
constexpr unsigned kClockOfMemory = 2;           // NVML_CLOCK_MEM
constexpr unsigned kTemperatureOfGpu = 0;        // NVML_TEMPERATURE_GPU

// The bits of nvmlClocksEventReason* for involuntary throttling, without those for an idle GPU,
// application clocks that a user set, and synchronised boards.
constexpr std::pair<unsigned long long, const char*> kThrottleReasons[] = {
    {0x04, "power cap"},
    {0x08, "hardware slowdown"},
    {0x20, "thermal, by software"},
    {0x40, "thermal, hardware"},
    {0x80, "power brake, hardware"}};

class Nvml : public DeviceMonitor {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceMonitor>> Open(const std::string& pci_bus_id,
                                                             const std::string& library) {
    TFB_ASSIGN_OR_RETURN(const DynamicLibrary opened, DynamicLibrary::Open({library}));
    std::unique_ptr<Nvml> nvml(new Nvml);
    TFB_RETURN_IF_ERROR(nvml->Start(opened, pci_bus_id));
    return nvml;
  }

  ~Nvml() override {
    if (initialised_) shutdown_();
  }

  DeviceState Read() override {
    DeviceState state;
    unsigned value = 0;
    if (clock_(device_, kClockOfMultiprocessors, &value) == kSuccess) state.set_clock_mhz(value);
    if (clock_(device_, kClockOfMemory, &value) == kSuccess) state.set_memory_clock_mhz(value);
    if (temperature_(device_, kTemperatureOfGpu, &value) == kSuccess) {
      state.set_temperature_celsius(value);
    }
    if (power_(device_, &value) == kSuccess) state.set_power_watts(value / 1e3);
    unsigned long long reasons = 0;
    if (reasons_(device_, &reasons) != kSuccess) return state;
    for (const auto& [bit, name] : kThrottleReasons) {
      if ((reasons & bit) != 0) state.add_throttle_reasons(name);
    }
    return state;
  }

 private:
  Nvml() = default;

  absl::Status Start(const DynamicLibrary& library, const std::string& pci_bus_id) {
    int (*initialise)() = nullptr;
    int (*find)(const char*, NvmlDevice*) = nullptr;
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlInit_v2", &initialise));
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlShutdown", &shutdown_));
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlDeviceGetHandleByPciBusId_v2", &find));
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlDeviceGetClockInfo", &clock_));
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlDeviceGetTemperature", &temperature_));
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlDeviceGetPowerUsage", &power_));
    // Newer libraries call them event reasons, and keep the old name as well.
    TFB_RETURN_IF_ERROR(library.Resolve("nvmlDeviceGetCurrentClocksThrottleReasons", &reasons_));
    if (const int error = initialise(); error != kSuccess) {
      return absl::UnavailableError(absl::StrCat("NVML does not start: error ", error));
    }
    initialised_ = true;
    if (const int error = find(pci_bus_id.c_str(), &device_); error != kSuccess) {
      return absl::UnavailableError(
          absl::StrCat("NVML does not know the GPU at ", pci_bus_id, ": error ", error));
    }
    return absl::OkStatus();
  }

  bool initialised_ = false;
  NvmlDevice device_ = nullptr;
  int (*shutdown_)() = nullptr;
  int (*clock_)(NvmlDevice, unsigned, unsigned*) = nullptr;
  int (*temperature_)(NvmlDevice, unsigned, unsigned*) = nullptr;
  int (*power_)(NvmlDevice, unsigned*) = nullptr;  // in milliwatts
  int (*reasons_)(NvmlDevice, unsigned long long*) = nullptr;
};

}  // namespace

bool IsThrottled(const DeviceState& state) { return state.throttle_reasons_size() > 0; }

absl::StatusOr<std::unique_ptr<DeviceMonitor>> OpenNvml(const std::string& pci_bus_id,
                                                        const std::string& library) {
  return Nvml::Open(pci_bus_id, library);
}

}  // namespace tfb
