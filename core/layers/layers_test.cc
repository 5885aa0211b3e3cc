// Tests the building blocks against naive loops in float64.
//
// Tolerances. A sum of n products in fp32, in any order and with or without fused roundings, is off
// by at most n u sum |x_k w_k| (u = 2^-24, to first order); adding a bias and a residual makes two
// more terms. Storing y in its own precision adds u_y |y|.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/allocations.h"
#include "core/cuda/blas.h"
#include "core/cuda/mirror.h"
#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/layers/activation.h"
#include "core/layers/device_testing.h"
#include "core/layers/feed_forward.h"
#include "core/layers/gate.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/log_softmax.h"
#include "core/layers/matmul.h"
#include "core/layers/rows_of.h"
#include "core/layers/sinusoid.h"
#include "core/random.h"
#include "core/tensor.h"
#include "core/tested_devices.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

#define ASSERT_OK(expression) ASSERT_EQ((expression), absl::OkStatus())
#define EXPECT_OK(expression) EXPECT_EQ((expression), absl::OkStatus())

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor Random(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
  Tensor tensor(dtype, shape);
  FillNormal(&tensor, seed, "test");
  return tensor;
}

// Runs every test on every device that is present.
class LayersOn : public OnEveryDevice {
 protected:
  PackedMatrix Pack(const ConstTensorView& weights, const ConstTensorView& bias = {}) const {
    return PackedMatrix::Create(device(), weights, bias).value();
  }
  Machine MachineFor(const PackedMatrix& matrix, int64_t rows, int threads = 1) const {
    return Machine(device(), threads,
                   MatMulWorkspaceBytes(device(), rows, matrix.in(), matrix.out(), threads));
  }
};
class MatMulOn : public LayersOn {};
class LayerNormOn : public LayersOn {};
class LogSoftmaxOn : public LayersOn {};
class FeedForwardOn : public LayersOn {};
class AddOn : public LayersOn {};
class GateOn : public LayersOn {};

double Exact(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGelu:
      return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
    case Activation::kGeluTanh:
      return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
    case Activation::kGeluSigmoid:
      return x / (1 + std::exp(-1.702 * x));
    case Activation::kTanh:
      return std::tanh(x);
  }
  return kNan;
}
constexpr Activation kActivations[] = {Activation::kNone,        Activation::kRelu,
                                       Activation::kGelu,        Activation::kGeluTanh,
                                       Activation::kGeluSigmoid, Activation::kTanh};

// Compares y = activation(x W + b) + residual with loops; x is [batch, tokens, in].
void ExpectProduct(const ConstTensorView& x, const ConstTensorView& weights,
                   const ConstTensorView& bias, const ConstTensorView& residual,
                   Activation activation, const ConstTensorView& y) {
  const int64_t in = weights.dim(0), out = weights.dim(1);
  for (int64_t b = 0; b < x.dim(0); ++b) {
    for (int64_t t = 0; t < x.dim(1); ++t) {
      for (int64_t c = 0; c < out; ++c) {
        double sum = bias.empty() ? 0 : bias.Get(bias.Offset(c)), magnitude = std::abs(sum);
        for (int64_t k = 0; k < in; ++k) {
          const double term = x.Get(x.Offset(b, t, k)) * weights.Get(weights.Offset(k, c));
          sum += term;
          magnitude += std::abs(term);
        }
        const double add = residual.empty() ? 0 : residual.Get(residual.Offset(b, t, c));
        const double expected = Exact(activation, sum) + add;
        // A GELU's slope is at most 1.13, and its own evaluation is good to a few roundings.
        const double bound = 1.2 * static_cast<double>(in + 2) * 0x1p-24 * (magnitude + 1) +
                             0x1p-24 * std::abs(add) +
                             1.01 * UnitRoundoff(y.dtype) * std::abs(expected);
        ASSERT_NEAR(y.Get(y.Offset(b, t, c)), expected, bound)
            << "batch " << b << " token " << t << " channel " << c;
      }
    }
  }
}

TEST_P(MatMulOn, EqualsLoopsForShapesThatStraddleTheBlocks) {
  struct Case {
    int64_t batch, tokens, in, out;
  };
  for (const Case& c : std::vector<Case>{{1, 1, 1, 1},
                                         {1, 1, 64, 64},
                                         {3, 1, 65, 63},
                                         {1, 7, 130, 200},
                                         {2, 31, 15, 68},
                                         {2, 32, 17, 65},
                                         {1, 65, 16, 64},
                                         {2, 95, 33, 16},
                                         {2, 96, 64, 65},
                                         {1, 97, 128, 17}}) {
    const Tensor x = Random(DType::kF32, {c.batch, c.tokens, c.in}, 1);
    const Tensor weights = Random(DType::kF32, {c.in, c.out}, 2);
    const Tensor bias = Random(DType::kF32, {c.out}, 3);
    const PackedMatrix matrix = Pack(weights.view(), bias.view());
    for (int threads : {1, 2}) {
      Machine machine = MachineFor(matrix, c.batch * c.tokens, threads);
      Tensor y(DType::kF32, {c.batch, c.tokens, c.out});
      Fill(y.view(), kNan);
      ASSERT_OK(MatMul(matrix, {In(x.view()), {}, Out(y.view())}, machine.execution()));
      Back();
      ExpectProduct(x.view(), weights.view(), bias.view(), {}, Activation::kNone, y.view());
      EXPECT_TRUE(machine.guards_intact());
    }
  }
}

TEST_P(MatMulOn, ReadsAndWritesEveryDtypeAndStride) {
  const int64_t batch = 2, tokens = 5, heads = 3, head_dim = 24, in = 70;
  const Tensor weights = Random(DType::kF32, {in, heads * head_dim}, 2);
  const PackedMatrix matrix = Pack(weights.view());
  Machine machine = MachineFor(matrix, batch * tokens);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    // x is laid out [tokens][channels][batch], y [batch][heads][channels][tokens].
    const Tensor x_memory = Random(dtype, {tokens, in, batch}, 1);
    const ConstTensorView x = Transpose(Transpose(x_memory.view(), 1, 2), 0, 1);
    Tensor y_memory(dtype, {batch, heads * head_dim, tokens});
    const Tensor residual = Random(dtype, {batch, tokens, heads * head_dim}, 4);
    const TensorView y = Transpose(y_memory.view(), 1, 2);
    Fill(y, kNan);
    ASSERT_OK(MatMul(matrix, {In(x), In(residual.view()), Out(y)}, machine.execution()));
    Back();
    ExpectProduct(x, weights.view(), {}, residual.view(), Activation::kNone, y);
  }
}

TEST_P(MatMulOn, ReadsAndWritesRowsThatLieBesideOthersAndRowsThatAreOne) {
  const int64_t rows = 6, in = 20, out = 36;
  const Tensor weights = Random(DType::kF32, {in, out}, 2);
  const PackedMatrix matrix = Pack(weights.view());
  Machine machine = MachineFor(matrix, rows);
  const Tensor x_memory = Random(DType::kF32, {1, rows, 3 * in}, 1);
  const ConstTensorView part = Slice(x_memory.view(), 2, in, in);
  ConstTensorView repeated = Slice(part, 1, 2, 1);
  repeated.dims[1] = rows;
  repeated.strides[1] = 0;
  // Rows that do not begin at a multiple of 16 bytes, the first of them or the others.
  const Tensor shifted = Random(DType::kF32, {1, rows, in + 4}, 5);
  const Tensor odd = Random(DType::kF32, {1, rows, in + 1}, 6);
  for (const ConstTensorView& x :
       {part, repeated, Slice(shifted.view(), 2, 1, in), Slice(odd.view(), 2, 0, in)}) {
    Tensor y_memory(DType::kF32, {1, rows, 3 * out});
    Fill(y_memory.view(), 7);
    const TensorView y = Slice(y_memory.view(), 2, out, out);
    ASSERT_OK(
        MatMul(matrix, {In(x), {}, Slice(Out(y_memory.view()), 2, out, out)}, machine.execution()));
    Back();
    ExpectProduct(x, weights.view(), {}, {}, Activation::kNone, y);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < out; ++c) {
        ASSERT_EQ(*y_memory.view().At<float>(0, r, c), 7) << "written beside y";
        ASSERT_EQ(*y_memory.view().At<float>(0, r, 2 * out + c), 7) << "written beside y";
      }
    }
  }
}

