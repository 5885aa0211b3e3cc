// Files of this repository that are data of a binary.
#ifndef TFB_CORE_RUNFILES_H_
#define TFB_CORE_RUNFILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace tfb {

// Returns the path of a file of this repository that is data of the running binary, from Bazel's
// runfiles. Returns NotFound where it is not.
absl::StatusOr<std::string> RunfilePath(const std::string& path);

}  // namespace tfb

#endif  // TFB_CORE_RUNFILES_H_
