// A stack of layers of attention and a feed-forward network, with Transformer-XL's scores: its
// sizes, the names of its parameters, its products. transformer_xl and the techniques derived from
// it share it.
#ifndef TFB_MEMORY_TRANSFORMER_XL_STACK_H_
#define TFB_MEMORY_TRANSFORMER_XL_STACK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/problem.h"
#include "core/tensor.h"

namespace tfb::transformer_xl {

struct StackSizes {
  int64_t layers = 1;
  int64_t heads = 1;
  int64_t head_dim = 1;
  int64_t inner = 1;         // inner width of the feed-forward networks
  bool share_biases = true;  // one u and one v for all layers
  // Ramp of the spans that heads have learned, in tokens; 0 where they have none.
  double span_ramp = 0;
  bool final_norm = false;  // a norm of the last layer's output
  // Distances whose vectors are learned, in the place of r_d W_r; 0: the vectors are r_d W_r.
  int64_t learned_distances = 0;

  // Returns the most keys that a head with span z sees: those of a weight above 0.
  double KeysWithin(double z) const { return std::max(std::ceil(span_ramp + z), 0.0); }
  int64_t width() const { return heads * head_dim; }
};

// A parameter that is drawn from N(mean, deviation^2), f32.
struct ParameterSpec {
  std::string name;
  Shape shape;
  double mean = 0;
  double deviation = 0;
};

// Returns the spec of a matrix N(0, 1 / in): a product with it keeps the scale of its input.
ParameterSpec MatrixSpec(const std::string& name, int64_t in, int64_t out);

// The last norm's parameters are final_norm.gamma and .beta.
inline constexpr char kFinalNorm[] = "final_norm";

std::string LayerPrefix(int64_t layer);                          // "layer3."
std::string BiasPrefix(const StackSizes& sizes, int64_t layer);  // of u and v
// Returns the parameters with their distributions, as transformer_xl.h lists them.
std::vector<ParameterSpec> StackParameters(const StackSizes& sizes);

// Returns ResourceExhausted where there is no memory for them.
absl::StatusOr<NamedTensors> DrawParameters(const std::vector<ParameterSpec>& specs, uint64_t seed);
// Returns InvalidArgument with the name of a parameter that is missing or has another shape.
absl::Status CheckParameters(const std::vector<ParameterSpec>& specs,
                             const NamedTensors& parameters);

// Returns InvalidArgument where the problem is not self-attention with as many heads of keys as of
// queries.
absl::Status CheckSelfAttention(absl::string_view technique, const Problem& problem);

// Returns the FLOPs of the definition: projections, the three products of each kept pair (content,
// distance, values), feed-forward. `rows` are tokens of all batch rows, `pairs` query-key pairs of
// one head in one layer and all batch rows.
double StackFlops(const StackSizes& sizes, double rows, double pairs);

}  // namespace tfb::transformer_xl

#endif  // TFB_MEMORY_TRANSFORMER_XL_STACK_H_
