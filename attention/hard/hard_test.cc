#include "attention/hard/hard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/cpu/kernels.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::hard {
namespace {

const Technique& Hard() { return FindTechnique("hard"); }

const float kNan = std::numeric_limits<float>::quiet_NaN();

NamedTensors Random(const Problem& problem, const Options& options = {}, uint64_t seed = 7) {
  return RandomInputs(Hard().InputSpecs(problem, options).value(), seed);
}

NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options = {},
                    Device device = Device::kCpu) {
  return RunTechnique(Hard(), problem, ViewsOf(inputs), {options, device, 1, nullptr, 2}).value();
}

std::vector<int> Indices(const NamedTensors& outputs) {
  const Tensor& index = outputs.at("index");
  std::vector<int> indices;
  for (int64_t n = 0; n < index.num_elements(); ++n) {
    indices.push_back(static_cast<int>(index.view().Get(n)));
  }
  return indices;
}

// Returns one batch row, one head, one channel: scores are q_i k_j.
NamedTensors Scalars(const std::vector<float>& q, const std::vector<float>& k) {
  NamedTensors inputs;
  const auto set = [&](const char* name, const std::vector<float>& values) {
    inputs[name] = Tensor(DType::kF32, {1, 1, static_cast<int64_t>(values.size()), 1});
    std::copy(values.begin(), values.end(), inputs[name].span<float>().begin());
  };
  set("q", q);
  set("k", k);
  std::vector<float> v(k.size());
  for (size_t j = 0; j < k.size(); ++j) v[j] = 10 + static_cast<float>(j);
  set("v", v);
  return inputs;
}
Problem ScalarProblem(const NamedTensors& inputs, bool causal = false) {
  Problem problem = Problem::SelfAttention(1, 1, inputs.at("q").dim(2), 1, causal);
  problem.kv_tokens = inputs.at("k").dim(2);
  return problem;
}

// ---- The choice ----

TEST(Hard, TakesTheValueOfTheLargestScoreAndOfTiesTheFirst) {
  const NamedTensors inputs = Scalars({1, -1, 0, 2}, {3, 5, -1, 5, -1});
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs = RunOwn(ScalarProblem(inputs), inputs, {}, device);
    EXPECT_EQ(Indices(outputs), (std::vector<int>{1, 2, 0, 1}));
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(outputs.at("out").span<float>()[i], 10 + Indices(outputs)[i]);
    }
  }
}

TEST(Hard, MasksComeBeforeTheChoiceAndARowWithoutKeysIsZero) {
  NamedTensors inputs = Scalars({1, 1, 1, 1}, {1, 9, 3, 2});
  Tensor mask(DType::kU8, {1, 4});
  Fill(mask.view(), 1);
  mask.span<uint8_t>()[0] = mask.span<uint8_t>()[1] = 0;
  inputs["key_mask"] = std::move(mask);
  inputs["k"].span<float>()[1] = kNan;
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(Indices(RunOwn(ScalarProblem(inputs), inputs, {}, device)),
              (std::vector<int>{2, 2, 2, 2}));
    const NamedTensors causal = RunOwn(ScalarProblem(inputs, true), inputs, {}, device);
    EXPECT_EQ(Indices(causal), (std::vector<int>{-1, -1, 2, 2}));
    EXPECT_EQ(causal.at("out").span<float>()[0], 0);
    EXPECT_EQ(causal.at("out").span<float>()[2], 12);
  }
}

// Keys are packed for at most 32 MiB at a time, here four of nine key-value heads of 8 MiB.
TEST(Hard, HeadsWhoseKeysAreMoreThanArePackedAtOnceAreTakenInTurn) {
  Problem problem = Problem::SelfAttention(/*batch=*/3, /*heads=*/6, /*tokens=*/2, 64);
  problem.kv_heads = 3;
  problem.kv_tokens = 32768;
  problem.value_dim = 1;
  NamedTensors inputs;
  inputs["q"] = Tensor(DType::kF32, {3, 6, 2, 64});
  inputs["k"] = Tensor(DType::kF32, {3, 3, 32768, 64});
  inputs["v"] = Tensor(DType::kF32, {3, 3, 32768, 1});
  for (const char* name : {"k", "v"}) Fill(inputs[name].view(), 0);
  Fill(inputs["q"].view(), 1);
  // Each key-value head has one key whose score is above 0, at a place of its own.
  const auto place = [](int64_t b, int64_t kv_head) { return 1 + 3571 * (3 * b + kv_head); };
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t g = 0; g < 3; ++g) {
      *inputs["k"].view().MutableAt<float>(b, g, place(b, g)) = 1;
      *inputs["v"].view().MutableAt<float>(b, g, place(b, g)) = static_cast<float>(3 * b + g + 1);
    }
  }
  const NamedTensors outputs = RunOwn(problem, inputs);
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t h = 0; h < 6; ++h) {
      for (int64_t i = 0; i < 2; ++i) {
        EXPECT_EQ(*outputs.at("index").view().At<int32_t>(b, h, i), place(b, h / 2))
            << b << ", " << h;
        EXPECT_EQ(*outputs.at("out").view().At<float>(b, h, i), 3 * b + h / 2 + 1);
      }
    }
  }
}

TEST(Hard, AScoreThatIsNoNumberIsNeverChosen) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const char* sample : {"none", "inverse_cdf", "gumbel"}) {
    NamedTensors inputs = Scalars({1, 1}, {kNan, -infinity, -3, kNan});
    const Problem problem = ScalarProblem(inputs);
    NamedTensors noise = Random(problem, {{"sample", sample}});
    for (const char* name : {"u", "g"}) {
      if (noise.count(name) > 0) inputs[name] = std::move(noise[name]);
    }
    for (const Device device : TestedDevices()) {
      EXPECT_EQ(Indices(RunOwn(problem, inputs, {{"sample", sample}}, device)),
                (std::vector<int>{2, 2}));
    }
    Fill(inputs["k"].view(), kNan);
    for (const Device device : TestedDevices()) {
      EXPECT_EQ(Indices(RunOwn(problem, inputs, {{"sample", sample}}, device)),
                (std::vector<int>{-1, -1}));
    }
  }
}

