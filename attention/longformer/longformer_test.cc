#include "attention/longformer/longformer.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/run_allocations.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::longformer {
namespace {

const Technique& Longformer() { return FindTechnique("longformer"); }

using ::testing::HasSubstr;

constexpr Device kCpu = Device::kCpu;

NamedTensors RunOwn(const Problem& problem, const Inputs& inputs, const Options& options,
                    Device device = kCpu) {
  return RunTechnique(Longformer(), problem, inputs, {options, device}).value();
}
NamedTensors RunDense(const Problem& problem, const Inputs& inputs) {
  return RunTechnique(dense::Dense(), problem, inputs).value();
}
NamedTensors Random(const Problem& problem, const Options& options = {}) {
  return RandomInputs(Longformer().InputSpecs(problem, options).value(), 11);
}

std::vector<int64_t> KeysSeen(int64_t tokens, int64_t i, const Options& options,
                              bool causal = false, int64_t heads = 1, int64_t head = 0) {
  const Problem problem = Problem::SelfAttention(1, heads, tokens, 8, causal);
  return KeysSeen(Longformer(), problem, options, head, i);
}

using Keys = std::vector<int64_t>;

TEST(Longformer, AWindowOfFourSeesTwoKeysOnEachSideAndItself) {
  EXPECT_EQ(KeysSeen(12, 6, {{"window", "4"}}), (Keys{4, 5, 6, 7, 8}));
  EXPECT_EQ(KeysSeen(12, 0, {{"window", "4"}}), (Keys{0, 1, 2}));
  EXPECT_EQ(KeysSeen(12, 11, {{"window", "4"}}), (Keys{9, 10, 11}));
}

TEST(Longformer, ACausalWindowIsOneSided) {
  EXPECT_EQ(KeysSeen(12, 6, {{"window", "4"}}, true), (Keys{4, 5, 6}));
  EXPECT_EQ(KeysSeen(12, 6, {{"one_sided", "4"}}, true), (Keys{2, 3, 4, 5, 6}));
}

TEST(Longformer, NoTokenIsGlobalByDefault) {
  for (const bool causal : {false, true}) {
    EXPECT_EQ(KeysSeen(12, 0, {{"window", "2"}}, causal), causal ? (Keys{0}) : (Keys{0, 1}));
    EXPECT_EQ(KeysSeen(12, 8, {{"window", "2"}}, causal), causal ? (Keys{7, 8}) : (Keys{7, 8, 9}));
  }
}

TEST(Longformer, GlobalTokensSeeAllAndAreSeenByAllOnce) {
  const Options options = {{"window", "2"}, {"globals", "1/9"}};
  EXPECT_EQ(KeysSeen(12, 6, options), (Keys{1, 5, 6, 7, 9}));
  EXPECT_EQ(KeysSeen(12, 2, options), (Keys{1, 2, 3, 9}));
  EXPECT_EQ(KeysSeen(12, 9, options).size(), 12u);
  EXPECT_EQ(KeysSeen(12, 9, options, true), (Keys{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(KeysSeen(12, 6, options, true), (Keys{1, 5, 6}));
}

TEST(Longformer, DilationSkipsKeysPerHead) {
  const Options options = {{"window", "4"}, {"dilation", "1/3"}};
  EXPECT_EQ(KeysSeen(20, 10, options, false, 2, 0), (Keys{8, 9, 10, 11, 12}));
  EXPECT_EQ(KeysSeen(20, 10, options, false, 2, 1), (Keys{4, 7, 10, 13, 16}));
  EXPECT_EQ(KeysSeen(20, 10, options, true, 2, 1), (Keys{4, 7, 10}));
  EXPECT_EQ(KeysSeen(20, 10, {{"window", "4"}, {"dilation", "3"}, {"globals", "2"}}),
            (Keys{2, 4, 7, 10, 13, 16}));
}

TEST(Longformer, AWindowCoveringTheSequenceEqualsDense) {
  for (bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 150, 16, causal);
    const NamedTensors inputs = Random(problem);
    const NamedTensors dense = RunDense(problem, ViewsOf(inputs));
    for (const Options& options : {Options{{"window", "298"}}, Options{{"window", "100000"}}}) {
      const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), options);
      EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
      EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), dense.at("log_sum_exp").view()), 1e-5);
    }
  }
}

