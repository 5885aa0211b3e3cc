#include "results/plot_labels.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <numeric>

#include "results/table.h"

namespace tfb {
namespace plot {
namespace {

// A column of a fixed-width display in units of the font's size. Of the fonts that are likely
// DejaVu Sans is the widest: names of letters and digits come to 0.60 of it, in Helvetica to 0.52.
constexpr double kColumn = 0.6;
constexpr double kGap = 7;  // pixels between a point's middle and its label

Box LabelBox(const PointLabel& label, double angle, double distance, double font_size) {
  const double width = TextWidth(label.text, font_size);
  const double dx = std::cos(angle), dy = std::sin(angle);
  Box box{0, 0, width, font_size * 1.1};
  // The nearest side of the box lies at the distance: its left edge to the right of the point.
  box.x = label.x + dx * distance - width * (1 - dx) / 2;
  box.y = label.y + dy * distance - box.height * (1 - dy) / 2;
  return box;
}

bool OverlapsAny(const Box& box, const std::vector<Box>& others) {
  return std::any_of(others.begin(), others.end(),
                     [&box](const Box& other) { return box.Overlaps(other); });
}

bool IsFree(const Box& box, const Obstacles& obstacles, const Box& area) {
  return area.Contains(box) && !OverlapsAny(box, obstacles.points) &&
         !OverlapsAny(box, obstacles.texts) &&
         std::none_of(obstacles.lines.begin(), obstacles.lines.end(),
                      [&box](const Line& line) { return line.Crosses(box); });
}

bool CrossesText(const Line& line, const Obstacles& obstacles) {
  return std::any_of(obstacles.texts.begin(), obstacles.texts.end(),
                     [&line](const Box& text) { return line.Crosses(text); });
}

// Returns the most steps that a label may be away from its point; 0 is right beside the point.
int MostSteps(const PointLabel& label) {
  if (label.short_text) return 24;
  return label.needed ? 8 : 2;
}

}  // namespace

bool Box::Overlaps(const Box& other) const {
  return x < other.x + other.width && other.x < x + width && y < other.y + other.height &&
         other.y < y + height;
}

bool Box::Contains(const Box& other) const {
  return other.x >= x && other.y >= y && other.x + other.width <= x + width &&
         other.y + other.height <= y + height;
}

// Clips the line to the box (Liang and Barsky 1984); they cross where part of the line is left.
bool Line::Crosses(const Box& box) const {
  double from = 0, to = 1;
  const auto clip = [&](double start, double length, double low, double high) {
    if (length == 0) return start > low && start < high;
    const double a = (low - start) / length, b = (high - start) / length;
    from = std::max(from, std::min(a, b));
    to = std::min(to, std::max(a, b));
    return from < to;
  };
  return clip(x1, x2 - x1, box.x, box.x + box.width) &&
         clip(y1, y2 - y1, box.y, box.y + box.height);
}

double TextWidth(absl::string_view text, double font_size) {
  return kColumn * font_size * DisplayWidth(text);
}

std::vector<double> Spread(const std::vector<double>& wanted, double spacing, double top,
                           double bottom) {
  const size_t count = wanted.size();
  if (count == 0) return {};
  if (spacing * static_cast<double>(count - 1) > bottom - top) {
    spacing = (bottom - top) / static_cast<double>(count - 1);
  }
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&wanted](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  // Runs of labels that touch; each lies around the mean of what its members want.
  struct Run {
    double sum = 0;  // of wanted minus the offset in the run: its first label's wanted place
    size_t members = 0;
    double first = 0;
  };
  std::vector<Run> runs;
  const auto settle = [&](Run* run) {
    const double length = spacing * static_cast<double>(run->members - 1);
    run->first = std::clamp(run->sum / static_cast<double>(run->members), top,
                            std::max(top, bottom - length));
  };
  for (const size_t index : order) {
    runs.push_back({std::clamp(wanted[index], top, bottom), 1, 0});
    settle(&runs.back());
    while (runs.size() > 1) {
      Run& before = runs[runs.size() - 2];
      const Run& last = runs.back();
      const double end = before.first + spacing * static_cast<double>(before.members);
      if (end <= last.first + 1e-9) break;
      before.sum += last.sum - spacing * static_cast<double>(before.members * last.members);
      before.members += last.members;
      runs.pop_back();
      settle(&runs.back());
    }
  }
  std::vector<double> places(count);
  size_t next = 0;
  for (const Run& run : runs) {
    for (size_t i = 0; i < run.members; ++i) {
      places[order[next++]] = run.first + spacing * static_cast<double>(i);
    }
  }
  return places;
}

Line LeaderOf(const PointLabel& label, const Box& box) {
  return {label.x, label.y, std::clamp(label.x, box.x, box.x + box.width),
          std::clamp(label.y, box.y, box.y + box.height)};
}

namespace {

// Directions from a point in sixteenths of a turn: to the right first, then to the left, above,
// below and between; those further between are for short texts.
constexpr double kDirections[] = {0, 8, 12, 4, 14, 2, 10, 6, 1, 3, 5, 7, 9, 11, 13, 15};

std::optional<PlacedLabel> PlaceOf(const PointLabel& label, const Box& area, double font_size,
                                   const Obstacles& obstacles) {
  constexpr double kPi = 3.14159265358979323846;
  const size_t directions = label.short_text ? std::size(kDirections) : 8;
  for (int step = 0; step < MostSteps(label); ++step) {
    for (size_t i = 0; i < directions; ++i) {
      const Box box = LabelBox(label, kDirections[i] * kPi / 8, kGap + 6 * step, font_size);
      if (!IsFree(box, obstacles, area)) continue;
      if (step > 0 && CrossesText(LeaderOf(label, box), obstacles)) continue;
      return PlacedLabel{box, step > 0};
    }
  }
  return std::nullopt;
}

}  // namespace

std::vector<std::optional<PlacedLabel>> PlaceLabels(const std::vector<PointLabel>& labels,
                                                    const Box& area, double font_size,
                                                    Obstacles* obstacles) {
  std::vector<std::optional<PlacedLabel>> places;
  for (const PointLabel& label : labels) {
    places.push_back(PlaceOf(label, area, font_size, *obstacles));
    if (!places.back().has_value()) continue;
    obstacles->texts.push_back(places.back()->box);
    if (places.back()->with_leader) {
      obstacles->lines.push_back(LeaderOf(label, places.back()->box));
    }
  }
  return places;
}

}  // namespace plot
}  // namespace tfb
