#include "core/layers/attention/relative_attention.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/layers/heads.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::layers {
double MemoryReach::Pairs(int64_t tokens, double most) const {
  double pairs = 0;
  for (int64_t p = given; p < given + tokens; ++p) {
    pairs += std::min(static_cast<double>(p - FirstSeenBy(p) + 1), most);
  }
  return pairs;
}

MemoryReach::Context MemoryReach::ContextOf(int64_t tokens, int64_t layers) const {
  Context context;
  context.pairs = Pairs(tokens);
  const int64_t last = given + tokens - 1;
  int64_t farthest = last;
  // What a given token depends on is not known here.
  for (int64_t n = 0; n < layers && farthest >= given; ++n) farthest = FirstSeenBy(farthest);
  context.reach = tokens == 0 ? 0 : last - farthest;
  return context;
}

void SegmentView::Set(int64_t begin, int64_t tokens, int64_t first_seen) {
  tokens_ = tokens;
  first_seen_ = first_seen;
  const int64_t first_key = KeyValueCache::TileBegin(first_seen_);
  kv_tokens_ = begin + tokens - first_key;
  band_ = {};
  band_.first_key = first_seen_ - first_key;
  band_.high = begin - first_key;  // query i is key i + begin - first_key
  if (reach_.same_length) band_.low = band_.high - (reach_.memory - 1);
  if (device_ == Device::kCpu) schedule_ = &schedules_.Build(tokens, kv_tokens_, band_);
}

RelativeAttention::Parameters RelativeAttention::ParametersOf(const NamedTensors& parameters,
                                                              const StackSizes& sizes,
                                                              int64_t layer) {
  const auto parameter = [&](const std::string& prefix, absl::string_view name) {
    return ConstTensorView(parameters.at(absl::StrCat(prefix, name)).view());
  };
  const std::string own = LayerPrefix(layer), biases = BiasPrefix(sizes, layer);
  return {parameter(own, "w_q"),
          parameter(own, "w_k"),
          parameter(own, "w_v"),
          parameter(own, "w_o"),
          {sizes.learned_distances > 0 ? ConstTensorView() : parameter(own, "w_r"),
           parameter(biases, "u"), parameter(biases, "v")},
          sizes.span_ramp > 0 ? parameter(own, "span") : ConstTensorView(),
          sizes.span_ramp};
}

absl::StatusOr<RelativeAttention> RelativeAttention::Create(Device device, const Problem& problem,
                                                            const MemoryReach& reach,
                                                            Queries queries) {
  RelativeAttention attention(device, problem, reach, queries);
  TFB_ASSIGN_OR_RETURN(attention.cache_,
                       KeyValueCache::Create(device, problem, reach.memory + reach.max_segment));
  return attention;
}

absl::Status RelativeAttention::Setup(const Parameters& parameters, const DistanceRange& range,
                                      const ConstTensorView& sinusoids,
                                      const Execution& execution) {
  std::vector<ConstTensorView> projections = {parameters.w_q};
  for (const ConstTensorView& matrix : {parameters.w_k, parameters.w_v}) {
    projections.insert(projections.end(), problem_.model_dim() / matrix.dim(1), matrix);
  }
  if (queries_apart_) {
    TFB_ASSIGN_OR_RETURN(queries_, PackedMatrix::Create(device_, parameters.w_q));
    projections.erase(projections.begin());
  }
  TFB_ASSIGN_OR_RETURN(projections_, PackedMatrix::Create(device_, projections));
  TFB_ASSIGN_OR_RETURN(output_, PackedMatrix::Create(device_, parameters.w_o));
  TFB_ASSIGN_OR_RETURN(positions_,
                       RelativePositions::Create(parameters.positions, range, sinusoids,
                                                 /*here=*/0, DType::kF32, execution.pool));
  ScoreRule rule;
  positions_.AddTo(&rule);
  if (!parameters.span.empty()) {
    rule.soft_span.span = parameters.span.At<float>();
    rule.soft_span.count = parameters.span.num_elements();
    rule.soft_span.head_stride = 1;
    rule.soft_span.ramp = static_cast<float>(parameters.span_ramp);
  }
  TFB_ASSIGN_OR_RETURN(engine_, FlashEngine::CreateForStream(device_, LargestCall(), rule));
  Reset();
  return absl::OkStatus();
}

Problem RelativeAttention::LargestCall() const {
  Problem largest = problem_;
  largest.query_tokens = reach_.max_segment;
  // A window begins within its first tile, so that there are up to a tile of keys more.
  largest.kv_tokens = reach_.memory + reach_.max_segment + kFlashTile - 1;
  return largest;
}

