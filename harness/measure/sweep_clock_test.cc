// Sweeps by a simulated clock, in this process: what takes long, hangs, or does not fit the budget.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/measure/machine.h"
#include "harness/measure/sweep.h"
#include "harness/plan/sample_plan.h"
#include "harness/testing/simulated_clock.h"
#include "harness/testing/toys.h"
#include "results/appender.h"
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

  int Sweep(const std::string& techniques, const std::string& lengths,
            const std::string& inputs = "gaussian", const std::string& devices = "cpu") {
    CaseFlags flags;
    flags.techniques = techniques;
    flags.devices = devices;
    flags.lengths = lengths;
    flags.inputs = inputs;
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
      EXPECT_GE(outcome.timing().run_ns_size(), options_.measure.repetitions);
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

// A case of toy_slow takes 12 s at any length: two or three first calls and three samples.
TEST_F(SweepByClock, AResumedSweepKnowsTheTimesOfTheLengthsThatItDoesNotMeasure) {
  options_.time_budget = 0;
  EXPECT_EQ(Sweep("toy_slow:ms=2000", "16,32"), 0);
  options_.resume = true;
  options_.time_budget = 8;
  EXPECT_EQ(Sweep("toy_slow:ms=2000", "16,32,64"), 0);
  EXPECT_LT(elapsed_, 1);
  const Outcome outcome = Outcomes()["toy_slow 64"];
  EXPECT_EQ(outcome.status(), Outcome::STATUS_SKIPPED);
  EXPECT_THAT(outcome.reason(), HasSubstr(": left out for all techniques alike; "));
  options_.time_budget = 30;
  EXPECT_EQ(Sweep("toy_slow:ms=2000", "16,32,64"), 0);
  EXPECT_EQ(Outcomes()["toy_slow 64"].status(), Outcome::STATUS_OK);
}

TEST_F(SweepByClock, WhatIsLeftOfTheBudgetBuysSamplesAndTheLastRecordHasThemAll) {
  options_.time_budget = 100;
  options_.measure.repetitions = 33;
  // Four samples of 4 s, the fewest, are all that its share has room for; toy_mean has plenty at once.
  EXPECT_EQ(Sweep("toy_slow:ms=4000,toy_mean", "16"), 0);
  EXPECT_LE(elapsed_, 100);
  auto outcomes = Outcomes();
  EXPECT_GE(outcomes["toy_slow 16"].timing().run_ns_size(), kIntervalSamples);
  EXPECT_GT(outcomes["toy_slow 16"].timing().run_ns_size(), kFewestSamples);
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

// The text of standard error, where nothing is redrawn: a line a case as soon as it has its record,
// and one for each reason why cases have none.
TEST_F(SweepByClock, EachCaseIsALineWithItsTimeOrWithWhatWentWrong) {
  options_.quiet = false;
  options_.measure.case_timeout = 10;
  options_.time_budget = 0;
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Sweep("toy_mean:rounds=2,toy_wrong,toy_hang,toy_unable,toy_hidden", "8,16"), 1);
  const std::string out = ::testing::internal::GetCapturedStdout();
  const std::string err = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(out, ::testing::EndsWith("results: " + options_.output + "\n"));
  std::string expected;
  int n = 0;
  for (const std::string tokens : {"8", "16"}) {
    const auto add = [&](const std::string& name, const std::string& how) {
      absl::StrAppend(&expected, "[", ++n, "/10] ", name, ", cpu, batch 1, 2 heads of 8, ", tokens,
                      " tokens, causal, f32, gaussian: ", how, "\n");
    };
    add("toy_hang",
        "timeout: \"first run\" took longer than --case_timeout=10s; its process was ended");
    add("toy_unable", "unsupported: the toy is unable to");
    add("toy_hidden", "1.00 ms");  // it is its own counterpart, and those come first
    add("toy_mean rounds=2", "2.00 ms");
    // The output is off by 1, and the largest values are 2.73 and 3.08.
    add("toy_wrong", absl::StrCat("1.00 ms, failed: max error over max value is ",
                                  tokens == "8" ? "0.366" : "0.325", ", its bound 2e-05"));
  }
  EXPECT_EQ(err, expected);
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
  // The first run of the first case is all that there was time for. Its check is kept, and a sweep
  // that goes on takes the times.
  const Outcome checked = outcomes["toy_slow 16"];
  EXPECT_EQ(checked.status(), Outcome::STATUS_OK);
  EXPECT_TRUE(checked.unfinished());
  EXPECT_TRUE(checked.against_definition().passed());
  EXPECT_EQ(checked.reason(), "times were not measured: the time budget of 5 s was spent");
  options_.time_budget = 0;
  options_.resume = true;
  EXPECT_EQ(Sweep("toy_slow:ms=60000,toy_mean,toy_causal", "16:32"), 0);
  outcomes = Outcomes();
  for (const auto& [name, outcome] : outcomes) {
    EXPECT_EQ(outcome.status(), Outcome::STATUS_OK) << name;
    EXPECT_FALSE(outcome.unfinished()) << name;
    EXPECT_EQ(outcome.reason(), "") << name;
    EXPECT_EQ(outcome.timing().run_ns_size(), 3) << name;
  }
}

TEST_F(SweepByClock, SignalsAreAsTheyWereAndNothingIsSaidWhereItIsQuiet) {
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Sweep("toy_mean,toy_wrong", "16"), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  for (const int number : {SIGINT, SIGTERM, SIGPIPE}) {
    struct sigaction action = {};
    ASSERT_EQ(sigaction(number, nullptr, &action), 0);
    EXPECT_EQ(action.sa_handler, SIG_DFL) << number;
  }
}

TEST_F(SweepByClock, AFileThatAnotherProcessAppendsToIsWaitedForForTwoSeconds) {
  auto other = ResultAppender::Open(options_.output, {}).value();
  options_.resume = true;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Sweep("toy_mean", "16"), 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), StartsWith("sweep: --output: "));
  EXPECT_GE(elapsed_, 2);
  EXPECT_LT(elapsed_, 2.1);
  other.reset();
  EXPECT_EQ(Sweep("toy_mean", "16"), 0);
}

