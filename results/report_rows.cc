#include "results/report_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "results/describe.h"
#include "results/reader.h"

namespace tfb {
namespace report {
namespace {

// Returns "7" for "layer7", since the word already precedes it.
std::string ShortLayer(absl::string_view layer) {
  const std::string printable = Printable(layer);
  absl::string_view rest = printable;
  if (!absl::ConsumePrefix(&rest, "layer") || rest.empty()) return printable;
  const bool number = std::all_of(rest.begin(), rest.end(), absl::ascii_isdigit);
  return number ? std::string(rest) : printable;
}

// Returns "cpu", or "cpu x2" where a table has several numbers of threads.
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

}  // namespace

bool HasSeveralThreads(const TableGroup& group) {
  std::set<int> threads;
  for (const Series* series : group.AllSeries()) {
    const Case::Key& key = series->first().key();
    if (key.device() == group.first().key().device()) threads.insert(key.threads());
  }
  return threads.size() > 1;
}

std::string ThreadsText(const Series& series) {
  const int threads = series.first().key().threads();
  return absl::StrCat(threads, threads == 1 ? " thread" : " threads");
}

namespace {

// Tells whether a table's rows differ in device or number of threads.
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

}  // namespace

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

std::string SeriesName(const Series& series) { return RowName(series, series.cases); }
std::string FamilyOf(const Series& series) {
  return Printable(series.first().technique().family());
}

std::string LengthName(const TableGroup& group) {
  const ProblemSize& problem = group.first().key().problem();
  if (problem.query_tokens() == problem.kv_tokens()) return "tokens";
  return problem.query_tokens() < problem.kv_tokens() ? "keys" : "queries";
}

std::string GroupTitle(absl::string_view what, const TableGroup& group) {
  Case::Key key = group.first().key();
  const bool accuracy = group.purpose() == Case::PURPOSE_ACCURACY;
  if (accuracy) {
    key.mutable_problem()->clear_causal();
    key.mutable_input()->clear_layer();
  }
  const std::string device =
      accuracy && HasSeveralDevices(group) ? "" : absl::StrCat(Name(key.device()), " ");
  std::string title =
      absl::StrCat(what, ": ", device, Name(key.dtype()), ", ", DescribeProblem(key, accuracy));
  const std::string described = DescribeInput(key.input());
  if (!described.empty()) absl::StrAppend(&title, ", input ", described);
  if (!group.front().place.empty()) absl::StrAppend(&title, ", ", group.front().place);
  return title;
}

RowHead::RowHead(const TableGroup& group, bool by_layer)
    : group_(group),
      layers_(LayersOf(group).size()),
      by_layer_(by_layer && layers_ > 0),
      with_mask_(group.purpose() == Case::PURPOSE_ACCURACY),
      with_device_(HasSeveralDevices(group)) {}

void RowHead::AddColumns(Table* table) const {
  table->columns.push_back({"technique", false, kLeastNameWidth});
  if (with_mask_) table->columns.push_back({"mask"});
  if (by_layer_) table->columns.push_back({"layer"});
  if (with_device_) table->columns.push_back({"device"});
  table->repeated_columns = static_cast<int>(table->columns.size());
}

std::vector<TableCell> RowHead::Cells(const Row& row) const {
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

TimeUnit UnitOf(const TableGroup& group) {
  double longest_ns = 0;
  for (const Series* series : group.AllSeries()) {
    for (const auto& [tokens, time] : series->run_ns)
      longest_ns = std::max(longest_ns, time.median);
  }
  return longest_ns < 10e6 ? TimeUnit{"µs", 1e3} : TimeUnit();
}

bool Ran(const Case& result) {
  return result.outcome().status() != Outcome::STATUS_SKIPPED &&
         result.outcome().status() != Outcome::STATUS_UNSUPPORTED;
}

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

TableCell SpeedUpCell(const std::optional<SpeedUpInterval>& speed_up) {
  if (!speed_up.has_value()) return "-";
  const Emphasis emphasis = !speed_up->distinct   ? Emphasis::kFaint
                            : speed_up->ratio > 1 ? Emphasis::kGood
                                                  : Emphasis::kNone;
  return {absl::StrCat(FormatRatio(speed_up->ratio), speed_up->distinct ? "" : "="), emphasis,
          absl::StrCat(FormatInterval(speed_up->low, speed_up->high),
                       speed_up->is_95_percent ? "" : "?"),
          Emphasis::kFaint};
}

namespace {

// Two digits, or all before the point: "44", "7.1", "707".
std::string TokensText(double tokens) { return FormatSignificant(tokens, 2); }

// Returns "[690, 725]"; an end beyond the measured lengths is open.
std::string CrossoverInterval(const Crossover& crossover) {
  return absl::StrCat(
      "[", crossover.low_tokens > 0 ? TokensText(crossover.low_tokens) : "..", ", ",
      std::isfinite(crossover.high_tokens) ? TokensText(crossover.high_tokens) : "..", "]");
}

// Returns where a technique that is faster at all lengths begins to be significantly faster.
double CertainFrom(const Crossover& crossover) {
  return std::max(crossover.tokens, crossover.high_tokens);
}

}  // namespace

TableCell CrossoverCell(const Crossover& crossover) {
  if (!crossover.clear) return {"unclear", Emphasis::kFaint};
  const std::string tokens = TokensText(crossover.tokens);
  switch (crossover.kind) {
    case Crossover::Kind::kAt:
      return {absl::StrCat(tokens, crossover.changes > 1 ? " (last)" : ""), Emphasis::kGood,
              CrossoverInterval(crossover), Emphasis::kFaint};
    case Crossover::Kind::kAlways:
      return {absl::StrCat("<= ", TokensText(CertainFrom(crossover))), Emphasis::kGood};
    case Crossover::Kind::kNever:
      return {absl::StrCat("not to ", tokens), Emphasis::kFaint};
    case Crossover::Kind::kOnlyBelow:
      return {absl::StrCat("only below ", tokens), Emphasis::kFaint, CrossoverInterval(crossover),
              Emphasis::kFaint};
  }
  return "-";
}

std::optional<std::string> FasterFromText(const Crossover& crossover) {
  if (!crossover.clear) return std::nullopt;
  if (crossover.kind == Crossover::Kind::kAlways) {
    return absl::StrCat("at most ", TokensText(CertainFrom(crossover)));
  }
  if (crossover.kind != Crossover::Kind::kAt) return std::nullopt;
  return absl::StrCat(TokensText(crossover.tokens), " ", CrossoverInterval(crossover));
}

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
  // A median with a NaN is undefined, and must not hide the NaN.
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

bool AnyHas(const TableGroup& group, const CaseNumber& number) {
  for (const Series* series : group.AllSeries()) {
    if (!Values(series->cases, number).empty()) return true;
  }
  return false;
}

std::optional<double> DenseError(const Case& result) {
  if (!result.outcome().has_against_dense()) return std::nullopt;
  const ErrorMeasure& error = result.outcome().against_dense();
  if (error.has_relative_frobenius()) return error.relative_frobenius();
  return BoundedValue(error);
}

std::optional<double> Statistic(const Case& result, absl::string_view name) {
  const auto& statistics = result.outcome().statistics();
  const auto found = statistics.find(std::string(name));
  return found == statistics.end() ? std::nullopt : std::optional<double>(found->second);
}

std::optional<double> BitsPerByte(const Case& result) { return Statistic(result, "bits_per_byte"); }
std::optional<double> ExtrapolationChange(const Case& result) {
  return Statistic(result, "extrapolation_change");
}
std::optional<double> ExtrapolationReshape(const Case& result) {
  return Statistic(result, "extrapolation_reshape");
}

TableCell BitsPerByteCell(const std::vector<const Case*>& cases) {
  const std::optional<double> bits = MedianValue(cases, BitsPerByte);
  return bits.has_value() ? absl::StrFormat("%.4f", *bits) : "-";
}

namespace {

bool HoldsOnlyDashes(const Table& table, size_t column) {
  return std::all_of(table.rows.begin(), table.rows.end(), [column](const auto& row) {
    return row[column].text == "-" || row[column].text.empty();
  });
}

void DropEmptyColumns(Table* table) {
  for (size_t c = table->columns.size(); c-- > static_cast<size_t>(table->repeated_columns);) {
    if (!HoldsOnlyDashes(*table, c)) continue;
    table->columns.erase(table->columns.begin() + static_cast<std::ptrdiff_t>(c));
    for (auto& row : table->rows) row.erase(row.begin() + static_cast<std::ptrdiff_t>(c));
  }
}

}  // namespace

std::vector<Table> WithRows(std::vector<Table> tables) {
  tables.erase(std::remove_if(tables.begin(), tables.end(),
                              [](const Table& table) { return table.rows.empty(); }),
               tables.end());
  for (Table& table : tables) DropEmptyColumns(&table);
  return tables;
}

std::optional<double> KeptBytes(const Case& result) {
  if (!result.outcome().has_kept_bytes()) return std::nullopt;
  return static_cast<double>(result.outcome().kept_bytes());
}

std::optional<double> MemoryAt(const Series& series, int64_t tokens) {
  const auto cases = series.by_tokens.find(tokens);
  if (cases == series.by_tokens.end()) return std::nullopt;
  return WorstValue(cases->second,
                    [](const Case& result) { return WorkingMemoryBytes(result.outcome()); });
}

}  // namespace report
}  // namespace tfb
