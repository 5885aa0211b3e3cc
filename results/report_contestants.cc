// Holds somebody else's code against the suite's own.

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/describe.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"
#include "results/statistics.h"

namespace tfb {
namespace report {
namespace {

// A column of times: the threads of a case, and its length.
using Column = std::pair<int, int64_t>;

// The contestant of one cell, of those that are right, beside the suite's own technique: the fastest of
// those that compute the same, or, where there is none, that approximate it.
struct Duel {
  const Series* ours = nullptr;
  const Series* theirs = nullptr;
  double ours_ns = 0, theirs_ns = 0;  // medians, of the samples side by side
  SpeedUpInterval speed_up;           // of ours over theirs
};

// Returns nothing where one of the two has no times.
std::optional<Duel> DuelOf(const Series& theirs, const Series& ours, int64_t tokens) {
  const auto of_theirs = theirs.by_tokens.find(tokens), of_ours = ours.by_tokens.find(tokens);
  if (of_theirs == theirs.by_tokens.end() || of_ours == ours.by_tokens.end()) return std::nullopt;
  std::vector<ComparedCase> compared;
  for (const Case* result : of_ours->second) {
    const auto same_seed = std::find_if(
        of_theirs->second.begin(), of_theirs->second.end(),
        [&](const Case* other) { return other->key().seed() == result->key().seed(); });
    compared.push_back(
        {result, same_seed == of_theirs->second.end() ? of_theirs->second.front() : *same_seed});
  }
  const SideBySide samples = SamplesSideBySide(compared);
  const std::optional<SpeedUpInterval> speed_up = SpeedUpOf(samples);
  if (!speed_up.has_value()) return std::nullopt;
  return Duel{&ours, &theirs, MedianOf(samples.technique_ns)->median,
              MedianOf(samples.dense_ns)->median, *speed_up};
}

// What one technique of the suite, with its options, is held against.
struct DuelRow {
  const Series* ours = nullptr;
  std::vector<const Series*> theirs;  // all that compute the same
  std::map<Column, Duel> duels;
};

const TechniqueDescription::Contestant& ContestantOf(const Series& series) {
  return series.first().technique().contestant();
}

// Tells whether the contestant computes what the suite's series computes, on as many threads.
bool Duels(const Series& theirs, const Series& ours) {
  const Case::Key& key = ours.first().key();
  return !ours.first().technique().has_contestant() &&
         key.technique() == ContestantOf(theirs).definition_technique() &&
         CanonicalOptions(key) == ContestantOf(theirs).definition_options_text() &&
         key.device() == theirs.first().key().device() &&
         key.threads() == theirs.first().key().threads();
}

// Tells whether `a` is rather shown than `b`.
bool StandsBefore(const Duel& a, const Duel& b) {
  const auto rank = [](const Duel& duel) {
    return std::make_pair(ContestantOf(*duel.theirs).approximates(), duel.speed_up.ratio);
  };
  return rank(a) < rank(b);
}

std::vector<DuelRow> DuelRows(const TableGroup& group) {
  std::vector<DuelRow> rows;
  const std::vector<const Series*> all = group.AllSeries();
  for (const Series* ours : all) {
    const std::string name = DisplayName(ours->first());
    for (const Series* theirs : all) {
      if (!theirs->first().technique().has_contestant() || !Duels(*theirs, *ours)) continue;
      // Rows differ in more than their threads.
      auto row = std::find_if(rows.begin(), rows.end(), [&](const DuelRow& one) {
        return DisplayName(one.ours->first()) == name;
      });
      if (row == rows.end()) row = rows.insert(rows.end(), DuelRow{ours, {}, {}});
      row->theirs.push_back(theirs);
      for (const auto& [tokens, cases] : theirs->by_tokens) {
        if (WorstStatus(cases) != Outcome::STATUS_OK) continue;
        const std::optional<Duel> next = DuelOf(*theirs, *ours, tokens);
        if (!next.has_value()) continue;
        Duel& duel = row->duels[{ours->first().key().threads(), tokens}];
        if (duel.theirs == nullptr || StandsBefore(*next, duel)) duel = *next;
      }
    }
  }
  return rows;
}

// Returns what became of the contestants in a cell without times.
TableCell UntimedCell(const DuelRow& row, const Column& column) {
  std::set<std::string> outcomes;
  for (const Series* theirs : row.theirs) {
    const auto cases = theirs->by_tokens.find(column.second);
    if (theirs->first().key().threads() != column.first || cases == theirs->by_tokens.end()) {
      continue;
    }
    const Outcome::Status status = WorstStatus(cases->second);
    if (status != Outcome::STATUS_OK) outcomes.insert(StatusCell(status).text);
  }
  if (outcomes.empty()) return "-";
  return {absl::StrJoin(outcomes, ", "), Emphasis::kFaint};
}

// Returns the names of the contestants that were the fastest in some cell, or of all where none was.
std::string NamesOfTheirs(const DuelRow& row) {
  std::vector<std::string> names;
  const auto add = [&](const Series& theirs) {
    const std::string name = SeriesName(theirs);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const auto& [column, duel] : row.duels) add(*duel.theirs);
  if (row.duels.empty()) {
    for (const Series* theirs : row.theirs) add(*theirs);
  }
  return absl::StrJoin(names, ", ");
}

TableCell RatioCell(const Duel& duel, const TimeUnit& unit) {
  TableCell cell = SpeedUpCell(duel.speed_up);
  cell.detail = absl::StrCat(FormatSignificant(duel.ours_ns / unit.ns), " : ",
                             FormatSignificant(duel.theirs_ns / unit.ns));
  return cell;
}

// Returns the largest error of the series' cases against the definition.
std::string WorstError(const std::set<const Series*>& all) {
  std::optional<double> worst;
  for (const Series* series : all) {
    for (const Case* result : series->cases) {
      const ErrorMeasure& error = result->outcome().against_definition();
      if (!error.has_max_abs_over_max_value()) continue;
      worst = std::max(worst.value_or(0), error.max_abs_over_max_value());
    }
  }
  return worst.has_value() ? FormatError(*worst) : "-";
}

Table DuelTable(const TableGroup& group, const std::vector<DuelRow>& rows) {
  std::set<Column> columns;
  std::set<int> threads;
  for (const DuelRow& row : rows) {
    for (const Series* theirs : row.theirs) {
      threads.insert(theirs->first().key().threads());
      for (const auto& [tokens, cases] : theirs->by_tokens) {
        columns.insert({theirs->first().key().threads(), tokens});
      }
    }
  }
  Table table;
  const TimeUnit unit = UnitOf(group);
  table.title =
      absl::StrCat(GroupTitle("Ours and theirs, how many times as fast ours is", group),
                   threads.size() == 1 ? absl::StrCat(", threads ", *threads.begin()) : "");
  table.columns = {{"technique", false, kLeastNameWidth},
                   {"fastest of theirs", false, kLeastNameWidth}};
  for (const auto& [count, tokens] : columns) {
    const std::string of_threads =
        threads.size() == 1 ? "" : absl::StrCat(count, count == 1 ? " thread" : " threads", "\n");
    table.columns.push_back({absl::StrCat(of_threads, tokens), true, 0, 1});
  }
  table.columns.push_back({"error\nof ours", true});
  table.columns.push_back({"error\nof theirs", true});
  for (const DuelRow& row : rows) {
    std::set<const Series*> ours, theirs;
    for (const auto& [column, duel] : row.duels) {
      ours.insert(duel.ours);
      theirs.insert(duel.theirs);
    }
    std::vector<TableCell> cells = {Printable(DisplayName(row.ours->first())), NamesOfTheirs(row)};
    for (const Column& column : columns) {
      const auto duel = row.duels.find(column);
      cells.push_back(duel == row.duels.end() ? UntimedCell(row, column)
                                              : RatioCell(duel->second, unit));
    }
    cells.emplace_back(WorstError(ours));
    cells.emplace_back(WorstError(theirs));
    table.AddRow(std::move(cells), FamilyOf(*row.ours));
  }
  table.notes.push_back(absl::StrCat("ours : theirs, ", unit.name,
                                     " of a warm run; errors: the largest against the definition, "
                                     "over the largest value"));
  return table;
}

}  // namespace

std::vector<Table> DuelTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY) continue;
    const std::vector<DuelRow> rows = DuelRows(group);
    if (!rows.empty()) tables.push_back(DuelTable(group, rows));
  }
  return tables;
}

std::vector<Table> ContestantTables(const Analysis& analysis) {
  Table table;
  table.title = "Contestants";
  table.columns = {{"contestant"}, {"code", false, 20}, {"held against"}, {"with", false, 40}};
  std::set<std::vector<std::string>> seen;
  for (const Case* result : analysis.cases()) {
    if (!result->technique().has_contestant()) continue;
    const TechniqueDescription::Contestant& contestant = result->technique().contestant();
    std::vector<std::string> with;
    for (const auto& [name, value] :
         std::map<std::string, std::string>(contestant.about().begin(), contestant.about().end())) {
      with.push_back(Printable(absl::StrCat(name, " ", value)));
    }
    const std::vector<std::string> row = {
        Printable(result->key().technique()), Printable(contestant.file()),
        Printable(absl::StrCat(contestant.definition(),
                               contestant.approximates() ? " (approximates it)" : "")),
        absl::StrJoin(with, ", ")};
    if (!seen.insert(row).second) continue;
    table.rows.emplace_back(row.begin(), row.end());
  }
  return WithRows({table});
}

}  // namespace report
}  // namespace tfb
