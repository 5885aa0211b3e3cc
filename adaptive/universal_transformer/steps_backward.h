// The backward pass of a Universal Transformer, on the CPU, of the steps that each token took.
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
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_STEPS_BACKWARD_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_STEPS_BACKWARD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "adaptive/universal_transformer/shared_block.h"
#include "core/flash/flash.h"
#include "core/layers/layer_parameters.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/transposed_schedule.h"
#include "core/workspace.h"

namespace tfb::universal_transformer {

class StepsBackward {
 public:
  StepsBackward(const Problem& problem, const UniversalTransformerOptions& options);
  // Packs the transposed matrices and makes the schedules.
  absl::Status SetUp(const NamedTensors& parameters);
  size_t workspace_bytes(int threads) const;

  struct Call {
    const SharedBlock& block;
    StepsKept kept;
    ConstTensorView x;
    ConstTensorView key_mask;   // or empty
    ConstTensorView out;        // its gradient, of any dtype
    ConstTensorView ponder;     // likewise, or empty
    TensorView x_gradient;      // or empty
    const Outputs& parameters;  // gradients, which are 0 before
  };
  // Computes the gradients. It allocates nothing.
  absl::Status Run(const Call& call, const Execution& execution) const;

 private:
  // By row: [rows, ...], all tokens. By place: the tokens that took the step, of which there are
  // `active`.
  struct Scratch {
    float* coefficients;     // c^n [steps][rows]
    float* of_logits;        // dz^n, likewise
    float* state;            // dH, by row
    float* read;             // U, by row
    TensorView keys_values;  // [batch, tokens, keys_values] in the problem's dtype
    float* keys_values_gradient;
    float* of_keys;      // what keys and values give to U, by row
    float* placed;       // U, by place
    TensorView queries;  // by place, in that dtype
    TensorView context;  // likewise
    float* log_sum_exp;  // [heads][places]
    float* delta;
    float* attended;    // what the first norm reads, by place
    float* normalized;  // A
    float* into_first;  // what W_1 reads; A without convolutions
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
    int32_t* place_of_row;  // below 0 where the token did not take the step
    int32_t* row;           // by place
  };
  struct Walk {
    const Call& call;
    Scratch scratch;
    Execution execution;
    int64_t step = 0;  // n - 1
    int64_t active = 0;
  };

  Scratch LayOut(Workspace& workspace) const;
  void PrepareHalting(const Walk& walk) const;
  void PrepareRow(const Walk& walk, int64_t r) const;
  void LoadRead(const Walk& walk, int64_t r, int64_t step, float* to) const;
  void List(Walk& walk) const;
  absl::Status RunAgain(const Walk& walk) const;
  absl::Status TransitionBackward(const Walk& walk) const;
  absl::Status AttentionBackward(const Walk& walk) const;
  absl::Status InputBackward(const Walk& walk) const;
  void AddHalting(const Walk& walk) const;
  FlashCall FlashOf(const Walk& walk) const;

  // A convolution of the step: what its tokens see, and where their gradients go.
  struct Convolution {
    const DeviceArray<float>& kernel;
    int64_t size;
    int64_t channels;
    const float* rows;   // by place, of the tokens that took the step
    const float* shown;  // by row, of those that had halted
  };
  Convolution First(const Walk& walk) const;
  Convolution Second(const Walk& walk) const;
  int64_t before(int64_t size) const { return problem_.causal ? size - 1 : (size - 1) / 2; }
  // Calls body(other row, j) for the tokens that the convolution's output of row r reads.
  template <class Body>
  void ForEachSeen(const Walk& walk, int64_t r, int64_t size, const Body& body) const;
  void Convolve(const Walk& walk, const Convolution& convolution, float* y) const;
  // Adds dy, by place, to the gradients of what is shown, by row, and of the kernel; and moves those
  // of the step's tokens to `gradient`, by place.
  void ConvolveBackward(const Walk& walk, const Convolution& convolution, const float* dy,
                        const TensorView& kernel_gradient, float* shown, float* gradient) const;

  bool is_token(const Walk& walk, int64_t r) const { return walk.call.kept.computed[r] > 0; }
  TensorView ByPlace(const Walk& walk, float* memory, int64_t channels) const {
    return TensorView(memory, DType::kF32, {walk.active, channels});
  }

  Problem problem_;
  UniversalTransformerOptions options_;
  UniversalSizes sizes_;
  PackedMatrix queries_, keys_values_, output_, first_, second_;  // transposed
  BlockSchedule schedule_;
  TransposedSchedule by_keys_;
  layers::NormNames attention_norm_, transition_norm_;
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_STEPS_BACKWARD_H_
