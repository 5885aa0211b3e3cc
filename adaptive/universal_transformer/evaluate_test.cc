// What evaluate prints of a few short additions, and how it answers bad usage.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/program_testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr char kEvaluate[] = "adaptive/universal_transformer/evaluate";
constexpr char kTestdata[] = "adaptive/universal_transformer/testdata/";

ProgramRun Evaluate(const std::string& arguments) {
  return RunProgram(std::string(kEvaluate) + " " + arguments);
}

TEST(EvaluateProgram, PrintsItsTablesWithoutAndWithTimes) {
  for (const auto& [arguments, golden] :
       {std::pair("--digits=6,3 --problems=20 --thresholds=0,0.99 --rounds=0", "evaluate.txt"),
        std::pair("--digits=4 --problems=7 --thresholds=0.5 --nines=0.125 --rounds=2 --threads=2 "
                  "--seed=3",
                  "evaluate_timed.txt")}) {
    const ProgramRun run = Evaluate(arguments);
    EXPECT_EQ(run.exit_status, 0);
    EXPECT_EQ(run.err, "");
    EXPECT_EQ(TextDifference(run.out, GoldenText(std::string(kTestdata) + golden)), "");
  }
}

TEST(EvaluateProgram, SharesOfTimeAreThoseOfTheTimesAndTheFlopsBesideThem) {
  const ProgramRun run = Evaluate("--digits=12 --problems=200 --thresholds=0 --rounds=1");
  const std::vector<double> all = NumbersBehind("8 steps", run.out);
  ASSERT_EQ(all.size(), 7u) << run.out;
  for (const char* row : {"2 steps", "4 steps", "act 0"}) {
    // Digits, sums, steps, ponder, FLOPs saved, ms, time saved, time saved of FLOPs.
    const std::vector<double> of = NumbersBehind(row, run.out);
    ASSERT_EQ(of.size(), 8u) << run.out;
    // Times are rounded to 0.005 ms, shares to 0.05 %.
    const double error = 0.005 * (1 + of[5] / all[5]) / all[5];
    EXPECT_NEAR(of[6] / 100, 1 - of[5] / all[5], error + 0.0005) << run.out;
    EXPECT_NEAR(of[7], of[6] / of[4], 0.005 + 0.1 * (1 + std::abs(of[7])) / of[4]) << run.out;
  }
  // The share of a step, and milliseconds.
  const std::vector<double> gate = NumbersBehind("the gate takes", run.out);
  ASSERT_GE(gate.size(), 2u) << run.out;
  const double error = 0.005 * (1 + gate[1] / all[5]) / all[5];
  EXPECT_NEAR(gate[0] / 100, gate[1] / all[5] - 1, error + 0.0005) << run.out;
}

TEST(EvaluateProgram, ThreadsChangeNothingAndSeedsDo) {
  const std::string small = "--digits=6 --problems=20 --thresholds=0.9 --rounds=0 ";
  const auto tables = [&](const std::string& more) {
    const std::string out = Evaluate(small + more).out;
    return out.substr(out.find("\n\n"));  // behind the heading, which has the threads
  };
  EXPECT_EQ(tables("--threads=3"), tables("--threads=1"));
  EXPECT_NE(tables("--seed=2"), tables("--seed=1"));
}

TEST(EvaluateProgram, BadUsageIsRefusedWithTheReason) {
  EXPECT_EQ(RefusalDifference(
                kEvaluate, {{"--digits=0", "--digits: \"0\"; allowed are 1 to 4096"},
                            {"--digits=4097", "--digits: \"4097\"; allowed are 1 to 4096"},
                            {"--digits=many", "--digits: \"many\"; allowed are 1 to 4096"},
                            {"--problems=0", "--problems: \"0\"; allowed are 1 to 65536"},
                            {"--problems=65537", "--problems: \"65537\"; allowed are 1 to 65536"},
                            {"--nines=2", "--nines: \"2\"; allowed are 0 to 1"},
                            {"--nines=-0.1", "--nines: \"-0.1\"; allowed are 0 to 1"},
                            {"--nines=nan", "--nines: \"nan\"; allowed are 0 to 1"},
                            {"--thresholds=1.5", "--thresholds: \"1.5\"; allowed are 0 to 1"},
                            {"--thresholds=1,-0.5", "--thresholds: \"-0.5\"; allowed are 0 to 1"},
                            {"--thresholds=x", "--thresholds: \"x\"; allowed are 0 to 1"},
                            {"--rounds=-1", "--rounds: \"-1\"; allowed are 0 and more"},
                            {"--threads=0", "--threads: \"0\"; allowed are 1 to 1024"},
                            {"--threads=1025", "--threads: \"1025\"; allowed are 1 to 1024"},
                            {"--model=nowhere", "nowhere: cannot open: No such file or directory"},
                            {"--digit=3", "unknown flag --digit, did you mean --digits?"},
                            {"word", "\"word\" is no flag; --help lists the flags"}}),
            "");
  // The least that is allowed, and all of the shares.
  EXPECT_EQ(Evaluate("--digits=1 --problems=1 --nines=1 --thresholds=0,1 --rounds=0").exit_status,
            0);
}

}  // namespace
}  // namespace tfb
