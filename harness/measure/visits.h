// Joins what several visits to a case have found.
#ifndef TFB_HARNESS_MEASURE_VISITS_H_
#define TFB_HARNESS_MEASURE_VISITS_H_

#include "results/results.pb.h"

namespace tfb {

// Adds the samples of a further visit to the same case. What stands once (errors, memory) is the
// first's; a status that is not ok is the case's.
void AddVisit(const Case& visit, Case* all);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_VISITS_H_