TEST_P(MatMulOn, AddsTheResidualInPlace) {
  const Tensor x = Random(DType::kF32, {1, 9, 20}, 1);
  const Tensor weights = Random(DType::kF32, {20, 80}, 2);
  const Tensor before = Random(DType::kF32, {1, 9, 80}, 3);
  Tensor y = before.Clone();
  const PackedMatrix matrix = Pack(weights.view());
  Machine machine = MachineFor(matrix, 9, 2);
  const TensorView state = Out(y.view());
  ASSERT_OK(MatMul(matrix, {In(x.view()), state, state}, machine.execution()));
  Back();
  ExpectProduct(x.view(), weights.view(), {}, before.view(), Activation::kNone, y.view());
}

TEST_P(MatMulOn, AppliesTheActivationBetweenBiasAndResidual) {
  const Tensor x = Random(DType::kF32, {1, 3, 20}, 1);
  const Tensor weights = Random(DType::kF32, {20, 70}, 2);
  const Tensor bias = Random(DType::kF32, {70}, 3);
  const Tensor residual = Random(DType::kF32, {1, 3, 70}, 4);
  const PackedMatrix matrix = Pack(weights.view(), bias.view());
  Machine machine = MachineFor(matrix, 3);
  for (Activation activation : kActivations) {
    for (const ConstTensorView& added : {ConstTensorView(), residual.view()}) {
      Tensor y(DType::kF32, {1, 3, 70});
      Fill(y.view(), kNan);
      ASSERT_OK(MatMul(matrix, {In(x.view()), In(added), Out(y.view()), activation},
                       machine.execution()));
      Back();
      ExpectProduct(x.view(), weights.view(), bias.view(), added, activation, y.view());
    }
  }
}

TEST_P(MatMulOn, MatricesSideBySideGiveTheirProductsSideBySide) {
  const Tensor x = Random(DType::kF32, {1, 4, 10}, 1);
  const Tensor a = Random(DType::kF32, {10, 5}, 2), b = Random(DType::kF32, {10, 90}, 3);
  const PackedMatrix both =
      PackedMatrix::Create(device(), std::vector<ConstTensorView>{a.view(), b.view()}).value();
  Tensor y(DType::kF32, {1, 4, 95});
  Fill(y.view(), kNan);
  Machine machine = MachineFor(both, 4);
  ASSERT_OK(MatMul(both, {In(x.view()), {}, Out(y.view())}, machine.execution()));
  Back();
  ExpectProduct(x.view(), a.view(), {}, {}, Activation::kNone, Slice(y.view(), 2, 0, 5));
  ExpectProduct(x.view(), b.view(), {}, {}, Activation::kNone, Slice(y.view(), 2, 5, 90));
}

// A library guarantees this of its products only for one shape.
TEST_P(MatMulOn, ARowDoesNotDependOnThreadsOrOnTheOtherRows) {
  const std::string backend = MatMulBackend(device());
  if (absl::StartsWith(backend, "cuBLAS")) GTEST_SKIP() << "products are those of " << backend;
  const Tensor x = Random(DType::kF32, {1, 200, 150}, 1);
  const Tensor weights = Random(DType::kF32, {150, 130}, 2);
  const PackedMatrix matrix = Pack(weights.view());
  Tensor all(DType::kF32, {1, 200, 130}), one(DType::kF32, {1, 1, 130});
  Fill(all.view(), kNan);
  Machine two = MachineFor(matrix, 200, 2), single = MachineFor(matrix, 1);
  ASSERT_OK(MatMul(matrix, {In(x.view()), {}, Out(all.view())}, two.execution()));
  Back();
  for (int64_t t : {0, 1, 63, 64, 95, 96, 127, 128, 199}) {
    Fill(one.view(), kNan);
    ASSERT_OK(
        MatMul(matrix, {In(Slice(x.view(), 1, t, 1)), {}, Out(one.view())}, single.execution()));
    Back();
    for (int64_t c = 0; c < 130; ++c) {
      ASSERT_EQ(one.span<float>()[c], *all.view().At<float>(0, t, c)) << t << " " << c;
    }
  }
}

TEST_P(MatMulOn, ANanStaysInItsRow) {
  Tensor x = Random(DType::kF32, {1, 70, 20}, 1);
  *x.view().MutableAt<float>(0, 69, 19) = std::numeric_limits<float>::quiet_NaN();
  const Tensor weights = Random(DType::kF32, {20, 70}, 2);
  const PackedMatrix matrix = Pack(weights.view());
  Machine machine = MachineFor(matrix, 70);
  Tensor y(DType::kF32, {1, 70, 70});
  for (Activation activation : kActivations) {
    Fill(y.view(), 7);
    ASSERT_OK(MatMul(matrix, {In(x.view()), {}, Out(y.view()), activation}, machine.execution()));
    Back();
    for (int64_t t : {0, 63, 64, 68, 69}) {
      for (int64_t c = 0; c < 70; ++c) {
        ASSERT_EQ(std::isnan(*y.view().At<float>(0, t, c)), t == 69) << t << " " << c;
      }
    }
  }
}

TEST_P(MatMulOn, NoRowsAreNoWorkAndNoInputsGiveTheBias) {
  const Tensor bias = Random(DType::kF32, {3}, 1);
  const Tensor weights(DType::kF32, {0, 3}), x(DType::kF32, {1, 2, 0}),
      none(DType::kF32, {0, 5, 0});
  const PackedMatrix matrix = Pack(weights.view(), bias.view());
  Machine machine = MachineFor(matrix, 5);
  Tensor y(DType::kF32, {1, 2, 3}), empty(DType::kF32, {0, 5, 3});
  Fill(y.view(), kNan);
  ASSERT_OK(MatMul(matrix, {In(x.view()), {}, Out(y.view())}, machine.execution()));
  Back();
  EXPECT_EQ(*y.view().At<float>(0, 1, 2), bias.span<float>()[2]);
  EXPECT_OK(MatMul(matrix, {In(none.view()), {}, Out(empty.view())}, machine.execution()));
}

TEST_P(MatMulOn, ShapesThatDoNotFitAreAnError) {
  const Tensor weights = Random(DType::kF32, {5, 3}, 2);
  const PackedMatrix matrix = Pack(weights.view());
  Machine machine = MachineFor(matrix, 2);
  struct Case {
    Shape x, y, residual;
    const char* message;
  };
  for (const Case& c : std::vector<Case>{
           {{1, 2, 4}, {1, 2, 3}, {}, "x [1, 2, 4] with W [5, 3] does not give y [1, 2, 3]"},
           {{2, 5}, {2, 5}, {}, "x [2, 5] with W [5, 3] does not give y [2, 5]"},
           {{2, 5}, {1, 2, 3}, {}, "x [2, 5] with W [5, 3] does not give y [1, 2, 3]"},
           {{5}, {3}, {}, "x [5] with W [5, 3] does not give y [3]"},
           {{1, 1, 2, 5},
            {1, 1, 2, 3},
            {},
            "x [1, 1, 2, 5] with W [5, 3] does not give y [1, 1, 2, 3]"},
           {{2, 5}, {2, 3}, {3, 2}, "residual has shape [3, 2]; y has [2, 3]"}}) {
    const Tensor x(DType::kF32, c.x), residual(DType::kF32, c.residual);
    Tensor y(DType::kF32, c.y);
    const ConstTensorView added = c.residual.empty() ? ConstTensorView() : residual.view();
    const absl::Status status = MatMul(matrix, {x.view(), added, y.view()}, machine.execution());
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(status.message(),
              c.residual.empty() ? absl::StrCat("a product of ", c.message) : c.message);
  }
}

