// Orders a result set for display: which cases count, which belong to one table, one row and one
// curve, and what follows from each curve. All pointers point into the set that was given.
#ifndef TFB_RESULTS_ANALYSIS_H_
#define TFB_RESULTS_ANALYSIS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "results/results.pb.h"
#include "results/statistics.h"

namespace tfb {

// One technique with its options on one device: a row of a table. The samples of cases that differ
// only in the seed are pooled.
struct Series {
  std::string name;  // for people: the display name, or technique and options
  // Technique, options, device and threads: the same in every table.
  std::string row_key;
  // Whether the row ran, with other options at each length, only for others to be compared with:
  // the counterparts of the same cases are one row, "near window=512 (dense counterpart)", which
  // names the options that are no defaults and that all its cases share.
  bool is_counterpart = false;
  bool is_common_baseline = false;  // whether other techniques are compared with it
  std::vector<const Case*> cases;
  std::map<int64_t, std::vector<const Case*>> by_tokens;  // LengthOf(problem)

  // The time of a warm run at the lengths that were timed.
  std::map<int64_t, MedianInterval> run_ns;
  // The speed-up over dense at the lengths at which both have a time; 1 for a baseline.
  std::map<int64_t, SpeedUpInterval> speed_ups;
  std::optional<Growth> growth;
  std::optional<Crossover> crossover;  // against dense; absent for a baseline
  bool is_baseline = false;            // whether every case is a baseline

  // Returns the first case at the longest length that has a run time, or null.
  const Case* longest() const;
  const Case& first() const { return *cases.front(); }
};

// Tells whether row `a` stands before row `b`: common baselines come first, others by family and
// name, a counterpart after its technique. It ignores options and device.
bool StandsBefore(const Series& a, const Series& b);

// The cases of one table. They are equal in machine, purpose, element type and input; accuracy
// cases also in the problem, scaling cases also in device and in all of the problem but its tokens.
struct SeriesGroup {
  Case::Purpose purpose = Case::PURPOSE_UNSPECIFIED;
  std::vector<Series> series;    // by StandsBefore, then in the order of the file
  std::vector<int64_t> lengths;  // ascending
  const Environment* environment = nullptr;
  // The name of the machine and build for a title: "on HOST, commit 786d64f0c1". It holds only what
  // tells them from the others of the file, and is empty where there is one.
  std::string place;
  // Groups with equal fold keys may share a table: accuracy groups that differ only in the layer of
  // the input and in the mask.
  std::string fold_key;
  const Case& first() const { return series.front().first(); }
};

class Analysis {
 public:
  // `results` must outlive the analysis and must not change.
  explicit Analysis(const ResultSet& results);
  Analysis(const Analysis&) = delete;
  Analysis& operator=(const Analysis&) = delete;

  const ResultSet& results() const { return results_; }
  // Returns the cases in the file's order; of several with one key on one machine, only the last.
  const std::vector<const Case*>& cases() const { return cases_; }
  int64_t superseded_cases() const { return superseded_cases_; }
  // Returns the passes of the cases, each once: the forward pass, the backward pass, training.
  const std::vector<Case::Pass>& passes() const { return passes_; }
  // Returns the groups by pass, those of one pass in the file's order.
  const std::vector<SeriesGroup>& groups() const { return groups_; }
  // Returns one environment for each machine, in the file's order.
  const std::vector<const Environment*>& machines() const { return machines_; }

  // Returns an empty environment where the file lacks the case's own.
  const Environment& EnvironmentOf(const Case& result) const;
  const Case* DenseOf(const Case& result) const { return partners_.Find(result); }
  // Returns the case of the forward pass whose output a case has, as both differ only in the pass:
  // that case's errors are those of this one's output. Returns null where there is none.
  const Case* ForwardOf(const Case& result) const;
  const Series* SeriesOf(const Case& result) const;
  // Returns the row that `series` is compared with at `tokens`, or null.
  const Series* DenseSeriesOf(const Series& series, int64_t tokens) const;

 private:
  std::string KeyOnMachine(const Case& result) const;
  void SelectCases();
  void FindCounterparts();
  std::string RowKeyOf(const Case& result) const;
  void Group();
  static void NameCounterparts(SeriesGroup* group);
  std::string PlaceOf(const Environment& environment) const;
  void Finish(Series* series) const;
  std::optional<SpeedUpInterval> SpeedUpOver(const std::vector<const Case*>& cases) const;

  const ResultSet& results_;
  DensePartners partners_;
  Environment unknown_environment_;
  std::map<std::string, const Environment*> environments_;  // by id
  std::map<std::string, std::string> machine_names_;        // by environment id
  std::vector<const Environment*> machines_;
  std::vector<const Case*> cases_;
  int64_t superseded_cases_ = 0;
  std::vector<Case::Pass> passes_;
  std::map<std::string, const Case*> forward_cases_;  // by key and machine
  // Maps a case that ran only as a counterpart to the row of a technique that is compared with it,
  // or with another case of the same row of counterparts.
  std::map<const Case*, std::string> counterparts_;
  std::set<std::string> common_baselines_;  // techniques
  std::vector<SeriesGroup> groups_;
  std::map<const Case*, std::pair<int, int>> places_;  // group and series
};

// Returns the name of the case's technique with its options, for people.
std::string DisplayName(const Case& result);

}  // namespace tfb

#endif  // TFB_RESULTS_ANALYSIS_H_
