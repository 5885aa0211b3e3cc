// LSH attention by its formula, in float64.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "attention/lsh/lsh.h"
#include "attention/lsh/lsh_sizes.h"
#include "core/definition.h"
#include "core/status.h"

namespace tfb::lsh {
namespace {

// One head: the buckets of its tokens, and in how many ways each token sees another.
class Head {
 public:
  Head(const Problem& problem, const LshOptions& options) : problem_(problem), options_(options) {}

  // Appends a round, whose buckets are given; a padding token is behind all others.
  void AddRound(std::vector<int64_t> bucket) {
    const int64_t tokens = problem_.query_tokens;
    std::vector<int64_t> order(tokens), chunk(tokens);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t i, int64_t j) { return bucket[i] < bucket[j]; });
    for (int64_t place = 0; place < tokens; ++place) {
      chunk[order[place]] = place / LshChunk(options_, tokens);
      last_chunk_ = place / LshChunk(options_, tokens);
    }
    bucket_.push_back(std::move(bucket));
    chunk_.push_back(std::move(chunk));
  }

  // Returns N_ij.
  int64_t Count(int64_t i, int64_t j) const {
    int64_t count = 0;
    const size_t rounds = chunk_.size();
    for (size_t r = 0; r < rounds; ++r) {
      const int64_t back = chunk_[r][i] - chunk_[r][j];
      if (back == 0 || back == 1) {
        count += !options_.bucket_mask || bucket_[r][i] == bucket_[r][j];
      }
      if (!LshWraps(options_) || chunk_[r][i] != 0) continue;
      count += chunk_[(r + rounds - 1) % rounds][j] == last_chunk_;
    }
    return count;
  }

 private:
  const Problem& problem_;
  const LshOptions& options_;
  int64_t last_chunk_ = 0;
  std::vector<std::vector<int64_t>> bucket_, chunk_;  // [rounds][tokens]
};

// The hashes of all tokens: the given ones, or those of the formula. Where fp32 cannot tell which
// product is the largest, they are those that a layer computed, if these are admissible.
class Hashes {
 public:
  Hashes(const Problem& problem, const LshOptions& options, const NamedTensors& parameters,
         const Inputs& inputs, const DefinitionRequest& request)
      : problem_(problem),
        per_head_(options.per_head),
        factors_(LshFactors(options, problem.query_tokens)),
        q_(inputs.Get("q")),
        given_(inputs.Get("buckets")) {
    if (!factors_.empty()) rotations_ = DoubleTensor(parameters.at("rotations").view());
    if (request.computed != nullptr && request.computed->count("buckets") > 0) {
      computed_ = request.computed->at("buckets").view();
    }
  }

  int64_t buckets() const { return LshBuckets(factors_); }
  int64_t Of(int64_t b, int64_t h, int64_t i, int64_t round) const {
    if (!given_.empty()) {
      return std::clamp<int64_t>(*given_.At<int32_t>(b, h, i, round), 0, buckets() - 1);
    }
    int64_t computed = computed_.empty() ? 0 : *computed_.At<int32_t>(b, h, i, round);
    int64_t bucket = 0, step = 1, first = 0;
    for (const int64_t columns : factors_) {
      const int64_t word = computed % (2 * columns);
      bucket += step * OfFactor(b, h, i, round, first, columns, computed_.empty() ? -1 : word);
      computed /= 2 * columns;
      step *= 2 * columns;
      first += columns;
    }
    return bucket;
  }

