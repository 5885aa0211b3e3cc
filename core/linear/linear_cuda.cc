#include "core/linear/linear_cuda.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// The least number of keys in a group. A group costs its sums, 2 features (value_dim + 1) 4 B
// written and read, where its keys and values are 256 (head_dim + value_dim) of 2 or 4 bytes.
constexpr int64_t kGroupTokens = 256;
// The most tokens that are appended one by one.
constexpr int64_t kFewTokens = 4;

int64_t CeilDivide(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// How a call is cut into blocks. The plan depends on its sizes, the device's number of
// multiprocessors and its shared memory.
struct Plan {
  int64_t group_tokens = 0;
  int64_t groups = 0;
  int64_t summed_groups = 0;  // groups that are summed before the queries are read
  bool merges = false;
  bool has_prefixes = false;
  bool has_total = false;  // whether the workspace has a total
  bool on_chip = false;
  // Sizes in the workspace, in floats.
  int64_t key_gates = 0;
  int64_t group_sums = 0;
  int64_t total = 0;
  int64_t running = 0;
};

// Returns the number of blocks of 128 columns of values.
int64_t ValueParts(const LinearArguments& a) {
  return a.value_dim <= kLinearTile ? 1 : CeilDivide(a.value_dim, 2 * kLinearTile);
}

// Makes a plan. `continues` marks a causal call that starts from the sums of an earlier one and
// leaves its own.
Plan PlanOf(const CudaRuntime& runtime, const LinearArguments& a, bool continues) {
  const int64_t heads = a.batch * a.kv_heads, queries = a.batch * a.query_heads;
  const int64_t multiprocessors = runtime.properties().multiprocessors;
  Plan plan;
  plan.key_gates = a.map.gated ? heads * a.kv_tokens * 2 : 0;
  // Not causal: two blocks that sum share a multiprocessor. Causal: one block that walks has a
  // multiprocessor, and where its blocks are enough, no group is summed before it.
  const int64_t blocks = ValueParts(a) * (a.causal ? queries : heads * a.sums.tiles);
  const int64_t wanted = (a.causal ? 1 : 2) * multiprocessors / std::max<int64_t>(blocks, 1);
  const int64_t most = std::min<int64_t>(CeilDivide(a.kv_tokens, kGroupTokens), kLinearGroups);
  // Memory is planned for this many groups: it never shrinks with tokens, as the number of groups
  // can.
  const int64_t groups = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1));
  plan.group_tokens =
      std::max<int64_t>(CeilDivide(CeilDivide(a.kv_tokens, groups), kLinearTile), 1) * kLinearTile;
  plan.groups = CeilDivide(a.kv_tokens, plan.group_tokens);
  if (!a.causal) {
    plan.summed_groups = plan.groups;
    plan.merges = plan.groups != 1;  // the sums of the only group are those of all keys
    plan.has_total = true;
    plan.group_sums = plan.merges ? heads * groups * a.sums.head : 0;
    plan.total = heads * a.sums.head;
    return plan;
  }
  plan.running = queries * groups * ValueParts(a) * a.sums.head;
  const bool needs_total = a.map.stabiliser == KeyStabiliser::kSequence;
  plan.merges = continues || needs_total || plan.groups > 1;
  plan.has_prefixes = plan.merges;
  plan.has_total = plan.merges && !continues;
  if (plan.merges) {
    plan.summed_groups = continues || needs_total ? plan.groups : plan.groups - 1;
    plan.group_sums = heads * groups * a.sums.head;
    plan.total = plan.has_total ? heads * a.sums.head : 0;
  }
  return plan;
}

// Decides whether the walk of a causal call keeps the sums in shared memory.
void PlaceSums(const CudaRuntime& runtime, const LinearAttendKernels& kernels, LinearArguments* a,
               Plan* plan) {
  a->on_chip = true;
  plan->on_chip = kernels.shared_bytes(*a) <= runtime.properties().shared_memory_bytes_per_block;
  a->on_chip = plan->on_chip;
  if (plan->on_chip) plan->running = 0;
}

// Takes a plan's memory from the workspace.
void LayOut(const Plan& plan, Workspace& workspace, LinearArguments* a) {
  a->group_tokens = plan.group_tokens;
  a->groups = plan.groups;
  a->summed_groups = plan.summed_groups;
  a->has_prefixes = plan.has_prefixes;
  a->key_gates = workspace.Take<float>(plan.key_gates);
  float* group_sums = workspace.Take<float>(plan.group_sums);
  float* total = workspace.Take<float>(plan.total);
  a->running = workspace.Take<float>(plan.running);
  if (plan.has_total) a->total = total;
  a->group_sums = plan.merges ? group_sums : a->total;
}

