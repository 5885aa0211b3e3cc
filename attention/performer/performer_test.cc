#include "attention/performer/performer.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/definition.h"
#include "core/linear/linear_testing.h"
#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::performer {
namespace {

const Technique& Performer() { return FindTechnique("performer"); }

using ::testing::HasSubstr;

constexpr Device kCpu = Device::kCpu;
constexpr const char* kKernels[] = {"softmax", "hyperbolic", "relu"};

NamedTensors Random(const Problem& problem, uint64_t seed = 11) {
  return RandomInputs(QkvInputs(problem), seed);
}
NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    uint64_t seed = 1, int threads = 1) {
  RunRequest request;
  request.options = options;
  request.seed = seed;
  request.threads = threads;
  return RunTechnique(Performer(), problem, ViewsOf(inputs), request).value();
}
NamedTensors Define(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    const DefinitionRequest& definition = {}) {
  RunRequest request;
  request.options = options;
  return DefineTechnique(Performer(), problem, ViewsOf(inputs), request, definition).value();
}
Tensor DrawnW(const Problem& problem, const Options& options, uint64_t seed) {
  return Performer().Create(problem, options, kCpu, seed).value()->parameters().at("w").Clone();
}
NamedTensors With(const char* name, Tensor tensor) {
  NamedTensors tensors;
  tensors[name] = std::move(tensor);
  return tensors;
}

// ---- What it computes ----

TEST(Performer, OneFeatureWeighsEachKeyByItsOwnFeature) {
  // phi(k) = exp(k - k^2 / 2): 1 for key 0, e^(1/2) for key 1, e^0 for key 2; the query's one
  // feature cancels.
  Problem problem = Problem::SelfAttention(1, 1, 3, 1);
  NamedTensors inputs = Random(problem);
  const float keys[] = {0, 1, 2}, values[] = {2, 4, 8};
  std::memcpy(inputs["k"].raw(), keys, sizeof(keys));
  std::memcpy(inputs["v"].raw(), values, sizeof(values));
  Tensor w(DType::kF32, {1, 1});
  w.span<float>()[0] = 1;
  const NamedTensors parameters = With("w", std::move(w));
  RunRequest request;
  request.options = {{"features", "1"}, {"epsilon", "0"}};
  request.parameters = &parameters;
  const double e = std::exp(0.5);
  const NamedTensors run = RunTechnique(Performer(), problem, ViewsOf(inputs), request).value();
  const NamedTensors defined =
      DefineTechnique(Performer(), problem, ViewsOf(inputs), request).value();
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(run.at("out").span<float>()[i], (2 + 4 * e + 8) / (2 + e), 1e-5);
    EXPECT_NEAR(defined.at("out").span<double>()[i], (2 + 4 * e + 8) / (2 + e), 1e-12);
  }
  // For relu, phi(k) = k + 1e-3.
  request.options = {{"features", "1"}, {"kernel", "relu"}};
  const double expected = (1e-3 * 2 + 1.001 * 4 + 2.001 * 8) / (3 + 3e-3);
  Fill(inputs["q"].view(), 1);
  EXPECT_NEAR(
      RunTechnique(Performer(), problem, ViewsOf(inputs), request)->at("out").span<float>()[0],
      expected, 1e-5);
}

std::vector<Options> ManyOptions() {
  std::vector<Options> all;
  for (const char* kernel : kKernels) {
    for (const char* epsilon : {"0", "1e-6", "1e-3"}) {
      all.push_back({{"kernel", kernel}, {"epsilon", epsilon}});
      all.push_back({{"kernel", kernel}, {"epsilon", epsilon}, {"stabilise", "false"}});
      all.push_back({{"kernel", kernel}, {"epsilon", epsilon}, {"key_maximum", "sequence"}});
      all.push_back({{"kernel", kernel}, {"epsilon", epsilon}, {"denominator_epsilon", "1e-3"}});
    }
    all.push_back({{"kernel", kernel}, {"orthogonal", "false"}, {"norms", "sqrt_d"}});
    all.push_back({{"kernel", kernel}, {"per_head", "true"}});
  }
  all.push_back({{"kernel", "relu"}, {"relu_scale", "false"}, {"relu_epsilon", "0"}});
  for (Options& options : all) options["features"] = "40";
  return all;
}

TEST(Performer, LayerEqualsDefinitionUnderEveryOption) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 90, 16, causal);
    problem.kv_heads = 2;
    problem.kv_tokens = 110;
    problem.value_dim = 24;
    NamedTensors inputs = Random(problem);
    Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 110});
    for (int64_t n = 0; n < 220; ++n) mask.span<uint8_t>()[n] = n % 7 != 3;
    for (const Options& options : ManyOptions()) {
      const NamedTensors run = RunOwn(problem, inputs, options);
      const NamedTensors defined = Define(problem, inputs, options);
      EXPECT_LE(MaxDifference(run.at("out").view(), defined.at("out").view()),
                Fp32Bound(inputs["v"].view()))
          << ToString(options);
      EXPECT_LE(MaxDifference(run.at("log_sum_exp").view(), defined.at("log_sum_exp").view()), 2e-5)
          << ToString(options);
    }
  }
}

