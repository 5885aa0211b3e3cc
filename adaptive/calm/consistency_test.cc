#include "adaptive/calm/consistency.h"

#include <cmath>
#include <string>
#include <vector>

#include "adaptive/calm/calm.h"
#include "core/random.h"
#include "core/testing.h"
#include "core/training/adamw.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "memory/transformer_xl/stack_testing.h"

namespace tfb::calm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tensor Labels(const std::vector<int32_t>& values, const Shape& shape) {
  Tensor labels(DType::kI32, shape);
  std::copy(values.begin(), values.end(), labels.span<int32_t>().begin());
  return labels;
}
Tensor Floats(const std::vector<float>& values, const Shape& shape) {
  Tensor tensor(DType::kF32, shape);
  std::copy(values.begin(), values.end(), tensor.span<float>().begin());
  return tensor;
}

TEST(Consistency, LabelsTellWhereAnExitSaysWhatTheModelSays) {
  // Three exits and two tokens, of three words.
  const float nan = std::nanf("");
  const Tensor logits =
      Floats({1, 2, 0, /**/ 5, 4, 4,      // exit 1 says 1 and 0
              3, 1, 3, /**/ nan, -9, -1,  // exit 2 says 0, the first of two, and 2
              8, 7, 8, /**/ 0, -1, 2},    // the model says 0, likewise, and 2
             {1, 3, 2, 3});
  const Tensor labels = ConsistencyLabels(logits.view()).value();
  EXPECT_EQ(labels.shape(), Shape({1, 2, 2}));
  EXPECT_THAT(labels.span<int32_t>(), ElementsAre(0, 1, 0, 1));
  // The first of two that are equal counts.
  const Tensor ties = Floats({3, 1, 3, /**/ 3, 1, 2}, {1, 2, 1, 3});
  EXPECT_THAT(ConsistencyLabels(ties.view())->span<int32_t>(), ElementsAre(1));
}

TEST(Consistency, ALossByHand) {
  // One of four tokens agrees: it weighs 3/4, and each of the others 1/4.
  const Tensor z = Floats({0, 2, -1, 0}, {2, 2, 1});
  const Tensor labels = Labels({1, 0, 0, 0}, {2, 2, 1});
  const ConsistencyLoss found = ConsistencyLossOf(z.view(), labels.view()).value();
  const double expected = (0.75 * std::log(2) + 0.25 * std::log(1 + std::exp(2)) +
                           0.25 * std::log(1 + std::exp(-1)) + 0.25 * std::log(2)) /
                          4;
  EXPECT_NEAR(found.loss, expected, 1e-15);
  EXPECT_FLOAT_EQ(found.gradient.span<float>()[0], -0.75 * 0.5 / 4);
  EXPECT_FLOAT_EQ(found.gradient.span<float>()[1], 0.25 / (1 + std::exp(-2)) / 4);
  EXPECT_FLOAT_EQ(found.gradient.span<float>()[3], 0.25 * 0.5 / 4);
}

// Made by tools/capture/golden_calm.py with the authors' code.
TEST(Consistency, LabelsLossAndGradientAreTheAuthors) {
  const NamedTensors golden =
      GoldenFile("adaptive/calm/testdata/t5x_consistency.safetensors").tensors;
  const Tensor labels = ConsistencyLabels(golden.at("logits").view()).value();
  EXPECT_EQ(MaxDifference(labels.view(), golden.at("labels").view()), 0);
  const double agreeing = SumOfProducts(labels.view(), labels.view());
  EXPECT_GT(agreeing, 20);
  EXPECT_LT(agreeing, 64);  // of 84
  const ConsistencyLoss found =
      ConsistencyLossOf(golden.at("confidence_logits").view(), labels.view()).value();
  EXPECT_NEAR(found.loss, golden.at("loss").view().Get(0), 1e-15);
  EXPECT_LE(MaxDifference(found.gradient.view(), golden.at("gradient").view()), 1e-9);
}