TEST(Hard, EveryRowIsARowOfTheValuesBitByBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Problem problem = Problem::SelfAttention(2, 4, 70, 16, true, dtype);
    problem.kv_heads = 2;
    problem.value_dim = 5;
    NamedTensors inputs = Random(problem);
    // The bits are those of a signalling NaN, which a conversion would change.
    const size_t size = static_cast<size_t>(SizeOf(dtype));
    const uint32_t nan = dtype == DType::kF32    ? 0x7F800001u
                         : dtype == DType::kBF16 ? 0x7F81u
                                                 : 0x7C01u;
    std::memcpy(inputs["v"].raw(), &nan, size);
    for (const Device device : TestedDevices()) {
      const NamedTensors outputs = RunOwn(problem, inputs, {}, device);
      const std::vector<int> indices = Indices(outputs);
      const char* out = static_cast<const char*>(outputs.at("out").raw());
      const char* v = static_cast<const char*>(inputs.at("v").raw());
      for (size_t row = 0; row < indices.size(); ++row) {
        const int64_t head = static_cast<int64_t>(row) / 70 % 4,
                      b = static_cast<int64_t>(row) / 280;
        const int64_t from = (b * 2 + head / 2) * 70 + indices[row];
        ASSERT_EQ(std::memcmp(out + row * 5 * size, v + from * 5 * size, 5 * size), 0)
            << row << " " << Name(device);
      }
    }
  }
}

TEST(Hard, TheIndexDoesNotChangeWithTheScaleOfTheScores) {
  const Problem problem = Problem::SelfAttention(1, 3, 200, 24, true);
  NamedTensors inputs = Random(problem);
  const std::vector<int> indices = Indices(RunOwn(problem, inputs));
  EXPECT_EQ(Indices(RunOwn(problem, inputs, {{"scale", "7"}})), indices);
  for (float& q : inputs["q"].span<float>()) q *= 0.125f;
  EXPECT_EQ(Indices(RunOwn(problem, inputs)), indices);
}

TEST(Hard, IsTheLimitOfDenseAttentionWithEverLargerScores) {
  const Problem problem = Problem::SelfAttention(1, 2, 90, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors dense =
      RunTechnique(dense::Dense(), problem, ViewsOf(inputs), {{{"scale", "100000"}}}).value();
  const NamedTensors outputs = RunOwn(problem, inputs);
  EXPECT_LE(MaxDifference(outputs.at("out").view(), dense.at("out").view()),
            Fp32Bound(inputs.at("v").view()));
}

// ---- The same choice everywhere ----

// Returns keys that differ by a few roundings, so that the order of the additions decides which is
// largest.
NamedTensors NearTies(const Problem& problem, const Options& options) {
  NamedTensors inputs = Random(problem, options);
  const TensorView k = inputs["k"].view();
  const RandomStream stream(1, "near");
  int64_t n = 0;
  for (int64_t j = 0; j < problem.kv_tokens; ++j) {
    for (int64_t c = 0; c < problem.head_dim; ++c, ++n) {
      *k.MutableAt<float>(0, 0, j, c) =
          *k.At<float>(0, 0, 0, c) * (1 + std::ldexp(static_cast<float>(stream.Bits(n) % 5), -23));
    }
  }
  return inputs;
}

TEST(Hard, CpuAndCudaResolveNearTiesTheSame) {
  if (std::strcmp(BestCpuKernels().name, "generic") == 0) {
    GTEST_SKIP() << "this CPU has no fused multiply-add";
  }
  for (const char* sample : {"none", "gumbel"}) {
    const Options options = {{"sample", sample}};
    for (const int64_t head_dim : {1, 7, 64, 100}) {
      const Problem problem = Problem::SelfAttention(1, 1, 150, head_dim);
      NamedTensors inputs = NearTies(problem, options);
      if (inputs.count("g") > 0) {
        for (float& g : inputs["g"].span<float>()) g *= 1e-6f;
      }
      const NamedTensors cpu = RunOwn(problem, inputs, options);
      const NamedTensors cuda = RunOwn(problem, inputs, options, KernelDevice());
      EXPECT_EQ(Indices(cpu), Indices(cuda)) << sample << ", head_dim " << head_dim;
    }
  }
}

TEST(Hard, NearTiesDependOnTheOrderOfAdditions) {
  // Without this the test above would show nothing: float64 chooses other keys.
  const Problem problem = Problem::SelfAttention(1, 1, 150, 64);
  const NamedTensors inputs = NearTies(problem, {});
  const std::vector<int> cpu = Indices(RunOwn(problem, inputs));
  const std::vector<int> exact = Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs)).value());
  int others = 0;
  for (size_t i = 0; i < cpu.size(); ++i) others += cpu[i] != exact[i];
  EXPECT_GT(others, 15);
}

TEST(Hard, TheDefinitionTakesTheLayersWordForNearTiesOnly) {
  const Problem problem = Problem::SelfAttention(1, 1, 150, 64);
  NamedTensors inputs = NearTies(problem, {});
  const auto defined = [&](const NamedTensors* computed) {
    DefinitionRequest request;
    request.computed = computed;
    return Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs), {}, request).value());
  };
  NamedTensors cpu = RunOwn(problem, inputs);
  EXPECT_EQ(defined(&cpu), Indices(cpu));
  // The definition must not accept a key that is far behind, nor the second of two equal ones.
  const TensorView k = inputs["k"].view();
  for (int64_t c = 0; c < 64; ++c) *k.MutableAt<float>(0, 0, 149, c) *= 0.5f;
  CopyElements(Slice(k, 2, 3, 1), Slice(k, 2, 8, 1));
  for (const int other : {149, 8, 150, -1}) {
    const std::vector<int> own = defined(nullptr);
    for (int& index : cpu["index"].span<int>()) index = other;
    const std::vector<int> choices = defined(&cpu);
    for (size_t i = 0; i < own.size(); ++i) {
      // Half of a key's score is the largest where all are below 0.
      if (other == 149 && own[i] == 149) continue;
      ASSERT_EQ(choices[i], own[i]) << other;
    }
  }
}

// One query q, and key 0, which has the larger score of two. Further channels are 0.
struct NearTie {
  const char* sample;
  const char* scale;
  int64_t head_dim;
  float q, key_0, key_1;
  float g;  // added to both keys
  bool may_take_1;
};

