// Attention in float64, computed directly from its formula: the building blocks of every attention
// technique's definition.
//
// Plain loops in the order of the formula; nothing here is shared with an engine. A technique
// brings its score as a function.
//
//   y_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(s_ij - m_i),   m_i = max_j s_ij
//   log_sum_exp_i = m_i + log sum_j exp(s_ij - m_i)            (natural logarithm)
//
// over the keys with s_ij > -inf. A row without any gives y_i = 0 and log_sum_exp_i = -inf.
#ifndef TFB_CORE_DEFINITION_H_
#define TFB_CORE_DEFINITION_H_

#include <array>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

constexpr double kNotSeen = -std::numeric_limits<double>::infinity();

// A copy of a tensor of any dtype and strides as contiguous float64, for loops over rows.
class DoubleTensor {
 public:
  DoubleTensor() = default;
  explicit DoubleTensor(const ConstTensorView& view);
  // A copy of the parameter; empty where there is none of that name.
  DoubleTensor(const NamedTensors& parameters, absl::string_view name);
  const double* Row(int64_t a, int64_t b, int64_t c) const {
    return values_.data() + ((a * dims_[1] + b) * dims_[2] + c) * dims_[3];
  }
  const double* Row(int64_t a, int64_t b) const { return Row(0, a, b); }
  const double* Row(int64_t a) const { return Row(0, 0, a); }
  int64_t rows() const { return dims_[2]; }
  int64_t channels() const { return dims_[3]; }
  double at(int64_t index) const { return values_[index]; }
  double* data() { return values_.data(); }
  const double* data() const { return values_.data(); }
  int64_t size() const { return static_cast<int64_t>(values_.size()); }

 private:
  std::array<int64_t, 4> dims_ = {1, 1, 1, 1};  // right-aligned
  std::vector<double> values_;
};

// ---- Loops ----
//
// Inner loops of known length are there for the compiler, which turns them into vector
// instructions. Each sum has one order of its terms, whatever computes it.

constexpr int64_t kDotLanes = 8;

// sum_c a_c b_c: the sums over c = n mod 8, added up, and the terms behind the last multiple of 8.
inline double Dot(const double* a, const double* b, int64_t size) {
  double sums[kDotLanes] = {};
  const int64_t rest = size % kDotLanes;
  const int64_t whole = size - rest;
  for (int64_t c = 0; c < whole; c += kDotLanes) {
    for (int64_t n = 0; n < kDotLanes; ++n) sums[n] += a[c + n] * b[c + n];
  }
  double sum = 0;
  for (const double of_lane : sums) sum += of_lane;
  for (int64_t n = 0; n < rest; ++n) sum += a[whole + n] * b[whole + n];
  return sum;
}

// y += factor x, which do not overlap.
inline void AddTimes(double factor, const double* x, int64_t size, double* __restrict y) {
  int64_t c = 0;
  for (; c + kDotLanes <= size; c += kDotLanes) {
    for (int64_t n = 0; n < kDotLanes; ++n) y[c + n] += factor * x[c + n];
  }
  for (; c < size; ++c) y[c] += factor * x[c];
}

// y_rc += sum_k x_rk w_kc of contiguous matrices x [rows][in], w [in][out] and y [rows][out]. The terms
// are added in the order of k, so that a row's bits depend on neither the other rows nor the threads.
struct Product {
  const double* x;
  const double* w;
  double* y;
  int64_t rows, in, out;
};
void AddProduct(const Product& product, ThreadPool* pool);

// x W + b of contiguous rows: W is [in, out], and b empty where there is none.
std::vector<double> Affine(const double* x, int64_t rows, const DoubleTensor& w,
                           const DoubleTensor& b, ThreadPool* pool);

// Calls body(n) once for each n in [0, count), on the threads of the pool if there is one. Calls write
// to places of their own, and use no pool. What a call throws is thrown again when all have ended.
void ForEachOf(ThreadPool* pool, int64_t count, absl::FunctionRef<void(int64_t n)> body);

// The same over [0, batch) x [0, heads) x [0, rows): body(b, h, r).
void ForEachRow(ThreadPool* pool, int64_t batch, int64_t heads, int64_t rows,
                absl::FunctionRef<void(int64_t b, int64_t h, int64_t r)> body);

// The rows that a request asks for: all of them where it names none.
std::vector<int64_t> RowsOf(const DefinitionRequest& request, int64_t tokens);

// Tells whether key j of batch b is a token, by the optional key_mask.
class KeyMask {
 public:
  explicit KeyMask(const Inputs& inputs) : view_(inputs.Get("key_mask")) {}
  bool operator()(int64_t b, int64_t j) const {
    return view_.empty() || *view_.At<uint8_t>(b, j) != 0;
  }

 private:
  ConstTensorView view_;
};

