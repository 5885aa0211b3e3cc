#include "attention/fixed/fixed.h"

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::fixed {
namespace {

const Technique& Fixed() { return FindTechnique("fixed"); }

using ::testing::HasSubstr;
using Keys = std::vector<int64_t>;

Keys Seen(int64_t tokens, int64_t i, const Options& options, int64_t heads = 1, int64_t head = 0) {
  return KeysSeen(Fixed(), Problem::SelfAttention(1, heads, tokens, 8, true), options, head, i);
}

TEST(Fixed, MergedSeesItsBlockAndTheSummariesOfThoseBefore) {
  const Options options = {{"stride", "6"}, {"summary", "2"}};
  EXPECT_EQ(Seen(22, 14, options), (Keys{4, 5, 10, 11, 12, 13, 14}));
  EXPECT_EQ(Seen(22, 17, options), (Keys{4, 5, 10, 11, 12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(Seen(22, 21, options), (Keys{4, 5, 10, 11, 16, 17, 18, 19, 20, 21}));
  EXPECT_EQ(Seen(22, 3, options), (Keys{0, 1, 2, 3}));
}

TEST(Fixed, TheColumnAloneSeesSummariesOfItsOwnBlockToo) {
  const Options options = {
      {"stride", "6"}, {"summary", "2"}, {"combine", "interleaved"}, {"layer", "1"}};
  EXPECT_EQ(Seen(22, 10, options), (Keys{4, 5, 10}));
  EXPECT_EQ(Seen(22, 9, options), (Keys{4, 5}));
  EXPECT_EQ(Seen(22, 21, options), (Keys{4, 5, 10, 11, 16, 17}));
}

TEST(Fixed, QueriesBeforeTheFirstSummaryOfTheColumnAreEmpty) {
  const Options options = {
      {"stride", "6"}, {"summary", "2"}, {"combine", "interleaved"}, {"layer", "1"}};
  const Problem problem = Problem::SelfAttention(1, 1, 22, 8, true);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs =
        RunTechnique(Fixed(), problem, ViewsOf(inputs), {options, device}).value();
    for (int64_t i = 0; i < 22; ++i) {
      const float lse = outputs.at("log_sum_exp").span<float>()[i];
      EXPECT_EQ(i < 4, lse == -INFINITY) << i;
      if (i < 4) {
        EXPECT_EQ(MaxAbs(Slice(outputs.at("out").view(), 2, i, 1)), 0);
      }
    }
  }
}

TEST(Fixed, HeadsTakeTurnsAtDistinctSummaries) {
  const Options options = {{"stride", "6"}, {"summary", "2"}, {"summaries", "3"}};
  EXPECT_EQ(Seen(22, 12, options, 4, 0), (Keys{4, 5, 10, 11, 12}));
  EXPECT_EQ(Seen(22, 12, options, 4, 1), (Keys{2, 3, 8, 9, 12}));
  EXPECT_EQ(Seen(22, 12, options, 4, 2), (Keys{0, 1, 6, 7, 12}));
  EXPECT_EQ(Seen(22, 12, options, 4, 3), (Keys{4, 5, 10, 11, 12}));
}

TEST(Fixed, HeadsTakeTurnsAtTheFactors) {
  const Options options = {{"stride", "6"}, {"summary", "2"}, {"combine", "per_head"}};
  EXPECT_EQ(Seen(22, 15, options, 2, 0), (Keys{12, 13, 14, 15}));
  EXPECT_EQ(Seen(22, 15, options, 2, 1), (Keys{4, 5, 10, 11}));
  Problem grouped = Problem::SelfAttention(1, 4, 22, 8, true);
  grouped.kv_heads = 2;
  EXPECT_EQ(KeysSeen(Fixed(), grouped, options, 1, 15), (Keys{12, 13, 14, 15}));
  EXPECT_EQ(KeysSeen(Fixed(), grouped, options, 2, 15), (Keys{4, 5, 10, 11}));
}

TEST(Fixed, TwoStepsReachEveryEarlierToken) {
  const int64_t tokens = 30;
  for (const char* summary : {"1", "3"}) {
    const Options row = {{"stride", "7"}, {"summary", summary}, {"combine", "interleaved"}};
    Options column = row;
    column["layer"] = "1";
    for (int64_t i = 0; i < tokens; ++i) {
      // The test takes a column and then the row of each token it reaches; and the row alone, as a
      // path may be shorter.
      std::set<int64_t> reached;
      for (const int64_t j : Seen(tokens, i, row)) reached.insert(j);
      for (const int64_t j : Seen(tokens, i, column)) {
        for (const int64_t k : Seen(tokens, j, row)) reached.insert(k);
      }
      EXPECT_EQ(reached.size(), static_cast<size_t>(i + 1)) << "summary " << summary << ", " << i;
    }
  }
}

TEST(Fixed, ABlockOfTheSequenceOrAllSummariesAreDense) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16, true);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 11);
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  for (const Options& options : {Options{{"stride", "150"}}, Options{{"stride", "1000000"}},
                                 Options{{"stride", "10"}, {"summary", "10"}},
                                 Options{{"stride", "1"}}, Options{{"stride", "5"}}}) {
    const NamedTensors ours = RunTechnique(Fixed(), problem, ViewsOf(inputs), {options}).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()),
              Fp32Bound(inputs.at("v").view()));
    EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 2e-5);
  }
}

TEST(Fixed, MoreSummariesThanFitTheBlockAreRefused) {
  const Problem problem = Problem::SelfAttention(1, 1, 8, 8, true);
  const auto layer = Fixed().Create(
      problem, {{"stride", "16"}, {"summary", "8"}, {"summaries", "3"}}, Device::kCpu, 1);
  EXPECT_EQ(layer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(layer.status().message()), HasSubstr("allowed with stride=16"));
}

// The authors' published code makes these masks for its four heads.
TEST(Fixed, MasksAreThoseOfTheAuthorsCode) {
  const SafetensorsFile golden = GoldenFile("attention/fixed/testdata/masks.safetensors");
  const Tensor& mask = golden.tensors.at("fixed");
  const int64_t heads = mask.shape()[0], tokens = mask.shape()[1];
  const Options options = {{"stride", golden.metadata.at("stride")},
                           {"summary", golden.metadata.at("summary")},
                           {"summaries", golden.metadata.at("summaries")}};
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < tokens; ++i) {
      Keys expected;
      for (int64_t j = 0; j < tokens; ++j) {
        if (mask.span<int32_t>()[(h * tokens + i) * tokens + j] != 0) expected.push_back(j);
      }
      EXPECT_EQ(Seen(tokens, i, options, heads, h), expected) << "head " << h << ", query " << i;
    }
  }
}

}  // namespace
}  // namespace tfb::fixed
