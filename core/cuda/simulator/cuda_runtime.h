// Defines CUDA's language and the part of its runtime that kernels and their launchers use, for a
// host compiler. This header replaces <cuda_runtime.h>, <cuda_bf16.h> and <cuda_fp16.h>. A source
// includes one of the two:
//
//   #ifdef __CUDACC__
//   #include <cuda_runtime.h>
//   #else
//   #include "core/cuda/simulator/cuda_runtime.h"
//   #endif
//
// Everything has CUDA's name and meaning. Missing are <<<...>>> and `extern __shared__`, which are
// not C++ (use cuda_simulator::LaunchKernel and DynamicShared), __activemask, cooperative groups,
// textures, and everything that no kernel of this project has needed yet.
#ifndef TFB_CORE_CUDA_SIMULATOR_CUDA_RUNTIME_H_
#define TFB_CORE_CUDA_SIMULATOR_CUDA_RUNTIME_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, so a kernel's static variables are its shared memory.
#define __shared__ static

namespace cuda_simulator {

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
  constexpr dim3(const uint3& size) : x(size.x), y(size.y), z(size.z) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// The indices of the running thread. They are constants for the thread, so the compiler does not
// report reads of them. The simulator writes them under other names.
extern const uint3 threadIdx __asm__("cuda_simulator_threadIdx");
extern const uint3 blockIdx __asm__("cuda_simulator_blockIdx");
extern const uint3 blockDim __asm__("cuda_simulator_blockDim");
extern const uint3 gridDim __asm__("cuda_simulator_gridDim");
constexpr int warpSize = 32;

// ---- Barriers and warps ----

// The arguments are the place of the call in the source.
void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE());
void __syncwarp(unsigned mask = ~0u);

// The operation of a meeting. One of the lanes that met calls it with the arguments of all of
// these, `lanes`; arguments[lane] is null for other lanes.
using Collective = void (*)(void* const arguments[32], unsigned lanes);
// Makes the running lane wait until all lanes of `mask` that have not finished have called it with
// the same `name` and mask. All collective operations of a warp use this function.
void MeetInWarp(const char* name, unsigned mask, void* argument, Collective complete);
// Returns 0 to 31.
int LaneId();

// Returns the value of that lane of the warp.
uint64_t Shuffle(unsigned mask, uint64_t value, int source_lane);

