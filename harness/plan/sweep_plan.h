// Decides what a sweep measures next, so that its result covers all cases within a budget.
//
//   1. Accuracy cases take at most a third of the budget. They come input by input (e.g. a file's
//      layers). An input that would not fit is left out for all techniques. An accuracy case is
//      timed once where there are scaling cases, which report times; else it is timed as these are.
//   2. Breadth: scaling cases by length, the shortest first. Every case of a length gets at least
//      four samples before the next length begins. The time of a length is extrapolated from the
//      shorter ones, each part of it by its own law (SweepPlan::Foretell); a length that would not
//      fit is left out for all techniques, and so are longer ones.
//   3. Repetition: the rest of the budget is spent on samples where the interval of the median is
//      widest, each time together with the dense counterpart, since both are in the ratio. A
//      speed-up is of pairs of samples of such visits (SamplesSideBySide, results/statistics.h).
//
// A plan reads no clock and runs nothing: its caller says how much time has passed, and what each
// visit to a case found.
#ifndef TFB_HARNESS_PLAN_SWEEP_PLAN_H_
#define TFB_HARNESS_PLAN_SWEEP_PLAN_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/cases.h"
#include "harness/plan/sample_plan.h"

namespace tfb {

struct SweepPlanOptions {
  double time_budget = 0;       // seconds for the sweep; 0: no limit, and each case is done once
  int repetitions = 11;         // samples of a run at most, over all visits
  double min_time = 0.01;       // as SampleWishes
  int rounds = 1;               // visits to each case in the breadth phase, one after the other
  bool takes_turns = false;     // with another build, so that each visit takes twice as long
  double flush_seconds = 0.05;  // as SampleWishes, of the CPU's caches; an estimate
  bool cold = true;             // whether cold runs are timed too
  bool graphs = true;           // whether runs on a GPU are also timed as CUDA graphs
};

// The findings of a visit to a case.
struct Visited {
  double preparation_seconds = 0;  // of the creation, the first run, and the check
  double check_seconds = 0;        // of the check alone
  double call_seconds = 0;         // median of a run; 0 where there is no sample
  int samples = 0;                 // of a run, over all visits
  double half_width = 0;     // of the median's interval over all visits, relative to the median
  double input_seconds = 0;  // of the preparation, for making the inputs; 0 where another case did
  double setup_seconds = 0;  // median of a setup; 0 where there is no sample
};

// Cases that are not measured, and why.
struct LeftOut {
  std::vector<size_t> cases;
  std::string reason;
};

class SweepPlan {
 public:
  // `left` says which of the cases are to be measured; an earlier sweep has measured the others.
  // `cases` are in the order of MakeCases and must outlive the plan.
  SweepPlan(const std::vector<Job>& cases, const std::vector<bool>& left,
            const SweepPlanOptions& options);

  // Returns the next visit, given the seconds since the beginning, or nothing when all is done.
  std::optional<Visit> Next(double elapsed_seconds);
  // Returns the next visit to a group that another build chose (harness/measure/turns.h); that
  // build also keeps to the time. The visit has no items where every case has had its visits.
  Visit VisitGroup(const std::string& group_key);

  void Note(size_t index, const Visited& visited);
  // Adds the findings of an earlier sweep on a case that is complete, which tell the times of longer
  // ones. This and Resume are called before Next, in the order of the cases.
  void Learn(size_t index, const Visited& visited) { Observe(index, visited); }
  // Adds the findings of an interrupted sweep on a case: `visited` has all its samples. Returns the
  // number of visits that these count as.
  int Resume(size_t index, const Visited& visited);
  // Notes that the case needs no further visit: it failed, or it cannot run.
  void Finish(size_t index);
  // Returns the cases that Next has decided to leave out since the last call.
  std::vector<LeftOut> TakeLeftOut();
  // Returns why cases of a visit that its deadline cut short are left out.
  std::string DeadlineReason(const Visit& visit) const;

  // Estimates the time of the remaining visits.
  double ExpectedSeconds(double elapsed_seconds) const;

