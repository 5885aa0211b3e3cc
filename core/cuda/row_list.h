// A list of some rows of a hidden state [batch, tokens, channels]. It lies in device memory, and
// the host does not know its length. It is plain data, for kernels too.
#ifndef TFB_CORE_CUDA_ROW_LIST_H_
#define TFB_CORE_CUDA_ROW_LIST_H_

#include <stdint.h>

namespace tfb {

// Row b * tokens + t is token t of batch row b. Functions that take a list work on the listed rows
// in place, and neither read nor write others; their grids are for all rows, and blocks beyond the
// list return at once. core/layers/list_rows.h makes lists.
struct RowList {
  const int32_t* rows = nullptr;       // ascending; null: all rows are listed
  const int32_t* begins = nullptr;     // [batch + 1]: batch row b has rows[begins[b]], ...,
                                       // rows[begins[b + 1] - 1]
  const int32_t* count = nullptr;      // begins[batch]
  const uint8_t* is_listed = nullptr;  // for each row, 1 where it is listed, else 0
};

}  // namespace tfb

#endif  // TFB_CORE_CUDA_ROW_LIST_H_
