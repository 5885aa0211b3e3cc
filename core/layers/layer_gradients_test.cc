// Tests gradients against central differences of plain float64 formulas.
//
// With L = sum of g * f, the test compares <gradient, d> with (L(x + h d) - L(x - h d)) / 2h for
// unit directions d, random ones and single coordinates, h = 1e-5 |x|. That quotient is off by
// terms in h^2 and by the rounding of L in float64, 2^-53 / 1e-5 of it: together under 1e-9 of the
// magnitudes below.
//
// Tolerances. An error e of a gradient moves <gradient, d> by at most |e|. With u = 2^-24, a sum of
// n products in fp32 is off by at most n u times the sum of their absolute values, and so, for a
// whole product A B, by n u |A| |B| in the Frobenius norm. Tests of one step name those norms. A
// layer of several steps has a bound of n u, n the number of terms of all sums on the way, times
// what its gradient sums: that is of the size of the gradient or, where it cancels, of |g| |y| /
// |x|, by which the loss depends on relative changes of x. Independent roundings add up to the root
// of n u, which leaves the root of n for the condition of what lies between. Storing in 16 bits
// adds their roundoff times the gradient.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/allocations.h"
#include "core/layers/activation.h"
#include "core/layers/activation_rows.h"
#include "core/layers/device_testing.h"
#include "core/layers/feed_forward.h"
#include "core/layers/gate.h"
#include "core/layers/layer_norm.h"
#include "core/layers/log_softmax.h"
#include "core/layers/look_up.h"
#include "core/layers/matmul.h"
#include "core/layers/matmul_gradient.h"
#include "core/random.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

#define ASSERT_OK(expression) ASSERT_EQ((expression), absl::OkStatus())

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kU = 0x1p-24;
constexpr Activation kActivations[] = {Activation::kNone,        Activation::kRelu,
                                       Activation::kGelu,        Activation::kGeluTanh,
                                       Activation::kGeluSigmoid, Activation::kTanh};

Tensor Random(DType dtype, absl::Span<const int64_t> shape, const std::string& name,
              double deviation = 1) {
  Tensor tensor(dtype, shape);
  FillNormal(&tensor, 1, name, 0, deviation);
  return tensor;
}
Tensor Nan(DType dtype, absl::Span<const int64_t> shape) {
  Tensor tensor(dtype, shape);
  Fill(tensor.view(), kNan);
  return tensor;
}

// ---- Matrices of float64 ----

struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> values;

  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), values(rows * columns) {}
  // Copies [..., columns], or a vector as one row.
  explicit Matrix(const ConstTensorView& view)
      : Matrix(view.rank == 1 ? 1
                              : view.num_elements() / std::max<int64_t>(view.dim(view.rank - 1), 1),
               view.dim(view.rank - 1)) {
    CopyElements(view, TensorView(values.data(), DType::kF64, view.shape()));
  }
  double& at(int64_t r, int64_t c) { return values[r * columns + c]; }
  double at(int64_t r, int64_t c) const { return values[r * columns + c]; }
};
using Matrices = std::map<std::string, Matrix>;

Matrix Map(const Matrix& a, const std::function<double(double)>& f) {
  Matrix result = a;
  for (double& value : result.values) value = f(value);
  return result;
}
Matrix Combine(const Matrix& a, const Matrix& b, const std::function<double(double, double)>& f) {
  Matrix result = a;  // b has a's rows, or one that counts for all
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.columns; ++c)
      result.at(r, c) = f(a.at(r, c), b.at(b.rows == 1 ? 0 : r, c));
  }
  return result;
}
Matrix operator+(const Matrix& a, const Matrix& b) { return Combine(a, b, std::plus<double>()); }
Matrix operator-(const Matrix& a, const Matrix& b) { return Combine(a, b, std::minus<double>()); }
Matrix operator*(const Matrix& a, const Matrix& b) {  // channel by channel
  return Combine(a, b, std::multiplies<double>());
}
Matrix Times(const Matrix& a, const Matrix& b) {
  Matrix product(a.rows, b.columns);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t k = 0; k < a.columns; ++k) {
      for (int64_t c = 0; c < b.columns; ++c) product.at(r, c) += a.at(r, k) * b.at(k, c);
    }
  }
  return product;
}
double Norm(const Matrix& a) {
  double sum = 0;
  for (const double value : a.values) sum += value * value;
  return std::sqrt(sum);
}
double Norm(const ConstTensorView& view) { return Norm(Matrix(view)); }

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

// ---- The comparison ----

using Formula = std::function<Matrix(const Matrices&)>;

double Loss(const Formula& f, const Matrices& at, const Matrix& g) {
  const Matrix value = f(at);
  double loss = 0;
  for (size_t n = 0; n < g.values.size(); ++n) loss += g.values[n] * value.values[n];
  return loss;
}

// A gradient that a layer wrote, and the bound of its error in the Euclidean norm: absolute, or by
// the number of terms of all sums.
struct Written {
  std::string name;
  ConstTensorView gradient;
  double bound = 0;
  double terms = 0;
};

// Compares gradients of L = sum of g * f(at) with central differences.
void ExpectGradients(const Formula& f, const Matrices& at, const Matrix& g,
                     const std::vector<Written>& gradients) {
  for (const Written& of : gradients) {
    SCOPED_TRACE(of.name);
    const Matrix gradient(of.gradient);
    const Matrix& x = at.at(of.name);
    const int64_t size = static_cast<int64_t>(x.values.size());
    ASSERT_EQ(static_cast<int64_t>(gradient.values.size()), size);
    const double size_of_terms = Norm(gradient) + Norm(g) * Norm(f(at)) / Norm(x);
    const double bound = of.bound + UnitRoundoff(of.gradient.dtype) * Norm(gradient) +
                         (of.terms * kU + 1e-9) * size_of_terms;
    for (int direction = 0; direction < 8; ++direction) {
      Matrix d(x.rows, x.columns);
      if (direction < 4) {
        Tensor random = Random(DType::kF64, {size}, of.name + std::to_string(direction));
        d.values.assign(random.span<double>().begin(), random.span<double>().end());
        const double norm = Norm(d);
        for (double& value : d.values) value /= norm;
      } else {
        d.values[(size - 1) * (direction - 4) / 3] = 1;
      }
      const double h = 1e-5 * Norm(x);
      double expected = 0, written = 0;
      for (const double sign : {1.0, -1.0}) {
        Matrices moved = at;
        for (int64_t n = 0; n < size; ++n) moved.at(of.name).values[n] += sign * h * d.values[n];
        expected += sign * Loss(f, moved, g) / (2 * h);
      }
      for (int64_t n = 0; n < size; ++n) written += gradient.values[n] * d.values[n];
      EXPECT_NEAR(written, expected, bound) << "direction " << direction;
    }
  }
}