TEST(Performer, GradientsAreThoseOfTheDefinitionUnderEveryOption) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 40, 8, causal);
    problem.kv_heads = 2;
    problem.kv_tokens = 70;
    problem.value_dim = 12;
    NamedTensors inputs = Random(problem);
    Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 70});
    for (int64_t n = 0; n < 140; ++n) mask.span<uint8_t>()[n] = n % 7 != 3;
    for (const Options& options : ManyOptions()) {
      RunRequest request;
      request.options = options;
      ExpectGradientsOfDefinition(Performer(), problem, inputs, request);
    }
  }
}

TEST(Performer, LargeNormsUnderflowNeitherLayerNorDefinition) {
  // Scores reach some hundreds, far above the range of exp(-|x|^2 / 2) in fp32 (and for the larger
  // in float64).
  for (const double magnitude : {8.0, 40.0}) {
    for (const char* epsilon : {"0", "1e-6"}) {
      for (const bool causal : {false, true}) {
        const Problem problem = Problem::SelfAttention(1, 2, 70, 8, causal);
        NamedTensors inputs = Random(problem);
        for (float& x : inputs["k"].span<float>()) x *= static_cast<float>(magnitude);
        const Options options = {{"features", "64"}, {"epsilon", epsilon}};
        const NamedTensors run = RunOwn(problem, inputs, options);
        const NamedTensors defined = Define(problem, inputs, options);
        // Exponents of size |w| |x| = 8^(3/4) magnitude carry that many roundings of 2^-24, as
        // features do.
        const double bound = magnitude * Fp32Bound(inputs["v"].view());
        EXPECT_LE(MaxDifference(run.at("out").view(), defined.at("out").view()), bound)
            << magnitude << ", epsilon " << epsilon;
      }
    }
  }
}

// Each feature is epsilon.
TEST(Performer, KeysWhoseSquaresAreBeyondFp32WeighTheSame) {
  for (const char* kernel : {"softmax", "hyperbolic"}) {
    for (const char* stabilise : {"false", "true"}) {
      for (const bool causal : {false, true}) {
        const Problem problem = Problem::SelfAttention(1, 2, 70, 8, causal);
        NamedTensors inputs = Random(problem);
        for (float& x : inputs["k"].span<float>()) x = std::copysign(0x1p70f, x);
        const Options options = {{"features", "64"}, {"kernel", kernel}, {"stabilise", stabilise}};
        DefinitionRequest request;
        request.weights = true;
        const NamedTensors run = RunOwn(problem, inputs, options);
        const NamedTensors defined = Define(problem, inputs, options, request);
        for (int64_t i = 0; i < 70; ++i) {
          const double* weights = defined.at("weights").view().At<double>(0, 1, i);
          const double seen = causal ? static_cast<double>(i + 1) : 70;
          for (int64_t j = 0; j < 70; ++j) {
            EXPECT_NEAR(weights[j], !causal || j <= i ? 1 / seen : 0, 1e-12);
          }
        }
        EXPECT_LE(MaxDifference(run.at("out").view(), defined.at("out").view()),
                  Fp32Bound(inputs["v"].view()))
            << ToString(options);
      }
    }
  }
}

TEST(Performer, LargeNormsLeaveTheGradientsThoseOfTheDefinition) {
  for (const double magnitude : {8.0, 40.0}) {
    for (const char* epsilon : {"0", "1e-6"}) {
      for (const bool causal : {false, true}) {
        const Problem problem = Problem::SelfAttention(1, 2, 70, 8, causal);
        NamedTensors inputs = Random(problem);
        for (float& x : inputs["k"].span<float>()) x *= static_cast<float>(magnitude);
        RunRequest request;
        request.options = {{"features", "64"}, {"epsilon", epsilon}};
        ExpectGradientsOfDefinition(Performer(), problem, inputs, request, magnitude);
      }
    }
  }
}

TEST(Performer, DefinitionGivesWeightsAndSingleRows) {
  const Problem problem = Problem::SelfAttention(1, 2, 30, 8, true);
  const NamedTensors inputs = Random(problem);
  const Options options = {{"features", "24"}};
  const std::vector<int64_t> rows = {0, 7, 29};
  DefinitionRequest request;
  request.rows = rows;
  request.weights = true;
  const NamedTensors all = Define(problem, inputs, options);
  const NamedTensors some = Define(problem, inputs, options, request);
  const DoubleTensor v(inputs.at("v").view());
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t r = 0; r < 3; ++r) {
      const double* weights = some.at("weights").view().At<double>(0, h, r);
      double sum = 0, y = 0;
      for (int64_t j = 0; j < 30; ++j) {
        sum += weights[j];
        y += weights[j] * v.Row(0, h, j)[5];
        EXPECT_EQ(weights[j] > 0, j <= rows[r]);
      }
      EXPECT_NEAR(sum, 1, 1e-12);
      EXPECT_NEAR(y, *some.at("out").view().At<double>(0, h, r, 5), 1e-12);
      EXPECT_EQ(*all.at("out").view().At<double>(0, h, rows[r], 5),
                *some.at("out").view().At<double>(0, h, r, 5));
    }
  }
}

