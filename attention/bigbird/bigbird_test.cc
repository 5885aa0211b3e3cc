#include "attention/bigbird/bigbird.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/run_allocations.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::bigbird {
namespace {

const Technique& BigBird() { return FindTechnique("bigbird"); }

using ::testing::HasSubstr;
using Keys = std::vector<int64_t>;

constexpr Device kCpu = Device::kCpu;

NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    const NamedTensors* parameters = nullptr, Device device = kCpu) {
  return RunTechnique(BigBird(), problem, ViewsOf(inputs), {options, device, 1, parameters})
      .value();
}
NamedTensors Random(const Problem& problem) {
  return RandomInputs(BigBird().InputSpecs(problem, {}).value(), 11);
}
NamedTensors TableOf(const Problem& problem, const Options& options, uint64_t seed = 1) {
  NamedTensors table;
  const auto layer = BigBird().Create(problem, options, kCpu, seed).value();
  table["random"] = layer->parameters().at("random").Clone();
  return table;
}
// Returns a table with the same rows for every head.
NamedTensors Table(int64_t heads, const std::vector<std::vector<int32_t>>& rows) {
  const int64_t blocks = static_cast<int64_t>(rows.size());
  Tensor table(DType::kI32, {heads, blocks, static_cast<int64_t>(rows[0].size())});
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t u = 0; u < blocks; ++u) {
      std::copy(rows[u].begin(), rows[u].end(), table.view().MutableAt<int32_t>(h, u));
    }
  }
  NamedTensors parameters;
  parameters["random"] = std::move(table);
  return parameters;
}

// Returns the keys that query i sees. They come from a run in which value j is the j-th unit
// vector.
Keys KeysSeen(int64_t tokens, int64_t i, const Options& options,
              const NamedTensors* parameters = nullptr) {
  Problem problem = Problem::SelfAttention(1, 1, tokens, 8);
  problem.value_dim = tokens;
  NamedTensors inputs = Random(problem);
  Fill(inputs["v"].view(), 0);
  for (int64_t j = 0; j < tokens; ++j) *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
  const NamedTensors outputs = RunOwn(problem, inputs, options, parameters);
  Keys keys;
  for (int64_t j = 0; j < tokens; ++j) {
    if (*outputs.at("out").view().At<float>(0, 0, i, j) > 0) keys.push_back(j);
  }
  return keys;
}

TEST(BigBird, AMiddleBlockSeesItsNeighboursTheEndsAndItsRandomBlocks) {
  // There are ten blocks of two tokens, the last of one.
  const Options options = {{"block", "2"}, {"random", "1"}};
  const NamedTensors table = Table(1, {{-1}, {5}, {6}, {7}, {8}, {2}, {-1}, {2}, {3}, {-1}});
  EXPECT_EQ(KeysSeen(19, 6, options, &table), (Keys{0, 1, 4, 5, 6, 7, 8, 9, 14, 15, 18}));
  EXPECT_EQ(KeysSeen(19, 2, options, &table), (Keys{0, 1, 2, 3, 4, 5, 10, 11, 18}));
  EXPECT_EQ(KeysSeen(19, 12, options, &table), (Keys{0, 1, 10, 11, 12, 13, 14, 15, 18}));
  EXPECT_EQ(KeysSeen(19, 17, options, &table), (Keys{0, 1, 6, 7, 14, 15, 16, 17, 18}));
  for (const int64_t global : {0, 1, 18}) {
    EXPECT_EQ(KeysSeen(19, global, options, &table).size(), 19u);
  }
}

