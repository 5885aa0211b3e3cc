#include "harness/conformance/gradient_trial.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/random.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/device_memory.h"

namespace tfb::conformance {
namespace {

constexpr int kDirections = 2;  // of each variable, besides a coordinate

// Returns those of the specs whose names are in `there` and whose gradients are not left out.
std::vector<TensorSpec> Wanted(const std::vector<TensorSpec>& specs, bool are_parameters,
                               const NamedTensors& there, const StepSettings& settings) {
  std::vector<TensorSpec> wanted;
  for (const TensorSpec& spec : specs) {
    const Variable variable = {are_parameters, spec.name};
    if (there.count(spec.name) == 0 || settings.left_out.count(variable.ToString()) > 0) continue;
    wanted.push_back(spec);
  }
  return wanted;
}

}  // namespace

Step::Step(Layer* layer, Device device, const NamedTensors& inputs, const StepSettings& settings)
    : layer_(layer),
      device_(device),
      settings_(settings),
      inputs_(Copies(inputs)),
      pool_(settings.threads) {}

absl::StatusOr<std::unique_ptr<Step>> Step::Run(Layer* layer, Device device,
                                                const NamedTensors& inputs,
                                                const StepSettings& settings) {
  std::unique_ptr<Step> step(new Step(layer, device, inputs, settings));
  TFB_ASSIGN_OR_RETURN(step->read_, PlacedTensors::Of(inputs, settings.inputs, device));
  TFB_ASSIGN_OR_RETURN(step->written_,
                       PlacedTensors::For(layer->outputs(), Layout::kContiguous, device));
  TFB_ASSIGN_OR_RETURN(step->kept_, GuardedMemory::Allocate(KeptMemoryBytes(*layer), device));
  TFB_RETURN_IF_ERROR(step->kept_.Upload(Contents::kUnwritten));
  TFB_ASSIGN_OR_RETURN(
      step->workspace_,
      GuardedWorkspace::Allocate(layer->backward_workspace_bytes(settings.threads), device));
  TFB_RETURN_IF_ERROR(step->DoRun());
  return step;
}

Execution Step::execution() {
  Execution execution;
  execution.pool = &pool_;
  execution.workspace = workspace_.bytes();
  execution.kept = kept_.device_bytes();
  return execution;
}

BackwardCall Step::call() const {
  BackwardCall call;
  call.inputs = read_.inputs();
  call.outputs = written_.inputs();
  return call;
}

absl::Status Step::CheckKept() {
  TFB_RETURN_IF_ERROR(kept_.Download());
  return kept_.CheckGuards("kept memory");
}

absl::Status Step::DoRun() {
  FollowSchedule(settings_.schedule);
  TFB_ASSIGN_OR_RETURN(
      GuardedWorkspace workspace,
      GuardedWorkspace::Allocate(layer_->workspace_bytes(settings_.threads), device_));
  Execution forward = execution();
  forward.workspace = workspace.bytes();
  if (settings_.setup) {
    TFB_RETURN_IF_ERROR(workspace.Call("workspace of Setup",
                                       [&] { return layer_->Setup(read_.inputs(), forward); }));
    TFB_RETURN_IF_ERROR(workspace_.Call("workspace of SetUpBackward", [&] {
      return layer_->SetUpBackward(read_.inputs(), execution());
    }));
  }
  TFB_RETURN_IF_ERROR(workspace.Call(
      "workspace", [&] { return layer_->Run(read_.inputs(), written_.outputs(), forward); }));
  TFB_RETURN_IF_ERROR(read_.CheckUnchanged("input", inputs_));
  TFB_ASSIGN_OR_RETURN(outputs_, written_.Written("output"));
  return CheckKept();
}

absl::Status Step::ReplayBackward(const BackwardCall& call) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, RuntimeOf(device_));
  TFB_ASSIGN_OR_RETURN(const DeviceGraph graph, DeviceGraph::Capture(runtime, [&](void* stream) {
                         Execution execution = this->execution();
                         execution.stream = stream;
                         return layer_->Backward(call, execution);
                       }));
  for (int launch = 0; launch < 2; ++launch) TFB_RETURN_IF_ERROR(graph.Launch());
  return runtime->Synchronize();
}