// Returns the key of the definition where a layer took key 1.
int TakenByDefinition(const NearTie& tie) {
  Problem problem = Problem::SelfAttention(1, 1, 1, tie.head_dim);
  problem.kv_tokens = 2;
  problem.value_dim = 5;
  const Options options = {{"sample", tie.sample}, {"scale", tie.scale}};
  NamedTensors inputs = Random(problem, options);
  for (const char* name : {"q", "k"}) Fill(inputs[name].view(), 0);
  inputs["q"].span<float>()[0] = tie.q;
  inputs["k"].span<float>()[0] = tie.key_0;
  inputs["k"].span<float>()[tie.head_dim] = tie.key_1;
  if (inputs.count("g") > 0) Fill(inputs["g"].view(), tie.g);
  NamedTensors computed;
  Fill((computed["index"] = Tensor(DType::kI32, {1, 1, 1})).view(), 1);
  DefinitionRequest request;
  request.computed = &computed;
  return Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs), {options}, request).value())[0];
}

// A score has head_dim + 3 roundings of the magnitude of its terms, and (1 + |k|) 2^-126 for each
// channel where numbers are denormal. Both scores are that far off.
TEST(Hard, TheDefinitionFollowsALayerUpToTheErrorsOfBothScores) {
  const float u = 0x1p-24f, tiny = 0x1p-124f;
  const NearTie ties[] = {{"none", "0", 1, 1, 1, 1 - 7 * u, 0, true},
                          {"none", "0", 1, 1, 1, 1 - 9 * u, 0, false},
                          {"none", "0", 1, -1, -1, -1 + 7 * u, 0, true},
                          {"none", "0", 1, -1, -1, -1 + 9 * u, 0, false},
                          {"none", "0", 2, 1, 1, 1 - 9 * u, 0, true},
                          {"none", "0", 2, 1, 1, 1 - 11 * u, 0, false},
                          // The scale is a factor of the errors, too; it is 1 by default.
                          {"gumbel", "0.5", 1, 1, 1, 1 - 7 * u, 0, true},
                          {"gumbel", "0.5", 1, 1, 1, 1 - 9 * u, 0, false},
                          {"gumbel", "0", 1, 1, 1, 1 - 7 * u, 0, true},
                          {"gumbel", "0", 1, 1, 1, 1 - 9 * u, 0, false},
                          // The noise is a term.
                          {"gumbel", "0", 1, 1, 1, 1 - 15 * u, -1, true},
                          {"gumbel", "0", 1, 1, 1, 1 - 17 * u, -1, false},
                          {"none", "0", 1, tiny, 2, 1, 0, true},
                          {"none", "0", 1, tiny, 2.5, 1, 0, false}};
  for (const NearTie& tie : ties) {
    EXPECT_EQ(TakenByDefinition(tie), tie.may_take_1 ? 1 : 0)
        << tie.sample << ", scale " << tie.scale << ", head_dim " << tie.head_dim << ", " << tie.q
        << " on " << tie.key_0 << " and " << tie.key_1 << ", noise " << tie.g;
  }
}

TEST(Hard, OfEqualKeysTheFirstThatIsSeenIsChosen) {
  const Problem problem = Problem::SelfAttention(2, 2, 140, 16);
  NamedTensors inputs = Random(problem);
  const TensorView k = inputs["k"].view();
  for (int64_t j = 1; j < 140; ++j) CopyElements(Slice(k, 2, 0, 1), Slice(k, 2, j, 1));
  Tensor mask(DType::kU8, {2, 140});
  Fill(mask.view(), 1);
  Fill(Slice(Slice(mask.view(), 0, 1, 1), 1, 0, 67), 0);
  inputs["key_mask"] = std::move(mask);
  for (const Device device : TestedDevices()) {
    const std::vector<int> indices = Indices(RunOwn(problem, inputs, {}, device));
    for (size_t row = 0; row < indices.size(); ++row) {
      ASSERT_EQ(indices[row], row < indices.size() / 2 ? 0 : 67);
    }
  }
}

TEST(Hard, AllDevicesDrawWhatTheDefinitionDraws) {
  for (const char* sample : {"inverse_cdf", "gumbel"}) {
    const Options options = {{"sample", sample}};
    for (const bool causal : {false, true}) {
      Problem problem = Problem::SelfAttention(2, 4, 90, 16, causal);
      problem.kv_heads = 2;
      problem.kv_tokens = 1100;  // several chunks of 512
      NamedTensors inputs = Random(problem, options);
      Tensor mask(DType::kU8, {2, 1100});
      FillUniform(&mask, 3, "mask", 0, 1.99);
      inputs["key_mask"] = std::move(mask);
      const std::vector<int> expected =
          Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs), {options}).value());
      for (const Device device : TestedDevices()) {
        EXPECT_EQ(Indices(RunOwn(problem, inputs, options, device)), expected)
            << sample << (causal ? " causal " : " ") << Name(device);
      }
    }
  }
}

// ---- Sampling ----

TEST(Hard, InverseCdfPassesWeightsFromTheLeftUntilTheyExceedU) {
  // The weights are 1, 2, 0, 5 of 8; the third underflows.
  const std::vector<float> u = {-1, 0, 0.12f, 0.13f, 0.374f, 0.376f, 0.99f, 1, 7, kNan};
  NamedTensors inputs =
      Scalars(std::vector<float>(u.size(), 1), {0, std::log(2.0f), -200, std::log(5.0f)});
  inputs["u"] = Tensor(DType::kF32, {1, 1, static_cast<int64_t>(u.size())});
  std::copy(u.begin(), u.end(), inputs["u"].span<float>().begin());
  const Problem problem = ScalarProblem(inputs);
  const Options options = {{"sample", "inverse_cdf"}};
  const std::vector<int> expected = {0, 0, 0, 1, 1, 3, 3, 3, 3, 3};
  EXPECT_EQ(Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs), {options}).value()),
            expected);
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(Indices(RunOwn(problem, inputs, options, device)), expected) << Name(device);
  }
}

// Four keys of one weight, and u near the boundary between the first two.
TEST(Hard, TheDefinitionFollowsALayersDrawWithin2e5OfTheSum) {
  struct Near {
    float u;
    int computed, drawn;
  };
  const Near draws[] = {{0.250019f, 0, 0}, {0.250021f, 0, 1}, {0.249981f, 1, 1},
                        {0.249979f, 1, 0}, {0.25f, 2, 1},     {0.25f, -1, 1}};
  const NamedTensors scores = Scalars({1}, {0, 0, 0, 0});
  const Problem problem = ScalarProblem(scores);
  for (const Near& draw : draws) {
    Inputs inputs = ViewsOf(scores);
    Tensor u(DType::kF32, {1, 1, 1});
    Fill(u.view(), draw.u);
    inputs.Set("u", u.view());
    NamedTensors computed;
    Fill((computed["index"] = Tensor(DType::kI32, {1, 1, 1})).view(), draw.computed);
    DefinitionRequest request;
    request.computed = &computed;
    const NamedTensors defined =
        DefineTechnique(Hard(), problem, inputs, {{{"sample", "inverse_cdf"}}}, request).value();
    EXPECT_EQ(Indices(defined), std::vector<int>{draw.drawn}) << draw.u << ", " << draw.computed;
  }
}

