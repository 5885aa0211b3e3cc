// One layer's attention of Transformer-XL: queries of a segment against the keys of the segment and
// of the tokens before it, scored by content and by distance.
//
//   s_ij = ((q_i + u) . k_j + (q_i + v) . (r_(i-j) W_r)) / sqrt(head_dim)
//   y_i  = concat_heads(sum_j softmax_j(s_ij) v_j) W_o,   q = x W_q, k = x W_k, v = x W_v
//
// Where heads have learned spans z, exp(s_ij) is multiplied by clip((ramp + z - (i - j)) / ramp, 0, 1).
//
// Keys and values of earlier tokens are kept in a ring (core/flash/key_value_cache.h): the authors
// keep hidden states and project them again in every segment, which gives the same numbers for 4
// memory model_dim^2 more FLOPs. Scores: core/layers/attention/relative_positions.h.
//
// Queries, keys and values are fp32 on the CPU; on CUDA they have the problem's dtype, which is
// what tensor cores multiply. Everything else is fp32 between the layer's input and output.
#ifndef TFB_CORE_LAYERS_ATTENTION_RELATIVE_ATTENTION_H_
#define TFB_CORE_LAYERS_ATTENTION_RELATIVE_ATTENTION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/row_list.h"
#include "core/flash/flash.h"
#include "core/flash/flash_engine.h"
#include "core/flash/key_value_cache.h"
#include "core/layers/attention/relative_positions.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/schedule/band_schedule.h"
#include "core/status.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::layers {

// The earlier tokens that a token at position p of a stream sees, where its segment began at s.
struct MemoryReach {
  int64_t memory = 0;        // tokens
  bool same_length = false;  // false: max(0, s - memory) <= j <= p; true: 0 <= p - j < memory
  int64_t max_segment = 1;   // tokens of the longest segment
  int64_t given = 0;         // tokens before the first segment, from an earlier run

  int64_t max_distance() const { return same_length ? memory - 1 : memory + max_segment - 1; }
  // Returns the first token that any token of a segment beginning at s sees.
  int64_t FirstSeen(int64_t s) const {
    const int64_t first = s - memory + (same_length ? 1 : 0);
    return first > 0 ? first : 0;
  }

  // Returns the first token that token p of a stream sees, where the stream is appended in the
  // longest segments. Tokens are counted from the first given one.
  int64_t FirstSeenBy(int64_t p) const {
    return FirstSeen(same_length ? p : given + (p - given) / max_segment * max_segment);
  }
  // Returns the query-key pairs of one head and batch row in a stream of so many tokens, where a
  // token sees at most so many of its keys.
  double Pairs(int64_t tokens, double most = std::numeric_limits<double>::infinity()) const;
  // Numbers of keys and tokens that the tokens of such a stream see, for costs and statistics.
  struct Context {
    double pairs = 0;   // query-key pairs of one head and batch row
    int64_t reach = 0;  // tokens before the last one that can change it, through all layers
  };
  Context ContextOf(int64_t tokens, int64_t layers) const;
};

// The next segment of a stream in the form of a device's engine. All layers share it.
class SegmentView {
 public:
  SegmentView(Device device, const MemoryReach& reach)
      : device_(device), reach_(reach), schedules_(reach.max_segment) {}

  // Sets the queries to tokens begin to begin + tokens - 1 of the stream. It allocates nothing.
  void Set(int64_t begin, int64_t tokens) { Set(begin, tokens, reach_.FirstSeen(begin)); }
  // Does the same for a memory that begins with token `first_seen`.
  void Set(int64_t begin, int64_t tokens, int64_t first_seen);

  int64_t tokens() const { return tokens_; }
  // Keys are counted from the tile of this token on.
  int64_t first_seen() const { return first_seen_; }
  int64_t kv_tokens() const { return kv_tokens_; }
  // Sets the mask of the call: its schedule or its band. It is valid until the next Set.
  void SetMask(FlashCall* call) const {
    call->schedule = schedule_;
    if (schedule_ == nullptr) call->band = &band_;
  }

