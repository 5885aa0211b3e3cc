// The step of decision_transformer beside core/layers. Pointers are to the device's memory.
#ifndef TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_FUNCTORS_H_
#define TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::decision_transformer {

// Copies to each token its step's row of the table: token i becomes table[timestep of i / 3]. Row
// b * tokens_of_batch + i has the channels as columns.
struct EmbeddingOfTimesteps {
  const int32_t* timesteps;  // [batch, steps]
  int64_t strides[2];        // strides of timesteps, in elements
  const float* table;        // [table_rows, channels]
  int64_t table_rows;        // timesteps outside the table count as the nearest row
  float* tokens;             // [batch, tokens, channels]
  int64_t tokens_of_batch;
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / tokens_of_batch, step = row % tokens_of_batch / 3;
    const int64_t timestep = timesteps[b * strides[0] + step * strides[1]];
    const int64_t known = timestep < 0 ? 0 : timestep < table_rows ? timestep : table_rows - 1;
    piece.Copy(table + known * channels, tokens + row * channels);
  }
};

}  // namespace tfb::decision_transformer

#endif  // TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_FUNCTORS_H_
