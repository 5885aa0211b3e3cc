// A functor of rows for those of a list: see core/cuda/functor.h and row_list.h.
#ifndef TFB_CORE_LAYERS_LISTED_ROWS_FUNCTOR_H_
#define TFB_CORE_LAYERS_LISTED_ROWS_FUNCTOR_H_

#include "core/cuda/functor.h"
#include "core/cuda/row_list.h"

namespace tfb {

// Is called for as many rows as there are, and calls `of` for the listed ones. It takes a
// TFB_FOR_EACH_IN_ROWS of its own for each functor.
template <class Functor>
struct ListedRows {
  Functor of;
  RowList list;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t n, const Piece& piece) const {
    if (n < *list.count) of(int64_t{list.rows[n]}, piece);
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LISTED_ROWS_FUNCTOR_H_
