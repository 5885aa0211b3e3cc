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

TFB_HOST_DEVICE double Entry(const SortMatrix& sort, int64_t b, int64_t h, int64_t u, int64_t t) {
  const int64_t offset =
      b * sort.strides[0] + h * sort.strides[1] + u * sort.strides[2] + t * sort.strides[3];
  return sort.is_double ? static_cast<const double*>(sort.data)[offset]
                        : static_cast<const float*>(sort.data)[offset];
}

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
    const int64_t b = head / sizes.heads, h = head % sizes.heads;
    for (int64_t t = piece.first(); t < piece.end(); ++t) {
      const double entry = t < sizes.Support(u) ? Entry(from, b, h, u, t) : 0;
      const int64_t offset =
          b * to.strides[0] + h * to.strides[1] + u * to.strides[2] + t * to.strides[3];
      if (to.is_double) {
        static_cast<double*>(to.data)[offset] = entry;
      } else {
        static_cast<float*>(to.data)[offset] = static_cast<float>(entry);
      }
    }
  }
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_FUNCTORS_H_
