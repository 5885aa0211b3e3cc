// The backward pass of engine linear on CUDA devices: its memory, and the order of its steps. See
// linear_backward.cu.
#include <algorithm>

#include "core/cuda/for_each.h"
#include "core/linear/linear_backward_kernels.h"
#include "core/linear/linear_backward_steps.h"
#include "core/linear/linear_cuda.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kTile = kLinearTile;
// The bytes of heads that are taken at a time, unless one head needs more.
constexpr int64_t kHeldBytes = int64_t{256} << 20;

int64_t ChunksOf(int64_t tokens) { return std::max<int64_t>((tokens + kTile - 1) / kTile, 1); }

// Sets the sizes that memory depends on.
void SetSizes(const Problem& p, const FeatureMap& map, LinearBackwardArguments* a) {
  a->group = p.group();
  a->key_chunks = ChunksOf(p.kv_tokens);
  a->query_chunks = p.causal ? a->key_chunks : ChunksOf(p.query_tokens);
  a->features = map.features();
  a->columns = p.value_dim + 1;
  a->sum = (a->features + 1) * a->columns;
  const int64_t chunks = a->key_chunks + a->group * a->query_chunks;
  a->parts = (chunks + kLinearPartChunks - 1) / kLinearPartChunks;
  a->has_maximum_gradient = IsExponential(map.feature) && map.stabiliser != KeyStabiliser::kNone &&
                            (map.epsilon != 0 || map.denominator_epsilon != 0);
  a->is_running_maximum =
      a->has_maximum_gradient && p.causal && map.stabiliser == KeyStabiliser::kRunning;
}

void LayOutTokens(const Problem& p, const FeatureMap& map, int64_t tokens, Workspace* workspace,
                  LinearTokenRows* rows) {
  rows->features = workspace->Take<float>(tokens * map.features());
  rows->gradients = workspace->Take<float>(tokens * map.projections);
  rows->input_gradients = workspace->Take<float>(tokens * p.head_dim);
  for (float** numbers :
       {&rows->factor, &rows->half_square, &rows->maximum, &rows->total, &rows->product}) {
    *numbers = workspace->Take<float>(tokens);
  }
  rows->maximum_row = workspace->Take<int32_t>(tokens);
}

void LayOutKeys(const Problem& p, const FeatureMap& map, int64_t heads, Workspace* workspace,
                LinearBackwardArguments* a) {
  const int64_t tokens = heads * a->key_chunks * kTile;
  LayOutTokens(p, map, tokens, workspace, &a->keys);
  LinearKeyNumbers& key = a->key;
  for (float** numbers :
       {&key.seen, &key.log_scale, &key.decay, &key.logit, &key.scale, &key.gate_gradient,
        &key.running_reference, &key.running_maximum, &key.running_tokens}) {
    *numbers = workspace->Take<float>(tokens);
  }
  const int64_t chunks = heads * (a->key_chunks + 1);
  LinearKeyChunks& chunk = a->key_chunk;
  for (float** numbers : {&chunk.reference, &chunk.maximum, &chunk.tokens, &chunk.scale_reference,
                          &chunk.own_reference, &chunk.own_maximum, &chunk.own_tokens}) {
    *numbers = workspace->Take<float>(chunks);
  }
  chunk.own_maximum_key = workspace->Take<int64_t>(chunks);
  chunk.maximum_key = workspace->Take<int64_t>(heads);
  a->key_sums = workspace->Take<float>(chunks * a->sum);
}

void LayOutQueries(const Problem& p, const FeatureMap& map, int64_t heads, Workspace* workspace,
                   LinearBackwardArguments* a) {
  const int64_t tokens = heads * a->group * a->query_chunks * kTile;
  LayOutTokens(p, map, tokens, workspace, &a->queries);
  LinearQueryNumbers& query = a->query;
  for (float** numbers :
       {&query.active, &query.valid, &query.query, &query.query_epsilon, &query.key,
        &query.key_epsilon, &query.constant, &query.reference, &query.carried, &query.log_scale,
        &query.extra, &query.denominator, &query.pair_sum, &query.offset, &query.gradient_sum,
        &query.maximum_gradient}) {
    *numbers = workspace->Take<float>(tokens);
  }
  query.rows = workspace->Take<float>(tokens * a->columns);
  query.weights = workspace->Take<float>(p.causal ? tokens * kTile : 0);
  query.pairs = workspace->Take<float>(p.causal ? tokens * kTile : 0);
  const int64_t chunks = heads * (a->query_chunks + 1);
  LinearQueryChunks& chunk = a->query_chunk;
  for (float** numbers : {&chunk.reference, &chunk.scale_reference, &chunk.own_reference}) {
    *numbers = workspace->Take<float>(chunks);
  }
  a->query_sums = workspace->Take<float>(chunks * a->sum);
  LinearChainNumbers& chain = a->chain;
  for (double** numbers : {&chain.own_rows, &chain.own_columns, &chain.own_maximum, &chain.rows,
                           &chain.columns, &chain.maximum}) {
    *numbers = workspace->Take<double>(heads * a->query_chunks);
  }
  chain.takes = workspace->Take<float>(heads * a->query_chunks);
}

