#include "core/layers/matmul_gradient.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/cpu/kernels.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/matmul_gradient_kernels.h"
#include "core/layers/rows_of.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kColumns = 64;   // of a block of dW: four vectors of 16 floats
constexpr int64_t kRowsOfW = 384;  // of a block of dW at most: 64 register tiles of 6 rows
constexpr int64_t kTileRows = 6;
constexpr int64_t kDepth = 64;  // rows of x and dy that a block of dW adds at a time
// Chunks are as many as make this number of tasks, so that a small dW keeps several threads busy,
// and have no fewer rows than kLeastRows, so that adding their sums costs little.
constexpr int64_t kTasks = 16;
constexpr int64_t kLeastRows = 256;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the work is cut.
struct Cut {
  Cut(int64_t rows, int64_t in, int64_t out)
      : row_blocks(std::max<int64_t>(CeilDiv(in, kRowsOfW), 1)),
        column_blocks(CeilDiv(out, kColumns)),
        block_rows(RoundUp(CeilDiv(in, row_blocks), kTileRows)) {
    const int64_t blocks = std::max<int64_t>(row_blocks * column_blocks, 1);
    const int64_t wanted =
        std::clamp<int64_t>(kTasks / blocks, 1, std::max<int64_t>(CeilDiv(rows, kLeastRows), 1));
    chunk_rows = std::max<int64_t>(CeilDiv(CeilDiv(rows, wanted), kDepth), 1) * kDepth;
    chunks = std::max<int64_t>(CeilDiv(rows, chunk_rows), 1);
  }
  int64_t row_blocks;
  int64_t column_blocks;
  int64_t block_rows;
  int64_t chunk_rows;
  int64_t chunks;
};

struct ThreadScratch {
  float* products;   // [kRowsOfW][kColumns]
  float* sums;       // [kColumns]: of dy's columns
  float* gradients;  // [kDepth][kColumns]: of dy
  float* inputs;     // [kDepth][kRowsOfW]: converted, where x cannot be read as it is
};

ThreadScratch LayOutThread(Workspace& workspace) {
  return {workspace.Take<float>(kRowsOfW * kColumns), workspace.Take<float>(kColumns),
          workspace.Take<float>(kDepth * kColumns), workspace.Take<float>(kDepth * kRowsOfW)};
}

size_t ThreadBytes() {
  return Workspace::Measure([](Workspace& workspace) { LayOutThread(workspace); });
}

// The sums of each chunk, where there are several.
struct Partial {
  float* weights;  // [chunks][in][out]
  float* bias;     // [chunks][out]
};

Partial LayOutPartial(const Cut& cut, int64_t in, int64_t out, Workspace& workspace) {
  if (cut.chunks == 1) return {nullptr, nullptr};
  return {workspace.Take<float>(cut.chunks * in * out), workspace.Take<float>(cut.chunks * out)};
}

// One call; it does not change while its tasks run.
class Gradient {
 public:
  Gradient(const MatMulGradientCall& call, const Cut& cut, const Partial& partial)
      : call_(call),
        cut_(cut),
        partial_(partial),
        x_(call_.x),
        dy_(call_.dy),
        in_(x_.channels()),
        out_(dy_.channels()),
        kernels_(BestCpuKernels()) {
    direct_ = x_.FirstRow(&direct_stride_);
  }

  int64_t tasks() const { return cut_.chunks * cut_.row_blocks * cut_.column_blocks; }

