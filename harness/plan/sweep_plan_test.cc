// Executes plans on simulated machines, without a clock and without measurements.
#include "harness/plan/sweep_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/plan/cases.h"
#include "harness/plan/sample_plan.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kBudget = 300;

// Returns the cases of the default sweep on two threads of a machine without a GPU.
std::vector<Job> DefaultCases() {
  CaseFlags flags;
  flags.devices = "cpu";
  flags.threads = "2";
  std::vector<Job> cases = MakeCases(flags, Registry::Global(), "").value();
  cases.erase(
      std::remove_if(cases.begin(), cases.end(), [](const Job& one) { return !one.obstacle.ok(); }),
      cases.end());
  return cases;
}

bool IsAccuracy(const Job& one) { return one.purpose == Case::PURPOSE_ACCURACY; }

// A machine on which times follow simple laws. Speed 1 is about that of two cores of 2024.
class Machine {
 public:
  explicit Machine(double speed) : speed_(speed) {}
  // Makes the machine slower by `factor` from then on.
  void SlowDownAt(double seconds, double factor) {
    slow_from_ = seconds;
    slow_factor_ = factor;
  }

  static double TokensOf(const Job& one) {
    return static_cast<double>(std::max(one.problem.query_tokens, one.problem.kv_tokens));
  }
  double CallSeconds(const Job& one) const {
    const bool network = one.technique->info().input_kind != InputKind::kQkv;
    const double growth = one.added ? 2 : one.technique->info().growth;
    const double ratio = TokensOf(one) / 1024;
    return (network ? 0.045 : 0.003) * std::pow(ratio, growth) / speed_;
  }
  double CheckSeconds(const Job& one) const {
    const double tokens = TokensOf(one);
    if (one.technique->info().input_kind == InputKind::kQkv) return 3e-5 * tokens / speed_;
    return 0.2 * std::pow(tokens / 256, 1.5) / speed_;
  }
  Visited Visit(const Job& one, const Visit::Item& item, bool is_first) {
    Visited found;
    found.call_seconds = CallSeconds(one);
    const double check = is_first ? CheckSeconds(one) : 0;
    if (item.check_seconds() == 0 || check <= item.check_seconds()) found.check_seconds = check;
    found.preparation_seconds = 0.005 / speed_ + 3 * found.call_seconds + found.check_seconds;
    SampleWishes wishes;
    wishes.repetitions = item.repetitions();
    wishes.flush_seconds = 0.04 / speed_;
    const SamplePlan samples = PlanSamples(wishes, found.call_seconds, item.share_seconds());
    found.samples = samples.runs;
    Pass(found.preparation_seconds + std::max(wishes.min_time, found.call_seconds) +
         samples.seconds);
    return found;
  }
  double now() const { return now_; }
  void Pass(double seconds) { now_ += seconds * (now_ >= slow_from_ ? slow_factor_ : 1); }

 private:
  double speed_;
  double now_ = 0;
  double slow_from_ = 1e9, slow_factor_ = 1;
};

// The events of a sweep that was carried out.
struct Story {
  std::vector<int> samples;  // by case
  std::vector<int> visits;
  std::vector<LeftOut> left_out;
  std::set<size_t> dropped;
  double accuracy_end = 0, breadth_end = 0, end = 0;
  std::vector<size_t> repeated;  // in order, counterparts included
  std::vector<Visit> repetitions;
};

// Returns the half-width of an interval from `samples` samples. Cases differ in their noise.
double HalfWidth(size_t index, int samples) {
  const double noise = 0.01 * static_cast<double>(1 + index % 10);
  return noise * std::sqrt(3.0 / samples);
}

Story CarryOut(const std::vector<Job>& cases, SweepPlanOptions options, Machine machine,
               std::vector<bool> left = {}) {
  left.resize(cases.size(), true);
  SweepPlan plan(cases, left, options);
  Story story;
  story.samples.assign(cases.size(), 0);
  story.visits.assign(cases.size(), 0);
  for (;;) {
    const std::optional<Visit> visit = plan.Next(machine.now());
    for (LeftOut& left_out : plan.TakeLeftOut()) {
      story.dropped.insert(left_out.cases.begin(), left_out.cases.end());
      story.left_out.push_back(std::move(left_out));
    }
    if (!visit.has_value()) break;
    EXPECT_FALSE(visit->items().empty());
    const double begin = machine.now();
    for (const Visit::Item& item : visit->items()) {
      if (visit->deadline() > 0 && machine.now() >= visit->deadline()) break;
      Visited found = machine.Visit(cases[item.index()], item, story.visits[item.index()] == 0);
      found.samples = story.samples[item.index()] += found.samples;
      found.half_width = HalfWidth(item.index(), found.samples);
      ++story.visits[item.index()];
      plan.Note(item.index(), found);
      if (visit->repeats()) story.repeated.push_back(item.index());
      if (!visit->repeats()) story.breadth_end = machine.now();
      if (IsAccuracy(cases[item.index()])) story.accuracy_end = machine.now();
    }
    if (visit->repeats()) story.repetitions.push_back(*visit);
    if (options.takes_turns) machine.Pass(machine.now() - begin);  // the other build's visit
  }
  story.end = machine.now();
  return story;
}

