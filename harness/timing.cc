#include "harness/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmark/benchmark.h"
#include "core/cpu/kernels.h"
#include "core/status.h"
#include "harness/device_memory.h"
#include "harness/machine.h"

namespace tfb {
namespace {

constexpr int kSetupSamples = kIntervalSamples;
constexpr int kCountedRuns = 3;
constexpr int kColdSamples = kIntervalSamples;
constexpr int kStreams = kIntervalSamples;
constexpr size_t kSegmentsKept = 32;  // of a stream, evenly spaced

// Enough arithmetic for 50 us: long against the clock's resolution, short against a time slice of
// some ms.
int64_t CalibrateProbe() {
  int64_t iterations = 64;
  for (double seconds = 0; seconds < 50e-6; iterations *= 2) {
    const double begin = MonotonicSeconds();
    BestCpuKernels().fma_peak(iterations);
    seconds = MonotonicSeconds() - begin;
  }
  return iterations / 2;
}

double ProbeSeconds() {
  static const int64_t iterations = CalibrateProbe();
  const double begin = MonotonicSeconds();
  BestCpuKernels().fma_peak(iterations);
  return MonotonicSeconds() - begin;
}

// Whether a benchmark gave up with an error. The member's name is that of Google Benchmark 1.7; from
// 1.8 on it is an enumeration.
template <class Run>
auto GaveUp(const Run& run, int) -> decltype(bool{run.error_occurred}) {
  return run.error_occurred;
}
template <class Run>
bool GaveUp(const Run& run, long) {
  return static_cast<bool>(run.skipped);
}

// Collects the repetitions of each benchmark instead of printing them.
class SampleReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration || GaveUp(run, 0) || run.iterations == 0) continue;
      runs_[run.run_name.function_name].push_back(run);
    }
  }
  // In the order in which they were taken.
  const std::vector<Run>& Runs(const std::string& name) { return runs_[name]; }

 private:
  std::map<std::string, std::vector<Run>> runs_;
};

void InitializeBenchmarkLibrary() {
  static const bool done = [] {
    std::string name = "timing", interleave = "--benchmark_enable_random_interleaving=true";
    char* arguments[] = {name.data(), interleave.data(), nullptr};
    int count = 2;
    benchmark::Initialize(&count, arguments);
    return true;
  }();
  (void)done;
}

// One case while it is measured.
class Measurement {
 public:
  // *device_lost becomes true with a call that loses the device, and ends the samples of all.
  Measurement(const TimingOptions& options, size_t index, TimedCase* timed, bool* device_lost)
      : options_(options), index_(index), timed_(*timed), device_lost_(*device_lost) {}

  // Times batches of calls, each twice as long as the one before; from the fastest follow the
  // number of calls a sample and the number of samples. Several batches, since the first call is
  // slow and any of them may be interrupted; one that lasts as long as a sample is enough.
  void Pilot() {
    if (device_lost_) {
      timed_.status = absl::CancelledError("the device was lost before");
      return;
    }
    timed_.timing.set_clock(timed_.device == nullptr ? Timing::CLOCK_WALL
                                                     : Timing::CLOCK_DEVICE_EVENTS);
    timed_.state_before = timed_.state_after = ReadState();
    if (timed_.device != nullptr && !(Prepare(&begin_) && Prepare(&end_))) return;
    Announce("run");
    const double start = MonotonicSeconds();
    call_seconds_ = std::numeric_limits<double>::infinity();
    for (int64_t calls = 1; calls <= kMostCalls; calls *= 2) {
      const double begin = MonotonicSeconds();
      for (int64_t i = 0; i < calls; ++i) {
        if (!Keep(Run())) return;
      }
      if (!Keep(Synchronize())) return;
      const double seconds = MonotonicSeconds() - begin;
      call_seconds_ = std::min(call_seconds_, seconds / static_cast<double>(calls));
      if (seconds >= options_.min_time || (seconds >= options_.min_time / 4 && calls >= 4)) break;
    }
    calls_per_sample_ = std::clamp<int64_t>(
        static_cast<int64_t>(std::ceil(options_.min_time / std::max(call_seconds_, 1e-12))), 1,
        kMostCalls);
    spent_ += MonotonicSeconds() - start;
    PlanStream();
  }

