#include "harness/measure/compare_self_test.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/command_line.h"
#include "core/status.h"
#include "harness/measure/clock.h"
#include "results/reader.h"

namespace tfb {
namespace {

constexpr size_t kEvery = 4;  // one of this many techniques is slowed at a time
constexpr double kMostFalseAlarms = 0.01, kLeastPower = 0.95;

// --- A technique whose runs last longer

class SlowedLayer : public Layer {
 public:
  SlowedLayer(std::unique_ptr<Layer> layer, double factor, Clock* clock)
      : Layer(layer->problem(), layer->inputs(), layer->outputs()),
        layer_(std::move(layer)),
        factor_(factor),
        clock_(clock) {
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
    const double begin = clock_->Seconds();
    const absl::Status status = layer_->Run(inputs, outputs, execution);
    if (factor_ > 1) clock_->WaitUntil(begin + factor_ * (clock_->Seconds() - begin));
    return status;
  }

 private:
  std::unique_ptr<Layer> layer_;
  double factor_;
  Clock* clock_;
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
  SlowedTechnique(const Technique* technique, double factor, Clock* clock)
      : Technique(technique->info()), technique_(*technique), factor_(factor), clock_(clock) {}
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
    return std::make_unique<SlowedLayer>(std::move(layer), factor, clock_);
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
  Clock* clock_;
};

// --- Sweeps

class SelfTest {
 public:
  SelfTest(const SelfTestOptions& options, const Registry& registry)
      : options_(options), registry_(registry) {}

  absl::StatusOr<SelfTestCounts> Run() {
    TFB_RETURN_IF_ERROR(FindTechniques());
    counts_.techniques = static_cast<int>(techniques_.size());
    TFB_ASSIGN_OR_RETURN(ResultSet before, Sweep({}));
    for (int run = 0; run < options_.runs; ++run) {
      TFB_ASSIGN_OR_RETURN(ResultSet same, Sweep({}));
      TFB_RETURN_IF_ERROR(CountVerdicts(before, same, {}, options_.compare, &counts_));
      const std::set<std::string> slowed = SlowedIn(run);
      TFB_ASSIGN_OR_RETURN(const ResultSet slower, Sweep(slowed));
      TFB_RETURN_IF_ERROR(CountVerdicts(same, slower, slowed, options_.compare, &counts_));
      before = std::move(same);
      std::fprintf(stderr,
                   "run %d of %d: %d of %d times called slower that are the same, %d of %d "
                   "slowed techniques found\n",
                   run + 1, options_.runs, counts_.false_alarms, counts_.same_times, counts_.found,
                   counts_.slowed);
    }
    return counts_;
  }

 private:
  // Makes a registry of all techniques, in which those in `slowed` take longer by the factor.
  std::unique_ptr<Registry> MakeRegistry(const std::set<std::string>& slowed) const {
    auto registry = std::make_unique<Registry>();
    for (const Technique* technique : registry_.All()) {
      const double factor = slowed.count(technique->info().name) > 0 ? options_.slow_down : 1;
      registry->Add(
          std::make_unique<SlowedTechnique>(technique, factor, options_.sweep.measure.clock));
    }
    return registry;
  }