class ActivationGradientOn : public OnEveryDevice {};
class LayerNormGradientOn : public OnEveryDevice {};
class LogSoftmaxGradientOn : public OnEveryDevice {};
class FeedForwardGradientOn : public OnEveryDevice {};
class GateGradientOn : public ::testing::TestWithParam<Device> {};

// Runs `compute` with 1, 2 and 3 threads, which fills tensors, and expects the same bits.
void ExpectTheSameBits(const std::function<std::vector<Tensor>(int threads)>& compute) {
  const std::vector<Tensor> one = compute(1);
  for (const int threads : {2, 3}) {
    const std::vector<Tensor> more = compute(threads);
    ASSERT_EQ(one.size(), more.size());
    for (size_t n = 0; n < one.size(); ++n) {
      const auto* a = static_cast<const std::byte*>(one[n].raw());
      const auto* b = static_cast<const std::byte*>(more[n].raw());
      EXPECT_TRUE(std::equal(a, a + one[n].bytes(), b)) << "tensor " << n << " of " << threads;
    }
  }
}

// ---- Activations ----

// Computes d activation'(x) in place of d.
void DifferentiateOn(Device device, Activation activation, std::vector<float> x,
                     std::vector<float>* d) {
  const Shape shape = {1, static_cast<int64_t>(x.size())};
  const Machine machine(device, 2, 0);
  Placed placed(device);
  const TensorView of_d = placed.Out(TensorView(d->data(), DType::kF32, shape));
  EXPECT_EQ(MultiplyByDerivative(device, activation,
                                 placed.In(ConstTensorView(x.data(), DType::kF32, shape)), of_d,
                                 of_d, machine.execution()),
            absl::OkStatus());
  placed.Back();
}

TEST_P(ActivationGradientOn, IsThatOfCentralDifferencesOverItsWholeRange) {
  for (const Activation activation : kActivations) {
    std::vector<float> x, d;
    for (double value = -30; value <= 30; value += 0.0137) {
      x.push_back(static_cast<float>(value));
      d.push_back(static_cast<float>(1 + std::cos(value)));
    }
    std::vector<float> gradient = d;
    DifferentiateOn(device(), activation, x, &gradient);
    for (size_t n = 0; n < x.size(); ++n) {
      const double h = 1e-5 * std::max(1.0, std::abs(double{x[n]}));
      if (activation == Activation::kRelu && std::abs(x[n]) < h) continue;
      const double slope = (Exact(activation, x[n] + h) - Exact(activation, x[n] - h)) / (2 * h);
      // A derivative is a few terms of size up to 1.2, each good to some roundings; the exponents
      // that they take have up to |x|^2 / 2 < 16 where p(x) counts, and carry its rounding.
      EXPECT_NEAR(gradient[n], slope * d[n], 2 * (64 * kU + 1e-9))
          << Name(activation) << " of " << x[n];
    }
  }
}

TEST_P(ActivationGradientOn, FarOutItIsThatOfTheIdentityOrZeroAndNanStays) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation activation : kActivations) {
    std::vector<float> d = {2, 2, 2, 2, 2, 2};
    DifferentiateOn(device(), activation, {1e3f, -1e3f, 1e13f, -1e13f, 0.0f, nan}, &d);
    const bool is_none = activation == Activation::kNone, is_tanh = activation == Activation::kTanh;
    for (const int n : {0, 2}) {
      EXPECT_EQ(d[n], is_tanh ? 0 : 2) << Name(activation);
      EXPECT_EQ(d[n + 1], is_none ? 2 : 0) << Name(activation);
    }
    EXPECT_EQ(d[4], activation == Activation::kRelu ? 0 : is_none || is_tanh ? 2 : 1);
    EXPECT_EQ(std::isnan(d[5]), !is_none) << Name(activation);
  }
  std::vector<float> d = {nan};
  DifferentiateOn(device(), Activation::kRelu, {0}, &d);
  EXPECT_EQ(d[0], 0);
  d = {0};
  DifferentiateOn(device(), Activation::kGelu, {nan}, &d);
  EXPECT_EQ(d[0], 0);
}

// ---- Products ----

struct ProductGradients {
  Tensor dx, weights, bias;
};
// Computes the gradients of x W + b with x and dy as given, and dx in the dtype.
ProductGradients GradientsOfProduct(const ConstTensorView& x, const Tensor& weights,
                                    const ConstTensorView& dy, DType dtype, int threads) {
  const int64_t in = weights.dim(0), out = weights.dim(1),
                rows = x.num_elements() / std::max<int64_t>(in, 1);
  ProductGradients result = {Nan(dtype, x.shape()), Nan(DType::kF32, {in, out}),
                             Nan(DType::kF32, {out})};
  const PackedMatrix transposed =
      PackedMatrix::CreateTransposed(Device::kCpu, {weights.view()}).value();
  const Machine machine(Device::kCpu, threads,
                        std::max(MatMulWorkspaceBytes(Device::kCpu, rows, out, in, threads),
                                 MatMulGradientWorkspaceBytes(rows, in, out, threads)));
  EXPECT_EQ(MatMul(transposed, {dy, {}, result.dx.view()}, machine.execution()), absl::OkStatus());
  EXPECT_EQ(MatMulGradient({x, dy, result.weights.view(), result.bias.view()}, machine.execution()),
            absl::OkStatus());
  EXPECT_TRUE(machine.guards_intact());
  return result;
}

Formula Product() {
  return [](const Matrices& at) { return Times(at.at("x"), at.at("w")) + at.at("b"); };
}

void ExpectProductGradients(const ConstTensorView& x, const Tensor& weights, const Tensor& bias,
                            const ConstTensorView& dy, DType dtype) {
  const ProductGradients of = GradientsOfProduct(x, weights, dy, dtype, 2);
  const double rows = static_cast<double>(x.dim(0) * (x.rank == 3 ? x.dim(1) : 1));
  const double out = static_cast<double>(weights.dim(1));
  const Matrices at = {{"x", Matrix(x)}, {"w", Matrix(weights.view())}, {"b", Matrix(bias.view())}};
  ExpectGradients(Product(), at, Matrix(dy),
                  {{"x", of.dx.view(), out * kU * Norm(dy) * Norm(weights.view())},
                   {"w", of.weights.view(), rows * kU * Norm(x) * Norm(dy)},
                   {"b", of.bias.view(), rows * kU * std::sqrt(rows) * Norm(dy)}});
}