  void Register() {
    if (!timed_.status.ok()) return;
    const double warming = call_seconds_ < kWarmedSeconds ? call_seconds_ : 0;
    const double sample_seconds = std::max(options_.min_time, call_seconds_) + warming;
    // A call that is longer than the share is measured once: it costs what it costs.
    const double fit = Fitting(0.6, sample_seconds);
    const int fewest = fit >= kIntervalSamples ? kIntervalSamples : fit >= 0.5 ? kFewestSamples : 1;
    const int samples = Clamp(fit, std::min(fewest, options_.repetitions), options_.repetitions);
    if (timed_.device == nullptr) {
      Add("run", samples, &Measurement::RunSample)->Iterations(calls_per_sample_)->UseRealTime();
    } else {
      Add("run", samples, &Measurement::DeviceRunSample)->Iterations(1)->UseManualTime();
    }
    // The others only where the share has room for them.
    const auto add_single = [&](absl::string_view what, int wanted, double part, double seconds,
                                Body body) {
      const int samples = Clamp(Fitting(part, seconds), 0, wanted);
      if (samples > 0) Add(what, samples, body)->Iterations(1)->UseManualTime();
    };
    if (options_.setup) {
      add_single("setup", kSetupSamples, 0.2, 2 * call_seconds_, &Measurement::SetupSample);
    }
    if (options_.cold && options_.flush_caches != nullptr) {
      add_single("cold", kColdSamples, 0.2, 1.5 * call_seconds_, &Measurement::ColdSample);
    }
    if (!segments_.empty()) {
      add_single("stream", kStreams, 0.4, 2 * call_seconds_, &Measurement::StreamSample);
    }
  }

  // Instructions of single runs, where there is a counter and time for it.
  void CountInstructions() {
    if (options_.instructions == nullptr || timed_.device != nullptr || !timed_.status.ok()) return;
    if (Fitting(0.1, kCountedRuns * call_seconds_) < 1) return;
    for (int i = 0; i < kCountedRuns; ++i) {
      const int64_t before = options_.instructions();
      if (!Keep(Run())) return;
      const int64_t after = options_.instructions();
      if (after > before) timed_.timing.add_run_instructions(static_cast<double>(after - before));
    }
  }

  // What the library reports of the runs, joined with what was noted here.
  void Finish(SampleReporter* reporter, double usual_probe) {
    const auto& runs = reporter->Runs(NameOf("run"));
    const bool on_device = timed_.device != nullptr;
    const std::vector<bool> kept =
        on_device ? UnthrottledSamples(states_) : UndisturbedSamples(probes_, usual_probe);
    const double calls = on_device ? static_cast<double>(calls_per_sample_) : 1;  // an iteration
    size_t taken = 0;
    int64_t discarded = 0;
    for (size_t i = 0; i < std::min(runs.size(), run_taken_.size()); ++i) {
      if (!run_taken_[i]) continue;
      if (!on_device && kept[taken]) timed_.timing.add_probe_ns(probes_[taken] * 1e9);
      if (kept[taken++]) {
        timed_.timing.add_run_ns(runs[i].real_accumulated_time / runs[i].iterations / calls * 1e9);
      } else {
        ++discarded;
      }
    }
    timed_.spent_seconds = spent_;
    timed_.timing.set_calls_per_sample(calls_per_sample_);
    timed_.timing.set_throttled_samples(std::count_if(states_.begin(), states_.end(), IsThrottled));
    timed_.timing.set_discarded_samples(discarded);
    if (discarded > 0) {
      timed_.timing.set_discarded_reason(on_device ? "the device throttled meanwhile"
                                                   : "the core was slower meanwhile");
    }
    FinishStream();
    if (!timed_.status.ok()) return;
    if (stopped_ && taken < std::min<size_t>(kFewestSamples, runs.size())) {
      timed_.status = absl::CancelledError("stopped before there were enough samples");
    } else if (taken == 0) {
      timed_.status = absl::DeadlineExceededError(
          absl::StrFormat("no sample: a call takes %.2g s", call_seconds_));
    }
  }

  const std::vector<double>& probes() const { return probes_; }

 private:
  using Body = void (Measurement::*)(benchmark::State&);

  std::string NameOf(absl::string_view what) const { return absl::StrCat(index_, "_", what); }

