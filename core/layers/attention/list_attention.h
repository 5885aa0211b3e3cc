// Transformer-XL's attention of a segment over a list of rows, and its backward pass.
//
// RelativeAttention has its earlier keys and values in the ring of a stream, which goes on. A backward
// pass comes later, and makes them again of the rows that they come from: e, the earlier ones, which
// may be a memory's or compressed, and x, the segment's own.
//
//   l = [e; x],  q = x W_q,  k = l W_k,  v = l W_v
//   c_p = concat_heads(sum_j softmax_j(s_pj) v_j),  y = c W_o        s as in relative_attention.h
//
// Distances are those of places in the list. The backward pass, with dy = dL/dy and the gradients dq,
// dk, dv, dr_d of core/flash/flash_backward.h for dc:
//
//   dc = dy W_o^T,  dW_o = c^T dy,  dW_q = x^T dq,  dW_k = l^T dk,  dW_v = l^T dv
//   dx = dq W_q^T + dk W_k^T + dv W_v^T,  dW_r = sum_d r_d^T dr_d
//
// (the chain rule). e is constant, as section 3.2 of arXiv:1901.02860v3 has it, so that dk and dv of
// its rows reach the matrices alone; and the scale and shift of a layer norm that e is normalised
// with, which is a part of the layer. Sums over segments are fp32, in the order of the calls.
//
// Where some of the segment's tokens are computed, q, c, y and their gradients have the rows of these
// alone on the CPU. On CUDA only the device knows which they are (core/cuda/row_list.h): tensors have
// the rows of all tokens, of which the listed ones are read and written. All tokens are keys and
// values, so that dx is of all of them.
//
// Arithmetic is fp32 on every device. On CUDA each list has a schedule of its own there, and the bits do
// not depend on the order in which blocks run.
#ifndef TFB_CORE_LAYERS_ATTENTION_LIST_ATTENTION_H_
#define TFB_CORE_LAYERS_ATTENTION_LIST_ATTENTION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/cuda/row_list.h"
#include "core/cuda/run_sums.h"
#include "core/flash/flash_backward.h"
#include "core/flash/flash_backward_cuda.h"
#include "core/flash/score_rule.h"
#include "core/layers/activation.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/attention/relative_positions.h"
#include "core/layers/heads.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/schedule/block_schedule.h"
#include "core/schedule/transposed_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::layers {

// The schedules of a Run's segments, forwards and by keys: token i of a segment is row keys - tokens
// + i of its list, and sees the rows up to itself.
class ListSchedules {
 public:
  struct List {
    int64_t tokens;
    int64_t keys;
    Band band = {};
    BlockSchedule schedule = {};
    TransposedSchedule by_keys = {};
  };

  // `most`: the rows that a token sees at most, itself among them; 0: there is no limit.
  explicit ListSchedules(int64_t most = 0) : most_(most) {}
  // Returns schedules of lists that tokens are no part of, and all rows of which they see.
  static ListSchedules OfOthers() { return ListSchedules(kOfOthers); }
  void Add(int64_t tokens, int64_t keys) {
    lists_.emplace(std::pair(tokens, keys), List{tokens, keys});
  }
  // Makes the schedules of all lists. It allocates.
  void Build();
  // Returns a list that was added.
  const List& Of(int64_t tokens, int64_t keys) const { return lists_.at({tokens, keys}); }

  int64_t longest_segment() const;
  int64_t longest() const;  // rows
  auto begin() const { return lists_.begin(); }
  auto end() const { return lists_.end(); }
  // Returns the largest of of_list(tokens, keys).
  template <class OfList>
  size_t Largest(const OfList& of_list) const {
    size_t largest = 0;
    for (const auto& [sizes, list] : lists_) {
      largest = std::max(largest, static_cast<size_t>(of_list(list.tokens, list.keys)));
    }
    return largest;
  }

 private:
  static constexpr int64_t kOfOthers = -1;

  int64_t most_;
  std::map<std::pair<int64_t, int64_t>, List> lists_;
};

// Engine flash on lists of rows, in fp32 on every device.
class ListEngine {
 public:
  ListEngine() = default;
  // Takes the problem's batch, heads and channels.
  ListEngine(Device device, const Problem& problem);

  // Copies to a CUDA device what calls with the lists, which have been built, read there: schedules, and
  // the rule's tables, which lie in host memory, that of its spans included.
  absl::Status SetUp(const ListSchedules& lists, const ScoreRule& rule);

  Problem ProblemOf(int64_t tokens, int64_t keys) const;
  // Takes a number for each head of the queries, f32 [batch, heads, tokens]; where `rows` are some of all
  // tokens, [batch, heads, rows], which batch rows share.
  TensorView TakeNumbers(int64_t tokens, std::optional<int64_t> rows, Workspace& workspace) const;

