#include "results/plot_axis.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace tfb {
namespace plot {
namespace {

constexpr double kAir = 0.05;  // of the range, on either side
// Below this relative range there are no doubles between the ends for ticks.
constexpr double kLeastRelativeRange = 1e-9;
// No measurement is larger, and the arithmetic of ticks would overflow beyond it.
constexpr double kLargest = 1e100;

}  // namespace

bool CanShow(const Axis& axis, double value) {
  if (axis.logarithmic) return value >= 1 / kLargest && value <= kLargest;
  return std::abs(value) <= kLargest;
}

Range RangeOf(const Axis& axis, const std::vector<double>& values) {
  std::vector<double> shown;
  std::copy_if(values.begin(), values.end(), std::back_inserter(shown),
               [&axis](double value) { return CanShow(axis, value); });
  if (shown.empty()) return axis.logarithmic ? Range{1, 10} : Range{0, 1};
  const double low = *std::min_element(shown.begin(), shown.end());
  const double high = *std::max_element(shown.begin(), shown.end());
  if (axis.logarithmic) {
    if (high / low < 1 + kLeastRelativeRange) return {low / 2, high * 2};
    const double air = std::pow(high / low, kAir);
    return {low / air, high * air};
  }
  const double size = std::max(std::abs(low), std::abs(high));
  if (high - low <= kLeastRelativeRange * size) {
    const double half = size > 1 / kLargest ? size / 2 : 0.5;
    return {low - half, high + half};
  }
  const double air = (high - low) * kAir;
  return {low - air, high + air};
}

Scale::Scale(const Axis& axis, const Range& range, double from, double to)
    : axis_(axis), range_(range), from_(from), to_(to) {}

double Scale::Pixel(double value) const {
  const double share = axis_.logarithmic
                           ? std::log(value / range_.low) / std::log(range_.high / range_.low)
                           : (value - range_.low) / (range_.high - range_.low);
  return from_ + share * (to_ - from_);
}

std::vector<Tick> Scale::Ticks(double spacing) const {
  const int most = std::max(2, static_cast<int>(std::abs(to_ - from_) / spacing));
  if (!axis_.logarithmic) return LinearTicks(most);
  return axis_.base == 2 ? PowersOfTwo(most) : LogTicks(most);
}

std::string Scale::Label(double value) const {
  return axis_.format ? axis_.format(value) : absl::StrFormat("%g", value);
}

std::vector<Tick> Scale::PowersOfTwo(int most) const {
  std::vector<Tick> ticks;
  const int first = static_cast<int>(std::ceil(std::log2(range_.low) - 1e-9));
  const int last = static_cast<int>(std::floor(std::log2(range_.high) + 1e-9));
  if (last <= first) return LogTicks(most);
  const int step = std::max(1, (last - first + most) / most);
  for (int power = first; power <= last; ++power) {
    const double value = std::exp2(power);
    const bool labelled = ((power % step) + step) % step == 0;
    ticks.push_back({value, labelled ? Label(value) : ""});
  }
  return ticks;
}

std::vector<Tick> Scale::LogTicks(int most) const {
  const double decades = std::log10(range_.high / range_.low);
  constexpr int kMostRound = 8;  // of round numbers, which crowd towards the high end
  if (decades < 0.7) return LinearTicks(std::min(most, kMostRound));  // 1, 2, 5 are too far apart
  const int first = static_cast<int>(std::floor(std::log10(range_.low)));
  const int last = static_cast<int>(std::ceil(std::log10(range_.high)));
  const int step = std::max(1, static_cast<int>(std::ceil(decades / most)));
  const bool halves = step == 1 && 3 * decades <= most;  // 1, 2, 5 rather than 1
  std::vector<Tick> ticks;
  for (int power = first; power <= last; ++power) {
    for (int digit = 1; digit <= 9; ++digit) {
      const double value = digit * std::pow(10, power);
      if (value < range_.low || value > range_.high) continue;
      const bool labelled =
          digit == 1 ? ((power % step) + step) % step == 0 : halves && (digit == 2 || digit == 5);
      if (digit > 1 && step > 1) continue;
      ticks.push_back({value, labelled ? Label(value) : ""});
    }
  }
  const auto has_label = [](const Tick& tick) { return !tick.label.empty(); };
  if (std::count_if(ticks.begin(), ticks.end(), has_label) >= 2) return ticks;
  // Under two decades without two powers of ten in them.
  for (Tick& tick : ticks) {
    const int digit = static_cast<int>(
        std::lround(tick.value / std::pow(10, std::floor(std::log10(tick.value) + 1e-9))));
    if (digit == 1 || digit == 2 || digit == 5) tick.label = Label(tick.value);
  }
  return ticks;
}

std::vector<Tick> Scale::LinearTicks(int most) const {
  const double raw = (range_.high - range_.low) / most;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double digit : {1.0, 2.0, 5.0}) {
    if (digit * power >= raw) {
      step = digit * power;
      break;
    }
  }
  std::vector<Tick> ticks;
  const double first = std::ceil(range_.low / step);
  for (int i = 0; i <= most; ++i) {
    double value = (first + i) * step;
    if (std::abs(value) < step * 1e-6) value = 0;
    if (value > range_.high) break;
    ticks.push_back({value, Label(value)});
  }
  return ticks;
}

}  // namespace plot
}  // namespace tfb
