#include "results/choices.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/describe.h"
#include "results/reader.h"

namespace tfb {
namespace report {
namespace {

constexpr int kWidestNameInText = 60;

// The errors against dense that a choice uses, and the inputs on which they were measured.
struct ChoiceErrors {
  std::map<std::string, std::vector<double>> by_row;  // by Series::row_key
  std::string inputs;
};

// Collects the errors of the cases of `purpose` with the group's element type; for scaling, only
// those on the group's own input.
ChoiceErrors FindErrors(const Analysis& analysis, const TableGroup& group, Case::Purpose purpose) {
  ChoiceErrors errors;
  std::set<std::string> failed;
  std::vector<std::string> inputs;
  for (const Case* result : analysis.cases()) {
    const Series* series = analysis.SeriesOf(*result);
    if (result->key().dtype() != group.first().key().dtype() || series == nullptr) continue;
    const Case::Pass pass = result->key().pass();
    if (pass != Case::PASS_FORWARD && pass != group.pass()) continue;
    if (result->outcome().status() == Outcome::STATUS_FAILED) failed.insert(series->row_key);
    if (result->key().purpose() != purpose) continue;
    InputProfile input = result->key().input();
    input.clear_layer();
    if (purpose == Case::PURPOSE_SCALING &&
        DescribeInput(input) != DescribeInput(group.first().key().input())) {
      continue;
    }
    const std::optional<double> error = DenseError(*result);
    if (!error.has_value() || std::isnan(*error)) continue;
    errors.by_row[series->row_key].push_back(*error);
    const std::string described = DescribeInput(input);
    if (std::find(inputs.begin(), inputs.end(), described) == inputs.end()) {
      inputs.push_back(described);
    }
  }
  for (const std::string& row : failed) errors.by_row.erase(row);
  errors.inputs = absl::StrJoin(inputs, " and ");
  return errors;
}

std::vector<ChoiceSet> SetsWith(const Analysis& analysis, const TableGroup& group,
                                const ChoiceErrors& errors, int64_t tokens) {
  std::vector<ChoiceSet> sets;
  for (const Row& row : RowsOf(group, true)) {
    const Series& series = *row.series;
    const auto time = series.run_ns.find(tokens);
    const auto error = errors.by_row.find(series.row_key);
    if (time == series.run_ns.end() || error == errors.by_row.end()) continue;
    const Series* dense = analysis.DenseSeriesOf(series, tokens);
    auto set = std::find_if(sets.begin(), sets.end(),
                            [dense](const ChoiceSet& other) { return other.dense == dense; });
    if (set == sets.end()) set = sets.insert(sets.end(), {dense, {}, errors.inputs});
    Choice choice{&series, time->second.median, MedianOf(error->second)->median, std::nullopt,
                  MemoryAt(series, tokens)};
    const auto speed_up = series.speed_ups.find(tokens);
    if (speed_up != series.speed_ups.end()) choice.speed_up = speed_up->second;
    set->choices.push_back(std::move(choice));
  }
  std::stable_sort(sets.begin(), sets.end(), [](const ChoiceSet& a, const ChoiceSet& b) {
    const auto place = [](const ChoiceSet& set) {
      return std::make_tuple(-static_cast<int64_t>(set.techniques()), set.is_apart(),
                             -set.choices.front().series->first().key().threads());
    };
    return place(a) < place(b);
  });
  return sets;
}

// Returns a key that is equal for groups that differ only in their mask.
std::string KeyWithoutMask(const TableGroup& group) {
  Case::Key key = group.first().key();
  key.mutable_problem()->clear_causal();
  const void* machine = group.front().environment;
  return absl::StrCat(Name(key.device()), " ", Name(key.dtype()), " ", DescribeProblem(key, false),
                      " ", LengthName(group), " ", DescribeInput(key.input()), " ",
                      reinterpret_cast<uintptr_t>(machine));
}

}  // namespace

size_t ChoiceSet::techniques() const {
  return static_cast<size_t>(
      std::count_if(choices.begin(), choices.end(),
                    [](const Choice& choice) { return !choice.series->is_counterpart; }));
}

bool Beats(const Choice& a, const Choice& b) {
  return a.time_ns <= b.time_ns && a.error <= b.error &&
         (a.time_ns < b.time_ns || a.error < b.error);
}

int64_t SharedLength(const TableGroup& group) {
  std::map<int64_t, size_t> counts;
  size_t techniques = 0;
  for (const Series* series : group.AllSeries()) {
    if (series->run_ns.empty() || series->is_counterpart) continue;
    ++techniques;
    for (const auto& [tokens, time] : series->run_ns) ++counts[tokens];
  }
  for (auto count = counts.rbegin(); count != counts.rend(); ++count) {
    if (2 * count->second > techniques) return count->first;
  }
  return counts.empty() ? 0 : counts.rbegin()->first;
}

std::vector<ChoiceSet> FindChoiceSets(const Analysis& analysis, const TableGroup& group,
                                      int64_t tokens) {
  std::vector<ChoiceSet> pairs;  // of one technique and its counterpart
  for (const Case::Purpose purpose : {Case::PURPOSE_ACCURACY, Case::PURPOSE_SCALING}) {
    std::vector<ChoiceSet> sets =
        SetsWith(analysis, group, FindErrors(analysis, group, purpose), tokens);
    if (!sets.empty() && sets.front().techniques() >= 2) return sets;
    const auto is_pair = [](const ChoiceSet& set) { return set.choices.size() >= 2; };
    std::stable_partition(sets.begin(), sets.end(), is_pair);
    if (pairs.empty() && !sets.empty() && is_pair(sets.front())) pairs = std::move(sets);
  }
  return pairs;
}

std::map<std::string, double> ErrorsByRow(const Analysis& analysis, const TableGroup& group) {
  std::map<std::string, double> medians;
  for (const Case::Purpose purpose : {Case::PURPOSE_ACCURACY, Case::PURPOSE_SCALING}) {
    for (const auto& [row, errors] : FindErrors(analysis, group, purpose).by_row) {
      medians.emplace(row, MedianOf(errors)->median);
    }
  }
  return medians;
}

std::vector<TableGroup> ChoiceGroups(const Analysis& analysis, Case::Pass pass) {
  std::vector<TableGroup> groups;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY || group.pass() != pass) continue;
    if (!FindChoiceSets(analysis, group, SharedLength(group)).empty()) groups.push_back(group);
  }
  return groups;
}