TEST(MatMulOnTheCpu, ListedRowsAndSomeColumnsAreAnError) {
  const Tensor weights = Random(DType::kF32, {5, 3}, 2), x = Random(DType::kF32, {2, 5}, 1);
  const PackedMatrix matrix = PackedMatrix::Create(Device::kCpu, weights.view()).value();
  Tensor y(DType::kF32, {2, 3});
  const int32_t rows[2] = {0, 1};
  MatMulCall listed = {x.view(), {}, y.view()}, of_columns = listed;
  listed.rows.rows = rows;
  of_columns.columns = {0, 1};
  for (const MatMulCall& call : {listed, of_columns}) {
    EXPECT_EQ(MatMul(matrix, call, {}).message(),
              "products of listed rows and of some columns are on CUDA alone");
  }
}

TEST(MatMulBackend, NamesWhatMultiplies) {
  EXPECT_EQ(MatMulBackend(Device::kCpu), "own");
  EXPECT_EQ(MatMulBackend(Device::kSimulator), "own");
  const absl::StatusOr<CudaBlas*> blas = CudaBlas::For(Device::kCuda);
  EXPECT_EQ(MatMulBackend(Device::kCuda),
            blas.ok() ? (*blas)->name() : absl::StrCat("own (", blas.status().message(), ")"));
}

// The kernel that runs where there is no cuBLAS must be right where there is one, too.
TEST(MatMulBackend, OurKernelAndCublasAgree) {
  const Device device = Device::kCuda;
  const absl::StatusOr<CudaBlas*> blas = CudaBlas::For(device);
  if (!blas.ok()) GTEST_SKIP() << blas.status().message();
  const Tensor x = Random(DType::kBF16, {3, 130, 200}, 1);
  const Tensor weights = Random(DType::kF32, {200, 190}, 2), bias = Random(DType::kF32, {190}, 3);
  const Tensor residual = Random(DType::kF32, {3, 130, 190}, 4);
  const PackedMatrix matrix = PackedMatrix::Create(device, weights.view(), bias.view()).value();
  Machine machine(device, 1, MatMulWorkspaceBytes(device, 390, 200, 190, 1));
  Tensor ours(DType::kF32, {3, 130, 190}), theirs(DType::kF32, {3, 130, 190});
  Fill(ours.view(), kNan);
  Fill(theirs.view(), kNan);
  DeviceMirror mirror(CudaRuntime::For(device).value());
  MatMulCall call{mirror.Copy(x.view()).value(), mirror.Copy(residual.view()).value(),
                  mirror.CopyForWriting(ours.view()).value(), Activation::kGelu};
  ASSERT_OK(MultiplyWithKernel(matrix, call, machine.execution()));
  call.y = mirror.CopyForWriting(theirs.view()).value();
  const int64_t products = (*blas)->products();
  ASSERT_OK(MultiplyWithBlas(*blas, matrix, call, machine.execution()));
  EXPECT_EQ((*blas)->products(), products + 1);
  ASSERT_OK(mirror.CopyBack());
  for (const Tensor* y : {&ours, &theirs}) {
    ExpectProduct(x.view(), weights.view(), bias.view(), residual.view(), Activation::kGelu,
                  y->view());
  }
}

// A library that multiplies in host memory.
absl::Status MultiplyOnHost(const GemmCall& gemm) {
  CudaRuntime* runtime = CudaRuntime::For(KernelDevice()).value();
  const auto load = [&](const float* from, int64_t rows, int64_t columns, int64_t stride) {
    std::vector<float> matrix(rows * columns);
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_OK(
          runtime->CopyToHost(&matrix[r * columns], from + r * stride, columns * sizeof(float)));
    }
    return matrix;
  };
  const std::vector<float> a = load(gemm.a, gemm.rows, gemm.depth, gemm.a_stride);
  const std::vector<float> b = load(gemm.b, gemm.depth, gemm.columns, gemm.b_stride);
  for (int64_t r = 0; r < gemm.rows; ++r) {
    std::vector<float> sums(gemm.columns);
    for (int64_t k = 0; k < gemm.depth; ++k) {
      for (int64_t c = 0; c < gemm.columns; ++c) {
        sums[c] += a[r * gemm.depth + k] * b[k * gemm.columns + c];
      }
    }
    EXPECT_OK(runtime->CopyToDevice(gemm.c + r * gemm.c_stride, sums.data(),
                                    gemm.columns * sizeof(float)));
  }
  return absl::OkStatus();
}

// Rows that a library can read or write in place, and such that it cannot; `copies` is how many of
// x and y lie in the workspace.
TEST(ProductLibrary, ReadsAndWritesRowsInPlaceWhereItCan) {
  constexpr int64_t kIn = 20, kOut = 36, kScratch = 100;
  const Tensor weights = Random(DType::kF32, {kIn, kOut}, 2), bias = Random(DType::kF32, {kOut}, 3);
  const Tensor halves = Random(DType::kF16, {2, 5, kIn}, 1);
  const Tensor wide = Random(DType::kF32, {2, 5, 3 * kIn}, 1);
  const Tensor residual = Random(DType::kF32, {2, 5, kOut}, 4);
  ConstTensorView repeated = Slice(wide.view(), 1, 2, 1);
  repeated.dims[1] = 5;
  repeated.strides[1] = 0;
  struct Case {
    ConstTensorView x;
    DType dtype;  // of y
    bool has_bias, has_residual;
    Activation activation;
    int copies;
  };
  const ConstTensorView part = Slice(wide.view(), 2, kIn, kIn);
  for (const Case& c : std::vector<Case>{
           {part, DType::kF32, false, false, Activation::kNone, 0},
           {part, DType::kF32, true, false, Activation::kNone, 0},
           {part, DType::kF32, false, false, Activation::kTanh, 0},
           {Slice(Slice(part, 0, 1, 1), 1, 3, 1), DType::kF32, true, false, Activation::kRelu, 0},
           {part, DType::kF32, true, true, Activation::kGelu, 1},
           {part, DType::kBF16, false, false, Activation::kNone, 1},
           {halves.view(), DType::kF32, true, false, Activation::kNone, 1},
           {Slice(repeated, 2, 0, kIn), DType::kF32, false, false, Activation::kNone, 1},
           {halves.view(), DType::kF16, true, true, Activation::kTanh, 2}}) {
    const PackedMatrix matrix = PackedMatrix::Create(KernelDevice(), weights.view(),
                                                     c.has_bias ? bias.view() : ConstTensorView())
                                    .value();
    const int64_t rows = c.x.dim(0) * c.x.dim(1);
    // Both copies of rows, each in whole units of 64 bytes, behind the library's memory.
    const size_t bytes = LibraryWorkspaceBytes(kScratch, rows, kIn, kOut);
    const auto units = [](int64_t floats) { return (floats * 4 + 63) / 64 * 64; };
    EXPECT_EQ(bytes, static_cast<size_t>(128 + units(rows * kIn) + units(rows * kOut)));
    Machine machine(KernelDevice(), 1, bytes);
    const auto* first = static_cast<const std::byte*>(machine.execution().workspace.data());
    const auto is_inside = [&](const float* rows_of) {
      const auto* at = reinterpret_cast<const std::byte*>(rows_of);
      return at >= first && at < first + bytes ? 1 : 0;
    };
    int copies = 0;
    ProductLibrary library;
    library.scratch_bytes = kScratch;
    library.multiply = [&](const GemmCall& gemm, void* scratch, void*) {
      EXPECT_EQ(scratch, first);
      copies = is_inside(gemm.a) + is_inside(gemm.c);
      return MultiplyOnHost(gemm);
    };
    Tensor y_memory(c.dtype, {c.x.dim(0), c.x.dim(1), kOut + 4});
    Fill(y_memory.view(), 7);
    const TensorView y = Slice(y_memory.view(), 2, 0, kOut);
    const ConstTensorView added = c.has_residual ? residual.view() : ConstTensorView();
    DeviceMirror mirror(CudaRuntime::For(KernelDevice()).value());
    const TensorView written = mirror.CopyForWriting(y_memory.view()).value();
    ASSERT_OK(MultiplyWithLibrary(library, matrix,
                                  {mirror.Copy(c.x).value(), mirror.Copy(added).value(),
                                   Slice(written, 2, 0, kOut), c.activation},
                                  machine.execution()));
    ASSERT_OK(mirror.CopyBack());
    EXPECT_EQ(copies, c.copies);
    ExpectProduct(c.x, weights.view(), c.has_bias ? bias.view() : ConstTensorView(), added,
                  c.activation, y);
    EXPECT_EQ(y_memory.view().Get(y_memory.num_elements() - 1), 7) << "written beside y";
  }
}

