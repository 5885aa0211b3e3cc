#include "harness/testing/tiny_attention.h"

#include <algorithm>
#include <cmath>

#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "harness/testing/tiny_kernels.h"

namespace tfb {
namespace {

bool IsOfKernels(TinyFault fault) {
  return fault == TinyFault::kDependsOnOrder || fault == TinyFault::kHeadsInGridZ;
}

}  // namespace

TinyCall MakeTinyCall(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                      const ConstTensorView& key_mask, bool causal) {
  TinyCall call = {};
  call.batch = q.dim(0);
  call.heads = q.dim(1);
  call.group = q.dim(1) / std::max<int64_t>(k.dim(1), 1);
  call.queries = q.dim(2);
  call.keys = call.seen_keys = k.dim(2);
  call.head_dim = q.dim(3);
  call.value_dim = v.dim(3);
  call.first_query = call.keys - call.queries;
  call.behind = kMaxTokens;
  call.ahead = causal ? 0 : kMaxTokens;
  if (!key_mask.empty()) {
    call.key_mask = static_cast<const unsigned char*>(key_mask.data);
    call.mask_strides[0] = key_mask.stride(0);
    call.mask_strides[1] = key_mask.stride(1);
  }
  call.scale = 1 / std::sqrt(static_cast<float>(call.head_dim));
  return call;
}

absl::Status RunTinyAttention(Device device, const TinyCall& call, const TinyTensors& tensors,
                              const Execution& execution) {
  const TinyTensors& t = tensors;
  TFB_RETURN_IF_ERROR(ForEachInRows(device, call.rows(), call.keys,
                                    TinyScores{call, t.q, t.k, t.weights}, execution));
  TFB_RETURN_IF_ERROR(ForEachInRows(
      device, call.rows(), 1,
      TinySums{call, t.q, t.weights, t.factors, t.log_sum_exp, t.kept, t.overrun, t.unwritten},
      execution));
  if (IsOfKernels(call.fault) && device != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime* const runtime, CudaRuntime::For(device));
    const TinyKernels& kernels = KernelsOn<TinyKernels>(runtime->target());
    const TinySumsInAnyOrder sums = {t.weights, t.factors, t.kept, call.rows(), call.keys};
    TFB_RETURN_IF_ERROR(ToStatus(call.Is(TinyFault::kHeadsInGridZ)
                                     ? kernels.visit_heads(call.batch, call.heads, execution.stream)
                                     : kernels.sum_in_any_order(sums, execution.stream)));
  }
  return ForEachInRows(device, call.rows(), call.value_dim,
                       TinyMeans{call, t.weights, t.factors, t.v, t.out, t.changed}, execution);
}

}  // namespace tfb
