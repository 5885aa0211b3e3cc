// Reversible blocks on every device, in both directions: see reversible.h.
#ifndef TFB_MEMORY_REVERSIBLE_REVERSIBLE_STACK_H_
#define TFB_MEMORY_REVERSIBLE_REVERSIBLE_STACK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/layers/attention/further_inputs.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layer_parameters.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/reversible/reversible.h"

namespace tfb::reversible {

// Returns what the names of a block's parameters begin with.
std::string BlockPrefix(int64_t block);
// Returns what the block's f reads beside x.
layers::FurtherInputs InputsOfF(const ReversibleOptions& options, const Problem& problem,
                                int64_t block);

class ReversibleStack {
 public:
  // Two tensors f32 [batch, tokens, model_dim] on the device, which do not overlap.
  struct Streams {
    TensorView first;
    TensorView second;
  };
  // Adds the parameters of all blocks, drawn from the seed.
  static absl::StatusOr<ReversibleStack> Create(const Problem& problem,
                                                const ReversibleOptions& options, Device device,
                                                uint64_t seed, NamedTensors* parameters);

  // Sets up. f's layers get the inputs that a Forward from the streams would give them; the streams
  // are lost. `inputs` are here and below those of Reversible, of which x is not read.
  absl::Status Setup(const NamedTensors& parameters, const Streams& streams, const Inputs& inputs,
                     const Execution& execution);
  // Returns the scratch of any call, without the streams; it is the same for any number of blocks.
  size_t workspace_bytes(int threads) const;

  // Run in place, from the first block's inputs to the last one's outputs, and back. They allocate
  // nothing and, on a GPU, enqueue on the stream.
  absl::Status Forward(const Streams& streams, const Inputs& inputs, const Execution& execution);
  absl::Status Inverse(const Streams& streams, const Inputs& inputs, const Execution& execution);

  // ---- The backward pass ----

  absl::Status CheckBackward() const;
  // Returns the scratch of SetUpBackward and Backward; it is the same for any number of blocks.
  size_t backward_workspace_bytes(int threads) const;
  // Sets the backward pass up behind Setup. `x` is a hidden state of the streams' size.
  absl::Status SetUpBackward(const NamedTensors& parameters, const ConstTensorView& x,
                             const Inputs& inputs, const Execution& execution);
  // Computes the first block's inputs and their gradients from the last one's outputs and theirs,
  // in place, and of the call's gradients those of the parameters and of what f reads beside x.
  // Nothing of the forward pass is stored: each block computes its inputs from its outputs by one
  // more run of G and F, which keeps what their own backward passes read.
  absl::Status Backward(const Streams& streams, const Streams& gradients, const BackwardCall& call,
                        const Execution& execution);
  // Returns the FLOPs of a Backward; absent where those of an f are.
  std::optional<double> backward_flops() const;
  std::map<std::string, std::string> stopped_gradients() const;

  // Returns the FLOPs; absent where those of an f are.
  std::optional<double> flops() const;
  int64_t blocks() const { return static_cast<int64_t>(blocks_.size()); }
  const Layer& f(int64_t block) const { return *blocks_[block].f; }

 private:
  struct Block {
    explicit Block(const std::string& prefix)
        : f_norm_names(prefix + "f_norm"), g_norm_names(prefix + "g_norm"), g_names(prefix + "g") {}
    std::unique_ptr<Layer> f;
    layers::FurtherInputs further;
    Inputs f_inputs;  // the names are in here before a Run, which must not allocate
    Outputs f_outputs;
    LayerNorm f_norm;
    LayerNorm g_norm;
    FeedForward g;
    layers::NormNames f_norm_names;
    layers::NormNames g_norm_names;
    layers::FeedForwardNames g_names;
    BackwardCall f_call;  // the names are in here before a Backward
    std::vector<std::string>
        f_parameters;  // f's gradients, in f_call's order, under their names here
  };
  // Results for some tokens: LN's and the branch's.
  struct Scratch {
    TensorView normalized;
    TensorView update;
  };
  // The same of a backward pass, with the gradients of the branch's input and output, and what the
  // branch keeps.
  struct BackwardScratch {
    Scratch forward;
    TensorView of_normalized;
    TensorView of_update;
    absl::Span<std::byte> kept;
  };
  BackwardScratch LayOutBackward(int64_t tokens, DType dtype, size_t kept_bytes,
                                 Workspace& workspace) const;
  size_t g_kept_bytes() const;
  // Take the streams and their gradients through a branch: second -= G(first) and first -=
  // F(second).
  absl::Status BackwardG(Block& block, const Streams& streams, const Streams& gradients,
                         const BackwardCall& call, const Execution& execution) const;
  absl::Status BackwardF(Block& block, const Streams& streams, const Streams& gradients,
                         const BackwardCall& call, const Execution& execution) const;

  int64_t inner_dim() const;
  int64_t chunk_tokens() const;
  Scratch LayOut(int64_t tokens, DType dtype, Workspace& workspace) const;
  absl::Status AddF(Block& block, float sign, const Streams& streams, const Inputs& inputs,
                    bool sets_up, const Execution& execution);
  absl::Status AddG(const Block& block, float sign, const Streams& streams,
                    const Execution& execution) const;

  Problem problem_;
  ReversibleOptions options_;
  Device device_ = Device::kCpu;
  std::vector<Block> blocks_;
  absl::Status further_differentiate_;
};

}  // namespace tfb::reversible

#endif  // TFB_MEMORY_REVERSIBLE_REVERSIBLE_STACK_H_