TEST(Performer, EqualsPerformerPytorchWithItsMatrix) {
  struct Output {
    const char* tensor;
    bool causal;
    Options options;
  };
  const Options softmax = {{"epsilon", "1e-4"}, {"key_maximum", "sequence"}};
  const Options relu = {{"kernel", "relu"}};
  const auto with = [](Options options, const char* name, const char* value) {
    options[name] = value;
    return options;
  };
  const Options unscaled = with(relu, "relu_scale", "false");
  const std::vector<std::pair<const char*, std::vector<Output>>> files = {
      {"softmax",
       {{"out", false, softmax},
        {"causal_out", true, softmax},
        {"causal_out_cumsum_epsilon", true, with(softmax, "denominator_epsilon", "1e-6")}}},
      {"relu",
       {{"out", false, relu},
        {"causal_out", true, relu},
        {"causal_out_cumsum_epsilon", true, with(relu, "denominator_epsilon", "1e-6")},
        {"unscaled.out", false, unscaled},
        {"unscaled.causal_out", true, unscaled},
        {"unscaled.causal_out_cumsum_epsilon", true,
         with(unscaled, "denominator_epsilon", "1e-6")}}}};
  for (const auto& [name, outputs] : files) {
    const SafetensorsFile file =
        GoldenFile(absl::StrCat("attention/performer/testdata/", name, ".safetensors"));
    const Tensor& w = file.tensors.at("projection");
    const NamedTensors parameters = With("w", w.Clone());
    Inputs inputs;
    for (const char* input : {"q", "k", "v"}) inputs.Set(input, file.tensors.at(input).view());
    const Shape shape = file.tensors.at("q").shape();
    for (const Output& output : outputs) {
      const Problem problem =
          Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3], output.causal);
      RunRequest request;
      request.options = with(output.options, "features", absl::StrCat(w.dim(0)).c_str());
      request.parameters = &parameters;
      const ConstTensorView expected = file.tensors.at(output.tensor).view();
      const NamedTensors run = RunTechnique(Performer(), problem, inputs, request).value();
      const NamedTensors defined = DefineTechnique(Performer(), problem, inputs, request).value();
      EXPECT_LE(MaxDifference(run.at("out").view(), expected), Fp32Bound(inputs.Get("v")))
          << name << output.tensor;
      EXPECT_LE(MaxDifference(defined.at("out").view(), expected), 1e-12) << name << output.tensor;
    }
  }
}

// ---- Invariants ----

TEST(Performer, ConstantValuesComeBack) {
  for (const char* kernel : kKernels) {
    for (const bool causal : {false, true}) {
      const Problem problem = Problem::SelfAttention(1, 2, 150, 16, causal);
      NamedTensors inputs = Random(problem);
      Fill(inputs["v"].view(), 1);
      const NamedTensors outputs = RunOwn(problem, inputs, {{"kernel", kernel}});
      for (const float y : outputs.at("out").span<float>()) EXPECT_NEAR(y, 1, 2e-6);
    }
  }
}

TEST(Performer, OutputsStayWithinTheHullOfTheValues) {
  for (const char* kernel : kKernels) {
    const Problem problem = Problem::SelfAttention(1, 1, 100, 16, true);
    const NamedTensors inputs = Random(problem);
    const NamedTensors outputs = RunOwn(problem, inputs, {{"kernel", kernel}});
    const ConstTensorView v = inputs.at("v").view();
    for (int64_t c = 0; c < 16; ++c) {
      float low = INFINITY, high = -INFINITY;
      for (int64_t i = 0; i < 100; ++i) {  // the mean of the values up to i
        low = std::min(low, *v.At<float>(0, 0, i, c));
        high = std::max(high, *v.At<float>(0, 0, i, c));
        const float y = *outputs.at("out").view().At<float>(0, 0, i, c);
        EXPECT_GE(y, low - 1e-5);
        EXPECT_LE(y, high + 1e-5);
      }
    }
  }
}

TEST(Performer, WithoutEpsilonTheStabiliserDoesNotMatter) {
  for (const char* kernel : {"softmax", "hyperbolic"}) {
    for (const bool causal : {false, true}) {
      const Problem problem = Problem::SelfAttention(1, 2, 100, 16, causal);
      const NamedTensors inputs = Random(problem);
      const NamedTensors running = RunOwn(problem, inputs, {{"kernel", kernel}, {"epsilon", "0"}});
      for (const Options& other :
           {Options{{"stabilise", "false"}}, Options{{"key_maximum", "sequence"}}}) {
        Options options = other;
        options["kernel"] = kernel;
        options["epsilon"] = "0";
        const NamedTensors outputs = RunOwn(problem, inputs, options);
        EXPECT_LE(MaxDifference(running.at("out").view(), outputs.at("out").view()), 1e-6);
        EXPECT_LE(MaxDifference(running.at("log_sum_exp").view(), outputs.at("log_sum_exp").view()),
                  1e-6);
      }
    }
  }
}

TEST(Performer, NoRowDependsOnLaterTokens) {
  for (const char* kernel : kKernels) {
    const Problem problem = Problem::SelfAttention(1, 2, 130, 16, true);
    NamedTensors inputs = Random(problem);
    const Options options = {{"kernel", kernel}, {"epsilon", "1e-2"}};
    const NamedTensors before = RunOwn(problem, inputs, options);
    const int64_t t = 70;
    for (const char* name : {"q", "k", "v"}) {
      const TensorView later = Slice(inputs[name].view(), 2, t + 1, 129 - t);
      ForEachOffset(later, later, [&](int64_t a, int64_t) { later.Set(a, 7 * later.Get(a) + 3); });
    }
    const NamedTensors after = RunOwn(problem, inputs, options);
    const auto until_t = [&](const NamedTensors& outputs) {
      return Slice(outputs.at("out").view(), 2, 0, t + 1);
    };
    EXPECT_EQ(MaxDifference(until_t(before), until_t(after)), 0);
  }
}

