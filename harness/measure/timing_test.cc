#include "harness/measure/timing.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cuda/simulator/simulator.h"
#include "core/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/contestants/interface.h"
#include "harness/judge/device_memory.h"
#include "harness/measure/machine.h"
#include "harness/testing/simulated_clock.h"
#include "harness/testing/tiny_functors.h"
#include "harness/testing/tiny_technique.h"
#include "harness/testing/toys.h"

namespace tfb {
namespace {

using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;

// The times of a round of the toys' work, and of the probe, by the simulated clock. They are powers
// of two, so that sums of them are exact.
constexpr double kRoundSeconds = 1.0 / (1 << 20);
constexpr double kProbeSeconds = 1.0 / (1 << 14);
constexpr double kRoundNs = kRoundSeconds * 1e9;
constexpr double kTick = 1.0 / (1 << 10);  // of a ticking clock

// Layers with the tensors that they are timed on. The toys' time is that of a simulated clock, and
// so is that of the simulated device's events.
class TimingTest : public ::testing::Test {
 protected:
  struct Prepared {
    std::unique_ptr<Layer> layer;
    NamedTensors host;
  };

  TimingTest() : pool_(2) {
    AddToys(registry_, {&clock_, kRoundSeconds});
    registry_.Add(MakeTiny(TinyFault::kNone));
    registry_.Add(MakeTiny(TinyFault::kOtherStream));
    SetEventClock(&clock_);
  }
  ~TimingTest() override { cuda_simulator::Configure({}); }

  static void SetEventClock(Clock* clock) {
    cuda_simulator::Settings settings;
    settings.event_seconds = [clock] { return clock->Seconds(); };
    cuda_simulator::Configure(settings);
  }

  // Returns one case of a layer that reads x of 16 tokens and 16 channels.
  std::vector<TimedCase> CasesOf(Layer* layer) {
    prepared_.push_back(std::make_unique<Prepared>());
    NamedTensors& host = prepared_.back()->host;
    host["x"] = Tensor(DType::kF32, {1, 16, 16});
    std::vector<TimedCase> cases(1);
    cases[0].bound = Bind(layer, Device::kCpu, ViewsOf(host), &pool_, true).value();
    EXPECT_TRUE(cases[0].bound.Setup().ok());
    return cases;
  }

  TimedCase Prepare(const std::string& name, const Options& options, int64_t tokens,
                    Device device = Device::kCpu) {
    const Technique* technique = *registry_.Find(name);
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 8);
    prepared_.push_back(std::make_unique<Prepared>());
    Prepared& p = *prepared_.back();
    p.layer = technique->Create(problem, options, device, 1).value();
    for (const TensorSpec& spec : p.layer->inputs()) {
      if (spec.optional) continue;
      FillNormal(&(p.host[spec.name] = Tensor(spec.dtype, spec.shape)), 1, spec.name);
    }
    TimedCase timed;
    timed.bound = Bind(p.layer.get(), device, ViewsOf(p.host), &pool_, true).value();
    EXPECT_TRUE(timed.bound.Setup().ok());
    return timed;
  }

  // A sample of toy_mean is 512 calls long; on the simulated device, whose work is slow, 8.
  TimingOptions QuickOnDevice() {
    TimingOptions options = Quick();
    options.min_time = 8 * kRoundSeconds;
    return options;
  }
  TimingOptions Quick() {
    TimingOptions options;
    options.repetitions = 7;
    options.min_time = 512 * kRoundSeconds;
    options.clock = &clock_;
    options.probe = [this] { clock_.Advance(kProbeSeconds); };
    return options;
  }

  SimulatedClock clock_;
  Registry registry_;
  ThreadPool pool_;
  std::vector<std::unique_ptr<Prepared>> prepared_;
};

TEST(CpuCacheFlusher, WritesTwiceTheLastCacheButAtMost256MiB) {
  constexpr int64_t kMiB = 1 << 20;
  EXPECT_EQ(CpuCacheFlusher::BytesFor(32 * kMiB), 64 * kMiB);
  EXPECT_EQ(CpuCacheFlusher::BytesFor(127 * kMiB), 254 * kMiB);
  EXPECT_EQ(CpuCacheFlusher::BytesFor(128 * kMiB), 256 * kMiB);
  EXPECT_EQ(CpuCacheFlusher::BytesFor(1024 * kMiB), 256 * kMiB);
}

TEST_F(TimingTest, EverySampleIsKept) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  cases.push_back(Prepare("toy_mean", {{"rounds", "50"}}, 16));
  CpuCacheFlusher flusher(&pool_);
  TimingOptions options = Quick();
  options.flush_caches = [&] {
    clock_.Advance(1);  // is no part of a cold run
    return flusher();
  };
  MeasureSideBySide(options, &cases);
  for (const TimedCase& timed : cases) {
    const double run_ns = (&timed == &cases[1] ? 50 : 1) * kRoundNs;
    EXPECT_TRUE(timed.status.ok()) << timed.status;
    EXPECT_EQ(timed.timing.run_ns_size(), 7);
    EXPECT_EQ(timed.timing.discarded_samples(), 0);
    EXPECT_EQ(timed.timing.setup_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.end_to_end_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.cold_run_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.clock(), Timing::CLOCK_WALL);
    EXPECT_THAT(timed.timing.run_ns(), Each(run_ns));
    EXPECT_THAT(timed.timing.cold_run_ns(), Each(run_ns));
    EXPECT_THAT(timed.timing.setup_ns(), Each(kRoundNs));
    EXPECT_THAT(timed.timing.end_to_end_ns(), Each(kRoundNs + run_ns));
  }
  // Calls are averaged until a sample is long enough.
  EXPECT_EQ(cases[0].timing.calls_per_sample(), 512);
  EXPECT_EQ(cases[1].timing.calls_per_sample(), 11);  // of 50 rounds each
}

