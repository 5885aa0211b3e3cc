#include "attention/routing/routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/dense/dense.h"
#include "core/backward_testing.h"
#include "core/cpu/kernels.h"
#include "core/definition.h"
#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::routing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const float kNan = std::numeric_limits<float>::quiet_NaN();

Options With(Options options, const Options& more) {
  options.insert(more.begin(), more.end());
  return options;
}
// Returns options with which all heads have clusters.
Options Clusters(int64_t clusters, const Options& more = {}) {
  return With(more, {{"clusters", std::to_string(clusters)}, {"local_heads", "0"}});
}

NamedTensors Random(const Problem& problem) {
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 7);
  if (problem.causal) inputs.erase("k");
  return inputs;
}
NamedTensors RunRouting(const Problem& problem, const NamedTensors& inputs, const Options& options,
                        Device device = Device::kCpu, const NamedTensors* parameters = nullptr) {
  return RunTechnique(Routing(), problem, ViewsOf(inputs), {options, device, 1, parameters, 2})
      .value();
}
NamedTensors Parameters(Tensor centroids) {
  NamedTensors parameters;
  parameters["centroids"] = std::move(centroids);
  return parameters;
}

// Returns the centroids of a new layer.
Tensor Drawn(const Problem& problem, const Options& options) {
  return Routing()
      .Create(problem, options, Device::kCpu, 1)
      .value()
      ->parameters()
      .at("centroids")
      .Clone();
}

Tensor Numbers(const Shape& shape, const std::vector<double>& values) {
  Tensor tensor(DType::kF32, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) tensor.view().Set(i, values[i]);
  return tensor;
}
// Returns [1, 1, tokens, tokens]: a row of the output is then a row of weights.
Tensor UnitVectors(int64_t tokens) {
  Tensor v(DType::kF32, {1, 1, tokens, tokens});
  Fill(v.view(), 0);
  for (int64_t j = 0; j < tokens; ++j) *v.view().MutableAt<float>(0, 0, j, j) = 1;
  return v;
}
std::vector<double> Row(const Tensor& tensor, int64_t i, int64_t h = 0) {
  std::vector<double> row;
  const ConstTensorView view = tensor.view();
  for (int64_t c = 0; c < view.dim(3); ++c) row.push_back(view.Get(view.Offset(0, h, i, c)));
  return row;
}
testing::Matcher<std::vector<double>> Near(const std::vector<double>& values) {
  return testing::Pointwise(testing::DoubleNear(1e-6), values);
}

// Returns marks of one batch row and head from a string a cluster, "1" where a token is a member.
Tensor Marks(const std::vector<std::string>& clusters) {
  const auto count = static_cast<int64_t>(clusters.size());
  const auto tokens = static_cast<int64_t>(clusters[0].size());
  Tensor marks(DType::kU8, {1, 1, tokens, count});
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t i = 0; i < tokens; ++i) {
      *marks.view().MutableAt<uint8_t>(0, 0, i, c) = clusters[c][i] == '1' ? 1 : 0;
    }
  }
  return marks;
}
std::vector<std::string> Strings(const Tensor& marks, int64_t b = 0, int64_t h = 0) {
  std::vector<std::string> clusters(marks.dim(3));
  for (int64_t c = 0; c < marks.dim(3); ++c) {
    for (int64_t i = 0; i < marks.dim(2); ++i) {
      clusters[c] += *marks.view().At<uint8_t>(b, h, i, c) != 0 ? '1' : '0';
    }
  }
  return clusters;
}

// Returns a mask with "1" where there is a token, the same for all batch rows.
Tensor KeyMaskOf(const std::string& is_token, int64_t batch = 1) {
  const auto tokens = static_cast<int64_t>(is_token.size());
  Tensor mask(DType::kU8, {batch, tokens});
  for (int64_t n = 0; n < batch * tokens; ++n) {
    mask.span<uint8_t>()[n] = is_token[n % tokens] == '1' ? 1 : 0;
  }
  return mask;
}
std::string Repeat(int64_t count, char mark) { return std::string(count, mark); }

// Returns the rows after a layer norm in float64.
DoubleTensor Normalized(const Tensor& tensor) {
  DoubleTensor rows(tensor.view());
  const int64_t channels = tensor.dim(3);
  for (double* x = rows.data(); x < rows.data() + rows.size(); x += channels) {
    const double mean = std::accumulate(x, x + channels, 0.0) / static_cast<double>(channels);
    double square = 0;
    for (int64_t c = 0; c < channels; ++c) square += (x[c] - mean) * (x[c] - mean);
    const double root = std::sqrt(square / static_cast<double>(channels) + 1e-5);
    for (int64_t c = 0; c < channels; ++c) x[c] = (x[c] - mean) / root;
  }
  return rows;
}
// Returns queries and keys of a problem's inputs as clusters see them, and the values.
NamedTensors WithLayerNorms(const NamedTensors& inputs) {
  const Tensor& q = inputs.at("q");
  const Tensor& k = inputs.count("k") > 0 ? inputs.at("k") : q;
  const DoubleTensor queries = Normalized(q), keys = Normalized(k);
  NamedTensors normalized;
  normalized["q"] = Numbers(q.shape(), {queries.data(), queries.data() + queries.size()});
  normalized["k"] = Numbers(k.shape(), {keys.data(), keys.data() + keys.size()});
  normalized["v"] = inputs.at("v").Clone();
  return normalized;
}
std::vector<std::vector<double>> RowsOfHead(const DoubleTensor& rows, const Problem& p, int64_t h) {
  std::vector<std::vector<double>> of_head;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < p.query_tokens; ++i) {
      of_head.emplace_back(rows.Row(b, h, i), rows.Row(b, h, i) + p.head_dim);
    }
  }
  return of_head;
}

// ---- By hand ----

// Returns eight tokens under marks, with all scores 0.
NamedTensors Given(const std::vector<std::string>& marks, bool causal) {
  NamedTensors inputs;
  inputs["q"] = Tensor(DType::kF32, {1, 1, 8, 2});
  Fill(inputs["q"].view(), 0);
  if (!causal) inputs["k"] = inputs["q"].Clone();
  inputs["v"] = UnitVectors(8);
  inputs["members"] = Marks(marks);
  return inputs;
}
Problem GivenProblem(bool causal) {
  Problem problem = Problem::SelfAttention(1, 1, 8, 2, causal);
  problem.value_dim = 8;
  return problem;
}

