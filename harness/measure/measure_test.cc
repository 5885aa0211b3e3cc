#include "harness/measure/measure.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/simulator/simulator.h"
#include "core/safetensors.h"
#include "core/sanitizers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/judge/device_memory.h"
#include "harness/testing/simulated_clock.h"
#include "harness/testing/tiny_technique.h"
#include "harness/testing/toys.h"
#include "results/reader.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;

class MeasureTest : public ::testing::Test {
 protected:
  MeasureTest() {
    const ToyTime time = {&clock_, /*seconds_per_round=*/1e-4};
    AddToys(registry_, time);
    AddDenseToy(registry_, time);
    options_.clock = &clock_;
    options_.probe = [this] { clock_.Advance(5e-5); };
    options_.repetitions = 4;
    options_.min_time = 1e-4;
    options_.cold = false;
    options_.registry = &registry_;
  }

  // Returns the records of the cases of one problem, by display name.
  std::map<std::string, Case> Measure(const std::string& techniques, int64_t tokens = 16,
                                      const std::string& devices = "cpu",
                                      const std::string& inputs = "gaussian") {
    CaseFlags flags;
    flags.techniques = techniques;
    flags.devices = devices;
    flags.simulator = true;
    flags.inputs = inputs;
    flags.lengths = inputs == "gaussian" ? std::to_string(tokens) : "";
    flags.head_dims = "8";
    flags.heads = "2";
    flags.threads = "1";
    flags.causal = "true";
    flags.counterparts = false;
    flags.passes = pass_;
    cases_ = MakeCases(flags, registry_, "").value();
    Visit visit;
    for (size_t i = 0; i < cases_.size(); ++i) {
      cases_[i].check = case_check_;
      Visit::Item* item = visit.add_items();
      item->set_index(i);
      item->set_check(check_);
    }
    std::map<std::string, Case> records;
    MeasureHooks hooks;
    hooks.on_activity = [this](size_t index, absl::string_view what) {
      ++activities_[std::string(what)];
      sequence_.emplace_back(index, what);
    };
    if (seconds_left_ > 0) hooks.seconds_left = [this] { return seconds_left_; };
    hooks.stopped = [this] { return stopped_; };
    hooks.report = [&](CaseReport report) {
      if (!report.finished()) {
        so_far_.push_back(std::move(*report.mutable_record()));
        activities_at_so_far_.push_back(activities_);
        return;
      }
      const std::string name = cases_[report.index()].DisplayName();
      input_seconds_[name] = report.input_seconds();
      EXPECT_TRUE(records.emplace(name, std::move(*report.mutable_record())).second)
          << name << " is reported twice";
    };
    kept_device_ = Measurer(options_).Measure(cases_, visit, hooks);
    return records;
  }

  SimulatedClock clock_;
  Registry registry_;
  MeasureOptions options_;
  std::vector<Job> cases_;
  using Activity = std::pair<size_t, std::string>;
  std::map<std::string, int> activities_;
  std::vector<Case> so_far_;
  std::vector<std::map<std::string, int>> activities_at_so_far_;
  std::vector<Activity> sequence_;
  std::map<std::string, double> input_seconds_;  // by display name
  std::string pass_ = "forward";
  double seconds_left_ = 0;  // 0: there is no such limit
  bool check_ = true, case_check_ = true, stopped_ = false, kept_device_ = true;
};

TEST_F(MeasureTest, RecordHasTimesErrorsCostsAndMemory) {
  const auto records = Measure("toy_mean");
  const Outcome& outcome = records.at("toy_mean").outcome();
  EXPECT_EQ(outcome.status(), Outcome::STATUS_OK) << outcome.reason();
  EXPECT_EQ(outcome.timing().run_ns_size(), 4);
  EXPECT_GT(outcome.timing().setup_ns_size(), 0);
  EXPECT_LT(outcome.against_definition().max_abs(), 1e-6);
  EXPECT_TRUE(outcome.against_definition().passed());
  EXPECT_TRUE(outcome.has_against_dense());
  EXPECT_EQ(outcome.flops(), 2.0 * 2 * 16 * 8);
  EXPECT_FALSE(outcome.has_bytes_moved());  // the toy does not know: absent, not 0
  EXPECT_EQ(outcome.peak_workspace_bytes(), 64u);
  EXPECT_EQ(outcome.parameter_bytes(), 0u);
  EXPECT_EQ(outcome.input_bytes(), 3u * 2 * 16 * 8 * 4);
  EXPECT_EQ(outcome.output_bytes(), 2u * 16 * 8 * 4);
  EXPECT_GT(outcome.process_peak_bytes(), 1u << 20);
  // A setup and a run to check, and what is timed: by default they are some ten.
  EXPECT_GT(outcome.elapsed_seconds(), 10 * 1e-4);
  EXPECT_LT(outcome.elapsed_seconds(), 100 * 1e-4);
  EXPECT_EQ(outcome.statistics().at("rounds"), 1);
  EXPECT_EQ(records.at("toy_mean").technique().weights(), TechniqueDescription::WEIGHTS_NONE);
}

