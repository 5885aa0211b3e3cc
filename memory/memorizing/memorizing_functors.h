// Steps of store_reading.h, which has their formulas, that all devices run. Pointers are to the
// device's memory. Each number has one owner, which adds in a fixed order.
#ifndef TFB_MEMORY_MEMORIZING_MEMORIZING_FUNCTORS_H_
#define TFB_MEMORY_MEMORIZING_MEMORIZING_FUNCTORS_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"
#include "core/cuda/run_sums.h"
#include "memory/memorizing/memorizing_cuda.h"

namespace tfb::memorizing {

// The numbers of a query.
struct QueryNumbers {
  double inverse_length;  // 1 / |q|
  double gate;            // g; 0 where nothing is read
  double of_gate;         // dt
  double along;           // sum_n ds_n (a . k_n)
};

// The queries of a segment, and what each reads: up to k tokens, in the slots 0 to k - 1, and in slot k
// the null key, where there is one. Row (b * heads + h) * tokens + t is query t of a head. Tensors
// are f32, their channels side by side.
struct StoreReads {
  DeviceView q;               // [batch, heads, tokens, channels]
  DeviceView local;           // likewise
  DeviceView dy;              // likewise; null data: there are no gradients
  DeviceView keys;            // [batch, kv_heads, rows, channels], of unit length
  DeviceView values;          // likewise
  const int64_t* retrieved;   // [batch][heads][query_tokens][k]; -1 behind the last
  int64_t first_row;          // token j is row first_row + j of keys and values
  const float* null_keys;     // [kv_heads][channels], of unit length, or null
  const float* null_values;   // likewise
  const float* null_lengths;  // [kv_heads]: what the lengths were
  const float* gates;         // [heads]; null: the softmax is joint
  const float* scales;        // [heads]
  DeviceView log_sum_exp;     // [batch, heads, tokens], of the layer's own scores, where it joins
  int64_t heads;
  int64_t group;  // heads that share keys
  int64_t tokens;
  int64_t query_tokens;  // of the Run
  int64_t begin;         // the segment's first of them
  int64_t k;
  int64_t channels;
  QueryNumbers* numbers;  // [rows]
  float* cosines;         // [rows][slots]: a . k_n
  float* weights;         // [rows][slots]: p_n
  float* products;        // [rows][slots]: dy . v_n, and then ds_n

  struct Query {
    int64_t b, h, t;
  };
  TFB_HOST_DEVICE Query QueryOf(int64_t row) const {
    return {row / tokens / heads, row / tokens % heads, row % tokens};
  }
  TFB_HOST_DEVICE int64_t slots() const { return null_keys == nullptr ? k : k + 1; }
  TFB_HOST_DEVICE const int64_t* TokensOf(const Query& query) const {
    return retrieved + ((query.b * heads + query.h) * query_tokens + begin + query.t) * k;
  }
  TFB_HOST_DEVICE bool IsRead(const Query& query, int64_t slot) const {
    return slot == k || TokensOf(query)[slot] >= 0;
  }
  // Return the key and the value of a slot that is read.
  TFB_HOST_DEVICE const float* KeyOf(const Query& query, int64_t slot) const {
    return slot == k ? null_keys + query.h / group * channels : TokenOf(keys, query, slot);
  }
  TFB_HOST_DEVICE const float* ValueOf(const Query& query, int64_t slot) const {
    return slot == k ? null_values + query.h / group * channels : TokenOf(values, query, slot);
  }
  TFB_HOST_DEVICE static const float* FloatsAt(const DeviceView& view, int64_t offset) {
    return static_cast<const float*>(view.data) + offset;
  }
  // Returns the query's row of q, local or dy.
  TFB_HOST_DEVICE static const float* RowOf(const DeviceView& view, const Query& query) {
    return FloatsAt(view, Offset(view, query.b, query.h, query.t));
  }
  TFB_HOST_DEVICE double ScaleOf(const Query& query) const {
    return ::fabs(static_cast<double>(scales[query.h]));  // |s|
  }

