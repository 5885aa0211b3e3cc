#include "attention/lsh/lsh.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/lsh/lsh_functors.h"
#include "attention/lsh/lsh_sizes.h"
#include "core/cuda/for_each.h"
#include "core/flash/flash_parts.h"
#include "core/gather/gather.h"
#include "core/random.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::lsh {
namespace {

const bool registered = RegisterTechnique<Lsh>();

constexpr int64_t kMostUnfactorized = 128;  // buckets

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "lsh";
  info.family = "attention";
  info.title = "Reformer's LSH attention";
  info.citation = "Kitaev, Kaiser, Levskaya 2020, arXiv:2001.04451v2, section 2";
  info.exactness = Exactness::kApproximate;
  info.budget_option = "rounds";
  info.growth = 1;
  info.selection = "buckets";
  return info;
}

// A pattern over places of a round's order: a query sees the places of its chunk and of the
// previous one. Places from `tokens` on are those that the first chunk sees besides.
class ChunkPattern : public Pattern {
 public:
  ChunkPattern(int64_t tokens, int64_t chunk) : tokens_(tokens), chunk_(chunk) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t begin = i / chunk_ * chunk_;
    keys->Add(begin - chunk_, std::min(begin + chunk_, tokens_));
    if (begin == 0) keys->Add(tokens_, std::numeric_limits<int64_t>::max());
    return begin + chunk_;
  }

 private:
  int64_t tokens_;
  int64_t chunk_;
};

// The arrays of a Run, in the workspace.
struct Memory {
  void* keys;        // [batch][heads][tokens][head_dim] of the problem's dtype
  int32_t* buckets;  // [batch][heads][rounds][tokens]
  int32_t* places;
  int32_t* orders;  // [batch][heads][rounds][order]
  int32_t* query_codes;
  int32_t* key_codes;
};

class LshLayer : public Layer {
 public:
  LshLayer(const Problem& problem, std::vector<TensorSpec> inputs, std::vector<TensorSpec> outputs,
           const LshOptions& options, Device device, NamedTensors parameters)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        options_(options),
        device_(device),
        factors_(LshFactors(options, problem.query_tokens)) {
    parameters_ = std::move(parameters);
    const int64_t tokens = problem.query_tokens, chunk = LshChunk(options, tokens);
    sizes_ = {problem.batch,
              problem.query_heads,
              LshRounds(options),
              tokens,
              chunk,
              static_cast<int32_t>(LshBuckets(factors_)),
              tokens,
              options.bucket_mask};
    // `order` includes the last chunk, which the first one sees.
    if (LshWraps(options) && tokens > 0) sizes_.order += (tokens - 1) % chunk + 1;
    Problem part = problem;
    part.kv_tokens = sizes_.order;
    // Otherwise the token rule is causal, by token and not by place.
    part.causal = LshIsWhole(options) && problem.causal;
    parts_.assign(sizes_.rounds, part);
    calls_.resize(parts_.size());
  }

