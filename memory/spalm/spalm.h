// SPALM: a language model whose last state is gated with an average of the output embeddings of the
// tokens that followed the most similar of its earlier states.
//
//   y_i = row value_i of `output`,  the embeddings of the neighbours' tokens
//   m   = sum_i softmax_i(y_i . x) y_i                        without 1 / sqrt(d)
//   g   = s(w_g . x)                                          s the logistic function; a number
//   z   = (1 - g) m + g x
//   p   = softmax(output z)
//
// The sum is over the neighbours i of the token in the datastore
// (core/retrieval/retrieval_layer.h), whose distances are not used. The output is log p. A token
// without neighbours has g = 1: p is the model's.
//
// The backward pass, of the neighbours as found, with dz = dL/dz, w the softmax's weights and m and y_i
// as above:
//
//   dg = dz . (x - m),  ds = dg g (1 - g),  dw_g = ds x,  dm = (1 - g) dz
//   dc_i = w_i (dm . y_i - dm . m),  dy_i = w_i dm + dc_i x,  dx = g dz + ds w_g + sum_i dc_i y_i
//
// where the rows of `output` have dy_i beside what the logits give them. `context` has none: it only
// finds the neighbours.
//
// Source: Yogatama, de Masson d'Autume, Kong 2021, "Adaptive semiparametric language models", TACL
// 9, arXiv:2102.02557v1, section 2: k = 4, with states and keys from a Transformer that was trained
// before. Its model is a Transformer-XL; x is the last hidden state of any. The authors published
// no code; g where there is no neighbour is this project's choice.
//
// Cost of a token: 2 entries model_dim FLOPs for the search, 2 vocabulary model_dim for p, and (4 k +
// 5) model_dim for m, g and z.
#ifndef TFB_MEMORY_SPALM_SPALM_H_
#define TFB_MEMORY_SPALM_SPALM_H_

#include <cstdint>
#include <memory>

#include "core/retrieval/retrieval_layer.h"
#include "core/retrieval/retrieval_technique.h"
#include "core/technique.h"

namespace tfb::spalm {

struct SpalmOptions : RetrievalOptions {
  SpalmOptions() { k = 4; }
};

// core/retrieval/retrieval_layer.h lists inputs, outputs and parameters; there is also the
// parameter spalm.gate, w_g [model_dim], drawn N(0, 1 / model_dim). The counterpart is the model
// alone, k = 0. The statistic of a run is "gate", the mean of g.
class Spalm : public RetrievalTechnique<SpalmOptions> {
 public:
  Spalm();

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> CreateLayer(const Problem& problem,
                                                     const SpalmOptions& options, Device device,
                                                     uint64_t seed) const override;
  absl::Status DefineChecked(const Problem& problem, const SpalmOptions& options,
                             const NamedTensors& parameters, const Inputs& inputs,
                             const DefinitionRequest& request,
                             NamedTensors* outputs) const override;
};

}  // namespace tfb::spalm

#endif  // TFB_MEMORY_SPALM_SPALM_H_
