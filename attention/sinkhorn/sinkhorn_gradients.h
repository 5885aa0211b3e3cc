// Steps of the backward pass of sparse Sinkhorn attention that are sums, for every device or for
// CUDA alone: see sinkhorn_backward.h for the formulas. Pointers are to the device's memory. Each
// element of a gradient has one owner, which adds in a fixed order.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_GRADIENTS_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_GRADIENTS_H_

#include <stdint.h>

#include "attention/sinkhorn/sinkhorn_functors.h"
#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/cuda/functor.h"

namespace tfb::sinkhorn {

// ---- On every device ----

// Adds the support of a matrix [batch * heads][blocks][columns] to a view f32 of that shape. Row
// (b * heads + h) * blocks + u.
struct AddMatrix {
  SinkhornSizes sizes;
  const double* matrix;
  DeviceView to;  // [batch, heads, blocks, columns]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t u = row % sizes.blocks, head = row / sizes.blocks, support = sizes.Support(u);
    float* first =
        static_cast<float*>(to.data) + Offset(to, head / sizes.heads, head % sizes.heads, u);
    for (int64_t t = piece.first(); t < (piece.end() < support ? piece.end() : support); ++t) {
      first[t * to.strides[3]] += static_cast<float>(matrix[row * sizes.Columns() + t]);
    }
  }
};

// Adds up the parts of a null row's gradient, of head h, over sequences and then rows of a block.
struct AddNullRows {
  SinkhornSizes sizes;
  const float* parts;  // [batch][heads][block][channels]
  int64_t channels;
  double* to;  // [heads][channels]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t h, const Piece& piece) const {
    double* sums = to + h * channels;
    for (int64_t b = 0; b < sizes.batch; ++b) {
      const float* from = parts + (b * sizes.heads + h) * sizes.block * channels;
      for (int64_t r = 0; r < sizes.block; ++r) {
        for (int64_t c = piece.first(); c < piece.end(); ++c) sums[c] += from[r * channels + c];
      }
    }
  }
};

// Adds to a layer's weights, or to its bias, the sums over the blocks of all sequences:
//
//   dW_cn = sum x_c dy_n        row h * depth + c, with x the layer's input and dy its gradient
//   db_n  = sum dy_n            row h, where there is no input
struct AddLayerGradients {
  SinkhornSizes sizes;
  const double* inputs;     // [batch * heads][blocks][depth], or null
  int64_t depth;            // 1 where there is no input
  const double* gradients;  // [batch * heads][blocks][outputs]
  int64_t outputs;
  double* to;  // [heads][depth][outputs]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t h = row / depth, c = row % depth;
    double* sums = to + row * outputs;
    for (int64_t b = 0; b < sizes.batch; ++b) {
      for (int64_t u = 0; u < sizes.blocks; ++u) {
        const int64_t n = (b * sizes.heads + h) * sizes.blocks + u;
        const double factor = inputs == nullptr ? 1.0 : inputs[n * depth + c];
        const double* from = gradients + n * outputs;
        for (int64_t i = piece.first(); i < piece.end(); ++i) sums[i] += factor * from[i];
      }
    }
  }
};

// Adds the gradients of blocks' sums to the tokens that they are of. Row b * tokens + j, for some of
// the channels of pooled rows. A view whose heads are the same memory receives them one by one.
struct AddPooledGradients {
  SinkhornSizes sizes;
  SinkhornMask key_mask;
  const double* pooled;  // [batch * heads][blocks + 1][width], where causal of the blocks from u on
  int64_t first;         // channel among `width`
  int64_t heads_summed;
  DeviceView to;  // f32 [batch, heads heads_summed, tokens, channels]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / sizes.tokens, j = row % sizes.tokens, t = j / sizes.block;
    if (!IsToken(sizes, key_mask, b, j)) return;
    // Where causal, the sum of block t has its first token alone.
    const int64_t u = sizes.causal && j > t * sizes.block ? t + 1 : t;
    for (int64_t h = 0; h < sizes.heads; ++h) {
      const double* from =
          pooled + ((b * sizes.heads + h) * (sizes.blocks + 1) + u) * sizes.width + first;
      for (int64_t g = 0; g < heads_summed; ++g) {
        const int64_t offset = Offset(to, b, h * heads_summed + g, j);
        float sums[Piece::kMost];
        piece.Load(to, offset, to.strides[3], sums);
        for (int i = 0; i < piece.count(); ++i) {
          sums[i] += static_cast<float>(from[piece.first() + i]);
        }
        piece.Store(sums, to, offset, to.strides[3]);
      }
    }
  }
};

