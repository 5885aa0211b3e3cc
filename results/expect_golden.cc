#include "results/expect_golden.h"

#include <stdlib.h>

#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace tfb {

void ExpectGoldenFile(const std::string& path, const std::string& text) {
  const char* workspace = getenv("BUILD_WORKSPACE_DIRECTORY");
  if (workspace != nullptr && getenv("UPDATE_GOLDENS") != nullptr) {
    std::ofstream(absl::StrCat(workspace, "/", path), std::ios::binary) << text;
    return;
  }
  std::stringstream golden;
  golden << std::ifstream(path, std::ios::binary).rdbuf();
  if (golden.str() == text) return;
  const std::vector<std::string> expected = absl::StrSplit(golden.str(), '\n');
  const std::vector<std::string> actual = absl::StrSplit(text, '\n');
  for (size_t i = 0; i < expected.size() && i < actual.size(); ++i) {
    EXPECT_EQ(actual[i], expected[i]) << path << ", line " << i + 1;
    if (actual[i] != expected[i]) return;
  }
  ADD_FAILURE() << path << ": " << actual.size() << " lines, and not " << expected.size();
}

}  // namespace tfb
