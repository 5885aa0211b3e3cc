// Tolerance. Attention has the bound of fp32, 2e-5 of the largest value it mixes; the output
// projection adds up as many products of order 1 / sqrt(rows) as there are rows, so that an error
// passes through it unchanged in size: 2e-5 of the largest output, or of 1 where that is more.
#include "attention/multi_head/multi_head.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/dense/dense.h"
#include "attention/longformer/longformer.h"
#include "core/backward_testing.h"
#include "core/random.h"
#include "core/run_allocations.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::multi_head {
namespace {

const Technique& MultiHead() { return FindTechnique("multi_head"); }

using ::testing::HasSubstr;

Problem Self(int64_t heads, int64_t tokens, int64_t head_dim, bool causal = false,
             DType dtype = DType::kF32) {
  return Problem::SelfAttention(2, heads, tokens, head_dim, causal, dtype);
}

NamedTensors Random(const Problem& problem, const Options& options = {}) {
  return RandomInputs(MultiHead().InputSpecs(problem, options).value(), 5);
}

NamedTensors Parameters(const Problem& problem, const Options& options = {}) {
  const auto layer = MultiHead().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  NamedTensors parameters;
  for (const auto& [name, tensor] : (*layer)->parameters()) parameters[name] = tensor.Clone();
  return parameters;
}

Tensor RunOwn(const Problem& problem, const Inputs& inputs, const Options& options = {},
              const NamedTensors* parameters = nullptr, Device device = Device::kCpu) {
  RunRequest request{options, device};
  request.parameters = parameters;
  auto outputs = RunTechnique(MultiHead(), problem, inputs, request);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? std::move(outputs->at("out")) : Tensor();
}

double Bound(const ConstTensorView& expected, DType dtype = DType::kF32) {
  return Fp32Bound(expected) + 2e-5 +
         (dtype == DType::kF32 ? 0 : 5 * UnitRoundoff(dtype)) * std::max(1.0, MaxAbs(expected));
}

void ExpectMatchesDefinition(const Problem& problem, const Options& options,
                             NamedTensors inputs = {}) {
  if (inputs.empty()) inputs = Random(problem, options);
  const auto expected = DefineTechnique(MultiHead(), problem, ViewsOf(inputs), {options});
  ASSERT_TRUE(expected.ok()) << expected.status();
  const Tensor& out = expected->at("out");
  for (const Device device : TestedDevices()) {
    EXPECT_LE(MaxDifference(RunOwn(problem, ViewsOf(inputs), options, nullptr, device).view(),
                            out.view()),
              Bound(out.view(), problem.dtype))
        << problem.ToString() << ", " << ToString(options) << ", " << Name(device);
  }
}

std::string Error(const Problem& problem, const Options& options) {
  const auto layer = MultiHead().Create(problem, options, Device::kCpu, 1);
  return layer.ok() ? "ok" : std::string(layer.status().message());
}

// Returns the identity matrix, [size, size].
Tensor Identity(int64_t size) {
  Tensor matrix(DType::kF32, {size, size});
  Fill(matrix.view(), 0);
  for (int64_t n = 0; n < size; ++n) *matrix.view().MutableAt<float>(n, n) = 1;
  return matrix;
}

// Returns x W of a hidden state as the heads of q, k or v.
Tensor Project(const Tensor& x, const Tensor& w, int64_t heads) {
  const int64_t batch = x.dim(0), tokens = x.dim(1), channels = w.dim(1) / heads;
  Tensor result(DType::kF32, {batch, heads, tokens, channels});
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t c = 0; c < w.dim(1); ++c) {
        double sum = 0;
        for (int64_t k = 0; k < w.dim(0); ++k) {
          sum += static_cast<double>(*x.view().At<float>(b, t, k)) * *w.view().At<float>(k, c);
        }
        *result.view().MutableAt<float>(b, c / channels, t, c % channels) = static_cast<float>(sum);
      }
    }
  }
  return result;
}

// ---- The formula ----

TEST(MultiHead, OneHeadWithoutProjectionsIsDenseAttention) {
  const Problem problem = Self(1, 50, 16, /*causal=*/true);
  NamedTensors parameters;
  for (const char* name : {"w_q", "w_k", "w_v", "w_o"}) parameters[name] = Identity(16);
  const NamedTensors inputs = Random(problem);
  const Tensor& x = inputs.at("x");
  const ConstTensorView head(x.raw(), x.dtype(), {2, 1, 50, 16});
  const NamedTensors dense =
      RunTechnique(dense::Dense(), problem, {{"q", head}, {"k", head}, {"v", head}}).value();
  const ConstTensorView expected(dense.at("out").raw(), DType::kF32, {2, 50, 16});
  EXPECT_EQ(MaxDifference(RunOwn(problem, ViewsOf(inputs), {}, &parameters).view(), expected), 0);
}

