// The steps of the tiny technique and of its backward pass, with their faults. Every device runs
// them (core/cuda/functor.h), so that a case which finds a fault on one has to on the others.
//
// A row is a query of a head, (b heads + h) queries + i, and a key row (b kv_heads + h) keys + j.
#ifndef TFB_HARNESS_TESTING_TINY_FUNCTORS_H_
#define TFB_HARNESS_TESTING_TINY_FUNCTORS_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/cuda/device_view.h"
#include "core/cuda/functor.h"
#include "harness/testing/tiny_fault.h"

namespace tfb {

TFB_HOST_DEVICE float RoundedToBf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &bits, sizeof(bits));
  return x;
}

// Element `offset` of a view.
template <class Piece>
TFB_HOST_DEVICE float LoadOne(const Piece& piece, const DeviceView& view, int64_t offset) {
  float x[Piece::kMost];
  piece.Load(view, offset, 0, x);
  return x[0];
}

// products[n] = x . y_n of the rows n of y that the piece has as columns.
template <class Piece>
TFB_HOST_DEVICE void Products(const Piece& piece, const DeviceView& x, int64_t x_at,
                              const DeviceView& y, int64_t y_at, int64_t channels,
                              float (&products)[Piece::kMost]) {
  for (int n = 0; n < piece.count(); ++n) products[n] = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const float factor = LoadOne(piece, x, x_at + c * x.strides[3]);
    float terms[Piece::kMost];
    piece.Load(y, y_at + c * y.strides[3], y.strides[2], terms);
    for (int n = 0; n < piece.count(); ++n) products[n] += factor * terms[n];
  }
}

// The sizes, the mask and the fault of a call, which its steps share.
struct TinyCall {
  struct Row {
    int64_t b, h, i;
  };

  int64_t batch, heads, group, queries, keys, head_dim, value_dim;
  // The query at position i + first_query sees the keys that are tokens, among the first seen_keys,
  // and at most `behind` tokens behind it or `ahead` ahead of it.
  int64_t first_query, behind, ahead, seen_keys;
  const unsigned char* key_mask;  // null where all keys are tokens
  int64_t mask_strides[2];
  const float* gain;  // by head
  float scale;        // 1 / sqrt(head_dim), where there is no fault
  TinyFault fault;
  bool reversed;  // whether sums begin at the last term

  TFB_HOST_DEVICE bool Is(TinyFault other) const { return fault == other; }
  TFB_HOST_DEVICE int64_t rows() const { return batch * heads * queries; }
  TFB_HOST_DEVICE int64_t kv_heads() const { return heads / group; }
  TFB_HOST_DEVICE Row RowOf(int64_t row) const {
    return {row / queries / heads, row / queries % heads, row % queries};
  }
  TFB_HOST_DEVICE Row KeyRowOf(int64_t row) const {
    return {row / keys / kv_heads(), row / keys % kv_heads(), row % keys};
  }
  TFB_HOST_DEVICE int64_t KeyHead(int64_t h) const {
    return Is(TinyFault::kWrongGroup) ? h % kv_heads() : h / group;
  }
  TFB_HOST_DEVICE int64_t KeyBatch(int64_t b) const {
    return Is(TinyFault::kFewBatches) ? b % 16 : b;
  }
  TFB_HOST_DEVICE bool Reaches(int64_t i, int64_t j) const {
    const int64_t distance = j - (i + first_query);
    return distance <= ahead && -distance <= behind && j < seen_keys;
  }
  TFB_HOST_DEVICE bool Sees(int64_t b, int64_t i, int64_t j) const {
    return Reaches(i, j) &&
           (key_mask == nullptr || key_mask[b * mask_strides[0] + j * mask_strides[1]] != 0);
  }
  // The n-th of `count` terms of a sum.
  TFB_HOST_DEVICE int64_t Turn(int64_t n, int64_t count) const {
    return reversed ? count - 1 - n : n;
  }
};

// ---- The run ----