 private:
  Device device_;
  MemoryReach reach_;
  Band band_;
  BandSchedule schedules_;
  const BlockSchedule* schedule_ = nullptr;  // null on CUDA
  int64_t tokens_ = 0;
  int64_t first_seen_ = 0;
  int64_t kv_tokens_ = 0;
};

// Calls append(rows) for the rows [batch, tokens, channels] of `longest` tokens after the other.
template <class Append>
absl::Status InPieces(const ConstTensorView& rows, int64_t longest, const Append& append) {
  for (int64_t begin = 0; begin < rows.dim(1); begin += longest) {
    TFB_RETURN_IF_ERROR(append(Slice(rows, 1, begin, std::min(longest, rows.dim(1) - begin))));
  }
  return absl::OkStatus();
}

class RelativeAttention {
 public:
  // Views of the layer's parameters, f32: matrices [model_dim, model_dim]; where all heads share
  // one of keys and values, w_k and w_v [model_dim, head_dim].
  struct Parameters {
    ConstTensorView w_q, w_k, w_v, w_o;
    RelativePositions::Parameters positions;
    ConstTensorView span = {};  // [heads], in tokens; empty where heads see all keys
    double span_ramp = 0;
  };

  static Parameters ParametersOf(const NamedTensors& parameters, const StackSizes& sizes,
                                 int64_t layer);

  enum class Queries : uint8_t { kAll, kSome };  // whether the stream uses Append or AppendFor

  // Allocates the memory for the stream's keys and values.
  static absl::StatusOr<RelativeAttention> Create(Device device, const Problem& problem,
                                                  const MemoryReach& reach,
                                                  Queries queries = Queries::kAll);

  // Packs the matrices and projects `sinusoids`, those of the range. All arguments lie in host
  // memory; u, v and spans must stay there. Begins a new stream.
  absl::Status Setup(const Parameters& parameters, const DistanceRange& range,
                     const ConstTensorView& sinusoids, const Execution& execution);

  const Problem& problem() const { return problem_; }
  // Returns the terms that the engine adds to scores, after Setup; the rule points to tables of this
  // object.
  const RelativePositions& positions() const { return positions_; }
  ScoreRule rule() const { return engine_.NewCall().rule; }

  void Reset() { cache_.Clear(); }
  int64_t tokens() const { return cache_.tokens(); }
  size_t cache_bytes() const { return cache_.bytes(); }

  // `rest_bytes` is the memory that the caller of Attend takes from its rest.
  size_t workspace_bytes(int threads, size_t rest_bytes = 0) const;
  // Appends a segment: y = attention(x) W_o + residual, all [batch, segment.tokens(), model_dim] of
  // any dtype in memory of the device; y may be the residual, and x. The segment must be the
  // stream's next. It allocates nothing; on CUDA it enqueues on the stream.
  absl::Status Append(const SegmentView& segment, const ConstTensorView& x,
                      const ConstTensorView& residual, const TensorView& y,
                      const Execution& execution);

  // An Append for some of the segment's tokens, as rows: x, residual and y are [rows, model_dim],
  // and token t of batch row b is row row_of_token[b * tokens + t], or is not computed where that
  // is below 0. All tokens are keys and values, computed from keys_from [batch, tokens, model_dim].
  // This is for the CPU.
  struct SomeQueries {
    ConstTensorView x;
    const int32_t* row_of_token;
  };
  absl::Status AppendFor(const SegmentView& segment, const ConstTensorView& keys_from,
                         const SomeQueries& queries, const ConstTensorView& residual,
                         const TensorView& y, const Execution& execution);
  // Does the same on CUDA, where only the device knows which rows are listed: an Append for the
  // listed rows of x, residual and y, with all tokens' keys and values computed from keys_from. It
  // needs queries kAll.
  absl::Status AppendForListed(const SegmentView& segment, const ConstTensorView& keys_from,
                               const RowList& rows, const ConstTensorView& x,
                               const ConstTensorView& residual, const TensorView& y,
                               const Execution& execution);