// A u of 1 draws the last key of a weight above 0.
TEST(Hard, WeightsBelowE87OfTheLargestAreZero) {
  const Options options = {{"sample", "inverse_cdf"}};
  for (const float largest : {0.0f, -300.0f, 300.0f}) {
    for (const bool counts : {true, false}) {
      NamedTensors inputs = Scalars({1}, {largest, largest - (counts ? 87.3f : 87.4f)});
      Fill((inputs["u"] = Tensor(DType::kF32, {1, 1, 1})).view(), 1);
      const Problem problem = ScalarProblem(inputs);
      const std::vector<int> last = {counts ? 1 : 0};
      EXPECT_EQ(Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs), {options}).value()), last)
          << largest;
      for (const Device device : TestedDevices()) {
        EXPECT_EQ(Indices(RunOwn(problem, inputs, options, device)), last)
            << largest << " " << Name(device);
      }
    }
  }
}

// Many draws of one query among few keys.
class Draws {
 public:
  static constexpr int64_t kDraws = 20000;
  static constexpr int64_t kKeys = 8;

  explicit Draws(const std::string& sample, uint64_t seed = 21) {
    const Options options = {{"sample", sample}};
    problem_.query_heads = problem_.kv_heads = 1;
    problem_.query_tokens = kDraws;
    problem_.kv_tokens = kKeys;
    problem_.head_dim = problem_.value_dim = 16;
    inputs_ = Random(problem_, options, seed);
    const NamedTensors common = Random(problem_);
    for (const char* name : {"q", "k", "v"}) inputs_[name] = common.at(name).Clone();
    const TensorView q = inputs_["q"].view();
    for (int64_t i = 1; i < kDraws; ++i) CopyElements(Slice(q, 2, 0, 1), Slice(q, 2, i, 1));
    outputs_ = RunOwn(problem_, inputs_, options);
    counts_.assign(kKeys, 0);
    for (const int j : Indices(outputs_)) ++counts_[j];
  }

  const NamedTensors& outputs() const { return outputs_; }
  const NamedTensors& inputs() const { return inputs_; }
  const std::vector<double>& counts() const { return counts_; }
  // Returns the probabilities of soft attention, for each key.
  std::vector<double> Probabilities() const {
    std::vector<double> p;
    double sum = 0;
    for (int64_t j = 0; j < kKeys; ++j) {
      double score = 0;
      for (int64_t c = 0; c < 16; ++c) {
        score += *inputs_.at("q").view().At<float>(0, 0, 0, c) *
                 *inputs_.at("k").view().At<float>(0, 0, j, c);
      }
      p.push_back(std::exp(score / 4));
      sum += p.back();
    }
    for (double& value : p) value /= sum;
    return p;
  }

 private:
  Problem problem_;
  NamedTensors inputs_, outputs_;
  std::vector<double> counts_;
};

// With 7 degrees of freedom, one in a thousand samples exceeds this.
constexpr double kChiSquare = 24.32;

TEST(Hard, FrequenciesOfDrawsAreTheWeightsOfSoftAttention) {
  for (const char* sample : {"inverse_cdf", "gumbel"}) {
    const Draws draws(sample);
    double chi_square = 0;
    const std::vector<double> p = draws.Probabilities();
    for (int64_t j = 0; j < Draws::kKeys; ++j) {
      const double expected = p[j] * Draws::kDraws;
      EXPECT_GT(expected, 5);
      chi_square += std::pow(draws.counts()[j] - expected, 2) / expected;
    }
    EXPECT_LT(chi_square, kChiSquare) << sample;
  }
}

TEST(Hard, GumbelAndInverseCdfDrawFromOneDistribution) {
  const Draws one("inverse_cdf", 31), other("gumbel", 32);
  double chi_square = 0;
  for (int64_t j = 0; j < Draws::kKeys; ++j) {
    const double difference = one.counts()[j] - other.counts()[j];
    chi_square += difference * difference / (one.counts()[j] + other.counts()[j]);
  }
  EXPECT_LT(chi_square, kChiSquare);
}

TEST(Hard, TheMeanOfDrawsIsSoftAttention) {
  for (const char* sample : {"inverse_cdf", "gumbel"}) {
    const Draws draws(sample);
    const std::vector<double> p = draws.Probabilities();
    for (int64_t c = 0; c < 16; ++c) {
      double soft = 0, square = 0, mean = 0;
      for (int64_t j = 0; j < Draws::kKeys; ++j) {
        const double v = *draws.inputs().at("v").view().At<float>(0, 0, j, c);
        soft += p[j] * v;
        square += p[j] * v * v;
      }
      for (int64_t i = 0; i < Draws::kDraws; ++i) {
        mean += *draws.outputs().at("out").view().At<float>(0, 0, i, c) / Draws::kDraws;
      }
      // The bound is four standard errors.
      EXPECT_NEAR(mean, soft, 4 * std::sqrt((square - soft * soft) / Draws::kDraws)) << sample;
    }
  }
}

// ---- Gradients ----

RunAndGradients Backward(const Problem& problem, const NamedTensors& inputs, const Options& options,
                         const NamedTensors& output_gradients, int threads = 2,
                         Device device = Device::kCpu) {
  return BackwardOfTechnique(Hard(), problem, ViewsOf(inputs), output_gradients,
                             {options, device, 1, nullptr, threads})
      .value();
}

