#include "results/history/command.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

bool Never() { return false; }

std::string LogPath(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  unlink(path.c_str());
  return path;
}

std::string Contents(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(Command, OutputHasTheWholeTextAndTheFirstLineOfErrors) {
  const auto output = OutputOf({"sh", "-c", "printf 'a\\nb\\n'; printf 'c\\nd\\n' >&2; exit 3"});
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->exit_status, 3);
  EXPECT_EQ(output->out, "a\nb\n");
  EXPECT_EQ(output->err, "c");
}

TEST(Command, MuchOutputOnBothStreamsDoesNotBlock) {
  const auto output =
      OutputOf({"sh", "-c",
                "i=0; while [ $i -lt 3000 ]; do echo $i-------------------------------------; "
                "echo $i-------------------------------------- >&2; i=$((i+1)); done"});
  ASSERT_TRUE(output.ok());
  EXPECT_GT(output->out.size(), size_t{100000});
}

TEST(Command, AProgramThatIsNotThereIsNotFound) {
  const auto output = OutputOf({"no-such-program"});
  EXPECT_TRUE(absl::IsNotFound(output.status()));
  EXPECT_THAT(std::string(output.status().message()), HasSubstr("no-such-program"));
}

TEST(Command, BothStreamsGoToTheLogAndTheStatusIsTheShells) {
  const std::string log = LogPath("both");
  EXPECT_EQ(*RunLogged("echo out; echo err >&2; pwd; exit 7", "/", log, Never), 7);
  EXPECT_EQ(*RunLogged("kill -9 $$", "/", log, Never), 128 + SIGKILL);
  EXPECT_EQ(Contents(log), "out\nerr\n/\n");
  EXPECT_EQ(*RunLogged("true", "/no/such/folder", log, Never), 127);
}

TEST(Command, ALogThatCannotBeWrittenIsAnError) {
  EXPECT_THAT(std::string(RunLogged("true", "/", "/no/such/log", Never).status().message()),
              HasSubstr("/no/such/log: cannot write: No such file"));
}

TEST(Command, VariablesOfAnotherRepositoryOrProgramAreLeftOut) {
  setenv("GIT_DIR", "/x", 1);
  setenv("RUNFILES_DIR", "/x", 1);
  setenv("OTHER_VARIABLE", "kept", 1);
  const auto output =
      OutputOf({"sh", "-c", "echo \"${GIT_DIR-unset} ${RUNFILES_DIR-unset} $OTHER_VARIABLE\""});
  unsetenv("GIT_DIR");
  unsetenv("RUNFILES_DIR");
  EXPECT_EQ(output->out, "unset unset kept\n");
}

int OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

TEST(Command, NoDescriptorStaysOpenHoweverACommandEnds) {
  const std::string log = LogPath("descriptors");
  const int before = OpenDescriptors();
  EXPECT_TRUE(OutputOf({"true"}).ok());
  EXPECT_FALSE(OutputOf({"no-such-program"}).ok());
  EXPECT_TRUE(RunLogged("true", "/", log, Never).ok());
  EXPECT_FALSE(RunLogged("sleep 1000000", "/", log, [] { return true; }).ok());
  EXPECT_EQ(OpenDescriptors(), before);
}

TEST(Command, ACommandHasNoInput) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "text", 4), 4);
  close(ends[1]);
  const int own = dup(STDIN_FILENO);
  dup2(ends[0], STDIN_FILENO);
  const auto input = OutputOf({"cat"});
  dup2(own, STDIN_FILENO);
  close(own);
  EXPECT_EQ(input->out, "");
  close(ends[0]);
}

TEST(Command, SignalsThatTheCallerIgnoresEndACommand) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) {
    const auto before = signal(number, SIG_IGN);
    const auto output = OutputOf({"sh", "-c", absl::StrCat("kill -", number, " $$; exit 0")});
    signal(number, before);
    EXPECT_EQ(output->exit_status, 128 + number);
  }
}

TEST(Command, StoppingEndsTheWholeGroup) {
  const std::string log = LogPath("stopped");
  // The shell waits for a child that would never end, and that only the group's signal reaches.
  const auto ended = RunLogged("echo begun; sleep 1000000; echo went on", "/", log,
                               [&log] { return Contents(log) == "begun\n"; });
  EXPECT_TRUE(absl::IsCancelled(ended.status())) << ended.status();
  EXPECT_EQ(Contents(log), "begun\n");
}

TEST(Command, ACommandThatIgnoresSignalsGetsTheNextOnes) {
  for (const char* ignored : {"INT", "INT TERM"}) {
    const std::string log = LogPath("ignores");
    // Where nothing stops the command it ends with this test.
    const std::string command =
        absl::StrCat("trap '' ", ignored, "; echo begun; while kill -0 $PPID; do sleep 1; done");
    const auto ended = RunLogged(
        command, "/", log, [&log] { return Contents(log) == "begun\n"; }, /*patience_ms=*/1);
    EXPECT_TRUE(absl::IsCancelled(ended.status())) << ignored << ": " << ended.status();
  }
}

TEST(Command, ACommandThatHasEndedIsNotCancelled) {
  const std::string log = LogPath("ended");
  EXPECT_EQ(*RunLogged("exit 4", "/", log, Never), 4);
}

TEST(Command, QuotedWordsReachTheProgramAsTheyAre) {
  for (const std::string word : {"plain", "two words", "it's", "$HOME `x` \\ \"", "*", ""}) {
    const auto output = OutputOf({"sh", "-c", absl::StrCat("printf %s ", ShellQuoted(word))});
    EXPECT_EQ(output->out, word);
  }
}

}  // namespace
}  // namespace tfb