  // Return the workspace of calls with any of the lists.
  size_t workspace_bytes(const ListSchedules& lists, bool relative_keys, int threads) const;
  size_t backward_workspace_bytes(const ListSchedules& lists, bool relative_keys,
                                  int threads) const;
  // Runs a call, which on the CPU has the list's schedule and the rule. It allocates nothing.
  absl::Status Run(const ListSchedules::List& list, const FlashCall& call,
                   const Execution& execution) const;

  // A backward pass reads these numbers of an output's rows.
  struct RowScratch {
    TensorView delta;    // on the CPU, as TakeNumbers
    RowNumbers numbers;  // on CUDA
  };
  RowScratch LayOutRows(int64_t tokens, std::optional<int64_t> rows, Workspace& workspace) const;
  // Adds the gradients of a call without these. The gradient of the log-sum-exp may be empty. It
  // allocates nothing.
  absl::Status Backward(const ListSchedules::List& list, FlashBackwardCall call,
                        const ConstTensorView& log_sum_exp_gradient, const RowScratch& rows,
                        const Execution& execution) const;

 private:
  const FlashBackwardCuda& OnDevice(const ListSchedules::List& list) const {
    return on_device_.at({list.tokens, list.keys});
  }

  Device device_ = Device::kCpu;
  Problem problem_;
  std::map<std::pair<int64_t, int64_t>, FlashBackwardCuda> on_device_;  // by tokens and keys
};

class ListAttention {
 public:
  // The names of the parameters.
  struct Names {
    Names(const StackSizes& sizes, int64_t layer);
    std::string w_q, w_k, w_v, w_o, w_r, u, v, span, relative_keys;
  };

  ListAttention() = default;
  // Takes batch, heads and head_dim of the problem; kv_heads may be 1. `normalizes_earlier`: whether
  // calls have a norm.
  ListAttention(Device device, const Problem& problem, const DistanceRange& range,
                bool normalizes_earlier);

  // Packs the matrices, as they are and transposed, and on CUDA what calls with these lists, which have
  // been built, read. The rule's and positions' tables, the sinusoids of the range and the spans must
  // outlive the calls.
  absl::Status SetUp(const RelativeAttention::Parameters& parameters, const ScoreRule& rule,
                     const RelativePositions& positions, const ConstTensorView& sinusoids,
                     const ListSchedules& lists);

  // Tensors that Attend leaves for Backward, f32. Of some tokens, q and context are [rows, model_dim],
  // and all batch rows share the rows of log_sum_exp.
  struct Memory {
    TensorView list;              // [batch, keys, model_dim]
    TensorView q;                 // [batch, tokens, model_dim]
    TensorView keys_values;       // [batch, keys, 2 kv_heads head_dim]
    TensorView context;           // [batch, tokens, model_dim], the input of W_o
    TensorView log_sum_exp;       // [batch, heads, tokens], of the scores
    TensorView log_sum_exp_rest;  // on CUDA: what rounding took from it
  };
  // `rows`: those of some of the tokens; none: all tokens are computed.
  Memory LayOut(int64_t tokens, int64_t keys, Workspace& workspace,
                std::optional<int64_t> rows = std::nullopt) const;
  size_t memory_bytes(const ListSchedules& lists) const;
  size_t workspace_bytes(const ListSchedules& lists, int threads) const;

  struct Call {
    const ListSchedules::List& list;
    absl::Span<const ConstTensorView> earlier;  // e in parts, [batch, rows, model_dim] each
    const LayerNorm* norm;                      // of e; null where e is read as it is
    // [batch, tokens, model_dim]. Where some tokens are computed, it is read with the norm, as e is.
    ConstTensorView x;
    // The tokens that are computed, normalised already; with a null pointer, they are those of x.
    RelativeAttention::SomeQueries some = {};
    // On CUDA: the rows of x that are computed.
    RowList rows = {};

    bool computes_some() const { return some.row_of_token != nullptr; }
  };
  // Computes the context. It allocates nothing, as all of these.
  absl::Status Attend(const Call& call, const Memory& memory, const Execution& execution) const;
  // y = activation(context W_o) + residual
  absl::Status Project(const ConstTensorView& context, const ConstTensorView& residual,
                       const TensorView& y, const Execution& execution,
                       Activation activation = Activation::kNone, const RowList& rows = {}) const;

  // ---- The backward pass ----

  // Memory for sums over a layer's segments, which is 0 before the first Backward of a layer.
  size_t sums_bytes() const;
  size_t backward_workspace_bytes(const ListSchedules& lists, int threads) const;

