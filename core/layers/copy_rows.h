// Copies of rows of hidden states between views, on every device.
#ifndef TFB_CORE_LAYERS_COPY_ROWS_H_
#define TFB_CORE_LAYERS_COPY_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// A copy of rows of any floating dtype. Row n of a list that lies in a ring [batch, places,
// channels] is at place (first + n) % places.
//
//   row n of `to` = row s(n) of `from`, or zeros where s(n) < 0
//   s(n) = selected[b rows + n]        where `selected` is not null
//        = n + c - 1 - 3 (n mod c)     where c = dilated_block is not 0, which is
//                                      c t + c - 1 - 2 i for n = c t + i
//        = n                           else
struct CopyRowsCall {
  ConstTensorView from;    // [batch, places, channels]
  int64_t from_first = 0;  // place of row 0
  TensorView to;           // [batch, places, channels]
  int64_t to_first = 0;
  int64_t rows = 0;                   // that are written in each sequence of the batch
  const int32_t* selected = nullptr;  // [batch, rows] on the device
  int64_t dilated_block = 0;
};
// Copies the rows. It allocates nothing; on CUDA it enqueues on the stream.
absl::Status CopyRows(Device device, const CopyRowsCall& call, const Execution& execution);
// Copies all rows of `from` to the first places of `to`.
absl::Status CopyAllRows(Device device, const ConstTensorView& from, const TensorView& to,
                         const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_COPY_ROWS_H_
