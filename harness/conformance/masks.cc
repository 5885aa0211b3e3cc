// Tests rows without keys, masked tiles, and which outputs NaN and enormous scores may affect.
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "harness/conformance/trial.h"
#include "harness/judge/errors.h"

namespace tfb::conformance {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();

void MaskKeys(Trial* trial, int64_t batch, int64_t begin, int64_t end) {
  const TensorView mask = trial->inputs()["key_mask"].view();
  for (int64_t j = begin; j < end; ++j) *mask.MutableAt<uint8_t>(batch, j) = 0;
}

// Where the definition's log-sum-exp is -inf no key is seen: the output must be exactly 0.
void ExpectEmptyRowsAreZero(Trial* trial, const NamedTensors& outputs, bool some_are_expected) {
  if (outputs.empty()) return;
  const NamedTensors reference = trial->Define();
  const auto lse = reference.find("log_sum_exp");
  if (lse == reference.end() || outputs.count("log_sum_exp") == 0) return;
  const Tensor& out = outputs.at("out");
  const int64_t channels = out.dim(3);
  int64_t empty = 0;
  for (int64_t row = 0; row < lse->second.num_elements(); ++row) {
    if (lse->second.view().Get(row) != -std::numeric_limits<double>::infinity()) continue;
    ++empty;
    EXPECT_EQ(outputs.at("log_sum_exp").view().Get(row), -std::numeric_limits<double>::infinity())
        << "log_sum_exp of row " << row << ", which sees no key";
    for (int64_t c = 0; c < channels; ++c) {
      ASSERT_EQ(out.view().Get(row * channels + c), 0) << "row " << row << ", which sees no key";
    }
  }
  if (some_are_expected) {
    EXPECT_GT(empty, 0) << "the definition has no row without keys";
  }
}

void AFullyMaskedBatchGivesZero(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireKeyMask()) return;
  MaskKeys(trial.get(), 0, 0, job.problem.kv_tokens);
  const NamedTensors outputs = trial->Run();
  trial->ExpectMatchesDefinition(outputs);
  ExpectEmptyRowsAreZero(trial.get(), outputs, /*some_are_expected=*/false);
}

void QueriesBeforeAllKeysGiveZero(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireExact()) return;
  const NamedTensors outputs = trial->Run();
  trial->ExpectMatchesDefinition(outputs);
  ExpectEmptyRowsAreZero(trial.get(), outputs, trial->inputs().count("q") > 0);
}

// The running maximum is -inf until a tile has a key, and does not change in tiles that have none.
void MaskedTilesBeforeAmongAndBehindTheKeys(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireKeyMask()) return;
  MaskKeys(trial.get(), 0, 0, 129);    // a single key, in the last tile
  MaskKeys(trial.get(), 1, 3, 70);     // a hole over an edge of tiles
  MaskKeys(trial.get(), 1, 128, 130);  // the whole last tile
  trial->ExpectRunMatchesDefinition();
}

// Scores are below any finite substitute for -inf, beside keys that are masked. All keys are equal,
// so that the output is the mean of the values that are seen, however large the scores.
void ScoresBelowEveryFiniteSentinel(const Job& job, float score) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireExact() || !trial->RequireQkv()) return;
  const float root = std::sqrt(-score);
  Fill(trial->inputs()["q"].view(), -root);
  Fill(KeysOf(trial->inputs()).view(), root);
  bool has_mask = false;
  for (const TensorSpec& spec : trial->layer().inputs()) has_mask |= spec.name == "key_mask";
  if (has_mask && trial->RequireKeyMask()) MaskKeys(trial.get(), 0, 5, 69);
  const NamedTensors reference = trial->Define();
  const auto lse = reference.find("log_sum_exp");
  if (lse != reference.end() &&
      LargestMagnitude(lse->second.view()) > std::numeric_limits<float>::max()) {
    return Skip("the technique makes these scores larger than fp32 holds");
  }
  trial->ExpectRunMatchesDefinition(Tolerance::Conditioned());
}

