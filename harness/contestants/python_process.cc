#include "harness/contestants/python_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/status.h"

extern char** environ;

namespace tfb {
namespace {

using Json = nlohmann::json;

// The descriptor of the socket in the started process.
constexpr int kSocketThere = 3;

// Sends the bytes, and the file with the first of them where it is not negative.
bool SendAll(int socket, absl::string_view bytes, int file = -1) {
  while (!bytes.empty()) {
    struct iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
    struct msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (file >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      struct cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(header), &file, sizeof(int));
    }
    const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    file = -1;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

absl::Status ToStatus(const Json& answer) {
  const std::string message = answer.value("message", "");
  const std::string code = answer.value("error", "");
  if (code == "unimplemented") return absl::UnimplementedError(message);
  if (code == "resource_exhausted") return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

// Returns this process's environment, with the numbers of threads that numeric libraries read once,
// and a malloc that keeps what is freed: each call returns a new array, whose pages would otherwise
// come from the system anew, which our outputs, written again and again, do not pay.
std::vector<std::string> EnvironmentFor(int threads) {
  const std::pair<std::string, int64_t> values[] = {
      {"OMP_NUM_THREADS", threads},
      {"OPENBLAS_NUM_THREADS", threads},
      {"MKL_NUM_THREADS", threads},
      {"MALLOC_MMAP_MAX_", 0},
      {"MALLOC_TRIM_THRESHOLD_", std::numeric_limits<int64_t>::max()},
  };
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    bool is_set_below = false;
    for (const auto& [name, value] : values) {
      is_set_below |= absl::StartsWith(*entry, absl::StrCat(name, "="));
    }
    if (!is_set_below) environment.emplace_back(*entry);
  }
  for (const auto& [name, value] : values) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// The limit of this process is not the other's, which has one of its own.
void LiftMemoryLimit() {
  struct rlimit limit;
  if (getrlimit(RLIMIT_DATA, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_DATA, &limit);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PythonProcess>> PythonProcess::Start(const PythonSettings& settings,
                                                                    const std::string& contestants,
                                                                    int threads, double seconds) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  std::vector<std::string> words = {
      settings.interpreter,       "-c",        std::string(PythonProgram()),
      absl::StrCat(kSocketThere), contestants, absl::StrCat(settings.memory_limit)};
  std::vector<std::string> environment = EnvironmentFor(threads);
  const std::vector<char*> arguments = Pointers(words), variables = Pointers(environment);
  const pid_t parent = getpid();
  std::unique_ptr<PythonProcess> process(new PythonProcess);
  process->pid_ = fork();
  if (process->pid_ == 0) {
    // This process may have threads, so that only what is safe in a signal handler may be called.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    signal(SIGINT, SIG_IGN);
    // The kernel sends it to a stopped process once the shell of its group has ended, as behind
    // `nohup sweep &`.
    signal(SIGHUP, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
    LiftMemoryLimit();
    const int nothing = open("/dev/null", O_RDONLY);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    if (ends[1] == kSocketThere) {
      fcntl(kSocketThere, F_SETFD, 0);
    } else {
      dup2(ends[1], kSocketThere);
    }
    execvpe(arguments[0], arguments.data(), variables.data());
    _exit(127);
  }
  close(ends[1]);
  process->socket_ = ends[0];
  if (process->pid_ < 0) return absl::ErrnoToStatus(errno, "fork");
  if (!process->WaitForAnswer(seconds)) {
    return absl::DeadlineExceededError(
        absl::StrCat(contestants, ": loading it took more than ", seconds, " s"));
  }
  const absl::StatusOr<Json> answer = process->Answer();
  if (answer.ok()) return process;
  if (process->has_ended_ && absl::StrContains(answer.status().message(), "exit status 127")) {
    return absl::NotFoundError(
        absl::StrCat("there is no program \"", settings.interpreter, "\"; --python names one"));
  }
  return absl::InvalidArgumentError(absl::StrCat(contestants, ": ", answer.status().message()));
}

absl::StatusOr<std::unique_ptr<PythonProcess>> PythonProcess::Connect(const std::string& path) {
  std::unique_ptr<PythonProcess> process(new PythonProcess);
  process->socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  struct sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the path of a socket is too long"));
  }
  memcpy(address.sun_path, path.data(), path.size());
  if (connect(process->socket_, reinterpret_cast<struct sockaddr*>(&address), sizeof(address)) !=
      0) {
    return absl::ErrnoToStatus(errno, path);
  }
  TFB_RETURN_IF_ERROR(process->Answer().status());
  return process;
}

PythonProcess::~PythonProcess() {
  if (socket_ >= 0) close(socket_);
  End();
}

void PythonProcess::End() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  has_ended_ = true;
}

absl::StatusOr<Json> PythonProcess::Ask(const Json& request, int file) {
  if (has_ended_) return absl::InternalError("its process has ended");
  const std::string text = request.dump();
  const uint32_t length = static_cast<uint32_t>(text.size());
  std::string framed(reinterpret_cast<const char*>(&length), sizeof(length));
  framed += text;
  Signal(SIGCONT);
  // The file comes with a byte of its own, which the other side reads when it knows the request.
  if (!SendAll(socket_, framed) || (file >= 0 && !SendAll(socket_, "f", file))) return Ended();
  absl::StatusOr<Json> answer = Answer();
  if (absl::IsResourceExhausted(answer.status())) {
    End();  // it may keep what it has taken, for good
  } else {
    Signal(SIGSTOP);
  }
  return answer;
}

void PythonProcess::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

bool PythonProcess::WaitForAnswer(double seconds) const {
  struct pollfd ready = {socket_, POLLIN, 0};
  const int most = seconds > 0 ? static_cast<int>(seconds * 1000) : -1;
  int count;
  do {
    count = poll(&ready, 1, most);
  } while (count < 0 && errno == EINTR);
  return count > 0;
}

bool PythonProcess::Read(char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t got = read(socket_, bytes, count);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    bytes += got;
    count -= static_cast<size_t>(got);
  }
  return true;
}

absl::StatusOr<Json> PythonProcess::Answer() {
  uint32_t length = 0;
  if (!Read(reinterpret_cast<char*>(&length), sizeof(length))) return Ended();
  std::string text(length, '\0');
  if (!Read(text.data(), text.size())) return Ended();
  Json answer = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) return absl::InternalError("its process sent what is no answer");
  if (answer.contains("error")) return ToStatus(answer);
  return answer;
}

absl::Status PythonProcess::Ended() {
  has_ended_ = true;
  if (pid_ <= 0) return absl::InternalError("its process ended the connection");
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
    return absl::ResourceExhaustedError("its process was killed, as by the system for memory");
  }
  if (WIFSIGNALED(status)) {
    return absl::InternalError(absl::StrCat("its process ended with signal ", WTERMSIG(status),
                                            " (", strsignal(WTERMSIG(status)), ")"));
  }
  return absl::InternalError(
      absl::StrCat("its process ended with exit status ", WEXITSTATUS(status)));
}

}  // namespace tfb
