// Tests the stated costs of a layer: FLOPs of the pairs that its definition keeps, and bytes.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

// Returns the cost after Setup and a Run, since some costs are known only then.
std::optional<Cost> CostOf(Trial* trial) {
  if (trial->Run().empty()) return std::nullopt;
  return trial->layer().cost();
}

// Returns the pairs of a query and a key to which the definition gives weight, over batch and
// heads, or nothing where it has no weights.
std::optional<double> KeptPairs(Trial* trial) {
  const NamedTensors reference = trial->Define(/*weights=*/true);
  const auto weights = reference.find("weights");
  if (weights == reference.end()) return std::nullopt;
  const auto all = weights->second.span<double>();
  return static_cast<double>(
      std::count_if(all.begin(), all.end(), [](double weight) { return weight > 0; }));
}

// Returns the elements of the floating-point parameters; with `last_dim`, of those whose rows have
// that many channels.
double ParameterElements(const Layer& layer, int64_t last_dim = 0) {
  double elements = 0;
  for (const auto& [name, tensor] : layer.parameters()) {
    if (!IsFloating(tensor.dtype())) continue;
    if (last_dim > 0 && tensor.shape().back() != last_dim) continue;
    elements += static_cast<double>(tensor.num_elements());
  }
  return elements;
}

// One more channel of the values costs a multiply-add for each kept pair, and no more than one for
// each query and row of parameters that are added to values. A count that forgets heads or batches,
// is wrong by a factor, or takes head_dim for value_dim, is outside.
void ExpectValuesCostTheKeptPairs(const Job& job, double flops, double pairs) {
  constexpr int64_t kMore = 8;
  Problem wider = job.problem;
  wider.value_dim += kMore;
  const auto trial = Trial::Make(On(wider, job));
  if (trial == nullptr) return;
  const std::optional<Cost> cost = CostOf(trial.get());
  ASSERT_TRUE(cost.has_value() && cost->flops.has_value());
  const double rows = static_cast<double>(job.problem.batch * job.problem.query_heads) *
                      static_cast<double>(job.problem.query_tokens);
  const double table_rows =
      ParameterElements(trial->layer(), wider.value_dim) / static_cast<double>(wider.value_dim);
  const double grown = *cost->flops - flops;
  EXPECT_GE(grown, 2 * kMore * pairs) << pairs << " pairs are kept";
  EXPECT_LE(grown, 2 * kMore * (pairs + rows * table_rows)) << pairs << " pairs are kept";
}

// The FLOPs are 2 (head_dim + value_dim) for every pair to which the definition gives weight, and a
// few for every channel of a token. A rule on scores, which has parameters, may add as much as
// another product of head_dim channels to a pair, and one with each row of its parameters to a
// query; layers with projections and several attentions are held to hand counts in their own tests.
void FlopsAreThoseOfTheKeptPairs(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const std::optional<Cost> cost = CostOf(trial.get());
  if (!cost.has_value()) return;
  if (!cost->flops.has_value()) return Skip("cost().flops is not known");
  EXPECT_GT(*cost->flops, 0);
  if (!trial->RequireExact()) return;
  const std::optional<double> pairs = KeptPairs(trial.get());
  if (!pairs.has_value()) return Skip("the definition has no weights");
  const double least =
      2 * *pairs * static_cast<double>(job.problem.head_dim + job.problem.value_dim);
  EXPECT_GE(*cost->flops, least) << *pairs << " pairs are kept";
  const double model_dim = static_cast<double>(job.problem.query_heads * job.problem.head_dim);
  const double tokens =
      static_cast<double>(job.problem.batch * (job.problem.query_tokens + job.problem.kv_tokens));
  if (trial->inputs().count("q") == 0) {
    EXPECT_LE(*cost->flops, 4 * least + tokens * 32 * model_dim * model_dim);
    return;
  }
  const double parameters = ParameterElements(trial->layer());
  const double of_rule =
      parameters == 0 ? 0
                      : 2 * *pairs * static_cast<double>(job.problem.head_dim) +
                            2 * tokens * static_cast<double>(job.problem.query_heads) * parameters;
  EXPECT_LE(*cost->flops, least + of_rule + 4 * tokens * model_dim) << *pairs << " pairs are kept";
  ExpectValuesCostTheKeptPairs(job, *cost->flops, *pairs);
}

double BytesOf(const std::vector<TensorSpec>& specs, bool optional) {
  double bytes = 0;
  for (const TensorSpec& spec : specs) {
    if (spec.optional != optional || spec.name == "log_sum_exp") continue;
    bytes += static_cast<double>(NumElements(spec.shape) * SizeOf(spec.dtype));
  }
  return bytes;
}

// Tells whether a matrix with this number of rows is a projection.
bool IsChannels(int64_t rows, const Problem& problem) {
  return rows == problem.model_dim() || rows == problem.query_heads * problem.head_dim ||
         rows == problem.query_heads * problem.value_dim ||
         rows == problem.kv_heads * problem.head_dim ||
         rows == problem.kv_heads * problem.value_dim;
}

// The bytes are those of required inputs and outputs and of parameters, once each. Rows of a table
// of positions beyond the sequence need not be read; an optional output that a layer always writes
// may count.
void BytesAreThoseOfTheTensors(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const std::optional<Cost> cost = CostOf(trial.get());
  if (!cost.has_value()) return;
  if (!cost->bytes.has_value()) return Skip("cost().bytes is not known");
  const Layer& layer = trial->layer();
  double bytes = BytesOf(layer.inputs(), false) + BytesOf(layer.outputs(), false);
  double unread = 0;
  for (const auto& [name, tensor] : layer.parameters()) {
    bytes += static_cast<double>(tensor.bytes());
    if (tensor.shape().size() < 2) continue;
    const int64_t rows = tensor.dim(static_cast<int>(tensor.shape().size()) - 2);
    if (rows <= job.problem.kv_tokens || IsChannels(rows, job.problem)) continue;
    unread += static_cast<double>(tensor.bytes()) *
              static_cast<double>(rows - job.problem.kv_tokens) / static_cast<double>(rows);
  }
  const double written = BytesOf(layer.outputs(), true);
  EXPECT_TRUE(*cost->bytes == bytes || *cost->bytes == bytes - unread ||
              *cost->bytes == bytes + written)
      << *cost->bytes << " bytes; required tensors have " << bytes << ", rows beyond the sequence "
      << unread << " and optional outputs " << written;
}

// Adds problems whose values have other channels than their keys, with heads in groups and without.
std::vector<Problem> WithOtherValues() {
  std::vector<Problem> problems = UsualBoth();
  for (const bool groups : {true, false}) {
    Problem problem = Usual(/*causal=*/groups);
    problem.value_dim = 24;
    if (groups) problem.query_heads = 2 * problem.kv_heads;
    problems.push_back(problem);
  }
  return problems;
}

}  // namespace

std::vector<Case> CostCases() {
  return {
      {"FlopsAreThoseOfTheKeptPairs", "", WithOtherValues(), FlopsAreThoseOfTheKeptPairs},
      {"BytesAreThoseOfTheTensors", "", WithOtherValues(), BytesAreThoseOfTheTensors},
  };
}

}  // namespace tfb::conformance
