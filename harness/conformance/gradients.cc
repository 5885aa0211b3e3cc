// Tests backward passes: gradients against the directional derivatives of the float64 definition,
// what has no gradient, and what gradients may not depend on. harness/judge/gradients.h derives the
// bounds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/conformance/allocation_meter.h"
#include "harness/conformance/drawn.h"
#include "harness/conformance/gradient_trial.h"
#include "harness/conformance/trial.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/errors.h"

namespace tfb::conformance {
namespace {

constexpr int kAllParameters = std::numeric_limits<int>::max();
const std::string kQ = Variable{false, "q"}.ToString();
const std::string kK = Variable{false, "k"}.ToString();
const std::string kV = Variable{false, "v"}.ToString();

void TheyAreThoseOfTheDefinition(const Job& job) {
  if (const auto trial = GradientTrial::Make(job)) {
    trial->ExpectMatchesDefinition(trial->Backward());
  }
}

void EveryParameterHasItsGradient(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  if (trial->layer().parameter_gradients().empty()) {
    return Skip("the technique has no parameters with gradients");
  }
  trial->ExpectMatchesDefinition(trial->Backward(), kAllParameters);
}

// What SetUpBackward prepares is of the parameters that the layer has then.
void ChangedParametersChangeThem(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  Layer& layer = trial->layer();
  if (layer.parameters().empty()) return Skip("the technique has no parameters");
  if (trial->Backward().empty()) return;
  const absl::Status set = layer.SetParameters(Smaller(layer.parameters()));
  ASSERT_TRUE(set.ok()) << set;
  if (!trial->FreezeChoices()) return;
  trial->ExpectMatchesDefinition(trial->Backward());
}

// Directional derivatives need a definition that reads float64 as it is.
void TheDefinitionReadsNumbersInDouble(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const auto in_double = [](const NamedTensors& tensors) {
    NamedTensors copies;
    for (const auto& [name, tensor] : tensors) {
      copies[name] = IsFloating(tensor.dtype()) ? tensor.CloneAs(DType::kF64) : tensor.Clone();
    }
    return copies;
  };
  const NamedTensors inputs = in_double(trial->inputs());
  ExpectSameBits(trial->trial().Define(),
                 trial->trial().DefineOn(ViewsOf(inputs), in_double(trial->layer().parameters()),
                                         /*weights=*/false),
                 "a definition of numbers in their dtypes and in float64");
}

void EveryGradientIsGivenOrStoppedWithAReason(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const Layer& layer = trial->layer();
  std::set<std::string> floating, outputs;
  for (const TensorSpec& spec : layer.inputs()) {
    if (IsFloating(spec.dtype)) floating.insert(spec.name);
  }
  for (const auto& [name, parameter] : layer.parameters()) {
    if (IsFloating(parameter.dtype())) floating.insert(name);
  }
  for (const auto& reasons : {layer.stopped_gradients(), layer.estimated_gradients()}) {
    for (const auto& [name, reason] : reasons) {
      EXPECT_EQ(floating.count(name), 1u) << name << " is no input or parameter of floating dtype";
      EXPECT_FALSE(reason.empty()) << name;
    }
  }
  for (const TensorSpec& spec : layer.outputs()) {
    if (IsFloating(spec.dtype)) outputs.insert(spec.name);
  }
  const std::vector<std::string> differentiable = layer.differentiable_outputs();
  EXPECT_NE(std::find(differentiable.begin(), differentiable.end(), "out"), differentiable.end());
  for (const std::string& name : differentiable) {
    EXPECT_EQ(outputs.count(name), 1u) << name << " is no output of floating dtype";
  }
  EXPECT_FALSE(trial->Variables().empty()) << "Backward writes no gradient";
}

// Calls visit(batch, head, token, element) for the elements of [batch, heads, tokens, channels].
void ForEachElement(const Tensor& tensor,
                    const std::function<void(int64_t, int64_t, int64_t, double)>& visit) {
  const ConstTensorView view = tensor.view();
  for (int64_t n = 0; n < tensor.num_elements(); ++n) {
    const int64_t row = n / view.dim(3);
    visit(row / view.dim(2) / view.dim(1), row / view.dim(2) % view.dim(1), row % view.dim(2),
          view.Get(n));
  }
}

// Expects that the gradients of queries whose row sees no key are 0, where the definition says by
// its log_sum_exp which do. Returns how many such rows there are.
int64_t ExpectRowsWithoutKeysHaveNoGradient(GradientTrial* trial, const NamedTensors& gradients) {
  const auto gradient = gradients.find(kQ);
  const NamedTensors defined = trial->trial().Define();
  const auto lse = defined.find("log_sum_exp");
  if (gradient == gradients.end() || lse == defined.end()) return 0;
  std::set<std::vector<int64_t>> rows;
  ForEachElement(gradient->second, [&](int64_t b, int64_t h, int64_t i, double value) {
    const ConstTensorView view = lse->second.view();
    if (*view.At<double>(b, h, i) != -std::numeric_limits<double>::infinity()) return;
    rows.insert({b, h, i});
    EXPECT_EQ(value, 0) << "query " << i << " of head " << h << ", batch " << b
                        << ", which sees no key";
  });
  return static_cast<int64_t>(rows.size());
}

void ExpectFinite(const NamedTensors& gradients) {
  for (const auto& [name, tensor] : gradients) {
    for (int64_t n = 0; n < tensor.num_elements(); ++n) {
      ASSERT_TRUE(std::isfinite(tensor.view().Get(n))) << name << "[" << n << "]";
    }
  }
}

void QueriesBeforeAllKeysHaveNone(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireExact() || !trial->trial().RequireQkv()) return;
  const NamedTensors gradients = trial->Backward();
  trial->ExpectMatchesDefinition(gradients);
  ExpectFinite(gradients);
  EXPECT_GT(ExpectRowsWithoutKeysHaveNoGradient(trial.get(), gradients), 0);
}

void MaskKeys(GradientTrial* trial, int64_t batch, int64_t begin, int64_t end) {
  const TensorView mask = trial->inputs()["key_mask"].view();
  ASSERT_LT(batch, mask.dim(0));
  for (int64_t j = begin; j < end; ++j) *mask.MutableAt<uint8_t>(batch, j) = 0;
}

void AFullyMaskedBatchHasNone(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireKeyMask()) return;
  MaskKeys(trial.get(), 0, 0, job.problem.kv_tokens);
  if (!trial->FreezeChoices()) return;
  const NamedTensors gradients = trial->Backward();
  trial->ExpectMatchesDefinition(gradients);
  ExpectFinite(gradients);
  ExpectRowsWithoutKeysHaveNoGradient(trial.get(), gradients);
}

