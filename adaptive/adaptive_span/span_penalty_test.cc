#include "adaptive/adaptive_span/span_penalty.h"

#include <cmath>
#include <string>

#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::adaptive_span {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SpanPenalty, OfParametersIsTheirMeanWithinTheRange) {
  AdaptiveSpanOptions options;
  options.max_span = 100;
  NamedTensors parameters;
  parameters["span"] = TensorOf({10, 250, -3, 50});
  const SpanPenalty penalty = PenaltyOfSpans(options, parameters, {}, 0.5).value();
  EXPECT_NEAR(penalty.loss, 0.5 / 4 * (10 + 100 + 0 + 50), 1e-12);
  EXPECT_THAT(penalty.parameters.at("span").span<float>(), ElementsAre(0.125f, 0, 0, 0.125f));
}

TEST(SpanPenalty, OfTokensHasTheDerivativesOfItsLoss) {
  AdaptiveSpanOptions options;
  options.max_span = 300;
  options.dynamic = true;
  NamedTensors tensors;  // in float64, for central differences
  tensors["span_weight"] = Tensor(DType::kF64, {3, 8});
  tensors["span_bias"] = Tensor(DType::kF64, {3});
  tensors["x"] = Tensor(DType::kF64, {2, 5, 8});
  for (auto& [name, tensor] : tensors) FillNormal(&tensor, 4, name, 0, 0.7);
  const auto evaluate = [&] {
    return PenaltyOfSpans(options, tensors, tensors.at("x").view(), 1.5).value();
  };
  const SpanPenalty penalty = evaluate();
  double mean = 0;
  for (int64_t row = 0; row < 10; ++row) {
    for (int64_t h = 0; h < 3; ++h) {
      double logit = tensors.at("span_bias").span<double>()[h];
      for (int64_t c = 0; c < 8; ++c) {
        logit += tensors.at("span_weight").span<double>()[8 * h + c] *
                 tensors.at("x").span<double>()[8 * row + c];
      }
      mean += 300 / (1 + std::exp(-logit)) / 30;
    }
  }
  EXPECT_NEAR(penalty.loss, 1.5 * mean, 1e-9);
  for (auto& [name, tensor] : tensors) {
    const Tensor& gradient = name == "x" ? penalty.inputs.at(name) : penalty.parameters.at(name);
    for (int64_t n = 0; n < tensor.num_elements(); ++n) {
      constexpr double kStep = 1e-5;
      double& element = tensor.span<double>()[n];
      const double before = element;
      element = before + kStep;
      const double ahead = evaluate().loss;
      element = before - kStep;
      const double behind = evaluate().loss;
      element = before;
      EXPECT_NEAR(gradient.view().Get(n), (ahead - behind) / (2 * kStep),
                  1e-6 * std::abs(gradient.view().Get(n)) + 1e-6)
          << name << " " << n;
    }
  }
}

TEST(SpanPenalty, WhatDoesNotFitIsRefused) {
  AdaptiveSpanOptions options;
  EXPECT_EQ(PenaltyOfSpans(options, {}, {}, 1).status().message(), "there is no parameter span");
  options.dynamic = true;
  NamedTensors parameters;
  parameters["span_weight"] = Tensor(DType::kF32, {3, 8});
  parameters["span_bias"] = Tensor(DType::kF32, {3});
  const Tensor x(DType::kF32, {2, 5, 7});
  EXPECT_THAT(std::string(PenaltyOfSpans(options, parameters, x.view(), 1).status().message()),
              HasSubstr("x [2, 5, 7]; expected are"));
}

}  // namespace
}  // namespace tfb::adaptive_span
