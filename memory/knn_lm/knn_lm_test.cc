// Tests kNN-LM against numbers by hand, its limits, and the authors' code.
//
// Tolerance. Logits, distances and weights are fp32 sums of terms of order 1, and the errors of
// their logarithms are these sums' relative errors: 2e-5 of the largest log-probability, as in the
// harness.
#include "memory/knn_lm/knn_lm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backward_testing.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "memory/knn_lm/retrieval_testing.h"

namespace tfb::knn_lm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

Tensor Floats(const Shape& shape, const std::vector<float>& values) {
  Tensor tensor(DType::kF32, shape);
  std::copy(values.begin(), values.end(), tensor.span<float>().begin());
  return tensor;
}

Tensor Bytes(const std::vector<int>& values) {
  Tensor tensor(DType::kU8, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.span<uint8_t>().begin());
  return tensor;
}

// A model of one channel and three equally likely tokens, and a datastore on a line.
struct Line {
  Problem problem;
  NamedTensors inputs;
  NamedTensors parameters;
  Options options;

  Line(const std::vector<float>& contexts, const std::vector<float>& keys,
       const std::vector<int>& values, Options given = {}) {
    const auto tokens = static_cast<int64_t>(contexts.size());
    const auto entries = static_cast<int64_t>(keys.size());
    problem = Problem::SelfAttention(1, 1, tokens, 1);
    inputs["x"] = Floats({1, tokens, 1}, std::vector<float>(tokens, 1));
    inputs["context"] = Floats({1, tokens, 1}, contexts);
    parameters["output"] = Floats({3, 1}, {0, 0, 0});
    parameters["datastore.keys"] = Floats({entries, 1}, keys);
    parameters["datastore.values"] = Bytes(values);
    options = std::move(given);
    options["vocabulary"] = "3";
    options["entries"] = std::to_string(entries);
    options.insert({"k", std::to_string(entries)});
  }

  NamedTensors Run(Device device = Device::kCpu) const {
    return RunTechnique(KnnLm(), problem, ViewsOf(inputs), {options, device, 1, &parameters, 2})
        .value();
  }
  RunAndGradients RunBackward(const NamedTensors& output_gradients, Device device) const {
    return BackwardOfTechnique(KnnLm(), problem, ViewsOf(inputs), output_gradients,
                               {options, device, 1, &parameters, 2})
        .value();
  }
  NamedTensors Define(const NamedTensors* computed = nullptr) const {
    DefinitionRequest request;
    request.computed = computed;
    return DefineTechnique(KnnLm(), problem, ViewsOf(inputs),
                           {options, Device::kCpu, 1, &parameters, 2}, request)
        .value();
  }
};

// Returns exp of row `token` of `out`.
std::vector<double> Probabilities(const NamedTensors& outputs, int64_t token = 0) {
  const ConstTensorView out = outputs.at("out").view();
  std::vector<double> probabilities;
  for (int64_t y = 0; y < out.dim(2); ++y) {
    probabilities.push_back(std::exp(out.Get(out.Offset(0, token, y))));
  }
  return probabilities;
}

std::vector<int> Neighbours(const NamedTensors& outputs) {
  const Tensor& found = outputs.at("neighbours");
  std::vector<int> entries;
  for (int64_t n = 0; n < found.num_elements(); ++n) {
    entries.push_back(static_cast<int>(found.view().Get(n)));
  }
  return entries;
}

void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected,
                double tolerance = 1e-6) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t y = 0; y < expected.size(); ++y) EXPECT_NEAR(actual[y], expected[y], tolerance) << y;
}

// Checks that the layer on both devices and the definition give these probabilities.
void ExpectPrediction(const Line& line, int64_t token, const std::vector<double>& expected) {
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    ExpectNear(Probabilities(line.Run(device), token), expected);
  }
  ExpectNear(Probabilities(line.Define(), token), expected, 1e-14);
}

using Random = RandomRetrieval<KnnLm, 16>;

// ---- The formula ----

