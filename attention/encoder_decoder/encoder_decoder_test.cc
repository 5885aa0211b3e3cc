// Tolerance. As in memory/transformer_xl's test, the bound of a sublayer is that of fp32 attention,
// 2e-5 of the largest output, and the errors of several, which are independent, add in quadrature.
#include "attention/encoder_decoder/encoder_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/allocations.h"
#include "core/backward_testing.h"
#include "core/random.h"
#include "core/run_allocations.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::encoder_decoder {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Problem Make(int64_t tokens, int64_t kv_tokens, bool causal = false, DType dtype = DType::kF32) {
  Problem problem = Problem::SelfAttention(2, 2, tokens, 8, causal, dtype);
  problem.kv_tokens = kv_tokens;
  return problem;
}

NamedTensors Random(const Problem& problem, const Options& options = {}, uint64_t seed = 5) {
  return RandomInputs(EncoderDecoder().InputSpecs(problem, options).value(), seed);
}

// Returns the parameters of a layer, with gammas and betas moved off 1 and 0.
NamedTensors Parameters(const Problem& problem, const Options& options = {}) {
  const auto layer = EncoderDecoder().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) {
    Tensor& copy = parameters[name] = tensor.Clone();
    if (name.find("_norm.") == std::string::npos) continue;
    const RandomStream stream(2, name);
    for (int64_t i = 0; i < copy.num_elements(); ++i) {
      copy.span<float>()[i] += static_cast<float>(0.2 * stream.Normal(i));
    }
  }
  return parameters;
}

Tensor RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options,
              const NamedTensors& parameters, Device device = Device::kCpu) {
  auto outputs = RunTechnique(EncoderDecoder(), problem, ViewsOf(inputs),
                              {options, device, 1, &parameters, 2});
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? std::move(outputs->at("out")) : Tensor();
}

double Bound(const ConstTensorView& expected, DType dtype = DType::kF32) {
  // The bound covers up to two stacks of two layers of three sublayers; in 16 bits it adds 5
  // roundings, as HalfBound does.
  return std::sqrt(12.0) * Fp32Bound(expected) +
         (dtype == DType::kF32 ? 0 : 5 * UnitRoundoff(dtype)) * MaxAbs(expected);
}

void ExpectMatchesDefinition(const Problem& problem, const Options& options,
                             NamedTensors inputs = {}) {
  if (inputs.empty()) inputs = Random(problem, options);
  const NamedTensors parameters = Parameters(problem, options);
  RunRequest request{options};
  request.parameters = &parameters;
  const auto expected = DefineTechnique(EncoderDecoder(), problem, ViewsOf(inputs), request);
  ASSERT_TRUE(expected.ok()) << expected.status();
  const ConstTensorView out = expected->at("out").view();
  for (const Device device : TestedDevices()) {
    EXPECT_LE(MaxDifference(RunOwn(problem, inputs, options, parameters, device).view(), out),
              Bound(out, problem.dtype))
        << problem.ToString() << ", " << ToString(options) << ", " << Name(device);
  }
}

// Sets all parameters but the norms' to 0, so that sublayers add nothing.
NamedTensors OnlyNorms(const Problem& problem, const Options& options) {
  NamedTensors parameters = Parameters(problem, options);
  for (auto& [name, tensor] : parameters) {
    if (name.find("_norm.") == std::string::npos) Fill(tensor.view(), 0);
  }
  return parameters;
}

Tensor Normalized(const Tensor& x, const Tensor& gamma, const Tensor& beta) {
  const int64_t width = gamma.num_elements();
  const double n = static_cast<double>(width);
  Tensor result = x.CloneAs(DType::kF64);
  for (int64_t first = 0; first < x.num_elements(); first += width) {
    double* row = result.span<double>().data() + first;
    double mean = 0, square = 0;
    for (int64_t c = 0; c < width; ++c) mean += row[c] / n;
    for (int64_t c = 0; c < width; ++c) square += (row[c] - mean) * (row[c] - mean) / n;
    for (int64_t c = 0; c < width; ++c) {
      row[c] =
          (row[c] - mean) / std::sqrt(square + 1e-5) * gamma.view().Get(c) + beta.view().Get(c);
    }
  }
  return result;
}

// ---- Every part and block ----

TEST(EncoderDecoder, EveryPartAndBlockMatchesTheDefinition) {
  for (const char* block : {"post_norm", "pre_norm", "sparse"}) {
    ExpectMatchesDefinition(Make(33, 33, true), {{"block", block}});
    ExpectMatchesDefinition(Make(33, 70, true), {{"block", block}, {"part", "decoder"}});
    ExpectMatchesDefinition(Make(33, 70, true), {{"block", block}, {"part", "both"}});
    ExpectMatchesDefinition(Make(20, 7), {{"block", block}, {"part", "both"}});
  }
}

TEST(EncoderDecoder, EveryBlockWithAndWithoutAFinalNormMatchesTheDefinition) {
  for (const char* block : {"post_norm", "pre_norm", "sparse"}) {
    for (const char* final_norm : {"auto", "true", "false"}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        ExpectMatchesDefinition(Make(20, 33, true, dtype),
                                {{"block", block}, {"final_norm", final_norm}, {"part", "both"}});
      }
    }
  }
}

