// What step_time prints of a small network, and how it answers bad usage.
#include <string>
#include <vector>

#include "core/program_testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr char kProgram[] = "memory/memorizing/step_time";

ProgramRun RunStepTime(const std::string& arguments) {
  return RunProgram(std::string(kProgram) + " " + arguments);
}

// 1,024 entries of 8 heads of 64 channels take 2 x 4 bytes x 1024 x 512 = 4 MiB.
TEST(StepTimeProgram, PrintsItsTable) {
  const std::string small = "--layers=2 --head_dim=64 --segment=64 --k=4 --samples=2 ";
  const ProgramRun run = RunStepTime(small + "--heads=8 --threads=2 --stores=64,1024");
  EXPECT_EQ(run.exit_status, 0);
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(TextDifference(run.out,
                           "2 layers, 8 heads of 64, segments of 64, 4 retrieved, 2 threads\n"
                           "    store    ms a step     ratio    store MiB\n"
                           "       64         ?.??     1.00x          0.2\n"
                           "     1024         ?.??     ?.??x          4.0\n"),
            "");
  EXPECT_EQ(TextDifference(RunStepTime(small + "--heads=4 --threads=1 --stores=0 --cpu_time "
                                               "--selection=bucketed")
                               .out,
                           "2 layers, 4 heads of 64, segments of 64, 4 retrieved, 1 threads\n"
                           "    store    ms a step     ratio    store MiB\n"
                           "        0         ?.??     1.00x          0.0\n"),
            "");
}

TEST(StepTimeProgram, OfOneSampleTheRatioIsThatOfTheTimes) {
  const ProgramRun run =
      RunStepTime("--layers=1 --segment=128 --threads=1 --samples=1 --stores=2048,0 --k=64");
  const std::vector<double> first = NumbersBehind("     2048", run.out);
  const std::vector<double> second = NumbersBehind("        0", run.out);
  ASSERT_EQ(first.size(), 3u) << run.out << run.err;
  ASSERT_EQ(second.size(), 3u) << run.out;
  EXPECT_NEAR(second[1], second[0] / first[0], 0.005 + 0.011 / first[0]) << run.out;
}

TEST(StepTimeProgram, BadUsageIsRefusedWithTheReason) {
  EXPECT_EQ(
      RefusalDifference(
          kProgram, {{"--stores=", "--stores: expected is one size or more"},
                     {"--stores=-1", "option store is \"-1\"; allowed are 0 to 262144"},
                     {"--samples=0", "--samples is 0; allowed is 1 or more"},
                     {"--threads=0", "--threads is 0; allowed is 1 or more"},
                     {"--segment=0", "--segment is 0; allowed is 1 or more"},
                     {"--heads=-2", "--heads is -2; allowed is 1 or more"},
                     {"--head_dim=0", "--head_dim is 0; allowed is 1 or more"},
                     {"--layers=0", "option layers is \"0\"; allowed are 1 to 32"},
                     {"--k=0", "option k is \"0\"; allowed are 1 to 262144"},
                     {"--selection=x", "option selection is \"x\"; allowed are exact | bucketed"},
                     {"--no_such_flag", "unknown flag --no_such_flag; --help lists all"}}),
      "");
}

}  // namespace
}  // namespace tfb
