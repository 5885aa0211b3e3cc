#include "core/layers/sinusoid.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/status.h"

namespace tfb {
namespace {

// f_j of `channels` channels.
double Frequency(int64_t j, int64_t channels, const SinusoidForm& form) {
  const int64_t sines = (channels + 1) / 2;
  const double exponent =
      form.frequencies == SinusoidFrequencies::kPaper
          ? 2.0 * static_cast<double>(j) / static_cast<double>(channels)
          : static_cast<double>(j) / static_cast<double>(std::max<int64_t>(sines - 1, 1));
  return std::pow(form.base, -exponent);
}

void FillSinusoids(int64_t first, const SinusoidForm& form, Tensor* table) {
  const int64_t positions = table->dim(0), channels = table->dim(1);
  const bool interleaved = form.layout == SinusoidLayout::kInterleaved;
  const int64_t sines = (channels + 1) / 2;
  for (int64_t j = 0; j < sines; ++j) {
    const double frequency = Frequency(j, channels, form);
    const int64_t sine = interleaved ? 2 * j : j;
    const int64_t cosine = interleaved ? 2 * j + 1 : sines + j;
    for (int64_t p = 0; p < positions; ++p) {
      const double angle = static_cast<double>(first + p) * frequency;
      float* row = table->view().MutableAt<float>(p);
      row[sine] = static_cast<float>(std::sin(angle));
      if (cosine < channels) row[cosine] = static_cast<float>(std::cos(angle));
    }
  }
}

}  // namespace

absl::StatusOr<Tensor> Sinusoids(int64_t first, int64_t positions, int64_t channels,
                                 const SinusoidForm& form) {
  TFB_ASSIGN_OR_RETURN(Tensor table, Tensor::Allocate(DType::kF32, {positions, channels}));
  FillSinusoids(first, form, &table);
  return table;
}

Tensor RelativeSinusoids(int64_t distances, int64_t channels) {
  Tensor table(DType::kF32, {distances, channels});
  FillSinusoids(0, {SinusoidLayout::kConcatenated}, &table);
  return table;
}

}  // namespace tfb
