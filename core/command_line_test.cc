#include "core/command_line.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <iostream>
#include <new>
#include <ostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "gtest/gtest.h"

ABSL_FLAG(std::string, colour_of_things, "blue", "What colour things have.");
ABSL_FLAG(int, number, 7, "A number.");
ABSL_FLAG(bool, loud, false, "Whether to be loud.");
// The first line takes five words of 18 letters, 6 + 4 * 19 + 18 = 100 columns; a sixth has no room.
// The second would have 101 columns with its last word.
ABSL_FLAG(std::string, story, "",
          "abcdefghijklmnopqr abcdefghijklmnopqr abcdefghijklmnopqr abcdefghijklmnopqr "
          "abcdefghijklmnopqr abcdefghijklmnopqr abcdefghijklmnopqr abcdefghijklmnopqr "
          "abcdefghijklmnopqr abcdefghijklmnopqrs");

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
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--noloud=true"}).status().message()),
            "unknown flag --noloud, did you mean --loud?");
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--xxloud"}).status().message()),
            "unknown flag --xxloud, did you mean --loud?");
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--nonumber"}).status().message()),
            "unknown flag --nonumber, did you mean --number?");
  EXPECT_EQ(std::string(ParseCommandLine({"program", "--nowhere"}).status().message()),
            "unknown flag --nowhere; --help lists all");
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
  const std::string word = "abcdefghijklmnopqr";
  EXPECT_EQ(HelpText("program FILE"),
            "program FILE\n"
            "\n"
            "Flags:\n"
            "  --colour_of_things  (default: blue)\n"
            "      What colour things have.\n"
            "  --loud  (default: false)\n"
            "      Whether to be loud.\n"
            "  --number  (default: 7)\n"
            "      A number.\n"
            "  --story  (default: none)\n"
            "      " +
                word + " " + word + " " + word + " " + word + " " + word + "\n" + "      " + word +
                " " + word + " " + word + " " + word + "\n" + "      " + word + "s\n");
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

TEST_F(RunMainTest, AnErrorIsHarmlessToATerminal) {
  const auto printed = [](const std::string& message) {
    return RunProgram({"program"},
                      [&] { return absl::StatusOr<int>(absl::NotFoundError(message)); })
        .err;
  };
  EXPECT_EQ(printed("a\x1b[31mb\x7f c"), "program: a?[31mb? c\n");
  EXPECT_EQ(printed("\x01\x1f \x7e\t"), "program: ?? ~?\n");
  // The C1 controls are U+0080 to U+009F, and only behind the byte 0xc2.
  EXPECT_EQ(printed("\xc2\x80.\xc2\x9f.\xc2\x9b."), "program: ?.?.?.\n");
  EXPECT_EQ(printed("\xc2\xa0 \xc3\xa4 \xc3\x9b \xc2"),
            "program: \xc2\xa0 \xc3\xa4 \xc3\x9b \xc2\n");
}

