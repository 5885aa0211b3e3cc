// The sizes of shaw's own step, as C++ and CUDA see them.
#ifndef TFB_POSITIONAL_SHAW_SHAW_SIZES_H_
#define TFB_POSITIONAL_SHAW_SHAW_SIZES_H_

#include <stdint.h>

namespace tfb::shaw {

struct ShawSizes {
  int64_t batch;
  int64_t query_heads;
  int64_t group;  // query heads that share a key-value head
  int64_t query_tokens;
  int64_t kv_tokens;
  int64_t head_dim;
  int64_t value_dim;
  int64_t value_row;     // floats of a row of P^V
  int64_t max_distance;  // k
  int64_t table_heads;   // 1: shared
  int64_t far_parts;     // 1: the keys before the near ones; 2: also those behind
  bool causal;
  float scale;

  constexpr int64_t bins() const { return 2 * max_distance + 1; }
  constexpr int64_t rows() const { return batch * query_heads * query_tokens; }
  // Returns query i's place among the keys.
  constexpr int64_t Position(int64_t i) const { return i + kv_tokens - query_tokens; }
  // Return the near keys of a query at `position`: none where the first is beyond the last.
  constexpr int64_t FirstNear(int64_t position) const {
    return position - max_distance + 1 < 0 ? 0 : position - max_distance + 1;
  }
  constexpr int64_t LastNear(int64_t position) const {
    const int64_t last = causal && max_distance > 0 ? position : position + max_distance - 1;
    return last < kv_tokens ? last : kv_tokens - 1;
  }
};

}  // namespace tfb::shaw

#endif  // TFB_POSITIONAL_SHAW_SHAW_SIZES_H_
