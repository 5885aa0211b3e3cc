// A Python process that serves contestants of one file (tools/python/tfb/contestant.py), and what is
// said to it: messages of JSON, each answered by one, over a socket.
#ifndef TFB_HARNESS_CONTESTANTS_PYTHON_PROCESS_H_
#define TFB_HARNESS_CONTESTANTS_PYTHON_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace tfb {

struct PythonSettings {
  std::string interpreter = "python3";  // a path, or a program on the PATH
  // Bytes that a process may allocate beyond what it has when a layer is made; 0: any number.
  int64_t memory_limit = 0;
};

class PythonProcess {
 public:
  // Starts the interpreter, and waits until it has loaded `contestants`, FILE.py:NAME,NAME or FILE.py,
  // for at most `seconds`; 0 means no limit. Libraries that count threads when they are loaded are told
  // `threads`. The process ignores Ctrl-C, which its parent handles, and ends with its parent.
  // Returns NotFound where there is no such interpreter, InvalidArgument where the file cannot be
  // loaded, DeadlineExceeded.
  static absl::StatusOr<std::unique_ptr<PythonProcess>> Start(const PythonSettings& settings,
                                                              const std::string& contestants,
                                                              int threads, double seconds);
  // Connects to a process that serves contestants of its own at a socket of the file system.
  static absl::StatusOr<std::unique_ptr<PythonProcess>> Connect(const std::string& path);
  ~PythonProcess();  // ends a process that was started
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;

  // Sends a request, with a file where it is not negative, and returns the answer. Returns the
  // contestant's error as Unimplemented, ResourceExhausted or Internal; Internal where the process
  // has ended, which has_ended() tells from then on. A process that was started and has run out of
  // memory is ended: what it has taken it may keep. Between requests one is stopped: threads of its
  // libraries that wait for work would spin beside what is timed next.
  absl::StatusOr<nlohmann::json> Ask(const nlohmann::json& request, int file = -1);
  bool has_ended() const { return has_ended_; }

 private:
  PythonProcess() = default;
  bool Read(char* bytes, size_t count);
  absl::StatusOr<nlohmann::json> Answer();
  absl::Status Ended();
  void End();                     // kills a process that was started
  void Signal(int signal) const;  // to a process that was started
  bool WaitForAnswer(double seconds) const;

  pid_t pid_ = -1;  // -1: not started by this process
  int socket_ = -1;
  bool has_ended_ = false;
};

// Returns the text of tools/python/tfb/contestant.py.
absl::string_view PythonProgram();

}  // namespace tfb

#endif  // TFB_HARNESS_CONTESTANTS_PYTHON_PROCESS_H_
