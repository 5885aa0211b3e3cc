// Compressive Transformer: Transformer-XL whose oldest memories are not dropped but compressed, some
// rows into one, and kept in a second, coarser memory.
//
// Each layer has two first-in-first-out queues of its input's rows h (those that enter the layer,
// before any normalisation): `memory` of the last tokens, `compressed_memory` of compressed rows. For
// each segment, with M and C the rows that the queues hold,
//
//   layer     as in memory/transformer_xl/transformer_xl.h, post-norm or pre-norm, its keys and values
//             from the list [compressed memory; memory; segment]. Token i of the segment, which is
//             key C + M + i, sees all keys up to itself; distances are differences of places in the
//             list, whatever time a compressed row stands for
//   then      the segment joins the memory; rows beyond `memory` leave it, the oldest first, and are
//             compressed, `compression` = c of them to one; the oldest compressed rows are dropped
//
// The compression of n c rows, old -> new, y_t = new row t = 0 .. n - 1, x_j = old row j:
//
//   mean                  y_t = mean of x_(c t), ..., x_(c t + c - 1)
//   max                   y_t = their largest value in each channel
//   convolution           y_t = b + sum_(i < c) x_(c t + i) w_i
//   dilated_convolution   y_t = b + sum_(i < c) x_(c t + c - 1 - 2 i) w_i, rows before old are zeros
//   most_used             the n rows of old that received the most attention, in their order
//
// A row's attention is the mean weight that the queries and heads of the segment at whose end it left
// the memory gave it; of rows with equal ones the older stays.
//
// Rows that left the memory and do not fill a block of c wait, unseen, for those of the next
// segment. With eviction=whole_blocks none waits: for each block that the rows beyond `memory` begin,
// its c rows leave, so that the memory runs up to c - 1 rows short of `memory`. Queues begin empty, and nothing is compressed before the memory is full; with
// `start_zero` both begin full of zero vectors, which are attended to, as in the paper.
//
// The losses that the compression (and its decoder g) would be trained with, of one segment and layer,
// 0 where nothing was compressed:
//
//   attention_loss        || attn(h, old) - attn(h, new) ||   attn is content alone: for each head
//                         softmax(h W_q (m W_k)^T / sqrt(head_dim)) m W_v, no mask, no W_o
//   autoencoding_loss     || old - g(new) ||   g repeats a row c times; for the two convolutions it
//                         has their weights, g(y)_(c t + i) = y_t w_i^T
//
// The norm is over all of the segment's tokens (old rows) and channels; with pre_norm, attn reads
// normalised rows. With loss=mean_square a loss is the mean of the squares over those elements. With
// learned_positions a learned vector of each distance, head and layer is in the place of r_d W_r, and
// v stays. With `final_norm` out is LN of what the last layer writes.
//
// Source: Rae, Potapenko, Jayakumar, Lillicrap 2020, "Compressive Transformers for long-range
// sequence modelling", arXiv:1911.05507v1, sections 3.1 and 3.2; its algorithm 1 evicts as many rows
// as a segment has, which are those beyond `memory`, and has norms for losses. The paper leaves open
// what happens to rows that do not fill a block; which attention counts as use; where the padding of
// the dilated convolution is; the decoder. Two implementations have what the options add:
// labml_nn 0.5.1 (transformers/compressive) evicts whole blocks and learns vectors of distances for
// each layer; compressive-transformer-pytorch 0.4.0 learns them for all layers together, without u
// and v, and evicts what is beyond `memory`; both losses are mean squares. The latter pads rows that
// do not fill a block with as many zeros as it has rows too many, where as many as are missing would
// fill it: that is not followed, nor is its loss's comparison with the whole memory, which differs
// from that with the evicted rows where `memory` is longer than a segment.
//
// Gradients stop at the queues, as in Transformer-XL. A compression gets those of its own losses
// alone, which stop at the layer's state and parameters (section 3.2): so the losses have gradients
// where it convolves, for w and b alone, which those of out do not reach. A Run keeps for its
// backward pass the compressed rows, beside what Transformer-XL keeps; so which rows most_used keeps
// is as the Run found. The backward pass is on every device.
//
// Cost of a token and layer: Transformer-XL's with compressed_memory + memory keys more than the
// segment's, and 1/c of: 4 d^2 FLOPs for a compressed row's key and value, 2 c d^2 for a convolution
// (d = model_dim). Keys and values of compressed rows are projected once. most_used adds 4 d for each
// row that leaves and query. Reach through N layers: N (memory + c compressed_memory) tokens.
#ifndef TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_H_
#define TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/layers/feed_forward_dim.h"
#include "core/layers/final_norm.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/technique.h"

