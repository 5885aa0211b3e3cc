// The Routing Transformer's attention by its formula, in float64.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "attention/routing/routing.h"
#include "attention/routing/routing_sizes.h"
#include "core/definition.h"
#include "core/status.h"

namespace tfb::routing {
namespace {

// The clusters of one batch row and head, for queries or for keys.
class Members {
 public:
  // Tells whether two tokens are the same, so that their scores are equal in any precision.
  using Same = std::function<bool(int64_t i, int64_t j)>;

  // Chooses the members. scores[c][i] come with the bound of fp32's error; `computed[c]` says
  // whether a layer made token i a member, and counts where fp32 may find it so. It is empty where
  // nothing was computed.
  static std::vector<std::vector<bool>> Choose(const std::vector<std::vector<double>>& scores,
                                               const std::vector<std::vector<double>>& error,
                                               const std::vector<std::vector<bool>>& computed,
                                               int64_t size, const Same& same) {
    std::vector<std::vector<bool>> members;
    for (size_t c = 0; c < scores.size(); ++c) {
      const bool given = !computed.empty() && MayBe(scores[c], error[c], computed[c], size, same);
      members.push_back(given ? computed[c] : Largest(scores[c], size));
    }
    return members;
  }

 private:
  static std::vector<bool> Largest(const std::vector<double>& scores, int64_t size) {
    std::vector<int64_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      return std::isnan(scores[j]) ? !std::isnan(scores[i]) : scores[i] > scores[j];
    });
    std::vector<bool> is_member(scores.size());
    for (int64_t n = 0; n < size; ++n) is_member[order[n]] = true;
    return is_member;
  }
  // Tells whether no token outside has a score above that of one inside by more than fp32's errors,
  // and the first of equal tokens are inside.
  static bool MayBe(const std::vector<double>& scores, const std::vector<double>& error,
                    const std::vector<bool>& computed, int64_t size, const Same& same) {
    if (std::count(computed.begin(), computed.end(), true) != size) return false;
    double least = std::numeric_limits<double>::infinity(), most = kNotSeen;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (computed[i]) least = std::min(least, scores[i] + error[i]);
      if (!computed[i]) most = std::max(most, scores[i] - error[i]);
    }
    if (least < most) return false;
    for (size_t j = 0; j < scores.size(); ++j) {
      // Equal tokens have the same bound, and no member's score is below `least`.
      if (computed[j] || scores[j] + error[j] < least) continue;
      for (size_t i = j + 1; i < scores.size(); ++i) {
        if (computed[i] && scores[i] == scores[j] && same(i, j)) return false;
      }
    }
    return true;
  }
};

// Memberships by the definition: [batch][heads] of [clusters][tokens].
class Assignment {
 public:
  Assignment(const Problem& problem, const RoutingOptions& options, const NamedTensors& parameters,
             const Inputs& inputs, const DefinitionRequest& request, int64_t set)
      : problem_(problem),
        options_(options),
        sizes_(problem, options),
        set_(set),
        is_token_(inputs) {
    const ConstTensorView given = inputs.Get(set == 0 ? "q" : "k");
    vectors_ = RoutingNormalized(problem, options.norm, given);
    if (options.norm == RoutingOptions::Norm::kUnit) lengths_of_ = DoubleTensor(given);
    centroids_ = DoubleTensor(parameters.at("centroids").view());
    given_ = inputs.Get("members");
    if (request.computed != nullptr && request.computed->count("members") > 0) {
      computed_ = request.computed->at("members").view();
    }
  }

  const DoubleTensor& vectors() const { return vectors_; }
  std::vector<std::vector<bool>> Of(int64_t b, int64_t h) const {
    std::vector<std::vector<double>> scores(sizes_.clusters), error(sizes_.clusters);
    std::vector<std::vector<bool>> computed;
    for (int64_t c = 0; c < sizes_.clusters; ++c) {
      for (int64_t i = 0; i < problem_.query_tokens; ++i) {
        AddScore(b, h, c, i, &scores[c], &error[c]);
      }
    }
    if (!computed_.empty() && given_.empty()) computed = Marks(computed_, b, h);
    const auto same = [&](int64_t i, int64_t j) {
      const double* x = vectors_.Row(b, h, i);
      return (!is_token_(b, i) && !is_token_(b, j)) ||
             std::equal(x, x + problem_.head_dim, vectors_.Row(b, h, j));
    };
    return Members::Choose(scores, error, computed, sizes_.size, same);
  }