// Does the same for 16-bit rows.
absl::Status Multiply16OnHost(const SixteenBitGemmCall& gemm) {
  CudaRuntime* runtime = CudaRuntime::For(KernelDevice()).value();
  const DType type = gemm.element == Element::kBf16 ? DType::kBF16 : DType::kF16;
  const auto load = [&](const void* from, DType dtype, int64_t rows, int64_t columns,
                        int64_t stride) {
    Tensor matrix(dtype, {rows, columns});
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_OK(runtime->CopyToHost(static_cast<std::byte*>(matrix.raw()) + r * columns * size,
                                    static_cast<const std::byte*>(from) + r * stride * size,
                                    columns * size));
    }
    return matrix.CloneAs(DType::kF32);
  };
  EXPECT_EQ(gemm.c_element, Element::kF32);
  const Tensor a = load(gemm.a, type, gemm.rows, gemm.depth, gemm.a_stride);
  const Tensor b = load(gemm.b, type, gemm.depth, gemm.columns, gemm.b_stride);
  Tensor c(DType::kF32, {gemm.rows, gemm.columns});
  Fill(c.view(), 0);
  if (gemm.adds) c = load(gemm.c, DType::kF32, gemm.rows, gemm.columns, gemm.c_stride);
  for (int64_t r = 0; r < gemm.rows; ++r) {
    for (int64_t k = 0; k < gemm.depth; ++k) {
      for (int64_t n = 0; n < gemm.columns; ++n) {
        c.span<float>()[r * gemm.columns + n] +=
            a.span<float>()[r * gemm.depth + k] * b.span<float>()[k * gemm.columns + n];
      }
    }
    EXPECT_OK(runtime->CopyToDevice(static_cast<float*>(gemm.c) + r * gemm.c_stride,
                                    &c.span<float>()[r * gemm.columns],
                                    gemm.columns * sizeof(float)));
  }
  return absl::OkStatus();
}

// A product of a split matrix with rows of its type is as exact as one in fp32, and reads the rows in
// place; other rows are converted.
TEST(ProductLibrary, SixteenBitRowsMeetBothPartsOfASplitMatrix) {
  constexpr int64_t kIn = 70, kOut = 36;
  const Tensor weights = Random(DType::kF32, {kIn, kOut}, 2), bias = Random(DType::kF32, {kOut}, 3);
  for (const DType split : {DType::kBF16, DType::kF16}) {
    PackedMatrix matrix = PackedMatrix::Create(KernelDevice(), weights.view(), bias.view()).value();
    const size_t bytes_before = matrix.bytes();
    ASSERT_OK(matrix.Split(split));
    EXPECT_EQ(matrix.bytes() - bytes_before, size_t{2 * kIn * kOut * 2});
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const Tensor wide = Random(dtype, {2, 5, 2 * kIn}, 1);
      for (const bool spread : {false, true}) {
        ConstTensorView x = Slice(wide.view(), 2, 1, kIn);
        if (spread) {  // rows whose channels do not lie side by side
          x.strides[2] = 2;
        }
        int calls = 0, calls_16 = 0;
        ProductLibrary library;
        library.multiply = [&](const GemmCall& gemm, void*, void*) {
          ++calls;
          return MultiplyOnHost(gemm);
        };
        library.multiply_16 = [&](const SixteenBitGemmCall& gemm, void*, void*) {
          EXPECT_EQ(gemm.adds, ++calls_16 == 2);
          return Multiply16OnHost(gemm);
        };
        for (const Columns& columns : {Columns{0, kOut}, Columns{11, 7}}) {
          calls = calls_16 = 0;
          Tensor y(DType::kF32, {2, 5, columns.count});
          Machine machine(KernelDevice(), 1, LibraryWorkspaceBytes(0, 10, kIn, kOut));
          DeviceMirror mirror(CudaRuntime::For(KernelDevice()).value());
          MatMulCall call = {mirror.Copy(x).value(),
                             {},
                             mirror.CopyForWriting(y.view()).value(),
                             Activation::kTanh};
          call.columns = columns;
          ASSERT_OK(MultiplyWithLibrary(library, matrix, call, machine.execution()));
          ASSERT_OK(mirror.CopyBack());
          const bool is_direct = dtype == split && !spread;
          EXPECT_EQ(calls, is_direct ? 0 : 1) << Name(split) << " " << Name(dtype);
          EXPECT_EQ(calls_16, is_direct ? 2 : 0) << Name(split) << " " << Name(dtype);
          ExpectProduct(x, Slice(weights.view(), 1, columns.first, columns.count),
                        Slice(bias.view(), 0, columns.first, columns.count), {}, Activation::kTanh,
                        y.view());
        }
      }
    }
  }
}

TEST(ProductLibrary, AMatrixWithValuesBeyondTheTypeIsNotSplit) {
  Tensor weights(DType::kF32, {3, 2});
  Fill(weights.view(), 1);
  weights.span<float>()[4] = 70000;  // the largest f16 is 65504
  PackedMatrix matrix = PackedMatrix::Create(KernelDevice(), weights.view()).value();
  ASSERT_OK(matrix.Split(DType::kF16));
  EXPECT_EQ(matrix.split(DType::kF16), nullptr);
  ASSERT_OK(matrix.Split(DType::kBF16));
  EXPECT_NE(matrix.split(DType::kBF16), nullptr);
  EXPECT_EQ(matrix.split(DType::kF16), nullptr);
  PackedMatrix on_cpu = PackedMatrix::Create(Device::kCpu, weights.view()).value();
  EXPECT_EQ(on_cpu.Split(DType::kBF16).code(), absl::StatusCode::kInternal);
  // Products in the simulator and on the CPU are no library's.
  ASSERT_OK(PrepareForRowsOf(DType::kBF16, &on_cpu));
  PackedMatrix simulated = PackedMatrix::Create(Device::kSimulator, weights.view()).value();
  ASSERT_OK(PrepareForRowsOf(DType::kBF16, &simulated));
  EXPECT_EQ(simulated.split(DType::kBF16), nullptr);
}

// Some columns of a matrix, with their part of the bias.
TEST(ProductLibrary, MultipliesSomeColumnsAndHandsItsErrorsOn) {
  const Tensor x = Random(DType::kF32, {6, 20}, 1), weights = Random(DType::kF32, {20, 36}, 2);
  const Tensor bias = Random(DType::kF32, {36}, 3);
  const PackedMatrix matrix =
      PackedMatrix::Create(KernelDevice(), weights.view(), bias.view()).value();
  Tensor y(DType::kF32, {1, 6, 7});
  Machine machine(KernelDevice(), 1, LibraryWorkspaceBytes(0, 6, 20, 36));
  DeviceMirror mirror(CudaRuntime::For(KernelDevice()).value());
  const ConstTensorView one_batch(x.raw(), DType::kF32, {1, 6, 20});
  MatMulCall call = {mirror.Copy(one_batch).value(), {}, mirror.CopyForWriting(y.view()).value()};
  call.columns = {11, 7};
  ProductLibrary library;
  library.multiply = [](const GemmCall& gemm, void*, void*) { return MultiplyOnHost(gemm); };
  ASSERT_OK(MultiplyWithLibrary(library, matrix, call, machine.execution()));
  ASSERT_OK(mirror.CopyBack());
  ExpectProduct(one_batch, Slice(weights.view(), 1, 11, 7), Slice(bias.view(), 0, 11, 7), {},
                Activation::kNone, y.view());
  library.multiply = [](const GemmCall&, void*, void*) { return absl::AbortedError("no"); };
  EXPECT_EQ(MultiplyWithLibrary(library, matrix, call, machine.execution()).message(), "no");
}

