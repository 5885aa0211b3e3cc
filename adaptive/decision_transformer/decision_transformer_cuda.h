// The CUDA kernel of decision_transformer as C++ sees it. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_CUDA_H_
#define TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb::decision_transformer {

// Copies to each token its step's row of the table: token i becomes table[timestep of i / 3].
struct EmbedTimestepsArguments {
  const int32_t* timesteps;  // [batch, steps]
  int64_t strides[2];        // strides of timesteps, in elements
  const float* table;        // [table_rows, channels]
  int64_t table_rows;        // timesteps outside the table count as the nearest row
  float* tokens;             // [batch, tokens, channels]
  int64_t batch;
  int64_t tokens_of_batch;
  int64_t channels;
};

struct DecisionTransformerKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*embed_timesteps)(const EmbedTimestepsArguments& arguments, void* stream);
};

}  // namespace tfb::decision_transformer

#endif  // TFB_ADAPTIVE_DECISION_TRANSFORMER_DECISION_TRANSFORMER_CUDA_H_
