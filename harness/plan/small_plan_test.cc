// Plans of a few cases, whose every visit is foretold by hand.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/safetensors.h"
#include "gtest/gtest.h"
#include "harness/contestants/contestant.h"
#include "harness/contestants/shared_library.h"
#include "harness/plan/cases.h"
#include "harness/plan/sample_plan.h"
#include "harness/plan/sweep_plan.h"
#include "harness/testing/toys.h"

namespace tfb {
namespace {

// Returns what a plan says of its next visit: "until 72: 3 (share 2, check 2, 11 samples)".
std::string NextOf(SweepPlan& plan, double elapsed_seconds) {
  const std::optional<Visit> visit = plan.Next(elapsed_seconds);
  std::string text;
  for (const LeftOut& left_out : plan.TakeLeftOut()) {
    absl::StrAppend(&text, "without ", absl::StrJoin(left_out.cases, ", "), ": ", left_out.reason,
                    "\n");
  }
  if (!visit.has_value()) return text + "done";
  absl::StrAppend(&text, visit->repeats() ? "again " : "", "until ", visit->deadline(), ":");
  for (const Visit::Item& item : visit->items()) {
    absl::StrAppend(&text, " ", item.index(), " (share ", item.share_seconds(), ", check ",
                    item.check_seconds(), ", ", item.repetitions(), " samples)");
  }
  return text;
}

// toy_mean and its dense counterpart on a file of five tokens and on 64, 128 and 256 tokens: the
// cases 0 and 1, 2 and 3, 4 and 5, 6 and 7. Of a budget of 60 s accuracy has 20, a tenth of which
// is the share of its two cases, and a fifth of the whole is that of the other six: 1 s and 2 s.
class SmallPlan : public ::testing::Test {
 protected:
  SmallPlan() {
    AddToys(registry_);
    AddDenseToy(registry_);
    NamedTensors tensors;
    for (const char* name : {"q", "k", "v"}) {
      tensors[name] = Tensor(DType::kF32, {1, 2, 5, 8});
      Fill(tensors[name].view(), 1);
    }
    const std::string path = ::testing::TempDir() + "/five.safetensors";
    EXPECT_TRUE(WriteSafetensors(path, tensors).ok());
    CaseFlags flags;
    flags.techniques = "toy_mean";
    flags.inputs = path;
    flags.causal = "true";
    flags.devices = "cpu";
    flags.threads = "1";
    cases_ = MakeCases(flags, registry_, "").value();
    flags.inputs = "gaussian";
    flags.lengths = "64:256";
    const std::vector<Job> scaling = MakeCases(flags, registry_, "").value();
    cases_.insert(cases_.end(), scaling.begin(), scaling.end());
    EXPECT_EQ(cases_.size(), 8u);
    options_.time_budget = 60;
    options_.repetitions = 33;
  }

  SweepPlan Plan(std::vector<bool> left = {}) const {
    left.resize(cases_.size(), true);
    return SweepPlan(cases_, left, options_);
  }
  // Returns what a visit finds: samples, seconds of a call, of the preparation and of its check, and
  // the half width of the interval.
  static Visited Found(int samples, double call, double preparation, double check = 0,
                       double half_width = 0) {
    return {preparation, check, call, samples, half_width};
  }

