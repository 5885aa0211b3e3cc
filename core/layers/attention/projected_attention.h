// Attention between hidden states: any attention on queries, keys and values, with the projections
// before and after it.
//
//   q = x W_q + b_q,  k = m W_k + b_k,  v = m W_v + b_v     m = x, or the memory of cross attention
//   y = concat_heads(inner(q, k, v)) W_o + b_o + residual
//
// Where the inner technique reads further queries, keys or values, as longformer does with
// projections=own, these are projections of their own: its input k_global is m W_k_global +
// b_k_global. All else that it reads beside key_mask and x, such as longformer's global_mask, is an
// input of the layer (further_inputs.h).
//
// W_q, W_k and W_v lie side by side, so that self-attention projects x by one product, and cross
// attention x by one and the memory by another. Heads are views of the products' rows: nothing is
// transposed. q, k, v and the heads' results are rounded to the problem's dtype, which is what the
// inner attention reads and writes; products sum in fp32 (core/layers/matmul.h).
//
// The backward pass, with dy = dL/dy, c = concat_heads(inner(q, k, v)) and the inner layer's own
// backward pass, which gives dq, dk and dv from the heads of dc:
//
//   dc = dy W_o^T,   dW_o = c^T dy,   db_o = sum over rows of dy
//   dx = dq W_q^T + dk W_k^T + dv W_v^T,   dW_q = x^T dq,   db_q = sum over rows of dq, ...
//
// with dm, and m in the place of x, for keys and values of cross attention. (The chain rule; the
// paper has no formulas for it.) dc, dq, dk and dv are rounded to the problem's dtype, as c, q, k
// and v are. A Run keeps q, k, v and c, in that dtype, 4 model_dim numbers a token where all heads
// have keys and values of their own, and what the inner layer keeps: its backward pass reads all
// four, and to compute them again would mean to run all of the layer but its last product.
#ifndef TFB_CORE_LAYERS_ATTENTION_PROJECTED_ATTENTION_H_
#define TFB_CORE_LAYERS_ATTENTION_PROJECTED_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/layers/attention/further_inputs.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/matmul.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::layers {

// ---- The attention inside ----

// Binds an option of that name for the inner technique: a registered one on q, k and v.
void BindInner(OptionBinder& bind, TechniqueSpec* inner);
// Binds it for a stack of layers, which have one technique or one each.
void BindInner(OptionBinder& bind, TechniqueList* inner);

// Creates the inner technique's layer for the problem. Returns the technique's error where it
// refuses, and an error where it reads the hidden state x but `gives_x` is false: where x is f32 in
// a problem of 16 bits.
absl::StatusOr<std::unique_ptr<Layer>> CreateInner(const TechniqueSpec& inner,
                                                   const Problem& problem, Device device,
                                                   uint64_t seed, bool gives_x);

// Returns the inputs of the inner technique that are not q, k, v, further ones of these, key_mask
// or x.
FurtherInputs FurtherInputsOf(const TechniqueSpec& inner, const Problem& problem,
                              const InputPrefixes& prefixes = {});
// Returns the specs of the inner technique's outputs that are not of its heads: its choices, such
// as routing's members. It does not return out, which W_o takes, nor log_sum_exp, which joins
// softmaxes over parts of the keys before W_o.
std::vector<TensorSpec> FurtherOutputsOf(const TechniqueSpec& inner, const Problem& problem);

// The further outputs of one technique inside a layer that has several: PREFIXmembers for members.
class FurtherOutputs {
 public:
  FurtherOutputs() = default;
  FurtherOutputs(const TechniqueSpec& inner, const Problem& problem, absl::string_view prefix);
  // Adds their specs, as optional ones.
  void AddTo(std::vector<TensorSpec>* specs) const;
  // Returns them under the technique's own names, empty where `outputs`, the layer's, lacks them.
  // It allocates nothing; the result is valid until the next call.
  const Outputs& From(const Outputs& outputs);

 private:
  std::vector<TensorSpec> outside_;
  Outputs inside_;                  // in the same order
  std::vector<std::string> names_;  // of inside_
};

// Return the counterpart of a technique, and those of a list: one, where all are the same.
absl::StatusOr<TechniqueSpec> CounterpartOf(const Problem& problem, const TechniqueSpec& spec);
absl::StatusOr<TechniqueList> CounterpartOf(const Problem& problem, const TechniqueList& list);

