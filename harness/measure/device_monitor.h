// Reads the clocks, temperature and power that a GPU reports while it is measured.
#ifndef TFB_HARNESS_MEASURE_DEVICE_MONITOR_H_
#define TFB_HARNESS_MEASURE_DEVICE_MONITOR_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "results/results.pb.h"

namespace tfb {

class DeviceMonitor {
 public:
  virtual ~DeviceMonitor() = default;
  // Returns the current state. Values that the sensors do not report are absent.
  virtual DeviceState Read() = 0;
};

// Tells whether the device was throttled involuntarily: by heat, power or a fault.
bool IsThrottled(const DeviceState& state);

// Opens NVML, the driver's library, at run time. `pci_bus_id` is CudaDevice's. Returns Unavailable,
// with the reason, where there is no such library or it does not know the GPU.
absl::StatusOr<std::unique_ptr<DeviceMonitor>> OpenNvml(
    const std::string& pci_bus_id, const std::string& library = "libnvidia-ml.so.1");

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_DEVICE_MONITOR_H_