TEST(Routing, ATokensOutputIsTheMeanOverItsClusters) {
  // Tokens 1 and 4 are members of no cluster.
  const std::vector<std::string> marks = {"10100100", "00110001", "00100110"};
  std::vector<std::string> both = marks;
  both.insert(both.end(), marks.begin(), marks.end());
  const NamedTensors inputs = Given(both, false);
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunRouting(GivenProblem(false), inputs, Clusters(3), device);
    const double a = 1.0 / 3, b = 1.0 / 9;
    EXPECT_THAT(Row(run.at("out"), 0), Near({a, 0, a, 0, 0, a, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 1), Near({0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 2), Near({b, 0, 3 * b, b, 0, 2 * b, b, b}));
    EXPECT_THAT(Row(run.at("out"), 3), Near({0, 0, a, a, 0, 0, 0, a}));
    EXPECT_THAT(Row(run.at("out"), 4), Near({0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 5), Near({a / 2, 0, a, 0, 0, a, a / 2, 0}));
    EXPECT_THAT(Row(run.at("out"), 6), Near({0, 0, a, 0, 0, a, a, 0}));
    EXPECT_THAT(Row(run.at("out"), 7), Near({0, 0, a, a, 0, 0, 0, a}));
    EXPECT_EQ(Strings(run.at("members")), both);
  }
}

TEST(Routing, CausalTokensSeeTheEarlierOnesOfTheirClusters) {
  const std::vector<std::string> marks = {"10100100", "00110001", "00100110"};
  const NamedTensors inputs = Given(marks, true);
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunRouting(GivenProblem(true), inputs, Clusters(3), device);
    const double a = 1.0 / 3, b = 1.0 / 6;
    EXPECT_THAT(Row(run.at("out"), 0), Near({1, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 1), Near({0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 2), Near({b, 0, 5 * b, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 3), Near({0, 0, 0.5, 0.5, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 4), Near({0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 5), Near({b, 0, 2.5 * b, 0, 0, 2.5 * b, 0, 0}));
    EXPECT_THAT(Row(run.at("out"), 6), Near({0, 0, a, 0, 0, a, a, 0}));
    EXPECT_THAT(Row(run.at("out"), 7), Near({0, 0, a, a, 0, 0, 0, a}));
    EXPECT_EQ(Strings(run.at("members")), marks);
  }
}

TEST(Routing, QueriesAndKeysOfAClusterAreChosenApart) {
  // There are two clusters of 4: queries 0, 1, 2, 3 on keys 4 to 7, and 0, 2, 4, 6 on keys 1, 3, 5,
  // 7.
  const NamedTensors inputs = Given({"11110000", "10101010", "00001111", "01010101"}, false);
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunRouting(GivenProblem(false), inputs, Clusters(2), device);
    const double a = 1.0 / 4, b = 1.0 / 8;
    for (const int i : {0, 2}) {
      EXPECT_THAT(Row(run.at("out"), i), Near({0, b, 0, b, b, 2 * b, b, 2 * b}));
    }
    for (const int i : {1, 3}) EXPECT_THAT(Row(run.at("out"), i), Near({0, 0, 0, 0, a, a, a, a}));
    for (const int i : {4, 6}) EXPECT_THAT(Row(run.at("out"), i), Near({0, a, 0, a, 0, a, 0, a}));
    for (const int i : {5, 7}) EXPECT_THAT(Row(run.at("out"), i), Near({0, 0, 0, 0, 0, 0, 0, 0}));
  }
}

TEST(Routing, ScoresAreOfLayerNormsAndUnscaled) {
  // From two channels a layer norm keeps only the sign of their difference: scores are 2 and -2.
  NamedTensors inputs = Given({"11000110", "00111001", "11000110", "00111001"}, false);
  inputs["q"] = Numbers({1, 1, 8, 2}, {900, 100, 5, 905, 0, 900, 3000, 0,  //
                                       -900, 0, 0, -900, 500, -500, 1, 901});
  inputs["k"] = Numbers({1, 1, 8, 2}, {0, 900, 900, 0, 0, 900, 900, 0,  //
                                       0, 900, 0, 900, 900, 0, 900, 0});
  for (const Device device : TestedDevices()) {
    // Token 0 is (1, -1), and so are keys 1 and 6 of its cluster; keys 0 and 5 are (-1, 1).
    const double far = 1 / (2 + 2 * std::exp(4)), near = std::exp(4) * far;
    const NamedTensors run = RunRouting(GivenProblem(false), inputs, Clusters(2), device);
    EXPECT_THAT(Row(run.at("out"), 0), Near({far, near, 0, 0, 0, far, near, 0}));
    EXPECT_THAT(Row(run.at("out"), 1), Near({near, far, 0, 0, 0, near, far, 0}));
    // With s = log(3) / 4, scores are 2 s and -2 s: weights of 3 to 1.
    const Options scale = {{"scale", std::to_string(std::log(3) / 4)}};
    const NamedTensors scaled = RunRouting(GivenProblem(false), inputs, Clusters(2, scale), device);
    EXPECT_THAT(Row(scaled.at("out"), 7), Near({0, 0, 0.375, 0.125, 0.375, 0, 0, 0.125}));
    const double root = std::exp(std::sqrt(8));  // with the scale 1 / sqrt(2)
    const NamedTensors usual =
        RunRouting(GivenProblem(false), inputs, Clusters(2, {{"scale", "0"}}), device);
    EXPECT_NEAR(Row(usual.at("out"), 0)[1] / Row(usual.at("out"), 0)[0], root, 1e-3);
  }
}

TEST(Routing, OfGivenMarksTheFirstCountAndFirstTokensFillUp) {
  // A cluster has 4 members: six are too many, two too few, and so is none.
  for (const Device device : TestedDevices()) {
    const NamedTensors many =
        RunRouting(GivenProblem(true), Given({"01101111", "00010001"}, true), Clusters(2), device);
    EXPECT_THAT(Strings(many.at("members")), ElementsAre("01101100", "11010001"));
    EXPECT_THAT(Row(many.at("out"), 5), Near({0, 0.25, 0.25, 0, 0.25, 0.25, 0, 0}));
    EXPECT_THAT(Row(many.at("out"), 6), Near({0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_THAT(Row(many.at("out"), 7), Near({0.25, 0.25, 0, 0.25, 0, 0, 0, 0.25}));
    const NamedTensors none =
        RunRouting(GivenProblem(true), Given({"00000000", "11111111"}, true), Clusters(2), device);
    EXPECT_THAT(Strings(none.at("members")), ElementsAre("11110000", "11110000"));
    NamedTensors inputs = Given({"00000000", "11111111"}, true);
    inputs["key_mask"] = KeyMaskOf("10111111");
    const NamedTensors padded = RunRouting(GivenProblem(true), inputs, Clusters(2), device);
    EXPECT_THAT(Strings(padded.at("members")), ElementsAre("11110000", "11110000"));
    EXPECT_THAT(Row(padded.at("out"), 2), Near({0.5, 0, 0.5, 0, 0, 0, 0, 0}));
  }
}

TEST(Routing, MembersThatWereWrittenMayBeGiven) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 3, 77, 8, causal);
    const Options options = {{"clusters", "5"}, {"local_heads", "1"}};
    for (const Device device : TestedDevices()) {
      const NamedTensors computed = RunRouting(problem, Random(problem), options, device);
      NamedTensors inputs = Random(problem);
      inputs["members"] = computed.at("members").Clone();
      const NamedTensors given = RunRouting(problem, inputs, options, device);
      for (const char* name : {"out", "members"}) {
        EXPECT_EQ(MaxDifference(computed.at(name).view(), given.at(name).view()), 0) << name;
      }
    }
  }
}

// ---- Which tokens are members ----

TEST(Routing, AClusterHasTheTokensOfLargestScore) {
  // The layer norms are (1, -1) s and the centroids (c, 0): the score of token i is c s_i.
  NamedTensors inputs = Given({"00000000"}, true);
  inputs.erase("members");
  inputs["q"] = Numbers({1, 1, 8, 2}, {1, -1, -1, 1, 1, -1, -1, 1, -1, 1, 1, -1, -1, 1, 1, -1});
  const NamedTensors parameters = Parameters(Numbers({1, 2, 2}, {1, 0, -1, 0}));
  for (const Device device : TestedDevices()) {
    EXPECT_THAT(
        Strings(
            RunRouting(GivenProblem(true), inputs, Clusters(2), device, &parameters).at("members")),
        ElementsAre("10100101", "01011010"));
  }
}

TEST(Routing, OfEqualScoresTheEarlierTokenIsAMember) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  NamedTensors inputs = Random(problem);
  for (const char* name : {"q", "k"}) {
    const TensorView x = inputs[name].view();
    for (int64_t i = 1; i < 70; ++i) CopyElements(Slice(x, 2, 0, 1), Slice(x, 2, i, 1));
  }
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunRouting(problem, inputs, Clusters(7), device);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 2; ++h) {
        for (const std::string& cluster : Strings(run.at("members"), b, h)) {
          EXPECT_EQ(cluster, Repeat(10, '1') + Repeat(60, '0'));
        }
      }
    }
  }
}

TEST(Routing, CpuAndCudaChooseTheSameMembers) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool causal : {false, true}) {
      const Problem problem = Problem::SelfAttention(2, 2, 210, 24, causal, dtype);
      const NamedTensors inputs = Random(problem);
      const NamedTensors cpu = RunRouting(problem, inputs, Clusters(9));
      const NamedTensors cuda = RunRouting(problem, inputs, Clusters(9), KernelDevice());
      EXPECT_EQ(MaxDifference(cpu.at("members").view(), cuda.at("members").view()), 0);
    }
  }
}

// Returns tokens that differ by a few roundings, so that these decide which scores are largest.
NamedTensors NearTies(const Problem& problem) {
  NamedTensors inputs = Random(problem);
  const RandomStream stream(1, "near");
  const TensorView q = inputs["q"].view();
  for (int64_t i = 0; i < problem.query_tokens; ++i) {
    for (int64_t c = 0; c < problem.head_dim; ++c) {
      const auto roundings = static_cast<float>(stream.Bits(i * problem.head_dim + c) % 5);
      *q.MutableAt<float>(0, 0, i, c) = *q.At<float>(0, 0, 0, c) * (1 + std::ldexp(roundings, -23));
    }
  }
  return inputs;
}

