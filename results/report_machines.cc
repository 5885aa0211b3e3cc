// Writes the lines around the tables: machines, inputs, outcomes, marks.

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "results/describe.h"
#include "results/reader.h"
#include "results/report.h"

namespace tfb {
namespace report {
namespace {

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
  if (!environment.simd().empty()) {
    absl::StrAppend(&machine, ", ", Printable(environment.simd(0)));
  }
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

// Returns only the name of "sentence-transformers/all-MiniLM-L6-v2: BERT, 6 layers; from …".
std::string ShortModel(absl::string_view model) {
  for (const absl::string_view end : {": ", "; "}) model = model.substr(0, model.find(end));
  return Printable(model);
}

// Returns the origin of the tensors of each file, once for all tables.
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

// The cases that share a status and a reason.
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

std::string LegendLine(const std::vector<Table>& tables) {
  bool unsteady = false, absent = false, equal = false, few = false, theirs = false;
  for (const Table& table : tables) {
    for (const auto& row : table.rows) {
      theirs = theirs || (!row.empty() && absl::StrContains(row.front().text, "@"));
    }
    for (size_t c = 0; c < table.columns.size(); ++c) {
      if (!table.columns[c].right) continue;
      for (const auto& row : table.rows) {
        unsteady = unsteady || absl::EndsWith(row[c].text, "~");
        few = few || absl::EndsWith(row[c].detail, "]?");
        equal =
            equal || absl::EndsWith(row[c].detail, "x=") || absl::StrContains(row[c].text, "x=");
        absent = absent || row[c].text == "-" || absl::StartsWith(row[c].text, "- ");
      }
    }
  }
  std::vector<std::string> parts;
  if (unsteady) parts.push_back("~: the median's 95% interval is wider than +-5%");
  if (few) parts.push_back("]?: from the ranges of all samples, too few for an interval of 95%");
  if (equal) parts.push_back("=: the samples do not tell the two apart");
  if (absent) parts.push_back("-: not measured, or there is no such number");
  if (theirs) parts.push_back("NAME@FILE: somebody else's code, on the same tensors");
  return absl::StrJoin(parts, "; ");
}

std::vector<Table> EnvironmentTables(const Analysis& analysis) {
  std::vector<Table> tables;
  for (const Environment& environment : analysis.results().environments()) {
    tables.push_back(EnvironmentTable(environment));
  }
  for (Table& table : ContestantTables(analysis)) tables.push_back(std::move(table));
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

std::vector<OutcomeLine> OutcomeLines(const Analysis& analysis, bool details) {
  std::vector<OutcomeLine> lines;
  std::map<Outcome::Status, int64_t> counts;
  for (const Case* result : analysis.cases()) ++counts[result->outcome().status()];
  for (const Reason& reason : Reasons(analysis)) {
    const std::string text = absl::StrCat(Name(reason.status), ", ", Plural(reason.cases, "case"),
                                          ": ", OrUnknown(reason.reason, "no reason given"));
    if (!details && !IsBad(reason.status)) {
      lines.push_back({text, false});
      continue;
    }
    // A failure is shown in full, unless it repeats.
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
  const int64_t unfinished =
      std::count_if(analysis.cases().begin(), analysis.cases().end(),
                    [](const Case* result) { return result->outcome().unfinished(); });
  if (unfinished > 0) {
    absl::StrAppend(&total, "; ", unfinished, unfinished == 1 ? " lacks" : " lack",
                    " samples, as the sweep was stopped before it took them: --resume takes them");
  }
  if (analysis.superseded_cases() > 0) {
    absl::StrAppend(&total, "; ", Plural(analysis.superseded_cases(), "repeated case"),
                    " left out for a later one");
  }
  lines.push_back({total, counts[Outcome::STATUS_FAILED] > 0});
  return lines;
}

}  // namespace report
}  // namespace tfb
