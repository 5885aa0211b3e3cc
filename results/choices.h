// The numbers that a choice between techniques rests on: the error, the time and the memory of each
// at one length. Private to the report.
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
  std::optional<double> memory;  // workspace and parameters, bytes
};

// Whether `a` is no worse than `b` in time and error, and better in one of them.
bool Beats(const Choice& a, const Choice& b);

// Techniques that are held against the same dense counterpart: only their errors and speed-ups
// compare.
struct ChoiceSet {
  const Series* dense = nullptr;  // null where the file has no case of it
  std::vector<Choice> choices;
  std::string inputs;  // on which the errors were measured
};

// The longest length at which more than half of the group's techniques have a time; techniques
// without any time do not count. 0 where there is no time at all.
int64_t SharedLength(const TableGroup& group);

// The techniques of a scaling group by counterpart, the largest set first. Errors come from the
// accuracy cases of the same element type, or from the group itself where those give no choice. A
// technique is left out where any of its cases failed: what is wrong is no choice.
std::vector<ChoiceSet> FindChoiceSets(const Analysis& analysis, const TableGroup& group,
                                      int64_t tokens);

// The errors against dense, medians by Series::row_key, as FindChoiceSets takes them.
std::map<std::string, double> ErrorsByRow(const Analysis& analysis, const TableGroup& group);

// The scaling groups that differ in their mask alone and have the most techniques to choose from
// among them, without a mask first. Empty where no group has two techniques to choose from.
std::vector<TableGroup> MainGroups(const Analysis& analysis);

// The series' name, cut to half a usual line: texts are broken at spaces only.
std::string NameInText(const Series& series);

}  // namespace report
}  // namespace tfb

#endif  // TFB_RESULTS_CHOICES_H_
