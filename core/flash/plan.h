// What engine flash computes for a technique, as data: softmaxes, of parts, of score terms.
//
// A plan says which queries see which keys of which tensors, and with what terms besides the
// product of the two. PlannedLayer does the rest on every device: it builds schedules and tables,
// merges parts, gathers orders, cuts long rows, and lays out the workspace. Dense attention is
//
//   return FlashPlan(problem);
//
// and a sliding window with a bias
//
//   return FlashPlan(problem).Sees(BandPattern(-window, 0)).Add<DistanceBias>(
//       [=](int64_t h, int64_t distance) { ... });
//
// Where a query's keys are best reached in several ways, or lie in several tensors, each way is a
// part of one softmax (see flash_parts.h). Where queries differ in more than their keys, as rows
// that have tensors of their own do, they are another softmax: AddRows. Functions of a plan return
// it, so that they can be chained.
#ifndef TFB_CORE_FLASH_PLAN_H_
#define TFB_CORE_FLASH_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/flash/parameter_gradients.h"
#include "core/flash/score_terms.h"
#include "core/problem.h"
#include "core/schedule/pattern.h"
#include "core/technique.h"
#include "core/workspace.h"

namespace tfb {

// The token of each place: `orders` lists of equal length one after the other, one for all heads or
// one for each key-value head; or a tensor of such lists that a step makes. Neither: place n is
// token n.
struct PlaceOrder {
  std::vector<int32_t> tokens;
  int64_t orders = 1;
  std::string tensor = "";  // of i32 [batch, key-value heads or 1, places or more]; empty: none
  int64_t tensor_places = 0;

  bool empty() const { return tokens.empty() && tensor.empty(); }
  int64_t places() const {
    return tensor.empty() ? static_cast<int64_t>(tokens.size()) / orders : tensor_places;
  }
};

// A computation that runs before the softmaxes and makes tensors that their parts and terms name,
// such as rotated queries, or that works behind them on tensors that they write.
class FlashStep {
 public:
  virtual ~FlashStep() = default;
  // Does the work that need not be repeated while the inputs' sizes and the parameters stay. It may
  // allocate.
  virtual absl::Status Setup(Device, const Inputs&, const Execution&) { return absl::OkStatus(); }
  // Takes memory for the step's tensors, which only Run fills, and adds them to the named ones.
  // Names are other ones than the inputs'.
  virtual void LayOut(Workspace* workspace, Inputs* tensors) = 0;
  // Returns the bytes that Run needs besides, as the execution's workspace.
  virtual size_t workspace_bytes(Device, int /*threads*/) const { return 0; }
  // Makes the tensors, and writes those of the layer's outputs that the softmaxes do not. It
  // allocates nothing and, on a GPU, does not synchronise.
  virtual absl::Status Run(const Inputs& tensors, const Outputs& outputs,
                           const Execution& execution) = 0;
  // Does what comes behind the softmaxes of a Run, under the same conditions. What these wrote to
  // tensors of steps is in `tensors`, and not always where LayOut put it: a Run may keep it.
  virtual absl::Status Finish(const Inputs& /*tensors*/, const Outputs&, const Execution&) {
    return absl::OkStatus();
  }

  virtual double flops() const { return 0; }
  virtual std::map<std::string, double> statistics() const { return {}; }

  // ---- The backward pass ----

  // Returns those of the step's tensors that a Run keeps for Backward: Run makes these where `tensors`
  // has them, without strides, which is not always where LayOut put them. It pays where they are small
  // and take long to make.
  virtual std::vector<std::string> kept_tensors() const { return {}; }
  // Makes those that are not kept again, in a Backward.
  virtual absl::Status RunAgain(const Inputs& tensors, const Execution& execution) {
    return Run(tensors, Outputs(), execution);
  }

