// Converts an accuracy to its record in the results file.
#ifndef TFB_HARNESS_JUDGE_ACCURACY_RECORD_H_
#define TFB_HARNESS_JUDGE_ACCURACY_RECORD_H_

#include "harness/judge/evaluate.h"
#include "results/results.pb.h"

namespace tfb {

// Sets the outcome's errors with their bounds, the kept share of dense attention, statistics,
// FLOPs, bytes, workspace and parameters, and its status: OK, or FAILED with Accuracy::failure as
// reason. Errors of further outputs are statistics named "error_<name>".
void RecordAccuracy(const Accuracy& accuracy, Outcome* outcome);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_ACCURACY_RECORD_H_
