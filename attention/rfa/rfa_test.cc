#include "attention/rfa/rfa.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/definition.h"
#include "core/linear/linear_testing.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::rfa {
namespace {

const Technique& Rfa() { return FindTechnique("rfa"); }

using ::testing::HasSubstr;

constexpr Device kCpu = Device::kCpu;

NamedTensors Random(const Problem& problem, uint64_t seed = 11) {
  return RandomInputs(QkvInputs(problem), seed);
}
NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    uint64_t seed = 1, int threads = 1) {
  RunRequest request;
  request.options = options;
  request.seed = seed;
  request.threads = threads;
  return RunTechnique(Rfa(), problem, ViewsOf(inputs), request).value();
}

// Returns gates that have only a bias.
Tensor ConstantGate(const Problem& problem, double gate) {
  Tensor tensor(DType::kF32, {problem.kv_heads, problem.head_dim + 1});
  Fill(tensor.view(), 0);
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    *tensor.view().MutableAt<float>(h, problem.head_dim) =
        static_cast<float>(std::log(gate / (1 - gate)));
  }
  return tensor;
}

// ---- What it computes ----

// There are directions +1 and -1 in one channel, and 16 rows of W that are all w: phi(u) . phi(u')
// = cos(w (u - u')) for gaussian.
class TwoDirections {
 public:
  TwoDirections(const Options& options, double w) : problem_(Problem::SelfAttention(1, 1, 3, 1)) {
    request_.options = options;
    request_.options["features"] = options.count("kernel") > 0 ? "32" : "64";
    inputs_ = Random(problem_);
    const float queries[] = {5, -0.1f, 2}, keys[] = {3, -7, 0.5f}, values[] = {2, 4, 8};
    std::memcpy(inputs_["q"].raw(), queries, sizeof(queries));
    std::memcpy(inputs_["k"].raw(), keys, sizeof(keys));
    std::memcpy(inputs_["v"].raw(), values, sizeof(values));
    Tensor& matrix = parameters_["w"] = Tensor(DType::kF32, {1, 32, 1});
    Fill(matrix.view(), w);
    request_.parameters = &parameters_;
  }
  NamedTensors& parameters() { return parameters_; }
  Problem& problem() { return problem_; }
  void ExpectRows(const std::vector<double>& rows) const {
    for (const Device device : TestedDevices()) {
      RunRequest request = request_;
      request.device = device;
      const auto run = RunTechnique(Rfa(), problem_, ViewsOf(inputs_), request);
      ASSERT_TRUE(run.ok()) << run.status();
      for (int64_t i = 0; i < 3; ++i) EXPECT_NEAR(run->at("out").span<float>()[i], rows[i], 3e-5);
    }
    const auto defined = DefineTechnique(Rfa(), problem_, ViewsOf(inputs_), request_);
    ASSERT_TRUE(defined.ok()) << defined.status();
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_NEAR(defined->at("out").span<double>()[i], rows[i], 1e-6);
  }

 private:
  Problem problem_;
  RunRequest request_;
  NamedTensors inputs_, parameters_;
};

TEST(Rfa, KeysWeighByTheCosineOfWhatTheirDirectionsDiffer) {
  // cos(2 pi / 3) = -1/2: weights 1, -1/2, 1 of the queries 0 and 2, and -1/2, 1, -1/2 of query 1.
  // For query 1 they sum to 0, which the case below is about; pi / 4 gives 1, 0, 1 and 0, 1, 0.
  TwoDirections(Options{}, M_PI / 4).ExpectRows({5, 4, 5});
  // sigma divides the angle.
  TwoDirections({{"sigma", "0.5"}}, M_PI / 8).ExpectRows({5, 4, 5});
  // The weights are 1, 1/2, 1 and 1/2, 1, 1/2.
  TwoDirections(Options{}, M_PI / 6).ExpectRows({12 / 2.5, 9 / 2.0, 12 / 2.5});
}

TEST(Rfa, ArcCosineFeaturesMeetWhereDirectionsAgree) {
  // With max(w u, 0), query 1 has no feature above 0, and so a denominator of 0.
  TwoDirections({{"kernel", "arccos"}}, 0.7).ExpectRows({5, 0, 5});
}

