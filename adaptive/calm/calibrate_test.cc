// What calibrate prints of a few short sequences, and how it answers bad usage.
#include <string>
#include <utility>

#include "core/program_testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr char kCalibrate[] = "adaptive/calm/calibrate";

TEST(CalibrateProgram, PrintsItsReadingsTableAndPlot) {
  for (const auto& [arguments, golden] :
       {std::pair("--sequences=6 --tokens=16 --splits=20 --repetitions=1 --risk=0.1 "
                  "--confidence=0.1 --schedule=decaying --temperature=2 "
                  "--measures=softmax,classifier",
                  "calibrate"),
        std::pair("--sequences=5 --tokens=24 --splits=40 --decode_batch=3 --repetitions=2 "
                  "--risk=0.2 --confidence=0.05 --loss=excess --p_value=hoeffding --seed=2 "
                  "--threads=1 --measures=saturation",
                  "calibrate_excess")}) {
    const ProgramRun run = RunProgram(std::string(kCalibrate) + " " + arguments);
    EXPECT_EQ(run.exit_status, 0) << run.err;
    const std::string path = std::string("adaptive/calm/testdata/") + golden;
    EXPECT_EQ(TextDifference(run.out, GoldenText(path + ".txt")), "");
    EXPECT_EQ(TextDifference(run.err, GoldenText(path + "_progress.txt")), "");
  }
}

TEST(CalibrateProgram, BadUsageIsRefusedWithTheReason) {
  EXPECT_EQ(
      RefusalDifference(
          kCalibrate,
          {{"--risk=1", "--risk=1; allowed are numbers in (0, 1)"},
           {"--risk=0", "--risk=0; allowed are numbers in (0, 1)"},
           {"--confidence=1", "--confidence=1; allowed are numbers in (0, 1)"},
           {"--confidence=0", "--confidence=0; allowed are numbers in (0, 1)"},
           {"--confidence=nan", "--confidence=nan; allowed are numbers in (0, 1)"},
           {"--loss=none", "--loss=none; allowed are disagreement, excess"},
           {"--p_value=x", "--p_value=x; allowed are hoeffding, hoeffding_bentkus"},
           {"--measures=saturation,pear",  // before anything is read
            "option confidence is \"pear\"; allowed are softmax | saturation | classifier"},
           {"--temperature=-1", "option temperature is \"-1\"; allowed are 0 to 1000"},
           {"--schedule=no", "option schedule is \"no\"; allowed are constant | decaying | t5x"},
           {"--sequences=1", "--sequences=1; allowed are 2 and more"},
           {"--tokens=0", "--tokens=0; allowed are 1 and more"},
           {"--splits=0", "--splits=0; allowed are 1 and more"},
           {"--decode_batch=0", "--decode_batch=0; allowed are 1 and more"},
           {"--repetitions=0", "--repetitions=0; allowed are 1 and more"},
           {"--threads=-3", "--threads=-3; allowed are 1 and more"},
           {"--sequences=1000000",
            "1000000 x 256 tokens, and the byte behind each; the held-out text has 198524 bytes"}}),
      "");
  // The least that is allowed.
  EXPECT_EQ(RunProgram(std::string(kCalibrate) +
                       " --sequences=2 --tokens=1 --splits=1 --decode_batch=1 --repetitions=1 "
                       "--threads=1 --measures=classifier")
                .exit_status,
            0);
}

}  // namespace
}  // namespace tfb
