// A store of runs: a folder of plain files that only grows, so that it can be copied, put under
// version control, and written by several processes at once.
//
//   DIR/tfb-history            the store's format, "tfb.History/1", and a line for people
//   DIR/runs/NAME.pb.gz        one run each (results/history/history.proto)
//
// A run's name is made of the start of its sweep, its commit and its environments' ids, so that the
// same run has the same name in every store: adding it again changes nothing, and two stores are
// merged by uniting their files. A file comes into being whole (written and synchronised under
// another name, then renamed) and is never changed or replaced. Writers take turns by a lock on
// DIR/tfb-history; what a killed writer left is removed by the next one.
//
// Errors name the file: NotFound and PermissionDenied of the system; InvalidArgument where the
// folder is no store, or one of a newer version; DataLoss where a run is cut or damaged;
// ResourceExhausted where the disk is full. After any of them the store is as it was.
#ifndef TFB_RESULTS_HISTORY_STORE_H_
#define TFB_RESULTS_HISTORY_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/history/history.pb.h"
#include "results/reader.h"

namespace tfb {

inline constexpr absl::string_view kHistoryFormat = "tfb.History/1";
inline constexpr absl::string_view kHistoryRunFormat = "tfb.HistoryRun/1";

struct StoredRun {
  std::string name;  // of its file without ".pb.gz"
  HistoryRun run;
};

struct StoredRuns {
  std::vector<StoredRun> runs;     // by name, and so by the start of their sweeps
  std::vector<std::string> notes;  // a sentence for each run that could not be read
};

// What an addition did, by the runs' names.
struct Additions {
  std::vector<std::string> added;
  std::vector<std::string> known;  // that were in the store already
};

class HistoryStore {
 public:
  // Opens the store in `folder`. Creates it where the folder does not exist or is empty.
  static absl::StatusOr<HistoryStore> OpenOrCreate(const std::string& folder);
  // Opens the store in `folder`. Returns NotFound where there is none.
  static absl::StatusOr<HistoryStore> Open(const std::string& folder);

  // Adds runs: all of them, or none where one of them cannot be added. Waits for another writer, at
  // most a minute. Returns AlreadyExists where the store has a run of the same name with other
  // contents, as of a sweep that was resumed after it had been added.
  absl::StatusOr<Additions> Add(const std::vector<HistoryRun>& runs) const;

  // Reads all runs but those of an interrupted sweep whose resumed run is there, too: a run of which
  // another one has every environment, and more of them, is left out, since the other one has its
  // samples. With Damage::kPassOver a run that is cut or damaged gives a note instead of an
  // error; one of a newer version is an error in any case.
  absl::StatusOr<StoredRuns> Read(Damage damage = Damage::kRefuse) const;

  const std::string& folder() const { return folder_; }

 private:
  explicit HistoryStore(std::string folder) : folder_(std::move(folder)) {}
  std::string folder_;
};

// Returns the name of a run's file without ".pb.gz": "20261123T181522Z-786d64f0c1aa-1f2e3d4c".
std::string RunName(const HistoryRun& run);

// Return the bytes of a run's file, and the run of such bytes; `path` stands in messages.
std::string PackRun(const HistoryRun& run);
absl::StatusOr<HistoryRun> UnpackRun(absl::string_view bytes, const std::string& path);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_STORE_H_
