// Techniques that hand over their state (harness/inputs/continuation.h): two runs, of which the
// second is given the outputs of the first, equal one run over the whole sequence.
#include "harness/inputs/continuation.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/conformance/drawn.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

bool HandsOver(const Job& job) {
  const auto handed_over = HandedOverBy(*job.technique, job.problem, job.options);
  EXPECT_TRUE(handed_over.ok()) << handed_over.status();
  return handed_over.ok() && !handed_over->empty();
}

// Returns the tokens after which a sequence may be cut: those of one segment, and most of those of
// all segments but the last. There are none where one segment has all tokens.
std::set<int64_t> CutsOf(Layer& layer, int64_t tokens) {
  auto* stream = dynamic_cast<StreamingLayer*>(&layer);
  const int64_t split = stream == nullptr ? 0 : stream->split_tokens();
  const int64_t step = split == 0 ? std::min<int64_t>(37, tokens - 1) : split;
  if (step <= 0 || step >= tokens) return {};
  return {step, (tokens - 1) / step * step};
}

// Runs one part with the whole's parameters. Returns nothing where it fails.
NamedTensors RunPart(Trial* whole, const Problem& problem, const Options& options,
                     const Inputs& inputs) {
  Job job = On(problem, whole->job());
  job.options = options;
  const auto part = Trial::Make(job);
  if (part == nullptr) return {};
  const absl::Status status = part->layer().SetParameters(whole->layer().parameters());
  EXPECT_TRUE(status.ok()) << status;
  for (const auto& [name, view] : inputs) {
    Tensor& copy = part->inputs()[name] = Tensor(view.dtype, view.shape());
    CopyElements(view, copy.view());
  }
  return part->Run();
}

// Returns the joined outputs of two runs, of which the second is given the first's.
absl::StatusOr<NamedTensors> RunInTwo(Trial* whole, int64_t first) {
  const CutSequence cut = {whole->job().technique, whole->job().problem, whole->job().options,
                           first};
  const Inputs inputs = ViewsOf(whole->inputs());
  TFB_ASSIGN_OR_RETURN(const Inputs of_first, cut.FirstInputs(inputs));
  const NamedTensors before = RunPart(whole, cut.Part(false), cut.options, of_first);
  TFB_ASSIGN_OR_RETURN(const Options options, cut.SecondOptions());
  TFB_ASSIGN_OR_RETURN(const Inputs of_second, cut.SecondInputs(inputs, before));
  const NamedTensors after = RunPart(whole, cut.Part(true), options, of_second);
  return cut.Joined(before, after);
}

// Gives the layer its own choices as inputs, where there are such optional inputs: a choice may
// depend on where a run begins, as a threshold that falls from token to token does. Tells whether
// there is such an input.
bool GiveChoices(Trial* whole) {
  std::vector<std::string> choices;
  const std::vector<TensorSpec>& outputs = whole->layer().outputs();
  for (const TensorSpec& input : whole->layer().inputs()) {
    const bool is_output = std::any_of(outputs.begin(), outputs.end(), [&](const TensorSpec& spec) {
      return spec.name == input.name;
    });
    if (input.optional && is_output) choices.push_back(input.name);
  }
  if (choices.empty()) return false;
  NamedTensors chosen = whole->Run();
  for (const std::string& name : choices) whole->inputs()[name] = std::move(chosen.at(name));
  return true;
}

// Cuts the sequence at several places, and compares all outputs with the definition of the whole;
// where choices are given, only `out` and the state.
void ExpectTwoRunsAreOne(Trial* whole, const Tolerance& tolerance) {
  std::set<std::string> compared = {"out"};
  const auto handed_over =
      HandedOverBy(*whole->job().technique, whole->job().problem, whole->job().options);
  ASSERT_TRUE(handed_over.ok()) << handed_over.status();
  for (const auto& each : *handed_over) compared.insert(each.second.begin(), each.second.end());
  const bool gives_choices = GiveChoices(whole);
  for (const int64_t first : CutsOf(whole->layer(), whole->job().problem.query_tokens)) {
    SCOPED_TRACE(absl::StrCat("after ", first, " tokens"));
    auto joined = RunInTwo(whole, first);
    ASSERT_TRUE(joined.ok()) << joined.status();
    for (auto output = joined->begin(); gives_choices && output != joined->end();) {
      output = compared.count(output->first) > 0 ? std::next(output) : joined->erase(output);
    }
    ASSERT_EQ(joined->count("out"), 1u);
    whole->ExpectMatchesDefinition(*joined, tolerance);
  }
}

void ARunGoesOnWithWhatAnotherHandsOver(const Job& job) {
  if (!HandsOver(job)) return Skip("the technique hands nothing over");
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  if (CutsOf(trial->layer(), job.problem.query_tokens).empty()) {
    return Skip("one segment has all tokens");
  }
  ExpectTwoRunsAreOne(trial.get(), {});
}

// Does the same for drawn problems, options and states of the first run.
void WhatIsHandedOverIsEnoughUnderAnyOptions(const Job& job) {
  if (!HandsOver(job)) return Skip("the technique hands nothing over");
  const bool simulated = job.device != Device::kCpu;
  const int64_t draws = FromEnvironment("TFB_PROPERTY_DRAWS", simulated ? 3 : 10);
  const TechniqueInfo& info = job.technique->info();
  std::mt19937_64 random = RandomOf(info);
  int64_t tried = 0;
  for (int64_t attempt = 0; attempt < 100 * draws && tried < draws; ++attempt) {
    Job drawn = On(ProblemAtRandom(simulated ? 40 : 100, &random), job);
    // The state is rounded to 16 bits once more.
    drawn.problem.dtype = DType::kF32;
    drawn.options = OptionsAtRandom(info, drawn.problem, attempt, &random);
    SCOPED_TRACE(absl::StrCat(LabelOf(drawn.problem), " ", ToString(drawn.options)));
    const auto layer = drawn.CreateLayer();
    if (IsRefusal(layer.status())) continue;
    ASSERT_TRUE(layer.ok()) << layer.status();
    if (CutsOf(**layer, drawn.problem.query_tokens).empty()) continue;
    const auto trial = Trial::Make(drawn);
    ASSERT_NE(trial, nullptr);
    ExpectTwoRunsAreOne(trial.get(), Tolerance::Conditioned());
    ++tried;
  }
  EXPECT_GT(tried, 0) << "no sequence could be cut";
}

}  // namespace

std::vector<Case> ContinuationCases() {
  Case drawn = {"WhatIsHandedOverIsEnoughUnderAnyOptions",
                "",
                {Usual(true)},
                WhatIsHandedOverIsEnoughUnderAnyOptions};
  drawn.default_options_only = true;
  Case usual = {"ARunGoesOnWithWhatAnotherHandsOver",
                "",
                {Usual(true), Problem::SelfAttention(1, 2, 277, 8, true)},
                ARunGoesOnWithWhatAnotherHandsOver};
  usual.simulated_size = SimulatedSize::kAsItIs;
  return {usual, drawn};
}

}  // namespace tfb::conformance
