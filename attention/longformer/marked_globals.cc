#include "attention/longformer/marked_globals.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/cuda/runtime.h"
#include "core/status.h"

namespace tfb::longformer {
namespace {

// Does what the kernel FindGlobals does, for one sequence.
void FindGlobalsOnCpu(const FindGlobalsArguments& a, int64_t b) {
  const GlobalLists& lists = a.lists;
  int64_t marked = 0, globals = 0, other = 0;
  for (int64_t i = 0; i < a.tokens; ++i) {
    const auto is_set = [b, i](const uint8_t* mask, const int64_t* strides) {
      return mask[b * strides[0] + i * strides[1]] != 0;
    };
    const bool is_token = a.key_mask == nullptr || is_set(a.key_mask, a.key_mask_strides);
    bool is_global = a.is_position[i] != 0;
    if (!is_global && is_token && a.global_mask != nullptr &&
        is_set(a.global_mask, a.global_mask_strides)) {
      is_global = marked++ < a.most_marked;
    }
    lists.is_global[b * a.tokens + i] = is_global;
    lists.local_keys[b * a.tokens + i] = is_token && !is_global;
    lists.global_keys[b * a.tokens + i] = is_token && is_global;
    if (is_global) {
      lists.keys[b * a.most + globals] = static_cast<int32_t>(i);
      lists.queries[b * a.most + globals++] = static_cast<int32_t>(i);
    } else {
      other = i;
    }
  }
  std::fill(lists.keys + b * a.most + globals, lists.keys + (b + 1) * a.most,
            static_cast<int32_t>(other));
  std::fill(lists.queries + b * a.most + globals, lists.queries + (b + 1) * a.most, -1);
}

void SetMask(const ConstTensorView& mask, const uint8_t** data, int64_t* strides) {
  if (mask.empty()) return;
  *data = static_cast<const uint8_t*>(mask.data);
  std::copy_n(mask.strides.data(), 2, strides);
}

}  // namespace

MarkedGlobalsLayer::MarkedGlobalsLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                                       Device device, std::vector<int64_t> positions,
                                       int64_t most_marked, FunctionPattern window,
                                       PlaceOrder order)
    : Layer(problem, std::move(inputs), AttentionOutputs(problem)),
      device_(device),
      positions_(std::move(positions)),
      most_marked_(most_marked),
      most_(std::min(problem.kv_tokens, most_marked + static_cast<int64_t>(positions_.size()))),
      window_(std::move(window)),
      order_(std::move(order)),
      has_own_tensors_(
          std::any_of(this->inputs().begin(), this->inputs().end(),
                      [](const TensorSpec& input) { return input.name == "q_global"; })),
      parts_(2, problem),
      rows_problem_(problem),
      calls_(2) {
  for (Problem& part : parts_) part.causal = false;
  parts_[1].kv_tokens = most_;
  rows_problem_.causal = false;
  if (device == Device::kCpu) rows_problem_.query_tokens = most_;
}

size_t MarkedGlobalsLayer::workspace_bytes(int threads) const {
  const size_t rows =
      device_ == Device::kCpu
          ? FlashEngine::WorkspaceBytes(device_, rows_problem_, false, threads)
          : FlashEngine::StreamWorkspaceBytes(device_, rows_problem_, false, threads);
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max(rows, FlashParts::WorkspaceBytes(device_, parts_, false, threads));
}

Cost MarkedGlobalsLayer::cost() const {
  const Problem& p = problem();
  Cost cost;
  cost.bytes = TensorBytes();
  if (!has_own_tensors_) return cost;
  // Of q_global only the global rows are read, of which those of the positions are known.
  const int64_t unread = p.query_tokens - static_cast<int64_t>(positions_.size());
  *cost.bytes -=
      static_cast<double>(p.batch * p.query_heads * unread * p.head_dim * SizeOf(p.dtype));
  return cost;
}

MarkedGlobalsLayer::Memory MarkedGlobalsLayer::LayOut(Workspace& workspace) const {
  const bool on_cpu = device_ == Device::kCpu;
  const int64_t tokens = problem().batch * problem().kv_tokens, listed = problem().batch * most_;
  Memory memory;
  memory.lists.is_global = workspace.Take<uint8_t>(tokens);
  memory.lists.local_keys = workspace.Take<uint8_t>(tokens);
  memory.lists.global_keys = workspace.Take<uint8_t>(tokens);
  memory.lists.keys = workspace.Take<int32_t>(listed);
  memory.lists.queries = on_cpu ? workspace.Take<int32_t>(listed) : nullptr;
  memory.rows.is_listed = memory.lists.is_global;
  memory.rows.rows = on_cpu ? nullptr : workspace.Take<int32_t>(tokens);
  memory.rows.begins = on_cpu ? nullptr : workspace.Take<int32_t>(problem().batch + 1);
  return memory;
}

