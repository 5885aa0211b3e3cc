// Reversible blocks on every device, in both directions: see reversible.h.
#ifndef TFB_MEMORY_REVERSIBLE_REVERSIBLE_STACK_H_
#define TFB_MEMORY_REVERSIBLE_REVERSIBLE_STACK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/attention/further_inputs.h"
#include "core/layers/feed_forward.h"
#include "core/layers/layer_norm.h"
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
  // Adds to `sum` the product of `cotangent` with the Jacobian of F_block or G_block at `input`.
  // All are on the device, as streams are. The function computes the branch's intermediate results
  // again, from `input`.
  using AddVectorJacobianProduct =
      absl::FunctionRef<absl::Status(int64_t block, Branch branch, const ConstTensorView& input,
                                     const ConstTensorView& cotangent, const TensorView& sum)>;

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
  // Computes inputs and their cotangents from outputs and theirs, in place. Nothing of the forward
  // pass is stored: each block computes its inputs from its outputs, and G and F once more.
  absl::Status Backward(const Streams& streams, const Streams& cotangents, const Inputs& inputs,
                        AddVectorJacobianProduct add_product, const Execution& execution);

  // Returns the FLOPs; absent where those of an f are.
  std::optional<double> flops() const;
  int64_t blocks() const { return static_cast<int64_t>(blocks_.size()); }
  const Layer& f(int64_t block) const { return *blocks_[block].f; }

 private:
  struct Block {
    std::unique_ptr<Layer> f;
    layers::FurtherInputs further;
    Inputs f_inputs;  // the names are in here before a Run, which must not allocate
    Outputs f_outputs;
    LayerNorm f_norm;
    LayerNorm g_norm;
    FeedForward g;
  };
  // Results for some tokens: LN's and the branch's.
  struct Scratch {
    TensorView normalized;
    TensorView update;
  };

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
};

}  // namespace tfb::reversible

#endif  // TFB_MEMORY_REVERSIBLE_REVERSIBLE_STACK_H_
