// Counts what a layer's call allocates.
#ifndef TFB_HARNESS_CONFORMANCE_ALLOCATION_METER_H_
#define TFB_HARNESS_CONFORMANCE_ALLOCATION_METER_H_

#include <cstdint>

#include "core/cuda/runtime.h"

namespace tfb::conformance {

// Allocations since it was made: of the host, and of the device through `runtime` (null: the CPU).
// Not counted are those that no layer is to blame for: the simulator's while it runs a kernel, and
// on a GPU the host's, where the driver allocates at a kernel's first launch. One at a time.
class AllocationMeter {
 public:
  explicit AllocationMeter(CudaRuntime* runtime);
  ~AllocationMeter();
  AllocationMeter(const AllocationMeter&) = delete;
  AllocationMeter& operator=(const AllocationMeter&) = delete;

  int64_t count() const;

 private:
  int64_t HostAllocations() const;
  int64_t DeviceAllocations() const;

  CudaRuntime* runtime_;
  int64_t host_before_;
  int64_t device_before_;
};

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_ALLOCATION_METER_H_
