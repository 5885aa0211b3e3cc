#include "core/retrieval/retrieval_layer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/log_softmax.h"
#include "core/layers/matmul_gradient.h"
#include "core/random.h"
#include "core/retrieval/retrieval_functors.h"
#include "core/search/search.h"
#include "core/status.h"

namespace tfb {
namespace {

// Returns the specs with `tokens` for the number of tokens, which is their second dimension.
std::vector<TensorSpec> WithTokens(std::vector<TensorSpec> specs, int64_t tokens) {
  for (TensorSpec& spec : specs) spec.shape[1] = tokens;
  return specs;
}

// Returns the rows of [batch, tokens, channels] as the one head of a search; empty where the rows
// are not evenly spaced or their channels not side by side.
ConstTensorView EvenRows(const ConstTensorView& view) {
  const bool one_batch = view.dim(0) <= 1, one_token = view.dim(1) <= 1;
  const bool even = one_batch || one_token || view.stride(0) == view.dim(1) * view.stride(1);
  if (!even || (view.dim(2) > 1 && view.stride(2) != 1)) return {};
  return ConstTensorView(view.data, view.dtype, {1, view.dim(0) * view.dim(1), view.dim(2)},
                         {0, view.stride(one_token ? 0 : 1), 1});
}

}  // namespace

std::vector<TensorSpec> RetrievalInputs(const Problem& p, const RetrievalOptions& options) {
  const Shape states = {p.batch, p.query_tokens, p.model_dim()};
  return {{"x", states, p.dtype},
          {"context", states, p.dtype},
          {"neighbours", {p.batch, p.query_tokens, options.k}, DType::kI32, true}};
}

std::vector<TensorSpec> RetrievalOutputs(const Problem& p, const RetrievalOptions& options) {
  return {{"out", {p.batch, p.query_tokens, options.vocabulary}, p.dtype},
          {"neighbours", {p.batch, p.query_tokens, options.k}, DType::kI32, true}};
}

TechniqueSpec ModelAlone(const std::string& technique, const RetrievalOptions& options) {
  return {technique,
          {{"vocabulary", absl::StrCat(options.vocabulary)},
           {"entries", absl::StrCat(options.entries)},
           {"k", "0"}}};
}

absl::Status CheckRetrievalProblem(absl::string_view technique, const Problem& problem) {
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

absl::Status CheckRetrievalDevice(absl::string_view technique, const RetrievalOptions& options,
                                  Device device) {
  if (options.exact || device == Device::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(technique, ": search is \"approximate\", which is on the CPU alone; allowed on ",
                   Name(device), " is exact"));
}

RetrievalLayer::RetrievalLayer(const Problem& problem, const RetrievalOptions& options,
                               const std::vector<TensorSpec>& inputs, Device device)
    : StreamingLayer(problem, inputs, RetrievalOutputs(problem, options),
                     WithTokens(inputs, kSegmentTokens),
                     WithTokens(RetrievalOutputs(problem, options), kSegmentTokens),
                     std::max<int64_t>(problem.query_tokens, 1)),
      retrieval_(options),
      device_(device) {}

absl::Status RetrievalLayer::Initialize(uint64_t seed) {
  const int64_t dim = problem().model_dim();
  TFB_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(DType::kF32, {retrieval_.vocabulary, dim}));
  TFB_ASSIGN_OR_RETURN(Tensor keys, Tensor::Allocate(DType::kF32, {retrieval_.entries, dim}));
  TFB_ASSIGN_OR_RETURN(Tensor values,
                       Tensor::Allocate(retrieval_.value_dtype(), {retrieval_.entries}));
  FillNormal(&output, seed, "output", 0, 1 / std::sqrt(static_cast<double>(dim)));
  FillNormal(&keys, seed, "datastore.keys");
  const RandomStream random(seed, "datastore.values");
  for (int64_t e = 0; e < retrieval_.entries; ++e) {
    values.view().Set(e,
                      std::floor(random.Uniform(e) * static_cast<double>(retrieval_.vocabulary)));
  }
  parameters_["output"] = std::move(output);
  parameters_["datastore.keys"] = std::move(keys);
  parameters_["datastore.values"] = std::move(values);
  return absl::OkStatus();
}

Cost RetrievalLayer::cost() const {
  const double dim = static_cast<double>(problem().model_dim());
  const double tokens = static_cast<double>(problem().batch * problem().query_tokens);
  double searched = static_cast<double>(retrieval_.k == 0 ? 0 : retrieval_.entries);
  // The centroids, and the share of the entries that the probed lists are of all lists.
  if (!retrieval_.exact) {
    const double lists = static_cast<double>(std::min(retrieval_.lists, retrieval_.entries));
    const double part = std::min(1.0, static_cast<double>(retrieval_.probes) / lists);
    searched = searched == 0 ? 0 : lists + part * searched;
  }
  Cost cost;
  cost.flops = 2 * tokens * dim * (searched + static_cast<double>(retrieval_.vocabulary));
  cost.bytes = TensorBytes();
  return cost;
}

RetrievalLayer::Scratch RetrievalLayer::LayOut(int64_t rows, Workspace& workspace) const {
  return {workspace.Take<int32_t>(rows * retrieval_.k), workspace.Take<float>(rows * retrieval_.k),
          workspace.Take<float>(rows * problem().model_dim())};
}

size_t RetrievalLayer::search_workspace_bytes(int threads) const {
  const int64_t dim = problem().model_dim();
  if (retrieval_.k == 0) return 0;
  if (retrieval_.exact) {
    return SearchWorkspaceBytes(device_, {1, 1, rows(), dim, retrieval_.entries, retrieval_.k},
                                threads);
  }
  return InvertedLists::WorkspaceBytes(retrieval_.entries, dim, retrieval_.lists, rows(),
                                       retrieval_.k, retrieval_.probes, threads);
}

size_t RetrievalLayer::workspace_bytes(int threads) const {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(rows(), workspace); }) +
         std::max(search_workspace_bytes(threads), predict_workspace_bytes(rows(), threads));
}

