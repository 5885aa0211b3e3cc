// A trial of a layer's backward pass: gradients from guarded memory, and their comparison with the
// directional derivatives of the definition.
#ifndef TFB_HARNESS_CONFORMANCE_GRADIENT_TRIAL_H_
#define TFB_HARNESS_CONFORMANCE_GRADIENT_TRIAL_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/conformance/placed.h"
#include "harness/conformance/trial.h"
#include "harness/judge/gradients.h"
#include "harness/judge/guarded.h"

namespace tfb::conformance {

struct StepSettings {
  int threads = 2;
  Layout inputs = Layout::kContiguous;  // of inputs and output gradients
  Layout gradients = Layout::kContiguous;
  // Whether Setup and SetUpBackward run; else the layer keeps its state.
  bool setup = true;
  // On a device: whether Backward is recorded in a CUDA graph, which is then launched twice.
  bool in_graph = false;
  uint64_t schedule = 1;  // of the run and its Backward, see FollowSchedule
  // Variables whose gradients are not asked for, by Variable::ToString.
  std::set<std::string> left_out = {};

  static StepSettings Threads(int threads) {
    StepSettings settings;
    settings.threads = threads;
    return settings;
  }
  static StepSettings WithoutSetup() {
    StepSettings settings;
    settings.setup = false;
    return settings;
  }
};

// A Run, and the memory that it keeps for its Backward. All tensors, and workspaces and kept memory
// of exactly the requested sizes, lie between guard bands of NaN and are NaN before they are
// written. Each call checks that its guards, and what it may only read, are unchanged, and that all
// that it has to write was written.
class Step {
 public:
  static absl::StatusOr<std::unique_ptr<Step>> Run(Layer* layer, Device device,
                                                   const NamedTensors& inputs,
                                                   const StepSettings& settings);
  // Returns the gradients by Variable::ToString.
  absl::StatusOr<NamedTensors> Backward(const NamedTensors& output_gradients);

  // Returns the call and the execution of a Backward in this step's memory, without gradients, for
  // cases that call the layer themselves. They refer to this step.
  BackwardCall call() const;
  Execution execution();
  const NamedTensors& outputs() const { return outputs_; }

 private:
  Step(Layer* layer, Device device, const NamedTensors& inputs, const StepSettings& settings);
  absl::Status SetUp();
  absl::Status DoRun();
  absl::Status CheckKept();
  absl::Status ReplayBackward(const BackwardCall& call);

  Layer* layer_;
  Device device_;
  StepSettings settings_;
  NamedTensors inputs_, outputs_;
  ThreadPool pool_;
  PlacedTensors read_, written_;
  GuardedMemory kept_;
  GuardedWorkspace workspace_;  // of Backward
};

// A trial of a layer that has a backward pass, with drawn gradients of its outputs. It fails the
// running test where something is wrong.
class GradientTrial {
 public:
  // Returns null where Trial::Make does, and, with the test marked as skipped and the reason given,
  // where the layer has no backward pass. The technique's choices are frozen.
  static std::unique_ptr<GradientTrial> Make(const Job& job, uint64_t seed = kSeed);

  Trial& trial() { return *trial_; }
  const Job& job() const { return trial_->job(); }
  Layer& layer() { return trial_->layer(); }
  NamedTensors& inputs() { return trial_->inputs(); }
  NamedTensors& output_gradients() { return output_gradients_; }

  // Makes the selection that the layer writes for these inputs an input, where it has one, so that
  // its choices are constants. Returns false, with the test failed, where the run failed.
  bool FreezeChoices();

  // Returns the inputs and parameters of which the layer gives gradients that are no estimates:
  // values before keys and queries, whose gradients may vanish, and parameters last. An estimate is
  // of the gradient of an expectation, which no draw has as its own.
  std::vector<Variable> Variables();

  // Returns null, with the test failed, where the run failed.
  std::unique_ptr<Step> Run(const StepSettings& settings = {});
  // Runs the layer and its backward pass. Returns the gradients by Variable::ToString, or an empty
  // result, with the test failed, where a call failed.
  NamedTensors Backward(const StepSettings& settings = {});
  NamedTensors Backward(Step* step);

  // Compares the gradients with the definition's derivatives along two random directions and, in
  // fp32, one coordinate, for every input, and for up to `parameters` parameters, which the
  // problem's label draws.
  void ExpectMatchesDefinition(const NamedTensors& gradients, int parameters = 3);
  // Compares those of one variable.
  void ExpectMatchesDefinition(const NamedTensors& gradients, const Variable& variable,
                               DefinitionGradient* definition);
  // Returns the definition's derivatives at these inputs. The trial must outlive them.
  absl::StatusOr<DefinitionGradient> Definition();
  // From here on, bounds have no room for outputs that Backward reads as they were rounded to 16
  // bits.
  void ForbidRoundedOutputs() { reads_rounded_outputs_ = false; }

 private:
  std::unique_ptr<Trial> trial_;
  NamedTensors output_gradients_;
  NamedTensors computed_;  // by the last run
  bool reads_rounded_outputs_ = true;
  ThreadPool pool_ = ThreadPool(1);  // for definitions
};

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_GRADIENT_TRIAL_H_
