#include "harness/judge/judge_gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/status.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/gradients.h"

namespace tfb {
namespace {

// An estimate of a bound in 16 bits needs two directions (harness/judge/gradients.h).
int Directions(DType dtype) { return dtype == DType::kF32 ? 1 : 2; }

// Returns the variables whose gradients are judged together: each input alone, those whose slopes
// may vanish behind others (values before keys), then all parameters.
std::vector<std::vector<Variable>> Groups(const NamedTensors& inputs, const Layer& layer,
                                          const LayerRun& run) {
  const std::map<std::string, std::string> estimated = layer.estimated_gradients();
  std::vector<std::vector<Variable>> groups;
  std::vector<Variable> parameters;
  const auto is_judged = [&](const std::string& name, const Tensor& gradient) {
    return estimated.count(name) == 0 && gradient.num_elements() > 0;
  };
  for (const auto& [name, gradient] : run.input_gradients) {
    if (inputs.count(name) == 0) continue;  // an optional one
    if (is_judged(name, gradient)) groups.push_back({Variable{false, name}});
  }
  std::reverse(groups.begin(), groups.end());  // by name: v, then q, then k
  for (const auto& [name, gradient] : run.parameter_gradients) {
    if (is_judged(name, gradient)) parameters.push_back({true, name});
  }
  if (!parameters.empty()) groups.push_back(std::move(parameters));
  return groups;
}

double Along(const LayerRun& run, const Direction& direction) {
  double sum = 0;
  for (const auto& [variable, tensor] : direction) {
    const NamedTensors& gradients =
        variable.is_parameter ? run.parameter_gradients : run.input_gradients;
    sum += InnerProduct(gradients.at(variable.name).view(), tensor.view());
  }
  return sum;
}

// Returns the error in units of the terms' norm; where that is 0, an absolute one, whose bound is
// what the differences resolve.
Bounded ErrorOf(double own, const Slope& slope) {
  const double unit = slope.terms > 0 ? slope.terms : 1;
  return {std::abs(own - slope.value) / unit, slope.bound / unit};
}

// Returns the error over its bound; a NaN is worse than any number.
double ShareOfBound(const Bounded& error) {
  if (std::isnan(error.value)) return std::numeric_limits<double>::infinity();
  return error.value == 0 ? 0 : error.value / error.bound;
}

}  // namespace

absl::StatusOr<std::vector<GradientError>> JudgeGradients(const EvaluateRequest& request,
                                                          const Layer& layer, const LayerRun& run) {
  // The definition makes the choices that the layer's run made.
  NamedTensors inputs;
  for (const auto& [name, tensor] : *request.inputs) inputs[name] = tensor.Clone();
  const std::string& selection = request.job.technique->info().selection;
  if (!selection.empty()) inputs[selection] = run.outputs.at(selection).Clone();
  TFB_ASSIGN_OR_RETURN(
      DefinitionGradient definition,
      DefinitionGradient::At(
          request.job,
          {&inputs, &layer.parameters(), request.output_gradients, &run.outputs, request.rows},
          request.pool));
  std::vector<GradientError> errors;
  for (const std::vector<Variable>& group : Groups(inputs, layer, run)) {
    std::vector<Direction> directions;
    for (int n = 0; n < Directions(request.job.problem.dtype); ++n) {
      directions.push_back(
          definition.RandomDirection(group, request.job.seed, absl::StrCat("direction ", n)));
    }
    TFB_ASSIGN_OR_RETURN(const std::vector<Slope> slopes, definition.Along(directions));
    const bool are_parameters = group.front().is_parameter;
    GradientError worst = {are_parameters ? kParameters : group.front().name,
                           ErrorOf(Along(run, directions[0]), slopes[0])};
    for (size_t n = 1; n < slopes.size(); ++n) {
      const Bounded error = ErrorOf(Along(run, directions[n]), slopes[n]);
      if (ShareOfBound(error) > ShareOfBound(worst.error)) worst.error = error;
    }
    errors.push_back(std::move(worst));
  }
  return errors;
}

absl::StatusOr<std::vector<GradientError>> EvaluateGradients(const EvaluateRequest& request,
                                                             Layer* layer) {
  EvaluateRequest of_rows = request;
  const NamedTensors gradients =
      KeepRows(*request.output_gradients, request.job.problem, request.rows);
  of_rows.output_gradients = &gradients;
  TFB_ASSIGN_OR_RETURN(const DeviceTensors read,
                       DeviceTensors::Of(request.job.device, ViewsOf(*request.inputs)));
  TFB_ASSIGN_OR_RETURN(const LayerRun run, RunOnce(layer, request.job.device, read.inputs(),
                                                   request.pool, of_rows.output_gradients));
  return JudgeGradients(of_rows, *layer, run);
}

NamedTensors KeepRows(const NamedTensors& output_gradients, const Problem& problem,
                      const std::vector<int64_t>& rows) {
  NamedTensors kept;
  for (const auto& [name, gradient] : output_gradients) {
    Tensor& copy = kept[name] = gradient.Clone();
    const int axis = copy.view().rank - (name == "log_sum_exp" ? 1 : 2);
    if (rows.empty() || axis < 0 || copy.dim(axis) != problem.query_tokens) continue;
    for (int64_t row = 0; row < problem.query_tokens; ++row) {
      if (std::binary_search(rows.begin(), rows.end(), row)) continue;
      Fill(Slice(copy.view(), axis, row, 1), 0);
    }
  }
  return kept;
}

void RecordGradients(const std::vector<GradientError>& errors, Outcome* outcome) {
  outcome->set_status(Outcome::STATUS_OK);
  for (const GradientError& one : errors) {
    NamedError* record = outcome->add_gradient_errors();
    record->set_name(one.name);
    record->mutable_error()->set_value(one.error.value);
    record->mutable_error()->set_bound(one.error.bound);
    record->mutable_error()->set_passed(one.error.passed());
    if (one.error.passed() || outcome->status() == Outcome::STATUS_FAILED) continue;
    outcome->set_status(Outcome::STATUS_FAILED);
    outcome->set_reason(absl::StrFormat("error of the gradient of %s is %.3g, its bound %.3g",
                                        one.name, one.error.value, one.error.bound));
  }
}

}  // namespace tfb