// Evaluates attention with score(b, h, i, j) -> s_ij in natural units, kNotSeen where i does not
// see j. `score` has to apply the causal mask and the key mask itself: see DefineMaskedAttention.
template <class Score>
void DefineAttention(const Problem& problem, const Inputs& inputs, const DefinitionRequest& request,
                     const Score& score, NamedTensors* outputs) {
  const DoubleTensor v(inputs.Get("v"));
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  const int64_t row_count = static_cast<int64_t>(rows.size());
  Tensor out(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.value_dim});
  Tensor lse(DType::kF64, {problem.batch, problem.query_heads, row_count});
  Tensor weights;
  if (request.weights) {
    weights =
        Tensor(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.kv_tokens});
  }
  ForEachRow(request.pool, problem.batch, problem.query_heads, row_count,
             [&](int64_t b, int64_t h, int64_t r) {
               std::vector<double> s(problem.kv_tokens), p(problem.kv_tokens);
               double max = kNotSeen;
               for (int64_t j = 0; j < problem.kv_tokens; ++j) {
                 s[j] = score(b, h, rows[r], j);
                 if (s[j] > max) max = s[j];
               }
               double sum = 0;
               double* y = out.view().MutableAt<double>(b, h, r);
               for (int64_t c = 0; c < problem.value_dim; ++c) y[c] = 0;
               for (int64_t j = 0; j < problem.kv_tokens; ++j) {
                 if (s[j] == kNotSeen) continue;
                 p[j] = std::exp(s[j] - max);
                 sum += p[j];
                 AddTimes(p[j], v.Row(b, h / problem.group(), j), problem.value_dim, y);
               }
               const bool seen = sum != 0;
               if (seen) {
                 for (int64_t c = 0; c < problem.value_dim; ++c) y[c] /= sum;
               }
               *lse.view().MutableAt<double>(b, h, r) = seen ? max + std::log(sum) : kNotSeen;
               for (int64_t j = 0; request.weights && j < problem.kv_tokens; ++j) {
                 *weights.view().MutableAt<double>(b, h, r, j) = s[j] == kNotSeen ? 0 : p[j] / sum;
               }
             });
  (*outputs)["out"] = std::move(out);
  (*outputs)["log_sum_exp"] = std::move(lse);
  if (request.weights) (*outputs)["weights"] = std::move(weights);
}

// Evaluates the attention that most techniques start from: the score is scale q_i . k_j, where the
// causal mask, the key mask and `sees(h, i, j)` allow it, plus bias(b, h, i, j). `scale` 0 means 1
// / sqrt(head_dim).
template <class Sees, class Bias>
void DefineMaskedAttention(const Problem& problem, const Inputs& inputs,
                           const DefinitionRequest& request, double scale, const Sees& sees,
                           const Bias& bias, NamedTensors* outputs) {
  const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k"));
  const KeyMask is_token(inputs);
  if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
  DefineAttention(
      problem, inputs, request,
      [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (problem.causal && j > i + problem.causal_offset()) return kNotSeen;
        if (!is_token(b, j) || !sees(h, i, j)) return kNotSeen;
        const double dot = Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
        return scale * dot + bias(b, h, i, j);
      },
      outputs);
}

// For techniques some of whose rows have tensors of their own: returns the inputs with the tensors
// NAME + suffix in the place of these names.
Inputs WithOwnTensors(Inputs inputs, const std::vector<std::string>& names,
                      absl::string_view suffix);
// Copies the rows of `others` with is_other(b, i), i the query, over those of the outputs.
void ReplaceRows(const Problem& problem, const DefinitionRequest& request,
                 absl::FunctionRef<bool(int64_t b, int64_t i)> is_other, const NamedTensors& others,
                 NamedTensors* outputs);

// The scores of attention as functions: s_ij = scale q_i . k_j + bias(b, h, i, j) for the pairs with
// sees(h, i, j). The masks of the problem and of the keys are added to what is seen.
struct PairScore {
  using OfPair = std::function<double(int64_t b, int64_t h, int64_t i, int64_t j)>;
  using OfProduct = std::function<double(int64_t h, int64_t i, int64_t j, double product)>;

  double scale = 0;  // 0: 1 / sqrt(head_dim)
  // The score of a product q_i . k_j where it is no multiple of it; null: scale times the product.
  OfProduct of_product = nullptr;
  std::function<bool(int64_t h, int64_t i, int64_t j)> sees = nullptr;  // null: all pairs
  OfPair bias = nullptr;                                                // -inf: not seen; null: 0

  static PairScore Sees(std::function<bool(int64_t h, int64_t i, int64_t j)> sees) {
    return {0, nullptr, std::move(sees)};
  }
  static PairScore Bias(OfPair bias, double scale = 0) {
    return {scale, nullptr, nullptr, std::move(bias)};
  }
};
void DefineMaskedAttention(const Problem& problem, const Inputs& inputs,
                           const DefinitionRequest& request, const PairScore& score,
                           NamedTensors* outputs);

}  // namespace tfb

#endif  // TFB_CORE_DEFINITION_H_
