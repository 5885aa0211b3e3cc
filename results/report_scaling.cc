// Makes the tables over lengths: times, and how attention changes when sequences grow.

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "results/choices.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

// The relative half-width of an interval beyond which a time is marked as unsteady.
constexpr double kUnsteadyHalfWidth = 0.05;
// The excess of the fitted growth over the expected one beyond which it is marked.
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
  TableCell cell = {
      absl::StrCat(FormatSignificant(time->second.median / unit.ns), unsteady ? "~" : ""),
      status == Outcome::STATUS_FAILED ? Emphasis::kBad : Emphasis::kNone};
  const auto speed_up = series.speed_ups.find(tokens);
  if (speed_up != series.speed_ups.end() && !series.is_baseline) {
    const TableCell ratio = SpeedUpCell(speed_up->second);
    cell.detail = ratio.text;
    cell.detail_emphasis = ratio.emphasis;
  }
  return cell;
}

TableCell GrowthCell(const Series& series) {
  TechniqueDescription technique = series.first().technique();
  if (series.is_counterpart) {  // the expected growth is that of other options
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

// Returns the larger of the two shares, which limits the technique.
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

// The marks that the notes of a scaling table have to explain.
struct ScalingMarks {
  std::set<std::pair<int64_t, int64_t>> fitted;  // lengths
  bool counterpart = false, shorter = false, above = false, bandwidth = false;
};

std::string CallsText(Case::Pass pass) {
  if (pass == Case::PASS_BACKWARD) return "backward passes";
  if (pass == Case::PASS_TRAINING) return "training steps, a run and its backward pass,";
  return "runs";
}

std::string ScalingNotes(const TableGroup& group, const ScalingMarks& marks) {
  std::vector<std::string> notes = {
      absl::StrCat("medians of warm ", CallsText(group.pass()), " without setup")};
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
  const bool keeps = group.pass() != Case::PASS_FORWARD;
  notes.push_back(keeps ? "memory: workspace, parameters and what is kept"
                        : "memory: workspace and parameters");
  if (keeps) notes.push_back("kept: by a run for its backward pass, with the output");
  if (marks.bandwidth) notes.push_back("bw: of the measured bandwidth, else of arithmetic");
  return absl::StrJoin(notes, "; ");
}

// Returns the speed-up at `shared` or, where it is unknown, at the longest length where it is
// known, with that length.
TableCell SharedSpeedUpCell(const Series& series, int64_t shared, ScalingMarks* marks) {
  if (series.is_baseline || series.speed_ups.empty()) return "-";
  auto known = series.speed_ups.find(shared);
  if (known == series.speed_ups.end()) known = std::prev(series.speed_ups.end());
  const auto& [tokens, speed_up] = *known;
  TableCell cell = SpeedUpCell(speed_up);
  if (tokens != shared) {
    absl::StrAppend(&cell.text, " (", tokens, ")");
    marks->shorter = true;
  }
  return cell;
}

// Returns the number of rows at the top that others are compared with.
int ReferenceRows(const std::vector<Row>& rows) {
  int count = 0;
  for (const Row& row : rows) {
    const bool first =
        row.series->is_common_baseline &&
        row.series->first().key().technique() == rows.front().series->first().key().technique();
    if (!first) break;
    ++count;
  }
  return count;
}

// Other load on the machine while the group's cases were measured, as shares.
struct OtherLoad {
  double others = 0;  // core time of other processes over time: 1 is one core
  double stolen = 0;  // core time that other guests of the host got, over that of all cores
  bool oversubscribed = false;
};

OtherLoad LoadOf(const TableGroup& group) {
  double others = 0, others_seconds = 0, stolen = 0, stolen_seconds = 0;
  OtherLoad sum;
  for (const Series* series : group.AllSeries()) {
    for (const Case* result : series->cases) {
      const MachineLoad& load = result->outcome().machine_load();
      if (!(load.observed_seconds() > 0)) continue;
      if (load.has_other_core_seconds()) {
        others += load.other_core_seconds();
        others_seconds += load.observed_seconds();
      }
      if (load.has_stolen_core_seconds()) {
        stolen += load.stolen_core_seconds();
        stolen_seconds += load.observed_seconds() * std::max(1, load.cores());
      }
      sum.oversubscribed =
          sum.oversubscribed || (load.usable_cores() > 0 && load.threads() > load.usable_cores());
    }
  }
  if (others_seconds > 0) sum.others = others / others_seconds;
  if (stolen_seconds > 0) sum.stolen = stolen / stolen_seconds;
  return sum;
}

// Returns an empty text where the load was small: below a twentieth of a core, and below 1 % stolen
// time, times change by less than their noise.
std::string LoadNote(const TableGroup& group) {
  constexpr double kLeastOthers = 0.05, kLeastStolen = 0.01;
  const OtherLoad load = LoadOf(group);
  std::vector<std::string> parts;
  if (load.others >= kLeastOthers) {
    parts.push_back(
        absl::StrCat(FormatPercent(load.others), " of a core taken by other processes"));
  }
  if (load.stolen >= kLeastStolen) {
    parts.push_back(
        absl::StrCat(FormatPercent(load.stolen), " of all cores stolen by other guests"));
  }
  if (load.oversubscribed) parts.push_back("more threads than usable cores");
  if (parts.empty()) return "";
  return absl::StrCat("other load: ", absl::StrJoin(parts, ", "), ", during these measurements");
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
  // In a sweep that reached its time limit few techniques have the longest length.
  const int64_t shared = SharedLength(group) > 0 ? SharedLength(group) : *lengths.rbegin();

  const RowHead head(group, false);
  head.AddColumns(&table);
  for (const int64_t tokens : lengths) {
    table.columns.push_back({absl::StrCat(tokens), true, 0, 1});
  }
  table.columns.push_back({"growth\n(expected)", true});
  table.columns.push_back({absl::StrCat("speed-up\nat ", shared), true, 0, 2});
  table.columns.push_back({"faster than\ndense from", true, 0, 2});
  table.columns.push_back({absl::StrCat("memory\nat ", shared), true});
  table.columns.push_back({absl::StrCat("kept\nat ", shared), true});
  table.columns.push_back({"of\npeak", true});
  const bool has_bits = AnyHas(group, BitsPerByte);
  if (has_bits) table.columns.push_back({absl::StrCat("bits per byte\nat ", shared), true});

  table.reference_rows = ReferenceRows(rows);
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
    cells.push_back(SharedSpeedUpCell(series, shared, &marks));
    cells.push_back(series.crossover.has_value() ? CrossoverCell(*series.crossover) : "-");
    const auto at_shared = series.by_tokens.find(shared);
    cells.push_back(FormatBytes(MemoryAt(series, shared)));
    cells.push_back(at_shared == series.by_tokens.end()
                        ? TableCell("-")
                        : FormatBytes(WorstValue(at_shared->second, KeptBytes)));
    cells.push_back(series.longest() == nullptr ? "-" : PeakCell(analysis, *series.longest()));
    marks.bandwidth = marks.bandwidth || cells.back().text.find("bw") != std::string::npos;
    if (has_bits) {
      cells.push_back(at_shared == series.by_tokens.end() ? TableCell("-")
                                                          : BitsPerByteCell(at_shared->second));
    }
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  table.notes.push_back(ScalingNotes(group, marks));
  const std::string load = LoadNote(group);
  if (!load.empty()) table.notes.push_back(load);
  return table;
}

// Returns "0.88", or "0.88 (0.21)" where attention within the shorter sequence changed, too.
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
