// Describes a bisection in words.
#ifndef TFB_RESULTS_HISTORY_BISECT_REPORT_H_
#define TFB_RESULTS_HISTORY_BISECT_REPORT_H_

#include <string>

#include "absl/strings/string_view.h"
#include "results/history/bisect.h"

namespace tfb {

// Returns the result as text for people, ending in a newline: the commit as git shows it, what it
// changed by what factor, and every commit that was measured.
std::string RenderBisect(const BisectResult& result);

// Returns "1.31x [1.28, 1.34]", without an interval where there is no noise; of a status its name.
std::string FormatChange(const PairReading& pair);

// Returns "1a2b3c4 "Subject"".
std::string ShortTitle(const Commit& commit);

// Returns "1 commit" or "2 commits".
std::string CountOf(int count, absl::string_view noun);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_BISECT_REPORT_H_