TEST(EncoderDecoder, EveryActivationMatchesTheDefinition) {
  for (const char* activation : {"relu", "gelu", "gelu_tanh", "gelu_sigmoid"}) {
    ExpectMatchesDefinition(
        Make(20, 20), {{"activation", activation}, {"layers", "1"}, {"feed_forward_dim", "21"}});
  }
}

TEST(EncoderDecoder, OtherShapesAndPrecisionsMatchTheDefinition) {
  Problem problem = Make(21, 35, true);
  problem.query_heads = 4;
  problem.value_dim = 5;
  ExpectMatchesDefinition(problem, {{"part", "both"}, {"bias", "false"}});
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const char* block : {"post_norm", "pre_norm"}) {
      ExpectMatchesDefinition(Make(33, 21, true, dtype), {{"part", "both"}, {"block", block}});
    }
  }
  for (const int64_t keys : {0, 1}) {
    ExpectMatchesDefinition(Make(9, keys, true), {{"part", "both"}});
  }
}

TEST(EncoderDecoder, TechniquesInsideAreThoseOfSelfAttention) {
  ExpectMatchesDefinition(Make(90, 90), {{"inner", "longformer[window=8]"}});
  ExpectMatchesDefinition(
      Make(40, 70, true),
      {{"inner", "longformer[window=8]"}, {"part", "both"}, {"block", "sparse"}});
  const Options own = {{"inner", "longformer[window=8,globals=0/9,projections=own]"}};
  ExpectMatchesDefinition(Make(40, 40), own);
  EXPECT_EQ(Parameters(Make(40, 40), own).count("encoder1.attention.w_q_global"), 1u);
  const Options performer = {{"inner", "performer[features=16]"}};
  ExpectMatchesDefinition(Make(40, 40, true), performer);
  const NamedTensors parameters = Parameters(Make(40, 40), performer);
  ASSERT_EQ(parameters.count("encoder1.attention.inner.w"), 1u);
  EXPECT_GT(MaxDifference(parameters.at("encoder0.attention.inner.w").view(),
                          parameters.at("encoder1.attention.inner.w").view()),
            0.1);
  std::vector<std::string> names;
  for (const auto& entry :
       Parameters(Make(40, 70), {{"inner", "performer"}, {"part", "decoder"}})) {
    names.push_back(entry.first);
  }
  EXPECT_THAT(names, Contains(StartsWith("decoder0.self.inner.")));
  EXPECT_THAT(names, Not(Contains(StartsWith("decoder0.cross.inner."))));
}

std::vector<std::string> InputNames(const Problem& problem, const Options& options) {
  std::vector<std::string> names;
  const std::vector<TensorSpec> specs = EncoderDecoder().InputSpecs(problem, options).value();
  for (const TensorSpec& spec : specs) names.push_back(spec.name);
  return names;
}

// Expects that the network with this input matches the definition, and is not the one with the
// other input or, where that is empty, without.
void ExpectMatters(const Problem& problem, const Options& options, const NamedTensors& inputs,
                   const std::string& name, Tensor other) {
  NamedTensors with, without;
  for (const auto& [key, tensor] : inputs) {
    with[key] = tensor.Clone();
    if (key != name) without[key] = tensor.Clone();
  }
  if (!other.empty()) without[name] = std::move(other);
  const NamedTensors parameters = Parameters(problem, options);
  for (const Device device : TestedDevices()) {
    EXPECT_GT(MaxDifference(RunOwn(problem, with, options, parameters, device).view(),
                            RunOwn(problem, without, options, parameters, device).view()),
              1e-2)
        << name << " " << Name(device);
  }
  ExpectMatchesDefinition(problem, options, std::move(with));
}

TEST(EncoderDecoder, MasksOfTheTechniqueInsideReachAllLayersOfAStack) {
  const auto marked = [](int64_t tokens) {
    Tensor mask(DType::kU8, {2, tokens});
    Fill(mask.view(), 0);
    for (const int64_t token : {3, 29}) Fill(Slice(mask.view(), 1, token, 1), 1);
    return mask;
  };
  Options options = {{"inner", "longformer[window=4,max_globals=2]"}};
  EXPECT_THAT(InputNames(Make(40, 40), options), ElementsAre("x", "key_mask", "global_mask"));
  NamedTensors inputs = Random(Make(40, 40), options);
  inputs["global_mask"] = marked(40);
  ExpectMatters(Make(40, 40), options, inputs, "global_mask", {});
  const auto layer = EncoderDecoder().Create(Make(40, 40), options, Device::kCpu, 1).value();
  EXPECT_EQ(AllocationsOfRun(*layer, ViewsOf(inputs)).value(), 0);

  options["part"] = "both";
  const Problem both = Make(40, 70);
  EXPECT_THAT(InputNames(both, options),
              ElementsAre("x", "memory", "key_mask", "encoder.global_mask", "decoder.global_mask"));
  for (const char* stack : {"encoder", "decoder"}) {
    inputs = Random(both, options);
    const std::string name = std::string(stack) + ".global_mask";
    inputs[name] = marked(stack[0] == 'e' ? 70 : 40);
    ExpectMatters(both, options, inputs, name, {});
  }
}

TEST(EncoderDecoder, NoiseOfTheTechniqueInsideIsEachLayersOwn) {
  const Problem problem = Make(20, 20);
  const Options options = {{"inner", "hard[sample=gumbel]"}};
  EXPECT_THAT(InputNames(problem, options), ElementsAre("x", "key_mask", "encoder0.attention.g",
                                                        "baseline", "encoder1.attention.g"));
  const NamedTensors inputs = Random(problem, options), others = Random(problem, options, 6);
  for (const char* name : {"encoder0.attention.g", "encoder1.attention.g"}) {
    ExpectMatters(problem, options, inputs, name, others.at(name).Clone());
  }
}

