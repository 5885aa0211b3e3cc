// The folder of a bisection: builds commits in a worktree, measures two programs by turns, and
// remembers both.
#ifndef TFB_RESULTS_HISTORY_BISECT_FOLDER_H_
#define TFB_RESULTS_HISTORY_BISECT_FOLDER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "results/history/bisect.h"
#include "results/history/bisect_state.h"
#include "results/history/repository.h"

namespace tfb {

// results/history/bisect.h describes what is in the folder, and the options.
class BisectFolder {
 public:
  // Locks the folder and reads its state. Removes the worktrees of bisections that were killed,
  // with a line of progress. Returns an error where the folder is within the checkout, cannot be
  // written, has other files, is locked by another process, or belongs to another question.
  static absl::StatusOr<std::unique_ptr<BisectFolder>> Open(
      const BisectOptions& options, const Repository& repository,
      const std::map<std::string, std::string>& question, const BisectProgress& progress);
  // Removes the worktree and the programs, unless they are to be kept.
  ~BisectFolder();
  BisectFolder(const BisectFolder&) = delete;
  BisectFolder& operator=(const BisectFolder&) = delete;

  const std::string& path() const { return path_; }

  // Builds the commit, unless that was done before. A record with a failure is remembered only by
  // Remember, since good and bad may build in a second call.
  absl::StatusOr<BuildRecord> Build(const Commit& commit);
  absl::Status Remember(const Commit& commit, const BuildRecord& build);

  // Measures the commit's program by turns with the base's, or returns what was measured before.
  // Both have been built. `flags` are those of the sweep.
  absl::StatusOr<MeasurementRecord> Measure(const Commit& base, const Commit& commit, int look,
                                            const std::vector<std::string>& flags);
  absl::Status Remember(const Commit& base, const Commit& commit, int look,
                        const MeasurementRecord& measurement);

 private:
  BisectFolder(const BisectOptions& options, const Repository& repository,
               const BisectProgress& progress)
      : options_(options), repository_(repository), progress_(progress) {}

  absl::Status MakeFolder(const std::map<std::string, std::string>& question);
  absl::Status TakeLock();
  absl::Status TakeState(const std::map<std::string, std::string>& question);
  absl::Status RemoveLeftovers();
  void RemoveWorktree(const std::string& worktree);
  std::string Worktree() const;
  std::string Log(const std::string& name) const;
  std::string ProgramPath(const std::string& program) const;
  absl::Status CheckOut(const Commit& commit);
  absl::StatusOr<BuildRecord> BuildHere(const Commit& commit);
  absl::StatusOr<std::string> MakeProgram(const std::string& built, const std::string& log);
  absl::StatusOr<std::string> KeepProgram(const std::string& built);
  absl::StatusOr<std::string> ProgramOf(const Commit& commit);
  absl::Status WriteState() const;

  const BisectOptions options_;
  const Repository repository_;
  const BisectProgress progress_;
  std::string path_;
  int lock_ = -1;
  bool is_open_ = false;  // whether the folder is that of this question
  BisectState state_;
};

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_FOLDER_H_
