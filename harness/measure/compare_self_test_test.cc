#include "harness/measure/compare_self_test.h"

#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/testing/simulated_clock.h"
#include "harness/testing/toys.h"
#include "results/reader.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// Sweeps of toys by a simulated clock, so that all samples of what is the same are equal.
class CompareSelfTest : public ::testing::Test {
 protected:
  CompareSelfTest() {
    const ToyTime time = {&clock_, /*seconds_per_round=*/1e-4};
    AddToys(registry_, time);
    AddDenseToy(registry_, time);
    options_.cases.techniques = "dense,toy_mean,toy_causal";
    options_.cases.devices = "cpu";
    options_.cases.inputs = "gaussian";
    options_.cases.lengths = "16";
    options_.cases.head_dims = "8";
    options_.cases.threads = "1";
    options_.cases.accuracy = false;
    options_.sweep.measure.clock = &clock_;
    options_.sweep.measure.probe = [this] { clock_.Advance(5e-5); };
    options_.sweep.measure.repetitions = 15;
    options_.sweep.measure.min_time = 1e-3;
    options_.sweep.measure.cold = false;
    options_.sweep.time_budget = 0;
    options_.sweep.program = "compare_self_test";
    options_.sweep.quiet = true;
    options_.runs = 1;
    options_.slow_down = 1.25;
    options_.folder = absl::StrCat(::testing::TempDir(), "/compare_self_test_", getpid());
    std::filesystem::create_directory(options_.folder);
  }
  ~CompareSelfTest() override { std::filesystem::remove_all(options_.folder); }

  ResultSet Results(int sweep) const {
    return ReadResultFile(absl::StrCat(options_.folder, "/", sweep, ".pb")).value().results;
  }

  SimulatedClock clock_;
  Registry registry_;
  SelfTestOptions options_;
};

TEST(SelfTestReport, HasEveryCountAndIntervalsOfTheShares) {
  SelfTestOptions options;
  options.cases.lengths = "512";
  options.sweep.measure.repetitions = 201;
  options.compare.threshold = 1.05;
  options.slow_down = 1.1;
  SelfTestCounts counts;
  counts.sweeps = 61;
  counts.techniques = 15;
  counts.same_times = 1060;
  counts.slowed = counts.found = 75;
  counts.comparisons = 40;
  counts.with_slowed = counts.with_all_found = 20;
  counts.verdicts = {{Verdict::kImproved, 1},
                     {Verdict::kAmbiguous, 2},
                     {Verdict::kNotJudged, 3},
                     {Verdict::kSame, 4}};
  EXPECT_EQ(SelfTestReport(options, counts),
            "61 sweeps, 15 techniques at 512 tokens, 201 samples each; threshold 1.05\n"
            "false alarms  0 of 1060, 0.00% of times that are the same are called SLOWER\n"
            "              in 0 of 40 comparisons, 0.00% (95% interval 0.00% to 8.76%)\n"
            "              and 1 FASTER, 2 AMBIGUOUS, 4 SAME, 3 not judged\n"
            "power         75 of 75, 100.00% of techniques slowed by 10% are found\n"
            "              all of them in 20 of 20 comparisons, 100.00% (95% interval 83.89% to "
            "100.00%)\n");
  // 5 of 10: the interval is the textbook's, 23.66 % to 76.34 %.
  counts = SelfTestCounts();
  counts.slowed = 30;
  counts.found = 25;
  counts.with_slowed = 10;
  counts.with_all_found = 5;
  counts.missed = {{"dense", 3}, {"lsh", 2}};
  EXPECT_EQ(SelfTestReport(options, counts),
            "0 sweeps, 0 techniques at 512 tokens, 201 samples each; threshold 1.05\n"
            "false alarms  0 of 0, 0.00% of times that are the same are called SLOWER\n"
            "              in 0 of 0 comparisons, 0.00% (95% interval 0.00% to 79.35%)\n"
            "              and 0 FASTER, 0 AMBIGUOUS, 0 SAME, 0 not judged\n"
            "power         25 of 30, 83.33% of techniques slowed by 10% are found\n"
            "              all of them in 5 of 10 comparisons, 50.00% (95% interval 23.66% to "
            "76.34%)\n"
            "              missed dense 3 times\n"
            "              missed lsh 2 times\n");
}

TEST_F(CompareSelfTest, WhatIsSlowedIsFoundAndWhatIsTheSameIsNoAlarm) {
  options_.runs = 2;  // each slows one of the two that are no baseline
  const absl::StatusOr<SelfTestCounts> counts = RunSelfTest(options_, registry_);
  ASSERT_TRUE(counts.ok()) << counts.status();
  EXPECT_EQ(counts->sweeps, 5);
  EXPECT_EQ(counts->techniques, 2);
  EXPECT_GT(counts->same_times, 0);
  EXPECT_THAT(counts->verdicts, ElementsAre(Pair(Verdict::kSame, counts->same_times)));
  EXPECT_EQ(counts->false_alarms, 0);
  EXPECT_EQ(counts->slowed, 2);
  EXPECT_EQ(counts->found, 2);
  EXPECT_EQ(counts->comparisons, 4);
  EXPECT_EQ(counts->with_false_alarm, 0);
  EXPECT_EQ(counts->with_slowed, 2);
  EXPECT_EQ(counts->with_all_found, 2);
  EXPECT_TRUE(counts->missed.empty());
  EXPECT_TRUE(Holds(*counts));
}

TEST_F(CompareSelfTest, FalseAlarmsAndMissedTechniquesAreCounted) {
  ASSERT_TRUE(RunSelfTest(options_, registry_).ok());
  // The first two sweeps are the same, and the third has toy_causal slowed, the first by name.
  SelfTestCounts missed;
  ASSERT_TRUE(CountVerdicts(Results(1), Results(2), {"toy_mean"}, options_.compare, &missed).ok());
  EXPECT_EQ(missed.slowed, 1);
  EXPECT_EQ(missed.found, 0);
  EXPECT_EQ(missed.with_slowed, 1);
  EXPECT_EQ(missed.with_all_found, 0);
  EXPECT_THAT(missed.missed, ElementsAre(Pair("toy_mean", 1)));
  EXPECT_FALSE(Holds(missed));
  SelfTestCounts alarmed;
  ASSERT_TRUE(CountVerdicts(Results(2), Results(3), {}, options_.compare, &alarmed).ok());
  EXPECT_EQ(alarmed.false_alarms, 1);
  EXPECT_EQ(alarmed.verdicts[Verdict::kRegressed], 1);
  EXPECT_EQ(alarmed.comparisons, 1);
  EXPECT_EQ(alarmed.with_false_alarm, 1);
  EXPECT_EQ(alarmed.with_slowed, 0);
  EXPECT_GT(alarmed.same_times, 1);
  EXPECT_FALSE(Holds(alarmed));
}

TEST_F(CompareSelfTest, WhereNothingCanBeSlowedItSaysSo) {
  options_.cases.techniques = "dense";
  const absl::Status status = RunSelfTest(options_, registry_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("none of them is held against another one"));
}

TEST(Holds, OneFalseAlarmInAHundredAndOneMissInTwenty) {
  SelfTestCounts counts;
  counts.same_times = 200;
  counts.false_alarms = 2;
  counts.slowed = 20;
  counts.found = 19;
  EXPECT_TRUE(Holds(counts));
  counts.found = 18;
  EXPECT_FALSE(Holds(counts));
  counts.found = 20;
  counts.false_alarms = 3;
  EXPECT_FALSE(Holds(counts));
}

}  // namespace
}  // namespace tfb