TEST(Activation, IsWithinFewRoundingsOverItsWholeRange) {
  for (Activation activation : kActivations) {
    for (int i = -2000; i <= 2000; ++i) {
      float value = static_cast<float>(i) * 0.01f;
      const double expected = Exact(activation, value);
      Activate(activation, 1, &value);
      ASSERT_NEAR(value, expected, 1e-6 * std::max(1.0, std::abs(expected)))
          << Name(activation) << "(" << 0.01 * i << ")";
    }
    float nan = std::numeric_limits<float>::quiet_NaN();
    Activate(activation, 1, &nan);
    EXPECT_TRUE(std::isnan(nan)) << Name(activation);
  }
}

TEST_P(LayerNormOn, EqualsLoopsAlsoWithALargeCommonOffset) {
  for (int64_t channels : {1, 7, 8, 31, 32, 33, 64, 131}) {
    for (double offset : {0.0, 1000.0}) {
      Tensor x(DType::kF32, {2, 19, channels});
      FillNormal(&x, 1, "x", offset);
      const Tensor gamma = Random(DType::kF32, {channels}, 2);
      const Tensor beta = Random(DType::kF32, {channels}, 3);
      const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), beta.view()).value();
      Tensor y(DType::kF32, {2, 19, channels});
      Fill(y.view(), kNan);
      Machine machine(device(), 2, LayerNorm::workspace_bytes(device(), channels, 2));
      ASSERT_OK(norm.Run(In(x.view()), Out(y.view()), machine.execution()));
      Back();
      EXPECT_TRUE(machine.guards_intact());
      for (int64_t row = 0; row < 38; ++row) {
        const float* values = x.span<float>().data() + row * channels;
        double mean = 0, variance = 0;
        for (int64_t c = 0; c < channels; ++c) mean += values[c] / static_cast<double>(channels);
        for (int64_t c = 0; c < channels; ++c) {
          variance += (values[c] - mean) * (values[c] - mean) / static_cast<double>(channels);
        }
        for (int64_t c = 0; c < channels; ++c) {
          const double normal = (values[c] - mean) / std::sqrt(variance + 1e-5);
          const double expected =
              gamma.span<float>()[c] * normal + static_cast<double>(beta.span<float>()[c]);
          // The bound is four roundings of the normalised value and one of the sum.
          const double bound =
              0x1p-24 * (4 * std::abs(gamma.span<float>()[c] * normal) + std::abs(expected)) * 1.01;
          ASSERT_NEAR(y.span<float>()[row * channels + c], expected, bound) << channels;
        }
      }
    }
  }
}

TEST_P(LayerNormOn, WorksInPlaceOnStridedHalfPrecisionRows) {
  Tensor memory = Random(DType::kBF16, {4, 12, 6}, 1);  // the layout has channels in the middle
  const Tensor before = memory.CloneAs(DType::kF64);
  Tensor ones(DType::kF32, {12}), zeros(DType::kF32, {12});
  Fill(ones.view(), 1);
  Fill(zeros.view(), 0);
  const LayerNorm norm = LayerNorm::Create(device(), ones.view(), zeros.view()).value();
  Machine machine(device(), 1, LayerNorm::workspace_bytes(device(), 12, 1));
  const TensorView x = Transpose(memory.view(), 1, 2);
  const TensorView state = Out(x);
  ASSERT_OK(norm.Run(state, state, machine.execution()));
  Back();
  for (int64_t b = 0; b < 4; ++b) {
    for (int64_t t = 0; t < 6; ++t) {
      double mean = 0, square = 0;
      for (int64_t c = 0; c < 12; ++c) mean += *before.view().At<double>(b, c, t) / 12;
      for (int64_t c = 0; c < 12; ++c) {
        square += std::pow(*before.view().At<double>(b, c, t) - mean, 2) / 12;
      }
      for (int64_t c = 0; c < 12; ++c) {
        const double expected =
            (*before.view().At<double>(b, c, t) - mean) / std::sqrt(square + 1e-5);
        ASSERT_NEAR(x.Get(x.Offset(b, t, c)), expected, 0x1p-8 * std::abs(expected) + 1e-6);
      }
    }
  }
}

TEST_P(LayerNormOn, ANanStaysInItsRowAndNoRowsAreNoWork) {
  Tensor x = Random(DType::kF32, {20, 40}, 1);
  *x.view().MutableAt<float>(13, 39) = std::numeric_limits<float>::quiet_NaN();
  const Tensor gamma = Random(DType::kF32, {40}, 2), beta = Random(DType::kF32, {40}, 3);
  const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), beta.view()).value();
  Machine machine(device(), 1, LayerNorm::workspace_bytes(device(), 40, 1));
  const TensorView state = Out(x.view());
  ASSERT_OK(norm.Run(state, state, machine.execution()));
  Back();
  for (int64_t row = 0; row < 20; ++row) {
    for (int64_t c = 0; c < 40; ++c) {
      ASSERT_EQ(std::isnan(*x.view().At<float>(row, c)), row == 13);
    }
  }
  Tensor none(DType::kF32, {0, 40});
  EXPECT_OK(norm.Run(none.view(), none.view(), machine.execution()));
}

TEST_P(LayerNormOn, ShapesThatDoNotFitAreAnError) {
  Tensor gamma(DType::kF32, {4});
  Fill(gamma.view(), 1);
  const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), gamma.view()).value();
  Machine machine(device(), 1, LayerNorm::workspace_bytes(device(), 5, 1));
  for (const auto& [of_x, of_y] : std::vector<std::pair<Shape, Shape>>{
           {{1, 2, 5}, {1, 2, 5}}, {{2, 4}, {1, 2, 4}}, {{4}, {4}}}) {
    const Tensor x(DType::kF32, of_x);
    Tensor y(DType::kF32, of_y);
    EXPECT_EQ(norm.Run(x.view(), y.view(), machine.execution()).message(),
              absl::StrCat("layer norm of 4 channels of x ", ShapeString(of_x), " does not give y ",
                           ShapeString(of_y)));
  }
  EXPECT_EQ(norm.bytes(), 2u * 4 * sizeof(float));
}

TEST_P(LayerNormOn, DividesByTheRootOfTheVarianceAndItsOwnEpsilon) {
  Tensor ones(DType::kF32, {2}), zeros(DType::kF32, {2}), x(DType::kF32, {1, 2});
  Fill(ones.view(), 1);
  Fill(zeros.view(), 0);
  x.view().Set(0, 1);  // of 1 and 3 the variance is 1
  x.view().Set(1, 3);
  const LayerNorm norm = LayerNorm::Create(device(), ones.view(), zeros.view(), 3).value();
  Machine machine(device(), 1, LayerNorm::workspace_bytes(device(), 2, 1));
  const TensorView state = Out(x.view());
  ASSERT_OK(norm.Run(state, state, machine.execution()));
  Back();
  EXPECT_EQ(x.span<float>()[0], -0.5f);
  EXPECT_EQ(x.span<float>()[1], 0.5f);
}

TEST_P(LogSoftmaxOn, EqualsLoopsAlsoWhereExponentialsOverflow) {
  for (int64_t channels : {1, 7, 32, 33, 200}) {
    for (double scale : {1.0, 1000.0}) {
      Tensor x(DType::kF32, {2, 19, channels}), y(DType::kF32, {2, 19, channels});
      FillNormal(&x, 1, "x", 0, scale);
      Fill(y.view(), kNan);
      Machine machine(device(), 2, LogSoftmaxWorkspaceBytes(device(), channels, 2));
      ASSERT_OK(LogSoftmax(device(), In(x.view()), Out(y.view()), machine.execution()));
      Back();
      EXPECT_TRUE(machine.guards_intact());
      for (int64_t row = 0; row < 38; ++row) {
        const float* values = x.span<float>().data() + row * channels;
        const double max = *std::max_element(values, values + channels);
        double sum = 0;
        for (int64_t c = 0; c < channels; ++c) sum += std::exp(values[c] - max);
        for (int64_t c = 0; c < channels; ++c) {
          const double expected = values[c] - max - std::log(sum);
          // Each term of the sum is off by a few roundings, and so are their sum and its logarithm.
          const double bound =
              0x1p-24 * (static_cast<double>(channels) + 8 + 2 * std::abs(values[c] - max));
          ASSERT_NEAR(y.span<float>()[row * channels + c], expected, bound) << channels;
        }
      }
    }
  }
}

