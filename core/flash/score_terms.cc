#include "core/flash/score_terms.h"

#include <algorithm>
#include <limits>

#include "core/status.h"

namespace tfb {
namespace {

DistanceTable TableOf(const Problem& problem, const OfDistance& value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return DistanceTable(problem.query_heads, problem.query_tokens, problem.kv_tokens,
                       [&](int64_t head, int64_t offset) {
                         return static_cast<float>(
                             std::min(kLargest, value(head, problem.causal_offset() - offset)));
                       });
}

}  // namespace

absl::Status DistanceBias::Build(const Problem& problem, ThreadPool*) {
  table_ = TableOf(problem, bias_);
  return absl::OkStatus();
}

absl::Status ReluMultiplier::Build(const Problem& problem, ThreadPool*) {
  table_ = TableOf(problem, factor_);
  return absl::OkStatus();
}

absl::Status RelativeKeyTerm::Build(const Problem&, ThreadPool* pool) {
  TFB_ASSIGN_OR_RETURN(keys_, make_(pool));
  return absl::OkStatus();
}

LabelTerm::LabelTerm(const Tensor& vectors, const Tensor* biases, std::string ids)
    : has_vectors_(!vectors.empty()), biases_(biases), ids_(std::move(ids)) {
  if (has_vectors_) vectors_ = vectors.CloneAs(DType::kF32);
}

absl::Status LabelTerm::Build(const Problem& problem, ThreadPool*) {
  if (has_vectors_) return absl::OkStatus();
  TFB_ASSIGN_OR_RETURN(
      vectors_, Tensor::Allocate(DType::kF32, Shape{problem.query_heads, 2, problem.head_dim}));
  Fill(vectors_.view(), 0);
  return absl::OkStatus();
}

void LabelTerm::AddTo(ScoreRule* rule) const {
  rule->label_keys = {vectors_.span<float>().data(), vectors_.dim(0),
                      biases_ == nullptr ? nullptr : biases_->span<float>().data()};
}

void LabelTerm::Bind(const Inputs& inputs, const TokenRange& queries, const TokenRange& keys,
                     FlashCall* call) const {
  const ConstTensorView ids = inputs.Get(ids_);
  call->query_ids = Slice(ids, 1, queries.begin, queries.size());
  call->key_ids = Slice(ids, 1, keys.begin, keys.size());
}

void SpanTerm::AddTo(ScoreRule* rule) const {
  if (!name_.empty()) return;
  rule->soft_span.span = spans_.data();
  rule->soft_span.count = static_cast<int64_t>(spans_.size());
  rule->soft_span.head_stride = 1;
  rule->soft_span.ramp = ramp_;
}

void SpanTerm::Bind(const Inputs& inputs, const TokenRange&, const TokenRange&,
                    FlashCall* call) const {
  if (name_.empty()) return;
  const ConstTensorView spans = inputs.Get(name_);
  call->rule.soft_span = {static_cast<const float*>(spans.data),
                          spans.num_elements(),
                          spans.stride(0),
                          spans.stride(1),
                          spans.stride(2),
                          ramp_};
}

void TokenSlots::Bind(const Inputs& inputs, const TokenRange&, const TokenRange&,
                      FlashCall* call) const {
  const ConstTensorView codes = inputs.Get(query_codes_);
  TokenRule& rule = call->rule.tokens;
  rule.own = own_;
  rule.counts = counts_;
  rule.query_codes = static_cast<const int32_t*>(codes.data);
  rule.key_codes = static_cast<const int32_t*>(inputs.Get(key_codes_).data);
  rule.slots = codes.dim(0);
  rule.slot_stride = codes.stride(0);
  rule.batch_stride = codes.stride(1);
  rule.head_stride = codes.stride(2);
}

}  // namespace tfb
