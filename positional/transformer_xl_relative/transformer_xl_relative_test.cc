#include "positional/transformer_xl_relative/transformer_xl_relative.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/layers/attention/relative_positions.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::transformer_xl_relative {
namespace {

const Technique& TransformerXlRelative() { return FindTechnique("transformer_xl_relative"); }

// Returns parameters so large that an error in any of them is visible.
NamedTensors LargeParameters(const Problem& problem) {
  const int64_t width = problem.model_dim();
  const Shape biases = {problem.query_heads, problem.head_dim};
  NamedTensors parameters =
      RandomInputs({{"w_r", {width, width}}, {"u", biases}, {"v", biases}}, 3);
  for (float& weight : parameters["w_r"].span<float>()) {
    weight /= std::sqrt(static_cast<float>(width));
  }
  return parameters;
}

NamedTensors ZeroParameters(const Problem& problem) {
  NamedTensors parameters;
  const Shape biases = {problem.query_heads, problem.head_dim};
  parameters["w_r"] = Tensor(DType::kF32, {problem.model_dim(), problem.model_dim()});
  for (const char* name : {"u", "v"}) parameters[name] = Tensor(DType::kF32, biases);
  for (auto& [name, tensor] : parameters) Fill(tensor.view(), 0);
  return parameters;
}

RunRequest With(const NamedTensors& parameters, const Options& options = {}) {
  RunRequest request;
  request.parameters = &parameters;
  request.options = options;
  return request;
}

// Returns log(weight of j / weight of `of`) where values are unit vectors.
double LogRatio(const NamedTensors& run, int64_t h, int64_t i, int64_t j, int64_t of) {
  const float* weights = run.at("out").view().At<float>(0, h, i);
  return std::log(weights[j] / weights[of]);
}

// Returns random queries and keys, and values that show the weights.
NamedTensors WeightInputs(const Problem& problem) {
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill(inputs["v"].view(), 0);
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    for (int64_t j = 0; j < problem.kv_tokens; ++j)
      *inputs["v"].view().MutableAt<float>(0, h, j, j) = 1;
  }
  return inputs;
}

TEST(TransformerXlRelative, SinusoidsOfTwoChannelsAreSineAndCosineOfTheClampedDistance) {
  const layers::DistanceRange range = {-3, 4, 2};
  const Tensor table = layers::SinusoidsOf(range, 2);
  ASSERT_EQ(table.shape(), Shape({5, 2}));
  for (int64_t d = -3; d <= 4; ++d) {
    const double clamped = d < -2 ? -2 : d > 2 ? 2 : static_cast<double>(d);
    EXPECT_NEAR(*table.view().At<float>(range.Row(d), 0), std::sin(clamped), 1e-7);
    EXPECT_NEAR(*table.view().At<float>(range.Row(d), 1), std::cos(clamped), 1e-7);
  }
}

TEST(TransformerXlRelative, AScoreIsWhatTheFormulaSaysByHand) {
  // There is one head of two channels, q = 0, k = 0, W_r = I, v = (a, b): s_ij sqrt(2) = a sin d +
  // b cos d.
  Problem problem = Problem::SelfAttention(1, 1, 4, 2);
  problem.value_dim = 4;
  NamedTensors inputs = WeightInputs(problem);
  Fill(inputs["q"].view(), 0);
  Fill(inputs["k"].view(), 0);
  NamedTensors parameters = ZeroParameters(problem);
  parameters["w_r"].view().Set(0, 1);
  parameters["w_r"].view().Set(3, 1);
  parameters["v"].view().Set(0, 0.7);
  parameters["v"].view().Set(1, -1.3);
  const NamedTensors run =
      RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), With(parameters)).value();
  const auto score = [](int64_t d) {
    const double x = static_cast<double>(d);
    return (0.7 * std::sin(x) - 1.3 * std::cos(x)) / std::sqrt(2.0);
  };
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 4; ++j)
      EXPECT_NEAR(LogRatio(run, 0, i, j, i), score(i - j) - score(0), 1e-6) << i << " " << j;
  }
}

TEST(TransformerXlRelative, WithoutPositionsAndBiasesItEqualsDense) {
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 3, 100, 16, causal);
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    const NamedTensors parameters = ZeroParameters(problem);
    const NamedTensors ours =
        RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), With(parameters)).value();
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()), 1e-6);
  }
}

