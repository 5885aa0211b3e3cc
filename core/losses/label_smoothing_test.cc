#include "core/losses/label_smoothing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/allocations.h"
#include "core/random.h"
#include "core/safetensors.h"
#include "core/testing.h"
#include "core/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using Spread = LabelSmoothing::Spread;

LabelSmoothing Make(double smoothing, Spread spread) {
  LabelSmoothing options;
  options.smoothing = smoothing;
  options.spread = spread;
  return options;
}

Tensor RandomLogits(int64_t tokens, int64_t classes) {
  Tensor logits(DType::kF32, {tokens, classes});
  FillNormal(&logits, 1, "logits", 0, 3);
  return logits;
}

SmoothedLoss LossOf(const LabelSmoothing& options, const Tensor& logits,
                    const std::vector<int64_t>& labels) {
  const auto loss = SmoothedCrossEntropy(options, logits.view(), labels);
  EXPECT_TRUE(loss.ok()) << loss.status();
  return *loss;
}

TEST(LabelSmoothing, SharesAreThoseOfEachSpread) {
  EXPECT_THAT(SmoothedLabel(Make(0.2, Spread::kAllClasses), 4, 2).value(),
              ElementsAre(0.05, 0.05, DoubleNear(0.85, 1e-15), 0.05));
  const double share = 0.2 / 3;
  EXPECT_THAT(SmoothedLabel(Make(0.2, Spread::kWrongClasses), 4, 2).value(),
              ElementsAre(share, share, 0.8, share));
  EXPECT_THAT(SmoothedLabel(Make(0, Spread::kAllClasses), 3, 0).value(), ElementsAre(1, 0, 0));
  EXPECT_THAT(SmoothedLabel(Make(0, Spread::kWrongClasses), 1, 0).value(), ElementsAre(1));
}

TEST(LabelSmoothing, OneClassIsEnoughToSpreadOver) {
  EXPECT_THAT(SmoothedLabel(Make(0.25, Spread::kWrongClasses), 2, 1).value(),
              ElementsAre(0.25, 0.75));
  EXPECT_THAT(SmoothedLabel(Make(0.25, Spread::kAllClasses), 1, 0).value(), ElementsAre(1));
}

TEST(LabelSmoothing, PaddingThatIsLeftOutHasNoShare) {
  LabelSmoothing options = Make(0.2, Spread::kWrongClasses);
  options.padding = 0;
  options.spread_to_padding = false;
  EXPECT_THAT(SmoothedLabel(options, 4, 2).value(), ElementsAre(0, 0.1, 0.8, 0.1));
  options.spread = Spread::kAllClasses;
  EXPECT_THAT(SmoothedLabel(options, 5, 2).value(),
              ElementsAre(0, 0.05, DoubleNear(0.85, 1e-15), 0.05, 0.05));
  options.spread_to_padding = true;
  EXPECT_THAT(SmoothedLabel(options, 4, 2).value(),
              ElementsAre(0.05, 0.05, DoubleNear(0.85, 1e-15), 0.05));
}

TEST(LabelSmoothing, EveryDistributionSumsToOne) {
  for (const Spread spread : {Spread::kAllClasses, Spread::kWrongClasses}) {
    for (const double smoothing : {0.0, 0.1, 0.9, 1.0}) {
      for (const bool to_padding : {false, true}) {
        LabelSmoothing options = Make(smoothing, spread);
        options.padding = 3;
        options.spread_to_padding = to_padding;
        const std::vector<double> q = SmoothedLabel(options, 7, 5).value();
        EXPECT_NEAR(std::accumulate(q.begin(), q.end(), 0.0), 1, 1e-15);
      }
    }
  }
}

TEST(LabelSmoothing, ALossByHand) {
  // p = 1/2, 1/4, 1/4.
  Tensor logits(DType::kF64, {1, 3});
  const double p[] = {0.5, 0.25, 0.25};
  for (int64_t k = 0; k < 3; ++k) logits.view().Set(k, std::log(p[k]) + 7);
  const double ln2 = std::log(2.0);
  // 0.8 + 0.1 of 1 bit and 2 times 0.05 of 2 bits; 0.8 of 1 bit and 0.2 of 2 bits.
  EXPECT_NEAR(LossOf(Make(0.15, Spread::kAllClasses), logits, {0}).Sum(), (0.9 + 0.2) * ln2, 1e-14);
  LabelSmoothing options = Make(0.2, Spread::kWrongClasses);
  EXPECT_NEAR(LossOf(options, logits, {0}).Sum(), 1.2 * ln2, 1e-14);
  options.subtract_entropy = true;
  EXPECT_NEAR(LossOf(options, logits, {0}).Sum(),
              1.2 * ln2 + 0.8 * std::log(0.8) + 0.2 * std::log(0.1), 1e-14);
}