TEST(Routing, CpuAndCudaResolveNearTiesTheSame) {
  if (std::strcmp(BestCpuKernels().name, "generic") == 0) {
    GTEST_SKIP() << "this CPU has no fused multiply-add";
  }
  for (const int64_t head_dim : {2, 24, 64, 100}) {
    const Problem problem = Problem::SelfAttention(1, 1, 150, head_dim, /*causal=*/true);
    const NamedTensors inputs = NearTies(problem);
    const auto members = [&](Device device) {
      return Strings(RunRouting(problem, inputs, Clusters(5), device).at("members"));
    };
    EXPECT_EQ(members(Device::kCpu), members(KernelDevice())) << head_dim;
  }
}

TEST(Routing, TheDefinitionTakesTheLayersWordForNearTiesOnly) {
  const Problem problem = Problem::SelfAttention(1, 1, 150, 64, /*causal=*/true);
  NamedTensors inputs = NearTies(problem);
  // Tokens 8 and 3 are equal, and 149 is the opposite of all.
  const TensorView q = inputs["q"].view();
  CopyElements(Slice(q, 2, 3, 1), Slice(q, 2, 8, 1));
  for (int64_t c = 0; c < 64; ++c) *q.MutableAt<float>(0, 0, 149, c) *= -1;
  const auto defined = [&](const NamedTensors* computed) {
    DefinitionRequest request;
    request.computed = computed;
    const NamedTensors outputs =
        DefineTechnique(Routing(), problem, ViewsOf(inputs), {Clusters(75)}, request).value();
    return Strings(outputs.at("members").CloneAs(DType::kU8));
  };
  const std::vector<std::string> own = defined(nullptr);
  NamedTensors computed;
  computed["members"] = RunRouting(problem, inputs, Clusters(75)).at("members").Clone();
  EXPECT_NE(own, Strings(computed["members"]));
  EXPECT_EQ(defined(&computed), Strings(computed["members"]));
  // 149 is far from this cluster, and its 2 given members are a and b.
  size_t c = 0;
  while (own[c][149] == '1') ++c;
  const auto takes_the_word = [&](int64_t a, int64_t b) {
    std::string said(150, '0');
    said[a] = said[b] = '1';
    for (int64_t i = 0; i < 150; ++i) {
      *computed["members"].view().MutableAt<uint8_t>(0, 0, i, c) = said[i] == '1' ? 1 : 0;
    }
    return defined(&computed)[c] == said;
  };
  EXPECT_TRUE(takes_the_word(40, 41));
  EXPECT_FALSE(takes_the_word(40, 149));
  EXPECT_FALSE(takes_the_word(40, 40));  // one too few
  EXPECT_TRUE(takes_the_word(3, 8));
  EXPECT_TRUE(takes_the_word(3, 40));
  EXPECT_FALSE(takes_the_word(8, 40));  // without the first of two equal tokens
}

// Two tokens compete for a cluster of one, with the scores 1 and 1 / sqrt(1 + t^2), about 1 - t^2 /
// 2. Of two channels a score has 12 roundings; where a token is of length 2^-100, its denormals have
// 2 2^-126 / 2^-100 more, half a rounding. Both scores are that far off.
TEST(Routing, TheDefinitionFollowsALayerUpToTheErrorsOfBothScores) {
  struct NearTie {
    double length;
    double roundings;  // t^2 / 2
    bool may_take_1;
  };
  const NearTie ties[] = {
      {1, 23.8, true}, {1, 24.2, false}, {0x1p-100, 24.8, true}, {0x1p-100, 25.2, false}};
  Problem problem = Problem::SelfAttention(1, 1, 2, 2, /*causal=*/true);
  problem.value_dim = 3;
  Tensor centroids(DType::kF32, {1, 2, 2});
  Fill(centroids.view(), 0);
  centroids.span<float>()[0] = 1;   // of cluster 0
  centroids.span<float>()[2] = -1;  // of cluster 1, whose nearest token is 1 by far or barely
  const NamedTensors parameters = Parameters(std::move(centroids));
  for (const NearTie& tie : ties) {
    NamedTensors inputs = Random(problem), computed;
    const double t = std::sqrt(2 * tie.roundings * 0x1p-24);
    const double rows[] = {1, 0, 1, t};
    for (int n = 0; n < 4; ++n) inputs["q"].view().Set(n, tie.length * rows[n]);
    // Token 1 is the member of both clusters.
    Tensor& members = computed["members"] = Tensor(DType::kU8, {1, 1, 2, 2});
    for (int n = 0; n < 4; ++n) members.span<uint8_t>()[n] = n >= 2;
    DefinitionRequest request;
    request.computed = &computed;
    const NamedTensors defined =
        DefineTechnique(Routing(), problem, ViewsOf(inputs),
                        {Clusters(2, {{"norm", "unit"}}), Device::kCpu, 1, &parameters}, request)
            .value();
    EXPECT_EQ(Strings(defined.at("members").CloneAs(DType::kU8)),
              (std::vector<std::string>{tie.may_take_1 ? "01" : "10", "01"}))
        << tie.roundings << " roundings";
  }
}

// Both tokens score 1, and the layer takes the later one. The definition does too where the tokens
// differ anywhere in their channels, however many a value has.
TEST(Routing, TheDefinitionKnowsEqualTokensByAllTheirChannels) {
  const double tokens[][2][3] = {
      {{1, 2, 3}, {1, 2, 3}}, {{1, 2, 3}, {1, 2, -3}}, {{1, 2, 3}, {1, -2, 3}}};
  for (const int64_t value_dim : {1, 2, 3, 4}) {
    for (const auto& pair : tokens) {
      Problem problem = Problem::SelfAttention(1, 1, 2, 3, /*causal=*/true);
      problem.value_dim = value_dim;
      NamedTensors inputs = Random(problem), computed;
      inputs["q"] = Numbers({1, 1, 2, 3}, {pair[0][0], pair[0][1], pair[0][2],  //
                                           pair[1][0], pair[1][1], pair[1][2]});
      computed["members"] = Marks({"01", "01"});
      const NamedTensors parameters = Parameters(Numbers({1, 2, 3}, {1, 0, 0, 1, 0, 0}));
      DefinitionRequest request;
      request.computed = &computed;
      const NamedTensors defined =
          DefineTechnique(Routing(), problem, ViewsOf(inputs),
                          {Clusters(2, {{"norm", "unit"}}), Device::kCpu, 1, &parameters}, request)
              .value();
      const bool equal = std::equal(pair[0], pair[0] + 3, pair[1]);
      EXPECT_EQ(Strings(defined.at("members").CloneAs(DType::kU8)),
                std::vector<std::string>(2, equal ? "10" : "01"))
          << "value_dim " << value_dim;
    }
  }
}

TEST(Routing, ClustersAreOfOneSizeAndTheCoverageSumsToTheirs) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 50, 8, causal);
    const NamedTensors run = RunRouting(problem, Random(problem), Clusters(7));
    for (int64_t head = 0; head < 4; ++head) {
      const std::vector<std::string> clusters = Strings(run.at("members"), head / 2, head % 2);
      ASSERT_EQ(clusters.size(), causal ? 7 : 14);
      for (size_t set = 0; set < clusters.size(); set += 7) {
        std::vector<int64_t> tokens_in(8);  // tokens in so many clusters
        for (int64_t i = 0; i < 50; ++i) {
          int64_t count = 0;
          for (size_t c = set; c < set + 7; ++c) count += clusters[c][i] == '1';
          ++tokens_in[count];
        }
        int64_t members = 0;
        for (int64_t n = 0; n < 8; ++n) members += n * tokens_in[n];
        EXPECT_EQ(members, 7 * 8);
        EXPECT_GT(tokens_in[0], 0);
      }
      for (const std::string& cluster : clusters) {
        EXPECT_EQ(std::count(cluster.begin(), cluster.end(), '1'), 8);
      }
    }
  }
}

TEST(Routing, MoreClustersThanTokensAreOneATokenEach) {
  for (const int64_t tokens : {1, 3}) {
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 8, /*causal=*/true);
    const NamedTensors inputs = Random(problem);
    for (const Device device : TestedDevices()) {
      const NamedTensors run = RunRouting(problem, inputs, Clusters(8), device);
      ASSERT_EQ(run.at("members").dim(3), tokens);
      for (int64_t h = 0; h < 2; ++h) {
        std::vector<bool> covered(tokens);
        for (const std::string& cluster : Strings(run.at("members"), 0, h)) {
          EXPECT_EQ(std::count(cluster.begin(), cluster.end(), '1'), 1);
          covered[cluster.find('1')] = true;
        }
        for (int64_t i = 0; i < tokens; ++i) {  // tokens see only themselves
          std::vector<double> expected = Row(inputs.at("v"), i, h);
          if (!covered[i]) std::fill(expected.begin(), expected.end(), 0);
          EXPECT_THAT(Row(run.at("out"), i, h), Near(expected));
        }
      }
    }
  }
}

