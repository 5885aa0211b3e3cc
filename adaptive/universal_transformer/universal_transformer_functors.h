// Steps of universal_transformer's backward pass that all devices run; names are those of
// steps_backward.h. Pointers are to the device's memory, of contiguous rows; a row is a token's, batch
// after batch.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_FUNCTORS_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_FUNCTORS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/cuda/run_sums.h"

namespace tfb::universal_transformer {

// ---- What a Run keeps ----

// The steps that each token took, 0 for padding, and the last one in which it was computed.
struct KeepSteps {
  const int32_t* steps;  // N_t
  int32_t* stop;
  int32_t* computed;
  int32_t recomputed;  // the last step, where halted tokens take all; else 0

  TFB_HOST_DEVICE void operator()(int64_t r) const {
    stop[r] = steps[r];
    computed[r] = steps[r] > 0 && recomputed > 0 ? recomputed : steps[r];
  }
};

// Copies the rows of tokens that are not padding.
struct KeepRowsOfTokens {
  const int32_t* stop;
  const float* from;  // [rows, channels]
  float* to;
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t r, const Piece& piece) const {
    if (stop[r] > 0) piece.Copy(from + r * channels, to + r * channels);
  }
};

// ---- Halting ----

// Computes two numbers of token r and step n = step + 1, for n <= N_t: the logit z^n = w . u + b of the
// row u that the halting probability is of, and q^n = g . S^n; they are 0 for other steps. Sums are
// float64.
struct HaltingProducts {
  const int32_t* stop;
  const float* halting_rows;  // [rows, channels]
  const float* weight;        // w [channels]
  const float* bias;
  const float* states;  // S^n [rows, channels]
  const float* of_out;  // g, likewise
  float* logits;        // [rows] of this step
  float* products;      // [rows]
  int64_t channels;
  int64_t step;

  TFB_HOST_DEVICE void operator()(int64_t r) const {
    double z = 0, q = 0;
    for (int64_t c = r * channels; step < stop[r] && c < (r + 1) * channels; ++c) {
      z += static_cast<double>(weight[c - r * channels]) * static_cast<double>(halting_rows[c]);
      q += static_cast<double>(of_out[c]) * static_cast<double>(states[c]);
    }
    logits[r] = step < stop[r] ? static_cast<float>(z) + bias[0] : 0;
    products[r] = static_cast<float>(q);
  }
};

enum class OutputKind : unsigned char { kAccumulated, kBasic, kFrozen };

// Makes dz^n of z^n and c^n of q^n, for all steps of token r.
struct HaltingGradients {
  const int32_t* stop;
  const uint8_t* takes_remainder;
  const float* of_ponder;  // e [rows]
  float* logits;           // [steps][rows]: z^n, which become dz^n
  float* products;         // [steps][rows]: q^n, which become c^n
  int64_t rows;
  OutputKind output;

  TFB_HOST_DEVICE float Probability(int64_t n, int64_t r) const {
    return 1 / (1 + expf(-logits[n * rows + r]));
  }
  TFB_HOST_DEVICE void operator()(int64_t r) const {
    const int64_t count = stop[r];
    if (count == 0) return;
    const bool takes = takes_remainder[r] != 0;
    float before = 0, mixed = 0;  // p^1 + .. + p^(n - 1), g . Y^(n-1)
    for (int64_t n = 0; n + 1 < count; ++n) {
      float& q = products[n * rows + r];
      if (output == OutputKind::kBasic) q -= mixed;
      mixed += Probability(n, r) * q;
      before += Probability(n, r);
    }
    if (output == OutputKind::kBasic) products[(count - 1) * rows + r] -= mixed;
    float kept = 1, of_remainder = 0;
    for (int64_t n = count - 1; n >= 0; --n) {
      const float own_p = Probability(n, r);
      const float own_w = n + 1 == count && takes ? 1 - before : own_p;
      float of_w = products[n * rows + r], coefficient = own_w;
      if (output == OutputKind::kBasic) {
        of_w *= kept;
        coefficient *= kept;
        kept *= 1 - own_w;
      } else if (output == OutputKind::kFrozen) {
        of_w = 0;
        coefficient = n + 1 == count ? 1 : 0;
      }
      float of_p = of_w - of_remainder;
      if (n + 1 == count && takes) {
        of_remainder = of_w + of_ponder[r];
        of_p = 0;
      }
      logits[n * rows + r] = of_p * own_p * (1 - own_p);
      products[n * rows + r] = coefficient;
    }
  }
};