TEST_P(LogSoftmaxOn, WorksInPlaceOnStridedRowsOfWhichANanTakesItsOwn) {
  Tensor memory = Random(DType::kF32, {4, 12, 6}, 1);  // the layout has channels in the middle
  *memory.view().MutableAt<float>(2, 11, 3) = std::numeric_limits<float>::quiet_NaN();
  Machine machine(device(), 1, LogSoftmaxWorkspaceBytes(device(), 12, 1));
  const TensorView x = Transpose(memory.view(), 1, 2);
  const TensorView state = Out(x);
  ASSERT_OK(LogSoftmax(device(), state, state, machine.execution()));
  Back();
  for (int64_t b = 0; b < 4; ++b) {
    for (int64_t t = 0; t < 6; ++t) {
      double sum = 0;
      for (int64_t c = 0; c < 12; ++c) sum += std::exp(*x.At<float>(b, t, c));
      if (b == 2 && t == 3) {
        EXPECT_TRUE(std::isnan(*x.At<float>(b, t, 0)));
      } else {
        EXPECT_NEAR(sum, 1, 1e-6);
      }
    }
  }
}

TEST_P(LogSoftmaxOn, ShapesThatDoNotFitAreAnError) {
  Machine machine(device(), 1, LogSoftmaxWorkspaceBytes(device(), 5, 1));
  for (const auto& [of_x, of_y] : std::vector<std::pair<Shape, Shape>>{
           {{1, 2, 5}, {1, 2, 4}}, {{5}, {5}}, {{1, 1, 1, 5}, {1, 1, 1, 5}}}) {
    const Tensor x(DType::kF32, of_x);
    Tensor y(DType::kF32, of_y);
    EXPECT_EQ(LogSoftmax(device(), x.view(), y.view(), machine.execution()).message(),
              absl::StrCat("log softmax of x ", ShapeString(of_x), " does not give y ",
                           ShapeString(of_y)));
  }
}

TEST_P(FeedForwardOn, IsTwoProductsWithTheActivationBetween) {
  const int64_t in = 40, inner = 96, rows = 10;
  const Tensor x = Random(DType::kF32, {1, rows, in}, 1);
  const Tensor w1 = Random(DType::kF32, {in, inner}, 2), b1 = Random(DType::kF32, {inner}, 3);
  const Tensor w2 = Random(DType::kF32, {inner, in}, 4), b2 = Random(DType::kF32, {in}, 5);
  for (Activation activation : kActivations) {
    const FeedForward layer(Pack(w1.view(), b1.view()), Pack(w2.view(), b2.view()), activation);
    Machine machine(device(), 2, FeedForward::workspace_bytes(device(), rows, {in, inner, in}, 2));
    Tensor y = x.Clone();  // in place, with the input as the residual
    const TensorView state = Out(y.view());
    ASSERT_OK(layer.Run(state, state, state, machine.execution()));
    Back();
    EXPECT_TRUE(machine.guards_intact());
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<double> hidden(inner), magnitude(inner);
      for (int64_t n = 0; n < inner; ++n) {
        double sum = b1.span<float>()[n];
        for (int64_t k = 0; k < in; ++k) {
          sum += static_cast<double>(*x.view().At<float>(0, r, k)) * *w1.view().At<float>(k, n);
          magnitude[n] += std::abs(*x.view().At<float>(0, r, k) * *w1.view().At<float>(k, n));
        }
        hidden[n] = Exact(activation, sum);
      }
      for (int64_t c = 0; c < in; ++c) {
        double sum = b2.span<float>()[c], total = std::abs(sum) + 1;
        for (int64_t n = 0; n < inner; ++n) {
          sum += hidden[n] * *w2.view().At<float>(n, c);
          total += (magnitude[n] + 1) * std::abs(*w2.view().At<float>(n, c));
        }
        const double expected = sum + *x.view().At<float>(0, r, c);
        ASSERT_NEAR(*y.view().At<float>(0, r, c), expected,
                    1.2 * static_cast<double>(in + inner + 4) * 0x1p-24 * total);
      }
    }
  }
}

TEST_P(AddOn, SumsRowsOfAnyStride) {
  for (int64_t channels : {70, 512, 513, 1100}) {
    const Tensor a = Random(DType::kBF16, {2, channels, 5}, 1);
    const Tensor b = Random(DType::kF32, {2, 5, channels}, 2);
    Tensor y = b.Clone();  // in place
    Machine machine(device(), 2, 0);
    const TensorView state = Out(y.view());
    ASSERT_OK(Add(device(), Transpose(In(a.view()), 1, 2), state, state, machine.execution()));
    Back();
    ForEachOffset(b.view(), Transpose(a.view(), 1, 2), [&](int64_t at, int64_t from) {
      EXPECT_EQ(y.view().Get(at),
                static_cast<float>(b.view().Get(at)) + static_cast<float>(a.view().Get(from)));
    });
  }
}

TEST_P(AddOn, ScalesTheFirstAndBroadcastsTheSecondSummand) {
  const Tensor a = Random(DType::kF16, {2, 5, 70}, 1), rows = Random(DType::kF32, {5, 70}, 2);
  for (const int64_t token_stride : {70, 0}) {
    Tensor y(DType::kF32, {2, 5, 70});
    Machine machine(device(), 2, 0);
    const ConstTensorView row = In(rows.view());
    const ConstTensorView b(row.data, DType::kF32, {2, 5, 70}, {0, token_stride, 1});
    ASSERT_OK(AddScaled(device(), 1.5f, In(a.view()), 1, b, Out(y.view()), machine.execution()));
    Back();
    const ConstTensorView expected(rows.raw(), DType::kF32, {2, 5, 70}, {0, token_stride, 1});
    ForEachOffset(y.view(), expected, [&](int64_t at, int64_t from) {
      const double product = 1.5 * a.view().Get(at);  // exact, so that fused and unfused agree
      EXPECT_EQ(y.view().Get(at), static_cast<float>(product + expected.Get(from)));
    });
  }
}

TEST_P(AddOn, ScalesTheSecondSummandAndRefusesSummandsOfOtherShapes) {
  const Tensor a = Random(DType::kF32, {5, 7}, 1), b = Random(DType::kF32, {5, 7}, 2);
  const Tensor other = Random(DType::kF32, {7, 5}, 3);
  Tensor y(DType::kF32, {5, 7});
  Machine machine(device(), 2, 0);
  ASSERT_OK(AddScaled(device(), -0.5f, In(a.view()), 4, In(b.view()), Out(y.view()),
                      machine.execution()));
  Back();
  for (int64_t n = 0; n < 35; ++n) {  // powers of two: both products are exact
    EXPECT_EQ(y.span<float>()[n], -0.5f * a.span<float>()[n] + 4 * b.span<float>()[n]);
  }
  EXPECT_EQ(Add(device(), other.view(), b.view(), y.view(), machine.execution()).message(),
            "the first summand has shape [7, 5]; the sum has [5, 7]");
  EXPECT_EQ(Add(device(), a.view(), other.view(), y.view(), machine.execution()).message(),
            "the second summand has shape [7, 5]; the sum has [5, 7]");
}

// ---- Gates ----

constexpr GateKind kGateKinds[] = {GateKind::kInput, GateKind::kOutput, GateKind::kHighway,
                                   GateKind::kSigmoidTanh, GateKind::kGru};

