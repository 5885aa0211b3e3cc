#include "positional/shaw/shaw.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "attention/dense/dense.h"
#include "core/backward_testing.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::shaw {
namespace {

const Technique& Shaw() { return FindTechnique("shaw"); }

Options K(int64_t max_distance) { return {{"max_distance", std::to_string(max_distance)}}; }

// Returns tables N(0, 1), so that an error in any of them is visible.
NamedTensors LargeTables(int64_t heads, int64_t k, int64_t head_dim, int64_t value_dim) {
  return RandomInputs({{"key_positions", {heads, 2 * k + 1, head_dim}},
                       {"value_positions", {heads, 2 * k + 1, value_dim}}},
                      3);
}

RunRequest With(const NamedTensors& parameters, const Options& options,
                Device device = Device::kCpu) {
  RunRequest request;
  request.parameters = &parameters;
  request.options = options;
  request.device = device;
  return request;
}

TEST(Shaw, ThreeTokensAreWhatTheFormulaSaysByHand) {
  // There is one channel, one head, k = 1. Keys are 0, so that only q_i P^K decides; P^K = (0, log
  // 2, log 4) for the previous key, the same and the next one, P^V = (10, 20, 30), v = (1, 2, 3), q
  // = 1.
  const Problem problem = Problem::SelfAttention(1, 1, 3, 1);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill(inputs["q"].view(), 1);
  Fill(inputs["k"].view(), 0);
  for (int j = 0; j < 3; ++j) inputs["v"].view().Set(j, j + 1);
  NamedTensors tables = LargeTables(1, 1, 1, 1);
  for (int n = 0; n < 3; ++n) {
    tables["key_positions"].view().Set(n, n * std::log(2.0));
    tables["value_positions"].view().Set(n, 10 * (n + 1));
  }
  // The weights are 2 : 4 : 4, 1 : 2 : 4 and 1 : 1 : 2.
  const double expected[] = {(2 * 21 + 4 * 32 + 4 * 33) / 10.0, (1 * 11 + 2 * 22 + 4 * 33) / 7.0,
                             (1 * 11 + 1 * 12 + 2 * 23) / 4.0};
  for (const Device device : TestedDevices()) {
    const NamedTensors run =
        RunTechnique(Shaw(), problem, ViewsOf(inputs), With(tables, K(1), device)).value();
    for (int i = 0; i < 3; ++i) {
      EXPECT_NEAR(run.at("out").view().Get(i), expected[i], 1e-5) << Name(device) << " " << i;
    }
    EXPECT_NEAR(run.at("log_sum_exp").view().Get(1), std::log(7.0), 1e-6);
  }
}

TEST(Shaw, TablesOfZeroEqualDense) {
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 3, 150, 16, causal);
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    NamedTensors tables = LargeTables(3, 16, 16, 16);
    for (auto& [name, table] : tables) Fill(table.view(), 0);
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    const NamedTensors ours =
        RunTechnique(Shaw(), problem, ViewsOf(inputs), With(tables, {})).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()), 1e-6);
    EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 2e-6);
  }
}

TEST(Shaw, ADistanceOfZeroShiftsTheOutputByTheOnlyValueVector) {
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 70, 8, causal);
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    const NamedTensors tables = LargeTables(2, 0, 8, 8);
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    const NamedTensors ours =
        RunTechnique(Shaw(), problem, ViewsOf(inputs), With(tables, K(0))).value();
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 70; ++i) {
        for (int64_t c = 0; c < 8; ++c) {
          EXPECT_NEAR(*ours.at("out").view().At<float>(0, h, i, c),
                      *dense.at("out").view().At<float>(0, h, i, c) +
                          *tables.at("value_positions").view().At<float>(h, 0, c),
                      2e-6);
        }
      }
    }
  }
}

TEST(Shaw, ShiftingQueriesAndKeysTogetherChangesNothing) {
  // The last 40 queries over 100 keys are the last 40 of 100 queries.
  for (bool causal : {false, true}) {
    const Problem all = Problem::SelfAttention(1, 4, 100, 16, causal);
    Problem last = all;
    last.query_tokens = 40;
    const NamedTensors inputs = RandomInputs(QkvInputs(all), 2);
    const NamedTensors tables = LargeTables(4, 5, 16, 16);
    const RunRequest request = With(tables, K(5));
    const NamedTensors whole = RunTechnique(Shaw(), all, ViewsOf(inputs), request).value();
    Inputs tail = ViewsOf(inputs);
    tail.Set("q", Slice(inputs.at("q").view(), 2, 60, 40));
    const NamedTensors part = RunTechnique(Shaw(), last, tail, request).value();
    EXPECT_LE(MaxDifference(Slice(whole.at("out").view(), 2, 60, 40), part.at("out").view()), 5e-6);
  }
}

