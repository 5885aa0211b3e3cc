// The terms of a score besides the scaled product of query and key. A technique states a term once;
// the engines of all devices read the tables that it makes (core/flash/score_rule.h).
#ifndef TFB_CORE_FLASH_SCORE_TERMS_H_
#define TFB_CORE_FLASH_SCORE_TERMS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/flash/flash.h"
#include "core/flash/flash_backward.h"
#include "core/flash/flash_backward_cuda.h"
#include "core/flash/parameter_gradients.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "core/traced.h"
#include "core/workspace.h"

namespace tfb {

// The tokens begin, begin + 1, ..., end - 1 of a tensor.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

class ScoreTerm {
 public:
  virtual ~ScoreTerm() = default;

  // Makes the tables for the problem of the whole plan. Setup calls it once, also for a term that
  // several parts share.
  virtual absl::Status Build(const Problem& problem, ThreadPool* pool) = 0;
  // Makes the rule read the tables in place.
  virtual void AddTo(ScoreRule* rule) const = 0;
  // Adds to a call over some queries and keys what the term reads of the tensors of a Run.
  virtual void Bind(const Inputs&, const TokenRange& /*queries*/, const TokenRange& /*keys*/,
                    FlashCall*) const {}

  // Returns the FLOPs that the term adds to a pair, and to a query of one head, whatever the number
  // of its keys.
  virtual double FlopsPerPair(const Problem&) const { return 0; }
  virtual double FlopsPerQuery(const Problem&) const { return 0; }
  virtual bool has_relative_keys() const { return false; }  // they need workspace
  // Returns the pairs of all heads and batch rows to which the term left a weight above 0 in the last
  // Run, where the schedule does not tell; on a GPU that Run must be done. Absent before a Run.
  virtual bool decides_pairs() const { return false; }
  virtual std::optional<double> KeptPairs() const { return std::nullopt; }

  // ---- The backward pass ----

  // Returns OK where the term has a backward pass on the device, otherwise Unimplemented with the reason.
  virtual absl::Status CheckBackward(Device) const { return absl::OkStatus(); }
  // Returns what the engine sums for the term.
  virtual ScoreSums sums() const { return {}; }
  // Does the work that need not be repeated, behind Build.
  virtual absl::Status SetUpGradients(Device, const ParameterGradients&) {
    return absl::OkStatus();
  }
  // Takes memory for the sums that the engine makes of the gradients of what the term adds, which are
  // 0 at first. Before Build the sizes are the most that they can be for the problem.
  virtual void LayOutGradients(Device, const Problem&, Workspace*) {}
  // Lets a call add to these sums, and to the gradients of tensors that the term reads, f32, by name.
  virtual void BindGradients(const Outputs& /*tensors*/, ScoreGradients*) const {}
  // Takes the sums on to the parameters, by so many FLOPs, those of products of matrices.
  virtual double GradientFlops(const Problem&) const { return 0; }
  virtual absl::Status AddGradients(const ParameterGradients&, const Execution&) const {
    return absl::OkStatus();
  }
};

// A number for each head and distance p_i - j, which is positive for keys before the query. Here
// p_i = i + kv_tokens - query_tokens is the position of query i among the keys; of a part with an order,
// i and j are places in it, not tokens. Where it depends on
// parameters, these are traced (core/traced.h), for the sake of their gradients.
using OfDistance = std::function<Traced(int64_t head, int64_t distance)>;

// A number for each head and distance, as a table that an engine reads, and the sums of its gradients.
class TracedTable {
 public:
  explicit TracedTable(OfDistance value) : value_(std::move(value)) {}
  void Build(const Problem& problem);
  DistanceEntries entries() const { return table_.entries(); }

  // Takes memory for the sums, one for each head of the queries and offset.
  void LayOutGradients(const Problem& problem, Workspace* workspace);
  float* sums() const { return sums_; }
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients);
  absl::Status AddGradients(const ParameterGradients& gradients, const Execution& execution) const {
    return map_.Add(sums_, gradients.sums(), execution);
  }

 private:
  OfDistance value_;
  Problem problem_;
  DistanceTable table_;
  GradientMap map_;
  float* sums_ = nullptr;  // [query_heads][row]
};

// Adds b_h(p_i - j) to the scores.
class DistanceBias : public ScoreTerm {
 public:
  explicit DistanceBias(OfDistance bias) : table_(std::move(bias)) {}
  absl::Status Build(const Problem& problem, ThreadPool*) override;
  void AddTo(ScoreRule* rule) const override { rule->bias = table_.entries(); }
  double FlopsPerPair(const Problem&) const override { return 1; }

