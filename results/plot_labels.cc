#include "results/plot_labels.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "results/table.h"

namespace tfb {
namespace plot {
namespace {

// A column of a fixed-width display in units of the font's size. Of the fonts that are likely DejaVu
// Sans is the widest: names of letters and digits come to 0.60 of it, in Helvetica to 0.52.
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

bool IsFree(const Box& box, const std::vector<Box>& taken, const Box& area) {
  return area.Contains(box) && std::none_of(taken.begin(), taken.end(), [&box](const Box& other) {
           return box.Overlaps(other);
         });
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

std::vector<std::optional<PlacedLabel>> PlaceLabels(const std::vector<PointLabel>& labels,
                                                    const std::vector<Box>& obstacles,
                                                    const Box& area, double font_size) {
  constexpr double kPi = 3.14159265358979323846;
  // To the right first, then to the left, above, below and between.
  constexpr double kEighths[] = {0, 4, 6, 2, 7, 1, 5, 3};
  std::vector<Box> taken = obstacles;
  std::vector<std::optional<PlacedLabel>> places(labels.size());
  for (size_t i = 0; i < labels.size(); ++i) {
    const int most_steps = labels[i].needed ? 8 : 2;
    for (int step = 0; step < most_steps && !places[i].has_value(); ++step) {
      for (const double eighth : kEighths) {
        const Box box = LabelBox(labels[i], eighth * kPi / 4, kGap + 6 * step, font_size);
        if (!IsFree(box, taken, area)) continue;
        places[i] = PlacedLabel{box, step > 0};
        taken.push_back(box);
        break;
      }
    }
  }
  return places;
}

}  // namespace plot
}  // namespace tfb
