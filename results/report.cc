#include "results/report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "results/reader.h"
#include "results/render.h"

namespace tfb {
namespace {

constexpr int kLeastNameWidth = 16;
constexpr int kWidestNameInText = 60;  // half of a usual line
// Half the interval over the median beyond which a time is marked as unsteady.
constexpr double kUnsteadyHalfWidth = 0.05;
// Fitted growth beyond the expected one that is worth a mark.
constexpr double kGrowthMargin = 0.25;
// What an exponent over the segments of a stream has to rest on: segments whose times are known to
// +-10 % with 95 %, and the largest standard error of the exponent. With 16 segments FitGrowth takes
// 8 to fit, over a factor of two in the tokens before: 10 % in time is 0.14 in the exponent.
constexpr size_t kFewestSegments = 16;
constexpr double kSegmentHalfWidth = 0.1;
constexpr double kSegmentGrowthError = 0.1;
// Members that a choice between techniques needs to be worth a table beside the first one.
constexpr size_t kFewestFurtherChoices = 3;

bool Ran(const Case& result) {
  return result.outcome().status() != Outcome::STATUS_SKIPPED &&
         result.outcome().status() != Outcome::STATUS_UNSUPPORTED;
}

// The worst status of cases that share a place: what a reader must not overlook.
Outcome::Status WorstStatus(const std::vector<const Case*>& cases) {
  const auto rank = [](Outcome::Status status) {
    switch (status) {
      case Outcome::STATUS_FAILED:
        return 6;
      case Outcome::STATUS_OUT_OF_MEMORY:
        return 5;
      case Outcome::STATUS_TIMEOUT:
        return 4;
      case Outcome::STATUS_UNSPECIFIED:
        return 3;
      case Outcome::STATUS_UNSUPPORTED:
        return 2;
      case Outcome::STATUS_SKIPPED:
        return 1;
      default:
        return 0;
    }
  };
  Outcome::Status worst = Outcome::STATUS_OK;
  for (const Case* result : cases) {
    if (rank(result->outcome().status()) > rank(worst)) worst = result->outcome().status();
  }
  return worst;
}

TableCell StatusCell(Outcome::Status status) {
  switch (status) {
    case Outcome::STATUS_OK:
      return {"ok", Emphasis::kGood};
    case Outcome::STATUS_FAILED:
      return {"FAILED", Emphasis::kBad};
    case Outcome::STATUS_TIMEOUT:
      return {"timeout", Emphasis::kBad};
    case Outcome::STATUS_OUT_OF_MEMORY:
      return {"no memory", Emphasis::kBad};
    default:
      return {std::string(Name(status)), Emphasis::kFaint};
  }
}

// A row of a table.
struct Row {
  const Series* series = nullptr;  // whose name and description stand for all
  std::vector<const Case*> cases;
  bool causal = false;
  std::string layer;  // as it is shown; empty where the row holds several
};

// What one table holds: groups of an analysis that differ in nothing but layer and mask.
struct TableGroup {
  std::vector<const SeriesGroup*> groups;
  const SeriesGroup& front() const { return *groups.front(); }
  Case::Purpose purpose() const { return front().purpose; }
  const Case& first() const { return front().first(); }
  std::vector<const Series*> AllSeries() const {
    std::vector<const Series*> all;
    for (const SeriesGroup* group : groups) {
      for (const Series& series : group->series) all.push_back(&series);
    }
    return all;
  }
};

std::vector<TableGroup> TableGroups(const Analysis& analysis) {
  std::vector<TableGroup> tables;
  std::map<std::string, size_t> places;
  for (const SeriesGroup& group : analysis.groups()) {
    const auto [place, added] = places.emplace(group.fold_key, tables.size());
    if (added) tables.emplace_back();
    tables[place->second].groups.push_back(&group);
  }
  return tables;
}

// "layer7" as "7": the word stands before it already.
std::string ShortLayer(absl::string_view layer) {
  const std::string printable = Printable(layer);
  absl::string_view rest = printable;
  if (!absl::ConsumePrefix(&rest, "layer") || rest.empty()) return printable;
  const bool number = std::all_of(rest.begin(), rest.end(), absl::ascii_isdigit);
  return number ? std::string(rest) : printable;
}

std::vector<std::string> LayersOf(const std::vector<const Case*>& cases) {
  std::vector<std::string> layers;  // in the order of the file
  for (const Case* result : cases) {
    const std::string layer = ShortLayer(result->key().input().layer());
    if (!layer.empty() && std::find(layers.begin(), layers.end(), layer) == layers.end()) {
      layers.push_back(layer);
    }
  }
  return layers;
}

std::vector<std::string> LayersOf(const TableGroup& group) {
  std::vector<const Case*> cases;
  for (const Series* series : group.AllSeries()) {
    cases.insert(cases.end(), series->cases.begin(), series->cases.end());
  }
  return LayersOf(cases);
}

// In the order in which they are shown: all layers of an input in one row, or one each.
std::vector<Row> RowsOf(const TableGroup& group, bool by_layer) {
  std::vector<Row> rows;
  std::map<std::string, size_t> row_places;     // by everything that tells rows apart
  std::map<std::string, size_t> series_places;  // by technique, options and device
  for (const Series* series : group.AllSeries()) {
    series_places.emplace(series->row_key, series_places.size());
    const Case& first = series->first();
    const bool causal = first.key().problem().causal();
    const std::string layer = by_layer ? first.key().input().layer() : "";
    const auto [place, added] =
        row_places.emplace(absl::StrCat(series->row_key, "\n", causal, "\n", layer), rows.size());
    if (added) rows.push_back({series, {}, causal, ShortLayer(layer)});
    Row& row = rows[place->second];
    row.cases.insert(row.cases.end(), series->cases.begin(), series->cases.end());
  }
  std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
    if (StandsBefore(*a.series, *b.series)) return true;
    if (StandsBefore(*b.series, *a.series)) return false;
    const auto place = [&](const Row& row) {
      return std::make_pair(series_places.at(row.series->row_key), row.causal);
    };
    return place(a) < place(b);
  });
  return rows;
}

