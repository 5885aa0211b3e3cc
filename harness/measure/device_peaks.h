// Measures the peak rates of a GPU.
#ifndef TFB_HARNESS_MEASURE_DEVICE_PEAKS_H_
#define TFB_HARNESS_MEASURE_DEVICE_PEAKS_H_

#include "absl/status/status.h"
#include "core/cuda/runtime.h"
#include "results/results.pb.h"

namespace tfb {

// Adds to `environment` the device's rates of f32 multiply-adds, of bf16 and f16 matrix products by
// mma.sync, which every GPU since Ampere has (the wgmma of a Hopper is faster), and of copying in
// its memory, read and written bytes together. Takes about a second. The kernels run in the
// simulator, too, for tests; their rates mean nothing there.
absl::Status MeasureDevicePeaks(CudaRuntime* runtime, Environment* environment);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_DEVICE_PEAKS_H_
