#include "results/history/command.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "core/file_error.h"

extern char** environ;

namespace tfb {
namespace {

constexpr int kCannotStart = 127;
constexpr int kFirstPauseMs = 1, kLongestPauseMs = 20;

// Variables that make git work on another repository (git rev-parse --local-env-vars), that name
// the data of the program which Bazel started, and that programs take as the caller's folder.
bool IsLeftOut(absl::string_view name) {
  static constexpr absl::string_view kNames[] = {"GIT_ALTERNATE_OBJECT_DIRECTORIES",
                                                 "GIT_COMMON_DIR",
                                                 "GIT_CONFIG",
                                                 "GIT_DIR",
                                                 "GIT_GRAFT_FILE",
                                                 "GIT_IMPLICIT_WORK_TREE",
                                                 "GIT_INDEX_FILE",
                                                 "GIT_INTERNAL_SUPER_PREFIX",
                                                 "GIT_NAMESPACE",
                                                 "GIT_NO_REPLACE_OBJECTS",
                                                 "GIT_OBJECT_DIRECTORY",
                                                 "GIT_PREFIX",
                                                 "GIT_REPLACE_REF_BASE",
                                                 "GIT_SHALLOW_FILE",
                                                 "GIT_WORK_TREE",
                                                 "BUILD_WORKING_DIRECTORY",
                                                 "BUILD_WORKSPACE_DIRECTORY",
                                                 "JAVA_RUNFILES",
                                                 "RUNFILES_DIR",
                                                 "RUNFILES_MANIFEST_FILE"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// What a child needs, made before the fork, since a child may not allocate.
class ChildArguments {
 public:
  explicit ChildArguments(const std::vector<std::string>& words) : words_(words) {
    for (char** variable = environ; *variable != nullptr; ++variable) {
      const absl::string_view text = *variable;
      if (!IsLeftOut(text.substr(0, text.find('=')))) variables_.emplace_back(text);
    }
    for (std::string& word : words_) argv_.push_back(word.data());
    for (std::string& variable : variables_) envp_.push_back(variable.data());
    argv_.push_back(nullptr);
    envp_.push_back(nullptr);
  }
  char* const* argv() { return argv_.data(); }
  char* const* envp() { return envp_.data(); }

 private:
  std::vector<std::string> words_, variables_;
  std::vector<char*> argv_, envp_;
};

// Replaces the child by the program, or ends it where that is impossible.
[[noreturn]] void Become(ChildArguments* arguments, int out, int err) {
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) signal(number, SIG_DFL);
  execvpe(arguments->argv()[0], arguments->argv(), arguments->envp());
  _exit(kCannotStart);
}

absl::Status SystemError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

int ShellStatus(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int WaitFor(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return ShellStatus(status);
}

void ReadBoth(int out, int err, CommandOutput* output) {
  pollfd ends[] = {{out, POLLIN, 0}, {err, POLLIN, 0}};
  std::string* texts[] = {&output->out, &output->err};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    if (poll(ends, 2, -1) < 0) continue;  // a signal
    for (int i = 0; i < 2; ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      char bytes[4096];
      const ssize_t count = read(ends[i].fd, bytes, sizeof(bytes));
      if (count > 0) texts[i]->append(bytes, static_cast<size_t>(count));
      if (count == 0 || (count < 0 && errno != EINTR)) ends[i].fd = -1;
    }
  }
}

// Waits for the child's end, and ends it where `stopped` returns true. Returns whether it did so.
bool WaitUnlessStopped(pid_t child, const std::function<bool()>& stopped, int patience_ms,
                       int* status) {
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGKILL};
  size_t next = 0;  // of kSignals
  int pause_ms = kFirstPauseMs, waited_ms = 0;
  for (;;) {
    const pid_t ended = waitpid(child, status, WNOHANG);
    if (ended == child || (ended < 0 && errno != EINTR)) return next > 0;
    if (next > 0 ? waited_ms >= patience_ms && next < std::size(kSignals) : stopped()) {
      kill(-child, kSignals[next++]);
      waited_ms = 0;
    }
    poll(nullptr, 0, pause_ms);
    waited_ms += pause_ms;
    pause_ms = std::min(2 * pause_ms, kLongestPauseMs);
  }
}

}  // namespace

absl::StatusOr<CommandOutput> OutputOf(const std::vector<std::string>& words) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0) return SystemError("pipe");
  if (pipe2(err, O_CLOEXEC) != 0) {
    const absl::Status status = SystemError("pipe");
    close(out[0]);
    close(out[1]);
    return status;
  }
  ChildArguments arguments(words);
  const pid_t child = fork();
  if (child == 0) Become(&arguments, out[1], err[1]);
  const absl::Status forked = child < 0 ? SystemError("fork") : absl::OkStatus();
  close(out[1]);
  close(err[1]);
  CommandOutput output;
  if (forked.ok()) ReadBoth(out[0], err[0], &output);
  close(out[0]);
  close(err[0]);
  if (!forked.ok()) return forked;
  output.exit_status = WaitFor(child);
  if (output.exit_status == kCannotStart) {
    return absl::NotFoundError(absl::StrCat(words[0], ": cannot be started; is it in the PATH?"));
  }
  output.err = output.err.substr(0, output.err.find('\n'));
  return output;
}

absl::StatusOr<int> RunLogged(const std::string& command, const std::string& folder,
                              const std::string& log, const std::function<bool()>& stopped,
                              int patience_ms) {
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return FileError(log, "write", errno);
  ChildArguments arguments({"/bin/sh", "-c", command});
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent || chdir(folder.c_str()) != 0) _exit(kCannotStart);
    Become(&arguments, file, file);
  }
  const absl::Status forked = child < 0 ? SystemError("fork") : absl::OkStatus();
  close(file);
  if (!forked.ok()) return forked;
  setpgid(child, child);  // the child does it, too, whichever comes first
  int status = 0;
  if (WaitUnlessStopped(child, stopped, patience_ms, &status)) {
    kill(-child, SIGKILL);  // what the command has left behind
    return absl::CancelledError("stopped");
  }
  return ShellStatus(status);
}

std::string ShellQuoted(absl::string_view word) {
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

}  // namespace tfb
