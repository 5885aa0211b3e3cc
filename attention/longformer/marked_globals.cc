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
    if (!is_global && is_token && is_set(a.global_mask, a.global_mask_strides)) {
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

MarkedGlobals::MarkedGlobals(Device device, const Problem& problem, std::vector<int64_t> positions,
                             int64_t most_marked)
    : device_(device),
      problem_(problem),
      positions_(std::move(positions)),
      most_marked_(most_marked),
      most_(std::min(problem.kv_tokens, most_marked + static_cast<int64_t>(positions_.size()))),
      parts_(2, problem),
      rows_problem_(problem),
      calls_(2) {
  for (Problem& part : parts_) part.causal = false;
  parts_[1].kv_tokens = most_;
  rows_problem_.causal = false;
  if (device == Device::kCpu) rows_problem_.query_tokens = most_;
}

size_t MarkedGlobals::workspace_bytes(int threads) const {
  const size_t rows =
      device_ == Device::kCpu
          ? FlashEngine::WorkspaceBytes(device_, rows_problem_, false, threads)
          : FlashEngine::StreamWorkspaceBytes(device_, rows_problem_, false, threads);
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max(rows, FlashParts::WorkspaceBytes(device_, parts_, false, threads));
}

MarkedGlobals::Memory MarkedGlobals::LayOut(Workspace& workspace) const {
  const bool on_cpu = device_ == Device::kCpu;
  const int64_t tokens = problem_.batch * problem_.kv_tokens, listed = problem_.batch * most_;
  Memory memory;
  memory.lists.is_global = workspace.Take<uint8_t>(tokens);
  memory.lists.local_keys = workspace.Take<uint8_t>(tokens);
  memory.lists.global_keys = workspace.Take<uint8_t>(tokens);
  memory.lists.keys = workspace.Take<int32_t>(listed);
  memory.lists.queries = on_cpu ? workspace.Take<int32_t>(listed) : nullptr;
  memory.rows.is_listed = memory.lists.is_global;
  memory.rows.rows = on_cpu ? nullptr : workspace.Take<int32_t>(tokens);
  memory.rows.begins = on_cpu ? nullptr : workspace.Take<int32_t>(problem_.batch + 1);
  return memory;
}

absl::Status MarkedGlobals::Setup(const Pattern& window) {
  std::vector<uint8_t> is_position(problem_.kv_tokens, 0);
  for (const int64_t position : positions_) is_position[position] = 1;
  TFB_ASSIGN_OR_RETURN(is_position_, DeviceArray<uint8_t>::Create(device_, is_position));
  std::vector<FlashEngine> engines(2);
  TFB_ASSIGN_OR_RETURN(engines[0], FlashEngine::Create(device_, parts_[0], window));
  TFB_ASSIGN_OR_RETURN(engines[1], FlashEngine::Create(device_, parts_[1], FullPattern(most_)));
  softmax_ = FlashParts(device_, std::move(engines));
  if (device_ == Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(
        rows_engine_, FlashEngine::Create(device_, rows_problem_, FullPattern(problem_.kv_tokens)));
  } else {
    TFB_ASSIGN_OR_RETURN(rows_engine_, FlashEngine::CreateForStream(device_, rows_problem_));
  }
  return absl::OkStatus();
}

absl::Status MarkedGlobals::Run(const ConstTensorView& global_mask, const FlashCall& local,
                                const FlashCall& global, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Memory memory = LayOut(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  FindGlobalsArguments arguments = {};
  arguments.batch = problem_.batch;
  arguments.tokens = problem_.kv_tokens;
  arguments.most = most_;
  arguments.most_marked = most_marked_;
  arguments.is_position = is_position_.data();
  SetMask(global_mask, &arguments.global_mask, arguments.global_mask_strides);
  SetMask(local.key_mask, &arguments.key_mask, arguments.key_mask_strides);
  arguments.lists = memory.lists;
  TFB_RETURN_IF_ERROR(FindGlobals(arguments, rest));

  const auto mask = [this](const uint8_t* data) {
    return ConstTensorView(data, DType::kU8, {problem_.batch, problem_.kv_tokens});
  };
  for (FlashCall& call : calls_) call = local;
  calls_[0].schedule = &softmax_.engines()[0].schedule();
  calls_[0].key_mask = mask(memory.lists.local_keys);
  calls_[1].schedule = &softmax_.engines()[1].schedule();
  calls_[1].key_mask = mask(memory.lists.global_keys);
  calls_[1].query_order = {};
  calls_[1].key_order = {memory.lists.keys, most_, 0};
  calls_[1].tokens.causal = problem_.causal;
  TFB_RETURN_IF_ERROR(softmax_.Run(calls_, rest));
  return RunGlobalRows(memory, global, rest);
}

absl::Status MarkedGlobals::FindGlobals(const FindGlobalsArguments& arguments,
                                        const Execution& execution) const {
  if (device_ == Device::kCpu) {
    execution.pool->ParallelFor(problem_.batch,
                                [&](int64_t b, int) { FindGlobalsOnCpu(arguments, b); });
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(
      KernelsOn<LongformerKernels>(runtime->target()).find_globals(arguments, execution.stream));
}

absl::Status MarkedGlobals::RunGlobalRows(const Memory& memory, FlashCall call,
                                          const Execution& execution) const {
  if (device_ == Device::kCpu) {
    call.schedule = &rows_engine_.schedule();
    call.query_order = {memory.lists.queries, most_, 0};
    call.tokens.causal = problem_.causal;
    return rows_engine_.Run(call, execution);
  }
  TFB_RETURN_IF_ERROR(
      ListRows(device_, memory.rows, problem_.batch, problem_.kv_tokens, execution));
  Band band;
  band.high = problem_.causal ? 0 : std::numeric_limits<int64_t>::max() / 2;
  call.schedule = nullptr;
  call.query_order = {};
  call.band = &band;
  call.asked = memory.rows.list(problem_.batch);
  return rows_engine_.Run(call, execution);
}

}  // namespace tfb::longformer
