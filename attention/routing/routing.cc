#include "attention/routing/routing.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/routing/routing_functors.h"
#include "attention/routing/routing_sizes.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/definition.h"
#include "core/flash/flash_engine.h"
#include "core/gather/gather.h"
#include "core/random.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::routing {
namespace {

const bool registered = RegisterTechnique<Routing>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "routing";
  info.family = "attention";
  info.title = "Routing Transformer's attention in clusters";
  info.citation = "Roy, Saffar, Vaswani, Grangier 2021, arXiv:2003.05997v5, section 4";
  info.exactness = Exactness::kOwn;
  info.budget_option = "clusters";
  info.growth = 1;
  info.selection = "members";
  return info;
}

// A pattern over the members of all clusters, one cluster after the other, in the order of their
// tokens.
class ClusterPattern : public Pattern {
 public:
  ClusterPattern(int64_t size, bool causal) : size_(size), causal_(causal) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t begin = i / size_ * size_, end = causal_ ? i + 1 : begin + size_;
    keys->Add(begin, end);
    return end;
  }

 private:
  int64_t size_;
  bool causal_;
};

// A pattern of blocks that see themselves and the previous one and, where not causal, the next one.
class BlockPattern : public Pattern {
 public:
  BlockPattern(int64_t block, bool causal) : block_(block), causal_(causal) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t begin = i / block_ * block_;
    keys->Add(begin - block_, begin + (causal_ ? 1 : 2) * block_);
    return begin + block_;
  }

 private:
  int64_t block_;
  bool causal_;
};

// The arrays of a Run, in the workspace. Sets beyond the existing ones hold nothing.
struct Memory {
  void* normalized[2];  // [batch][heads][tokens][head_dim] of the problem's dtype: queries, keys
  void* unit_keys;      // likewise, where scored keys are queries of length 1
  float* scores;        // [batch][heads][clusters][stride]
  int32_t* members[2];  // [batch][heads][clusters][size]
  float* rows;          // [batch][heads][clusters * size][value_dim]
};

class RoutingLayer : public Layer {
 public:
  RoutingLayer(const Problem& problem, std::vector<TensorSpec> inputs,
               std::vector<TensorSpec> outputs, const RoutingOptions& options, Device device,
               NamedTensors parameters)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        options_(options),
        device_(device),
        sizes_(problem, options),
        in_clusters_(problem),
        in_blocks_(problem) {
    parameters_ = std::move(parameters);
    in_clusters_.query_heads = in_clusters_.kv_heads = sizes_.heads;
    in_clusters_.query_tokens = in_clusters_.kv_tokens = sizes_.clusters * sizes_.size;
    in_clusters_.causal = false;  // the pattern is causal
    in_blocks_.query_heads = in_blocks_.kv_heads = sizes_.local_heads;
  }