  Registry registry_;
  std::vector<Job> cases_;
  SweepPlanOptions options_;
};

// Every pass is foretold from its own times, and before there are any by its own effort.
TEST_F(SmallPlan, ForetellsEachPassFromItsOwnTimes) {
  CaseFlags flags;
  flags.techniques = "toy_mean";
  flags.inputs = "gaussian";
  flags.lengths = "512,1024";
  flags.passes = "forward,training";
  flags.devices = "cpu";
  flags.threads = "1";
  flags.counterparts = false;
  cases_ = MakeCases(flags, registry_, "").value();
  ASSERT_EQ(cases_.size(), 4u);
  options_.time_budget = 0;
  options_.repetitions = 11;
  options_.flush_seconds = 0;
  SweepPlan plan = Plan();
  // Of a case of which nothing is known: 0.2 s times 1 + tokens / 512, of which a training step has
  // 3.5; the pilot, 11 samples and six cold runs of 10 ms, and the setups of calls of 0 s.
  const double effort = 0.2 * ((1 + 1) + (1 + 2) + (1 + 3.5) + (1 + 7));
  const double timing = plan.ExpectedSeconds(0) - effort;
  EXPECT_GE(timing, 4 * 12 * 0.01 - 1e-9);
  ASSERT_EQ(cases_[0].pass, Case::PASS_FORWARD);
  ASSERT_EQ(cases_[1].pass, Case::PASS_TRAINING);
  plan.Note(0, Found(11, 0, 3));
  // The start of a run of 1024 is foretold as it was, and that of its training steps is not.
  EXPECT_NEAR(plan.ExpectedSeconds(0), 3 + 0.2 * ((1 + 3.5) + (1 + 7)) + timing * 3 / 4, 1e-9);
  plan.Note(1, Found(11, 0, 10));
  EXPECT_NEAR(plan.ExpectedSeconds(0), 3 + 10 + timing * 2 / 4, 1e-9);
}

// Somebody else's code takes 20 s to start and compile, and then 1 ms a call and 10 ms a check on 64
// tokens. The start is foretold as it was, calls and checks by their growth, and each sample has a
// trial of a call and a check.
TEST_F(SmallPlan, ForetellsTheStartOfSomebodyElsesCodeApartFromItsCalls) {
  ASSERT_EQ(AddContestants(std::make_shared<SharedLibrary>("theirs.so"),
                           R"([{"name": "mean", "definition": "toy_mean"}])", &registry_),
            absl::OkStatus());
  CaseFlags flags;
  flags.techniques = "mean@theirs";
  flags.inputs = "gaussian";
  flags.lengths = "64:256";
  flags.devices = "cpu";
  flags.threads = "1";
  flags.counterparts = flags.ours = false;
  cases_ = MakeCases(flags, registry_, "").value();
  ASSERT_EQ(cases_.size(), 3u);
  options_.time_budget = 600;
  // Check and call, the pilot of a sample and its trial, 11 samples with a warm-up and a trial, and
  // six cold runs after 50 ms each: for `factor` times 64 tokens.
  const auto timing = [](double factor) {
    const double call = 0.001 * factor, trial = 0.011 * factor;
    return trial + (0.01 + trial) + 11 * (0.01 + call + trial) + 6 * (1.5 * call + 0.05);
  };
  SweepPlan plan = Plan();
  Visited found = Found(11, 0.001, 20 + 0.011, 0.01);
  found.setup_seconds = 7;  // is a part of the start
  plan.Note(0, found);
  EXPECT_NEAR(plan.ExpectedSeconds(0), 20 + timing(2) + 20 + timing(4), 1e-9);
  // It is compiled sooner, for another length.
  plan.Note(1, Found(11, 0.002, 10 + 0.022, 0.02));
  EXPECT_NEAR(plan.ExpectedSeconds(0), 10 + timing(4), 1e-9);
  // A start that grows is foretold to grow on.
  SweepPlan growing = Plan();
  growing.Note(0, Found(11, 0.001, 20 + 0.011, 0.01));
  growing.Note(1, Found(11, 0.002, 60 + 0.022, 0.02));
  EXPECT_NEAR(growing.ExpectedSeconds(0), 180 + timing(4), 1e-9);
}

// toy_mean or toy_hidden, whose calls are stated to grow as the tokens, or their dense counterpart,
// whose calls grow as their square, on three lengths, without a budget. Each test states the parts of
// the times that visits found, and of those that are foretold.
class Foretold : public SmallPlan {
 protected:
  // The parts of a visit.
  struct Parts {
    double start = 0, input = 0, setup = 0, check = 0, call = 0;
  };