TEST(KnnLm, MixesByTheExponentialsOfSquaredDistances) {
  // The context 0 has squared distances 0, 1 and 9; token 2 followed the first and the last entry.
  const Line line({0}, {0, 1, 3}, {2, 0, 2}, {{"lambda", "0.25"}});
  const double sum = 1 + std::exp(-1.0) + std::exp(-9.0);
  const double of_model = 0.75 / 3;
  ExpectPrediction(line, 0,
                   {of_model + 0.25 * std::exp(-1.0) / sum, of_model,
                    of_model + 0.25 * (1 + std::exp(-9.0)) / sum});
  EXPECT_EQ(Neighbours(line.Run()), (std::vector<int>{0, 1, 2}));
}

TEST(KnnLm, OnlyTheKNearestCount) {
  const Line line({2.6f, 0.4f}, {0, 1, 3}, {2, 0, 1}, {{"k", "1"}, {"lambda", "0.5"}});
  ExpectPrediction(line, 0, {1.0 / 6, 1.0 / 6 + 0.5, 1.0 / 6});
  ExpectPrediction(line, 1, {1.0 / 6, 1.0 / 6, 1.0 / 6 + 0.5});
  EXPECT_EQ(Neighbours(line.Run()), (std::vector<int>{2, 0}));
}

TEST(KnnLm, TemperatureDividesTheDistances) {
  const Line line({0}, {0, 2}, {0, 1}, {{"lambda", "1"}, {"temperature", "8"}});
  const double other = std::exp(-0.5);
  ExpectPrediction(line, 0, {1 / (1 + other), other / (1 + other), 0});
}

TEST(KnnLm, DuplicatesAdd) {
  const Line line({1}, {1, 0, 1}, {0, 1, 0}, {{"lambda", "1"}});
  const double other = std::exp(-1.0);
  ExpectPrediction(line, 0, {2 / (2 + other), other / (2 + other), 0});
}

TEST(KnnLm, OfEqualKeysTheOlderIsFound) {
  const Line line({1}, {5, 1, 1, 1}, {0, 1, 2, 0}, {{"k", "2"}, {"lambda", "1"}});
  ExpectPrediction(line, 0, {0, 0.5, 0.5});
  EXPECT_EQ(Neighbours(line.Run()), (std::vector<int>{1, 2}));
}

// ---- Its limits ----

TEST(KnnLm, WithLambda0ItIsTheModel) {
  const Random random;
  for (const Device device : TestedDevices()) {
    const NamedTensors model = random.Run({{"k", "0"}}, nullptr, device);
    const NamedTensors mixed = random.Run({{"lambda", "0"}}, nullptr, device);
    EXPECT_EQ(MaxDifference(model.at("out").view(), mixed.at("out").view()), 0);
  }
}

TEST(KnnLm, ProbabilitiesSumToOne) {
  const Random random;
  for (const char* lambda : {"0.1", "0.9", "1"}) {
    const NamedTensors outputs = random.Run({{"lambda", lambda}, {"temperature", "10"}});
    for (int64_t i = 0; i < random.problem.query_tokens; ++i) {
      double sum = 0;
      for (const double p : Probabilities(outputs, i)) sum += p;
      EXPECT_NEAR(sum, 1, 1e-5) << lambda;
    }
  }
}

TEST(KnnLm, WithAllEntriesItIsTheKernelSum) {
  const Random random;
  const NamedTensors parameters = random.Parameters();
  const float* keys = parameters.at("datastore.keys").span<float>().data();
  const uint8_t* values = parameters.at("datastore.values").span<uint8_t>().data();
  for (const char* k : {"300", "1000"}) {
    const NamedTensors outputs =
        random.Run({{"k", k}, {"lambda", "1"}, {"temperature", "20"}}, &parameters);
    for (const int64_t i : {0, 20, 36}) {
      const float* context = random.inputs.at("context").span<float>().data() + 16 * i;
      std::vector<double> kernel(40, 0);
      double total = 0;
      for (int e = 0; e < 300; ++e) {
        double distance = 0;
        for (int c = 0; c < 16; ++c) distance += std::pow(context[c] - keys[16 * e + c], 2);
        kernel[values[e]] += std::exp(-distance / 20);
        total += std::exp(-distance / 20);
      }
      for (double& p : kernel) p /= total;
      ExpectNear(Probabilities(outputs, i), kernel, 1e-5);
    }
  }
}

