#include "harness/measure/timing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "benchmark/benchmark.h"
#include "core/cpu/kernels.h"
#include "core/status.h"
#include "harness/contestants/interface.h"
#include "harness/judge/device_memory.h"
#include "harness/measure/machine.h"
#include "harness/measure/peak_kernels.h"

namespace tfb {
namespace {

constexpr int kCountedRuns = 3;
constexpr double kCountedPart = 0.1;  // of the share, for runs whose instructions are counted
constexpr size_t kSegmentsKept = 32;  // of a stream, evenly spaced

// 6 cycles each where two vectors of 12 are multiplied and added in one, 12 where one is: 65 or
// 130 us at 3 GHz. That is long against the clock's resolution and short against a time slice of
// some ms.
constexpr int64_t kProbeIterations = 1 << 15;

// Prints nothing: a Measurement records its samples itself.
class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

void InitializeBenchmarkLibrary() {
  static const bool done = [] {
    std::string name = "timing";
    char* arguments[] = {name.data(), nullptr};
    int count = 1;
    benchmark::Initialize(&count, arguments);
    return true;
  }();
  (void)done;
}

// One sample of a case, and where among the samples of all cases it is taken: 0 to 1.
struct PlannedSample {
  double place;
  std::function<void()> take;
};

// Takes the samples in the order of their places. The library's own times are not used.
void Take(std::vector<PlannedSample> samples) {
  std::sort(samples.begin(), samples.end(),
            [](const PlannedSample& a, const PlannedSample& b) { return a.place < b.place; });
  for (const PlannedSample& sample : samples) {
    const auto body = [&sample](benchmark::State& state) {
      for (auto _ : state) sample.take();
    };
    benchmark::RegisterBenchmark("sample", body)->Repetitions(1)->Iterations(1);
  }
  SilentReporter reporter;
  if (!samples.empty()) benchmark::RunSpecifiedBenchmarks(&reporter, ".");
  benchmark::ClearRegisteredBenchmarks();  // they hold pointers into `samples`
}

// One case while it is measured.
class Measurement {
 public:
  // *device_lost becomes true with a call that loses the device, and ends the samples of all.
  // `usual_probe` returns the usual time of the fixed arithmetic so far, over all cases.
  Measurement(const TimingOptions& options, size_t index, TimedCase* timed, bool* device_lost,
              std::function<double()> usual_probe)
      : options_(options),
        clock_(*options.clock),
        index_(index),
        timed_(*timed),
        device_lost_(*device_lost),
        usual_probe_(std::move(usual_probe)) {}

  // Times batches of calls, each twice as long as the previous one; the fastest determines the
  // calls per sample and the number of samples. There are several batches, since the first call is
  // slow and any may be interrupted; one that lasts as long as a sample is enough.
  void Pilot() {
    if (device_lost_) {
      timed_.status = absl::CancelledError("the device was lost before");
      return;
    }
    timed_.timing.set_clock(timed_.bound.runtime == nullptr ? Timing::CLOCK_WALL
                                                            : Timing::CLOCK_DEVICE_EVENTS);
    if (timed_.bound.runtime != nullptr && !(Prepare(&begin_) && Prepare(&end_))) return;
    if (auto* contestant = dynamic_cast<ContestantLayer*>(timed_.bound.layer);
        contestant != nullptr && contestant->times_itself()) {
      remote_ = contestant;
    }
    Announce("run");
    const double start = clock_.Seconds();
    // What this run keeps is what each Backward reads.
    if (timed_.pass == Case::PASS_BACKWARD && !Keep(WithMemory([&] { return bound().Run(); }))) {
      return;
    }
    if (!Keep(BeginTrial()) || !Keep(EndTrial())) return;
    trial_seconds_ = clock_.Seconds() - start;
    call_seconds_ = std::numeric_limits<double>::infinity();
    for (int64_t calls = 1; calls <= kMostCalls; calls *= 2) {
      const absl::StatusOr<double> timed = Seconds(calls);
      if (!Keep(timed.status())) return;
      const double seconds = *timed;
      call_seconds_ = std::min(call_seconds_, seconds / static_cast<double>(calls));
      if (seconds >= options_.min_time || (seconds >= options_.min_time / 4 && calls >= 4)) break;
    }
    calls_per_sample_ = std::clamp<int64_t>(
        static_cast<int64_t>(std::ceil(options_.min_time / std::max(call_seconds_, 1e-12))), 1,
        kMostCalls);
    CaptureGraph();
    spent_ += clock_.Seconds() - start;
    PlanStream();
  }

