#include "attention/sinkhorn/sinkhorn.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/dense/dense.h"
#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::sinkhorn {
namespace {

using ::testing::HasSubstr;

Options With(Options options, const Options& more) {
  options.insert(more.begin(), more.end());
  return options;
}
Options Block(int64_t tokens) { return {{"block", std::to_string(tokens)}}; }
// Returns options with which R is the input g.
Options ScoresAreNoise(int64_t block) {
  return With(Block(block), {{"gumbel", "true"}, {"temperature", "1"}});
}

NamedTensors RunSinkhorn(const Problem& problem, const NamedTensors& inputs, const Options& options,
                         Device device = Device::kCpu, const NamedTensors* parameters = nullptr) {
  RunRequest request{options, device};
  request.parameters = parameters;
  return RunTechnique(Sinkhorn(), problem, ViewsOf(inputs), request).value();
}
NamedTensors RunDense(const Problem& problem, const NamedTensors& inputs) {
  return RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
}
NamedTensors Random(const Problem& problem, const Options& options = {}) {
  return RandomInputs(Sinkhorn().InputSpecs(problem, options).value(), 11);
}

Tensor Numbers(const Shape& shape, const std::vector<double>& values) {
  Tensor tensor(DType::kF32, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) tensor.view().Set(i, values[i]);
  return tensor;
}
std::vector<double> Values(const Tensor& tensor) {
  std::vector<double> values;
  for (int64_t i = 0; i < tensor.num_elements(); ++i) values.push_back(tensor.view().Get(i));
  return values;
}
testing::Matcher<std::vector<double>> Near(const std::vector<double>& values) {
  return testing::Pointwise(testing::DoubleNear(1e-6), values);
}

// Returns S for all heads: sorted block u is block order[u].
Tensor Permutation(const Problem& problem, const std::vector<int64_t>& order) {
  const auto blocks = static_cast<int64_t>(order.size());
  Tensor sort(DType::kF32, {problem.batch, problem.kv_heads, blocks, blocks});
  Fill(sort.view(), 0);
  for (int64_t head = 0; head < problem.batch * problem.kv_heads; ++head) {
    for (int64_t u = 0; u < blocks; ++u) {
      sort.view().Set((head * blocks + u) * blocks + order[u], 1);
    }
  }
  return sort;
}

// Returns the parameters of a layer, all 0.
NamedTensors Zeros(const Problem& problem, const Options& options) {
  const auto layer = Sinkhorn().Create(problem, options, Device::kCpu, 1).value();
  NamedTensors zeros;
  for (const auto& [name, tensor] : layer->parameters()) {
    zeros[name] = tensor.Clone();
    Fill(zeros[name].view(), 0);
  }
  return zeros;
}

// Returns S in float64 for the scores `g` [N, N].
std::vector<double> Balanced(const std::vector<double>& g, const Options& more,
                             bool causal = false) {
  const auto blocks = static_cast<int64_t>(std::lround(std::sqrt(g.size())));
  const Problem problem = Problem::SelfAttention(1, 1, blocks, 1, causal);
  const Options options = With(more, ScoresAreNoise(1));
  NamedTensors inputs = Random(problem, options);
  inputs["g"] = Numbers({1, 1, blocks, blocks}, g);
  const NamedTensors parameters = Zeros(problem, options);
  NamedTensors outputs;
  const absl::Status status = Sinkhorn().Define(problem, options, parameters, ViewsOf(inputs),
                                                DefinitionRequest(), &outputs);
  EXPECT_TRUE(status.ok()) << status;
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunSinkhorn(problem, inputs, options, device, &parameters);
    EXPECT_LE(MaxDifference(run.at("sort").view(), outputs.at("sort").view()), 2e-6)
        << Name(device);
  }
  return Values(outputs.at("sort"));
}

// Returns the largest distance of the sums of rows from 1.
double RowError(const std::vector<double>& sort, int64_t blocks) {
  double error = 0;
  for (int64_t u = 0; u < blocks; ++u) {
    double sum = 0;
    for (int64_t t = 0; t < blocks; ++t) sum += sort[u * blocks + t];
    error = std::max(error, std::abs(sum - 1));
  }
  return error;
}

void ExpectNear(const NamedTensors& ours, const NamedTensors& expected, double more_log_sum_exp) {
  EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()), 1e-5);
  for (int64_t i = 0; i < ours.at("log_sum_exp").num_elements(); ++i) {
    ASSERT_NEAR(ours.at("log_sum_exp").view().Get(i),
                expected.at("log_sum_exp").view().Get(i) + more_log_sum_exp, 1e-5);
  }
}

void ExpectSameRows(const NamedTensors& a, const NamedTensors& b, int64_t rows) {
  EXPECT_EQ(
      MaxDifference(Slice(a.at("out").view(), 2, 0, rows), Slice(b.at("out").view(), 2, 0, rows)),
      0);
}

void ExpectRunMatchesDefinition(const Problem& problem, const Options& options, Device device) {
  const NamedTensors inputs = Random(problem, options);
  const NamedTensors run = RunSinkhorn(problem, inputs, options, device);
  const NamedTensors defined =
      DefineTechnique(Sinkhorn(), problem, ViewsOf(inputs), {options}).value();
  const double fp32 = Fp32Bound(inputs.at("v").view());
  for (const char* name : {"out", "log_sum_exp", "sort"}) {
    const bool rounded = problem.dtype != DType::kF32 && name == std::string("out");
    EXPECT_LE(MaxDifference(run.at(name).view(), defined.at(name).view()), rounded ? 0.02 : fp32)
        << name << " of " << problem.ToString() << ", " << ToString(options) << ", "
        << Name(device);
  }
}

// ---- By hand ----

