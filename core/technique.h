// The interface that every technique implements and every tool of the harness uses.
//
// A Technique is registered once and immutable. It makes Layers, each for one problem, one set of
// options and one device. A layer owns its parameter tensors; the caller owns inputs, outputs and
// workspace. The float64 definition of a technique is a function of its inputs and parameters alone
// and shares no code with the layer that it judges.
#ifndef TFB_CORE_TECHNIQUE_H_
#define TFB_CORE_TECHNIQUE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/options.h"
#include "core/problem.h"
#include "core/random.h"
#include "core/status.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb {

enum class InputKind : uint8_t {
  kQkv,     // q [batch, query_heads, query_tokens, head_dim], k and v [batch, kv_heads, kv_tokens,
            // head_dim | value_dim]
  kHidden,  // x [batch, query_tokens, model_dim], projected inside
  kTokens,  // x [batch, query_tokens, model_dim], a language model's last hidden states, and what
            // else the technique reads of it
};
enum class Exactness : uint8_t {
  kExact,        // equals dense attention under a stated mask or bias
  kApproximate,  // estimates dense attention, with a stated law of convergence
  kOwn,          // has a definition of its own
};
absl::string_view Name(InputKind kind);       // "qkv", "hidden", "tokens"
absl::string_view Name(Exactness exactness);  // "exact", "approximate", "own"

// The size of a TensorSpec's dimension that is the segment's number of tokens.
constexpr int64_t kSegmentTokens = -1;

// A tensor that a layer reads or writes. Views may have any strides.
struct TensorSpec {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;
  bool optional = false;
  // Where set, the input is noise of this distribution; a harness draws it where the caller's
  // tensors do not have it. Other inputs that a harness draws are normal.
  std::optional<Distribution> noise = std::nullopt;
};

// The work of one Run. A number that is unknown is absent, never 0.
struct Cost {
  // A multiply-add counts 2; only pairs that the definition keeps count.
  std::optional<double> flops;
  std::optional<double>
      bytes;  // bytes that a fused implementation must move: inputs, outputs and parameters once
};

// The resources of a call. `workspace` has at least Layer::workspace_bytes(pool->threads()) bytes,
// aligned to 64, contents unspecified.
//
// For a layer on Device::kCuda or kSimulator the data of all views and the workspace are device
// memory of CudaRuntime::For(device). Host code must not touch that memory; it may read the sizes,
// strides and addresses of views. `pool` is for the part of Setup that runs on the host.
struct Execution {
  ThreadPool* pool = nullptr;
  absl::Span<std::byte> workspace;
  void* stream = nullptr;  // CUDA: the cudaStream_t to enqueue on; null is the default stream
  // Memory between a Run and its Backward, of at least Layer::kept_bytes() bytes, aligned to 64. A
  // Run writes there what Backward needs besides the tensors of BackwardCall. Empty: the Run has no
  // Backward.
  absl::Span<std::byte> kept = {};
};

// The tensors of a backward pass, by name. With the loss L as a function of the outputs, it computes
// dL/d(input) and dL/d(parameter) from dL/d(output).
struct BackwardCall {
  Inputs inputs;            // as the Run read them
  Inputs outputs;           // as the Run wrote them: "out", and others may be there
  Inputs output_gradients;  // by the outputs' names; one that is left out is 0
  // Written, by the names of inputs and parameters. One that is left out is not computed. They
  // overlap no other tensor.
  Outputs input_gradients;
  Outputs parameter_gradients;
};

// One technique on one problem and one device. A layer is not thread-safe: make one call at a time.
//
// Setup, Run and Append treat denormal numbers as zero on every thread that computes, and leave the
// caller's floating-point state as it was (core/denormals.h).
//
// On a GPU a call that returns OK has enqueued its work. What goes wrong before that, a launch that
// is refused say, is its status; what goes wrong in a kernel is that of CudaRuntime::Synchronize.
class Layer {
 public:
  virtual ~Layer() = default;

  const Problem& problem() const { return problem_; }
  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // The parameters, on the host on every device: Setup uploads them. They are drawn from the seed
  // at creation. SetParameters replaces those that it is given, whose names and shapes must be this
  // layer's; call Setup afterwards.
  const NamedTensors& parameters() const { return parameters_; }
  absl::Status SetParameters(const NamedTensors& parameters);
  // Replaces parameters without a copy where they have the dtype of the layer's own, so that a
  // mapped datastore can be used as it is.
  absl::Status SetParameters(NamedTensors&& parameters);

