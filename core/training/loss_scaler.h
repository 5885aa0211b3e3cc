// Training with numbers of 16 bits: weights that are kept in fp32, and a loss that is scaled so that its
// small gradients do not vanish in f16.
//
//   w16 = round(w32)               what a step computes with (RoundedTo)
//   L' = scale L                   dL'/dw of 16 bits, divided by the scale in fp32 before the update
//
// The scale is a power of two that grows while no gradient overflows: it doubles after `interval`
// steps without, and halves after one with, whose update is left out. bf16 has the range of fp32 and
// is trained with the scale 1.
//
// Source: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740v3, sections 3.1 and
// 3.2; the numbers that change the scale are those of PyTorch's torch.amp.GradScaler.
#ifndef TFB_CORE_TRAINING_LOSS_SCALER_H_
#define TFB_CORE_TRAINING_LOSS_SCALER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/dtype.h"
#include "core/tensor.h"

namespace tfb {

struct LossScalerOptions {
  double scale = 65536;
  double growth = 2;     // above 1
  double backoff = 0.5;  // between 0 and 1
  int64_t interval = 2000;
  double least = 1;  // the scale falls no further: gradients that overflow then are the model's
};

class LossScaler {
 public:
  // Returns InvalidArgument for numbers out of their range.
  static absl::StatusOr<LossScaler> Create(const LossScalerOptions& options = {});
  // The scale of the next step's loss, or of the gradients of its outputs.
  double scale() const { return scale_; }

  // Divides f32 gradients of the scaled loss by the scale, and adapts the scale for the next step.
  // Returns whether all are finite: else the caller leaves the update out, and the gradients hold what
  // they did.
  bool Unscale(NamedTensors* gradients);

  // The steps without an overflow since the scale has changed, for a checkpoint and from one.
  int64_t steps() const { return steps_; }
  absl::Status Restore(double scale, int64_t steps);

 private:
  explicit LossScaler(const LossScalerOptions& options)
      : options_(options), scale_(options.scale) {}

  LossScalerOptions options_;
  double scale_;
  int64_t steps_ = 0;
};

// Returns copies of f32 tensors that hold the numbers of `dtype`, rounded to the nearest, ties to even:
// the weights of a step, as f32, which is how layers take them. Other tensors are copied.
NamedTensors RoundedTo(DType dtype, const NamedTensors& masters);

}  // namespace tfb

#endif  // TFB_CORE_TRAINING_LOSS_SCALER_H_
