// Measures how far a comparison of two sweeps can be trusted on this machine: how often it reports
// an unchanged technique as slower (false alarms), and how often it finds a technique that was made
// slower on purpose (power).
#include <stdlib.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/status.h"
#include "core/technique.h"
#include "harness/cases.h"
#include "harness/machine.h"
#include "harness/quantities.h"
#include "harness/sweep.h"
#include "harness/timing.h"
#include "results/comparison.h"
#include "results/files.h"
#include "results/reader.h"
#include "tools/command_line.h"

ABSL_FLAG(int, runs, 20, "Pairs of sweeps, for the false alarms and for the power each.");
ABSL_FLAG(double, slow_down, 1.10, "The factor by which a run of a chosen technique is longer.");
ABSL_FLAG(double, threshold, 1.05, "As of compare.");
ABSL_FLAG(std::string, techniques, "*", "What to sweep, as of sweep.");
ABSL_FLAG(std::string, lengths, "512", "Tokens, as of sweep.");
ABSL_FLAG(int, threads, 1, "Threads on the CPU.");
ABSL_FLAG(int, repetitions, 201, "Samples of a run.");
ABSL_FLAG(
    int, rounds, 3,
    "Visits over which they are spread, as of sweep. With 1, where a layer's memory happens to "
    "lie is the same for all samples of a sweep, and differs between two.");
ABSL_FLAG(std::string, min_time, "1ms", "As of sweep.");
ABSL_FLAG(std::string, time_budget, "60s", "Of one sweep, as of sweep. 0: no limit.");
ABSL_FLAG(std::string, keep, "", "A folder for the result files. Empty: they are deleted.");

namespace tfb {
namespace {

constexpr char kProgram[] = "compare_self_test";
constexpr char kUsage[] =
    "compare_self_test [--runs=20] [--slow_down=1.10] [--techniques=...]\n"
    "Sweeps the same build again and again, and in between a build in which every fourth "
    "technique\n"
    "takes longer, and compares neighbours: prints the rate of false alarms and the power.\n\n"
    "Exit status: 0 at most 1% of the cases are false alarms and at least 95% of the slowed\n"
    "techniques are found, 1 not so, 2 bad usage.";
constexpr int kEvery = 4;  // one of so many techniques is slowed at a time
constexpr double kMostFalseAlarms = 0.01, kLeastPower = 0.95;

// --- A technique whose runs last longer

class SlowedLayer : public Layer {
 public:
  SlowedLayer(std::unique_ptr<Layer> layer, double factor)
      : Layer(layer->problem(), layer->inputs(), layer->outputs()),
        layer_(std::move(layer)),
        factor_(factor) {
    for (const auto& [name, tensor] : layer_->parameters())
      parameters_.emplace(name, tensor.Clone());
  }
  size_t workspace_bytes(int threads) const override { return layer_->workspace_bytes(threads); }
  Cost cost() const override { return layer_->cost(); }
  std::map<std::string, double> statistics() const override { return layer_->statistics(); }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    return layer_->Setup(inputs, execution);
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    const double begin = MonotonicSeconds();
    const absl::Status status = layer_->Run(inputs, outputs, execution);
    const double end = begin + factor_ * (MonotonicSeconds() - begin);
    while (factor_ > 1 && MonotonicSeconds() < end) {
    }
    return status;
  }

 private:
  std::unique_ptr<Layer> layer_;
  double factor_;
};

// Tells whether the technique with these options is its own baseline.
bool IsBaselineOfItself(const Technique& technique, const Problem& problem,
                        const Options& options) {
  const absl::StatusOr<TechniqueSpec> spec = technique.Counterpart(problem, options);
  if (!spec.ok() || spec->technique != technique.info().name) return false;
  const absl::StatusOr<Options> of_counterpart = technique.Canonical(spec->options);
  const absl::StatusOr<Options> canonical = technique.Canonical(options);
  return of_counterpart.ok() && canonical.ok() && *of_counterpart == *canonical;
}

// Behaves as `technique` but takes longer, unless it is a baseline.
class SlowedTechnique : public Technique {
 public:
  SlowedTechnique(const Technique* technique, double factor)
      : Technique(technique->info()), technique_(*technique), factor_(factor) {}
  absl::StatusOr<Options> Canonical(const Options& options) const override {
    return technique_.Canonical(options);
  }
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options& options) const override {
    return technique_.InputSpecs(problem, options);
  }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                      const Options& options) const override {
    return technique_.OutputSpecs(problem, options);
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem, const Options& options,
                                                Device device, uint64_t seed) const override {
    TFB_ASSIGN_OR_RETURN(std::unique_ptr<Layer> layer,
                         technique_.Create(problem, options, device, seed));
    const double factor = IsBaselineOfItself(technique_, problem, options) ? 1 : factor_;
    return std::make_unique<SlowedLayer>(std::move(layer), factor);
  }
  absl::Status Define(const Problem& problem, const Options& options,
                      const NamedTensors& parameters, const Inputs& inputs,
                      const DefinitionRequest& request, NamedTensors* outputs) const override {
    return technique_.Define(problem, options, parameters, inputs, request, outputs);
  }
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    return technique_.Counterpart(problem, options);
  }

 private:
  const Technique& technique_;
  double factor_;
};

