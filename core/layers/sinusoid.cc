#include "core/layers/sinusoid.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/status.h"

namespace tfb {
namespace {

// Returns f_0, f_1, ...
std::vector<double> Frequencies(int64_t channels, const SinusoidForm& form) {
  std::vector<double> frequencies((channels + 1) / 2);
  const double sines = static_cast<double>(frequencies.size());
  const double divisor = form.frequencies == SinusoidFrequencies::kPaper
                             ? static_cast<double>(channels) / 2
                             : std::max(sines - 1, 1.0);
  for (size_t j = 0; j < frequencies.size(); ++j) {
    frequencies[j] = std::pow(form.base, -static_cast<double>(j) / divisor);
  }
  return frequencies;
}

void FillSinusoids(int64_t first, const SinusoidForm& form, Tensor* table) {
  const int64_t positions = table->dim(0), channels = table->dim(1);
  const std::vector<double> frequencies = Frequencies(channels, form);
  const int64_t sines = static_cast<int64_t>(frequencies.size());
  const bool interleaved = form.layout == SinusoidLayout::kInterleaved;
  for (int64_t p = 0; p < positions; ++p) {
    float* row = table->view().MutableAt<float>(p);
    for (int64_t j = 0; j < sines; ++j) {
      const double angle = static_cast<double>(first + p) * frequencies[j];
      const int64_t cosine = interleaved ? 2 * j + 1 : sines + j;
      row[interleaved ? 2 * j : j] = static_cast<float>(std::sin(angle));
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