TEST(Performer, TheLastCausalRowEqualsTheNonCausalOne) {
  for (const char* kernel : kKernels) {
    Problem problem = Problem::SelfAttention(1, 2, 130, 16, true);
    const NamedTensors inputs = Random(problem);
    const NamedTensors causal = RunOwn(problem, inputs, {{"kernel", kernel}});
    problem.causal = false;
    const NamedTensors all = RunOwn(problem, inputs, {{"kernel", kernel}});
    EXPECT_LE(MaxDifference(Slice(causal.at("out").view(), 2, 129, 1),
                            Slice(all.at("out").view(), 2, 129, 1)),
              Fp32Bound(inputs.at("v").view()));
  }
}

TEST(Performer, BitsDoNotDependOnTheNumberOfThreads) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 3, 700, 16, causal);
    const NamedTensors inputs = Random(problem);
    const NamedTensors one = RunOwn(problem, inputs, {}, 1, 1),
                       four = RunOwn(problem, inputs, {}, 1, 4);
    EXPECT_EQ(MaxDifference(one.at("out").view(), four.at("out").view()), 0);
  }
}

// ---- The matrix ----

TEST(Performer, FeaturesAreTheLengthOfPhiWhateverTheKernel) {
  const Problem problem = Problem::SelfAttention(1, 2, 1, 8);
  for (const char* kernel : kKernels) {
    const Tensor w = DrawnW(problem, {{"features", "12"}, {"kernel", kernel}}, 3);
    EXPECT_EQ(w.shape(), (Shape{std::string(kernel) == "hyperbolic" ? 6 : 12, 8}));
  }
  const absl::Status odd =
      Performer().Create(problem, {{"features", "7"}, {"kernel", "hyperbolic"}}, kCpu, 1).status();
  EXPECT_EQ(odd.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(odd.message()), HasSubstr("features is 7"));
  EXPECT_THAT(std::string(odd.message()), HasSubstr("an even number"));
  EXPECT_TRUE(Performer().Create(problem, {{"features", "7"}}, kCpu, 1).ok());
}

TEST(Performer, AHeadWithAMatrixOfItsOwnIsAsIfItWereAlone) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 90, 16, causal);
    problem.kv_heads = 2;
    Problem alone = problem;
    alone.query_heads = 2;
    alone.kv_heads = 1;
    const NamedTensors inputs = Random(problem);
    for (const char* kernel : kKernels) {
      const Options shared = {{"features", "32"}, {"kernel", kernel}};
      Options own = shared;
      own["per_head"] = "true";
      const Tensor w = DrawnW(problem, own, 1);
      ASSERT_EQ(w.dim(0), 2);
      EXPECT_GT(MaxDifference(Slice(w.view(), 0, 0, 1), Slice(w.view(), 0, 1, 1)), 0.1);
      for (int64_t h = 0; h < 2; ++h) {
        Inputs of_head;
        of_head.Set("q", Slice(inputs.at("q").view(), 1, 2 * h, 2));
        for (const char* name : {"k", "v"})
          of_head.Set(name, Slice(inputs.at(name).view(), 1, h, 1));
        Tensor its(DType::kF32, {w.dim(1), w.dim(2)});
        CopyElements(Slice(w.view(), 0, h, 1), SplitAxis(its.view(), 0, 1));
        const NamedTensors parameters = With("w", std::move(its));
        RunRequest request{shared};
        request.parameters = &parameters;
        const NamedTensors expected = DefineTechnique(Performer(), alone, of_head, request).value();
        const auto head = [&](const NamedTensors& outputs) {
          return Slice(outputs.at("out").view(), 1, 2 * h, 2);
        };
        const ConstTensorView out = expected.at("out").view();
        EXPECT_EQ(MaxDifference(head(Define(problem, inputs, own)), out), 0);
        for (const Device device : TestedDevices()) {
          RunRequest on{own, device};
          const NamedTensors ours = RunTechnique(Performer(), problem, ViewsOf(inputs), on).value();
          EXPECT_LE(MaxDifference(head(ours), out), Fp32Bound(inputs.at("v").view()))
              << kernel << " on " << Name(device);
        }
      }
    }
  }
}

TEST(Performer, RowsOfABlockAreOrthogonalAndTheLastBlockIsCutShort) {
  const Problem problem = Problem::SelfAttention(1, 1, 1, 24);
  for (const char* norms : {"chi", "sqrt_d"}) {
    const Tensor w = DrawnW(problem, {{"features", "60"}, {"norms", norms}}, 3);
    const DoubleTensor rows(w.view());
    double chi_square = 0;
    for (int64_t a = 0; a < 60; ++a) {
      chi_square += Dot(rows.Row(a), rows.Row(a), 24);
      for (int64_t b = a / 24 * 24; b < a; ++b)
        EXPECT_NEAR(Dot(rows.Row(a), rows.Row(b), 24), 0, 24e-6);
    }
    // The mean of 60 chi^2(24) has a standard deviation of sqrt(2 24 / 60) = 0.9.
    EXPECT_NEAR(chi_square / 60, 24, std::string(norms) == "chi" ? 4 * 0.9 : 1e-4);
    EXPECT_GT(std::abs(Dot(rows.Row(0), rows.Row(24), 24)),
              1e-3);  // blocks are independent of each other
  }
}