  size_t workspace_bytes(int threads) const override {
    size_t steps = FlashParts::WorkspaceBytes(device_, parts_, /*relative_keys=*/false, threads);
    if (!LshIsWhole(options_)) {
      const int64_t columns = std::accumulate(factors_.begin(), factors_.end(), int64_t{0});
      steps = std::max(steps, AngularHash::WorkspaceBytes(device_, problem().head_dim,
                                                          sizes_.rounds, columns, threads));
      steps = std::max(steps, SortWorkspaceBytes(device_, rows(), sizes_.buckets + 1, threads));
    }
    return steps + Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); });
  }

  Cost cost() const override {
    const Problem& p = problem();
    Cost cost;
    if (is_set_up_) {
      double pairs = 0;
      for (const FlashEngine& engine : softmax_.engines()) {
        pairs += engine.schedule().KeptPairs(p.query_heads);
      }
      const double columns =
          static_cast<double>(std::accumulate(factors_.begin(), factors_.end(), int64_t{0}));
      const double hashed = static_cast<double>(p.query_heads * p.query_tokens * sizes_.rounds);
      cost.flops = 2.0 * static_cast<double>(p.batch) *
                   (static_cast<double>(p.head_dim + p.value_dim) * pairs +
                    static_cast<double>(p.head_dim) * columns * hashed);
    }
    cost.bytes = TensorBytes();
    return cost;
  }

  std::map<std::string, double> statistics() const override {
    return LshIsWhole(options_) ? std::map<std::string, double>() : grouping_.statistics(device_);
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    if (!LshIsWhole(options_)) {
      TFB_ASSIGN_OR_RETURN(
          hash_, AngularHash::Create(device_, parameters_.at("rotations").view(), factors_));
    }
    std::vector<FlashEngine> engines;
    for (const Problem& part : parts_) {
      TFB_ASSIGN_OR_RETURN(
          FlashEngine engine,
          FlashEngine::Create(device_, part, ChunkPattern(sizes_.tokens, sizes_.chunk)));
      engines.push_back(std::move(engine));
    }
    softmax_ = FlashParts(device_, std::move(engines));
    is_set_up_ = true;
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const Memory memory = LayOut(workspace);
    Execution step = execution;
    step.workspace = workspace.Rest();
    const Problem& p = problem();
    const ConstTensorView q = inputs.Get("q");
    const TensorView keys(memory.keys, p.dtype,
                          {p.batch, p.query_heads, p.query_tokens, p.head_dim});
    const RowNorm norm = {false, false, LshKeyEpsilon(p, options_)};
    TFB_RETURN_IF_ERROR(NormalizeRows(device_, norm, q, keys, step));
    grouping_.Begin();
    TFB_RETURN_IF_ERROR(FindBuckets(inputs, outputs, memory, step));
    if (!LshIsWhole(options_)) TFB_RETURN_IF_ERROR(Sort(memory, step));
    grouping_.GroupsAreFound();
    for (size_t n = 0; n < calls_.size(); ++n) {
      calls_[n] = softmax_.engines()[n].NewCall(inputs, outputs);
      calls_[n].k = keys;
      calls_[n].scale = LshScale(p, options_);
      calls_[n].tokens.self_bias = static_cast<float>(options_.self_bias);
      if (!LshIsWhole(options_)) AddOrders(memory, static_cast<int64_t>(n), &calls_[n]);
    }
    TFB_RETURN_IF_ERROR(softmax_.Run(calls_, step));
    grouping_.End();
    return absl::OkStatus();
  }

 private:
  int64_t heads() const { return sizes_.batch * sizes_.heads; }
  int64_t rows() const { return heads() * sizes_.rounds; }
  int64_t slots() const { return sizes_.rounds * (LshWraps(options_) ? 2 : 1); }

  Memory LayOut(Workspace& workspace) const {
    const Problem& p = problem();
    const int64_t tokens = sizes_.tokens, sorted = LshIsWhole(options_) ? 0 : rows();
    Memory memory;
    memory.keys = workspace.Take<std::byte>(heads() * tokens * p.head_dim *
                                            static_cast<int64_t>(SizeOf(p.dtype)));
    memory.buckets = workspace.Take<int32_t>(rows() * tokens);
    memory.places = workspace.Take<int32_t>(sorted * tokens);
    memory.orders = workspace.Take<int32_t>(sorted * sizes_.order);
    const int64_t codes = LshIsWhole(options_) ? 0 : slots() * heads() * tokens;
    memory.query_codes = workspace.Take<int32_t>(codes);
    memory.key_codes = LshWraps(options_) ? workspace.Take<int32_t>(codes) : memory.query_codes;
    return memory;
  }

  absl::Status FindBuckets(const Inputs& inputs, const Outputs& outputs, const Memory& memory,
                           const Execution& execution) const {
    BucketsToSortBy a = {};
    a.sizes = sizes_;
    a.buckets = memory.buckets;
    const ConstTensorView given = inputs.Get("buckets"), key_mask = inputs.Get("key_mask");
    if (!given.empty()) {
      a.given = static_cast<const int32_t*>(given.data);
      std::copy_n(given.strides.data(), 4, a.given_strides);
    }
    const TensorView written = outputs.Get("buckets");
    if (!written.empty()) {
      a.written = static_cast<int32_t*>(written.mutable_data());
      std::copy_n(written.strides.data(), 4, a.written_strides);
    }
    if (!key_mask.empty()) {
      a.key_mask = static_cast<const uint8_t*>(key_mask.data);
      std::copy_n(key_mask.strides.data(), 2, a.key_mask_strides);
    }
    if (given.empty() && !LshIsWhole(options_)) {
      TFB_RETURN_IF_ERROR(hash_.Run(inputs.Get("q"), memory.buckets, execution));
    }
    return ForEachInRows(device_, rows(), sizes_.tokens, a, execution);
  }

  absl::Status Sort(const Memory& memory, const Execution& execution) const {
    TokenSortCall sort = {memory.buckets, rows(),       sizes_.tokens, sizes_.buckets + 1,
                          memory.orders,  sizes_.order, memory.places};
    TFB_RETURN_IF_ERROR(SortTokens(device_, sort, execution));
    const CodesOfPlaces codes = {sizes_,        memory.buckets,     memory.places,
                                 memory.orders, memory.query_codes, memory.key_codes};
    return ForEachInRows(device_, rows(), sizes_.order, codes, execution);
  }

  void AddOrders(const Memory& memory, int64_t round, FlashCall* call) const {
    const int64_t of_head = sizes_.rounds * sizes_.order;
    call->query_order = {memory.orders + round * sizes_.order, sizes_.heads * of_head, of_head};
    call->key_order = call->query_order;
    TokenRule& rule = call->tokens;
    rule.causal = problem().causal;
    if (options_.bucket_mask) rule.own = round;
    rule.counts = options_.dedup;
    rule.query_codes = memory.query_codes;
    rule.key_codes = memory.key_codes;
    rule.slots = slots();
    rule.slot_stride = heads() * sizes_.tokens;
    rule.batch_stride = sizes_.heads * sizes_.tokens;
    rule.head_stride = sizes_.tokens;
  }

  LshOptions options_;
  Device device_;
  std::vector<int64_t> factors_;
  LshSizes sizes_;
  AngularHash hash_;
  GroupingShare grouping_;
  std::vector<Problem> parts_;
  FlashParts softmax_;
  std::vector<FlashCall> calls_;  // room for the calls of a Run
  bool is_set_up_ = false;
};

}  // namespace

