// Places the names of curves and points so that none covers another.
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

// Estimates the width of `text` in a sans-serif font, since only a browser could measure it.
double TextWidth(absl::string_view text, double font_size);

// Moves `wanted`, the middles of labels in one column, as little as needed for them to be `spacing`
// apart between `top` and `bottom`, or closer where they are too many. The order stays.
std::vector<double> Spread(const std::vector<double>& wanted, double spacing, double top,
                           double bottom);

// A straight line that no label may lie on.
struct Line {
  double x1 = 0, y1 = 0, x2 = 0, y2 = 0;
  bool Crosses(const Box& box) const;
};

// A label beside a point.
struct PointLabel {
  double x = 0, y = 0;  // of the point
  std::string text;
  bool needed = false;      // whether it may stand far from its point, rather than be left out
  bool short_text = false;  // whether it is a number, which may stand further away than a name
};
struct PlacedLabel {
  Box box;
  bool with_leader = false;  // whether a line leads to it, since it is far from its point
};
// The places that labels must not cover.
struct Obstacles {
  std::vector<Box> points;
  std::vector<Box> texts;  // leaders do not cross these, either
  std::vector<Line> lines;
};
// Finds for each label a place within `area` that is clear of the obstacles, of the labels before
// it and of their leaders, or nothing. The important labels come first. Adds the labels and their
// leaders to the obstacles.
std::vector<std::optional<PlacedLabel>> PlaceLabels(const std::vector<PointLabel>& labels,
                                                    const Box& area, double font_size,
                                                    Obstacles* obstacles);
// Returns the line from a label's point to its place.
Line LeaderOf(const PointLabel& label, const Box& box);

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_LABELS_H_