  void Compute(int64_t task, const ThreadScratch& scratch) const {
    // The blocks of one chunk and one panel of dy follow each other.
    const int64_t row_block = task % cut_.row_blocks, rest = task / cut_.row_blocks;
    const int64_t chunk = rest / cut_.column_blocks, panel = rest % cut_.column_blocks;
    const int64_t first_row = row_block * cut_.block_rows;
    const Block block = {first_row, std::min(cut_.block_rows, in_ - first_row), panel * kColumns,
                         std::min(kColumns, out_ - panel * kColumns)};
    const bool sums_bias = !call_.bias.empty() && row_block == 0;
    std::fill_n(scratch.sums, kColumns, 0.0f);
    const int64_t end = std::min(x_.rows(), (chunk + 1) * cut_.chunk_rows);
    if (end == 0) std::fill_n(scratch.products, kRowsOfW * kColumns, 0.0f);
    for (int64_t row = chunk * cut_.chunk_rows; row < end; row += kDepth) {
      const int64_t depth = std::min(kDepth, end - row);
      for (int64_t r = 0; r < depth; ++r) {
        dy_.Load(row + r, block.column, block.columns, scratch.gradients + r * kColumns);
      }
      if (sums_bias) AddColumns(depth, scratch.gradients, scratch.sums);
      if (!call_.weights.empty()) {
        AddProducts(row, depth, block, /*is_first=*/row == chunk * cut_.chunk_rows, scratch);
      }
    }
    if (cut_.chunks == 1) {
      if (!call_.weights.empty()) {
        for (int64_t k = 0; k < block.rows; ++k) {
          Finish(call_.weights, block.row + k, block.column, block.columns,
                 scratch.products + k * kColumns);
        }
      }
      if (sums_bias) FinishBias(block.column, block.columns, scratch.sums);
      return;
    }
    if (!call_.weights.empty()) {
      for (int64_t k = 0; k < block.rows; ++k) {
        std::copy_n(scratch.products + k * kColumns, block.columns,
                    partial_.weights + (chunk * in_ + block.row + k) * out_ + block.column);
      }
    }
    if (sums_bias) {
      std::copy_n(scratch.sums, block.columns, partial_.bias + chunk * out_ + block.column);
    }
  }

  // Adds up the chunks' sums of row k of dW, or of db where k is in().
  void Reduce(int64_t k, const ThreadScratch& scratch) const {
    const bool is_bias = k == in_;
    if (is_bias ? call_.bias.empty() : call_.weights.empty()) return;
    const float* of = is_bias ? partial_.bias : partial_.weights + k * out_;
    const int64_t stride = is_bias ? out_ : in_ * out_;
    for (int64_t first = 0; first < out_; first += kColumns) {
      const int64_t count = std::min(kColumns, out_ - first);
      std::copy_n(of + first, count, scratch.sums);
      for (int64_t chunk = 1; chunk < cut_.chunks; ++chunk) {
        const float* more = of + chunk * stride + first;
        for (int64_t c = 0; c < count; ++c) scratch.sums[c] += more[c];
      }
      if (is_bias) {
        FinishBias(first, count, scratch.sums);
      } else {
        Finish(call_.weights, k, first, count, scratch.sums);
      }
    }
  }
  int64_t in() const { return in_; }

 private:
  struct Block {  // of dW
    int64_t row, rows, column, columns;
  };

  static void AddColumns(int64_t depth, const float* gradients, float* sums) {
    float of_block[kColumns] = {};
    for (int64_t r = 0; r < depth; ++r) {
      for (int64_t c = 0; c < kColumns; ++c) of_block[c] += gradients[r * kColumns + c];
    }
    for (int64_t c = 0; c < kColumns; ++c) sums[c] += of_block[c];
  }

  static bool IsZero(const float* values, int64_t count) {
    uint32_t magnitudes = 0;
    for (int64_t c = 0; c < count; ++c) {
      uint32_t bits;
      std::memcpy(&bits, values + c, sizeof(bits));
      magnitudes |= bits << 1;  // without the sign
    }
    return magnitudes == 0;
  }
  // Tells whether x has an infinity or NaN in a row where dy is 0.
  bool HasNumbersToHide(int64_t depth, const Block& block, const float* inputs,
                        const float* gradients) const {
    for (int64_t r = 0; r < depth; ++r) {
      if (IsZero(gradients + r * kColumns, block.columns) &&
          !AllFinite(inputs + r * direct_stride_, block.rows)) {
        return true;
      }
    }
    return false;
  }

