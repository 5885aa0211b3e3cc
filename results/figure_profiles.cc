#include "results/figure_profiles.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "results/describe.h"
#include "results/reader.h"

namespace tfb {
namespace figure {

std::optional<double> Middle(const std::vector<double>& values) {
  for (const double value : values) {
    if (std::isnan(value)) return value;
  }
  const std::optional<MedianInterval> median = MedianOf(values);
  return median.has_value() ? std::optional<double>(median->median) : std::nullopt;
}
std::optional<double> Middle(const Entry& entry, const char* statistic) {
  const auto found = entry.statistics.find(statistic);
  return found == entry.statistics.end() ? std::nullopt : Middle(found->second);
}

namespace {

std::string ProfileTitle(const SeriesGroup& group, const Case& result) {
  Case::Key key = result.key();
  key.mutable_problem()->clear_causal();
  key.mutable_input()->clear_layer();
  std::string title = absl::StrCat("input ", DescribeInput(key.input()), ", ", Name(key.device()),
                                   " ", Name(key.dtype()), ", ", DescribeProblem(key, false));
  if (!group.place.empty()) absl::StrAppend(&title, ", ", group.place);
  return title;
}

std::string ProfileKey(const Analysis& analysis, const SeriesGroup& group, const Case& result) {
  return absl::StrCat(ProfileTitle(group, result), "\n",
                      MachineOf(analysis.results(), result.environment_id()));
}

Entry* EntryOf(const Series& series, std::vector<Entry>* entries) {
  for (Entry& entry : *entries) {
    if (entry.series->row_key == series.row_key) return &entry;
  }
  entries->emplace_back();
  entries->back().series = &series;
  return &entries->back();
}

void AddCase(const Analysis& analysis, const Series& series, const Case& result, Entry* entry) {
  const Outcome& outcome = result.outcome();
  entry->failed = entry->failed || outcome.status() == Outcome::STATUS_FAILED;
  const Case* judged = analysis.ForwardOf(result);
  if (judged != nullptr && judged->outcome().has_against_dense()) {
    const ErrorMeasure& error = judged->outcome().against_dense();
    const std::optional<double> value = error.has_relative_frobenius()
                                            ? std::optional<double>(error.relative_frobenius())
                                            : BoundedValue(error);
    if (value.has_value()) entry->errors.push_back(*value);
  }
  const std::optional<MedianInterval> time = RunTime(result);
  if (time.has_value()) entry->times_ns.push_back(time->median);
  const Case* dense = analysis.DenseOf(result);
  const std::optional<double> speed_up = SpeedUp(result, dense);
  if (speed_up.has_value() && *speed_up > 0) entry->ratios.push_back(1 / *speed_up);
  if (dense != nullptr) entry->dense = analysis.SeriesOf(*dense);
  if (entry->dense == nullptr) entry->dense = &series;
  for (const auto& [name, value] : outcome.statistics()) {
    entry->statistics[name].push_back(value);
  }
}

// Removes the counterparts that no technique in `entries` is compared with.
void DropUnusedReferences(const SeriesFilter& filter, std::vector<Entry>* entries) {
  std::set<std::string> used;
  for (const Entry& entry : *entries) {
    if (filter(*entry.series) && entry.dense != nullptr) used.insert(entry.dense->row_key);
  }
  entries->erase(std::remove_if(entries->begin(), entries->end(),
                                [&](const Entry& entry) {
                                  return !filter(*entry.series) &&
                                         used.count(entry.series->row_key) == 0;
                                }),
                 entries->end());
}

void BorrowTimes(const Analysis& analysis, std::vector<Entry>* entries) {
  for (Entry& entry : *entries) {
    if (!entry.ratios.empty() || entry.errors.empty()) continue;
    for (const SeriesGroup& group : analysis.groups()) {
      if (group.purpose == Case::PURPOSE_ACCURACY) continue;
      for (const Series& series : group.series) {
        const bool is_same = series.row_key == entry.series->row_key &&
                             series.first().key().pass() == entry.series->first().key().pass();
        if (!is_same || series.run_ns.empty()) continue;
        const auto speed_up = series.speed_ups.find(series.run_ns.rbegin()->first);
        if (speed_up == series.speed_ups.end()) continue;
        entry.ratios.push_back(1 / speed_up->second.ratio);
        entry.borrowed_ratio = true;
      }
    }
  }
}

}  // namespace

std::vector<Profile> ProfilesOf(const Analysis& analysis, const SeriesFilter& filter) {
  std::vector<Profile> profiles;
  std::map<std::string, size_t> places;
  for (const SeriesGroup& group : analysis.groups()) {
    for (const Series& series : group.series) {
      const bool reference = series.is_common_baseline || series.is_counterpart;
      if (!reference && filter && !filter(series)) continue;
      for (const Case* result : series.cases) {
        const Outcome::Status status = result->outcome().status();
        if (status != Outcome::STATUS_OK && status != Outcome::STATUS_FAILED) continue;
        const auto [place, added] =
            places.emplace(ProfileKey(analysis, group, *result), profiles.size());
        if (added) profiles.push_back({ProfileTitle(group, *result), {}});
        const int64_t tokens = LengthOf(result->key().problem());
        AddCase(analysis, series, *result,
                EntryOf(series, &profiles[place->second].by_tokens[tokens]));
      }
    }
  }
  if (filter) {
    for (Profile& profile : profiles) {
      for (auto& [tokens, entries] : profile.by_tokens) DropUnusedReferences(filter, &entries);
    }
  }
  return profiles;
}

const std::vector<Entry>* FindLongest(const Analysis& analysis, Profile* profile, int64_t* tokens) {
  for (auto at = profile->by_tokens.rbegin(); at != profile->by_tokens.rend(); ++at) {
    BorrowTimes(analysis, &at->second);
    const auto known = std::count_if(at->second.begin(), at->second.end(), [](const Entry& entry) {
      return (!entry.errors.empty() && !entry.ratios.empty()) ||
             entry.statistics.count(kBitsPerByte) > 0;
    });
    if (known < 2) continue;
    *tokens = at->first;
    return &at->second;
  }
  return nullptr;
}

}  // namespace figure
}  // namespace tfb
