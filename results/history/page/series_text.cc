#include "results/history/page/series_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace tfb {
namespace {

// The bounds of integers of one, two and three digits; see the header.
constexpr int64_t kBase = 88;
constexpr int64_t kOne = 60, kTwo = 80, kThree = 86;
constexpr int kFive = 86, kSpecial = 87;
constexpr size_t kGroupNumbers = 3;  // that a group is written as

char Digit(int64_t digit) {
  static const std::string* const kDigits = [] {
    auto* digits = new std::string;
    for (char c = '!'; c <= '~'; ++c) {
      if (std::string("\"&'<>\\").find(c) == std::string::npos) digits->push_back(c);
    }
    return digits;
  }();
  return (*kDigits)[static_cast<size_t>(digit)];
}

class Writer {
 public:
  const std::string& text() const { return text_; }

  void One(int digit) { text_ += Digit(digit); }
  void Text(const std::string& text) { text_ += text; }

  void Unsigned(int64_t n) {
    if (n < kOne) {
      text_ += Digit(n);
      return;
    }
    n -= kOne;
    if (n < (kTwo - kOne) * kBase) return Digits(kOne * kBase + n, 2);
    n -= (kTwo - kOne) * kBase;
    if (n < (kThree - kTwo) * kBase * kBase) return Digits(kTwo * kBase * kBase + n, 3);
    One(kFive);
    Digits(n + kOne + (kTwo - kOne) * kBase, 5);
  }
  void Signed(int64_t n) { Unsigned(n >= 0 ? 2 * n : -2 * n - 1); }

 private:
  void Digits(int64_t n, int count) {
    int64_t place = 1;
    for (int i = 1; i < count; ++i) place *= kBase;
    for (; place > 0; place /= kBase) text_ += Digit(n / place % kBase);
  }

  std::string text_;
};

// Returns the decimal text with the fewest digits that reads as `value` again, as JavaScript's
// Number() reads it.
std::string Decimal(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char text[32];
  const std::to_chars_result end = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end.ptr);
}

bool Same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

std::string PresenceText(const std::vector<int>& runs) {
  Writer ranges;
  int64_t count = 0, end = 0;
  for (size_t first = 0; first < runs.size();) {
    size_t last = first;
    while (last + 1 < runs.size() && runs[last + 1] == runs[last] + 1) ++last;
    ranges.Unsigned(runs[first] - end);
    ranges.Unsigned(static_cast<int64_t>(last - first + 1));
    end = runs[last] + 1;
    first = last + 1;
    ++count;
  }
  Writer out;
  out.Unsigned(count);
  return out.text() + ranges.text();
}

// Returns the exact form, or "" where it is longer than `limit`.
std::string ExactText(const std::vector<double>& values, size_t limit) {
  std::vector<double> distinct;
  Writer repeats;
  size_t size = 3;
  for (size_t first = 0; first < values.size();) {
    size_t end = first;
    while (end < values.size() && Same(values[end], values[first])) ++end;
    size_t place = 0;
    while (place < distinct.size() && !Same(distinct[place], values[first])) ++place;
    if (place == distinct.size()) {
      distinct.push_back(values[first]);
      size += Decimal(values[first]).size() + 1;
    }
    repeats.Unsigned(static_cast<int64_t>(place));
    repeats.Unsigned(static_cast<int64_t>(end - first));
    if (size + repeats.text().size() > limit) return "";
    first = end;
  }
  Writer out;
  out.One(0);
  out.Unsigned(static_cast<int64_t>(distinct.size()));
  for (const double value : distinct) out.Text(Decimal(value) + " ");
  if (distinct.size() > 1) out.Text(repeats.text());
  return out.text();
}

// Consecutive values that are all kept (no groups), or reduced to groups.
struct Block {
  size_t size = 0, groups = 0;
};

// Returns which values are kept: the latest, those around cuts, and the latest that are not finite.
std::vector<bool> Kept(const std::vector<double>& values, const std::vector<int>& cuts,
                       const Detail& detail) {
  const int count = static_cast<int>(values.size());
  std::vector<bool> kept(values.size(), false);
  const auto keep = [&kept, count](int begin, int end) {
    for (int i = std::max(begin, 0); i < std::min(end, count); ++i) kept[i] = true;
  };
  keep(count - detail.latest, count);
  for (const int cut : cuts) {
    if (cut > 0 && cut < count) keep(cut - detail.around, cut + detail.around);
  }
  int odd = detail.odd;
  for (int i = count - 1; i >= 0 && odd > 0; --i) {
    if (std::isfinite(values[i])) continue;
    kept[i] = true;
    --odd;
  }
  return kept;
}