// ---- On CUDA alone, where these are threads' own loops ----

// Adds sum_u S_ut of row r of the sorted blocks' gradients to row r of block t: row
// ((b * heads + h) * columns + t) * block + r. Those of the null block are written as parts.
struct AddSortedGradients {
  SinkhornSizes sizes;
  SinkhornMask key_mask;
  SortMatrix sort;
  DeviceView sorted;    // f32 [batch, heads, mixed_blocks block, channels]
  DeviceView gradient;  // f32 [batch, heads, tokens, channels], or null
  float* null_rows;     // [batch * heads][block][channels], where there is a null block
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t r = row % sizes.block, t = row / sizes.block % sizes.Columns(),
                  head = row / sizes.block / sizes.Columns();
    const int64_t b = head / sizes.heads, h = head % sizes.heads;
    const bool is_null = t < sizes.null_blocks;
    const int64_t j = (t - sizes.null_blocks) * sizes.block + r;
    if (!is_null && (gradient.data == nullptr || !IsToken(sizes, key_mask, b, j))) return;
    float sum[Piece::kMost] = {}, x[Piece::kMost];
    for (int64_t u = 0; u < sizes.mixed_blocks; ++u) {
      if (t >= sizes.Support(u)) continue;
      const float weight = static_cast<float>(Entry(sort, b, h, u, t));
      piece.Load(sorted, Offset(sorted, b, h, u * sizes.block + r), sorted.strides[3], x);
      for (int i = 0; i < piece.count(); ++i) sum[i] += weight * x[i];
    }
    if (is_null) {
      float* to = null_rows + (head * sizes.block + r) * channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) to[i] = sum[i];
      return;
    }
    const int64_t offset = Offset(gradient, b, h, j);
    piece.Load(gradient, offset, gradient.strides[3], x);
    for (int i = 0; i < piece.count(); ++i) x[i] += sum[i];
    piece.Store(x, gradient, offset, gradient.strides[3]);
  }
};

// Takes the gradient of R + g to that of the last layer's result. Element n of the matrix.
struct ThroughScores {
  SinkhornSizes sizes;
  const double* results;  // [batch * heads][blocks][columns]: of the last layer
  double* matrix;         // of that shape, 0 outside of the support

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    if (n % sizes.Columns() >= sizes.Support(n / sizes.Columns() % sizes.blocks)) return;
    if (!(results[n] > 0)) matrix[n] = 0;
    if (sizes.scores != SortScores::kLogRelu) return;
    matrix[n] /= (results[n] > 0 ? results[n] : 0) + 1e-6;
  }
};

// Takes gradients through the weights of a layer: dx_c = sum_n W_cn dy_n, and 0 where a unit's
// output is not above 0. Row (b * heads + h) * blocks + u.
struct ThroughLayer {
  SinkhornSizes sizes;
  const double* weights;    // [heads][depth][outputs]
  const double* gradients;  // [batch * heads][blocks][outputs]
  const double* units;      // [batch * heads][blocks][depth]: outputs of a ReLU, or null
  int64_t depth;
  int64_t outputs;
  bool is_last;  // the outputs are columns of the matrix, of which those in the support count
  double* to;    // [batch * heads][to_rows][depth]
  int64_t to_rows;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t head = row / sizes.blocks, u = row % sizes.blocks;
    const int64_t end = is_last ? sizes.Support(u) : outputs;
    for (int64_t c = piece.first(); c < piece.end(); ++c) {
      const double* of_input = weights + (head % sizes.heads * depth + c) * outputs;
      double sum = 0;
      for (int64_t n = 0; n < end; ++n) sum += of_input[n] * gradients[row * outputs + n];
      if (units != nullptr && !(units[row * depth + c] > 0)) sum = 0;
      to[(head * to_rows + u) * depth + c] = sum;
    }
  }
};

// Turns the gradients of prefix sums into those of what they add up: of all blocks from u on. Row
// b * heads + h.
struct SumFromBlocks {
  SinkhornSizes sizes;
  double* pooled;  // [batch * heads][blocks + 1][width], the last row of which is made 0

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t head, const Piece& piece) const {
    double* of_head = pooled + head * (sizes.blocks + 1) * sizes.width;
    for (int64_t c = piece.first(); c < piece.end(); ++c) {
      double sum = 0;
      of_head[sizes.blocks * sizes.width + c] = 0;
      for (int64_t u = sizes.blocks - 1; sizes.causal && u >= 0; --u) {
        sum += of_head[u * sizes.width + c];
        of_head[u * sizes.width + c] = sum;
      }
    }
  }
};

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_GRADIENTS_H_
