#include "core/command_line.h"

#include <stdio.h>

#include <ostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "gtest/gtest.h"

ABSL_FLAG(std::string, colour_of_things, "blue", "What colour things have.");
ABSL_FLAG(int, number, 7, "A number.");
ABSL_FLAG(bool, loud, false, "Whether to be loud.");

namespace tfb {
namespace {

class CommandLineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::SetFlag(&FLAGS_colour_of_things, "blue");
    absl::SetFlag(&FLAGS_number, 7);
    absl::SetFlag(&FLAGS_loud, false);
  }
};

TEST_F(CommandLineTest, TakesEveryUsualSpellingOfAFlag) {
  const auto line = ParseCommandLine(
      {"program", "a", "--colour_of_things=red", "-number", "-3", "--loud", "b", "--", "--c"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->arguments, (std::vector<std::string>{"a", "b", "--c"}));
  EXPECT_FALSE(line->help);
  EXPECT_EQ(absl::GetFlag(FLAGS_colour_of_things), "red");
  EXPECT_EQ(absl::GetFlag(FLAGS_number), -3);
  EXPECT_TRUE(absl::GetFlag(FLAGS_loud));
  ASSERT_TRUE(ParseCommandLine({"program", "--noloud"}).ok());
  EXPECT_FALSE(absl::GetFlag(FLAGS_loud));
  ASSERT_TRUE(ParseCommandLine({"program", "--loud=true", "--colour_of_things="}).ok());
  EXPECT_TRUE(absl::GetFlag(FLAGS_loud));
  EXPECT_EQ(absl::GetFlag(FLAGS_colour_of_things), "");
}

TEST_F(CommandLineTest, ADashAloneIsAnArgument) {
  EXPECT_EQ(ParseCommandLine({"program", "-"})->arguments, std::vector<std::string>{"-"});
}

TEST_F(CommandLineTest, AnUnknownFlagIsNamedWithTheNearestOne) {
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--nubmer=1"}).status().message()),
            "unknown flag --nubmer, did you mean --number?");
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--zzzzzz"}).status().message()),
            "unknown flag --zzzzzz; --help lists all");
}

TEST_F(CommandLineTest, ABadValueNamesItsFlagInOneLine) {
  const std::string message(ParseCommandLine({"program", "--number=x"}).status().message());
  EXPECT_EQ(message.rfind("--number=x: ", 0), 0u) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--number"}).status().message()),
            "--number wants a value");
}

TEST_F(CommandLineTest, HelpListsEveryFlagWithItsDefaultWhateverItIsNow) {
  absl::SetFlag(&FLAGS_number, 9);
  EXPECT_TRUE(ParseCommandLine({"program", "--help"})->help);
  const std::string help = HelpText("program FILE");
  EXPECT_EQ(help.rfind("program FILE\n", 0), 0u);
  EXPECT_NE(help.find("  --number  (default: 7)\n      A number.\n"), std::string::npos) << help;
  EXPECT_NE(help.find("--loud  (default: false)"), std::string::npos) << help;
}

class RunMainTest : public CommandLineTest {
 protected:
  // What a program ended with and printed.
  struct Ended {
    int exit_status;
    std::string out, err;
    bool operator==(const Ended& other) const {
      return exit_status == other.exit_status && out == other.out && err == other.err;
    }
    friend std::ostream& operator<<(std::ostream& stream, const Ended& ended) {
      return stream << ended.exit_status << "\n" << ended.out << "\n" << ended.err;
    }
  };
  template <typename Run>
  static Ended RunProgram(const std::vector<std::string>& argv, Run run) {
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int exit_status = RunMain("program", "program [flags]", argv, run);
    fflush(stdout);
    return {exit_status, ::testing::internal::GetCapturedStdout(),
            ::testing::internal::GetCapturedStderr()};
  }
};

TEST_F(RunMainTest, ReturnsWhatTheProgramDoesWithItsFlagsSet) {
  const Ended ended = RunProgram({"program", "--number=3"}, []() -> absl::StatusOr<int> {
    return absl::GetFlag(FLAGS_number) == 3 ? kExitCheckFailed : kExitDone;
  });
  EXPECT_EQ(ended, (Ended{kExitCheckFailed, "", ""}));
}

TEST_F(RunMainTest, AnErrorIsPrintedInOneLineAndIsBadUsage) {
  const auto fails = [] { return absl::StatusOr<int>(absl::NotFoundError("no\nfile")); };
  EXPECT_EQ(RunProgram({"program"}, fails), (Ended{kExitBadUsage, "", "program: no file\n"}));
}

TEST_F(RunMainTest, AnErrorIsHarmlessToATerminalAndNotTooLong) {
  const auto quotes = [] {
    return absl::StatusOr<int>(
        absl::NotFoundError("a\x1b[31mb\x7f c\xc2\x9b"
                            "d \xc3\xa4"));
  };
  EXPECT_EQ(RunProgram({"program"}, quotes),
            (Ended{kExitBadUsage, "", "program: a?[31mb? c?d \xc3\xa4\n"}));
  const auto quotes_much = [] {
    return absl::StatusOr<int>(absl::NotFoundError(std::string(100000, 'x') + " end"));
  };
  const Ended much = RunProgram({"program"}, quotes_much);
  EXPECT_LT(much.err.size(), 2000u);
  EXPECT_NE(much.err.find("x ... 98404 bytes ... x"), std::string::npos) << much.err;
  EXPECT_NE(much.err.find("x end\n"), std::string::npos) << much.err;
}

TEST_F(RunMainTest, NothingRunsForBadFlagsOrHelp) {
  const auto never = []() -> absl::StatusOr<int> {
    ADD_FAILURE() << "it ran";
    return kExitDone;
  };
  EXPECT_EQ(RunProgram({"program", "--nubmer=1"}, never),
            (Ended{kExitBadUsage, "", "program: unknown flag --nubmer, did you mean --number?\n"}));
  EXPECT_EQ(RunProgram({"program", "--help", "a"}, never),
            (Ended{kExitDone, HelpText("program [flags]"), ""}));
}

TEST_F(RunMainTest, ArgumentsAreForProgramsThatTakeThem) {
  const auto counts = [](const CommandLine& line) -> absl::StatusOr<int> {
    return static_cast<int>(line.arguments.size());
  };
  EXPECT_EQ(RunProgram({"program", "a", "b", "c"}, counts), (Ended{3, "", ""}));
  const auto takes_none = []() -> absl::StatusOr<int> { return kExitDone; };
  EXPECT_EQ(RunProgram({"program", "a"}, takes_none),
            (Ended{kExitBadUsage, "", "program: \"a\" is no flag; --help lists the flags\n"}));
}

TEST(Nearest, FindsWhatWasMeantAndNothingFarFromIt) {
  EXPECT_EQ(Nearest("fromat", {"output", "format"}), "format");
  EXPECT_EQ(Nearest("lngwindow", {"longwindow", "widewindow"}), "longwindow");
  EXPECT_EQ(Nearest("abc", {"xyz"}), "");
  EXPECT_EQ(Nearest("", {}), "");
}

}  // namespace
}  // namespace tfb
