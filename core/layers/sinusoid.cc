#include "core/layers/sinusoid.h"

#include <cmath>

namespace tfb {

Tensor RelativeSinusoids(int64_t distances, int64_t channels) {
  Tensor table(DType::kF32, {distances, channels});
  const int64_t sines = (channels + 1) / 2;
  for (int64_t c = 0; c < channels; ++c) {
    const double exponent = -2.0 * static_cast<double>(c % sines) / static_cast<double>(channels);
    const double frequency = std::pow(10000.0, exponent);
    for (int64_t p = 0; p < distances; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      *table.view().MutableAt<float>(p, c) =
          static_cast<float>(c < sines ? std::sin(angle) : std::cos(angle));
    }
  }
  return table;
}

}  // namespace tfb
