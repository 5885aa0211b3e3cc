// Functions that are applied to each channel of a hidden state. This is plain C++: kernels include
// it too.
#ifndef TFB_CORE_LAYERS_ACTIVATION_H_
#define TFB_CORE_LAYERS_ACTIVATION_H_

#include <cstdint>

namespace tfb {

// The GELUs are those of Hendrycks and Gimpel, arXiv:1606.08415v5, section 2, and its two
// approximations. NaN gives NaN in all of them.
enum class Activation : uint8_t {
  kNone,         // x
  kRelu,         // max(x, 0)
  kGelu,         // x (1 + erf(x / sqrt(2))) / 2
  kGeluTanh,     // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
  kGeluSigmoid,  // x / (1 + exp(-1.702 x))
  kTanh,         // tanh(x)
};
const char* Name(Activation activation);  // Returns "none", "relu", "gelu", "gelu_tanh", ...

// Sets x[i] = activation(x[i]) for `count` values in host memory, vectorised.
void Activate(Activation activation, int64_t count, float* x);

// Sets d[i] = d[i] activation'(x[i]) for `count` values in host memory, vectorised: the chain rule
// with the gradient d of the activation's result, where x is what the activation was applied to.
// With the standard normal density p and distribution P, and a = sqrt(2 / pi):
//
//   relu          1 where x > 0, and 0 at 0 too
//   gelu          P(x) + x p(x)
//   gelu_tanh     (1 + t) / 2 + x (1 - t^2) a (1 + 0.134145 x^2) / 2,  t the tanh of the formula
//   gelu_sigmoid  s + 1.702 x s (1 - s),  s = 1 / (1 + exp(-1.702 x))
//   tanh          1 - tanh(x)^2
//
// Where one of the factors is 0, the product is 0, whatever the other one is: what a ReLU holds at 0
// passes nothing, and a row without a gradient, such as padding, has none either if it holds NaN.
void MultiplyByDerivative(Activation activation, int64_t count, const float* x, float* d);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_ACTIVATION_H_
