// Times layers side by side: setup, cold and warm runs, and the segments of streams.
//
// Google Benchmark is the timing loop, and each sample one of its benchmarks. A case has up to five
// kinds of samples (setup, cold, run, graph, stream). The n samples of a kind are taken one in each
// nth part of the whole, at random within it, between those of all cases that are measured together.
// So any drift (clock, temperature, other processes) affects all cases alike, and sample i of one case
// is taken at about the time of sample i of another: their quotient tells what is faster even while
// the machine's speed changes (SamplesSideBySide, results/statistics.h).
//
//   run      a sample is the mean of as many calls as last min_time, after one untimed warm-up call
//   cold     one call after the caches were overwritten
//   setup    the setup, timed by itself and then with one call, which together are "end to end"
//   graph    on a device, as run, where a call launches a CUDA graph of its work
//   stream   Reset, then Append over the whole sequence; a sample is the time of one segment
//
// A call is what the case's pass says, and has its own setup:
//
//   forward    Run, without kept memory; the setup is Setup
//   backward   Backward, always of the same Run; the setup is SetUpBackward, behind that of the Run
//   training   Run with kept memory, then Backward; the setup is Setup and SetUpBackward
//
// Only the forward pass has streams.
//
// A contestant's samples of `run` begin with an untimed call on new inputs, which is judged
// (harness/measure/sample_trial.h). One that runs in another process times its own calls.
//
// No sample is dropped for being slow: medians and their intervals are robust to outliers, and a
// sample removed for its value biases both. But directly before and after each sample of `run` a
// fixed amount of arithmetic (TimingOptions::probe) is timed, on one thread. Where that took over
// kDisturbedFactor of its usual time (kUsualQuantile over the samples taken together), the core
// itself was throttled or preempted, and the sample says little of the layer: it is discarded and
// counted, the worst first and never more than a third of a case's samples.
//
// On a device, runs, cold runs and segments are timed between events of the stream, and instead of
// the arithmetic the GPU's sensors are read during each sample of `run`, when all of its calls are
// enqueued and before the wait for them. Samples taken
// while the GPU throttled are discarded and counted, those at the lowest clock first, and never
// more than a third; Timing::throttled_samples is the number of all throttled ones.
#ifndef TFB_HARNESS_MEASURE_TIMING_H_
#define TFB_HARNESS_MEASURE_TIMING_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/cuda/runtime.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/judge/bound_layer.h"
#include "harness/measure/clock.h"
#include "harness/measure/device_monitor.h"
#include "harness/measure/sample_trial.h"
#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/sample_plan.h"
#include "results/results.pb.h"

namespace tfb {

constexpr double kDisturbedFactor = 1.3;
constexpr double kUsualQuantile = 0.1;

// A layer while it is timed. Setup has been called, and Run once; where the pass is another than
// the forward one, the backward pass is bound and has been set up.
struct TimedCase {
  BoundLayer bound;
  Case::Pass pass = Case::PASS_FORWARD;
  // Only its share and repetitions are used: the numbers of samples adapt to the share, down to
  // kFewestSamples.
  Visit::Item wishes;
  double timeout_seconds = 0;  // for all measurements of this case; 0: none
  // Judges the calls of a contestant on a CPU with each sample of `run`; null for other layers.
  SampleTrial* trial = nullptr;

  // The results.
  Timing timing;
  // Of the device, by TimingOptions::monitor, during the first and the last sample of `run`.
  DeviceState state_first, state_last;
  double spent_seconds = 0;
  // The error of a call that failed; DeadlineExceeded where the timeout passed before a sample of
  // `run`; Cancelled where `stopped` was true before kFewestSamples of them. An error of the stream
  // is only in `stream_status`.
  absl::Status status;
  absl::Status stream_status;
};

// Does multiply-adds in registers, always the same number of them.
void ProbeArithmetic();

struct TimingOptions {
  int repetitions = 11;    // samples of `run`, unless the share is too small for them
  double min_time = 0.01;  // seconds that a sample of `run` lasts at least
  bool setup = true, cold = true, stream = true, graph = true;
  // Replaces what is in the caches of the cores, or enqueues that on the device; null: no cold runs.
  std::function<absl::Status()> flush_caches;
  double flush_seconds = 0;          // of one call of flush_caches
  DeviceMonitor* monitor = nullptr;  // of the device; null: its state is unknown
  // Returns the instructions that the process has retired (harness/measure/instruction_counter.h);
  // null: unknown.
  std::function<int64_t()> instructions;
  // The clock that times everything on the CPU, and all time limits.
  Clock* clock = RealClock();
  // A fixed amount of work, which is timed beside each sample of `run` on the CPU.
  std::function<void()> probe = &ProbeArithmetic;
  // Called with a case's results when it has kIntervalSamples samples of `run`, and when it has all
  // of its samples, while others may lack theirs; may be null.
  std::function<void(size_t index, const Timing& so_far)> on_enough;
  // Called before each sample with the case's index and "run", "cold", "setup", "stream" or "graph".
  std::function<void(size_t index, absl::string_view what)> on_sample;
  // Returns true when no further sample may begin. Samples taken by then are kept.
  std::function<bool()> stopped;
};

// Measures the cases together, each into its own `timing`. It is not reentrant, as Google Benchmark
// is not. Where a case makes the device unusable for this process (DeviceStatus), that case has the
// status, and the others are treated as if `stopped` were true from then on.
void MeasureSideBySide(const TimingOptions& options, std::vector<TimedCase>* cases);

// Overwrites twice the size of the last-level cache, at most 256 MiB, by all threads of the pool,
// so that the caches of all their cores are cold.
class CpuCacheFlusher {
 public:
  explicit CpuCacheFlusher(ThreadPool* pool);
  absl::Status operator()();  // OK
  static int64_t Bytes();     // on this machine
  static int64_t BytesFor(int64_t last_level_cache_bytes);

 private:
  ThreadPool* pool_;
  Tensor memory_;
  uint8_t value_ = 0;
};

// Reads twice the size of a GPU's second-level cache, but at least 256 MiB and at most a sixteenth of
// the GPU's memory. It writes nothing: dirty lines would be written back during the run that is
// timed.
class DeviceCacheFlusher {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceCacheFlusher>> Make(CudaRuntime* runtime);
  absl::Status operator()();  // enqueues the reads on the default stream
  static size_t Bytes(const CudaRuntime& runtime);

 private:
  explicit DeviceCacheFlusher(CudaRuntime* runtime) : runtime_(runtime) {}

  CudaRuntime* runtime_;
  DeviceBuffer memory_;  // zeros
  DeviceBuffer not_zero_;
};

// Returns the seconds of the real clock.
double MonotonicSeconds();

// Tells which samples to keep, by the times of the fixed arithmetic beside them (see the top of
// this file). `usual` is the undisturbed time.
std::vector<bool> UndisturbedSamples(const std::vector<double>& probes, double usual);

// Tells which samples of a device to keep, by the states that its monitor read during them.
std::vector<bool> UnthrottledSamples(const std::vector<DeviceState>& states);

// A segment [begin, begin + tokens) of a stream.
struct Segment {
  int64_t begin;
  int64_t tokens;
};
// Returns the consecutive segments of a stream: about eight of equal size, or more where
// max_segment_tokens requires it; the last one is shorter where the tokens are not a multiple.
std::vector<Segment> PlanSegments(int64_t tokens, int64_t max_segment_tokens);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_TIMING_H_
