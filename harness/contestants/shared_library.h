// Contestants: techniques of somebody else's shared library, measured and judged beside ours.
//
// The library exports the functions of harness/c/tfb.h. A technique in its tfb_techniques names, as
// "definition", the technique of this suite whose float64 definition it computes. It gets that
// technique's inputs and the parameters that it has of the same names, and becomes a technique of
// the registry, NAME@FILE for a technique NAME of libFILE.so, with '_' for signs in FILE, so that
// sweeps, checks and reports treat it like any other. On a CPU the first run of a layer comes after
// one on other inputs, so that a library that gives its last result again is found.
#ifndef TFB_HARNESS_CONTESTANTS_SHARED_LIBRARY_H_
#define TFB_HARNESS_CONTESTANTS_SHARED_LIBRARY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/technique.h"

namespace tfb {

// Returns what the library's tfb_techniques says. A process of its own loads the library, so that one
// that crashes or hangs when it is loaded is an error here: NotFound where there is no such file,
// InvalidArgument where it cannot be loaded, lacks a function or has another version of the
// interface, DeadlineExceeded where it says nothing for `seconds`.
absl::StatusOr<std::string> AskForTechniques(const std::string& path, double seconds = 30);

// Adds the techniques that `json`, an answer of AskForTechniques, lists to the registry. The library
// is loaded when a layer is created. Returns InvalidArgument, naming the library and the technique,
// where the text is not as harness/c/tfb.h says, a definition does not exist, or a name is taken;
// then nothing has been added.
absl::Status AddContestants(const std::string& path, const std::string& json, Registry* registry);

// Does both for each of the files, which are separated by commas, and adds "*@FILE" to `techniques`,
// the flag --techniques, for each, unless that names contestants already. A library that cannot be
// asked, or whose list is refused, becomes the technique unknown@FILE, whose layers have that status,
// so that a sweep has a row with the reason. Returns InvalidArgument for what is no shared library by
// its name.
absl::Status AddContestantFiles(absl::string_view files, Registry* registry,
                                std::string* techniques);

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_SHARED_LIBRARY_H_
