#include "core/cuda/for_each.cuh"
#include "core/layers/exits/exit_stack_cuda.h"
#include "core/layers/exits/exit_stack_functors.h"
#include "core/layers/layer_rows.cuh"

namespace tfb::layers {
namespace {

__device__ int32_t* ExitOf(const DeviceExits& exits, int64_t b, int64_t t) {
  return exits.data + b * exits.batch_stride + t * exits.token_stride;
}

// A warp does a row.
__global__ void __launch_bounds__(kRowThreads) Leave(LeaveArguments a) {
  const int64_t row = RowOfWarp(a.list, a.rows);
  if (row < 0) return;
  const int64_t b = row / a.tokens, t = row % a.tokens;
  bool leaves = a.layer >= a.layers;
  if (!leaves) {
    leaves = a.given.data != nullptr ? *ExitOf(a.given, b, t) <= a.layer : a.leaves[row] != 0;
  }
  const int64_t out = RowOffset(a.out, row);
  for (int64_t c = Lane(); c < a.channels; c += kWarp) {
    a.state[row * a.channels + c] = a.after[row * a.channels + c];
    if (leaves) Store(a.out, out, c, a.normalized[row * a.channels + c]);
  }
  if (Lane() != 0) return;
  a.stays[row] = leaves ? 0 : 1;
  if (!leaves) return;
  if (a.exits.data != nullptr) *ExitOf(a.exits, b, t) = static_cast<int32_t>(a.layer);
  if (t < a.recorded_tokens) *ExitOf(a.recorded, b, t) = static_cast<int32_t>(a.layer);
}

const char* LaunchLeave(const LeaveArguments& arguments, void* stream) {
  return LaunchWarps("Leave", &Leave, arguments.rows, stream, arguments);
}

}  // namespace

TFB_KERNEL_TABLE(ExitStackKernels, {&LaunchLeave});
TFB_FOR_EACH(WriteRoles);
TFB_FOR_EACH(TellsThere);
TFB_FOR_EACH_IN_ROWS(GradientsOfLeaving);
TFB_FOR_EACH_IN_ROWS(HoldBackGone);
TFB_FOR_EACH_IN_ROWS(LetGonePass);

}  // namespace tfb::layers
