// The CUDA kernel of adaptive_span as C++ sees it. Pointers are to device memory.
#ifndef TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_CUDA_H_
#define TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_CUDA_H_

#include <stdint.h>

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
#include "core/cuda/kernel_table.h"
#include "core/cuda/run_sums.h"

namespace tfb::adaptive_span {

// Computes z of every token and head: max_span sigmoid(weight_h . x_i + bias_h).
struct GateArguments {
  DeviceView x;         // [batch, tokens, channels]
  const float* weight;  // [heads, channels]
  const float* bias;    // [heads]
  float* spans;         // [batch, heads, tokens]
  float* slopes;        // likewise: dz/da, a being the argument of the sigmoid
  int64_t batch;
  int64_t tokens;
  int64_t channels;
  int64_t heads;
  float max_span;
};

// The gradients da of the arguments of the sigmoids, from those of the spans.
struct GateGradients {
  const float* of_spans;  // [batch, heads, tokens]
  const float* slopes;    // likewise
  int64_t batch;
  int64_t heads;
  int64_t tokens;

  TFB_HOST_DEVICE double Of(int64_t b, int64_t h, int64_t i) const {
    const int64_t n = (b * heads + h) * tokens + i;
    return static_cast<double>(of_spans[n]) * slopes[n];
  }
};

// The sums (core/cuda/run_sums.h) of da x over the tokens of all batch rows, for each head a row, which
// are added to the gradient of its weight.
struct AddToWeight {
  using Number = double;
  static constexpr int kSums = 1;
  GateGradients gradients;
  DeviceView x;  // [batch, tokens, channels]
  int64_t channels;
  double* weight;  // [heads][channels]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t h, int64_t begin, int64_t end, const Piece& piece,
                                double (&sums)[kSums][Piece::kMost]) const {
    float row[Piece::kMost];
    TermIndex token(begin, gradients.tokens);
    for (int64_t n = begin; n < end; ++n, token.Next()) {
      const double da = gradients.Of(token.outer, h, token.inner);
      piece.Load(x, Offset(x, token.outer, token.inner, 0), x.strides[2], row);
      for (int c = 0; c < piece.count(); ++c) sums[0][c] += da * row[c];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t h, const Piece& piece,
                            const double (&sums)[kSums][Piece::kMost]) const {
    for (int c = 0; c < piece.count(); ++c) weight[h * channels + piece.first() + c] += sums[0][c];
  }
};

// The sums of da, for each head a row of one column, which are added to the gradient of its bias.
struct AddToBias {
  using Number = double;
  static constexpr int kSums = 1;
  GateGradients gradients;
  double* bias;  // [heads]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t h, int64_t begin, int64_t end, const Piece&,
                                double (&sums)[kSums][Piece::kMost]) const {
    TermIndex token(begin, gradients.tokens);
    for (int64_t n = begin; n < end; ++n, token.Next()) {
      sums[0][0] += gradients.Of(token.outer, h, token.inner);
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t h, const Piece&,
                            const double (&sums)[kSums][Piece::kMost]) const {
    bias[h] += sums[0][0];
  }
};

// Adds sum da w over the heads to the gradient of the hidden state of token `row`, counted over the batch.
struct AddToHidden {
  GateGradients gradients;
  const float* weight;  // [heads][channels]
  int64_t channels;
  DeviceView x;  // the gradient, f32 [batch, tokens, channels]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / gradients.tokens, i = row % gradients.tokens;
    float sums[Piece::kMost];
    piece.Load(x, Offset(x, b, i, 0), x.strides[2], sums);
    for (int64_t h = 0; h < gradients.heads; ++h) {
      const auto da = static_cast<float>(gradients.Of(b, h, i));
      const float* from = weight + h * channels + piece.first();
      for (int c = 0; c < piece.count(); ++c) sums[c] += da * from[c];
    }
    piece.Store(sums, x, Offset(x, b, i, 0), x.strides[2]);
  }
};

struct AdaptiveSpanKernels {
  // Enqueues on the stream and returns null, or a text that says why it could not.
  const char* (*gate)(const GateArguments& arguments, void* stream);
};

}  // namespace tfb::adaptive_span

#endif  // TFB_ADAPTIVE_ADAPTIVE_SPAN_ADAPTIVE_SPAN_CUDA_H_