TEST(Sinkhorn, TwoBlocksOfOneTokenByHand) {
  const Problem problem = Problem::SelfAttention(1, 1, 2, 1);
  NamedTensors inputs;
  inputs["q"] = Numbers({1, 1, 2, 1}, {std::log(2), 0});
  inputs["k"] = Numbers({1, 1, 2, 1}, {0, 4.0 / 3});
  inputs["v"] = Numbers({1, 1, 2, 1}, {2, 6});
  inputs["sort"] = Numbers({1, 1, 2, 2}, {0.25, 0.75, 1, 0});
  // The sorted keys are 1 and 0, the sorted values 5 and 2.
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunSinkhorn(problem, inputs, Block(1), device);
    EXPECT_THAT(Values(run.at("out")), Near({(2 * 5 + 2) / 3.0, (2 + 6) / 2.0})) << Name(device);
    EXPECT_THAT(Values(run.at("log_sum_exp")), Near({std::log(3), std::log(2)})) << Name(device);
    EXPECT_THAT(Values(run.at("sort")), Near({0.25, 0.75, 1, 0})) << Name(device);
  }
}

TEST(Sinkhorn, OneIterationByHand) {
  EXPECT_THAT(Balanced({0, std::log(3), 0, 0}, {{"iterations", "1"}}),
              Near({1.0 / 3, 3.0 / 5, 2.0 / 3, 2.0 / 5}));
}

// The rows are 1 and (1/4, 3/4); the first column's sums are 1 and 5/4.
TEST(Sinkhorn, OneCausalIterationByHand) {
  EXPECT_THAT(Balanced({9, 9, 9, 7, 9, 9, 0, std::log(3), 9}, {{"iterations", "1"}},
                       /*causal=*/true),
              Near({0, 0, 0, 1, 0, 0, 0.2, 1, 0}));
}

// The matrix is the same, from keys whose sum up to the last block's first token is log 3; the
// token after it does not count.
TEST(Sinkhorn, CausalScoresComeFromTheTokensUpToABlocksFirst) {
  const Problem problem = Problem::SelfAttention(1, 1, 6, 1, /*causal=*/true);
  const Options options = With(
      Block(2), {{"hidden", "0"}, {"temperature", "1"}, {"iterations", "1"}, {"scores", "linear"}});
  NamedTensors inputs = Random(problem);
  inputs["k"] = Numbers({1, 1, 6, 1}, {1, -2, 3, -4, 2 + std::log(3), 50});
  NamedTensors parameters = Zeros(problem, options);
  parameters["score_weights"] = Numbers({1, 1, 3}, {0, 1, 5});
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunSinkhorn(problem, inputs, options, device, &parameters);
    EXPECT_THAT(Values(run.at("sort")), Near({0, 0, 0, 1, 0, 0, 0.2, 1, 0})) << Name(device);
  }
}

// The sums of the two blocks are 3 and -1, of which the hidden layer makes 3 and 0.
TEST(Sinkhorn, TheNetworkByHand) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 1);
  const Options options =
      With(Block(2), {{"hidden", "1"}, {"temperature", "2"}, {"iterations", "1"}});
  NamedTensors inputs = Random(problem);
  inputs["k"] = Numbers({1, 1, 4, 1}, {1, 2, 3, -4});
  NamedTensors parameters = Zeros(problem, options);
  parameters["hidden_weights"] = Numbers({1, 1, 1}, {1});
  parameters["score_weights"] = Numbers({1, 1, 2}, {2, -1});
  parameters["score_bias"] = Numbers({1, 2}, {-4, 2});
  // The scores are (2, 0) and (0, 2), the logits (1, 0) and (0, 1).
  const double larger = std::exp(1) / (std::exp(1) + 1);
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunSinkhorn(problem, inputs, options, device, &parameters);
    EXPECT_THAT(Values(run.at("sort")), Near({larger, 1 - larger, 1 - larger, larger}))
        << Name(device);
  }
}

// ---- The matrix ----

std::vector<double> RandomScores(int64_t blocks, double scale) {
  Tensor scores(DType::kF32, {blocks, blocks});
  FillNormal(&scores, 5, "scores", 0, scale);
  return Values(scores);
}

TEST(Sinkhorn, ColumnsSumToOneAndRowErrorsFallGeometrically) {
  std::vector<double> error;
  for (const char* iterations : {"5", "10", "20"}) {
    const std::vector<double> sort = Balanced(RandomScores(6, 1), {{"iterations", iterations}});
    for (int64_t t = 0; t < 6; ++t) {
      double sum = 0;
      for (int64_t u = 0; u < 6; ++u) {
        EXPECT_GE(sort[u * 6 + t], 0);
        sum += sort[u * 6 + t];
      }
      EXPECT_NEAR(sum, 1, 1e-12);
    }
    error.push_back(RowError(sort, 6));
  }
  EXPECT_LT(error[0], 0.1);
  EXPECT_LT(error[2], 1e-6);
  EXPECT_NEAR(std::log(error[2] / error[1]) / std::log(error[1] / error[0]), 2, 0.1);
}

TEST(Sinkhorn, NumbersAddedToRowsAndColumnsOfScoresLeaveTheLimit) {
  const std::vector<double> scores = RandomScores(5, 1);
  std::vector<double> moved = scores;
  for (int64_t i = 0; i < 25; ++i) moved[i] += 0.7 * static_cast<double>(i / 5) - 0.4 * (i % 5);
  EXPECT_THAT(Balanced(moved, {{"iterations", "100"}}),
              Near(Balanced(scores, {{"iterations", "100"}})));
}

TEST(Sinkhorn, ALowTemperatureMakesAPermutation) {
  std::vector<double> scores = RandomScores(5, 0.1);
  const int64_t order[] = {3, 0, 4, 1, 2};
  std::vector<double> permutation(25, 0.0);
  for (int64_t u = 0; u < 5; ++u) {
    scores[u * 5 + order[u]] += 1;
    permutation[u * 5 + order[u]] = 1;
  }
  EXPECT_THAT(Balanced(scores, {{"temperature", "0.02"}, {"iterations", "100"}}),
              Near(permutation));
}

TEST(Sinkhorn, ScoresFarApartNeitherOverflowNorVanish) {
  const std::vector<double> scores = {0, 3000, -2000, 5000, 1000, 0, -4000, 800, 700};
  for (const bool causal : {false, true}) {
    for (const double entry : Balanced(scores, {}, causal)) EXPECT_TRUE(entry >= 0 && entry <= 1);
  }
}