TEST(LabelSmoothing, WithoutSmoothingItIsTheCrossEntropy) {
  const Tensor logits = RandomLogits(5, 6);
  for (const Spread spread : {Spread::kAllClasses, Spread::kWrongClasses}) {
    const SmoothedLoss loss = LossOf(Make(0, spread), logits, {0, 1, 2, 3, 5});
    const int64_t labels[] = {0, 1, 2, 3, 5};
    for (int64_t t = 0; t < 5; ++t) {
      double sum = 0;
      for (int64_t k = 0; k < 6; ++k) sum += std::exp(logits.view().Get(t * 6 + k));
      EXPECT_NEAR(loss.of_token[t], std::log(sum) - logits.view().Get(t * 6 + labels[t]), 1e-13);
    }
  }
}

TEST(LabelSmoothing, TheSpreadsAgreeWhereTheirSmoothingIsInTheRatioOfTheClasses) {
  const Tensor logits = RandomLogits(5, 8);
  const std::vector<int64_t> labels = {0, 7, 2, 2, 5};
  const SmoothedLoss all = LossOf(Make(0.1, Spread::kAllClasses), logits, labels);
  const SmoothedLoss wrong = LossOf(Make(0.1 * 7 / 8, Spread::kWrongClasses), logits, labels);
  for (size_t t = 0; t < labels.size(); ++t) {
    EXPECT_NEAR(all.of_token[t], wrong.of_token[t], 1e-13);
  }
}

TEST(LabelSmoothing, LessTheEntropyThePredictionOfTheTargetCostsNothing) {
  for (const Spread spread : {Spread::kAllClasses, Spread::kWrongClasses}) {
    LabelSmoothing options = Make(0.3, spread);
    options.subtract_entropy = true;
    const std::vector<double> q = SmoothedLabel(options, 5, 1).value();
    Tensor logits(DType::kF64, {1, 5});
    for (int64_t k = 0; k < 5; ++k) logits.view().Set(k, std::log(q[k]));
    EXPECT_NEAR(LossOf(options, logits, {1}).Sum(), 0, 1e-15);
    logits.view().Set(0, 0.0);
    EXPECT_GT(LossOf(options, logits, {1}).Sum(), 0.01);
  }
}

TEST(LabelSmoothing, TokensOfPaddingAreNotCounted) {
  const Tensor logits = RandomLogits(4, 6);
  LabelSmoothing options = Make(0.1, Spread::kAllClasses);
  const SmoothedLoss of_all = LossOf(options, logits, {1, 0, 3, 0});
  options.padding = 0;
  const SmoothedLoss loss = LossOf(options, logits, {1, 0, 3, 0});
  EXPECT_EQ(loss.tokens, 2);
  EXPECT_THAT(loss.of_token, ElementsAre(of_all.of_token[0], 0, of_all.of_token[2], 0));
  EXPECT_DOUBLE_EQ(loss.Mean(), (of_all.of_token[0] + of_all.of_token[2]) / 2);
  EXPECT_EQ(LossOf(options, RandomLogits(1, 6), {0}).Mean(), 0);
}

