#include "core/layers/gate.h"

#include <algorithm>
#include <vector>

#include "Eigen/Core"
#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/matmul_gradient.h"
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

// Returns the part of the sums of a kind that a step of its gate calls a, or c.
TensorView PartOf(const TensorView& sums, int64_t channels, int64_t part, int64_t count = 1) {
  return Slice(sums, sums.rank - 1, part * channels, count * channels);
}

}  // namespace

// ---- The steps of pieces of rows in host memory ----

namespace {

constexpr int kChannels = 64;  // at a time: nine such arrays are 2.25 KiB
using Values = Eigen::Array<float, Eigen::Dynamic, 1, 0, kChannels, 1>;  // on the stack

// Calls body(load, store) for up to kChannels channels at a time; they load and store those.
template <class Body>
void ForValues(int count, const Body& body) {
  for (int first = 0; first < count; first += kChannels) {
    const int n = std::min(kChannels, count - first);
    const auto load = [=](const float* from) -> Values {
      return Eigen::Map<const Eigen::ArrayXf>(from + first, n);
    };
    const auto store = [=](const Values& values, float* to) {
      Eigen::Map<Eigen::ArrayXf>(to + first, values.size()) = values;
    };
    body(load, store);
  }
}

}  // namespace

void PassGatePiece(GateStep step, int count, const GateInputs& in, float* out) {
  ForValues(count, [&](const auto& load, const auto& store) {
    const Values open = load(in.a).logistic(), x = load(in.x), y = load(in.y);
    const Values t = HasTanh(step) ? Values(load(in.c).tanh()) : Values();
    store(Gated(step, open, t, x, y), out);
  });
}

void DifferentiateGatePiece(GateKind kind, int count, const GateInputs& in,
                            const GateDifferentials<float*>& out) {
  ForValues(count, [&](const auto& load, const auto& store) {
    const Values open = load(in.a).logistic(), x = load(in.x), y = load(in.y);
    const Values t = HasTanh(kind) ? Values(load(in.c).tanh()) : Values();
    GateDifferentials<Values> of;
    DifferentiateGate(kind, open, t, x, y, load(in.dout), &of);
    store(of.da, out.da);
    store(of.dc, out.dc);
    store(of.dx, out.dx);
    store(of.dy, out.dy);
  });
}

void DifferentiateResetPiece(int count, const GateInputs& in,
                             const ResetDifferentials<float*>& out) {
  ForValues(count, [&](const auto& load, const auto& store) {
    ResetDifferentials<Values> of;
    DifferentiateReset(Values(load(in.a).logistic()), load(in.x), load(in.dout), &of);
    store(of.da, out.da);
    store(of.reset, out.reset);
    store(of.more, out.more);
  });
}

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
  Scratch scratch = LayOut(kind_, rows, channels, workspace);
  if (!execution.kept.empty()) {
    scratch.sums = Workspace(execution.kept).Take<float>(rows * channels * Sums(kind_));
  }
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

absl::Status Gate::Pass(GateStep step, const ConstTensorView& a, const ConstTensorView& c,
                        const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                        const Execution& execution) const {
  const TensorRows rows(out);
  const GatePass pass = {step,
                         TensorRows(a).view(),
                         TensorRows(c).view(),
                         TensorRows(x).view(),
                         TensorRows(y).view(),
                         rows.view()};
  return ForEachInRows(first_.device(), rows.rows(), rows.columns(), pass, execution);
}

// ---- The backward pass ----

size_t Gate::kept_bytes(GateKind kind, int64_t rows, int64_t channels) {
  return Workspace::Measure(
      [=](Workspace& workspace) { workspace.Take<float>(rows * channels * Sums(kind)); });
}

