// Defines conformance cases, which check a job, and trials, in which they run the job.
#ifndef TFB_HARNESS_CONFORMANCE_TRIAL_H_
#define TFB_HARNESS_CONFORMANCE_TRIAL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/conformance/placed.h"
#include "harness/inputs/job.h"
#include "harness/judge/bound_layer.h"

namespace tfb::conformance {

constexpr uint64_t kSeed = 20240229;

// Returns the job with another problem.
inline Job On(const Problem& problem, Job job) {
  job.problem = problem;
  return job;
}

// How a case's problems shrink in the simulator, where each access is slow. They do not shrink on a
// GPU, nor where IsExhaustive. Where they shrink, two problems that differ only in their mask
// become one, which is alternately causal and not causal.
enum class SimulatedSize {
  kAsItIs,       // unchanged, since the case is about these sizes and masks
  kSameSizes,    // unchanged but for one mask, causal or not, where it has both
  kFewerTokens,  // at most 80 tokens, one and a quarter tiles of 64; at most 130 keys
  kOneOfABatch,  // the same with one sequence, and one head where head_dim is more than 40
};

// Tells whether TFB_EXHAUSTIVE is set in the environment, as by --config=exhaustive.
bool IsExhaustive();
// Tells whether the simulator would take seconds for so many FLOPs, so that a case had better draw another
// problem. It never would where IsExhaustive.
bool WouldTakeSeconds(Device device, double flops);

// A case makes one test for each of its problems. Its name is a sentence without spaces; `numbers`
// are those of the cases in the project's reliability rules, for reference.
struct Case {
  std::string name;
  std::string numbers;
  std::vector<Problem> problems;
  std::function<void(const Job&)> check;
  bool default_options_only = false;
  // Whether each problem runs with all sets of options in the simulator, too, where it otherwise runs
  // with one of them, by turns.
  bool all_options_simulated = false;
  SimulatedSize simulated_size = SimulatedSize::kOneOfABatch;
  // Whether the case is about GPUs and their simulator, and does not run on the CPU.
  bool of_devices = false;
  // Whether the case is about which tokens see which. Any other case runs causal problems as
  // non-causal ones, and the reverse, where the technique has only that form.
  bool of_causality = false;
  // Whether the case is about backward passes. It is left out for a technique without one, for which
  // the case kBackwardCase is skipped with the reason.
  bool of_gradients = false;
};
constexpr char kBackwardCase[] = "ItHasABackwardPass";
inline Case OfCausality(Case one) {
  one.of_causality = true;
  return one;
}

std::vector<Case> MaskCases();
std::vector<Case> ShapeCases();
std::vector<Case> OptionCases();
std::vector<Case> NumberCases();
std::vector<Case> ScaleCases();
std::vector<Case> DeterminismCases();
std::vector<Case> ContractCases();
std::vector<Case> CostCases();
std::vector<Case> StreamingCases();
std::vector<Case> ContinuationCases();
std::vector<Case> GradientCases();
std::vector<Case> DeviceCases();

// Returns "b2_h4over2_t130_d16_causal_bf16": the properties of the problem, for a test's name.
std::string LabelOf(const Problem& problem);

// Returns the problem that most cases use: big enough for three tiles of 64, small enough for a
// float64 definition in plain loops.
Problem Usual(bool causal = false, DType dtype = DType::kF32);
// Returns the usual problem, causal and not.
std::vector<Problem> UsualBoth();

// Makes blocks, and the threads of each, run in another order in the simulator from now on. Within
// a schedule, launches of a shape are in the same order.
void FollowSchedule(uint64_t schedule);

struct RunSettings {
  int threads = 2;
  Layout inputs = Layout::kContiguous;
  Layout outputs = Layout::kContiguous;
  // Whether Setup runs; else the layer keeps its state from the last run.
  bool setup = true;
  const NamedTensors* setup_inputs = nullptr;  // Setup's inputs, where they are not Run's
  uint64_t schedule = 1;  // the seed of the order of blocks and threads in the simulator

  static RunSettings Threads(int threads) {
    RunSettings settings;
    settings.threads = threads;
    return settings;
  }
  static RunSettings WithoutSetup() {
    RunSettings settings;
    settings.setup = false;
    return settings;
  }
  static RunSettings Schedule(uint64_t schedule) {
    RunSettings settings;
    settings.schedule = schedule;
    return settings;
  }
};

struct Tolerance {
  // Multiplies the bound of the dtype.
  double factor = 1;
  // Whether to add, element by element, four times the change of the definition when its
  // floating-point inputs change by about 16 roundings of fp32. This is for scores so large that
  // their rounding errors dominate, which no fp32 implementation can avoid; where the result does
  // not depend on them the addition is 0.
  bool conditioned = false;
  double absolute = 0;
  double log_sum_exp = 0;  // added to the bound of log_sum_exp