  void Choose(const std::string& technique, const std::string& passes = "forward",
              const std::string& lengths = "64:256") {
    CaseFlags flags;
    flags.techniques = technique;
    flags.inputs = "gaussian";
    flags.lengths = lengths;
    flags.passes = passes;
    flags.devices = "cpu";
    flags.threads = "1";
    flags.counterparts = false;
    cases_ = MakeCases(flags, registry_, "").value();
    ASSERT_EQ(cases_.size(), 3u);
    // Whatever its options, a counterpart is taken to grow as the square.
    for (Job& one : cases_) one.added = technique == "dense";
    options_.time_budget = 0;
    options_.repetitions = 11;
  }
  Visited FoundParts(const Parts& parts) const {
    Visited found = Found(11, parts.call, 0, parts.check);
    found.preparation_seconds =
        parts.start + parts.input + parts.setup + parts.check + calls_ * parts.call;
    found.input_seconds = parts.input;
    found.setup_seconds = parts.setup;
    return found;
  }
  // The time of a visit with all samples: a pilot and 11 samples, each with a warm-up where it is
  // short, six setups, cold runs and flushes of 50 ms.
  double SecondsOf(const Parts& parts) const {
    const double warming = parts.call < 0.05 ? parts.call : 0;
    const double sample = std::max(0.01, parts.call);
    return parts.start + parts.input + parts.setup + parts.check + calls_ * parts.call + sample +
           11 * (sample + warming) + 6 * (std::max(parts.setup, parts.call) + parts.call) +
           6 * (1.5 * parts.call + 0.05);
  }
  // Expects the times of the longest after those of the two shorter.
  void Expect(const Parts& first, const Parts& second, const Parts& third) const {
    SweepPlan plan = Plan();
    plan.Note(0, FoundParts(first));
    plan.Note(1, FoundParts(second));
    EXPECT_NEAR(plan.ExpectedSeconds(0), SecondsOf(third), 1e-9);
  }
  // Expects the times of the longer two after those of the shortest.
  void ExpectOfOne(const Parts& first, const Parts& second, const Parts& third) const {
    SweepPlan plan = Plan();
    plan.Note(0, FoundParts(first));
    EXPECT_NEAR(plan.ExpectedSeconds(0), SecondsOf(second) + SecondsOf(third), 1e-9);
  }

