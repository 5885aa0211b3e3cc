#include "harness/measure/worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/sanitizers.h"

namespace tfb {
namespace {

// A message is its length, 4 bytes in the machine's byte order, and its bytes.
using Length = uint32_t;

bool WriteAll(int fd, const char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t written = write(fd, bytes, count);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes += written;
    count -= static_cast<size_t>(written);
  }
  return true;
}

bool WriteMessage(int fd, absl::string_view message) {
  const Length length = static_cast<Length>(message.size());
  std::string framed(reinterpret_cast<const char*>(&length), sizeof(length));
  framed.append(message.data(), message.size());
  return WriteAll(fd, framed.data(), framed.size());
}

bool ReadAll(int fd, char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t got = read(fd, bytes, count);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    bytes += got;
    count -= static_cast<size_t>(got);
  }
  return true;
}

// Closes files of the parent that the worker must not hold, such as the locked result file.
void CloseAllBut(int a, int b) {
  std::vector<int> open;
  if (DIR* folder = opendir("/proc/self/fd"); folder != nullptr) {
    while (const dirent* entry = readdir(folder)) {
      int fd;
      if (absl::SimpleAtoi(entry->d_name, &fd) && fd > STDERR_FILENO && fd != dirfd(folder)) {
        open.push_back(fd);
      }
    }
    closedir(folder);
  }
  for (const int fd : open) {
    if (fd != a && fd != b) close(fd);
  }
}

// Returns the private writable memory of this process, which RLIMIT_DATA limits.
int64_t DataBytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmData:", 0) == 0) return 1024 * std::atoll(line.c_str() + strlen("VmData:"));
  }
  return 0;
}

// The program's own memory beside tensors: stacks of 8 MiB per thread, flushed caches, heap slack.
constexpr int64_t kOverheadBytes = int64_t{1} << 30;

void LimitMemory(int64_t bytes) {
  if (bytes <= 0 || kIsSanitized) return;
  struct rlimit limit;
  if (getrlimit(RLIMIT_DATA, &limit) != 0) return;
  const rlim_t wanted = static_cast<rlim_t>(DataBytes() + bytes + kOverheadBytes);
  if (limit.rlim_max != RLIM_INFINITY && wanted > limit.rlim_max) return;
  limit.rlim_cur = wanted;
  setrlimit(RLIMIT_DATA, &limit);
}

constexpr int kNoMemoryExit = 77;

// Ends the process where an exception is not caught, with a special exit status where an allocation
// failed in any thread.
[[noreturn]] void EndForException() {
  try {
    if (const std::exception_ptr exception = std::current_exception(); exception != nullptr) {
      std::rethrow_exception(exception);
    }
  } catch (const std::bad_alloc&) {
    _exit(kNoMemoryExit);
  } catch (...) {
  }
  std::abort();
}

// The system kills at the hard limit, and a process whose limits are equal gets no SIGXCPU before.
bool IsBeyondCpuLimit(const struct rusage& usage) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_CPU, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  const auto seconds = [](const struct timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  // The kernel's account of what was used lags behind by some ticks.
  constexpr double kLagSeconds = 0.5;
  return seconds(usage.ru_utime) + seconds(usage.ru_stime) + kLagSeconds >=
         static_cast<double>(limit.rlim_cur);
}

}  // namespace

std::optional<std::string> WorkerSide::Receive() {
  Length length;
  if (!ReadAll(in_, reinterpret_cast<char*>(&length), sizeof(length))) return std::nullopt;
  std::string message(length, '\0');
  if (!ReadAll(in_, message.data(), message.size())) return std::nullopt;
  return message;
}

void WorkerSide::Send(absl::string_view message) {
  if (!WriteMessage(out_, message)) _exit(1);  // the parent has closed the pipe
}

void WorkerSide::Announce(int64_t index, absl::string_view activity) {
  const size_t size = std::min(activity.size(), sizeof(shared_->activity) - 1);
  memcpy(shared_->activity, activity.data(), size);
  shared_->activity[size] = '\0';
  shared_->activity_since = clock_->Seconds();
  shared_->activity_index = index;
}

bool WorkerSide::stopped() const { return shared_->stopped || SecondsLeft() < 0; }