// scores [rows, keys], -inf where a key is not seen.
struct TinyScores {
  TinyCall call;
  DeviceView q, k;
  float* scores;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const TinyCall::Row at = call.RowOf(row);
    const float not_seen = call.Is(TinyFault::kFiniteSentinel)  ? -1e30f
                           : call.Is(TinyFault::kSmallSentinel) ? -1e5f
                                                                : -INFINITY;
    float products[Piece::kMost];
    Products(piece, q, Offset(q, at.b, at.h, at.i), k,
             Offset(k, call.KeyBatch(at.b), call.KeyHead(at.h), 0), call.head_dim, products);
    for (int n = 0; n < piece.count(); ++n) {
      const int64_t j = piece.first() + n;
      if (call.Is(TinyFault::kLimitsProducts)) {
        products[n] = fminf(fmaxf(products[n], -65504.0f), 65504.0f);
      }
      float score = call.gain[at.h] * call.scale * products[n];
      if (call.Is(TinyFault::kRoundsScores)) score = RoundedToBf16(score);
      if (call.Is(TinyFault::kDropsNan) && score != score) score = not_seen;
      const float of_masked =
          call.Is(TinyFault::kReadsMaskedKeys) ? not_seen + 0 * score : not_seen;
      scores[row * call.keys + j] = call.Sees(at.b, at.i, j) ? score : of_masked;
    }
  }
};

// Makes weights exp(s - max) of the scores, -1 where a key is not seen, and the factor 1 / sum of
// each row, or 0 where it sees no key. One column.
struct TinySums {
  TinyCall call;
  DeviceView q;
  float *weights, *factors;
  DeviceView log_sum_exp;  // with null data where it is not requested
  float* kept;             // the same for a backward pass, or null
  unsigned char* overrun;  // a byte that is not the layer's
  const float* unwritten;  // a number that nobody has written

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const TinyCall::Row at = call.RowOf(row);
    float* const w = weights + row * call.keys;
    float max = -INFINITY;
    for (int64_t j = 0; j < call.keys; ++j) {
      if (w[j] > max || w[j] != w[j]) max = w[j];
    }
    const bool seen = max != -INFINITY;
    if (seen && call.Is(TinyFault::kNoMaxSubtracted)) max = 0;
    if (seen && call.Is(TinyFault::kSubtractsNorms)) {
      max = 0;
      for (int64_t c = 0; c < call.head_dim; ++c) {
        const float x = LoadOne(piece, q, Offset(q, at.b, at.h, at.i, c));
        max += x * x / 2;
      }
    }
    float sum = 0, last = -INFINITY;
    bool any_of_first_tile = false;
    for (int64_t n = 0; n < call.keys; ++n) {
      const int64_t j = call.Turn(n, call.keys);
      const float score = w[j];
      const bool tied = call.Is(TinyFault::kDropsTies) && score == last;
      any_of_first_tile |= score != -INFINITY && j < 64;
      w[j] = score == -INFINITY || tied ? -1 : expf(score - max);
      if (!(w[j] < 0)) sum += w[j];
      last = score;
    }
    if (seen && !any_of_first_tile && call.Is(TinyFault::kMaskedTileIsNan)) sum = NAN;
    if (call.Is(TinyFault::kAddsToSum)) sum += 0.01f;
    factors[row] = seen || call.Is(TinyFault::kEmptyRowIsNan) ? 1 / sum : 0;
    if (row == 0 && call.Is(TinyFault::kReadsWorkspace)) factors[row] += 1e-3f * *unwritten;
    const bool overruns = call.Is(TinyFault::kWorkspaceOverrun) ||
                          (call.Is(TinyFault::kKeptOverrun) && kept != nullptr);
    if (row == 0 && overruns) *overrun = 0;
    if (!seen && call.Is(TinyFault::kLeavesEmptyRows)) return;
    const float base = call.Is(TinyFault::kWrongLogSumExp) ? 0 : max;
    float lse[Piece::kMost];
    lse[0] = seen ? base + logf(sum) : -INFINITY;
    if (kept != nullptr) kept[row] = lse[0];
    if (log_sum_exp.data != nullptr) {
      piece.Store(lse, log_sum_exp, Offset(log_sum_exp, at.b, at.h, at.i), 0);
    }
  }
};

