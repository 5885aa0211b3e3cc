// A layer that runs a FlashPlan on any device: what most attention techniques are.
//
// The plan is described twice: when the layer is created, to learn the sizes, and in Setup, from
// the parameters as they are then. Both have the same numbers of queries and keys in the same
// parts.
//
// On CUDA, where one block of threads would walk a row of many keys while all others are done, such
// rows become a softmax of their own: the engine cuts the keys of few queries into parts. On the
// CPU threads take rows in the order of their lengths, and the long ones need nothing.
#ifndef TFB_CORE_FLASH_PLANNED_LAYER_H_
#define TFB_CORE_FLASH_PLANNED_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_backward.h"
#include "core/flash/flash_parts.h"
#include "core/flash/parameter_gradients.h"
#include "core/flash/plan.h"
#include "core/layers/list_rows.h"
#include "core/technique.h"

namespace tfb {

class PlannedLayer : public Layer {
 public:
  using Describe = std::function<absl::StatusOr<FlashPlan>(const NamedTensors& parameters)>;
  // Fits parameters to the inputs of a Setup, before the plan is described.
  using Fit = std::function<absl::Status(Device, const Inputs&, const Execution&, NamedTensors*)>;

  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       std::vector<TensorSpec> inputs,
                                                       std::vector<TensorSpec> outputs,
                                                       NamedTensors parameters, Device device,
                                                       Describe describe, Fit fit = nullptr);

  size_t workspace_bytes(int threads) const override;
  // Counts the pairs of the parts' schedules, which Setup builds; the FLOPs are absent before Setup,
  // and where an input hides pairs or a Run marks queries.
  Cost cost() const override;
  std::map<std::string, double> statistics() const override;

  // A Run keeps the log-sum-exp of every row, and what rounding took from it and, where the output
  // has 16 bits, from that; Backward makes the steps' tensors again that are not kept. What softmaxes write to tensors of steps
  // is kept, too: it has the size of the output, which is kept for Backward alike, and a softmax that
  // runs again costs two products beside the five of its backward pass.
  absl::Status CheckBackward() const override;
  size_t kept_bytes() const override;
  size_t backward_workspace_bytes(int threads) const override;
  Cost backward_cost() const override;
  std::map<std::string, std::string> stopped_gradients() const override {
    return plan_.stopped_gradients();
  }
  std::vector<std::string> differentiable_outputs() const override;

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override;
  absl::Status DoSetUpBackward(const Inputs& inputs, const Execution& execution) override;
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override;

 private:
  // The sizes of a softmax, which decide its workspace.
  struct Sizes {
    std::vector<Problem> parts;
    bool has_relative_keys = false;
    ScoreSums sums;
    bool operator==(const Sizes& other) const {
      return parts == other.parts && has_relative_keys == other.has_relative_keys &&
             sums == other.sums;
    }
  };
  // A part on the device.
  struct Part {
    const FlashPart* part;
    DeviceArray<int32_t> query_order;
    DeviceArray<int32_t> key_order;
  };
  struct Softmax {
    const FlashRows* rows;
    std::vector<Part> parts;
    FlashParts engines;
    std::vector<FlashCall> calls;  // room for the calls of a Run
  };

  // The list of a softmax's marked queries.
  struct MarkedList {
    int32_t* queries;    // on the CPU [batch][most], -1 behind the last one
    RowListMemory rows;  // on CUDA
  };

  PlannedLayer(const Problem& problem, std::vector<TensorSpec> inputs,
               std::vector<TensorSpec> outputs, Device device, Describe describe, FlashPlan plan)
      : Layer(problem, std::move(inputs), std::move(outputs)),
        device_(device),
        describe_(std::move(describe)),
        plan_(std::move(plan)) {}

  // Takes the memory of the steps' tensors, which it names beside the inputs, and of the marked
  // lists.
  void LayOut(const Inputs& inputs, Workspace* workspace);
  std::vector<Sizes> SizesOf(const FlashPlan& plan) const;
  void ListTerms();
  absl::StatusOr<Softmax> Build(const FlashRows& rows) const;
  TensorView Written(const std::string& name, const FlashRows& rows, const Outputs& outputs) const;
  FlashCall CallOf(const Softmax& softmax, size_t part, const Outputs& outputs) const;
  // Lists a softmax's marked queries, on the CPU, and returns the call over them.
  FlashCall MarkedCallOf(const Softmax& softmax, const Outputs& outputs) const;
  absl::Status RunMarked(const Softmax& softmax, const Outputs& outputs,
                         const Execution& execution) const;
  // Returns the FLOPs of a part, where its pairs are known: those of a Run, or of Backward.
  enum class Pass { kForward, kBackward };
  std::optional<double> FlopsOf(const FlashPart& part, const FlashEngine& engine, Pass pass) const;
  Cost CostOf(Pass pass) const;

