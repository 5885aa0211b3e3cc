// Layers in float64, by their formulas, for the definitions of techniques: plain loops, which share
// nothing with the layers of this folder.
#ifndef TFB_CORE_LAYERS_LAYER_DEFINITIONS_H_
#define TFB_CORE_LAYERS_LAYER_DEFINITIONS_H_

#include <cstdint>
#include <string>

#include "core/definition.h"
#include "core/layers/activation.h"
#include "core/layers/sinusoid.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb::layers {

// Normalises a row of `width` channels: gamma (x - mean) / sqrt(variance + 1e-5) + beta.
void DefineNormOfRow(const double* gamma, const double* beta, int64_t width, double* row);
// Returns the normalisation of each row of h, f64 [..., width], by NAME.gamma and NAME.beta.
Tensor DefineNorm(const NamedTensors& parameters, const std::string& name, const Tensor& h);

// Computes an activation by its formula in activation.h.
double DefineActivation(Activation activation, double x);
// Returns activation(h W_1 + b_1) W_2 + b_2 of h, f64 [..., width], by NAME.w1, .b1, .w2, .b2.
Tensor DefineFeedForward(const NamedTensors& parameters, const std::string& name,
                         Activation activation, const Tensor& h, ThreadPool* pool);

// Returns channel c of position p's sinusoid PE[p] of `channels` channels (core/layers/sinusoid.h).
double DefineSinusoid(const SinusoidForm& form, int64_t channels, int64_t p, int64_t c);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_LAYER_DEFINITIONS_H_