  void AddProducts(int64_t row, int64_t depth, const Block& block, bool is_first,
                   const ThreadScratch& scratch) const {
    const float* inputs = direct_ + row * direct_stride_ + block.row;
    int64_t stride = direct_stride_;
    if (direct_ == nullptr || HasNumbersToHide(depth, block, inputs, scratch.gradients)) {
      for (int64_t r = 0; r < depth; ++r) {
        float* const to = scratch.inputs + r * kRowsOfW;
        if (IsZero(scratch.gradients + r * kColumns, block.columns)) {
          std::fill_n(to, block.rows, 0.0f);
        } else {
          x_.Load(row + r, block.row, block.rows, to);
        }
      }
      inputs = scratch.inputs;
      stride = kRowsOfW;
    }
    kernels_.gemm(block.rows, RoundUp(block.columns, kColumnQuantum), depth, inputs, 1, stride,
                  scratch.gradients, kColumns, scratch.products, kColumns, !is_first);
  }

  // Writes `count` numbers from column `first` of row k of a gradient, or adds them to it.
  void Finish(const TensorView& to, int64_t k, int64_t first, int64_t count, float* values) const {
    const RowsOf<TensorView> rows(to);
    if (call_.accumulate) {
      float before[kColumns];
      rows.Load(k, first, count, before);
      for (int64_t c = 0; c < count; ++c) values[c] += before[c];
    }
    rows.Store(k, first, count, values);
  }
  void FinishBias(int64_t first, int64_t count, float* values) const {
    const TensorView row(call_.bias.mutable_data(), DType::kF32, Shape{1, out_},
                         Shape{0, call_.bias.stride(0)});
    for (int64_t c = 0; c < count; ++c) values[c] *= call_.bias_sign;
    Finish(row, 0, first, count, values);
  }

  const MatMulGradientCall& call_;
  const Cut& cut_;
  const Partial& partial_;
  RowsOf<ConstTensorView> x_;
  RowsOf<ConstTensorView> dy_;
  int64_t in_;
  int64_t out_;
  const CpuKernels& kernels_;
  const float* direct_;  // x's rows where they are floats, else null
  int64_t direct_stride_ = 0;
};

absl::Status CheckShapes(const MatMulGradientCall& call) {
  const ConstTensorView &x = call.x, &dy = call.dy;
  const bool rows_fit = x.rank == dy.rank && (x.rank == 2 || x.rank == 3) &&
                        x.dim(0) == dy.dim(0) && (x.rank == 2 || x.dim(1) == dy.dim(1));
  if (rows_fit) {
    const int64_t in = x.dim(x.rank - 1), out = dy.dim(dy.rank - 1);
    const auto fits = [](const TensorView& view, const Shape& shape) {
      return view.empty() || (view.shape() == shape && view.dtype == DType::kF32);
    };
    if (fits(call.weights, {in, out}) && fits(call.bias, {out})) return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "x ", ShapeString(x.shape()), " and dy ", ShapeString(dy.shape()), " do not give dW ",
      ShapeString(call.weights.shape()), " and db ", ShapeString(call.bias.shape()), " in f32"));
}

}  // namespace

size_t MatMulGradientWorkspaceBytes(int64_t rows, int64_t in, int64_t out, int threads) {
  return threads * ThreadBytes() + Workspace::Measure([=](Workspace& workspace) {
           LayOutPartial(Cut(rows, in, out), in, out, workspace);
         });
}

