// Cases that hold a technique's patterns to what the builder of schedules relies on: KeyRanges
// covers the keys that Allows shows.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/schedule/pattern_check.h"
#include "core/schedule/pattern_observer.h"
#include "gtest/gtest.h"
#include "harness/conformance/drawn.h"
#include "harness/conformance/subject.h"

namespace tfb::conformance {
namespace {

// Draws a problem of more than four tiles of 64 tokens, whose last tile is short: as many keys as
// queries, or not.
Problem LongProblemAtRandom(std::mt19937_64* random) {
  Problem problem = ProblemAtRandom(63, random);
  problem.batch = 1;
  problem.head_dim = problem.value_dim = 16;
  problem.query_tokens += 256;
  problem.kv_tokens += 256;
  problem.dtype = DType::kF32;
  return problem;
}

// Adds lists of integers, which OptionsAtRandom leaves out: gaps, positions and sizes.
void AddListsAtRandom(const TechniqueInfo& info, std::mt19937_64* random, Options* options) {
  const std::vector<std::string> lists = {"1", "2", "3", "5", "0/70", "2/3"};
  for (const OptionSpec& option : info.options) {
    if (option.type != "ints" || Below(5, random) >= 3) continue;
    (*options)[option.name] = lists[Below(static_cast<int64_t>(lists.size()), random)];
  }
}

// Sets up a layer, and checks each pattern that it builds a schedule from. Returns their number.
int64_t CheckPatterns(const Subject& subject, const Problem& problem) {
  const auto trial = Trial::Make(subject, problem);
  if (trial == nullptr) return 0;
  auto call = Call::Make(trial.get());
  EXPECT_TRUE(call.ok()) << call.status();
  if (!call.ok()) return 0;
  int64_t patterns = 0;
  const PatternObserver observer([&patterns](const Problem& sizes, const Pattern& pattern) {
    EXPECT_EQ(CheckKeyRanges(sizes, pattern), absl::OkStatus());
    ++patterns;
  });
  const absl::Status status = call->Setup();
  EXPECT_TRUE(status.ok()) << status;
  return patterns;
}

// Draws problems and options, lists included. The check takes queries from each place of a tile on,
// so that it finds an error at the end of a window of any length.
void KeyRangesHoldWhatThePatternsAllow(const Subject& subject, const Problem&) {
  const bool simulated = subject.device != Device::kCpu;
  const int64_t draws = simulated && !IsExhaustive() ? 4 : 24;
  const TechniqueInfo& info = subject.technique->info();
  std::mt19937_64 random = RandomOf(info);
  int64_t tried = 0, patterns = 0;
  for (int64_t attempt = 0; attempt < 20 * draws && tried < draws; ++attempt) {
    const Problem problem = LongProblemAtRandom(&random);
    Subject drawn = subject;
    Options options = OptionsAtRandom(info, problem.query_tokens, &random);
    AddListsAtRandom(info, &random, &options);
    for (const auto& [name, value] : options) drawn.options[name] = value;
    const auto layer = drawn.technique->Create(problem, drawn.options, drawn.device, kSeed);
    if (IsRefusal(layer.status())) continue;
    {
      SCOPED_TRACE(absl::StrCat(LabelOf(problem), " ", ToString(drawn.options)));
      patterns += CheckPatterns(drawn, problem);
    }
    if (::testing::Test::HasFailure()) return;
    ++tried;
    if (tried == 4 && patterns == 0) break;
  }
  EXPECT_GT(tried, 0) << "every problem was refused";
  if (patterns == 0) Skip("Setup builds no schedule from a pattern");
}

}  // namespace

std::vector<Case> PatternCases() {
  return {{"KeyRangesHoldWhatThePatternsAllow", "", {Usual()}, KeyRangesHoldWhatThePatternsAllow}};
}

}  // namespace tfb::conformance
