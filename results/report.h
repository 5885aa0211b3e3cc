// The tables of the terminal and Markdown renderings, before they are text.
#ifndef TFB_RESULTS_REPORT_H_
#define TFB_RESULTS_REPORT_H_

#include <string>
#include <vector>

#include "results/analysis.h"
#include "results/table.h"

namespace tfb {
namespace report {

// One machine on one line each: "host · processor, 2 threads, AVX-512 · f32 peak … · commit …",
// and a GPU where there is one or the reason why not; then where the tensors of each input file come
// from, with `details` in full.
std::vector<std::string> HeaderLines(const Analysis& analysis, bool details);

// Errors, by element type, tokens, heads and input file: a row holds the layers of the file, or with
// `details` one of them.
std::vector<Table> AccuracyTables(const Analysis& analysis, bool details);
// Times over lengths.
std::vector<Table> ScalingTables(const Analysis& analysis);
// Times of appended segments, where techniques stream: those of accuracy cases with `details`, or
// where there are no others.
std::vector<Table> StreamingTables(const Analysis& analysis, bool details);
// The message in three sentences: the fastest technique within a limit of the error against dense;
// from which length on it is faster than dense, and its memory; what did not run, and why. Empty
// without cases.
std::vector<std::string> HeadlineSentences(const Analysis& analysis);
// The first two of them; empty where no two techniques have both a time and an error.
std::vector<std::string> RecommendationSentences(const Analysis& analysis);
// For each scaling table the techniques that no other beats in both speed and error, among those that
// are held against the same dense counterpart, at the longest length that most techniques ran.
struct ChoiceReport {
  std::vector<Table> first;  // one for each mask of the cases with the most techniques
  std::vector<Table> more;
};
ChoiceReport ChoiceTables(const Analysis& analysis);
// Tells of each technique its title, its source and its cost beside its own dense counterpart: a row
// for each of its options and masks. A technique without any time has a row that says why.
struct TechniqueCard {
  std::string name;
  std::string title;
  std::string citation;
  std::string counterpart;  // "held against dense"; empty where nothing is
  Table numbers;
};
// By family and name, on the cases with the most techniques (MainGroups in results/choices.h).
std::vector<TechniqueCard> TechniqueCards(const Analysis& analysis);
// How far attention changes when sequences grow, over lengths (harness/judge/extrapolation.h).
std::vector<Table> ExtrapolationTables(const Analysis& analysis);
// The statistics that techniques report by name.
std::vector<Table> StatisticsTables(const Analysis& analysis);
// Setup, cold and warm runs, rates and memory at each technique's longest length.
std::vector<Table> CostTables(const Analysis& analysis);
// The marks that stand in `tables`, explained; empty where there are none.
std::string LegendLine(const std::vector<Table>& tables);
// Everything known of each machine.
std::vector<Table> EnvironmentTables(const Analysis& analysis);

// What did not go well, by status and reason, then one line with the number of cases of each status.
// A failure has the names of its techniques; a skip has them with `details` alone, since a missing
// device skips every technique there is. `bad` marks lines about failures.
struct OutcomeLine {
  std::string text;
  bool bad = false;
};
std::vector<OutcomeLine> OutcomeLines(const Analysis& analysis, bool details = false);
// Returns status, number of cases, reason and techniques as a table without the total.
Table OutcomeTable(const Analysis& analysis);

}  // namespace report
}  // namespace tfb

#endif  // TFB_RESULTS_REPORT_H_
