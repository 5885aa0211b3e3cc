// Makes the tables of streams, of separate costs, and of the statistics that techniques report.

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {
namespace {

// The requirements for an exponent over the segments of a stream: segments whose 95 % intervals are
// within +-10 %, and the largest standard error of the exponent. With 16 segments FitGrowth takes 8
// to fit, over a factor of two in the tokens before: 10 % in time is 0.14 in the exponent.
constexpr size_t kFewestSegments = 16;
constexpr double kSegmentHalfWidth = 0.1;
constexpr double kSegmentGrowthError = 0.1;

// Returns the exponent of a segment's time in the tokens before it, where the segments meet them.
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

// Tells whether the longest run of any technique was also launched as a CUDA graph.
bool HasGraphRuns(const TableGroup& group) {
  for (const Row& row : RowsOf(group, true)) {
    const Case* result = row.series->longest();
    if (result != nullptr && result->outcome().timing().graph_run_ns_size() > 0) return true;
  }
  return false;
}

Table CostTable(const TableGroup& group) {
  Table table;
  table.title = GroupTitle("Costs told apart, at each technique's longest run", group);
  const RowHead head(group, true);
  head.AddColumns(&table);
  const TableColumn columns[] = {
      {LengthName(group), true}, {"setup\nms", true},     {"cold run\nms", true},
      {"run\nms", true},         {"95%\ninterval", true}, {"end to end\nms", true},
      {"GFLOP/s", true},         {"GB/s", true},          {"workspace", true},
      {"parameters", true},      {"kept", true},          {"samples\n(lost)", true}};
  table.columns.insert(table.columns.end(), std::begin(columns), std::end(columns));
  const bool has_graphs = HasGraphRuns(group);
  if (has_graphs) table.columns.push_back({"graph\nms", true});
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
          FormatBytes(KeptBytes(*result)),
          absl::StrCat(run.samples, " (", timing.discarded_samples(), ")")}) {
      cells.emplace_back(text);
    }
    if (has_graphs) {
      cells.emplace_back(FormatMilliseconds(MedianOrNothing(timing.graph_run_ns())));
    }
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  if (few_samples) {
    table.notes.push_back("?: the range of all samples, too few for an interval of 95%");
  }
  if (has_graphs) table.notes.push_back("graph: a run that is launched as one CUDA graph");
  return table;
}

}  // namespace

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
}  // namespace report
}  // namespace tfb
