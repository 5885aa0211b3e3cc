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
#include "core/gather/gather.h"
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
  info.self_attention = true;
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

// Returns the name of the input that is normalised for queries or keys.
const char* GivenName(const Problem& problem, int64_t set) {
  return set == 0 || problem.causal ? "q" : "k";
}

ConstTensorView Vectors(const Problem& problem, const Inputs& inputs, int64_t set) {
  return inputs.Get(GivenName(problem, set));
}

bool ScoresGiven(const RoutingOptions& options) {
  return options.scored == RoutingOptions::Scored::kGiven;
}

// Names of tensors, for queries and keys.
constexpr const char* kNormalized[] = {"normalized_queries", "normalized_keys"};
constexpr const char* kMembers[] = {"members_queries", "members_keys"};

// Normalises queries and keys, finds the members of clusters, and averages the rows of a token
// behind the softmax: of the heads that have clusters the tensors normalized_queries and
// normalized_keys [batch, heads, tokens, head_dim], unit_keys, where scored keys are queries of
// length 1, members_queries and members_keys, i32 [batch, heads, clusters * size], and for a
// softmax to write rows and rows_log_sum_exp, f32 [batch, heads, clusters * size, value_dim] and
// without the last dimension.
class Clusters : public FlashStep {
 public:
  Clusters(const Problem& problem, const RoutingOptions& options, const NamedTensors& parameters)
      : problem_(problem), options_(options), parameters_(parameters), sizes_(problem, options) {}

  absl::Status Setup(Device device, const Inputs&, const Execution&) override {
    device_ = device;
    if (sizes_.heads == 0) return absl::OkStatus();
    const ConstTensorView centroids = parameters_.at("centroids").view();
    TFB_ASSIGN_OR_RETURN(centroids_, CopyFloats(device, Clustered(centroids, 0)));
    return absl::OkStatus();
  }

  void LayOut(Workspace* workspace, Inputs* tensors) override {
    const Problem& p = problem_;
    const int64_t rows = p.batch * sizes_.heads * sizes_.clusters;
    const int64_t places = sizes_.clusters * sizes_.size;
    const auto take = [&](const char* name) {
      const Shape shape = {p.batch, sizes_.heads, p.query_tokens, p.head_dim};
      const TensorView vectors(
          workspace->Take<std::byte>(NumElements(shape) * static_cast<int64_t>(SizeOf(p.dtype))),
          p.dtype, shape);
      tensors->Set(name, vectors);
      return vectors;
    };
    for (int64_t set = 0; set < sizes_.sets; ++set) {
      normalized_[set] = take(kNormalized[set]);
      members_[set] = workspace->Take<int32_t>(rows * sizes_.size);
      tensors->Set(kMembers[set],
                   ConstTensorView(members_[set], DType::kI32, {p.batch, sizes_.heads, places}));
    }
    if (ScoresGiven(options_) && p.causal) unit_keys_ = take("unit_keys");
    scores_ = workspace->Take<float>(rows * ScoreStride(p.query_tokens));
    const auto set = [&](const char* name, const Shape& shape) {
      tensors->Set(name,
                   ConstTensorView(workspace->Take<float>(NumElements(shape)), DType::kF32, shape));
    };
    set("rows", {p.batch, sizes_.heads, places, p.value_dim});
    set("rows_log_sum_exp", {p.batch, sizes_.heads, places});
  }

  size_t workspace_bytes(Device device, int threads) const override {
    if (sizes_.heads == 0) return 0;
    return std::max({VectorScoreWorkspaceBytes(device, problem_.head_dim, threads),
                     LargestWorkspaceBytes(device, problem_.query_tokens, threads),
                     GroupMeanWorkspaceBytes(device, problem_.value_dim, threads)});
  }

  double flops() const override {
    const double assigned =
        static_cast<double>(sizes_.sets * sizes_.heads * sizes_.clusters * problem_.query_tokens);
    return 2.0 * static_cast<double>(problem_.batch * problem_.head_dim) * assigned;
  }
  std::map<std::string, double> statistics() const override {
    return grouping_.statistics(device_);
  }

  absl::Status Run(const Inputs& tensors, const Outputs& outputs,
                   const Execution& execution) override {
    grouping_.Begin();
    for (int64_t set = 0; set < sizes_.sets; ++set) {
      if (sizes_.heads > 0) TFB_RETURN_IF_ERROR(Assign(tensors, set, execution));
      TFB_RETURN_IF_ERROR(WriteMembers(outputs, set, execution));
    }
    grouping_.GroupsAreFound();
    if (unit_keys_.empty() || sizes_.heads == 0) return absl::OkStatus();
    return NormalizeRows(device_, {}, Clustered(tensors.Get("q"), 1), unit_keys_, execution);
  }