 private:
  TFB_HOST_DEVICE const float* TokenOf(const DeviceView& view, const Query& query,
                                       int64_t slot) const {
    const int64_t row = first_row + TokensOf(query)[slot];
    return FloatsAt(view, Offset(view, query.b, query.h / group, row));
  }
};

TFB_HOST_DEVICE double DotOf(const float* a, const float* b, int64_t channels) {
  double sum = 0;
  for (int64_t c = 0; c < channels; ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}
// Returns the number that divides a row to make its length 1.
TFB_HOST_DEVICE double LengthOf(const float* row, int64_t channels) {
  const double length = ::sqrt(DotOf(row, row, channels));
  return length < kLeastNorm ? kLeastNorm : length;
}

// For each slot of each query: a . k_n, and dy . v_n where there are gradients.
struct ScoresOfReads {
  StoreReads reads;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t slots = reads.slots(), channels = reads.channels;
    const StoreReads::Query query = reads.QueryOf(n / slots);
    if (!reads.IsRead(query, n % slots)) return;
    const float* q = StoreReads::RowOf(reads.q, query);
    const double dot = DotOf(q, reads.KeyOf(query, n % slots), channels);
    reads.cosines[n] = static_cast<float>(dot / LengthOf(q, channels));
    if (reads.dy.data == nullptr) return;
    reads.products[n] = static_cast<float>(
        DotOf(StoreReads::RowOf(reads.dy, query), reads.ValueOf(query, n % slots), channels));
  }
};

// For each query, after its scores: its weights and numbers, and with gradients ds_n.
struct WeightsOfReads {
  StoreReads reads;
  float* of_log_sum_exp;  // [batch][heads][tokens]: dm, or null

  TFB_HOST_DEVICE void operator()(int64_t row) const {
    const StoreReads::Query query = reads.QueryOf(row);
    const int64_t slots = reads.slots(), first = row * slots;
    const double scale = reads.ScaleOf(query);
    QueryNumbers numbers = {};
    numbers.inverse_length = 1 / LengthOf(StoreReads::RowOf(reads.q, query), reads.channels);
    double largest = -INFINITY, sum = 0;
    for (int64_t n = 0; n < slots; ++n) {
      if (!reads.IsRead(query, n)) continue;
      const double score = scale * reads.cosines[first + n];
      if (!(score <= largest)) largest = score;  // a NaN stays
    }
    for (int64_t n = 0; n < slots; ++n) {
      if (reads.IsRead(query, n)) sum += ::exp(scale * reads.cosines[first + n] - largest);
    }
    for (int64_t n = 0; n < slots; ++n) {
      if (!reads.IsRead(query, n)) continue;
      const double weight = ::exp(scale * reads.cosines[first + n] - largest) / sum;
      reads.weights[first + n] = static_cast<float>(weight);
    }
    const bool any = reads.null_keys != nullptr || reads.IsRead(query, 0);
    if (any) numbers.gate = GateOf(query, largest + ::log(sum));
    if (reads.dy.data != nullptr) Differentiate(query, first, any, &numbers);
    if (of_log_sum_exp != nullptr) {
      of_log_sum_exp[row] = static_cast<float>(reads.gates == nullptr ? -numbers.of_gate : 0);
    }
    reads.numbers[row] = numbers;
  }

 private:
  TFB_HOST_DEVICE double GateOf(const StoreReads::Query& query, double log_sum_exp) const {
    if (reads.gates != nullptr) return 1 / (1 + ::exp(-static_cast<double>(reads.gates[query.h])));
    const DeviceView& own = reads.log_sum_exp;
    return 1 / (1 + ::exp(*StoreReads::FloatsAt(own, Offset(own, query.b, query.h, query.t)) -
                          log_sum_exp));
  }