TEST(Performer, FewerFeaturesAreTheFirstOfMore) {
  const Problem problem = Problem::SelfAttention(1, 1, 1, 8);
  const Tensor few = DrawnW(problem, {{"features", "13"}}, 5),
               many = DrawnW(problem, {{"features", "40"}}, 5);
  EXPECT_EQ(std::memcmp(few.raw(), many.raw(), few.bytes()), 0);
}

TEST(Performer, ElementsOfOrthogonalRowsHaveTheMomentsOfGaussians) {
  // The draws must have N(0, 1)'s mean 0, variance 1 and fourth moment 3. 256 seeds x 16 rows x 8
  // channels = 32 K draws, of which rows of a block are dependent: the deviation of the mean is 1 /
  // sqrt(4 K) = 0.016 at worst.
  const Problem problem = Problem::SelfAttention(1, 1, 1, 8);
  double mean = 0, square = 0, fourth = 0, count = 0;
  for (uint64_t seed = 0; seed < 256; ++seed) {
    const Tensor w = DrawnW(problem, {{"features", "16"}}, seed);
    for (const float x : w.span<float>()) {
      mean += x;
      square += x * x;
      fourth += x * x * x * x;
      ++count;
    }
  }
  EXPECT_NEAR(mean / count, 0, 4 * 0.016);
  EXPECT_NEAR(square / count, 1, 4 * 0.016 * std::sqrt(2.0));
  EXPECT_NEAR(fourth / count, 3, 4 * 0.016 * std::sqrt(96.0));
}

TEST(Performer, RedrawGivesEachSetupAMatrixOfItsOwnUntilTheCallerGivesOne) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 8);
  const NamedTensors inputs = Random(problem);
  const auto layer =
      Performer().Create(problem, {{"redraw", "true"}, {"features", "8"}}, kCpu, 9).value();
  const auto w = [&] { return layer->parameters().at("w").Clone(); };
  const auto differs = [](const Tensor& a, const Tensor& b) {
    return MaxDifference(a.view(), b.view()) != 0;
  };
  const Tensor created = w();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  const Tensor first = w();
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  const Tensor second = w();
  EXPECT_FALSE(differs(created, first));
  EXPECT_TRUE(differs(first, second));
  Tensor own(DType::kF32, {8, 8});
  FillNormal(&own, 1, "own");
  ASSERT_TRUE(layer->SetParameters(With("w", own.Clone())).ok());
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  EXPECT_FALSE(differs(own, w()));

  const auto fixed = Performer().Create(problem, {{"features", "8"}}, kCpu, 9).value();
  ASSERT_TRUE(RunLayer(*fixed, ViewsOf(inputs)).ok());
  ASSERT_TRUE(RunLayer(*fixed, ViewsOf(inputs)).ok());
  EXPECT_FALSE(differs(created, fixed->parameters().at("w")));
}

// ---- Laws of the estimator, by Monte Carlo ----

// Estimates of exp(x . y) for `pairs` pairs of scaled vectors x, y: one query and one key each, so
// that the log-sum-exp is the logarithm of phi(x) . phi(y).
class KernelEstimates {
 public:
  KernelEstimates(int64_t pairs, int64_t head_dim, double norm)
      : problem_(Problem::SelfAttention(pairs, 1, 1, head_dim)) {
    inputs_ = Random(problem_);
    const double scale = std::pow(static_cast<double>(head_dim), 0.25);
    for (const char* name : {"q", "k"}) {
      float* rows = inputs_[name].span<float>().data();
      for (int64_t p = 0; p < pairs; ++p) {
        float* row = rows + p * head_dim;
        double square = 0;
        for (int64_t c = 0; c < head_dim; ++c) square += row[c] * row[c];
        for (int64_t c = 0; c < head_dim; ++c)
          row[c] *= static_cast<float>(norm * scale / std::sqrt(square));
      }
    }
    const DoubleTensor q(inputs_["q"].view()), k(inputs_["k"].view());
    for (int64_t p = 0; p < pairs; ++p) {
      const double dot = Dot(q.Row(p, 0, 0), k.Row(p, 0, 0), head_dim) / (scale * scale);
      exact_.push_back(std::exp(dot));
      z_square_.push_back(2 * norm * norm + 2 * dot);
    }
  }
  int64_t pairs() const { return problem_.batch; }
  double exact(int64_t p) const { return exact_[p]; }
  // Returns |x + y|^2.
  double z_square(int64_t p) const { return z_square_[p]; }
  // Returns E (phi . phi - SM)^2 of the softmax features with independent rows.
  double SoftmaxMse(int64_t p, double features) const {
    const double z = z_square_[p];
    return std::exp(z) * exact_[p] * exact_[p] * (1 - std::exp(-z)) / features;
  }
  std::vector<double> Draw(Options options, uint64_t seed) const {
    options["epsilon"] = "0";
    const NamedTensors outputs = RunOwn(problem_, inputs_, options, seed);
    std::vector<double> estimates;
    for (const float lse : outputs.at("log_sum_exp").span<float>())
      estimates.push_back(std::exp(static_cast<double>(lse)));
    return estimates;
  }
  // Returns the mean over seeds and pairs of ((estimate - exact) / exact)^2.
  double RelativeMse(const Options& options, uint64_t seeds) const {
    double sum = 0;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      const std::vector<double> estimates = Draw(options, seed);
      for (int64_t p = 0; p < pairs(); ++p) sum += std::pow(estimates[p] / exact_[p] - 1, 2);
    }
    return sum / static_cast<double>(seeds * pairs());
  }

 private:
  Problem problem_;
  NamedTensors inputs_;
  std::vector<double> exact_, z_square_;
};