TEST(KnnLm, ColdItIsTheNearestNeighbourAndHotTheHistogram) {
  const std::vector<float> keys = {0, 1, 2, 4};
  const std::vector<int> values = {1, 0, 0, 2};
  const Line cold({0.4f}, keys, values, {{"lambda", "1"}, {"temperature", "0.001"}});
  ExpectPrediction(cold, 0, {0, 1, 0});
  const Line hot({0.4f}, keys, values, {{"lambda", "1"}, {"temperature", "1e9"}});
  ExpectNear(Probabilities(hot.Run()), {0.5, 0.25, 0.25});
  ExpectNear(Probabilities(hot.Run(KernelDevice())), {0.5, 0.25, 0.25});
}

TEST(KnnLm, TheOrderOfTheDatastoreDoesNotMatter) {
  const Random random;
  const NamedTensors parameters = random.Parameters();
  NamedTensors reversed = random.Parameters();
  for (int64_t e = 0; e < 300; ++e) {
    for (const char* name : {"datastore.keys", "datastore.values"}) {
      CopyElements(Slice(parameters.at(name).view(), 0, e, 1),
                   Slice(reversed.at(name).view(), 0, 299 - e, 1));
    }
  }
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(MaxDifference(random.Run({}, &parameters, device).at("out").view(),
                            random.Run({}, &reversed, device).at("out").view()),
              0);
  }
}

TEST(KnnLm, WithLambda1OtherTokensAreImpossibleAndNothingIsNan) {
  const Line line({0, 1e6f, kNan}, {0, 1}, {2, 2}, {{"lambda", "1"}});
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs = line.Run(device);
    const ConstTensorView out = outputs.at("out").view();
    for (const int64_t token : {0, 1}) {
      EXPECT_EQ(*out.At<float>(0, token, 0), -kInfinity);
      EXPECT_EQ(*out.At<float>(0, token, 1), -kInfinity);
      EXPECT_NEAR(*out.At<float>(0, token, 2), 0, 1e-6);
    }
  }
}

// ---- Neighbours ----

TEST(KnnLm, AContextThatIsNotFiniteFindsNothingAndLeavesTheModel) {
  const Line line({kNan, static_cast<float>(kInfinity)}, {0, 1}, {2, 2});
  for (const int64_t token : {0, 1}) ExpectPrediction(line, token, {1.0 / 3, 1.0 / 3, 1.0 / 3});
  EXPECT_EQ(Neighbours(line.Run()), (std::vector<int>{-1, -1, -1, -1}));
}

TEST(KnnLm, MoreNeighboursThanEntriesAreNone) {
  const Line line({0}, {0, 1}, {2, 0}, {{"k", "5"}});
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(Neighbours(line.Run(device)), (std::vector<int>{0, 1, -1, -1, -1}));
  }
}

TEST(KnnLm, GivenNeighboursAreTakenAsTheyAre) {
  Line line({0, 0, 0}, {0, 1, 3}, {2, 0, 1}, {{"k", "2"}, {"lambda", "1"}});
  Tensor given(DType::kI32, {1, 3, 2});
  const std::vector<int> entries = {2, 1, -1, 7, 1, -5};
  std::copy(entries.begin(), entries.end(), given.span<int32_t>().begin());
  line.inputs["neighbours"] = std::move(given);
  const double sum = std::exp(-9.0) + std::exp(-1.0);
  ExpectPrediction(line, 0, {std::exp(-1.0) / sum, std::exp(-9.0) / sum, 0});
  ExpectPrediction(line, 1, {1.0 / 3, 1.0 / 3, 1.0 / 3});  // no neighbour at all: the model alone
  ExpectPrediction(line, 2, {1, 0, 0});
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(Neighbours(line.Run(device)), (std::vector<int>{2, 1, -1, -1, 1, -1}));
  }
}

TEST(KnnLm, ItsOwnNeighboursGivenChangeNothing) {
  Random random;
  const NamedTensors found = random.Run();
  random.inputs["neighbours"] = found.at("neighbours").Clone();
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(MaxDifference(random.Run({}, nullptr, device).at("neighbours").view(),
                            found.at("neighbours").view()),
              0);
  }
  EXPECT_EQ(MaxDifference(random.Run().at("out").view(), found.at("out").view()), 0);
}

