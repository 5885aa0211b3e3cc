// What tests of techniques and engines share: random inputs, running a layer with every unwritten
// element showing, comparing.
#ifndef TFB_CORE_TESTING_H_
#define TFB_CORE_TESTING_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "core/safetensors.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// A tensor for each spec that is not optional: floats drawn from the seed and the name, N(0, 1) or
// as the noise they are; masks all 1.
NamedTensors RandomInputs(const std::vector<TensorSpec>& specs, uint64_t seed);

// Tensors for the specs, filled with NaN, optional ones included.
NamedTensors NanOutputs(const std::vector<TensorSpec>& specs);

// Setup and Run with `threads` threads and a NaN-filled workspace of exactly the size that the
// layer asks for.
absl::StatusOr<NamedTensors> RunLayer(Layer& layer, const Inputs& inputs, int threads = 1);

// The same on a GPU or in the simulator: `inputs` lie on the host, and so do the results.
absl::StatusOr<NamedTensors> RunCudaLayer(Layer& layer, Device device, const Inputs& inputs);

// Where a test can run a technique that has CUDA: everywhere.
constexpr Device kHostDevices[] = {Device::kCpu, Device::kSimulator};

struct RunRequest {
  Options options;
  Device device = Device::kCpu;
  uint64_t seed = 1;
  const NamedTensors* parameters = nullptr;  // replace those of the layer
  int threads = 1;
};
// The outputs of a layer of `technique`.
absl::StatusOr<NamedTensors> RunTechnique(const Technique& technique, const Problem& problem,
                                          const Inputs& inputs, const RunRequest& request = {});
// The outputs of its float64 definition, with the parameters that the layer of the same request
// has.
absl::StatusOr<NamedTensors> DefineTechnique(const Technique& technique, const Problem& problem,
                                             const Inputs& inputs, const RunRequest& request = {},
                                             const DefinitionRequest& definition = {});

// The keys that query i of a head sees, ascending, read off a run in which value j is the j-th unit
// vector and the rest random. The problem has one batch row and an input v; its value_dim is made
// kv_tokens.
std::vector<int64_t> KeysSeen(const Technique& technique, Problem problem, const Options& options,
                              int64_t head, int64_t i);

// Largest |a - b|; infinite where one is NaN and the other is not, or where the shapes differ;
// equal infinities differ by 0.
double MaxDifference(const ConstTensorView& a, const ConstTensorView& b);
double MaxAbs(const ConstTensorView& view);

// The bound of fp32 against float64 for rows of up to 16K keys: an output is a convex combination
// of values, whose weights carry the rounding of the scores (head_dim products of order 1, a few
// hundred 2^-24) and of the sum.
inline double Fp32Bound(const ConstTensorView& values) { return 2e-5 * MaxAbs(values); }

// A file beside the tests, by its path in the repository:
// "attention/dense/testdata/full.safetensors".
SafetensorsFile GoldenFile(const std::string& path);

}  // namespace tfb

#endif  // TFB_CORE_TESTING_H_
