// What a stack that reads its hidden states segment by segment is made of (segmented_layer.h): one
// block a layer, each with an attention that remembers the earlier tokens, and what the blocks
// share.
#ifndef TFB_CORE_LAYERS_STACK_BLOCK_H_
#define TFB_CORE_LAYERS_STACK_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/cuda/row_list.h"
#include "core/layers/attention/relative_positions.h"
#include "core/layers/layer_norm.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

// A segment of a call: its tokens are `tokens` ones of the call's tensors, from `begin` on.
struct Segment {
  int64_t begin;
  int64_t tokens;
  const Inputs& inputs;    // of the call, which is a Run or an Append
  const Outputs& outputs;  // likewise

  // Return the segment's part of a tensor whose dimension `axis` is of tokens; empty where the call
  // has no such tensor.
  ConstTensorView Input(absl::string_view name, int axis = 1) const {
    return Part(inputs.Get(name), axis);
  }
  TensorView Output(absl::string_view name, int axis = 1) const {
    return Part(outputs.Get(name), axis);
  }

 private:
  template <class View>
  View Part(const View& view, int axis) const {
    return view.empty() ? view : Slice(view, axis, begin, tokens);
  }
};

// The tokens that a layer computes, where these are not all of a segment's. All are keys and
// values.
struct SomeTokens {
  ConstTensorView hidden;  // the layer's input for all tokens, [batch, tokens, model_dim]
  const int32_t* row_of_token = nullptr;  // CPU: see RelativeAttention::SomeQueries
  RowList rows = {};                      // CUDA
};

// The distances between the tokens of a stack, and their sinusoids, which SinusoidsOf returns.
struct Distances {
  DistanceRange range;
  ConstTensorView sinusoids;
};

// A segment of a Run in its backward pass, where one layer reads it. Segments come from the last to
// the first, after one another: a gradient of a later one stops at what it read of an earlier one.
struct PastSegment {
  int64_t begin;           // as in Segment
  int64_t tokens;          // likewise
  ConstTensorView states;  // what went into the layer for all tokens of the Run
  // The layer's output for the same tokens, where the blocks write the outputs; else empty.
  ConstTensorView next_states;
  const Inputs& inputs;  // of the Run
  const Inputs& output_gradients;
  const Outputs& parameter_gradients;  // which are added to
  absl::Span<std::byte> kept;          // what the block kept in the Run
  // Memory of the attention for sums over the layer's segments, 0 before the first of them.
  absl::Span<std::byte> sums;

  // Returns what went into the layer for the segment.
  ConstTensorView input() const { return Slice(states, 1, begin, tokens); }
  // Tells whether no further segment of the layer follows.
  bool is_last() const { return begin == 0; }
};

// The attention of one layer, and what it remembers of a stream.
class SegmentAttention {
 public:
  virtual ~SegmentAttention() = default;

  // Copies the parameters to the device.
  virtual absl::Status Setup(const NamedTensors& parameters, const Distances& distances,
                             const Execution& execution) = 0;
  virtual void Reset() = 0;  // forgets all tokens
  // Remembers what a stream is given before its first segment: inputs such as kMemories
  // (segmented_layer.h). `norm` is that of the rows which the attention reads; null where it reads
  // them as they are.
  virtual absl::Status Recall(const Inputs& given, const LayerNorm* norm,
                              const Execution& execution) = 0;

  // A segment, which must be the stream's next: y = attention(x) + residual. The tensors are
  // [batch, tokens, model_dim]; y may be the residual, and x.
  struct Call {
    const Segment& segment;
    ConstTensorView x;
    ConstTensorView residual;  // the layer's input
    TensorView y;
    const LayerNorm* norm;   // of the residual, which gave x; null where x is the residual
    const SomeTokens& some;  // see Block::Call
    // Memory of kept_bytes() for all segments of a Run that a Backward follows; else empty.
    absl::Span<std::byte> kept = {};
  };
  // Computes y. It allocates nothing; on CUDA it enqueues on the stream.
  virtual absl::Status Run(const Call& call, const Execution& execution) = 0;
  // Copies what is remembered at the end of a Run to the outputs that hold it.
  virtual absl::Status KeepState(const Inputs& /*inputs*/, const Outputs& /*outputs*/,
                                 const Execution& /*execution*/) const {
    return absl::OkStatus();
  }

