#include "results/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "results/reader.h"
#include "results/two_samples.h"

namespace tfb {
namespace {

// Returns the natural logarithm of the probability of `successes` in `trials` fair tosses.
double LogBinomialHalf(int trials, int successes) {
  return std::lgamma(trials + 1.0) - std::lgamma(successes + 1.0) -
         std::lgamma(trials - successes + 1.0) - trials * std::log(2.0);
}

// Pairs of log(tokens) and log(speed-up), of the ratio or of one end of its interval.
using LogCurve = std::vector<std::pair<double, double>>;

LogCurve CurveThrough(const std::vector<LengthSpeedUp>& speed_ups,
                      double SpeedUpInterval::*member) {
  LogCurve curve;
  for (const LengthSpeedUp& at : speed_ups) {
    curve.emplace_back(std::log(static_cast<double>(at.tokens)), std::log(at.speed_up.*member));
  }
  return curve;
}

bool IsFaster(const std::pair<double, double>& point) { return point.second > 0; }

// Returns where the curve crosses 1 for the last time, or nothing where it does not.
std::optional<double> LastCrossing(const LogCurve& curve) {
  for (size_t i = curve.size() - 1; i > 0; --i) {
    if (IsFaster(curve[i]) == IsFaster(curve[i - 1])) continue;
    const auto& [x0, y0] = curve[i - 1];
    const auto& [x1, y1] = curve[i];
    return std::exp(x0 + (x1 - x0) * (y0 / (y0 - y1)));
  }
  return std::nullopt;
}

// Returns the length from which on the curve is above 1 (`faster`) or not, as far as the longest
// length: 0 where it always is, infinite where it is not at the longest one.
double HasOrderFrom(const LogCurve& curve, bool faster) {
  if (IsFaster(curve.back()) != faster) return std::numeric_limits<double>::infinity();
  return LastCrossing(curve).value_or(0);
}

bool IsDistinct(const SpeedUpInterval& interval, const std::vector<double>& dense_ns,
                const std::vector<double>& technique_ns) {
  const bool holds_one = interval.low <= 1 && interval.high >= 1;
  return !holds_one && (interval.is_95_percent || MannWhitneyP(dense_ns, technique_ns) <= 0.05);
}

std::optional<double> RatePerSecond(const Case& result, bool known, double amount) {
  if (!known) return std::nullopt;
  const std::optional<MedianInterval> time = RunTime(result);
  if (!time.has_value() || !(time->median > 0)) return std::nullopt;
  return amount / (time->median * 1e-9);
}

bool PeakFits(const Peak& peak, const Case& result) {
  if (peak.device() != result.key().device() || !(peak.value() > 0)) return false;
  return peak.device() != DEVICE_TYPE_CPU || peak.threads() == result.key().threads();
}

}  // namespace

double MedianInterval::relative_half_width() const {
  return median > 0 ? (high - low) / (2 * median) : 0;
}

std::optional<MedianInterval> MedianOf(std::vector<double> samples) {
  if (samples.empty()) return std::nullopt;
  if (std::any_of(samples.begin(), samples.end(), [](double x) { return std::isnan(x); })) {
    return std::nullopt;
  }
  std::sort(samples.begin(), samples.end());
  const int n = static_cast<int>(samples.size());
  MedianInterval interval;
  interval.samples = n;
  const double lower = samples[(n - 1) / 2], upper = samples[n / 2];
  interval.median = lower == upper ? lower : lower + (upper - lower) / 2;  // equal ones: infinite
  // below: P(Bin(n, 1/2) < k), and next: the same of k + 1. k = 1 is the whole range, whatever it
  // covers.
  int k = 1;
  double below = std::exp(LogBinomialHalf(n, 0));
  double next = below + std::exp(LogBinomialHalf(n, 1));
  while (1 - 2 * next >= 0.95) {
    ++k;
    below = next;
    next += std::exp(LogBinomialHalf(n, k));
  }
  interval.low = samples[k - 1];
  interval.high = samples[n - k];
  interval.coverage = std::max(0.0, 1 - 2 * below);
  return interval;
}

std::optional<Growth> FitGrowth(std::vector<LengthTime> points) {
  points.erase(std::remove_if(points.begin(), points.end(),
                              [](const LengthTime& point) {
                                return point.tokens <= 0 || !(point.time > 0) ||
                                       !std::isfinite(point.time);
                              }),
               points.end());
  std::vector<int64_t> lengths;
  for (const LengthTime& point : points) lengths.push_back(point.tokens);
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  if (lengths.size() < 2) return std::nullopt;
  const size_t kept = std::min(lengths.size(), std::max<size_t>(3, (lengths.size() + 1) / 2));
  const int64_t shortest = lengths[lengths.size() - kept];

  double n = 0, mean_x = 0, mean_y = 0;
  for (const LengthTime& point : points) {
    if (point.tokens < shortest) continue;
    n += 1;
    mean_x += std::log(static_cast<double>(point.tokens));
    mean_y += std::log(point.time);
  }
  mean_x /= n;
  mean_y /= n;
  double xx = 0, xy = 0, yy = 0;
  for (const LengthTime& point : points) {
    if (point.tokens < shortest) continue;
    const double x = std::log(static_cast<double>(point.tokens)) - mean_x;
    const double y = std::log(point.time) - mean_y;
    xx += x * x;
    xy += x * y;
    yy += y * y;
  }
  Growth growth;
  growth.exponent = xy / xx;
  growth.from_tokens = shortest;
  growth.to_tokens = lengths.back();
  if (n > 2) {
    const double residual = std::max(0.0, yy - growth.exponent * xy);
    growth.standard_error = std::sqrt(residual / (n - 2) / xx);
  }
  return growth;
}

std::optional<SpeedUpInterval> SpeedUpOf(const std::vector<double>& dense_ns,
                                         const std::vector<double>& technique_ns) {
  const std::optional<RatioInterval> bootstrap =
      BootstrapRatio({{dense_ns, true}, {technique_ns, false}}, /*seed=*/1);
  const std::optional<MedianInterval> dense = MedianOf(dense_ns),
                                      technique = MedianOf(technique_ns);
  if (!bootstrap.has_value() || !dense.has_value() || !technique.has_value()) return std::nullopt;
  SpeedUpInterval interval{bootstrap->ratio, bootstrap->low, bootstrap->high, true, false};
  interval.is_95_percent = dense->is_95_percent() && technique->is_95_percent();
  if (!interval.is_95_percent) {
    interval.low = dense->low / technique->high;
    interval.high = dense->high / technique->low;
  }
  interval.distinct = IsDistinct(interval, dense_ns, technique_ns);
  return interval;
}

std::optional<Crossover> FindCrossover(const std::vector<LengthSpeedUp>& speed_ups) {
  if (speed_ups.empty()) return std::nullopt;
  const LogCurve curve = CurveThrough(speed_ups, &SpeedUpInterval::ratio);
  const LogCurve low = CurveThrough(speed_ups, &SpeedUpInterval::low);
  const LogCurve high = CurveThrough(speed_ups, &SpeedUpInterval::high);
  const bool faster = IsFaster(curve.back());
  Crossover crossover;
  crossover.clear = speed_ups.back().speed_up.distinct;
  for (size_t i = 1; i < curve.size(); ++i) {
    if (IsFaster(curve[i]) != IsFaster(curve[i - 1])) ++crossover.changes;
  }
  crossover.low_tokens = HasOrderFrom(faster ? high : low, faster);
  crossover.high_tokens = HasOrderFrom(faster ? low : high, faster);
  if (crossover.changes == 0) {
    crossover.kind = faster ? Crossover::Kind::kAlways : Crossover::Kind::kNever;
    crossover.tokens = static_cast<double>((faster ? speed_ups.front() : speed_ups.back()).tokens);
  } else {
    crossover.kind = faster ? Crossover::Kind::kAt : Crossover::Kind::kOnlyBelow;
    crossover.tokens = *LastCrossing(curve);
  }
  return crossover;
}

int64_t LengthOf(const ProblemSize& problem) {
  return std::max(problem.query_tokens(), problem.kv_tokens());
}

namespace {

// Tells whether `dense` has the options that `result` requires of its counterpart.
bool HasOptionsAskedBy(const Case& result, const Case& dense) {
  const auto& asked = result.technique().dense_counterpart_options();
  const auto& options = dense.key().options();
  return std::all_of(asked.begin(), asked.end(), [&options](const auto& option) {
    const auto found = options.find(option.first);
    return found != options.end() && found->second == option.second;
  });
}

}  // namespace

bool IsBaseline(const Case& result) {
  return !result.technique().dense_counterpart().empty() &&
         result.technique().dense_counterpart() == result.key().technique() &&
         HasOptionsAskedBy(result, result);
}

std::string DensePartners::KeyOf(const Case& result, const std::string& technique) const {
  Case::Key key = result.key();
  key.set_technique(technique);
  key.clear_options();
  key.clear_options_text();
  key.clear_seed();
  const auto machine = machines_.find(result.environment_id());
  return CaseKey(key) + " on " +
         (machine == machines_.end() ? "unknown " + result.environment_id() : machine->second);
}

DensePartners::DensePartners(const ResultSet& results) {
  for (const Environment& environment : results.environments()) {
    machines_[environment.id()] = MachineOf(results, environment.id());
  }
  // Any technique may be a counterpart, so each case is stored under its technique's name.
  for (const Case& result : results.cases()) {
    candidates_[KeyOf(result, result.key().technique())].push_back(&result);
  }
}

const Case* DensePartners::Find(const Case& result) const {
  if (IsBaseline(result)) return &result;
  if (result.technique().dense_counterpart().empty()) return nullptr;
  const auto found = candidates_.find(KeyOf(result, result.technique().dense_counterpart()));
  if (found == candidates_.end()) return nullptr;
  const auto faults = [&](const Case& dense) {
    return std::make_tuple(
        !HasOptionsAskedBy(result, dense), dense.environment_id() != result.environment_id(),
        dense.key().seed() != result.key().seed(), !dense.technique().options_are_default(),
        dense.outcome().status() != Outcome::STATUS_OK);
  };
  const Case* best = nullptr;
  for (const Case* dense : found->second) {
    if (dense->key().technique() == result.key().technique() &&
        !HasOptionsAskedBy(result, *dense)) {
      continue;
    }
    if (best == nullptr || faults(*dense) <= faults(*best)) best = dense;
  }
  return best;
}

std::optional<MedianInterval> RunTime(const Case& result) {
  const Outcome::Status status = result.outcome().status();
  if (status != Outcome::STATUS_OK && status != Outcome::STATUS_FAILED) return std::nullopt;
  return Median(result.outcome().timing().run_ns());
}

namespace {

// The samples of a run by the start of their visit. It is empty where the record does not tell.
std::map<int64_t, std::vector<double>> SamplesByVisit(const Case& result) {
  const Timing& timing = result.outcome().timing();
  const auto& run_ns = timing.run_ns();
  std::map<int64_t, std::vector<double>> by_start;
  int begin = 0;
  for (const Timing::Visit& visit : timing.visits()) {
    if (visit.run_samples() < 0 || visit.run_samples() > run_ns.size() - begin) return {};
    const int end = begin + visit.run_samples();
    by_start[visit.start_unix_ns()].assign(run_ns.begin() + begin, run_ns.begin() + end);
    begin = end;
  }
  if (begin != run_ns.size()) return {};
  return by_start;
}

// Returns `count` of the samples, evenly spread.
std::vector<double> Spread(const std::vector<double>& samples, size_t count) {
  std::vector<double> spread;
  for (size_t i = 0; i < count; ++i) {
    spread.push_back(samples[(2 * i + 1) * samples.size() / (2 * count)]);
  }
  return spread;
}

void AddPairs(const Case& result, const Case& dense, SideBySide* pairs) {
  const std::map<int64_t, std::vector<double>> dense_visits = SamplesByVisit(dense);
  for (const auto& [start, of_result] : SamplesByVisit(result)) {
    const auto found = dense_visits.find(start);
    if (found == dense_visits.end()) continue;
    const std::vector<double>& of_dense = found->second;
    const size_t count = std::min(of_dense.size(), of_result.size());
    for (const double ns : Spread(of_dense, count)) pairs->dense_ns.push_back(ns);
    for (const double ns : Spread(of_result, count)) pairs->technique_ns.push_back(ns);
  }
}

// Returns the times of dense over those of the technique, pair by pair.
std::vector<double> QuotientsOf(const SideBySide& pairs) {
  std::vector<double> quotients;
  for (size_t i = 0; i < pairs.dense_ns.size(); ++i) {
    quotients.push_back(pairs.dense_ns[i] / pairs.technique_ns[i]);
  }
  return quotients;
}

}  // namespace

SideBySide SamplesSideBySide(const std::vector<ComparedCase>& cases) {
  SideBySide pairs{{}, {}, true}, all;
  std::set<std::pair<const Case*, std::vector<double>*>> seen;
  const auto add_all = [&seen](const Case* result, std::vector<double>* to) {
    const auto& run_ns = result->outcome().timing().run_ns();
    if (seen.insert({result, to}).second) to->insert(to->end(), run_ns.begin(), run_ns.end());
  };
  for (const auto& [result, dense] : cases) {
    const bool has_result = RunTime(*result).has_value();
    const bool has_dense = dense != nullptr && RunTime(*dense).has_value();
    if (has_result) add_all(result, &all.technique_ns);
    if (has_dense) add_all(dense, &all.dense_ns);
    if (!has_result || !has_dense) continue;
    const size_t before = pairs.dense_ns.size();
    AddPairs(*result, *dense, &pairs);
    pairs.are_pairs = pairs.are_pairs && pairs.dense_ns.size() >= before + kLeastPairs;
  }
  return pairs.are_pairs && !pairs.dense_ns.empty() ? pairs : all;
}

std::optional<SpeedUpInterval> SpeedUpOf(const SideBySide& samples) {
  if (!samples.are_pairs) return SpeedUpOf(samples.dense_ns, samples.technique_ns);
  const auto are_times = [](const std::vector<double>& all) {
    return std::all_of(all.begin(), all.end(),
                       [](double ns) { return ns > 0 && std::isfinite(ns); });
  };
  const std::optional<MedianInterval> quotient = MedianOf(QuotientsOf(samples));
  if (!are_times(samples.dense_ns) || !are_times(samples.technique_ns) || !quotient.has_value()) {
    return std::nullopt;
  }
  SpeedUpInterval interval{quotient->median, quotient->low, quotient->high,
                           quotient->is_95_percent(), false};
  interval.distinct = IsDistinct(interval, samples.dense_ns, samples.technique_ns);
  return interval;
}

std::optional<double> SpeedUp(const Case& result, const Case* dense) {
  if (dense == nullptr) return std::nullopt;
  const SideBySide samples = SamplesSideBySide({{&result, dense}});
  if (samples.are_pairs) {
    const std::optional<SpeedUpInterval> of_pairs = SpeedUpOf(samples);
    return of_pairs.has_value() ? std::optional<double>(of_pairs->ratio) : std::nullopt;
  }
  const std::optional<MedianInterval> time = MedianOf(samples.technique_ns);
  const std::optional<MedianInterval> dense_time = MedianOf(samples.dense_ns);
  if (!time.has_value() || !dense_time.has_value() || !(time->median > 0)) return std::nullopt;
  return dense_time->median / time->median;
}

std::optional<double> GigaflopsPerSecond(const Case& result) {
  const std::optional<double> rate =
      RatePerSecond(result, result.outcome().has_flops(), result.outcome().flops());
  if (!rate.has_value()) return std::nullopt;
  return *rate * 1e-9;
}

std::optional<double> GigabytesPerSecond(const Case& result) {
  const std::optional<double> rate =
      RatePerSecond(result, result.outcome().has_bytes_moved(), result.outcome().bytes_moved());
  if (!rate.has_value()) return std::nullopt;
  return *rate * 1e-9;
}

std::optional<double> ShareOfComputePeak(const Case& result, const Environment& environment) {
  const std::optional<double> rate = GigaflopsPerSecond(result);
  double highest = 0;
  for (const Peak& peak : environment.peaks()) {
    if (peak.kind() == Peak::KIND_COMPUTE && peak.dtype() == result.key().dtype() &&
        PeakFits(peak, result)) {
      highest = std::max(highest, peak.value());
    }
  }
  if (!rate.has_value() || highest == 0) return std::nullopt;
  return *rate * 1e9 / highest;
}

std::optional<double> ShareOfBandwidthPeak(const Case& result, const Environment& environment) {
  const std::optional<double> rate = GigabytesPerSecond(result);
  if (!rate.has_value()) return std::nullopt;
  for (const Peak::Kind kind : {Peak::KIND_READ_BANDWIDTH, Peak::KIND_COPY_BANDWIDTH}) {
    double highest = 0;
    for (const Peak& peak : environment.peaks()) {
      if (peak.kind() == kind && PeakFits(peak, result)) highest = std::max(highest, peak.value());
    }
    if (highest > 0) return *rate * 1e9 / highest;
  }
  return std::nullopt;
}

std::optional<double> WorkingMemoryBytes(const Outcome& outcome) {
  if (!outcome.has_peak_workspace_bytes()) return std::nullopt;
  return static_cast<double>(outcome.peak_workspace_bytes()) +
         static_cast<double>(outcome.parameter_bytes()) + static_cast<double>(outcome.kept_bytes());
}

std::optional<double> BoundedValue(const ErrorMeasure& error) {
  const auto value = [](bool known, double number) {
    return known ? std::optional<double>(number) : std::nullopt;
  };
  switch (error.bounded_metric()) {
    case ErrorMeasure::METRIC_RELATIVE_FROBENIUS:
      return value(error.has_relative_frobenius(), error.relative_frobenius());
    case ErrorMeasure::METRIC_MAX_ABS:
      return value(error.has_max_abs(), error.max_abs());
    case ErrorMeasure::METRIC_MAX_ABS_OVER_MAX_VALUE:
      return value(error.has_max_abs_over_max_value(), error.max_abs_over_max_value());
    case ErrorMeasure::METRIC_COSINE_DISTANCE:
      return value(error.has_mean_cosine(), 1 - error.mean_cosine());
    default:
      break;
  }
  if (error.has_relative_frobenius()) return error.relative_frobenius();
  return value(error.has_max_abs(), error.max_abs());
}

namespace {

// Returns the error over its bound; a NaN is worse than any number.
double ShareOfBound(const BoundedNumber& error) {
  if (std::isnan(error.value())) return std::numeric_limits<double>::infinity();
  return error.value() == 0 ? 0 : error.value() / error.bound();
}

}  // namespace

const NamedError* WorstGradientError(const Outcome& outcome) {
  const NamedError* worst = nullptr;
  for (const NamedError& one : outcome.gradient_errors()) {
    if (!one.error().has_value()) continue;
    if (worst == nullptr || ShareOfBound(one.error()) > ShareOfBound(worst->error())) worst = &one;
  }
  return worst;
}

}  // namespace tfb
