// Calls of flash kernels on tensor cores through their tables, against float64 loops over the same
// 16-bit numbers, for tests.
#ifndef TFB_CORE_FLASH_FLASH_MMA_TESTING_H_
#define TFB_CORE_FLASH_FLASH_MMA_TESTING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/flash.h"
#include "core/flash/flash_kernels.h"
#include "core/schedule/block_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::flash_mma {

// The sizes of a problem of one head and batch row, unless they say otherwise.
struct Sizes {
  int64_t queries;
  int64_t keys;
  int64_t head_dim;
  int64_t value_dim;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t batch = 1;
};
Problem Make(DType dtype, const Sizes& sizes, bool causal = false);

// A call with its tensors on the host, and its result on the device.
class Subject {
 public:
  explicit Subject(const Problem& p, const Pattern* of_keys = nullptr);

  const Problem problem;
  FlashCall call;  // no packed keys, no relative keys
  // Relative keys [table heads, high - low + 1, head_dim] of the problem's dtype, for offsets from
  // `low` on.
  Tensor relative_keys;
  int64_t low = 0;
  const Band* band = nullptr;  // replaces the pattern's schedule
  int splits = 1;
  int64_t max_blocks = 1 << 20;
  int64_t shift = 0;     // elements from an aligned address to the tensors' beginning
  bool decodes = false;  // by FlashDecodeMmaKernels
  // Adds to, or replaces, the score of a pair that the pattern shows.
  std::function<double(int64_t b, int64_t h, int64_t i, int64_t j, double score)> change =
      [](int64_t, int64_t, int64_t, int64_t, double score) { return score; };

  Tensor& input(const char* name) { return inputs_[name]; }
  Tensor& out() { return outputs_["out"]; }
  Tensor& log_sum_exp() { return outputs_["log_sum_exp"]; }
  double Out(int64_t b, int64_t h, int64_t i, int64_t c) const {
    return call.out.Get(call.out.Offset(b, h, i, c));
  }

  // `seed` sets the order of blocks and threads. The test fails where the simulator finds an error.
  void Run(uint64_t seed = 1);
  // Holds what rounding takes from the output, with what is left, to the call's output in f32.
  void ExpectRest();
  // Rounding probabilities changes an output by at most the unit roundoff times sum_j p_ij |v_j|;
  // rounding the output adds the unit roundoff times itself. That is the error of plain attention
  // with 16-bit probabilities. The rest is fp32's.
  void ExpectMatchesLoops(double fp32_factor = 1);
  // Holds that reversed queries over every third key give the same bits as attention over those keys,
  // with the result reversed.
  void ExpectOrdersGatherAndScatter();
  // Holds that keys and values in a ring of tiles give the same bits, whichever of them is the first.
  void ExpectRingsGiveTheSame();

 private:
  NamedTensors Loops() const;

  // ---- On the device ----

  template <class T>
  absl::StatusOr<const T*> Upload(const T* from, int64_t count) {
    if (from == nullptr) return nullptr;
    TFB_ASSIGN_OR_RETURN(DeviceBuffer buffer, runtime_->Upload(from, count * sizeof(T)));
    buffers_.push_back(std::move(buffer));
    return buffers_.back().As<T>();
  }
  absl::StatusOr<DeviceView> UploadView(const ConstTensorView& view);
  absl::StatusOr<float*> UploadFloats(const ConstTensorView& view);
  absl::StatusOr<TokenOrder> UploadOrder(TokenOrder order, int64_t count);
  absl::StatusOr<DeviceIds> UploadIds(const ConstTensorView& ids);
  absl::Status Download(const DeviceView& device, const TensorView& view);
  // Copies the call's rule to the device.
  absl::Status FillRule(ScoreRule* device);
  absl::Status FillSchedule(ScheduleView* view);
  absl::Status RunOnDevice();

  FullPattern full_;
  const Pattern* pattern_;
  NamedTensors inputs_;
  NamedTensors outputs_;
  BlockSchedule schedule_;
  CudaRuntime* runtime_ = nullptr;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace tfb::flash_mma

#endif  // TFB_CORE_FLASH_FLASH_MMA_TESTING_H_
