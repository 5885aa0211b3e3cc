#include "harness/timing.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/toys.h"

namespace tfb {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;

// Layers with the tensors that they are timed on.
class TimingTest : public ::testing::Test {
 protected:
  struct Prepared {
    std::unique_ptr<Layer> layer;
    NamedTensors inputs, outputs;
    Tensor workspace;
  };

  TimingTest() : pool_(2) { AddToys(registry_); }

  TimedCase Prepare(const std::string& name, const Options& options, int64_t tokens) {
    const Technique* technique = *registry_.Find(name);
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 8);
    prepared_.push_back(std::make_unique<Prepared>());
    Prepared& p = *prepared_.back();
    p.layer = technique->Create(problem, options, Device::kCpu, 1).value();
    for (const TensorSpec& spec : p.layer->inputs()) {
      if (spec.optional) continue;
      FillNormal(&(p.inputs[spec.name] = Tensor(spec.dtype, spec.shape)), 1, spec.name);
    }
    for (const TensorSpec& spec : p.layer->outputs()) {
      p.outputs[spec.name] = Tensor(spec.dtype, spec.shape);
    }
    p.workspace =
        Tensor(DType::kU8, {static_cast<int64_t>(p.layer->workspace_bytes(pool_.threads())) + 64});
    TimedCase timed;
    timed.layer = p.layer.get();
    timed.inputs = ViewsOf(p.inputs);
    timed.outputs = MutableViewsOf(p.outputs);
    timed.execution.pool = &pool_;
    timed.execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(p.workspace.raw()), p.workspace.bytes());
    EXPECT_TRUE(p.layer->Setup(timed.inputs, timed.execution).ok());
    return timed;
  }

  static TimingOptions Quick() {
    TimingOptions options;
    options.repetitions = 7;
    options.min_time = 0.0005;
    return options;
  }

  static double Fastest(const TimedCase& timed) {
    return *std::min_element(timed.timing.run_ns().begin(), timed.timing.run_ns().end());
  }

  Registry registry_;
  ThreadPool pool_;
  std::vector<std::unique_ptr<Prepared>> prepared_;
};

TEST_F(TimingTest, EverySampleIsKept) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  cases.push_back(Prepare("toy_mean", {{"rounds", "50"}}, 16));
  CpuCacheFlusher flusher(&pool_);
  TimingOptions options = Quick();
  options.flush_caches = [&] { flusher(); };
  MeasureSideBySide(options, &cases);
  for (const TimedCase& timed : cases) {
    EXPECT_TRUE(timed.status.ok()) << timed.status;
    EXPECT_EQ(timed.timing.run_ns_size() + timed.timing.discarded_samples(), 7);
    EXPECT_EQ(timed.timing.setup_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.end_to_end_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.cold_run_ns_size(), kIntervalSamples);
    EXPECT_EQ(timed.timing.clock(), Timing::CLOCK_WALL);
    EXPECT_THAT(timed.timing.run_ns(), Each(Gt(0)));
    EXPECT_THAT(timed.timing.cold_run_ns(), Each(Gt(0)));
  }
  // Fifty times the work, and calls are averaged until a sample is long enough.
  EXPECT_GT(Fastest(cases[1]), 5 * Fastest(cases[0]));
  EXPECT_GT(cases[0].timing.calls_per_sample(), cases[1].timing.calls_per_sample());
}

TEST_F(TimingTest, SamplesOfDifferentCasesAreInterleaved) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_mean", {}, 16));
  cases.push_back(Prepare("toy_mean", {}, 16));
  TimingOptions options = Quick();
  options.repetitions = 20;
  std::vector<size_t> order;
  options.on_sample = [&](size_t index, absl::string_view) { order.push_back(index); };
  MeasureSideBySide(options, &cases);
  int changes = 0;
  for (size_t i = 1; i < order.size(); ++i) changes += order[i] != order[i - 1];
  // Of some 50 samples in random order about 25; in blocks there would be 3. The chance of fewer
  // than 8 is below 1e-6.
  EXPECT_GE(changes, 8);
}

TEST_F(TimingTest, TimeOfASleepIsTheSleep) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_slow", {{"ms", "4"}}, 1));
  MeasureSideBySide(Quick(), &cases);
  EXPECT_THAT(cases[0].timing.run_ns(), Each(Gt(4e6)));
  EXPECT_EQ(cases[0].timing.calls_per_sample(), 1);
}

TEST_F(TimingTest, SmallShareOfTimeTakesFewerSamples) {
  std::vector<TimedCase> cases;
  cases.push_back(Prepare("toy_slow", {{"ms", "20"}}, 1));
  cases.push_back(Prepare("toy_slow", {{"ms", "20"}}, 1));
  cases[0].share_seconds = 0.15;   // 0.6 of it is room for 2 samples of 40 ms, warming included
  cases[1].share_seconds = 0.005;  // not even for one
  MeasureSideBySide(Quick(), &cases);
  EXPECT_EQ(cases[0].timing.run_ns_size() + cases[0].timing.discarded_samples(), kFewestSamples);
  EXPECT_EQ(cases[1].timing.run_ns_size() + cases[1].timing.discarded_samples(), 1);
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
  EXPECT_GT(cases[0].timing.run_ns_size(), 0);
  EXPECT_LE(cases[0].timing.run_ns_size(), 40);
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
  ASSERT_EQ(cases[1].timing.segments_size(), 32);
  EXPECT_EQ(cases[1].timing.segments(0).tokens_before(), 0);
  EXPECT_EQ(cases[1].timing.segments(31).tokens_before(), 992);
  EXPECT_EQ(cases[1].timing.segments(31).tokens(), 8);
  EXPECT_EQ(cases[2].timing.segments_size(), 0);
}

TEST(Timing, DisturbedSamplesAreDiscardedWorstFirstAndAtMostAThird) {
  EXPECT_THAT(UndisturbedSamples({1, 1.2, 1.29, 1}, 1), ElementsAre(true, true, true, true));
  EXPECT_THAT(UndisturbedSamples({1, 2, 1, 1, 1, 1}, 1),
              ElementsAre(true, false, true, true, true, true));
  EXPECT_THAT(UndisturbedSamples({2, 3, 4, 5, 2, 2}, 1),
              ElementsAre(true, true, false, false, true, true));
  EXPECT_THAT(UndisturbedSamples({2, 2}, 1), ElementsAre(true, true));
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
