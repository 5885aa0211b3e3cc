#include "core/layers/attention/projected_attention.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/heads.h"
#include "core/layers/matmul_gradient.h"
#include "core/status.h"

namespace tfb::layers {
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

// Returns the number of heads of a projection, by its name's first letter, and of their channels.
int64_t HeadsOf(const Problem& problem, absl::string_view name) {
  return name[0] == 'q' ? problem.query_heads : problem.kv_heads;
}
int64_t ChannelsOf(const Problem& problem, absl::string_view name) {
  return name[0] == 'v' ? problem.value_dim : problem.head_dim;
}

bool IsFurtherOutput(absl::string_view name) { return name != "out" && name != "log_sum_exp"; }

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

void BindInner(OptionBinder& bind, TechniqueList* inner) {
  bind.Techniques(
      "inner", inner,
      "techniques on q, k, v, as dense or longformer[window=64]; one for all layers, or "
      "one for each, as strided/fixed or 10*dense/2*routing or 8*(strided/fixed)",
      CheckInner, "the attention of the heads, in all layers or layer by layer");
}

absl::StatusOr<TechniqueSpec> CounterpartOf(const Problem& problem, const TechniqueSpec& spec) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(spec.technique));
  return technique->Counterpart(problem, spec.options);
}

absl::StatusOr<TechniqueList> CounterpartOf(const Problem& problem, const TechniqueList& list) {
  TechniqueList counterparts;
  bool is_one = true;
  for (const TechniqueSpec& spec : list.specs) {
    TFB_ASSIGN_OR_RETURN(TechniqueSpec counterpart, CounterpartOf(problem, spec));
    counterparts.specs.push_back(std::move(counterpart));
    is_one = is_one && ToString(counterparts.specs.back()) == ToString(counterparts.specs[0]);
  }
  if (is_one) counterparts.specs.resize(1);
  return counterparts;
}

absl::StatusOr<std::unique_ptr<Layer>> CreateInner(const TechniqueSpec& inner,
                                                   const Problem& problem, Device device,
                                                   uint64_t seed, bool gives_x) {
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(inner.technique));
  auto layer = technique->Create(problem, inner.options, device, seed);
  if (!layer.ok()) return OfInner(inner, layer.status());
  if (!gives_x && FindSpec((*layer)->inputs(), "x") != nullptr) {
    return OfInner(inner, absl::UnimplementedError(absl::StrCat("it reads the hidden state x in ",
                                                                Name(problem.dtype),
                                                                ", but between layers x is f32")));
  }
  return layer;
}

FurtherInputs FurtherInputsOf(const TechniqueSpec& inner, const Problem& problem,
                              const InputPrefixes& prefixes) {
  std::vector<std::string> given = {"q", "k", "v", "key_mask", "x"};
  for (std::string& name : FurtherProjections(problem, inner)) given.push_back(std::move(name));
  return FurtherInputs(inner, problem, given, prefixes);
}

std::vector<TensorSpec> FurtherOutputsOf(const TechniqueSpec& inner, const Problem& problem) {
  const absl::StatusOr<const Technique*> technique = Registry::Global().Find(inner.technique);
  if (!technique.ok()) return {};  // CreateInner says why
  const auto written = (*technique)->OutputSpecs(problem, inner.options);
  if (!written.ok()) return {};
  std::vector<TensorSpec> further;
  for (const TensorSpec& spec : *written) {
    if (IsFurtherOutput(spec.name)) further.push_back(spec);
  }
  return further;
}

FurtherOutputs::FurtherOutputs(const TechniqueSpec& inner, const Problem& problem,
                               absl::string_view prefix) {
  for (TensorSpec& spec : FurtherOutputsOf(inner, problem)) {
    inside_.Set(spec.name, {});
    names_.push_back(spec.name);
    spec.name = absl::StrCat(prefix, spec.name);
    spec.optional = true;
    outside_.push_back(std::move(spec));
  }
}

void FurtherOutputs::AddTo(std::vector<TensorSpec>* specs) const {
  specs->insert(specs->end(), outside_.begin(), outside_.end());
}