TEST(Rfa, AConstantGateWeighsKeysByItsPowers) {
  TwoDirections three({{"gate", "key"}}, 0);  // all features are sin 0 and cos 0
  three.problem().causal = true;
  three.parameters()["gate"] = ConstantGate(three.problem(), 0.75);
  const double g = 0.75;
  three.ExpectRows({2, (2 * g + 4) / (g + 1), (2 * g * g + 4 * g + 8) / (g * g + g + 1)});
}

TEST(Rfa, GatesThatDifferWeighAKeyByItsOwnAndLaterOnes) {
  TwoDirections three({{"gate", "key"}}, 0);  // all features are sin 0 and cos 0
  three.problem().causal = true;
  Tensor& gate = three.parameters()["gate"] = Tensor(DType::kF32, {1, 2});
  gate.span<float>()[0] = 0.5f;
  gate.span<float>()[1] = 0.25f;
  double g[3];
  const double keys[] = {3, -7, 0.5};
  for (int64_t t = 0; t < 3; ++t) g[t] = 1 / (1 + std::exp(-0.5 * keys[t] - 0.25));
  const auto mean = [](const std::vector<double>& weights) {
    const double values[] = {2, 4, 8};
    double sum = 0, weight = 0;
    for (size_t j = 0; j < weights.size(); ++j) {
      sum += weights[j] * values[j];
      weight += weights[j];
    }
    return sum / weight;
  };
  three.ExpectRows({2, mean({(1 - g[0]) * g[1], 1 - g[1]}),
                    mean({(1 - g[0]) * g[1] * g[2], (1 - g[1]) * g[2], 1 - g[2]})});
}

TEST(Rfa, AVectorWithoutDirectionHasTheFeaturesOfZero) {
  const Problem problem = Problem::SelfAttention(1, 1, 2, 4);
  NamedTensors inputs = Random(problem);
  Fill(inputs["q"].view(), 0);
  std::fill_n(inputs["k"].span<float>().data(), 4, 1e-30f);
  // phi(0) . phi(0) = 1, which with a floor of 1 is the row's weight itself.
  Fill(inputs["v"].view(), 0);
  std::fill_n(inputs["v"].span<float>().data(), 4, 1.0f);
  const NamedTensors outputs = RunOwn(problem, inputs, {{"denominator_floor", "0"}});
  Fill(inputs["k"].view(), 0);
  const NamedTensors zeros = RunOwn(problem, inputs, {{"denominator_floor", "0"}});
  EXPECT_NEAR(zeros.at("out").span<float>()[0], 0.5, 1e-6);
  EXPECT_GT(outputs.at("out").span<float>()[0], 0.5);  // the other key is away from zero
}

std::vector<Options> ManyOptions() {
  std::vector<Options> all;
  for (const char* kernel : {"gaussian", "arccos"}) {
    for (const char* gate : {"none", "key"}) {
      for (const Options& more : std::vector<Options>{{{"sigma", "1"}},
                                                      {{"sigma", "1.7"}, {"orthogonal", "true"}},
                                                      {{"channel_scale", "true"}},
                                                      {{"length_epsilon", "0.1"}},
                                                      {{"gate_bias", "0"}},
                                                      {{"denominator_floor", "0.5"}}}) {
        Options options = more;
        options.insert({{"kernel", kernel}, {"gate", gate}, {"features", "88"}});
        all.push_back(options);
      }
    }
  }
  return all;
}

TEST(Rfa, LayersEqualTheDefinitionUnderEveryOption) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 90, 16, causal);
    problem.kv_heads = 2;
    problem.kv_tokens = 110;
    problem.value_dim = 24;
    NamedTensors inputs = Random(problem);
    Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 110});
    for (int64_t n = 0; n < 220; ++n) mask.span<uint8_t>()[n] = n % 7 != 3;
    for (const Options& options : ManyOptions()) {
      if (!causal && options.at("gate") == "key") continue;
      NamedTensors parameters;
      if (options.count("channel_scale") > 0) {
        Tensor& scale = parameters["channel_scale"] = Tensor(DType::kF32, {2, 16});
        for (int64_t n = 0; n < 32; ++n) scale.span<float>()[n] = 0.5f + 0.03f * n;
      }
      RunRequest request;
      request.options = options;
      request.parameters = &parameters;
      const NamedTensors defined =
          DefineTechnique(Rfa(), problem, ViewsOf(inputs), request).value();
      for (const Device device : TestedDevices()) {
        request.device = device;
        const NamedTensors run = RunTechnique(Rfa(), problem, ViewsOf(inputs), request).value();
        EXPECT_LE(MaxDifference(run.at("out").view(), defined.at("out").view()),
                  Fp32Bound(inputs["v"].view()))
            << ToString(options) << " on " << Name(device);
      }
    }
  }
}