absl::Status MatMulGradient(const MatMulGradientCall& call, const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckShapes(call));
  if (call.rows.rows != nullptr) {
    return absl::InternalError("the gradients of a product of listed rows are on CUDA alone");
  }
  if (call.weights.empty() && call.bias.empty()) return absl::OkStatus();
  const RowsOf<ConstTensorView> x(call.x), dy(call.dy);
  const Cut cut(x.rows(), x.channels(), dy.channels());
  const size_t thread_bytes = ThreadBytes();
  Workspace rest(execution.workspace.subspan(execution.pool->threads() * thread_bytes));
  const Partial partial = LayOutPartial(cut, x.channels(), dy.channels(), rest);
  const Gradient gradient(call, cut, partial);
  const auto scratch = [&](int worker) {
    Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
    return LayOutThread(workspace);
  };
  execution.pool->ParallelFor(
      gradient.tasks(), [&](int64_t task, int worker) { gradient.Compute(task, scratch(worker)); });
  if (cut.chunks == 1) return absl::OkStatus();
  constexpr int64_t kRowsOfTask = 16;
  execution.pool->ParallelForRanges(gradient.in() + 1, kRowsOfTask,
                                    [&](int64_t begin, int64_t end, int worker) {
                                      for (int64_t k = begin; k < end; ++k)
                                        gradient.Reduce(k, scratch(worker));
                                    });
  return absl::OkStatus();
}

namespace {

// ---- CUDA ----

// Returns the number of chunks that the rows are cut into: as many as give a GPU some 256 tiles of dW,
// where they have that many rows, and have no more than kMostRowsOnCuda. It does not fall with the number
// of rows, and nor does the workspace.
int64_t ChunksOnCuda(int64_t rows, int64_t in, int64_t out) {
  constexpr int64_t kTile = 128, kTiles = 256;
  constexpr int64_t kLeastRowsOnCuda = 256, kMostRowsOnCuda = 2048;
  const int64_t tiles = std::max<int64_t>(CeilDiv(in, kTile), 1) * CeilDiv(out, kTile);
  const int64_t wanted = CeilDiv(kTiles, std::max<int64_t>(tiles, 1));
  return std::max<int64_t>(
      {CeilDiv(rows, kMostRowsOnCuda), std::min(CeilDiv(rows, kLeastRowsOnCuda), wanted), 1});
}

}  // namespace

size_t MatMulGradientWorkspaceBytes(Device device, int64_t rows, int64_t in, int64_t out,
                                    int threads) {
  if (device == Device::kCpu) return MatMulGradientWorkspaceBytes(rows, in, out, threads);
  return Workspace::Measure([&](Workspace& workspace) {
    workspace.Take<float>(ChunksOnCuda(rows, in, out) * (in + 1) * out);
  });
}

absl::Status MatMulGradient(Device device, const MatMulGradientCall& call,
                            const Execution& execution) {
  if (device == Device::kCpu) return MatMulGradient(call, execution);
  TFB_RETURN_IF_ERROR(CheckShapes(call));
  if (call.weights.empty() && call.bias.empty()) return absl::OkStatus();
  const RowsOf<ConstTensorView> x(call.x), dy(call.dy);
  MatMulGradientArguments a = {};
  if (!call.weights.empty()) {
    a.x = ToDeviceRows(call.x);
    a.in = x.channels();
  }
  a.dy = ToDeviceRows(call.dy);
  a.rows = x.rows();
  a.out = dy.channels();
  a.chunks = ChunksOnCuda(a.rows, a.in, a.out);
  if (a.rows > 0) a.list = call.rows;  // else it has no count: ListRows launches nothing
  a.wants_bias = !call.bias.empty();
  Workspace workspace(execution.workspace);
  a.sums = workspace.Take<float>(a.chunks * (a.in + 1) * a.out);
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  TFB_RETURN_IF_ERROR(
      ToStatus(KernelsOn<MatMulGradientKernels>(runtime->target()).multiply(a, execution.stream)));
  const SumOfChunks sum = {a.sums,
                           a.chunks,
                           a.in,
                           a.out,
                           ToDeviceView(call.weights),
                           ToDeviceView(call.bias),
                           call.accumulate,
                           call.bias_sign};
  return ForEachInRows(device, a.in + 1, a.out, sum, execution);
}

}  // namespace tfb
