// Tests the gradients of a product's parameters on a CUDA device against those on the CPU, which
// layer_gradients_test.cc holds against the formula.
#include "core/layers/matmul_gradient.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/mirror.h"
#include "core/random.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

struct Sizes {
  int64_t batch;
  int64_t tokens;
  int64_t in;
  int64_t out;
  DType dtype = DType::kF32;
};

// Views of a call in host memory.
struct Tensors {
  explicit Tensors(const Sizes& s)
      : x(s.dtype, {s.batch, s.tokens, s.in}),
        // Channels lie apart, as those of one projection among several do.
        dy(s.dtype, {s.batch, s.tokens, 3 * s.out}),
        weights(DType::kF32, {s.out, s.in}),
        bias(DType::kF32, {s.out}) {
    FillNormal(&x, 1, "x");
    FillNormal(&dy, 2, "dy");
    FillNormal(&weights, 3, "weights");
    FillNormal(&bias, 4, "bias");
    if (s.tokens < 4) return;
    Fill(Slice(x.view(), 1, 3, 1), std::numeric_limits<double>::quiet_NaN());  // as padding may be
    Fill(Slice(dy.view(), 1, 3, 1), 0);
  }
  Tensor x, dy, weights, bias;
};

absl::Status Run(Device device, const MatMulGradientCall& call, const Sizes& s) {
  const int64_t rows = s.batch * s.tokens;
  const auto bytes =
      static_cast<int64_t>(MatMulGradientWorkspaceBytes(device, rows, s.in, s.out, 2));
  TFB_ASSIGN_OR_RETURN(const DeviceArray<char> memory, DeviceArray<char>::Allocate(device, bytes));
  ThreadPool pool(2);
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(reinterpret_cast<std::byte*>(memory.mutable_data()), bytes);
  return MatMulGradient(device, call, execution);
}

absl::Status RunOnCuda(MatMulGradientCall call, const Sizes& s) {
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(KernelDevice()));
  DeviceMirror mirror(runtime);
  TFB_ASSIGN_OR_RETURN(call.x, mirror.Copy(call.x));
  TFB_ASSIGN_OR_RETURN(call.dy, mirror.Copy(call.dy));
  TFB_ASSIGN_OR_RETURN(call.weights, mirror.CopyForWriting(call.weights));
  TFB_ASSIGN_OR_RETURN(call.bias, mirror.CopyForWriting(call.bias));
  TFB_RETURN_IF_ERROR(Run(KernelDevice(), call, s));
  return mirror.CopyBack();
}

void ExpectTheSame(const Sizes& s, bool accumulate, float bias_sign) {
  SCOPED_TRACE(std::to_string(s.batch) + " x " + std::to_string(s.tokens) + " rows, " +
               std::to_string(s.in) + " to " + std::to_string(s.out));
  Tensors on_cpu(s), on_cuda(s);
  const auto call_of = [&](Tensors& tensors) {
    MatMulGradientCall call;
    call.x = tensors.x.view();
    call.dy = Slice(ConstTensorView(tensors.dy.view()), 2, s.out, s.out);
    call.weights = Transpose(tensors.weights.view(), 0, 1);
    call.bias = tensors.bias.view();
    call.accumulate = accumulate;
    call.bias_sign = bias_sign;
    return call;
  };
  ASSERT_EQ(Run(Device::kCpu, call_of(on_cpu), s), absl::OkStatus());
  ASSERT_EQ(RunOnCuda(call_of(on_cuda), s), absl::OkStatus());
  // Sums of n products of order 1 in another order differ by some 2^-24 of the root of n, at each
  // of up to n places of the order.
  const double rows = static_cast<double>(s.batch * s.tokens);
  const double bound = 0x1p-24 * (rows + 16);
  EXPECT_LE(MaxDifference(on_cuda.weights.view(), on_cpu.weights.view()), bound);
  EXPECT_LE(MaxDifference(on_cuda.bias.view(), on_cpu.bias.view()), bound);
}

TEST(MatMulGradientOnCuda, IsThatOfTheCpu) {
  for (const Sizes& s : {Sizes{1, 1, 1, 1}, Sizes{2, 5, 3, 2}, Sizes{1, 16, 64, 64},
                         Sizes{3, 11, 65, 5}, Sizes{2, 17, 7, 130}}) {
    for (const bool accumulate : {false, true}) ExpectTheSame(s, accumulate, accumulate ? -1 : 1);
  }
}

TEST(MatMulGradientOnCuda, AddsChunksOfManyRows) {
  ExpectTheSame({2, 1025, 5, 3}, /*accumulate=*/false, 1);
  ExpectTheSame({1, 4097, 2, 1}, /*accumulate=*/true, -1);
}

TEST(MatMulGradientOnCuda, WithoutRowsIsZero) {
  ExpectTheSame({0, 5, 3, 2}, /*accumulate=*/false, 1);
  ExpectTheSame({0, 5, 3, 2}, /*accumulate=*/true, 1);
}

TEST(MatMulGradientOnCuda, ReadsSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    ExpectTheSame({2, 33, 20, 10, dtype}, /*accumulate=*/false, 1);
  }
}

}  // namespace
}  // namespace tfb
