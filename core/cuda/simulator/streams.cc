#include "core/cuda/simulator/streams.h"

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/cuda/simulator/machine.h"
#include "core/cuda/simulator/runtime_error.h"

namespace cuda_simulator {

struct CUgraph_st {
  std::vector<Work> work;
};
struct CUstream_st {
  bool waits_for_default;  // as CUDA's blocking streams, which are the default stream here
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

cudaError_t Record(cudaStream_t stream, Work work) {
  if (!capture->is_valid) return SetLastError(cudaErrorStreamCaptureInvalidated);
  if (stream != capture->stream) return Invalidate(cudaErrorStreamCaptureImplicit);
  capture->graph.work.push_back(std::move(work));
  return cudaSuccess;
}

// The work that waits, by streams.
struct LateWork {
  std::mutex mutex;
  std::map<cudaStream_t, std::vector<Work>> of_stream;
};
LateWork& TheLateWork() {
  static auto& work = *new LateWork;
  return work;
}

cudaStream_t QueueOf(cudaStream_t stream) {
  return stream != nullptr && stream->waits_for_default ? nullptr : stream;
}

cudaError_t DoAll(const std::vector<Work>& all) {
  for (const Work& work : all) {
    if (const cudaError_t error = work(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

bool IsCapturing() { return capture.has_value(); }

bool IsDoneAtOnce() { return !IsCapturing() && !CurrentSettings().streams_are_late; }

cudaError_t Keep(cudaStream_t stream, Work work) {
  if (IsCapturing()) return Record(stream, std::move(work));
  LateWork& late = TheLateWork();
  const std::lock_guard<std::mutex> lock(late.mutex);
  late.of_stream[QueueOf(stream)].push_back(std::move(work));
  return cudaSuccess;
}

cudaError_t Finish(cudaStream_t stream) {
  LateWork& late = TheLateWork();
  std::vector<Work> work;
  {
    const std::lock_guard<std::mutex> lock(late.mutex);
    work = std::exchange(late.of_stream[QueueOf(stream)], {});
  }
  return DoAll(work);
}

cudaError_t FinishAll() {
  LateWork& late = TheLateWork();
  std::map<cudaStream_t, std::vector<Work>> of_stream;
  {
    const std::lock_guard<std::mutex> lock(late.mutex);
    of_stream = std::exchange(late.of_stream, {});
  }
  cudaError_t first = cudaSuccess;
  for (const auto& [stream, work] : of_stream) {
    const cudaError_t error = DoAll(work);
    if (first == cudaSuccess) first = error;
  }
  return first;
}

cudaError_t RefuseWhileCapturing() {
  return IsCapturing() ? Invalidate(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st{flags != cudaStreamNonBlocking};
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = stream->waits_for_default ? cudaSuccess : Finish(stream);
  delete stream;
  return error;
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

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return Enqueue(stream, [work = executable->work] { return DoAll(work); });
}

}  // namespace cuda_simulator
