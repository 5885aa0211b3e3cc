// Lists the Pareto-optimal techniques in time and error.

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/choices.h"
#include "results/describe.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

// The fewest members with which a choice has a table beside the first one.
constexpr size_t kFewestFurtherChoices = 3;

// Groups the dominated techniques by the fastest that dominates them: "near beats sketch, far".
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

std::vector<Choice> BestOf(const ChoiceSet& set) {
  std::vector<Choice> best;
  for (const Choice& choice : set.choices) {
    if (std::none_of(set.choices.begin(), set.choices.end(),
                     [&](const Choice& other) { return Beats(other, choice); })) {
      best.push_back(choice);
    }
  }
  std::stable_sort(best.begin(), best.end(),
                   [](const Choice& a, const Choice& b) { return a.error < b.error; });
  return best;
}

std::string ChoiceTitle(const TableGroup& group, const ChoiceSet& set, int64_t tokens) {
  const Case::Key& key = group.first().key();
  return absl::StrCat(
      "Choices at ", tokens, " ", LengthName(group), ", ", Name(key.device()), " ",
      Name(key.dtype()), ", ",
      HasSeveralThreads(group) ? ThreadsText(*set.choices.front().series) + ", " : "",
      DescribeProblem(key, false), ", input ", DescribeInput(key.input()),
      group.front().place.empty() ? "" : absl::StrCat(", ", group.front().place), ": of ",
      set.techniques(),
      set.dense == nullptr ? "" : absl::StrCat(" held against ", NameInText(*set.dense)),
      ", those that no other beats in both time and error on input ", set.inputs);
}

Table ChoiceTable(const TableGroup& group, const ChoiceSet& set, int64_t tokens) {
  Table table;
  const TimeUnit unit = UnitOf(group);
  table.title = ChoiceTitle(group, set, tokens);
  table.columns = {{"technique", false, kLeastNameWidth},
                   {"error against\ndense", true},
                   {"speed-up", true, 0, 1},
                   {unit.name, true},
                   {"memory", true}};
  for (const Choice& choice : BestOf(set)) {
    const bool baseline = choice.series->is_baseline;
    table.AddRow(
        {SeriesName(*choice.series), FormatError(choice.error),
         baseline && choice.speed_up.has_value() ? TableCell("1.0x") : SpeedUpCell(choice.speed_up),
         FormatSignificant(choice.time_ns / unit.ns), FormatBytes(choice.memory)},
        FamilyOf(*choice.series));
  }
  table.notes.push_back(
      group.pass() == Case::PASS_FORWARD
          ? "error: median over the technique's cases on that input"
          : "error: of the forward pass, median over the technique's cases on that input");
  const std::string beaten = BeatenNote(set.choices);
  if (!beaten.empty()) absl::StrAppend(&table.notes.back(), "; ", beaten);
  return table;
}

// Says how many techniques there are to choose from, where fewer ran at longer lengths.
std::string LongerNote(const TableGroup& group, int64_t tokens) {
  int64_t longest = tokens;
  for (const Series* series : group.AllSeries()) {
    if (!series->run_ns.empty()) longest = std::max(longest, series->run_ns.rbegin()->first);
  }
  if (longest == tokens) return "";
  return absl::StrCat(
      "; ", tokens, " ", LengthName(group),
      " are the most that more than half of the techniques ran; the longest run has ", longest);
}

std::vector<Table> ChoiceTablesOf(const Analysis& analysis, const TableGroup& group) {
  const int64_t tokens = SharedLength(group);
  std::vector<Table> tables;
  std::vector<std::string> apart;
  for (const ChoiceSet& set : FindChoiceSets(analysis, group, tokens)) {
    if (set.techniques() >= (tables.empty() ? 2 : kFewestFurtherChoices)) {
      tables.push_back(ChoiceTable(group, set, tokens));
      continue;
    }
    for (const Choice& choice : set.choices) {
      if (choice.series->is_counterpart || choice.series->is_baseline) continue;
      const std::string name = NameInText(*choice.series);
      if (std::find(apart.begin(), apart.end(), name) == apart.end()) apart.push_back(name);
    }
  }
  if (tables.empty()) return tables;
  tables.front().notes.back() += LongerNote(group, tokens);
  if (!apart.empty()) {
    absl::StrAppend(
        &tables.front().notes.back(),
        "; held against a dense counterpart of their own: ", absl::StrJoin(apart, ", "));
  }
  return tables;
}

}  // namespace

ChoiceReport ChoiceTables(const Analysis& analysis) {
  ChoiceReport report;
  std::vector<const SeriesGroup*> first;
  for (const Case::Pass pass : PassesToChooseBy(analysis)) {
    for (const TableGroup& group : MainGroups(analysis, pass)) {
      std::vector<Table> tables = WithRows(ChoiceTablesOf(analysis, group));
      if (tables.empty()) continue;
      first.push_back(&group.front());
      report.first.push_back(std::move(tables.front()));
      for (size_t i = 1; i < tables.size(); ++i) report.more.push_back(std::move(tables[i]));
    }
  }
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY) continue;
    if (std::find(first.begin(), first.end(), &group.front()) != first.end()) continue;
    for (Table& table : WithRows(ChoiceTablesOf(analysis, group))) {
      report.more.push_back(std::move(table));
    }
  }
  return report;
}

}  // namespace report
}  // namespace tfb
