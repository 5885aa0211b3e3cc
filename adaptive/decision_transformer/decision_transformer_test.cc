// Tests Decision Transformer by hand, by the inputs that outputs may depend on, and against Hugging
// Face's.
//
// Tolerance. Sublayers have the bound of fp32 attention, 2e-5 of the largest output, and add in
// quadrature: two for each layer, and one for embedding and norms. Heads are one product more.
#include "adaptive/decision_transformer/decision_transformer.h"

#include <cmath>
#include <string>
#include <vector>

#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::decision_transformer {
namespace {

const Technique& DecisionTransformer() { return FindTechnique("decision_transformer"); }

constexpr const char* kOutputs[] = {"out", "action", "state", "return"};

Problem Make(int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim) {
  return Problem::SelfAttention(batch, heads, tokens, head_dim, /*causal=*/true);
}

double Bound(const ConstTensorView& expected, int64_t layers) {
  return std::sqrt(2.0 * static_cast<double>(layers) + 2) * Fp32Bound(expected);
}

// Returns trajectories that begin at timestep 7 b.
NamedTensors Trajectories(const Problem& problem, const Options& options) {
  const Technique& technique = DecisionTransformer();
  NamedTensors inputs = RandomInputs(technique.InputSpecs(problem, options).value(), 5);
  const TensorView timesteps = inputs.at("timesteps").view();
  for (int64_t b = 0; b < timesteps.dim(0); ++b) {
    for (int64_t t = 0; t < timesteps.dim(1); ++t) {
      *timesteps.MutableAt<int32_t>(b, t) = static_cast<int32_t>(7 * b + t);
    }
  }
  return inputs;
}

NamedTensors Predict(const Problem& problem, const NamedTensors& inputs,
                     const RunRequest& request) {
  auto outputs = RunTechnique(DecisionTransformer(), problem, ViewsOf(inputs), request);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return *std::move(outputs);
}

NamedTensors ParametersOf(const Problem& problem, const Options& options) {
  const auto layer = DecisionTransformer().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}

ConstTensorView Rows(const Tensor& tensor, int64_t first, int64_t count) {
  return Slice(tensor.view(), 1, first, count);
}

// ---- Returns ----

TEST(DecisionTransformer, ReturnsToGoAreSumsOfTheRewardsThatAreStillToCome) {
  EXPECT_EQ(ReturnsToGo({-1, 2, 0, 5}), (std::vector<double>{6, 7, 5, 5}));
  EXPECT_EQ(ReturnsToGo({3}), std::vector<double>{3});
  EXPECT_TRUE(ReturnsToGo({}).empty());
}

TEST(DecisionTransformer, AReturnToGoMinusItsRewardIsTheNextOne) {
  const std::vector<double> rewards = {0.5, -2, 4, 4, -0.25, 8};
  const std::vector<double> returns = ReturnsToGo(rewards);
  for (size_t t = 0; t + 1 < rewards.size(); ++t) {
    EXPECT_EQ(returns[t + 1], returns[t] - rewards[t]);
  }
}

// ---- Cases by hand ----

// Makes everything that the GPT adds 0: out is then the last norm of the embedded tokens.
void SilenceTheGpt(NamedTensors* parameters) {
  for (auto& [name, tensor] : *parameters) {
    const bool adds =
        name.find(".w_o") != std::string::npos || name.find(".b_o") != std::string::npos ||
        name.find(".w2") != std::string::npos || name.find(".b2") != std::string::npos;
    if (adds) Fill(tensor.view(), 0);
  }
}

void SetValues(Tensor* tensor, const std::vector<float>& values) {
  ASSERT_EQ(tensor->num_elements(), static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), tensor->span<float>().begin());
}