// Gives the elements of masked keys, and of their values, a value.
void FillMasked(GradientTrial* trial, double value) {
  const ConstTensorView mask = trial->inputs().at("key_mask").view();
  for (const char* name : {"k", "v"}) {
    if (trial->inputs().count(name) == 0) continue;
    const TensorView rows = trial->inputs()[name].view();
    for (int64_t b = 0; b < mask.dim(0); ++b) {
      for (int64_t j = 0; j < mask.dim(1); ++j) {
        if (*mask.At<uint8_t>(b, j) == 0) Fill(Slice(Slice(rows, 0, b, 1), 2, j, 1), value);
      }
    }
  }
}

// The gradient of a masked key is exactly 0, and what the key and its value hold reaches no other.
void MaskedKeysHaveNoneAndReachNone(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireKeyMask() || !trial->trial().RequireQkv()) return;
  const int64_t keys = job.problem.kv_tokens;
  MaskKeys(trial.get(), 0, 3, keys - 7);  // a hole over an edge of tiles
  MaskKeys(trial.get(), 1, keys - 1, keys);
  FillMasked(trial.get(), 0);
  if (!trial->FreezeChoices()) return;
  const NamedTensors gradients = trial->Backward();
  if (gradients.empty()) return;
  trial->ExpectMatchesDefinition(gradients);
  const ConstTensorView mask = trial->inputs().at("key_mask").view();
  for (const std::string& name : {kK, kV}) {
    const auto gradient = gradients.find(name);
    if (gradient == gradients.end()) continue;
    ForEachElement(gradient->second, [&](int64_t b, int64_t, int64_t j, double value) {
      if (*mask.At<uint8_t>(b, j) != 0) return;
      EXPECT_EQ(value, 0) << name << ": masked key " << j << " of batch " << b;
    });
  }
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    FillMasked(trial.get(), value);
    ExpectSameBits(gradients, trial->Backward(),
                   absl::StrCat("0 and ", value, " in masked keys and values"));
  }
}

// Outputs up to token t do not depend on later tokens, which so have no gradient of them.
void TheFutureHasNoneOfThePast(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  for (const int64_t t : {int64_t{0}, int64_t{63}, job.problem.query_tokens - 2}) {
    NamedTensors drawn = Copies(trial->output_gradients());
    for (auto& [name, gradient] : trial->output_gradients()) {
      const int axis = name == "log_sum_exp" ? 2 : TokenAxis(gradient.view());
      if (gradient.dim(axis) != job.problem.query_tokens) continue;
      Fill(Slice(gradient.view(), axis, t + 1, gradient.dim(axis) - t - 1), 0);
    }
    for (const auto& [name, gradient] : trial->Backward()) {
      if (name != kQ && name != kK && name != kV && name != Variable{false, "x"}.ToString()) {
        continue;
      }
      const int axis = TokenAxis(gradient.view());
      const ConstTensorView later = Slice(gradient.view(), axis, t + 1, gradient.dim(axis) - t - 1);
      EXPECT_EQ(LargestMagnitude(later), 0) << name << " after token " << t;
    }
    trial->output_gradients() = std::move(drawn);
  }
}

// Where all values are the same, the outputs do not depend on the weights.
void ConstantValuesGiveQueriesAndKeysNone(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireQkv() || !trial->trial().RequireExact()) return;
  Fill(trial->inputs().at("v").view(), -3.25);
  trial->output_gradients().erase("log_sum_exp");
  const NamedTensors gradients = trial->Backward();
  if (gradients.empty()) return;
  auto definition = trial->Definition();
  ASSERT_TRUE(definition.ok()) << definition.status();
  for (const Variable& variable : trial->Variables()) {
    if (variable.is_parameter || (variable.name != "q" && variable.name != "k")) continue;
    const Tensor& gradient = gradients.at(variable.ToString());
    const std::vector<Tensor> directions =
        RandomDirections(gradient.shape(), 3, kSeed, variable.name);
    const auto slopes = definition->Along(variable, directions);
    ASSERT_TRUE(slopes.ok()) << slopes.status();
    for (size_t n = 0; n < directions.size(); ++n) {
      if (std::abs((*slopes)[n].value) > (*slopes)[n].bound) {
        return Skip("the definition is no mean of the values");
      }
      EXPECT_LE(std::abs(InnerProduct(gradient.view(), directions[n].view())), (*slopes)[n].bound)
          << variable.ToString();
    }
  }
}