TEST(Rfa, GradientsAreThoseOfTheDefinitionUnderEveryOption) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 40, 8, causal);
    problem.kv_heads = 2;
    problem.kv_tokens = 70;
    problem.value_dim = 12;
    NamedTensors inputs = Random(problem);
    Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 70});
    for (int64_t n = 0; n < 140; ++n) mask.span<uint8_t>()[n] = n % 7 != 3;
    for (const Options& options : ManyOptions()) {
      if (!causal && options.at("gate") == "key") continue;
      NamedTensors parameters;
      if (options.count("channel_scale") > 0) {
        Tensor& scale = parameters["channel_scale"] = Tensor(DType::kF32, {2, 8});
        for (int64_t n = 0; n < 16; ++n) scale.span<float>()[n] = 0.5f + 0.06f * n;
      }
      RunRequest request;
      request.options = options;
      request.parameters = &parameters;
      ExpectGradientsOfDefinition(Rfa(), problem, inputs, request);
    }
  }
}

TEST(Rfa, EqualsTheAuthorsCodeWithItsMatrices) {
  const SafetensorsFile file = GoldenFile("attention/rfa/testdata/gaussian.safetensors");
  const auto& tensors = file.tensors;
  const Shape shape = tensors.at("q").shape();
  NamedTensors parameters;
  for (const char* name : {"w", "channel_scale"}) parameters[name] = tensors.at(name).Clone();
  Tensor mask(DType::kU8, {shape[0], shape[2]});
  for (int64_t n = 0; n < mask.num_elements(); ++n) {
    mask.span<uint8_t>()[n] = tensors.at("padding").view().Get(n) == 0;
  }
  // Rows whose sum the authors' incremental form holds at 1 are left out: the difference is not
  // small.
  const auto compare = [&](const char* name, bool causal, bool padded, bool incremental) {
    const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3], causal);
    Inputs inputs;
    for (const char* input : {"q", "k", "v"}) inputs.Set(input, tensors.at(input).view());
    if (padded) inputs.Set("key_mask", mask.view());
    RunRequest request;
    request.options = {{"features", absl::StrCat(2 * tensors.at("w").dim(1))},
                       {"sigma", "0.8"},
                       {"channel_scale", "true"},
                       {"length_epsilon", "1e-3"}};
    request.parameters = &parameters;
    const NamedTensors run = RunTechnique(Rfa(), problem, inputs, request).value();
    const NamedTensors defined = DefineTechnique(Rfa(), problem, inputs, request).value();
    const ConstTensorView expected = tensors.at(name).view();
    int64_t rows = 0;
    for (int64_t row = 0; row < expected.num_elements() / shape[3]; ++row) {
      if (incremental && tensors.at("incremental_sums").view().Get(row) <= 1) continue;
      ++rows;
      for (int64_t n = row * shape[3]; n < (row + 1) * shape[3]; ++n) {
        EXPECT_NEAR(run.at("out").view().Get(n), expected.Get(n), Fp32Bound(inputs.Get("v")))
            << name << ", row " << row;
        EXPECT_NEAR(defined.at("out").view().Get(n), expected.Get(n), 1e-12)
            << name << ", row " << row;
      }
    }
    EXPECT_GT(rows, 50) << name;
  };
  compare("out", false, false, false);
  compare("padded_out", false, true, false);
  compare("causal_out", true, false, false);
  compare("incremental_out", true, false, true);
}

// ---- Invariants ----

TEST(Rfa, ConstantValuesComeBack) {
  for (const char* kernel : {"gaussian", "arccos"}) {
    for (const char* gate : {"none", "key"}) {
      const Problem problem = Problem::SelfAttention(1, 2, 150, 16, true);
      NamedTensors inputs = Random(problem);
      Fill(inputs["v"].view(), 1);
      const NamedTensors outputs = RunOwn(problem, inputs, {{"kernel", kernel}, {"gate", gate}});
      for (const float y : outputs.at("out").span<float>()) EXPECT_NEAR(y, 1, 1e-5);
    }
  }
}

