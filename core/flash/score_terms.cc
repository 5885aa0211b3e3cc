#include "core/flash/score_terms.h"

#include <algorithm>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/status.h"

namespace tfb {
namespace {

// Adds the slopes of a number by the elements of parameters that it was computed from.
void AddSlopes(const Traced& value, int64_t number, const ParameterGradients& gradients,
               std::vector<GradientMap::Slope>* slopes) {
  for (const Traced::Derivative& d : value.derivatives()) {
    const int64_t element = gradients.PlaceOf(d.element);
    if (element >= 0) slopes->push_back({element, number, d.value});
  }
}

}  // namespace

void TracedTable::Build(const Problem& problem) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  problem_ = problem;
  table_ = DistanceTable(problem.query_heads, problem.query_tokens, problem.kv_tokens,
                         [&](int64_t head, int64_t offset) {
                           return static_cast<float>(std::min(
                               kLargest, value_(head, problem.causal_offset() - offset).value()));
                         });
}

void TracedTable::LayOutGradients(const Problem& problem, Workspace* workspace) {
  sums_ = workspace->Take<float>(problem.query_heads *
                                 DistanceTable::Row(problem.query_tokens, problem.kv_tokens));
}

absl::Status TracedTable::SetUpGradients(Device device, const ParameterGradients& gradients) {
  const DistanceEntries entries = table_.entries();
  std::vector<GradientMap::Slope> slopes;
  for (int64_t h = 0; h < problem_.query_heads; ++h) {
    for (int64_t offset = 1 - problem_.query_tokens; offset < problem_.kv_tokens; ++offset) {
      AddSlopes(value_(h, problem_.causal_offset() - offset),
                h * entries.row + entries.zero + offset, gradients, &slopes);
    }
  }
  TFB_ASSIGN_OR_RETURN(map_, GradientMap::Create(device, std::move(slopes)));
  return absl::OkStatus();
}

absl::Status DistanceBias::Build(const Problem& problem, ThreadPool*) {
  table_.Build(problem);
  return absl::OkStatus();
}

absl::Status ReluMultiplier::Build(const Problem& problem, ThreadPool*) {
  table_.Build(problem);
  return absl::OkStatus();
}

absl::Status RelativeKeyTerm::Build(const Problem&, ThreadPool* pool) {
  TFB_ASSIGN_OR_RETURN(keys_, make_(pool));
  is_built_ = true;
  return absl::OkStatus();
}

void RelativeKeySums::LayOut(const Problem& problem, const RelativeKeys* keys,
                             Workspace* workspace) {
  query_heads_ = problem.query_heads;
  head_dim_ = problem.head_dim;
  row_ = RoundUp(problem.head_dim, kColumnQuantum);
  const int64_t offsets =
      std::max<int64_t>(keys != nullptr ? keys->high() - keys->low() + 1
                                        : problem.query_tokens + problem.kv_tokens - 1,
                        0);
  data_ = workspace->Take<float>(query_heads_ * offsets * row_);
}

absl::Status RelativeKeyTerm::SetUpGradients(Device device, const ParameterGradients& gradients) {
  std::vector<GradientMap::Slope> slopes;
  for (int64_t h = 0; h < sums_.query_heads(); ++h) {
    for (int64_t offset = keys_.low(); offset <= keys_.high(); ++offset) {
      const int64_t vector = gradients.PlaceOf(keys_.ElementOf(h, offset));
      if (vector >= 0) slopes.push_back({vector, sums_.PlaceOf(keys_, h, offset), 1});
    }
  }
  TFB_ASSIGN_OR_RETURN(map_, GradientMap::Create(device, std::move(slopes), sums_.head_dim(),
                                                 keys_.channel_stride()));
  return absl::OkStatus();
}

LabelTerm::LabelTerm(const Tensor& vectors, const Tensor* biases, std::string ids)
    : has_vectors_(!vectors.empty()), biases_(biases), ids_(std::move(ids)) {
  if (!has_vectors_) return;
  parameter_ = vectors.view();
  vectors_ = vectors.CloneAs(DType::kF32);
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

void LabelTerm::LayOutGradients(Device, const Problem& problem, Workspace* workspace) {
  of_sums_ = {problem.query_heads, 2, problem.head_dim};
  vector_sums_ = workspace->Take<float>(NumElements(of_sums_));
  bias_sums_ = workspace->Take<float>(problem.query_heads * 2);
}

absl::Status LabelTerm::SetUpGradients(Device device, const ParameterGradients& gradients) {
  std::vector<GradientMap::Slope> of_vectors, of_biases;
  for (int64_t n = 0; n < of_sums_[0] * 2; ++n) {
    const int64_t h = n / 2, label = n % 2;
    if (has_vectors_) {
      const int64_t element = parameter_.Offset(h % parameter_.dim(0), label);
      const int64_t vector = gradients.PlaceOf(static_cast<const std::byte*>(parameter_.data) +
                                               element * SizeOf(parameter_.dtype));
      if (vector >= 0) of_vectors.push_back({vector, n * of_sums_[2], 1});
    }
    if (biases_ == nullptr) continue;
    const int64_t bias = gradients.PlaceOf(biases_->view().At<float>(h % biases_->dim(0), label));
    if (bias >= 0) of_biases.push_back({bias, n, 1});
  }
  TFB_ASSIGN_OR_RETURN(vector_map_,
                       GradientMap::Create(device, std::move(of_vectors), of_sums_[2]));
  TFB_ASSIGN_OR_RETURN(bias_map_, GradientMap::Create(device, std::move(of_biases)));
  return absl::OkStatus();
}

absl::Status LabelTerm::AddGradients(const ParameterGradients& gradients,
                                     const Execution& execution) const {
  TFB_RETURN_IF_ERROR(vector_map_.Add(vector_sums_, gradients.sums(), execution));
  return bias_map_.Add(bias_sums_, gradients.sums(), execution);
}

SpanTerm::SpanTerm(std::vector<Traced> spans, double ramp)
    : traced_(std::move(spans)), ramp_(static_cast<float>(ramp)) {
  for (const Traced& span : traced_) spans_.push_back(static_cast<float>(span.value()));
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

void SpanTerm::LayOutGradients(Device, const Problem& problem, Workspace* workspace) {
  if (!name_.empty()) return;
  of_sums_ = {problem.batch, problem.query_heads, problem.query_tokens};
  sums_ = workspace->Take<float>(NumElements(of_sums_));
}

void SpanTerm::BindGradients(const Outputs& tensors, ScoreGradients* gradients) const {
  gradients->span = name_.empty() ? sums_ : static_cast<float*>(tensors.Get(name_).mutable_data());
}

absl::Status SpanTerm::SetUpGradients(Device device, const ParameterGradients& gradients) {
  if (!name_.empty()) return absl::OkStatus();
  std::vector<GradientMap::Slope> slopes;
  for (int64_t n = 0; n < NumElements(of_sums_); ++n) {
    AddSlopes(traced_[n / of_sums_[2] % of_sums_[1]], n, gradients, &slopes);
  }
  TFB_ASSIGN_OR_RETURN(map_, GradientMap::Create(device, std::move(slopes)));
  return absl::OkStatus();
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
