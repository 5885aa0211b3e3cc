#include "attention/linformer/linformer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "attention/multi_head/multi_head.h"
#include "core/definition.h"
#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::linformer {
namespace {

const Technique& Linformer() { return FindTechnique("linformer"); }

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Device kCpu = Device::kCpu;

NamedTensors Random(const Problem& problem, uint64_t seed = 11) {
  return RandomInputs(QkvInputs(problem), seed);
}
Tensor FloatsOf(const Shape& shape, const std::vector<float>& values) {
  Tensor tensor(DType::kF32, shape);
  std::copy(values.begin(), values.end(), tensor.span<float>().begin());
  return tensor;
}
// Returns E and F of one table, row by row.
NamedTensors Parameters(Tensor e, Tensor f) {
  NamedTensors parameters;
  parameters["e"] = std::move(e);
  parameters["f"] = std::move(f);
  return parameters;
}
Tensor PermutationMatrix(const std::vector<int64_t>& permutation) {
  const int64_t n = static_cast<int64_t>(permutation.size());
  Tensor matrix(DType::kF32, {1, n, n});
  Fill(matrix.view(), 0);
  for (int64_t s = 0; s < n; ++s) *matrix.view().MutableAt<float>(0, s, permutation[s]) = 1;
  return matrix;
}

// A layer's outputs, and those of the definition with the parameters that the layer has after its
// fit.
struct RunAndDefinition {
  NamedTensors run;
  NamedTensors defined;
};
RunAndDefinition RunBoth(const Problem& problem, const NamedTensors& inputs, const Options& options,
                         Device device = kCpu, const NamedTensors* parameters = nullptr) {
  const auto layer = Linformer().Create(problem, options, device, 1).value();
  if (parameters != nullptr) {
    EXPECT_TRUE(layer->SetParameters(*parameters).ok());
  }
  RunAndDefinition both;
  both.run = device == kCpu ? RunLayer(*layer, ViewsOf(inputs), 2).value()
                            : RunCudaLayer(*layer, device, ViewsOf(inputs)).value();
  const absl::Status status =
      Linformer().Define(problem, options, layer->parameters(), ViewsOf(inputs), {}, &both.defined);
  EXPECT_TRUE(status.ok()) << status;
  return both;
}
void ExpectMatch(const RunAndDefinition& both, const NamedTensors& inputs,
                 const std::string& what) {
  EXPECT_LE(MaxDifference(both.run.at("out").view(), both.defined.at("out").view()),
            Fp32Bound(inputs.at("v").view()))
      << what;
  EXPECT_LE(MaxDifference(both.run.at("log_sum_exp").view(), both.defined.at("log_sum_exp").view()),
            2e-5)
      << what;
}

NamedTensors RunDense(const Problem& problem, const Inputs& inputs) {
  return RunTechnique(dense::Dense(), problem, inputs).value();
}
NamedTensors DefineDense(const Problem& problem, const Inputs& inputs) {
  return DefineTechnique(dense::Dense(), problem, inputs).value();
}

// ---- What it computes ----

TEST(Linformer, TwoSlotsOfThreeTokensAreAsComputedByHand) {
  // K' = (1 - 2, 3) = (-1, 3), V' = (4 + 6, 2 * 5) = (10, 10 - 4) with the rows below; q = log 2.
  const Problem problem = Problem::SelfAttention(1, 1, 3, 1);
  NamedTensors inputs;
  inputs["q"] = FloatsOf({1, 1, 3, 1}, {0, std::log(2.0f), 1});
  inputs["k"] = FloatsOf({1, 1, 3, 1}, {1, 2, 3});
  inputs["v"] = FloatsOf({1, 1, 3, 1}, {4, 5, 6});
  const NamedTensors parameters = Parameters(FloatsOf({1, 2, 3}, {1, -1, 0, 0, 0, 1}),
                                             FloatsOf({1, 2, 3}, {1, 0, 1, -1, 2, 0}));
  for (const Device device : TestedDevices()) {
    const RunAndDefinition both = RunBoth(problem, inputs, {{"k", "2"}}, device, &parameters);
    // Weights 2^-1 and 2^3 over the slots' values 10 and 6.
    const double expected = (0.5 * 10 + 8 * 6) / 8.5;
    EXPECT_NEAR(both.run.at("out").span<float>()[0], 8, 1e-5);
    EXPECT_NEAR(both.run.at("out").span<float>()[1], expected, 1e-5);
    // Within the rounding of the fp32 log 2.
    EXPECT_NEAR(both.defined.at("out").span<double>()[1], expected, 1e-6);
    EXPECT_NEAR(both.run.at("log_sum_exp").span<float>()[1], std::log(8.5), 1e-5);
  }
}

TEST(Linformer, WindowsAreTheirMeansMaximaAndConvolutions) {
  // There are 5 tokens in windows of 2: the last window has one token.
  Problem problem = Problem::SelfAttention(1, 1, 5, 1);
  NamedTensors inputs;
  inputs["q"] = FloatsOf({1, 1, 5, 1}, {0, 0, 0, 0, 1});
  inputs["k"] = FloatsOf({1, 1, 5, 1}, {1, 3, 5, 7, 9});
  inputs["v"] = FloatsOf({1, 1, 5, 1}, {4, -2, 6, 1, 3});
  NamedTensors kernel =
      Parameters(FloatsOf({1, 1, 1, 2}, {1, 0.5f}), FloatsOf({1, 1, 1, 2}, {2, -1}));
  const auto softmax = [](const std::vector<double>& scores, const std::vector<double>& values) {
    double sum = 0, y = 0;
    for (size_t s = 0; s < scores.size(); ++s) {
      sum += std::exp(scores[s]);
      y += std::exp(scores[s]) * values[s];
    }
    return y / sum;
  };
  for (const Device device : TestedDevices()) {
    const auto last = [&](const char* projection, const NamedTensors* parameters) {
      const Options options = {{"k", "3"}, {"projection", projection}};
      const RunAndDefinition both = RunBoth(problem, inputs, options, device, parameters);
      ExpectMatch(both, inputs, projection);
      return both.run.at("out").span<float>()[4];
    };
    EXPECT_NEAR(last("mean", nullptr), softmax({2, 6, 9}, {1, 3.5, 3}), 1e-5);
    EXPECT_NEAR(last("max", nullptr), softmax({3, 7, 9}, {4, 6, 3}), 1e-5);
    EXPECT_NEAR(last("convolution", &kernel), softmax({2.5, 8.5, 9}, {10, 11, 6}), 1e-5);
  }
}

TEST(Linformer, ADepthwiseConvolutionHasAKernelForEachChannelAsComputedByHand) {
  // There are 3 tokens of 2 channels in windows of 2: the last window has one token.
  const Problem problem = Problem::SelfAttention(1, 1, 3, 2);
  NamedTensors inputs;
  inputs["q"] = FloatsOf({1, 1, 3, 2}, {0, 0, 0, 0, std::sqrt(2.0f), 0});
  inputs["k"] = FloatsOf({1, 1, 3, 2}, {1, 7, 3, 8, 5, 9});
  inputs["v"] = FloatsOf({1, 1, 3, 2}, {4, 1, -2, 3, 6, 5});
  const NamedTensors kernels =
      Parameters(FloatsOf({1, 2, 2}, {1, 0.5f, 8, 9}), FloatsOf({1, 2, 2}, {2, -1, 1, 10}));
  // K' = (1 + 1.5, ...), (5, ...); V' = (8 + 2, 1 + 30), (12, 5); scores 2.5 and 5.
  const double first = 1 / (1 + std::exp(2.5));
  for (const Device device : TestedDevices()) {
    const Options options = {{"k", "2"}, {"projection", "depthwise_convolution"}};
    const RunAndDefinition both = RunBoth(problem, inputs, options, device, &kernels);
    EXPECT_NEAR(both.run.at("out").span<float>()[4], 12 - 2 * first, 1e-5);
    EXPECT_NEAR(both.run.at("out").span<float>()[5], 5 + 26 * first, 1e-5);
    ExpectMatch(both, inputs, "depthwise");
  }
}

// A full convolution without its entries from one channel to another is a depthwise one.
TEST(Linformer, ADiagonalConvolutionIsADepthwiseOne) {
  const Problem problem = Problem::SelfAttention(2, 3, 50, 5);
  const NamedTensors inputs = Random(problem);
  Options options = {{"k", "7"}, {"projection", "depthwise_convolution"}};
  const auto layer = Linformer().Create(problem, options, kCpu, 1).value();
  NamedTensors diagonal;
  for (const auto& [name, kernels] : layer->parameters()) {  // [heads, channels, 8]
    Tensor& full = diagonal[name] = Tensor(DType::kF32, {3, 5, 5, 8});
    Fill(full.view(), 0);
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t c = 0; c < 5; ++c) {
        std::copy_n(kernels.view().At<float>(h, c), 8, full.view().MutableAt<float>(h, c, c));
      }
    }
  }
  for (const Device device : TestedDevices()) {
    const RunAndDefinition depthwise =
        RunBoth(problem, inputs, options, device, &layer->parameters());
    Options other = options;
    other["projection"] = "convolution";
    const RunAndDefinition full = RunBoth(problem, inputs, other, device, &diagonal);
    EXPECT_LE(MaxDifference(depthwise.run.at("out").view(), full.run.at("out").view()),
              Fp32Bound(inputs.at("v").view()));
    EXPECT_LE(MaxDifference(depthwise.defined.at("out").view(), full.defined.at("out").view()),
              1e-14);
  }
}

