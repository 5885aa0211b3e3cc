#include "core/training/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "core/training/gradients.h"

namespace tfb {

absl::StatusOr<LossScaler> LossScaler::Create(const LossScalerOptions& options) {
  const auto refuse = [](absl::string_view name, double value, absl::string_view allowed) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", value, "; allowed are numbers ", allowed));
  };
  if (!(options.least > 0)) return refuse("least", options.least, "above 0");
  if (!(options.scale >= options.least) || std::isinf(options.scale)) {
    return refuse("scale", options.scale, absl::StrCat("from least, ", options.least, ", on"));
  }
  if (!(options.growth > 1)) return refuse("growth", options.growth, "above 1");
  if (!(options.backoff > 0 && options.backoff < 1)) {
    return refuse("backoff", options.backoff, "between 0 and 1");
  }
  if (options.interval < 1) {
    return refuse("interval", static_cast<double>(options.interval), "from 1 on");
  }
  return LossScaler(options);
}

bool LossScaler::Unscale(NamedTensors* gradients) {
  const double factor = 1 / scale_;
  if (!std::isfinite(GlobalNorm(*gradients))) {
    scale_ = std::max(options_.least, scale_ * options_.backoff);
    steps_ = 0;
    return false;
  }
  ScaleGradients(factor, gradients);
  if (++steps_ == options_.interval) {
    scale_ *= options_.growth;
    steps_ = 0;
  }
  return true;
}

absl::Status LossScaler::Restore(double scale, int64_t steps) {
  if (!(scale >= options_.least) || std::isinf(scale) || steps < 0 || steps >= options_.interval) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale ", scale, " after ", steps, " steps; allowed are scales from ",
                     options_.least, " on, and 0 to ", options_.interval - 1, " steps"));
  }
  scale_ = scale;
  steps_ = steps;
  return absl::OkStatus();
}

NamedTensors RoundedTo(DType dtype, const NamedTensors& masters) {
  NamedTensors rounded;
  for (const auto& [name, tensor] : masters) {
    rounded[name] =
        tensor.dtype() == DType::kF32 ? tensor.CloneAs(dtype).CloneAs(DType::kF32) : tensor.Clone();
  }
  return rounded;
}

}  // namespace tfb