TEST(DecisionTransformer, EmbeddingAndHeadsByHand) {
  // There are two channels, so that a norm gives (1, -1) or (-1, 1) up to its epsilon.
  const Problem problem = Make(1, 1, 3, 2);
  const Options options = {
      {"layers", "1"}, {"state_dim", "2"}, {"action_dim", "1"}, {"max_timestep", "4"}};
  NamedTensors parameters = ParametersOf(problem, options);
  SilenceTheGpt(&parameters);
  SetValues(&parameters.at("embed.timestep"), {9, 9, 9, 9, 100, -100, 9, 9});
  SetValues(&parameters.at("embed.return.w"), {1000, 0});
  SetValues(&parameters.at("embed.return.b"), {0, 0});
  SetValues(&parameters.at("embed.state.w"), {0, 1000, 0, 2000});
  SetValues(&parameters.at("embed.state.b"), {0, 50});
  SetValues(&parameters.at("embed.action.w"), {0, 0});
  SetValues(&parameters.at("embed.action.b"), {0, 0});
  SetValues(&parameters.at("head.action.w"), {0.5, 0.25});
  SetValues(&parameters.at("head.action.b"), {0.125});
  SetValues(&parameters.at("head.state.w"), {1, 2, 3, 5});
  SetValues(&parameters.at("head.state.b"), {10, 20});
  SetValues(&parameters.at("head.return.w"), {4, 1});
  SetValues(&parameters.at("head.return.b"), {7});
  NamedTensors inputs = Trajectories(problem, options);
  SetValues(&inputs.at("returns"), {-1});   // token (-1000, 0) + (100, -100): normalised (-1, 1)
  SetValues(&inputs.at("states"), {1, 0});  // (0, 1050) + (100, -100): (-1, 1)
  SetValues(&inputs.at("actions"), {77});   // (0, 0) + (100, -100): (1, -1)
  Fill(inputs.at("timesteps").view(), 2);
  RunRequest request;
  request.options = options;
  request.parameters = &parameters;
  for (const Device device : TestedDevices()) {
    request.device = device;
    const NamedTensors outputs = Predict(problem, inputs, request);
    const std::vector<float> out = {-1, 1, -1, 1, 1, -1};
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_NEAR(outputs.at("out").span<float>()[i], out[i], 1e-4) << i;
    }
    EXPECT_NEAR(outputs.at("action").span<float>()[0], std::tanh(-0.5 + 0.25 + 0.125), 1e-4);
    EXPECT_NEAR(outputs.at("state").span<float>()[0], 1 - 3 + 10, 1e-3);
    EXPECT_NEAR(outputs.at("state").span<float>()[1], 2 - 5 + 20, 1e-3);
    EXPECT_NEAR(outputs.at("return").span<float>()[0], 4 - 1 + 7, 1e-3);
  }
}

TEST(DecisionTransformer,
     TheTokensOfAStepShareItsTimestepAndOnesOutsideOfTheTableCountAsTheNearest) {
  const Problem problem = Make(1, 1, 9, 2);
  const Options options = {
      {"layers", "1"}, {"embed_norm", "false"}, {"max_timestep", "3"}, {"action_tanh", "false"}};
  NamedTensors parameters = ParametersOf(problem, options);
  SilenceTheGpt(&parameters);
  SetValues(&parameters.at("embed.timestep"), {5, -5, -5, 5, 5, -5});
  for (auto& [name, tensor] : parameters) {
    if (name.find("embed.") == 0 && name != "embed.timestep") Fill(tensor.view(), 0);
  }
  NamedTensors inputs = Trajectories(problem, options);
  const std::vector<int32_t> timesteps = {-4, 1, 300};
  std::copy(timesteps.begin(), timesteps.end(), inputs.at("timesteps").span<int32_t>().begin());
  RunRequest request;
  request.options = options;
  request.parameters = &parameters;
  for (const Device device : TestedDevices()) {
    request.device = device;
    const NamedTensors outputs = Predict(problem, inputs, request);
    for (int64_t i = 0; i < 9; ++i) {
      EXPECT_NEAR(*outputs.at("out").view().At<float>(0, i, 0), i / 3 == 1 ? -1 : 1, 1e-5) << i;
    }
  }
}

