// The git repository whose commits are measured. Its own checkout is never touched: commits are
// checked out in worktrees elsewhere, hooks do not run, and no branch or tag is written.
#ifndef TFB_RESULTS_HISTORY_REPOSITORY_H_
#define TFB_RESULTS_HISTORY_REPOSITORY_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tfb {

struct Commit {
  std::string hash;
  std::string short_hash;  // as short as is unique in the repository
  std::string author;      // "Name <address>"
  std::string date;        // of the author, as in 2026-11-23T18:23:41+01:00
  std::string subject;
  std::vector<std::string> parents;
};

class Repository {
 public:
  // Returns the repository that the folder belongs to. Errors begin with the folder.
  static absl::StatusOr<Repository> Open(const std::string& folder);

  // The top of the checkout, or the repository's folder where it has none.
  const std::string& top() const { return top_; }

  // Returns the full hash of the commit that a name, tag, branch or short hash stands for; NotFound
  // where there is none.
  absl::StatusOr<std::string> Resolve(const std::string& name) const;
  absl::StatusOr<Commit> Describe(const std::string& hash) const;
  absl::StatusOr<bool> IsAncestor(const std::string& older, const std::string& newer) const;
  // Returns the best common ancestor; NotFound where there is none.
  absl::StatusOr<std::string> MergeBase(const std::string& a, const std::string& b) const;

  // Returns the commits from `good` to its descendant `bad`, both included, oldest first: the first
  // parent of `bad`, the first parent of that, and so on, as long as they descend from `good`. The
  // commits of a merged branch are not among them, their merge is.
  absl::StatusOr<std::vector<Commit>> FirstParentLine(const std::string& good,
                                                      const std::string& bad) const;

  // Returns the folders of all worktrees, those that no longer exist included.
  absl::StatusOr<std::vector<std::string>> Worktrees() const;
  absl::Status AddWorktree(const std::string& folder, const std::string& hash) const;
  // Removes the worktree with all that is in it, and git's record of it.
  absl::Status RemoveWorktree(const std::string& folder) const;
  // Checks out the commit in a worktree. Files that git does not track are removed, except for
  // ignored ones, which a build may need to be incremental.
  absl::Status CheckOut(const std::string& folder, const std::string& hash) const;

  // Returns git's hash of each file's bytes, in the order of `paths`.
  absl::StatusOr<std::vector<std::string>> HashFiles(const std::vector<std::string>& paths) const;

 private:
  explicit Repository(std::string top) : top_(std::move(top)) {}

  std::string top_;
};

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_REPOSITORY_H_
