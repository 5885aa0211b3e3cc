// Where the names of curves and points stand, so that none covers another.
#ifndef TFB_RESULTS_PLOT_LABELS_H_
#define TFB_RESULTS_PLOT_LABELS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tfb {
namespace plot {

struct Box {
  double x = 0, y = 0, width = 0, height = 0;  // x and y of the upper left corner
  bool Overlaps(const Box& other) const;
  bool Contains(const Box& other) const;
};

// About the width of `text` in a sans-serif font: what an SVG cannot ask without a browser.
double TextWidth(absl::string_view text, double font_size);

// Moves `wanted`, the middles of labels in one column, as little as needed for them to be
// `spacing` apart between `top` and `bottom`; closer where they are too many. In the order given.
std::vector<double> Spread(const std::vector<double>& wanted, double spacing, double top,
                           double bottom);

// A label beside a point, the important ones first.
struct PointLabel {
  double x = 0, y = 0;  // of the point
  std::string text;
  bool needed = false;  // further from its point rather than not at all
};
struct PlacedLabel {
  Box box;
  bool with_leader = false;  // too far from its point to do without a line to it
};
// For each label its place within `area`, free of the points `obstacles` and of the labels before
// it, or nothing.
std::vector<std::optional<PlacedLabel>> PlaceLabels(const std::vector<PointLabel>& labels,
                                                    const std::vector<Box>& obstacles,
                                                    const Box& area, double font_size);

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_LABELS_H_
