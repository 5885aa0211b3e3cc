#include "results/history/summary.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "results/analysis.h"
#include "results/describe.h"
#include "results/history/series.h"
#include "results/history/store.h"
#include "results/reader.h"
#include "results/statistics.h"
#include "results/table.h"

namespace tfb {
namespace {

constexpr double kUndisturbedShare = 0.1;

// Returns the time that a tenth of the samples stay below, interpolated between samples, or nothing
// where there is none or one is no positive time. Load of the machine only adds to a time, so that
// this differs less from run to run than the median does.
//
// Sample k of n stands for the share (k - 1/3) / (n + 1/3), its median of all distributions to a good
// approximation (Hyndman & Fan, Sample Quantiles in Statistical Packages, 1996, definition 8). So the
// time does not depend on how many samples the budget of a sweep had time for: with 2.5 % of normal
// noise it is within 0.15 % of the true one from six samples on. With fewer the share of the smallest
// is above a tenth, and the time is 0.7 % above the true one for four. Definition 7, by (k - 1) /
// (n - 1), which histories of older programs have, is 1.2 % above for four, 0.6 % for 11 and 0.2 %
// for 30.
std::optional<double> UndisturbedTime(std::vector<double> samples) {
  const bool are_times = std::all_of(samples.begin(), samples.end(),
                                     [](double ns) { return std::isfinite(ns) && ns > 0; });
  if (samples.empty() || !are_times) return std::nullopt;
  std::sort(samples.begin(), samples.end());
  const double last = static_cast<double>(samples.size() - 1);
  const double wanted = kUndisturbedShare * (last + 4.0 / 3) - 2.0 / 3;  // k - 1
  const double place = std::min(std::max(wanted, 0.0), last);
  const auto below = static_cast<size_t>(place);
  if (below + 1 == samples.size()) return samples[below];
  return samples[below] +
         (place - static_cast<double>(below)) * (samples[below + 1] - samples[below]);
}

template <class Range>
std::optional<double> UndisturbedTimeOf(const Range& samples) {
  return UndisturbedTime(std::vector<double>(samples.begin(), samples.end()));
}

// Returns the time of a warm run, of cases that have one (results/statistics.h).
std::optional<double> UndisturbedRunTime(const Case& result) {
  if (!RunTime(result).has_value()) return std::nullopt;
  return UndisturbedTimeOf(result.outcome().timing().run_ns());
}

// Returns the run time over that of dense: the median quotient of samples that were taken at about the
// same time where the record tells, which load of the machine hardly changes.
std::optional<double> TimeOverDense(const Case& result, const Case& dense) {
  const SideBySide samples = SamplesSideBySide({{&result, &dense}});
  if (samples.are_pairs) {
    const std::optional<SpeedUpInterval> speed_up = SpeedUpOf(samples);
    if (!speed_up.has_value()) return std::nullopt;
    return 1 / speed_up->ratio;
  }
  const std::optional<double> run = UndisturbedTime(samples.technique_ns);
  const std::optional<double> of_dense = UndisturbedTime(samples.dense_ns);
  if (!run.has_value() || !of_dense.has_value()) return std::nullopt;
  return *run / *of_dense;
}

// Returns the run time over that of the fixed arithmetic beside it on a CPU, and over the time at
// the measured peak on a GPU, so that the values of one series have one divisor.
std::optional<double> TimeOverMachine(const Case& result, const Environment& environment) {
  if (result.key().device() == DEVICE_TYPE_CUDA) {
    const std::optional<double> share = ShareOfComputePeak(result, environment);
    if (!share.has_value() || !(*share > 0)) return std::nullopt;
    return 1 / *share;
  }
  const std::optional<double> run = UndisturbedRunTime(result);
  const std::optional<double> probe = UndisturbedTimeOf(result.outcome().timing().probe_ns());
  if (!run.has_value() || !probe.has_value()) return std::nullopt;
  return *run / *probe;
}

// Returns what the cases of a technique at all lengths have in common.
std::string KeyWithoutTokens(Case::Key key) {
  key.mutable_problem()->clear_query_tokens();
  key.mutable_problem()->clear_kv_tokens();
  return CaseKey(key);
}

std::string Problem(const Case::Key& key, bool with_tokens) {
  return absl::StrCat(
      Name(key.device()), " ", Name(key.dtype()), ", ",
      key.threads() > 0
          ? absl::StrCat(key.threads(), key.threads() == 1 ? " thread, " : " threads, ")
          : "",
      DescribeProblem(key, with_tokens), ", ", DescribeInput(key.input()),
      key.purpose() == Case::PURPOSE_ACCURACY ? ", accuracy" : "");
}

class Summary {
 public:
  explicit Summary(const Analysis& analysis) : analysis_(analysis) {}