  void LayOutGradients(Device, const Problem& problem, Workspace* workspace) override {
    table_.LayOutGradients(problem, workspace);
  }
  ScoreSums sums() const override { return ScoreSums::OfOffsets(); }
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients) override {
    return table_.SetUpGradients(device, gradients);
  }
  void BindGradients(const Outputs&, ScoreGradients* gradients) const override {
    gradients->bias = table_.sums();
  }
  absl::Status AddGradients(const ParameterGradients& gradients,
                            const Execution& execution) const override {
    return table_.AddGradients(gradients, execution);
  }

 private:
  TracedTable table_;
};

// Replaces the score s_ij by relu(s_ij) f_h(p_i - j). A factor beyond fp32 counts as the largest
// float, so that a product with 0 stays 0.
class ReluMultiplier : public ScoreTerm {
 public:
  explicit ReluMultiplier(OfDistance factor) : table_(std::move(factor)) {}
  absl::Status Build(const Problem& problem, ThreadPool*) override;
  void AddTo(ScoreRule* rule) const override { rule->relu_multiplier = table_.entries(); }
  double FlopsPerPair(const Problem&) const override { return 2; }

  void LayOutGradients(Device, const Problem& problem, Workspace* workspace) override {
    table_.LayOutGradients(problem, workspace);
  }
  ScoreSums sums() const override { return ScoreSums::OfOffsets(); }
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients) override {
    return table_.SetUpGradients(device, gradients);
  }
  void BindGradients(const Outputs&, ScoreGradients* gradients) const override {
    gradients->relu_multiplier = table_.sums();
  }
  absl::Status AddGradients(const ParameterGradients& gradients,
                            const Execution& execution) const override {
    return table_.AddGradients(gradients, execution);
  }

 private:
  TracedTable table_;
};

// The sums of the gradients of relative keys.
class RelativeKeySums {
 public:
  // Takes room for the offsets of `keys`, or of all that the problem can have where these are not
  // known yet.
  void LayOut(const Problem& problem, const RelativeKeys* keys, Workspace* workspace);
  float* data() const { return data_; }  // as ScoreGradients::relative_keys
  // Returns where the sums of a query head and offset are, head_dim floats.
  int64_t PlaceOf(const RelativeKeys& keys, int64_t head, int64_t offset) const {
    return (head * (keys.high() - keys.low() + 1) + offset - keys.low()) * row_;
  }
  const float* Of(const RelativeKeys& keys, int64_t head, int64_t offset) const {
    return data_ + PlaceOf(keys, head, offset);
  }
  int64_t query_heads() const { return query_heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  int64_t query_heads_ = 0;
  int64_t head_dim_ = 0;
  int64_t row_ = 0;
  float* data_ = nullptr;
};

// Adds scale q_i . r_(j-i) to the scores. The keys' gradients are those of the table that they are
// made of, where it is a parameter.
class RelativeKeyTerm : public ScoreTerm {
 public:
  using Make = std::function<absl::StatusOr<RelativeKeys>(ThreadPool*)>;
  // `vectors` is the number of different vectors where a query is multiplied with each of them once
  // instead of once for each pair; else 0.
  explicit RelativeKeyTerm(Make make, int64_t vectors = 0)
      : make_(std::move(make)), vectors_(vectors) {}
  absl::Status Build(const Problem& problem, ThreadPool* pool) override;
  void AddTo(ScoreRule* rule) const override { rule->relative_keys = &keys_; }
  double FlopsPerPair(const Problem& problem) const override {
    return vectors_ > 0 ? 0.0 : 2.0 * static_cast<double>(problem.head_dim);
  }
  double FlopsPerQuery(const Problem& problem) const override {
    return 2.0 * static_cast<double>(vectors_ * problem.head_dim);
  }
  bool has_relative_keys() const override { return true; }

  void LayOutGradients(Device, const Problem& problem, Workspace* workspace) override {
    sums_.LayOut(problem, is_built_ ? &keys_ : nullptr, workspace);
  }
  void BindGradients(const Outputs&, ScoreGradients* gradients) const override {
    gradients->relative_keys = sums_.data();
  }
  ScoreSums sums() const override { return ScoreSums::OfRelativeKeys(); }
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients) override;
  absl::Status AddGradients(const ParameterGradients& gradients,
                            const Execution& execution) const override {
    return map_.Add(sums_.data(), gradients.sums(), execution);
  }

 private:
  Make make_;
  int64_t vectors_ = 0;
  RelativeKeys keys_;
  bool is_built_ = false;
  RelativeKeySums sums_;
  GradientMap map_;
};

// Adds scale (q_i + w) . l + c, with the vector l and the number c of pairs whose tokens have the
// same id, or of those that have not.
class LabelTerm : public ScoreTerm {
 public:
  // `vectors` is f32 [query_heads or 1, 2, head_dim], those of equal ids second; empty stands for
  // zeros, which cost nothing. `biases` is f32 [query_heads or 1, 2] or empty. `ids` names the input
  // i32 [batch, tokens] with the ids of the tokens. The tensors must live as long as the term.
  LabelTerm(const Tensor& vectors, const Tensor* biases, std::string ids);

