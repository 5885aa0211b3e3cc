#include "results/report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "results/reader.h"
#include "results/render.h"

namespace tfb {
namespace {

constexpr int kLeastNameWidth = 16;
// Half the interval over the median beyond which a time is marked as unsteady.
constexpr double kUnsteadyHalfWidth = 0.05;
// Fitted growth beyond the expected one that is worth a mark.
constexpr double kGrowthMargin = 0.25;

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

// "cpu", or "cpu x2" where a table has several numbers of threads.
std::string DeviceName(const SeriesGroup& group, const Series& series) {
  const Case::Key& key = series.first().key();
  std::set<int> threads;
  for (const Series& other : group.series) {
    if (other.first().key().device() == key.device()) {
      threads.insert(other.first().key().threads());
    }
  }
  const std::string device(Name(key.device()));
  return threads.size() > 1 ? absl::StrCat(device, " x", key.threads()) : device;
}

// Whether a table's rows differ in device or number of threads.
bool HasSeveralDevices(const SeriesGroup& group) {
  std::set<std::string> names;
  for (const Series& series : group.series) names.insert(DeviceName(group, series));
  return names.size() > 1;
}

std::string SeriesName(const Series& series) {
  std::set<uint64_t> seeds;
  for (const Case* result : series.cases) seeds.insert(result->key().seed());
  const std::string name = Printable(series.name);
  return seeds.size() > 1 ? absl::StrCat(name, " (", seeds.size(), " seeds)") : name;
}

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

std::optional<double> KlDivergence(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_kl_divergence() ? std::optional<double>(outcome.kl_divergence())
                                     : std::nullopt;
}

std::optional<double> Recall(const Case& result) {
  const Outcome& outcome = result.outcome();
  return outcome.has_recall_top_k() ? std::optional<double>(outcome.recall_top_k()) : std::nullopt;
}

bool AnyHas(const SeriesGroup& group, const CaseNumber& number) {
  for (const Series& series : group.series) {
    if (!Values(series.cases, number).empty()) return true;
  }
  return false;
}

// "2e-7 (<= 2e-6)", the worst of several seeds.
TableCell BoundedCell(const std::vector<const Case*>& cases, const CaseNumber& number,
                      const CaseNumber& bound) {
  const std::optional<double> value = WorstValue(cases, number);
  const std::optional<double> limit = WorstValue(cases, bound);
  if (!value.has_value() || !limit.has_value()) return FormatError(value);
  return {absl::StrCat(FormatError(value), " (<= ", FormatBound(limit), ")"),
          *value <= *limit ? Emphasis::kNone : Emphasis::kBad};
}

std::string RecallHeader(const SeriesGroup& group) {
  std::set<int> ks;
  for (const Series& series : group.series) {
    for (const Case* result : series.cases) {
      if (result->outcome().has_recall_top_k()) ks.insert(result->outcome().recall_k());
    }
  }
  return ks.size() == 1 && *ks.begin() > 0 ? absl::StrCat("recall,\ntop ", *ks.begin())
                                           : "recall,\ntop k";
}

std::string GroupTitle(absl::string_view what, const SeriesGroup& group) {
  const Case& result = group.first();
  const bool accuracy = group.purpose == Case::PURPOSE_ACCURACY;
  const std::string device = accuracy ? "" : absl::StrCat(Name(result.key().device()), " ");
  std::string title = absl::StrCat(what, ": ", device, Name(result.key().dtype()), ", ",
                                   DescribeProblem(result.key().problem(), accuracy));
  const std::string input = DescribeInput(result.key().input());
  if (!input.empty()) absl::StrAppend(&title, ", input ", input);
  return title;
}

// The unit in which a table's times are readable.
struct TimeUnit {
  const char* name = "ms";
  double ns = 1e6;
};

TimeUnit UnitOf(const SeriesGroup& group) {
  double longest_ns = 0;
  for (const Series& series : group.series) {
    for (const auto& [tokens, time] : series.run_ns) longest_ns = std::max(longest_ns, time.median);
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
  const TechniqueDescription& technique = series.first().technique();
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

std::string LengthName(const SeriesGroup& group) {
  const ProblemSize& problem = group.first().key().problem();
  if (problem.query_tokens() == problem.kv_tokens()) return "tokens";
  return problem.query_tokens() < problem.kv_tokens() ? "keys" : "queries";
}

void AddScalingNotes(const SeriesGroup& group, const std::vector<const Series*>& shown,
                     Table* table) {
  std::vector<std::string> notes;
  std::set<std::pair<int64_t, int64_t>> fitted;
  bool unsteady = false, above = false, bandwidth = false;
  for (const Series* series : shown) {
    if (series->growth.has_value()) {
      fitted.emplace(series->growth->from_tokens, series->growth->to_tokens);
    }
    for (const auto& [tokens, time] : series->run_ns) {
      unsteady = unsteady || time.relative_half_width() > kUnsteadyHalfWidth;
    }
  }
  for (const auto& row : table->rows) {
    above = above || row[row.size() - 5].text.find('!') != std::string::npos;
    bandwidth = bandwidth || row.back().text.find("bw") != std::string::npos;
  }
  notes.push_back("medians of warm runs without setup");
  if (unsteady) notes.push_back("~: 95% interval wider than +-5%");
  if (fitted.size() == 1) {
    notes.push_back(absl::StrCat("growth: exponent from ", fitted.begin()->first, " to ",
                                 fitted.begin()->second, " ", LengthName(group)));
  } else if (!fitted.empty()) {
    notes.push_back("growth: exponent over the longer half of the lengths");
  }
  if (above) notes.push_back("!: grows faster than expected");
  notes.push_back("memory: workspace and parameters");
  if (bandwidth) notes.push_back("bw: of the measured bandwidth, else of arithmetic");
  table->notes.push_back(absl::StrJoin(notes, "; "));
}

Table ScalingTable(const Analysis& analysis, const SeriesGroup& group) {
  Table table;
  const TimeUnit unit = UnitOf(group);
  table.title = GroupTitle(absl::StrCat("Scaling, ", unit.name, " at ", LengthName(group)), group);
  std::vector<const Series*> shown;
  std::set<int64_t> lengths;
  for (const Series& series : group.series) {
    if (!ShowsInScaling(series)) continue;
    shown.push_back(&series);
    for (const auto& [tokens, cases] : series.by_tokens) lengths.insert(tokens);
  }
  if (shown.empty()) return table;
  const int64_t longest = *lengths.rbegin();

  const bool with_device = HasSeveralDevices(group);
  table.columns = {{"technique", false, kLeastNameWidth}};
  if (with_device) table.columns.push_back({"device"});
  table.repeated_columns = with_device ? 2 : 1;
  for (const int64_t tokens : lengths) table.columns.push_back({absl::StrCat(tokens), true});
  table.columns.push_back({"growth\n(expected)", true});
  table.columns.push_back({absl::StrCat("speed-up\nat ", longest), true});
  table.columns.push_back({"faster than\ndense from", true});
  table.columns.push_back({absl::StrCat("memory\nat ", longest), true});
  table.columns.push_back({"of\npeak", true});

  for (const Series* series : shown) {
    std::vector<TableCell> row = {SeriesName(*series)};
    if (with_device) row.push_back(DeviceName(group, *series));
    for (const int64_t tokens : lengths) row.push_back(LengthCell(*series, tokens, unit));
    row.push_back(GrowthCell(*series));
    const std::optional<double> speed_up =
        series->is_baseline ? std::nullopt : analysis.SpeedUpAt(*series, longest);
    row.push_back(
        {FormatRatio(speed_up), speed_up.value_or(0) > 1 ? Emphasis::kGood : Emphasis::kNone});
    row.push_back(CrossoverCell(*series));
    const auto at_longest = series->by_tokens.find(longest);
    row.push_back(FormatBytes(at_longest == series->by_tokens.end()
                                  ? std::nullopt
                                  : WorstValue(at_longest->second, [](const Case& result) {
                                      return WorkingMemoryBytes(result.outcome());
                                    })));
    row.push_back(series->longest() == nullptr ? "-" : PeakCell(analysis, *series->longest()));
    table.rows.push_back(std::move(row));
  }
  AddScalingNotes(group, shown, &table);
  return table;
}

Table AccuracyTable(const SeriesGroup& group) {
  Table table;
  table.title = GroupTitle("Accuracy", group);
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
  add_median("LSE\nerror", LogSumExpError);
  add_median("kept\nmass", KeptMass);
  add_median("KL from\ndense", KlDivergence);
  add_median(RecallHeader(group), Recall);

  table.columns = {{"technique", false, kLeastNameWidth}, {"device"}, {"exactness"}};
  table.repeated_columns = 2;
  for (const Column& column : columns) table.columns.push_back(column.column);
  table.columns.push_back({"verdict"});

  for (const Series& series : group.series) {
    const bool shown = std::any_of(series.cases.begin(), series.cases.end(),
                                   [](const Case* result) { return Ran(*result); });
    if (!shown) continue;  // among the reasons below the tables
    std::vector<TableCell> row = {SeriesName(series), DeviceName(group, series),
                                  std::string(Name(series.first().technique().exactness()))};
    for (const Column& column : columns) row.push_back(column.cell(series.cases));
    TableCell verdict = StatusCell(WorstStatus(series.cases));
    const bool judged = std::any_of(
        series.cases.begin(), series.cases.end(),
        [](const Case* result) { return result->outcome().against_definition().has_passed(); });
    if (verdict.text == "ok" && !judged) verdict = {"not judged", Emphasis::kFaint};
    row.push_back(verdict);
    table.rows.push_back(std::move(row));
  }
  std::vector<std::string> notes;
  if (AnyHas(group, DenseErrorRatio)) {
    notes.push_back("x dense in 16 bit: error over that of dense attention in the same precision");
  }
  if (AnyHas(group, LogSumExpError)) notes.push_back("LSE: log-sum-exp of the scores");
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

std::string TechniqueKey(const Case::Key& key) {
  return absl::StrCat(key.technique(), "\n", CanonicalOptions(key), "\n", key.device(), "\n",
                      key.dtype());
}

// Errors against dense of every accuracy case, by technique, options, device and element type,
// but for those techniques of which any case failed: what is wrong is no choice.
std::map<std::string, std::vector<double>> DenseErrorsByTechnique(const Analysis& analysis) {
  std::map<std::string, std::vector<double>> errors;
  std::set<std::string> failed;
  for (const Case* result : analysis.cases()) {
    const Case::Key& key = result->key();
    const std::string technique = TechniqueKey(key);
    if (result->outcome().status() == Outcome::STATUS_FAILED) failed.insert(technique);
    const std::optional<double> error = DenseError(*result);
    if (error.has_value() && !std::isnan(*error)) errors[technique].push_back(*error);
  }
  for (const std::string& technique : failed) errors.erase(technique);
  return errors;
}

Table ChoiceTable(const Analysis& analysis, const SeriesGroup& group,
                  const std::map<std::string, std::vector<double>>& errors) {
  Table table;
  const TimeUnit unit = UnitOf(group);
  std::vector<Choice> choices;
  int64_t longest = 0;
  for (const Series& series : group.series) {
    if (series.run_ns.empty()) continue;
    longest = std::max(longest, series.run_ns.rbegin()->first);
  }
  for (const Series& series : group.series) {
    const Case::Key& key = series.first().key();
    const auto time = series.run_ns.find(longest);
    const auto error = errors.find(TechniqueKey(key));
    if (time == series.run_ns.end() || error == errors.end()) continue;
    choices.push_back({&series, time->second.median, MedianOf(error->second)->median,
                       analysis.SpeedUpAt(series, longest),
                       WorkingMemoryBytes(series.by_tokens.at(longest).front()->outcome())});
  }
  std::vector<Choice> best;
  for (const Choice& choice : choices) {
    if (std::none_of(choices.begin(), choices.end(),
                     [&](const Choice& other) { return Beats(other, choice); })) {
      best.push_back(choice);
    }
  }
  if (choices.size() < 2) return table;
  std::stable_sort(best.begin(), best.end(),
                   [](const Choice& a, const Choice& b) { return a.error < b.error; });
  table.title =
      absl::StrCat("Choices at ", longest, " ", LengthName(group), ", ",
                   Name(group.first().key().device()), " ", Name(group.first().key().dtype()), ", ",
                   DescribeProblem(group.first().key().problem(), false), ": of ", choices.size(),
                   ", those that no other beats in both error and time");
  table.columns = {{"technique", false, kLeastNameWidth},
                   {"error against\ndense", true},
                   {"speed-up", true},
                   {unit.name, true},
                   {"memory", true}};
  for (const Choice& choice : best) {
    table.rows.push_back({SeriesName(*choice.series), FormatError(choice.error),
                          FormatRatio(choice.speed_up), FormatSignificant(choice.time_ns / unit.ns),
                          FormatBytes(choice.memory)});
  }
  table.notes.push_back("error: median over the technique's accuracy cases");
  return table;
}

Table StreamingTable(const SeriesGroup& group) {
  Table table;
  table.title = GroupTitle("Streaming, ms per appended segment", group);
  table.columns = {{"technique", false, kLeastNameWidth},
                   {"device"},
                   {"segment\ntokens", true},
                   {"first\nsegment", true},
                   {"last\nsegment", true},
                   {"tokens before\nthe last", true},
                   {"growth with\ntokens before", true}};
  table.repeated_columns = 2;
  for (const Series& series : group.series) {
    for (const Case* result : series.cases) {
      const auto& segments = result->outcome().timing().segments();
      if (segments.empty()) continue;
      std::vector<LengthTime> times;
      const auto median = [](const SegmentTiming& segment) -> std::optional<double> {
        const std::optional<MedianInterval> interval = Median(segment.append_ns());
        if (!interval.has_value()) return std::nullopt;
        return interval->median;
      };
      for (const SegmentTiming& segment : segments) {
        times.push_back({segment.tokens_before(), median(segment).value_or(0)});
      }
      const std::optional<Growth> growth = FitGrowth(times);
      const SegmentTiming& last = segments.Get(segments.size() - 1);
      table.rows.push_back({SeriesName(series), DeviceName(group, series),
                            absl::StrCat(last.tokens()),
                            FormatMilliseconds(median(segments.Get(0))),
                            FormatMilliseconds(median(last)), absl::StrCat(last.tokens_before()),
                            growth.has_value() ? absl::StrFormat("%.2f", growth->exponent) : "-"});
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

Table CostTable(const SeriesGroup& group) {
  Table table;
  table.title = GroupTitle("Costs told apart, at each technique's longest run", group);
  table.columns = {{"technique", false, kLeastNameWidth},
                   {"device"},
                   {LengthName(group), true},
                   {"setup\nms", true},
                   {"cold run\nms", true},
                   {"run\nms", true},
                   {"95%\ninterval", true},
                   {"end to end\nms", true},
                   {"GFLOP/s", true},
                   {"GB/s", true},
                   {"workspace", true},
                   {"parameters", true},
                   {"samples\n(lost)", true}};
  table.repeated_columns = 2;
  bool few_samples = false;
  for (const Series& series : group.series) {
    const Case* result = series.longest();
    if (result == nullptr) continue;
    const Outcome& outcome = result->outcome();
    const Timing& timing = outcome.timing();
    const MedianInterval run = *RunTime(*result);
    few_samples = few_samples || !run.is_95_percent();
    table.rows.push_back({SeriesName(series), DeviceName(group, series),
                          absl::StrCat(LengthOf(result->key().problem())),
                          FormatMilliseconds(MedianOrNothing(timing.setup_ns())),
                          FormatMilliseconds(MedianOrNothing(timing.cold_run_ns())),
                          FormatMilliseconds(run.median),
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
                          absl::StrCat(run.samples, " (", timing.discarded_samples(), ")")});
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
    const std::string name = Printable(DisplayName(*result));
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

std::vector<std::string> HeaderLines(const Analysis& analysis) {
  std::vector<std::string> lines;
  for (const Environment* environment : analysis.machines()) {
    lines.push_back(HeaderLine(*environment));
    const std::string gpu = GpuLine(*environment);
    if (!gpu.empty()) lines.push_back(gpu);
  }
  return lines;
}

std::vector<Table> AccuracyTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const SeriesGroup& group : analysis.groups()) {
    if (group.purpose != Case::PURPOSE_ACCURACY) continue;
    tables.push_back(AccuracyTable(group));
  }
  return WithRows(tables);
}

std::vector<Table> ScalingTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const SeriesGroup& group : analysis.groups()) {
    if (group.purpose == Case::PURPOSE_ACCURACY) continue;
    tables.push_back(ScalingTable(analysis, group));
  }
  return WithRows(tables);
}

std::vector<Table> StreamingTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const SeriesGroup& group : analysis.groups()) tables.push_back(StreamingTable(group));
  return WithRows(tables);
}

std::vector<Table> ChoiceTables(const Analysis& analysis) {
  const std::map<std::string, std::vector<double>> errors = DenseErrorsByTechnique(analysis);
  std::vector<Table> tables;
  for (const SeriesGroup& group : analysis.groups()) {
    if (group.purpose == Case::PURPOSE_ACCURACY) continue;
    tables.push_back(ChoiceTable(analysis, group, errors));
  }
  return WithRows(tables);
}

std::vector<Table> StatisticsTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const SeriesGroup& group : analysis.groups()) {
    Table table;
    table.title = GroupTitle("What the techniques report", group);
    table.columns = {
        {"technique", false, kLeastNameWidth}, {"device"}, {LengthName(group), true}, {"value"}};
    for (const Series& series : group.series) {
      for (const auto& [tokens, cases] : series.by_tokens) {
        std::set<std::string> names;
        for (const Case* result : cases) {
          for (const auto& [name, value] : result->outcome().statistics()) names.insert(name);
        }
        std::vector<std::string> values;
        for (const std::string& name : names) {
          values.push_back(absl::StrCat(
              Printable(name), " ",
              FormatSignificant(MedianValue(cases, [&name](const Case& result) {
                const auto& statistics = result.outcome().statistics();
                const auto found = statistics.find(name);
                return found == statistics.end() ? std::nullopt
                                                 : std::optional<double>(found->second);
              }))));
        }
        if (values.empty()) continue;
        table.rows.push_back({SeriesName(series), DeviceName(group, series), absl::StrCat(tokens),
                              absl::StrJoin(values, ", ")});
      }
    }
    tables.push_back(std::move(table));
  }
  return WithRows(tables);
}

std::vector<Table> CostTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const SeriesGroup& group : analysis.groups()) tables.push_back(CostTable(group));
  return WithRows(tables);
}

std::vector<Table> EnvironmentTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const Environment& environment : analysis.results().environments()) {
    tables.push_back(EnvironmentTable(environment));
  }
  return tables;
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
