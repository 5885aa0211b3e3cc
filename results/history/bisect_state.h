// Keeps in a file what a bisection has done so far, so that one that was killed goes on.
#ifndef TFB_RESULTS_HISTORY_BISECT_STATE_H_
#define TFB_RESULTS_HISTORY_BISECT_STATE_H_

#include <map>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tfb {

// How the build of a commit ended.
struct BuildRecord {
  std::string program;  // git's hash of the program and its data; empty where there is none
  std::string failure;  // why there is none
  std::string log;
  double seconds = 0;
};

// How a measurement of two programs by turns ended.
struct MeasurementRecord {
  std::string base_file, new_file;  // result files
  std::string failure;              // why there are none
  std::string log;
  double seconds = 0;
};

struct BisectState {
  // The flags that say what is sought, by their names. A file with other values belongs to another
  // bisection.
  std::map<std::string, std::string> question;
  std::map<std::string, BuildRecord> builds;  // by the hash of the commit
  // By the program of the base, that of the commit, and the look.
  std::map<std::tuple<std::string, std::string, int>, MeasurementRecord> measurements;
};

// Reads the state from a file. Returns an empty state where there is no such file, and DataLoss,
// naming it, where it is no state.
absl::StatusOr<BisectState> ReadBisectState(const std::string& path);
// Writes the file whole or not at all.
absl::Status WriteBisectState(const std::string& path, const BisectState& state);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_STATE_H_