  benchmark::internal::Benchmark* Add(absl::string_view what, int samples, Body body) {
    return benchmark::RegisterBenchmark(
               NameOf(what).c_str(),
               [this, body, what](benchmark::State& state) { Sample(what, body, state); })
        ->Repetitions(samples);
  }

  // How many samples fit a part of the share.
  double Fitting(double part, double sample_seconds) const {
    if (timed_.share_seconds <= 0) return std::numeric_limits<double>::infinity();
    return part * timed_.share_seconds / std::max(sample_seconds, 1e-9);
  }
  static int Clamp(double value, int low, int high) {
    return static_cast<int>(std::clamp<double>(value, low, high));
  }

  // One sample of any kind. When the case is over, its remaining repetitions do nothing; they are
  // not skipped with an error, because the library computes statistics over repetitions and aborts
  // where some have failed.
  void Sample(absl::string_view what, Body body, benchmark::State& state) {
    timed_out_ = timed_out_ || (timed_.timeout_seconds > 0 && spent_ > timed_.timeout_seconds);
    stopped_ = stopped_ || device_lost_ || (options_.stopped != nullptr && options_.stopped());
    if (!timed_.status.ok() || timed_out_ || stopped_) {
      if (what == "run") run_taken_.push_back(false);
      for (auto _ : state) state.SetIterationTime(0);
      return;
    }
    Announce(what);
    const double begin = MonotonicSeconds();
    (this->*body)(state);
    spent_ += MonotonicSeconds() - begin;
  }

  void RunSample(benchmark::State& state) {
    const bool warm = call_seconds_ >= kWarmedSeconds || Keep(RunAndWait());
    const double before = ProbeSeconds();
    for (auto _ : state) {
      if (timed_.status.ok()) timed_.status = Run();
    }
    const double after = ProbeSeconds();
    run_taken_.push_back(warm && timed_.status.ok());
    if (run_taken_.back()) probes_.push_back(std::max(before, after));
  }

  void DeviceRunSample(benchmark::State& state) {
    const bool warm = call_seconds_ >= kWarmedSeconds || Keep(RunAndWait());
    const DeviceState before = ReadState();
    for (auto _ : state) {
      const absl::StatusOr<double> seconds = DeviceSeconds([&]() -> absl::Status {
        for (int64_t call = 0; call < calls_per_sample_; ++call) TFB_RETURN_IF_ERROR(Run());
        return absl::OkStatus();
      });
      Keep(seconds.status());
      state.SetIterationTime(seconds.value_or(0));
    }
    timed_.state_after = ReadState();
    run_taken_.push_back(warm && timed_.status.ok());
    if (run_taken_.back()) states_.push_back(Worse(before, timed_.state_after));
  }

  void SetupSample(benchmark::State& state) {
    for (auto _ : state) {
      const double begin = MonotonicSeconds();
      absl::Status status = Setup();
      if (status.ok()) status = Synchronize();
      const double middle = MonotonicSeconds();
      if (status.ok()) status = RunAndWait();
      const double end = MonotonicSeconds();
      state.SetIterationTime(end - begin);
      if (!Keep(status)) continue;
      timed_.timing.add_setup_ns((middle - begin) * 1e9);
      timed_.timing.add_end_to_end_ns((end - begin) * 1e9);
    }
  }

  void ColdSample(benchmark::State& state) {
    for (auto _ : state) {
      const absl::StatusOr<double> seconds = ColdSeconds();
      state.SetIterationTime(seconds.value_or(0));
      if (Keep(seconds.status())) timed_.timing.add_cold_run_ns(*seconds * 1e9);
    }
  }
  absl::StatusOr<double> ColdSeconds() {
    TFB_RETURN_IF_ERROR(options_.flush_caches());
    if (timed_.device != nullptr) return DeviceSeconds([&] { return Run(); });
    const double begin = MonotonicSeconds();
    TFB_RETURN_IF_ERROR(Run());
    return MonotonicSeconds() - begin;
  }

  // --- Streams

  // The views of each segment, made beforehand since making them allocates.
  struct SegmentCall {
    Segment segment;
    Inputs inputs;
    Outputs outputs;
    DeviceEvent end;  // on a device
    std::vector<double> append_ns;
  };