TEST(Routing, ByDefaultAClusterHasUpTo512Tokens) {
  const auto clusters = [](int64_t tokens) {
    const Problem problem = Problem::SelfAttention(1, 1, tokens, 4, /*causal=*/true);
    return Drawn(problem, {}).dim(1);
  };
  EXPECT_EQ(clusters(1), 1);
  EXPECT_EQ(clusters(512), 1);
  EXPECT_EQ(clusters(513), 2);
  EXPECT_EQ(clusters(5120), 10);
}

// ---- Exact cases ----

TEST(Routing, OneClusterIsDenseAttentionOnLayerNorms) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 60, 16, causal);
    const NamedTensors inputs = Random(problem);
    const NamedTensors normalized = WithLayerNorms(inputs);
    const NamedTensors dense =
        RunTechnique(dense::Dense(), problem, ViewsOf(normalized), {{{"scale", "1"}}}).value();
    for (const Device device : TestedDevices()) {
      const NamedTensors run = RunRouting(problem, inputs, Clusters(1), device);
      EXPECT_LE(MaxDifference(run.at("out").view(), dense.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

// Returns row n + 1 of the Hadamard matrix of 8: its sum is 0, its variance 1, and it is orthogonal
// to the others.
double Direction(int64_t n, int64_t c) {
  const int64_t common = (n + 1) & c;
  return ((common & 1) + (common >> 1 & 1) + (common >> 2 & 1)) % 2 == 0 ? 1 : -1;
}
Tensor Directions(int64_t heads, int64_t count) {
  Tensor centroids(DType::kF32, {heads, count, 8});
  for (int64_t i = 0; i < centroids.num_elements(); ++i) {
    centroids.view().Set(i, Direction(i / 8 % count, i % 8));
  }
  return centroids;
}
// Returns tokens i near direction i % 4, of several lengths.
Tensor NearDirections(const Problem& p, const std::string& name, double noise) {
  Tensor x(DType::kF32, {p.batch, p.query_heads, p.query_tokens, 8});
  FillNormal(&x, 3, name, 0, noise);
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    const int64_t token = i / 8 % p.query_tokens;
    const double length = 0.5 + static_cast<double>(token % 7);
    x.view().Set(i, length * (x.view().Get(i) + Direction(token % 4, i % 8)));
  }
  return x;
}

TEST(Routing, SeparableClustersGiveTheBlockMaskExactly) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 64, 8, causal);
    NamedTensors inputs = Random(problem);
    inputs["q"] = NearDirections(problem, "q", 0.2);
    if (!causal) inputs["k"] = NearDirections(problem, "k", 0.2);
    NamedTensors expected;
    DefineMaskedAttention(
        problem, ViewsOf(WithLayerNorms(inputs)), DefinitionRequest(), 1,
        [](int64_t, int64_t i, int64_t j) { return i % 4 == j % 4; },
        [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, &expected);
    const NamedTensors parameters = Parameters(Directions(2, 4));
    for (const Device device : TestedDevices()) {
      const NamedTensors run = RunRouting(problem, inputs, Clusters(4), device, &parameters);
      for (int64_t set = 0; set < (causal ? 1 : 2); ++set) {
        for (int64_t c = 0; c < 4; ++c) {
          const std::string cluster = Strings(run.at("members"), 1, 1)[set * 4 + c];
          for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(cluster[i] == '1', i % 4 == c);
        }
      }
      EXPECT_LE(MaxDifference(run.at("out").view(), expected.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

// ---- Padding and NaN ----

TEST(Routing, PaddedTokensAreMembersAfterAllOthersAndNeverKeys) {
  // All scores are equal, so that only padding keeps the first tokens out.
  const NamedTensors parameters = Parameters(Numbers({1, 2, 2}, {1, 0, -1, 0}));
  const auto run = [&](const std::string& is_token, Device device) {
    NamedTensors inputs = Given({"00000000"}, false);
    inputs.erase("members");
    inputs["key_mask"] = KeyMaskOf(is_token);
    for (int64_t i = 0; i < 8; ++i) {
      if (is_token[i] == '1') continue;
      for (const char* name : {"q", "k", "v"}) Fill(Slice(inputs[name].view(), 2, i, 1), kNan);
    }
    return RunRouting(GivenProblem(false), inputs, Clusters(2), device, &parameters);
  };
  for (const Device device : TestedDevices()) {
    const NamedTensors enough = run("01111111", device);
    EXPECT_THAT(Strings(enough.at("members")), Each("01111000"));
    EXPECT_THAT(Row(enough.at("out"), 0), Near({0, 0, 0, 0, 0, 0, 0, 0}));
    const NamedTensors few = run("01000100", device);
    EXPECT_THAT(Strings(few.at("members")), Each("11100100"));  // and the first padded ones
    EXPECT_THAT(Row(few.at("out"), 5), Near({0, 0.5, 0, 0, 0, 0.5, 0, 0}));
    EXPECT_EQ(MaxAbs(run("00000000", device).at("out").view()), 0);
  }
}

TEST(Routing, NanInAValueReachesOnlyTheRowsThatSeeIt) {
  const Problem problem = Problem::SelfAttention(1, 1, 90, 8);
  NamedTensors inputs = Random(problem);
  DefinitionRequest request;
  request.weights = true;
  const NamedTensors defined =
      DefineTechnique(Routing(), problem, ViewsOf(inputs), {Clusters(6)}, request).value();
  const auto sees = [&](int64_t i, int64_t j) {
    return *defined.at("weights").view().At<double>(0, 0, i, j) > 0;
  };
  // The NaN is in the first key of the first cluster: columns of members are 6 of queries, then 6
  // of keys.
  const auto nan =
      static_cast<int64_t>(Strings(defined.at("members").CloneAs(DType::kU8))[6].find('1'));
  *inputs["v"].view().MutableAt<float>(0, 0, nan, 3) = kNan;
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunRouting(problem, inputs, Clusters(6), device);
    int64_t rows = 0;
    for (int64_t i = 0; i < 90; ++i) {
      const std::vector<double> row = Row(run.at("out"), i);
      for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(std::isnan(row[c]), sees(i, nan) && c == 3);
      rows += sees(i, nan);
    }
    EXPECT_LT(rows, 90);
  }
}

// The token is a member only after the padded tokens, 35 of 40.
TEST(Routing, ATokenWhoseScoresAreNanIsTheLastOfAll) {
  const Problem problem = Problem::SelfAttention(1, 1, 40, 8, /*causal=*/true);
  NamedTensors inputs = Random(problem);
  *inputs["q"].view().MutableAt<float>(0, 0, 3, 2) = kNan;
  for (const bool padded : {false, true}) {
    if (padded) inputs["key_mask"] = KeyMaskOf(Repeat(5, '1') + Repeat(35, '0'));
    for (const Device device : TestedDevices()) {
      const NamedTensors run = RunRouting(problem, inputs, Clusters(4), device);
      for (const std::string& cluster : Strings(run.at("members"))) {
        EXPECT_EQ(cluster[3], '0');
        if (padded) {
          EXPECT_EQ(cluster.substr(0, 11), "11101111111");
        }
      }
      for (const float y : run.at("out").span<float>()) ASSERT_FALSE(std::isnan(y));
    }
  }
}

// ---- Local heads ----

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> range(end - begin);
  std::iota(range.begin(), range.end(), begin);
  return range;
}

TEST(Routing, LocalHeadsSeeTheirBlockAndTheNextOnes) {
  const Options options = {{"local_heads", "1"}, {"local_block", "4"}, {"clusters", "1"}};
  for (int64_t i = 0; i < 14; ++i) {
    const int64_t block = i / 4;
    const int64_t first = std::max<int64_t>((block - 1) * 4, 0);
    EXPECT_EQ(KeysSeen(Routing(), Problem::SelfAttention(1, 2, 14, 8), options, 0, i),
              Range(first, std::min<int64_t>((block + 2) * 4, 14)))
        << i;
    EXPECT_EQ(KeysSeen(Routing(), Problem::SelfAttention(1, 2, 14, 8, true), options, 0, i),
              Range(first, i + 1))
        << i;
  }
}

TEST(Routing, LocalHeadsOfOneBlockAreDenseOnPlainScores) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 60, 16, causal);
    NamedTensors inputs = Random(problem);
    const Options options = {{"local_heads", "2"}, {"local_block", "60"}, {"scale", "5"}};
    const NamedTensors run = RunRouting(problem, inputs, options);
    const NamedTensors cuda = RunRouting(problem, inputs, options, KernelDevice());
    if (causal) inputs["k"] = inputs.at("q").Clone();
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    for (const NamedTensors* outputs : {&run, &cuda}) {
      EXPECT_LE(MaxDifference(outputs->at("out").view(), dense.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
      EXPECT_EQ(MaxAbs(outputs->at("members").view()), 0);
    }
  }
}

TEST(Routing, HalfOfTheHeadsAreLocalUnlessSaidOtherwise) {
  const auto local_heads = [](int64_t heads, const Options& options) {
    const Problem problem = Problem::SelfAttention(1, heads, 30, 8, /*causal=*/true);
    const NamedTensors run = RunRouting(problem, Random(problem), options);
    int64_t local = 0;
    for (int64_t h = 0; h < heads; ++h) {
      const ConstTensorView marks = Slice(run.at("members").view(), 1, h, 1);
      if (MaxAbs(marks) > 0) continue;
      EXPECT_EQ(local, h);  // the local heads are the first
      ++local;
    }
    return local;
  };
  EXPECT_EQ(local_heads(4, {}), 2);
  EXPECT_EQ(local_heads(5, {}), 2);
  EXPECT_EQ(local_heads(1, {}), 0);
  EXPECT_EQ(local_heads(4, {{"local_heads", "0"}}), 0);
  EXPECT_EQ(local_heads(4, {{"local_heads", "3"}}), 3);
  EXPECT_EQ(local_heads(4, {{"local_heads", "9"}}), 4);
}

TEST(Routing, AHeadKnowsNothingOfWhatTheOthersAre) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 4, 70, 8, causal);
    const NamedTensors inputs = Random(problem);
    const auto run = [&](const char* local_heads, Device device) {
      const Options options = {
          {"local_heads", local_heads}, {"local_block", "16"}, {"clusters", "3"}};
      return RunRouting(problem, inputs, options, device);
    };
    for (const Device device : TestedDevices()) {
      const NamedTensors none = run("0", device), half = run("2", device), all = run("4", device);
      EXPECT_EQ(MaxDifference(Slice(half.at("out").view(), 1, 2, 2),
                              Slice(none.at("out").view(), 1, 2, 2)),
                0);
      EXPECT_EQ(MaxDifference(Slice(half.at("members").view(), 1, 2, 2),
                              Slice(none.at("members").view(), 1, 2, 2)),
                0);
      EXPECT_EQ(MaxDifference(Slice(half.at("out").view(), 1, 0, 2),
                              Slice(all.at("out").view(), 1, 0, 2)),
                0);
    }
  }
}