TEST(MultiHead, TwoTokensByHand) {
  // There is one head of one channel and scale 1: x = 1, 2; q = 2 x, k = x, v = 3 x, y = -attention
  // + 0.5.
  Problem problem = Problem::SelfAttention(1, 1, 2, 1);
  NamedTensors parameters;
  for (const auto& [name, value] : std::vector<std::pair<std::string, double>>{
           {"w_q", 2}, {"w_k", 1}, {"w_v", 3}, {"w_o", -1}}) {
    Fill((parameters[name] = Tensor(DType::kF32, {1, 1})).view(), value);
  }
  for (const char* name : {"b_q", "b_k", "b_v", "b_o"}) {
    Fill((parameters[name] = Tensor(DType::kF32, {1})).view(), name[2] == 'o' ? 0.5 : 0);
  }
  Tensor x(DType::kF32, {1, 2, 1});
  x.span<float>()[0] = 1;
  x.span<float>()[1] = 2;
  const Tensor out = RunOwn(problem, {{"x", x.view()}}, {{"bias", "true"}}, &parameters);
  for (int64_t i = 0; i < 2; ++i) {
    // The scores of token i are 2 (i + 1) and 4 (i + 1); values are 3 and 6.
    const double first = std::exp(2.0 * static_cast<double>(i + 1));
    const double second = std::exp(4.0 * static_cast<double>(i + 1));
    EXPECT_NEAR(out.span<float>()[i], 0.5 - (3 * first + 6 * second) / (first + second), 2e-6);
  }
}

TEST(MultiHead, HeadsMayChangePlacesTogetherWithTheRowsOfTheOutputMatrix) {
  const Problem problem = Self(3, 40, 8);
  const NamedTensors inputs = Random(problem);
  const NamedTensors parameters = Parameters(problem);
  NamedTensors permuted;
  for (const auto& [name, tensor] : parameters) {
    Tensor& to = permuted[name] = Tensor(DType::kF32, tensor.shape());
    const int axis = name == "w_o" ? 0 : 1;
    for (int64_t h = 0; h < 3; ++h) {
      CopyElements(Slice(tensor.view(), axis, h * 8, 8),
                   Slice(to.view(), axis, (h + 1) % 3 * 8, 8));
    }
  }
  const Tensor out = RunOwn(problem, ViewsOf(inputs), {}, &parameters);
  EXPECT_LE(MaxDifference(RunOwn(problem, ViewsOf(inputs), {}, &permuted).view(), out.view()),
            Bound(out.view()));
}

TEST(MultiHead, TheOutputIsTheSumOfWhatEachHeadGivesAlone) {
  const Problem problem = Self(3, 40, 8, /*causal=*/true);
  const NamedTensors inputs = Random(problem);
  const Tensor whole = RunOwn(problem, ViewsOf(inputs));
  Tensor sum(DType::kF32, whole.shape());
  Fill(sum.view(), 0);
  for (int64_t h = 0; h < 3; ++h) {
    NamedTensors parameters = Parameters(problem);
    for (int64_t other = 0; other < 3; ++other) {
      if (other != h) Fill(Slice(parameters["w_o"].view(), 0, other * 8, 8), 0);
    }
    const Tensor part = RunOwn(problem, ViewsOf(inputs), {}, &parameters);
    for (int64_t n = 0; n < sum.num_elements(); ++n) sum.span<float>()[n] += part.span<float>()[n];
  }
  EXPECT_LE(MaxDifference(sum.view(), whole.view()), Bound(whole.view()));
}

TEST(MultiHead, EqualTokensGiveEqualRows) {
  const Problem problem = Self(2, 70, 16);
  NamedTensors inputs = Random(problem);
  const TensorView x = inputs["x"].view();
  for (int64_t t = 1; t < 70; ++t) CopyElements(Slice(x, 1, 0, 1), Slice(x, 1, t, 1));
  const Tensor out = RunOwn(problem, ViewsOf(inputs));
  for (int64_t t = 1; t < 70; ++t) {
    EXPECT_EQ(MaxDifference(Slice(out.view(), 1, t, 1), Slice(out.view(), 1, 0, 1)), 0);
  }
}

TEST(MultiHead, WithoutAnOutputMatrixOrAKeyItsBiasIsLeft) {
  const Problem problem = Self(2, 30, 8, /*causal=*/true);
  const Options options = {{"bias", "true"}};
  NamedTensors inputs = Random(problem);
  NamedTensors parameters = Parameters(problem, options);
  const auto expect_bias = [&](const Tensor& out, int64_t batch) {
    for (int64_t t = 0; t < 30; ++t) {
      for (int64_t c = 0; c < 16; ++c) {
        ASSERT_EQ(*out.view().At<float>(batch, t, c), parameters.at("b_o").span<float>()[c]);
      }
    }
  };
  Tensor mask(DType::kU8, {2, 30});
  Fill(mask.view(), 1);
  Fill(Slice(mask.view(), 0, 1, 1), 0);
  inputs["key_mask"] = std::move(mask);
  for (const Device device : TestedDevices()) {
    expect_bias(RunOwn(problem, ViewsOf(inputs), options, &parameters, device), 1);
  }
  Fill(parameters["w_o"].view(), 0);
  expect_bias(RunOwn(problem, ViewsOf(inputs), options, &parameters), 0);
}

