#include "positional/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::rope {
namespace {

const Technique& Rope() { return FindTechnique("rope"); }

NamedTensors RunOwn(const Problem& problem, const Inputs& inputs, const Options& options,
                    Device device = Device::kCpu) {
  return RunTechnique(Rope(), problem, inputs, {options, device}).value();
}

TEST(Rope, AQuarterTurnSwapsTheChannelsOfAPair) {
  // base 1 rotates every pair by the position in radians. Query (1, 0) at position 1 with keys (1,
  // 0) at 0 and 1 gives scores cos 1 and cos 0, over sqrt(2).
  const Problem problem = Problem::SelfAttention(1, 1, 2, 2, /*causal=*/true);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 1);
  for (const char* name : {"q", "k", "v"}) {
    for (int64_t n = 0; n < 4; ++n) inputs[name].span<float>()[n] = n % 2 == 0;
  }
  inputs["v"].span<float>()[0] = 0;
  const NamedTensors out = RunOwn(problem, ViewsOf(inputs), {{"base", "1"}});
  const double a = std::exp(std::cos(1.0) / std::sqrt(2.0)), b = std::exp(1 / std::sqrt(2.0));
  EXPECT_NEAR(*out.at("out").view().At<float>(0, 0, 1, 0), b / (a + b), 1e-6);
}

TEST(Rope, DependsOnDistancesAlone) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16, /*causal=*/true);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
  for (const char* layout : {"interleaved", "half"}) {
    const NamedTensors near = RunOwn(problem, ViewsOf(inputs), {{"layout", layout}});
    const NamedTensors far =
        RunOwn(problem, ViewsOf(inputs), {{"layout", layout}, {"position_offset", "1000000"}});
    // At position 1e6 the tables hold correctly rounded cosines, so that only fp32 arithmetic is
    // left.
    EXPECT_LE(MaxDifference(near.at("out").view(), far.at("out").view()),
              Fp32Bound(inputs.at("v").view()));
  }
}

TEST(Rope, LayoutsAreThePermutationOfEachOther) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
  NamedTensors permuted;
  for (const char* name : {"q", "k"}) {
    permuted[name] = Tensor(DType::kF32, inputs.at(name).shape());
    for (int64_t n = 0; n < inputs.at(name).num_elements(); ++n) {
      const int64_t c = n % 16;  // pair c / 2, member c % 2 goes to channel c / 2 + 8 (c % 2)
      permuted[name].span<float>()[n - c + c / 2 + 8 * (c % 2)] = inputs.at(name).span<float>()[n];
    }
  }
  permuted["v"] = inputs.at("v").Clone();
  const NamedTensors a = RunOwn(problem, ViewsOf(inputs), {});
  const NamedTensors b = RunOwn(problem, ViewsOf(permuted), {{"layout", "half"}});
  EXPECT_LE(MaxDifference(a.at("out").view(), b.at("out").view()), 1e-5);
}

TEST(Rope, AnglesOfAMillionPositionsAreThoseOfFloat64) {
  // There are two tokens of the same vector, in base 10000's first pair: a row sees the scores 1 /
  // sqrt(2) and cos(1) / sqrt(2) at any position. Angles whose difference is off by e change the
  // log-sum-exp by 0.25 e, so that 2e-7 of it are 8e-7 of an angle.
  const Problem problem = Problem::SelfAttention(1, 1, 2, 2);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
  const float rows[] = {1, 0, 1, 0};
  std::copy(rows, rows + 4, inputs["q"].span<float>().begin());
  std::copy(rows, rows + 4, inputs["k"].span<float>().begin());
  for (const int64_t p : {0, 1000, 99999, 999999}) {
    for (const Device device : TestedDevices()) {
      const NamedTensors run =
          RunOwn(problem, ViewsOf(inputs), {{"position_offset", absl::StrCat(p)}}, device);
      const double root = std::sqrt(2.0);
      const double expected = std::log(std::exp(1 / root) + std::exp(std::cos(1.0) / root));
      for (const float lse : run.at("log_sum_exp").span<float>()) {
        EXPECT_NEAR(lse, expected, 2e-7) << p << " " << Name(device);
      }
    }
  }
}

TEST(Rope, OneTokenIsNotTurnedAgainstItself) {
  const Problem problem = Problem::SelfAttention(1, 1, 1, 8);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
  const NamedTensors out = RunOwn(problem, ViewsOf(inputs), {{"position_offset", "77"}});
  EXPECT_EQ(MaxDifference(out.at("out").view(), inputs.at("v").view()), 0);
}

