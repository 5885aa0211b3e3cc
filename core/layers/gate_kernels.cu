#include "core/layers/gate_kernels.h"
#include "core/layers/layer_rows.cuh"

namespace tfb {
namespace {

__device__ float Logistic(float x) { return 1 / (1 + expf(-x)); }

__device__ float Gated(GateStep step, float a, float b, float x, float y) {
  const float open = Logistic(a);
  switch (step) {
    case GateStep::kReset:
      return open * x;
    case GateStep::kInput:
      return open * x + y;
    case GateStep::kOutput:
      return x + open * y;
    case GateStep::kHighway:
      return open * x + (1 - open) * y;
    case GateStep::kSigmoidTanh:
      return x + open * tanhf(b);
    default:
      return (1 - open) * x + open * tanhf(b);
  }
}

__global__ void __launch_bounds__(kRowThreads) PassGate(GateArguments args) {
  const RowPart part = RowPartOfWarp(args.channels);
  if (part.row >= args.rows) return;
  const auto value = [&](const DeviceRows& rows, int64_t c) {
    return rows.data == nullptr ? 0.0f : Load(rows, RowOffset(rows, part.row), c);
  };
  const int64_t out = RowOffset(args.out, part.row);
  for (int64_t c = part.begin + Lane(); c < part.end; c += kWarp) {
    Store(args.out, out, c,
          Gated(args.step, value(args.a, c), value(args.b, c), value(args.x, c), value(args.y, c)));
  }
}

const char* LaunchPass(const GateArguments& a, void* stream) {
  return LaunchWarps("PassGate", &PassGate, RowParts(a.rows, a.channels), stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(GateKernels, {&LaunchPass});

}  // namespace tfb
