// Where result files are, for tools that are started through `bazel run`.
#ifndef TFB_RESULTS_FILES_H_
#define TFB_RESULTS_FILES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// `path` as the caller meant it: `bazel run` starts programs elsewhere and names the caller's
// folder in BUILD_WORKING_DIRECTORY. An absolute path, and any path otherwise, is left as it is.
std::string CallerPath(absl::string_view path);

// The folder that results go to by default: results/runs in the repository that `bazel run` was
// called in (BUILD_WORKSPACE_DIRECTORY), or else in the caller's folder.
std::string DefaultRunsFolder();

// The file in `folder` whose name ends in ".pb" and that was written to last; of equal times the
// last by name. NotFound, naming the folder, where there is none.
absl::StatusOr<std::string> NewestResultFile(const std::string& folder);

}  // namespace tfb

#endif  // TFB_RESULTS_FILES_H_