absl::Status RetrievalLayer::DoSetup(const Inputs&, const Execution& execution) {
  const ConstTensorView value_view = parameters_.at("datastore.values").view();
  std::vector<int32_t> values(static_cast<size_t>(retrieval_.entries));
  for (int64_t e = 0; e < retrieval_.entries; ++e) {
    const double token = value_view.Get(e);
    if (token < 0 || token >= static_cast<double>(retrieval_.vocabulary)) {
      return absl::InvalidArgumentError(absl::StrCat("datastore.values: entry ", e, " is token ",
                                                     token, "; allowed are 0 to ",
                                                     retrieval_.vocabulary - 1));
    }
    values[e] = static_cast<int32_t>(token);
  }
  TFB_ASSIGN_OR_RETURN(values_, DeviceArray<int32_t>::Create(device_, values));
  TFB_ASSIGN_OR_RETURN(zero_, DeviceArray<float>::Create(device_, {0.0f}));
  TFB_ASSIGN_OR_RETURN(
      output_, PackedMatrix::Create(device_, Transpose(parameters_.at("output").view(), 0, 1)));
  const Tensor& keys = parameters_.at("datastore.keys");
  keys_ = keys.span<float>().data();
  if (!retrieval_.exact && retrieval_.k > 0) {
    InvertedListsOptions options;
    options.lists = retrieval_.lists;
    TFB_ASSIGN_OR_RETURN(lists_, InvertedLists::Build(keys.view(), options, execution.pool));
  }
  if (device_ == Device::kCpu) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  device_keys_ = DeviceBuffer();  // frees the old memory before it allocates
  TFB_ASSIGN_OR_RETURN(device_keys_, runtime->Upload(keys.raw(), keys.bytes()));
  keys_ = device_keys_.As<float>();
  return runtime->Synchronize();
}

absl::Status RetrievalLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                   const Execution& execution) {
  Tokens tokens = {inputs.Get("x"), inputs.Get("context"), nullptr, outputs.Get("out"), inputs};
  Workspace workspace(execution.workspace);
  Scratch scratch = LayOut(tokens.rows(), workspace);
  if (!execution.kept.empty()) {
    scratch.neighbours = reinterpret_cast<int32_t*>(execution.kept.data());
  }
  tokens.neighbours = scratch.neighbours;
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  if (tokens.rows() == 0) return absl::OkStatus();

  const TensorView found(scratch.neighbours, DType::kI32,
                         {tokens.x.dim(0), tokens.x.dim(1), retrieval_.k});
  const ConstTensorView given = inputs.Get("neighbours");
  TFB_RETURN_IF_ERROR(given.empty() ? FindNeighbours(tokens.context, scratch, rest)
                                    : CopyNeighbours(given, found, rest));
  if (const TensorView written = outputs.Get("neighbours"); !written.empty()) {
    TFB_RETURN_IF_ERROR(CopyNeighbours(found, written, rest));
  }
  rest.kept = {};
  return Predict(tokens, rest);
}

absl::Status RetrievalLayer::DoAppend(int64_t, const Inputs& segment, const Outputs& outputs,
                                      const Execution& execution) {
  Execution without_kept = execution;  // there is no Backward of a stream
  without_kept.kept = {};
  return DoRun(segment, outputs, without_kept);
}

// ---- The backward pass ----

absl::Status RetrievalLayer::CheckBackward() const { return absl::OkStatus(); }

