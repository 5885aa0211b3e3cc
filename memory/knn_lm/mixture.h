// How kNN-LM mixes the log-probabilities of a token, and the derivatives of the mixture. The CPU and
// kernels share it; knn_lm.h has the formulas. A probability of 0 is -inf here.
#ifndef TFB_MEMORY_KNN_LM_MIXTURE_H_
#define TFB_MEMORY_KNN_LM_MIXTURE_H_

#include <math.h>
#include <stdint.h>

#include "core/cuda/functor.h"

namespace tfb::knn_lm {

// Returns log(exp(a) + exp(b)); NaN where one of them is.
TFB_HOST_DEVICE float LogAdd(float a, float b) {
  const float max = a < b ? b : a, min = a < b ? a : b;
  return max == -INFINITY ? max : max + log1pf(expf(min - max));
}

// Returns the number that counts in the place of a lambda.
TFB_HOST_DEVICE float InRange(float lambda) { return lambda < 0 ? 0 : lambda > 1 ? 1 : lambda; }

// Returns the factor of context - key_i in the gradient of the context, of that of e_i = -d_i /
// temperature.
TFB_HOST_DEVICE float DifferenceFactor(double of_exponent, double temperature) {
  return static_cast<float>(-2 * of_exponent / temperature);
}

struct Mixture {
  float log_model;   // log(1 - lambda)
  float log_lambda;  // log(lambda)

  // Returns log p of a token.
  TFB_HOST_DEVICE float LogP(float log_p_lm, float log_p_knn) const {
    return LogAdd(log_model + log_p_lm, log_lambda + log_p_knn);
  }

  // The derivatives of log p of a token; 0 where the token is impossible.

  // Returns that by log p_LM: (1 - lambda) p_LM / p.
  TFB_HOST_DEVICE float ByModel(float log_p_lm, float log_p) const {
    return log_p == -INFINITY ? 0 : expf(log_model + log_p_lm - log_p);
  }
  // Returns that by the logarithm of a neighbour's weight w, with the sum of all weights fixed:
  // lambda w / p.
  TFB_HOST_DEVICE float ByNeighbour(float log_weight, float log_p) const {
    return log_p == -INFINITY ? 0 : expf(log_lambda + log_weight - log_p);
  }
  // Returns that by lambda: (p_kNN - p_LM) / p.
  TFB_HOST_DEVICE static float ByLambda(float log_p_lm, float log_p_knn, float log_p) {
    return log_p == -INFINITY ? 0 : expf(log_p_knn - log_p) - expf(log_p_lm - log_p);
  }
};

TFB_HOST_DEVICE Mixture MixtureOf(float lambda) { return {log1pf(-lambda), logf(lambda)}; }

}  // namespace tfb::knn_lm

#endif  // TFB_MEMORY_KNN_LM_MIXTURE_H_
