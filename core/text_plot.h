// Points in a plane as text, so that a program's table and its plot come from one command.
//
//   bits per byte
//        2.6 |o
//            |
//        2.4 |   o   x
//            +--------------
//             1     2     3  mean layers
//   o fixed   x learned
#ifndef TFB_CORE_TEXT_PLOT_H_
#define TFB_CORE_TEXT_PLOT_H_

#include <string>
#include <utility>
#include <vector>

namespace tfb {

struct PlotSeries {
  char mark = 'o';
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y; those that are not finite are left out
};

struct TextPlot {
  std::string x_title;
  std::string y_title;
  std::vector<PlotSeries> series;  // later ones are drawn over earlier ones
  int columns = 60;                // of the plane, at least 2
  int rows = 16;
};

// Lines of ASCII. The plane reaches from the least to the largest of each coordinate; marks are in the
// nearest cell, and the axes are labelled at round numbers. Empty where there are no points.
std::string ToText(const TextPlot& plot);

}  // namespace tfb

#endif  // TFB_CORE_TEXT_PLOT_H_
