#include "core/flash/plan.h"

#include <algorithm>

namespace tfb {

std::shared_ptr<const Pattern> FlashPart::seen() const {
  return pattern != nullptr ? pattern : std::make_shared<FullPattern>();
}

ScoreSums FlashPart::sums() const {
  ScoreSums sums = key_order.empty() ? ScoreSums() : ScoreSums::OfKeyOrder();
  for (const std::shared_ptr<ScoreTerm>& term : terms) sums |= term->sums();
  return sums;
}

bool FlashPart::has_relative_keys() const {
  return std::any_of(terms.begin(), terms.end(), [](const std::shared_ptr<ScoreTerm>& term) {
    return term->has_relative_keys();
  });
}

FlashPlan::FlashPlan(const Problem& problem, double scale) : problem_(problem), scale_(scale) {
  AddRows(TokenRange{0, problem.query_tokens}).AddPart().part().causal = problem.causal;
}

FlashPlan FlashPlan::Empty(const Problem& problem) {
  FlashPlan plan(problem);
  plan.rows_.clear();
  return plan;
}

FlashPlan& FlashPlan::AddPart() { return AddPart({0, problem_.kv_tokens}); }

FlashPlan& FlashPlan::AddPart(const TokenRange& keys) {
  rows_.back().parts.emplace_back().keys = keys;
  return *this;
}

FlashPlan& FlashPlan::AddRows(const TokenRange& queries) {
  FlashRows& rows = rows_.emplace_back();
  rows.queries = queries;
  rows.heads = {0, problem_.query_heads};
  rows.scale = scale_;
  rows.dtype = problem_.dtype;
  return *this;
}

FlashPlan& FlashPlan::AddRows(std::vector<int32_t> queries) {
  AddRows(TokenRange{0, queries.empty() ? 0 : problem_.query_tokens});
  return AddPart().QueryOrder(std::move(queries));
}

FlashPlan& FlashPlan::AddMarkedRows(const MarkedQueries& queries) {
  AddRows(TokenRange{0, queries.most > 0 ? problem_.query_tokens : 0});
  rows_.back().marked = queries;
  return AddPart();
}

FlashPlan& FlashPlan::Heads(const TokenRange& heads) {
  rows_.back().heads = heads;
  return *this;
}

FlashPlan& FlashPlan::Scale(double scale) {
  rows_.back().scale = scale;
  return *this;
}

FlashPlan& FlashPlan::Precision(DType dtype) {
  rows_.back().dtype = dtype;
  return *this;
}

FlashPlan& FlashPlan::Writes(std::string out, std::string log_sum_exp, bool by_place) {
  rows_.back().out = std::move(out);
  rows_.back().log_sum_exp = std::move(log_sum_exp);
  rows_.back().out_by_place = by_place;
  return *this;
}

FlashPlan& FlashPlan::Tensors(std::string q, std::string k, std::string v) {
  part().q = std::move(q);
  part().k = std::move(k);
  part().v = std::move(v);
  return *this;
}

FlashPlan& FlashPlan::QueryOrder(std::vector<int32_t> tokens, int64_t orders) {
  part().query_order = {std::move(tokens), orders};
  part().causal = false;
  return *this;
}

FlashPlan& FlashPlan::KeyOrder(std::vector<int32_t> tokens, int64_t orders) {
  part().key_order = {std::move(tokens), orders};
  part().causal = false;
  return *this;
}

FlashPlan& FlashPlan::QueryOrder(std::string tensor, int64_t places) {
  part().query_order = {{}, 1, std::move(tensor), places};
  return *this;
}

FlashPlan& FlashPlan::KeyOrder(std::string tensor, int64_t places) {
  part().key_order = {{}, 1, std::move(tensor), places};
  return *this;
}

FlashPlan& FlashPlan::Causal() {
  part().causal = problem_.causal;
  return *this;
}

FlashPlan& FlashPlan::KeyMask(std::string tensor) {
  part().key_mask = std::move(tensor);
  return *this;
}

FlashPlan& FlashPlan::Share(std::shared_ptr<ScoreTerm> term) {
  part().terms.push_back(std::move(term));
  return *this;
}

FlashPlan& FlashPlan::HidePairs(MaskInput mask) {
  part().mask = std::move(mask);
  return *this;
}

FlashPlan& FlashPlan::ShareStep(std::shared_ptr<FlashStep> step) {
  steps_.push_back(std::move(step));
  return *this;
}

FlashPlan& FlashPlan::StopGradient(std::string name, std::string reason) {
  stopped_gradients_[std::move(name)] = std::move(reason);
  return *this;
}

Problem FlashPlan::ProblemOf(const FlashRows& rows, const FlashPart& part, Device device) const {
  Problem problem = problem_;
  const auto places = [](const PlaceOrder& order, const TokenRange& tokens) {
    return order.empty() ? tokens.size() : order.places();
  };
  const bool is_marked = !rows.marked.tensor.empty();
  problem.query_tokens = is_marked && device == Device::kCpu
                             ? rows.marked.most
                             : places(part.query_order, rows.queries);
  problem.kv_tokens = places(part.key_order, part.keys);
  problem.dtype = rows.dtype;
  problem.query_heads = rows.heads.size();
  problem.kv_heads = rows.heads.size() / problem_.group();
  problem.causal = part.causal && !is_marked && !part.has_tensor_order();
  return problem;
}

}  // namespace tfb
