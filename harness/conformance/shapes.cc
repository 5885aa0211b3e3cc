// Tests sizes at, below and above the tiles of engines, no tokens, grouped heads, and views.
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

void MatchesItsDefinition(const Job& job) {
  if (const auto trial = Trial::Make(job)) trial->ExpectRunMatchesDefinition();
}

Problem Sized(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t head_dim,
              bool causal) {
  Problem problem = Problem::SelfAttention(batch, heads, queries, head_dim, causal);
  problem.kv_tokens = keys;
  return problem;
}

// Returns the problems, causal and not.
std::vector<Problem> Both(std::vector<Problem> problems) {
  std::vector<Problem> both;
  for (Problem problem : problems) {
    for (const bool causal : {false, true}) {
      problem.causal = causal;
      both.push_back(problem);
    }
  }
  return both;
}

std::vector<Problem> SelfAttentionOf(const std::vector<int64_t>& tokens) {
  std::vector<Problem> problems;
  for (int64_t count : tokens) problems.push_back(Sized(1, 2, count, count, 16, false));
  return Both(std::move(problems));
}

std::vector<Problem> WithHeadDims(const std::vector<int64_t>& head_dims) {
  std::vector<Problem> problems;
  for (int64_t head_dim : head_dims) problems.push_back(Sized(1, 2, 70, 70, head_dim, true));
  for (Problem& problem : problems) problem.value_dim = problem.head_dim;
  return problems;
}

Problem WithValueDim(int64_t head_dim, int64_t value_dim) {
  Problem problem = Sized(1, 2, 70, 70, head_dim, true);
  problem.value_dim = value_dim;
  return problem;
}

Problem Grouped(int64_t query_heads, int64_t kv_heads) {
  Problem problem = Usual();
  problem.query_heads = query_heads;
  problem.kv_heads = kv_heads;
  return problem;
}

// Returns the definition's status for the problem without any tensors.
absl::Status DefinitionOf(const Job& job) {
  NamedTensors outputs;
  return job.technique->Define(job.problem, job.options, {}, {}, {}, &outputs);
}

// Expects InvalidArgument or Unimplemented, and a message that names the error.
void ExpectRefusal(const Job& job, const std::string& size, int64_t value) {
  const auto layer = job.CreateLayer();
  ASSERT_FALSE(layer.ok()) << job.problem.ToString() << " was accepted";
  EXPECT_TRUE(IsRefusal(layer.status())) << layer.status();
  EXPECT_EQ(DefinitionOf(job), layer.status());
  const std::string message(layer.status().message());
  EXPECT_TRUE(absl::StrContains(message, size)) << message;
  EXPECT_TRUE(absl::StrContains(message, absl::StrCat(value))) << message;
}

void HeadDimsOutOfRangeAreRefusedWithTheRange(const Job& job) {
  for (const int64_t head_dim : {int64_t{0}, int64_t{-1}, kMaxHeadDim + 1}) {
    Problem wrong = job.problem;
    wrong.head_dim = head_dim;
    ExpectRefusal(On(wrong, job), "head_dim", head_dim);
    wrong = job.problem;
    wrong.value_dim = head_dim;
    ExpectRefusal(On(wrong, job), "value_dim", head_dim);
  }
}

void HeadsThatDoNotDivideAreRefused(const Job& job) {
  Problem wrong = job.problem;
  wrong.query_heads = 4;
  wrong.kv_heads = 3;
  ExpectRefusal(On(wrong, job), "kv_heads", 3);
  wrong.kv_heads = 0;
  ExpectRefusal(On(wrong, job), "kv_heads", 0);
}

void NegativeSizesAreRefused(const Job& job) {
  Problem wrong = job.problem;
  wrong.query_tokens = wrong.kv_tokens = -5;
  ExpectRefusal(On(wrong, job), "tokens", -5);
  wrong = job.problem;
  wrong.batch = -1;
  ExpectRefusal(On(wrong, job), "batch", -1);
}

// Expects that the definition refuses what the layer refuses: keys of other tokens, shared by
// heads, or wider than queries, the other form, and a batch of -1.
void TheDefinitionRefusesTheProblemsThatTheLayerDoes(const Job& job) {
  std::vector<Job> others(5, job);
  others[0].problem.kv_tokens += 1;
  others[1].problem.kv_heads = 1;
  others[2].problem.value_dim += 8;
  others[3].problem.causal = !job.problem.causal;
  others[4].problem.batch = -1;
  int refused = 0;
  for (const Job& other : others) {
    const auto layer = other.CreateLayer();
    if (layer.ok()) continue;
    SCOPED_TRACE(other.problem.ToString());
    EXPECT_TRUE(IsRefusal(layer.status())) << layer.status();
    EXPECT_EQ(DefinitionOf(other), layer.status());
    ++refused;
  }
  EXPECT_GT(refused, 0);
}

