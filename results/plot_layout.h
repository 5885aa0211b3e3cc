// Computes the places of the parts of a plot: its axes between title, legend, ticks and names.
#ifndef TFB_RESULTS_PLOT_LAYOUT_H_
#define TFB_RESULTS_PLOT_LAYOUT_H_

#include <string>
#include <vector>

#include "results/plot.h"
#include "results/plot_axis.h"
#include "results/plot_labels.h"

namespace tfb {
namespace plot {

inline constexpr double kFontSize = 10.5;
inline constexpr double kLine = 13;     // height of a line of text
inline constexpr double kKeyLine = 15;  // height of a line of the legend
inline constexpr double kTickSpacingX = 46, kTickSpacingY = 30;
inline constexpr int kWidestLineName = 34;  // characters of a name beside a line's end

// Tells whether both axes can show the point.
bool IsShown(const Plot& plot, const Point& point);

// The place of an entry of the legend.
struct KeyPlace {
  int line;  // from 0 on
  double x;  // its left end
};

struct Layout {
  explicit Layout(const Plot& plot);

  std::vector<std::string> subtitle;  // broken into lines that fit
  std::vector<KeyPlace> keys;         // of plot.keys
  int key_lines;                      // number of lines of the legend
  Box frame;                          // the area that the axes enclose
  Scale x, y;
};

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_LAYOUT_H_
