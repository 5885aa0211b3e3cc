// Engine linear on CUDA devices: the GPU or the simulator. The formula and the parts of a call are
// those of core/linear/linear.h; views of a call point to device memory.
#ifndef TFB_CORE_LINEAR_LINEAR_CUDA_H_
#define TFB_CORE_LINEAR_LINEAR_CUDA_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/linear/linear.h"
#include "core/linear/linear_kernels.h"
#include "core/problem.h"
#include "core/technique.h"

namespace tfb {

// The data that calls of one problem share on a device: W and, where tokens are appended, the sums
// so far.
class LinearCuda {
 public:
  LinearCuda() = default;
  // Creates an engine. `w` and, for a gated map, `gate` lie in host memory and are as in
  // LinearCall. With `streams` it can Append, and begins with an empty state.
  static absl::StatusOr<LinearCuda> Create(CudaRuntime* runtime, const Problem& problem,
                                           const FeatureMap& map, const ConstTensorView& w,
                                           bool streams, const ConstTensorView& gate = {});

  // Returns the device memory that a call needs. It suffices also for Append of at most
  // problem.kv_tokens tokens.
  static size_t WorkspaceBytes(const CudaRuntime& runtime, const Problem& problem,
                               const FeatureMap& map);
  // Returns the bytes of the sums of all heads. The size does not depend on the number of tokens.
  static size_t StateBytes(const Problem& problem, const FeatureMap& map);

  // Run and Append enqueue. They ignore `w` and `rows_without_weight` of a call. Arithmetic is
  // fp32; for 16-bit problems, products are of numbers to 16 bits or more, on tensor cores. Every
  // run on one device gives the same bits. They allocate nothing.
  absl::Status Run(const Problem& problem, const LinearCall& call,
                   const Execution& execution) const;
  // Appends tokens as LinearAppend does. One that is recorded in a graph counts as made.
  absl::Status Append(const Problem& problem, int64_t tokens, const LinearCall& call,
                      const Execution& execution);
  // Returns the device memory that Backward needs, linear in tokens. It is for some heads at a time, as
  // many as 256 MiB hold, or for one: 492 MiB for 65,536 keys and queries of a causal problem with 256
  // features and 64 channels, whatever the batch.
  static size_t BackwardWorkspaceBytes(const Problem& problem, const FeatureMap& map);
  // Enqueues what LinearBackwardCpu does, from the call's tensors alone: it uses no kept memory, and
  // ignores `w` and `gate` of the call. Arithmetic is fp32 for all dtypes, without atomics: every
  // run gives the same bits. It allocates nothing.
  absl::Status Backward(const Problem& problem, const LinearBackwardCall& call,
                        const Execution& execution) const;

  // Sets the state to no tokens. The next Append writes that to the device, on its own stream: behind the
  // Appends before it, of which Reset does not know the stream.
  void Reset() { is_empty_ = true; }

  // Returns the number for the last Run, and waits for it, on whatever stream it is. See LinearCall.
  absl::StatusOr<int64_t> RowsWithoutWeight() const;

  // Sets the most blocks of a grid, for tests. Blocks take more work than that in turns.
  void set_max_blocks(int64_t blocks) { max_blocks_ = blocks; }
  // Sets the most key-value heads that Backward takes at a time, for tests.
  void set_max_held_heads(int64_t heads) { max_held_heads_ = heads; }

 private:
  // Returns the arguments of a call with these inputs, without its outputs.
  LinearArguments ArgumentsOf(const Problem& problem, const LinearInputs& inputs) const;
  LinearArguments ArgumentsOf(const Problem& problem, const LinearCall& call) const;
  absl::Status RunAll(LinearArguments* arguments, const Execution& execution) const;
  absl::Status RunCausal(LinearArguments* arguments, const Execution& execution) const;
  absl::Status EmptyState(void* stream) const;  // enqueues it
  const LinearSumKernels& sums() const;
  const LinearAttendKernels& attention() const;

  CudaRuntime* runtime_ = nullptr;
  Problem problem_;
  FeatureMap map_;
  DeviceBuffer w_;
  DeviceBuffer gate_;
  DeviceBuffer state_;
  bool is_empty_ = true;  // state_ is yet to be that of no tokens
  DeviceBuffer rows_without_weight_;
  int64_t max_blocks_ = 0x7fffffff;
  int64_t max_held_heads_ = 0x7fffffff;
};

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_CUDA_H_
