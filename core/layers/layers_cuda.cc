#include "core/layers/layers_cuda.h"

#include <algorithm>

#include "core/cuda/runtime.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// Returns null where our own kernel computes products.
CudaBlas* BlasOf(Device device) {
  return MatMulUsesCublas(device) ? *CudaBlas::For(device) : nullptr;
}

// Rows of floats that a library can read or write in place.
struct FloatRows {
  float* first = nullptr;  // null where the rows are not such floats
  int64_t stride = 0;
};
template <class View>
FloatRows ToFloatRows(const View& view) {
  const RowsOf<View> rows(view);
  FloatRows result;
  result.first = const_cast<float*>(rows.FirstRow(&result.stride));
  if (rows.rows() == 1) result.stride = rows.channels();
  if (result.stride < rows.channels()) result.first = nullptr;  // such as broadcast rows
  return result;
}

// Returns null where the library cannot multiply the rows as they are with a split matrix; else the
// first row, with *stride elements between rows.
const void* SixteenBitRows(const ProductLibrary& library, const PackedMatrix& matrix,
                           const ConstTensorView& x, int64_t* stride) {
  if (library.multiply_16 == nullptr || matrix.split(x.dtype) == nullptr) return nullptr;
  const RowsOf<ConstTensorView> rows(x);
  const void* first = rows.FirstRowOfAnyType(stride);
  if (rows.rows() == 1) *stride = rows.channels();
  return *stride < rows.channels() ? nullptr : first;
}

// Computes rows of floats, as the sum of the products with both parts of the matrix.
absl::Status MultiplySplit(const ProductLibrary& library, const PackedMatrix& matrix,
                           const MatMulCall& call, const void* x, int64_t x_stride,
                           const FloatRows& y, void* scratch, void* stream) {
  SixteenBitGemmCall gemm;
  gemm.rows = RowsOf<TensorView>(call.y).rows();
  gemm.columns = RowsOf<TensorView>(call.y).channels();
  gemm.depth = matrix.in();
  gemm.element = call.x.dtype == DType::kBF16 ? Element::kBf16 : Element::kF16;
  gemm.a = x;
  gemm.a_stride = x_stride;
  gemm.b_stride = matrix.out();
  gemm.c = y.first;
  gemm.c_stride = y.stride;
  for (const bool is_rest : {false, true}) {
    gemm.adds = is_rest;
    gemm.b = matrix.split(call.x.dtype) + (is_rest ? matrix.in() * matrix.out() : 0) +
             call.columns.first;
    TFB_RETURN_IF_ERROR(library.multiply_16(gemm, scratch, stream));
  }
  return absl::OkStatus();
}

// Computes rows of floats from rows of floats.
absl::Status MultiplyFloats(const ProductLibrary& library, const PackedMatrix& matrix,
                            const MatMulCall& call, const FloatRows& x, const FloatRows& y,
                            void* scratch, void* stream) {
  GemmCall gemm;
  gemm.rows = RowsOf<TensorView>(call.y).rows();
  gemm.columns = RowsOf<TensorView>(call.y).channels();
  gemm.depth = matrix.in();
  gemm.a = x.first;
  gemm.a_stride = x.stride;
  gemm.b = matrix.weights() + call.columns.first;
  gemm.b_stride = matrix.out();
  gemm.c = y.first;
  gemm.c_stride = y.stride;
  return library.multiply(gemm, scratch, stream);
}

// Returns the bias of the call's columns, or null where there is none.
const float* BiasOf(const PackedMatrix& matrix, const MatMulCall& call) {
  return matrix.bias() == nullptr ? nullptr : matrix.bias() + call.columns.first;
}

}  // namespace

DeviceRows ToDeviceRows(const ConstTensorView& view) {
  DeviceRows rows = {};
  if (view.empty()) return rows;
  const DeviceView device_view = ToDeviceView(view);
  rows.data = device_view.data;
  rows.element = device_view.element;
  const int tokens_axis = view.rank - 2;
  rows.tokens = std::max<int64_t>(view.dim(tokens_axis), 1);
  rows.batch_stride = view.rank == 3 ? view.stride(0) : 0;
  rows.token_stride = view.stride(tokens_axis);
  rows.channel_stride = view.stride(tokens_axis + 1);
  return rows;
}

absl::Status FinishCuda(Device device, float scale, const ConstTensorView& x, const float* bias,
                        Activation activation, const ConstTensorView& residual, const TensorView& y,
                        const Execution& execution, const TensorView& pre_activation) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  FinishArguments arguments = {};
  arguments.x = ToDeviceRows(x);
  arguments.scale = scale;
  arguments.bias = bias;
  arguments.residual = ToDeviceRows(residual);
  arguments.y = ToDeviceRows(y);
  arguments.pre_activation = ToDeviceRows(pre_activation);
  arguments.rows = RowsOf<TensorView>(y).rows();
  arguments.channels = RowsOf<TensorView>(y).channels();
  arguments.activation = activation;
  return ToStatus(KernelsOn<LayerKernels>(runtime->target()).finish(arguments, execution.stream));
}