// A layer whose calls take rounds of their own by the clock: of Setup 1, of SetUpBackward 2, of Run
// 4 or, where it keeps memory, 8, of Backward 16. It counts the calls.
class StepToy : public Layer {
 public:
  StepToy(const Problem& problem, SimulatedClock* clock)
      : Layer(problem, HiddenInputs(problem), HiddenOutputs(problem)), clock_(clock) {}
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }
  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  size_t kept_bytes() const override { return sizeof(int); }

  int runs = 0, keeping_runs = 0, backwards = 0;
  int calls_until_refused = std::numeric_limits<int>::max();  // of Backward

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override { return Take(1); }
  absl::Status DoSetUpBackward(const Inputs&, const Execution&) override { return Take(2); }
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution& execution) override {
    ++(execution.kept.empty() ? runs : keeping_runs);
    if (execution.kept.empty()) return Take(4);
    *reinterpret_cast<int*>(execution.kept.data()) = keeping_runs;
    return Take(8);
  }
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    EXPECT_EQ(*reinterpret_cast<const int*>(execution.kept.data()), keeping_runs);
    EXPECT_FALSE(call.output_gradients.Get("out").empty());
    EXPECT_FALSE(call.input_gradients.Get("x").empty());
    if (++backwards > calls_until_refused) return absl::InternalError("the toy refuses");
    return Take(16);
  }

  void Wait(int rounds) { clock_->Advance(rounds * kRoundSeconds); }

 private:
  absl::Status Take(int rounds) {
    Wait(rounds);
    return absl::OkStatus();
  }

  SimulatedClock* const clock_;
};

TEST_F(TimingTest, ACallAndItsSetupAreThoseOfThePass) {
  for (const auto& [pass, setup_rounds, call_rounds] :
       {std::tuple(Case::PASS_FORWARD, 1, 4), std::tuple(Case::PASS_BACKWARD, 2, 16),
        std::tuple(Case::PASS_TRAINING, 1 + 2, 8 + 16)}) {
    SCOPED_TRACE(Case::Pass_Name(pass));
    StepToy toy(Problem::SelfAttention(1, 2, 16, 8), &clock_);
    NamedTensors host;
    host["x"] = Tensor(DType::kF32, {1, 16, 16});
    std::vector<TimedCase> cases(1);
    BoundLayer& bound = cases[0].bound;
    bound = Bind(&toy, Device::kCpu, ViewsOf(host), &pool_, true).value();
    cases[0].pass = pass;
    const NamedTensors gradients = DrawOutputGradients(toy, 1).value();
    BackwardMemory memory;
    ASSERT_TRUE(bound.Setup().ok());
    if (pass != Case::PASS_FORWARD) {
      memory = BindBackward(ViewsOf(gradients), &bound).value();
      ASSERT_TRUE(bound.SetUpBackward().ok());
    }
    TimingOptions options = Quick();
    options.flush_caches = [] { return absl::OkStatus(); };
    MeasureSideBySide(options, &cases);
    EXPECT_TRUE(cases[0].status.ok()) << cases[0].status;
    const Timing& timing = cases[0].timing;
    EXPECT_EQ(timing.run_ns_size(), 7);
    EXPECT_THAT(timing.run_ns(), Each(call_rounds * kRoundNs));
    EXPECT_THAT(timing.cold_run_ns(), Each(call_rounds * kRoundNs));
    EXPECT_EQ(timing.setup_ns_size(), kIntervalSamples);
    EXPECT_THAT(timing.setup_ns(), Each(setup_rounds * kRoundNs));
    EXPECT_THAT(timing.end_to_end_ns(), Each((setup_rounds + call_rounds) * kRoundNs));
    EXPECT_EQ(toy.runs > 0, pass == Case::PASS_FORWARD);
    EXPECT_EQ(toy.backwards > 0, pass != Case::PASS_FORWARD);
    // Every Backward is of one Run, or of its own.
    const int backwards = pass == Case::PASS_BACKWARD ? 1 : toy.backwards;
    EXPECT_EQ(toy.keeping_runs, pass == Case::PASS_FORWARD ? 0 : backwards);
  }
}

TEST_F(TimingTest, ABackwardPassThatFailsEndsItsCase) {
  StepToy toy(Problem::SelfAttention(1, 2, 16, 8), &clock_);
  toy.calls_until_refused = 3;
  NamedTensors host;
  host["x"] = Tensor(DType::kF32, {1, 16, 16});
  std::vector<TimedCase> cases(1);
  cases[0].bound = Bind(&toy, Device::kCpu, ViewsOf(host), &pool_, true).value();
  cases[0].pass = Case::PASS_TRAINING;
  const NamedTensors gradients = DrawOutputGradients(toy, 1).value();
  const BackwardMemory memory = BindBackward(ViewsOf(gradients), &cases[0].bound).value();
  ASSERT_TRUE(cases[0].bound.Setup().ok() && cases[0].bound.SetUpBackward().ok());
  MeasureSideBySide(Quick(), &cases);
  EXPECT_EQ(cases[0].status, absl::InternalError("the toy refuses"));
  EXPECT_EQ(toy.backwards, 4);
}

TEST_F(TimingTest, OnlyTheForwardPassHasStreams) {
  for (const Case::Pass pass : {Case::PASS_FORWARD, Case::PASS_TRAINING}) {
    std::vector<TimedCase> cases;
    cases.push_back(Prepare("tiny", {}, 16));
    const NamedTensors gradients = DrawOutputGradients(*cases[0].bound.layer, 1).value();
    const BackwardMemory memory = BindBackward(ViewsOf(gradients), &cases[0].bound).value();
    DeviceMemory workspace = DeviceMemory::Allocate(Device::kCpu, 1 << 20).value();
    cases[0].bound.execution.workspace = workspace.bytes();
    ASSERT_TRUE(cases[0].bound.SetUpBackward().ok());
    cases[0].pass = pass;
    TimingOptions options = Quick();
    TickingClock clock(kTick);
    options.clock = &clock;
    MeasureSideBySide(options, &cases);
    EXPECT_TRUE(cases[0].status.ok()) << cases[0].status;
    EXPECT_EQ(cases[0].timing.segments_size() > 0, pass == Case::PASS_FORWARD);
  }
}