TEST(TransformerXlRelative, TheShiftEqualsAnExplicitGather) {
  // The score minus the content is (q_i + v) . R[i - j], with R gathered row by row.
  Problem problem = Problem::SelfAttention(1, 2, 70, 8);
  problem.value_dim = 70;
  const NamedTensors inputs = WeightInputs(problem);
  const NamedTensors parameters = LargeParameters(problem);
  const NamedTensors run =
      RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), With(parameters)).value();
  const layers::DistanceRange range = {-69, 69, 0};
  const Tensor sinusoids = layers::SinusoidsOf(range, 16);
  const auto at = [](const Tensor& tensor, auto... index) -> double {
    return *tensor.view().At<float>(index...);
  };
  const auto score = [&](int64_t h, int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t c = 0; c < 8; ++c) {
      double position = 0;
      for (int64_t n = 0; n < 16; ++n)
        position += at(sinusoids, range.Row(i - j), n) * at(parameters.at("w_r"), n, h * 8 + c);
      const double query = at(inputs.at("q"), 0, h, i, c);
      sum += (query + at(parameters.at("u"), h, c)) * at(inputs.at("k"), 0, h, j, c) +
             (query + at(parameters.at("v"), h, c)) * position;
    }
    return sum / std::sqrt(8.0);
  };
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i : {0, 1, 35, 63, 64, 69}) {
      for (int64_t j : {0, 1, 36, 63, 64, 69}) {
        const double expected = score(h, i, j) - score(h, i, i);
        EXPECT_NEAR(LogRatio(run, h, i, j, i), expected, 1e-5 * (1 + std::abs(expected)))
            << i << " " << j;
      }
    }
  }
}

TEST(TransformerXlRelative, WithoutContentScoresAreToeplitz) {
  Problem problem = Problem::SelfAttention(1, 1, 32, 8);
  problem.value_dim = 32;
  NamedTensors inputs = WeightInputs(problem);
  Fill(inputs["q"].view(), 0);
  Fill(inputs["k"].view(), 0);
  const NamedTensors parameters = LargeParameters(problem);
  const NamedTensors run =
      RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), With(parameters)).value();
  for (int64_t i = 0; i + 1 < 32; ++i) {
    for (int64_t j = 0; j + 1 < 32; ++j)
      EXPECT_NEAR(LogRatio(run, 0, i, j, i), LogRatio(run, 0, i + 1, j + 1, i + 1), 1e-5);
  }
}

TEST(TransformerXlRelative, ClampedDistancesAreIndistinguishable) {
  Problem problem = Problem::SelfAttention(1, 1, 24, 8);
  problem.value_dim = 24;
  NamedTensors inputs = WeightInputs(problem);
  Fill(inputs["k"].view(), 0.5);
  const NamedTensors parameters = LargeParameters(problem);
  const NamedTensors run = RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs),
                                        With(parameters, {{"max_distance", "5"}}))
                               .value();
  for (int64_t j = 0; j <= 7; ++j) EXPECT_NEAR(LogRatio(run, 0, 12, j, 0), 0, 1e-6);
  for (int64_t j = 17; j < 24; ++j) EXPECT_NEAR(LogRatio(run, 0, 12, j, 23), 0, 1e-6);
  EXPECT_GT(std::abs(LogRatio(run, 0, 12, 8, 0)), 1e-4);
}

TEST(TransformerXlRelative, ShiftingQueriesAndKeysTogetherChangesNothing) {
  // The last 40 queries over 100 keys are the last 40 of 100 queries.
  for (bool causal : {false, true}) {
    const Problem all = Problem::SelfAttention(1, 5, 100, 16, causal);
    Problem last = all;
    last.query_tokens = 40;
    const NamedTensors inputs = RandomInputs(QkvInputs(all), 2);
    const NamedTensors parameters = LargeParameters(all);
    const NamedTensors whole =
        RunTechnique(TransformerXlRelative(), all, ViewsOf(inputs), With(parameters)).value();
    Inputs tail = ViewsOf(inputs);
    tail.Set("q", Slice(inputs.at("q").view(), 2, 60, 40));
    const NamedTensors part =
        RunTechnique(TransformerXlRelative(), last, tail, With(parameters)).value();
    EXPECT_LE(MaxDifference(Slice(whole.at("out").view(), 2, 60, 40), part.at("out").view()), 1e-6);
  }
}

TEST(TransformerXlRelative, MatchesItsDefinitionBidirectionallyAndCausally) {
  for (const Device device : TestedDevices()) {
    for (bool causal : {false, true}) {
      for (auto [queries, keys] : {std::pair<int64_t, int64_t>{129, 129}, {30, 200}, {200, 30}}) {
        Problem problem = Problem::SelfAttention(1, 4, queries, 13, causal);
        problem.kv_tokens = keys;
        problem.kv_heads = 2;
        problem.value_dim = 9;
        const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
        const NamedTensors parameters = LargeParameters(problem);
        RunRequest request = With(parameters, {{"max_distance", causal ? "0" : "40"}});
        request.device = device;
        const NamedTensors ours =
            RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), request).value();
        const NamedTensors expected =
            DefineTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), request).value();
        EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                  Fp32Bound(inputs.at("v").view()));
      }
    }
  }
}