  static int SegmentAxis(const TensorSpec& spec) {
    const auto found = std::find(spec.shape.begin(), spec.shape.end(), kSegmentTokens);
    return found == spec.shape.end() ? -1 : static_cast<int>(found - spec.shape.begin());
  }

  template <class View>
  static absl::Status SliceAll(const std::vector<TensorSpec>& specs, const NamedViews<View>& whole,
                               const Segment& segment, NamedViews<View>* sliced) {
    for (const TensorSpec& spec : specs) {
      const View* view = whole.Find(spec.name);
      const int axis = SegmentAxis(spec);
      if (view == nullptr || view->rank != static_cast<int>(spec.shape.size())) {
        if (spec.optional) continue;
        return absl::UnimplementedError(
            absl::StrCat("a segment's ", spec.name, " is no part of a whole tensor"));
      }
      sliced->Set(spec.name, axis < 0 ? *view : Slice(*view, axis, segment.begin, segment.tokens));
    }
    return absl::OkStatus();
  }

  void PlanStream() {
    stream_ = dynamic_cast<StreamingLayer*>(timed_.layer);
    if (stream_ == nullptr || !options_.stream || stream_->segment_inputs().empty()) return;
    const TensorSpec& first = stream_->segment_inputs()[0];
    const ConstTensorView whole = timed_.inputs.Get(first.name);
    const int axis = SegmentAxis(first);
    const int64_t tokens = axis < 0 || axis >= whole.rank ? 0 : whole.dim(axis);
    for (const Segment& segment : PlanSegments(tokens, stream_->max_segment_tokens())) {
      SegmentCall call;
      call.segment = segment;
      timed_.stream_status =
          SliceAll(stream_->segment_inputs(), timed_.inputs, segment, &call.inputs);
      timed_.stream_status.Update(
          SliceAll(stream_->segment_outputs(), timed_.outputs, segment, &call.outputs));
      if (timed_.device != nullptr) {
        absl::StatusOr<DeviceEvent> end = DeviceEvent::Make(timed_.device);
        timed_.stream_status.Update(end.status());
        if (end.ok()) call.end = *std::move(end);
      }
      if (!timed_.stream_status.ok()) {
        segments_.clear();
        return;
      }
      segments_.push_back(std::move(call));
    }
  }

  void StreamSample(benchmark::State& state) {
    for (auto _ : state) {
      const double begin = MonotonicSeconds();
      timed_.stream_status.Update(timed_.device == nullptr ? Stream() : StreamOnDevice());
      state.SetIterationTime(MonotonicSeconds() - begin);
    }
    if (timed_.stream_status.ok()) return;
    segments_.clear();
    NoteLoss();
    // What loses the device to all is the case's failure, not its stream's alone.
    if (device_lost_) timed_.status.Update(timed_.stream_status);
  }
  absl::Status Stream() {
    TFB_RETURN_IF_ERROR(stream_->Reset());
    for (SegmentCall& call : segments_) {
      const double start = MonotonicSeconds();
      TFB_RETURN_IF_ERROR(stream_->Append(call.inputs, call.outputs, timed_.execution));
      call.append_ns.push_back((MonotonicSeconds() - start) * 1e9);
    }
    return absl::OkStatus();
  }
  // Without waiting between the segments, as a decoder would not.
  absl::Status StreamOnDevice() {
    TFB_RETURN_IF_ERROR(stream_->Reset());
    TFB_RETURN_IF_ERROR(begin_.Record(timed_.execution.stream));
    for (SegmentCall& call : segments_) {
      TFB_RETURN_IF_ERROR(stream_->Append(call.inputs, call.outputs, timed_.execution));
      TFB_RETURN_IF_ERROR(call.end.Record(timed_.execution.stream));
    }
    const DeviceEvent* previous = &begin_;
    for (SegmentCall& call : segments_) {
      TFB_ASSIGN_OR_RETURN(const double seconds, call.end.SecondsSince(*previous));
      call.append_ns.push_back(seconds * 1e9);
      previous = &call.end;
    }
    return absl::OkStatus();
  }