Gate::BackwardScratch Gate::LayOutBackward(GateKind kind, int64_t rows, int64_t channels,
                                           Workspace& workspace) {
  const auto take = [&](bool is_used, int64_t vectors) {
    return is_used ? workspace.Take<float>(rows * channels * vectors) : nullptr;
  };
  const bool is_gru = kind == GateKind::kGru;
  BackwardScratch scratch;
  scratch.sums = take(true, Sums(kind));
  scratch.reset = take(is_gru, 1);
  scratch.of_x = take(kind != GateKind::kSigmoidTanh, 1);
  scratch.of_reset = take(is_gru, 1);
  return scratch;
}

size_t Gate::backward_workspace_bytes(Device device, GateKind kind, int64_t rows, int64_t channels,
                                      int threads) {
  return Workspace::Measure(
             [&](Workspace& workspace) { LayOutBackward(kind, rows, channels, workspace); }) +
         std::max(MatMulWorkspaceBytes(device, rows, Sums(kind) * channels, channels, threads),
                  MatMulGradientWorkspaceBytes(device, rows, channels, channels, threads));
}

absl::Status Gate::SetUpBackward(const Parameters& p) {
  const auto pack = [device = first_.device()](const std::vector<ConstTensorView>& matrices) {
    return PackedMatrix::CreateTransposed(device, matrices);
  };
  if (kind_ == GateKind::kGru) {
    TFB_ASSIGN_OR_RETURN(first_transposed_, pack({p.w_r, p.w_z, p.w_g}));
    TFB_ASSIGN_OR_RETURN(second_transposed_, pack({p.u_r, p.u_z}));
    TFB_ASSIGN_OR_RETURN(third_transposed_, pack({p.u_g}));
    return absl::OkStatus();
  }
  const bool of_y = kind_ == GateKind::kSigmoidTanh;
  TFB_ASSIGN_OR_RETURN(first_transposed_, of_y ? pack({p.w_g, p.u_g}) : pack({p.w_g}));
  return absl::OkStatus();
}