 private:
  void AddScore(int64_t b, int64_t h, int64_t c, int64_t i, std::vector<double>* scores,
                std::vector<double>* error) const {
    if (!given_.empty()) {
      scores->push_back(*given_.At<uint8_t>(b, h, i, set_ * sizes_.clusters + c) != 0 ? 1 : 0);
      return error->push_back(0);
    }
    const double* x = vectors_.Row(b, h, i);
    const double* mu = centroids_.Row(h, c);
    // In fp32 a term may lose as much as the smallest normal number where it is denormal, and where
    // the token or its mean is, that number over the root of the norm (core/denormals.h).
    const double root = RootOf(b, h, i);
    double magnitude = 0, denormal = 0;
    for (int64_t n = 0; n < problem_.head_dim; ++n) {
      magnitude += std::abs(x[n] * mu[n]);
      denormal += (1 + 2 * std::abs(mu[n]) / root) * 0x1p-126;
    }
    // These are as many roundings as products and the norm have.
    const double roundings = static_cast<double>(2 * problem_.head_dim + 8);
    scores->push_back(is_token_(b, i) ? Dot(x, mu, problem_.head_dim) : kNotSeen);
    const double bound = roundings * UnitRoundoff(DType::kF32) * magnitude + denormal;
    error->push_back(is_token_(b, i) ? bound : 0);
  }
  // Returns a lower bound of what a token's vector is divided by.
  double RootOf(int64_t b, int64_t h, int64_t i) const {
    if (options_.norm == RoutingOptions::Norm::kLayerNorm) return std::sqrt(kRoutingNormEpsilon);
    const double* x = lengths_of_.Row(b, h, i);
    return std::max(std::sqrt(Dot(x, x, problem_.head_dim)), 0x1p-126);
  }
  std::vector<std::vector<bool>> Marks(const ConstTensorView& view, int64_t b, int64_t h) const {
    std::vector<std::vector<bool>> marks(sizes_.clusters);
    for (int64_t c = 0; c < sizes_.clusters; ++c) {
      for (int64_t i = 0; i < problem_.query_tokens; ++i) {
        marks[c].push_back(*view.At<uint8_t>(b, h, i, set_ * sizes_.clusters + c) != 0);
      }
    }
    return marks;
  }

  const Problem& problem_;
  const RoutingOptions& options_;
  RoutingSizes sizes_;
  int64_t set_;
  KeyMask is_token_;
  DoubleTensor vectors_, centroids_, lengths_of_;
  ConstTensorView given_, computed_;
};

// One head's rows: the mean over clusters of the attention within them.
class ClusterRows {
 public:
  ClusterRows(const Problem& problem, const RoutingOptions& options, const Inputs& inputs,
              const Assignment& queries, const Assignment& keys)
      : problem_(problem),
        scale_(RoutingScale(problem, options)),
        self_bias_(options.self_bias),
        queries_(queries.vectors()),
        keys_(keys.vectors()),
        v_(inputs.Get("v")),
        is_token_(inputs) {
    if (options.scored == RoutingOptions::Scored::kNormalized) return;
    queries_ = DoubleTensor(inputs.Get("q"));
    keys_ = problem.causal
                ? RoutingNormalized(problem, RoutingOptions::Norm::kUnit, inputs.Get("q"))
                : DoubleTensor(inputs.Get("k"));
  }

  void Add(int64_t b, int64_t h, int64_t i, const std::vector<std::vector<bool>>& query_members,
           const std::vector<std::vector<bool>>& key_members, double* y, double* weights) const {
    double clusters = 0;
    for (const auto& members : query_members) clusters += members[i];
    for (size_t c = 0; c < query_members.size(); ++c) {
      if (!query_members[c][i]) continue;
      std::vector<double> score(problem_.kv_tokens, kNotSeen);
      double max = kNotSeen, sum = 0;
      for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
        if (!key_members[c][j] || !is_token_(b, j) || (problem_.causal && j > i)) continue;
        score[j] = scale_ * Dot(queries_.Row(b, h, i), keys_.Row(b, h, j), problem_.head_dim) +
                   (i == j ? self_bias_ : 0);
        max = score[j] > max ? score[j] : max;
      }
      for (const double s : score) sum += s == kNotSeen ? 0 : std::exp(s - max);
      for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
        if (score[j] == kNotSeen) continue;
        const double weight = std::exp(score[j] - max) / sum / clusters;
        if (weights != nullptr) weights[j] += weight;
        AddTimes(weight, v_.Row(b, h, j), problem_.value_dim, y);
      }
    }
  }

 private:
  const Problem& problem_;
  double scale_;
  double self_bias_;
  DoubleTensor queries_;
  DoubleTensor keys_;
  DoubleTensor v_;
  KeyMask is_token_;
};

}  // namespace

