// Tests SPALM against numbers by hand and its limits.
#include "memory/spalm/spalm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "memory/knn_lm/knn_lm.h"
#include "memory/knn_lm/retrieval_testing.h"

namespace tfb::spalm {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();

// One token of a model of two channels and three tokens, and a datastore in which the context is
// nearest to entry 0, then 1, and so on.
struct Plane {
  Problem problem = Problem::SelfAttention(1, 1, 1, 2);
  NamedTensors inputs;
  NamedTensors parameters;
  Options options = {{"vocabulary", "3"}};

  Plane(const std::vector<float>& x, const std::vector<float>& output,
        const std::vector<int>& values, const std::vector<float>& gate) {
    const auto entries = static_cast<int64_t>(values.size());
    options["entries"] = options["k"] = std::to_string(entries);
    const auto set = [](NamedTensors* tensors, const char* name, const Shape& shape,
                        const std::vector<float>& numbers) {
      Tensor& tensor = (*tensors)[name] = Tensor(DType::kF32, shape);
      std::copy(numbers.begin(), numbers.end(), tensor.span<float>().begin());
    };
    set(&inputs, "x", {1, 1, 2}, x);
    set(&inputs, "context", {1, 1, 2}, {0, 0});
    set(&parameters, "output", {3, 2}, output);
    set(&parameters, "spalm.gate", {2}, gate);
    std::vector<float> keys;
    for (int64_t e = 0; e < entries; ++e) keys.insert(keys.end(), {static_cast<float>(e), 1});
    set(&parameters, "datastore.keys", {entries, 2}, keys);
    Tensor& tokens = parameters["datastore.values"] = Tensor(DType::kU8, {entries});
    std::copy(values.begin(), values.end(), tokens.span<uint8_t>().begin());
  }

  NamedTensors Run(Device device = Device::kCpu) const {
    return RunTechnique(Spalm(), problem, ViewsOf(inputs), {options, device, 1, &parameters, 2})
        .value();
  }

  // Checks that the layer on both devices and the definition predict softmax(output z).
  void ExpectState(double z0, double z1) const {
    const float* rows = parameters.at("output").span<float>().data();
    std::vector<double> logits;
    for (int y = 0; y < 3; ++y) logits.push_back(rows[2 * y] * z0 + rows[2 * y + 1] * z1);
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - max);
    const NamedTensors defined = DefineTechnique(Spalm(), problem, ViewsOf(inputs),
                                                 {options, Device::kCpu, 1, &parameters, 1})
                                     .value();
    for (int y = 0; y < 3; ++y) {
      const double expected = logits[y] - max - std::log(sum);
      const double scale = std::max(1.0, std::abs(expected));
      EXPECT_NEAR(defined.at("out").span<double>()[y], expected, 1e-14 * scale);
      for (const Device device : TestedDevices()) {
        EXPECT_NEAR(Run(device).at("out").span<float>()[y], expected, 2e-6 * scale) << Name(device);
      }
    }
  }
};

double Logistic(double x) { return 1 / (1 + std::exp(-x)); }

using Random = knn_lm::RandomRetrieval<Spalm, 6>;

// ---- The formula ----

TEST(Spalm, AveragesEmbeddingsBySoftmaxAndGatesThemWithTheState) {
  // Neighbours 0 and 1 have tokens 1 and 2, whose embeddings score 1 and 2 with x; the gate's score
  // is 0.5.
  const Plane plane({1, 2}, {0.5f, 0.5f, 1, 0, 0, 1}, {1, 2}, {-0.5f, 0.5f});
  const double first = Logistic(1 - 2), second = 1 - first, g = Logistic(0.5);
  plane.ExpectState((1 - g) * first + g * 1, (1 - g) * second + g * 2);
}

TEST(Spalm, OfOneNeighbourTheAverageIsItsEmbedding) {
  const Plane plane({1, 2}, {3, -1, 1, 0, 0, 1}, {0}, {-1000, 0});  // g = 0
  plane.ExpectState(3, -1);
}

TEST(Spalm, OfEqualEmbeddingsTheAverageIsThatOne) {
  const Plane plane({1, 2}, {3, -1, 1, 0, 0, 1}, {0, 0, 0, 0, 0}, {-1000, 0});
  plane.ExpectState(3, -1);
}

TEST(Spalm, AnOpenGateIsTheModel) {
  const Plane plane({1, 2}, {3, -1, 1, 0, 0, 1}, {0, 1}, {1000, 0});  // g = 1
  plane.ExpectState(1, 2);
}