RelativeAttention::Scratch RelativeAttention::LayOut(int64_t tokens, Workspace& workspace) const {
  const auto take = [&](DType dtype, int64_t channels) {
    const Shape shape = {problem_.batch, tokens, channels};
    return TensorView(workspace.Take<std::byte>(NumElements(shape) * SizeOf(dtype)), dtype, shape);
  };
  const TensorView projections = take(projected_dtype(), 3 * problem_.model_dim());
  return {projections, take(DType::kF32, problem_.model_dim())};
}

RelativeAttention::RowScratch RelativeAttention::LayOutRows(int64_t tokens, int64_t rows,
                                                            Workspace& workspace) const {
  const int64_t width = problem_.model_dim();
  const auto take = [&](const Shape& shape) {
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  };
  const TensorView keys_and_values = take({problem_.batch, tokens, 2 * width});
  const TensorView q = take({rows, width});
  return {keys_and_values, q, take({rows, width})};
}

size_t RelativeAttention::workspace_bytes(int threads, size_t rest_bytes) const {
  const int64_t rows = problem_.batch * reach_.max_segment, width = problem_.model_dim();
  const auto lay_out = [&](Workspace& workspace) {
    if (queries_apart_) {
      LayOutRows(reach_.max_segment, rows, workspace);
    } else {
      LayOut(reach_.max_segment, workspace);
    }
  };
  return Workspace::Measure(lay_out) +
         std::max({rest_bytes, MatMulWorkspaceBytes(device_, rows, width, 3 * width, threads),
                   FlashEngine::StreamWorkspaceBytes(device_, LargestCall(), /*relative_keys=*/true,
                                                     threads)});
}

absl::StatusOr<RelativeAttention::Attended> RelativeAttention::Attend(
    const SegmentView& segment, const ConstTensorView& x, const Execution& execution,
    const TensorView& log_sum_exp) {
  return Attend(segment, x, x, {}, log_sum_exp, execution);
}

size_t RelativeAttention::replace_workspace_bytes(int threads) const {
  const int64_t rows = problem_.batch * reach_.max_segment, width = problem_.model_dim();
  return Workspace::Measure(
             [this](Workspace& workspace) { LayOut(reach_.max_segment, workspace); }) +
         MatMulWorkspaceBytes(device_, rows, width, 3 * width, threads);
}

