// Tolerance. The encoding is right to half an ulp of 1, 2^-24; beyond that the layer is multi_head's,
// whose bound holds: 2e-5 of the largest value, or of 1 where that is more.
#include "positional/sinusoidal/sinusoidal.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "attention/multi_head/multi_head.h"
#include "core/backward_testing.h"
#include "core/definition.h"
#include "core/layers/layer_definitions.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::sinusoidal {
namespace {

const Technique& Sinusoidal() { return FindTechnique("sinusoidal"); }

using ::testing::HasSubstr;

constexpr SinusoidLayout kLayouts[] = {SinusoidLayout::kInterleaved, SinusoidLayout::kConcatenated};
constexpr SinusoidFrequencies kFrequencies[] = {SinusoidFrequencies::kPaper,
                                                SinusoidFrequencies::kInclusive};

Problem Self(int64_t heads, int64_t tokens, int64_t head_dim, DType dtype = DType::kF32) {
  return Problem::SelfAttention(2, heads, tokens, head_dim, /*causal=*/false, dtype);
}

NamedTensors Random(const Problem& problem) {
  return RandomInputs(Sinusoidal().InputSpecs(problem, {}).value(), 5);
}

Tensor RunOf(const Technique& technique, const Problem& problem, const Inputs& inputs,
             const Options& options = {}, const NamedTensors* parameters = nullptr,
             Device device = Device::kCpu) {
  RunRequest request{options, device};
  request.parameters = parameters;
  auto outputs = RunTechnique(technique, problem, inputs, request);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? std::move(outputs->at("out")) : Tensor();
}

double Bound(const ConstTensorView& expected) { return 2e-5 * std::max(1.0, MaxAbs(expected)); }

// Returns PE[first] to PE[first + positions - 1] by the formula in float64.
std::vector<std::vector<double>> Table(int64_t first, int64_t positions, int64_t channels,
                                       const SinusoidForm& form = {}) {
  std::vector<std::vector<double>> table(positions, std::vector<double>(channels));
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      table[p][c] = layers::DefineSinusoid(form, channels, first + p, c);
    }
  }
  return table;
}

