// The backward pass of engine flash on the CPU: gradients of queries, keys, values and of every term
// of the score, without a tokens x tokens matrix.
//
// With the scores s_ij and weights m_ij of core/flash/flash.h, l_i the log-sum-exp, p_ij = m_ij exp(s_ij
// - l_i), and the gradients g_i = dL/dy_i and e_i = dL/dl_i:
//
//   D_i   = g_i . y_i - e_i
//   ds_ij = p_ij (g_i . v_j - D_i)                            0 where p_ij is 0
//   dv_j  = sum_i p_ij g_i
//   dbias_(j-i) = sum ds_ij;  dmultiplier_(j-i) = sum ds_ij relu(s)_ij, and from here on ds_ij is
//           multiplied by the factor where the score is above 0, and 0 elsewhere
//   dq_i  = scale sum_j ds_ij (k_j + r_(j-i) + l_[a_i = b_j])
//   dk_j  = scale sum_i ds_ij (q_i + u)
//   du    = scale sum_ij ds_ij k_j                            of each head
//   dw    = scale sum_ij ds_ij (r_(j-i) + l_[a_i = b_j])
//   dr_o  = scale sum_(j-i=o) ds_ij (q_i + w);  dl, dc likewise over the pairs of a label
//   dz_i  = sum_j (1 / ramp) [0 < m_ij < 1] exp(s_ij - l_i) (g_i . v_j - D_i)
//
// Scores are formed again, tile by tile: five products for the forward pass's two (Dao,
// arXiv:2307.08691, section 3.1). A task owns some keys of a head, walks the queries that see them by
// the transposed schedule, and adds to their gradients in the order of the keys, for which it waits
// where another thread is behind. So the sums have the same bits for any number of threads. The calls
// of several parts of one softmax share l and D, and add to the same gradients one after the other.
#ifndef TFB_CORE_FLASH_FLASH_BACKWARD_H_
#define TFB_CORE_FLASH_FLASH_BACKWARD_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/flash/flash.h"
#include "core/flash/flash_backward_kernels.h"
#include "core/problem.h"
#include "core/schedule/transposed_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// The relative keys as rows, which products with gradients read: [heads][high - low + 1][row], scaled,
// padded with zeros to `row` floats.
class RelativeKeyVectors {
 public:
  RelativeKeyVectors() = default;
  RelativeKeyVectors(const RelativeKeys& keys, int64_t head_dim, double scale);
  const float* Of(int64_t head) const { return values_.data() + head % heads_ * offsets_ * row_; }
  // Tells whether offsets kBlock n to kBlock n + kBlock - 1, of which some are in [low, high], all
  // have the row of the keys' table that the offset before them has, as offsets beyond a clipped
  // distance do. Their score gradients can then be summed before they are multiplied.
  bool Repeats(int64_t n) const { return repeats_[n - first_block_]; }
  static constexpr int64_t kBlock = RelativeKeys::kBlock;
  // Returns the block of an offset.
  static int64_t BlockOf(int64_t offset) {
    return (offset >= 0 ? offset : offset - kBlock + 1) / kBlock;
  }

 private:
  int64_t heads_ = 1;
  int64_t offsets_ = 0;
  int64_t row_ = 0;
  std::vector<float> values_;
  int64_t first_block_ = 0;
  std::vector<bool> repeats_;
};

// Where the gradients of the terms of a score are added, each of the query heads' own, also where heads
// share a term. A null pointer leaves its gradient out.
struct ScoreGradients {
  float* content_bias = nullptr;   // [query_heads][head_dim]
  float* position_bias = nullptr;  // [query_heads][head_dim]
  // [query_heads][high - low + 1][RoundUp(head_dim, 16)]
  float* relative_keys = nullptr;
  float* label_keys = nullptr;    // [query_heads][2][head_dim]
  float* label_biases = nullptr;  // [query_heads][2]
  // [query_heads][row], with the row and zero of the rule's entries
  float* relu_multiplier = nullptr;
  float* bias = nullptr;
  float* span = nullptr;  // [batch][query_heads][query_tokens]
};

// Gradients of q, k and v are f32, of the shapes of the call's tensors, and are added to; an empty
// one is not computed. Where rows of `out` are the schedule's, not tokens, so are those of q's
// gradient: an order may then name a query several times. A query whose g and D are 0 gives
// nothing, whatever it holds.
struct FlashBackwardCall {
  // With log_sum_exp, and log_sum_exp_rest where that is not empty, as they were written; `out` is
  // not read, and its rest on CUDA alone, by FlashRowNumbers.
  const FlashCall* forward;
  const TransposedSchedule* schedule;
  const RelativeKeyVectors* relative_keys = nullptr;  // where the rule has relative keys
  ConstTensorView out_gradient;  // g, of the shape of out, of any dtype and strides
  ConstTensorView delta;         // D, f32, of the shape of log_sum_exp; on the CPU
  RowNumbers numbers;            // on CUDA, of the rows of out
  // u8 [batch, query_tokens], 1 for rows that another call writes and this one's do not count; or
  // empty. On CUDA the numbers know.
  ConstTensorView overwritten;
  TensorView q_gradient;
  TensorView k_gradient;
  TensorView v_gradient;
  // On the CPU: whether the gradient holds nothing yet, so that the call sets all of its rows instead
  // of adding to them. The queries, or the keys, then have no order.
  bool sets_q = false;
  bool sets_k = false;
  bool sets_v = false;
  ScoreGradients terms;
};

// Writes D, f32 of the shape [batch, query_heads, query_tokens], from y and g of any dtype and
// strides; from what rounding took from y (FlashCall::out_rest), which may be empty; and from e,
// f32, which may be empty. Where g is 0, y is not read.
void FlashDelta(const ConstTensorView& out, const ConstTensorView& out_rest,
                const ConstTensorView& out_gradient, const ConstTensorView& log_sum_exp_gradient,
                const TensorView& delta, ThreadPool* pool);

// Returns the scratch of a call in bytes. It is linear in the tokens.
size_t FlashBackwardWorkspaceBytes(const Problem& problem, bool relative_keys, int threads);

// Adds the gradients of a call. It allocates nothing.
absl::Status FlashBackwardCpu(const Problem& problem, const FlashBackwardCall& call,
                              const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_BACKWARD_H_
