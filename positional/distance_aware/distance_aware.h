// DA-Transformer: distance-aware attention, whose heads learn how far they look.
//
//   s_ij = relu(q_i . k_j) f_h(|p_i - j|) / sqrt(head_dim),   p_i = i + kv_tokens - query_tokens
//   f_h(n) = (1 + exp(beta_h)) / (1 + exp(beta_h - alpha_h n))
//          = exp(softplus(beta_h) - softplus(beta_h - alpha_h n))
//
// and y_i is the mean of the values under softmax_j(s_ij). f(0) = 1. With alpha > 0 distance
// multiplies scores by up to 1 + exp(beta), with alpha < 0 it takes them to 0. A score of 0 keeps the
// weight exp(0): f -> 0 flattens attention over far keys, it does not hide them, and so does the
// ReLU with keys of a negative product. Masks act after the product. The second form of f, which the
// layer computes, stays finite wherever f does.
//
// Source: Wu, Wu, Huang 2021, "DA-Transformer: distance-aware transformer", NAACL,
// arXiv:2010.06925v2, sections 3.1 to 3.3; alpha and beta are its w and v. The paper's model is an
// encoder, without a causal mask.
// Where the paper is silent: d under the root is head_dim. alpha is drawn from N(0, 0.1^2), so that
// half of the heads prefer far keys and half near ones and f changes over some ten tokens, and beta
// from N(0, 1). No code of the authors is public.
//
// Cost: dense attention, and a comparison and a product a score; memory heads (query_tokens +
// kv_tokens) floats.
#ifndef TFB_POSITIONAL_DISTANCE_AWARE_DISTANCE_AWARE_H_
#define TFB_POSITIONAL_DISTANCE_AWARE_DISTANCE_AWARE_H_

#include <cstdint>

#include "core/technique.h"

namespace tfb {

struct DistanceAwareOptions {
  void Describe(OptionBinder&) {}
};

// f(distance) by the stable form.
double DistanceAwareFactor(double alpha, double beta, int64_t distance);

// Parameters: alpha [query_heads], beta [query_heads].
class DistanceAware : public TechniqueOf<DistanceAwareOptions> {
 public:
  DistanceAware();

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const DistanceAwareOptions& options,
                                                   Device device, uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const DistanceAwareOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
};

}  // namespace tfb

#endif  // TFB_POSITIONAL_DISTANCE_AWARE_DISTANCE_AWARE_H_