// c^N = 1 of a network that never halts.
struct LastStepCounts {
  const int32_t* stop;
  float* coefficients;  // [rows] of the last step

  TFB_HOST_DEVICE void operator()(int64_t r) const { coefficients[r] = stop[r] > 0 ? 1 : 0; }
};

// ---- A step ----

// The tokens of step n = step + 1. On the CPU those that took it are at places one behind the other; on
// CUDA all tokens are, at the places of their rows, and the gradients of others are 0.
struct StepTokens {
  const int32_t* computed;      // the last step in which each token was computed, 0 for padding
  const int32_t* row_of_place;  // CPU; else null
  const int32_t* place_of_row;  // likewise
  int64_t step;

  TFB_HOST_DEVICE bool IsToken(int64_t r) const { return computed[r] > 0; }
  TFB_HOST_DEVICE bool Takes(int64_t r) const { return computed[r] > step; }
  TFB_HOST_DEVICE bool HasPlace(int64_t r) const { return place_of_row == nullptr || Takes(r); }
  TFB_HOST_DEVICE int64_t RowOf(int64_t place) const {
    return row_of_place == nullptr ? place : row_of_place[place];
  }
  TFB_HOST_DEVICE int64_t PlaceOf(int64_t r) const {
    return place_of_row == nullptr ? r : place_of_row[r];
  }
};

// Writes 1 for the rows of tokens that took the step, and 0 for the others.
struct TellsTaking {
  StepTokens of;
  uint8_t* takes;  // [rows]

  TFB_HOST_DEVICE void operator()(int64_t r) const { takes[r] = of.Takes(r) ? 1 : 0; }
};

// U = H + PE + T, 0 for padding.
struct ReadAgain {
  StepTokens of;
  DeviceView x;            // [batch, tokens, channels]
  const float* states;     // H [rows, channels]; null: x
  const float* positions;  // [tokens, channels]
  const float* time;       // [channels]
  float* read;             // by row
  float* placed;           // by place
  int64_t tokens;
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t r, const Piece& piece) const {
    float u[Piece::kMost];
    if (!of.IsToken(r)) {
      for (int i = 0; i < piece.count(); ++i) u[i] = 0;
    } else if (states == nullptr) {
      piece.Load(x, Offset(x, r / tokens, r % tokens, 0), x.strides[2], u);
    } else {
      const float* const state = states + r * channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) u[i] = state[i];
    }
    const float* const position = positions + r % tokens * channels + piece.first();
    for (int i = 0; i < piece.count() && of.IsToken(r); ++i) {
      u[i] = u[i] + position[i] + time[piece.first() + i];
    }
    float* const by_row = read + r * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) by_row[i] = u[i];
    if (!of.HasPlace(r)) return;
    float* const by_place = placed + of.PlaceOf(r) * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) by_place[i] = u[i];
  }
};

// dS = dH + c g + dz w, the last term where there is a w.
struct MadeGradient {
  StepTokens of;
  const float* of_states;     // dH by row
  const float* of_out;        // g by row
  const float* coefficients;  // c by row
  const float* of_logits;     // dz by row
  const float* weight;        // w [channels], or null
  float* gradient;            // by place
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    const int64_t r = of.RowOf(place), first = r * channels + piece.first();
    float* const ds = gradient + place * channels + piece.first();
    if (!of.Takes(r)) {
      for (int i = 0; i < piece.count(); ++i) ds[i] = 0;
      return;
    }
    for (int i = 0; i < piece.count(); ++i) {
      ds[i] = of_states[first + i] + coefficients[r] * of_out[first + i];
    }
    for (int i = 0; i < piece.count() && weight != nullptr; ++i) {
      ds[i] += of_logits[r] * weight[piece.first() + i];
    }
  }
};

// The gradient through a ReLU, of rows by place.
struct ReluGradient {
  const float* activations;
  float* gradient;
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    const float* const y = activations + place * channels + piece.first();
    float* const dy = gradient + place * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) dy[i] = y[i] > 0 ? dy[i] : 0;
  }
};

// dH^(n-1): of the tokens that took the step dU, and for all what keys and values give to U.
struct InputGradient {
  StepTokens of;
  const float* of_placed;  // dU by place
  const float* of_logits;  // dz by row
  const float* weight;     // w [channels], or null
  float* of_read;          // by row: what keys and values give, which becomes all of dU
  float* of_states;        // by row: dH^n, which becomes dH^(n-1)
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t r, const Piece& piece) const {
    float* const keys = of_read + r * channels + piece.first();
    float* const state = of_states + r * channels + piece.first();
    if (!of.Takes(r)) {
      for (int i = 0; i < piece.count(); ++i) state[i] += keys[i];
      return;
    }
    const float* const du = of_placed + of.PlaceOf(r) * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) {
      keys[i] += du[i] + (weight != nullptr ? of_logits[r] * weight[piece.first() + i] : 0.0f);
      state[i] = keys[i];
    }
  }
};