// "cpu", or "cpu x2" where a table has several numbers of threads.
std::string DeviceName(const TableGroup& group, const Series& series) {
  const Case::Key& key = series.first().key();
  std::set<int> threads;
  for (const Series* other : group.AllSeries()) {
    if (other->first().key().device() == key.device()) {
      threads.insert(other->first().key().threads());
    }
  }
  const std::string device(Name(key.device()));
  return threads.size() > 1 ? absl::StrCat(device, " x", key.threads()) : device;
}

// Whether a table's rows differ in device or number of threads.
bool HasSeveralDevices(const TableGroup& group) {
  std::set<std::string> names;
  for (const Series* series : group.AllSeries()) names.insert(DeviceName(group, *series));
  return names.size() > 1;
}

std::string RowName(const Series& series, const std::vector<const Case*>& cases) {
  std::set<uint64_t> seeds;
  for (const Case* result : cases) seeds.insert(result->key().seed());
  const std::string name = Printable(series.name);
  return seeds.size() > 1 ? absl::StrCat(name, " (", seeds.size(), " seeds)") : name;
}
std::string SeriesName(const Series& series) { return RowName(series, series.cases); }
std::string FamilyOf(const Series& series) {
  return Printable(series.first().technique().family());
}

// The columns that say what a row is, of which a table has those that tell its rows apart.
class RowHead {
 public:
  RowHead(const TableGroup& group, bool by_layer)
      : group_(group),
        layers_(LayersOf(group).size()),
        by_layer_(by_layer && layers_ > 0),
        with_mask_(group.purpose() == Case::PURPOSE_ACCURACY),
        with_device_(HasSeveralDevices(group)) {}

  void AddColumns(Table* table) const {
    table->columns.push_back({"technique", false, kLeastNameWidth});
    if (with_mask_) table->columns.push_back({"mask"});
    if (by_layer_) table->columns.push_back({"layer"});
    if (with_device_) table->columns.push_back({"device"});
    table->repeated_columns = static_cast<int>(table->columns.size());
  }
  std::vector<TableCell> Cells(const Row& row) const {
    std::string name = RowName(*row.series, row.cases);
    const size_t layers = LayersOf(row.cases).size();
    if (!by_layer_ && layers < layers_) {
      absl::StrAppend(&name, " (", layers, " of ", layers_, " layers)");
    }
    std::vector<TableCell> cells = {name};
    if (with_mask_) cells.emplace_back(row.causal ? "causal" : "full");
    if (by_layer_) cells.emplace_back(row.layer.empty() ? "-" : row.layer);
    if (with_device_) cells.emplace_back(DeviceName(group_, *row.series));
    return cells;
  }

 private:
  const TableGroup& group_;
  const size_t layers_;
  const bool by_layer_;
  const bool with_mask_;
  const bool with_device_;
};

using CaseNumber = std::function<std::optional<double>(const Case&)>;

std::vector<double> Values(const std::vector<const Case*>& cases, const CaseNumber& number) {
  std::vector<double> values;
  for (const Case* result : cases) {
    const std::optional<double> value = number(*result);
    if (value.has_value()) values.push_back(*value);
  }
  return values;
}

std::optional<double> MedianValue(const std::vector<const Case*>& cases, const CaseNumber& number) {
  const std::vector<double> values = Values(cases, number);
  if (values.empty()) return std::nullopt;
  // A NaN is no number to take a median of, and must not vanish either.
  for (const double value : values) {
    if (std::isnan(value)) return value;
  }
  return MedianOf(values)->median;
}

std::optional<double> WorstValue(const std::vector<const Case*>& cases, const CaseNumber& number) {
  std::optional<double> worst;
  for (const double value : Values(cases, number)) {
    if (std::isnan(value)) return value;
    if (!worst.has_value() || value > *worst) worst = value;
  }
  return worst;
}