absl::Status RelativeAttention::Replace(const ConstTensorView& x, const Execution& execution) {
  const int64_t width = problem_.model_dim();
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(x.dim(1), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  MatMulCall call{x, {}, scratch.projections};
  if (device_ != Device::kCpu) {  // where some columns of a product can be had
    call.y = Slice(scratch.projections, 2, width, 2 * width);
    call.columns = {width, 2 * width};
  }
  TFB_RETURN_IF_ERROR(MatMul(projections_, call, rest));
  const auto projection = [&](int64_t n) {
    return Heads(Slice(scratch.projections, 2, n * width, width), problem_.query_heads);
  };
  cache_.TakeBack(x.dim(1));
  return cache_.Append(projection(1), projection(2), rest);
}

absl::Status RelativeAttention::ProjectSome(const ConstTensorView& keys_from,
                                            const ConstTensorView& x, const RowList& rows,
                                            const TensorView& projections,
                                            const Execution& execution) const {
  const int64_t width = problem_.model_dim();
  MatMulCall of_keys{keys_from, {}, Slice(projections, 2, width, 2 * width)};
  of_keys.columns = {width, 2 * width};
  TFB_RETURN_IF_ERROR(MatMul(projections_, of_keys, execution));
  MatMulCall of_queries{x, {}, Slice(projections, 2, 0, width)};
  of_queries.columns = {0, width};
  of_queries.rows = rows;
  return MatMul(projections_, of_queries, execution);
}

absl::StatusOr<RelativeAttention::Attended> RelativeAttention::Attend(
    const SegmentView& segment, const ConstTensorView& keys_from, const ConstTensorView& x,
    const RowList& rows, const TensorView& log_sum_exp, const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(segment.tokens(), workspace);
  const auto projection = [&](int64_t n) {
    const int64_t width = problem_.model_dim();
    return Heads(Slice(scratch.projections, 2, n * width, width), problem_.query_heads);
  };
  Attended attended = {projection(0),   projection(1),
                       projection(2),   Heads(scratch.context, problem_.query_heads),
                       scratch.context, execution};
  attended.rest.workspace = workspace.Rest();

  if (rows.rows == nullptr) {
    TFB_RETURN_IF_ERROR(MatMul(projections_, {x, {}, scratch.projections}, attended.rest));
  } else {
    TFB_RETURN_IF_ERROR(ProjectSome(keys_from, x, rows, scratch.projections, attended.rest));
  }
  TFB_RETURN_IF_ERROR(cache_.Append(attended.k, attended.v, attended.rest));

  FlashCall call = engine_.NewCall();
  call.q = attended.q;
  call.out = attended.heads;
  call.log_sum_exp = log_sum_exp;
  call.asked = rows;
  TFB_RETURN_IF_ERROR(Attend(segment, call, attended.rest));
  return attended;
}

absl::Status RelativeAttention::Attend(const SegmentView& segment, FlashCall call,
                                       const Execution& execution) const {
  Problem problem = problem_;
  problem.query_tokens = segment.tokens();
  problem.kv_tokens = segment.kv_tokens();
  call.rule.query_position = problem.causal_offset();
  cache_.SetKeys(segment.first_seen(), &call);
  segment.SetMask(&call);
  return engine_.Run(problem, call, execution);
}

absl::Status RelativeAttention::AppendFor(const SegmentView& segment,
                                          const ConstTensorView& keys_from,
                                          const SomeQueries& queries,
                                          const ConstTensorView& residual, const TensorView& y,
                                          const Execution& execution) {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
  Workspace workspace(execution.workspace);
  const RowScratch scratch = LayOutRows(segment.tokens(), queries.x.dim(0), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  const auto of_tokens = [&](int64_t n) {
    return Heads(Slice(scratch.keys_and_values, 2, n * width, width), heads);
  };
  TFB_RETURN_IF_ERROR(MatMul(projections_, {keys_from, {}, scratch.keys_and_values}, rest));
  TFB_RETURN_IF_ERROR(cache_.Append(of_tokens(0), of_tokens(1), rest));
  TFB_RETURN_IF_ERROR(MatMul(queries_, {queries.x, {}, scratch.q}, rest));

  FlashCall call = engine_.NewCall();
  call.q = SharedHeads(scratch.q, problem_.batch, heads);
  call.out = SharedHeads(scratch.context, problem_.batch, heads);
  call.query_order.tokens = queries.row_of_token;
  call.query_order.batch_stride = segment.tokens();
  TFB_RETURN_IF_ERROR(Attend(segment, call, rest));
  return Project(scratch.context, residual, y, rest);
}

absl::Status RelativeAttention::AppendForListed(const SegmentView& segment,
                                                const ConstTensorView& keys_from,
                                                const RowList& rows, const ConstTensorView& x,
                                                const ConstTensorView& residual,
                                                const TensorView& y, const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(const Attended attended, Attend(segment, keys_from, x, rows, {}, execution));
  return MatMul(output_, {attended.context, residual, y, Activation::kNone, rows}, attended.rest);
}

absl::Status RelativeAttention::Recall(const ConstTensorView& rows, const LayerNorm* norm,
                                       const Execution& execution) {
  const int64_t width = problem_.model_dim(), heads = problem_.query_heads;
  // The queries, which lie before keys and values, are computed for nothing.
  const int64_t skipped = queries_apart_ ? 0 : width;
  return InPieces(rows, reach_.max_segment, [&](ConstTensorView x) -> absl::Status {
    const Shape shape = {problem_.batch, x.dim(1), skipped + 2 * width};
    Workspace workspace(execution.workspace);
    const TensorView normalized(workspace.Take<float>(norm == nullptr ? 0 : x.num_elements()),
                                DType::kF32, x.shape());
    const TensorView projected(
        workspace.Take<std::byte>(NumElements(shape) * SizeOf(projected_dtype())),
        projected_dtype(), shape);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    if (norm != nullptr) {
      TFB_RETURN_IF_ERROR(norm->Run(x, normalized, rest));
      x = normalized;
    }
    TFB_RETURN_IF_ERROR(MatMul(projections_, {x, {}, projected}, rest));
    return cache_.Append(Heads(Slice(projected, 2, skipped, width), heads),
                         Heads(Slice(projected, 2, skipped + width, width), heads), rest);
  });
}

absl::Status RelativeAttention::Project(const ConstTensorView& context,
                                        const ConstTensorView& residual, const TensorView& y,
                                        const Execution& execution, Activation activation) const {
  return MatMul(output_, {context, residual, y, activation}, execution);
}

absl::Status RelativeAttention::Append(const SegmentView& segment, const ConstTensorView& x,
                                       const ConstTensorView& residual, const TensorView& y,
                                       const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(const Attended attended, Attend(segment, x, execution));
  return Project(attended.context, residual, y, attended.rest);
}

}  // namespace tfb::layers
