// Makes plots for a paper: SVG of a given width, and PNG from it.
#ifndef TFB_RESULTS_SINGLE_PLOT_H_
#define TFB_RESULTS_SINGLE_PLOT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "results/results.pb.h"

namespace tfb {

struct SinglePlotOptions {
  std::string kind;        // "scaling", "frontier", "memory", "roofline"
  std::string family;      // shows only its techniques; all where empty
  std::string techniques;  // shows only those that match one of these globs, separated by commas
  std::string group;       // shows only figures or panels whose title has this text: "causal"
  double width_mm = 180;   // of the whole: one panel, or two side by side
};

// Returns the figures of results/figures.h as one SVG file, black on white. Returns InvalidArgument
// where an option is out of range; NotFound, with the existing figures, where nothing is selected.
absl::StatusOr<std::string> RenderSinglePlot(const ResultSet& results,
                                             const SinglePlotOptions& options);

// Writes `svg` as a PNG of `dots_per_inch` to `path` atomically by running rsvg-convert (Debian:
// librsvg2-bin). Returns FailedPrecondition where that program is not installed.
absl::Status WritePng(const std::string& svg, int dots_per_inch, const std::string& path);

}  // namespace tfb

#endif  // TFB_RESULTS_SINGLE_PLOT_H_