TEST(Shaw, KeysFartherThanTheDistanceAreIndistinguishable) {
  // Exchanging two far keys with their values does not change the queries that are far from both.
  const Problem problem = Problem::SelfAttention(1, 2, 80, 8);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  const NamedTensors tables = LargeTables(2, 6, 8, 8);
  const RunRequest request = With(tables, K(6));
  const NamedTensors before = RunTechnique(Shaw(), problem, ViewsOf(inputs), request).value();
  for (const char* name : {"k", "v"}) {
    const TensorView rows = inputs[name].view();
    for (int64_t h = 0; h < 2; ++h) {
      std::swap_ranges(rows.MutableAt<float>(0, h, 3), rows.MutableAt<float>(0, h, 4),
                       rows.MutableAt<float>(0, h, 20));
    }
  }
  const NamedTensors after = RunTechnique(Shaw(), problem, ViewsOf(inputs), request).value();
  const auto difference = [&](int64_t first, int64_t rows) {
    return MaxDifference(Slice(before.at("out").view(), 2, first, rows),
                         Slice(after.at("out").view(), 2, first, rows));
  };
  EXPECT_LE(difference(26, 54), 5e-6);  // distances 23 and 6, and larger
  EXPECT_GT(difference(25, 1), 1e-3);   // distance 5
}

TEST(Shaw, OneTableForAllHeadsEqualsTheSameTableForEach) {
  const Problem problem = Problem::SelfAttention(1, 3, 50, 8);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  const NamedTensors shared = LargeTables(1, 4, 8, 8);
  NamedTensors each = LargeTables(3, 4, 8, 8);
  for (auto& [name, table] : each) {
    for (int64_t h = 0; h < 3; ++h) {
      CopyElements(shared.at(name).view(), Slice(table.view(), 0, h, 1));
    }
  }
  Options options = K(4);
  const NamedTensors expected =
      RunTechnique(Shaw(), problem, ViewsOf(inputs), With(each, options)).value();
  options["per_head"] = "false";
  const NamedTensors run =
      RunTechnique(Shaw(), problem, ViewsOf(inputs), With(shared, options)).value();
  EXPECT_EQ(MaxDifference(run.at("out").view(), expected.at("out").view()), 0);
}

TEST(Shaw, MatchesItsDefinitionWhateverTheDistance) {
  for (const Device device : TestedDevices()) {
    for (bool causal : {false, true}) {
      for (auto [queries, keys] : {std::pair<int64_t, int64_t>{129, 129}, {30, 200}, {200, 30}}) {
        for (const int64_t k : {0, 1, 2, 20, 33, 250}) {
          Problem problem = Problem::SelfAttention(1, 2, queries, 13, causal);
          problem.kv_tokens = keys;
          problem.kv_heads = 1;
          problem.value_dim = 37;
          const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
          const NamedTensors tables = LargeTables(2, k, 13, 37);
          const RunRequest request = With(tables, K(k), device);
          const NamedTensors ours = RunTechnique(Shaw(), problem, ViewsOf(inputs), request).value();
          const NamedTensors expected =
              DefineTechnique(Shaw(), problem, ViewsOf(inputs), request).value();
          // Values and vectors are both of order 1.
          EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                    2 * Fp32Bound(inputs.at("v").view()))
              << Name(device) << " k " << k << " " << problem.ToString();
        }
      }
    }
  }
}

TEST(Shaw, MatchesTensor2tensor) {
  for (const char* name : {"causal", "both_sides", "keys_only"}) {
    const SafetensorsFile golden =
        GoldenFile(std::string("positional/shaw/testdata/") + name + ".safetensors");
    const NamedTensors& tensors = golden.tensors;
    const Shape shape = tensors.at("q").shape();
    const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3],
                                                   golden.metadata.at("causal") == "True");
    Options options;
    for (const char* option : {"max_distance", "per_head", "values"}) {
      options[option] = golden.metadata.at(option);
    }
    Inputs inputs;
    for (const char* tensor : {"q", "k", "v"}) inputs.Set(tensor, tensors.at(tensor).view());
    NamedTensors tables;
    tables["key_positions"] = tensors.at("key_positions").Clone();
    if (options["values"] == "true") {
      tables["value_positions"] = tensors.at("value_positions").Clone();
    }
    NamedTensors defined;
    ASSERT_TRUE(Shaw().Define(problem, options, tables, inputs, {}, &defined).ok());
    EXPECT_LE(MaxDifference(defined["out"].view(), tensors.at("out").view()), 1e-12) << name;
    for (const Device device : TestedDevices()) {
      const NamedTensors run =
          RunTechnique(Shaw(), problem, inputs, With(tables, options, device)).value();
      EXPECT_LE(MaxDifference(run.at("out").view(), tensors.at("out").view()),
                2 * Fp32Bound(tensors.at("v").view()))
          << name << " " << Name(device);
    }
  }
}