DoubleTensor RoutingNormalized(const Problem& problem, RoutingOptions::Norm norm,
                               const ConstTensorView& view) {
  Tensor rows(DType::kF64, view.shape());
  CopyElements(view, rows.view());
  const int64_t channels = view.dim(3);
  for (int64_t n = 0; n < rows.num_elements(); n += channels) {
    double* x = rows.span<double>().data() + n;
    if (norm == RoutingOptions::Norm::kUnit) {
      const double length = std::sqrt(Dot(x, x, channels));
      for (int64_t c = 0; c < channels; ++c) x[c] = length == 0 ? 0 : x[c] / length;
      continue;
    }
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < channels; ++c) mean += x[c] / static_cast<double>(channels);
    for (int64_t c = 0; c < channels; ++c) {
      variance += (x[c] - mean) * (x[c] - mean) / static_cast<double>(channels);
    }
    const double root = std::sqrt(variance + kRoutingNormEpsilon);
    for (int64_t c = 0; c < channels; ++c) x[c] = (x[c] - mean) / root;
  }
  if (problem.dtype != DType::kF32) rows = rows.CloneAs(problem.dtype);
  return DoubleTensor(rows.view());
}

absl::Status Routing::Definition(const Problem& problem, const RoutingOptions& options,
                                 const NamedTensors& parameters, const Inputs& inputs,
                                 const DefinitionRequest& request, NamedTensors* outputs) const {
  const RoutingSizes sizes(problem, options);
  const Assignment queries(problem, options, parameters, inputs, request, 0);
  const Assignment other(problem, options, parameters, inputs, request, sizes.sets - 1);
  const ClusterRows in_clusters(problem, options, inputs, queries, other);
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  const int64_t row_count = static_cast<int64_t>(rows.size());

  // Computes all heads as if local, then the clustered ones over them.
  Inputs local = inputs;
  if (problem.causal) local.Set("k", inputs.Get("q"));
  DefineMaskedAttention(
      problem, local, request, 0,
      [&](int64_t, int64_t i, int64_t j) {
        return std::abs(i / options.local_block - j / options.local_block) <= 1;
      },
      [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, outputs);
  outputs->erase("log_sum_exp");  // a mean of softmaxes has no log-sum-exp
  Tensor members(DType::kF64,
                 {problem.batch, problem.query_heads, row_count, sizes.sets * sizes.clusters});
  Fill(members.view(), 0);
  const auto define_head = [&](int64_t b, int64_t clustered, int64_t) {
    const int64_t h = sizes.local_heads + clustered;
    const auto of_queries = queries.Of(b, h), of_keys = other.Of(b, h);
    for (int64_t r = 0; r < row_count; ++r) {
      double* y = outputs->at("out").view().MutableAt<double>(b, h, r);
      std::fill_n(y, problem.value_dim, 0.0);
      double* weights = nullptr;
      if (request.weights) {
        weights = outputs->at("weights").view().MutableAt<double>(b, h, r);
        std::fill_n(weights, problem.kv_tokens, 0.0);
      }
      in_clusters.Add(b, h, rows[r], of_queries, of_keys, y, weights);
      double* mark = members.view().MutableAt<double>(b, h, r);
      for (int64_t c = 0; c < sizes.clusters; ++c) {
        mark[c] = of_queries[c][rows[r]];
        if (sizes.sets == 2) mark[sizes.clusters + c] = of_keys[c][rows[r]];
      }
    }
  };
  ForEachRow(request.pool, problem.batch, problem.query_heads - sizes.local_heads, 1, define_head);
  (*outputs)["members"] = std::move(members);
  return absl::OkStatus();
}

}  // namespace tfb::routing
