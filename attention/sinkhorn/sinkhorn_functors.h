// Steps of sparse Sinkhorn attention that all devices run. Pointers are to the device's memory.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_FUNCTORS_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_FUNCTORS_H_

#include <stdint.h>

#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/cuda/functor.h"

namespace tfb::sinkhorn {

// A key mask: u8 [batch, tokens], or null.
struct SinkhornMask {
  const uint8_t* data;
  int64_t strides[2];
};
TFB_HOST_DEVICE bool IsToken(const SinkhornSizes& sizes, const SinkhornMask& mask, int64_t b,
                             int64_t j) {
  return j < sizes.tokens &&
         (mask.data == nullptr || mask.data[b * mask.strides[0] + j * mask.strides[1]] != 0);
}

// S [batch, heads, blocks, columns], of floats or doubles.
struct SortMatrix {
  void* data;
  int64_t strides[4];
  bool is_double;
};

// Finds which rows of the sorted blocks are keys. Element b * block + r is row r of all blocks of
// sequence b.
struct KeysAmongMixedRows {
  SinkhornSizes sizes;
  SinkhornMask key_mask;
  uint8_t* mask;  // [batch][mixed_blocks block]

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t b = n / sizes.block, r = n % sizes.block;
    int64_t first = 0;  // the first column with a key in row r: the null block has one in each
    while (sizes.null_blocks == 0 && first < sizes.blocks &&
           !IsToken(sizes, key_mask, b, first * sizes.block + r)) {
      ++first;
    }
    for (int64_t u = 0; u < sizes.mixed_blocks; ++u) {
      mask[(b * sizes.mixed_blocks + u) * sizes.block + r] = first < sizes.Support(u) ? 1 : 0;
    }
  }
};

// Copies a matrix; entries outside the support become 0. Row (b * heads + h) * blocks + u.
struct CopyOfSort {
  SinkhornSizes sizes;
  SortMatrix from;
  SortMatrix to;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t u = row % sizes.blocks, head = row / sizes.blocks;
    const auto offset = [&](const SortMatrix& sort, int64_t t) {
      return head / sizes.heads * sort.strides[0] + head % sizes.heads * sort.strides[1] +
             u * sort.strides[2] + t * sort.strides[3];
    };
    for (int64_t t = piece.first(); t < piece.end(); ++t) {
      double entry = 0;
      if (t < sizes.Support(u)) {
        entry = from.is_double ? static_cast<const double*>(from.data)[offset(from, t)]
                               : static_cast<const float*>(from.data)[offset(from, t)];
      }
      if (to.is_double) {
        static_cast<double*>(to.data)[offset(to, t)] = entry;
      } else {
        static_cast<float*>(to.data)[offset(to, t)] = static_cast<float>(entry);
      }
    }
  }
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_FUNCTORS_H_