TEST(MultiHead, CrossAttentionToTheInputItselfIsSelfAttention) {
  const Problem problem = Self(2, 45, 8, /*causal=*/true);
  NamedTensors inputs = Random(problem);
  const Tensor self = RunOwn(problem, ViewsOf(inputs));
  inputs["memory"] = inputs.at("x").Clone();
  EXPECT_EQ(
      MaxDifference(RunOwn(problem, ViewsOf(inputs), {{"cross", "true"}}).view(), self.view()), 0);
}

// ---- Shapes, precisions, techniques inside ----

TEST(MultiHead, EveryShapeMatchesTheDefinition) {
  Problem grouped = Self(6, 33, 8);
  grouped.kv_heads = 2;
  ExpectMatchesDefinition(grouped, {{"bias", "true"}});
  grouped.value_dim = 5;
  ExpectMatchesDefinition(grouped, {});
  for (const int64_t keys : {1, 0, 70, 129}) {
    Problem cross = grouped;
    cross.kv_tokens = keys;
    ExpectMatchesDefinition(cross, {{"cross", "true"}, {"bias", "true"}});
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    ExpectMatchesDefinition(Self(2, 70, 16, true, dtype), {{"bias", "true"}});
    ExpectMatchesDefinition(Self(2, 70, 16, false, dtype), {{"cross", "true"}});
  }
}

TEST(MultiHead, EveryTechniqueOnQueriesKeysAndValuesWorksInside) {
  for (const char* inner :
       {"dense[scale=0.25]", "longformer[window=8,globals=0/40]", "longformer[window=6]", "alibi",
        "performer[features=32]", "adaptive_span[max_span=40,span=10]",
        "adaptive_span[dynamic=true,max_span=40,span=10]"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      ExpectMatchesDefinition(Self(2, 70, 16, /*causal=*/true, dtype), {{"inner", inner}});
    }
  }
  ExpectMatchesDefinition(Self(2, 70, 16), {{"inner", "performer[features=32]"}});
  Problem grouped = Self(4, 70, 16);
  grouped.kv_heads = 2;
  grouped.value_dim = 8;
  for (const char* inner :
       {"longformer[window=8,globals=0/40,projections=own]", "etc[radius=5,projections=own]"}) {
    ExpectMatchesDefinition(grouped, {{"inner", inner}, {"bias", "true"}});
    ExpectMatchesDefinition(Self(2, 70, 16, false, DType::kBF16), {{"inner", inner}});
  }
}

TEST(MultiHead, ItsHeadsAreTheTechniqueInsideOnTheProjections) {
  const Problem problem = Self(2, 90, 8);
  const NamedTensors inputs = Random(problem);
  NamedTensors parameters = Parameters(problem);
  parameters["w_o"] = Identity(16);
  const Tensor out =
      RunOwn(problem, ViewsOf(inputs), {{"inner", "longformer[window=10]"}}, &parameters);
  NamedTensors projected;
  for (const char* name : {"q", "k", "v"}) {
    projected[name] = Project(inputs.at("x"), parameters.at(std::string("w_") + name), 2);
  }
  const NamedTensors longformer =
      RunTechnique(FindTechnique("longformer"), problem, ViewsOf(projected), {{{"window", "10"}}})
          .value();
  const ConstTensorView heads = Transpose(SplitAxis(out.view(), 2, 2), 1, 2);
  EXPECT_LE(MaxDifference(heads, longformer.at("out").view()), 1e-5);
}

TEST(MultiHead, FurtherQueriesKeysAndValuesHaveProjectionsOfTheirOwn) {
  const Problem problem = Self(2, 40, 8);
  const Options options = {{"inner", "longformer[window=6,globals=3,projections=own]"},
                           {"bias", "true"}};
  NamedTensors parameters = Parameters(problem, options);
  std::vector<std::string> names;
  for (const auto& entry : parameters) names.push_back(entry.first);
  EXPECT_THAT(names, testing::ElementsAre("b_k", "b_k_global", "b_o", "b_q", "b_q_global", "b_v",
                                          "b_v_global", "w_k", "w_k_global", "w_o", "w_q",
                                          "w_q_global", "w_v", "w_v_global"));
  const NamedTensors inputs = Random(problem);
  const Tensor own = RunOwn(problem, ViewsOf(inputs), options, &parameters);

  // Row 3 alone is computed with them, and with the others' values is that of shared projections.
  const Options shared = {{"inner", "longformer[window=6,globals=3]"}, {"bias", "true"}};
  NamedTensors common = Parameters(problem, shared);
  const Tensor expected = RunOwn(problem, ViewsOf(inputs), shared, &common);
  for (const int64_t i : {2, 3, 4}) {
    const double difference =
        MaxDifference(Slice(own.view(), 1, i, 1), Slice(expected.view(), 1, i, 1));
    EXPECT_EQ(difference > 1e-6, i == 3) << i << ": " << difference;
  }
  for (const char* name : {"w_q", "w_k", "w_v", "b_q", "b_k", "b_v"}) {
    parameters[std::string(name) + "_global"] = common.at(name).Clone();
  }
  EXPECT_LE(
      MaxDifference(RunOwn(problem, ViewsOf(inputs), options, &parameters).view(), expected.view()),
      1e-6);
}

