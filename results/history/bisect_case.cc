#include "results/history/bisect_case.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/status.h"
#include "results/describe.h"
#include "results/reader.h"
#include "results/statistics.h"

namespace tfb {
namespace {

constexpr char kDefaultTokens[] = "1024";

struct NamedMetric {
  absl::string_view name;
  BisectMetric metric;
};
constexpr NamedMetric kMetrics[] = {
    {"time", BisectMetric::kTime},     {"absolute", BisectMetric::kAbsoluteTime},
    {"setup", BisectMetric::kSetup},   {"instructions", BisectMetric::kInstructions},
    {"memory", BisectMetric::kMemory}, {"error", BisectMetric::kError},
    {"status", BisectMetric::kStatus}};

// The fields of a key in its order, and the flag that sets each; none where a field follows from
// others, and only chooses among the cases that were measured.
struct Field {
  absl::string_view name, flag;
  bool is_number;
};
constexpr Field kFields[] = {{"device", "devices", false},   {"dtype", "dtypes", false},
                             {"batch", "batches", true},     {"query_heads", "heads", true},
                             {"kv_heads", "kv_heads", true}, {"query_tokens", "lengths", true},
                             {"kv_tokens", "", true},        {"head_dim", "head_dims", true},
                             {"value_dim", "", true},        {"causal", "causal", false},
                             {"input", "input", false},      {"file", "", false},
                             {"model", "", false},           {"layer", "", false},
                             {"details", "", false},         {"seed", "seed", true},
                             {"threads", "threads", true},   {"purpose", "", false},
                             {"pass", "pass", false}};

const Field* FindField(absl::string_view name) {
  const auto* found = std::find_if(std::begin(kFields), std::end(kFields),
                                   [name](const Field& field) { return field.name == name; });
  return found == std::end(kFields) ? nullptr : found;
}

absl::Status CaseError(absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat("--case: ", message));
}

// Undoes the %XX of a key.
std::string Unescaped(absl::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_code = text[i] == '%' && i + 2 < text.size() &&
                         absl::ascii_isxdigit(static_cast<unsigned char>(text[i + 1])) &&
                         absl::ascii_isxdigit(static_cast<unsigned char>(text[i + 2]));
    int code = 0;
    if (is_code && absl::SimpleHexAtoi(text.substr(i + 1, 2), &code)) {
      plain += static_cast<char>(code);
      i += 2;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// Returns the items of a list, whose commas in brackets do not split.
std::vector<std::string> ItemsOf(absl::string_view text) {
  std::vector<std::string> items(1);
  int depth = 0;
  for (const char c : text) {
    depth += c == '[' || c == '(' ? 1 : c == ']' || c == ')' ? -1 : 0;
    if (c == ',' && depth == 0) {
      items.emplace_back();
    } else {
      items.back() += c;
    }
  }
  return items;
}

absl::Status CheckSpec(const BisectCase& wanted) {
  if (wanted.technique.empty()) {
    return CaseError("it begins with a technique, as in longformer:window=256 tokens=4096");
  }
  if (wanted.technique.find_first_of("*?") != std::string::npos) {
    return CaseError(absl::StrCat("\"", wanted.technique, "\" is a glob; name one technique"));
  }
  const std::vector<std::string> items = ItemsOf(wanted.spec);
  for (size_t i = 1; i < items.size(); ++i) {
    const size_t end = items[i].find_first_of(":=");
    if (end != std::string::npos && items[i][end] == '=') continue;
    return CaseError(absl::StrCat("\"", items[i], "\" is a second technique; name one"));
  }
  return absl::OkStatus();
}

// Returns "longformer:window=256" for a key's technique and its text of options.
std::string SpecOfKey(absl::string_view technique, absl::string_view options) {
  std::vector<std::string> shown;
  for (const absl::string_view option : absl::StrSplit(options, ',', absl::SkipEmpty())) {
    shown.push_back(Unescaped(option));
  }
  return absl::StrCat(technique, shown.empty() ? "" : ":", absl::StrJoin(shown, ","));
}

absl::Status AddField(absl::string_view word, BisectCase* wanted) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(word, absl::MaxSplits('=', 1));
  const std::string name(parts.first), value = Unescaped(parts.second);
  if (name == "tokens") {
    TFB_RETURN_IF_ERROR(AddField(absl::StrCat("query_tokens=", parts.second), wanted));
    return AddField(absl::StrCat("kv_tokens=", parts.second), wanted);
  }
  const Field* field = FindField(name);
  if (field == nullptr) {
    return CaseError(absl::StrCat(
        "\"", name, "\" is no field of a case; there are tokens, ",
        absl::StrJoin(kFields, ", ",
                      [](std::string* out, const Field& one) { absl::StrAppend(out, one.name); })));
  }
  int64_t number = 0;
  if (field->is_number && !absl::SimpleAtoi(value, &number)) {
    return CaseError(absl::StrCat(name, "=\"", value, "\" is no number"));
  }
  if (name == "causal") {
    if (value != "0" && value != "1" && value != "true" && value != "false") {
      return CaseError(absl::StrCat("causal=\"", value, "\"; allowed are 0 and 1"));
    }
    wanted->fields[name] = value == "1" || value == "true" ? "1" : "0";
  } else {
    wanted->fields[name] = value;
  }
  return absl::OkStatus();
}

// Returns the fields of a case as its key writes them, without %XX, and its pass, which a key
// leaves out where it is the forward one.
std::map<std::string, std::string> FieldsOf(const Case& result) {
  std::map<std::string, std::string> fields = {{"pass", std::string(Name(result.key().pass()))}};
  const std::string key = CaseKey(result);
  for (const absl::string_view word : absl::StrSplit(key, ' ')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    fields[std::string(parts.first)] = Unescaped(parts.second);
  }
  return fields;
}

bool HasFields(const Case& result, const BisectCase& wanted) {
  if (result.key().technique() != wanted.technique) return false;
  const std::map<std::string, std::string> fields = FieldsOf(result);
  return std::all_of(wanted.fields.begin(), wanted.fields.end(),
                     [&](const auto& field) { return fields.at(field.first) == field.second; });
}

bool HasOptions(const Case& result, const BisectCase& wanted) {
  absl::string_view options = wanted.spec;
  options.remove_prefix(std::min(options.size(), wanted.technique.size() + 1));
  for (const std::string& option : ItemsOf(options)) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(option, absl::MaxSplits('=', 1));
    const auto found = result.key().options().find(parts.first);
    if (found != result.key().options().end() && found->second != parts.second) return false;
  }
  return true;
}

// Keeps the cases that `keeps` returns true for, where there are any.
template <class Predicate>
void Prefer(const Predicate& keeps, std::vector<const Case*>* cases) {
  std::vector<const Case*> kept;
  std::copy_if(cases->begin(), cases->end(), std::back_inserter(kept), keeps);
  if (!kept.empty()) *cases = std::move(kept);
}

std::string Described(const std::vector<const Case*>& cases) {
  constexpr size_t kShown = 4;
  std::vector<std::string> shown;
  for (const Case* one : cases) {
    if (shown.size() < kShown) shown.push_back(CaseKey(*one));
  }
  if (cases.size() > kShown) shown.push_back("...");
  return absl::StrJoin(shown, "; ");
}

// Appends the samples of a later measurement.
void Pool(const Case& more, Case* all) {
  const Timing& from = more.outcome().timing();
  Timing* to = all->mutable_outcome()->mutable_timing();
  to->mutable_run_ns()->MergeFrom(from.run_ns());
  to->mutable_visits()->MergeFrom(from.visits());
  to->mutable_probe_ns()->MergeFrom(from.probe_ns());
  to->mutable_setup_ns()->MergeFrom(from.setup_ns());
  to->mutable_run_instructions()->MergeFrom(from.run_instructions());
}

// The case of all measurements of one side, with its dense counterpart where that is another case.
struct PooledSide {
  Case result;
  std::optional<Case> dense;
  Environment environment;
};

absl::StatusOr<PooledSide> PoolSide(const std::vector<ResultSet>& sets, const BisectCase& wanted) {
  PooledSide side;
  for (size_t i = 0; i < sets.size(); ++i) {
    TFB_ASSIGN_OR_RETURN(const Case* found, FindCase(sets[i], wanted));
    const DensePartners partners(sets[i]);
    const Case* dense = partners.Find(*found);
    if (dense == found) dense = nullptr;
    if (i > 0) {
      Pool(*found, &side.result);
      if (dense != nullptr && side.dense.has_value()) Pool(*dense, &*side.dense);
      continue;
    }
    side.result = *found;
    if (dense != nullptr) side.dense = *dense;
    const Environment* environment = FindEnvironment(sets[i], found->environment_id());
    if (environment != nullptr) side.environment = *environment;
  }
  return side;
}

void AddDifference(absl::string_view what, const std::string& base, const std::string& now,
                   std::vector<std::string>* differences) {
  if (base != now) differences->push_back(absl::StrCat(what, ": ", base, " / ", now));
}

std::vector<std::string> BuildDifferences(const PooledSide& base, const PooledSide& now) {
  std::vector<std::string> differences;
  const Environment &before = base.environment, &after = now.environment;
  AddDifference("compiler", before.compiler(), after.compiler(), &differences);
  AddDifference("CUDA compiler", before.cuda_compiler(), after.cuda_compiler(), &differences);
  AddDifference("compiler flags", before.compile_flags(), after.compile_flags(), &differences);
  AddDifference("compilation mode", before.compilation_mode(), after.compilation_mode(),
                &differences);
  AddDifference("SIMD", absl::StrJoin(before.simd(), " "), absl::StrJoin(after.simd(), " "),
                &differences);
  AddDifference("options", CanonicalOptions(base.result.key()), CanonicalOptions(now.result.key()),
                &differences);
  return differences;
}

// Returns the side as results with the base's keys and environment, so that a difference of the two
// builds hides nothing: both ran on one machine, by turns.
ResultSet AsResults(const PooledSide& side, const PooledSide& base) {
  ResultSet results;
  *results.add_environments() = base.environment;
  const auto add = [&](const Case& result, const Case& like) {
    Case* added = results.add_cases();
    *added = result;
    *added->mutable_key() = like.key();
    added->set_environment_id(base.environment.id());
  };
  add(side.result, base.result);
  if (side.dense.has_value() && base.dense.has_value()) add(*side.dense, *base.dense);
  return results;
}

bool Concerns(absl::string_view what, BisectMetric metric) {
  switch (metric) {
    case BisectMetric::kTime:
    case BisectMetric::kAbsoluteTime:
      return absl::StartsWith(what, "run time");
    case BisectMetric::kSetup:
      return absl::StartsWith(what, "setup time");
    case BisectMetric::kInstructions:
      return what == "instructions";
    case BisectMetric::kMemory:
      return what == "working memory";
    case BisectMetric::kError:
      return absl::StartsWith(what, "error against");
    case BisectMetric::kStatus:
      return what == "status";
  }
  return false;
}

bool IsChange(Verdict verdict) {
  return verdict == Verdict::kRegressed || verdict == Verdict::kImproved;
}

// Returns the finding of the case about the metric; of two errors the one that changed.
const Finding* ChooseFinding(const Comparison& comparison, const std::string& key,
                             BisectMetric metric, absl::string_view what) {
  const Finding* chosen = nullptr;
  for (const Finding& finding : comparison.findings) {
    if (finding.key != key || !Concerns(finding.what, metric)) continue;
    if (!what.empty() && metric == BisectMetric::kError && finding.what != what) continue;
    const bool is_better =
        chosen == nullptr || IsChange(finding.verdict) > IsChange(chosen->verdict) ||
        (IsChange(finding.verdict) == IsChange(chosen->verdict) && finding.what > chosen->what);
    if (is_better) chosen = &finding;
  }
  return chosen;
}

PairReading StatusReading(const Case& base, const Case& now) {
  PairReading pair;
  pair.what = "status";
  pair.base = std::string(Name(base.outcome().status()));
  pair.now = std::string(Name(now.outcome().status()));
  if (pair.base == pair.now) return pair;
  const bool is_better = now.outcome().status() == Outcome::STATUS_OK;
  pair.verdict = is_better ? Verdict::kImproved : Verdict::kRegressed;
  pair.reason = now.outcome().reason();
  const double ratio = is_better ? 0 : HUGE_VAL;
  pair.reading = {ratio, ratio, ratio};
  return pair;
}

absl::Status NotMeasured(absl::string_view side, const Case& result, BisectMetric metric) {
  const Outcome& outcome = result.outcome();
  return absl::FailedPreconditionError(
      absl::StrCat(side, " has no number for --metric=", Name(metric), " of the case, which is ",
                   Name(outcome.status()), outcome.reason().empty() ? "" : ": ", outcome.reason()));
}

// Tells whether the outcome has what the metric is about.
bool Has(const Outcome& outcome, BisectMetric metric) {
  switch (metric) {
    case BisectMetric::kTime:
    case BisectMetric::kAbsoluteTime:
    case BisectMetric::kSetup:
      return outcome.timing().run_ns_size() > 0;
    case BisectMetric::kInstructions:
      return outcome.timing().run_instructions_size() > 0;
    case BisectMetric::kMemory:
      return WorkingMemoryBytes(outcome).has_value();
    case BisectMetric::kError:
      return BoundedValue(outcome.against_definition()).has_value() ||
             BoundedValue(outcome.against_dense()).has_value() ||
             WorstGradientError(outcome) != nullptr;
    case BisectMetric::kStatus:
      return true;
  }
  return false;
}

absl::StatusOr<PairReading> CompareSides(const PooledSide& base, const PooledSide& now,
                                         BisectMetric metric, double least_change,
                                         absl::string_view what) {
  if (metric == BisectMetric::kStatus) return StatusReading(base.result, now.result);
  if (!Has(base.result.outcome(), metric)) return NotMeasured("the base", base.result, metric);
  if (!Has(now.result.outcome(), metric)) return NotMeasured("the commit", now.result, metric);
  CompareOptions options;
  options.threshold = options.memory_threshold = least_change;
  if (metric == BisectMetric::kAbsoluteTime) options.metric = CompareOptions::Metric::kAbsolute;
  if (metric == BisectMetric::kInstructions) options.metric = CompareOptions::Metric::kInstructions;
  TFB_ASSIGN_OR_RETURN(const Comparison comparison,
                       Compare(AsResults(base, base), AsResults(now, base), options));
  PairReading pair;
  const Finding* finding = ChooseFinding(comparison, CaseKey(base.result), metric, what);
  if (finding == nullptr) {
    // Compare reports no setup that is negligible on both sides.
    if (metric == BisectMetric::kSetup) return pair;
    return NotMeasured("one of the two", now.result, metric);
  }
  if (finding->verdict == Verdict::kNotJudged) {
    return absl::FailedPreconditionError(finding->reason);
  }
  pair.verdict = finding->verdict;
  pair.what = finding->what;
  pair.base = finding->base;
  pair.now = finding->now;
  pair.reason = finding->reason;
  const RatioInterval interval =
      finding->interval.value_or(RatioInterval{finding->change, finding->change, finding->change});
  pair.reading = {interval.ratio, interval.low, interval.high};
  return pair;
}

}  // namespace

