// Lists of the rows that go on to the next step, made on the device: see core/cuda/row_list.h.
#ifndef TFB_CORE_LAYERS_LIST_ROWS_H_
#define TFB_CORE_LAYERS_LIST_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/cuda/row_list.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb {

// Device memory of a list of up to `rows` rows of `batch` batch rows.
struct RowListMemory {
  // [rows], aligned to 16 bytes: 1 for a row that the list contains, else 0.
  uint8_t* is_listed = nullptr;
  int32_t* rows = nullptr;    // [rows]
  int32_t* begins = nullptr;  // [batch + 1]

  RowList list(int64_t batch) const { return {rows, begins, begins + batch, is_listed}; }
};

// Makes `rows` and `begins` from is_listed, for rows of batch * tokens. It is for CUDA alone and
// enqueues on the stream. Every run gives the same list, whatever the order of blocks.
absl::Status ListRows(Device device, const RowListMemory& memory, int64_t batch, int64_t tokens,
                      const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LIST_ROWS_H_
