#include "adaptive/adaptive_span/span_penalty.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb::adaptive_span {
namespace {

absl::StatusOr<ConstTensorView> Find(const NamedTensors& parameters, const std::string& name,
                                     int rank) {
  const auto found = parameters.find(name);
  if (found == parameters.end()) {
    return absl::InvalidArgumentError(absl::StrCat("there is no parameter ", name));
  }
  const ConstTensorView view = found->second.view();
  if (view.rank == rank) return view;
  return absl::InvalidArgumentError(absl::StrCat("parameter ", name, " has shape ",
                                                 ShapeString(view.shape()), "; expected are ", rank,
                                                 " dimensions"));
}

Tensor Zeros(const Shape& shape) {
  Tensor zeros(DType::kF32, shape);
  Fill(zeros.view(), 0);
  return zeros;
}

absl::StatusOr<SpanPenalty> OfParameters(const AdaptiveSpanOptions& options,
                                         const NamedTensors& parameters, double weight) {
  TFB_ASSIGN_OR_RETURN(const ConstTensorView span, Find(parameters, "span", 1));
  SpanPenalty penalty;
  Tensor& gradient = penalty.parameters["span"] = Zeros(span.shape());
  const double most = static_cast<double>(options.max_span);
  const double share = weight / static_cast<double>(span.dim(0));
  for (int64_t h = 0; h < span.dim(0); ++h) {
    const double z = span.Get(span.Offset(h));
    penalty.loss += share * std::clamp(z, 0.0, most);
    if (z > 0 && z < most) gradient.view().Set(h, share);
  }
  return penalty;
}

absl::StatusOr<SpanPenalty> OfTokens(const AdaptiveSpanOptions& options,
                                     const NamedTensors& parameters, const ConstTensorView& x,
                                     double weight) {
  TFB_ASSIGN_OR_RETURN(const ConstTensorView w, Find(parameters, "span_weight", 2));
  TFB_ASSIGN_OR_RETURN(const ConstTensorView b, Find(parameters, "span_bias", 1));
  const int64_t heads = w.dim(0), width = w.dim(1);
  if (b.dim(0) != heads || x.rank != 3 || x.dim(2) != width) {
    return absl::InvalidArgumentError(
        absl::StrCat("span_weight has shape ", ShapeString(w.shape()), ", span_bias ",
                     ShapeString(b.shape()), " and x ", ShapeString(x.shape()),
                     "; expected are [heads, model_dim], [heads] and [batch, "
                     "tokens, model_dim]"));
  }
  SpanPenalty penalty;
  Tensor& of_x = penalty.inputs["x"] = Zeros(x.shape());
  const int64_t rows = x.dim(0) * x.dim(1);
  const double most = static_cast<double>(options.max_span);
  const double share = rows == 0 ? 0 : weight / static_cast<double>(heads * rows);
  std::vector<double> of_w(heads * width, 0.0), of_b(heads, 0.0);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t batch = row / x.dim(1), token = row % x.dim(1);
    for (int64_t h = 0; h < heads; ++h) {
      double logit = b.Get(b.Offset(h));
      for (int64_t c = 0; c < width; ++c) {
        logit += w.Get(w.Offset(h, c)) * x.Get(x.Offset(batch, token, c));
      }
      const double part = 1 / (1 + std::exp(-logit));
      penalty.loss += share * most * part;
      const double of_logit = share * most * part * (1 - part);
      of_b[h] += of_logit;
      for (int64_t c = 0; c < width; ++c) {
        of_w[h * width + c] += of_logit * x.Get(x.Offset(batch, token, c));
        of_x.span<float>()[row * width + c] += static_cast<float>(of_logit * w.Get(w.Offset(h, c)));
      }
    }
  }
  const auto copy = [](const std::vector<double>& from, Tensor* to) {
    for (size_t n = 0; n < from.size(); ++n) to->view().Set(static_cast<int64_t>(n), from[n]);
  };
  copy(of_w, &(penalty.parameters["span_weight"] = Zeros(w.shape())));
  copy(of_b, &(penalty.parameters["span_bias"] = Zeros(b.shape())));
  return penalty;
}

}  // namespace

absl::StatusOr<SpanPenalty> PenaltyOfSpans(const AdaptiveSpanOptions& options,
                                           const NamedTensors& parameters, const ConstTensorView& x,
                                           double weight) {
  return options.dynamic ? OfTokens(options, parameters, x, weight)
                         : OfParameters(options, parameters, weight);
}

}  // namespace tfb::adaptive_span
