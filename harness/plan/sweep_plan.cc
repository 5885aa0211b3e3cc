#include "harness/plan/sweep_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "harness/contestants/interface.h"
#include "harness/plan/check_time.h"
#include "harness/plan/quantities.h"
#include "results/reader.h"

namespace tfb {
namespace {

// Parts of the budget: accuracy may take the first, and the timing of scaling cases is meant to
// take the second. The last is the part of accuracy's third that the timing of its cases is meant
// to take.
constexpr double kAccuracyPart = 1.0 / 3, kScalingTimingPart = 0.2, kAccuracyTimingPart = 0.1;
// A length begins only where the rest of the budget is more than its predicted time by this factor,
// and may exceed the budget by this part of it where the prediction was too low.
constexpr double kCaution = 1.15, kOverrun = 0.2;
// Samples of a run at one visit.
constexpr int kVisitRepetitions = 11;
// An interval within 2 % of the median is narrow enough.
constexpr double kNarrow = 0.02;
constexpr int kMostVisits = 10;
// A repetition takes its time in fewer, longer visits, since each has to create the case anew.
constexpr double kRepetitionShare = 2;
// The assumed time of a case whose technique has no times yet, times its relative effort.
constexpr double kGuessSeconds = 0.2;

double TokensOf(const Job& job) { return static_cast<double>(std::max<int64_t>(1, LengthOf(job))); }

bool IsAccuracy(const Job& job) { return job.purpose == Case::PURPOSE_ACCURACY; }
bool IsContestant(const Job& job) { return AsContestant(*job.technique) != nullptr; }

// Returns the key of the case without its length; for an added counterpart also without its
// options, which depend on the length.
std::string SeriesKey(const Job& job) {
  Case::Key key = MakeRecord(job).key();
  key.mutable_problem()->clear_query_tokens();
  key.mutable_problem()->clear_kv_tokens();
  if (job.added) {
    key.clear_options();
    key.clear_options_text();
  }
  return absl::StrCat(CaseKey(key), job.added ? " added" : "");
}

// The calls that the preparation of a case makes. A backward pass has a run before it, which is the
// smaller part of a training step: see RelativeEffort.
double PreparationCalls(const Job& job) {
  return job.pass == Case::PASS_BACKWARD ? 1 + 1 / 2.5 : 1;
}

// A time at a length.
struct TimeAt {
  double tokens = 0;
  double seconds = 0;  // 0: unknown
};

// Returns the time at a longer length: a + b tokens^growth through both times with b >= 0, or where
// the time grew faster than that, a power of the tokens. `then` is of the shorter length; without it
// the time grows as tokens^growth_of_one.
double Extrapolate(const TimeAt& then, const TimeAt& now, double tokens, double growth,
                   double growth_of_one) {
  const double ratio = tokens / now.tokens;
  if (then.seconds <= 0 || now.seconds <= 0 || now.tokens <= then.tokens) {
    return now.seconds * std::pow(ratio, growth_of_one);
  }
  const double ratio_before = now.tokens / then.tokens;
  const double exponent = std::log(now.seconds / then.seconds) / std::log(ratio_before);
  if (exponent >= growth) return now.seconds * std::pow(ratio, std::min(exponent, growth + 1));
  // The growing part at `now` is b now.tokens^growth.
  const double growing =
      std::max(now.seconds - then.seconds, 0.0) / (1 - std::pow(ratio_before, -growth));
  const double most = now.seconds + growing * (std::pow(ratio, growth) - 1);
  if (growth <= 1) return most;
  // That is too much where a part grows more slowly, as projections do beside attention. Then an
  // exponent halfway between that of the two times and `growth` is closer.
  const double halfway = (std::max(exponent, 0.0) + growth) / 2;
  return std::min(most, now.seconds * std::pow(ratio, halfway));
}

}  // namespace

SweepPlan::SweepPlan(const std::vector<Job>& cases, const std::vector<bool>& left,
                     const SweepPlanOptions& options)
    : cases_(cases), options_(options), states_(cases.size()) {
  size_t accuracy = 0, scaling = 0;
  for (size_t i = 0; i < cases_.size(); ++i) {
    states_[i].finished = !left[i];
    series_.push_back(SeriesKey(cases_[i]));
    group_keys_.push_back(GroupKey(cases_[i]));
    if (left[i]) ++(IsAccuracy(cases_[i]) ? accuracy : scaling);
  }
  const double visits = turns() * options_.rounds;
  accuracy_alone_ = scaling == 0;
  if (accuracy > 0) {
    const double part = accuracy_alone_ ? kScalingTimingPart : kAccuracyPart * kAccuracyTimingPart;
    accuracy_share_ = part * options_.time_budget / accuracy / visits;
  }
  if (scaling > 0) {
    scaling_share_ = kScalingTimingPart * options_.time_budget / scaling / visits;
  }
  MakeTiers();
  FindCounterparts();
}

void SweepPlan::MakeTiers() {
  std::map<std::string, size_t> tier_places, group_places;
  for (size_t i = 0; i < cases_.size(); ++i) {
    const Job& one = cases_[i];
    const int64_t tokens = static_cast<int64_t>(TokensOf(one));
    const std::string name = IsAccuracy(one) ? absl::StrCat(one.input.ToString(), " (", tokens, ")")
                                             : absl::StrCat(tokens, " tokens");
    const auto [place, is_new] =
        tier_places.emplace(absl::StrCat(IsAccuracy(one), " ", name), tiers_.size());
    if (is_new) {
      tiers_.emplace_back();
      tiers_.back().accuracy = IsAccuracy(one);
      tiers_.back().name = IsAccuracy(one) ? one.input.ToString() : name;
    }
    Tier& tier = tiers_[place->second];
    const auto [group, is_first] = group_places.emplace(group_keys_[i], tier.groups.size());
    if (is_first) tier.groups.emplace_back();
    tier.groups[group->second].push_back(i);
  }
  std::stable_sort(tiers_.begin(), tiers_.end(),
                   [](const Tier& a, const Tier& b) { return a.accuracy > b.accuracy; });
}

void SweepPlan::FindCounterparts() {
  for (const Tier& tier : tiers_) {
    for (const std::vector<size_t>& group : tier.groups) {
      for (const size_t i : group) {
        const auto spec = cases_[i].technique->Counterpart(cases_[i].problem, cases_[i].options);
        if (!spec.ok()) continue;
        const auto found = std::find_if(group.begin(), group.end(), [&](size_t other) {
          const Technique& technique = *cases_[other].technique;
          if (technique.info().name != spec->technique) return false;
          const absl::StatusOr<Options> options = technique.Canonical(spec->options);
          return options.ok() && *options == cases_[other].options;
        });
        if (found != group.end() && *found != i) states_[i].counterpart = *found;
      }
    }
  }
}

// --- Estimates of times

SweepPlan::Observation SweepPlan::ObservationOf(size_t index, const Visited& visited) const {
  Observation seen;
  seen.tokens = TokensOf(cases_[index]);
  seen.input_seconds = visited.input_seconds;
  seen.setup_seconds = IsContestant(cases_[index]) ? 0 : visited.setup_seconds;
  seen.check_seconds = visited.check_seconds;
  seen.call_seconds = visited.call_seconds;
  seen.start_seconds = std::max(visited.preparation_seconds - PreparationSeconds(index, seen), 0.0);
  return seen;
}

double SweepPlan::PreparationSeconds(size_t index, const Observation& times) const {
  return times.input_seconds + times.start_seconds + times.setup_seconds + times.check_seconds +
         PreparationCalls(cases_[index]) * times.call_seconds;
}

SweepPlan::Observation SweepPlan::Foretell(size_t index) const {
  const Job& job = cases_[index];
  Observation foretold;
  foretold.tokens = TokensOf(job);
  const auto found = observations_.find(series_[index]);
  if (found == observations_.end() || found->second.empty()) {
    foretold.start_seconds = kGuessSeconds * RelativeEffort(job);
    return foretold;
  }
  const std::vector<Observation>& seen = found->second;
  const Observation& last = seen.back();
  const Observation before = seen.size() > 1 ? seen[seen.size() - 2] : Observation();
  const auto grown = [&](double Observation::*part, double growth, double growth_of_one) {
    return Extrapolate({before.tokens, before.*part}, {last.tokens, last.*part}, foretold.tokens,
                       growth, growth_of_one);
  };
  // The growth that a technique states need not hold with the options of a counterpart.
  const double growth = job.added ? 2 : job.technique->info().growth;
  foretold.input_seconds = grown(&Observation::input_seconds, 1, 1);
  foretold.start_seconds = grown(&Observation::start_seconds, 1, 0);
  foretold.setup_seconds = grown(&Observation::setup_seconds, 1, 1);
  foretold.call_seconds = grown(&Observation::call_seconds, growth, growth);
  foretold.check_seconds = ForetellCheck(index, before, last);
  return foretold;
}

double SweepPlan::ForetellCheck(size_t index, const Observation& before,
                                const Observation& last) const {
  const Job& job = cases_[index];
  const double tokens = TokensOf(job);
  const double at_most = MostCheckSeconds(last.check_seconds, last.tokens, tokens);
  if (at_most > CheckLimitSeconds(job.purpose, ItemFor(index, /*repeats=*/false))) return 0;
  const double growth = job.technique->info().input_kind == InputKind::kQkv ? 1 : 2;
  return std::min(at_most, Extrapolate({before.tokens, before.check_seconds},
                                       {last.tokens, last.check_seconds}, tokens, growth, growth));
}

// Estimates the time from the end of the preparation on. Each sample of a contestant is tried before
// it, on new inputs, with a check that is no longer than that of the preparation.
double SweepPlan::TimingSeconds(const Visit::Item& item, const Observation& times) const {
  const Job& job = cases_[item.index()];
  const bool on_gpu = job.device == Device::kCuda;
  SampleWishes wishes;
  wishes.repetitions = item.repetitions();
  wishes.min_time = options_.min_time;
  wishes.cold = options_.cold;
  wishes.graph = on_gpu && options_.graphs;
  // A GPU reads through its caches in less than a millisecond.
  wishes.flush_seconds = on_gpu ? 0 : options_.flush_seconds;
  if (IsContestant(job)) {
    wishes.trial_seconds = times.check_seconds + times.call_seconds;
    wishes.setup_seconds = times.start_seconds;
  }
  const double pilot = std::max(options_.min_time, times.call_seconds) + wishes.trial_seconds;
  const SamplePlan samples = PlanSamples(wishes, times.call_seconds, item.share_seconds());
  // The worker takes the setups of the suite's own code to be as long as calls.
  const double longer_setups = std::max(times.setup_seconds - times.call_seconds, 0.0);
  return pilot + samples.seconds + samples.setups * longer_setups;
}

double SweepPlan::VisitSeconds(size_t index) const {
  const Observation foretold = Foretell(index);
  return PreparationSeconds(index, foretold) +
         TimingSeconds(ItemFor(index, /*repeats=*/false), foretold);
}

double SweepPlan::RepetitionSeconds(size_t index) const {
  const Visited& last = *states_[index].last;
  return last.preparation_seconds - last.check_seconds +
         TimingSeconds(ItemFor(index, /*repeats=*/true), ObservationOf(index, last));
}

double SweepPlan::TierSeconds(const Tier& tier) const {
  double seconds = 0;
  for (const std::vector<size_t>& group : tier.groups) {
    for (const size_t i : group) {
      if (IsLeft(i)) seconds += VisitSeconds(i) * (options_.rounds - states_[i].visits);
    }
  }
  return seconds * turns();
}

double SweepPlan::ExpectedSeconds(double elapsed_seconds) const {
  double seconds = 0;
  for (const Tier& tier : tiers_) seconds += TierSeconds(tier);
  if (options_.time_budget <= 0) return seconds;
  return std::min(seconds, std::max(options_.time_budget - elapsed_seconds, 0.0));
}

// --- Accuracy and breadth

double SweepPlan::Limit(const Tier& tier) const {
  if (options_.time_budget <= 0) return std::numeric_limits<double>::infinity();
  return options_.time_budget * (tier.accuracy && !accuracy_alone_ ? kAccuracyPart : 1);
}

bool SweepPlan::Fits(const Tier& tier, double elapsed_seconds) const {
  const double left = Limit(tier) - elapsed_seconds;
  // The first of its kind has no estimate, and without it there would be no result.
  const bool is_first = &tier == tiers_.data() || (&tier - 1)->accuracy != tier.accuracy;
  return is_first ? left > 0 : left >= kCaution * TierSeconds(tier);
}

std::optional<Visit> SweepPlan::Next(double elapsed_seconds) {
  while (tier_ < tiers_.size()) {
    if (!tier_begun_) {
      if (TierSeconds(tiers_[tier_]) > 0 && !Fits(tiers_[tier_], elapsed_seconds)) {
        LeaveOut(tier_, elapsed_seconds);
      }
      tier_begun_ = true;
    }
    if (std::optional<Visit> visit = NextOfTier(elapsed_seconds); visit.has_value()) return visit;
    ++tier_;
    group_ = 0;
    round_ = 0;
    tier_begun_ = false;
  }
  return NextRepetition(elapsed_seconds);
}

std::optional<Visit> SweepPlan::NextOfTier(double elapsed_seconds) {
  const Tier& tier = tiers_[tier_];
  Visit visit;
  if (options_.time_budget > 0) {
    visit.set_deadline(Limit(tier) + (tier.accuracy ? 0 : kOverrun * options_.time_budget));
    if (elapsed_seconds >= visit.deadline()) LeaveOutRest(DeadlineReason(visit));
  }
  for (; group_ < tier.groups.size(); ++group_, round_ = 0) {
    while (round_ < options_.rounds) {
      const int round = round_++;
      for (const size_t i : tier.groups[group_]) {
        if (IsLeft(i) && states_[i].visits <= round) *visit.add_items() = ItemFor(i, false);
      }
      if (visit.items_size() > 0) return visit;
    }
  }
  return std::nullopt;
}

Visit SweepPlan::VisitGroup(const std::string& group_key) {
  Visit visit;
  for (size_t i = 0; i < cases_.size(); ++i) {
    if (IsLeft(i) && group_keys_[i] == group_key) *visit.add_items() = ItemFor(i, false);
  }
  return visit;
}

Visit::Item SweepPlan::ItemFor(size_t index, bool repeats) const {
  Visit::Item item;
  item.set_index(index);
  const double share = IsAccuracy(cases_[index]) ? accuracy_share_ : scaling_share_;
  item.set_share_seconds(share * (repeats ? kRepetitionShare : 1));
  item.set_check_seconds(IsAccuracy(cases_[index]) ? 0 : scaling_share_);
  item.set_repetitions(SamplesOfVisit(index));
  // The samples of a visit that was stopped are not taken again.
  const State& state = states_[index];
  if (state.visits == 0 && state.last.has_value()) {
    item.set_repetitions(std::max(1, item.repetitions() - state.last->samples));
  }
  return item;
}

int SweepPlan::SamplesOfVisit(size_t index) const {
  const bool is_timed = !IsAccuracy(cases_[index]) || accuracy_alone_ || options_.time_budget <= 0;
  if (!is_timed) return 1;
  const int of_round = (options_.repetitions + options_.rounds - 1) / options_.rounds;
  return options_.time_budget > 0 ? std::min(of_round, kVisitRepetitions) : of_round;
}

// Leaves out the tier, and all tiers of its kind beyond it.
void SweepPlan::LeaveOut(size_t first_tier, double elapsed_seconds) {
  const Tier& first = tiers_[first_tier];
  const double needed = kCaution * TierSeconds(first);
  LeftOut left_out;
  std::vector<std::string> names;
  for (size_t t = first_tier; t < tiers_.size() && tiers_[t].accuracy == first.accuracy; ++t) {
    names.push_back(tiers_[t].name);
    for (const std::vector<size_t>& group : tiers_[t].groups) {
      for (const size_t i : group) {
        if (!IsLeft(i)) continue;
        states_[i].dropped = true;
        left_out.cases.push_back(i);
      }
    }
  }
  left_out.reason =
      absl::StrCat(absl::StrJoin(names, ", "), ": left out for all techniques alike; ", first.name,
                   " would take about ", FormatClock(needed), " and ",
                   FormatClock(std::max(Limit(first) - elapsed_seconds, 0.0)),
                   " of --time_budget=", FormatClock(options_.time_budget),
                   first.accuracy ? " are left for accuracy" : " are left");
  left_out_.push_back(std::move(left_out));
}

// Leaves out the cases of the current tier that have not had their visits.
void SweepPlan::LeaveOutRest(const std::string& reason) {
  LeftOut left_out;
  left_out.reason = reason;
  for (const std::vector<size_t>& group : tiers_[tier_].groups) {
    for (const size_t i : group) {
      if (!IsLeft(i)) continue;
      states_[i].dropped = true;
      left_out.cases.push_back(i);
    }
  }
  if (!left_out.cases.empty()) left_out_.push_back(std::move(left_out));
}

std::string SweepPlan::DeadlineReason(const Visit& visit) const {
  const bool third = visit.deadline() < options_.time_budget;
  return absl::StrCat(third ? "accuracy's third of the time budget of " : "the time budget of ",
                      FormatClock(options_.time_budget), " was spent");
}

std::vector<LeftOut> SweepPlan::TakeLeftOut() {
  std::vector<LeftOut> taken;
  taken.swap(left_out_);
  return taken;
}

// --- Repetition

// Returns 0 where no further samples are needed. A case with too few samples for an interval comes
// before all others.
double SweepPlan::Urgency(size_t index) const {
  const State& state = states_[index];
  const bool can_repeat = (!IsAccuracy(cases_[index]) || accuracy_alone_) && !state.finished &&
                          !state.dropped && state.last.has_value() && state.last->samples > 0 &&
                          state.last->samples < options_.repetitions && state.visits < kMostVisits;
  if (!can_repeat) return 0;
  if (state.last->samples < kIntervalSamples) return 1 + kIntervalSamples - state.last->samples;
  return state.last->half_width > kNarrow ? state.last->half_width : 0;
}

std::optional<Visit> SweepPlan::NextRepetition(double elapsed_seconds) {
  if (options_.time_budget <= 0 || options_.takes_turns) return std::nullopt;
  std::map<std::string, std::vector<size_t>> groups;
  for (size_t i = 0; i < cases_.size(); ++i) {
    if (Urgency(i) > 0) groups[group_keys_[i]].push_back(i);
  }
  std::vector<std::vector<size_t>> order;
  for (auto& [key, group] : groups) {
    std::stable_sort(group.begin(), group.end(),
                     [this](size_t a, size_t b) { return Urgency(a) > Urgency(b); });
    order.push_back(std::move(group));
  }
  std::stable_sort(order.begin(), order.end(), [this](const auto& a, const auto& b) {
    return Urgency(a.front()) > Urgency(b.front());
  });
  for (std::vector<size_t> group : order) {
    for (; !group.empty(); group.resize(group.size() / 2)) {
      std::set<size_t> wanted(group.begin(), group.end());
      for (const size_t i : group) {
        const std::optional<size_t> dense = states_[i].counterpart;
        if (dense.has_value() && states_[*dense].last.has_value()) wanted.insert(*dense);
      }
      Visit visit;
      visit.set_repeats(true);
      visit.set_deadline(options_.time_budget);
      double seconds = 0;
      for (const size_t i : wanted) {
        seconds += RepetitionSeconds(i);
        *visit.add_items() = ItemFor(i, /*repeats=*/true);
      }
      if (elapsed_seconds + kCaution * seconds <= options_.time_budget) return visit;
    }
  }
  return std::nullopt;
}

// --- Findings of visits

void SweepPlan::Note(size_t index, const Visited& visited) {
  State& state = states_[index];
  const bool is_first = state.visits++ == 0;
  state.last = visited;
  if (is_first) Observe(index, visited);
}

int SweepPlan::Resume(size_t index, const Visited& visited) {
  State& state = states_[index];
  const int wanted = SamplesOfVisit(index);
  // Where time is short a visit may end with the fewest samples; repetitions can add more.
  const bool may_be_short = options_.time_budget > 0 && options_.rounds == 1;
  const int of_visit = may_be_short ? std::min(wanted, kFewestSamples) : wanted;
  state.visits = std::min(options_.rounds, visited.samples / of_visit);
  state.last = visited;
  if (state.visits > 0) Observe(index, visited);
  return state.visits;
}

void SweepPlan::Observe(size_t index, const Visited& visited) {
  std::vector<Observation>& seen = observations_[series_[index]];
  const double tokens = TokensOf(cases_[index]);
  // Inputs and layers of one length count as one observation, the last.
  if (!seen.empty() && seen.back().tokens == tokens) seen.pop_back();
  seen.push_back(ObservationOf(index, visited));
}

void SweepPlan::Finish(size_t index) { states_[index].finished = true; }

}  // namespace tfb
