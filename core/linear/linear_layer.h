// A layer that runs engine linear, on any device, under a feature map whose matrix W is the layer's
// parameter "w". A technique over random features brings the map and a function that draws W.
#ifndef TFB_CORE_LINEAR_LINEAR_LAYER_H_
#define TFB_CORE_LINEAR_LINEAR_LAYER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/linear/linear.h"
#include "core/technique.h"

namespace tfb {

// Returns W for the Setup that follows `setups` others; the W of the first Setup is also the
// layer's from its creation on.
using DrawMatrix = std::function<Tensor(int64_t setups)>;

struct LinearParameters {
  DrawMatrix draw;
  // Whether each Setup draws a new W, until SetParameters gives the layer the caller's.
  bool redraw = false;
  // Unless empty, the parameter "gate" of a gated map: see LinearCall.
  Tensor gate;
  // Unless empty, the parameter "channel_scale", f32 [kv_heads, head_dim], which multiplies the
  // columns of each head's W; the map is then per head.
  Tensor channel_scale;
};

// Makes the layer. Its inputs and outputs are those of the technique, which must be attention's
// (QkvInputs, AttentionOutputs).
//
// Causal layers stream (StreamingLayer): a segment has tokens with q, k, v and optionally key_mask,
// and the state is LinearStateBytes in the device's memory, whatever the number of tokens. Layers
// whose map needs the maximum of the whole sequence do not stream. Setup resets the stream.
//
// Returns ResourceExhausted where there is no memory for that state; on a GPU Setup returns it.
//
// The layer has a backward pass, to all its inputs and parameters. What it keeps are
// LinearKeptBytes on the CPU, and nothing on CUDA devices.
//
// Statistics: "state_bytes", the sums of all heads; after a Run also "rows_without_weight", the
// share of query rows that see a key and whose denominator was 0 or below, or not above the map's
// floor. On a GPU they wait for that Run.
absl::StatusOr<std::unique_ptr<Layer>> MakeLinearLayer(const Problem& problem,
                                                       std::vector<TensorSpec> inputs,
                                                       std::vector<TensorSpec> outputs,
                                                       Device device, const FeatureMap& map,
                                                       LinearParameters parameters);

// Returns the FLOPs of one run, a multiply-add counting 2 and exponentials none, with m features
// and r rows of W:
//   2 r head_dim                 a query row, and a key row: its projections
//   2 m (value_dim + 1)          a key row: added to the sums
//   2 m (value_dim + 1)          a query row: read from them
// Query rows that see a key count. The bytes are q, k, v, out and W once.
Cost LinearCost(const Problem& problem, const FeatureMap& map);

// Returns those of one backward pass, counted in the same way:
//   6 r head_dim                 a query row, and a key row: its projections, and the gradients of
//                                the row and of W
//   4 m (value_dim + 1)          a query row: read from the sums over keys, added to those over
//                                queries
//   4 m (value_dim + 1)          a key row: read from the latter for its features and its value
//   2 m (value_dim + 1)          a key row of a causal problem: added to the sums, of which the run
//                                kept few
// The bytes are q, k, v, out, W and the gradient of out, and the gradients of the inputs and of W.
Cost LinearBackwardCost(const Problem& problem, const FeatureMap& map);

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_LAYER_H_