  // Appends tokens whose outputs are not asked for: keys and values alone of rows [batch, tokens,
  // model_dim], normalised unless `norm` is null.
  absl::Status Recall(const ConstTensorView& rows, const LayerNorm* norm,
                      const Execution& execution);

  // An Append in two steps, for layers that do something between them. Attend takes memory for its
  // results from the execution's workspace and leaves the rest; they are valid while the caller
  // uses only the rest.
  struct Attended {
    TensorView q, k, v;  // [batch, heads, tokens, head_dim] of the segment
    TensorView heads;    // of the same shape, f32: the weighted values of each head
    TensorView context;  // the same elements as [batch, tokens, model_dim], the input of W_o
    Execution rest;
  };
  // `log_sum_exp`, f32 [batch, heads, tokens] unless empty, becomes that of the scores.
  absl::StatusOr<Attended> Attend(const SegmentView& segment, const ConstTensorView& x,
                                  const Execution& execution, const TensorView& log_sum_exp = {});
  // Replaces the keys and values of the segment that has been appended last by those of x [batch,
  // tokens, model_dim], which later segments see. It needs queries kAll.
  absl::Status Replace(const ConstTensorView& x, const Execution& execution);
  size_t replace_workspace_bytes(int threads) const;
  // y = activation(context W_o) + residual
  absl::Status Project(const ConstTensorView& context, const ConstTensorView& residual,
                       const TensorView& y, const Execution& execution,
                       Activation activation = Activation::kNone) const;

 private:
  RelativeAttention(Device device, const Problem& problem, const MemoryReach& reach,
                    Queries queries)
      : device_(device),
        problem_(problem),
        reach_(reach),
        queries_apart_(queries == Queries::kSome) {}
  // Returns the call of the longest segment.
  Problem LargestCall() const;
  DType projected_dtype() const { return device_ == Device::kCpu ? DType::kF32 : problem_.dtype; }

  struct Scratch {
    TensorView projections;  // [batch, tokens, 3 model_dim]: queries, keys, values
    TensorView context;      // [batch, tokens, model_dim]
  };
  Scratch LayOut(int64_t tokens, Workspace& workspace) const;
  // Computes queries of the listed rows of x, and keys and values of all rows of keys_from.
  absl::Status ProjectSome(const ConstTensorView& keys_from, const ConstTensorView& x,
                           const RowList& rows, const TensorView& projections,
                           const Execution& execution) const;
  absl::StatusOr<Attended> Attend(const SegmentView& segment, const ConstTensorView& keys_from,
                                  const ConstTensorView& x, const RowList& rows,
                                  const TensorView& log_sum_exp, const Execution& execution);
  struct RowScratch {
    TensorView keys_and_values;  // [batch, tokens, 2 model_dim]
    TensorView q;                // [rows, model_dim]
    TensorView context;          // [rows, model_dim]
  };
  RowScratch LayOutRows(int64_t tokens, int64_t rows, Workspace& workspace) const;
  // Computes the attention of the segment's queries, whose keys have been appended, by a call that
  // has q, out and the order of queries.
  absl::Status Attend(const SegmentView& segment, FlashCall call, const Execution& execution) const;

  Device device_;
  Problem problem_;
  MemoryReach reach_;
  bool queries_apart_;
  PackedMatrix projections_;  // W of queries, keys and values side by side; or of keys and values
  PackedMatrix queries_;      // or apart
  PackedMatrix output_;
  RelativePositions positions_;  // the engine's rule points to it
  FlashEngine engine_;
  KeyValueCache cache_;
};

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_ATTENTION_RELATIVE_ATTENTION_H_
