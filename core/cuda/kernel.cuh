// Every .cu source includes this header first: it provides CUDA, or the simulator instead, and the
// few operations that the two spell differently.
#ifndef TFB_CORE_CUDA_KERNEL_CUH_
#define TFB_CORE_CUDA_KERNEL_CUH_

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#else
#include "core/cuda/simulator/cuda_runtime.h"
#endif

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/ptx.cuh"
#include "core/cuda/shared_opt_in.h"

namespace tfb {
namespace {  // each source is compiled twice into one program

// ---- How C++ finds a source's launchers: core/cuda/kernel_table.h ----

#ifdef __CUDACC__
constexpr CudaTarget kTarget = CudaTarget::kGpu;
#else
constexpr CudaTarget kTarget = CudaTarget::kSimulator;
#endif

template <class Table>
class KernelRegistration {
 public:
  explicit KernelRegistration(const Table& table) : table_(table) {
    registered_kernels<Table>[static_cast<int>(kTarget)] = &table_;
  }

 private:
  const Table table_;
};

#define TFB_KERNEL_TABLE(Table, ...) TFB_KERNEL_TABLE_OF_LINE(__LINE__, Table, __VA_ARGS__)
#define TFB_KERNEL_TABLE_OF_LINE(line, Table, ...) TFB_KERNEL_TABLE_NAMED(line, Table, __VA_ARGS__)
#define TFB_KERNEL_TABLE_NAMED(line, Table, ...) \
  const KernelRegistration<Table> kernel_registration_##line(Table __VA_ARGS__)

// ---- Launching ----

struct KernelShape {
  // Blocks and threads of one dimension.
  KernelShape(int64_t block_count, int threads, size_t dynamic_shared_bytes = 0)
      : fits_grid(block_count <= INT32_MAX),
        grid(static_cast<unsigned>(block_count)),
        block(static_cast<unsigned>(threads)),
        shared_bytes(dynamic_shared_bytes) {}
  KernelShape(const dim3& grid_size, const dim3& block_size, size_t dynamic_shared_bytes = 0)
      : grid(grid_size), block(block_size), shared_bytes(dynamic_shared_bytes) {}

  bool fits_grid = true;
  dim3 grid;
  dim3 block;
  size_t shared_bytes;  // dynamic
};

__host__ __device__ constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the blocks of a kernel that takes `tasks` in turns of gridDim.x: one for each, or `most`.
constexpr int64_t BlocksInTurns(int64_t tasks, int64_t most = 65535) {
  return tasks < most ? tasks : most;
}

// Admits launches of the kernel with `bytes` bytes of dynamic shared memory, of which more than 48
// KiB need an opt-in. A kernel is opted in once on each GPU, and again only for more.
template <class... Parameters>
cudaError_t OptInToShared(void (*kernel)(Parameters...), size_t bytes) {
  if (bytes <= 48 << 10) return cudaSuccess;
#ifdef __CUDACC__
  int device = 0;
  if (const cudaError_t unknown = cudaGetDevice(&device); unknown != cudaSuccess) return unknown;
  const auto opt_in = [](const void* function, size_t most) -> int {
    return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(most));
  };
  return static_cast<cudaError_t>(
      OptInOnce(device, reinterpret_cast<const void*>(kernel), bytes, opt_in));
#else
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
#endif
}

#ifdef __CUDACC__
// Returns that a block of the kernel needs more shared memory than the GPU has for one, in the
// simulator's words; null where it does not. The text is valid until the thread's next call.
inline const char* TooMuchShared(const char* name, const void* kernel, size_t dynamic_bytes) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess ||
      cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    return nullptr;
  }
  const size_t bytes = dynamic_bytes + attributes.sharedSizeBytes;
  if (bytes <= static_cast<size_t>(most)) return nullptr;
  static thread_local char text[256];
  snprintf(text, sizeof(text),
           "%s: shared memory is %zu bytes a block, of which %zu are dynamic; the GPU allows %d",
           name, bytes, dynamic_bytes, most);
  return text;
}
#endif

// Enqueues kernel(arguments...). Returns null, or a text that says why the launch failed, which is
// valid until the next launch: where a block needs more shared memory than the device has, both
// numbers. An empty grid is no work.
template <class... Parameters, class... Arguments>
const char* Launch(const char* name, void (*kernel)(Parameters...), const KernelShape& shape,
                   void* stream, const Arguments&... arguments) {
  if (!shape.fits_grid) return "more tasks than a grid has blocks for, which are 2^31 - 1";
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return nullptr;
  cudaError_t error = OptInToShared(kernel, shape.shared_bytes);
#ifdef __CUDACC__
  if (error == cudaSuccess) {
    kernel<<<shape.grid, shape.block, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(
        arguments...);
    error = cudaGetLastError();
  }
#else
  if (error == cudaSuccess) {
    error = cuda_simulator::LaunchKernel(
        name, kernel,
        {shape.grid, shape.block, shape.shared_bytes, static_cast<cudaStream_t>(stream)},
        arguments...);
  }
#endif
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, so that the next launch does not return it again
#ifdef __CUDACC__
  const char* reason =
      TooMuchShared(name, reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  if (reason != nullptr) return reason;
#endif
  return cudaGetErrorString(error);
}

// Returns the block's dynamic shared memory, aligned to 128 bytes. kMost are the bytes that a launch
// of the kernel has at most, or 0 where the problem's sizes decide. They are in the kernel's PTX for
// tools/cuda/kernel_resources.h; the simulator finds a launch that has more.
template <size_t kMost = 0>
__device__ inline unsigned char* DynamicShared() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  if (kMost > 0) asm volatile("// dynamic shared %0" : : "n"(static_cast<int>(kMost)));
  return dynamic_shared;
#else
  return static_cast<unsigned char*>(cuda_simulator::DynamicSharedBytes(kMost));
#endif
}

// ---- Tensors of any dtype ----

// Returns element `offset` of `data` as a float.
__device__ inline float LoadElement(const void* data, Element type, int64_t offset) {
  switch (type) {
    case Element::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[offset]);
    case Element::kF16:
      return __half2float(static_cast<const __half*>(data)[offset]);
    default:
      return static_cast<const float*>(data)[offset];
  }
}
__device__ inline void StoreElement(void* data, Element type, int64_t offset, float value) {
  switch (type) {
    case Element::kBf16:
      static_cast<__nv_bfloat16*>(data)[offset] = __float2bfloat16_rn(value);
      break;
    case Element::kF16:
      static_cast<__half*>(data)[offset] = __float2half_rn(value);
      break;
    default:
      static_cast<float*>(data)[offset] = value;
  }
}

// The same for a view; functor.h has its offsets.
__device__ inline float Load(const DeviceView& view, int64_t offset) {
  return LoadElement(view.data, view.element, offset);
}
__device__ inline void Store(const DeviceView& view, int64_t offset, float value) {
  StoreElement(view.data, view.element, offset, value);
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_KERNEL_CUH_
