// Tests of a layer's backward pass against its technique's definition.
#ifndef TFB_CORE_BACKWARD_TESTING_H_
#define TFB_CORE_BACKWARD_TESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Holds what a Run and its Backward wrote.
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

// Returns normal gradients of all outputs that the layer differentiates.
NamedTensors RandomOutputGradients(const Layer& layer, uint64_t seed);

// Returns the gradients of inputs and parameters, by their names: RunBackward's.
absl::StatusOr<NamedTensors> GradientsOf(Layer& layer, const Inputs& inputs,
                                         const NamedTensors& output_gradients, int threads = 1);
// Returns those of a layer on the device: on the CPU the above, elsewhere BackwardOfCudaLayer's.
absl::StatusOr<NamedTensors> GradientsOn(Device device, Layer& layer, const Inputs& inputs,
                                         const NamedTensors& output_gradients);

// A layer's gradients, and the point that they are of.
struct GradientPoint {
  const Technique* technique;
  Problem problem;
  Options options;
  const NamedTensors* parameters;
  const NamedTensors* inputs;  // with the selection of the layer's Run, where there is one
  const NamedTensors* output_gradients;
};

// A derivative along a random direction d of length 1 in the space of an input or a parameter.
struct Slope {
  std::string name;  // of the input or the parameter
  double of_layer;   // <gradient, d>
  double of_definition;
  double bound;  // of the difference
};

// Returns two slopes for each gradient of a layer in fp32. With f = sum over outputs <g, output>,
// the definition's is, in float64,
//
//   D = (f(x + h d) - f(x - h d)) / 2h,    h = 1e-5 |x|,
//
// without the elements of outputs that are infinite. The bound has two terms. An element of the
// gradient is a sum of products of the same factors as an output's; where B is the relative error
// of a term of the forward pass (2e-5: see Fp32Bound), and those of elements are independent,
// <gradient, d> has a deviation of B |gradient| / sqrt(elements), of which three count. The
// differences have the error 2^-52 |g| |output| / h of rounding, and that of the third derivative,
// of the order 1e-10 of D.
absl::StatusOr<std::vector<Slope>> SlopesOf(const GradientPoint& point,
                                            const NamedTensors& gradients);

}  // namespace tfb

#endif  // TFB_CORE_BACKWARD_TESTING_H_