std::optional<double> DefinitionError(const Case& result) {
  if (!result.outcome().has_against_definition()) return std::nullopt;
  return BoundedValue(result.outcome().against_definition());
}

// Relative where it is known: the one number to compare techniques by.
std::optional<double> DenseError(const Case& result) {
  if (!result.outcome().has_against_dense()) return std::nullopt;
  const ErrorMeasure& error = result.outcome().against_dense();
  if (error.has_relative_frobenius()) return error.relative_frobenius();
  return BoundedValue(error);
}

std::optional<double> DefinitionBound(const Case& result) {
  const ErrorMeasure& error = result.outcome().against_definition();
  return error.has_bound() ? std::optional<double>(error.bound()) : std::nullopt;
}

std::optional<double> DenseErrorRatio(const Case& result) {
  const BoundedNumber& ratio = result.outcome().ratio_to_dense_error();
  return ratio.has_value() ? std::optional<double>(ratio.value()) : std::nullopt;
}

std::optional<double> LogSumExpError(const Case& result) {
  const BoundedNumber& error = result.outcome().log_sum_exp_error();
  return error.has_value() ? std::optional<double>(error.value()) : std::nullopt;
}

std::optional<double> KeptMass(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_kept_mass() ? std::optional<double>(outcome.kept_mass()) : std::nullopt;
}

// Of what a technique or the harness reports by name.
std::optional<double> Statistic(const Case& result, absl::string_view name) {
  const auto& statistics = result.outcome().statistics();
  const auto found = statistics.find(std::string(name));
  return found == statistics.end() ? std::nullopt : std::optional<double>(found->second);
}

// harness/language_model.h defines it.
std::optional<double> BitsPerByte(const Case& result) { return Statistic(result, "bits_per_byte"); }
// harness/extrapolation.h defines the two.
std::optional<double> ExtrapolationChange(const Case& result) {
  return Statistic(result, "extrapolation_change");
}
std::optional<double> ExtrapolationReshape(const Case& result) {
  return Statistic(result, "extrapolation_reshape");
}

std::optional<double> KlDivergence(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_kl_divergence() ? std::optional<double>(outcome.kl_divergence())
                                     : std::nullopt;
}

std::optional<double> Recall(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_recall_top_k() ? std::optional<double>(outcome.recall_top_k()) : std::nullopt;
}

bool AnyHas(const TableGroup& group, const CaseNumber& number) {
  for (const Series* series : group.AllSeries()) {
    if (!Values(series->cases, number).empty()) return true;
  }
  return false;
}

// "2e-7 (<= 2e-6)": of several cases the one that is worst against its bound.
TableCell BoundedCell(const std::vector<const Case*>& cases, const CaseNumber& number,
                      const CaseNumber& bound) {
  std::optional<double> worst_value, worst_limit;
  double worst = -1;
  for (const Case* result : cases) {
    const std::optional<double> value = number(*result), limit = bound(*result);
    if (!value.has_value() || !limit.has_value()) continue;
    if (!(*value / *limit <= worst)) {  // a NaN is worse than any number
      worst_value = value;
      worst_limit = limit;
      worst = std::isnan(*value) ? std::numeric_limits<double>::infinity() : *value / *limit;
    }
  }
  if (!worst_value.has_value()) return FormatError(WorstValue(cases, number));
  return {absl::StrCat(FormatError(worst_value), " (<= ", FormatBound(worst_limit), ")"),
          *worst_value <= *worst_limit ? Emphasis::kNone : Emphasis::kBad};
}

std::string RecallHeader(const TableGroup& group) {
  std::set<int> ks;
  for (const Series* series : group.AllSeries()) {
    for (const Case* result : series->cases) {
      if (result->outcome().has_recall_top_k()) ks.insert(result->outcome().recall_k());
    }
  }
  return ks.size() == 1 && *ks.begin() > 0 ? absl::StrCat("recall,\ntop ", *ks.begin())
                                           : "recall,\ntop k";
}

// What all rows of the group share. Masks and layers of accuracy are told apart by the rows.
std::string GroupTitle(absl::string_view what, const TableGroup& group) {
  const Case::Key& key = group.first().key();
  const bool accuracy = group.purpose() == Case::PURPOSE_ACCURACY;
  ProblemSize problem = key.problem();
  InputProfile input = key.input();
  if (accuracy) {
    problem.clear_causal();
    input.clear_layer();
  }
  const std::string device =
      accuracy && HasSeveralDevices(group) ? "" : absl::StrCat(Name(key.device()), " ");
  std::string title =
      absl::StrCat(what, ": ", device, Name(key.dtype()), ", ", DescribeProblem(problem, accuracy));
  const std::string described = DescribeInput(input);
  if (!described.empty()) absl::StrAppend(&title, ", input ", described);
  return title;
}

// The unit in which a table's times are readable.
struct TimeUnit {
  const char* name = "ms";
  double ns = 1e6;
};

TimeUnit UnitOf(const TableGroup& group) {
  double longest_ns = 0;
  for (const Series* series : group.AllSeries()) {
    for (const auto& [tokens, time] : series->run_ns)
      longest_ns = std::max(longest_ns, time.median);
  }
  return longest_ns < 10e6 ? TimeUnit{"µs", 1e3} : TimeUnit();
}

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

