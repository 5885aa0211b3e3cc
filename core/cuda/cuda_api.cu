#include <initializer_list>

#include "core/cuda/cuda_api.h"
#include "core/cuda/kernel.cuh"
#ifndef __CUDACC__
#include "core/cuda/simulator/simulator.h"
#endif

namespace tfb {
namespace {

const char* ErrorOf(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, so that the next call does not return it again
  return cudaGetErrorString(error);
}

cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t EventOf(void* event) { return static_cast<cudaEvent_t>(event); }

const char* Allocate(void** memory, size_t bytes) {
  const cudaError_t error = cudaMalloc(memory, bytes);
  if (error != cudaErrorMemoryAllocation) return ErrorOf(error);
  cudaGetLastError();
  *memory = nullptr;
  return nullptr;
}
const char* Release(void* memory) { return ErrorOf(cudaFree(memory)); }

const char* Copy(void* to, const void* from, size_t bytes, CopyDirection direction, void* stream) {
  const cudaMemcpyKind kind = direction == CopyDirection::kToDevice ? cudaMemcpyHostToDevice
                              : direction == CopyDirection::kToHost ? cudaMemcpyDeviceToHost
                                                                    : cudaMemcpyDeviceToDevice;
  return ErrorOf(cudaMemcpyAsync(to, from, bytes, kind, StreamOf(stream)));
}
const char* Fill(void* memory, int byte, size_t bytes, void* stream) {
  return ErrorOf(cudaMemsetAsync(memory, byte, bytes, StreamOf(stream)));
}
const char* Synchronize(void* stream) { return ErrorOf(cudaStreamSynchronize(StreamOf(stream))); }
const char* SynchronizeAll() { return ErrorOf(cudaDeviceSynchronize()); }
const char* FreeMemory(size_t* free_bytes, size_t* total_bytes) {
  return ErrorOf(cudaMemGetInfo(free_bytes, total_bytes));
}

const char* CreateEvent(void** event) {
  cudaEvent_t created;
  if (const char* error = ErrorOf(cudaEventCreate(&created))) return error;
  *event = created;
  return nullptr;
}
const char* DestroyEvent(void* event) { return ErrorOf(cudaEventDestroy(EventOf(event))); }
const char* RecordEvent(void* event, void* stream) {
  return ErrorOf(cudaEventRecord(EventOf(event), StreamOf(stream)));
}
const char* ElapsedMs(float* ms, void* from_event, void* to_event) {
  for (void* event : {from_event, to_event}) {
    if (const char* error = ErrorOf(cudaEventSynchronize(EventOf(event)))) return error;
  }
  return ErrorOf(cudaEventElapsedTime(ms, EventOf(from_event), EventOf(to_event)));
}

const char* CreateStream(void** stream) {
  cudaStream_t made;
  if (const char* error = ErrorOf(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking))) {
    return error;
  }
  *stream = made;
  return nullptr;
}
const char* DestroyStream(void* stream) { return ErrorOf(cudaStreamDestroy(StreamOf(stream))); }

const char* BeginCapture(void** stream) {
  cudaStream_t made;
  // A stream that waits for the default stream: of another, CUDA would not refuse work on that one but do it.
  if (const char* error = ErrorOf(cudaStreamCreateWithFlags(&made, cudaStreamDefault)))
    return error;
  const cudaError_t error = cudaStreamBeginCapture(made, cudaStreamCaptureModeThreadLocal);
  if (error != cudaSuccess) cudaStreamDestroy(made);
  *stream = made;
  return ErrorOf(error);
}
const char* EndCapture(void* stream, void** graph) {
  cudaGraph_t recorded = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaError_t error = cudaStreamEndCapture(StreamOf(stream), &recorded);
  if (error == cudaSuccess) error = cudaGraphInstantiate(&executable, recorded, 0);
  if (recorded != nullptr) cudaGraphDestroy(recorded);
  cudaStreamDestroy(StreamOf(stream));
  *graph = executable;
  return ErrorOf(error);
}
const char* LaunchGraph(void* graph, void* stream) {
  return ErrorOf(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), StreamOf(stream)));
}
const char* DestroyGraph(void* graph) {
  return ErrorOf(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

#ifdef __CUDACC__
void RegisterBuffer(const void*, size_t, bool) {}
void UnregisterBuffer(const void*) {}
SimulatedGpu GetSimulatedGpu() { return {}; }
#else
using cuda_simulator::RegisterBuffer;
using cuda_simulator::UnregisterBuffer;
SimulatedGpu GetSimulatedGpu() {
  const cuda_simulator::Gpu gpu = cuda_simulator::CurrentSettings().gpu;
  return {gpu.compute_capability_major, gpu.compute_capability_minor,
          gpu.max_shared_bytes_per_block};
}
#endif

}  // namespace

TFB_KERNEL_TABLE(CudaApi, {&Allocate,
                           &Release,
                           &Copy,
                           &Fill,
                           &Synchronize,
                           &SynchronizeAll,
                           &FreeMemory,
                           &CreateEvent,
                           &DestroyEvent,
                           &RecordEvent,
                           &ElapsedMs,
                           &CreateStream,
                           &DestroyStream,
                           &BeginCapture,
                           &EndCapture,
                           &LaunchGraph,
                           &DestroyGraph,
                           &RegisterBuffer,
                           &UnregisterBuffer,
                           &GetSimulatedGpu});

}  // namespace tfb
