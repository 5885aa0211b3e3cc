#include "harness/plan/sample_plan.h"

#include <algorithm>
#include <limits>

namespace tfb {
namespace {

// Parts of the share. They add up to more than 1 only for techniques that stream, and on GPUs.
constexpr double kRunPart = 0.6, kSetupPart = 0.2, kColdPart = 0.2, kStreamPart = 0.4;
constexpr double kGraphPart = 0.2;
// A call at its first touch of cold caches takes about so many times that of a warm one.
constexpr double kColdFactor = 1.5;

double Fitting(double share_seconds, double sample_seconds) {
  if (share_seconds <= 0) return std::numeric_limits<double>::infinity();
  return share_seconds / std::max(sample_seconds, 1e-9);
}

int Clamp(double value, int low, int high) {
  return static_cast<int>(std::clamp<double>(value, low, high));
}

}  // namespace

SamplePlan PlanSamples(const SampleWishes& wishes, double call_seconds, double share_seconds) {
  SamplePlan plan;
  const double warming = call_seconds < kWarmedSeconds ? call_seconds : 0;
  const double run_seconds =
      std::max(wishes.min_time, call_seconds) + warming + wishes.trial_seconds;
  const double fit = Fitting(kRunPart * share_seconds, run_seconds);
  const int fewest = fit >= kIntervalSamples ? kIntervalSamples : kFewestSamples;
  plan.runs = Clamp(fit, std::min(fewest, wishes.repetitions), wishes.repetitions);
  plan.seconds = plan.runs * run_seconds;

  const auto add = [&](bool wanted, double part, double sample_seconds) {
    if (!wanted) return 0;
    const int samples = Clamp(Fitting(part * share_seconds, sample_seconds), 0, kIntervalSamples);
    plan.seconds += samples * sample_seconds;
    return samples;
  };
  plan.setups =
      add(wishes.setup, kSetupPart, std::max(wishes.setup_seconds, call_seconds) + call_seconds);
  plan.colds = add(wishes.cold, kColdPart, kColdFactor * call_seconds + wishes.flush_seconds);
  plan.streams = add(wishes.stream, kStreamPart, 2 * call_seconds);
  plan.graphs = add(wishes.graph, kGraphPart, std::max(wishes.min_time, call_seconds));
  return plan;
}

}  // namespace tfb
