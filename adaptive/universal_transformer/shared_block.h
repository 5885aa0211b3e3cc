// The block that all steps of a Universal Transformer share, on a device: its matrices, norms, gate
// and encodings. compacted_steps.h runs it on the CPU and listed_steps.h on CUDA.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_SHARED_BLOCK_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_SHARED_BLOCK_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adaptive/universal_transformer/universal_transformer.h"
#include "core/cuda/device_array.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::universal_transformer {

constexpr int64_t kFirstKernel = 3;  // tokens
constexpr int64_t kSecondKernel = 5;

struct UniversalSizes {
  UniversalSizes(const Problem& problem, const UniversalTransformerOptions& options);
  int64_t rows;  // batch * tokens
  int64_t width;
  int64_t query_width;
  int64_t key_width;
  int64_t value_width;
  int64_t context_width;
  int64_t inner;

  int64_t keys_values() const { return key_width + value_width; }
  int64_t projected() const { return query_width + keys_values(); }
};

struct SharedBlock {
  // Creates it from parameters in host memory.
  static absl::StatusOr<SharedBlock> Create(Device device, const Problem& problem,
                                            const UniversalTransformerOptions& options,
                                            const NamedTensors& parameters);

  PackedMatrix queries;
  PackedMatrix keys_values;
  PackedMatrix output;
  LayerNorm attention_norm;
  DeviceArray<float> first_kernel;  // [3, width]; with separable convolutions
  PackedMatrix first;
  DeviceArray<float> second_kernel;  // [5, inner]
  PackedMatrix second;
  LayerNorm transition_norm;
  DeviceArray<float> halting_weight;  // [width]; empty where there is no halting
  DeviceArray<float> halting_bias;    // [1]
  DeviceArray<float> positions;       // [tokens, width]
  DeviceArray<float> times;           // [steps, width]
  // The rows of `times` times W_q, W_k and W_v, [steps, projected()].
  DeviceArray<float> projected_times;

  // Returns sigmoid(w . state + b), on the CPU.
  float HaltingProbability(const float* state, int64_t width) const;
};

// Tells whether a sum of halting probabilities stops a token before the limit.
inline bool Reaches(const UniversalTransformerOptions& options, float total) {
  const float threshold = static_cast<float>(options.threshold);
  return options.halt_when == UniversalTransformerOptions::HaltWhen::kAbove ? total > threshold
                                                                            : total >= threshold;
}

// The memory that a Run keeps for a backward pass, on the device: what decisions said lies there too.
struct StepsKept {
  float* states = nullptr;      // H^1 .. H^steps of all tokens, [steps][rows][width]; null: none
  int32_t* stop = nullptr;      // N_t, 0 for padding
  int32_t* computed = nullptr;  // the last step in which the token was computed; likewise
  // With halting: 1 for a token whose last step weighs the remainder, 0 for one whose last step
  // weighs its probability; padding has none.
  uint8_t* takes_remainder = nullptr;
  // With separable convolutions: what the others see of tokens that have halted, [rows][width] and
  // [rows][inner].
  float* shown = nullptr;
  float* shown_inner = nullptr;

  static StepsKept LayOut(const UniversalSizes& sizes, const UniversalTransformerOptions& options,
                          Workspace& workspace);
  bool empty() const { return states == nullptr; }
  float* State(int64_t n, const UniversalSizes& sizes) const {
    return states + (n - 1) * sizes.rows * sizes.width;
  }
  // Copies these rows of tokens that are not padding, whose stop is known, where convolutions keep
  // them.
  absl::Status KeepShown(Device device, const UniversalSizes& sizes, const float* from,
                         const float* inner_from, const Execution& execution) const;
};

// Runs the steps of one layer.
class UniversalSteps {
 public:
  virtual ~UniversalSteps() = default;
  virtual absl::Status Setup() { return absl::OkStatus(); }
  virtual size_t workspace_bytes(int threads) const = 0;
  // The views of the layer's call, and the ponder and steps of each token, 0 for padding, on the
  // device.
  struct Call {
    ConstTensorView x;         // [batch, tokens, width]
    ConstTensorView key_mask;  // u8 [batch, tokens], or empty
    TensorView out;            // [batch, tokens, width]
    TensorView ponder_out;     // [batch, tokens], or empty
    TensorView steps_out;      // i32 [batch, tokens], or empty
    float* ponder;             // [batch tokens]
    int32_t* steps;            // [batch tokens]
    StepsKept kept = {};       // written unless empty
  };
  // Runs the steps. It allocates nothing; on CUDA it enqueues on the stream.
  virtual absl::Status Run(const SharedBlock& block, const Call& call,
                           const Execution& execution) = 0;
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_SHARED_BLOCK_H_
