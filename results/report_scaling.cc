// Tables over lengths: times, and how attention changes when sequences grow.

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "results/reader.h"
#include "results/render.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

// Half the interval over the median beyond which a time is marked as unsteady.
constexpr double kUnsteadyHalfWidth = 0.05;
// Fitted growth beyond the expected one that is worth a mark.
constexpr double kGrowthMargin = 0.25;

TableCell LengthCell(const Series& series, int64_t tokens, const TimeUnit& unit) {
  const auto time = series.run_ns.find(tokens);
  const auto cases = series.by_tokens.find(tokens);
  if (cases == series.by_tokens.end()) return "-";
  const Outcome::Status status = WorstStatus(cases->second);
  if (time == series.run_ns.end()) {
    return status == Outcome::STATUS_OK ? TableCell("-") : StatusCell(status);
  }
  const bool unsteady = time->second.relative_half_width() > kUnsteadyHalfWidth;
  return {absl::StrCat(FormatSignificant(time->second.median / unit.ns), unsteady ? "~" : ""),
          status == Outcome::STATUS_FAILED ? Emphasis::kBad : Emphasis::kNone};
}

TableCell GrowthCell(const Series& series) {
  TechniqueDescription technique = series.first().technique();
  if (series.is_counterpart) {  // what is expected is said of other options
    technique.clear_expected_growth();
    technique.clear_expected_growth_text();
  }
  std::string expected = Printable(technique.expected_growth_text());
  if (expected.empty() && technique.has_expected_growth()) {
    expected = absl::StrFormat("%g", technique.expected_growth());
  }
  if (!series.growth.has_value()) {
    return expected.empty() ? "-" : absl::StrCat("- (", expected, ")");
  }
  const double fitted = series.growth->exponent;
  const bool above =
      technique.has_expected_growth() && fitted - 2 * series.growth->standard_error.value_or(0) >
                                             technique.expected_growth() + kGrowthMargin;
  return {absl::StrFormat("%.2f", fitted) + (above ? "!" : "") +
              (expected.empty() ? "" : absl::StrCat(" (", expected, ")")),
          above ? Emphasis::kBad : Emphasis::kNone};
}

TableCell CrossoverCell(const Series& series) {
  if (series.is_baseline || !series.crossover.has_value()) return "-";
  const Crossover& crossover = *series.crossover;
  const std::string tokens = FormatSignificant(crossover.tokens, crossover.tokens < 100 ? 2 : 3);
  switch (crossover.kind) {
    case Crossover::Kind::kAt:
      return {absl::StrCat(tokens, crossover.changes > 1 ? " (last)" : ""), Emphasis::kGood};
    case Crossover::Kind::kAlways:
      return {absl::StrCat("<= ", tokens), Emphasis::kGood};
    case Crossover::Kind::kNever:
      return {absl::StrCat("not to ", tokens), Emphasis::kFaint};
    case Crossover::Kind::kOnlyBelow:
      return {absl::StrCat("only below ", tokens), Emphasis::kFaint};
  }
  return "-";
}

// The larger of the two shares: what limits the technique, if anything does.
std::string PeakCell(const Analysis& analysis, const Case& result) {
  const Environment& environment = analysis.EnvironmentOf(result);
  const std::optional<double> compute = ShareOfComputePeak(result, environment);
  const std::optional<double> bandwidth = ShareOfBandwidthPeak(result, environment);
  if (bandwidth.has_value() && *bandwidth > compute.value_or(0)) {
    return absl::StrCat(FormatPercent(bandwidth), " bw");
  }
  return FormatPercent(compute);
}

bool ShowsInScaling(const Series& series) {
  return std::any_of(series.cases.begin(), series.cases.end(), [](const Case* result) {
    const Timing& timing = result->outcome().timing();
    return Ran(*result) && (timing.run_ns_size() > 0 || timing.segments_size() == 0);
  });
}

// The longest length at which the speed-up is known.
std::optional<std::pair<int64_t, double>> LongestSpeedUp(const Analysis& analysis,
                                                         const Series& series) {
  if (series.is_baseline) return std::nullopt;
  for (auto time = series.run_ns.rbegin(); time != series.run_ns.rend(); ++time) {
    const std::optional<double> speed_up = analysis.SpeedUpAt(series, time->first);
    if (speed_up.has_value()) return std::make_pair(time->first, *speed_up);
  }
  return std::nullopt;
}

// What the notes of a scaling table have to explain.
struct ScalingMarks {
  std::set<std::pair<int64_t, int64_t>> fitted;  // lengths
  bool counterpart = false, shorter = false, above = false, bandwidth = false;
};

std::string ScalingNotes(const TableGroup& group, const ScalingMarks& marks) {
  std::vector<std::string> notes = {"medians of warm runs without setup"};
  if (marks.fitted.size() == 1) {
    notes.push_back(absl::StrCat("growth: exponent from ", marks.fitted.begin()->first, " to ",
                                 marks.fitted.begin()->second, " ", LengthName(group)));
  } else if (!marks.fitted.empty()) {
    notes.push_back("growth: exponent over the longer half of the lengths");
  }
  if (marks.above) notes.push_back("!: grows faster than expected");
  if (marks.shorter) {
    notes.push_back(absl::StrCat("x (n): at n ", LengthName(group), ", the most that both ran"));
  }
  if (marks.counterpart) {
    notes.push_back("a technique with a dense counterpart of its own below it is compared with it");
  }
  notes.push_back("memory: workspace and parameters");
  if (marks.bandwidth) notes.push_back("bw: of the measured bandwidth, else of arithmetic");
  return absl::StrJoin(notes, "; ");
}

