#include "positional/alibi/alibi.h"

#include <cmath>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::alibi {
namespace {

const Technique& Alibi() { return FindTechnique("alibi"); }

std::vector<float> Slopes(int64_t heads) {
  const auto layer =
      Alibi().Create(Problem::SelfAttention(1, heads, 1, 8), {}, Device::kCpu, 1).value();
  const auto slopes = layer->parameters().at("slopes").span<float>();
  return std::vector<float>(slopes.begin(), slopes.end());
}

TEST(Alibi, SlopesOfEightHeadsAreHalvesToTheFirstToEighthPower) {
  const std::vector<float> slopes = Slopes(8);
  for (int h = 0; h < 8; ++h) EXPECT_EQ(slopes[h], std::ldexp(1.0f, -h - 1));
}

TEST(Alibi, SlopesOfTwelveHeadsInterleaveThoseOfSixteen) {
  const std::vector<float> slopes = Slopes(12);
  ASSERT_EQ(slopes.size(), 12u);
  for (int h = 0; h < 8; ++h) EXPECT_EQ(slopes[h], std::ldexp(1.0f, -h - 1));
  for (int h = 0; h < 4; ++h) EXPECT_EQ(slopes[8 + h], static_cast<float>(std::exp2(-0.5 - h)));
}

TEST(Alibi, SlopesMatchBloom) {
  const SafetensorsFile golden = GoldenFile("positional/alibi/testdata/slopes.safetensors");
  int files = 0;
  for (const auto& [name, slopes] : golden.tensors) {
    const std::vector<float> ours = Slopes(slopes.num_elements());
    for (size_t h = 0; h < ours.size(); ++h) {
      EXPECT_EQ(ours[h], static_cast<float>(slopes.view().Get(h))) << name;
    }
    ++files;
  }
  EXPECT_EQ(files, 8);
}

TEST(Alibi, AttentionMatchesBloom) {
  for (const char* heads : {"6", "8"}) {
    const SafetensorsFile golden = GoldenFile(std::string("positional/alibi/testdata/attention_") +
                                              heads + "_heads.safetensors");
    const NamedTensors& tensors = golden.tensors;
    const Shape shape = tensors.at("q").shape();
    const Problem problem =
        Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3], /*causal=*/true);
    NamedTensors single, exact_slopes;
    Inputs exact;
    for (const char* name : {"q", "k", "v"}) {
      single[name] = tensors.at(name).CloneAs(DType::kF32);
      exact.Set(name, tensors.at(name).view());
    }
    exact_slopes["slopes"] = tensors.at("slopes").Clone();
    NamedTensors defined;
    ASSERT_TRUE(Alibi().Define(problem, {}, exact_slopes, exact, {}, &defined).ok());
    EXPECT_LE(MaxDifference(defined["out"].view(), tensors.at("out").view()), 1e-12);
    for (const Device device : TestedDevices()) {
      const NamedTensors ours =
          RunTechnique(Alibi(), problem, ViewsOf(single), {{}, device}).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), tensors.at("out").view()),
                Fp32Bound(single["v"].view()))
          << Name(device);
    }
  }
}

TEST(Alibi, SlopesOfZeroEqualDense) {
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 3, 100, 16, causal);
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    NamedTensors parameters;
    Fill((parameters["slopes"] = Tensor(DType::kF32, {3})).view(), 0);
    RunRequest request;
    request.parameters = &parameters;
    const NamedTensors ours = RunTechnique(Alibi(), problem, ViewsOf(inputs), request).value();
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()), 1e-6);
  }
}

TEST(Alibi, NeighbouringKeysDifferByTheSlopeInTheScore) {
  // With equal keys, the ratio of the weights of neighbours is exp(slope). One head has slope 2^-8;
  // two have 2^-4 and 2^-8.
  Problem problem = Problem::SelfAttention(1, 2, 4, 4, /*causal=*/true);
  problem.value_dim = 4;
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill(inputs["k"].view(), 1);
  Fill(inputs["v"].view(), 0);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t j = 0; j < 4; ++j) *inputs["v"].view().MutableAt<float>(0, h, j, j) = 1;
  }
  const NamedTensors ours = RunTechnique(Alibi(), problem, ViewsOf(inputs)).value();
  for (int64_t h = 0; h < 2; ++h) {
    const float* weights = ours.at("out").view().At<float>(0, h, 3);
    for (int j = 0; j < 3; ++j)
      EXPECT_NEAR(std::log(weights[j + 1] / weights[j]), std::exp2(-4.0 * (h + 1)), 1e-6);
  }
}

TEST(Alibi, ShiftingQueriesAndKeysTogetherChangesNothing) {
  // The last 40 queries over 100 keys are the last 40 of 100 queries.
  Problem all = Problem::SelfAttention(1, 5, 100, 16, /*causal=*/true);
  Problem last = all;
  last.query_tokens = 40;
  const NamedTensors inputs = RandomInputs(QkvInputs(all), 2);
  const NamedTensors whole = RunTechnique(Alibi(), all, ViewsOf(inputs)).value();
  Inputs tail = ViewsOf(inputs);
  tail.Set("q", Slice(inputs.at("q").view(), 2, 60, 40));
  const NamedTensors part = RunTechnique(Alibi(), last, tail).value();
  EXPECT_LE(MaxDifference(Slice(whole.at("out").view(), 2, 60, 40), part.at("out").view()), 1e-6);
}

TEST(Alibi, MatchesItsDefinitionBidirectionallyAndCausally) {
  for (bool causal : {false, true}) {
    for (auto [queries, keys] : {std::pair<int64_t, int64_t>{129, 129}, {30, 200}, {200, 30}}) {
      Problem problem = Problem::SelfAttention(2, 6, queries, 40, causal);
      problem.kv_tokens = keys;
      problem.kv_heads = 3;
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
      const NamedTensors ours = RunTechnique(Alibi(), problem, ViewsOf(inputs)).value();
      const NamedTensors expected = DefineTechnique(Alibi(), problem, ViewsOf(inputs)).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

TEST(Alibi, CostCountsTwoProductsAndAnAdditionAPair) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 6, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  // There are 15 pairs a head.
  EXPECT_EQ(CostOf(Alibi(), problem).flops, 3 * 4 * 15 * (2 * (6 + 7) + 1));
}

}  // namespace
}  // namespace tfb::alibi
