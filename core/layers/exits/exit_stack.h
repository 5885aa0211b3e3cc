// A stack in which each token leaves after a layer of its own: transformer_xl's layers, with exits.
//
//   h^n = layer_n(h^(n-1))                        for tokens that are still there
//   h^n_t = h^(n-1)_t                             for those that have left: the copied state
//   out_t = LN_n(h^n_t),  n the layer after which token t leaves
//
// The optional output exit_outputs, [batch, N, tokens, model_dim], has LN_n(h^n_t) of every layer n and
// token, copied states included: what each exit would say. Exits are trained by the sum of the losses
// of these, where no token leaves, each with a weight of its layer ("aligned", Elbayad et al.,
// arXiv:1910.10073v4, section 3; Schuster et al., arXiv:2207.07061v2, with weights in proportion to n),
// or by the loss of out with exits that are drawn and given as an input ("mixed", Elbayad et al.). It
// costs a norm a layer, and nothing where it is left out.
//
// The optional output memories and, with given_memory, the input are transformer_xl's
// (memory/transformer_xl/transformer_xl.h): memories[:, n], n = 0, ..., N - 1, are h^n of the last
// tokens, copied states included. Rules count segments and tokens from the first token of the run.
//
// For a token that has left, queries, output projection and feed-forward network are no longer
// computed. Its keys and values are computed in every layer from the copied state, so that later
// tokens see it. An ExitRule decides which tokens leave; after the last layer, N, all leave.
//
// The backward pass is of the exits as they were found: the gradient of out_t goes through LN_n and
// layers n, n - 1, ..., 1, and joins there what later tokens give to the copied state through its keys
// and values in the layers above n. What decides alone has no gradient; a rule's output has.
// A Run keeps what core/layers/stack/segmented_layer.h says, and of each layer one byte a token, which
// tells whether the token was there and whether it left. These bytes stay on the device. On the CPU
// products have the rows of the tokens that were there, as in the forward pass. On CUDA these are listed
// as in the forward pass, in tensors of all tokens. The gradients of those that had left are held back
// while the layer is differentiated, 0 standing in their place, and are added again behind it. What does
// not fall with them are the gradients of keys and values and of their matrices, and half of the work on
// distances, since a block owns the pairs of one distance.
//
// CPU. Rows of the tokens that go on lie one behind the other, so that every product has as many rows
// as there are such tokens; reading a text segment by segment and decoding a batch token by token are
// the same code. With all tokens there the arithmetic is transformer_xl's, bit for bit.
//
// CUDA. Which tokens go on is known on the device alone, and Run does not wait for it. After each
// layer a kernel lists their rows in device memory (core/cuda/row_list.h); queries, attention,
// products, norms and the rule's decision after the next layer are launched for all rows, and
// blocks beyond the list return at once. In the last block, which like all has 64 rows, warps of 16
// rows beyond the list multiply nothing. Attention in fp32 takes 64 listed queries to a tile: its
// products with keys and values fall with the tokens that have left, those with distances half as
// far. In 16 bits it skips tiles of 128 tokens all of which have left, and saves nothing where the
// tokens that left are scattered.
//
// Our own kernel computes products of a list, since the host has to tell a library the number of
// rows. On a GPU with cuBLAS, the library computes the products of the first layer and of all keys
// and values, so that the result where no token leaves is the whole stack's up to rounding. It is
// the same bit for bit where there is no cuBLAS, and where it is known beforehand that no token
// will leave (ExitRule::never_leaves), since no list is made then.
//
// The simulator counts that the work falls: fp32's loads and stores fall by 0.87 of the share of
// the FLOPs that exits save where every second token left after the first of 4 layers, and by 0.92
// where three of four did (calm_test.cc: 256 tokens of 64 channels in segments of 128). Those of a
// backward pass fall to 0.76 and 0.65 of what they are where no token leaves. Time on a GPU has not been
// measured.
#ifndef TFB_CORE_LAYERS_EXITS_EXIT_STACK_H_
#define TFB_CORE_LAYERS_EXITS_EXIT_STACK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/cuda/row_list.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/stack/relative_stack.h"
#include "core/layers/stack/stack_options.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

struct ExitStackOptions : RelativeStackOptions {
  bool pre_norm = false;

  void Describe(OptionBinder& bind) {
    DescribeStack(bind, /*max_layers=*/32);
    bind.Bool("pre_norm", &pre_norm, "normalise the input of each sublayer instead of its output");
    DescribeGivenMemory(bind);
  }
};

// Returns "exit0" for the norm and classifier after layer 1, ...
std::string ExitPrefix(int64_t n);
// Returns the name of the norm after layer n of N: exit<n-1>.norm, and final_norm after the last
// one.
std::string ExitNorm(int64_t n, int64_t layers);

// Returns the parameters of transformer_xl and, for every layer, gamma and beta [model_dim] of its
// exit's norm.
std::vector<ParameterSpec> ExitStackParameters(const StackSizes& sizes);

