// The CUDA half of core/layers, on a GPU and in the simulator. Callers have checked the shapes.
#ifndef TFB_CORE_LAYERS_LAYERS_CUDA_H_
#define TFB_CORE_LAYERS_LAYERS_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "core/cuda/blas.h"
#include "core/layers/layer_kernels.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

// Returns [rows, channels] or [batch, tokens, channels] as kernels take it, and no tensor for an
// empty view.
DeviceRows ToDeviceRows(const ConstTensorView& view);

// Computes the product with our kernel, or with cuBLAS and our kernel before and after it.
absl::Status MultiplyWithKernel(const PackedMatrix& matrix, const MatMulCall& call,
                                const Execution& execution);
absl::Status MultiplyWithBlas(CudaBlas* blas, const PackedMatrix& matrix, const MatMulCall& call,
                              const Execution& execution);
// Does the same with any library, which multiplies rows of floats with `scratch_bytes` of memory, and
// 16-bit rows with a split matrix where multiply_16 is not null.
struct ProductLibrary {
  size_t scratch_bytes = 0;
  std::function<absl::Status(const GemmCall& gemm, void* scratch, void* stream)> multiply;
  std::function<absl::Status(const SixteenBitGemmCall& gemm, void* scratch, void* stream)>
      multiply_16;
};
absl::Status MultiplyWithLibrary(const ProductLibrary& library, const PackedMatrix& matrix,
                                 const MatMulCall& call, const Execution& execution);
// Returns the workspace of such a product: the library's, and x and y in fp32.
size_t LibraryWorkspaceBytes(size_t scratch_bytes, int64_t rows, int64_t in, int64_t out);
// Returns the workspace of the implementation that MatMulBackend names.
size_t MatMulCudaWorkspaceBytes(Device device, int64_t rows, int64_t in, int64_t out);
absl::Status MatMulCuda(const PackedMatrix& matrix, const MatMulCall& call,
                        const Execution& execution);

// y = activation(scale x + bias) + residual. `bias` [channels] and `residual` may be missing. Writes
// scale x + bias to `pre_activation`, unless that is empty.
absl::Status FinishCuda(Device device, float scale, const ConstTensorView& x, const float* bias,
                        Activation activation, const ConstTensorView& residual, const TensorView& y,
                        const Execution& execution, const TensorView& pre_activation = {});

}  // namespace tfb

#endif  // TFB_CORE_LAYERS_LAYERS_CUDA_H_
