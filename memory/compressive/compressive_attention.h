// One layer's attention with two memories, and its treatment of the rows that leave the first.
//
// Keys and values of tokens are kept in a ring, as in core/layers/attention/relative_attention.h, and
// those of compressed rows in another: both are projected once. The two are calls of one engine, which
// differ in where the queries stand among the keys, and their outputs are merged by log-sum-exp. The
// rows themselves, as they enter the layer, are kept until they are compressed.
#ifndef TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_ATTENTION_H_
#define TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_ATTENTION_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_engine.h"
#include "core/flash/key_value_cache.h"
#include "core/layers/attention/list_attention.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/problem.h"
#include "core/schedule/band_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/compressive/compression.h"
#include "memory/compressive/compressive.h"
#include "memory/compressive/loss_gradients.h"
#include "memory/compressive/memory_queues.h"
#include "memory/compressive/row_operations.h"

namespace tfb::compressive {

// The mask of queries that all see a run of keys in a cache, in the form of a device's engine.
class RunView {
 public:
  RunView(Device device, int64_t max_queries) : device_(device), schedules_(max_queries) {}

  // Sets the keys first, ..., first + count - 1 of the cache. It allocates nothing.
  void Set(int64_t first, int64_t count, int64_t queries);

  int64_t first() const { return first_; }
  int64_t count() const { return count_; }
  int64_t kv_tokens() const { return kv_tokens_; }  // number of keys from the first one's tile on
  int64_t skipped() const { return kv_tokens_ - count_; }
  // Sets the mask of the call. It is valid until the next Set.
  void SetMask(FlashCall* call) const {
    call->schedule = schedule_;
    if (schedule_ == nullptr) call->band = &band_;
  }

 private:
  Device device_;
  Band band_;
  BandSchedule schedules_;
  const BlockSchedule* schedule_ = nullptr;  // null on CUDA
  int64_t first_ = 0;
  int64_t count_ = 0;
  int64_t kv_tokens_ = 0;
};

// Attention by content alone, for the loss of that name.
class ContentAttention {
 public:
  // Creates it for up to so many queries and keys.
  static absl::StatusOr<ContentAttention> Create(Device device, const Problem& problem,
                                                 int64_t queries, int64_t keys);
  size_t workspace_bytes(int threads) const;
  // Attends with q to all of k and v, [batch, heads, tokens, head_dim] each. It allocates nothing.
  absl::Status Run(const TensorView& q, const TensorView& k, const TensorView& v,
                   const TensorView& out, const Execution& execution);

 private:
  ContentAttention(Device device, const Problem& largest)
      : device_(device), largest_(largest), view_(device, largest.query_tokens) {}
  Device device_;
  Problem largest_;
  FlashEngine engine_;
  KeyValueCache cache_;
  RunView view_;
};

// The segment of a stream, which all layers share, and what does not change.
class CompressiveSegment {
 public:
  static absl::StatusOr<CompressiveSegment> Create(Device device, const Problem& problem,
                                                   const CompressiveOptions& options);
  void Reset() { end_ = queues_.first_token(); }  // begins a new stream
  void Begin(int64_t tokens);                     // begins the next segment; allocates nothing

  Device device() const { return device_; }
  const Problem& problem() const { return problem_; }
  const CompressiveOptions& options() const { return options_; }
  const MemoryQueues& queues() const { return queues_; }
  layers::DistanceRange distances() const {
    return {0, queues_.max_distance(), options_.max_distance};
  }
  int64_t longest() const { return layers::LongestSegment(problem_, options_.segment); }

  // Return the segment's first token, and the one behind its last, as MemoryQueues counts.
  int64_t begin() const { return end_ - own_.tokens(); }
  int64_t end() const { return end_; }
  bool is_first() const { return begin() == queues_.first_token(); }
  const layers::SegmentView& own() const { return own_; }  // keys of the memory and the segment
  const RunView& rows() const { return rows_; }            // keys of the compressed memory
  // Return the number of tokens after a Run, and the number of the first compressed row then.
  int64_t last_token() const { return queues_.first_token() + problem_.query_tokens; }
  int64_t first_compressed() const {
    return queues_.Rows(last_token()) - queues_.MemoryRows(last_token());
  }
  // The attention of content alone; null where no rows are compressed.
  ContentAttention* content() { return content_.has_value() ? &*content_ : nullptr; }

  // ---- The backward pass ----

  // A segment of a Run as MemoryQueues counts.
  struct Range {
    int64_t begin;
    int64_t end;
  };
  Range RangeOf(const layers::PastSegment& segment) const {
    const int64_t begin = queues_.first_token() + segment.begin;
    return {begin, begin + segment.tokens};
  }
  int64_t KeysOf(const Range& range) const {
    return queues_.MemoryRows(range.begin) + queues_.MemoryTokens(range.begin) + range.end -
           range.begin;
  }
  // The lists of the queues' rows and segments, and those that the attention's loss compares.
  const layers::ListSchedules& lists() const { return lists_; }
  const layers::ListSchedules& compared() const { return compared_; }
  void SetUpBackward() {
    lists_.Build();
    compared_.Build();
  }
  // Returns the number of rows that a Run compresses.
  int64_t fresh_rows() const { return queues_.Rows(last_token()) - queues_.first_row(); }