TEST(Rfa, LengthsOfQueriesAndKeysDoNotMatter) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  NamedTensors inputs = Random(problem);
  const NamedTensors before = RunOwn(problem, inputs, {});
  for (float& x : inputs["q"].span<float>()) x *= 1e-9f;
  for (float& x : inputs["k"].span<float>()) x *= 1e9f;
  const NamedTensors after = RunOwn(problem, inputs, {});
  EXPECT_LE(MaxDifference(before.at("out").view(), after.at("out").view()), 1e-5);
}

TEST(Rfa, NoRowDependsOnLaterTokens) {
  for (const char* gate : {"none", "key"}) {
    const Problem problem = Problem::SelfAttention(1, 2, 130, 16, true);
    NamedTensors inputs = Random(problem);
    const Options options = {{"gate", gate}};
    const NamedTensors before = RunOwn(problem, inputs, options);
    const int64_t t = 70;
    for (const char* name : {"q", "k", "v"}) {
      const TensorView later = Slice(inputs[name].view(), 2, t + 1, 129 - t);
      ForEachOffset(later, later, [&](int64_t a, int64_t) { later.Set(a, 7 * later.Get(a) + 3); });
    }
    const NamedTensors after = RunOwn(problem, inputs, options);
    EXPECT_EQ(MaxDifference(Slice(before.at("out").view(), 2, 0, t + 1),
                            Slice(after.at("out").view(), 2, 0, t + 1)),
              0);
  }
}

TEST(Rfa, TheLastCausalRowEqualsTheNonCausalOne) {
  for (const char* kernel : {"gaussian", "arccos"}) {
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

TEST(Rfa, AGateThatKeepsAlmostAllWeighsKeysAlike) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16, true);
  const NamedTensors inputs = Random(problem);
  NamedTensors parameters;
  parameters["gate"] = ConstantGate(problem, 1 - 1e-6);
  RunRequest request;
  request.options = {{"gate", "key"}, {"denominator_floor", "0"}};
  request.parameters = &parameters;
  const NamedTensors gated = RunTechnique(Rfa(), problem, ViewsOf(inputs), request).value();
  const NamedTensors plain = RunOwn(problem, inputs, {});
  EXPECT_LE(MaxDifference(gated.at("out").view(), plain.at("out").view()), 1e-3);
}

TEST(Rfa, BitsDoNotDependOnTheNumberOfThreads) {
  for (const char* gate : {"none", "key"}) {
    const Problem problem = Problem::SelfAttention(1, 3, 700, 16, true);
    const NamedTensors inputs = Random(problem);
    const NamedTensors one = RunOwn(problem, inputs, {{"gate", gate}}, 1, 1),
                       four = RunOwn(problem, inputs, {{"gate", gate}}, 1, 4);
    EXPECT_EQ(MaxDifference(one.at("out").view(), four.at("out").view()), 0);
  }
}

TEST(Rfa, FewerFeaturesAreTheFirstOfMore) {
  const Problem problem = Problem::SelfAttention(1, 2, 4, 8);
  const auto drawn = [&](const char* features) {
    return Rfa()
        .Create(problem, {{"features", features}}, kCpu, 5)
        .value()
        ->parameters()
        .at("w")
        .Clone();
  };
  const Tensor few = drawn("32"), many = drawn("64");
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(std::memcmp(few.view().At<float>(h), many.view().At<float>(h), 16 * 8 * 4), 0);
  }
  EXPECT_NE(*few.view().At<float>(0), *few.view().At<float>(1));
}

// ---- Laws ----