TEST(Rope, MatchesItsDefinitionInPartAndWhole) {
  for (const Options& options :
       {Options{}, Options{{"layout", "half"}}, Options{{"rotary_dims", "8"}, {"layout", "half"}},
        Options{{"rotary_dims", "2"}, {"position_offset", "12345"}}, Options{{"base", "500000"}}}) {
    for (bool causal : {false, true}) {
      Problem problem = Problem::SelfAttention(
          2, 2, 66, 25, causal);  // an odd head_dim leaves its last channel alone
      problem.kv_tokens = causal ? 75 : 50;
      problem.kv_heads = 1;
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
      const NamedTensors expected =
          DefineTechnique(Rope(), problem, ViewsOf(inputs), {options}).value();
      for (const Device device : TestedDevices()) {
        const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), options, device);
        EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                  Fp32Bound(inputs.at("v").view()))
            << ToString(options) << " " << Name(device);
      }
    }
  }
}

TEST(Rope, InSixteenBitsTurnedRowsAreRoundedAsTheDefinitionHasIt) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Options& options : {Options{}, Options{{"layout", "half"}, {"rotary_dims", "8"}}}) {
      const Problem problem = Problem::SelfAttention(1, 2, 100, 16, /*causal=*/true, dtype);
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
      const NamedTensors expected =
          DefineTechnique(Rope(), problem, ViewsOf(inputs), {options}).value();
      for (const Device device : TestedDevices()) {
        const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), options, device);
        // The log-sum-exp is fp32: a single element of a row that is rounded the other way would be
        // visible.
        EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), expected.at("log_sum_exp").view()),
                  2e-6)
            << Name(dtype) << " " << ToString(options) << " " << Name(device);
        EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                  5 * UnitRoundoff(dtype) * MaxAbs(inputs.at("v").view()))
            << Name(dtype) << " " << ToString(options) << " " << Name(device);
      }
    }
  }
}

TEST(Rope, RotaryDimsMustBeEvenAndFit) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 16);
  for (const char* dims : {"3", "18"}) {
    EXPECT_EQ(
        Rope().Create(problem, {{"rotary_dims", dims}}, Device::kCpu, 1).status().message(),
        std::string("rotary_dims is ") + dims + "; allowed are even numbers up to head_dim, 16");
  }
}

// GPT-J, GPT-NeoX and LLaMA of Hugging Face rotated these; the files' metadata say how. Their
// rotated queries and keys go through dense attention; ours go through rope unrotated.
class RopeGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(RopeGolden, AttentionWithTheirTurnedRowsEqualsOurs) {
  const SafetensorsFile golden =
      GoldenFile(std::string("positional/rope/testdata/") + GetParam() + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  const Shape shape = tensors.at("q").shape();
  const Problem problem =
      Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3], /*causal=*/true);
  const Options options = {
      {"layout", golden.metadata.at("layout") == "interleaved" ? "interleaved" : "half"},
      {"rotary_dims", golden.metadata.at("rotary_dim")},
      {"base", golden.metadata.at("base")},
      {"position_offset", golden.metadata.at("position_offset")}};
  const NamedTensors values = RandomInputs({QkvInputs(problem)[2]}, 8);
  NamedTensors theirs, defined;
  const Inputs turned = {{"q", tensors.at("q_rotated").view()},
                         {"k", tensors.at("k_rotated").view()},
                         {"v", values.at("v").view()}};
  ASSERT_TRUE(dense::Dense().Define(problem, {}, {}, turned, {}, &theirs).ok());
  const Inputs plain = {
      {"q", tensors.at("q").view()}, {"k", tensors.at("k").view()}, {"v", values.at("v").view()}};
  ASSERT_TRUE(Rope().Define(problem, options, {}, plain, {}, &defined).ok());
  // At position 1e5 their angle, a product in another order, differs from ours in the last bit: 1e5
  // 2^-53 = 1e-11.
  EXPECT_LE(MaxDifference(defined["out"].view(), theirs["out"].view()), 1e-10);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunOwn(problem, plain, options, device);
    EXPECT_LE(MaxDifference(ours.at("out").view(), theirs["out"].view()),
              Fp32Bound(values.at("v").view()))
        << Name(device);
  }
}

INSTANTIATE_TEST_SUITE_P(Files, RopeGolden,
                         ::testing::Values("interleaved", "interleaved_partial", "half_split",
                                           "half_split_far", "half_split_partial"));

TEST(Rope, CostCountsPairsAndTurnedRows) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 6, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  // There are 15 pairs a head, and 5 rows of 4 heads of queries and 2 heads of keys.
  const double of_pairs = 3 * 4 * 15 * 2 * (6 + 7);
  EXPECT_EQ(CostOf(Rope(), problem).flops, of_pairs + 3 * 5 * (4 + 2) * 3 * 6);
  EXPECT_EQ(CostOf(Rope(), problem, {{"rotary_dims", "2"}}).flops,
            of_pairs + 3 * 5 * (4 + 2) * 3 * 2);
}

}  // namespace
}  // namespace tfb::rope
