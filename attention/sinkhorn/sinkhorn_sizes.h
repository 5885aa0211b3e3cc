// The sizes of a sorting and the network that scores blocks, for the CPU's and CUDA's code: plain
// data.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_SIZES_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_SIZES_H_

#include <stdint.h>

namespace tfb::sinkhorn {

enum class SortScores : unsigned char { kRelu, kLinear, kLogRelu, kGiven };

struct SinkhornSizes {
  int64_t batch;
  int64_t heads;  // heads of keys and values
  int64_t tokens;
  int64_t block;         // rows
  int64_t blocks;        // N
  int64_t null_blocks;   // 1 where there is a null key, else 0
  int64_t mixed_blocks;  // blocks of K^s and V^s
  int64_t width;         // width of pooled rows
  int64_t hidden;
  int64_t iterations;
  double temperature;
  SortScores scores;
  bool causal;

  // Returns the columns of S: the null block is the first.
  constexpr int64_t Columns() const { return null_blocks + blocks; }
  // Returns how many columns, from the first on, sorted block u is a sum of.
  constexpr int64_t Support(int64_t u) const { return causal ? u + null_blocks : Columns(); }
};

// The network of all heads, one after the other. Where `hidden` is 0, score_weights takes pooled
// rows.
struct SortNetwork {
  const double* hidden_weights;  // [width][hidden]
  const double* hidden_bias;     // [hidden]
  const double* score_weights;   // [hidden][columns]
  const double* score_bias;      // [columns]
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_SIZES_H_
