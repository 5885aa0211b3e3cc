// Tests the help of every technique, and the inputs that it requires.
#include "harness/inputs/technique_help.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/header_text.h"
#include "core/safetensors.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/inputs/inputs.h"
#include "harness/inputs/technique_tensors.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns small problems of several blocks of every default size, in each supported direction.
std::vector<Problem> Problems(const TechniqueInfo& info) {
  std::vector<Problem> problems;
  for (const bool causal : {false, true}) {
    if (!(causal ? info.supports_causal : info.supports_noncausal)) continue;
    problems.push_back(Problem::SelfAttention(2, 2, 150, 16, causal));
  }
  return problems;
}

// Returns the default options, and those that differ from them in one Boolean or choice.
std::vector<Options> Variants(const Technique& technique) {
  std::vector<Options> variants = {technique.Canonical({}).value()};
  for (const OptionSpec& option : technique.info().options) {
    if (option.type != "bool" && option.type != "choice") continue;
    for (const absl::string_view value : absl::StrSplit(option.range, " | ")) {
      const auto canonical = technique.Canonical({{option.name, std::string(value)}});
      if (value != option.default_value && canonical.ok()) variants.push_back(*canonical);
    }
  }
  return variants;
}

// A layer, its specs and drawn inputs, of a problem and options that the technique accepts.
struct Case {
  const Technique* technique;
  Options options;
  Problem problem;
  std::unique_ptr<Layer> layer;
  std::vector<TensorSpec> specs;
  NamedTensors inputs;

  // Runs a new layer, since some layers draw anew in each Run.
  absl::StatusOr<NamedTensors> Run(const Inputs& views) const {
    return RunTechnique(*technique, problem, views, {options});
  }
  std::string ToString() const {
    return absl::StrCat(tfb::ToString({technique->info().name, options}), ", ", problem.ToString());
  }
};

std::vector<Case> CasesOf(const Technique& technique) {
  std::vector<Case> cases;
  for (const Options& options : Variants(technique)) {
    for (const Problem& problem : Problems(technique.info())) {
      auto layer = technique.Create(problem, options, Device::kCpu, 1);
      if (!layer.ok()) continue;
      auto specs = technique.InputSpecs(problem, options).value();
      NamedTensors inputs = MakeInputs({"gaussian", nullptr}, specs, problem, 1).value();
      cases.push_back(
          {&technique, options, problem, *std::move(layer), std::move(specs), std::move(inputs)});
    }
  }
  EXPECT_FALSE(cases.empty()) << technique.info().name;
  return cases;
}

InputSource FileOf(const NamedTensors& tensors) {
  const std::string path = ::testing::TempDir() + "/all.safetensors";
  EXPECT_TRUE(WriteSafetensors(path, tensors).ok());
  return ParseInputSources(path).value().at(0);
}

bool SameBits(const NamedTensors& a, const NamedTensors& b) {
  for (const auto& [name, tensor] : a) {
    if (std::memcmp(tensor.raw(), b.at(name).raw(), tensor.bytes()) != 0) return false;
  }
  return a.size() == b.size();
}

TechniqueTensors Describe(const std::string& name, const Problem& problem) {
  const Technique& technique = FindTechnique(name);
  return DescribeTensors(technique, technique.Canonical({}).value(), problem, 1).value();
}

const NamedTensorSpec& Named(const std::vector<NamedTensorSpec>& tensors, const std::string& name) {
  return *std::find_if(tensors.begin(), tensors.end(),
                       [&name](const NamedTensorSpec& one) { return one.spec.name == name; });
}

TEST(TechniqueTensors, DimensionsAreNamedAfterTheSizeThatDecidesThem) {
  // Heads, channels and rounds are all 4 here.
  const TechniqueTensors lsh = Describe("lsh", Problem::SelfAttention(4, 4, 64, 4));
  EXPECT_THAT(Named(lsh.inputs, "q").symbols,
              ElementsAre("batch", "query_heads", "query_tokens", "head_dim"));
  EXPECT_THAT(Named(lsh.inputs, "v").symbols,
              ElementsAre("batch", "kv_heads", "kv_tokens", "value_dim"));
  EXPECT_THAT(Named(lsh.outputs, "buckets").symbols,
              ElementsAre("batch", "query_heads", "query_tokens", "rounds"));
  // One column of a hash for each of the two buckets that 64 tokens have: no size decides it.
  EXPECT_THAT(Named(lsh.parameters, "rotations").symbols, ElementsAre("head_dim", "rounds", "1"));
  EXPECT_EQ(Named(lsh.parameters, "rotations").spec.shape, Shape({4, 4, 1}));
  const TechniqueTensors stack =
      Describe("transformer_xl", Problem::SelfAttention(1, 4, 64, 8, /*causal=*/true));
  EXPECT_THAT(Named(stack.parameters, "layer0.ff.w1").symbols,
              ElementsAre("model_dim", "4 model_dim"));
}