// Returns the technique of the options, with the counterpart of their field `inner` in its place.
template <class OptionsT>
absl::StatusOr<TechniqueSpec> WithCounterpartInside(const Technique& technique,
                                                    const Problem& problem,
                                                    const Options& options) {
  TFB_ASSIGN_OR_RETURN(OptionsT parsed, ParseOptions<OptionsT>(options));
  TFB_ASSIGN_OR_RETURN(parsed.inner, CounterpartOf(problem, parsed.inner));
  OptionBinder binder;
  parsed.Describe(binder);
  return TechniqueSpec{technique.info().name, binder.Values()};
}

// ---- Parameters ----

// Returns the names of the further queries, keys and values among the inputs of an inner technique:
// those whose names begin with q_, k_ or v_, and which have the shape and dtype of q, k or v.
std::vector<std::string> FurtherProjections(const Problem& problem,
                                            const std::vector<TensorSpec>& inputs);
// Returns those of the inputs of `inner`, and none where it refuses its options.
std::vector<std::string> FurtherProjections(const Problem& problem, const TechniqueSpec& inner);

// Returns the specs of w_q [model_dim, query_heads head_dim], w_k [model_dim, kv_heads head_dim],
// w_v [model_dim, kv_heads value_dim], w_o [query_heads value_dim, model_dim], where y = x W and
// head h owns columns h head_dim to (h + 1) head_dim - 1 (rows of w_o), and with `bias` b_q, b_k,
// b_v, b_o. All are N(0, 1 / rows of the matrix), so that q and k of hidden states N(0, 1) give
// scores N(0, 1).
std::vector<ParameterSpec> ProjectionSpecs(const Problem& problem, bool bias);
// Returns also those of the further queries, keys and values of the inner technique: w_q_global, of
// the shape of w_q, for its input q_global, and b_q_global.
std::vector<ParameterSpec> ProjectionSpecs(const Problem& problem, bool bias,
                                           const TechniqueSpec& inner);
// Adds the parameters of the inner layer, with the prefix.
void AddInnerParameters(const Layer& inner, absl::string_view prefix, NamedTensors* parameters);
// Returns the parameters whose names have the prefix, without it.
NamedTensors WithoutPrefix(const NamedTensors& parameters, absl::string_view prefix);

// ---- The layer's part ----

// What one attention reads.
struct AttentionInputs {
  ConstTensorView x;                // [batch, query_tokens, model_dim] of any dtype
  ConstTensorView memory;           // [batch, kv_tokens, model_dim]; empty unless cross
  ConstTensorView key_mask;         // u8 [batch, kv_tokens], or empty
  const Inputs* further = nullptr;  // under the inner technique's names; null where it has none
};

class ProjectedAttention {
 public:
  // `inner` is a layer for the problem on the device.
  ProjectedAttention(Device device, const Problem& problem, bool cross,
                     std::unique_ptr<Layer> inner);

  // Views of the device's memory.
  struct Call {
    AttentionInputs inputs;
    ConstTensorView residual;  // of y's shape, or empty
    TensorView y;              // [batch, query_tokens, model_dim]; may be x or the residual
    // Those of FurtherOutputsOf, or null; other outputs in it are ignored.
    const Outputs* further = nullptr;
  };

  // Sets up the layer with `parameters` in host memory: those of ProjectionSpecs, and the inner
  // layer's as inner.NAME, each with the prefix. The inner layer gets the call's inputs, which its
  // Setup may need.
  absl::Status Setup(const NamedTensors& parameters, absl::string_view prefix, const Call& call,
                     const Execution& execution);
  size_t workspace_bytes(int threads) const;
  // Runs a call. It allocates nothing; on CUDA it enqueues on the stream.
  absl::Status Run(const Call& call, const Execution& execution);

  double projection_flops() const;
  const Layer& inner() const { return *inner_; }

  // ---- The backward pass ----

  // Returns OK where Backward can be called: where the inner layer has a backward pass.
  // Where Execution::kept of a Run is not empty, it has kept_bytes() bytes, of which the inner
  // layer gets its part.
  absl::Status CheckBackward() const;
  size_t kept_bytes() const;
  size_t backward_workspace_bytes(int threads) const;
  // Returns what the inner layer does not differentiate through, by the names that parameters and
  // inputs have here; `further` are the inner layer's further inputs.
  std::map<std::string, std::string> stopped_gradients(const FurtherInputs& further,
                                                       const NamedTensors& parameters,
                                                       absl::string_view prefix) const;
  // Sets the backward pass up behind Setup, with the same arguments.
  absl::Status SetUpBackward(const NamedTensors& parameters, absl::string_view prefix,
                             const Call& call, const Execution& execution);