void Scale(Tensor* tensor, double factor) {
  const TensorView view = tensor->view();
  for (int64_t n = 0; n < view.num_elements(); ++n) view.Set(n, factor * view.Get(n));
}

// Scores are about +-1e4, and no number may overflow. Outputs are linear in the values, so that
// differences by them are derivatives, however steep the weights.
void OfScoresOf1e4(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireQkv() || !trial->trial().RequireExact()) return;
  Scale(&trial->inputs().at("q"), 100);
  if (trial->inputs().count("k") > 0) Scale(&trial->inputs().at("k"), 100);
  if (!trial->FreezeChoices()) return;
  const NamedTensors gradients = trial->Backward();
  ExpectFinite(gradients);
  auto definition = trial->Definition();
  ASSERT_TRUE(definition.ok()) << definition.status();
  if (gradients.count(kV) > 0) {
    trial->ExpectMatchesDefinition(gradients, {false, "v"}, &*definition);
  }
}

// Where outputs are linear in the values, so are the gradients of queries and keys, and those of
// values are independent of them. A power of two scales without rounding.
void ScaledValuesScaleThoseOfQueriesAndKeys(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireQkv() || !trial->trial().RequireExact()) return;
  trial->output_gradients().erase("log_sum_exp");
  const double factor = std::ldexp(1.0, 20);
  const NamedTensors before = trial->trial().Define();
  NamedTensors gradients = trial->Backward();
  Scale(&trial->inputs().at("v"), factor);
  const NamedTensors scaled = trial->trial().Define();
  const NamedTensors of_scaled = trial->Backward();
  if (gradients.empty() || of_scaled.empty()) return;
  const Tensor &out = before.at("out"), &scaled_out = scaled.at("out");
  for (int64_t n = 0; n < out.num_elements(); ++n) {
    const double expected = factor * out.view().Get(n);
    if (std::abs(scaled_out.view().Get(n) - expected) > 1e-9 * factor) {
      return Skip("the definition is not linear in the values");
    }
  }
  for (const std::string& name : {kQ, kK, kV}) {
    const auto found = gradients.find(name);
    if (found == gradients.end()) continue;
    const Tensor& other = of_scaled.at(name);
    for (int64_t n = 0; n < other.num_elements(); ++n) {
      ASSERT_EQ(other.view().Get(n), (name == kV ? 1 : factor) * found->second.view().Get(n))
          << name << "[" << n << "]";
    }
  }
}

void ViewsGiveWhatContiguousTensorsGive(const Job& job, Layout inputs, Layout gradients) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  if (inputs == Layout::kBroadcast) {
    for (NamedTensors* tensors : {&trial->inputs(), &trial->output_gradients()}) {
      for (auto& entry : *tensors) MakeEqualAlongBatchAndHeads(&entry.second);
    }
  }
  StepSettings settings;
  settings.inputs = inputs;
  settings.gradients = gradients;
  const NamedTensors strided = trial->Backward(settings);
  ExpectSameBits(trial->Backward(), strided, "strided and contiguous");
}

// Fifty passes. In the simulator each runs blocks and threads in another order, so that a few tell as
// much, unless IsExhaustive; a GPU has a different order every time.
void RepeatedBackwardPassesGiveTheSameBits(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const int passes = job.device == Device::kSimulator && !IsExhaustive() ? 4 : 50;
  const NamedTensors first = trial->Backward();
  StepSettings again = StepSettings::WithoutSetup();
  for (int n = 1; n < passes && !::testing::Test::HasFailure(); ++n) {
    ++again.schedule;
    ExpectSameBits(first, trial->Backward(again), absl::StrCat("pass 0 and ", n));
  }
}

void AnyNumberOfThreadsGivesTheSameBits(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors one = trial->Backward(StepSettings::Threads(1));
  // On a device the threads are the host's, which do not matter there.
  const bool on_cpu = job.device == Device::kCpu;
  for (const int threads : on_cpu ? std::vector<int>{2, 3, 5} : std::vector<int>{5}) {
    ExpectSameBits(one, trial->Backward(StepSettings::Threads(threads)),
                   absl::StrCat("1 and ", threads, " threads"));
  }
}

// Gives `to` the first batch row of `from`, by name.
void CopyFirstBatch(const NamedTensors& from, NamedTensors* to) {
  for (auto& [name, tensor] : *to) {
    ASSERT_EQ(tensor.dim(0), 1) << name << " has no batch";
    CopyElements(Slice(from.at(name).view(), 0, 0, 1), tensor.view());
  }
}

// Where cuBLAS computes products, whose order of sums depends on the number of rows, both results are
// held to the bounds of the definition of that batch row in place of the bits.
void ABatchRowDoesNotDependOnItsCompany(const Job& job) {
  ASSERT_GT(job.problem.batch, 1);
  const auto both = GradientTrial::Make(job);
  Problem single = job.problem;
  single.batch = 1;
  const auto alone = both == nullptr ? nullptr : GradientTrial::Make(On(single, job));
  if (alone == nullptr) return;
  for (const auto& [name, tensor] : alone->layer().parameters()) {
    if (both->layer().parameters().at(name).shape() != tensor.shape()) {
      return Skip(absl::StrCat("parameter ", name, " has the batch's size"));
    }
  }
  CopyFirstBatch(both->inputs(), &alone->inputs());
  CopyFirstBatch(both->output_gradients(), &alone->output_gradients());
  const int64_t products = CublasProducts(job.device);
  const NamedTensors of_both = both->Backward();
  NamedTensors of_one = alone->Backward(), firsts;
  if (of_both.empty() || of_one.empty()) return;
  for (const Variable& variable : alone->Variables()) {
    const std::string name = variable.ToString();
    if (variable.is_parameter) {
      of_one.erase(name);  // a sum over the batch
      continue;
    }
    firsts[name] = Tensor(of_one.at(name).dtype(), of_one.at(name).shape());
    CopyElements(Slice(of_both.at(name).view(), 0, 0, 1), firsts[name].view());
  }
  if (CublasProducts(job.device) == products) {
    return ExpectSameBits(of_one, firsts, "alone and beside another batch row");
  }
  alone->ExpectMatchesDefinition(of_one);
  alone->ExpectMatchesDefinition(firsts);
}

