#include "core/flash/flash_mma.cuh"

namespace tfb {
namespace {

const char* Forward(const FlashArguments& arguments, void* stream) {
  return LaunchFlashMma<__half>(arguments, stream);
}

}  // namespace

TFB_KERNEL_TABLE(FlashF16Kernels, {&Forward});

}  // namespace tfb
