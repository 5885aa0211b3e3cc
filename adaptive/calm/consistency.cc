#include "adaptive/calm/consistency.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb::calm {
namespace {

int64_t ArgMax(const ConstTensorView& logits, int64_t b, int64_t n, int64_t t) {
  int64_t best = 0;
  double largest = -INFINITY;
  for (int64_t v = 0; v < logits.dim(3); ++v) {
    const double logit = logits.Get(logits.Offset(b, n, t, v));
    if (!(logit > largest)) continue;
    best = v;
    largest = logit;
  }
  return best;
}

absl::Status CheckLabels(const ConstTensorView& z, const ConstTensorView& labels) {
  if (z.dtype != DType::kF32 || z.rank != 3 || labels.dtype != DType::kI32 ||
      labels.shape() != z.shape()) {
    return absl::InvalidArgumentError(
        absl::StrCat("confidence_logits are f32 and labels i32, both [batch, tokens, exits]; these "
                     "are ",
                     Name(z.dtype), " ", ShapeString(z.shape()), " and ", Name(labels.dtype), " ",
                     ShapeString(labels.shape())));
  }
  for (int64_t b = 0; b < labels.dim(0); ++b) {
    for (int64_t t = 0; t < labels.dim(1); ++t) {
      for (int64_t n = 0; n < labels.dim(2); ++n) {
        const int32_t y = *labels.At<int32_t>(b, t, n);
        if (y == 0 || y == 1) continue;
        return absl::InvalidArgumentError(absl::StrCat("labels are 0 or 1; that of token ", t,
                                                       " of sequence ", b, " after layer ", n + 1,
                                                       " is ", y));
      }
    }
  }
  return absl::OkStatus();
}

// Returns log(1 + exp(x)).
double SoftPlus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

}  // namespace

absl::StatusOr<Tensor> ConsistencyLabels(const ConstTensorView& logits) {
  if (logits.rank != 4 || !IsFloating(logits.dtype) || logits.dim(1) < 1 || logits.dim(3) < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("logits of exits are [batch, exits, tokens, vocabulary] of a floating dtype; "
                     "these are ",
                     Name(logits.dtype), " ", ShapeString(logits.shape())));
  }
  const int64_t batch = logits.dim(0), last = logits.dim(1) - 1, tokens = logits.dim(2);
  Tensor labels(DType::kI32, {batch, tokens, last});
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t top = ArgMax(logits, b, last, t);
      for (int64_t n = 0; n < last; ++n) {
        *labels.view().MutableAt<int32_t>(b, t, n) = ArgMax(logits, b, n, t) == top ? 1 : 0;
      }
    }
  }
  return labels;
}

absl::StatusOr<ConsistencyLoss> ConsistencyLossOf(const ConstTensorView& z,
                                                  const ConstTensorView& labels) {
  TFB_RETURN_IF_ERROR(CheckLabels(z, labels));
  ConsistencyLoss result = {0, Tensor(DType::kF32, z.shape())};
  const int64_t batch = z.dim(0), tokens = z.dim(1), classes = z.dim(2);
  const double all = static_cast<double>(batch * tokens);
  for (int64_t n = 0; n < classes; ++n) {
    double agreeing = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < tokens; ++t) agreeing += *labels.At<int32_t>(b, t, n);
    }
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < tokens; ++t) {
        const double own = *z.At<float>(b, t, n), y = *labels.At<int32_t>(b, t, n);
        const double others = (y == 1 ? all - agreeing : agreeing) / all;
        const double weight = others / (all * static_cast<double>(classes));
        result.loss += weight * SoftPlus(y == 1 ? -own : own);
        *result.gradient.view().MutableAt<float>(b, t, n) =
            static_cast<float>(weight * (1 / (1 + std::exp(-own)) - y));
      }
    }
  }
  return result;
}

}  // namespace tfb::calm