TEST(MatMulGradient, IsThatOfCentralDifferencesForShapesThatStraddleTheBlocks) {
  struct Case {
    int64_t rows, in, out;
  };
  for (const Case& c : std::vector<Case>{{1, 1, 1},
                                         {7, 1, 65},
                                         {63, 383, 63},
                                         {64, 384, 64},
                                         {65, 385, 65},
                                         {255, 5, 17},
                                         {257, 33, 16},
                                         {600, 20, 130},
                                         {1200, 7, 3}}) {
    SCOPED_TRACE(std::to_string(c.rows) + "x" + std::to_string(c.in) + "x" + std::to_string(c.out));
    const Tensor x = Random(DType::kF32, {c.rows, c.in}, "x");
    ExpectProductGradients(x.view(), Random(DType::kF32, {c.in, c.out}, "w"),
                           Random(DType::kF32, {c.out}, "b"),
                           Random(DType::kF32, {c.rows, c.out}, "dy").view(), DType::kF32);
  }
}

TEST(MatMulGradient, ReadsEveryDtypeAndStride) {
  const int64_t batch = 3, tokens = 50, in = 70, out = 40;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Tensor x_memory = Random(dtype, {tokens, in, batch}, "x");
    const Tensor dy_memory = Random(dtype, {batch, out, tokens}, "dy");
    ExpectProductGradients(Transpose(Transpose(x_memory.view(), 1, 2), 0, 1),
                           Random(DType::kF32, {in, out}, "w"), Random(DType::kF32, {out}, "b"),
                           Transpose(dy_memory.view(), 1, 2), dtype);
  }
}

TEST(MatMulGradient, ItsBitsDoNotDependOnThreads) {
  const Tensor x = Random(DType::kBF16, {1000, 200}, "x"), w = Random(DType::kF32, {200, 70}, "w");
  const Tensor dy = Random(DType::kF32, {1000, 70}, "dy");
  ExpectTheSameBits([&](int threads) {
    ProductGradients of = GradientsOfProduct(x.view(), w, dy.view(), DType::kF32, threads);
    std::vector<Tensor> all;
    all.push_back(std::move(of.dx));
    all.push_back(std::move(of.weights));
    all.push_back(std::move(of.bias));
    return all;
  });
}

TEST(MatMulGradient, AccumulatesIntoStridedViewsWithTheSignOfTheBias) {
  for (const int64_t rows : {9, 900}) {
    const Tensor x = Random(DType::kF32, {rows, 20}, "x"),
                 dy = Random(DType::kF32, {rows, 30}, "dy");
    const ProductGradients once =
        GradientsOfProduct(x.view(), Random(DType::kF32, {20, 30}, "w"), dy.view(), DType::kF32, 1);
    Tensor weights(DType::kF32, {30, 20}), bias(DType::kF32, {30, 2});
    Fill(weights.view(), 1);
    Fill(bias.view(), 1);
    const TensorView to = Transpose(weights.view(), 0, 1);
    const TensorView to_bias(bias.raw(), DType::kF32, Shape{30}, Shape{2});
    const Machine machine(Device::kCpu, 2, MatMulGradientWorkspaceBytes(rows, 20, 30, 2));
    for (int n = 0; n < 2; ++n) {
      ASSERT_OK(MatMulGradient({x.view(), dy.view(), to, to_bias, /*accumulate=*/true, {}, -1},
                               machine.execution()));
    }
    for (int64_t c = 0; c < 30; ++c) {
      const double of_bias = once.bias.view().Get(c);
      EXPECT_NEAR(to_bias.Get(2 * c), 1 - 2 * of_bias, 4 * kU * (1 + std::abs(of_bias)));
      EXPECT_EQ(bias.view().Get(2 * c + 1), 1) << "written beside the gradient";
      for (int64_t k = 0; k < 20; ++k) {
        const double of = once.weights.view().Get(k * 30 + c);
        ASSERT_NEAR(to.Get(to.Offset(k, c)), 1 + 2 * of, 4 * kU * (1 + std::abs(of)));
      }
    }
  }
}

TEST(MatMulGradient, WithoutRowsItIsZeroAndWithoutInputsOnlyTheBiasHasOne) {
  const ProductGradients none =
      GradientsOfProduct(Tensor(DType::kF32, {0, 20}).view(), Random(DType::kF32, {20, 30}, "w"),
                         Tensor(DType::kF32, {0, 30}).view(), DType::kF32, 2);
  EXPECT_EQ(Norm(none.weights.view()), 0);
  EXPECT_EQ(Norm(none.bias.view()), 0);
  const Tensor dy = Random(DType::kF32, {5, 3}, "dy");
  const ProductGradients of = GradientsOfProduct(
      Tensor(DType::kF32, {5, 0}).view(), Tensor(DType::kF32, {0, 3}), dy.view(), DType::kF32, 1);
  for (int64_t c = 0; c < 3; ++c) {
    double sum = 0;
    for (int64_t r = 0; r < 5; ++r) sum += dy.view().Get(r * 3 + c);
    EXPECT_NEAR(of.bias.view().Get(c), sum, 5 * kU * 10);
  }
}

TEST(MatMulGradient, ShapesThatDoNotFitAreAnError) {
  const Tensor x(DType::kF32, {4, 5}), dy(DType::kF32, {4, 6}), short_dy(DType::kF32, {3, 6});
  Tensor weights(DType::kF32, {5, 6}), swapped(DType::kF32, {6, 5}), half(DType::kF16, {5, 6});
  const Machine machine(Device::kCpu, 1, MatMulGradientWorkspaceBytes(4, 5, 6, 1));
  for (const MatMulGradientCall& call :
       std::vector<MatMulGradientCall>{{x.view(), short_dy.view(), weights.view(), {}},
                                       {x.view(), dy.view(), swapped.view(), {}},
                                       {x.view(), dy.view(), half.view(), {}}}) {
    EXPECT_EQ(MatMulGradient(call, machine.execution()).code(), absl::StatusCode::kInternal);
  }
}

TEST(PackedMatrix, TheTransposeOfMatricesSideBySideMultipliesByAllOfThem) {
  const Tensor a = Random(DType::kF32, {70, 5}, "a"), b = Random(DType::kF64, {70, 90}, "b");
  const PackedMatrix transposed =
      PackedMatrix::CreateTransposed(Device::kCpu, {a.view(), b.view()}).value();
  const Tensor dy = Random(DType::kF32, {3, 95}, "dy");
  Tensor dx = Nan(DType::kF32, {3, 70});
  const Machine machine(Device::kCpu, 1, MatMulWorkspaceBytes(Device::kCpu, 3, 95, 70, 1));
  ASSERT_OK(MatMul(transposed, {dy.view(), {}, dx.view()}, machine.execution()));
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t k = 0; k < 70; ++k) {
      double sum = 0, magnitude = 0;
      for (int64_t c = 0; c < 95; ++c) {
        const double w = c < 5 ? a.view().Get(k * 5 + c) : b.view().Get(k * 90 + c - 5);
        sum += dy.view().Get(r * 95 + c) * w;
        magnitude += std::abs(dy.view().Get(r * 95 + c) * w);
      }
      ASSERT_NEAR(dx.view().Get(r * 70 + k), sum, 97 * kU * magnitude);
    }
  }
}