// Says that calls take times that no clock here shows.
class RemoteToy : public ContestantLayer {
 public:
  explicit RemoteToy(const Problem& problem)
      : ContestantLayer(problem, HiddenInputs(problem), HiddenOutputs(problem)) {}
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }
  bool times_itself() const override { return true; }
  absl::StatusOr<double> RunSeconds(int64_t calls, int64_t warm_calls) override {
    most_warm_calls = std::max(most_warm_calls, warm_calls);
    EXPECT_GT(runs, 0) << "there is nothing yet that it could be timed on";
    most_calls = std::max(most_calls, calls);
    return call_seconds * static_cast<double>(calls);
  }
  absl::StatusOr<double> ColdRunSeconds(int64_t flush_bytes) override {
    EXPECT_EQ(flush_bytes, CpuCacheFlusher::Bytes());
    return 3 * kRoundSeconds;
  }
  double last_setup_seconds() const override { return last_setup; }
  absl::StatusOr<double> SetupSeconds() override {
    return setups++ < 2 ? absl::StatusOr<double>(5 * kRoundSeconds) : broken;
  }

  int runs = 0, setups = 0;
  double last_setup = 0, call_seconds = kRoundSeconds;
  int64_t most_calls = 0, most_warm_calls = 0;
  absl::StatusOr<double> broken = 5 * kRoundSeconds;

 protected:
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    ++runs;
    return absl::OkStatus();
  }
};

TEST_F(TimingTest, ALayerOfAnotherProcessTimesItself) {
  for (const bool breaks : {false, true}) {
    RemoteToy toy(Problem::SelfAttention(1, 2, 16, 8));
    if (breaks) toy.broken = absl::InternalError("its process ended");
    std::vector<TimedCase> cases = CasesOf(&toy);
    TimingOptions options = Quick();
    options.flush_caches = [] { return absl::OkStatus(); };
    options.instructions = [] { return 1; };
    MeasureSideBySide(options, &cases);
    const Timing& timing = cases[0].timing;
    EXPECT_EQ(cases[0].status.message(), breaks ? "its process ended" : "");
    EXPECT_THAT(timing.run_ns(), Each(kRoundNs));
    EXPECT_THAT(timing.cold_run_ns(), Each(3 * kRoundNs));
    EXPECT_THAT(timing.setup_ns(), Each(5 * kRoundNs));
    EXPECT_THAT(timing.end_to_end_ns(), Each(6 * kRoundNs));
    EXPECT_EQ(toy.CheckBackward(),
              absl::UnimplementedError("a contestant is measured in the forward pass alone"));
    EXPECT_EQ(timing.run_instructions_size(), 0);
    if (breaks) continue;  // perhaps before the first sample of runs, as their order is drawn
    EXPECT_EQ(toy.most_calls, 512);
    EXPECT_EQ(timing.run_ns_size(), 7);
    EXPECT_EQ(timing.cold_run_ns_size(), kIntervalSamples);
    EXPECT_EQ(timing.setup_ns_size(), kIntervalSamples);
  }
}

TEST_F(TimingTest, ASetupThatTakesTooLongToBeRepeatedIsItsOnlySample) {
  for (const double seconds : {1.0, 100.0}) {
    RemoteToy toy(Problem::SelfAttention(1, 2, 16, 8));
    toy.last_setup = seconds;
    std::vector<TimedCase> cases = CasesOf(&toy);
    cases[0].wishes.set_share_seconds(100);
    MeasureSideBySide(Quick(), &cases);
    const std::vector<double> only = {seconds * 1e9};
    const auto& setups = cases[0].timing.setup_ns();
    EXPECT_EQ(std::vector<double>(setups.begin(), setups.end()) == only, seconds == 100);
    EXPECT_EQ(toy.setups, seconds == 100 ? 0 : kIntervalSamples);
  }
}

TEST_F(TimingTest, ACaseTellsItsSamplesWhenTheyAreEnoughAndWhenTheyAreAll) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  cases.push_back(Prepare("toy_mean", {{"rounds", "50"}}, 16));
  TimingOptions options = Quick();
  options.repetitions = kIntervalSamples + 3;
  std::map<size_t, std::vector<Timing>> told;
  options.on_enough = [&](size_t index, const Timing& so_far) { told[index].push_back(so_far); };
  MeasureSideBySide(options, &cases);
  ASSERT_EQ(told.size(), 2u);
  for (const auto& [index, timings] : told) {
    ASSERT_EQ(timings.size(), 2u);
    EXPECT_EQ(timings[0].run_ns_size(), kIntervalSamples);
    EXPECT_EQ(timings[1].run_ns_size(), kIntervalSamples + 3);
    EXPECT_EQ(timings[1].SerializeAsString(), cases[index].timing.SerializeAsString());
  }
}

TEST_F(TimingTest, InstructionsAreCountedWhereThereIsACounter) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  TimingOptions options = Quick();
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(cases[0].timing.run_instructions_size(), 0);
  int64_t count = 0;
  options.instructions = [&] { return count += 1000; };
  MeasureSideBySide(options, &cases);
  EXPECT_THAT(cases[0].timing.run_instructions(), ElementsAre(1000, 1000, 1000));
}

TEST_F(TimingTest, EachSampleHasTheTimeOfTheArithmeticBesideIt) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  MeasureSideBySide(Quick(), &cases);
  EXPECT_EQ(cases[0].timing.probe_ns_size(), 7);
  EXPECT_THAT(cases[0].timing.probe_ns(), Each(kProbeSeconds * 1e9));
}

TEST_F(TimingTest, SamplesBesideSlowArithmeticAreDiscardedAndCounted) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  TimingOptions options = Quick();
  // There is one before and one after each sample: the second sample's second and the fifth's first
  // take twice as long.
  int probes = 0;
  options.probe = [&] {
    clock_.Advance(probes == 3 || probes == 8 ? 2 * kProbeSeconds : kProbeSeconds);
    ++probes;
  };
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(probes, 2 * 7);
  EXPECT_EQ(cases[0].timing.discarded_samples(), 2);
  EXPECT_EQ(cases[0].timing.discarded_reason(), "the core was slower meanwhile");
  EXPECT_EQ(cases[0].timing.run_ns_size(), 5);
  EXPECT_EQ(cases[0].timing.probe_ns_size(), 5);
  EXPECT_THAT(cases[0].timing.probe_ns(), Each(kProbeSeconds * 1e9));
  EXPECT_THAT(cases[0].timing.run_ns(), Each(kRoundNs));
}