  size_t workspace_bytes(int threads) const override {
    const Problem& p = problem();
    size_t steps = 0;
    const auto add = [&steps](size_t bytes) { steps = std::max(steps, bytes); };
    if (sizes_.heads > 0) {
      add(FlashEngine::WorkspaceBytes(device_, in_clusters_, false, threads));
      add(VectorScoreWorkspaceBytes(device_, p.head_dim, threads));
      add(LargestWorkspaceBytes(device_, p.query_tokens, threads));
      add(GroupMeanWorkspaceBytes(device_, p.value_dim, threads));
    }
    if (sizes_.local_heads > 0) {
      add(FlashEngine::WorkspaceBytes(device_, in_blocks_, false, threads));
    }
    return steps + Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); });
  }

  Cost cost() const override {
    const Problem& p = problem();
    Cost cost;
    if (is_set_up_) {
      double pairs = 0;
      if (sizes_.heads > 0) pairs += clusters_.schedule().KeptPairs(sizes_.heads);
      if (sizes_.local_heads > 0) pairs += blocks_.schedule().KeptPairs(sizes_.local_heads);
      const double assigned =
          static_cast<double>(sizes_.sets * sizes_.heads * sizes_.clusters * p.query_tokens);
      cost.flops = 2.0 * static_cast<double>(p.batch) *
                   (static_cast<double>(p.head_dim + p.value_dim) * pairs +
                    static_cast<double>(p.head_dim) * assigned);
    }
    cost.bytes = TensorBytes();
    return cost;
  }

  std::map<std::string, double> statistics() const override {
    return grouping_.statistics(device_);
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    if (options_.updates > 0) TFB_RETURN_IF_ERROR(Update(inputs, execution));
    if (sizes_.heads > 0) {
      const ConstTensorView centroids = parameters_.at("centroids").view();
      TFB_ASSIGN_OR_RETURN(
          centroids_, CopyFloats(device_, Slice(centroids, 0, sizes_.local_heads, sizes_.heads)));
      TFB_ASSIGN_OR_RETURN(clusters_,
                           FlashEngine::Create(device_, in_clusters_,
                                               ClusterPattern(sizes_.size, problem().causal)));
    }
    if (sizes_.local_heads > 0) {
      TFB_ASSIGN_OR_RETURN(
          blocks_, FlashEngine::Create(device_, in_blocks_,
                                       BlockPattern(options_.local_block, problem().causal)));
    }
    is_set_up_ = true;
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const Memory memory = LayOut(workspace);
    Execution step = execution;
    step.workspace = workspace.Rest();
    grouping_.Begin();
    for (int64_t set = 0; set < sizes_.sets; ++set) {
      if (sizes_.heads > 0) TFB_RETURN_IF_ERROR(Assign(inputs, set, memory, step));
      TFB_RETURN_IF_ERROR(WriteMembers(outputs, set, memory, step));
    }
    grouping_.GroupsAreFound();
    if (sizes_.heads > 0) TFB_RETURN_IF_ERROR(AttendInClusters(inputs, outputs, memory, step));
    TFB_RETURN_IF_ERROR(AttendLocally(inputs, outputs, step));
    grouping_.End();
    return absl::OkStatus();
  }

 private:
  Memory LayOut(Workspace& workspace) const {
    const Problem& p = problem();
    const int64_t heads = p.batch * sizes_.heads, rows = heads * sizes_.clusters;
    Memory memory = {};
    for (int64_t set = 0; set < sizes_.sets; ++set) {
      memory.normalized[set] =
          workspace.Take<std::byte>(heads * p.query_tokens * p.head_dim * SizeOf(p.dtype));
      memory.members[set] = workspace.Take<int32_t>(rows * sizes_.size);
    }
    if (ScoresGiven() && p.causal) {
      memory.unit_keys =
          workspace.Take<std::byte>(heads * p.query_tokens * p.head_dim * SizeOf(p.dtype));
    }
    memory.scores = workspace.Take<float>(rows * ScoreStride(p.query_tokens));
    memory.rows = workspace.Take<float>(rows * sizes_.size * p.value_dim);
    return memory;
  }

  // Returns the queries or keys of the heads that have clusters, or of those that have none.
  ConstTensorView Vectors(const Inputs& inputs, int64_t set) const {
    return inputs.Get(set == 0 || problem().causal ? "q" : "k");
  }
  template <class View>
  View Clustered(const View& view) const {
    return Slice(view, 1, sizes_.local_heads, sizes_.heads);
  }
  TensorView Normalized(void* vectors) const {
    const Problem& p = problem();
    return TensorView(vectors, p.dtype, {p.batch, sizes_.heads, p.query_tokens, p.head_dim});
  }
  bool ScoresGiven() const { return options_.scored == RoutingOptions::Scored::kGiven; }

  absl::Status AttendLocally(const Inputs& inputs, const Outputs& outputs,
                             const Execution& execution) const {
    if (sizes_.local_heads == 0) return absl::OkStatus();
    const auto local = [this](const auto& view) { return Slice(view, 1, 0, sizes_.local_heads); };
    FlashCall call = blocks_.NewCall();
    call.q = local(inputs.Get("q"));
    call.k = local(Vectors(inputs, 1));
    call.v = local(inputs.Get("v"));
    call.key_mask = inputs.Get("key_mask");
    call.out = local(outputs.Get("out"));
    return blocks_.Run(call, execution);
  }

  // Finds the members among queries or keys.
  absl::Status Assign(const Inputs& inputs, int64_t set, const Memory& memory,
                      const Execution& execution) const {
    const Problem& p = problem();
    const TensorView normalized = Normalized(memory.normalized[set]);
    const RowNorm norm = options_.norm == RoutingOptions::Norm::kUnit
                             ? RowNorm{}
                             : RowNorm{true, true, kRoutingNormEpsilon};
    TFB_RETURN_IF_ERROR(
        NormalizeRows(device_, norm, Clustered(Vectors(inputs, set)), normalized, execution));
    const int64_t stride = ScoreStride(p.query_tokens);
    const ConstTensorView given = inputs.Get("members");
    if (given.empty()) {
      const VectorScoreCall score = {normalized,      centroids_.data(),
                                     sizes_.clusters, inputs.Get("key_mask"),
                                     memory.scores,   stride};
      TFB_RETURN_IF_ERROR(ScoreVectors(device_, score, execution));
    } else {
      TFB_RETURN_IF_ERROR(ForEachInRows(device_, p.batch * sizes_.heads * sizes_.clusters,
                                        p.query_tokens, ScoresFromMarks{Marks(given, set, memory)},
                                        execution));
    }
    const LargestCall largest = {memory.scores,  p.batch * sizes_.heads * sizes_.clusters,
                                 p.query_tokens, stride,
                                 sizes_.size,    memory.members[set]};
    return LargestTokens(device_, largest, execution);
  }

  RoutingMarks Marks(const ConstTensorView& view, int64_t set, const Memory& memory) const {
    RoutingMarks a = {};
    a.marks = static_cast<uint8_t*>(const_cast<void*>(view.data));
    std::copy_n(view.strides.data(), 4, a.strides);
    a.first = set * sizes_.clusters;
    a.first_head = sizes_.local_heads;
    a.scores = memory.scores;
    a.members = memory.members[set];
    a.heads = sizes_.heads;
    a.clusters = sizes_.clusters;
    a.stride = ScoreStride(problem().query_tokens);
    a.size = sizes_.size;
    return a;
  }
  absl::Status WriteMembers(const Outputs& outputs, int64_t set, const Memory& memory,
                            const Execution& execution) const {
    const TensorView marks = outputs.Get("members");
    if (marks.empty()) return absl::OkStatus();
    const Problem& p = problem();
    return ForEachInRows(device_, p.batch * p.query_heads * sizes_.clusters, p.query_tokens,
                         MarksOfMembers{Marks(marks, set, memory)}, execution);
  }

  absl::Status AttendInClusters(const Inputs& inputs, const Outputs& outputs, const Memory& memory,
                                const Execution& execution) const {
    const Problem& p = problem();
    const int64_t keys = sizes_.sets - 1, places = sizes_.clusters * sizes_.size;
    FlashCall call = clusters_.NewCall();
    call.q = Normalized(memory.normalized[0]);
    call.k = Normalized(memory.normalized[keys]);
    if (ScoresGiven()) {
      call.q = Clustered(inputs.Get("q"));
      call.k = Clustered(Vectors(inputs, keys));
    }
    if (ScoresGiven() && p.causal) {
      const TensorView unit = Normalized(memory.unit_keys);
      TFB_RETURN_IF_ERROR(NormalizeRows(device_, {}, call.q, unit, execution));
      call.k = unit;
    }
    call.tokens.self_bias = static_cast<float>(options_.self_bias);
    call.v = Clustered(inputs.Get("v"));
    call.key_mask = inputs.Get("key_mask");
    call.query_order = {memory.members[0], sizes_.heads * places, places};
    call.key_order = {memory.members[keys], sizes_.heads * places, places};
    call.out_by_row = true;
    call.out = TensorView(memory.rows, DType::kF32, {p.batch, sizes_.heads, places, p.value_dim});
    call.scale = RoutingScale(p, options_);
    TFB_RETURN_IF_ERROR(clusters_.Run(call, execution));
    const GroupMeanCall mean = {memory.members[0], sizes_.clusters, sizes_.size, call.out,
                                Clustered(outputs.Get("out"))};
    return MeanOfGroups(device_, mean, execution);
  }

  // Moves the centroids by the tokens of Setup's inputs, on the host.
  absl::Status Update(const Inputs& inputs, const Execution& execution);

  RoutingOptions options_;
  Device device_;
  RoutingSizes sizes_;
  Problem in_clusters_;
  Problem in_blocks_;
  DeviceArray<float> centroids_;
  FlashEngine clusters_;
  FlashEngine blocks_;
  GroupingShare grouping_;
  bool is_set_up_ = false;
};

