// Sweeps by a simulated clock, in this process: cases that are slow, hang, or exceed the budget.
#include <unistd.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/measure/sweep.h"
#include "harness/plan/sample_plan.h"
#include "harness/testing/simulated_clock.h"
#include "harness/testing/toys.h"
#include "results/reader.h"

namespace tfb {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class SweepByClock : public ::testing::Test {
 protected:
  SweepByClock() {
    const ToyTime time = {&clock_, /*seconds_per_round=*/1e-3};
    AddToys(registry_, time);
    AddDenseToy(registry_, time);
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    options_.output = absl::StrCat(::testing::TempDir(), "/", test->name(), "_", getpid(), ".pb");
    unlink(options_.output.c_str());
    options_.measure.clock = &clock_;
    options_.measure.probe = [this] { clock_.Advance(5e-5); };
    options_.measure.repetitions = 3;
    options_.measure.min_time = 1e-3;
    options_.measure.case_timeout = 0;
    options_.measure.cold = false;
    options_.measure.registry = &registry_;
    options_.program = "sweep";
    options_.quiet = true;
  }

  int Sweep(const std::string& techniques, const std::string& lengths) {
    CaseFlags flags;
    flags.techniques = techniques;
    flags.devices = "cpu";
    flags.lengths = lengths;
    flags.inputs = "gaussian";
    flags.heads = "2";
    flags.head_dims = "8";
    flags.threads = "1";
    flags.counterparts = false;
    cases_ = MakeCases(flags, registry_, "").value();
    const double begin = clock_.Seconds();
    const int exit_status = RunSweep(options_, cases_);
    elapsed_ = clock_.Seconds() - begin;
    return exit_status;
  }

  // Returns the outcomes of the records that count, by "technique tokens".
  std::map<std::string, Outcome> Outcomes() {
    std::map<std::string, Outcome> outcomes;
    const absl::StatusOr<ResultFile> file = ReadResultFile(options_.output);
    EXPECT_TRUE(file.ok()) << file.status();
    if (!file.ok()) return outcomes;
    records_ = file->results.cases_size();
    for (const auto& [key, record] : CasesByKey(file->results)) {
      outcomes[absl::StrCat(record->key().technique(), " ",
                            record->key().problem().query_tokens())] = record->outcome();
    }
    return outcomes;
  }

