// The small steps of engine linear's backward pass on CUDA devices, over tokens, chunks and heads:
// see linear_backward.cu. The number of a chunk counts those of all held heads.
#ifndef TFB_CORE_LINEAR_LINEAR_BACKWARD_STEPS_H_
#define TFB_CORE_LINEAR_LINEAR_BACKWARD_STEPS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/linear/linear_backward_kernels.h"

namespace tfb {

// Returns the factor of sums that go from one reference to another, 1 for sums of nothing.
TFB_HOST_DEVICE float LinearRescale(float from, float to) {
  return from == to || isinf(from) ? 1.0f : expf(from < to ? from - to : to - from);
}

// Finds rho_j and G_j of a chunk's keys, and their maxima and number.
struct LinearSummariseKeys {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t slot = n / a.key_chunks, chunk = n % a.key_chunks;
    const LinearArguments& f = a.forward;
    const bool exponential = IsExponential(f.map.feature);
    float reference = -INFINITY, maximum = -INFINITY, tokens = 0, decay = 0;
    int64_t maximum_key = -1;
    for (int64_t j = 0; j < kLinearTile; ++j) {
      const int64_t row = n * kLinearTile + j, token = chunk * kLinearTile + j;
      const bool seen = a.key.seen[row] != 0;
      float log_scale = exponential ? a.keys.maximum[row] - a.keys.half_square[row] : 0;
      if (f.map.gated && token < f.kv_tokens) {
        const float* gates = f.key_gates + ((a.first_head + slot) * f.kv_tokens + token) * 2;
        log_scale += gates[0];
        decay = gates[1];
      }
      if (!seen) log_scale = -INFINITY;
      a.key.log_scale[row] = log_scale;
      a.key.decay[row] = decay;
      if (!seen) continue;
      tokens += 1;
      reference = fmaxf(reference, fmaxf(log_scale, kLeastReference));
      if (a.keys.maximum[row] > maximum) {
        maximum = a.keys.maximum[row];
        maximum_key = token;
      }
    }
    const int64_t at = slot * (a.key_chunks + 1) + chunk;
    a.key_chunk.own_reference[at] = reference;
    a.key_chunk.own_maximum[at] = maximum;
    a.key_chunk.own_tokens[at] = tokens;
    a.key_chunk.own_maximum_key[at] = maximum_key;
  }
};

// Runs through the chunks of a head: finds the maxima over the keys before each.
struct LinearRunThroughKeys {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t slot) const {
    float reference = -INFINITY, maximum = -INFINITY, tokens = 0;
    int64_t maximum_key = -1;
    for (int64_t n = 0; n <= a.key_chunks; ++n) {
      const int64_t at = slot * (a.key_chunks + 1) + n;
      a.key_chunk.reference[at] = reference;
      a.key_chunk.maximum[at] = maximum;
      a.key_chunk.tokens[at] = tokens;
      if (n == a.key_chunks) break;
      reference = fmaxf(reference, a.key_chunk.own_reference[at]);
      a.key_chunk.scale_reference[at] = reference;
      // After the chunk the reference is relative to the chunk's end.
      reference += a.key.decay[((slot * a.key_chunks + n) + 1) * kLinearTile - 1];
      tokens += a.key_chunk.own_tokens[at];
      if (a.key_chunk.own_maximum[at] > maximum) {
        maximum = a.key_chunk.own_maximum[at];
        maximum_key = a.key_chunk.own_maximum_key[at];
      }
    }
    a.key_chunk.maximum_key[slot] = maximum_key;
  }
};

// Finds what a row at the place of each key of a chunk sees, and the keys' scales in sums.
struct LinearRunThroughChunk {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t slot = n / a.key_chunks, chunk = n % a.key_chunks;
    const int64_t at = slot * (a.key_chunks + 1) + chunk;
    const float scale_reference = a.key_chunk.scale_reference[at];
    const float shift = scale_reference == -INFINITY ? 0 : scale_reference;
    float reference = a.key_chunk.reference[at], maximum = a.key_chunk.maximum[at],
          tokens = a.key_chunk.tokens[at];
    const bool is_sequence = a.forward.map.stabiliser == KeyStabiliser::kSequence;
    if (is_sequence) maximum = a.key_chunk.maximum[slot * (a.key_chunks + 1) + a.key_chunks];
    for (int64_t row = n * kLinearTile; row < (n + 1) * kLinearTile; ++row) {
      const float seen = a.key.seen[row], log_scale = a.key.log_scale[row];
      if (seen != 0) {
        reference = fmaxf(reference, fmaxf(log_scale, kLeastReference));
        if (!is_sequence) maximum = fmaxf(maximum, a.keys.maximum[row]);
      }
      tokens += seen;
      a.key.running_reference[row] = reference;
      a.key.running_maximum[row] = maximum;
      a.key.running_tokens[row] = tokens;
      a.key.scale[row] = expf(log_scale - shift);
    }
  }
};

