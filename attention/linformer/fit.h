// E fitted to keys and values: see linformer.h, "The fit".
#ifndef TFB_ATTENTION_LINFORMER_FIT_H_
#define TFB_ATTENTION_LINFORMER_FIT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/tensor.h"

namespace tfb {

// What share one table: keys and values in host memory, each [tokens, channels]. Those of the
// tokens that `is_token` names are fitted; the others' columns of E are 0, and so is all of E where
// it names none. e is f32 [slots, tokens], slots at most tokens. The arithmetic is float64.
// InvalidArgument where a key or value of a token is not finite.
absl::Status FitTable(const std::vector<ConstTensorView>& keys_and_values,
                      const std::vector<bool>& is_token, const TensorView& e);

}  // namespace tfb

#endif  // TFB_ATTENTION_LINFORMER_FIT_H_