absl::Status MarkedGlobalsLayer::DoSetup(const Inputs&, const Execution&) {
  std::vector<uint8_t> is_position(problem().kv_tokens, 0);
  for (const int64_t position : positions_) is_position[position] = 1;
  TFB_ASSIGN_OR_RETURN(is_position_, DeviceArray<uint8_t>::Create(device_, is_position));
  TFB_ASSIGN_OR_RETURN(order_tokens_, DeviceArray<int32_t>::Create(device_, order_.tokens));
  std::vector<FlashEngine> engines(2);
  TFB_ASSIGN_OR_RETURN(engines[0], FlashEngine::Create(device_, parts_[0], window_));
  TFB_ASSIGN_OR_RETURN(engines[1], FlashEngine::Create(device_, parts_[1], FullPattern()));
  softmax_ = FlashParts(device_, std::move(engines));
  if (device_ == Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(rows_engine_, FlashEngine::Create(device_, rows_problem_, FullPattern()));
  } else {
    TFB_ASSIGN_OR_RETURN(rows_engine_, FlashEngine::CreateForStream(device_, rows_problem_));
  }
  return absl::OkStatus();
}

absl::Status MarkedGlobalsLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                       const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(FindGlobals(inputs, memory.lists, rest));
  TFB_RETURN_IF_ERROR(RunLocalRows(inputs, outputs, memory, rest));
  return RunGlobalRows(inputs, outputs, memory, rest);
}

absl::Status MarkedGlobalsLayer::FindGlobals(const Inputs& inputs, const GlobalLists& lists,
                                             const Execution& execution) const {
  FindGlobalsArguments arguments = {};
  arguments.batch = problem().batch;
  arguments.tokens = problem().kv_tokens;
  arguments.most = most_;
  arguments.most_marked = most_marked_;
  arguments.is_position = is_position_.data();
  SetMask(inputs.Get("global_mask"), &arguments.global_mask, arguments.global_mask_strides);
  SetMask(inputs.Get("key_mask"), &arguments.key_mask, arguments.key_mask_strides);
  arguments.lists = lists;
  if (device_ == Device::kCpu) {
    execution.pool->ParallelFor(problem().batch,
                                [&](int64_t b, int) { FindGlobalsOnCpu(arguments, b); });
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(
      KernelsOn<LongformerKernels>(runtime->target()).find_globals(arguments, execution.stream));
}

absl::Status MarkedGlobalsLayer::RunLocalRows(const Inputs& inputs, const Outputs& outputs,
                                              const Memory& memory, const Execution& execution) {
  const auto mask = [this](const uint8_t* data) {
    return ConstTensorView(data, DType::kU8, {problem().batch, problem().kv_tokens});
  };
  FlashCall& window = calls_[0] = softmax_.engines()[0].NewCall(inputs, outputs);
  window.key_mask = mask(memory.lists.local_keys);
  if (order_tokens_.size() > 0) {
    const int64_t stride = order_.orders > 1 ? order_.places() : 0;
    window.query_order = {order_tokens_.data(), 0, stride, problem().group()};
    window.key_order = {order_tokens_.data(), 0, stride};
  }
  FlashCall& globals = calls_[1] = softmax_.engines()[1].NewCall(inputs, outputs);
  globals.key_mask = mask(memory.lists.global_keys);
  globals.key_order = {memory.lists.keys, most_, 0};
  globals.tokens.causal = problem().causal;
  return softmax_.Run(calls_, execution);
}

absl::Status MarkedGlobalsLayer::RunGlobalRows(const Inputs& inputs, const Outputs& outputs,
                                               const Memory& memory,
                                               const Execution& execution) const {
  FlashCall call = rows_engine_.NewCall(inputs, outputs);
  if (has_own_tensors_) {
    call.q = inputs.Get("q_global");
    call.k = inputs.Get("k_global");
    call.v = inputs.Get("v_global");
  }
  if (device_ == Device::kCpu) {
    call.query_order = {memory.lists.queries, most_, 0};
    call.tokens.causal = problem().causal;
    return rows_engine_.Run(call, execution);
  }
  TFB_RETURN_IF_ERROR(
      ListRows(device_, memory.rows, problem().batch, problem().kv_tokens, execution));
  Band band;
  band.high = problem().causal ? 0 : std::numeric_limits<int64_t>::max() / 2;
  call.band = &band;
  call.asked = memory.rows.list(problem().batch);
  return rows_engine_.Run(call, execution);
}

}  // namespace tfb::longformer