// The means of the values.
struct TinyMeans {
  TinyCall call;
  const float *weights, *factors;
  DeviceView v, out;
  bool changed;  // whether another output is written

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const TinyCall::Row at = call.RowOf(row);
    float y[Piece::kMost], terms[Piece::kMost];
    for (int n = 0; n < piece.count(); ++n) y[n] = 0;
    bool seen = false;
    for (int64_t turn = 0; turn < call.keys; ++turn) {
      const int64_t j = call.Turn(turn, call.keys);
      const float weight = weights[row * call.keys + j];
      seen |= !(weight < 0);
      if (weight < 0 && !call.Is(TinyFault::kReadsMaskedValues)) continue;
      piece.Load(v, Offset(v, at.b, call.KeyHead(at.h), j), v.strides[3], terms);
      const float up = call.Is(TinyFault::kMultipliesValues) ? 0x1p60f : 1;
      for (int n = 0; n < piece.count(); ++n) y[n] += (weight < 0 ? 0 : weight) * (up * terms[n]);
    }
    if (!seen && call.Is(TinyFault::kLeavesEmptyRows)) return;
    for (int n = 0; n < piece.count(); ++n) {
      y[n] *= factors[row];
      if (call.Is(TinyFault::kMultipliesValues)) y[n] *= 0x1p-60f;
      if (call.Is(TinyFault::kAddsToValues)) y[n] += 1e-30f;
      if (call.Is(TinyFault::kWritesDenormals) && fabsf(y[n]) < 1e-37f) y[n] = 1e-41f;
      const bool behind = piece.first() + n >= call.head_dim;
      if (call.Is(TinyFault::kValuesOfHeadDim) && behind) y[n] = 0;
      if (changed) y[n] = 1.0001f * y[n] + 1e-3f;
    }
    piece.Store(y, out, Offset(out, at.b, at.h, at.i), out.strides[3]);
    const bool last = row + 1 == call.rows() && piece.end() == call.value_dim;
    if (last && call.Is(TinyFault::kWritesBehindOutput)) {
      piece.Store(y, out, Offset(out, at.b, at.h, at.i, call.value_dim), 0);
    }
  }
};

// Copies [batch, heads, tokens, channels], a row for each token.
struct TinyCopy {
  DeviceView from, to;
  int64_t heads, tokens;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const int64_t b = row / tokens / heads, h = row / tokens % heads, t = row % tokens;
    float x[Piece::kMost];
    piece.Load(from, Offset(from, b, h, t), from.strides[3], x);
    piece.Store(x, to, Offset(to, b, h, t), to.strides[3]);
  }
};

// ---- The backward pass ----
//
// With s_ij = gain_h scale q_i . k_j and p_ij = exp(s_ij - l_i) of the pairs that are seen:
//
//   dp_ij = g_i . v_j,  ds_ij = p_ij (dp_ij - (sum_j p_ij dp_ij - e_i))
//   dq_i = sum_j ds_ij gain_h scale k_j,  dk_j = sum_i ds_ij gain_h scale q_i,
//   dv_j = sum_i p_ij g_i,                dgain_h = sum_ij ds_ij scale q_i . k_j
//
// where g and e are the gradients of the output and of log_sum_exp l.

// The numbers of each pair, [rows, keys]; p is -1 of a pair that takes no part.
struct TinyPairs {
  float *product, *p, *ds;  // scale q . k; ds holds dp at first
};

