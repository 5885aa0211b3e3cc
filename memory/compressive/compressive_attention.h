// One layer's attention with two memories, and its treatment of the rows that leave the first.
//
// Keys and values of tokens are kept in a ring, as in core/layers/attention/relative_attention.h, and
// those of compressed rows in another: both are projected once. The two are calls of one engine, which
// differ in where the queries stand among the keys, and their outputs are merged by log-sum-exp. The
// rows themselves, as they enter the layer, are kept until they are compressed.
#ifndef TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_ATTENTION_H_
#define TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/device_array.h"
#include "core/flash/flash_engine.h"
#include "core/flash/key_value_cache.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/layer_norm.h"
#include "core/layers/matmul.h"
#include "core/problem.h"
#include "core/schedule/band_schedule.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "memory/compressive/compression.h"
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

// The next segment of a stream. All layers share it.
class CompressiveSegment {
 public:
  CompressiveSegment(Device device, const MemoryQueues& queues, int64_t memory, int64_t longest)
      : queues_(queues), own_(device, {memory, false, longest}), rows_(device, longest) {}

  // Sets the segment to tokens begin, ..., begin + tokens - 1 as MemoryQueues counts. It allocates
  // nothing.
  void Set(int64_t begin, int64_t tokens);

  int64_t begin() const { return begin_; }
  int64_t end() const { return begin_ + own_.tokens(); }
  int64_t tokens() const { return own_.tokens(); }
  bool is_first() const { return begin_ == queues_.first_token(); }
  const layers::SegmentView& own() const { return own_; }  // keys of the memory and the segment
  const RunView& rows() const { return rows_; }            // keys of the compressed memory

 private:
  MemoryQueues queues_;
  int64_t begin_ = 0;
  layers::SegmentView own_;
  RunView rows_;
};

// Attention by content alone, for the loss of that name; all layers share one.
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

// Optional outputs of a segment, for one layer; empty views are not computed.
struct CompressionOutputs {
  TensorView attention_loss;     // [batch]
  TensorView autoencoding_loss;  // [batch]
  TensorView kept;               // i32 [batch, most rows of a segment]
  TensorView compressed;         // [batch, rows, model_dim]: the compressed rows from this one on
  int64_t first_compressed = 0;
};

class CompressiveAttention {
 public:
  // Allocates the memory for the stream. `longest` is the most tokens of a segment.
  static absl::StatusOr<CompressiveAttention> Create(Device device, const Problem& problem,
                                                     const CompressiveOptions& options,
                                                     int64_t longest);
  // Packs the parameters of layer n and, unless positions are learned, projects `sinusoids`, those
  // of the range. Begins a new stream.
  absl::Status Setup(const NamedTensors& parameters, int64_t n, const layers::DistanceRange& range,
                     const ConstTensorView& sinusoids, const Execution& execution);
  void Reset();

  size_t cache_bytes() const { return tokens_.bytes() + rows_.bytes() + hidden_.bytes(); }
  // `content_bytes` is the workspace of the ContentAttention that its calls have.
  size_t workspace_bytes(size_t content_bytes, int threads) const;

  // The arguments of a segment. `hidden` is the layer's input and x its attention's input: `hidden`
  // itself, or with `norm`, unless null, its normalisation. y = attention(x) W_o + residual; y may
  // be any of them. The segment must be the stream's next. A call allocates nothing; on CUDA it
  // enqueues on the stream.
  struct Call {
    const CompressiveSegment& segment;
    ConstTensorView hidden;
    ConstTensorView x;
    ConstTensorView residual;
    TensorView y;
    const LayerNorm* norm;
    CompressionOutputs outputs;
    ContentAttention* content;  // used for the attention loss
  };
  absl::Status Append(const Call& call, const Execution& execution);

  // Appends what a stream is given, before its first segment: the next tokens and compressed rows
  // [batch, rows, model_dim], as many as a segment has at most; and the use of the tokens that
  // wait, [batch, tokens, 1], which are the first. `norm`: see Call.
  absl::Status RecallTokens(const LayerNorm* norm, const ConstTensorView& rows,
                            const Execution& execution);
  absl::Status RecallCompressed(const LayerNorm* norm, const ConstTensorView& rows,
                                const Execution& execution);
  absl::Status RecallUse(const ConstTensorView& use, const Execution& execution);
  // Copies to `use` [batch, tokens, 1] that of the waiting tokens behind so many tokens.
  absl::Status KeepUse(int64_t tokens, const TensorView& use, const Execution& execution) const;
  // Returns rows [batch, rows, model_dim] of zeros, with start_zero.
  ConstTensorView Zeros(int64_t rows) const {
    return ConstTensorView(zeros_.data(), DType::kF32, {problem_.batch, rows, problem_.model_dim()},
                           {0, 0, 1});
  }

 private:
  CompressiveAttention(Device device, const Problem& problem, const CompressiveOptions& options,
                       int64_t longest)
      : device_(device),
        problem_(problem),
        options_(options),
        longest_(longest),
        queues_(options, longest) {}

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
  absl::StatusOr<Tensor> KeysOfDistances(const NamedTensors& parameters, int64_t n,
                                         const ConstTensorView& sinusoids, ThreadPool* pool) const;
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
  // Copies those of the fresh rows that are among the call's compressed ones.
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

  Device device_;
  Problem problem_;
  CompressiveOptions options_;
  int64_t longest_;
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
};

}  // namespace tfb::compressive

#endif  // TFB_MEMORY_COMPRESSIVE_COMPRESSIVE_ATTENTION_H_