namespace tfb::compressive {

struct CompressiveOptions {
  enum class Function { kMean, kMax, kConvolution, kDilatedConvolution, kMostUsed };
  enum class Eviction { kOverflow, kWholeBlocks };
  enum class Loss { kNorm, kMeanSquare };
  static constexpr int64_t kMaxMemory = int64_t{1} << 20;

  int64_t layers = 2;
  int64_t segment = 64;
  int64_t memory = 64;
  int64_t compressed_memory = 64;
  int64_t compression = 4;
  Function function = Function::kMean;
  Eviction eviction = Eviction::kOverflow;
  Loss loss = Loss::kNorm;
  bool start_zero = false;
  int64_t given_memory = 0;
  int64_t given_compressed = 0;
  bool learned_positions = false;
  int64_t max_distance = 0;
  int64_t feed_forward_dim = 0;
  bool pre_norm = false;
  bool final_norm = false;
  bool share_biases = true;

  void Describe(OptionBinder& bind) {
    bind.Int("layers", &layers, 1, 32, "attention and feed-forward layers");
    bind.Int("segment", &segment, 1, kMaxMemory, "tokens that are processed at a time");
    bind.Int("memory", &memory, 0, kMaxMemory, "earlier tokens that a layer keeps as they are");
    bind.Int("compressed_memory", &compressed_memory, 0, kMaxMemory,
             "compressed rows that a layer keeps", {0, 64, 128, 256, 512, 1024});
    bind.Int("compression", &compression, 1, 64, "tokens that become one compressed row");
    // The paper's results are the convolution's, trained; untrained, a mean says more.
    bind.Choice("function", &function,
                {{"mean", Function::kMean},
                 {"max", Function::kMax},
                 {"convolution", Function::kConvolution},
                 {"dilated_convolution", Function::kDilatedConvolution},
                 {"most_used", Function::kMostUsed}},
                "how tokens are compressed");
    bind.Choice("eviction", &eviction,
                {{"overflow", Eviction::kOverflow}, {"whole_blocks", Eviction::kWholeBlocks}},
                "which tokens leave a memory that is too full: those beyond `memory`, or as many "
                "more as complete a block");
    bind.Choice("loss", &loss, {{"norm", Loss::kNorm}, {"mean_square", Loss::kMeanSquare}},
                "how the losses measure a difference of rows");
    bind.Bool("start_zero", &start_zero,
              "begin with memories full of zero vectors, unless rows of an earlier run are given");
    bind.Int("given_memory", &given_memory, 0, kMaxMemory,
             "tokens of an earlier run that the input `memories` holds; 0: there is none");
    bind.Int(
        "given_compressed", &given_compressed, 0, kMaxMemory,
        "compressed rows of an earlier run that the input `compressed` holds; 0: there is none");
    bind.Bool("learned_positions", &learned_positions,
              "a learned vector for each distance, head and layer in the place of the projected "
              "sinusoid");
    bind.Int("max_distance", &max_distance, 0, kMaxMemory,
             "larger distances count as this one; 0 means none do");
    DescribeFeedForwardDim(bind, &feed_forward_dim);
    bind.Bool("pre_norm", &pre_norm, "normalise the input of each sublayer instead of its output");
    DescribeFinalNorm(bind, &final_norm);
    bind.Bool("share_biases", &share_biases, "one u and one v for all layers");
  }