double Product(const std::vector<double>& a, const std::vector<double>& b) {
  return Dot(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

// Returns x + table, for each batch row.
Tensor Encoded(const Tensor& x, double scale, const Tensor& table) {
  Tensor u = x.Clone();
  for (int64_t n = 0; n < u.num_elements(); ++n) {
    const float row = table.span<float>()[n % table.num_elements()];
    u.span<float>()[n] = static_cast<float>(scale) * u.span<float>()[n] + row;
  }
  return u;
}

// ---- The table ----

TEST(Sinusoidal, FourChannelsByHand) {
  // The frequencies are 1 and 1 / 100; inclusive ones 1 and 1 / 10000.
  const std::vector<std::vector<double>> table = Table(0, 4, 4);
  EXPECT_THAT(table[0], testing::ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(table[3],
              testing::ElementsAre(std::sin(3.0), std::cos(3.0), std::sin(0.03), std::cos(0.03)));
  const SinusoidForm inclusive = {SinusoidLayout::kConcatenated, SinusoidFrequencies::kInclusive};
  EXPECT_THAT(Table(3, 1, 4, inclusive)[0], testing::ElementsAre(std::sin(3.0), std::sin(0.0003),
                                                                 std::cos(3.0), std::cos(0.0003)));
}

TEST(Sinusoidal, TheTableOfTheLayerIsThatOfTheDefinition) {
  for (const SinusoidLayout layout : kLayouts) {
    for (const SinusoidFrequencies frequencies : kFrequencies) {
      const SinusoidForm form = {layout, frequencies, 5000};
      for (const int64_t channels : {1, 2, 3, 7, 64}) {
        for (const int64_t first : {int64_t{0}, int64_t{100000}, SinusoidalOptions::kMaxOffset}) {
          const Tensor ours = Sinusoids(first, 9, channels, form).value();
          const auto exact = Table(first, 9, channels, form);
          // The bound is half an ulp of a float, and the rounding of the angle in double.
          const double bound = 0x1p-24 + static_cast<double>(first) * 0x1p-50;
          for (int64_t p = 0; p < 9; ++p) {
            for (int64_t c = 0; c < channels; ++c) {
              EXPECT_NEAR(*ours.view().At<float>(p, c), exact[p][c], bound)
                  << channels << " channels, position " << first << " + " << p << ", channel " << c;
            }
          }
        }
      }
    }
  }
}

TEST(Sinusoidal, ThePositionsSquaresSumToHalfTheWidth) {
  for (const SinusoidFrequencies frequencies : kFrequencies) {
    for (const auto& row : Table(0, 300, 64, {SinusoidLayout::kInterleaved, frequencies})) {
      EXPECT_NEAR(Product(row, row), 32, 1e-12);
    }
  }
}

TEST(Sinusoidal, TheProductOfTwoPositionsDependsOnTheirDistanceAlone) {
  const auto table = Table(0, 200, 64);
  for (const int64_t distance : {1, 7, 100}) {
    const double product = Product(table[0], table[distance]);
    for (const int64_t p : {1, 50, 99}) {
      EXPECT_NEAR(Product(table[p], table[p + distance]), product, 1e-11);
    }
  }
}

TEST(Sinusoidal, ALaterPositionIsAnEarlierOneTurned) {
  const auto table = Table(0, 80, 16);
  const int64_t k = 37;
  for (const int64_t p : {0, 1, 42}) {
    for (int64_t j = 0; j < 8; ++j) {
      const double angle = static_cast<double>(k) * std::pow(10000, -static_cast<double>(j) / 8);
      const double sine = table[p][2 * j], cosine = table[p][2 * j + 1];
      EXPECT_NEAR(table[p + k][2 * j], sine * std::cos(angle) + cosine * std::sin(angle), 1e-12);
      EXPECT_NEAR(table[p + k][2 * j + 1], cosine * std::cos(angle) - sine * std::sin(angle),
                  1e-12);
    }
  }
}

TEST(Sinusoidal, TheLongestWavelengthOf64ChannelsIs7499Turns) {
  // The longest wavelength is 2 pi 10000^(62 / 64); with inclusive frequencies 2 pi 10000. At a
  // quarter of it the sine is 1.
  const double longest = std::pow(10000, 62.0 / 64);
  EXPECT_NEAR(longest, 7499, 0.5);
  const auto quarter = [](double turns) { return std::llround(turns * M_PI / 2); };
  EXPECT_NEAR(layers::DefineSinusoid({}, 64, quarter(longest), 62), 1, 1e-8);
  const SinusoidForm inclusive = {SinusoidLayout::kInterleaved, SinusoidFrequencies::kInclusive};
  EXPECT_NEAR(layers::DefineSinusoid(inclusive, 64, quarter(10000), 62), 1, 1e-8);
}

TEST(Sinusoidal, TheTwoLayoutsArePermutationsOfEachOther) {
  for (const int64_t channels : {16, 7}) {
    const auto interleaved = Table(11, 5, channels);
    const auto concatenated = Table(11, 5, channels, {SinusoidLayout::kConcatenated});
    const int64_t sines = (channels + 1) / 2;
    for (int64_t p = 0; p < 5; ++p) {
      for (int64_t c = 0; c < channels; ++c) {
        EXPECT_EQ(interleaved[p][c], concatenated[p][c % 2 == 0 ? c / 2 : sines + c / 2]);
      }
    }
  }
}

// ---- The layer ----

TEST(Sinusoidal, IsMultiHeadAttentionOnEncodedHiddenStates) {
  const Problem problem = Self(2, 70, 8);
  const NamedTensors inputs = Random(problem);
  for (const char* inner : {"dense", "longformer[window=6]"}) {
    for (const bool scaled : {false, true}) {
      NamedTensors encoded;
      encoded["x"] = Encoded(inputs.at("x"), scaled ? 4 : 1, Sinusoids(1000, 70, 16, {}).value());
      const Tensor expected =
          RunOf(FindTechnique("multi_head"), problem, ViewsOf(encoded), {{"inner", inner}});
      for (const Device device : TestedDevices()) {
        const Options options = {{"inner", inner},
                                 {"position_offset", "1000"},
                                 {"embedding_scale", scaled ? "sqrt_model_dim" : "one"}};
        const Tensor out = RunOf(Sinusoidal(), problem, ViewsOf(inputs), options, nullptr, device);
        EXPECT_LE(MaxDifference(out.view(), expected.view()), Bound(expected.view()))
            << inner << ", " << Name(device);
      }
    }
  }
}

TEST(Sinusoidal, ALayoutIsAPermutationOfTheChannelsOfTheInputAndTheRowsOfTheMatrices) {
  const Problem problem = Self(2, 40, 8);
  NamedTensors inputs = Random(problem), permuted_inputs, permuted;
  const auto layer = Sinusoidal().Create(problem, {}, Device::kCpu, 1).value();
  const auto permute = [](const ConstTensorView& from, int axis) {  // from 0 1 2 3 to 0 2 .. 1 3 ..
    Tensor to(DType::kF32, from.shape());
    for (int64_t c = 0; c < 16; ++c) {
      CopyElements(Slice(from, axis, c, 1), Slice(to.view(), axis, c % 2 * 8 + c / 2, 1));
    }
    return to;
  };
  for (const auto& [name, tensor] : layer->parameters()) {
    permuted[name] = name == "w_o" ? tensor.Clone() : permute(tensor.view(), 0);
  }
  permuted_inputs["x"] = permute(inputs.at("x").view(), 2);
  const Tensor expected = RunOf(Sinusoidal(), problem, ViewsOf(inputs));
  const Tensor out = RunOf(Sinusoidal(), problem, ViewsOf(permuted_inputs),
                           {{"layout", "concatenated"}}, &permuted);
  EXPECT_LE(MaxDifference(out.view(), expected.view()), Bound(expected.view()));
}

TEST(Sinusoidal, AnOffsetIsTheEndOfALongerSequenceWhoseBeginningIsMasked) {
  const Problem whole = Self(2, 60, 8), end = Self(2, 20, 8);
  NamedTensors inputs = Random(whole), last;
  Tensor mask(DType::kU8, {2, 60});
  Fill(mask.view(), 1);
  Fill(Slice(mask.view(), 1, 0, 40), 0);
  inputs["key_mask"] = std::move(mask);
  last["x"] = Tensor(DType::kF32, {2, 20, 16});
  CopyElements(Slice(ConstTensorView(inputs.at("x").view()), 1, 40, 20), last["x"].view());
  const Tensor expected = RunOf(Sinusoidal(), whole, ViewsOf(inputs));
  const Tensor out = RunOf(Sinusoidal(), end, ViewsOf(last), {{"position_offset", "40"}});
  EXPECT_LE(MaxDifference(out.view(), Slice(expected.view(), 1, 40, 20)), Bound(expected.view()));
}

TEST(Sinusoidal, WhatItCannotDoIsSaidWithTheReason) {
  const auto error = [](Problem problem, const Options& options) {
    return std::string(Sinusoidal().Create(problem, options, Device::kCpu, 1).status().message());
  };
  Problem cross = Self(2, 40, 8);
  EXPECT_THAT(error(cross, {{"layout", "mixed"}}), HasSubstr("interleaved | concatenated"));
  EXPECT_THAT(error(cross, {{"inner", "multi_head"}}),
              HasSubstr("the input of multi_head is hidden"));
  cross.kv_tokens = 41;
  EXPECT_EQ(error(cross, {}), "sinusoidal is self-attention: query_tokens is 40, kv_tokens is 41");
}

TEST(Sinusoidal, TheCounterpartHasDenseAttentionInside) {
  const Options options = {{"inner", "longformer[window=8]"}, {"base", "500"}};
  EXPECT_EQ(ToString(Sinusoidal().Counterpart(Self(2, 40, 8), options).value()),
            "sinusoidal:base=500,bias=false,embedding_scale=one,frequencies=paper,inner=dense,"
            "layout=interleaved,position_offset=0");
}

TEST(Sinusoidal, GradientsAreThoseOfItsDefinition) {
  const Problem problem = Problem::SelfAttention(2, 2, 19, 8, /*causal=*/false);
  const Options options = {{"embedding_scale", "sqrt_model_dim"}, {"bias", "true"}};
  ExpectGradientsOfDefinition(Sinusoidal(), problem, {options, AttentionRoundings(problem)});
}

// ---- Golden files ----

class SinusoidalTable : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Files, SinusoidalTable,
                         testing::Values("distilbert", "marian", "marian_odd", "transformer_xl",
                                         "speech_to_text"));

TEST_P(SinusoidalTable, IsThatOfKnownCode) {
  const SafetensorsFile golden =
      GoldenFile(std::string("positional/sinusoidal/testdata/") + GetParam() + ".safetensors");
  SinusoidalOptions options;
  OptionBinder binder;
  options.Describe(binder);
  ASSERT_TRUE(binder
                  .Parse({{"layout", golden.metadata.at("layout")},
                          {"frequencies", golden.metadata.at("frequencies")}})
                  .ok());
  const Tensor& table = golden.tensors.at("table");
  const int64_t positions = table.dim(0), channels = table.dim(1);
  const Tensor ours = Sinusoids(0, positions, channels, options.form).value();
  EXPECT_LE(MaxDifference(ours.view(), table.view()), 0x1p-24);
  const auto exact = Table(0, positions, channels, options.form);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      EXPECT_NEAR(exact[p][c], *table.view().At<double>(p, c), 1e-14);
    }
  }
}

