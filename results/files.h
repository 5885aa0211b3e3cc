// Finds result files for tools that are started through `bazel run`.
#ifndef TFB_RESULTS_FILES_H_
#define TFB_RESULTS_FILES_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

// Returns `path` relative to the caller's folder, which `bazel run` names in
// BUILD_WORKING_DIRECTORY. Does not change absolute paths, nor any where the variable is not set.
std::string CallerPath(absl::string_view path);

// Returns the default folder of results: results/runs in the repository that `bazel run` was called
// in (BUILD_WORKSPACE_DIRECTORY), or else in the caller's folder.
std::string DefaultRunsFolder();

// Returns the file in `folder` with a name ending in ".pb" that was modified last; of equal times,
// the last by name. Returns NotFound, naming the folder, where there is none.
absl::StatusOr<std::string> NewestResultFile(const std::string& folder);

}  // namespace tfb

#endif  // TFB_RESULTS_FILES_H_