// ---- Further inputs and outputs of the technique inside ----

std::vector<std::string> NamesOf(const std::vector<TensorSpec>& specs) {
  std::vector<std::string> names;
  for (const TensorSpec& spec : specs) names.push_back(spec.name);
  return names;
}

// Returns a tensor for the spec: floats as RandomInputs draws them, ids 0 to 3, masks 0 or 1.
Tensor Drawn(const TensorSpec& spec) {
  TensorSpec needed = spec;
  needed.optional = false;
  Tensor tensor = std::move(RandomInputs({needed}, 5).at(spec.name));
  if (IsFloating(spec.dtype)) return tensor;
  const RandomStream random(5, spec.name);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const uint64_t count = spec.dtype == DType::kU8 ? 2 : 4;
    tensor.view().Set(i, static_cast<double>(random.Bits(i) % count));
  }
  return tensor;
}

// Techniques that read more inside than projections give them, with the names of what they read.
struct Reader {
  const char* inner;
  std::vector<std::string> reads;
};
const std::vector<Reader>& Readers() {
  static const std::vector<Reader>& readers = *new std::vector<Reader>{
      {"longformer[window=6,max_globals=3,projections=own]", {"global_mask"}},
      {"longformer[window=6,globals=2,max_globals=60]", {"global_mask"}},
      {"etc[radius=5,global_tokens=6,segments=true]", {"segment"}},
      {"etc[radius=5,global_tokens=6,masks=true,projections=own]",
       {"g2g_mask", "g2l_mask", "l2g_mask", "l2l_mask"}},
      {"hard[sample=inverse_cdf]", {"u"}},
      {"hard[sample=gumbel]", {"g"}},
      {"sinkhorn[block=16,scores=given,gumbel=true]", {"logits", "g", "sort"}},
      {"sinkhorn[block=16,pooled=hidden]", {"sort"}},
      {"routing[clusters=4,local_heads=0]", {"members"}},
      {"lsh[chunk=16]", {"buckets"}},
  };
  return readers;
}

// Returns the inputs that must be there, and those of the names that may be.
NamedTensors InputsWith(const std::vector<TensorSpec>& specs,
                        const std::vector<std::string>& names) {
  NamedTensors inputs;
  for (const TensorSpec& spec : specs) {
    const bool is_named = std::find(names.begin(), names.end(), spec.name) != names.end();
    if (!spec.optional || is_named) inputs[spec.name] = Drawn(spec);
  }
  return inputs;
}

TEST(MultiHead, WhatTheTechniqueInsideReadsBesideProjectionsIsAnInput) {
  for (const auto& [inner, reads] : Readers()) {
    std::vector<std::string> expected = {"x", "key_mask"};
    expected.insert(expected.end(), reads.begin(), reads.end());
    if (std::string(inner).rfind("hard", 0) == 0)
      expected.push_back("baseline");  // of its backward pass alone
    EXPECT_EQ(NamesOf(MultiHead().InputSpecs(Self(2, 70, 16), {{"inner", inner}}).value()),
              expected)
        << inner;
  }
  EXPECT_THAT(NamesOf(MultiHead().InputSpecs(Self(2, 70, 16), {{"cross", "true"}}).value()),
              testing::ElementsAre("x", "memory", "key_mask"));
}

TEST(MultiHead, FurtherInputsMatchTheDefinition) {
  const Problem problem = Self(2, 70, 16);
  for (const auto& [inner, reads] : Readers()) {
    const Options options = {{"inner", inner}, {"bias", "true"}};
    const auto specs = MultiHead().InputSpecs(problem, options).value();
    ExpectMatchesDefinition(problem, options, InputsWith(specs, reads));
    ExpectMatchesDefinition(problem, options, InputsWith(specs, {"key_mask"}));
  }
  for (const char* inner : {"longformer[window=6,max_globals=3,projections=own]",
                            "etc[radius=5,global_tokens=6,masks=true,segments=true]"}) {
    const Problem of_16_bits = Self(2, 70, 16, false, DType::kBF16);
    const auto specs = MultiHead().InputSpecs(of_16_bits, {{"inner", inner}}).value();
    ExpectMatchesDefinition(
        of_16_bits, {{"inner", inner}},
        InputsWith(specs, {"key_mask", "global_mask", "g2l_mask", "l2g_mask", "l2l_mask"}));
  }
}

