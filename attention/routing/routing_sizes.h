// What the options of the Routing Transformer's attention come to on a problem.
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

namespace tfb {

constexpr double kRoutingNormEpsilon = 1e-5;

// What options mean for a problem.
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
  int64_t size;         // w
  int64_t sets;         // of members: of queries, and of keys where those are others
  int64_t local_heads;  // the first ones
  int64_t heads;        // the others
};

inline double RoutingScale(const Problem& problem, const RoutingOptions& options) {
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}

// Whether the technique does the problem.
absl::Status CheckRouting(const Problem& problem);

// (x - mean) / sqrt(variance + 1e-5) of all rows in float64, in 16 bits where the problem is: what the
// definition and the updates of centroids are made of.
DoubleTensor RoutingNormalized(const Problem& problem, const ConstTensorView& view);

}  // namespace tfb

#endif  // TFB_ATTENTION_ROUTING_ROUTING_SIZES_H_