absl::StatusOr<BisectMetric> ParseBisectMetric(absl::string_view name) {
  for (const NamedMetric& one : kMetrics) {
    if (one.name == name) return one.metric;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is none of ",
                   absl::StrJoin(kMetrics, ", ", [](std::string* out, const NamedMetric& one) {
                     absl::StrAppend(out, one.name);
                   })));
}

absl::string_view Name(BisectMetric metric) {
  const auto* found =
      std::find_if(std::begin(kMetrics), std::end(kMetrics),
                   [metric](const NamedMetric& one) { return one.metric == metric; });
  return found->name;
}

bool IsNoisy(BisectMetric metric) {
  return metric == BisectMetric::kTime || metric == BisectMetric::kAbsoluteTime ||
         metric == BisectMetric::kSetup || metric == BisectMetric::kInstructions;
}

absl::StatusOr<BisectCase> ParseBisectCase(absl::string_view text) {
  BisectCase wanted;
  std::string options;
  for (absl::string_view word : absl::StrSplit(text, absl::ByAnyChar(" \t\n"), absl::SkipEmpty())) {
    const std::string whole(word);
    if (absl::ConsumePrefix(&word, "technique=")) {
      wanted.technique = wanted.spec = Unescaped(word);
    } else if (absl::ConsumePrefix(&word, "options=")) {
      options = Unescaped(word);
    } else if (wanted.technique.empty()) {
      wanted.spec = whole;
      wanted.technique = whole.substr(0, whole.find_first_of(":,"));
      if (wanted.technique.find('=') != std::string::npos) wanted.technique.clear();
      TFB_RETURN_IF_ERROR(CheckSpec(wanted));
    } else {
      TFB_RETURN_IF_ERROR(AddField(whole, &wanted));
    }
  }
  if (!options.empty()) wanted.spec = SpecOfKey(wanted.technique, options);
  TFB_RETURN_IF_ERROR(CheckSpec(wanted));
  return wanted;
}

