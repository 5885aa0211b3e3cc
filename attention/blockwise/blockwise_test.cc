#include "attention/blockwise/blockwise.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::blockwise {
namespace {

const Technique& Blockwise() { return FindTechnique("blockwise"); }

using ::testing::HasSubstr;
using Keys = std::vector<int64_t>;
using Shifts = std::vector<int64_t>;

NamedTensors RunOwn(const Problem& problem, const Inputs& inputs, const Options& options) {
  return RunTechnique(Blockwise(), problem, inputs, {options}).value();
}
NamedTensors RunDense(const Problem& problem, const Inputs& inputs) {
  return RunTechnique(dense::Dense(), problem, inputs).value();
}
NamedTensors Random(const Problem& problem) {
  return RandomInputs(Blockwise().InputSpecs(problem, {}).value(), 11);
}
// Gives every head shift `shift`: its share is 1, and those before it are 0.
Options Shift(int64_t blocks, int64_t shift) {
  std::string shares;
  for (int64_t s = 0; s < shift; ++s) shares += "0/";
  return {{"blocks", absl::StrCat(blocks)}, {"shares", shares + "1"}};
}

// Returns the keys that query i of a head sees. They come from the weights where value j is the
// j-th unit vector.
Keys KeysSeen(Problem problem, int64_t head, int64_t i, const Options& options) {
  problem.value_dim = problem.kv_tokens;
  NamedTensors inputs = Random(problem);
  Fill(inputs["v"].view(), 0);
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    for (int64_t j = 0; j < problem.kv_tokens; ++j) {
      *inputs["v"].view().MutableAt<float>(0, h, j, j) = 1;
    }
  }
  const NamedTensors outputs = RunOwn(problem, ViewsOf(inputs), options);
  Keys keys;
  for (int64_t j = 0; j < problem.kv_tokens; ++j) {
    if (*outputs.at("out").view().At<float>(0, head, i, j) > 0) keys.push_back(j);
  }
  return keys;
}

