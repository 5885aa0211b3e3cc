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
  SweepWorker(const SweepOptions& options, const std::vector<SweepCase>& cases, WorkerSide& side)
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
        case ToWorker::kGroup: {
          FromWorker end;
          end.set_group_done(MeasureGroup(request.group()));
          side_.Announce(-1, "");
          Send(end);
          if (!end.group_done()) return;
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
    for (const SweepCase& sweep_case : cases_) threads.push_back(sweep_case.threads);
    Environment environment;
    MeasurePeaks(threads, &environment);
    const bool on_gpu = std::any_of(cases_.begin(), cases_.end(), [](const SweepCase& sweep_case) {
      return sweep_case.device == Device::kCuda;
    });
    if (const auto gpu = CudaRuntime::For(Device::kCuda); on_gpu && gpu.ok()) {
      // A failure here costs the shares of a peak alone; the cases themselves say what is wrong.
      MeasureDevicePeaks(*gpu, &environment).IgnoreError();
    }
    return environment;
  }

  // Returns false where the device is lost.
  bool MeasureGroup(const GroupRequest& request) {
    std::vector<GroupCase> group;
    for (const GroupRequest::Item& item : request.items()) {
      group.push_back({&cases_.at(item.index()), item.check(), item.share_seconds(),
                       item.repetitions(), item.check_seconds()});
    }
    const auto index_of = [&](size_t i) { return request.items(static_cast<int>(i)).index(); };
    const auto report = [&](size_t i, Case record, const CaseCost& cost, bool finished) {
      FromWorker answer;
      CaseReport* report = answer.mutable_report();
      report->set_index(index_of(i));
      *report->mutable_record() = std::move(record);
      report->set_finished(finished);
      report->set_preparation_seconds(cost.preparation_seconds);
      report->set_check_seconds(cost.check_seconds);
      Send(answer);
    };
    MeasureHooks hooks;
    hooks.on_activity = [&](size_t i, absl::string_view what) {
      side_.Announce(static_cast<int64_t>(index_of(i)), what);
    };
    hooks.stopped = [&] { return side_.stopped(); };
    hooks.seconds_left = [&] { return side_.SecondsLeft(); };
    hooks.so_far = [&](size_t i, Case record, const CaseCost& cost) {
      report(i, std::move(record), cost, /*finished=*/false);
    };
    hooks.done = [&](size_t i, Case record, const CaseCost& cost) {
      report(i, std::move(record), cost, /*finished=*/true);
    };
    return measurer_.Measure(group, hooks);
  }

  const SweepOptions& options_;
  const std::vector<SweepCase>& cases_;
  WorkerSide& side_;
  Measurer measurer_;
};

}  // namespace

void WorkForSweep(const SweepOptions& options, const std::vector<SweepCase>& cases,
                  WorkerSide& side) {
  SweepWorker(options, cases, side).Run();
}

}  // namespace tfb
