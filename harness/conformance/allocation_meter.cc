#include "harness/conformance/allocation_meter.h"

#include "core/allocations.h"
#include "core/cuda/simulator/simulator.h"

namespace tfb::conformance {
namespace {

int64_t in_launches = 0;

// Adds the allocations between the beginning and the end of a launch.
void OnLaunch(bool begins) { in_launches += begins ? -AllocationCount() : AllocationCount(); }

void ObserveLaunches(void (*observer)(bool)) {
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.on_launch = observer;
  cuda_simulator::Configure(settings);
}

}  // namespace

AllocationMeter::AllocationMeter(CudaRuntime* runtime) : runtime_(runtime) {
  ObserveLaunches(&OnLaunch);
  device_before_ = DeviceAllocations();
  host_before_ = HostAllocations();
}

AllocationMeter::~AllocationMeter() { ObserveLaunches(nullptr); }

int64_t AllocationMeter::count() const {
  const int64_t host = HostAllocations() - host_before_;
  return host + DeviceAllocations() - device_before_;
}

int64_t AllocationMeter::HostAllocations() const {
  const bool on_gpu = runtime_ != nullptr && runtime_->target() == CudaTarget::kGpu;
  return on_gpu ? 0 : AllocationCount() - in_launches;
}

int64_t AllocationMeter::DeviceAllocations() const {
  return runtime_ == nullptr ? 0 : runtime_->allocations();
}

}  // namespace tfb::conformance
