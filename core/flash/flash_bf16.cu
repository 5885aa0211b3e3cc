#include "core/flash/flash_hopper.cuh"

namespace tfb {
namespace {

const char* Forward(const FlashArguments& arguments, void* stream) {
  return LaunchFlash16<__nv_bfloat16>(arguments, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashBf16Kernels, {&Forward});

}  // namespace tfb
