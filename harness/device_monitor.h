// What a GPU says of its clocks, its temperature and its power while it is measured.
#ifndef TFB_HARNESS_DEVICE_MONITOR_H_
#define TFB_HARNESS_DEVICE_MONITOR_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "results/results.pb.h"

namespace tfb {

class DeviceMonitor {
 public:
  virtual ~DeviceMonitor() = default;
  // The moment's. What the sensors do not tell is absent.
  virtual DeviceState Read() = 0;
};

// Whether the device was slower than it can be for reasons that nobody chose: heat, power, a fault.
bool IsThrottled(const DeviceState& state);

// By NVML, the driver's library, which is opened at run time. `pci_bus_id` is CudaDevice's.
// Unavailable where there is no such library or it does not know the GPU, with the reason.
absl::StatusOr<std::unique_ptr<DeviceMonitor>> OpenNvml(
    const std::string& pci_bus_id, const std::string& library = "libnvidia-ml.so.1");

}  // namespace tfb

#endif  // TFB_HARNESS_DEVICE_MONITOR_H_
