#include "adaptive/universal_transformer/universal_transformer_definition.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/definition.h"
#include "core/layers/attention/position_time.h"
#include "core/layers/attention/projected_attention.h"
#include "core/layers/layer_definitions.h"
#include "core/status.h"

namespace tfb::universal_transformer {
namespace {

using HaltFrom = UniversalTransformerOptions::HaltFrom;
using HaltWhen = UniversalTransformerOptions::HaltWhen;
using Output = UniversalTransformerOptions::Output;

// [tokens of all batch rows][channels].
using Rows = std::vector<std::vector<double>>;

// Returns the bound of the error of a layer's sum of probabilities: a state between steps is of
// order 1 and carries the roundings of attention, which in 16-bit problems are of queries, keys,
// values and results; the slope of p is 1/4 at most.
double SumError(DType dtype) { return 1e-4 + (dtype == DType::kF32 ? 0 : 4 * UnitRoundoff(dtype)); }

class Network {
 public:
  Network(const Problem& problem, const UniversalTransformerOptions& options,
          const NamedTensors& parameters, const Inputs& inputs, const DefinitionRequest& request)
      : problem_(problem),
        options_(options),
        request_(request),
        parameters_(parameters),
        key_mask_(inputs.Get("key_mask")),
        is_token_(inputs),
        x_(inputs.Get("x")),
        encoding_(options.encoding, problem.model_dim(), parameters) {
    for (const auto& [name, tensor] : parameters) values_.try_emplace(name, tensor.view());
    if (request.computed != nullptr && request.computed->count("steps") > 0) {
      computed_ = request.computed->at("steps").view();
    }
  }

  absl::Status Forward() {
    const int64_t rows = problem_.batch * problem_.query_tokens, width = problem_.model_dim();
    for (int64_t r = 0; r < rows; ++r) {
      const double* x = x_.Row(Batch(r), Token(r));
      state_.emplace_back(x, x + width);
    }
    shown_ = Rows(rows);
    shown_inner_ = Rows(rows);
    output_ = Rows(rows, std::vector<double>(width, 0.0));
    total_ = ponder_ = std::vector<double>(rows, 0.0);
    steps_ = std::vector<int64_t>(rows, 0);
    runs_.resize(rows);
    for (int64_t r = 0; r < rows; ++r) runs_[r] = is_token_(Batch(r), Token(r));
    for (int64_t n = 1; n <= options_.steps; ++n) TFB_RETURN_IF_ERROR(Step(n));
    return absl::OkStatus();
  }

  void Write(NamedTensors* outputs) const {
    const Shape shape = {problem_.batch, problem_.query_tokens};
    Tensor out(DType::kF64, {problem_.batch, problem_.query_tokens, problem_.model_dim()});
    Tensor ponder(DType::kF64, shape), steps(DType::kF64, shape);
    for (int64_t r = 0; r < static_cast<int64_t>(state_.size()); ++r) {
      std::copy(output_[r].begin(), output_[r].end(),
                out.view().MutableAt<double>(Batch(r), Token(r)));
      ponder.span<double>()[r] = ponder_[r];
      steps.span<double>()[r] = static_cast<double>(steps_[r]);
    }
    (*outputs)["out"] = std::move(out);
    if (!options_.halts()) return;
    (*outputs)["ponder"] = std::move(ponder);
    (*outputs)["steps"] = std::move(steps);
  }

 private:
  int64_t Batch(int64_t row) const { return row / problem_.query_tokens; }
  int64_t Token(int64_t row) const { return row % problem_.query_tokens; }
  const DoubleTensor& Value(const std::string& name) const { return values_.at(name); }