TEST(Shaw, CostCountsPairsAndTheTablesOfEachQuery) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 6, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  // There are 15 pairs a head, and 2 k + 1 = 5 rows of each table for 3 x 4 x 5 queries.
  const double of_pairs = 3 * 4 * 15 * 2 * (6 + 7);
  EXPECT_EQ(CostOf(Shaw(), problem, K(2)).flops, of_pairs + 3 * 4 * 5 * 2 * 5 * (6 + 7));
  EXPECT_EQ(CostOf(Shaw(), problem, {{"max_distance", "2"}, {"values", "false"}}).flops,
            of_pairs + 3 * 4 * 5 * 2 * 5 * 6);
}

// ---- The backward pass ----

// Returns a layer with tables N(0, 1).
std::unique_ptr<Layer> LayerWithLargeTables(const Problem& problem, const Options& options,
                                            Device device = Device::kCpu) {
  std::unique_ptr<Layer> layer = Shaw().Create(problem, options, device, 1).value();
  NamedTensors tables;
  for (const TensorSpec& spec : layer->parameter_gradients()) {
    tables[spec.name] = Tensor(spec.dtype, spec.shape);
    FillNormal(&tables[spec.name], 3, spec.name);
  }
  EXPECT_TRUE(layer->SetParameters(tables).ok());
  return layer;
}

class ShawBackward : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, ShawBackward, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

void ExpectGradientsOfDefinition(const Problem& problem, const Options& options, Device device) {
  SCOPED_TRACE(problem.ToString() + " " + ToString(options));
  const int64_t keys = problem.kv_tokens;
  const std::unique_ptr<Layer> layer = LayerWithLargeTables(problem, options, device);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  Fill((inputs["key_mask"] = Tensor(DType::kU8, {problem.batch, keys})).view(), 1);
  Fill(Slice(Slice(inputs["key_mask"].view(), 0, problem.batch - 1, 1), 1, 10, 6), 0);
  const NamedTensors g = RandomOutputGradients(*layer, 3);
  EXPECT_EQ(g.size(), 2u);
  const NamedTensors gradients = GradientsOn(device, *layer, ViewsOf(inputs), g).value();
  EXPECT_EQ(gradients.size(), 3 + layer->parameters().size());
  if (device == Device::kCpu) {
    const NamedTensors of_three = GradientsOf(*layer, ViewsOf(inputs), g, /*threads=*/3).value();
    for (const auto& [name, gradient] : gradients) {
      EXPECT_EQ(MaxDifference(gradient.view(), of_three.at(name).view()), 0) << name;
    }
  }
  const auto slopes =
      SlopesOf({&Shaw(), problem, options, &layer->parameters(), &inputs, &g}, gradients);
  ASSERT_TRUE(slopes.ok()) << slopes.status();
  for (const Slope& slope : *slopes) {
    EXPECT_NEAR(slope.of_layer, slope.of_definition, slope.bound) << slope.name;
  }
}

// Where kernels run there are fewer tokens, of one sequence: the simulator takes its time.
TEST_P(ShawBackward, GradientsAreThoseOfTheDefinition) {
  const bool is_cpu = GetParam() == Device::kCpu;
  const int64_t long_tokens = is_cpu ? 150 : 40, short_tokens = is_cpu ? 30 : 12;
  for (bool causal : {false, true}) {
    for (auto [queries, keys] :
         {std::pair{long_tokens, long_tokens}, std::pair{short_tokens, long_tokens},
          std::pair{long_tokens, short_tokens}}) {
      for (const Options& options : {K(0), K(1), K(7), K(is_cpu ? 40 : 17), K(is_cpu ? 200 : 45),
                                     Options{{"per_head", "false"}, {"max_distance", "20"}},
                                     Options{{"values", "false"}, {"max_distance", "5"}}}) {
        Problem problem =
            Problem::SelfAttention(is_cpu ? 2 : 1, is_cpu ? 4 : 2, queries, 12, causal);
        problem.kv_tokens = keys;
        problem.kv_heads = is_cpu ? 2 : 1;
        problem.value_dim = 7;
        ExpectGradientsOfDefinition(problem, options, GetParam());
      }
    }
  }
}

