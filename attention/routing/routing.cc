#include "attention/routing/routing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/routing/routing_cuda.h"
#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash_engine.h"
#include "core/gather/gather.h"
#include "core/random.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

const bool registered = RegisterTechnique<Routing>();

constexpr int64_t kTokensOfCluster = 512;
constexpr double kNormEpsilon = 1e-5;

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "routing";
  info.family = "attention";
  info.title = "Routing Transformer's attention in clusters";
  info.citation = "Roy, Saffar, Vaswani, Grangier 2021, arXiv:2003.05997v5, section 4";
  info.exactness = Exactness::kOwn;
  info.budget_option = "clusters";
  info.growth = 1;
  info.devices = {Device::kCpu, Device::kCuda};
  info.selection = "members";
  return info;
}

// What options mean for a problem.
struct Sizes {
  Sizes(const Problem& problem, const RoutingOptions& options) {
    const int64_t tokens = std::max<int64_t>(problem.query_tokens, 1);
    clusters = options.clusters != 0 ? options.clusters
                                     : (tokens + kTokensOfCluster - 1) / kTokensOfCluster;
    clusters = std::min(clusters, tokens);
    size = (problem.query_tokens + clusters - 1) / clusters;
    sets = problem.causal ? 1 : 2;
    local_heads = options.local_heads < 0 ? problem.query_heads / 2
                                          : std::min(options.local_heads, problem.query_heads);
    heads = problem.query_heads - local_heads;
  }
  int64_t clusters;
  int64_t size;         // w
  int64_t sets;         // of members: of queries, and of keys where those are others
  int64_t local_heads;  // the first ones
  int64_t heads;        // the others
};

double ScaleOf(const Problem& problem, const RoutingOptions& options) {
  return options.scale != 0 ? options.scale : 1 / std::sqrt(static_cast<double>(problem.head_dim));
}

// Over the members of all clusters, one cluster after the other, in the order of their tokens.
class ClusterPattern : public Pattern {
 public:
  ClusterPattern(int64_t size, bool causal) : size_(size), causal_(causal) {}
  bool Allows(int64_t, int64_t i, int64_t j) const override {
    return i / size_ == j / size_ && (!causal_ || j <= i);
  }
  void KeyRanges(int64_t, int64_t begin, int64_t end,
                 std::vector<KeyRange>* ranges) const override {
    const int64_t first = begin / size_ * size_;
    const bool one_cluster = (end - 1) / size_ == begin / size_;
    if (causal_) {
      ranges->push_back({first, end, false});
      if (one_cluster) ranges->push_back({first, begin + 1, true});
    } else {
      ranges->push_back({first, ((end - 1) / size_ + 1) * size_, one_cluster});
    }
  }

 private:
  int64_t size_;
  bool causal_;
};

// Blocks that see themselves and the one before and, where not causal, the next one.
class BlockPattern : public Pattern {
 public:
  BlockPattern(int64_t block, bool causal) : block_(block), causal_(causal) {}
  bool Allows(int64_t, int64_t i, int64_t j) const override {
    const int64_t back = i / block_ - j / block_;
    return back == 0 || back == 1 || (back == -1 && !causal_);
  }
  void KeyRanges(int64_t, int64_t begin, int64_t end,
                 std::vector<KeyRange>* ranges) const override {
    const int64_t first = begin / block_, last = (end - 1) / block_;
    ranges->push_back({(first - 1) * block_, (last + (causal_ ? 1 : 2)) * block_, first == last});
  }

 private:
  int64_t block_;
  bool causal_;
};

