#include "core/random.h"

#include <cmath>

#include "gtest/gtest.h"

namespace tfb {
namespace {

TEST(Philox, MatchesThePublishedTestVectors) {
  // The expected values are Random123's kat_vectors for philox4x32-10.
  EXPECT_EQ(Philox({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomStream, NormalsHaveTheMomentsOfANormal) {
  const RandomStream stream(7, "moments");
  constexpr int kDraws = 200000;
  double sum[5] = {};
  for (int i = 0; i < kDraws; ++i) {
    const double x = stream.Normal(i);
    for (int power = 1; power <= 4; ++power) sum[power] += std::pow(x, power) / kDraws;
  }
  // The tolerance is five standard deviations of each moment's estimate: sqrt(1, 2, 15, 96) /
  // sqrt(draws).
  const double unit = 5 / std::sqrt(kDraws);
  EXPECT_NEAR(sum[1], 0, unit);
  EXPECT_NEAR(sum[2], 1, unit * std::sqrt(2.0));
  EXPECT_NEAR(sum[3], 0, unit * std::sqrt(15.0));
  EXPECT_NEAR(sum[4], 3, unit * std::sqrt(96.0));
}

TEST(RandomStream, StreamsAndSeedsDifferAndADrawIsAFunctionOfItsIndex) {
  EXPECT_NE(RandomStream(1, "q").Bits(0), RandomStream(1, "k").Bits(0));
  EXPECT_NE(RandomStream(1, "q").Bits(0), RandomStream(2, "q").Bits(0));
  EXPECT_EQ(RandomStream(1, "q").Bits(5), RandomStream(1, "q").Bits(5));
  EXPECT_NE(RandomStream(1, "q").Bits(0), RandomStream(1, "q").Bits(uint64_t{1} << 32));
}

TEST(Fill, UniformStaysInItsInterval) {
  Tensor tensor(DType::kF32, {1000});
  FillUniform(&tensor, 3, "u", 2, 3);
  for (float x : tensor.span<float>()) {
    EXPECT_GE(x, 2);
    EXPECT_LE(x, 3);
  }
}

// The Gumbel distribution has the mean 0.5772 and the variance pi^2 / 6.
TEST(Fill, GumbelHasItsMoments) {
  Tensor tensor(DType::kF64, {100000});
  FillDrawn(&tensor, Distribution::kGumbel, 3, "g");
  double mean = 0, square = 0;
  for (double g : tensor.span<double>()) {
    mean += g / 1e5;
    square += g * g / 1e5;
  }
  const double variance = M_PI * M_PI / 6, fourth = 5.4 * variance * variance;  // kurtosis 12/5 + 3
  EXPECT_NEAR(mean, 0.5772156649, 4 * std::sqrt(variance / 1e5));
  EXPECT_NEAR(square - mean * mean, variance, 4 * std::sqrt(fourth / 1e5));
}

// The hash is FNV-1a with 64 bits; that of "foobar" is published as 0x85944171f73967e8.
TEST(RandomStream, DrawsAreThoseOfPhiloxAtTheIndexWithSeedAndHashOfTheName) {
  const uint64_t seed = 0x123456789abcdef0;
  const RandomStream stream(seed, "foobar");
  for (const uint64_t index : {uint64_t{0}, uint64_t{5}, uint64_t{0xfedcba9876543210}}) {
    const std::array<uint32_t, 4> words = Philox(
        {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0xf73967e8, 0x85944171},
        {0x9abcdef0, 0x12345678});
    const uint64_t first = words[0] + (uint64_t{words[1]} << 32);
    const uint64_t second = words[2] + (uint64_t{words[3]} << 32);
    // The middles of 2^53 intervals.
    const double u = std::ldexp(static_cast<double>(first / 2048) + 0.5, -53);
    const double angle = std::ldexp(static_cast<double>(second / 2048) + 0.5, -53);
    EXPECT_EQ(stream.Bits(index), first);
    EXPECT_EQ(stream.Uniform(index), u);
    // Box and Muller's; the last bits are those of the functions.
    EXPECT_NEAR(stream.Normal(index), std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * angle),
                1e-14);
  }
}

TEST(Fill, ElementsAreTheDrawsOfTheirIndexInTheDistribution) {
  const RandomStream stream(3, "name");
  Tensor normal(DType::kF64, {2, 3}), uniform = normal.Clone();
  FillNormal(&normal, 3, "name", 5, 0.25);
  FillUniform(&uniform, 3, "name", 4, 7);
  Tensor drawn[] = {normal.Clone(), normal.Clone(), normal.Clone()};
  FillDrawn(&drawn[0], Distribution::kNormal, 3, "name");
  FillDrawn(&drawn[1], Distribution::kUniform, 3, "name");
  FillDrawn(&drawn[2], Distribution::kGumbel, 3, "name");
  for (int64_t n = 0; n < 6; ++n) {
    EXPECT_EQ(normal.view().Get(n), 5 + 0.25 * stream.Normal(n));
    EXPECT_NEAR(uniform.view().Get(n), 4 + 3 * stream.Uniform(n), 1e-15);
    EXPECT_EQ(drawn[0].view().Get(n), stream.Normal(n));
    EXPECT_EQ(drawn[1].view().Get(n), stream.Uniform(n));
    EXPECT_EQ(drawn[2].view().Get(n), -std::log(-std::log(stream.Uniform(n))));
  }
}

}  // namespace
}  // namespace tfb
