#include "core/cuda/kernel.cuh"
#include "core/layers/copy_rows_kernels.h"

namespace tfb {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) CopyRows(CopyRowsArguments a) {
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= a.batch * a.rows * a.channels) return;
  const int64_t c = n % a.channels, row = n / a.channels % a.rows;
  const int64_t b = n / a.channels / a.rows;
  int64_t source = row;
  if (a.selected != nullptr) {
    source = a.selected[b * a.rows + row];
  } else if (a.dilated_block > 0) {
    source += a.dilated_block - 1 - 3 * (row % a.dilated_block);
  }
  float value = 0;
  if (source >= 0) {
    value = Load(a.from.view, Offset(a.from.view, b, (a.from.first + source) % a.from.places, c));
  }
  Store(a.to.view, Offset(a.to.view, b, (a.to.first + row) % a.to.places, c), value);
}

const char* LaunchCopyRows(const CopyRowsArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.rows * a.channels, kThreads);
  return Launch("CopyRows", &CopyRows, {blocks, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(CopyRowsKernels, {&LaunchCopyRows});

}  // namespace tfb
