// For tests of what forward passes say that rounding took from their output.
#ifndef TFB_CORE_FLASH_REST_TESTING_H_
#define TFB_CORE_FLASH_REST_TESTING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/tensor.h"
#include "core/testing.h"

namespace tfb {

// Returns the largest error of out + out_rest, of 16 bits, as a share of its bound: `exact` is the
// output that the same call writes in f32. Out is `exact` rounded, and the rest is rounded in turn,
// to a spacing of 2^-24 of f16's smallest numbers; f32 rounds products by the rows' factors.
// Infinite where out is not `exact` rounded.
inline double LargestErrorOfRest(const ConstTensorView& exact, const ConstTensorView& out,
                                 const ConstTensorView& out_rest) {
  Tensor rounded(out.dtype, exact.shape());
  CopyElements(exact, rounded.view());
  double largest = 0;
  int64_t n = 0;
  for (int64_t b = 0; b < exact.dim(0); ++b) {
    for (int64_t h = 0; h < exact.dim(1); ++h) {
      for (int64_t i = 0; i < exact.dim(2); ++i) {
        for (int64_t c = 0; c < exact.dim(3); ++c, ++n) {
          const double y = exact.Get(exact.Offset(b, h, i, c));
          const double written = out.Get(out.Offset(b, h, i, c));
          const double rest = out_rest.Get(out_rest.Offset(b, h, i, c));
          if (written != rounded.view().Get(n)) return std::numeric_limits<double>::infinity();
          const double bound = UnitRoundoff(out.dtype) * std::abs(y - written) +
                               std::ldexp(std::abs(y), -23) + std::ldexp(1, -25);
          const double share = std::abs(written + rest - y) / bound;
          largest = std::isnan(share) ? std::numeric_limits<double>::infinity()
                                      : std::max(largest, share);
        }
      }
    }
  }
  return largest;
}

}  // namespace tfb

#endif  // TFB_CORE_FLASH_REST_TESTING_H_