const Outputs& FurtherOutputs::From(const Outputs& outputs) {
  for (size_t n = 0; n < names_.size(); ++n) {
    inside_.Set(names_[n], outputs.Get(outside_[n].name));
  }
  return inside_;
}

// ---- Parameters ----

std::vector<std::string> FurtherProjections(const Problem& problem,
                                            const std::vector<TensorSpec>& inputs) {
  const std::vector<TensorSpec> given = QkvInputs(problem);
  std::vector<std::string> names;
  for (const TensorSpec& spec : inputs) {
    if (spec.optional || spec.name.size() < 3 || spec.name[1] != '_') continue;
    const TensorSpec* like = FindSpec(given, absl::string_view(spec.name).substr(0, 1));
    if (like != nullptr && spec.shape == like->shape && spec.dtype == like->dtype) {
      names.push_back(spec.name);
    }
  }
  return names;
}

std::vector<std::string> FurtherProjections(const Problem& problem, const TechniqueSpec& inner) {
  const absl::StatusOr<const Technique*> technique = Registry::Global().Find(inner.technique);
  if (!technique.ok()) return {};  // CreateInner says why
  const auto inputs = (*technique)->InputSpecs(problem, inner.options);
  return inputs.ok() ? FurtherProjections(problem, *inputs) : std::vector<std::string>();
}

namespace {

void AddProjectionSpec(const std::string& name, int64_t in, int64_t out, bool bias,
                       std::vector<ParameterSpec>* specs) {
  specs->push_back(MatrixSpec("w_" + name, in, out));
  if (bias) specs->push_back({"b_" + name, {out}, 0, specs->back().deviation});
}

void AddInputSpec(const Problem& problem, const std::string& name, bool bias,
                  std::vector<ParameterSpec>* specs) {
  AddProjectionSpec(name, problem.model_dim(), HeadsOf(problem, name) * ChannelsOf(problem, name),
                    bias, specs);
}

}  // namespace

std::vector<ParameterSpec> ProjectionSpecs(const Problem& problem, bool bias) {
  std::vector<ParameterSpec> specs;
  for (const char* name : {"q", "k", "v"}) AddInputSpec(problem, name, bias, &specs);
  AddProjectionSpec("o", problem.query_heads * problem.value_dim, problem.model_dim(), bias,
                    &specs);
  return specs;
}

