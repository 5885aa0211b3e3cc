// The stack of exit_stack.h in float64, by its formulas: every layer for all tokens, of which those
// that have left keep their state. None of the layer's code.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_DEFINITION_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_DEFINITION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "adaptive/depth_adaptive/exit_stack.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "memory/transformer_xl/double_rows.h"

namespace tfb {

// How far the states that a layer computes may be from these, in units of the largest: as its outputs
// in harness/errors.h.
double StateError(DType dtype);

// A score, and how far fp32 may be off it.
struct ExitScore {
  double value = 0;
  double error = 0;
};

// What a rule says of token t, by states of the whole sequence after layer n and before it: it leaves
// where the score is at least 0.
using ExitScoreOf =
    std::function<ExitScore(int64_t n, int64_t t, const Rows& after, const Rows& before)>;

// out and exits in f64. `rule` makes the score of one batch row's tokens; it is asked about layers 1
// to N - 1 in turn, of tokens that have not left. Where its sign is within the error, the exits of
// the request's computed outputs decide.
absl::StatusOr<NamedTensors> DefineExitStack(const Problem& problem,
                                             const ExitStackOptions& options,
                                             const NamedTensors& parameters, const Inputs& inputs,
                                             const DefinitionRequest& request,
                                             const std::function<ExitScoreOf()>& rule);

// Normalisation of a row by the parameters NAME.gamma and NAME.beta.
std::vector<double> NormOf(const NamedTensors& parameters, const std::string& name,
                           const double* row, int64_t channels);

}  // namespace tfb

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_DEFINITION_H_