  // Returns OK where the step's tensors are no functions of floating inputs or parameters, or where
  // Backward takes their gradients on to these on the device; otherwise Unimplemented with the reason.
  virtual absl::Status CheckBackward(Device) const {
    return absl::UnimplementedError("a step of the technique has no backward pass");
  }
  // Returns the parameters whose gradients Backward writes itself, every element, to
  // ParameterGradients::Output: large ones, whose sums in float64 would take more time than what is
  // summed.
  virtual std::vector<std::string> written_gradients() const { return {}; }
  // Returns the bytes that FinishBackward and Backward need, each as the execution's workspace.
  virtual size_t backward_workspace_bytes(Device, int /*threads*/) const { return 0; }
  // Returns the work of a backward pass: by default, what a Run computes again, and the gradients
  // of both operands of its products.
  virtual double backward_flops() const { return 3 * flops(); }
  // Returns whether FinishBackward adds to gradients of tensors that softmaxes read as queries, keys or
  // values, so that softmaxes are not the first to do so.
  virtual bool adds_before_softmaxes() const { return false; }
  // Takes the gradients of the outputs that Finish writes on to those of what it reads, as Backward
  // does, before the softmaxes' backward passes. An output's gradient is given, if of zeros, or,
  // that of log_sum_exp, empty.
  virtual absl::Status FinishBackward(const Inputs& /*tensors*/, const Inputs& /*output_gradients*/,
                                      const Outputs& /*gradients*/, const ParameterGradients&,
                                      const Execution&) {
    return absl::OkStatus();
  }
  // The step's tensors are as Run made them. `gradients` has, f32 and by name, those of the floating
  // tensors of this and later steps, and of the layer's inputs, to which it adds; one of these that is
  // empty is not wanted. Called behind the softmaxes' backward passes, for the last step first.
  virtual absl::Status Backward(const Inputs& /*tensors*/, const Outputs& /*gradients*/,
                                const ParameterGradients&, const Execution&) {
    return absl::OkStatus();
  }
};

// An input u8 that hides pairs where it is 0: [batch, queries, keys] of the part, or a band of it,
// [batch, queries, high - low + 1], that holds keys j with low <= j - i <= high.
struct MaskInput {
  std::string name;  // empty: none
  bool is_band = false;
  int64_t low = 0;
  int64_t high = 0;
};

// Queries and keys that one pattern and one set of terms describe.
struct FlashPart {
  std::string q = "q";
  std::string k = "k";
  std::string v = "v";
  TokenRange keys;         // of k, v and the key mask
  PlaceOrder query_order;  // of the softmax's queries
  PlaceOrder key_order;    // of `keys`
  // Query i sees keys j <= i + kv_tokens - query_tokens alone. Where a tensor orders places or
  // marks queries, i and j are tokens nevertheless, and there are as many queries as keys.
  bool causal = false;
  std::string key_mask = "key_mask";
  std::shared_ptr<const Pattern> pattern;  // over places; null: every query sees every key
  std::vector<std::shared_ptr<ScoreTerm>> terms;
  MaskInput mask;

  bool has_relative_keys() const;
  // Returns which places of queries see which of keys, but for the causal mask.
  std::shared_ptr<const Pattern> seen() const;
  // Returns what a backward pass on CUDA sums.
  ScoreSums sums() const;
  bool has_tensor_order() const { return !query_order.tensor.empty() || !key_order.tensor.empty(); }
};

// The queries that a tensor of a step marks with 1, u8 [batch, query_tokens] without strides,
// aligned to 16 bytes: `least` to `most` of each sequence.
struct MarkedQueries {
  std::string tensor;  // empty: none
  int64_t least = 0;
  int64_t most = 0;
};

// Queries and the parts of their softmax.
struct FlashRows {
  TokenRange queries;         // of q and what is written
  TokenRange heads;           // query heads; keys and values are those of the same groups
  double scale = 0;           // 0: 1 / sqrt(head_dim)
  DType dtype = DType::kF32;  // whose precision the products have
  MarkedQueries marked;       // these queries alone
  // What is written: outputs, or tensors of a step that are so named. A step's have no strides and
  // are f32; one that Finish reads has a gradient, for which its softmax writes a log-sum-exp.
  std::string out = "out";
  std::string log_sum_exp = "log_sum_exp";
  bool out_by_place = false;  // their rows are the places of the query order, not its tokens
  // At least one. Where there are several, their query orders have every query once; the order of a
  // single part may list some of the queries. Marked queries have one part, without order or
  // pattern.
  std::vector<FlashPart> parts;
};

class FlashPlan {
 public:
  // A plan whose softmax is over all queries, with one part: all keys, and the causal mask where
  // the problem has one. `scale` 0 means 1 / sqrt(head_dim).
  explicit FlashPlan(const Problem& problem, double scale = 0);
  // A plan without any queries, to which AddRows adds some.
  static FlashPlan Empty(const Problem& problem);