// Returns how many of `others` values are reduced to a group, 1 where that would save nothing.
size_t GroupSize(int others, const Detail& detail) {
  const int groups = std::max(detail.groups, 1);
  const size_t size = static_cast<size_t>((others + groups - 1) / groups);
  return size > kGroupNumbers ? size : 1;
}

std::vector<Block> Blocks(const std::vector<double>& values, const std::vector<int>& cuts,
                          const Detail& detail) {
  const std::vector<bool> kept = Kept(values, cuts, detail);
  const size_t group_size =
      GroupSize(static_cast<int>(std::count(kept.begin(), kept.end(), false)), detail);
  std::vector<bool> is_cut(values.size() + 1, false);
  for (const int cut : cuts) {
    if (cut >= 0 && cut <= static_cast<int>(values.size())) is_cut[cut] = true;
  }
  std::vector<Block> blocks;
  for (size_t first = 0; first < values.size();) {
    size_t end = first + 1;
    while (end < values.size() && kept[end] == kept[first] && (kept[end] || !is_cut[end])) ++end;
    const size_t size = end - first;
    const bool reduced = !kept[first] && group_size > 1 && size > kGroupNumbers;
    if (!reduced && !blocks.empty() && blocks.back().groups == 0) {
      blocks.back().size += size;
    } else {
      blocks.push_back({size, reduced ? (size + group_size - 1) / group_size : 0});
    }
    first = end;
  }
  return blocks;
}

class ReducedWriter {
 public:
  std::string Write(const std::vector<double>& values, const std::vector<Block>& blocks) {
    out_.One(1);
    out_.Unsigned(static_cast<int64_t>(blocks.size()));
    for (const Block& block : blocks) {
      out_.Unsigned(static_cast<int64_t>(block.size));
      out_.Unsigned(static_cast<int64_t>(block.groups));
    }
    size_t at = 0;
    for (const Block& block : blocks) {
      for (size_t i = 0; block.groups == 0 && i < block.size; ++i) Value(values[at + i]);
      for (size_t g = 0; g < block.groups; ++g) {
        const auto begin = values.begin() + at;
        Group({begin + g * block.size / block.groups, begin + (g + 1) * block.size / block.groups});
      }
      at += block.size;
    }
    return out_.text();
  }

 private:
  static int64_t Quantised(double value) {
    return std::llround(std::log(value) / (2 * std::log1p(0.001)));
  }

  void Special(int digit) {
    out_.One(kSpecial);
    out_.One(digit);
  }

  void Put(double value, int64_t reference) {
    if (value == 0) return Special(0);
    if (std::isnan(value)) return Special(1);
    if (std::isinf(value)) return Special(value > 0 ? 2 : 3);
    if (value < 0) Special(4);
    out_.Signed(Quantised(std::fabs(value)) - reference);
  }

  void Value(double value) {
    Put(value, prediction_);
    if (!std::isfinite(value) || value <= 0) return;
    const int64_t difference = Quantised(value) - prediction_;
    prediction_ += difference >= 0 ? difference / 4 : -((3 - difference) / 4);
  }

  void Group(std::vector<double> values) {
    const size_t size = values.size();
    values.erase(std::remove_if(values.begin(), values.end(),
                                [](double value) { return !std::isfinite(value); }),
                 values.end());
    if (values.size() < size) {
      Special(5);
      out_.Unsigned(static_cast<int64_t>(size - values.size()));
    }
    if (values.empty()) return;
    std::sort(values.begin(), values.end());
    const double a = values[(values.size() - 1) / 2], b = values[values.size() / 2];
    const double median = a == b ? a : a / 2 + b / 2;
    Value(median);
    const int64_t reference = median > 0 ? Quantised(median) : prediction_;
    Put(values.front(), reference);
    Put(values.back(), reference);
  }

  Writer out_;
  int64_t prediction_ = 0;
};

}  // namespace

int LargestGroup(int count, const Detail& detail) {
  return static_cast<int>(GroupSize(std::max(count - detail.latest, 0), detail));
}

std::string SeriesText(const std::vector<int>& runs, const std::vector<double>& values,
                       const std::vector<int>& cuts, const Detail& detail, bool exact) {
  const std::string presence = PresenceText(runs);
  if (exact) return presence + ExactText(values, std::numeric_limits<size_t>::max());
  const std::string reduced = ReducedWriter().Write(values, Blocks(values, cuts, detail));
  const std::string kept = ExactText(values, reduced.size());
  return presence + (kept.empty() ? reduced : kept);
}

}  // namespace tfb