TEST(Sinusoidal, TorchsAttentionOnDistilbertsTableComputesTheSame) {
  const SafetensorsFile golden = GoldenFile("positional/sinusoidal/testdata/attention.safetensors");
  NamedTensors parameters;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name != "x" && name != "out") parameters[name] = tensor.Clone();
  }
  const Inputs inputs = {{"x", golden.tensors.at("x").view()}};
  const ConstTensorView out = golden.tensors.at("out").view();
  const Problem problem = Self(2, 21, 8);
  RunRequest request{{{"bias", "true"}, {"embedding_scale", "sqrt_model_dim"}}};
  request.parameters = &parameters;
  const auto defined = DefineTechnique(Sinusoidal(), problem, inputs, request);
  EXPECT_LE(MaxDifference(defined->at("out").view(), out), 1e-13);
  for (const Device device : TestedDevices()) {
    const Tensor ours = RunOf(Sinusoidal(), problem, inputs, request.options, &parameters, device);
    EXPECT_LE(MaxDifference(ours.view(), out), Bound(out)) << Name(device);
  }
}

TEST(Sinusoidal, CostCountsProjectionsAndPairs) {
  Problem problem = Problem::SelfAttention(3, 4, 5, 2, /*causal=*/true);
  problem.kv_heads = 2;
  problem.value_dim = 3;
  // The width is 8: q is 8 x 8, k 8 x 4, v 8 x 6, o 12 x 8; there are 15 pairs a head.
  const double weights = 8 * 8 + 8 * 4 + 8 * 6 + 12 * 8;
  EXPECT_EQ(CostOf(Sinusoidal(), problem).flops, 2 * 3 * (5 * weights + 4 * 15 * (2 + 3)));
}

}  // namespace
}  // namespace tfb::sinusoidal
