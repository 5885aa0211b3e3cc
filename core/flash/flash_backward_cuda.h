// Engine flash's backward pass on CUDA devices: the GPU or the simulator. Formulas and the parts of a call are those of
// core/flash/flash_backward.h; views, orders and sums of a call point to device memory.
#ifndef TFB_CORE_FLASH_FLASH_BACKWARD_CUDA_H_
#define TFB_CORE_FLASH_FLASH_BACKWARD_CUDA_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash_backward.h"
#include "core/flash/flash_backward_kernels.h"
#include "core/flash/flash_cuda.h"
#include "core/problem.h"
#include "core/schedule/block_schedule.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb {

// The sums of terms of a score that a backward pass makes, which need workspace.
struct ScoreSums {
  bool content_bias = false;
  bool labels = false;         // label keys and their numbers
  bool offsets = false;        // distance tables, the position bias of relative keys
  bool relative_keys = false;  // with `offsets`
  bool key_order = false;      // gradients by place, of an order of keys

  static ScoreSums OfLabels();
  static ScoreSums OfOffsets();
  static ScoreSums OfRelativeKeys();
  static ScoreSums OfKeyOrder();

  ScoreSums& operator|=(const ScoreSums& other);
  bool operator==(const ScoreSums& other) const;
};

class FlashBackwardCuda {
 public:
  FlashBackwardCuda() = default;
  // Copies the schedule, of tiles of 64 queries, and the rule's tables, which lie in host memory, to the device.
  static absl::StatusOr<FlashBackwardCuda> Create(CudaRuntime* runtime, const Problem& problem,
                                                  const BlockSchedule& schedule,
                                                  const ScoreRule& rule);

  // Runs the forward pass of problems of f32 with this schedule and rule.
  const FlashCuda& forward() const { return flash_; }

  // Returns the device memory that a call needs. It is linear in the tokens.
  static size_t WorkspaceBytes(const Problem& problem, const ScoreSums& sums);

  // Returns the dtype to which the products of a call round the gradient of the output: the problem's
  // on tensor cores, else f32, which rounds nothing.
  DType FactorsOf(const Problem& problem, const FlashCall& forward) const;

  // Enqueues a call, which has `numbers` in place of `delta`. Arithmetic is fp32; in problems of 16
  // bits without a score rule, products are of 16-bit factors, on tensor cores
  // (flash_backward_mma.cuh). The result has the same bits in every run. It allocates nothing.
  absl::Status Run(const Problem& problem, const FlashBackwardCall& call,
                   const Execution& execution) const;

 private:
  struct Parts;
  static Parts LayOut(const Problem& problem, const ScoreSums& sums, Workspace* workspace);
  static ScoreSums SumsOf(const FlashBackwardCall& call, const ScoreRule& rule);
  absl::Status AddSums(const FlashBackwardArguments& b, const ScoreGradients& terms,
                       const Execution& execution) const;

  FlashCuda flash_;
  TransposedView transposed_ = {};
  DeviceArray<int64_t> begin_;
  DeviceBuffer runs_;
};

// Adds rows f32 [batch, heads, places, channels], without strides, to the tokens of `to`, f32 of any
// strides, that an order of the places names; numbers below 0 name none. The rows of a token are added in
// the order of places.
absl::Status AddRowsByToken(CudaRuntime* runtime, const ConstTensorView& rows,
                            const TokenOrder& order, const TensorView& to,
                            const Execution& execution);

// Writes the numbers of rows of an output [batch, query_heads, rows, value_dim], of any dtype and strides, from its
// log-sum-exp, what rounding took from the two, which may be empty, and the gradients of both, of which that of the
// log-sum-exp may be empty. `factors` is FactorsOf the calls: a D_i of another g_i than that of dp_ij would be off by more
// than what is left of dp_ij - D_i where a key has nearly all weight. `marks`, u8 [batch, rows], may be empty: rows where it
// is not `counts` have no gradients.
absl::Status FlashRowNumbers(CudaRuntime* runtime, const FlashBackwardCall& call,
                             const ConstTensorView& out,
                             const ConstTensorView& log_sum_exp_gradient, DType factors,
                             const ConstTensorView& marks, bool counts, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_BACKWARD_CUDA_H_
