#include "attention/dense/dense_cudnn.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/flash/flash.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::dense {
namespace {

// Ids of the graph's tensors that a call provides.
enum Id : int64_t {
  kQueries = 1,
  kKeys,
  kValues,
  kOut,
  kLogSumExp,
  kScale,
  kHidden,  // the score of a key that is not seen
  // Used for the diagonal of a causal mask, where there are not as many queries as keys.
  kKeyTokens,
  kQueryTokens,
};

int DataType(DType dtype) {
  return dtype == DType::kBF16 ? cudnn::kDataBfloat16 : cudnn::kDataHalf;
}

// Tells whether the graph has a mask. A single query sees all keys, and cuDNN's kernels for
// decoding support no mask.
bool HasMask(const Problem& p) { return p.causal && p.query_tokens > 1; }

// Returns the scores of the keys that a query sees, and `hidden` for the others: a query sees
// column j of row i where i + kv_tokens - query_tokens >= j.
CudnnGraph::Tensor CausalScores(const Problem& p, CudnnGraph::Tensor scores, CudnnGraph* graph) {
  const std::vector<int64_t> dims = {p.batch, p.query_heads, p.query_tokens, p.kv_tokens};
  const auto indices = [&] { return graph->Virtual(cudnn::kDataInt32, dims); };
  CudnnGraph::Tensor row = graph->Index(2, scores, indices());
  const CudnnGraph::Tensor column = graph->Index(3, scores, indices());
  if (p.causal_offset() != 0) {
    row = graph->Pointwise(cudnn::kPointwiseAdd, cudnn::kDataInt32, row,
                           graph->Value(kKeyTokens, cudnn::kDataInt32), indices());
    row = graph->Pointwise(cudnn::kPointwiseSub, cudnn::kDataInt32, row,
                           graph->Value(kQueryTokens, cudnn::kDataInt32), indices());
  }
  const CudnnGraph::Tensor is_seen =
      graph->Pointwise(cudnn::kPointwiseCmpGe, cudnn::kDataBoolean, row, column,
                       graph->Virtual(cudnn::kDataBoolean, dims));
  return graph->Pointwise(cudnn::kPointwiseBinarySelect, cudnn::kDataFloat, scores,
                          graph->Value(kHidden, cudnn::kDataFloat),
                          graph->Virtual(cudnn::kDataFloat, dims), is_seen);
}

}  // namespace