  static Tolerance Conditioned() {
    Tolerance tolerance;
    tolerance.conditioned = true;
    return tolerance;
  }
  static Tolerance Absolute(double absolute) {
    Tolerance tolerance;
    tolerance.absolute = absolute;
    return tolerance;
  }
};

// A layer on a problem, with drawn inputs. It fails the running test where something is wrong.
class Trial {
 public:
  // Returns null, with the running test marked as skipped and the reason given, where the technique
  // does not support the problem; and null with the test failed where it fails.
  static std::unique_ptr<Trial> Make(const Job& job, uint64_t seed = kSeed);

  const Job& job() const { return job_; }
  Layer& layer() { return *layer_; }
  NamedTensors& inputs() { return inputs_; }
  const NamedTensors& inputs() const { return inputs_; }

  // Requires that q and v of the usual shapes are among the inputs, and k unless the queries are
  // the keys. Else the test is marked as skipped.
  bool RequireQkv();
  // Requires that the technique reads a key_mask, and adds one of ones. Else the test is marked as
  // skipped.
  bool RequireKeyMask();
  // Requires that the technique is exact attention under a mask or a bias.
  bool RequireExact();

  // Sets the layer up and runs it once. All tensors, and a workspace of exactly the requested size,
  // lie between guard bands of NaN; outputs and workspace are NaN before. Checks that the guards
  // and the inputs are unchanged and that every output was written. On a device all of them are in
  // device memory. Returns an empty result where the run failed.
  NamedTensors Run(const RunSettings& settings = {});

  // Evaluates the definition on these inputs. Returns nothing where it fails, with the test failed.
  // `computed` and `pool` are those of DefinitionRequest.
  NamedTensors Define(bool weights = false, ThreadPool* pool = nullptr);
  // Evaluates the definition on other inputs and parameters.
  NamedTensors DefineOn(const Inputs& inputs, const NamedTensors& parameters, bool weights,
                        const NamedTensors* computed = nullptr, ThreadPool* pool = nullptr);

  // Returns the unit of the errors of a floating-point output with these values: the largest of
  // them, of v, and of the output's scale in the definition's outputs `reference`, where there are
  // such (see Technique::Define).
  double ScaleOf(const std::string& name, const ConstTensorView& values,
                 const NamedTensors& reference) const;

  void ExpectMatchesDefinition(const NamedTensors& outputs, const Tolerance& tolerance = {});
  // Calls Run() and compares with the definition.
  void ExpectRunMatchesDefinition(const Tolerance& tolerance = {});

 private:
  explicit Trial(const Job& job) : job_(job) {}
  std::vector<NamedTensors> DefinitionsNearby();

  Job job_;
  std::unique_ptr<Layer> layer_;
  NamedTensors inputs_;
};

// Returns the indices of an element of that number, the last fastest.
Shape PlaceIn(const Shape& shape, int64_t element);

// Binds the trial's layer to its inputs, for cases that call the layer themselves. Memory has no
// guard bands, and outputs hold arbitrary bytes.
absl::StatusOr<BoundLayer> Bind(Trial* trial, ThreadPool* pool, bool optional_outputs = true);

// Returns the number of products that this program has had cuBLAS compute on the device: 0 on any but
// a GPU.
int64_t CublasProducts(Device device);

// Marks the running test as skipped, and says why.
void Skip(const std::string& reason);
// Tells whether the status says that the technique does not support the request.
bool IsRefusal(const absl::Status& status);

// Returns the input that the keys come from: k, or q where the technique has no k.
Tensor& KeysOf(NamedTensors& inputs);

// Copies batch row 0, head 0 of a tensor of rank 4 over all others, so that it can be broadcast.
void MakeEqualAlongBatchAndHeads(Tensor* tensor);
NamedTensors Copies(const NamedTensors& tensors);
// Returns other parameters than the seed's, where a layer draws any: three quarters of each.
NamedTensors Smaller(const NamedTensors& parameters);
// Compares element by element and bit by bit; the first difference fails the running test.
void ExpectSameBits(const NamedTensors& a, const NamedTensors& b, const std::string& what);
// Does the same for the tokens below `tokens_below`.
void ExpectSameTokens(const NamedTensors& a, const NamedTensors& b, int64_t tokens_below,
                      const Problem& problem, const std::string& what);
// Returns the dimension of the tokens: the second to last of three or more, else the last.
int TokenAxis(const ConstTensorView& view);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_TRIAL_H_