// ---- A technique for each layer ----

// Returns the parameters of layer n, under the names that they have in a stack of one layer.
NamedTensors OfOneLayer(const NamedTensors& parameters, int64_t n) {
  const std::string prefix = absl::StrCat("encoder", n, ".");
  NamedTensors result;
  for (const auto& [name, tensor] : parameters) {
    if (absl::StartsWith(name, prefix)) {
      result["encoder0." + name.substr(prefix.size())] = tensor.Clone();
    }
  }
  return result;
}

TEST(EncoderDecoder, AListOfTechniquesIsTheirStacksOfOneLayerOneOnTheOtherBitByBit) {
  const std::vector<std::vector<std::string>> lists = {
      {"longformer[window=4]", "longformer[window=12]"},
      {"strided[stride=4]", "fixed[stride=8]", "dense"},
      {"strided[combine=interleaved,stride=4]", "strided[combine=interleaved,layer=1,stride=4]"},
      {"performer[features=16]", "longformer[window=4]"}};
  const Problem problem = Make(40, 40, /*causal=*/true);
  for (const std::vector<std::string>& list : lists) {
    const Options options = {{"inner", absl::StrJoin(list, "/")},
                             {"layers", absl::StrCat(list.size())}};
    const NamedTensors parameters = Parameters(problem, options), inputs = Random(problem);
    for (const Device device : TestedDevices()) {
      NamedTensors h;
      h["x"] = inputs.at("x").Clone();
      for (size_t n = 0; n < list.size(); ++n) {
        h["x"] = RunOwn(problem, h, {{"inner", list[n]}, {"layers", "1"}},
                        OfOneLayer(parameters, static_cast<int64_t>(n)), device);
      }
      const Tensor out = RunOwn(problem, inputs, options, parameters, device);
      EXPECT_EQ(MaxDifference(out.view(), h.at("x").view()), 0)
          << ToString(options) << " " << Name(device);
    }
    ExpectMatchesDefinition(problem, options);
  }
}

TEST(EncoderDecoder, AListOfEqualTechniquesIsTheOneTechniqueBitByBit) {
  const Problem problem = Make(40, 40, /*causal=*/true);
  for (const char* inner : {"longformer[window=4]", "performer[features=16]"}) {
    const Options one = {{"inner", inner}, {"layers", "3"}};
    const Options list = {{"inner", absl::StrCat("3*", inner)}, {"layers", "3"}};
    const NamedTensors parameters = Parameters(problem, one), of_list = Parameters(problem, list);
    ASSERT_EQ(parameters.size(), of_list.size());
    for (const auto& [name, tensor] : parameters) {
      EXPECT_EQ(MaxDifference(tensor.view(), of_list.at(name).view()), 0) << name;
    }
    const NamedTensors inputs = Random(problem);
    for (const Device device : TestedDevices()) {
      EXPECT_EQ(MaxDifference(RunOwn(problem, inputs, one, parameters, device).view(),
                              RunOwn(problem, inputs, list, parameters, device).view()),
                0)
          << inner << " " << Name(device);
    }
    const auto layer = EncoderDecoder().Create(problem, list, Device::kCpu, 1).value();
    const auto same = EncoderDecoder().Create(problem, one, Device::kCpu, 1).value();
    EXPECT_EQ(layer->cost().flops, same->cost().flops);
    EXPECT_EQ(AllocationsOfRun(*layer, ViewsOf(inputs)).value(), 0);
  }
}

TEST(EncoderDecoder, ParametersHaveTheShapesOfTheirLayersTechnique) {
  const Problem problem = Make(40, 40);
  const Options options = {{"inner", "linformer[k=16]/linformer[k=8]/performer[features=24]"},
                           {"layers", "3"}};
  const NamedTensors parameters = Parameters(problem, options);
  for (const auto& [prefix, inner] : std::map<std::string, std::string>{
           {"encoder0.attention.inner.", "linformer[k=16]"},
           {"encoder1.attention.inner.", "linformer[k=8]"},
           {"encoder2.attention.inner.", "performer[features=24]"}}) {
    const Options alone = {{"inner", inner}, {"layers", "1"}};
    for (const auto& [name, tensor] : Parameters(problem, alone)) {
      if (!absl::StartsWith(name, "encoder0.attention.inner.")) continue;
      const std::string of_list = prefix + name.substr(prefix.size());
      ASSERT_EQ(parameters.count(of_list), 1u) << of_list;
      EXPECT_EQ(parameters.at(of_list).shape(), tensor.shape()) << of_list;
    }
  }
  ExpectMatchesDefinition(problem, options);
}

TEST(EncoderDecoder, OnlyTheLayersWhoseTechniqueReadsAMaskReadIt) {
  const Problem problem = Make(40, 40);
  const Options options = {
      {"inner", "dense/longformer[window=4,max_globals=2]/hard[sample=gumbel]"}, {"layers", "3"}};
  EXPECT_THAT(InputNames(problem, options),
              ElementsAre("x", "key_mask", "global_mask", "encoder2.attention.g", "baseline"));
  NamedTensors inputs = Random(problem, options);
  Tensor& mask = inputs["global_mask"] = Tensor(DType::kU8, {2, 40});
  Fill(mask.view(), 0);
  for (const int64_t token : {3, 29}) Fill(Slice(mask.view(), 1, token, 1), 1);
  ExpectMatters(problem, options, inputs, "global_mask", {});
  ExpectMatters(problem, options, inputs, "encoder2.attention.g",
                Random(problem, options, 6).at("encoder2.attention.g").Clone());
}