// The definition says which outputs a NaN affects: not those that it is masked from, and all that
// see it.
void NansReachWhatTheDefinitionSays(const Job& job, const char* name, int64_t token, bool masked) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr || !trial->RequireQkv()) return;
  if (trial->inputs().count(name) == 0) return Skip("the keys are the queries");
  // Where keys decide which tokens attend to which, the order of a NaN among numbers is not
  // defined.
  if (*name != 'v' && !masked && !trial->RequireExact()) return;
  if (masked) {
    if (!trial->RequireKeyMask()) return;
    MaskKeys(trial.get(), 0, token, token + 1);
  }
  const TensorView poisoned = trial->inputs()[name].view();
  for (int64_t h = 0; h < poisoned.dim(1); ++h) {
    for (int64_t c = 0; c < poisoned.dim(3); ++c) {
      *poisoned.MutableAt<float>(0, h, token, c) = kNan;
    }
  }
  const NamedTensors outputs = trial->Run();
  trial->ExpectMatchesDefinition(outputs);
  if (!masked || outputs.empty()) return;
  for (const float value : outputs.at("out").span<float>()) {
    ASSERT_FALSE(std::isnan(value)) << "the NaN of masked key " << token << " reached the output";
  }
}

Case NanCase(const std::string& name, const std::string& numbers, const char* tensor, int64_t token,
             bool masked) {
  return {name, numbers, UsualBoth(),
          [=](const Job& job) { NansReachWhatTheDefinitionSays(job, tensor, token, masked); }};
}

Problem MoreQueriesThanKeys(int64_t queries, int64_t keys) {
  Problem problem = Usual(/*causal=*/true);
  problem.query_tokens = queries;
  problem.kv_tokens = keys;
  return problem;
}

Case SentinelCase(const std::string& name, const std::string& numbers, float score) {
  // There is one channel, so that the score is a product of two numbers that fit.
  Problem problem = Problem::SelfAttention(2, 2, 130, 1);
  Problem causal = problem;
  causal.causal = true;
  return {name, numbers, {problem, causal}, [=](const Job& job) {
            ScoresBelowEveryFiniteSentinel(job, score);
          }};
}

}  // namespace

std::vector<Case> MaskCases() {
  std::vector<Case> cases = {
      {"AFullyMaskedBatchGivesZero", "1, 7", UsualBoth(), AFullyMaskedBatchGivesZero},
      OfCausality({"QueriesBeforeAllKeysGiveZero",
                   "1, 7",
                   {MoreQueriesThanKeys(130, 60), MoreQueriesThanKeys(65, 1)},
                   QueriesBeforeAllKeysGiveZero}),
      {"MaskedTilesBeforeAmongAndBehindTheKeys", "2, 7", UsualBoth(),
       MaskedTilesBeforeAmongAndBehindTheKeys},
      SentinelCase("ScoresOfMinus1e6AreNotTakenForMasked", "3", -1e6f),
      SentinelCase("ScoresOfMinus1e32AreNotTakenForMasked", "3", -1e32f),
      SentinelCase("ScoresOfMinus3e38AreNotTakenForMasked", "4", -3.3e38f),
      NanCase("ANanInAMaskedKeyReachesNothing", "5", "k", 67, true),
      NanCase("ANanInAMaskedValueReachesNothing", "5", "v", 67, true),
      NanCase("ANanInAMaskedValueOfTheLastTileReachesNothing", "5, 8", "v", 129, true),
      NanCase("ANanInAKeyReachesWhoSeesItAndNobodyElse", "5, 6", "k", 67, false),
      NanCase("ANanInAValueReachesWhoSeesItAndNobodyElse", "5, 6", "v", 67, false),
      NanCase("ANanInTheFirstValueReachesWhoSeesIt", "6", "v", 0, false),
      NanCase("ANanInTheLastValueReachesWhoSeesIt", "6, 8", "v", 129, false),
      NanCase("ANanInAQueryReachesItsOwnRow", "6", "q", 64, false),
  };
  for (Case& one : cases) {
    one.all_options_simulated = true;  // options decide which keys are seen
    one.simulated_size = SimulatedSize::kAsItIs;
  }
  return cases;
}

}  // namespace tfb::conformance
