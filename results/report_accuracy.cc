// Makes the tables of errors.

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "results/reader.h"
#include "results/report.h"
#include "results/report_rows.h"
#include "results/statistics.h"

namespace tfb {
namespace report {
namespace {

std::optional<double> DefinitionError(const Case& result) {
  if (!result.outcome().has_against_definition()) return std::nullopt;
  return BoundedValue(result.outcome().against_definition());
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

std::optional<double> KlDivergence(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_kl_divergence() ? std::optional<double>(outcome.kl_divergence())
                                     : std::nullopt;
}

std::optional<double> Recall(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_recall_top_k() ? std::optional<double>(outcome.recall_top_k()) : std::nullopt;
}

// Returns "2e-7 (<= 2e-6)".
TableCell BoundedCell(const BoundedNumber& error) {
  return {absl::StrCat(FormatError(error.value()), " (<= ", FormatBound(error.bound()), ")"),
          error.value() <= error.bound() ? Emphasis::kNone : Emphasis::kBad};
}

// Returns the cell of the case with the largest error relative to its bound.
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
  BoundedNumber error;
  error.set_value(*worst_value);
  error.set_bound(*worst_limit);
  return BoundedCell(error);
}

bool HasGradientErrors(const Case* result) {
  return WorstGradientError(result->outcome()) != nullptr;
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
  // Only details have a column of their own for this; otherwise the verdict includes it.
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
    std::vector<const Case*> ran;
    std::copy_if(row.cases.begin(), row.cases.end(), std::back_inserter(ran),
                 [](const Case* result) { return Ran(*result); });
    if (ran.empty()) continue;  // among the reasons below the tables
    std::vector<TableCell> cells = head.Cells(row);
    cells.emplace_back(std::string(Name(row.series->first().technique().exactness())));
    for (const Column& column : columns) cells.push_back(column.cell(row.cases));
    TableCell verdict = StatusCell(WorstStatus(ran));
    const bool judged = std::any_of(row.cases.begin(), row.cases.end(), [](const Case* result) {
      return result->outcome().against_definition().has_passed();
    });
    if (verdict.text == "ok" && !judged) verdict = {"not judged", Emphasis::kFaint};
    if (ran.size() < row.cases.size()) {
      absl::StrAppend(&verdict.text, ", ", ran.size(), " of ", row.cases.size(), " ran");
    }
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

Table GradientTable(const TableGroup& group) {
  Table table;
  table.title = GroupTitle("Gradients", group);
  const RowHead head(group, /*by_layer=*/false);
  head.AddColumns(&table);
  table.columns.push_back({"largest\nerror", true});
  table.columns.push_back({"of the\ngradient of"});
  table.columns.push_back({"verdict"});
  for (const Row& row : RowsOf(group, /*by_layer=*/false)) {
    std::vector<const Case*> judged;
    std::copy_if(row.cases.begin(), row.cases.end(), std::back_inserter(judged), HasGradientErrors);
    if (judged.empty()) continue;
    Outcome all;
    for (const Case* result : judged) {
      all.mutable_gradient_errors()->MergeFrom(result->outcome().gradient_errors());
    }
    const NamedError& worst = *WorstGradientError(all);
    std::vector<TableCell> cells = head.Cells(row);
    cells.push_back(BoundedCell(worst.error()));
    cells.emplace_back(Printable(worst.name()));
    TableCell verdict = StatusCell(WorstStatus(judged));
    if (judged.size() < row.cases.size()) {
      absl::StrAppend(&verdict.text, ", ", judged.size(), " of ", row.cases.size(), " judged");
    }
    cells.push_back(verdict);
    table.AddRow(std::move(cells), FamilyOf(*row.series));
  }
  table.notes.push_back(
      "largest error: along a random direction, by float64, over the norm of what is summed");
  return table;
}

}  // namespace

std::vector<Table> AccuracyTables(const Analysis& analysis, bool details) {
  std::vector<Table> tables;
  for (const TableGroup& group : TableGroups(analysis)) {
    if (group.pass() != Case::PASS_FORWARD) {
      tables.push_back(GradientTable(group));
    } else if (group.purpose() == Case::PURPOSE_ACCURACY) {
      tables.push_back(AccuracyTable(group, details));
    }
  }
  return WithRows(tables);
}

}  // namespace report
}  // namespace tfb
