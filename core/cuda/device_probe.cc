#include "core/cuda/device_probe.h"

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "core/cuda/device_query.h"
#include "core/cuda/kernel_table.h"

namespace tfb {
namespace {

absl::Status NoDevice(const char* reason, const CudaMachine& machine) {
  if (machine.driver_version == 0) {
    return absl::UnavailableError(
        absl::StrFormat("no CUDA device: %s (no driver is installed)", reason));
  }
  return absl::UnavailableError(
      absl::StrFormat("no CUDA device: %s (driver for CUDA %d.%d, built with CUDA %d.%d)", reason,
                      machine.driver_version / 1000, machine.driver_version % 1000 / 10,
                      machine.runtime_version / 1000, machine.runtime_version % 1000 / 10));
}

CudaDevice ToDevice(const CudaDeviceQuery& query) {
  CudaDevice device;
  device.name = query.name;
  device.pci_bus_id =
      absl::StrFormat("%08x:%02x:%02x.0", query.pci_domain, query.pci_bus, query.pci_device);
  device.compute_capability_major = query.compute_capability_major;
  device.compute_capability_minor = query.compute_capability_minor;
  device.memory_bytes = static_cast<int64_t>(query.memory_bytes);
  device.l2_cache_bytes = static_cast<int64_t>(query.l2_cache_bytes);
  device.shared_memory_bytes_per_block = static_cast<int64_t>(query.shared_memory_bytes_per_block);
  device.multiprocessors = query.multiprocessors;
  device.clock_khz = query.clock_khz;
  device.memory_clock_khz = query.memory_clock_khz;
  return device;
}

}  // namespace

absl::StatusOr<CudaMachine> ProbeCudaMachine() {
  const auto* const queries = FindKernels<CudaDeviceQueries>(CudaTarget::kGpu);
  if (queries == nullptr) {
    return absl::UnimplementedError(
        "no CUDA device: this program was built without CUDA kernels; with a CUDA toolkit, "
        "`bazel build --config=cuda` adds them");
  }
  return ProbeCudaMachine(*queries);
}

absl::StatusOr<CudaMachine> ProbeCudaMachine(const CudaDeviceQueries& queries) {
  CudaMachine machine;
  if (const char* error = queries.versions(&machine.driver_version, &machine.runtime_version)) {
    return NoDevice(error, machine);
  }
  int count = 0;
  if (const char* error = queries.device_count(&count)) return NoDevice(error, machine);
  if (count == 0) return NoDevice("the driver counts none", machine);

  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaDeviceQuery query = {};
    if (const char* error = queries.device(ordinal, &query)) {
      return absl::InternalError(absl::StrFormat("no CUDA device: %s, asking about device %d of %d",
                                                 error, ordinal, count));
    }
    machine.devices.push_back(ToDevice(query));
  }
  return machine;
}

std::string CudaCompiler() {
  const auto* const queries = FindKernels<CudaDeviceQueries>(CudaTarget::kGpu);
  return queries == nullptr ? "" : queries->compiler;
}

}  // namespace tfb
