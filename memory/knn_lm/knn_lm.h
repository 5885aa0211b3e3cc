// kNN-LM: a language model whose prediction is mixed with the tokens that followed the most similar
// of its earlier states.
//
//   p(y)     = (1 - lambda) p_LM(y) + lambda p_kNN(y)            p_LM = softmax(output x)
//   p_kNN(y) = sum of w_i over the neighbours i with value_i = y
//   w_i      = exp(-d_i / temperature) / sum_j exp(-d_j / temperature),   d_i = |context - key_i|^2
//
// over the k neighbours of the token in the datastore (core/retrieval/retrieval_layer.h). The
// output is log p. Distances are off by up to 2^-23 of themselves, as the search's are, and weights
// by that over the temperature. A token that finds no neighbour has p = p_LM. With lambda = 1,
// where p_LM has no weight, log p of the tokens that no neighbour has is -inf.
//
// The optional input lambda, f32 [batch, tokens], replaces the option, a number for each token; below
// 0 it counts as 0, above 1 as 1. By its gradient lambda, or a network that foretells it, is trained:
// the sum is that of one lambda for all tokens, and without the input that of the option.
//
// The backward pass, of the neighbours as found, with g_y = dL/dlog p(y), e_i = -d_i / temperature and
// y_i the value of neighbour i:
//
//   dlog p_LM(y) = g_y (1 - lambda) p_LM(y) / p(y)
//   de_i         = g_(y_i) b_i - w_i sum_j g_(y_j) b_j,   b_i = lambda w_i / p(y_i)
//   dcontext     = sum_i de_i (-2 / temperature) (context - key_i)
//   dlambda      = sum_y g_y (p_kNN(y) - p_LM(y)) / p(y)              0 where lambda was out of range
//
// A token of log p(y) = -inf gives nothing to any of them.
//
// Source: Khandelwal, Levy, Jurafsky, Zettlemoyer, Lewis 2020, "Generalization through
// memorization: nearest neighbor language models", arXiv:1911.00172v2, section 2: k = 1024 and
// lambda = 0.25 in the text's own domain. There the states and keys are the inputs of the last
// feed-forward network after its layer norm; here the model decides, not this layer. The
// temperature is that of kNN-MT, arXiv:2010.00710v2, section 2; here, as there, it divides squared
// distances.
//
// The authors' code (urvashik/knnlm, fairseq/knnlm.py and sequence_scorer.py) computes the
// probability of the gold token alone, the same number but for exp(-10000) in place of 0 where no
// neighbour has it. Its --dstore-fp16 keeps values as int16, which larger vocabularies overflow;
// that is not followed. A datastore made of the text that is scored holds the token's own entry:
// the caller who gives the datastore, or the neighbours, has to leave it out.
// The paper searches 4096 clusters of codes by product quantisation and ranks the results by the
// keys themselves; search=approximate has clusters too, and compares keys from the start.
//
// Cost of a token: 2 entries model_dim FLOPs for the search, 2 vocabulary model_dim for p_LM, 3 k
// model_dim for the distances that are recomputed; the datastore is read once for all tokens.
#ifndef TFB_MEMORY_KNN_LM_KNN_LM_H_
#define TFB_MEMORY_KNN_LM_KNN_LM_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/retrieval/retrieval_layer.h"
#include "core/retrieval/retrieval_technique.h"
#include "core/technique.h"

namespace tfb::knn_lm {

struct KnnLmOptions : RetrievalOptions {
  double lambda = 0.25;
  double temperature = 1;

  void Describe(OptionBinder& bind) {
    RetrievalOptions::Describe(bind);
    bind.Real("lambda", &lambda, 0, 1, "share of the neighbours in the prediction",
              {0, 0.1, 0.25, 0.5, 0.75, 0.9, 1});
    bind.Real("temperature", &temperature, 1e-3, 1e9,
              "of the neighbours' weights: the larger, the more alike",
              {0.1, 0.3, 1, 3, 10, 30, 100, 1000});
  }
};

// core/retrieval/retrieval_layer.h lists inputs, outputs and parameters. The counterpart is the
// model alone, k = 0. The statistics of a run are means over its tokens: "agreement", 1 where the
// nearest neighbour's value is the model's most likely token, and "neighbour_mass", lambda p_kNN of
// that token.
class KnnLm : public RetrievalTechnique<KnnLmOptions> {
 public:
  KnnLm();

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> CreateLayer(const Problem& problem,
                                                     const KnnLmOptions& options, Device device,
                                                     uint64_t seed) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const KnnLmOptions& options) const override;
  absl::Status DefineChecked(const Problem& problem, const KnnLmOptions& options,
                             const NamedTensors& parameters, const Inputs& inputs,
                             const DefinitionRequest& request,
                             NamedTensors* outputs) const override;
};

}  // namespace tfb::knn_lm

#endif  // TFB_MEMORY_KNN_LM_KNN_LM_H_