TEST_F(TimingTest, TheProbeIsTimedByTheClockToo) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  TickingClock clock(kTick);
  TimingOptions options = Quick();
  options.clock = &clock;
  options.probe = TimingOptions().probe;
  MeasureSideBySide(options, &cases);
  EXPECT_THAT(cases[0].timing.run_ns(), Each(kTick * 1e9));
  EXPECT_THAT(cases[0].timing.probe_ns(), Each(kTick * 1e9));
}

TEST_F(TimingTest, SamplesOfDifferentCasesAreTakenAtAboutTheSameTimes) {
  TimingOptions options = Quick();
  options.repetitions = 40;
  std::vector<TimedCase> cases;
  for (int i = 0; i < 3; ++i) cases.push_back(Prepare("toy_mean", {}, 16));
  cases[2].wishes.set_repetitions(10);
  std::vector<size_t> order;
  options.on_sample = [&](size_t index, absl::string_view what) {
    if (what == "run") order.push_back(index);
  };
  MeasureSideBySide(options, &cases);
  order.erase(order.begin(), order.begin() + 3);  // what tells how long a call takes
  ASSERT_EQ(order.size(), 90u);
  int taken[3] = {};
  int first[2] = {};  // how often each has its next sample before the other
  for (const size_t index : order) {
    if (index < 2 && taken[0] == taken[1]) ++first[index];
    ++taken[index];
    EXPECT_LE(std::abs(taken[0] - taken[1]), 1);
    EXPECT_LE(std::abs(taken[0] - 4 * taken[2]), 4);
  }
  // At random: with a probability below 1e-6 one is always first in 20 or more.
  EXPECT_GE(first[0], 1);
  EXPECT_GE(first[1], 1);
}

TEST_F(TimingTest, ALongCallIsASampleOfItsOwn) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_slow", {{"ms", "4"}}, 1));
  MeasureSideBySide(Quick(), &cases);
  EXPECT_EQ(cases[0].timing.run_ns_size(), 7);
  EXPECT_THAT(cases[0].timing.run_ns(), Each(DoubleNear(4e6 + kRoundNs, 1e-2)));
  EXPECT_EQ(cases[0].timing.calls_per_sample(), 1);
}

// Batches of 1, 2, 4 ... calls are tried until one lasts a sample, or a quarter of it with four
// calls or more; what they take is counted as the samples and their warming and probes are.
TEST_F(TimingTest, ASampleHasAsManyCallsAsLastItsLeastTime) {
  struct Row {
    int64_t rounds, tried_calls;
  };
  for (const auto& [rounds, tried_calls] : std::vector<Row>{{1, 255},
                                                            {3, 127},
                                                            {7, 63},
                                                            {32, 7},
                                                            {33, 7},
                                                            {31, 15},
                                                            {100, 7},
                                                            {130, 7},
                                                            {255, 7},
                                                            {256, 3},
                                                            {511, 3},
                                                            {512, 1},
                                                            {513, 1}}) {
    std::vector<TimedCase> cases;
    cases.push_back(Prepare("toy_mean", {{"rounds", std::to_string(rounds)}}, 1));
    TimingOptions options = Quick();
    options.setup = options.cold = false;
    MeasureSideBySide(options, &cases);
    const int64_t calls = (512 + rounds - 1) / rounds;
    EXPECT_EQ(cases[0].timing.calls_per_sample(), calls) << rounds;
    EXPECT_THAT(cases[0].timing.run_ns(),
                Each(DoubleNear(static_cast<double>(rounds) * kRoundNs, 1e-6)));
    const double all_calls = static_cast<double>(tried_calls + 7 * (1 + calls));
    EXPECT_NEAR(cases[0].spent_seconds,
                all_calls * static_cast<double>(rounds) * kRoundSeconds + 7 * 2 * kProbeSeconds,
                1e-9)
        << rounds;
  }
}

TEST_F(TimingTest, NothingIsTakenThatIsNotWantedOrThereIsNoTimeFor) {
  for (const bool wanted : {true, false}) {
    std::vector<TimedCase> cases;
    cases.push_back(Prepare("toy_stream", {}, 16));
    TimingOptions options = Quick();
    options.setup = options.cold = options.stream = wanted;
    options.flush_caches = [] { return absl::OkStatus(); };
    MeasureSideBySide(options, &cases);
    const Timing& timing = cases[0].timing;
    EXPECT_EQ(timing.setup_ns_size(), wanted ? kIntervalSamples : 0);
    EXPECT_EQ(timing.cold_run_ns_size(), wanted ? kIntervalSamples : 0);
    EXPECT_EQ(timing.segments_size(), wanted ? 8 : 0);
    EXPECT_EQ(timing.run_ns_size(), 7);
  }
  // The visit's own number of samples counts, and a flush that leaves no time for a cold run.
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  cases[0].wishes.set_repetitions(4);
  cases[0].wishes.set_share_seconds(1);
  TimingOptions options = Quick();
  options.flush_caches = [] { return absl::OkStatus(); };
  options.flush_seconds = 0.21;
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(cases[0].timing.run_ns_size(), 4);
  EXPECT_EQ(cases[0].timing.cold_run_ns_size(), 0);
  EXPECT_EQ(cases[0].timing.setup_ns_size(), kIntervalSamples);
}

TEST_F(TimingTest, AFlushOrASetupThatFailsIsTheCasesFailure) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  TimingOptions options = Quick();
  options.flush_caches = [] { return absl::InternalError("no flush"); };
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(cases[0].status.message(), "no flush");
  EXPECT_EQ(cases[0].timing.cold_run_ns_size(), 0);
}