  // ---- The backward pass: see SegmentedLayer ----

  virtual absl::Status CheckBackward() const {
    return absl::UnimplementedError("the layer has no backward pass");
  }
  // Does what all segments share, behind Setup. The parameters and the sinusoids outlive the calls.
  virtual absl::Status SetUpBackward(const NamedTensors& /*parameters*/,
                                     const Distances& /*distances*/) {
    return CheckBackward();
  }
  // Return the bytes of Call::kept, of PastSegment::sums, of the memory between RunAgain and Backward
  // of a segment, and of the workspace of either.
  virtual size_t kept_bytes() const { return 0; }
  virtual size_t sums_bytes() const { return 0; }
  virtual size_t again_bytes() const { return 0; }
  virtual size_t backward_workspace_bytes(int /*threads*/) const { return 0; }

  // Where row_of_token is not null, x, residual, y and dy are [rows, model_dim], of the tokens that the
  // layer computes (SomeTokens). On CUDA these are rows of all tokens, which are listed, where `rows`
  // is a list; others of dy are not read. Gradients of the layer's input are of all tokens.
  struct AgainCall {
    const PastSegment& segment;
    ConstTensorView x;  // this and what follows as in Call
    ConstTensorView residual;
    TensorView y;
    const LayerNorm* norm;
    const int32_t* row_of_token = nullptr;
    RowList rows = {};
  };
  // Computes a segment of a Run again, whatever the stream holds now, and keeps again_bytes() for
  // Backward in execution.kept. It allocates nothing.
  virtual absl::Status RunAgain(const AgainCall& /*call*/, const Execution& /*execution*/) {
    return CheckBackward();
  }
  struct BackwardCall {
    const PastSegment& segment;
    ConstTensorView x;      // as in RunAgain
    ConstTensorView dy;     // the residual's gradient, too, which the caller adds; may be dx
    ConstTensorView added;  // a summand of dx, or empty
    TensorView dx;  // of the attention's input, [batch, tokens, model_dim]; may be the summand
    const LayerNorm* norm;
    // Gradients of the norm's parameters, or empty, to which those by earlier rows are added: the
    // caller has x's.
    TensorView gamma = {};
    TensorView beta = {};
    const int32_t* row_of_token = nullptr;
    RowList rows = {};
  };
  // Computes dx, and adds to gradients of parameters, in the order of all calls. It allocates
  // nothing.
  virtual absl::Status Backward(const BackwardCall& /*call*/, const Execution& /*execution*/) {
    return CheckBackward();
  }

  virtual size_t workspace_bytes(int threads) const = 0;
  // Returns numbers by name, of which those of all layers are summed, such as cache_bytes.
  virtual std::map<std::string, double> statistics() const = 0;
};

// One layer of a stack.
class Block {
 public:
  virtual ~Block() = default;

  // Copies the parameters to the device.
  virtual absl::Status Setup(const NamedTensors& parameters, const Distances& distances,
                             const Execution& execution) = 0;
  // Hands what a stream is given to the attention.
  virtual absl::Status Recall(const Inputs& given, const Execution& execution) = 0;

  // The tensors are [batch, tokens, model_dim]. `state`, f32, holds the hidden state between the
  // sublayers; it may be the input, and the output. `context`, unless empty, becomes the
  // feed-forward network's input: the last layer has one. With `some`, whose `hidden` is not empty
  // then, the tensors have the rows of these tokens alone on the CPU, [rows, model_dim].
  struct Call {
    const Segment& segment;
    ConstTensorView input;
    TensorView state;
    TensorView output;
    TensorView context;
    SomeTokens some = {};
    absl::Span<std::byte> kept = {};  // kept_bytes(), or empty
  };
  // Computes the output. It allocates nothing; on CUDA it enqueues on the stream.
  virtual absl::Status Run(const Call& call, const Execution& execution) = 0;

