#include "harness/judge/evaluate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/random.h"
#include "core/status.h"
#include "harness/contestants/interface.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/guarded.h"

namespace tfb {
namespace {

DefinitionRequest RequestOf(const EvaluateRequest& request, bool weights,
                            const NamedTensors* computed = nullptr) {
  DefinitionRequest definition;
  definition.rows = request.rows;
  definition.weights = weights;
  definition.computed = computed;
  definition.pool = request.pool;
  return definition;
}

bool WeightsFit(const EvaluateRequest& request) {
  const Problem& p = request.job.problem;
  const int64_t rows =
      request.rows.empty() ? p.query_tokens : static_cast<int64_t>(request.rows.size());
  const double bytes = 8.0 * static_cast<double>(p.batch) * static_cast<double>(p.query_heads) *
                       static_cast<double>(rows) * static_cast<double>(p.kv_tokens);
  return bytes <= static_cast<double>(kMaxWeightBytes);
}

// Returns the unit of errors: the largest value that is mixed, or the largest output where that is
// more (a technique may add to the values, or have none).
double Scale(const NamedTensors& inputs, const Tensor& reference) {
  const auto v = inputs.find("v");
  const double values = v == inputs.end() ? 0 : LargestMagnitude(v->second.view());
  return std::max(values, LargestMagnitude(reference.view()));
}

// Returns the number of keys that a row can have.
int64_t Keys(const Problem& problem) { return std::max(problem.kv_tokens, problem.query_tokens); }

absl::Status Missing(absl::string_view technique, absl::string_view what) {
  return absl::InternalError(absl::StrCat("the definition of ", technique, " has no ", what));
}

// A definition's reference for the outputs.
struct Reference {
  NamedTensors tensors;
  double scale = 0;
};

absl::StatusOr<Reference> Define(const EvaluateRequest& request, const Technique& technique,
                                 const Options& options, const NamedTensors& parameters,
                                 const DefinitionRequest& definition) {
  Reference reference;
  TFB_RETURN_IF_ERROR(technique.Define(request.job.problem, options, parameters,
                                       ViewsOf(*request.inputs), definition, &reference.tensors));
  const auto out = reference.tensors.find("out");
  if (out == reference.tensors.end()) return Missing(technique.info().name, "out");
  reference.scale = Scale(*request.inputs, out->second);
  return reference;
}

absl::StatusOr<OutputError> CompareOut(const EvaluateRequest& request, const NamedTensors& outputs,
                                       const Reference& reference) {
  const auto out = outputs.find("out");
  if (out == outputs.end()) return absl::InternalError("the layer has no output out");
  return CompareOutput(out->second.view(), reference.tensors.at("out").view(), request.rows,
                       reference.scale);
}

absl::Status CompareFurtherOutputs(const EvaluateRequest& request, const NamedTensors& outputs,
                                   const Reference& reference, Accuracy* accuracy) {
  const int64_t keys = Keys(request.job.problem);
  for (const auto& [name, output] : outputs) {
    const auto expected = reference.tensors.find(name);
    if (name == "out" || expected == reference.tensors.end()) continue;
    TFB_ASSIGN_OR_RETURN(const double error,
                         MaxAbsError(output.view(), expected->second.view(), request.rows));
    double largest = LargestMagnitude(expected->second.view());
    if (name == "log_sum_exp") {
      accuracy->log_sum_exp_error = {error, LogSumExpBound(keys, largest)};
    } else if (IsFloating(output.dtype())) {
      // See Technique::Define: the size of what a difference was taken of.
      if (const auto parts = reference.tensors.find(absl::StrCat(name, ".scale"));
          parts != reference.tensors.end()) {
        largest = std::max(largest, LargestMagnitude(parts->second.view()));
      }
      accuracy->other_errors[name] = {error == 0 ? 0 : error / std::max(largest, 1e-30),
                                      AbsoluteBound(output.dtype(), keys)};
    } else {
      accuracy->other_errors[name] = {error, 0};
    }
  }
  return absl::OkStatus();
}

// The dense counterpart of the request's technique.
struct Counterpart {
  TechniqueSpec spec;  // with the options that differ from their defaults
  const Technique* technique = nullptr;
  Options options;
  bool is_self = false;
};

absl::StatusOr<Counterpart> FindCounterpart(const EvaluateRequest& request) {
  Counterpart counterpart;
  TFB_ASSIGN_OR_RETURN(counterpart.spec, request.job.technique->Counterpart(request.job.problem,
                                                                            request.job.options));
  const TechniqueSpec& spec = counterpart.spec;
  TFB_ASSIGN_OR_RETURN(counterpart.technique, request.registry->Find(spec.technique));
  TFB_ASSIGN_OR_RETURN(counterpart.options, counterpart.technique->Canonical(spec.options));
  TFB_ASSIGN_OR_RETURN(const Options own, request.job.technique->Canonical(request.job.options));
  for (const OptionSpec& option : counterpart.technique->info().options) {
    const auto given = counterpart.spec.options.find(option.name);
    if (given == counterpart.spec.options.end()) continue;
    if (counterpart.options.at(option.name) == option.default_value) {
      counterpart.spec.options.erase(given);
    }
  }
  counterpart.is_self =
      counterpart.technique == request.job.technique && counterpart.options == own;
  return counterpart;
}

// Returns those of the parameters `given` that a layer has with the same shapes.
NamedTensors SharedParameters(const NamedTensors& given, const Layer& layer) {
  NamedTensors shared;
  for (const auto& [name, tensor] : layer.parameters()) {
    const auto found = given.find(name);
    if (found == given.end() || found->second.shape() != tensor.shape()) continue;
    shared[name] = found->second.Clone();
  }
  return shared;
}

// Returns the counterpart's own error in the precision of the problem, in units of its scale.
absl::StatusOr<OutputError> CounterpartPrecision(const EvaluateRequest& request,
                                                 const Counterpart& counterpart,
                                                 const NamedTensors& parameters) {
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer,
                       counterpart.technique->Create(request.job.problem, counterpart.options,
                                                     request.job.device, request.job.seed));
  TFB_RETURN_IF_ERROR(layer->SetParameters(SharedParameters(parameters, *layer)));
  Inputs inputs;
  for (const TensorSpec& spec : layer->inputs()) {
    const auto found = request.inputs->find(spec.name);
    if (found != request.inputs->end()) inputs.Set(spec.name, found->second.view());
  }
  TFB_ASSIGN_OR_RETURN(const DeviceTensors read, DeviceTensors::Of(request.job.device, inputs));
  TFB_ASSIGN_OR_RETURN(const LayerRun run,
                       RunOnce(layer.get(), request.job.device, read.inputs(), request.pool));
  TFB_ASSIGN_OR_RETURN(
      const Reference reference,
      Define(request, *counterpart.technique, counterpart.options, layer->parameters(),
             RequestOf(request, /*weights=*/false, &run.outputs)));
  return CompareOut(request, run.outputs, reference);
}

absl::StatusOr<std::optional<Extrapolation>> ExtrapolationOf(const EvaluateRequest& request,
                                                             const NamedTensors& parameters,
                                                             const Reference& own) {
  const auto weights = own.tensors.find("weights");
  if (weights == own.tensors.end()) return std::optional<Extrapolation>();
  return MeasureExtrapolation(request, parameters, weights->second.view());
}

absl::Status JudgeAgainstDense(const EvaluateRequest& request, const NamedTensors& parameters,
                               const NamedTensors& outputs, const Reference& own,
                               Accuracy* accuracy) {
  TFB_ASSIGN_OR_RETURN(const Counterpart counterpart, FindCounterpart(request));
  accuracy->counterpart = ToString(counterpart.spec);
  const bool weights = own.tensors.count("weights") > 0;
  Reference computed;
  if (!counterpart.is_self) {
    TFB_ASSIGN_OR_RETURN(computed, Define(request, *counterpart.technique, counterpart.options,
                                          parameters, RequestOf(request, weights)));
  }
  const Reference& dense = counterpart.is_self ? own : computed;
  TFB_ASSIGN_OR_RETURN(accuracy->against_dense, CompareOut(request, outputs, dense));
  if (weights && dense.tensors.count("weights") > 0) {
    TFB_ASSIGN_OR_RETURN(accuracy->kept, CompareWeights(own.tensors.at("weights").view(),
                                                        dense.tensors.at("weights").view(),
                                                        kRecallKeys, request.pool));
  }
  if (request.job.problem.dtype == DType::kF32 || std::isinf(accuracy->definition_bound)) {
    return absl::OkStatus();
  }
  const OutputError& error = accuracy->against_definition;
  if (counterpart.is_self) {
    accuracy->ratio_to_dense_precision = {1, 2};
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(const OutputError plain,
                       CounterpartPrecision(request, counterpart, parameters));
  if (plain.max_abs_over_max_value == 0) return absl::OkStatus();  // a ratio to 0 is undefined
  const double largest_output =
      LargestMagnitude(own.tensors.at("out").view()) / std::max(own.scale, 1e-300);
  accuracy->ratio_to_dense_precision = {
      error.max_abs_over_max_value / plain.max_abs_over_max_value,
      RatioBound(request.job.problem.dtype, plain.max_abs_over_max_value, largest_output) /
          plain.max_abs_over_max_value};
  return absl::OkStatus();
}

// Describes the non-finite elements of an output; returns an empty text where there are none.
std::string NotFiniteFailure(const OutputError& error) {
  if (error.unexpected > 0) {
    return absl::StrCat(error.unexpected, " of ", error.checked,
                        " elements of out are NaN or infinite where the definition is finite");
  }
  if (std::isnan(error.mean_cosine)) {
    return "nothing was compared: no element of out is finite, nor is the definition";
  }
  return "";
}

void Pass(Accuracy* accuracy) {
  accuracy->failure = NotFiniteFailure(accuracy->against_definition);
  const auto check = [accuracy](absl::string_view what, const Bounded& error) {
    if (error.passed() || !accuracy->failure.empty()) return;
    accuracy->failure =
        absl::StrFormat("%s is %.3g, its bound %.3g", what, error.value, error.bound);
  };
  check("max error over max value",
        {accuracy->against_definition.max_abs_over_max_value, accuracy->definition_bound});
  if (accuracy->log_sum_exp_error.has_value()) {
    check("error of log_sum_exp", *accuracy->log_sum_exp_error);
  }
  for (const auto& [name, error] : accuracy->other_errors) {
    check(absl::StrCat("error of output ", name), error);
  }
  if (accuracy->ratio_to_dense_precision.has_value()) {
    check("ratio to the error of dense attention in the same precision",
          *accuracy->ratio_to_dense_precision);
  }
  accuracy->passed = accuracy->failure.empty();
}

NamedTensors Copies(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) copies[name] = tensor.Clone();
  return copies;
}
NamedTensors Copies(const Inputs& views) {
  NamedTensors copies;
  for (const auto& [name, view] : views) {
    if (view.empty()) continue;
    Tensor& copy = copies[name] = Tensor(view.dtype, view.shape());
    CopyElements(view, copy.view());
  }
  return copies;
}

// Returns the bound of the technique's error against its definition.
double DefinitionBound(const Job& job) {
  const ContestantTechnique* contestant = AsContestant(*job.technique);
  if (contestant != nullptr && !contestant->contestant().exact) {
    return std::numeric_limits<double>::infinity();
  }
  return AbsoluteBound(job.problem.dtype, Keys(job.problem));
}

// Tensors of a layer's device between guard bands.
class GuardedTensors {
 public:
  static absl::StatusOr<GuardedTensors> Allocate(const std::vector<TensorSpec>& specs,
                                                 Device device) {
    GuardedTensors guarded;
    for (const TensorSpec& spec : specs) {
      TFB_ASSIGN_OR_RETURN(GuardedTensor tensor,
                           GuardedTensor::Allocate(spec.dtype, spec.shape, /*gaps=*/false, device));
      TFB_RETURN_IF_ERROR(tensor.Upload(Contents::kUnwritten));
      guarded.views_.Set(spec.name, tensor.device_view());
      guarded.tensors_[spec.name] = std::move(tensor);
    }
    return guarded;
  }