 private:
  int64_t OfFactor(int64_t b, int64_t h, int64_t i, int64_t round, int64_t first, int64_t columns,
                   int64_t computed) const {
    const double* x = q_.Row(b, h, i);
    std::vector<double> product, error;
    for (int64_t n = 0; n < columns; ++n) {
      // In fp32 each term may lose as much as the smallest normal number, where it or x is denormal
      // (core/denormals.h).
      double sum = 0, magnitude = 0, denormal = 0;
      for (int64_t c = 0; c < problem_.head_dim; ++c) {
        const double rotation = rotations_.Row(per_head_ ? h : 0, c, round)[first + n];
        sum += x[c] * rotation;
        magnitude += std::abs(x[c] * rotation);
        denormal += std::ldexp(1 + std::abs(rotation), -126);
      }
      product.push_back(sum);
      error.push_back(static_cast<double>(problem_.head_dim) * UnitRoundoff(DType::kF32) *
                          magnitude +
                      denormal);
    }
    for (int64_t n = 0; n < columns; ++n) {
      product.push_back(-product[n]);
      error.push_back(error[n]);
    }
    int64_t best = 0;
    for (int64_t n = 1; n < 2 * columns; ++n) {
      if (product[n] > product[best]) best = n;
    }
    const bool ties = computed >= 0 && computed < 2 * columns &&
                      product[computed] + error[computed] >= product[best] - error[best];
    return ties ? computed : best;
  }

  const Problem& problem_;
  bool per_head_;
  std::vector<int64_t> factors_;
  DoubleTensor q_, rotations_;
  ConstTensorView given_, computed_;
};

// Returns the normalised vectors, in 16 bits where the problem is.
DoubleTensor KeysOf(const Problem& problem, const LshOptions& options, const DoubleTensor& q) {
  Tensor keys(DType::kF64,
              {problem.batch, problem.query_heads, problem.query_tokens, problem.head_dim});
  const int64_t channels = problem.head_dim;
  for (int64_t row = 0; row * channels < keys.num_elements(); ++row) {
    const double* x = q.data() + row * channels;
    const double norm = std::sqrt(Dot(x, x, channels) + LshKeyEpsilon(problem, options));
    for (int64_t c = 0; c < channels; ++c) {
      keys.view().Set(row * channels + c, norm == 0 ? 0 : x[c] / norm);
    }
  }
  if (problem.dtype != DType::kF32) keys = keys.CloneAs(problem.dtype);
  return DoubleTensor(keys.view());
}

}  // namespace

absl::Status Lsh::Definition(const Problem& problem, const LshOptions& options,
                             const NamedTensors& parameters, const Inputs& inputs,
                             const DefinitionRequest& request, NamedTensors* outputs) const {
  const int64_t tokens = problem.query_tokens, rounds = LshRounds(options);
  const Hashes hashes(problem, options, parameters, inputs, request);
  const KeyMask is_token(inputs);
  const DoubleTensor q(inputs.Get("q"));
  const std::vector<int64_t> rows = RowsOf(request, tokens);
  Tensor buckets(DType::kF64,
                 {problem.batch, problem.query_heads, static_cast<int64_t>(rows.size()), rounds});
  std::vector<Head> heads(problem.batch * problem.query_heads, Head(problem, options));
  const auto hash_head = [&](int64_t b, int64_t h, int64_t) {
    for (int64_t r = 0; r < rounds; ++r) {
      std::vector<int64_t> bucket;
      for (int64_t i = 0; i < tokens; ++i) bucket.push_back(hashes.Of(b, h, i, r));
      for (size_t n = 0; n < rows.size(); ++n) {
        *buckets.view().MutableAt<double>(b, h, static_cast<int64_t>(n), r) =
            static_cast<double>(bucket[rows[n]]);
      }
      for (int64_t i = 0; !LshIsWhole(options) && i < tokens; ++i) {
        if (!is_token(b, i)) bucket[i] = hashes.buckets();
      }
      heads[b * problem.query_heads + h].AddRound(std::move(bucket));
    }
  };
  ForEachRow(request.pool, problem.batch, problem.query_heads, 1, hash_head);
  const double scale = LshScale(problem, options);
  const DoubleTensor keys = KeysOf(problem, options, q);
  const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!is_token(b, j) || (problem.causal && j > i)) return kNotSeen;
    const int64_t count = heads[b * problem.query_heads + h].Count(i, j);
    if (count == 0) return kNotSeen;
    double s = scale * Dot(q.Row(b, h, i), keys.Row(b, h, j), problem.head_dim);
    if (i == j) s += options.self_bias;
    return options.dedup ? s : s + std::log(static_cast<double>(count));
  };
  DefineAttention(problem, inputs, request, score, outputs);
  (*outputs)["buckets"] = std::move(buckets);
  return absl::OkStatus();
}

}  // namespace tfb::lsh
