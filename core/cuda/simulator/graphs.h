// Captures of streams: work that is recorded instead of done, and done again with every launch of the
// graph. One thread captures one stream at a time, as with cudaStreamCaptureModeThreadLocal.
#ifndef TFB_CORE_CUDA_SIMULATOR_GRAPHS_H_
#define TFB_CORE_CUDA_SIMULATOR_GRAPHS_H_

#include <functional>

#include "core/cuda/simulator/cuda_runtime.h"

namespace cuda_simulator {

using RecordedWork = std::function<cudaError_t()>;

// Tells whether the calling thread captures a stream.
bool IsCapturing();

// Records the work, of a thread that captures, and returns what the call that enqueues it returns: an
// error where the thread captures another stream than this one; the capture is then invalid.
cudaError_t Record(cudaStream_t stream, RecordedWork work);

// Returns cudaSuccess where the thread captures no stream; else the capture becomes invalid, and the
// error is that of a call that a capture does not permit: one that waits, allocates, or copies from
// or to pageable memory.
cudaError_t RefuseWhileCapturing();

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_GRAPHS_H_
