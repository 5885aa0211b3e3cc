// Times layers side by side: setup, cold and warm runs, and the segments of streams.
//
// Google Benchmark is the timing loop. Each case gives it up to four benchmarks (setup, cold, run,
// stream), whose repetitions it interleaves at random over all cases that are measured together. So
// whatever drifts (clock, temperature, a neighbour) meets all of them alike, and a ratio of two
// medians is honest even where the medians are not.
//
//   run      a sample is the mean of as many calls as last min_time; one untimed call before them
//            warms caches and predictors
//   cold     one call after the caches were overwritten
//   setup    Setup, timed apart, and followed by one Run: together "end to end"
//   stream   Reset, then Append over the whole sequence; a sample is the time of one segment
//
// No sample is dropped for being slow: medians and their intervals cope with tails, and a sample
// removed for its value biases both. But directly before and after each sample of `run` a fixed
// amount of arithmetic (TimingOptions::probe) is timed, on one thread. Where that took over
// kDisturbedFactor of its usual time (kUsualQuantile over the samples taken together), the core
// itself was slower then, throttled or taken away, and the sample says little of the layer: it is
// discarded and counted, the worst first and never more than a third of a case's samples.
//
// On a device runs, cold ones and segments are timed between events of the stream, and instead of
// the arithmetic the GPU's own sensors are read before and after each sample of `run`: those taken
// while it throttled are discarded and counted, those at the lowest clock first, and never more
// than a third; how many of them there were in all is in Timing::throttled_samples.
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
#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/sample_plan.h"
#include "results/results.pb.h"

namespace tfb {

constexpr double kDisturbedFactor = 1.3;
constexpr double kUsualQuantile = 0.1;

// A layer while it is timed. Setup has been called, and Run once.
struct TimedCase {
  BoundLayer bound;
  // Of the visit's wishes its share and repetitions: the numbers of samples adapt to the share,
  // down to kFewestSamples.
  Visit::Item wishes;
  double timeout_seconds = 0;  // for everything that is measured of this case; 0: none

  // The results.
  Timing timing;
  DeviceState state_before, state_after;  // of the device, by TimingOptions::monitor
  double spent_seconds = 0;
  // Not OK where a call failed; DeadlineExceeded where the timeout came before a sample of `run`;
  // Cancelled where `stopped` came before kFewestSamples of them. A stream that cannot be fed is in
  // `stream_status` alone.
  absl::Status status;
  absl::Status stream_status;
};

// Does multiply-adds in registers, always the same number of them.
void ProbeArithmetic();

struct TimingOptions {
  int repetitions = 11;    // samples of `run`, unless the share is too small for them
  double min_time = 0.01;  // seconds that a sample of `run` lasts at least
  bool setup = true, cold = true, stream = true;
  // Overwrites the caches of the cores, or enqueues that on the device; null: no cold runs.
  std::function<absl::Status()> flush_caches;
  double flush_seconds = 0;          // that one call of it takes
  DeviceMonitor* monitor = nullptr;  // of the device; null: nothing is known of it
  // Instructions that the process has retired so far (harness/measure/instruction_counter.h); null:
  // unknown.
  std::function<int64_t()> instructions;
  // The clock by which everything on the CPU is timed, and all limits are kept.
  Clock* clock = RealClock();
  // A fixed amount of work, which is timed beside each sample of `run` on the CPU.
  std::function<void()> probe = &ProbeArithmetic;
  // Called with what is known of a case when it has kIntervalSamples samples of `run`, and when it
  // has all of its samples, while others may lack theirs. Null: nobody asks.
  std::function<void(size_t index, const Timing& so_far)> on_enough;
  // Called before each sample with the case's index and "run", "cold", "setup" or "stream".
  std::function<void(size_t index, absl::string_view what)> on_sample;
  // No further sample begins once this is true. Samples taken by then are kept.
  std::function<bool()> stopped;
};

// Measures the cases together, each into its own `timing`. This is not reentrant, as Google
// Benchmark is not. Where a case loses the device to this process (DeviceStatus), that case has the
// status, and for the others it is as if `stopped` were true from then on.
void MeasureSideBySide(const TimingOptions& options, std::vector<TimedCase>* cases);

// Overwrites twice the last level's size, at most 256 MiB, by all threads of the pool, so that no
// cache of any of their cores keeps what was in it.
class CpuCacheFlusher {
 public:
  explicit CpuCacheFlusher(ThreadPool* pool);
  absl::Status operator()();  // OK
  static int64_t Bytes();

 private:
  ThreadPool* pool_;
  Tensor memory_;
  uint8_t value_ = 0;
};

// Overwrites memory of twice the size of a GPU's second-level cache and at least 256 MiB, of a
// sixteenth of the GPU's memory at most.
class DeviceCacheFlusher {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceCacheFlusher>> Make(CudaRuntime* runtime);
  absl::Status operator()();  // enqueues it on the default stream
  static size_t Bytes(const CudaRuntime& runtime);

 private:
  explicit DeviceCacheFlusher(CudaRuntime* runtime) : runtime_(runtime) {}

  CudaRuntime* runtime_;
  DeviceBuffer memory_;
  uint8_t value_ = 0;
};

// Returns the seconds of the real clock.
double MonotonicSeconds();

// Which samples to keep, by the time of the fixed arithmetic beside each (the policy above).
// `usual` is that time undisturbed.
std::vector<bool> UndisturbedSamples(const std::vector<double>& probes, double usual);

// Which samples of a device to keep, by the states that its monitor read about each.
std::vector<bool> UnthrottledSamples(const std::vector<DeviceState>& states);

// The segments of a stream: [begin, begin + tokens), whole and in order.
struct Segment {
  int64_t begin;
  int64_t tokens;
};
// About eight of equal size, or as many as the largest segment asks for; a shorter one at the end
// where they do not divide.
std::vector<Segment> PlanSegments(int64_t tokens, int64_t max_segment_tokens);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_TIMING_H_