TEST(LabelSmoothing, AnImpossibleClassCostsInfinityOnlyWhereItHasAShare) {
  Tensor logits = RandomLogits(1, 4);
  logits.view().Set(3, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(LossOf(Make(0.1, Spread::kAllClasses), logits, {1}).Sum(),
            std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isfinite(LossOf(Make(0, Spread::kAllClasses), logits, {1}).Sum()));
  LabelSmoothing options = Make(0.1, Spread::kAllClasses);
  options.padding = 3;
  options.spread_to_padding = false;
  EXPECT_TRUE(std::isfinite(LossOf(options, logits, {1}).Sum()));
}

TEST(LabelSmoothing, WhatIsOutOfRangeIsRefusedWithTheRange) {
  const auto message = [](const LabelSmoothing& options, int64_t classes, int64_t label) {
    return std::string(SmoothedLabel(options, classes, label).status().message());
  };
  EXPECT_EQ(message(Make(1.5, Spread::kAllClasses), 4, 0),
            "label smoothing: smoothing is 1.5; allowed is 0 to 1");
  EXPECT_EQ(message({}, 4, 4), "label smoothing: a label is 4; allowed is 0 to 3");
  EXPECT_EQ(message(Make(0.1, Spread::kWrongClasses), 1, 0),
            "label smoothing: smoothing is 0.1; allowed is 0, where it is spread over no class");
  LabelSmoothing options;
  options.padding = 9;
  EXPECT_EQ(message(options, 4, 0), "label smoothing: padding is 9; allowed is 0 to 3");
  const Tensor logits = RandomLogits(3, 4);
  EXPECT_EQ(
      std::string(
          SmoothedCrossEntropy({}, logits.view(), std::vector<int64_t>{1, 2}).status().message()),
      "label smoothing: logits are [3, 4]; allowed are [2, classes], a row for each label");
  const Tensor integers(DType::kI32, {1, 4});
  EXPECT_EQ(
      std::string(
          SmoothedCrossEntropy({}, integers.view(), std::vector<int64_t>{1}).status().message()),
      "label smoothing: logits are i32; a floating-point type is wanted");
}

// ---- The loss and its gradient in fp32 ----

struct LossAndGradient {
  std::vector<double> of_token;
  Tensor gradient;
};

LossAndGradient Compute(const LabelSmoothing& options, const ConstTensorView& logits,
                        const std::vector<int64_t>& labels, double scale, int threads = 2) {
  const int64_t classes = logits.dim(1);
  ThreadPool pool(threads);
  Tensor scratch(DType::kU8, {static_cast<int64_t>(SmoothedLossWorkspaceBytes(classes, threads))});
  std::fill_n(scratch.span<uint8_t>().begin(), scratch.bytes(), 0xFF);  // NaN
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(scratch.raw()), scratch.bytes());
  LossAndGradient result;
  result.of_token.assign(labels.size(), -1);
  result.gradient = Tensor(DType::kF32, logits.shape());
  Fill(result.gradient.view(), std::numeric_limits<double>::quiet_NaN());
  const SmoothedLossCall call = {logits, labels, absl::MakeSpan(result.of_token), scale,
                                 result.gradient.view()};
  const int64_t before = AllocationCount();
  const bool ok = ComputeSmoothedLoss(options, call, execution).ok();
  EXPECT_EQ(AllocationCount() - before, 0);
  EXPECT_TRUE(ok);
  return result;
}

std::vector<LabelSmoothing> EveryKind() {
  std::vector<LabelSmoothing> all;
  for (const Spread spread : {Spread::kAllClasses, Spread::kWrongClasses}) {
    for (const double smoothing : {0.0, 0.1, 1.0}) {
      for (const bool to_padding : {false, true}) {
        all.push_back(Make(smoothing, spread));
        all.back().padding = 3;
        all.back().spread_to_padding = to_padding;
        all.back().subtract_entropy = smoothing == 0.1;
      }
    }
  }
  return all;
}

// A loss is a sum of products of shares, which add up to 1, and of differences of numbers of at
// most 32; the logarithm of a sum of exponentials has the relative error of that sum, (classes + 8)
// u.
constexpr double kU = 0x1p-24;
double LossBound(int64_t classes) { return (static_cast<double>(classes) + 8 + 64) * kU; }