TEST(TechniqueTensors, AParameterIsDrawnWhereTheSeedDecidesIt) {
  const Problem problem = Problem::SelfAttention(1, 2, 64, 16);
  EXPECT_TRUE(Named(Describe("performer", problem).parameters, "w").drawn);
  EXPECT_FALSE(Named(Describe("alibi", problem).parameters, "slopes").drawn);
}

TEST(TechniqueTensors, LikeLayersAreOneLine) {
  const auto tensor = [](const std::string& name, int64_t size) {
    return NamedTensorSpec{{name, {size}}, {"a"}, true};
  };
  std::vector<std::string> names;
  for (const NamedTensorSpec& one : JoinLayers(
           {tensor("layer0.w", 3), tensor("layer0.w1", 3), tensor("layer1.w", 3),
            tensor("layer1.w1", 3), tensor("layer2.w", 4), tensor("w1", 3), tensor("w2", 3)})) {
    names.push_back(one.spec.name);
  }
  EXPECT_THAT(names, ElementsAre("layer{0..1}.w", "layer{0..1}.w1", "layer2.w", "w1", "w2"));
}

TEST(TechniqueHelp, WhatWasDrawnIsNamedWithItsShapeAndSeedAndHowToGiveIt) {
  TensorSpec noise{"u", {1, 8, 512}};
  noise.noise = Distribution::kUniform;
  NamedTensors parameters;
  parameters["gain"] = Tensor(DType::kF32, {3, 2});
  parameters["slopes"] = Tensor(DType::kF32, {3});
  EXPECT_THAT(DrawnLines({noise}, {"gain"}, parameters, 7),
              ElementsAre("input u [1, 8, 512] f32 is drawn from seed 7, uniform between 0 and 1; "
                          "give it as tensor \"u\" in --input",
                          "parameters are drawn from seed 7: gain [3, 2]; give them by these names "
                          "in --parameters"));
}

TEST(TechniqueHelp, EveryTechniqueHasItsHeadersFormulaAndAllOptionsAndTensors) {
  for (const Technique* technique : Registry::Global().All()) {
    const TechniqueInfo& info = technique->info();
    Job job;
    job.technique = technique;
    job.options = technique->Canonical({}).value();
    job.problem = Problems(info).at(0);
    const absl::StatusOr<std::string> page = TechniqueHelp(job, "by default");
    ASSERT_TRUE(page.ok()) << info.name << ": " << page.status();
    const HeaderText text = FindHeaderText(info.name.c_str());
    ASSERT_STRNE(text.head, "") << info.name;
    EXPECT_THAT(*page, AllOf(HasSubstr(text.head), HasSubstr(text.of_class), HasSubstr(info.title),
                             HasSubstr(info.citation)));
    for (const OptionSpec& option : info.options) {
      std::vector<absl::string_view> words = absl::StrSplit(option.help, ' ');
      for (const absl::string_view part : absl::StrSplit(option.range, ' ')) words.push_back(part);
      words.push_back(option.name);
      words.push_back(option.default_value);
      for (const absl::string_view word : words) EXPECT_THAT(*page, HasSubstr(std::string(word)));
    }
    const auto tensors = DescribeTensors(*technique, job.options, job.problem, 1);
    ASSERT_TRUE(tensors.ok()) << info.name << ": " << tensors.status();
    EXPECT_TRUE(tensors->parameters_status.ok()) << info.name << tensors->parameters_status;
    for (const auto& all : {tensors->inputs, tensors->outputs, JoinLayers(tensors->parameters)}) {
      for (const NamedTensorSpec& tensor : all) {
        EXPECT_THAT(*page, HasSubstr(absl::StrCat("\n", tensor.spec.name, "  "))) << info.name;
      }
    }
    EXPECT_THAT(*page, HasSubstr(absl::StrCat("--technique=", info.name)));
  }
}

// The page refers to the header for the meaning of a tensor.
// Projections and stacks, whose parameters are in the headers of core/layers, read hidden states.
TEST(TechniqueHelp, EveryHeaderNamesTheTensorsThatOthersDoNotHave) {
  const std::set<std::string> common = {"q",      "k",        "v",   "x",
                                        "memory", "key_mask", "out", "log_sum_exp"};
  for (const Technique* technique : Registry::Global().All()) {
    const HeaderText text = FindHeaderText(technique->info().name.c_str());
    const std::vector<std::string> words =
        absl::StrSplit(absl::StrCat(text.head, text.of_class), absl::ByAnyChar(" \n,.;:()[]`'\""));
    for (const Case& one : CasesOf(*technique)) {
      for (const auto* specs : {&one.layer->inputs(), &one.layer->outputs()}) {
        for (const TensorSpec& spec : *specs) {
          if (common.count(spec.name) > 0) continue;
          EXPECT_TRUE(std::find(words.begin(), words.end(), spec.name) != words.end())
              << one.ToString() << ": " << spec.name;
        }
      }
      if (technique->info().input_kind != InputKind::kQkv) continue;
      for (const auto& [name, tensor] : one.layer->parameters()) {
        EXPECT_TRUE(std::find(words.begin(), words.end(), name) != words.end())
            << one.ToString() << ": " << name;
      }
    }
  }
}

