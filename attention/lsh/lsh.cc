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
#include "attention/lsh/lsh_cuda.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash_parts.h"
#include "core/gather/gather.h"
#include "core/random.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

using KeyNorm = LshOptions::KeyNorm;

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
  info.devices = {Device::kCpu, Device::kCuda};
  info.selection = "buckets";
  return info;
}

bool IsWhole(const LshOptions& options) { return options.buckets == 1; }
bool Wraps(const LshOptions& options) { return options.wrap && !IsWhole(options); }
int64_t RoundsOf(const LshOptions& options) { return IsWhole(options) ? 1 : options.rounds; }
int64_t ChunkOf(const LshOptions& options, int64_t tokens) {
  return IsWhole(options) ? std::max<int64_t>(tokens, 1) : options.chunk;
}
double ScaleOf(const Problem& problem, const LshOptions& options) {
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}
double KeyEpsilon(const Problem& problem, const LshOptions& options) {
  return options.key_norm == KeyNorm::kUnit ? 0 : 1e-6 * static_cast<double>(problem.head_dim);
}

int64_t BucketCount(const std::vector<int64_t>& factors) {
  int64_t buckets = 1;
  for (const int64_t columns : factors) buckets *= 2 * columns;
  return buckets;
}

// Over places of a round's order: those of a query's chunk and of the one before. Places from
// `tokens` on are those that the first chunk sees besides.
class ChunkPattern : public Pattern {
 public:
  ChunkPattern(int64_t tokens, int64_t chunk) : tokens_(tokens), chunk_(chunk) {}

  bool Allows(int64_t, int64_t i, int64_t j) const override {
    if (j >= tokens_) return i < chunk_;
    const int64_t back = i / chunk_ - j / chunk_;
    return back == 0 || back == 1;
  }
  void KeyRanges(int64_t, int64_t begin, int64_t end,
                 std::vector<KeyRange>* ranges) const override {
    const int64_t first = begin / chunk_, last = (end - 1) / chunk_;
    const bool all = first == last;
    ranges->push_back({(first - 1) * chunk_, std::min((last + 1) * chunk_, tokens_), all});
    if (first == 0) ranges->push_back({tokens_, std::numeric_limits<int32_t>::max(), all});
  }

 private:
  int64_t tokens_;
  int64_t chunk_;
};

