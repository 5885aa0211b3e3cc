// Runs other programs: git for its answers, builds and sweeps with what they print in a log.
#ifndef TFB_RESULTS_HISTORY_COMMAND_H_
#define TFB_RESULTS_HISTORY_COMMAND_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfb {

struct CommandOutput {
  int exit_status = 0;  // as a shell states it: 128 and the signal where one ended the program
  std::string out;
  std::string err;  // the first line alone
};

// Runs a program of the PATH and returns what it printed. Returns the system's error, with the
// program's name, where the program cannot be started.
absl::StatusOr<CommandOutput> OutputOf(const std::vector<std::string>& words);

// Runs a command line of the shell in `folder`, in a process group of its own, and waits for its
// end. Standard output and standard error are appended to the file `log`. Returns the exit status,
// as a shell states it.
//
// Once `stopped` returns true the group gets SIGINT, then SIGTERM, then SIGKILL, with `patience_ms`
// in between, and Cancelled is returned. The command gets SIGTERM where this process dies.
absl::StatusOr<int> RunLogged(const std::string& command, const std::string& folder,
                              const std::string& log, const std::function<bool()>& stopped,
                              int patience_ms = 10000);

// Both take the environment of this process without the variables that name another repository
// (GIT_DIR, ...) or another program's data (RUNFILES_DIR, BUILD_WORKSPACE_DIRECTORY, ...).

// Returns the word in quotes for a shell.
std::string ShellQuoted(absl::string_view word);

}  // namespace tfb

#endif  // TFB_RESULTS_HISTORY_COMMAND_H_
