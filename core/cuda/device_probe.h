#ifndef TFB_CORE_CUDA_DEVICE_PROBE_H_
#define TFB_CORE_CUDA_DEVICE_PROBE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tfb {

struct CudaDevice {
  std::string name;
  std::string pci_bus_id;  // "00000000:3b:00.0", the name that other tools of the driver use
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  int64_t memory_bytes = 0;
  int64_t l2_cache_bytes = 0;
  int64_t shared_memory_bytes_per_block = 0;  // the most that a kernel can opt in to
  int multiprocessors = 0;
  int clock_khz = 0;         // the peak; 0 where the driver does not report it
  int memory_clock_khz = 0;  // likewise
};

struct CudaMachine {
  int driver_version = 0;   // 1000 * major + 10 * minor: the newest CUDA that the driver supports
  int runtime_version = 0;  // in the same form: the toolkit that this binary was built with
  std::vector<CudaDevice> devices;  // in CUDA's order, at least one
};

// Asks the driver for its devices; creates no context on any device.
//
// Returns these errors, all of them worded "no CUDA device: <reason>":
//   Unavailable    no driver, no GPU, or none that CUDA_VISIBLE_DEVICES lets through
//   Unimplemented  this program was built without CUDA kernels
//   Internal       the driver failed while it was asked about a device that it had counted
absl::StatusOr<CudaMachine> ProbeCudaMachine();

// The same by some other queries than those of this program's kernels.
struct CudaDeviceQueries;
absl::StatusOr<CudaMachine> ProbeCudaMachine(const CudaDeviceQueries& queries);

// Returns the compiler of this program's kernels for GPUs, "nvcc 13.0.88"; empty where it has none.
std::string CudaCompiler();

}  // namespace tfb

#endif  // TFB_CORE_CUDA_DEVICE_PROBE_H_