struct Moments {
  double sum = 0, square = 0, count = 0;
  void Add(double x) {
    sum += x;
    square += x * x;
    ++count;
  }
  double mean() const { return sum / count; }
  double standard_error() const { return std::sqrt((square / count - mean() * mean()) / count); }
};

TEST(Performer, TheKernelEstimateIsUnbiasedForEachMapAndWayToDraw) {
  const KernelEstimates kernel(4, 8, 0.7);
  for (const char* name : {"softmax", "hyperbolic"}) {
    for (const char* orthogonal : {"false", "true"}) {
      std::vector<Moments> moments(kernel.pairs());
      for (uint64_t seed = 0; seed < 4000; ++seed) {
        const auto estimates =
            kernel.Draw({{"features", "12"}, {"kernel", name}, {"orthogonal", orthogonal}}, seed);
        for (int64_t p = 0; p < kernel.pairs(); ++p) moments[p].Add(estimates[p]);
      }
      for (int64_t p = 0; p < kernel.pairs(); ++p) {
        EXPECT_NEAR(moments[p].mean(), kernel.exact(p), 4 * moments[p].standard_error())
            << name << ", orthogonal " << orthogonal;
        EXPECT_LT(moments[p].standard_error(),
                  0.02 * kernel.exact(p));  // ensures that the line above shows something
      }
    }
  }
}

TEST(Performer, NormsOfSqrtDAreBiased) {
  // |w| = sqrt(d), and w is uniform in direction: E exp(w . z) = 1 + |z|^2 / 2 + (d / (d + 2))
  // |z|^4 / 8 + ..., less than exp(|z|^2 / 2).
  const KernelEstimates kernel(4, 4, 1);
  std::vector<Moments> moments(kernel.pairs());
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    const auto estimates = kernel.Draw({{"features", "12"}, {"norms", "sqrt_d"}}, seed);
    for (int64_t p = 0; p < kernel.pairs(); ++p) moments[p].Add(estimates[p] / kernel.exact(p));
  }
  for (int64_t p = 0; p < kernel.pairs(); ++p) {
    const double z = kernel.z_square(p);
    // The terms are (d z / 4)^n / (n! (d / 2)_n), with d = 4, of E exp(w . z) = 0F1(; d / 2; d
    // |z|^2 / 4).
    double term = 1, expected = 1;
    for (int n = 1; n < 40; ++n) expected += term *= z / (n * (n + 1.0));
    expected *= std::exp(-z / 2);
    EXPECT_NEAR(moments[p].mean(), expected, 4 * moments[p].standard_error());
    EXPECT_LT(expected, 1);
  }
}

TEST(Performer, TheVarianceOfEachMapIsThatOfItsLaw) {
  const KernelEstimates kernel(4, 4, 0.6);
  for (const bool hyperbolic : {false, true}) {
    std::vector<Moments> squares(kernel.pairs());
    for (uint64_t seed = 0; seed < 8000; ++seed) {
      const auto estimates = kernel.Draw({{"features", "16"},
                                          {"orthogonal", "false"},
                                          {"kernel", hyperbolic ? "hyperbolic" : "softmax"}},
                                         seed);
      for (int64_t p = 0; p < kernel.pairs(); ++p)
        squares[p].Add(std::pow(estimates[p] - kernel.exact(p), 2));
    }
    for (int64_t p = 0; p < kernel.pairs(); ++p) {
      double law = kernel.SoftmaxMse(p, 16);
      if (hyperbolic) law *= 1 - std::exp(-kernel.z_square(p));
      EXPECT_NEAR(squares[p].mean(), law, 4 * squares[p].standard_error())
          << "hyperbolic " << hyperbolic;
      EXPECT_LT(squares[p].standard_error(), 0.1 * law);
    }
  }
}

// Returns the slope of log y against log x by least squares.
double Slope(const std::vector<double>& x, const std::vector<double>& y) {
  double mx = 0, my = 0, xy = 0, xx = 0;
  const double n = static_cast<double>(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    mx += std::log(x[i]) / n;
    my += std::log(y[i]) / n;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (std::log(x[i]) - mx) * (std::log(y[i]) - my);
    xx += std::pow(std::log(x[i]) - mx, 2);
  }
  return xy / xx;
}

TEST(Performer, TheErrorOfTheKernelFallsAsOneOverTheFeatures) {
  const KernelEstimates kernel(64, 16, 0.7);
  std::vector<double> features, errors;
  for (const int m : {16, 32, 64, 128, 256, 512}) {
    features.push_back(m);
    errors.push_back(
        kernel.RelativeMse({{"features", absl::StrCat(m)}, {"orthogonal", "false"}}, 64));
  }
  EXPECT_NEAR(Slope(features, errors), -1, 0.1);
}