  absl::Status Step(int64_t n) {
    const int64_t rows = static_cast<int64_t>(state_.size()), width = problem_.model_dim();
    Rows u = state_;
    ForEachOf(request_.pool, rows, [&](int64_t r) {
      for (int64_t c = 0; c < width; ++c) u[r][c] += encoding_(n - 1, Token(r), c);
    });
    TFB_ASSIGN_OR_RETURN(const Rows a, Attend(u));
    std::vector<bool> computed = runs_;
    for (int64_t r = 0; r < rows && options_.recomputes(); ++r) {
      computed[r] = is_token_(Batch(r), Token(r));
    }
    for (int64_t r = 0; r < rows; ++r) {
      if (computed[r]) shown_[r] = a[r];
    }
    const Rows s = Transit(a, computed);
    for (int64_t r = 0; r < rows; ++r) {
      if (!computed[r]) continue;
      state_[r] = s[r];
      if (runs_[r]) Take(r, n, options_.halt_from == HaltFrom::kBefore ? u[r] : s[r]);
    }
    return absl::OkStatus();
  }

  // Adds step n's state to the token's output, and decides whether it is the last one.
  void Take(int64_t r, int64_t n, const std::vector<double>& of) {
    steps_[r] = n;
    if (!options_.halts()) {
      output_[r] = state_[r];
      return;
    }
    const DoubleTensor &w = Value("halting.w"), &b = Value("halting.b");
    const double p = 1 / (1 + std::exp(-(Dot(w.data(), of.data(), w.size()) + b.at(0))));
    const double remainder = 1 - total_[r];
    total_[r] += p;
    const bool reaches = Reaches(r, n);
    const bool is_last = n == options_.steps;
    const bool takes_remainder = reaches || (is_last && options_.remainder_at_limit);
    const double weight = takes_remainder ? remainder : p;
    ponder_[r] = static_cast<double>(n) + (takes_remainder ? remainder : 0);
    runs_[r] = !reaches && !is_last;
    for (size_t c = 0; c < output_[r].size(); ++c) {
      const double state = state_[r][c], before = output_[r][c];
      switch (options_.output) {
        case Output::kAccumulated:
          output_[r][c] = before + weight * state;
          break;
        case Output::kBasic:
          output_[r][c] = weight * state + (1 - weight) * before;
          break;
        case Output::kFrozen:
          output_[r][c] = state;
          break;
      }
    }
  }

  // Tells whether a token stops here; where derivatives are taken, as at their point.
  bool Reaches(int64_t r, int64_t n) const {
    double reaches = FindReached(r, n) ? 1 : 0;
    if (request_.stopped != nullptr) request_.stopped->Choose(absl::MakeSpan(&reaches, 1));
    return reaches != 0;
  }
  bool FindReached(int64_t r, int64_t n) const {
    const bool is_near = std::abs(total_[r] - options_.threshold) <= SumError(problem_.dtype);
    if (is_near && !computed_.empty() && n < options_.steps) {
      return computed_.Get(computed_.Offset(Batch(r), Token(r))) <= static_cast<double>(n);
    }
    return options_.halt_when == HaltWhen::kAbove ? total_[r] > options_.threshold
                                                  : total_[r] >= options_.threshold;
  }

  // Computes A of all tokens.
  absl::StatusOr<Rows> Attend(const Rows& u) const {
    Tensor hidden(DType::kF64, {problem_.batch, problem_.query_tokens, problem_.model_dim()});
    for (size_t r = 0; r < u.size(); ++r) {
      std::copy(u[r].begin(), u[r].end(),
                hidden.view().MutableAt<double>(Batch(static_cast<int64_t>(r)),
                                                Token(static_cast<int64_t>(r))));
    }
    NamedTensors attended;
    TFB_RETURN_IF_ERROR(layers::DefineProjectedAttention(
        problem_, {"dense", {}}, parameters_, "attention.", {hidden.view(), {}, key_mask_},
        request_.OfPart(), &attended));
    const DoubleTensor mixed(attended.at("out").view());
    Rows a = u;
    for (int64_t r = 0; r < static_cast<int64_t>(a.size()); ++r) {
      for (size_t c = 0; c < a[r].size(); ++c) a[r][c] += mixed.Row(Batch(r), Token(r))[c];
      Normalize("attention_norm", &a[r]);
    }
    return a;
  }