  void FinishStream() {
    const size_t count = segments_.size();
    const size_t kept = std::min(count, kSegmentsKept);
    for (size_t n = 0; n < kept; ++n) {
      // Evenly spaced, the first and the last among them.
      const SegmentCall& call = segments_[kept == 1 ? 0 : n * (count - 1) / (kept - 1)];
      if (call.append_ns.empty()) continue;
      SegmentTiming* segment = timed_.timing.add_segments();
      segment->set_tokens_before(call.segment.begin);
      segment->set_tokens(call.segment.tokens);
      for (const double ns : call.append_ns) segment->add_append_ns(ns);
    }
  }

  // --- Calls

  void Announce(absl::string_view what) {
    if (options_.on_sample != nullptr) options_.on_sample(index_, what);
  }
  absl::Status Synchronize() { return tfb::Synchronize(timed_.device); }
  absl::Status RunAndWait() {
    TFB_RETURN_IF_ERROR(Run());
    return Synchronize();
  }
  // Layers report what they foresee; what they do not is an allocation that fails inside of a
  // container.
  template <class Body>
  static absl::Status WithoutMemory(const Body& body) {
    try {
      return body();
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("an allocation failed");
    }
  }
  absl::Status Run() {
    return WithoutMemory(
        [&] { return timed_.layer->Run(timed_.inputs, timed_.outputs, timed_.execution); });
  }
  absl::Status Setup() {
    return WithoutMemory([&] { return timed_.layer->Setup(timed_.inputs, timed_.execution); });
  }
  bool Keep(const absl::Status& status) {
    timed_.status.Update(status);
    if (!status.ok()) NoteLoss();
    return status.ok();
  }

  // --- Devices

  // After a call that failed.
  void NoteLoss() {
    if (timed_.device != nullptr && !timed_.device->Synchronize().ok()) device_lost_ = true;
  }
  DeviceState ReadState() const {
    return timed_.device == nullptr || options_.monitor == nullptr ? DeviceState()
                                                                   : options_.monitor->Read();
  }
  static DeviceState Worse(const DeviceState& a, const DeviceState& b) {
    if (IsThrottled(a) != IsThrottled(b)) return IsThrottled(a) ? a : b;
    return a.clock_mhz() < b.clock_mhz() ? a : b;
  }
  bool Prepare(DeviceEvent* event) {
    absl::StatusOr<DeviceEvent> made = DeviceEvent::Make(timed_.device);
    if (made.ok()) *event = *std::move(made);
    return Keep(made.status());
  }
  // From before the first to after the last of what `body` enqueues. Waits for it.
  template <class Body>
  absl::StatusOr<double> DeviceSeconds(const Body& body) {
    TFB_RETURN_IF_ERROR(begin_.Record(timed_.execution.stream));
    TFB_RETURN_IF_ERROR(body());
    TFB_RETURN_IF_ERROR(end_.Record(timed_.execution.stream));
    return end_.SecondsSince(begin_);
  }

  // A longer call needs no warming: what caches give is lost in it.
  static constexpr double kWarmedSeconds = 0.05;
  static constexpr int64_t kMostCalls = 1 << 20;  // a sample

  const TimingOptions& options_;
  const size_t index_;
  TimedCase& timed_;
  bool& device_lost_;
  double call_seconds_ = 0;
  double spent_ = 0;
  bool timed_out_ = false;
  bool stopped_ = false;
  int64_t calls_per_sample_ = 1;
  std::vector<bool> run_taken_;      // by repetition
  std::vector<double> probes_;       // of those that were taken, on the CPU
  std::vector<DeviceState> states_;  // likewise on a device: the worse about each
  DeviceEvent begin_, end_;
  StreamingLayer* stream_ = nullptr;
  std::vector<SegmentCall> segments_;
};

double UsualProbe(const std::vector<std::unique_ptr<Measurement>>& measurements) {
  std::vector<double> probes;
  for (const auto& measurement : measurements) {
    probes.insert(probes.end(), measurement->probes().begin(), measurement->probes().end());
  }
  if (probes.empty()) return 0;
  const size_t rank = static_cast<size_t>(kUsualQuantile * static_cast<double>(probes.size()));
  std::nth_element(probes.begin(), probes.begin() + rank, probes.end());
  return probes[rank];
}

}  // namespace