// ---- Centroids ----

RoutingOptions Updates(double decay, bool mean) {
  RoutingOptions options;
  options.decay = decay;
  options.update_mean = mean;
  return options;
}

TEST(Routing, AnUpdateByHand) {
  const std::vector<std::vector<double>> queries = {{1, 0}, {0, 2}}, keys = {{3, 1}, {0, -1}};
  const std::vector<double> centroids = {1, 0, 0, 1, -5, -5};
  // The nearest tokens to the first centroid are (1, 0) and (3, 1), to the second (0, 2), to the
  // third (0, -1).
  std::vector<double> moved = centroids;
  UpdateCentroids(Updates(0.5, false), 3, 2, queries, keys, &moved);
  EXPECT_THAT(moved, Near({1.5, 0.25, 0, 1, -2.5, -2.75}));
  moved = centroids;
  UpdateCentroids(Updates(0.5, true), 3, 2, queries, keys, &moved);
  EXPECT_THAT(moved, Near({1.5, 0.25, 0, 1.5, -2.5, -3}));
}

TEST(Routing, ATokenAsNearToTwoCentroidsIsTheFirstOnesAndOneNearestToNoneStays) {
  std::vector<double> moved = {0, 1, 0, 1, -1, 0};
  UpdateCentroids(Updates(0, true), 3, 2, {{2, 3}}, {{4, 5}}, &moved);
  EXPECT_THAT(moved, Near({3, 4, 0, 1, -1, 0}));
  moved = {0, 1, 0, 1, -1, 0};
  UpdateCentroids(Updates(0.25, false), 3, 2, {{2, 3}}, {{4, 5}}, &moved);
  EXPECT_THAT(moved, Near({2.25, 3.25, 0, 0.25, -0.25, 0}));  // a sum of none is 0
}

std::vector<std::vector<double>> RandomVectors(int64_t count, int64_t channels, const char* name) {
  const RandomStream stream(5, name);
  std::vector<std::vector<double>> vectors(count);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < channels; ++c) vectors[i].push_back(stream.Normal(i * channels + c));
  }
  return vectors;
}
std::vector<double> Flat(const std::vector<std::vector<double>>& vectors) {
  std::vector<double> flat;
  for (const std::vector<double>& x : vectors) flat.insert(flat.end(), x.begin(), x.end());
  return flat;
}

// A mean does not leave the convex hull of the centroid and the tokens: in no direction does it
// exceed all of them.
TEST(Routing, AnUpdateByMeansIsAConvexMoveAndOneBySumsIsNot) {
  const auto queries = RandomVectors(60, 6, "q"), keys = RandomVectors(60, 6, "k");
  const std::vector<double> centroids = Flat(RandomVectors(5, 6, "centroids"));
  for (const bool mean : {true, false}) {
    std::vector<double> moved = centroids;
    UpdateCentroids(Updates(0.3, mean), 5, 6, queries, keys, &moved);
    int64_t passed = 0;
    for (const std::vector<double>& direction : RandomVectors(200, 6, "directions")) {
      double furthest = kNotSeen;
      for (const auto* vectors : {&queries, &keys}) {
        for (const std::vector<double>& x : *vectors) {
          furthest = std::max(furthest, Dot(x.data(), direction.data(), 6));
        }
      }
      for (int64_t c = 0; c < 5; ++c) {
        const double before = Dot(&centroids[c * 6], direction.data(), 6);
        passed += Dot(&moved[c * 6], direction.data(), 6) > std::max(before, furthest) + 1e-12;
      }
    }
    EXPECT_EQ(passed > 0, !mean) << passed;
  }
}

// Returns the centroids that a layer has after Setup.
Tensor Moved(const Problem& problem, const NamedTensors& inputs, const Options& options,
             Device device = Device::kCpu) {
  const std::unique_ptr<Layer> layer = Routing().Create(problem, options, device, 1).value();
  const auto run = device == Device::kCpu ? RunLayer(*layer, ViewsOf(inputs), 2)
                                          : RunCudaLayer(*layer, device, ViewsOf(inputs));
  EXPECT_TRUE(run.ok()) << run.status();
  return layer->parameters().at("centroids").Clone();
}

TEST(Routing, SetupMovesTheCentroidsOfClustersByAllItsTokens) {
  for (const bool causal : {false, true}) {
    for (const bool mean : {false, true}) {
      Problem problem = Problem::SelfAttention(2, 3, 40, 8, causal);
      problem.value_dim = 12;
      const NamedTensors inputs = Random(problem);
      const Options options = {{"clusters", "4"},
                               {"local_heads", "1"},
                               {"updates", "3"},
                               {"decay", "0.75"},
                               {"update_mean", mean ? "true" : "false"}};
      const Tensor drawn = Drawn(problem, options), moved = Moved(problem, inputs, options);
      EXPECT_EQ(MaxDifference(Slice(moved.view(), 0, 0, 1), Slice(drawn.view(), 0, 0, 1)), 0);
      const DoubleTensor q = Normalized(inputs.at("q"));
      const DoubleTensor k = Normalized(inputs.at(causal ? "q" : "k"));
      for (int64_t h = 1; h < 3; ++h) {
        std::vector<double> expected;
        for (int64_t i = 0; i < 32; ++i) expected.push_back(drawn.view().Get(h * 32 + i));
        for (int64_t n = 0; n < 3; ++n) {
          UpdateCentroids(Updates(0.75, mean), 4, 8, RowsOfHead(q, problem, h),
                          RowsOfHead(k, problem, h), &expected);
        }
        for (int64_t i = 0; i < 32; ++i) {
          ASSERT_FLOAT_EQ(moved.span<float>()[h * 32 + i], static_cast<float>(expected[i]));
        }
      }
      const Tensor cuda = Moved(problem, inputs, options, KernelDevice());
      EXPECT_EQ(MaxDifference(moved.view(), cuda.view()), 0);
      // The run that follows uses the moved centroids.
      const NamedTensors parameters = Parameters(moved.Clone());
      Options without = options;
      without["updates"] = "0";
      for (const Device device : TestedDevices()) {
        EXPECT_EQ(MaxDifference(
                      RunRouting(problem, inputs, options, device).at("out").view(),
                      RunRouting(problem, inputs, without, device, &parameters).at("out").view()),
                  0);
      }
    }
  }
}