  absl::Status Finish(const Inputs& tensors, const Outputs& outputs,
                      const Execution& execution) override {
    if (sizes_.heads > 0) {
      GroupMeanCall mean = MeanOf(tensors);
      mean.out = Clustered(outputs.Get("out"), 1);
      TFB_RETURN_IF_ERROR(MeanOfGroups(device_, mean, execution));
    }
    grouping_.End();
    return absl::OkStatus();
  }

  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  double backward_flops() const override { return flops(); }  // members are found again
  absl::Status FinishBackward(const Inputs& tensors, const Inputs& output_gradients,
                              const Outputs& gradients, const ParameterGradients&,
                              const Execution& execution) override {
    if (sizes_.heads == 0) return absl::OkStatus();
    return AddGroupGradients(device_, MeanOf(tensors), Clustered(output_gradients.Get("out"), 1),
                             gradients.Get("rows"), execution);
  }
  // Takes the gradients of the vectors that scores read on to queries and keys.
  absl::Status Backward(const Inputs& tensors, const Outputs& gradients, const ParameterGradients&,
                        const Execution& execution) override {
    if (sizes_.heads == 0) return absl::OkStatus();
    const auto add = [&](const RowNorm& norm, const char* normalized, const char* given) {
      const TensorView gradient = gradients.Get(given);
      if (gradient.empty()) return absl::OkStatus();
      return AddNormalizedGradients(device_, norm, Clustered(tensors.Get(given), 1),
                                    gradients.Get(normalized), Clustered(gradient, 1), execution);
    };
    if (!unit_keys_.empty()) TFB_RETURN_IF_ERROR(add({}, "unit_keys", "q"));
    if (ScoresGiven(options_)) return absl::OkStatus();
    for (int64_t set = 0; set < sizes_.sets; ++set) {
      TFB_RETURN_IF_ERROR(add(Norm(), kNormalized[set], GivenName(problem_, set)));
    }
    return absl::OkStatus();
  }

 private:
  RowNorm Norm() const {
    return options_.norm == RoutingOptions::Norm::kUnit ? RowNorm{}
                                                        : RowNorm{true, true, kRoutingNormEpsilon};
  }
  // Returns the mean over the clusters of a token, without where to write it.
  GroupMeanCall MeanOf(const Inputs& tensors) const {
    return {members_[0], sizes_.clusters, sizes_.size, tensors.Get("rows"), TensorView()};
  }
  // Returns the heads that have clusters.
  template <class View>
  View Clustered(const View& view, int axis) const {
    return Slice(view, axis, sizes_.local_heads, sizes_.heads);
  }

  // Finds the members among queries or keys.
  absl::Status Assign(const Inputs& tensors, int64_t set, const Execution& execution) const {
    TFB_RETURN_IF_ERROR(NormalizeRows(device_, Norm(),
                                      Clustered(Vectors(problem_, tensors, set), 1),
                                      normalized_[set], execution));
    const int64_t tokens = problem_.query_tokens, stride = ScoreStride(tokens);
    const ConstTensorView given = tensors.Get("members");
    if (given.empty()) {
      const VectorScoreCall score = {normalized_[set],        centroids_.data(), sizes_.clusters,
                                     tensors.Get("key_mask"), scores_,           stride};
      TFB_RETURN_IF_ERROR(ScoreVectors(device_, score, execution));
    } else {
      TFB_RETURN_IF_ERROR(ForEachInRows(device_, problem_.batch * sizes_.heads * sizes_.clusters,
                                        tokens, ScoresFromMarks{Marks(given, set)}, execution));
    }
    const LargestCall largest = {scores_,     problem_.batch * sizes_.heads * sizes_.clusters,
                                 tokens,      stride,
                                 sizes_.size, members_[set]};
    return LargestTokens(device_, largest, execution);
  }

  RoutingMarks Marks(const ConstTensorView& view, int64_t set) const {
    RoutingMarks a = {};
    a.marks = static_cast<uint8_t*>(const_cast<void*>(view.data));
    std::copy_n(view.strides.data(), 4, a.strides);
    a.first = set * sizes_.clusters;
    a.first_head = sizes_.local_heads;
    a.scores = scores_;
    a.members = members_[set];
    a.heads = sizes_.heads;
    a.clusters = sizes_.clusters;
    a.stride = ScoreStride(problem_.query_tokens);
    a.size = sizes_.size;
    return a;
  }

  absl::Status WriteMembers(const Outputs& outputs, int64_t set, const Execution& execution) const {
    const TensorView marks = outputs.Get("members");
    if (marks.empty()) return absl::OkStatus();
    return ForEachInRows(device_, problem_.batch * problem_.query_heads * sizes_.clusters,
                         problem_.query_tokens, MarksOfMembers{Marks(marks, set)}, execution);
  }

  Problem problem_;
  RoutingOptions options_;
  const NamedTensors& parameters_;
  RoutingSizes sizes_;
  Device device_ = Device::kCpu;
  DeviceArray<float> centroids_;
  GroupingShare grouping_;
  // The arrays of a Run, in the workspace. Sets beyond the existing ones hold nothing.
  TensorView normalized_[2];
  TensorView unit_keys_;
  float* scores_ = nullptr;  // [batch][heads][clusters][stride]
  int32_t* members_[2] = {};
};