TEST(KnnLm, TheDefinitionTakesALayersOrderOnlyWhereFp32CannotTell) {
  // The squared distances are 1 and (1 + 2^-24)^2, which round to the same difference, and 4.
  const float above = 1 + std::ldexp(1.0f, -23);
  Line line({std::ldexp(1.0f, -24)}, {above, 1, -2}, {0, 1, 2}, {{"k", "1"}, {"lambda", "1"}});
  NamedTensors computed;
  computed["neighbours"] = Tensor(DType::kI32, {1, 1, 1});
  const auto defined = [&](int entry) {
    Fill(computed["neighbours"].view(), entry);
    return Neighbours(line.Define(&computed));
  };
  EXPECT_EQ(Neighbours(line.Define()), (std::vector<int>{1}));
  EXPECT_EQ(defined(0), (std::vector<int>{0}));
  EXPECT_EQ(defined(2), (std::vector<int>{1}));
  EXPECT_EQ(defined(-1), (std::vector<int>{1}));
  EXPECT_EQ(defined(3), (std::vector<int>{1}));
}

TEST(KnnLm, AnApproximateSearchOfAllListsIsExact) {
  const Random random;
  const NamedTensors exact = random.Run();
  const NamedTensors all =
      random.Run({{"search", "approximate"}, {"lists", "20"}, {"probes", "20"}});
  for (const char* name : {"out", "neighbours"}) {
    EXPECT_EQ(MaxDifference(all.at(name).view(), exact.at(name).view()), 0);
  }
}

TEST(KnnLm, AnApproximateSearchFindsManyAndIsDefinedOnThem) {
  const Random random;
  Options options = random.options;
  options["search"] = "approximate";
  options["lists"] = "20";
  options["probes"] = "8";
  const RunRequest request = {options, Device::kCpu, 1, nullptr, 2};
  const NamedTensors found =
      RunTechnique(KnnLm(), random.problem, ViewsOf(random.inputs), request).value();
  const std::vector<int> nearest = Neighbours(random.Run()), approximate = Neighbours(found);
  int hits = 0;
  for (size_t row = 0; row < nearest.size() / 16; ++row) {
    for (int n = 0; n < 16; ++n) {
      const auto begin = approximate.begin() + 16 * row;
      hits += std::count(begin, begin + 16, nearest[16 * row + n]);
    }
  }
  const double recall = static_cast<double>(hits) / static_cast<double>(nearest.size());
  EXPECT_GT(recall, 0.5);  // for 16 among 300 points without clusters, in 8 of 20 cells
  EXPECT_LT(recall, 1);
  DefinitionRequest definition;
  definition.computed = &found;
  const NamedTensors defined =
      DefineTechnique(KnnLm(), random.problem, ViewsOf(random.inputs), request, definition).value();
  EXPECT_EQ(MaxDifference(defined.at("neighbours").view(), found.at("neighbours").view()), 0);
  EXPECT_LE(MaxDifference(defined.at("out").view(), found.at("out").view()),
            Fp32Bound(found.at("out").view()));
}

TEST(KnnLm, StatesMayHaveAnyStrides) {
  const Random random;
  const Problem& p = random.problem;
  const NamedTensors expected = random.Run();
  NamedTensors wide;
  Inputs inputs;
  for (const char* name : {"x", "context"}) {
    wide[name] = Tensor(DType::kF32, {p.query_tokens, p.batch, 2 * p.model_dim()});
    Fill(wide[name].view(), kNan);
    const TensorView view =
        Transpose(Slice(wide[name].view(), 2, 1, p.model_dim(), /*step=*/2), 0, 1);
    CopyElements(random.inputs.at(name).view(), view);
    inputs.Set(name, view);
  }
  for (const Device device : TestedDevices()) {
    const auto outputs =
        RunTechnique(KnnLm(), p, inputs, {random.options, device, 1, nullptr, 2}).value();
    EXPECT_LE(MaxDifference(outputs.at("out").view(), expected.at("out").view()), 1e-5);
    EXPECT_EQ(MaxDifference(outputs.at("neighbours").view(), expected.at("neighbours").view()), 0);
  }
}

