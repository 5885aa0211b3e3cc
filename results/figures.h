// The figures of a report: what a result set shows as plots, with the numbers behind each as a
// table. Nothing here knows a technique.
#ifndef TFB_RESULTS_FIGURES_H_
#define TFB_RESULTS_FIGURES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "results/analysis.h"
#include "results/plot.h"
#include "results/table.h"

namespace tfb {

enum class FigureKind { kScaling, kFrontier, kMemory, kRoofline };
// "scaling", "frontier", "memory", "roofline"; InvalidArgument names what is allowed.
absl::StatusOr<FigureKind> ParseFigureKind(absl::string_view name);
absl::string_view Name(FigureKind kind);

// Which techniques a figure shows, counterparts and baselines aside: those that belong to what is
// shown are there as well.
using SeriesFilter = std::function<bool(const Series&)>;

struct Figure {
  FigureKind kind = FigureKind::kScaling;
  std::string title;    // what all panels share: device, type, problem, input
  std::string caption;  // how to read it, and what could not be drawn
  std::vector<plot::Plot> panels;
  Table data;
};

// Small multiples: a panel holds at most as many techniques as can be told apart, of one family,
// kind of input and expected growth where there are more.
//
// Scaling: median time over tokens on logarithmic axes, one figure for each group of cases that
// differ in technique and tokens alone; dense for reference, each technique's own counterpart as a
// thin line, a ring where the two cross, slopes of the expected exponents.
// Memory: workspace and parameters over tokens, in the same panels.
std::vector<Figure> ScalingFigures(const Analysis& analysis, const SeriesFilter& filter);
std::vector<Figure> MemoryFigures(const Analysis& analysis, const SeriesFilter& filter);
// Error against dense over time relative to dense, one figure for each input profile, one panel for
// each counterpart; for text, bits per byte over time and over the computation that is spent, where
// techniques report it. Those that no other beats in both are joined.
std::vector<Figure> FrontierFigures(const Analysis& analysis, const SeriesFilter& filter);
// FLOP/s over FLOPs a byte, at each technique's longest run, under the measured peaks.
std::vector<Figure> RooflineFigures(const Analysis& analysis, const SeriesFilter& filter);

std::vector<Figure> FiguresOf(FigureKind kind, const Analysis& analysis,
                              const SeriesFilter& filter);

// Names a group of scaling cases: "cpu f32, 8 heads of 64, causal, input gaussian".
std::string GroupName(const Analysis& analysis, const SeriesGroup& group);

}  // namespace tfb

#endif  // TFB_RESULTS_FIGURES_H_
