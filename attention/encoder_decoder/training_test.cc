// Trains networks of six layers beside PyTorch: the same data, weights and steps of AdamW give the same
// losses and weights.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/encoder_decoder/encoder_decoder.h"
#include "core/backward_testing.h"
#include "core/safetensors.h"
#include "core/testing.h"
#include "core/thread_pool.h"
#include "core/training/adamw.h"
#include "gtest/gtest.h"

namespace tfb::encoder_decoder {
namespace {

// Trains towards the outputs `target` by the mean of the squares of the differences.
class Training {
 public:
  explicit Training(const SafetensorsFile& golden) : golden_(golden) {
    const auto text = [&](const char* name) { return golden.metadata.at(name); };
    for (const auto& [name, tensor] : golden.tensors) {
      const bool is_parameter = absl::StrContains(name, ".") && !absl::StartsWith(name, "after/");
      if (is_parameter) parameters_[name] = tensor.Clone();
    }
    inputs_["x"] = golden.tensors.at("x").Clone();
    const Problem problem = Problem::SelfAttention(
        inputs_.at("x").dim(0), std::stoll(text("heads")), inputs_.at("x").dim(1),
        std::stoll(text("head_dim")), text("causal") == "true");
    layer_ = EncoderDecoder()
                 .Create(problem,
                         {{"part", text("part")},
                          {"block", text("block")},
                          {"layers", text("layers")},
                          {"feed_forward_dim", text("inner_dim")}},
                         Device::kCpu, /*seed=*/1)
                 .value();
    AdamWOptions options;
    options.beta1 = std::stod(text("beta1"));
    options.beta2 = std::stod(text("beta2"));
    options.epsilon = std::stod(text("epsilon"));
    options.decay = std::stod(text("decay"));
    adam_ = std::make_unique<AdamW>(AdamW::Create(parameters_, options).value());
  }

  const NamedTensors& parameters() const { return parameters_; }
  const Layer& layer() const { return *layer_; }

  // Returns the loss, and leaves the gradient of the outputs in `gradient`.
  double Loss(NamedTensors* gradient) {
    EXPECT_TRUE(layer_->SetParameters(parameters_).ok());
    NamedTensors zeros;
    zeros["out"] = Tensor(DType::kF32, inputs_.at("x").shape());
    Fill(zeros.at("out").view(), 0);
    const auto pass = RunBackward(*layer_, ViewsOf(inputs_), zeros);
    EXPECT_TRUE(pass.ok()) << pass.status();
    const absl::Span<const float> out = pass->outputs.at("out").span<float>();
    const absl::Span<const float> target = golden_.tensors.at("target").span<float>();
    const double count = static_cast<double>(out.size());
    double loss = 0;
    for (size_t n = 0; n < out.size(); ++n) {
      const double difference = static_cast<double>(out[n]) - target[n];
      loss += difference * difference / count;
      zeros.at("out").span<float>()[n] = static_cast<float>(2 * difference / count);
    }
    *gradient = std::move(zeros);
    return loss;
  }

  void Step(const NamedTensors& output_gradient) {
    const auto pass = RunBackward(*layer_, ViewsOf(inputs_), output_gradient);
    ASSERT_TRUE(pass.ok()) << pass.status();
    ThreadPool pool(1);
    const absl::Status status =
        adam_->Step(std::stod(golden_.metadata.at("rate")), pass->parameters, &parameters_, &pool);
    ASSERT_TRUE(status.ok()) << status;
  }

 private:
  const SafetensorsFile& golden_;
  NamedTensors inputs_, parameters_;
  std::unique_ptr<Layer> layer_;
  std::unique_ptr<AdamW> adam_;
};

class NetworkTraining : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Blocks, NetworkTraining,
                         testing::Values("post_norm", "pre_norm", "sparse"));

TEST_P(NetworkTraining, GivesTheLossesAndWeightsOfPyTorch) {
  const SafetensorsFile golden = GoldenFile(
      absl::StrCat("attention/encoder_decoder/testdata/training_", GetParam(), ".safetensors"));
  Training training(golden);
  ASSERT_EQ(training.parameters().size(), training.layer().parameters().size());
  const ConstTensorView losses = golden.tensors.at("losses").view();
  double worst_loss = 0, worst_weight = 0;
  for (int64_t step = 0; step < losses.dim(0); ++step) {
    NamedTensors gradient;
    const double loss = training.Loss(&gradient);
    worst_loss = std::max(worst_loss, std::abs(loss - losses.Get(step)));
    if (step + 1 < losses.dim(0)) training.Step(gradient);
  }
  for (const auto& [name, weights] : training.parameters()) {
    const ConstTensorView theirs = golden.tensors.at(absl::StrCat("after/", name)).view();
    worst_weight = std::max(worst_weight, MaxDifference(weights.view(), theirs));
  }
  EXPECT_LT(losses.Get(losses.dim(0) - 1), 0.95 * losses.Get(0)) << "the file shows no training";
  EXPECT_LE(worst_loss, 1e-5);
  EXPECT_LE(worst_weight, 1e-4);
  std::cout << GetParam() << ": losses to " << worst_loss << ", weights to " << worst_weight
            << "\n";
}

}  // namespace
}  // namespace tfb::encoder_decoder
