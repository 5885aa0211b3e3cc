#include "results/analysis.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "results/reader.h"
#include "results/table.h"

namespace tfb {
namespace {

// Removes from `key` the fields in which cases of one table may differ.
Case::Key TableKey(Case::Key key) {
  key.clear_technique();
  key.clear_options();
  key.clear_options_text();
  key.clear_threads();
  key.clear_seed();
  if (key.purpose() == Case::PURPOSE_ACCURACY) {
    key.clear_device();  // tables compare errors on two devices, but not times
    return key;
  }
  // The varying length is both together, or the longer one with a fixed shorter one.
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

// Removes from `key` the fields in which tables that may be shown as one differ.
Case::Key FoldKey(const Case::Key& key) {
  Case::Key fold = TableKey(key);
  if (key.purpose() == Case::PURPOSE_ACCURACY) {
    fold.mutable_input()->clear_layer();
    fold.mutable_problem()->clear_causal();
  }
  return fold;
}

std::string RowKey(const Case& result) {
  Case::Key key;
  key.set_technique(result.key().technique());
  key.set_options_text(CanonicalOptions(result.key()));
  key.set_device(result.key().device());
  key.set_threads(result.key().threads());
  return CaseKey(key);
}

// Returns the words after the technique that the display names of all of `cases` share.
std::vector<std::string> SharedOptions(const std::vector<const Case*>& cases) {
  std::vector<std::string> shared;
  for (const Case* result : cases) {
    std::vector<std::string> words = absl::StrSplit(DisplayName(*result), ' ');
    words.erase(words.begin());
    if (result == cases.front()) {
      shared = std::move(words);
      continue;
    }
    shared.erase(std::remove_if(shared.begin(), shared.end(),
                                [&words](const std::string& word) {
                                  return std::find(words.begin(), words.end(), word) == words.end();
                                }),
                 shared.end());
  }
  return shared;
}

// A text of something in which machines and builds differ.
using PlaceProperty = std::string (*)(const Environment&);

std::string CommitText(const Environment& environment) {
  if (environment.git_commit().empty()) return "commit unknown";
  return absl::StrCat("commit ", environment.git_commit().substr(0, 10),
                      environment.git_dirty() ? " (dirty)" : "");
}

// The fields of MachineOf, the most telling ones first.
constexpr PlaceProperty kPlaceProperties[] = {
    [](const Environment& one) {
      return absl::StrCat("on ", one.host().empty() ? "an unknown host" : one.host());
    },
    &CommitText,
    [](const Environment& one) { return one.cpu_model(); },
    [](const Environment& one) { return absl::StrCat(one.logical_cores(), " cores"); },
    [](const Environment& one) {
      return absl::StrJoin(one.gpus(), " + ", [](std::string* out, const Gpu& gpu) {
        absl::StrAppend(out, gpu.name(), ", driver ", gpu.driver(), ", CUDA ", gpu.toolkit());
      });
    },
    [](const Environment& one) { return one.compiler(); },
    [](const Environment& one) { return one.compilation_mode(); },
    [](const Environment& one) { return absl::StrCat("flags ", one.compile_flags()); },
    [](const Environment& one) { return one.cuda_compiler(); },
    [](const Environment& one) { return one.os(); },
    [](const Environment& one) { return absl::StrJoin(one.simd(), " "); },
    [](const Environment& one) {
      return absl::StrCat("program ", absl::Hex(one.program_checksum(), absl::kZeroPad8));
    },
    [](const Environment& one) { return absl::StrCat("commit ", one.git_commit()); }};

bool HasRunTime(const Case& result) { return RunTime(result).has_value(); }

// Returns the run samples of all `cases`.
std::vector<double> PooledRunTimes(const std::vector<const Case*>& cases) {
  std::vector<double> samples;
  for (const Case* result : cases) {
    if (!HasRunTime(*result)) continue;
    const auto& run_ns = result->outcome().timing().run_ns();
    samples.insert(samples.end(), run_ns.begin(), run_ns.end());
  }
  return samples;
}

}  // namespace

const Case* Series::longest() const {
  if (run_ns.empty()) return nullptr;
  const std::vector<const Case*>& there = by_tokens.at(run_ns.rbegin()->first);
  return *std::find_if(there.begin(), there.end(),
                       [](const Case* result) { return HasRunTime(*result); });
}

bool StandsBefore(const Series& a, const Series& b) {
  const auto place = [](const Series& series) {
    const Case& result = series.first();
    return std::make_tuple(!series.is_common_baseline, result.technique().family(),
                           result.key().technique(), series.is_counterpart);
  };
  return place(a) < place(b);
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
  FindCounterparts();
  Group();
}

std::string Analysis::KeyOnMachine(const Case& result) const {
  const auto machine = machine_names_.find(result.environment_id());
  return absl::StrCat(CaseKey(result), " on ",
                      machine == machine_names_.end() ? result.environment_id() : machine->second);
}

void Analysis::SelectCases() {
  std::map<std::string, int> places;
  std::vector<std::string> keys;
  std::set<Case::Pass> passes;
  for (const Case& result : results_.cases()) {
    keys.push_back(KeyOnMachine(result));
    places[keys.back()] = static_cast<int>(keys.size()) - 1;
  }
  for (int i = 0; i < results_.cases_size(); ++i) {
    const Case& last = results_.cases(places[keys[i]]);
    if (&last == &results_.cases(i)) {
      cases_.push_back(&last);
      passes.insert(last.key().pass());
      if (last.key().pass() == Case::PASS_FORWARD) forward_cases_[keys[i]] = &last;
    } else if (last.environment_id() != results_.cases(i).environment_id() &&
               !results_.cases(i).outcome().unfinished()) {
      // Within one sweep a later record has the samples of the earlier one, and more; so has the
      // record of a case that another sweep began.
      ++superseded_cases_;
    }
  }
  passes_.assign(passes.begin(), passes.end());
}

const Case* Analysis::ForwardOf(const Case& result) const {
  if (result.key().pass() == Case::PASS_FORWARD) return &result;
  Case forward;
  *forward.mutable_key() = result.key();
  forward.mutable_key()->set_pass(Case::PASS_FORWARD);
  forward.set_environment_id(result.environment_id());
  const auto found = forward_cases_.find(KeyOnMachine(forward));
  return found == forward_cases_.end() ? nullptr : found->second;
}

void Analysis::FindCounterparts() {
  // Maps rows that share a counterpart to one of them.
  std::map<std::string, std::string> leaders;
  const auto leader = [&leaders](std::string row) {
    for (auto found = leaders.find(row); found != leaders.end(); found = leaders.find(row)) {
      row = found->second;
    }
    return row;
  };
  for (const Case* result : cases_) {
    const std::string& counterpart = result->technique().dense_counterpart();
    if (!counterpart.empty() && counterpart != result->key().technique()) {
      common_baselines_.insert(counterpart);
    }
    const Case* dense = DenseOf(*result);
    if (dense == nullptr || dense == result || dense->technique().options_are_default()) continue;
    const std::string row = RowKey(*result);
    if (row == RowKey(*dense)) continue;
    const auto [place, added] = counterparts_.emplace(dense, row);
    if (added) continue;
    const std::string a = leader(place->second);
    const std::string b = leader(row);
    if (a != b) leaders[std::max(a, b)] = std::min(a, b);
  }
  for (auto& [dense, row] : counterparts_) row = leader(row);
}

std::string Analysis::RowKeyOf(const Case& result) const {
  const auto counterpart = counterparts_.find(&result);
  if (counterpart == counterparts_.end()) return RowKey(result);
  return absl::StrCat(result.key().technique(), " counterpart of ", counterpart->second);
}

void Analysis::NameCounterparts(SeriesGroup* group) {
  for (Series& series : group->series) {
    if (!series.is_counterpart) continue;
    series.name = series.first().key().technique();
    for (const std::string& option : SharedOptions(series.cases)) {
      absl::StrAppend(&series.name, " ", option);
    }
    series.name += " (dense counterpart)";
  }
}

std::string Analysis::PlaceOf(const Environment& environment) const {
  if (machines_.size() < 2) return "";
  std::vector<const Environment*> others;  // that the text does not yet tell apart
  const std::string machine = MachineOf(results_, environment.id());
  for (const Environment* other : machines_) {
    if (MachineOf(results_, other->id()) != machine) others.push_back(other);
  }
  std::vector<std::string> parts;
  for (const PlaceProperty property : kPlaceProperties) {
    const std::string own = property(environment);
    const auto is_other = [&](const Environment* other) { return property(*other) != own; };
    const auto rest = std::remove_if(others.begin(), others.end(), is_other);
    if (rest == others.end()) continue;
    others.erase(rest, others.end());
    parts.push_back(Printable(own));
  }
  return absl::StrJoin(parts, ", ");
}

void Analysis::Group() {
  std::map<std::string, int> group_places;
  std::map<std::string, int> series_places;
  for (const Case* result : cases_) {
    const auto machine = machine_names_.find(result->environment_id());
    const std::string& machine_name =
        machine == machine_names_.end() ? result->environment_id() : machine->second;
    const std::string table = absl::StrCat(CaseKey(TableKey(result->key())), " on ", machine_name);
    const auto [group_place, new_group] =
        group_places.emplace(table, static_cast<int>(groups_.size()));
    if (new_group) {
      SeriesGroup group;
      group.purpose = result->key().purpose();
      group.environment = &EnvironmentOf(*result);
      group.place = PlaceOf(*group.environment);
      group.fold_key = absl::StrCat(CaseKey(FoldKey(result->key())), " on ", machine_name);
      groups_.push_back(std::move(group));
    }
    SeriesGroup& group = groups_[group_place->second];
    const auto [series_place, new_series] = series_places.emplace(
        absl::StrCat(table, "\n", RowKeyOf(*result)), static_cast<int>(group.series.size()));
    if (new_series) {
      Series series;
      series.name = DisplayName(*result);
      series.row_key = RowKeyOf(*result);
      series.is_baseline = true;
      series.is_counterpart = counterparts_.count(result) > 0;
      series.is_common_baseline =
          !series.is_counterpart && common_baselines_.count(result->key().technique()) > 0;
      group.series.push_back(std::move(series));
    }
    Series& series = group.series[series_place->second];
    series.is_baseline = series.is_baseline && IsBaseline(*result);
    series.cases.push_back(result);
    series.by_tokens[LengthOf(result->key().problem())].push_back(result);
  }

  std::stable_sort(groups_.begin(), groups_.end(), [](const SeriesGroup& a, const SeriesGroup& b) {
    return a.first().key().pass() < b.first().key().pass();
  });
  for (size_t g = 0; g < groups_.size(); ++g) {
    SeriesGroup& group = groups_[g];
    std::stable_sort(group.series.begin(), group.series.end(), StandsBefore);
    NameCounterparts(&group);
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

// Returns the speed-up of all `cases` over their counterparts.
std::optional<SpeedUpInterval> Analysis::SpeedUpOver(const std::vector<const Case*>& cases) const {
  std::vector<ComparedCase> compared;
  for (const Case* result : cases) compared.push_back({result, DenseOf(*result)});
  return SpeedUpOf(SamplesSideBySide(compared));
}

void Analysis::Finish(Series* series) const {
  std::vector<LengthTime> times;
  std::vector<LengthSpeedUp> speed_ups;
  for (const auto& [tokens, cases] : series->by_tokens) {
    const std::optional<MedianInterval> time = MedianOf(PooledRunTimes(cases));
    if (!time.has_value()) continue;
    series->run_ns[tokens] = *time;
    times.push_back({tokens, time->median});
    const std::optional<SpeedUpInterval> speed_up =
        series->is_baseline ? SpeedUpInterval() : SpeedUpOver(cases);
    if (!speed_up.has_value()) continue;
    series->speed_ups[tokens] = *speed_up;
    if (tokens > 0) speed_ups.push_back({tokens, *speed_up});
  }
  series->growth = FitGrowth(times);
  if (!series->is_baseline) series->crossover = FindCrossover(speed_ups);
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

const Series* Analysis::DenseSeriesOf(const Series& series, int64_t tokens) const {
  const auto cases = series.by_tokens.find(tokens);
  const Case* dense = cases == series.by_tokens.end() ? nullptr : DenseOf(*cases->second.front());
  return dense == nullptr ? nullptr : SeriesOf(*dense);
}

std::string DisplayName(const Case& result) {
  if (!result.technique().display_name().empty()) return result.technique().display_name();
  const std::string options = CanonicalOptions(result.key());
  return options.empty() ? result.key().technique()
                         : absl::StrCat(result.key().technique(), " ", options);
}

}  // namespace tfb
