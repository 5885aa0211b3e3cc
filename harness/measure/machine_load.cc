#include "harness/measure/machine_load.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tfb {
namespace {

// Returns the file's contents; empty where it cannot be read.
std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream contents;
  contents << file.rdbuf();
  return contents.str();
}

std::vector<absl::string_view> Words(absl::string_view text) {
  return absl::StrSplit(text, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
}

// Returns the sum of the numbers in `words` at `places`; nothing where one is missing or malformed.
std::optional<double> SumAt(const std::vector<absl::string_view>& words,
                            std::initializer_list<size_t> places) {
  double sum = 0;
  for (const size_t place : places) {
    double value = 0;
    if (place >= words.size() || !absl::SimpleAtod(words[place], &value)) return std::nullopt;
    sum += value;
  }
  return sum;
}

std::optional<double> Seconds(std::optional<double> ticks, double ticks_per_second) {
  if (!ticks.has_value() || !(ticks_per_second > 0)) return std::nullopt;
  return *ticks / ticks_per_second;
}

// Reads "cpu user nice system idle iowait irq softirq steal guest guest_nice", of which user
// includes guest (see proc(5)). The line of each core is "cpu0 ...".
void ReadStat(const std::string& text, double ticks_per_second, LoadReading* reading) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = Words(line);
    if (words.empty()) continue;
    if (words[0] == "cpu") {
      reading->busy_seconds = Seconds(SumAt(words, {1, 2, 3, 6, 7}), ticks_per_second);
      reading->stolen_seconds = Seconds(SumAt(words, {8}), ticks_per_second);
    } else if (absl::StartsWith(words[0], "cpu")) {
      ++reading->cores;
    }
  }
}

// Returns user and system time, fields 14 and 15 (see proc(5)). Field 2, a name in brackets, may
// contain any character.
std::optional<double> OwnTicks(const std::string& text) {
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  return SumAt(Words(absl::string_view(text).substr(name_end + 1)), {11, 12});
}

// Parses "some avg10=0.12 avg60=0.05 avg300=0.01 total=123456", the total in microseconds.
std::optional<double> StalledSeconds(const std::string& text) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = Words(line);
    if (words.empty() || words[0] != "some") continue;
    absl::string_view total = words.back();
    double microseconds = 0;
    if (!absl::ConsumePrefix(&total, "total=") || !absl::SimpleAtod(total, &microseconds)) {
      return std::nullopt;
    }
    return microseconds * 1e-6;
  }
  return std::nullopt;
}

// Returns 3 for "0.20 0.18 0.12 3/264 11206": three tasks of 264 can run.
std::optional<int> RunnableTasks(const std::string& text) {
  const std::vector<absl::string_view> words = Words(text);
  if (words.size() < 4) return std::nullopt;
  const std::vector<absl::string_view> counts = absl::StrSplit(words[3], '/');
  int runnable = 0;
  if (counts.size() != 2 || !absl::SimpleAtoi(counts[0], &runnable)) return std::nullopt;
  return runnable;
}

// Returns nothing where a counter is unknown or decreased.
std::optional<double> Between(std::optional<double> before, std::optional<double> after) {
  if (!before.has_value() || !after.has_value() || *after < *before) return std::nullopt;
  return *after - *before;
}

}  // namespace

LoadReading ReadMachineLoad(const LoadSources& sources) {
  LoadReading reading;
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  reading.at_seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  const double ticks = sources.ticks_per_second > 0 ? sources.ticks_per_second
                                                    : static_cast<double>(sysconf(_SC_CLK_TCK));
  ReadStat(Contents(sources.stat), ticks, &reading);
  reading.stalled_seconds = StalledSeconds(Contents(sources.pressure));
  reading.runnable = RunnableTasks(Contents(sources.loadavg));
  double own = 0;
  for (const std::string& path : sources.own_stats) {
    const std::optional<double> seconds = Seconds(OwnTicks(Contents(path)), ticks);
    if (!seconds.has_value()) return reading;
    own += *seconds;
  }
  reading.own_seconds = own;
  return reading;
}

MachineLoad LoadBetween(const LoadReading& before, const LoadReading& after, int threads,
                        int usable_cores) {
  MachineLoad load;
  load.set_observed_seconds(std::max(0.0, after.at_seconds - before.at_seconds));
  load.set_cores(after.cores);
  load.set_threads(threads);
  load.set_usable_cores(usable_cores);
  const std::optional<double> busy = Between(before.busy_seconds, after.busy_seconds);
  const std::optional<double> own = Between(before.own_seconds, after.own_seconds);
  // The counters' ticks may make the difference slightly negative; sums over cases even that out.
  if (busy.has_value() && own.has_value()) load.set_other_core_seconds(*busy - *own);
  const std::optional<double> stolen = Between(before.stolen_seconds, after.stolen_seconds);
  if (stolen.has_value()) load.set_stolen_core_seconds(*stolen);
  const std::optional<double> stalled = Between(before.stalled_seconds, after.stalled_seconds);
  if (stalled.has_value()) load.set_stalled_seconds(*stalled);
  if (before.runnable.has_value() || after.runnable.has_value()) {
    load.set_most_runnable(std::max(before.runnable.value_or(0), after.runnable.value_or(0)));
  }
  return load;
}

void AddLoad(const MachineLoad& more, MachineLoad* sum) {
  if (!(sum->observed_seconds() > 0)) {
    *sum = more;
    return;
  }
  sum->set_observed_seconds(sum->observed_seconds() + more.observed_seconds());
  sum->set_cores(std::max(sum->cores(), more.cores()));
  sum->set_threads(std::max(sum->threads(), more.threads()));
  sum->set_usable_cores(std::max(sum->usable_cores(), more.usable_cores()));
  const MachineLoad one = *sum;
  sum->clear_other_core_seconds();
  sum->clear_stolen_core_seconds();
  sum->clear_stalled_seconds();
  sum->clear_most_runnable();
  if (one.has_other_core_seconds() && more.has_other_core_seconds()) {
    sum->set_other_core_seconds(one.other_core_seconds() + more.other_core_seconds());
  }
  if (one.has_stolen_core_seconds() && more.has_stolen_core_seconds()) {
    sum->set_stolen_core_seconds(one.stolen_core_seconds() + more.stolen_core_seconds());
  }
  if (one.has_stalled_seconds() && more.has_stalled_seconds()) {
    sum->set_stalled_seconds(one.stalled_seconds() + more.stalled_seconds());
  }
  if (one.has_most_runnable() && more.has_most_runnable()) {
    sum->set_most_runnable(std::max(one.most_runnable(), more.most_runnable()));
  }
}

}  // namespace tfb