TEST(MultiHead, EveryFurtherInputMatters) {
  const Problem problem = Self(2, 70, 16);
  for (const auto& [inner, reads] : Readers()) {
    const Options options = {{"inner", inner}};
    const auto specs = MultiHead().InputSpecs(problem, options).value();
    for (const std::string& name : reads) {
      NamedTensors inputs = InputsWith(specs, {name});
      for (const Device device : TestedDevices()) {
        const Tensor before = RunOwn(problem, ViewsOf(inputs), options, nullptr, device);
        Tensor kept = std::move(inputs.at(name));
        Tensor& other = inputs[name] = kept.Clone();
        for (int64_t i = 0; i < kept.num_elements(); ++i) {
          const double mirrored = kept.view().Get(kept.num_elements() - 1 - i);
          other.view().Set(i, kept.dtype() == DType::kU8 ? 1 - kept.view().Get(i) : mirrored);
        }
        const Tensor after = RunOwn(problem, ViewsOf(inputs), options, nullptr, device);
        EXPECT_GT(MaxDifference(after.view(), before.view()), 1e-3)
            << inner << " " << name << " " << Name(device);
        inputs[name] = std::move(kept);
      }
    }
  }
}

TEST(MultiHead, TokensThatTheMaskMarksAreGlobalAsThoseOfTheOptionAre) {
  const Problem problem = Self(2, 40, 8);
  const Options marked = {{"inner", "longformer[window=6,max_globals=2,projections=own]"}};
  const Options named = {{"inner", "longformer[window=6,globals=3/17,projections=own]"}};
  NamedTensors inputs = Random(problem, marked);
  for (const Device device : TestedDevices()) {
    const Tensor expected = RunOwn(problem, ViewsOf(inputs), named, nullptr, device);
    Tensor mask(DType::kU8, {2, 40});
    Fill(mask.view(), 0);
    for (const int64_t token : {3, 17, 30}) Fill(Slice(mask.view(), 1, token, 1), 1);
    inputs["global_mask"] = std::move(mask);
    const Tensor out = RunOwn(problem, ViewsOf(inputs), marked, nullptr, device);
    EXPECT_LE(MaxDifference(out.view(), expected.view()), Bound(expected.view())) << Name(device);
    inputs.erase("global_mask");
  }
}

TEST(MultiHead, AnInputThatTheTechniqueInsideDoesNotReadIsRefused) {
  const Problem problem = Self(2, 40, 8);
  const Options longformer = {{"inner", "longformer[window=6,max_globals=2]"}};
  const auto specs = MultiHead().InputSpecs(problem, longformer).value();
  const NamedTensors inputs = InputsWith(specs, {"global_mask"});
  for (const char* inner : {"dense", "longformer[window=6]", "etc[radius=4,masks=true]"}) {
    EXPECT_EQ(RunTechnique(MultiHead(), problem, ViewsOf(inputs), {{{"inner", inner}}})
                  .status()
                  .message(),
              "there is no input \"global_mask\"")
        << inner;
  }
  const Options segments = {{"inner", "etc[radius=4,segments=true]"}};
  NamedTensors missing = Random(problem, segments);
  missing.erase("segment");
  EXPECT_EQ(RunTechnique(MultiHead(), problem, ViewsOf(missing), {segments}).status().message(),
            "input segment [2, 40] is missing");
}

TEST(MultiHead, ChoicesOfTheTechniqueInsideAreOutputsAndCanBeFollowed) {
  const Problem problem = Self(2, 70, 16);
  for (const auto& [inner, choice] : std::vector<std::pair<std::string, std::string>>{
           {"routing[clusters=4,local_heads=0]", "members"},
           {"lsh[chunk=16]", "buckets"},
           {"sinkhorn[block=16]", "sort"},
           {"hard", "index"}}) {
    const Options options = {{"inner", inner}};
    EXPECT_THAT(NamesOf(MultiHead().OutputSpecs(problem, options).value()),
                testing::ElementsAre("out", choice));
    const NamedTensors inputs = Random(problem, options);
    for (const Device device : TestedDevices()) {
      const NamedTensors outputs =
          RunTechnique(MultiHead(), problem, ViewsOf(inputs), {options, device}).value();
      DefinitionRequest request;
      request.computed = &outputs;
      const NamedTensors defined =
          DefineTechnique(MultiHead(), problem, ViewsOf(inputs), {options}, request).value();
      // An entry of sort is at most 1.
      EXPECT_LE(MaxDifference(outputs.at(choice).view(), defined.at(choice).view()),
                choice == "sort" ? 2e-5 : 0)
          << inner << " " << Name(device);
      if (choice == "index") continue;  // which is no input
      Inputs followed = ViewsOf(inputs);
      followed.Set(choice, outputs.at(choice).view());
      EXPECT_LE(MaxDifference(RunOwn(problem, followed, options, nullptr, device).view(),
                              outputs.at("out").view()),
                Bound(outputs.at("out").view()))
          << inner << " " << Name(device);
    }
  }
}