  virtual size_t workspace_bytes(int threads) const = 0;
  virtual SegmentAttention& attention() = 0;

  // ---- The backward pass: see SegmentedLayer ----

  virtual absl::Status CheckBackward() const {
    return absl::UnimplementedError("the layer has no backward pass");
  }
  virtual absl::Status SetUpBackward(const NamedTensors& /*parameters*/,
                                     const Distances& /*distances*/) {
    return CheckBackward();
  }
  virtual size_t backward_workspace_bytes(int /*threads*/) const { return 0; }
  // Returns the bytes of Call::kept, for all segments of a Run.
  virtual size_t kept_bytes() const { return 0; }
  // The tokens that a layer computed, where these are not all: see SomeTokens.
  struct SomeRows {
    // CPU: rows [rows, model_dim].
    ConstTensorView input = {};
    TensorView gradient = {};  // of the output; it is overwritten
    const int32_t* row_of_token = nullptr;
    const int32_t* tokens = nullptr;  // [rows]: b * tokens + t of each
    RowList rows = {};                // CUDA: in the tensors of all tokens
  };
  struct BackwardCall {
    const PastSegment& segment;
    // The output's gradient, f32 [batch, tokens, model_dim], which becomes the input's. Where some
    // tokens are computed, the others' gradients pass by, and the layer adds what they have as keys. On
    // CUDA the others' are 0.
    TensorView gradient;
    ConstTensorView context_gradient;  // or empty
    SomeRows some = {};
  };
  // Computes the segment again, and from that the gradients. It allocates nothing.
  virtual absl::Status Backward(const BackwardCall& /*call*/, const Execution& /*execution*/) {
    return CheckBackward();
  }
};

// A Run whose backward pass begins.
struct PastRun {
  // The layers' outputs, f32 [layers, batch, query_tokens, model_dim], contiguous. The last
  // layer's is there where the blocks write the outputs.
  ConstTensorView next_states;
  const Inputs& output_gradients;
  const Outputs& parameter_gradients;  // which are added to
};

// What the blocks of a stack share: where the segment stands in the stream. It also knows what can
// be said of all layers together.
class StackState {
 public:
  virtual ~StackState() = default;

  virtual DistanceRange distances() const = 0;
  virtual absl::Status Setup(const NamedTensors& /*parameters*/) { return absl::OkStatus(); }
  virtual void Reset() = 0;                        // begins a new stream
  virtual void Begin(const Segment& segment) = 0;  // begins the next segment; allocates nothing

  // Returns the FLOPs of a Run; nothing while they are not known.
  virtual std::optional<double> flops(const NamedTensors& parameters) const = 0;

  // Tells whether what the blocks share is known in a backward pass, prepares it, and returns the
  // FLOPs of a Backward. See SegmentedLayer.
  virtual absl::Status CheckBackward() const {
    return absl::UnimplementedError("the layer has no backward pass");
  }
  virtual void SetUpBackward() {}
  // Differentiates what is of several layers at once, before the layers go backwards, and leaves what
  // they need of it in the memory of backward_memory_bytes() bytes. It allocates nothing.
  virtual size_t backward_memory_bytes() const { return 0; }
  virtual absl::Status BeginBackward(const PastRun& /*run*/, absl::Span<std::byte> /*memory*/,
                                     const Execution& /*execution*/) {
    return absl::OkStatus();
  }
  virtual std::optional<double> backward_flops(const NamedTensors& /*parameters*/) const {
    return std::nullopt;
  }
  virtual std::map<std::string, double> statistics(const NamedTensors& parameters) const = 0;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_BLOCK_H_