  struct BackwardCall {
    AttentionInputs inputs;  // as Run read them
    ConstTensorView dy;      // of y's shape, which is the residual's gradient too
    ConstTensorView added;   // of x's shape, or empty: a summand of dx
    TensorView dx;           // of x's shape, or empty; may be the summand, or dy
    TensorView dmemory;      // of the memory's shape, or empty
    const Outputs* further =
        nullptr;  // gradients of the further inputs, by the inner names, or null
    // The gradients of the layer's parameters by their names, of which those with the prefix of
    // SetUpBackward are written.
    const Outputs& parameters;
    bool accumulate = false;               // adds to what the parameters' gradients hold
    ConstTensorView added_to_memory = {};  // a summand of dmemory, which may be dmemory
  };
  // Computes the gradients from execution.kept as a Run on the inputs filled it. It allocates
  // nothing.
  absl::Status Backward(const BackwardCall& call, const Execution& execution);

 private:
  // A projection is columns first to first + width - 1 of the product with the hidden state that it
  // is of.
  struct Projection {
    std::string name;  // of the inner technique's input
    bool of_memory;    // of the memory in cross attention
    int64_t heads;
    int64_t first;
    int64_t width;
    bool has_gradient = false;  // whether the inner layer differentiates through it
  };
  struct Scratch {
    TensorView of_x;       // [batch, query_tokens, x_width]: the projections of x
    TensorView of_memory;  // [batch, kv_tokens, memory_width], empty unless cross
    TensorView context;    // [batch, query_tokens, context_width]
  };
  void AddProjection(const std::string& name);
  Scratch LayOut(Workspace& workspace) const;
  absl::Status Project(const Call& call, const Scratch& scratch, const Execution& execution);
  // Points the inner layer's inputs and output to the projections, and to the call's inputs.
  void PointInner(const AttentionInputs& inputs, const Scratch& scratch);
  // Returns the heads of a projection among the products' columns.
  TensorView HeadsIn(const Projection& projection, const Scratch& scratch) const;
  // The names of a matrix and its bias among the layer's parameters.
  struct AffineNames {
    std::string weights;
    std::string bias;
  };
  // A parameter of the inner layer that has a gradient.
  struct InnerParameter {
    std::string name;
    std::string outside;  // its name here, which SetUpBackward knows
    Shape shape;
  };
  // What a Run keeps.
  struct Kept {
    Scratch scratch;
    absl::Span<std::byte> inner;
  };
  Kept LayOutKept(Workspace& workspace) const;
  struct BackwardScratch {
    Scratch gradients;  // of the projections and the context
    TensorView x;       // the inner layer's gradient of x, or empty
    // Where gradients are added to others: the inner parameters', one after the other.
    float* inner_parameters;
  };
  BackwardScratch LayOutBackward(Workspace& workspace) const;
  // Points the inner layer's call to the tensors of a backward call, and calls it.
  absl::Status InnerBackward(const BackwardCall& call, const Kept& kept,
                             const BackwardScratch& scratch, const Execution& execution);
  // Computes the gradients that come through the projections.
  absl::Status ProjectionsBackward(const BackwardCall& call, const BackwardScratch& scratch,
                                   const Execution& execution) const;

  Device device_;
  Problem problem_;
  bool cross_;
  std::vector<Projection> projections_;
  int64_t x_width_ = 0;
  int64_t memory_width_ = 0;
  int64_t context_width_;
  PackedMatrix of_x_;
  PackedMatrix of_memory_;
  PackedMatrix output_;
  std::unique_ptr<Layer> inner_;
  Inputs inner_inputs_;  // the names are in here before a Run, which must not allocate
  Outputs inner_outputs_;

  // ---- For the backward pass ----

  bool inner_differentiates_x_ = false;
  std::vector<InnerParameter> inner_parameters_;
  tfb::BackwardCall inner_call_;  // the names are in here before a Backward
  // What SetUpBackward makes.
  PackedMatrix of_x_transposed_;
  PackedMatrix of_memory_transposed_;
  PackedMatrix output_transposed_;
  std::vector<AffineNames> names_;  // of the projections
  AffineNames output_names_;
};

// ---- The definition, in float64 ----

// Computes y without the residual, f64 [batch, rows, model_dim], by the formula above, with the
// same roundings to the problem's dtype and the inner technique's own definition. It also writes
// the further outputs of the latter, and with request.weights its weights.
absl::Status DefineProjectedAttention(const Problem& problem, const TechniqueSpec& inner,
                                      const NamedTensors& parameters, absl::string_view prefix,
                                      const AttentionInputs& inputs,
                                      const DefinitionRequest& request, NamedTensors* outputs);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_PROJECTED_ATTENTION_H_
