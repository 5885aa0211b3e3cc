// Instructions that GPUs of compute capability 9.0 add, in code compiled for sm_90a: barriers in shared
// memory that count bytes, copies of boxes of a tensor (TMA), and products of matrices in shared
// memory by four warps (wgmma). The simulator interprets them: see ptx.cuh.
//
// PTX ISA 8.x: mbarrier, cp.async.bulk.tensor, wgmma.mma_async, setmaxnreg, bar, fence.proxy.
#ifndef TFB_CORE_CUDA_HOPPER_CUH_
#define TFB_CORE_CUDA_HOPPER_CUH_

#include "core/cuda/kernel.cuh"
#include "core/cuda/tensor_map.h"

// Whether the code that is compiled may use them. Kernels have an empty body where it may not.
#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TFB_IS_HOPPER 1
#else
#define TFB_IS_HOPPER 0
#endif

#define TFB_PTX_BARRIER_INIT "mbarrier.init.shared::cta.b64 [%0], %1;"
#define TFB_PTX_BARRIER_ARRIVE "mbarrier.arrive.shared::cta.b64 _, [%0];"
#define TFB_PTX_BARRIER_EXPECT "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
#define TFB_PTX_BARRIER_TRY_WAIT                                           \
  "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; " \
  "selp.u32 %0, 1, 0, p; }"
#define TFB_PTX_FENCE_BARRIER_INIT "fence.mbarrier_init.release.cluster;"
#define TFB_PTX_FENCE_ASYNC "fence.proxy.async.shared::cta;"
#define TFB_PTX_TMA_LOAD_4D                                                      \
  "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes " \
  "[%0], [%1, {%2, %3, %4, %5}], [%6];"
#define TFB_PTX_WGMMA_FENCE "wgmma.fence.sync.aligned;"
#define TFB_PTX_WGMMA_COMMIT "wgmma.commit_group.sync.aligned;"
#define TFB_PTX_WGMMA_WAIT "wgmma.wait_group.sync.aligned %0;"
#define TFB_PTX_MORE_REGISTERS "setmaxnreg.inc.sync.aligned.u32 %0;"
#define TFB_PTX_FEWER_REGISTERS "setmaxnreg.dec.sync.aligned.u32 %0;"
#define TFB_PTX_NAMED_SYNC "bar.sync %0, %1;"
#define TFB_PTX_NAMED_ARRIVE "bar.arrive %0, %1;"
#define TFB_PTX_NAMED_OR                                                            \
  "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.pred q, %1, %2, p; " \
  "selp.u32 %0, 1, 0, q; }"

#define TFB_PTX_REGISTERS_32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TFB_PTX_REGISTERS_64                                                      \
  TFB_PTX_REGISTERS_32                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "   \
  "%62, %63"
// Sums of registers += products. `adds` is the operand that is 0 where the sums before count as 0.
#define TFB_PTX_WGMMA(n, type, registers, operands, adds, transposed)               \
  "{ .reg .pred p; setp.ne.b32 p, " adds ", 0; wgmma.mma_async.sync.aligned.m64n" n \
  "k16.f32." type "." type " {" registers "}, " operands ", p, 1, 1, " transposed "; }"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

template <class T>
struct IsHalf {
  static constexpr bool kValue = false;  // bf16
};
template <>
struct IsHalf<__half> {
  static constexpr bool kValue = true;
};

constexpr int kWarpGroup = 128;  // threads whose four warps multiply together

