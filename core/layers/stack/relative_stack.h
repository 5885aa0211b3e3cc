// Stacks whose layers have Transformer-XL's attention and memory.
#ifndef TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_
#define TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/layers/attention/list_attention.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/decoder_block.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_options.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::layers {

struct RelativeStackShape {
  StackSizes sizes;
  int64_t segment = 1;
  int64_t memory = 0;
  bool same_length = false;
  int64_t max_distance = 0;
  int64_t given_memory = 0;
  bool pre_norm = false;     // as in memory/transformer_xl/transformer_xl.h
  bool some_tokens = false;  // whether blocks compute some of a segment's tokens
};

RelativeStackShape ShapeOf(const Problem& problem, const RelativeStackOptions& options,
                           bool pre_norm = false);

// Returns InvalidArgument where the problem or the memory does not fit the technique.
absl::Status CheckRelativeStack(absl::string_view technique, const Problem& problem,
                                const RelativeStackOptions& options);

// Returns the specs of the input `memories`, if some are given, and of the output, if it holds a
// token: [batch, layers, tokens, model_dim], what went into each layer.
std::vector<TensorSpec> GivenMemories(const Problem& problem, const RelativeStackOptions& options);
std::vector<TensorSpec> FinalMemories(const Problem& problem, const RelativeStackOptions& options);
// Returns the specs of out, context and the final memories.
std::vector<TensorSpec> RelativeStackOutputs(const Problem& problem,
                                             const RelativeStackOptions& options);

// The segment of such a stack, and the numbers of all layers together.
class RelativeState : public StackState {
 public:
  // Counts FLOPs of a Run, and of a Backward, that the stack's own numbers do not have.
  struct MoreFlops {
    double of_run = 0;
    double of_backward = 0;
  };
  RelativeState(Device device, const Problem& problem, const RelativeStackShape& shape,
                const MoreFlops& more_flops = {0, 0});

  DistanceRange distances() const override {
    return {0, reach_.max_distance(), shape_.max_distance};
  }
  void Reset() override { next_token_ = reach_.given; }
  void Begin(const Segment& segment) override;
  std::optional<double> flops(const NamedTensors& parameters) const override;
  // reach_tokens: earlier tokens that can change the last one, through all layers. keys_per_token:
  // the keys that a token sees in one layer and head, on average, itself included. mean_span: the
  // mean span of the heads that have one, in tokens.
  std::map<std::string, double> statistics(const NamedTensors& parameters) const override;

  Device device() const { return device_; }
  const Problem& problem() const { return problem_; }
  const RelativeStackShape& shape() const { return shape_; }
  const StackSizes& sizes() const { return shape_.sizes; }
  const MemoryReach& reach() const { return reach_; }
  const SegmentView& segment() const { return segment_; }
  // Returns the position of the segment's first token, counted from the first that is not given.
  int64_t first_position() const { return next_token_ - segment_.tokens() - reach_.given; }
  LayerOfStack layer(int64_t n) const {
    return {device_, sizes(), problem_.batch, reach_.max_segment, n};
  }

  // ---- The backward pass ----

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  void SetUpBackward() override { lists_.Build(); }
  // Returns the rows before their own that a Run's segments read in one layer, of all batch rows.
  double earlier_rows() const;
  // Returns the distances of the pairs in one layer, in the mean of all layers.
  double distances_seen(const NamedTensors& parameters) const;
  // Returns the FLOPs of computing all segments once more, with keys and values of the tokens before
  // them that they see, and of the gradients.
  std::optional<double> backward_flops(const NamedTensors& parameters) const override;
  // Returns the first token that a segment of a Run sees, counted from the first given one.
  int64_t FirstSeen(const PastSegment& segment) const {
    return reach_.FirstSeen(reach_.given + segment.begin);
  }
  // The lists of tokens from there to the ends of segments.
  const ListSchedules& lists() const { return lists_; }
  const ListSchedules::List& ListOf(const PastSegment& segment) const {
    return lists_.Of(segment.tokens,
                     reach_.given + segment.begin + segment.tokens - FirstSeen(segment));
  }

 private:
  // Returns the context of a sequence; pairs of a head are those of the mean head.
  MemoryReach::Context ContextOfSequence(const NamedTensors& parameters) const;
  std::vector<float> Spans(const NamedTensors& parameters) const;