// Builds the graph. cuDNN recognises the formula by its operations, none of which may be missing:
// the logarithm is there even where it is not wanted.
CudnnGraph CudnnAttentionGraph(const Cudnn* cudnn, const Problem& p) {
  CudnnGraph graph(cudnn);
  const int io = DataType(p.dtype);
  const auto rows = [](int64_t batch, int64_t heads, int64_t tokens, int64_t channels) {
    return std::pair(
        std::vector<int64_t>{batch, heads, tokens, channels},
        std::vector<int64_t>{heads * tokens * channels, tokens * channels, channels, 1});
  };
  const auto memory = [&](Id id, int dtype, const auto& dims_and_strides) {
    return graph.Memory(id, dtype, dims_and_strides.first, dims_and_strides.second);
  };
  const CudnnGraph::Tensor q =
      memory(kQueries, io, rows(p.batch, p.query_heads, p.query_tokens, p.head_dim));
  auto transposed = rows(p.batch, p.kv_heads, p.kv_tokens, p.head_dim);
  std::swap(transposed.first[2], transposed.first[3]);
  std::swap(transposed.second[2], transposed.second[3]);
  const CudnnGraph::Tensor k = memory(kKeys, io, transposed);
  const CudnnGraph::Tensor v =
      memory(kValues, io, rows(p.batch, p.kv_heads, p.kv_tokens, p.value_dim));
  const CudnnGraph::Tensor out =
      memory(kOut, io, rows(p.batch, p.query_heads, p.query_tokens, p.value_dim));
  const auto row_dims_and_strides = rows(p.batch, p.query_heads, p.query_tokens, 1);
  const CudnnGraph::Tensor log_sum_exp =
      memory(kLogSumExp, cudnn::kDataFloat, row_dims_and_strides);

  const std::vector<int64_t> dims = {p.batch, p.query_heads, p.query_tokens, p.kv_tokens};
  const auto scores = [&] { return graph.Virtual(cudnn::kDataFloat, dims); };
  const auto row = [&] { return graph.Virtual(cudnn::kDataFloat, row_dims_and_strides.first); };
  const auto pointwise = [&](int mode, CudnnGraph::Tensor x, CudnnGraph::Tensor b,
                             CudnnGraph::Tensor y) {
    return graph.Pointwise(mode, cudnn::kDataFloat, x, b, y);
  };
  CudnnGraph::Tensor s = graph.MatMul(q, k, scores());
  s = pointwise(cudnn::kPointwiseMul, s, graph.Value(kScale, cudnn::kDataFloat), scores());
  if (HasMask(p)) s = CausalScores(p, s, &graph);
  const CudnnGraph::Tensor max = graph.Reduce(cudnn::kReduceTensorMax, s, row());
  const CudnnGraph::Tensor shifted = pointwise(cudnn::kPointwiseSub, s, max, scores());
  const CudnnGraph::Tensor exp = pointwise(cudnn::kPointwiseExp, shifted, nullptr, scores());
  const CudnnGraph::Tensor sum = graph.Reduce(cudnn::kReduceTensorAdd, exp, row());
  const CudnnGraph::Tensor log = pointwise(cudnn::kPointwiseLog, sum, nullptr, row());
  pointwise(cudnn::kPointwiseAdd, max, log, log_sum_exp);
  const CudnnGraph::Tensor weights =
      pointwise(cudnn::kPointwiseDiv, exp, sum, graph.Virtual(io, dims));
  graph.MatMul(weights, v, out);
  return graph;
}

namespace {

absl::Status CheckProblem(const Problem& p, Device device) {
  const auto unimplemented = [](auto... words) {
    return absl::UnimplementedError(absl::StrCat("dense: backend cudnn ", words...));
  };
  if (device != Device::kCuda) {
    return unimplemented("is for device cuda; this one is ", Name(device));
  }
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) {
    return unimplemented("is for bf16 and f16; dtype is ", Name(p.dtype));
  }
  if (p.head_dim % 8 != 0 || p.value_dim % 8 != 0) {
    return unimplemented("has multiples of 8 as head_dim and value_dim; they are ", p.head_dim,
                         " and ", p.value_dim);
  }
  if (p.kv_tokens == 0) return unimplemented("has at least one key; kv_tokens is 0");
  if (p.causal && p.query_tokens > p.kv_tokens) {
    return unimplemented("has at most as many queries as keys where they are causal; there are ",
                         p.query_tokens, " and ", p.kv_tokens);
  }
  return absl::OkStatus();
}

class CudnnDenseLayer : public Layer {
 public:
  CudnnDenseLayer(const Problem& problem, double scale, CudnnDevice* device, CudnnPlan plan)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
        device_(device),
        plan_(std::move(plan)),
        scale_(static_cast<float>(ProductScale(problem, scale))),
        // NVIDIA's own front end gives older versions the lowest number instead of -inf.
        hidden_(device->cudnn().version() >= 91000 ? -std::numeric_limits<float>::infinity()
                                                   : std::numeric_limits<float>::lowest()),
        kv_tokens_(static_cast<int32_t>(problem.kv_tokens)),
        query_tokens_(static_cast<int32_t>(problem.query_tokens)) {}

  size_t workspace_bytes(int) const override {
    return Workspace::Measure([this](Workspace& workspace) { Take(workspace); });
  }

  Cost cost() const override { return CudnnCost(problem()); }