std::vector<TableGroup> MainGroups(const Analysis& analysis, Case::Pass pass) {
  struct Masks {
    std::vector<TableGroup> groups;
    size_t choices = 0;
    int64_t tokens = 0;  // the longest SharedLength
    int threads = 0;     // the most
  };
  std::vector<std::pair<std::string, Masks>> all;  // in the order of the file
  for (const TableGroup& group : ChoiceGroups(analysis, pass)) {
    const int64_t tokens = SharedLength(group);
    const ChoiceSet set = FindChoiceSets(analysis, group, tokens).front();
    const std::string key = KeyWithoutMask(group);
    auto masks = std::find_if(all.begin(), all.end(),
                              [&key](const auto& entry) { return entry.first == key; });
    if (masks == all.end()) masks = all.insert(all.end(), {key, Masks()});
    masks->second.groups.push_back(group);
    masks->second.choices += set.techniques();
    masks->second.tokens = std::max(masks->second.tokens, tokens);
    masks->second.threads =
        std::max(masks->second.threads, set.choices.front().series->first().key().threads());
  }
  const auto most = std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
    const auto size = [](const Masks& masks) {
      return std::make_tuple(masks.choices, masks.tokens, masks.threads);
    };
    return size(a.second) < size(b.second);
  });
  if (most == all.end()) return {};
  std::stable_sort(most->second.groups.begin(), most->second.groups.end(),
                   [](const TableGroup& a, const TableGroup& b) {
                     return !a.first().key().problem().causal() &&
                            b.first().key().problem().causal();
                   });
  return most->second.groups;
}

std::vector<Case::Pass> PassesToChooseBy(const Analysis& analysis) {
  std::vector<Case::Pass> passes;
  for (const Case::Pass pass : analysis.passes()) {
    if (!MainGroups(analysis, pass).empty()) passes.push_back(pass);
  }
  if (passes.size() > 1) {
    passes.erase(std::remove(passes.begin(), passes.end(), Case::PASS_BACKWARD), passes.end());
  }
  return passes;
}

std::string NameInText(const Series& series) {
  return CutToWidth(SeriesName(series), kWidestNameInText);
}

}  // namespace report
}  // namespace tfb