TEST(EncoderDecoder, ChoicesOfEachAttentionAreOutputsThatCanBeFollowed) {
  const Problem problem = Make(40, 40);
  const Options options = {{"inner", "dense/routing[clusters=4]/routing[clusters=2]"},
                           {"layers", "3"}};
  const std::vector<TensorSpec> written = EncoderDecoder().OutputSpecs(problem, options).value();
  ASSERT_EQ(written.size(), 3u);
  EXPECT_EQ(written[1].name, "encoder1.attention.members");
  EXPECT_EQ(written[2].name, "encoder2.attention.members");
  EXPECT_TRUE(written[1].optional && written[2].optional);
  NamedTensors inputs = Random(problem, options);
  const NamedTensors parameters = Parameters(problem, options);
  for (const Device device : TestedDevices()) {
    const RunRequest request = {options, device, 1, &parameters, 2};
    const NamedTensors run =
        RunTechnique(EncoderDecoder(), problem, ViewsOf(inputs), request).value();
    DefinitionRequest definition;
    definition.computed = &run;
    const NamedTensors defined =
        DefineTechnique(EncoderDecoder(), problem, ViewsOf(inputs), request, definition).value();
    EXPECT_LE(MaxDifference(run.at("out").view(), defined.at("out").view()),
              Bound(defined.at("out").view()))
        << Name(device);
    NamedTensors following;
    following["x"] = inputs.at("x").Clone();
    for (const char* name : {"encoder1.attention.members", "encoder2.attention.members"}) {
      EXPECT_EQ(MaxDifference(run.at(name).view(), defined.at(name).view()), 0)
          << name << " " << Name(device);
      following[name] = run.at(name).Clone();
    }
    const NamedTensors again =
        RunTechnique(EncoderDecoder(), problem, ViewsOf(following), request).value();
    EXPECT_EQ(MaxDifference(again.at("out").view(), run.at("out").view()), 0) << Name(device);
  }
}

TEST(EncoderDecoder, AListOfBothStacksBeginsWithTheEncoders) {
  const Problem problem = Make(40, 70, /*causal=*/true);
  const Options led = {{"inner", "2*longformer[window=4,max_globals=2]/2*dense"}, {"part", "both"}};
  EXPECT_THAT(InputNames(problem, led),
              ElementsAre("x", "memory", "key_mask", "encoder.global_mask"));
  ExpectMatchesDefinition(problem, led);
  // Its decoder is that of a list of dense attention alone, and its encoder is not.
  const NamedTensors inputs = Random(problem, led), parameters = Parameters(problem, led);
  const Options dense = {{"part", "both"}};
  EXPECT_GT(MaxDifference(RunOwn(problem, inputs, led, parameters).view(),
                          RunOwn(problem, inputs, dense, parameters).view()),
            1e-2);
  const Options either = {{"inner", "dense/dense[scale=0.3]"}, {"part", "both"}};
  const Options written = {{"inner", "2*(dense/dense[scale=0.3])"}, {"part", "both"}};
  EXPECT_EQ(MaxDifference(RunOwn(problem, inputs, either, parameters).view(),
                          RunOwn(problem, inputs, written, parameters).view()),
            0);
}

TEST(EncoderDecoder, AListOfAnotherLengthNamesBothCounts) {
  const auto error = [](const Options& options) {
    const auto layer = EncoderDecoder().Create(Make(40, 40), options, Device::kCpu, 1);
    return layer.ok() ? "ok" : std::string(layer.status().message());
  };
  EXPECT_EQ(error({{"inner", "3*dense"}, {"layers", "2"}}),
            "option inner names 3 techniques; allowed with layers=2 are 1 or 2");
  EXPECT_EQ(error({{"inner", "dense/dense"}, {"layers", "12"}, {"part", "both"}}),
            "option inner names 2 techniques; allowed with layers=12 are 1 or 12 or 24");
  EXPECT_EQ(error({{"inner", "4*dense"}, {"part", "decoder"}}),
            "option inner names 4 techniques; allowed with layers=2 are 1 or 2");
  EXPECT_EQ(error({{"inner", "dense/hard"}}), "ok");
  EXPECT_THAT(error({{"inner", "dense/longformer[dilation=1/2/3]"}}),
              HasSubstr("dilation has 3 entries"));
  // The tensors can be asked for, too, before a layer is made.
  EXPECT_TRUE(EncoderDecoder().InputSpecs(Make(40, 40), {{"inner", "3*dense"}}).ok());
}

