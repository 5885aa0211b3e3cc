// Steps of the backward pass of a compression: those of windows, and of full convolutions on CUDA
// devices, where engines have matrix products of their own. Pointers are to the device's memory.
// Each element of a gradient has one owner, which adds in a fixed order.
#ifndef TFB_ATTENTION_LINFORMER_COMPRESSION_FUNCTORS_H_
#define TFB_ATTENTION_LINFORMER_COMPRESSION_FUNCTORS_H_

#include <stdint.h>

#include "attention/linformer/linformer_cuda.h"
#include "core/cuda/functor.h"
#include "core/cuda/run_sums.h"

namespace tfb::linformer {

// Token j of head h of batch row b, of row (b * heads + h) * tokens + j.
struct TokenPlace {
  int64_t b;
  int64_t h;
  int64_t token;
};
TFB_HOST_DEVICE TokenPlace PlaceOf(const CompressionArguments& a, int64_t row) {
  return {row / a.tokens / a.heads, row / a.tokens % a.heads, row % a.tokens};
}

// Adds x[0], ..., x[count - 1] to the piece's numbers of a view.
template <class Piece>
TFB_HOST_DEVICE void AddTo(const Piece& piece, const float (&x)[Piece::kMost],
                           const DeviceView& view, int64_t offset, int64_t stride) {
  float sum[Piece::kMost];
  piece.Load(view, offset, stride, sum);
  for (int i = 0; i < piece.count(); ++i) sum[i] += x[i];
  piece.Store(sum, view, offset, stride);
}

// Loads channels of x_j, or zeros where it is no token.
template <class Piece>
TFB_HOST_DEVICE void LoadToken(const CompressionArguments& a, const Piece& piece, int64_t b,
                               int64_t h, int64_t token, float (&x)[Piece::kMost]) {
  if (IsToken(a, b, token)) {
    piece.Load(a.x, Offset(a.x, b, h, token), a.x.strides[3], x);
  } else {
    for (int i = 0; i < piece.count(); ++i) x[i] = 0;
  }
}

// For each token, in a window's mean or depthwise convolution: dx_j = dx'_s / count, or c_t dx'_s.
struct GradientOfWindowRows {
  CompressionGradientArguments a;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const CompressionArguments& f = a.forward;
    const TokenPlace p = PlaceOf(f, row);
    if (!IsToken(f, p.b, p.token)) return;
    const int64_t slot = p.token / f.window, begin = slot * f.window;
    const int64_t end = begin + f.window < f.tokens ? begin + f.window : f.tokens;
    float x[Piece::kMost];
    piece.Load(a.slots, Offset(a.slots, p.b, p.h, slot), a.slots.strides[3], x);
    if (f.tables == nullptr) {
      for (int i = 0; i < piece.count(); ++i) x[i] /= static_cast<float>(end - begin);
    } else {
      const float* kernel = TableOf(f, p.b, p.h) + (p.token - begin) * f.row + piece.first();
      for (int i = 0; i < piece.count(); ++i) x[i] = kernel[i] * x[i];
    }
    AddTo(piece, x, a.x_gradient, Offset(a.x_gradient, p.b, p.h, p.token), a.x_gradient.strides[3]);
  }
};

// For each slot, row (b * heads + h) * slots + s: gives a channel's gradient to the first of its
// window's largest rows, or to a NaN, as in a Run; to nobody where that is the 0 of padding.
struct GradientOfMaximum {
  CompressionGradientArguments a;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const CompressionArguments& f = a.forward;
    const int64_t slot = row % f.slot_count, head = row / f.slot_count;
    const int64_t b = head / f.heads, h = head % f.heads, begin = slot * f.window;
    const int64_t end = begin + f.window < f.tokens ? begin + f.window : f.tokens;
    float largest[Piece::kMost], x[Piece::kMost];
    int64_t place[Piece::kMost];
    LoadToken(f, piece, b, h, begin, largest);
    for (int i = 0; i < piece.count(); ++i) place[i] = begin;
    for (int64_t token = begin + 1; token < end; ++token) {
      LoadToken(f, piece, b, h, token, x);
      for (int i = 0; i < piece.count(); ++i) {
        const bool is_largest = x[i] > largest[i] || x[i] != x[i];
        largest[i] = is_largest ? x[i] : largest[i];
        place[i] = is_largest ? token : place[i];
      }
    }
    piece.Load(a.slots, Offset(a.slots, b, h, slot), a.slots.strides[3], x);
    float* to = static_cast<float*>(a.x_gradient.data);
    for (int i = 0; i < piece.count(); ++i) {
      if (!IsToken(f, b, place[i])) continue;
      to[Offset(a.x_gradient, b, h, place[i], piece.first() + i)] += x[i];
    }
  }
};

