// Plots for a paper: SVG of a given width, and PNG made of it.
#ifndef TFB_RESULTS_SINGLE_PLOT_H_
#define TFB_RESULTS_SINGLE_PLOT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "results/results.pb.h"

namespace tfb {

struct SinglePlotOptions {
  std::string kind;        // "scaling", "frontier", "memory", "roofline"
  std::string family;      // only its techniques; all where empty
  std::string techniques;  // only those that match one of these globs, separated by commas
  std::string group;       // only figures, or panels of them, whose title has this text: "causal"
  double width_mm = 180;   // of the whole: two panels beside each other, or one
};

// The figures of results/figures.h as one SVG file, black on white. InvalidArgument names an option
// that is out of range; NotFound where nothing is left to draw, with the figures that there are.
absl::StatusOr<std::string> RenderSinglePlot(const ResultSet& results,
                                             const SinglePlotOptions& options);

// Writes `svg` as a PNG of `dots_per_inch` to `path`, whole or not at all, by running rsvg-convert
// (Debian: librsvg2-bin). FailedPrecondition, naming it, where it is not installed.
absl::Status WritePng(const std::string& svg, int dots_per_inch, const std::string& path);

}  // namespace tfb

#endif  // TFB_RESULTS_SINGLE_PLOT_H_
