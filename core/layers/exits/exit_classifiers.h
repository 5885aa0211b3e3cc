// Linear classifiers of a stack's states, for rules that learn when tokens leave, and their gradients:
//
//   z_n = w_n . row + b_n                                        n = 0, ..., classes - 1
//   dw_n = sum_r dz_nr row_r,  db_n = sum_r dz_nr,  drow_r = sum_n dz_nr w_n
//
// Sums over tokens are those of core/cuda/run_sums.h on every device.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_CLASSIFIERS_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_CLASSIFIERS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/cpu/kernels.h"
#include "core/cuda/device_array.h"
#include "core/layers/exits/exit_classifiers_functors.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

class ExitClassifiers {
 public:
  ExitClassifiers(Device device, int64_t classes, int64_t width)
      : device_(device), classes_(classes), width_(width) {}

  // Copies w [classes, width] and b [classes], in host memory.
  absl::Status Setup(const ConstTensorView& w, const ConstTensorView& b);

  int64_t classes() const { return classes_; }
  // Memory of the device.
  const float* weights(int64_t n) const { return weights_.data() + n * width_; }
  const float* bias(int64_t n) const { return bias_.data() + n; }

  // Calls body(r, z_n) for each row of `state`, f32 [rows, width], on the CPU.
  template <class Body>
  void ForEachLogit(int64_t n, const ConstTensorView& state, ThreadPool* pool,
                    const Body& body) const {
    pool->ParallelForRanges(state.dim(0), kRowsOfTask, [&](int64_t begin, int64_t end, int) {
      float logits[kRowsOfTask];
      BestCpuKernels().matrix_vector(end - begin, width_, state.At<float>(begin), width_,
                                     weights(n), logits, 1, /*accumulate=*/false);
      for (int64_t r = begin; r < end; ++r) body(r, logits[r - begin] + *bias(n));
    });
  }

  // The backward pass, of `count` tokens. These allocate nothing; on CUDA they enqueue on the stream.
  // Writes z, f32 [count, classes].
  absl::Status Logits(const ClassifierRows& of, int64_t count, float* logits,
                      const Execution& execution) const;
  // Adds dw_n to w, f32 [number, width], or [width] of one class, and db_n to b [number], for
  // n = first, first + 1, ..., given dz [count, classes]. An empty tensor is left out. The execution has
  // a workspace of gradient_workspace_bytes(count).
  size_t gradient_workspace_bytes(int64_t count) const;
  absl::Status AddParameterGradients(const ClassifierRows& of, const float* of_logits,
                                     int64_t count, int64_t first, const TensorView& w,
                                     const TensorView& b, const Execution& execution) const;
  // Adds what classes first, ..., end - 1 give to `gradient`, f32 [batch, segment, width], of tokens
  // begin, begin + 1, ..., given dz [batch, tokens, classes].
  absl::Status AddStateGradient(const float* of_logits, int64_t tokens, int64_t begin,
                                int64_t first, int64_t end, const TensorView& gradient,
                                const Execution& execution) const;

 private:
  static constexpr int64_t kRowsOfTask = 16;

  Device device_;
  int64_t classes_;
  int64_t width_;
  DeviceArray<float> weights_;  // [classes, width]
  DeviceArray<float> bias_;     // [classes]
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_CLASSIFIERS_H_