// Ratios are of times from one run: the dense counterpart is measured again beside what is new.
TEST_F(SweepByClock, AResumedSweepMeasuresWhatIsNewAndItsCounterpartAndKeepsTheFailures) {
  const auto records = [this] {
    std::map<std::string, int> counts;
    const ResultFile file = ReadResultFile(options_.output).value();
    for (const Case& record : file.results.cases()) {
      if (record.outcome().unfinished()) continue;
      ++counts[absl::StrCat(record.key().technique(), " ", record.key().problem().query_tokens())];
    }
    return counts;
  };
  EXPECT_EQ(Sweep("toy_mean,dense", "8,16"), 0);
  using Counts = std::map<std::string, int>;
  EXPECT_EQ(records(),
            (Counts{{"dense 8", 1}, {"dense 16", 1}, {"toy_mean 8", 1}, {"toy_mean 16", 1}}));
  options_.resume = true;
  EXPECT_EQ(Sweep("toy_mean,dense", "8,16"), 0);
  EXPECT_EQ(records().at("dense 8"), 1);
  EXPECT_EQ(Sweep("toy_wrong,dense", "16"), 1);
  EXPECT_EQ(records(), (Counts{{"dense 8", 1},
                               {"dense 16", 2},
                               {"toy_mean 8", 1},
                               {"toy_mean 16", 1},
                               {"toy_wrong 16", 1}}));
  // Nothing is left, and the failure is one still.
  EXPECT_EQ(Sweep("toy_mean,toy_wrong,dense", "8,16"), 1);
  EXPECT_EQ(records().at("dense 16"), 2);
}

TEST_F(SweepByClock, WhatIsSkippedForTheSameReasonAgainHasOneRecord) {
  EXPECT_EQ(Sweep("toy_mean,toy_hidden", "16", "real"), 0);
  Outcomes();
  const int records = records_;
  options_.resume = true;
  EXPECT_EQ(Sweep("toy_mean,toy_hidden", "16", "real"), 0);
  Outcomes();
  EXPECT_EQ(records_, records);
}