// Each gradient is left out alone, and asked for alone; of many, the first few.
void ThoseThatAreLeftOutChangeNoOthers(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors all = trial->Backward();
  if (all.empty()) return;
  std::set<std::string> every;
  for (const auto& entry : all) every.insert(entry.first);
  const auto expect_same_without = [&](const std::set<std::string>& left_out) {
    StepSettings settings = StepSettings::WithoutSetup();
    settings.left_out = left_out;
    for (const auto& [name, gradient] : trial->Backward(settings)) {
      EXPECT_TRUE(SameBits(gradient.view(), all.at(name).view())) << name << " changed";
    }
  };
  int64_t tried = 0;
  for (const std::string& name : every) {
    if (tried++ == 6) break;
    SCOPED_TRACE(name);
    expect_same_without({name});
    std::set<std::string> others = every;
    others.erase(name);
    expect_same_without(others);
  }
  expect_same_without(every);
}

void ExpectSameNumbers(const NamedTensors& a, const NamedTensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    for (int64_t n = 0; n < tensor.num_elements(); ++n) {
      ASSERT_EQ(tensor.view().Get(n), b.at(name).view().Get(n))
          << what << ": " << name << "[" << n << "]";
    }
  }
}

void AnOutputsGradientThatIsLeftOutIsZero(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  const NamedTensors drawn = Copies(trial->output_gradients());
  for (const auto& entry : drawn) {
    trial->output_gradients() = Copies(drawn);
    Fill(trial->output_gradients()[entry.first].view(), 0);
    const NamedTensors with_zeros = trial->Backward();
    trial->output_gradients().erase(entry.first);
    ExpectSameNumbers(with_zeros, trial->Backward(),
                      absl::StrCat("a gradient of 0 and none of ", entry.first));
  }
  trial->output_gradients().clear();
  for (const auto& [name, gradient] : trial->Backward()) {
    EXPECT_EQ(LargestMagnitude(gradient.view()), 0) << name << " without any output's gradient";
  }
}

// A Backward reads the memory that its own Run kept, whatever ran since.
void OtherRunsInBetweenChangeNothing(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  const auto other = trial == nullptr ? nullptr : GradientTrial::Make(job, kSeed + 1);
  if (other == nullptr) return;
  const NamedTensors own_inputs = Copies(trial->inputs());
  const NamedTensors first = trial->Backward();
  trial->inputs() = Copies(other->inputs());
  const NamedTensors second = trial->Backward(StepSettings::WithoutSetup());
  if (first.empty() || second.empty()) return;

  trial->inputs() = Copies(own_inputs);
  const auto one = trial->Run(StepSettings::WithoutSetup());
  trial->inputs() = Copies(other->inputs());
  const auto two = trial->Run(StepSettings::WithoutSetup());
  if (one == nullptr || two == nullptr) return;
  if (trial->trial().Run(RunSettings::WithoutSetup()).empty()) return;
  ExpectSameBits(first, trial->Backward(one.get()), "a backward pass at once, and after two runs");
  ExpectSameBits(second, trial->Backward(two.get()),
                 "a backward pass at once, and after another and a run");
}

// A Run that keeps memory is a Run.
void OutputsOfARunThatKeepsMemoryAreRight(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  const auto step = trial == nullptr ? nullptr : trial->Run();
  if (step != nullptr) trial->trial().ExpectMatchesDefinition(step->outputs());
}

// Gradients of a step, in the memory of the device, and the call that writes them.
struct BoundCall {
  DeviceTensors output_gradients, inputs, parameters;
  BackwardCall call;
};
absl::StatusOr<BoundCall> Bind(GradientTrial* trial, Step* step) {
  const Device device = trial->job().device;
  BoundCall bound;
  TFB_ASSIGN_OR_RETURN(bound.output_gradients,
                       DeviceTensors::Of(device, ViewsOf(trial->output_gradients())));
  std::vector<TensorSpec> inputs, parameters;
  for (const TensorSpec& spec : trial->layer().input_gradients()) {
    if (trial->inputs().count(spec.name) > 0) inputs.push_back(spec);
  }
  TFB_ASSIGN_OR_RETURN(bound.inputs, DeviceTensors::Allocate(device, inputs, true));
  TFB_ASSIGN_OR_RETURN(bound.parameters,
                       DeviceTensors::Allocate(device, trial->layer().parameter_gradients(), true));
  bound.call = step->call();
  bound.call.output_gradients = bound.output_gradients.inputs();
  bound.call.input_gradients = bound.inputs.outputs();
  bound.call.parameter_gradients = bound.parameters.outputs();
  return bound;
}