  // Finds the techniques that have a counterpart and are not one themselves, since slowing a
  // counterpart would change other techniques' relative times.
  absl::Status FindTechniques() {
    const std::unique_ptr<Registry> registry = MakeRegistry({});
    TFB_ASSIGN_OR_RETURN(const std::vector<Job> cases, MakeCases(options_.cases, *registry, "."));
    std::set<std::string> names, counterparts;
    for (const Job& one : cases) {
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
    const size_t every = std::min(kEvery, techniques_.size());
    for (size_t i = static_cast<size_t>(run) % every; i < techniques_.size(); i += every) {
      slowed.insert(techniques_[i]);
    }
    return slowed;
  }

  absl::StatusOr<ResultSet> Sweep(const std::set<std::string>& slowed) {
    const std::unique_ptr<Registry> registry = MakeRegistry(slowed);
    TFB_ASSIGN_OR_RETURN(const std::vector<Job> cases, MakeCases(options_.cases, *registry, "."));
    SweepOptions options = options_.sweep;
    options.measure.registry = registry.get();
    options.output = absl::StrCat(options_.folder, "/", ++counts_.sweeps, ".pb");
    const int exit_status = RunSweep(options, cases);
    if (exit_status != kExitDone) {
      return absl::InternalError(absl::StrCat("a sweep ended with exit status ", exit_status));
    }
    TFB_ASSIGN_OR_RETURN(ResultFile file, ReadResultFile(options.output));
    return std::move(file.results);
  }

  const SelfTestOptions& options_;
  const Registry& registry_;
  std::vector<std::string> techniques_;
  SelfTestCounts counts_;
};

}  // namespace

bool Holds(const SelfTestCounts& counts) {
  return counts.false_alarms <= kMostFalseAlarms * counts.same_times &&
         counts.found >= kLeastPower * counts.slowed && counts.slowed > 0;
}

absl::Status CountVerdicts(const ResultSet& base, const ResultSet& now,
                           const std::set<std::string>& slowed, const CompareOptions& options,
                           SelfTestCounts* counts) {
  TFB_ASSIGN_OR_RETURN(const Comparison comparison, Compare(base, now, options));
  const std::map<std::string, const Case*> cases = CasesByKey(now);
  const int false_alarms_before = counts->false_alarms;
  std::set<std::string> found;
  for (const Finding& finding : comparison.findings) {
    const auto result = cases.find(finding.key);
    if (!finding.is_time || result == cases.end()) continue;
    const std::string& technique = result->second->key().technique();
    if (slowed.count(technique) > 0) {
      if (finding.verdict == Verdict::kRegressed) found.insert(technique);
      continue;
    }
    ++counts->same_times;
    ++counts->verdicts[finding.verdict];
    counts->false_alarms += finding.verdict == Verdict::kRegressed;
  }
  ++counts->comparisons;
  counts->with_false_alarm += counts->false_alarms > false_alarms_before;
  counts->with_slowed += !slowed.empty();
  counts->with_all_found += !slowed.empty() && found.size() == slowed.size();
  counts->slowed += static_cast<int>(slowed.size());
  counts->found += static_cast<int>(found.size());
  for (const std::string& name : slowed) {
    if (found.count(name) == 0) ++counts->missed[name];
  }
  return absl::OkStatus();
}

namespace {

std::string ShareText(int part, int whole) {
  return absl::StrFormat("%d of %d, %.2f%%", part, whole, 100.0 * part / std::max(whole, 1));
}

std::string ShareOfComparisons(int part, int whole) {
  constexpr double kZ = 1.959964;
  const double n = std::max(whole, 1), p = part / n;
  const double centre = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  return absl::StrFormat("%d of %d comparisons, %.2f%% (95%% interval %.2f%% to %.2f%%)", part,
                         whole, 100 * p, 100 * std::max(0.0, centre - half), 100 * (centre + half));
}

}  // namespace

std::string SelfTestReport(const SelfTestOptions& options, const SelfTestCounts& counts) {
  const auto count = [&counts](Verdict verdict) {
    const auto found = counts.verdicts.find(verdict);
    return found == counts.verdicts.end() ? 0 : found->second;
  };
  std::string report = absl::StrFormat(
      "%d sweeps, %d techniques at %s tokens, %d samples each; threshold %g\n"
      "false alarms  %s of times that are the same are called SLOWER\n"
      "              in %s\n"
      "              and %d FASTER, %d AMBIGUOUS, %d SAME, %d not judged\n"
      "power         %s of techniques slowed by %.0f%% are found\n"
      "              all of them in %s\n",
      counts.sweeps, counts.techniques, options.cases.lengths, options.sweep.measure.repetitions,
      options.compare.threshold, ShareText(counts.false_alarms, counts.same_times),
      ShareOfComparisons(counts.with_false_alarm, counts.comparisons), count(Verdict::kImproved),
      count(Verdict::kAmbiguous), count(Verdict::kSame), count(Verdict::kNotJudged),
      ShareText(counts.found, counts.slowed), 100 * (options.slow_down - 1),
      ShareOfComparisons(counts.with_all_found, counts.with_slowed));
  for (const auto& [name, times] : counts.missed) {
    absl::StrAppend(&report, "              missed ", name, " ", times, " times\n");
  }
  return report;
}

absl::StatusOr<SelfTestCounts> RunSelfTest(const SelfTestOptions& options,
                                           const Registry& registry) {
  return SelfTest(options, registry).Run();
}

}  // namespace tfb