  SimulatedClock clock_;
  Registry registry_;
  SweepOptions options_;
  std::vector<Job> cases_;
  double elapsed_ = 0;
  int records_ = 0;  // of the file that Outcomes has read, superseded ones included
};

TEST_F(SweepByClock, ASlowCaseIsARowAndTheNextCaseRuns) {
  options_.measure.case_timeout = 10;
  EXPECT_EQ(Sweep("toy_slow:ms=11000,toy_mean", "16"), 0);
  auto outcomes = Outcomes();
  EXPECT_EQ(outcomes["toy_slow 16"].status(), Outcome::STATUS_TIMEOUT);
  EXPECT_THAT(outcomes["toy_slow 16"].reason(), HasSubstr("--case_timeout is 10 s"));
  EXPECT_EQ(outcomes["toy_mean 16"].status(), Outcome::STATUS_OK);
}

TEST_F(SweepByClock, AHangingCaseIsARowAndTheNextCaseRuns) {
  options_.measure.case_timeout = 10;
  options_.time_budget = 0;  // each hang lasts an hour
  EXPECT_EQ(Sweep("toy_hang,toy_mean", "16:32"), 0);
  auto outcomes = Outcomes();
  for (const std::string tokens : {" 16", " 32"}) {
    EXPECT_EQ(outcomes["toy_hang" + tokens].status(), Outcome::STATUS_TIMEOUT);
    EXPECT_EQ(outcomes["toy_hang" + tokens].reason(),
              "\"first run\" took longer than --case_timeout=10s; its process was ended");
  }
  EXPECT_EQ(outcomes["toy_mean 16"].status(), Outcome::STATUS_OK);
}

TEST_F(SweepByClock, ALengthThatDoesNotFitIsOutForAllAndResumeMeasuresIt) {
  // A case of toy_slow takes about 2 s: creation, two or three first calls and three samples.
  options_.time_budget = 8;
  EXPECT_EQ(Sweep("toy_slow:ms=300,toy_mean,toy_causal", "16:256"), 0);
  EXPECT_LE(elapsed_, 8);
  std::map<int, std::set<Outcome::Status>> by_length;
  for (const Job& one : cases_) {
    const int tokens = static_cast<int>(one.problem.query_tokens);
    const Outcome outcome = Outcomes()[absl::StrCat(one.technique->info().name, " ", tokens)];
    by_length[tokens].insert(outcome.status());
    if (outcome.status() == Outcome::STATUS_SKIPPED) {
      EXPECT_THAT(outcome.reason(), HasSubstr(": left out for all techniques alike; "));
    } else {
      EXPECT_GE(outcome.timing().run_ns_size(), kFewestSamples);
    }
  }
  for (const auto& [tokens, statuses] : by_length) EXPECT_EQ(statuses.size(), 1u) << tokens;
  EXPECT_EQ(by_length[16].count(Outcome::STATUS_OK), 1u);
  EXPECT_EQ(by_length[256].count(Outcome::STATUS_SKIPPED), 1u);

  options_.time_budget = 0;
  options_.resume = true;
  EXPECT_EQ(Sweep("toy_slow:ms=300,toy_mean,toy_causal", "16:256"), 0);
  for (const auto& [name, outcome] : Outcomes()) {
    EXPECT_EQ(outcome.status(), Outcome::STATUS_OK) << name << ": " << outcome.reason();
  }
}

TEST_F(SweepByClock, WhatIsLeftOfTheBudgetBuysSamplesAndTheLastRecordHasThemAll) {
  options_.time_budget = 100;
  options_.measure.repetitions = 33;
  // Three samples of 4 s are all that its share has room for; toy_mean has plenty at once.
  EXPECT_EQ(Sweep("toy_slow:ms=4000,toy_mean", "16"), 0);
  EXPECT_LE(elapsed_, 100);
  auto outcomes = Outcomes();
  EXPECT_GE(outcomes["toy_slow 16"].timing().run_ns_size(), kIntervalSamples);
  EXPECT_GT(outcomes["toy_slow 16"].timing().run_ns_size(), 3);
  EXPECT_TRUE(outcomes["toy_slow 16"].against_definition().passed()) << "the check is kept";
  EXPECT_EQ(outcomes.size(), 2u);
  EXPECT_GT(records_, 2) << "the record without the further samples was written at once";
}

TEST_F(SweepByClock, ACaseThatFailsIsNotVisitedAgainThoughItWasTimed) {
  options_.rounds = 2;
  options_.measure.repetitions = 6;
  options_.time_budget = 0;
  EXPECT_EQ(Sweep("toy_wrong,toy_mean", "16"), 1);
  auto outcomes = Outcomes();
  EXPECT_EQ(outcomes["toy_wrong 16"].status(), Outcome::STATUS_FAILED);
  EXPECT_EQ(outcomes["toy_wrong 16"].timing().run_ns_size(), 3);
  EXPECT_EQ(outcomes["toy_mean 16"].timing().run_ns_size(), 6);
}

TEST_F(SweepByClock, ABudgetThatIsSpentLeavesARowForEachCase) {
  options_.time_budget = 5;
  EXPECT_EQ(Sweep("toy_slow:ms=60000,toy_mean,toy_causal", "16:32"), 0);
  auto outcomes = Outcomes();
  EXPECT_EQ(outcomes.size(), 6u);
  for (const std::string name : {"toy_mean 32", "toy_causal 32", "toy_slow 32"}) {
    EXPECT_EQ(outcomes[name].status(), Outcome::STATUS_SKIPPED) << name;
    EXPECT_FALSE(outcomes[name].reason().empty());
  }
}

}  // namespace
}  // namespace tfb
