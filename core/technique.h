// The interface that every technique implements and every tool of the harness uses.
//
// A Technique is registered once and immutable. It makes Layers: one problem, one set of options,
// one device. A layer owns its parameter tensors; the caller owns inputs, outputs and workspace.
// The float64 definition of a technique is a function of its inputs and parameters alone and shares
// no code with the layer that it judges.
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

// In the shape of a TensorSpec: as many tokens as the segment has.
constexpr int64_t kSegmentTokens = -1;

// A tensor that a layer reads or writes. Views may have any strides.
struct TensorSpec {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;
  bool optional = false;
  // The input is noise of this distribution: drawn, where the caller's tensors do not have it. Other
  // inputs that a harness draws are normal.
  std::optional<Distribution> noise = std::nullopt;
};

// Work of one Run. Unknown is absent, never 0.
struct Cost {
  std::optional<double> flops;  // 1 multiply-add = 2; only pairs that the definition keeps
  std::optional<double>
      bytes;  // that a fused implementation must move: inputs, outputs and parameters once
};

// Where a call runs. `workspace` has at least Layer::workspace_bytes(pool->threads()) bytes,
// aligned to 64, contents unspecified.
//
// For a layer on Device::kCuda or kSimulator the data of all views and the workspace are device
// memory of CudaRuntime::For(device), which host code must not touch: only sizes, strides and
// addresses are the host's to read. `pool` is for the host's part of Setup.
struct Execution {
  ThreadPool* pool = nullptr;
  absl::Span<std::byte> workspace;
  void* stream = nullptr;  // CUDA: the cudaStream_t to enqueue on; null is the default stream
};

// One technique on one problem and one device. Not thread-safe: one call at a time.
//
// On a GPU a call that returns OK has enqueued its work. What goes wrong before that, a launch that
// is refused say, is its status; what goes wrong in a kernel is that of CudaRuntime::Synchronize.
class Layer {
 public:
  virtual ~Layer() = default;

  const Problem& problem() const { return problem_; }
  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // Drawn from the seed at creation. SetParameters replaces those it is given; names and shapes
  // must be this layer's. Call Setup afterwards. They are tensors of the host on every device: Setup
  // uploads them.
  const NamedTensors& parameters() const { return parameters_; }
  absl::Status SetParameters(const NamedTensors& parameters);
  // The same without copying those that have the dtype of the layer's own: a mapped datastore, say.
  absl::Status SetParameters(NamedTensors&& parameters);

  // Of the device's memory. On a GPU the number of threads, which is the host's, changes nothing.
  virtual size_t workspace_bytes(int threads) const = 0;
  virtual Cost cost() const = 0;
  // What the layer reports of its last Run by name, such as its mean span.
  virtual std::map<std::string, double> statistics() const { return {}; }

  // Work that need not be repeated while the inputs' sizes and the parameters stay: schedules,
  // tables, hashing, clustering. May allocate. Must be called before the first Run.
  absl::Status Setup(const Inputs& inputs, const Execution& execution);
  // Allocates nothing and, on a GPU, does not synchronise. Optional outputs may be left out.
  absl::Status Run(const Inputs& inputs, const Outputs& outputs, const Execution& execution);

 protected:
  Layer(const Problem& problem, std::vector<TensorSpec> inputs, std::vector<TensorSpec> outputs)
      : problem_(problem), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  // Tensors and workspace have been checked against the specs when these are called.
  virtual absl::Status DoSetup(const Inputs&, const Execution&) { return absl::OkStatus(); }
  virtual absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                             const Execution& execution) = 0;

  // What a Run must move: inputs and outputs, optional ones left out, and parameters once.
  double TensorBytes() const;

  absl::Status CheckCall(const Execution& execution) const;
  absl::Status CheckParameters(const NamedTensors& parameters) const;
  bool ready() const { return ready_; }

  NamedTensors parameters_;

 private:
  Problem problem_;
  std::vector<TensorSpec> inputs_;
  std::vector<TensorSpec> outputs_;
  bool ready_ = false;
};