TEST_F(MeasureTest, InputsTakeTimeForTheFirstCaseThatReadsThem) {
  TickingClock clock(1e-3);
  options_.clock = &clock;
  Measure("toy_mean,toy_causal,toy_hidden");
  // The clock is read before and after.
  EXPECT_NEAR(input_seconds_.at("toy_mean") + input_seconds_.at("toy_causal"), 1e-3, 1e-9);
  EXPECT_EQ(input_seconds_.at("toy_mean") * input_seconds_.at("toy_causal"), 0);
  EXPECT_NEAR(input_seconds_.at("toy_hidden"), 1e-3, 1e-9);
}

TEST_F(MeasureTest, EachPassHasItsCostAndMemory) {
  registry_.Add(MakeTiny(TinyFault::kNone));
  TickingClock clock(1e-3);  // the tiny technique takes no simulated time
  options_.clock = &clock;
  std::map<std::string, Outcome> outcomes;
  for (const char* pass : {"forward", "backward", "training"}) {
    pass_ = pass;
    const Case record = Measure("tiny").at("tiny");
    EXPECT_EQ(Name(record.key().pass()), pass);
    outcomes[pass] = record.outcome();
    EXPECT_EQ(outcomes[pass].status(), Outcome::STATUS_OK) << outcomes[pass].reason();
    EXPECT_EQ(outcomes[pass].timing().run_ns_size(), 4);
    EXPECT_GT(outcomes[pass].timing().setup_ns_size(), 0);
    EXPECT_EQ(outcomes[pass].parameter_bytes(), 2u * 4);
  }
  const Outcome &forward = outcomes["forward"], &backward = outcomes["backward"],
                &training = outcomes["training"];
  EXPECT_FALSE(forward.has_kept_bytes());
  EXPECT_TRUE(forward.has_against_definition());
  EXPECT_EQ(forward.reason(), "");
  const uint64_t tensor = 2 * 16 * 8 * 4;  // of q, k, v, out and their gradients
  for (const Outcome* outcome : {&backward, &training}) {
    EXPECT_EQ(outcome->kept_bytes(), tensor + 2 * 16 * 4);  // out and a number for each query
    EXPECT_FALSE(outcome->has_against_definition());
    EXPECT_EQ(outcome->timing().segments_size(), 0);
  }
  EXPECT_EQ(backward.reason(), "");
  EXPECT_EQ(backward.gradient_errors_size(), 4);  // of q, k, v and the parameter
  EXPECT_EQ(training.gradient_errors_size(), 0);
  EXPECT_EQ(training.reason(),
            "errors were not measured: a training step's are those of its forward and its backward "
            "pass");
  // 16 x 17 / 2 pairs of a head are kept; there are 2 products in a run and 5 in a backward pass.
  EXPECT_EQ(forward.flops(), 2.0 * 2 * 136 * (2 * 8));
  EXPECT_EQ(backward.flops(), 2.0 * 2 * 136 * (5 * 8));
  EXPECT_EQ(training.flops(), forward.flops() + backward.flops());
  EXPECT_EQ(training.bytes_moved(), forward.bytes_moved() + backward.bytes_moved());
  EXPECT_EQ(forward.input_bytes(), 3 * tensor);
  EXPECT_EQ(forward.output_bytes(), tensor);
  EXPECT_EQ(backward.input_bytes(), 5 * tensor);  // with out and its gradient
  EXPECT_EQ(backward.output_bytes(), 3 * tensor + 2 * 4);
  EXPECT_EQ(training.input_bytes(), 4 * tensor);
  EXPECT_EQ(training.output_bytes(), 4 * tensor + 2 * 4);
  EXPECT_NE(forward.peak_workspace_bytes(), backward.peak_workspace_bytes());
  EXPECT_EQ(training.peak_workspace_bytes(),
            std::max(forward.peak_workspace_bytes(), backward.peak_workspace_bytes()));
}

