// Streams: their work is done by the call that enqueues it, or late, or recorded in a capture and done with
// every launch of the graph. One thread captures one stream at a time, as with
// cudaStreamCaptureModeThreadLocal.
#ifndef TFB_CORE_CUDA_SIMULATOR_STREAMS_H_
#define TFB_CORE_CUDA_SIMULATOR_STREAMS_H_

#include <functional>

#include "core/cuda/simulator/cuda_runtime.h"

namespace cuda_simulator {

using Work = std::function<cudaError_t()>;

// Tells whether the calling thread captures a stream.
bool IsCapturing();

// Tells whether work that the calling thread enqueues is done at once: it is not in a capture, nor where
// Settings::streams_are_late.
bool IsDoneAtOnce();

// Keeps work that is not done at once. Returns the error of a thread that captures another stream than
// this one; the capture is then invalid.
cudaError_t Keep(cudaStream_t stream, Work work);

// Does work at once, or keeps it.
template <class OfStream>
cudaError_t Enqueue(cudaStream_t stream, const OfStream& work) {
  return IsDoneAtOnce() ? work() : Keep(stream, work);
}

// Do the work that was kept of a stream, or of all. They return the first error, of work behind which
// nothing of its stream is done.
cudaError_t Finish(cudaStream_t stream);
cudaError_t FinishAll();

// Returns cudaSuccess where the thread captures no stream; else the capture becomes invalid, and the
// error is that of a call that a capture does not permit: one that waits, allocates, or copies from
// or to pageable memory.
cudaError_t RefuseWhileCapturing();

}  // namespace cuda_simulator

#endif  // TFB_CORE_CUDA_SIMULATOR_STREAMS_H_