TEST_F(TimingTest, FewerSamplesThanTheFewestAreNoneWhereItWasStopped) {
  for (const int taken : {kFewestSamples - 1, kFewestSamples}) {
    std::vector<TimedCase> cases;
    cases.push_back(Prepare("toy_mean", {}, 1));
    TimingOptions options = Quick();
    options.setup = options.cold = false;
    int samples = -1;  // the pilot is announced, too
    options.on_sample = [&](size_t, absl::string_view) { ++samples; };
    options.stopped = [&] { return samples >= taken; };
    MeasureSideBySide(options, &cases);
    EXPECT_EQ(cases[0].timing.run_ns_size(), taken);
    EXPECT_EQ(
        cases[0].status.ToString(),
        taken == kFewestSamples ? "OK" : "CANCELLED: stopped before there were enough samples");
  }
}

TEST_F(TimingTest, ALongCallIsNotWarmedAndAShortOneIsOncePerSample) {
  for (const bool is_long : {false, true}) {
    std::vector<TimedCase> cases;
    // 64 or 32 ms of simulated time a call; kWarmedSeconds are 50.
    cases.push_back(Prepare("toy_slow", {{"ms", is_long ? "64" : "32"}}, 1));
    TimingOptions options = Quick();
    options.setup = options.cold = false;
    MeasureSideBySide(options, &cases);
    const double call = (is_long ? 0.064 : 0.032) + kRoundSeconds;
    const double pilots = 1, samples = 7, warmings = is_long ? 0 : 7;
    EXPECT_EQ(cases[0].timing.run_ns_size(), 7);
    EXPECT_NEAR(cases[0].spent_seconds,
                (pilots + samples + warmings) * call + samples * 2 * kProbeSeconds, 1e-6);

    RemoteToy toy(Problem::SelfAttention(1, 2, 16, 8));
    toy.call_seconds = call;
    std::vector<TimedCase> remote = CasesOf(&toy);
    MeasureSideBySide(options, &remote);
    EXPECT_EQ(remote[0].timing.run_ns_size(), 7);
    EXPECT_EQ(toy.most_warm_calls, is_long ? 0 : 1);
  }
}

TEST_F(TimingTest, TheUsualTimeOfTheArithmeticIsThatOfAllCasesTogether) {
  // Beside every sample of the first case the arithmetic takes twice as long as beside the
  // second's: as many as may be discarded are.
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  cases.push_back(Prepare("toy_mean", {}, 16));
  TimingOptions options = Quick();
  options.repetitions = 9;
  size_t current = 0;
  options.on_sample = [&](size_t index, absl::string_view) { current = index; };
  options.probe = [&] { clock_.Advance(current == 0 ? 2 * kProbeSeconds : kProbeSeconds); };
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(cases[0].timing.discarded_samples(), 3);
  EXPECT_EQ(cases[1].timing.discarded_samples(), 0);
  EXPECT_EQ(cases[1].timing.run_ns_size(), 9);
}

TEST_F(TimingTest, InstructionsAreCountedOnlyWhereTheShareHasTimeForIt) {
  // Three counted runs may take a tenth of the share.
  for (const double share_calls : {29.0, 31.0}) {
    std::vector<TimedCase> cases;
    cases.push_back(Prepare("toy_slow", {{"ms", "4"}}, 1));
    cases[0].wishes.set_share_seconds(share_calls * (0.004 + kRoundSeconds));
    TimingOptions options = Quick();
    int64_t count = 0;
    options.instructions = [&] { return count += 1000; };
    MeasureSideBySide(options, &cases);
    EXPECT_EQ(cases[0].timing.run_instructions_size(), share_calls > 30 ? 3 : 0);
  }
}

TEST_F(TimingTest, SmallShareOfTimeTakesFewerSamples) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_slow", {{"ms", "20"}}, 1));
  cases.push_back(Prepare("toy_slow", {{"ms", "20"}}, 1));
  cases[0].wishes.set_share_seconds(
      0.15);  // 0.6 of it is room for 2 samples of 40 ms, warming included
  cases[1].wishes.set_share_seconds(0.005);  // not even for one; three are taken all the same
  MeasureSideBySide(Quick(), &cases);
  EXPECT_EQ(cases[0].timing.run_ns_size(), kFewestSamples);
  EXPECT_EQ(cases[1].timing.run_ns_size(), kFewestSamples);
  EXPECT_EQ(cases[1].timing.setup_ns_size(), 0);
}

TEST_F(TimingTest, TimeoutStopsACaseAndNotTheOthers) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_slow", {{"ms", "30"}}, 1));
  cases.push_back(Prepare("toy_mean", {}, 1));
  cases[0].timeout_seconds = 0.02;
  MeasureSideBySide(Quick(), &cases);
  EXPECT_TRUE(absl::IsDeadlineExceeded(cases[0].status)) << cases[0].status;
  EXPECT_THAT(std::string(cases[0].status.message()), HasSubstr("no sample: a call takes 0.03"));
  EXPECT_EQ(cases[0].timing.run_ns_size(), 0);
  EXPECT_TRUE(cases[1].status.ok()) << cases[1].status;
}

TEST_F(TimingTest, FailingCallStopsACaseAndNotTheOthers) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_refuses", {}, 1));
  cases.push_back(Prepare("toy_mean", {}, 1));
  MeasureSideBySide(Quick(), &cases);
  EXPECT_EQ(cases[0].status.message(), "the toy refuses to run");
  EXPECT_TRUE(cases[1].status.ok()) << cases[1].status;
}

TEST_F(TimingTest, StoppedMeasuringKeepsWhatItHas) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 1));
  TimingOptions options = Quick();
  options.repetitions = 1000;
  int samples = 0;
  options.on_sample = [&](size_t, absl::string_view) { ++samples; };
  options.stopped = [&] { return samples >= 40; };
  MeasureSideBySide(options, &cases);
  EXPECT_TRUE(cases[0].status.ok()) << cases[0].status;
  // The pilot is announced too, and the others are of its setup.
  EXPECT_EQ(cases[0].timing.run_ns_size() + cases[0].timing.setup_ns_size(), 39);
}

