// Tests options at the ends of their ranges and beyond the sequence, and refusals with messages.
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "harness/conformance/drawn.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

std::string Describe(const Options& options) { return options.empty() ? "" : ToString(options); }

// Runs on every value of every option, keeping the others. Values that the technique refuses are
// printed.
void EveryOptionAtItsEndsAndBeyondTheSequence(const Job& job) {
  const bool few = job.device == Device::kSimulator && !IsExhaustive();
  int tried = 0;
  for (const OptionSpec& option : job.technique->info().options) {
    for (const std::string& value : ValuesToTry(option, job.problem.query_tokens, few)) {
      Job varied = job;
      varied.options[option.name] = value;
      if (option.type == "techniques") varied.options["layers"] = absl::StrCat(kLayersOfLists);
      SCOPED_TRACE(absl::StrCat("options ", Describe(varied.options)));
      const auto layer = varied.CreateLayer();
      if (!layer.ok() && IsRefusal(layer.status())) {
        EXPECT_FALSE(layer.status().message().empty());
        std::cout << "  refused " << option.name << "=" << value << ": " << layer.status().message()
                  << "\n";
        continue;
      }
      const auto trial = Trial::Make(varied);
      if (trial == nullptr) return;
      trial->ExpectRunMatchesDefinition();
      ++tried;
    }
  }
  if (tried == 0) Skip("no option has a value that this problem admits");
}

void UnknownOptionsAreAnsweredWithTheKnownOnes(const Job& job) {
  Options options = job.options;
  options["no_such_option"] = "1";
  const auto layer = job.technique->Create(job.problem, options, job.device, kSeed);
  ASSERT_EQ(layer.status().code(), absl::StatusCode::kInvalidArgument) << layer.status();
  const std::string message(layer.status().message());
  EXPECT_TRUE(absl::StrContains(message, "no_such_option")) << message;
  for (const OptionSpec& option : job.technique->info().options) {
    EXPECT_TRUE(absl::StrContains(message, option.name)) << message;
  }
  EXPECT_EQ(job.technique->Canonical(options).status().code(), absl::StatusCode::kInvalidArgument);
}

void ValuesOutOfRangeAreRefusedWithTheRange(const Job& job) {
  for (const OptionSpec& option : job.technique->info().options) {
    std::vector<std::string> wrong = {"", "pear", "1 2"};
    if (option.type == "int") {
      const Range range = RangeOf(option);
      wrong.push_back(absl::StrCat(static_cast<int64_t>(range.min) - 1));
      wrong.push_back(absl::StrCat(static_cast<int64_t>(range.max) + 1));
      wrong.push_back("99999999999999999999");
      wrong.push_back("1.5");
    }
    if (option.type == "real") wrong.insert(wrong.end(), {"nan", "1e999"});
    for (const std::string& value : wrong) {
      Options options = job.options;
      options[option.name] = value;
      const auto layer = job.technique->Create(job.problem, options, job.device, kSeed);
      ASSERT_EQ(layer.status().code(), absl::StatusCode::kInvalidArgument)
          << option.name << "=" << value << ": " << layer.status();
      const std::string message(layer.status().message());
      EXPECT_TRUE(absl::StrContains(message, option.name)) << message;
      EXPECT_TRUE(absl::StrContains(message, option.range)) << message;
    }
  }
}

void CanonicalOptionsAreFixedPoints(const Job& job) {
  const Technique& technique = *job.technique;
  const auto canonical = technique.Canonical(job.options);
  ASSERT_TRUE(canonical.ok()) << canonical.status();
  EXPECT_EQ(canonical->size(), technique.info().options.size());
  EXPECT_EQ(ToString(*technique.Canonical(*canonical)), ToString(*canonical));
  const auto defaults = technique.Canonical({});
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  for (const OptionSpec& option : technique.info().options) {
    EXPECT_EQ(defaults->at(option.name), option.default_value);
    for (const std::string& value : option.sweep) {
      EXPECT_TRUE(technique.Canonical({{option.name, value}}).ok()) << option.name << "=" << value;
    }
  }
}

// Checks the fields that --list prints and rendering needs.
void ItsDescriptionIsComplete(const Job& job) {
  const TechniqueInfo& info = job.technique->info();
  EXPECT_FALSE(info.name.empty());
  EXPECT_FALSE(info.title.empty());
  EXPECT_FALSE(info.citation.empty());
  EXPECT_FALSE(info.devices.empty());
  EXPECT_GT(info.growth, 0);
  EXPECT_TRUE(info.supports_causal || info.supports_noncausal);
  const std::set<std::string> families = {"attention", "positional", "memory", "adaptive"};
  EXPECT_EQ(families.count(info.family), 1u) << info.family;
  bool has_budget = info.budget_option.empty();
  for (const OptionSpec& option : info.options) {
    EXPECT_FALSE(option.help.empty()) << option.name;
    if (option.name != info.budget_option) continue;
    has_budget = true;
    EXPECT_GE(option.sweep.size(), 2u) << "the budget option " << option.name << " has no sweep";
  }
  EXPECT_TRUE(has_budget) << "there is no option " << info.budget_option;
}

