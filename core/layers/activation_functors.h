// Activations (activation.h) and their derivatives as functors of every device: Eigen's vectors on the
// CPU, and the same formulas channel by channel in kernels.
#ifndef TFB_CORE_LAYERS_ACTIVATION_FUNCTORS_H_
#define TFB_CORE_LAYERS_ACTIVATION_FUNCTORS_H_

#include <math.h>

#include "core/cuda/functor.h"
#include "core/layers/activation.h"
#include "core/layers/tensor_rows.h"

namespace tfb {

// Return activation(x) and activation'(x). NaN gives NaN in all of them, but for the derivative of x
// itself.
TFB_HOST_DEVICE float ActivationOf(Activation activation, float x) {
  switch (activation) {
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGelu:
      return x * (0.5f + 0.5f * erff(x * 0.70710678f));  // 1 / sqrt(2)
    case Activation::kGeluTanh:
      return x * (0.5f + 0.5f * tanhf(0.79788456f * (x + 0.044715f * x * x * x)));  // sqrt(2 / pi)
    case Activation::kGeluSigmoid:
      return x / (1 + expf(-1.702f * x));
    case Activation::kTanh:
      return tanhf(x);
    default:
      return x;
  }
}
TFB_HOST_DEVICE float DerivativeOf(Activation activation, float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? 1 : x <= 0 ? 0 : x;
    case Activation::kGelu:  // 1 / sqrt(2) and 1 / sqrt(2 pi)
      return 0.5f + 0.5f * erff(x * 0.70710678f) + x * expf(-0.5f * x * x) * 0.39894228f;
    case Activation::kGeluTanh: {
      const float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));  // sqrt(2 / pi)
      // The factor 1 - t^2 comes first: it is 0 where x^3 overflows.
      return 0.5f + 0.5f * t + 0.39894228f * x * (1 - t * t) * (1 + 0.134145f * x * x);
    }
    case Activation::kGeluSigmoid: {
      const float s = 1 / (1 + expf(-1.702f * x));
      return s + 1.702f * x * s * (1 - s);
    }
    case Activation::kTanh: {
      const float t = tanhf(x);
      return 1 - t * t;
    }
    default:
      return 1;
  }
}

// to = activation(from)
struct ActivatedRows {
  Activation activation;
  RowsOfView from;
  RowsOfView to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const RowsOfView::Place place = to.PlaceOf(row);
    float x[Piece::kMost];
    from.Load(place, piece, x);
    if constexpr (Piece::kMost > 1) {
      Activate(activation, piece.count(), x);
    } else {
      x[0] = ActivationOf(activation, x[0]);
    }
    to.Store(place, piece, x);
  }
};

// to = d activation'(x), and 0 where a factor is 0.
struct RowsTimesDerivative {
  Activation activation;
  RowsOfView x;
  RowsOfView d;
  RowsOfView to;  // may be d

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const RowsOfView::Place place = to.PlaceOf(row);
    float at[Piece::kMost], gradient[Piece::kMost];
    x.Load(place, piece, at);
    d.Load(place, piece, gradient);
    if constexpr (Piece::kMost > 1) {
      MultiplyByDerivative(activation, piece.count(), at, gradient);
    } else {
      const float slope = DerivativeOf(activation, at[0]);
      gradient[0] = gradient[0] == 0 || slope == 0 ? 0 : gradient[0] * slope;
    }
    to.Store(place, piece, gradient);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_ACTIVATION_FUNCTORS_H_