std::string LengthName(const TableGroup& group) {
  const ProblemSize& problem = group.first().key().problem();
  if (problem.query_tokens() == problem.kv_tokens()) return "tokens";
  return problem.query_tokens() < problem.kv_tokens() ? "keys" : "queries";
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

TableCell BitsPerByteCell(const std::vector<const Case*>& cases) {
  const std::optional<double> bits = MedianValue(cases, BitsPerByte);
  return bits.has_value() ? absl::StrFormat("%.4f", *bits) : "-";
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

Table AccuracyTable(const TableGroup& group, bool by_layer) {
  Table table;
  table.title = GroupTitle("Accuracy", group);
  const std::vector<std::string> layers = LayersOf(group);
  if (!layers.empty()) {
    absl::StrAppend(&table.title, layers.size() == 1 ? ", layer " : ", layers ",
                    absl::StrJoin(layers, ", "));
  }
  if (layers.size() > 1 && !by_layer) {
    table.title += ": worst error against the definition, medians of the rest";
  }
  struct Column {
    TableColumn column;
    std::function<TableCell(const std::vector<const Case*>&)> cell;
  };
  std::vector<Column> columns;
  const auto add_median = [&](std::string header, const CaseNumber& number) {
    if (!AnyHas(group, number)) return;
    columns.push_back(
        {{std::move(header), true}, [number](const std::vector<const Case*>& cases) -> TableCell {
           return FormatError(MedianValue(cases, number));
         }});
  };
  columns.push_back(
      {{"error against\nits definition", true}, [](const std::vector<const Case*>& cases) {
         return BoundedCell(cases, DefinitionError, DefinitionBound);
       }});
  columns.push_back(
      {{"against\ndense", true}, [](const std::vector<const Case*>& cases) -> TableCell {
         return FormatError(MedianValue(cases, DenseError));
       }});
  if (AnyHas(group, DenseErrorRatio)) {
    columns.push_back({{"x dense\nin 16 bit", true}, [](const std::vector<const Case*>& cases) {
                         return BoundedCell(cases, DenseErrorRatio, [](const Case& result) {
                           const BoundedNumber& ratio = result.outcome().ratio_to_dense_error();
                           return ratio.has_bound() ? std::optional<double>(ratio.bound())
                                                    : std::nullopt;
                         });
                       }});
  }
  // In detail: the verdict has it.
  const bool has_log_sum_exp = by_layer && AnyHas(group, LogSumExpError);
  if (has_log_sum_exp) {
    columns.push_back({{"LSE\nerror", true}, [](const std::vector<const Case*>& cases) {
                         return TableCell(FormatError(WorstValue(cases, LogSumExpError)));
                       }});
  }
  add_median("kept\nmass", KeptMass);
  add_median("KL from\ndense", KlDivergence);
  add_median(RecallHeader(group), Recall);
  add_median("change\nat 8x", ExtrapolationChange);
  if (AnyHas(group, BitsPerByte)) {
    columns.push_back({{"bits per\nbyte", true}, BitsPerByteCell});
  }

  const RowHead head(group, by_layer);
  head.AddColumns(&table);
  table.columns.push_back({"exactness"});
  for (const Column& column : columns) table.columns.push_back(column.column);
  table.columns.push_back({"verdict"});

  for (const Row& row : RowsOf(group, by_layer)) {
    const bool shown = std::any_of(row.cases.begin(), row.cases.end(),
                                   [](const Case* result) { return Ran(*result); });
    if (!shown) continue;  // among the reasons below the tables
    std::vector<TableCell> cells = head.Cells(row);
    cells.emplace_back(std::string(Name(row.series->first().technique().exactness())));
    for (const Column& column : columns) cells.push_back(column.cell(row.cases));
    TableCell verdict = StatusCell(WorstStatus(row.cases));
    const bool judged = std::any_of(row.cases.begin(), row.cases.end(), [](const Case* result) {
      return result->outcome().against_definition().has_passed();
    });
    if (verdict.text == "ok" && !judged) verdict = {"not judged", Emphasis::kFaint};
    cells.push_back(verdict);
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  std::vector<std::string> notes;
  if (AnyHas(group, DenseErrorRatio)) {
    notes.push_back(
        "x dense in 16 bit: error over that of dense attention in the same precision, worst");
  }
  if (has_log_sum_exp) notes.push_back("LSE: log-sum-exp of the scores, worst");
  if (AnyHas(group, ExtrapolationChange)) {
    notes.push_back(
        "change at 8x: share of the last tokens' attention that goes elsewhere than where the last "
        "eighth of the tokens alone have it");
  }
  if (!notes.empty()) table.notes.push_back(absl::StrJoin(notes, "; "));
  return table;
}

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

// The exponent of a segment's time in the tokens before it, where there are enough to tell.
std::optional<double> SegmentGrowth(const Timing& timing) {
  std::vector<LengthTime> times;
  std::set<int64_t> lengths;
  for (const SegmentTiming& segment : timing.segments()) {
    const std::optional<MedianInterval> median = Median(segment.append_ns());
    if (segment.tokens_before() == 0 || !median.has_value()) continue;
    if (!median->is_95_percent() || median->relative_half_width() > kSegmentHalfWidth) continue;
    times.push_back({segment.tokens_before(), median->median});
    lengths.insert(segment.tokens_before());
  }
  if (lengths.size() < kFewestSegments) return std::nullopt;
  const std::optional<Growth> growth = FitGrowth(times);
  if (!growth.has_value() || growth->standard_error.value_or(1) > kSegmentGrowthError) {
    return std::nullopt;
  }
  return growth->exponent;
}

bool Streams(const TableGroup& group) {
  for (const Series* series : group.AllSeries()) {
    for (const Case* result : series->cases) {
      if (result->outcome().timing().segments_size() > 0) return true;
    }
  }
  return false;
}

Table StreamingTable(const TableGroup& group) {
  Table table;
  table.title = GroupTitle("Streaming, ms per appended segment", group);
  const RowHead head(group, true);
  head.AddColumns(&table);
  for (const char* header : {"tokens", "segment\ntokens", "first\nsegment", "last\nsegment",
                             "ms a\ntoken", "growth with\ntokens before"}) {
    table.columns.push_back({header, true});
  }
  for (const Row& row : RowsOf(group, true)) {
    for (const auto& [tokens, cases] : row.series->by_tokens) {
      for (const Case* result : cases) {
        const auto& segments = result->outcome().timing().segments();
        std::vector<double> medians;
        double total_ns = 0;
        int64_t total_tokens = 0;
        for (const SegmentTiming& segment : segments) {
          const std::optional<MedianInterval> median = Median(segment.append_ns());
          if (!median.has_value()) continue;
          medians.push_back(median->median);
          total_ns += median->median;
          total_tokens += segment.tokens();
        }
        if (medians.empty() || total_tokens == 0) continue;
        std::vector<TableCell> cells = head.Cells(row);
        const std::optional<double> growth = SegmentGrowth(result->outcome().timing());
        for (const std::string& text :
             {absl::StrCat(tokens), absl::StrCat(segments.Get(segments.size() - 1).tokens()),
              FormatMilliseconds(medians.front()), FormatMilliseconds(medians.back()),
              FormatMilliseconds(total_ns / static_cast<double>(total_tokens)),
              growth.has_value() ? absl::StrFormat("%.2f", *growth) : "-"}) {
          cells.emplace_back(text);
        }
        table.AddRow(std::move(cells), FamilyOf(*row.series));
      }
    }
  }
  return table;
}

template <typename Range>
std::optional<double> MedianOrNothing(const Range& samples) {
  const std::optional<MedianInterval> interval = Median(samples);
  if (!interval.has_value()) return std::nullopt;
  return interval->median;
}

Table CostTable(const TableGroup& group) {
  Table table;
  table.title = GroupTitle("Costs told apart, at each technique's longest run", group);
  const RowHead head(group, true);
  head.AddColumns(&table);
  const TableColumn columns[] = {
      {LengthName(group), true}, {"setup\nms", true},      {"cold run\nms", true},
      {"run\nms", true},         {"95%\ninterval", true},  {"end to end\nms", true},
      {"GFLOP/s", true},         {"GB/s", true},           {"workspace", true},
      {"parameters", true},      {"samples\n(lost)", true}};
  table.columns.insert(table.columns.end(), std::begin(columns), std::end(columns));
  bool few_samples = false;
  for (const Row& row : RowsOf(group, true)) {
    const Case* result = row.series->longest();
    if (result == nullptr) continue;
    const Outcome& outcome = result->outcome();
    const Timing& timing = outcome.timing();
    const MedianInterval run = *RunTime(*result);
    few_samples = few_samples || !run.is_95_percent();
    std::vector<TableCell> cells = head.Cells(row);
    for (const std::string& text :
         {absl::StrCat(LengthOf(result->key().problem())),
          FormatMilliseconds(MedianOrNothing(timing.setup_ns())),
          FormatMilliseconds(MedianOrNothing(timing.cold_run_ns())), FormatMilliseconds(run.median),
          absl::StrCat("+-", FormatPercent(run.relative_half_width()),
                       run.is_95_percent() ? "" : "?"),
          FormatMilliseconds(MedianOrNothing(timing.end_to_end_ns())),
          FormatSignificant(GigaflopsPerSecond(*result)),
          FormatSignificant(GigabytesPerSecond(*result)),
          FormatBytes(outcome.has_peak_workspace_bytes()
                          ? std::optional<double>(outcome.peak_workspace_bytes())
                          : std::nullopt),
          FormatBytes(outcome.has_parameter_bytes()
                          ? std::optional<double>(outcome.parameter_bytes())
                          : std::nullopt),
          absl::StrCat(run.samples, " (", timing.discarded_samples(), ")")}) {
      cells.emplace_back(text);
    }
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  if (few_samples) {
    table.notes.push_back("?: the range of all samples, too few for an interval of 95%");
  }
  return table;
}

std::vector<std::string> PeakTexts(const Environment& environment) {
  // Compute peaks at the default number of threads, by type, highest of each; then bandwidths.
  std::map<std::pair<int, int>, double> compute;
  std::map<std::pair<int, int>, double> bandwidth;
  for (const Peak& peak : environment.peaks()) {
    if (peak.device() == DEVICE_TYPE_CPU && peak.threads() != environment.threads()) continue;
    auto& highest = peak.kind() == Peak::KIND_COMPUTE
                        ? compute[{peak.device(), peak.dtype()}]
                        : bandwidth[{peak.device(), static_cast<int>(peak.kind())}];
    highest = std::max(highest, peak.value());
  }
  std::vector<std::string> texts;
  for (const auto& [place, value] : compute) {
    texts.push_back(absl::StrCat(place.first == DEVICE_TYPE_CUDA ? "GPU " : "",
                                 Name(static_cast<ElementType>(place.second)), " peak ",
                                 FormatScaled(value, "FLOP/s")));
  }
  for (const auto& [place, value] : bandwidth) {
    texts.push_back(absl::StrCat(place.first == DEVICE_TYPE_CUDA ? "GPU " : "",
                                 place.second == Peak::KIND_COPY_BANDWIDTH ? "copy " : "read ",
                                 FormatScaled(value, "B/s")));
  }
  return texts;
}

std::string OrUnknown(absl::string_view text, absl::string_view otherwise) {
  return text.empty() ? std::string(otherwise) : Printable(text);
}

std::string HeaderLine(const Environment& environment) {
  std::string machine = OrUnknown(environment.cpu_model(), "unknown processor");
  if (environment.threads() > 0) {
    absl::StrAppend(&machine, ", ", environment.threads(),
                    environment.threads() == 1 ? " thread" : " threads");
  }
  if (!environment.simd().empty()) absl::StrAppend(&machine, ", ", environment.simd(0));
  std::vector<std::string> parts = {OrUnknown(environment.host(), "unknown host"), machine};
  const std::vector<std::string> peaks = PeakTexts(environment);
  if (!peaks.empty()) parts.push_back(absl::StrJoin(peaks, ", "));
  std::string commit = environment.git_commit().empty()
                           ? "commit unknown"
                           : "commit " + Printable(environment.git_commit().substr(0, 10));
  if (environment.git_dirty()) commit += " (dirty)";
  parts.push_back(commit);
  return absl::StrJoin(parts, " · ");
}

// "sentence-transformers/all-MiniLM-L6-v2: BERT, 6 layers; from …" without what follows the name.
std::string ShortModel(absl::string_view model) {
  for (const absl::string_view end : {": ", "; "}) model = model.substr(0, model.find(end));
  return Printable(model);
}

// Where the tensors of each file come from, once for all tables.
std::vector<std::string> InputLines(const Analysis& analysis, bool whole) {
  std::vector<std::string> lines;
  for (const Case* result : analysis.cases()) {
    InputProfile input = result->key().input();
    if (input.model().empty() || input.file().empty()) continue;
    const std::string model = whole ? Printable(input.model()) : ShortModel(input.model());
    input.clear_layer();
    const std::string line = absl::StrCat("input ", DescribeInput(input), ": ", model);
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  }
  return lines;
}

std::string GpuLine(const Environment& environment) {
  std::vector<std::string> gpus;
  for (const Gpu& gpu : environment.gpus()) {
    std::string text = OrUnknown(gpu.name(), "unknown GPU");
    if (!gpu.compute_capability().empty()) {
      absl::StrAppend(&text, " (", Printable(gpu.compute_capability()), ")");
    }
    if (gpu.has_memory_bytes()) {
      absl::StrAppend(&text, ", ", FormatBytes(static_cast<double>(gpu.memory_bytes())));
    }
    if (!gpu.driver().empty()) absl::StrAppend(&text, ", driver ", Printable(gpu.driver()));
    if (!gpu.toolkit().empty()) absl::StrAppend(&text, ", CUDA ", Printable(gpu.toolkit()));
    gpus.push_back(text);
  }
  if (!gpus.empty()) return absl::StrCat("GPU: ", absl::StrJoin(gpus, " · "));
  return environment.no_gpu_reason().empty()
             ? ""
             : absl::StrCat("GPU: none (", Printable(environment.no_gpu_reason()), ")");
}

// "0: name, name" for the techniques of cases that share a reason.
struct Reason {
  Outcome::Status status;
  std::string reason;
  int cases = 0;
  std::vector<std::string> names;
  std::vector<const Case*> members;
};

std::vector<Reason> Reasons(const Analysis& analysis) {
  std::vector<Reason> reasons;
  std::map<std::pair<int, std::string>, size_t> places;
  for (const Case* result : analysis.cases()) {
    const Outcome& outcome = result->outcome();
    if (outcome.status() == Outcome::STATUS_OK) continue;
    const auto [place, added] =
        places.emplace(std::make_pair(outcome.status(), outcome.reason()), reasons.size());
    if (added) reasons.push_back({outcome.status(), outcome.reason(), 0, {}, {}});
    Reason& reason = reasons[place->second];
    ++reason.cases;
    reason.members.push_back(result);
    const Series* series = analysis.SeriesOf(*result);
    const std::string name = Printable(series == nullptr ? DisplayName(*result) : series->name);
    if (std::find(reason.names.begin(), reason.names.end(), name) == reason.names.end()) {
      reason.names.push_back(name);
    }
  }
  std::stable_sort(reasons.begin(), reasons.end(),
                   [](const Reason& a, const Reason& b) { return a.status < b.status; });
  return reasons;
}

bool IsBad(Outcome::Status status) {
  return status == Outcome::STATUS_FAILED || status == Outcome::STATUS_TIMEOUT ||
         status == Outcome::STATUS_OUT_OF_MEMORY || status == Outcome::STATUS_UNSPECIFIED;
}

std::string Plural(int64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

Table EnvironmentTable(const Environment& environment) {
  Table table;
  table.title = absl::StrCat("Environment ", Printable(environment.id()));
  table.columns = {{"what"}, {"value", false, 40}};
  const auto add = [&table](absl::string_view what, absl::string_view value) {
    if (!value.empty()) table.rows.push_back({std::string(what), Printable(value)});
  };
  add("host", environment.host());
  add("system", environment.os());
  add("processor", environment.cpu_model());
  add("cores",
      absl::StrCat(environment.physical_cores(), " physical, ", environment.logical_cores(),
                   " logical, ", environment.threads(), " threads by default"));
  std::vector<std::string> caches;
  for (const Cache& cache : environment.caches()) {
    caches.push_back(absl::StrCat("L", cache.level(), " ", cache.kind(), " ",
                                  FormatBytes(static_cast<double>(cache.bytes()))));
  }
  add("caches", absl::StrJoin(caches, ", "));
  add("SIMD", absl::StrJoin(environment.simd(), ", "));
  if (environment.has_memory_bytes()) {
    add("memory", FormatBytes(static_cast<double>(environment.memory_bytes())));
  }
  const std::string gpu = GpuLine(environment);
  if (!gpu.empty()) add("GPU", gpu.substr(std::string("GPU: ").size()));
  for (const Gpu& one : environment.gpus()) {
    if (one.has_clock_mhz()) add("GPU clock", absl::StrCat(one.clock_mhz(), " MHz"));
    add("GPU libraries", one.runtime_libraries());
  }
  add("compiler", environment.compiler());
  add("CUDA compiler", environment.cuda_compiler());
  add("flags", environment.compile_flags());
  add("mode", environment.compilation_mode());
  add("commit", absl::StrCat(environment.git_commit(), environment.git_dirty() ? " (dirty)" : ""));
  for (const Peak& peak : environment.peaks()) {
    add("measured", absl::StrCat(peak.name(), ": ", FormatScaled(peak.value(), peak.unit())));
  }
  if (environment.start_unix_ns() != 0) {
    add("start",
        absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixNanos(environment.start_unix_ns()),
                         absl::UTCTimeZone()));
  }
  add("command", absl::StrJoin(environment.command_line(), " "));
  return table;
}

std::vector<Table> WithRows(std::vector<Table> tables) {
  tables.erase(std::remove_if(tables.begin(), tables.end(),
                              [](const Table& table) { return table.rows.empty(); }),
               tables.end());
  return tables;
}

}  // namespace

std::vector<std::string> HeaderLines(const Analysis& analysis, bool details) {
  std::vector<std::string> lines;
  for (const Environment* environment : analysis.machines()) {
    lines.push_back(HeaderLine(*environment));
    const std::string gpu = GpuLine(*environment);
    if (!gpu.empty()) lines.push_back(gpu);
  }
  for (std::string& line : InputLines(analysis, details)) lines.push_back(std::move(line));
  return lines;
}

std::vector<Table> AccuracyTables(const Analysis& analysis, bool details) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() != Case::PURPOSE_ACCURACY) continue;
    tables.push_back(AccuracyTable(group, details));
  }
  return WithRows(tables);
}

