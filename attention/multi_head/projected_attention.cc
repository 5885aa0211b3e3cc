#include "attention/multi_head/projected_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/random.h"
#include "core/status.h"

namespace tfb::multi_head {
namespace {

// Checks that the technique is registered, and keeps the options that differ from its defaults.
absl::Status CheckInner(TechniqueSpec* inner) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(inner->technique));
  if (technique->info().input_kind != InputKind::kQkv) {
    return absl::InvalidArgumentError(absl::StrCat("the input of ", inner->technique, " is ",
                                                   Name(technique->info().input_kind)));
  }
  TFB_ASSIGN_OR_RETURN(inner->options, technique->Canonical(inner->options));
  for (const OptionSpec& option : technique->info().options) {
    const auto found = inner->options.find(option.name);
    if (found->second == option.default_value) inner->options.erase(found);
  }
  return absl::OkStatus();
}

absl::Status OfInner(const TechniqueSpec& inner, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("inner ", ToBracketedString(inner), ": ", status.message()));
}

// Returns [batch, tokens, heads * channels] as [batch, heads, tokens, channels].
template <class View>
View Heads(const View& view, int64_t heads) {
  return Transpose(SplitAxis(view, 2, heads), 1, 2);
}

const TensorSpec* FindSpec(const std::vector<TensorSpec>& specs, absl::string_view name) {
  const auto found = std::find_if(specs.begin(), specs.end(),
                                  [=](const TensorSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

}  // namespace

// ---- The attention inside ----

void BindInner(OptionBinder& bind, TechniqueSpec* inner) {
  bind.Technique("inner", inner, "techniques on q, k, v, as dense or longformer[window=64]",
                 CheckInner, "the attention of the heads");
}

absl::StatusOr<std::unique_ptr<Layer>> CreateInner(const TechniqueSpec& inner,
                                                   const Problem& problem, Device device,
                                                   uint64_t seed, bool gives_x) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(inner.technique));
  auto layer = technique->Create(problem, inner.options, device, seed);
  if (!layer.ok()) return OfInner(inner, layer.status());
  const std::vector<TensorSpec> given = QkvInputs(problem);
  for (const TensorSpec& spec : (*layer)->inputs()) {
    if (spec.optional || FindSpec(given, spec.name) != nullptr) continue;
    if (spec.name == "x" && gives_x) continue;
    return OfInner(inner, absl::UnimplementedError(absl::StrCat(
                              "it reads ", spec.name, " too; given are q, k, v and key_mask",
                              gives_x ? ", and the hidden state x" : "")));
  }
  return layer;
}

// ---- Parameters ----

std::vector<ParameterSpec> ProjectionSpecs(const Problem& problem, bool bias) {
  const int64_t width = problem.model_dim();
  std::vector<ParameterSpec> specs;
  const auto projection = [&](const std::string& name, int64_t in, int64_t out) {
    const double deviation = 1 / std::sqrt(static_cast<double>(in));
    specs.push_back({"w_" + name, {in, out}, 0, deviation});
    if (bias) specs.push_back({"b_" + name, {out}, 0, deviation});
  };
  projection("q", width, problem.query_heads * problem.head_dim);
  projection("k", width, problem.kv_heads * problem.head_dim);
  projection("v", width, problem.kv_heads * problem.value_dim);
  projection("o", problem.query_heads * problem.value_dim, width);
  return specs;
}

absl::Status DrawParameters(const std::vector<ParameterSpec>& specs, absl::string_view prefix,
                            uint64_t seed, NamedTensors* parameters) {
  for (const ParameterSpec& spec : specs) {
    const std::string name = absl::StrCat(prefix, spec.name);
    TFB_ASSIGN_OR_RETURN(Tensor parameter, Tensor::Allocate(DType::kF32, spec.shape));
    FillNormal(&parameter, seed, name, spec.mean, spec.deviation);
    (*parameters)[name] = std::move(parameter);
  }
  return absl::OkStatus();
}

void AddInnerParameters(const Layer& inner, absl::string_view prefix, NamedTensors* parameters) {
  for (const auto& [name, tensor] : inner.parameters()) {
    (*parameters)[absl::StrCat(prefix, name)] = tensor.Clone();
  }
}

NamedTensors WithoutPrefix(const NamedTensors& parameters, absl::string_view prefix) {
  NamedTensors result;
  for (const auto& [name, tensor] : parameters) {
    if (absl::StartsWith(name, prefix)) result[name.substr(prefix.size())] = tensor.Clone();
  }
  return result;
}

// ---- The layer's part ----

