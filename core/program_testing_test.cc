#include "core/program_testing.h"

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(RunProgram, ReturnsTheStatusAndBothTexts) {
  const ProgramRun run = RunProgram("sh -c 'echo out; echo err >&2; exit 3'");
  EXPECT_EQ(run.exit_status, 3);
  EXPECT_EQ(run.out, "out\n");
  EXPECT_EQ(run.err, "err\n");
}

TEST(TextDifference, AllowsTheLastPlaceOfADecimalAndWhateverIsMasked) {
  for (const auto& [text, expected] :
       {std::pair("a  1.25 b\n", "a  1.24 b\n"), std::pair("-0.01", "-0.02"),
        std::pair("12.5 ms, 3 of   4", "??.? ms, ? of ?"), std::pair("  -100.50%", " ?.??%"),
        std::pair("", "")}) {
    EXPECT_EQ(TextDifference(text, expected), "") << text;
  }
  for (const auto& [text, expected] :
       {std::pair("1.25", "1.23"), std::pair("1.2", "1.20"), std::pair("2", "3"),
        std::pair("a 1.25", "a  1.25"), std::pair("1.25", "?.?"), std::pair("x", "?"),
        std::pair("1", ""), std::pair("", "1"), std::pair("a\n", "a"), std::pair("a", "a\nb"),
        std::pair("1.0x", "1.0"), std::pair("12", "?.?")}) {
    EXPECT_NE(TextDifference(text, expected), "") << text;
  }
  EXPECT_EQ(TextDifference("a\nb\n", "a\nc\n"), "line 2: expected is\nc\nand not\nb\nin\na\nb\n");
}

TEST(NumbersBehind, AreThoseOfTheFirstLineThatBeginsSo) {
  EXPECT_EQ(NumbersBehind("row ", "a 9\nrow 2x -3.5 %, 7\nrow 8\n"),
            (std::vector<double>{2, -3.5, 7}));
  EXPECT_TRUE(NumbersBehind("row", "no row\n").empty());
}

TEST(RefusalDifference, SaysWhatAProgramAnswersInstead) {
  const std::string fails = "sh -c 'echo sh: no >&2; exit 2' bin/sh";
  EXPECT_NE(RefusalDifference(fails, {{"", "yes"}}), "");
  EXPECT_EQ(RefusalDifference(fails, {{"", "no"}}), "");
  EXPECT_NE(RefusalDifference("sh -c 'echo sh: no >&2; exit 1' bin/sh", {{"", "no"}}), "");
  EXPECT_NE(RefusalDifference("sh -c 'echo x; echo sh: no >&2; exit 2' bin/sh", {{"", "no"}}), "");
}

}  // namespace
}  // namespace tfb