TEST_F(TimingTest, SegmentsOfAStreamAreTimedByPosition) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_stream", {}, 40));    // eight segments of five tokens
  cases.push_back(Prepare("toy_stream", {}, 1000));  // at most 16 tokens each: 63 segments
  cases.push_back(Prepare("toy_hidden", {}, 40));
  MeasureSideBySide(Quick(), &cases);
  ASSERT_EQ(cases[0].timing.segments_size(), 8);
  EXPECT_EQ(cases[0].timing.segments(1).tokens_before(), 5);
  EXPECT_EQ(cases[0].timing.segments(7).tokens(), 5);
  EXPECT_EQ(cases[0].timing.segments(0).append_ns_size(), kIntervalSamples);
  EXPECT_THAT(cases[0].timing.segments(7).append_ns(), Each(5 * kRoundNs));
  ASSERT_EQ(cases[1].timing.segments_size(), 32);
  EXPECT_EQ(cases[1].timing.segments(0).tokens_before(), 0);
  EXPECT_EQ(cases[1].timing.segments(31).tokens_before(), 992);
  EXPECT_EQ(cases[1].timing.segments(31).tokens(), 8);
  EXPECT_THAT(cases[1].timing.segments(0).append_ns(), Each(16 * kRoundNs));
  EXPECT_THAT(cases[1].timing.segments(31).append_ns(), Each(8 * kRoundNs));
  EXPECT_EQ(cases[2].timing.segments_size(), 0);
}

// Sensors with given readings.
class FakeMonitor : public DeviceMonitor {
 public:
  explicit FakeMonitor(std::function<DeviceState(int)> state) : state_(std::move(state)) {}
  DeviceState Read() override { return state_(reads_++); }
  int reads() const { return reads_; }

 private:
  std::function<DeviceState(int)> state_;
  int reads_ = 0;
};

DeviceState Clocked(double mhz, bool throttled) {
  DeviceState state;
  state.set_clock_mhz(mhz);
  if (throttled) state.add_throttle_reasons("power cap");
  return state;
}

TEST_F(TimingTest, OnADeviceEventsTellTheTime) {
  CudaRuntime* const runtime = RuntimeOf(Device::kSimulator).value();
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_device", {}, 8, Device::kSimulator));
  cases.push_back(Prepare("toy_device", {{"rounds", "20"}}, 8, Device::kSimulator));
  const auto flusher = DeviceCacheFlusher::Make(runtime);
  ASSERT_TRUE(flusher.ok()) << flusher.status();
  FakeMonitor monitor([](int) { return Clocked(1700, false); });
  TimingOptions options = QuickOnDevice();
  options.flush_caches = [&] { return (**flusher)(); };
  options.monitor = &monitor;
  MeasureSideBySide(options, &cases);
  for (const TimedCase& timed : cases) {
    const double run_ns = (&timed == &cases[1] ? 20 : 1) * kRoundNs;
    EXPECT_TRUE(timed.status.ok()) << timed.status;
    EXPECT_EQ(timed.timing.clock(), Timing::CLOCK_DEVICE_EVENTS);
    EXPECT_EQ(timed.timing.run_ns_size(), 7);
    EXPECT_EQ(timed.timing.discarded_samples(), 0);
    EXPECT_EQ(timed.timing.cold_run_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.setup_ns_size(), kIntervalSamples);
    // Events return milliseconds in f32.
    EXPECT_THAT(timed.timing.run_ns(), Each(DoubleNear(run_ns, 1e-6 * run_ns)));
    EXPECT_THAT(timed.timing.cold_run_ns(), Each(DoubleNear(run_ns, 1e-6 * run_ns)));
    EXPECT_EQ(timed.state_first.clock_mhz(), 1700);
    EXPECT_EQ(timed.state_last.clock_mhz(), 1700);
  }
  EXPECT_EQ(monitor.reads(), 2 * 7) << "one a sample";
  EXPECT_EQ(cases[0].timing.calls_per_sample(), 8);
  EXPECT_EQ(cases[1].timing.calls_per_sample(), 1);
}

// A sample begins and ends with an event. The warm-up call before it waits, and so does reading the
// time behind it; between its second event and that the device is at work.
TEST_F(TimingTest, SensorsAreReadWhileTheDeviceWorks) {
  const CudaRuntime& runtime = *RuntimeOf(Device::kSimulator).value();
  int events = 0;
  int64_t waits_at_event = 0;
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.event_seconds = [&] {
    ++events;
    waits_at_event = runtime.waits();
    return clock_.Seconds();
  };
  cuda_simulator::Configure(settings);
  std::vector<int> events_at_reading;
  FakeMonitor monitor([&](int n) {
    EXPECT_EQ(runtime.waits(), waits_at_event) << n;
    events_at_reading.push_back(events);
    return Clocked(1700 + n, false);
  });
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_device", {}, 4, Device::kSimulator));
  TimingOptions options = QuickOnDevice();
  options.repetitions = 3;
  options.setup = options.cold = options.stream = options.graph = false;
  options.monitor = &monitor;
  MeasureSideBySide(options, &cases);
  EXPECT_THAT(events_at_reading, ElementsAre(2, 4, 6));
  EXPECT_EQ(cases[0].state_first.clock_mhz(), 1700);
  EXPECT_EQ(cases[0].state_last.clock_mhz(), 1702);
}