// ---- A lambda of each token ----

TEST(KnnLm, AGivenLambdaReplacesTheOptionTokenByToken) {
  Line line({0, 0, 0, 0}, {0, 1}, {2, 0}, {{"lambda", "0.5"}});
  line.inputs["lambda"] = Floats({1, 4}, {0.25f, 1, 7, -3});
  const double near = 1 / (1 + std::exp(-1.0));  // of token 2
  const auto mixed = [&](double lambda) {
    return std::vector<double>{(1 - lambda) / 3 + lambda * (1 - near), (1 - lambda) / 3,
                               (1 - lambda) / 3 + lambda * near};
  };
  ExpectPrediction(line, 0, mixed(0.25));
  ExpectPrediction(line, 1, mixed(1));
  ExpectPrediction(line, 2, mixed(1));  // beyond the range
  ExpectPrediction(line, 3, mixed(0));
}

TEST(KnnLm, GradientsReachTheLambdaOfEachToken) {
  const Random random;
  const Options more = {{"temperature", "10"}};
  GradientRequest request{random.options};
  request.options.insert(more.begin(), more.end());
  request.roundings = 2 * (2 * 16 + 2 * 40) + 4 * 16 + 2 * 37;
  request.inputs["neighbours"] = random.Run(more).at("neighbours").Clone();
  request.inputs["context"] = random.inputs.at("context").Clone();
  request.inputs["lambda"] = Tensor(DType::kF32, {2, 37});
  for (int64_t n = 0; n < 74; ++n) {
    request.inputs.at("lambda").span<float>()[n] = 0.05f + 0.9f * static_cast<float>(n) / 74;
  }
  ExpectGradientsOfDefinition(KnnLm(), random.problem, request);
}

// One that is asked for without the input is of the option, token by token.
TEST(KnnLm, TheOptionsLambdaHasAGradientToo) {
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    Line line({0, 0.5f}, {0, 1}, {2, 0}, {{"lambda", "0.25"}});
    NamedTensors g;
    g["out"] = Floats({1, 2, 3}, {1, -2, 0.5f, 0.3f, 0.7f, -1});
    const Tensor of_option = line.RunBackward(g, device).inputs.at("lambda").Clone();
    line.inputs["lambda"] = Floats({1, 2}, {0.25f, 0.25f});
    const Tensor of_input = line.RunBackward(g, device).inputs.at("lambda").Clone();
    EXPECT_EQ(MaxDifference(of_option.view(), of_input.view()), 0);
    EXPECT_GT(MaxAbs(of_option.view()), 0.1);
  }
}

// A neighbour that is alone has the weight 1, wherever it is.
TEST(KnnLm, ANeighbourThatIsAloneGivesTheContextNoGradient) {
  const Line line({0.3f, -2}, {1}, {2}, {{"lambda", "0.3"}});
  NamedTensors g;
  g["out"] = Floats({1, 2, 3}, {0.1f, 0.7f, -1.3f, 2.1f, 0.3f, 0.9f});
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(MaxAbs(line.RunBackward(g, device).inputs.at("context").view()), 0) << Name(device);
  }
}

TEST(KnnLm, ALambdaBeyondItsRangeHasNoGradient) {
  Line line({0, 0, 0, 0}, {0, 1}, {2, 0});
  line.inputs["lambda"] = Floats({1, 4}, {0.5f, 7, -3, kNan});
  NamedTensors g;
  g["out"] = Floats({1, 4, 3}, {1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0});
  const double far = std::exp(-1.0) / (1 + std::exp(-1.0)), p = 0.5 / 3 + 0.5 * far;
  for (const Device device : TestedDevices()) {
    const RunAndGradients pass = line.RunBackward(g, device);
    const absl::Span<const float> of_lambda = pass.inputs.at("lambda").span<float>();
    EXPECT_NEAR(of_lambda[0], (far - 1.0 / 3) / p, 1e-6) << Name(device);
    for (const int64_t token : {1, 2, 3}) EXPECT_EQ(of_lambda[token], 0) << Name(device);
  }
}

