#include "attention/bigbird/bigbird.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/definition.h"
#include "core/flash/flash_parts.h"
#include "core/random.h"

namespace tfb::bigbird {
namespace {

const bool registered = RegisterTechnique<BigBird>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "bigbird";
  info.family = "attention";
  info.title = "BigBird: window, global and random blocks";
  info.citation = "Zaheer et al. 2020, arXiv:2007.14062v2, section 2";
  info.exactness = Exactness::kExact;
  info.budget_option = "block";
  info.growth = 1;
  info.devices = {Device::kCpu, Device::kCuda};
  info.supports_causal = false;
  return info;
}

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
  std::vector<KeyRange> Globals() const {
    if (count_ == 0 || !is_internal_) return {{0, begin_, false}};
    return {{0, End(0), false}, {Begin(count_ - 1), tokens_, false}};
  }
  // Returns the global tokens, ascending.
  std::vector<int32_t> GlobalTokens() const {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < tokens_; ++i) {
      if (IsGlobal(i)) tokens.push_back(static_cast<int32_t>(i));
    }
    return tokens;
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

class BigBirdPattern : public Pattern {
 public:
  // Without a table there are no random blocks. `rows_of_globals` false leaves the rows of global
  // tokens empty.
  BigBirdPattern(const Blocks& blocks, const Tensor* table, bool rows_of_globals)
      : blocks_(blocks), table_(table), rows_of_globals_(rows_of_globals) {}

  int64_t heads() const override { return table_ == nullptr ? 1 : table_->dim(0); }

  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    if (blocks_.IsGlobal(i)) return rows_of_globals_;
    if (blocks_.IsGlobal(j)) return true;
    const int64_t u = blocks_.Of(i), t = blocks_.Of(j);
    if (std::abs(u - t) <= 1) return true;
    const absl::Span<const int32_t> random = Random(head, u);
    return std::find(random.begin(), random.end(), t) != random.end();
  }

  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    for (int64_t i = query_begin; i < query_end;) {  // one block of queries after the other
      const int64_t end =
          std::min(query_end, i < blocks_.begin() ? blocks_.begin() : blocks_.End(blocks_.Of(i)));
      const bool is_only_block = i == query_begin && end == query_end;
      const size_t first = ranges->size();
      AddRangesOf(head, i, ranges);
      for (size_t r = first; r < ranges->size(); ++r) (*ranges)[r].all = is_only_block;
      i = end;
    }
  }

 private:
  absl::Span<const int32_t> Random(int64_t head, int64_t block) const {
    if (table_ == nullptr) return {};
    return {table_->view().At<int32_t>(head, block), static_cast<size_t>(table_->dim(2))};
  }

  // Adds the ranges that query i, and every other query of its block, sees.
  void AddRangesOf(int64_t head, int64_t i, std::vector<KeyRange>* ranges) const {
    if (blocks_.IsGlobal(i)) {
      if (rows_of_globals_) ranges->push_back({0, kMaxTokens, false});
      return;
    }
    for (const KeyRange& range : blocks_.Globals()) ranges->push_back(range);
    const int64_t u = blocks_.Of(i);
    ranges->push_back({blocks_.Begin(std::max<int64_t>(u - 1, 0)), blocks_.End(u + 1), false});
    for (const int32_t t : Random(head, u)) {
      if (t >= 0) ranges->push_back({blocks_.Begin(t), blocks_.End(t), false});
    }
  }

  Blocks blocks_;
  const Tensor* table_;
  bool rows_of_globals_;
};

// The pairs that count at least `times` times, 2 or more.
class RepeatedPattern : public Pattern {
 public:
  RepeatedPattern(const Blocks& blocks, const Tensor& table, int64_t times)
      : blocks_(blocks), table_(table), times_(times) {}