TEST(EncoderDecoder, PaddedTokensAreHiddenWhereverTheyAreKeys) {
  for (const char* part : {"encoder", "decoder", "both"}) {
    const Problem problem = Make(40, 40);
    const Options options = {{"part", part}, {"block", "pre_norm"}};
    NamedTensors inputs = Random(problem, options);
    Tensor mask(DType::kU8, {2, 40});
    Fill(mask.view(), 1);
    Fill(Slice(mask.view(), 1, 30, 10), 0);
    inputs["key_mask"] = std::move(mask);
    const NamedTensors parameters = Parameters(problem, options);
    const Tensor before = RunOwn(problem, inputs, options, parameters);
    const char* keys = std::strcmp(part, "encoder") == 0 ? "x" : "memory";
    Fill(Slice(inputs[keys].view(), 1, 30, 10), 3);
    const Tensor after = RunOwn(problem, inputs, options, parameters);
    // In an encoder, padding tokens are computed like others.
    EXPECT_EQ(MaxDifference(Slice(before.view(), 1, 0, 30), Slice(after.view(), 1, 0, 30)), 0)
        << part;
    ExpectMatchesDefinition(problem, options, std::move(inputs));
  }
}

// ---- Invariants ----

TEST(EncoderDecoder, PreNormLayersThatAddNothingLeaveTheLastNorm) {
  const Problem problem = Make(30, 20);
  for (const char* block : {"pre_norm", "sparse"}) {
    const Options options = {{"block", block}, {"part", "decoder"}, {"layers", "3"}};
    const NamedTensors inputs = Random(problem, options);
    const NamedTensors parameters = OnlyNorms(problem, options);
    const Tensor expected = Normalized(inputs.at("x"), parameters.at("decoder_norm.gamma"),
                                       parameters.at("decoder_norm.beta"));
    EXPECT_LE(MaxDifference(RunOwn(problem, inputs, options, parameters).view(), expected.view()),
              Fp32Bound(expected.view()));
  }
}

TEST(EncoderDecoder, PreNormLayersThatAddNothingAndNoFinalNormLeaveTheInputBitByBit) {
  const Problem problem = Make(30, 20);
  for (const char* block : {"pre_norm", "sparse"}) {
    const Options options = {{"block", block}, {"part", "decoder"}, {"final_norm", "false"}};
    const NamedTensors inputs = Random(problem, options);
    const NamedTensors parameters = OnlyNorms(problem, options);
    EXPECT_EQ(parameters.count("decoder_norm.gamma"), 0u);
    const Tensor out = RunOwn(problem, inputs, options, parameters);
    EXPECT_EQ(MaxDifference(out.view(), inputs.at("x").view()), 0);
  }
}

TEST(EncoderDecoder, TheFinalNormIsANormOfWhatTheStackWritesWithoutIt) {
  const Problem problem = Make(30, 20, /*causal=*/true);
  for (const char* block : {"post_norm", "pre_norm"}) {
    Options options = {{"block", block}, {"part", "decoder"}, {"final_norm", "true"}};
    const NamedTensors inputs = Random(problem, options);
    NamedTensors parameters = Parameters(problem, options);
    const Tensor with = RunOwn(problem, inputs, options, parameters);
    const Tensor gamma = std::move(parameters.at("decoder_norm.gamma"));
    const Tensor beta = std::move(parameters.at("decoder_norm.beta"));
    parameters.erase("decoder_norm.gamma");
    parameters.erase("decoder_norm.beta");
    options["final_norm"] = "false";
    const Tensor expected = Normalized(RunOwn(problem, inputs, options, parameters), gamma, beta);
    EXPECT_LE(MaxDifference(with.view(), expected.view()), Fp32Bound(expected.view()));
  }
}

TEST(EncoderDecoder, PostNormLayersThatAddNothingNormaliseAgainAndAgain) {
  const Problem problem = Make(30, 30);
  const Options options = {{"layers", "1"}};
  const NamedTensors inputs = Random(problem, options);
  const NamedTensors parameters = OnlyNorms(problem, options);
  const Tensor once = Normalized(inputs.at("x"), parameters.at("encoder0.attention_norm.gamma"),
                                 parameters.at("encoder0.attention_norm.beta"));
  const Tensor twice = Normalized(once, parameters.at("encoder0.ff_norm.gamma"),
                                  parameters.at("encoder0.ff_norm.beta"));
  EXPECT_LE(MaxDifference(RunOwn(problem, inputs, options, parameters).view(), twice.view()),
            Bound(twice.view()));
}

TEST(EncoderDecoder, ATokenOfEqualChannelsBecomesTheLastNormsBeta) {
  const Problem problem = Make(5, 5);
  const Options options = {{"block", "pre_norm"}};
  NamedTensors inputs = Random(problem, options);
  Fill(inputs["x"].view(), 7);
  const NamedTensors parameters = OnlyNorms(problem, options);
  const Tensor out = RunOwn(problem, inputs, options, parameters);
  for (int64_t n = 0; n < out.num_elements(); ++n) {
    ASSERT_EQ(out.span<float>()[n], parameters.at("encoder_norm.beta").span<float>()[n % 16]);
  }
}

TEST(EncoderDecoder, AnEncoderDoesNotKnowTheOrderOfItsTokens) {
  const Problem problem = Make(50, 50);
  NamedTensors inputs = Random(problem);
  const NamedTensors parameters = Parameters(problem);
  const Tensor out = RunOwn(problem, inputs, {}, parameters);
  const Tensor x = inputs.at("x").Clone();
  Tensor expected(DType::kF32, out.shape());
  for (int64_t t = 0; t < 50; ++t) {
    CopyElements(Slice(x.view(), 1, t, 1), Slice(inputs["x"].view(), 1, t * 7 % 50, 1));
    CopyElements(Slice(out.view(), 1, t, 1), Slice(expected.view(), 1, t * 7 % 50, 1));
  }
  EXPECT_LE(MaxDifference(RunOwn(problem, inputs, {}, parameters).view(), expected.view()),
            Bound(expected.view()));
}

