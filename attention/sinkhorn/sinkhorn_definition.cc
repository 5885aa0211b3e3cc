// The float64 definition of sinkhorn.h.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention/sinkhorn/sinkhorn.h"
#include "core/definition.h"

namespace tfb::sinkhorn {
namespace {

using Pooled = SinkhornOptions::Pooled;
using Matrix = std::vector<std::vector<double>>;

double LogSumExp(const std::vector<double>& x) {
  double max = kNotSeen, sum = 0;
  for (const double value : x) max = value > max ? value : max;
  for (const double value : x) sum += std::exp(value - max);
  return max + std::log(sum);
}

// The formula for one key-value head of one batch row.
class Formula {
 public:
  Formula(const Problem& problem, const SinkhornOptions& options, const NamedTensors& parameters,
          const Inputs& inputs, int64_t b, int64_t h)
      : problem_(problem),
        options_(options),
        parameters_(parameters),
        inputs_(inputs),
        b_(b),
        h_(h),
        tokens_(problem.kv_tokens),
        block_(std::min(options.block, std::max<int64_t>(tokens_, 1))),
        blocks_(std::max<int64_t>((tokens_ + block_ - 1) / block_, 1)),
        nulls_(options.null_key ? 1 : 0),
        is_token_(inputs) {}

  int64_t block() const { return block_; }
  int64_t blocks() const { return blocks_; }
  // Returns the columns of S: the null block, where there is one, and then the blocks of tokens.
  int64_t columns() const { return nulls_ + blocks_; }
  // Tells whether sorted block u has column t of S in its sum.
  bool Takes(int64_t u, int64_t t) const { return !problem_.causal || t - nulls_ < u; }
  bool HasToken(int64_t t, int64_t r) const {
    const int64_t j = t * block_ + r;
    return j < tokens_ && is_token_(b_, j);
  }
  // Tells whether row r of sorted block u is a key.
  bool IsKey(int64_t u, int64_t r) const {
    bool is_key = false;
    for (int64_t t = 0; t < columns(); ++t) {
      is_key |= Takes(u, t) && (t < nulls_ || HasToken(t - nulls_, r));
    }
    return is_key;
  }

  // Returns S.
  Matrix Sort() const {
    Matrix s(blocks_, std::vector<double>(columns(), 0.0));
    const ConstTensorView given = inputs_.Get("sort");
    if (given.empty()) s = Balanced();
    for (int64_t u = 0; u < blocks_; ++u) {
      for (int64_t t = 0; t < columns(); ++t) {
        if (!given.empty()) s[u][t] = given.Get(given.Offset(b_, h_, u, t));
        if (!Takes(u, t)) s[u][t] = 0;
      }
    }
    return s;
  }

  // Returns sum_t S_ut K_t, row r, for a tensor with rows of tokens, whose null row is a parameter.
  std::vector<double> SortedRow(const Matrix& s, const DoubleTensor& of, const char* null_row,
                                int64_t channels, int64_t u, int64_t r) const {
    std::vector<double> sum(channels, 0.0);
    for (int64_t c = 0; c < channels && nulls_ > 0; ++c) {
      sum[c] = s[u][0] * Parameter(null_row, 0, c);
    }
    for (int64_t t = nulls_; t < columns(); ++t) {
      if (!Takes(u, t) || !HasToken(t - nulls_, r)) continue;
      const double* row = of.Row(b_, h_, (t - nulls_) * block_ + r);
      for (int64_t c = 0; c < channels; ++c) sum[c] += s[u][t] * row[c];
    }
    return sum;
  }

 private:
  double Parameter(const char* name, int64_t row, int64_t column) const {
    const ConstTensorView view = parameters_.at(name).view();
    return view.Get(view.rank == 3 ? view.Offset(h_, row, column) : view.Offset(h_, column));
  }

  // Returns x_j.
  std::vector<double> TokenRow(int64_t j) const {
    std::vector<double> x;
    const ConstTensorView q = inputs_.Get("q"), k = inputs_.Get("k"), hidden = inputs_.Get("x");
    if (options_.pooled == Pooled::kHidden) {
      for (int64_t c = 0; c < hidden.dim(2); ++c) x.push_back(hidden.Get(hidden.Offset(b_, j, c)));
      return x;
    }
    for (int64_t c = 0; c < problem_.head_dim && options_.pooled == Pooled::kQueriesAndKeys; ++c) {
      x.push_back(0);
      for (int64_t g = 0; g < problem_.group(); ++g) {
        x.back() += q.Get(q.Offset(b_, h_ * problem_.group() + g, j, c));
      }
    }
    for (int64_t c = 0; c < problem_.head_dim; ++c) x.push_back(k.Get(k.Offset(b_, h_, j, c)));
    return x;
  }