TEST(Sinkhorn, ALoneHeadsHiddenStatesMayBeItsKeys) {
  const Problem problem = Problem::SelfAttention(2, 1, 40, 8);
  NamedTensors inputs = Random(problem);
  const NamedTensors of_keys = RunSinkhorn(problem, inputs, Block(8));
  inputs["x"] = Tensor(DType::kF32, {2, 40, 8});
  std::copy_n(inputs["k"].span<float>().data(), 2 * 40 * 8, inputs["x"].span<float>().data());
  const NamedTensors of_x = RunSinkhorn(problem, inputs, With(Block(8), {{"pooled", "hidden"}}));
  EXPECT_EQ(MaxDifference(of_keys.at("sort").view(), of_x.at("sort").view()), 0);
  EXPECT_EQ(MaxDifference(of_keys.at("out").view(), of_x.at("out").view()), 0);
}

TEST(Sinkhorn, TheMatrixThatWasWrittenMayBeGiven) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 77, 8, causal);
    NamedTensors inputs = Random(problem);
    for (const Device device : TestedDevices()) {
      const NamedTensors computed = RunSinkhorn(problem, inputs, Block(16), device);
      NamedTensors with_matrix = Random(problem);
      with_matrix["sort"] = computed.at("sort").Clone();
      const NamedTensors given = RunSinkhorn(problem, with_matrix, Block(16), device);
      for (const char* name : {"out", "log_sum_exp", "sort"}) {
        EXPECT_EQ(MaxDifference(computed.at(name).view(), given.at(name).view()), 0) << name;
      }
    }
  }
}

// ---- Attention ----

TEST(Sinkhorn, OneBlockIsDenseAttentionWithEveryKeyTwice) {
  const Problem problem = Problem::SelfAttention(2, 2, 50, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors dense = RunDense(problem, inputs);
  for (const int64_t block : {50, 51, 1000}) {
    ExpectNear(RunSinkhorn(problem, inputs, Block(block)), dense, std::log(2));
  }
}

// Computes queries of a block on the keys of blocks, in a dense problem of their own.
NamedTensors DenseOnBlocks(const NamedTensors& inputs, int64_t block, int64_t queries,
                           const std::vector<int64_t>& blocks) {
  const int64_t keys = block * static_cast<int64_t>(blocks.size());
  NamedTensors part;
  Problem problem = Problem::SelfAttention(2, 2, block, 16);
  problem.kv_tokens = keys;
  part["q"] = Tensor(DType::kF32, {2, 2, block, 16});
  CopyElements(Slice(inputs.at("q").view(), 2, queries * block, block), part["q"].view());
  for (const char* name : {"k", "v"}) {
    part[name] = Tensor(DType::kF32, {2, 2, keys, 16});
    for (size_t n = 0; n < blocks.size(); ++n) {
      CopyElements(Slice(inputs.at(name).view(), 2, blocks[n] * block, block),
                   Slice(part[name].view(), 2, static_cast<int64_t>(n) * block, block));
    }
  }
  return RunDense(problem, part);
}

TEST(Sinkhorn, APermutationMakesABlockSeeTwo) {
  const Problem problem = Problem::SelfAttention(2, 2, 64, 16);
  const std::vector<int64_t> order = {2, 1, 3, 0};  // block 1 stays: its keys count twice
  NamedTensors inputs = Random(problem);
  inputs["sort"] = Permutation(problem, order);
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunSinkhorn(problem, inputs, Block(16), device);
    for (int64_t u = 0; u < 4; ++u) {
      const NamedTensors expected = DenseOnBlocks(inputs, 16, u, {order[u], u});
      EXPECT_LE(
          MaxDifference(Slice(run.at("out").view(), 2, u * 16, 16), expected.at("out").view()),
          1e-5);
      EXPECT_LE(MaxDifference(Slice(run.at("log_sum_exp").view(), 2, u * 16, 16),
                              expected.at("log_sum_exp").view()),
                1e-5);
    }
  }
}

TEST(Sinkhorn, TheIdentityIsAttentionWithinBlocksWithEveryKeyTwice) {
  const Problem problem = Problem::SelfAttention(2, 2, 64, 16);
  NamedTensors inputs = Random(problem);
  inputs["sort"] = Permutation(problem, {0, 1, 2, 3});
  const NamedTensors run = RunSinkhorn(problem, inputs, Block(16));
  for (int64_t u = 0; u < 4; ++u) {
    const NamedTensors expected = DenseOnBlocks(inputs, 16, u, {u});
    EXPECT_LE(MaxDifference(Slice(run.at("out").view(), 2, u * 16, 16), expected.at("out").view()),
              1e-5);
  }
}

TEST(Sinkhorn, SortCutOfAllBlocksOfAPermutationIsDense) {
  const Problem problem = Problem::SelfAttention(2, 2, 64, 16);
  NamedTensors inputs = Random(problem);
  const NamedTensors dense = RunDense(problem, inputs);
  inputs["sort"] = Permutation(problem, {2, 1, 3, 0});
  for (const char* sorted_blocks : {"4", "9"}) {
    for (const Device device : TestedDevices()) {
      ExpectNear(
          RunSinkhorn(problem, inputs, With(Block(16), {{"sorted_blocks", sorted_blocks}}), device),
          dense, 0);
    }
  }
}

TEST(Sinkhorn, SortCutSeesTheFirstSortedBlocks) {
  const Problem problem = Problem::SelfAttention(2, 2, 64, 16);
  NamedTensors inputs = Random(problem);
  inputs["sort"] = Permutation(problem, {2, 1, 3, 0});
  const NamedTensors run = RunSinkhorn(problem, inputs, With(Block(16), {{"sorted_blocks", "2"}}));
  for (int64_t u = 0; u < 4; ++u) {
    const NamedTensors expected = DenseOnBlocks(inputs, 16, u, {2, 1});
    EXPECT_LE(MaxDifference(Slice(run.at("out").view(), 2, u * 16, 16), expected.at("out").view()),
              1e-5);
  }
}

// ---- Causality ----

