// The passes of gates (gate.h) over rows, forwards and backwards, as functors of every device. A formula
// stands once, for a channel in a kernel and for an Eigen array of channels on the CPU; `open` is s(a),
// and t is the tanh. Pointers are to the device's memory.
#ifndef TFB_CORE_LAYERS_GATE_FUNCTORS_H_
#define TFB_CORE_LAYERS_GATE_FUNCTORS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/layers/tensor_rows.h"

namespace tfb {

enum class GateKind : uint8_t { kInput, kOutput, kHighway, kSigmoidTanh, kGru };

// A function of sums a and c, channel by channel; s is the logistic function.
enum class GateStep : uint8_t {
  kReset,        // s(a) x
  kInput,        // s(a) x + y
  kOutput,       // x + s(a) y
  kHighway,      // s(a) x + (1 - s(a)) y
  kSigmoidTanh,  // x + s(a) tanh(c)
  kGru,          // (1 - s(a)) x + s(a) tanh(c)
};

TFB_HOST_DEVICE bool HasTanh(GateStep step) {
  return step == GateStep::kSigmoidTanh || step == GateStep::kGru;
}
TFB_HOST_DEVICE bool HasTanh(GateKind kind) {
  return kind == GateKind::kSigmoidTanh || kind == GateKind::kGru;
}

template <class T>
TFB_HOST_DEVICE T Gated(GateStep step, const T& open, const T& t, const T& x, const T& y) {
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
      return x + open * t;
    default:
      return (1 - open) * x + open * t;
  }
}

// A kind's first step backwards computes the gradients of the sums a and c, and the part of dx and dy
// that does not come through them. The kinds with a tanh have no such dy.
template <class T>
struct GateDifferentials {
  T da, dc, dx, dy;
};

// Sets those that the kind has. With a gru, a is a_z.
template <class T>
TFB_HOST_DEVICE void DifferentiateGate(GateKind kind, const T& open, const T& t, const T& x,
                                       const T& y, const T& dout, GateDifferentials<T>* of) {
  switch (kind) {
    case GateKind::kInput:
      of->da = dout * x * (open * (1 - open));
      of->dx = dout * open;
      of->dy = dout;
      return;
    case GateKind::kOutput:
      of->da = dout * y * (open * (1 - open));
      of->dx = dout;
      of->dy = dout * open;
      return;
    case GateKind::kHighway:
      of->da = dout * (x - y) * (open * (1 - open));
      of->dx = dout * open;
      of->dy = dout * (1 - open);
      return;
    case GateKind::kSigmoidTanh:
      of->da = dout * t * (open * (1 - open));
      of->dc = dout * open * (1 - t * t);
      of->dx = dout;
      return;
    case GateKind::kGru:
      of->da = dout * (t - x) * (open * (1 - open));
      of->dc = dout * open * (1 - t * t);
      of->dx = dout * (1 - open);
      return;
  }
}

// The gru's second step backwards computes, of r, the gradient of a_r, r * x, and the part that it adds
// to dx.
template <class T>
struct ResetDifferentials {
  T da, reset, more;
};
template <class T>
TFB_HOST_DEVICE void DifferentiateReset(const T& r, const T& x, const T& dm,
                                        ResetDifferentials<T>* of) {
  of->da = dm * x * r * (1 - r);
  of->reset = r * x;
  of->more = dm * r;
}

TFB_HOST_DEVICE float LogisticOf(float x) { return 1 / (1 + expf(-x)); }

// Pieces of rows in host memory, and the steps of `count` channels of them. No output is an input.
struct GateInputs {
  const float *a, *c, *x, *y, *dout;
};
void PassGatePiece(GateStep step, int count, const GateInputs& in, float* out);
void DifferentiateGatePiece(GateKind kind, int count, const GateInputs& in,
                            const GateDifferentials<float*>& out);
void DifferentiateResetPiece(int count, const GateInputs& in,
                             const ResetDifferentials<float*>& out);