TEST(Longformer, AllTokensGlobalEqualsDenseWithTheTensorsOfGlobals) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16);
  std::string all = "0";
  for (int i = 1; i < 70; ++i) all += "/" + std::to_string(i);
  const Options options = {{"projections", "own"}, {"globals", all}};
  const NamedTensors inputs = Random(problem, options);
  const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), options);
  const NamedTensors dense = RunDense(problem, {{"q", inputs.at("q_global").view()},
                                                {"k", inputs.at("k_global").view()},
                                                {"v", inputs.at("v_global").view()}});
  EXPECT_LE(MaxDifference(ours.at("out").view(), dense.at("out").view()), 1e-5);
}

TEST(Longformer, AWindowOfZeroWithoutGlobalsReturnsTheValues) {
  const Problem problem = Problem::SelfAttention(1, 2, 130, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), {{"window", "0"}});
  EXPECT_LE(MaxDifference(ours.at("out").view(), inputs.at("v").view()), 1e-6);
}

TEST(Longformer, DilationIsThatManyInterleavedProblems) {
  const int64_t dilation = 3, tokens = 131;
  const Problem problem = Problem::SelfAttention(1, 2, tokens, 16);
  const NamedTensors inputs = Random(problem);
  const Options window = {{"window", "10"}};
  Options dilated = window;
  dilated["dilation"] = "3";
  const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), dilated);
  for (int64_t r = 0; r < dilation; ++r) {
    Problem part = problem;
    part.query_tokens = part.kv_tokens = (tokens - r + dilation - 1) / dilation;
    Inputs views;
    for (const char* name : {"q", "k", "v"}) {
      views.Set(name, Slice(inputs.at(name).view(), 2, r, part.kv_tokens, dilation));
    }
    const NamedTensors alone = RunOwn(part, views, window);
    EXPECT_LE(MaxDifference(Slice(ours.at("out").view(), 2, r, part.kv_tokens, dilation),
                            alone.at("out").view()),
              1e-5);
  }
}

TEST(Longformer, MatchesItsDefinitionWithMixedOptions) {
  for (bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(2, 4, 200, 24, causal);
    problem.kv_heads = 2;
    for (const Options& options :
         {Options{{"window", "64"}}, Options{{"window", "64"}, {"globals", "0"}},
          Options{{"window", "30"}, {"dilation", "1/4"}, {"globals", "0/77/199/5000"}},
          Options{{"window", "16"}, {"projections", "own"}, {"globals", "3/150"}},
          Options{{"window", "8"}, {"dilation", "500"}}}) {
      const NamedTensors inputs = Random(problem, options);
      const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), options);
      const NamedTensors expected =
          DefineTechnique(Longformer(), problem, ViewsOf(inputs), {options}).value();
      EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
                Fp32Bound(inputs.at("v").view()))
          << ToString(options);
      EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), expected.at("log_sum_exp").view()),
                2e-5)
          << ToString(options);
    }
  }
}

// ---- Global tokens of each sequence ----

// Returns u8 [rows, tokens] with `value` at the listed tokens of each row, and the other one of 0
// and 1 elsewhere.
Tensor Marks(int64_t tokens, const std::vector<std::vector<int64_t>>& rows, uint8_t value = 1) {
  Tensor mask(DType::kU8, {static_cast<int64_t>(rows.size()), tokens});
  Fill(mask.view(), 1 - value);
  for (size_t b = 0; b < rows.size(); ++b) {
    for (const int64_t i : rows[b]) *mask.view().MutableAt<uint8_t>(b, i) = value;
  }
  return mask;
}

// Expects that with these inputs each sequence has the outputs of the option `globals`, which lists
// its own global tokens.
void ExpectGlobals(const Problem& problem, const NamedTensors& inputs, const Options& options,
                   const std::vector<std::string>& globals) {
  Problem of_one = problem;
  of_one.batch = 1;
  const NamedTensors defined =
      DefineTechnique(Longformer(), problem, ViewsOf(inputs), {options}).value();
  for (int64_t b = 0; b < problem.batch; ++b) {
    SCOPED_TRACE(ToString(options) + ", sequence " + std::to_string(b));
    Inputs alone;
    for (const auto& [name, tensor] : inputs) {
      if (name != "global_mask") alone.Set(name, Slice(tensor.view(), 0, b, 1));
    }
    Options listed = options;
    listed.erase("max_globals");
    listed["globals"] = globals[b];
    const NamedTensors expected = DefineTechnique(Longformer(), of_one, alone, {listed}).value();
    for (const char* name : {"out", "log_sum_exp"}) {
      EXPECT_EQ(MaxDifference(Slice(defined.at(name).view(), 0, b, 1), expected.at(name).view()),
                0);
      for (const Device device : TestedDevices()) {
        const NamedTensors ours = RunOwn(problem, ViewsOf(inputs), options, device);
        EXPECT_LE(MaxDifference(Slice(ours.at(name).view(), 0, b, 1), expected.at(name).view()),
                  Fp32Bound(inputs.at("v").view()))
            << name << " on " << Name(device);
      }
    }
  }
}