TEST(MatMulGradient, NanOfARowWithoutAGradientReachesNothing) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor x = Random(dtype, {70, 20}, "x");
    Tensor dy = Random(DType::kF32, {70, 100}, "dy"), with_nan = x.Clone();
    for (const int64_t row : {3, 69}) {
      Fill(Slice(dy.view(), 0, row, 1), 0);
      Fill(Slice(with_nan.view(), 0, row, 1), kNan);
    }
    const Tensor w = Random(DType::kF32, {20, 100}, "w");
    const ProductGradients of = GradientsOfProduct(x.view(), w, dy.view(), DType::kF32, 1);
    const ProductGradients hidden =
        GradientsOfProduct(with_nan.view(), w, dy.view(), DType::kF32, 1);
    EXPECT_EQ(Norm(Matrix(of.weights.view()) - Matrix(hidden.weights.view())), 0);
    EXPECT_EQ(Norm(Slice(of.dx.view(), 0, 3, 1)), 0);
    *dy.view().MutableAt<float>(3, 99) = 1;
    const ProductGradients seen = GradientsOfProduct(with_nan.view(), w, dy.view(), DType::kF32, 1);
    EXPECT_TRUE(std::isnan(seen.weights.view().Get(99)));
  }
}

// ---- Layer norm ----

Matrix NormOf(const Matrix& x, const Matrix& gamma, const Matrix& beta, double epsilon) {
  Matrix y = x;
  const double n = static_cast<double>(x.columns);
  for (int64_t r = 0; r < x.rows; ++r) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < x.columns; ++c) mean += x.at(r, c) / n;
    for (int64_t c = 0; c < x.columns; ++c) variance += std::pow(x.at(r, c) - mean, 2) / n;
    for (int64_t c = 0; c < x.columns; ++c) {
      y.at(r, c) =
          gamma.at(0, c) * (x.at(r, c) - mean) / std::sqrt(variance + epsilon) + beta.at(0, c);
    }
  }
  return y;
}

TEST_P(LayerNormGradientOn, IsThatOfCentralDifferencesForEveryDtypeAndStride) {
  struct Case {
    int64_t batch, tokens, channels;
    DType dtype;
  };
  for (const Case& c : std::vector<Case>{{1, 1, 2, DType::kF32},
                                         {2, 3, 65, DType::kF32},
                                         {3, 700, 8, DType::kF32},
                                         {2, 20, 33, DType::kBF16},
                                         {2, 20, 33, DType::kF16}}) {
    SCOPED_TRACE(c.channels);
    const Tensor gamma = Random(DType::kF32, {c.channels}, "gamma");
    const Tensor beta = Random(DType::kF32, {c.channels}, "beta");
    const Tensor x_memory = Random(c.dtype, {c.tokens, c.batch, c.channels}, "x");
    const Tensor dy_memory = Random(c.dtype, {c.batch, c.channels, c.tokens}, "dy");
    const Tensor added = Random(c.dtype, {c.batch, c.tokens, c.channels}, "added");
    const ConstTensorView x = Transpose(x_memory.view(), 0, 1);
    const ConstTensorView dy = Transpose(dy_memory.view(), 1, 2);
    const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), beta.view()).value();
    const int64_t rows = c.batch * c.tokens;
    const Machine machine(device(), 2,
                          LayerNorm::backward_workspace_bytes(device(), rows, c.channels, 2));
    Tensor dx = Nan(c.dtype, x.shape());
    Tensor dgamma = Nan(DType::kF32, {c.channels}), dbeta = Nan(DType::kF32, {c.channels});
    ASSERT_OK(norm.Backward(
        {In(x), In(dy), In(added.view()), Out(dx.view()), Out(dgamma.view()), Out(dbeta.view())},
        machine.execution()));
    Back();
    EXPECT_TRUE(machine.guards_intact());
    // L has the summand <added, x>, which adds itself to dx.
    const Matrix of_added(added.view());
    const Formula f = [&](const Matrices& at) {
      Matrix y = NormOf(at.at("x"), at.at("gamma"), at.at("beta"), kLayerNormEpsilon);
      y.values.insert(y.values.end(), at.at("x").values.begin(), at.at("x").values.end());
      y.rows *= 2;
      return y;
    };
    Matrix g(dy);
    g.values.insert(g.values.end(), of_added.values.begin(), of_added.values.end());
    const Matrix of_x(x);
    double largest_scale = 0, largest_gamma = 0;
    for (int64_t r = 0; r < of_x.rows; ++r) {
      double mean = 0, variance = 0;
      for (int64_t n = 0; n < c.channels; ++n)
        mean += of_x.at(r, n) / static_cast<double>(c.channels);
      for (int64_t n = 0; n < c.channels; ++n) {
        variance += std::pow(of_x.at(r, n) - mean, 2) / static_cast<double>(c.channels);
      }
      largest_scale = std::max(largest_scale, 1 / std::sqrt(variance + kLayerNormEpsilon));
    }
    for (int64_t n = 0; n < c.channels; ++n) {
      largest_gamma = std::max(largest_gamma, std::abs(gamma.view().Get(n)));
    }
    // dx: three terms, none longer than scale gamma dy, of four roundings each; a normalised row
    // has the length sqrt(channels), and its own three roundings.
    const double of_dy = Norm(dy);
    const double in_rows = (static_cast<double>(rows) / 64 + 64 + 4) * kU;
    ExpectGradients(
        f, {{"x", of_x}, {"gamma", Matrix(gamma.view())}, {"beta", Matrix(beta.view())}}, g,
        {{"x", dx.view(), 16 * kU * (largest_scale * largest_gamma * of_dy + Norm(of_added))},
         {"gamma", dgamma.view(),
          in_rows * of_dy * std::sqrt(static_cast<double>(rows * c.channels))},
         {"beta", dbeta.view(), in_rows * of_dy * std::sqrt(static_cast<double>(rows))}});
  }
}

