// Does the work of a sweep in a forked process, so that no crash, hang or exhausted memory of a
// technique ends the sweep: the parent keeps the result file, sees the worker's last activity, and
// starts another worker.
//
// The parent must have only one thread, and must not have used a GPU: a forked process inherits
// neither threads nor a GPU's context.
#ifndef TFB_HARNESS_MEASURE_WORKER_H_
#define TFB_HARNESS_MEASURE_WORKER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "harness/measure/clock.h"

namespace tfb {

// Memory that both processes share. The worker writes its activity there without waking the parent,
// which would disturb a measurement.
struct SharedState {
  std::atomic<bool> stopped{false};         // parent: begin nothing more
  std::atomic<double> deadline{0};          // parent: clock reading to stop at; 0: none
  std::atomic<int64_t> activity_index{-1};  // worker: of the case, -1 for none
  std::atomic<double> activity_since{0};    // worker: the clock's reading
  char activity[32] = "";                   // worker: may be torn when read; for people only
};

// The worker's side.
class WorkerSide {
 public:
  // Waits for the next message of the parent. Returns nothing when there will be none.
  std::optional<std::string> Receive();
  void Send(absl::string_view message);
  void Announce(int64_t index, absl::string_view activity);
  bool stopped() const;
  double SecondsLeft() const;  // until the deadline, or infinite

 private:
  friend class Worker;
  int in_ = -1, out_ = -1;
  SharedState* shared_ = nullptr;
  Clock* clock_ = nullptr;
};

// The parent's side.
class Worker {
 public:
  // Forks a process that runs `body` and ends when it returns. The worker ignores SIGINT and
  // SIGTERM, which the parent handles, and is killed when the parent dies. The worker may allocate
  // `memory_limit` bytes more than the parent has (0: any number), beyond which allocations fail.
  // Both processes read `clock`.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(const std::function<void(WorkerSide&)>& body,
                                                       int64_t memory_limit,
                                                       Clock* clock = RealClock());
  ~Worker();  // kills the process
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  absl::Status Send(absl::string_view message);

  enum class Event { kMessage, kNothing, kEnded };
  // Waits for a message, the end of the worker or a signal, but at most `seconds` of real time,
  // whatever the clock.
  Event Wait(double seconds, std::string* message);

  void Stop() { shared_->stopped = true; }
  void SetDeadline(double seconds) { shared_->deadline = seconds; }  // a reading of the clock
  void Kill();

  // The case and the step that the worker has last announced.
  struct Activity {
    int64_t index;  // -1: nothing
    double seconds;
    std::string what;
  };
  Activity activity() const;
  // Why the worker ended.
  enum class End {
    kOther,
    kNoMemory,  // an allocation failed, and the exception was not caught
    kKilled,    // by SIGKILL, as by the system's out-of-memory killer
    kCpuTime    // by its limit of CPU time (ulimit -t)
  };
  End end() const { return end_; }
  // Returns how the worker ended, as in "signal 11 (Segmentation fault)" or "exit status 3".
  std::string HowItEnded() const;

 private:
  Worker() = default;
  void Reap();

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
  SharedState* shared_ = nullptr;
  Clock* clock_ = nullptr;
  std::string received_;  // the beginning of an incomplete message
  int status_ = 0;
  End end_ = End::kOther;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_WORKER_H_