TEST(Longformer, AMaskGivesEachSequenceGlobalTokensOfItsOwn) {
  for (const bool causal : {false, true}) {
    Problem problem = Problem::SelfAttention(3, 2, 90, 8, causal);
    for (const Options& options :
         {Options{{"window", "6"}, {"max_globals", "7"}},
          Options{{"window", "6"}, {"max_globals", "1000"}, {"projections", "own"}},
          Options{{"window", "4"}, {"max_globals", "3"}, {"dilation", "1/5"}}}) {
      NamedTensors inputs = Random(problem, options);
      inputs["global_mask"] = Marks(90, {{3, 40, 89}, {}, {0}});
      ExpectGlobals(problem, inputs, options, {"3/40/89", "-1", "0"});
    }
  }
}

TEST(Longformer, TokensOfTheMaskAreGlobalBesidesThoseOfTheOption) {
  const Problem problem = Problem::SelfAttention(2, 1, 70, 8);
  const Options options = {{"window", "6"}, {"max_globals", "2"}, {"globals", "30/31/700"}};
  NamedTensors inputs = Random(problem, options);
  // Token 30, which is global anyway, is not one of the two.
  inputs["global_mask"] = Marks(70, {{2, 30, 69}, {}});
  ExpectGlobals(problem, inputs, options, {"2/30/31/69", "30/31"});
}

TEST(Longformer, OfTheMarkedTokensTheFirstAreGlobal) {
  const Problem problem = Problem::SelfAttention(2, 1, 70, 8);
  const Options options = {{"window", "6"}, {"max_globals", "2"}};
  NamedTensors inputs = Random(problem, options);
  inputs["global_mask"] = Marks(70, {{2, 30, 69}, {68, 69}});
  ExpectGlobals(problem, inputs, options, {"2/30", "68/69"});
}

TEST(Longformer, MarkedPaddingIsNoGlobalToken) {
  const Problem problem = Problem::SelfAttention(2, 1, 70, 8);
  const Options options = {{"window", "6"}, {"max_globals", "2"}, {"projections", "own"}};
  NamedTensors inputs = Random(problem, options);
  inputs["global_mask"] = Marks(70, {{2, 30, 69}, {5, 69}});
  inputs["key_mask"] = Marks(70, {{30}, {68, 69}}, 0);
  ExpectGlobals(problem, inputs, options, {"2/69", "5"});
}

TEST(Longformer, WithAllTokensMarkedItIsDense) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const Options options = {{"window", "2"}, {"max_globals", "70"}};
  NamedTensors inputs = Random(problem, options);
  inputs["global_mask"] = Tensor(DType::kU8, {2, 70});
  Fill(inputs["global_mask"].view(), 1);
  const Inputs views = ViewsOf(inputs);
  const NamedTensors dense =
      RunDense(problem, {{"q", views.Get("q")}, {"k", views.Get("k")}, {"v", views.Get("v")}});
  for (const Device device : TestedDevices()) {
    EXPECT_LE(MaxDifference(RunOwn(problem, views, options, device).at("out").view(),
                            dense.at("out").view()),
              Fp32Bound(inputs.at("v").view()))
        << Name(device);
  }
}

TEST(Longformer, WithAMaskRunAllocatesNothing) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const Options options = {{"window", "6"}, {"max_globals", "5"}, {"globals", "4"}};
  NamedTensors inputs = Random(problem, options);
  inputs["global_mask"] = Marks(70, {{2, 30, 69}, {}});
  const auto layer = Longformer().Create(problem, options, kCpu, 1).value();
  EXPECT_EQ(AllocationsOfRun(*layer, ViewsOf(inputs)).value(), 0);
}