// Estimates phi(x) . phi(y) for pairs of vectors of a problem with one key a batch row. A floor of
// 1 is not below any |phi . phi|, so that with values of 1 the output is the product itself.
class KernelEstimates {
 public:
  KernelEstimates(int64_t pairs, int64_t head_dim)
      : problem_(Problem::SelfAttention(pairs, 1, 1, head_dim)), inputs_(Random(problem_, 3)) {
    Fill(inputs_["v"].view(), 1);
    const DoubleTensor q(inputs_["q"].view()), k(inputs_["k"].view());
    for (int64_t p = 0; p < pairs; ++p) {
      const double *x = q.Row(p, 0, 0), *y = k.Row(p, 0, 0);
      const double cosine =
          Dot(x, y, head_dim) / std::sqrt(Dot(x, x, head_dim) * Dot(y, y, head_dim));
      squares_.push_back(2 - 2 * cosine);
    }
  }
  int64_t pairs() const { return problem_.batch; }
  double exact(int64_t p, double sigma) const {
    return std::exp(-squares_[p] / (2 * sigma * sigma));
  }
  // Returns E (phi . phi - exact)^2.
  double Mse(int64_t p, double sigma, double features) const {
    return std::pow(1 - std::exp(-squares_[p] / (sigma * sigma)), 2) / features;
  }
  std::vector<double> Draw(Options options, uint64_t seed) const {
    options["denominator_floor"] = "1";
    const NamedTensors outputs = RunOwn(problem_, inputs_, options, seed);
    std::vector<double> estimates;
    for (int64_t p = 0; p < pairs(); ++p) {
      // The denominator's sign, which the floor keeps, is included.
      estimates.push_back(*outputs.at("out").view().At<float>(p, 0, 0, 0));
    }
    return estimates;
  }

 private:
  Problem problem_;
  NamedTensors inputs_;
  std::vector<double> squares_;
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

TEST(Rfa, TheKernelEstimateHasTheMeanAndVarianceOfItsLaw) {
  const KernelEstimates kernel(4, 8);
  for (const double sigma : {1.0, 1.5}) {
    std::vector<Moments> estimates(4), squares(4);
    for (uint64_t seed = 0; seed < 4000; ++seed) {
      const auto drawn = kernel.Draw({{"features", "256"}, {"sigma", absl::StrCat(sigma)}}, seed);
      for (int64_t p = 0; p < 4; ++p) {
        // The estimates are positive here: at 256 features 0 is six deviations away.
        estimates[p].Add(drawn[p]);
        squares[p].Add(std::pow(drawn[p] - kernel.exact(p, sigma), 2));
      }
    }
    for (int64_t p = 0; p < 4; ++p) {
      EXPECT_NEAR(estimates[p].mean(), kernel.exact(p, sigma), 4 * estimates[p].standard_error());
      EXPECT_NEAR(squares[p].mean(), kernel.Mse(p, sigma, 256), 4 * squares[p].standard_error());
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

// Returns queries and keys of length head_dim^(1/4), so that dense attention's scores are u . u'.
NamedTensors OnTheSphere(const Problem& problem) {
  NamedTensors inputs = Random(problem);
  for (const char* name : {"q", "k"}) {
    const auto elements = inputs[name].span<float>();
    for (size_t row = 0; row < elements.size(); row += problem.head_dim) {
      double square = 0;
      for (int64_t c = 0; c < problem.head_dim; ++c) square += std::pow(elements[row + c], 2);
      const double scale = std::pow(problem.head_dim, 0.25) / std::sqrt(square);
      for (int64_t c = 0; c < problem.head_dim; ++c) {
        elements[row + c] = static_cast<float>(elements[row + c] * scale);
      }
    }
  }
  return inputs;
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

TEST(Rfa, TheErrorAgainstDenseAttentionFallsAsOneOverTheFeatures) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 64, 16, causal);
    const NamedTensors inputs = OnTheSphere(problem);
    std::vector<double> features, errors;
    for (const int m : {128, 256, 512, 1024}) {
      features.push_back(m);
      errors.push_back(OutputMse(problem, inputs, {{"features", absl::StrCat(m)}}, 64));
    }
    EXPECT_NEAR(Slope(features, errors), -1, 0.1) << "causal " << causal;
  }
}

TEST(Rfa, OrthogonalRowsAreNoWorseThanIndependentOnes) {
  const Problem problem = Problem::SelfAttention(1, 2, 64, 16);
  const NamedTensors inputs = OnTheSphere(problem);
  EXPECT_LT(OutputMse(problem, inputs, {{"features", "64"}, {"orthogonal", "true"}}, 128),
            OutputMse(problem, inputs, {{"features", "64"}}, 128));
}

// ---- Decoding, cost, statistics, registration ----

TEST(Rfa, AppendingTokensInAnySplitEqualsTheWholeCausalRun) {
  for (const char* kernel : {"gaussian", "arccos"}) {
    for (const char* gate : {"none", "key"}) {
      Problem problem = Problem::SelfAttention(2, 4, 150, 16, true);
      problem.kv_heads = 2;
      NamedTensors inputs = Random(problem);
      Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {2, 150});
      for (int64_t n = 0; n < 300; ++n) mask.span<uint8_t>()[n] = n % 5 != 0;
      const Options options = {{"kernel", kernel}, {"gate", gate}};
      const NamedTensors whole = RunOwn(problem, inputs, options);
      const auto layer = Rfa().Create(problem, options, kCpu, 1).value();
      auto* streaming = dynamic_cast<StreamingLayer*>(layer.get());
      ASSERT_NE(streaming, nullptr);
      ThreadPool pool(2);
      Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(2))});
      const Execution execution{
          &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()),
          nullptr};
      for (const auto& segments : std::vector<std::vector<int64_t>>{{1}, {7, 1, 64}, {150}}) {
        ASSERT_TRUE(layer->Setup(ViewsOf(inputs), execution).ok());
        NamedTensors outputs = NanOutputs(layer->outputs());
        int64_t begin = 0;
        for (size_t next = 0; begin < 150; ++next) {
          const int64_t tokens = std::min(segments[next % segments.size()], 150 - begin);
          Inputs segment;
          for (const auto& [name, tensor] : inputs) {
            segment.Set(name, Slice(tensor.view(), name == "key_mask" ? 1 : 2, begin, tokens));
          }
          const absl::Status status = streaming->Append(
              segment, {{"out", Slice(outputs["out"].view(), 2, begin, tokens)}}, execution);
          ASSERT_TRUE(status.ok()) << status;
          begin += tokens;
        }
        EXPECT_LE(MaxDifference(whole.at("out").view(), outputs.at("out").view()),
                  Fp32Bound(inputs["v"].view()))
            << kernel << " " << gate;
      }
    }
  }
}