TEST(BigBird, ExtendedGlobalsStandBeforeTheBlocks) {
  // Tokens 0 to 2 are global; the blocks are {3, 4}, {5, 6}, {7, 8}, {9, 10}, {11}.
  const Options options = {
      {"block", "2"}, {"random", "1"}, {"construction", "etc"}, {"global_tokens", "3"}};
  const NamedTensors table = Table(1, {{4}, {-1}, {-1}, {0}, {-1}});
  EXPECT_EQ(KeysSeen(12, 2, options, &table).size(), 12u);
  EXPECT_EQ(KeysSeen(12, 3, options, &table), (Keys{0, 1, 2, 3, 4, 5, 6, 11}));
  EXPECT_EQ(KeysSeen(12, 7, options, &table), (Keys{0, 1, 2, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(KeysSeen(12, 10, options, &table), (Keys{0, 1, 2, 3, 4, 7, 8, 9, 10, 11}));
  EXPECT_EQ(KeysSeen(12, 11, options, &table), (Keys{0, 1, 2, 9, 10, 11}));
}

TEST(BigBird, WithoutGlobalsAndRandomBlocksThereIsABandOfBlocks) {
  const Options options = {
      {"block", "3"}, {"random", "0"}, {"construction", "etc"}, {"global_tokens", "0"}};
  EXPECT_EQ(KeysSeen(10, 0, options), (Keys{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(KeysSeen(10, 5, options), (Keys{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(KeysSeen(10, 9, options), (Keys{6, 7, 8, 9}));
}

TEST(BigBird, TheSeedDrawsBlocksThatAreNotSeenAnyway) {
  const int64_t blocks = 12, random = 3;
  const Problem problem = Problem::SelfAttention(1, 4, blocks * 8 - 3, 8);
  const NamedTensors drawn = TableOf(problem, {{"block", "8"}});
  const Tensor& table = drawn.at("random");
  ASSERT_EQ(table.shape(), (Shape{4, blocks, random}));
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t u = 0; u < blocks; ++u) {
      const int32_t* row = table.view().At<int32_t>(h, u);
      if (u == 0 || u == blocks - 1) {
        EXPECT_EQ(*std::max_element(row, row + random), -1);
        continue;
      }
      EXPECT_EQ(std::set<int32_t>(row, row + random).size(), 3u);
      for (int64_t r = 0; r < random; ++r) {
        EXPECT_GT(std::abs(row[r] - u), 1);
        EXPECT_GT(row[r], 0);
        EXPECT_LT(row[r], blocks - 1);
      }
    }
  }
}

TEST(BigBird, EveryLegalBlockIsDrawnEquallyOften) {
  // Block 5 of 12 may draw from {1, 2, 3, 7, 8, 9, 10}: three of seven.
  const Problem problem = Problem::SelfAttention(1, 500, 12, 8);
  const NamedTensors drawn = TableOf(problem, {{"block", "1"}});
  std::vector<int> count(12);
  for (int64_t h = 0; h < 500; ++h) {
    for (int64_t r = 0; r < 3; ++r) ++count[*drawn.at("random").view().At<int32_t>(h, 5, r)];
  }
  for (const int64_t t : {1, 2, 3, 7, 8, 9, 10}) {
    // The variance is 500 * 3/7 * 4/7 = 11^2; the bound is five deviations.
    EXPECT_NEAR(count[t], 500 * 3 / 7.0, 55) << t;
  }
}

TEST(BigBird, RandomBlocksAreCappedAtTheLegalOnesAndExtendFewer) {
  // There are six blocks: block 1 may draw 3 and 4, block 2 only 4.
  const Problem problem = Problem::SelfAttention(1, 1, 48, 8);
  const NamedTensors many = TableOf(problem, {{"block", "8"}, {"random", "5"}});
  const NamedTensors one = TableOf(problem, {{"block", "8"}, {"random", "1"}});
  const ConstTensorView view = many.at("random").view();
  const auto row = [&](int64_t u) {
    std::vector<int32_t> blocks(view.At<int32_t>(0, u), view.At<int32_t>(0, u) + 5);
    EXPECT_EQ(blocks[0], *one.at("random").view().At<int32_t>(0, u));
    std::sort(blocks.begin(), blocks.end());
    return blocks;
  };
  EXPECT_EQ(row(0), (std::vector<int32_t>{-1, -1, -1, -1, -1}));
  EXPECT_EQ(row(1), (std::vector<int32_t>{-1, -1, -1, 3, 4}));
  EXPECT_EQ(row(2), (std::vector<int32_t>{-1, -1, -1, -1, 4}));
  EXPECT_EQ(row(3), (std::vector<int32_t>{-1, -1, -1, -1, 1}));
}

void ExpectEqualsDense(const Problem& problem, const Options& options,
                       const NamedTensors* parameters = nullptr) {
  const NamedTensors inputs = Random(problem);
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunOwn(problem, inputs, options, parameters, device);
    EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()),
              Fp32Bound(inputs.at("v").view()))
        << Name(device);
    EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 1e-5)
        << Name(device);
  }
}

TEST(BigBird, UpToFourBlocksEqualDenseWithoutRandomBlocks) {
  for (const int64_t tokens : {1, 20, 40, 41, 80}) {
    ExpectEqualsDense(Problem::SelfAttention(1, 2, tokens, 16), {{"block", "20"}, {"random", "0"}});
  }
}

TEST(BigBird, ATableOfAllBlocksEqualsDense) {
  const NamedTensors all = Table(2, {6, {0, 1, 2, 3, 4, 5}});
  ExpectEqualsDense(Problem::SelfAttention(2, 2, 130, 16), {{"block", "22"}, {"random", "6"}},
                    &all);
}

TEST(BigBird, OnlyGlobalTokensEqualDense) {
  for (const char* tokens : {"70", "1000"}) {
    ExpectEqualsDense(Problem::SelfAttention(1, 2, 70, 16),
                      {{"construction", "etc"}, {"global_tokens", tokens}});
  }
}

TEST(BigBird, ABlockThatIsNamedTwiceOrSeenAnywayCountsOnce) {
  const Problem problem = Problem::SelfAttention(1, 2, 90, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors once =
      Table(2, {{-1, -1}, {5, -1}, {5, -1}, {6, -1}, {1, -1}, {2, -1}, {2, -1}, {3, -1}, {-1, -1}});
  const NamedTensors repeated =
      Table(2, {{3, 3}, {5, 5}, {5, 0}, {4, 6}, {8, 1}, {5, 2}, {2, 2}, {3, 8}, {1, 2}});
  const Options options = {{"block", "10"}, {"random", "2"}};
  const NamedTensors a = RunOwn(problem, inputs, options, &once);
  const NamedTensors b = RunOwn(problem, inputs, options, &repeated);
  EXPECT_EQ(MaxDifference(a.at("out").view(), b.at("out").view()), 0);
  EXPECT_EQ(MaxDifference(a.at("log_sum_exp").view(), b.at("log_sum_exp").view()), 0);
}

// With queries of 0 all scores are equal, so that an output of unit vectors holds n_ij / sum_j n_ij.
TEST(BigBird, ARepeatedKeyCountsAsOftenAsItIsSeenWhereRepeatsAreCounted) {
  // There are eight blocks of two tokens, and six blocks behind three global tokens.
  const NamedTensors itc = Table(
      1,
      {{-1, -1, -1}, {0, 4, 4}, {4, 5, -1}, {0, 0, 0}, {4, 7, 1}, {1, 2, 3}, {5, 5, 6}, {3, 3, 3}});
  const NamedTensors etc =
      Table(1, {{0, 3, 3}, {4, 4, 4}, {-1, 2, -1}, {0, 0, 5}, {-1, -1, -1}, {1, 1, 1}, {5, 4, 0}});
  struct Case {
    const char* construction;
    const NamedTensors* table;
    int64_t i;
    std::string once, counted;
  };
  const std::vector<Case> cases = {{"itc", &itc, 1, "1111111111111111", "1111111111111111"},
                                   {"itc", &itc, 2, "1111110011000011", "2211110022000011"},
                                   {"itc", &itc, 5, "1111111111110011", "1111111111110011"},
                                   {"itc", &itc, 7, "1100111111000011", "4400111111000011"},
                                   {"itc", &itc, 9, "1111001111110011", "1111001122110022"},
                                   {"itc", &itc, 13, "1100000000111111", "1100000000332211"},
                                   {"itc", &itc, 15, "1111111111111111", "1111111111111111"},
                                   {"etc", &etc, 2, "1111111111111111", "1111111111111111"},
                                   {"etc", &etc, 3, "1111111001100000", "1112211002200000"},
                                   {"etc", &etc, 9, "1111100111111110", "1112200111111110"},
                                   {"etc", &etc, 15, "1111100000011111", "1111100000011221"}};
  for (const Case& c : cases) {
    for (const bool counts : {false, true}) {
      Problem problem = Problem::SelfAttention(1, 1, 16, 8);
      problem.value_dim = 16;
      NamedTensors inputs = Random(problem);
      Fill(inputs["q"].view(), 0);
      Fill(inputs["v"].view(), 0);
      for (int64_t j = 0; j < 16; ++j) *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
      const Options options = {{"block", "2"},
                               {"random", "3"},
                               {"construction", c.construction},
                               {"global_tokens", "3"},
                               {"count_repeats", counts ? "true" : "false"}};
      const auto digits = [&](const NamedTensors& outputs) {
        std::string text;
        for (int64_t j = 0; j < 16; ++j) {
          const ConstTensorView out = outputs.at("out").view(),
                                lse = outputs.at("log_sum_exp").view();
          const double times =
              out.Get(out.Offset(0, 0, c.i, j)) * std::exp(lse.Get(lse.Offset(0, 0, c.i)));
          EXPECT_NEAR(times, std::round(times), 1e-5);
          text += static_cast<char>('0' + std::lround(times));
        }
        return text;
      };
      const std::string& expected = counts ? c.counted : c.once;
      NamedTensors defined;
      ASSERT_TRUE(BigBird().Define(problem, options, *c.table, ViewsOf(inputs), {}, &defined).ok());
      EXPECT_EQ(digits(defined), expected) << c.construction << ", token " << c.i;
      for (const Device device : TestedDevices()) {
        EXPECT_EQ(digits(RunOwn(problem, inputs, options, c.table, device)), expected)
            << c.construction << ", token " << c.i << " on " << Name(device);
      }
    }
  }
}

TEST(BigBird, WithRepeatsRunAllocatesNothing) {
  const Problem problem = Problem::SelfAttention(2, 1, 16, 8);
  const Options options = {{"block", "2"}, {"random", "3"}, {"count_repeats", "true"}};
  const auto layer = BigBird().Create(problem, options, kCpu, 1).value();
  ASSERT_TRUE(layer->SetParameters(Table(1, std::vector<std::vector<int32_t>>(8, {0, 0, 0}))).ok());
  EXPECT_EQ(AllocationsOfRun(*layer, ViewsOf(Random(problem))).value(), 0);
}

TEST(BigBird, TablesOfTheSeedHaveNothingToCountTwice) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors once = RunOwn(problem, inputs, {{"block", "8"}});
  const NamedTensors counted = RunOwn(problem, inputs, {{"block", "8"}, {"count_repeats", "true"}});
  EXPECT_EQ(MaxDifference(once.at("out").view(), counted.at("out").view()), 0);
}

Problem GroupedProblem() {
  Problem problem = Problem::SelfAttention(2, 4, 203, 24);
  problem.kv_heads = 2;
  return problem;
}

// Expects that runs on the grouped problem, where one sequence ends in padding, match the
// definition.
void ExpectMatchesDefinition(const Options& options, const NamedTensors* table = nullptr) {
  const Problem problem = GroupedProblem();
  NamedTensors inputs = Random(problem);
  inputs["key_mask"] = Tensor(DType::kU8, {2, 203});
  Fill(inputs["key_mask"].view(), 1);
  Fill(Slice(Slice(inputs["key_mask"].view(), 0, 1, 1), 1, 150, 53), 0);
  RunRequest request{options};
  request.parameters = table;
  const NamedTensors expected =
      DefineTechnique(BigBird(), problem, ViewsOf(inputs), request).value();
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunOwn(problem, inputs, options, table, device);
    EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
              Fp32Bound(inputs.at("v").view()))
        << ToString(options) << " on " << Name(device);
    EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), expected.at("log_sum_exp").view()), 2e-5)
        << ToString(options) << " on " << Name(device);
  }
}

