// Utilities that tests of techniques and engines share: random inputs, running a layer so that
// every unwritten element shows, and comparing.
#ifndef TFB_CORE_TESTING_H_
#define TFB_CORE_TESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/safetensors.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/tested_devices.h"

namespace tfb {

// Returns a tensor for each spec that is not optional: floats drawn from the seed and the name,
// N(0, 1) or of the spec's noise distribution; masks are all 1.
NamedTensors RandomInputs(const std::vector<TensorSpec>& specs, uint64_t seed);

// Returns tensors for the specs, filled with NaN, optional ones included.
NamedTensors NanOutputs(const std::vector<TensorSpec>& specs);

// Calls Setup and Run with `threads` threads and a NaN-filled workspace of exactly the size that
// the layer asks for.
absl::StatusOr<NamedTensors> RunLayer(Layer& layer, const Inputs& inputs, int threads = 1);

// Does the same on a GPU or in the simulator: `inputs` lie on the host, and so do the results.
absl::StatusOr<NamedTensors> RunCudaLayer(Layer& layer, Device device, const Inputs& inputs);

struct RunRequest {
  Options options;
  Device device = Device::kCpu;
  uint64_t seed = 1;
  const NamedTensors* parameters = nullptr;  // parameters that replace those of the layer
  int threads = 1;
  // On the CPU, the inputs whose gradients are asked for: all where this is empty.
  std::vector<std::string> input_gradients = {};
};
// Returns the outputs of a layer of `technique`.
absl::StatusOr<NamedTensors> RunTechnique(const Technique& technique, const Problem& problem,
                                          const Inputs& inputs, const RunRequest& request = {});
// Returns the outputs of its float64 definition, with the parameters of the layer of the same
// request.
absl::StatusOr<NamedTensors> DefineTechnique(const Technique& technique, const Problem& problem,
                                             const Inputs& inputs, const RunRequest& request = {},
                                             const DefinitionRequest& definition = {});

// What a layer of `technique` writes in a Run and its Backward, with gradients of all inputs and
// parameters that have some.
struct RunAndGradients {
  NamedTensors outputs;
  NamedTensors inputs;
  NamedTensors parameters;
};
// Runs the layer, and its backward pass with these gradients of its outputs. Kept memory,
// workspaces and gradients are filled with NaN before.
absl::StatusOr<RunAndGradients> BackwardOfTechnique(const Technique& technique,
                                                    const Problem& problem, const Inputs& inputs,
                                                    const NamedTensors& output_gradients,
                                                    const RunRequest& request = {});
// Does the same with a layer that is on a GPU or in the simulator.
absl::StatusOr<RunAndGradients> BackwardOfCudaLayer(Layer& layer, Device device,
                                                    const Inputs& inputs,
                                                    const NamedTensors& output_gradients);

// Returns sum_n a_n b_n of views of one shape, in float64.
double SumOfProducts(const ConstTensorView& a, const ConstTensorView& b);

// Returns (f(x + h d) - f(x - h d)) / 2h with h = 1e-5 |x|, where f reads x, an f64 tensor. Then x
// is as it was.
double CentralDifference(Tensor* x, const ConstTensorView& direction,
                         absl::FunctionRef<double()> f);
// Returns a random f64 tensor of length 1.
Tensor RandomDirection(const Shape& shape, uint64_t seed);

// The derivative of sum <g, output>, g the gradients of a pass, along a random direction of one of
// its inputs or parameters.
struct DirectionalDerivative {
  double of_layer;
  double of_definition;  // by central differences
  // Three deviations of the definition's, where every number that it is given has an independent
  // relative error of deviation 2e-5 (Fp32Bound): the sums of a backward pass have terms whose
  // factors have at most the errors of a forward pass.
  double bound;
};
DirectionalDerivative DerivativeOf(absl::string_view input_or_parameter, const Technique& technique,
                                   const Problem& problem, const NamedTensors& inputs,
                                   const NamedTensors& output_gradients,
                                   const RunAndGradients& pass, const RunRequest& request = {});

// Returns the cost of a layer of `technique` after a run on the CPU on random inputs. It aborts where
// there is no such layer.
Cost CostOf(const Technique& technique, const Problem& problem, const Options& options = {});

// Returns the keys that query i of a head sees, ascending. They come from a run in which value j is
// the j-th unit vector and the other inputs are random. The problem must have one batch row and an
// input v; its value_dim is set to kv_tokens.
std::vector<int64_t> KeysSeen(const Technique& technique, Problem problem, const Options& options,
                              int64_t head, int64_t i);

// Returns the largest |a - b|; infinity where one is NaN and the other is not, or where the shapes
// differ; equal infinities differ by 0.
double MaxDifference(const ConstTensorView& a, const ConstTensorView& b);
double MaxAbs(const ConstTensorView& view);

// Returns the bound of fp32's error against float64 for rows of up to 16K keys: an output is a
// convex combination of values, whose weights carry the rounding of the scores (head_dim products
// of order 1, a few hundred 2^-24) and of the sum.
inline double Fp32Bound(const ConstTensorView& values) { return 2e-5 * MaxAbs(values); }

// Returns the technique of that name, which the test is linked with; aborts where it is not.
const Technique& FindTechnique(absl::string_view name);

// Reads a file beside the tests, by its path in the repository:
// "attention/dense/testdata/full.safetensors".
SafetensorsFile GoldenFile(const std::string& path);

}  // namespace tfb

#endif  // TFB_CORE_TESTING_H_