TEST(Rfa, StatisticsCountRowsWithoutPositiveWeight) {
  // As in the case by hand, cos(2 pi / 3) = -1/2, so that only key 1 has a negative weight.
  Problem problem = Problem::SelfAttention(1, 1, 2, 1);
  problem.kv_tokens = 1;
  NamedTensors inputs = Random(problem);
  const float queries[] = {1, -1};
  std::memcpy(inputs["q"].raw(), queries, sizeof(queries));
  Fill(inputs["k"].view(), 1);
  NamedTensors parameters;
  Fill((parameters["w"] = Tensor(DType::kF32, {1, 128, 1})).view(), M_PI / 3);
  const auto layer = Rfa().Create(problem, {}, kCpu, 1).value();
  ASSERT_TRUE(layer->SetParameters(parameters).ok());
  EXPECT_EQ(layer->statistics().count("rows_without_weight"), 0);
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs)).value();
  EXPECT_EQ(layer->statistics().at("rows_without_weight"), 0.5);
  // The sign of a sum that is not small is kept.
  EXPECT_NEAR(outputs.at("out").span<float>()[1], inputs["v"].span<float>()[0], 1e-5);
}

TEST(Rfa, CostCountsTheMultiplyAddsOfTheFormula) {
  Problem problem = Problem::SelfAttention(2, 4, 50, 8);
  problem.value_dim = 12;
  const auto flops = [&](const char* kernel) {
    return Rfa()
        .Create(problem, {{"features", "64"}, {"kernel", kernel}}, kCpu, 1)
        .value()
        ->cost()
        .flops.value();
  };
  const double tokens = 2 * 2 * 4 * 50;  // queries and keys of all heads
  EXPECT_EQ(flops("gaussian"), tokens * (2 * 32 * 8 + 2 * 64 * 13));
  EXPECT_EQ(flops("arccos"), tokens * (2 * 64 * 8 + 2 * 64 * 13));
}

TEST(Rfa, OptionsThatDoNotFitAreRefusedWithWhatDoes) {
  const Problem problem = Problem::SelfAttention(1, 1, 4, 8);
  const auto message = [&](const Options& options) {
    const absl::Status status = Rfa().Create(problem, options, kCpu, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message({{"features", "16"}}), HasSubstr("32 to 65536"));
  EXPECT_THAT(message({{"features", "33"}}), HasSubstr("even"));
  EXPECT_THAT(message({{"gate", "key"}}), HasSubstr("causal"));
  EXPECT_THAT(message({{"sigma", "0"}}), HasSubstr("0.05 to 20"));
}

}  // namespace
}  // namespace tfb::rfa