  double calls_ = 1;  // in the preparation
};

TEST_F(Foretold, FromOneLengthTheStartStaysAndTheOtherPartsGrowByTheirLaws) {
  Choose("dense");
  ExpectOfOne({0.4, 0.01, 0.001, 0.1, 0.002}, {0.4, 0.02, 0.002, 0.2, 0.008},
              {0.4, 0.04, 0.004, 0.4, 0.032});
  Choose("toy_mean");
  ExpectOfOne({0.4, 0.01, 0.001, 0.1, 0.02}, {0.4, 0.02, 0.002, 0.2, 0.04},
              {0.4, 0.04, 0.004, 0.4, 0.08});
}

// Each part of 128 tokens is the fixed part and twice or four times the growing part of 64 tokens.
TEST_F(Foretold, FromTwoLengthsEachPartIsAFixedOneAndOneThatGrows) {
  Choose("dense");
  const auto at = [](double linear, double square) {
    return Parts{0.3 + 0.1 * linear, 0.02 + 0.01 * linear, 0.01 + 0.2 * linear, 0.1 + 0.05 * linear,
                 0.06 + 0.01 * square};
  };
  Expect(at(1, 1), at(2, 4), at(4, 16));
  Choose("toy_mean");
  Expect(at(1, 1), at(2, 2), at(4, 4));
}

// Calls of 0.1 and 0.2 s may be 1/15 s + 1/30 s n^2, or linear: their exponent is halfway from 1 to 2.
TEST_F(Foretold, ACallThatMayHaveALinearPartGrowsHalfwayToItsGrowth) {
  Choose("dense");
  Expect({0, 0, 0, 0, 0.1}, {0, 0, 0, 0, 0.2}, {0, 0, 0, 0, 0.2 * std::pow(2, 1.5)});
  Choose("toy_mean");
  Expect({0, 0, 0, 0, 0.1}, {0, 0, 0, 0, 0.15}, {0, 0, 0, 0, 0.25});
}

// There is no such doubt of a + b n: 0.05 s and 0.1 s for each 64 tokens.
TEST_F(Foretold, WhatIsFixedAndLinearStaysSoOverEightTimesTheLength) {
  Choose("toy_mean", "forward", "64,128,1024");
  Expect({0.15, 0, 0, 0, 0.15}, {0.25, 0, 0, 0, 0.25}, {1.65, 0, 0, 0, 1.65});
  Choose("dense", "forward", "64,128,1024");
  Expect({0, 0, 0, 0, 0.15}, {0, 0, 0, 0, 0.25},
         {0, 0, 0, 0, 0.25 * std::pow(8, (std::log2(0.25 / 0.15) + 2) / 2)});
}

TEST_F(Foretold, WhatHasNotGrownOrHasBecomeLessStays) {
  Choose("dense");
  const Parts same = {0.4, 0.01, 0.02, 0.1, 0.002};
  Expect(same, same, same);
  // The first length has loaded the kernels.
  Expect({2, 0.02, 0.03, 0.2, 0.003}, same, same);
}

TEST_F(Foretold, WhatGrowsFasterThanItsLawIsAPowerUpToOneMore) {
  Choose("dense");
  const auto times = [](double start, double input, double setup, double check, double call) {
    return Parts{0.05 * start, 0.05 * input, 0.05 * setup, 0.05 * check, 0.05 * call};
  };
  // 2^1.5 for what is linear and 2^2.5 for the call.
  const double less = std::pow(2, 1.5), more = std::pow(2, 2.5);
  Expect(times(1, 1, 1, 1, 1), times(less, less, less, less, more), times(8, 8, 8, 8, 32));
  // 16 times is more than 2^2 and than 2^3.
  Expect(times(1, 1, 1, 1, 1), times(16, 16, 16, 16, 16), times(64, 64, 64, 64, 128));
  // Without a time of the shorter length there is one alone.
  Expect({}, {0.4, 0.01, 0.001, 0.1, 0.002}, {0.4, 0.02, 0.002, 0.2, 0.008});
}

TEST_F(Foretold, TheCheckOfANetworkGrowsAsTheSquare) {
  Choose("toy_hidden");
  ExpectOfOne({0, 0, 0, 0.1, 0.001}, {0, 0, 0, 0.4, 0.002}, {0, 0, 0, 1.6, 0.004});
  Expect({0, 0, 0, 0.1 + 0.01, 0.001}, {0, 0, 0, 0.1 + 0.04, 0.002}, {0, 0, 0, 0.1 + 0.16, 0.004});
  // That is the most that a check grows.
  Expect({0, 0, 0, 0.05, 0.001}, {0, 0, 0, 0.4, 0.002}, {0, 0, 0, 1.6, 0.004});
}

// CheckForecast takes 0.4 s at 64 tokens for 6.4 s at 256, which is beyond 5 s.
TEST_F(Foretold, ACheckThatIsGoingToBeLeftOutTakesNoTime) {
  Choose("toy_mean");
  ExpectOfOne({0, 0, 0, 0.4, 0.001}, {0, 0, 0, 0.8, 0.002}, {0, 0, 0, 0, 0.004});
  Expect({0, 0, 0, 0.6, 0.001}, {0, 0, 0, 1.2, 0.002}, {0, 0, 0, 2.4, 0.004});
  Expect({0, 0, 0, 0.6, 0.001}, {0, 0, 0, 1.3, 0.002}, {0, 0, 0, 0, 0.004});
  Expect({0, 0, 0, 0.6, 0.001}, {0, 0, 0, 0, 0.002}, {0, 0, 0, 0, 0.004});
}

TEST_F(Foretold, ABackwardPassHasARunBeforeIt) {
  Choose("toy_mean", "backward");
  calls_ = 1.4;
  ExpectOfOne({0.1, 0, 0, 0, 0.1}, {0.1, 0, 0, 0, 0.2}, {0.1, 0, 0, 0, 0.4});
  Choose("toy_mean", "training");
  calls_ = 1;
  ExpectOfOne({0.1, 0, 0, 0, 0.1}, {0.1, 0, 0, 0, 0.2}, {0.1, 0, 0, 0, 0.4});
}

// A GPU has graphs and hardly flushes.
TEST_F(Foretold, OnAGpuRunsAreTimedAsGraphsTooAndFlushesTakeNoTime) {
  Choose("toy_mean");
  const Parts same = {0.4, 0, 0, 0, 0.02};
  const double on_cpu = SecondsOf(same);
  for (Job& one : cases_) one.device = Device::kSimulator;
  Expect(same, same, same);
  for (Job& one : cases_) one.device = Device::kCuda;
  for (const bool graphs : {true, false}) {
    options_.graphs = graphs;
    SweepPlan plan = Plan();
    plan.Note(0, FoundParts(same));
    plan.Note(1, FoundParts(same));
    EXPECT_NEAR(plan.ExpectedSeconds(0), on_cpu - 6 * 0.05 + (graphs ? 6 * 0.02 : 0), 1e-9);
  }
}

TEST_F(Foretold, WithoutColdRunsNeitherTheyNorFlushesTakeTime) {
  Choose("toy_mean");
  const Parts same = {0.4, 0, 0, 0, 0.02};
  const double with_cold_runs = SecondsOf(same);
  options_.cold = false;
  SweepPlan plan = Plan();
  plan.Note(0, FoundParts(same));
  plan.Note(1, FoundParts(same));
  EXPECT_NEAR(plan.ExpectedSeconds(0), with_cold_runs - 6 * (0.05 + 1.5 * 0.02), 1e-9);
}

TEST_F(SmallPlan, GoesFromAccuracyOverTheLengthsToRepetitions) {
  SweepPlan plan = Plan();
  EXPECT_EQ(NextOf(plan, 0),
            "until 20: 0 (share 1, check 0, 1 samples) 1 (share 1, check 0, 1 samples)");
  plan.Note(0, Found(1, 0.01, 0.5));
  plan.Note(1, Found(1, 0.01, 0.5));
  // Nothing is known of scaling cases: each takes 0.2 s, times 1 + tokens / 512, and what it is
  // timed for. With a call of 0 s that is the pilot of 10 ms, 11 samples of 10 ms, and six cold
  // runs after 50 ms each: 0.42 s.
  EXPECT_NEAR(plan.ExpectedSeconds(1), 2 * (0.2 * (3 + 0.125 + 0.25 + 0.5) + 3 * 0.42), 1e-9);
  EXPECT_NEAR(plan.ExpectedSeconds(59), 1, 1e-9);
  EXPECT_EQ(plan.ExpectedSeconds(61), 0);
  EXPECT_EQ(NextOf(plan, 1),
            "until 72: 2 (share 2, check 2, 11 samples) 3 (share 2, check 2, 11 samples)");
  plan.Note(2, Found(11, 0.1, 0.5, 0.25, 0.03));
  plan.Note(3, Found(3, 0.3, 2, 1, 0.1));
  EXPECT_EQ(NextOf(plan, 10),
            "until 72: 4 (share 2, check 2, 11 samples) 5 (share 2, check 2, 11 samples)");
  plan.Note(4, Found(11, 0.2, 1, 0.5, 0.02));
  plan.Note(5, Found(6, 1.2, 8, 1, 0.04));
  // All of toy_mean grows as its tokens: preparation 2 s, calls of 0.4 s; the pilot is one call, four
  // samples are the fewest, and no setup and no cold run fits a fifth of it.
  // The calls of dense grow with the square, to 4.8 s. Its start, 0.7 s and 5.8 s, does not grow
  // faster than that, to 23.2 s. A check that may take up to 4 s is beyond the 2 s of the visit.
  const double expected = (2 + 0.4 + 4 * 0.4) + (23.2 + 4.8 + 4.8 + 4 * 4.8);
  EXPECT_NEAR(plan.ExpectedSeconds(0), expected, 1e-9);
  EXPECT_EQ(NextOf(plan, 20),
            "without 6, 7: 256 tokens: left out for all techniques alike; 256 tokens would take "
            "about 1:04 and 40 s of --time_budget=1:00 are left\n"
            "again until 60: 2 (share 4, check 2, 11 samples) 3 (share 4, check 2, 11 samples)");
}

TEST_F(SmallPlan, RepetitionsKeepToTheBudgetAndToTheSamplesThatAreWanted) {
  // Of the last length alone is anything left.
  SweepPlan plan = Plan({false, false, false, false, false, false});
  // The share of each of the two cases is 0.2 * 60 / 2 s.
  EXPECT_EQ(NextOf(plan, 0),
            "until 72: 6 (share 6, check 6, 11 samples) 7 (share 6, check 6, 11 samples)");
  plan.Note(6, Found(11, 1, 3, 2, 0.05));
  plan.Note(7, Found(11, 2, 5, 4, 0.01));
  // A visit with twice the share of 6 s: 7 samples of 1 s fit 0.6 of it, a setup of 2 s 0.2 of it,
  // a cold run of 1.55 s likewise. With the pilot, and what is prepared without a check, that is
  // 1 + 1 + 7 + 2 + 1.55 s; of the counterpart 1 + 2 + 4 * 2 s and no more. 1.15 times 23.55 s fit
  // in 27.1 s, and not in 27.0 s.
  EXPECT_EQ(NextOf(plan, 33.0), "done");
  EXPECT_EQ(NextOf(plan, 32.9),
            "again until 60: 6 (share 12, check 6, 11 samples) 7 (share 12, check 6, 11 samples)");
  // Where the counterpart has never been visited it is not taken along.
  SweepPlan alone = Plan({false, false, false, false, false, false, true, false});
  EXPECT_EQ(NextOf(alone, 0), "until 72: 6 (share 12, check 12, 11 samples)");
  alone.Note(6, Found(11, 1, 3, 2, 0.05));
  EXPECT_EQ(NextOf(alone, 1), "again until 60: 6 (share 24, check 12, 11 samples)");
  alone.Note(6, Found(32, 1, 3, 2, 0.05));
  EXPECT_EQ(NextOf(alone, 1), "again until 60: 6 (share 24, check 12, 11 samples)");
  alone.Note(6, Found(32, 1, 3, 2, 0.02));
  EXPECT_EQ(NextOf(alone, 1), "done");  // narrow enough
  alone.Note(6, Found(5, 1, 3, 2, 0));
  EXPECT_NE(NextOf(alone, 1), "done");  // too few for an interval
  alone.Note(6, Found(33, 1, 3, 2, 0.05));
  EXPECT_EQ(NextOf(alone, 1), "done");  // as many as are wanted
  for (int visit = 6; visit <= 10; ++visit) {
    alone.Note(6, Found(20, 1, 3, 2, 0.05));
    EXPECT_EQ(NextOf(alone, 1) == "done", visit == 10) << visit;
  }
}

TEST_F(SmallPlan, TheWidestIntervalComesFirstAndTooFewSamplesBeforeAll) {
  SweepPlan plan = Plan({false, false});
  const auto note = [&](const std::vector<Visited>& found) {
    for (size_t i = 0; i < found.size(); ++i) plan.Note(2 + i, found[i]);
  };
  for (int length = 0; length < 3; ++length) NextOf(plan, 0);
  const auto next = [&] {
    const Visit visit = *plan.Next(0);
    EXPECT_TRUE(visit.repeats());
    return visit.items(0).index();
  };
  const Visited narrow = Found(11, 1e-3, 0.01, 0, 0.001);
  note({Found(11, 1e-3, 0.01, 0, 0.05), narrow, Found(11, 1e-3, 0.01, 0, 0.06), narrow, narrow,
        narrow});
  EXPECT_EQ(next(), 4u);
  note(
      {Found(11, 1e-3, 0.01, 0, 0.05), narrow, narrow, narrow, Found(5, 1e-3, 0.01, 0, 0), narrow});
  EXPECT_EQ(next(), 6u);
  note({Found(4, 1e-3, 0.01, 0, 0.05), narrow, narrow, narrow, Found(5, 1e-3, 0.01, 0, 0.9),
        narrow});
  EXPECT_EQ(next(), 2u);
}

TEST_F(SmallPlan, ADeadlineThatIsPassedLeavesOutTheRestOfItsKind) {
  SweepPlan plan = Plan();
  EXPECT_EQ(NextOf(plan, 20),
            "without 0, 1: file five.safetensors: left out for all techniques alike; file "
            "five.safetensors would take about 1 s and 0 s of --time_budget=1:00 are left for "
            "accuracy\n"
            "until 72: 2 (share 2, check 2, 11 samples) 3 (share 2, check 2, 11 samples)");
  plan.Note(2, Found(11, 1e-3, 0.01));
  plan.Note(3, Found(11, 1e-3, 0.01));
  EXPECT_EQ(NextOf(plan, 21),
            "until 72: 4 (share 2, check 2, 11 samples) 5 (share 2, check 2, 11 samples)");
  Visit visit;
  visit.set_deadline(19.9);
  EXPECT_EQ(plan.DeadlineReason(visit), "accuracy's third of the time budget of 1:00 was spent");
  visit.set_deadline(60);
  EXPECT_EQ(plan.DeadlineReason(visit), "the time budget of 1:00 was spent");
  EXPECT_EQ(NextOf(plan, 73),
            "without 4, 5: the time budget of 1:00 was spent\n"
            "without 6, 7: 256 tokens: left out for all techniques alike; 256 tokens would take "
            "about 2 s and 0 s of --time_budget=1:00 are left\ndone");

  // Rounds of a group that begin behind the deadline.
  options_.rounds = 2;
  SweepPlan in_rounds = Plan({false, false});
  EXPECT_EQ(NextOf(in_rounds, 0),
            "until 72: 2 (share 1, check 1, 11 samples) 3 (share 1, check 1, 11 samples)");
  in_rounds.Note(2, Found(11, 1e-3, 0.01));
  EXPECT_EQ(NextOf(in_rounds, 72),
            "without 2, 3: the time budget of 1:00 was spent\n"
            "without 4, 5, 6, 7: 128 tokens, 256 tokens: left out for all techniques alike; 128 "
            "tokens would take about 2 s and 0 s of --time_budget=1:00 are left\ndone");
}

// Without a budget a visit of three takes 11 of the 33 samples of 1 s, and six setups and cold runs, of 2 s
// and of 1.5 s and a flush; before them the case is prepared for 1 s and tried for 1 s.
TEST_F(SmallPlan, WhatIsExpectedIsOfTheVisitsThatAreLeft) {
  options_.time_budget = 0;
  options_.rounds = 3;
  SweepPlan plan = Plan({false, false, true, false, false, false, false, false});
  plan.Note(2, Found(11, 1, 1));
  const double visit = 1 + 1 + 11 + 6 * 2 + 6 * (1.5 + 0.05);
  EXPECT_NEAR(plan.ExpectedSeconds(100), 2 * visit, 1e-9);
  plan.Note(2, Found(22, 1, 1));
  EXPECT_NEAR(plan.ExpectedSeconds(100), visit, 1e-9);
  options_.takes_turns = true;
  SweepPlan in_turns = Plan({false, false, true, false, false, false, false, false});
  in_turns.Note(2, Found(11, 1, 1));
  EXPECT_NEAR(in_turns.ExpectedSeconds(100), 2 * 2 * visit, 1e-9);
  plan.Note(2, Found(33, 1, 1));
  EXPECT_EQ(plan.ExpectedSeconds(100), 0);
}

TEST_F(SmallPlan, AnotherBuildChoosesTheGroupsAndEachVisitTakesTwice) {
  options_.takes_turns = true;
  options_.rounds = 3;
  SweepPlan plan = Plan();
  // Half of the shares in three rounds.
  const Visit visit = plan.VisitGroup(GroupKey(cases_[4]));
  ASSERT_EQ(visit.items_size(), 2);
  EXPECT_EQ(visit.items(0).index(), 4u);
  EXPECT_DOUBLE_EQ(visit.items(0).share_seconds(), 2.0 / 6);
  EXPECT_DOUBLE_EQ(visit.items(0).check_seconds(), 2.0 / 6);
  EXPECT_EQ(visit.items(0).repetitions(), 11);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(plan.VisitGroup(GroupKey(cases_[4])).items_size(), 2);
    plan.Note(4, Found(11, 1e-3, 0.01, 0, 0.5));
    plan.Note(5, Found(11, 1e-3, 0.01, 0, 0.5));
  }
  EXPECT_EQ(plan.VisitGroup(GroupKey(cases_[4])).items_size(), 0);
  EXPECT_EQ(plan.VisitGroup("none").items_size(), 0);
}

TEST(SamplePlan, HasWhatFitsThePartsOfTheShareByHand) {
  struct Expected {
    double call, share, flush;
    int runs, setups, colds, streams;
    double seconds;
  };
  // Parts of the share: 0.6 for runs, 0.2 for setups of two calls, 0.2 for cold runs of 1.5 calls and
  // a flush, 0.4 for streams of two calls. A run lasts 10 ms or a call, and one call more where that
  // is below 50 ms.
  for (const Expected& e : std::vector<Expected>{
           {0.001, 1, 0.04, 33, 6, 4, 6, 33 * 0.011 + 6 * 0.002 + 4 * 0.0415 + 6 * 0.002},
           {0.049, 1, 0.04, 6, 2, 1, 4, 6 * 0.098 + 2 * 0.098 + 0.1135 + 4 * 0.098},
           {0.05, 1.01, 0.04, 12, 2, 1, 4, 12 * 0.05 + 2 * 0.1 + 0.115 + 4 * 0.1},
           {0.09, 1, 0, 6, 1, 1, 2, 6 * 0.09 + 0.18 + 0.135 + 2 * 0.18},
           {0.11, 1, 0, 5, 0, 1, 1, 5 * 0.11 + 0.165 + 0.22},
           {1, 1, 0, 4, 0, 0, 0, 4},
           {1, 0, 0, 33, 6, 6, 6, 33 + 12 + 9 + 12}}) {
    SampleWishes wishes;
    wishes.repetitions = 33;
    wishes.stream = true;
    wishes.flush_seconds = e.flush;
    const SamplePlan plan = PlanSamples(wishes, e.call, e.share);
    EXPECT_EQ(plan.runs, e.runs) << e.call;
    EXPECT_EQ(plan.setups, e.setups) << e.call;
    EXPECT_EQ(plan.colds, e.colds) << e.call;
    EXPECT_EQ(plan.streams, e.streams) << e.call;
    EXPECT_EQ(plan.graphs, 0) << e.call;
    EXPECT_NEAR(plan.seconds, e.seconds, 1e-9) << e.call;
    wishes.setup = wishes.cold = wishes.stream = false;
    const SamplePlan runs = PlanSamples(wishes, e.call, e.share);
    EXPECT_EQ(runs.runs, e.runs);
    EXPECT_EQ(runs.setups + runs.colds + runs.streams, 0);
  }
  // Graphs of a run: a fifth of the share, each of 10 ms or a call.
  SampleWishes graphs;
  graphs.setup = graphs.cold = false;
  graphs.graph = true;
  EXPECT_EQ(PlanSamples(graphs, 0.001, 1).graphs, kIntervalSamples);
  EXPECT_NEAR(PlanSamples(graphs, 0.001, 1).seconds, 11 * 0.011 + 6 * 0.01, 1e-9);
  EXPECT_EQ(PlanSamples(graphs, 0.09, 1).graphs, 2);
  EXPECT_EQ(PlanSamples(graphs, 0.3, 1).graphs, 0);
  SampleWishes few;
  few.repetitions = 5;
  EXPECT_EQ(PlanSamples(few, 0.001, 1).runs, 5);
  // A setup that is known to take longer than a call has fewer samples, or none.
  few.setup_seconds = 0.099;
  EXPECT_EQ(PlanSamples(few, 0.001, 1).setups, 2);
  few.setup_seconds = 10;
  EXPECT_EQ(PlanSamples(few, 0.001, 1).setups, 0);
  few.setup_seconds = 0;
  // The time of judging a sample is a part of it.
  few.repetitions = 33;
  few.trial_seconds = 0.089;
  EXPECT_EQ(PlanSamples(few, 0.001, 1).runs, 6);
  EXPECT_NEAR(PlanSamples(few, 0.001, 1).seconds,
              6 * 0.1 + kIntervalSamples * 0.002 + kIntervalSamples * 0.0015, 1e-9);
  // A call that takes no time at all fills the share no less than one of a nanosecond.
  EXPECT_EQ(PlanSamples(few, 0, 1e-3).setups, kIntervalSamples);
}

TEST(SamplePlan, KeepsToTheShareButForFourRuns) {
  SampleWishes wishes;
  wishes.repetitions = 33;
  wishes.flush_seconds = 0.04;
  for (const double call : {1e-5, 1e-3, 0.02, 0.1, 1.0, 10.0}) {
    for (const double share : {0.01, 0.1, 0.5, 2.0, 20.0}) {
      const SamplePlan plan = PlanSamples(wishes, call, share);
      EXPECT_GE(plan.runs, kFewestSamples);
      EXPECT_LE(plan.runs, 33);
      const double four = kFewestSamples * 2 * std::max(call, wishes.min_time);
      EXPECT_LE(plan.seconds, share + four) << call << " s a call, " << share << " s";
    }
  }
  const SamplePlan all = PlanSamples(wishes, 1.0, 0);
  EXPECT_EQ(all.runs, 33);
  EXPECT_EQ(all.setups, kIntervalSamples);
  EXPECT_EQ(all.colds, kIntervalSamples);
  wishes.repetitions = 2;
  EXPECT_EQ(PlanSamples(wishes, 1.0, 0.1).runs, 2);
}

}  // namespace
}  // namespace tfb
