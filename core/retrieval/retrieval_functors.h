// The step of core/retrieval that is not a layer's or a search's.
#ifndef TFB_CORE_RETRIEVAL_RETRIEVAL_FUNCTORS_H_
#define TFB_CORE_RETRIEVAL_RETRIEVAL_FUNCTORS_H_

#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb {

// Copies the neighbours of token i of sequence b, which are row b * tokens + i. Strides are in
// elements; pointers are to the device's memory.
struct CopyOfNeighbours {
  const int32_t* from;  // [batch, tokens, k]
  int64_t from_strides[3];
  int32_t* to;  // the same shape
  int64_t to_strides[3];
  int64_t tokens;
  int64_t entries;  // numbers that name no entry become -1

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / tokens, i = row % tokens;
    for (int64_t n = piece.first(); n < piece.end(); ++n) {
      const int32_t entry = from[b * from_strides[0] + i * from_strides[1] + n * from_strides[2]];
      to[b * to_strides[0] + i * to_strides[1] + n * to_strides[2]] =
          entry >= 0 && entry < entries ? entry : -1;
    }
  }
};

}  // namespace tfb

#endif  // TFB_CORE_RETRIEVAL_RETRIEVAL_FUNCTORS_H_