__device__ TFB_PTX_INLINE unsigned SharedAddress(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- Barriers in shared memory ----
//
// A phase of a barrier ends when `count` arrivals and all expected bytes have come; then the next
// begins. Phases have parities 0, 1, 0, ... A wait for parity p returns once the phase of that parity
// has ended, which the phase before the first, of parity 1, has from the beginning.

__device__ TFB_PTX_INLINE void InitBarrier(uint64_t* barrier, int count) {
  TFB_PTX_MEMORY(TFB_PTX_BARRIER_INIT, (TFB_PTX_NONE),
                 (TFB_PTX_OPERAND("r", SharedAddress(barrier)), TFB_PTX_OPERAND("r", count)));
}
// Makes barriers that one thread has set up visible to copies, before the block's own barrier.
__device__ TFB_PTX_INLINE void FenceBarrierInit() {
  TFB_PTX_MEMORY(TFB_PTX_FENCE_BARRIER_INIT, (TFB_PTX_NONE), (TFB_PTX_NONE));
}
__device__ TFB_PTX_INLINE void Arrive(uint64_t* barrier) {
  TFB_PTX_MEMORY(TFB_PTX_BARRIER_ARRIVE, (TFB_PTX_NONE),
                 (TFB_PTX_OPERAND("r", SharedAddress(barrier))));
}
// Arrives, and has the phase wait for that many bytes of copies.
__device__ TFB_PTX_INLINE void ArriveAndExpect(uint64_t* barrier, unsigned bytes) {
  TFB_PTX_MEMORY(TFB_PTX_BARRIER_EXPECT, (TFB_PTX_NONE),
                 (TFB_PTX_OPERAND("r", SharedAddress(barrier)), TFB_PTX_OPERAND("r", bytes)));
}
__device__ TFB_PTX_INLINE void Wait(uint64_t* barrier, unsigned parity) {
  const unsigned address = SharedAddress(barrier);
  unsigned done;
  do {
    TFB_PTX_MEMORY(TFB_PTX_BARRIER_TRY_WAIT, (TFB_PTX_OPERAND("=r", done)),
                   (TFB_PTX_OPERAND("r", address), TFB_PTX_OPERAND("r", parity)));
  } while (done == 0);
}

// The block's barriers by number, from 1 on, for `threads` threads. One that arrives does not wait.
__device__ TFB_PTX_INLINE void NamedSync(int number, int threads) {
  TFB_PTX_MEMORY(TFB_PTX_NAMED_SYNC, (TFB_PTX_NONE),
                 (TFB_PTX_OPERAND("r", number), TFB_PTX_OPERAND("r", threads)));
}
__device__ TFB_PTX_INLINE void NamedArrive(int number, int threads) {
  TFB_PTX_MEMORY(TFB_PTX_NAMED_ARRIVE, (TFB_PTX_NONE),
                 (TFB_PTX_OPERAND("r", number), TFB_PTX_OPERAND("r", threads)));
}
// Like NamedSync; returns whether `any` of the threads has a number other than 0.
__device__ TFB_PTX_INLINE bool NamedAny(int number, int threads, unsigned any) {
  unsigned found;
  TFB_PTX_MEMORY(
      TFB_PTX_NAMED_OR, (TFB_PTX_OPERAND("=r", found)),
      (TFB_PTX_OPERAND("r", number), TFB_PTX_OPERAND("r", threads), TFB_PTX_OPERAND("r", any)));
  return found != 0;
}

// Makes this thread's ordinary stores to shared memory visible to copies and products.
__device__ TFB_PTX_INLINE void FenceAsync() {
  TFB_PTX_MEMORY(TFB_PTX_FENCE_ASYNC, (TFB_PTX_NONE), (TFB_PTX_NONE));
}

// ---- Registers ----

// Take and give back registers of a warp group; every warp of it calls them. kCount is a multiple of
// 8, of each thread.
template <int kCount>
__device__ TFB_PTX_INLINE void MoreRegisters() {
  TFB_PTX_MEMORY(TFB_PTX_MORE_REGISTERS, (TFB_PTX_NONE), (TFB_PTX_OPERAND("n", kCount)));
}
template <int kCount>
__device__ TFB_PTX_INLINE void FewerRegisters() {
  TFB_PTX_MEMORY(TFB_PTX_FEWER_REGISTERS, (TFB_PTX_NONE), (TFB_PTX_OPERAND("n", kCount)));
}

// ---- Copies of boxes ----

// Starts the copy of the map's box at the coordinates, innermost first, to shared memory; elements
// outside of the tensor are 0. Its bytes arrive at the barrier. One thread calls it; the innermost
// coordinate is a multiple of 8, below 0 too, and `to` of 1024.
__device__ TFB_PTX_INLINE void CopyBox(void* to, const TensorMap& map, int c0, int c1, int c2,
                                       int c3, uint64_t* barrier) {
  TFB_PTX_MEMORY(TFB_PTX_TMA_LOAD_4D, (TFB_PTX_NONE),
                 (TFB_PTX_OPERAND("r", SharedAddress(to)), TFB_PTX_OPERAND("l", &map),
                  TFB_PTX_OPERAND("r", c0), TFB_PTX_OPERAND("r", c1), TFB_PTX_OPERAND("r", c2),
                  TFB_PTX_OPERAND("r", c3), TFB_PTX_OPERAND("r", SharedAddress(barrier))));
}

// ---- Products of a warp group ----

// Describes a matrix of 16-bit numbers in shared memory, in panels of rows of 128 bytes, whose
// 16-byte chunks are exchanged by the row's number modulo 8 (128-byte swizzle). A panel begins at a
// multiple of 1024 bytes; `rows` may begin within it, at a multiple of 8 rows or 16 channels.
//
// The operands of a product are 64 or N rows of 16 numbers of the dimension that is summed over. Where
// rows are those, 16 numbers of each are used, and `panel_bytes` is not. Where rows are of the
// dimension that is summed over (`transposed`), 16 of them are used, and columns 64 on are those of
// the panel `panel_bytes` further on.
__device__ TFB_PTX_INLINE uint64_t DescribeMatrix(const void* rows, unsigned panel_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{panel_bytes >> 4} << 16 |
         (SharedAddress(rows) & 0x3ffff) >> 4;
}
// Returns the matrix that begins `bytes` further on.
__device__ TFB_PTX_INLINE uint64_t MatrixOn(uint64_t matrix, unsigned bytes) {
  return matrix + (bytes >> 4);
}

// Orders the products that follow after earlier accesses to their registers.
__device__ TFB_PTX_INLINE void BeginProducts() {
  TFB_PTX_MEMORY(TFB_PTX_WGMMA_FENCE, (TFB_PTX_NONE), (TFB_PTX_NONE));
}
// Ends a group of products.
__device__ TFB_PTX_INLINE void EndProducts() {
  TFB_PTX_MEMORY(TFB_PTX_WGMMA_COMMIT, (TFB_PTX_NONE), (TFB_PTX_NONE));
}
// Waits until at most kGroups groups are not done.
template <int kGroups>
__device__ TFB_PTX_INLINE void WaitForProducts() {
  TFB_PTX_MEMORY(TFB_PTX_WGMMA_WAIT, (TFB_PTX_NONE), (TFB_PTX_OPERAND("n", kGroups)));
}
// Keeps the compiler from moving accesses to the registers across this place.
template <int kCount>
__device__ TFB_PTX_INLINE void Pin(float (&registers)[kCount]) {
#ifdef __CUDACC__
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+f"(registers[n])::"memory");
#endif
}
template <int kCount>
__device__ TFB_PTX_INLINE void Pin(unsigned (&registers)[kCount]) {
#ifdef __CUDACC__
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+r"(registers[n])::"memory");
#endif
}

// Start sums[64][n] (+)= a[64][16] b[16][n]. Accumulators and the `a` of registers lie in the four
// warps as those of m16n8k16 do, 16 rows in each; register 4 c + e of the sums is register e of
// columns 8 c on. kAdds = 0 begins the sums.
#define TFB_PTX_SUMS_8(d, n)                                                                     \
  TFB_PTX_OPERAND("+f", d[n]), TFB_PTX_OPERAND("+f", d[n + 1]), TFB_PTX_OPERAND("+f", d[n + 2]), \
      TFB_PTX_OPERAND("+f", d[n + 3]), TFB_PTX_OPERAND("+f", d[n + 4]),                          \
      TFB_PTX_OPERAND("+f", d[n + 5]), TFB_PTX_OPERAND("+f", d[n + 6]),                          \
      TFB_PTX_OPERAND("+f", d[n + 7])
#define TFB_PTX_SUMS_32(d, n)                                                \
  TFB_PTX_SUMS_8(d, n), TFB_PTX_SUMS_8(d, n + 8), TFB_PTX_SUMS_8(d, n + 16), \
      TFB_PTX_SUMS_8(d, n + 24)
#define TFB_PTX_SUMS_64(d) TFB_PTX_SUMS_32(d, 0), TFB_PTX_SUMS_32(d, 32)

// With a and b in shared memory, rows of both of the summed dimension.
template <class T, int kAdds>
__device__ TFB_PTX_INLINE void MultiplyN128(float (&d)[64], uint64_t a, uint64_t b) {
  if (IsHalf<T>::kValue) {
    TFB_PTX_MEMORY(TFB_PTX_WGMMA("128", "f16", TFB_PTX_REGISTERS_64, "%64, %65", "%66", "0, 0"),
                   (TFB_PTX_SUMS_64(d)),
                   (TFB_PTX_OPERAND("l", a), TFB_PTX_OPERAND("l", b), TFB_PTX_OPERAND("n", kAdds)));
  } else {
    TFB_PTX_MEMORY(TFB_PTX_WGMMA("128", "bf16", TFB_PTX_REGISTERS_64, "%64, %65", "%66", "0, 0"),
                   (TFB_PTX_SUMS_64(d)),
                   (TFB_PTX_OPERAND("l", a), TFB_PTX_OPERAND("l", b), TFB_PTX_OPERAND("n", kAdds)));
  }
}

// With a in registers and b transposed, of 128 or 64 columns. The sums go on.
#define TFB_PTX_LEFT(a)                                                               \
  TFB_PTX_OPERAND("r", a[0]), TFB_PTX_OPERAND("r", a[1]), TFB_PTX_OPERAND("r", a[2]), \
      TFB_PTX_OPERAND("r", a[3])
template <class T>
__device__ TFB_PTX_INLINE void MultiplyTransposed(float (&d)[64], const unsigned* a, uint64_t b) {
  if (IsHalf<T>::kValue) {
    TFB_PTX_MEMORY(
        TFB_PTX_WGMMA("128", "f16", TFB_PTX_REGISTERS_64, "{%64, %65, %66, %67}, %68", "%69", "1"),
        (TFB_PTX_SUMS_64(d)), (TFB_PTX_LEFT(a), TFB_PTX_OPERAND("l", b), TFB_PTX_OPERAND("n", 1)));
  } else {
    TFB_PTX_MEMORY(
        TFB_PTX_WGMMA("128", "bf16", TFB_PTX_REGISTERS_64, "{%64, %65, %66, %67}, %68", "%69", "1"),
        (TFB_PTX_SUMS_64(d)), (TFB_PTX_LEFT(a), TFB_PTX_OPERAND("l", b), TFB_PTX_OPERAND("n", 1)));
  }
}
template <class T>
__device__ TFB_PTX_INLINE void MultiplyTransposed(float (&d)[32], const unsigned* a, uint64_t b) {
  if (IsHalf<T>::kValue) {
    TFB_PTX_MEMORY(
        TFB_PTX_WGMMA("64", "f16", TFB_PTX_REGISTERS_32, "{%32, %33, %34, %35}, %36", "%37", "1"),
        (TFB_PTX_SUMS_32(d, 0)),
        (TFB_PTX_LEFT(a), TFB_PTX_OPERAND("l", b), TFB_PTX_OPERAND("n", 1)));
  } else {
    TFB_PTX_MEMORY(
        TFB_PTX_WGMMA("64", "bf16", TFB_PTX_REGISTERS_32, "{%32, %33, %34, %35}, %36", "%37", "1"),
        (TFB_PTX_SUMS_32(d, 0)),
        (TFB_PTX_LEFT(a), TFB_PTX_OPERAND("l", b), TFB_PTX_OPERAND("n", 1)));
  }
}

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_HOPPER_CUH_