TEST(Blockwise, HeadsAreSharedAsInThePaper) {
  EXPECT_EQ(BlockwiseShifts({2}, 12), (Shifts{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(BlockwiseShifts({3}, 12), (Shifts{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(BlockwiseShifts({2, {10, 2}}, 12), BlockwiseShifts({2}, 12));
  EXPECT_EQ(BlockwiseShifts({3, {8, 2, 2}}, 12), BlockwiseShifts({3}, 12));
}

TEST(Blockwise, SharesAreScaledToAnyNumberOfHeads) {
  EXPECT_EQ(BlockwiseShifts({1}, 3), (Shifts{0, 0, 0}));
  EXPECT_EQ(BlockwiseShifts({2}, 1), (Shifts{0}));
  EXPECT_EQ(BlockwiseShifts({2}, 2), (Shifts{0, 1}));
  EXPECT_EQ(BlockwiseShifts({2}, 8), (Shifts{0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(BlockwiseShifts({2}, 24).back(), 1);
  EXPECT_EQ(BlockwiseShifts({4, {1, 1, 1, 1}}, 4), (Shifts{0, 1, 2, 3}));
  EXPECT_EQ(BlockwiseShifts({4, {1, 1, 1, 1}}, 8), (Shifts{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(BlockwiseShifts({4, {0, 0, 1}}, 3), (Shifts{2, 2, 2}));
  EXPECT_EQ(BlockwiseShifts({8}, 8), (Shifts{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(Blockwise, TenTokensInThreeBlocksAreFourThreeAndThree) {
  const Problem problem = Problem::SelfAttention(1, 1, 10, 8);
  EXPECT_EQ(KeysSeen(problem, 0, 0, Shift(3, 0)), (Keys{0, 1, 2, 3}));
  EXPECT_EQ(KeysSeen(problem, 0, 3, Shift(3, 0)), (Keys{0, 1, 2, 3}));
  EXPECT_EQ(KeysSeen(problem, 0, 4, Shift(3, 0)), (Keys{4, 5, 6}));
  EXPECT_EQ(KeysSeen(problem, 0, 9, Shift(3, 0)), (Keys{7, 8, 9}));
  EXPECT_EQ(KeysSeen(problem, 0, 0, Shift(3, 1)), (Keys{4, 5, 6}));
  EXPECT_EQ(KeysSeen(problem, 0, 9, Shift(3, 1)), (Keys{0, 1, 2, 3}));
}

TEST(Blockwise, APermutationIsOfAllHeadsOrOfEach) {
  const Problem problem = Problem::SelfAttention(1, 2, 6, 8);
  const Options shared = {{"blocks", "3"}, {"permutation", "2/0/1"}};
  EXPECT_EQ(KeysSeen(problem, 0, 0, shared), (Keys{4, 5}));
  EXPECT_EQ(KeysSeen(problem, 1, 2, shared), (Keys{0, 1}));
  const Options own = {{"blocks", "3"}, {"permutation", "2/0/1/1/0/2"}};
  EXPECT_EQ(KeysSeen(problem, 0, 5, own), (Keys{2, 3}));
  EXPECT_EQ(KeysSeen(problem, 1, 5, own), (Keys{4, 5}));
  EXPECT_EQ(KeysSeen(problem, 1, 0, own), (Keys{2, 3}));
}

TEST(Blockwise, QueriesAndKeysOfDifferentNumbersAreEachSplitEvenly) {
  Problem problem = Problem::SelfAttention(1, 1, 4, 8);
  problem.kv_tokens = 7;
  EXPECT_EQ(KeysSeen(problem, 0, 1, Shift(2, 0)), (Keys{0, 1, 2, 3}));
  EXPECT_EQ(KeysSeen(problem, 0, 2, Shift(2, 0)), (Keys{4, 5, 6}));
  EXPECT_EQ(KeysSeen(problem, 0, 2, Shift(2, 1)), (Keys{0, 1, 2, 3}));
}

TEST(Blockwise, MoreBlocksThanTokensLeaveRowsWithoutKeys) {
  // Tokens 0, 1, 2 are in blocks 0, 1, 3 of 5: the next blocks hold token 1, none and none.
  const Problem problem = Problem::SelfAttention(1, 1, 3, 8);
  const NamedTensors inputs = Random(problem);
  const NamedTensors outputs = RunOwn(problem, ViewsOf(inputs), Shift(5, 1));
  EXPECT_EQ(KeysSeen(problem, 0, 0, Shift(5, 1)), (Keys{1}));
  for (const int64_t i : {1, 2}) {
    EXPECT_EQ(*outputs.at("out").view().At<float>(0, 0, i, 0), 0);
    EXPECT_EQ(*outputs.at("log_sum_exp").view().At<float>(0, 0, i), -INFINITY);
  }
}

TEST(Blockwise, ACausalMaskEmptiesTheRowsThatLookAhead) {
  const Problem problem = Problem::SelfAttention(1, 1, 8, 8, /*causal=*/true);
  EXPECT_EQ(KeysSeen(problem, 0, 2, Shift(2, 0)), (Keys{0, 1, 2}));
  EXPECT_EQ(KeysSeen(problem, 0, 2, Shift(2, 1)), (Keys{}));
  EXPECT_EQ(KeysSeen(problem, 0, 6, Shift(2, 1)), (Keys{0, 1, 2, 3}));
}

TEST(Blockwise, PaddingOfAWholeBlockEmptiesTheRowsThatSeeIt) {
  const Problem problem = Problem::SelfAttention(1, 1, 200, 16);
  NamedTensors inputs = Random(problem);
  inputs["key_mask"] = Tensor(DType::kU8, {1, 200});
  Fill(inputs["key_mask"].view(), 1);
  Fill(Slice(inputs["key_mask"].view(), 1, 100, 100), 0);
  const NamedTensors outputs = RunOwn(problem, ViewsOf(inputs), Shift(2, 1));
  for (int64_t i = 0; i < 200; ++i) {
    const bool is_empty = *outputs.at("log_sum_exp").view().At<float>(0, 0, i) == -INFINITY;
    EXPECT_EQ(is_empty, i < 100) << i;
  }
}

TEST(Blockwise, OneBlockEqualsDense) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 150, 16, causal);
    const NamedTensors inputs = Random(problem);
    const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), {{"blocks", "1"}});
    const NamedTensors dense = RunDense(problem, ViewsOf(inputs));
    EXPECT_EQ(MaxDifference(ours.at("out").view(), dense.at("out").view()), 0);
    EXPECT_EQ(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 0);
  }
}

// Returns one of three blocks of 50 tokens.
Inputs BlockOf(const NamedTensors& inputs, int64_t query_block, int64_t key_block) {
  return {{"q", Slice(inputs.at("q").view(), 2, 50 * query_block, 50)},
          {"k", Slice(inputs.at("k").view(), 2, 50 * key_block, 50)},
          {"v", Slice(inputs.at("v").view(), 2, 50 * key_block, 50)}};
}

TEST(Blockwise, AShiftIsDenseAttentionOfBlocksWithRolledKeysAndValues) {
  const Problem problem = Problem::SelfAttention(1, 2, 150, 16);
  const NamedTensors inputs = Random(problem);
  for (const int64_t shift : {0, 1, 2}) {
    const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), Shift(3, shift));
    for (int64_t block = 0; block < 3; ++block) {
      const NamedTensors dense = RunDense(Problem::SelfAttention(1, 2, 50, 16),
                                          BlockOf(inputs, block, (block + shift) % 3));
      EXPECT_LE(
          MaxDifference(Slice(ours.at("out").view(), 2, 50 * block, 50), dense.at("out").view()),
          Fp32Bound(inputs.at("v").view()));
    }
  }
}

TEST(Blockwise, AllShiftsMergedByLogSumExpEqualDense) {
  for (const bool causal : {false, true}) {
    const int64_t blocks = 3, tokens = 130;
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 16, causal);
    const NamedTensors inputs = Random(problem);
    std::vector<NamedTensors> parts;
    for (int64_t s = 0; s < blocks; ++s) {
      parts.push_back(RunOwn(problem, ViewsOf(inputs), Shift(blocks, s)));
    }
    Tensor merged(DType::kF64, {1, 2, tokens, 16});
    Tensor log_sum(DType::kF64, {1, 2, tokens});
    for (int64_t row = 0; row < log_sum.num_elements(); ++row) {
      double sum = 0;
      for (const auto& part : parts) sum += std::exp(part.at("log_sum_exp").view().Get(row));
      log_sum.view().Set(row, std::log(sum));
      for (int64_t c = 0; c < 16; ++c) {
        double y = 0;
        for (const auto& part : parts) {
          y += std::exp(part.at("log_sum_exp").view().Get(row)) / sum *
               part.at("out").view().Get(row * 16 + c);
        }
        merged.view().Set(row * 16 + c, y);
      }
    }
    const NamedTensors dense = RunDense(problem, ViewsOf(inputs));
    EXPECT_LE(MaxDifference(merged.view(), dense.at("out").view()),
              Fp32Bound(inputs.at("v").view()));
    EXPECT_LE(MaxDifference(log_sum.view(), dense.at("log_sum_exp").view()), 1e-5);
  }
}

TEST(Blockwise, MatchesItsDefinitionWithMixedOptions) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 200, 24, causal);
    problem.kv_heads = 2;
    problem.kv_tokens = 230;
    const NamedTensors inputs = Random(problem);
    for (const Options& options :
         {Options{{"blocks", "3"}}, Options{{"blocks", "7"}, {"shares", "1/0/2/1"}},
          Options{{"blocks", "2"}, {"permutation", "1/0/0/1/1/0/0/1"}},
          Options{{"blocks", "500"}, {"shares", "1/1"}}}) {
      const NamedTensors expected =
          DefineTechnique(Blockwise(), problem, ViewsOf(inputs), {options}).value();
      for (const Device device : TestedDevices()) {
        const NamedTensors ours =
            RunTechnique(Blockwise(), problem, ViewsOf(inputs), {options, device}).value();
        EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                  Fp32Bound(inputs.at("v").view()))
            << ToString(options) << " on " << Name(device);
        EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), expected.at("log_sum_exp").view()),
                  2e-5)
            << ToString(options) << " on " << Name(device);
      }
    }
  }
}

TEST(Blockwise, FlopsCountTheSquareDividedByTheBlocks) {
  const Problem problem = Problem::SelfAttention(3, 2, 120, 16);
  const std::unique_ptr<Layer> layer =
      Blockwise().Create(problem, {{"blocks", "4"}}, Device::kCpu, 1).value();
  const NamedTensors inputs = Random(problem);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  EXPECT_EQ(*layer->cost().flops, 2.0 * 3 * 2 * 32 * (120 * 120 / 4));
}

TEST(Blockwise, WrongListsAreRefusedWithAReason) {
  const Problem problem = Problem::SelfAttention(1, 2, 10, 8);
  const auto error = [&](const Options& options) {
    return std::string(Blockwise().Create(problem, options, Device::kCpu, 1).status().message());
  };
  EXPECT_THAT(error({{"blocks", "2"}, {"shares", "1/2/3"}}),
              HasSubstr("shares has 3 entries; allowed are 1 to blocks, 2"));
  EXPECT_THAT(error({{"blocks", "2"}, {"permutation", "0/1/1"}}),
              HasSubstr("permutation has 3 entries; allowed are blocks, 2, or"));
  EXPECT_THAT(error({{"blocks", "3"}, {"permutation", "0/1/3"}}),
              HasSubstr("permutation names block 3; allowed are 0 to blocks - 1, 2"));
  EXPECT_THAT(error({{"blocks", "3"}, {"permutation", "0/1/1"}}),
              HasSubstr("permutation names block 1 twice"));
}

}  // namespace
}  // namespace tfb::blockwise