TEST_F(MeasureTest, ALayerWithoutABackwardPassIsARowWithItsReason) {
  registry_.Add(MakeTiny(TinyFault::kWrongScale));
  for (const char* pass : {"backward", "training"}) {
    pass_ = pass;
    const Outcome outcome = Measure("tiny_wrong_scale").at("tiny_wrong_scale").outcome();
    EXPECT_EQ(outcome.status(), Outcome::STATUS_UNSUPPORTED);
    EXPECT_EQ(outcome.reason(), "a layer with a fault has no backward pass");
    EXPECT_EQ(outcome.timing().run_ns_size(), 0);
    EXPECT_EQ(activities_["first run"], 0);
  }
}

TEST_F(MeasureTest, AWrongGradientFailsTheBackwardPassAndNoOther) {
  registry_.Add(MakeTiny(TinyFault::kGradientWrongScale));
  TickingClock clock(1e-3);
  options_.clock = &clock;
  const std::string name = TinyName(TinyFault::kGradientWrongScale);
  EXPECT_EQ(Measure(name).at(name).outcome().status(), Outcome::STATUS_OK);
  pass_ = "backward";
  const Outcome outcome = Measure(name).at(name).outcome();
  EXPECT_EQ(outcome.status(), Outcome::STATUS_FAILED);
  EXPECT_THAT(outcome.reason(), ::testing::StartsWith("error of the gradient of q is "));
}

TEST_F(MeasureTest, TheMemoryOfABackwardPassCounts) {
  registry_.Add(MakeTiny(TinyFault::kNone));
  TickingClock clock(1e-3);
  options_.clock = &clock;
  // Three inputs, the guarded outputs and two workspaces of a number for each pair fit. Gradients, and
  // the three numbers for each pair that their pass needs, do not.
  constexpr int64_t kRows = 2 * 256, kTensor = kRows * 8 * 4, kPairs = kRows * 256 * 4;
  options_.memory_limit = 9 * kTensor + 2 * kPairs;
  const Outcome forward = Measure("tiny", 256).at("tiny").outcome();
  EXPECT_EQ(forward.status(), Outcome::STATUS_OK) << forward.reason();
  pass_ = "training";
  const Outcome outcome = Measure("tiny", 256).at("tiny").outcome();
  EXPECT_EQ(outcome.status(), Outcome::STATUS_OUT_OF_MEMORY);
  EXPECT_THAT(outcome.reason(), HasSubstr("--memory_limit is"));
}

TEST_F(MeasureTest, ARecordIsToldAfterItsCheckBeforeAnyCaseIsTimed) {
  Measure("toy_mean,toy_causal,toy_unable");
  // The two cases that run are reported in the order in which they were checked.
  ASSERT_GE(so_far_.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(so_far_[i].outcome().against_definition().passed());
    EXPECT_EQ(so_far_[i].outcome().timing().run_ns_size(), 0);
    EXPECT_EQ(activities_at_so_far_[i].count("setup"), 0u);
  }
  EXPECT_EQ(so_far_[0].key().technique(), "toy_mean");
  EXPECT_EQ(so_far_[1].key().technique(), "toy_causal");
}

TEST_F(MeasureTest, WhatCannotRunHasAStatusAndAReasonAndTheOthersRun) {
  const auto records = Measure("toy_mean,toy_unable,toy_refuses,toy_wrong,toy_full,toy_hidden");
  ASSERT_EQ(records.size(), 6u);
  const auto outcome = [&](const std::string& name) { return records.at(name).outcome(); };
  EXPECT_EQ(outcome("toy_mean").status(), Outcome::STATUS_OK);
  EXPECT_EQ(outcome("toy_hidden").status(), Outcome::STATUS_OK) << outcome("toy_hidden").reason();
  EXPECT_EQ(outcome("toy_unable").status(), Outcome::STATUS_UNSUPPORTED);
  EXPECT_EQ(outcome("toy_unable").reason(), "the toy is unable to");
  EXPECT_EQ(outcome("toy_full").status(), Outcome::STATUS_UNSUPPORTED);
  EXPECT_EQ(outcome("toy_full").reason(), "toy_full has no causal form");
  EXPECT_EQ(outcome("toy_refuses").status(), Outcome::STATUS_FAILED);
  EXPECT_EQ(outcome("toy_refuses").reason(), "the toy refuses to run");
  EXPECT_EQ(outcome("toy_wrong").status(), Outcome::STATUS_FAILED);
  EXPECT_THAT(outcome("toy_wrong").reason(), HasSubstr("bound"));
  EXPECT_GT(outcome("toy_wrong").timing().run_ns_size(), 0);  // it ran nevertheless
}

