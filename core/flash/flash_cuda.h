// Engine flash on CUDA devices: the GPU or the simulator. The formula and the parts of a call are
// those of core/flash/flash.h; views, token orders and spans of a call point to device memory.
#ifndef TFB_CORE_FLASH_FLASH_CUDA_H_
#define TFB_CORE_FLASH_FLASH_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/flash/flash.h"
#include "core/flash/flash_kernels.h"
#include "core/problem.h"
#include "core/schedule/block_schedule.h"
#include "core/technique.h"

namespace tfb {

// Returns the queries of a tile in schedules for CUDA. A tile has 64 keys.
constexpr int64_t FlashCudaQueries(DType dtype) {
  return dtype == DType::kF32 ? kFlashQueriesF32 : kFlashQueries16;
}

// The data that calls of one problem, or of a stream, share on a device: the schedule and the
// tables of the score rule, which are copied there once.
class FlashCuda {
 public:
  FlashCuda() = default;
  // Creates an engine. `schedule` may be null: each call then brings a band. The arrays of the
  // rule, those of its soft span included, lie in host memory and may be freed afterwards. The
  // problem's numbers of tokens are an upper bound for those of the calls.
  static absl::StatusOr<FlashCuda> Create(CudaRuntime* runtime, const Problem& problem,
                                          const BlockSchedule* schedule, const ScoreRule& rule);

  // Creates what a backward pass reads of the device: a schedule of tiles of 64 queries and tables
  // of f32 for problems of every dtype, in which the forward pass's tables of relative keys have
  // been rounded.
  static absl::StatusOr<FlashCuda> CreateForBackward(CudaRuntime* runtime, const Problem& problem,
                                                     const BlockSchedule& schedule,
                                                     const ScoreRule& rule);

  // Returns how many parts the keys of a call are cut into: more than one where queries are too few
  // to fill the device.
  static int64_t Splits(const CudaRuntime& runtime, const Problem& problem);
  int64_t Splits(const Problem& problem) const { return Splits(*runtime_, problem); }

  // Returns the device memory that a call needs: the parts of keys that are split, where queries
  // are too few to fill the device. It suffices for calls with fewer tokens, too.
  static size_t WorkspaceBytes(const CudaRuntime& runtime, const Problem& problem);

  // Enqueues a call. From the call's rule it takes query_position, the token rule and the soft span,
  // whose pointers must be to device memory; Create has taken the rest. `scale` is as in FlashCpu;
  // `packed` must be empty: see FlashCall::ring. Arithmetic on scores and sums is fp32; for 16-bit
  // problems, products are of 16-bit queries, keys, probabilities and values, on tensor cores. The
  // result has the same bits in every run on one device. Run allocates nothing.
  absl::Status Run(const Problem& problem, const FlashCall& call,
                   const Execution& execution) const {
    return Run(problem, call, SoftmaxPart(), execution);
  }

  // A part of a softmax over the keys of several calls, see flash_parts.h: [splits][batch]
  // [query_heads][query_tokens] rows, by their token, of value_dim outputs not yet divided by their
  // sum, the maximum, and the sum.
  struct SoftmaxPart {
    float* rows = nullptr;    // null where the call is the whole softmax
    int64_t first_split = 0;  // the first of this call's Splits(); those before it are done
    int64_t splits = 1;       // of all parts
    bool is_last = true;      // whether the call merges all splits
  };
  static constexpr int64_t FloatsOfSplit(const Problem& problem) {
    return problem.batch * problem.query_heads * problem.query_tokens * (problem.value_dim + 2);
  }
  absl::Status Run(const Problem& problem, const FlashCall& call, const SoftmaxPart& part,
                   const Execution& execution) const;

  // Returns what kernels read of a call, without a part of a softmax: keys are not split.
  absl::StatusOr<FlashArguments> ArgumentsOf(const Problem& problem, const FlashCall& call) const;
  CudaRuntime* runtime() const { return runtime_; }

  // Sets the blocks of a grid for tests; the default is 2^31 - 1.
  void set_max_blocks(int64_t max_blocks) { max_blocks_ = max_blocks; }

 private:
  static constexpr int64_t kMaxBlocks = 0x7fffffff;  // the largest x of a grid

  absl::StatusOr<const void*> Keep(const void* from, size_t bytes);
  absl::Status KeepSchedule(const BlockSchedule& schedule);
  absl::Status KeepRule(const Problem& problem, const ScoreRule& rule);
  absl::Status KeepRelativeKeys(const Problem& problem, const RelativeKeys& keys);

  CudaRuntime* runtime_ = nullptr;
  int64_t query_tile_ = kFlashQueriesF32;
  bool is_16_bit_ = false;  // whether tables are of the problem's dtype, of 16 bits, or of f32
  ScheduleView schedule_ = {};
  bool has_schedule_ = false;
  ScoreRule rule_;
  int64_t max_blocks_ = kMaxBlocks;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_FLASH_CUDA_H_
