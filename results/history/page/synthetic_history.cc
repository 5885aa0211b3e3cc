#include "results/history/page/synthetic_history.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tfb {
namespace synthetic {
namespace {

constexpr int64_t kFirstRun = 1735689600;  // 2025-01-01
constexpr int64_t kDay = 86400;

uint64_t Next(uint64_t* state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Returns about a standard normal number: the sum of twelve uniform ones less six.
double NextNormal(uint64_t* state) {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += NextUniform(state);
  return sum;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// A step of a series from the run `at` on, by this factor; none where it is 1.
struct Step {
  int at = 0;
  double factor = 1;
};

// What the values of a time do.
struct Course {
  double level = 1, noise = 0.02, drift = 0;  // per run
  std::vector<Step> steps;
  int first_run = 0;  // before which there are none
  int gap_begin = 0, gap_end = 0;
};

std::vector<double> Values(const Course& course, int runs, uint64_t* state) {
  std::vector<double> values;
  for (int run = 0; run < runs; ++run) {
    double value = course.level * std::exp(course.noise * NextNormal(state) + course.drift * run);
    if (NextUniform(state) < 0.01) value *= 1.2 + NextUniform(state);
    for (const Step& step : course.steps) value *= run >= step.at ? step.factor : 1;
    const bool missing =
        run < course.first_run || (run >= course.gap_begin && run < course.gap_end);
    values.push_back(missing ? std::nan("") : value);
  }
  return values;
}

// Returns the place of the first value of a run from `run` on.
int PlaceOf(const HistorySeries& series, int run) {
  return static_cast<int>(std::lower_bound(series.runs.begin(), series.runs.end(), run) -
                          series.runs.begin());
}

// Adds the changes of the last series at the runs of `steps`.
void AddSteps(const std::vector<Step>& steps, HistoryWithChanges* out) {
  const HistorySeries& series = out->history.series.back();
  std::vector<int> bounds = {0};
  for (const Step& step : steps) bounds.push_back(PlaceOf(series, step.at));
  bounds.push_back(static_cast<int>(series.values.size()));
  for (size_t i = 0; i + 2 < bounds.size(); ++i) {
    if (bounds[i] == bounds[i + 1] || bounds[i + 1] == bounds[i + 2]) continue;
    AddChange(bounds[i], bounds[i + 1], bounds[i + 2], out);
  }
}

// Names a case and says what its series do, by its number.
class LargeCase {
 public:
  LargeCase(int machine, int number, int runs, HistoryWithChanges* out)
      : machine_(machine),
        number_(number),
        runs_(runs),
        out_(out),
        state_(static_cast<uint64_t>(machine) * 1000003 + static_cast<uint64_t>(number)) {}

  void Add() {
    Course course;
    course.level = 0.1 + 3 * NextUniform(&state_);
    if (number_ % 4 == 3) {
      const int at = runs_ / 10 + static_cast<int>(0.85 * runs_ * NextUniform(&state_));
      course.steps.push_back({at, number_ % 8 == 3 ? 1.12 + 0.5 * NextUniform(&state_) : 0.8});
      if (number_ % 20 == 11) course.steps.push_back({at + runs_ / 20, 1 / 1.4});
    }
    if (number_ % 40 == 9) course.drift = 0.3 / runs_;
    if (number_ % 25 == 4) {
      course.first_run = runs_ / 5;
      course.gap_begin = runs_ / 2;
      course.gap_end = runs_ / 2 + runs_ / 20;
    }
    AddTimes(course);
    AddConstants(course);
  }

 private:
  std::string Name() const {
    return absl::StrCat("technique_", number_ / 10, number_ % 2 == 0 ? "" : " window=256");
  }

  void AddTimes(Course course) {
    const struct {
      HistoryMetric metric;
      double noise, scale;
    } kTimes[] = {{HISTORY_METRIC_TIME_OVER_DENSE, 0.02, 1},
                  {HISTORY_METRIC_TIME, 0.05, 4e6},
                  {HISTORY_METRIC_SETUP, 0.03, 0.3}};
    for (const auto& time : kTimes) {
      Course own = course;
      own.noise = time.noise;
      own.level *= time.scale;
      if (time.metric == HISTORY_METRIC_SETUP) own.steps.clear();
      Describe(
          AddSeries(machine_, time.metric, Name(), Values(own, runs_, &state_), &out_->history));
      const size_t first = out_->changes.size();
      AddSteps(own.steps, out_);
      for (size_t i = first; i < out_->changes.size(); ++i) Judge(i + 1, &out_->changes[i]);
    }
  }

  // Only few regressions are left unacknowledged, as in a store that is looked after.
  void Judge(size_t next, Change* change) const {
    if (!change->worse) return;
    if (number_ % 20 == 11 && next < out_->changes.size()) {
      change->recovered = true;
      change->recovered_at = change->end;
      change->is_regression = false;
    } else if (number_ % 80 != 3) {
      change->acknowledged = "the mask is exact now, which costs this";
    } else {
      change->build_differences = {"compiler: GCC 12.2 / GCC 13.1"};
    }
  }

  void AddConstants(const Course& course) {
    std::vector<double> present = Values(course, runs_, &state_);
    const auto constant = [&](double level, const Step& step) {
      std::vector<double> values = present;
      for (int run = 0; run < runs_; ++run) {
        if (!std::isnan(values[run])) values[run] = run >= step.at ? level * step.factor : level;
      }
      return values;
    };
    const Step memory = {runs_ / 2, number_ % 50 == 11 ? 1.5 : 1};
    Describe(AddSeries(machine_, HISTORY_METRIC_MEMORY, Name(),
                       constant(65536.0 * (1 + number_), memory), &out_->history));
    if (memory.factor != 1) AddSteps({memory}, out_);
    Describe(AddSeries(machine_, HISTORY_METRIC_ERROR, Name(),
                       constant(1e-7 * (1 + number_ % 7), Step()), &out_->history));
    out_->history.series.back().bound = 2e-6;
    std::vector<double> status = constant(0, Step());
    for (int run = 7 * runs_ / 10; number_ % 60 == 13 && run < runs_; ++run) status[run] = 4;
    Describe(AddSeries(machine_, HISTORY_METRIC_STATUS, Name(), status, &out_->history));
    if (number_ % 60 != 13) return;
    out_->history.series.back().reason = "the run took longer than 60 s";
    AddSteps({{7 * runs_ / 10, 1}}, out_);
  }

  void Describe(HistorySeries* series) const {
    static const char* const kFamilies[] = {"attention", "positional", "memory", "adaptive"};
    series->family = kFamilies[number_ / 10 % 4];
    series->technique = absl::StrCat("technique_", number_ / 10);
    series->tokens = 256 << (number_ % 5);
    series->problem = absl::StrCat("8 heads x ", series->tokens, " x 64, ",
                                   number_ % 3 == 0 ? "full" : "causal", ", f32, normal");
    series->key = absl::StrCat("technique=", series->technique, " number=", number_);
  }

  const int machine_, number_, runs_;
  HistoryWithChanges* out_;
  uint64_t state_;
};

}  // namespace

double NextUniform(uint64_t* state) { return static_cast<double>(Next(state) >> 11) * 0x1p-53; }

Machine MakeMachine(const std::string& signature, int count) {
  static const char* const kSubjects[] = {
      "Tiles of 64 rows where the second-level cache has room",
      "Softmax in one pass",
      "Fix the mask of the last block",
      "The tests name the shapes they fail with",
      "Fewer instantiations of the matrix product",
      "Read the environment once",
  };
  Machine machine;
  machine.signature = signature;
  uint64_t state = static_cast<uint64_t>(count);
  for (int i = 0; i < count; ++i) {
    RunInfo run;
    run.name = absl::StrFormat("run-%04d", i + 1);
    run.file = run.name + ".pb";
    run.start_unix_s = kFirstRun + i * kDay + 3600;
    while (run.commit.size() < 40)
      absl::StrAppend(&run.commit, absl::Hex(Next(&state) >> 32, absl::kZeroPad8));
    run.dirty = i % 50 == 49;
    run.commit_unix_s = kFirstRun + i * kDay;
    run.commit_subject = kSubjects[Next(&state) % 6];
    run.build = {i < count / 2 ? "compiler: GCC 12.2" : "compiler: GCC 13.1", "mode: opt"};
    machine.runs.push_back(std::move(run));
  }
  return machine;
}

HistorySeries* AddSeries(int machine, HistoryMetric metric, const std::string& name,
                         const std::vector<double>& values, History* history) {
  HistorySeries series;
  series.machine = machine;
  series.metric = metric;
  series.key = "technique=" + name;
  series.name = name;
  series.problem = "8 heads x 1024 x 64, causal, f32, normal";
  series.technique = name;
  series.family = "attention";
  series.tokens = 1024;
  series.device = DEVICE_TYPE_CPU;
  for (size_t run = 0; run < values.size(); ++run) {
    if (std::isnan(values[run])) continue;
    series.runs.push_back(static_cast<int>(run));
    series.values.push_back(values[run]);
  }
  history->series.push_back(std::move(series));
  return &history->series.back();
}

Change* AddChange(int begin, int at, int end, HistoryWithChanges* out) {
  const std::vector<double>& values = out->history.series.back().values;
  Change change;
  change.series = static_cast<int>(out->history.series.size()) - 1;
  change.begin = begin;
  change.at = at;
  change.end = end;
  change.before = Median({values.begin() + begin, values.begin() + at});
  change.after = Median({values.begin() + at, values.begin() + end});
  change.worse = change.after > change.before;
  change.is_regression = change.worse;
  if (change.before > 0 && change.after > 0) {
    change.ratio = change.after / change.before;
    change.low = 0.99 * change.ratio;
    change.high = 1.01 * change.ratio;
  }
  out->changes.push_back(change);
  return &out->changes.back();
}

HistoryWithChanges MakeSmallHistory() {
  constexpr int kRuns = 24;
  HistoryWithChanges out;
  out.history.machines.push_back(MakeMachine("Imaginary CPU (25/17/1), 2 cores, AVX2", kRuns));
  uint64_t state = 1;
  const auto time = [&](const std::string& name, std::vector<Step> steps) {
    Course course;
    course.level = 0.5;
    course.steps = std::move(steps);
    return AddSeries(0, HISTORY_METRIC_TIME_OVER_DENSE, name, Values(course, kRuns, &state),
                     &out.history);
  };
  time("quiet", {});
  AddSeries(0, HISTORY_METRIC_MEMORY, "quiet", std::vector<double>(kRuns, 4 << 20), &out.history);
  time("slower", {{16, 1.3}});
  AddChange(0, 16, kRuns, &out)->build_differences = {"compiler: GCC 12.2 / GCC 13.1"};
  AddSeries(0, HISTORY_METRIC_STATUS, "slower", std::vector<double>(kRuns, 0), &out.history);
  time("faster", {{8, 0.4}});
  AddChange(0, 8, kRuns, &out);
  time("known", {{10, 1.2}});
  AddChange(0, 10, kRuns, &out)->acknowledged = "the mask is exact now";
  time("back", {{6, 1.5}, {12, 1 / 1.5}});
  Change* recovered = AddChange(0, 6, 12, &out);
  recovered->recovered = true;
  recovered->recovered_at = 12;
  recovered->is_regression = false;
  AddChange(6, 12, kRuns, &out);
  time("blamed", {{9, 1.25}});
  Change* explained = AddChange(0, 9, kRuns, &out);
  explained->is_regression = false;
  explained->reason = "dense changed";
  std::vector<double> errors(kRuns, 0);
  std::fill(errors.begin() + 20, errors.end(), 1.5e-7);
  AddSeries(0, HISTORY_METRIC_ERROR, "inexact", errors, &out.history)->bound = 2e-6;
  AddChange(0, 20, kRuns, &out);
  std::vector<double> status(kRuns, 0);
  std::fill(status.begin() + 18, status.end(), 4);
  status[3] = std::nan("");
  AddSeries(0, HISTORY_METRIC_STATUS, "stuck", status, &out.history)->reason = "took over 60 s";
  AddChange(0, 17, kRuns - 1, &out);
  return out;
}

HistoryWithChanges MakeLargeHistory(int machines, int runs, int cases) {
  HistoryWithChanges out;
  for (int machine = 0; machine < machines; ++machine) {
    out.history.machines.push_back(MakeMachine(
        absl::StrCat("Imaginary CPU ", machine + 1, " (25/17/1), 2 cores, AVX2"), runs));
    for (int number = 0; number < cases; ++number) LargeCase(machine, number, runs, &out).Add();
  }
  return out;
}

}  // namespace synthetic
}  // namespace tfb
