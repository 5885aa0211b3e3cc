// A result set put in order for showing: which cases count, which belong to one table, one row and
// one curve, and what follows from each curve. All pointers are into the set that was given.
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

// One technique with its options on one device: a row of a table. Cases that differ in nothing but
// the seed share a place, and their samples are pooled.
struct Series {
  std::string name;  // for people: the display name, or technique and options
  // Technique, options, device and threads: the same in every table.
  std::string row_key;
  // Runs with options of its own at each length, only for others to be held against: the
  // counterparts of the same cases are one row, "near (dense counterpart)".
  bool is_counterpart = false;
  bool is_common_baseline = false;  // other techniques are held against it
  std::vector<const Case*> cases;
  std::map<int64_t, std::vector<const Case*>> by_tokens;  // LengthOf(problem)

  // The time of a warm run, at the lengths that were timed.
  std::map<int64_t, MedianInterval> run_ns;
  // The speed-up over dense, at the lengths at which both have a time. A baseline's is 1.
  std::map<int64_t, SpeedUpInterval> speed_ups;
  std::optional<Growth> growth;
  std::optional<Crossover> crossover;  // against dense; absent for a baseline
  bool is_baseline = false;            // every case is

  // First case at the longest length that has a run time, or null.
  const Case* longest() const;
  const Case& first() const { return *cases.front(); }
};

// The order of rows: common baselines, then by family and name, a counterpart after its technique.
// False both ways for rows that differ in options or device: those stay as they are.
bool StandsBefore(const Series& a, const Series& b);

// The cases of one table: equal in machine, purpose, element type and input; for accuracy in the
// problem, for scaling in device and in the problem but for its tokens.
struct SeriesGroup {
  Case::Purpose purpose = Case::PURPOSE_UNSPECIFIED;
  std::vector<Series> series;    // by StandsBefore, then in the order of the file
  std::vector<int64_t> lengths;  // ascending
  const Environment* environment = nullptr;
  // Groups with equal fold keys may stand in one table: accuracy groups that differ in nothing but
  // the layer of the input and the mask.
  std::string fold_key;
  const Case& first() const { return series.front().first(); }
};

class Analysis {
 public:
  // `results` must outlive the analysis and stay as it is.
  explicit Analysis(const ResultSet& results);
  Analysis(const Analysis&) = delete;
  Analysis& operator=(const Analysis&) = delete;

  const ResultSet& results() const { return results_; }
  // The cases that count, in the file's order: of several with one key on one machine the last.
  const std::vector<const Case*>& cases() const { return cases_; }
  int64_t superseded_cases() const { return superseded_cases_; }
  const std::vector<SeriesGroup>& groups() const { return groups_; }
  // One environment for each machine, in the file's order.
  const std::vector<const Environment*>& machines() const { return machines_; }

  // Returns an empty environment where the file lacks the case's own.
  const Environment& EnvironmentOf(const Case& result) const;
  const Case* DenseOf(const Case& result) const { return partners_.Find(result); }
  const Series* SeriesOf(const Case& result) const;
  // Returns the row that `series` is held against at `tokens`, or null.
  const Series* DenseSeriesOf(const Series& series, int64_t tokens) const;

 private:
  void SelectCases();
  void FindCounterparts();
  std::string RowKeyOf(const Case& result) const;
  void Group();
  void NameCounterparts(SeriesGroup* group) const;
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
  // Maps a case that ran only as a counterpart to the row of a technique that is held against it, or
  // against another case of the same row of counterparts.
  std::map<const Case*, std::string> counterparts_;
  std::set<std::string> common_baselines_;  // techniques
  std::vector<SeriesGroup> groups_;
  std::map<const Case*, std::pair<int, int>> places_;  // group and series
};

// Name of the case's technique with its options, for people.
std::string DisplayName(const Case& result);

}  // namespace tfb

#endif  // TFB_RESULTS_ANALYSIS_H_