  // Returns the workspace that Setup and Run need, in bytes of the device's memory. On a GPU the
  // number of threads, which is the host's, changes nothing.
  virtual size_t workspace_bytes(int threads) const = 0;
  virtual Cost cost() const = 0;
  // Returns numbers that the layer reports of its last Run, by name, such as its mean span.
  virtual std::map<std::string, double> statistics() const { return {}; }

  // Does the work that need not be repeated while the inputs' sizes and the parameters stay:
  // schedules, tables, hashing, clustering. It may allocate, and returns ResourceExhausted where
  // there is not enough memory. It must be called before the first Run, and again where it failed:
  // a Setup that fails midway leaves nothing of one before it to run with.
  absl::Status Setup(const Inputs& inputs, const Execution& execution);
  // Computes the outputs. It allocates nothing and, on a GPU, does not synchronise. Optional
  // outputs may be left out.
  absl::Status Run(const Inputs& inputs, const Outputs& outputs, const Execution& execution);

  // ---- The backward pass ----
  //
  // A Run with `kept` memory, then any number of others, then Backward with the same memory: so the
  // layers of a network, or the micro-batches of a step, may run in any order. Gradients are sums in
  // fp32, whose bits do not depend on the number of threads. Choices that the forward pass made, such
  // as buckets, stay as they were found.

  // Returns OK where the layer has a backward pass; otherwise Unimplemented with the reason.
  virtual absl::Status CheckBackward() const;
  // Return the bytes that a Run keeps for Backward, beside inputs and outputs, and the workspace of
  // SetUpBackward and Backward.
  virtual size_t kept_bytes() const { return 0; }
  virtual size_t backward_workspace_bytes(int /*threads*/) const { return 0; }
  // Returns the work of one Backward that writes all gradients.
  virtual Cost backward_cost() const { return {}; }
  // Returns why Backward does not differentiate through some inputs and parameters of floating
  // dtype, by their names: a memory at which the paper stops the gradient, say. Inside a layer a
  // gradient may stop, too, as that of a later segment at what the layer remembers of earlier ones:
  // the technique's header says so, and its definition holds the same values (StoppedValues).
  virtual std::map<std::string, std::string> stopped_gradients() const { return {}; }
  // Returns of which inputs and parameters Backward writes a random estimate of the gradient, whose
  // mean it is, and why, by their names.
  virtual std::map<std::string, std::string> estimated_gradients() const { return {}; }
  // Returns the outputs whose gradients Backward takes: "out" and, of attention, "log_sum_exp".
  virtual std::vector<std::string> differentiable_outputs() const { return {"out"}; }
  // Return the specs of the tensors of BackwardCall, of which all are optional but the output "out".
  // Gradients have the dtypes of the inputs; those of parameters are f32.
  std::vector<TensorSpec> output_gradients() const;
  std::vector<TensorSpec> input_gradients() const;
  std::vector<TensorSpec> parameter_gradients() const;

  // Does the work of Backward that need not be repeated while the inputs' sizes and the parameters
  // stay. It may allocate. It must be called behind Setup, before the first Backward.
  absl::Status SetUpBackward(const Inputs& inputs, const Execution& execution);
  // Writes the gradients, from execution.kept as a Run of these inputs filled it. It allocates
  // nothing and, on a GPU, does not synchronise.
  absl::Status Backward(const BackwardCall& call, const Execution& execution);

 protected:
  Layer(const Problem& problem, std::vector<TensorSpec> inputs, std::vector<TensorSpec> outputs)
      : problem_(problem), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  // The base class checks tensors and workspace against the specs before it calls these.
  virtual absl::Status DoSetup(const Inputs&, const Execution&) { return absl::OkStatus(); }
  virtual absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                             const Execution& execution) = 0;
  virtual absl::Status DoSetUpBackward(const Inputs&, const Execution&) { return absl::OkStatus(); }
  virtual absl::Status DoBackward(const BackwardCall& call, const Execution& execution);

  // Returns the bytes that a Run must move: inputs and outputs, without optional ones, and
  // parameters once.
  double TensorBytes() const;

  absl::Status CheckCall(const Execution& execution) const;
  absl::Status CheckBackwardCall(const Execution& execution) const;
  absl::Status CheckKept(const Execution& execution) const;
  absl::Status CheckParameters(const NamedTensors& parameters) const;
  bool ready() const { return ready_; }

  NamedTensors parameters_;

 private:
  Problem problem_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;
  // The specs of a backward pass, which SetUpBackward makes.
  struct BackwardSpecs {
    std::vector<TensorSpec> outputs;
    std::vector<TensorSpec> output_gradients;
    std::vector<TensorSpec> input_gradients;
    std::vector<TensorSpec> parameter_gradients;
  };
  BackwardSpecs backward_;
  bool ready_ = false;
  bool backward_ready_ = false;
};

