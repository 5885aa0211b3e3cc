// The stack of exit_stack.h in float64, by its formulas: it computes every layer for all tokens,
// and tokens that have left keep their state. It shares no code with the layer.
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

namespace tfb::depth_adaptive {

// Returns the bound of the error of a layer's states, in units of the largest, which is that of
// outputs in harness/errors.h.
double StateError(DType dtype);

// A score, and the bound of its error in fp32.
struct ExitScore {
  double value = 0;
  double error = 0;
};

// A rule's score of token t, from the states of the whole sequence after layer n and before it: the
// token leaves where the score is at least 0.
using ExitScoreOf = std::function<ExitScore(int64_t n, int64_t t, const transformer_xl::Rows& after,
                                            const transformer_xl::Rows& before)>;

// Computes out and exits in f64. `rule` returns the score function of one batch row's tokens, which
// is called for layers 1 to N - 1 in turn, for tokens that have not left. Where the sign of a score
// is within its error, the exits of the request's computed outputs decide.
absl::StatusOr<NamedTensors> DefineExitStack(const Problem& problem,
                                             const ExitStackOptions& options,
                                             const NamedTensors& parameters, const Inputs& inputs,
                                             const DefinitionRequest& request,
                                             const std::function<ExitScoreOf()>& rule);

// Normalises a row by the parameters NAME.gamma and NAME.beta.
std::vector<double> NormOf(const NamedTensors& parameters, const std::string& name,
                           const double* row, int64_t channels);

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_STACK_DEFINITION_H_
