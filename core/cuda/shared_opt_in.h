// Remembers how much shared memory kernels have been opted in to, for core/cuda/kernel.cuh. It is
// apart, since nvcc takes a second longer for a source that includes <mutex>.
#ifndef TFB_CORE_CUDA_SHARED_OPT_IN_H_
#define TFB_CORE_CUDA_SHARED_OPT_IN_H_

#include <stddef.h>

namespace tfb {

// Calls opt_in(kernel, bytes), which returns 0 or an error, unless a call for this kernel on this
// GPU with as many bytes or more has returned 0. Returns what opt_in returns, or 0. Any thread may
// call it.
int OptInOnce(int gpu, const void* kernel, size_t bytes,
              int (*opt_in)(const void* kernel, size_t bytes));

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SHARED_OPT_IN_H_
