#include "harness/plan/check_time.h"

#include <algorithm>
#include <limits>

namespace tfb {
namespace {

constexpr double kScalingCheckSeconds = 5;

}  // namespace

double CheckLimitSeconds(Case::Purpose purpose, const Visit::Item& wishes) {
  if (wishes.check_seconds() > 0) return wishes.check_seconds();
  return purpose == Case::PURPOSE_SCALING ? kScalingCheckSeconds
                                          : std::numeric_limits<double>::infinity();
}

double MostCheckSeconds(double seconds, double tokens_before, double tokens) {
  const double ratio = tokens / std::max(tokens_before, 1.0);
  return seconds * ratio * std::max(1.0, ratio);
}

}  // namespace tfb
