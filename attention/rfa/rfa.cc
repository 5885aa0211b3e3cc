#include "attention/rfa/rfa.h"

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

namespace tfb::rfa {
namespace {

using Kernel = RfaOptions::Kernel;
using Gate = RfaOptions::Gate;

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "rfa";
  info.family = "attention";
  info.title = "Random Feature Attention: Fourier features of unit vectors, gated or not";
  info.citation = "Peng et al. 2021, arXiv:2103.02143v2, section 3";
  info.exactness = Exactness::kApproximate;
  info.budget_option = "features";
  info.growth = 1;
  return info;
}

FeatureMap MapOf(const RfaOptions& options) {
  FeatureMap map;
  map.projections = options.rows();
  map.feature = options.kernel == Kernel::kGaussian ? Feature::kSinCos : Feature::kRelu;
  map.stabiliser = KeyStabiliser::kNone;
  map.per_head = true;
  map.input_scale = static_cast<float>(1 / options.sigma);
  map.unit = true;
  map.length_epsilon = static_cast<float>(options.length_epsilon);
  map.gated = options.gate != Gate::kNone;
  map.constant = 1 / std::sqrt(static_cast<double>(options.rows()));
  map.denominator_floor = options.denominator_floor;
  return map;
}

Tensor DrawW(const RfaOptions& options, const Problem& problem, uint64_t seed, int64_t setups) {
  Tensor w(DType::kF32, {problem.kv_heads, options.rows(), problem.head_dim});
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    const RandomStream stream(seed, absl::StrCat("w", setups, "/", h));
    const TensorView head(w.view().MutableAt<float>(h), DType::kF32,
                          {options.rows(), problem.head_dim});
    DrawFeatureRows(stream, options.orthogonal, RowNorms::kChi, head);
  }
  return w;
}

Tensor DrawGate(const RfaOptions& options, const Problem& problem, uint64_t seed) {
  Tensor gate(DType::kF32, {problem.kv_heads, problem.head_dim + 1});
  FillNormal(&gate, seed, "gate", 0, 1 / std::sqrt(static_cast<double>(problem.head_dim)));
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    *gate.view().MutableAt<float>(h, problem.head_dim) = static_cast<float>(options.gate_bias);
  }
  return gate;
}

struct Parameters {
  static absl::StatusOr<Parameters> Of(const RfaOptions& options, const NamedTensors& tensors) {
    Parameters parameters;
    const auto read = [&](const char* name, DoubleTensor* to) {
      const auto found = tensors.find(name);
      if (found == tensors.end()) {
        return absl::InvalidArgumentError(absl::StrCat("parameter ", name, " is missing"));
      }
      *to = DoubleTensor(found->second.view());
      return absl::OkStatus();
    };
    TFB_RETURN_IF_ERROR(read("w", &parameters.w));
    if (options.channel_scale) {
      TFB_RETURN_IF_ERROR(read("channel_scale", &parameters.channel_scale));
    }
    if (options.gate != Gate::kNone) TFB_RETURN_IF_ERROR(read("gate", &parameters.gate));
    return parameters;
  }
  DoubleTensor w, channel_scale, gate;
};

struct KeyGate {
  double keeps;  // g
  double takes;  // 1 - g
};

// The float64 definition: the features and gates of one key-value head.
class Formula {
 public:
  Formula(const RfaOptions& options, const Parameters& parameters, int64_t head, int64_t head_dim)
      : options_(options), head_dim_(head_dim) {
    for (int64_t r = 0; r < options.rows(); ++r) {
      const double* row = parameters.w.Row(head, r);
      rows_.emplace_back(row, row + head_dim);
      for (int64_t c = 0; options.channel_scale && c < head_dim; ++c) {
        rows_.back()[c] *= parameters.channel_scale.Row(head)[c];
      }
    }
    if (options.gate == Gate::kNone) return;
    gate_.assign(parameters.gate.Row(head), parameters.gate.Row(head) + head_dim + 1);
  }

  std::vector<double> Features(const double* x) const {
    const double length = std::sqrt(Dot(x, x, head_dim_));
    std::vector<double> u(x, x + head_dim_), features;
    for (double& c : u) {
      c = length < std::ldexp(1, -60) ? 0 : c / (length + options_.length_epsilon);
    }
    const double factor = 1 / std::sqrt(static_cast<double>(rows_.size()));
    for (const std::vector<double>& row : rows_) {
      const double projection = Dot(row.data(), u.data(), head_dim_) / options_.sigma;
      if (options_.kernel == Kernel::kArccos) {
        features.push_back(factor * std::max(projection, 0.0));
      } else {
        features.push_back(factor * std::sin(projection));
        features.push_back(factor * std::cos(projection));
      }
    }
    return features;
  }

  KeyGate GateOf(const double* key) const {
    const double logit = Dot(gate_.data(), key, head_dim_) + gate_[head_dim_];
    return {1 / (1 + std::exp(-logit)), 1 / (1 + std::exp(logit))};
  }

 private:
  const RfaOptions& options_;
  int64_t head_dim_;
  std::vector<std::vector<double>> rows_;
  std::vector<double> gate_;
};

