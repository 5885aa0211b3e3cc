#include "core/retrieval/retrieval_definition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tfb {
namespace {

constexpr double kNotFound = std::numeric_limits<double>::infinity();
// Squares of queries' and keys' norms that take part in a search.
constexpr double kMaxSquare = 0x1p120;
// A difference of floats is rounded once; its square has twice that error and a little more.
constexpr double kRounding = 2.01 * 0x1p-24;

}  // namespace

NeighbourDefinition::NeighbourDefinition(const RetrievalOptions& options,
                                         const NamedTensors& parameters, const Inputs& inputs,
                                         const DefinitionRequest& request)
    : options_(options),
      keys_(parameters.at("datastore.keys").view()),
      context_(inputs.Get("context")),
      given_(inputs.Get("neighbours")) {
  for (int64_t e = 0; e < options.entries; ++e) {
    const double square = Dot(Key(e), Key(e), keys_.channels());
    may_be_found_.push_back(square <= kMaxSquare);  // NaN is not
  }
  if (request.computed == nullptr) return;
  const auto found = request.computed->find("neighbours");
  if (found != request.computed->end()) computed_ = found->second.view();
}

std::vector<Neighbour> NeighbourDefinition::Find(int64_t b, int64_t i) const {
  std::vector<Neighbour> neighbours(options_.k);
  if (options_.k == 0) return neighbours;
  if (!given_.empty()) {
    for (int64_t n = 0; n < options_.k; ++n) {
      const int64_t entry = *given_.At<int32_t>(b, i, n);
      if (entry < 0 || entry >= options_.entries) continue;
      neighbours[n] = {entry, Distance(context_.Row(b, i), entry)};
    }
    return neighbours;
  }
  const std::vector<double> distances = DistancesTo(context_.Row(b, i));
  std::vector<int64_t> found = Nearest(distances);
  const int32_t* computed = computed_.empty() ? nullptr : computed_.At<int32_t>(b, i);
  if (computed != nullptr && IsRight(distances, found, computed)) {
    found.assign(computed, computed + options_.k);
  }
  for (int64_t n = 0; n < options_.k; ++n) {
    if (found[n] >= 0) neighbours[n] = {found[n], distances[found[n]]};
  }
  return neighbours;
}

std::vector<int64_t> NeighbourDefinition::Nearest(const std::vector<double>& distances) const {
  std::vector<int64_t> order(distances.size());
  std::iota(order.begin(), order.end(), 0);
  const int64_t count = std::min(options_.k, options_.entries);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
    return distances[a] != distances[b] ? distances[a] < distances[b] : a < b;
  });
  order.resize(count);
  for (int64_t& entry : order) {
    if (distances[entry] == kNotFound) entry = -1;
  }
  order.resize(options_.k, -1);
  return order;
}

double NeighbourDefinition::Distance(const double* context, int64_t entry) const {
  const int64_t dim = keys_.channels();
  const double* key = Key(entry);
  double sums[kDotLanes] = {};  // as in Dot
  int64_t c = 0;
  for (; c + kDotLanes <= dim; c += kDotLanes) {
    for (int64_t n = 0; n < kDotLanes; ++n) {
      sums[n] += (context[c + n] - key[c + n]) * (context[c + n] - key[c + n]);
    }
  }
  double distance = 0;
  for (const double of_lane : sums) distance += of_lane;
  for (; c < dim; ++c) distance += (context[c] - key[c]) * (context[c] - key[c]);
  return distance;
}

std::vector<double> NeighbourDefinition::DistancesTo(const double* context) const {
  const int64_t dim = keys_.channels();
  const bool may_find = Dot(context, context, dim) <= kMaxSquare;  // NaN may not
  std::vector<double> distances(options_.entries, kNotFound);
  for (int64_t e = 0; may_find && e < options_.entries; ++e) {
    if (may_be_found_[e]) distances[e] = Distance(context, e);
  }
  return distances;
}

bool NeighbourDefinition::MayPrecede(const std::vector<double>& distances, int64_t a,
                                     int64_t b) const {
  if (distances[a] * (1 - kRounding) > distances[b] * (1 + kRounding)) return false;
  const bool equal =
      distances[a] == distances[b] && std::equal(Key(a), Key(a) + keys_.channels(), Key(b));
  return a < b || !equal;
}

bool NeighbourDefinition::IsRight(const std::vector<double>& distances,
                                  const std::vector<int64_t>& found,
                                  const int32_t* computed) const {
  std::vector<bool> is_chosen(distances.size(), false);
  int64_t last = -1;
  for (int64_t n = 0; n < options_.k; ++n) {
    const int64_t entry = computed[n];
    if (entry >= options_.entries) return false;
    // An approximate search may find fewer entries than are nearest.
    if (options_.exact && (entry < 0) != (found[n] < 0)) return false;
    if (entry < 0) continue;
    if (n > 0 && computed[n - 1] < 0) return false;
    if (is_chosen[entry] || distances[entry] == kNotFound) return false;
    if (last >= 0 && !MayPrecede(distances, last, entry)) return false;
    is_chosen[entry] = true;
    last = entry;
  }
  for (int64_t e = 0; options_.exact && last >= 0 && e < options_.entries; ++e) {
    if (!is_chosen[e] && !MayPrecede(distances, last, e)) return false;
  }
  return true;
}

std::vector<double> LogProbabilities(const DoubleTensor& output, const RetrievalOptions& options,
                                     const double* state, int64_t dim) {
  std::vector<double> logits;
  double max = kNotSeen;
  for (int64_t y = 0; y < options.vocabulary; ++y) {
    logits.push_back(Dot(output.Row(y), state, dim));
    max = std::max(max, logits.back());
  }
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - max);
  for (double& logit : logits) logit = (logit - max) - std::log(sum);
  return logits;
}

}  // namespace tfb
