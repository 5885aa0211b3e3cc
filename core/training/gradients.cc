#include "core/training/gradients.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace tfb {

absl::Status CheckGradients(const NamedTensors& gradients, const NamedTensors& of,
                            absl::string_view what) {
  for (const auto& [name, gradient] : gradients) {
    const auto found = of.find(name);
    if (found == of.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no parameter for ", what, " ", name));
    }
    if (gradient.dtype() == DType::kF32 && gradient.shape() == found->second.shape()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        what, " ", name, " is ", Name(gradient.dtype()), " ", ShapeString(gradient.shape()),
        "; expected is f32 ", ShapeString(found->second.shape())));
  }
  return absl::OkStatus();
}

double GlobalNorm(const NamedTensors& gradients) {
  double squares = 0;
  for (const auto& entry : gradients) {
    for (const float g : entry.second.span<float>()) squares += static_cast<double>(g) * g;
  }
  return std::sqrt(squares);
}

double ClipByGlobalNorm(double most, NamedTensors* gradients) {
  constexpr double kSmall = 1e-6;
  const double norm = GlobalNorm(*gradients);
  if (std::isfinite(norm) && norm + kSmall > most)
    ScaleGradients(most / (norm + kSmall), gradients);
  return norm;
}

void ScaleGradients(double factor, NamedTensors* gradients) {
  for (auto& entry : *gradients) {
    for (float& g : entry.second.span<float>()) g = static_cast<float>(factor * g);
  }
}

}  // namespace tfb
