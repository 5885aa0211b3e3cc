// Keeps the results of many runs, and finds what changed in them and when.

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "core/command_line.h"
#include "core/file_error.h"
#include "core/output_file.h"
#include "core/status.h"
#include "results/files.h"
#include "results/history/branch_store.h"
#include "results/history/check.h"
#include "results/history/check_report.h"
#include "results/history/page/history_page.h"
#include "results/history/series.h"
#include "results/history/store.h"
#include "results/history/summary.h"
#include "results/reader.h"
#include "results/report_text.h"
#include "results/table.h"
#include "tools/history_bisect.h"

ABSL_DECLARE_FLAG(std::string, repository);  // of history_bisect.cc

ABSL_FLAG(
    std::string, store, "",
    "The store: a folder, which add and merge create, or git:BRANCH, a branch of --repository.");
ABSL_FLAG(
    bool, salvage, false,
    "Leave out what is damaged in result files and in stores, and say so; else it is an error.");
ABSL_FLAG(bool, across_machines, false,
          "Compare the runs of all machines with one another, as if they were one.");
ABSL_FLAG(
    std::string, acknowledged, "",
    "A file of regressions that are accepted, a line each: COMMIT METRIC PATTERN # REASON. Empty: "
    "none.");
ABSL_FLAG(
    std::string, metrics, "",
    "What to judge, of time (over dense), machine_time (of dense, over fixed arithmetic), setup, "
    "memory, error, error_against_dense, status, absolute_time. Empty: all but the last.");
ABSL_FLAG(double, false_alarm_rate, 0.003,
          "The probability that a check reports any time as changed on a machine where none has, "
          "whatever the number of cases.");
ABSL_FLAG(double, threshold, 1.02,
          "A time that changed by less than this factor is no regression.");
ABSL_FLAG(double, memory_threshold, 1.05,
          "A memory that grew by this factor or more is a regression.");
ABSL_FLAG(double, error_threshold, 1.25,
          "An error that grew by this factor or more is a regression.");
ABSL_FLAG(double, error_floor, 1e-5, "Errors up to here are rounding and are not compared.");
ABSL_FLAG(bool, all, false, "Also list improvements, and changes that are over or acknowledged.");
ABSL_FLAG(std::string, output, "", "The file that page writes.");
ABSL_FLAG(std::string, title, "", "The title of the page.");
ABSL_FLAG(
    std::string, commit_url, "",
    "Where a commit is shown, for the page's links, as in https://example.org/commit/%s. Empty: "
    "none.");
ABSL_FLAG(std::string, format, "terminal", "terminal, markdown or json (with all changes).");

namespace tfb {
namespace {

constexpr char kProgram[] = "history";
constexpr char kUsage[] =
    "history add RUN.pb... --store=STORE\n"
    "history check --store=STORE [--acknowledged=FILE] [--format=terminal|markdown|json] [--all]\n"
    "history page --store=STORE --output=FILE.html [--title=TITLE] [--commit_url=URL]\n"
    "history list --store=STORE\n"
    "history merge OTHER_STORE... --store=STORE\n"
    "history bisect --case=CASE --good=COMMIT [--bad=COMMIT] [--metric=time]\n"
    "A store has the errors, times, memory and outcomes of many runs of //harness:sweep, and\n"
    "only grows. add puts runs into it, merge all runs of other stores. check finds the runs, and\n"
    "so the commits, at which something changed for good: times by a change point test with a\n"
    "stated rate of false alarms, all else by thresholds. Runs of different machines are not\n"
    "compared. page draws every series with its changes, list shows the runs.\n"
    "history bisect --help explains that command.\n\n"
    "Exit status: 0 done, nothing regressed; 1 a regression that nobody acknowledged; 2 bad\n"
    "usage, or a store or a file that cannot be read or written.";

std::string RepositoryFolder() { return CallerPath(absl::GetFlag(FLAGS_repository)); }

// A store in a folder or in a branch.
class AnyStore {
 public:
  explicit AnyStore(const std::string& name) : is_branch_(absl::StartsWith(name, "git:")) {
    branch_ = {RepositoryFolder(), std::string(absl::StripPrefix(name, "git:"))};
    if (!is_branch_) folder_ = CallerPath(name);
  }