  const Outputs& views() const { return views_; }
  void Poison() {
    for (auto& [name, tensor] : tensors_) tensor.Poison();
  }
  // Checks the bands, with messages that begin with `what`, and returns copies on the host.
  absl::StatusOr<NamedTensors> Download(absl::string_view what) {
    NamedTensors copies;
    for (auto& [name, tensor] : tensors_) {
      TFB_RETURN_IF_ERROR(tensor.Download());
      TFB_RETURN_IF_ERROR(tensor.CheckGuards(absl::StrCat(what, " ", name)));
      Tensor& copy = copies[name] = Tensor(tensor.view().dtype, tensor.view().shape());
      CopyElements(tensor.view(), copy.view());
    }
    return copies;
  }

 private:
  std::map<std::string, GuardedTensor> tensors_;
  Outputs views_;
};

// The memory of a backward pass between guard bands.
class GuardedBackward {
 public:
  // Binds the backward pass of a layer that has one.
  static absl::StatusOr<GuardedBackward> Bind(const NamedTensors& output_gradients,
                                              ThreadPool* pool, BoundLayer* bound) {
    const Layer& layer = *bound->layer;
    const Device device = bound->device();
    GuardedBackward backward;
    TFB_ASSIGN_OR_RETURN(backward.given_, DeviceTensors::Of(device, ViewsOf(output_gradients)));
    TFB_ASSIGN_OR_RETURN(backward.inputs_,
                         GuardedTensors::Allocate(layer.input_gradients(), device));
    TFB_ASSIGN_OR_RETURN(backward.parameters_,
                         GuardedTensors::Allocate(layer.parameter_gradients(), device));
    TFB_ASSIGN_OR_RETURN(backward.kept_, GuardedMemory::Allocate(KeptMemoryBytes(layer), device));
    TFB_RETURN_IF_ERROR(backward.kept_.Upload(Contents::kUnwritten));
    TFB_ASSIGN_OR_RETURN(
        backward.workspace_,
        GuardedWorkspace::Allocate(layer.backward_workspace_bytes(pool->threads()), device));
    bound->BindBackward(backward.given_.inputs(), backward.inputs_.views(),
                        backward.parameters_.views(), backward.kept_.device_bytes());
    return backward;
  }

