#include "attention/hard/hard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

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
  for (const Device device : kHostDevices) {
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
  for (const Device device : kHostDevices) {
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
    for (const Device device : kHostDevices) {
      EXPECT_EQ(Indices(RunOwn(problem, inputs, {{"sample", sample}}, device)),
                (std::vector<int>{2, 2}));
    }
    Fill(inputs["k"].view(), kNan);
    for (const Device device : kHostDevices) {
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
    for (const Device device : kHostDevices) {
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
      const NamedTensors cuda = RunOwn(problem, inputs, options, Device::kSimulator);
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
  for (const Device device : kHostDevices) {
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
      for (const Device device : kHostDevices) {
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
  for (const Device device : kHostDevices) {
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
  for (const bool counts : {true, false}) {
    NamedTensors inputs = Scalars({1}, {0, counts ? -87.3f : -87.4f});
    Fill((inputs["u"] = Tensor(DType::kF32, {1, 1, 1})).view(), 1);
    const Problem problem = ScalarProblem(inputs);
    const std::vector<int> last = {counts ? 1 : 0};
    EXPECT_EQ(Indices(DefineTechnique(Hard(), problem, ViewsOf(inputs), {options}).value()), last);
    for (const Device device : kHostDevices) {
      EXPECT_EQ(Indices(RunOwn(problem, inputs, options, device)), last) << Name(device);
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

TEST(Hard, MoreKeysThanAnIndexCountsAreRefused) {
  Problem problem = Problem::SelfAttention(1, 1, 10, 1);
  problem.kv_tokens = int64_t{1} << 31;
  EXPECT_EQ(Hard().Create(problem, {}, Device::kCpu, 1).status().message(),
            "kv_tokens is 2147483648; allowed are 0 to 2147483647, since the index is i32");
}

}  // namespace
}  // namespace tfb::hard
