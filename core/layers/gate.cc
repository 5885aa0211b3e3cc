#include "core/layers/gate.h"

#include <algorithm>
#include <vector>

#include "Eigen/Core"
#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "unsupported/Eigen/SpecialFunctions"

namespace tfb {
namespace {

// Returns how many sums a row has, in channels.
int64_t Sums(GateKind kind) {
  switch (kind) {
    case GateKind::kGru:
      return 3;
    case GateKind::kSigmoidTanh:
      return 2;
    default:
      return 1;
  }
}

// Adds sign b to the vector at `place` of a row of vectors of b's size, unless b is empty.
void AddBias(const ConstTensorView& b, int64_t place, double sign, Tensor* bias) {
  for (int64_t c = 0; !b.empty() && c < b.dim(0); ++c) {
    const int64_t to = place * b.dim(0) + c;
    bias->view().Set(to, bias->view().Get(to) + sign * b.Get(b.Offset(c)));
  }
}

// Returns `parts` vectors of b_g's size, zeros except the one at `place`, which is sign b_g.
Tensor BiasOf(const ConstTensorView& b_g, int64_t parts, int64_t place, double sign) {
  Tensor bias(DType::kF32, {parts * b_g.dim(0)});
  Fill(bias.view(), 0);
  AddBias(b_g, place, sign, &bias);
  return bias;
}

// Channels of a row that a pass does at a time: five such arrays are 1.25 KiB.
constexpr int64_t kChannels = 64;
using Values = Eigen::Array<float, kChannels, 1>;

void ApplyStep(GateStep step, const Values& a, const Values& b, const Values& x, const Values& y,
               Values* out) {
  const Values open = a.logistic();
  switch (step) {
    case GateStep::kReset:
      *out = open * x;
      return;
    case GateStep::kInput:
      *out = open * x + y;
      return;
    case GateStep::kOutput:
      *out = x + open * y;
      return;
    case GateStep::kHighway:
      *out = open * x + (1 - open) * y;
      return;
    case GateStep::kSigmoidTanh:
      *out = x + open * b.tanh();
      return;
    case GateStep::kGru:
      *out = (1 - open) * x + open * b.tanh();
      return;
  }
}

void PassCpu(GateStep step, const ConstTensorView& a, const ConstTensorView& b,
             const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
             const Execution& execution) {
  constexpr int64_t kRowsOfTask = 16;
  const RowsOf<TensorView> to(out);
  const int64_t rows = to.rows(), channels = to.channels();
  execution.pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t begin, int64_t end, int) {
    Values of_a = Values::Zero(), of_b = of_a, of_x = of_a, of_y = of_a, result = of_a;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t first = 0; first < channels; first += kChannels) {
        const int64_t count = std::min(kChannels, channels - first);
        const auto load = [&](const ConstTensorView& view, Values* values) {
          if (!view.empty()) {
            RowsOf<ConstTensorView>(view).Load(row, first, count, values->data());
          }
        };
        load(a, &of_a);
        load(b, &of_b);
        load(x, &of_x);
        load(y, &of_y);
        ApplyStep(step, of_a, of_b, of_x, of_y, &result);
        to.Store(row, first, count, result.data());
      }
    }
  });
}

}  // namespace

absl::StatusOr<Gate> Gate::Create(Device device, GateKind kind, const Parameters& p) {
  Gate gate;
  gate.kind_ = kind;
  const auto pack = [device](const std::vector<ConstTensorView>& matrices,
                             const ConstTensorView& bias) {
    return PackedMatrix::Create(device, matrices, bias);
  };
  switch (kind) {
    case GateKind::kInput: {
      TFB_ASSIGN_OR_RETURN(gate.first_, pack({p.w_g}, {}));
      break;
    }
    case GateKind::kOutput:
    case GateKind::kHighway: {
      const Tensor bias = BiasOf(p.b_g, 1, 0, kind == GateKind::kOutput ? -1 : 1);
      TFB_ASSIGN_OR_RETURN(gate.first_, pack({p.w_g}, bias.view()));
      break;
    }
    case GateKind::kSigmoidTanh: {
      TFB_ASSIGN_OR_RETURN(gate.first_, pack({p.w_g, p.u_g}, BiasOf(p.b_g, 2, 0, -1).view()));
      break;
    }
    case GateKind::kGru: {
      Tensor biases = BiasOf(p.b_g, 3, 1, -1);
      AddBias(p.b_r, 0, 1, &biases);
      AddBias(p.b_z, 1, 1, &biases);
      AddBias(p.b_h, 2, 1, &biases);
      TFB_ASSIGN_OR_RETURN(gate.first_, pack({p.w_r, p.w_z, p.w_g}, biases.view()));
      TFB_ASSIGN_OR_RETURN(gate.second_, pack({p.u_r, p.u_z}, {}));
      TFB_ASSIGN_OR_RETURN(gate.third_, pack({p.u_g}, {}));
      break;
    }
  }
  return gate;
}