TEST_F(SweepByClock, WhatIsKnownNotToRunIsSkippedWithOneLineForEachReason) {
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  options_.quiet = false;
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Sweep("toy_device", "8,16", "gaussian", "cpu,cuda"), 0);
  ::testing::internal::GetCapturedStdout();
  const std::string err = ::testing::internal::GetCapturedStderr();
  std::string reason;
  const ResultFile file = ReadResultFile(options_.output).value();
  for (const Case& record : file.results.cases()) {
    if (record.key().device() != DEVICE_TYPE_CUDA) continue;
    EXPECT_EQ(record.outcome().status(), Outcome::STATUS_SKIPPED);
    reason = record.outcome().reason();
    EXPECT_THAT(reason, StartsWith("no CUDA device: "));
  }
  EXPECT_THAT(err, StartsWith(absl::StrCat("2 cases skipped: ", reason,
                                           "\n[3/4] toy_device, cpu, batch 1")));
  unlink(options_.output.c_str());
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Sweep("toy_device", "8", "gaussian", "cpu,cuda"), 0);
  ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              StartsWith(absl::StrCat("1 case skipped: ", reason, "\n[2/2] ")));
}

// As the other build of a sweep: what its leader never asks for is measured at the end, or left out
// where the leader has kept to a time by leaving it out.
TEST_F(SweepByClock, WhatTheLeaderNeverAskedForIsMeasuredOrLeftOut) {
  for (const double budget : {0.0, 60.0}) {
    options_.time_budget = budget;
    unlink(options_.output.c_str());
    Sweep("toy_mean", "8,16");  // for the keys of the groups
    const std::string group = GroupKey(cases_[1]);
    unlink(options_.output.c_str());
    int to[2], from[2];
    ASSERT_EQ(pipe(to), 0);
    ASSERT_EQ(pipe(from), 0);
    const std::string lines = "measure " + group + "\nmeasure none\nrest\n";
    ASSERT_EQ(write(to[1], lines.data(), lines.size()), static_cast<ssize_t>(lines.size()));
    close(to[1]);
    options_.turns = absl::StrCat(to[0], ",", from[1]);
    EXPECT_EQ(Sweep("toy_mean", "8,16"), 0);
    options_.turns.clear();
    close(from[1]);
    char answers[100];
    EXPECT_EQ(std::string(answers, read(from[0], answers, sizeof(answers))),
              "done\ndone\ndone\ndone\n");
    close(to[0]);
    close(from[0]);
    auto outcomes = Outcomes();
    EXPECT_EQ(outcomes["toy_mean 16"].status(), Outcome::STATUS_OK);
    EXPECT_EQ(outcomes["toy_mean 8"].status(),
              budget > 0 ? Outcome::STATUS_SKIPPED : Outcome::STATUS_OK);
    EXPECT_EQ(outcomes["toy_mean 8"].reason(),
              budget > 0 ? "the sweep that this one takes turns with left it out" : "");
  }
}

// The other build's visits come after and before those of the leader in turns: it notes how long
// the leader's file is when it is asked.
TEST_F(SweepByClock, WhoGoesFirstChangesFromVisitToVisit) {
  const auto run = [this](const std::string& end) {
    const std::string program = options_.output + ".sh";
    std::ofstream(program) << "#!/bin/bash\n"
                           << "for turns; do :; done\n"
                           << "turns=${turns#--turns=}; in=${turns%,*}; out=${turns#*,}\n"
                           << "echo done >&$out\n"
                           << "while read -r line <&$in; do\n"
                           << "echo ${line%% *} $(stat -c %s " << options_.output << ") >> "
                           << program << ".log\n"
                           << "echo done >&$out\ndone\n"
                           << end << "\n";
    chmod(program.c_str(), 0755);
    unlink((program + ".log").c_str());
    unlink(options_.output.c_str());
    options_.other.program = program;
    return Sweep("toy_mean", "8:64");
  };
  options_.time_budget = 0;
  EXPECT_EQ(run("exit 0"), 0);
  std::ifstream log(options_.other.program + ".log");
  std::vector<std::string> words;
  std::vector<int64_t> sizes;
  for (std::string word; log >> word;) {
    words.push_back(word);
    log >> word;
    sizes.push_back(std::stoll(word));
  }
  EXPECT_THAT(words, ::testing::ElementsAre("measure", "measure", "measure", "measure", "rest"));
  EXPECT_EQ(sizes[0], sizes[1]);
  EXPECT_LT(sizes[1], sizes[2]);
  EXPECT_EQ(sizes[2], sizes[3]);
  EXPECT_LT(sizes[3], sizes[4]);
  EXPECT_EQ(run("exit 1"), 0);  // of which its own file tells
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run("exit 5"), 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              StartsWith(absl::StrCat("sweep: ", options_.other.program,
                                      " ended with exit status 5; 4 cases are in ")));
}

