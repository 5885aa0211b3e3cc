#include "attention/blockwise/blockwise.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/flash/flash_layer.h"

namespace tfb::blockwise {
namespace {

const bool registered = RegisterTechnique<Blockwise>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "blockwise";
  info.family = "attention";
  info.title = "Blockwise attention (BlockBERT)";
  info.citation = "Qiu et al. 2020, arXiv:1911.02972v2, section 3.1";
  info.exactness = Exactness::kExact;
  info.budget_option = "blocks";
  info.growth = 2;
  info.devices = {Device::kCpu, Device::kCuda};
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

absl::Status Check(const Problem& problem, const BlockwiseOptions& options) {
  const int64_t shares = static_cast<int64_t>(options.shares.size());
  if (shares > options.blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("shares has ", shares, " entries; allowed are 1 to blocks, ", options.blocks));
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

class BlockwisePattern : public Pattern {
 public:
  BlockwisePattern(const Problem& problem, const BlockwiseOptions& options)
      : problem_(problem), blocks_(options.blocks) {
    if (HasShifts(options)) {
      shifts_ = BlockwiseShifts(options, problem.query_heads);
    } else {
      permutation_ = options.permutation;
    }
  }

  int64_t heads() const override { return problem_.query_heads; }

  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    return KeyBlock(head, i * blocks_ / problem_.query_tokens) == j * blocks_ / problem_.kv_tokens;
  }

  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    for (int64_t i = query_begin; i < query_end;) {
      const int64_t block = i * blocks_ / problem_.query_tokens;
      const int64_t end = std::min(query_end, Begin(block + 1, problem_.query_tokens));
      const int64_t seen = KeyBlock(head, block);
      const bool is_only_block = i == query_begin && end == query_end;
      ranges->push_back(
          {Begin(seen, problem_.kv_tokens), Begin(seen + 1, problem_.kv_tokens), is_only_block});
      i = end;
    }
  }

 private:
  int64_t KeyBlock(int64_t head, int64_t block) const {
    if (permutation_.empty()) return (block + shifts_[head]) % blocks_;
    const bool is_shared = static_cast<int64_t>(permutation_.size()) == blocks_;
    return permutation_[(is_shared ? 0 : head * blocks_) + block];
  }
  // Returns the first token i with i blocks / tokens >= block.
  int64_t Begin(int64_t block, int64_t tokens) const {
    return (block * tokens + blocks_ - 1) / blocks_;
  }

  Problem problem_;
  int64_t blocks_;
  std::vector<int64_t> shifts_;       // [query_heads], or empty where there is a permutation
  std::vector<int64_t> permutation_;  // [blocks] or [query_heads][blocks]
};

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

Blockwise::Blockwise() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Blockwise::MakeLayer(const Problem& problem,
                                                            const BlockwiseOptions& options,
                                                            Device device, uint64_t) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  return std::make_unique<FlashLayer>(problem, QkvInputs(problem), AttentionOutputs(problem),
                                      device, std::make_unique<BlockwisePattern>(problem, options));
}

absl::Status Blockwise::Definition(const Problem& problem, const BlockwiseOptions& options,
                                   const NamedTensors&, const Inputs& inputs,
                                   const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  const int64_t n = options.blocks;
  const std::vector<int64_t> shifts = BlockwiseShifts(options, problem.query_heads);
  const int64_t listed = static_cast<int64_t>(options.permutation.size());
  const auto pi = [&](int64_t h, int64_t u) {
    return HasShifts(options) ? (u + shifts[h]) % n : options.permutation[(h * n + u) % listed];
  };
  DefineMaskedAttention(
      problem, inputs, request, /*scale=*/0,
      [&](int64_t h, int64_t i, int64_t j) {
        return pi(h, i * n / problem.query_tokens) == j * n / problem.kv_tokens;
      },
      [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, outputs);
  return absl::OkStatus();
}

}  // namespace tfb::blockwise