void BackwardAllocatesNothing(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  for (const int threads : {1, 2}) {
    const auto step = trial->Run(StepSettings::Threads(threads));
    if (step == nullptr) return;
    const auto bound = Bind(trial.get(), step.get());
    ASSERT_TRUE(bound.ok()) << bound.status();
    const Execution execution = step->execution();
    const auto runtime = RuntimeOf(job.device);
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    // The first pass counts as well: a layer must not postpone allocations to it.
    for (int pass = 0; pass < 2; ++pass) {
      const AllocationMeter meter(*runtime);
      const absl::Status status = trial->layer().Backward(bound->call, execution);
      const int64_t allocations = meter.count();
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(allocations, 0) << "in pass " << pass << " with " << threads << " threads";
    }
    EXPECT_TRUE(Synchronize(*runtime).ok());
  }
}

void ExpectError(const absl::Status& status, absl::StatusCode code, absl::string_view part) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
}

// Returns the views with the first one's first dimension a row shorter, and its name.
template <class Views>
Views Shortened(const Views& views, std::string* name) {
  Views wrong = views;
  for (const auto& [each, view] : views) {
    if (view.empty() || view.dim(0) == 0) continue;
    *name = each;
    wrong.Set(each, Slice(view, 0, 0, view.dim(0) - 1));
    break;
  }
  return wrong;
}

void WrongCallsAreRefusedWithAReason(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr) return;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kEarly = absl::StatusCode::kFailedPrecondition;
  const auto fresh = job.CreateLayer();
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  ExpectError((*fresh)->SetUpBackward({}, {}), kEarly, "Setup must be called");
  ExpectError((*fresh)->Backward({}, {}), kEarly, "SetUpBackward must be called");

  Layer& layer = trial->layer();
  const auto step = trial->Run();
  if (step == nullptr) return;
  const auto bound = Bind(trial.get(), step.get());
  ASSERT_TRUE(bound.ok()) << bound.status();
  const BackwardCall& good = bound->call;
  const Execution execution = step->execution();
  const auto refused = [&](const BackwardCall& call, absl::string_view part) {
    ExpectError(layer.Backward(call, execution), kInvalid, part);
  };
  BackwardCall wrong = good;
  wrong.outputs = {};
  refused(wrong, "output out");
  wrong = good;
  wrong.inputs = {};
  refused(wrong, "missing");
  std::string name;
  wrong = good;
  wrong.output_gradients = Shortened(good.output_gradients, &name);
  refused(wrong, absl::StrCat("output gradient ", name, " has shape"));
  wrong = good;
  wrong.input_gradients = Shortened(good.input_gradients, &name);
  refused(wrong, absl::StrCat("input gradient ", name, " has shape"));
  if (good.parameter_gradients.size() > 0) {
    wrong = good;
    wrong.parameter_gradients = Shortened(good.parameter_gradients, &name);
    refused(wrong, absl::StrCat("parameter gradient ", name, " has shape"));
  }
  const TensorView any = good.input_gradients.begin()->second;
  wrong = good;
  wrong.output_gradients.Set("no_such_output", any);
  refused(wrong, "no output gradient \"no_such_output\"");
  wrong = good;
  wrong.input_gradients.Set("no_such_input", any);
  refused(wrong, "no input gradient \"no_such_input\"");
  wrong = good;
  wrong.parameter_gradients.Set("no_such_parameter", any);
  refused(wrong, "no parameter gradient \"no_such_parameter\"");
  for (const auto& [stopped, reason] : layer.stopped_gradients()) {
    wrong = good;
    const bool is_parameter = layer.parameters().count(stopped) > 0;
    (is_parameter ? wrong.parameter_gradients : wrong.input_gradients).Set(stopped, any);
    refused(wrong, absl::StrCat("\"", stopped, "\""));
  }

  const auto refused_in = [&](const Execution& other, absl::string_view part) {
    ExpectError(layer.Backward(good, other), kInvalid, part);
  };
  Execution other = execution;
  other.pool = nullptr;
  refused_in(other, "pool");
  for (absl::Span<std::byte> Execution::*memory : {&Execution::workspace, &Execution::kept}) {
    // A layer that keeps nothing gets a byte, by which its Run knows that a Backward follows.
    const size_t needed =
        memory == &Execution::kept ? layer.kept_bytes() : execution.workspace.size();
    if (needed == 0) continue;
    std::byte* const begin = (execution.*memory).data();
    other = execution;
    other.*memory = absl::MakeSpan(begin, needed - 1);
    refused_in(other, absl::StrCat(needed));
    other.*memory = absl::MakeSpan(begin + 1, needed);
    refused_in(other, "aligned");
  }
  EXPECT_TRUE(layer.Backward(good, execution).ok());
}

// Returns the dense counterpart's job and whether it is the technique itself.
absl::StatusOr<std::pair<Job, bool>> CounterpartOf(const Job& job) {
  TFB_ASSIGN_OR_RETURN(const TechniqueSpec spec,
                       job.technique->Counterpart(job.problem, job.options));
  Job counterpart = job;
  TFB_ASSIGN_OR_RETURN(counterpart.technique, Registry::Global().Find(spec.technique));
  TFB_ASSIGN_OR_RETURN(counterpart.options, counterpart.technique->Canonical(spec.options));
  TFB_ASSIGN_OR_RETURN(const Options own, job.technique->Canonical(job.options));
  const bool is_self = counterpart.technique == job.technique && counterpart.options == own;
  if (is_self) return std::make_pair(counterpart, true);
  TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer, counterpart.CreateLayer());
  TFB_RETURN_IF_ERROR(layer->CheckBackward());
  return std::make_pair(counterpart, false);
}

// The errors of a gradient of 16 bits, or their geometric means over draws: |y - r| / |r| over all
// elements, of the definition's gradient r.
struct GradientErrors {
  double own = 0;
  double dense = 0;
  double rounding = 0;  // of r, rounded: no other y of the dtype has a smaller error
};