std::vector<ParameterSpec> ProjectionSpecs(const Problem& problem, bool bias,
                                           const TechniqueSpec& inner) {
  std::vector<ParameterSpec> specs = ProjectionSpecs(problem, bias);
  for (const std::string& name : FurtherProjections(problem, inner)) {
    AddInputSpec(problem, name, bias, &specs);
  }
  return specs;
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
      context_width_(problem.query_heads * problem.value_dim),
      inner_(std::move(inner)) {
  for (const char* name : {"q", "k", "v"}) AddProjection(name);
  for (const std::string& name : FurtherProjections(problem, inner_->inputs())) {
    AddProjection(name);
  }
  for (const TensorSpec& spec : inner_->inputs()) inner_inputs_.Set(spec.name, {});
  for (const TensorSpec& spec : inner_->outputs()) inner_outputs_.Set(spec.name, {});

  for (const TensorSpec& spec : inner_->input_gradients()) {
    for (Projection& projection : projections_) {
      projection.has_gradient = projection.has_gradient || projection.name == spec.name;
    }
    inner_differentiates_x_ = inner_differentiates_x_ || spec.name == "x";
    inner_call_.input_gradients.Set(spec.name, {});
  }
  for (const TensorSpec& spec : inner_->parameter_gradients()) {
    inner_parameters_.push_back({spec.name, "", spec.shape});
    inner_call_.parameter_gradients.Set(spec.name, {});
  }
  inner_call_.inputs = inner_inputs_;
  inner_call_.outputs.Set("out", {});
  inner_call_.output_gradients.Set("out", {});
}

void ProjectedAttention::AddProjection(const std::string& name) {
  const bool of_memory = cross_ && name[0] != 'q';
  int64_t* width = of_memory ? &memory_width_ : &x_width_;
  const int64_t heads = HeadsOf(problem_, name);
  projections_.push_back({name, of_memory, heads, *width, heads * ChannelsOf(problem_, name)});
  *width += projections_.back().width;
}

absl::Status ProjectedAttention::Setup(const NamedTensors& parameters, absl::string_view prefix,
                                       const Call& call, const Execution& execution) {
  const auto parameter = [&](absl::string_view name) {
    return FindParameter(parameters, absl::StrCat(prefix, name));
  };
  // Packs the matrices of some projections side by side, and their biases.
  const auto pack = [&](const std::vector<std::string>& names) -> absl::StatusOr<PackedMatrix> {
    std::vector<ConstTensorView> matrices;
    std::vector<float> biases;
    for (const std::string& name : names) {
      matrices.push_back(parameter("w_" + name));
      const ConstTensorView bias = parameter("b_" + name);
      for (int64_t c = 0; !bias.empty() && c < bias.dim(0); ++c)
        biases.push_back(*bias.At<float>(c));
    }
    const ConstTensorView bias(biases.data(), DType::kF32, {static_cast<int64_t>(biases.size())});
    absl::StatusOr<PackedMatrix> packed =
        PackedMatrix::Create(device_, matrices, biases.empty() ? ConstTensorView() : bias);
    // Inputs, and what the inner technique writes, are of the problem's type.
    if (packed.ok()) TFB_RETURN_IF_ERROR(PrepareForRowsOf(problem_.dtype, &*packed));
    return packed;
  };
  const auto names = [this](bool of_memory) {
    std::vector<std::string> result;
    for (const Projection& projection : projections_) {
      if (projection.of_memory == of_memory) result.push_back(projection.name);
    }
    return result;
  };
  TFB_ASSIGN_OR_RETURN(of_x_, pack(names(/*of_memory=*/false)));
  if (cross_) {
    TFB_ASSIGN_OR_RETURN(of_memory_, pack(names(/*of_memory=*/true)));
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
  scratch.of_x = take(problem_.query_tokens, x_width_);
  if (cross_) scratch.of_memory = take(problem_.kv_tokens, memory_width_);
  scratch.context = take(problem_.query_tokens, context_width_);
  return scratch;
}

size_t ProjectedAttention::workspace_bytes(int threads) const {
  const int64_t query_rows = problem_.batch * problem_.query_tokens;
  const auto product = [&](int64_t rows, int64_t in, int64_t out) {
    return MatMulWorkspaceBytes(device_, rows, in, out, threads);
  };
  const int64_t width = problem_.model_dim();
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         std::max({inner_->workspace_bytes(threads), product(query_rows, width, x_width_),
                   cross_ ? product(problem_.batch * problem_.kv_tokens, width, memory_width_) : 0,
                   product(query_rows, context_width_, width)});
}

absl::Status ProjectedAttention::Project(const Call& call, const Scratch& scratch,
                                         const Execution& execution) {
  TFB_RETURN_IF_ERROR(MatMul(of_x_, {call.inputs.x, {}, scratch.of_x}, execution));
  if (cross_) {
    TFB_RETURN_IF_ERROR(MatMul(of_memory_, {call.inputs.memory, {}, scratch.of_memory}, execution));
  }
  PointInner(call.inputs, scratch);
  inner_outputs_.Set("out", Heads(scratch.context, problem_.query_heads));
  for (const TensorSpec& spec : inner_->outputs()) {
    if (call.further == nullptr || !IsFurtherOutput(spec.name)) continue;
    inner_outputs_.Set(spec.name, call.further->Get(spec.name));
  }
  return absl::OkStatus();
}

TensorView ProjectedAttention::HeadsIn(const Projection& projection, const Scratch& scratch) const {
  const TensorView& rows = projection.of_memory ? scratch.of_memory : scratch.of_x;
  return Heads(Slice(rows, 2, projection.first, projection.width), projection.heads);
}

void ProjectedAttention::PointInner(const AttentionInputs& inputs, const Scratch& scratch) {
  const auto pass = [this](absl::string_view name, const ConstTensorView& view) {
    if (inner_inputs_.Find(name) != nullptr) inner_inputs_.Set(name, view);
  };
  // Queries are keys where the inner technique reads no k.
  for (const Projection& projection : projections_) {
    pass(projection.name, HeadsIn(projection, scratch));
  }
  pass("key_mask", inputs.key_mask);
  pass("x", inputs.x);
  if (inputs.further == nullptr) return;
  for (const auto& [name, view] : *inputs.further) inner_inputs_.Set(name, view);
}

absl::Status ProjectedAttention::Run(const Call& call, const Execution& execution) {
  Workspace workspace(execution.workspace);
  Kept kept;
  if (execution.kept.empty()) {
    kept.scratch = LayOut(workspace);
  } else {
    Workspace memory(execution.kept);
    kept = LayOutKept(memory);
  }
  const Scratch& scratch = kept.scratch;
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  rest.kept = kept.inner;
  TFB_RETURN_IF_ERROR(Project(call, scratch, rest));
  TFB_RETURN_IF_ERROR(inner_->Run(inner_inputs_, inner_outputs_, rest));
  return MatMul(output_, {scratch.context, call.residual, call.y}, rest);
}

double ProjectedAttention::projection_flops() const {
  const double query_rows = static_cast<double>(problem_.batch * problem_.query_tokens);
  const double kv_rows = static_cast<double>(problem_.batch * problem_.kv_tokens);
  const double of_memory = cross_ ? kv_rows * static_cast<double>(memory_width_) : 0;
  return 2 * static_cast<double>(problem_.model_dim()) *
         (query_rows * static_cast<double>(x_width_ + context_width_) + of_memory);
}

// ---- The backward pass ----

absl::Status ProjectedAttention::CheckBackward() const { return inner_->CheckBackward(); }

ProjectedAttention::Kept ProjectedAttention::LayOutKept(Workspace& workspace) const {
  Kept kept;
  kept.scratch = LayOut(workspace);
  const size_t bytes = inner_->kept_bytes();
  kept.inner = absl::MakeSpan(workspace.Take<std::byte>(static_cast<int64_t>(bytes)), bytes);
  return kept;
}

size_t ProjectedAttention::kept_bytes() const {
  return Workspace::Measure([this](Workspace& workspace) { LayOutKept(workspace); });
}

ProjectedAttention::BackwardScratch ProjectedAttention::LayOutBackward(Workspace& workspace) const {
  BackwardScratch scratch;
  scratch.gradients = LayOut(workspace);
  if (inner_differentiates_x_) {
    const Shape shape = {problem_.batch, problem_.query_tokens, problem_.model_dim()};
    std::byte* memory = workspace.Take<std::byte>(NumElements(shape) * SizeOf(problem_.dtype));
    scratch.x = TensorView(memory, problem_.dtype, shape);
  }
  int64_t elements = 0;
  for (const InnerParameter& parameter : inner_parameters_)
    elements += NumElements(parameter.shape);
  scratch.inner_parameters = workspace.Take<float>(elements);
  return scratch;
}

size_t ProjectedAttention::backward_workspace_bytes(int threads) const {
  const int64_t query_rows = problem_.batch * problem_.query_tokens;
  const int64_t kv_rows = problem_.batch * problem_.kv_tokens, width = problem_.model_dim();
  // A product, its gradient dx, and those of its matrix, or of a part of its columns.
  const auto product = [&](int64_t rows, int64_t in, int64_t out) {
    return std::max(MatMulWorkspaceBytes(device_, rows, out, in, threads),
                    MatMulWorkspaceBytes(device_, rows, in, out, threads));
  };
  size_t bytes =
      std::max({inner_->backward_workspace_bytes(threads), product(query_rows, width, x_width_),
                cross_ ? product(kv_rows, width, memory_width_) : 0,
                product(query_rows, context_width_, width),
                MatMulGradientWorkspaceBytes(device_, query_rows, context_width_, width, threads)});
  for (const Projection& projection : projections_) {
    bytes = std::max(
        bytes, MatMulGradientWorkspaceBytes(device_, projection.of_memory ? kv_rows : query_rows,
                                            width, projection.width, threads));
  }
  return bytes + Workspace::Measure([this](Workspace& workspace) { LayOutBackward(workspace); });
}

std::map<std::string, std::string> ProjectedAttention::stopped_gradients(
    const FurtherInputs& further, const NamedTensors& parameters, absl::string_view prefix) const {
  std::map<std::string, std::string> stopped;
  for (const auto& [name, reason] : inner_->stopped_gradients()) {
    for (const char* kind : {"w_", "b_", "inner."}) {
      const std::string own = absl::StrCat(prefix, kind, name);
      if (parameters.count(own) > 0) stopped[own] = reason;
    }
    const std::string outside = further.Outside(name);
    if (!outside.empty()) stopped[outside] = reason;
  }
  return stopped;
}

absl::Status ProjectedAttention::SetUpBackward(const NamedTensors& parameters,
                                               absl::string_view prefix, const Call& call,
                                               const Execution& execution) {
  const auto pack = [&](bool of_memory) {
    std::vector<ConstTensorView> matrices;
    for (const Projection& projection : projections_) {
      if (projection.of_memory != of_memory) continue;
      matrices.push_back(FindParameter(parameters, absl::StrCat(prefix, "w_", projection.name)));
    }
    return PackedMatrix::CreateTransposed(device_, matrices);
  };
  TFB_ASSIGN_OR_RETURN(of_x_transposed_, pack(/*of_memory=*/false));
  if (cross_) {
    TFB_ASSIGN_OR_RETURN(of_memory_transposed_, pack(/*of_memory=*/true));
  }
  TFB_ASSIGN_OR_RETURN(output_transposed_,
                       PackedMatrix::CreateTransposed(
                           device_, {FindParameter(parameters, absl::StrCat(prefix, "w_o"))}));
  const auto names_of = [&](absl::string_view name) {
    return AffineNames{absl::StrCat(prefix, "w_", name), absl::StrCat(prefix, "b_", name)};
  };
  names_.clear();
  for (const Projection& projection : projections_) names_.push_back(names_of(projection.name));
  output_names_ = names_of("o");
  for (InnerParameter& parameter : inner_parameters_) {
    parameter.outside = absl::StrCat(prefix, "inner.", parameter.name);
  }

  Workspace workspace(execution.workspace);
  const BackwardScratch scratch = LayOutBackward(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TFB_RETURN_IF_ERROR(Project(call, scratch.gradients, rest));
  return inner_->SetUpBackward(inner_inputs_, rest);
}

absl::Status ProjectedAttention::Backward(const BackwardCall& call, const Execution& execution) {
  Workspace memory(execution.kept), workspace(execution.workspace);
  const Kept kept = LayOutKept(memory);
  const BackwardScratch scratch = LayOutBackward(workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  rest.kept = kept.inner;
  TFB_RETURN_IF_ERROR(
      MatMulGradient(device_,
                     {kept.scratch.context, call.dy, call.parameters.Get(output_names_.weights),
                      call.parameters.Get(output_names_.bias), call.accumulate},
                     rest));
  TFB_RETURN_IF_ERROR(MatMul(output_transposed_, {call.dy, {}, scratch.gradients.context}, rest));
  TFB_RETURN_IF_ERROR(InnerBackward(call, kept, scratch, rest));
  return ProjectionsBackward(call, scratch, rest);
}

absl::Status ProjectedAttention::InnerBackward(const BackwardCall& call, const Kept& kept,
                                               const BackwardScratch& scratch,
                                               const Execution& execution) {
  PointInner(call.inputs, kept.scratch);
  for (const auto& [name, view] : inner_inputs_) inner_call_.inputs.Set(name, view);
  inner_call_.outputs.Set("out", Heads(kept.scratch.context, problem_.query_heads));
  inner_call_.output_gradients.Set("out", Heads(scratch.gradients.context, problem_.query_heads));
  Outputs& to = inner_call_.input_gradients;
  if (call.further != nullptr) {
    for (const auto& [name, view] : *call.further) {
      if (to.Find(name) != nullptr) to.Set(name, view);
    }
  }
  for (const Projection& projection : projections_) {
    const TensorView heads = HeadsIn(projection, scratch.gradients);
    if (projection.has_gradient) {
      to.Set(projection.name, heads);
    } else {
      // The layer does not depend on it.
      TFB_RETURN_IF_ERROR(ClearTensor(device_, heads, execution));
    }
  }
  if (inner_differentiates_x_) to.Set("x", call.dx.empty() ? TensorView() : scratch.x);

  float* next = scratch.inner_parameters;
  for (const InnerParameter& parameter : inner_parameters_) {
    const TensorView given = call.parameters.Get(parameter.outside);
    const bool adds = call.accumulate && !given.empty();
    inner_call_.parameter_gradients.Set(
        parameter.name, adds ? TensorView(next, DType::kF32, parameter.shape) : given);
    next += NumElements(parameter.shape);
  }
  TFB_RETURN_IF_ERROR(inner_->Backward(inner_call_, execution));
  if (!call.accumulate) return absl::OkStatus();
  for (const InnerParameter& parameter : inner_parameters_) {
    const TensorView given = call.parameters.Get(parameter.outside);
    if (given.empty()) continue;
    const TensorView more = inner_call_.parameter_gradients.Get(parameter.name);
    TFB_RETURN_IF_ERROR(AddTensor(device_, more, given, execution));
  }
  return absl::OkStatus();
}

absl::Status ProjectedAttention::ProjectionsBackward(const BackwardCall& call,
                                                     const BackwardScratch& scratch,
                                                     const Execution& execution) const {
  const Scratch& gradients = scratch.gradients;
  for (size_t n = 0; n < projections_.size(); ++n) {
    const Projection& projection = projections_[n];
    const TensorView& rows = projection.of_memory ? gradients.of_memory : gradients.of_x;
    TFB_RETURN_IF_ERROR(MatMulGradient(
        device_,
        {projection.of_memory ? call.inputs.memory : call.inputs.x,
         Slice(rows, 2, projection.first, projection.width), call.parameters.Get(names_[n].weights),
         call.parameters.Get(names_[n].bias), call.accumulate},
        execution));
  }
  if (!call.dmemory.empty()) {
    TFB_RETURN_IF_ERROR(MatMul(of_memory_transposed_,
                               {gradients.of_memory, call.added_to_memory, call.dmemory},
                               execution));
  }
  if (call.dx.empty()) return absl::OkStatus();
  ConstTensorView added = call.added;
  if (inner_differentiates_x_) {
    if (!added.empty()) {
      TFB_RETURN_IF_ERROR(Add(device_, added, scratch.x, scratch.x, execution));
    }
    added = scratch.x;
  }
  return MatMul(of_x_transposed_, {gradients.of_x, added, call.dx}, execution);
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
                                      const AttentionInputs& inputs,
                                      const DefinitionRequest& request, NamedTensors* outputs) {
  const auto parameter = [&](absl::string_view name) {
    return FindParameter(parameters, absl::StrCat(prefix, name));
  };
  const DoubleTensor hidden(inputs.x), keys(inputs.memory.empty() ? inputs.x : inputs.memory);
  TFB_ASSIGN_OR_RETURN(const Technique* technique, Registry::Global().Find(inner.technique));
  std::vector<std::string> names = {"q", "k", "v"};
  for (std::string& name : FurtherProjections(problem, inner)) names.push_back(std::move(name));
  NamedTensors projected;
  for (const std::string& name : names) {
    const bool is_query = name[0] == 'q';
    projected[name] = DefineProjection(
        problem, is_query ? hidden : keys, is_query ? problem.query_tokens : problem.kv_tokens,
        is_query ? problem.query_heads : problem.kv_heads, parameter("w_" + name),
        parameter("b_" + name), request.pool);
  }
  Inputs inner_inputs = ViewsOf(projected);
  inner_inputs.Set("key_mask", inputs.key_mask);
  inner_inputs.Set("x", inputs.x);
  if (inputs.further != nullptr) {
    for (const auto& [name, view] : *inputs.further) inner_inputs.Set(name, view);
  }
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
  for (auto& [name, tensor] : attended) {
    if (IsFurtherOutput(name)) (*outputs)[name] = std::move(tensor);
  }
  return absl::OkStatus();
}

}  // namespace tfb::layers