  // Add a part to the last softmax, of all keys or of some, without a causal mask.
  FlashPlan& AddPart();
  FlashPlan& AddPart(const TokenRange& keys);
  // Add a softmax over some queries of all heads, which has no part yet, or one of all keys.
  FlashPlan& AddRows(const TokenRange& queries);
  FlashPlan& AddRows(std::vector<int32_t> queries);
  // Adds a softmax, of all keys, over the queries that a step marks in each Run. Its cost is that
  // of the marked queries, whose number the host does not learn.
  FlashPlan& AddMarkedRows(const MarkedQueries& queries);
  // Change the softmax that was added last. Tensors of steps may have its heads alone. Heads are whole
  // groups of query heads: those of some key-value heads.
  FlashPlan& Heads(const TokenRange& heads);
  FlashPlan& Scale(double scale);
  FlashPlan& Precision(DType dtype);  // the problem's, if not another
  FlashPlan& Writes(std::string out, std::string log_sum_exp, bool by_place = false);

  // Change the part that was added last. The pattern contains the causal mask where the part has an
  // order: its places are no tokens. Orders by a tensor know the tokens, so that they may be
  // Causal.
  FlashPlan& Tensors(std::string q, std::string k, std::string v);
  template <class PatternT>
  FlashPlan& Sees(PatternT&& pattern) {
    part().pattern = std::make_shared<std::decay_t<PatternT>>(std::forward<PatternT>(pattern));
    return *this;
  }
  FlashPlan& QueryOrder(std::vector<int32_t> tokens, int64_t orders = 1);
  FlashPlan& KeyOrder(std::vector<int32_t> tokens, int64_t orders = 1);
  FlashPlan& Order(const std::vector<int32_t>& tokens, int64_t orders = 1) {
    return QueryOrder(tokens, orders).KeyOrder(tokens, orders);
  }
  FlashPlan& QueryOrder(std::string tensor, int64_t places);
  FlashPlan& KeyOrder(std::string tensor, int64_t places);
  FlashPlan& Causal();  // gives the part the causal mask where the problem has one
  // Replaces the input key_mask by a tensor that may be empty. Neither is counted in cost().
  FlashPlan& KeyMask(std::string tensor);
  template <class Term, class... Arguments>
  FlashPlan& Add(Arguments&&... arguments) {
    return Share(std::make_shared<Term>(std::forward<Arguments>(arguments)...));
  }
  // Adds a term that other parts have, too: its tables are made once.
  FlashPlan& Share(std::shared_ptr<ScoreTerm> term);
  FlashPlan& HidePairs(MaskInput mask);

  // Add a step, which runs after those before it.
  template <class Step, class... Arguments>
  FlashPlan& AddStep(Arguments&&... arguments) {
    return ShareStep(std::make_shared<Step>(std::forward<Arguments>(arguments)...));
  }
  FlashPlan& ShareStep(std::shared_ptr<FlashStep> step);
  // Says why the backward pass does not differentiate through an input or a parameter of floating
  // dtype: one that only chooses which queries see which keys, say.
  FlashPlan& StopGradient(std::string name, std::string reason);
  const std::vector<std::shared_ptr<FlashStep>>& steps() const { return steps_; }

  const std::map<std::string, std::string>& stopped_gradients() const { return stopped_gradients_; }

  const Problem& problem() const { return problem_; }
  const std::vector<FlashRows>& rows() const { return rows_; }
  std::vector<FlashRows>& rows() { return rows_; }

  // Returns the part's problem for the engine: its numbers of places. Of marked queries there are
  // the most on the CPU, which lists them, and all on CUDA, which passes over others.
  Problem ProblemOf(const FlashRows& rows, const FlashPart& part, Device device) const;

 private:
  FlashPart& part() { return rows_.back().parts.back(); }

  Problem problem_;
  double scale_;
  std::vector<std::shared_ptr<FlashStep>> steps_;
  std::map<std::string, std::string> stopped_gradients_;  // the reasons, by name
  std::vector<FlashRows> rows_;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_PLAN_H_