// Reads its input in segments and keeps state between them: memory techniques and decoding.
class StreamingLayer : public Layer {
 public:
  // The tensors of one Append; a dimension of kSegmentTokens is the segment's number of tokens.
  const std::vector<TensorSpec>& segment_inputs() const { return segment_inputs_; }
  const std::vector<TensorSpec>& segment_outputs() const { return segment_outputs_; }
  int64_t max_segment_tokens() const { return max_segment_tokens_; }

  // Segments of how many tokens (the last may be shorter) give what the definition says of the
  // whole. 0: every split does, as with all techniques whose masks know nothing of segments.
  virtual int64_t split_tokens() const { return 0; }

  virtual absl::Status Reset() = 0;  // forgets everything that was appended
  // Takes the next segment, of 1 to max_segment_tokens() tokens. A sequence appended in any split
  // gives what the definition says of the whole; but see split_tokens(). Setup must have been
  // called. Allocates nothing.
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

// What every tool knows of a technique without running it.
struct TechniqueInfo {
  std::string name;      // the folder's
  std::string family;    // "attention", "positional", "memory", "adaptive"
  std::string title;     // "Longformer sliding-window attention"
  std::string citation;  // "Beltagy, Peters, Cohan 2020, arXiv:2004.05150v2, section 3.1"
  InputKind input_kind = InputKind::kQkv;
  Exactness exactness = Exactness::kExact;
  std::vector<OptionSpec> options;
  std::string budget_option;  // the option that trades error for cost; empty where there is none
  double growth = 2;          // expected exponent of time in tokens
  // One that names kCuda runs on kSimulator too.
  std::vector<Device> devices = {Device::kCpu};
  bool supports_causal = true;
  bool supports_noncausal = true;
  // Where a layer groups tokens by their content: the optional output that says how it did, which is
  // also an optional input that makes it do so. With it frozen, causal attention is causal; what a
  // group has room for may depend on later tokens.
  std::string selection;
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

  // The request of a part inside a network, which needs all rows of it and no more than its output.
  DefinitionRequest OfPart() const {
    DefinitionRequest part;
    part.pool = pool;
    return part;
  }
};

class Technique {
 public:
  virtual ~Technique() = default;

  const TechniqueInfo& info() const { return info_; }

  // Every option with its canonical value, or what is wrong with the given ones.
  virtual absl::StatusOr<Options> Canonical(const Options& options) const = 0;
  // The tensors that a layer reads and writes. Outputs always have "out"; attention has an optional
  // "log_sum_exp" (natural logarithm, f32 [batch, query_heads, query_tokens], -inf for a row that
  // sees no key).
  virtual absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                             const Options& options) const = 0;
  virtual absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                              const Options& options) const = 0;
  // InvalidArgument: no such problem or options. Unimplemented: a combination that is not
  // supported, with the reason.
  virtual absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                        const Options& options, Device device,
                                                        uint64_t seed) const = 0;
  // The definition in float64. Writes f64 tensors: "out", "log_sum_exp" and, where asked for and
  // known, "weights" [batch, query_heads, rows, kv_tokens]; dimensions of query tokens have the
  // requested rows only. A technique that cannot evaluate single rows (a stack of layers) evaluates
  // all and says so by the sizes it returns.
  virtual absl::Status Define(const Problem& problem, const Options& options,
                              const NamedTensors& parameters, const Inputs& inputs,
                              const DefinitionRequest& request, NamedTensors* outputs) const = 0;
  // The technique and options whose definition is this one's dense counterpart, on the same inputs
  // and parameters.
  virtual absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                                    const Options& options) const;

 protected:
  explicit Technique(TechniqueInfo info) : info_(std::move(info)) {}

 private:
  TechniqueInfo info_;
};