// What a Run works with, in the workspace. Sets beyond those that there are hold nothing.
struct Memory {
  void* normalized[2];  // [batch][heads][tokens][head_dim] of the problem's dtype: queries, keys
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
    in_clusters_.causal = false;  // by the pattern
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
    memory.scores = workspace.Take<float>(rows * ScoreStride(p.query_tokens));
    memory.rows = workspace.Take<float>(rows * sizes_.size * p.value_dim);
    return memory;
  }

  // The queries or keys of the heads that have clusters, or that have not.
  ConstTensorView Vectors(const Inputs& inputs, int64_t set) const {
    return inputs.Get(set == 0 || problem().causal ? "q" : "k");
  }
  template <class View>
  View Clustered(const View& view) const {
    return Slice(view, 1, sizes_.local_heads, sizes_.heads);
  }
  TensorView Normalized(const Memory& memory, int64_t set) const {
    const Problem& p = problem();
    return TensorView(memory.normalized[set], p.dtype,
                      {p.batch, sizes_.heads, p.query_tokens, p.head_dim});
  }

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
    const TensorView normalized = Normalized(memory, set);
    TFB_RETURN_IF_ERROR(NormalizeRows(device_, {true, true, kNormEpsilon},
                                      Clustered(Vectors(inputs, set)), normalized, execution));
    const int64_t stride = ScoreStride(p.query_tokens);
    const ConstTensorView given = inputs.Get("members");
    if (given.empty()) {
      const VectorScoreCall score = {normalized,      centroids_.data(),
                                     sizes_.clusters, inputs.Get("key_mask"),
                                     memory.scores,   stride};
      TFB_RETURN_IF_ERROR(ScoreVectors(device_, score, execution));
    } else {
      TFB_RETURN_IF_ERROR(FromMarks(Marks(given, set, memory), execution));
    }
    const LargestCall largest = {memory.scores,  p.batch * sizes_.heads * sizes_.clusters,
                                 p.query_tokens, stride,
                                 sizes_.size,    memory.members[set]};
    return LargestTokens(device_, largest, execution);
  }

  RoutingMarkArguments Marks(const ConstTensorView& view, int64_t set, const Memory& memory) const {
    RoutingMarkArguments a = {};
    a.marks = static_cast<uint8_t*>(const_cast<void*>(view.data));
    std::copy_n(view.strides.data(), 4, a.strides);
    a.first = set * sizes_.clusters;
    a.first_head = sizes_.local_heads;
    a.scores = memory.scores;
    a.members = memory.members[set];
    a.batch = problem().batch;
    a.heads = sizes_.heads;
    a.tokens = problem().query_tokens;
    a.clusters = sizes_.clusters;
    a.stride = ScoreStride(problem().query_tokens);
    a.size = sizes_.size;
    return a;
  }
  static int64_t MarkOf(const RoutingMarkArguments& a, int64_t b, int64_t h, int64_t token,
                        int64_t cluster) {
    return b * a.strides[0] + h * a.strides[1] + token * a.strides[2] +
           (a.first + cluster) * a.strides[3];
  }

  absl::Status FromMarks(const RoutingMarkArguments& a, const Execution& execution) const {
    if (device_ != Device::kCpu) {
      TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
      return ToStatus(KernelsOn<RoutingKernels>(runtime->target()).from_marks(a, execution.stream));
    }
    execution.pool->ParallelFor(a.batch * a.heads * a.clusters, [&](int64_t row, int) {
      const int64_t head = row / a.clusters, h = a.first_head + head % a.heads;
      for (int64_t i = 0; i < a.tokens; ++i) {
        const uint8_t mark = a.marks[MarkOf(a, head / a.heads, h, i, row % a.clusters)];
        a.scores[row * a.stride + i] = mark != 0 ? 1 : 0;
      }
    });
    return absl::OkStatus();
  }

  absl::Status WriteMembers(const Outputs& outputs, int64_t set, const Memory& memory,
                            const Execution& execution) const {
    const TensorView marks = outputs.Get("members");
    if (marks.empty()) return absl::OkStatus();
    const RoutingMarkArguments a = Marks(marks, set, memory);
    if (device_ != Device::kCpu) {
      TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
      return ToStatus(KernelsOn<RoutingKernels>(runtime->target()).to_marks(a, execution.stream));
    }
    const int64_t heads = a.first_head + a.heads;
    execution.pool->ParallelFor(a.batch * heads * a.clusters, [&](int64_t row, int) {
      const int64_t b = row / a.clusters / heads, h = row / a.clusters % heads;
      const int64_t cluster = row % a.clusters;
      for (int64_t i = 0; i < a.tokens; ++i) a.marks[MarkOf(a, b, h, i, cluster)] = 0;
      if (h < a.first_head) return;
      const int64_t of = (b * a.heads + h - a.first_head) * a.clusters + cluster;
      for (int64_t m = 0; m < a.size; ++m) {
        a.marks[MarkOf(a, b, h, a.members[of * a.size + m], cluster)] = 1;
      }
    });
    return absl::OkStatus();
  }

  absl::Status AttendInClusters(const Inputs& inputs, const Outputs& outputs, const Memory& memory,
                                const Execution& execution) const {
    const Problem& p = problem();
    const int64_t keys = sizes_.sets - 1, places = sizes_.clusters * sizes_.size;
    FlashCall call = clusters_.NewCall();
    call.q = Normalized(memory, 0);
    call.k = Normalized(memory, keys);
    call.v = Clustered(inputs.Get("v"));
    call.key_mask = inputs.Get("key_mask");
    call.query_order = {memory.members[0], sizes_.heads * places, places};
    call.key_order = {memory.members[keys], sizes_.heads * places, places};
    call.out_by_row = true;
    call.out = TensorView(memory.rows, DType::kF32, {p.batch, sizes_.heads, places, p.value_dim});
    call.scale = ScaleOf(p, options_);
    TFB_RETURN_IF_ERROR(clusters_.Run(call, execution));
    const GroupMeanCall mean = {memory.members[0], sizes_.clusters, sizes_.size, call.out,
                                Clustered(outputs.Get("out"))};
    return MeanOfGroups(device_, mean, execution);
  }

  // Moves the centroids by the tokens of Setup's inputs, on the host.
  absl::Status Update(const Inputs& inputs, const Execution& execution);

  RoutingOptions options_;
  Device device_;
  Sizes sizes_;
  Problem in_clusters_;
  Problem in_blocks_;
  DeviceArray<float> centroids_;
  FlashEngine clusters_;
  FlashEngine blocks_;
  GroupingShare grouping_;
  bool is_set_up_ = false;
};