// Returns the sizes of the problem, the map and the tensors that plans depend on.
LinearArguments SizesOf(const Problem& problem, const FeatureMap& map) {
  LinearArguments a = {};
  a.map = map;
  a.batch = problem.batch;
  a.query_heads = problem.query_heads;
  a.kv_heads = problem.kv_heads;
  a.query_tokens = problem.query_tokens;
  a.kv_tokens = problem.kv_tokens;
  a.head_dim = static_cast<int>(problem.head_dim);
  a.value_dim = static_cast<int>(problem.value_dim);
  a.causal = problem.causal;
  a.sums = LinearSumsOf(map, problem.value_dim);
  a.q.element = problem.dtype == DType::kF32    ? Element::kF32
                : problem.dtype == DType::kBF16 ? Element::kBf16
                                                : Element::kF16;
  return a;
}

LinearConstants ConstantsOf(const FeatureMap& map) {
  LinearConstants constants = {};
  constants.epsilon = static_cast<float>(map.epsilon);
  constants.log_epsilon = std::log(constants.epsilon);
  constants.features = static_cast<float>(map.features());
  constants.denominator_epsilon = static_cast<float>(map.denominator_epsilon / map.constant);
  constants.denominator_floor =
      static_cast<float>(map.denominator_floor / (map.constant * map.constant));
  constants.log_scale = 2 * std::log(map.constant);
  return constants;
}

Problem SegmentOf(const Problem& problem, int64_t tokens) {
  Problem segment = problem;
  segment.query_tokens = segment.kv_tokens = tokens;
  segment.causal = true;
  return segment;
}

bool IsAppendedOneByOne(const Problem& problem, int64_t tokens) {
  return tokens <= kFewTokens && problem.group() <= kLinearAppendHeads;
}

// Tells whether four channels of every row lie side by side and can be read as one aligned vector.
bool IsVector(const ConstTensorView& view) {
  const int64_t bytes = SizeOf(view.dtype) * 4;
  bool aligned = view.rank == 4 && view.dim(3) % 4 == 0 && view.stride(3) == 1 &&
                 reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  for (int axis = 0; aligned && axis < 3; ++axis) {
    aligned = view.dim(axis) <= 1 || view.stride(axis) % 4 == 0;
  }
  return aligned;
}

size_t PlanBytes(const CudaRuntime& runtime, const LinearAttendKernels& kernels, LinearArguments a,
                 bool continues) {
  Plan plan = PlanOf(runtime, a, continues);
  if (a.causal) PlaceSums(runtime, kernels, &a, &plan);
  return Workspace::Measure([&](Workspace& workspace) { LayOut(plan, workspace, &a); });
}

}  // namespace

const LinearSumKernels& LinearCuda::sums() const {
  return KernelsOn<LinearSumKernels>(runtime_->target());
}
const LinearAttendKernels& LinearCuda::attention() const {
  return KernelsOn<LinearAttendKernels>(runtime_->target());
}

absl::StatusOr<LinearCuda> LinearCuda::Create(CudaRuntime* runtime, const Problem& problem,
                                              const FeatureMap& map, const ConstTensorView& w,
                                              bool streams, const ConstTensorView& gate) {
  TFB_RETURN_IF_ERROR(CheckLinearMap(problem, map, w));
  LinearCuda linear;
  linear.runtime_ = runtime;
  linear.problem_ = problem;
  linear.map_ = map;
  TFB_ASSIGN_OR_RETURN(linear.w_, runtime->Upload(w.data, w.num_elements() * sizeof(float)));
  if (map.gated) {
    TFB_ASSIGN_OR_RETURN(linear.gate_,
                         runtime->Upload(gate.data, gate.num_elements() * sizeof(float)));
  }
  const int64_t none = 0;
  TFB_ASSIGN_OR_RETURN(linear.rows_without_weight_, runtime->Upload(&none, sizeof(none)));
  if (streams) {
    TFB_ASSIGN_OR_RETURN(linear.state_, runtime->Allocate(StateBytes(problem, map)));
  }
  return linear;
}

size_t LinearCuda::StateBytes(const Problem& problem, const FeatureMap& map) {
  return problem.batch * problem.kv_heads * LinearSumsOf(map, problem.value_dim).head *
         sizeof(float);
}

size_t LinearCuda::WorkspaceBytes(const CudaRuntime& runtime, const Problem& problem,
                                  const FeatureMap& map) {
  const LinearAttendKernels& kernels = KernelsOn<LinearAttendKernels>(runtime.target());
  size_t bytes = PlanBytes(runtime, kernels, SizesOf(problem, map), false);
  if (!problem.causal || map.stabiliser == KeyStabiliser::kSequence) return bytes;
  const Problem segment = SegmentOf(problem, problem.kv_tokens);
  return std::max(bytes, PlanBytes(runtime, kernels, SizesOf(segment, map), true));
}

