#include "harness/testing/tiny_backward.h"

#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

struct Scratch {
  TinyPairs pairs;
  float* gain;  // by row
};

Scratch Take(const Problem& p, Workspace& workspace) {
  const int64_t rows = p.batch * p.query_heads * p.query_tokens, pairs = rows * p.kv_tokens;
  Scratch scratch;
  scratch.pairs.product = workspace.Take<float>(pairs);
  scratch.pairs.p = workspace.Take<float>(pairs);
  scratch.pairs.ds = workspace.Take<float>(pairs);
  scratch.gain = workspace.Take<float>(rows);
  return scratch;
}

}  // namespace

size_t TinyBackwardWorkspaceBytes(const Problem& problem) {
  return Workspace::Measure([&](Workspace& w) { Take(problem, w); });
}

absl::Status RunTinyBackward(Device device, const Problem& problem, TinyCall call,
                             const float* log_sum_exp, int passes, const BackwardCall& backward,
                             const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = Take(problem, workspace);
  const TinyPairs& pairs = scratch.pairs;
  ConstTensorView out_gradient = backward.output_gradients.Get("out");
  if (call.Is(TinyFault::kGradientIgnoresStrides) && !out_gradient.empty()) {
    out_gradient = ConstTensorView(out_gradient.data, out_gradient.dtype, out_gradient.shape());
  }
  const DeviceView q = ToDeviceView(backward.inputs.Get("q"));
  const DeviceView k = ToDeviceView(backward.inputs.Get("k"));
  const DeviceView v = ToDeviceView(backward.inputs.Get("v"));
  const DeviceView g = ToDeviceView(out_gradient);
  const auto written = [&](const char* name) {
    const TensorView view = backward.input_gradients.Get(name);
    if (view.empty() || !call.Is(TinyFault::kGradientIgnoresOwnStrides)) return view;
    return TensorView(view.mutable_data(), view.dtype, view.shape());
  };
  const TensorView dq = written("q"), dk = written("k"), dv = written("v");
  const TensorView dgain = backward.parameter_gradients.Get("gain");
  const bool by_threads = call.Is(TinyFault::kGradientDependsOnThreads);
  const bool by_batch = call.Is(TinyFault::kGradientDependsOnBatch);
  call.reversed = (by_threads && execution.pool->threads() > 1) || (by_batch && problem.batch > 1);

  TFB_RETURN_IF_ERROR(ForEachInRows(device, call.rows(), call.keys,
                                    TinyWeightGradients{call, q, k, v, g, log_sum_exp, pairs},
                                    execution));
  const DeviceView out = ToDeviceView(backward.outputs.Get("out"));
  const DeviceView lse_gradient = ToDeviceView(backward.output_gradients.Get("log_sum_exp"));
  const bool without_mean = call.Is(TinyFault::kGradientNeedsQueries) && dq.empty();
  TFB_RETURN_IF_ERROR(ForEachInRows(
      device, call.rows(), 1,
      TinyScoreGradients{call, out, g, lse_gradient, pairs, scratch.gain, without_mean},
      execution));

  const bool rounds =
      call.Is(TinyFault::kGradientSumsIn16Bits) && SizeOf(problem.dtype) == sizeof(uint16_t);
  if (!dq.empty()) {
    const bool later = call.Is(TinyFault::kGradientKeepsState) && passes > 0;
    const float factor = call.Is(TinyFault::kGradientWrongScale) ? 1.001f : later ? 1.0001f : 1;
    const bool writes_behind = call.Is(TinyFault::kGradientWritesBehind) && dq.is_contiguous();
    TFB_RETURN_IF_ERROR(ForEachInRows(device, call.rows(), call.head_dim,
                                      TinyQueryGradients{call, k, v, ToDeviceView(dq), log_sum_exp,
                                                         pairs, factor, rounds, writes_behind},
                                      execution));
  }
  const int64_t key_rows = call.batch * call.kv_heads() * call.keys;
  if (!dk.empty()) {
    TFB_RETURN_IF_ERROR(ForEachInRows(
        device, key_rows, call.head_dim,
        TinyKeyGradients{call, q, ToDeviceView(dk), pairs.ds, pairs.p, /*of_keys=*/true, rounds},
        execution));
  }
  if (!dv.empty()) {
    TFB_RETURN_IF_ERROR(ForEachInRows(device, key_rows, call.value_dim,
                                      TinyKeyGradients{call, g, ToDeviceView(dv), pairs.p, pairs.p,
                                                       /*of_keys=*/false, /*rounds=*/false},
                                      execution));
  }
  if (!dgain.empty()) {
    TFB_RETURN_IF_ERROR(ForEachInRows(device, call.heads, 1,
                                      TinyGainGradients{call, scratch.gain, ToDeviceView(dgain)},
                                      execution));
  }

  TinyMisplacedWrites writes = {};
  if (call.Is(TinyFault::kBackwardWorkspaceOverrun)) {
    std::byte* const end = execution.workspace.data() + TinyBackwardWorkspaceBytes(problem);
    writes.byte = reinterpret_cast<unsigned char*>(end);
  }
  if (call.Is(TinyFault::kGradientWritesInputs) && g.data != nullptr && call.rows() > 0) {
    writes.element = g;
  }
  if (writes.byte == nullptr && writes.element.data == nullptr) return absl::OkStatus();
  return ForEachInRows(device, 1, 1, writes, execution);
}

}  // namespace tfb
