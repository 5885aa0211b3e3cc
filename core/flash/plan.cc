#include "core/flash/plan.h"

#include <algorithm>

namespace tfb {

FlashPart& FlashPart::Tensors(std::string q_name, std::string k_name, std::string v_name) {
  q = std::move(q_name);
  k = std::move(k_name);
  v = std::move(v_name);
  return *this;
}

FlashPart& FlashPart::QueryOrder(std::vector<int32_t> tokens, int64_t orders) {
  query_order = {std::move(tokens), orders};
  causal = false;
  return *this;
}

FlashPart& FlashPart::KeyOrder(std::vector<int32_t> tokens, int64_t orders) {
  key_order = {std::move(tokens), orders};
  causal = false;
  return *this;
}

FlashPart& FlashPart::Share(std::shared_ptr<ScoreTerm> term) {
  terms.push_back(std::move(term));
  return *this;
}

bool FlashPart::has_relative_keys() const {
  return std::any_of(terms.begin(), terms.end(), [](const std::shared_ptr<ScoreTerm>& term) {
    return term->has_relative_keys();
  });
}

FlashPlan::FlashPlan(const Problem& problem, double scale) : problem_(problem), scale_(scale) {
  AddRows(TokenRange{0, problem.query_tokens});
  AddPart().causal = problem.causal;
}

FlashPlan FlashPlan::Empty(const Problem& problem) {
  FlashPlan plan(problem);
  plan.rows_.clear();
  return plan;
}

FlashPart& FlashPlan::AddPart() { return AddPart({0, problem_.kv_tokens}); }

FlashPart& FlashPlan::AddPart(const TokenRange& keys) {
  FlashPart& part = rows_.back().parts.emplace_back();
  part.keys = keys;
  return part;
}

void FlashPlan::AddRows(const TokenRange& queries) { rows_.push_back({queries, {}}); }

FlashPart& FlashPlan::AddRows(std::vector<int32_t> queries) {
  AddRows(TokenRange{0, queries.empty() ? 0 : problem_.query_tokens});
  return AddPart().QueryOrder(std::move(queries));
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
