// The runs of a store as series: the values of one metric of one case on one machine, run by run.
#ifndef TFB_RESULTS_HISTORY_SERIES_H_
#define TFB_RESULTS_HISTORY_SERIES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/history/history.pb.h"
#include "results/history/store.h"
#include "results/results.pb.h"

namespace tfb {

// What is known of one run of a store.
struct RunInfo {
  std::string name;          // of its file in the store
  std::string file;          // base name of the result file that it was added from
  int64_t start_unix_s = 0;  // when its sweep began
  std::string commit;        // full hash; empty where unknown
  bool dirty = false;        // whether there were changes that are not committed
  std::optional<int64_t> commit_unix_s;
  std::string commit_subject;
  // One text for each property that may explain a change beside the commit: compiler, flags, mode,
  // operating system, driver. In a fixed order, so that two runs can be compared.
  std::vector<std::string> build;
};

// The runs of one kind of machine, which alone are compared with one another.
struct Machine {
  std::string
      signature;  // what tells it from others, for people: "AMD EPYC, 2 cores, AVX-512, ..."
  std::vector<RunInfo> runs;  // in the order of history; see MakeHistory
};

// The values of one metric of a case; of times also those of a technique at all its lengths, as
// geometric means, which have less noise. A mean's key is the case's with 0 tokens, and its
// `tokens` are 0. It has the runs that have all lengths of the latest one.
struct HistorySeries {
  int machine = 0;  // index into History::machines
  HistoryMetric metric = HISTORY_METRIC_UNSPECIFIED;
  std::string key;  // of the case (results/reader.h)
  std::string name;
  std::string problem;
  std::string technique;
  std::string family;
  int64_t tokens = 0;
  DeviceType device = DEVICE_TYPE_UNSPECIFIED;
  std::optional<double> bound;  // of the last value
  std::string reason;           // of the last status that is not OK

  // The runs that have a value, by index into Machine::runs, ascending, and the values. Positive
  // where the metric is a time or a memory; NaN and infinity where that was measured.
  std::vector<int> runs;
  std::vector<double> values;
};

struct History {
  std::vector<Machine> machines;  // the one with the latest run first
  // By machine; first means over lengths, then those of cases, in the order of the latest run's.
  std::vector<HistorySeries> series;
};

// Returns the metric's name on the command line and in acknowledgements ("time", "memory", ...) and
// in sentences ("time over dense", "working memory", ...).
absl::string_view MetricName(HistoryMetric metric);
absl::string_view MetricTitle(HistoryMetric metric);
// Returns the metric with this name; InvalidArgument names all of them.
absl::StatusOr<HistoryMetric> ParseHistoryMetric(absl::string_view name);
// Returns a value for people, with its unit: "0.184", "4.33 MiB", "1.2e-07", "timeout".
std::string FormatValue(HistoryMetric metric, double value);

// Returns the text that tells the machine of `environment` from others: processor, usable cores,
// instruction set, caches, GPUs. Hosts of one kind have one signature, as the runners of a
// continuous integration are. Returns "" where the environment does not name its processor.
std::string MachineSignature(const Environment& environment);

// Sorts the runs of each machine by the commit's date where all of the machine's runs have one,
// else by their start, then by name, and makes their series. With `across_machines` all runs are
// those of one machine, whose signature says so.
History MakeHistory(const std::vector<StoredRun>& runs, bool across_machines = false);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_SERIES_H_
