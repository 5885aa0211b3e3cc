// Contestants: somebody else's code, measured and judged beside ours.
//
// A contestant becomes a technique of the registry, NAME@FILE, so that sweeps, checks and reports
// treat it like any other. It computes what a technique of this suite defines, gets that technique's
// inputs and parameters, and is held against that technique's float64 definition. See
// contestant.h for what all have in common, shared_library.h and python_file.h for the two kinds.
#ifndef TFB_HARNESS_CONTESTANTS_CONTESTANTS_H_
#define TFB_HARNESS_CONTESTANTS_CONTESTANTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/technique.h"
#include "harness/contestants/python_process.h"

namespace tfb {

// Adds the contestants of the files, which are separated by commas, to the registry, and "*@FILE"
// for each to `techniques`, the flag --techniques, unless that names contestants already. A folder
// stands for its FILE.so and FILE.py, but for FILE_test.py. Paths are relative to the caller's
// folder. A file that cannot be asked, or whose list is refused, becomes the technique
// unknown@FILE, whose layers have that status, so that a sweep has a row with the reason.
// Returns InvalidArgument for what is neither kind by its name, NotFound for a folder without any.
absl::Status AddContestantFiles(absl::string_view files, const PythonSettings& python,
                                Registry* registry, std::string* techniques);

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_CONTESTANTS_H_
