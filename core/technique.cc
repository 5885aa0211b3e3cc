#include "core/technique.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/denormals.h"

namespace tfb {
namespace {

// Checks that the views have the names, shapes and dtypes of the specs, with `segment_tokens` for
// kSegmentTokens. `what` begins the message: "input". It allocates nothing unless it finds an
// error.
template <class View>
absl::Status CheckTensors(absl::string_view what, const std::vector<TensorSpec>& specs,
                          const NamedViews<View>& views, int64_t segment_tokens = 0) {
  size_t found = 0;
  for (const TensorSpec& spec : specs) {
    const View* view = views.Find(spec.name);
    Shape shape = spec.shape;
    std::replace(shape.begin(), shape.end(), kSegmentTokens, segment_tokens);
    if (view == nullptr || view->empty()) {
      if (spec.optional) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(what, " ", spec.name, " ", ShapeString(shape), " is missing"));
    }
    ++found;
    if (view->dtype != spec.dtype) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, " ", spec.name, " is ", Name(view->dtype), "; expected is ", Name(spec.dtype)));
    }
    if (absl::MakeConstSpan(view->dims.data(), view->rank) != absl::MakeConstSpan(shape)) {
      return absl::InvalidArgumentError(absl::StrCat(what, " ", spec.name, " has shape ",
                                                     ShapeString(view->shape()), "; expected is ",
                                                     ShapeString(shape)));
    }
  }
  if (found == views.size()) return absl::OkStatus();
  for (const auto& [name, view] : views) {
    const auto same = [&name = name](const TensorSpec& spec) { return spec.name == name; };
    if (!view.empty() && std::none_of(specs.begin(), specs.end(), same)) {
      return absl::InvalidArgumentError(absl::StrCat("there is no ", what, " \"", name, "\""));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMemory(absl::string_view what, absl::Span<std::byte> memory, size_t needed) {
  if (memory.size() < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", memory.size(), " bytes; the layer needs ", needed));
  }
  // No memory has an address that means nothing, such as that of an empty part of an array.
  if (!memory.empty() && reinterpret_cast<uintptr_t>(memory.data()) % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not aligned to 64 bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view Name(InputKind kind) {
  switch (kind) {
    case InputKind::kQkv:
      return "qkv";
    case InputKind::kHidden:
      return "hidden";
    case InputKind::kTokens:
      return "tokens";
  }
  return "?";
}

absl::string_view Name(Exactness exactness) {
  switch (exactness) {
    case Exactness::kExact:
      return "exact";
    case Exactness::kApproximate:
      return "approximate";
    case Exactness::kOwn:
      return "own";
  }
  return "?";
}

absl::Status Layer::CheckParameters(const NamedTensors& parameters) const {
  for (const auto& [name, tensor] : parameters) {
    const auto own = parameters_.find(name);
    if (own == parameters_.end()) {
      std::vector<std::string> known;
      for (const auto& entry : parameters_) known.push_back(entry.first);
      return absl::InvalidArgumentError(
          absl::StrCat("there is no parameter \"", name, "\"; ",
                       known.empty() ? "the layer has none"
                                     : absl::StrCat("the layer has ", absl::StrJoin(known, ", "))));
    }
    if (tensor.shape() != own->second.shape()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", name, " has shape ",
                                                     ShapeString(tensor.shape()), "; expected is ",
                                                     ShapeString(own->second.shape())));
    }
    if (!CanConvert(tensor.view(), own->second.dtype())) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", name, " is of type ", Name(own->second.dtype()),
                       ", which does not hold every element of the tensor given for it"));
    }
  }
  return absl::OkStatus();
}

absl::Status Layer::SetParameters(const NamedTensors& parameters) {
  TFB_RETURN_IF_ERROR(CheckParameters(parameters));
  for (const auto& [name, tensor] : parameters) {
    CopyElements(tensor.view(), parameters_.find(name)->second.view());
  }
  ready_ = false;
  return absl::OkStatus();
}

