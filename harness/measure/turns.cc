#include "harness/measure/turns.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr char kDone[] = "done", kRest[] = "rest", kMeasure[] = "measure ";
constexpr size_t kMostCharacters = 1 << 16;

bool WriteLine(int file, absl::string_view line) {
  const std::string text = absl::StrCat(line, "\n");
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(file, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    written += static_cast<size_t>(count);
  }
  return true;
}

absl::Status ErrnoStatus(absl::string_view what) {
  return absl::Status(absl::ErrnoToStatusCode(errno),
                      absl::StrCat(what, ": ", std::strerror(errno)));
}

// The child calls only async-signal-safe functions between fork and exec.
[[noreturn]] void Become(const char* program, char* const* arguments) {
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  execv(program, arguments);
  _exit(127);
}

}  // namespace

std::optional<std::string> ReadLine(int file, const std::function<bool()>& stopped) {
  std::string line;
  while (line.size() < kMostCharacters) {
    char character;
    const ssize_t count = read(file, &character, 1);
    if (count < 0 && errno == EINTR) {
      if (stopped != nullptr && stopped()) return std::nullopt;
      continue;
    }
    if (count <= 0) return std::nullopt;
    if (character == '\n') return line;
    line += character;
  }
  return std::nullopt;
}

absl::StatusOr<std::unique_ptr<OtherSweep>> OtherSweep::Start(
    const std::string& program, const std::vector<std::string>& arguments,
    std::function<bool()> stopped) {
  if (access(program.c_str(), X_OK) != 0) {
    return ErrnoStatus(program);
  }
  int to[2], from[2];
  if (pipe(to) != 0) return ErrnoStatus("pipe");
  if (pipe(from) != 0) {
    close(to[0]);
    close(to[1]);
    return ErrnoStatus("pipe");
  }
  fcntl(to[1], F_SETFD, FD_CLOEXEC);
  fcntl(from[0], F_SETFD, FD_CLOEXEC);
  std::unique_ptr<OtherSweep> other(new OtherSweep());
  other->program_ = program;
  other->stopped_ = std::move(stopped);
  other->to_ = to[1];
  other->from_ = from[0];

  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  words.push_back(absl::StrCat("--turns=", to[0], ",", from[1]));
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  // The other program's data files are beside that program, not beside this one, and its commit is
  // not that of the workspace in which this one was built.
  for (const char* variable :
       {"RUNFILES_DIR", "RUNFILES_MANIFEST_FILE", "JAVA_RUNFILES", "BUILD_WORKSPACE_DIRECTORY"}) {
    unsetenv(variable);
  }
  other->pid_ = fork();
  if (other->pid_ == 0) Become(program.c_str(), pointers.data());
  close(to[0]);
  close(from[1]);
  if (other->pid_ < 0) return ErrnoStatus("fork");
  TFB_RETURN_IF_ERROR(other->AwaitDone());
  return other;
}

OtherSweep::~OtherSweep() {
  if (to_ >= 0) close(to_);
  if (from_ >= 0) close(from_);
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

absl::Status OtherSweep::Measure(absl::string_view group) {
  return Ask(absl::StrCat(kMeasure, group));
}

absl::Status OtherSweep::Ask(absl::string_view line) {
  // A write to a program that has ended must be an error, not end this process (SIGPIPE).
  struct sigaction ignore = {}, before = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &before);
  const bool written = WriteLine(to_, line);
  sigaction(SIGPIPE, &before, nullptr);
  if (!written) return absl::UnavailableError(HowItEnded());
  return AwaitDone();
}

absl::Status OtherSweep::AwaitDone() {
  const std::optional<std::string> answer = ReadLine(from_, stopped_);
  if (answer == kDone) return absl::OkStatus();
  if (answer.has_value()) {
    return absl::InternalError(absl::StrCat(program_, " answered \"", *answer, "\""));
  }
  if (stopped_ != nullptr && stopped_()) return absl::CancelledError("stopped");
  return absl::UnavailableError(HowItEnded());
}

std::string OtherSweep::HowItEnded() {
  int status = 0;
  if (pid_ > 0 && waitpid(pid_, &status, 0) == pid_) pid_ = -1;
  if (WIFSIGNALED(status)) return absl::StrCat(program_, " ended by signal ", WTERMSIG(status));
  return absl::StrCat(program_, " ended with exit status ", WEXITSTATUS(status),
                      "; is it a sweep of a build that knows --turns?");
}

absl::StatusOr<int> OtherSweep::Finish() {
  TFB_RETURN_IF_ERROR(Ask(kRest));
  close(to_);  // the end of the pipe means that there is no further turn
  to_ = -1;
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0) {
    if (errno != EINTR) return ErrnoStatus("waitpid");
    if (stopped_ != nullptr && stopped_()) return absl::CancelledError("stopped");
  }
  pid_ = -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

absl::StatusOr<std::unique_ptr<Turns>> Turns::FromFlag(absl::string_view flag,
                                                       std::function<bool()> stopped) {
  const std::vector<absl::string_view> parts = absl::StrSplit(flag, ',');
  int in = -1, out = -1;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &in) || !absl::SimpleAtoi(parts[1], &out) ||
      fcntl(in, F_GETFD) < 0 || fcntl(out, F_GETFD) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--turns: \"", flag, "\" is set by a sweep with --interleave_with"));
  }
  return std::unique_ptr<Turns>(new Turns(in, out, std::move(stopped)));
}

std::optional<Turns::Turn> Turns::Next() {
  if (!WriteLine(out_, kDone)) return std::nullopt;
  const std::optional<std::string> line = ReadLine(in_, stopped_);
  if (!line.has_value()) return std::nullopt;
  if (*line == kRest) return Turn{true, ""};
  if (!absl::StartsWith(*line, kMeasure)) return std::nullopt;
  return Turn{false, line->substr(sizeof(kMeasure) - 1)};
}

}  // namespace tfb