  // A tensor of which a Run keeps the values, or what rounding took from them, or both: both of a
  // log-sum-exp, the values of what else softmaxes write for a step's Finish and of what steps say,
  // and the rest of an output of 16 bits, whose values the caller keeps.
  struct KeptTensor {
    std::string name;
    Shape shape;
    std::optional<DType> values;
    std::optional<DType> rest;
  };
  struct KeptViews {
    TensorView values;
    TensorView rest;
  };
  void FindKept();
  static KeptViews TakeKept(const KeptTensor& kept, Workspace* workspace);
  // Returns the parameters whose gradients the plan's steps write.
  static std::vector<std::string> WrittenBySteps(const FlashPlan& plan);
  // Lays out what is kept, which replaces the tensors of steps. Where there is no memory, nothing
  // is.
  void LayOutKept(absl::Span<std::byte> memory);

  // What a part has beside its forward call.
  struct PartBackward {
    TransposedSchedule schedule;       // on the CPU
    RelativeKeyVectors relative_keys;  // on the CPU
    FlashBackwardCuda cuda;
    // As in FlashBackwardCall.
    bool sets_q = false;
    bool sets_k = false;
    bool sets_v = false;
  };
  // The tensors of a Backward, in its workspace.
  struct BackwardMemory {
    float* delta = nullptr;  // of the rows of a softmax, on the CPU
    RowNumbers numbers;      // of the rows of a softmax, on CUDA
    float* zero = nullptr;   // a 0, on CUDA
    // Gradients of queries by the places of a softmax, where an order may name one several times.
    float* by_place = nullptr;
    size_t sums_begin = 0;  // where in the workspace the sums are that are 0 at first
    size_t sums_end = 0;
  };
  // Lays out the workspace of a Backward, without the engines' scratch, and names the gradients of
  // floating tensors: those of f32 inputs are the caller's, others are in the workspace.
  BackwardMemory LayOutBackward(const BackwardCall& call, Workspace* workspace);
  size_t BackwardScratchBytes(int threads) const;
  // Finds the calls that are the first to write what they write of a gradient, and the gradients that
  // such calls write wholly.
  void FindFirstWriters();
  absl::StatusOr<PartBackward> SetUpPart(const Softmax& softmax, size_t part) const;
  absl::Status BackwardOf(size_t softmax, const ConstTensorView& out, const BackwardMemory& memory,
                          const Execution& execution);
  // Fills the numbers of a softmax's rows, and names them in the call.
  absl::Status FindRowNumbers(const Softmax& softmax, const ConstTensorView& out,
                              const BackwardMemory& memory, DType factors, FlashBackwardCall* call,
                              const Execution& execution) const;
  // The FlashBackwardCuda::FactorsOf its parts; f32 where they differ.
  DType FactorsOf(size_t softmax) const;
  ScoreRule RuleOf(const FlashRows& rows, const FlashPart& part) const;
  // Sets a tensor to 0 on the layer's device.
  absl::Status Clear(const TensorView& view, const Execution& execution) const;
  // Returns the share of an input's rows that a Run reads.
  double ShareRead(const TensorSpec& input) const;

  Device device_;
  Describe describe_;
  Fit fit_;
  FlashPlan plan_;
  std::vector<ScoreTerm*> terms_;  // of the plan, each once
  std::vector<Sizes> sizes_;       // of the softmaxes, before long rows are cut
  size_t step_bytes_ = 0;          // of what LayOut takes
  Inputs tensors_;                 // of a Run: the inputs, and the tensors of the steps
  std::vector<KeptTensor> kept_tensors_;
  Outputs kept_, kept_rests_;       // of a Run, by tensor
  std::vector<MarkedList> marked_;  // of the plan's softmaxes
  std::vector<Softmax> softmaxes_;
  std::vector<std::vector<PartBackward>> backward_parts_;  // of softmaxes_
  std::set<std::string> wholly_set_;                       // the gradients that need not be cleared
  Outputs gradients_;                                      // of a Backward, f32, by tensor
  Inputs output_gradients_ = {{"out", {}}, {"log_sum_exp", {}}};  // of a Backward
  ParameterGradients parameter_gradients_;
  size_t backward_bytes_ = 0;  // of what LayOutBackward takes
  bool is_set_up_ = false;
  bool hides_pairs_ = false;  // Setup had an input that hides pairs, or a Run marks queries
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_PLANNED_LAYER_H_