// ---- The definition's steps, and the updates ----

// (x - mean) / sqrt(variance + 1e-5) of all rows, in 16 bits where the problem is.
DoubleTensor NormalizedByDefinition(const Problem& problem, const ConstTensorView& view) {
  Tensor rows(DType::kF64, view.shape());
  CopyElements(view, rows.view());
  const int64_t channels = view.dim(3);
  for (int64_t n = 0; n < rows.num_elements(); n += channels) {
    double* x = rows.span<double>().data() + n;
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < channels; ++c) mean += x[c] / static_cast<double>(channels);
    for (int64_t c = 0; c < channels; ++c) {
      variance += (x[c] - mean) * (x[c] - mean) / static_cast<double>(channels);
    }
    const double root = std::sqrt(variance + kNormEpsilon);
    for (int64_t c = 0; c < channels; ++c) x[c] = (x[c] - mean) / root;
  }
  if (problem.dtype != DType::kF32) rows = rows.CloneAs(problem.dtype);
  return DoubleTensor(rows.view());
}

absl::Status RoutingLayer::Update(const Inputs& inputs, const Execution& execution) {
  const Problem& p = problem();
  const Shape shape = {p.batch, p.query_heads, p.query_tokens, p.head_dim};
  std::vector<DoubleTensor> sets;
  for (int64_t set = 0; set < sizes_.sets; ++set) {
    const ConstTensorView view = Vectors(inputs, set);
    TFB_ASSIGN_OR_RETURN(const Tensor on_host, CopyToHost(device_, view, execution.stream));
    sets.push_back(NormalizedByDefinition(p, on_host.view()));
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

// The clusters of one batch row and head, for queries or for keys.
class Members {
 public:
  // Whether two tokens are the same, so that their scores are in any precision.
  using Same = std::function<bool(int64_t i, int64_t j)>;

  // scores[c][i], and how far fp32 may be off them; of what a layer computed, `computed[c]` says
  // whether token i is a member, and counts where fp32 may find it so. Empty: nothing computed.
  static std::vector<std::vector<bool>> Choose(const std::vector<std::vector<double>>& scores,
                                               const std::vector<std::vector<double>>& error,
                                               const std::vector<std::vector<bool>>& computed,
                                               int64_t size, const Same& same) {
    std::vector<std::vector<bool>> members;
    for (size_t c = 0; c < scores.size(); ++c) {
      const bool given = !computed.empty() && MayBe(scores[c], error[c], computed[c], size, same);
      members.push_back(given ? computed[c] : Largest(scores[c], size));
    }
    return members;
  }

 private:
  static std::vector<bool> Largest(const std::vector<double>& scores, int64_t size) {
    std::vector<int64_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      return std::isnan(scores[j]) ? !std::isnan(scores[i]) : scores[i] > scores[j];
    });
    std::vector<bool> is_member(scores.size());
    for (int64_t n = 0; n < size; ++n) is_member[order[n]] = true;
    return is_member;
  }
  // Whether no token outside has a score above that of one inside by more than fp32's errors, and
  // of tokens that are the same the first are inside.
  static bool MayBe(const std::vector<double>& scores, const std::vector<double>& error,
                    const std::vector<bool>& computed, int64_t size, const Same& same) {
    if (std::count(computed.begin(), computed.end(), true) != size) return false;
    double least = std::numeric_limits<double>::infinity(), most = kNotSeen;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (computed[i]) least = std::min(least, scores[i] + error[i]);
      if (!computed[i]) most = std::max(most, scores[i] - error[i]);
    }
    if (least < most) return false;
    for (size_t j = 0; j < scores.size(); ++j) {
      // Same tokens have the same bound, and no member's is below `least`.
      if (computed[j] || scores[j] + error[j] < least) continue;
      for (size_t i = j + 1; i < scores.size(); ++i) {
        if (computed[i] && scores[i] == scores[j] && same(i, j)) return false;
      }
    }
    return true;
  }
};