// What a Run works with, in the workspace.
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
    const int64_t tokens = problem.query_tokens, chunk = ChunkOf(options, tokens);
    sizes_ = {problem.batch,
              problem.query_heads,
              RoundsOf(options),
              tokens,
              chunk,
              static_cast<int32_t>(BucketCount(factors_)),
              tokens,
              options.bucket_mask};
    // The last chunk, which the first one sees.
    if (Wraps(options) && tokens > 0) sizes_.order += (tokens - 1) % chunk + 1;
    Problem part = problem;
    part.kv_tokens = sizes_.order;
    part.causal = IsWhole(options) && problem.causal;  // else by token, not by place
    parts_.assign(sizes_.rounds, part);
    calls_.resize(parts_.size());
  }

  size_t workspace_bytes(int threads) const override {
    size_t steps = FlashParts::WorkspaceBytes(device_, parts_, /*relative_keys=*/false, threads);
    if (!IsWhole(options_)) {
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
    return IsWhole(options_) ? std::map<std::string, double>() : grouping_.statistics(device_);
  }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    if (!IsWhole(options_)) {
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
    const RowNorm norm = {false, false, KeyEpsilon(p, options_)};
    TFB_RETURN_IF_ERROR(NormalizeRows(device_, norm, q, keys, step));
    grouping_.Begin();
    TFB_RETURN_IF_ERROR(FindBuckets(inputs, outputs, memory, step));
    if (!IsWhole(options_)) TFB_RETURN_IF_ERROR(Sort(memory, step));
    grouping_.GroupsAreFound();
    for (size_t n = 0; n < calls_.size(); ++n) {
      calls_[n] = softmax_.engines()[n].NewCall(inputs, outputs);
      calls_[n].k = keys;
      calls_[n].scale = ScaleOf(p, options_);
      calls_[n].tokens.self_bias = static_cast<float>(options_.self_bias);
      if (!IsWhole(options_)) AddOrders(memory, static_cast<int64_t>(n), &calls_[n]);
    }
    TFB_RETURN_IF_ERROR(softmax_.Run(calls_, step));
    grouping_.End();
    return absl::OkStatus();
  }

 private:
  int64_t heads() const { return sizes_.batch * sizes_.heads; }
  int64_t rows() const { return heads() * sizes_.rounds; }
  int64_t slots() const { return sizes_.rounds * (Wraps(options_) ? 2 : 1); }

  Memory LayOut(Workspace& workspace) const {
    const Problem& p = problem();
    const int64_t tokens = sizes_.tokens, sorted = IsWhole(options_) ? 0 : rows();
    Memory memory;
    memory.keys = workspace.Take<std::byte>(heads() * tokens * p.head_dim *
                                            static_cast<int64_t>(SizeOf(p.dtype)));
    memory.buckets = workspace.Take<int32_t>(rows() * tokens);
    memory.places = workspace.Take<int32_t>(sorted * tokens);
    memory.orders = workspace.Take<int32_t>(sorted * sizes_.order);
    const int64_t codes = IsWhole(options_) ? 0 : slots() * heads() * tokens;
    memory.query_codes = workspace.Take<int32_t>(codes);
    memory.key_codes = Wraps(options_) ? workspace.Take<int32_t>(codes) : memory.query_codes;
    return memory;
  }

  absl::Status FindBuckets(const Inputs& inputs, const Outputs& outputs, const Memory& memory,
                           const Execution& execution) const {
    LshBucketArguments a = {};
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
    if (given.empty() && !IsWhole(options_)) {
      TFB_RETURN_IF_ERROR(hash_.Run(inputs.Get("q"), memory.buckets, execution));
    }
    if (device_ == Device::kCpu) {
      BucketsOnCpu(a, execution);
      return absl::OkStatus();
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(KernelsOn<LshKernels>(runtime->target()).buckets(a, execution.stream));
  }

  // As the kernel Buckets.
  void BucketsOnCpu(const LshBucketArguments& a, const Execution& execution) const {
    execution.pool->ParallelFor(rows(), [&](int64_t row, int) {
      const int64_t head = row / sizes_.rounds, round = row % sizes_.rounds;
      const int64_t b = head / sizes_.heads, h = head % sizes_.heads;
      int32_t* buckets = a.buckets + row * sizes_.tokens;
      for (int64_t i = 0; i < sizes_.tokens; ++i) {
        const auto offset = [&](const int64_t* strides) {
          return b * strides[0] + h * strides[1] + i * strides[2] + round * strides[3];
        };
        int32_t bucket = 0;
        if (sizes_.buckets > 1) {
          bucket = a.given == nullptr ? buckets[i] : a.given[offset(a.given_strides)];
        }
        bucket = std::clamp<int32_t>(bucket, 0, sizes_.buckets - 1);
        if (a.written != nullptr) a.written[offset(a.written_strides)] = bucket;
        const bool is_token =
            a.key_mask == nullptr ||
            a.key_mask[b * a.key_mask_strides[0] + i * a.key_mask_strides[1]] != 0;
        buckets[i] = is_token ? bucket : sizes_.buckets;
      }
    });
  }

  absl::Status Sort(const Memory& memory, const Execution& execution) const {
    TokenSortCall sort = {memory.buckets, rows(),       sizes_.tokens, sizes_.buckets + 1,
                          memory.orders,  sizes_.order, memory.places};
    TFB_RETURN_IF_ERROR(SortTokens(device_, sort, execution));
    LshCodeArguments a = {sizes_,        memory.buckets,     memory.places,
                          memory.orders, memory.query_codes, memory.key_codes};
    if (device_ == Device::kCpu) {
      CodesOnCpu(a, execution);
      return absl::OkStatus();
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(KernelsOn<LshKernels>(runtime->target()).codes(a, execution.stream));
  }

  // As the kernel Codes.
  void CodesOnCpu(const LshCodeArguments& a, const Execution& execution) const {
    const int64_t tokens = sizes_.tokens, slot = heads() * tokens, tail = sizes_.order - tokens;
    execution.pool->ParallelFor(rows(), [&](int64_t row, int) {
      const int64_t head = row / sizes_.rounds, round = row % sizes_.rounds;
      const int64_t before = head * sizes_.rounds + sizes_.RoundBefore(round);
      const int32_t* buckets = a.buckets + row * tokens;
      const int32_t* places = a.places + row * tokens;
      int32_t* code = a.query_codes + round * slot + head * tokens;
      for (int64_t i = 0; i < tokens; ++i) code[i] = sizes_.Code(buckets[i], places[i]);
      if (tail == 0) return;
      const int32_t* order_before = a.orders + before * sizes_.order;
      std::copy_n(order_before + tokens - tail, tail, a.orders + row * sizes_.order + tokens);
      int32_t* key_code = a.key_codes + round * slot + head * tokens;
      std::copy_n(code, tokens, key_code);
      const int64_t further = sizes_.rounds * slot;
      for (int64_t i = 0; i < tokens; ++i) {
        code[further + i] = sizes_.WrapQueryCode(places[i]);
        key_code[further + i] = sizes_.WrapKeyCode(a.places[before * tokens + i]);
      }
    });
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
  std::vector<FlashCall> calls_;  // room for those of a Run
  bool is_set_up_ = false;
};

// ---- The definition ----

// One head: buckets of its tokens, and in how many ways each sees another.
class Head {
 public:
  Head(const Problem& problem, const LshOptions& options) : problem_(problem), options_(options) {}

  // Appends a round, whose buckets are given; a token that is none is behind all others.
  void AddRound(std::vector<int64_t> bucket) {
    const int64_t tokens = problem_.query_tokens;
    std::vector<int64_t> order(tokens), chunk(tokens);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t i, int64_t j) { return bucket[i] < bucket[j]; });
    for (int64_t place = 0; place < tokens; ++place) {
      chunk[order[place]] = place / ChunkOf(options_, tokens);
      last_chunk_ = place / ChunkOf(options_, tokens);
    }
    bucket_.push_back(std::move(bucket));
    chunk_.push_back(std::move(chunk));
  }

  // N_ij.
  int64_t Count(int64_t i, int64_t j) const {
    int64_t count = 0;
    const size_t rounds = chunk_.size();
    for (size_t r = 0; r < rounds; ++r) {
      const int64_t back = chunk_[r][i] - chunk_[r][j];
      if (back == 0 || back == 1) {
        count += !options_.bucket_mask || bucket_[r][i] == bucket_[r][j];
      }
      if (!Wraps(options_) || chunk_[r][i] != 0) continue;
      count += chunk_[(r + rounds - 1) % rounds][j] == last_chunk_;
    }
    return count;
  }

 private:
  const Problem& problem_;
  const LshOptions& options_;
  int64_t last_chunk_ = 0;
  std::vector<std::vector<int64_t>> bucket_, chunk_;  // [rounds][tokens]
};

// The hashes of all tokens: those given, or by the formula. Where fp32 cannot tell which product is
// the largest, those that a layer computed, if they are such.
class Hashes {
 public:
  Hashes(const Problem& problem, const LshOptions& options, const NamedTensors& parameters,
         const Inputs& inputs, const DefinitionRequest& request)
      : problem_(problem),
        factors_(LshFactors(options, problem.query_tokens)),
        q_(inputs.Get("q")),
        given_(inputs.Get("buckets")) {
    if (!factors_.empty()) rotations_ = DoubleTensor(parameters.at("rotations").view());
    if (request.computed != nullptr && request.computed->count("buckets") > 0) {
      computed_ = request.computed->at("buckets").view();
    }
  }

  int64_t buckets() const { return BucketCount(factors_); }
  int64_t Of(int64_t b, int64_t h, int64_t i, int64_t round) const {
    if (!given_.empty()) {
      return std::clamp<int64_t>(*given_.At<int32_t>(b, h, i, round), 0, buckets() - 1);
    }
    int64_t computed = computed_.empty() ? 0 : *computed_.At<int32_t>(b, h, i, round);
    int64_t bucket = 0, step = 1, first = 0;
    for (const int64_t columns : factors_) {
      const int64_t word = computed % (2 * columns);
      bucket +=
          step * OfFactor(q_.Row(b, h, i), round, first, columns, computed_.empty() ? -1 : word);
      computed /= 2 * columns;
      step *= 2 * columns;
      first += columns;
    }
    return bucket;
  }

 private:
  int64_t OfFactor(const double* x, int64_t round, int64_t first, int64_t columns,
                   int64_t computed) const {
    std::vector<double> product, error;
    for (int64_t n = 0; n < columns; ++n) {
      double sum = 0, magnitude = 0;
      for (int64_t c = 0; c < problem_.head_dim; ++c) {
        const double term = x[c] * rotations_.Row(c, round)[first + n];
        sum += term;
        magnitude += std::abs(term);
      }
      product.push_back(sum);
      error.push_back(static_cast<double>(problem_.head_dim) * UnitRoundoff(DType::kF32) *
                          magnitude +
                      std::ldexp(static_cast<double>(problem_.head_dim), -149));
    }
    for (int64_t n = 0; n < columns; ++n) {
      product.push_back(-product[n]);
      error.push_back(error[n]);
    }
    int64_t best = 0;
    for (int64_t n = 1; n < 2 * columns; ++n) {
      if (product[n] > product[best]) best = n;
    }
    const bool ties = computed >= 0 && computed < 2 * columns &&
                      product[computed] + error[computed] >= product[best] - error[best];
    return ties ? computed : best;
  }

  const Problem& problem_;
  std::vector<int64_t> factors_;
  DoubleTensor q_, rotations_;
  ConstTensorView given_, computed_;
};

// The normalised vectors, in 16 bits where the problem is.
DoubleTensor KeysOf(const Problem& problem, const LshOptions& options, const DoubleTensor& q) {
  Tensor keys(DType::kF64,
              {problem.batch, problem.query_heads, problem.query_tokens, problem.head_dim});
  const int64_t channels = problem.head_dim;
  for (int64_t row = 0; row * channels < keys.num_elements(); ++row) {
    const double* x = q.data() + row * channels;
    const double norm = std::sqrt(Dot(x, x, channels) + KeyEpsilon(problem, options));
    for (int64_t c = 0; c < channels; ++c) {
      keys.view().Set(row * channels + c, norm == 0 ? 0 : x[c] / norm);
    }
  }
  if (problem.dtype != DType::kF32) keys = keys.CloneAs(problem.dtype);
  return DoubleTensor(keys.view());
}

absl::Status Check(const Problem& problem, const LshOptions& options) {
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
  const int64_t chunks = problem.query_tokens / ChunkOf(options, problem.query_tokens) + 3;
  const int64_t most = std::numeric_limits<int32_t>::max() / chunks;
  const int64_t buckets = BucketCount(LshFactors(options, problem.query_tokens));
  if (options.bucket_mask && buckets >= most) {
    return absl::InvalidArgumentError(absl::StrCat("lsh: buckets is ", buckets, ", with ",
                                                   chunks - 2, " chunks; allowed are less than ",
                                                   most, ", or larger chunks"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<int64_t> LshFactors(const LshOptions& options, int64_t tokens) {
  if (options.buckets == 1) return {};
  int64_t buckets = options.buckets;
  if (buckets == 0)
    buckets = std::max<int64_t>((tokens + options.chunk - 1) / options.chunk, 1) * 2;
  if (!options.factorize || buckets <= kMostUnfactorized) return {buckets / 2};
  int64_t first = static_cast<int64_t>(std::sqrt(static_cast<double>(buckets))) / 2 * 2;
  if (options.buckets == 0) return {first / 2, (buckets + 2 * first - 1) / (2 * first)};
  while (first > 2 && (buckets % first != 0 || buckets / first % 2 != 0)) first -= 2;
  if (buckets % (2 * first) != 0) return {buckets / 2};  // twice an odd number
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
                     {p.batch, p.query_heads, p.query_tokens, RoundsOf(options)},
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
  TFB_RETURN_IF_ERROR(Check(problem, options));
  const std::vector<int64_t> factors = LshFactors(options, problem.query_tokens);
  NamedTensors parameters;
  if (!factors.empty()) {
    const int64_t columns = std::accumulate(factors.begin(), factors.end(), int64_t{0});
    TFB_ASSIGN_OR_RETURN(
        Tensor rotations,
        Tensor::Allocate(DType::kF32, Shape{problem.head_dim, options.rounds, columns}));
    FillNormal(&rotations, seed, "rotations");
    parameters["rotations"] = std::move(rotations);
  }
  return std::make_unique<LshLayer>(problem, ReadTensors(problem, options),
                                    WrittenTensors(problem, options), options, device,
                                    std::move(parameters));
}

absl::Status Lsh::Definition(const Problem& problem, const LshOptions& options,
                             const NamedTensors& parameters, const Inputs& inputs,
                             const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  const int64_t tokens = problem.query_tokens, rounds = RoundsOf(options);
  const Hashes hashes(problem, options, parameters, inputs, request);
  const KeyMask is_token(inputs);
  const DoubleTensor q(inputs.Get("q"));
  const std::vector<int64_t> rows = RowsOf(request, tokens);
  Tensor buckets(DType::kF64,
                 {problem.batch, problem.query_heads, static_cast<int64_t>(rows.size()), rounds});
  std::vector<Head> heads;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      Head& head = heads.emplace_back(problem, options);
      for (int64_t r = 0; r < rounds; ++r) {
        std::vector<int64_t> bucket;
        for (int64_t i = 0; i < tokens; ++i) bucket.push_back(hashes.Of(b, h, i, r));
        for (size_t n = 0; n < rows.size(); ++n) {
          *buckets.view().MutableAt<double>(b, h, static_cast<int64_t>(n), r) =
              static_cast<double>(bucket[rows[n]]);
        }
        for (int64_t i = 0; i < tokens; ++i) {
          if (!is_token(b, i)) bucket[i] = hashes.buckets();
        }
        head.AddRound(std::move(bucket));
      }
    }
  }
  const double scale = ScaleOf(problem, options);
  const DoubleTensor keys = KeysOf(problem, options, q);
  const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!is_token(b, j) || (problem.causal && j > i)) return kNotSeen;
    const int64_t count = heads[b * problem.query_heads + h].Count(i, j);
    if (count == 0) return kNotSeen;
    double s = scale * Dot(q.Row(b, h, i), keys.Row(b, h, j), problem.head_dim);
    if (i == j) s += options.self_bias;
    return options.dedup ? s : s + std::log(static_cast<double>(count));
  };
  DefineAttention(problem, inputs, request, score, outputs);
  (*outputs)["buckets"] = std::move(buckets);
  return absl::OkStatus();
}

}  // namespace tfb
