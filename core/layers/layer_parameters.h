// The parameters of layers: their names, shapes and distributions, and the layers made from them.
//
// Every parameter of a technique on hidden states is listed as a ParameterSpec, drawn by
// DrawParameters, and found again by its name.
#ifndef TFB_CORE_LAYERS_LAYER_PARAMETERS_H_
#define TFB_CORE_LAYERS_LAYER_PARAMETERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/layers/activation.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/problem.h"
#include "core/tensor.h"

namespace tfb::layers {

// A parameter that is drawn from N(mean, deviation^2), f32.
struct ParameterSpec {
  std::string name;
  Shape shape;
  double mean = 0;
  double deviation = 0;
};

// Returns the spec of a matrix N(0, 1 / in): a product with it keeps the scale of its input.
ParameterSpec MatrixSpec(const std::string& name, int64_t in, int64_t out);
// Returns NAME.gamma [width], ones, and NAME.beta [width], zeros.
std::vector<ParameterSpec> NormSpecs(const std::string& name, int64_t width);
// Returns NAME.w1 [width, inner], .b1 [inner], .w2 [inner, width] and .b2 [width], each N(0, 1 /
// rows of the matrix).
std::vector<ParameterSpec> FeedForwardSpecs(const std::string& name, int64_t width, int64_t inner);

// Returns the specs with the prefix before each name.
std::vector<ParameterSpec> WithPrefix(absl::string_view prefix, std::vector<ParameterSpec> specs);
// Adds `more` to the specs.
void AddSpecs(std::vector<ParameterSpec> more, std::vector<ParameterSpec>* specs);

// Adds each parameter, drawn from the seed and its name. Returns ResourceExhausted where there is
// no memory for them.
absl::Status DrawParameters(const std::vector<ParameterSpec>& specs, uint64_t seed,
                            NamedTensors* parameters);
// Returns InvalidArgument with the name of a parameter that is missing or has another shape.
absl::Status CheckParameters(const std::vector<ParameterSpec>& specs,
                             const NamedTensors& parameters);

// Returns a view of the parameter, or an empty one where there is none of that name.
ConstTensorView FindParameter(const NamedTensors& parameters, absl::string_view name);
// Make the layer of the parameters NAME.gamma, .beta, and of NAME.w1, .b1, .w2, .b2, which they
// copy to the device. `output` is applied to the network's result, before the residual.
absl::StatusOr<LayerNorm> MakeLayerNorm(Device device, const NamedTensors& parameters,
                                        absl::string_view name);
absl::StatusOr<FeedForward> MakeFeedForward(Device device, const NamedTensors& parameters,
                                            absl::string_view name, Activation activation,
                                            Activation output = Activation::kNone);

// The names of those parameters, for the gradients of a backward pass, which may not make strings.
struct NormNames {
  explicit NormNames(absl::string_view name);
  std::string gamma, beta;
};
struct FeedForwardNames {
  explicit FeedForwardNames(absl::string_view name);
  std::string w1, b1, w2, b2;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_LAYER_PARAMETERS_H_