// --- Sweeps

// Makes a registry of all techniques; those in `slowed` take longer by the factor.
std::unique_ptr<Registry> MakeRegistry(const std::set<std::string>& slowed, double factor) {
  auto registry = std::make_unique<Registry>();
  for (const Technique* technique : Registry::Global().All()) {
    const bool is_slowed = slowed.count(technique->info().name) > 0;
    registry->Add(std::make_unique<SlowedTechnique>(technique, is_slowed ? factor : 1));
  }
  return registry;
}

class SelfTest {
 public:
  static absl::StatusOr<SelfTest> FromFlags() {
    SelfTest test;
    test.flags_.techniques = absl::GetFlag(FLAGS_techniques);
    test.flags_.devices = "cpu";
    test.flags_.lengths = absl::GetFlag(FLAGS_lengths);
    test.flags_.inputs = "gaussian";
    test.flags_.threads = absl::StrCat(absl::GetFlag(FLAGS_threads));
    test.flags_.accuracy = false;
    test.sweep_.measure.repetitions = absl::GetFlag(FLAGS_repetitions);
    test.sweep_.measure.cold = false;
    TFB_ASSIGN_OR_RETURN(test.sweep_.measure.min_time,
                         ParseSeconds("min_time", absl::GetFlag(FLAGS_min_time)));
    TFB_ASSIGN_OR_RETURN(test.sweep_.time_budget,
                         ParseSeconds("time_budget", absl::GetFlag(FLAGS_time_budget)));
    test.sweep_.measure.memory_limit = AvailableMemoryBytes() / 10 * 8;
    test.sweep_.rounds = absl::GetFlag(FLAGS_rounds);
    test.sweep_.program = kProgram;
    test.sweep_.workspace = WorkspaceFolder();
    test.sweep_.quiet = true;
    test.compare_.threshold = absl::GetFlag(FLAGS_threshold);
    test.runs_ = absl::GetFlag(FLAGS_runs);
    if (test.runs_ < 1) return absl::InvalidArgumentError("--runs: 1 or more is wanted");
    if (!(absl::GetFlag(FLAGS_slow_down) > 1)) {
      return absl::InvalidArgumentError("--slow_down: a factor above 1 is wanted");
    }
    TFB_RETURN_IF_ERROR(test.MakeFolder());
    TFB_RETURN_IF_ERROR(test.FindTechniques());
    return test;
  }

  absl::StatusOr<int> Run() {
    TFB_ASSIGN_OR_RETURN(ResultSet before, Sweep({}));
    for (int run = 0; run < runs_; ++run) {
      TFB_ASSIGN_OR_RETURN(ResultSet same, Sweep({}));
      TFB_RETURN_IF_ERROR(Count(before, same, {}));
      const std::set<std::string> slowed = SlowedIn(run);
      TFB_ASSIGN_OR_RETURN(const ResultSet slower, Sweep(slowed));
      TFB_RETURN_IF_ERROR(Count(same, slower, slowed));
      before = std::move(same);
      std::fprintf(stderr,
                   "run %d of %d: %d of %d times called slower that are the same, %d of %d "
                   "slowed techniques found\n",
                   run + 1, runs_, false_alarms_, same_times_, found_, planted_);
    }
    if (absl::GetFlag(FLAGS_keep).empty()) std::filesystem::remove_all(folder_);
    Print();
    const bool holds = Share(false_alarms_, same_times_) <= kMostFalseAlarms &&
                       Share(found_, planted_) >= kLeastPower;
    return holds ? kExitDone : kExitCheckFailed;
  }

 private:
  absl::Status MakeFolder() {
    const std::string kept = absl::GetFlag(FLAGS_keep);
    if (kept.empty()) {
      std::string name = (std::filesystem::temp_directory_path() / "compare_self_test_XXXXXX");
      if (mkdtemp(name.data()) == nullptr) return absl::UnavailableError("no temporary folder");
      folder_ = name;
      return absl::OkStatus();
    }
    folder_ = CallerPath(kept);
    std::error_code error;
    std::filesystem::create_directories(folder_, error);
    if (error) return absl::UnavailableError(absl::StrCat("--keep: ", error.message()));
    return absl::OkStatus();
  }

  // Finds the techniques that have times of their own and are no other's counterpart: the slowed
  // technique must not be the baseline of others.
  absl::Status FindTechniques() {
    const std::unique_ptr<Registry> registry = MakeRegistry({}, 1);
    TFB_ASSIGN_OR_RETURN(const std::vector<SweepCase> cases, MakeCases(flags_, *registry, "."));
    std::set<std::string> names, counterparts;
    for (const SweepCase& one : cases) {
      if (!one.obstacle.ok()) continue;
      const auto spec = one.technique->Counterpart(one.problem, one.options);
      if (spec.ok() && spec->technique != one.technique->info().name) {
        counterparts.insert(spec->technique);
      }
      const bool is_baseline = IsBaselineOfItself(*one.technique, one.problem, one.options);
      if (!one.added && !is_baseline) names.insert(one.technique->info().name);
    }
    for (const std::string& name : names) {
      if (counterparts.count(name) == 0) techniques_.push_back(name);
    }
    if (!techniques_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "--techniques: none of them is held against another one, so that none can be slowed");
  }