TEST_F(MeasureTest, MemoryIsCheckedBeforeItIsAllocated) {
  options_.memory_limit = 100 << 20;
  auto records = Measure("toy_hungry:mib=1000000000,toy_mean");  // 1 PB: to allocate it would fail
  EXPECT_EQ(records.at("toy_hungry mib=1000000000").outcome().status(),
            Outcome::STATUS_OUT_OF_MEMORY);
  EXPECT_THAT(records.at("toy_hungry mib=1000000000").outcome().reason(),
              HasSubstr("--memory_limit is 0.1 GiB"));
  EXPECT_EQ(records.at("toy_mean").outcome().status(), Outcome::STATUS_OK);
  records = Measure("toy_mean", int64_t{1} << 30);
  EXPECT_EQ(records.at("toy_mean").outcome().status(), Outcome::STATUS_OUT_OF_MEMORY);
}

TEST_F(MeasureTest, CasesThatDoNotFitTogetherAreMeasuredOneAfterTheOther) {
  // 2^14 tokens make 3 MiB of inputs, 1 of outputs, and three times that while they are checked.
  options_.memory_limit = 10 << 20;
  options_.repetitions = 1;
  check_ = false;
  const auto records = Measure("toy_mean,toy_causal,toy_slow,toy_hungry", 1 << 14);
  ASSERT_EQ(records.size(), 4u);
  for (const auto& [name, record] : records) {
    EXPECT_EQ(record.outcome().status(), Outcome::STATUS_OK) << name << record.outcome().reason();
  }
}

TEST_F(MeasureTest, ScalingCasesAreCheckedOnSampledRows) {
  const Case record = Measure("toy_mean", 512).at("toy_mean");
  const ErrorMeasure& error = record.outcome().against_definition();
  EXPECT_EQ(error.rows(), 2 * 512);
  EXPECT_GE(error.rows_checked(), 2 * 48);
  EXPECT_LE(error.rows_checked(), 2 * 80);
}

TEST_F(MeasureTest, RowsAreThoseOfTheQueriesWhereThereAreMoreKeys) {
  NamedTensors tensors;
  for (const auto& [name, tokens] : {std::pair("q", 5), {"k", 9}, {"v", 9}}) {
    tensors[name] = Tensor(DType::kF32, {1, 2, tokens, 8});
    Fill(tensors[name].view(), 1);
  }
  const std::string path = ::testing::TempDir() + "/more_keys.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  options_.accuracy_rows = 2;  // those at both ends are always among them
  const Case record = Measure("toy_mean", 5, "cpu", path).at("toy_mean");
  EXPECT_EQ(record.outcome().status(), Outcome::STATUS_OK) << record.outcome().reason();
  EXPECT_EQ(record.key().problem().kv_tokens(), 9);
  EXPECT_EQ(record.outcome().against_definition().rows_checked(), 2 * 4);
  EXPECT_EQ(record.outcome().against_definition().rows(), 2 * 5);
}

TEST_F(MeasureTest, UncheckedCaseSaysSoAndHasTimes) {
  check_ = false;
  const Case record = Measure("toy_mean").at("toy_mean");
  EXPECT_EQ(record.outcome().status(), Outcome::STATUS_OK);
  EXPECT_FALSE(record.outcome().has_against_definition());
  EXPECT_THAT(record.outcome().reason(), HasSubstr("errors were not measured"));
  EXPECT_GT(record.outcome().timing().run_ns_size(), 0);
}

