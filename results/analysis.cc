#include "results/analysis.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "results/reader.h"

namespace tfb {
namespace {

// Leaves of `key` what all cases of one table share.
Case::Key TableKey(Case::Key key) {
  key.clear_technique();
  key.clear_options();
  key.clear_options_text();
  key.clear_threads();
  key.clear_seed();
  if (key.purpose() == Case::PURPOSE_ACCURACY) {
    key.clear_device();  // errors on two devices are worth comparing; times are told apart
    return key;
  }
  // Which of the two lengths varies: both together, or the longer one against a fixed shorter one.
  ProblemSize* problem = key.mutable_problem();
  if (problem->query_tokens() == problem->kv_tokens()) {
    problem->set_query_tokens(-1);
    problem->set_kv_tokens(-1);
  } else if (problem->query_tokens() < problem->kv_tokens()) {
    problem->set_kv_tokens(-1);
  } else {
    problem->set_query_tokens(-1);
  }
  return key;
}

std::string RowKey(const Case& result) {
  Case::Key key;
  key.set_technique(result.key().technique());
  key.set_options_text(CanonicalOptions(result.key()));
  key.set_device(result.key().device());
  key.set_threads(result.key().threads());
  return CaseKey(key);
}

bool HasRunTime(const Case& result) { return RunTime(result).has_value(); }

// All run samples of `cases` together.
std::optional<MedianInterval> PooledRunTime(const std::vector<const Case*>& cases) {
  std::vector<double> samples;
  for (const Case* result : cases) {
    if (!HasRunTime(*result)) continue;
    const auto& run_ns = result->outcome().timing().run_ns();
    samples.insert(samples.end(), run_ns.begin(), run_ns.end());
  }
  return MedianOf(std::move(samples));
}

}  // namespace

const Case* Series::longest() const {
  if (run_ns.empty()) return nullptr;
  const std::vector<const Case*>& there = by_tokens.at(run_ns.rbegin()->first);
  for (const Case* result : there) {
    if (HasRunTime(*result)) return result;
  }
  return there.front();
}

Analysis::Analysis(const ResultSet& results) : results_(results), partners_(results) {
  std::set<std::string> seen;
  for (const Environment& environment : results.environments()) {
    if (!environments_.emplace(environment.id(), &environment).second) continue;
    const std::string machine = MachineOf(results, environment.id());
    machine_names_[environment.id()] = machine;
    if (seen.insert(machine).second) machines_.push_back(&environment);
  }
  SelectCases();
  Group();
}

void Analysis::SelectCases() {
  std::map<std::string, int> places;
  std::vector<std::string> keys;
  for (const Case& result : results_.cases()) {
    const auto machine = machine_names_.find(result.environment_id());
    keys.push_back(
        absl::StrCat(CaseKey(result), " on ",
                     machine == machine_names_.end() ? result.environment_id() : machine->second));
    places[keys.back()] = static_cast<int>(keys.size()) - 1;
  }
  for (int i = 0; i < results_.cases_size(); ++i) {
    if (places[keys[i]] == i) {
      cases_.push_back(&results_.cases(i));
    } else {
      ++superseded_cases_;
    }
  }
}

void Analysis::Group() {
  std::map<std::string, int> group_places;
  std::map<std::string, int> series_places;
  for (const Case* result : cases_) {
    const auto machine = machine_names_.find(result->environment_id());
    const std::string table =
        absl::StrCat(CaseKey(TableKey(result->key())), " on ",
                     machine == machine_names_.end() ? result->environment_id() : machine->second);
    const auto [group_place, new_group] =
        group_places.emplace(table, static_cast<int>(groups_.size()));
    if (new_group) {
      SeriesGroup group;
      group.purpose = result->key().purpose();
      group.environment = &EnvironmentOf(*result);
      groups_.push_back(std::move(group));
    }
    SeriesGroup& group = groups_[group_place->second];
    const auto [series_place, new_series] = series_places.emplace(
        absl::StrCat(table, "\n", RowKey(*result)), static_cast<int>(group.series.size()));
    if (new_series) {
      Series series;
      series.name = DisplayName(*result);
      series.is_baseline = IsBaseline(*result);
      group.series.push_back(std::move(series));
    }
    Series& series = group.series[series_place->second];
    series.cases.push_back(result);
    series.by_tokens[LengthOf(result->key().problem())].push_back(result);
  }

  for (size_t g = 0; g < groups_.size(); ++g) {
    SeriesGroup& group = groups_[g];
    std::stable_partition(group.series.begin(), group.series.end(),
                          [](const Series& series) { return series.is_baseline; });
    std::set<int64_t> lengths;
    for (size_t s = 0; s < group.series.size(); ++s) {
      Finish(&group.series[s]);
      for (const Case* result : group.series[s].cases) {
        places_[result] = {static_cast<int>(g), static_cast<int>(s)};
        lengths.insert(LengthOf(result->key().problem()));
      }
    }
    group.lengths.assign(lengths.begin(), lengths.end());
  }
}

void Analysis::Finish(Series* series) const {
  std::vector<LengthTime> times;
  std::vector<LengthTime> dense_times;
  for (const auto& [tokens, cases] : series->by_tokens) {
    const std::optional<MedianInterval> time = PooledRunTime(cases);
    if (!time.has_value()) continue;
    series->run_ns[tokens] = *time;
    times.push_back({tokens, time->median});
    for (const Case* result : cases) {
      const Case* dense = DenseOf(*result);
      if (dense == nullptr || !HasRunTime(*result)) continue;
      const std::optional<MedianInterval> dense_time = RunTime(*dense);
      if (dense_time.has_value()) dense_times.push_back({tokens, dense_time->median});
    }
  }
  series->growth = FitGrowth(times);
  if (!series->is_baseline) series->crossover = FindCrossover(times, dense_times);
}

const Environment& Analysis::EnvironmentOf(const Case& result) const {
  const auto found = environments_.find(result.environment_id());
  return found == environments_.end() ? unknown_environment_ : *found->second;
}

const Series* Analysis::SeriesOf(const Case& result) const {
  const auto place = places_.find(&result);
  if (place == places_.end()) return nullptr;
  return &groups_[place->second.first].series[place->second.second];
}

std::optional<double> Analysis::SpeedUpAt(const Series& series, int64_t tokens) const {
  const auto time = series.run_ns.find(tokens);
  if (time == series.run_ns.end() || !(time->second.median > 0)) return std::nullopt;
  std::vector<double> dense_times;
  for (const Case* result : series.by_tokens.at(tokens)) {
    const Case* dense = DenseOf(*result);
    if (dense == nullptr) continue;
    const std::optional<MedianInterval> dense_time = RunTime(*dense);
    if (dense_time.has_value()) dense_times.push_back(dense_time->median);
  }
  const std::optional<MedianInterval> dense_time = MedianOf(dense_times);
  if (!dense_time.has_value()) return std::nullopt;
  return dense_time->median / time->second.median;
}

std::string DisplayName(const Case& result) {
  if (!result.technique().display_name().empty()) return result.technique().display_name();
  const std::string options = CanonicalOptions(result.key());
  return options.empty() ? result.key().technique()
                         : absl::StrCat(result.key().technique(), " ", options);
}

}  // namespace tfb