// Takes the memory of some heads.
void LayOutHeads(const Problem& p, const FeatureMap& map, int64_t heads, Workspace* workspace,
                 LinearBackwardArguments* a) {
  LayOutKeys(p, map, heads, workspace, a);
  LayOutQueries(p, map, heads, workspace, a);
  a->w_parts = workspace->Take<float>(heads * a->parts * map.projections * p.head_dim);
  a->gate_parts = workspace->Take<float>(map.gated ? heads * a->key_chunks * (p.head_dim + 1) : 0);
}

// The memory of all heads.
struct Totals {
  float* key_gates;
  float* w;     // [kv_heads or 1][projections][head_dim]
  float* gate;  // [kv_heads][head_dim + 1]
  int64_t w_floats;
  int64_t gate_floats;
};

// Takes the workspace, and decides how many heads are taken at a time.
Totals LayOut(const Problem& p, const FeatureMap& map, Workspace* workspace,
              LinearBackwardArguments* a, int64_t* held) {
  SetSizes(p, map, a);
  const int64_t head_bytes = static_cast<int64_t>(Workspace::Measure([&](Workspace& counter) {
    LinearBackwardArguments counted = *a;
    LayOutHeads(p, map, 1, &counter, &counted);
  }));
  *held =
      std::clamp<int64_t>(kHeldBytes / head_bytes, 1, std::max<int64_t>(p.batch * p.kv_heads, 1));
  Totals totals;
  totals.w_floats = (map.per_head ? p.kv_heads : 1) * map.projections * p.head_dim;
  totals.gate_floats = map.gated ? p.kv_heads * (p.head_dim + 1) : 0;
  totals.key_gates = workspace->Take<float>(map.gated ? p.batch * p.kv_heads * p.kv_tokens * 2 : 0);
  totals.w = workspace->Take<float>(totals.w_floats);
  totals.gate = workspace->Take<float>(totals.gate_floats);
  LayOutHeads(p, map, *held, workspace, a);
  return totals;
}

// Calls of kernels and functors over the held heads.
class Steps {
 public:
  Steps(CudaRuntime* runtime, const LinearBackwardArguments& a, const Execution& execution)
      : device_(runtime->device()),
        kernels_(KernelsOn<LinearBackwardKernels>(runtime->target())),
        a_(a),
        execution_(execution) {}

  absl::Status Run(bool has_w, const Totals& totals) const {
    TFB_RETURN_IF_ERROR(SumKeys());
    TFB_RETURN_IF_ERROR(SumQueries());
    TFB_RETURN_IF_ERROR(Launch(kernels_.query_gradients));
    TFB_RETURN_IF_ERROR(Launch(kernels_.key_gradients));
    TFB_RETURN_IF_ERROR(RunChain());
    TFB_RETURN_IF_ERROR(Launch(kernels_.inputs));
    if (has_w) {
      TFB_RETURN_IF_ERROR(Launch(kernels_.matrix));
      TFB_RETURN_IF_ERROR(Do(totals.w_floats, LinearAddMatrixParts{a_, totals.w}));
    }
    if (a_.gate_parts == nullptr) return absl::OkStatus();
    return Do(totals.gate_floats, LinearAddGateParts{a_, totals.gate});
  }

 private:
  absl::Status Launch(LinearBackwardKernels::Launcher launcher) const {
    return ToStatus(launcher(a_, execution_.stream));
  }
  template <class Functor>
  absl::Status Do(int64_t count, const Functor& functor) const {
    return ForEach(device_, count, functor, execution_);
  }

