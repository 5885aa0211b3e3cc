#include "core/text_plot.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tfb {
namespace {

constexpr int kLabelWidth = 9;  // of the numbers left of the plane

// One coordinate: the range of its values over so many cells.
class Axis {
 public:
  explicit Axis(int cells) : cells_(cells) {}

  void Include(double value) {
    least_ = std::min(least_, value);
    largest_ = std::max(largest_, value);
  }
  bool empty() const { return least_ > largest_; }
  int CellOf(double value) const {
    if (largest_ == least_) return 0;
    return static_cast<int>(std::lround((value - least_) / (largest_ - least_) * (cells_ - 1)));
  }

  struct Tick {
    int cell;
    std::string label;
  };
  // At the multiples of 1, 2 or 5 times a power of ten, with at most `gaps` gaps; or at the only value.
  std::vector<Tick> Ticks(int gaps) const {
    if (largest_ == least_) return {{0, absl::StrFormat("%.4g", least_)}};
    const double apart = (largest_ - least_) / gaps;
    double step = std::pow(10, std::floor(std::log10(apart)));
    for (const double factor : {2.0, 2.5, 2.0}) {
      if (step >= apart) break;
      step *= factor;
    }
    // As many places as the step has.
    const int places = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
    std::vector<Tick> ticks;
    // Adding 0 makes the -0 that the slack leads to a 0.
    for (double n = std::ceil(least_ / step - 1e-9) + 0.0; n * step <= largest_ + 1e-9 * step;
         ++n) {
      ticks.push_back({CellOf(n * step), absl::StrFormat("%.*f", places, n * step)});
    }
    return ticks;
  }

 private:
  int cells_;
  double least_ = std::numeric_limits<double>::infinity();
  double largest_ = -std::numeric_limits<double>::infinity();
};

bool IsFinite(const std::pair<double, double>& point) {
  return std::isfinite(point.first) && std::isfinite(point.second);
}

// The line below the plane, and its labels, each centred under its tick where there is room.
void AppendXAxis(const Axis& x, const TextPlot& plot, std::string* text) {
  std::string line(plot.columns, '-'), labels;
  for (const Axis::Tick& tick : x.Ticks(6)) {
    line[tick.cell] = '+';
    const size_t begin =
        kLabelWidth + 2 + std::max(0, tick.cell - static_cast<int>(tick.label.size()) / 2);
    if (begin < labels.size()) continue;  // no room
    labels.resize(begin, ' ');
    absl::StrAppend(&labels, tick.label, " ");
  }
  absl::StrAppend(text, std::string(kLabelWidth + 1, ' '), "+", line, "\n", labels, " ",
                  plot.x_title, "\n");
}

}  // namespace

std::string ToText(const TextPlot& plot) {
  Axis x(plot.columns), y(plot.rows);
  for (const PlotSeries& series : plot.series) {
    for (const auto& point : series.points) {
      if (!IsFinite(point)) continue;
      x.Include(point.first);
      y.Include(point.second);
    }
  }
  if (x.empty()) return "";
  std::vector<std::string> plane(plot.rows, std::string(plot.columns, ' '));
  for (const PlotSeries& series : plot.series) {
    for (const auto& point : series.points) {
      if (IsFinite(point)) plane[y.CellOf(point.second)][x.CellOf(point.first)] = series.mark;
    }
  }
  std::vector<std::string> labels(plot.rows);
  for (const Axis::Tick& tick : y.Ticks(5)) labels[tick.cell] = tick.label;
  std::string text = absl::StrCat(plot.y_title, "\n");
  for (int row = plot.rows - 1; row >= 0; --row) {
    std::string& line = plane[row];
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppendFormat(&text, "%*s %c%s\n", kLabelWidth, labels[row],
                          labels[row].empty() ? '|' : '+', line);
  }
  AppendXAxis(x, plot, &text);
  for (size_t n = 0; n < plot.series.size(); ++n) {
    absl::StrAppendFormat(&text, "%s%c %s", n == 0 ? "" : "   ", plot.series[n].mark,
                          plot.series[n].name);
  }
  return text + "\n";
}

}  // namespace tfb