TEST(Linformer, PaddingIsZeroBeforeItIsCompressedAndItsSlotKeepsItsWeight) {
  // E = F = I: the padded token is a slot of zeros with weight exp(0).
  Problem problem = Problem::SelfAttention(1, 1, 3, 1);
  NamedTensors inputs;
  inputs["q"] = FloatsOf({1, 1, 3, 1}, {1, 1, 1});
  inputs["k"] = FloatsOf({1, 1, 3, 1}, {1, NAN, 2});
  inputs["v"] = FloatsOf({1, 1, 3, 1}, {4, NAN, 6});
  inputs["key_mask"] = Tensor(DType::kU8, {1, 3});
  std::copy_n(std::vector<uint8_t>{1, 0, 1}.begin(), 3, inputs["key_mask"].span<uint8_t>().begin());
  const NamedTensors identity =
      Parameters(PermutationMatrix({0, 1, 2}), PermutationMatrix({0, 1, 2}));
  const double e = std::exp(1.0);
  for (const Device device : TestedDevices()) {
    const RunAndDefinition both = RunBoth(problem, inputs, {{"k", "3"}}, device, &identity);
    EXPECT_NEAR(both.run.at("out").span<float>()[0], (4 * e + 6 * e * e) / (1 + e + e * e), 1e-5);
    EXPECT_NEAR(both.defined.at("out").span<double>()[0], (4 * e + 6 * e * e) / (1 + e + e * e),
                1e-12);
    // Where all tokens are padding, all slots are zeros.
    Fill(inputs["key_mask"].view(), 0);
    for (const char* projection :
         {"learned", "mean", "max", "convolution", "depthwise_convolution", "fit"}) {
      const RunAndDefinition none =
          RunBoth(problem, inputs, {{"k", "3"}, {"projection", projection}}, device);
      EXPECT_EQ(none.run.at("out").span<float>()[0], 0) << projection;
      EXPECT_NEAR(none.run.at("log_sum_exp").span<float>()[0], std::log(3.0), 1e-6) << projection;
    }
    std::copy_n(std::vector<uint8_t>{1, 0, 1}.begin(), 3,
                inputs["key_mask"].span<uint8_t>().begin());
  }
}

std::vector<Options> ManyOptions() {
  std::vector<Options> all;
  for (const char* projection :
       {"learned", "mean", "max", "convolution", "depthwise_convolution", "fit"}) {
    for (const char* sharing : {"none", "headwise", "key_value", "layerwise"}) {
      for (const char* k : {"1", "7", "70"}) {
        all.push_back({{"projection", projection}, {"sharing", sharing}, {"k", k}});
      }
    }
  }
  return all;
}

