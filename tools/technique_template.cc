#include "tools/technique_template.h"

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace tfb {
namespace {

constexpr char kBuild[] = R"(load("//tools:technique.bzl", "technique")

technique(
    name = "@name@",
    test_deps = ["//attention/dense"],
    deps = ["//core/flash"],
)
)";

constexpr char kHeader[] = R"(// @Title@: FILL IN what it does, in one sentence.
//
//   y_i = sum_j a_ij v_j,   a_ij = exp(scale q_i . k_j) / sum_r exp(scale q_i . k_r)
//
// over the keys j that are at most `window` tokens away from query i, are tokens and, where the
// problem is causal, are not later than it; scale = 1 / sqrt(head_dim). Query i stands at token
// i + kv_tokens - query_tokens. FILL IN the formula.
//
// Source: FILL IN authors, year, title, arXiv number with its version, section and equation; where
// this deviates, and why. Cost: 2 pairs (head_dim + value_dim) FLOPs with at most
// tokens (2 window + 1) pairs: linear in tokens.
#ifndef TFB_@FAMILY@_@NAME@_@NAME@_H_
#define TFB_@FAMILY@_@NAME@_@NAME@_H_

#include <cstdint>

#include "core/options.h"

namespace tfb::@name@ {

struct @Name@Options {
  int64_t window = 256;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 0, kMaxTokens, "keys seen on each side of the query's own",
             {64, 128, 256, 512});
  }
};

}  // namespace tfb::@name@

#endif  // TFB_@FAMILY@_@NAME@_@NAME@_H_
)";

constexpr char kSource[] = R"(#include "@family@/@name@/@name@.h"

#include "core/flash/flash_technique.h"

namespace tfb::@name@ {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info = {"@name@", "@family@", "@Title@",
                        "FILL IN authors, year, arXiv number with its version, section"};
  info.exactness = Exactness::kExact;  // equals dense attention under the mask below
  info.budget_option = "window";       // the option that trades error for cost
  info.growth = 1;                     // exponent of the time in tokens
  return info;
}

class @Name@ : public FlashTechnique<@Name@Options> {
 public:
  @Name@() : FlashTechnique(Info()) {}

 private:
  // The technique for the engines of all devices: which keys query i sees. The causal mask is not its
  // affair. See core/flash/plan.h for what else a plan can say.
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const int64_t offset = job.problem.kv_tokens - job.problem.query_tokens;
    return FlashPlan(job.problem)
        .Sees(BandPattern(offset - job.options.window, offset + job.options.window));
  }

  // The formula of the header in float64. It shares no code with the plan that it judges, so it says
  // again which keys a query sees.
  absl::StatusOr<PairScore> DefineScore(const Job& job) const override {
    return PairScore::Sees([offset = job.problem.kv_tokens - job.problem.query_tokens,
                            window = job.options.window](int64_t, int64_t i, int64_t j) {
      return j >= i + offset - window && j <= i + offset + window;
    });
  }
};

const bool registered = RegisterTechnique<@Name@>();

}  // namespace
}  // namespace tfb::@name@
)";

constexpr char kTest[] = R"(#include "@family@/@name@/@name@.h"

#include "attention/dense/dense.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::@name@ {
namespace {

const Technique& @Name@() { return FindTechnique("@name@"); }

// The conformance test runs what every technique must pass. Here stand cases computed by hand and
// what is true of this technique alone.

NamedTensors Random(const Problem& problem) {
  return RandomInputs(@Name@().InputSpecs(problem, {}).value(), /*seed=*/1);
}
NamedTensors RunOwn(const Problem& problem, const NamedTensors& inputs, const Options& options) {
  return RunTechnique(@Name@(), problem, ViewsOf(inputs), {options}).value();
}

TEST(@Name@, WindowOfNoneGivesEachTokenItsOwnValue) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16);
  const NamedTensors inputs = Random(problem);
  const NamedTensors outputs = RunOwn(problem, inputs, {{"window", "0"}});
  EXPECT_LE(MaxDifference(outputs.at("out").view(), inputs.at("v").view()),
            Fp32Bound(inputs.at("v").view()));
}

TEST(@Name@, WindowCoveringTheSequenceEqualsDense) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 70, 16, causal);
    const NamedTensors inputs = Random(problem);
    const NamedTensors outputs = RunOwn(problem, inputs, {{"window", "70"}});
    const NamedTensors dense = RunTechnique(dense::Dense(), problem, ViewsOf(inputs)).value();
    EXPECT_LE(MaxDifference(outputs.at("out").view(), dense.at("out").view()),
              Fp32Bound(inputs.at("v").view()));
  }
}

TEST(@Name@, ZeroQueriesGiveTheMeanOfTheWindow) {
  const Problem problem = Problem::SelfAttention(1, 1, 5, 4);
  NamedTensors inputs = Random(problem);
  Fill(inputs.at("q").view(), 0);
  for (int64_t j = 0; j < 5; ++j) {
    Fill(Slice(inputs.at("v").view(), 2, j, 1), static_cast<double>(j));
  }
  const NamedTensors outputs = RunOwn(problem, inputs, {{"window", "1"}});
  const float expected[] = {0.5, 1, 2, 3, 3.5};
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(*outputs.at("out").view().At<float>(0, 0, i, 0), expected[i], 1e-4);
  }
}

}  // namespace
}  // namespace tfb::@name@
)";

// "longformer_two": "Longformer two".
std::string Title(absl::string_view name) {
  std::string title = absl::StrReplaceAll(name, {{"_", " "}});
  title[0] = absl::ascii_toupper(static_cast<unsigned char>(title[0]));
  return title;
}

}  // namespace

std::string ClassName(absl::string_view name) {
  std::string joined;
  for (absl::string_view word : absl::StrSplit(name, '_')) {
    absl::StrAppend(&joined, absl::AsciiStrToUpper(word.substr(0, 1)), word.substr(1));
  }
  return joined;
}

std::map<std::string, std::string> TechniqueFiles(absl::string_view family,
                                                  absl::string_view name) {
  const std::vector<std::pair<std::string, std::string>> words = {
      {"@family@", std::string(family)}, {"@FAMILY@", absl::AsciiStrToUpper(family)},
      {"@name@", std::string(name)},     {"@NAME@", absl::AsciiStrToUpper(name)},
      {"@Name@", ClassName(name)},       {"@Title@", Title(name)}};
  return {{"BUILD", absl::StrReplaceAll(kBuild, words)},
          {absl::StrCat(name, ".h"), absl::StrReplaceAll(kHeader, words)},
          {absl::StrCat(name, ".cc"), absl::StrReplaceAll(kSource, words)},
          {absl::StrCat(name, "_test.cc"), absl::StrReplaceAll(kTest, words)}};
}

}  // namespace tfb
