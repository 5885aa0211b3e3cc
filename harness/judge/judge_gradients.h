// Judges the gradients of a backward pass by the directional derivatives of its technique's float64
// definition (harness/judge/gradients.h).
#ifndef TFB_HARNESS_JUDGE_JUDGE_GRADIENTS_H_
#define TFB_HARNESS_JUDGE_JUDGE_GRADIENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "harness/judge/evaluate.h"
#include "results/results.pb.h"

namespace tfb {

// The error of a gradient: |<gradient, d> - D| along random directions d, the largest of them, in
// units of the norm of what the gradient sums. D is the derivative of the definition. Where the
// terms of a gradient do not cancel, that norm is about the gradient's own along d.
struct GradientError {
  std::string name;  // of the input; kParameters for those of all parameters together
  Bounded error;
};
inline constexpr char kParameters[] = "parameters";

// Judges the gradients of `run`, a run of the layer on request.inputs with the gradients
// request.output_gradients of its outputs: those of each input, and those of all parameters along
// directions in which each changes by the same share. Where request.rows is not empty, rows of
// other query tokens have output gradients of 0. Leaves out gradients that are estimates
// (Layer::estimated_gradients), which are no derivatives.
absl::StatusOr<std::vector<GradientError>> JudgeGradients(const EvaluateRequest& request,
                                                          const Layer& layer, const LayerRun& run);

// Runs the layer and its backward pass once with those of request.output_gradients that are of
// request.rows, and judges the gradients.
absl::StatusOr<std::vector<GradientError>> EvaluateGradients(const EvaluateRequest& request,
                                                             Layer* layer);

// Returns copies of gradients of outputs, [..., query_tokens, channels] or of log_sum_exp, in which
// all rows but those of `rows` are 0; none, where `rows` is empty.
NamedTensors KeepRows(const NamedTensors& output_gradients, const Problem& problem,
                      const std::vector<int64_t>& rows);

// Sets the outcome's gradient errors, and its status: OK, or FAILED with the first gradient beyond
// its bound as the reason.
void RecordGradients(const std::vector<GradientError>& errors, Outcome* outcome);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_JUDGE_GRADIENTS_H_