ProjectedAttention::ProjectedAttention(Device device, const Problem& problem, bool cross,
                                       std::unique_ptr<Layer> inner)
    : device_(device),
      problem_(problem),
      cross_(cross),
      query_width_(problem.query_heads * problem.head_dim),
      key_width_(problem.kv_heads * problem.head_dim),
      value_width_(problem.kv_heads * problem.value_dim),
      context_width_(problem.query_heads * problem.value_dim),
      inner_(std::move(inner)) {
  for (const TensorSpec& spec : inner_->inputs()) inner_inputs_.Set(spec.name, {});
  for (const TensorSpec& spec : inner_->outputs()) inner_outputs_.Set(spec.name, {});
}

absl::Status ProjectedAttention::Setup(const NamedTensors& parameters, absl::string_view prefix,
                                       const Call& call, const Execution& execution) {
  const auto parameter = [&](absl::string_view name) {
    const auto found = parameters.find(absl::StrCat(prefix, name));
    return found == parameters.end() ? ConstTensorView() : ConstTensorView(found->second.view());
  };
  // Packs the matrices of some projections side by side, and their biases.
  const auto pack = [&](const std::vector<std::string>& names) {
    std::vector<ConstTensorView> matrices;
    std::vector<float> biases;
    for (const std::string& name : names) {
      matrices.push_back(parameter("w_" + name));
      const ConstTensorView bias = parameter("b_" + name);
      for (int64_t c = 0; !bias.empty() && c < bias.dim(0); ++c)
        biases.push_back(*bias.At<float>(c));
    }
    const ConstTensorView bias(biases.data(), DType::kF32, {static_cast<int64_t>(biases.size())});
    return PackedMatrix::Create(device_, matrices, biases.empty() ? ConstTensorView() : bias);
  };
  if (cross_) {
    TFB_ASSIGN_OR_RETURN(queries_, pack({"q"}));
    TFB_ASSIGN_OR_RETURN(keys_values_, pack({"k", "v"}));
  } else {
    TFB_ASSIGN_OR_RETURN(queries_, pack({"q", "k", "v"}));
  }
  TFB_ASSIGN_OR_RETURN(output_, pack({"o"}));

  TFB_RETURN_IF_ERROR(
      inner_->SetParameters(WithoutPrefix(parameters, absl::StrCat(prefix, "inner."))));
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(Project(call, scratch, rest));
  return inner_->Setup(inner_inputs_, rest);
}

ProjectedAttention::Scratch ProjectedAttention::LayOut(Workspace& workspace) const {
  const auto take = [&](int64_t tokens, int64_t channels) {
    const Shape shape = {problem_.batch, tokens, channels};
    std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(problem_.dtype));
    return TensorView(memory, problem_.dtype, shape);
  };
  Scratch scratch;
  const int64_t kv_width = key_width_ + value_width_;
  if (cross_) {
    scratch.queries = take(problem_.query_tokens, query_width_);
    scratch.keys_values = take(problem_.kv_tokens, kv_width);
  } else {
    scratch.packed = take(problem_.query_tokens, query_width_ + kv_width);
    scratch.queries = Slice(scratch.packed, 2, 0, query_width_);
    scratch.keys_values = Slice(scratch.packed, 2, query_width_, kv_width);
  }
  scratch.context = take(problem_.query_tokens, context_width_);
  return scratch;
}

size_t ProjectedAttention::workspace_bytes(int threads) const {
  const int64_t query_rows = problem_.batch * problem_.query_tokens;
  const int64_t kv_width = key_width_ + value_width_;
  const auto product = [&](int64_t rows, int64_t in, int64_t out) {
    return MatMulWorkspaceBytes(device_, rows, in, out, threads);
  };
  const int64_t width = problem_.model_dim();
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max({inner_->workspace_bytes(threads),
                   product(query_rows, width, query_width_ + (cross_ ? 0 : kv_width)),
                   cross_ ? product(problem_.batch * problem_.kv_tokens, width, kv_width) : 0,
                   product(query_rows, context_width_, width)});
}

absl::Status ProjectedAttention::Project(const Call& call, const Scratch& scratch,
                                         const Execution& execution) {
  if (cross_) {
    TFB_RETURN_IF_ERROR(MatMul(queries_, {call.x, {}, scratch.queries}, execution));
    TFB_RETURN_IF_ERROR(MatMul(keys_values_, {call.memory, {}, scratch.keys_values}, execution));
  } else {
    TFB_RETURN_IF_ERROR(MatMul(queries_, {call.x, {}, scratch.packed}, execution));
  }
  inner_inputs_.Set("q", Heads(scratch.queries, problem_.query_heads));
  // Queries are keys where the inner technique reads no k.
  if (inner_inputs_.Find("k") != nullptr) {
    inner_inputs_.Set("k", Heads(Slice(scratch.keys_values, 2, 0, key_width_), problem_.kv_heads));
  }
  inner_inputs_.Set(
      "v", Heads(Slice(scratch.keys_values, 2, key_width_, value_width_), problem_.kv_heads));
  if (inner_inputs_.Find("key_mask") != nullptr) inner_inputs_.Set("key_mask", call.key_mask);
  if (inner_inputs_.Find("x") != nullptr) inner_inputs_.Set("x", call.x);
  inner_outputs_.Set("out", Heads(scratch.context, problem_.query_heads));
  return absl::OkStatus();
}

