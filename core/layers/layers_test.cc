// The building blocks against naive loops in float64.
//
// Tolerances. A sum of n products in fp32, in any order and with or without fused roundings, is off
// by at most n u sum |x_k w_k| (u = 2^-24, to first order); adding a bias and a residual makes two
// more terms. Storing y in its own precision adds u_y |y|.
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "core/allocations.h"
#include "core/layers/activation.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/layers/sinusoid.h"
#include "core/random.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor Random(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
  Tensor tensor(dtype, shape);
  FillNormal(&tensor, seed, "test");
  return tensor;
}

// Threads and a workspace of exactly `bytes`, filled with NaN, between two guards.
class Machine {
 public:
  Machine(int threads, size_t bytes) : pool_(threads), memory_(DType::kF32, {Floats(bytes) + 32}) {
    Fill(memory_.view(), kNan);
    execution_.pool = &pool_;
    execution_.workspace =
        absl::MakeSpan(static_cast<std::byte*>(memory_.raw()) + kGuardBytes, bytes);
  }
  const Execution& execution() const { return execution_; }
  bool guards_intact() const {
    const absl::Span<const float> floats = memory_.span<float>();
    for (int64_t i = 0; i < 16; ++i) {
      if (!std::isnan(floats[i]) || !std::isnan(floats[floats.size() - 1 - i])) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuardBytes = 64;
  static int64_t Floats(size_t bytes) { return static_cast<int64_t>(bytes / sizeof(float)); }
  ThreadPool pool_;
  Tensor memory_;
  Execution execution_;
};

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
  }
  return kNan;
}
constexpr Activation kActivations[] = {Activation::kNone, Activation::kRelu, Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kGeluSigmoid};

// Holds y = activation(x W + b) + residual against loops; x [batch, tokens, in].
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
        // A GELU is at most 1.13 steep, and its own evaluation is good to a few roundings.
        const double bound = 1.2 * static_cast<double>(in + 2) * 0x1p-24 * (magnitude + 1) +
                             0x1p-24 * std::abs(add) +
                             1.01 * UnitRoundoff(y.dtype) * std::abs(expected);
        ASSERT_NEAR(y.Get(y.Offset(b, t, c)), expected, bound)
            << "batch " << b << " token " << t << " channel " << c;
      }
    }
  }
}

TEST(MatMul, EqualsLoopsForShapesThatStraddleTheBlocks) {
  struct Case {
    int64_t batch, tokens, in, out;
  };
  for (const Case& c : std::vector<Case>{{1, 1, 1, 1},
                                         {1, 1, 64, 64},
                                         {3, 1, 65, 63},
                                         {1, 7, 130, 200},
                                         {2, 95, 33, 16},
                                         {2, 96, 64, 65},
                                         {1, 97, 128, 17}}) {
    const Tensor x = Random(DType::kF32, {c.batch, c.tokens, c.in}, 1);
    const Tensor weights = Random(DType::kF32, {c.in, c.out}, 2);
    const Tensor bias = Random(DType::kF32, {c.out}, 3);
    const PackedMatrix matrix(weights.view(), bias.view());
    for (int threads : {1, 2}) {
      Machine machine(threads, MatMulWorkspaceBytes(threads));
      Tensor y(DType::kF32, {c.batch, c.tokens, c.out});
      Fill(y.view(), kNan);
      ASSERT_TRUE(MatMul(matrix, {x.view(), {}, y.view()}, machine.execution()).ok());
      ExpectProduct(x.view(), weights.view(), bias.view(), {}, Activation::kNone, y.view());
      EXPECT_TRUE(machine.guards_intact());
    }
  }
}

TEST(MatMul, ReadsAndWritesEveryDtypeAndStride) {
  const int64_t batch = 2, tokens = 5, heads = 3, head_dim = 24, in = 70;
  const Tensor weights = Random(DType::kF32, {in, heads * head_dim}, 2);
  const PackedMatrix matrix(weights.view());
  Machine machine(1, MatMulWorkspaceBytes(1));
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    // x lies [tokens][channels][batch], y [batch][heads][channels][tokens].
    const Tensor x_memory = Random(dtype, {tokens, in, batch}, 1);
    const ConstTensorView x = Transpose(Transpose(x_memory.view(), 1, 2), 0, 1);
    Tensor y_memory(dtype, {batch, heads * head_dim, tokens});
    Tensor residual = Random(dtype, {batch, tokens, heads * head_dim}, 4);
    const TensorView y = Transpose(y_memory.view(), 1, 2);
    Fill(y, kNan);
    ASSERT_TRUE(MatMul(matrix, {x, residual.view(), y}, machine.execution()).ok());
    ExpectProduct(x, weights.view(), {}, residual.view(), Activation::kNone, y);
  }
}

