#include "results/history/series.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/reader.h"
#include "results/table.h"

namespace tfb {
namespace {

struct MetricNames {
  HistoryMetric metric;
  absl::string_view name;
  absl::string_view title;
};

constexpr MetricNames kMetrics[] = {
    {HISTORY_METRIC_TIME_OVER_DENSE, "time", "time over dense"},
    {HISTORY_METRIC_TIME_OVER_MACHINE, "machine_time", "time over fixed arithmetic"},
    {HISTORY_METRIC_TIME, "absolute_time", "time"},
    {HISTORY_METRIC_SETUP, "setup", "setup time"},
    {HISTORY_METRIC_MEMORY, "memory", "working memory"},
    {HISTORY_METRIC_ERROR, "error", "error against its definition"},
    {HISTORY_METRIC_ERROR_AGAINST_DENSE, "error_against_dense", "error against dense"},
    {HISTORY_METRIC_STATUS, "status", "status"},
};

const MetricNames* Find(HistoryMetric metric) {
  for (const MetricNames& names : kMetrics) {
    if (names.metric == metric) return &names;
  }
  return nullptr;
}

std::string OrUnknown(const std::string& text) {
  return text.empty() ? "unknown" : Printable(text);
}

std::vector<std::string> BuildOf(const Environment& environment) {
  std::vector<std::string> drivers;
  for (const Gpu& gpu : environment.gpus()) drivers.push_back(gpu.driver());
  return {absl::StrCat("compiler: ", OrUnknown(environment.compiler())),
          absl::StrCat("compiler flags: ", OrUnknown(environment.compile_flags())),
          absl::StrCat("compilation mode: ", OrUnknown(environment.compilation_mode())),
          absl::StrCat("CUDA compiler: ", OrUnknown(environment.cuda_compiler())),
          absl::StrCat("operating system: ", OrUnknown(environment.os())),
          absl::StrCat("driver: ", OrUnknown(absl::StrJoin(drivers, ", ")))};
}

RunInfo InfoOf(const HistoryRun& run, const std::string& name, const Environment& environment) {
  RunInfo info;
  info.name = name;
  info.file = Printable(run.file());
  info.start_unix_s = environment.start_unix_ns() / 1'000'000'000;
  info.commit = Printable(environment.git_commit());
  info.dirty = environment.git_dirty();
  if (run.has_commit_unix_s()) info.commit_unix_s = run.commit_unix_s();
  info.commit_subject = Printable(run.commit_subject());
  info.build = BuildOf(environment);
  return info;
}

// The cases of one run on one machine.
struct Part {
  RunInfo info;
  std::vector<const HistoryCase*> cases;
};

void SortByCommitOrTime(std::vector<Part>* parts) {
  const bool by_commit = std::all_of(parts->begin(), parts->end(), [](const Part& part) {
    return part.info.commit_unix_s.has_value();
  });
  const auto place = [by_commit](const Part& part) {
    return std::make_tuple(by_commit ? *part.info.commit_unix_s : 0, part.info.start_unix_s,
                           part.info.name);
  };
  std::sort(parts->begin(), parts->end(),
            [&](const Part& a, const Part& b) { return place(a) < place(b); });
}

// Makes the series of one machine.
class SeriesMaker {
 public:
  // Adds a case of a run, whose index is at least that of the last call.
  void Add(int run, const HistoryCase& result) {
    CaseSeries& known = cases_[result.key()];
    known.latest = &result;
    known.latest_run = run;
    known.place = added_++;
    if (!result.reason().empty()) known.reason = &result.reason();
    for (const HistoryValue& value : result.values()) {
      if (value.has_bound()) known.bounds[value.metric()] = value.bound();
      Append(run, value.value(), &known.series[value.metric()]);
    }
    Append(run, result.status() - Outcome::STATUS_OK, &known.series[HISTORY_METRIC_STATUS]);
  }