// Turns the sums of the chunks of a head into those before each, at their own references. Elements
// are those of the sums of all held heads.
struct LinearScanKeys {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t element) const {
    const int64_t slot = element / a.sum, at = element % a.sum;
    const bool is_scaled = at / a.columns < a.features;
    float* sums = a.key_sums + slot * (a.key_chunks + 1) * a.sum + at;
    float sum = 0;
    for (int64_t n = 0; n < a.key_chunks; ++n) {
      const int64_t chunk = slot * (a.key_chunks + 1) + n;
      const float rescale = is_scaled ? LinearRescale(a.key_chunk.reference[chunk],
                                                      a.key_chunk.scale_reference[chunk])
                                      : 1;
      const float own = sums[n * a.sum];
      sums[n * a.sum] = sum;
      sum = rescale * sum + own;
    }
    sums[a.key_chunks * a.sum] = sum;
  }
};

// Finds the least R_i of a chunk of queries, over the heads of a group.
struct LinearSummariseQueries {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t slot = n / a.query_chunks, chunk = n % a.query_chunks;
    float reference = INFINITY;
    for (int64_t g = 0; g < a.group; ++g) {
      const int64_t first = ((slot * a.group + g) * a.query_chunks + chunk) * kLinearTile;
      for (int64_t row = first; row < first + kLinearTile; ++row) {
        if (a.query.active[row] != 0) reference = fminf(reference, a.query.reference[row]);
      }
    }
    a.query_chunk.own_reference[slot * (a.query_chunks + 1) + chunk] = reference;
  }
};

// Runs through the chunks of a head from the last: finds the least R_i over the queries after each.
struct LinearRunThroughQueries {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t slot) const {
    float reference = INFINITY;
    for (int64_t n = a.query_chunks - 1; n >= 0; --n) {
      const int64_t at = slot * (a.query_chunks + 1) + n;
      // The reference becomes relative to the chunk's beginning.
      if (a.forward.causal) {
        reference -= a.key.decay[((slot * a.key_chunks + n) + 1) * kLinearTile - 1];
      }
      a.query_chunk.reference[at + 1] = reference;
      reference = fminf(reference, a.query_chunk.own_reference[at]);
      a.query_chunk.scale_reference[at] = reference;
    }
    a.query_chunk.reference[slot * (a.query_chunks + 1)] = reference;
  }
};

// Turns the sums of the chunks of queries of a head into those after each, and number 0 into those
// of all.
struct LinearScanQueries {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t element) const {
    const int64_t slot = element / a.sum, at = element % a.sum;
    const bool is_scaled = at / a.columns < a.features;
    float* sums = a.query_sums + slot * (a.query_chunks + 1) * a.sum + at;
    float sum = 0;
    for (int64_t n = a.query_chunks - 1; n >= 0; --n) {
      const int64_t chunk = slot * (a.query_chunks + 1) + n;
      const float rescale = is_scaled ? LinearRescale(a.query_chunk.reference[chunk + 1],
                                                      a.query_chunk.scale_reference[chunk])
                                      : 1;
      const float own = sums[n * a.sum];
      sums[(n + 1) * a.sum] = sum;
      sum = rescale * sum + own;
    }
    sums[0] = sum;
  }
};

// ---- Maxima and gates ----

// Walks through the places of a chunk of queries, where causal the keys', in reverse order, and
// calls key(row, rows, columns, maximum) with the row of each key, the sums of products so far, and
// the gradient of S where the key is the maximum of the rows that it was summed over, else 0.
struct LinearChainWalk {
  double rows, columns, maximum;
  bool takes;

  template <class Key>
  TFB_HOST_DEVICE void Run(const LinearBackwardArguments& a, int64_t slot, int64_t chunk,
                           const Key& key) {
    for (int64_t j = kLinearTile - 1; j >= 0; --j) {
      for (int64_t g = 0; g < a.group; ++g) {
        const int64_t row = ((slot * a.group + g) * a.query_chunks + chunk) * kLinearTile + j;
        rows += a.queries.product[row];
        maximum += a.query.maximum_gradient[row];
      }
      if (!a.forward.causal) continue;
      const int64_t row = (slot * a.key_chunks + chunk) * kLinearTile + j;
      if (a.key.seen[row] == 0) continue;
      columns += a.keys.product[row];
      const float before = j > 0 ? a.key.running_maximum[row - 1]
                                 : a.key_chunk.maximum[slot * (a.key_chunks + 1) + chunk];
      const bool is_maximum = a.is_running_maximum && a.keys.maximum[row] > before;
      key(row, rows, columns, is_maximum ? maximum : 0.0);
      if (!is_maximum) continue;
      maximum = 0;
      takes = true;
    }
  }
};

// Adds the gradient of S to the largest projection of a key.
TFB_HOST_DEVICE void AddLinearMaximum(const LinearBackwardArguments& a, int64_t row,
                                      double gradient) {
  const int64_t feature = a.keys.maximum_row[row], projections = a.forward.map.projections;
  a.keys.gradients[row * projections + feature % projections] +=
      static_cast<float>(feature < projections ? gradient : -gradient);
}

