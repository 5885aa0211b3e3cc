// Tests the definitions of layers against the numbers of their formulas, and parameters by their
// names.
#include "core/layers/layer_definitions.h"

#include <cmath>
#include <string>
#include <vector>

#include "core/layers/double_rows.h"
#include "core/layers/feed_forward_dim.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/sinusoid.h"
#include "core/random.h"
#include "core/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::layers {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

Tensor Doubles(const Shape& shape, const std::vector<double>& values) {
  Tensor tensor(DType::kF64, shape);
  std::copy(values.begin(), values.end(), tensor.span<double>().begin());
  return tensor;
}

std::vector<double> ValuesOf(const Rows& rows) {
  return std::vector<double>(rows[0], rows[0] + rows.rows() * rows.channels());
}

TEST(DefineActivation, HasTheValuesOfItsFormula) {
  struct Case {
    Activation activation;
    double of_minus_2, of_half;
  };
  // GELU(x) = x Phi(x), of tables of the normal distribution; the others of a calculator.
  for (const Case& c : std::vector<Case>{{Activation::kNone, -2, 0.5},
                                         {Activation::kRelu, 0, 0.5},
                                         {Activation::kGelu, -0.0455002639, 0.3457312306},
                                         {Activation::kGeluTanh, -0.0454023059, 0.3457140098},
                                         {Activation::kGeluSigmoid, -0.0643413769, 0.3503884366},
                                         {Activation::kTanh, -0.9640275801, 0.4621171573}}) {
    EXPECT_NEAR(DefineActivation(c.activation, -2), c.of_minus_2, 1e-9) << Name(c.activation);
    EXPECT_NEAR(DefineActivation(c.activation, 0.5), c.of_half, 1e-9) << Name(c.activation);
    EXPECT_EQ(DefineActivation(c.activation, 0), 0) << Name(c.activation);
    EXPECT_TRUE(std::isnan(DefineActivation(c.activation, NAN))) << Name(c.activation);
  }
}

TEST(Activation, HasAName) {
  std::string names;
  for (const Activation activation :
       {Activation::kNone, Activation::kRelu, Activation::kGelu, Activation::kGeluTanh,
        Activation::kGeluSigmoid, Activation::kTanh, static_cast<Activation>(99)}) {
    names += std::string(Name(activation)) + " ";
  }
  EXPECT_EQ(names, "none relu gelu gelu_tanh gelu_sigmoid tanh ? ");
}

// The channels of position 3 of five channels: three sines, two cosines.
TEST(DefineSinusoid, HasTheFrequenciesAndTheOrderOfEachForm) {
  struct Case {
    SinusoidForm form;
    std::vector<double> angles;  // the sine's or cosine's, by channel
    std::vector<bool> is_sine;
  };
  const double p0 = 3, p1 = 3 * std::pow(100, -0.4), p2 = 3 * std::pow(100, -0.8);
  const double i1 = 3 * std::pow(100, -0.5), i2 = 3 * std::pow(100, -1);
  using L = SinusoidLayout;
  using F = SinusoidFrequencies;
  const std::vector<bool> in_turn = {true, false, true, false, true};
  const std::vector<bool> sines_first = {true, true, true, false, false};
  for (const Case& c : std::vector<Case>{
           {{L::kInterleaved, F::kPaper, 100}, {p0, p0, p1, p1, p2}, in_turn},
           {{L::kConcatenated, F::kPaper, 100}, {p0, p1, p2, p0, p1}, sines_first},
           {{L::kInterleaved, F::kInclusive, 100}, {p0, p0, i1, i1, i2}, in_turn},
           {{L::kConcatenated, F::kInclusive, 100}, {p0, i1, i2, p0, i1}, sines_first}}) {
    const Tensor table = Sinusoids(3, 1, 5, c.form).value();
    for (int64_t n = 0; n < 5; ++n) {
      const double expected = c.is_sine[n] ? std::sin(c.angles[n]) : std::cos(c.angles[n]);
      EXPECT_NEAR(DefineSinusoid(c.form, 5, 3, n), expected, 1e-12) << n;
      EXPECT_NEAR(table.span<float>()[n], expected, 0x1p-24) << n;
    }
  }
}