TEST(Spalm, ScoresThatOverflowTheExponentialDoNot) {
  // The scores are 1000 and 2000.
  const Plane plane({100, 200}, {0.01f, 0.005f, 10, 0, 0, 10}, {1, 2}, {0, 0});
  plane.ExpectState(0.5 * 0 + 0.5 * 100, 0.5 * 10 + 0.5 * 200);
}

// ---- Its limits ----

TEST(Spalm, WithoutNeighboursItIsTheModelAsKnnLmIs) {
  const Random random;
  const NamedTensors parameters = random.Parameters();
  NamedTensors shared = random.Parameters();
  shared.erase("spalm.gate");
  for (const Device device : TestedDevices()) {
    const Tensor model = random.Run({{"k", "0"}}, &parameters, device).at("out").Clone();
    Options alone = random.options;
    alone["lambda"] = "0";
    const auto knn = RunTechnique(knn_lm::KnnLm(), random.problem, ViewsOf(random.inputs),
                                  {alone, device, 1, &shared, 2})
                         .value();
    EXPECT_EQ(MaxDifference(knn.at("out").view(), model.view()), 0);
  }
  Random lost;
  Fill(lost.inputs.at("context").view(), kNan);  // this token finds no neighbour
  EXPECT_EQ(MaxDifference(lost.Run({}, &parameters).at("out").view(),
                          lost.Run({{"k", "0"}}, &parameters).at("out").view()),
            0);
  EXPECT_TRUE(lost.Run().at("neighbours").span<int32_t>()[0] == -1);
}

TEST(Spalm, TheOrderOfTheNeighboursDoesNotMatter) {
  Random random;
  const NamedTensors found = random.Run();
  Tensor reversed(DType::kI32, found.at("neighbours").shape());
  for (int64_t n = 0; n < 6; ++n) {
    CopyElements(Slice(found.at("neighbours").view(), 2, n, 1),
                 Slice(reversed.view(), 2, 5 - n, 1));
  }
  random.inputs["neighbours"] = std::move(reversed);
  for (const Device device : TestedDevices()) {
    EXPECT_LE(
        MaxDifference(random.Run({}, nullptr, device).at("out").view(), found.at("out").view()),
        Fp32Bound(found.at("out").view()));
  }
}

TEST(Spalm, ProbabilitiesSumToOne) {
  const Tensor out = Random().Run().at("out").Clone();
  for (int64_t row = 0; row < 2 * 37; ++row) {
    double sum = 0;
    for (int64_t y = 0; y < 40; ++y) sum += std::exp(out.span<float>()[40 * row + y]);
    EXPECT_NEAR(sum, 1, 1e-5);
  }
}

TEST(Spalm, MissingNeighboursAreLeftOutOfTheAverage) {
  Plane plane({1, 2}, {3, -1, 1, 0, 0, 1}, {0, 1, 2}, {-1000, 0});
  Tensor given(DType::kI32, {1, 1, 3});
  const std::vector<int> entries = {-1, 2, 99};
  std::copy(entries.begin(), entries.end(), given.span<int32_t>().begin());
  plane.inputs["neighbours"] = std::move(given);
  plane.ExpectState(0, 1);
}

// ---- The backward pass on devices ----

// Gives every fifth token a context that finds no neighbour.
void LoseTokens(Random* random) {
  const Problem& p = random->problem;
  for (int64_t row = 2; row < p.batch * p.query_tokens; row += 5) {
    const TensorView sequence =
        Slice(random->inputs.at("context").view(), 0, row / p.query_tokens, 1);
    Fill(Slice(sequence, 1, row % p.query_tokens, 1), kNan);
  }
}

void ExpectGradientsOfTheCpu(const Random& random) { knn_lm::ExpectGradientsOfTheCpu(random, {}); }

TEST(Spalm, GradientsOnADeviceAreThoseOfTheCpu) {
  Random random;
  LoseTokens(&random);
  ExpectGradientsOfTheCpu(random);
}

TEST(Spalm, GradientsOnADeviceOf131TokensAnd140Channels) {
  Random random;
  random.problem = Problem::SelfAttention(1, 2, 9, 70);
  random.options["vocabulary"] = "131";
  random.options["k"] = "3";
  random.inputs =
      RandomInputs(random.technique.InputSpecs(random.problem, random.options).value(), 5);
  ExpectGradientsOfTheCpu(random);
  LoseTokens(&random);
  ExpectGradientsOfTheCpu(random);
}