std::vector<std::string> SweepFlags(const BisectCase& wanted) {
  std::map<absl::string_view, std::string> values = {{"devices", "cpu"}};
  const auto field = [&](const std::string& name) -> std::string {
    const auto found = wanted.fields.find(name);
    return found == wanted.fields.end() ? "" : found->second;
  };
  const bool is_accuracy = field("purpose") == "accuracy";
  std::string input = field("input");
  if (input.empty()) input = is_accuracy ? "real" : "gaussian";
  const bool is_drawn = input == "gaussian" || input == "peaked" || input == "needle";
  if (is_drawn) values["lengths"] = kDefaultTokens;
  for (const Field& one : kFields) {
    const std::string value = field(std::string(one.name));
    if (!one.flag.empty() && !value.empty()) values[one.flag] = value;
  }
  values["input"] = input;
  // A key of tensors from a file has the file's name without its folder.
  if (input == "file") values.erase("input");
  // A case on a GPU has no threads.
  if (field("threads") == "0") values.erase("threads");
  if (!field("causal").empty()) values["causal"] = field("causal") == "1" ? "true" : "false";
  std::vector<std::string> flags = {absl::StrCat("--techniques=", wanted.spec),
                                    absl::StrCat("--accuracy=", is_accuracy ? "true" : "false")};
  for (const auto& [flag, value] : values) {
    flags.push_back(absl::StrCat("--", flag, "=", value));
  }
  return flags;
}

