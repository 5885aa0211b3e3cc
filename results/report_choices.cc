// Which techniques no other beats in both time and error.

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/reader.h"
#include "results/render.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

constexpr int kWidestNameInText = 60;  // half of a usual line
// Members that a choice between techniques needs to be worth a table beside the first one.
constexpr size_t kFewestFurtherChoices = 3;

// A technique's place in the choice between time and error.
struct Choice {
  const Series* series;
  double time_ns;
  double error;
  std::optional<double> speed_up;
  std::optional<double> memory;
};

bool Beats(const Choice& a, const Choice& b) {
  return a.time_ns <= b.time_ns && a.error <= b.error &&
         (a.time_ns < b.time_ns || a.error < b.error);
}

// The errors against dense by which techniques are chosen, and what they were measured on.
struct ChoiceErrors {
  std::map<std::string, std::vector<double>> by_row;  // Series::row_key
  std::string inputs;
};

// Of every case of `purpose` with the group's element type, for scaling only the group's own; but
// nothing of those techniques of which any case failed: what is wrong is no choice.
ChoiceErrors FindChoiceErrors(const Analysis& analysis, const TableGroup& group,
                              Case::Purpose purpose) {
  ChoiceErrors errors;
  std::set<std::string> failed;
  std::vector<std::string> inputs;
  for (const Case* result : analysis.cases()) {
    const Series* series = analysis.SeriesOf(*result);
    if (result->key().dtype() != group.first().key().dtype() || series == nullptr) continue;
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

// Techniques that are held against the same dense: only their errors and speed-ups compare.
struct ChoiceSet {
  const Series* dense = nullptr;
  std::vector<Choice> choices;
};

std::vector<ChoiceSet> FindChoices(const Analysis& analysis, const TableGroup& group,
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
    if (set == sets.end()) set = sets.insert(sets.end(), {dense, {}});
    set->choices.push_back({&series, time->second.median, MedianOf(error->second)->median,
                            analysis.SpeedUpAt(series, tokens),
                            WorkingMemoryBytes(series.by_tokens.at(tokens).front()->outcome())});
  }
  std::stable_sort(sets.begin(), sets.end(), [](const ChoiceSet& a, const ChoiceSet& b) {
    return a.choices.size() > b.choices.size();
  });
  return sets;
}

// Notes and titles are broken at spaces only, so that a name must not be longer than a line.
std::string NameInText(const Series& series) {
  return CutToWidth(SeriesName(series), kWidestNameInText);
}

// "near beats sketch, far; dense beats other": who is no choice, by the fastest that is better.
std::string BeatenNote(const std::vector<Choice>& choices) {
  std::vector<std::pair<const Series*, std::vector<std::string>>> beaten;
  for (const Choice& choice : choices) {
    const Choice* fastest = nullptr;
    for (const Choice& other : choices) {
      if (!Beats(other, choice)) continue;
      if (fastest == nullptr || other.time_ns < fastest->time_ns) fastest = &other;
    }
    if (fastest == nullptr) continue;
    auto by = std::find_if(beaten.begin(), beaten.end(),
                           [&](const auto& entry) { return entry.first == fastest->series; });
    if (by == beaten.end()) by = beaten.insert(beaten.end(), {fastest->series, {}});
    by->second.push_back(NameInText(*choice.series));
  }
  std::vector<std::string> texts;
  for (const auto& [series, names] : beaten) {
    texts.push_back(absl::StrCat(NameInText(*series), " beats ", absl::StrJoin(names, ", ")));
  }
  return absl::StrJoin(texts, "; ");
}

Table ChoiceTable(const TableGroup& group, const ChoiceSet& set, const ChoiceErrors& errors,
                  int64_t tokens) {
  Table table;
  const TimeUnit unit = UnitOf(group);
  std::vector<Choice> best;
  for (const Choice& choice : set.choices) {
    if (std::none_of(set.choices.begin(), set.choices.end(),
                     [&](const Choice& other) { return Beats(other, choice); })) {
      best.push_back(choice);
    }
  }
  std::stable_sort(best.begin(), best.end(),
                   [](const Choice& a, const Choice& b) { return a.error < b.error; });
  const Case::Key& key = group.first().key();
  table.title = absl::StrCat(
      "Choices at ", tokens, " ", LengthName(group), ", ", Name(key.device()), " ",
      Name(key.dtype()), ", ", DescribeProblem(key.problem(), false), ", input ",
      DescribeInput(key.input()), ": of ", set.choices.size(),
      set.dense == nullptr ? "" : absl::StrCat(" held against ", NameInText(*set.dense)),
      ", those that no other beats in both time and error on input ", errors.inputs);
  table.columns = {{"technique", false, kLeastNameWidth},
                   {"error against\ndense", true},
                   {"speed-up", true},
                   {unit.name, true},
                   {"memory", true}};
  for (const Choice& choice : best) {
    table.AddRow(
        {SeriesName(*choice.series), FormatError(choice.error), FormatRatio(choice.speed_up),
         FormatSignificant(choice.time_ns / unit.ns), FormatBytes(choice.memory)},
        FamilyOf(*choice.series));
  }
  table.notes.push_back("error: median over the technique's cases on that input");
  const std::string beaten = BeatenNote(set.choices);
  if (!beaten.empty()) absl::StrAppend(&table.notes.back(), "; ", beaten);
  return table;
}

std::vector<Table> ChoiceTablesOf(const Analysis& analysis, const TableGroup& group) {
  int64_t longest = 0;
  for (const Series* series : group.AllSeries()) {
    if (!series->run_ns.empty()) longest = std::max(longest, series->run_ns.rbegin()->first);
  }
  ChoiceErrors errors = FindChoiceErrors(analysis, group, Case::PURPOSE_ACCURACY);
  std::vector<ChoiceSet> sets = FindChoices(analysis, group, errors, longest);
  if (sets.empty() || sets.front().choices.size() < 2) {
    errors = FindChoiceErrors(analysis, group, Case::PURPOSE_SCALING);
    sets = FindChoices(analysis, group, errors, longest);
  }
  std::vector<Table> tables;
  std::vector<std::string> apart;
  for (const ChoiceSet& set : sets) {
    if (set.choices.size() >= (tables.empty() ? 2 : kFewestFurtherChoices)) {
      tables.push_back(ChoiceTable(group, set, errors, longest));
      continue;
    }
    for (const Choice& choice : set.choices) {
      if (!choice.series->is_counterpart) apart.push_back(NameInText(*choice.series));
    }
  }
  if (!tables.empty() && !apart.empty()) {
    absl::StrAppend(
        &tables.front().notes.back(),
        "; held against a dense counterpart of their own: ", absl::StrJoin(apart, ", "));
  }
  return tables;
}

}  // namespace

std::vector<Table> ChoiceTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY) continue;
    for (Table& table : ChoiceTablesOf(analysis, group)) tables.push_back(std::move(table));
  }
  return WithRows(tables);
}

}  // namespace report
}  // namespace tfb
