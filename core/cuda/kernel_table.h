// Tables through which C++ finds the kernels of a source that is compiled twice, for GPUs and for
// the simulator.
//
// A .cu source puts its launchers, functions of plain C types, into a struct of function pointers:
//
//   flash_kernels.h                                 struct FlashKernels { const char* (*forward)(...); };
//   flash.cu, at its end, in namespace tfb          TFB_KERNEL_TABLE(FlashKernels, {&LaunchForward});
//   flash_cuda.cc                                   KernelsOn<FlashKernels>(target).forward(...);
//
// The macro, of core/cuda/kernel.cuh, registers the table before main in every program that its
// object is linked into. C++ is compiled alike for programs with kernels and without
// (tools/cuda/cuda_library.bzl).
#ifndef TFB_CORE_CUDA_KERNEL_TABLE_H_
#define TFB_CORE_CUDA_KERNEL_TABLE_H_

#include <stdlib.h>

namespace tfb {

// The targets on which CUDA code runs.
enum class CudaTarget : unsigned char { kGpu, kSimulator };

// A target's table, by CudaTarget; null where the program was linked without its kernels. Written
// before main alone.
template <class Table>
inline const Table* registered_kernels[2] = {nullptr, nullptr};

// Null where the program was linked without the kernels of the target.
template <class Table>
const Table* FindKernels(CudaTarget target) {
  return registered_kernels<Table>[static_cast<int>(target)];
}

// The same for whoever has a CudaRuntime of the target, which a program without kernels cannot
// make: a program has the kernels of all its libraries, or none.
template <class Table>
const Table& KernelsOn(CudaTarget target) {
  const Table* const kernels = FindKernels<Table>(target);
  if (kernels == nullptr) abort();
  return *kernels;
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_KERNEL_TABLE_H_