TEST(Routing, PaddedTokensMoveNoCentroid) {
  const Problem longer = Problem::SelfAttention(2, 1, 40, 8);
  const Problem shorter = Problem::SelfAttention(2, 1, 31, 8);
  NamedTensors inputs = Random(longer), cut;
  for (const char* name : {"q", "k", "v"}) {
    cut[name] = Tensor(DType::kF32, {2, 1, 31, 8});
    CopyElements(Slice(inputs[name].view(), 2, 0, 31), cut[name].view());
    Fill(Slice(inputs[name].view(), 2, 31, 9), kNan);
  }
  inputs["key_mask"] = KeyMaskOf(Repeat(31, '1') + Repeat(9, '0'), 2);
  const Options options = Clusters(3, {{"updates", "2"}, {"decay", "0.5"}});
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(MaxDifference(Moved(longer, inputs, options, device).view(),
                            Moved(shorter, cut, options, device).view()),
              0);
  }
}

TEST(Routing, TheCounterpartHasOneClusterAndOneBlockOfAllTokens) {
  const Options options = {{"clusters", "7"}, {"local_block", "3"}, {"self_bias", "-2"},
                           {"updates", "5"},  {"decay", "0.5"},     {"update_mean", "true"}};
  const Options defaults = Routing().Canonical({}).value();
  for (const int64_t tokens : {0, 1, 2, 3, 300}) {
    const TechniqueSpec counterpart =
        Routing().Counterpart(Problem::SelfAttention(1, 2, tokens, 8), options).value();
    Options expected = Routing().Canonical(options).value();
    expected["clusters"] = "1";
    expected["local_block"] = std::to_string(tokens == 0 ? 1 : tokens);
    for (const char* name : {"updates", "decay", "update_mean"}) expected[name] = defaults.at(name);
    EXPECT_EQ(counterpart.options, expected) << tokens;
  }
}

TEST(Routing, ADecayOfOneChangesNothing) {
  const Problem problem = Problem::SelfAttention(1, 2, 40, 8);
  for (const char* mean : {"false", "true"}) {
    const Options options = Clusters(4, {{"updates", "5"}, {"decay", "1"}, {"update_mean", mean}});
    EXPECT_EQ(MaxDifference(Moved(problem, Random(problem), options).view(),
                            Drawn(problem, options).view()),
              0);
  }
}

// Returns the share of the dense counterpart's weight on pairs that share a cluster.
double KeptMass(const Problem& problem, const NamedTensors& inputs, const Options& options,
                const NamedTensors& parameters) {
  DefinitionRequest request;
  request.weights = true;
  const auto weights = [&](const Options& of, const NamedTensors* centroids) {
    RunRequest run{of};
    run.parameters = centroids;
    return std::move(
        DefineTechnique(Routing(), problem, ViewsOf(inputs), run, request).value().at("weights"));
  };
  const TechniqueSpec whole = Routing().Counterpart(problem, options).value();
  EXPECT_EQ(whole.technique, "routing");
  const Tensor kept = weights(options, &parameters), dense = weights(whole.options, nullptr);
  double mass = 0;
  for (int64_t n = 0; n < dense.num_elements(); ++n) {
    if (kept.span<double>()[n] > 0) mass += dense.span<double>()[n];
  }
  return mass / static_cast<double>(problem.batch * problem.query_heads * problem.query_tokens);
}

TEST(Routing, UpdatesByMeansSettleOnClustersAndKeepMoreOfTheMass) {
  const Problem problem = Problem::SelfAttention(1, 2, 128, 8);
  NamedTensors inputs = Random(problem);
  inputs["q"] = NearDirections(problem, "q", 0.4);
  inputs["k"] = NearDirections(problem, "k", 0.4);
  const auto after = [&](const char* updates) {
    return Parameters(
        Moved(problem, inputs,
              Clusters(4, {{"updates", updates}, {"decay", "0"}, {"update_mean", "true"}})));
  };
  const NamedTensors none = after("0"), some = after("20"), more = after("21");
  EXPECT_GT(MaxDifference(none.at("centroids").view(), some.at("centroids").view()), 0.5);
  EXPECT_EQ(MaxDifference(some.at("centroids").view(), more.at("centroids").view()), 0);
  const double before = KeptMass(problem, inputs, Clusters(4), none);
  const double settled = KeptMass(problem, inputs, Clusters(4), some);
  EXPECT_GT(settled, before + 0.1) << before;
}

TEST(Routing, MoreClustersKeepLessOfTheMass) {
  const Problem problem = Problem::SelfAttention(1, 2, 128, 8);
  NamedTensors inputs = Random(problem);
  inputs["q"] = NearDirections(problem, "q", 0.7);
  inputs["k"] = NearDirections(problem, "k", 0.7);
  double last = 1 + 1e-9;
  for (const int64_t clusters : {1, 2, 4, 8, 16, 32}) {
    const Options options = Clusters(clusters);
    const double mass = KeptMass(problem, inputs, options, Parameters(Drawn(problem, options)));
    EXPECT_LT(mass, last) << clusters;
    if (clusters == 1) {
      EXPECT_NEAR(mass, 1, 1e-9);
    }
    last = mass;
  }
}

// ---- What is normalised ----

TEST(Routing, UnitMembersDoNotDependOnTheLengthOfVectors) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 70, 16, causal);
    const Options options = {{"clusters", "5"}, {"local_heads", "0"}, {"norm", "unit"}};
    const NamedTensors inputs = Random(problem);
    NamedTensors other = Random(problem);
    for (const char* name : {"q", "k"}) {
      if (other.count(name) == 0) continue;
      const absl::Span<float> x = other[name].span<float>();
      for (size_t n = 0; n < x.size(); ++n) x[n] *= std::ldexp(1.0f, static_cast<int>(n / 16 % 9));
    }
    for (const Device device : TestedDevices()) {
      const NamedTensors ours = RunRouting(problem, inputs, options, device);
      const NamedTensors scaled = RunRouting(problem, other, options, device);
      EXPECT_EQ(MaxDifference(ours.at("members").view(), scaled.at("members").view()), 0);
      EXPECT_EQ(MaxDifference(ours.at("out").view(), scaled.at("out").view()), 0);
    }
  }
}

