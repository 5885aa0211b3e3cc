// Makes the tables of the terminal and Markdown renderings.
#ifndef TFB_RESULTS_REPORT_H_
#define TFB_RESULTS_REPORT_H_

#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/table.h"

namespace tfb {
namespace report {

// Returns a line for each machine, "host · processor, 2 threads, AVX-512 · f32 peak … · commit
// …", with its GPU or the reason why it has none; then the origin of the tensors of each input
// file, in full with `details`.
std::vector<std::string> HeaderLines(const Analysis& analysis, bool details);

// Returns the errors by element type, tokens, heads and input file. A row holds all layers of the
// file or, with `details`, one of them.
std::vector<Table> AccuracyTables(const Analysis& analysis, bool details);
// Returns the times over lengths.
std::vector<Table> ScalingTables(const Analysis& analysis);
// Returns the times of appended segments of techniques that stream. Those of accuracy cases are
// included with `details`, or where there are no others.
std::vector<Table> StreamingTables(const Analysis& analysis, bool details);
// Returns three sentences: the fastest technique within a limit of the error against dense; from
// which length on it is faster than dense, and its memory; what did not run, and why. The first two
// are there for the forward pass and for the training step, of those that were measured. Returns
// none where there are no cases.
std::vector<std::string> HeadlineSentences(const Analysis& analysis);
// Returns all but the last of them, or none where no two techniques have both a time and an error.
std::vector<std::string> RecommendationSentences(const Analysis& analysis);
// The Pareto-optimal techniques of each scaling table in speed and error, among those with the same
// dense counterpart, at the longest length that most techniques ran.
struct ChoiceReport {
  // One for each mask of the cases with the most techniques, of the forward pass and of training.
  std::vector<Table> first;
  std::vector<Table> more;
};
ChoiceReport ChoiceTables(const Analysis& analysis);
// The title of a technique, its source and its cost beside its own dense counterpart: a row for
// each of its options and masks. A technique without any time has a row that says why.
struct TechniqueCard {
  std::string name;
  std::string title;
  std::string citation;
  std::string counterpart;  // "held against dense"; empty where there is none
  Table numbers;
};
// Returns the cards by family and name, on the cases of MainGroups (results/choices.h).
std::vector<TechniqueCard> TechniqueCards(const Analysis& analysis);
// Returns how far attention changes when sequences grow, by length (harness/judge/extrapolation.h).
std::vector<Table> ExtrapolationTables(const Analysis& analysis);
// Returns the statistics that techniques report by name.
std::vector<Table> StatisticsTables(const Analysis& analysis);
// Returns setup, cold and warm runs, rates and memory at each technique's longest length.
std::vector<Table> CostTables(const Analysis& analysis);
// Explains the marks in `tables`. Returns an empty text where there are none.
std::string LegendLine(const std::vector<Table>& tables);
// Returns, where contestants computed what techniques of the suite compute, how many times as fast
// the suite's are, by length and threads. A cell holds the fastest contestant.
std::vector<Table> DuelTables(const Analysis& analysis);
// Returns where contestants come from, what judges them, and what they run with; nothing where
// there are none.
std::vector<Table> ContestantTables(const Analysis& analysis);
// Returns everything that is known of each machine, and the contestants.
std::vector<Table> EnvironmentTables(const Analysis& analysis);

struct OutcomeLine {
  std::string text;
  bool bad = false;  // whether the line is about a failure
};
// Returns the cases that are not ok by status and reason, then one line with the number of cases of
// each status. A line names the techniques of a failure, and those of a skip only with `details`,
// since a missing device skips every technique.
std::vector<OutcomeLine> OutcomeLines(const Analysis& analysis, bool details = false);
// Returns the same as a table of status, number of cases, reason and techniques, without the total.
Table OutcomeTable(const Analysis& analysis);

}  // namespace report
}  // namespace tfb

#endif  // TFB_RESULTS_REPORT_H_