TEST(Consistency, ALayerThatAllTokensAgreeOnHasNoLoss) {
  const Tensor z = Floats({3, -2, 1, 4}, {1, 2, 2});
  const ConsistencyLoss found =
      ConsistencyLossOf(z.view(), Labels({1, 0, 1, 0}, {1, 2, 2}).view()).value();
  EXPECT_EQ(found.loss, 0);
  EXPECT_THAT(found.gradient.span<float>(), ElementsAre(0, 0, 0, 0));
}

TEST(Consistency, FarLogitsHaveALossAndAGradient) {
  const Tensor z = Floats({1e4, -1e4, 1e4, -1e4}, {1, 4, 1});
  const ConsistencyLoss found =
      ConsistencyLossOf(z.view(), Labels({1, 0, 0, 1}, {1, 4, 1}).view()).value();
  EXPECT_EQ(found.loss, 2 * 0.5 * 1e4 / 4);
  EXPECT_THAT(found.gradient.span<float>(), ElementsAre(0, 0, 0.125f, -0.125f));
}

TEST(Consistency, TheGradientIsTheLosss) {
  Tensor z(DType::kF32, {2, 9, 3});
  FillNormal(&z, 5, "z");
  Tensor labels(DType::kI32, z.shape());
  for (size_t e = 0; e < labels.span<int32_t>().size(); ++e) {
    labels.span<int32_t>()[e] = e * e % 7 < 3 ? 1 : 0;
  }
  const ConsistencyLoss at = ConsistencyLossOf(z.view(), labels.view()).value();
  for (size_t e = 0; e < z.span<float>().size(); ++e) {
    const float own = z.span<float>()[e], step = 0.0078125f;
    z.span<float>()[e] = own + step;
    const double above = ConsistencyLossOf(z.view(), labels.view())->loss;
    z.span<float>()[e] = own - step;
    const double below = ConsistencyLossOf(z.view(), labels.view())->loss;
    z.span<float>()[e] = own;
    // The third derivative of a sigmoid's logarithm is below 0.1.
    const double error = step * step * 0.1 / 6 / (3 * 18) + 1e-9;
    EXPECT_NEAR(at.gradient.span<float>()[e], (above - below) / (2 * step), error) << e;
  }
}

TEST(Consistency, NoTokensAndNoClassifiersHaveNoLoss) {
  for (const Shape& shape : {Shape{1, 0, 2}, Shape{2, 3, 0}}) {
    const ConsistencyLoss found =
        ConsistencyLossOf(Tensor(DType::kF32, shape).view(), Tensor(DType::kI32, shape).view())
            .value();
    EXPECT_EQ(found.loss, 0);
    EXPECT_EQ(found.gradient.shape(), shape);
  }
  EXPECT_EQ(ConsistencyLabels(Tensor(DType::kF32, {2, 1, 5, 4}).view())->shape(), Shape({2, 5, 0}));
}

TEST(Consistency, WrongTensorsAreRefused) {
  const auto of_labels = [](const Tensor& logits) {
    return std::string(ConsistencyLabels(logits.view()).status().message());
  };
  EXPECT_THAT(of_labels(Tensor(DType::kF32, {2, 3, 4})), HasSubstr("f32 [2, 3, 4]"));
  EXPECT_THAT(of_labels(Tensor(DType::kI32, {1, 2, 3, 4})), HasSubstr("i32 [1, 2, 3, 4]"));
  EXPECT_THAT(of_labels(Tensor(DType::kF32, {1, 2, 3, 0})), HasSubstr("[1, 2, 3, 0]"));
  EXPECT_THAT(of_labels(Tensor(DType::kF32, {1, 0, 3, 4})), HasSubstr("[1, 0, 3, 4]"));
  const auto of_loss = [](const Tensor& z, const Tensor& labels) {
    return std::string(ConsistencyLossOf(z.view(), labels.view()).status().message());
  };
  const Tensor z(DType::kF32, {1, 2, 2});
  EXPECT_THAT(of_loss(z, Labels({0, 1}, {1, 2, 1})), HasSubstr("[1, 2, 2] and i32 [1, 2, 1]"));
  EXPECT_THAT(of_loss(Tensor(DType::kF64, {1, 2, 2}), Labels({0, 1, 1, 1}, {1, 2, 2})),
              HasSubstr("f64 [1, 2, 2]"));
  EXPECT_THAT(of_loss(z, Tensor(DType::kF32, {1, 2, 2})), HasSubstr("and f32 [1, 2, 2]"));
  EXPECT_THAT(of_loss(z, Labels({0, 1, 2, 0}, {1, 2, 2})),
              HasSubstr("token 1 of sequence 0 after layer 1 is 2"));
}