TEST(DefineSinusoid, IsThatOfTheLayersInEveryForm) {
  for (const int64_t channels : {1, 2, 3, 4, 6, 7}) {
    for (const SinusoidLayout layout :
         {SinusoidLayout::kInterleaved, SinusoidLayout::kConcatenated}) {
      for (const SinusoidFrequencies frequencies :
           {SinusoidFrequencies::kPaper, SinusoidFrequencies::kInclusive}) {
        const SinusoidForm form = {layout, frequencies, 50};
        const Tensor table = Sinusoids(7, 30, channels, form).value();
        for (int64_t p = 0; p < 30; ++p) {
          for (int64_t c = 0; c < channels; ++c) {
            ASSERT_NEAR(*table.view().At<float>(p, c), DefineSinusoid(form, channels, 7 + p, c),
                        0x1p-24)
                << channels << " channels, " << p << ", " << c;
          }
        }
      }
    }
  }
}

// The row 1, 2, 6 has the mean 3 and the variance (4 + 1 + 9) / 3.
TEST(DefineNorm, NormalizesEachRowByItself) {
  const double scale = 1 / std::sqrt(14.0 / 3 + 1e-5), flat = 1 / std::sqrt(1e-5);
  NamedTensors parameters;
  parameters["n.gamma"] = Doubles({3}, {1, 2, -1});
  parameters["n.beta"] = Doubles({3}, {0.5, 0, 10});
  const Tensor h = Doubles({1, 2, 3}, {1, 2, 6, 4, 4, 4});
  const Tensor normal = DefineNorm(parameters, "n", h);
  EXPECT_EQ(normal.shape(), h.shape());
  const std::vector<double> expected = {-2 * scale + 0.5, -2 * scale, -3 * scale + 10, 0.5, 0, 10};
  EXPECT_THAT(normal.span<double>(), Pointwise(DoubleNear(1e-12), expected));
  EXPECT_THAT(
      ValuesOf(
          Rows(Doubles({2, 3}, {1, 2, 6, 4, 4, 4}).view()).Normalized({1, 2, -1}, {0.5, 0, 10})),
      Pointwise(DoubleNear(1e-12), expected));
  // Epsilon matters where the variance is small: 0, 2e-3 have a deviation of 1e-3.
  double row[2] = {0, 2e-3};
  const double ones[2] = {1, 1}, zeros[2] = {0, 0};
  DefineNormOfRow(ones, zeros, 2, row);
  EXPECT_NEAR(row[1], 1e-3 * flat / std::sqrt(1.1), 1e-12);
}

TEST(DefineFeedForward, IsTwoProductsWithBiasesAndTheActivationBetween) {
  NamedTensors parameters;
  parameters["f.w1"] = Doubles({2, 3}, {1, 0, 2, 0, 1, -1});
  parameters["f.b1"] = Doubles({3}, {0, -5, 1});
  parameters["f.w2"] = Doubles({3, 2}, {1, 2, 3, 4, 5, 6});
  parameters["f.b2"] = Doubles({2}, {100, 200});
  // h = (1, 2): inner (1, -3, 1), relu (1, 0, 1). h = (-1, 7): (-1, 2, -8), relu (0, 2, 0).
  const Tensor h = Doubles({2, 1, 2}, {1, 2, -1, 7});
  const Tensor y = DefineFeedForward(parameters, "f", Activation::kRelu, h, nullptr);
  EXPECT_EQ(y.shape(), h.shape());
  EXPECT_THAT(y.span<double>(), ElementsAre(106, 208, 106, 208));
  const Tensor linear = DefineFeedForward(parameters, "f", Activation::kNone, h, nullptr);
  EXPECT_THAT(linear.span<double>(), ElementsAre(97, 196, 65, 158));
}