// Sums over the places of a chunk.
struct LinearSummariseChain {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    LinearChainWalk walk = {0, 0, 0, false};
    walk.Run(a, n / a.query_chunks, n % a.query_chunks, [](int64_t, double, double, double) {});
    a.chain.own_rows[n] = walk.rows;
    a.chain.own_columns[n] = walk.columns;
    a.chain.own_maximum[n] = walk.maximum;
    a.chain.takes[n] = walk.takes ? 1.0f : 0.0f;
  }
};

// Runs through the chunks of a head from the last. The gradient of the maximum over all keys goes to
// its key.
struct LinearRunThroughChain {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t slot) const {
    double rows = 0, columns = 0, maximum = 0;
    for (int64_t n = (slot + 1) * a.query_chunks - 1; n >= slot * a.query_chunks; --n) {
      a.chain.rows[n] = rows;
      a.chain.columns[n] = columns;
      a.chain.maximum[n] = maximum;
      rows += a.chain.own_rows[n];
      columns += a.chain.own_columns[n];
      maximum = a.chain.own_maximum[n] + (a.chain.takes[n] != 0 ? 0 : maximum);
    }
    const int64_t key = a.key_chunk.maximum_key[slot];
    if (!a.has_maximum_gradient || a.is_running_maximum || key < 0) return;
    AddLinearMaximum(a, slot * a.key_chunks * kLinearTile + key, maximum);
  }
};

// Distributes, over the keys of a chunk, the gradients of the running maximum, and computes those of
// the gates' logits.
struct LinearFinishChain {
  LinearBackwardArguments a;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    LinearChainWalk walk = {a.chain.rows[n], a.chain.columns[n], a.chain.maximum[n], false};
    walk.Run(a, n / a.query_chunks, n % a.query_chunks,
             [&](int64_t row, double rows, double columns, double maximum) {
               if (maximum != 0) AddLinearMaximum(a, row, maximum);
               if (!a.forward.map.gated) return;
               const double keeps = 1 / (1 + exp(-static_cast<double>(a.key.logit[row])));
               a.key.gate_gradient[row] =
                   static_cast<float>((rows - columns) * (1 - keeps) - a.keys.product[row] * keeps);
             });
  }
};

// ---- Sums of parameters ----

// Adds the parts of the held heads to the elements of W's gradient, in their order.
struct LinearAddMatrixParts {
  LinearBackwardArguments a;
  float* total;  // [kv_heads or 1][projections][head_dim]

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const LinearArguments& f = a.forward;
    const int64_t matrix = f.map.projections * f.head_dim;
    float sum = total[n];
    for (int64_t slot = 0; slot < a.heads; ++slot) {
      if (f.map.per_head && (a.first_head + slot) % f.kv_heads != n / matrix) continue;
      for (int64_t part = 0; part < a.parts; ++part) {
        sum += a.w_parts[(slot * a.parts + part) * matrix + n % matrix];
      }
    }
    total[n] = sum;
  }
};

// Adds those of the gates' gradient.
struct LinearAddGateParts {
  LinearBackwardArguments a;
  float* total;  // [kv_heads][head_dim + 1]

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const LinearArguments& f = a.forward;
    const int64_t row = f.head_dim + 1;
    float sum = total[n];
    for (int64_t slot = 0; slot < a.heads; ++slot) {
      if ((a.first_head + slot) % f.kv_heads != n / row) continue;
      for (int64_t chunk = 0; chunk < a.key_chunks; ++chunk) {
        sum += a.gate_parts[(slot * a.key_chunks + chunk) * row + n % row];
      }
    }
    total[n] = sum;
  }
};

// Writes sums, in rows of `columns`, to f32 of any strides: of two dimensions, or of three where
// `rows` is the number of rows of each matrix.
struct LinearStoreSums {
  const float* sums;
  int64_t rows;
  int64_t columns;
  float* to;
  int64_t matrix_stride, row_stride, column_stride;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t row = n / columns;
    to[row / rows * matrix_stride + row % rows * row_stride + n % columns * column_stride] =
        sums[n];
  }
};

// Computes the gradients of W and of a channel scale, where they are not null, from that of their
// product. An element is a channel of a head.
struct ThroughChannelScale {
  const float* gradient;  // [heads][projections][head_dim]
  const float* w;
  const float* scale;  // [heads][head_dim]
  int64_t projections;
  int64_t head_dim;
  DeviceView w_gradient;
  DeviceView scale_gradient;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t h = n / head_dim, c = n % head_dim;
    float sum = 0;
    for (int64_t r = 0; r < projections; ++r) {
      const int64_t at = (h * projections + r) * head_dim + c;
      sum += gradient[at] * w[at];
      if (w_gradient.data == nullptr) continue;
      static_cast<float*>(w_gradient.data)[Offset(w_gradient, h, r, c)] = gradient[at] * scale[n];
    }
    if (scale_gradient.data == nullptr) return;
    static_cast<float*>(scale_gradient.data)[Offset(scale_gradient, h, c, 0)] = sum;
  }
};

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_BACKWARD_STEPS_H_