// In one cluster of all tokens nothing but the scores is left.
TEST(Routing, OneClusterOfGivenVectorsIsDenseAttention) {
  Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const Options options = {
      {"clusters", "1"}, {"local_heads", "0"}, {"scored", "given"}, {"scale", "0"}};
  const NamedTensors inputs = Random(problem);
  const Inputs views = ViewsOf(inputs);
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, views).value();
  problem.causal = true;
  const Inputs causal = {{"q", views.Get("q")}, {"v", views.Get("v")}};
  Tensor unit = inputs.at("q").Clone();
  for (int64_t row = 0; row < unit.num_elements(); row += 16) {
    float* x = unit.span<float>().data() + row;
    double square = 0;
    for (int64_t c = 0; c < 16; ++c) square += static_cast<double>(x[c]) * x[c];
    for (int64_t c = 0; c < 16; ++c) x[c] = static_cast<float>(x[c] / std::sqrt(square));
  }
  const NamedTensors of_unit_keys =
      RunTechnique(dense::Dense(), problem,
                   {{"q", views.Get("q")}, {"k", unit.view()}, {"v", views.Get("v")}})
          .value();
  for (const char* norm : {"layer_norm", "unit"}) {
    Options with = options;
    with["norm"] = norm;
    for (const Device device : TestedDevices()) {
      problem.causal = false;
      EXPECT_LE(MaxDifference(RunRouting(problem, inputs, with, device).at("out").view(),
                              dense.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
      problem.causal = true;
      const NamedTensors ours = RunTechnique(Routing(), problem, causal, {with, device}).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), of_unit_keys.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

TEST(Routing, MatchesItsDefinitionWhateverIsNormalised) {
  for (const bool causal : {false, true}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Problem problem = Problem::SelfAttention(2, 3, 130, 16, causal, dtype);
      const NamedTensors inputs = Random(problem);
      for (const char* norm : {"layer_norm", "unit"}) {
        for (const char* scored : {"normalized", "given"}) {
          const Options options = {{"clusters", "4"},  {"local_heads", "1"}, {"norm", norm},
                                   {"scored", scored}, {"self_bias", "-2"},  {"scale", "0.5"}};
          for (const Device device : TestedDevices()) {
            const NamedTensors ours = RunRouting(problem, inputs, options, device);
            DefinitionRequest request;
            request.computed = &ours;
            const NamedTensors expected =
                DefineTechnique(Routing(), problem, ViewsOf(inputs), {options}, request).value();
            const ConstTensorView v = inputs.at("v").view();
            const double rounding = dtype == DType::kF32 ? 0 : 4 * UnitRoundoff(dtype) * MaxAbs(v);
            EXPECT_EQ(MaxDifference(ours.at("members").view(), expected.at("members").view()), 0);
            EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                      Fp32Bound(v) + rounding)
                << ToString(options) << " on " << Name(device);
          }
        }
      }
    }
  }
}

// ---- Other implementations ----

const char* const kGolden[] = {"clusters", "clusters_causal", "clusters_padded"};
// The golden files have vectors of several lengths, normalised as that code does it.
const char* const kGivenGolden[] = {"given", "given_shared"};

// A golden file of routing-transformer.
struct Golden {
  explicit Golden(const std::string& name)
      : file(GoldenFile("attention/routing/testdata/" + name + ".safetensors")) {
    const Tensor& out = file.tensors.at("out");
    problem =
        Problem::SelfAttention(2, 2, out.dim(2), out.dim(3), file.metadata.at("causal") == "true");
    for (const char* input : {"q", "k", "v"}) inputs[input] = file.tensors.at(input).Clone();
    if (problem.causal) inputs.erase("k");
    if (file.tensors.count("key_padding") > 0) {
      inputs["key_mask"] = file.tensors.at("key_padding").CloneAs(DType::kU8);
    }
    parameters = Parameters(file.tensors.at("centroids").Clone());
    options = {{"clusters", file.metadata.at("clusters")},
               {"scale", file.metadata.at("scale")},
               {"local_heads", "0"}};
    for (const char* option : {"norm", "scored", "self_bias"}) {
      const auto value = file.metadata.find(option);
      if (value != file.metadata.end()) options[option] = value->second;
    }
  }
  // Returns marks of queries and, where keys are not queries, of keys.
  Tensor Members() const {
    const Tensor& queries = file.tensors.at("query_members");
    const int64_t clusters = queries.dim(3), sets = problem.causal ? 1 : 2;
    Tensor members(DType::kU8, {2, 2, problem.query_tokens, sets * clusters});
    CopyElements(queries.view(), Slice(members.view(), 3, 0, clusters));
    if (sets == 2) {
      CopyElements(file.tensors.at("key_members").view(),
                   Slice(members.view(), 3, clusters, clusters));
    }
    return members;
  }
  // Returns `out` as in that code, where a sum over n clusters is divided by n + mean_epsilon, and
  // rows of padded tokens are 0.
  Tensor AsThere(const Tensor& out) const {
    const double epsilon = std::stod(file.metadata.at("mean_epsilon"));
    const DoubleTensor marks(file.tensors.at("query_members").view());
    Tensor there = out.CloneAs(DType::kF64);
    const int64_t clusters = file.tensors.at("query_members").dim(3);
    for (int64_t row = 0; row < there.num_elements() / out.dim(3); ++row) {
      double count = 0;
      for (int64_t c = 0; c < clusters; ++c) count += marks.at(row * clusters + c);
      const int64_t b = row / 2 / problem.query_tokens, i = row % problem.query_tokens;
      const bool is_token =
          inputs.count("key_mask") == 0 || *inputs.at("key_mask").view().At<uint8_t>(b, i) != 0;
      for (int64_t c = 0; c < out.dim(3); ++c) {
        double& y = there.span<double>()[row * out.dim(3) + c];
        y *= is_token ? count / (count + epsilon) : 0;
      }
    }
    return there;
  }

  SafetensorsFile file;
  Problem problem;
  NamedTensors inputs;
  NamedTensors parameters;
  Options options;
};

TEST(Routing, ClustersMatchRoutingTransformer) {
  for (const char* name : kGolden) {
    Golden golden(name);
    golden.inputs["members"] = golden.Members();
    const ConstTensorView expected = golden.file.tensors.at("out").view();
    RunRequest request{golden.options};
    request.parameters = &golden.parameters;
    const NamedTensors defined =
        DefineTechnique(Routing(), golden.problem, ViewsOf(golden.inputs), request).value();
    EXPECT_LE(MaxDifference(golden.AsThere(defined.at("out")).view(), expected), 1e-12) << name;
    for (const Device device : TestedDevices()) {
      const NamedTensors run =
          RunRouting(golden.problem, golden.inputs, golden.options, device, &golden.parameters);
      EXPECT_LE(MaxDifference(golden.AsThere(run.at("out")).view(), expected),
                Fp32Bound(golden.inputs.at("v").view()))
          << name << " " << Name(device);
    }
  }
}

TEST(Routing, ClustersOfGivenVectorsMatchRoutingTransformer) {
  for (const char* name : kGivenGolden) {
    const Golden golden(name);
    const ConstTensorView expected = golden.file.tensors.at("out").view();
    const Tensor members = golden.Members();
    RunRequest request{golden.options};
    request.parameters = &golden.parameters;
    const NamedTensors defined =
        DefineTechnique(Routing(), golden.problem, ViewsOf(golden.inputs), request).value();
    EXPECT_EQ(MaxDifference(defined.at("members").view(), members.view()), 0) << name;
    EXPECT_LE(MaxDifference(golden.AsThere(defined.at("out")).view(), expected), 1e-12) << name;
    for (const Device device : TestedDevices()) {
      const NamedTensors run =
          RunRouting(golden.problem, golden.inputs, golden.options, device, &golden.parameters);
      EXPECT_EQ(MaxDifference(run.at("members").view(), members.view()), 0)
          << name << " " << Name(device);
      EXPECT_LE(MaxDifference(golden.AsThere(run.at("out")).view(), expected),
                Fp32Bound(golden.inputs.at("v").view()))
          << name << " " << Name(device);
    }
  }
}

// For vectors of one length the members do not depend on the norm. That code treats padded tokens
// like others, so that the padded file cannot be used here.
TEST(Routing, MembersAreThoseOfRoutingTransformer) {
  for (const char* name : {"clusters", "clusters_causal"}) {
    const Golden golden(name);
    for (const Device device : TestedDevices()) {
      const NamedTensors run =
          RunRouting(golden.problem, golden.inputs, golden.options, device, &golden.parameters);
      EXPECT_EQ(MaxDifference(run.at("members").view(), golden.Members().view()), 0)
          << name << " " << Name(device);
    }
  }
}

// That code normalises a sum of vectors to unit length before the centroid moves towards it.
TEST(Routing, CentroidsMoveInTheDirectionsOfRoutingTransformer) {
  for (const char* name : kGolden) {
    const Golden golden(name);
    const Problem& p = golden.problem;
    const Tensor& centroids = golden.file.tensors.at("centroids");
    const int64_t clusters = centroids.dim(1), d = p.head_dim;
    const double decay = std::stod(golden.file.metadata.at("decay"));
    const DoubleTensor q = Normalized(golden.inputs.at("q"));
    const DoubleTensor k = Normalized(golden.file.tensors.at("k"));
    const DoubleTensor there(golden.file.tensors.at("new_centroids").view());
    const DoubleTensor moved(golden.file.tensors.at("moved_centroids").view());
    const DoubleTensor old(centroids.view());
    for (int64_t h = 0; h < 2; ++h) {
      for (const bool mean : {false, true}) {
        std::vector<double> ours(old.Row(h, 0), old.Row(h, 0) + clusters * d);
        UpdateCentroids(Updates(0, mean), clusters, d, RowsOfHead(q, p, h), RowsOfHead(k, p, h),
                        &ours);
        for (int64_t c = 0; c < clusters; ++c) {
          const double length = std::sqrt(Dot(&ours[c * d], &ours[c * d], d));
          for (int64_t n = 0; n < d; ++n) {
            const double direction = ours[c * d + n] / length;
            EXPECT_NEAR(direction, there.Row(h, c)[n], 1e-12);
            EXPECT_NEAR(decay * old.Row(h, c)[n] + (1 - decay) * direction, moved.Row(h, c)[n],
                        1e-12);
          }
        }
      }
    }
  }
}

TEST(Routing, LocalHeadsMatchLocalAttention) {
  const SafetensorsFile file = GoldenFile("attention/routing/testdata/local.safetensors");
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 40, 8, causal);
    const Options options = {{"local_heads", "2"},
                             {"local_block", file.metadata.at("local_block")}};
    NamedTensors inputs;
    for (const char* name : {"q", "k", "v"}) inputs[name] = file.tensors.at(name).Clone();
    if (causal) inputs.erase("k");
    const ConstTensorView expected = file.tensors.at(causal ? "causal_out" : "out").view();
    const NamedTensors defined =
        DefineTechnique(Routing(), problem, ViewsOf(inputs), {options}).value();
    EXPECT_LE(MaxDifference(defined.at("out").view(), expected), 1e-12);
    for (const Device device : TestedDevices()) {
      EXPECT_LE(
          MaxDifference(RunRouting(problem, inputs, options, device).at("out").view(), expected),
          Fp32Bound(inputs.at("v").view()));
    }
  }
}