double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<bool> UndisturbedSamples(const std::vector<double>& probes, double usual) {
  std::vector<bool> keep(probes.size(), true);
  std::vector<size_t> worst(probes.size());
  for (size_t i = 0; i < worst.size(); ++i) worst[i] = i;
  std::sort(worst.begin(), worst.end(), [&](size_t a, size_t b) { return probes[a] > probes[b]; });
  worst.resize(probes.size() / 3);
  for (const size_t i : worst) keep[i] = probes[i] <= kDisturbedFactor * usual;
  return keep;
}

std::vector<bool> UnthrottledSamples(const std::vector<DeviceState>& states) {
  // As probes: undisturbed 1, throttled the more the lower the clock.
  std::vector<double> probes;
  for (const DeviceState& state : states) {
    probes.push_back(IsThrottled(state) ? 2 + 1 / std::max(state.clock_mhz(), 1.0) : 1);
  }
  return UndisturbedSamples(probes, /*usual=*/1);
}

std::vector<Segment> PlanSegments(int64_t tokens, int64_t max_segment_tokens) {
  std::vector<Segment> segments;
  const int64_t size = std::max<int64_t>(1, std::min(max_segment_tokens, (tokens + 7) / 8));
  for (int64_t begin = 0; begin < tokens; begin += size) {
    segments.push_back({begin, std::min(size, tokens - begin)});
  }
  return segments;
}

int64_t CpuCacheFlusher::Bytes() {
  return std::min<int64_t>(2 * LastLevelCacheBytes(), int64_t{256} << 20);
}

CpuCacheFlusher::CpuCacheFlusher(ThreadPool* pool) : pool_(pool), memory_(DType::kU8, {Bytes()}) {
  (*this)().IgnoreError();  // there is none
}

absl::Status CpuCacheFlusher::operator()() {
  ++value_;
  // Pieces of 1 MiB in any order: with as many pieces as there are, each core gets its share.
  constexpr int64_t kPiece = 1 << 20;
  uint8_t* memory = static_cast<uint8_t*>(memory_.raw());
  pool_->ParallelFor((Bytes() + kPiece - 1) / kPiece, [&](int64_t piece, int) {
    const int64_t begin = piece * kPiece;
    std::memset(memory + begin, value_, std::min(kPiece, Bytes() - begin));
  });
  return absl::OkStatus();
}

size_t DeviceCacheFlusher::Bytes(const CudaRuntime& runtime) {
  const int64_t l2 = runtime.properties().l2_cache_bytes;
  // The simulator has no caches to flush.
  const int64_t least = runtime.target() == CudaTarget::kGpu ? int64_t{256} << 20 : 0;
  return static_cast<size_t>(
      std::min(std::max(2 * l2, least), runtime.properties().memory_bytes / 16));
}

absl::StatusOr<std::unique_ptr<DeviceCacheFlusher>> DeviceCacheFlusher::Make(CudaRuntime* runtime) {
  std::unique_ptr<DeviceCacheFlusher> flusher(new DeviceCacheFlusher(runtime));
  TFB_ASSIGN_OR_RETURN(flusher->memory_, runtime->Allocate(Bytes(*runtime)));
  TFB_RETURN_IF_ERROR((*flusher)());
  return flusher;
}

absl::Status DeviceCacheFlusher::operator()() {
  return runtime_->Fill(memory_.data(), ++value_, memory_.bytes());
}

void MeasureSideBySide(const TimingOptions& options, std::vector<TimedCase>* cases) {
  InitializeBenchmarkLibrary();
  benchmark::ClearRegisteredBenchmarks();
  bool device_lost = false;
  std::vector<std::unique_ptr<Measurement>> measurements;
  for (size_t i = 0; i < cases->size(); ++i) {
    measurements.push_back(std::make_unique<Measurement>(options, i, &(*cases)[i], &device_lost));
    measurements.back()->Pilot();
    measurements.back()->Register();
    measurements.back()->CountInstructions();
  }
  SampleReporter reporter;
  const bool any = std::any_of(cases->begin(), cases->end(),
                               [](const TimedCase& timed) { return timed.status.ok(); });
  if (any) benchmark::RunSpecifiedBenchmarks(&reporter, ".");
  benchmark::ClearRegisteredBenchmarks();  // they hold pointers into `measurements`
  const double usual_probe = UsualProbe(measurements);
  for (const auto& measurement : measurements) measurement->Finish(&reporter, usual_probe);
}

}  // namespace tfb
