// Counts the allocations of a layer's call.
#ifndef TFB_HARNESS_CONFORMANCE_ALLOCATION_METER_H_
#define TFB_HARNESS_CONFORMANCE_ALLOCATION_METER_H_

#include <cstdint>

#include "core/cuda/runtime.h"

namespace tfb::conformance {

// Counts allocations since it was made: those of the host, and those of the device through
// `runtime` (null for the CPU). It does not count allocations that no layer causes: the simulator's
// while it runs a kernel, and on a GPU the host's, where the driver allocates at a kernel's first
// launch. Only one meter may exist at a time.
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