TEST_P(LayerNormGradientOn, ItsBitsDoNotDependOnThreadsAndItAccumulates) {
  const Tensor x = Random(DType::kF32, {300, 40}, "x"), dy = Random(DType::kF32, {300, 40}, "dy");
  const Tensor gamma = Random(DType::kF32, {40}, "gamma");
  const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), gamma.view()).value();
  ExpectTheSameBits([&](int threads) {
    const Machine machine(device(), threads,
                          LayerNorm::backward_workspace_bytes(device(), 300, 40, threads));
    std::vector<Tensor> all;
    all.push_back(dy.Clone());  // dx in place of dy
    for (int n = 0; n < 2; ++n) all.push_back(Nan(DType::kF32, {40}));
    const auto differentiate = [&](bool accumulate, bool in_place) {
      const TensorView of_dy = Out(all[0].view());
      EXPECT_EQ(norm.Backward({In(x.view()),
                               of_dy,
                               {},
                               in_place ? of_dy : TensorView(),
                               Out(all[1].view()),
                               Out(all[2].view()),
                               accumulate},
                              machine.execution()),
                absl::OkStatus());
      Back();
    };
    differentiate(/*accumulate=*/false, /*in_place=*/false);
    const Tensor once = all[1].Clone();
    differentiate(/*accumulate=*/true, /*in_place=*/true);
    // 64 groups are added one after the other to what is there.
    for (int64_t c = 0; c < 40; ++c) {
      const double of = once.view().Get(c);
      EXPECT_NEAR(all[1].view().Get(c), 2 * of, 64 * kU * 300);
    }
    return all;
  });
}

TEST_P(LayerNormGradientOn, ShapesThatDoNotFitAreAnErrorAndNoRowsHaveNoGradient) {
  const Tensor gamma = Random(DType::kF32, {4}, "gamma");
  const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), gamma.view()).value();
  const Machine machine(device(), 1, LayerNorm::backward_workspace_bytes(device(), 3, 4, 1));
  const Tensor x(DType::kF32, {3, 4}), other(DType::kF32, {3, 5}), empty(DType::kF32, {0, 4});
  EXPECT_EQ(norm.Backward({x.view(), other.view(), {}, {}, {}, {}}, machine.execution()).code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(norm.Backward({other.view(), other.view(), {}, {}, {}, {}}, machine.execution()).code(),
            absl::StatusCode::kInternal);
  Tensor dgamma = Nan(DType::kF32, {4});
  ASSERT_OK(norm.Backward({In(empty.view()), In(empty.view()), {}, {}, Out(dgamma.view()), {}},
                          machine.execution()));
  Back();
  EXPECT_EQ(Norm(dgamma.view()), 0);
}

TEST_P(LayerNormGradientOn, NanOfARowWithoutAGradientReachesNothing) {
  const int64_t rows = 40, channels = 70;
  const Tensor gamma = Random(DType::kF32, {channels}, "gamma");
  const LayerNorm norm = LayerNorm::Create(device(), gamma.view(), gamma.view()).value();
  const Tensor added = Random(DType::kF32, {rows, channels}, "added");
  Tensor dy = Random(DType::kF32, {rows, channels}, "dy");
  Fill(Slice(dy.view(), 0, 17, 1), 0);
  const auto differentiate = [&](const Tensor& x) {
    const Machine machine(device(), 1,
                          LayerNorm::backward_workspace_bytes(device(), rows, channels, 1));
    std::vector<Tensor> all;
    all.push_back(Nan(DType::kF32, {rows, channels}));
    for (int n = 0; n < 2; ++n) all.push_back(Nan(DType::kF32, {channels}));
    EXPECT_EQ(norm.Backward({In(x.view()), In(dy.view()), In(added.view()), Out(all[0].view()),
                             Out(all[1].view()), Out(all[2].view())},
                            machine.execution()),
              absl::OkStatus());
    Back();
    return all;
  };
  Tensor x = Random(DType::kF32, {rows, channels}, "x");
  const std::vector<Tensor> expected = differentiate(x);
  Fill(Slice(x.view(), 0, 17, 1), kNan);
  const std::vector<Tensor> hidden = differentiate(x);
  for (size_t n = 0; n < expected.size(); ++n) {
    EXPECT_EQ(Norm(Matrix(hidden[n].view()) - Matrix(expected[n].view())), 0) << n;
  }
  EXPECT_EQ(Norm(Matrix(Slice(hidden[0].view(), 0, 17, 1)) - Matrix(Slice(added.view(), 0, 17, 1))),
            0);
  *dy.view().MutableAt<float>(17, 69) = 1;
  EXPECT_TRUE(std::isnan(differentiate(x)[1].view().Get(69)));
}

// 1025 rows are 61 groups of 17, and 1024 are 64 of 16.
TEST_P(LayerNormGradientOn, TheWorkspaceOfSomeRowsIsEnoughForFewer) {
  for (const int64_t rows : {1024, 1009}) {
    const Tensor x = Random(DType::kF32, {rows, 1}, "x"), one = Random(DType::kF32, {1}, "one");
    const LayerNorm norm = LayerNorm::Create(device(), one.view(), one.view()).value();
    const Machine machine(device(), 1, LayerNorm::backward_workspace_bytes(device(), 1025, 1, 1));
    Tensor dbeta = Nan(DType::kF32, {1});
    ASSERT_OK(norm.Backward({In(x.view()), In(x.view()), {}, {}, {}, Out(dbeta.view())},
                            machine.execution()));
    Back();
    EXPECT_TRUE(machine.guards_intact());
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += x.view().Get(r);
    EXPECT_NEAR(dbeta.view().Get(0), sum, (64 + 17) * kU * static_cast<double>(rows));
  }
}

// ---- Log softmax ----

TEST_P(LogSoftmaxGradientOn, IsThatOfCentralDifferencesForInputOrOutput) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const int64_t rows = 33, channels = 50;
    const Tensor x_memory = Random(dtype, {channels, rows}, "x", 3);
    const ConstTensorView x = Transpose(x_memory.view(), 0, 1);
    const Tensor dy = Random(DType::kF32, {rows, channels}, "dy");
    const Machine machine(device(), 2, LogSoftmaxWorkspaceBytes(device(), channels, 2));
    Tensor y(DType::kF32, {rows, channels});
    ASSERT_OK(LogSoftmax(device(), In(x), Out(y.view()), machine.execution()));
    Back();
    const Formula f = [](const Matrices& at) {
      Matrix result = at.at("x");
      for (int64_t r = 0; r < result.rows; ++r) {
        double sum = 0;
        for (int64_t c = 0; c < result.columns; ++c) sum += std::exp(result.at(r, c));
        for (int64_t c = 0; c < result.columns; ++c) result.at(r, c) -= std::log(sum);
      }
      return result;
    };
    for (const ConstTensorView& of : {x, ConstTensorView(y.view())}) {
      Tensor dx = dy.Clone();
      const TensorView in_place = Out(dx.view());
      ASSERT_OK(LogSoftmaxBackward(device(), In(of), in_place, in_place, machine.execution()));
      Back();
      // A row's weights are good to (channels + 8) u, and the logits that they are of to u max|y| <
      // 32 u; they multiply a sum of at most sqrt(channels) |dy|.
      ExpectGradients(
          f, {{"x", Matrix(x)}}, Matrix(dy.view()),
          {{"x", dx.view(), (channels + 40) * kU * (1 + std::sqrt(50.0)) * Norm(dy.view())}});
    }
    EXPECT_TRUE(machine.guards_intact());
  }
}