class HardBackward : public testing::TestWithParam<Device> {
 protected:
  static RunAndGradients Backward(const Problem& problem, const NamedTensors& inputs,
                                  const Options& options, const NamedTensors& output_gradients) {
    return hard::Backward(problem, inputs, options, output_gradients, /*threads=*/2, GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, HardBackward, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

// Two tiles of queries and three of keys, of grouped heads, of which one sequence has padding;
// where causal, the first queries see no key.
Problem UnevenProblem(bool causal, DType dtype = DType::kF32, int64_t head_dim = 10,
                      int64_t value_dim = 7) {
  Problem problem = Problem::SelfAttention(2, 4, 90, head_dim, causal, dtype);
  problem.kv_heads = 2;
  problem.value_dim = value_dim;
  problem.kv_tokens = causal ? 75 : 150;
  return problem;
}
NamedTensors UnevenInputs(const Problem& problem, const Options& options) {
  NamedTensors inputs = Random(problem, options);
  Tensor mask(DType::kU8, {2, problem.kv_tokens});
  Fill(mask.view(), 1);
  for (const int64_t j : {0, 3, 66, 74}) mask.span<uint8_t>()[problem.kv_tokens + j] = 0;
  inputs["key_mask"] = std::move(mask);
  return inputs;
}
NamedTensors OutGradient(const Problem& p, uint64_t seed = 5) {
  NamedTensors gradients;
  Tensor& g = gradients["out"] =
      Tensor(p.dtype, {p.batch, p.query_heads, p.query_tokens, p.value_dim});
  FillNormal(&g, seed, "out_gradient");
  return gradients;
}

double Norm(const ConstTensorView& a) { return std::sqrt(SumOfProducts(a, a)); }

TEST_P(HardBackward, AValuesGradientIsTheDefinitionsForTheChoiceMade) {
  for (const char* sample : {"none", "inverse_cdf", "gumbel"}) {
    const Options options = {{"sample", sample}};
    for (const bool causal : {false, true}) {
      const Problem problem = UnevenProblem(causal, DType::kF32, /*head_dim=*/10,
                                            /*value_dim=*/causal ? 67 : 7);
      NamedTensors inputs = UnevenInputs(problem, options);
      const NamedTensors g = OutGradient(problem);
      const RunAndGradients pass = Backward(problem, inputs, options, g);
      inputs["v"] = inputs["v"].CloneAs(DType::kF64);
      DefinitionRequest request;
      request.computed = &pass.outputs;  // the choice
      const Tensor d = RandomDirection(inputs["v"].shape(), /*seed=*/23);
      const double slope = CentralDifference(&inputs["v"], d.view(), [&] {
        const NamedTensors defined =
            DefineTechnique(Hard(), problem, ViewsOf(inputs), {options}, request).value();
        return SumOfProducts(defined.at("out").view(), g.at("out").view());
      });
      // An element is a sum of at most 180 rows of g, of which each rounds once.
      const double bound = 180 * 0x1p-24 * Norm(g.at("out").view());
      EXPECT_NEAR(SumOfProducts(pass.inputs.at("v").view(), d.view()), slope, bound)
          << sample << (causal ? " causal" : "");
    }
  }
}

// The probabilities of the keys of a query by soft attention, in float64.
class SoftRows {
 public:
  SoftRows(const Problem& problem, const NamedTensors& inputs)
      : problem_(problem), inputs_(inputs), scale_(1 / std::sqrt(double(problem.head_dim))) {}

  double Get(const char* name, int64_t b, int64_t h, int64_t i, int64_t c) const {
    const ConstTensorView view = inputs_.at(name).view();
    return view.Get(view.Offset(b, h, i, c));
  }
  bool Sees(int64_t b, int64_t i, int64_t j) const {
    const auto mask = inputs_.find("key_mask");
    const bool is_token = mask == inputs_.end() || *mask->second.view().At<uint8_t>(b, j) != 0;
    return is_token && (!problem_.causal || j <= i + problem_.causal_offset());
  }
  // Returns log p_ij, -inf where the query does not see the key.
  std::vector<double> Logs(int64_t b, int64_t h, int64_t i) const {
    std::vector<double> logs(problem_.kv_tokens, -std::numeric_limits<double>::infinity());
    double sum = 0;
    for (int64_t j = 0; j < problem_.kv_tokens; ++j) {
      if (!Sees(b, i, j)) continue;
      logs[j] = 0;
      for (int64_t c = 0; c < problem_.head_dim; ++c) {
        logs[j] += scale_ * Get("q", b, h, i, c) * Get("k", b, h / problem_.group(), j, c);
      }
      sum += std::exp(logs[j]);
    }
    for (double& log : logs) log -= std::log(sum);
    return logs;
  }
  double scale() const { return scale_; }

 private:
  const Problem& problem_;
  const NamedTensors& inputs_;
  double scale_;
};

// sum_i w_i log p_ij* of one case, and how its derivatives by q or by k vary with errors of terms.
class WeightedLogProbability {
 public:
  WeightedLogProbability(const Problem& problem, const NamedTensors& outputs, const NamedTensors& g,
                         const Tensor& baseline)
      : problem_(problem), outputs_(outputs) {
    for (int64_t row = 0; row < problem.batch * problem.query_heads * problem.query_tokens; ++row) {
      double weight = baseline.span<float>()[row];
      for (int64_t c = 0; c < problem.value_dim; ++c) {
        const int64_t n = row * problem.value_dim + c;
        weight += double(g.at("out").span<float>()[n]) * outputs.at("out").span<float>()[n];
      }
      weights_.push_back(weight);
    }
  }

  double Value(const SoftRows& soft) const {
    double sum = 0;
    ForEach([&](int64_t b, int64_t h, int64_t i, double weight, int64_t chosen) {
      sum += weight * soft.Logs(b, h, i)[chosen];
    });
    return sum;
  }
  // Returns |(sum of magnitudes of terms of element n of the gradient, times d_n)_n|: the deviation
  // of the derivative along d where elements have independent relative errors of deviation 1.
  double Deviation(const SoftRows& soft, const char* by, const Tensor& d) const {
    const bool by_q = by[0] == 'q';
    const Problem& p = problem_;
    Tensor terms(DType::kF64, by_q ? Shape{p.batch, p.query_heads, p.query_tokens, p.head_dim}
                                   : Shape{p.batch, p.kv_heads, p.kv_tokens, p.head_dim});
    Fill(terms.view(), 0);
    ForEach([&](int64_t b, int64_t h, int64_t i, double weight, int64_t chosen) {
      const std::vector<double> logs = soft.Logs(b, h, i);
      const int64_t kv_head = h / p.group();
      for (int64_t j = 0; j < p.kv_tokens; ++j) {
        const double share = (j == chosen ? 1 : 0) + std::exp(logs[j]);
        for (int64_t c = 0; c < p.head_dim; ++c) {
          const double other = by_q ? soft.Get("k", b, kv_head, j, c) : soft.Get("q", b, h, i, c);
          double* term = by_q ? terms.view().MutableAt<double>(b, h, i, c)
                              : terms.view().MutableAt<double>(b, kv_head, j, c);
          *term += std::abs(soft.scale() * weight * share * other);
        }
      }
    });
    for (int64_t n = 0; n < d.num_elements(); ++n) {
      terms.span<double>()[n] *= d.span<double>()[n];
    }
    return Norm(terms.view());
  }

 private:
  template <class Body>
  void ForEach(const Body& body) const {
    const Problem& p = problem_;
    for (int64_t row = 0; row < static_cast<int64_t>(weights_.size()); ++row) {
      const int chosen = outputs_.at("index").span<int32_t>()[row];
      if (chosen < 0) continue;
      body(row / p.query_tokens / p.query_heads, row / p.query_tokens % p.query_heads,
           row % p.query_tokens, weights_[row], chosen);
    }
  }

  const Problem& problem_;
  const NamedTensors& outputs_;
  std::vector<double> weights_;
};

void ExpectGradientsOfWeightedLogProbabilities(const Problem& problem, const Options& options,
                                               Device device) {
  NamedTensors inputs = UnevenInputs(problem, options);
  const NamedTensors g = OutGradient(problem);
  Tensor& baseline = inputs["baseline"] = Tensor(DType::kF32, {2, 4, 90});
  FillNormal(&baseline, 3, "baseline");
  const RunAndGradients pass = Backward(problem, inputs, options, g, /*threads=*/2, device);
  const WeightedLogProbability log_probability(problem, pass.outputs, g, baseline);
  const SoftRows soft(problem, inputs);
  for (const char* by : {"q", "k"}) {
    const Tensor d = RandomDirection(inputs[by].shape(), /*seed=*/23);
    // Three deviations, where sums over weights have the relative error 2e-5 of an output
    // (Fp32Bound).
    const double bound = 3 * 2e-5 * log_probability.Deviation(soft, by, d);
    inputs[by] = inputs[by].CloneAs(DType::kF64);
    const double slope =
        CentralDifference(&inputs[by], d.view(), [&] { return log_probability.Value(soft); });
    EXPECT_NEAR(SumOfProducts(pass.inputs.at(by).view(), d.view()), slope, bound)
        << by << " " << ToString(options) << (problem.causal ? " causal" : "");
  }
}

TEST_P(HardBackward, TheGradientsOfQueriesAndKeysAreThoseOfTheWeightedLogProbabilities) {
  for (const char* sample : {"inverse_cdf", "gumbel"}) {
    for (const bool causal : {false, true}) {
      ExpectGradientsOfWeightedLogProbabilities(UnevenProblem(causal), {{"sample", sample}},
                                                GetParam());
    }
  }
}

// Gradients have 64 channels and 6 more, so that a device makes them in two parts, and values more
// channels than two for each lane.
TEST_P(HardBackward, SoTheyAreOfHeadsThatAreWiderThanATile) {
  ExpectGradientsOfWeightedLogProbabilities(UnevenProblem(true, DType::kF32, 70, 67),
                                            {{"sample", "gumbel"}}, GetParam());
}

// The same small problem in each sequence of a batch, with noise of its own, and with the gradients
// of soft attention in float64 by central differences.
class Estimates {
 public:
  static constexpr int64_t kDraws = 4000;

  Estimates(const std::string& sample, float baseline) : one_(Problem::SelfAttention(1, 2, 3, 4)) {
    const Options options = {{"sample", sample}};
    one_.kv_heads = 1;
    one_.kv_tokens = 5;
    inputs_ = Random(one_);
    g_ = OutGradient(one_);
    Problem all = one_;
    all.batch = kDraws;
    NamedTensors inputs = RandomInputs(Hard().InputSpecs(all, options).value(), /*seed=*/41);
    for (const char* name : {"q", "k", "v"}) {
      inputs[name] = Repeated(inputs_.at(name));
    }
    Fill((inputs["baseline"] = Tensor(DType::kF32, {kDraws, 2, 3})).view(), baseline);
    NamedTensors g;
    g["out"] = Repeated(g_.at("out"));
    gradients_ = Backward(all, inputs, options, g).inputs;
  }

  // Expects that the means of all elements of a gradient are within four standard errors.
  void ExpectUnbiased(const char* name, const std::string& label) const {
    const Tensor& gradient = gradients_.at(name);
    const int64_t size = gradient.num_elements() / kDraws;
    for (int64_t n = 0; n < size; ++n) {
      const double mean = Moment(gradient, n, 0, 1);
      const double error = std::sqrt(Moment(gradient, n, mean, 2) / kDraws);
      EXPECT_GT(error, 0);
      EXPECT_NEAR(mean, OfSoftAttention(name, n), 4 * error) << name << " " << n << " " << label;
    }
  }
  // Returns the sum of the variances of all elements.
  double Variance(const char* name) const {
    const Tensor& gradient = gradients_.at(name);
    double sum = 0;
    for (int64_t n = 0; n < gradient.num_elements() / kDraws; ++n) {
      sum += Moment(gradient, n, Moment(gradient, n, 0, 1), 2);
    }
    return sum;
  }

 private:
  static Tensor Repeated(const Tensor& one) {
    Shape shape = one.shape();
    shape[0] = kDraws;
    Tensor all(one.dtype(), shape);
    for (int64_t n = 0; n < kDraws; ++n) CopyElements(one.view(), Slice(all.view(), 0, n, 1));
    return all;
  }
  // The mean of (x - center)^power over the draws of element n.
  static double Moment(const Tensor& gradient, int64_t n, double center, int power) {
    const int64_t size = gradient.num_elements() / kDraws;
    double sum = 0;
    for (int64_t draw = 0; draw < kDraws; ++draw) {
      sum += std::pow(gradient.span<float>()[draw * size + n] - center, power);
    }
    return sum / kDraws;
  }
  double OfSoftAttention(const char* name, int64_t n) const {
    NamedTensors inputs;
    for (const auto& [input, tensor] : inputs_) inputs[input] = tensor.CloneAs(DType::kF64);
    double& element = inputs[name].span<double>()[n];
    const double at = element, h = 1e-5;
    double loss[2];
    for (const int side : {0, 1}) {
      element = at + (side == 0 ? h : -h);
      const NamedTensors defined = DefineTechnique(dense::Dense(), one_, ViewsOf(inputs)).value();
      loss[side] = SumOfProducts(defined.at("out").view(), g_.at("out").view());
    }
    return (loss[0] - loss[1]) / (2 * h);
  }

  Problem one_;
  NamedTensors inputs_, g_, gradients_;
};

TEST(Hard, AGradientHasTheSameBitsWhereItAloneIsAskedFor) {
  const Problem problem = UnevenProblem(/*causal=*/true);
  RunRequest request{{{"sample", "gumbel"}}};
  const NamedTensors inputs = UnevenInputs(problem, request.options), g = OutGradient(problem);
  const auto gradients = [&] {
    return BackwardOfTechnique(Hard(), problem, ViewsOf(inputs), g, request).value().inputs;
  };
  const NamedTensors all = gradients();
  for (const char* name : {"q", "k", "v"}) {
    request.input_gradients = {name};
    const NamedTensors alone = gradients();
    EXPECT_EQ(alone.size(), 1u);
    EXPECT_GT(MaxAbs(alone.at(name).view()), 0);
    EXPECT_EQ(MaxDifference(alone.at(name).view(), all.at(name).view()), 0) << name;
  }
}

TEST(Hard, TheMeanOfGradientsIsTheGradientOfSoftAttentionWithAnyBaseline) {
  for (const char* sample : {"inverse_cdf", "gumbel"}) {
    for (const float baseline : {0.0f, 0.7f}) {
      const Estimates estimates(sample, baseline);
      for (const char* name : {"q", "k", "v"}) {
        estimates.ExpectUnbiased(name, absl::StrCat(sample, ", baseline ", baseline));
      }
    }
  }
}

TEST(Hard, ABaselineFarFromTheRewardsCostsVariance) {
  const Estimates near("inverse_cdf", 0), far("inverse_cdf", 10);
  EXPECT_GT(far.Variance("q"), 10 * near.Variance("q"));
  EXPECT_EQ(far.Variance("v"), near.Variance("v"));
}

TEST(Hard, WithoutSamplingOnlyValuesHaveAGradient) {
  const Problem problem = UnevenProblem(true);
  const auto layer = Hard().Create(problem, {}, Device::kCpu, 1).value();
  ASSERT_EQ(layer->input_gradients().size(), 1u);
  EXPECT_EQ(layer->input_gradients()[0].name, "v");
  EXPECT_EQ(layer->stopped_gradients().count("q"), 1u);
  EXPECT_EQ(layer->stopped_gradients().count("k"), 1u);
}

TEST_P(HardBackward, PaddingAndRowsWithoutKeysHaveGradientsOfExactlyZeroWhateverTheyHold) {
  const Options options = {{"sample", "gumbel"}};
  const Problem problem = UnevenProblem(true);
  NamedTensors inputs = UnevenInputs(problem, options);
  const NamedTensors g = OutGradient(problem);
  const RunAndGradients before = Backward(problem, inputs, options, g);
  const auto is_padding = [&](int64_t j) {
    return inputs["key_mask"].span<uint8_t>()[problem.kv_tokens + j] == 0;
  };
  for (const char* name : {"k", "v"}) {
    for (int64_t j = 0; j < problem.kv_tokens; ++j) {
      if (is_padding(j)) Fill(Slice(Slice(inputs[name].view(), 0, 1, 1), 2, j, 1), kNan);
    }
  }
  const int64_t empty = -problem.causal_offset();  // queries 0 to empty - 1 see no key
  ASSERT_GT(empty, 0);
  const RunAndGradients after = Backward(problem, inputs, options, g);
  for (const char* name : {"q", "k", "v"}) {
    EXPECT_EQ(MaxDifference(after.inputs.at(name).view(), before.inputs.at(name).view()), 0);
  }
  EXPECT_EQ(MaxAbs(Slice(after.inputs.at("q").view(), 2, 0, empty)), 0);
  EXPECT_GT(MaxAbs(Slice(after.inputs.at("q").view(), 2, empty + 10, 1)), 0);
  for (const char* name : {"k", "v"}) {
    for (int64_t j = 0; j < problem.kv_tokens; ++j) {
      if (!is_padding(j)) continue;
      EXPECT_EQ(MaxAbs(Slice(Slice(after.inputs.at(name).view(), 0, 1, 1), 2, j, 1)), 0);
    }
  }
}

TEST_P(HardBackward, WithoutKeysQueriesHaveNoGradient) {
  Problem problem = Problem::SelfAttention(1, 2, 3, 4);
  problem.kv_tokens = 0;
  for (const char* sample : {"inverse_cdf", "gumbel"}) {
    const Options options = {{"sample", sample}};
    const RunAndGradients pass =
        Backward(problem, Random(problem, options), options, OutGradient(problem));
    EXPECT_EQ(MaxAbs(pass.inputs.at("q").view()), 0);
  }
}

TEST_P(HardBackward, ANanOfAFutureTokenReachesNoGradientOfThePast) {
  const Options options = {{"sample", "gumbel"}};
  for (const int64_t tokens :
       {80, 40}) {  // in a tile beside one of numbers alone, and in the only one
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 8, /*causal=*/true);
    NamedTensors inputs = Random(problem, options);
    NamedTensors g = OutGradient(problem);
    Fill(Slice(g["out"].view(), 2, tokens - 10, 10), 0);  // nothing from the last queries
    const RunAndGradients before = Backward(problem, inputs, options, g);
    // Beside what is not finite, products are added one by one, not by fused multiply-adds. Both
    // round each of an element's 160 terms, of 80 queries of two heads, at most 80 times.
    const double weight = 8 * MaxAbs(g["out"].view()) * MaxAbs(inputs["v"].view());
    const double term = weight * std::max(MaxAbs(inputs["q"].view()), MaxAbs(inputs["k"].view()));
    for (const char* name : {"q", "k", "v"}) {
      Fill(Slice(inputs[name].view(), 2, tokens - 10, 10), kNan);
    }
    const RunAndGradients after = Backward(problem, inputs, options, g);
    for (const char* name : {"q", "k", "v"}) {
      EXPECT_LE(MaxDifference(Slice(after.inputs.at(name).view(), 2, 0, tokens - 10),
                              Slice(before.inputs.at(name).view(), 2, 0, tokens - 10)),
                2 * 80 * 0x1p-24 * 160 * term)
          << tokens << " " << name;
    }
  }
}

TEST_P(HardBackward, ANanGradientOfAQueryReachesOnlyItAndTheKeysThatItSees) {
  const Options options = {{"sample", "gumbel"}};
  const Problem problem = Problem::SelfAttention(1, 2, 80, 8, /*causal=*/true);
  NamedTensors inputs = Random(problem, options), g = OutGradient(problem);
  Fill(Slice(g["out"].view(), 2, 70, 1), kNan);
  const RunAndGradients pass = Backward(problem, inputs, options, g);
  const auto is_finite = [&](const char* name, int64_t begin, int64_t count) {
    const ConstTensorView rows = Slice(pass.inputs.at(name).view(), 2, begin, count);
    return std::isfinite(SumOfProducts(rows, rows));
  };
  EXPECT_TRUE(is_finite("q", 0, 70));
  EXPECT_FALSE(is_finite("q", 70, 1));
  for (const char* name : {"q", "k", "v"}) EXPECT_TRUE(is_finite(name, 71, 9)) << name;
  EXPECT_FALSE(is_finite("k", 70, 1));
}

// Of 16 bits, the gradients are those of the same numbers in fp32, rounded.
TEST_P(HardBackward, GradientsOf16BitsAreThoseOfFp32Rounded) {
  const Options options = {{"sample", "inverse_cdf"}};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const NamedTensors inputs = UnevenInputs(UnevenProblem(true, dtype), options);
    const NamedTensors g = OutGradient(UnevenProblem(true, dtype));
    const auto as_f32 = [](const NamedTensors& tensors) {
      NamedTensors converted;
      for (const auto& [name, tensor] : tensors) {
        const bool is_half = IsFloating(tensor.dtype());
        converted[name] = is_half ? tensor.CloneAs(DType::kF32) : tensor.Clone();
      }
      return converted;
    };
    const RunAndGradients pass = Backward(UnevenProblem(true, dtype), inputs, options, g);
    const RunAndGradients whole = Backward(UnevenProblem(true), as_f32(inputs), options, as_f32(g));
    for (const char* name : {"q", "k", "v"}) {
      EXPECT_EQ(
          MaxDifference(pass.inputs.at(name).view(), whole.inputs.at(name).CloneAs(dtype).view()),
          0)
          << name;
    }
  }
}

// Of 9 key-value heads, of 16 MiB each, two are packed at a time; of one sequence's 3, too.
TEST(Hard, GradientsHaveTheSameBitsAloneAndForAnyNumberOfThreads) {
  const Options options = {{"sample", "inverse_cdf"}};
  Problem problem = Problem::SelfAttention(/*batch=*/3, /*heads=*/6, /*tokens=*/2, 64);
  problem.kv_heads = 3;
  problem.kv_tokens = 32768;
  problem.value_dim = 1;
  const NamedTensors inputs = Random(problem, options), g = OutGradient(problem);
  const RunAndGradients together = Backward(problem, inputs, options, g, 3);
  problem.batch = 1;
  for (int64_t b = 0; b < 3; ++b) {
    const auto of_sequence = [b](const NamedTensors& tensors) {
      NamedTensors own;
      for (const auto& [name, tensor] : tensors) {
        const ConstTensorView view = Slice(tensor.view(), 0, b, 1);
        own[name] = Tensor(view.dtype, view.shape());
        CopyElements(view, own[name].view());
      }
      return own;
    };
    const RunAndGradients alone =
        Backward(problem, of_sequence(inputs), options, of_sequence(g), 1);
    for (const char* name : {"q", "k", "v"}) {
      EXPECT_GT(MaxAbs(alone.inputs.at(name).view()), 0);
      EXPECT_EQ(MaxDifference(alone.inputs.at(name).view(),
                              Slice(together.inputs.at(name).view(), 0, b, 1)),
                0)
          << name << " " << b;
    }
  }
}

// ---- What tools ask ----

TEST(Hard, TheDefinitionsWeightsAreOneAtTheIndex) {
  const Problem problem = Problem::SelfAttention(1, 2, 40, 8, true);
  const NamedTensors inputs = Random(problem);
  DefinitionRequest request;
  request.weights = true;
  const NamedTensors defined =
      DefineTechnique(Hard(), problem, ViewsOf(inputs), {}, request).value();
  const std::vector<int> indices = Indices(defined);
  for (size_t row = 0; row < indices.size(); ++row) {
    for (int64_t j = 0; j < 40; ++j) {
      ASSERT_EQ(defined.at("weights").span<double>()[row * 40 + j], j == indices[row] ? 1 : 0);
    }
  }
}

TEST(Hard, CostCountsOneProductOfEachPair) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 2, /*causal=*/true);
  problem.kv_heads = 2;
  const auto flops = [&](const Options& options) {
    return Hard().Create(problem, options, Device::kCpu, 1).value()->cost();
  };
  EXPECT_EQ(flops({}).flops, 2 * 3 * 4 * 15 * 2);
  const double tensors = 4.0 * 3 * 5 * (2 + 2) * (4 + 2);
  EXPECT_EQ(flops({}).bytes, tensors + 4 * 3 * 4 * 5);
  EXPECT_EQ(flops({{"sample", "gumbel"}}).bytes, tensors + 4 * 3 * 4 * 5 * (1 + 5));
}