TEST(Performer, OrthogonalRowsAreNoWorseThanIndependentOnes) {
  const KernelEstimates kernel(64, 16, 0.9);
  for (const char* name : {"softmax", "hyperbolic"}) {
    const double orthogonal = kernel.RelativeMse({{"features", "32"}, {"kernel", name}}, 256);
    const double independent =
        kernel.RelativeMse({{"features", "32"}, {"kernel", name}, {"orthogonal", "false"}}, 256);
    EXPECT_LT(orthogonal, independent) << name;
  }
}

// Returns the mean over seeds of |y - dense|^2 / |dense|^2.
double OutputMse(const Problem& problem, const NamedTensors& inputs, const Options& options,
                 uint64_t seeds) {
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  const auto exact = dense.at("out").span<float>();
  double error = 0, norm = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const NamedTensors outputs = RunOwn(problem, inputs, options, seed);
    const auto estimate = outputs.at("out").span<float>();
    for (size_t n = 0; n < exact.size(); ++n) {
      error += std::pow(estimate[n] - exact[n], 2);
      norm += exact[n] * exact[n];
    }
  }
  return error / norm;
}

TEST(Performer, TheErrorAgainstDenseAttentionFallsAsOneOverTheFeatures) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 64, 16, causal);
    NamedTensors inputs = Random(problem);
    for (const char* name : {"q", "k"}) {
      for (float& x : inputs[name].span<float>()) x *= 0.35f;  // |x|^2 about 1/2 once scaled
    }
    std::vector<double> features, errors;
    for (const int m : {64, 128, 256, 512}) {
      features.push_back(m);
      errors.push_back(OutputMse(problem, inputs, {{"features", absl::StrCat(m)}}, 64));
    }
    EXPECT_NEAR(Slope(features, errors), -1, 0.1) << "causal " << causal;
  }
}

TEST(Performer, TheLogSumExpEstimatesThatOfDenseAttention) {
  const Problem problem = Problem::SelfAttention(1, 2, 64, 16);
  NamedTensors inputs = Random(problem);
  for (const char* name : {"q", "k"}) {
    for (float& x : inputs[name].span<float>()) x *= 0.35f;
  }
  const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
  const NamedTensors outputs = RunOwn(problem, inputs, {{"features", "4096"}});
  EXPECT_LT(MaxDifference(dense.at("log_sum_exp").view(), outputs.at("log_sum_exp").view()), 0.1);
}

// ---- Decoding, cost, registration ----

NamedTensors AppendAll(StreamingLayer& layer, const NamedTensors& inputs,
                       const std::vector<int64_t>& segments) {
  const Problem& problem = layer.problem();
  ThreadPool pool(2);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(2))});
  std::memset(workspace.raw(), 0xFF, workspace.bytes());
  const Execution execution{
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  EXPECT_TRUE(layer.Setup(ViewsOf(inputs), execution).ok());
  NamedTensors outputs = NanOutputs(layer.outputs());
  int64_t begin = 0;
  for (size_t next = 0; begin < problem.query_tokens; ++next) {
    const int64_t tokens = std::min(segments[next % segments.size()], problem.query_tokens - begin);
    Inputs segment;
    for (const auto& [name, tensor] : inputs) {
      segment.Set(name, Slice(tensor.view(), name == "key_mask" ? 1 : 2, begin, tokens));
    }
    Outputs written;
    for (auto& [name, tensor] : outputs) written.Set(name, Slice(tensor.view(), 2, begin, tokens));
    const absl::Status status = layer.Append(segment, written, execution);
    EXPECT_TRUE(status.ok()) << status;
    begin += tokens;
  }
  return outputs;
}

TEST(Performer, AppendingTokensInAnySplitEqualsTheWholeCausalRun) {
  for (const char* kernel : kKernels) {
    Problem problem = Problem::SelfAttention(2, 4, 150, 16, true);
    problem.kv_heads = 2;
    NamedTensors inputs = Random(problem);
    Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 150});
    for (int64_t n = 0; n < 300; ++n) mask.span<uint8_t>()[n] = n % 5 != 0;
    const Options options = {{"kernel", kernel}, {"epsilon", "1e-3"}};
    const NamedTensors whole = RunOwn(problem, inputs, options);
    const auto layer = Performer().Create(problem, options, kCpu, 1).value();
    auto* streaming = dynamic_cast<StreamingLayer*>(layer.get());
    ASSERT_NE(streaming, nullptr);
    for (const auto& segments : std::vector<std::vector<int64_t>>{{1}, {7, 1, 64}, {150}}) {
      const NamedTensors outputs =
          AppendAll(*streaming, inputs, segments);  // Setup resets the earlier stream
      EXPECT_LE(MaxDifference(whole.at("out").view(), outputs.at("out").view()),
                Fp32Bound(inputs["v"].view()));
      EXPECT_LE(MaxDifference(whole.at("log_sum_exp").view(), outputs.at("log_sum_exp").view()),
                2e-5);
    }
  }
}