// ---- What predictions depend on ----

class Dependence : public ::testing::Test {
 protected:
  static constexpr int64_t kSteps = 5, kChanged = 2;  // the step whose inputs change

  // Returns the predictions where one input of step kChanged is changed.
  NamedTensors With(const char* changed) const {
    NamedTensors inputs = Trajectories(problem_, {});
    if (*changed != '\0') Fill(Slice(inputs.at(changed).view(), 1, kChanged, 1), 2);
    return Predict(problem_, inputs, {});
  }
  // Tells whether the predictions of that name of step t differ between the two.
  static bool Differ(const NamedTensors& a, const NamedTensors& b, const char* name, int64_t t) {
    return MaxDifference(Rows(a.at(name), t, 1), Rows(b.at(name), t, 1)) > 0;
  }

  const Problem problem_ = Make(2, 2, 3 * kSteps, 8);
};

TEST_F(Dependence, AnActionDependsOnItsReturnAndStateAndNotOnItselfNorOnTheFuture) {
  const NamedTensors as_it_was = With("");
  for (const char* seen : {"returns", "states"}) {
    const NamedTensors changed = With(seen);
    for (int64_t t = 0; t < kSteps; ++t) {
      EXPECT_EQ(Differ(as_it_was, changed, "action", t), t >= kChanged) << seen << " at " << t;
    }
  }
  const NamedTensors changed = With("actions");
  for (int64_t t = 0; t < kSteps; ++t) {
    EXPECT_EQ(Differ(as_it_was, changed, "action", t), t > kChanged) << t;
  }
}

TEST_F(Dependence, TheNextStateAndReturnDependOnTheActionToo) {
  const NamedTensors as_it_was = With(""), changed = With("actions");
  for (const char* name : {"state", "return"}) {
    for (int64_t t = 0; t < kSteps; ++t) {
      EXPECT_EQ(Differ(as_it_was, changed, name, t), t >= kChanged) << name << " at " << t;
    }
  }
}

TEST(DecisionTransformer, WithoutTheLastActionTheRestIsTheSame) {
  const Problem whole = Make(2, 2, 12, 8);
  const NamedTensors inputs = Trajectories(whole, {});
  const NamedTensors expected = Predict(whole, inputs, {});
  for (const int64_t tokens : {1, 2, 3, 4, 8, 10, 11}) {
    SCOPED_TRACE(tokens);
    NamedTensors cut;
    for (const auto& [name, count] :
         std::vector<std::pair<std::string, int64_t>>{{"returns", ReturnTokens(tokens)},
                                                      {"timesteps", ReturnTokens(tokens)},
                                                      {"states", StateTokens(tokens)},
                                                      {"actions", ActionTokens(tokens)}}) {
      const ConstTensorView part = Rows(inputs.at(name), 0, count);
      cut[name] = Tensor(part.dtype, part.shape());
      CopyElements(part, cut[name].view());
    }
    const NamedTensors outputs = Predict(Make(2, 2, tokens, 8), cut, {});
    for (const char* name : kOutputs) {
      const Tensor& computed = outputs.at(name);
      const ConstTensorView rows = Rows(expected.at(name), 0, computed.dim(1));
      EXPECT_LE(MaxDifference(computed.view(), rows), Bound(expected.at(name).view(), 2)) << name;
    }
  }
}

