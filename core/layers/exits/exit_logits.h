// The logits of the next token at a stack's exits: LN_n(h^n_t) times the output matrix, for rules
// that depend on how sure the prediction is.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_LOGITS_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_LOGITS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/layers/exits/exit_stack.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb::layers {

class ExitLogits {
 public:
  ExitLogits(Device device, int64_t width, int64_t vocabulary)
      : device_(device), width_(width), vocabulary_(vocabulary) {}

  // Reads "output" [vocabulary, model_dim] and the exits' norms after layers 1 to N - 1.
  absl::Status Setup(const NamedTensors& parameters, int64_t layers);

  struct Scratch {
    float* normalized;  // [rows, model_dim]
    float* logits;      // [rows, row_floats()], of which the first `vocabulary` count
  };
  Scratch LayOut(int64_t rows, Workspace& workspace) const;
  // Returns the number of floats from one row of logits to the next.
  int64_t row_floats() const;
  // Returns the workspace that Run needs besides the scratch.
  size_t workspace_bytes(int64_t rows, int threads) const;
  absl::Status Run(const ExitRows& rows, const Scratch& scratch, const Execution& execution) const;

  double flops() const {  // for a row
    return 2 * static_cast<double>(width_) * static_cast<double>(vocabulary_);
  }

 private:
  Device device_;
  int64_t width_;
  int64_t vocabulary_;
  PackedMatrix output_;
  std::vector<LayerNorm> norms_;
};

// The sums of exponentials of a row's logits, relative to the largest: softmax's largest
// probability is 1 / sum, and the next one next / sum. NaN among the logits makes the sum NaN.
struct SoftmaxTop {
  float next;
  float sum;
};
// Computes the SoftmaxTop of a row of an ExitLogits in host memory, which it overwrites.
SoftmaxTop TopOf(int64_t vocabulary, float* logits);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_LOGITS_H_