absl::Status ProjectedAttention::Run(const Call& call, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(Project(call, scratch, rest));
  TFB_RETURN_IF_ERROR(inner_->Run(inner_inputs_, inner_outputs_, rest));
  return MatMul(output_, {scratch.context, call.residual, call.y}, rest);
}

double ProjectedAttention::projection_flops() const {
  const double query_rows = static_cast<double>(problem_.batch * problem_.query_tokens);
  const double kv_rows = static_cast<double>(problem_.batch * problem_.kv_tokens);
  return 2 * static_cast<double>(problem_.model_dim()) *
         (query_rows * static_cast<double>(query_width_ + context_width_) +
          kv_rows * static_cast<double>(key_width_ + value_width_));
}

// ---- The definition ----

namespace {

// Returns x W + b of f64 rows, where b may be missing, as [batch, heads, tokens, channels] in the
// problem's dtype, or f64 where that is f32.
Tensor DefineProjection(const Problem& problem, const DoubleTensor& x, int64_t tokens,
                        int64_t heads, const ConstTensorView& w, const ConstTensorView& b,
                        ThreadPool* pool) {
  const std::vector<double> y =
      Affine(x.data(), problem.batch * tokens, DoubleTensor(w), DoubleTensor(b), pool);
  const ConstTensorView rows(y.data(), DType::kF64, {problem.batch, tokens, w.dim(1)});
  Tensor result(problem.dtype == DType::kF32 ? DType::kF64 : problem.dtype,
                {problem.batch, heads, tokens, w.dim(1) / heads});
  CopyElements(Heads(rows, heads), result.view());
  return result;
}

}  // namespace

absl::Status DefineProjectedAttention(const Problem& problem, const TechniqueSpec& inner,
                                      const NamedTensors& parameters, absl::string_view prefix,
                                      const ConstTensorView& x, const ConstTensorView& memory,
                                      const ConstTensorView& key_mask,
                                      const DefinitionRequest& request, NamedTensors* outputs) {
  const auto parameter = [&](absl::string_view name) {
    const auto found = parameters.find(absl::StrCat(prefix, name));
    return found == parameters.end() ? ConstTensorView() : ConstTensorView(found->second.view());
  };
  const DoubleTensor hidden(x), keys(memory.empty() ? x : memory);
  const auto project = [&](const DoubleTensor& rows, int64_t tokens, int64_t heads,
                           const std::string& name) {
    return DefineProjection(problem, rows, tokens, heads, parameter("w_" + name),
                            parameter("b_" + name), request.pool);
  };
  const Tensor q = project(hidden, problem.query_tokens, problem.query_heads, "q");
  const Tensor k = project(keys, problem.kv_tokens, problem.kv_heads, "k");
  const Tensor v = project(keys, problem.kv_tokens, problem.kv_heads, "v");

  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(inner.technique));
  const Inputs inner_inputs = {
      {"q", q.view()}, {"k", k.view()}, {"v", v.view()}, {"key_mask", key_mask}, {"x", x}};
  NamedTensors attended;
  TFB_RETURN_IF_ERROR(technique->Define(problem, inner.options,
                                        WithoutPrefix(parameters, absl::StrCat(prefix, "inner.")),
                                        inner_inputs, request, &attended));
  if (problem.dtype != DType::kF32) attended["out"] = attended["out"].CloneAs(problem.dtype);

  // The heads of a token side by side, times W_o.
  const Tensor& heads = attended["out"];
  Tensor context(DType::kF64,
                 {problem.batch, heads.dim(2), problem.query_heads * problem.value_dim});
  CopyElements(heads.view(), Heads(context.view(), problem.query_heads));
  const std::vector<double> y =
      Affine(context.span<double>().data(), problem.batch * heads.dim(2),
             DoubleTensor(parameter("w_o")), DoubleTensor(parameter("b_o")), request.pool);
  Tensor& out = (*outputs)["out"] =
      Tensor(DType::kF64, {problem.batch, heads.dim(2), problem.model_dim()});
  std::copy(y.begin(), y.end(), out.span<double>().begin());
  const auto weights = attended.find("weights");
  if (weights != attended.end()) (*outputs)["weights"] = std::move(weights->second);
  return absl::OkStatus();
}

}  // namespace tfb::multi_head