// The matrices of a gate, and its formula in float64.
struct GateCase {
  explicit GateCase(int64_t channels) {
    for (Tensor* matrix : {&w_r, &w_z, &w_g, &u_r, &u_z, &u_g}) {
      *matrix = Tensor(DType::kF32, {channels, channels});
      FillNormal(matrix, ++seed, "gate", 0, 1 / std::sqrt(static_cast<double>(channels)));
    }
    for (Tensor* bias : {&b_g, &b_r, &b_z, &b_h}) *bias = Random(DType::kF32, {channels}, ++seed);
    for (Tensor* bias : {&b_r, &b_z, &b_h}) Fill(bias->view(), 0);
  }
  // A gate without the gru's biases, which are 0, or with them.
  Gate Make(Device device, GateKind kind) const {
    return Gate::Create(
               device, kind,
               {w_r.view(), w_z.view(), w_g.view(), u_r.view(), u_z.view(), u_g.view(), b_g.view()})
        .value();
  }
  Gate MakeBiased(Device device) const {
    return Gate::Create(device, GateKind::kGru,
                        {w_r.view(), w_z.view(), w_g.view(), u_r.view(), u_z.view(), u_g.view(),
                         b_g.view(), b_r.view(), b_z.view(), b_h.view()})
        .value();
  }
  static std::vector<double> Times(const std::vector<double>& row, const Tensor& matrix) {
    std::vector<double> product(row.size());
    for (size_t k = 0; k < row.size(); ++k) {
      for (size_t c = 0; c < row.size(); ++c) product[c] += row[k] * *matrix.view().At<float>(k, c);
    }
    return product;
  }
  std::vector<double> Define(GateKind kind, const std::vector<double>& x,
                             const std::vector<double>& y) const {
    const auto logistic = [](double value) { return 1 / (1 + std::exp(-value)); };
    const size_t n = x.size();
    const std::vector<double> x_g = Times(x, w_g), y_g = Times(y, w_g), y_u = Times(y, u_g);
    const std::vector<double> y_r = Times(y, w_r), x_r = Times(x, u_r);
    const std::vector<double> y_z = Times(y, w_z), x_z = Times(x, u_z);
    std::vector<double> reset(n), g(n);
    for (size_t c = 0; c < n; ++c) {
      reset[c] = logistic(y_r[c] + x_r[c] + b_r.span<float>()[c]) * x[c];
    }
    const std::vector<double> reset_u = Times(reset, u_g);
    for (size_t c = 0; c < n; ++c) {
      const double b = b_g.span<float>()[c];
      switch (kind) {
        case GateKind::kInput:
          g[c] = logistic(x_g[c]) * x[c] + y[c];
          break;
        case GateKind::kOutput:
          g[c] = x[c] + logistic(x_g[c] - b) * y[c];
          break;
        case GateKind::kHighway:
          g[c] = logistic(x_g[c] + b) * x[c] + (1 - logistic(x_g[c] + b)) * y[c];
          break;
        case GateKind::kSigmoidTanh:
          g[c] = x[c] + logistic(y_g[c] - b) * std::tanh(y_u[c]);
          break;
        case GateKind::kGru: {
          const double z = logistic(y_z[c] + x_z[c] + b_z.span<float>()[c] - b);
          g[c] = (1 - z) * x[c] + z * std::tanh(y_g[c] + reset_u[c] + b_h.span<float>()[c]);
          break;
        }
      }
    }
    return g;
  }

  uint64_t seed = 0;
  Tensor w_r, w_z, w_g, u_r, u_z, u_g, b_g, b_r, b_z, b_h;
};

TEST_P(GateOn, EveryKindEqualsItsFormulaInPlaceToo) {
  for (const int64_t channels : {1, 7, 64, 90}) {
    const GateCase gates(channels);
    for (const GateKind kind : kGateKinds) {
      const Gate gate = gates.Make(device(), kind);
      const Tensor x = Random(DType::kF32, {2, 19, channels}, 20);
      const Tensor y = Random(DType::kF32, {2, 19, channels}, 21);
      for (const char* where : {"apart", "x", "y"}) {
        SCOPED_TRACE(absl::StrCat("kind ", static_cast<int>(kind), ", ", channels, ", ", where));
        Tensor out(DType::kF32, x.shape());
        Fill(out.view(), kNan);
        const std::string place = where;
        if (place != "apart") CopyElements(place == "x" ? x.view() : y.view(), out.view());
        Machine machine(device(), 2, Gate::workspace_bytes(device(), kind, 38, channels, 2));
        const TensorView to = Out(out.view());
        const ConstTensorView from_x = In(x.view()), from_y = In(y.view()), in_place = to;
        ASSERT_OK(gate.Run(place == "x" ? in_place : from_x, place == "y" ? in_place : from_y, to,
                           machine.execution()));
        Back();
        EXPECT_TRUE(machine.guards_intact());
        for (int64_t row = 0; row < 38; ++row) {
          const auto of = [&](const Tensor& tensor) {
            const auto values = tensor.span<float>().subspan(row * channels, channels);
            return std::vector<double>(values.begin(), values.end());
          };
          const std::vector<double> expected = gates.Define(kind, of(x), of(y));
          // The sums have up to 3 n products of order n^(-1/2); the functions' slopes are at most
          // 1, and values are up to 4.
          for (int64_t c = 0; c < channels; ++c) {
            ASSERT_NEAR(of(out)[c], expected[c], 2e-5) << row << " " << c;
          }
        }
      }
    }
  }
}

TEST_P(GateOn, AGruMayHaveBiasesOfItsMatrices) {
  constexpr int64_t kChannels = 70;
  GateCase gates(kChannels);
  for (Tensor* bias : {&gates.b_r, &gates.b_z, &gates.b_h}) {
    *bias = Random(DType::kF32, {kChannels}, ++gates.seed);
  }
  const Tensor x = Random(DType::kF32, {9, kChannels}, 20);
  const Tensor y = Random(DType::kF32, {9, kChannels}, 21);
  Tensor out(DType::kF32, x.shape());
  Machine machine(device(), 2, Gate::workspace_bytes(device(), GateKind::kGru, 9, kChannels, 2));
  ASSERT_OK(gates.MakeBiased(device()).Run(In(x.view()), In(y.view()), Out(out.view()),
                                           machine.execution()));
  Back();
  for (int64_t row = 0; row < 9; ++row) {
    const auto of = [&](const Tensor& tensor) {
      const auto values = tensor.span<float>().subspan(row * kChannels, kChannels);
      return std::vector<double>(values.begin(), values.end());
    };
    const std::vector<double> expected = gates.Define(GateKind::kGru, of(x), of(y));
    for (int64_t c = 0; c < kChannels; ++c) {
      ASSERT_NEAR(of(out)[c], expected[c], 2e-5) << row << " " << c;
    }
  }
}

TEST_P(GateOn, ALargeBiasIsTheIdentityOfXBitByBit) {
  GateCase gates(33);
  Fill(gates.b_g.view(), 1e4);
  const Tensor x = Random(DType::kBF16, {40, 33}, 1), y = Random(DType::kF32, {40, 33}, 2);
  for (const GateKind kind :
       {GateKind::kOutput, GateKind::kHighway, GateKind::kSigmoidTanh, GateKind::kGru}) {
    Tensor out(DType::kBF16, {40, 33});
    Machine machine(device(), 1, Gate::workspace_bytes(device(), kind, 40, 33, 1));
    ASSERT_OK(gates.Make(device(), kind)
                  .Run(In(x.view()), In(y.view()), Out(out.view()), machine.execution()));
    Back();
    EXPECT_EQ(std::memcmp(out.raw(), x.raw(), x.bytes()), 0) << static_cast<int>(kind);
  }
}