  int64_t Width() const {
    return options_.pooled == Pooled::kHidden           ? problem_.model_dim()
           : options_.pooled == Pooled::kQueriesAndKeys ? 2 * problem_.head_dim
                                                        : problem_.head_dim;
  }

  // Returns X_u.
  std::vector<double> PooledRow(int64_t u) const {
    const int64_t first = problem_.causal ? 0 : u * block_;
    const int64_t last = problem_.causal ? u * block_ : (u + 1) * block_ - 1;
    std::vector<double> sum(Width(), 0.0);
    for (int64_t j = first; j <= std::min(last, tokens_ - 1); ++j) {
      if (!is_token_(b_, j)) continue;
      const std::vector<double> x = TokenRow(j);
      for (size_t c = 0; c < x.size(); ++c) sum[c] += x[c];
    }
    return sum;
  }

  std::vector<double> Layer(const std::vector<double>& x, const char* weights, const char* bias,
                            int64_t units, bool relu) const {
    std::vector<double> y;
    for (int64_t n = 0; n < units; ++n) {
      double sum = Parameter(bias, 0, n);
      for (size_t c = 0; c < x.size(); ++c) {
        sum += Parameter(weights, static_cast<int64_t>(c), n) * x[c];
      }
      y.push_back(relu && sum < 0 ? 0 : sum);
    }
    return y;
  }

  // Returns (R_u + g_u) / temperature.
  std::vector<double> Scores(int64_t u) const {
    std::vector<double> scores;
    const ConstTensorView g = inputs_.Get("g"), logits = inputs_.Get("logits");
    if (options_.scores == SortScores::kGiven) {
      for (int64_t t = 0; t < columns(); ++t) {
        scores.push_back(logits.Get(logits.Offset(b_, h_, u, t)));
      }
    } else {
      std::vector<double> x = PooledRow(u);
      if (options_.hidden > 0) {
        x = Layer(x, "hidden_weights", "hidden_bias", options_.hidden, /*relu=*/true);
      }
      scores = Layer(x, "score_weights", "score_bias", columns(),
                     options_.scores != SortScores::kLinear);
    }
    for (int64_t t = 0; t < columns(); ++t) {
      if (options_.scores == SortScores::kLogRelu) scores[t] = std::log(scores[t] + 1e-6);
      if (options_.gumbel) scores[t] += g.Get(g.Offset(b_, h_, u, t));
      scores[t] /= options_.temperature;
    }
    return scores;
  }

  // Normalises a column by its sum; where causal, row u by the sum of the rows up to u.
  void NormaliseColumn(int64_t t, Matrix* a) const {
    double log_sum = kNotSeen;
    for (int64_t u = 0; u < blocks_; ++u) {
      if (!Takes(u, t)) continue;
      log_sum = LogSumExp({log_sum, (*a)[u][t]});
      if (problem_.causal) (*a)[u][t] -= log_sum;
    }
    for (int64_t u = 0; u < blocks_ && !problem_.causal; ++u) (*a)[u][t] -= log_sum;
  }

  Matrix Balanced() const {
    Matrix a;
    for (int64_t u = 0; u < blocks_; ++u) {
      a.push_back(Scores(u));
      for (int64_t t = 0; t < columns(); ++t) {
        if (!Takes(u, t)) a[u][t] = kNotSeen;
      }
    }
    for (int64_t n = 0; n < options_.iterations; ++n) {
      for (int64_t u = 0; u < blocks_; ++u) {
        if (!Takes(u, 0)) continue;
        const double log_sum_exp = LogSumExp(a[u]);
        for (double& logit : a[u]) logit -= log_sum_exp;
      }
      for (int64_t t = 0; t < columns(); ++t) NormaliseColumn(t, &a);
    }
    for (std::vector<double>& row : a) {
      for (double& logit : row) logit = std::exp(logit);
    }
    return a;
  }