// ---- Convolutions over tokens ----

// y_t = sum_j k_j z_(t + j - before) over the tokens of a sequence that are not padding, where z is of
// the step for tokens that took it, and what they showed before for those that had halted.
struct Convolution {
  StepTokens of;
  const float* kernel;  // k [size, channels]
  const float* rows;    // z by place
  const float* shown;   // by row
  int64_t tokens;
  int64_t channels;
  int64_t size;
  int64_t before;

  // Tells whether there is a token at a distance from the row, in its sequence.
  TFB_HOST_DEVICE bool HasToken(int64_t r, int64_t distance) const {
    const int64_t t = r % tokens + distance;
    return t >= 0 && t < tokens && of.IsToken(r + distance);
  }
  TFB_HOST_DEVICE const float* Row(int64_t r) const {
    return of.Takes(r) ? rows + of.PlaceOf(r) * channels : shown + r * channels;
  }
};

struct ConvolveAgain {
  Convolution in;
  float* y;  // by place

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    const int64_t r = in.of.RowOf(place);
    float sum[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) sum[i] = 0;
    for (int64_t j = 0; j < in.size && in.of.Takes(r); ++j) {
      if (!in.HasToken(r, j - in.before)) continue;
      const float* const z = in.Row(r + j - in.before) + piece.first();
      const float* const factor = in.kernel + j * in.channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) sum[i] += factor[i] * z[i];
    }
    float* const to = y + place * in.channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) to[i] = sum[i];
  }
};

// dz_t += sum_j k_j dy_(t - j + before), in the order of the tokens of y.
struct ConvolutionRowsGradient {
  Convolution in;
  const float* of_y;  // by place
  float* of_shown;    // by row

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t r, const Piece& piece) const {
    if (!in.of.IsToken(r)) return;
    float* const dz = of_shown + r * in.channels + piece.first();
    float sum[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) sum[i] = dz[i];
    for (int64_t j = in.size - 1; j >= 0; --j) {
      const int64_t distance = in.before - j;
      if (!in.HasToken(r, distance) || !in.of.Takes(r + distance)) continue;
      const float* const dy = of_y + in.of.PlaceOf(r + distance) * in.channels + piece.first();
      const float* const factor = in.kernel + j * in.channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) sum[i] += factor[i] * dy[i];
    }
    for (int i = 0; i < piece.count(); ++i) dz[i] = sum[i];
  }
};

// The sums (core/cuda/run_sums.h) over the places of y of dy_t z_(t + j - before), of row j: dk_j.
struct ConvolutionKernelGradient {
  using Number = float;
  static constexpr int kSums = 1;
  Convolution in;
  const float* of_y;    // by place
  DeviceView gradient;  // f32 [size, channels]

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t j, int64_t begin, int64_t end, const Piece& piece,
                                float (&sums)[kSums][Piece::kMost]) const {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t r = in.of.RowOf(place);
      if (!in.of.Takes(r) || !in.HasToken(r, j - in.before)) continue;
      const float* const z = in.Row(r + j - in.before) + piece.first();
      const float* const dy = of_y + place * in.channels + piece.first();
      for (int i = 0; i < piece.count(); ++i) sums[0][i] += dy[i] * z[i];
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t j, const Piece& piece,
                            const float (&sums)[kSums][Piece::kMost]) const {
    float sum[Piece::kMost];
    piece.Load(gradient, j * gradient.strides[0], gradient.strides[1], sum);
    for (int i = 0; i < piece.count(); ++i) sum[i] += sums[0][i];
    piece.Store(sum, gradient, j * gradient.strides[0], gradient.strides[1]);
  }
};

// Moves the gradients of the rows of tokens that took the step to their places; those of others wait
// for the step in which they halted.
struct TakeShownGradient {
  StepTokens of;
  float* of_shown;  // by row
  float* gradient;  // by place
  int64_t channels;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t place, const Piece& piece) const {
    const int64_t r = of.RowOf(place);
    float* const from = of_shown + r * channels + piece.first();
    float* const to = gradient + place * channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) {
      to[i] = of.Takes(r) ? from[i] : 0;
      if (of.Takes(r)) from[i] = 0;
    }
  }
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_FUNCTORS_H_
