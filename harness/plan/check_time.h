// Bounds the time of comparing a case with float64.
#ifndef TFB_HARNESS_PLAN_CHECK_TIME_H_
#define TFB_HARNESS_PLAN_CHECK_TIME_H_

#include "harness/measure/worker_messages.pb.h"
#include "results/results.pb.h"

namespace tfb {

// Returns the most seconds that the check of a case may be expected to take, infinite where there is
// no limit: what the visit allows, or, where it does not say, 5 s for a scaling case, which is there
// for its times.
double CheckLimitSeconds(Case::Purpose purpose, const Visit::Item& wishes);

// Returns at most how long a check takes at `tokens`, where one took `seconds` at `tokens_before`:
// dense attention's is linear in the keys where rows are sampled, and quadratic where all are
// evaluated, as in networks. Shorter checks are taken to be proportional to the tokens.
double MostCheckSeconds(double seconds, double tokens_before, double tokens);

}  // namespace tfb

#endif  // TFB_HARNESS_PLAN_CHECK_TIME_H_