  absl::Status SumKeys() const {
    TFB_RETURN_IF_ERROR(Launch(kernels_.features));
    const int64_t chunks = a_.heads * a_.key_chunks;
    TFB_RETURN_IF_ERROR(Do(chunks, LinearSummariseKeys{a_}));
    TFB_RETURN_IF_ERROR(Do(a_.heads, LinearRunThroughKeys{a_}));
    TFB_RETURN_IF_ERROR(Do(chunks, LinearRunThroughChunk{a_}));
    TFB_RETURN_IF_ERROR(Launch(kernels_.key_sums));
    return Do(a_.heads * a_.sum, LinearScanKeys{a_});
  }
  absl::Status SumQueries() const {
    TFB_RETURN_IF_ERROR(Launch(kernels_.rows));
    TFB_RETURN_IF_ERROR(Do(a_.heads * a_.query_chunks, LinearSummariseQueries{a_}));
    TFB_RETURN_IF_ERROR(Do(a_.heads, LinearRunThroughQueries{a_}));
    TFB_RETURN_IF_ERROR(Launch(kernels_.query_sums));
    return Do(a_.heads * a_.sum, LinearScanQueries{a_});
  }
  absl::Status RunChain() const {
    const bool gated = a_.forward.map.gated;
    if (!gated && !a_.has_maximum_gradient) return absl::OkStatus();
    const int64_t chunks = a_.heads * a_.query_chunks;
    TFB_RETURN_IF_ERROR(Do(chunks, LinearSummariseChain{a_}));
    TFB_RETURN_IF_ERROR(Do(a_.heads, LinearRunThroughChain{a_}));
    if (!gated && !a_.is_running_maximum) return absl::OkStatus();
    return Do(chunks, LinearFinishChain{a_});
  }

  const Device device_;
  const LinearBackwardKernels& kernels_;
  const LinearBackwardArguments& a_;
  const Execution& execution_;
};

// Returns what writes sums to a view of two dimensions, or of three.
LinearStoreSums StoreOf(const float* sums, const TensorView& to) {
  const int rank = to.rank;
  return {sums,
          to.dim(rank - 2),
          to.dim(rank - 1),
          static_cast<float*>(to.mutable_data()),
          rank == 3 ? to.stride(0) : 0,
          to.stride(rank - 2),
          to.stride(rank - 1)};
}

}  // namespace

size_t LinearCuda::BackwardWorkspaceBytes(const Problem& problem, const FeatureMap& map) {
  return Workspace::Measure([&](Workspace& workspace) {
    LinearBackwardArguments a = {};
    int64_t held = 0;
    LayOut(problem, map, &workspace, &a, &held);
  });
}

absl::Status LinearCuda::Backward(const Problem& problem, const LinearBackwardCall& call,
                                  const Execution& execution) const {
  LinearBackwardArguments a = {};
  a.forward = ArgumentsOf(problem, call);
  a.forward.out = ToDeviceView(call.out);
  a.out_gradient = ToDeviceView(call.out_gradient);
  a.log_sum_exp_gradient = ToDeviceView(call.log_sum_exp_gradient);
  a.q_gradient = ToDeviceView(call.q_gradient);
  a.k_gradient = ToDeviceView(call.k_gradient);
  a.v_gradient = ToDeviceView(call.v_gradient);

  Workspace workspace(execution.workspace);
  int64_t held = 0;
  const Totals totals = LayOut(problem, map_, &workspace, &a, &held);
  held = std::min(held, max_held_heads_);
  if (call.gate_gradient.empty()) a.gate_parts = nullptr;
  a.forward.key_gates = totals.key_gates;
  TFB_RETURN_IF_ERROR(
      runtime_->Fill(totals.w, 0, totals.w_floats * sizeof(float), execution.stream));
  TFB_RETURN_IF_ERROR(
      runtime_->Fill(totals.gate, 0, totals.gate_floats * sizeof(float), execution.stream));
  if (map_.gated) TFB_RETURN_IF_ERROR(ToStatus(sums().gates(a.forward, execution.stream)));
  const bool has_w = !call.w_gradient.empty();
  const int64_t heads = problem.batch * problem.kv_heads;
  for (a.first_head = 0; a.first_head < heads; a.first_head += held) {
    a.heads = std::min(held, heads - a.first_head);
    TFB_RETURN_IF_ERROR(Steps(runtime_, a, execution).Run(has_w, totals));
  }
  if (has_w) {
    TFB_RETURN_IF_ERROR(ForEach(runtime_->device(), totals.w_floats,
                                StoreOf(totals.w, call.w_gradient), execution));
  }
  if (call.gate_gradient.empty()) return absl::OkStatus();
  return ForEach(runtime_->device(), totals.gate_floats, StoreOf(totals.gate, call.gate_gradient),
                 execution);
}

}  // namespace tfb
