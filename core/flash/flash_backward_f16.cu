#include "core/flash/flash_backward_mma.cuh"

namespace tfb {
namespace {

const char* Queries(const FlashBackwardArguments& arguments, void* stream) {
  return LaunchQueries16<__half>(arguments, stream);
}
const char* Keys(const FlashBackwardArguments& arguments, void* stream) {
  return LaunchKeys16<__half>(arguments, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashBackwardF16Kernels, {&Queries, &Keys});

}  // namespace tfb