absl::Status Layer::SetParameters(NamedTensors&& parameters) {
  TFB_RETURN_IF_ERROR(CheckParameters(parameters));
  for (auto& [name, tensor] : parameters) {
    Tensor& own = parameters_.find(name)->second;
    if (tensor.dtype() == own.dtype()) {
      own = std::move(tensor);
    } else {
      CopyElements(tensor.view(), own.view());
    }
  }
  ready_ = false;
  return absl::OkStatus();
}

double Layer::TensorBytes() const {
  double bytes = 0;
  for (const auto* specs : {&inputs_, &outputs_}) {
    for (const TensorSpec& spec : *specs) {
      if (!spec.optional)
        bytes += static_cast<double>(NumElements(spec.shape) * SizeOf(spec.dtype));
    }
  }
  for (const auto& entry : parameters_) bytes += static_cast<double>(entry.second.bytes());
  return bytes;
}

absl::Status Layer::CheckCall(const Execution& execution) const {
  if (execution.pool == nullptr) return absl::InvalidArgumentError("execution has no thread pool");
  return CheckMemory("workspace", execution.workspace, workspace_bytes(execution.pool->threads()));
}

absl::Status Layer::CheckBackwardCall(const Execution& execution) const {
  if (execution.pool == nullptr) return absl::InvalidArgumentError("execution has no thread pool");
  return CheckMemory("workspace", execution.workspace,
                     backward_workspace_bytes(execution.pool->threads()));
}

absl::Status Layer::CheckKept(const Execution& execution) const {
  return CheckMemory("kept memory", execution.kept, kept_bytes());
}

absl::Status OnCpuAlone(Device device, absl::string_view what) {
  if (device == Device::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("the backward pass of ", what, " is on the CPU alone, not on ", Name(device)));
}

absl::Status Layer::CheckBackward() const {
  return absl::UnimplementedError("the layer has no backward pass");
}

absl::Status Layer::DoBackward(const BackwardCall&, const Execution&) { return CheckBackward(); }

std::vector<TensorSpec> Layer::output_gradients() const {
  std::vector<TensorSpec> specs;
  for (const std::string& name : differentiable_outputs()) {
    for (const TensorSpec& output : outputs_) {
      if (output.name == name) specs.push_back({name, output.shape, output.dtype, true});
    }
  }
  return specs;
}

std::vector<TensorSpec> Layer::input_gradients() const {
  const std::map<std::string, std::string> stopped = stopped_gradients();
  std::vector<TensorSpec> specs;
  for (const TensorSpec& input : inputs_) {
    if (!IsFloating(input.dtype) || stopped.count(input.name) > 0) continue;
    specs.push_back({input.name, input.shape, input.dtype, true});
  }
  return specs;
}

std::vector<TensorSpec> Layer::parameter_gradients() const {
  const std::map<std::string, std::string> stopped = stopped_gradients();
  std::vector<TensorSpec> specs;
  for (const auto& [name, parameter] : parameters_) {
    if (!IsFloating(parameter.dtype()) || stopped.count(name) > 0) continue;
    specs.push_back({name, parameter.shape(), DType::kF32, true});
  }
  return specs;
}

absl::Status Layer::Setup(const Inputs& inputs, const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckCall(execution));
  TFB_RETURN_IF_ERROR(CheckInputs(inputs_, inputs));
  const ScopedFlushDenormals flush;
  ready_ = backward_ready_ = false;
  TFB_RETURN_IF_ERROR(WithMemory([&] { return DoSetup(inputs, execution); }));
  ready_ = true;
  return absl::OkStatus();
}

absl::Status Layer::Run(const Inputs& inputs, const Outputs& outputs, const Execution& execution) {
  if (!ready_) return absl::FailedPreconditionError("Setup must be called before Run");
  TFB_RETURN_IF_ERROR(CheckCall(execution));
  TFB_RETURN_IF_ERROR(CheckInputs(inputs_, inputs));
  TFB_RETURN_IF_ERROR(CheckOutputs(outputs_, outputs));
  if (!execution.kept.empty()) {
    TFB_RETURN_IF_ERROR(CheckBackward());
    TFB_RETURN_IF_ERROR(CheckKept(execution));
  }
  const ScopedFlushDenormals flush;
  return DoRun(inputs, outputs, execution);
}

