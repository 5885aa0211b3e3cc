#include "core/layers/activation.h"

#include <cmath>

#include "Eigen/Core"
#include "unsupported/Eigen/SpecialFunctions"

namespace tfb {

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

}  // namespace tfb
