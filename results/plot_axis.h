// Computes the axes of plots: the mapping from data to pixels, and the places of ticks.
#ifndef TFB_RESULTS_PLOT_AXIS_H_
#define TFB_RESULTS_PLOT_AXIS_H_

#include <functional>
#include <string>
#include <vector>

namespace tfb {
namespace plot {

struct Axis {
  std::string title;
  bool logarithmic = true;
  int base = 10;  // of the ticks of a logarithmic axis; 2 for what comes in powers of two
  std::function<std::string(double)> format;  // of a tick's value; "%g" where it is null
};

struct Tick {
  double value = 0;
  std::string label;  // empty for a minor tick
};

// Tells whether the axis can show the value: up to 1e100, and on a logarithmic axis from 1e-100 on.
bool CanShow(const Axis& axis, double value);

// The part of an axis that a plot shows.
struct Range {
  double low = 1;
  double high = 10;
};
// Returns the range of those of `values` that can be shown, with a margin. The range of a single
// value has it in its middle; that of no value is 1 to 10 or, on a linear axis, 0 to 1.
Range RangeOf(const Axis& axis, const std::vector<double>& values);

// Maps data to pixels; `from` is the pixel of the low end of the range, `to` of the high end.
class Scale {
 public:
  Scale(const Axis& axis, const Range& range, double from, double to);
  // Returns the pixel of a value for which CanShow holds, which may be outside `from` to `to`.
  double Pixel(double value) const;
  // Returns about one labelled tick for each `spacing` pixels, ascending, all within the range.
  std::vector<Tick> Ticks(double spacing) const;

 private:
  std::string Label(double value) const;
  std::vector<Tick> LogTicks(int most) const;
  std::vector<Tick> PowersOfTwo(int most) const;
  std::vector<Tick> LinearTicks(int most) const;

  Axis axis_;
  Range range_;
  double from_, to_;
};

}  // namespace plot
}  // namespace tfb

#endif  // TFB_RESULTS_PLOT_AXIS_H_