Table ScalingTable(const Analysis& analysis, const TableGroup& group) {
  Table table;
  const TimeUnit unit = UnitOf(group);
  table.title = GroupTitle(absl::StrCat("Scaling, ", unit.name, " at ", LengthName(group)), group);
  std::vector<Row> rows = RowsOf(group, true);
  rows.erase(std::remove_if(rows.begin(), rows.end(),
                            [](const Row& row) { return !ShowsInScaling(*row.series); }),
             rows.end());
  if (rows.empty()) return table;
  std::set<int64_t> lengths;
  for (const Row& row : rows) {
    for (const auto& [tokens, cases] : row.series->by_tokens) lengths.insert(tokens);
  }
  const int64_t longest = *lengths.rbegin();

  const RowHead head(group, false);
  head.AddColumns(&table);
  for (const int64_t tokens : lengths) table.columns.push_back({absl::StrCat(tokens), true});
  table.columns.push_back({"growth\n(expected)", true});
  table.columns.push_back({absl::StrCat("speed-up\nat ", longest), true});
  table.columns.push_back({"faster than\ndense from", true});
  table.columns.push_back({absl::StrCat("memory\nat ", longest), true});
  table.columns.push_back({"of\npeak", true});
  const bool has_bits = AnyHas(group, BitsPerByte);
  if (has_bits) table.columns.push_back({absl::StrCat("bits per byte\nat ", longest), true});

  ScalingMarks marks;
  for (const Row& row : rows) {
    const Series& series = *row.series;
    std::vector<TableCell> cells = head.Cells(row);
    for (const int64_t tokens : lengths) cells.push_back(LengthCell(series, tokens, unit));
    cells.push_back(GrowthCell(series));
    if (series.growth.has_value()) {
      marks.fitted.emplace(series.growth->from_tokens, series.growth->to_tokens);
    }
    marks.above = marks.above || cells.back().text.find('!') != std::string::npos;
    marks.counterpart = marks.counterpart || series.is_counterpart;
    TableCell speed_up = "-";
    if (const auto known = LongestSpeedUp(analysis, series); known.has_value()) {
      speed_up = {FormatRatio(known->second),
                  known->second > 1 ? Emphasis::kGood : Emphasis::kNone};
      if (known->first != longest) {
        absl::StrAppend(&speed_up.text, " (", known->first, ")");
        marks.shorter = true;
      }
    }
    cells.push_back(speed_up);
    cells.push_back(CrossoverCell(series));
    const auto at_longest = series.by_tokens.find(longest);
    cells.push_back(FormatBytes(at_longest == series.by_tokens.end()
                                    ? std::nullopt
                                    : WorstValue(at_longest->second, [](const Case& result) {
                                        return WorkingMemoryBytes(result.outcome());
                                      })));
    cells.push_back(series.longest() == nullptr ? "-" : PeakCell(analysis, *series.longest()));
    marks.bandwidth = marks.bandwidth || cells.back().text.find("bw") != std::string::npos;
    if (has_bits) {
      cells.push_back(at_longest == series.by_tokens.end() ? TableCell("-")
                                                           : BitsPerByteCell(at_longest->second));
    }
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  table.notes.push_back(ScalingNotes(group, marks));
  return table;
}

// "0.88", or "0.88 (0.21)" where attention among the shorter sequence's tokens changed too.
TableCell ExtrapolationCell(const std::vector<const Case*>& cases) {
  const std::optional<double> reshape = MedianValue(cases, ExtrapolationReshape);
  std::string text = FormatError(MedianValue(cases, ExtrapolationChange));
  constexpr double kRounding = 1e-9;
  if (reshape.value_or(0) > kRounding) absl::StrAppend(&text, " (", FormatError(reshape), ")");
  return text;
}

Table ExtrapolationTable(const TableGroup& group) {
  Table table;
  table.title = GroupTitle(
      absl::StrCat("Extrapolation, change of attention from an eighth of the tokens to all, at ",
                   LengthName(group)),
      group);
  std::vector<Row> rows = RowsOf(group, true);
  rows.erase(std::remove_if(rows.begin(), rows.end(),
                            [](const Row& row) {
                              return !MedianValue(row.cases, ExtrapolationChange).has_value();
                            }),
             rows.end());
  std::set<int64_t> lengths;
  for (const Row& row : rows) {
    for (const auto& [tokens, cases] : row.series->by_tokens) lengths.insert(tokens);
  }
  const RowHead head(group, true);
  head.AddColumns(&table);
  for (const int64_t tokens : lengths) table.columns.push_back({absl::StrCat(tokens), true});
  for (const Row& row : rows) {
    std::vector<TableCell> cells = head.Cells(row);
    for (const int64_t tokens : lengths) {
      const auto found = row.series->by_tokens.find(tokens);
      cells.push_back(found == row.series->by_tokens.end() ? TableCell("-")
                                                           : ExtrapolationCell(found->second));
    }
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  table.notes.push_back(
      "of the last tokens, 0: none to 1: all of it; in brackets what changes among the keys that "
      "both lengths have");
  return table;
}

}  // namespace

std::vector<Table> ScalingTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY) continue;
    tables.push_back(ScalingTable(analysis, group));
  }
  return WithRows(tables);
}

std::vector<Table> ExtrapolationTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY || !AnyHas(group, ExtrapolationChange)) continue;
    tables.push_back(ExtrapolationTable(group));
  }
  return WithRows(tables);
}
}  // namespace report
}  // namespace tfb