// Returns OK on the CPU, otherwise Unimplemented: `what` has no backward pass there.
absl::Status OnCpuAlone(Device device, absl::string_view what);

// A layer that reads its input in segments and keeps state between them: memory techniques and
// decoding.
class StreamingLayer : public Layer {
 public:
  // The tensors of one Append; a dimension of kSegmentTokens is the segment's number of tokens.
  const std::vector<TensorSpec>& segment_inputs() const { return segment_inputs_; }
  const std::vector<TensorSpec>& segment_outputs() const { return segment_outputs_; }
  int64_t max_segment_tokens() const { return max_segment_tokens_; }

  // Returns the segment length that gives the definition's result for the whole sequence; the last
  // segment may be shorter. 0 means that every split does, as with all techniques whose masks do
  // not depend on segments.
  virtual int64_t split_tokens() const { return 0; }

  virtual absl::Status Reset() = 0;  // Forgets everything that was appended.
  // Takes the next segment, of 1 to max_segment_tokens() tokens. A sequence appended in any split
  // gives the definition's result for the whole, unless split_tokens() demands one split. Setup
  // must have been called. Append allocates nothing.
  absl::Status Append(const Inputs& segment, const Outputs& outputs, const Execution& execution);

 protected:
  StreamingLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                 std::vector<TensorSpec> outputs, std::vector<TensorSpec> segment_inputs,
                 std::vector<TensorSpec> segment_outputs, int64_t max_segment_tokens)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        segment_inputs_(std::move(segment_inputs)),
        segment_outputs_(std::move(segment_outputs)),
        max_segment_tokens_(max_segment_tokens) {}

  virtual absl::Status DoAppend(int64_t tokens, const Inputs& segment, const Outputs& outputs,
                                const Execution& execution) = 0;

 private:
  std::vector<TensorSpec> segment_inputs_;
  std::vector<TensorSpec> segment_outputs_;
  int64_t max_segment_tokens_;
};

// The properties of a technique that every tool knows without running it.
struct TechniqueInfo {
  std::string name;      // the name of the technique's folder
  std::string family;    // "attention", "positional", "memory", "adaptive"
  std::string title;     // "Longformer sliding-window attention"
  std::string citation;  // "Beltagy, Peters, Cohan 2020, arXiv:2004.05150v2, section 3.1"
  InputKind input_kind = InputKind::kQkv;
  Exactness exactness = Exactness::kExact;
  std::vector<OptionSpec> options = {};
  std::string budget_option =
      "";             // the option that trades error for cost; empty where there is none
  double growth = 2;  // expected exponent of time in tokens
  // A technique that names kCuda runs on kSimulator too.
  std::vector<Device> devices = {Device::kCpu, Device::kCuda};
  bool supports_causal = true;
  bool supports_noncausal = true;
  bool self_attention = false;  // queries are of the same tokens as keys: query_tokens is kv_tokens
  // For a layer that groups tokens by their content: the optional output that holds the groups. It
  // is also an optional input that freezes them. With frozen groups, causal attention is causal;
  // how many tokens fit a group may depend on later tokens.
  std::string selection = "";
};

// Tells whether the technique has an implementation for the device. One for the simulator exists
// where one for CUDA does.
bool RunsOn(const TechniqueInfo& info, Device device);
// Return OK where a definition exists for the problem, whose sizes are valid, and where there is a
// layer, too; otherwise InvalidArgument or Unimplemented with the reason.
absl::Status CheckForm(const TechniqueInfo& info, const Problem& problem);
absl::Status CheckSupported(const TechniqueInfo& info, const Problem& problem, Device device);

// Values that the derivatives of a definition hold constant, where a paper stops gradients: at a
// memory, say. Differences of a definition see every path, so it passes such values through Hold, on
// its way and on one thread. The first evaluation stores them, each in the place that it has in the
// order of the calls; after Rewind another evaluation, near the first one's point, finds the stored
// values in the places of its own. Its differences are then the derivatives of the function in which
// those values are constants.
class StoppedValues {
 public:
  // Stores the values, or replaces them by those that are stored in this place.
  void Hold(absl::Span<double> values);
  // Does the same for a choice, such as the tokens that a query retrieves, as whole numbers. A choice
  // is a constant for all points at which derivatives are compared: see WithChoices.
  void Choose(absl::Span<double> choice);
  // Returns values for a first evaluation at another point, with the choices made at this one.
  StoppedValues WithChoices() const;
  // Begins an evaluation. Returns Internal where the one before did not hold the same number of
  // values in each place as the first.
  absl::Status Rewind();