  // Sets the backward pass up and calls it, behind a Run, and adds the gradients to `run`.
  absl::Status Call(BoundLayer bound, LayerRun* run) {
    bound.execution.workspace = workspace_.bytes();
    TFB_RETURN_IF_ERROR(
        workspace_.Call("workspace of SetUpBackward", [&] { return bound.SetUpBackward(); }));
    TFB_RETURN_IF_ERROR(workspace_.Call("workspace of Backward", [&] { return bound.Backward(); }));
    TFB_RETURN_IF_ERROR(kept_.Download());
    TFB_RETURN_IF_ERROR(kept_.CheckGuards("kept memory"));
    TFB_ASSIGN_OR_RETURN(run->input_gradients, inputs_.Download("gradient of input"));
    TFB_ASSIGN_OR_RETURN(run->parameter_gradients, parameters_.Download("gradient of parameter"));
    return absl::OkStatus();
  }

 private:
  DeviceTensors given_;  // gradients of outputs
  GuardedTensors inputs_, parameters_;
  GuardedMemory kept_;
  GuardedWorkspace workspace_;
};

// Runs the layer on the negative of every number.
absl::Status RunOnNegative(const BoundLayer& bound) {
  NamedTensors negative;
  BoundLayer other = bound;
  for (const auto& [name, view] : bound.inputs) {
    if (view.empty() || !IsFloating(view.dtype)) continue;
    Tensor& copy = negative[name] = Tensor(view.dtype, view.shape());
    CopyElements(view, copy.view());
    for (int64_t n = 0; n < copy.num_elements(); ++n) copy.view().Set(n, -copy.view().Get(n));
    other.inputs.Set(name, copy.view());
  }
  return other.Run();
}

// Returns a number that other contents of the contiguous tensors among them would hardly have; 0
// where they are not in the host's memory.
uint64_t ChecksumOf(const Inputs& inputs, Device device) {
  if (device != Device::kCpu) return 0;
  constexpr uint64_t kOffset = 0xcbf29ce484222325, kPrime = 0x100000001b3;  // FNV-1a's
  uint64_t sum = kOffset;
  for (const auto& [name, view] : inputs) {
    if (view.empty() || !view.is_contiguous()) continue;
    const char* bytes = static_cast<const char*>(view.data);
    const auto count = static_cast<size_t>(view.num_elements() * SizeOf(view.dtype));
    for (size_t begin = 0; begin < count; begin += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + begin, std::min(sizeof(word), count - begin));
      sum = (sum ^ word) * kPrime;
    }
  }
  return sum;
}

}  // namespace

