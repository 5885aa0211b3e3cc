#include "core/flash/flash_backward_mma.cuh"

namespace tfb {
namespace {

const char* Queries(const FlashBackwardArguments& arguments, void* stream) {
  return LaunchQueries16<__nv_bfloat16>(arguments, stream);
}
const char* Keys(const FlashBackwardArguments& arguments, void* stream) {
  return LaunchKeys16<__nv_bfloat16>(arguments, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashBackwardBf16Kernels, {&Queries, &Keys});

}  // namespace tfb