// ---- Feed-forward ----

TEST_P(FeedForwardGradientOn, IsThatOfCentralDifferencesForEveryActivation) {
  const int64_t batch = 2, tokens = 15, in = 20, inner = 70, out = 12, rows = batch * tokens;
  const FeedForward::Sizes sizes = {in, inner, out};
  const double deviation = 1 / std::sqrt(20.0);
  const Tensor w1 = Random(DType::kF32, {in, inner}, "w1", deviation);
  const Tensor w2 = Random(DType::kF32, {inner, out}, "w2", 1 / std::sqrt(70.0));
  const Tensor b1 = Random(DType::kF32, {inner}, "b1"), b2 = Random(DType::kF32, {out}, "b2");
  for (const Activation activation : kActivations) {
    for (const Activation output : {Activation::kNone, Activation::kRelu}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(Name(activation));
        const auto pack = [this](const Tensor& w, const Tensor& b) {
          return PackedMatrix::Create(device(), w.view(), b.view()).value();
        };
        FeedForward layer(pack(w1, b1), pack(w2, b2), activation, output);
        ASSERT_OK(layer.SetUpBackward(w1.view(), w2.view()));
        const Tensor x = Random(dtype, {batch, tokens, in}, "x");
        const Tensor dy = Random(dtype, {batch, tokens, out}, "dy");
        const Tensor residual = Random(dtype, {batch, tokens, out}, "residual");
        Tensor y = Nan(dtype, {batch, tokens, out}), without_kept = Nan(dtype, y.shape());
        Tensor dx = Nan(dtype, x.shape());
        Tensor dw1 = Nan(DType::kF32, w1.shape()), db1 = Nan(DType::kF32, b1.shape());
        Tensor dw2 = Nan(DType::kF32, w2.shape()), db2 = Nan(DType::kF32, b2.shape());
        const Machine machine(
            device(), 2,
            std::max(FeedForward::workspace_bytes(device(), rows, sizes, 2),
                     FeedForward::backward_workspace_bytes(device(), rows, sizes, 2, output)),
            FeedForward::kept_bytes(rows, sizes, output));
        ASSERT_OK(layer.Run(In(x.view()), In(residual.view()), Out(without_kept.view()),
                            machine.WithoutKept()));
        ASSERT_OK(layer.Run(In(x.view()), In(residual.view()), Out(y.view()), machine.execution()));
        Back();
        EXPECT_EQ(Norm(Matrix(y.view()) - Matrix(without_kept.view())), 0);
        ASSERT_OK(layer.Backward({In(x.view()),
                                  In(dy.view()),
                                  {},
                                  Out(dx.view()),
                                  Out(dw1.view()),
                                  Out(db1.view()),
                                  Out(dw2.view()),
                                  Out(db2.view())},
                                 machine.execution()));
        Back();
        EXPECT_TRUE(machine.guards_intact());
        const Formula f = [=](const Matrices& at) {
          const auto apply = [](Activation of) { return [of](double z) { return Exact(of, z); }; };
          const Matrix h = Map(Times(at.at("x"), at.at("w1")) + at.at("b1"), apply(activation));
          return Map(Times(h, at.at("w2")) + at.at("b2"), apply(output));
        };
        const Matrices at = {{"x", Matrix(x.view())},
                             {"w1", Matrix(w1.view())},
                             {"b1", Matrix(b1.view())},
                             {"w2", Matrix(w2.view())},
                             {"b2", Matrix(b2.view())}};
        // Two products forwards, two backwards and the sums over rows.
        const double terms = 2 * (in + inner + out) + rows;
        ExpectGradients(f, at, Matrix(dy.view()),
                        {{"x", dx.view(), 0, terms},
                         {"w1", dw1.view(), 0, terms},
                         {"b1", db1.view(), 0, terms},
                         {"w2", dw2.view(), 0, terms},
                         {"b2", db2.view(), 0, terms}});
      }
    }
  }
}

// ---- Gates ----

constexpr int64_t kGateRows = 21, kGateChannels = 70;

struct GateCase {
  std::map<std::string, Tensor> parameters;
  GateCase() {
    for (const char* name : {"w_r", "w_z", "w_g", "u_r", "u_z", "u_g"}) {
      parameters[name] = Random(DType::kF32, {kGateChannels, kGateChannels}, name,
                                1 / std::sqrt(static_cast<double>(kGateChannels)));
    }
    for (const char* name : {"b_g", "b_r", "b_z", "b_h"}) {
      parameters[name] = Random(DType::kF32, {kGateChannels}, name);
    }
  }
  ConstTensorView of(const char* name) const { return parameters.at(name).view(); }
  Gate::Parameters views() const {
    return {of("w_r"), of("w_z"), of("w_g"), of("u_r"), of("u_z"),
            of("u_g"), of("b_g"), of("b_r"), of("b_z"), of("b_h")};
  }
};

Matrix Logistic(const Matrix& a) {
  return Map(a, [](double value) { return 1 / (1 + std::exp(-value)); });
}
Matrix Tanh(const Matrix& a) {
  return Map(a, [](double value) { return std::tanh(value); });
}
Matrix OneMinus(const Matrix& a) {
  return Map(a, [](double value) { return 1 - value; });
}

Matrix GateOf(GateKind kind, const Matrices& at) {
  const Matrix &x = at.at("x"), &y = at.at("y"), &b_g = at.at("b_g");
  const auto times = [&](const Matrix& a, const char* name) { return Times(a, at.at(name)); };
  switch (kind) {
    case GateKind::kInput:
      return Logistic(times(x, "w_g")) * x + y;
    case GateKind::kOutput:
      return x + Logistic(times(x, "w_g") - b_g) * y;
    case GateKind::kHighway: {
      const Matrix open = Logistic(times(x, "w_g") + b_g);
      return open * x + OneMinus(open) * y;
    }
    case GateKind::kSigmoidTanh:
      return x + Logistic(times(y, "w_g") - b_g) * Tanh(times(y, "u_g"));
    case GateKind::kGru: {
      const Matrix r = Logistic(times(y, "w_r") + times(x, "u_r") + at.at("b_r"));
      const Matrix z = Logistic(times(y, "w_z") + times(x, "u_z") + at.at("b_z") - b_g);
      return OneMinus(z) * x + z * Tanh(times(y, "w_g") + times(r * x, "u_g") + at.at("b_h"));
    }
  }
  return x;
}