  std::set<std::string> SlowedIn(int run) const {
    std::set<std::string> slowed;
    const size_t every = std::min<size_t>(kEvery, techniques_.size());
    for (size_t i = static_cast<size_t>(run) % every; i < techniques_.size(); i += every) {
      slowed.insert(techniques_[i]);
    }
    return slowed;
  }

  absl::StatusOr<ResultSet> Sweep(const std::set<std::string>& slowed) {
    const std::unique_ptr<Registry> registry = MakeRegistry(slowed, absl::GetFlag(FLAGS_slow_down));
    TFB_ASSIGN_OR_RETURN(const std::vector<SweepCase> cases, MakeCases(flags_, *registry, "."));
    SweepOptions options = sweep_;
    options.measure.registry = registry.get();
    options.output = absl::StrCat(folder_, "/", ++sweeps_, ".pb");
    const int exit_status = RunSweep(options, cases);
    if (exit_status != kExitDone) {
      return absl::InternalError(absl::StrCat("a sweep ended with exit status ", exit_status));
    }
    TFB_ASSIGN_OR_RETURN(ResultFile file, ReadResultFile(options.output));
    return std::move(file.results);
  }

  absl::Status Count(const ResultSet& base, const ResultSet& now,
                     const std::set<std::string>& slowed) {
    TFB_ASSIGN_OR_RETURN(const Comparison comparison, Compare(base, now, compare_));
    const std::map<std::string, const Case*> cases = CasesByKey(now);
    std::set<std::string> found;
    for (const Finding& finding : comparison.findings) {
      const auto result = cases.find(finding.key);
      if (!finding.is_time || result == cases.end()) continue;
      const std::string& technique = result->second->key().technique();
      if (slowed.count(technique) > 0) {
        if (finding.verdict == Verdict::kRegressed) found.insert(technique);
        continue;
      }
      ++same_times_;
      ++verdicts_[finding.verdict];
      false_alarms_ += finding.verdict == Verdict::kRegressed;
    }
    planted_ += static_cast<int>(slowed.size());
    found_ += static_cast<int>(found.size());
    for (const std::string& name : slowed) {
      if (found.count(name) == 0) ++missed_[name];
    }
    return absl::OkStatus();
  }

  static double Share(int part, int whole) {
    return whole == 0 ? 0 : static_cast<double>(part) / whole;
  }

  // Returns the share with the 95 % interval of Wilson (1927).
  static std::string ShareText(int part, int whole) {
    constexpr double kZ = 1.959964;
    const double n = std::max(whole, 1), p = part / n;
    const double centre = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
    const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
    return absl::StrFormat("%d of %d, %.2f%% (95%% interval %.2f%% to %.2f%%)", part, whole,
                           100 * p, 100 * std::max(0.0, centre - half), 100 * (centre + half));
  }

  void Print() const {
    std::printf("%d sweeps, %zu techniques at %s tokens, %d samples each; threshold %g\n", sweeps_,
                techniques_.size(), flags_.lengths.c_str(), sweep_.measure.repetitions,
                compare_.threshold);
    std::printf("false alarms  %s of times that are the same are called SLOWER\n",
                ShareText(false_alarms_, same_times_).c_str());
    const auto count = [this](Verdict verdict) {
      const auto found = verdicts_.find(verdict);
      return found == verdicts_.end() ? 0 : found->second;
    };
    std::printf("              and %d FASTER, %d AMBIGUOUS, %d SAME, %d not judged\n",
                count(Verdict::kImproved), count(Verdict::kAmbiguous), count(Verdict::kSame),
                count(Verdict::kNotJudged));
    std::printf("power         %s of techniques slowed by %.0f%% are found\n",
                ShareText(found_, planted_).c_str(), 100 * (absl::GetFlag(FLAGS_slow_down) - 1));
    for (const auto& [name, times] : missed_) {
      std::printf("              missed %s %d times\n", name.c_str(), times);
    }
  }

  CaseFlags flags_;
  SweepOptions sweep_;
  CompareOptions compare_;
  int runs_ = 0;
  std::string folder_;
  std::vector<std::string> techniques_;
  int sweeps_ = 0;
  int same_times_ = 0, false_alarms_ = 0, planted_ = 0, found_ = 0;
  std::map<Verdict, int> verdicts_;    // verdicts on unchanged times
  std::map<std::string, int> missed_;  // missed slowdowns by technique
};

absl::StatusOr<int> Test() {
  TFB_ASSIGN_OR_RETURN(SelfTest test, SelfTest::FromFlags());
  return test.Run();
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  return tfb::RunMain(tfb::kProgram, tfb::kUsage, {argv, argv + argc}, tfb::Test);
}
