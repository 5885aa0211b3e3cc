// Judges the calls of a contestant while it is timed, so that what is timed is what is right.
//
// Each sample begins with a call on new inputs, whose outputs are copied as soon as it returns: a
// contestant that gives an earlier result again, or returns before it has finished, is wrong there
// by its definition. After the sample's timed calls, on the same inputs, the inputs must be as they
// were and the outputs those of the first call, up to the bound of an implementation's error.
#ifndef TFB_HARNESS_MEASURE_SAMPLE_TRIAL_H_
#define TFB_HARNESS_MEASURE_SAMPLE_TRIAL_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "harness/judge/evaluate.h"

namespace tfb {

class SampleTrial {
 public:
  struct Subject {
    EvaluateRequest request;  // its inputs must stay; its rows are chosen here
    const Layer* layer = nullptr;
    // The relative error against the definition that the check found: what is expected of a contestant
    // that only approximates it.
    double usual_error = 0;
  };
  explicit SampleTrial(Subject subject);

  // Views of the inputs, in memory that no other case reads.
  Inputs inputs() const { return ViewsOf(inputs_); }

  // Writes new inputs: the tokens of the original ones, turned by some number. Fills the outputs with
  // NaN, calls `run`, and copies the outputs at once. Returns the status of `run`.
  absl::Status Begin(const Outputs& outputs, absl::FunctionRef<absl::Status()> run);
  // Returns Internal, with what is wrong, where inputs have changed or outputs are not what they
  // should be.
  absl::Status End(const Outputs& outputs);

 private:
  void Turn();
  std::string WhatIsWrong(const Outputs& outputs);

  Subject subject_;
  NamedTensors inputs_;
  NamedTensors before_;  // a copy of the inputs as they were written
  NamedTensors copied_;  // the outputs of the judged call
  int64_t trials_ = 0;
};

}  // namespace tfb

#endif  // TFB_HARNESS_MEASURE_SAMPLE_TRIAL_H_
