// Makes the figures of a report: a result set as plots, with the numbers of each as a table.
// Nothing here depends on a particular technique.
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
// Parses "scaling", "frontier", "memory" or "roofline". Returns InvalidArgument, naming these,
// else.
absl::StatusOr<FigureKind> ParseFigureKind(absl::string_view name);
absl::string_view Name(FigureKind kind);

// Tells whether a figure shows a technique. It also shows the counterparts and baselines of the
// techniques that it shows.
using SeriesFilter = std::function<bool(const Series&)>;

struct Figure {
  FigureKind kind = FigureKind::kScaling;
  std::string title;    // what all panels share: device, type, problem, input
  std::string caption;  // how to read it, and what could not be drawn
  std::vector<plot::Plot> panels;
  Table data;
};

// Figures are small multiples: a panel has at most as many techniques as can be distinguished;
// where there are more, each panel has one family, kind of input and expected growth.
//
// Scaling figures show median time over tokens on logarithmic axes, one figure for each group of
// cases that differ only in technique and tokens. They show dense for reference, each technique's
// own counterpart as a thin line, a ring where the two cross, and slopes of the expected exponents.
// Memory figures show working memory (results/statistics.h) over tokens in the same panels.
std::vector<Figure> ScalingFigures(const Analysis& analysis, const SeriesFilter& filter);
std::vector<Figure> MemoryFigures(const Analysis& analysis, const SeriesFilter& filter);
// Frontier figures show error against dense over time relative to dense, one figure for each input
// profile, one panel for each counterpart; for text they show bits per byte over time and, where
// techniques report it, over FLOPs. A line joins the Pareto-optimal techniques.
std::vector<Figure> FrontierFigures(const Analysis& analysis, const SeriesFilter& filter);
// Roofline figures show FLOP/s over FLOPs per byte at each technique's longest run, with the peaks.
std::vector<Figure> RooflineFigures(const Analysis& analysis, const SeriesFilter& filter);

std::vector<Figure> FiguresOf(FigureKind kind, const Analysis& analysis,
                              const SeriesFilter& filter);

// Returns the name of a group of scaling cases: "cpu f32, 8 heads of 64, causal, input gaussian",
// or "cpu f32, 8 heads of 64, causal, training step, input gaussian".
// It also names the machine and build where the file has several.
std::string GroupName(const SeriesGroup& group);

}  // namespace tfb

#endif  // TFB_RESULTS_FIGURES_H_