TEST(Longformer, WithoutAMaskTheOptionsTokensAreGlobal) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const Options options = {{"window", "2"}, {"max_globals", "5"}, {"globals", "4"}};
  const NamedTensors inputs = Random(problem, options);
  ExpectGlobals(problem, inputs, options, {"4", "4"});
}

TEST(Longformer, FlopsCountEachKeptPairOnce) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  const Options options = {{"window", "10"}, {"globals", "0/50"}};
  std::unique_ptr<Layer> layer = Longformer().Create(problem, options, kCpu, 1).value();
  const NamedTensors inputs = Random(problem);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  int64_t pairs = 0;
  for (int64_t i = 0; i < 100; ++i) pairs += static_cast<int64_t>(KeysSeen(100, i, options).size());
  EXPECT_EQ(*layer->cost().flops, 2.0 * 2 * 32 * static_cast<double>(pairs));
}

TEST(Longformer, CrossAttentionAndWrongDilationListsAreRefusedWithAReason) {
  Problem cross = Problem::SelfAttention(1, 2, 10, 8);
  cross.kv_tokens = 20;
  EXPECT_THAT(std::string(Longformer().Create(cross, {}, kCpu, 1).status().message()),
              HasSubstr("query_tokens is 10, kv_tokens is 20"));
  EXPECT_THAT(
      std::string(Longformer()
                      .Create(Problem::SelfAttention(1, 2, 10, 8), {{"dilation", "1/2/3"}}, kCpu, 1)
                      .status()
                      .message()),
      HasSubstr("dilation has 3 entries; allowed are 1 or kv_heads, 2"));
}

// Hugging Face's LongformerSelfAttention computed these outputs; the files' metadata say how.
// Returns a golden file's masks under our names.
NamedTensors MasksOf(const NamedTensors& tensors) {
  NamedTensors masks;
  if (tensors.count("key_padding") != 0) {
    masks["key_mask"] = tensors.at("key_padding").CloneAs(DType::kU8);
  }
  if (tensors.count("global_mask") != 0) {
    masks["global_mask"] = tensors.at("global_mask").CloneAs(DType::kU8);
  }
  return masks;
}

// Their code zeroes the rows of padded queries, where ours leaves the result of such a query.
// Tokens are that axis of `out`.
void ZeroPaddedRows(const NamedTensors& inputs, int axis, const TensorView& out) {
  const auto mask = inputs.find("key_mask");
  if (mask == inputs.end()) return;
  for (int64_t b = 0; b < out.dim(0); ++b) {
    for (int64_t i = 0; i < out.dim(axis); ++i) {
      if (*mask->second.view().At<uint8_t>(b, i) != 0) continue;
      Fill(Slice(Slice(out, 0, b, 1), axis, i, 1), 0);
    }
  }
}

class LongformerGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(LongformerGolden, DefinitionAndEnginesMatchHuggingFace) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/longformer/testdata/") + GetParam() + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  const Shape shape = tensors.at("q").shape();
  const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3]);
  Options options = {
      {"window", golden.metadata.at("window")}, {"globals", "-1"}, {"projections", "own"}};
  if (tensors.count("global_tokens") != 0) {
    std::string& globals = options["globals"];
    for (int32_t g : tensors.at("global_tokens").span<int32_t>())
      globals += "/" + std::to_string(g);
  }
  if (tensors.count("global_mask") != 0) options["max_globals"] = std::to_string(shape[2]);
  NamedTensors single;
  // Without global tokens the file's q_global, k_global and v_global are not read.
  const auto specs = Longformer().InputSpecs(problem, options);
  for (const TensorSpec& spec : *specs) {
    if (!spec.optional) single[spec.name] = tensors.at(spec.name).CloneAs(DType::kF32);
  }
  Inputs exact;
  for (const auto& [name, tensor] : single) exact.Set(name, tensors.at(name).view());
  for (auto& [name, mask] : MasksOf(tensors)) {
    single[name] = mask.Clone();
    exact.Set(name, single.at(name).view());
  }
  const Inputs rounded = ViewsOf(single);
  NamedTensors defined;
  ASSERT_TRUE(Longformer().Define(problem, options, {}, exact, {}, &defined).ok());
  ZeroPaddedRows(single, 2, defined["out"].view());
  EXPECT_LE(MaxDifference(defined["out"].view(), tensors.at("out").view()), 1e-12);
  for (const Device device : TestedDevices()) {
    NamedTensors ours = RunOwn(problem, rounded, options, device);
    ZeroPaddedRows(single, 2, ours["out"].view());
    EXPECT_LE(MaxDifference(ours["out"].view(), tensors.at("out").view()),
              Fp32Bound(single["v"].view()))
        << Name(device);
  }
}