TEST(MatMul, AddsTheResidualInPlace) {
  const Tensor x = Random(DType::kF32, {1, 9, 20}, 1);
  const Tensor weights = Random(DType::kF32, {20, 80}, 2);
  const Tensor before = Random(DType::kF32, {1, 9, 80}, 3);
  Tensor y = before.Clone();
  Machine machine(2, MatMulWorkspaceBytes(2));
  ASSERT_TRUE(
      MatMul(PackedMatrix(weights.view()), {x.view(), y.view(), y.view()}, machine.execution())
          .ok());
  ExpectProduct(x.view(), weights.view(), {}, before.view(), Activation::kNone, y.view());
}

TEST(MatMul, AppliesTheActivationBetweenBiasAndResidual) {
  const Tensor x = Random(DType::kF32, {1, 3, 20}, 1);
  const Tensor weights = Random(DType::kF32, {20, 70}, 2);
  const Tensor bias = Random(DType::kF32, {70}, 3);
  const Tensor residual = Random(DType::kF32, {1, 3, 70}, 4);
  const PackedMatrix matrix(weights.view(), bias.view());
  Machine machine(1, MatMulWorkspaceBytes(1));
  for (Activation activation : kActivations) {
    Tensor y(DType::kF32, {1, 3, 70});
    ASSERT_TRUE(
        MatMul(matrix, {x.view(), residual.view(), y.view(), activation}, machine.execution())
            .ok());
    ExpectProduct(x.view(), weights.view(), bias.view(), residual.view(), activation, y.view());
  }
}

TEST(MatMul, MatricesSideBySideGiveTheirProductsSideBySide) {
  const Tensor x = Random(DType::kF32, {1, 4, 10}, 1);
  const Tensor a = Random(DType::kF32, {10, 5}, 2), b = Random(DType::kF32, {10, 90}, 3);
  const PackedMatrix both(std::vector<ConstTensorView>{a.view(), b.view()});
  Tensor y(DType::kF32, {1, 4, 95});
  Machine machine(1, MatMulWorkspaceBytes(1));
  ASSERT_TRUE(MatMul(both, {x.view(), {}, y.view()}, machine.execution()).ok());
  ExpectProduct(x.view(), a.view(), {}, {}, Activation::kNone, Slice(y.view(), 2, 0, 5));
  ExpectProduct(x.view(), b.view(), {}, {}, Activation::kNone, Slice(y.view(), 2, 5, 90));
}

TEST(MatMul, ARowDoesNotDependOnThreadsOrOnTheOtherRows) {
  const Tensor x = Random(DType::kF32, {1, 200, 150}, 1);
  const Tensor weights = Random(DType::kF32, {150, 130}, 2);
  const PackedMatrix matrix(weights.view());
  Tensor all(DType::kF32, {1, 200, 130}), one(DType::kF32, {1, 1, 130});
  Machine two(2, MatMulWorkspaceBytes(2)), single(1, MatMulWorkspaceBytes(1));
  ASSERT_TRUE(MatMul(matrix, {x.view(), {}, all.view()}, two.execution()).ok());
  for (int64_t t = 0; t < 200; ++t) {
    ASSERT_TRUE(
        MatMul(matrix, {Slice(x.view(), 1, t, 1), {}, one.view()}, single.execution()).ok());
    for (int64_t c = 0; c < 130; ++c) {
      ASSERT_EQ(one.span<float>()[c], *all.view().At<float>(0, t, c)) << t << " " << c;
    }
  }
}

TEST(MatMul, NoRowsAreNoWorkAndNoInputsGiveTheBias) {
  const Tensor bias = Random(DType::kF32, {3}, 1);
  const Tensor weights(DType::kF32, {0, 3}), x(DType::kF32, {1, 2, 0}),
      none(DType::kF32, {0, 5, 0});
  const PackedMatrix matrix(weights.view(), bias.view());
  Machine machine(1, MatMulWorkspaceBytes(1));
  Tensor y(DType::kF32, {1, 2, 3}), empty(DType::kF32, {0, 5, 3});
  ASSERT_TRUE(MatMul(matrix, {x.view(), {}, y.view()}, machine.execution()).ok());
  EXPECT_EQ(*y.view().At<float>(0, 1, 2), bias.span<float>()[2]);
  EXPECT_TRUE(MatMul(matrix, {none.view(), {}, empty.view()}, machine.execution()).ok());
}