SweepPlanOptions DefaultOptions() {
  SweepPlanOptions options;
  options.time_budget = kBudget;
  options.repetitions = 33;
  return options;
}

// Lengths of scaling cases, and how many of each were dropped.
std::map<int64_t, std::pair<int, int>> CountLengths(const std::vector<Job>& cases,
                                                    const Story& story) {
  std::map<int64_t, std::pair<int, int>> lengths;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (IsAccuracy(cases[i])) continue;
    auto& [all, dropped] = lengths[cases[i].problem.query_tokens];
    ++all;
    dropped += story.dropped.count(i) > 0;
  }
  return lengths;
}

class OnMachines : public ::testing::TestWithParam<double> {};

TEST_P(OnMachines, EveryTechniqueHasThreeSamplesAtEveryLengthThatAnyHas) {
  const std::vector<Job> cases = DefaultCases();
  ASSERT_GT(cases.size(), 250u);
  const Story story = CarryOut(cases, DefaultOptions(), Machine(GetParam()));
  EXPECT_LE(story.end, kBudget);
  EXPECT_LE(story.accuracy_end, kBudget / 3 * 1.05);  // the case at hand is finished
  bool dropping = false;
  for (const auto& [tokens, counts] : CountLengths(cases, story)) {
    EXPECT_TRUE(counts.second == 0 || counts.second == counts.first)
        << tokens << ": " << counts.second << " of " << counts.first;
    EXPECT_TRUE(!dropping || counts.second > 0) << "a shorter length than " << tokens << " is out";
    dropping = counts.second > 0;
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    if (story.dropped.count(i) == 0) {
      EXPECT_GE(story.samples[i], IsAccuracy(cases[i]) ? 1 : kFewestSamples) << cases[i].ToString();
    }
  }
  const auto lengths = CountLengths(cases, story);
  for (const int64_t kept : {256, 512}) EXPECT_EQ(lengths.at(kept).second, 0) << kept;
}

INSTANTIATE_TEST_SUITE_P(EightTimesSlowerToTwiceAsFast, OnMachines,
                         ::testing::Values(0.125, 0.25, 0.5, 1.0, 2.0));

TEST(SweepPlan, OnAFastMachineNothingIsLeftOutAndTheBudgetIsSpentOnSamples) {
  const std::vector<Job> cases = DefaultCases();
  const Story story = CarryOut(cases, DefaultOptions(), Machine(2));
  EXPECT_THAT(story.left_out, IsEmpty());
  EXPECT_GT(story.repeated.size(), 50u);
  int wide = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_LE(story.samples[i], 33 + 11) << "beyond --repetitions by more than one visit";
    wide += !IsAccuracy(cases[i]) && story.samples[i] < 33 && HalfWidth(i, story.samples[i]) > 0.02;
  }
  // Either every interval is narrow, or the budget is spent.
  EXPECT_TRUE(wide == 0 || story.end > 0.8 * kBudget) << wide << " at " << story.end;
}

TEST(SweepPlan, OnASlowMachineOneLineSaysWhichLengthsAreOut) {
  const std::vector<Job> cases = DefaultCases();
  const Story story = CarryOut(cases, DefaultOptions(), Machine(0.125));
  const auto lengths = CountLengths(cases, story);
  ASSERT_GT(lengths.at(4096).second, 0);
  const auto line =
      std::find_if(story.left_out.begin(), story.left_out.end(),
                   [&](const LeftOut& one) { return !IsAccuracy(cases[one.cases.front()]); });
  ASSERT_NE(line, story.left_out.end());
  EXPECT_THAT(line->reason, HasSubstr("4096 tokens: left out for all techniques alike; "));
  EXPECT_THAT(line->reason, HasSubstr("of --time_budget=5:00 are left"));

  // The keys of a single query make a length, too.
  std::vector<Job> of_one_query = cases;
  for (Job& one : of_one_query) one.problem.query_tokens = 1;
  const Story same = CarryOut(of_one_query, DefaultOptions(), Machine(0.125));
  EXPECT_EQ(same.samples, story.samples);
  EXPECT_EQ(same.dropped, story.dropped);
}

