// Softmax over the next token after a layer, in float64, for the definitions of rules that depend
// on how sure the prediction is. It shares no code with the layer.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_PROBABILITIES_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_PROBABILITIES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/definition.h"
#include "core/technique.h"

namespace tfb::layers {

struct ExitProbabilities {
  std::vector<double> ascending;
  // Error of one of them, where states have an error of `state_error` of the largest channel.
  double error;
};
// softmax(output LN(h)), by the parameter "output" and those of the norm. The parameters outlive it.
class ExitDistribution {
 public:
  explicit ExitDistribution(const NamedTensors& parameters);
  ExitProbabilities Of(const std::string& norm, const double* h, int64_t channels,
                       double state_error) const;

 private:
  const NamedTensors& parameters_;
  DoubleTensor output_;           // [vocabulary, channels]
  double largest_magnitude_ = 0;  // of its rows: the sum of |w|
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_PROBABILITIES_H_
