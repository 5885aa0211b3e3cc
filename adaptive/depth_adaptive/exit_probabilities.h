// Softmax over the next token after a layer, in float64, for the definitions of rules that depend
// on how sure the prediction is. It shares no code with the layer.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_PROBABILITIES_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_PROBABILITIES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/technique.h"

namespace tfb {

struct ExitProbabilities {
  std::vector<double> ascending;
  // Error of one of them, where states have an error of `state_error` of the largest channel.
  double error;
};
// Returns softmax(output LN(h)), by the parameters "output" and those of the norm.
ExitProbabilities ExitProbabilitiesOf(const NamedTensors& parameters, const std::string& norm,
                                      const double* h, int64_t channels, double state_error);

}  // namespace tfb

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_EXIT_PROBABILITIES_H_