  // Adds the series of all lengths of a technique, where there are two or more.
  void AddGroups() {
    std::map<std::string, std::vector<const CaseSeries*>> groups;
    for (const auto& [key, known] : cases_) {
      if (!known.latest->group().empty()) groups[known.latest->group()].push_back(&known);
    }
    for (auto& [key, members] : groups) {
      for (const HistoryMetric metric :
           {HISTORY_METRIC_TIME_OVER_DENSE, HISTORY_METRIC_TIME_OVER_MACHINE}) {
        AddGroup(key, metric, members);
      }
    }
  }

  // Appends the series to `all`: those of the latest run's cases first, in its order.
  void MoveTo(int machine, std::vector<HistorySeries>* all) {
    AddGroups();
    for (HistorySeries& group : groups_) {
      group.machine = machine;
      all->push_back(std::move(group));
    }
    std::vector<CaseSeries*> ordered;
    for (auto& [key, known] : cases_) ordered.push_back(&known);
    std::sort(ordered.begin(), ordered.end(), [](const CaseSeries* a, const CaseSeries* b) {
      return a->latest_run != b->latest_run ? a->latest_run > b->latest_run : a->place < b->place;
    });
    for (CaseSeries* known : ordered) {
      for (auto& [metric, points] : known->series) {
        Describe(*known, metric, &points);
        points.machine = machine;
        all->push_back(std::move(points));
      }
    }
  }

 private:
  struct CaseSeries {
    const HistoryCase* latest = nullptr;  // says how the case is called
    int latest_run = 0;
    int64_t place = 0;  // of `latest` among all cases
    const std::string* reason = nullptr;
    std::map<HistoryMetric, double> bounds;
    std::map<HistoryMetric, HistorySeries> series;
  };

  // Adds the geometric mean over the cases of a group, of the runs that have all the cases that the
  // latest one has.
  void AddGroup(const std::string& key, HistoryMetric metric,
                const std::vector<const CaseSeries*>& members) {
    int latest_run = -1;
    for (const CaseSeries* member : members) latest_run = std::max(latest_run, member->latest_run);
    std::map<int, std::pair<double, size_t>> sums;  // by run, of logarithms
    const CaseSeries* first = nullptr;
    size_t cases = 0;
    int64_t shortest = 0, longest = 0;
    for (const CaseSeries* member : members) {
      const auto series = member->series.find(metric);
      if (member->latest_run != latest_run || series == member->series.end()) continue;
      const int64_t tokens = member->latest->tokens();
      shortest = cases == 0 ? tokens : std::min(shortest, tokens);
      longest = std::max(longest, tokens);
      if (first == nullptr || member->place < first->place) first = member;
      ++cases;
      for (size_t i = 0; i < series->second.runs.size(); ++i) {
        auto& [sum, count] = sums[series->second.runs[i]];
        sum += std::log(series->second.values[i]);
        ++count;
      }
    }
    if (cases < 2) return;
    HistorySeries group;
    for (const auto& [run, sum] : sums) {
      if (sum.second == cases)
        Append(run, std::exp(sum.first / static_cast<double>(cases)), &group);
    }
    if (group.runs.empty()) return;
    Describe(*first, metric, &group);
    group.key = key;
    group.tokens = 0;
    group.problem = absl::StrCat(Printable(first->latest->group_problem()), ", mean of ", cases,
                                 " lengths of ", shortest, " to ", longest, " tokens");
    groups_.push_back(std::move(group));
  }

  static void Append(int run, double value, HistorySeries* series) {
    if (!series->runs.empty() && series->runs.back() == run) {  // of a resumed sweep: the later one
      series->values.back() = value;
      return;
    }
    series->runs.push_back(run);
    series->values.push_back(value);
  }

  static void Describe(const CaseSeries& known, HistoryMetric metric, HistorySeries* series) {
    const HistoryCase& latest = *known.latest;
    series->metric = metric;
    series->key = latest.key();
    series->name = Printable(latest.name());
    series->problem = Printable(latest.problem());
    series->technique = Printable(latest.technique());
    series->family = Printable(latest.family());
    series->tokens = latest.tokens();
    series->device = latest.device();
    if (known.reason != nullptr) series->reason = Printable(*known.reason);
    const auto bound = known.bounds.find(metric);
    if (bound != known.bounds.end()) series->bound = bound->second;
  }

