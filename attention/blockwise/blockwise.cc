#include "attention/blockwise/blockwise.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"

namespace tfb::blockwise {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info = {"blockwise", "attention", "Blockwise attention (BlockBERT)",
                        "Qiu et al. 2020, arXiv:1911.02972v2, section 3.1"};
  info.budget_option = "blocks";
  return info;
}

bool HasShifts(const BlockwiseOptions& options) {
  return options.permutation == std::vector<int64_t>{-1};
}

absl::Status CheckPermutation(const std::vector<int64_t>& list, int64_t begin, int64_t blocks) {
  std::vector<bool> is_taken(blocks, false);
  for (int64_t u = 0; u < blocks; ++u) {
    const int64_t t = list[begin + u];
    if (t < 0 || t >= blocks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "permutation names block ", t, "; allowed are 0 to blocks - 1, ", blocks - 1));
    }
    if (is_taken[t]) {
      return absl::InvalidArgumentError(absl::StrCat("permutation names block ", t, " twice"));
    }
    is_taken[t] = true;
  }
  return absl::OkStatus();
}

FunctionPattern PatternOf(const Problem& problem, const BlockwiseOptions& options) {
  const int64_t blocks = options.blocks, queries = problem.query_tokens, keys = problem.kv_tokens;
  std::vector<int64_t> shifts;
  if (HasShifts(options)) shifts = BlockwiseShifts(options, problem.query_heads);
  const auto key_block = [=, permutation = options.permutation](int64_t head, int64_t block) {
    if (!shifts.empty()) return (block + shifts[head]) % blocks;
    return permutation[(head * blocks + block) % static_cast<int64_t>(permutation.size())];
  };
  // Returns the first of `tokens` tokens i with i blocks / tokens >= block.
  const auto begin = [blocks](int64_t block, int64_t tokens) {
    return (block * tokens + blocks - 1) / blocks;
  };
  const auto add_keys = [=](int64_t head, int64_t i, KeyList* list) {
    const int64_t block = i * blocks / queries, seen = key_block(head, block);
    list->Add(begin(seen, keys), begin(seen + 1, keys));
    return begin(block + 1, queries);
  };
  return FunctionPattern(add_keys, problem.query_heads);
}

// Returns s_h by the formula of the header.
int64_t DefinedShift(const BlockwiseOptions& options, int64_t heads, int64_t h) {
  const int64_t n = options.blocks;
  const auto share = [&](int64_t s) {
    const bool is_paper = std::count(options.shares.begin(), options.shares.end(), 0) ==
                          static_cast<int64_t>(options.shares.size());
    if (is_paper) return s == 0 ? std::max<int64_t>(1, 7 - n) : int64_t{s < n};
    return s < static_cast<int64_t>(options.shares.size()) ? options.shares[s] : 0;
  };
  int64_t all = 0;
  for (int64_t s = 0; s < n; ++s) all += share(s);
  int64_t up_to = 0;
  for (int64_t s = 0;; ++s) {
    up_to += share(s);
    if (h == 0 ? up_to > 0 : (h + 1) * all <= heads * up_to) return s;
  }
}

class Blockwise : public FlashTechnique<BlockwiseOptions> {
 public:
  Blockwise() : FlashTechnique(Info()) {}

 private:
  absl::Status Check(const Problem& problem, const BlockwiseOptions& options) const override {
    const int64_t shares = static_cast<int64_t>(options.shares.size());
    if (shares > options.blocks) {
      return absl::InvalidArgumentError(absl::StrCat(
          "shares has ", shares, " entries; allowed are 1 to blocks, ", options.blocks));
    }
    if (HasShifts(options)) return absl::OkStatus();
    const int64_t size = static_cast<int64_t>(options.permutation.size());
    const int64_t of_all_heads = options.blocks * problem.query_heads;
    if (size != options.blocks && size != of_all_heads) {
      return absl::InvalidArgumentError(
          absl::StrCat("permutation has ", size, " entries; allowed are blocks, ", options.blocks,
                       ", or blocks for each of the query heads, ", of_all_heads));
    }
    for (int64_t begin = 0; begin < size; begin += options.blocks) {
      TFB_RETURN_IF_ERROR(CheckPermutation(options.permutation, begin, options.blocks));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    return FlashPlan(job.problem).Sees(PatternOf(job.problem, job.options));
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    const int64_t n = job.options.blocks;
    const std::vector<int64_t>& list = job.options.permutation;
    std::vector<int64_t> seen;  // [query_heads][n] pi_h(u)
    for (int64_t h = 0; h < job.problem.query_heads; ++h) {
      for (int64_t u = 0; u < n; ++u) {
        seen.push_back(list[0] < 0 ? (u + DefinedShift(job.options, job.problem.query_heads, h)) % n
                                   : list[(h * n + u) % static_cast<int64_t>(list.size())]);
      }
    }
    return PairScore::Sees([seen, n, problem = job.problem](int64_t h, int64_t i, int64_t j) {
      return seen[h * n + i * n / problem.query_tokens] == j * n / problem.kv_tokens;
    });
  }
};

const bool registered = RegisterTechnique<Blockwise>();

}  // namespace

std::vector<int64_t> BlockwiseShifts(const BlockwiseOptions& options, int64_t heads) {
  std::vector<int64_t> shares = options.shares;
  int64_t total = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  if (total == 0) {
    shares.assign(options.blocks, 1);
    shares[0] = std::max<int64_t>(1, 7 - options.blocks);
    total = shares[0] + options.blocks - 1;
  }
  std::vector<int64_t> shifts;
  int64_t shift = 0, up_to_shift = shares[0];
  const auto advance = [&] { up_to_shift += shares[++shift]; };
  while (up_to_shift == 0) advance();
  for (int64_t h = 0; h < heads; ++h) {
    while (h > 0 && (h + 1) * total > heads * up_to_shift) advance();
    shifts.push_back(shift);
  }
  return shifts;
}

}  // namespace tfb::blockwise