std::vector<Table> ScalingTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY) continue;
    tables.push_back(ScalingTable(analysis, group));
  }
  return WithRows(tables);
}

std::vector<Table> StreamingTables(const Analysis& analysis, bool details) {
  const std::vector<TableGroup> groups = TableGroups(analysis);
  const auto is_scaling = [](const TableGroup& group) {
    return group.purpose() != Case::PURPOSE_ACCURACY;
  };
  const bool scaling_streams =
      std::any_of(groups.begin(), groups.end(),
                  [&](const TableGroup& group) { return is_scaling(group) && Streams(group); });
  std::vector<Table> tables;
  for (const TableGroup& group : groups) {
    if (details || is_scaling(group) || !scaling_streams) tables.push_back(StreamingTable(group));
  }
  return WithRows(tables);
}

std::vector<Table> ChoiceTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.purpose() == Case::PURPOSE_ACCURACY) continue;
    for (Table& table : ChoiceTablesOf(analysis, group)) tables.push_back(std::move(table));
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

std::vector<Table> StatisticsTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    Table table;
    table.title = GroupTitle("What the techniques report", group);
    const RowHead head(group, true);
    head.AddColumns(&table);
    table.columns.push_back({LengthName(group), true});
    table.columns.push_back({"value", false, kLeastNameWidth});
    for (const Row& row : RowsOf(group, true)) {
      for (const auto& [tokens, cases] : row.series->by_tokens) {
        std::set<std::string> names;
        for (const Case* result : cases) {
          for (const auto& [name, value] : result->outcome().statistics()) names.insert(name);
        }
        std::vector<std::string> values;
        for (const std::string& name : names) {
          values.push_back(absl::StrCat(
              Printable(name), " ",
              FormatSignificant(MedianValue(
                  cases, [&name](const Case& result) { return Statistic(result, name); }))));
        }
        if (values.empty()) continue;
        std::vector<TableCell> cells = head.Cells(row);
        cells.emplace_back(absl::StrCat(tokens));
        cells.emplace_back(absl::StrJoin(values, ", "));
        table.AddRow(std::move(cells), FamilyOf(*row.series));
      }
    }
    tables.push_back(std::move(table));
  }
  return WithRows(tables);
}