TEST(MatMul, ShapesThatDoNotFitAreAnError) {
  const Tensor x(DType::kF32, {1, 2, 4}), weights(DType::kF32, {5, 3});
  Tensor y(DType::kF32, {1, 2, 3});
  Machine machine(1, MatMulWorkspaceBytes(1));
  const absl::Status status =
      MatMul(PackedMatrix(weights.view()), {x.view(), {}, y.view()}, machine.execution());
  EXPECT_EQ(status.message(), "a product of x [1, 2, 4] with W [5, 3] does not give y [1, 2, 3]");
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

TEST(LayerNorm, EqualsLoopsAlsoWithALargeCommonOffset) {
  for (int64_t channels : {1, 7, 8, 64, 131}) {
    for (double offset : {0.0, 1000.0}) {
      Tensor x(DType::kF32, {2, 19, channels});
      FillNormal(&x, 1, "x", offset);
      const Tensor gamma = Random(DType::kF32, {channels}, 2);
      const Tensor beta = Random(DType::kF32, {channels}, 3);
      Tensor y(DType::kF32, {2, 19, channels});
      Fill(y.view(), kNan);
      Machine machine(2, LayerNormWorkspaceBytes(channels, 2));
      ASSERT_TRUE(
          LayerNorm({x.view(), gamma.span<float>().data(), beta.span<float>().data(), y.view()},
                    machine.execution())
              .ok());
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
          // Four roundings of the normalised value, one of the sum.
          const double bound =
              0x1p-24 * (4 * std::abs(gamma.span<float>()[c] * normal) + std::abs(expected)) * 1.01;
          ASSERT_NEAR(y.span<float>()[row * channels + c], expected, bound) << channels;
        }
      }
    }
  }
}

TEST(LayerNorm, WorksInPlaceOnStridedHalfPrecisionRows) {
  Tensor memory = Random(DType::kBF16, {4, 12, 6}, 1);  // channels in the middle
  const Tensor before = memory.CloneAs(DType::kF64);
  const TensorView x = Transpose(memory.view(), 1, 2);
  const std::vector<float> gamma(12, 1), beta(12, 0);
  Machine machine(1, LayerNormWorkspaceBytes(12, 1));
  ASSERT_TRUE(LayerNorm({x, gamma.data(), beta.data(), x}, machine.execution()).ok());
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

TEST(FeedForward, IsTwoProductsWithTheActivationBetween) {
  const int64_t in = 40, inner = 96, rows = 10;
  const Tensor x = Random(DType::kF32, {1, rows, in}, 1);
  const Tensor w1 = Random(DType::kF32, {in, inner}, 2), b1 = Random(DType::kF32, {inner}, 3);
  const Tensor w2 = Random(DType::kF32, {inner, in}, 4), b2 = Random(DType::kF32, {in}, 5);
  for (Activation activation : kActivations) {
    const FeedForward layer(PackedMatrix(w1.view(), b1.view()), PackedMatrix(w2.view(), b2.view()),
                            activation);
    Machine machine(2, FeedForward::workspace_bytes(rows, inner, 2));
    Tensor y(DType::kF32, {1, rows, in});
    ASSERT_TRUE(layer.Run(x.view(), x.view(), y.view(), machine.execution()).ok());
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

TEST(Add, SumsRowsOfAnyStride) {
  const Tensor a = Random(DType::kBF16, {2, 70, 5}, 1), b = Random(DType::kF32, {2, 5, 70}, 2);
  Tensor y(DType::kF32, {2, 5, 70});
  Machine machine(2, 0);
  ASSERT_TRUE(Add(Transpose(a.view(), 1, 2), b.view(), y.view(), machine.execution()).ok());
  ForEachOffset(b.view(), Transpose(a.view(), 1, 2), [&](int64_t at, int64_t from) {
    EXPECT_EQ(y.view().Get(at),
              static_cast<float>(b.view().Get(at)) + static_cast<float>(a.view().Get(from)));
  });
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

TEST(Layers, CallsAllocateNothing) {
  const Tensor x = Random(DType::kBF16, {3, 50, 130}, 1);
  const Tensor weights = Random(DType::kF32, {130, 130}, 2), bias = Random(DType::kF32, {130}, 3);
  const FeedForward layer(PackedMatrix(weights.view(), bias.view()),
                          PackedMatrix(weights.view(), bias.view()), Activation::kGelu);
  Tensor y(DType::kF32, {3, 50, 130});
  Machine machine(2, FeedForward::workspace_bytes(150, 130, 2) + LayerNormWorkspaceBytes(130, 2));
  const float* row = bias.span<float>().data();
  const int64_t before = AllocationCount();
  const bool ok = layer.Run(x.view(), x.view(), y.view(), machine.execution()).ok() &&
                  LayerNorm({y.view(), row, row, y.view()}, machine.execution()).ok() &&
                  Add(x.view(), y.view(), y.view(), machine.execution()).ok();
  EXPECT_EQ(AllocationCount() - before, 0);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace tfb
