// Cross-entropy against smoothed labels: of the probability 1 of the label y, `smoothing` = e is
// spread over the classes.
//
//   loss = - sum_k q_k log p_k,  p = softmax(logits)
//
//   Spread::kAllClasses     q_k = e / K for all K classes, and 1 - e + e / K for y
//   Spread::kWrongClasses   q_k = e / (K - 1) for all classes but y, and 1 - e for y
//
// The two are the same where the latter's e is (K - 1) / K times the former's. Tokens whose label
// is `padding` have no loss and are not counted. Unless `spread_to_padding`, that class has q = 0,
// and K is the number of the other classes. `subtract_entropy` subtracts - sum_k q_k log q_k, the
// least that the loss can be, so that a prediction of q costs 0.
//
//   Spread         spread_to_padding  subtract_entropy  as in
//   kAllClasses    true               false             Szegedy et al. 2016; PyTorch's
//                                                       cross_entropy; fairseq before 0.10
//   kWrongClasses  true               false             fairseq since (label_smoothed_nll_loss)
//   kWrongClasses  true               true              Tensor2Tensor (smoothing_cross_entropy,
//                                                       which adds 1e-20 to q in the logarithm)
//   kWrongClasses  false              false             The Annotated Transformer; OpenNMT-py less
//                                                       the entropy, as a divergence
//
// Source: Szegedy, Vanhoucke, Ioffe, Shlens, Wojna 2016, "Rethinking the Inception architecture for
// computer vision", arXiv:1512.00567v3, section 7; the defaults are its. Vaswani et al.,
// arXiv:1706.03762v7, section 5.4, train with e = 0.1.
#ifndef TFB_CORE_LOSSES_LABEL_SMOOTHING_H_
#define TFB_CORE_LOSSES_LABEL_SMOOTHING_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

struct LabelSmoothing {
  enum class Spread : uint8_t { kAllClasses, kWrongClasses };

  double smoothing = 0.1;  // e, from 0 to 1
  Spread spread = Spread::kAllClasses;
  std::optional<int64_t> padding = std::nullopt;  // a class, or none
  bool spread_to_padding = true;
  bool subtract_entropy = false;
};

// Returns q [classes] for a label that is not padding. Returns InvalidArgument for numbers out of
// their range, and where e is spread over no class.
absl::StatusOr<std::vector<double>> SmoothedLabel(const LabelSmoothing& options, int64_t classes,
                                                  int64_t label);

struct SmoothedLoss {
  std::vector<double> of_token;  // in nats; 0 where the label is padding
  int64_t tokens = 0;            // tokens whose label is not padding

  double Sum() const;
  double Mean() const;  // over those tokens; 0 where there are none
};

// Returns the losses of logits [tokens, classes], of any floating dtype, and labels [tokens]. A
// logit of minus infinity makes the loss infinite where its class has q > 0. Returns
// InvalidArgument as SmoothedLabel does, and for logits of another shape or an integer dtype.
absl::StatusOr<SmoothedLoss> SmoothedCrossEntropy(const LabelSmoothing& options,
                                                  const ConstTensorView& logits,
                                                  absl::Span<const int64_t> labels);

// The losses and their gradient, for training: in fp32, on the threads of a pool.
//
//   L = scale * sum of the losses,   dL/dlogit_k = scale (p_k - q_k),   0 where the label is padding
//
// (the derivative of log sum_k exp(logit_k) is p, and the q_k add up to 1; the paper's section 7
// has the same gradient). For the mean, scale is 1 over the number of tokens whose label is not
// padding.
struct SmoothedLossCall {
  ConstTensorView logits;            // [tokens, classes], f32, bf16 or f16, with any strides
  absl::Span<const int64_t> labels;  // [tokens]
  absl::Span<double> of_token = {};  // receives the losses; or empty
  double scale = 1;
  TensorView gradient =
      {};  // of the logits' shape, of any floating dtype; may be the logits; or empty
};
// Returns the scratch in bytes: a row and its exponentials for each thread.
size_t SmoothedLossWorkspaceBytes(int64_t classes, int threads);
// Computes the losses and the gradient. It allocates nothing, and its bits do not depend on the
// number of threads. Returns InvalidArgument as SmoothedCrossEntropy does, before it writes
// anything.
absl::Status ComputeSmoothedLoss(const LabelSmoothing& options, const SmoothedLossCall& call,
                                 const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LOSSES_LABEL_SMOOTHING_H_