TEST(BigBird, MatchesItsDefinitionWhereATableRepeatsBlocks) {
  for (const char* construction : {"itc", "etc"}) {
    const Options options = {{"block", "13"},
                             {"random", "6"},
                             {"construction", construction},
                             {"global_tokens", "20"},
                             {"count_repeats", "true"}};
    NamedTensors table = TableOf(GroupedProblem(), options);
    const int64_t blocks = table["random"].dim(1);
    for (int64_t n = 0; n < table["random"].num_elements(); ++n) {
      table["random"].span<int32_t>()[n] = static_cast<int32_t>(n * n % 17 % (blocks / 3) - 1);
    }
    ExpectMatchesDefinition(options, &table);
  }
}

TEST(BigBird, MatchesItsDefinitionWithMixedOptions) {
  for (const Options& options :
       {Options{{"block", "16"}}, Options{{"block", "13"}, {"random", "2"}},
        Options{{"block", "8"}, {"construction", "etc"}, {"global_tokens", "70"}},
        Options{{"block", "24"}, {"random", "0"}, {"construction", "etc"}, {"global_tokens", "0"}},
        Options{{"block", "1"}, {"random", "9"}}}) {
    ExpectMatchesDefinition(options);
  }
}

TEST(BigBird, FlopsCountEachKeptPairOnceOnEveryDevice) {
  // There are 10 blocks of 8, each with a random block: the blocks at the ends see 80 keys, their
  // neighbours 5 blocks, the others 6.
  const Problem problem = Problem::SelfAttention(3, 2, 80, 16);
  const double pairs = 2 * 8 * 80 + 2 * 8 * 5 * 8 + 6 * 8 * 6 * 8;
  for (const Device device : TestedDevices()) {
    const auto layer =
        BigBird().Create(problem, {{"block", "8"}, {"random", "1"}}, device, 1).value();
    const NamedTensors inputs = Random(problem);
    ASSERT_TRUE((device == kCpu ? RunLayer(*layer, ViewsOf(inputs))
                                : RunCudaLayer(*layer, device, ViewsOf(inputs)))
                    .ok());
    EXPECT_EQ(*layer->cost().flops, 3 * 2 * 2.0 * 32 * pairs);
  }
}

