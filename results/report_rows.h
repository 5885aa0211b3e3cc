// Makes the rows of a report's tables, and the numbers in them. It is private to the report.
#ifndef TFB_RESULTS_REPORT_ROWS_H_
#define TFB_RESULTS_REPORT_ROWS_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "results/analysis.h"
#include "results/table.h"

namespace tfb {
namespace report {

inline constexpr int kLeastNameWidth = 16;

// A row of a table.
struct Row {
  const Series* series = nullptr;  // gives the name and description
  std::vector<const Case*> cases;
  bool causal = false;
  std::string layer;  // as it is shown; empty where the row holds several
};

// The groups of one table, which differ only in layer and mask.
struct TableGroup {
  std::vector<const SeriesGroup*> groups;
  const SeriesGroup& front() const { return *groups.front(); }
  Case::Purpose purpose() const { return front().purpose; }
  Case::Pass pass() const { return first().key().pass(); }
  const Case& first() const { return front().first(); }
  std::vector<const Series*> AllSeries() const {
    std::vector<const Series*> all;
    for (const SeriesGroup* group : groups) {
      for (const Series& series : group->series) all.push_back(&series);
    }
    return all;
  }
};

std::vector<TableGroup> TableGroups(const Analysis& analysis);
// Returns the rows in the order in which they are shown. A row holds one layer of an input with
// `by_layer`, and all of them without.
std::vector<Row> RowsOf(const TableGroup& group, bool by_layer);
// Returns the names of layers as they are shown, in the order of the file.
std::vector<std::string> LayersOf(const std::vector<const Case*>& cases);
std::vector<std::string> LayersOf(const TableGroup& group);

// Returns the series' name, with the number of seeds where there are several.
std::string SeriesName(const Series& series);
std::string FamilyOf(const Series& series);
// Returns what a group's lengths count: "tokens", "keys" or "queries".
std::string LengthName(const TableGroup& group);
// Tells whether the rows of the group's first device differ in the number of threads.
bool HasSeveralThreads(const TableGroup& group);
std::string ThreadsText(const Series& series);  // "1 thread", "2 threads"
// Returns `what` followed by everything that the group's rows share, and by the machine and build
// where the file has several. The rows of an accuracy group name their masks and layers themselves.
std::string GroupTitle(absl::string_view what, const TableGroup& group);

// The columns that identify a row. A table has those in which its rows differ.
class RowHead {
 public:
  RowHead(const TableGroup& group, bool by_layer);
  void AddColumns(Table* table) const;
  std::vector<TableCell> Cells(const Row& row) const;

 private:
  const TableGroup& group_;
  const size_t layers_;
  const bool by_layer_;
  const bool with_mask_;
  const bool with_device_;
};

// The unit in which a table's times are readable.
struct TimeUnit {
  const char* name = "ms";
  double ns = 1e6;
};
TimeUnit UnitOf(const TableGroup& group);

// Tells whether a case was tried.
bool Ran(const Case& result);
// Returns the worst status of the cases of one cell.
Outcome::Status WorstStatus(const std::vector<const Case*>& cases);
TableCell StatusCell(Outcome::Status status);

// Returns "3.1x" with its interval as the detail, "1.0x=" in grey where the technique does not
// differ significantly from its counterpart, and "-" where there is no speed-up.
TableCell SpeedUpCell(const std::optional<SpeedUpInterval>& speed_up);
// Returns the length from which on a technique is faster than its counterpart, with the interval as
// the detail: "707", "<= 256", "not to 4096", "only below 512"; or "unclear" in grey where the two
// do not differ significantly at the longest length.
TableCell CrossoverCell(const Crossover& crossover);
// Returns the same length for a sentence, "707 [690, 725]" or "at most 256", or nothing where the
// technique is not significantly faster at the longest length.
std::optional<std::string> FasterFromText(const Crossover& crossover);

// Returns a number of a case, or nothing.
using CaseNumber = std::function<std::optional<double>(const Case&)>;
std::vector<double> Values(const std::vector<const Case*>& cases, const CaseNumber& number);
// Both return NaN where a value is NaN, and nothing where no case has one.
std::optional<double> MedianValue(const std::vector<const Case*>& cases, const CaseNumber& number);
std::optional<double> WorstValue(const std::vector<const Case*>& cases, const CaseNumber& number);

// Returns the most working memory (results/statistics.h) of the row's cases at that length, in
// bytes.
std::optional<double> MemoryAt(const Series& series, int64_t tokens);
// Returns the bytes that a run keeps for its backward pass, where that is timed.
std::optional<double> KeptBytes(const Case& result);
bool AnyHas(const TableGroup& group, const CaseNumber& number);

// Returns the error against dense that compares techniques: the relative one where it is known.
std::optional<double> DenseError(const Case& result);
// Returns a statistic that a technique or the harness reports by name.
std::optional<double> Statistic(const Case& result, absl::string_view name);
// Returns the bits per byte (harness/inputs/language_model.h).
std::optional<double> BitsPerByte(const Case& result);
TableCell BitsPerByteCell(const std::vector<const Case*>& cases);
// Return `change` and `reshape` of harness/judge/extrapolation.h.
std::optional<double> ExtrapolationChange(const Case& result);
std::optional<double> ExtrapolationReshape(const Case& result);

// Returns the tables without those that have no rows, and without columns that have only dashes.
std::vector<Table> WithRows(std::vector<Table> tables);

}  // namespace report
}  // namespace tfb

#endif  // TFB_RESULTS_REPORT_ROWS_H_