size_t RetrievalLayer::kept_bytes() const {
  return Workspace::Measure(
      [this](Workspace& workspace) { workspace.Take<int32_t>(rows() * retrieval_.k); });
}

size_t RetrievalLayer::OutputBackwardWorkspaceBytes(int64_t rows, int threads) const {
  const int64_t dim = problem().model_dim(), vocabulary = retrieval_.vocabulary;
  return std::max({MatMulWorkspaceBytes(device_, rows, dim, vocabulary, threads),
                   MatMulWorkspaceBytes(device_, rows, vocabulary, dim, threads),
                   MatMulGradientWorkspaceBytes(device_, rows, vocabulary, dim, threads),
                   LogSoftmaxWorkspaceBytes(device_, vocabulary, threads)});
}

size_t RetrievalLayer::backward_workspace_bytes(int threads) const {
  return predict_backward_workspace_bytes(rows(), threads);
}

Cost RetrievalLayer::backward_cost() const {
  const double tokens = static_cast<double>(problem().batch * problem().query_tokens);
  Cost cost;
  cost.flops = 3 * 2 * tokens * static_cast<double>(problem().model_dim() * retrieval_.vocabulary);
  cost.bytes = 2 * TensorBytes() + static_cast<double>(kept_bytes());
  return cost;
}

std::map<std::string, std::string> RetrievalLayer::stopped_gradients() const {
  return {{"datastore.keys",
           "they are states of an earlier text, and no gradient goes into the "
           "datastore"}};
}

absl::Status RetrievalLayer::DoSetUpBackward(const Inputs&, const Execution&) {
  TFB_ASSIGN_OR_RETURN(output_transposed_,
                       PackedMatrix::Create(device_, parameters_.at("output").view()));
  return absl::OkStatus();
}

absl::Status RetrievalLayer::DoBackward(const BackwardCall& call, const Execution& execution) {
  const Tokens tokens = {call.inputs.Get("x"), call.inputs.Get("context"),
                         reinterpret_cast<const int32_t*>(execution.kept.data()), TensorView(),
                         call.inputs};
  if (tokens.rows() == 0) {
    for (const auto& [name, gradient] : call.parameter_gradients) {
      if (!gradient.empty()) TFB_RETURN_IF_ERROR(ClearTensor(device_, gradient, execution));
    }
    return absl::OkStatus();
  }
  ConstTensorView dout = call.output_gradients.Get("out");
  if (dout.empty()) dout = Zeros(call.outputs.Get("out").shape());
  Execution rest = execution;
  rest.kept = {};
  return PredictBackward(tokens,
                         {dout, call.input_gradients.Get("x"), call.input_gradients.Get("context"),
                          call.input_gradients, call.parameter_gradients},
                         rest);
}

absl::Status RetrievalLayer::FindNeighbours(const ConstTensorView& context, const Scratch& scratch,
                                            const Execution& execution) const {
  if (retrieval_.k == 0) return absl::OkStatus();
  const int64_t dim = problem().model_dim();
  ConstTensorView queries = EvenRows(context);
  if (queries.empty()) {
    const TensorView copy(scratch.context, DType::kF32, context.shape());
    TFB_RETURN_IF_ERROR(Add(device_, context, Zeros(context.shape()), copy, execution));
    queries = EvenRows(copy);
  }
  if (!retrieval_.exact) {
    const ConstTensorView rows(queries.data, queries.dtype, {queries.dim(1), dim},
                               {queries.stride(1), queries.stride(2)});
    return lists_.Search(
        {rows, retrieval_.k, retrieval_.probes, scratch.neighbours, scratch.scores}, execution);
  }
  SearchCall call;
  call.queries = queries;
  call.keys = ConstTensorView(keys_, DType::kF32, {1, retrieval_.entries, dim});
  call.entries = retrieval_.entries;
  call.k = retrieval_.k;
  call.metric = SearchMetric::kSquaredDistance;
  call.slots = scratch.neighbours;
  call.scores = scratch.scores;
  return Search(device_, call, execution);
}

absl::Status RetrievalLayer::CopyNeighbours(const ConstTensorView& from, const TensorView& to,
                                            const Execution& execution) const {
  CopyOfNeighbours copy = {};
  copy.from = static_cast<const int32_t*>(from.data);
  copy.to = static_cast<int32_t*>(to.mutable_data());
  std::copy_n(from.strides.data(), 3, copy.from_strides);
  std::copy_n(to.strides.data(), 3, copy.to_strides);
  copy.tokens = from.dim(1);
  copy.entries = retrieval_.entries;
  return ForEachInRows(device_, from.dim(0) * from.dim(1), from.dim(2), copy, execution);
}

}  // namespace tfb