  std::unordered_map<std::string, CaseSeries> cases_;  // by key
  int64_t added_ = 0;
  std::vector<HistorySeries> groups_;
};

}  // namespace

absl::string_view MetricName(HistoryMetric metric) {
  const MetricNames* names = Find(metric);
  return names == nullptr ? "unspecified" : names->name;
}

absl::string_view MetricTitle(HistoryMetric metric) {
  const MetricNames* names = Find(metric);
  return names == nullptr ? "unspecified" : names->title;
}

absl::StatusOr<HistoryMetric> ParseHistoryMetric(absl::string_view name) {
  std::vector<absl::string_view> known;
  for (const MetricNames& names : kMetrics) {
    if (names.name == name) return names.metric;
    known.push_back(names.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", Printable(name), "\" is none of ", absl::StrJoin(known, ", ")));
}

std::string FormatValue(HistoryMetric metric, double value) {
  switch (metric) {
    case HISTORY_METRIC_TIME:
      return absl::StrCat(FormatMilliseconds(value), " ms");
    case HISTORY_METRIC_MEMORY:
      return FormatBytes(value);
    case HISTORY_METRIC_ERROR:
    case HISTORY_METRIC_ERROR_AGAINST_DENSE:
      return FormatError(value);
    case HISTORY_METRIC_STATUS:
      return std::string(
          Name(static_cast<Outcome::Status>(static_cast<int>(value) + Outcome::STATUS_OK)));
    default:
      return FormatSignificant(value);
  }
}

std::string MachineSignature(const Environment& environment) {
  if (environment.cpu_model().empty()) return "";
  std::vector<std::string> parts = {Printable(environment.cpu_model())};
  parts.push_back(absl::StrCat(environment.logical_cores(), " cores"));
  if (environment.simd_size() > 0) parts.push_back(Printable(environment.simd(0)));
  std::vector<std::string> caches;
  for (const Cache& cache : environment.caches()) {
    if (cache.kind() != "instruction")
      caches.push_back(FormatBytes(static_cast<double>(cache.bytes())));
  }
  if (!caches.empty()) parts.push_back(absl::StrCat("caches ", absl::StrJoin(caches, " + ")));
  for (const Gpu& gpu : environment.gpus()) {
    parts.push_back(
        absl::StrCat(Printable(gpu.name()), " (", Printable(gpu.compute_capability()), ")"));
  }
  return absl::StrJoin(parts, ", ");
}

History MakeHistory(const std::vector<StoredRun>& runs, bool across_machines) {
  std::map<std::string, std::vector<Part>> machines;  // by signature
  for (const StoredRun& stored : runs) {
    std::vector<std::string> signatures;
    for (const Environment& environment : stored.run.environments()) {
      signatures.push_back(across_machines ? "all machines" : MachineSignature(environment));
    }
    std::map<std::string, Part*> parts;  // of this run
    for (const HistoryCase& result : stored.run.cases()) {
      if (result.environment() < 0 || result.environment() >= stored.run.environments_size())
        continue;
      const std::string& signature = signatures[result.environment()];
      Part*& part = parts[signature];
      if (part == nullptr) {
        part = &machines[signature].emplace_back();
        part->info = InfoOf(stored.run, stored.name, stored.run.environments(result.environment()));
      }
      part->cases.push_back(&result);
    }
  }

  std::vector<std::pair<std::string, std::vector<Part>>> ordered(
      std::make_move_iterator(machines.begin()), std::make_move_iterator(machines.end()));
  for (auto& [signature, parts] : ordered) SortByCommitOrTime(&parts);
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return a.second.back().info.start_unix_s > b.second.back().info.start_unix_s;
  });

  History history;
  for (auto& [signature, parts] : ordered) {
    SeriesMaker maker;
    Machine machine;
    machine.signature = signature;
    for (const Part& part : parts) {
      for (const HistoryCase* result : part.cases) {
        maker.Add(static_cast<int>(machine.runs.size()), *result);
      }
      machine.runs.push_back(part.info);
    }
    maker.MoveTo(static_cast<int>(history.machines.size()), &history.series);
    history.machines.push_back(std::move(machine));
  }
  return history;
}

}  // namespace tfb
