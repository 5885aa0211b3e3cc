// The sizes of a stack of layers with Transformer-XL's attention, the names of its parameters and
// the number of its products.
#ifndef TFB_CORE_LAYERS_STACK_STACK_SIZES_H_
#define TFB_CORE_LAYERS_STACK_STACK_SIZES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/layers/layer_parameters.h"
#include "core/problem.h"

namespace tfb::layers {

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

// The last norm's parameters are final_norm.gamma and .beta.
inline constexpr char kFinalNorm[] = "final_norm";

std::string LayerPrefix(int64_t layer);                          // "layer3."
std::string BiasPrefix(const StackSizes& sizes, int64_t layer);  // of u and v
// Returns the parameters with their distributions, which memory/transformer_xl/transformer_xl.h
// lists.
std::vector<ParameterSpec> StackParameters(const StackSizes& sizes);

// Returns InvalidArgument where the problem is not self-attention with as many heads of keys as of
// queries.
absl::Status CheckSelfAttention(absl::string_view technique, const Problem& problem);

// Returns the FLOPs of the definition: projections, the three products of each kept pair (content,
// distance, values), feed-forward. `rows` are tokens of all batch rows, `pairs` query-key pairs of
// one head in one layer and all batch rows.
double StackFlops(const StackSizes& sizes, double rows, double pairs);

// The numbers of rows and pairs that a backward pass of a stack reads in one layer.
struct StackBackwardWork {
  double rows = 0;   // as above
  double pairs = 0;  // likewise
  // Rows that segments read before their own, of all batch rows, and whether these are normalised.
  double earlier = 0;
  bool normalizes_earlier = false;
  // Distances of the pairs; all batch rows and segments have the same.
  double distances = 0;
};

// Returns the FLOPs of a backward pass that computes all of that once more. It makes keys and values
// of the earlier rows again, and gradients of the matrices; and of the rows themselves where these
// are normalised. The gradient of W_r is one product, sum_d r_d^T dr_d, unless the vectors of
// distances are learned.
double StackBackwardFlops(const StackSizes& sizes, const StackBackwardWork& work);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_STACK_SIZES_H_
