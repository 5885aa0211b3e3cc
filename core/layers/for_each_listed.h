// Calls of functors over the rows of a list: see core/cuda/for_each.h and row_list.h.
#ifndef TFB_CORE_LAYERS_FOR_EACH_LISTED_H_
#define TFB_CORE_LAYERS_FOR_EACH_LISTED_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/cuda/for_each.h"
#include "core/cuda/row_list.h"
#include "core/layers/listed_rows_functor.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb {

// Calls functor(row, piece) for the listed ones of `rows` rows, or for all where there is no list. The
// functor has the kernels of ForEachInRows, of itself and of its ListedRows.
template <class Functor>
absl::Status ForEachInListedRows(Device device, int64_t rows, int64_t columns,
                                 const Functor& functor, const RowList& list,
                                 const Execution& execution) {
  if (list.rows == nullptr) return ForEachInRows(device, rows, columns, functor, execution);
  return ForEachInRows(device, rows, columns, ListedRows<Functor>{functor, list}, execution);
}

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_FOR_EACH_LISTED_H_