TEST(DecisionTransformer, HiddenPaddingBeforeATrajectoryChangesNothing) {
  constexpr int64_t kSteps = 6, kPadding = 25;  // the padding crosses an edge of tiles of 64
  const Problem plain = Make(1, 2, 3 * kSteps - 1, 8);
  const Problem padded = Make(1, 2, 3 * (kPadding + kSteps) - 1, 8);
  const NamedTensors inputs = Trajectories(plain, {});
  NamedTensors longer = Trajectories(padded, {});
  for (const char* name : {"returns", "states", "actions", "timesteps"}) {
    Tensor& to = longer.at(name);
    Fill(Slice(to.view(), 1, 0, kPadding), 11);
    CopyElements(inputs.at(name).view(), Slice(to.view(), 1, kPadding, inputs.at(name).dim(1)));
  }
  longer["key_mask"] = Tensor(DType::kU8, {1, padded.kv_tokens});
  Fill(longer["key_mask"].view(), 1);
  Fill(Slice(longer["key_mask"].view(), 1, 0, 3 * kPadding), 0);
  for (const Device device : TestedDevices()) {
    RunRequest request;
    request.device = device;
    const NamedTensors expected = Predict(plain, inputs, request),
                       outputs = Predict(padded, longer, request);
    for (const char* name : kOutputs) {
      const int64_t tokens_of_step = std::string(name) == "out" ? 3 : 1;
      const ConstTensorView rows =
          Rows(outputs.at(name), tokens_of_step * kPadding, expected.at(name).dim(1));
      EXPECT_LE(MaxDifference(rows, expected.at(name).view()), Bound(expected.at(name).view(), 2))
          << name;
    }
  }
}

// In one layer a token attends to embedded tokens, whose order it cannot see: so the action's token
// is the same where return and state change places, and an output read from the second place is
// not.
TEST(DecisionTransformer, WhereModalitiesChangePlacesTheHeadsMustReadOtherPlaces) {
  const Problem problem = Make(1, 2, 12, 8);
  const Options options = {{"layers", "1"}, {"state_dim", "1"}};
  NamedTensors inputs = Trajectories(problem, options);
  NamedTensors parameters = ParametersOf(problem, options);
  RunRequest request;
  request.options = options;
  request.parameters = &parameters;
  const NamedTensors before = Predict(problem, inputs, request);
  std::swap(inputs.at("returns"), inputs.at("states"));
  std::swap(parameters.at("embed.return.w"), parameters.at("embed.state.w"));
  std::swap(parameters.at("embed.return.b"), parameters.at("embed.state.b"));
  const NamedTensors after = Predict(problem, inputs, request);
  for (const char* name : {"state", "return"}) {
    EXPECT_LE(MaxDifference(before.at(name).view(), after.at(name).view()),
              Bound(before.at(name).view(), 1))
        << name;
  }
  EXPECT_GT(MaxDifference(before.at("action").view(), after.at("action").view()), 0.01);
}

// ---- Cost ----

TEST(DecisionTransformer, FlopsAreTheStacksAndThoseOfEmbeddingsAndHeads) {
  // There are 8 tokens: 3 returns, 3 states, 2 actions; and 3 predicted actions, 2 states, 2
  // returns.
  const Problem problem = Make(5, 2, 8, 4);
  const Options options = {{"state_dim", "7"}, {"action_dim", "11"}};
  const auto flops = [&](const Technique& technique, const Options& chosen) {
    const auto layer = technique.Create(problem, chosen, Device::kCpu, 1).value();
    const NamedTensors inputs = RandomInputs(technique.InputSpecs(problem, chosen).value(), 1);
    EXPECT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());  // Setup counts the pairs
    return layer->cost().flops.value();
  };
  const double stack = flops(*Registry::Global().Find("encoder_decoder").value(),
                             {{"block", "pre_norm"}, {"layers", "2"}});
  const double multiply_adds =
      5 * 8 * (3 * 1 + 3 * 7 + 2 * 11 + 3 * 11 + 2 * 7 + 2 * 1);  // batch, model_dim, channels
  EXPECT_EQ(flops(DecisionTransformer(), options), stack + 2 * multiply_adds);
}

// ---- Refusals ----