template <class T>
T ShuffleFrom(unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "as on a GPU");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = Shuffle(mask, bits, source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int first = LaneId() / width * width;
  return ShuffleFrom(mask, value, first + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
  const int lane = LaneId(), source = lane ^ lane_mask;
  // A lane of a later group gives no value; a lane of an earlier group does.
  return ShuffleFrom(mask, value, source / width > lane / width ? lane : source);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = LaneId(), source = lane - static_cast<int>(delta);
  return ShuffleFrom(mask, value, source < lane / width * width ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = LaneId(), source = lane + static_cast<int>(delta);
  return ShuffleFrom(mask, value, source >= (lane / width + 1) * width ? lane : source);
}
unsigned __ballot_sync(unsigned mask, int predicate);
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

// Orders what comes before it for other blocks that see a later atomic operation of the thread.
void __threadfence();
inline void __threadfence_block() {}

// ---- Asynchronous copies: <cuda_pipeline.h> ----

// Copies 4, 8 or 16 bytes to shared memory, the last `zero_bytes` as zeros. The copy is done and
// visible to this thread after __pipeline_wait_prior; until then no thread may use the destination.
void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zero_bytes = 0);
void __pipeline_commit();
void __pipeline_wait_prior(size_t groups);

// ---- Inline PTX, see core/cuda/ptx.cuh ----

// Returns an address for instructions on shared memory, 32 bits as on a GPU.
size_t __cvta_generic_to_shared(const void* address);

// An operand of inline assembly: its constraint ("=r" and "=f" for written registers, "+f" for
// changed ones, "r", "f" and "l" for read ones, "n" for constants) and where its value is.
class PtxOperand {
 public:
  PtxOperand() = default;  // no operand
  PtxOperand(const char* constraint, unsigned& x) : PtxOperand(constraint, &x, 'r', false) {}
  PtxOperand(const char* constraint, const unsigned& x) : PtxOperand(constraint, &x, 'r', true) {}
  PtxOperand(const char* constraint, float& x) : PtxOperand(constraint, &x, 'f', false) {}
  PtxOperand(const char* constraint, const float& x) : PtxOperand(constraint, &x, 'f', true) {}
  PtxOperand(const char* constraint, const int& x) : PtxOperand(constraint, &x, 'r', true) {}
  PtxOperand(const char* constraint, const void* pointer)
      : PtxOperand(constraint, pointer, 'l', true) {}
  PtxOperand(const char* constraint, uint64_t x)
      : PtxOperand(constraint, reinterpret_cast<const void*>(x), 'l', true) {}

  // r: unsigned or int, f: float, l: a pointer or 64 bits, n: a constant
  char type() const { return type_ == 'r' && letter_ == 'n' ? 'n' : type_; }
  // Tells whether the constraint is of the operand's type.
  bool is_consistent() const { return letter_ == type() && !(is_constant_ && is_written()); }
  bool is_written() const { return access_ == '=' || access_ == '+'; }
  bool is_read() const { return access_ != '='; }
  // The place of an unsigned, an int or a float; a pointer, or 64 bits, itself.
  void* place() const { return place_; }

 private:
  PtxOperand(const char* constraint, const void* place, char type, bool is_constant)
      : place_(const_cast<void*>(place)),
        access_(constraint[0] == '=' || constraint[0] == '+' ? constraint[0] : 'r'),
        letter_(constraint[access_ == 'r' ? 0 : 1]),
        type_(type),
        is_constant_(is_constant) {}

  void* place_ = nullptr;
  char access_ = ' ';
  char letter_ = ' ';
  char type_ = ' ';
  bool is_constant_ = true;
};

// Executes one PTX instruction, of code at `site`. The text, a literal, names the operands %0, %1,
// ..., and its address stands for it: a text is read once.
void ExecutePtxAt(const void* site, const char* text, const PtxOperand* operands, size_t count);

// Memory accesses inside this function are not the kernel's.
template <class... Operands>
__attribute__((no_sanitize("thread"), noinline)) void ExecutePtx(const char* text,
                                                                 Operands... operands) {
  const PtxOperand all[] = {operands...};
  ExecutePtxAt(__builtin_return_address(0), text, all, sizeof...(operands));
}

// ---- Atomics ----

// Reports an atomic access of the running thread to the checker.
void NoteAtomic(void* address, size_t bytes, const void* site);

// Accesses inside this function are not the kernel's: NoteAtomic has reported them.
template <class T, class Change>
__attribute__((no_sanitize("thread"), noinline)) T Atomically(T* address, T operand,
                                                              Change change) {
  NoteAtomic(address, sizeof(T), __builtin_return_address(0));
  const T old = *address;
  *address = change(old, operand);
  return old;
}
// The type of the address alone decides the type of an atomic.
template <class T>
using Same = std::common_type_t<T>;
template <class T>
T atomicAdd(T* address, Same<T> value) {
  return Atomically(address, value, [](T old, T added) { return static_cast<T>(old + added); });
}
template <class T>
T atomicMax(T* address, Same<T> value) {
  return Atomically(address, value, [](T old, T other) { return old < other ? other : old; });
}
template <class T>
T atomicMin(T* address, Same<T> value) {
  return Atomically(address, value, [](T old, T other) { return other < old ? other : old; });
}
template <class T>
T atomicExch(T* address, Same<T> value) {
  return Atomically(address, value, [](T, T other) { return other; });
}
template <class T>
T atomicOr(T* address, Same<T> value) {
  return Atomically(address, value, [](T old, T other) { return static_cast<T>(old | other); });
}
template <class T>
T atomicAnd(T* address, Same<T> value) {
  return Atomically(address, value, [](T old, T other) { return static_cast<T>(old & other); });
}
template <class T>
T atomicCAS(T* address, Same<T> expected, Same<T> value) {
  return Atomically(address, value,
                    [expected](T old, T other) { return old == expected ? other : old; });
}

// ---- Arithmetic ----

inline float __expf(float x) { return ::expf(x); }
inline float __logf(float x) { return ::logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / ::sqrtf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
using std::isfinite;
using std::isinf;
using std::isnan;

// ---- 16-bit types ----

struct __nv_bfloat16 {
  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
// Rounds to nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {static_cast<unsigned short>(0x7fff)};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float __half2float(__half x) {
  _Float16 half;
  std::memcpy(&half, &x, sizeof(half));
  return static_cast<float>(half);
}
inline __half __float2half_rn(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  __half bits;
  std::memcpy(&bits, &half, sizeof(half));
  return bits;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}

// ---- The runtime ----

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,  // the simulator found something wrong in a kernel
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureImplicit = 906,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct CUevent_st;
using cudaEvent_t = CUevent_st*;
struct CUgraph_st;
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraph_st*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;

// Returns registered host memory that counts as unwritten.
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
// Events record times of the host's clock.
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
// A capture records launches, fills and copies within the device. It finds calls that wait or
// allocate, and work on other streams, but not what a graph does with pointers to host memory.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGetLastError();
// For cudaErrorLaunchFailure, the text has the findings of the last failed launch, and is valid
// until the next launch.
const char* cudaGetErrorString(cudaError_t error);

// ---- Descriptions of tensors: <cuda.h> ----

enum CUresult : int { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
struct alignas(64) CUtensorMap {
  cuuint64_t opaque[16];
};
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
// Knows tensors of four dimensions and 16-bit numbers, and boxes of rows of 64 numbers.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill);

// ---- Launches ----

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic
  cudaStream_t stream = nullptr;
  const void* kernel = nullptr;
};
// Runs `body(context)` once for every thread of the grid. Kernels may read the context's bytes.
cudaError_t LaunchBody(const char* kernel_name, const LaunchShape& shape, void (*body)(void*),
                       void* context, size_t context_bytes);

// Runs kernel<<<shape.grid, shape.block, shape.shared_bytes>>>(arguments...) to its end. The name
// appears in findings.
template <class... Parameters, class... Arguments>
cudaError_t LaunchKernel(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
                         const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
    static void Run(void* context) {
      const Call& call = *static_cast<const Call*>(context);
      std::apply(call.kernel, call.arguments);
    }
  };
  Call call{kernel, std::tuple<Parameters...>(arguments...)};
  LaunchShape shape_of_kernel = shape;
  shape_of_kernel.kernel = reinterpret_cast<const void*>(kernel);
  return LaunchBody(name, shape_of_kernel, &Call::Run, &call, sizeof(call));
}

cudaError_t SetMaxDynamicShared(const void* kernel, int bytes);
// Admits launches of the kernel with that much dynamic shared memory. Whether a GPU has it, the
// launch says.
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
  return SetMaxDynamicShared(reinterpret_cast<const void*>(kernel), value);
}

// Returns the block's dynamic shared memory, aligned to 128 bytes. It is a finding where the launch
// has more than `most` bytes, if that is not 0.
void* DynamicSharedBytes(size_t most = 0);

}  // namespace cuda_simulator

using namespace cuda_simulator;  // CUDA's names are global

#endif  // TFB_CORE_CUDA_SIMULATOR_CUDA_RUNTIME_H_
