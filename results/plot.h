// Draws plots as SVG without a browser and without a plotting program: curves and points on two
// axes, which are named beside their ends, not by colour alone.
//
// A drawing uses CSS classes for all its colours. The style sheet of a page defines these, in light
// and dark; an SVG file defines them itself, black on white.
#ifndef TFB_RESULTS_PLOT_H_
#define TFB_RESULTS_PLOT_H_

#include <optional>
#include <string>
#include <vector>

#include "results/plot_axis.h"

namespace tfb {
namespace plot {

// The number of combinations of colour, marker and dashes; style kStyles looks like style 0.
inline constexpr int kStyles = 7;
inline constexpr int kReferenceStyle = -1;  // of the baseline: the colour of the text

struct Point {
  double x = 0, y = 0;
  // The ends of the interval of y, which is drawn as a whisker.
  std::optional<double> low, high;
};

struct Curve {
  enum class Kind {
    kLine,         // markers joined by a line, the name at its end
    kCounterpart,  // a bold dotted line without markers or name, in the colour of the technique
                   // that is compared with it
    kScatter,      // markers, the name beside the first
  };
  std::string name;
  std::string label;   // shorter name beside the drawing; the name where it is empty
  std::string group;   // the group that filters select by
  std::string key;     // refers to the legend; equal for curves that are shown and hidden together
  std::string legend;  // the legend's name of all with the key; the name where it is empty
  std::string description;  // every number in words, for screen readers and as a tooltip
  const std::string& shown_name() const { return label.empty() ? name : label; }
  int style = 0;
  Kind kind = Kind::kLine;
  bool hollow = false;
  bool name_needed = true;  // whether a scattered point's name may stand far away, not be left out
  std::vector<Point> points;
};

// A thin line for reference: a bound, a frontier.
struct Guide {
  enum class Kind { kBound, kFrontier, kTrail };
  Kind kind = Kind::kBound;
  std::string label;  // near its end, along it
  int style = kReferenceStyle;
  std::vector<Point> points;
};

// A ring around a point of a curve.
struct Mark {
  Point point;
  int style = 0;
  std::string key;
  std::string description;
};

// A line of the legend above the axes.
struct KeyEntry {
  std::string text;
  int style = 0;
  Curve::Kind kind = Curve::Kind::kScatter;
  bool hollow = false;
  bool ring = false;
};

struct Plot {
  std::string title;
  std::string subtitle;
  Axis x, y;
  std::vector<Curve> curves;
  std::vector<Guide> guides;
  std::vector<Mark> marks;
  std::vector<KeyEntry> keys;
  // Exponents whose slopes on two logarithmic axes are drawn as a fan of lines, e.g. {1, "n"}.
  struct Slope {
    double exponent;
    std::string label;
  };
  std::vector<Slope> slopes;
  std::vector<Point> room;  // points that the axes include although nothing is drawn there
  // Sizes in pixels of 1/96 inch: 340 pixels are 90 mm.
  double width = 520, height = 340;
};

// Returns the markup of one plot for a page, in which `id` is unique.
std::string DrawForPage(const Plot& plot, const std::string& id);

// Returns an SVG file with the plots in rows of `columns`, on white. A point whose name has no room
// has a number, and its name stands below its plot. Returns an empty text where there are no plots.
std::string DrawFile(const std::vector<Plot>& plots, int columns, const std::string& title);

// Returns the marker, and line, of a style as a drawing of its own, for a legend on a page.
std::string DrawSwatch(int style, Curve::Kind kind);

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_H_
