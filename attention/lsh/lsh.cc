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
#include "core/gather/gather.h"
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
  info.self_attention = true;
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

LshSizes SizesOf(const Problem& problem, const LshOptions& options) {
  const int64_t tokens = problem.query_tokens, chunk = LshChunk(options, tokens);
  const int64_t buckets = LshBuckets(LshFactors(options, tokens));
  LshSizes sizes = {problem.batch,
                    problem.query_heads,
                    LshRounds(options),
                    tokens,
                    chunk,
                    static_cast<int32_t>(buckets),
                    tokens,
                    options.bucket_mask};
  // `order` includes the last chunk, which the first one sees.
  if (LshWraps(options) && tokens > 0) sizes.order += (tokens - 1) % chunk + 1;
  return sizes;
}

// Returns the name of a round's order of the tokens, and of the last chunk of the round before.
std::string OrderName(int64_t round) { return absl::StrCat("order", round); }

// Makes keys of queries, finds buckets, and sorts the tokens of each round by them: the tensors
// keys [batch, heads, tokens, head_dim], and where there are several buckets order0, order1, ...
// [batch, heads, order], query_codes and key_codes [slots, batch, heads, tokens], with a slot a
// round and, with wrap, as many again.
class SortByBucket : public FlashStep {
 public:
  SortByBucket(const Problem& problem, const LshOptions& options, const NamedTensors& parameters)
      : problem_(problem),
        options_(options),
        parameters_(parameters),
        factors_(LshFactors(options, problem.query_tokens)),
        columns_(std::accumulate(factors_.begin(), factors_.end(), int64_t{0})),
        sizes_(SizesOf(problem, options)) {
    for (int64_t round = 0; round < sizes_.rounds; ++round) orders_.push_back(OrderName(round));
  }

  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    device_ = device;
    if (LshIsWhole(options_)) return absl::OkStatus();
    TFB_ASSIGN_OR_RETURN(hash_,
                         AngularHash::Create(device, parameters_.at("rotations").view(), factors_));
    return absl::OkStatus();
  }

  size_t workspace_bytes(Device device, int threads) const override {
    if (LshIsWhole(options_)) return 0;
    return std::max(
        AngularHash::WorkspaceBytes(device, problem_.head_dim, sizes_.rounds, columns_, threads),
        SortWorkspaceBytes(device, rows(), sizes_.buckets + 1, threads));
  }

  double flops() const override {
    const double hashed =
        static_cast<double>(problem_.query_heads * problem_.query_tokens * sizes_.rounds);
    return 2.0 * static_cast<double>(problem_.batch) *
           (static_cast<double>(problem_.head_dim) * static_cast<double>(columns_) * hashed);
  }

  void LayOut(Workspace* workspace, Inputs* tensors) override {
    const Problem& p = problem_;
    const int64_t tokens = sizes_.tokens, whole = heads() * tokens;
    keys_ = TensorView(
        workspace->Take<std::byte>(whole * p.head_dim * static_cast<int64_t>(SizeOf(p.dtype))),
        p.dtype, {p.batch, p.query_heads, tokens, p.head_dim});
    tensors->Set("keys", keys_);
    buckets_ = workspace->Take<int32_t>(rows() * tokens);
    if (LshIsWhole(options_)) return;
    codes_.buckets = buckets_;
    codes_.places = places_ = workspace->Take<int32_t>(rows() * tokens);
    codes_.orders = workspace->Take<int32_t>(rows() * sizes_.order);
    const int64_t slots = sizes_.rounds * (LshWraps(options_) ? 2 : 1);
    codes_.query_codes = workspace->Take<int32_t>(slots * whole);
    codes_.key_codes =
        LshWraps(options_) ? workspace->Take<int32_t>(slots * whole) : codes_.query_codes;
    const int64_t of_head = sizes_.rounds * sizes_.order;
    const bool is_measured = codes_.orders == nullptr;  // and there is no memory yet
    for (int64_t round = 0; round < sizes_.rounds; ++round) {
      tensors->Set(orders_[round],
                   ConstTensorView(codes_.orders + (is_measured ? 0 : round * sizes_.order),
                                   DType::kI32, {p.batch, p.query_heads, sizes_.order},
                                   {p.query_heads * of_head, of_head, 1}));
    }
    const Shape of_codes = {slots, p.batch, p.query_heads, tokens};
    tensors->Set("query_codes", ConstTensorView(codes_.query_codes, DType::kI32, of_codes));
    tensors->Set("key_codes", ConstTensorView(codes_.key_codes, DType::kI32, of_codes));
  }

  absl::Status Run(const Inputs& tensors, const Outputs& outputs,
                   const Execution& execution) override {
    TFB_RETURN_IF_ERROR(NormalizeRows(device_, Norm(), tensors.Get("q"), keys_, execution));
    grouping_.Begin();
    TFB_RETURN_IF_ERROR(FindBuckets(tensors, outputs, execution));
    if (!LshIsWhole(options_)) TFB_RETURN_IF_ERROR(Sort(execution));
    grouping_.GroupsAreFound();
    return absl::OkStatus();
  }
  absl::Status Finish(const Inputs&, const Outputs&, const Execution&) override {
    grouping_.End();
    return absl::OkStatus();
  }

  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  double backward_flops() const override { return flops(); }  // buckets are found again
  absl::Status Backward(const Inputs& tensors, const Outputs& gradients, const ParameterGradients&,
                        const Execution& execution) override {
    const TensorView of_q = gradients.Get("q");
    if (of_q.empty()) return absl::OkStatus();
    return AddNormalizedGradients(device_, Norm(), tensors.Get("q"), gradients.Get("keys"), of_q,
                                  execution);
  }

  std::map<std::string, double> statistics() const override {
    return LshIsWhole(options_) ? std::map<std::string, double>() : grouping_.statistics(device_);
  }

 private:
  RowNorm Norm() const { return {false, false, LshKeyEpsilon(problem_, options_)}; }
  int64_t heads() const { return sizes_.batch * sizes_.heads; }
  int64_t rows() const { return heads() * sizes_.rounds; }

  absl::Status FindBuckets(const Inputs& inputs, const Outputs& outputs,
                           const Execution& execution) const {
    BucketsToSortBy a = {};
    a.sizes = sizes_;
    a.buckets = buckets_;
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
      TFB_RETURN_IF_ERROR(hash_.Run(inputs.Get("q"), buckets_, execution));
    }
    return ForEachInRows(device_, rows(), sizes_.tokens, a, execution);
  }

  absl::Status Sort(const Execution& execution) {
    const TokenSortCall sort = {buckets_,      rows(),       sizes_.tokens, sizes_.buckets + 1,
                                codes_.orders, sizes_.order, places_};
    TFB_RETURN_IF_ERROR(SortTokens(device_, sort, execution));
    codes_.sizes = sizes_;
    return ForEachInRows(device_, rows(), sizes_.order, codes_, execution);
  }

  Problem problem_;
  LshOptions options_;
  const NamedTensors& parameters_;
  std::vector<int64_t> factors_;
  int64_t columns_;  // of all factors
  LshSizes sizes_;
  std::vector<std::string> orders_;  // names
  Device device_ = Device::kCpu;
  AngularHash hash_;
  GroupingShare grouping_;
  // The arrays of a Run, in the workspace.
  TensorView keys_;
  int32_t* buckets_ = nullptr;  // [batch][heads][rounds][tokens]
  int32_t* places_ = nullptr;
  CodesOfPlaces codes_ = {};
};

}  // namespace