void DtypesThatNoLayerHasAreRefused(const Job& job) {
  Problem wrong = job.problem;
  wrong.dtype = DType::kI32;
  const auto layer = On(wrong, job).CreateLayer();
  ASSERT_FALSE(layer.ok());
  EXPECT_TRUE(absl::StrContains(layer.status().message(), "i32")) << layer.status();
}

// Strides do not change the arithmetic, so the bits are equal.
void ViewsGiveWhatContiguousTensorsGive(const Job& job, Layout inputs, Layout outputs) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  if (inputs == Layout::kBroadcast) {
    for (auto& entry : trial->inputs()) MakeEqualAlongBatchAndHeads(&entry.second);
  }
  const NamedTensors plain = trial->Run();
  RunSettings settings;
  settings.inputs = inputs;
  settings.outputs = outputs;
  const NamedTensors strided = trial->Run(settings);
  if (plain.empty() || strided.empty()) return;
  ExpectSameBits(plain, strided, "strided and contiguous");
  trial->ExpectMatchesDefinition(strided);
}

Case ViewCase(const std::string& name, std::vector<Problem> problems, Layout inputs,
              Layout outputs) {
  Case one = {name, "18", std::move(problems),
              [=](const Job& job) { ViewsGiveWhatContiguousTensorsGive(job, inputs, outputs); }};
  one.simulated_size = SimulatedSize::kFewerTokens;
  return one;
}

}  // namespace

std::vector<Case> ShapeCases() {
  std::vector<Case> cases = {
      {"OneTokenOneHeadOneBatch", "9", Both({Sized(1, 1, 1, 1, 16, false)}), MatchesItsDefinition},
      {"NoTokensAndNoBatch", "10",
       Both({Sized(1, 2, 0, 0, 16, false), Sized(0, 2, 70, 70, 16, false)}), MatchesItsDefinition},
      {"NoKeys", "11", Both({Sized(1, 2, 5, 0, 16, false)}), MatchesItsDefinition},
      {"NoQueries", "10", Both({Sized(1, 2, 0, 5, 16, false)}), MatchesItsDefinition},
      {"TokensBelowAtAndAboveTiles", "12", SelfAttentionOf({63, 64, 65, 127, 128, 129, 200}),
       MatchesItsDefinition},
      {"TokensBelowOneTile", "13", SelfAttentionOf({2, 3, 7, 17}), MatchesItsDefinition},
      {"KeysAndQueriesOfDifferentNumber", "14",
       Both({Sized(1, 2, 70, 130, 16, false), Sized(1, 2, 130, 70, 16, false),
             Sized(1, 2, 1, 129, 16, false), Sized(1, 2, 64, 65, 16, false)}),
       MatchesItsDefinition},
      {"HeadDims", "15, 32", WithHeadDims({1, 7, 40, 64, 80, 96, 128, 256}), MatchesItsDefinition},
      {"ValueDimsOtherThanHeadDim",
       "15",
       {WithValueDim(16, 24), WithValueDim(64, 7), WithValueDim(7, 64)},
       MatchesItsDefinition},
      {"HeadDimsOutOfRangeAreRefusedWithTheRange",
       "16",
       {Usual()},
       HeadDimsOutOfRangeAreRefusedWithTheRange},
      {"GroupedHeads", "17", Both({Grouped(4, 2), Grouped(4, 1), Grouped(6, 3)}),
       MatchesItsDefinition},
      {"HeadsThatDoNotDivideAreRefused", "17", {Usual()}, HeadsThatDoNotDivideAreRefused},
      {"NegativeSizesAreRefused", "10", {Usual()}, NegativeSizesAreRefused},
      {"TheDefinitionRefusesTheProblemsThatTheLayerDoes", "17", UsualBoth(),
       TheDefinitionRefusesTheProblemsThatTheLayerDoes},
      {"DtypesThatNoLayerHasAreRefused", "16", {Usual()}, DtypesThatNoLayerHasAreRefused},
      ViewCase("GapsBehindRowsOfInputs", UsualBoth(), Layout::kGaps, Layout::kContiguous),
      ViewCase("GapsBehindRowsOfOutputs", UsualBoth(), Layout::kContiguous, Layout::kGaps),
      ViewCase("TransposedInputsAndOutputs", UsualBoth(), Layout::kTransposed, Layout::kTransposed),
      ViewCase("InputsBroadcastOverBatchAndHeads", UsualBoth(), Layout::kBroadcast,
               Layout::kContiguous),
      ViewCase("AnyStrideInDimensionsOfSizeOne",
               {Sized(1, 1, 130, 130, 16, false), Sized(1, 1, 1, 1, 1, false)}, Layout::kOddStrides,
               Layout::kOddStrides),
  };
  const std::set<std::string> about_tiles = {"NoTokensAndNoBatch", "TokensBelowAtAndAboveTiles",
                                             "KeysAndQueriesOfDifferentNumber"};
  for (Case& one : cases) {
    if (about_tiles.count(one.name) > 0) one.simulated_size = SimulatedSize::kAsItIs;
  }
  return cases;
}

}  // namespace tfb::conformance
