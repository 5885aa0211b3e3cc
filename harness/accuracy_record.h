// Converts an accuracy to its record in the results file.
#ifndef TFB_HARNESS_ACCURACY_RECORD_H_
#define TFB_HARNESS_ACCURACY_RECORD_H_

#include "harness/evaluate.h"
#include "harness/inputs.h"
#include "results/results.pb.h"

namespace tfb {

// Fills the outcome's errors with their bounds, the kept share of dense attention, statistics,
// FLOPs, bytes, workspace and parameters; status OK, or FAILED with Accuracy::failure as its
// reason. Errors of further outputs are among the statistics, as "error_<name>". Leaves everything
// else.
void RecordAccuracy(const Accuracy& accuracy, Outcome* outcome);

// Returns the case's input profile: its name and, for a file, the file, layer and model.
InputProfile RecordInput(const InputSource& source);

}  // namespace tfb

#endif  // TFB_HARNESS_ACCURACY_RECORD_H_
