// Holds texts against golden files in tests.
#ifndef TFB_RESULTS_EXPECT_GOLDEN_H_
#define TFB_RESULTS_EXPECT_GOLDEN_H_

#include <string>

namespace tfb {

// Expects `text` to be the contents of the file `path`, relative to the workspace, and shows the
// first line that differs. Writes the file where UPDATE_GOLDENS is set and `bazel run` runs the
// test.
void ExpectGoldenFile(const std::string& path, const std::string& text);

}  // namespace tfb

#endif  // TFB_RESULTS_EXPECT_GOLDEN_H_
