// The sums over blocks of what the kernels of the backward pass store for the terms of the score (core/flash/
// flash_backward_kernels.h), in the order of the blocks. Pointers are to the device's memory.
#ifndef TFB_CORE_FLASH_FLASH_BACKWARD_SUMS_H_
#define TFB_CORE_FLASH_FLASH_BACKWARD_SUMS_H_

#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/cuda/run_sums.h"
#include "core/flash/flash_backward_kernels.h"
#include "core/flash/score_rule.h"

namespace tfb {

// Sums over the tiles of all batch rows: element n = h channels + c.
struct SumOfTiles {
  const float* parts;  // [batch][heads][tiles][row]
  int64_t batch;
  int64_t heads;
  int64_t tiles;
  int64_t row;

  TFB_HOST_DEVICE float Of(int64_t h, int64_t c) const {
    float sum = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const float* of_head = parts + (b * heads + h) * tiles * row + c;
      for (int64_t t = 0; t < tiles; ++t) sum += of_head[t * row];
    }
    return sum;
  }
};

// to[n] += the sum.
struct AddSumOfTiles {
  SumOfTiles sum;
  float* to;  // [heads][row]

  TFB_HOST_DEVICE void operator()(int64_t n) const { to[n] += sum.Of(n / sum.row, n % sum.row); }
};

// Adds the sums of label keys: element n = (h 2 + label) (dim + 1) + c.
struct AddLabelSums {
  SumOfTiles sum;  // rows of 2 (dim + 1)
  int64_t dim;
  float* keys;    // [heads][2][dim], or null
  float* biases;  // [heads][2], or null

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t of_label = n / (dim + 1), c = n % (dim + 1);
    const float value = sum.Of(of_label / 2, of_label % 2 * (dim + 1) + c);
    if (c == dim) {
      if (biases != nullptr) biases[of_label] += value;
    } else if (keys != nullptr) {
      keys[of_label * dim + c] += value;
    }
  }
};

// The sums of an offset j - i from the two blocks that have its pairs.
struct SumOfOffset {
  const float* parts;  // [heads][blocks][kBlockOffsets][row]
  int64_t blocks;
  int64_t query_tiles;
  int64_t row;

  TFB_HOST_DEVICE float Of(int64_t h, int64_t offset, int64_t c) const {
    const int64_t far = offset + 63 + 64 * query_tiles;
    if (far < 0) return 0;
    const int64_t block = far / 64 - 1, n = far % 64;
    float sum = 0;
    if (block - 1 >= 0 && block - 1 < blocks && n + 64 < kBlockOffsets - 1) {
      sum += parts[((h * blocks + block - 1) * kBlockOffsets + n + 64) * row + c];
    }
    if (block >= 0 && block < blocks)
      sum += parts[((h * blocks + block) * kBlockOffsets + n) * row + c];
    return sum;
  }
};

// Adds the sums of a table of distances: element n is entry `first` + n of the table of a head, of `count`.
struct AddTableSums {
  SumOfOffset sum;
  int64_t query_position;
  int64_t first;
  int64_t count;
  int64_t zero;
  int64_t table_row;
  float* to;  // [heads][table_row]

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t h = n / count, entry = first + n % count;
    to[h * table_row + entry] += sum.Of(h, entry - zero + query_position, 0);
  }
};

// Adds the sums of relative keys: element n = (h offsets + o - low) dim + c. Each is scale sum ds (q_i + w).
struct AddRelativeKeySums {
  SumOfOffset products;   // rows of dim
  SumOfOffset gradients;  // of ds
  int64_t query_position;
  const float* position_bias;  // w [heads][dim], or null
  float scale;
  int64_t low;
  int64_t offsets;
  int64_t dim;
  int64_t to_row;
  float* to;  // [heads][offsets][to_row]

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t c = n % dim, row = n / dim, h = row / offsets,
                  offset = low + row % offsets + query_position;
    float sum = products.Of(h, offset, c);
    if (position_bias != nullptr)
      sum += scale * gradients.Of(h, offset, 0) * position_bias[h * dim + c];
    to[row * to_row + c] += sum;
  }
};

// The sums (core/cuda/run_sums.h) over offsets of ds times the relative keys, those of a head in a row,
// which are added, with the sums of label keys, to the gradient of the position bias.
struct AddPositionBiasSums {
  using Number = float;
  static constexpr int kSums = 1;
  SumOfOffset gradients;  // of ds, where there are relative keys
  RelativeKeyRows keys;   // of f32
  int64_t first_offset;   // j - i of the first term
  int64_t first_key;      // its row of a head's keys
  float scale;
  SumOfTiles labels;     // rows of 2 (dim + 1), where there are label keys
  LabelKeys label_keys;  // or null
  int64_t dim;
  float* to;  // [heads][dim]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t h, int64_t begin, int64_t end, const Piece& piece,
                                float (&sums)[kSums][Piece::kMost]) const {
    const int64_t first_row = h % keys.heads * (keys.high - keys.low + 1) + first_key;
    for (int64_t n = begin; n < end; ++n) {
      const float ds = gradients.Of(h, first_offset + n, 0);
      const float* key =
          static_cast<const float*>(keys.rows) + (first_row + n) * keys.row + piece.first();
      for (int i = 0; i < piece.count(); ++i) sums[0][i] += ds * key[i];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t h, const Piece& piece,
                            const float (&sums)[kSums][Piece::kMost]) const {
    for (int i = 0; i < piece.count(); ++i) {
      const int64_t c = piece.first() + i;
      float sum = scale * sums[0][i];
      for (int64_t label = 0; label_keys.keys != nullptr && label < 2; ++label) {
        const float* key = label_keys.keys + (h % label_keys.heads * 2 + label) * dim;
        sum += labels.Of(h, label * (dim + 1) + dim) * key[c];  // which has the scale
      }
      to[h * dim + c] += sum;
    }
  }
};

// Rows of places, and the tokens that they are added to.
struct AddByTokenArguments {
  const float* rows;  // [batch][heads][places][channels]
  int64_t batch;
  int64_t heads;
  int64_t places;
  int64_t channels;
  TokenOrder order;
  DeviceView to;   // f32 [batch, heads, tokens, channels]
  int64_t tokens;  // of `to`
};

struct FlashSumKernels {
  // Adds each row to the token that the order names, those of a token in the order of places. A number
  // below 0 names no token. Enqueues on the stream and returns null, or a text that says why it could
  // not.
  const char* (*add_by_token)(const AddByTokenArguments& arguments, void* stream);
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_BACKWARD_SUMS_H_
