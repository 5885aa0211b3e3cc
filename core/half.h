// The two floating-point types of 16 bits. They hold numbers; arithmetic is done in float.
//
// Every source includes this header, so it includes no library: Eigen's types of the same kind cost
// each source 1.5 seconds of compilation.
#ifndef TFB_CORE_HALF_H_
#define TFB_CORE_HALF_H_

#include <cstdint>
#include <cstring>

namespace tfb {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// bfloat16: the upper half of a float. Conversion rounds to nearest, ties to even.
class BFloat16 {
 public:
  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t bits = BitsOf(value);
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    // Below the part that is kept there is one half less an ulp, and an ulp more after an odd number.
    const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    // A NaN must not be rounded to an infinity: it keeps its sign and becomes quiet.
    bits_ = static_cast<uint16_t>((is_nan ? bits | 0x400000 : rounded) >> 16);
  }
  explicit BFloat16(double value) : BFloat16(static_cast<float>(value)) {}
  explicit operator float() const { return FloatOf(uint32_t{bits_} << 16); }
  explicit operator double() const { return static_cast<float>(*this); }

 private:
  uint16_t bits_;
};

// The bits of the binary16 next to a float, and the float that they stand for: for processors that
// have no instructions for it.
inline uint16_t HalfBitsOf(float value) {
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7FFFFFFF;
  const uint16_t sign = static_cast<uint16_t>((bits ^ magnitude) >> 16);
  if (magnitude > 0x7F800000) {  // a NaN, made quiet
    return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  }
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // from 65520 on all rounds to infinity
  if (magnitude < 0x38800000) {                       // below 2^-14 numbers are subnormal
    // The last bit of a number from 0.5 to 1 is 2^-24, as that of a subnormal one: adding rounds.
    return static_cast<uint16_t>(sign | (BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f)));
  }
  // The exponent's bias becomes 15 instead of 127, and 13 bits go as in BFloat16.
  const uint32_t rebiased = magnitude - (uint32_t{127 - 15} << 23);
  return static_cast<uint16_t>(sign | ((rebiased + 0xFFF + ((rebiased >> 13) & 1)) >> 13));
}
inline float FloatOfHalf(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16, magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) {  // an infinity, or a NaN, made quiet
    const uint32_t quiet = magnitude > 0x7C00 ? 0x400000 : 0;
    return FloatOf(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13) | quiet);
  }
  if (magnitude < 0x400) {  // subnormal, in units of 2^-24
    return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return FloatOf(sign | ((magnitude << 13) + (uint32_t{127 - 15} << 23)));
}

// IEEE 754 binary16: a sign, 5 bits of exponent, 10 of significand. Conversion rounds to nearest,
// ties to even.
class Half {
 public:
  Half() = default;
  explicit Half(float value) : bits_(Narrowed(value)) {}
  explicit Half(double value) : Half(static_cast<float>(value)) {}
  explicit operator float() const { return Widened(bits_); }
  explicit operator double() const { return Widened(bits_); }

 private:
#ifdef __F16C__
  // The processor's instructions, by the names that g++ and clang have for them: <immintrin.h>,
  // which names them for all compilers, is long.
  using EightHalves = short __attribute__((vector_size(16)));
  using FourFloats = float __attribute__((vector_size(16)));

  static uint16_t Narrowed(float value) {
    const FourFloats floats = {value, 0, 0, 0};
    return static_cast<uint16_t>(__builtin_ia32_vcvtps2ph(floats, /*to nearest even*/ 0)[0]);
  }
  static float Widened(uint16_t bits) {
    const EightHalves halves = {static_cast<short>(bits), 0, 0, 0, 0, 0, 0, 0};
    return __builtin_ia32_vcvtph2ps(halves)[0];
  }
#else
  static uint16_t Narrowed(float value) { return HalfBitsOf(value); }
  static float Widened(uint16_t bits) { return FloatOfHalf(bits); }
#endif

  uint16_t bits_;
};

static_assert(sizeof(Half) == 2 && sizeof(BFloat16) == 2, "as tensors hold them");

}  // namespace tfb

#endif  // TFB_CORE_HALF_H_
