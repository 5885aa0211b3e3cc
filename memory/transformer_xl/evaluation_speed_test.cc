// What evaluation_speed prints of short windows, and how it answers bad usage.
#include <string>
#include <vector>

#include "core/program_testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr char kProgram[] = "memory/transformer_xl/evaluation_speed";

TEST(EvaluationSpeedProgram, PrintsBitsAndTheRatiosOfTheTimesBesideThem) {
  const ProgramRun run =
      RunProgram(std::string(kProgram) + " --lengths=20,11,800 --bytes=3 --segment=8 --threads=2");
  EXPECT_EQ(run.exit_status, 0);
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(
      TextDifference(run.out, GoldenText("memory/transformer_xl/testdata/evaluation_speed.txt")),
      "");
  for (const char* row : {"     20", "     11", "    800"}) {
    // Recomputed, segments and one at a time: ms and bits, and for the latter two how much faster.
    const std::vector<double> n = NumbersBehind(row, run.out);
    ASSERT_GE(n.size(), 8u) << run.out;
    for (const size_t ms : {2, 5}) {
      const double ratio = n[0] / n[ms];  // of times that are rounded to 0.0005 ms
      EXPECT_NEAR(n[ms + 2], ratio, 0.5 + ratio * (0.0005 / n[0] + 0.0006 / n[ms])) << run.out;
    }
  }
}

// Segments end anywhere in the window, and longer than what is scored.
TEST(EvaluationSpeedProgram, BitsDoNotDependOnTheSegments) {
  std::vector<double> bits;
  for (const char* flags : {"--segment=8", "--segment=20", "--segment=23", "--segment=1"}) {
    const ProgramRun run =
        RunProgram(std::string(kProgram) + " --lengths=20 --bytes=6 --threads=1 " + flags);
    const std::vector<double> n = NumbersBehind("     20", run.out);
    ASSERT_EQ(n.size(), 8u) << run.out << run.err;
    for (const size_t at : {3, 6}) bits.push_back(n[at]);
  }
  // A byte sees as many others in every split: fp32 sums differ, and the last place of the print.
  for (const double of_split : bits) EXPECT_NEAR(of_split, bits[0], 0.0015);
}

TEST(EvaluationSpeedProgram, BadUsageIsRefusedWithTheReason) {
  EXPECT_EQ(
      RefusalDifference(
          kProgram,
          {{"--lengths=0", "--lengths: \"0\"; allowed are whole numbers of 1 or more"},
           {"--lengths=9,long", "--lengths: \"long\"; allowed are whole numbers of 1 or more"},
           {"--segment=0", "--segment is 0; allowed is 1 or more"},
           {"--bytes=0", "--bytes is 0; allowed is 1 or more"},
           {"--bytes=-1", "--bytes is -1; allowed is 1 or more"},
           {"--threads=0", "--threads is 0; allowed is 1 or more"},
           {"--no_such_flag", "unknown flag --no_such_flag; --help lists all"}}),
      "");
}

}  // namespace
}  // namespace tfb