std::vector<const char*> GateParameters(GateKind kind) {
  switch (kind) {
    case GateKind::kInput:
      return {"w_g"};
    case GateKind::kOutput:
    case GateKind::kHighway:
      return {"w_g", "b_g"};
    case GateKind::kSigmoidTanh:
      return {"w_g", "u_g", "b_g"};
    case GateKind::kGru:
      break;
  }
  return {"w_r", "w_z", "w_g", "u_r", "u_z", "u_g", "b_g", "b_r", "b_z", "b_h"};
}

constexpr GateKind kGates[] = {GateKind::kInput, GateKind::kOutput, GateKind::kHighway,
                               GateKind::kSigmoidTanh, GateKind::kGru};

// Runs a gate and its backward pass, the gradients of the parameters being sums of `times` equal
// ones; returns dx, dy and the parameters' gradients by their names.
std::map<std::string, Tensor> GateGradients(Device device, GateKind kind, const GateCase& c,
                                            const Tensor& x, const Tensor& y, const Tensor& dout,
                                            int threads) {
  Gate gate = Gate::Create(device, kind, c.views()).value();
  EXPECT_EQ(gate.SetUpBackward(c.views()), absl::OkStatus());
  const int64_t rows = x.dim(0) * x.dim(1);
  const Machine machine(
      device, threads,
      std::max(Gate::workspace_bytes(device, kind, rows, kGateChannels, threads),
               Gate::backward_workspace_bytes(device, kind, rows, kGateChannels, threads)),
      Gate::kept_bytes(kind, rows, kGateChannels));
  Tensor out = Nan(x.dtype(), x.shape()), without_kept = Nan(x.dtype(), x.shape());
  Placed placed(device);
  const auto run = [&](const TensorView& to, const Execution& execution) {
    EXPECT_EQ(gate.Run(placed.In(x.view()), placed.In(y.view()), placed.Out(to), execution),
              absl::OkStatus());
    placed.Back();
  };
  run(without_kept.view(), machine.WithoutKept());
  run(out.view(), machine.execution());
  EXPECT_EQ(Norm(Matrix(out.view()) - Matrix(without_kept.view())), 0);
  std::map<std::string, Tensor> gradients;
  gradients["x"] = dout.Clone();  // in place of dout
  gradients["y"] = Nan(y.dtype(), y.shape());
  for (const auto& [name, parameter] : c.parameters) {
    gradients[name] = Nan(DType::kF32, parameter.shape());
  }
  const auto to = [&](const char* name) { return placed.Out(gradients.at(name).view()); };
  const TensorView in_place = to("x");
  const Gate::BackwardCall call = {placed.In(x.view()),
                                   placed.In(y.view()),
                                   in_place,
                                   in_place,
                                   to("y"),
                                   {to("w_r"), to("w_z"), to("w_g"), to("u_r"), to("u_z"),
                                    to("u_g"), to("b_g"), to("b_r"), to("b_z"), to("b_h")}};
  EXPECT_EQ(gate.Backward(call, machine.execution()), absl::OkStatus());
  placed.Back();
  EXPECT_TRUE(machine.guards_intact());
  return gradients;
}

TEST_P(GateGradientOn, IsThatOfCentralDifferencesForEveryKind) {
  const GateCase c;
  for (const GateKind kind : kGates) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(static_cast<int>(kind));
      const Tensor x = Random(dtype, {3, kGateRows / 3, kGateChannels}, "x");
      const Tensor y = Random(dtype, {3, kGateRows / 3, kGateChannels}, "y");
      const Tensor dout = Random(dtype, {3, kGateRows / 3, kGateChannels}, "dout");
      const auto gradients = GateGradients(GetParam(), kind, c, x, y, dout, 2);
      Matrices at = {{"x", Matrix(x.view())}, {"y", Matrix(y.view())}};
      for (const auto& [name, parameter] : c.parameters) {
        at.emplace(name, Matrix(parameter.view()));
      }
      // Up to two products of both inputs forwards, as many backwards, and the sums over rows.
      const double terms = 8 * kGateChannels + kGateRows;
      std::vector<Written> written = {{"x", gradients.at("x").view(), 0, terms},
                                      {"y", gradients.at("y").view(), 0, terms}};
      for (const char* name : GateParameters(kind)) {
        written.push_back({name, gradients.at(name).view(), 0, terms});
      }
      ExpectGradients([=](const Matrices& values) { return GateOf(kind, values); }, at,
                      Matrix(dout.view()), written);
      for (const auto& [name, gradient] : gradients) {
        const auto used = GateParameters(kind);
        const bool is_used = name == "x" || name == "y" ||
                             std::any_of(used.begin(), used.end(),
                                         [&, &of = name](const char* own) { return of == own; });
        EXPECT_EQ(std::isnan(gradient.view().Get(0)), !is_used) << name;
      }
    }
  }
}

TEST_P(GateGradientOn, ItsBitsDoNotDependOnThreads) {
  const GateCase c;
  for (const GateKind kind : kGates) {
    ExpectTheSameBits([&](int threads) {
      auto gradients =
          GateGradients(GetParam(), kind, c, Random(DType::kF32, {1, 300, kGateChannels}, "x"),
                        Random(DType::kF32, {1, 300, kGateChannels}, "y"),
                        Random(DType::kF32, {1, 300, kGateChannels}, "dout"), threads);
      std::vector<Tensor> all;
      for (const char* name : {"x", "y"}) all.push_back(std::move(gradients.at(name)));
      for (const char* name : GateParameters(kind)) all.push_back(std::move(gradients.at(name)));
      return all;
    });
  }
}

TEST_P(GateGradientOn, NoRowsHaveNoGradient) {
  const auto gradients = GateGradients(
      GetParam(), GateKind::kGru, GateCase(), Tensor(DType::kF32, {0, 1, kGateChannels}),
      Tensor(DType::kF32, {0, 1, kGateChannels}), Tensor(DType::kF32, {0, 1, kGateChannels}), 1);
  EXPECT_EQ(Norm(gradients.at("u_g").view()), 0);
}

// ---- Rows of tables ----

