// Computes the numbers that a choice between techniques rests on: the error, the time and the
// memory of each at one length. This header is private to the report.
#ifndef TFB_RESULTS_CHOICES_H_
#define TFB_RESULTS_CHOICES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/report_rows.h"

namespace tfb {
namespace report {

// One technique with its options at one length.
struct Choice {
  const Series* series = nullptr;
  double time_ns = 0;
  double error = 0;  // against dense, the median over its cases on ChoiceSet::inputs
  std::optional<SpeedUpInterval> speed_up;
  std::optional<double> memory;  // MemoryAt
};

// Tells whether `a` dominates `b`: it is no worse in time and error, and better in one of them.
bool Beats(const Choice& a, const Choice& b);

// Techniques that are compared with the same dense counterpart. Errors and speed-ups are comparable
// only within one set.
struct ChoiceSet {
  const Series* dense = nullptr;  // the counterpart; null where the file has no case of it
  std::vector<Choice> choices;
  std::string inputs;  // the inputs on which the errors were measured
  // Returns the number of choices that are no counterparts: of what was asked for.
  size_t techniques() const;
  // Tells whether the counterpart ran only for others to be held against, with options of its own:
  // it is never recommended.
  bool is_apart() const { return dense != nullptr && dense->is_counterpart; }
};

// Returns the longest length at which more than half of the group's techniques have a time, not
// counting techniques without any time. Returns 0 where there is no time at all.
int64_t SharedLength(const TableGroup& group);

// Returns the techniques of a scaling group by counterpart, the set of most techniques first; of
// equal ones, that which is held against what was asked for, then that of the most threads. Where no
// set has two techniques, those come first that have one and its counterpart. Errors come from
// the accuracy cases of the same element type, or from scaling cases on the group's input where
// those give no choice: of the forward pass, whose outputs are those of all passes. Leaves out a
// technique of which any case of that pass or of the group's failed.
std::vector<ChoiceSet> FindChoiceSets(const Analysis& analysis, const TableGroup& group,
                                      int64_t tokens);

// Returns the median errors against dense by Series::row_key, as FindChoiceSets uses them.
std::map<std::string, double> ErrorsByRow(const Analysis& analysis, const TableGroup& group);

// Returns the scaling groups of a pass that differ only in their mask and have the most techniques
// to choose from, those without a mask first; of equal ones, those with the longest SharedLength,
// then those of the most threads, then the first of the file. Returns none where no group has two
// techniques to choose from.
std::vector<TableGroup> MainGroups(const Analysis& analysis, Case::Pass pass);
// Returns all scaling groups of a pass in which there is a choice.
std::vector<TableGroup> ChoiceGroups(const Analysis& analysis, Case::Pass pass);
// Returns the passes that have main groups. The backward pass, which is a part of a step, is among
// them only where there is no other.
std::vector<Case::Pass> PassesToChooseBy(const Analysis& analysis);

// Returns the series' name, cut to half a usual line, since text is broken only at spaces.
std::string NameInText(const Series& series);

}  // namespace report
}  // namespace tfb

#endif  // TFB_RESULTS_CHOICES_H_