LinearArguments LinearCuda::ArgumentsOf(const Problem& problem, const LinearInputs& inputs) const {
  LinearArguments a = SizesOf(problem, map_);
  a.q = ToDeviceView(inputs.q);
  a.k = ToDeviceView(inputs.k);
  a.v = ToDeviceView(inputs.v);
  a.vector_q = IsVector(inputs.q);
  a.vector_k = IsVector(inputs.k);
  a.vector_v = IsVector(inputs.v);
  if (!inputs.key_mask.empty()) {
    a.key_mask = static_cast<const uint8_t*>(inputs.key_mask.data);
    std::copy_n(inputs.key_mask.strides.begin(), 2, a.key_mask_strides);
  }
  a.w = w_.As<float>();
  a.gate = gate_.As<float>();
  a.constants = ConstantsOf(map_);
  a.max_blocks = max_blocks_;
  return a;
}

LinearArguments LinearCuda::ArgumentsOf(const Problem& problem, const LinearCall& call) const {
  LinearArguments a = ArgumentsOf(problem, static_cast<const LinearInputs&>(call));
  a.out = ToDeviceView(call.out);
  a.vector_out = IsVector(call.out);
  if (!call.log_sum_exp.empty()) {
    a.log_sum_exp = static_cast<float*>(call.log_sum_exp.mutable_data());
    std::copy_n(call.log_sum_exp.strides.begin(), 3, a.log_sum_exp_strides);
  }
  return a;
}

absl::Status LinearCuda::RunAll(LinearArguments* a, const Execution& execution) const {
  const Plan plan = PlanOf(*runtime_, *a, false);
  Workspace workspace(execution.workspace);
  LayOut(plan, workspace, a);
  TFB_RETURN_IF_ERROR(ToStatus(sums().sum(*a, execution.stream)));
  if (plan.merges) TFB_RETURN_IF_ERROR(ToStatus(sums().merge(*a, execution.stream)));
  return ToStatus(attention().attend(*a, execution.stream));
}

absl::Status LinearCuda::RunCausal(LinearArguments* a, const Execution& execution) const {
  Plan plan = PlanOf(*runtime_, *a, a->continues);
  PlaceSums(*runtime_, attention(), a, &plan);
  Workspace workspace(execution.workspace);
  LayOut(plan, workspace, a);
  if (map_.gated) TFB_RETURN_IF_ERROR(ToStatus(sums().gates(*a, execution.stream)));
  if (plan.merges) {
    TFB_RETURN_IF_ERROR(ToStatus(sums().sum(*a, execution.stream)));
    TFB_RETURN_IF_ERROR(ToStatus(sums().merge(*a, execution.stream)));
  }
  return ToStatus(attention().attend(*a, execution.stream));
}

absl::Status LinearCuda::Run(const Problem& problem, const LinearCall& call,
                             const Execution& execution) const {
  LinearArguments a = ArgumentsOf(problem, call);
  a.rows_without_weight = rows_without_weight_.As<unsigned long long>();
  TFB_RETURN_IF_ERROR(runtime_->Fill(rows_without_weight_.data(), 0, rows_without_weight_.bytes(),
                                     execution.stream));
  return problem.causal ? RunCausal(&a, execution) : RunAll(&a, execution);
}

absl::Status LinearCuda::Append(const Problem& problem, int64_t tokens, const LinearCall& call,
                                const Execution& execution) {
  if (map_.stabiliser == KeyStabiliser::kSequence) {
    return absl::InvalidArgumentError(
        "the keys' maximum over the whole sequence is not known while tokens are appended");
  }
  if (is_empty_) {
    TFB_RETURN_IF_ERROR(EmptyState(execution.stream));
    is_empty_ = false;
  }
  LinearArguments a = ArgumentsOf(SegmentOf(problem, tokens), call);
  a.total = state_.As<float>();
  a.continues = true;
  if (!IsAppendedOneByOne(problem, tokens)) return RunCausal(&a, execution);
  if (map_.gated) {
    Workspace workspace(execution.workspace);
    a.key_gates = workspace.Take<float>(problem.batch * problem.kv_heads * tokens * 2);
    TFB_RETURN_IF_ERROR(ToStatus(sums().gates(a, execution.stream)));
  }
  return ToStatus(KernelsOn<LinearAppendKernels>(runtime_->target()).append(a, execution.stream));
}

absl::Status LinearCuda::EmptyState(void* stream) const {
  LinearArguments a = SizesOf(problem_, map_);
  a.total = state_.As<float>();
  a.max_blocks = max_blocks_;
  return ToStatus(sums().merge(a, stream));
}

absl::StatusOr<int64_t> LinearCuda::RowsWithoutWeight() const {
  int64_t rows = 0;
  TFB_RETURN_IF_ERROR(runtime_->SynchronizeAll());
  TFB_RETURN_IF_ERROR(runtime_->CopyToHost(&rows, rows_without_weight_.data(), sizeof(rows)));
  return rows;
}

}  // namespace tfb
