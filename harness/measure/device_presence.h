// Tells whether there is a GPU, and leaves the calling process able to fork.
#ifndef TFB_HARNESS_MEASURE_DEVICE_PRESENCE_H_
#define TFB_HARNESS_MEASURE_DEVICE_PRESENCE_H_

#include <functional>

namespace tfb {

// Returns whether the CUDA driver counts a device, or whether `is_present` says so.
// Another process asks: one that has asked itself cannot fork processes that use a GPU
// (harness/measure/worker.h).
bool CudaDeviceIsPresent();
bool CudaDeviceIsPresent(const std::function<bool()>& is_present);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_DEVICE_PRESENCE_H_
