// The CUDA runtime's calls on which core/cuda/runtime.h is built, in plain C types. Each returns
// null, or a text that says why it failed, which is valid until the next call.
#ifndef TFB_CORE_CUDA_CUDA_API_H_
#define TFB_CORE_CUDA_CUDA_API_H_

#include <stddef.h>

#include "core/cuda/kernel_table.h"

namespace tfb {

enum class CopyDirection : unsigned char { kToDevice, kToHost, kWithinDevice };

// The GPU that the simulator stands for, see its Settings.
struct SimulatedGpu {
  int compute_capability_major;
  int compute_capability_minor;
  size_t shared_memory_bytes_per_block;
};

struct CudaApi {
  // *memory becomes null, with no error, where there is not enough memory.
  const char* (*allocate)(void** memory, size_t bytes);
  const char* (*release)(void* memory);
  const char* (*copy)(void* to, const void* from, size_t bytes, CopyDirection direction,
                      void* stream);
  const char* (*fill)(void* memory, int byte, size_t bytes, void* stream);
  const char* (*synchronize)(void* stream);
  const char* (*synchronize_all)();  // all streams
  const char* (*free_memory)(size_t* free_bytes, size_t* total_bytes);
  const char* (*create_event)(void** event);
  const char* (*destroy_event)(void* event);
  const char* (*record_event)(void* event, void* stream);
  // Waits for both events.
  const char* (*elapsed_ms)(float* ms, void* from_event, void* to_event);
  // Makes a stream that does not wait for the default stream.
  const char* (*create_stream)(void** stream);
  const char* (*destroy_stream)(void* stream);
  // Makes a stream whose work is recorded, from now to end_capture, instead of done.
  const char* (*begin_capture)(void** stream);
  // Destroys the stream and gives a graph of the work, which launch_graph enqueues as a whole, or an
  // error and null where a call in between cannot be recorded: one that waits or allocates, or work
  // on another stream.
  const char* (*end_capture)(void* stream, void** graph);
  const char* (*launch_graph)(void* graph, void* stream);
  const char* (*destroy_graph)(void* graph);
  // Admit kernels to memory, whose contents do or do not count as written, and refuse it to them
  // again. For the simulator; a GPU ignores it.
  void (*register_buffer)(const void* begin, size_t bytes, bool written);
  void (*unregister_buffer)(const void* begin);
  SimulatedGpu (*simulated_gpu)();  // zeros on a GPU
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_CUDA_API_H_