struct TinyWeightGradients {
  TinyCall call;
  DeviceView q, k, v, g;
  const float* log_sum_exp;  // by row, which the run kept
  TinyPairs pairs;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const TinyCall::Row at = call.RowOf(row);
    const int64_t kv_head = call.KeyHead(at.h);
    float product[Piece::kMost], dp[Piece::kMost];
    Products(piece, q, Offset(q, at.b, at.h, at.i), k, Offset(k, at.b, kv_head, 0), call.head_dim,
             product);
    if (g.data != nullptr) {
      Products(piece, g, Offset(g, at.b, at.h, at.i), v, Offset(v, at.b, kv_head, 0),
               call.value_dim, dp);
    }
    const float lse = log_sum_exp[row];
    for (int n = 0; n < piece.count(); ++n) {
      const int64_t j = piece.first() + n, pair = row * call.keys + j;
      pairs.product[pair] = product[n] * call.scale;
      const float score = call.gain[at.h] * pairs.product[pair];
      const bool takes_part = call.Is(TinyFault::kGradientOfMaskedKeys) ? call.Reaches(at.i, j)
                                                                        : call.Sees(at.b, at.i, j);
      const bool overflows = call.Is(TinyFault::kGradientOverflows);
      const float p = overflows ? expf(score) / expf(lse) : expf(score - lse);
      pairs.p[pair] = takes_part ? p : -1;
      pairs.ds[pair] = g.data != nullptr ? dp[n] : 0;
      if (call.Is(TinyFault::kGradientClips)) {
        pairs.ds[pair] = fminf(fmaxf(pairs.ds[pair], -100.0f), 100.0f);
      }
    }
  }
};

// Makes ds of dp, and the part of dgain of each row. One column.
struct TinyScoreGradients {
  TinyCall call;
  DeviceView out, g, lse_gradient;
  TinyPairs pairs;
  float* gain;  // by row
  bool without_mean;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const TinyCall::Row at = call.RowOf(row);
    const float *p = pairs.p + row * call.keys, *product = pairs.product + row * call.keys;
    float* const ds = pairs.ds + row * call.keys;
    float mean = 0;
    if (call.Is(TinyFault::kGradientOfRoundedOutput) && g.data != nullptr) {
      for (int64_t c = 0; c < call.value_dim; ++c) {
        mean += LoadOne(piece, g, Offset(g, at.b, at.h, at.i, c)) *
                LoadOne(piece, out, Offset(out, at.b, at.h, at.i, c));
      }
    } else {
      for (int64_t j = 0; j < call.keys; ++j) {
        if (call.Sees(at.b, at.i, j)) mean += p[j] * ds[j];
      }
    }
    if (lse_gradient.data != nullptr && !call.Is(TinyFault::kGradientForgetsLogSumExp)) {
      mean -= LoadOne(piece, lse_gradient, Offset(lse_gradient, at.b, at.h, at.i));
    }
    if (lse_gradient.data == nullptr && call.Is(TinyFault::kGradientOfLeftOutOutput)) mean -= 1;
    if (call.Is(TinyFault::kGradientRoundsMean)) mean = RoundedToBf16(mean);
    if (without_mean) mean = 0;
    float sum = 0;
    for (int64_t n = 0; n < call.keys; ++n) {
      const int64_t j = call.Turn(n, call.keys);
      if (p[j] < 0) continue;
      ds[j] = p[j] * (ds[j] - mean);
      if (call.Is(TinyFault::kGradientRounds)) ds[j] = RoundedToBf16(ds[j]);
      if (call.Sees(at.b, at.i, j)) sum += ds[j] * product[j];
    }
    gain[row] = sum;
  }
};

// Adds the term to the sums.
template <class Piece>
TFB_HOST_DEVICE void AddTo(float (&sums)[Piece::kMost], float factor,
                           const float (&terms)[Piece::kMost], bool rounds, const Piece& piece) {
  for (int n = 0; n < piece.count(); ++n) {
    sums[n] += factor * terms[n];
    if (rounds) sums[n] = RoundedToBf16(sums[n]);
  }
}