  bool is_given() const { return given_memory > 0 || given_compressed > 0; }
  // Returns how many of the given tokens have left the memory and wait to be compressed.
  int64_t given_waiting() const {
    return compressed_memory > 0 && given_memory > memory ? given_memory - memory : 0;
  }
  bool mean_square() const { return loss == Loss::kMeanSquare; }
  bool convolves() const {
    return function == Function::kConvolution || function == Function::kDilatedConvolution;
  }
};

// Compressive is causal self-attention only: kv_tokens must equal query_tokens, kv_heads
// query_heads, and value_dim head_dim.
//
// It writes out and, as transformer_xl does, the optional context. A Run also writes, optionally:
//
//   attention_loss, autoencoding_loss   [batch, segments, layers]
//   kept, with most_used                i32 [batch, segments, layers, most rows of a segment]: which of
//                                       the rows compressed after a segment stay, counted from the
//                                       oldest of them, ascending; -1 beyond the last
//   memories [batch, layers, M, model_dim]      what the queues hold behind the last token, the
//   compressed [batch, layers, C, model_dim]    oldest row first; before the rows of the memory
//                                               those that wait to be compressed, fewer than c
//   waiting_use [batch, layers, M - `memory`]   with most_used, of the waiting rows: the attention
//                                               that each received
//
// An output that has no rows is left out. The same tensors are inputs that hand the queues of an
// earlier run over, whose last token precedes the first one: with given_memory=M `memories` and, if
// M > `memory`, waiting_use; with given_compressed=C `compressed`. Tokens then see what they would
// in one run over both, segments being counted from the first token of this one. A stream reads
// them with its first segment. compressive-transformer-pytorch hands (mem, cmem) to the next call.
//
// The parameters are transformer_xl's; with learned_positions layerN.relative_keys [distances, heads,
// head_dim], N(0, 1/2), is in the place of layerN.w_r, and distances = compressed_memory + memory +
// segment (at least 2), or max_distance + 1 where that is less. With function=convolution layerN.convolution.w [c, d, d] and
// .b [d], drawn N(0, 1 / (c d)) and 0; with dilated_convolution layerN.dilated_convolution.w and
// .b.
//
// The counterpart is the same network with all of the past in its memory.
class Compressive : public TechniqueOf<CompressiveOptions> {
 public:
  Compressive();
  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override;

 protected:
  absl::Status Check(const Problem& problem, const CompressiveOptions& options) const override;
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const CompressiveOptions& options, Device device,
                                                   uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const CompressiveOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
  std::vector<TensorSpec> WrittenTensors(const Problem& problem,
                                         const CompressiveOptions& options) const override;
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const CompressiveOptions& options) const override;
};

// ---- Functions that layer and definition share ----

layers::StackSizes CompressiveSizes(const Problem& problem, const CompressiveOptions& options);
// Returns "convolution." or "dilated_convolution."; call it only for a function that convolves.
std::string ConvolutionPrefix(const CompressiveOptions& options);
std::vector<layers::ParameterSpec> CompressiveParameters(const Problem& problem,
                                                         const CompressiveOptions& options);
// Returns the number of segments of a Run.
int64_t SegmentsOf(const Problem& problem, const CompressiveOptions& options);
// Returns the most compressed rows that one segment can give.
int64_t MaxBlocksOf(int64_t segment, const CompressiveOptions& options);

// The definition of a stream that was cut in segments of these lengths: out and context, attention_loss
// and autoencoding_loss [batch, segments, layers], kept with most_used, and what the queues hold at
// the end, with the uses of waiting rows whatever the function, f64. Reads the inputs x and those
// that are given, and `computed`, `pool` and `stopped` of the request.
absl::StatusOr<NamedTensors> DefineCompressive(const Problem& problem,
                                               const CompressiveOptions& options,
                                               const NamedTensors& parameters, const Inputs& inputs,
                                               absl::Span<const int64_t> segments,
                                               const DefinitionRequest& request = {});

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_H_