TEST_P(GateOn, ANanStaysInItsRow) {
  const GateCase gates(70);
  for (const GateKind kind : kGateKinds) {
    for (const bool in_x : {false, true}) {
      Tensor x = Random(DType::kF32, {20, 70}, 1), y = Random(DType::kF32, {20, 70}, 2);
      (in_x ? x : y).view().Set(13 * 70 + 69, kNan);
      Tensor out(DType::kF32, {20, 70});
      Machine machine(device(), 1, Gate::workspace_bytes(device(), kind, 20, 70, 1));
      ASSERT_OK(gates.Make(device(), kind)
                    .Run(In(x.view()), In(y.view()), Out(out.view()), machine.execution()));
      Back();
      for (int64_t row = 0; row < 20; ++row) {
        EXPECT_EQ(std::isnan(*out.view().At<float>(row, 69)), row == 13) << static_cast<int>(kind);
      }
    }
  }
}

TEST_P(GateOn, ShapesThatDoNotFitAreAnError) {
  const Gate gate = GateCase(4).Make(device(), GateKind::kInput);
  Machine machine(device(), 1, Gate::workspace_bytes(device(), GateKind::kInput, 2, 4, 1));
  const Tensor fits(DType::kF32, {2, 4}), other(DType::kF32, {1, 2, 4});
  Tensor out(DType::kF32, {2, 4});
  EXPECT_EQ(gate.Run(other.view(), fits.view(), out.view(), machine.execution()).message(),
            "gate of x [1, 2, 4] and y [2, 4] does not give [2, 4]");
  EXPECT_EQ(gate.Run(fits.view(), other.view(), out.view(), machine.execution()).message(),
            "gate of x [2, 4] and y [1, 2, 4] does not give [2, 4]");
}

INSTANTIATE_TEST_SUITE_P(, MatMulOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, LayerNormOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, LogSoftmaxOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, FeedForwardOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, GateOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, AddOn, ::testing::ValuesIn(TestedDevices()), DeviceName);

// The simulator's seed sets the order of blocks and threads: the bits must not depend on it. A GPU
// has an order of its own each time.
TEST(LayersOnDevices, BitsDoNotDependOnTheOrderOfThreads) {
  const Tensor x = Random(DType::kBF16, {2, 50, 90}, 1);
  const Tensor weights = Random(DType::kF32, {90, 90}, 2), row = Random(DType::kF32, {90}, 3);
  const Device device = KernelDevice();
  const FeedForward layer(PackedMatrix::Create(device, weights.view(), row.view()).value(),
                          PackedMatrix::Create(device, weights.view(), row.view()).value(),
                          Activation::kGeluTanh);
  const LayerNorm norm = LayerNorm::Create(device, row.view(), row.view()).value();
  std::vector<Tensor> results;
  for (uint64_t seed : {1, 2, 3}) {
    cuda_simulator::Settings settings;
    settings.seed = seed;
    cuda_simulator::Configure(settings);
    Machine machine(device, 1, FeedForward::workspace_bytes(device, 100, {90, 90, 90}, 1));
    Tensor& y = results.emplace_back(DType::kF32, Shape{2, 50, 90});
    Fill(y.view(), kNan);
    DeviceMirror mirror(CudaRuntime::For(device).value());
    const ConstTensorView input = mirror.Copy(x.view()).value();
    const TensorView state = mirror.CopyForWriting(y.view()).value();
    ASSERT_OK(layer.Run(input, input, state, machine.execution()));
    ASSERT_OK(norm.Run(state, state, machine.execution()));
    ASSERT_OK(mirror.CopyBack());
  }
  for (const Tensor& result : results) {
    EXPECT_EQ(std::memcmp(result.raw(), results[0].raw(), result.bytes()), 0);
  }
  cuda_simulator::Configure({});
}

TEST(RelativeSinusoids, AreSinesThenCosinesOfEveryDistance) {
  const Tensor table = RelativeSinusoids(5000, 6);
  for (int64_t p : {0, 1, 17, 4999}) {
    for (int64_t c = 0; c < 3; ++c) {
      const double angle = static_cast<double>(p) / std::pow(10000.0, static_cast<double>(c) / 3);
      EXPECT_NEAR(*table.view().At<float>(p, c), std::sin(angle), 0x1p-24);
      EXPECT_NEAR(*table.view().At<float>(p, c + 3), std::cos(angle), 0x1p-24);
    }
  }
  EXPECT_EQ(RelativeSinusoids(2, 3).shape(), (Shape{2, 3}));  // two sines, one cosine
}

TEST(Sinusoids, TheRowsOfLaterPositionsAreTheEndOfALongerTable) {
  const SinusoidForm form = {SinusoidLayout::kInterleaved, SinusoidFrequencies::kInclusive, 50};
  const Tensor all = Sinusoids(0, 40, 7, form).value(), end = Sinusoids(33, 7, 7, form).value();
  ForEachOffset(Slice(all.view(), 0, 33, 7), end.view(), [&](int64_t at, int64_t to) {
    EXPECT_EQ(Slice(all.view(), 0, 33, 7).Get(at), end.view().Get(to));
  });
  EXPECT_EQ(Sinusoids(0, int64_t{1} << 50, 64, form).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(RowsOf, TellsWhereFloatsLieSideBySide) {
  Tensor floats(DType::kF32, {4, 6, 10}), halves(DType::kF16, {4, 6});
  const ConstTensorView all = std::as_const(floats).view();
  struct Case {
    ConstTensorView view;
    int64_t rows, stride;  // stride 0: no such rows
  };
  const ConstTensorView one_token = Slice(Slice(all, 1, 2, 1), 2, 3, 4);
  for (const Case& c : std::vector<Case>{{all, 24, 10},
                                         {Slice(all, 2, 3, 4), 24, 10},
                                         {Slice(all, 1, 2, 3), 12, 0},
                                         {Slice(Slice(all, 0, 1, 1), 1, 2, 3), 3, 10},
                                         {one_token, 4, 60},
                                         {Transpose(all, 1, 2), 40, 0},
                                         {Slice(Transpose(all, 1, 2), 2, 1, 1), 40, 0},
                                         {Slice(all, 2, 5, 1), 24, 10},
                                         {std::as_const(halves).view(), 4, 0}}) {
    const RowsOf<ConstTensorView> rows(c.view);
    int64_t stride = 0;
    const float* first = rows.FirstRow(&stride);
    EXPECT_EQ(rows.rows(), c.rows) << ShapeString(c.view.shape());
    EXPECT_EQ(first != nullptr, c.stride > 0) << ShapeString(c.view.shape());
    if (first == nullptr) continue;
    EXPECT_EQ(stride, c.stride) << ShapeString(c.view.shape());
    for (int64_t row = 0; row < c.rows; ++row) EXPECT_EQ(rows.Offset(row), row * c.stride);
  }
}

TEST(Layers, CallsAllocateNothing) {
  const Tensor x = Random(DType::kBF16, {3, 50, 130}, 1);
  const Tensor weights = Random(DType::kF32, {130, 130}, 2), bias = Random(DType::kF32, {130}, 3);
  const Device device = Device::kCpu;
  const FeedForward layer(PackedMatrix::Create(device, weights.view(), bias.view()).value(),
                          PackedMatrix::Create(device, weights.view(), bias.view()).value(),
                          Activation::kGelu);
  const LayerNorm norm = LayerNorm::Create(device, bias.view(), bias.view()).value();
  const Gate gate = GateCase(130).Make(device, GateKind::kGru);
  Tensor y(DType::kF32, {3, 50, 130});
  Machine machine(device, 2,
                  FeedForward::workspace_bytes(device, 150, {130, 130, 130}, 2) +
                      Gate::workspace_bytes(device, GateKind::kGru, 150, 130, 2) +
                      LayerNorm::workspace_bytes(device, 130, 2));
  const int64_t before = AllocationCount();
  const bool ok = layer.Run(x.view(), x.view(), y.view(), machine.execution()).ok() &&
                  norm.Run(y.view(), y.view(), machine.execution()).ok() &&
                  gate.Run(x.view(), y.view(), y.view(), machine.execution()).ok() &&
                  Add(device, x.view(), y.view(), y.view(), machine.execution()).ok();
  EXPECT_EQ(AllocationCount() - before, 0);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace tfb