absl::StatusOr<const Case*> FindCase(const ResultSet& results, const BisectCase& wanted) {
  std::vector<const Case*> all, found;
  for (const auto& [key, result] : CasesByKey(results)) {
    all.push_back(result);
    if (HasFields(*result, wanted)) found.push_back(result);
  }
  if (found.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no case of ", wanted.spec, " was measured; there are: ", Described(all)));
  }
  Prefer([&](const Case* one) { return HasOptions(*one, wanted); }, &found);
  Prefer([](const Case* one) { return !IsBaseline(*one); }, &found);
  if (found.size() == 1) return found[0];
  return absl::FailedPreconditionError(
      absl::StrCat("several cases of ", wanted.spec,
                   " were measured; add fields that only one of them has: ", Described(found)));
}

absl::StatusOr<PairReading> ReadPair(const std::vector<ResultSet>& base,
                                     const std::vector<ResultSet>& now, const BisectCase& wanted,
                                     BisectMetric metric, double least_change,
                                     absl::string_view what) {
  TFB_ASSIGN_OR_RETURN(const PooledSide before, PoolSide(base, wanted));
  TFB_ASSIGN_OR_RETURN(const PooledSide after, PoolSide(now, wanted));
  TFB_ASSIGN_OR_RETURN(PairReading pair, CompareSides(before, after, metric, least_change, what));
  pair.subject = DescribeCase(before.result);
  pair.case_status = std::string(Name(after.result.outcome().status()));
  pair.build_differences = BuildDifferences(before, after);
  return pair;
}

}  // namespace tfb
