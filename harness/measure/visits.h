// Joins what several visits to a case have found.
#ifndef TFB_HARNESS_MEASURE_VISITS_H_
#define TFB_HARNESS_MEASURE_VISITS_H_

#include <cstdint>

#include "harness/measure/worker_messages.pb.h"
#include "harness/plan/sweep_plan.h"
#include "results/results.pb.h"

namespace tfb {

// Notes in the record of one visit, where that has samples of runs, when the visit began.
void NoteVisit(int64_t start_unix_ns, Case* record);

// Adds the samples of a further visit to the same case. What stands once (errors, memory) is the
// first's; a status that is not ok is the case's.
void AddVisit(const Case& visit, Case* all);

// Returns the findings of a visit: the parts of its preparation, and the samples of `all`, the record
// with those of all visits.
Visited VisitedBy(const CaseReport& visit, const Case& all);

// Returns the findings of an earlier sweep that left the record: its preparation, whose parts the
// record does not tell, is what the samples leave of the case's time.
Visited VisitedEarlier(const Case& record);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_VISITS_H_