  // Adds the case's samples. Those of each kind are spread evenly, at random within equal parts of the
  // whole, so that any two cases are timed about the same time throughout.
  void Plan(std::mt19937_64* random, std::vector<PlannedSample>* samples) {
    if (!timed_.status.ok()) return;
    SampleWishes wishes;
    wishes.repetitions =
        timed_.wishes.repetitions() > 0 ? timed_.wishes.repetitions() : options_.repetitions;
    wishes.min_time = options_.min_time;
    wishes.setup = options_.setup;
    wishes.cold = options_.cold && options_.flush_caches != nullptr;
    wishes.stream = !segments_.empty();
    wishes.graph = graph_.has_value();
    wishes.flush_seconds = options_.flush_seconds;
    wishes.trial_seconds = timed_.trial == nullptr ? 0 : trial_seconds_;
    wishes.setup_seconds = remote_ == nullptr ? 0 : remote_->last_setup_seconds();
    const SamplePlan plan = PlanSamples(wishes, call_seconds_, timed_.wishes.share_seconds());
    // The one that there has been is better than none.
    if (wishes.setup && plan.setups == 0 && wishes.setup_seconds > 0) {
      timed_.timing.add_setup_ns(wishes.setup_seconds * 1e9);
    }
    planned_runs_ = plan.runs;
    samples_left_ = plan.runs + plan.setups + plan.colds + plan.streams + plan.graphs;
    const auto add = [&](absl::string_view what, int count, Body body) {
      std::uniform_real_distribution<double> within(0, 1);
      for (int i = 0; i < count; ++i) {
        const double place = (i + within(*random)) / count;
        samples->push_back({place, [this, what, body] { Sample(what, body); }});
      }
    };
    add("run", plan.runs,
        timed_.bound.runtime == nullptr ? &Measurement::RunSample : &Measurement::DeviceRunSample);
    add("setup", plan.setups, &Measurement::SetupSample);
    add("cold", plan.colds, &Measurement::ColdSample);
    add("stream", plan.streams, &Measurement::StreamSample);
    add("graph", plan.graphs, &Measurement::GraphSample);
  }

  // Counts the instructions of single runs, where there is a counter and time for it.
  void CountInstructions() {
    // The counter sees this process alone.
    if (options_.instructions == nullptr || timed_.bound.runtime != nullptr || remote_ != nullptr ||
        !timed_.status.ok()) {
      return;
    }
    const double counting_seconds = kCountedRuns * call_seconds_;
    if (timed_.wishes.share_seconds() > 0 &&
        counting_seconds > kCountedPart * timed_.wishes.share_seconds())
      return;
    for (int i = 0; i < kCountedRuns; ++i) {
      const int64_t before = options_.instructions();
      if (!Keep(Run())) return;
      const int64_t after = options_.instructions();
      if (after > before) timed_.timing.add_run_instructions(static_cast<double>(after - before));
    }
  }

  // Writes the samples to the timing, and sets the status of the case.
  void Finish() {
    timed_.timing = TimingSoFar();
    timed_.spent_seconds = spent_;
    if (!timed_.status.ok()) return;
    const size_t taken = run_seconds_.size();
    if (stopped_ && taken < std::min<size_t>(kFewestSamples, planned_runs_)) {
      timed_.status = absl::CancelledError("stopped before there were enough samples");
    } else if (taken == 0) {
      timed_.status = absl::DeadlineExceededError(
          absl::StrFormat("no sample: a call takes %.2g s", call_seconds_));
    }
  }

  const std::vector<double>& probes() const { return probes_; }

 private:
  using Body = void (Measurement::*)();

  // Returns the samples taken, those of runs that are kept.
  Timing TimingSoFar() const {
    Timing timing = timed_.timing;
    const bool on_device = timed_.bound.runtime != nullptr;
    const std::vector<bool> kept =
        on_device ? UnthrottledSamples(states_) : UndisturbedSamples(probes_, usual_probe_());
    int64_t discarded = 0;
    for (size_t i = 0; i < run_seconds_.size(); ++i) {
      if (!kept[i]) {
        ++discarded;
        continue;
      }
      if (!on_device) timing.add_probe_ns(probes_[i] * 1e9);
      timing.add_run_ns(run_seconds_[i] / static_cast<double>(calls_per_sample_) * 1e9);
    }
    timing.set_calls_per_sample(calls_per_sample_);
    timing.set_throttled_samples(std::count_if(states_.begin(), states_.end(), IsThrottled));
    timing.set_discarded_samples(discarded);
    if (discarded > 0) {
      timing.set_discarded_reason(on_device ? "the device throttled meanwhile"
                                            : "the core was slower meanwhile");
    }
    AddSegments(&timing);
    return timing;
  }