absl::StatusOr<LayerRun> RunOnce(Layer* layer, Device device, const Inputs& inputs,
                                 ThreadPool* pool, const NamedTensors* output_gradients) {
  if (output_gradients != nullptr) TFB_RETURN_IF_ERROR(layer->CheckBackward());
  BoundLayer bound;
  bound.layer = layer;
  bound.inputs = inputs;
  const bool is_contestant =
      device == Device::kCpu && dynamic_cast<ContestantLayer*>(layer) != nullptr;
  // A contestant may write into its inputs, which other cases read, too: it gets copies.
  const NamedTensors own_inputs = is_contestant ? Copies(inputs) : NamedTensors();
  if (is_contestant) bound.inputs = ViewsOf(own_inputs);
  TFB_ASSIGN_OR_RETURN(bound.runtime, RuntimeOf(device));
  const int64_t allocated_before = bound.runtime == nullptr ? 0 : bound.runtime->allocated_bytes();
  TFB_ASSIGN_OR_RETURN(GuardedTensors outputs, GuardedTensors::Allocate(layer->outputs(), device));
  bound.outputs = outputs.views();
  std::optional<GuardedBackward> backward;
  if (output_gradients != nullptr) {
    TFB_ASSIGN_OR_RETURN(backward, GuardedBackward::Bind(*output_gradients, pool, &bound));
  }
  LayerRun run;
  run.workspace_bytes = layer->workspace_bytes(pool->threads());
  TFB_ASSIGN_OR_RETURN(GuardedWorkspace workspace,
                       GuardedWorkspace::Allocate(run.workspace_bytes, device));
  if (bound.runtime != nullptr) {
    run.device_bytes = bound.runtime->allocated_bytes() - allocated_before;
  }
  bound.execution.pool = pool;
  bound.execution.workspace = workspace.bytes();
  const uint64_t inputs_before = ChecksumOf(bound.inputs, device);
  TFB_RETURN_IF_ERROR(workspace.Call("workspace of Setup", [&] { return bound.Setup(); }));
  if (is_contestant) {
    TFB_RETURN_IF_ERROR(RunOnNegative(bound));
    outputs.Poison();
  }
  TFB_RETURN_IF_ERROR(workspace.Call("workspace", [&] { return bound.Run(); }));
  if (backward.has_value()) TFB_RETURN_IF_ERROR(backward->Call(bound, &run));
  if (ChecksumOf(bound.inputs, device) != inputs_before) {
    return absl::InternalError("the layer wrote into its inputs");
  }
  TFB_ASSIGN_OR_RETURN(run.outputs, outputs.Download("output"));
  return run;
}

