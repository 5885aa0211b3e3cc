#include "core/layers/matmul.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/cuda/for_each.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/rows_of.h"
#include "core/layers/sum_of_rows_functor.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kPanel = 64;     // columns of W packed together: four vectors of 16 floats
constexpr int64_t kRowBlock = 96;  // 16 register tiles of 6 rows
constexpr int64_t kDepthBlock = 64;

struct Scratch {
  float* products;  // [kRowBlock][kPanel]
  float* inputs;    // [kRowBlock][kDepthBlock]: converted, where x cannot be read as it is
};

Scratch LayOut(Workspace& workspace) {
  return {workspace.Take<float>(kRowBlock * kPanel),
          workspace.Take<float>(kRowBlock * kDepthBlock)};
}

size_t ThreadBytes() {
  return Workspace::Measure([](Workspace& workspace) { LayOut(workspace); });
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

absl::Status CheckSameShape(absl::string_view what, const ConstTensorView& view,
                            absl::string_view other, const ConstTensorView& like) {
  if (view.shape() == like.shape()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " has shape ", ShapeString(view.shape()), "; ",
                                          other, " has ", ShapeString(like.shape())));
}

absl::Status CheckShapes(const PackedMatrix& matrix, const MatMulCall& call) {
  if (matrix.device() == Device::kCpu && (call.rows.rows != nullptr || call.columns.count > 0)) {
    return absl::InternalError("products of listed rows and of some columns are on CUDA alone");
  }
  if (!call.pre_activation.empty()) {
    TFB_RETURN_IF_ERROR(CheckSameShape("pre-activation", call.pre_activation, "y", call.y));
  }
  Shape expected = call.x.shape();
  if ((call.x.rank == 2 || call.x.rank == 3) && expected.back() == matrix.in()) {
    expected.back() = call.columns.count > 0 ? call.columns.count : matrix.out();
    if (call.y.shape() == expected) {
      return call.residual.empty() ? absl::OkStatus()
                                   : CheckSameShape("residual", call.residual, "y", call.y);
    }
  }
  return absl::InternalError(absl::StrCat("a product of x ", ShapeString(call.x.shape()),
                                          " with W [", matrix.in(), ", ", matrix.out(),
                                          "] does not give y ", ShapeString(call.y.shape())));
}

// One call; it does not change while its tasks run.
class Product {
 public:
  Product(const PackedMatrix& matrix, const MatMulCall& call)
      : matrix_(matrix),
        call_(call),
        x_(call_.x),
        residual_(call_.residual.empty() ? call_.y : call_.residual),
        y_(call_.y),
        pre_activation_(call_.pre_activation.empty() ? call_.y : call_.pre_activation),
        kernels_(BestCpuKernels()) {
    direct_ = x_.FirstRow(&direct_stride_);
  }

  // Computes rows first, ..., first + rows - 1 of panel p.
  void Compute(int64_t first, int64_t rows, int64_t p, const Scratch& scratch) const {
    const int64_t columns = std::min(kPanel, matrix_.out() - p * kPanel);
    const int64_t padded = CeilDiv(columns, kColumnQuantum) * kColumnQuantum;
    if (matrix_.in() == 0) std::fill_n(scratch.products, rows * kPanel, 0.0f);
    for (int64_t k = 0; k < matrix_.in(); k += kDepthBlock) {
      const int64_t depth = std::min(kDepthBlock, matrix_.in() - k);
      const float* inputs = direct_ + first * direct_stride_ + k;
      int64_t stride = direct_stride_;
      if (direct_ == nullptr) {
        for (int64_t r = 0; r < rows; ++r) {
          x_.Load(first + r, k, depth, scratch.inputs + r * kDepthBlock);
        }
        inputs = scratch.inputs;
        stride = kDepthBlock;
      }
      kernels_.gemm(rows, padded, depth, inputs, stride, 1, Panel(p) + k * kPanel, kPanel,
                    scratch.products, kPanel, k > 0);
    }
    for (int64_t r = 0; r < rows; ++r) {
      Finish(first + r, p * kPanel, columns, scratch.products + r * kPanel);
    }
  }

 private:
  const float* Panel(int64_t p) const { return matrix_.weights() + p * matrix_.in() * kPanel; }