TEST(EncoderDecoder, TheFutureOfXDoesNotReachItsPastButAllOfTheMemoryDoes) {
  const Problem problem = Make(30, 12, /*causal=*/true);
  for (const char* part : {"decoder", "both"}) {
    const Options options = {{"part", part}};
    NamedTensors inputs = Random(problem, options);
    const NamedTensors parameters = Parameters(problem, options);
    const Tensor before = RunOwn(problem, inputs, options, parameters);
    Fill(Slice(inputs["x"].view(), 1, 20, 10), 1);
    const Tensor after = RunOwn(problem, inputs, options, parameters);
    EXPECT_EQ(MaxDifference(Slice(before.view(), 1, 0, 20), Slice(after.view(), 1, 0, 20)), 0);
    EXPECT_GT(MaxDifference(Slice(before.view(), 1, 20, 1), Slice(after.view(), 1, 20, 1)), 1e-3);
    Fill(Slice(inputs["memory"].view(), 1, 11, 1), 1);  // changes the last token and the first row
    const Tensor other = RunOwn(problem, inputs, options, parameters);
    EXPECT_GT(MaxDifference(Slice(after.view(), 1, 0, 1), Slice(other.view(), 1, 0, 1)), 1e-4);
  }
}

TEST(EncoderDecoder, BothIsTheDecoderOnWhatTheEncoderMakesOfTheMemory) {
  const Problem problem = Make(30, 44, /*causal=*/true);
  const Options both = {{"part", "both"}, {"block", "pre_norm"}};
  const Options decoder = {{"part", "decoder"}, {"block", "pre_norm"}};
  const Options encoder = {{"block", "pre_norm"}};
  NamedTensors inputs = Random(problem, both);
  const NamedTensors parameters = Parameters(problem, both);
  NamedTensors of_encoder, of_decoder;
  for (const auto& [name, tensor] : parameters) {
    (name[0] == 'e' ? of_encoder : of_decoder)[name] = tensor.Clone();
  }
  const Tensor expected = RunOwn(problem, inputs, both, parameters);
  NamedTensors source;
  source["x"] = inputs.at("memory").Clone();
  inputs["memory"] = RunOwn(Make(44, 44), source, encoder, of_encoder);
  EXPECT_EQ(MaxDifference(RunOwn(problem, inputs, decoder, of_decoder).view(), expected.view()), 0);
}

TEST(EncoderDecoder, ASparseBlockIsAPreNormLayerDrawnSmaller) {
  const Problem problem = Make(30, 30, /*causal=*/true);
  const Options sparse = {{"block", "sparse"}, {"layers", "8"}};
  const Options pre_norm = {{"block", "pre_norm"}, {"layers", "8"}, {"activation", "gelu_sigmoid"}};
  const NamedTensors inputs = Random(problem);
  const NamedTensors parameters = Parameters(problem, sparse),
                     usual = Parameters(problem, pre_norm);
  EXPECT_EQ(MaxDifference(RunOwn(problem, inputs, sparse, parameters).view(),
                          RunOwn(problem, inputs, pre_norm, parameters).view()),
            0);
  for (const auto& [name, tensor] : parameters) {
    const bool is_residual =
        name.find("w_o") != std::string::npos || name.find("ff.w2") != std::string::npos;
    for (int64_t n = 0; n < tensor.num_elements(); ++n) {
      ASSERT_NEAR(tensor.span<float>()[n], usual.at(name).span<float>()[n] / (is_residual ? 4 : 1),
                  1e-7)
          << name;  // sqrt(2 * 8) = 4
    }
  }
}

// ---- What tools ask ----

TEST(EncoderDecoder, GptTwoSmallHas124439808Parameters) {
  EncoderDecoderOptions options;
  options.block = EncoderDecoderOptions::BlockKind::kPreNorm;
  options.layers = 12;
  const Problem problem = Problem::SelfAttention(1, 12, 1024, 64, /*causal=*/true);
  EXPECT_EQ(LanguageModelParameterCount(problem, options, 50257, 1024), 124'439'808);
  // The formula is 12 l d^2 + 13 l d, the embeddings, and the last norm.
  EXPECT_EQ(LanguageModelParameterCount(problem, options, 50257, 1024),
            12 * 12 * 768 * 768 + 13 * 12 * 768 + 50257 * 768 + 1024 * 768 + 2 * 768);
}

TEST(EncoderDecoder, TheCountOfParametersIsThatOfTheTensors) {
  Problem grouped = Make(10, 10);
  grouped.query_heads = 4;
  grouped.value_dim = 3;
  for (const Problem& problem : {Make(10, 10), grouped}) {
    for (const char* part : {"encoder", "decoder", "both"}) {
      for (const char* block : {"post_norm", "pre_norm", "sparse"}) {
        for (const char* bias : {"true", "false"}) {
          const Options options = {{"part", part},  {"block", block},
                                   {"bias", bias},  {"final_norm", bias},
                                   {"layers", "3"}, {"feed_forward_dim", "21"}};
          int64_t count = 0;
          for (const auto& entry : Parameters(problem, options)) {
            count += entry.second.num_elements();
          }
          EXPECT_EQ(ParameterCount(problem, *ParseOptions<EncoderDecoderOptions>(options)), count)
              << ToString(options);
        }
      }
    }
  }
}

