#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "Eigen/Core"

namespace tfb {
namespace {

template <class T>
uint16_t Stored(T value) {
  uint16_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <class T>
T Holding(uint16_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(bits));
  return value;
}

// Every number of 16 bits as a float is Eigen's; so is every float that lies at such a number, halfway
// to the next one, or one float beside that.
template <class Ours, class Theirs>
void ExpectEigens() {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const uint16_t stored = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(Holding<Ours>(stored));
    const float theirs = static_cast<float>(Eigen::numext::bit_cast<Theirs>(stored));
    if (std::isnan(theirs)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(Ours(value)))) << bits;
      continue;
    }
    ASSERT_EQ(BitsOf(value), BitsOf(theirs)) << bits;
    ASSERT_EQ(Stored(Ours(value)), stored) << "converting to float and back";
    const float next = static_cast<float>(Holding<Ours>(static_cast<uint16_t>(bits + 1)));
    const float between = value / 2 + next / 2;
    if (!std::isfinite(between)) continue;
    for (const float near :
         {between, std::nextafter(between, value), std::nextafter(between, next)}) {
      ASSERT_EQ(Stored(Ours(near)), Eigen::numext::bit_cast<uint16_t>(Theirs(near))) << near;
    }
  }
}

// Without the processor's instructions.
struct PortableHalf {
  explicit PortableHalf(float value) : bits(HalfBitsOf(value)) {}
  PortableHalf() = default;
  explicit operator float() const { return FloatOfHalf(bits); }
  uint16_t bits;
};

TEST(Half, ConversionsAreEigens) { ExpectEigens<Half, Eigen::half>(); }
TEST(Half, PortableConversionsAreEigens) { ExpectEigens<PortableHalf, Eigen::half>(); }
TEST(BFloat16, ConversionsAreEigens) { ExpectEigens<BFloat16, Eigen::bfloat16>(); }

TEST(Half, WhatIsTooLargeIsAnInfinity) {
  EXPECT_EQ(static_cast<float>(Half(65519.0f)), 65504);
  EXPECT_EQ(static_cast<float>(Half(65520.0f)), INFINITY);
  EXPECT_EQ(static_cast<float>(Half(-1e30f)), -INFINITY);
  EXPECT_EQ(static_cast<float>(Half(-INFINITY)), -INFINITY);
}

TEST(BFloat16, NaNsStayNaNs) {
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(FloatOf(bits))))) << bits;
  }
}

}  // namespace
}  // namespace tfb