TEST(DecisionTransformer, KeysOfOtherTokensAndBidirectionalAttentionAreRefused) {
  Problem problem = Make(1, 2, 12, 8);
  problem.kv_tokens = 15;
  const auto keys = DecisionTransformer().Create(problem, {}, Device::kCpu, 1);
  EXPECT_EQ(keys.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(keys.status().message().find("kv_tokens is 15"), std::string::npos) << keys.status();
  problem = Make(1, 2, 12, 8);
  problem.causal = false;
  EXPECT_FALSE(DecisionTransformer().Create(problem, {}, Device::kCpu, 1).ok());
}

// ---- Another implementation ----

// Compares with Hugging Face's model. Rows of padded steps are left out: each implementation sees
// something else there.
void ExpectEqualsHuggingFace(const std::string& name) {
  const SafetensorsFile golden =
      GoldenFile("adaptive/decision_transformer/testdata/" + name + ".safetensors");
  const auto number = [&](const char* key) { return std::stoll(golden.metadata.at(key)); };
  const ConstTensorView real = golden.tensors.at("real_steps").view();
  const int64_t batch = real.dim(0), steps = real.dim(1), layers = number("layers");
  const Problem problem = Make(batch, number("heads"), 3 * steps, number("head_dim"));
  const Options options = {{"layers", golden.metadata.at("layers")},
                           {"feed_forward_dim", golden.metadata.at("inner_dim")},
                           {"activation", golden.metadata.at("activation")},
                           {"state_dim", golden.metadata.at("state_dim")},
                           {"action_dim", golden.metadata.at("action_dim")},
                           {"max_timestep", golden.metadata.at("max_timestep")},
                           {"action_tanh", golden.metadata.at("action_tanh")}};
  NamedTensors parameters, inputs;
  for (auto& [key, drawn] : ParametersOf(problem, options)) {
    parameters[key] = golden.tensors.at(key).Clone();
  }
  for (const char* key : {"returns", "states", "actions", "timesteps"}) {
    inputs[key] = golden.tensors.at(key).Clone();
  }
  Tensor& mask = inputs["key_mask"] = Tensor(DType::kU8, {batch, 3 * steps});
  for (int64_t i = 0; i < mask.num_elements(); ++i) {
    mask.span<uint8_t>()[i] = static_cast<uint8_t>(real.Get(i / 3));
  }
  RunRequest request;
  request.options = options;
  request.parameters = &parameters;
  const auto expect = [&](const NamedTensors& outputs, double factor, const char* what) {
    for (const char* key : kOutputs) {
      const ConstTensorView expected = golden.tensors.at(key).view();
      const int64_t rows = expected.dim(1) / steps;  // of a step
      for (int64_t r = 0; r < batch * steps; ++r) {
        if (real.Get(r) == 0) continue;
        const auto of_step = [&](const ConstTensorView& view) {
          return Slice(Slice(view, 0, r / steps, 1), 1, r % steps * rows, rows);
        };
        EXPECT_LE(MaxDifference(of_step(outputs.at(key).view()), of_step(expected)),
                  factor * MaxAbs(expected))
            << what << ": " << key << " of sequence " << r / steps << ", step " << r % steps;
      }
    }
  };
  auto defined = DefineTechnique(DecisionTransformer(), problem, ViewsOf(inputs), request).value();
  // The definition is in float64, except that tokens and hidden states are rounded to the problem's
  // fp32.
  expect(defined, 1e-6, "definition");
  for (const Device device : TestedDevices()) {
    request.device = device;
    expect(Predict(problem, inputs, request), std::sqrt(2.0 * layers + 2) * 2e-5, "layer");
  }
}

TEST(DecisionTransformer, EqualsHuggingFaceWithContinuousActionsAndPadding) {
  ExpectEqualsHuggingFace("continuous");
}

TEST(DecisionTransformer, EqualsHuggingFaceWithLogits) { ExpectEqualsHuggingFace("logits"); }

}  // namespace
}  // namespace tfb::decision_transformer