// The name of an optional input and output, i32 [batch, tokens]: the layer after which each token
// leaves, from 1. As an input it replaces the rule; below 1 counts as 1, above N as N.
inline constexpr char kExits[] = "exits";
TensorSpec ExitsSpec(const Problem& problem, int64_t tokens);
// The name of the output of all exits.
inline constexpr char kExitOutputs[] = "exit_outputs";
TensorSpec ExitOutputsSpec(const Problem& problem, int64_t layers, int64_t tokens);
std::vector<TensorSpec> ExitStackInputs(const Problem& problem, const ExitStackOptions& options);
// An optional output of a rule, f32 [batch, tokens, columns], of which its classifiers are trained.
struct RuleOutput {
  const char* name = nullptr;  // null: there is none
  int64_t columns = 0;

  bool exists() const { return name != nullptr; }
};
std::vector<TensorSpec> ExitStackOutputs(const Problem& problem, const ExitStackOptions& options,
                                         const RuleOutput& of_rule);

// Rows of a segment after a layer, in memory of the device.
struct ExitRows {
  int64_t layer;           // n, from 1 to N - 1
  TensorView state;        // h^n, f32 [rows, model_dim]
  TensorView before;       // h^(n-1)
  const int32_t* places;   // row r is place b * tokens + t; null: row r is place r
  int64_t tokens;          // tokens of the segment
  int64_t first_position;  // position of its first token in the stream
  RowList list = {};       // CUDA: the rows that are still there

  int64_t rows() const { return state.dim(0); }
};

// Decides when tokens leave.
class ExitRule {
 public:
  virtual ~ExitRule() = default;
  virtual absl::Status Setup(const NamedTensors& parameters) = 0;
  virtual size_t workspace_bytes(int64_t rows, int threads) const = 0;
  // Returns the FLOPs of the decisions about a token after the first `layers` layers.
  virtual double flops(int64_t layers) const = 0;
  // Tells whether the rule reads more of a segment than the token itself, so that another split of
  // the stream gives another result.
  virtual bool reads_segments() const { return false; }
  // Tells whether it is known beforehand that no token leaves before the last layer.
  virtual bool never_leaves() const { return false; }
  // Sets leaves[r] to whether row r leaves after this layer, for every row that is still there, in
  // the order of the layers. It allocates nothing; on CUDA it enqueues on the stream.
  virtual absl::Status Decide(const ExitRows& rows, uint8_t* leaves,
                              const Execution& execution) = 0;

  // Returns the rule's output, or none.
  virtual RuleOutput output() const { return {}; }
  // Writes what the states after layer n say of the output, f32 [batch, tokens, columns], of all tokens
  // of the segment: row b * tokens + t of `state`, f32 [batch * tokens, model_dim]. It is called for
  // n = 1, ..., N in turn, and Decide is called before it for all tokens where n is 1 and not N. It
  // allocates nothing; on CUDA it enqueues on the stream.
  virtual absl::Status WriteOutput(int64_t /*n*/, const ConstTensorView& /*state*/,
                                   const TensorView& /*output*/, const Execution& /*execution*/) {
    return absl::UnimplementedError("the rule has no output");
  }

  // ---- The backward pass of the output ----

  // The gradients of a Run's output, which is a function of the states.
  struct OutputGradients {
    ConstTensorView states;        // h^1, ..., h^N, f32 [N, batch, tokens, model_dim], contiguous
    ConstTensorView of_output;     // f32 [batch, tokens, columns]
    absl::Span<std::byte> memory;  // of backward_memory_bytes() bytes
    const Outputs& parameters;     // which are added to
  };
  virtual size_t backward_memory_bytes() const { return 0; }
  // Adds to the gradients of the rule's parameters, and leaves in the memory what AddStateGradient
  // reads. It allocates nothing, and neither does that; on CUDA both enqueue on the stream.
  virtual absl::Status DifferentiateOutput(const OutputGradients& /*gradients*/,
                                           const Execution& /*execution*/) const {
    return absl::UnimplementedError("the rule has no output");
  }
  // Adds what the output gives to the gradient of h^n, f32 [batch, tokens, model_dim], of tokens begin,
  // begin + 1, ... of the Run.
  virtual absl::Status AddStateGradient(int64_t /*n*/, absl::Span<std::byte> /*memory*/,
                                        int64_t /*begin*/, const TensorView& /*gradient*/,
                                        const Execution& /*execution*/) const {
    return absl::UnimplementedError("the rule has no output");
  }
};

// Makes the layer, with the parameters of ExitStackParameters and those of the rule. Its cost is
// that of the tokens of the last Run, or of the stream up to the problem's tokens; it is known only
// afterwards. So are statistics that it has beside transformer_xl's: mean_layers that tokens went
// through, and flops_saved, the share of the whole stack's FLOPs that was saved.
absl::StatusOr<std::unique_ptr<Layer>> MakeExitStack(const Problem& problem,
                                                     const ExitStackOptions& options, Device device,
                                                     uint64_t seed, std::unique_ptr<ExitRule> rule,
                                                     const std::vector<ParameterSpec>& of_rule);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_EXITS_EXIT_STACK_H_
