// The kernel of Longformer beside core/flash: lists of the tokens that an input makes global. Every
// pointer is to the memory of the device.
#ifndef TFB_ATTENTION_LONGFORMER_LONGFORMER_CUDA_H_
#define TFB_ATTENTION_LONGFORMER_LONGFORMER_CUDA_H_

#include <stdint.h>

#include "core/cuda/kernel_table.h"

namespace tfb::longformer {

// The global tokens of each sequence. `most` is at least their number, and the number of tokens
// where all may be global.
struct GlobalLists {
  uint8_t* is_global;    // [batch][tokens], aligned to 16 bytes
  uint8_t* local_keys;   // [batch][tokens], 1 for a token that is neither padding nor global
  uint8_t* global_keys;  // [batch][tokens], 1 for a global token that is not padding
  // [batch][most]: the global tokens, ascending, and then one that is not global, repeated.
  int32_t* keys;
};

struct FindGlobalsArguments {
  int64_t batch;
  int64_t tokens;
  int64_t most;
  int64_t most_marked;         // tokens of a sequence that the mask can make global
  const uint8_t* is_position;  // [tokens], 1 for tokens that are global in every sequence
  const uint8_t* global_mask;  // [batch, tokens], or null
  int64_t global_mask_strides[2];
  const uint8_t* key_mask;  // [batch, tokens], or null
  int64_t key_mask_strides[2];
  GlobalLists lists;
};

struct LongformerKernels {
  const char* (*find_globals)(const FindGlobalsArguments& arguments, void* stream);
};

}  // namespace tfb::longformer

#endif  // TFB_ATTENTION_LONGFORMER_LONGFORMER_CUDA_H_