TEST(Hard, TheBackwardPassCountsThreeProductsOfEachPairWhereKeysAreDrawn) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 2, /*causal=*/true);
  problem.kv_heads = 2;
  const auto cost = [&](const Options& options) {
    return Hard().Create(problem, options, Device::kCpu, 1).value()->backward_cost();
  };
  const double rows = 3 * 4 * 5, key_rows = 3 * 2 * 5;
  EXPECT_EQ(cost({}).flops, rows * 2);
  EXPECT_EQ(cost({}).bytes, 4 * 2 * (rows + key_rows) + 4 * rows);
  EXPECT_EQ(cost({{"sample", "gumbel"}}).flops, 3 * 2 * 3 * 4 * 15 * 2 + 3 * rows * 2);
  EXPECT_EQ(cost({{"sample", "gumbel"}}).bytes, 4 * 2 * (3 * rows + 4 * key_rows) + 4 * rows);
}

TEST(Hard, MoreKeysThanAnIndexCountsAreRefused) {
  Problem problem = Problem::SelfAttention(1, 1, 10, 1);
  problem.kv_tokens = int64_t{1} << 31;
  EXPECT_EQ(Hard().Create(problem, {}, Device::kCpu, 1).status().message(),
            "kv_tokens is 2147483648; allowed are 0 to 2147483647, since the index is i32");
}

}  // namespace
}  // namespace tfb::hard
