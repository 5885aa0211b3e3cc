// Tells whether there is a GPU, and leaves the calling process able to fork.
#ifndef TFB_HARNESS_MEASURE_DEVICE_PRESENCE_H_
#define TFB_HARNESS_MEASURE_DEVICE_PRESENCE_H_

namespace tfb {

// Tells whether the CUDA driver reports a device. Calls the driver in another process, since a
// process that has called it cannot fork processes that use a GPU (harness/measure/worker.h).
bool CudaDeviceIsPresent();

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_DEVICE_PRESENCE_H_
