// Searches a line of commits for the one that changed a quantity, from noisy measurements of it.
#ifndef TFB_RESULTS_HISTORY_BISECT_SEARCH_H_
#define TFB_RESULTS_HISTORY_BISECT_SEARCH_H_

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tfb {

// A quantity of one commit over that of the first one, with a 95 % interval; low = ratio = high
// where the quantity has no noise.
struct Reading {
  double ratio = 1;
  double low = 1;
  double high = 1;
};

struct SearchOptions {
  // A change by less than this factor is none.
  double least_change = 1.05;
  // How often a commit is measured at most: once, and then until it is clear on which side of the
  // half way it lies. Each measurement after the first doubles the samples.
  int most_looks = 4;
};

struct SearchResult {
  // The change, or the larger part of it, came after commit `low`, and by commit `high` at last.
  int low = 0;
  int high = 0;
  Reading of_low, of_high;
  enum class End {
    kOneCommit,   // high = low + 1
    kPassedOver,  // no commit in between could be measured
    kSpread,      // what is left is below `least_change` and less than half of the whole change
    kUnclear      // the samples do not tell on which side the next commit lies
  };
  End end = End::kOneCommit;
};

// The commit that is measured next, and what the search knows so far.
struct SearchStep {
  int commit = 0;
  int look = 0;           // how often it was measured already
  int low = 0, high = 0;  // the change lies after `low`, and by `high`
};
// Measures the commit, and returns the reading of its samples from all looks. Returns nothing where
// the commit cannot be measured, and an error where the search is to end.
using MeasureCommit = std::function<absl::StatusOr<std::optional<Reading>>(const SearchStep& step)>;

// Searches between commit 0 and commit `count` - 1, whose reading is `last` and whose change is
// known to be clear.
//
// The two ends have the logarithms a and b. Each step measures the commit in the middle, or its
// nearest neighbour that can be measured, and compares it with the half way (a + b) / 2: beyond it,
// the larger part of the change came by this commit, which becomes the new end, and else the new
// beginning; a and b are then what was measured there. With one change the side is which of the two
// ends the commit equals; with several, or a drift, each step keeps the half with more of it.
//
// The commit is measured again as long as its interval includes the half way, up to `most_looks`
// times. Intervals are widened on the logarithmic scale by z(1 - 0.025 / most_looks) divided by
// z(1 - 0.025), with the quantiles z of the normal distribution (1.275 for 4 looks; Bonferroni), so
// that all looks together take a commit that is exactly half way, the worst case, for a given side
// with a probability of at most 2.5 %. A commit that equals one of the ends is as far from the half
// way as half the change. One that after all looks has an interval between a and b, which includes
// neither, has changes on both sides: the side with more of it by the estimate is kept.
absl::StatusOr<SearchResult> SearchForChange(int count, const Reading& last,
                                             const SearchOptions& options,
                                             const MeasureCommit& measure);

// Returns how many commits are measured to find one of `count` - 1 changes where each can be.
int StepsToFind(int count);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_SEARCH_H_
