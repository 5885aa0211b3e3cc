// A store in a branch of a git repository, which is fetched and pushed as any other. No checkout is
// touched: commits are made of the store's files alone.
#ifndef TFB_RESULTS_HISTORY_BRANCH_STORE_H_
#define TFB_RESULTS_HISTORY_BRANCH_STORE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "results/history/history.pb.h"
#include "results/history/store.h"
#include "results/reader.h"

namespace tfb {

struct BranchStore {
  std::string repository;  // a folder in it
  std::string branch;
};

// Adds runs to the store in a branch by one commit, whose author is git's user; begins the branch,
// without a parent, where there is none. A commit that another process makes meanwhile is built
// upon. Errors are those of HistoryStore::Add, and git's; FailedPrecondition where the branch is
// checked out somewhere, as its files would then seem to be changed.
absl::StatusOr<Additions> AddToBranch(const BranchStore& store,
                                      const std::vector<HistoryRun>& runs);

// Reads the runs of a branch, as HistoryStore::Read does. NotFound where there is no such branch,
// or no store in it.
absl::StatusOr<StoredRuns> ReadBranch(const BranchStore& store, Damage damage = Damage::kRefuse);

// Writes the committer's date and the subject of a run's commit into it, where the repository of
// `folder` knows the commit.
void DescribeCommitOf(const std::string& folder, HistoryRun* run);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BRANCH_STORE_H_
