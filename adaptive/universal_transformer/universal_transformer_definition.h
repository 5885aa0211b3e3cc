// The definition of universal_transformer in float64: the formulas of universal_transformer.h as loops.
#ifndef TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_DEFINITION_H_
#define TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_DEFINITION_H_

#include "absl/status/status.h"
#include "adaptive/universal_transformer/universal_transformer.h"
#include "core/technique.h"

namespace tfb::universal_transformer {

// Writes "out", "ponder" and "steps". Where the sum of a token's halting probabilities comes so near
// to the threshold that fp32 cannot tell on which side it is, request.computed's "steps" decide.
absl::Status DefineUniversalTransformer(const Problem& problem,
                                        const UniversalTransformerOptions& options,
                                        const NamedTensors& parameters, const Inputs& inputs,
                                        const DefinitionRequest& request, NamedTensors* outputs);

}  // namespace tfb::universal_transformer

#endif  // TFB_ADAPTIVE_UNIVERSAL_TRANSFORMER_UNIVERSAL_TRANSFORMER_DEFINITION_H_
