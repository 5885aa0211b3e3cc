// Compares a layer's outputs with float64: with the technique's own definition (a bug shows there)
// and dense attention on the same tensors (what the approximation costs).
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
  Job job;                               // of it the technique, options, problem, device, seed
  const NamedTensors* inputs = nullptr;  // on the host, as Technique::InputSpecs says
  std::vector<int64_t> rows;             // query tokens to check, ascending; empty for all
  ThreadPool* pool = nullptr;
  // The registry in which dense counterparts are looked up.
  const Registry* registry = &Registry::Global();
};

// A number and what it may be at most.
struct Bounded {
  double value = 0;
  double bound = 0;
  bool passed() const { return value <= bound; }  // NaN does not pass
};

struct Accuracy {
  OutputError against_definition;
  // The bound of against_definition.max_abs_over_max_value (AbsoluteBound).
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

  std::optional<OutputError> against_dense;  // it has no bound: it is what a technique costs
  std::optional<KeptAttention> kept;  // where both sides have weights of at most kMaxWeightBytes
  std::string no_dense_reason;        // why against_dense is absent
  std::optional<Extrapolation> extrapolation;

  bool passed = false;
  std::string failure;  // which bound was exceeded, in one line; empty where passed

  // Properties of the layer.
  std::string counterpart;  // "name:option=value"; empty where it is not known
  std::map<std::string, double> statistics;
  Cost cost;
  std::optional<size_t> workspace_bytes;  // absent where outputs alone were judged
  std::optional<size_t> parameter_bytes;
  NamedTensors outputs;     // whole, of the problem's dtype
  NamedTensors parameters;  // that the layer ran with
};
constexpr int64_t kMaxWeightBytes = int64_t{1} << 28;

// Creates the layer, runs it once with outputs and workspace full of NaN, and judges it. The status
// is that of the step that failed: what the caller asked for (InvalidArgument), what the technique
// does not do (Unimplemented), no memory (ResourceExhausted). An error beyond its bound is not a
// failure of Evaluate but of Accuracy::passed.
absl::StatusOr<Accuracy> Evaluate(const EvaluateRequest& request);

// The parts of it, for callers that have a layer already.

// Evaluates a layer of the request's job with the parameters that the layer has.
absl::StatusOr<Accuracy> EvaluateLayer(const EvaluateRequest& request, Layer* layer);

struct LayerRun {
  NamedTensors outputs;  // of every output, the optional ones included
  size_t workspace_bytes = 0;
  size_t device_bytes = 0;  // of the device's memory, for outputs and workspace; 0 on the CPU
};
// Sets the layer up and runs it once on `inputs`, tensors in the memory of its device, which may
// lack optional ones. Internal where it writes beyond its outputs or its workspace, or a kernel
// fails.
absl::StatusOr<LayerRun> RunOnce(Layer* layer, Device device, const Inputs& inputs,
                                 ThreadPool* pool);

// Judges outputs that a layer with these parameters gave for request.inputs. Fills the fields of
// Accuracy down to `failure`, and `counterpart`.
absl::StatusOr<Accuracy> Judge(const EvaluateRequest& request, const NamedTensors& parameters,
                               const NamedTensors& outputs);

// About `count` of `tokens` rows, ascending: the first and the last, both sides of multiples of 64,
// and others evenly spread by a draw of the seed. All where there are no more; empty then.
std::vector<int64_t> SampleRows(int64_t tokens, int64_t count, uint64_t seed);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_EVALUATE_H_
