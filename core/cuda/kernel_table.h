// Tables through which C++ finds the kernels of a source that is compiled twice, for GPUs and for
// the simulator.
//
// A .cu source puts its launchers, functions of plain C types, into a struct of function pointers:
//
//   flash_kernels.h                                 struct FlashKernels { const char* (*forward)(...); };
//   flash.cu, at its end, in namespace tfb          TFB_KERNEL_TABLE(FlashKernels, {&LaunchForward});
//   flash_cuda.cc                                   KernelsOn<FlashKernels>(device).forward(...);
#ifndef TFB_CORE_CUDA_KERNEL_TABLE_H_
#define TFB_CORE_CUDA_KERNEL_TABLE_H_

#include <stdlib.h>

namespace tfb {

template <class Table>
struct KernelTable {
  static const Table& Gpu();        // nvcc's object defines it
  static const Table& Simulated();  // the simulator's object defines it
};

#ifdef __CUDACC__
#define TFB_KERNEL_TABLE(Table, ...)              \
  template <>                                     \
  const Table& ::tfb::KernelTable<Table>::Gpu() { \
    static const Table table = __VA_ARGS__;       \
    return table;                                 \
  }
#else
#define TFB_KERNEL_TABLE(Table, ...)                    \
  template <>                                           \
  const Table& ::tfb::KernelTable<Table>::Simulated() { \
    static const Table table = __VA_ARGS__;             \
    return table;                                       \
  }
#endif

// The targets on which CUDA code runs.
enum class CudaTarget : unsigned char { kGpu, kSimulator };

template <class Table>
const Table& KernelsOn(CudaTarget target) {
#ifdef TFB_CUDA_AVAILABLE
  if (target == CudaTarget::kGpu) return KernelTable<Table>::Gpu();
#else
  if (target == CudaTarget::kGpu) abort();  // unreachable: no runtime for a GPU can have been made
#endif
  return KernelTable<Table>::Simulated();
}

}  // namespace tfb

#endif  // TFB_CORE_CUDA_KERNEL_TABLE_H_
