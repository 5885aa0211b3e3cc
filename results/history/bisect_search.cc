#include "results/history/bisect_search.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "core/status.h"

namespace tfb {
namespace {

constexpr double kTail = 0.025;      // of a 95 % interval
constexpr double kLargestLog = 100;  // what infinite and zero ratios count as

double LogOf(double ratio) {
  return std::isnan(ratio) ? kLargestLog : std::clamp(std::log(ratio), -kLargestLog, kLargestLog);
}

// A reading on the logarithmic scale, turned so that the whole change is an increase.
struct LogReading {
  double middle, low, high;
};

LogReading Turned(const Reading& reading, double sign, double widening) {
  const double middle = LogOf(reading.ratio);
  double low = middle + widening * (LogOf(reading.low) - middle);
  double high = middle + widening * (LogOf(reading.high) - middle);
  if (sign < 0) std::swap(low, high);
  return {sign * middle, sign * low, sign * high};
}

// Returns the x that a normal variable exceeds with the probability `tail`, up to 0.5.
double NormalQuantile(double tail) {
  double low = 0, high = 10;
  while (high - low > 1e-6) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::sqrt(2.0)) / 2 > tail ? low : high) = middle;
  }
  return low;
}

// Returns the commits between the two, the nearest to the middle first.
std::vector<int> FromTheMiddle(int low, int high) {
  std::vector<int> commits;
  for (int commit = low + 1; commit < high; ++commit) commits.push_back(commit);
  const int middle = low + (high - low) / 2;
  std::stable_sort(commits.begin(), commits.end(),
                   [middle](int a, int b) { return std::abs(a - middle) < std::abs(b - middle); });
  return commits;
}

enum class Side { kBeforeChange, kAfterChange, kBetween, kUnclear };

Side SideOf(const LogReading& reading, double a, double b) {
  const double half_way = (a + b) / 2;
  if (reading.low > half_way) return Side::kAfterChange;
  if (reading.high < half_way) return Side::kBeforeChange;
  return reading.low > a && reading.high < b ? Side::kBetween : Side::kUnclear;
}

class Searcher {
 public:
  Searcher(int count, const Reading& last, const SearchOptions& options,
           const MeasureCommit& measure)
      : options_(options),
        sign_(LogOf(last.ratio) < 0 ? -1 : 1),
        least_log_(std::min(std::log(options.least_change), std::fabs(LogOf(last.ratio)) / 2)),
        widening_(NormalQuantile(kTail / options.most_looks) / NormalQuantile(kTail)),
        measure_(measure) {
    result_.high = count - 1;
    result_.of_high = last;
  }

  absl::StatusOr<SearchResult> Run() {
    while (result_.high - result_.low > 1) {
      if (Share() < least_log_) return End(SearchResult::End::kSpread);
      const std::optional<int> next = Next();
      if (!next.has_value()) return End(SearchResult::End::kPassedOver);
      TFB_ASSIGN_OR_RETURN(const bool is_clear, Step(*next));
      if (!is_clear) return End(SearchResult::End::kUnclear);
    }
    return End(SearchResult::End::kOneCommit);
  }

 private:
  SearchResult End(SearchResult::End end) {
    result_.end = end;
    return result_;
  }

  double a() const { return sign_ * LogOf(result_.of_low.ratio); }
  double b() const { return sign_ * LogOf(result_.of_high.ratio); }
  double Share() const { return b() - a(); }

  std::optional<int> Next() const {
    for (const int commit : FromTheMiddle(result_.low, result_.high)) {
      if (passed_over_.count(commit) == 0) return commit;
    }
    return std::nullopt;
  }

  // Measures the commit and keeps the half with the larger part of the change. Returns whether it
  // is clear which one that is; a commit that cannot be measured is noted and clear.
  absl::StatusOr<bool> Step(int commit) {
    Side side = Side::kUnclear;
    Reading reading;
    for (int look = 0; look < options_.most_looks; ++look) {
      TFB_ASSIGN_OR_RETURN(const std::optional<Reading> measured,
                           measure_({commit, look, result_.low, result_.high}));
      if (!measured.has_value()) {
        passed_over_.insert(commit);
        return true;
      }
      reading = *measured;
      side = SideOf(Turned(reading, sign_, widening_), a(), b());
      if (side == Side::kAfterChange || side == Side::kBeforeChange) break;
      if (reading.low == reading.high) break;  // no noise: another look would be the same
    }
    if (side == Side::kUnclear) return false;
    if (side == Side::kBetween) {
      const bool more_before = sign_ * LogOf(reading.ratio) > (a() + b()) / 2;
      side = more_before ? Side::kAfterChange : Side::kBeforeChange;
    }
    Keep(side, commit, reading);
    return true;
  }

  void Keep(Side side, int commit, const Reading& reading) {
    if (side == Side::kAfterChange) {
      result_.high = commit;
      result_.of_high = reading;
    } else {
      result_.low = commit;
      result_.of_low = reading;
    }
  }

  const SearchOptions options_;
  const double sign_;
  const double least_log_;
  const double widening_;
  const MeasureCommit& measure_;
  std::set<int> passed_over_;
  SearchResult result_;
};

}  // namespace

absl::StatusOr<SearchResult> SearchForChange(int count, const Reading& last,
                                             const SearchOptions& options,
                                             const MeasureCommit& measure) {
  return Searcher(count, last, options, measure).Run();
}

int StepsToFind(int count) {
  int steps = 0;
  for (int changes = count - 1; changes > 1; changes -= changes / 2) ++steps;
  return steps;
}

}  // namespace tfb