absl::Status CheckLsh(const Problem& problem, const LshOptions& options) {
  if (problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat("lsh is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
  if (problem.query_heads != problem.kv_heads) {
    return absl::UnimplementedError(absl::StrCat(
        "in lsh a head's keys are its queries, so that it has as many of both: query_heads is ",
        problem.query_heads, ", kv_heads is ", problem.kv_heads));
  }
  if (options.buckets > 1 && options.buckets % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("lsh: buckets is ", options.buckets, "; allowed are 0, 1 and even numbers"));
  }
  if (options.wrap && options.bucket_mask) {
    return absl::InvalidArgumentError(
        "lsh: wrap shows keys of another round's buckets, which bucket_mask hides; allowed is "
        "wrap with bucket_mask=false");
  }
  const int64_t chunks = problem.query_tokens / LshChunk(options, problem.query_tokens) + 3;
  const int64_t most = std::numeric_limits<int32_t>::max() / chunks;
  const int64_t buckets = LshBuckets(LshFactors(options, problem.query_tokens));
  if (options.bucket_mask && buckets >= most) {
    return absl::InvalidArgumentError(absl::StrCat("lsh: buckets is ", buckets, ", with ",
                                                   chunks - 2, " chunks; allowed are less than ",
                                                   most, ", or larger chunks"));
  }
  return absl::OkStatus();
}

std::vector<int64_t> LshFactors(const LshOptions& options, int64_t tokens) {
  if (options.buckets == 1) return {};
  int64_t buckets = options.buckets;
  if (buckets == 0)
    buckets = std::max<int64_t>((tokens + options.chunk - 1) / options.chunk, 1) * 2;
  if (!options.factorize || buckets <= kMostUnfactorized) return {buckets / 2};
  int64_t first = static_cast<int64_t>(std::sqrt(static_cast<double>(buckets))) / 2 * 2;
  if (options.buckets == 0) return {first / 2, (buckets + 2 * first - 1) / (2 * first)};
  while (first > 2 && (buckets % first != 0 || buckets / first % 2 != 0)) first -= 2;
  if (buckets % (2 * first) != 0) return {buckets / 2};  // `buckets` is twice an odd number
  return {first / 2, buckets / first / 2};
}

Lsh::Lsh() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Lsh::ReadTensors(const Problem& problem, const LshOptions& options) const {
  std::vector<TensorSpec> tensors;
  for (TensorSpec& spec : QkvInputs(problem)) {
    if (spec.name != "k") tensors.push_back(std::move(spec));
  }
  tensors.push_back(WrittenTensors(problem, options).back());
  return tensors;
}

std::vector<TensorSpec> Lsh::WrittenTensors(const Problem& p, const LshOptions& options) const {
  std::vector<TensorSpec> tensors = AttentionOutputs(p);
  tensors.push_back({"buckets",
                     {p.batch, p.query_heads, p.query_tokens, LshRounds(options)},
                     DType::kI32,
                     /*optional=*/true});
  return tensors;
}

absl::StatusOr<TechniqueSpec> Lsh::Counterpart(const Problem&, const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole, Canonical(options));
  whole["buckets"] = "1";
  TFB_ASSIGN_OR_RETURN(const Options defaults, Canonical({}));
  for (const auto& [name, value] : defaults) {
    const bool of_scores = name == "scale" || name == "self_bias" || name == "key_norm";
    if (!of_scores && name != "buckets") whole[name] = value;
  }
  return TechniqueSpec{info().name, std::move(whole)};
}

absl::StatusOr<std::unique_ptr<Layer>> Lsh::MakeLayer(const Problem& problem,
                                                      const LshOptions& options, Device device,
                                                      uint64_t seed) const {
  TFB_RETURN_IF_ERROR(CheckLsh(problem, options));
  const std::vector<int64_t> factors = LshFactors(options, problem.query_tokens);
  NamedTensors parameters;
  if (!factors.empty()) {
    const int64_t columns = std::accumulate(factors.begin(), factors.end(), int64_t{0});
    const Shape shape = {problem.head_dim, options.rounds, columns};
    const Shape per_head = {problem.query_heads, problem.head_dim, options.rounds, columns};
    TFB_ASSIGN_OR_RETURN(Tensor rotations,
                         Tensor::Allocate(DType::kF32, options.per_head ? per_head : shape));
    FillNormal(&rotations, seed, "rotations");
    parameters["rotations"] = std::move(rotations);
  }
  return std::make_unique<LshLayer>(problem, ReadTensors(problem, options),
                                    WrittenTensors(problem, options), options, device,
                                    std::move(parameters));
}

}  // namespace tfb::lsh