TEST(TransformerXlRelative, InSixteenBitsPositionsAreRounded) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Problem problem = Problem::SelfAttention(1, 4, 300, 32, /*causal=*/false, dtype);
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    const NamedTensors parameters = LargeParameters(problem);
    const RunRequest request = With(parameters);
    const NamedTensors ours =
        RunTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), request).value();
    const NamedTensors expected =
        DefineTechnique(TransformerXlRelative(), problem, ViewsOf(inputs), request).value();
    Problem unrounded = problem;
    unrounded.dtype = DType::kF32;
    const NamedTensors exact =
        DefineTechnique(TransformerXlRelative(), unrounded, ViewsOf(inputs), request).value();
    const auto difference = [](const NamedTensors& a, const NamedTensors& b) {
      return MaxDifference(a.at("log_sum_exp").view(), b.at("log_sum_exp").view());
    };
    EXPECT_LE(difference(ours, expected), 5e-6) << Name(dtype);
    EXPECT_GT(difference(exact, expected), 1e-4) << Name(dtype);
  }
}

// The files are of Hugging Face's Transformer-XL, causal with a memory, and its XLNet,
// bidirectional.
TEST(TransformerXlRelative, MatchesHuggingFace) {
  for (const char* name : {"transfo_xl", "transfo_xl_clamped", "xlnet", "xlnet_clamped"}) {
    const SafetensorsFile golden = GoldenFile(
        std::string("positional/transformer_xl_relative/testdata/") + name + ".safetensors");
    const NamedTensors& tensors = golden.tensors;
    const Shape shape = tensors.at("q").shape();
    Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3]);
    problem.kv_tokens = tensors.at("k").dim(2);
    problem.causal = golden.metadata.at("causal") == "True";
    const Options options = {{"max_distance", golden.metadata.at("max_distance")}};
    NamedTensors parameters;
    Inputs inputs;
    for (const char* tensor : {"q", "k", "v"}) inputs.Set(tensor, tensors.at(tensor).view());
    for (const auto& [ours, theirs] : {std::pair{"w_r", "w_r"}, {"u", "u"}, {"v", "v_bias"}}) {
      parameters[ours] = tensors.at(theirs).Clone();
    }
    NamedTensors defined;
    ASSERT_TRUE(
        TransformerXlRelative().Define(problem, options, parameters, inputs, {}, &defined).ok());
    EXPECT_LE(MaxDifference(defined["out"].view(), tensors.at("out").view()), 1e-12) << name;
    for (const Device device : TestedDevices()) {
      RunRequest request = With(parameters, options);
      request.device = device;
      const NamedTensors run =
          RunTechnique(TransformerXlRelative(), problem, inputs, request).value();
      EXPECT_LE(MaxDifference(run.at("out").view(), tensors.at("out").view()),
                Fp32Bound(tensors.at("v").view()))
          << name << " " << Name(device);
    }
  }
}

TEST(TransformerXlRelative, CostCountsAProductWithThePositionBesidesThoseWithKeyAndValue) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 6, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  // There are 15 pairs a head.
  EXPECT_EQ(CostOf(TransformerXlRelative(), problem).flops, 3 * 4 * 15 * 2 * (6 + 6 + 7));
}

TEST(TransformerXlRelative, BackwardCostHasEightProductsOfPairsAndThatOfDistancesForTheirMatrix) {
  Problem problem = Problem::SelfAttention(2, 4, 100, 16, /*causal=*/true);
  for (const auto& [clamp, distances] : {std::pair{0, 100}, std::pair{30, 31}}) {
    const Options options = {{"max_distance", absl::StrCat(clamp)}};
    const std::unique_ptr<Layer> layer =
        TransformerXlRelative().Create(problem, options, Device::kCpu, 1).value();
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
    const double pairs = 2 * 4 * 100 * 101 / 2, width = 4 * 16;
    EXPECT_EQ(*layer->backward_cost().flops, pairs * 2 * 8 * 16 + 2 * distances * width * width);
  }
}

TEST(TransformerXlRelative, HeadsWhoseMatrixIsBeyond1GiBAreRefused) {
  const auto refusal = [](int64_t heads, int64_t head_dim) {
    const Problem problem = Problem::SelfAttention(1, heads, 2, head_dim);
    return TransformerXlRelative().Create(problem, {}, Device::kCpu, 1).status();
  };
  EXPECT_EQ(refusal(16385, 1),
            absl::UnimplementedError("transformer_xl_relative has a matrix of (query_heads "
                                     "head_dim)^2 numbers: query_heads is 16385; allowed with "
                                     "head_dim 1 are 1 to 16384"));
  EXPECT_EQ(refusal(65, 255),
            absl::UnimplementedError("transformer_xl_relative has a matrix of (query_heads "
                                     "head_dim)^2 numbers: query_heads is 65; allowed with "
                                     "head_dim 255 are 1 to 64"));
}

}  // namespace
}  // namespace tfb::transformer_xl_relative
