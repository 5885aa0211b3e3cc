// Starts the program as a shell would: exit statuses, messages, signals.

#include <signal.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/program_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "results/history/bisect_testing.h"

namespace tfb {
namespace {

namespace fs = std::filesystem;

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr char kProgram[] = "tools/history";

class HistoryBisect : public ::testing::Test {
 protected:
  HistoryBisect()
      : repository_(absl::StrCat("program_",
                                 ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    repository_.CommitLine(8, [](int i) { return i < 5 ? "" : "time=1.3"; });
    setenv("BUILD_WORKING_DIRECTORY", repository_.checkout().c_str(), 1);
  }

  ProgramRun Run(const std::string& flags) {
    return RunProgram(absl::StrCat(kProgram,
                                   " bisect --case='near tokens=512' --build='sh ./build.sh' ",
                                   "--program=out/sweep --folder=../work ", flags));
  }

  fs::path Folder() const { return fs::path(repository_.folder()) / "work"; }

  FakeRepository repository_;
};

TEST_F(HistoryBisect, PrintsTheCommitAloneOnItsOutputAndLeavesTheCheckoutAlone) {
  const std::string before = repository_.Untouched();
  const ProgramRun run = Run("--good=c0");
  EXPECT_EQ(run.exit_status, 0) << run.err;
  EXPECT_THAT(run.out, StartsWith(repository_.Hash("c5") + "\nAuthor: An Author"));
  EXPECT_THAT(run.err, HasSubstr("history: bad is "));
  EXPECT_EQ(repository_.Untouched(), before);
}

TEST_F(HistoryBisect, NoClearDifferenceIsExitStatusOne) {
  const ProgramRun run = Run("--good=c5 --bad=c7 --clean='rm sweep.sh && echo gone'");
  EXPECT_EQ(run.exit_status, 1) << run.err;
  EXPECT_THAT(run.out, StartsWith("No clear difference between good and bad: "));
  EXPECT_EQ(RunProgram(absl::StrCat("cat ", (Folder() / "logs/clean.log").string())).out, "gone\n");
}

TEST_F(HistoryBisect, FlagsOfTheSweepAreReadAsTheShellReadsThem) {
  const ProgramRun run =
      Run("--good=c4 --bad=c5 --sweep_flags='--lengths=\"256\" --repetitions=50'"
          " --case=near");
  EXPECT_EQ(run.exit_status, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("256 tokens"));
}

TEST_F(HistoryBisect, BadUsageIsTwoAndOneLineThatNamesTheFlag) {
  const struct {
    std::string flags, message;
  } kCases[] = {
      {"", "--case: it begins with a technique, as in longformer:window=256 tokens=4096"},
      {"--case=near", "--good: name a commit"},
      {"--case=near --metric=speed",
       "--metric: \"speed\" is none of time, absolute, setup, instructions, memory, error, status"},
      {"--case=near --god=c1", "unknown flag --god, did you mean --good?"},
      {"--case=near c1", "\"c1\" is no flag; --help lists the flags"},
      {"--case=near --good=nothing",
       absl::StrCat("--good: \"nothing\" is no commit of ", repository_.checkout())}};
  for (const auto& one : kCases) {
    const ProgramRun run = RunProgram(absl::StrCat(kProgram, " bisect ", one.flags));
    EXPECT_EQ(run.exit_status, 2) << one.flags;
    EXPECT_EQ(run.err, absl::StrCat("history: ", one.message, "\n"));
    EXPECT_EQ(run.out, "");
  }
  EXPECT_THAT(repository_.Builds(), IsEmpty());
}

TEST_F(HistoryBisect, HelpHasTheExitStatusesAndTheFlags) {
  const ProgramRun run = RunProgram(absl::StrCat(kProgram, " bisect --help"));
  EXPECT_EQ(run.exit_status, 0);
  EXPECT_THAT(run.out, HasSubstr("Exit status: 0 one commit was found"));
  EXPECT_THAT(run.out, HasSubstr("--sweep_flags  (default: none)"));
}

TEST_F(HistoryBisect, WithoutGitItSaysSo) {
  const std::string path = getenv("PATH");
  setenv("PATH", "/nowhere", 1);
  const ProgramRun run = Run("--good=c0");
  setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(run.exit_status, 2);
  EXPECT_EQ(run.err, "history: git: cannot be started; is it in the PATH?\n");
}

TEST_F(HistoryBisect, ASignalStopsItCleansUpAndTheSameCommandGoesOn) {
  const std::string before = repository_.Untouched();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    // The fake sweep of the second measurement sends it, and would run for ever.
    const size_t done = repository_.Measurements().size();
    setenv("FAKE_SWEEP_SIGNAL", absl::StrCat(done + 2, " ", signal).c_str(), 1);
    const ProgramRun stopped = Run("--good=c0 --restart");
    EXPECT_EQ(stopped.exit_status, 130) << stopped.err;
    EXPECT_TRUE(absl::EndsWith(stopped.err, "history: stopped; the same command goes on\n"));
    EXPECT_EQ(repository_.Untouched(), before);
    EXPECT_FALSE(fs::exists(Folder() / "tfb_bisect_worktree"));
    EXPECT_THAT(repository_.Measurements(), SizeIs(done + 2));
  }
  unsetenv("FAKE_SWEEP_SIGNAL");
  const ProgramRun run = Run("--good=c0");
  EXPECT_EQ(run.exit_status, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("history: going on with 3 builds and 1 measurements"));
  EXPECT_THAT(run.out, StartsWith(repository_.Hash("c5")));
}

TEST_F(HistoryBisect, AfterSigkillTheSameCommandGoesOn) {
  const std::string before = repository_.Untouched();
  setenv("FAKE_SWEEP_SIGNAL", absl::StrCat("2 ", SIGKILL).c_str(), 1);
  Run("--good=c0");
  unsetenv("FAKE_SWEEP_SIGNAL");
  EXPECT_TRUE(fs::exists(Folder() / "tfb_bisect_worktree"));
  const ProgramRun run = Run("--good=c0");
  EXPECT_EQ(run.exit_status, 0) << run.err;
  EXPECT_THAT(run.out, StartsWith(repository_.Hash("c5")));
  EXPECT_EQ(repository_.Untouched(), before);
}

}  // namespace
}  // namespace tfb
