// The part of a sweep that runs in a process of its own. It describes the machine and measures
// groups of cases, as harness/measure/worker_messages.proto says.
#ifndef TFB_HARNESS_MEASURE_SWEEP_WORKER_H_
#define TFB_HARNESS_MEASURE_SWEEP_WORKER_H_

#include <vector>

#include "harness/measure/sweep.h"
#include "harness/measure/worker.h"
#include "harness/plan/cases.h"

namespace tfb {

// Answers the requests from `side` until its end, or until the device is lost.
void WorkForSweep(const SweepOptions& options, const std::vector<Job>& cases, WorkerSide& side);

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_SWEEP_WORKER_H_
