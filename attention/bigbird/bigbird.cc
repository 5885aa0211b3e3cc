#include "attention/bigbird/bigbird.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"
#include "core/random.h"

namespace tfb::bigbird {
namespace {

// The blocks that the tokens are cut into.
class Blocks {
 public:
  Blocks(const BigBirdOptions& options, int64_t tokens)
      : size_(options.block),
        tokens_(tokens),
        is_internal_(options.construction == BigBirdOptions::Construction::kItc),
        begin_(is_internal_ ? 0 : std::min(options.global_tokens, tokens)),
        count_((tokens - begin_ + size_ - 1) / size_) {}

  int64_t count() const { return count_; }
  int64_t begin() const { return begin_; }  // the first token of the first block
  int64_t Of(int64_t token) const { return (token - begin_) / size_; }
  int64_t Begin(int64_t block) const { return begin_ + block * size_; }
  int64_t End(int64_t block) const { return std::min(tokens_, Begin(block + 1)); }
  bool IsGlobalBlock(int64_t block) const {
    return is_internal_ && (block == 0 || block == count_ - 1);
  }
  bool IsGlobal(int64_t token) const { return token < begin_ || IsGlobalBlock(Of(token)); }
  void AddGlobals(KeyList* keys) const {
    keys->Add(0, begin_);
    if (count_ == 0 || !is_internal_) return;
    keys->Add(0, End(0));
    keys->Add(Begin(count_ - 1), tokens_);
  }

 private:
  int64_t size_;
  int64_t tokens_;
  bool is_internal_;
  int64_t begin_;
  int64_t count_;
};

// Returns the blocks that block u sees whatever the table says.
std::set<int64_t> SeenAnyway(const Blocks& blocks, int64_t u) {
  std::set<int64_t> seen;
  for (int64_t t = std::max<int64_t>(u - 1, 0); t <= u + 1 && t < blocks.count(); ++t) {
    seen.insert(t);
  }
  for (const int64_t t : {int64_t{0}, blocks.count() - 1}) {
    if (blocks.IsGlobalBlock(t)) seen.insert(t);
  }
  return seen;
}

// Draws rows without repetition from the blocks that are not seen anyway. The rest of a row is -1
// where there are no more such blocks, and for global blocks, which see all. A table with more
// random blocks begins with the rows of one with fewer.
absl::StatusOr<Tensor> DrawTable(const BigBirdOptions& options, const Blocks& blocks, int64_t heads,
                                 uint64_t seed) {
  TFB_ASSIGN_OR_RETURN(Tensor table,
                       Tensor::Allocate(DType::kI32, Shape{heads, blocks.count(), options.random}));
  Fill(table.view(), -1);
  const RandomStream stream(seed, "random");
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t u = 0; u < blocks.count(); ++u) {
      if (blocks.IsGlobalBlock(u)) continue;
      std::set<int64_t> seen = SeenAnyway(blocks, u);
      for (int64_t r = 0; r < options.random; ++r) {
        const int64_t legal = blocks.count() - static_cast<int64_t>(seen.size());
        if (legal == 0) break;
        const double uniform =
            stream.Uniform((h * blocks.count() + u) * BigBirdOptions::kMaxRandom + r);
        // This is one of the legal blocks, by its rank among them and then by its number.
        int64_t block =
            std::min(legal - 1, static_cast<int64_t>(uniform * static_cast<double>(legal)));
        for (const int64_t t : seen) block += t <= block;
        *table.view().MutableAt<int32_t>(h, u, r) = static_cast<int32_t>(block);
        seen.insert(block);
      }
    }
  }
  return table;
}

absl::Status CheckTable(const Tensor& table) {
  const int64_t blocks = table.dim(1);
  for (int64_t n = 0; n < table.num_elements(); ++n) {
    const int32_t block = table.span<int32_t>()[n];
    if (block >= -1 && block < blocks) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter random names block ", block, " for block ", n / table.dim(2) % blocks,
        " of head ", n / table.dim(2) / blocks, "; allowed are -1 to ", blocks - 1));
  }
  return absl::OkStatus();
}

absl::Span<const int32_t> RandomBlocks(const Tensor* table, int64_t head, int64_t block) {
  if (table == nullptr) return {};
  return {table->view().At<int32_t>(head, block), static_cast<size_t>(table->dim(2))};
}

// Returns the pattern of the pairs that count. Without a table there are no random blocks.
FunctionPattern SeenPairs(const Blocks& blocks, const Tensor* table) {
  const auto add_keys = [blocks, table](int64_t head, int64_t i, KeyList* keys) {
    if (i < blocks.begin()) {
      keys->AddAll();
      return blocks.begin();
    }
    const int64_t u = blocks.Of(i);
    if (blocks.IsGlobalBlock(u)) {
      keys->AddAll();
    } else {
      blocks.AddGlobals(keys);
      keys->Add(blocks.Begin(std::max<int64_t>(u - 1, 0)), blocks.End(u + 1));
      for (const int32_t t : RandomBlocks(table, head, u)) {
        if (t >= 0) keys->Add(blocks.Begin(t), blocks.End(t));
      }
    }
    return blocks.End(u);
  };
  return FunctionPattern(add_keys, table == nullptr ? 1 : table->dim(0));
}

