// The steps of a Universal Transformer on the CPU: only tokens that go on are computed.
//
// Before each step the tokens that go on are listed (with halted=recomputed all tokens of a
// sequence in which one does), and every product, norm and query has their rows alone, side by
// side. Keys and values are those of all tokens. Their projection is in two parts: (H + PE) W of
// the state and the position, computed when the state has changed, and T^n W, a row of a table. So
// each token's numbers do not depend on which others go on, bit for bit.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_COMPACTED_STEPS_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_COMPACTED_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "adaptive/universal_transformer/shared_block.h"
#include "core/schedule/band_schedule.h"
#include "core/workspace.h"

namespace tfb::universal_transformer {

class CompactedSteps : public UniversalSteps {
 public:
  CompactedSteps(const Problem& problem, const UniversalTransformerOptions& options);
  size_t workspace_bytes(int threads) const override;
  absl::Status Run(const SharedBlock& block, const Call& call, const Execution& execution) override;

 private:
  // The scratch of a run. The row of a token is b tokens + t; a place is that of a listed token.
  struct Scratch {
    float* state;   // H [rows, width]
    float* output;  // the sum or mix of states, or a halted token's last [rows, width]; null where
                    // the output is the state
    float* base;    // (H + PE) W_k, W_v [rows, keys_values]
    TensorView
        projected;    // [batch, tokens, projected] in the problem's dtype: queries have the rows of
                      // tokens that go on, keys and values those of all
    float* placed;    // H + PE, then A, by place [rows, width]
    float* made;      // U, then S, by place [rows, width]
    float* products;  // by place [rows, the wider of queries, and keys and values]
    TensorView context;  // attention's result by place [rows, context_width], in that dtype
    float* inner;        // the transition's activations by place [rows, inner]
    // Used with separable convolutions: the A and activations of tokens, by row, and a
    // convolution's result by place.
    float* shown;
    float* shown_inner;
    float* convolved;
    float* total;   // p^1 + .. + p^n by row
    float* weight;  // weight of the step's state, by place
    // The rows, by place, of tokens that go on, ascending, then of those that have just halted.
    int32_t* row;
    int32_t* just_halted;  // the rows of the latter, before they are listed
    int32_t* token;        // by place, for tokens that go on: the token's number in its batch row
    uint8_t* is_token;     // by row: whether it is not padding
    uint8_t* has_halted;   // by row
    int64_t* first_of_batch;  // [batch + 1] places
  };
  // The data that the parts of one run share.
  struct Walk {
    const SharedBlock& block;
    const Call& call;
    Scratch scratch;
    Execution execution;  // with the rest of the workspace
    int64_t step = 0;     // n - 1
    int64_t active = 0;   // tokens that go on
    int64_t changed = 0;  // tokens that have just halted
  };

  Scratch LayOut(Workspace& workspace) const;

  void Begin(Walk& walk) const;
  void Gather(const Walk& walk) const;
  absl::Status Project(const Walk& walk) const;
  absl::Status Attend(const Walk& walk);
  absl::Status AttendBatch(const Walk& walk, int64_t b);
  absl::Status Transit(const Walk& walk) const;
  void Convolve(const Walk& walk, const TensorView& rows, float* shown,
                const DeviceArray<float>& kernel, int64_t size) const;
  void KeepStates(const Walk& walk) const;
  void AddToOutput(const Walk& walk, int64_t place) const;
  void Compact(Walk& walk) const;
  bool Stays(const Walk& walk, int64_t b) const;
  void WriteOut(const Walk& walk) const;
  // Keep the states of a step, and what is known when all tokens have halted.
  void KeepForBackward(const Walk& walk) const;
  absl::Status FinishKept(const Walk& walk) const;

  void Decide(const Walk& walk, int64_t place, const float* of) const;

  Problem problem_;
  UniversalTransformerOptions options_;
  UniversalSizes sizes_;
  BandSchedule schedule_;
};

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_COMPACTED_STEPS_H_