absl::StatusOr<double> RelativeError(const Tensor& gradient, const Tensor& reference) {
  TFB_ASSIGN_OR_RETURN(const OutputError error, CompareOutput(gradient.view(), reference.view(),
                                                              /*rows=*/{}, /*max_value=*/1));
  return error.relative_frobenius;
}

// Returns a trial of the dense counterpart on the tensors of the trial, or null as
// GradientTrial::Make does. Both have a gradient of the output `out`, but none of log_sum_exp.
std::unique_ptr<GradientTrial> DenseTrialBeside(const Job& counterpart, uint64_t seed,
                                                GradientTrial* trial) {
  auto dense = GradientTrial::Make(counterpart, seed);
  if (dense == nullptr) return nullptr;
  for (auto& [name, tensor] : dense->inputs()) {
    const auto own = trial->inputs().find(name);
    if (own != trial->inputs().end() && own->second.shape() == tensor.shape()) {
      tensor = own->second.Clone();
    }
  }
  for (NamedTensors* of : {&trial->output_gradients(), &dense->output_gradients()}) {
    of->erase("log_sum_exp");
  }
  dense->output_gradients()["out"] = trial->output_gradients().at("out").Clone();
  return dense;
}

// Returns the errors of the gradients of all inputs that both have, by Variable::ToString; an empty
// result, with the test failed, where a call failed.
absl::StatusOr<std::map<std::string, GradientErrors>> ErrorsBeside(GradientTrial* dense,
                                                                   GradientTrial* trial) {
  std::map<std::string, GradientErrors> errors;
  const NamedTensors gradients = trial->Backward(), of_dense = dense->Backward();
  if (gradients.empty() || of_dense.empty()) return errors;
  TFB_ASSIGN_OR_RETURN(DefinitionGradient definition, trial->Definition());
  TFB_ASSIGN_OR_RETURN(DefinitionGradient dense_definition, dense->Definition());
  for (const Variable& variable : trial->Variables()) {
    const std::string key = variable.ToString();
    if (variable.is_parameter || of_dense.count(key) == 0) continue;
    TFB_ASSIGN_OR_RETURN(const Tensor exact, definition.Partial(variable));
    TFB_ASSIGN_OR_RETURN(const Tensor dense_exact, dense_definition.Partial(variable));
    GradientErrors& of_variable = errors[key];
    TFB_ASSIGN_OR_RETURN(of_variable.rounding,
                         RelativeError(exact.CloneAs(gradients.at(key).dtype()), exact));
    TFB_ASSIGN_OR_RETURN(of_variable.own, RelativeError(gradients.at(key), exact));
    TFB_ASSIGN_OR_RETURN(of_variable.dense, RelativeError(of_dense.at(key), dense_exact));
    // The counterpart may not depend on the input: its gradient is then 0 and has no error.
    of_variable.dense = std::max(of_variable.dense, of_variable.rounding);
  }
  return errors;
}

// Returns the geometric means of errors of several draws. Draws that have no error are left out:
// the gradient is 0 there.
GradientErrors GeometricMeans(const std::vector<GradientErrors>& draws) {
  GradientErrors logarithms;
  double count = 0;
  for (const GradientErrors& draw : draws) {
    if (draw.own == 0) continue;
    logarithms.own += std::log(draw.own);
    logarithms.dense += std::log(draw.dense);
    logarithms.rounding += std::log(draw.rounding);
    ++count;
  }
  if (count == 0) return {};
  return {std::exp(logarithms.own / count), std::exp(logarithms.dense / count),
          std::exp(logarithms.rounding / count)};
}

// The errors in 16 bits are at most twice those of the dense counterpart in the same precision on
// the same tensors, and one rounding of the definition's gradient.
//
// A gradient here has 80 elements. The largest error says little: even of 160 that of a sound
// technique was between 0.04 times and 5.8 times the counterpart's, from draw to draw. The
// error over all elements varies less, but a ReLU whose sign a rounding changes moves it by twenty
// times the rest, in this layer or in the counterpart. A sum of squares over draws would be that of
// one such draw; the geometric mean of 8 draws changes by 20^(1/8) = 1.5. By this measure sound
// techniques have 0.4 to 2.0 times the counterpart's error, and 2.9 times are allowed where both
// have little more than the rounding: a sum of 20 products that is rounded to bf16 after each has
// 3.4 times.
void SixteenBitsAreAsGoodAsDenseAttention(const Job& job) {
  constexpr uint64_t kDraws = 8;
  std::map<std::string, std::vector<GradientErrors>> draws;
  for (uint64_t seed = kSeed; seed < kSeed + kDraws; ++seed) {
    const auto trial = GradientTrial::Make(job, seed);
    if (trial == nullptr) return;
    if (seed == kSeed) trial->ExpectMatchesDefinition(trial->Backward());
    const auto counterpart = CounterpartOf(job);
    if (!counterpart.ok()) {
      std::cout << "  no ratio to dense attention: " << counterpart.status().message() << "\n";
      return;
    }
    if (counterpart->second) return;
    const auto dense = DenseTrialBeside(counterpart->first, seed, trial.get());
    if (dense == nullptr) return;
    const auto errors = ErrorsBeside(dense.get(), trial.get());
    ASSERT_TRUE(errors.ok()) << errors.status();
    for (const auto& [name, of_draw] : *errors) draws[name].push_back(of_draw);
  }
  for (const auto& [name, of_variable] : draws) {
    const GradientErrors mean = GeometricMeans(of_variable);
    EXPECT_LE(mean.own, 2 * mean.dense + mean.rounding)
        << name << ", dense has " << mean.dense << ", rounding alone " << mean.rounding;
  }
}

