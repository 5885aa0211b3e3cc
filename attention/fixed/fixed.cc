#include "attention/fixed/fixed.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"

namespace tfb::fixed {
namespace {

using Combine = FixedOptions::Combine;

// The places of keys: first all tokens in their order, for rows; from a whole tile on the summary
// tokens, block by block, for columns, so that the summary tokens of many blocks fill a tile.
class Places {
 public:
  Places(const FixedOptions& options, int64_t tokens)
      : tokens_(tokens),
        stride_(options.stride),
        width_(std::min(options.summary, stride_)),
        summaries_(options.summaries),
        first_(RoundUpToTile(tokens)) {}

  int64_t size() const { return first_ + SummariesBefore(tokens_ + stride_ - 1); }
  int64_t first_summary() const { return first_; }
  bool IsSummary(int64_t place) const { return place >= first_; }
  // Returns the number of summary tokens of the blocks that end at or before `token`.
  int64_t SummariesBefore(int64_t token) const { return token / stride_ * width_; }
  // Returns the token of a summary place for a key-value head. The last block's may lie beyond the
  // sequence.
  int64_t Token(int64_t kv_head, int64_t place) const {
    const int64_t n = place - first_, in_block = stride_ - (kv_head % summaries_ + 1) * width_;
    return n / width_ * stride_ + in_block + n % width_;
  }
  // Returns the token of each place, for each key-value head. Places of no token, which nothing
  // sees, read token 0.
  std::vector<int32_t> Order(int64_t kv_heads) const {
    std::vector<int32_t> order;
    order.reserve(kv_heads * size());
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int64_t place = 0; place < size(); ++place) {
        const int64_t token = IsSummary(place) ? Token(g, place) : place;
        order.push_back(token < tokens_ ? static_cast<int32_t>(token) : 0);
      }
    }
    return order;
  }

 private:
  static int64_t RoundUpToTile(int64_t tokens) {
    return (tokens + kFlashTile - 1) / kFlashTile * kFlashTile;
  }

  int64_t tokens_;
  int64_t stride_;
  int64_t width_;  // summary tokens of a block
  int64_t summaries_;
  int64_t first_;
};

// Returns which places a query sees: its own block's in the row, and other blocks' summaries in the
// column. Without a row the column has those of its own block, too.
FunctionPattern PatternOver(const Places& places, const Problem& problem,
                            const FixedOptions& options) {
  const auto sees_row = [options, group = problem.group()](int64_t head) {
    if (options.combine == Combine::kMerged) return true;
    return (options.combine == Combine::kPerHead ? head / group : options.layer) % 2 == 0;
  };
  const auto add_keys = [=, group = problem.group()](int64_t head, int64_t i, KeyList* keys) {
    const int64_t block = i / options.stride * options.stride;
    const bool row = sees_row(head);
    if (row) keys->Add(block, i + 1);
    if (!row || options.combine == Combine::kMerged) {
      const int64_t first = places.first_summary();
      int64_t end = first + places.SummariesBefore(block);
      while (!row && end < places.size() && places.Token(head / group, end) <= i) ++end;
      keys->Add(first, end);
    }
    return i + 1;
  };
  const bool per_head = options.combine == Combine::kPerHead || options.summaries > 1;
  return FunctionPattern(add_keys, per_head ? problem.query_heads : 1);
}

class Fixed : public FlashTechnique<FixedOptions> {
 public:
  Fixed()
      : FlashTechnique(SparseSelfAttention(
            {"fixed", "attention", "Sparse Transformer, fixed",
             "Child, Gray, Radford, Sutskever 2019, arXiv:1904.10509v1, sections 4.2 and 4.3"},
            /*budget_option=*/"stride", /*growth=*/1.5, Masking::kCausal)) {}

 private:
  absl::Status Check(const Problem&, const FixedOptions& options) const override {
    const int64_t fit = std::max<int64_t>(options.stride / options.summary, 1);
    if (options.summaries <= fit) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "option summaries is ", options.summaries, "; allowed with stride=", options.stride,
        " and summary=", options.summary, " are 1 to ", fit));
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const Places places(job.options, job.problem.query_tokens);
    const int64_t orders = job.options.summaries > 1 ? job.problem.kv_heads : 1;
    return FlashPlan(job.problem)
        .Sees(PatternOver(places, job.problem, job.options))
        .KeyOrder(places.Order(orders), orders);
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    return PairScore::Sees(
        [options = job.options, group = job.problem.group()](int64_t h, int64_t i, int64_t j) {
          const int64_t l = options.stride, c = options.summary;  // j <= i: the problem is causal
          const int64_t g = h / group, s = g % options.summaries;
          const bool in_row = j / l == i / l;
          const bool in_column = j % l >= l - (s + 1) * c && j % l < l - s * c;
          if (options.combine == Combine::kMerged) return in_row || in_column;
          return (options.combine == Combine::kPerHead ? g : options.layer) % 2 == 0 ? in_row
                                                                                     : in_column;
        });
  }
};

const bool registered = RegisterTechnique<Fixed>();

}  // namespace
}  // namespace tfb::fixed
