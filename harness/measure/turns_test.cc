#include "harness/measure/turns.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

std::string TestPath(const std::string& name) {
  return absl::StrCat(::testing::TempDir(), "/turns_", getpid(), "_", name);
}

// Returns a file that is open for reading at its beginning.
int FileOf(const std::string& text) {
  const std::string path = TestPath("text");
  std::ofstream(path) << text;
  return open(path.c_str(), O_RDONLY);
}

std::string Contents(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

int CountOpenFiles() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(ReadLine, ReturnsLinesUpToTheEndAndNoneThatIsTornOrEndless) {
  const std::string long_line(65535, 'x');
  int file = FileOf("a\n\nb c\n" + long_line + "\ntorn");
  EXPECT_EQ(ReadLine(file, nullptr), "a");
  EXPECT_EQ(ReadLine(file, nullptr), "");
  EXPECT_EQ(ReadLine(file, nullptr), "b c");
  EXPECT_EQ(ReadLine(file, nullptr), long_line);
  EXPECT_EQ(ReadLine(file, nullptr), std::nullopt);
  EXPECT_EQ(ReadLine(file, nullptr), std::nullopt);
  close(file);
  file = FileOf(long_line + "x\n");
  EXPECT_EQ(ReadLine(file, nullptr), std::nullopt);
  close(file);
  EXPECT_EQ(ReadLine(file, nullptr), std::nullopt);
}

TEST(ReadLine, ASignalEndsTheWaitingWhereThatIsWanted) {
  struct sigaction note = {}, before = {};
  note.sa_handler = [](int) {};
  sigaction(SIGUSR1, &note, &before);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t reader = getpid(), signals = fork();
  if (signals == 0) {
    while (kill(reader, SIGUSR1) == 0) usleep(1000);
    _exit(0);
  }
  EXPECT_EQ(ReadLine(ends[0], [] { return true; }), std::nullopt);
  int interruptions = 0;
  const auto goes_on = [&] { return ++interruptions == 3 && write(ends[1], "line\n", 5) != 5; };
  EXPECT_EQ(ReadLine(ends[0], goes_on), "line");
  EXPECT_GE(interruptions, 3);
  kill(signals, SIGKILL);
  waitpid(signals, nullptr, 0);
  sigaction(SIGUSR1, &before, nullptr);
  close(ends[0]);
  close(ends[1]);
}

TEST(Turns, TheFlagNamesTwoOpenFiles) {
  for (const std::string flag : {"", "0", "0,1,2", "x,1", "0,x", "0,999", "999,0", "0,-1"}) {
    EXPECT_EQ(Turns::FromFlag(flag, nullptr).status().message(),
              "--turns: \"" + flag + "\" is set by a sweep with --interleave_with");
  }
}

TEST(Turns, EachTurnIsAnsweredWhenTheNextIsAskedForAndUnknownOnesEndThem) {
  const int in = FileOf("measure a group\nmeasure \nrest\nmeasured\nrest\n");
  const std::string path = TestPath("answers");
  const int out = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  const auto turns = Turns::FromFlag(absl::StrCat(in, ",", out), nullptr).value();
  EXPECT_EQ(Contents(path), "");
  std::string told;
  for (int n = 1; const auto turn = turns->Next(); ++n) {
    absl::StrAppend(&told, turn->rest ? "the rest" : turn->group, ";");
    std::string answers;
    for (int i = 0; i < n; ++i) answers += "done\n";
    EXPECT_EQ(Contents(path), answers);
  }
  EXPECT_EQ(told, "a group;;the rest;");
  EXPECT_EQ(turns->Next()->rest, true);  // the line behind the unknown one
  EXPECT_EQ(turns->Next(), std::nullopt);
  close(in);
  close(out);
}

// Writes a program that takes turns. `answer` is what it does with a line, the variable `line`.
std::string Program(const std::string& name, const std::string& begin, const std::string& answer,
                    const std::string& end) {
  const std::string path = TestPath(name);
  std::ofstream(path) << "#!/bin/bash\n"
                      << "for turns; do :; done\n"  // the last argument
                      << "turns=${turns#--turns=}; in=${turns%,*}; out=${turns#*,}\n"
                      << "log=$0.log; echo \"$# $1 ${RUNFILES_DIR-none}\" > $log\n"
                      << "[[ -z ${BUILD_WORKSPACE_DIRECTORY-} ]] || exit 9\n"
                      << begin << "\necho done >&$out\n"
                      << "while read -r line <&$in; do\necho \"$line\" >> $log\n"
                      << answer << "\necho done >&$out\ndone\n"
                      << end << "\n";
  chmod(path.c_str(), 0755);
  return path;
}

TEST(OtherSweep, IsAskedForGroupsAndTheRestAndReturnsItsExitStatus) {
  setenv("RUNFILES_DIR", "/of/this/program", 1);
  setenv("BUILD_WORKSPACE_DIRECTORY", "/of/this/program", 1);
  const int open_before = CountOpenFiles();
  const std::string program = Program("good", "read -r input && exit 9", "", "exit 3");
  {
    auto other = OtherSweep::Start(program, {"--first", "--second"}, nullptr);
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_TRUE((*other)->Measure("a group").ok());
    EXPECT_TRUE((*other)->Measure("another").ok());
    EXPECT_EQ(Contents(program + ".log"), "3 --first none\nmeasure a group\nmeasure another\n");
    EXPECT_EQ((*other)->Finish().value(), 3);
    EXPECT_EQ(Contents(program + ".log"),
              "3 --first none\nmeasure a group\nmeasure another\nrest\n");
  }
  const std::string killed = Program("killed", "", "", "kill -TERM $$");
  EXPECT_EQ(OtherSweep::Start(killed, {}, nullptr).value()->Finish().value(), 128 + SIGTERM);
  // One that was not finished is killed, and none is left behind.
  EXPECT_TRUE(OtherSweep::Start(program, {}, nullptr).ok());
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  EXPECT_EQ(CountOpenFiles(), open_before);
}

TEST(OtherSweep, AnEndAnUnknownAnswerAndAProgramThatIsMissingAreErrors) {
  const int open_before = CountOpenFiles();
  const auto start = [](const std::string& program) {
    return std::string(OtherSweep::Start(program, {}, nullptr).status().ToString());
  };
  EXPECT_EQ(start("/none"), "NOT_FOUND: /none: No such file or directory");
  const std::string ends = Program("ends", "exit 5", "", "");
  EXPECT_EQ(start(ends), "UNAVAILABLE: " + ends +
                             " ended with exit status 5; is it a sweep of a build that knows "
                             "--turns?");
  const std::string killed = Program("is_killed", "kill -KILL $$", "", "");
  EXPECT_EQ(start(killed), "UNAVAILABLE: " + killed + " ended by signal 9");
  const std::string says = Program("says", "echo ready >&$out", "", "");
  EXPECT_EQ(start(says), "INTERNAL: " + says + " answered \"ready\"");
  const std::string text = TestPath("no_program");
  std::ofstream(text) << "text";
  chmod(text.c_str(), 0755);  // execv refuses it
  EXPECT_EQ(start(text), "UNAVAILABLE: " + text +
                             " ended with exit status 127; is it a sweep of a build that knows "
                             "--turns?");

  struct sigaction pipes = {};
  ASSERT_EQ(sigaction(SIGPIPE, nullptr, &pipes), 0);
  const std::string later = Program("later", "", "exit 6", "");
  auto other = OtherSweep::Start(later, {}, nullptr).value();
  const std::string end = "UNAVAILABLE: " + later +
                          " ended with exit status 6; is it a sweep of a build that knows --turns?";
  EXPECT_EQ(other->Measure("a group").ToString(), end);
  // Nobody reads what is written from now on, and that ends nothing but the other.
  EXPECT_EQ(other->Measure("another").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(other->Finish().status().code(), absl::StatusCode::kUnavailable);
  struct sigaction after = {};
  ASSERT_EQ(sigaction(SIGPIPE, nullptr, &after), 0);
  EXPECT_EQ(after.sa_handler, pipes.sa_handler);
  other.reset();
  EXPECT_EQ(CountOpenFiles(), open_before);
}

TEST(OtherSweep, AStopWhileWaitingIsCancelled) {
  struct sigaction note = {}, before = {};
  note.sa_handler = [](int) {};
  sigaction(SIGUSR1, &note, &before);
  // It signals whoever waits for its answer, again and again.
  const std::string program = Program("waits", "", "while kill -USR1 $PPID; do :; done", "");
  bool stopped = false;
  auto other = OtherSweep::Start(program, {}, [&] { return stopped; }).value();
  stopped = true;
  EXPECT_EQ(other->Measure("a group").ToString(), "CANCELLED: stopped");
  other.reset();
  sigaction(SIGUSR1, &before, nullptr);
}

}  // namespace
}  // namespace tfb
