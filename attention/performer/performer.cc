#include "attention/performer/performer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/linear/feature_matrix.h"
#include "core/linear/linear_layer.h"
#include "core/random.h"

namespace tfb::performer {
namespace {

using Kernel = PerformerOptions::Kernel;

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "performer";
  info.family = "attention";
  info.title = "Performer: positive orthogonal random features (FAVOR+)";
  info.citation = "Choromanski et al. 2021, arXiv:2009.14794v4, section 2";
  info.exactness = Exactness::kApproximate;
  info.budget_option = "features";
  info.growth = 1;
  return info;
}

Tensor DrawW(const PerformerOptions& options, const Problem& problem, uint64_t seed,
             int64_t setups) {
  const std::string name = setups == 0 ? "w" : absl::StrCat("w", setups);
  const auto draw = [&](const std::string& stream, const TensorView& rows) {
    DrawFeatureRows(RandomStream(seed, stream), options.orthogonal, options.norms, rows);
  };
  if (!options.per_head) {
    Tensor w(DType::kF32, {options.rows(), problem.head_dim});
    draw(name, w.view());
    return w;
  }
  Tensor w(DType::kF32, {problem.kv_heads, options.rows(), problem.head_dim});
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    draw(absl::StrCat(name, "/", h),
         TensorView(w.view().MutableAt<float>(h), DType::kF32, {options.rows(), problem.head_dim}));
  }
  return w;
}

bool HasScale(const PerformerOptions& options) {
  return options.kernel != Kernel::kRelu || options.relu_scale;
}

FeatureMap MapOf(const PerformerOptions& options, int64_t head_dim) {
  FeatureMap map;
  map.projections = options.rows();
  map.per_head = options.per_head;
  map.feature = options.kernel == Kernel::kSoftmax      ? Feature::kExp
                : options.kernel == Kernel::kHyperbolic ? Feature::kExpPair
                                                        : Feature::kRelu;
  map.stabiliser = !options.stabilise ? KeyStabiliser::kNone
                   : options.key_maximum == PerformerOptions::KeyMaximum::kSequence
                       ? KeyStabiliser::kSequence
                       : KeyStabiliser::kRunning;
  if (HasScale(options))
    map.input_scale = static_cast<float>(std::pow(static_cast<double>(head_dim), -0.25));
  const bool relu = options.kernel == Kernel::kRelu;
  map.constant = relu ? 1 : 1 / std::sqrt(static_cast<double>(map.features()));
  map.epsilon = relu ? options.relu_epsilon : options.epsilon;
  map.denominator_epsilon = options.denominator_epsilon;
  return map;
}

// The numbers of one token in the formula.
struct Projected {
  std::vector<double> products;  // w_r . x, and -w_r . x after them for hyperbolic
  double half_square;            // |x|^2 / 2
  double maximum;                // the maximum of the products
};

// The float64 definition, feature by feature.
class Formula {
 public:
  // W is that of key-value head `head`.
  Formula(const Problem& problem, const PerformerOptions& options, const DoubleTensor& w,
          int64_t head)
      : head_dim_(problem.head_dim),
        options_(options),
        w_(w),
        head_(options.per_head ? head : 0),
        scale_(HasScale(options) ? std::pow(static_cast<double>(problem.head_dim), -0.25) : 1) {}

  Projected Project(const double* row) const {
    std::vector<double> x(row, row + head_dim_);
    for (double& value : x) value *= scale_;
    Projected projected;
    projected.half_square = Dot(x.data(), x.data(), head_dim_) / 2;
    for (int64_t r = 0; r < options_.rows(); ++r)
      projected.products.push_back(Dot(w_.Row(head_, r), x.data(), head_dim_));
    for (int64_t r = 0; options_.kernel == Kernel::kHyperbolic && r < options_.rows(); ++r) {
      projected.products.push_back(-projected.products[r]);
    }
    projected.maximum = *std::max_element(projected.products.begin(), projected.products.end());
    return projected;
  }

  // Returns the number of which s is the maximum. Where no epsilon is added any s gives the same
  // ratio, so the largest exponent itself is taken, which underflows for no norm.
  double StabiliserOf(const Projected& token) const {
    if (options_.kernel == Kernel::kRelu) return 0;
    if (options_.epsilon == 0 && options_.denominator_epsilon == 0)
      return token.maximum - token.half_square;
    return options_.stabilise ? token.maximum : 0;
  }

  std::vector<double> Features(const Projected& token, double s) const {
    std::vector<double> features;
    const double count = static_cast<double>(token.products.size());
    for (const double product : token.products) {
      features.push_back(options_.kernel == Kernel::kRelu
                             ? std::max(product, 0.0) + options_.relu_epsilon
                             : (std::exp(product - token.half_square - s) + options_.epsilon) /
                                   std::sqrt(count));
    }
    return features;
  }

 private:
  int64_t head_dim_;
  const PerformerOptions& options_;
  const DoubleTensor& w_;
  int64_t head_;
  double scale_;
};

// The keys of one key-value head. Their features are cached while callers ask for the same
// stabiliser: a running maximum changes a few times in a sequence.
class Keys {
 public:
  Keys(const Formula& formula, const DoubleTensor& k, int64_t b, int64_t head, int64_t tokens)
      : formula_(formula), features_(tokens) {
    for (int64_t j = 0; j < tokens; ++j) projected_.push_back(formula.Project(k.Row(b, head, j)));
  }
  int64_t size() const { return static_cast<int64_t>(projected_.size()); }
  double StabiliserOf(int64_t j) const { return formula_.StabiliserOf(projected_[j]); }
  const std::vector<double>& Features(int64_t j, double s) {
    if (s != s_) features_.assign(features_.size(), {});
    s_ = s;
    if (features_[j].empty()) features_[j] = formula_.Features(projected_[j], s);
    return features_[j];
  }

