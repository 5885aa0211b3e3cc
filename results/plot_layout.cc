#include "results/plot_layout.h"

#include <algorithm>

#include "absl/strings/str_split.h"
#include "results/table.h"

namespace tfb {
namespace plot {
namespace {

constexpr double kWidestNameShare = 0.36;  // of the plot's width

// Returns all points that must be within the axes.
std::vector<double> Values(const Plot& plot, double Point::*member) {
  std::vector<double> values;
  for (const Curve& curve : plot.curves) {
    for (const Point& point : curve.points) {
      if (IsShown(plot, point)) values.push_back(point.*member);
    }
  }
  for (const Point& point : plot.room) {
    if (IsShown(plot, point)) values.push_back(point.*member);
  }
  for (const Guide& guide : plot.guides) {
    if (guide.kind != Guide::Kind::kBound) continue;
    for (const Point& point : guide.points) values.push_back(point.*member);
  }
  return values;
}

std::vector<std::string> SubtitleLines(const Plot& plot) {
  if (plot.subtitle.empty()) return {};
  const int columns = std::max(20, static_cast<int>((plot.width - 16) / TextWidth("n", kFontSize)));
  return absl::StrSplit(Wrap(plot.subtitle, columns, ""), '\n');
}

// Puts as many entries of the legend side by side as the plot's width holds.
std::vector<KeyPlace> PlaceKeys(const Plot& plot) {
  constexpr double kMargin = 8;
  constexpr double kSignAndSpace = 40;  // before and after an entry's text
  std::vector<KeyPlace> places;
  KeyPlace next = {0, kMargin};
  for (const KeyEntry& key : plot.keys) {
    const double width = kSignAndSpace + TextWidth(key.text, kFontSize);
    if (next.x > kMargin && next.x + width > plot.width - kMargin) next = {next.line + 1, kMargin};
    places.push_back(next);
    next.x += width;
  }
  return places;
}

// Names of lines stand to the right of the axes.
double NameWidth(const Plot& plot) {
  double widest = 0;
  for (const Curve& curve : plot.curves) {
    if (curve.kind != Curve::Kind::kLine) continue;
    widest =
        std::max(widest, TextWidth(CutToWidth(curve.shown_name(), kWidestLineName), kFontSize));
  }
  return widest == 0 ? 8 : std::min(widest + 28, plot.width * kWidestNameShare);
}

// Returns the width of the vertical axis' labels, which do not depend on where the axis will stand.
double TickWidth(const Plot& plot) {
  const Scale scale(plot.y, RangeOf(plot.y, Values(plot, &Point::y)), plot.height - 70, 0);
  double widest = 0;
  for (const Tick& tick : scale.Ticks(kTickSpacingY)) {
    widest = std::max(widest, TextWidth(tick.label, kFontSize));
  }
  return std::min(widest, plot.width / 4);
}

Box Frame(const Plot& plot, size_t subtitle_lines, int key_lines) {
  constexpr double kLeast = 40;  // of either side, however little room there is
  const double left = 34 + TickWidth(plot), right = NameWidth(plot), bottom = 38;
  const double top = 12 + (plot.title.empty() ? 0 : 14) +
                     kLine * static_cast<double>(subtitle_lines) + kKeyLine * key_lines;
  return {left, top, std::max(kLeast, plot.width - left - right),
          std::max(kLeast, plot.height - top - bottom)};
}

}  // namespace

bool IsShown(const Plot& plot, const Point& point) {
  return CanShow(plot.x, point.x) && CanShow(plot.y, point.y);
}

Layout::Layout(const Plot& plot)
    : subtitle(SubtitleLines(plot)),
      keys(PlaceKeys(plot)),
      key_lines(keys.empty() ? 0 : keys.back().line + 1),
      frame(Frame(plot, subtitle.size(), key_lines)),
      x(plot.x, RangeOf(plot.x, Values(plot, &Point::x)), frame.x, frame.x + frame.width),
      y(plot.y, RangeOf(plot.y, Values(plot, &Point::y)), frame.y + frame.height, frame.y) {}

}  // namespace plot
}  // namespace tfb
