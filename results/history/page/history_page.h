// Renders a history as one HTML page that needs no network and no other file.
#ifndef TFB_RESULTS_HISTORY_PAGE_HISTORY_PAGE_H_
#define TFB_RESULTS_HISTORY_PAGE_HISTORY_PAGE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "results/history/check.h"
#include "results/history/series.h"

namespace tfb {

struct HistoryPageOptions {
  std::string title;       // "History" where empty
  std::string commit_url;  // with %s for the full hash; empty: commits are text
  std::vector<std::string> notes;
};

// Returns whether `url` begins with http:// or https:// and has a %s. Commits are text where it has
// not.
bool IsCommitUrl(absl::string_view url);

// Returns a page with the verdict, a table of the changes that matter most first, and a panel for
// each series of its values over the runs, with its changes marked: those of the cases with
// regressions first. Verdict and tables need no script. The script draws a panel when it comes into
// view, so that a page of thousands opens as quickly as one of ten.
//
// Values are kept within 0.1 %; where there are too many of them, older ones that are not near a
// change as the median, least and greatest of a group of runs (series_text.h). The levels before
// and after a change are those of `changes`, and no group has runs from both sides of one. All text
// from files is escaped.
std::string RenderHistoryPage(const History& history, const std::vector<Change>& changes,
                              const HistoryPageOptions& options);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_PAGE_HISTORY_PAGE_H_