TEST(EncoderDecoder, CostCountsEverySublayer) {
  // The width is 16, the feed-forward 32, the batch 2; there are 5 queries, 15 causal pairs a head,
  // and 3 keys of memory.
  const Problem problem = Make(5, 3, /*causal=*/true);
  const Options options = {{"part", "both"}, {"layers", "1"}, {"feed_forward_dim", "32"}};
  const auto layer = EncoderDecoder().Create(problem, options, Device::kCpu, 1).value();
  const NamedTensors inputs = Random(problem, options);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  const double square = 16 * 16, pair = 2 * 16;  // of both heads together
  const double encoder = 3 * (4 * square + 2 * 16 * 32) + 3 * 3 * pair;
  const double decoder =
      5 * (4 * square + 2 * square + 2 * 16 * 32) + 3 * 2 * square + (15 + 5 * 3) * pair;
  EXPECT_EQ(layer->cost().flops, 2 * 2 * (encoder + decoder));
  double parameters = 0;
  for (const auto& [name, tensor] : layer->parameters()) {
    parameters += static_cast<double>(tensor.num_elements());
  }
  EXPECT_EQ(layer->cost().bytes, 4 * (2 * (5 + 3 + 5) * 16 + parameters));
}

TEST(EncoderDecoder, RunAllocatesNothingInAnyPartAndBlock) {
  for (const char* part : {"decoder", "both"}) {
    for (const char* block : {"post_norm", "pre_norm"}) {
      const Options options = {{"part", part}, {"block", block}};
      const Problem problem = Make(70, 90, true);
      const auto layer = EncoderDecoder().Create(problem, options, Device::kCpu, 1).value();
      const NamedTensors inputs = Random(problem, options);
      NamedTensors outputs = NanOutputs(layer->outputs());
      const Inputs read = ViewsOf(inputs);
      const Outputs written = MutableViewsOf(outputs);
      ThreadPool pool(2);
      Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(2))});
      Execution execution;
      execution.pool = &pool;
      execution.workspace =
          absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
      ASSERT_TRUE(layer->Setup(read, execution).ok());
      const int64_t before = AllocationCount();
      const bool ok = layer->Run(read, written, execution).ok();
      EXPECT_EQ(AllocationCount() - before, 0) << ToString(options);
      EXPECT_TRUE(ok);
    }
  }
}

TEST(EncoderDecoder, TheCounterpartHasDenseAttentionInside) {
  EXPECT_EQ(ToString(EncoderDecoder()
                         .Counterpart(Make(40, 40),
                                      {{"inner", "longformer[window=8]"}, {"block", "sparse"}})
                         .value()),
            "encoder_decoder:activation=auto,bias=true,block=sparse,feed_forward_dim=0,final_norm="
            "auto,inner=dense,layers=2,part=encoder,recompute=false");
  const auto inner = [](const char* list) {
    return EncoderDecoder().Counterpart(Make(40, 40), {{"inner", list}})->options.at("inner");
  };
  EXPECT_EQ(inner("longformer[window=8]/performer"), "dense");
  EXPECT_EQ(inner("2*performer"), "dense");
}

TEST(EncoderDecoder, WhatItCannotDoIsSaidWithTheReason) {
  const auto error = [](const Problem& problem, const Options& options) {
    const auto layer = EncoderDecoder().Create(problem, options, Device::kCpu, 1);
    return layer.ok() ? "ok" : std::string(layer.status().message());
  };
  EXPECT_EQ(error(Make(40, 41), {}),
            "with part=encoder keys are of the same tokens as queries: kv_tokens is 41; allowed is "
            "query_tokens, 40");
  EXPECT_THAT(error(Make(40, 40), {{"inner", "dense[skale=1]"}}), HasSubstr("known are scale"));
  const Options hidden = {{"inner", "sinkhorn[pooled=hidden]"}};
  EXPECT_EQ(error(Make(40, 40), hidden), "ok");
  EXPECT_EQ(error(Make(40, 40, false, DType::kBF16), hidden),
            "inner sinkhorn[pooled=hidden]: it reads the hidden state x in bf16, but between "
            "layers x is f32");
  EXPECT_THAT(error(Make(40, 40), {{"inner", "longformer[dilation=1/2/3]"}}),
              HasSubstr("dilation has 3 entries"));
}

// ---- The backward pass ----

// The roundings of a network: those of its attentions, feed-forward networks and norms.
double RoundingsOf(const Problem& problem, const Options& options) {
  const auto found = options.find("layers");
  const double layers = found == options.end() ? 2 : std::stod(found->second);
  const double stacks = options.count("part") > 0 && options.at("part") == "both" ? 2 : 1;
  const double width = static_cast<double>(problem.model_dim());
  return stacks * layers * (2 * AttentionRoundings(problem) + 20 * width + 6 * width);
}

TEST(EncoderDecoder, GradientsAreThoseOfItsDefinition) {
  for (const char* block : {"post_norm", "pre_norm", "sparse"}) {
    for (const char* part : {"encoder", "decoder", "both"}) {
      const bool is_encoder = std::string(part) == "encoder";
      const Problem problem = Make(11, is_encoder ? 11 : 7, std::string(block) == "sparse");
      Options options = {{"block", block}, {"part", part}, {"layers", "2"}};
      if (std::string(block) == "post_norm") options["final_norm"] = "true";
      SCOPED_TRACE(ToString(TechniqueSpec{"encoder_decoder", options}));
      ExpectGradientsOfDefinition(EncoderDecoder(), problem,
                                  {options, RoundingsOf(problem, options)});
    }
  }
}

