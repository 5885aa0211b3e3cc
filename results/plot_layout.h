// Where the parts of a plot stand: its axes between title, legend, ticks and names.
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
inline constexpr double kLine = 13;     // from one line of text to the next
inline constexpr double kKeyLine = 15;  // in the legend
inline constexpr double kTickSpacingX = 46, kTickSpacingY = 30;
inline constexpr int kWidestLineName = 34;  // characters beside a line's end

// Whether a point has a place on both axes.
bool IsShown(const Plot& plot, const Point& point);

// Returns the width of an entry of the legend, with the space behind it.
double KeyWidth(const KeyEntry& key);

struct Layout {
  explicit Layout(const Plot& plot);

  std::vector<std::string> subtitle;  // in lines that fit
  int key_lines;                      // that the legend takes
  Box frame;                          // that the axes enclose
  Scale x, y;
};

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_LAYOUT_H_