// The toy's host takes a round's time for the three kernels that it enqueues, and the simulated
// device a tenth of that to run each. A graph leaves the host's time out.
TEST_F(TimingTest, ARunIsTimedAsAGraphTooWhichLeavesOutTheHost) {
  constexpr double kKernelSeconds = kRoundSeconds / 10;
  static SimulatedClock* device_clock;
  device_clock = &clock_;
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.on_launch = [](bool begins) {
    if (!begins) device_clock->Advance(kKernelSeconds);
  };
  cuda_simulator::Configure(settings);
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_device", {{"rounds", "20"}}, 4, Device::kSimulator));
  cases.push_back(Prepare("tiny_other_stream", {}, 8, Device::kSimulator));
  TimingOptions options = QuickOnDevice();
  options.setup = options.cold = options.stream = false;
  MeasureSideBySide(options, &cases);
  const double kernels_ns = 20 * 3 * kKernelSeconds * 1e9;
  const Timing& timing = cases[0].timing;
  EXPECT_EQ(timing.graph_run_ns_size(), kIntervalSamples);
  EXPECT_THAT(timing.graph_run_ns(), Each(DoubleNear(kernels_ns, 1e-5 * kernels_ns)));
  EXPECT_THAT(timing.run_ns(), Each(DoubleNear(20 * kRoundNs + kernels_ns, 1e-5 * 20 * kRoundNs)));
  EXPECT_EQ(timing.no_graph_reason(), "");
  // What cannot be captured is timed as it is, with the reason.
  EXPECT_TRUE(cases[1].status.ok()) << cases[1].status;
  EXPECT_EQ(cases[1].timing.run_ns_size(), 7);
  EXPECT_EQ(cases[1].timing.graph_run_ns_size(), 0);
  EXPECT_THAT(cases[1].timing.no_graph_reason(), HasSubstr("another stream"));

  cases[0].timing.Clear();
  options.graph = false;
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(cases[0].timing.graph_run_ns_size(), 0);
}

// A layer of a device, which enqueues one kernel in Run and three in Backward. The host takes rounds
// of its own for both, as StepToy's does.
class DeviceStepToy : public StepToy {
 public:
  DeviceStepToy(const Problem& problem, SimulatedClock* clock, CudaTarget target)
      : StepToy(problem, clock), target_(target) {}

 protected:
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Wait(8);
    return Copy(inputs.Get("x"), outputs.Get("out"), execution);
  }
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    Wait(16);
    for (int n = 0; n < 3; ++n) {
      const absl::Status copied =
          Copy(call.output_gradients.Get("out"), call.input_gradients.Get("x"), execution);
      if (!copied.ok()) return copied;
    }
    return absl::OkStatus();
  }
  absl::Status Copy(const ConstTensorView& from, const TensorView& to,
                    const Execution& execution) const {
    const Shape shape = {1, 1, from.dim(1), from.dim(2)};
    const TinyCopy copy = {ToDeviceView(ConstTensorView(from.data, from.dtype, shape)),
                           ToDeviceView(TensorView(to.mutable_data(), to.dtype, shape)),
                           /*heads=*/1, from.dim(1)};
    return ToStatus(KernelsOn<ForEachKernel<TinyCopy>>(target_).run(copy, from.dim(1), from.dim(2),
                                                                    execution.stream));
  }

 private:
  CudaTarget target_;
};

TEST_F(TimingTest, BackwardPassesAndTrainingStepsAreTimedAsGraphsToo) {
  constexpr double kKernelSeconds = kRoundSeconds / 8;
  static SimulatedClock* device_clock;
  device_clock = &clock_;
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.on_launch = [](bool begins) {
    if (!begins) device_clock->Advance(kKernelSeconds);
  };
  cuda_simulator::Configure(settings);
  for (const auto& [pass, rounds, kernels] :
       {std::tuple(Case::PASS_FORWARD, 8, 1), std::tuple(Case::PASS_BACKWARD, 16, 3),
        std::tuple(Case::PASS_TRAINING, 8 + 16, 1 + 3)}) {
    SCOPED_TRACE(Case::Pass_Name(pass));
    CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
    DeviceStepToy toy(Problem::SelfAttention(1, 2, 16, 8), &clock_, runtime->target());
    NamedTensors host;
    host["x"] = Tensor(DType::kF32, {1, 16, 16});
    std::vector<TimedCase> cases(1);
    BoundLayer& bound = cases[0].bound;
    bound = Bind(&toy, Device::kSimulator, ViewsOf(host), &pool_, true).value();
    cases[0].pass = pass;
    const NamedTensors gradients = DrawOutputGradients(toy, 1).value();
    ASSERT_TRUE(bound.Setup().ok());
    const BackwardMemory memory = BindBackward(ViewsOf(gradients), &bound).value();
    ASSERT_TRUE(bound.SetUpBackward().ok());
    TimingOptions options = QuickOnDevice();
    options.setup = options.cold = options.stream = false;
    MeasureSideBySide(options, &cases);
    EXPECT_TRUE(cases[0].status.ok()) << cases[0].status;
    const Timing& timing = cases[0].timing;
    EXPECT_EQ(timing.no_graph_reason(), "");
    EXPECT_EQ(timing.graph_run_ns_size(), kIntervalSamples);
    const double of_kernels = kernels * kKernelSeconds;
    EXPECT_THAT(timing.graph_run_ns(), Each(of_kernels * 1e9));
    EXPECT_THAT(timing.run_ns(), Each((rounds * kRoundSeconds + of_kernels) * 1e9));
  }
}

// A layer of a device whose Setup replaces the memory that Run reads.
class TableToy : public DeviceStepToy {
 public:
  using DeviceStepToy::DeviceStepToy;

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution&) override {
    const ConstTensorView x = inputs.Get("x");
    const std::vector<float> zeros(x.num_elements());
    auto table = CudaRuntime::For(Device::kSimulator)
                     .value()
                     ->Upload(zeros.data(), zeros.size() * sizeof(float));
    if (!table.ok()) return table.status();
    table_ = *std::move(table);
    return absl::OkStatus();
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    Wait(8);
    const ConstTensorView x = inputs.Get("x");
    return Copy(ConstTensorView(table_.data(), x.dtype, {1, x.dim(1), x.dim(2)}),
                outputs.Get("out"), execution);
  }

 private:
  DeviceBuffer table_;
};

TEST_F(TimingTest, AGraphIsOfTheLastSetup) {
  CudaRuntime* runtime = CudaRuntime::For(Device::kSimulator).value();
  TableToy toy(Problem::SelfAttention(1, 2, 16, 8), &clock_, runtime->target());
  NamedTensors host;
  host["x"] = Tensor(DType::kF32, {1, 16, 16});
  std::vector<TimedCase> cases(1);
  cases[0].bound = Bind(&toy, Device::kSimulator, ViewsOf(host), &pool_, true).value();
  ASSERT_TRUE(cases[0].bound.Setup().ok());
  TimingOptions options = QuickOnDevice();
  options.setup = true;
  options.cold = options.stream = false;
  MeasureSideBySide(options, &cases);
  EXPECT_TRUE(cases[0].status.ok()) << cases[0].status;
  EXPECT_GT(cases[0].timing.setup_ns_size(), 0);
  EXPECT_EQ(cases[0].timing.graph_run_ns_size(), kIntervalSamples);
  EXPECT_THAT(cuda_simulator::Findings(), testing::IsEmpty());
}