TEST(BigBird, WhatItDoesNotDoIsRefusedWithAReason) {
  Problem problem = Problem::SelfAttention(1, 1, 30, 8);
  const NamedTensors table = Table(1, {{0}, {1}, {3}});
  const NamedTensors inputs = Random(problem);
  const Options options = {{"block", "10"}, {"random", "1"}};
  EXPECT_THAT(
      std::string(RunTechnique(BigBird(), problem, ViewsOf(inputs), {options, kCpu, 1, &table})
                      .status()
                      .message()),
      HasSubstr("names block 3 for block 2 of head 0; allowed are -1 to 2"));
  const NamedTensors many = Table(
      1, {std::vector<int32_t>(40, 0), std::vector<int32_t>(40, 1), std::vector<int32_t>(40, 2)});
  const Options counts = {{"block", "10"}, {"random", "40"}, {"count_repeats", "true"}};
  EXPECT_THAT(
      std::string(RunTechnique(BigBird(), problem, ViewsOf(inputs), {counts, kCpu, 1, &many})
                      .status()
                      .message()),
      HasSubstr("makes a key count 41 times; allowed are 32"));
  problem.kv_tokens = 40;
  EXPECT_THAT(std::string(BigBird().Create(problem, {}, kCpu, 1).status().message()),
              HasSubstr("query_tokens is 30, kv_tokens is 40"));
  EXPECT_EQ(
      BigBird().Create(Problem::SelfAttention(1, 1, 30, 8, true), {}, kCpu, 1).status().code(),
      absl::StatusCode::kUnimplemented);
}