TEST(TechniqueInputs, AFileOfNothingButWhatATechniqueReadsServesIt) {
  for (const Technique* technique : Registry::Global().All()) {
    for (const Case& one : CasesOf(*technique)) {
      const InputSource source = FileOf(one.inputs);
      Problem wanted = one.problem;
      wanted.batch = wanted.query_tokens = wanted.kv_tokens = kMaxTokens;
      const auto fitted = FitProblem(source, *technique, one.options, wanted);
      ASSERT_TRUE(fitted.ok()) << one.ToString() << ": " << fitted.status();
      EXPECT_EQ(*fitted, one.problem) << one.ToString() << " but " << fitted->ToString();
      const auto inputs = MakeInputs(source, one.specs, *fitted, 1);
      ASSERT_TRUE(inputs.ok()) << one.ToString() << ": " << inputs.status();
      EXPECT_TRUE(SameBits(*inputs, one.inputs)) << one.ToString();
    }
  }
}

TEST(TechniqueInputs, ATensorThatIsNotReadChangesNothing) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const Technique* technique : Registry::Global().All()) {
    for (const Case& one : CasesOf(*technique)) {
      NamedTensors tensors;
      for (const auto& [name, tensor] : one.inputs) tensors[name] = tensor.Clone();
      std::vector<TensorSpec> others = QkvInputs(one.problem);
      others.pop_back();  // key_mask
      others.push_back(HiddenInputs(one.problem).front());
      for (const TensorSpec& other : others) {
        if (tensors.count(other.name) > 0) continue;
        tensors[other.name] = Tensor(other.dtype, other.shape);
        Fill(tensors[other.name].view(), kNan);
      }
      const InputSource source = FileOf(tensors);
      Problem wanted = one.problem;
      wanted.batch = wanted.query_tokens = wanted.kv_tokens = kMaxTokens;
      const auto fitted = FitProblem(source, *technique, one.options, wanted);
      ASSERT_TRUE(fitted.ok()) << one.ToString() << ": " << fitted.status();
      EXPECT_EQ(*fitted, one.problem) << one.ToString();
      const auto inputs = MakeInputs(source, one.specs, *fitted, 1);
      ASSERT_TRUE(inputs.ok()) << one.ToString() << ": " << inputs.status();
      const auto outputs = one.Run(ViewsOf(*inputs));
      const auto expected = one.Run(ViewsOf(one.inputs));
      ASSERT_TRUE(outputs.ok() && expected.ok()) << one.ToString() << ": " << outputs.status();
      EXPECT_TRUE(SameBits(*outputs, *expected)) << one.ToString();
    }
  }
}

TEST(TechniqueInputs, EveryTensorThatMustBeGivenIsRead) {
  for (const Technique* technique : Registry::Global().All()) {
    for (const Case& one : CasesOf(*technique)) {
      const auto before = one.Run(ViewsOf(one.inputs));
      ASSERT_TRUE(before.ok()) << one.ToString() << ": " << before.status();
      const NamedTensors others =
          MakeInputs({"gaussian", nullptr}, one.specs, one.problem, 2).value();
      for (const auto& [name, other] : others) {
        Inputs changed = ViewsOf(one.inputs);
        changed.Set(name, other.view());
        const auto after = one.Run(changed);
        ASSERT_TRUE(after.ok()) << one.ToString() << ": " << after.status();
        EXPECT_FALSE(SameBits(*before, *after)) << one.ToString() << " never reads " << name;
      }
    }
  }
}

// A figure draws the values of a budget from left to right, and each is tried once.
TEST(Techniques, ValuesToSweepABudgetOverAreAscendingAndAllowed) {
  for (const Technique* technique : Registry::Global().All()) {
    for (const OptionSpec& option : technique->info().options) {
      if (option.name != technique->info().budget_option) continue;
      SCOPED_TRACE(absl::StrCat(technique->info().name, ":", option.name));
      double before = -std::numeric_limits<double>::infinity();
      for (const std::string& text : option.sweep) {
        double value = 0;
        ASSERT_TRUE(absl::SimpleAtod(text, &value)) << text;
        EXPECT_GT(value, before);
        EXPECT_TRUE(technique->Canonical({{option.name, text}}).ok()) << text;
        before = value;
      }
    }
  }
}

}  // namespace
}  // namespace tfb
