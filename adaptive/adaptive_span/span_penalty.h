// The penalty on spans that training adds to the loss, so that heads look no further than it pays:
//
//   weight / M sum_h z_h                               of spans that are parameters; M heads
//   weight / (M n) sum over heads and tokens of z      of dynamic ones; n tokens of all batch rows
//
// z is the span that the attention uses, in tokens, so that one which the range [0, max_span] cuts off
// has no gradient; the dynamic one is max_span sigmoid(w_h . x + b_h).
//
// Source: Sukhbaatar et al. 2019, arXiv:1905.07799v2, section 3: the first is the L1 penalty of the
// spans; "dynamic" takes the mean over tokens too, so that a weight does not depend on their number.
#ifndef TFB_ADAPTIVE_ADAPTIVE_SPAN_SPAN_PENALTY_H_
#define TFB_ADAPTIVE_ADAPTIVE_SPAN_SPAN_PENALTY_H_

#include "absl/status/statusor.h"
#include "adaptive/adaptive_span/adaptive_span.h"
#include "core/tensor.h"

namespace tfb::adaptive_span {

struct SpanPenalty {
  double loss = 0;
  // Gradients, f32, to be added to those of the other losses: of "span", or of "span_weight",
  // "span_bias" and, among the inputs, "x".
  NamedTensors parameters;
  NamedTensors inputs;
};

// `parameters` are the layer's, or those of one layer of a stack with spans by these names; `x`
// [batch, tokens, model_dim] is read where the spans are dynamic. Returns InvalidArgument where a
// tensor is missing or its shape does not fit.
absl::StatusOr<SpanPenalty> PenaltyOfSpans(const AdaptiveSpanOptions& options,
                                           const NamedTensors& parameters, const ConstTensorView& x,
                                           double weight);

}  // namespace tfb::adaptive_span

#endif  // TFB_ADAPTIVE_ADAPTIVE_SPAN_SPAN_PENALTY_H_
