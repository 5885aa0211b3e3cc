#include "memory/transformer_xl/relative_attention.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

// [batch, tokens, heads * head_dim] as [batch, heads, tokens, head_dim].
template <class View>
View Heads(const View& view, int64_t heads) {
  return Transpose(SplitAxis(view, 2, heads), 1, 2);
}

}  // namespace

MemoryReach::Context MemoryReach::ContextOf(int64_t tokens, int64_t layers) const {
  const auto first_seen = [&](int64_t p) {
    const int64_t from = same_length ? p + 1 : p / max_segment * max_segment;
    return std::max<int64_t>(0, from - memory);
  };
  Context context;
  for (int64_t p = 0; p < tokens; ++p) context.pairs += static_cast<double>(p - first_seen(p) + 1);
  int64_t farthest = tokens - 1;
  for (int64_t n = 0; n < layers && tokens > 0; ++n) farthest = first_seen(farthest);
  context.reach = tokens == 0 ? 0 : tokens - 1 - farthest;
  return context;
}

void SegmentView::Set(int64_t begin, int64_t tokens) {
  tokens_ = tokens;
  first_seen_ = reach_.FirstSeen(begin);
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
          {parameter(own, "w_r"), parameter(biases, "u"), parameter(biases, "v")}};
}

absl::StatusOr<RelativeAttention> RelativeAttention::Create(Device device, const Problem& problem,
                                                            const MemoryReach& reach) {
  RelativeAttention attention(device, problem, reach);
  TFB_ASSIGN_OR_RETURN(attention.cache_,
                       KeyValueCache::Create(device, problem, reach.memory + reach.max_segment));
  return attention;
}

absl::Status RelativeAttention::Setup(const Parameters& parameters, const DistanceRange& range,
                                      const ConstTensorView& sinusoids,
                                      const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(projections_, PackedMatrix::Create(device_, {parameters.w_q, parameters.w_k,
                                                                    parameters.w_v}));
  TFB_ASSIGN_OR_RETURN(output_, PackedMatrix::Create(device_, parameters.w_o));
  TFB_ASSIGN_OR_RETURN(positions_,
                       RelativePositions::Create(parameters.positions, range, sinusoids,
                                                 /*here=*/0, DType::kF32, execution.pool));
  ScoreRule rule;
  positions_.AddTo(&rule);
  TFB_ASSIGN_OR_RETURN(engine_, FlashEngine::CreateForStream(device_, LargestCall(), rule));
  Reset();
  return absl::OkStatus();
}

Problem RelativeAttention::LargestCall() const {
  Problem largest = problem_;
  largest.query_tokens = reach_.max_segment;
  // A window begins within its first tile.
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

size_t RelativeAttention::workspace_bytes(int threads, size_t rest_bytes) const {
  const int64_t rows = problem_.batch * reach_.max_segment, width = problem_.model_dim();
  return Workspace::Measure([&](Workspace& workspace) { LayOut(reach_.max_segment, workspace); }) +
         std::max({rest_bytes, MatMulWorkspaceBytes(device_, rows, width, 3 * width, threads),
                   FlashEngine::StreamWorkspaceBytes(device_, LargestCall(), /*relative_keys=*/true,
                                                     threads)});
}

absl::StatusOr<RelativeAttention::Attended> RelativeAttention::Attend(const SegmentView& segment,
                                                                      const ConstTensorView& x,
                                                                      const Execution& execution) {
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

  TFB_RETURN_IF_ERROR(MatMul(projections_, {x, {}, scratch.projections}, attended.rest));
  TFB_RETURN_IF_ERROR(cache_.Append(attended.k, attended.v, attended.rest));

  Problem problem = problem_;
  problem.query_tokens = segment.tokens();
  problem.kv_tokens = segment.kv_tokens();
  FlashCall call = engine_.NewCall();
  call.q = attended.q;
  call.out = attended.heads;
  call.rule.query_position = problem.causal_offset();
  cache_.SetKeys(segment.first_seen(), &call);
  segment.SetMask(&call);
  TFB_RETURN_IF_ERROR(engine_.Run(problem, call, attended.rest));
  return attended;
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

}  // namespace tfb