TEST(Linformer, LayerEqualsDefinitionUnderEveryOption) {
  Problem problem = Problem::SelfAttention(2, 4, 50, 20);
  problem.kv_heads = 2;
  problem.kv_tokens = 110;
  NamedTensors inputs = Random(problem);
  NamedTensors padded = Random(problem);
  Tensor& mask = padded["key_mask"] = Tensor(DType::kU8, {2, 110});
  for (int64_t n = 0; n < 220; ++n) mask.span<uint8_t>()[n] = n % 7 != 3;
  for (const Options& options : ManyOptions()) {
    for (const Device device : TestedDevices()) {
      ExpectMatch(RunBoth(problem, inputs, options, device), inputs, ToString(options));
      ExpectMatch(RunBoth(problem, padded, options, device), padded, ToString(options));
    }
  }
}

TEST(Linformer, AnyHeadDimAndValueDimMatchesTheDefinition) {
  for (const int64_t head_dim : {1, 7, 40, 64, 80, 256}) {
    for (const int64_t value_dim : {int64_t{1}, int64_t{24}, head_dim}) {
      Problem problem = Problem::SelfAttention(1, 2, 70, head_dim);
      problem.value_dim = value_dim;
      const NamedTensors inputs = Random(problem);
      for (const char* projection :
           {"learned", "max", "convolution", "depthwise_convolution", "fit"}) {
        const Options options = {{"k", "9"}, {"projection", projection}};
        for (const Device device : TestedDevices()) {
          if (device != kCpu && head_dim == 256) continue;  // slow there
          ExpectMatch(RunBoth(problem, inputs, options, device), inputs,
                      absl::StrCat(projection, " ", problem.ToString()));
        }
      }
    }
  }
}

TEST(Linformer, ChunksOfTokensAddUpToTheSameBitsOnAnyNumberOfThreads) {
  const Problem problem = Problem::SelfAttention(1, 2, 2500, 16);  // whole chunks and a part
  const NamedTensors inputs = Random(problem);
  const Options options = {{"k", "20"}};
  for (const Device device : TestedDevices()) {
    ExpectMatch(RunBoth(problem, inputs, options, device), inputs, "2500 tokens");
  }
  RunRequest one, three;
  one.options = three.options = options;
  three.threads = 3;
  EXPECT_EQ(
      MaxDifference(RunTechnique(Linformer(), problem, ViewsOf(inputs), one)->at("out").view(),
                    RunTechnique(Linformer(), problem, ViewsOf(inputs), three)->at("out").view()),
      0);
}

TEST(Linformer, EqualsTheCodesOfOthersWithTheirMatrices) {
  const std::vector<std::pair<const char*, Options>> files = {
      {
          "headwise",
          {{"sharing", "headwise"}},
      },
      {"shorter_input", {{"sharing", "headwise"}}},
      {"one_key_value_head", {{"sharing", "headwise"}}},
      {"each_head", {}},
      {"convolution", {{"projection", "convolution"}}},
      {"depthwise_convolution", {{"projection", "depthwise_convolution"}}}};
  for (const auto& [name, how] : files) {
    const SafetensorsFile file =
        GoldenFile(absl::StrCat("attention/linformer/testdata/", name, ".safetensors"));
    const Shape q = file.tensors.at("q").shape(), k = file.tensors.at("k").shape();
    Problem problem = Problem::SelfAttention(q[0], q[1], q[2], q[3]);
    problem.kv_heads = k[1];
    NamedTensors inputs;
    for (const char* input : {"q", "k", "v"}) inputs[input] = file.tensors.at(input).Clone();
    Tensor e = file.tensors.at("e").Clone();
    Options options = how;
    // For a convolution, whose last dimension is the kernel's, there are as many slots as windows.
    const bool convolves = options.count("projection") > 0;
    options["k"] = absl::StrCat(convolves ? k[2] / e.shape().back() : e.dim(1));
    const NamedTensors parameters = Parameters(std::move(e), file.tensors.at("f").Clone());
    for (const Device device : TestedDevices()) {
      const RunAndDefinition both = RunBoth(problem, inputs, options, device, &parameters);
      const ConstTensorView expected = file.tensors.at("out").view();
      EXPECT_LE(MaxDifference(both.run.at("out").view(), expected), Fp32Bound(inputs["v"].view()))
          << name;
      EXPECT_LE(MaxDifference(both.defined.at("out").view(), expected), 1e-12) << name;
    }
  }
}

// ---- Invariants ----

TEST(Linformer, IdentityMatricesGiveDenseAttention) {
  const Problem problem = Problem::SelfAttention(2, 2, 100, 16);
  const NamedTensors inputs = Random(problem);
  std::vector<int64_t> order(100);
  std::iota(order.begin(), order.end(), 0);
  const NamedTensors parameters = Parameters(PermutationMatrix(order), PermutationMatrix(order));
  const RunAndDefinition both =
      RunBoth(problem, inputs, {{"k", "100"}, {"sharing", "headwise"}}, kCpu, &parameters);
  const NamedTensors dense = RunDense(problem, ViewsOf(inputs));
  for (const char* name : {"out", "log_sum_exp"}) {
    EXPECT_EQ(MaxDifference(both.run.at(name).view(), dense.at(name).view()), 0) << name;
  }
}

TEST(Linformer, APermutationOfTheTokensGivesDenseAttention) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  const NamedTensors inputs = Random(problem);
  std::vector<int64_t> order;
  for (int64_t s = 0; s < 100; ++s) order.push_back(s * 37 % 100);
  const NamedTensors parameters = Parameters(PermutationMatrix(order), PermutationMatrix(order));
  const RunAndDefinition both =
      RunBoth(problem, inputs, {{"k", "100"}, {"sharing", "headwise"}}, kCpu, &parameters);
  EXPECT_LE(
      MaxDifference(both.run.at("out").view(), RunDense(problem, ViewsOf(inputs)).at("out").view()),
      Fp32Bound(inputs.at("v").view()));
}

TEST(Linformer, OneSlotAnswersEveryQueryWithFV) {
  const Problem problem = Problem::SelfAttention(1, 1, 60, 4);
  const NamedTensors inputs = Random(problem);
  const auto layer = Linformer().Create(problem, {{"k", "1"}}, kCpu, 1).value();
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs)).value();
  const DoubleTensor f(layer->parameters().at("f").view()), v(inputs.at("v").view());
  for (int64_t c = 0; c < 4; ++c) {
    double expected = 0;
    for (int64_t j = 0; j < 60; ++j) expected += f.Row(0, 0)[j] * v.Row(0, 0, j)[c];
    for (int64_t i = 0; i < 60; ++i) {
      EXPECT_NEAR(*outputs.at("out").view().At<float>(0, 0, i, c), expected, 1e-6);
    }
  }
}