Gate::Scratch Gate::LayOut(GateKind kind, int64_t rows, int64_t channels, Workspace& workspace) {
  Scratch scratch;
  scratch.sums = workspace.Take<float>(rows * channels * Sums(kind));
  scratch.reset = kind == GateKind::kGru ? workspace.Take<float>(rows * channels) : nullptr;
  return scratch;
}

size_t Gate::workspace_bytes(Device device, GateKind kind, int64_t rows, int64_t channels,
                             int threads) {
  return Workspace::Measure(
             [&](Workspace& workspace) { LayOut(kind, rows, channels, workspace); }) +
         MatMulWorkspaceBytes(device, rows, channels, Sums(kind) * channels, threads);
}

absl::Status Gate::Run(const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                       const Execution& execution) const {
  if (x.shape() != out.shape() || y.shape() != out.shape()) {
    return absl::InternalError(absl::StrCat("gate of x ", ShapeString(x.shape()), " and y ",
                                            ShapeString(y.shape()), " does not give ",
                                            ShapeString(out.shape())));
  }
  const int64_t channels = first_.in(), rows = RowsOf<TensorView>(out).rows();
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(kind_, rows, channels, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  Shape shape = out.shape();
  const TensorView reset(scratch.reset, DType::kF32, shape);
  shape.back() *= Sums(kind_);
  const TensorView sums(scratch.sums, DType::kF32, shape);
  if (kind_ == GateKind::kGru) return RunGru(x, y, sums, reset, out, rest);

  const bool of_y = kind_ == GateKind::kSigmoidTanh;
  TFB_RETURN_IF_ERROR(MatMul(first_, {of_y ? y : x, {}, sums}, rest));
  if (of_y) {
    const int axis = out.rank - 1;
    return Pass(GateStep::kSigmoidTanh, Slice(sums, axis, 0, channels),
                Slice(sums, axis, channels, channels), x, {}, out, rest);
  }
  const GateStep step = kind_ == GateKind::kInput    ? GateStep::kInput
                        : kind_ == GateKind::kOutput ? GateStep::kOutput
                                                     : GateStep::kHighway;
  return Pass(step, sums, {}, x, y, out, rest);
}

absl::Status Gate::RunGru(const ConstTensorView& x, const ConstTensorView& y,
                          const TensorView& sums, const TensorView& reset, const TensorView& out,
                          const Execution& execution) const {
  const int64_t channels = first_.in();
  const auto part = [&](int64_t first, int64_t count) {
    return Slice(sums, out.rank - 1, first * channels, count * channels);
  };
  const TensorView of_r = part(0, 1), of_z = part(1, 1), of_r_and_z = part(0, 2), of_g = part(2, 1);
  TFB_RETURN_IF_ERROR(MatMul(first_, {y, {}, sums}, execution));
  TFB_RETURN_IF_ERROR(MatMul(second_, {x, of_r_and_z, of_r_and_z}, execution));
  TFB_RETURN_IF_ERROR(Pass(GateStep::kReset, of_r, {}, x, {}, reset, execution));
  TFB_RETURN_IF_ERROR(MatMul(third_, {reset, of_g, of_g}, execution));
  return Pass(GateStep::kGru, of_z, of_g, x, {}, out, execution);
}

absl::Status Gate::Pass(GateStep step, const ConstTensorView& a, const ConstTensorView& b,
                        const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                        const Execution& execution) const {
  if (first_.device() == Device::kCpu) {
    PassCpu(step, a, b, x, y, out, execution);
    return absl::OkStatus();
  }
  GateArguments arguments = {};
  arguments.a = ToDeviceRows(a);
  arguments.b = ToDeviceRows(b);
  arguments.x = ToDeviceRows(x);
  arguments.y = ToDeviceRows(y);
  arguments.out = ToDeviceRows(out);
  arguments.rows = RowsOf<TensorView>(out).rows();
  arguments.channels = RowsOf<TensorView>(out).channels();
  arguments.step = step;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(first_.device()));
  return ToStatus(KernelsOn<GateKernels>(runtime->target()).pass(arguments, execution.stream));
}

}  // namespace tfb