// With lambda = 1 the tokens that no neighbour has are impossible.
TEST(KnnLm, AnImpossibleTokenGivesNoGradient) {
  const Line line({0, 0.5f}, {0, 1}, {2, 0}, {{"lambda", "1"}});
  NamedTensors possible, all;
  possible["out"] = Floats({1, 2, 3}, {0.5f, 0, 2, 1, 0, -1});
  all["out"] = Floats({1, 2, 3}, {0.5f, 7, 2, 1, -3, -1});
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    const RunAndGradients expected = line.RunBackward(possible, device);
    EXPECT_GT(MaxAbs(expected.inputs.at("context").view()), 0.1);
    // A possible token has dlog p / dlambda = 1 - 1 / (3 p), with p of the two neighbours.
    const absl::Span<const float> of_lambda = expected.inputs.at("lambda").span<float>();
    const double near = 1 / (1 + std::exp(-1.0));
    EXPECT_NEAR(of_lambda[0], 0.5 * (1 - 1 / (3 - 3 * near)) + 2 * (1 - 1 / (3 * near)), 1e-6);
    EXPECT_NEAR(of_lambda[1], 0, 1e-6);  // both have 1 / 2, and the gradients 1 and -1
    ExpectSameBits(line.RunBackward(all, device).inputs, expected.inputs);
  }
}

// ---- The backward pass on devices ----

// Gives every fifth token no neighbours: by a context that is not finite, and one that is, but far from
// all keys. Gives others a lambda of their own, in the range and out of it.
template <class Retrieval>
void GiveTokensOfAllKinds(Retrieval* random) {
  const Problem& p = random->problem;
  Tensor& lambda = random->inputs["lambda"] = Tensor(DType::kF32, {p.batch, p.query_tokens});
  const TensorView context = random->inputs.at("context").view();
  const float kinds[] = {0.3f, 0, 1, 0.9f, 1.5f, 0.01f, -1};
  for (int64_t row = 0; row < p.batch * p.query_tokens; ++row) {
    lambda.span<float>()[row] = kinds[row % 7];
    if (row % 5 != 2) continue;
    Fill(Slice(Slice(context, 0, row / p.query_tokens, 1), 1, row % p.query_tokens, 1),
         row % 2 == 0 ? kNan : 1e30);
  }
}

TEST(KnnLm, GradientsOnADeviceAreThoseOfTheCpu) {
  Random random;
  GiveTokensOfAllKinds(&random);
  ExpectGradientsOfTheCpu(random, {{"temperature", "10"}});
}

TEST(KnnLm, GradientsOnADeviceOf1031TokensAnd140Channels) {
  Random random;
  random.problem = Problem::SelfAttention(1, 2, 9, 70);
  random.options["vocabulary"] = "1031";
  random.options["k"] = "3";
  random.inputs =
      RandomInputs(random.technique.InputSpecs(random.problem, random.options).value(), 5);
  ExpectGradientsOfTheCpu(random, {{"temperature", "100"}});
  GiveTokensOfAllKinds(&random);
  ExpectGradientsOfTheCpu(random, {{"temperature", "100"}});
}

// More neighbours than a block has threads, of which many have the same token.
TEST(KnnLm, GradientsOnADeviceOf150NeighboursWith7Tokens) {
  Random random;
  random.options["vocabulary"] = "7";
  random.options["k"] = "150";
  GiveTokensOfAllKinds(&random);
  ExpectGradientsOfTheCpu(random, {{"temperature", "20"}});
}

// Some given neighbours are none, some have no finite distance, and some have a weight of 0 in fp32.
TEST(KnnLm, GradientsOnADeviceOfGivenNeighbours) {
  Random random;
  NamedTensors parameters = random.Parameters();
  const TensorView keys = parameters.at("datastore.keys").view();
  Fill(Slice(keys, 0, 3, 1), kInfinity);
  Fill(Slice(keys, 0, 4, 1), kNan);
  Fill(Slice(keys, 0, 5, 1), 1e30);
  Tensor given(DType::kI32, {2, 37, 16});
  for (int64_t n = 0; n < given.num_elements(); ++n) {
    const int64_t row = n / 16, place = n % 16;
    given.span<int32_t>()[n] = static_cast<int32_t>(row % 6 == 4     ? (place % 2 == 0 ? -1 : 4)
                                                    : place % 5 == 1 ? -1
                                                                     : (row + place) % 9);
  }
  random.inputs["neighbours"] = std::move(given);
  ExpectGradientsOfTheCpu(random, {{"temperature", "10"}}, &parameters);
}

