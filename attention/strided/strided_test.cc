#include "attention/strided/strided.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::strided {
namespace {

const Technique& Strided() { return FindTechnique("strided"); }

using ::testing::HasSubstr;
using Keys = std::vector<int64_t>;

Keys Seen(int64_t tokens, int64_t i, const Options& options, int64_t heads = 1, int64_t head = 0) {
  return KeysSeen(Strided(), Problem::SelfAttention(1, heads, tokens, 8, true), options, head, i);
}

TEST(Strided, MergedSeesTheLastTokensAndEveryStridethOnce) {
  EXPECT_EQ(Seen(20, 14, {{"stride", "4"}}), (Keys{2, 6, 10, 11, 12, 13, 14}));
  EXPECT_EQ(Seen(20, 3, {{"stride", "4"}}), (Keys{0, 1, 2, 3}));
  EXPECT_EQ(Seen(20, 0, {{"stride", "4"}}), (Keys{0}));
}

TEST(Strided, TheCodesRowHoldsOneTokenLess) {
  const Options row = {{"stride", "4"}, {"combine", "interleaved"}};
  Options code = row;
  code["bandwidth"] = "code";
  EXPECT_EQ(Seen(20, 14, row), (Keys{10, 11, 12, 13, 14}));
  EXPECT_EQ(Seen(20, 14, code), (Keys{11, 12, 13, 14}));
}

TEST(Strided, BothBandwidthsHaveTheSameUnion) {
  for (const int64_t i : {0, 5, 14, 19}) {
    EXPECT_EQ(Seen(20, i, {{"stride", "4"}}),
              Seen(20, i, {{"stride", "4"}, {"bandwidth", "code"}}));
  }
}

TEST(Strided, InterleavedLayersTakeTurns) {
  Options options = {{"stride", "5"}, {"combine", "interleaved"}};
  for (const char* layer : {"1", "3"}) {
    options["layer"] = layer;
    EXPECT_EQ(Seen(20, 13, options), (Keys{3, 8, 13}));
  }
  options["layer"] = "2";
  EXPECT_EQ(Seen(20, 13, options), (Keys{8, 9, 10, 11, 12, 13}));
}

TEST(Strided, HeadsTakeTurnsByTheirKeyValueHead) {
  const Options options = {{"stride", "5"}, {"combine", "per_head"}};
  EXPECT_EQ(Seen(20, 13, options, 2, 0), (Keys{8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(Seen(20, 13, options, 2, 1), (Keys{3, 8, 13}));
  Problem grouped = Problem::SelfAttention(1, 4, 20, 8, true);
  grouped.kv_heads = 2;
  EXPECT_EQ(KeysSeen(Strided(), grouped, options, 1, 13), (Keys{8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(KeysSeen(Strided(), grouped, options, 2, 13), (Keys{3, 8, 13}));
}

// By section 4.2, every position reaches every earlier one in two steps.
TEST(Strided, TwoStepsReachEveryEarlierToken) {
  const int64_t tokens = 30;
  for (const char* bandwidth : {"paper", "code"}) {
    const Options row = {{"stride", "4"}, {"combine", "interleaved"}, {"bandwidth", bandwidth}};
    Options column = row;
    column["layer"] = "1";
    for (int64_t i = 0; i < tokens; ++i) {
      std::set<int64_t> reached;
      for (const int64_t j : Seen(tokens, i, row)) {
        for (const int64_t k : Seen(tokens, j, column)) reached.insert(k);
      }
      EXPECT_EQ(reached.size(), static_cast<size_t>(i + 1)) << bandwidth << " " << i;
    }
  }
}

void ExpectEqualsDense(const Options& options) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16, true);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 11);
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  const NamedTensors ours = RunTechnique(Strided(), problem, ViewsOf(inputs), {options}).value();
  EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()),
            Fp32Bound(inputs.at("v").view()));
  EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 2e-5);
}
TEST(Strided, AStrideOfOneIsDense) {
  ExpectEqualsDense({{"stride", "1"}});
  ExpectEqualsDense({{"stride", "1"}, {"combine", "interleaved"}, {"layer", "1"}});
}
TEST(Strided, AStrideOfTheSequenceIsDense) {
  for (const char* stride : {"149", "150", "1000000"}) {
    ExpectEqualsDense({{"stride", stride}});
    ExpectEqualsDense({{"stride", stride}, {"combine", "interleaved"}});
  }
}

TEST(Strided, CrossAttentionIsRefused) {
  Problem problem = Problem::SelfAttention(1, 1, 8, 8, true);
  problem.kv_tokens = 9;
  const auto layer = Strided().Create(problem, {}, Device::kCpu, 1);
  EXPECT_EQ(layer.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(layer.status().message()), HasSubstr("kv_tokens is 9"));
}

// The authors' published code, which keeps `stride` tokens of the row, makes these masks.
TEST(Strided, FactorsAreThoseOfTheAuthorsCode) {
  const SafetensorsFile golden = GoldenFile("attention/strided/testdata/masks.safetensors");
  Options options = {
      {"stride", golden.metadata.at("stride")}, {"combine", "interleaved"}, {"bandwidth", "code"}};
  for (const char* layer : {"0", "1"}) {
    options["layer"] = layer;
    const Tensor& mask = golden.tensors.at(layer[0] == '0' ? "local" : "strided");
    const int64_t tokens = mask.shape()[0];
    for (int64_t i = 0; i < tokens; ++i) {
      Keys expected;
      for (int64_t j = 0; j < tokens; ++j) {
        if (mask.span<int32_t>()[i * tokens + j] != 0) expected.push_back(j);
      }
      EXPECT_EQ(Seen(tokens, i, options), expected) << "layer " << layer << ", query " << i;
    }
  }
}

}  // namespace
}  // namespace tfb::strided
