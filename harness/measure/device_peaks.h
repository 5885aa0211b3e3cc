// Measures the peak rates of a GPU.
#ifndef TFB_HARNESS_MEASURE_DEVICE_PEAKS_H_
#define TFB_HARNESS_MEASURE_DEVICE_PEAKS_H_

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "core/cuda/blas.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "results/results.pb.h"

namespace tfb {

// A library of matrix products, whose rate is a peak beside that of our own instructions: on a Hopper
// it has wgmma, which is faster than mma.sync.
struct PeakLibrary {
  std::string name;  // such as "cuBLAS 13.1.0"
  size_t workspace_bytes = 0;
  std::function<absl::Status(const SixteenBitGemmCall& call, void* workspace, void* stream)>
      multiply;
};

// Returns cuBLAS on the device, or nothing where it is not there.
std::optional<PeakLibrary> CublasPeakLibrary(Device device);

// Adds to `environment` the device's rates of f32 multiply-adds, of bf16 and f16 matrix products by
// mma.sync, which every GPU since Ampere has, of the same products by `library` where there is one,
// and of copying in its memory, read and written bytes together. A share of a peak is of the highest
// of its type. Takes about a second. The kernels run in the simulator, too, for tests; their rates
// mean nothing there.
absl::Status MeasureDevicePeaks(CudaRuntime* runtime, const std::optional<PeakLibrary>& library,
                                Environment* environment);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_DEVICE_PEAKS_H_