TEST(KnnLm, GradientsOnADeviceWithoutNeighbours) {
  Random random;
  random.options["k"] = "0";
  const RunAndGradients of_cpu = random.RunBackward();
  const RunAndGradients of_device = random.RunBackward({}, nullptr, KernelDevice());
  ExpectSameGradients(of_cpu.parameters, of_device.parameters);
  EXPECT_LE(MaxDifference(of_cpu.inputs.at("x").view(), of_device.inputs.at("x").view()),
            Fp32Bound(of_cpu.inputs.at("x").view()));
  for (const char* name : {"context", "lambda"}) {
    EXPECT_EQ(MaxAbs(of_device.inputs.at(name).view()), 0) << name;
  }
}

TEST(KnnLm, ANanOfTheModelReachesAllTokens) {
  Line line({0, 0}, {0, 1}, {2, 0});
  line.inputs["x"] = Floats({1, 2, 1}, {1, kNan});
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs = line.Run(device);
    for (const int64_t y : {0, 1, 2}) {
      EXPECT_TRUE(std::isfinite(*outputs.at("out").view().At<float>(0, 0, y))) << Name(device);
      EXPECT_TRUE(std::isnan(*outputs.at("out").view().At<float>(0, 1, y))) << Name(device);
    }
  }
}

// ---- What it reports, costs and refuses ----

TEST(KnnLm, StatisticsSayHowTheNeighboursAgreeWithTheModel) {
  Line line({0, 2}, {0, 1}, {2, 0}, {{"lambda", "0.5"}});
  line.parameters["output"] = Floats({3, 1}, {0, 1, 2});  // token 2 is the most likely
  for (const Device device : TestedDevices()) {
    const auto layer = KnnLm().Create(line.problem, line.options, device, 1).value();
    EXPECT_TRUE(layer->statistics().empty());
    ASSERT_TRUE(layer->SetParameters(line.parameters).ok());
    ASSERT_TRUE((device == Device::kCpu ? RunLayer(*layer, ViewsOf(line.inputs))
                                        : RunCudaLayer(*layer, device, ViewsOf(line.inputs)))
                    .ok());
    const auto statistics = layer->statistics();
    EXPECT_EQ(statistics.at("agreement"), 0.5);  // the second token's nearest has token 0
    const double mass =
        1 / (1 + std::exp(-1.0)) + std::exp(-4.0) / (std::exp(-4.0) + std::exp(-1.0));
    EXPECT_NEAR(statistics.at("neighbour_mass"), 0.5 * mass / 2, 1e-6);
  }
}

TEST(KnnLm, CostCountsTheSearchTheModelAndTheWeights) {
  const Random random;
  const auto flops = [&](const char* k) {
    Options options = random.options;
    options["k"] = k;
    return *KnnLm().Create(random.problem, options, Device::kCpu, 1).value()->cost().flops;
  };
  const double rows = 2 * 37, dim = 16;
  EXPECT_EQ(flops("0"), rows * 2 * 40 * dim);
  EXPECT_EQ(flops("16"), rows * (2 * 40 + 2 * 300 + 3 * 16) * dim);
  Options approximate = random.options;
  approximate.insert({{"search", "approximate"}, {"lists", "30"}, {"probes", "3"}});
  const auto layer = KnnLm().Create(random.problem, approximate, Device::kCpu, 1).value();
  EXPECT_EQ(*layer->cost().flops, rows * (2 * 40 + 2 * (30 + 30) + 3 * 16) * dim);
}

TEST(KnnLm, AValueThatIsNoTokenIsRefused) {
  const Line line({0}, {0, 1}, {2, 3});
  const auto outputs = RunTechnique(KnnLm(), line.problem, ViewsOf(line.inputs),
                                    {line.options, Device::kCpu, 1, &line.parameters, 1});
  EXPECT_EQ(outputs.status().ToString(),
            "INVALID_ARGUMENT: datastore.values: entry 1 is token 3; allowed are 0 to 2");
}

