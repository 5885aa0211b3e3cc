// Functors of which host and device code are compiled from one source: small steps over elements or
// rows that every device runs, so that each is stated once.
//
// A functor is a struct of plain data, such as sizes, strides and pointers to memory of the device,
// in a header that C++ and a .cu source include. It has one of these members, whose calls may run
// in any order and at once. The first does element n; the second does columns piece.first() to
// piece.end() - 1 of a row:
//
//   TFB_HOST_DEVICE void operator()(int64_t n) const;
//   template <class Piece>
//   TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const;
//
// A piece has up to Piece::kMost columns, 256 on the CPU and one in a kernel, so that arrays of
// kMost numbers are vectors there and registers here:
//
//   float x[Piece::kMost];
//   piece.Load(view, offset, stride, x);     x[i] = element offset + (first + i) stride of the view
//   piece.Store(x, view, offset, stride);    does the reverse, rounding to the view's dtype
//   piece.Copy(from, to);                    to[first + i] = from[first + i]
//
// for i < piece.count(). Beside the header, a functor takes a line in a .cu source, in its own
// namespace (for_each.cuh), and its calls (for_each.h):
//
//   TFB_FOR_EACH(CountWords);                ForEach(device, n, CountWords{...}, execution)
//   TFB_FOR_EACH_IN_ROWS(CopyOfRows);        ForEachInRows(device, rows, columns, CopyOfRows{...},
//                                                          execution)
#ifndef TFB_CORE_CUDA_FUNCTOR_H_
#define TFB_CORE_CUDA_FUNCTOR_H_

#include <stdint.h>

#include "core/cuda/device_view.h"

// Begins the declaration of a function that host and device share. It is inlined always: otherwise
// the linker would keep one of several copies for a whole program, of which the simulator's checks
// every access and the others do not.
#ifdef __CUDACC__
#define TFB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TFB_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace tfb {

// Returns the offset of an element of a view.
TFB_HOST_DEVICE int64_t Offset(const DeviceView& view, int64_t i, int64_t j, int64_t k,
                               int64_t l = 0) {
  return i * view.strides[0] + j * view.strides[1] + k * view.strides[2] + l * view.strides[3];
}

// The kernel of a functor (core/cuda/kernel_table.h). It enqueues on the stream and returns null,
// or a text that says why it could not. A functor of elements has `rows` of one column.
template <class Functor>
struct ForEachKernel {
  const char* (*run)(const Functor& functor, int64_t rows, int64_t columns, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_FUNCTOR_H_