// For each row of a depthwise convolution's kernel, row table * window + t, the sums
// (core/cuda/run_sums.h) over the slots of all heads, of which those that share the kernel count:
// dc_t = sum_s dx'_s x_(s w + t).
struct GradientOfDepthwise {
  using Number = double;
  static constexpr int kSums = 1;
  CompressionGradientArguments a;

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t row, int64_t begin, int64_t end, const Piece& piece,
                                double (&sums)[kSums][Piece::kMost]) const {
    const CompressionArguments& f = a.forward;
    const int64_t table = row / f.window, t = row % f.window;
    float x[Piece::kMost], slot_gradient[Piece::kMost];
    TermIndex of_slot(begin, f.slot_count), of_head(of_slot.outer, f.heads);
    for (int64_t n = begin; n < end; ++n, of_head.Next(of_slot.Next())) {
      const int64_t b = of_head.outer, h = of_head.inner, slot = of_slot.inner;
      if (a.TableIndex(b, h) != table || !IsToken(f, b, slot * f.window + t)) continue;
      LoadToken(f, piece, b, h, slot * f.window + t, x);
      piece.Load(a.slots, Offset(a.slots, b, h, slot), a.slots.strides[3], slot_gradient);
      for (int i = 0; i < piece.count(); ++i) {
        sums[0][i] += static_cast<double>(slot_gradient[i]) * static_cast<double>(x[i]);
      }
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t row, const Piece& piece,
                            const double (&sums)[kSums][Piece::kMost]) const {
    const DeviceView& to = a.tables_gradient;
    const int64_t table = row / a.forward.window, t = row % a.forward.window;
    float x[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) x[i] = static_cast<float>(sums[0][i]);
    a.StoreTable(piece, x, table * to.strides[0] + t * to.strides[2], to.strides[1]);
  }
};

// For each token, of a convolution: dx_j = C_t^T dx'_s. The columns are the channels of x.
struct GradientOfConvolvedRows {
  CompressionGradientArguments a;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const CompressionArguments& f = a.forward;
    const TokenPlace p = PlaceOf(f, row);
    if (!IsToken(f, p.b, p.token)) return;
    const int64_t slot = p.token / f.window, t = p.token % f.window;
    const float* slot_gradient =
        static_cast<const float*>(a.slots.data) + Offset(a.slots, p.b, p.h, slot);
    float sum[Piece::kMost] = {};
    for (int i = 0; i < piece.count(); ++i) {
      const float* kernel =
          TableOf(f, p.b, p.h) + (t * f.channels + piece.first() + i) * f.row;  // [out]
      for (int64_t out = 0; out < f.channels; ++out) {
        sum[i] += kernel[out] * slot_gradient[out * a.slots.strides[3]];
      }
    }
    AddTo(piece, sum, a.x_gradient, Offset(a.x_gradient, p.b, p.h, p.token),
          a.x_gradient.strides[3]);
  }
};

// For each row of a convolution's matrix t, row (table * window + t) * channels + in:
// dC_t = sum_s dx'_s x_(s w + t)^T, over the slots of the heads that share it. The columns are the
// channels of slots.
struct GradientOfConvolution {
  CompressionGradientArguments a;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const CompressionArguments& f = a.forward;
    const int64_t in = row % f.channels, t = row / f.channels % f.window,
                  table = row / f.channels / f.window;
    float sum[Piece::kMost] = {}, slot_gradient[Piece::kMost], x[Piece::kMost];
    for (int64_t head = 0; head < f.batch * f.heads; ++head) {
      const int64_t b = head / f.heads, h = head % f.heads;
      if (a.TableIndex(b, h) != table) continue;
      for (int64_t slot = 0; slot < f.slot_count; ++slot) {
        const int64_t token = slot * f.window + t;
        if (!IsToken(f, b, token)) continue;
        piece.Load(f.x, Offset(f.x, b, h, token, in), 0, x);  // the same for all
        piece.Load(a.slots, Offset(a.slots, b, h, slot), a.slots.strides[3], slot_gradient);
        for (int i = 0; i < piece.count(); ++i) sum[i] += slot_gradient[i] * x[i];
      }
    }
    const DeviceView& to = a.tables_gradient;
    a.StoreTable(piece, sum, Offset(to, table, 0, in, t), to.strides[1]);
  }
};

}  // namespace tfb::linformer

#endif  // TFB_ATTENTION_LINFORMER_COMPRESSION_FUNCTORS_H_