  absl::StatusOr<Additions> Add(const std::vector<HistoryRun>& runs) const {
    if (is_branch_) return AddToBranch(branch_, runs);
    TFB_ASSIGN_OR_RETURN(const HistoryStore store, HistoryStore::OpenOrCreate(folder_));
    return store.Add(runs);
  }

  // Reads all runs, and says on stderr what was left out.
  absl::StatusOr<std::vector<StoredRun>> Read() const {
    const Damage damage = absl::GetFlag(FLAGS_salvage) ? Damage::kPassOver : Damage::kRefuse;
    absl::StatusOr<StoredRuns> stored;
    if (is_branch_) {
      stored = ReadBranch(branch_, damage);
    } else {
      TFB_ASSIGN_OR_RETURN(const HistoryStore store, HistoryStore::Open(folder_));
      stored = store.Read(damage);
    }
    if (!stored.ok()) return stored.status();
    for (const std::string& note : stored->notes) PrintError(kProgram, note);
    return std::move(stored->runs);
  }

 private:
  bool is_branch_;
  BranchStore branch_;
  std::string folder_;
};

absl::StatusOr<AnyStore> StoreOfFlag() {
  const std::string name = absl::GetFlag(FLAGS_store);
  if (name.empty())
    return absl::InvalidArgumentError("--store=FOLDER or --store=git:BRANCH is wanted");
  return AnyStore(name);
}

void PrintAdditions(const Additions& additions) {
  for (const std::string& name : additions.added) std::cout << "added " << name << "\n";
  for (const std::string& name : additions.known) std::cout << "already there: " << name << "\n";
  std::cout << std::flush;
}

absl::StatusOr<int> Add(const std::vector<std::string>& paths) {
  if (paths.empty()) return absl::InvalidArgumentError("add: name the result files to add");
  TFB_ASSIGN_OR_RETURN(const AnyStore store, StoreOfFlag());
  std::vector<HistoryRun> runs;
  for (const std::string& argument : paths) {
    const std::string path = CallerPath(argument);
    TFB_ASSIGN_OR_RETURN(
        const ResultFile file,
        ReadResultFile(path, absl::GetFlag(FLAGS_salvage) ? Damage::kPassOver : Damage::kRefuse));
    if (const std::string note = WhatWasLeftOut(file); !note.empty()) PrintError(kProgram, note);
    TFB_ASSIGN_OR_RETURN(HistoryRun run, SummarizeRun(file.results, path));
    DescribeCommitOf(RepositoryFolder(), &run);
    runs.push_back(std::move(run));
  }
  TFB_ASSIGN_OR_RETURN(const Additions additions, store.Add(runs));
  PrintAdditions(additions);
  return kExitDone;
}

absl::StatusOr<int> Merge(const std::vector<std::string>& others) {
  if (others.empty())
    return absl::InvalidArgumentError("merge: name the stores to merge into --store");
  TFB_ASSIGN_OR_RETURN(const AnyStore store, StoreOfFlag());
  std::vector<HistoryRun> runs;
  for (const std::string& other : others) {
    TFB_ASSIGN_OR_RETURN(std::vector<StoredRun> stored, AnyStore(other).Read());
    for (StoredRun& run : stored) runs.push_back(std::move(run.run));
  }
  TFB_ASSIGN_OR_RETURN(const Additions additions, store.Add(runs));
  std::cout << additions.added.size() << " runs added, " << additions.known.size()
            << " were there already\n"
            << std::flush;
  return kExitDone;
}

absl::StatusOr<History> ReadHistory() {
  TFB_ASSIGN_OR_RETURN(const AnyStore store, StoreOfFlag());
  TFB_ASSIGN_OR_RETURN(const std::vector<StoredRun> runs, store.Read());
  if (runs.empty()) {
    return absl::NotFoundError(absl::StrCat(absl::GetFlag(FLAGS_store), ": no runs in the store"));
  }
  return MakeHistory(runs, absl::GetFlag(FLAGS_across_machines));
}

absl::StatusOr<std::vector<Acknowledgement>> ReadAcknowledgements() {
  const std::string name = absl::GetFlag(FLAGS_acknowledged);
  if (name.empty()) return std::vector<Acknowledgement>();
  const std::string path = CallerPath(name);
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return FileError(path, "read", errno);
  return ParseAcknowledgements(text.str(), path);
}

absl::StatusOr<CheckOptions> CheckOptionsFromFlags() {
  CheckOptions options;
  options.false_alarm_rate = absl::GetFlag(FLAGS_false_alarm_rate);
  options.threshold = absl::GetFlag(FLAGS_threshold);
  options.memory_threshold = absl::GetFlag(FLAGS_memory_threshold);
  options.error_threshold = absl::GetFlag(FLAGS_error_threshold);
  options.error_floor = absl::GetFlag(FLAGS_error_floor);
  const std::string metrics = absl::GetFlag(FLAGS_metrics);
  if (metrics.empty()) return options;
  options.metrics.clear();
  for (const absl::string_view name : absl::StrSplit(metrics, ',')) {
    absl::StatusOr<HistoryMetric> metric = ParseHistoryMetric(name);
    if (!metric.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--metrics: ", metric.status().message()));
    }
    options.metrics.push_back(*metric);
  }
  return options;
}

absl::StatusOr<int> Check(const std::vector<std::string>&) {
  TFB_ASSIGN_OR_RETURN(const CheckFormat format, ParseCheckFormat(absl::GetFlag(FLAGS_format)));
  TFB_ASSIGN_OR_RETURN(const CheckOptions options, CheckOptionsFromFlags());
  TFB_ASSIGN_OR_RETURN(const std::vector<Acknowledgement> acknowledgements, ReadAcknowledgements());
  TFB_ASSIGN_OR_RETURN(const History history, ReadHistory());
  TFB_ASSIGN_OR_RETURN(const HistoryCheck check, CheckHistory(history, options, acknowledgements));
  std::cout << RenderCheck(history, check, format, absl::GetFlag(FLAGS_all),
                           StyleFor(STDOUT_FILENO))
            << std::flush;
  return check.regressions() > 0 ? kExitCheckFailed : kExitDone;
}

absl::StatusOr<int> WritePage(const std::vector<std::string>&) {
  const std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) return absl::InvalidArgumentError("page: --output=FILE.html is wanted");
  HistoryPageOptions page;
  page.title = absl::GetFlag(FLAGS_title);
  page.commit_url = absl::GetFlag(FLAGS_commit_url);
  if (!page.commit_url.empty() && !IsCommitUrl(page.commit_url)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--commit_url: \"", Printable(page.commit_url),
                     "\": http:// or https:// and %s in the commit's place are wanted"));
  }
  TFB_RETURN_IF_ERROR(CheckWritable(CallerPath(output)));
  TFB_ASSIGN_OR_RETURN(const CheckOptions options, CheckOptionsFromFlags());
  TFB_ASSIGN_OR_RETURN(const std::vector<Acknowledgement> acknowledgements, ReadAcknowledgements());
  TFB_ASSIGN_OR_RETURN(const History history, ReadHistory());
  TFB_ASSIGN_OR_RETURN(const HistoryCheck check, CheckHistory(history, options, acknowledgements));
  page.notes = check.notes;
  TFB_RETURN_IF_ERROR(
      WriteFile(CallerPath(output), RenderHistoryPage(history, check.changes, page)));
  std::cout << CheckVerdict(history, check) << ": " << output << "\n" << std::flush;
  return kExitDone;
}