 private:
  const Formula& formula_;
  std::vector<Projected> projected_;
  std::vector<std::vector<double>> features_;  // features with stabiliser s_, if computed
  double s_ = 0;
};

struct Row {
  std::vector<double> weights;  // w_ij
  double log_sum_exp = kNotSeen;
};

// Returns the row of the query `q`, which sees the keys with `sees` and subtracts the maximum over
// those with `in_maximum`.
Row RowOf(const Formula& formula, const double* q, Keys* keys, double denominator_epsilon,
          const std::vector<bool>& sees, const std::vector<bool>& in_maximum) {
  Row row;
  row.weights.assign(keys->size(), 0.0);
  if (std::find(sees.begin(), sees.end(), true) == sees.end()) return row;
  double s = kNotSeen;
  for (int64_t j = 0; j < keys->size(); ++j) {
    if (in_maximum[j]) s = std::max(s, keys->StabiliserOf(j));
  }
  const Projected query = formula.Project(q);
  const double query_s = formula.StabiliserOf(query);
  const std::vector<double> phi_q = formula.Features(query, query_s);
  double denominator = 0;
  for (int64_t j = 0; j < keys->size(); ++j) {
    if (!sees[j]) continue;
    row.weights[j] =
        Dot(phi_q.data(), keys->Features(j, s).data(), static_cast<int64_t>(phi_q.size()));
    denominator += row.weights[j];
  }
  for (const double feature : phi_q) denominator += denominator_epsilon * feature;
  row.log_sum_exp = std::log(denominator) + query_s + s;
  for (double& weight : row.weights) weight = denominator == 0 ? 0 : weight / denominator;
  return row;
}

class Performer : public TechniqueOf<PerformerOptions> {
 public:
  Performer() : TechniqueOf(Info()) {}

 private:
  absl::Status Check(const Problem&, const PerformerOptions& options) const override {
    if (options.kernel != Kernel::kHyperbolic || options.features % 2 == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("features is ", options.features,
                     "; the hyperbolic kernel has two features a row of W: an even number"));
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const PerformerOptions& options, Device device,
                                                   uint64_t seed) const override {
    LinearParameters parameters;
    parameters.draw = [options, problem, seed](int64_t setups) {
      return DrawW(options, problem, seed, setups);
    };
    parameters.redraw = options.redraw;
    return MakeLinearLayer(problem, QkvInputs(problem), AttentionOutputs(problem), device,
                           MapOf(options, problem.head_dim), std::move(parameters));
  }

  absl::Status Definition(const Problem& problem, const PerformerOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const auto w = parameters.find("w");
    if (w == parameters.end()) return absl::InvalidArgumentError("parameter w is missing");
    const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k")), v(inputs.Get("v"));
    const KeyMask is_token(inputs);
    const DoubleTensor matrix(w->second.view());
    const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
    const int64_t row_count = static_cast<int64_t>(rows.size());
    Tensor out(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.value_dim});
    Tensor lse(DType::kF64, {problem.batch, problem.query_heads, row_count});
    Tensor weights;
    if (request.weights) {
      weights =
          Tensor(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.kv_tokens});
    }
    const auto define_row = [&](const Formula& formula, int64_t b, int64_t h, int64_t r,
                                Keys* keys) {
      std::vector<bool> sees, in_maximum;
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        const bool later = problem.causal && j > rows[r] + problem.causal_offset();
        sees.push_back(is_token(b, j) && !later);
        const bool all = options.key_maximum == PerformerOptions::KeyMaximum::kSequence;
        in_maximum.push_back(is_token(b, j) && (all || !later));
      }
      const Row row =
          RowOf(formula, q.Row(b, h, rows[r]), keys, options.denominator_epsilon, sees, in_maximum);
      *lse.view().MutableAt<double>(b, h, r) = row.log_sum_exp;
      double* y = out.view().MutableAt<double>(b, h, r);
      std::fill_n(y, problem.value_dim, 0.0);
      for (int64_t j = 0; j < problem.kv_tokens; ++j) {
        if (request.weights) *weights.view().MutableAt<double>(b, h, r, j) = row.weights[j];
        if (!sees[j]) continue;
        const double* value = v.Row(b, h / problem.group(), j);
        AddTimes(row.weights[j], value, problem.value_dim, y);
      }
    };
    ForEachRow(request.pool, problem.batch, problem.kv_heads, 1,
               [&](int64_t b, int64_t kv_head, int64_t) {
                 const Formula formula(problem, options, matrix, kv_head);
                 Keys keys(formula, k, b, kv_head, problem.kv_tokens);
                 for (int64_t g = 0; g < problem.group(); ++g) {
                   for (int64_t r = 0; r < row_count; ++r) {
                     define_row(formula, b, kv_head * problem.group() + g, r, &keys);
                   }
                 }
               });
    (*outputs)["out"] = std::move(out);
    (*outputs)["log_sum_exp"] = std::move(lse);
    if (request.weights) (*outputs)["weights"] = std::move(weights);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Performer>();

}  // namespace
}  // namespace tfb::performer