// Memberships by the definition: [batch][heads] of [clusters][tokens].
class Assignment {
 public:
  Assignment(const Problem& problem, const RoutingOptions& options, const NamedTensors& parameters,
             const Inputs& inputs, const DefinitionRequest& request, int64_t set)
      : problem_(problem), sizes_(problem, options), set_(set), is_token_(inputs) {
    vectors_ = NormalizedByDefinition(problem, inputs.Get(set == 0 ? "q" : "k"));
    centroids_ = DoubleTensor(parameters.at("centroids").view());
    given_ = inputs.Get("members");
    if (request.computed != nullptr && request.computed->count("members") > 0) {
      computed_ = request.computed->at("members").view();
    }
  }

  const DoubleTensor& vectors() const { return vectors_; }
  std::vector<std::vector<bool>> Of(int64_t b, int64_t h) const {
    std::vector<std::vector<double>> scores(sizes_.clusters), error(sizes_.clusters);
    std::vector<std::vector<bool>> computed;
    for (int64_t c = 0; c < sizes_.clusters; ++c) {
      for (int64_t i = 0; i < problem_.query_tokens; ++i) {
        AddScore(b, h, c, i, &scores[c], &error[c]);
      }
    }
    if (!computed_.empty() && given_.empty()) computed = Marks(computed_, b, h);
    const auto same = [&](int64_t i, int64_t j) {
      const double* x = vectors_.Row(b, h, i);
      return (!is_token_(b, i) && !is_token_(b, j)) ||
             std::equal(x, x + problem_.head_dim, vectors_.Row(b, h, j));
    };
    return Members::Choose(scores, error, computed, sizes_.size, same);
  }

 private:
  void AddScore(int64_t b, int64_t h, int64_t c, int64_t i, std::vector<double>* scores,
                std::vector<double>* error) const {
    if (!given_.empty()) {
      scores->push_back(*given_.At<uint8_t>(b, h, i, set_ * sizes_.clusters + c) != 0 ? 1 : 0);
      return error->push_back(0);
    }
    const double* x = vectors_.Row(b, h, i);
    const double* mu = centroids_.Row(h, c);
    double magnitude = 0;
    for (int64_t n = 0; n < problem_.head_dim; ++n) magnitude += std::abs(x[n] * mu[n]);
    // As many roundings of products and of the norm.
    const double roundings = static_cast<double>(2 * problem_.head_dim + 8);
    scores->push_back(is_token_(b, i) ? Dot(x, mu, problem_.head_dim) : kNotSeen);
    error->push_back(is_token_(b, i) ? roundings * UnitRoundoff(DType::kF32) * magnitude : 0);
  }
  std::vector<std::vector<bool>> Marks(const ConstTensorView& view, int64_t b, int64_t h) const {
    std::vector<std::vector<bool>> marks(sizes_.clusters);
    for (int64_t c = 0; c < sizes_.clusters; ++c) {
      for (int64_t i = 0; i < problem_.query_tokens; ++i) {
        marks[c].push_back(*view.At<uint8_t>(b, h, i, set_ * sizes_.clusters + c) != 0);
      }
    }
    return marks;
  }

  const Problem& problem_;
  Sizes sizes_;
  int64_t set_;
  KeyMask is_token_;
  DoubleTensor vectors_, centroids_;
  ConstTensorView given_, computed_;
};

