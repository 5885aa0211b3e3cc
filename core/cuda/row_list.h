// Some of the rows of a hidden state [batch, tokens, channels], as a list that lies in device memory
// and whose length the host does not know. Plain data, for kernels too.
#ifndef TFB_CORE_CUDA_ROW_LIST_H_
#define TFB_CORE_CUDA_ROW_LIST_H_

#include <stdint.h>

namespace tfb {

// Row b * tokens + t is token t of batch row b. What takes a list works on those rows where they lie,
// and neither reads nor writes others; its grid is for all rows, and blocks beyond the list return at
// once. See core/layers/list_rows.h for how one is made.
struct RowList {
  const int32_t* rows = nullptr;       // ascending; null: all rows are listed
  const int32_t* begins = nullptr;     // [batch + 1]: batch row b has rows[begins[b]], ...,
                                       // rows[begins[b + 1] - 1]
  const int32_t* count = nullptr;      // begins[batch]
  const uint8_t* is_listed = nullptr;  // of each row, 1 or 0
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_ROW_LIST_H_