absl::Status Lsh::Check(const Problem& problem, const LshOptions& options) const {
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

Lsh::Lsh() : FlashTechnique(Info()) {}

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

absl::StatusOr<NamedTensors> Lsh::Draw(const Job& job) const {
  const std::vector<int64_t> factors = LshFactors(job.options, job.problem.query_tokens);
  if (factors.empty()) return NamedTensors();
  const int64_t columns = std::accumulate(factors.begin(), factors.end(), int64_t{0});
  Shape shape = {job.problem.head_dim, job.options.rounds, columns};
  if (job.options.per_head) shape.insert(shape.begin(), job.problem.query_heads);
  return DrawNormal(job.seed, {{"rotations", shape}});
}

// Rounds are parts of one softmax, so that they are merged by their log-sum-exp.
absl::StatusOr<FlashPlan> Lsh::Describe(const Job& job) const {
  const LshOptions& options = job.options;
  const LshSizes sizes = SizesOf(job.problem, options);
  FlashPlan plan(job.problem, LshScale(job.problem, options));
  plan.AddStep<SortByBucket>(job.problem, options, job.parameters);
  if (!LshIsWhole(options)) {
    plan.StopGradient("rotations",
                      "rotations only choose buckets, which stay as the forward pass found them");
  }
  for (int64_t round = 0; round < sizes.rounds; ++round) {
    if (round > 0) plan.AddPart().Causal();
    plan.Tensors("q", "keys", "v")
        .Sees(ChunkPattern(sizes.tokens, sizes.chunk))
        .Add<SelfBias>(options.self_bias);
    if (LshIsWhole(options)) continue;
    plan.QueryOrder(OrderName(round), sizes.tokens)
        .KeyOrder(OrderName(round), sizes.order)
        .Add<TokenSlots>("query_codes", "key_codes", options.bucket_mask ? round : -1,
                         options.dedup);
  }
  return plan;
}

}  // namespace tfb::lsh
