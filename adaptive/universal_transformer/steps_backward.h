// The backward pass of a Universal Transformer, of the steps that each token took, on every device.
//
// A Run keeps the state of all tokens after each step, and nothing of what lies within one. From the
// last step to the first, the step is computed again from the state before it, for the tokens that
// took it, and then differentiated (the chain rule; names as in universal_transformer.h):
//
//   dS^n    = dH^n + c^n g + dz^n w              the last term where halt_from=after;  g = dL/dout
//   dH^(n-1) = dU + what the keys and values of step n give to U, dU + dz^n w where halt_from=before
//
// A token that has halted passes dH^n by, and has what its keys and values give. The numbers of
// halting are those of each token alone, with N = N_t, q^n = g . S^n, and e = dL/dponder:
//
//   accumulated   c^n = w^n,  dw^n = q^n
//   basic         c^n = w^n k^n,  dw^n = k^n (q^n - g . Y^(n-1)),  k^N = 1,  k^(n-1) = (1 - w^n) k^n
//   frozen        c^N = 1,  dw^n = 0
//   dp^n = dw^n - dR for n < N,   dR = dw^N + e;   a token that stops at the limit without the
//   remainder has dR = 0 and dp^N = dw^N;          dz^n = dp^n p^n (1 - p^n)
//
// N_t is constant, as in Graves 2016, arXiv:1603.08983v6, section 2.1: ponder_t has the gradient of R_t.
// It, and whether the last step weighs the remainder, are what the Run decided, and stay on the device.
//
// On the CPU products have the rows of the tokens that took the step. On CUDA the host does not know how
// many these are, and all steps are launched. The device lists the rows (core/cuda/row_list.h), and
// blocks of queries, attention in fp32, products, norms and activations return at once beyond the list,
// whose tokens alone the gradients of matrices are sums over. Keys and values, with their matrices, are of
// all tokens, and in 16 bits attention skips tiles without any token of the list.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_STEPS_BACKWARD_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_STEPS_BACKWARD_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "adaptive/universal_transformer/shared_block.h"
#include "adaptive/universal_transformer/universal_transformer_functors.h"
#include "core/flash/flash.h"
#include "core/flash/flash_backward.h"
#include "core/flash/flash_backward_cuda.h"
#include "core/flash/flash_engine.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/list_rows.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/transposed_schedule.h"
#include "core/workspace.h"

namespace tfb::universal_transformer {

class StepsBackward {
 public:
  StepsBackward(Device device, const Problem& problem, const UniversalTransformerOptions& options);
  // Packs the transposed matrices, makes the schedules, and on CUDA the engines.
  absl::Status SetUp(const NamedTensors& parameters);
  size_t workspace_bytes(int threads) const;

  struct Call {
    const SharedBlock& block;
    StepsKept kept;
    ConstTensorView x;
    ConstTensorView key_mask;   // or empty
    ConstTensorView out;        // its gradient, of any dtype, or empty
    ConstTensorView ponder;     // likewise
    TensorView x_gradient;      // or empty
    const Outputs& parameters;  // gradients, which are 0 before
  };
  // Computes the gradients. It allocates nothing; on CUDA it enqueues on the stream.
  absl::Status Run(const Call& call, const Execution& execution) const;