TEST(MultiHead, FurtherInputsAllocateNothingInARun) {
  const Problem problem = Self(2, 40, 8);
  for (const auto& [inner, reads] : Readers()) {
    const auto layer = MultiHead().Create(problem, {{"inner", inner}}, Device::kCpu, 1).value();
    EXPECT_EQ(AllocationsOfRun(*layer, ViewsOf(InputsWith(layer->inputs(), reads))).value(), 0)
        << inner;
  }
}

TEST(MultiHead, ParametersOfTheTechniqueInsideAreItsOwn) {
  const Problem problem = Self(2, 40, 8);
  const Options options = {{"inner", "performer[features=16]"}};
  NamedTensors parameters = Parameters(problem, options);
  std::vector<std::string> names;
  for (const auto& entry : parameters) names.push_back(entry.first);
  EXPECT_THAT(names, testing::ElementsAre("inner.w", "w_k", "w_o", "w_q", "w_v"));
  const NamedTensors inputs = Random(problem);
  const Tensor before = RunOwn(problem, ViewsOf(inputs), options, &parameters);
  Tensor& projection = parameters["inner.w"];
  for (float& value : projection.span<float>()) value = -value;
  EXPECT_GT(
      MaxDifference(RunOwn(problem, ViewsOf(inputs), options, &parameters).view(), before.view()),
      1e-3);
}

// ---- What tools ask ----

TEST(MultiHead, TheCounterpartHasDenseAttentionInside) {
  const auto counterpart = [](const Options& options) {
    return ToString(MultiHead().Counterpart(Self(2, 40, 8), options).value());
  };
  EXPECT_EQ(counterpart({}), "multi_head:bias=false,cross=false,inner=dense");
  EXPECT_EQ(counterpart({{"inner", "longformer[window=8]"}, {"bias", "true"}}),
            "multi_head:bias=true,cross=false,inner=dense");
}

TEST(MultiHead, OptionsInsideAreCanonicalAsWell) {
  const auto canonical = [](const char* inner) {
    return MultiHead().Canonical({{"inner", inner}}).value().at("inner");
  };
  EXPECT_EQ(canonical("longformer[window=512]"), "longformer");  // the default
  EXPECT_EQ(canonical("longformer[window=064,dilation=1/2]"), "longformer[dilation=1/2,window=64]");
}

TEST(MultiHead, WhatItCannotDoIsSaidWithTheReason) {
  const Problem problem = Self(2, 40, 8);
  EXPECT_THAT(Error(problem, {{"inner", "longfromer"}}),
              HasSubstr("there is no technique \"longfromer\"; nearest are longformer"));
  EXPECT_THAT(Error(problem, {{"inner", "longformer[width=3]"}}),
              HasSubstr("unknown option \"width\"; known are window"));
  EXPECT_THAT(Error(problem, {{"inner", "dense[scale=-1]"}}),
              HasSubstr("option scale is \"-1\"; allowed are 0 to 1e+06"));
  EXPECT_THAT(Error(problem, {{"inner", "transformer_xl"}}),
              HasSubstr("the input of transformer_xl is hidden"));
  EXPECT_EQ(Error(problem, {{"inner", "adaptive_span"}}),
            "inner adaptive_span: adaptive_span is causal only");
  Problem cross = problem;
  cross.kv_tokens = 41;
  EXPECT_EQ(Error(cross, {}),
            "without cross, keys are of the same tokens as queries: kv_tokens is 41; allowed is "
            "query_tokens, 40");
  EXPECT_THAT(Error(cross, {{"cross", "true"}, {"inner", "longformer"}}),
              HasSubstr("longformer is self-attention"));
}

TEST(MultiHead, CostCountsProjectionsAndPairs) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 2, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 3;
  const auto layer = MultiHead().Create(problem, {{"bias", "true"}}, Device::kCpu, 1).value();
  const NamedTensors inputs = Random(problem);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  // The width is 8: q is 8 x 8, k 8 x 4, v 8 x 6, o 12 x 8; there are 15 pairs a head.
  const double weights = 8 * 8 + 8 * 4 + 8 * 6 + 12 * 8, biases = 8 + 4 + 6 + 8;
  EXPECT_EQ(layer->cost().flops, 2 * 3 * (5 * weights + 4 * 15 * (2 + 3)));
  EXPECT_EQ(layer->cost().bytes, 4 * (2 * 3 * 5 * 8 + weights + biases));
}

TEST(MultiHead, CostCountsFurtherProjections) {
  const Problem problem = Problem::SelfAttention(3, 4, 5, 2);
  const auto flops = [&](const char* inner) {
    const auto layer = MultiHead().Create(problem, {{"inner", inner}}, Device::kCpu, 1).value();
    EXPECT_TRUE(RunLayer(*layer, ViewsOf(Random(problem))).ok());
    return *layer->cost().flops;
  };
  EXPECT_EQ(flops("longformer[globals=0,projections=own]") - flops("longformer[globals=0]"),
            2 * 3 * 5 * 3 * 8 * 8);
}

// ---- Golden files ----

class MultiHeadGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Files, MultiHeadGolden,
                         testing::Values("self", "self_causal_padded", "cross_padded"));