absl::Status Layer::SetUpBackward(const Inputs& inputs, const Execution& execution) {
  if (!ready_) return absl::FailedPreconditionError("Setup must be called before SetUpBackward");
  TFB_RETURN_IF_ERROR(CheckBackward());
  TFB_RETURN_IF_ERROR(CheckBackwardCall(execution));
  TFB_RETURN_IF_ERROR(CheckInputs(inputs_, inputs));
  backward_ready_ = false;
  backward_ = {outputs_, output_gradients(), input_gradients(), parameter_gradients()};
  for (TensorSpec& output : backward_.outputs) output.optional = output.name != "out";
  const ScopedFlushDenormals flush;
  TFB_RETURN_IF_ERROR(WithMemory([&] { return DoSetUpBackward(inputs, execution); }));
  backward_ready_ = true;
  return absl::OkStatus();
}

absl::Status Layer::Backward(const BackwardCall& call, const Execution& execution) {
  if (!ready_ || !backward_ready_) {
    return absl::FailedPreconditionError("SetUpBackward must be called before Backward");
  }
  TFB_RETURN_IF_ERROR(CheckBackwardCall(execution));
  TFB_RETURN_IF_ERROR(CheckKept(execution));
  TFB_RETURN_IF_ERROR(CheckInputs(inputs_, call.inputs));
  TFB_RETURN_IF_ERROR(CheckTensors("output", backward_.outputs, call.outputs));
  TFB_RETURN_IF_ERROR(
      CheckTensors("output gradient", backward_.output_gradients, call.output_gradients));
  TFB_RETURN_IF_ERROR(
      CheckTensors("input gradient", backward_.input_gradients, call.input_gradients));
  TFB_RETURN_IF_ERROR(
      CheckTensors("parameter gradient", backward_.parameter_gradients, call.parameter_gradients));
  const ScopedFlushDenormals flush;
  return DoBackward(call, execution);
}

absl::Status StreamingLayer::Append(const Inputs& segment, const Outputs& outputs,
                                    const Execution& execution) {
  if (!ready()) return absl::FailedPreconditionError("Setup must be called before Append");
  TFB_RETURN_IF_ERROR(CheckCall(execution));
  const TensorSpec& first = segment_inputs_[0];
  const ConstTensorView* view = segment.Find(first.name);
  int64_t tokens = 0;
  for (size_t axis = 0; view != nullptr && axis < first.shape.size(); ++axis) {
    if (first.shape[axis] == kSegmentTokens && static_cast<int>(axis) < view->rank) {
      tokens = view->dim(static_cast<int>(axis));
    }
  }
  if (tokens < 1 || tokens > max_segment_tokens_) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment has ", tokens, " tokens; allowed are 1 to ", max_segment_tokens_));
  }
  TFB_RETURN_IF_ERROR(CheckTensors("input", segment_inputs_, segment, tokens));
  TFB_RETURN_IF_ERROR(CheckTensors("output", segment_outputs_, outputs, tokens));
  const ScopedFlushDenormals flush;
  return DoAppend(tokens, segment, outputs, execution);
}

bool StoppedValues::Places::Pass(absl::Span<double> passed) {
  const size_t here = place++;
  if (!is_stored) {
    values.emplace_back(passed.begin(), passed.end());
    return true;
  }
  if (here >= values.size() || values[here].size() != passed.size()) return false;
  std::copy(values[here].begin(), values[here].end(), passed.begin());
  return true;
}

void StoppedValues::Hold(absl::Span<double> values) { fits_ &= values_.Pass(values); }
void StoppedValues::Choose(absl::Span<double> choice) { fits_ &= choices_.Pass(choice); }

StoppedValues StoppedValues::WithChoices() const {
  StoppedValues other;
  other.choices_ = choices_;
  return other;
}

absl::Status StoppedValues::Rewind() {
  for (Places* places : {&values_, &choices_}) {
    fits_ &= places->place == places->values.size();
    places->place = 0;
    places->is_stored = true;
  }
  if (fits_) return absl::OkStatus();
  return absl::InternalError("a definition holds other values than in its first evaluation");
}