  // Computes S of some tokens.
  Rows Transit(const Rows& a, const std::vector<bool>& computed) {
    std::vector<int64_t> running;
    for (size_t r = 0; r < a.size(); ++r) {
      if (computed[r]) running.push_back(static_cast<int64_t>(r));
    }
    Rows s = a;
    const auto first = [&](int64_t r) {
      return options_.convolves() ? Convolved(shown_, r, "ff.k1") : a[r];
    };
    const Rows inner = Products(running, first, "ff.w1", "ff.b1");
    for (size_t n = 0; n < running.size(); ++n) {
      shown_inner_[running[n]] = inner[n];
      for (double& value : shown_inner_[running[n]]) value = std::max(value, 0.0);
    }
    const auto second = [&](int64_t r) {
      return options_.convolves() ? Convolved(shown_inner_, r, "ff.k2") : shown_inner_[r];
    };
    const Rows outer = Products(running, second, "ff.w2", "ff.b2");
    for (size_t n = 0; n < running.size(); ++n) {
      std::vector<double>& row = s[running[n]];
      for (size_t c = 0; c < row.size(); ++c) row[c] += outer[n][c];
      Normalize("ff_norm", &row);
    }
    return s;
  }

  std::vector<double> Convolved(const Rows& shown, int64_t r, const std::string& name) const {
    const DoubleTensor& kernel = Value(name);
    const int64_t size = parameters_.at(name).dim(0), channels = parameters_.at(name).dim(1);
    const int64_t reach = problem_.causal ? size - 1 : (size - 1) / 2;
    std::vector<double> sum(channels, 0.0);
    for (int64_t j = 0; j < size; ++j) {
      const int64_t t = Token(r) + j - reach;
      if (t < 0 || t >= problem_.query_tokens || !is_token_(Batch(r), t)) continue;
      for (int64_t c = 0; c < channels; ++c) {
        sum[c] += kernel.Row(j)[c] * shown[Batch(r) * problem_.query_tokens + t][c];
      }
    }
    return sum;
  }

  // row(r) W + b of the rows that run.
  Rows Products(const std::vector<int64_t>& running,
                const std::function<std::vector<double>(int64_t r)>& row, const std::string& matrix,
                const std::string& bias) const {
    std::vector<double> x;
    for (const int64_t r : running) {
      const std::vector<double> added = row(r);
      x.insert(x.end(), added.begin(), added.end());
    }
    const DoubleTensor& w = Value(matrix);
    const int64_t count = static_cast<int64_t>(running.size());
    const std::vector<double> y = Affine(x.data(), count, w, Value(bias), request_.pool);
    Rows products;
    for (int64_t n = 0; n < count; ++n) {
      const double* first = y.data() + n * w.channels();
      products.emplace_back(first, first + w.channels());
    }
    return products;
  }

  void Normalize(const std::string& name, std::vector<double>* row) const {
    layers::DefineNormOfRow(Value(name + ".gamma").data(), Value(name + ".beta").data(),
                            static_cast<int64_t>(row->size()), row->data());
  }

  const Problem& problem_;
  const UniversalTransformerOptions& options_;
  const DefinitionRequest& request_;
  const NamedTensors& parameters_;
  std::map<std::string, DoubleTensor> values_;  // tensors of the parameters
  ConstTensorView key_mask_;
  KeyMask is_token_;
  DoubleTensor x_;
  layers::DefinedPositionTime encoding_;
  ConstTensorView computed_;
  Rows state_, shown_, shown_inner_, output_;
  std::vector<double> total_, ponder_;
  std::vector<int64_t> steps_;
  std::vector<bool> runs_;
};

}  // namespace

absl::Status DefineUniversalTransformer(const Problem& problem,
                                        const UniversalTransformerOptions& options,
                                        const NamedTensors& parameters, const Inputs& inputs,
                                        const DefinitionRequest& request, NamedTensors* outputs) {
  Network network(problem, options, parameters, inputs, request);
  TFB_RETURN_IF_ERROR(network.Forward());
  network.Write(outputs);
  return absl::OkStatus();
}

}  // namespace tfb::universal_transformer