TEST_F(SweepByClock, CasesMeasuredSideBySideHaveTheirVisitsInCommon) {
  options_.rounds = 3;
  options_.measure.repetitions = 12;
  options_.time_budget = 0;
  ASSERT_EQ(Sweep("toy_mean,dense", "16:32"), 0);
  auto outcomes = Outcomes();
  std::set<int64_t> starts;
  for (const std::string tokens : {" 16", " 32"}) {
    const Timing mean = outcomes["toy_mean" + tokens].timing();
    const Timing dense = outcomes["dense" + tokens].timing();
    ASSERT_EQ(mean.visits_size(), 3);
    ASSERT_EQ(dense.visits_size(), 3);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(mean.visits(i).start_unix_ns(), dense.visits(i).start_unix_ns());
      EXPECT_EQ(mean.visits(i).run_samples(), 4);
      EXPECT_EQ(dense.visits(i).run_samples(), 4);
      starts.insert(mean.visits(i).start_unix_ns());
    }
  }
  EXPECT_EQ(starts.size(), 6u);
}

TEST(DefaultResultPath, IsOfTheTimeAndTheHostAndOfNoFileThatIsThere) {
  const std::string folder = absl::StrCat(::testing::TempDir(), "/default_path_", getpid());
  setenv("BUILD_WORKSPACE_DIRECTORY", folder.c_str(), 1);
  std::filesystem::create_directories(folder + "/results/runs");
  // Again where a second ends between two calls.
  std::string first, second, third;
  do {
    first = DefaultResultPath();
    std::ofstream(first) << "there";
    second = DefaultResultPath();
    std::ofstream(second) << "there";
    third = DefaultResultPath();
  } while (third.substr(0, first.size() - 3) != first.substr(0, first.size() - 3));
  unsetenv("BUILD_WORKSPACE_DIRECTORY");
  const std::string stem = first.substr(0, first.size() - 3);
  EXPECT_THAT(stem, ::testing::MatchesRegex(folder + "/results/runs/[0-9]+-[0-9]+-" + HostName()));
  EXPECT_EQ(first, stem + ".pb");
  EXPECT_EQ(second, stem + "-2.pb");
  EXPECT_EQ(third, stem + "-3.pb");
}

TEST(PlanOptionsOf, AreThoseOfTheSweep) {
  SweepOptions options;
  options.time_budget = 7;
  options.rounds = 3;
  options.measure.repetitions = 5;
  options.measure.min_time = 0.25;
  const SweepPlanOptions usual = PlanOptionsOf(options);
  EXPECT_EQ(usual.time_budget, 7);
  EXPECT_EQ(usual.rounds, 3);
  EXPECT_EQ(usual.repetitions, 5);
  EXPECT_EQ(usual.min_time, 0.25);
  EXPECT_FALSE(usual.takes_turns);
  EXPECT_TRUE(usual.graphs);
  options.measure.graphs = false;
  options.turns = "3,4";
  EXPECT_FALSE(PlanOptionsOf(options).graphs);
  EXPECT_TRUE(PlanOptionsOf(options).takes_turns);
  options.turns.clear();
  options.other.program = "other";
  EXPECT_TRUE(PlanOptionsOf(options).takes_turns);
}

TEST(HostMemoryLimit, IsNoneWhereACaseIsOnAGpu) {
  std::vector<Job> cases(3);
  cases[2].device = Device::kSimulator;
  EXPECT_EQ(HostMemoryLimit(1 << 20, cases), 1 << 20);
  cases[1].device = Device::kCuda;
  EXPECT_EQ(HostMemoryLimit(1 << 20, cases), 0);
}

}  // namespace
}  // namespace tfb
