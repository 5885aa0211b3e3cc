#include "core/flash/flash_hopper.cuh"

namespace tfb {
namespace {

const char* Forward(const FlashArguments& arguments, void* stream) {
  return LaunchFlash16<__half>(arguments, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashF16Kernels, {&Forward});

}  // namespace tfb