absl::StatusOr<Accuracy> Judge(const EvaluateRequest& request, const NamedTensors& parameters,
                               const NamedTensors& outputs) {
  Accuracy accuracy;
  const bool weights = WeightsFit(request);
  TFB_ASSIGN_OR_RETURN(const Reference own,
                       Define(request, *request.job.technique, request.job.options, parameters,
                              RequestOf(request, weights, &outputs)));
  TFB_ASSIGN_OR_RETURN(accuracy.against_definition, CompareOut(request, outputs, own));
  accuracy.definition_bound = DefinitionBound(request.job);
  TFB_RETURN_IF_ERROR(CompareFurtherOutputs(request, outputs, own, &accuracy));
  const absl::Status against_dense =
      JudgeAgainstDense(request, parameters, outputs, own, &accuracy);
  if (!against_dense.ok()) accuracy.no_dense_reason = std::string(against_dense.message());
  TFB_ASSIGN_OR_RETURN(accuracy.extrapolation, ExtrapolationOf(request, parameters, own));
  Pass(&accuracy);
  return accuracy;
}

absl::StatusOr<Accuracy> JudgeByDefinition(const EvaluateRequest& request,
                                           const NamedTensors& parameters,
                                           const NamedTensors& outputs) {
  Accuracy accuracy;
  TFB_ASSIGN_OR_RETURN(const Reference own,
                       Define(request, *request.job.technique, request.job.options, parameters,
                              RequestOf(request, /*weights=*/false, &outputs)));
  TFB_ASSIGN_OR_RETURN(accuracy.against_definition, CompareOut(request, outputs, own));
  accuracy.definition_bound = DefinitionBound(request.job);
  Pass(&accuracy);
  return accuracy;
}