TEST_F(MeasureTest, CaseWithoutACheckSaysWhyAndHasTimes) {
  case_check_ = false;
  const Outcome outcome = Measure("toy_mean").at("toy_mean").outcome();
  EXPECT_EQ(outcome.status(), Outcome::STATUS_OK);
  EXPECT_FALSE(outcome.has_against_definition());
  EXPECT_FALSE(outcome.has_against_dense());
  EXPECT_EQ(
      outcome.reason(),
      "errors were not measured: --accuracy=false leaves out those of more than 512 tokens of "
      "text");
  EXPECT_GT(outcome.timing().run_ns_size(), 0);
  EXPECT_EQ(activities_["check"], 0);
}

TEST_F(MeasureTest, TimeoutIsARowAndKeepsTheErrors) {
  options_.case_timeout = 0.5;
  auto records = Measure("toy_slow:ms=300,toy_slow:ms=1000,toy_mean");
  // One run and the pilot's fit, and then the time is over.
  const Outcome& slow = records.at("toy_slow ms=300").outcome();
  EXPECT_EQ(slow.status(), Outcome::STATUS_TIMEOUT);
  EXPECT_EQ(slow.reason(), "no sample: a call takes 0.3 s; --case_timeout is 0.5 s");
  EXPECT_TRUE(slow.against_definition().passed());
  const Outcome& slower = records.at("toy_slow ms=1000").outcome();
  EXPECT_EQ(slower.status(), Outcome::STATUS_TIMEOUT);
  EXPECT_EQ(slower.reason(), "setup and one run took 1 s; --case_timeout is 0.5 s");
  EXPECT_EQ(records.at("toy_mean").outcome().status(), Outcome::STATUS_OK);
}

TEST_F(MeasureTest, WhereTimeIsShortWhatIsPreparedIsTimedBeforeTheRest) {
  // Preparing takes 1 s a case: of the 4 s that are left the first two take the third and more.
  seconds_left_ = 4;
  const auto records = Measure("toy_slow:ms=1000,toy_slow:ms=1001,toy_slow:ms=1002");
  ASSERT_EQ(records.size(), 3u);
  const auto at = [this](const Activity& activity) {
    return std::find(sequence_.begin(), sequence_.end(), activity) - sequence_.begin();
  };
  EXPECT_LT(at({1, "create"}), at({0, "run"}));
  EXPECT_LT(at({0, "run"}), at({2, "create"}));
  EXPECT_LT(at({1, "run"}), at({2, "create"}));
  EXPECT_LT(at({2, "create"}), at({2, "run"}));
}

TEST_F(MeasureTest, NothingIsReportedOfWhatWasStopped) {
  stopped_ = true;
  EXPECT_TRUE(Measure("toy_mean").empty());
}

TEST_F(MeasureTest, WhatIsGoingOnIsAnnounced) {
  Measure("toy_mean");
  for (const char* what : {"create", "first run", "check", "run", "setup"}) {
    EXPECT_GT(activities_[what], 0) << what;
  }
}

TEST_F(MeasureTest, OnADeviceItsEventsAndItsMemoryAreRecorded) {
  options_.cold = true;
  const Case record = Measure("toy_device", 16, "simulator").at("toy_device");
  const Outcome& outcome = record.outcome();
  EXPECT_EQ(outcome.status(), Outcome::STATUS_OK) << outcome.reason();
  EXPECT_EQ(record.key().device(), DEVICE_TYPE_SIMULATOR);
  EXPECT_EQ(outcome.timing().clock(), Timing::CLOCK_DEVICE_EVENTS);
  EXPECT_EQ(outcome.timing().run_ns_size(), 4);
  EXPECT_GT(outcome.timing().cold_run_ns_size(), 0);
  EXPECT_TRUE(outcome.against_definition().passed());
  // The layer keeps a gain for each of two heads.
  EXPECT_EQ(outcome.statistics().at("layer_device_bytes"), 2 * sizeof(float));
  EXPECT_EQ(outcome.peak_workspace_bytes(), 2u * 16 * 17 * sizeof(float));
  EXPECT_EQ(outcome.device_peak_bytes(), 2 * sizeof(float) + outcome.input_bytes() +
                                             outcome.output_bytes() +
                                             outcome.peak_workspace_bytes());
  EXPECT_FALSE(outcome.has_device_state_before());  // the simulator has no sensors: absent, not 0
  EXPECT_FALSE(Measure("toy_device").at("toy_device").outcome().has_device_peak_bytes());
  EXPECT_EQ(RuntimeOf(Device::kSimulator).value()->allocated_bytes(), 0);
}