absl::Status MultiplyWithKernel(const PackedMatrix& matrix, const MatMulCall& call,
                                const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(matrix.device()));
  MatMulArguments arguments = {};
  arguments.x = ToDeviceRows(call.x);
  arguments.weights = matrix.weights() + call.columns.first;
  arguments.weight_stride = matrix.out();
  arguments.bias = BiasOf(matrix, call);
  arguments.residual = ToDeviceRows(call.residual);
  arguments.y = ToDeviceRows(call.y);
  arguments.pre_activation = ToDeviceRows(call.pre_activation);
  arguments.rows = RowsOf<TensorView>(call.y).rows();
  arguments.in = matrix.in();
  arguments.out = RowsOf<TensorView>(call.y).channels();
  arguments.activation = call.activation;
  arguments.list = call.rows;
  return ToStatus(KernelsOn<LayerKernels>(runtime->target()).multiply(arguments, execution.stream));
}

absl::Status MultiplyWithBlas(CudaBlas* blas, const PackedMatrix& matrix, const MatMulCall& call,
                              const Execution& execution) {
  const auto multiply = [blas](const auto& gemm, void* scratch, void* stream) {
    return blas->Multiply(gemm, scratch, stream);
  };
  return MultiplyWithLibrary({blas->workspace_bytes(), multiply, multiply}, matrix, call,
                             execution);
}

absl::Status MultiplyWithLibrary(const ProductLibrary& library, const PackedMatrix& matrix,
                                 const MatMulCall& call, const Execution& execution) {
  const int64_t rows = RowsOf<TensorView>(call.y).rows();
  const int64_t columns = RowsOf<TensorView>(call.y).channels();
  const float* bias = BiasOf(matrix, call);
  Workspace workspace(execution.workspace);
  std::byte* scratch = workspace.Take<std::byte>(static_cast<int64_t>(library.scratch_bytes));

  int64_t stride = 0;
  const void* const sixteen_bit_x = SixteenBitRows(library, matrix, call.x, &stride);
  FloatRows x = ToFloatRows(call.x);
  if (x.first == nullptr && sixteen_bit_x == nullptr) {
    x = {workspace.Take<float>(rows * matrix.in()), matrix.in()};
    const TensorView converted(x.first, DType::kF32, call.x.shape());
    TFB_RETURN_IF_ERROR(FinishCuda(matrix.device(), 1, call.x, nullptr, Activation::kNone, {},
                                   converted, execution));
  }
  // A residual may be y itself, so that the product needs other memory.
  TensorView product = call.y;
  FloatRows y = ToFloatRows(call.y);
  if (y.first == nullptr || !call.residual.empty()) {
    y = {workspace.Take<float>(rows * columns), columns};
    product = TensorView(y.first, DType::kF32, call.y.shape());
  }
  TFB_RETURN_IF_ERROR(sixteen_bit_x != nullptr
                          ? MultiplySplit(library, matrix, call, sixteen_bit_x, stride, y, scratch,
                                          execution.stream)
                          : MultiplyFloats(library, matrix, call, x, y, scratch, execution.stream));
  const bool done = product.data == call.y.data && bias == nullptr &&
                    call.activation == Activation::kNone && call.pre_activation.empty();
  if (done) return absl::OkStatus();
  return FinishCuda(matrix.device(), 1, product, bias, call.activation, call.residual, call.y,
                    execution, call.pre_activation);
}

size_t LibraryWorkspaceBytes(size_t scratch_bytes, int64_t rows, int64_t in, int64_t out) {
  return Workspace::Measure([=](Workspace& workspace) {
    workspace.Take<std::byte>(static_cast<int64_t>(scratch_bytes));
    workspace.Take<float>(rows * in);
    workspace.Take<float>(rows * out);
  });
}

size_t MatMulCudaWorkspaceBytes(Device device, int64_t rows, int64_t in, int64_t out) {
  const CudaBlas* blas = BlasOf(device);
  return blas == nullptr ? 0 : LibraryWorkspaceBytes(blas->workspace_bytes(), rows, in, out);
}

absl::Status MatMulCuda(const PackedMatrix& matrix, const MatMulCall& call,
                        const Execution& execution) {
  if (NumElements(call.y.shape()) == 0) return absl::OkStatus();
  CudaBlas* blas = call.rows.rows != nullptr ? nullptr : BlasOf(matrix.device());
  return blas == nullptr || matrix.in() == 0 ? MultiplyWithKernel(matrix, call, execution)
                                             : MultiplyWithBlas(blas, matrix, call, execution);
}

}  // namespace tfb