// ---- Cost, errors ----

TEST(Routing, CostCountsAssignmentAndPairsOfClustersAndBlocks) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 3, 10, 5, causal);
    problem.value_dim = 6;
    const Options options = {{"clusters", "3"}, {"local_heads", "1"}, {"local_block", "4"}};
    const auto layer = Routing().Create(problem, options, Device::kCpu, 1).value();
    EXPECT_FALSE(layer->cost().flops.has_value());
    ASSERT_TRUE(RunLayer(*layer, ViewsOf(Random(problem))).ok());
    // There are clusters of 4, and blocks of 4, 4 and 2.
    const double assigned = (causal ? 1 : 2) * 2 * 3 * 10 * 5;
    const double in_clusters = 2 * 3 * (causal ? 10 : 16);
    const double in_blocks = causal ? 10 + (10 + 16) + (3 + 8) : 4 * 8 + 4 * 10 + 2 * 6;
    EXPECT_EQ(*layer->cost().flops, 2 * 2 * (assigned + (in_clusters + in_blocks) * (5 + 6)));
  }
}

TEST(Routing, ReportsTheShareOfFindingMembers) {
  const Problem problem = Problem::SelfAttention(1, 2, 60, 8);
  const auto layer = Routing().Create(problem, {}, Device::kCpu, 1).value();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(Random(problem))).ok());
  EXPECT_GT(layer->statistics().at("grouping_share"), 0);
  EXPECT_LT(layer->statistics().at("grouping_share"), 1);
}

TEST(Routing, WhatItDoesNotDoIsRefusedByTheLayerAndTheDefinition) {
  const auto refusal = [](const Problem& problem) {
    const absl::Status status = Routing().Create(problem, {}, Device::kCpu, 1).status();
    NamedTensors outputs;
    EXPECT_EQ(Routing().Define(problem, {}, {}, {}, {}, &outputs), status);
    return std::string(status.message());
  };
  Problem cross = Problem::SelfAttention(1, 2, 30, 8);
  cross.kv_tokens = 31;
  EXPECT_THAT(refusal(cross), HasSubstr("query_tokens is 30, kv_tokens is 31"));
  Problem grouped = Problem::SelfAttention(1, 2, 30, 8);
  grouped.kv_heads = 1;
  EXPECT_THAT(refusal(grouped), HasSubstr("query_heads is 2, kv_heads is 1"));
}

// ---- The backward pass ----

std::unique_ptr<Layer> RoutingLayer(const Problem& problem, const Options& options) {
  return Routing().Create(problem, options, Device::kCpu, /*seed=*/1).value();
}

// Gradients are those of the definition with the members that the forward pass found, whether they
// are given or not.
TEST(RoutingBackward, GradientsAreThoseOfTheDefinitionWithTheMembersThatWereFound) {
  const Options unit = {{"norm", "unit"}}, given = {{"scored", "given"}};
  for (const bool causal : {false, true}) {
    for (const Options& kind :
         {Options{}, With(unit, {{"self_bias", "-3"}}), given, With(unit, given),
          Options{{"local_heads", "2"}, {"local_block", "20"}}}) {
      const Options options = With(kind, {{"clusters", "3"}, {"local_heads", "0"}, {"scale", "0"}});
      Problem problem = Problem::SelfAttention(2, 3, 200, 12, causal);
      problem.value_dim = 7;
      SCOPED_TRACE(problem.ToString() + " " + ToString(options));
      NamedTensors inputs = Random(problem);
      inputs["key_mask"] = KeyMaskOf(Repeat(60, '1') + Repeat(10, '0') + Repeat(130, '1'), 2);
      const std::unique_ptr<Layer> layer = RoutingLayer(problem, options);
      const NamedTensors g = RandomOutputGradients(*layer, 3);
      EXPECT_EQ(g.size(), 1u);
      const NamedTensors found = GradientsOf(*layer, ViewsOf(inputs), g).value();
      EXPECT_EQ(found.size(), causal ? 2u : 3u);
      inputs["members"] = std::move(RunLayer(*layer, ViewsOf(inputs)).value().at("members"));
      const NamedTensors of_given = GradientsOf(*layer, ViewsOf(inputs), g, /*threads=*/3).value();
      for (const auto& [name, gradient] : found) {
        EXPECT_EQ(MaxDifference(gradient.view(), of_given.at(name).view()), 0) << name;
      }
      const Routing technique;
      const auto slopes =
          SlopesOf({&technique, problem, options, &layer->parameters(), &inputs, &g}, found);
      ASSERT_TRUE(slopes.ok()) << slopes.status();
      for (const Slope& slope : *slopes) {
        EXPECT_NEAR(slope.of_layer, slope.of_definition, slope.bound) << slope.name;
      }
    }
  }
}

// Padding reaches nothing where the loss does not read its rows, and it has no gradient.
// With one token of four it is a member of every cluster.
TEST(RoutingBackward, PaddingHasNoGradientAndGivesNone) {
  for (const bool causal : {false, true}) {
    for (const Options& kind : {Options{}, Options{{"scored", "given"}, {"norm", "unit"}}}) {
      const Problem problem = Problem::SelfAttention(1, 2, 160, 16, causal);
      SCOPED_TRACE(problem.ToString() + " " + ToString(kind));
      NamedTensors inputs = Random(problem);
      inputs["key_mask"] = KeyMaskOf(Repeat(100, '0') + Repeat(60, '1'));
      const std::unique_ptr<Layer> layer = RoutingLayer(problem, Clusters(2, kind));
      NamedTensors g = RandomOutputGradients(*layer, 3);
      Fill(Slice(g["out"].view(), 2, 0, 100), 0);
      const auto gradients_with = [&](double padding) {
        for (auto& [name, input] : inputs) {
          if (name != "key_mask") Fill(Slice(input.view(), 2, 0, 100), padding);
        }
        return GradientsOf(*layer, ViewsOf(inputs), g).value();
      };
      const NamedTensors gradients = gradients_with(0.5);
      for (const auto& [name, gradient] : gradients) {
        EXPECT_GT(MaxAbs(gradient.view()), 0.1) << name;
        EXPECT_EQ(MaxAbs(Slice(gradient.view(), 2, 0, 100)), 0) << name;
      }
      for (const auto& [name, gradient] : gradients_with(kNan)) {
        EXPECT_EQ(MaxDifference(gradient.view(), gradients.at(name).view()), 0) << name;
      }
    }
  }
}

// The gradient of a query is shared by the clusters that have it, and one that none has has none.
TEST(RoutingBackward, AQueryInNoClusterHasNoGradient) {
  const Problem problem = Problem::SelfAttention(1, 1, 8, 8);
  NamedTensors inputs = Random(problem);
  inputs["members"] = Marks({"11011000", "10101001", "11110000", "11110000"});
  const std::unique_ptr<Layer> layer = RoutingLayer(problem, Clusters(2));
  const NamedTensors g = RandomOutputGradients(*layer, 3);
  const NamedTensors gradients = GradientsOf(*layer, ViewsOf(inputs), g).value();
  for (int64_t i = 0; i < 8; ++i) {
    const bool is_in_none = i == 5 || i == 6;
    EXPECT_EQ(MaxAbs(Slice(gradients.at("q").view(), 2, i, 1)) == 0, is_in_none) << i;
    EXPECT_EQ(MaxAbs(Slice(gradients.at("v").view(), 2, i, 1)) == 0, i >= 4) << i;
  }
}

TEST(RoutingBackward, CentroidsHaveNoGradient) {
  const std::unique_ptr<Layer> layer = RoutingLayer(Problem::SelfAttention(1, 2, 100, 16), {});
  EXPECT_EQ(layer->stopped_gradients().count("centroids"), 1u);
  EXPECT_TRUE(layer->parameter_gradients().empty());
}

}  // namespace
}  // namespace tfb::routing