  const Problem& problem_;
  const SinkhornOptions& options_;
  const NamedTensors& parameters_;
  const Inputs& inputs_;
  int64_t b_, h_;
  int64_t tokens_, block_, blocks_, nulls_;
  KeyMask is_token_;
};

// [sorted blocks; own tokens] of every head, to which the definition attends.
struct SortedTensors {
  Tensor k, v;
  Tensor sort;
  std::vector<std::vector<bool>> is_key;  // [batch], for the sorted rows
};

// Rounds the first `rows` rows to the dtype.
void RoundRows(Tensor* tensor, int64_t rows, DType dtype) {
  if (dtype == DType::kF32) return;
  const TensorView view = Slice(tensor->view(), 2, 0, rows);
  Tensor rounded(dtype, view.shape());
  CopyElements(view, rounded.view());
  CopyElements(rounded.view(), view);
}

SortedTensors SortByDefinition(const Problem& p, const SinkhornOptions& options,
                               const NamedTensors& parameters, const Inputs& inputs) {
  const DoubleTensor k(inputs.Get("k")), v(inputs.Get("v"));
  const Formula sizes(p, options, parameters, inputs, 0, 0);
  const int64_t n = sizes.blocks(), rows = n * sizes.block();
  const auto with_room = [&](const ConstTensorView& own) {
    Tensor all(DType::kF64, {p.batch, p.kv_heads, rows + p.kv_tokens, own.dim(3)});
    CopyElements(own, Slice(all.view(), 2, rows, p.kv_tokens));
    return all;
  };
  SortedTensors sorted;
  sorted.k = with_room(inputs.Get("k"));
  sorted.v = with_room(inputs.Get("v"));
  sorted.sort = Tensor(DType::kF64, {p.batch, p.kv_heads, n, sizes.columns()});
  sorted.is_key.assign(p.batch, std::vector<bool>(rows));
  for (int64_t head = 0; head < p.batch * p.kv_heads; ++head) {
    const int64_t b = head / p.kv_heads, h = head % p.kv_heads;
    const Formula formula(p, options, parameters, inputs, b, h);
    const Matrix s = formula.Sort();
    for (int64_t u = 0; u < n; ++u) {
      std::copy(s[u].begin(), s[u].end(), sorted.sort.view().MutableAt<double>(b, h, u));
      for (int64_t r = 0; r < sizes.block(); ++r) {
        const int64_t row = u * sizes.block() + r;
        const auto key = formula.SortedRow(s, k, "null_key", p.head_dim, u, r);
        const auto value = formula.SortedRow(s, v, "null_value", p.value_dim, u, r);
        std::copy(key.begin(), key.end(), sorted.k.view().MutableAt<double>(b, h, row));
        std::copy(value.begin(), value.end(), sorted.v.view().MutableAt<double>(b, h, row));
        sorted.is_key[b][row] = formula.IsKey(u, r);
      }
    }
  }
  RoundRows(&sorted.k, rows, p.dtype);
  RoundRows(&sorted.v, rows, p.dtype);
  return sorted;
}

}  // namespace

absl::Status Sinkhorn::Definition(const Problem& problem, const SinkhornOptions& options,
                                  const NamedTensors& parameters, const Inputs& inputs,
                                  const DefinitionRequest& request, NamedTensors* outputs) const {
  SortedTensors sorted = SortByDefinition(problem, options, parameters, inputs);
  const int64_t block = std::min(options.block, std::max<int64_t>(problem.kv_tokens, 1));
  const int64_t rows = sorted.k.dim(2) - problem.kv_tokens;
  Problem whole = problem;
  whole.kv_tokens = rows + problem.kv_tokens;
  Inputs of_whole;
  of_whole.Set("v", sorted.v.view());
  const DoubleTensor q(inputs.Get("q")), k(sorted.k.view());
  const KeyMask is_token(inputs);
  const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
  const auto sees = [&](int64_t b, int64_t i, int64_t key) {
    const int64_t j = key - rows;  // the token of the key, where the key is not of a sorted block
    if (j < 0 && !sorted.is_key[b][key]) return false;
    if (options.sorted_blocks > 0) return j < 0 && key / block < options.sorted_blocks;
    if (j < 0) return key / block == i / block;
    return j / block == i / block && is_token(b, j) && (!problem.causal || j <= i);
  };
  DefinitionRequest of_rows = request;
  of_rows.weights = false;  // sorted rows are no tokens
  DefineAttention(
      whole, of_whole, of_rows,
      [&](int64_t b, int64_t h, int64_t i, int64_t key) {
        if (!sees(b, i, key)) return kNotSeen;
        return scale * Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), key), problem.head_dim);
      },
      outputs);
  (*outputs)["sort"] = std::move(sorted.sort);
  return absl::OkStatus();
}

}  // namespace tfb::sinkhorn