TEST_F(MeasureTest, WhatTheDeviceHasNoMemoryForIsARowAndTheOthersRun) {
  // 2^50 bytes: more than a process can address.
  const auto records =
      Measure("toy_device,toy_device:mib=1073741824,toy_device:shade=2", 16, "simulator");
  ASSERT_EQ(records.size(), 3u);
  const Outcome& hungry = records.at("toy_device mib=1073741824").outcome();
  EXPECT_EQ(hungry.status(), Outcome::STATUS_OUT_OF_MEMORY);
  EXPECT_THAT(hungry.reason(), HasSubstr("bytes of memory on host simulator"));
  EXPECT_EQ(records.at("toy_device").outcome().status(), Outcome::STATUS_OK);
  EXPECT_EQ(records.at("toy_device shade=2").outcome().status(), Outcome::STATUS_OK);
}

TEST_F(MeasureTest, ALaunchThatFailsIsARowAndTheOthersRun) {
  const auto records = Measure("toy_bad_launch,toy_bad_kernel,toy_device", 16, "simulator");
  EXPECT_TRUE(kept_device_);  // the simulator reports a failed kernel at once
  EXPECT_EQ(records.at("toy_bad_launch").outcome().status(), Outcome::STATUS_FAILED);
  EXPECT_THAT(records.at("toy_bad_launch").outcome().reason(),
              HasSubstr("more tasks than a grid has blocks"));
  EXPECT_EQ(records.at("toy_bad_kernel").outcome().status(), Outcome::STATUS_FAILED);
  EXPECT_EQ(records.at("toy_device").outcome().status(), Outcome::STATUS_OK);
}

TEST_F(MeasureTest, ALostDeviceLeavesTheOthersForAnotherProcess) {
  cuda_simulator::Settings settings;
  settings.errors_are_deferred = true;
  cuda_simulator::Configure(settings);
  const auto records = Measure("toy_device,toy_bad_kernel,toy_causal", 16, "simulator");
  cuda_simulator::Configure({});
  EXPECT_FALSE(kept_device_);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records.at("toy_bad_kernel").outcome().status(), Outcome::STATUS_FAILED);
  EXPECT_THAT(records.at("toy_bad_kernel").outcome().reason(), HasSubstr("TinyMeans"));
}

// What a case needs is counted as its inputs, three times its outputs (optional ones too: the check
// has its own and a copy) and twice its workspace; beside others, as one workspace and the largest
// of all. toy_mean has 64 bytes of workspace.
TEST_F(MeasureTest, ACaseMayNeedAsMuchAsTheLimitAndNotAByteMore) {
  constexpr int64_t kTensor = 2 * 16 * 8 * 4, kSums = 2 * 16 * 4;
  constexpr int64_t kAlone = 3 * kTensor + 3 * (kTensor + kSums) + 2 * 64;
  options_.memory_limit = kAlone - 1;
  const Outcome refused = Measure("toy_mean").at("toy_mean").outcome();
  EXPECT_EQ(refused.status(), Outcome::STATUS_OUT_OF_MEMORY);
  EXPECT_EQ(refused.reason(), "needs 0 GiB; --memory_limit is 0 GiB");
  options_.memory_limit = kAlone;
  EXPECT_EQ(Measure("toy_mean").at("toy_mean").outcome().status(), Outcome::STATUS_OK);
  // The first case holds its inputs, which the second has as well, and its output.
  constexpr int64_t kTogether = 3 * kTensor + kTensor + kAlone;
  for (const bool fits : {true, false}) {
    options_.memory_limit = fits ? kTogether : kTogether - 1;
    sequence_.clear();
    EXPECT_EQ(Measure("toy_mean,toy_causal").size(), 2u);
    const auto at = [this](const Activity& activity) {
      return std::find(sequence_.begin(), sequence_.end(), activity) - sequence_.begin();
    };
    EXPECT_EQ(at({1, "first run"}) < at({0, "run"}), fits);
  }
  options_.memory_limit = int64_t{5} << 30;
  EXPECT_EQ(Measure("toy_hungry:mib=10240").at("toy_hungry mib=10240").outcome().reason(),
            "needs 20 GiB; --memory_limit is 5 GiB");
}