  // Takes one sample of any kind, and notes its time by the clock of the options, or of the device.
  // When the case is over, its remaining samples do nothing.
  void Sample(absl::string_view what, Body body) {
    timed_out_ = timed_out_ || (timed_.timeout_seconds > 0 && spent_ > timed_.timeout_seconds);
    stopped_ = stopped_ || device_lost_ || (options_.stopped != nullptr && options_.stopped());
    if (!timed_.status.ok() || timed_out_ || stopped_) return;
    Announce(what);
    const double begin = clock_.Seconds();
    const size_t runs_before = run_seconds_.size();
    (this->*body)();
    spent_ += clock_.Seconds() - begin;
    const bool enough =
        run_seconds_.size() > runs_before && run_seconds_.size() == kIntervalSamples;
    if (--samples_left_ > 0 && !enough) return;
    if (options_.on_enough != nullptr && timed_.status.ok()) {
      options_.on_enough(index_, TimingSoFar());
    }
  }

  absl::Status RunTimes(int64_t calls) {
    for (int64_t call = 0; call < calls; ++call) TFB_RETURN_IF_ERROR(Run());
    return absl::OkStatus();
  }
  // Returns the seconds of so many calls, by the host's clock.
  absl::StatusOr<double> Seconds(int64_t calls) {
    // The messages between the processes have taken the caches since Warm.
    if (remote_ != nullptr) return remote_->RunSeconds(calls, IsWarmed() ? 0 : 1);
    const double begin = clock_.Seconds();
    TFB_RETURN_IF_ERROR(RunTimes(calls));
    TFB_RETURN_IF_ERROR(Synchronize());
    return clock_.Seconds() - begin;
  }
  absl::Status Warm() {
    if (timed_.trial != nullptr) return BeginTrial();
    return IsWarmed() ? absl::OkStatus() : RunAndWait();
  }
  // Tells whether a call is so long that one before it changes nothing.
  bool IsWarmed() const { return call_seconds_ >= kWarmedSeconds; }
  absl::Status BeginTrial() {
    // A layer that times itself does so on the inputs and outputs of its last Run.
    if (timed_.trial == nullptr) return remote_ == nullptr ? absl::OkStatus() : Run();
    return timed_.trial->Begin(timed_.bound.outputs, [this] { return Run(); });
  }
  absl::Status EndTrial() {
    return timed_.trial == nullptr ? absl::OkStatus() : timed_.trial->End(timed_.bound.outputs);
  }
  double ProbeSeconds() {
    const double begin = clock_.Seconds();
    options_.probe();
    return clock_.Seconds() - begin;
  }

  void RunSample() {
    if (!Keep(Warm())) return;
    const double probe_before = ProbeSeconds();
    const absl::StatusOr<double> seconds = Seconds(calls_per_sample_);
    const double probe_after = ProbeSeconds();
    if (!Keep(seconds.status()) || !Keep(EndTrial())) return;
    run_seconds_.push_back(*seconds);
    probes_.push_back(std::max(probe_before, probe_after));
  }

  void DeviceRunSample() {
    if (!Keep(Warm())) return;
    DeviceState state;
    const absl::StatusOr<double> seconds =
        DeviceSeconds([this] { return RunTimes(calls_per_sample_); }, &state);
    if (!Keep(seconds.status())) return;
    run_seconds_.push_back(*seconds);
    if (states_.empty()) timed_.state_first = state;
    timed_.state_last = state;
    states_.push_back(state);
  }

  void SetupSample() {
    if (remote_ != nullptr) return RemoteSetupSample();
    const double begin = clock_.Seconds();
    absl::Status status = Setup();
    if (status.ok()) status = Synchronize();
    const double middle = clock_.Seconds();
    if (status.ok()) status = RunAndWait();
    const double end = clock_.Seconds();
    // The graph reads memory of the last Setup, which has been freed.
    if (status.ok() && graph_.has_value()) {
      absl::StatusOr<DeviceGraph> graph = Capture();
      status = graph.status();
      if (status.ok()) graph_ = *std::move(graph);
    }
    if (!Keep(status)) return;
    timed_.timing.add_setup_ns((middle - begin) * 1e9);
    timed_.timing.add_end_to_end_ns((end - begin) * 1e9);
  }

