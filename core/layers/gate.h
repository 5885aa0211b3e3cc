// Gates that take the place of a residual connection: Parisotto et al., arXiv:1910.06764v1, section
// 3.2. x is the state on the residual path, y the sublayer's output; s is the logistic function, *
// multiplies channel by channel, b_g is a vector.
//
//   input          g = s(x W_g) * x + y
//   output         g = x + s(x W_g - b_g) * y
//   highway        g = s(x W_g + b_g) * x + (1 - s(x W_g + b_g)) * y
//   sigmoid_tanh   g = x + s(y W_g - b_g) * tanh(y U_g)
//   gru            r = s(y W_r + x U_r + b_r),  z = s(y W_z + x U_z + b_z - b_g)
//                  g = (1 - z) * x + z * tanh(y W_g + (r * x) U_g + b_h)
//
// The paper has no b_r, b_z and b_h.
//
// With a large b_g all but the first are the identity of x. Products share a read of their input:
// W_r, W_z, W_g are one product, U_r, U_z another that adds to it; what follows is one pass over
// the rows.
#ifndef TFB_CORE_LAYERS_GATE_H_
#define TFB_CORE_LAYERS_GATE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/gate_kernels.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb {

enum class GateKind : uint8_t { kInput, kOutput, kHighway, kSigmoidTanh, kGru };

class Gate {
 public:
  // Parameters in host memory: matrices [channels, channels], biases [channels]. Parameters that
  // the kind does not use are empty, and b_r, b_z and b_h may be.
  struct Parameters {
    ConstTensorView w_r, w_z, w_g, u_r, u_z, u_g, b_g, b_r = {}, b_z = {}, b_h = {};
  };

  Gate() = default;
  static absl::StatusOr<Gate> Create(Device device, GateKind kind, const Parameters& parameters);

  static size_t workspace_bytes(Device device, GateKind kind, int64_t rows, int64_t channels,
                                int threads);
  // Computes the gate. Tensors are [batch, tokens, channels] or [rows, channels], of any floating
  // dtype and strides; `out` may be x or y. It allocates nothing; on CUDA it enqueues on the
  // stream.
  absl::Status Run(const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                   const Execution& execution) const;
  size_t bytes() const { return first_.bytes() + second_.bytes() + third_.bytes(); }

 private:
  absl::Status RunGru(const ConstTensorView& x, const ConstTensorView& y, const TensorView& sums,
                      const TensorView& reset, const TensorView& out,
                      const Execution& execution) const;
  absl::Status Pass(GateStep step, const ConstTensorView& a, const ConstTensorView& b,
                    const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                    const Execution& execution) const;
  // The sums before the gate's functions, and r * x.
  struct Scratch {
    float* sums;
    float* reset;
  };
  static Scratch LayOut(GateKind kind, int64_t rows, int64_t channels, Workspace& workspace);

  GateKind kind_ = GateKind::kGru;
  PackedMatrix first_;   // W_g; W_g and U_g; or W_r, W_z and W_g: matrices of x or y
  PackedMatrix second_;  // gru: U_r and U_z
  PackedMatrix third_;   // gru: U_g
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_GATE_H_
