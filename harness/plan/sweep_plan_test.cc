// Executes plans on simulated machines, without a clock and without measurements.
#include "harness/plan/sweep_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/measure/check_forecast.h"
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

double TokensOf(const Job& one) {
  return static_cast<double>(std::max(one.problem.query_tokens, one.problem.kv_tokens));
}

// The seconds of the parts of a visit to a case.
struct Laws {
  std::function<double(const Job&)> call, check;
  // The preparation without the check.
  std::function<double(const Job&)> preparation;
  double flush_seconds = 0;
  double begin_seconds = 0;  // before the first visit
};

// Two cores of 2024, where speed is 1: nearly all of a preparation are three calls.
Laws Cpu(double speed) {
  Laws laws;
  laws.call = [speed](const Job& one) {
    const bool network = one.technique->info().input_kind != InputKind::kQkv;
    const double growth = one.added ? 2 : one.technique->info().growth;
    return (network ? 0.045 : 0.003) * std::pow(TokensOf(one) / 1024, growth) / speed;
  };
  laws.check = [speed](const Job& one) {
    const double tokens = TokensOf(one);
    if (one.technique->info().input_kind == InputKind::kQkv) return 3e-5 * tokens / speed;
    return 0.2 * std::pow(tokens / 256, 1.5) / speed;
  };
  laws.preparation = [call = laws.call, speed](const Job& one) {
    return 0.005 / speed + 3 * call(one);
  };
  laws.flush_seconds = 0.04 / speed;
  return laws;
}

// A GPU beside a host, where all of them are slower by `factor`: the worker has started after 3 s, a
// case is prepared in 0.4 s and 5 us more for each token beyond 4096, and checked by the host.
Laws Gpu(double factor) {
  Laws laws;
  laws.call = [factor](const Job& one) {
    const std::map<int64_t, double> seconds = {
        {1024, 20e-6}, {4096, 45e-6}, {16384, 300e-6}, {65536, 3e-3}};
    return factor * seconds.at(one.problem.query_tokens);
  };
  laws.check = [factor](const Job& one) { return factor * 0.2 * TokensOf(one) / 1024; };
  laws.preparation = [factor](const Job& one) {
    return factor * (0.4 + 5e-6 * std::max(TokensOf(one) - 4096, 0.0));
  };
  laws.begin_seconds = 3 * factor;
  return laws;
}

// A machine on which times follow simple laws.
class Machine {
 public:
  explicit Machine(Laws laws) : laws_(std::move(laws)), now_(laws_.begin_seconds) {}
  explicit Machine(double speed) : Machine(Cpu(speed)) {}
  // Makes the machine slower by `factor` from then on.
  void SlowDownAt(double seconds, double factor) {
    slow_from_ = seconds;
    slow_factor_ = factor;
  }

  double CallSeconds(const Job& one) const { return laws_.call(one); }
  double CheckSeconds(const Job& one) const { return laws_.check(one); }
  Visited Visit(const Job& one, Visit::Item item, bool is_first) {
    Visited found;
    found.call_seconds = CallSeconds(one);
    item.set_check(is_first);
    if (checks_.WhyNotChecked(one, item, /*case_timeout=*/60).empty()) {
      found.check_seconds = CheckSeconds(one);
      checks_.Note(one, found.check_seconds);
    }
    found.preparation_seconds = laws_.preparation(one) + found.check_seconds;
    SampleWishes wishes;
    wishes.repetitions = item.repetitions();
    wishes.flush_seconds = laws_.flush_seconds;
    wishes.graph = one.device == Device::kCuda;
    const SamplePlan samples = PlanSamples(wishes, found.call_seconds, item.share_seconds());
    found.samples = samples.runs;
    Pass(found.preparation_seconds + std::max(wishes.min_time, found.call_seconds) +
         samples.seconds);
    return found;
  }
  double now() const { return now_; }
  void Pass(double seconds) { now_ += seconds * (now_ >= slow_from_ ? slow_factor_ : 1); }

