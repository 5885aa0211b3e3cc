#include "core/retrieval/retrieval_layer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "core/retrieval/retrieval_kernels.h"
#include "core/search/search.h"
#include "core/status.h"

namespace tfb {
namespace {

// The specs with `tokens` for the number of tokens, which is their second dimension.
std::vector<TensorSpec> WithTokens(std::vector<TensorSpec> specs, int64_t tokens) {
  for (TensorSpec& spec : specs) spec.shape[1] = tokens;
  return specs;
}

// The rows of [batch, tokens, channels] as the one head of a search; empty where they do not lie
// evenly, or their channels not next to each other.
ConstTensorView EvenRows(const ConstTensorView& view) {
  const bool one_batch = view.dim(0) <= 1, one_token = view.dim(1) <= 1;
  const bool even = one_batch || one_token || view.stride(0) == view.dim(1) * view.stride(1);
  if (!even || (view.dim(2) > 1 && view.stride(2) != 1)) return {};
  return ConstTensorView(view.data, view.dtype, {1, view.dim(0) * view.dim(1), view.dim(2)},
                         {0, view.stride(one_token ? 0 : 1), 1});
}

void CopyOnCpu(const ConstTensorView& from, const TensorView& to, int64_t entries) {
  for (int64_t b = 0; b < from.dim(0); ++b) {
    for (int64_t i = 0; i < from.dim(1); ++i) {
      for (int64_t n = 0; n < from.dim(2); ++n) {
        const int32_t entry = *from.At<int32_t>(b, i, n);
        *to.MutableAt<int32_t>(b, i, n) = entry >= 0 && entry < entries ? entry : -1;
      }
    }
  }
}

}  // namespace

std::vector<TensorSpec> RetrievalInputs(const Problem& p, const RetrievalSizes& sizes) {
  const Shape states = {p.batch, p.query_tokens, p.model_dim()};
  return {{"x", states, p.dtype},
          {"context", states, p.dtype},
          {"neighbours", {p.batch, p.query_tokens, sizes.k}, DType::kI32, true}};
}

std::vector<TensorSpec> RetrievalOutputs(const Problem& p, const RetrievalSizes& sizes) {
  return {{"out", {p.batch, p.query_tokens, sizes.vocabulary}, p.dtype},
          {"neighbours", {p.batch, p.query_tokens, sizes.k}, DType::kI32, true}};
}

absl::Status CheckHiddenProblem(absl::string_view technique, const Problem& problem) {
  const auto same = [&](absl::string_view name, int64_t value, absl::string_view other,
                        int64_t allowed) {
    if (value == allowed) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(technique, " has no keys but the datastore's: ", name, " is ", value,
                     "; allowed is ", other, ", ", allowed));
  };
  TFB_RETURN_IF_ERROR(same("kv_tokens", problem.kv_tokens, "query_tokens", problem.query_tokens));
  TFB_RETURN_IF_ERROR(same("kv_heads", problem.kv_heads, "query_heads", problem.query_heads));
  return same("value_dim", problem.value_dim, "head_dim", problem.head_dim);
}

RetrievalLayer::RetrievalLayer(const Problem& problem, const RetrievalSizes& sizes, Device device)
    : StreamingLayer(problem, RetrievalInputs(problem, sizes), RetrievalOutputs(problem, sizes),
                     WithTokens(RetrievalInputs(problem, sizes), kSegmentTokens),
                     WithTokens(RetrievalOutputs(problem, sizes), kSegmentTokens),
                     std::max<int64_t>(problem.query_tokens, 1)),
      sizes_(sizes),
      device_(device) {}

absl::Status RetrievalLayer::Initialize(uint64_t seed) {
  const int64_t dim = problem().model_dim();
  TFB_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(DType::kF32, {sizes_.vocabulary, dim}));
  TFB_ASSIGN_OR_RETURN(Tensor keys, Tensor::Allocate(DType::kF32, {sizes_.entries, dim}));
  TFB_ASSIGN_OR_RETURN(Tensor values, Tensor::Allocate(sizes_.value_dtype(), {sizes_.entries}));
  FillNormal(&output, seed, "output", 0, 1 / std::sqrt(static_cast<double>(dim)));
  FillNormal(&keys, seed, "datastore.keys");
  const RandomStream random(seed, "datastore.values");
  for (int64_t e = 0; e < sizes_.entries; ++e) {
    values.view().Set(e, std::floor(random.Uniform(e) * static_cast<double>(sizes_.vocabulary)));
  }
  parameters_["output"] = std::move(output);
  parameters_["datastore.keys"] = std::move(keys);
  parameters_["datastore.values"] = std::move(values);
  return absl::OkStatus();
}

Cost RetrievalLayer::cost() const {
  const double dim = static_cast<double>(problem().model_dim());
  const double tokens = static_cast<double>(problem().batch * problem().query_tokens);
  const int64_t searched = sizes_.k == 0 ? 0 : sizes_.entries;
  Cost cost;
  cost.flops = 2 * tokens * dim * static_cast<double>(searched + sizes_.vocabulary);
  cost.bytes = TensorBytes();
  return cost;
}

