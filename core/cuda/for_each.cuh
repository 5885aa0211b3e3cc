// The kernels of functors: see core/cuda/functor.h.
#ifndef TFB_CORE_CUDA_FOR_EACH_CUH_
#define TFB_CORE_CUDA_FOR_EACH_CUH_

#include "core/cuda/functor.h"
#include "core/cuda/warp.cuh"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

// One column of a row.
class DevicePiece {
 public:
  static constexpr int kMost = 1;
  __device__ explicit DevicePiece(int64_t column) : column_(column) {}
  __device__ int64_t first() const { return column_; }
  __device__ int64_t end() const { return column_ + 1; }
  __device__ static constexpr int count() { return 1; }

  __device__ void Load(const DeviceView& view, int64_t offset, int64_t stride,
                       float (&to)[1]) const {
    to[0] = tfb::Load(view, offset + column_ * stride);
  }
  __device__ void Store(const float (&from)[1], const DeviceView& view, int64_t offset,
                        int64_t stride) const {
    tfb::Store(view, offset + column_ * stride, from[0]);
  }
  __device__ void Copy(const float* from, float* to) const { to[column_] = from[column_]; }

 private:
  int64_t column_;
};

constexpr int kForEachThreads = 256;

// Threads do elements in turns.
template <class Functor>
__global__ void __launch_bounds__(kForEachThreads) ForEachElement(const Functor f, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kForEachThreads;
#pragma unroll 1
  for (int64_t n = ThreadOfGrid(); n < count; n += step) f(n);
}

// Threads do columns of rows in turns: neighbouring threads have neighbouring columns.
template <class Functor>
__global__ void __launch_bounds__(kForEachThreads)
    ForEachColumn(const Functor f, int64_t rows, int64_t columns) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kForEachThreads;
#pragma unroll 1
  for (int64_t n = ThreadOfGrid(); n < rows * columns; n += step) {
    f(n / columns, DevicePiece(n % columns));
  }
}

template <class Functor>
const char* LaunchForEach(const char* name, const Functor& functor, int64_t count, void* stream) {
  return Launch(name, &ForEachElement<Functor>,
                {BlocksInTurns(CeilDiv(count, kForEachThreads)), kForEachThreads}, stream, functor,
                count);
}
template <class Functor>
const char* LaunchForEachInRows(const char* name, const Functor& functor, int64_t rows,
                                int64_t columns, void* stream) {
  const int64_t threads = rows * columns;
  return Launch(name, &ForEachColumn<Functor>,
                {BlocksInTurns(CeilDiv(threads, kForEachThreads)), kForEachThreads}, stream,
                functor, rows, columns);
}

// Register the kernel of a functor, in its namespace.
#define TFB_FOR_EACH(Functor)                                                         \
  TFB_KERNEL_TABLE(ForEachKernel<Functor>,                                            \
                   {[](const Functor& functor, int64_t rows, int64_t, void* stream) { \
                     return LaunchForEach(#Functor, functor, rows, stream);           \
                   }})
#define TFB_FOR_EACH_IN_ROWS(Functor)                                                         \
  TFB_KERNEL_TABLE(ForEachKernel<Functor>,                                                    \
                   {[](const Functor& functor, int64_t rows, int64_t columns, void* stream) { \
                     return LaunchForEachInRows(#Functor, functor, rows, columns, stream);    \
                   }})

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_FOR_EACH_CUH_