absl::StatusOr<int> List(const std::vector<std::string>&) {
  TFB_ASSIGN_OR_RETURN(const History history, ReadHistory());
  for (const Machine& machine : history.machines) {
    Table table;
    table.title = machine.signature;
    table.columns = {{"began"}, {"commit"}, {"subject", false, 20}, {"file", false, 20}};
    for (const RunInfo& run : machine.runs) {
      table.rows.push_back(
          {absl::FormatTime("%Y-%m-%d %H:%M", absl::FromUnixSeconds(run.start_unix_s),
                            absl::UTCTimeZone()),
           absl::StrCat(run.commit.substr(0, 12), run.dirty ? "+" : ""), run.commit_subject,
           run.file});
    }
    std::cout << ToTerminal(table, StyleFor(STDOUT_FILENO)) << "\n";
  }
  std::cout << std::flush;
  return kExitDone;
}

struct Command {
  absl::StatusOr<int> (*run)(const std::vector<std::string>& arguments);
  bool takes_arguments;
  std::vector<std::string> flags;
};

// Returns the names of the flags among the words of a command line.
std::vector<std::string> FlagsIn(const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (size_t i = 1; i < words.size() && words[i] != "--"; ++i) {
    absl::string_view word = words[i];
    if (!absl::ConsumePrefix(&word, "-")) continue;
    absl::ConsumePrefix(&word, "-");
    std::string name(word.substr(0, word.find('=')));
    if (absl::FindCommandLineFlag(name) == nullptr)
      name = std::string(absl::StripPrefix(name, "no"));
    if (absl::FindCommandLineFlag(name) != nullptr) names.push_back(std::move(name));
  }
  return names;
}

