// Defines the look of each style of a curve.
#ifndef TFB_RESULTS_PLOT_STYLE_H_
#define TFB_RESULTS_PLOT_STYLE_H_

#include <string>

namespace tfb {
namespace plot {

// Returns the CSS class of a style, "s0" to "s6" or "ref".
std::string StyleClass(int style);
// Returns the lengths of dashes and gaps, or an empty text for a solid line.
std::string Dashes(int style);
// Returns the marker of a style around a point, as the data of an SVG path.
std::string MarkerPath(int style, double x, double y, double radius);
// Returns the style sheet of an SVG file: literal colours on white.
std::string PaperStyleSheet();

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_STYLE_H_