// Returns c_ij of the keys j before `end`, where end - 1 is the last that row i sees.
std::vector<double> KeyFactors(const std::vector<bool>& is_token, const std::vector<KeyGate>& gates,
                               int64_t end) {
  std::vector<double> factors(is_token.size(), 0.0);
  for (int64_t t = 0; t < end; ++t) {
    if (!is_token[t]) continue;
    if (gates.empty()) {
      factors[t] = 1;
      continue;
    }
    for (int64_t j = 0; j < t; ++j) factors[j] *= gates[t].keeps;
    factors[t] = gates[t].takes;
  }
  return factors;
}

double Held(double denominator, double floor) {
  if (!(std::abs(denominator) < floor)) return denominator;
  return denominator < 0 ? -floor : floor;
}

class Rfa : public TechniqueOf<RfaOptions> {
 public:
  Rfa() : TechniqueOf(Info()) {}

 private:
  std::vector<TensorSpec> WrittenTensors(const Problem& problem, const RfaOptions&) const override {
    return {AttentionOutputs(problem)[0]};
  }

  absl::Status Check(const Problem& problem, const RfaOptions& options) const override {
    if (options.kernel == Kernel::kGaussian && options.features % 2 != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("features is ", options.features,
                       "; the gaussian kernel has a sine and a cosine a row: an even number"));
    }
    if (options.gate != Gate::kNone && !problem.causal) {
      return absl::InvalidArgumentError(
          "gate key is for causal problems; allowed here is gate none");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const RfaOptions& options, Device device,
                                                   uint64_t seed) const override {
    LinearParameters parameters;
    parameters.draw = [options, problem, seed](int64_t setups) {
      return DrawW(options, problem, seed, setups);
    };
    parameters.redraw = options.redraw;
    if (options.gate == Gate::kKey) parameters.gate = DrawGate(options, problem, seed);
    if (options.channel_scale) {
      parameters.channel_scale = Tensor(DType::kF32, {problem.kv_heads, problem.head_dim});
      Fill(parameters.channel_scale.view(), 1);
    }
    return MakeLinearLayer(problem, QkvInputs(problem), WrittenTensors(problem, options), device,
                           MapOf(options), std::move(parameters));
  }

  absl::Status Definition(const Problem& problem, const RfaOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    TFB_ASSIGN_OR_RETURN(const Parameters read, Parameters::Of(options, parameters));
    const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k")), v(inputs.Get("v"));
    const KeyMask mask(inputs);
    const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
    const int64_t row_count = static_cast<int64_t>(rows.size()), keys = problem.kv_tokens;
    Tensor out(DType::kF64, {problem.batch, problem.query_heads, row_count, problem.value_dim});
    Tensor weights;
    if (request.weights) {
      weights = Tensor(DType::kF64, {problem.batch, problem.query_heads, row_count, keys});
    }
    const auto define_head = [&](int64_t b, int64_t h, int64_t) {
      const int64_t kv_head = h / problem.group();
      const Formula formula(options, read, kv_head, problem.head_dim);
      std::vector<bool> is_token(keys);
      std::vector<std::vector<double>> phi_k;
      std::vector<KeyGate> gates;
      for (int64_t j = 0; j < keys; ++j) {
        is_token[j] = mask(b, j);
        phi_k.push_back(formula.Features(k.Row(b, kv_head, j)));
        if (options.gate == Gate::kKey) gates.push_back(formula.GateOf(k.Row(b, kv_head, j)));
      }
      for (int64_t r = 0; r < row_count; ++r) {
        const int64_t end =
            problem.causal ? std::clamp<int64_t>(rows[r] + problem.causal_offset() + 1, 0, keys)
                           : keys;
        const std::vector<double> factors = KeyFactors(is_token, gates, end);
        const std::vector<double> phi_q = formula.Features(q.Row(b, h, rows[r]));
        std::vector<double> products(keys, 0.0);
        double denominator = 0;
        for (int64_t j = 0; j < end; ++j) {
          if (!is_token[j]) continue;
          products[j] = factors[j] * Dot(phi_q.data(), phi_k[j].data(), phi_q.size());
          denominator += products[j];
        }
        denominator = Held(denominator, options.denominator_floor);
        double* y = out.view().MutableAt<double>(b, h, r);
        std::fill_n(y, problem.value_dim, 0.0);
        for (int64_t j = 0; j < keys; ++j) {
          const double weight =
              j < end && is_token[j] && denominator != 0 ? products[j] / denominator : 0;
          if (request.weights) *weights.view().MutableAt<double>(b, h, r, j) = weight;
          if (j >= end || !is_token[j]) continue;
          AddTimes(weight, v.Row(b, kv_head, j), problem.value_dim, y);
        }
      }
    };
    ForEachRow(request.pool, problem.batch, problem.query_heads, 1, define_head);
    (*outputs)["out"] = std::move(out);
    if (request.weights) (*outputs)["weights"] = std::move(weights);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Rfa>();

}  // namespace
}  // namespace tfb::rfa
