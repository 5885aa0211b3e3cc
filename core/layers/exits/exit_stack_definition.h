// The stack of exit_stack.h in float64, by its formulas: it computes every layer for all tokens,
// and tokens that have left keep their state. It shares no code with the layer.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_STACK_DEFINITION_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_STACK_DEFINITION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/layers/double_rows.h"
#include "core/layers/exits/exit_stack.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

// Returns the bound of the error of a layer's states, in units of the largest, which is that of
// outputs in harness/judge/errors.h.
double StateError(DType dtype);

// A score, and the bound of its error in fp32.
struct ExitScore {
  double value = 0;
  double error = 0;
};

// Decides about the tokens of one sequence.
class DefinedRule {
 public:
  virtual ~DefinedRule() = default;
  // Reads the states of the whole sequence after layer n, for n = 1, ..., N in turn.
  virtual void Read(int64_t /*n*/, const Rows& /*after*/) {}
  // Returns the score of token t from the states after layer n, which have been read, and before
  // it: the token leaves where the score is at least 0. It is called for tokens that have not left.
  virtual ExitScore Of(int64_t n, int64_t t, const Rows& after, const Rows& before) = 0;
};

// Computes out, exits, exit_outputs and memories in f64. `rule` returns the rule of batch row b. Where the sign
// of a score is within its error, the exits of the request's computed outputs decide.
absl::StatusOr<NamedTensors> DefineExitStack(
    const Problem& problem, const ExitStackOptions& options, const NamedTensors& parameters,
    const Inputs& inputs, const DefinitionRequest& request,
    const std::function<std::unique_ptr<DefinedRule>(int64_t b)>& rule);

// Normalises a row by the parameters NAME.gamma and NAME.beta.
std::vector<double> NormOf(const NamedTensors& parameters, const std::string& name,
                           const double* row, int64_t channels);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_STACK_DEFINITION_H_