  TFB_HOST_DEVICE void Differentiate(const StoreReads::Query& query, int64_t first, bool any,
                                     QueryNumbers* numbers) const {
    if (!any) return;
    const int64_t slots = reads.slots();
    double of_memory = 0;  // dy . o
    for (int64_t n = 0; n < slots; ++n) {
      if (!reads.IsRead(query, n)) continue;
      of_memory += static_cast<double>(reads.weights[first + n]) * reads.products[first + n];
    }
    const double of_local = DotOf(StoreReads::RowOf(reads.dy, query),
                                  StoreReads::RowOf(reads.local, query), reads.channels);
    numbers->of_gate = numbers->gate * (1 - numbers->gate) * (of_memory - of_local);
    const double of_sum = reads.gates == nullptr ? numbers->of_gate : 0;  // dl
    for (int64_t n = 0; n < slots; ++n) {
      if (!reads.IsRead(query, n)) continue;
      const double of_score = reads.weights[first + n] *
                              (numbers->gate * (reads.products[first + n] - of_memory) + of_sum);
      numbers->along += of_score * reads.cosines[first + n];
      reads.products[first + n] = static_cast<float>(of_score);
    }
  }
};

// For each query, after its weights: y.
struct MixOfReads {
  StoreReads reads;
  DeviceView y;  // [batch, heads, tokens, channels]

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const StoreReads::Query query = reads.QueryOf(row);
    const int64_t slots = reads.slots();
    const double gate = reads.numbers[row].gate;
    double read[Piece::kMost] = {};
    for (int64_t n = 0; n < slots; ++n) {
      if (!reads.IsRead(query, n)) continue;
      const double weight = reads.weights[row * slots + n];
      const float* value = reads.ValueOf(query, n) + piece.first();
      for (int i = 0; i < piece.count(); ++i) read[i] += weight * value[i];
    }
    const float* local = StoreReads::RowOf(reads.local, query) + piece.first();
    float x[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) {
      x[i] = static_cast<float>(gate * read[i] + (1 - gate) * local[i]);
    }
    piece.Store(x, y, Offset(y, query.b, query.h, query.t), y.strides[3]);
  }
};

// For each query, after its weights: dq = |s| (sum_n ds_n k_n - a sum_n ds_n (a . k_n)) / |q|, and
// dlocal.
struct GradientsOfReads {
  StoreReads reads;
  DeviceView dq;      // [batch, heads, tokens, channels]
  DeviceView dlocal;  // likewise; may be dy

  template <class Piece>
  TFB_HOST_DEVICE void operator()(int64_t row, const Piece& piece) const {
    const StoreReads::Query query = reads.QueryOf(row);
    const int64_t slots = reads.slots();
    const QueryNumbers& numbers = reads.numbers[row];
    double sums[Piece::kMost] = {};
    for (int64_t n = 0; n < slots; ++n) {
      if (!reads.IsRead(query, n)) continue;
      const double of_score = reads.products[row * slots + n];
      const float* key = reads.KeyOf(query, n) + piece.first();
      for (int i = 0; i < piece.count(); ++i) sums[i] += of_score * key[i];
    }
    const float* q = StoreReads::RowOf(reads.q, query) + piece.first();
    const double factor = reads.ScaleOf(query) * numbers.inverse_length;
    float x[Piece::kMost];
    for (int i = 0; i < piece.count(); ++i) {
      x[i] = static_cast<float>(factor * (sums[i] - numbers.inverse_length * q[i] * numbers.along));
    }
    piece.Store(x, dq, Offset(dq, query.b, query.h, query.t), dq.strides[3]);
    piece.Load(reads.dy, Offset(reads.dy, query.b, query.h, query.t), reads.dy.strides[3], x);
    for (int i = 0; i < piece.count(); ++i) {
      x[i] = static_cast<float>((1 - numbers.gate) * x[i]);
    }
    piece.Store(x, dlocal, Offset(dlocal, query.b, query.h, query.t), dlocal.strides[3]);
  }
};

// The sums (core/cuda/run_sums.h) for each head, a row of one column, over batch rows and queries: the
// gradients of its gate and scale, which are added.
struct SumsOfReads {
  using Number = double;
  static constexpr int kSums = 2;
  StoreReads reads;
  double* gates;   // [heads]
  double* scales;  // [heads]