  // Gradients of parameters are added to.
  struct Gradients {
    const Names& names;
    const Outputs& parameters;
    TensorView gamma, beta;  // of the norm
    absl::Span<std::byte> sums;
    bool is_last;  // whether no further segment follows: the sums are then added to the gradients
  };
  // Adds dW_o, and computes dc, [batch, tokens, model_dim]. Rows of dy beside a list are not read.
  absl::Status ProjectBackward(const ConstTensorView& context, const ConstTensorView& dy,
                               const TensorView& context_gradient, const Gradients& gradients,
                               const Execution& execution, const RowList& rows = {}) const;
  struct BackwardCall {
    ConstTensorView context_gradient;      // dc
    ConstTensorView log_sum_exp_gradient;  // of Memory's shape, or empty
    ConstTensorView q_gradient;            // more of dq, of q's shape, or empty
    ConstTensorView added;                 // a summand of dx, or empty
    TensorView dx;  // [batch, tokens, model_dim], of the list's own rows; may be the summand
  };
  absl::Status Backward(const Call& forward, const Memory& memory, const BackwardCall& call,
                        const Gradients& gradients, const Execution& execution) const;
  // Does both, where W_o's input is the context.
  struct OutputBackwardCall {
    ConstTensorView dy;
    ConstTensorView added;
    TensorView dx;
  };
  absl::Status BackwardOfOutput(const Call& forward, const Memory& memory,
                                const OutputBackwardCall& call, const Gradients& gradients,
                                const Execution& execution) const;

 private:
  struct Scratch {
    TensorView q, keys_values;  // gradients, of Memory's shapes
    ListEngine::RowScratch rows;
    TensorView span;     // [batch, heads, tokens]
    TensorView earlier;  // of the rows of e as they are read
  };
  Scratch LayOutBackward(int64_t tokens, int64_t keys, std::optional<int64_t> rows,
                         Workspace& workspace) const;
  struct Sums {
    RelativePositionGradients positions;             // on the CPU
    DevicePositionGradients::Sums device_positions;  // on CUDA
    double* span;                                    // [heads]
  };
  Sums LayOutSums(Workspace& workspace) const;
  // Returns a problem with as many offsets as there are distances, for which sums are laid out.
  Problem ProblemOfDistances() const {
    return engine_.ProblemOf(1, range_.last - range_.first + 1);
  }
  FlashCall FlashOf(const Call& call, const Memory& memory) const;
  TensorView Take(int64_t rows, int64_t channels, Workspace& workspace) const;
  // Takes [rows, model_dim] of some tokens, or [batch, tokens, model_dim].
  TensorView TakeQueries(int64_t tokens, std::optional<int64_t> rows, Workspace& workspace) const;
  static std::optional<int64_t> RowsOfSome(const Call& call) {
    return call.computes_some() ? std::optional<int64_t>(call.some.x.dim(0)) : std::nullopt;
  }
  // Returns the heads of queries, or of what has their shape.
  template <class View>
  View HeadsOf(const View& queries) const {
    return queries.rank == 2 ? SharedHeads(queries, problem_.batch, problem_.query_heads)
                             : Heads(queries, problem_.query_heads);
  }
  int64_t kv_width() const { return problem_.kv_heads * problem_.head_dim; }
  absl::Status AttentionBackward(const Call& forward, const Memory& memory,
                                 const BackwardCall& call, const Scratch& scratch, const Sums& sums,
                                 const Execution& execution) const;
  // Computes the summand of dx that the queries give it, with `added`.
  absl::Status QueriesBackward(const Call& forward, const Memory& memory, const BackwardCall& call,
                               const Scratch& scratch, const Execution& execution) const;
  SumShape ShapeOfSpanSums(int64_t tokens) const {
    return {problem_.query_heads, 1, problem_.batch * tokens};
  }
  absl::Status AddSpanSums(const Scratch& scratch, int64_t tokens, const Sums& sums,
                           const Execution& execution) const;
  absl::Status EarlierBackward(const Call& forward, const Scratch& scratch,
                               const Gradients& gradients, const Execution& execution) const;
  absl::Status AddSums(const Sums& sums, const Gradients& gradients,
                       const Execution& execution) const;

  Device device_ = Device::kCpu;
  Problem problem_;
  ListEngine engine_;
  DistanceRange range_;
  bool normalizes_earlier_ = false;
  PackedMatrix queries_, keys_values_, output_;
  PackedMatrix queries_transposed_, keys_values_transposed_, output_transposed_;
  ScoreRule rule_;
  bool has_span_ = false;
  const RelativePositions* positions_ = nullptr;
  RelativeKeyVectors distances_;  // on the CPU
  DevicePositionGradients device_positions_;
  ConstTensorView sinusoids_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_LIST_ATTENTION_H_
