// Axes of plots: from data to pixels, and where ticks stand.
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
  std::function<std::string(double)> format;  // of a tick's value; "%g" where there is none
};

struct Tick {
  double value = 0;
  std::string label;  // empty: a small tick
};

// Values that have a place on the axis: up to 1e100, and at least 1e-100 on a logarithmic one.
bool CanShow(const Axis& axis, double value);

// The smallest range with `values`, those that cannot be shown apart, and some air. Never empty:
// a single value lies in its middle, and no value at all gives 1 to 10 or 0 to 1.
struct Range {
  double low = 1;
  double high = 10;
};
Range RangeOf(const Axis& axis, const std::vector<double>& values);

// From data to pixels, `from` at the low end.
class Scale {
 public:
  Scale(const Axis& axis, const Range& range, double from, double to);
  // Returns the pixel of a value for which CanShow holds; a value beyond the range lies beyond `from`
  // or `to`.
  double Pixel(double value) const;
  // About one labelled tick for each `spacing` pixels, ascending, all within the range.
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