TEST(Linformer, WeightsOverSlotsSumToOne) {
  // V' = 1 in all slots where the rows of F are 1 / tokens and the values 1.
  const Problem problem = Problem::SelfAttention(1, 2, 64, 8);
  NamedTensors inputs = Random(problem);
  Fill(inputs["v"].view(), 1);
  const auto layer = Linformer().Create(problem, {{"k", "12"}}, kCpu, 1).value();
  NamedTensors f;
  f["f"] = Tensor(DType::kF32, layer->parameters().at("f").shape());
  Fill(f["f"].view(), 1.0 / 64);
  ASSERT_TRUE(layer->SetParameters(f).ok());
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs)).value();
  for (const float y : outputs.at("out").span<float>()) EXPECT_NEAR(y, 1, 2e-6);
}

// Computes the rank by elimination with pivots.
int64_t Rank(std::vector<std::vector<double>> rows, double smallest) {
  int64_t rank = 0;
  for (size_t c = 0; c < rows[0].size() && rank < static_cast<int64_t>(rows.size()); ++c) {
    const auto pivot = std::max_element(
        rows.begin() + rank, rows.end(),
        [c](const auto& a, const auto& b) { return std::abs(a[c]) < std::abs(b[c]); });
    if (std::abs((*pivot)[c]) < smallest) continue;
    std::swap(*pivot, rows[rank]);
    for (size_t r = rank + 1; r < rows.size(); ++r) {
      const double factor = rows[r][c] / rows[rank][c];
      for (size_t d = c; d < rows[r].size(); ++d) rows[r][d] -= factor * rows[rank][d];
    }
    ++rank;
  }
  return rank;
}

TEST(Linformer, TheMapFromValuesToOutputsHasTheRankOfTheSlots) {
  Problem problem = Problem::SelfAttention(1, 1, 40, 16);
  problem.value_dim = 40;
  NamedTensors inputs = Random(problem);
  Fill(inputs["v"].view(), 0);
  for (int64_t j = 0; j < 40; ++j) *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
  for (const int64_t k : {1, 5, 12}) {
    const RunAndDefinition both = RunBoth(problem, inputs, {{"k", absl::StrCat(k)}});
    std::vector<std::vector<double>> rows;
    for (int64_t i = 0; i < 40; ++i) {
      const double* row = both.defined.at("out").view().At<double>(0, 0, i);
      rows.emplace_back(row, row + 40);
    }
    EXPECT_EQ(Rank(std::move(rows), 1e-12), k);
  }
}

TEST(Linformer, MeanPoolingToHalfTheTokensAveragesNeighbours) {
  const Problem problem = Problem::SelfAttention(1, 2, 60, 8);
  const NamedTensors inputs = Random(problem);
  Problem halved = problem;
  halved.kv_tokens = 30;
  NamedTensors averaged;
  averaged["q"] = inputs.at("q").Clone();
  for (const char* name : {"k", "v"}) {
    const DoubleTensor rows(inputs.at(name).view());
    Tensor& means = averaged[name] = Tensor(DType::kF32, {1, 2, 30, 8});
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t s = 0; s < 30; ++s) {
        for (int64_t c = 0; c < 8; ++c) {
          *means.view().MutableAt<float>(0, h, s, c) =
              static_cast<float>((rows.Row(0, h, 2 * s)[c] + rows.Row(0, h, 2 * s + 1)[c]) / 2);
        }
      }
    }
  }
  const RunAndDefinition both = RunBoth(problem, inputs, {{"k", "30"}, {"projection", "mean"}});
  EXPECT_LE(MaxDifference(both.run.at("out").view(),
                          RunDense(halved, ViewsOf(averaged)).at("out").view()),
            Fp32Bound(inputs.at("v").view()));
}

TEST(Linformer, WhatIsInASequenceChangesNoBitOfAnother) {
  const Problem many = Problem::SelfAttention(4, 2, 80, 16);
  Problem alone = many;
  alone.batch = 1;
  const NamedTensors inputs = Random(many);
  NamedTensors first, others;
  for (const auto& [name, tensor] : inputs) {
    CopyElements(Slice(tensor.view(), 0, 0, 1),
                 (first[name] = Tensor(tensor.dtype(), {1, 2, 80, 16})).view());
    others[name] = tensor.Clone();
    Fill(Slice(others[name].view(), 0, 1, 3), 3);
  }
  for (const char* k : {"64", "256"}) {
    for (const Device device : TestedDevices()) {
      const auto out = [&](const Problem& problem, const NamedTensors& of) {
        return std::move(RunTechnique(Linformer(), problem, ViewsOf(of), {{{"k", k}}, device})
                             .value()
                             .at("out"));
      };
      const Tensor of_many = out(many, inputs);
      const ConstTensorView expected = Slice(of_many.view(), 0, 0, 1);
      EXPECT_EQ(MaxDifference(Slice(out(many, others).view(), 0, 0, 1), expected), 0)
          << k << " slots on " << Name(device);
      // On a GPU, four tiles of slots are cut into parts where there are few sequences.
      const bool cuts = device != Device::kCpu && std::string(k) == "256";
      EXPECT_LE(MaxDifference(out(alone, first).view(), expected), cuts ? Fp32Bound(expected) : 0)
          << k << " slots on " << Name(device);
    }
  }
}

// ---- Sharing and depth ----