 private:
  CompressiveSegment(Device device, const Problem& problem, const CompressiveOptions& options)
      : device_(device),
        problem_(problem),
        options_(options),
        queues_(options, longest()),
        own_(device, {options.memory, false, longest()}),
        rows_(device, longest()) {
    AddLists();
  }
  void AddLists();

  Device device_;
  Problem problem_;
  CompressiveOptions options_;
  MemoryQueues queues_;
  int64_t end_ = 0;
  layers::SegmentView own_;
  RunView rows_;
  layers::ListSchedules lists_;
  layers::ListSchedules compared_ = layers::ListSchedules::OfOthers();
  std::optional<ContentAttention> content_;
};

class CompressiveAttention : public layers::SegmentAttention {
 public:
  // Allocates the memory for the stream of layer n. The segment outlives the attention.
  static absl::StatusOr<std::unique_ptr<CompressiveAttention>> Create(CompressiveSegment* segment,
                                                                      int64_t n);

  // Unless positions are learned, it projects the sinusoids.
  absl::Status Setup(const NamedTensors& parameters, const layers::Distances& distances,
                     const Execution& execution) override;
  void Reset() override;
  absl::Status Recall(const Inputs& given, const LayerNorm* norm,
                      const Execution& execution) override;
  absl::Status Run(const Call& call, const Execution& execution) override;
  absl::Status KeepState(const Inputs& inputs, const Outputs& outputs,
                         const Execution& execution) const override;
  size_t workspace_bytes(int threads) const override;
  // cache_bytes: keys, values and rows.
  std::map<std::string, double> statistics() const override {
    return {
        {"cache_bytes", static_cast<double>(tokens_.bytes() + rows_.bytes() + hidden_.bytes())}};
  }

  absl::Status CheckBackward() const override { return absl::OkStatus(); }
  absl::Status SetUpBackward(const NamedTensors& parameters,
                             const layers::Distances& distances) override;
  size_t kept_bytes() const override;
  size_t sums_bytes() const override { return past_.sums_bytes(); }
  size_t again_bytes() const override { return past_.memory_bytes(segment_.lists()); }
  size_t backward_workspace_bytes(int threads) const override;
  absl::Status RunAgain(const AgainCall& call, const Execution& execution) override;
  absl::Status Backward(const BackwardCall& call, const Execution& execution) override;

 private:
  CompressiveAttention(CompressiveSegment* segment, int64_t n)
      : segment_(*segment),
        n_(n),
        device_(segment->device()),
        problem_(segment->problem()),
        options_(segment->options()),
        queues_(segment->queues()),
        past_(device_, problem_, segment->distances(), options_.pre_norm),
        names_(CompressiveSizes(problem_, options_), n) {
    if (has_losses()) losses_ = LossGradients(device_, problem_, options_, n, segment->compared());
  }

  struct Scratch {
    TensorView projections;      // [batch, tokens, 3 model_dim]: queries, keys, values
    AttentionPart own;           // the memory and the segment; out [batch, tokens, model_dim]
    AttentionPart compressed;    // the compressed memory
    TensorView old;              // f32 [batch, rows, model_dim]
    TensorView normalized;       // of the same shape, with pre_norm
    TensorView projected;        // [batch, rows, 2 model_dim]: keys, values
    TensorView fresh;            // f32 [batch, blocks, model_dim]: compressed rows
    TensorView fresh_projected;  // [batch, blocks, 2 model_dim]
    int32_t* order;              // [batch, rows]
    int32_t* selected;           // [batch, blocks]
  };
  Scratch LayOut(int64_t tokens, Workspace& workspace) const;
  Problem LargestCall() const;
  DType projected_dtype() const { return device_ == Device::kCpu ? DType::kF32 : problem_.dtype; }
  bool chooses() const { return options_.function == CompressiveOptions::Function::kMostUsed; }
  int64_t max_old() const { return queues_.max_blocks() * queues_.rate(); }