void ChangeTokensFrom(int64_t first, NamedTensors* inputs, const NamedTensors& other) {
  for (const char* name : {"q", "k", "v"}) {
    const TensorView view = (*inputs)[name].view();
    const int64_t count = view.dim(2) - first;
    CopyElements(Slice(other.at(name).view(), 2, first, count), Slice(view, 2, first, count));
  }
}

TEST(Sinkhorn, TheFutureDoesNotReachThePastWithTheMatrixFrozenOrNot) {
  const Problem problem = Problem::SelfAttention(1, 2, 40, 8, /*causal=*/true);
  const std::vector<TensorSpec> specs = Sinkhorn().InputSpecs(problem, {}).value();
  const NamedTensors other = RandomInputs(specs, 12);
  for (const bool frozen : {false, true}) {
    NamedTensors inputs = Random(problem);
    const NamedTensors before = RunSinkhorn(problem, inputs, Block(8));
    if (frozen) inputs["sort"] = before.at("sort").Clone();
    for (const int64_t first : {1, 7, 8, 9, 24, 39}) {
      NamedTensors changed = Random(problem);
      if (frozen) changed["sort"] = before.at("sort").Clone();
      ChangeTokensFrom(first, &changed, other);
      const NamedTensors after = RunSinkhorn(problem, changed, Block(8));
      ExpectSameRows(before, after, first);
    }
  }
}

