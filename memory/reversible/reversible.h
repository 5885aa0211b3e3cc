// Reversible residual layers: two streams, where each layer's inputs can be computed from its
// outputs, so that training stores the activations of no layer but the last.
//
// For block n = 1 .. layers, on streams that both begin as x:
//
//   y_1 = x_1 + F_n(x_2),   y_2 = x_2 + G_n(y_1)           forward
//   x_2 = y_2 - G_n(y_1),   x_1 = y_1 - F_n(x_2)           inverse
//   F_n = f(LN(.)),         G_n = FF(LN(.)),   FF(h) = activation(h W_1 + b_1) W_2 + b_2
//
// f is any technique on hidden states whose output has its input's shape, by default multi-head
// attention, one for all blocks or a list with one for each; LN as in core/layers/layer_norm.h. f
// applies causality and padding. What f reads
// beside x, such as key_mask and other masks, are inputs that all blocks read; noise and choices to
// follow are each block's own, layerN.f.NAME. Each token's FF depends on that token alone, so that
// it can be computed for one part of the tokens after the other (`chunks`), with the same bits,
// except where cuBLAS computes products, since it uses other kernels for other sizes. `output` says
// how the two streams are joined: concatenated (as trax does), their mean (lucidrains'
// reformer-pytorch), or their sum.
//
// The map is exact in real numbers whatever F and G are, and its Jacobian has determinant 1. In
// floating point F and G give the same bits for the same input in both directions, so that a block
// whose streams are the same bits is undone but for the roundings of y + F and y - F: for K blocks
// |x - x'| <= k K eps max|y|, with k from 0.2 to 1.1 for seeded weights and up to 24 blocks (F and
// G that stretch differences stretch these too). The streams are f32 in all problems. In 16-bit
// problems f reads and writes the problem's dtype; that is a part of the definition.
//
// Sources: Gomez, Ren, Urtasun, Grosse 2017, "The reversible residual network: backpropagation
// without storing activations", arXiv:1707.04585v1, section 3.1 and algorithm 1; the Transformer's
// form: Kitaev, Kaiser, Levskaya 2020, "Reformer: the efficient Transformer", arXiv:2001.04451v2,
// section 3. RevNet splits x into the two streams where Reformer duplicates it. Reformer's own f is
// multi_head[inner=lsh]. A technique that selects by content may select otherwise for an x_2 with
// other roundings, and F then differs; Reformer's authors store the selection, and dropout's draws,
// which do not exist here. No layer norm follows the last block; trax has one after the
// concatenation.
//
// Cost of a block and token, d = model_dim: f's, and 4 feed_forward_dim d FLOPs. A backward pass
// takes one more forward. Activations: 2 tokens d floats a sequence, whatever the number of blocks
// (where a plain residual network stores some of that for each, and one with the option recompute of
// core/layers/recompute.h a state for each), f's scratch, and FF's inner activations for
// ceil(tokens / chunks) tokens.
//
// The technique reads x [batch, tokens, model_dim], the optional key_mask and the further inputs of
// f; kv_tokens must be query_tokens. It writes out [batch, tokens, model_dim], or 2 model_dim where
// concatenated.
//
// The parameters, f32, are layerN.f.NAME, those of f; layerN.g.w1 [model_dim, inner], .b1, .w2,
// .b2; layerN.f_norm and layerN.g_norm with .gamma and .beta [model_dim]. Matrices and biases of g
// are drawn N(0, 1 / rows of the matrix), gammas 1, betas 0.
//
// It returns InvalidArgument where f has another number of techniques than 1 or `layers`. The
// counterpart is the same network with f's counterpart inside.
#ifndef TFB_MEMORY_REVERSIBLE_REVERSIBLE_H_
#define TFB_MEMORY_REVERSIBLE_REVERSIBLE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/activation.h"
#include "core/technique.h"

namespace tfb::reversible {

struct ReversibleOptions {
  enum class Output { kConcatenate, kMean, kSum };

  int64_t layers = 2;
  TechniqueList f = {{{"multi_head", {}}}};
  int64_t feed_forward_dim = 0;
  Activation activation = Activation::kRelu;
  int64_t chunks = 1;
  Output output = Output::kConcatenate;

  void Describe(OptionBinder& bind);
};

// The description of a network that both directions of the definition read.
struct ReversibleNetwork {
  const Problem& problem;
  const ReversibleOptions& options;
  const NamedTensors& parameters;
  Inputs inputs;                   // of which x is not read
  DefinitionRequest request = {};  // of which parts get what OfPart says
};
enum class Branch : uint8_t { kF, kG };

// Computes F_n(x) or G_n(x) of block n in float64, f64 [batch, tokens, model_dim].
absl::StatusOr<Tensor> DefineBranch(const ReversibleNetwork& network, int64_t block, Branch branch,
                                    const Tensor& x);
// Runs all blocks on f64 streams, in place: from the first block's inputs to the last one's
// outputs, or back.
absl::Status DefineForward(const ReversibleNetwork& network, Tensor* first, Tensor* second);
absl::Status DefineInverse(const ReversibleNetwork& network, Tensor* first, Tensor* second);

}  // namespace tfb::reversible

#endif  // TFB_MEMORY_REVERSIBLE_REVERSIBLE_H_
