#include "core/decoding/beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr double kImpossible = -std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-4;  // rounding of log-softmax in fp32, for a probability of 1

absl::Status OutOfRange(absl::string_view name, double value, absl::string_view range) {
  return absl::InvalidArgumentError(
      absl::StrCat("beam search: ", name, " is ", value, "; allowed is ", range));
}

absl::Status Check(const BeamSearchOptions& options, int64_t symbols) {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  if (symbols < 1) return OutOfRange("symbols", number(symbols), "1 or more");
  if (options.beam < 1) return OutOfRange("beam", number(options.beam), "1 or more");
  if (options.max_length < 1) {
    return OutOfRange("max_length", number(options.max_length), "1 or more");
  }
  if (!(options.length_penalty >= 0) || std::isinf(options.length_penalty)) {
    return OutOfRange("length_penalty", options.length_penalty, "0 or more");
  }
  if (options.end_symbol < 0 || options.end_symbol >= symbols) {
    return OutOfRange("end_symbol", number(options.end_symbol), absl::StrCat("0 to ", symbols - 1));
  }
  return absl::OkStatus();
}

// The extension of hypothesis `from` by a symbol.
struct Candidate {
  size_t from;
  int64_t symbol;
  double log_probability;
};

// Returns the best `count` extensions, best first. A symbol of probability 0 gives no candidate.
absl::StatusOr<std::vector<Candidate>> Extensions(const std::vector<Hypothesis>& alive,
                                                  absl::Span<const double> next, int64_t symbols,
                                                  size_t count) {
  std::vector<Candidate> candidates;
  for (size_t from = 0; from < alive.size(); ++from) {
    for (int64_t symbol = 0; symbol < symbols; ++symbol) {
      const double added = next[from * static_cast<size_t>(symbols) + symbol];
      if (!(added <= kRounding)) {
        return OutOfRange(absl::StrCat("the log-probability of symbol ", symbol), added,
                          "0 or less");
      }
      if (added == kImpossible) continue;
      candidates.push_back({from, symbol, alive[from].log_probability + added});
    }
  }
  const auto better = [](const Candidate& a, const Candidate& b) {
    if (a.log_probability != b.log_probability) return a.log_probability > b.log_probability;
    return a.from != b.from ? a.from < b.from : a.symbol < b.symbol;
  };
  const size_t kept = std::min(count, candidates.size());
  std::partial_sort(candidates.begin(), candidates.begin() + kept, candidates.end(), better);
  candidates.resize(kept);
  return candidates;
}

}  // namespace

double LengthPenalty(int64_t length, double alpha) {
  return std::pow((5 + static_cast<double>(length)) / 6, alpha);
}

double Score(const Hypothesis& hypothesis, double alpha) {
  return hypothesis.log_probability /
         LengthPenalty(static_cast<int64_t>(hypothesis.symbols.size()), alpha);
}

absl::StatusOr<std::vector<Hypothesis>> BeamSearch(const BeamSearchOptions& options,
                                                   int64_t symbols, NextLogProbabilities next) {
  TFB_RETURN_IF_ERROR(Check(options, symbols));
  const size_t beam = static_cast<size_t>(options.beam);
  std::vector<Hypothesis> alive(1), finished;
  std::vector<double> log_probabilities;
  for (int64_t length = 0; length < options.max_length; ++length) {
    if (alive.empty() || finished.size() >= beam) break;
    log_probabilities.assign(alive.size() * static_cast<size_t>(symbols), kImpossible);
    TFB_RETURN_IF_ERROR(next(alive, absl::MakeSpan(log_probabilities)));
    TFB_ASSIGN_OR_RETURN(const std::vector<Candidate> candidates,
                         Extensions(alive, log_probabilities, symbols, 2 * beam));
    std::vector<Hypothesis> extended;
    for (size_t rank = 0; rank < candidates.size(); ++rank) {
      const Candidate& candidate = candidates[rank];
      const bool ends = candidate.symbol == options.end_symbol;
      if (ends ? rank >= beam : extended.size() == beam) continue;
      Hypothesis hypothesis = alive[candidate.from];
      hypothesis.symbols.push_back(candidate.symbol);
      hypothesis.log_probability = candidate.log_probability;
      hypothesis.finished = ends;
      (ends ? finished : extended).push_back(std::move(hypothesis));
    }
    alive = std::move(extended);
  }
  std::vector<Hypothesis>& best = finished.empty() ? alive : finished;
  if (best.size() == 1 && best[0].symbols.empty()) best.clear();
  std::stable_sort(best.begin(), best.end(), [&](const Hypothesis& a, const Hypothesis& b) {
    return Score(a, options.length_penalty) > Score(b, options.length_penalty);
  });
  if (best.size() > beam) best.resize(beam);
  return std::move(best);
}

}  // namespace tfb
