// The steps of decision_transformer beside core/layers. Pointers are to the device's memory.
#ifndef TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_FUNCTORS_H_
#define TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/layers/tensor_rows.h"

namespace tfb::decision_transformer {

// The rows of the timesteps' table that tokens have: that of token i of a batch row is the timestep of step
// i / 3. Row b * tokens_of_batch + i is that token.
struct RowsOfTimesteps {
  const int32_t* timesteps;  // [batch, steps]
  int64_t strides[2];        // strides of timesteps, in elements
  int64_t table_rows;        // timesteps outside the table count as the nearest row
  int64_t tokens_of_batch;

  TFB_HOST_DEVICE int64_t Of(int64_t row) const {
    const int64_t b = row / tokens_of_batch, step = row % tokens_of_batch / 3;
    const int64_t timestep = timesteps[b * strides[0] + step * strides[1]];
    return timestep < 0 ? 0 : timestep < table_rows ? timestep : table_rows - 1;
  }
};

// Copies to each token its row of the table.
struct EmbeddingOfTimesteps {
  RowsOfTimesteps rows;
  const float* table;  // [table_rows, channels]
  float* tokens;       // [batch, tokens, channels]
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    piece.Copy(table + rows.Of(row) * channels, tokens + row * channels);
  }
};

// The tokens of each row of the table as a chain, in their order.
struct TokenChain {
  int32_t* next;      // [tokens]: the next token of the same row, or -1
  int32_t* is_first;  // [tokens]: 1 for the first token of a row, else 0
};

// Makes the links of token n.
struct LinkTokens {
  RowsOfTimesteps rows;
  int64_t tokens;  // of all batch rows
  TokenChain chain;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t row = rows.Of(n);
    int64_t earlier = 0, later = n + 1;
    while (earlier < n && rows.Of(earlier) != row) ++earlier;
    while (later < tokens && rows.Of(later) != row) ++later;
    chain.is_first[n] = earlier == n ? 1 : 0;
    chain.next[n] = later < tokens ? static_cast<int32_t>(later) : -1;
  }
};

// Adds to the row of the table of token n, which is the first of its chain, the gradients of the tokens of
// the chain, in their order.
struct AddChains {
  RowsOfTimesteps rows;
  TokenChain chain;
  RowsOfView tokens;  // gradients
  RowsOfView table;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    if (chain.is_first[n] == 0) return;
    float sum[Piece::kMost], more[Piece::kMost];
    const int64_t row = rows.Of(n);
    table.Load(row, piece, sum);
    for (int64_t token = n; token >= 0; token = chain.next[token]) {
      tokens.Load(token, piece, more);
      for (int i = 0; i < piece.count(); ++i) sum[i] += more[i];
    }
    table.Store(row, piece, sum);
  }
};

}  // namespace tfb::decision_transformer

#endif  // TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_FUNCTORS_H_