std::vector<Table> CostTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) tables.push_back(CostTable(group));
  return WithRows(tables);
}

std::string LegendLine(const std::vector<Table>& tables) {
  bool unsteady = false, absent = false;
  for (const Table& table : tables) {
    for (size_t c = 0; c < table.columns.size(); ++c) {
      if (!table.columns[c].right) continue;
      for (const auto& row : table.rows) {
        unsteady = unsteady || absl::EndsWith(row[c].text, "~");
        absent = absent || row[c].text == "-" || absl::StartsWith(row[c].text, "- ");
      }
    }
  }
  std::vector<std::string> parts;
  if (unsteady) parts.push_back("~: the median's 95% interval is wider than +-5%");
  if (absent) parts.push_back("-: not measured, or there is no such number");
  return absl::StrJoin(parts, "; ");
}

std::vector<Table> EnvironmentTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const Environment& environment : analysis.results().environments()) {
    tables.push_back(EnvironmentTable(environment));
  }
  return tables;
}

Table OutcomeTable(const Analysis& analysis) {
  Table table;
  table.columns = {{"status"}, {"cases", true}, {"reason", false, 40}, {"techniques", false, 40}};
  for (const Reason& reason : Reasons(analysis)) {
    table.rows.push_back({TableCell(std::string(Name(reason.status)),
                                    IsBad(reason.status) ? Emphasis::kBad : Emphasis::kNone),
                          absl::StrCat(reason.cases), OrUnknown(reason.reason, "no reason given"),
                          absl::StrJoin(reason.names, ", ")});
  }
  return table;
}

