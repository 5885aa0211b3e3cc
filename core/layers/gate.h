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
//
// The backward pass, with dg = dL/dg, o = s(a) where a is what s is applied to (r and z likewise,
// of a_r and a_z), and t = tanh(c) of what tanh is applied to:
//
//   input          da = dg * x * o (1 - o)            dx = dg * o + da W_g^T     dy = dg
//   output         da = dg * y * o (1 - o)            dx = dg + da W_g^T         dy = dg * o
//   highway        da = dg * (x - y) * o (1 - o)      dx = dg * o + da W_g^T     dy = dg * (1 - o)
//   sigmoid_tanh   da = dg * t * o (1 - o),  dc = dg * o (1 - t^2)
//                  dx = dg,  dy = da W_g^T + dc U_g^T
//   gru            da_z = dg * (t - x) * z (1 - z),  dc = dg * z (1 - t^2),  dm = dc U_g^T
//                  da_r = dm * x * r (1 - r)
//                  dx = dg * (1 - z) + dm * r + da_r U_r^T + da_z U_z^T
//                  dy = da_r W_r^T + da_z W_z^T + dc W_g^T
//
// A matrix's gradient is the product of the transpose of what it multiplies (x, y, or r * x) and
// the gradient of the sum that it adds to; a bias's is that gradient summed over rows, with b_g's
// sign. (The chain rule; the paper has no formulas for it.) A Run keeps a and c, in fp32: [rows,
// channels] of the kinds with one s, two and three times that of sigmoid_tanh and gru. To compute
// them again would take the forward pass's products once more.
#ifndef TFB_CORE_LAYERS_GATE_H_
#define TFB_CORE_LAYERS_GATE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/gate_functors.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb {

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
  // stream. Where execution.kept is not empty, it has kept_bytes() bytes and receives what Backward
  // needs.
  absl::Status Run(const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                   const Execution& execution) const;
  size_t bytes() const { return first_.bytes() + second_.bytes() + third_.bytes(); }

  // ---- The backward pass ----

  static size_t kept_bytes(GateKind kind, int64_t rows, int64_t channels);
  static size_t backward_workspace_bytes(Device device, GateKind kind, int64_t rows,
                                         int64_t channels, int threads);
  // Takes the matrices once more, in host memory, and packs their transposes.
  absl::Status SetUpBackward(const Parameters& parameters);
  // The parameters' gradients, f32, or empty. Those that the kind does not use are not written.
  struct ParameterGradients {
    TensorView w_r, w_z, w_g, u_r, u_z, u_g, b_g, b_r = {}, b_z = {}, b_h = {};
  };
  struct BackwardCall {
    ConstTensorView x, y;  // as Run read them
    ConstTensorView dout;  // of their shape, as are the others
    TensorView dx, dy;     // either may be empty, and either may be dout
    ParameterGradients parameters = {};
    bool accumulate = false;  // adds to what the parameters' gradients hold
  };
  // Computes the gradients from execution.kept as a Run on x and y filled it. It allocates nothing; on
  // CUDA it enqueues on the stream.
  absl::Status Backward(const BackwardCall& call, const Execution& execution) const;

 private:
  absl::Status RunGru(const ConstTensorView& x, const ConstTensorView& y, const TensorView& sums,
                      const TensorView& reset, const TensorView& out,
                      const Execution& execution) const;
  absl::Status Pass(GateStep step, const ConstTensorView& a, const ConstTensorView& c,
                    const ConstTensorView& x, const ConstTensorView& y, const TensorView& out,
                    const Execution& execution) const;
  // The sums before the gate's functions, and r * x.
  struct Scratch {
    float* sums;
    float* reset;
  };
  static Scratch LayOut(GateKind kind, int64_t rows, int64_t channels, Workspace& workspace);
  struct BackwardScratch {
    float* sums;   // the gradients of the sums
    float* reset;  // the data of ResetViews
    float* of_x;
    float* of_reset;
  };
  static BackwardScratch LayOutBackward(GateKind kind, int64_t rows, int64_t channels,
                                        Workspace& workspace);
  struct ResetViews {
    TensorView reset;     // r * x
    TensorView of_x;      // what of dx does not come through products
    TensorView of_reset;  // dm
  };
  // Does the gru's second step, of r.
  absl::Status ResetBackward(const BackwardCall& call, const TensorView& kept,
                             const TensorView& sums, const ResetViews& views,
                             const Execution& execution) const;
  absl::Status ParametersBackward(const BackwardCall& call, const TensorView& sums,
                                  const TensorView& reset, const Execution& execution) const;

  GateKind kind_ = GateKind::kGru;
  PackedMatrix first_;   // W_g; W_g and U_g; or W_r, W_z and W_g: matrices of x or y
  PackedMatrix second_;  // gru: U_r and U_z
  PackedMatrix third_;   // gru: U_g
  PackedMatrix first_transposed_;
  PackedMatrix second_transposed_;
  PackedMatrix third_transposed_;
};

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_GATE_H_