absl::Status RoutingLayer::Update(const Inputs& inputs, const Execution& execution) {
  const Problem& p = problem();
  std::vector<DoubleTensor> sets;
  for (int64_t set = 0; set < sizes_.sets; ++set) {
    const ConstTensorView view = Vectors(inputs, set);
    TFB_ASSIGN_OR_RETURN(const Tensor on_host, CopyToHost(device_, view, execution.stream));
    sets.push_back(RoutingNormalized(p, options_.norm, on_host.view()));
  }
  const ConstTensorView key_mask = inputs.Get("key_mask");
  Tensor tokens(DType::kU8, {p.batch, p.query_tokens});
  Fill(tokens.view(), 1);
  if (!key_mask.empty()) {
    TFB_ASSIGN_OR_RETURN(tokens, CopyToHost(device_, key_mask, execution.stream));
  }
  Tensor& centroids = parameters_.at("centroids");
  for (int64_t h = sizes_.local_heads; h < p.query_heads; ++h) {
    std::vector<std::vector<double>> vectors[2];
    for (int64_t set = 0; set < 2; ++set) {
      const DoubleTensor& rows = sets[set < sizes_.sets ? set : 0];
      for (int64_t b = 0; b < p.batch; ++b) {
        for (int64_t i = 0; i < p.query_tokens; ++i) {
          if (*tokens.view().At<uint8_t>(b, i) == 0) continue;
          vectors[set].emplace_back(rows.Row(b, h, i), rows.Row(b, h, i) + p.head_dim);
        }
      }
    }
    float* of_head = centroids.span<float>().data() + h * sizes_.clusters * p.head_dim;
    std::vector<double> moved(of_head, of_head + sizes_.clusters * p.head_dim);
    for (int64_t n = 0; n < options_.updates; ++n) {
      UpdateCentroids(options_, sizes_.clusters, p.head_dim, vectors[0], vectors[1], &moved);
    }
    std::copy(moved.begin(), moved.end(), of_head);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRouting(const Problem& problem) {
  if (problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat("routing is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
  if (problem.query_heads != problem.kv_heads) {
    return absl::UnimplementedError(
        absl::StrCat("in routing every head has clusters of its own keys: query_heads is ",
                     problem.query_heads, ", kv_heads is ", problem.kv_heads));
  }
  return absl::OkStatus();
}

void UpdateCentroids(const RoutingOptions& options, int64_t clusters, int64_t head_dim,
                     const std::vector<std::vector<double>>& queries,
                     const std::vector<std::vector<double>>& keys, std::vector<double>* centroids) {
  std::vector<double> sums(clusters * head_dim, 0), counts(clusters, 0);
  for (const auto* vectors : {&queries, &keys}) {
    for (const std::vector<double>& x : *vectors) {
      int64_t nearest = 0;
      double largest = kNotSeen;
      for (int64_t c = 0; c < clusters; ++c) {
        const double score = Dot(x.data(), centroids->data() + c * head_dim, head_dim);
        if (score > largest) {
          largest = score;
          nearest = c;
        }
      }
      counts[nearest] += 1;
      for (int64_t n = 0; n < head_dim; ++n) sums[nearest * head_dim + n] += x[n];
    }
  }
  for (int64_t c = 0; c < clusters; ++c) {
    if (options.update_mean && counts[c] == 0) continue;
    const double divisor = options.update_mean ? counts[c] : 2;
    for (int64_t n = 0; n < head_dim; ++n) {
      double& mu = (*centroids)[c * head_dim + n];
      mu = options.decay * mu + (1 - options.decay) * sums[c * head_dim + n] / divisor;
    }
  }
}

Routing::Routing() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Routing::ReadTensors(const Problem& problem,
                                             const RoutingOptions& options) const {
  std::vector<TensorSpec> tensors;
  for (TensorSpec& spec : QkvInputs(problem)) {
    if (spec.name != "k" || !problem.causal) tensors.push_back(std::move(spec));
  }
  tensors.push_back(WrittenTensors(problem, options).back());
  return tensors;
}

std::vector<TensorSpec> Routing::WrittenTensors(const Problem& p,
                                                const RoutingOptions& options) const {
  const RoutingSizes sizes(p, options);
  return {AttentionOutputs(p)[0],
          {"members",
           {p.batch, p.query_heads, p.query_tokens, sizes.sets * sizes.clusters},
           DType::kU8,
           /*optional=*/true}};
}

absl::StatusOr<TechniqueSpec> Routing::Counterpart(const Problem& problem,
                                                   const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole, Canonical(options));
  whole["clusters"] = "1";
  whole["local_block"] = absl::StrCat(std::max<int64_t>(problem.query_tokens, 1));
  TFB_ASSIGN_OR_RETURN(const Options defaults, Canonical({}));
  for (const char* name : {"updates", "decay", "update_mean"}) whole[name] = defaults.at(name);
  return TechniqueSpec{info().name, std::move(whole)};
}

absl::StatusOr<std::unique_ptr<Layer>> Routing::MakeLayer(const Problem& problem,
                                                          const RoutingOptions& options,
                                                          Device device, uint64_t seed) const {
  TFB_RETURN_IF_ERROR(CheckRouting(problem));
  const RoutingSizes sizes(problem, options);
  TFB_ASSIGN_OR_RETURN(
      Tensor centroids,
      Tensor::Allocate(DType::kF32, Shape{problem.query_heads, sizes.clusters, problem.head_dim}));
  FillNormal(&centroids, seed, "centroids");
  NamedTensors parameters;
  parameters["centroids"] = std::move(centroids);
  return std::make_unique<RoutingLayer>(problem, ReadTensors(problem, options),
                                        WrittenTensors(problem, options), options, device,
                                        std::move(parameters));
}

}  // namespace tfb::routing