// A technique whose options are the struct OptionsT (see core/options.h). Most derive from this
// one.
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
    TFB_RETURN_IF_ERROR(CheckSupported(problem, device));
    return MakeLayer(problem, parsed, device, seed);
  }
  absl::Status Define(const Problem& problem, const Options& options,
                      const NamedTensors& parameters, const Inputs& inputs,
                      const DefinitionRequest& request, NamedTensors* outputs) const final {
    TFB_ASSIGN_OR_RETURN(const OptionsT parsed, ParseOptions<OptionsT>(options));
    TFB_RETURN_IF_ERROR(Validate(problem));
    return Definition(problem, parsed, parameters, inputs, request, outputs);
  }

 protected:
  explicit TechniqueOf(TechniqueInfo info) : Technique(WithOptions(std::move(info))) {}

  virtual absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                           const OptionsT& options, Device device,
                                                           uint64_t seed) const = 0;
  virtual absl::Status Definition(const Problem& problem, const OptionsT& options,
                                  const NamedTensors& parameters, const Inputs& inputs,
                                  const DefinitionRequest& request,
                                  NamedTensors* outputs) const = 0;
  // By default those of the input kind, with an optional "key_mask".
  virtual std::vector<TensorSpec> ReadTensors(const Problem& problem, const OptionsT&) const;
  virtual std::vector<TensorSpec> WrittenTensors(const Problem& problem, const OptionsT&) const;

 private:
  absl::Status CheckSupported(const Problem& problem, Device device) const;
  static TechniqueInfo WithOptions(TechniqueInfo info) {
    OptionsT options;
    OptionBinder binder;
    options.Describe(binder);
    info.options = binder.Specs();
    return info;
  }
};

// q, k, v and the optional key_mask: u8 [batch, kv_tokens], 1 where the key is a token and 0 where
// it is padding.
std::vector<TensorSpec> QkvInputs(const Problem& problem);
// x [batch, query_tokens, model_dim].
std::vector<TensorSpec> HiddenInputs(const Problem& problem);
// out [batch, query_heads, query_tokens, value_dim] and the optional log_sum_exp.
std::vector<TensorSpec> AttentionOutputs(const Problem& problem);
// Bytes that fused attention must move: q, k, v and out once.
double AttentionBytes(const Problem& problem);
// out [batch, query_tokens, model_dim].
std::vector<TensorSpec> HiddenOutputs(const Problem& problem);

// Whether the technique has an implementation for the device: it says so, or, for the simulator,
// says that it has one for CUDA.
bool RunsOn(const TechniqueInfo& info, Device device);
// Whether `info` admits the problem on the device: InvalidArgument or Unimplemented with the reason
// where not.
absl::Status CheckSupported(const TechniqueInfo& info, const Problem& problem, Device device);
// Whether the views have the names, shapes and dtypes of the specs, with `segment_tokens` for
// kSegmentTokens. `what` begins the message: "input". Allocates nothing where all is well.
template <class View>
absl::Status CheckTensors(absl::string_view what, const std::vector<TensorSpec>& specs,
                          const NamedViews<View>& views, int64_t segment_tokens = 0);

template <class OptionsT>
absl::Status TechniqueOf<OptionsT>::CheckSupported(const Problem& problem, Device device) const {
  return tfb::CheckSupported(info(), problem, device);
}
template <class OptionsT>
std::vector<TensorSpec> TechniqueOf<OptionsT>::ReadTensors(const Problem& problem,
                                                           const OptionsT&) const {
  return info().input_kind == InputKind::kQkv ? QkvInputs(problem) : HiddenInputs(problem);
}
template <class OptionsT>
std::vector<TensorSpec> TechniqueOf<OptionsT>::WrittenTensors(const Problem& problem,
                                                              const OptionsT&) const {
  return info().input_kind == InputKind::kQkv ? AttentionOutputs(problem) : HiddenOutputs(problem);
}

// The registry: the one place that knows which techniques are linked in.
class Registry {
 public:
  static Registry& Global();

  void Add(std::unique_ptr<Technique> technique);  // aborts on a name that is taken
  std::vector<const Technique*> All() const;       // by name
  // NotFound, with the nearest names.
  absl::StatusOr<const Technique*> Find(absl::string_view name) const;

 private:
  std::map<std::string, std::unique_ptr<Technique>, std::less<>> techniques_;
};

// At namespace scope in the technique's .cc file:
//   const bool registered = RegisterTechnique<Longformer>();
template <class T>
bool RegisterTechnique() {
  Registry::Global().Add(std::make_unique<T>());
  return true;
}

}  // namespace tfb

#endif  // TFB_CORE_TECHNIQUE_H_
