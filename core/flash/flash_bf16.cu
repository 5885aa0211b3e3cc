#include "core/flash/flash_mma.cuh"

namespace tfb {
namespace {

const char* Forward(const FlashArguments& arguments, void* stream) {
  return LaunchFlashMma<__nv_bfloat16>(arguments, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashBf16Kernels, {&Forward});

}  // namespace tfb