 private:
  Laws laws_;
  CheckForecast checks_;  // the worker's
  double now_;
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

TEST_P(OnMachines, EveryTechniqueHasFourSamplesAtEveryLengthThatAnyHas) {
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

// Returns "1024: 30, 4096: 12 of 30, 16384: 0": how many cases of each length were measured.
std::string MeasuredByLength(const std::vector<Job>& cases, const Story& story) {
  std::vector<std::string> lengths;
  for (const auto& [tokens, counts] : CountLengths(cases, story)) {
    const auto [all, dropped] = counts;
    lengths.push_back(
        absl::StrCat(tokens, ": ", all - dropped,
                     dropped == 0 || dropped == all ? "" : absl::StrCat(" of ", all)));
  }
  return absl::StrJoin(lengths, ", ");
}

// Returns the scaling cases of `count` techniques, the first by name.
std::vector<Job> ScalingCases(const std::string& techniques, const std::string& device,
                              const std::string& lengths, size_t count) {
  CaseFlags flags;
  flags.techniques = techniques;
  flags.devices = device;
  flags.threads = "2";
  flags.inputs = "gaussian";
  flags.lengths = lengths;
  flags.counterparts = false;
  std::vector<Job> all = MakeCases(flags, Registry::Global(), "").value(), cases;
  std::set<std::string> chosen;
  for (Job& one : all) {
    if (!one.obstacle.ok()) continue;
    if (chosen.size() < count) chosen.insert(one.DisplayName());
    if (chosen.count(one.DisplayName()) > 0) cases.push_back(std::move(one));
  }
  return cases;
}

// At 1024 tokens fixed costs are nearly all of a GPU's time. In 60 s there is time for two lengths
// more, and in 120 s for three.
TEST(OnAGpu, FixedCostsAreNotTakenToGrowAsTheWorkDoes) {
  const std::vector<Job> cases = ScalingCases("*", "cuda", "1024,4096,16384,65536", 30);
  ASSERT_EQ(cases.size(), 4 * 30u);
  const auto measured = [&](double budget, double factor) {
    SweepPlanOptions options = DefaultOptions();
    options.time_budget = budget;
    const Story story = CarryOut(cases, options, Machine(Gpu(factor)));
    EXPECT_LE(story.breadth_end, budget);
    EXPECT_LE(story.end, budget);
    return MeasuredByLength(cases, story);
  };
  EXPECT_EQ(measured(30, 1), "1024: 30, 4096: 0, 16384: 0, 65536: 0");
  EXPECT_EQ(measured(45, 1), "1024: 30, 4096: 30, 16384: 0, 65536: 0");
  EXPECT_EQ(measured(60, 1), "1024: 30, 4096: 30, 16384: 30, 65536: 0");
  EXPECT_EQ(measured(120, 1), "1024: 30, 4096: 30, 16384: 30, 65536: 30");
  // A machine that is slower by four needs four times the time.
  EXPECT_EQ(measured(120, 4), "1024: 30, 4096: 0, 16384: 0, 65536: 0");
  EXPECT_EQ(measured(180, 4), "1024: 30, 4096: 30, 16384: 0, 65536: 0");
  EXPECT_EQ(measured(240, 4), "1024: 30, 4096: 30, 16384: 30, 65536: 0");
}

// The first length always begins. Where even that does not fit, it ends at the deadline.
TEST(OnAGpu, AFirstLengthThatDoesNotFitEndsAFifthBeyondTheBudget) {
  const std::vector<Job> cases = ScalingCases("*", "cuda", "1024,4096", 30);
  SweepPlanOptions options = DefaultOptions();
  options.time_budget = 60;
  const Story story = CarryOut(cases, options, Machine(Gpu(4)));
  EXPECT_EQ(MeasuredByLength(cases, story), "1024: 24 of 30, 4096: 0");
  EXPECT_GE(story.end, 72);
  EXPECT_LE(story.end, 72 + 4 * (0.4 + 0.2) + 1) << "the case at hand is finished";
}

TEST(OnACpu, DenseAttentionGrowsAsTheSquareAndPerformerAsTheTokens) {
  const std::vector<Job> cases = ScalingCases("dense,performer", "cpu", "8192:131072", 2);
  ASSERT_EQ(cases.size(), 2 * 5u);
  const auto measured = [&](double budget, double speed) {
    SweepPlanOptions options = DefaultOptions();
    options.time_budget = budget;
    const Story story = CarryOut(cases, options, Machine(speed));
    EXPECT_LE(story.breadth_end, budget);
    return MeasuredByLength(cases, story);
  };
  EXPECT_EQ(measured(300, 1), "8192: 2, 16384: 2, 32768: 2, 65536: 2, 131072: 0");
  EXPECT_EQ(measured(300, 0.25), "8192: 2, 16384: 2, 32768: 2, 65536: 0, 131072: 0");
}

// All techniques on machines from one sixteenth of two cores' speed to all of it.
TEST(OnACpu, ALengthThatFitsIsMeasured) {
  const std::vector<Job> cases = DefaultCases();
  const auto longest = [&](double speed) {
    const Story story = CarryOut(cases, DefaultOptions(), Machine(speed));
    EXPECT_LE(story.breadth_end, kBudget) << speed;
    int64_t tokens = 0;
    for (const auto& [length, counts] : CountLengths(cases, story)) {
      EXPECT_TRUE(counts.second == 0 || counts.second == counts.first) << speed << ": " << length;
      if (counts.second == 0) tokens = length;
    }
    return tokens;
  };
  EXPECT_EQ(longest(0.0625), 512);
  EXPECT_EQ(longest(0.125), 1024);
  EXPECT_EQ(longest(0.25), 1024);
  EXPECT_EQ(longest(0.35), 2048);
  EXPECT_EQ(longest(0.5), 2048);
  EXPECT_EQ(longest(1), 4096);
}

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
  EXPECT_THAT(line->reason,
              HasSubstr("2048 tokens, 4096 tokens: left out for all techniques alike; "));
  EXPECT_THAT(line->reason, HasSubstr("of --time_budget=5:00 are left"));

  // The keys of a single query make a length, too.
  std::vector<Job> of_one_query = cases;
  for (Job& one : of_one_query) one.problem.query_tokens = 1;
  const Story same = CarryOut(of_one_query, DefaultOptions(), Machine(0.125));
  EXPECT_EQ(same.breadth_end, story.breadth_end);
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

// The longest length alone is left. On a machine on which it does not fit, a plan that knows the times of
// the shorter ones begins no case of it.
TEST(SweepPlan, TimesOfAnEarlierSweepTellWhetherALongerLengthFits) {
  std::vector<Job> cases = DefaultCases();
  cases.erase(std::remove_if(cases.begin(), cases.end(), &IsAccuracy), cases.end());
  const double longest = TokensOf(cases.back());
  std::vector<bool> left;
  for (const Job& one : cases) left.push_back(TokensOf(one) == longest);
  for (const bool fits : {false, true}) {
    const Machine machine(fits ? 1e4 : 1);
    SweepPlan plan(cases, left, DefaultOptions());
    for (size_t i = 0; i < cases.size(); ++i) {
      if (left[i]) continue;
      Visited earlier;
      earlier.call_seconds = machine.CallSeconds(cases[i]);
      earlier.preparation_seconds = 3 * earlier.call_seconds + machine.CheckSeconds(cases[i]);
      earlier.samples = kFewestSamples;
      plan.Learn(i, earlier);
    }
    const std::optional<Visit> visit = plan.Next(/*elapsed_seconds=*/0);
    EXPECT_EQ(visit.has_value(), fits);
    const std::vector<LeftOut> left_out = plan.TakeLeftOut();
    ASSERT_EQ(left_out.size(), fits ? 0u : 1u);
    if (fits) continue;
    EXPECT_EQ(left_out[0].cases.size(), std::count(left.begin(), left.end(), true));
    EXPECT_THAT(left_out[0].reason, HasSubstr("left out for all techniques alike"));
  }
  SweepPlan unaware(cases, left, DefaultOptions());
  EXPECT_TRUE(unaware.Next(/*elapsed_seconds=*/0).has_value());
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