// Returns the logits [batch, N, tokens, words] of exit_outputs.
Tensor LogitsOf(const ConstTensorView& exits, const ConstTensorView& output) {
  Tensor logits(DType::kF32, {exits.dim(0), exits.dim(1), exits.dim(2), output.dim(0)});
  Fill(logits.view(), 0);
  float* next = logits.span<float>().data();
  for (int64_t row = 0; row < exits.num_elements() / exits.dim(3); ++row) {
    for (int64_t v = 0; v < output.dim(0); ++v, ++next) {
      for (int64_t c = 0; c < exits.dim(3); ++c) {
        *next += *(exits.At<float>() + row * exits.dim(3) + c) * *output.At<float>(v, c);
      }
    }
  }
  return logits;
}

// Trains the classifiers alone, as the source does, and returns the loss before each step.
std::vector<double> LossesOfTraining(Device device, int steps) {
  const Problem problem = transformer_xl::CausalProblem(2, 2, 40, 8);
  const Options options = {{"layers", "3"},
                           {"confidence", "classifier"},
                           {"threshold", "2"},
                           {"segment", "16"},
                           {"memory", "12"}};
  NamedTensors parameters = transformer_xl::PerturbedParameters(Calm(), problem, options);
  const RunRequest request = {options, device, 1, &parameters};
  const Tensor x = transformer_xl::RandomHidden(problem);
  const Inputs inputs = {{"x", x.view()}};
  Tensor output(DType::kF32, {6, problem.model_dim()});
  FillNormal(&output, 11, "output");

  AdamW optimizer = AdamW::Create(parameters, {.decay = 0}).value();
  ThreadPool pool(1);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const NamedTensors run = RunTechnique(Calm(), problem, inputs, request).value();
    const Tensor labels =
        ConsistencyLabels(LogitsOf(run.at("exit_outputs").view(), output.view()).view()).value();
    ConsistencyLoss loss =
        ConsistencyLossOf(run.at(kConfidenceLogits).view(), labels.view()).value();
    losses.push_back(loss.loss);
    NamedTensors of_outputs;
    of_outputs[kConfidenceLogits] = std::move(loss.gradient);
    RunAndGradients found =
        BackwardOfTechnique(Calm(), problem, inputs, of_outputs, request).value();
    NamedTensors of_classifiers;
    for (auto& [name, gradient] : found.parameters) {
      if (name.find(".confidence.") != std::string::npos) {
        of_classifiers[name] = std::move(gradient);
      }
    }
    EXPECT_EQ(of_classifiers.size(), 4u);  // w and b after layers 1 and 2
    EXPECT_TRUE(optimizer.Step(0.05, of_classifiers, &parameters, &pool).ok());
  }
  return losses;
}

TEST(Consistency, ClassifiersLearnWhetherTheirLayersSayWhatTheModelWillSay) {
  const std::vector<double> losses = LossesOfTraining(Device::kCpu, 100);
  // A classifier that knows nothing has the loss 2 (k / T) (1 - k / T) log 2, at most log 2 / 2.
  EXPECT_GT(losses.front(), 0.6);
  EXPECT_LT(losses.back(), 0.25);
  const std::vector<double> on_device = LossesOfTraining(KernelDevice(), 4);
  for (size_t step = 0; step < on_device.size(); ++step) {
    EXPECT_NEAR(on_device[step], losses[step], 1e-5) << step;
  }
}

}  // namespace
}  // namespace tfb::calm