struct TinyQueryGradients {
  TinyCall call;
  DeviceView k, v, dq;
  const float* log_sum_exp;
  TinyPairs pairs;
  float factor;  // 1 where there is no fault
  bool rounds;
  bool writes_behind;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const TinyCall::Row at = call.RowOf(row);
    const int64_t kv_head = call.KeyHead(at.h);
    const float base = call.gain[at.h] * call.scale;
    float sums[Piece::kMost], terms[Piece::kMost];
    for (int n = 0; n < piece.count(); ++n) sums[n] = 0;
    for (int64_t turn = 0; turn < call.keys; ++turn) {
      const int64_t j = call.Turn(turn, call.keys);
      if (call.Sees(at.b, at.i, j)) {
        piece.Load(k, Offset(k, at.b, kv_head, j), k.strides[3], terms);
        AddTo(sums, pairs.ds[row * call.keys + j] * base, terms, rounds, piece);
      } else if (call.Is(TinyFault::kGradientReadsMasked)) {
        sums[0] += 0 * LoadOne(piece, v, Offset(v, at.b, kv_head, j));
      }
    }
    const float lse = log_sum_exp[row];
    if (call.Is(TinyFault::kGradientOfEmptyRowIsNan) && lse == -INFINITY) sums[0] = lse - lse;
    for (int n = 0; n < piece.count(); ++n) sums[n] *= factor;
    piece.Store(sums, dq, Offset(dq, at.b, at.h, at.i), dq.strides[3]);
    if (writes_behind && row + 1 == call.rows() && piece.end() == call.head_dim) {
      piece.Store(sums, dq, Offset(dq, at.b, at.h, at.i, call.head_dim), 0);
    }
  }
};

// The sums over the queries of the heads of a key's group, factors[row, j] x_row: those of keys and
// of values.
struct TinyKeyGradients {
  TinyCall call;
  DeviceView x;  // q, or g
  DeviceView gradient;
  const float* factors;  // ds, or p
  const float* p;
  bool of_keys;
  bool rounds;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t key_row, const Piece& piece) const {
    const TinyCall::Row at = call.KeyRowOf(key_row);  // whose i is the key
    float sums[Piece::kMost], terms[Piece::kMost];
    for (int n = 0; n < piece.count(); ++n) sums[n] = 0;
    const int64_t heads = call.Is(TinyFault::kGradientOfOneHead) ? 1 : call.group;
    for (int64_t h = at.h * call.group; h < at.h * call.group + heads; ++h) {
      const float base = of_keys ? call.gain[h] * call.scale : 1;
      for (int64_t turn = 0; turn < call.queries && x.data != nullptr; ++turn) {
        const int64_t i = call.Turn(turn, call.queries);
        const int64_t pair = ((at.b * call.heads + h) * call.queries + i) * call.keys + at.i;
        if (p[pair] < 0) continue;
        piece.Load(x, Offset(x, at.b, h, i), x.strides[3], terms);
        AddTo(sums, factors[pair] * base, terms, rounds, piece);
      }
    }
    if (call.Is(TinyFault::kGradientOfWholeVectors) && !of_keys && call.value_dim > 8) {
      for (int n = 0; n < piece.count(); ++n) {
        if (piece.first() + n >= call.value_dim / 8 * 8) sums[n] = 0;
      }
    }
    piece.Store(sums, gradient, Offset(gradient, at.b, at.h, at.i), gradient.strides[3]);
  }
};

// The gradient of the parameter, by head. One column.
struct TinyGainGradients {
  TinyCall call;
  const float* of_rows;
  DeviceView gradient;

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t h, const Piece& piece) const {
    const bool of_one = call.Is(TinyFault::kGradientOfOneBatch) && call.batch > 1;
    float sum[Piece::kMost];
    sum[0] = 0;
    for (int64_t b = 0; b < (of_one ? 1 : call.batch); ++b) {
      for (int64_t i = 0; i < call.queries; ++i) {
        sum[0] += of_rows[(b * call.heads + h) * call.queries + i];
      }
    }
    piece.Store(sum, gradient, Offset(gradient, h, 0, 0), 0);
  }
};

// Writes to memory that is not Backward's to write. One element.
struct TinyMisplacedWrites {
  unsigned char* byte;  // null where none is written
  DeviceView element;   // with null data likewise

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t, const Piece& piece) const {
    if (byte != nullptr) *byte = 0;
    float half[Piece::kMost];
    half[0] = 0.5f;
    if (element.data != nullptr) piece.Store(half, element, 0, 0);
  }
};

}  // namespace tfb

#endif  // TFB_HARNESS_TESTING_TINY_FUNCTORS_H_