TEST(Sinkhorn, CausalMatricesHaveNoEntriesOfThePresentOrFuture) {
  const Problem problem = Problem::SelfAttention(1, 1, 48, 8, /*causal=*/true);
  NamedTensors inputs = Random(problem);
  const NamedTensors run = RunSinkhorn(problem, inputs, Block(8));
  inputs["sort"] = run.at("sort").Clone();
  for (int64_t u = 0; u < 6; ++u) {
    for (int64_t t = 0; t < 6; ++t) {
      const float entry = *run.at("sort").view().At<float>(0, 0, u, t);
      if (t + 1 == u) {
        EXPECT_NEAR(entry, 1, 1e-6);  // the first entry of its column
      } else if (t >= u) {
        EXPECT_EQ(entry, 0);
        // A given value there is not read.
        *inputs["sort"].view().MutableAt<float>(0, 0, u, t) =
            std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
  for (const Device device : TestedDevices()) {
    EXPECT_LE(MaxDifference(RunSinkhorn(problem, inputs, Block(8), device).at("out").view(),
                            run.at("out").view()),
              1e-6);
  }
}

TEST(Sinkhorn, TheFirstCausalBlockIsAttentionWithinIt) {
  const Problem problem = Problem::SelfAttention(2, 2, 64, 16, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  ExpectSameRows(RunSinkhorn(problem, inputs, Block(16)),
                 RunSinkhorn(problem, inputs, With(Block(16), {{"temperature", "5"}})), 16);
  const Problem one = Problem::SelfAttention(2, 2, 16, 16, /*causal=*/true);
  NamedTensors first;
  for (const char* name : {"q", "k", "v"}) {
    first[name] = Tensor(DType::kF32, {2, 2, 16, 16});
    CopyElements(Slice(inputs.at(name).view(), 2, 0, 16), first[name].view());
  }
  // On its own it is a problem of one block.
  ExpectNear(RunSinkhorn(one, first, Block(16)), RunDense(one, first), 0);
}

// ---- Null keys ----

TEST(Sinkhorn, ANullKeyByHand) {
  // Blocks of one token, head_dim 1, scores 0: block 0 sorts the null block alone, S = (1, 0, 0).
  // One iteration of row 1 gives (1/2, 1/2), and its columns those over the entries so far: 1/2 /
  // (1 + 1/2) = 1/3, and 1.
  const Problem problem = Problem::SelfAttention(1, 1, 2, 1, /*causal=*/true);
  const Options options = With(ScoresAreNoise(1), {{"null_key", "true"}, {"iterations", "1"}});
  NamedTensors inputs = Random(problem, options);
  inputs["q"] = Numbers({1, 1, 2, 1}, {1, 1});
  inputs["k"] = Numbers({1, 1, 2, 1}, {1, 2});
  inputs["v"] = Numbers({1, 1, 2, 1}, {5, 7});
  inputs["g"] = Numbers({1, 1, 2, 3}, {0, 9, 9, 0, 0, 9});
  NamedTensors parameters = Zeros(problem, options);
  parameters["null_key"] = Numbers({1, 1}, {3});
  parameters["null_value"] = Numbers({1, 1}, {11});
  for (const Device device : TestedDevices()) {
    const NamedTensors run = RunSinkhorn(problem, inputs, options, device, &parameters);
    EXPECT_THAT(Values(run.at("sort")), Near({1, 0, 0, 1.0 / 3, 1, 0}));
    // Keys 3 and 1 with values 11 and 5; keys 3/3 + 1 and 2 with values 11/3 + 5 and 7.
    const double first = (11 * std::exp(2.0) + 5) / (std::exp(2.0) + 1);
    const double second = (11.0 / 3 + 5 + 7) / 2;
    EXPECT_NEAR(run.at("out").view().Get(0), first, 1e-5);
    EXPECT_NEAR(run.at("out").view().Get(1), second, 1e-5);
  }
}

TEST(Sinkhorn, NullKeysMatchTheDefinition) {
  const Options null_key = {{"null_key", "true"}};
  Problem grouped = Problem::SelfAttention(2, 4, 50, 8, /*causal=*/true);
  grouped.kv_heads = 2;
  grouped.value_dim = 5;
  Problem half = Problem::SelfAttention(1, 2, 50, 16, /*causal=*/true);
  half.dtype = DType::kBF16;
  for (const Device device : TestedDevices()) {
    ExpectRunMatchesDefinition(grouped, With(Block(8), null_key), device);
    ExpectRunMatchesDefinition(
        grouped, With(ScoresAreNoise(8), {{"null_key", "true"}, {"hidden", "0"}}), device);
    ExpectRunMatchesDefinition(half, With(Block(8), null_key), device);
    ExpectRunMatchesDefinition(Problem::SelfAttention(1, 1, 150, 4, true), With(Block(1), null_key),
                               device);
  }
}

// A matrix whose first column is 0 sorts no null block, and one of nothing else sorts it alone.
TEST(Sinkhorn, AMatrixMaySortNoNullBlockOrItAlone) {
  const Problem problem = Problem::SelfAttention(1, 2, 24, 4, /*causal=*/true);
  const Options null_key = With(Block(4), {{"null_key", "true"}});
  const NamedTensors without = RunSinkhorn(problem, Random(problem), Block(4));
  NamedTensors inputs = Random(problem);
  Tensor& sort = inputs["sort"] = Tensor(DType::kF32, {1, 2, 6, 7});
  Fill(sort.view(), 0);
  CopyElements(without.at("sort").view(), Slice(sort.view(), 3, 1, 6));
  const NamedTensors with = RunSinkhorn(problem, inputs, null_key);
  // Block 0 sees null rows of zeros now, and the others what they saw.
  EXPECT_EQ(MaxDifference(Slice(with.at("out").view(), 2, 4, 20),
                          Slice(without.at("out").view(), 2, 4, 20)),
            0);
  Fill(sort.view(), 0);
  Fill(Slice(sort.view(), 3, 0, 1), 1);
  const NamedTensors alone = RunSinkhorn(problem, inputs, null_key);
  for (const Device device : TestedDevices()) {
    NamedTensors changed = Random(problem);
    changed["sort"] = sort.Clone();
    Fill(Slice(changed["k"].view(), 2, 0, 4), 3);  // block 0 is in no other block's sum
    EXPECT_LE(MaxDifference(
                  Slice(RunSinkhorn(problem, changed, null_key, device).at("out").view(), 2, 4, 20),
                  Slice(alone.at("out").view(), 2, 4, 20)),
              1e-6);
  }
}

// ---- Given logits ----

TEST(Sinkhorn, GivenLogitsAreTheScoresOfANetworkThatGivesThem) {
  for (const bool causal : {false, true}) {
    for (const char* null_key : {"false", "true"}) {
      if (!causal && std::string(null_key) == "true") continue;
      const Problem problem = Problem::SelfAttention(2, 2, 40, 8, causal);
      const Options more = {{"null_key", null_key}};
      const Options noise = With(ScoresAreNoise(8), more);
      const Options given = With(With(Block(8), {{"scores", "given"}, {"temperature", "1"}}), more);
      NamedTensors inputs = Random(problem, noise);
      NamedTensors own;
      for (const char* name : {"q", "k", "v"}) own[name] = inputs.at(name).Clone();
      own["logits"] = inputs.at("g").Clone();
      NamedTensors zeros = Zeros(problem, noise), nulls = Zeros(problem, given);
      EXPECT_EQ(nulls.size(), causal && std::string(null_key) == "true" ? 2u : 0u);
      for (const Device device : TestedDevices()) {
        const NamedTensors a = RunSinkhorn(problem, inputs, noise, device, &zeros);
        const NamedTensors b = RunSinkhorn(problem, own, given, device, &nulls);
        for (const char* output : {"out", "sort"}) {
          EXPECT_EQ(MaxDifference(a.at(output).view(), b.at(output).view()), 0) << output;
        }
        ExpectRunMatchesDefinition(problem, given, device);
        ExpectRunMatchesDefinition(problem, With(given, {{"pooled", "hidden"}}), device);
      }
    }
  }
}

// ---- Padding ----

// The tokens that a last block lacks act like masked ones.
TEST(Sinkhorn, ARaggedBlockIsAMaskedOne) {
  for (const bool causal : {false, true}) {
    const Problem longer = Problem::SelfAttention(2, 2, 48, 8, causal);
    const Problem shorter = Problem::SelfAttention(2, 2, 41, 8, causal);
    NamedTensors inputs = Random(longer), cut;
    for (const char* name : {"q", "k", "v"}) {
      cut[name] = Tensor(DType::kF32, {2, 2, 41, 8});
      CopyElements(Slice(inputs[name].view(), 2, 0, 41), cut[name].view());
      Fill(Slice(inputs[name].view(), 2, 41, 7), std::numeric_limits<float>::quiet_NaN());
    }
    inputs["key_mask"] = Tensor(DType::kU8, {2, 48});
    for (int64_t n = 0; n < 96; ++n) inputs["key_mask"].span<uint8_t>()[n] = n % 48 < 41;
    for (const Device device : TestedDevices()) {
      const NamedTensors ragged = RunSinkhorn(shorter, cut, Block(16), device);
      const NamedTensors masked = RunSinkhorn(longer, inputs, Block(16), device);
      EXPECT_EQ(MaxDifference(ragged.at("sort").view(), masked.at("sort").view()), 0);
      EXPECT_LE(MaxDifference(ragged.at("out").view(), Slice(masked.at("out").view(), 2, 0, 41)),
                1e-6);
    }
  }
}

// Row 1 of all blocks is padding, and so is row 0 of the first: where causal, sorted block 1 has no
// key in either.
TEST(Sinkhorn, RowsOfPaddingAloneAreNoKeys) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 1, 6, 1, causal);
    NamedTensors inputs = Random(problem);
    for (const char* name : {"q", "k"}) Fill(inputs[name].view(), 0);
    inputs["key_mask"] = Tensor(DType::kU8, {1, 6});
    const uint8_t is_token[] = {0, 0, 1, 0, 1, 0};
    std::copy_n(is_token, 6, inputs["key_mask"].span<uint8_t>().data());
    // All scores are 0: the number of a row's keys is exp(log_sum_exp).
    for (const Device device : TestedDevices()) {
      const NamedTensors run = RunSinkhorn(problem, inputs, Block(2), device);
      std::vector<double> keys = Values(run.at("log_sum_exp"));
      for (double& log_sum_exp : keys) log_sum_exp = std::exp(log_sum_exp);
      EXPECT_THAT(keys, causal ? Near({0, 0, 1, 1, 2, 2}) : Near({1, 1, 2, 2, 2, 2}));
      if (causal) {
        EXPECT_EQ(run.at("out").view().Get(0), 0);
      }
    }
  }
}

// ---- The definition, other implementations ----

TEST(Sinkhorn, GroupedHeadsPoolTheQueriesOfTheirGroup) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 6, 50, 8, causal);
    problem.kv_heads = 2;
    for (const char* pooled : {"keys", "queries_and_keys", "hidden"}) {
      for (const Device device : TestedDevices()) {
        ExpectRunMatchesDefinition(problem, With(Block(8), {{"pooled", pooled}}), device);
      }
    }
  }
}

