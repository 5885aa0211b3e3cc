// Makes a card for each technique: its title and citation, and its cost beside its own counterpart.

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "results/choices.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

// Returns "4 MiB" with the ratio to the counterpart, "0.50x", as the detail.
TableCell MemoryCell(const Analysis& analysis, const Series& series, int64_t tokens) {
  const std::optional<double> memory = MemoryAt(series, tokens);
  const Series* dense = analysis.DenseSeriesOf(series, tokens);
  const std::optional<double> dense_memory =
      dense == nullptr || dense == &series ? std::nullopt : MemoryAt(*dense, tokens);
  TableCell cell = FormatBytes(memory);
  if (memory.has_value() && dense_memory.value_or(0) > 0) {
    cell.detail = FormatRatio(*memory / *dense_memory);
  }
  return cell;
}

void AddColumns(TechniqueCard* card) {
  if (!card->numbers.columns.empty()) return;
  card->numbers.columns = {{"configuration"},  {"pass"},        {"mask"},        {"tokens", true},
                           {"speed-up", true}, {"error", true}, {"memory", true}};
}

// Returns `shared` where the series has the card's numbers there, else the longest such length.
int64_t LengthFor(const Series& series, int64_t shared) {
  if (series.speed_ups.count(shared) > 0) return shared;
  if (!series.speed_ups.empty()) return series.speed_ups.rbegin()->first;
  return series.run_ns.count(shared) > 0 ? shared : series.run_ns.rbegin()->first;
}

void AddRow(const Analysis& analysis, const TableGroup& group, const Series& series,
            const std::map<std::string, double>& errors, TechniqueCard* card) {
  const int64_t tokens = LengthFor(series, SharedLength(group));
  const auto error = errors.find(series.row_key);
  const auto speed_up = series.speed_ups.find(tokens);
  const Series* dense = analysis.DenseSeriesOf(series, tokens);
  AddColumns(card);
  card->numbers.AddRow(
      {SeriesName(series),
       analysis.passes().size() > 1 ? TableCell(std::string(Name(group.pass()))) : TableCell("-"),
       series.first().key().problem().causal() ? "causal" : "full", absl::StrCat(tokens),
       series.is_baseline || speed_up == series.speed_ups.end()
           ? TableCell("-")
           : SpeedUpCell(std::optional<SpeedUpInterval>(speed_up->second)),
       FormatError(error == errors.end() ? std::nullopt : std::optional<double>(error->second)),
       MemoryCell(analysis, series, tokens)},
      FamilyOf(series));
  if (!series.is_baseline && dense != nullptr) {
    card->counterpart = absl::StrCat("held against ", NameInText(*dense));
  }
}

// Makes the row of a technique without times, with the reason of its first case that did not run.
void AddReason(const Case& result, TechniqueCard* card) {
  card->numbers.columns = {{"configuration"}, {"no time", false, 20}};
  const Outcome& outcome = result.outcome();
  std::string reason = outcome.status() == Outcome::STATUS_OK ? "its runs were not timed as a whole"
                                                              : Printable(outcome.reason());
  if (reason.empty()) reason = std::string(Name(outcome.status()));
  card->numbers.AddRow({Printable(DisplayName(result)), reason},
                       Printable(result.technique().family()));
}

// Returns the scaling groups of the cards: those of MainGroups, or all where there are none.
std::vector<TableGroup> GroupsOf(const Analysis& analysis) {
  std::vector<TableGroup> groups;
  for (const Case::Pass pass : PassesToChooseBy(analysis)) {
    for (TableGroup& group : MainGroups(analysis, pass)) groups.push_back(std::move(group));
  }
  if (!groups.empty()) return groups;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() != Case::PURPOSE_ACCURACY) groups.push_back(group);
  }
  return groups;
}

}  // namespace

std::vector<TechniqueCard> TechniqueCards(const Analysis& analysis) {
  std::map<std::pair<std::string, std::string>, TechniqueCard> cards;  // by family and name
  const auto card_of = [&cards](const Case& result) {
    return &cards[{result.technique().family(), result.key().technique()}];
  };
  for (const Case* result : analysis.cases()) {
    TechniqueCard* card = card_of(*result);
    card->name = Printable(result->key().technique());
    if (card->title.empty()) card->title = Printable(result->technique().title());
    if (card->citation.empty()) card->citation = Printable(result->technique().citation());
  }
  for (const TableGroup& group : GroupsOf(analysis)) {
    const std::map<std::string, double> errors = ErrorsByRow(analysis, group);
    for (const Series* series : group.AllSeries()) {
      if (series->is_counterpart || series->run_ns.empty()) continue;
      AddRow(analysis, group, *series, errors, card_of(series->first()));
    }
  }
  for (const Case* result : analysis.cases()) {
    TechniqueCard* card = card_of(*result);
    const bool scaling = result->key().purpose() != Case::PURPOSE_ACCURACY;
    if (card->numbers.rows.empty() && scaling) AddReason(*result, card);
  }
  std::vector<TechniqueCard> in_order;
  for (auto& [name, card] : cards) {
    if (card.numbers.rows.empty()) continue;  // has only errors, which the accuracy tables show
    card.numbers = WithRows({card.numbers}).front();
    in_order.push_back(std::move(card));
  }
  return in_order;
}

}  // namespace report
}  // namespace tfb
