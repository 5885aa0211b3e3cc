#include "positional/t5_bias/t5_bias.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::t5_bias {
namespace {

const Technique& T5Bias() { return FindTechnique("t5_bias"); }

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns the weights of query i of a head in a run with zero queries and unit vectors as values:
// their logarithms are the bias, up to a constant of the row.
std::vector<double> LogWeights(Problem problem, const NamedTensors& parameters, int64_t head,
                               int64_t i) {
  problem.value_dim = problem.kv_tokens;
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 1);
  Fill(inputs["q"].view(), 0);
  Fill(inputs["v"].view(), 0);
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    for (int64_t j = 0; j < problem.kv_tokens; ++j) {
      *inputs["v"].view().MutableAt<float>(0, h, j, j) = 1;
    }
  }
  RunRequest request;
  request.parameters = &parameters;
  const NamedTensors ours = RunTechnique(T5Bias(), problem, ViewsOf(inputs), request).value();
  std::vector<double> logs;
  for (int64_t j = 0; j < problem.kv_tokens; ++j) {
    logs.push_back(std::log(ours.at("out").view().At<float>(0, head, i)[j]));
  }
  return logs;
}

TEST(T5Bias, CausalBucketStartsOf32And128) {
  const std::vector<int64_t> starts = T5BucketStarts(32, 128);
  ASSERT_EQ(starts.size(), 32u);
  for (int n = 0; n < 16; ++n) EXPECT_EQ(starts[n], n);
  EXPECT_THAT(std::vector<int64_t>(starts.begin() + 16, starts.end()),
              ElementsAre(16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113));
}

TEST(T5Bias, BidirectionalBucketStartsOf32And128) {
  EXPECT_THAT(T5BucketStarts(16, 128),
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91));
}

TEST(T5Bias, BucketsStartAtExactPowersWhereThereAreSome) {
  // Here m = 4 and (D/m)^(r/4) = 3^r.
  EXPECT_THAT(T5BucketStarts(8, 324), ElementsAre(0, 1, 2, 3, 4, 12, 36, 108));
  // Here m = 5, 10^r, and the end of the options' range: m = 4, 2^(9 r / 2).
  EXPECT_THAT(T5BucketStarts(10, 500000), ElementsAre(0, 1, 2, 3, 4, 5, 50, 500, 5000, 50000));
  EXPECT_THAT(T5BucketStarts(8, int64_t{1} << 20), ElementsAre(0, 1, 2, 3, 4, 91, 2048, 46341));
}

TEST(T5Bias, SmallestTablesAndEmptyBuckets) {
  EXPECT_THAT(T5BucketStarts(2, 128), ElementsAre(0, 1));
  EXPECT_THAT(T5BucketStarts(3, 128), ElementsAre(0, 1, 12));  // sqrt(128) = 11.3
  // The starts are 4 and 4.2, 4.5, 4.7 to 5: distances from 5 on are in the last bucket.
  EXPECT_THAT(T5BucketStarts(8, 5), ElementsAre(0, 1, 2, 3, 4, 5, 5, 5));
}

TEST(T5Bias, BucketsMatchHuggingFace) {
  const SafetensorsFile golden = GoldenFile("positional/t5_bias/testdata/buckets.safetensors");
  EXPECT_EQ(golden.tensors.size(), 6u);
  for (const auto& [name, buckets] : golden.tensors) {
    const std::vector<std::string> parts = absl::StrSplit(name, '_');
    const bool causal = parts[0] == "causal";
    const int64_t side = std::stoi(parts[1]) / (causal ? 1 : 2);
    const std::vector<int64_t> starts = T5BucketStarts(side, std::stoi(parts[2]));
    for (int64_t offset = -300; offset <= (causal ? 0 : 300); ++offset) {
      int64_t bucket = 0;
      while (bucket + 1 < side && starts[bucket + 1] <= std::abs(offset)) ++bucket;
      if (offset > 0) bucket += side;
      EXPECT_EQ(bucket, buckets.view().Get(offset + 300)) << name << " " << offset;
    }
  }
}

TEST(T5Bias, AttentionMatchesHuggingFace) {
  for (const char* name : {"causal", "causal_after_cache", "bidirectional"}) {
    const SafetensorsFile golden =
        GoldenFile(absl::StrCat("positional/t5_bias/testdata/", name, ".safetensors"));
    const NamedTensors& tensors = golden.tensors;
    Problem problem = Problem::SelfAttention(1, 3, tensors.at("k").shape()[2], 6,
                                             !absl::StartsWith(name, "bidirectional"));
    problem.query_tokens = tensors.at("q").shape()[2];
    NamedTensors parameters;
    parameters["beta"] = tensors.at("beta").Clone();
    Inputs inputs;
    for (const char* input : {"q", "k", "v"}) inputs.Set(input, tensors.at(input).view());
    NamedTensors defined;
    ASSERT_TRUE(T5Bias().Define(problem, {}, parameters, inputs, {}, &defined).ok());
    EXPECT_LE(MaxDifference(defined["out"].view(), tensors.at("out").view()), 1e-12) << name;
    for (const Device device : TestedDevices()) {
      const NamedTensors ours =
          RunTechnique(T5Bias(), problem, inputs, {{}, device, 1, &parameters}).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), tensors.at("out").view()),
                Fp32Bound(tensors.at("v").view()))
          << name << " " << Name(device);
    }
  }
}

