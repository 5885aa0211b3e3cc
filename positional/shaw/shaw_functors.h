// The sums of shaw's backward pass over queries, on CUDA devices. Pointers are to the device's
// memory. Each element of a sum has one owner, which adds in a fixed order.
#ifndef TFB_POSITIONAL_SHAW_SHAW_FUNCTORS_H_
#define TFB_POSITIONAL_SHAW_SHAW_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "positional/shaw/shaw_sizes.h"

namespace tfb::shaw {

// Adds to key j the rows x_i of the queries that it is near to, times their factors:
//
//   to_j += factor sum over heads of the group, i  numbers[i][rho] x_i,    rho = j - p_i + k
//
// Row (b * kv_heads + head) * kv_tokens + j. A number that is 0 adds nothing, whatever x holds.
struct AddToNearKeys {
  ShawSizes sizes;
  const float* numbers;  // [batch][query_heads][query_tokens][bins]
  DeviceView x;          // [batch, query_heads, query_tokens, channels]
  DeviceView to;         // f32 [batch, kv_heads, kv_tokens, channels]
  float factor;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t heads = sizes.query_heads / sizes.group;
    const int64_t j = row % sizes.kv_tokens, head = row / sizes.kv_tokens % heads,
                  b = row / sizes.kv_tokens / heads;
    const int64_t shift = sizes.Position(0);
    // The queries at positions j - k + 1 to j + k - 1, or to j where causal keys end there.
    const int64_t least = j - shift - (sizes.causal ? 0 : sizes.max_distance - 1);
    const int64_t most = j - shift + sizes.max_distance - 1;
    const int64_t first = least > 0 ? least : 0;
    const int64_t last = most < sizes.query_tokens ? most : sizes.query_tokens - 1;
    float sum[Piece::kMost] = {}, values[Piece::kMost];
    for (int64_t h = head * sizes.group; h < (head + 1) * sizes.group; ++h) {
      for (int64_t i = first; i <= last; ++i) {
        const int64_t of_query = (b * sizes.query_heads + h) * sizes.query_tokens + i;
        const int64_t bin = j - sizes.Position(i) + sizes.max_distance;
        const float number = numbers[of_query * sizes.bins() + bin];
        if (number == 0) continue;
        piece.Load(x, Offset(x, b, h, i), x.strides[3], values);
        for (int n = 0; n < piece.count(); ++n) sum[n] += number * values[n];
      }
    }
    const int64_t offset = Offset(to, b, head, j);
    piece.Load(to, offset, to.strides[3], values);
    for (int n = 0; n < piece.count(); ++n) values[n] += factor * sum[n];
    piece.Store(values, to, offset, to.strides[3]);
  }
};

// The queries whose products one thread adds up in fp32.
constexpr int64_t kTableChunk = 256;

// Sums, for each bin of a table, the rows x_i of a chunk of the queries that use it, times their
// numbers. Row (table * chunks + chunk) * bins + bin. A number that is 0 adds nothing, whatever x
// holds.
struct SumOfBins {
  ShawSizes sizes;
  const float* numbers;  // [batch][query_heads][query_tokens][bins]
  DeviceView x;          // [batch, query_heads, query_tokens, channels]
  float* sums;           // [table_heads][chunks][bins][channels]
  int64_t channels;

  // Returns how many queries, of all sequences, use a table.
  TFB_HOST_DEVICE int64_t queries() const { return sizes.rows() / sizes.table_heads; }
  TFB_HOST_DEVICE int64_t chunks() const { return (queries() + kTableChunk - 1) / kTableChunk; }

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t bin = row % sizes.bins(), chunk = row / sizes.bins() % chunks(),
                  table = row / sizes.bins() / chunks();
    const int64_t heads = sizes.query_heads / sizes.table_heads;  // of a table
    const int64_t end = (chunk + 1) * kTableChunk;
    float sum[Piece::kMost] = {}, values[Piece::kMost];
    for (int64_t n = chunk * kTableChunk; n < (end < queries() ? end : queries()); ++n) {
      const int64_t i = n % sizes.query_tokens, head = n / sizes.query_tokens;
      const int64_t b = head / heads, h = table + head % heads;
      const int64_t of_query = (b * sizes.query_heads + h) * sizes.query_tokens + i;
      const float number = numbers[of_query * sizes.bins() + bin];
      if (number == 0) continue;
      piece.Load(x, Offset(x, b, h, i), x.strides[3], values);
      for (int m = 0; m < piece.count(); ++m) sum[m] += number * values[m];
    }
    float* to = sums + row * channels + piece.first();
    for (int m = 0; m < piece.count(); ++m) to[m] = sum[m];
  }
};

// Adds the sums of all chunks, times a factor, to those of a table. Row table * bins + bin.
struct AddSumsOfBins {
  const float* sums;  // [table_heads][chunks][bins][channels]
  int64_t chunks;
  int64_t bins;
  int64_t channels;
  double factor;
  double* to;  // [table_heads][bins][channels]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t first = row / bins * chunks * bins + row % bins;
    for (int64_t c = piece.first(); c < piece.end(); ++c) {
      double sum = 0;
      for (int64_t n = 0; n < chunks; ++n) sum += sums[(first + n * bins) * channels + c];
      to[row * channels + c] += factor * sum;
    }
  }
};

}  // namespace tfb::shaw

#endif  // TFB_POSITIONAL_SHAW_SHAW_FUNCTORS_H_