TEST(Linformer, SharingSaysWhichTablesThereAre) {
  const Problem problem = Problem::SelfAttention(1, 3, 20, 8);
  const auto shapes = [&](const char* sharing, const char* projection) {
    const auto layer =
        Linformer()
            .Create(problem, {{"k", "5"}, {"sharing", sharing}, {"projection", projection}}, kCpu,
                    1)
            .value();
    std::string all;
    for (const auto& [name, tensor] : layer->parameters()) {
      absl::StrAppend(&all, name, ShapeString(tensor.shape()));
    }
    return all;
  };
  EXPECT_EQ(shapes("none", "learned"), "e[3, 5, 20]f[3, 5, 20]");
  EXPECT_EQ(shapes("headwise", "learned"), "e[1, 5, 20]f[1, 5, 20]");
  EXPECT_EQ(shapes("key_value", "learned"), "e[1, 5, 20]");
  EXPECT_EQ(shapes("layerwise", "learned"), "e[1, 5, 20]");
  EXPECT_EQ(shapes("none", "convolution"), "e[3, 8, 8, 4]f[3, 8, 8, 4]");
  EXPECT_EQ(shapes("none", "depthwise_convolution"), "e[3, 8, 4]f[3, 8, 4]");
  EXPECT_EQ(shapes("key_value", "depthwise_convolution"), "e[1, 8, 4]");
  EXPECT_EQ(shapes("none", "fit"), "e[3, 5, 20]");
  EXPECT_EQ(shapes("none", "mean"), "");
}

TEST(Linformer, OnlyLayerwiseSharingGivesAllLayersTheSameMatrix) {
  const Problem problem = Problem::SelfAttention(1, 2, 20, 8);
  const auto e = [&](const char* sharing, const char* layer) {
    return Linformer()
        .Create(problem, {{"k", "5"}, {"sharing", sharing}, {"layer", layer}}, kCpu, 1)
        .value()
        ->parameters()
        .at("e")
        .Clone();
  };
  for (const char* sharing : {"none", "headwise", "key_value"}) {
    EXPECT_GT(MaxDifference(e(sharing, "0").view(), e(sharing, "3").view()), 0.1) << sharing;
  }
  EXPECT_EQ(MaxDifference(e("layerwise", "0").view(), e("layerwise", "3").view()), 0);
}

TEST(Linformer, DeeperLayersHaveFewerSlotsAndAtLeastOne) {
  const Problem problem = Problem::SelfAttention(1, 2, 64, 8);
  const auto slots = [&](const char* layer, const char* projection) {
    return Linformer()
        .Create(problem,
                {{"k", "20"}, {"k_step", "6"}, {"layer", layer}, {"projection", projection}}, kCpu,
                1)
        .value()
        ->statistics()
        .at("slots");
  };
  EXPECT_THAT((std::vector<double>{slots("0", "learned"), slots("1", "learned"),
                                   slots("3", "learned"), slots("9", "learned")}),
              ElementsAre(20, 14, 2, 1));
  // The windows have ceil(64 / 20) = 4 and ceil(64 / 14) = 5 tokens.
  EXPECT_EQ(slots("0", "mean"), 16);
  EXPECT_EQ(slots("1", "mean"), 13);
}

// ---- The fit ----

// Returns the mean of the rows and their covariance.
std::vector<double> Moments(const DoubleTensor& k, const DoubleTensor& v, int64_t rows,
                            int64_t channels) {
  const auto at = [&](int64_t n, int64_t c) {
    return c < channels ? k.Row(0, 0, n)[c] : v.Row(0, 0, n)[c - channels];
  };
  const double count = static_cast<double>(rows);
  std::vector<double> mean(2 * channels), moments;
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t c = 0; c < 2 * channels; ++c) mean[c] += at(n, c) / count;
  }
  moments = mean;
  for (int64_t a = 0; a < 2 * channels; ++a) {
    for (int64_t b = 0; b < 2 * channels; ++b) {
      double covariance = 0;
      for (int64_t n = 0; n < rows; ++n) {
        covariance += (at(n, a) - mean[a]) * (at(n, b) - mean[b]) / count;
      }
      moments.push_back(covariance);
    }
  }
  return moments;
}

// Returns E x, for one head.
DoubleTensor Compressed(const Tensor& e, const Tensor& x) {
  const DoubleTensor table(e.view()), rows(x.view());
  Tensor slots(DType::kF64, {1, 1, e.dim(1), x.dim(3)});
  Fill(slots.view(), 0);
  for (int64_t s = 0; s < e.dim(1); ++s) {
    for (int64_t j = 0; j < e.dim(2); ++j) {
      for (int64_t c = 0; c < x.dim(3); ++c) {
        *slots.view().MutableAt<double>(0, 0, s, c) += table.Row(0, s)[j] * rows.Row(0, 0, j)[c];
      }
    }
  }
  return DoubleTensor(slots.view());
}

Tensor Fitted(const Problem& problem, const NamedTensors& inputs, const Options& options,
              Device device = kCpu) {
  const auto layer = Linformer().Create(problem, options, device, 1).value();
  EXPECT_TRUE((device == kCpu ? RunLayer(*layer, ViewsOf(inputs))
                              : RunCudaLayer(*layer, device, ViewsOf(inputs)))
                  .ok());
  return layer->parameters().at("e").Clone();
}

TEST(Linformer, AFitWithSlotsEnoughKeepsMeanAndCovarianceOfKeysAndValues) {
  const Problem problem = Problem::SelfAttention(1, 1, 90, 6);
  const NamedTensors inputs = Random(problem);
  const DoubleTensor k(inputs.at("k").view()), v(inputs.at("v").view());
  const std::vector<double> of_tokens = Moments(k, v, 90, 6);
  for (const int64_t slots : {13, 20, 90}) {  // at least 2 * 6 + 1 slots
    const Tensor e = Fitted(problem, inputs, {{"k", absl::StrCat(slots)}, {"projection", "fit"}});
    const std::vector<double> of_slots =
        Moments(Compressed(e, inputs.at("k")), Compressed(e, inputs.at("v")), slots, 6);
    for (size_t n = 0; n < of_tokens.size(); ++n) {
      EXPECT_NEAR(of_slots[n], of_tokens[n], 1e-6) << slots << " slots, moment " << n;
    }
  }
  const std::vector<double> of_few = Moments(
      Compressed(Fitted(problem, inputs, {{"k", "12"}, {"projection", "fit"}}), inputs.at("k")),
      Compressed(Fitted(problem, inputs, {{"k", "12"}, {"projection", "fit"}}), inputs.at("v")), 12,
      6);
  double difference = 0, less = 0;
  for (size_t n = 0; n < of_tokens.size(); ++n) {
    difference = std::max(difference, std::abs(of_few[n] - of_tokens[n]));
  }
  for (size_t c = 0; c < 12; ++c) less += of_tokens[12 + 13 * c] - of_few[12 + 13 * c];
  EXPECT_GT(difference, 1e-3);
  // The smallest of twelve parts of the total variance is missing.
  EXPECT_GT(less, 0);
  EXPECT_LT(less, 1);
}