RetrievalLayer::Scratch RetrievalLayer::LayOut(int64_t rows, Workspace& workspace) const {
  return {workspace.Take<int32_t>(rows * sizes_.k), workspace.Take<float>(rows * sizes_.k),
          workspace.Take<float>(rows * problem().model_dim())};
}

size_t RetrievalLayer::workspace_bytes(int threads) const {
  const SearchSizes search = {
      1, 1, rows(), problem().model_dim(), sizes_.entries, std::max<int64_t>(sizes_.k, 1)};
  return Workspace::Measure([&](Workspace& workspace) { LayOut(rows(), workspace); }) +
         std::max(SearchWorkspaceBytes(device_, search, threads),
                  predict_workspace_bytes(rows(), threads));
}

absl::Status RetrievalLayer::DoSetup(const Inputs&, const Execution&) {
  const ConstTensorView value_view = parameters_.at("datastore.values").view();
  std::vector<int32_t> values(static_cast<size_t>(sizes_.entries));
  for (int64_t e = 0; e < sizes_.entries; ++e) {
    const double token = value_view.Get(e);
    if (token < 0 || token >= static_cast<double>(sizes_.vocabulary)) {
      return absl::InvalidArgumentError(absl::StrCat("datastore.values: entry ", e, " is token ",
                                                     token, "; allowed are 0 to ",
                                                     sizes_.vocabulary - 1));
    }
    values[e] = static_cast<int32_t>(token);
  }
  TFB_ASSIGN_OR_RETURN(values_, DeviceArray<int32_t>::Create(device_, values));
  TFB_ASSIGN_OR_RETURN(zero_, DeviceArray<float>::Create(device_, {0.0f}));
  TFB_ASSIGN_OR_RETURN(
      output_, PackedMatrix::Create(device_, Transpose(parameters_.at("output").view(), 0, 1)));
  const Tensor& keys = parameters_.at("datastore.keys");
  keys_ = keys.span<float>().data();
  if (device_ == Device::kCpu) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  TFB_ASSIGN_OR_RETURN(device_keys_, runtime->Upload(keys.raw(), keys.bytes()));
  keys_ = device_keys_.As<float>();
  return runtime->Synchronize();
}

absl::Status RetrievalLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                   const Execution& execution) {
  Tokens tokens;
  tokens.x = inputs.Get("x");
  tokens.context = inputs.Get("context");
  tokens.out = outputs.Get("out");
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(tokens.rows(), workspace);
  tokens.neighbours = scratch.neighbours;
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  if (tokens.rows() == 0) return absl::OkStatus();

  const TensorView found(scratch.neighbours, DType::kI32,
                         {tokens.x.dim(0), tokens.x.dim(1), sizes_.k});
  const ConstTensorView given = inputs.Get("neighbours");
  TFB_RETURN_IF_ERROR(given.empty() ? FindNeighbours(tokens.context, scratch, rest)
                                    : CopyNeighbours(given, found, rest));
  if (const TensorView written = outputs.Get("neighbours"); !written.empty()) {
    TFB_RETURN_IF_ERROR(CopyNeighbours(found, written, rest));
  }
  return Predict(tokens, rest);
}

absl::Status RetrievalLayer::DoAppend(int64_t, const Inputs& segment, const Outputs& outputs,
                                      const Execution& execution) {
  return DoRun(segment, outputs, execution);
}

absl::Status RetrievalLayer::FindNeighbours(const ConstTensorView& context, const Scratch& scratch,
                                            const Execution& execution) const {
  if (sizes_.k == 0) return absl::OkStatus();
  const int64_t dim = problem().model_dim();
  SearchCall call;
  call.queries = EvenRows(context);
  if (call.queries.empty()) {
    const TensorView copy(scratch.context, DType::kF32, context.shape());
    const ConstTensorView zeros(zero_.data(), DType::kF32, context.shape(), {0, 0, 0});
    TFB_RETURN_IF_ERROR(Add(device_, context, zeros, copy, execution));
    call.queries = EvenRows(copy);
  }
  call.keys = ConstTensorView(keys_, DType::kF32, {1, sizes_.entries, dim});
  call.entries = sizes_.entries;
  call.k = sizes_.k;
  call.metric = SearchMetric::kSquaredDistance;
  call.slots = scratch.neighbours;
  call.scores = scratch.scores;
  return Search(device_, call, execution);
}

absl::Status RetrievalLayer::CopyNeighbours(const ConstTensorView& from, const TensorView& to,
                                            const Execution& execution) const {
  if (device_ == Device::kCpu) {
    CopyOnCpu(from, to, sizes_.entries);
    return absl::OkStatus();
  }
  CopyNeighboursArguments arguments = {};
  arguments.from = static_cast<const int32_t*>(from.data);
  arguments.to = static_cast<int32_t*>(to.mutable_data());
  std::copy_n(from.strides.data(), 3, arguments.from_strides);
  std::copy_n(to.strides.data(), 3, arguments.to_strides);
  std::copy_n(from.dims.data(), 3, arguments.sizes);
  arguments.entries = sizes_.entries;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(
      KernelsOn<RetrievalKernels>(runtime->target()).copy_neighbours(arguments, execution.stream));
}

}  // namespace tfb