  absl::Status Build(const Problem& problem, ThreadPool*) override;
  void AddTo(ScoreRule* rule) const override;
  void Bind(const Inputs& inputs, const TokenRange& queries, const TokenRange& keys,
            FlashCall* call) const override;
  double FlopsPerQuery(const Problem& problem) const override {
    return has_vectors_ ? 2.0 * static_cast<double>(2 * problem.head_dim) : 0.0;
  }

  void LayOutGradients(Device, const Problem& problem, Workspace* workspace) override;
  void BindGradients(const Outputs&, ScoreGradients* gradients) const override {
    gradients->label_keys = has_vectors_ ? vector_sums_ : nullptr;
    gradients->label_biases = biases_ != nullptr ? bias_sums_ : nullptr;
  }
  ScoreSums sums() const override { return ScoreSums::OfLabels(); }
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients) override;
  absl::Status AddGradients(const ParameterGradients& gradients,
                            const Execution& execution) const override;

 private:
  bool has_vectors_;
  ConstTensorView parameter_;  // the vectors as they were given
  Tensor vectors_;             // f32
  const Tensor* biases_;
  std::string ids_;
  Shape of_sums_;  // [query_heads, 2, head_dim]
  float* vector_sums_ = nullptr;
  float* bias_sums_ = nullptr;  // [query_heads][2]
  GradientMap vector_map_;
  GradientMap bias_map_;
};

// Multiplies the weight of key j by clip((ramp + z - (p_i - j)) / ramp, 0, 1), with the span z of a
// head, or of a head and query. The pattern leaves out keys of weight 0, or the engine does.
class SpanTerm : public ScoreTerm {
 public:
  SpanTerm(std::vector<Traced> spans, double ramp);  // of the heads
  // The spans are the tensor `name`, f32 [batch, query_heads, query_tokens]; `kept_pairs` is KeptPairs.
  SpanTerm(std::string name, double ramp, std::function<std::optional<double>()> kept_pairs)
      : name_(std::move(name)),
        ramp_(static_cast<float>(ramp)),
        kept_pairs_(std::move(kept_pairs)) {}

  absl::Status Build(const Problem&, ThreadPool*) override { return absl::OkStatus(); }
  void AddTo(ScoreRule* rule) const override;
  void Bind(const Inputs& inputs, const TokenRange& queries, const TokenRange& keys,
            FlashCall* call) const override;
  bool decides_pairs() const override { return kept_pairs_ != nullptr; }
  std::optional<double> KeptPairs() const override { return kept_pairs_(); }

  void LayOutGradients(Device, const Problem& problem, Workspace* workspace) override;
  void BindGradients(const Outputs& tensors, ScoreGradients* gradients) const override;
  absl::Status SetUpGradients(Device device, const ParameterGradients& gradients) override;
  absl::Status AddGradients(const ParameterGradients& gradients,
                            const Execution& execution) const override {
    return name_.empty() ? map_.Add(sums_, gradients.sums(), execution) : absl::OkStatus();
  }

 private:
  std::vector<Traced> traced_;
  std::vector<float> spans_;
  std::string name_;  // empty: spans_
  Shape of_sums_;     // [batch, query_heads, query_tokens]
  float* sums_ = nullptr;
  GradientMap map_;
  float ramp_;
  std::function<std::optional<double>()> kept_pairs_;
};

// Adds a number to the score of a token with itself, where parts have orders, too.
class SelfBias : public ScoreTerm {
 public:
  explicit SelfBias(double bias) : bias_(static_cast<float>(bias)) {}
  absl::Status Build(const Problem&, ThreadPool*) override { return absl::OkStatus(); }
  void AddTo(ScoreRule*) const override {}
  void Bind(const Inputs&, const TokenRange&, const TokenRange&, FlashCall* call) const override {
    call->rule.tokens.self_bias = bias_;
  }

 private:
  float bias_;
};

// Compares codes of queries and keys in the slots of core/flash/score_rule.h's TokenRule: hides the keys
// that slot `own` does not show, if that is not -1, and with `counts` divides a key's weight by the
// number of slots that show it. The codes are tensors of steps, i32 [slots, batch, heads, tokens].
class TokenSlots : public ScoreTerm {
 public:
  TokenSlots(std::string query_codes, std::string key_codes, int64_t own, bool counts)
      : query_codes_(std::move(query_codes)),
        key_codes_(std::move(key_codes)),
        own_(own),
        counts_(counts) {}
  absl::Status Build(const Problem&, ThreadPool*) override { return absl::OkStatus(); }
  void AddTo(ScoreRule*) const override {}
  void Bind(const Inputs& inputs, const TokenRange&, const TokenRange&,
            FlashCall* call) const override;

 private:
  std::string query_codes_;
  std::string key_codes_;
  int64_t own_;
  bool counts_;
};

}  // namespace tfb

#endif  // TFB_CORE_FLASH_SCORE_TERMS_H_
