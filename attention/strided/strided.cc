#include "attention/strided/strided.h"

#include <numeric>
#include <vector>

#include "core/flash/flash_technique.h"
#include "core/schedule/residue_order.h"

namespace tfb::strided {
namespace {

using Combine = StridedOptions::Combine;

// Returns how many tokens before the query the row begins.
int64_t RowReach(const StridedOptions& options) {
  return options.stride - (options.bandwidth == StridedOptions::Bandwidth::kCode ? 1 : 0);
}

// Returns the pattern over places of the residue order in which a query sees those of its residue, at
// least `least` steps back.
FunctionPattern Column(const ResidueOrder& order, int64_t least) {
  return FunctionPattern([order, least](int64_t, int64_t i, KeyList* keys) {
    keys->Add(order.Residue(i).first, i - least + 1);
    return i + 1;
  });
}

// Key-value heads take turns: the row in the order of the tokens, the column in that of residues.
bool IsRow(int64_t kv_head) { return kv_head % 2 == 0; }

FunctionPattern Alternating(const Problem& problem, const BandPattern& row,
                            const FunctionPattern& column) {
  const auto add_keys = [=, group = problem.group()](int64_t head, int64_t i, KeyList* keys) {
    return IsRow(head / group) ? row.AddKeys(0, i, keys) : column.AddKeys(0, i, keys);
  };
  return FunctionPattern(add_keys, problem.query_heads);
}

// Returns the order of each key-value head's pattern.
std::vector<int32_t> OrdersOfHeads(const Problem& problem, const ResidueOrder& order) {
  std::vector<int32_t> tokens;
  for (int64_t g = 0; g < problem.kv_heads; ++g) {
    tokens.insert(tokens.end(), order.tokens().begin(), order.tokens().end());
    if (IsRow(g)) std::iota(tokens.end() - problem.query_tokens, tokens.end(), 0);
  }
  return tokens;
}

class Strided : public FlashTechnique<StridedOptions> {
 public:
  Strided()
      : FlashTechnique(SparseSelfAttention(
            {"strided", "attention", "Sparse Transformer, strided",
             "Child, Gray, Radford, Sutskever 2019, arXiv:1904.10509v1, sections 4.2 and 4.3"},
            /*budget_option=*/"stride", /*growth=*/1.5, Masking::kCausal)) {}

 private:
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const StridedOptions& options = job.options;
    const ResidueOrder order(job.problem.query_tokens, options.stride);
    const BandPattern row(-RowReach(options), 0);
    FlashPlan plan(job.problem);
    if (options.combine == Combine::kPerHead) {
      return plan.Sees(Alternating(job.problem, row, Column(order, 0)))
          .Order(OrdersOfHeads(job.problem, order), job.problem.kv_heads);
    }
    if (options.combine == Combine::kInterleaved && options.layer % 2 != 0) {
      return plan.Sees(Column(order, 0)).Order(order.tokens());
    }
    plan.Sees(row);
    if (options.combine == Combine::kInterleaved) return plan;
    const int64_t lacking = RowReach(options) / options.stride + 1;  // steps that the row lacks
    return plan.AddPart().Sees(Column(order, lacking)).Order(order.tokens());
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    return PairScore::Sees(
        [options = job.options, group = job.problem.group()](int64_t h, int64_t i, int64_t j) {
          const int64_t l = options.stride;  // j <= i: the problem is causal
          const bool is_paper = options.bandwidth == StridedOptions::Bandwidth::kPaper;
          const bool in_row = is_paper ? j >= i - l : j > i - l;
          const bool in_column = (i - j) % l == 0;
          if (options.combine == Combine::kMerged) return in_row || in_column;
          const bool is_per_head = options.combine == Combine::kPerHead;
          return (is_per_head ? h / group : options.layer) % 2 == 0 ? in_row : in_column;
        });
  }
};

const bool registered = RegisterTechnique<Strided>();

}  // namespace
}  // namespace tfb::strided