TEST(KnnLm, WhatItCannotDoIsSaidInOneLine) {
  const auto message = [](const Problem& problem, const Options& options) {
    return std::string(KnnLm().Create(problem, options, Device::kCpu, 1).status().ToString());
  };
  Problem problem = Problem::SelfAttention(1, 4, 8, 4);
  EXPECT_EQ(message(problem, {{"lambda", "1.5"}}),
            "INVALID_ARGUMENT: option lambda is \"1.5\"; allowed are 0 to 1");
  EXPECT_EQ(
      KnnLm().Create(problem, {{"search", "approximate"}}, KernelDevice(), 1).status().ToString(),
      absl::StrCat("UNIMPLEMENTED: knn_lm: search is \"approximate\", which is on the CPU alone; "
                   "allowed on ",
                   Name(KernelDevice()), " is exact"));
  problem.kv_tokens = 9;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: knn_lm has no keys but the datastore's: kv_tokens is 9; allowed is "
            "query_tokens, 8");
}

TEST(KnnLm, ADatastoreThatIsGivenAwayIsNotCopied) {
  const Line line({0}, {0, 1, 3}, {2, 0, 2});
  NamedTensors expected = line.Run();
  const auto layer = KnnLm().Create(line.problem, line.options, Device::kCpu, 1).value();
  NamedTensors given;
  for (const auto& [name, tensor] : line.parameters) given[name] = tensor.Clone();
  given["datastore.values"] = given["datastore.values"].CloneAs(DType::kI32);
  const void* keys = given.at("datastore.keys").raw();
  ASSERT_TRUE(layer->SetParameters(std::move(given)).ok());
  EXPECT_EQ(layer->parameters().at("datastore.keys").raw(), keys);
  // The values were converted.
  EXPECT_EQ(layer->parameters().at("datastore.values").dtype(), DType::kU8);
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(line.inputs)).value();
  EXPECT_EQ(MaxDifference(outputs.at("out").view(), expected.at("out").view()), 0);
}

TEST(KnnLm, LargeVocabulariesHaveWideValues) {
  const auto dtype = [](const char* vocabulary) {
    const auto layer = KnnLm().Create(Problem::SelfAttention(1, 1, 4, 8),
                                      {{"vocabulary", vocabulary}}, Device::kCpu, 1);
    return (*layer)->parameters().at("datastore.values").dtype();
  };
  EXPECT_EQ(dtype("256"), DType::kU8);
  EXPECT_EQ(dtype("257"), DType::kI32);
}

// ---- Golden file ----

TEST(KnnLm, TheAuthorsCodeGivesEveryTokenTheSameProbability) {
  const SafetensorsFile golden = GoldenFile("memory/knn_lm/testdata/knnlm.safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const Tensor& x = golden.tensors.at("x");
  const Problem problem =
      Problem::SelfAttention(x.dim(0), number("heads"), x.dim(1), number("head_dim"));
  RunRequest request;
  for (const char* option : {"vocabulary", "entries", "k", "lambda"}) {
    request.options[option] = golden.metadata.at(option);
  }
  NamedTensors parameters;
  for (const char* name : {"output", "datastore.keys", "datastore.values"}) {
    parameters[name] = golden.tensors.at(name).Clone();
  }
  request.parameters = &parameters;
  const Inputs inputs = {{"x", x.view()}, {"context", golden.tensors.at("context").view()}};
  const ConstTensorView out = golden.tensors.at("out").view();
  const auto defined = DefineTechnique(KnnLm(), problem, inputs, request).value();
  EXPECT_LE(MaxDifference(defined.at("out").view(), out), 1e-14);
  for (const Device device : TestedDevices()) {
    request.device = device;
    const auto computed = RunTechnique(KnnLm(), problem, inputs, request).value();
    EXPECT_LE(MaxDifference(computed.at("out").view(), out), Fp32Bound(out));
  }
}

}  // namespace
}  // namespace tfb::knn_lm