// A table has 6 x 44 queries, which is more than a chunk of its sums, and rows have more channels
// than a warp has lanes.
TEST_P(ShawBackward, SharedTablesOfManyQueriesHaveTheGradientsOfTheDefinition) {
  Problem problem = Problem::SelfAttention(2, 3, 44, 33);
  problem.value_dim = 40;
  ExpectGradientsOfDefinition(problem, {{"per_head", "false"}, {"max_distance", "3"}}, GetParam());
}

TEST(ShawGradients, TablesOfZeroGiveTheGradientsOfDense) {
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 3, 150, 16, causal);
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    const std::unique_ptr<Layer> layer = LayerWithLargeTables(problem, {});
    NamedTensors tables = LargeTables(3, 16, 16, 16);
    for (auto& [name, table] : tables) Fill(table.view(), 0);
    ASSERT_TRUE(layer->SetParameters(tables).ok());
    const std::unique_ptr<Layer> dense =
        dense::Dense().Create(problem, {}, Device::kCpu, /*seed=*/1).value();
    const NamedTensors g = RandomOutputGradients(*layer, 3);
    const NamedTensors ours = GradientsOf(*layer, ViewsOf(inputs), g).value();
    // Elements of the gradients are of order 1, and both sums have the forward pass's errors.
    const NamedTensors of_dense = GradientsOf(*dense, ViewsOf(inputs), g).value();
    for (const auto& [name, expected] : of_dense) {
      EXPECT_LE(MaxDifference(ours.at(name).view(), expected.view()),
                2 * Fp32Bound(inputs.at("v").view()))
          << name;
    }
  }
}

// With k = 0 the output is that of dense attention and the only value vector, whose gradient is so
// the sum of the outputs'.
TEST(ShawGradients, ADistanceOfZeroGivesTheOnlyValueVectorTheSumOfTheOutputsGradients) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 8);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  const std::unique_ptr<Layer> layer = LayerWithLargeTables(problem, K(0));
  NamedTensors g = RandomOutputGradients(*layer, 3);
  g.erase("log_sum_exp");
  const NamedTensors gradients = GradientsOf(*layer, ViewsOf(inputs), g).value();
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t c = 0; c < 8; ++c) {
      double sum = 0;
      for (int64_t n = 0; n < 140; ++n) sum += *g.at("out").view().At<float>(n / 70, h, n % 70, c);
      // Sums of 64 numbers of order 1 in fp32, with errors of random signs, and then in float64.
      EXPECT_NEAR(*gradients.at("value_positions").view().At<float>(h, 0, c), sum,
                  8 * 64 * 0x1p-24);
      // The logit of the only bin is no choice, and so P^K has no gradient.
      EXPECT_NEAR(*gradients.at("key_positions").view().At<float>(h, 0, c), 0, 1e-5);
    }
  }
}

// What padding holds reaches nothing, and it has no gradient; nor has a query that the loss does
// not read.
TEST_P(ShawBackward, PaddingHasNoGradientAndGivesNone) {
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  for (bool causal : {false, true}) {
    const int64_t tokens = GetParam() == Device::kCpu ? 150 : 90;
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 16, causal);
    NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
    Fill((inputs["key_mask"] = Tensor(DType::kU8, {1, tokens})).view(), 1);
    Fill(Slice(inputs["key_mask"].view(), 1, 55, 30), 0);
    const std::unique_ptr<Layer> layer = LayerWithLargeTables(problem, K(9), GetParam());
    NamedTensors g = RandomOutputGradients(*layer, 3);
    for (auto& [name, gradient] : g) Fill(Slice(gradient.view(), 2, 55, 30), 0);
    const auto gradients_with = [&](double padding) {
      for (const char* name : {"q", "k", "v"}) {
        Fill(Slice(inputs[name].view(), 2, 55, 30), padding);
      }
      return GradientsOn(GetParam(), *layer, ViewsOf(inputs), g).value();
    };
    const NamedTensors gradients = gradients_with(0.5);
    for (const char* name : {"q", "k", "v"}) {
      EXPECT_GT(MaxAbs(gradients.at(name).view()), 0.1) << name;
      EXPECT_EQ(MaxAbs(Slice(gradients.at(name).view(), 2, 55, 30)), 0) << name;
    }
    for (const auto& [name, gradient] : gradients_with(kNan)) {
      EXPECT_EQ(MaxDifference(gradient.view(), gradients.at(name).view()), 0) << name;
    }
  }
}

TEST(ShawGradients, CostHasFiveProductsForTwo) {
  Problem problem = Problem::SelfAttention(3, 4, 50, 8, /*causal=*/true);
  const std::unique_ptr<Layer> layer = LayerWithLargeTables(problem, K(2));
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 2);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  EXPECT_EQ(*layer->backward_cost().flops, 2.5 * *layer->cost().flops);
}

}  // namespace
}  // namespace tfb::shaw