  void Finish(int64_t row, int64_t first_column, int64_t columns, float* products) const {
    if (matrix_.bias() != nullptr) {
      for (int64_t c = 0; c < columns; ++c) products[c] += matrix_.bias()[first_column + c];
    }
    if (!call_.pre_activation.empty()) {
      pre_activation_.Store(row, first_column, columns, products);
    }
    Activate(call_.activation, columns, products);
    if (!call_.residual.empty()) {
      float residual[kPanel];
      residual_.Load(row, first_column, columns, residual);
      for (int64_t c = 0; c < columns; ++c) products[c] += residual[c];
    }
    y_.Store(row, first_column, columns, products);
  }

  const PackedMatrix& matrix_;
  const MatMulCall& call_;
  RowsOf<ConstTensorView> x_;
  RowsOf<ConstTensorView> residual_;
  RowsOf<TensorView> y_;
  RowsOf<TensorView> pre_activation_;
  const CpuKernels& kernels_;
  const float* direct_;  // x's rows where they are floats, else null
  int64_t direct_stride_ = 0;
};

// Copies a matrix to rows that are `stride` floats apart, along whichever of its dimensions lies
// side by side in memory: a transpose 16 rows at a time, which are a cache line of each column.
void CopyBlock(const ConstTensorView& matrix, float* to, int64_t stride) {
  if (matrix.stride(1) <= matrix.stride(0)) {
    for (int64_t row = 0; row < matrix.dim(0); ++row) {
      LoadRow(matrix, matrix.Offset(row), matrix.stride(1), matrix.dim(1), to + row * stride);
    }
    return;
  }
  constexpr int64_t kRows = 16;
  float column[kRows];
  for (int64_t row = 0; row < matrix.dim(0); row += kRows) {
    const int64_t rows = std::min(kRows, matrix.dim(0) - row);
    for (int64_t c = 0; c < matrix.dim(1); ++c) {
      LoadRow(matrix, matrix.Offset(row, c), matrix.stride(0), rows, column);
      for (int64_t r = 0; r < rows; ++r) to[(row + r) * stride + c] = column[r];
    }
  }
}