TEST_F(TimingTest, SamplesOfAThrottledDeviceAreDiscardedAndCounted) {
  FakeMonitor monitor([](int n) { return Clocked(1700 - n, n % 3 == 1); });
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_device", {}, 4, Device::kSimulator));
  TimingOptions options = QuickOnDevice();
  options.repetitions = 9;
  options.monitor = &monitor;
  MeasureSideBySide(options, &cases);
  EXPECT_EQ(cases[0].timing.throttled_samples(), 3);
  EXPECT_EQ(cases[0].timing.discarded_samples(), 3);
  EXPECT_EQ(cases[0].timing.run_ns_size(), 6);
  EXPECT_EQ(cases[0].timing.discarded_reason(), "the device throttled meanwhile");
}

TEST_F(TimingTest, SegmentsOfAStreamOnADeviceAreTimedToo) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("tiny", {}, 40, Device::kSimulator));
  TickingClock clock(kTick);
  SetEventClock(&clock);
  TimingOptions options = Quick();
  options.clock = &clock;
  options.cold = options.setup = false;
  MeasureSideBySide(options, &cases);
  EXPECT_TRUE(cases[0].stream_status.ok()) << cases[0].stream_status;
  ASSERT_EQ(cases[0].timing.segments_size(), 8);
  EXPECT_EQ(cases[0].timing.segments(7).tokens_before(), 35);
  EXPECT_EQ(cases[0].timing.segments(7).append_ns_size(), kIntervalSamples);
  EXPECT_THAT(cases[0].timing.segments(7).append_ns(), Each(kTick * 1e9));
}

TEST_F(TimingTest, ALostDeviceIsTheFaultOfWhoLostIt) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_device", {}, 4, Device::kSimulator));
  cases.push_back(Prepare("toy_bad_launch", {}, 4, Device::kSimulator));
  cases.push_back(Prepare("toy_bad_kernel", {}, 4, Device::kSimulator));
  cases.push_back(Prepare("toy_device", {}, 4, Device::kSimulator));
  cuda_simulator::Settings settings = cuda_simulator::CurrentSettings();
  settings.errors_are_deferred = true;
  cuda_simulator::Configure(settings);
  MeasureSideBySide(QuickOnDevice(), &cases);
  EXPECT_FALSE(DeviceStatus(Device::kSimulator).ok());
  EXPECT_TRUE(absl::IsCancelled(cases[0].status)) << cases[0].status;
  EXPECT_THAT(std::string(cases[1].status.message()),
              HasSubstr("more tasks than a grid has blocks"));
  EXPECT_TRUE(absl::IsInternal(cases[2].status)) << cases[2].status;
  EXPECT_TRUE(absl::IsCancelled(cases[3].status)) << cases[3].status;
}

TEST(Timing, TheFlusherOutgrowsTheSecondLevelCache) {
  EXPECT_EQ(CpuCacheFlusher::Bytes(),
            std::min<int64_t>(2 * LastLevelCacheBytes(), int64_t{256} << 20));
  const CudaRuntime& simulator = *RuntimeOf(Device::kSimulator).value();
  EXPECT_EQ(DeviceCacheFlusher::Bytes(simulator), 2u * simulator.properties().l2_cache_bytes);
  EXPECT_LE(DeviceCacheFlusher::Bytes(simulator), simulator.properties().memory_bytes / 16u);
}

TEST(Timing, ThrottledSamplesAreDiscardedSlowestFirstAndAtMostAThird) {
  const auto fine = Clocked(1000, false);
  EXPECT_THAT(UnthrottledSamples({fine, Clocked(900, true), fine}), ElementsAre(true, false, true));
  EXPECT_THAT(
      UnthrottledSamples({Clocked(900, true), Clocked(800, true), fine, Clocked(700, true)}),
      ElementsAre(true, true, true, false));
  EXPECT_THAT(UnthrottledSamples({DeviceState(), DeviceState(), DeviceState()}),
              ElementsAre(true, true, true));
}

TEST(Timing, DisturbedSamplesAreDiscardedWorstFirstAndAtMostAThird) {
  EXPECT_THAT(UndisturbedSamples({1, 1.2, 1.29, 1}, 1), ElementsAre(true, true, true, true));
  EXPECT_THAT(UndisturbedSamples({1, 2, 1, 1, 1, 1}, 1),
              ElementsAre(true, false, true, true, true, true));
  EXPECT_THAT(UndisturbedSamples({2, 3, 4, 5, 2, 2}, 1),
              ElementsAre(true, true, false, false, true, true));
  EXPECT_THAT(UndisturbedSamples({2, 2}, 1), ElementsAre(true, true));
}

TEST(Timing, ASampleIsDisturbedWhereItsArithmeticTookOverSoMuchMoreThanUsual) {
  const double limit = kDisturbedFactor * 10;
  EXPECT_THAT(UndisturbedSamples({10, limit, 10}, 10), ElementsAre(true, true, true));
  EXPECT_THAT(UndisturbedSamples({10, limit * 1.001, 10}, 10), ElementsAre(true, false, true));
}

TEST(Timing, SegmentsCoverTheSequence) {
  for (const int64_t tokens : {0, 1, 7, 8, 9, 100}) {
    for (const int64_t largest : {1, 3, 1000}) {
      int64_t end = 0;
      for (const Segment& segment : PlanSegments(tokens, largest)) {
        EXPECT_EQ(segment.begin, end);
        EXPECT_GE(segment.tokens, 1);
        EXPECT_LE(segment.tokens, largest);
        end += segment.tokens;
      }
      EXPECT_EQ(end, tokens);
    }
  }
  EXPECT_EQ(PlanSegments(64, 1000).size(), 8u);
}

}  // namespace
}  // namespace tfb
