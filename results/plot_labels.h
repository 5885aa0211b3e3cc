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

// A straight line that no label may lie on.
struct Line {
  double x1 = 0, y1 = 0, x2 = 0, y2 = 0;
  bool Crosses(const Box& box) const;
};

// A label beside a point, the important ones first.
struct PointLabel {
  double x = 0, y = 0;  // of the point
  std::string text;
  bool needed = false;      // stands further from its point rather than not at all
  bool short_text = false;  // a number, which may stand further away than a name
};
struct PlacedLabel {
  Box box;
  bool with_leader = false;  // too far from its point to do without a line to it
};
// Places that labels have to stay off.
struct Obstacles {
  std::vector<Box> points;
  std::vector<Box> texts;  // no line to a label leads through one
  std::vector<Line> lines;
};
// Finds for each label a place within `area`, free of the obstacles, of the labels before it and of
// the lines to those; or nothing. Adds the labels and their lines to the obstacles.
std::vector<std::optional<PlacedLabel>> PlaceLabels(const std::vector<PointLabel>& labels,
                                                    const Box& area, double font_size,
                                                    Obstacles* obstacles);
// The line from a label's point to its place.
Line LeaderOf(const PointLabel& label, const Box& box);

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_LABELS_H_
