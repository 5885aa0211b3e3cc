// Makes runs for tests of histories.
#ifndef TFB_RESULTS_HISTORY_TESTING_H_
#define TFB_RESULTS_HISTORY_TESTING_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "results/history/history.pb.h"
#include "results/results.pb.h"

namespace tfb {

// Returns a hash of 40 digits that is different for different numbers and begins with them.
std::string CommitOfNumber(int number);

// Returns the `number`-th run, of its own commit, an hour after the one before, on a machine that
// MachineSignature tells from others by `processor`. It has no cases.
HistoryRun MakeHistoryRun(int number, absl::string_view processor = "Imaginary CPU 9000");

// Adds a case that is OK to the run, and returns it. Its key is "technique=NAME tokens=TOKENS".
HistoryCase* AddHistoryCase(HistoryRun* run, absl::string_view name, int64_t tokens = 1024);
void AddHistoryValue(HistoryCase* result, HistoryMetric metric, double value);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_TESTING_H_
