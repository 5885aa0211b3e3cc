#include "core/cuda/simulator/graphs.h"

#include <optional>
#include <utility>
#include <vector>

#include "core/cuda/simulator/runtime_error.h"

namespace cuda_simulator {

struct CUgraph_st {
  std::vector<RecordedWork> work;
};

namespace {

// The stream that the thread captures, and what was recorded.
struct Capture {
  cudaStream_t stream = nullptr;
  CUgraph_st graph;
  bool is_valid = true;
};
thread_local std::optional<Capture> capture;

cudaError_t Invalidate(cudaError_t error) {
  capture->is_valid = false;
  return SetLastError(error);
}

}  // namespace

struct CUstream_st {};

bool IsCapturing() { return capture.has_value(); }

cudaError_t Record(cudaStream_t stream, RecordedWork work) {
  if (!capture->is_valid) return SetLastError(cudaErrorStreamCaptureInvalidated);
  if (stream != capture->stream) return Invalidate(cudaErrorStreamCaptureImplicit);
  capture->graph.work.push_back(std::move(work));
  return cudaSuccess;
}

cudaError_t RefuseWhileCapturing() {
  return IsCapturing() ? Invalidate(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (capture.has_value()) return Invalidate(cudaErrorStreamCaptureUnsupported);
  capture.emplace();
  capture->stream = stream;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!capture.has_value()) return SetLastError(cudaErrorInvalidValue);
  const Capture ended = std::move(*capture);
  capture.reset();
  if (!ended.is_valid) return SetLastError(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st(ended.graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraph_st(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return cudaGraphDestroy(executable);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const RecordedWork& work : executable->work) {
    if (const cudaError_t error = work(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda_simulator