  // Returns how often a query of block u counts the keys of block t.
  static int64_t Times(const Blocks& blocks, const Tensor& table, int64_t head, int64_t u,
                       int64_t t) {
    const int32_t* row = table.view().At<int32_t>(head, u);
    const bool anyway = std::abs(u - t) <= 1 || blocks.IsGlobalBlock(t);
    return (anyway ? 1 : 0) + std::count(row, row + table.dim(2), static_cast<int32_t>(t));
  }
  // Returns the largest number of times that any pair counts.
  static int64_t MostTimes(const Blocks& blocks, const Tensor& table) {
    int64_t most = 1;
    for (int64_t h = 0; h < table.dim(0); ++h) {
      for (int64_t u = 0; u < blocks.count(); ++u) {
        for (int64_t r = 0; r < table.dim(2); ++r) {
          const int32_t t = *table.view().At<int32_t>(h, u, r);
          if (t >= 0 && !blocks.IsGlobalBlock(u))
            most = std::max(most, Times(blocks, table, h, u, t));
        }
      }
    }
    return most;
  }

  int64_t heads() const override { return table_.dim(0); }
  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    if (blocks_.IsGlobal(i) || j < blocks_.begin()) return false;
    return Times(blocks_, table_, head, blocks_.Of(i), blocks_.Of(j)) >= times_;
  }
  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    for (int64_t i = std::max(query_begin, blocks_.begin()); i < query_end;) {
      const int64_t u = blocks_.Of(i);
      for (int64_t r = 0; !blocks_.IsGlobalBlock(u) && r < table_.dim(2); ++r) {
        const int32_t t = *table_.view().At<int32_t>(head, u, r);
        if (t < 0 || Times(blocks_, table_, head, u, t) < times_) continue;
        ranges->push_back({blocks_.Begin(t), blocks_.End(t), false});
      }
      i = blocks_.End(u);
    }
  }

 private:
  Blocks blocks_;
  const Tensor& table_;
  int64_t times_;
};

// A layer that makes, on the CPU, one call of engine flash, which begins with the long rows of the
// global tokens. On CUDA, where one block of threads would walk such a row while all others are
// done (64 tiles against 8 at 4,096 tokens), those rows are a call of their own: the engine cuts
// the keys of few queries into parts. A pair that counts n times is in n parts of its softmax.
class BigBirdLayer : public Layer {
 public:
  BigBirdLayer(const Problem& problem, const BigBirdOptions& options, const Blocks& blocks,
               NamedTensors parameters, Device device)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
        device_(device),
        blocks_(blocks),
        counts_repeats_(options.count_repeats && options.random > 0),
        parts_(counts_repeats_ ? std::min(options.random + 1, kMostTimes) : 1, problem),
        globals_problem_(problem) {
    parameters_ = std::move(parameters);
    calls_.reserve(parts_.size());
    if (device != Device::kCpu) globals_ = blocks_.GlobalTokens();
    globals_problem_.query_tokens = static_cast<int64_t>(globals_.size());
  }

  size_t workspace_bytes(int threads) const override {
    return std::max(FlashParts::WorkspaceBytes(device_, parts_, false, threads),
                    FlashEngine::WorkspaceBytes(device_, globals_problem_, false, threads));
  }

  Cost cost() const override {
    const Problem& p = problem();
    Cost cost;
    cost.bytes = TensorBytes();
    if (softmax_.engines().empty()) return cost;
    double pairs = globals_.empty() ? 0 : globals_engine_.schedule().KeptPairs(p.query_heads);
    for (const FlashEngine& engine : softmax_.engines()) {
      pairs += engine.schedule().KeptPairs(p.query_heads);
    }
    cost.flops = 2.0 * static_cast<double>(p.batch * (p.head_dim + p.value_dim)) * pairs;
    return cost;
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    const auto found = parameters_.find("random");
    const Tensor* table = found == parameters_.end() ? nullptr : &found->second;
    if (table != nullptr) TFB_RETURN_IF_ERROR(CheckTable(*table));
    const int64_t times = counts_repeats_ ? RepeatedPattern::MostTimes(blocks_, *table) : 1;
    if (times > kMostTimes) {
      return absl::InvalidArgumentError(absl::StrCat("parameter random makes a key count ", times,
                                                     " times; allowed are ", kMostTimes));
    }
    std::vector<FlashEngine> engines(times);
    TFB_ASSIGN_OR_RETURN(
        engines[0],
        FlashEngine::Create(device_, problem(),
                            BigBirdPattern(blocks_, table, /*rows_of_globals=*/globals_.empty())));
    for (int64_t n = 1; n < times; ++n) {
      const RepeatedPattern pattern(blocks_, *table, n + 1);
      TFB_ASSIGN_OR_RETURN(engines[n], FlashEngine::Create(device_, problem(), pattern));
    }
    softmax_ = FlashParts(device_, std::move(engines));
    calls_.resize(times);
    if (globals_.empty()) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(global_tokens_, DeviceArray<int32_t>::Create(device_, globals_));
    TFB_ASSIGN_OR_RETURN(globals_engine_, FlashEngine::Create(device_, globals_problem_,
                                                              FullPattern(problem().kv_tokens)));
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    for (size_t n = 0; n < calls_.size(); ++n) {
      calls_[n] = softmax_.engines()[n].NewCall(inputs, outputs);
    }
    TFB_RETURN_IF_ERROR(softmax_.Run(calls_, execution));
    if (globals_.empty()) return absl::OkStatus();
    FlashCall call = globals_engine_.NewCall(inputs, outputs);
    call.query_order = {global_tokens_.data(), 0, 0};
    return globals_engine_.Run(call, execution);
  }