TEST(Linformer, AFitWithASlotForEachTokenIsDenseAttention) {
  Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors dense = DefineDense(problem, ViewsOf(inputs));
  for (const char* sharing : {"none", "headwise"}) {
    for (const Device device : TestedDevices()) {
      const RunAndDefinition both = RunBoth(
          problem, inputs, {{"k", "70"}, {"projection", "fit"}, {"sharing", sharing}}, device);
      EXPECT_LE(MaxDifference(both.run.at("out").view(), dense.at("out").view()),
                Fp32Bound(inputs.at("v").view()))
          << sharing;
    }
  }
}

TEST(Linformer, AFitIsDenseAttentionToFirstOrderInSmallScores) {
  Problem problem = Problem::SelfAttention(1, 1, 200, 6);
  NamedTensors inputs = Random(problem);
  const auto error = [&](float scale) {
    NamedTensors scaled;
    for (const auto& [name, tensor] : inputs) scaled[name] = tensor.Clone();
    for (float& x : scaled["q"].span<float>()) x *= scale;
    const RunAndDefinition both = RunBoth(problem, scaled, {{"k", "40"}, {"projection", "fit"}});
    return MaxDifference(both.defined.at("out").view(),
                         DefineDense(problem, ViewsOf(scaled)).at("out").view());
  };
  // The error is of second order: a tenth of the scores has a hundredth of it.
  EXPECT_NEAR(error(0.1f) / error(0.01f), 100, 20);
}

TEST(Linformer, AFitIsNearerToDenseAttentionThanMatricesOfTheSeed) {
  const Problem problem = Problem::SelfAttention(1, 2, 300, 8);
  const NamedTensors inputs = Random(problem);
  const NamedTensors dense = DefineDense(problem, ViewsOf(inputs));
  const auto error = [&](const Options& options) {
    const RunAndDefinition both = RunBoth(problem, inputs, options);
    double sum = 0;
    for (int64_t n = 0; n < dense.at("out").num_elements(); ++n) {
      sum += std::pow(both.run.at("out").span<float>()[n] - dense.at("out").span<double>()[n], 2);
    }
    return std::sqrt(sum);
  };
  EXPECT_LT(error({{"k", "128"}, {"projection", "fit"}}), error({{"k", "128"}}) / 2);
}

TEST(Linformer, AFitIsToEachSequenceItsTokensAndTheSameOnEveryDevice) {
  Problem problem = Problem::SelfAttention(2, 2, 40, 4);
  NamedTensors inputs = Random(problem);
  Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 40});
  for (int64_t n = 0; n < 80; ++n) mask.span<uint8_t>()[n] = n % 9 != 4;
  const Options options = {{"k", "10"}, {"projection", "fit"}};
  const Tensor both = Fitted(problem, inputs, options);
  EXPECT_THAT(both.shape(), ElementsAre(4, 10, 40));
  EXPECT_EQ(MaxDifference(both.view(), Fitted(problem, inputs, options, KernelDevice()).view()), 0);
  for (int64_t j = 0; j < 40; ++j) {
    EXPECT_EQ(*both.view().At<float>(0, 3, j) == 0, j % 9 == 4);
  }
  Problem single = problem;
  single.batch = 1;
  NamedTensors second;
  for (const auto& [name, tensor] : inputs) {
    const ConstTensorView row = Slice(tensor.view(), 0, 1, 1);
    second[name] = Tensor(tensor.dtype(), row.shape());
    CopyElements(row, second[name].view());
  }
  EXPECT_EQ(MaxDifference(Fitted(single, second, options).view(),
                          Slice(std::as_const(both).view(), 0, 2, 2)),
            0);
}

TEST(Linformer, AFitInsideAnotherLayerIsToItsKeysAndValues) {
  const Problem problem = Problem::SelfAttention(2, 2, 30, 8);
  const NamedTensors inputs = RandomInputs(HiddenInputs(problem), 5);
  const auto error = [&](const char* inner) {
    RunRequest request;
    request.options = {{"inner", inner}};
    const NamedTensors run =
        RunTechnique(FindTechnique("multi_head"), problem, ViewsOf(inputs), request).value();
    const NamedTensors defined =
        DefineTechnique(FindTechnique("multi_head"), problem, ViewsOf(inputs), request).value();
    return MaxDifference(run.at("out").view(), defined.at("out").view());
  };
  EXPECT_LE(error("linformer[k=12,projection=fit]"), 2e-5);
  EXPECT_LE(error("linformer[k=12]"), 2e-5);
}

TEST(Linformer, AFitFollowsTheInputsOfSetupUnlessTheCallerGaveMatrices) {
  const Problem problem = Problem::SelfAttention(1, 1, 30, 4);
  const NamedTensors one = Random(problem, 1), other = Random(problem, 2);
  const auto layer =
      Linformer().Create(problem, {{"k", "6"}, {"projection", "fit"}}, kCpu, 1).value();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(one)).ok());
  const Tensor first = layer->parameters().at("e").Clone();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(other)).ok());
  EXPECT_GT(MaxDifference(layer->parameters().at("e").view(), first.view()), 0.01);
  NamedTensors given;
  given["e"] = first.Clone();
  ASSERT_TRUE(layer->SetParameters(given).ok());
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(other)).ok());
  EXPECT_EQ(MaxDifference(layer->parameters().at("e").view(), first.view()), 0);
}

TEST(Linformer, AFitOfEqualOrOfNonFiniteKeysIsTheirMeanOrAnError) {
  const Problem problem = Problem::SelfAttention(1, 1, 30, 4);
  NamedTensors inputs = Random(problem);
  Fill(inputs["v"].view(), -3);
  const Options options = {{"k", "6"}, {"projection", "fit"}};
  Fill(inputs["k"].view(), 0.1);  // the mean of these values is rounded
  const RunAndDefinition equal = RunBoth(problem, inputs, options);
  for (const float y : equal.run.at("out").span<float>()) EXPECT_NEAR(y, -3, 1e-6);
  inputs["v"].span<float>()[7] = NAN;
  const auto layer = Linformer().Create(problem, options, kCpu, 1).value();
  const absl::Status status = RunLayer(*layer, ViewsOf(inputs)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("finite"));
}