// Returns how often a query of block u counts the keys of block t.
int64_t Times(const Blocks& blocks, const Tensor& table, int64_t head, int64_t u, int64_t t) {
  const auto random = RandomBlocks(&table, head, u);
  const bool anyway = std::abs(u - t) <= 1 || blocks.IsGlobalBlock(t);
  return (anyway ? 1 : 0) + std::count(random.begin(), random.end(), static_cast<int32_t>(t));
}

// Returns the largest number of times that any pair counts.
int64_t MostTimes(const Blocks& blocks, const Tensor& table) {
  int64_t most = 1;
  for (int64_t h = 0; h < table.dim(0); ++h) {
    for (int64_t u = 0; u < blocks.count(); ++u) {
      for (const int32_t t : RandomBlocks(&table, h, u)) {
        if (t >= 0 && !blocks.IsGlobalBlock(u)) {
          most = std::max(most, Times(blocks, table, h, u, t));
        }
      }
    }
  }
  return most;
}

// Returns the pattern of the pairs that count at least `times` times, 2 or more.
FunctionPattern RepeatedPairs(const Blocks& blocks, const Tensor& table, int64_t times) {
  const auto add_keys = [blocks, &table, times](int64_t head, int64_t i, KeyList* keys) {
    if (i < blocks.begin()) return blocks.begin();
    const int64_t u = blocks.Of(i);
    for (const int32_t t : RandomBlocks(&table, head, u)) {
      if (blocks.IsGlobalBlock(u) || t < 0 || Times(blocks, table, head, u, t) < times) continue;
      keys->Add(blocks.Begin(t), blocks.End(t));
    }
    return blocks.End(u);
  };
  return FunctionPattern(add_keys, table.dim(0));
}

class BigBird : public FlashTechnique<BigBirdOptions> {
 public:
  BigBird()
      : FlashTechnique(SparseSelfAttention(
            {"bigbird", "attention", "BigBird: window, global and random blocks",
             "Zaheer et al. 2020, arXiv:2007.14062v2, section 2"},
            /*budget_option=*/"block", /*growth=*/1, Masking::kBidirectional)) {}

 private:
  static constexpr int64_t kMostTimes = 32;  // that a pair may count

  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    NamedTensors parameters;
    if (job.options.random == 0) return parameters;
    const Blocks blocks(job.options, job.problem.kv_tokens);
    TFB_ASSIGN_OR_RETURN(parameters["random"],
                         DrawTable(job.options, blocks, job.problem.query_heads, job.seed));
    return parameters;
  }

  // A pair that counts n times is in n parts of its softmax. Parts beyond the most that any pair
  // counts are empty.
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const Blocks blocks(job.options, job.problem.kv_tokens);
    const auto found = job.parameters.find("random");
    const Tensor* table = found == job.parameters.end() ? nullptr : &found->second;
    FlashPlan plan(job.problem);
    plan.Sees(SeenPairs(blocks, table));
    if (table == nullptr) return plan;
    TFB_RETURN_IF_ERROR(CheckTable(*table));
    if (!job.options.count_repeats) return plan;
    const int64_t times = MostTimes(blocks, *table);
    if (times > kMostTimes) {
      return absl::InvalidArgumentError(absl::StrCat("parameter random makes a key count ", times,
                                                     " times; allowed are ", kMostTimes));
    }
    const int64_t parts = std::min(job.options.random + 1, kMostTimes);
    for (int64_t n = 2; n <= parts; ++n) plan.AddPart().Sees(RepeatedPairs(blocks, *table, n));
    return plan;
  }

  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    const BigBirdOptions& options = job.options;
    ConstTensorView table;
    if (options.random > 0) {
      TFB_RETURN_IF_ERROR(CheckTable(job.parameters.at("random")));
      table = job.parameters.at("random").view();
    }
    const bool is_internal = options.construction == BigBirdOptions::Construction::kItc;
    const int64_t g = is_internal ? 0 : options.global_tokens, b = options.block;
    const int64_t last_block = (job.problem.kv_tokens - 1 - g) / b;
    const auto is_global = [=](int64_t i) {
      return i < g || (is_internal && (i / b == 0 || i / b == last_block));
    };
    // Returns n_ij, or 1 where a key counts once.
    const auto times = [=](int64_t h, int64_t i, int64_t j) {
      if (is_global(i)) return 1;
      const int64_t u = (i - g) / b, t = (j - g) / b;
      int count = is_global(j) || std::abs(u - t) <= 1 ? 1 : 0;
      for (int64_t r = 0; j >= g && r < options.random; ++r) {
        count += *table.At<int32_t>(h, u, r) == t ? 1 : 0;
      }
      return options.count_repeats ? count : std::min(count, 1);
    };
    PairScore score;
    score.sees = [=](int64_t h, int64_t i, int64_t j) { return times(h, i, j) > 0; };
    score.bias = [=](int64_t, int64_t h, int64_t i, int64_t j) { return std::log(times(h, i, j)); };
    return score;
  }
};

const bool registered = RegisterTechnique<BigBird>();

}  // namespace
}  // namespace tfb::bigbird