 private:
  // The times of a technique with its options at one length. Their sum, with the call counted as
  // often as the preparation makes one, is the preparation.
  struct Observation {
    double tokens = 0;
    double input_seconds = 0;  // making the inputs and copying them to the device
    // The creation and the first run beyond the other parts, e.g. the loading of kernels. Somebody
    // else's code starts a process and may compile. It has its setup in here.
    double start_seconds = 0;
    double setup_seconds = 0;  // of one warm setup
    double check_seconds = 0;  // comparing the outputs with float64; 0 where it was left out
    double call_seconds = 0;   // of one warm call
  };
  struct State {
    int visits = 0;
    bool finished = false;  // needs no further visit
    bool dropped = false;   // is left out
    std::optional<Visited> last;
    std::optional<size_t> counterpart;  // in the same group
  };
  // Cases that are measured or left out together, in groups that are measured side by side.
  struct Tier {
    bool accuracy = false;
    std::string name;  // "4096 tokens", "real (minilm_512.safetensors, layer 2)"
    std::vector<std::vector<size_t>> groups;
  };

  void MakeTiers();
  void FindCounterparts();
  // Tells whether the case still lacks visits of the breadth phase.
  bool IsLeft(size_t index) const {
    const State& state = states_[index];
    return !state.finished && !state.dropped && state.visits < options_.rounds;
  }
  std::optional<Visit> NextOfTier(double elapsed_seconds);
  bool Fits(const Tier& tier, double elapsed_seconds) const;
  double Limit(const Tier& tier) const;
  void LeaveOut(size_t first_tier, double elapsed_seconds);
  void Observe(size_t index, const Visited& visited);
  void LeaveOutRest(const std::string& reason);
  std::optional<Visit> NextRepetition(double elapsed_seconds);
  Visit::Item ItemFor(size_t index, bool repeats) const;
  // Returns the most samples of a case that a visit takes, those of a stopped visit included.
  int SamplesOfVisit(size_t index) const;
  double Urgency(size_t index) const;
  double VisitSeconds(size_t index) const;
  double RepetitionSeconds(size_t index) const;
  double TierSeconds(const Tier& tier) const;
  Observation ObservationOf(size_t index, const Visited& visited) const;
  // Estimates the times of a case from those of its technique at shorter lengths.
  //
  // With two lengths and more a part of the time is a fixed part and one that grows as a power p of
  // the tokens, which the last two determine: a + b n^p, with b >= 0; for p > 1 at most a power with
  // the exponent halfway from the one between the two to p. Where it grew faster than n^p, it is a
  // power with the exponent between the two, at most p + 1. With one length nothing separates the
  // fixed part from the other:
  //
  //   part    p                                                  with one length
  //   input   1, as tensors                                      grows
  //   start   1, as the memory that a first run touches          fixed: kernels are loaded, and
  //                                                              processes started, once
  //   setup   1, as masks and indices                            grows
  //   check   1 where rows are sampled, 2 for whole networks     grows; none where CheckForecast
  //                                                              would leave it out
  //   call    the technique's growth                             grows
  //
  // So fixed costs are never taken to grow as a technique's work does. On a GPU they are nearly all
  // of the time of short inputs.
  Observation Foretell(size_t index) const;
  double ForetellCheck(size_t index, const Observation& before, const Observation& last) const;
  double PreparationSeconds(size_t index, const Observation& times) const;
  double TimingSeconds(const Visit::Item& item, const Observation& times) const;
  double turns() const { return options_.takes_turns ? 2 : 1; }

  const std::vector<Job>& cases_;
  SweepPlanOptions options_;
  std::vector<State> states_;
  std::vector<std::string> series_;  // by case: equal for those that differ in length alone
  std::vector<std::string> group_keys_;
  std::map<std::string, std::vector<Observation>> observations_;  // by series; ascending in tokens
  std::vector<Tier> tiers_;
  size_t tier_ = 0, group_ = 0;  // the position of the breadth phase
  int round_ = 0;
  bool tier_begun_ = false;
  double accuracy_share_ = 0, scaling_share_ = 0;  // seconds for the timing of a case
  bool accuracy_alone_ = false;                    // there are no scaling cases
  std::vector<LeftOut> left_out_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_SWEEP_PLAN_H_