// ---- Gradients ----

// A problem of grouped heads whose second sequence has padding.
Problem UnevenProblem(int64_t tokens, int64_t value_dim = 10) {
  Problem problem = Problem::SelfAttention(2, 4, tokens, 10);
  problem.kv_heads = 2;
  problem.query_tokens = 20;
  problem.value_dim = value_dim;
  return problem;
}
const int64_t kPadding[] = {0, 5, 6, 7, 17};
NamedTensors UnevenInputs(const Problem& problem) {
  NamedTensors inputs = Random(problem);
  Tensor mask(DType::kU8, {2, problem.kv_tokens});
  Fill(mask.view(), 1);
  for (const int64_t j : kPadding) mask.span<uint8_t>()[problem.kv_tokens + j] = 0;
  inputs["key_mask"] = std::move(mask);
  return inputs;
}
NamedTensors OutputGradients(const Problem& p) {
  NamedTensors gradients;
  gradients["out"] = Tensor(p.dtype, {p.batch, p.query_heads, p.query_tokens, p.value_dim});
  gradients["log_sum_exp"] = Tensor(DType::kF32, {p.batch, p.query_heads, p.query_tokens});
  for (auto& [name, gradient] : gradients) FillNormal(&gradient, 5, name);
  return gradients;
}
RunAndGradients Backward(const Problem& problem, const NamedTensors& inputs, const Options& options,
                         const NamedTensors& output_gradients, Device device, int threads = 2,
                         const NamedTensors* parameters = nullptr) {
  return BackwardOfTechnique(Linformer(), problem, ViewsOf(inputs), output_gradients,
                             {options, device, 1, parameters, threads})
      .value();
}

class LinformerBackward : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, LinformerBackward, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

void ExpectGradientsOfTheDefinition(const Problem& problem, const Options& options, Device device,
                                    const NamedTensors* parameters = nullptr) {
  const NamedTensors inputs = UnevenInputs(problem), g = OutputGradients(problem);
  const RunAndGradients pass = Backward(problem, inputs, options, g, device, 2, parameters);
  RunRequest request{options};
  request.parameters = parameters;
  std::vector<std::string> names = {"q", "k", "v"};
  for (const auto& [name, gradient] : pass.parameters) names.push_back(name);
  for (const std::string& name : names) {
    const DirectionalDerivative d =
        DerivativeOf(name, Linformer(), problem, inputs, g, pass, request);
    EXPECT_NE(d.of_definition, 0) << name;
    EXPECT_NEAR(d.of_layer, d.of_definition, d.bound) << name << ", " << ToString(options);
  }
}

// Two blocks of 128 tokens; windows of 2, the 75 slots of which are two blocks of 64.
TEST_P(LinformerBackward, GradientsAreTheDefinitionsUnderEverySharing) {
  for (const char* projection :
       {"learned", "mean", "max", "convolution", "depthwise_convolution"}) {
    for (const char* sharing : {"none", "headwise", "key_value", "layerwise"}) {
      ExpectGradientsOfTheDefinition(
          UnevenProblem(149), {{"k", "75"}, {"projection", projection}, {"sharing", sharing}},
          GetParam());
    }
    ExpectGradientsOfTheDefinition(UnevenProblem(70, /*value_dim=*/7),
                                   {{"k", "16"}, {"projection", projection}}, GetParam());
  }
}

TEST_P(LinformerBackward, GradientsOfMoreSlotsThanAreTakenAtOnce) {
  ExpectGradientsOfTheDefinition(UnevenProblem(20), {{"k", "300"}, {"sharing", "key_value"}},
                                 GetParam());
}

// The fit is of another sequence, whose matrix counts as a constant.
TEST_P(LinformerBackward, AFittedMatrixHasAGradientAndTheFitNone) {
  const Problem problem = UnevenProblem(30);
  for (const char* sharing : {"none", "headwise"}) {
    const Options options = {{"k", "12"}, {"projection", "fit"}, {"sharing", sharing}};
    const auto layer = Linformer().Create(problem, options, kCpu, 1).value();
    RunLayer(*layer, ViewsOf(Random(problem, /*seed=*/3))).value();
    ExpectGradientsOfTheDefinition(problem, options, GetParam(), &layer->parameters());
  }
}

TEST_P(LinformerBackward, AMaximumsGradientIsTheFirstLargestRowsOrANansOrThatOfPaddingNobodys) {
  Problem problem = Problem::SelfAttention(1, 1, 6, 1);
  problem.query_tokens = 1;
  NamedTensors inputs = Random(problem);
  inputs["v"] = FloatsOf({1, 1, 6, 1}, {2, 3, 3, -1, -7, -2});
  Tensor mask(DType::kU8, {1, 6});
  Fill(mask.view(), 1);
  mask.span<uint8_t>()[5] = 0;
  inputs["key_mask"] = std::move(mask);
  Fill(inputs["q"].view(), 0);  // both slots weigh 1/2
  NamedTensors g = OutputGradients(problem);
  Fill(g["out"].view(), 6);
  const RunAndGradients pass =
      Backward(problem, inputs, {{"k", "2"}, {"projection", "max"}}, g, GetParam());
  EXPECT_THAT(pass.inputs.at("v").span<float>(), ElementsAre(0, 3, 0, 0, 0, 0));
  inputs["v"].span<float>()[0] = std::numeric_limits<float>::quiet_NaN();
  const RunAndGradients of_nan =
      Backward(problem, inputs, {{"k", "2"}, {"projection", "max"}}, g, GetParam());
  EXPECT_THAT(of_nan.inputs.at("v").span<float>(), ElementsAre(3, 0, 0, 0, 0, 0));
}

