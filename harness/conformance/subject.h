// What a conformance case works with: a technique under certain options on a device, and trials of
// it on one problem.
#ifndef TFB_HARNESS_CONFORMANCE_SUBJECT_H_
#define TFB_HARNESS_CONFORMANCE_SUBJECT_H_

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
#include "harness/device_memory.h"

namespace tfb::conformance {

constexpr uint64_t kSeed = 20240229;

struct Subject {
  const Technique* technique = nullptr;
  Options options;
  Device device = Device::kCpu;
};

// What the simulator, where each access takes its time, leaves of a case's problems. Nothing of it
// holds on a GPU, or with IsExhaustive.
enum class SimulatedSize {
  kAsItIs,       // the sizes are what the case is about
  kFewerTokens,  // 80 tokens where there are more, a whole tile of 64 and a part of one; 130 keys
  kOneOfABatch,  // that, and one sequence; one head where head_dim is more than 40
};

// Whether TFB_EXHAUSTIVE is set in the environment, as by --config=exhaustive.
bool IsExhaustive();

// One test for each of the problems. Named as a sentence without spaces; `numbers` are those of the
// cases in the project's reliability rules, for people who look for them.
struct Case {
  std::string name;
  std::string numbers;
  std::vector<Problem> problems;
  std::function<void(const Subject&, const Problem&)> check;
  bool default_options_only = false;
  bool all_options_simulated = false;  // in the simulator too, which is slow
  SimulatedSize simulated_size = SimulatedSize::kOneOfABatch;
  bool of_devices = false;  // it is about GPUs and their simulator: not run on the CPU
  // It is about which tokens see which. Any other case runs causal problems as non-causal ones, and
  // the other way round, where that is the only form that the technique has.
  bool of_causality = false;
};
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
std::vector<Case> StreamingCases();
std::vector<Case> DeviceCases();

// "b2_h4over2_t130_d16_causal_bf16": what distinguishes the problem, for a test's name.
std::string LabelOf(const Problem& problem);

// The problem most cases use: big enough for three tiles of 64, small enough for a float64
// definition in plain loops.
Problem Usual(bool causal = false, DType dtype = DType::kF32);
// It, causal and not.
std::vector<Problem> UsualBoth();

// How an input or output lies in memory.
enum class Layout {
  kContiguous,
  kGaps,        // padding behind every row
  kTransposed,  // the dimensions before the last in reversed order
  kBroadcast,   // stride 0 over batch and heads; the inputs must be equal along them
  kOddStrides,  // stride 12345 in dimensions of size 1
};

struct RunSettings {
  int threads = 2;
  Layout inputs = Layout::kContiguous;
  Layout outputs = Layout::kContiguous;
  bool setup = true;                           // false: as the last run left it
  const NamedTensors* setup_inputs = nullptr;  // what Setup sees, where that is not what Run sees
  uint64_t schedule = 1;  // of blocks and threads in the simulator: the seed of their order

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
  // Times the bound of the dtype.
  double factor = 1;
  // Adds, element by element, four times what the definition changes by when its floating-point
  // inputs change by about 16 roundings of fp32. For scores so large that their own roundings
  // decide: no fp32 implementation can do better, and where nothing hangs on them it is 0.
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

// A layer on a problem, with drawn inputs. Fails the running test where something is wrong.
class Trial {
 public:
  // Null, with the running test marked as skipped and the reason said, where the technique does not
  // do the problem; and where it fails, with the test failed.
  static std::unique_ptr<Trial> Make(const Subject& subject, const Problem& problem,
                                     uint64_t seed = kSeed);

  const Subject& subject() const { return subject_; }
  const Problem& problem() const { return problem_; }
  Layer& layer() { return *layer_; }
  NamedTensors& inputs() { return inputs_; }

  // q and v of the usual shapes are among the inputs, and so is k, unless the queries are the keys.
  // Else the test is marked as skipped.
  bool RequireQkv();
  // The technique reads a key_mask. Adds one of ones. Else the test is marked as skipped.
  bool RequireKeyMask();
  // The technique is exact attention under a mask or a bias.
  bool RequireExact();

  // Sets up and runs once. All tensors lie between guards of NaN, and so does a workspace that is
  // just as large as asked for; outputs and workspace are NaN before. Checks that the guards and
  // the inputs are as they were and that every output was written. On a device all of that stands
  // in its memory. Empty where it failed.
  NamedTensors Run(const RunSettings& settings = {});

  // Of these inputs. Empty where the definition fails, with the test failed.
  NamedTensors Define(bool weights = false);
  // Of other inputs and parameters. `computed` as in DefinitionRequest.
  NamedTensors DefineOn(const Inputs& inputs, const NamedTensors& parameters, bool weights,
                        const NamedTensors* computed = nullptr);

  void ExpectMatchesDefinition(const NamedTensors& outputs, const Tolerance& tolerance = {});
  // Run() and the above.
  void ExpectRunMatchesDefinition(const Tolerance& tolerance = {});

 private:
  Trial(const Subject& subject, const Problem& problem) : subject_(subject), problem_(problem) {}
  std::vector<NamedTensors> DefinitionsNearby();

  Subject subject_;
  Problem problem_;
  std::unique_ptr<Layer> layer_;
  NamedTensors inputs_;
};

// A layer with inputs, outputs and workspace in the memory of its device, for cases that call it
// themselves. Nothing is guarded, and outputs hold anything.
class Call {
 public:
  static absl::StatusOr<Call> Make(Trial* trial, int threads = 2, bool optional_outputs = true);

  Layer& layer() { return *layer_; }
  const Inputs& inputs() const { return inputs_.inputs(); }
  const Outputs& outputs() const { return outputs_.outputs(); }
  const Execution& execution() const { return execution_; }
  CudaRuntime* runtime() const { return runtime_; }  // null for the CPU

  // Each waits until it is done.
  absl::Status Setup();
  absl::Status Run();
  // What the outputs hold.
  absl::StatusOr<NamedTensors> Results() const { return outputs_.Download(); }

 private:
  Layer* layer_ = nullptr;
  CudaRuntime* runtime_ = nullptr;
  DeviceTensors inputs_, outputs_;
  DeviceMemory workspace_;
  std::unique_ptr<ThreadPool> pool_;
  Execution execution_;
};

// Marks the running test as skipped, and says why.
void Skip(const std::string& reason);
// Whether the status says that the technique does not do what was asked for.
bool IsRefusal(const absl::Status& status);

// The input that the keys come from: k, or q where the technique has no other.
Tensor& KeysOf(NamedTensors& inputs);

NamedTensors Copies(const NamedTensors& tensors);
// Element by element and bit by bit; the first difference fails the running test.
void ExpectSameBits(const NamedTensors& a, const NamedTensors& b, const std::string& what);
// The same where `compare(axis-wise index of the token)` says so: rows of the token dimension.
void ExpectSameTokens(const NamedTensors& a, const NamedTensors& b, int64_t tokens_below,
                      const Problem& problem, const std::string& what);
// The dimension of the tokens: the last but one of three or more, else the last.
int TokenAxis(const ConstTensorView& view);

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_SUBJECT_H_