  static SumShape ShapeOf(const StoreReads& reads, int64_t batch) {
    return {reads.heads, 1, batch * reads.tokens};
  }

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t h, int64_t begin, int64_t end, const Piece&,
                                double (&sums)[kSums][Piece::kMost]) const {
    TermIndex query(begin, reads.tokens);
    for (int64_t n = begin; n < end; ++n, query.Next()) {
      const int64_t row = (query.outer * reads.heads + h) * reads.tokens + query.inner;
      sums[0][0] += reads.numbers[row].of_gate;
      sums[1][0] += reads.numbers[row].along;
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t h, const Piece&,
                            const double (&sums)[kSums][Piece::kMost]) const {
    gates[h] += sums[0][0];
    scales[h] += reads.scales[h] < 0 ? -sums[1][0] : sums[1][0];
  }
};

// Likewise for each head of keys, over batch rows, heads and queries: the gradients of its null value,
// sum p g dy, and of its null key, of length L and direction u: sum |s| ds (a - u (a . u)) / L.
struct SumsOfNull {
  using Number = double;
  static constexpr int kSums = 2;
  StoreReads reads;
  double* keys;    // [kv_heads][channels]
  double* values;  // likewise

  static SumShape ShapeOf(const StoreReads& reads, int64_t batch) {
    return {reads.heads / reads.group, reads.channels, batch * reads.group * reads.tokens};
  }

  template <class Piece>
  TFB_HOST_DEVICE void AddTerms(int64_t kv_head, int64_t begin, int64_t end, const Piece& piece,
                                double (&sums)[kSums][Piece::kMost]) const {
    const int64_t slots = reads.slots();
    const float* unit = reads.null_keys + kv_head * reads.channels + piece.first();
    TermIndex token(begin, reads.tokens), head(token.outer, reads.group);
    for (int64_t n = begin; n < end; ++n, head.Next(token.Next())) {
      const StoreReads::Query query = {head.outer, kv_head * reads.group + head.inner, token.inner};
      const int64_t row = (query.b * reads.heads + query.h) * reads.tokens + query.t;
      const int64_t slot = row * slots + reads.k;
      const QueryNumbers& numbers = reads.numbers[row];
      const double of_unit = reads.ScaleOf(query) * reads.products[slot];
      const double of_dy = reads.weights[slot] * numbers.gate, along = reads.cosines[slot];
      const float* q = StoreReads::RowOf(reads.q, query) + piece.first();
      const float* dy = StoreReads::RowOf(reads.dy, query) + piece.first();
      for (int i = 0; i < piece.count(); ++i) {
        sums[0][i] += of_unit * (q[i] * numbers.inverse_length - unit[i] * along);
        sums[1][i] += of_dy * dy[i];
      }
    }
  }
  template <class Piece>
  TFB_HOST_DEVICE void Take(int64_t kv_head, const Piece& piece,
                            const double (&sums)[kSums][Piece::kMost]) const {
    const int64_t first = kv_head * reads.channels + piece.first();
    for (int i = 0; i < piece.count(); ++i) {
      keys[first + i] += sums[0][i] / reads.null_lengths[kv_head];
      values[first + i] += sums[1][i];
    }
  }
};

// Copies element n of [batch, heads, tokens, k], whatever the strides.
struct CopyOfTokens {
  const int64_t* from;
  int64_t from_strides[4];
  int64_t* to;
  int64_t to_strides[4];
  int64_t heads;
  int64_t tokens;
  int64_t k;

  TFB_HOST_DEVICE void operator()(int64_t n) const {
    const int64_t place[4] = {n / k / tokens / heads, n / k / tokens % heads, n / k % tokens,
                              n % k};
    int64_t source = 0, destination = 0;
    for (int axis = 0; axis < 4; ++axis) {
      source += place[axis] * from_strides[axis];
      destination += place[axis] * to_strides[axis];
    }
    to[destination] = from[source];
  }
};

}  // namespace tfb::memorizing

#endif  // TFB_MEMORY_MEMORIZING_MEMORIZING_FUNCTORS_H_