// Keys are the queries, so that a query's own key, with a score of 1.25^2 sqrt(128) = 18, has all but
// some 1e-5 of its weight. What is left of p (dp - D) there is smaller than an error of D by the
// rounding of the output to 16 bits, unless a gradient of the log-sum-exp outweighs both.
void OfOneKeyOfNearlyAllWeight(const Job& job) {
  const auto trial = GradientTrial::Make(job);
  if (trial == nullptr || !trial->trial().RequireQkv()) return;
  Scale(&trial->inputs().at("q"), 1.25);
  if (trial->inputs().count("k") > 0) {
    trial->inputs()["k"] = trial->inputs().at("q").Clone();
  }
  trial->output_gradients().erase("log_sum_exp");
  if (!trial->FreezeChoices()) return;
  trial->ForbidRoundedOutputs();
  trial->ExpectMatchesDefinition(trial->Backward(), /*parameters=*/0);
}

// TFB_PROPERTY_DRAWS sets the number of draws, TFB_PROPERTY_SEED others.
void ProblemsAndOptionsAtRandom(const Job& job) {
  std::mt19937_64 random = RandomOf(job.technique->info());
  const bool few = job.device == Device::kSimulator && !IsExhaustive();
  const int64_t draws = FromEnvironment("TFB_PROPERTY_DRAWS", few ? 3 : 5);
  int64_t tried = 0;
  for (int64_t attempt = 0; attempt < 20 * draws && tried < draws; ++attempt) {
    Job drawn = On(ProblemAtRandom(70, &random), job);
    drawn.options = OptionsAtRandom(job.technique->info(), drawn.problem, attempt, &random);
    const auto layer = drawn.CreateLayer();
    if (IsRefusal(layer.status()) || !(*layer)->CheckBackward().ok()) continue;
    const double flops = (*layer)->cost().flops.value_or(0);
    if (WouldTakeSeconds(job.device, flops + (*layer)->backward_cost().flops.value_or(0))) continue;
    SCOPED_TRACE(drawn.ToString());
    const auto trial = GradientTrial::Make(drawn);
    ASSERT_NE(trial, nullptr);
    const NamedTensors gradients = trial->Backward();
    trial->ExpectMatchesDefinition(gradients);
    // Threads of a device are the host's, and compute nothing there. The layer is another one, since Setup may
    // draw parameters anew.
    const auto again = job.device == Device::kCpu ? GradientTrial::Make(drawn) : nullptr;
    if (again != nullptr) {
      ExpectSameBits(gradients, again->Backward(StepSettings::Threads(3)), "2 threads and 3");
    }
    ++tried;
  }
  EXPECT_GT(tried, 0) << "every problem was refused";
}

Problem Sized(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t head_dim,
              int64_t value_dim, bool causal = false) {
  Problem problem = Problem::SelfAttention(batch, heads, queries, head_dim, causal);
  problem.kv_tokens = keys;
  problem.value_dim = value_dim;
  return problem;
}

// Returns the problems, alternately causal and not.
std::vector<Problem> Alternately(std::vector<Problem> problems) {
  bool causal = false;
  for (Problem& problem : problems) problem.causal = std::exchange(causal, !causal);
  return problems;
}

std::vector<Problem> Both(const Problem& problem) {
  Problem causal = problem;
  causal.causal = true;
  return {problem, causal};
}

Problem Grouped(int64_t query_heads, int64_t kv_heads) {
  Problem problem = Sized(1, query_heads, 40, 40, 8, 8);
  problem.kv_heads = kv_heads;
  return problem;
}

std::vector<Problem> SixteenBit(const Problem& sized) {
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (Problem problem : Both(sized)) {
      problem.dtype = dtype;
      problems.push_back(problem);
    }
  }
  return problems;
}

Case ViewCase(const std::string& name, const Problem& problem, Layout inputs, Layout gradients) {
  Case one = {name, "18", {problem}, [=](const Job& job) {
                ViewsGiveWhatContiguousTensorsGive(job, inputs, gradients);
              }};
  one.simulated_size = SimulatedSize::kFewerTokens;
  return one;
}

}  // namespace

