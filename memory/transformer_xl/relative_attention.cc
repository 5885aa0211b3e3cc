#include "memory/transformer_xl/relative_attention.h"

#include <algorithm>
#include <vector>

#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// [batch, tokens, heads * head_dim] as [batch, heads, tokens, head_dim].
template <class View>
View Heads(const View& view, int64_t heads) {
  return Transpose(SplitAxis(view, 2, heads), 1, 2);
}

struct Scratch {
  float* projections;  // [batch, tokens, 3 model_dim]: queries, keys, values
  float* context;      // [batch, tokens, model_dim]
};

Scratch LayOut(const Problem& problem, int64_t tokens, Workspace& workspace) {
  const int64_t rows = problem.batch * tokens;
  return {workspace.Take<float>(rows * 3 * problem.model_dim()),
          workspace.Take<float>(rows * problem.model_dim())};
}

}  // namespace

void SegmentView::Set(int64_t begin, int64_t tokens) {
  tokens_ = tokens;
  first_seen_ = reach_.FirstSeen(begin);
  const int64_t first_key = KeyValueCache::TileBegin(first_seen_);
  kv_tokens_ = begin + tokens - first_key;
  Band band;
  band.first_key = first_seen_ - first_key;
  band.high = begin - first_key;  // query i is key i + begin - first_key
  if (reach_.same_length) band.low = band.high - (reach_.memory - 1);
  schedule_ = &band_.Build(tokens, kv_tokens_, band);
}

absl::StatusOr<RelativeAttention> RelativeAttention::Create(Device device, const Problem& problem,
                                                            const MemoryReach& reach) {
  RelativeAttention attention(device, problem, reach);
  TFB_ASSIGN_OR_RETURN(attention.cache_,
                       KeyValueCache::Create(problem, reach.memory + reach.max_segment));
  return attention;
}

absl::Status RelativeAttention::Setup(const Parameters& parameters,
                                      const ConstTensorView& sinusoids,
                                      const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(projections_, PackedMatrix::Create(device_, {parameters.w_q, parameters.w_k,
                                                                    parameters.w_v}));
  TFB_ASSIGN_OR_RETURN(output_, PackedMatrix::Create(device_, parameters.w_o));
  u_ = parameters.u.At<float>(0);
  v_ = parameters.v.At<float>(0);

  Tensor projected(DType::kF32, sinusoids.shape());
  TFB_ASSIGN_OR_RETURN(const PackedMatrix w_r, PackedMatrix::Create(device_, parameters.w_r));
  TFB_RETURN_IF_ERROR(MatMul(w_r, {sinusoids, {}, projected.view()}, execution));
  const ConstTensorView by_head =
      Transpose(SplitAxis(ConstTensorView(projected.view()), 1, problem_.query_heads), 0, 1);
  const int64_t last = sinusoids.dim(0) - 1;
  distances_ = RelativeKeys(by_head, -reach_.max_distance(), 0,
                            [=](int64_t offset) { return std::min(-offset, last); });
  Reset();
  return absl::OkStatus();
}

ScoreRule RelativeAttention::Rule() const {
  ScoreRule rule;
  rule.content_bias = u_;
  rule.position_bias = v_;
  rule.relative_keys = &distances_;
  return rule;
}

size_t RelativeAttention::workspace_bytes(int threads) const {
  const int64_t rows = problem_.batch * reach_.max_segment, width = problem_.model_dim();
  return Workspace::Measure(
             [&](Workspace& workspace) { LayOut(problem_, reach_.max_segment, workspace); }) +
         std::max(MatMulWorkspaceBytes(device_, rows, width, 3 * width, threads),
                  FlashWorkspaceBytesPacked(problem_, /*relative_keys=*/true, threads));
}

absl::Status RelativeAttention::Append(const SegmentView& segment, const ConstTensorView& x,
                                       const ConstTensorView& residual, const TensorView& y,
                                       const Execution& execution) {
  const int64_t batch = problem_.batch, tokens = segment.tokens(), width = problem_.model_dim();
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(problem_, tokens, workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  const TensorView projections(scratch.projections, DType::kF32, {batch, tokens, 3 * width});
  const TensorView context(scratch.context, DType::kF32, {batch, tokens, width});
  const auto projection = [&](int64_t n) {
    return Heads(Slice(projections, 2, n * width, width), problem_.query_heads);
  };

  TFB_RETURN_IF_ERROR(MatMul(projections_, {x, {}, projections}, rest));
  cache_.Append(projection(1), projection(2), execution.pool);

  Problem problem = problem_;
  problem.query_tokens = tokens;
  problem.kv_tokens = segment.kv_tokens();
  FlashCall call;
  call.q = projection(0);
  call.packed = cache_.From(segment.first_seen());
  call.out = Heads(context, problem_.query_heads);
  call.schedule = &segment.schedule();
  call.rule = Rule();
  call.rule.query_position = problem.causal_offset();
  TFB_RETURN_IF_ERROR(FlashCpu(problem, call, rest));
  return MatMul(output_, {context, residual, y}, rest);
}

}  // namespace tfb
