#include "core/flash/plan.h"

#include <algorithm>

namespace tfb {

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
  rows_.push_back({queries, {}});
  return *this;
}

FlashPlan& FlashPlan::AddRows(std::vector<int32_t> queries) {
  AddRows(TokenRange{0, queries.empty() ? 0 : problem_.query_tokens});
  return AddPart().QueryOrder(std::move(queries));
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

Problem FlashPlan::ProblemOf(const FlashRows& rows, const FlashPart& part) const {
  Problem problem = problem_;
  const auto places = [](const PlaceOrder& order, const TokenRange& tokens) {
    return order.tokens.empty() ? tokens.size() : order.places();
  };
  problem.query_tokens = places(part.query_order, rows.queries);
  problem.kv_tokens = places(part.key_order, part.keys);
  problem.causal = part.causal;
  return problem;
}

}  // namespace tfb
