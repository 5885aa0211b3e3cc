#include "harness/judge/extrapolation.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "core/status.h"
#include "harness/judge/evaluate.h"

namespace tfb {
namespace {

constexpr int64_t kLeastTokens = 64;

// Returns the inputs of the problem of the last tokens, cut from all of them; absent where an input
// depends on the number of tokens in another way than by a dimension of that size.
absl::StatusOr<std::optional<Inputs>> LastTokens(const EvaluateRequest& request,
                                                 const Problem& last) {
  const Job& job = request.job;
  TFB_ASSIGN_OR_RETURN(const std::vector<TensorSpec> specs,
                       job.technique->InputSpecs(last, job.options));
  Inputs inputs;
  for (const TensorSpec& spec : specs) {
    const auto found = request.inputs->find(spec.name);
    if (found == request.inputs->end() || spec.name == job.technique->info().selection) {
      continue;
    }
    ConstTensorView view = found->second.view();
    for (int axis = 0; axis < view.rank; ++axis) {
      const int64_t size = spec.shape[axis];
      if (view.dim(axis) == size) continue;
      if (view.dim(axis) != job.problem.kv_tokens || size != last.kv_tokens) {
        return std::optional<Inputs>();
      }
      view = Slice(view, axis, view.dim(axis) - size, size);
    }
    inputs.Set(spec.name, view);
  }
  return std::optional<Inputs>(std::move(inputs));
}

bool SameShapes(const NamedTensors& a, const NamedTensors& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.first == y.first && x.second.shape() == y.second.shape();
         });
}

// Returns the mean over heads and rows: `places` are those in `all`, and `rows` those of the
// shorter sequence, of which `last` has either these or all.
std::optional<Extrapolation> MeanOf(const ConstTensorView& all, const std::vector<int64_t>& places,
                                    const ConstTensorView& last, const std::vector<int64_t>& rows) {
  const bool has_asked = last.dim(2) == static_cast<int64_t>(rows.size());
  const auto row = [](const ConstTensorView& weights, int64_t b, int64_t h, int64_t n) {
    return absl::MakeConstSpan(weights.At<double>(b, h, n), weights.dim(3));
  };
  Extrapolation sum;
  double count = 0;
  for (int64_t b = 0; b < last.dim(0); ++b) {
    for (int64_t h = 0; h < last.dim(1); ++h) {
      for (size_t n = 0; n < places.size(); ++n) {
        const int64_t place = has_asked ? static_cast<int64_t>(n) : rows[n];
        const std::optional<Extrapolation> one =
            CompareLengths(row(all, b, h, places[n]), row(last, b, h, place));
        if (!one.has_value()) continue;
        sum.change += one->change;
        sum.reshape += one->reshape;
        ++count;
      }
    }
  }
  if (count == 0) return std::nullopt;
  return Extrapolation{sum.change / count, sum.reshape / count};
}

}  // namespace

std::optional<Extrapolation> CompareLengths(absl::Span<const double> all,
                                            absl::Span<const double> last) {
  const absl::Span<const double> common = all.subspan(all.size() - last.size());
  const double common_sum = std::accumulate(common.begin(), common.end(), 0.0);
  const double beyond = std::accumulate(all.begin(), common.begin(), 0.0);
  const double last_sum = std::accumulate(last.begin(), last.end(), 0.0);
  if (last_sum <= 0 || common_sum + beyond <= 0) return std::nullopt;
  Extrapolation result{beyond / 2, common_sum > 0 ? 0 : 1.0};
  for (size_t j = 0; j < last.size(); ++j) {
    result.change += std::abs(common[j] - last[j]) / 2;
    if (common_sum > 0) result.reshape += std::abs(common[j] / common_sum - last[j]) / 2;
  }
  return result;
}

absl::StatusOr<std::optional<Extrapolation>> MeasureExtrapolation(const EvaluateRequest& request,
                                                                  const NamedTensors& parameters,
                                                                  const ConstTensorView& weights) {
  const std::optional<Extrapolation> none;
  const Job& job = request.job;
  const Problem& problem = job.problem;
  const int64_t tokens = problem.kv_tokens;
  if (tokens < kLeastTokens || problem.query_tokens != tokens) return none;
  Problem last = problem;
  last.query_tokens = last.kv_tokens = tokens / kExtrapolationGrowth;
  // An unsupported shorter problem is not a failure of the longer one.
  const auto layer = job.technique->Create(last, job.options, job.device, /*seed=*/1);
  if (!layer.ok() || !SameShapes((*layer)->parameters(), parameters)) return none;
  TFB_ASSIGN_OR_RETURN(const std::optional<Inputs> inputs, LastTokens(request, last));
  if (!inputs.has_value()) return none;

  const bool has_all = weights.dim(2) == problem.query_tokens;
  std::vector<int64_t> places, rows;  // places in `weights`, of the last tokens
  for (int64_t n = 0; n < weights.dim(2); ++n) {
    const int64_t row = has_all ? n : request.rows[n];
    if (row < tokens - last.kv_tokens / 4) continue;
    places.push_back(n);
    rows.push_back(row - (tokens - last.kv_tokens));
  }
  if (places.empty()) return none;
  DefinitionRequest definition;
  definition.rows = rows;
  definition.weights = true;
  definition.pool = request.pool;
  NamedTensors defined;
  TFB_RETURN_IF_ERROR(
      job.technique->Define(last, job.options, parameters, *inputs, definition, &defined));
  const auto found = defined.find("weights");
  if (found == defined.end()) return none;
  return MeanOf(weights, places, found->second.view(), rows);
}

}  // namespace tfb