absl::StatusOr<Accuracy> Evaluate(const EvaluateRequest& request) {
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer, request.job.CreateLayer());
  return EvaluateLayer(request, layer.get());
}

absl::StatusOr<Accuracy> EvaluateLayer(const EvaluateRequest& request, Layer* layer) {
  TFB_ASSIGN_OR_RETURN(const DeviceTensors read,
                       DeviceTensors::Of(request.job.device, ViewsOf(*request.inputs)));
  TFB_ASSIGN_OR_RETURN(LayerRun run, RunOnce(layer, request.job.device, read.inputs(), request.pool,
                                             request.output_gradients));
  TFB_ASSIGN_OR_RETURN(Accuracy accuracy, Judge(request, layer->parameters(), run.outputs));
  accuracy.statistics = layer->statistics();
  accuracy.cost = layer->cost();
  accuracy.workspace_bytes = run.workspace_bytes;
  accuracy.parameters = Copies(layer->parameters());
  accuracy.parameter_bytes = 0;
  for (const auto& entry : accuracy.parameters) *accuracy.parameter_bytes += entry.second.bytes();
  accuracy.outputs = std::move(run.outputs);
  accuracy.input_gradients = std::move(run.input_gradients);
  accuracy.parameter_gradients = std::move(run.parameter_gradients);
  return accuracy;
}

std::vector<int64_t> SampleRows(int64_t tokens, int64_t count, uint64_t seed) {
  if (tokens <= count) return {};
  std::set<int64_t> rows = {0, 1, tokens - 2, tokens - 1};
  // A quarter of the rows at edges of tiles, which may be 16 to 128 tokens long.
  const int64_t edges = std::max<int64_t>(count / 8, 1);
  const int64_t step = std::max<int64_t>(64, tokens / edges / 64 * 64);
  for (int64_t edge = step; edge < tokens; edge += step) {
    rows.insert(edge - 1);
    rows.insert(edge);
  }
  const RandomStream random(seed, "sampled rows");
  const int64_t draws = count - static_cast<int64_t>(rows.size());
  for (int64_t n = 0; n < draws; ++n) {
    const double place = (static_cast<double>(n) + random.Uniform(n)) / static_cast<double>(draws);
    rows.insert(static_cast<int64_t>(place * static_cast<double>(tokens)));
  }
  return {rows.begin(), rows.end()};
}

}  // namespace tfb