// Returns an error for a flag of another command, which would do nothing.
absl::Status CheckFlags(const std::string& command, const std::vector<std::string>& known,
                        const std::vector<std::string>& words) {
  for (const std::string& name : FlagsIn(words)) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(command, ": --", name, " is a flag of another command; this one takes --",
                     absl::StrJoin(known, ", --")));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> RunCommand(const CommandLine& line, const std::vector<std::string>& words) {
  if (!line.arguments.empty() && line.arguments[0] == "bisect") {
    TFB_RETURN_IF_ERROR(CheckFlags("bisect", BisectFlags(), words));
    CommandLine rest = line;
    rest.arguments.erase(rest.arguments.begin());
    return RunBisect(rest);
  }
  const std::vector<std::string> judging = {
      "store",       "repository",       "salvage",     "across_machines",
      "metrics",     "false_alarm_rate", "threshold",   "memory_threshold",
      "error_floor", "error_threshold",  "acknowledged"};
  const auto and_also = [](std::vector<std::string> flags, const std::vector<std::string>& more) {
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  };
  const std::map<std::string, Command> commands = {
      {"add", {Add, true, {"store", "repository", "salvage"}}},
      {"check", {Check, false, and_also(judging, {"all", "format"})}},
      {"list", {List, false, {"store", "repository", "salvage", "across_machines"}}},
      {"merge", {Merge, true, {"store", "repository", "salvage"}}},
      {"page", {WritePage, false, and_also(judging, {"output", "title", "commit_url"})}}};
  std::vector<std::string> names = {"bisect"};
  for (const auto& [name, command] : commands) names.push_back(name);
  const std::string known = absl::StrJoin(names, ", ");
  if (line.arguments.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("name a command: ", known, "; see --help"));
  }
  const auto command = commands.find(line.arguments[0]);
  if (command == commands.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", Printable(line.arguments[0]), "\" is none of ", known));
  }
  TFB_RETURN_IF_ERROR(CheckFlags(command->first, command->second.flags, words));
  const std::vector<std::string> arguments(line.arguments.begin() + 1, line.arguments.end());
  if (!arguments.empty() && !command->second.takes_arguments) {
    return absl::InvalidArgumentError(
        absl::StrCat(command->first, ": takes no argument, not \"", Printable(arguments[0]), "\""));
  }
  return command->second.run(arguments);
}

}  // namespace
}  // namespace tfb

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv, argv + argc);
  const bool is_bisect = argc > 1 && words[1] == "bisect";
  return tfb::RunMain(tfb::kProgram, is_bisect ? tfb::kBisectUsage : tfb::kUsage, words,
                      [&](const tfb::CommandLine& line) { return tfb::RunCommand(line, words); });
}