// The same module from its hidden states: inside multi_head, with their weights and an output
// matrix that is the identity.
void ExpectInsideMultiHeadIsHuggingFacesLayer(const std::string& name, const std::string& globals) {
  const SafetensorsFile golden =
      GoldenFile("attention/longformer/testdata/" + name + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  const Shape shape = tensors.at("q").shape();
  const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3]);
  const Options options = {{"inner", "longformer[" + globals + ",projections=own,window=" +
                                         golden.metadata.at("window") + "]"},
                           {"bias", "true"}};
  NamedTensors parameters;
  for (const auto& [name, tensor] : tensors) {
    if (name[0] == 'w' || name[0] == 'b') parameters[name] = tensor.Clone();
  }
  const int64_t width = problem.model_dim();
  parameters["w_o"] = Tensor(DType::kF32, {width, width});
  parameters["b_o"] = Tensor(DType::kF32, {width});
  Fill(parameters["w_o"].view(), 0);
  Fill(parameters["b_o"].view(), 0);
  for (int64_t c = 0; c < width; ++c) *parameters["w_o"].view().MutableAt<float>(c, c) = 1;
  Inputs inputs = {{"x", tensors.at("x").view()}};
  const NamedTensors masks = MasksOf(tensors);
  for (const auto& [mask, tensor] : masks) inputs.Set(mask, tensor.view());
  const ConstTensorView out = tensors.at("out").view();
  const auto heads = [&](const Tensor& y) {
    return Transpose(SplitAxis(y.view(), 2, problem.query_heads), 1, 2);
  };
  const Technique& layer = FindTechnique("multi_head");
  NamedTensors defined;
  ASSERT_TRUE(layer.Define(problem, options, parameters, inputs, {}, &defined).ok());
  ZeroPaddedRows(masks, 1, defined["out"].view());
  EXPECT_LE(MaxDifference(heads(defined.at("out")), out), 1e-12);
  for (const Device device : TestedDevices()) {
    RunRequest request{options, device};
    request.parameters = &parameters;
    NamedTensors ours = RunTechnique(layer, problem, inputs, request).value();
    ZeroPaddedRows(masks, 1, ours["out"].view());
    // Values are sums of 16 products: see multi_head_test.
    EXPECT_LE(MaxDifference(heads(ours.at("out")), out), Fp32Bound(out) + 2e-5) << Name(device);
  }
}

TEST(Longformer, InsideMultiHeadIsHuggingFacesLayer) {
  ExpectInsideMultiHeadIsHuggingFacesLayer("global", "globals=0/1/50");
}
TEST(Longformer, InsideMultiHeadWithAGlobalMaskIsHuggingFacesLayer) {
  ExpectInsideMultiHeadIsHuggingFacesLayer("global_each", "max_globals=3");
}
TEST(Longformer, InsideMultiHeadWithPaddingIsHuggingFacesLayer) {
  ExpectInsideMultiHeadIsHuggingFacesLayer("global_padded", "globals=0/37");
}

INSTANTIATE_TEST_SUITE_P(Files, LongformerGolden,
                         ::testing::Values("no_global", "global", "global_padded", "global_each"));

TEST(Longformer, BytesOfOwnProjectionsAreThoseOfGlobalQueriesAndOfAllGlobalKeysAndValues) {
  Problem problem = Problem::SelfAttention(3, 4, 100, 6);
  problem.kv_heads = 2;
  problem.value_dim = 7;
  const double shared = 4 * 3 * 100 * (4 * (6 + 7) + 2 * (6 + 7));
  EXPECT_EQ(CostOf(Longformer(), problem).bytes, shared);
  // Two rows of q_global are read, and all rows of k_global and v_global.
  EXPECT_EQ(CostOf(Longformer(), problem, {{"globals", "0/50"}, {"projections", "own"}}).bytes,
            shared + 4 * 3 * (2 * 4 * 6 + 100 * 2 * (6 + 7)));
}

}  // namespace
}  // namespace tfb::longformer