// Moves the centroids by the tokens of Setup's inputs, on the host.
absl::Status MoveCentroids(const Problem& p, const RoutingOptions& options, Device device,
                           const Inputs& inputs, const Execution& execution,
                           NamedTensors* parameters) {
  const RoutingSizes sizes(p, options);
  std::vector<DoubleTensor> sets;
  for (int64_t set = 0; set < sizes.sets; ++set) {
    const ConstTensorView view = Vectors(p, inputs, set);
    TFB_ASSIGN_OR_RETURN(const Tensor on_host, CopyToHost(device, view, execution.stream));
    sets.push_back(RoutingNormalized(p, options.norm, on_host.view()));
  }
  const ConstTensorView key_mask = inputs.Get("key_mask");
  Tensor tokens(DType::kU8, {p.batch, p.query_tokens});
  Fill(tokens.view(), 1);
  if (!key_mask.empty()) {
    TFB_ASSIGN_OR_RETURN(tokens, CopyToHost(device, key_mask, execution.stream));
  }
  Tensor& centroids = parameters->at("centroids");
  for (int64_t h = sizes.local_heads; h < p.query_heads; ++h) {
    std::vector<std::vector<double>> vectors[2];
    for (int64_t set = 0; set < 2; ++set) {
      const DoubleTensor& rows = sets[set < sizes.sets ? set : 0];
      for (int64_t b = 0; b < p.batch; ++b) {
        for (int64_t i = 0; i < p.query_tokens; ++i) {
          if (*tokens.view().At<uint8_t>(b, i) == 0) continue;
          vectors[set].emplace_back(rows.Row(b, h, i), rows.Row(b, h, i) + p.head_dim);
        }
      }
    }
    float* of_head = centroids.span<float>().data() + h * sizes.clusters * p.head_dim;
    std::vector<double> moved(of_head, of_head + sizes.clusters * p.head_dim);
    for (int64_t n = 0; n < options.updates; ++n) {
      UpdateCentroids(options, sizes.clusters, p.head_dim, vectors[0], vectors[1], &moved);
    }
    std::copy(moved.begin(), moved.end(), of_head);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Routing::Check(const Problem& problem, const RoutingOptions&) const {
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

Routing::Routing() : FlashTechnique(Info()) {}

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

absl::StatusOr<NamedTensors> Routing::Draw(const Job& job) const {
  const Problem& p = job.problem;
  const RoutingSizes sizes(p, job.options);
  return DrawNormal(job.seed, {{"centroids", {p.query_heads, sizes.clusters, p.head_dim}}});
}

PlannedLayer::Fit Routing::MakeFit(const Problem& problem, const RoutingOptions& options) const {
  if (options.updates == 0) return nullptr;
  return [problem, options](Device device, const Inputs& inputs, const Execution& execution,
                            NamedTensors* parameters) {
    return MoveCentroids(problem, options, device, inputs, execution, parameters);
  };
}

// A softmax of the members of all clusters, whose rows the step averages, and one of local heads.
absl::StatusOr<FlashPlan> Routing::Describe(const Job& job) const {
  const Problem& p = job.problem;
  const RoutingSizes sizes(p, job.options);
  const int64_t keys = sizes.sets - 1, places = sizes.clusters * sizes.size;
  const std::string given_keys = p.causal ? "q" : "k";
  FlashPlan plan = FlashPlan::Empty(p);
  plan.AddStep<Clusters>(p, job.options, job.parameters);
  plan.StopGradient(
      "centroids",
      "centroids only choose members, which stay as the forward pass found them; they "
      "are trained by moving averages (section 4.1), not by the loss");
  const TokenRange tokens = {0, p.query_tokens};
  if (sizes.heads > 0) {
    plan.AddRows(tokens)
        .Heads({sizes.local_heads, p.query_heads})
        .Scale(RoutingScale(p, job.options))
        .Writes("rows", "rows_log_sum_exp", /*by_place=*/true)
        .AddPart()
        .Tensors(kNormalized[0], kNormalized[keys], "v")
        .QueryOrder(kMembers[0], places)
        .KeyOrder(kMembers[keys], places)
        .Sees(ClusterPattern(sizes.size, p.causal))
        .Add<SelfBias>(job.options.self_bias);
    if (ScoresGiven(job.options)) plan.Tensors("q", p.causal ? "unit_keys" : "k", "v");
  }
  if (sizes.local_heads > 0) {
    plan.AddRows(tokens)
        .Heads({0, sizes.local_heads})
        .AddPart()
        .Causal()
        .Tensors("q", given_keys, "v")
        .Sees(BlockPattern(job.options.local_block, p.causal));
  }
  return plan;
}

}  // namespace tfb::routing