 private:
  struct Places {
    // Stores the values, or replaces them; returns whether that was possible.
    bool Pass(absl::Span<double> values);

    std::vector<std::vector<double>> values = {};
    size_t place = 0;
    bool is_stored = false;
  };

  Places values_;
  Places choices_;
  bool fits_ = true;
};

// Which outputs of a definition are asked for, and what it may use to compute them.
struct DefinitionRequest {
  absl::Span<const int64_t> rows;  // query tokens to evaluate, ascending; empty for all
  bool weights = false;            // also "weights", where the technique has attention weights
  // The threads that share the work; null: the calling thread alone. The bits of the outputs are the
  // same for any number of threads.
  ThreadPool* pool = nullptr;
  // What a layer wrote for these inputs, all rows of it, or null. A definition that chooses by the
  // order of scores, an argmax or the largest few, may choose as the layer did among those that
  // fp32 cannot tell apart, and has to show that they are such. Nothing else of it may look there.
  const NamedTensors* computed = nullptr;
  // Holds the values at which gradients stop; null where no derivatives are taken.
  StoppedValues* stopped = nullptr;

  // The request of a part inside a network, which needs all rows of it and no more than its output.
  DefinitionRequest OfPart() const {
    DefinitionRequest part;
    part.pool = pool;
    part.stopped = stopped;
    return part;
  }
};

class Technique {
 public:
  virtual ~Technique() = default;

  const TechniqueInfo& info() const { return info_; }

  // Returns every option with its canonical value, or an error that says what is wrong with the
  // given ones.
  virtual absl::StatusOr<Options> Canonical(const Options& options) const = 0;
  // The tensors that a layer reads and writes. Outputs always contain "out"; attention has an
  // optional "log_sum_exp" (natural logarithm, f32 [batch, query_heads, query_tokens], -inf for a
  // row that sees no key).
  virtual absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                             const Options& options) const = 0;
  virtual absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                              const Options& options) const = 0;
  // Creates a layer. Returns InvalidArgument for a problem or options that cannot exist,
  // Unimplemented, with the reason, for a combination that is not supported, and ResourceExhausted
  // where there is not enough memory.
  virtual absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                        const Options& options, Device device,
                                                        uint64_t seed) const = 0;
  // Evaluates the definition in float64. Writes f64 tensors: "out", "log_sum_exp" and, where asked
  // for and known, "weights" [batch, query_heads, rows, kv_tokens]; dimensions of query tokens have
  // the requested rows only. A technique that cannot evaluate single rows (a stack of layers)
  // evaluates all rows; the sizes that it returns show that. A further output NAME that is a
  // difference, and so may be near 0 while its two sides are not, has their size as NAME.scale: its
  // error is measured in units of the larger of the two.
  virtual absl::Status Define(const Problem& problem, const Options& options,
                              const NamedTensors& parameters, const Inputs& inputs,
                              const DefinitionRequest& request, NamedTensors* outputs) const = 0;
  // Returns the technique and options whose definition is this one's dense counterpart, on the same
  // inputs and parameters.
  virtual absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                                    const Options& options) const;

 protected:
  explicit Technique(TechniqueInfo info) : info_(std::move(info)) {}

 private:
  TechniqueInfo info_;
};

// Returns InvalidArgument, with both sides of the difference, unless the views have the names, shapes
// and dtypes of the specs; optional ones may be left out.
absl::Status CheckInputs(const std::vector<TensorSpec>& specs, const Inputs& inputs);
absl::Status CheckOutputs(const std::vector<TensorSpec>& specs, const Outputs& outputs);

// Returns the specs of q, k, v and the optional key_mask: u8 [batch, kv_tokens], 1 where the key is
// a token and 0 where it is padding.
std::vector<TensorSpec> QkvInputs(const Problem& problem);
// Returns the spec of x [batch, query_tokens, model_dim].
std::vector<TensorSpec> HiddenInputs(const Problem& problem);
// Returns the specs of out [batch, query_heads, query_tokens, value_dim] and the optional
// log_sum_exp.
std::vector<TensorSpec> AttentionOutputs(const Problem& problem);
// Returns the bytes that fused attention must move: q, k, v and out once.
double AttentionBytes(const Problem& problem);
// Returns the spec of out [batch, query_tokens, model_dim].
std::vector<TensorSpec> HiddenOutputs(const Problem& problem);