TEST_F(RunMainTest, AnErrorOfMoreThan1600BytesIsCutInItsMiddle) {
  const std::string head(1200, 'h'), tail(400, 't');
  const auto printed = [](const std::string& message) {
    ::testing::internal::CaptureStderr();
    PrintError("program", message);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(printed(head + tail), "program: " + head + tail + "\n");
  EXPECT_EQ(printed(head + "x" + tail), "program: " + head + " ... 1 bytes ... " + tail + "\n");
  EXPECT_EQ(printed(head + std::string(98404, 'x') + tail),
            "program: " + head + " ... 98404 bytes ... " + tail + "\n");
}

TEST_F(RunMainTest, AnAllocationThatFailsIsAnError) {
  const auto allocates = []() -> absl::StatusOr<int> { throw std::bad_alloc(); };
  EXPECT_EQ(
      RunProgram({"program"}, allocates),
      (Ended{kExitBadUsage, "", "program: an allocation failed: there is not enough memory\n"}));
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

// Ends the process with what RunMain returns for a program that does `run`.
[[noreturn]] void ExitWithMain(const std::function<int()>& run) {
  _exit(RunMain("program", "program [flags]", {"program"},
                [&]() -> absl::StatusOr<int> { return run(); }));
}

using RunMainDeathTest = RunMainTest;

TEST_F(RunMainDeathTest, OutputThatCannotBeWrittenIsBadUsageWithTheReason) {
  const auto to_a_full_device = [](const std::function<int()>& run) {
    dup2(open("/dev/full", O_WRONLY), STDOUT_FILENO);
    ExitWithMain(run);
  };
  const std::string error = "^program: cannot write standard output";
  EXPECT_EXIT(to_a_full_device([] { return fputs("text", stdout), 0; }),
              ::testing::ExitedWithCode(kExitBadUsage), error + ": No space left on device\n$");
  // The reason is that of the last write, and what failed before is not known any more.
  EXPECT_EXIT(to_a_full_device([] { return fputs("text", stdout), fflush(stdout), 0; }),
              ::testing::ExitedWithCode(kExitBadUsage), error + "\n$");
  EXPECT_EXIT(to_a_full_device([] {
                std::ios::sync_with_stdio(false);
                return std::cout << "text", 0;
              }),
              ::testing::ExitedWithCode(kExitBadUsage), error + ": No space left on device\n$");
  EXPECT_EXIT(to_a_full_device([] { return 1; }), ::testing::ExitedWithCode(1), "^$");
}

TEST_F(RunMainDeathTest, AFileBeyondTheLimitOfItsSizeIsAnErrorOfTheWrite) {
  const auto writes_too_much = [] {
    const rlimit limit = {0, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    FILE* const file = tmpfile();
    return write(fileno(file), "text", 4) < 0 && errno == EFBIG ? 7 : 8;
  };
  EXPECT_EXIT(ExitWithMain(writes_too_much), ::testing::ExitedWithCode(7), "");
}

// Returns the first descriptor of 0 to 3 that is not as it is to be: the standard streams that were
// closed are /dev/null, and 3 is as closed as it was; or 4.
int FirstUnexpected(int closed) {
  struct stat null, stream;
  stat("/dev/null", &null);
  for (int descriptor = 0; descriptor < 3; ++descriptor) {
    if (fstat(descriptor, &stream) != 0) return descriptor;
    const bool is_null = S_ISCHR(stream.st_mode) && stream.st_rdev == null.st_rdev;
    if (is_null != ((closed >> descriptor) % 2 == 1)) return descriptor;
  }
  return fcntl(3, F_GETFD) < 0 ? 4 : 3;
}

TEST_F(RunMainDeathTest, StandardStreamsThatAreClosedLeadToDevNull) {
  const auto with_closed = [](int closed) {
    const int file = fileno(tmpfile());
    for (int descriptor = 0; descriptor < 3; ++descriptor) {
      dup2(file, descriptor);
      if ((closed >> descriptor) % 2 == 1) close(descriptor);
    }
    close(3);
    ExitWithMain([&] { return FirstUnexpected(closed); });
  };
  for (int closed = 0; closed < 8; ++closed) {
    EXPECT_EXIT(with_closed(closed), ::testing::ExitedWithCode(4), "") << closed;
  }
}

TEST(Nearest, IsTheFirstOfThoseWithTheFewestEditsUpToAThirdOfTheLength) {
  struct Case {
    std::string given;
    std::vector<std::string> known;
    std::string nearest;
  };
  const std::vector<Case> cases = {
      {"fromat", {"output", "format"}, "format"},
      {"lngwindow", {"longwindow", "widewindow"}, "longwindow"},
      {"", {}, ""},
      {"", {"a"}, "a"},  // one edit is always near
      {"", {"ab"}, ""},
      {"ab", {"abc"}, "abc"},
      {"ab", {"abcd"}, ""},
      {"ab", {"xb"}, "xb"},
      {"ab", {"xy"}, ""},
      {"abcde", {"abcxy"}, ""},  // 2 of 5 characters are more than a third
      {"abcdef", {"abcdxy"}, "abcdxy"},
      {"abcdef", {"abcxyz"}, ""},
      {"abcdef", {"abcd"}, "abcd"},
      {"abcdef", {"abc"}, ""},
      {"abcdef", {"cdef"}, "cdef"},
      {"abcdef", {"def"}, ""},
      {"abcdef", {"xyabcdef"}, "xyabcdef"},
      {"abcdef", {"xyzabcdef"}, ""},
      {"abcdef", {"abcdxef"}, "abcdxef"},
      {"saturdayx", {"sundayx"}, "sundayx"},  // 3 of 9
      {"saturdays", {"sunday"}, ""},          // 4 of 9
      {"abc", {"abd", "abe"}, "abd"},
      {"abcdef", {"abcdxy", "abcdex"}, "abcdex"},
      {"abcdef", {"abcdex", "abcdxy"}, "abcdex"}};
  for (const Case& c : cases) EXPECT_EQ(Nearest(c.given, c.known), c.nearest) << c.given;
}

}  // namespace
}  // namespace tfb