TEST(Sinkhorn, MoreBlocksThanATileSums) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 1, 150, 4, causal);
    for (const Device device : TestedDevices())
      ExpectRunMatchesDefinition(problem, Block(1), device);
  }
  const Problem problem = Problem::SelfAttention(1, 1, 150, 72);
  ExpectRunMatchesDefinition(problem, With(Block(1), {{"sorted_blocks", "70"}}), Device::kCpu);
}

// The scores, and so log_sum_exp, come from the same rounded keys.
TEST(Sinkhorn, SortedBlocksOf16BitsAreRoundedAsTheDefinitionRoundsThem) {
  const Options options = With(Block(8), {{"gumbel", "true"}, {"scores", "log_relu"}});
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Device device : TestedDevices()) {
      ExpectRunMatchesDefinition(Problem::SelfAttention(2, 2, 50, 16, /*causal=*/false, dtype),
                                 options, device);
    }
  }
}

// Expects the file's out and sort, of the definition within `exact`.
void ExpectOutputsOf(const SafetensorsFile& file, const Problem& problem,
                     const NamedTensors& inputs, const NamedTensors& parameters,
                     const Options& options, double exact) {
  RunRequest request{options};
  request.parameters = &parameters;
  const NamedTensors defined =
      DefineTechnique(Sinkhorn(), problem, ViewsOf(inputs), request).value();
  for (const char* output : {"out", "sort"}) {
    const ConstTensorView expected = file.tensors.at(output).view();
    EXPECT_LE(MaxDifference(defined.at(output).view(), expected), exact) << output;
    for (const Device device : TestedDevices()) {
      EXPECT_LE(MaxDifference(
                    RunSinkhorn(problem, inputs, options, device, &parameters).at(output).view(),
                    expected),
                Fp32Bound(inputs.at("v").view()))
          << output << " " << Name(device);
    }
  }
}

// Compares with a file of sinkhorn-transformer.
void ExpectGolden(const std::string& name, bool balanced) {
  const SafetensorsFile file = GoldenFile("attention/sinkhorn/testdata/" + name + ".safetensors");
  Options options = {{"hidden", "0"}, {"scores", "log_relu"}, {"pooled", "queries_and_keys"}};
  for (const char* option : {"block", "sorted_blocks", "iterations", "temperature"}) {
    options[option] = file.metadata.at(option);
  }
  NamedTensors inputs;
  for (const char* input : {"q", "k", "v"}) inputs[input] = file.tensors.at(input).Clone();
  const Problem problem = Problem::SelfAttention(2, 2, 48, 8);
  NamedTensors parameters = Zeros(problem, options);
  if (balanced) {
    options["gumbel"] = "true";
    inputs["g"] = file.tensors.at("g").Clone();
    parameters["score_weights"] = file.tensors.at("score_weights").Clone();
  } else {
    inputs["sort"] = file.tensors.at("sort").CloneAs(DType::kF32);
  }
  // A given matrix has been rounded to fp32.
  ExpectOutputsOf(file, problem, inputs, parameters, options, balanced ? 1e-12 : 1e-6);
}

TEST(Sinkhorn, BalancedMatricesMatchSinkhornTransformer) { ExpectGolden("balanced", true); }
TEST(Sinkhorn, SortCutMatchesSinkhornTransformer) { ExpectGolden("sortcut", true); }
TEST(Sinkhorn, ItsLargestEntriesMayBeTheMatrix) { ExpectGolden("largest_entries", false); }

TEST(Sinkhorn, GivenLogitsAndNullKeysMatchSinkhornTransformer) {
  for (const char* name : {"given_logits", "null_key"}) {
    SCOPED_TRACE(name);
    const SafetensorsFile file =
        GoldenFile(std::string("attention/sinkhorn/testdata/") + name + ".safetensors");
    const bool causal = file.tensors.count("null_key") > 0;
    Options options = {{"block", file.metadata.at("block")}, {"scores", "given"}};
    if (causal) options["null_key"] = "true";
    for (const char* option : {"iterations", "temperature"}) {
      if (file.metadata.count(option) > 0) options[option] = file.metadata.at(option);
    }
    const Problem problem = Problem::SelfAttention(2, 2, 24, 4, causal);
    NamedTensors inputs = Random(problem, options), parameters = Zeros(problem, options);
    for (const char* input : {"q", "k", "v"}) inputs[input] = file.tensors.at(input).Clone();
    if (causal) {
      inputs["sort"] = file.tensors.at("sort").Clone();
    } else {
      inputs["logits"] = file.tensors.at("logits").Clone();
    }
    for (auto& [parameter, tensor] : parameters) tensor = file.tensors.at(parameter).Clone();
    ExpectOutputsOf(file, problem, inputs, parameters, options, 1e-12);
  }
}

// ---- Gradients ----

// A problem of grouped heads whose last block is short and whose second sequence has padding.
Problem UnevenProblem(bool causal) {
  Problem problem = Problem::SelfAttention(2, 4, 50, 10, causal);
  problem.kv_heads = 2;
  problem.value_dim = 6;
  return problem;
}
NamedTensors UnevenInputs(const Problem& problem, const Options& options) {
  NamedTensors inputs = Random(problem, options);
  Tensor mask(DType::kU8, {problem.batch, problem.kv_tokens});
  Fill(mask.view(), 1);
  for (const int64_t j : {0, 8, 9, 30, 49}) {
    mask.span<uint8_t>()[(problem.batch - 1) * problem.kv_tokens + j] = 0;
  }
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
                         const NamedTensors& output_gradients, Device device, int threads = 2) {
  return BackwardOfTechnique(Sinkhorn(), problem, ViewsOf(inputs), output_gradients,
                             {options, device, 1, nullptr, threads})
      .value();
}

