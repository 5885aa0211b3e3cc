#include "harness/conformance/register.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "harness/conformance/interface.h"

namespace tfb::conformance {
namespace {

class CaseTest : public ::testing::Test {
 public:
  CaseTest(const Case& one, const Job& job) : case_(one), job_(job) {}
  void TestBody() override { case_.check(job_); }

 private:
  Case case_;
  Job job_;
};

std::vector<Case> AllCases() {
  std::vector<Case> all;
  for (const auto& cases : {MaskCases(), ShapeCases(), DeviceCases(), OptionCases(), NumberCases(),
                            ScaleCases(), DeterminismCases(), ContractCases(), CostCases(),
                            StreamingCases(), ContinuationCases(), GradientCases()}) {
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

// Makes a GoogleTest of the case on the job, with the label of its options.
void Register(const Case& one, const Job& job, const std::string& label) {
  const std::string name =
      absl::StrCat(one.name, "/", Name(job.device), "/", label, "/", LabelOf(job.problem));
  ::testing::RegisterTest(job.technique->info().name.c_str(), name.c_str(), nullptr, nullptr,
                          __FILE__, __LINE__,
                          [=]() -> ::testing::Test* { return new CaseTest(one, job); });
}

bool IsReduced(Device device) { return device == Device::kSimulator && !IsExhaustive(); }

// Tells whether a case runs its problem of that number with a set of options, of so many. The
// simulator, which is slow, runs each problem with one, alternately.
bool RunsWith(const Case& one, Device device, size_t set, size_t sets, size_t problem) {
  if (one.default_options_only) return set == 0;
  if (!IsReduced(device) || one.all_options_simulated) return true;
  return set == problem / 2 % sets;  // masks alternate with each
}

// Returns the problem as the simulator runs it.
Problem Reduced(Problem problem, SimulatedSize size) {
  if (size == SimulatedSize::kAsItIs || size == SimulatedSize::kSameSizes) return problem;
  const bool is_square = problem.kv_tokens == problem.query_tokens;
  problem.query_tokens = std::min<int64_t>(problem.query_tokens, 80);
  problem.kv_tokens = std::min<int64_t>(problem.kv_tokens, is_square ? 80 : 130);
  if (size == SimulatedSize::kFewerTokens) return problem;
  problem.batch = std::min<int64_t>(problem.batch, 1);
  // Products with projections grow with the square of heads x head_dim.
  if (problem.head_dim > 40) problem.query_heads = problem.kv_heads = 1;
  return problem;
}

// Keeps one of any two problems that differ only in their mask, alternately causal and not.
std::vector<Problem> WithOneMaskEach(const std::vector<Problem>& problems, size_t turn) {
  std::vector<Problem> kept;
  for (const Problem& problem : problems) {
    Problem other = problem;
    other.causal = !other.causal;
    if (std::find(problems.begin(), problems.end(), other) == problems.end()) {
      kept.push_back(problem);
    } else if (!problem.causal) {
      kept.push_back(turn++ % 2 == 0 ? problem : other);
    }
  }
  return kept;
}

// Returns the problems of the case of that number in the forms, causal or not, that the technique
// has.
std::vector<Problem> ProblemsOf(const Case& one, size_t number, const TechniqueInfo& info,
                                Device device) {
  const bool has_both_masks =
      one.of_causality || one.simulated_size == SimulatedSize::kAsItIs || !IsReduced(device);
  std::vector<Problem> problems;
  std::set<std::string> labels;
  for (Problem problem : has_both_masks ? one.problems : WithOneMaskEach(one.problems, number)) {
    if (!one.of_causality) {
      problem.causal = problem.causal ? info.supports_causal : !info.supports_noncausal;
    }
    if (IsReduced(device)) problem = Reduced(problem, one.simulated_size);
    if (labels.insert(LabelOf(problem)).second) problems.push_back(problem);
  }
  return problems;
}

// Tells whether a layer for a usual problem of either kind can be made with the options.
bool Admits(const Technique& technique, Device device, const Options& options) {
  for (const bool causal : {false, true}) {
    if (technique.Create(Usual(causal), options, device, kSeed).ok()) return true;
  }
  return false;
}

// Returns OK where a layer for a usual problem of either kind has a backward pass, else why none has.
absl::Status CheckBackward(const Technique& technique, Device device, const Options& options) {
  absl::Status status;
  for (const bool causal : {false, true}) {
    const auto layer = technique.Create(Usual(causal), options, device, kSeed);
    if (!layer.ok()) continue;
    status = (*layer)->CheckBackward();
    if (status.ok()) break;
  }
  return status;
}

const OptionSpec* FindOption(const TechniqueInfo& info, const std::string& name) {
  for (const OptionSpec& option : info.options) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

// Every technique must pass this case; otherwise all its other cases could be skipped unnoticed.
void AnOrdinaryProblemIsAdmitted(const Job& job) {
  EXPECT_TRUE(Admits(*job.technique, job.device, job.options))
      << job.technique->Create(Usual(false), job.options, job.device, kSeed).status()
      << ", causal: "
      << job.technique->Create(Usual(true), job.options, job.device, kSeed).status();
}

// Stands for all cases of backward passes where a technique has none.
void ItHasABackwardPass(const Job& job) {
  const absl::Status status = CheckBackward(*job.technique, job.device, job.options);
  if (!status.ok()) Skip(std::string(status.message()));
}

// Returns the one test that stands for all cases of a device that cannot run them: it is skipped
// with the reason, or fails where the environment requires a GPU.
std::optional<Case> Obstacle(const TechniqueInfo& info, Device device) {
  if (!RunsOn(info, device)) {
    const std::string reason =
        absl::StrCat(info.name, " has no implementation for device ", Name(device));
    return Case{"ItRunsOnTheDevice", "", {}, [=](const Job&) { Skip(reason); }};
  }
  const absl::Status status = DeviceStatus(device);
  if (status.ok()) return std::nullopt;
  const std::string reason(status.message());
  return Case{"ThereIsADevice", "", {}, [=](const Job&) {
                const char* required = std::getenv("TFB_REQUIRE_GPU");
                if (required == nullptr || *required == '\0') return Skip(reason);
                FAIL() << reason << "; TFB_REQUIRE_GPU asks for one";
              }};
}

}  // namespace

std::vector<std::pair<std::string, Options>> OptionSets(const Technique& technique, Device device) {
  std::vector<std::pair<std::string, Options>> sets = {{"defaults", {}}};
  const OptionSpec* budget = FindOption(technique.info(), technique.info().budget_option);
  if (budget == nullptr) return sets;
  std::vector<std::string> values = {"16", "8", "4", "2", "1"};
  if (budget->type != "int") values = budget->sweep;
  int64_t usual = 0, least = 0;
  const bool is_number = absl::SimpleAtoi(budget->default_value, &usual) && usual > 1;
  for (const std::string& value : values) {
    // A smaller budget than usual is used, so that the tests do not take longer.
    if (is_number && absl::SimpleAtoi(value, &least) && least > usual) continue;
    const Options options = {{budget->name, value}};
    if (value == budget->default_value || !Admits(technique, device, options)) continue;
    sets.push_back({absl::StrCat(budget->name, "=", value), options});
    break;
  }
  return sets;
}

int RegisterTests(const std::vector<const Technique*>& techniques,
                  const std::vector<Device>& devices) {
  int count = 0;
  std::vector<Case> cases = AllCases();
  cases.push_back({"AnOrdinaryProblemIsAdmitted", "", {Usual()}, AnOrdinaryProblemIsAdmitted});
  cases.push_back({kBackwardCase, "", {Usual()}, ItHasABackwardPass});
  cases.back().default_options_only = true;
  const auto add = [&count](const Case& one, const Technique* technique, const Options& options,
                            Device device, const std::string& label, const Problem& problem) {
    Job job;
    job.technique = technique;
    job.options = options;
    job.device = device;
    job.problem = problem;
    job.seed = kSeed;
    Register(one, job, label);
    ++count;
  };
  for (const Technique* technique : techniques) {
    for (const Device device : devices) {
      if (const std::optional<Case> obstacle = Obstacle(technique->info(), device)) {
        add(*obstacle, technique, {}, device, "defaults", Usual());
        continue;
      }
      const auto option_sets = OptionSets(*technique, device);
      const bool has_backward = CheckBackward(*technique, device, {}).ok();
      for (size_t number = 0; number < cases.size(); ++number) {
        const Case& one = cases[number];
        if (one.of_devices && device == Device::kCpu) continue;
        if (one.of_gradients && !has_backward) continue;
        const auto problems = ProblemsOf(one, number, technique->info(), device);
        for (size_t set = 0; set < option_sets.size(); ++set) {
          const auto& [label, options] = option_sets[set];
          for (size_t n = 0; n < problems.size(); ++n) {
            if (!RunsWith(one, device, set, option_sets.size(), number + n)) continue;
            add(one, technique, options, device, label, problems[n]);
          }
        }
      }
    }
  }
  return count;
}

void RegisterInterfaceTest(const Technique* technique, const std::string& file) {
  const Case one = InterfaceCase(file);
  Job job;
  job.technique = technique;
  job.problem = one.problems.front();
  Register(one, job, "defaults");
}

}  // namespace tfb::conformance