TEST(SweepPlan, RepetitionGoesToTheWidestIntervalsAndTakesTheCounterpartAlong) {
  const std::vector<Job> cases = DefaultCases();
  const Story story = CarryOut(cases, DefaultOptions(), Machine(2));
  ASSERT_FALSE(story.repetitions.empty());
  for (const Visit& visit : story.repetitions) {
    std::set<size_t> there;
    for (const Visit::Item& item : visit.items()) there.insert(item.index());
    for (const size_t i : there) {
      const auto spec = cases[i].technique->Counterpart(cases[i].problem, cases[i].options);
      ASSERT_TRUE(spec.ok());
      const bool found = std::any_of(there.begin(), there.end(), [&](size_t other) {
        return cases[other].technique->info().name == spec->technique;
      });
      // A counterpart of another kind of input is in no group.
      const Technique* dense = Registry::Global().Find(spec->technique).value();
      const bool is_possible = dense->info().input_kind == cases[i].technique->info().input_kind;
      EXPECT_TRUE(found || !is_possible) << cases[i].ToString();
    }
  }
  // Noise grows with index % 10 (HalfWidth): of the quietest cases none is asked for again for its
  // own sake, of the noisiest all.
  const std::set<size_t> repeated(story.repeated.begin(), story.repeated.end());
  for (size_t i = 0; i < cases.size(); ++i) {
    if (i % 10 == 9 && !IsAccuracy(cases[i]) && story.end < 0.8 * kBudget) {
      EXPECT_EQ(repeated.count(i), 1u) << cases[i].ToString();
    }
  }
}

TEST(SweepPlan, ALengthThatTakesLongerThanForetoldIsFinishedForAFifthMoreAtMost) {
  const std::vector<Job> cases = DefaultCases();
  // Halfway through the breadth phase of a machine that just keeps all lengths, it becomes slow.
  const double breadth = CarryOut(cases, DefaultOptions(), Machine(1)).breadth_end;
  Machine machine(1);
  machine.SlowDownAt(0.7 * breadth, 12);
  const Story story = CarryOut(cases, DefaultOptions(), machine);
  double longest_case = 0;
  for (const Job& one : cases) {
    longest_case = std::max(longest_case, 12 * 20 * machine.CallSeconds(one));
  }
  EXPECT_LE(story.end, 1.2 * kBudget + longest_case);
  EXPECT_FALSE(story.left_out.empty());
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(story.samples[i] == 0, story.dropped.count(i) > 0) << cases[i].ToString();
  }
}

TEST(SweepPlan, AnAccuracyInputThatWouldNotFitIsLeftOutForAllTechniques) {
  const std::vector<Job> cases = DefaultCases();
  // The first input takes most of accuracy's third.
  double first_input = 0;
  const std::string first = cases.front().input.ToString();
  Machine probe(1);
  for (const Job& one : cases) {
    if (IsAccuracy(one) && one.input.ToString() == first) {
      // Three calls before the timing, one to find out how long it is, and a sample.
      first_input += probe.CheckSeconds(one) + 5 * probe.CallSeconds(one);
    }
  }
  const Story story = CarryOut(cases, DefaultOptions(), Machine(first_input / (0.7 * kBudget / 3)));
  std::set<std::string> out, in;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (!IsAccuracy(cases[i])) continue;
    (story.dropped.count(i) > 0 ? out : in).insert(cases[i].input.ToString());
  }
  EXPECT_THAT(in, ElementsAre(first));
  EXPECT_FALSE(out.empty());
  ASSERT_FALSE(story.left_out.empty());
  EXPECT_THAT(story.left_out.front().reason, HasSubstr(" are left for accuracy"));
}

TEST(SweepPlan, WithoutABudgetEveryCaseIsVisitedOncePerRoundWithAllItsSamples) {
  const std::vector<Job> cases = DefaultCases();
  SweepPlanOptions options;
  options.repetitions = 20;
  options.rounds = 3;
  const Story story = CarryOut(cases, options, Machine(1));
  EXPECT_THAT(story.left_out, IsEmpty());
  EXPECT_THAT(story.repeated, IsEmpty());
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(story.visits[i], 3) << cases[i].ToString();
    EXPECT_EQ(story.samples[i], 21) << "20 in 3 visits are 7 each";
  }
}