TEST(SmoothedLoss, LossesAndGradientsAreThoseOfTheDefinition) {
  const int64_t tokens = 37, classes = 21;
  Tensor logits = RandomLogits(tokens, classes);
  std::vector<int64_t> labels;
  for (int64_t t = 0; t < tokens; ++t) labels.push_back(t * 5 % classes);
  for (const LabelSmoothing& options : EveryKind()) {
    SCOPED_TRACE(options.smoothing);
    const LossAndGradient of = Compute(options, logits.view(), labels, 0.25);
    Tensor exact = logits.CloneAs(DType::kF64);
    const SmoothedLoss loss = LossOf(options, exact, labels);
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_NEAR(of.of_token[t], loss.of_token[t], LossBound(classes)) << t;
    }
    for (const int64_t t : {0, 3, 17, 36}) {
      for (const int64_t k : {int64_t{0}, int64_t{3}, labels[t], classes - 1}) {
        const double h = 1e-5, x = exact.view().Get(t * classes + k);
        double slope = 0;
        for (const double sign : {1.0, -1.0}) {
          exact.view().Set(t * classes + k, x + sign * h);
          slope += sign * LossOf(options, exact, labels).of_token[t] / (2 * h);
        }
        exact.view().Set(t * classes + k, x);
        // p is at most 1 and has the relative error of the sum; the quotient has 2^-52 32 / h.
        EXPECT_NEAR(of.gradient.view().Get(t * classes + k), 0.25 * slope,
                    LossBound(classes) + 1e-9)
            << t << " " << k;
      }
    }
    for (const int64_t t : {2, 9}) {  // token 9 is padding
      EXPECT_EQ(MaxAbs(Slice(std::as_const(of.gradient).view(), 0, t, 1)) == 0, labels[t] == 3);
    }
  }
}

TEST(SmoothedLoss, ReadsStridedHalvesInPlaceAndItsBitsDoNotDependOnThreads) {
  Tensor memory(DType::kBF16, {40, 90});
  FillNormal(&memory, 1, "logits", 0, 3);
  const ConstTensorView logits = Transpose(std::as_const(memory).view(), 0, 1);
  std::vector<int64_t> labels(90, 7);
  LabelSmoothing options = Make(0.1, Spread::kAllClasses);
  const LossAndGradient one = Compute(options, logits, labels, 1, 1);
  for (const int threads : {2, 3}) {
    const LossAndGradient more = Compute(options, logits, labels, 1, threads);
    EXPECT_EQ(one.of_token, more.of_token);
    EXPECT_EQ(MaxDifference(one.gradient.view(), more.gradient.view()), 0);
  }
  ThreadPool pool(1);
  Tensor scratch(DType::kU8, {static_cast<int64_t>(SmoothedLossWorkspaceBytes(40, 1))});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(scratch.raw()), scratch.bytes());
  const TensorView in_place = Transpose(memory.view(), 0, 1);
  ASSERT_TRUE(ComputeSmoothedLoss(options, {in_place, labels, {}, 1, in_place}, execution).ok());
  EXPECT_EQ(MaxDifference(in_place, one.gradient.CloneAs(DType::kBF16).view()), 0);
}

TEST(SmoothedLoss, RefusesWhatTheDefinitionRefuses) {
  const Tensor logits = RandomLogits(2, 4);
  const auto code = [&](const LabelSmoothing& options, const std::vector<int64_t>& labels) {
    return ComputeSmoothedLoss(options, {logits.view(), labels}, Execution()).code();
  };
  EXPECT_EQ(code({}, {0, 4}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({}, {0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Make(1.5, Spread::kAllClasses), {0, 1}), absl::StatusCode::kInvalidArgument);
}

// ---- Golden file ----

TEST(LabelSmoothing, TorchAndTheRulesOfThreeCodesComputeTheSame) {
  const SafetensorsFile golden = GoldenFile("core/losses/testdata/label_smoothing.safetensors");
  const double smoothing = std::stod(golden.metadata.at("smoothing"));
  std::vector<int64_t> labels;
  for (const int32_t label : golden.tensors.at("labels").span<int32_t>()) labels.push_back(label);
  const auto expect = [&](const char* name, const LabelSmoothing& options) {
    const SmoothedLoss loss = LossOf(options, golden.tensors.at("logits"), labels);
    const ConstTensorView theirs = golden.tensors.at(name).view();
    for (size_t t = 0; t < labels.size(); ++t) {
      EXPECT_NEAR(loss.of_token[t], theirs.Get(static_cast<int64_t>(t)), 1e-13) << name << " " << t;
    }
    return loss.Mean();
  };
  LabelSmoothing options = Make(smoothing, Spread::kAllClasses);
  options.padding = std::stoll(golden.metadata.at("padding"));
  EXPECT_NEAR(expect("torch", options), golden.tensors.at("torch_mean").view().Get(0), 1e-13);
  options.spread = Spread::kWrongClasses;
  expect("fairseq", options);
  options.subtract_entropy = true;
  expect("tensor2tensor", options);
  options.subtract_entropy = false;
  options.spread_to_padding = false;
  expect("annotated_transformer", options);
}

}  // namespace
}  // namespace tfb
