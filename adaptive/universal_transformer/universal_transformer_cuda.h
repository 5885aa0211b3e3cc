// The CUDA kernels of universal_transformer as C++ sees them. Pointers are to device memory; rows are
// those of all tokens, batch after batch.
//
// stop[row] says which tokens take a step: a token runs step n, counted from 0, where n <
// stop[row]. It begins as the largest number of steps, 0 for padding, and becomes N when the token
// halts. Work for the rows of a list is for all rows that run where there is no list.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_CUDA_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/row_list.h"

namespace tfb::universal_transformer {

// The halting of a token that runs, from a row of channels that the kernel has loaded.
struct HaltingArguments {
  const float* weight_of_channels;  // w [channels]; null: no halting
  const float* bias;                // [1]
  float threshold;
  bool above;  // halts where the sum is above the threshold; else at least it
  bool remainder_at_limit;
  int64_t limit;             // steps at most
  float* total;              // [rows] p^1 + .. + p^n
  float* weight;             // [rows] weight of the step's state
  float* ponder;             // [rows]
  uint8_t* takes_remainder;  // [rows] whether the last step weighs the remainder; or null
};

// Sets H = x, with no steps taken.
struct BeginStepsArguments {
  DeviceView x;             // [batch, tokens, channels]
  const uint8_t* key_mask;  // null: no padding
  int64_t mask_strides[2];
  float* state;   // [rows, channels]
  float* output;  // [rows, channels], or null
  float* total;   // [rows]
  float* ponder;
  int32_t* stop;
  uint8_t* goes_on;    // [rows] 1 for tokens, 0 for padding; null where not wanted
  float* keys_values;  // [rows, key_channels], become 0 for padding
  int64_t rows;
  int64_t tokens;
  int64_t channels;
  int64_t key_channels;
  int64_t limit;
  bool halts;  // whether ponder counts the steps taken; else it is `limit`
};

// Computes U = H + PE + T, and the same without T, for listed rows, and with halting from before
// the step, its decision.
struct ReadStatesArguments {
  const float* state;      // [rows, channels]
  const float* positions;  // [tokens, channels]
  const float* time;       // [channels]
  float* placed;           // [rows, channels]
  float* read;             // [rows, channels]
  RowList list;
  int32_t* stop;
  int64_t rows;
  int64_t tokens;
  int64_t channels;
  int64_t step;
  HaltingArguments halting;
};

// Sets H = S for tokens that run or are recomputed, and for those that run decides with halting
// from after the step, and adds S to the output: Y = kept Y + weight S, where `kept` is 1, or 1 -
// weight of a mix; or Y = S.
struct KeepStatesArguments {
  const float* made;  // S [rows, channels]
  float* state;
  float* output;        // null: the output is the state
  const float* weight;  // [rows], decided before the step; null for 1
  bool is_mix;
  bool is_last;     // Y = S
  bool recomputes;  // tokens that have halted
  int32_t* stop;
  uint8_t* goes_on;  // [rows] becomes 0 for tokens that run no further step; null where not wanted
  RowList list;
  int64_t rows;
  int64_t channels;
  int64_t step;
  HaltingArguments halting;
};

// Copies rows of tokens that run or are recomputed to those that other tokens see.
struct ShowRowsArguments {
  const float* from;  // [rows, channels]
  float* shown;
  bool recomputes;
  const int32_t* stop;
  RowList list;
  int64_t rows;
  int64_t channels;
  int64_t step;
};

// Computes y_t = sum_j kernel_j shown_(t + j - before), in each channel, for tokens that are not
// padding.
struct ConvolveArguments {
  const float* shown;   // [rows, channels]
  const float* kernel;  // [size, channels]
  float* y;
  const int32_t* stop;
  RowList list;
  int64_t rows;
  int64_t tokens;
  int64_t channels;
  int64_t size;
  int64_t before;
};

// Writes out = from, 0 for padding, and the ponder and steps of each token.
struct WriteStatesArguments {
  const float* from;  // [rows, channels]
  const float* ponder;
  const int32_t* stop;
  DeviceView out;         // [batch, tokens, channels]
  DeviceView ponder_out;  // [batch, tokens]; data null where not wanted
  int32_t* steps_out;     // [batch, tokens], with its strides; null where not wanted
  int64_t steps_strides[2];
  int64_t rows;
  int64_t tokens;
  int64_t channels;
};

// Each launcher enqueues on the stream and returns null, or a text that says why it could not.
struct UniversalTransformerKernels {
  const char* (*begin)(const BeginStepsArguments& arguments, void* stream);
  const char* (*read)(const ReadStatesArguments& arguments, void* stream);
  const char* (*keep)(const KeepStatesArguments& arguments, void* stream);
  const char* (*show)(const ShowRowsArguments& arguments, void* stream);
  const char* (*convolve)(const ConvolveArguments& arguments, void* stream);
  const char* (*write)(const WriteStatesArguments& arguments, void* stream);
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_CUDA_H_
