#include "memory/compressive/compressive_attention.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/layers/attention/relative_attention.h"
#include "core/layers/copy_rows.h"
#include "core/layers/heads.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/status.h"

namespace tfb::compressive {
namespace {

// Returns the n-th of several hidden states side by side.
TensorView Part(const TensorView& view, int64_t n, int64_t width) {
  return Slice(view, 2, n * width, width);
}
// Returns a tensor of fewer rows in the memory of scratch.
TensorView Sized(const TensorView& scratch, int64_t rows) {
  return TensorView(scratch.mutable_data(), scratch.dtype, {scratch.dim(0), rows, scratch.dim(2)});
}
// Returns layer n of [batch, layers, tokens] as [batch, tokens, 1].
template <class View>
View UseOfLayer(const View& view, int64_t n) {
  return Transpose(Slice(view, 1, n, 1), 1, 2);
}
// Returns [batch, heads, 1, head_dim] as the same token `count` times.
TensorView Repeated(TensorView token, int64_t count) {
  token.dims[2] = count;
  token.strides[2] = 0;
  return token;
}

}  // namespace

void RunView::Set(int64_t first, int64_t count, int64_t queries) {
  first_ = first;
  count_ = count;
  kv_tokens_ = first - KeyValueCache::TileBegin(first) + count;
  band_ = {};
  band_.first_key = skipped();
  band_.high = kv_tokens_;  // beyond the last key of any query
  if (count > 0 && device_ == Device::kCpu) {
    schedule_ = &schedules_.Build(queries, kv_tokens_, band_);
  }
}

// ---- Attention of content alone ----

absl::StatusOr<ContentAttention> ContentAttention::Create(Device device, const Problem& problem,
                                                          int64_t queries, int64_t keys) {
  Problem largest = problem;
  largest.query_tokens = queries;
  largest.kv_tokens = keys;
  ContentAttention attention(device, largest);
  TFB_ASSIGN_OR_RETURN(attention.cache_, KeyValueCache::Create(device, largest, keys));
  TFB_ASSIGN_OR_RETURN(attention.engine_, FlashEngine::CreateForStream(device, largest));
  return attention;
}

size_t ContentAttention::workspace_bytes(int threads) const {
  return FlashEngine::StreamWorkspaceBytes(device_, largest_, /*relative_keys=*/false, threads);
}

absl::Status ContentAttention::Run(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const TensorView& out, const Execution& execution) {
  cache_.Clear();
  TFB_RETURN_IF_ERROR(cache_.Append(k, v, execution));
  view_.Set(0, k.dim(2), q.dim(2));
  Problem problem = largest_;
  problem.query_tokens = q.dim(2);
  problem.kv_tokens = view_.kv_tokens();
  FlashCall call = engine_.NewCall();
  call.q = q;
  call.out = out;
  cache_.SetKeys(0, &call);
  view_.SetMask(&call);
  return engine_.Run(problem, call, execution);
}

// ---- What the layers share ----

absl::StatusOr<CompressiveSegment> CompressiveSegment::Create(Device device, const Problem& problem,
                                                              const CompressiveOptions& options) {
  CompressiveSegment segment(device, problem, options);
  const MemoryQueues& queues = segment.queues_;
  if (!queues.compresses()) return segment;
  TFB_ASSIGN_OR_RETURN(ContentAttention content,
                       ContentAttention::Create(device, problem, segment.longest(),
                                                queues.max_blocks() * options.compression));
  segment.content_.emplace(std::move(content));
  return segment;
}

void CompressiveSegment::AddLists() {
  const int64_t last = last_token();
  for (int64_t begin = queues_.first_token(); begin < last; begin += longest()) {
    const Range range = {begin, std::min(begin + longest(), last)};
    const int64_t tokens = range.end - range.begin;
    lists_.Add(tokens, KeysOf(range));
    const int64_t rows = queues_.Compressed(range.end) - queues_.Compressed(range.begin);
    if (rows == 0 || !options_.convolves()) continue;
    compared_.Add(tokens, rows);
    compared_.Add(tokens, rows / queues_.rate());
  }
}

void CompressiveSegment::Begin(int64_t tokens) {
  const int64_t begin = end_, count = queues_.MemoryRows(begin);
  end_ += tokens;
  own_.Set(begin, tokens, queues_.Left(begin));
  rows_.Set(queues_.Rows(begin) - count, count, tokens);
}

// ---- The layer's attention ----

absl::StatusOr<std::unique_ptr<CompressiveAttention>> CompressiveAttention::Create(
    CompressiveSegment* segment, int64_t n) {
  std::unique_ptr<CompressiveAttention> attention(new CompressiveAttention(segment, n));
  const Device device = segment->device();
  const Problem& problem = segment->problem();
  const CompressiveOptions& options = segment->options();
  const MemoryQueues& queues = segment->queues();
  TFB_ASSIGN_OR_RETURN(attention->tokens_,
                       KeyValueCache::Create(device, problem, options.memory + segment->longest()));
  if (!queues.compresses()) return attention;
  TFB_ASSIGN_OR_RETURN(
      attention->rows_,
      KeyValueCache::Create(device, problem, options.compressed_memory + queues.max_blocks()));
  TFB_ASSIGN_OR_RETURN(
      attention->hidden_,
      DeviceArray<float>::Allocate(device, problem.batch * queues.places() * problem.model_dim()));
  if (attention->chooses()) {
    TFB_ASSIGN_OR_RETURN(attention->use_,
                         DeviceArray<float>::Allocate(device, problem.batch * queues.places()));
  }
  return attention;
}

Problem CompressiveAttention::LargestCall() const {
  Problem largest = problem_;
  largest.query_tokens = segment_.longest();
  // A window begins within its first tile, so that there are up to a tile of keys more.
  largest.kv_tokens =
      std::max(options_.memory + segment_.longest(), options_.compressed_memory) + kFlashTile - 1;
  return largest;
}

absl::Status CompressiveAttention::Setup(const NamedTensors& parameters,
                                         const layers::Distances& distances,
                                         const Execution& execution) {
  range_ = distances.range;
  const layers::StackSizes sizes = CompressiveSizes(problem_, options_);
  const layers::RelativeAttention::Parameters own =
      layers::RelativeAttention::ParametersOf(parameters, sizes, n_);
  TFB_ASSIGN_OR_RETURN(projections_, PackedMatrix::Create(device_, {own.w_q, own.w_k, own.w_v}));
  TFB_ASSIGN_OR_RETURN(keys_and_values_, PackedMatrix::Create(device_, {own.w_k, own.w_v}));
  TFB_ASSIGN_OR_RETURN(output_, PackedMatrix::Create(device_, own.w_o));
  TFB_ASSIGN_OR_RETURN(compression_, Compression::Create(device_, options_, parameters, n_));
  TFB_ASSIGN_OR_RETURN(const Tensor keys,
                       KeysOfDistances(parameters, distances.sinusoids, execution.pool));
  positions_ = layers::RelativePositions::FromTable(keys.view(), own.positions.u, own.positions.v,
                                                    range_, /*here=*/0);
  ScoreRule rule;
  positions_.AddTo(&rule);
  TFB_ASSIGN_OR_RETURN(engine_, FlashEngine::CreateForStream(device_, LargestCall(), rule));
  if (chooses() && queues_.compresses()) {
    TFB_RETURN_IF_ERROR(SetupUse(own.positions, keys.view()));
  }
  if (queues_.starts_full()) {
    TFB_ASSIGN_OR_RETURN(zeros_, DeviceArray<float>::Create(
                                     device_, std::vector<float>(problem_.model_dim(), 0.0f)));
  }
  Reset();
  return absl::OkStatus();
}

absl::StatusOr<Tensor> CompressiveAttention::KeysOfDistances(const NamedTensors& parameters,
                                                             const ConstTensorView& sinusoids,
                                                             ThreadPool* pool) const {
  const std::string layer = layers::LayerPrefix(n_);
  if (!options_.learned_positions) {
    return layers::ProjectSinusoids(sinusoids, parameters.at(layer + "w_r").view(), pool);
  }
  const ConstTensorView learned = parameters.at(layer + "relative_keys").view();
  TFB_ASSIGN_OR_RETURN(Tensor table,
                       Tensor::Allocate(DType::kF32, Shape{range_.rows(), problem_.model_dim()}));
  CopyElements(Slice(learned, 0, 0, range_.rows()),
               SplitAxis(table.view(), 1, problem_.query_heads));
  return table;
}

absl::Status CompressiveAttention::SetupUse(const layers::RelativePositions::Parameters& parameters,
                                            const ConstTensorView& distances) {
  const int64_t heads = problem_.query_heads, e = problem_.head_dim;
  Tensor biases(DType::kF32, {distances.dim(0), heads});
  for (int64_t d = 0; d < distances.dim(0); ++d) {
    for (int64_t h = 0; h < heads; ++h) {
      double sum = 0;
      for (int64_t c = 0; c < e; ++c) {
        sum += *parameters.v.At<float>(h, c) * *distances.At<float>(d, h * e + c);
      }
      *biases.view().MutableAt<float>(d, h) = static_cast<float>(sum);
    }
  }
  TFB_ASSIGN_OR_RETURN(distances_, CopyFloats(device_, distances));
  TFB_ASSIGN_OR_RETURN(distance_biases_, CopyFloats(device_, biases.view()));
  TFB_ASSIGN_OR_RETURN(u_, CopyFloats(device_, parameters.u));
  return absl::OkStatus();
}

void CompressiveAttention::Reset() {
  tokens_.Clear();
  rows_.Clear();
}

CompressiveAttention::Scratch CompressiveAttention::LayOut(int64_t tokens,
                                                           Workspace& workspace) const {
  const int64_t width = problem_.model_dim();
  const auto take = [&](DType dtype, int64_t rows, int64_t channels) {
    const Shape shape = {problem_.batch, rows, channels};
    return TensorView(workspace.Take<std::byte>(NumElements(shape) * SizeOf(dtype)), dtype, shape);
  };
  const auto part = [&] {
    AttentionPart part;
    part.out = take(DType::kF32, tokens, width);
    const Shape shape = {problem_.batch, problem_.query_heads, tokens};
    part.log_sum_exp = TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
    return part;
  };
  Scratch scratch = {};
  scratch.projections = take(projected_dtype(), tokens, 3 * width);
  scratch.own = part();
  scratch.compressed = part();
  if (!queues_.compresses()) return scratch;
  const int64_t rows = max_old(), blocks = queues_.max_blocks();
  scratch.old = take(DType::kF32, rows, width);
  scratch.normalized = take(DType::kF32, options_.pre_norm ? rows : 0, width);
  scratch.projected = take(projected_dtype(), rows, 2 * width);
  scratch.fresh = take(DType::kF32, blocks, width);
  scratch.fresh_projected = take(projected_dtype(), blocks, 2 * width);
  scratch.order = workspace.Take<int32_t>(chooses() ? problem_.batch * rows : 0);
  scratch.selected = workspace.Take<int32_t>(chooses() ? problem_.batch * blocks : 0);
  return scratch;
}

size_t CompressiveAttention::workspace_bytes(int threads) const {
  const size_t content_bytes =
      segment_.content() == nullptr ? 0 : segment_.content()->workspace_bytes(threads);
  const int64_t width = problem_.model_dim(), rows = problem_.batch * segment_.longest();
  size_t step = std::max({content_bytes, LayerNorm::workspace_bytes(device_, width, threads),
                          MatMulWorkspaceBytes(device_, rows, width, 3 * width, threads),
                          FlashEngine::StreamWorkspaceBytes(device_, LargestCall(),
                                                            /*relative_keys=*/true, threads)});
  if (queues_.compresses()) {
    step = std::max(
        {step, MatMulWorkspaceBytes(device_, problem_.batch * max_old(), width, 2 * width, threads),
         Compression::workspace_bytes(device_, options_, problem_.batch, queues_.max_blocks(),
                                      width, threads)});
  }
  return step +
         Workspace::Measure([&](Workspace& workspace) { LayOut(segment_.longest(), workspace); });
}

absl::Status CompressiveAttention::Run(const Call& call, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(call.segment.tokens, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  if (queues_.starts_full() && segment_.is_first()) {
    TFB_RETURN_IF_ERROR(AppendZeros(call, scratch, rest));
  }
  // The rows are kept before y, which may be the same memory, is written.
  TFB_RETURN_IF_ERROR(Remember(call.residual, call.segment.tokens, segment_.begin(), rest));
  TFB_RETURN_IF_ERROR(Attend(call, scratch, rest));
  TFB_RETURN_IF_ERROR(MatMul(output_, {scratch.own.out, call.residual, call.y}, rest));
  return Compress(call, scratch, rest);
}

absl::Status CompressiveAttention::AppendZeros(const Call& call, const Scratch& scratch,
                                               const Execution& execution) {
  TFB_RETURN_IF_ERROR(Remember(Zeros(1), options_.memory, 0, execution));
  TFB_ASSIGN_OR_RETURN(const KeysAndValues zero,
                       ProjectEarlier(call.norm, Zeros(1), scratch, execution));
  if (options_.memory > 0) {
    TFB_RETURN_IF_ERROR(tokens_.Append(Repeated(zero.k, options_.memory),
                                       Repeated(zero.v, options_.memory), execution));
  }
  if (!queues_.compresses()) return absl::OkStatus();
  return rows_.Append(Repeated(zero.k, options_.compressed_memory),
                      Repeated(zero.v, options_.compressed_memory), execution);
}

absl::StatusOr<CompressiveAttention::KeysAndValues> CompressiveAttention::ProjectEarlier(
    const LayerNorm* norm, const ConstTensorView& rows, const Scratch& scratch,
    const Execution& execution) const {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads, count = rows.dim(1);
  const TensorView projected = Slice(Sized(scratch.projections, count), 2, 0, 2 * width);
  TFB_RETURN_IF_ERROR(ProjectRows(norm, rows, Sized(scratch.own.out, count), projected, execution));
  return KeysAndValues{Heads(Part(projected, 0, width), heads),
                       Heads(Part(projected, 1, width), heads)};
}

absl::Status CompressiveAttention::Recall(const Inputs& given, const LayerNorm* norm,
                                          const Execution& execution) {
  const auto recall = [&](const char* name, KeyValueCache* cache) -> absl::Status {
    const ConstTensorView rows = given.Get(name);
    if (rows.empty()) return absl::OkStatus();
    return layers::InPieces(
        layers::OfLayer(rows, n_), segment_.longest(),
        [&](const ConstTensorView& piece) { return RecallRows(norm, piece, cache, execution); });
  };
  TFB_RETURN_IF_ERROR(recall(layers::kMemories, &tokens_));
  TFB_RETURN_IF_ERROR(recall(kCompressed, &rows_));
  const ConstTensorView use = given.Get(kWaitingUse);
  if (use.empty()) return absl::OkStatus();
  return CopyAllRows(device_, UseOfLayer(use, n_), use_rows(), execution);
}

absl::Status CompressiveAttention::RecallRows(const LayerNorm* norm, const ConstTensorView& rows,
                                              KeyValueCache* cache, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(rows.dim(1), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  if (cache == &tokens_) {
    TFB_RETURN_IF_ERROR(Remember(rows, rows.dim(1), tokens_.tokens(), rest));
  }
  TFB_ASSIGN_OR_RETURN(const KeysAndValues earlier, ProjectEarlier(norm, rows, scratch, rest));
  return cache->Append(earlier.k, earlier.v, rest);
}

absl::Status CompressiveAttention::KeepState(const Inputs& inputs, const Outputs& outputs,
                                             const Execution& execution) const {
  const TensorView memories = outputs.Get(layers::kMemories), compressed = outputs.Get(kCompressed);
  // The stack keeps the tokens of the Run and given ones, and KeepFresh the rows of the Run.
  if (!memories.empty() && queues_.starts_full()) {
    const int64_t count = std::max<int64_t>(memories.dim(2) - problem_.query_tokens, 0);
    TFB_RETURN_IF_ERROR(
        CopyAllRows(device_, Zeros(count), layers::OfLayer(memories, n_), execution));
  }
  if (!compressed.empty()) {
    const int64_t count = std::max<int64_t>(queues_.first_row() - segment_.first_compressed(), 0);
    const ConstTensorView given = inputs.Get(kCompressed);
    TFB_RETURN_IF_ERROR(CopyAllRows(
        device_,
        given.empty() ? Zeros(count)
                      : Slice(layers::OfLayer(given, n_), 1, given.dim(2) - count, count),
        layers::OfLayer(compressed, n_), execution));
  }
  const TensorView use = outputs.Get(kWaitingUse);
  if (use.empty()) return absl::OkStatus();
  CopyRowsCall copy;  // of the tokens that wait
  copy.from = use_rows();
  copy.from_first = queues_.Compressed(segment_.last_token());
  copy.to = UseOfLayer(use, n_);
  copy.rows = copy.to.dim(1);
  return CopyRows(device_, copy, execution);
}

TensorView CompressiveAttention::OutputOf(const layers::Segment& segment,
                                          absl::string_view name) const {
  TensorView view = segment.outputs.Get(name);
  if (view.empty()) return view;
  view.data = static_cast<const std::byte*>(view.data) +
              SizeOf(view.dtype) * view.Offset(0, segment.begin / segment_.longest(), n_);
  view.dims = {view.dim(0), view.dim(3)};
  view.strides = {view.stride(0), view.stride(3)};
  view.rank -= 2;
  return view;
}

absl::Status CompressiveAttention::KeepFresh(const Call& call, const TensorView& fresh,
                                             const Execution& execution) const {
  const TensorView kept = call.segment.outputs.Get(kCompressed);
  if (kept.empty()) return absl::OkStatus();
  const int64_t number = queues_.Rows(segment_.begin());  // of the first fresh row
  const int64_t first_kept = segment_.first_compressed(), first = std::max(number, first_kept);
  CopyRowsCall copy;
  copy.rows = number + fresh.dim(1) - first;
  if (copy.rows <= 0) return absl::OkStatus();
  copy.from = fresh;
  copy.from_first = first - number;
  copy.to = layers::OfLayer(kept, n_);
  copy.to_first = first - first_kept;
  return CopyRows(device_, copy, execution);
}

absl::Status CompressiveAttention::Remember(const ConstTensorView& rows, int64_t count,
                                            int64_t first_token, const Execution& execution) {
  if (!queues_.compresses()) return absl::OkStatus();
  CopyRowsCall copy;
  copy.from = rows;
  copy.to = hidden_view();
  copy.to_first = first_token;
  copy.rows = count;
  return CopyRows(device_, copy, execution);
}

absl::Status CompressiveAttention::Attend(const Call& call, const Scratch& scratch,
                                          const Execution& execution) {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
  const auto projection = [&](int64_t n) {
    return Heads(Part(scratch.projections, n, width), heads);
  };
  TFB_RETURN_IF_ERROR(MatMul(projections_, {call.x, {}, scratch.projections}, execution));
  TFB_RETURN_IF_ERROR(tokens_.Append(projection(1), projection(2), execution));

  const bool has_rows = segment_.rows().count() > 0;
  Problem problem = problem_;
  problem.query_tokens = call.segment.tokens;
  problem.kv_tokens = segment_.own().kv_tokens();
  FlashCall attend = engine_.NewCall();
  attend.q = projection(0);
  const AttentionPart own = {Heads(scratch.own.out, heads), scratch.own.log_sum_exp};
  attend.out = own.out;
  if (has_rows || chooses()) attend.log_sum_exp = own.log_sum_exp;
  attend.rule.query_position = problem.causal_offset();
  tokens_.SetKeys(segment_.own().first_seen(), &attend);
  segment_.own().SetMask(&attend);
  TFB_RETURN_IF_ERROR(engine_.Run(problem, attend, execution));
  if (!has_rows) return absl::OkStatus();

  // Among the keys of the compressed memory, query 0 has position key count + memory.
  const AttentionPart compressed = {Heads(scratch.compressed.out, heads),
                                    scratch.compressed.log_sum_exp};
  problem.kv_tokens = segment_.rows().kv_tokens();
  attend = engine_.NewCall();
  attend.q = projection(0);
  attend.out = compressed.out;
  attend.log_sum_exp = compressed.log_sum_exp;
  attend.rule.query_position = segment_.rows().kv_tokens() + queues_.MemoryTokens(segment_.begin());
  rows_.SetKeys(segment_.rows().first(), &attend);
  segment_.rows().SetMask(&attend);
  TFB_RETURN_IF_ERROR(engine_.Run(problem, attend, execution));
  return MergeParts(device_, own, compressed, execution);
}

absl::Status CompressiveAttention::Compress(const Call& call, const Scratch& scratch,
                                            const Execution& execution) {
  if (!queues_.compresses()) return absl::OkStatus();
  const int64_t first = queues_.Compressed(segment_.begin());
  const int64_t rows = queues_.Compressed(segment_.end()) - first;
  const int64_t blocks = rows / queues_.rate();
  if (chooses()) {
    TFB_RETURN_IF_ERROR(MeasureUse(call, scratch, execution));
    TFB_RETURN_IF_ERROR(Select(call, scratch, first, rows, execution));
  }
  const TensorView old = Sized(scratch.old, rows), fresh = Sized(scratch.fresh, blocks);
  const TensorView projected = Sized(scratch.fresh_projected, blocks);
  if (blocks > 0) {
    CopyRowsCall copy;
    copy.from = hidden_view();
    copy.from_first = first;
    copy.to = old;
    copy.rows = rows;
    TFB_RETURN_IF_ERROR(CopyRows(device_, copy, execution));
    TFB_RETURN_IF_ERROR(compression_.Compress(old, scratch.selected, fresh, execution));
    TFB_RETURN_IF_ERROR(KeepFresh(call, fresh, execution));
    if (!call.kept.empty()) {
      const int64_t place = queues_.Rows(segment_.begin()) - queues_.first_row();
      TFB_RETURN_IF_ERROR(
          CopyAllRows(device_, fresh, Slice(FreshIn(call.kept), 1, place, blocks), execution));
    }
    TFB_RETURN_IF_ERROR(
        ProjectRows(call.norm, fresh, Sized(scratch.normalized, blocks), projected, execution));
    const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
    TFB_RETURN_IF_ERROR(rows_.Append(Heads(Part(projected, 0, width), heads),
                                     Heads(Part(projected, 1, width), heads), execution));
  }
  const TensorView autoencoding = OutputOf(call.segment, "autoencoding_loss");
  if (!autoencoding.empty()) {
    TFB_RETURN_IF_ERROR(blocks == 0
                            ? LossOfDifference(device_, options_.mean_square(), old, old, 1,
                                               autoencoding, execution)
                            : compression_.AutoencodingLoss(old, fresh, autoencoding, execution));
  }
  return AttentionLoss(call, scratch, old, projected, execution);
}

absl::Status CompressiveAttention::MeasureUse(const Call& call, const Scratch& scratch,
                                              const Execution& execution) {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
  const int64_t first = queues_.Left(segment_.begin());
  const int64_t rows = queues_.Left(segment_.end()) - first;
  if (rows == 0) return absl::OkStatus();
  CopyRowsCall copy;
  copy.from = hidden_view();
  copy.from_first = first;
  copy.to = Sized(scratch.old, rows);
  copy.rows = rows;
  TFB_RETURN_IF_ERROR(CopyRows(device_, copy, execution));
  const TensorView projected = Sized(scratch.projected, rows);
  TFB_RETURN_IF_ERROR(
      ProjectRows(call.norm, copy.to, Sized(scratch.normalized, rows), projected, execution));
  ReceivedCall received;
  received.q = Heads(Part(scratch.projections, 0, width), heads);
  received.k = Heads(Part(projected, 0, width), heads);
  received.log_sum_exp = scratch.own.log_sum_exp;
  received.distances = distances_.data();
  received.distance_biases = distance_biases_.data();
  received.distance_rows = range_.rows();
  received.u = u_.data();
  received.first_distance = segment_.begin() - first;
  received.use = use_view();
  received.first = first;
  return ReceivedAttention(device_, received, execution);
}

absl::Status CompressiveAttention::Select(const Call& call, const Scratch& scratch, int64_t first,
                                          int64_t rows, const Execution& execution) {
  SelectRowsCall select;
  select.use = use_view();
  select.first = first;
  select.rows = rows;
  select.count = rows / queues_.rate();
  select.scratch = scratch.order;
  select.selected = scratch.selected;
  select.kept = OutputOf(call.segment, "kept");
  return SelectRows(device_, select, execution);
}

absl::Status CompressiveAttention::AttentionLoss(const Call& call, const Scratch& scratch,
                                                 const TensorView& old,
                                                 const TensorView& fresh_projected,
                                                 const Execution& execution) {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads, rows = old.dim(1);
  const TensorView loss = OutputOf(call.segment, "attention_loss");
  if (loss.empty()) return absl::OkStatus();
  const TensorView &of_old = scratch.own.out,
                   &of_fresh = scratch.compressed.out;  // both are free here
  if (rows == 0)
    return LossOfDifference(device_, options_.mean_square(), old, old, 1, loss, execution);
  const TensorView projected = Sized(scratch.projected, rows);
  TFB_RETURN_IF_ERROR(
      ProjectRows(call.norm, old, Sized(scratch.normalized, rows), projected, execution));
  const auto attend = [&](const TensorView& keys_and_values, const TensorView& out) {
    return segment_.content()->Run(Heads(Part(scratch.projections, 0, width), heads),
                                   Heads(Part(keys_and_values, 0, width), heads),
                                   Heads(Part(keys_and_values, 1, width), heads), Heads(out, heads),
                                   execution);
  };
  TFB_RETURN_IF_ERROR(attend(projected, of_old));
  TFB_RETURN_IF_ERROR(attend(fresh_projected, of_fresh));
  return LossOfDifference(device_, options_.mean_square(), of_old, of_fresh, 1, loss, execution);
}

absl::Status CompressiveAttention::ProjectRows(const LayerNorm* norm, const ConstTensorView& rows,
                                               const TensorView& normalized,
                                               const TensorView& projected,
                                               const Execution& execution) const {
  if (norm == nullptr) return MatMul(keys_and_values_, {rows, {}, projected}, execution);
  TFB_RETURN_IF_ERROR(norm->Run(rows, normalized, execution));
  return MatMul(keys_and_values_, {normalized, {}, projected}, execution);
}

// ---- The backward pass ----

TensorView CompressiveAttention::FreshIn(absl::Span<std::byte> kept) const {
  Workspace workspace(kept);
  const Shape shape = {problem_.batch, segment_.fresh_rows(), problem_.model_dim()};
  return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
}

size_t CompressiveAttention::kept_bytes() const {
  return Workspace::Measure([this](Workspace& workspace) {
    workspace.Take<float>(problem_.batch * segment_.fresh_rows() * problem_.model_dim());
  });
}

absl::Status CompressiveAttention::SetUpBackward(const NamedTensors& parameters,
                                                 const layers::Distances& distances) {
  if (has_losses()) TFB_RETURN_IF_ERROR(losses_.SetUp(parameters));
  return past_.SetUp(
      layers::RelativeAttention::ParametersOf(parameters, CompressiveSizes(problem_, options_), n_),
      engine_.NewCall().rule, positions_, distances.sinusoids, segment_.lists());
}

size_t CompressiveAttention::backward_workspace_bytes(int threads) const {
  const layers::ListSchedules& lists = segment_.lists();
  return std::max({past_.workspace_bytes(lists, threads),
                   past_.backward_workspace_bytes(lists, threads),
                   has_losses() ? losses_.workspace_bytes(threads) : 0});
}

void CompressiveAttention::AddRows(const layers::PastSegment& segment, int64_t first, int64_t end,
                                   Parts* parts) const {
  const int64_t own = queues_.first_row(), count = std::min(end, own) - first;
  if (count > 0) {
    const ConstTensorView given = segment.inputs.Get(kCompressed);
    parts->Add(given.empty() ? Zeros(count) : Slice(layers::OfLayer(given, n_), 1, first, count));
  }
  const int64_t begin = std::max(first, own);
  if (begin < end) parts->Add(Slice(FreshIn(segment.kept), 1, begin - own, end - begin));
}

void CompressiveAttention::AddTokens(const layers::PastSegment& segment, int64_t first, int64_t end,
                                     Parts* parts) const {
  const int64_t own = queues_.first_token(), count = std::min(end, own) - first;
  if (count > 0) {
    const ConstTensorView given = segment.inputs.Get(layers::kMemories);
    parts->Add(given.empty() ? Zeros(count) : Slice(layers::OfLayer(given, n_), 1, first, count));
  }
  const int64_t begin = std::max(first, own);
  if (begin < end) parts->Add(Slice(segment.states, 1, begin - own, end - begin));
}

CompressiveAttention::Parts CompressiveAttention::QueuesBefore(
    const layers::PastSegment& segment) const {
  const int64_t begin = segment_.RangeOf(segment).begin, rows = queues_.Rows(begin);
  Parts parts;
  AddRows(segment, rows - queues_.MemoryRows(begin), rows, &parts);
  AddTokens(segment, begin - queues_.MemoryTokens(begin), begin, &parts);
  return parts;
}

layers::ListAttention::Call CompressiveAttention::ListOf(const layers::PastSegment& segment,
                                                         const Parts& earlier,
                                                         const LayerNorm* norm,
                                                         const ConstTensorView& x) const {
  return {segment_.lists().Of(segment.tokens, segment_.KeysOf(segment_.RangeOf(segment))),
          earlier.span(), norm, x};
}

layers::ListAttention::Memory CompressiveAttention::MemoryOf(const layers::PastSegment& segment,
                                                             absl::Span<std::byte> again) const {
  Workspace memory(again);
  return past_.LayOut(segment.tokens, segment_.KeysOf(segment_.RangeOf(segment)), memory);
}

absl::Status CompressiveAttention::RunAgain(const AgainCall& call, const Execution& execution) {
  const layers::ListAttention::Memory memory = MemoryOf(call.segment, execution.kept);
  const Parts earlier = QueuesBefore(call.segment);
  TFB_RETURN_IF_ERROR(
      past_.Attend(ListOf(call.segment, earlier, call.norm, call.x), memory, execution));
  return past_.Project(memory.context, call.residual, call.y, execution);
}

absl::Status CompressiveAttention::Backward(const BackwardCall& call, const Execution& execution) {
  const layers::ListAttention::Memory memory = MemoryOf(call.segment, execution.kept);
  const Parts earlier = QueuesBefore(call.segment);
  TFB_RETURN_IF_ERROR(past_.BackwardOfOutput(ListOf(call.segment, earlier, call.norm, call.x),
                                             memory, {call.dy, call.added, call.dx},
                                             {names_, call.segment.parameter_gradients, call.gamma,
                                              call.beta, call.segment.sums, call.segment.is_last()},
                                             execution));
  return has_losses() ? LossesBackward(call, memory.q, execution) : absl::OkStatus();
}

absl::Status CompressiveAttention::LossesBackward(const BackwardCall& call,
                                                  const ConstTensorView& q,
                                                  const Execution& execution) const {
  const CompressiveSegment::Range range = segment_.RangeOf(call.segment);
  const int64_t first = queues_.Compressed(range.begin), end = queues_.Compressed(range.end);
  if (end == first) return absl::OkStatus();
  const auto of_loss = [&](absl::string_view name) {
    ConstTensorView gradient = call.segment.output_gradients.Get(name);
    if (gradient.empty()) return gradient;
    gradient = Slice(Slice(gradient, 1, call.segment.begin / segment_.longest(), 1), 2, n_, 1);
    gradient.rank = 1;
    return gradient;
  };
  Parts old;
  AddTokens(call.segment, first, end, &old);
  const int64_t place = queues_.Rows(range.begin) - queues_.first_row();
  const ConstTensorView fresh =
      Slice(FreshIn(call.segment.kept), 1, place, (end - first) / queues_.rate());
  return losses_.Add({q,
                      {old.views[0], old.views[1]},
                      fresh,
                      call.norm,
                      of_loss("attention_loss"),
                      of_loss("autoencoding_loss"),
                      call.segment.parameter_gradients},
                     execution);
}

}  // namespace tfb::compressive
