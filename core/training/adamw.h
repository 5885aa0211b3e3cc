// AdamW: Adam with a decay of the weights that the gradient's moments do not see.
//
//   m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g^2
//   w <- w - rate decay w - rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
//
// in step t, from 1, with the gradient g. Parameters and moments are fp32; a step computes in fp32,
// and the powers of beta in float64.
//
// Source: Loshchilov, Hutter 2019, "Decoupled weight decay regularization", arXiv:1711.05101v3,
// algorithm 2, with rate = eta alpha and decay = lambda / alpha, as PyTorch's torch.optim.AdamW has
// it; epsilon, outside of the root, and the corrections of the moments are Kingma, Ba 2015,
// arXiv:1412.6980v9, algorithm 1. With decay = 0 it is Adam.
#ifndef TFB_CORE_TRAINING_ADAMW_H_
#define TFB_CORE_TRAINING_ADAMW_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double decay = 0.01;
};

class AdamW {
 public:
  // Begins with moments of 0 for these parameters, which are f32. Returns InvalidArgument for numbers
  // out of their range, beta in [0, 1), epsilon above 0 and decay from 0 on, and for other dtypes.
  static absl::StatusOr<AdamW> Create(const NamedTensors& parameters,
                                      const AdamWOptions& options = {});

  // Takes step t, t = steps() + 1: changes the parameters that have a gradient of their name, f32 and
  // of their shape; the others keep their values and moments. `rate` is the step's learning rate. It
  // returns InvalidArgument, and changes nothing, where a gradient fits no parameter or has numbers
  // that are not finite: see LossScaler for those of 16 bits.
  absl::Status Step(double rate, const NamedTensors& gradients, NamedTensors* parameters,
                    ThreadPool* pool);

  int64_t steps() const { return steps_; }
  // The moments, by the names of the parameters, for a checkpoint and from one.
  const NamedTensors& first_moments() const { return first_; }
  const NamedTensors& second_moments() const { return second_; }
  // Returns InvalidArgument, and changes nothing, unless names, shapes and dtypes are those of this.
  absl::Status Restore(int64_t steps, const NamedTensors& first, const NamedTensors& second);

 private:
  explicit AdamW(const AdamWOptions& options) : options_(options) {}

  AdamWOptions options_;
  int64_t steps_ = 0;
  NamedTensors first_;   // m
  NamedTensors second_;  // v
};

}  // namespace tfb

#endif  // TFB_CORE_TRAINING_ADAMW_H_