class SinkhornBackward : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, SinkhornBackward, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

void ExpectGradientsOfTheDefinition(const Problem& problem, const NamedTensors& inputs,
                                    const Options& options, Device device) {
  const NamedTensors g = OutputGradients(problem);
  const RunAndGradients pass = Backward(problem, inputs, options, g, device);
  std::vector<std::string> names;
  for (const auto& [name, gradient] : pass.parameters) names.push_back(name);
  for (const auto& [name, gradient] : pass.inputs) {
    if (inputs.count(name) > 0) names.push_back(name);
  }
  for (const std::string& name : names) {
    const DirectionalDerivative d =
        DerivativeOf(name, Sinkhorn(), problem, inputs, g, pass, {options});
    EXPECT_NE(d.of_definition, 0) << name;
    EXPECT_NEAR(d.of_layer, d.of_definition, d.bound) << name << ", " << ToString(options);
  }
}

TEST_P(SinkhornBackward, GradientsAreTheDefinitions) {
  const Options common = {{"block", "8"}, {"iterations", "3"}};
  const Options each[] = {
      {},
      {{"scores", "linear"}, {"hidden", "0"}},
      {{"pooled", "queries_and_keys"}, {"scores", "log_relu"}, {"gumbel", "true"}},
      {{"pooled", "hidden"}, {"scores", "linear"}, {"hidden", "5"}},
      {{"scores", "given"}, {"gumbel", "true"}, {"temperature", "2"}}};
  for (const Options& options : each) {
    for (const bool causal : {false, true}) {
      const Problem problem = UnevenProblem(causal);
      const Options all = With(common, options);
      ExpectGradientsOfTheDefinition(problem, UnevenInputs(problem, all), all, GetParam());
      const Options more = With(all, {causal ? std::make_pair("null_key", "true")
                                             : std::make_pair("sorted_blocks", "2")});
      ExpectGradientsOfTheDefinition(problem, UnevenInputs(problem, more), more, GetParam());
    }
  }
}

TEST_P(SinkhornBackward, AGivenMatrixHasAGradientAndNothingBehindIt) {
  const Options options = {{"block", "8"}, {"pooled", "queries_and_keys"}};
  for (const bool causal : {false, true}) {
    const Problem problem = UnevenProblem(causal);
    NamedTensors inputs = UnevenInputs(problem, options);
    FillUniform(&(inputs["sort"] = Tensor(DType::kF32, {2, 2, 7, 7})), 3, "sort", 0, 1);
    const NamedTensors g = OutputGradients(problem);
    const RunAndGradients pass = Backward(problem, inputs, options, g, GetParam());
    for (const char* name : {"q", "k", "v", "sort"}) {
      const DirectionalDerivative d =
          DerivativeOf(name, Sinkhorn(), problem, inputs, g, pass, {options});
      EXPECT_NEAR(d.of_layer, d.of_definition, d.bound) << name;
    }
    for (const auto& [name, gradient] : pass.parameters) EXPECT_EQ(MaxAbs(gradient.view()), 0);
  }
}

// Of 70 blocks more than a panel of 64, and of 70 channels more than a part of 64.
TEST_P(SinkhornBackward, GradientsOfMoreBlocksAndChannelsThanAreTakenAtOnce) {
  const Options options = {{"block", "1"}, {"iterations", "2"}, {"hidden", "3"}};
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(1, 1, 70, 70, causal);
    problem.value_dim = 3;
    ExpectGradientsOfTheDefinition(problem, Random(problem, options), options, GetParam());
  }
}

// The parts of the null rows' gradients, of keys and then of values, are in the same memory. It is
// nearly all that the pass needs, so that too little of it does not end in other arrays.
TEST_P(SinkhornBackward, GradientsOfNullRowsWhateverIsWider) {
  const Options options = {
      {"block", "32"}, {"iterations", "1"}, {"hidden", "3"}, {"null_key", "true"}};
  for (const bool wide_values : {false, true}) {
    Problem problem = Problem::SelfAttention(1, 1, 64, wide_values ? 2 : 40, /*causal=*/true);
    problem.value_dim = wide_values ? 40 : 2;
    ExpectGradientsOfTheDefinition(problem, Random(problem, options), options, GetParam());
  }
}

// 100 matrices of 210 x 210 doubles are more than 32 MiB: every other one is stored.
TEST_P(SinkhornBackward, GradientsOfMoreIterationsThanAreStored) {
  const Options options = {{"block", "1"}, {"iterations", "100"}, {"scores", "given"}};
  const Problem problem = Problem::SelfAttention(1, 1, 210, 2, /*causal=*/true);
  const NamedTensors inputs = Random(problem, options), g = OutputGradients(problem);
  const RunAndGradients pass = Backward(problem, inputs, options, g, GetParam());
  const DirectionalDerivative d =
      DerivativeOf("logits", Sinkhorn(), problem, inputs, g, pass, {options});
  EXPECT_NEAR(d.of_layer, d.of_definition, d.bound);
}

// The first step of an iteration takes any number that is added to a row of scores away.
TEST_P(SinkhornBackward, TheGradientsOfARowOfScoresSumToZero) {
  const Options options = With(Block(8), {{"gumbel", "true"}});
  for (const bool causal : {false, true}) {
    const Problem problem = UnevenProblem(causal);
    const RunAndGradients pass = Backward(problem, UnevenInputs(problem, options), options,
                                          OutputGradients(problem), GetParam());
    const std::vector<double> gradient = Values(pass.inputs.at("g"));
    for (size_t row = 0; row < gradient.size(); row += 7) {
      double sum = 0, magnitude = 0;
      for (size_t t = row; t < row + 7; ++t) {
        sum += gradient[t];
        magnitude += std::abs(gradient[t]);
      }
      EXPECT_LE(std::abs(sum), 0x1p-24 * magnitude);
      const bool has_choice = !causal || row % 49 > 7;
      EXPECT_EQ(magnitude > 0, has_choice);
    }
  }
}