TEST_P(MultiHeadGolden, TorchsMultiheadAttentionComputesTheSame) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/multi_head/testdata/") + GetParam() + ".safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const bool cross = golden.metadata.at("cross") == "true";
  const Tensor& x = golden.tensors.at("x");
  Problem problem = Problem::SelfAttention(x.dim(0), number("heads"), x.dim(1), number("head_dim"),
                                           golden.metadata.at("causal") == "true");
  NamedTensors inputs, parameters;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name == "x" || name == "memory") inputs[name] = tensor.Clone();
    if (name[0] == 'w' || name[0] == 'b') parameters[name] = tensor.Clone();
    if (name == "key_padding") inputs["key_mask"] = tensor.CloneAs(DType::kU8);
  }
  if (cross) problem.kv_tokens = inputs.at("memory").dim(1);
  RunRequest request{{{"bias", "true"}, {"cross", cross ? "true" : "false"}}};
  request.parameters = &parameters;
  const ConstTensorView out = golden.tensors.at("out").view();
  const auto defined = DefineTechnique(MultiHead(), problem, ViewsOf(inputs), request);
  EXPECT_LE(MaxDifference(defined->at("out").view(), out), 1e-13);
  for (const Device device : TestedDevices()) {
    const Tensor ours = RunOwn(problem, ViewsOf(inputs), request.options, &parameters, device);
    EXPECT_LE(MaxDifference(ours.view(), out), Bound(out)) << Name(device);
  }
}

// ---- The backward pass ----

void ExpectGradients(const Problem& problem, const Options& options, NamedTensors inputs = {}) {
  SCOPED_TRACE(ToString(TechniqueSpec{"multi_head", options}));
  GradientRequest request{options, AttentionRoundings(problem)};
  request.inputs = std::move(inputs);
  ExpectGradientsOfDefinition(MultiHead(), problem, request);
}

TEST(MultiHead, GradientsAreThoseOfItsDefinition) {
  ExpectGradients(Self(3, 37, 8), {});
  ExpectGradients(Self(2, 70, 16, /*causal=*/true), {{"bias", "true"}});
  ExpectGradients(Self(1, 1, 4), {{"bias", "true"}});
}

TEST(MultiHead, GradientsOfCrossAttentionReachTheMemory) {
  Problem problem = Self(4, 13, 8);
  problem.kv_heads = 2;
  problem.kv_tokens = 21;
  problem.value_dim = 5;
  NamedTensors mask;
  mask["key_mask"] = Tensor(DType::kU8, {2, 21});
  Fill(mask["key_mask"].view(), 1);
  for (const int64_t token : {4, 20, 21 + 7}) mask["key_mask"].span<uint8_t>()[token] = 0;
  ExpectGradients(problem, {{"cross", "true"}, {"bias", "true"}});
  ExpectGradients(problem, {{"cross", "true"}}, std::move(mask));
}

TEST(MultiHead, GradientsPassThroughTheInnerTechniquesParametersAndHiddenState) {
  const Problem causal = Self(2, 20, 8, /*causal=*/true);
  ExpectGradients(causal, {{"inner", "alibi"}});
  ExpectGradients(causal, {{"inner", "adaptive_span[max_span=16,span=6,ramp=5]"}});
  ExpectGradients(causal, {{"inner", "adaptive_span[max_span=16,span=6,ramp=5,dynamic=true]"}});
}

TEST(MultiHead, GradientsOfFurtherProjectionsAreThoseOfItsDefinition) {
  const Problem problem = Self(2, 24, 8);
  NamedTensors inputs;
  inputs["global_mask"] = Tensor(DType::kU8, {2, 24});
  Fill(inputs["global_mask"].view(), 0);
  for (const int64_t token : {3, 24 + 3, 24 + 11}) {
    inputs["global_mask"].span<uint8_t>()[token] = 1;
  }
  ExpectGradients(
      problem, {{"inner", "longformer[window=4,max_globals=3,projections=own]"}, {"bias", "true"}},
      std::move(inputs));
}

TEST(MultiHead, EmptyBatchesAndSequencesGiveParametersGradientsOfZero) {
  for (const Problem& problem : {Problem::SelfAttention(0, 2, 5, 8), Self(2, 0, 8)}) {
    SCOPED_TRACE(problem.ToString());
    const auto layer = MultiHead().Create(problem, {{"bias", "true"}}, Device::kCpu, 1).value();
    NamedTensors inputs, g;
    inputs["x"] = Tensor(DType::kF32, layer->inputs()[0].shape);
    g["out"] = Tensor(DType::kF32, layer->outputs()[0].shape);
    const auto gradients = RunBackward(*layer, ViewsOf(inputs), g, 2);
    ASSERT_EQ(gradients.status(), absl::OkStatus());
    EXPECT_EQ(gradients->parameters.size(), 8u);
    for (const auto& [name, gradient] : gradients->parameters) {
      EXPECT_EQ(MaxAbs(gradient.view()), 0) << name;
    }
  }
}

