// The sizes that follow from the options of LSH attention for a problem.
#ifndef TFB_ATTENTION_LSH_LSH_SIZES_H_
#define TFB_ATTENTION_LSH_LSH_SIZES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "attention/lsh/lsh.h"
#include "core/problem.h"

namespace tfb::lsh {

inline bool LshIsWhole(const LshOptions& options) { return options.buckets == 1; }
inline bool LshWraps(const LshOptions& options) { return options.wrap && !LshIsWhole(options); }
inline int64_t LshRounds(const LshOptions& options) {
  return LshIsWhole(options) ? 1 : options.rounds;
}
inline int64_t LshChunk(const LshOptions& options, int64_t tokens) {
  return LshIsWhole(options) ? std::max<int64_t>(tokens, 1) : options.chunk;
}
inline double LshScale(const Problem& problem, const LshOptions& options) {
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}
inline double LshKeyEpsilon(const Problem& problem, const LshOptions& options) {
  return options.key_norm == LshOptions::KeyNorm::kUnit
             ? 0
             : 1e-6 * static_cast<double>(problem.head_dim);
}

inline int64_t LshBuckets(const std::vector<int64_t>& factors) {
  int64_t buckets = 1;
  for (const int64_t columns : factors) buckets *= 2 * columns;
  return buckets;
}

}  // namespace tfb::lsh

#endif  // TFB_ATTENTION_LSH_LSH_SIZES_H_