  std::map<std::string, double> statistics() const override {
    return {{"cudnn_version", device_->cudnn().version()}};
  }

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    if (!inputs.Get("key_mask").empty()) {
      return absl::UnimplementedError("dense: backend cudnn has no key mask");
    }
    const Problem& p = problem();
    if (p.batch == 0 || p.query_tokens == 0) return absl::OkStatus();
    Workspace workspace(execution.workspace);
    const Scratch scratch = Take(workspace);
    for (const char* name : {"q", "k", "v"}) {
      TFB_RETURN_IF_ERROR(CheckCudnnTensor(name, inputs.Get(name)));
    }
    const TensorView out = outputs.Get("out"), log_sum_exp = outputs.Get("log_sum_exp");
    TFB_RETURN_IF_ERROR(CheckCudnnTensor("out", out));
    if (!log_sum_exp.empty()) TFB_RETURN_IF_ERROR(CheckCudnnTensor("log_sum_exp", log_sum_exp));

    const auto input = [&](const char* name) { return const_cast<void*>(inputs.Get(name).data); };
    const std::array<int64_t, 9> ids = {kQueries, kKeys,   kValues,    kOut,        kLogSumExp,
                                        kScale,   kHidden, kKeyTokens, kQueryTokens};
    const std::array<void*, 9> pointers = {
        input("q"),
        input("k"),
        input("v"),
        out.mutable_data(),
        log_sum_exp.empty() ? scratch.log_sum_exp : log_sum_exp.mutable_data(),
        &scale_,
        &hidden_,
        &kv_tokens_,
        &query_tokens_};
    const size_t count = !HasMask(p) ? 6 : p.causal_offset() == 0 ? 7 : 9;
    return device_->Execute(&plan_, absl::MakeConstSpan(ids).first(count),
                            absl::MakeConstSpan(pointers).first(count), scratch.library,
                            execution.stream);
  }

 private:
  struct Scratch {
    float* log_sum_exp;  // used where the caller wants no log-sum-exp
    std::byte* library;
  };
  Scratch Take(Workspace& workspace) const {
    const Problem& p = problem();
    return {workspace.Take<float>(p.batch * p.query_heads * p.query_tokens),
            workspace.Take<std::byte>(static_cast<int64_t>(plan_.workspace_bytes()))};
  }

  CudnnDevice* device_;
  CudnnPlan plan_;
  // The plan reads these from host memory.
  float scale_;
  float hidden_;
  int32_t kv_tokens_;
  int32_t query_tokens_;
};

}  // namespace

absl::Status CheckCudnnTensor(absl::string_view name, const ConstTensorView& view) {
  const auto unimplemented = [name](absl::string_view wanted) {
    return absl::UnimplementedError(
        absl::StrCat("dense: backend cudnn wants ", wanted, "; ", name, " is not"));
  };
  if (!view.is_contiguous()) return unimplemented("contiguous tensors");
  if (reinterpret_cast<uintptr_t>(view.data) % CudnnGraph::kAlignment != 0) {
    return unimplemented(
        absl::StrCat("tensors at multiples of ", CudnnGraph::kAlignment, " bytes"));
  }
  return absl::OkStatus();
}

Cost CudnnCost(const Problem& p) {
  double pairs = 0;  // pairs of one head and batch row
  for (int64_t i = 0; i < p.query_tokens; ++i) {
    pairs += static_cast<double>(p.causal ? i + p.causal_offset() + 1 : p.kv_tokens);
  }
  Cost cost;
  cost.flops =
      2.0 * static_cast<double>(p.batch * p.query_heads * (p.head_dim + p.value_dim)) * pairs;
  cost.bytes = AttentionBytes(p);
  return cost;
}

absl::StatusOr<std::unique_ptr<Layer>> MakeCudnnDense(const Problem& problem, double scale,
                                                      Device device) {
  TFB_RETURN_IF_ERROR(CheckProblem(problem, device));
  TFB_ASSIGN_OR_RETURN(CudnnDevice * gpu, CudnnDevice::Get());
  CudnnPlan plan;
  if (problem.batch > 0 && problem.query_tokens > 0) {
    CudnnGraph graph = CudnnAttentionGraph(&gpu->cudnn(), problem);
    TFB_ASSIGN_OR_RETURN(plan, gpu->Plan(&graph));
  }
  return std::make_unique<CudnnDenseLayer>(problem, scale, gpu, std::move(plan));
}

}  // namespace tfb::dense
