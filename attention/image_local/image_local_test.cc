#include "attention/image_local/image_local.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::image_local {
namespace {

const Technique& ImageLocal() { return FindTechnique("image_local"); }

using ::testing::HasSubstr;
using Keys = std::vector<int64_t>;

constexpr Device kCpu = Device::kCpu;

NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    Device device = kCpu) {
  return RunTechnique(ImageLocal(), problem, ViewsOf(inputs), {options, device}).value();
}
NamedTensors Random(const Problem& problem) {
  return RandomInputs(ImageLocal().InputSpecs(problem, {}).value(), 11);
}
Problem Causal(int64_t tokens) { return Problem::SelfAttention(1, 2, tokens, 16, true); }

Options Blocks1d(int64_t query_block, int64_t memory) {
  return {{"query_block", absl::StrCat(query_block)}, {"memory", absl::StrCat(memory)}};
}
struct Size {
  int64_t height;
  int64_t width;
};
Options Blocks2d(int64_t width, Size block, Size flange) {
  return {{"form", "2d"},
          {"width", absl::StrCat(width)},
          {"block_height", absl::StrCat(block.height)},
          {"block_width", absl::StrCat(block.width)},
          {"flange_height", absl::StrCat(flange.height)},
          {"flange_width", absl::StrCat(flange.width)}};
}

// Returns the keys that query i sees. They come from a run in which value j is the j-th unit
// vector.
Keys KeysSeen(int64_t tokens, int64_t i, const Options& options, bool causal = true) {
  Problem problem = Problem::SelfAttention(1, 1, tokens, 8, causal);
  problem.value_dim = tokens;
  NamedTensors inputs = Random(problem);
  Fill(inputs["v"].view(), 0);
  for (int64_t j = 0; j < tokens; ++j) *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
  const NamedTensors outputs = RunOwn(problem, inputs, options);
  Keys keys;
  for (int64_t j = 0; j < tokens; ++j) {
    if (*outputs.at("out").view().At<float>(0, 0, i, j) > 0) keys.push_back(j);
  }
  return keys;
}
// Draws them as a picture of the image: # is the query, o a key, . neither.
std::string Picture(int64_t tokens, int64_t width, int64_t i, const Options& options) {
  std::string picture(tokens, '.');
  for (const int64_t j : KeysSeen(tokens, i, options)) picture[j] = 'o';
  EXPECT_EQ(picture[i], 'o') << "the query does not see itself";
  picture[i] = '#';
  std::string rows;
  for (int64_t begin = 0; begin < tokens; begin += width) {
    rows += picture.substr(begin, width) + "\n";
  }
  return rows;
}