absl::Status MatMulCpu(const PackedMatrix& matrix, const MatMulCall& call,
                       const Execution& execution) {
  const Product product(matrix, call);
  const int64_t rows = RowsOf<ConstTensorView>(call.x).rows();
  const int64_t blocks = CeilDiv(rows, kRowBlock);
  const size_t thread_bytes = ThreadBytes();
  // All blocks of rows of one panel follow each other: the panel stays in L2.
  execution.pool->ParallelFor(
      blocks * CeilDiv(matrix.out(), kPanel), [&](int64_t task, int worker) {
        Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
        const int64_t first = task % blocks * kRowBlock;
        product.Compute(first, std::min(kRowBlock, rows - first), task / blocks, LayOut(workspace));
      });
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PackedMatrix> PackedMatrix::Create(Device device, const ConstTensorView& weights,
                                                  const ConstTensorView& bias) {
  return Create(device, std::vector<ConstTensorView>{weights}, bias);
}

absl::StatusOr<PackedMatrix> PackedMatrix::Create(Device device,
                                                  const std::vector<ConstTensorView>& weights,
                                                  const ConstTensorView& bias) {
  std::vector<Part> parts;
  int64_t out = 0;
  for (const ConstTensorView& matrix : weights) {
    parts.push_back({matrix, 0, out});
    out += matrix.dim(1);
  }
  return Pack(device, weights[0].dim(0), out, parts, bias);
}

absl::StatusOr<PackedMatrix> PackedMatrix::CreateTransposed(
    Device device, const std::vector<ConstTensorView>& weights) {
  std::vector<Part> parts;
  int64_t in = 0;
  for (const ConstTensorView& matrix : weights) {
    parts.push_back({Transpose(matrix, 0, 1), in, 0});
    in += matrix.dim(1);
  }
  return Pack(device, in, weights[0].dim(0), parts, {});
}

absl::StatusOr<PackedMatrix> PackedMatrix::Pack(Device device, int64_t in, int64_t out,
                                                const std::vector<Part>& parts,
                                                const ConstTensorView& bias) {
  PackedMatrix packed;
  packed.in_ = in;
  packed.out_ = out;
  const bool panels = device == Device::kCpu;
  std::vector<float> weights(panels ? CeilDiv(out, kPanel) * kPanel * in : in * out, 0.0f);
  for (const Part& part : parts) {
    const ConstTensorView& matrix = part.matrix;
    const int64_t end = part.column + matrix.dim(1);
    // One panel after the other, or all columns at once, so that neither side leaves its lines.
    for (int64_t first = part.column; first < end;) {
      const int64_t next = panels ? std::min(end, (first / kPanel + 1) * kPanel) : end;
      const int64_t stride = panels ? kPanel : out;  // between rows
      float* const to =
          weights.data() + (panels ? (first / kPanel * in + part.row) * kPanel + first % kPanel
                                   : part.row * out + first);
      CopyBlock(Slice(matrix, 1, first - part.column, next - first), to, stride);
      first = next;
    }
  }
  TFB_ASSIGN_OR_RETURN(packed.weights_, DeviceArray<float>::Create(device, weights));
  if (!bias.empty()) {
    TFB_ASSIGN_OR_RETURN(packed.bias_, CopyFloats(device, bias));
  }
  return packed;
}

absl::Status PackedMatrix::Split(DType of_x) {
  if (device() == Device::kCpu) return absl::InternalError("a matrix on the CPU is not split");
  Tensor rest(DType::kF32, {in_, out_});
  TFB_RETURN_IF_ERROR(weights_.Read(rest.span<float>().data()));
  std::vector<uint16_t> split;
  for (int part = 0; part < 2; ++part) {
    const Tensor rounded = rest.CloneAs(of_x);
    const auto* bits = static_cast<const uint16_t*>(rounded.raw());
    split.insert(split.end(), bits, bits + in_ * out_);
    for (int64_t n = 0; n < in_ * out_; ++n) {
      const double value = rounded.view().Get(n);
      if (!std::isfinite(value)) return absl::OkStatus();
      rest.span<float>()[n] -= static_cast<float>(value);
    }
  }
  TFB_ASSIGN_OR_RETURN(split_, DeviceArray<uint16_t>::Create(device(), split));
  split_type_ = of_x;
  return absl::OkStatus();
}

size_t MatMulWorkspaceBytes(Device device, int64_t rows, int64_t in, int64_t out, int threads) {
  return device == Device::kCpu ? threads * ThreadBytes()
                                : MatMulCudaWorkspaceBytes(device, rows, in, out);
}

absl::Status MatMul(const PackedMatrix& matrix, const MatMulCall& call,
                    const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckShapes(matrix, call));
  return matrix.device() == Device::kCpu ? MatMulCpu(matrix, call, execution)
                                         : MatMulCuda(matrix, call, execution);
}

absl::Status PrepareForRowsOf(DType x, PackedMatrix* matrix) {
  const bool is_16_bit = x == DType::kBF16 || x == DType::kF16;
  return is_16_bit && MatMulUsesCublas(matrix->device()) ? matrix->Split(x) : absl::OkStatus();
}

bool MatMulUsesCublas(Device device) {
  return device == Device::kCuda && CudaBlas::For(device).ok();
}

std::string MatMulBackend(Device device) {
  if (device != Device::kCuda) return "own";
  const absl::StatusOr<CudaBlas*> blas = CudaBlas::For(device);
  return blas.ok() ? (*blas)->name() : absl::StrCat("own (", blas.status().message(), ")");
}

absl::Status Add(Device device, const ConstTensorView& a, const ConstTensorView& b,
                 const TensorView& y, const Execution& execution) {
  return AddScaled(device, 1, a, 1, b, y, execution);
}

absl::Status AddScaled(Device device, float alpha, const ConstTensorView& a, float beta,
                       const ConstTensorView& b, const TensorView& y, const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckSameShape("the first summand", a, "the sum", y));
  TFB_RETURN_IF_ERROR(CheckSameShape("the second summand", b, "the sum", y));
  const auto view = [](const ConstTensorView& tensor) {
    const DeviceRows rows = ToDeviceRows(tensor);
    return DeviceView{
        rows.data, {rows.batch_stride, rows.token_stride, rows.channel_stride, 0}, rows.element};
  };
  const RowsOf<TensorView> rows(y);
  const SumOfRows sum = {alpha, view(a), beta, view(b), view(y), ToDeviceRows(y).tokens};
  return ForEachInRows(device, rows.rows(), rows.channels(), sum, execution);
}

}  // namespace tfb