TEST(LookUpGradient, IsThatOfCentralDifferencesWithRowsThatAreNamedTwiceAndNone) {
  const int64_t rows = 40, channels = 70;
  const std::vector<int32_t> indices = {3, 39, 3, -1, 0, 3, 17, 39};  // [2, 4]
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor table = Random(DType::kF32, {rows, channels}, "table");
    const Tensor memory = Random(dtype, {2, channels, 4}, "dy");
    const ConstTensorView dy = Transpose(memory.view(), 1, 2);
    const auto take = [&](const Matrix& of) {
      Matrix y(8, channels);
      for (int64_t n = 0; n < 8; ++n) {
        for (int64_t c = 0; c < channels; ++c) {
          y.at(n, c) = indices[n] < 0 ? 0 : of.at(indices[n], c);
        }
      }
      return y;
    };
    Tensor y = Nan(dtype, {2, 4, channels});
    const Machine machine(Device::kCpu, 2, LookUpGradientWorkspaceBytes(8, rows));
    ASSERT_OK(LookUp(table.view(), indices, y.view(), machine.execution()));
    EXPECT_LE(Norm(Matrix(y.view()) - take(Matrix(table.view()))),
              UnitRoundoff(dtype) * Norm(table.view()));
    Tensor gradient = Nan(DType::kF32, {rows, channels});
    ASSERT_OK(LookUpGradient(dy, indices, gradient.view(), false, machine.execution()));
    ExpectGradients([&](const Matrices& at) { return take(at.at("table")); },
                    {{"table", Matrix(table.view())}}, Matrix(dy),
                    {{"table", gradient.view(), 3 * kU * Norm(dy)}});
    EXPECT_EQ(Norm(Slice(gradient.view(), 0, 5, 1)), 0);
    Tensor twice = gradient.Clone();
    ASSERT_OK(LookUpGradient(dy, indices, twice.view(), true, machine.execution()));
    EXPECT_LE(Norm(Matrix(twice.view()) - Matrix(gradient.view()) - Matrix(gradient.view())),
              6 * kU * Norm(gradient.view()));
    EXPECT_TRUE(machine.guards_intact());
  }
}

TEST(LookUpGradient, ItsBitsDoNotDependOnThreadsAndWhatDoesNotFitIsAnError) {
  const Tensor dy = Random(DType::kF32, {500, 33}, "dy");
  std::vector<int32_t> indices;
  for (int32_t n = 0; n < 500; ++n) indices.push_back(n * n % 29);
  ExpectTheSameBits([&](int threads) {
    const Machine machine(Device::kCpu, threads, LookUpGradientWorkspaceBytes(500, 29));
    std::vector<Tensor> all;
    all.push_back(Nan(DType::kF32, {29, 33}));
    EXPECT_EQ(LookUpGradient(dy.view(), indices, all[0].view(), false, machine.execution()),
              absl::OkStatus());
    return all;
  });
  Tensor table(DType::kF32, {28, 33});
  const Machine machine(Device::kCpu, 1, LookUpGradientWorkspaceBytes(500, 29));
  EXPECT_EQ(LookUpGradient(dy.view(), indices, table.view(), false, machine.execution()).code(),
            absl::StatusCode::kInvalidArgument);
  indices.pop_back();
  EXPECT_EQ(LookUpGradient(dy.view(), indices, table.view(), false, machine.execution()).code(),
            absl::StatusCode::kInternal);
}

// ---- All ----

TEST(LayerGradients, CallsAllocateNothing) {
  const int64_t rows = 600, channels = kGateChannels;
  const GateCase c;
  const Tensor x = Random(DType::kBF16, {rows, channels}, "x");
  const auto pack = [&](const char* name) {
    return PackedMatrix::Create(Device::kCpu, c.of(name), c.of("b_g")).value();
  };
  FeedForward feed_forward(pack("w_r"), pack("w_z"), Activation::kGelu, Activation::kRelu);
  ASSERT_OK(feed_forward.SetUpBackward(c.of("w_r"), c.of("w_z")));
  Gate gate = Gate::Create(Device::kCpu, GateKind::kGru, c.views()).value();
  ASSERT_OK(gate.SetUpBackward(c.views()));
  const LayerNorm norm = LayerNorm::Create(Device::kCpu, c.of("b_g"), c.of("b_g")).value();
  const FeedForward::Sizes sizes = {channels, channels, channels};
  const Machine machine(
      Device::kCpu, 2,
      std::max(
          {FeedForward::workspace_bytes(Device::kCpu, rows, sizes, 2),
           FeedForward::backward_workspace_bytes(Device::kCpu, rows, sizes, 2, Activation::kRelu),
           Gate::workspace_bytes(Device::kCpu, GateKind::kGru, rows, channels, 2),
           Gate::backward_workspace_bytes(Device::kCpu, GateKind::kGru, rows, channels, 2),
           LayerNorm::backward_workspace_bytes(Device::kCpu, rows, channels, 2),
           LogSoftmaxWorkspaceBytes(Device::kCpu, channels, 2)}),
      std::max(FeedForward::kept_bytes(rows, sizes, Activation::kRelu),
               Gate::kept_bytes(GateKind::kGru, rows, channels)));
  Tensor y(DType::kF32, {rows, channels}), dx(DType::kF32, {rows, channels});
  Tensor dw(DType::kF32, {channels, channels}), db(DType::kF32, {channels});
  const std::vector<int32_t> indices(rows, 5);
  Gate::BackwardCall of_gate = {x.view(), x.view(), x.view(), dx.view(), y.view()};
  of_gate.parameters.w_g = dw.view();
  const Execution& execution = machine.execution();
  const int64_t before = AllocationCount();
  const bool ok =
      feed_forward.Run(x.view(), x.view(), y.view(), execution).ok() &&
      feed_forward
          .Backward({x.view(), x.view(), {}, dx.view(), dw.view(), db.view(), dw.view(), db.view()},
                    execution)
          .ok() &&
      gate.Run(x.view(), x.view(), y.view(), execution).ok() &&
      gate.Backward(of_gate, execution).ok() &&
      norm.Backward({x.view(), x.view(), {}, dx.view(), db.view(), db.view()}, execution).ok() &&
      LogSoftmaxBackward(Device::kCpu, x.view(), x.view(), dx.view(), execution).ok() &&
      LookUpGradient(x.view(), indices, dw.view(), false, execution).ok();
  EXPECT_EQ(AllocationCount() - before, 0);
  EXPECT_TRUE(ok);
}

INSTANTIATE_TEST_SUITE_P(, ActivationGradientOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, LayerNormGradientOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, LogSoftmaxGradientOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, FeedForwardGradientOn, ::testing::ValuesIn(TestedDevices()), DeviceName);
INSTANTIATE_TEST_SUITE_P(, GateGradientOn, ::testing::ValuesIn(TestedDevices()), DeviceName);

}  // namespace
}  // namespace tfb
