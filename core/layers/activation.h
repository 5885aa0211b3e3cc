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

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_ACTIVATION_H_