absl::StatusOr<NamedTensors> Step::Backward(const NamedTensors& output_gradients) {
  FollowSchedule(settings_.schedule);
  TFB_ASSIGN_OR_RETURN(PlacedTensors given,
                       PlacedTensors::Of(output_gradients, settings_.inputs, device_));
  const auto place = [&](const std::vector<TensorSpec>& specs, bool are_parameters,
                         const NamedTensors& there) {
    return PlacedTensors::For(Wanted(specs, are_parameters, there, settings_), settings_.gradients,
                              device_);
  };
  TFB_ASSIGN_OR_RETURN(PlacedTensors inputs, place(layer_->input_gradients(), false, inputs_));
  TFB_ASSIGN_OR_RETURN(PlacedTensors parameters,
                       place(layer_->parameter_gradients(), true, layer_->parameters()));
  BackwardCall call = this->call();
  call.output_gradients = given.inputs();
  call.input_gradients = inputs.outputs();
  call.parameter_gradients = parameters.outputs();
  TFB_RETURN_IF_ERROR(workspace_.Call("workspace of Backward", [&] {
    return settings_.in_graph ? ReplayBackward(call) : layer_->Backward(call, execution());
  }));
  TFB_RETURN_IF_ERROR(CheckKept());
  TFB_RETURN_IF_ERROR(read_.CheckUnchanged("input", inputs_));
  TFB_RETURN_IF_ERROR(written_.CheckUnchanged("output", outputs_));
  TFB_RETURN_IF_ERROR(given.CheckUnchanged("output gradient", output_gradients));
  NamedTensors gradients;
  for (const bool are_parameters : {false, true}) {
    TFB_ASSIGN_OR_RETURN(NamedTensors some, are_parameters
                                                ? parameters.Written("parameter gradient")
                                                : inputs.Written("input gradient"));
    for (auto& [name, tensor] : some) {
      gradients[Variable{are_parameters, name}.ToString()] = std::move(tensor);
    }
  }
  return gradients;
}

std::unique_ptr<GradientTrial> GradientTrial::Make(const Job& job, uint64_t seed) {
  auto gradient = std::make_unique<GradientTrial>();
  gradient->trial_ = Trial::Make(job, seed);
  if (gradient->trial_ == nullptr) return nullptr;
  Layer& layer = gradient->layer();
  if (const absl::Status status = layer.CheckBackward(); !status.ok()) {
    Skip(std::string(status.message()));
    return nullptr;
  }
  if (!gradient->FreezeChoices()) return nullptr;
  for (const TensorSpec& spec : layer.output_gradients()) {
    Tensor& drawn = gradient->output_gradients_[spec.name] = Tensor(spec.dtype, spec.shape);
    FillNormal(&drawn, seed, absl::StrCat("gradient of ", spec.name));
  }
  return gradient;
}

bool GradientTrial::FreezeChoices() {
  const std::string& selection = job().technique->info().selection;
  if (selection.empty()) return true;
  inputs().erase(selection);
  NamedTensors outputs = trial_->Run();
  if (outputs.empty()) return false;
  inputs()[selection] = std::move(outputs.at(selection));
  return true;
}

std::vector<Variable> GradientTrial::Variables() {
  const std::map<std::string, std::string> estimated = layer().estimated_gradients();
  std::vector<Variable> variables;
  for (const TensorSpec& spec : layer().input_gradients()) {
    if (inputs().count(spec.name) == 0 || estimated.count(spec.name) > 0) continue;
    variables.push_back({false, spec.name});
  }
  std::reverse(variables.begin(), variables.end());
  for (const TensorSpec& spec : layer().parameter_gradients()) {
    if (estimated.count(spec.name) == 0) variables.push_back({true, spec.name});
  }
  return variables;
}