 private:
  static constexpr int64_t kMostTimes = 32;  // parts of a softmax: see FlashParts

  Device device_;
  Blocks blocks_;
  bool counts_repeats_;
  std::vector<Problem> parts_;  // as many as a softmax may have
  // The problem of the call for global rows, where there is one.
  Problem globals_problem_;
  std::vector<int32_t> globals_;
  DeviceArray<int32_t> global_tokens_;
  FlashParts softmax_;
  std::vector<FlashCall> calls_;  // room for the calls of a Run
  FlashEngine globals_engine_;
};

absl::Status Check(const Problem& problem) {
  if (problem.query_tokens == problem.kv_tokens) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("bigbird is self-attention: query_tokens is ",
                                               problem.query_tokens, ", kv_tokens is ",
                                               problem.kv_tokens));
}

}  // namespace

BigBird::BigBird() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> BigBird::MakeLayer(const Problem& problem,
                                                          const BigBirdOptions& options,
                                                          Device device, uint64_t seed) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  const Blocks blocks(options, problem.kv_tokens);
  NamedTensors parameters;
  if (options.random > 0) {
    TFB_ASSIGN_OR_RETURN(parameters["random"],
                         DrawTable(options, blocks, problem.query_heads, seed));
  }
  return std::make_unique<BigBirdLayer>(problem, options, blocks, std::move(parameters), device);
}

absl::Status BigBird::Definition(const Problem& problem, const BigBirdOptions& options,
                                 const NamedTensors& parameters, const Inputs& inputs,
                                 const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  const bool is_internal = options.construction == BigBirdOptions::Construction::kItc;
  const int64_t g = is_internal ? 0 : options.global_tokens;
  const int64_t b = options.block;
  const int64_t last_block = (problem.kv_tokens - 1 - g) / b;
  ConstTensorView table;
  if (options.random > 0) {
    TFB_RETURN_IF_ERROR(CheckTable(parameters.at("random")));
    table = parameters.at("random").view();
  }
  const auto is_global = [&](int64_t i) {
    return i < g || (is_internal && (i / b == 0 || i / b == last_block));
  };
  // Returns n_ij, or 1 where a key counts once.
  const auto times = [&](int64_t h, int64_t i, int64_t j) {
    if (is_global(i)) return 1;
    const int64_t u = (i - g) / b, t = (j - g) / b;
    int count = is_global(j) || std::abs(u - t) <= 1 ? 1 : 0;
    for (int64_t r = 0; j >= g && r < options.random; ++r) {
      count += *table.At<int32_t>(h, u, r) == t ? 1 : 0;
    }
    return options.count_repeats ? count : std::min(count, 1);
  };
  DefineMaskedAttention(
      problem, inputs, request, /*scale=*/0,
      [&](int64_t h, int64_t i, int64_t j) { return times(h, i, j) > 0; },
      [&](int64_t, int64_t h, int64_t i, int64_t j) { return std::log(times(h, i, j)); }, outputs);
  return absl::OkStatus();
}

}  // namespace tfb::bigbird