// out = the step's function.
struct GatePass {
  GateStep step;
  RowsOfView a;
  RowsOfView c;  // null where the step does not use it
  RowsOfView x;
  RowsOfView y;    // likewise
  RowsOfView out;  // may be any of the others

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    constexpr int kMost = Piece::kMost;
    const RowsOfView::Place place = x.PlaceOf(row);
    float of_a[kMost], of_c[kMost], of_x[kMost], of_y[kMost], result[kMost];
    a.Load(place, piece, of_a);
    c.Load(place, piece, of_c);
    x.Load(place, piece, of_x);
    y.Load(place, piece, of_y);
    if constexpr (kMost > 1) {
      PassGatePiece(step, piece.count(), {of_a, of_c, of_x, of_y, nullptr}, result);
    } else {
      const float t = HasTanh(step) ? tanhf(of_c[0]) : 0;
      result[0] = Gated(step, LogisticOf(of_a[0]), t, of_x[0], of_y[0]);
    }
    out.Store(place, piece, result);
  }
};

// Writes a kind's differentials, except into null views.
struct GateGradient {
  GateKind kind;
  RowsOfView a;
  RowsOfView c;  // null where the kind has none
  RowsOfView x;
  RowsOfView y;
  RowsOfView dout;
  RowsOfView da;
  RowsOfView dc;
  RowsOfView dx;  // may be dout
  RowsOfView dy;  // likewise

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    constexpr int kMost = Piece::kMost;
    const RowsOfView::Place place = x.PlaceOf(row);
    float of_a[kMost], of_c[kMost], of_x[kMost], of_y[kMost], of_out[kMost];
    float to_a[kMost], to_c[kMost], to_x[kMost], to_y[kMost];
    a.Load(place, piece, of_a);
    c.Load(place, piece, of_c);
    x.Load(place, piece, of_x);
    y.Load(place, piece, of_y);
    dout.Load(place, piece, of_out);
    if constexpr (kMost > 1) {
      DifferentiateGatePiece(kind, piece.count(), {of_a, of_c, of_x, of_y, of_out},
                             {to_a, to_c, to_x, to_y});
    } else {
      const float t = HasTanh(kind) ? tanhf(of_c[0]) : 0;
      GateDifferentials<float> of = {0, 0, 0, 0};
      DifferentiateGate(kind, LogisticOf(of_a[0]), t, of_x[0], of_y[0], of_out[0], &of);
      to_a[0] = of.da;
      to_c[0] = of.dc;
      to_x[0] = of.dx;
      to_y[0] = of.dy;
    }
    da.Store(place, piece, to_a);
    dc.Store(place, piece, to_c);
    dx.Store(place, piece, to_x);
    dy.Store(place, piece, to_y);
  }
};

// Does the gru's second step, from dm.
struct ResetGradient {
  RowsOfView a;
  RowsOfView x;
  RowsOfView dm;
  RowsOfView da;
  RowsOfView reset;
  RowsOfView dx;  // is added to

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    constexpr int kMost = Piece::kMost;
    const RowsOfView::Place place = x.PlaceOf(row);
    float of_a[kMost], of_x[kMost], of_m[kMost], sum[kMost];
    float to_a[kMost], to_reset[kMost], more[kMost];
    a.Load(place, piece, of_a);
    x.Load(place, piece, of_x);
    dm.Load(place, piece, of_m);
    dx.Load(place, piece, sum);
    if constexpr (kMost > 1) {
      DifferentiateResetPiece(piece.count(), {of_a, nullptr, of_x, nullptr, of_m},
                              {to_a, to_reset, more});
    } else {
      ResetDifferentials<float> of = {0, 0, 0};
      DifferentiateReset(LogisticOf(of_a[0]), of_x[0], of_m[0], &of);
      to_a[0] = of.da;
      to_reset[0] = of.reset;
      more[0] = of.more;
    }
    for (int i = 0; i < piece.count(); ++i) sum[i] += more[i];
    da.Store(place, piece, to_a);
    reset.Store(place, piece, to_reset);
    dx.Store(place, piece, sum);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_GATE_FUNCTORS_H_