double WorkerSide::SecondsLeft() const {
  const double deadline = shared_->deadline;
  return deadline > 0 ? deadline - clock_->Seconds() : std::numeric_limits<double>::infinity();
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(const std::function<void(WorkerSide&)>& body,
                                                      int64_t memory_limit, Clock* clock) {
  std::unique_ptr<Worker> worker(new Worker);
  worker->clock_ = clock;
  void* shared =
      mmap(nullptr, sizeof(SharedState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
  worker->shared_ = new (shared) SharedState;
  int to_worker[2], to_parent[2];
  if (pipe2(to_worker, O_CLOEXEC) != 0 || pipe2(to_parent, O_CLOEXEC) != 0) {
    return absl::ErrnoToStatus(errno, "pipe");
  }
  std::fflush(nullptr);  // or both processes would write what is buffered
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // the parent died before the line above
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    CloseAllBut(to_worker[0], to_parent[1]);
    LimitMemory(memory_limit);
    std::set_terminate(EndForException);
    WorkerSide side;
    side.in_ = to_worker[0];
    side.out_ = to_parent[1];
    side.shared_ = worker->shared_;
    side.clock_ = clock;
    // An exception ends the process here; the frames below are the parent's.
    [&]() noexcept { body(side); }();
    std::fflush(nullptr);
    _exit(0);
  }
  close(to_worker[0]);
  close(to_parent[1]);
  worker->pid_ = pid;
  worker->out_ = to_worker[1];
  worker->in_ = to_parent[0];
  return worker;
}

Worker::~Worker() {
  Kill();
  Reap();
  if (in_ >= 0) close(in_);
  if (out_ >= 0) close(out_);
  if (shared_ != nullptr) munmap(shared_, sizeof(SharedState));
}

absl::Status Worker::Send(absl::string_view message) {
  // A write to a worker that has ended must not end the parent.
  struct sigaction ignore = {}, before;
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &before);
  const bool written = WriteMessage(out_, message);
  sigaction(SIGPIPE, &before, nullptr);
  if (!written) return absl::UnavailableError("the worker does not take messages");
  return absl::OkStatus();
}

Worker::Event Worker::Wait(double seconds, std::string* message) {
  for (;;) {
    Length length = 0;
    if (received_.size() >= sizeof(length)) {
      memcpy(&length, received_.data(), sizeof(length));
      if (received_.size() >= sizeof(length) + length) {
        *message = received_.substr(sizeof(length), length);
        received_.erase(0, sizeof(length) + length);
        return Event::kMessage;
      }
    }
    struct pollfd ready = {in_, POLLIN, 0};
    const int count = poll(&ready, 1, static_cast<int>(seconds * 1000));
    if (count <= 0) return Event::kNothing;
    char buffer[65536];
    const ssize_t got = read(in_, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) return Event::kNothing;
    if (got <= 0) {
      Reap();
      return Event::kEnded;
    }
    received_.append(buffer, static_cast<size_t>(got));
  }
}

void Worker::Kill() {
  if (pid_ > 0) kill(pid_, SIGKILL);
}

void Worker::Reap() {
  if (pid_ <= 0) return;
  struct rusage usage = {};
  while (wait4(pid_, &status_, 0, &usage) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  const int signal = WIFSIGNALED(status_) ? WTERMSIG(status_) : 0;
  if (signal == SIGXCPU || (signal == SIGKILL && IsBeyondCpuLimit(usage))) {
    end_ = End::kCpuTime;
  } else if (signal == SIGKILL) {
    end_ = End::kKilled;
  } else if (WIFEXITED(status_) && WEXITSTATUS(status_) == kNoMemoryExit) {
    end_ = End::kNoMemory;
  }
}

Worker::Activity Worker::activity() const {
  char what[sizeof(shared_->activity)];
  memcpy(what, shared_->activity, sizeof(what));
  what[sizeof(what) - 1] = '\0';
  return {shared_->activity_index, clock_->Seconds() - shared_->activity_since, what};
}

std::string Worker::HowItEnded() const {
  if (end_ == End::kNoMemory) return "an allocation failed";
  if (end_ == End::kCpuTime) return "the limit of CPU time (ulimit -t) was reached";
  if (WIFSIGNALED(status_)) {
    return absl::StrCat("signal ", WTERMSIG(status_), " (", strsignal(WTERMSIG(status_)), ")");
  }
  return absl::StrCat("exit status ", WEXITSTATUS(status_));
}

}  // namespace tfb
