// The training of CALM's classifiers: each learns to tell whether the prediction after its layer is
// consistent with the whole model's.
//
//   y^n_t = 1 where argmax_v logits^n_tv = argmax_v logits^N_tv, else 0               n = 1, ..., N - 1
//   L     = 1 / ((N - 1) T) sum_n sum_t w^n_t (-y log sigmoid(z) - (1 - y) log(1 - sigmoid(z)))
//   w^n_t = the share of the layer's tokens whose label is the other one
//   dL/dz = w^n_t (sigmoid(z^n_t) - y^n_t) / ((N - 1) T)
//
// where z is the output confidence_logits and T are all tokens. Both labels of a layer weigh the same
// in all, however rare one of them is; a layer that all tokens agree on, or none, has no loss. The
// labels are constants: the rest of the model is frozen (calm.h).
//
// Source: Schuster et al. 2022, "Confident adaptive language modeling", arXiv:2207.07061v2, section 3;
// the weights are those of the authors' code (github.com/google-research/t5x, t5x/contrib/calm at
// cc342d4, loss_fn_meta_cls), whose classifiers have two outputs where ours have their difference.
#ifndef TFB_ADAPTIVE_CALM_CONSISTENCY_H_
#define TFB_ADAPTIVE_CALM_CONSISTENCY_H_

#include "absl/status/statusor.h"
#include "core/tensor.h"

namespace tfb::calm {

// Returns y, i32 [batch, tokens, N - 1], of the exits' logits [batch, N, tokens, vocabulary], of any
// floating dtype: exit_outputs times the output matrix. Of equal logits the first counts; a NaN is never
// the largest. Returns InvalidArgument for other shapes, an empty vocabulary, or an integer dtype.
absl::StatusOr<Tensor> ConsistencyLabels(const ConstTensorView& logits);

struct ConsistencyLoss {
  double loss;
  Tensor gradient;  // dL/dz, f32 [batch, tokens, N - 1]
};
// Returns the loss of z, f32 [batch, tokens, N - 1], and its gradient, which is what a backward pass
// takes for confidence_logits. A problem without tokens has no loss. Returns InvalidArgument where shapes
// or dtypes differ from these, or a label is neither 0 nor 1.
absl::StatusOr<ConsistencyLoss> ConsistencyLossOf(const ConstTensorView& z,
                                                  const ConstTensorView& labels);

}  // namespace tfb::calm

#endif  // TFB_ADAPTIVE_CALM_CONSISTENCY_H_