TEST_P(SinkhornBackward, WithoutTokensParametersHaveNoGradient) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 0, 4, causal);
    const RunAndGradients pass =
        Backward(problem, Random(problem), {}, OutputGradients(problem), GetParam());
    EXPECT_EQ(pass.parameters.size(), 4u);
    for (const auto& [name, gradient] : pass.parameters) EXPECT_EQ(MaxAbs(gradient.view()), 0);
  }
}

TEST_P(SinkhornBackward, GradientsOfEarlyBlocksReachNoLaterToken) {
  const Options options = {{"block", "8"}, {"pooled", "queries_and_keys"}};
  const Problem problem = UnevenProblem(/*causal=*/true);
  NamedTensors g = OutputGradients(problem);
  for (auto& [name, gradient] : g) Fill(Slice(gradient.view(), 2, 24, 26), 0);
  const RunAndGradients pass =
      Backward(problem, UnevenInputs(problem, options), options, g, GetParam());
  for (const char* name : {"q", "k", "v"}) {
    const ConstTensorView gradient = pass.inputs.at(name).view();
    EXPECT_EQ(MaxAbs(Slice(gradient, 2, 24, 26)), 0);
    EXPECT_GT(MaxAbs(Slice(gradient, 2, 23, 1)), 0);
  }
}

TEST_P(SinkhornBackward, PaddingHasNoGradientAndGradientsHaveTheSameBitsWhateverItHolds) {
  for (const char* pooled : {"keys", "hidden"}) {
    const Options options = {{"block", "8"}, {"pooled", pooled}};
    for (const bool causal : {false, true}) {
      const Problem problem = UnevenProblem(causal);
      NamedTensors inputs = UnevenInputs(problem, options);
      const NamedTensors g = OutputGradients(problem);
      const RunAndGradients before =
          Backward(problem, inputs, options, g, GetParam(), /*threads=*/1);
      for (const int64_t j : {0, 8, 9, 30, 49}) {
        for (const char* name : {"k", "v"}) {
          EXPECT_EQ(MaxAbs(Slice(Slice(before.inputs.at(name).view(), 0, 1, 1), 2, j, 1)), 0);
          Fill(Slice(Slice(inputs[name].view(), 0, 1, 1), 2, j, 1),
               std::numeric_limits<float>::quiet_NaN());
        }
        if (inputs.count("x") == 0) continue;
        EXPECT_EQ(MaxAbs(Slice(Slice(before.inputs.at("x").view(), 0, 1, 1), 1, j, 1)), 0);
        Fill(Slice(Slice(inputs["x"].view(), 0, 1, 1), 1, j, 1),
             std::numeric_limits<float>::quiet_NaN());
      }
      const RunAndGradients after =
          Backward(problem, inputs, options, g, GetParam(), /*threads=*/3);
      for (const auto& [name, gradient] : before.inputs) {
        EXPECT_EQ(MaxDifference(after.inputs.at(name).view(), gradient.view()), 0) << name;
      }
      for (const auto& [name, gradient] : before.parameters) {
        EXPECT_GT(MaxAbs(gradient.view()), 0) << name;
        EXPECT_EQ(MaxDifference(after.parameters.at(name).view(), gradient.view()), 0) << name;
      }
    }
  }
}

// ---- Cost, errors ----

TEST(Sinkhorn, CostCountsEveryStep) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 3, 12, 5, causal);
    const Options options = With(Block(4), {{"hidden", "7"}, {"iterations", "2"}});
    const auto layer = Sinkhorn().Create(problem, options, Device::kCpu, 1).value();
    EXPECT_FALSE(layer->cost().flops.has_value());
    ASSERT_TRUE(RunLayer(*layer, ViewsOf(Random(problem))).ok());
    const double pooled = 12 * 5, network = 2 * 3 * (5 * 7 + 7 * 3), balance = 2 * 4 * 9;
    const double sums = 2 * (causal ? 3 : 9) * 4 * 10;
    // A block's queries see 4 sorted keys, except where causal those of block 0, and 4 or 10 / 4
    // own ones.
    const double pairs = causal ? 2 * 16 + 3 * 10 : 3 * 32;
    EXPECT_EQ(*layer->cost().flops, 6 * (pooled + network + balance + sums + 2 * pairs * 10));
  }
  // With a null key all 3 blocks sort one block more, which block 0 sees; given scores cost
  // nothing.
  const Problem problem = Problem::SelfAttention(2, 3, 12, 5, /*causal=*/true);
  const Options options =
      With(Block(4), {{"iterations", "2"}, {"null_key", "true"}, {"scores", "given"}});
  const auto layer = Sinkhorn().Create(problem, options, Device::kCpu, 1).value();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(Random(problem, options))).ok());
  EXPECT_EQ(*layer->cost().flops, 6 * (2 * 4 * 12 + 2 * 6 * 4 * 10 + 2 * (3 * 16 + 3 * 10) * 10.0));
}

TEST(Sinkhorn, WhatItDoesNotDoIsRefused) {
  const auto refusal = [](const Problem& problem, const Options& options) {
    return std::string(Sinkhorn().Create(problem, options, Device::kCpu, 1).status().message());
  };
  Problem cross = Problem::SelfAttention(1, 1, 30, 8);
  cross.kv_tokens = 31;
  EXPECT_THAT(refusal(cross, {}), HasSubstr("query_tokens is 30, kv_tokens is 31"));
  EXPECT_THAT(refusal(Problem::SelfAttention(1, 1, 30, 8, true), {{"sorted_blocks", "2"}}),
              HasSubstr("sorted_blocks is 2"));
  EXPECT_THAT(refusal(Problem::SelfAttention(1, 1, 30, 8), {{"null_key", "true"}}),
              HasSubstr("null_key is true"));
  EXPECT_THAT(refusal(Problem::SelfAttention(1, 1, 8195, 8), Block(2)),
              HasSubstr("are 4098 blocks; allowed are 1 to 4096"));
}

}  // namespace
}  // namespace tfb::sinkhorn