  void RemoteSetupSample() {
    const absl::StatusOr<double> setup = remote_->SetupSeconds();
    if (!Keep(setup.status())) return;
    const absl::StatusOr<double> run = remote_->RunSeconds(1, 0);
    if (!Keep(run.status())) return;
    timed_.timing.add_setup_ns(*setup * 1e9);
    timed_.timing.add_end_to_end_ns((*setup + *run) * 1e9);
  }

  void ColdSample() {
    const absl::StatusOr<double> seconds = ColdSeconds();
    if (Keep(seconds.status())) timed_.timing.add_cold_run_ns(*seconds * 1e9);
  }
  absl::StatusOr<double> ColdSeconds() {
    TFB_RETURN_IF_ERROR(options_.flush_caches());
    if (timed_.bound.runtime != nullptr) return DeviceSeconds([&] { return Run(); });
    if (remote_ != nullptr) return remote_->ColdRunSeconds(CpuCacheFlusher::Bytes());
    const double begin = clock_.Seconds();
    TFB_RETURN_IF_ERROR(Run());
    return clock_.Seconds() - begin;
  }

  // Records the work of a call of the case's pass.
  absl::StatusOr<DeviceGraph> Capture() {
    return DeviceGraph::Capture(timed_.bound.runtime, [this](void* stream) {
      Execution execution = bound().execution;
      execution.stream = stream;
      return Run(execution);
    });
  }
  // Does so where the case is on a device.
  void CaptureGraph() {
    if (!options_.graph || timed_.bound.runtime == nullptr || remote_ != nullptr) return;
    absl::StatusOr<DeviceGraph> graph = Capture();
    if (graph.ok()) {
      graph_ = *std::move(graph);
    } else {
      timed_.timing.set_no_graph_reason(std::string(graph.status().message()));
    }
  }
  void GraphSample() {
    const auto launch = [this](int64_t calls) {
      absl::Status status;
      for (int64_t call = 0; call < calls && status.ok(); ++call) {
        status = graph_->Launch(timed_.bound.execution.stream);
      }
      return status;
    };
    absl::Status warmed = launch(IsWarmed() ? 0 : 1);
    if (warmed.ok()) warmed = Synchronize();
    if (!Keep(warmed)) return;
    const absl::StatusOr<double> seconds = DeviceSeconds([&] { return launch(calls_per_sample_); });
    if (!Keep(seconds.status())) return;
    timed_.timing.add_graph_run_ns(*seconds / static_cast<double>(calls_per_sample_) * 1e9);
  }

  // --- Streams