  Device device_;
  Problem problem_;
  RelativeStackShape shape_;
  MoreFlops more_flops_;
  MemoryReach reach_;
  SegmentView segment_;
  ListSchedules lists_;
  int64_t next_token_ = 0;  // of the stream, from the first given one
};

// Transformer-XL's attention of one layer: core/layers/attention/relative_attention.h in a stack.
class TransformerXlAttention : public SegmentAttention {
 public:
  // The state outlives it. `kv_heads`: of keys and values; 1 where all heads share them.
  TransformerXlAttention(const RelativeState& state, int64_t n, int64_t kv_heads,
                         RelativeAttention own);

  absl::Status Setup(const NamedTensors& parameters, const Distances& distances,
                     const Execution& execution) override;
  void Reset() override { own_.Reset(); }
  absl::Status Recall(const Inputs& given, const LayerNorm* norm,
                      const Execution& execution) override;
  absl::Status Run(const Call& call, const Execution& execution) override;
  size_t workspace_bytes(int threads) const override;
  // cache_bytes: keys and values.
  std::map<std::string, double> statistics() const override {
    return {{"cache_bytes", static_cast<double>(own_.cache_bytes())}};
  }

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  absl::Status SetUpBackward(const NamedTensors& parameters, const Distances& distances) override;
  size_t sums_bytes() const override { return past_.sums_bytes(); }
  size_t again_bytes() const override { return past_.memory_bytes(state_->lists()); }
  size_t backward_workspace_bytes(int threads) const override;
  absl::Status RunAgain(const AgainCall& call, const Execution& execution) override;
  absl::Status Backward(const BackwardCall& call, const Execution& execution) override;

  // For attentions and blocks that do more with it.
  RelativeAttention& own() { return own_; }
  const RelativeAttention& own() const { return own_; }
  const SegmentView& segment() const { return state_->segment(); }
  Device device() const { return state_->device(); }

  // The layer's inputs for the tokens that a segment sees before its own: given ones, and those of
  // the Run.
  class EarlierTokens {
   public:
    EarlierTokens(const RelativeState& state, int64_t n, const PastSegment& segment);
    operator absl::Span<const ConstTensorView>() const {  // NOLINT: it is one
      return absl::MakeConstSpan(parts_).subspan(0, count_);
    }

   private:
    std::array<ConstTensorView, 2> parts_;
    size_t count_ = 0;
  };
  // Attentions that do more get the list of a segment, and the places of its gradients.
  ListAttention& past() { return past_; }
  const ListAttention& past() const { return past_; }
  EarlierTokens EarlierThan(const PastSegment& segment) const { return {*state_, n_, segment}; }
  // `row_of_token` and `rows`: see AgainCall.
  ListAttention::Call ListOf(const PastSegment& segment, const EarlierTokens& earlier,
                             const LayerNorm* norm, const ConstTensorView& x,
                             const int32_t* row_of_token = nullptr, const RowList& rows = {}) const;
  // `rows`: see ListAttention::LayOut.
  ListAttention::Memory MemoryOf(const PastSegment& segment, absl::Span<std::byte> again,
                                 std::optional<int64_t> rows = std::nullopt) const;
  ListAttention::Gradients GradientsOf(const BackwardCall& call) const {
    return {names_,
            call.segment.parameter_gradients,
            call.gamma,
            call.beta,
            call.segment.sums,
            call.segment.is_last()};
  }

 private:
  const RelativeState* state_;
  int64_t n_;
  RelativeAttention own_;
  ListAttention past_;
  ListAttention::Names names_;
};

// Makes layer n with this attention.
using MakeBlock = std::function<absl::StatusOr<std::unique_ptr<Block>>(
    const LayerOfStack& layer, std::unique_ptr<TransformerXlAttention> attention)>;

// Draws the parameters, allocates the attentions' memory, and makes the layer. The caller sets the
// tensors of `stack`, its state, of which `shared` is a part or all, and depends_on_split where the
// result depends on the split even with same_length.
absl::StatusOr<std::unique_ptr<Layer>> MakeRelativeStack(
    SegmentedStack stack, const RelativeState& shared, const std::vector<ParameterSpec>& parameters,
    uint64_t seed, const MakeBlock& make);

}  // namespace tfb::layers

#endif  // TFB_CORE_LAYERS_STACK_RELATIVE_STACK_H_
