#include "core/layers/activation.h"

#include <algorithm>
#include <cmath>

#include "Eigen/Core"
#include "unsupported/Eigen/SpecialFunctions"

namespace tfb {
namespace {

constexpr int64_t kPiece = 64;
using Piece = Eigen::Array<float, Eigen::Dynamic, 1, 0, kPiece, 1>;  // on the stack

// Returns activation'(x) of up to kPiece values.
Piece DerivativeOf(Activation activation, const Eigen::Map<const Eigen::ArrayXf>& x) {
  switch (activation) {
    case Activation::kNone:
      return Piece::Ones(x.size());
    case Activation::kRelu: {
      Piece slope(x.size());
      for (int64_t i = 0; i < x.size(); ++i) slope[i] = x[i] > 0 ? 1 : x[i] <= 0 ? 0 : x[i];
      return slope;
    }
    case Activation::kGelu: {
      constexpr float kDensity = 0.39894228f;  // 1 / sqrt(2 pi)
      return 0.5f + 0.5f * (x * static_cast<float>(M_SQRT1_2)).erf() +
             x * (-0.5f * x * x).exp() * kDensity;
    }
    case Activation::kGeluTanh: {
      constexpr float kRate = 0.79788456f;  // sqrt(2 / pi)
      const Piece t = (kRate * (x + 0.044715f * x * x * x)).tanh();
      // The factor 1 - t^2 comes first: it is 0 where x^3 overflows.
      return 0.5f + 0.5f * t + 0.5f * kRate * x * (1 - t * t) * (1 + 0.134145f * x * x);
    }
    case Activation::kGeluSigmoid: {
      const Piece s = (1.702f * x).logistic();
      return s + 1.702f * x * s * (1 - s);
    }
    case Activation::kTanh:
      return 1 - x.tanh().square();
  }
  return Piece::Ones(x.size());
}

}  // namespace

const char* Name(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kGeluSigmoid:
      return "gelu_sigmoid";
    case Activation::kTanh:
      return "tanh";
  }
  return "?";
}

void Activate(Activation activation, int64_t count, float* values) {
  Eigen::Map<Eigen::ArrayXf> x(values, count);
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      for (int64_t i = 0; i < count; ++i) values[i] = values[i] < 0 ? 0 : values[i];  // keeps NaN
      return;
    case Activation::kGelu:
      x *= 0.5f + 0.5f * (x * static_cast<float>(M_SQRT1_2)).erf();
      return;
    case Activation::kGeluTanh: {
      constexpr float kRate = 0.79788456f;  // sqrt(2 / pi)
      x *= 0.5f + 0.5f * (kRate * (x + 0.044715f * x * x * x)).tanh();
      return;
    }
    case Activation::kGeluSigmoid:
      x *= (1.702f * x).logistic();
      return;
    case Activation::kTanh:
      x = x.tanh();
      return;
  }
}

void MultiplyByDerivative(Activation activation, int64_t count, const float* x, float* d) {
  for (int64_t first = 0; first < count; first += kPiece) {
    const int64_t n = std::min(kPiece, count - first);
    const Piece slope = DerivativeOf(activation, Eigen::Map<const Eigen::ArrayXf>(x + first, n));
    float* const of_piece = d + first;
    for (int64_t i = 0; i < n; ++i) {
      const bool is_zero = (of_piece[i] == 0) | (slope[i] == 0);
      of_piece[i] = is_zero ? 0 : of_piece[i] * slope[i];
    }
  }
}

}  // namespace tfb
