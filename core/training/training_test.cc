// Tests the parts of a training step: AdamW, clipping, learning rates and mixed precision.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "core/testing.h"
#include "core/thread_pool.h"
#include "core/training/adamw.h"
#include "core/training/gradients.h"
#include "core/training/learning_rate.h"
#include "core/training/loss_scaler.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

NamedTensors One(const std::string& name, const std::vector<double>& values) {
  NamedTensors tensors;
  tensors[name] = TensorOf(values);
  return tensors;
}

NamedTensors Random(const std::string& name, const Shape& shape, uint64_t seed) {
  NamedTensors tensors;
  tensors[name] = Tensor(DType::kF32, shape);
  FillNormal(&tensors[name], seed, name);
  return tensors;
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// ---- AdamW ----

// In the first step the corrected moments are g and g^2, so that a weight moves by the rate towards
// minus the sign of its gradient, whatever the gradient's size.
TEST(AdamW, TheFirstStepIsTheRateInTheDirectionOfTheSign) {
  NamedTensors parameters = One("w", {1, 1, 1});
  AdamWOptions options;
  options.decay = 0;
  AdamW adam = AdamW::Create(parameters, options).value();
  ThreadPool pool(1);
  ASSERT_TRUE(adam.Step(0.25, One("w", {1e-3, -40, 0}), &parameters, &pool).ok());
  const ConstTensorView w = parameters.at("w").view();
  EXPECT_NEAR(w.Get(0), 0.75, 1e-5);
  EXPECT_NEAR(w.Get(1), 1.25, 1e-6);
  EXPECT_EQ(w.Get(2), 1);
}

TEST(AdamW, TheDecayIsNotOfTheMoments) {
  NamedTensors parameters = One("w", {8, -2});
  AdamWOptions options;
  options.decay = 0.5;
  AdamW adam = AdamW::Create(parameters, options).value();
  ThreadPool pool(1);
  ASSERT_TRUE(adam.Step(0.5, One("w", {0, 0}), &parameters, &pool).ok());
  EXPECT_EQ(parameters.at("w").view().Get(0), 6);
  EXPECT_EQ(parameters.at("w").view().Get(1), -1.5);
  EXPECT_EQ(adam.first_moments().at("w").view().Get(0), 0);
}

TEST(AdamW, AParameterWithoutAGradientStays) {
  NamedTensors parameters = One("w", {1});
  parameters.merge(One("other", {3}));
  AdamW adam = AdamW::Create(parameters).value();
  ThreadPool pool(1);
  ASSERT_TRUE(adam.Step(0.1, One("w", {1}), &parameters, &pool).ok());
  EXPECT_EQ(parameters.at("other").view().Get(0), 3);
  EXPECT_LT(parameters.at("w").view().Get(0), 1);
}

TEST(AdamW, TheBitsDoNotDependOnThreadsAndGoOnFromACheckpoint) {
  const NamedTensors start = Random("w", {301, 43}, 1);
  const auto train = [&](int threads, bool stops) {
    NamedTensors parameters = Random("w", {301, 43}, 1);
    AdamW adam = AdamW::Create(parameters).value();
    ThreadPool pool(threads);
    for (uint64_t step = 0; step < 6; ++step) {
      if (stops && step == 3) {
        AdamW other = AdamW::Create(parameters).value();
        EXPECT_TRUE(other.Restore(adam.steps(), adam.first_moments(), adam.second_moments()).ok());
        adam = std::move(other);
      }
      EXPECT_TRUE(adam.Step(0.01, Random("w", {301, 43}, 10 + step), &parameters, &pool).ok());
    }
    return std::move(parameters.at("w"));
  };
  const Tensor one = train(1, false);
  EXPECT_FALSE(SameBits(one, start.at("w")));
  EXPECT_TRUE(SameBits(one, train(3, false)));
  EXPECT_TRUE(SameBits(one, train(2, true)));
}

TEST(AdamW, WhatDoesNotFitIsRefusedAndChangesNothing) {
  NamedTensors parameters = One("w", {1, 2});
  AdamW adam = AdamW::Create(parameters).value();
  ThreadPool pool(1);
  const auto refused = [&](const NamedTensors& gradients, const std::string& message) {
    EXPECT_EQ(adam.Step(0.1, gradients, &parameters, &pool).ToString(),
              "INVALID_ARGUMENT: " + message);
    EXPECT_EQ(adam.steps(), 0);
    EXPECT_EQ(parameters.at("w").view().Get(0), 1);
  };
  refused(One("v", {1, 2}), "there is no parameter for gradient v");
  refused(One("w", {1}), "gradient w is f32 [1]; expected is f32 [2]");
  refused(One("w", {1, kNan}), "a gradient has numbers that are not finite");
  EXPECT_EQ(adam.Restore(1, One("w", {1}), One("w", {1, 2})).ToString(),
            "INVALID_ARGUMENT: first moment w is f32 [1]; expected is f32 [2]");
  EXPECT_EQ(adam.Restore(1, {}, {}).ToString(),
            "INVALID_ARGUMENT: first moment: 0 tensors; expected are 1");
  AdamWOptions options;
  options.beta2 = 1;
  EXPECT_FALSE(AdamW::Create(parameters, options).ok());
  options = {};
  options.epsilon = 0;
  EXPECT_FALSE(AdamW::Create(parameters, options).ok());
}

// ---- Beside PyTorch ----

TEST(Training, StepsAreThoseOfPyTorch) {
  const SafetensorsFile golden = GoldenFile("core/training/testdata/adamw.safetensors");
  const auto number = [&](const char* name) { return std::stod(golden.metadata.at(name)); };
  AdamWOptions options;
  options.beta1 = number("beta1");
  options.beta2 = number("beta2");
  options.epsilon = number("epsilon");
  options.decay = number("decay");
  NamedTensors parameters;
  for (const char* name : {"w", "b"}) parameters[name] = golden.tensors.at(name).Clone();
  AdamW adam = AdamW::Create(parameters, options).value();
  ThreadPool pool(2);
  const ConstTensorView norms = golden.tensors.at("norms").view();
  bool clipped = false, passed = false;
  for (int64_t step = 0; step < norms.dim(0); ++step) {
    NamedTensors gradients;
    for (const auto& [name, parameter] : parameters) {
      const Tensor& all = golden.tensors.at(name + "_gradients");
      Tensor& own = gradients[name] = Tensor(DType::kF32, parameter.shape());
      const int64_t size = own.num_elements();
      std::copy_n(all.span<float>().data() + step * size, size, own.span<float>().data());
    }
    const double norm = ClipByGlobalNorm(number("most"), &gradients);
    EXPECT_NEAR(norm, norms.Get(step), 1e-12 * norm);
    (norm > number("most") ? clipped : passed) = true;
    const double rate = NoamRate(step + 1, static_cast<int64_t>(number("width")),
                                 static_cast<int64_t>(number("warmup")), number("factor"));
    EXPECT_NEAR(rate, golden.tensors.at("rates").view().Get(step), 1e-15);
    ASSERT_TRUE(adam.Step(rate, gradients, &parameters, &pool).ok());
  }
  EXPECT_TRUE(clipped && passed) << "the file has gradients of one kind alone";
  for (const auto& [name, parameter] : parameters) {
    const auto expect = [&, &name = name](const Tensor& own, const char* suffix) {
      const ConstTensorView theirs = golden.tensors.at(absl::StrCat(name, suffix)).view();
      for (int64_t n = 0; n < own.num_elements(); ++n) {
        EXPECT_NEAR(own.view().Get(n), theirs.Get(n), 2e-6 * std::abs(theirs.Get(n)) + 1e-7)
            << name << suffix << " " << n;
      }
    };
    expect(parameter, "_after");
    expect(adam.first_moments().at(name), "_first");
    expect(adam.second_moments().at(name), "_second");
  }
}

// ---- Clipping ----

TEST(Clipping, ScalesOnlyWhatIsLongerAndLeavesWhatIsNotFinite) {
  NamedTensors gradients = One("a", {3, 0});
  gradients.merge(One("b", {4}));
  EXPECT_EQ(ClipByGlobalNorm(6, &gradients), 5);
  EXPECT_EQ(gradients.at("a").view().Get(0), 3);
  EXPECT_EQ(ClipByGlobalNorm(1, &gradients), 5);
  EXPECT_NEAR(GlobalNorm(gradients), 1, 1e-6);
  EXPECT_NEAR(gradients.at("b").view().Get(0), 0.8, 1e-6);
  NamedTensors broken = One("a", {3, kInfinity});
  EXPECT_EQ(ClipByGlobalNorm(1, &broken), kInfinity);
  EXPECT_EQ(broken.at("a").view().Get(0), 3);
  NamedTensors none;
  EXPECT_EQ(ClipByGlobalNorm(1, &none), 0);
}

// ---- Learning rates ----

TEST(LearningRate, NoamRisesToItsWarmUpAndFallsByTheRoot) {
  EXPECT_NEAR(NoamRate(4000, 512, 4000), 1 / std::sqrt(512.0 * 4000), 1e-12);
  EXPECT_NEAR(NoamRate(2000, 512, 4000), NoamRate(4000, 512, 4000) / 2, 1e-12);
  EXPECT_NEAR(NoamRate(16000, 512, 4000), NoamRate(4000, 512, 4000) / 2, 1e-12);
  EXPECT_EQ(NoamRate(7, 64, 100, 3), 3 * NoamRate(7, 64, 100));
}

TEST(LearningRate, CosineFallsFromTheWarmUpsEndToTheLeast) {
  EXPECT_EQ(CosineRate(1, 4, 12, 8), 2);
  EXPECT_EQ(CosineRate(4, 4, 12, 8), 8);
  EXPECT_NEAR(CosineRate(8, 4, 12, 8, 2), 5, 1e-12);
  EXPECT_EQ(CosineRate(12, 4, 12, 8, 2), 2);
  EXPECT_EQ(CosineRate(99, 4, 12, 8, 2), 2);
  EXPECT_EQ(CosineRate(1, 0, 0, 8), 0);
  EXPECT_EQ(WarmUpRate(1, 0, 8), 8);
}

// ---- Mixed precision ----

TEST(LossScaler, GrowsAfterItsIntervalAndShrinksWithAnOverflow) {
  LossScalerOptions options;
  options.scale = 4;
  options.interval = 2;
  LossScaler scaler = LossScaler::Create(options).value();
  const auto step = [&](double gradient) {
    NamedTensors gradients = One("w", {gradient});
    const bool finite = scaler.Unscale(&gradients);
    return std::pair(finite, gradients.at("w").view().Get(0));
  };
  EXPECT_EQ(step(8), std::pair(true, 2.0));
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_EQ(step(8), std::pair(true, 2.0));
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_EQ(step(kInfinity).first, false);
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_EQ(step(4), std::pair(true, 1.0));
  EXPECT_EQ(scaler.scale(), 4) << "the overflow begins the interval again";
  for (int n = 0; n < 5; ++n) EXPECT_FALSE(step(kNan).first);
  EXPECT_EQ(scaler.scale(), 1) << "the least";
  EXPECT_TRUE(scaler.Restore(16, 1).ok());
  EXPECT_EQ(step(16), std::pair(true, 1.0));
  EXPECT_EQ(scaler.scale(), 32);
  EXPECT_FALSE(scaler.Restore(0.5, 0).ok());
  EXPECT_FALSE(scaler.Restore(16, 2).ok());
}

// 2^-26 is 0 in f16, and a number when it is scaled.
TEST(LossScaler, KeepsGradientsThatF16WouldLose) {
  const double gradient = std::ldexp(1.0, -26);
  LossScaler scaler = LossScaler::Create().value();
  const auto in_f16 = [](double value) {
    return TensorOf({value}).CloneAs(DType::kF16).CloneAs(DType::kF32);
  };
  EXPECT_EQ(in_f16(gradient).view().Get(0), 0);
  NamedTensors gradients;
  gradients["w"] = in_f16(scaler.scale() * gradient);
  EXPECT_TRUE(scaler.Unscale(&gradients));
  EXPECT_EQ(gradients.at("w").view().Get(0), gradient);
}

TEST(MixedPrecision, WeightsAreRoundedAndMastersKeepWhatRoundingLoses) {
  const double step = std::ldexp(1.0, -12);
  NamedTensors masters = One("w", {1});
  for (int n = 0; n < 32; ++n) masters.at("w").span<float>()[0] += static_cast<float>(step);
  EXPECT_EQ(RoundedTo(DType::kBF16, masters).at("w").view().Get(0), 1 + std::ldexp(1.0, -7));
  EXPECT_EQ(RoundedTo(DType::kBF16, One("w", {1 + step})).at("w").view().Get(0), 1)
      << "so that a weight of 16 bits would never have moved";
  EXPECT_EQ(RoundedTo(DType::kF16, One("w", {1 + step})).at("w").view().Get(0), 1);
  EXPECT_EQ(RoundedTo(DType::kF16, masters).at("w").dtype(), DType::kF32);
}

TEST(LossScaler, OptionsOutOfRangeAreRefused) {
  LossScalerOptions options;
  options.scale = 0.5;
  EXPECT_EQ(LossScaler::Create(options).status().ToString(),
            "INVALID_ARGUMENT: scale is 0.5; allowed are numbers from least, 1, on");
  options = {};
  options.growth = 1;
  EXPECT_FALSE(LossScaler::Create(options).ok());
  options = {};
  options.backoff = 1;
  EXPECT_FALSE(LossScaler::Create(options).ok());
  options = {};
  options.interval = 0;
  EXPECT_FALSE(LossScaler::Create(options).ok());
}

}  // namespace
}  // namespace tfb
