#include "harness/measure/sweep_worker.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "core/cuda/runtime.h"
#include "harness/measure/device_peaks.h"
#include "harness/measure/machine.h"
#include "harness/measure/measure.h"
#include "harness/measure/worker_messages.pb.h"

namespace tfb {
namespace {

class SweepWorker {
 public:
  SweepWorker(const SweepOptions& options, const std::vector<Job>& cases, WorkerSide& side)
      : options_(options), cases_(cases), side_(side), measurer_(options.measure) {}

  void Run() {
    while (const std::optional<std::string> message = side_.Receive()) {
      ToWorker request;
      // Both ends are one program: bytes that are no request mean that the pipe is broken.
      if (!request.ParseFromString(*message)) std::abort();
      switch (request.request_case()) {
        case ToWorker::kDescribe:
          Answer(Describe());
          break;
        case ToWorker::kMeasurePeaks:
          Answer(Peaks());
          break;
        case ToWorker::kVisit: {
          FromWorker end;
          end.set_visit_done(Measure(request.visit()));
          side_.Announce(-1, "");
          Send(end);
          if (!end.visit_done()) return;
          break;
        }
        case ToWorker::REQUEST_NOT_SET:
          std::abort();
      }
    }
  }

 private:
  void Send(const FromWorker& answer) { side_.Send(answer.SerializeAsString()); }

  void Answer(Environment environment) {
    FromWorker answer;
    *answer.mutable_environment() = std::move(environment);
    Send(answer);
  }

  Environment Describe() const {
    Environment environment = DescribeMachine(cases_.front().threads, options_.workspace);
    for (const std::string& word : options_.command_line) environment.add_command_line(word);
    return environment;
  }

  Environment Peaks() const {
    std::vector<int> threads = {1};
    for (const Job& job : cases_) threads.push_back(job.threads);
    Environment environment;
    MeasurePeaks(threads, &environment);
    const bool on_gpu = std::any_of(cases_.begin(), cases_.end(),
                                    [](const Job& job) { return job.device == Device::kCuda; });
    if (const auto gpu = CudaRuntime::For(Device::kCuda); on_gpu && gpu.ok()) {
      // A failure here only loses the shares of peaks; the cases themselves report the error.
      MeasureDevicePeaks(*gpu, CublasPeakLibrary(Device::kCuda), &environment).IgnoreError();
    }
    return environment;
  }

  // Returns false where the device is lost.
  bool Measure(const Visit& visit) {
    MeasureHooks hooks;
    hooks.on_activity = [&](size_t index, absl::string_view what) {
      side_.Announce(static_cast<int64_t>(index), what);
    };
    hooks.stopped = [&] { return side_.stopped(); };
    hooks.seconds_left = [&] { return side_.SecondsLeft(); };
    hooks.report = [&](CaseReport report) {
      FromWorker answer;
      *answer.mutable_report() = std::move(report);
      Send(answer);
    };
    return measurer_.Measure(cases_, visit, hooks);
  }

  const SweepOptions& options_;
  const std::vector<Job>& cases_;
  WorkerSide& side_;
  Measurer measurer_;
};

}  // namespace

void WorkForSweep(const SweepOptions& options, const std::vector<Job>& cases, WorkerSide& side) {
  SweepWorker(options, cases, side).Run();
}

}  // namespace tfb