// Hugging Face's BigBirdBlockSparseAttention computed these outputs; the files' metadata say how.
struct Golden {
  explicit Golden(const std::string& name)
      : file(GoldenFile("attention/bigbird/testdata/" + name + ".safetensors")) {
    const NamedTensors& tensors = file.tensors;
    const Shape shape = tensors.at("q").shape();
    problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3]);
    options = {{"block", file.metadata.at("block")}, {"random", file.metadata.at("random")}};
    for (const char* input : {"q", "k", "v"}) inputs[input] = tensors.at(input).Clone();
    inputs["key_mask"] = tensors.at("key_padding").CloneAs(DType::kU8);
    // Their table has no rows for the first and the last block.
    const Tensor& theirs = tensors.at("random_blocks");
    Tensor table(DType::kI32, {theirs.dim(0), theirs.dim(1) + 2, theirs.dim(2)});
    Fill(table.view(), -1);
    CopyElements(theirs.view(), Slice(table.view(), 1, 1, theirs.dim(1)));
    parameters["random"] = std::move(table);
    EXPECT_TRUE(BigBird().Define(problem, options, parameters, ViewsOf(inputs), {}, &defined).ok());
  }
  // Compares rows begin to end - 1 that are not padding, for which their code gives 0.
  double Difference(const Tensor& out, int64_t begin, int64_t end) const {
    double worst = 0;
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t i = begin; i < end; ++i) {
        if (*inputs.at("key_mask").view().At<uint8_t>(b, i) == 0) continue;
        const auto row = [&](const Tensor& tensor) {
          return Slice(Slice(tensor.view(), 0, b, 1), 2, i, 1);
        };
        worst = std::max(worst, MaxDifference(row(out), row(file.tensors.at("out"))));
      }
    }
    return worst;
  }

  SafetensorsFile file;
  Problem problem;
  Options options;
  NamedTensors inputs, parameters, defined;
};