std::vector<OutcomeLine> OutcomeLines(const Analysis& analysis) {
  std::vector<OutcomeLine> lines;
  std::map<Outcome::Status, int64_t> counts;
  for (const Case* result : analysis.cases()) ++counts[result->outcome().status()];
  for (const Reason& reason : Reasons(analysis)) {
    const std::string text = absl::StrCat(Name(reason.status), ", ", Plural(reason.cases, "case"),
                                          ": ", OrUnknown(reason.reason, "no reason given"));
    // A failure is worth knowing exactly, unless it repeats.
    const std::string who = IsBad(reason.status) && reason.members.size() == 1
                                ? DescribeCase(*reason.members.front())
                                : absl::StrJoin(reason.names, ", ");
    lines.push_back({absl::StrCat(text, " (", who, ")"), IsBad(reason.status)});
  }
  std::vector<std::string> parts;
  for (const Outcome::Status status :
       {Outcome::STATUS_OK, Outcome::STATUS_FAILED, Outcome::STATUS_SKIPPED,
        Outcome::STATUS_UNSUPPORTED, Outcome::STATUS_TIMEOUT, Outcome::STATUS_OUT_OF_MEMORY,
        Outcome::STATUS_UNSPECIFIED}) {
    const int64_t count = counts[status];
    if (count > 0 || status == Outcome::STATUS_OK || status == Outcome::STATUS_FAILED) {
      parts.push_back(absl::StrCat(count, " ", Name(status)));
    }
  }
  std::string total =
      absl::StrCat(Plural(analysis.cases().size(), "case"), ": ", absl::StrJoin(parts, ", "));
  if (analysis.superseded_cases() > 0) {
    absl::StrAppend(&total, "; ", Plural(analysis.superseded_cases(), "repeated case"),
                    " left out for a later one");
  }
  lines.push_back({total, counts[Outcome::STATUS_FAILED] > 0});
  return lines;
}

}  // namespace tfb