void OutputsAreDeclaredAsTheyAreWritten(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto specs = job.technique->OutputSpecs(job.problem, job.options);
  ASSERT_TRUE(specs.ok()) << specs.status();
  ASSERT_EQ(specs->size(), trial->layer().outputs().size());
  EXPECT_EQ(specs->at(0).name, "out");
  EXPECT_FALSE(specs->at(0).optional);
  for (size_t n = 0; n < specs->size(); ++n) {
    EXPECT_EQ(specs->at(n).name, trial->layer().outputs()[n].name);
    EXPECT_EQ(specs->at(n).shape, trial->layer().outputs()[n].shape);
  }
  const auto inputs = job.technique->InputSpecs(job.problem, job.options);
  ASSERT_EQ(inputs->size(), trial->layer().inputs().size());
  for (size_t n = 0; n < inputs->size(); ++n) {
    EXPECT_EQ(inputs->at(n).name, trial->layer().inputs()[n].name);
  }
}

// Draws problems and options together, and compares a layer of each with its definition.
template <class DrawProblem, class DrawOptions>
void ExpectDrawnMatch(const Job& job, int64_t draws, const DrawProblem& draw_problem,
                      const DrawOptions& draw_options) {
  std::mt19937_64 random = RandomOf(job.technique->info());
  int64_t tried = 0;
  for (int64_t attempt = 0; attempt < 20 * draws && tried < draws; ++attempt) {
    Job drawn = On(draw_problem(&random), job);
    drawn.options = draw_options(drawn.problem, attempt, &random);
    SCOPED_TRACE(absl::StrCat(LabelOf(drawn.problem), " ", Describe(drawn.options)));
    const auto layer = drawn.CreateLayer();
    if (IsRefusal(layer.status())) continue;
    if (layer.ok() && WouldTakeSeconds(job.device, (*layer)->cost().flops.value_or(0))) continue;
    const auto trial = Trial::Make(drawn);
    ASSERT_NE(trial, nullptr);
    const NamedTensors outputs = trial->Run();
    trial->ExpectMatchesDefinition(outputs,
                                   Tolerance::Conditioned());  // for networks of few channels
    // Threads of a device are the host's, and compute nothing there. The layer is another one, since Setup may
    // draw parameters anew.
    const auto again = job.device == Device::kCpu ? Trial::Make(drawn) : nullptr;
    if (again != nullptr) {
      ExpectSameBits(outputs, again->Run(RunSettings::Threads(3)), "2 threads and 3");
    }
    ++tried;
  }
  EXPECT_GT(tried, 0) << "every problem was refused";
}

// TFB_PROPERTY_DRAWS sets the number of draws.
void ProblemsAndOptionsAtRandom(const Job& job) {
  const bool simulated = job.device != Device::kCpu;
  ExpectDrawnMatch(
      job, FromEnvironment("TFB_PROPERTY_DRAWS", simulated ? 3 : 10),
      [=](std::mt19937_64* random) { return ProblemAtRandom(simulated ? 40 : 100, random); },
      [&](const Problem& problem, int64_t number, std::mt19937_64* random) {
        return OptionsAtRandom(job.technique->info(), problem, number, random);
      });
}

// Problems of more than four tiles of 64 tokens, whose last tile is short, with lists among their
// options: gaps, positions and sizes. Windows of any length meet the tiles at any place.
void LongProblemsAndListsAtRandom(const Job& job) {
  const TechniqueInfo& info = job.technique->info();
  ExpectDrawnMatch(
      job, job.device != Device::kCpu && !IsExhaustive() ? 2 : 10,
      [](std::mt19937_64* random) {
        Problem problem = ProblemAtRandom(63, random);
        problem.batch = 1;
        problem.head_dim = problem.value_dim = 16;
        problem.query_tokens += 256;
        problem.kv_tokens += 256;
        problem.dtype = DType::kF32;
        return problem;
      },
      [&](const Problem& problem, int64_t number, std::mt19937_64* random) {
        Options options = OptionsAtRandom(info, problem, number, random);
        for (const OptionSpec& option : info.options) {
          constexpr const char* kLists[] = {"1", "2", "3", "5", "0/70", "2/3"};
          if (option.type != "ints" || Below(5, random) >= 3) continue;
          options[option.name] = kLists[Below(std::size(kLists), random)];
        }
        return options;
      });
}

Problem Short(bool causal) { return Problem::SelfAttention(1, 2, 40, 8, causal); }

}  // namespace

std::vector<Case> OptionCases() {
  std::vector<Case> cases = {
      {"UnknownOptionsAreAnsweredWithTheKnownOnes",
       "21",
       {Usual()},
       UnknownOptionsAreAnsweredWithTheKnownOnes},
      {"ValuesOutOfRangeAreRefusedWithTheRange",
       "21",
       {Usual()},
       ValuesOutOfRangeAreRefusedWithTheRange},
      {"CanonicalOptionsAreFixedPoints", "21", {Usual()}, CanonicalOptionsAreFixedPoints},
      {"ItsDescriptionIsComplete", "", {Usual()}, ItsDescriptionIsComplete},
      {"OutputsAreDeclaredAsTheyAreWritten", "", UsualBoth(), OutputsAreDeclaredAsTheyAreWritten},
  };
  for (Case& one : cases) one.default_options_only = true;
  cases.push_back(
      {"ProblemsAndOptionsAtRandom", "12, 15, 17, 19, 21", {Usual()}, ProblemsAndOptionsAtRandom});
  cases.back().default_options_only = true;
  cases.push_back({"LongProblemsAndListsAtRandom",
                   "12, 15, 17, 19, 21",
                   {Usual()},
                   LongProblemsAndListsAtRandom});
  cases.back().default_options_only = true;
  cases.push_back({"EveryOptionAtItsEndsAndBeyondTheSequence",
                   "19, 20, 21",
                   {Short(false), Short(true)},
                   EveryOptionAtItsEndsAndBeyondTheSequence});
  return cases;
}

}  // namespace tfb::conformance
