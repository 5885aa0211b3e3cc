// Measures how far attention to the same relative offsets changes when a sequence grows from a
// model's training length to eight times that, which decides whether a model can read more than it
// was trained on. Figure 4 of ALiBi (Press, Smith, Lewis 2022, arXiv:2108.12409v2) has the
// resulting perplexities.
//
// The last S = T / 8 of T tokens represent training. For a query near their end let w_j be its
// weights over all T keys and w'_j those over the last S, both by the technique's definition:
//
//   change  = 1/2 sum_j |w_j - w'_j|          over all T keys, w' being 0 on the first T - S
//   reshape = 1/2 sum_j |w_j / W - w'_j|      over the last S keys, W = the sum of w there
//
// Both are 0 for equal weights and 1 for disjoint ones. `change` includes the attention to offsets
// that training never had, which a bias towards recent keys keeps low. `reshape` does not: it is 0
// where scores depend only on contents and distances, and more where they depend on positions.
#ifndef TFB_HARNESS_JUDGE_EXTRAPOLATION_H_
#define TFB_HARNESS_JUDGE_EXTRAPOLATION_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

struct EvaluateRequest;  // harness/judge/evaluate.h

struct Extrapolation {
  double change = 0;
  double reshape = 0;
};
constexpr int64_t kExtrapolationGrowth = 8;  // T / S

// Returns means over heads and over those rows that see at least three quarters of the last S
// tokens. Returns nothing where the sequence is shorter than 64 tokens, where the technique is not
// self-attention, where the parameters depend on the length, or where the definition of the shorter
// sequence has no weights. `parameters` are the layer's, and `weights`, f64 [batch, heads, rows,
// kv_tokens], those of its definition for the request's rows.
absl::StatusOr<std::optional<Extrapolation>> MeasureExtrapolation(const EvaluateRequest& request,
                                                                  const NamedTensors& parameters,
                                                                  const ConstTensorView& weights);

// Returns the two numbers of one row: `all` has the weights of T keys, `last` those of the last S
// alone. Returns nothing where either sees no key.
std::optional<Extrapolation> CompareLengths(absl::Span<const double> all,
                                            absl::Span<const double> last);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_EXTRAPOLATION_H_