TEST(ImageLocal, ACausalBlockSeesTheMemoryBeforeItAndItselfUpToTheQuery) {
  EXPECT_EQ(KeysSeen(14, 9, Blocks1d(4, 3)), (Keys{5, 6, 7, 8, 9}));
  EXPECT_EQ(KeysSeen(14, 11, Blocks1d(4, 3)), (Keys{5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(KeysSeen(14, 13, Blocks1d(4, 3)), (Keys{9, 10, 11, 12, 13}));
  EXPECT_EQ(KeysSeen(14, 2, Blocks1d(4, 3)), (Keys{0, 1, 2}));
}

TEST(ImageLocal, WithoutACausalMaskABlockSeesTheMemoryOnBothSides) {
  for (const int64_t i : {4, 7}) {
    EXPECT_EQ(KeysSeen(14, i, Blocks1d(4, 3), false), (Keys{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  }
  EXPECT_EQ(KeysSeen(14, 12, Blocks1d(4, 3), false), (Keys{9, 10, 11, 12, 13}));
}

TEST(ImageLocal, ABlockOfAnImageSeesAboveLeftAndWithin) {
  // The query is at row 3, column 4, in the middle block of 2 x 3, with one row and two columns of
  // flange.
  EXPECT_EQ(Picture(54, 9, 31, Blocks2d(9, {2, 3}, {1, 2})),
            ".........\n"
            ".ooooooo.\n"
            ".ooooo...\n"
            ".ooo#....\n"
            ".........\n"
            ".........\n");
}

TEST(ImageLocal, BlocksAtTheEdgesOfAnImageAreCutShort) {
  const Options options = Blocks2d(7, {2, 3}, {1, 1});
  EXPECT_EQ(Picture(32, 7, 26, options),
            ".......\n"
            "..ooooo\n"
            "..oooo.\n"
            "..ooo#.\n"
            "....\n");
  EXPECT_EQ(Picture(32, 7, 20, options),  // the last column is a block of its own
            ".......\n"
            ".....oo\n"
            ".....o#\n"
            ".....o.\n"
            "....\n");
  EXPECT_EQ(Picture(32, 7, 31, Blocks2d(7, {2, 3}, {3, 4})),
            ".......\n"
            "ooooooo\n"
            "ooooooo\n"
            "ooooooo\n"
            "ooo#\n");
}

TEST(ImageLocal, AWidthOfZeroIsAboutASquare) {
  const Problem problem = Causal(90);  // 9 rows of 10
  const NamedTensors inputs = Random(problem);
  const NamedTensors square = RunOwn(problem, inputs, Blocks2d(0, {2, 3}, {1, 2}));
  const NamedTensors ten = RunOwn(problem, inputs, Blocks2d(10, {2, 3}, {1, 2}));
  EXPECT_EQ(MaxDifference(square.at("out").view(), ten.at("out").view()), 0);
}

void ExpectEqualsDense(const Problem& problem, const Options& options) {
  const NamedTensors inputs = Random(problem);
  const NamedTensors ours = RunOwn(problem, inputs, options);
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()),
            Fp32Bound(inputs.at("v").view()));
  EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 1e-5);
}

TEST(ImageLocal, OneBlockEqualsDense) {
  ExpectEqualsDense(Causal(150), Blocks1d(150, 0));
  ExpectEqualsDense(Causal(150), Blocks1d(1000, 5));
  ExpectEqualsDense(Causal(150), Blocks2d(12, {13, 12}, {2, 3}));
  ExpectEqualsDense(Causal(150), Blocks2d(500, {1, 500}, {0, 0}));
}

TEST(ImageLocal, MemoryOfTheWholeSequenceEqualsDense) {
  ExpectEqualsDense(Causal(150), Blocks1d(16, 150));
  ExpectEqualsDense(Problem::SelfAttention(1, 2, 150, 16), Blocks1d(16, 150));
}

// Checks that, without memory, every block of `rows` tokens is alone.
void ExpectBlocksAlone(const Options& options, int64_t block) {
  const Problem problem = Causal(150);
  const NamedTensors inputs = Random(problem);
  const NamedTensors ours = RunOwn(problem, inputs, options);
  for (int64_t begin = 0; begin < 150; begin += block) {
    const int64_t size = std::min<int64_t>(block, 150 - begin);
    Inputs part;
    for (const char* name : {"q", "k", "v"}) {
      part.Set(name, Slice(inputs.at(name).view(), 2, begin, size));
    }
    const NamedTensors dense = RunTechnique(dense::Dense(), Causal(size), part).value();
    EXPECT_LE(MaxDifference(Slice(ours.at("out").view(), 2, begin, size), dense.at("out").view()),
              Fp32Bound(inputs.at("v").view()));
  }
}

TEST(ImageLocal, WithoutMemoryBlocksAreAlone) { ExpectBlocksAlone(Blocks1d(40, 0), 40); }

TEST(ImageLocal, BlocksOfARowWithoutFlangesAreCausalRows) {
  ExpectBlocksAlone(Blocks2d(40, {1, 40}, {0, 0}), 40);
}

TEST(ImageLocal, ABlockSeesNothingOfLaterBlocks) {
  // With blocks of 3 x 4 in 9 rows of 14, rows 3 to 5 and columns 4 to 7 are the block of token 63.
  const Problem problem = Causal(124);
  const Options options = Blocks2d(14, {3, 4}, {4, 6});
  NamedTensors inputs = Random(problem);
  const NamedTensors before = RunOwn(problem, inputs, options);
  const auto is_later = [](int64_t token) {
    const int64_t r = token / 14, c = token % 14;
    return r / 3 > 1 || (r / 3 == 1 && c / 4 > 1);
  };
  for (int64_t token = 0; token < 124; ++token) {
    if (!is_later(token)) continue;
    for (const char* name : {"q", "k", "v"}) {
      Fill(Slice(inputs.at(name).view(), 2, token, 1), 0.5);
    }
  }
  const NamedTensors after = RunOwn(problem, inputs, options);
  for (int64_t token = 0; token < 124; ++token) {
    if (is_later(token)) continue;
    EXPECT_EQ(MaxDifference(Slice(before.at("out").view(), 2, token, 1),
                            Slice(after.at("out").view(), 2, token, 1)),
              0)
        << "token " << token;
  }
}

TEST(ImageLocal, MatchesItsDefinitionInBothForms) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 333, 24, causal);
    problem.kv_heads = 2;
    NamedTensors inputs = Random(problem);
    inputs["key_mask"] = Tensor(DType::kU8, {2, 333});
    Fill(inputs["key_mask"].view(), 1);
    Fill(Slice(Slice(inputs["key_mask"].view(), 0, 1, 1), 1, 100, 150), 0);
    std::vector<Options> all = {Blocks1d(64, 64), Blocks1d(50, 7), Blocks1d(1, 0),
                                Blocks1d(7, 1000)};
    if (causal) {
      // The cases are narrow, wide and no flanges; flanges of several blocks; a block that is wider
      // than the image; an image of one column.
      for (const Options& options : {Blocks2d(0, {4, 6}, {3, 2}), Blocks2d(20, {4, 6}, {2, 5}),
                                     Blocks2d(31, {3, 8}, {7, 19}), Blocks2d(17, {5, 5}, {5, 0}),
                                     Blocks2d(17, {5, 5}, {0, 5}), Blocks2d(25, {2, 40}, {3, 4}),
                                     Blocks2d(1, {4, 4}, {5, 5}), Blocks2d(48, {8, 16}, {8, 16})}) {
        all.push_back(options);
      }
    }
    for (const Options& options : all) {
      const NamedTensors expected =
          DefineTechnique(ImageLocal(), problem, ViewsOf(inputs), {options}).value();
      for (const Device device : TestedDevices()) {
        const NamedTensors ours = RunOwn(problem, inputs, options, device);
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

double Flops(const Problem& problem, const Options& options) {
  const std::unique_ptr<Layer> layer = ImageLocal().Create(problem, options, kCpu, 1).value();
  const NamedTensors inputs = Random(problem);
  EXPECT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  return *layer->cost().flops;
}

TEST(ImageLocal, FlopsCountEachKeptPairOnce) {
  const double flops_of_pair = 2.0 * 2 * 32;  // for two heads
  // There are four blocks of 10 with memory 5, of which the first block has none.
  EXPECT_EQ(Flops(Causal(40), Blocks1d(10, 5)), flops_of_pair * (4 * 55 + 3 * 10 * 5));
  EXPECT_EQ(Flops(Problem::SelfAttention(1, 2, 40, 16), Blocks1d(10, 5)),
            flops_of_pair * 10 * (15 + 20 + 20 + 15));
  // There are 2 x 2 blocks of 2 x 3, with one row and one column of flange. Within: 21 pairs each.
  // Left: two keys for each query of the blocks at the right. Above: four keys for those below.
  EXPECT_EQ(Flops(Causal(24), Blocks2d(6, {2, 3}, {1, 1})),
            flops_of_pair * (4 * 21 + 2 * 6 * 2 + 2 * 6 * 4));
}

TEST(ImageLocal, WhatItDoesNotDoIsRefusedWithAReason) {
  const auto error = [](const Problem& problem, const Options& options) {
    return std::string(ImageLocal().Create(problem, options, kCpu, 1).status().message());
  };
  Problem cross = Causal(10);
  cross.kv_tokens = 20;
  EXPECT_THAT(error(cross, {}), HasSubstr("query_tokens is 10, kv_tokens is 20"));
  EXPECT_THAT(error(Problem::SelfAttention(1, 1, 10, 8), {{"form", "2d"}}),
              HasSubstr("form=2d is causal"));
}

// The masks of tensor2tensor made these files; their metadata say how.
class ImageLocalGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(ImageLocalGolden, DefinitionAndEnginesMatchTensor2tensorsMask) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/image_local/testdata/") + GetParam() + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  const Shape shape = tensors.at("q").shape();
  const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3],
                                                 golden.metadata.at("causal") == "true");
  const Technique& technique = ImageLocal();
  Options options;
  for (const OptionSpec& option : technique.info().options) {
    const auto value = golden.metadata.find(option.name);
    if (value != golden.metadata.end()) options[option.name] = value->second;
  }
  NamedTensors inputs, defined;
  for (const char* name : {"q", "k", "v"}) inputs[name] = tensors.at(name).Clone();
  ASSERT_TRUE(technique.Define(problem, options, {}, ViewsOf(inputs), {}, &defined).ok());
  EXPECT_LE(MaxDifference(defined["out"].view(), tensors.at("out").view()), 1e-12);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunOwn(problem, inputs, options, device);
    EXPECT_LE(MaxDifference(ours.at("out").view(), tensors.at("out").view()),
              Fp32Bound(inputs.at("v").view()))
        << Name(device);
  }
}

INSTANTIATE_TEST_SUITE_P(Files, ImageLocalGolden,
                         ::testing::Values("causal_1d", "both_sides_1d", "block_raster_2d"));

}  // namespace
}  // namespace tfb::image_local
