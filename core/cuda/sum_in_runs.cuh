// The kernels of sums of many terms: see core/cuda/run_sums.h.
#ifndef TFB_CORE_CUDA_SUM_IN_RUNS_CUH_
#define TFB_CORE_CUDA_SUM_IN_RUNS_CUH_

#include "core/cuda/for_each.cuh"
#include "core/cuda/run_sums.h"

namespace tfb {
namespace {  // internal linkage, as in kernel.cuh

// Registers the kernels of a struct of terms, in its namespace.
#define TFB_SUM_IN_RUNS(Terms)                                                                  \
  TFB_KERNEL_TABLE(                                                                             \
      RunSumKernels<Terms>,                                                                     \
      {[](const PartialSums<Terms>& functor, int64_t rows, int64_t columns, void* stream) {     \
         return LaunchForEachInRows("PartialSums<" #Terms ">", functor, rows, columns, stream); \
       },                                                                                       \
       [](const TotalSums<Terms>& functor, int64_t rows, int64_t columns, void* stream) {       \
         return LaunchForEachInRows("TotalSums<" #Terms ">", functor, rows, columns, stream);   \
       }})

}  // namespace
}  // namespace tfb

#endif  // TFB_CORE_CUDA_SUM_IN_RUNS_CUH_