TEST(SweepPlan, AccuracyCasesAloneHaveTheWholeBudgetAndAreTimed) {
  std::vector<Job> cases = DefaultCases();
  cases.erase(
      std::remove_if(cases.begin(), cases.end(), [](const Job& one) { return !IsAccuracy(one); }),
      cases.end());
  const Story story = CarryOut(cases, DefaultOptions(), Machine(0.25));
  EXPECT_GT(story.accuracy_end, kBudget / 3);
  EXPECT_LE(story.end, kBudget);
  for (size_t i = 0; i < cases.size(); ++i) {
    if (story.dropped.count(i) > 0) continue;
    EXPECT_GE(story.samples[i], kFewestSamples);
  }
}

TEST(SweepPlan, OnlyWhatIsLeftIsVisited) {
  const std::vector<Job> cases = DefaultCases();
  std::vector<bool> left(cases.size(), false);
  left[3] = left[cases.size() - 1] = true;
  const Story story = CarryOut(cases, DefaultOptions(), Machine(1), left);
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(story.visits[i] > 0, left[i]);
}

// Returns the repetitions that each case is asked for before any repetition, 0 where it is not.
std::vector<int> AskedFor(const std::vector<Job>& cases, SweepPlan* plan) {
  std::vector<int> repetitions(cases.size(), 0);
  while (const std::optional<Visit> visit = plan->Next(/*elapsed_seconds=*/0)) {
    if (visit->repeats()) break;
    for (const Visit::Item& item : visit->items()) {
      repetitions[item.index()] += item.repetitions();
      Visited found;
      found.call_seconds = 1e-3;
      found.samples = item.repetitions();
      plan->Note(item.index(), found);
    }
  }
  return repetitions;
}

TEST(SweepPlan, OfAStoppedCaseOnlyTheSamplesThatItLacksAreTaken) {
  std::vector<Job> cases = DefaultCases();
  cases.erase(std::remove_if(cases.begin(), cases.end(), &IsAccuracy), cases.end());
  const std::vector<bool> left(cases.size(), true);
  const auto resume = [](SweepPlan& plan, size_t index, int samples) {
    Visited found;
    found.call_seconds = 1e-3;
    found.samples = samples;
    return plan.Resume(index, found);
  };
  SweepPlanOptions options;
  options.time_budget = 0;
  options.repetitions = 11;
  SweepPlan unlimited(cases, left, options);
  EXPECT_EQ(resume(unlimited, 0, 11), 1);
  EXPECT_EQ(resume(unlimited, 1, 6), 0);
  EXPECT_EQ(resume(unlimited, 2, 0), 0);
  std::vector<int> asked = AskedFor(cases, &unlimited);
  EXPECT_EQ(asked[0], 0);
  EXPECT_EQ(asked[1], 5);
  EXPECT_EQ(asked[2], 11);
  EXPECT_EQ(asked[3], 11);

  // With a budget a case that has the fewest samples is not visited before all have them.
  SweepPlan limited(cases, left, DefaultOptions());
  EXPECT_EQ(resume(limited, 0, kFewestSamples), 1);
  EXPECT_EQ(resume(limited, 1, 0), 0);
  asked = AskedFor(cases, &limited);
  EXPECT_EQ(asked[0], 0);
  EXPECT_GT(asked[1], 0);

  options.repetitions = 12;
  options.rounds = 4;
  SweepPlan in_rounds(cases, left, options);
  EXPECT_EQ(resume(in_rounds, 0, 6), 2);
  EXPECT_EQ(AskedFor(cases, &in_rounds)[0], 6);
}

TEST(SweepPlan, AFinishedCaseIsNotVisitedAgain) {
  const std::vector<Job> cases = DefaultCases();
  SweepPlan plan(cases, std::vector<bool>(cases.size(), true), DefaultOptions());
  const size_t failed = plan.Next(0)->items(0).index();
  plan.Finish(failed);
  double now = 0;
  while (const std::optional<Visit> visit = plan.Next(now)) {
    for (const Visit::Item& item : visit->items()) {
      EXPECT_NE(item.index(), failed);
      plan.Note(item.index(), {0.01, 0, 0.001, 11, 0.01});
      now += 0.1;
    }
  }
  EXPECT_GT(now, 10);
}

TEST(SweepPlan, TwoBuildsInTurnsKeepToTheBudgetTogether) {
  const std::vector<Job> cases = DefaultCases();
  SweepPlanOptions options = DefaultOptions();
  for (const double speed : {0.125, 0.25, 0.5, 1.0}) {
    options.takes_turns = false;
    const size_t alone = CarryOut(cases, options, Machine(speed)).dropped.size();
    options.takes_turns = true;
    const Story story = CarryOut(cases, options, Machine(speed));
    EXPECT_LE(story.end, kBudget) << speed;
    EXPECT_GE(story.dropped.size(), alone) << speed;
    EXPECT_THAT(story.repeated, IsEmpty()) << "the other build would not take part";
  }
}

}  // namespace
}  // namespace tfb