TEST(T5Bias, ConstantTableEqualsDenseOfTheSameScale) {
  for (bool causal : {false, true}) {
    for (const char* scale : {"1", "0", "0.5"}) {
      const Problem problem = Problem::SelfAttention(1, 3, 200, 16, causal);
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
      NamedTensors parameters;
      Fill((parameters["beta"] = Tensor(DType::kF32, {32, 3})).view(), -2.5);
      const Options options = {{"scale", scale}};
      const TechniqueSpec dense = T5Bias().Counterpart(problem, options).value();
      EXPECT_EQ(dense.technique, "dense");
      const NamedTensors ours =
          RunTechnique(T5Bias(), problem, ViewsOf(inputs), {options, Device::kCpu, 1, &parameters})
              .value();
      const NamedTensors expected =
          RunTechnique(dense::Dense(), problem, ViewsOf(inputs), {dense.options}).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

TEST(T5Bias, BiasIsToeplitzInEachHead) {
  // Compares row i, divided by its weight 3 tokens back, with row 100, divided in the same way.
  const Problem problem = Problem::SelfAttention(1, 2, 200, 4);
  NamedTensors parameters;
  FillNormal(&(parameters["beta"] = Tensor(DType::kF32, {32, 2})), 5, "beta");
  for (int64_t h = 0; h < 2; ++h) {
    const std::vector<double> middle = LogWeights(problem, parameters, h, 100);
    for (const int64_t i : {3, 64, 99, 199}) {
      const std::vector<double> row = LogWeights(problem, parameters, h, i);
      for (int64_t j = std::max<int64_t>(i - 100, 0); j < std::min<int64_t>(i + 100, 200); ++j) {
        EXPECT_NEAR(row[j] - row[i - 3], middle[j - i + 100] - middle[97], 1e-5);
      }
    }
  }
}

TEST(T5Bias, DistancesFromTheLastStartOnAreEqual) {
  const Problem problem = Problem::SelfAttention(1, 1, 256, 4, /*causal=*/true);
  NamedTensors parameters;
  FillNormal(&(parameters["beta"] = Tensor(DType::kF32, {32, 1})), 5, "beta");
  const absl::Span<const float> beta = parameters["beta"].span<float>();
  const std::vector<double> logs = LogWeights(problem, parameters, 0, 255);
  for (int64_t distance = 113; distance < 256; ++distance) {
    EXPECT_EQ(logs[255 - distance], logs[255 - 113]);
  }
  EXPECT_NEAR(logs[255 - 113] - logs[255 - 112], beta[31] - beta[30], 1e-5);
}

TEST(T5Bias, KeysBehindAndAheadHaveTablesOfTheirOwn) {
  // There are three tokens and four buckets: 0 for the token itself, 1 for keys before it, 3 for
  // keys after it; value j is the j-th unit vector. The weights of the middle query are 2 : 1 : 4.
  const Problem problem = Problem::SelfAttention(1, 1, 3, 3);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill(inputs["q"].view(), 0);
  Fill(inputs["v"].view(), 0);
  for (int64_t j = 0; j < 3; ++j) *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
  NamedTensors parameters;
  Tensor& beta = parameters["beta"] = Tensor(DType::kF32, {4, 1});
  const double weights[] = {1, 2, 100, 4};
  for (int n = 0; n < 4; ++n) beta.span<float>()[n] = static_cast<float>(std::log(weights[n]));
  const NamedTensors ours = RunTechnique(T5Bias(), problem, ViewsOf(inputs),
                                         {{{"buckets", "4"}}, Device::kCpu, 1, &parameters})
                                .value();
  const float* middle = ours.at("out").view().At<float>(0, 0, 1);
  EXPECT_NEAR(middle[0], 2.0 / 7, 1e-6);
  EXPECT_NEAR(middle[1], 1.0 / 7, 1e-6);
  EXPECT_NEAR(middle[2], 4.0 / 7, 1e-6);
}

TEST(T5Bias, MatchesItsDefinitionOfAllBucketsBidirectionallyAndCausally) {
  for (bool causal : {false, true}) {
    for (auto [queries, keys] : {std::pair<int64_t, int64_t>{257, 257}, {30, 300}, {300, 30}}) {
      for (const auto& [buckets, distance] : {std::pair<std::string, std::string>{"32", "128"},
                                              {"7", "300"},
                                              {"40", "21"},
                                              {"512", "1000"}}) {
        Problem problem = Problem::SelfAttention(2, 6, queries, 40, causal);
        problem.kv_tokens = keys;
        problem.kv_heads = 3;
        const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
        NamedTensors parameters;
        FillNormal(&(parameters["beta"] = Tensor(DType::kF32, {std::stoi(buckets), 6})), 5, "beta");
        RunRequest request;
        request.options = {{"buckets", buckets}, {"max_distance", distance}, {"scale", "0.25"}};
        request.parameters = &parameters;
        const NamedTensors ours = RunTechnique(T5Bias(), problem, ViewsOf(inputs), request).value();
        const NamedTensors expected =
            DefineTechnique(T5Bias(), problem, ViewsOf(inputs), request).value();
        EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                  Fp32Bound(inputs.at("v").view()));
      }
    }
  }
}

TEST(T5Bias, MaxDistanceWithinTheExactBucketsIsRefused) {
  const Options options = {{"max_distance", "16"}};
  const auto refused = T5Bias().Create(Problem::SelfAttention(1, 1, 8, 4, /*causal=*/true), options,
                                       Device::kCpu, 1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("max_distance=16"));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("17 to 1048576"));
  EXPECT_TRUE(T5Bias().Create(Problem::SelfAttention(1, 1, 8, 4), options, Device::kCpu, 1).ok());
}

TEST(T5Bias, CostCountsTwoProductsAndAnAdditionAPair) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 6, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  // There are 15 pairs a head.
  EXPECT_EQ(CostOf(T5Bias(), problem).flops, 3 * 4 * 15 * (2 * (6 + 7) + 1));
}

}  // namespace
}  // namespace tfb::t5_bias
