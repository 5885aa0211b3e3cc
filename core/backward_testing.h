// Tests of a layer's backward pass against its technique's definition.
#ifndef TFB_CORE_BACKWARD_TESTING_H_
#define TFB_CORE_BACKWARD_TESTING_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// What a Run and its Backward wrote.
struct LayerGradients {
  NamedTensors outputs;
  NamedTensors inputs;      // gradients of the inputs that were given
  NamedTensors parameters;  // gradients of all parameters that have one
};

// Calls Setup, SetUpBackward, Run and Backward with `threads` threads. Workspaces and the kept
// memory have exactly the sizes that the layer asks for, and they and the gradients are filled with
// NaN before; between Run and Backward the workspace is, too.
absl::StatusOr<LayerGradients> RunBackward(Layer& layer, const Inputs& inputs,
                                           const NamedTensors& output_gradients, int threads = 1);

// Holds the gradients of an fp32 layer of the technique against central differences of the
// definition, h = 1e-5 |x|, along random unit directions and single coordinates, for random inputs,
// parameters (those that begin as 0 are moved off it) and gradient of the output. It also expects
// the same bits with 1, 2 and 3 threads, the same outputs as without kept memory, and that Run and
// Backward allocate nothing.
//
// `roundings` is the number of terms of all sums on the way from a tensor to the loss and back,
// added up: the widths of products, twice each, the keys of a row, and the rows that a parameter's
// gradient is summed over. Let g be the gradient of the output y, and u = 2^-24. What a gradient of
// x sums is of the size of the gradient or, where it cancels, as in that of the keys' bias, which
// is 0, of |g| |y| / |x|, by which the loss depends on relative changes of x. The bound is
// roundings u of both: independent roundings add up to the root of their number, which leaves the
// root of it for the condition of what lies between.
struct GradientRequest {
  Options options = {};
  double roundings = 0;
  NamedTensors inputs = {};  // in the place of random ones
};
// Returns the roundings of a projected attention: four products of the model's width forwards and
// four backwards, the heads, the softmax and its gradient over the keys, and the rows of
// parameters.
double AttentionRoundings(const Problem& problem);

void ExpectGradientsOfDefinition(const Technique& technique, const Problem& problem,
                                 const GradientRequest& request);

}  // namespace tfb

#endif  // TFB_CORE_BACKWARD_TESTING_H_
