// How the styles of curves look.
#ifndef TFB_RESULTS_PLOT_STYLE_H_
#define TFB_RESULTS_PLOT_STYLE_H_

#include <string>

namespace tfb {
namespace plot {

// "s0" to "s6", or "ref".
std::string StyleClass(int style);
// Lengths of dashes and gaps; empty for a continuous line.
std::string Dashes(int style);
// The marker of a style around a point, as the data of an SVG path.
std::string MarkerPath(int style, double x, double y, double radius);
// Rules for a file of its own: literal colours on white.
std::string PaperStyleSheet();

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_STYLE_H_