TEST_P(LinformerBackward, PaddingHasNoGradientAndGradientsHaveTheSameBitsWhateverItHolds) {
  const Problem problem = UnevenProblem(149);
  const NamedTensors g = OutputGradients(problem);
  for (const char* projection :
       {"learned", "mean", "max", "convolution", "depthwise_convolution"}) {
    NamedTensors inputs = UnevenInputs(problem);
    const Options options = {{"k", "75"}, {"projection", projection}, {"sharing", "key_value"}};
    const RunAndGradients before = Backward(problem, inputs, options, g, GetParam(), /*threads=*/1);
    for (const int64_t j : kPadding) {
      for (const char* name : {"k", "v"}) {
        EXPECT_EQ(MaxAbs(Slice(Slice(before.inputs.at(name).view(), 0, 1, 1), 2, j, 1)), 0);
        Fill(Slice(Slice(inputs[name].view(), 0, 1, 1), 2, j, 1),
             std::numeric_limits<float>::quiet_NaN());
      }
    }
    const RunAndGradients after = Backward(problem, inputs, options, g, GetParam(), /*threads=*/3);
    for (const auto& [name, gradient] : before.inputs) {
      EXPECT_EQ(MaxDifference(after.inputs.at(name).view(), gradient.view()), 0) << name;
    }
    for (const auto& [name, gradient] : before.parameters) {
      EXPECT_GT(MaxAbs(gradient.view()), 0) << name;
      EXPECT_EQ(MaxDifference(after.parameters.at(name).view(), gradient.view()), 0) << name;
    }
  }
}

TEST_P(LinformerBackward, WithoutTokensQueriesHaveNoGradient) {
  Problem problem = Problem::SelfAttention(1, 1, 3, 4);
  problem.kv_tokens = 0;
  for (const char* projection :
       {"learned", "mean", "max", "convolution", "depthwise_convolution", "fit"}) {
    const RunAndGradients pass = Backward(problem, Random(problem), {{"projection", projection}},
                                          OutputGradients(problem), GetParam());
    EXPECT_EQ(MaxAbs(pass.inputs.at("q").view()), 0);
    for (const auto& [name, gradient] : pass.parameters) EXPECT_EQ(MaxAbs(gradient.view()), 0);
  }
}

// ---- Edges, cost ----

TEST(Linformer, WithoutTokensThereAreNoSlotsAndRowsAreEmpty) {
  Problem problem = Problem::SelfAttention(1, 1, 3, 4);
  problem.kv_tokens = 0;
  const NamedTensors inputs = Random(problem);
  for (const char* projection :
       {"learned", "mean", "max", "convolution", "depthwise_convolution", "fit"}) {
    for (const Device device : TestedDevices()) {
      const RunAndDefinition both = RunBoth(problem, inputs, {{"projection", projection}}, device);
      for (const float y : both.run.at("out").span<float>()) EXPECT_EQ(y, 0);
      for (const float y : both.run.at("log_sum_exp").span<float>()) EXPECT_EQ(y, -INFINITY);
      EXPECT_EQ(both.defined.at("log_sum_exp").span<double>()[0], -INFINITY);
    }
  }
}

TEST(Linformer, ANanReachesItsWindowAloneAndAllRows) {
  const Problem problem = Problem::SelfAttention(1, 2, 30, 4);
  NamedTensors inputs = Random(problem);
  *inputs["v"].view().MutableAt<float>(0, 1, 17, 2) = NAN;
  for (const char* projection :
       {"learned", "mean", "max", "convolution", "depthwise_convolution"}) {
    for (const Device device : TestedDevices()) {
      const RunAndDefinition both =
          RunBoth(problem, inputs, {{"k", "8"}, {"projection", projection}}, device);
      EXPECT_LE(MaxDifference(both.run.at("out").view(), both.defined.at("out").view()), 1e-4);
      for (int64_t i = 0; i < 30; ++i) {
        EXPECT_FALSE(std::isnan(*both.run.at("out").view().At<float>(0, 0, i, 2)));
        EXPECT_TRUE(std::isnan(*both.run.at("out").view().At<float>(0, 1, i, 2)));
      }
    }
  }
}

TEST(Linformer, ACausalProblemIsRefused) {
  const absl::Status status =
      Linformer().Create(Problem::SelfAttention(1, 1, 8, 8, true), {}, kCpu, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("linformer has no causal form"));
}

TEST(Linformer, OneConvolutionForKeysAndValuesNeedsTheirChannelsEqual) {
  Problem problem = Problem::SelfAttention(1, 1, 8, 8);
  problem.value_dim = 5;
  for (const char* projection : {"convolution", "depthwise_convolution"}) {
    const Options options = {{"projection", projection}, {"sharing", "key_value"}};
    const absl::Status status = Linformer().Create(problem, options, kCpu, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("value_dim is 5; allowed is head_dim, 8"));
  }
}

TEST(Linformer, CostCountsTheMultiplyAddsOfTheFormula) {
  Problem problem = Problem::SelfAttention(2, 4, 5, 3);
  problem.kv_heads = 2;
  problem.kv_tokens = 11;
  problem.value_dim = 6;
  const auto flops = [&](const char* projection) {
    return CostOf(Linformer(), problem, {{"k", "4"}, {"projection", projection}}).flops.value();
  };
  const double attending = 2 * 2 * 4 * 5 * 4 * (3 + 6);
  const double elements = 2 * 2 * 11;  // elements times channels
  EXPECT_EQ(flops("learned"), attending + 2 * elements * 4 * (3 + 6));
  EXPECT_EQ(flops("convolution"), attending + 2 * elements * (3 * 3 + 6 * 6));
  EXPECT_EQ(flops("depthwise_convolution"), attending + 2 * elements * (3 + 6));
  EXPECT_EQ(flops("mean"), attending + elements * (3 + 6));
  const auto layer = Linformer().Create(problem, {{"k", "4"}}, kCpu, 1).value();
  EXPECT_EQ(layer->cost().bytes,
            4.0 * (2 * 4 * 5 * (3 + 6) + 2 * 2 * 11 * (3 + 6) + 2 * 2 * 4 * 11));
}

TEST(Linformer, OptionsOutOfRangeAreRefusedWithTheRange) {
  const absl::Status status =
      Linformer().Create(Problem::SelfAttention(1, 1, 4, 8), {{"k", "0"}}, kCpu, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("1 to 65536"));
}

}  // namespace
}  // namespace tfb::linformer
