// Kernels with one error each, which the simulator finds. They are for tests and must not run on a
// GPU.
#ifndef TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
#define TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_

#include "core/cuda/kernel_table.h"

namespace tfb {

// The number of the kernel Pipeline of broken_kernels.cu says what is wrong with it: one warp group
// copies, and two multiply.
enum class PipelineBug {
  kNone,
  kBarriersUnfenced,  // no fence follows the set-up of barriers
  kBarriersUnsynced,  // other threads may use them before
  kTooFewArrivals,    // at a barrier
  kOneGroupReleases,  // a stage that both read
  kExpectsTooLittle,  // bytes of a copy
  kExpectsTooMuch,
  kCopiesTooEarly,      // to a stage that products may still read
  kReadsTooEarly,       // from a stage that is not full
  kReleasesTooEarly,    // gives a stage back before it waits for the products
  kStoresWithoutFence,  // to a stage that products then read
  kStoresDuringProduct,
  kNoProductFence,
  kChangesSums,  // while a product adds to them
  kChangesSumsUnfenced,
  kNoCommit,
  kNoWaitForProduct,  // at the end
  kWarpMissing,       // from a product
  kOtherProduct,      // in one warp
  kCopyUnawaited,
  kMisalignedStage
};

struct BrokenKernels {
  // Sums 64 floats; with `barrier` false, __syncthreads is missing and there is a race.
  const char* (*reduce)(const float* values, float* sum, bool barrier);
  // Runs the kernel of broken_kernels.cu that has this name, on a buffer of 64 floats. The meaning
  // of the number depends on the kernel.
  const char* (*run)(const char* name, float* values, int number);
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_SIMULATOR_BROKEN_KERNELS_H_