TEST(EncoderDecoder, LayersThatAreComputedAgainHaveTheSameBits) {
  for (const char* block : {"post_norm", "pre_norm", "sparse"}) {
    for (const char* part : {"encoder", "decoder", "both"}) {
      const Problem problem = Make(11, std::string(part) == "encoder" ? 11 : 7, false);
      Options options = {{"block", block}, {"part", part}, {"layers", "3"}, {"final_norm", "true"}};
      SCOPED_TRACE(ToString(TechniqueSpec{"encoder_decoder", options}));
      const auto gradients = [&](const char* recompute) {
        options["recompute"] = recompute;
        const auto layer = EncoderDecoder().Create(problem, options, Device::kCpu, 1).value();
        const NamedTensors inputs = RandomInputs(layer->inputs(), 1);
        return RunBackward(*layer, ViewsOf(inputs), RandomOutputGradients(*layer, 2)).value();
      };
      const LayerGradients kept = gradients("false"), again = gradients("true");
      for (const auto& [one, other] :
           {std::pair(&kept.outputs, &again.outputs), std::pair(&kept.inputs, &again.inputs),
            std::pair(&kept.parameters, &again.parameters)}) {
        ASSERT_EQ(one->size(), other->size());
        for (const auto& [name, tensor] : *one) {
          EXPECT_EQ(MaxDifference(tensor.view(), other->at(name).view()), 0) << name;
        }
      }
    }
  }
}

// A layer more keeps one state more, whatever the layer holds.
TEST(EncoderDecoder, WithRecomputeALayerKeepsOneState) {
  const Problem problem = Make(64, 64, false);
  const auto kept = [&](const char* layers, const char* recompute) {
    return EncoderDecoder()
        .Create(problem, {{"layers", layers}, {"recompute", recompute}}, Device::kCpu, 1)
        .value()
        ->kept_bytes();
  };
  const size_t state = 4 * problem.batch * 64 * problem.model_dim();
  EXPECT_EQ(kept("1", "true"), 0u);
  EXPECT_EQ(kept("5", "true") - kept("4", "true"), state);
  EXPECT_GT(kept("5", "false") - kept("4", "false"), 8 * state);
}

TEST(EncoderDecoder, GradientsOfPostNormLayersAndListsOfTechniquesAreThoseOfTheDefinition) {
  const Problem problem = Make(12, 12, /*causal=*/true);
  for (const Options& options :
       {Options{{"layers", "1"}, {"activation", "gelu"}, {"bias", "false"}},
        Options{{"layers", "3"}, {"activation", "gelu_tanh"}, {"inner", "alibi/2*longformer"}}}) {
    SCOPED_TRACE(ToString(TechniqueSpec{"encoder_decoder", options}));
    ExpectGradientsOfDefinition(EncoderDecoder(), problem,
                                {options, RoundingsOf(problem, options)});
  }
}

// ---- Golden files ----

class EncoderDecoderGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Files, EncoderDecoderGolden,
                         testing::Values("encoder_post_norm", "encoder_pre_norm",
                                         "decoder_post_norm", "decoder_pre_norm", "sparse",
                                         "encoder_pre_norm_no_final_norm",
                                         "decoder_post_norm_final_norm"));

TEST_P(EncoderDecoderGolden, TorchComputesTheSame) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/encoder_decoder/testdata/") + GetParam() + ".safetensors");
  const auto text = [&](const char* name) { return golden.metadata.at(name); };
  const int64_t heads = std::stoll(text("heads")), head_dim = std::stoll(text("head_dim"));
  NamedTensors inputs, parameters;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name == "x" || name == "memory") inputs[name] = tensor.Clone();
    if (name == "key_padding") inputs["key_mask"] = tensor.CloneAs(DType::kU8);
    if (name.find('.') != std::string::npos) parameters[name] = tensor.Clone();
  }
  Problem problem =
      Problem::SelfAttention(2, heads, inputs.at("x").dim(1), head_dim, text("causal") == "true");
  if (inputs.count("memory") > 0) problem.kv_tokens = inputs.at("memory").dim(1);
  RunRequest request{{{"part", text("part")},
                      {"block", text("block")},
                      {"final_norm", text("final_norm")},
                      {"activation", text("activation")},
                      {"layers", text("layers")},
                      {"feed_forward_dim", text("inner_dim")}}};
  ASSERT_EQ(parameters.size(), Parameters(problem, request.options).size());
  request.parameters = &parameters;
  const ConstTensorView out = golden.tensors.at("out").view();
  const auto defined = DefineTechnique(EncoderDecoder(), problem, ViewsOf(inputs), request);
  ASSERT_TRUE(defined.ok()) << defined.status();
  EXPECT_LE(MaxDifference(defined->at("out").view(), out), 1e-13);
  for (const Device device : TestedDevices()) {
    EXPECT_LE(
        MaxDifference(RunOwn(problem, inputs, request.options, parameters, device).view(), out),
        Bound(out))
        << Name(device);
  }
}

}  // namespace
}  // namespace tfb::encoder_decoder