  HistoryCase Of(const Case& result, const std::map<std::string, int>& places) {
    HistoryCase summary;
    summary_ = &summary;
    const Case::Key& key = result.key();
    summary.set_environment(places.at(result.environment_id()));
    summary.set_key(CaseKey(result));
    summary.set_group(KeyWithoutTokens(key));
    summary.set_group_problem(Problem(key, /*with_tokens=*/false));
    summary.set_name(DisplayName(result));
    summary.set_problem(Problem(key, /*with_tokens=*/true));
    summary.set_technique(key.technique());
    summary.set_family(result.technique().family());
    summary.set_tokens(LengthOf(key.problem()));
    summary.set_device(key.device());
    summary.set_status(result.outcome().status());
    summary.set_reason(Printable(result.outcome().reason()));
    AddTimes(result);
    Add(HISTORY_METRIC_MEMORY, WorkingMemoryBytes(result.outcome()));
    AddErrors(result.outcome());
    return summary;
  }

 private:
  HistoryValue* Add(HistoryMetric metric, std::optional<double> value) {
    if (!value.has_value()) return nullptr;
    HistoryValue* added = summary_->add_values();
    added->set_metric(metric);
    added->set_value(*value);
    return added;
  }

  void AddTimes(const Case& result) {
    const std::optional<double> run = UndisturbedRunTime(result);
    if (!run.has_value()) return;
    const Case* dense = IsBaseline(result) ? nullptr : analysis_.DenseOf(result);
    const std::optional<double> of_dense =
        dense == nullptr ? std::nullopt : UndisturbedRunTime(*dense);
    if (dense != nullptr) Add(HISTORY_METRIC_TIME_OVER_DENSE, TimeOverDense(result, *dense));
    Add(HISTORY_METRIC_TIME_OVER_MACHINE, TimeOverMachine(result, analysis_.EnvironmentOf(result)));
    Add(HISTORY_METRIC_TIME, *run);
    const std::optional<double> setup = UndisturbedTimeOf(result.outcome().timing().setup_ns());
    if (setup.has_value()) Add(HISTORY_METRIC_SETUP, *setup / of_dense.value_or(*run));
  }

  void AddErrors(const Outcome& outcome) {
    const ErrorMeasure& definition = outcome.against_definition();
    HistoryValue* error = Add(HISTORY_METRIC_ERROR, BoundedValue(definition));
    if (error != nullptr && definition.has_bound()) error->set_bound(definition.bound());
    if (const NamedError* gradient = WorstGradientError(outcome); gradient != nullptr) {
      Add(HISTORY_METRIC_ERROR, gradient->error().value())->set_bound(gradient->error().bound());
    }
    const ErrorMeasure& dense = outcome.against_dense();
    if (dense.has_relative_frobenius()) {
      Add(HISTORY_METRIC_ERROR_AGAINST_DENSE, dense.relative_frobenius());
    } else {
      Add(HISTORY_METRIC_ERROR_AGAINST_DENSE, BoundedValue(dense));
    }
  }

  const Analysis& analysis_;
  HistoryCase* summary_ = nullptr;
};

}  // namespace

absl::StatusOr<HistoryRun> SummarizeRun(const ResultSet& results, const std::string& path) {
  const Analysis analysis(results);
  HistoryRun run;
  run.set_format(std::string(kHistoryRunFormat));
  run.set_file(std::filesystem::path(path).filename().string());
  std::map<std::string, int> places;
  for (const Environment& environment : results.environments()) {
    if (places.emplace(environment.id(), run.environments_size()).second) {
      *run.add_environments() = environment;
    }
  }
  Summary summary(analysis);
  for (const Case* result : analysis.cases()) {
    if (result->outcome().unfinished()) continue;
    if (MachineSignature(analysis.EnvironmentOf(*result)).empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": the environment \"", Printable(result->environment_id()),
                       "\" names no processor, by which machines are told apart"));
    }
    *run.add_cases() = summary.Of(*result, places);
  }
  if (run.cases().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": no finished case"));
  }
  return run;
}

}  // namespace tfb