TEST(Performer, ResetForgetsWhatWasAppendedAndRunLeavesTheStreamAlone) {
  const Problem problem = Problem::SelfAttention(1, 2, 20, 8, true);
  const NamedTensors inputs = Random(problem);
  const auto layer = Performer().Create(problem, {{"features", "16"}}, kCpu, 1).value();
  auto& streaming = dynamic_cast<StreamingLayer&>(*layer);
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(1))});
  const Execution execution{
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  ASSERT_TRUE(layer->Setup(ViewsOf(inputs), execution).ok());
  NamedTensors outputs = NanOutputs(layer->outputs());
  const auto append = [&](int64_t begin, int64_t tokens) {
    Inputs segment;
    for (const auto& [name, tensor] : inputs)
      segment.Set(name, Slice(tensor.view(), 2, begin, tokens));
    ASSERT_TRUE(
        streaming
            .Append(segment, {{"out", Slice(outputs["out"].view(), 2, begin, tokens)}}, execution)
            .ok());
  };
  append(10, 10);
  ASSERT_TRUE(streaming.Reset().ok());
  append(0, 10);
  NamedTensors whole = NanOutputs(layer->outputs());
  ASSERT_TRUE(layer->Run(ViewsOf(inputs), MutableViewsOf(whole), execution).ok());
  append(10, 10);
  EXPECT_LE(MaxDifference(whole.at("out").view(), outputs.at("out").view()),
            Fp32Bound(inputs.at("v").view()));
}

TEST(Performer, OnlyCausalLayersThatLookBackAloneStream) {
  const auto streams = [](bool causal, const Options& options) {
    const auto layer =
        Performer().Create(Problem::SelfAttention(1, 1, 8, 8, causal), options, kCpu, 1).value();
    return dynamic_cast<StreamingLayer*>(layer.get()) != nullptr;
  };
  EXPECT_TRUE(streams(true, {}));
  EXPECT_FALSE(streams(false, {}));
  EXPECT_FALSE(streams(true, {{"key_maximum", "sequence"}}));
}

TEST(Performer, CostCountsTheMultiplyAddsOfTheFormula) {
  for (const bool hyperbolic : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 5, 3, true);
    problem.kv_heads = 2;
    problem.kv_tokens = 4;  // the first query sees no key
    problem.value_dim = 6;
    const int64_t features = 14, rows = hyperbolic ? 7 : 14;
    double flops = 0;
    const auto project = [&] {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < problem.head_dim; ++c) flops += 2;
      }
    };
    const auto values_and_one = [&] {
      for (int64_t f = 0; f < features; ++f) {
        for (int64_t c = 0; c < problem.value_dim + 1; ++c) flops += 2;
      }
    };
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t h = 0; h < problem.kv_heads; ++h) {
        for (int64_t j = 0; j < problem.kv_tokens; ++j) {
          project();
          values_and_one();
        }
      }
      for (int64_t h = 0; h < problem.query_heads; ++h) {
        for (int64_t i = 0; i < problem.query_tokens; ++i) {
          if (i + problem.causal_offset() < 0) continue;
          project();
          values_and_one();
        }
      }
    }
    const auto layer =
        Performer()
            .Create(problem,
                    {{"features", "14"}, {"kernel", hyperbolic ? "hyperbolic" : "softmax"}}, kCpu,
                    1)
            .value();
    EXPECT_EQ(layer->cost().flops, flops);
    EXPECT_EQ(layer->cost().bytes, 4.0 * (2 * 4 * 5 * (3 + 6) + 2 * 2 * 4 * (3 + 6) + rows * 3));
  }
}

TEST(Performer, StatisticsCountRowsWhoseFeaturesMeetNone) {
  // With relu and no epsilon a query and keys of opposite signs share no feature.
  const Problem problem = Problem::SelfAttention(2, 3, 4, 1);
  NamedTensors inputs = Random(problem);
  Fill(inputs["k"].view(), 1);
  const absl::Span<float> queries = inputs["q"].span<float>();
  for (size_t n = 0; n < queries.size(); ++n) queries[n] = n % 2 == 0 ? 1 : -1;
  const auto layer =
      Performer()
          .Create(problem, {{"kernel", "relu"}, {"relu_epsilon", "0"}, {"features", "8"}}, kCpu, 1)
          .value();
  EXPECT_EQ(layer->statistics().count("rows_without_weight"), 0);
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs)).value();
  EXPECT_EQ(layer->statistics().at("rows_without_weight"), 0.5);
  EXPECT_EQ(outputs.at("out").span<float>()[1], 0);
  EXPECT_EQ(outputs.at("log_sum_exp").span<float>()[1], -INFINITY);
}

TEST(Performer, OptionsOutOfRangeAreRefusedWithTheRange) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 8);
  const absl::Status features = Performer().Create(problem, {{"features", "0"}}, kCpu, 1).status();
  EXPECT_EQ(features.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(features.message()), HasSubstr("1 to 65536"));
  EXPECT_FALSE(Performer().Create(problem, {{"kernel", "trig"}}, kCpu, 1).ok());
}

TEST(Performer, ADefinitionWithoutWIsRefused) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 8);
  NamedTensors outputs;
  EXPECT_EQ(Performer().Define(problem, {}, {}, ViewsOf(RandomInputs(QkvInputs(problem), 1)), {},
                               &outputs),
            absl::InvalidArgumentError("parameter w is missing"));
}

}  // namespace
}  // namespace tfb::performer