// A technique whose options are the struct OptionsT (see core/options.h). Most techniques derive
// from this class.
template <class OptionsT>
class TechniqueOf : public Technique {
 public:
  absl::StatusOr<Options> Canonical(const Options& options) const final {
    OptionsT parsed;
    OptionBinder binder;
    parsed.Describe(binder);
    TFB_RETURN_IF_ERROR(binder.Parse(options));
    return binder.Values();
  }
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options& options) const final {
    TFB_ASSIGN_OR_RETURN(const OptionsT parsed, ParseOptions<OptionsT>(options));
    return ReadTensors(problem, parsed);
  }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                      const Options& options) const final {
    TFB_ASSIGN_OR_RETURN(const OptionsT parsed, ParseOptions<OptionsT>(options));
    return WrittenTensors(problem, parsed);
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem, const Options& options,
                                                Device device, uint64_t seed) const final {
    TFB_ASSIGN_OR_RETURN(const OptionsT parsed, ParseOptions<OptionsT>(options));
    TFB_RETURN_IF_ERROR(CheckSupported(info(), problem, device));
    return WithMemory([&]() -> absl::StatusOr<std::unique_ptr<Layer>> {
      TFB_RETURN_IF_ERROR(Check(problem, parsed));
      return MakeLayer(problem, parsed, device, seed);
    });
  }
  absl::Status Define(const Problem& problem, const Options& options,
                      const NamedTensors& parameters, const Inputs& inputs,
                      const DefinitionRequest& request, NamedTensors* outputs) const final {
    TFB_ASSIGN_OR_RETURN(const OptionsT parsed, ParseOptions<OptionsT>(options));
    TFB_RETURN_IF_ERROR(CheckForm(info(), problem));
    TFB_RETURN_IF_ERROR(Check(problem, parsed));
    return Definition(problem, parsed, parameters, inputs, request, outputs);
  }

 protected:
  explicit TechniqueOf(TechniqueInfo info) : Technique(WithOptions(std::move(info))) {}

  // Returns an error where the options do not fit the problem; MakeLayer and Definition are then not
  // called.
  virtual absl::Status Check(const Problem&, const OptionsT&) const { return absl::OkStatus(); }
  virtual absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                           const OptionsT& options, Device device,
                                                           uint64_t seed) const = 0;
  virtual absl::Status Definition(const Problem& problem, const OptionsT& options,
                                  const NamedTensors& parameters, const Inputs& inputs,
                                  const DefinitionRequest& request,
                                  NamedTensors* outputs) const = 0;
  // Returns the inputs. By default they are those of the input kind, with an optional "key_mask".
  virtual std::vector<TensorSpec> ReadTensors(const Problem& problem, const OptionsT&) const {
    return info().input_kind == InputKind::kQkv ? QkvInputs(problem) : HiddenInputs(problem);
  }
  virtual std::vector<TensorSpec> WrittenTensors(const Problem& problem, const OptionsT&) const {
    return info().input_kind == InputKind::kQkv ? AttentionOutputs(problem)
                                                : HiddenOutputs(problem);
  }

 private:
  static TechniqueInfo WithOptions(TechniqueInfo info) {
    OptionsT options;
    OptionBinder binder;
    options.Describe(binder);
    info.options = binder.Specs();
    return info;
  }
};

// The registry of the techniques that are linked into the program. It is the only code that knows
// them.
class Registry {
 public:
  static Registry& Global();

  void Add(std::unique_ptr<Technique> technique);  // aborts on a name that is taken
  std::vector<const Technique*> All() const;       // by name
  // Returns NotFound, with the nearest names, for an unknown name.
  absl::StatusOr<const Technique*> Find(absl::string_view name) const;

 private:
  std::map<std::string, std::unique_ptr<Technique>, std::less<>> techniques_;
};

// Registers technique T. Use it at namespace scope in the technique's .cc file:
//   const bool registered = RegisterTechnique<Longformer>();
template <class T>
bool RegisterTechnique() {
  Registry::Global().Add(std::make_unique<T>());
  return true;
}

}  // namespace tfb

#endif  // TFB_CORE_TECHNIQUE_H_