std::unique_ptr<Step> GradientTrial::Run(const StepSettings& settings) {
  auto step = Step::Run(&layer(), job().device, inputs(), settings);
  if (step.ok()) {
    computed_ = Copies((*step)->outputs());
    return *std::move(step);
  }
  ADD_FAILURE() << step.status();
  return nullptr;
}

NamedTensors GradientTrial::Backward(Step* step) {
  if (step == nullptr) return {};
  auto gradients = step->Backward(output_gradients_);
  if (gradients.ok()) return *std::move(gradients);
  ADD_FAILURE() << gradients.status();
  return {};
}

NamedTensors GradientTrial::Backward(const StepSettings& settings) {
  return Backward(Run(settings).get());
}

absl::StatusOr<DefinitionGradient> GradientTrial::Definition() {
  DefinitionGradient::Point point = {&inputs(), &layer().parameters(), &output_gradients_,
                                     &computed_};
  point.reads_rounded_output = reads_rounded_outputs_;
  return DefinitionGradient::At(job(), point, &pool_);
}

void GradientTrial::ExpectMatchesDefinition(const NamedTensors& gradients, const Variable& variable,
                                            DefinitionGradient* definition) {
  const std::string key = variable.ToString();
  const Tensor& gradient = gradients.at(key);
  if (gradient.num_elements() == 0) return;
  const RandomStream random(kSeed, absl::StrCat(LabelOf(job().problem), " coordinate of ", key));
  const int64_t place =
      static_cast<int64_t>(random.Bits(0) % static_cast<uint64_t>(gradient.num_elements()));
  std::vector<Tensor> coordinate;
  coordinate.push_back(CoordinateDirection(gradient.shape(), place));
  std::vector<Tensor> drawn =
      RandomDirections(gradient.shape(), kDirections, kSeed, LabelOf(job().problem));
  for (const std::vector<Tensor>* directions : {&drawn, &coordinate}) {
    if (directions == &coordinate && job().problem.dtype != DType::kF32) continue;
    const auto slopes = definition->Along(variable, *directions);
    ASSERT_TRUE(slopes.ok()) << slopes.status();
    for (size_t n = 0; n < directions->size(); ++n) {
      const Slope& slope = (*slopes)[n];
      const double own = InnerProduct(gradient.view(), (*directions)[n].view());
      EXPECT_LE(std::abs(own - slope.value), slope.bound)
          << "gradient of " << key << " " << ShapeString(gradient.shape()) << ", along "
          << (directions == &drawn ? absl::StrCat("direction ", n)
                                   : absl::StrCat("coordinate ", place))
          << ": " << own << ", the definition says " << slope.value;
    }
  }
}

void GradientTrial::ExpectMatchesDefinition(const NamedTensors& gradients, int parameters) {
  if (gradients.empty()) return;  // the run has failed already
  auto definition = Definition();
  ASSERT_TRUE(definition.ok()) << definition.status();
  std::vector<Variable> inputs_then_parameters = Variables();
  const auto first_parameter =
      std::find_if(inputs_then_parameters.begin(), inputs_then_parameters.end(),
                   [](const Variable& variable) { return variable.is_parameter; });
  const auto count = inputs_then_parameters.end() - first_parameter;
  if (count > parameters) {
    const RandomStream random(kSeed, LabelOf(job().problem));
    std::rotate(first_parameter, first_parameter + static_cast<int64_t>(random.Bits(0) % count),
                inputs_then_parameters.end());
    inputs_then_parameters.resize(inputs_then_parameters.size() - count + parameters);
  }
  for (const Variable& variable : inputs_then_parameters) {
    if (gradients.count(variable.ToString()) == 0) continue;
    ExpectMatchesDefinition(gradients, variable, &*definition);
  }
}

}  // namespace tfb::conformance