// More neighbours than a block has threads, which all have one of three tokens.
TEST(Spalm, GradientsOnADeviceOf150NeighboursWith3Tokens) {
  Random random;
  random.options["vocabulary"] = "3";
  random.options["k"] = "150";
  LoseTokens(&random);
  ExpectGradientsOfTheCpu(random);
}

TEST(Spalm, GradientsOnADeviceOfGivenNeighbours) {
  Random random;
  Tensor given(DType::kI32, {2, 37, 6});
  for (int64_t n = 0; n < given.num_elements(); ++n) {
    const int64_t row = n / 6, place = n % 6;
    const bool is_none = row % 6 == 4 || (row + place) % 4 == 1;
    given.span<int32_t>()[n] = static_cast<int32_t>(is_none ? -1 : (7 * row + place) % 300);
  }
  random.inputs["neighbours"] = std::move(given);
  ExpectGradientsOfTheCpu(random);
}

// The average of one embedding is that, whatever its score.
TEST(Spalm, TheScoreOfANeighbourThatIsAloneHasNoGradient) {
  Plane plane({1, 2}, {3, -1, 1, 0, 0, 1}, {0}, {-1000, 0});  // g = 0
  NamedTensors g;
  g["out"] = Tensor(DType::kF32, {1, 1, 3});
  FillNormal(&g["out"], 1, "gradient");
  const auto differentiate = [&](Device device) {
    return BackwardOfTechnique(Spalm(), plane.problem, ViewsOf(plane.inputs), g,
                               {plane.options, device, 1, &plane.parameters, 2})
        .value();
  };
  const Tensor of_output = differentiate(Device::kCpu).parameters.at("output").Clone();
  for (const Device device : TestedDevices()) {
    const RunAndGradients pass = differentiate(device);
    EXPECT_EQ(MaxAbs(pass.inputs.at("x").view()), 0) << Name(device);
    EXPECT_EQ(MaxAbs(pass.parameters.at("spalm.gate").view()), 0) << Name(device);
    EXPECT_LE(MaxDifference(pass.parameters.at("output").view(), of_output.view()),
              Fp32Bound(of_output.view()))
        << Name(device);
  }
}

// ---- What it reports, costs and refuses ----

TEST(Spalm, TheStatisticIsTheMeanGateWhichIsOneForATokenWithoutNeighbours) {
  Random random;
  const NamedTensors parameters = random.Parameters();
  const int64_t rows = 2 * 37, dim = 16;
  Tensor neighbours = random.Run().at("neighbours").Clone();
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const bool found = row % 3 != 1;
    if (!found) std::fill_n(neighbours.span<int32_t>().data() + row * 6, 6, -1);
    double score = 0;
    for (int64_t c = 0; c < dim; ++c) {
      score += static_cast<double>(parameters.at("spalm.gate").span<float>()[c]) *
               random.inputs.at("x").span<float>()[row * dim + c];
    }
    sum += found ? Logistic(score) : 1;
  }
  random.inputs["neighbours"] = std::move(neighbours);
  for (const Device device : TestedDevices()) {
    const auto layer = Spalm().Create(random.problem, random.options, device, 1).value();
    ASSERT_TRUE(layer->SetParameters(parameters).ok());
    ASSERT_TRUE((device == Device::kCpu ? RunLayer(*layer, ViewsOf(random.inputs))
                                        : RunCudaLayer(*layer, device, ViewsOf(random.inputs)))
                    .ok());
    EXPECT_NEAR(layer->statistics().at("gate"), sum / rows, 1e-6) << Name(device);
  }
}

TEST(Spalm, CostCountsTheSearchTheModelAndTheAverage) {
  const Random random;
  const double rows = 2 * 37, dim = 16;
  const auto layer = Spalm().Create(random.problem, random.options, Device::kCpu, 1).value();
  EXPECT_EQ(*layer->cost().flops, rows * (2 * 40 + 2 * 300 + 4 * 6 + 5) * dim);
}

TEST(Spalm, WhatItCannotDoIsSaidInOneLine) {
  Problem problem = Problem::SelfAttention(1, 4, 8, 4);
  problem.kv_heads = 2;
  EXPECT_EQ(Spalm().Create(problem, {}, Device::kCpu, 1).status().ToString(),
            "INVALID_ARGUMENT: spalm has no keys but the datastore's: kv_heads is 2; allowed is "
            "query_heads, 4");
}

}  // namespace
}  // namespace tfb::spalm