TEST(Rows, AreAddedMultipliedAndCutAsMatrices) {
  const Tensor values = Doubles({3, 2}, {1, 2, 3, 4, 5, -6});
  const Rows rows(values.view());
  EXPECT_EQ(rows.rows(), 3);
  EXPECT_EQ(rows.channels(), 2);
  EXPECT_THAT(ValuesOf(rows.Sub(1, 2)), ElementsAre(3, 4, 5, -6));
  EXPECT_THAT(ValuesOf(rows.Plus(rows)), ElementsAre(2, 4, 6, 8, 10, -12));
  EXPECT_THAT(ValuesOf(rows.PlusEach({10, 20})), ElementsAre(11, 22, 13, 24, 15, 14));
  EXPECT_THAT(ValuesOf(rows.Relu()), ElementsAre(1, 2, 3, 4, 5, 0));
  EXPECT_TRUE(std::isnan(Rows(Doubles({1, 1}, {NAN}).view()).Relu()[0][0]));
  const Rows product = rows.Times(Rows(Doubles({2, 1}, {10, 1}).view()), nullptr);
  EXPECT_EQ(product.channels(), 1);
  EXPECT_THAT(ValuesOf(product), ElementsAre(12, 34, 44));
  Rows both = rows.Sub(0, 1);
  both.Append(rows.Sub(2, 1));
  EXPECT_THAT(ValuesOf(both), ElementsAre(1, 2, 5, -6));
  EXPECT_EQ(Rows(4, 0).rows(), 0);
}

// ---- Parameters ----

TEST(LayerParameters, HaveTheShapesAndDeviationsOfTheirLayers) {
  std::string specs;
  std::vector<ParameterSpec> all = FeedForwardSpecs("ff", 4, 16);
  AddSpecs(WithPrefix("layer1.", NormSpecs("norm", 4)), &all);
  for (const ParameterSpec& spec : all) {
    specs += spec.name + " " + ShapeString(spec.shape) + " " + std::to_string(spec.mean) + " " +
             std::to_string(spec.deviation) + "\n";
  }
  EXPECT_EQ(specs,
            "ff.w1 [4, 16] 0.000000 0.500000\n"
            "ff.b1 [16] 0.000000 0.500000\n"
            "ff.w2 [16, 4] 0.000000 0.250000\n"
            "ff.b2 [4] 0.000000 0.250000\n"
            "layer1.norm.gamma [4] 1.000000 0.000000\n"
            "layer1.norm.beta [4] 0.000000 0.000000\n");
}

TEST(LayerParameters, AreDrawnByNameAndCheckedForNameAndShape) {
  const std::vector<ParameterSpec> specs = {{"a", {3}, 5, 0}, MatrixSpec("b", 2, 3)};
  NamedTensors parameters;
  ASSERT_TRUE(DrawParameters(specs, 1, &parameters).ok());
  EXPECT_THAT(parameters.at("a").span<float>(), ElementsAre(5, 5, 5));
  Tensor drawn(DType::kF32, {2, 3});
  FillNormal(&drawn, 1, "b", 0, std::sqrt(0.5));
  EXPECT_EQ(parameters.at("b").span<float>(), drawn.span<float>());
  EXPECT_TRUE(CheckParameters(specs, parameters).ok());
  EXPECT_EQ(FindParameter(parameters, "b").shape(), (Shape{2, 3}));
  EXPECT_TRUE(FindParameter(parameters, "c").empty());

  EXPECT_EQ(CheckParameters({{"b", {3, 2}}}, parameters).message(), "parameter b [3, 2] is [2, 3]");
  EXPECT_EQ(CheckParameters({{"a", {3}}, {"c", {1}}}, parameters).message(),
            "parameter c [1] is missing");
  EXPECT_EQ(DrawParameters({{"huge", {int64_t{1} << 50}}}, 1, &parameters).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(FeedForwardDim(0, 8), 32);
  EXPECT_EQ(FeedForwardDim(1, 8), 1);
}

}  // namespace
}  // namespace tfb::layers