  // The views of each segment are made beforehand, since making them allocates.
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
    stream_ = dynamic_cast<StreamingLayer*>(timed_.bound.layer);
    const bool streams = options_.stream && timed_.pass == Case::PASS_FORWARD;
    if (stream_ == nullptr || !streams || stream_->segment_inputs().empty()) return;
    const TensorSpec& first = stream_->segment_inputs()[0];
    const ConstTensorView whole = timed_.bound.inputs.Get(first.name);
    const int axis = SegmentAxis(first);
    const int64_t tokens = axis < 0 || axis >= whole.rank ? 0 : whole.dim(axis);
    for (const Segment& segment : PlanSegments(tokens, stream_->max_segment_tokens())) {
      SegmentCall call;
      call.segment = segment;
      timed_.stream_status =
          SliceAll(stream_->segment_inputs(), timed_.bound.inputs, segment, &call.inputs);
      timed_.stream_status.Update(
          SliceAll(stream_->segment_outputs(), timed_.bound.outputs, segment, &call.outputs));
      if (timed_.bound.runtime != nullptr) {
        absl::StatusOr<DeviceEvent> end = DeviceEvent::Make(timed_.bound.runtime);
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

  void StreamSample() {
    timed_.stream_status.Update(timed_.bound.runtime == nullptr ? Stream() : StreamOnDevice());
    if (timed_.stream_status.ok()) return;
    segments_.clear();
    NoteLoss();
    // A stream that loses the device is a failure of the case, not only of the stream.
    if (device_lost_) timed_.status.Update(timed_.stream_status);
  }
  absl::Status Stream() {
    TFB_RETURN_IF_ERROR(stream_->Reset());
    for (SegmentCall& call : segments_) {
      const double start = clock_.Seconds();
      TFB_RETURN_IF_ERROR(stream_->Append(call.inputs, call.outputs, timed_.bound.execution));
      call.append_ns.push_back((clock_.Seconds() - start) * 1e9);
    }
    return absl::OkStatus();
  }
  // Enqueues all segments without waiting in between, as a decoder would.
  absl::Status StreamOnDevice() {
    TFB_RETURN_IF_ERROR(stream_->Reset());
    TFB_RETURN_IF_ERROR(begin_.Record(timed_.bound.execution.stream));
    for (SegmentCall& call : segments_) {
      TFB_RETURN_IF_ERROR(stream_->Append(call.inputs, call.outputs, timed_.bound.execution));
      TFB_RETURN_IF_ERROR(call.end.Record(timed_.bound.execution.stream));
    }
    const DeviceEvent* previous = &begin_;
    for (SegmentCall& call : segments_) {
      TFB_ASSIGN_OR_RETURN(const double seconds, call.end.SecondsSince(*previous));
      call.append_ns.push_back(seconds * 1e9);
      previous = &call.end;
    }
    return absl::OkStatus();
  }

  void AddSegments(Timing* timing) const {
    const size_t count = segments_.size();
    const size_t kept = std::min(count, kSegmentsKept);
    for (size_t n = 0; n < kept; ++n) {
      // The kept segments are evenly spaced and include the first and the last.
      const SegmentCall& call = segments_[kept == 1 ? 0 : n * (count - 1) / (kept - 1)];
      if (call.append_ns.empty()) continue;
      SegmentTiming* segment = timing->add_segments();
      segment->set_tokens_before(call.segment.begin);
      segment->set_tokens(call.segment.tokens);
      for (const double ns : call.append_ns) segment->add_append_ns(ns);
    }
  }

  // --- Calls

  void Announce(absl::string_view what) {
    if (options_.on_sample != nullptr) options_.on_sample(index_, what);
  }
  absl::Status Synchronize() { return timed_.bound.Synchronize(); }
  absl::Status RunAndWait() {
    TFB_RETURN_IF_ERROR(Run());
    return Synchronize();
  }
  // Makes one call of the case's pass.
  absl::Status Run() { return Run(bound().execution); }
  absl::Status Run(const Execution& execution) {
    return WithMemory([&]() -> absl::Status {
      if (timed_.pass != Case::PASS_BACKWARD) {
        TFB_RETURN_IF_ERROR(bound().layer->Run(bound().inputs, bound().outputs, execution));
      }
      if (timed_.pass == Case::PASS_FORWARD) return absl::OkStatus();
      return bound().layer->Backward(bound().backward, execution);
    });
  }
  absl::Status Setup() {
    return WithMemory([&]() -> absl::Status {
      if (timed_.pass != Case::PASS_BACKWARD) TFB_RETURN_IF_ERROR(bound().Setup());
      return timed_.pass == Case::PASS_FORWARD ? absl::OkStatus() : bound().SetUpBackward();
    });
  }
  const BoundLayer& bound() const { return timed_.bound; }
  bool Keep(const absl::Status& status) {
    timed_.status.Update(status);
    if (!status.ok()) NoteLoss();
    return status.ok();
  }

  // --- Devices

  // Notes, after a call that failed, whether the device is lost.
  void NoteLoss() {
    if (timed_.bound.runtime != nullptr && !timed_.bound.runtime->Synchronize().ok())
      device_lost_ = true;
  }
  DeviceState ReadState() const {
    return timed_.bound.runtime == nullptr || options_.monitor == nullptr
               ? DeviceState()
               : options_.monitor->Read();
  }
  bool Prepare(DeviceEvent* event) {
    absl::StatusOr<DeviceEvent> made = DeviceEvent::Make(timed_.bound.runtime);
    if (made.ok()) *event = *std::move(made);
    return Keep(made.status());
  }
  // Returns the seconds from before the first to after the last kernel that `body` enqueues, and
  // waits for them. Where `state` is not null, the sensors are read before the wait, while the
  // device works: an idle one has other clocks and takes less power.
  template <class Body>
  absl::StatusOr<double> DeviceSeconds(const Body& body, DeviceState* state = nullptr) {
    TFB_RETURN_IF_ERROR(begin_.Record(timed_.bound.execution.stream));
    TFB_RETURN_IF_ERROR(body());
    TFB_RETURN_IF_ERROR(end_.Record(timed_.bound.execution.stream));
    if (state != nullptr) *state = ReadState();
    return end_.SecondsSince(begin_);
  }

  static constexpr int64_t kMostCalls = 1 << 20;  // a sample

  const TimingOptions& options_;
  Clock& clock_;
  const size_t index_;
  TimedCase& timed_;
  bool& device_lost_;
  const std::function<double()> usual_probe_;
  ContestantLayer* remote_ = nullptr;  // set where the layer times itself
  double call_seconds_ = 0;
  double trial_seconds_ = 0;
  double spent_ = 0;
  bool timed_out_ = false;
  bool stopped_ = false;
  int64_t calls_per_sample_ = 1;
  int planned_runs_ = 0;
  int samples_left_ = 0;             // of all kinds
  std::vector<double> run_seconds_;  // by sample of `run`, all of its calls together
  std::vector<double> probes_;       // likewise on the CPU: the longer of the two about the sample
  std::vector<DeviceState> states_;  // the same on a device: during the sample
  DeviceEvent begin_, end_;
  std::optional<DeviceGraph> graph_;
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

double MonotonicSeconds() { return RealClock()->Seconds(); }

void ProbeArithmetic() { BestCpuKernels().fma_peak(kProbeIterations); }

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
  // A state counts like a probe: 1 where it is undisturbed, and more the lower a throttled clock
  // is.
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

int64_t CpuCacheFlusher::Bytes() { return BytesFor(LastLevelCacheBytes()); }

int64_t CpuCacheFlusher::BytesFor(int64_t last_level_cache_bytes) {
  return std::min<int64_t>(2 * last_level_cache_bytes, int64_t{256} << 20);
}

CpuCacheFlusher::CpuCacheFlusher(ThreadPool* pool) : pool_(pool), memory_(DType::kU8, {Bytes()}) {
  (*this)().IgnoreError();  // there is none
}

absl::Status CpuCacheFlusher::operator()() {
  ++value_;
  // Threads take pieces of 1 MiB in any order; there are enough for every core to get some.
  constexpr int64_t kPiece = 1 << 20;
  uint8_t* memory = static_cast<uint8_t*>(memory_.raw());
  pool_->ParallelForRanges(Bytes(), kPiece, [&](int64_t begin, int64_t end, int) {
    std::memset(memory + begin, value_, end - begin);
  });
  return absl::OkStatus();
}

size_t DeviceCacheFlusher::Bytes(const CudaRuntime& runtime) {
  const int64_t l2 = runtime.properties().l2_cache_bytes;
  // The simulator has no caches to flush.
  const int64_t least = runtime.target() == CudaTarget::kGpu ? int64_t{256} << 20 : 0;
  return static_cast<size_t>(
             std::min(std::max(2 * l2, least), runtime.properties().memory_bytes / 16)) /
         16 * 16;
}

absl::StatusOr<std::unique_ptr<DeviceCacheFlusher>> DeviceCacheFlusher::Make(CudaRuntime* runtime) {
  std::unique_ptr<DeviceCacheFlusher> flusher(new DeviceCacheFlusher(runtime));
  TFB_ASSIGN_OR_RETURN(flusher->memory_, runtime->Allocate(Bytes(*runtime)));
  TFB_RETURN_IF_ERROR(runtime->Fill(flusher->memory_.data(), 0, flusher->memory_.bytes()));
  TFB_ASSIGN_OR_RETURN(flusher->not_zero_, runtime->Allocate(sizeof(float)));
  TFB_RETURN_IF_ERROR((*flusher)());
  return flusher;
}

absl::Status DeviceCacheFlusher::operator()() {
  constexpr int kBlocks = 16;  // a multiprocessor
  return ToStatus(KernelsOn<PeakKernels>(runtime_->target())
                      .read(kBlocks * runtime_->properties().multiprocessors, memory_.data(),
                            memory_.bytes(), not_zero_.As<float>()));
}

void MeasureSideBySide(const TimingOptions& options, std::vector<TimedCase>* cases) {
  InitializeBenchmarkLibrary();
  bool device_lost = false;
  std::mt19937_64 random{std::random_device()()};
  std::vector<PlannedSample> samples;
  std::vector<std::unique_ptr<Measurement>> measurements;
  for (size_t i = 0; i < cases->size(); ++i) {
    measurements.push_back(std::make_unique<Measurement>(options, i, &(*cases)[i], &device_lost,
                                                         [&] { return UsualProbe(measurements); }));
    measurements.back()->Pilot();
    measurements.back()->Plan(&random, &samples);
    measurements.back()->CountInstructions();
  }
  Take(std::move(samples));
  for (const auto& measurement : measurements) measurement->Finish();
}

}  // namespace tfb
