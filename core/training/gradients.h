// The gradients of all parameters as one vector: its norm, and clipping by it.
//
//   norm = sqrt(sum over all elements g^2)
//   g <- g min(1, most / (norm + 1e-6))
//
// Source: Pascanu, Mikolov, Bengio 2013, "On the difficulty of training recurrent neural networks",
// arXiv:1211.5063v2, section 3.2, algorithm 1; 1e-6 as in PyTorch's clip_grad_norm_.
#ifndef TFB_CORE_TRAINING_GRADIENTS_H_
#define TFB_CORE_TRAINING_GRADIENTS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/tensor.h"

namespace tfb {

// Returns InvalidArgument where a tensor of `gradients` is not f32 of the shape of the one
// of its name in `of`; `what` names it in the message.
absl::Status CheckGradients(const NamedTensors& gradients, const NamedTensors& of,
                            absl::string_view what);

// Returns the norm of f32 gradients. It sums in float64, by the order of names and elements, so that
// its bits do not depend on threads. It is NaN or infinite where an element is.
double GlobalNorm(const NamedTensors& gradients);

// Clips them to the norm `most`, and returns the norm that they had. Where that is not finite it
// changes nothing: the caller leaves the step out.
double ClipByGlobalNorm(double most, NamedTensors* gradients);

// Multiplies them all.
void ScaleGradients(double factor, NamedTensors* gradients);

}  // namespace tfb

#endif  // TFB_CORE_TRAINING_GRADIENTS_H_