  absl::Status SetupUse(const layers::RelativePositions::Parameters& parameters,
                        const ConstTensorView& distances);
  // Returns the vectors of all distances of the range, f32 [distances, model_dim].
  absl::StatusOr<Tensor> KeysOfDistances(const NamedTensors& parameters,
                                         const ConstTensorView& sinusoids, ThreadPool* pool) const;
  // Appends rows [batch, rows, model_dim] that a stream is given, as many as a segment has at most,
  // to the tokens or the compressed rows. `norm`: see Call.
  absl::Status RecallRows(const LayerNorm* norm, const ConstTensorView& rows, KeyValueCache* cache,
                          const Execution& execution);
  // Appends the stream's first rows, with start_zero.
  absl::Status AppendZeros(const Call& call, const Scratch& scratch, const Execution& execution);
  absl::Status Remember(const ConstTensorView& rows, int64_t count, int64_t first_token,
                        const Execution& execution);
  absl::Status Attend(const Call& call, const Scratch& scratch, const Execution& execution);
  absl::Status Compress(const Call& call, const Scratch& scratch, const Execution& execution);
  // Measures how much attention the tokens receive that leave the memory.
  absl::Status MeasureUse(const Call& call, const Scratch& scratch, const Execution& execution);
  // Selects which of `rows` tokens from `first` on stay: as many as they have blocks.
  absl::Status Select(const Call& call, const Scratch& scratch, int64_t first, int64_t rows,
                      const Execution& execution);
  absl::Status AttentionLoss(const Call& call, const Scratch& scratch, const TensorView& old,
                             const TensorView& fresh_projected, const Execution& execution);
  // Projects rows [batch, rows, model_dim] of the layer's input to keys and values side by side.
  absl::Status ProjectRows(const LayerNorm* norm, const ConstTensorView& rows,
                           const TensorView& normalized, const TensorView& projected,
                           const Execution& execution) const;
  struct KeysAndValues {
    TensorView k, v;  // [batch, heads, rows, head_dim], in memory of `scratch`
  };
  // Does the same for rows that precede the stream's first segment.
  absl::StatusOr<KeysAndValues> ProjectEarlier(const LayerNorm* norm, const ConstTensorView& rows,
                                               const Scratch& scratch,
                                               const Execution& execution) const;
  // Returns rows [batch, rows, model_dim] of zeros, with start_zero.
  ConstTensorView Zeros(int64_t rows) const {
    return ConstTensorView(zeros_.data(), DType::kF32, {problem_.batch, rows, problem_.model_dim()},
                           {0, 0, 1});
  }
  // Returns the layer's part of an output [batch, segments, layers] or [batch, segments, layers,
  // rows], for this segment: [batch] or [batch, rows]; empty where it is not wanted.
  TensorView OutputOf(const layers::Segment& segment, absl::string_view name) const;
  // Copies those of the fresh rows that are in the final compressed memory.
  absl::Status KeepFresh(const Call& call, const TensorView& fresh,
                         const Execution& execution) const;
  TensorView hidden_view() const {
    return TensorView(hidden_.mutable_data(), DType::kF32,
                      {problem_.batch, queues_.places(), problem_.model_dim()});
  }
  TensorView use_view() const {
    return TensorView(use_.mutable_data(), DType::kF32, {problem_.batch, queues_.places()});
  }
  TensorView use_rows() const { return SplitAxis(use_view(), 1, queues_.places()); }

  // ---- The backward pass ----

  // Returns the rows that a Run compresses, which it keeps: f32 [batch, fresh_rows, model_dim].
  TensorView FreshIn(absl::Span<std::byte> kept) const;
  // Parts of a list, in the order of its rows.
  struct Parts {
    std::array<ConstTensorView, 4> views;
    size_t count = 0;

    void Add(const ConstTensorView& view) {
      if (view.dim(1) > 0) views[count++] = view;
    }
    absl::Span<const ConstTensorView> span() const {
      return absl::MakeConstSpan(views).subspan(0, count);
    }
  };
  // Adds the compressed rows, or the tokens, from `first` to `end` - 1, as MemoryQueues counts:
  // given ones or zeros, and those of the Run.
  void AddRows(const layers::PastSegment& segment, int64_t first, int64_t end, Parts* parts) const;
  void AddTokens(const layers::PastSegment& segment, int64_t first, int64_t end,
                 Parts* parts) const;
  // Returns what the queues hold while the segment is read.
  Parts QueuesBefore(const layers::PastSegment& segment) const;
  layers::ListAttention::Call ListOf(const layers::PastSegment& segment, const Parts& earlier,
                                     const LayerNorm* norm, const ConstTensorView& x) const;
  layers::ListAttention::Memory MemoryOf(const layers::PastSegment& segment,
                                         absl::Span<std::byte> again) const;
  // Adds the gradients of the losses.
  absl::Status LossesBackward(const BackwardCall& call, const ConstTensorView& q,
                              const Execution& execution) const;
  bool has_losses() const { return queues_.compresses() && options_.convolves(); }

  CompressiveSegment& segment_;
  int64_t n_;  // the layer
  Device device_;
  Problem problem_;
  CompressiveOptions options_;
  MemoryQueues queues_;
  PackedMatrix projections_;      // W of queries, keys and values side by side
  PackedMatrix keys_and_values_;  // W of the keys and values of compressed rows
  PackedMatrix output_;
  Compression compression_;
  layers::RelativePositions positions_;  // the engine's rule points to it
  FlashEngine engine_;
  KeyValueCache tokens_;
  KeyValueCache rows_;
  // Data of tokens that are not yet compressed, at their number modulo the places.
  DeviceArray<float> hidden_;  // [batch, places, model_dim]
  DeviceArray<float> use_;     // [batch, places], with most_used
  DeviceArray<float> zeros_;   // [model_dim], with start_zero
  // Used with most_used: the vectors r of all distances, v . r of each head, u.
  DeviceArray<float> distances_, distance_biases_, u_;
  layers::DistanceRange range_;
  // The backward pass uses these.
  layers::ListAttention past_;
  layers::ListAttention::Names names_;
  LossGradients losses_;
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_ATTENTION_H_
