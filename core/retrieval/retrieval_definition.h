// The entries of a datastore that a token finds, in float64 and by plain loops, for definitions.
#ifndef TFB_CORE_RETRIEVAL_RETRIEVAL_DEFINITION_H_
#define TFB_CORE_RETRIEVAL_RETRIEVAL_DEFINITION_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "core/definition.h"
#include "core/problem.h"
#include "core/retrieval/retrieval_layer.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

struct Neighbour {
  int64_t entry = -1;   // none
  double distance = 0;  // |context - key|^2
};

// Reads the inputs, outputs and parameters of retrieval_layer.h.
class NeighbourDefinition {
 public:
  NeighbourDefinition(const RetrievalOptions& options, const NamedTensors& parameters,
                      const Inputs& inputs, const DefinitionRequest& request);

  // Returns the k neighbours of token i in the form of the output `neighbours`: those of the input
  // of that name where there is one, else the nearest. Among distances that differ by less than the
  // roundings of their differences to float, it takes a layer's order; among equal keys the older
  // entry is first.
  std::vector<Neighbour> Find(int64_t b, int64_t i) const;

 private:
  const double* Key(int64_t entry) const { return keys_.Row(entry); }
  double Distance(const double* context, int64_t entry) const;
  // Returns the distances; that of a row which is no entry is infinite.
  std::vector<double> DistancesTo(const double* context) const;
  std::vector<int64_t> Nearest(const std::vector<double>& distances) const;
  bool MayPrecede(const std::vector<double>& distances, int64_t a, int64_t b) const;
  bool IsRight(const std::vector<double>& distances, const std::vector<int64_t>& found,
               const int32_t* computed) const;

  RetrievalOptions options_;
  DoubleTensor keys_;
  std::vector<bool> may_be_found_;  // keys that are not too large to compare, nor NaN
  DoubleTensor context_;
  ConstTensorView given_;
  ConstTensorView computed_;
};

// Returns log softmax of the rows of `output` [vocabulary][dim] times `state`.
std::vector<double> LogProbabilities(const DoubleTensor& output, const RetrievalOptions& options,
                                     const double* state, int64_t dim);

// Writes a definition's outputs, out [batch, rows, vocabulary] and neighbours [batch, rows, k], by
// calling predict(b, i, neighbours) -> log-probabilities.
template <class Predict>
void DefineRetrieval(const Problem& problem, const RetrievalOptions& options,
                     const NamedTensors& parameters, const Inputs& inputs,
                     const DefinitionRequest& request, const Predict& predict,
                     NamedTensors* outputs) {
  const NeighbourDefinition definition(options, parameters, inputs, request);
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  const int64_t row_count = static_cast<int64_t>(rows.size());
  Tensor out(DType::kF64, {problem.batch, row_count, options.vocabulary});
  Tensor found(DType::kF64, {problem.batch, row_count, options.k});
  ForEachRow(request.pool, problem.batch, 1, row_count, [&](int64_t b, int64_t, int64_t r) {
    const std::vector<Neighbour> neighbours = definition.Find(b, rows[r]);
    const std::vector<double> log_probabilities = predict(b, rows[r], neighbours);
    for (int64_t y = 0; y < options.vocabulary; ++y) {
      *out.view().MutableAt<double>(b, r, y) = log_probabilities[y];
    }
    for (int64_t n = 0; n < options.k; ++n) {
      *found.view().MutableAt<double>(b, r, n) = static_cast<double>(neighbours[n].entry);
    }
  });
  (*outputs)["out"] = std::move(out);
  (*outputs)["neighbours"] = std::move(found);
}

}  // namespace tfb

#endif  // TFB_CORE_RETRIEVAL_RETRIEVAL_DEFINITION_H_