 private:
  // By row: [rows, ...], all tokens. By place: see StepTokens; `active` of them.
  struct Scratch {
    float* coefficients;     // c^n [steps][rows]
    float* of_logits;        // dz^n, likewise
    float* of_out;           // g, by row
    float* of_ponder;        // e, by row
    float* state;            // dH, by row
    float* read;             // U, by row
    TensorView keys_values;  // [batch, tokens, keys_values] in the problem's dtype
    float* keys_values_gradient;
    float* of_keys;           // what keys and values give to U, by row
    float* placed;            // U, by place
    TensorView queries;       // by place, in that dtype
    TensorView context;       // likewise
    TensorView context_rest;  // in 16 bits: what rounding took from it
    float* log_sum_exp;       // [heads][places]; on CUDA [batch, heads, tokens]
    float* log_sum_exp_rest;  // likewise: what rounding took from it
    float* delta;             // CPU
    RowNumbers numbers;       // CUDA
    float* attended;          // what the first norm reads, by place
    float* normalized;        // A
    float* into_first;        // what W_1 reads; A without convolutions
    float* inner;
    float* into_second;  // what W_2 reads; `inner` without convolutions
    float* made;         // what the second norm reads
    float* gradient;     // dS, and then that of what the second norm reads
    float* of_attended;  // dA, and then that of what the first norm reads
    float* inner_gradient;
    float* context_gradient;
    float* queries_gradient;
    float* shown;  // by row: gradients of what the convolutions see
    float* shown_inner;
    int32_t* place_of_row;  // CPU: below 0 where the token did not take the step
    int32_t* row;           // CPU: by place
    RowListMemory list;     // CUDA
  };
  struct Walk {
    const Call& call;
    Scratch scratch;
    Execution execution;
    int64_t step = 0;    // n - 1
    int64_t active = 0;  // places
    RowList rows = {};   // CUDA: those of the tokens that took the step, where these may not be all
    StepTokens tokens = {};

    bool is_listed() const { return rows.rows != nullptr; }
  };

  Scratch LayOut(Workspace& workspace) const;
  int64_t LastStep(const Call& call) const;
  absl::Status PrepareHalting(Walk& walk, int64_t last) const;
  absl::Status Read(const Walk& walk) const;
  absl::Status List(Walk& walk) const;
  absl::Status RunAgain(const Walk& walk) const;
  absl::Status Attend(const Walk& walk) const;
  absl::Status TransitionBackward(const Walk& walk) const;
  absl::Status AttentionBackward(const Walk& walk) const;
  absl::Status FlashGradients(const Walk& walk, FlashBackwardCall call) const;
  absl::Status InputBackward(const Walk& walk) const;
  absl::Status AddHalting(const Walk& walk) const;
  FlashCall FlashOf(const Walk& walk) const;
  // Returns w where the probabilities are of what a step reads, or of what it makes; else null.
  const float* HaltingWeight(const Walk& walk, UniversalTransformerOptions::HaltFrom from) const;

  // A convolution of the step.
  Convolution First(const Walk& walk) const;
  Convolution Second(const Walk& walk) const;
  Convolution ConvolutionOf(const Walk& walk) const;
  absl::Status Convolve(const Walk& walk, const Convolution& convolution, float* y) const;
  // Adds dy, by place, to the gradients of what is shown, by row, and of the kernel; and moves those
  // of the step's tokens to `gradient`, by place.
  absl::Status ConvolveBackward(const Walk& walk, const Convolution& convolution, const float* dy,
                                const TensorView& kernel_gradient, float* shown,
                                float* gradient) const;

  int64_t before(int64_t size) const { return problem_.causal ? size - 1 : (size - 1) / 2; }

  TensorView ByPlace(const Walk& walk, float* memory, int64_t channels) const {
    return TensorView(memory, DType::kF32, {walk.active, channels});
  }
  TensorView ByRow(float* memory, int64_t channels) const {
    return TensorView(memory, DType::kF32, {problem_.batch, problem_.query_tokens, channels});
  }

  Device device_;
  Problem problem_;
  UniversalTransformerOptions options_;
  UniversalSizes sizes_;
  Band band_;  // CUDA: of the keys that a query sees
  PackedMatrix queries_, keys_values_, output_, first_, second_;  // transposed
  BlockSchedule schedule_;
  TransposedSchedule by_keys_;
  FlashEngine engine_;                 // CUDA: of the step again, as in a Run
  FlashBackwardCuda engine_backward_;  // CUDA
  layers::NormNames attention_norm_, transition_norm_;
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_STEPS_BACKWARD_H_
