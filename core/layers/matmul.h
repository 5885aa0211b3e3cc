// Products of a hidden state with a weight matrix, on every device.
//
//   y = activation(x W + b) + residual        x [rows, in], W [in, out], b [out]
//
// CPU. W is packed once into panels of 64 columns, [panel][in][64], so that the inner loop of
// core/cpu/kernels.h reads it contiguously: 64 x 64 floats of a panel are 16 KiB, half of a 32 KiB
// L1, and are used for all rows of a block before the next 64 channels are read. A task is one
// panel for one block of rows; it sums in fp32 in the order of the input channels, so the result
// depends neither on the number of threads nor on the other rows.
//
// CUDA. Arithmetic is fp32, and W is row-major. On a GPU cuBLAS computes the product
// where the library can be opened, and a kernel adds the rest; else, and in the simulator, one
// kernel of our own does all of it (layer_kernels.cu), whose sums are in the order of the input
// channels too. MatMulBackend tells which. cuBLAS chooses its kernel, and so the order of sums, by the
// number of rows: a row's result may differ in rounding with the other rows, as those of a larger
// batch. Our own kernel computes products of listed rows on a GPU
// too: a library takes the number of rows from the host. The host does not know it, and to ask the
// device would mean to wait for it in every layer; a product of all rows would save nothing.
// Whether a list of nearly all rows is then slower than cuBLAS with all of them has not been
// measured.
//
// Where x is bf16 or f16, tensor cores compute its product exactly in fp32 if W has that type too.
// W is fp32, and so it is split (PackedMatrix::Split) into the sum of two 16-bit matrices, the
// nearest to it and the nearest to the rest:
//
//   x W = x high + x low        |W - high - low| <= 2^-18 |W| in bf16, 2^-22 |W| or 2^-25 in f16
#ifndef TFB_CORE_LAYERS_MATMUL_H_
#define TFB_CORE_LAYERS_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/cuda/row_list.h"
#include "core/layers/activation.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// A weight matrix in its device's layout: a copy, made at Setup.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // Takes W [in, out] and b [out], or no bias where b is empty; both in host memory, of any
  // floating dtype and strides. Returns errors of the device and of its memory.
  static absl::StatusOr<PackedMatrix> Create(Device device, const ConstTensorView& weights,
                                             const ConstTensorView& bias = {});
  // Puts the columns of several matrices side by side, such as those of queries, keys and values: x
  // is then read once.
  static absl::StatusOr<PackedMatrix> Create(Device device,
                                             const std::vector<ConstTensorView>& weights,
                                             const ConstTensorView& bias = {});
  // Takes matrices as Create does and packs the transpose of all of them side by side, [out, in],
  // for the gradient of their product: dx = dy W^T is a product itself.
  static absl::StatusOr<PackedMatrix> CreateTransposed(Device device,
                                                       const std::vector<ConstTensorView>& weights);

  // Splits W for products with rows of bf16 or f16 by a library on the GPU. Does nothing where the
  // values are too large for the type. Internal on the CPU, whose layout is another.
  absl::Status Split(DType of_x);

  Device device() const { return weights_.device(); }
  int64_t in() const { return in_; }
  int64_t out() const { return out_; }
  // CPU: panels, [ceil(out / 64)][in][64], zero beyond the last column. CUDA: [in][out].
  const float* weights() const { return weights_.data(); }
  const float* bias() const { return bias_.data(); }  // null: none
  // The two parts of a split W, [2][in][out], for rows of this type; null: none.
  const uint16_t* split(DType of_x) const { return of_x == split_type_ ? split_.data() : nullptr; }
  size_t bytes() const { return weights_.bytes() + bias_.bytes() + split_.bytes(); }

 private:
  // A matrix whose element (0, 0) is element (row, column) of the whole.
  struct Part {
    ConstTensorView matrix;
    int64_t row;
    int64_t column;
  };
  static absl::StatusOr<PackedMatrix> Pack(Device device, int64_t in, int64_t out,
                                           const std::vector<Part>& parts,
                                           const ConstTensorView& bias);

  int64_t in_ = 0;
  int64_t out_ = 0;
  DeviceArray<float> weights_;
  DeviceArray<float> bias_;
  DeviceArray<uint16_t> split_;
  DType split_type_ = DType::kF32;
};

// Selects columns of a matrix: y then has `count` channels.
struct Columns {
  int64_t first = 0;
  int64_t count = 0;  // 0: all
};

// The views of a product, in memory of the matrix's device, each f32, bf16 or f16, with any
// strides.
struct MatMulCall {
  ConstTensorView x;         // [batch, tokens, in] or [rows, in]
  ConstTensorView residual;  // of y's shape, or empty
  TensorView y;              // [batch, tokens, out] or [rows, out]; may be the residual itself
  Activation activation = Activation::kNone;
  RowList rows = {};     // CUDA alone
  Columns columns = {};  // CUDA alone
  // Receives x W + b, what the activation is applied to, for a backward pass: of y's shape, or
  // empty.
  TensorView pre_activation = {};
};

// Returns the scratch of products of up to `rows` rows in bytes. CPU: for each thread one block of
// products and one of converted inputs. CUDA: cuBLAS's own, and x and y in fp32; none for our own
// kernel.
size_t MatMulWorkspaceBytes(Device device, int64_t rows, int64_t in, int64_t out, int threads);

// Computes a product with fp32 sums. It allocates nothing; on CUDA it enqueues on the stream.
// Returns Internal where the shapes do not fit the matrix.
absl::Status MatMul(const PackedMatrix& matrix, const MatMulCall& call, const Execution& execution);

// Names the implementation on the device, for reports: "own", "cuBLAS 13.1.0", or why cuBLAS is not
// used: "own (libcublas.so.13: cannot open ...)".
std::string MatMulBackend(Device device);
bool MatMulUsesCublas(Device device);
// Splits a matrix for rows of this type where the device multiplies 16-bit rows with cuBLAS.
absl::Status PrepareForRowsOf(DType x, PackedMatrix* matrix);

// y = alpha a + beta b, each of shape [batch, tokens, channels] or [rows, channels], of any
// floating dtype and in memory of the device. y may be a or b; a and b may have strides of 0. Each
// product and the sum are fp32.
absl::Status AddScaled(Device device, float alpha, const ConstTensorView& a, float beta,
                       const ConstTensorView& b, const TensorView& y, const Execution& execution);
// y = a + b
absl::Status Add(Device device, const ConstTensorView& a, const ConstTensorView& b,
                 const TensorView& y, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_MATMUL_H_