void ExpectDefinitionAndEnginesMatch(const Golden& golden, const Tensor& defined) {
  const int64_t tokens = golden.problem.query_tokens;
  EXPECT_LE(golden.Difference(defined, 0, tokens), 1e-12);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours =
        RunOwn(golden.problem, golden.inputs, golden.options, &golden.parameters, device);
    EXPECT_LE(golden.Difference(ours.at("out"), 0, tokens), Fp32Bound(golden.inputs.at("v").view()))
        << Name(device);
  }
}

TEST(BigBirdGolden, DefinitionAndEnginesMatchHuggingFace) {
  const Golden golden("block_sparse");
  ExpectDefinitionAndEnginesMatch(golden, golden.defined.at("out"));
}

// Outside training, their table is block 0 throughout, which every row sees as a global block
// already: they count its keys 1 + random times.
TEST(BigBirdGolden, WithRepeatsCountedDefinitionAndEnginesMatchHuggingFaceOutsideTraining) {
  Golden golden("repeated_blocks");
  golden.options["count_repeats"] = "true";
  NamedTensors defined;
  ASSERT_TRUE(BigBird()
                  .Define(golden.problem, golden.options, golden.parameters, ViewsOf(golden.inputs),
                          {}, &defined)
                  .ok());
  ExpectDefinitionAndEnginesMatch(golden, defined.at("out"));
}

TEST(BigBirdGolden, ByDefaultRepeatedBlocksCountOnceAndNotAsHuggingFaceCountsThem) {
  const Golden golden("repeated_blocks");
  const int64_t tokens = golden.problem.query_tokens, block = 8;
  const Tensor& out = golden.defined.at("out");
  EXPECT_LE(golden.Difference(out, 0, block), 1e-12);
  EXPECT_LE(golden.Difference(out, tokens - block, tokens), 1e-12);
  for (int64_t u = 1; u + 1 < tokens / block; ++u) {
    EXPECT_GE(golden.Difference(out, u * block, (u + 1) * block), 0.1) << "block " << u;
  }
}

}  // namespace
}  // namespace tfb::bigbird