std::vector<Case> GradientCases() {
  const Problem small = Sized(2, 2, 40, 40, 8, 8), tiles = Sized(2, 2, 70, 70, 8, 8);
  std::vector<Case> cases = {
      {"GradientsAreThoseOfTheDefinition", "", UsualBoth(), TheyAreThoseOfTheDefinition},
      {"GradientsOfTokensBelowAtAndAboveATile", "12",
       Alternately({Sized(1, 2, 63, 63, 8, 8), Sized(1, 2, 64, 64, 8, 8), Sized(1, 2, 65, 65, 8, 8),
                    Sized(1, 2, 129, 129, 8, 8), Sized(1, 1, 1, 1, 8, 8), Sized(1, 2, 3, 3, 8, 8)}),
       TheyAreThoseOfTheDefinition},
      {"GradientsOfChannelsThatFillNoVector", "15",
       Alternately({Sized(1, 2, 40, 40, 7, 5), Sized(1, 1, 40, 40, 1, 3),
                    Sized(1, 2, 40, 40, 19, 13), Sized(1, 1, 40, 40, 80, 80)}),
       TheyAreThoseOfTheDefinition},
      {"GradientsOfGroupedHeads", "17", Alternately({Grouped(4, 2), Grouped(3, 1), Grouped(6, 3)}),
       TheyAreThoseOfTheDefinition},
      {"GradientsOfKeysAndQueriesOfDifferentNumber",
       "14",
       {Sized(1, 2, 40, 70, 8, 8), Sized(1, 2, 40, 70, 8, 8, true), Sized(1, 2, 70, 40, 8, 8),
        Sized(1, 2, 1, 129, 8, 8, true)},
       TheyAreThoseOfTheDefinition},
      {"GradientsWithoutTokensKeysOrBatch", "10, 11",
       Alternately({Sized(1, 2, 0, 0, 8, 8), Sized(0, 2, 40, 40, 8, 8), Sized(1, 2, 5, 0, 8, 8),
                    Sized(1, 2, 0, 5, 8, 8)}),
       TheyAreThoseOfTheDefinition},
      {"EveryParameterHasItsGradient", "", Both(small), EveryParameterHasItsGradient},
      {"ChangedParametersChangeTheGradients", "", Both(small), ChangedParametersChangeThem},
      {"TheDefinitionReadsNumbersInDouble", "", Both(small), TheDefinitionReadsNumbersInDouble},
      {"EveryGradientIsGivenOrStoppedWithAReason", "", Both(small),
       EveryGradientIsGivenOrStoppedWithAReason},
      OfCausality({"QueriesBeforeAllKeysHaveNoGradient",
                   "1",
                   {Sized(1, 2, 70, 40, 8, 8, true), Sized(1, 2, 65, 1, 8, 8, true)},
                   QueriesBeforeAllKeysHaveNone}),
      {"AFullyMaskedBatchHasNoGradient", "1", Both(tiles), AFullyMaskedBatchHasNone},
      {"MaskedKeysHaveNoGradientAndReachNone", "5", Both(tiles), MaskedKeysHaveNoneAndReachNone},
      OfCausality({"TheFutureHasNoGradientOfThePast",
                   "",
                   {Sized(2, 2, 70, 70, 8, 8, true)},
                   TheFutureHasNoneOfThePast}),
      {"ConstantValuesGiveQueriesAndKeysNoGradient", "26", Both(tiles),
       ConstantValuesGiveQueriesAndKeysNone},
      {"GradientsOfScoresOf1e4", "22", Both(tiles), OfScoresOf1e4},
      {"ScaledValuesScaleTheGradientsOfQueriesAndKeys", "", Both(tiles),
       ScaledValuesScaleThoseOfQueriesAndKeys},
      {"GradientsInSixteenBitsAreAsGoodAsDenseAttentions", "27",
       SixteenBit(Sized(1, 1, 20, 20, 4, 4)), SixteenBitsAreAsGoodAsDenseAttention},
      {"GradientsInSixteenBitsOfOneKeyOfNearlyAllWeight", "27",
       SixteenBit(Sized(1, 2, 40, 40, 128, 128)), OfOneKeyOfNearlyAllWeight,
       /*default_options_only=*/true},
      ViewCase("GradientsOfInputsWithGaps", small, Layout::kGaps, Layout::kContiguous),
      ViewCase("GradientsWithGaps", small, Layout::kContiguous, Layout::kGaps),
      ViewCase("TransposedGradientsOfTransposedInputs", small, Layout::kTransposed,
               Layout::kTransposed),
      ViewCase("GradientsOfInputsBroadcastOverBatchAndHeads", small, Layout::kBroadcast,
               Layout::kContiguous),
      ViewCase("GradientsOfAnyStrideInDimensionsOfSizeOne", Sized(1, 1, 40, 40, 8, 8),
               Layout::kOddStrides, Layout::kOddStrides),
      {"RepeatedBackwardPassesGiveTheSameBits", "", Both(small),
       RepeatedBackwardPassesGiveTheSameBits},
      {"AnyNumberOfThreadsGivesTheSameGradients", "", UsualBoth(),
       AnyNumberOfThreadsGivesTheSameBits},
      {"AGradientDoesNotDependOnItsCompany", "35", UsualBoth(), ABatchRowDoesNotDependOnItsCompany},
      {"GradientsThatAreLeftOutChangeNoOthers", "", Both(small), ThoseThatAreLeftOutChangeNoOthers},
      {"AnOutputsGradientThatIsLeftOutIsZero", "", Both(small),
       AnOutputsGradientThatIsLeftOutIsZero},
      {"OtherRunsInBetweenChangeNoGradient", "", Both(small), OtherRunsInBetweenChangeNothing},
      {"OutputsOfARunThatKeepsMemoryAreRight", "", UsualBoth(),
       OutputsOfARunThatKeepsMemoryAreRight},
      {"BackwardAllocatesNothing", "", Both(small), BackwardAllocatesNothing},
      {"WrongBackwardCallsAreRefusedWithAReason", "", Both(small), WrongCallsAreRefusedWithAReason},
      {"GradientsOfProblemsAndOptionsAtRandom",
       "12, 15, 17, 19, 21",
       {Usual()},
       ProblemsAndOptionsAtRandom},
  };
  cases.back().default_options_only = true;
  const std::map<std::string, SimulatedSize> sizes = {
      {"EveryParameterHasItsGradient", SimulatedSize::kFewerTokens},
      {"AFullyMaskedBatchHasNoGradient", SimulatedSize::kFewerTokens},
      {"MaskedKeysHaveNoGradientAndReachNone", SimulatedSize::kFewerTokens},
      // With fewer tokens a device splits the keys of a run, see DeterminismCases.
      {"AGradientDoesNotDependOnItsCompany", SimulatedSize::kSameSizes}};
  for (Case& one : cases) {
    one.of_gradients = true;
    const auto size = sizes.find(one.name);
    if (size != sizes.end()) one.simulated_size = size->second;
  }
  return cases;
}

}  // namespace tfb::conformance
