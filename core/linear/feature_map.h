// The features of engine linear: see linear.h for the formula.
#ifndef TFB_CORE_LINEAR_FEATURE_MAP_H_
#define TFB_CORE_LINEAR_FEATURE_MAP_H_

#include <stdint.h>

#include "core/cpu/kernels.h"

namespace tfb {

enum class KeyStabiliser : uint8_t { kRunning, kSequence, kNone };

// Tells whether a map's features are exponentials, relative to their maximum.
constexpr bool IsExponential(Feature feature) {
  return feature == Feature::kExp || feature == Feature::kExpPair;
}
// Tells whether a row of W gives two features.
constexpr bool IsPair(Feature feature) {
  return feature == Feature::kExpPair || feature == Feature::kSinCos;
}

// Inputs shorter than 2^-60 have no direction: they count as zero. The square of this length is an
// fp32 number.
constexpr float kLeastLength = 8.67361738e-19f;

// A key that is seen and whose square is beyond fp32 has a rho of -inf, which in a reference stands
// for no keys: it counts as this number there.
constexpr float kLeastReference = -3.40282347e+38f;

// A feature map. It is plain data: the engines of all devices read it.
struct FeatureMap {
  Feature feature = Feature::kExp;
  KeyStabiliser stabiliser = KeyStabiliser::kRunning;
  int64_t projections = 0;  // rows of W
  bool per_head = false;    // W is [kv_heads, projections, head_dim], not [projections, head_dim]
  float input_scale = 1;
  bool unit = false;         // inputs are scaled to unit length
  float length_epsilon = 0;  // added to the inputs' length, which divides them
  bool gated = false;
  double constant = 1;             // c
  double epsilon = 0;              // added to each feature
  double denominator_epsilon = 0;  // d, added to each entry of the sum of key features, for D_i
  // |D_i| below it is raised to it, keeping the sign. It does not apply to exponentials, whose sums
  // are relative to s.
  double denominator_floor = 0;

  int64_t features() const { return IsPair(feature) ? 2 * projections : projections; }
};

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_FEATURE_MAP_H_
