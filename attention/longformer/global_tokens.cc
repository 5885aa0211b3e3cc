#include "attention/longformer/global_tokens.h"

#include <algorithm>
#include <utility>

#include "core/cuda/runtime.h"
#include "core/status.h"

namespace tfb::longformer {
namespace {

void SetMask(const ConstTensorView& mask, const uint8_t** data, int64_t* strides) {
  *data = static_cast<const uint8_t*>(mask.data);
  std::copy_n(mask.strides.data(), 2, strides);
}

}  // namespace

GlobalTokens::GlobalTokens(const Problem& problem, std::vector<int64_t> positions,
                           int64_t most_marked)
    : positions_(std::move(positions)) {
  arguments_.batch = problem.batch;
  arguments_.tokens = problem.kv_tokens;
  arguments_.most_marked = most_marked;
  arguments_.most =
      std::min(problem.kv_tokens, most_marked + static_cast<int64_t>(positions_.size()));
}

absl::Status GlobalTokens::Setup(Device device, const Inputs&, const Execution&) {
  device_ = device;
  std::vector<uint8_t> is_position(arguments_.tokens, 0);
  for (const int64_t position : positions_) is_position[position] = 1;
  TFB_ASSIGN_OR_RETURN(is_position_, DeviceArray<uint8_t>::Create(device, is_position));
  arguments_.is_position = is_position_.data();
  return absl::OkStatus();
}

void GlobalTokens::LayOut(Workspace* workspace, Inputs* tensors) {
  const Shape of_tokens = {arguments_.batch, arguments_.tokens};
  const auto take = [&](const char* name) {
    uint8_t* marks = workspace->Take<uint8_t>(NumElements(of_tokens));
    tensors->Set(name, ConstTensorView(marks, DType::kU8, of_tokens));
    return marks;
  };
  GlobalLists& lists = arguments_.lists;
  lists.is_global = take("is_global");
  lists.local_keys = take("local_keys");
  lists.global_keys = take("global_keys");
  lists.keys = workspace->Take<int32_t>(arguments_.batch * arguments_.most);
  tensors->Set("global_tokens",
               ConstTensorView(lists.keys, DType::kI32, {arguments_.batch, 1, arguments_.most}));
}

absl::Status GlobalTokens::Run(const Inputs& tensors, const Outputs&, const Execution& execution) {
  SetMask(tensors.Get("global_mask"), &arguments_.global_mask, arguments_.global_mask_strides);
  SetMask(tensors.Get("key_mask"), &arguments_.key_mask, arguments_.key_mask_strides);
  if (device_ == Device::kCpu) {
    execution.pool->ParallelFor(arguments_.batch, [this](int64_t b, int) { FindOnCpu(b); });
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(
      KernelsOn<LongformerKernels>(runtime->target()).find_globals(arguments_, execution.stream));
}

// Does what the kernel FindGlobals does, for one sequence.
void GlobalTokens::FindOnCpu(int64_t b) const {
  const FindGlobalsArguments& a = arguments_;
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
      lists.keys[b * a.most + globals++] = static_cast<int32_t>(i);
    } else {
      other = i;
    }
  }
  std::fill(lists.keys + b * a.most + globals, lists.keys + (b + 1) * a.most,
            static_cast<int32_t>(other));
}

}  // namespace tfb::longformer