absl::Status Gate::Backward(const BackwardCall& call, const Execution& execution) const {
  const ConstTensorView& x = call.x;
  const auto fits = [&](const ConstTensorView& view) {
    return view.empty() || view.shape() == x.shape();
  };
  const int64_t channels = first_.in();
  if (x.rank < 2 || x.dim(x.rank - 1) != channels || call.y.shape() != x.shape() ||
      call.dout.shape() != x.shape() || !fits(call.dx) || !fits(call.dy)) {
    return absl::InternalError(absl::StrCat("the gradients of a gate of ", channels,
                                            " channels do not fit x ", ShapeString(x.shape()),
                                            " and y ", ShapeString(call.y.shape())));
  }
  const int64_t rows = RowsOf<ConstTensorView>(x).rows();
  Workspace workspace(execution.workspace);
  const BackwardScratch scratch = LayOutBackward(kind_, rows, channels, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  const auto like_x = [&](float* data, int64_t vectors) {
    Shape shape = x.shape();
    shape.back() *= vectors;
    return TensorView(data, DType::kF32, shape);
  };
  const TensorView kept =
      like_x(Workspace(execution.kept).Take<float>(rows * channels * Sums(kind_)), Sums(kind_));
  const TensorView sums = like_x(scratch.sums, Sums(kind_));
  const TensorView of_x = like_x(scratch.of_x, 1), reset = like_x(scratch.reset, 1);

  const bool is_gru = kind_ == GateKind::kGru, is_sigmoid_tanh = kind_ == GateKind::kSigmoidTanh;
  const TensorView a = PartOf(kept, channels, is_gru ? 1 : 0);
  const TensorView da = PartOf(sums, channels, is_gru ? 1 : 0);
  TensorView c, dc;
  if (HasTanh(kind_)) {
    c = PartOf(kept, channels, is_gru ? 2 : 1);
    dc = PartOf(sums, channels, is_gru ? 2 : 1);
  }
  const bool has_tanh = HasTanh(kind_);
  const GateGradient step = {kind_,
                             TensorRows(a).view(),
                             TensorRows(c).view(),
                             TensorRows(x).view(),
                             TensorRows(call.y).view(),
                             TensorRows(call.dout).view(),
                             TensorRows(da).view(),
                             TensorRows(dc).view(),
                             TensorRows(is_sigmoid_tanh ? call.dx : of_x).view(),
                             TensorRows(has_tanh ? TensorView() : call.dy).view()};
  TFB_RETURN_IF_ERROR(ForEachInRows(first_.device(), rows, channels, step, rest));
  if (is_gru) {
    TFB_RETURN_IF_ERROR(
        ResetBackward(call, kept, sums, {reset, of_x, like_x(scratch.of_reset, 1)}, rest));
  }
  TFB_RETURN_IF_ERROR(ParametersBackward(call, sums, reset, rest));
  if (!is_sigmoid_tanh && !call.dx.empty()) {
    const TensorView of_product = is_gru ? PartOf(sums, channels, 0, 2) : sums;
    TFB_RETURN_IF_ERROR(
        MatMul(is_gru ? second_transposed_ : first_transposed_, {of_product, of_x, call.dx}, rest));
  }
  if (has_tanh && !call.dy.empty()) {
    return MatMul(first_transposed_, {sums, {}, call.dy}, rest);
  }
  return absl::OkStatus();
}

absl::Status Gate::ResetBackward(const BackwardCall& call, const TensorView& kept,
                                 const TensorView& sums, const ResetViews& views,
                                 const Execution& execution) const {
  const int64_t channels = first_.in();
  const TensorView a_r = PartOf(kept, channels, 0), da_r = PartOf(sums, channels, 0);
  TFB_RETURN_IF_ERROR(
      MatMul(third_transposed_, {PartOf(sums, channels, 2), {}, views.of_reset}, execution));
  const TensorRows rows(call.x);
  const ResetGradient step = {TensorRows(a_r).view(),
                              rows.view(),
                              TensorRows(views.of_reset).view(),
                              TensorRows(da_r).view(),
                              TensorRows(views.reset).view(),
                              TensorRows(views.of_x).view()};
  return ForEachInRows(first_.device(), rows.rows(), rows.columns(), step, execution);
}

absl::Status Gate::ParametersBackward(const BackwardCall& call, const TensorView& sums,
                                      const TensorView& reset, const Execution& execution) const {
  const ParameterGradients& to = call.parameters;
  // Adds x^T d to a matrix's gradient, and to a bias's the sum of d, the gradient of a sum.
  const auto add = [&](const ConstTensorView& x, int64_t part, const TensorView& matrix,
                       const TensorView& bias, float sign = 1) {
    return MatMulGradient(first_.device(),
                          {x, PartOf(sums, first_.in(), part), matrix, bias, call.accumulate,
                           /*rows=*/{}, sign},
                          execution);
  };
  switch (kind_) {
    case GateKind::kInput:
      return add(call.x, 0, to.w_g, {});
    case GateKind::kOutput:
      return add(call.x, 0, to.w_g, to.b_g, -1);
    case GateKind::kHighway:
      return add(call.x, 0, to.w_g, to.b_g);
    case GateKind::kSigmoidTanh:
      TFB_RETURN_IF_ERROR(add(call.y, 0, to.w_g, to.b_g, -1));
      return add(call.y, 1, to.u_g, {});
    case GateKind::kGru:
      break;
  }
  TFB_RETURN_IF_ERROR(add(call.y, 0, to.w_r, to.b_r));
  TFB_RETURN_IF_ERROR(add(call.y, 1, to.w_z, to.b_z));
  TFB_RETURN_IF_ERROR(add(call.y, 2, to.w_g, to.b_h));
  TFB_RETURN_IF_ERROR(add(call.x, 0, to.u_r, {}));
  TFB_RETURN_IF_ERROR(add(call.x, 1, to.u_z, to.b_g, -1));
  return add(reset, 2, to.u_g, {});
}

}  // namespace tfb
