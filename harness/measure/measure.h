// Runs cases of one problem in this process: checks each against float64, then times them side by
// side.
#ifndef TFB_HARNESS_MEASURE_MEASURE_H_
#define TFB_HARNESS_MEASURE_MEASURE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/cuda/runtime.h"
#include "core/thread_pool.h"
#include "harness/measure/check_forecast.h"
#include "harness/measure/clock.h"
#include "harness/measure/device_monitor.h"
#include "harness/measure/instruction_counter.h"
#include "harness/measure/machine_load.h"
#include "harness/measure/timing.h"
#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/cases.h"
#include "results/results.pb.h"

namespace tfb {

class DeviceBytes;

struct MeasureOptions {
  int repetitions = 11;
  double min_time = 0.01;
  double case_timeout = 60;  // seconds; 0: none
  int64_t memory_limit = 0;  // bytes of tensors, workspace and parameters together; 0: none
  // The number of query tokens on which the errors of a scaling case, and of an accuracy case, are
  // measured, where the definition can evaluate single ones; 0: all.
  int64_t sampled_rows = 64;
  int64_t accuracy_rows = 0;
  bool times = true;  // false: cases are only checked
  bool cold = true;
  bool graphs = true;  // whether runs on a device are also timed as CUDA graphs
  const Registry* registry = &Registry::Global();
  // The clock and the fixed arithmetic of TimingOptions.
  Clock* clock = RealClock();
  std::function<void()> probe = &ProbeArithmetic;
  LoadSources load;  // the files with the load of the machine
};

struct MeasureHooks {
  // Called before each step that may take long, with the index of the job.
  std::function<void(size_t index, absl::string_view what)> on_activity;
  // Returns true when no further work may begin. Cases without enough samples by then are not
  // reported.
  std::function<bool()> stopped;
  // Returns the seconds until `stopped` will be true for lack of time; null means no such limit.
  std::function<double()> seconds_left;
  // Called with the reports of each case, in any order of cases: after its check, as soon as it has
  // enough samples, and when it is finished.
  std::function<void(CaseReport)> report;
};

// Measures cases, and keeps the state between visits: pools, the memory that flushes caches, and
// the durations of checks.
class Measurer {
 public:
  explicit Measurer(const MeasureOptions& options);

  // Measures the jobs that the visit names, which have equal GroupKeys. Returns false where a case
  // made the device unusable for this process (DeviceStatus): that case has been reported, and the
  // unreported ones need another process.
  bool Measure(const std::vector<Job>& jobs, const Visit& visit, const MeasureHooks& hooks);

 private:
  struct Prepared;
  struct Batch;

  ThreadPool* Pool(int threads);
  std::function<absl::Status()> Flusher(const Batch& batch);
  DeviceMonitor* Monitor(CudaRuntime* runtime);
  bool Stopped(const MeasureHooks& hooks) const { return device_lost_ || hooks.stopped(); }
  // Returns false where the case must wait for the next batch. Reports cases that cannot run.
  bool Prepare(const Job& job, const Visit::Item& wishes, const MeasureHooks& hooks, Batch* batch);
  absl::Status Fill(const MeasureHooks& hooks, Batch* batch, Prepared* prepared);
  absl::Status PlaceInputs(const std::vector<TensorSpec>& specs, Batch* batch, Prepared* prepared);
  absl::Status Bind(Batch* batch, Prepared* prepared);
  void PrepareTrial(Prepared* prepared);
  absl::Status Check(const MeasureHooks& hooks, Prepared* prepared, DeviceBytes* device_bytes);
  absl::Status TooLong(absl::string_view what) const;
  void Time(const MeasureHooks& hooks, Batch* batch);
  // Writes the times into the record of the report.
  void RecordTimes(const TimedCase& timed, const MachineLoad& load, bool monitored,
                   CaseReport* report) const;

  MeasureOptions options_;
  std::unique_ptr<InstructionCounter> instructions_;  // null where the kernel has none
  std::map<int, std::unique_ptr<ThreadPool>> pools_;
  std::map<int, std::unique_ptr<CpuCacheFlusher>> flushers_;
  std::map<CudaRuntime*, std::unique_ptr<DeviceCacheFlusher>> device_flushers_;
  std::map<CudaRuntime*, std::unique_ptr<DeviceMonitor>> monitors_;  // null where there is none
  bool device_lost_ = false;
  CheckForecast check_forecast_;
  std::map<int, double> flush_seconds_;  // that overwriting the caches takes, by threads
};

// Returns the seconds after which a case that is still at the same step is taken to hang: half of its
// timeout more, but 1 to 30 s.
double HangSeconds(double case_timeout);

// The status of a case whose preparation ended with `status`.
Outcome::Status OutcomeOf(const absl::Status& status);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_MEASURE_H_
