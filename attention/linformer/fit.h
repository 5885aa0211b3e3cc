// E fitted to keys and values: see linformer.h, "The fit".
#ifndef TFB_ATTENTION_LINFORMER_FIT_H_
#define TFB_ATTENTION_LINFORMER_FIT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/tensor.h"

namespace tfb::linformer {

// Fits a table e, f32 [slots, tokens], to the keys and values in host memory that share it, each
// [tokens, channels]; slots are at most tokens. The fit uses the tokens for which `is_token` is
// true; the others' columns of E are 0, and so is all of E where there are none. The arithmetic is
// float64. Returns InvalidArgument where a key or value of a token is not finite.
absl::Status FitTable(const std::vector<ConstTensorView>& keys_and_values,
                      const std::vector<bool>& is_token, const TensorView& e);

}  // namespace tfb::linformer

#endif  // TFB_ATTENTION_LINFORMER_FIT_H_
