// What evaluate prints of three short sequences, and how it answers bad usage.
#include <string>

#include "core/program_testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr char kEvaluate[] = "adaptive/depth_adaptive/evaluate";

TEST(EvaluateProgram, PrintsItsTableAndPlot) {
  const ProgramRun run =
      RunProgram(std::string(kEvaluate) + " --sequences=3 --tokens=24 --levels=2 --sigma=1");
  EXPECT_EQ(run.exit_status, 0);
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(TextDifference(run.out, GoldenText("adaptive/depth_adaptive/testdata/evaluate.txt")),
            "");
}

TEST(EvaluateProgram, BadUsageIsRefusedWithTheReason) {
  EXPECT_EQ(RefusalDifference(
                kEvaluate,
                {{"--sequences=0", "--sequences: allowed are 1 and more"},
                 {"--tokens=0", "--tokens: allowed are 1 and more"},
                 {"--levels=0", "--levels: allowed are 1 to 5"},
                 {"--levels=6", "--levels: allowed are 1 to 5"},
                 {"--sigma=-1", "--sigma: allowed are 0 to 1e6"},
                 {"--sigma=1.1e6", "--sigma: allowed are 0 to 1e6"},
                 {"--sigma=nan", "--sigma: allowed are 0 to 1e6"},
                 {"--threads=0", "--threads: allowed are 1 and more"},
                 {"--tokens=100000000",
                  "64 x 100000000 tokens, and the byte behind each; the held-out text has 198524 "
                  "bytes"}}),
            "");
}

}  // namespace
}  // namespace tfb
