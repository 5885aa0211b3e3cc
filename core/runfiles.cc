#include "core/runfiles.h"

#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace tfb {

absl::StatusOr<std::string> RunfilePath(const std::string& path) {
  std::vector<std::string> roots;
  for (const char* variable : {"RUNFILES_DIR", "TEST_SRCDIR"}) {
    if (const char* root = std::getenv(variable); root != nullptr) roots.push_back(root);
  }
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self));
  if (length > 0 && length < static_cast<ssize_t>(sizeof(self))) {
    roots.push_back(absl::StrCat(absl::string_view(self, length), ".runfiles"));
  }
  std::vector<std::string> candidates;
  for (const std::string& root : roots) {
    // The workspace's name, under WORKSPACE and under modules.
    for (const char* workspace : {"transformer_family_bench", "_main"}) {
      candidates.push_back(absl::StrCat(root, "/", workspace, "/", path));
    }
  }
  candidates.push_back(path);  // `bazel run` starts a binary in its runfiles
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), R_OK) == 0) return candidate;
  }
  return absl::NotFoundError(absl::StrCat(path, " is not among the binary's data; looked for ",
                                          absl::StrJoin(candidates, ", ")));
}

}  // namespace tfb