// out and weights of a definition, for some rows.
struct Result {
  Tensor out, weights, members;
};

// One head's rows: the mean over clusters of attention within them.
class ClusterRows {
 public:
  ClusterRows(const Problem& problem, const RoutingOptions& options, const Inputs& inputs,
              const Assignment& queries, const Assignment& keys)
      : problem_(problem),
        scale_(ScaleOf(problem, options)),
        queries_(queries),
        keys_(keys),
        v_(inputs.Get("v")),
        is_token_(inputs) {}

  void Add(int64_t b, int64_t h, int64_t i, const std::vector<std::vector<bool>>& query_members,
           const std::vector<std::vector<bool>>& key_members, double* y, double* weights) const {
    double clusters = 0;
    for (const auto& members : query_members) clusters += members[i];
    for (size_t c = 0; c < query_members.size(); ++c) {
      if (!query_members[c][i]) continue;
      std::vector<double> score(problem_.kv_tokens, kNotSeen);
      double max = kNotSeen, sum = 0;
      for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
        if (!key_members[c][j] || !is_token_(b, j) || (problem_.causal && j > i)) continue;
        score[j] = scale_ * Dot(queries_.vectors().Row(b, h, i), keys_.vectors().Row(b, h, j),
                                problem_.head_dim);
        max = score[j] > max ? score[j] : max;
      }
      for (const double s : score) sum += s == kNotSeen ? 0 : std::exp(s - max);
      for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
        if (score[j] == kNotSeen) continue;
        const double weight = std::exp(score[j] - max) / sum / clusters;
        if (weights != nullptr) weights[j] += weight;
        for (int64_t n = 0; n < problem_.value_dim; ++n) y[n] += weight * v_.Row(b, h, j)[n];
      }
    }
  }

 private:
  const Problem& problem_;
  double scale_;
  const Assignment& queries_;
  const Assignment& keys_;
  DoubleTensor v_;
  KeyMask is_token_;
};

absl::Status Check(const Problem& problem) {
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

}  // namespace

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
  const Sizes sizes(p, options);
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
  TFB_RETURN_IF_ERROR(Check(problem));
  const Sizes sizes(problem, options);
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

absl::Status Routing::Definition(const Problem& problem, const RoutingOptions& options,
                                 const NamedTensors& parameters, const Inputs& inputs,
                                 const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  const Sizes sizes(problem, options);
  const Assignment queries(problem, options, parameters, inputs, request, 0);
  const Assignment other(problem, options, parameters, inputs, request, sizes.sets - 1);
  const ClusterRows in_clusters(problem, options, inputs, queries, other);
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  const int64_t row_count = static_cast<int64_t>(rows.size());

  // All heads as if local, then those that are not over it.
  Inputs local = inputs;
  if (problem.causal) local.Set("k", inputs.Get("q"));
  DefineMaskedAttention(
      problem, local, request, 0,
      [&](int64_t, int64_t i, int64_t j) {
        return std::abs(i / options.local_block - j / options.local_block) <= 1;
      },
      [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, outputs);
  outputs->erase("log_sum_exp");  // a mean of softmaxes has none
  Tensor members(DType::kF64,
                 {problem.batch, problem.query_heads, row_count, sizes.sets * sizes.clusters});
  Fill(members.view(), 0);
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = sizes.local_heads; h < problem.query_heads; ++h) {
      const auto of_queries = queries.Of(b, h), of_keys = other.Of(b, h);
      for (int64_t r = 0; r < row_count; ++r) {
        double* y = outputs->at("out").view().MutableAt<double>(b, h, r);
        std::fill_n(y, problem.value_dim, 0.0);
        double* weights = nullptr;
        if (request.weights) {
          weights = outputs->at("weights").view().MutableAt<double>(b, h, r);
          std::fill_n(weights, problem.kv_tokens, 0.0);
        }
        in_clusters.Add(b, h, rows[r], of_queries, of_keys, y, weights);
        double* mark = members.view().MutableAt<double>(b, h, r);
        for (int64_t c = 0; c < sizes.clusters; ++c) {
          mark[c] = of_queries[c][rows[r]];
          if (sizes.sets == 2) mark[sizes.clusters + c] = of_keys[c][rows[r]];
        }
      }
    }
  }
  (*outputs)["members"] = std::move(members);
  return absl::OkStatus();
}

}  // namespace tfb
