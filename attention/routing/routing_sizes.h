// The sizes that follow from the options of the Routing Transformer's attention for a problem.
#ifndef TFB_ATTENTION_ROUTING_ROUTING_SIZES_H_
#define TFB_ATTENTION_ROUTING_ROUTING_SIZES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "attention/routing/routing.h"
#include "core/definition.h"
#include "core/problem.h"
#include "core/tensor.h"

namespace tfb::routing {

constexpr double kRoutingNormEpsilon = 1e-5;

// The sizes of options on a problem.
struct RoutingSizes {
  static constexpr int64_t kTokensOfCluster = 512;

  RoutingSizes(const Problem& problem, const RoutingOptions& options) {
    const int64_t tokens = std::max<int64_t>(problem.query_tokens, 1);
    clusters = options.clusters != 0 ? options.clusters
                                     : (tokens + kTokensOfCluster - 1) / kTokensOfCluster;
    clusters = std::min(clusters, tokens);
    size = (problem.query_tokens + clusters - 1) / clusters;
    sets = problem.causal ? 1 : 2;
    local_heads = options.local_heads < 0 ? problem.query_heads / 2
                                          : std::min(options.local_heads, problem.query_heads);
    heads = problem.query_heads - local_heads;
  }
  int64_t clusters;
  int64_t size;  // w
  // Sets of members: that of queries, and that of keys where keys are not queries.
  int64_t sets;
  int64_t local_heads;  // the first heads, which are local
  int64_t heads;        // the others
};

inline double RoutingScale(const Problem& problem, const RoutingOptions& options) {
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}

// Returns (x - mean) / sqrt(variance + 1e-5) or x / |x|, 0 where that is 0, of all rows in float64,
// rounded to 16 bits where the problem is. The definition and the updates of centroids use it.
DoubleTensor RoutingNormalized(const Problem& problem, RoutingOptions::Norm norm,
                               const ConstTensorView& view);

}  // namespace tfb::routing

#endif  // TFB_ATTENTION_ROUTING_ROUTING_SIZES_H_
