// Plots as SVG, without a browser and without a plotting program: curves and points on two axes,
// named beside their ends rather than by colour alone.
//
// A drawing uses classes for all its colours. Within a page the page's style sheet has them, in
// light and dark; a file of its own carries them, black on white.
#ifndef TFB_RESULTS_PLOT_H_
#define TFB_RESULTS_PLOT_H_

#include <optional>
#include <string>
#include <vector>

#include "results/plot_axis.h"

namespace tfb {
namespace plot {

// Combinations of colour, marker and dashes that can be told apart; beyond them they repeat.
inline constexpr int kStyles = 7;
inline constexpr int kReferenceStyle = -1;  // what others are held against: the text's own colour

struct Point {
  double x = 0, y = 0;
  // The interval of y, drawn as a whisker.
  std::optional<double> low, high;
};

struct Curve {
  enum class Kind {
    kLine,         // markers joined by a line, the name at its end
    kCounterpart,  // a bold dotted line without markers or name, in the colour of the technique
                   // that is held against it
    kScatter,      // markers, the name beside the first
  };
  std::string name;
  std::string label;   // beside the drawing, where the name is long; the name where it is empty
  std::string group;   // what filters select by
  std::string key;     // ties it to its legend; equal for what is shown and hidden together
  std::string legend;  // what a legend calls all with the key; the name where it is empty
  std::string
      description;  // every number in words: for who cannot see the drawing, and on pointing
  const std::string& shown_name() const { return label.empty() ? name : label; }
  int style = 0;
  Kind kind = Kind::kLine;
  bool hollow = false;
  bool name_needed = true;  // a scattered point's name stands further away rather than nowhere
  std::vector<Point> points;
};

// A thin line that says something about the axes: a bound, a frontier.
struct Guide {
  enum class Kind { kBound, kFrontier, kTrail };
  Kind kind = Kind::kBound;
  std::string label;  // near its end, along it
  int style = kReferenceStyle;
  std::vector<Point> points;
};

// A place on a curve, ringed.
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
  // Exponents of which a fan of slopes shows how steep they are, e.g. {1, "n"}; both axes logarithmic.
  struct Slope {
    double exponent;
    std::string label;
  };
  std::vector<Slope> slopes;
  std::vector<Point> room;  // places that the axes enclose though nothing is drawn there
  // Pixels of 1/96 inch: 340 wide is 90 mm.
  double width = 520, height = 340;
};

// The markup of one plot, for a page; `id` is unique there.
std::string DrawForPage(const Plot& plot, const std::string& id);

// A file: the plots in rows of `columns`, on white. A point whose name has no room has a number, and
// its name stands below its plot. Empty without plots.
std::string DrawFile(const std::vector<Plot>& plots, int columns, const std::string& title);

// The marker, and line, of a style as a drawing of its own, for a legend on a page.
std::string DrawSwatch(int style, Curve::Kind kind);

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_H_
