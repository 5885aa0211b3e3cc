// Compares a layer's outputs with two references in float64: the technique's own definition, which
// shows bugs, and dense attention on the same tensors, which shows the cost of the approximation.
#ifndef TFB_HARNESS_JUDGE_EVALUATE_H_
#define TFB_HARNESS_JUDGE_EVALUATE_H_

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
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/inputs/job.h"
#include "harness/judge/errors.h"
#include "harness/judge/extrapolation.h"

namespace tfb {

struct EvaluateRequest {
  Job job;                               // only its technique, options, problem, device and seed
  const NamedTensors* inputs = nullptr;  // on the host, as Technique::InputSpecs says
  std::vector<int64_t> rows;             // query tokens to check, ascending; empty for all
  ThreadPool* pool = nullptr;
  // The gradients of outputs, by the outputs' names, on the host. Where they are set, EvaluateLayer
  // also calls the backward pass.
  const NamedTensors* output_gradients = nullptr;
  // The registry in which dense counterparts are looked up.
  const Registry* registry = &Registry::Global();
};

// A number and its upper bound.
struct Bounded {
  double value = 0;
  double bound = 0;
  bool passed() const { return value <= bound; }  // NaN does not pass
};

struct Accuracy {
  OutputError against_definition;
  // The bound of against_definition.max_abs_over_max_value (AbsoluteBound); infinite for a
  // contestant that only approximates its definition.
  double definition_bound = 0;
  // Absolute, of log_sum_exp; absent where the technique has none.
  std::optional<Bounded> log_sum_exp_error;
  // max |y - r| / max |r| of the further outputs that the definition has, by name; over NAME.scale
  // where the definition gives one that is larger.
  std::map<std::string, Bounded> other_errors;
  // 16-bit problems: against_definition.max_abs over that of the dense counterpart's layer in the
  // same precision against its own definition. The bound is 2, or what one rounding of the largest
  // output is over the counterpart's error where that is more: see RatioBound.
  std::optional<Bounded> ratio_to_dense_precision;

  std::optional<OutputError> against_dense;  // has no bound: the cost of the approximation
  std::optional<KeptAttention> kept;  // where both sides have weights of at most kMaxWeightBytes
  std::string no_dense_reason;        // the reason why against_dense is absent
  std::optional<Extrapolation> extrapolation;

  bool passed = false;
  std::string failure;  // which bound was exceeded, in one line; empty where passed

  // Properties of the layer.
  std::string counterpart;  // "name:option=value"; empty where it is not known
  std::map<std::string, double> statistics;
  Cost cost;
  std::optional<size_t> workspace_bytes;  // absent where outputs alone were judged
  std::optional<size_t> parameter_bytes;
  NamedTensors outputs;                               // all rows, in the problem's dtype
  NamedTensors input_gradients, parameter_gradients;  // where the request has output gradients
  NamedTensors parameters;                            // of the layer that ran
};
constexpr int64_t kMaxWeightBytes = int64_t{1} << 28;

// Creates the layer, runs it once with outputs and workspace full of NaN, and judges it. Returns
// the status of the step that failed: InvalidArgument for a wrong request, Unimplemented where the
// technique does not support it, ResourceExhausted where there is no memory, Internal where a layer
// writes what is not its own: beyond its outputs or workspace, or its inputs. An error beyond its
// bound is not a failure of Evaluate, but clears Accuracy::passed.
absl::StatusOr<Accuracy> Evaluate(const EvaluateRequest& request);

// The following functions are steps of Evaluate, for callers that already have a layer.

// Evaluates a layer of the request's job with the layer's parameters.
absl::StatusOr<Accuracy> EvaluateLayer(const EvaluateRequest& request, Layer* layer);

struct LayerRun {
  NamedTensors outputs;                               // of every output, the optional ones included
  NamedTensors input_gradients, parameter_gradients;  // all, where output gradients were given
  size_t workspace_bytes = 0;
  size_t device_bytes = 0;  // of the device's memory, that this call took; 0 on the CPU
};
// Sets the layer up and runs it once on `inputs`, which are in the memory of its device and may
// lack optional tensors. Returns Internal where the layer writes beyond its outputs or its
// workspace, or on a CPU into its inputs, or a kernel fails. A contestant on a CPU runs once on
// other inputs before, so that one that gives its last result again is wrong here.
//
// With `output_gradients`, by the outputs' names and on the host, the run keeps memory, and its
// backward pass is set up and called; what it writes is checked likewise. Returns the layer's
// reason where it has no backward pass.
absl::StatusOr<LayerRun> RunOnce(Layer* layer, Device device, const Inputs& inputs,
                                 ThreadPool* pool, const NamedTensors* output_gradients = nullptr);

// Judges outputs that a layer with these parameters gave for request.inputs. Fills the fields of
// Accuracy down to `failure`, and `counterpart`.
absl::StatusOr<Accuracy> Judge(const EvaluateRequest& request, const NamedTensors& parameters,
                               const NamedTensors& outputs);

// Does what Judge does against the technique's definition alone, for the output "out" alone: fills
// against_definition and its bound, `passed` and `failure`.
absl::StatusOr<Accuracy> JudgeByDefinition(const EvaluateRequest& request,
                                           const NamedTensors& parameters,
                                           const NamedTensors& outputs);

// Returns about `count` of `tokens` rows, ascending: the first and the last, both sides of
// multiples of 64, and others evenly spread at random by the seed. Returns an empty list, which
// means all, where there are no more than `count`.
std::vector<int64_t> SampleRows(int64_t tokens, int64_t count, uint64_t seed);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_EVALUATE_H_
