// Files of this repository that a binary has as data.
#ifndef TFB_HARNESS_RUNFILES_H_
#define TFB_HARNESS_RUNFILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace tfb {

// The path of a file of this repository that the running binary has as data: from Bazel's runfiles.
// NotFound where it has not.
absl::StatusOr<std::string> RunfilePath(const std::string& path);

}  // namespace tfb

#endif  // TFB_HARNESS_RUNFILES_H_