absl::Status CheckInputs(const std::vector<TensorSpec>& specs, const Inputs& inputs) {
  return CheckTensors("input", specs, inputs);
}

absl::Status CheckOutputs(const std::vector<TensorSpec>& specs, const Outputs& outputs) {
  return CheckTensors("output", specs, outputs);
}

absl::StatusOr<TechniqueSpec> Technique::Counterpart(const Problem&, const Options&) const {
  return TechniqueSpec{"dense", {}};
}

std::vector<TensorSpec> QkvInputs(const Problem& p) {
  return {{"q", {p.batch, p.query_heads, p.query_tokens, p.head_dim}, p.dtype, false},
          {"k", {p.batch, p.kv_heads, p.kv_tokens, p.head_dim}, p.dtype, false},
          {"v", {p.batch, p.kv_heads, p.kv_tokens, p.value_dim}, p.dtype, false},
          {"key_mask", {p.batch, p.kv_tokens}, DType::kU8, true}};
}

std::vector<TensorSpec> HiddenInputs(const Problem& p) {
  return {{"x", {p.batch, p.query_tokens, p.model_dim()}, p.dtype, false}};
}

std::vector<TensorSpec> AttentionOutputs(const Problem& p) {
  return {{"out", {p.batch, p.query_heads, p.query_tokens, p.value_dim}, p.dtype, false},
          {"log_sum_exp", {p.batch, p.query_heads, p.query_tokens}, DType::kF32, true}};
}

double AttentionBytes(const Problem& p) {
  const double query_rows = static_cast<double>(p.batch * p.query_heads * p.query_tokens);
  const double key_rows = static_cast<double>(p.batch * p.kv_heads * p.kv_tokens);
  return static_cast<double>((p.head_dim + p.value_dim) * SizeOf(p.dtype)) *
         (query_rows + key_rows);
}

std::vector<TensorSpec> HiddenOutputs(const Problem& p) {
  return {{"out", {p.batch, p.query_tokens, p.model_dim()}, p.dtype, false}};
}

bool RunsOn(const TechniqueInfo& info, Device device) {
  const Device named = device == Device::kSimulator ? Device::kCuda : device;
  return std::find(info.devices.begin(), info.devices.end(), named) != info.devices.end();
}

absl::Status CheckForm(const TechniqueInfo& info, const Problem& problem) {
  TFB_RETURN_IF_ERROR(Validate(problem));
  if (info.self_attention && problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat(info.name, " is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
  if (problem.causal && !info.supports_causal) {
    return absl::UnimplementedError(absl::StrCat(info.name, " has no causal form"));
  }
  if (!problem.causal && !info.supports_noncausal) {
    return absl::UnimplementedError(absl::StrCat(info.name, " is causal only"));
  }
  return absl::OkStatus();
}

absl::Status CheckSupported(const TechniqueInfo& info, const Problem& problem, Device device) {
  TFB_RETURN_IF_ERROR(CheckForm(info, problem));
  if (RunsOn(info, device)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(info.name, " has no implementation for device ", Name(device)));
}

Registry& Registry::Global() {
  static Registry& registry = *new Registry;  // never destroyed: usable from static initialisers
  return registry;
}

void Registry::Add(std::unique_ptr<Technique> technique) {
  const std::string name = technique->info().name;
  if (!techniques_.emplace(name, std::move(technique)).second) {
    std::fprintf(stderr, "technique %s is registered twice\n", name.c_str());
    std::abort();
  }
}

std::vector<const Technique*> Registry::All() const {
  std::vector<const Technique*> all;
  for (const auto& [name, technique] : techniques_) all.push_back(technique.get());
  return all;
}

absl::StatusOr<const Technique*> Registry::Find(absl::string_view name) const {
  const auto found = techniques_.find(name);
  if (found != techniques_.end()) return found->second.get();
  std::vector<std::string> known;
  for (const auto& entry : techniques_) known.push_back(entry.first);
  return absl::NotFoundError(absl::StrCat("there is no technique \"", name, "\"; nearest are ",
                                          absl::StrJoin(NearestNames(name, known), ", ")));
}

}  // namespace tfb