// Besides, a backward pass has what the run keeps, the gradients of the outputs, and those of inputs
// and parameters three times: the check has its own and a copy.
TEST_F(MeasureTest, ABackwardPassMayNeedAsMuchAsTheLimitAndNotAByteMore) {
  registry_.Add(MakeTiny(TinyFault::kNone));
  TickingClock clock(1e-3);
  options_.clock = &clock;
  constexpr int64_t kTensor = 2 * 16 * 8 * 4, kSums = 2 * 16 * 4, kParameter = 2 * 4;
  pass_ = "training";
  const Outcome unlimited = Measure("tiny").at("tiny").outcome();
  ASSERT_EQ(unlimited.status(), Outcome::STATUS_OK) << unlimited.reason();
  const int64_t of_run = 3 * kTensor + 3 * (kTensor + kSums) + kParameter;
  const int64_t of_backward = kSums + (kTensor + kSums) + 3 * (3 * kTensor + kParameter);
  const int64_t workspace = static_cast<int64_t>(unlimited.peak_workspace_bytes());  // the larger
  for (const char* pass : {"backward", "training"}) {
    pass_ = pass;
    options_.memory_limit = of_run + of_backward + 2 * workspace;
    EXPECT_EQ(Measure("tiny").at("tiny").outcome().status(), Outcome::STATUS_OK) << pass;
    --options_.memory_limit;
    EXPECT_EQ(Measure("tiny").at("tiny").outcome().status(), Outcome::STATUS_OUT_OF_MEMORY) << pass;
  }
}

TEST_F(MeasureTest, WhatALayerKeepsOnTheHeapIsTold) {
  if (kIsSanitized) GTEST_SKIP() << "sanitizers have their own ideas of memory";
  const Outcome outcome = Measure("toy_hoarder:mib=3").at("toy_hoarder mib=3").outcome();
  EXPECT_NEAR(outcome.statistics().at("layer_heap_bytes"), 3 << 20, 64 << 10);
  EXPECT_EQ(Measure("toy_mean").at("toy_mean").outcome().statistics().count("layer_heap_bytes"),
            0u);
}

TEST_F(MeasureTest, ACaseIsToldAgainWhenItHasSamplesButNotMoreThanOnceASecond) {
  options_.repetitions = kIntervalSamples + 2;
  const auto samples = [this](const std::string& technique) {
    so_far_.clear();
    Measure(technique);
    std::vector<int> sizes;
    for (const Case& record : so_far_) sizes.push_back(record.outcome().timing().run_ns_size());
    return sizes;
  };
  EXPECT_THAT(samples("toy_mean"), ::testing::ElementsAre(0));  // it takes some ms in all
  // Six samples of a second and more are told, and so is the end, by when further ones were taken.
  EXPECT_THAT(samples("toy_slow:ms=1500"),
              ::testing::ElementsAre(0, kIntervalSamples, kIntervalSamples + 2));
}

TEST(Measure, AStepHangsWhenItTakesHalfOfTheTimeoutMoreOrASecondToHalfAMinute) {
  for (const auto& [timeout, hangs] :
       {std::pair(0.5, 1.5), {2.0, 3.0}, {10.0, 15.0}, {60.0, 90.0}, {100.0, 130.0}}) {
    EXPECT_DOUBLE_EQ(HangSeconds(timeout), hangs);
  }
}

TEST(Measure, StatusOfACaseFollowsTheErrorThatEndedIt) {
  EXPECT_EQ(OutcomeOf(absl::OkStatus()), Outcome::STATUS_OK);
  EXPECT_EQ(OutcomeOf(absl::UnimplementedError("")), Outcome::STATUS_UNSUPPORTED);
  EXPECT_EQ(OutcomeOf(absl::InvalidArgumentError("")), Outcome::STATUS_UNSUPPORTED);
  EXPECT_EQ(OutcomeOf(absl::NotFoundError("")), Outcome::STATUS_SKIPPED);
  EXPECT_EQ(OutcomeOf(absl::UnavailableError("")), Outcome::STATUS_SKIPPED);
  EXPECT_EQ(OutcomeOf(absl::ResourceExhaustedError("")), Outcome::STATUS_OUT_OF_MEMORY);
  EXPECT_EQ(OutcomeOf(absl::DeadlineExceededError("")), Outcome::STATUS_TIMEOUT);
  EXPECT_EQ(OutcomeOf(absl::InternalError("")), Outcome::STATUS_FAILED);
}

}  // namespace
}  // namespace tfb