TEST(MultiHead, NanOfAMaskedMemoryReachesNoGradient) {
  Problem problem = Self(2, 9, 8);
  problem.kv_tokens = 12;
  const Options options = {{"cross", "true"}};
  NamedTensors inputs = Random(problem, options);
  inputs["key_mask"] = Tensor(DType::kU8, {2, 12});
  Fill(inputs["key_mask"].view(), 1);
  inputs["key_mask"].span<uint8_t>()[5] = 0;
  Tensor g(DType::kF32, {2, 9, problem.model_dim()});
  FillNormal(&g, 1, "g");
  NamedTensors of_out;
  of_out["out"] = std::move(g);
  const auto gradients = [&] {
    const auto layer = MultiHead().Create(problem, options, Device::kCpu, 1).value();
    return RunBackward(*layer, ViewsOf(inputs), of_out).value();
  };
  const LayerGradients numbers = gradients();
  const TensorView token = Slice(Slice(inputs["memory"].view(), 0, 0, 1), 1, 5, 1);
  Fill(token, std::numeric_limits<double>::quiet_NaN());
  const LayerGradients hidden = gradients();
  for (const auto& [name, gradient] : numbers.parameters) {
    EXPECT_EQ(MaxDifference(gradient.view(), hidden.parameters.at(name).view()), 0) << name;
  }
  for (const auto& [name, gradient] : numbers.inputs) {
    EXPECT_EQ(MaxDifference(gradient.view(), hidden.inputs.at(name).view()), 0) << name;
  }
  EXPECT_EQ(MaxAbs(Slice(Slice(hidden.inputs.at("memory").view(), 0, 0, 1), 1, 5, 1)), 0);
}

// In 16 bits q, k, v, the context and their gradients are rounded, each of which moves a gradient
// by the roundoff times its norm, and by a small multiple of it through the softmax.
TEST(MultiHead, GradientsIn16BitsAreThoseOfFp32WithinTheirRoundings) {
  const Problem in_fp32 = Self(2, 40, 16);
  NamedTensors g;
  g["out"] = Tensor(DType::kBF16, {2, 40, 32});
  FillNormal(&g["out"], 1, "g");
  const auto gradients = [&](DType dtype) {
    Problem problem = in_fp32;
    problem.dtype = dtype;
    NamedTensors inputs, of_out;
    inputs["x"] = Tensor(DType::kBF16, {2, 40, 32});
    FillNormal(&inputs["x"], 1, "x");
    inputs["x"] = inputs["x"].CloneAs(dtype);
    of_out["out"] = g["out"].CloneAs(dtype);
    const auto layer = MultiHead().Create(problem, {}, Device::kCpu, 1).value();
    return RunBackward(*layer, ViewsOf(inputs), of_out).value();
  };
  const auto norm = [](const ConstTensorView& view) {
    double sum = 0;
    ForEachOffset(view, view, [&](int64_t at, int64_t) { sum += view.Get(at) * view.Get(at); });
    return std::sqrt(sum);
  };
  const LayerGradients exact = gradients(DType::kF32), rounded = gradients(DType::kBF16);
  const auto expect_near = [&](const Tensor& a, const Tensor& b) {
    Tensor difference = a.CloneAs(DType::kF64);
    ForEachOffset(difference.view(), b.view(), [&](int64_t i, int64_t j) {
      difference.view().Set(i, difference.view().Get(i) - b.view().Get(j));
    });
    EXPECT_LE(norm(difference.view()), 16 * UnitRoundoff(DType::kBF16) * norm(b.view()));
  };
  EXPECT_EQ(rounded.inputs.at("x").dtype(), DType::kBF16);
  expect_near(rounded.inputs.at("x"), exact.inputs.at("x"));
  for (const auto& [name, gradient] : exact.parameters) {
    SCOPED_TRACE(name);
    expect_near(rounded.parameters.at(name), gradient);
  }
}

TEST(MultiHead, ABackwardPassIsOnTheDevicesWhereTheInnerTechniqueHasOne) {
  const Problem problem = Self(2, 8, 8);
  const auto check = [&](const Options& options, Device device) {
    return MultiHead().Create(problem, options, device, 1).value()->CheckBackward();
  };
  for (const Device device : TestedDevices()) {
    for (const char* inner : {"dense", "sinkhorn"}) {
      EXPECT_EQ(check({{"inner", inner}}, device), absl::OkStatus()) << inner << Name(device);
    }
  }
  const auto on_cpu = MultiHead().Create(problem, {}, Device::kCpu, 1).value();
  EXPECT_EQ(on_cpu->CheckBackward(), absl::OkStatus());
  // It keeps q, k, v and the context, [batch, tokens, model_dim], and what the inner layer keeps.
  const auto inner = FindTechnique("dense").Create(problem, {}, Device::kCpu, 1).value();
  EXPECT_EQ(on_cpu->kept_bytes(), 4 * sizeof(float) * 2 * 8 * 16 + inner->kept_bytes());
}

}  // namespace
}  // namespace tfb::multi_head
