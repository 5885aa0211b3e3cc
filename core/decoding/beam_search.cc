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

// The hypotheses that are finished, by the rule of the options.
class Finished {
 public:
  explicit Finished(const BeamSearchOptions& options)
      : options_(options), beam_(static_cast<size_t>(options.beam)) {}

  // Tells whether a candidate with the end symbol may finish, by its rank from 0.
  bool Admits(size_t rank) const { return !is_fairseq() || rank < beam_; }

  void Add(Hypothesis hypothesis) {
    if (hypotheses_.size() == beam_) {
      if (is_fairseq() && options_.early_stopping) return;
      const auto worst = Worst();
      if (ScoreOf(hypothesis) <= ScoreOf(*worst)) return;
      hypotheses_.erase(worst);
    }
    hypotheses_.push_back(std::move(hypothesis));
  }

  // Tells whether the search is over where these, best first, are alive.
  bool IsOver(const std::vector<Hypothesis>& alive) const {
    if (alive.empty()) return true;
    const bool full = hypotheses_.size() == beam_;
    if (is_fairseq() && options_.early_stopping) return full;
    const double bound =
        alive[0].log_probability /
        LengthPenalty(options_.max_length, options_.length_penalty, options_.normalisation);
    if (is_fairseq()) return full && ScoreOf(*Worst()) >= bound;
    if (!options_.early_stopping) return full && ScoreOf(*Worst()) > bound;
    return std::any_of(hypotheses_.begin(), hypotheses_.end(),
                       [&](const Hypothesis& one) { return ScoreOf(one) > bound; });
  }

  double ScoreOf(const Hypothesis& hypothesis) const {
    return Score(hypothesis, options_.length_penalty, options_.normalisation);
  }
  std::vector<Hypothesis>& hypotheses() { return hypotheses_; }

 private:
  bool is_fairseq() const { return options_.finishing == BeamSearchOptions::Finishing::kFairseq; }
  // Returns the last of those of the lowest score.
  std::vector<Hypothesis>::const_iterator Worst() const {
    auto worst = hypotheses_.begin();
    for (auto one = hypotheses_.begin(); one != hypotheses_.end(); ++one) {
      if (ScoreOf(*one) <= ScoreOf(*worst)) worst = one;
    }
    return worst;
  }

  const BeamSearchOptions& options_;
  size_t beam_;
  std::vector<Hypothesis> hypotheses_;
};

// Leaves the end symbol alone possible after each of the hypotheses.
void ForceEnd(int64_t symbols, int64_t end_symbol, std::vector<double>* next) {
  for (size_t n = 0; n < next->size(); ++n) {
    if (static_cast<int64_t>(n) % symbols != end_symbol) (*next)[n] = kImpossible;
  }
}

}  // namespace

double LengthPenalty(int64_t length, double alpha, Normalisation normalisation) {
  const double n = static_cast<double>(length);
  return std::pow(normalisation == Normalisation::kGnmt ? (5 + n) / 6 : n, alpha);
}

double Score(const Hypothesis& hypothesis, double alpha, Normalisation normalisation) {
  return hypothesis.log_probability /
         LengthPenalty(static_cast<int64_t>(hypothesis.symbols.size()), alpha, normalisation);
}

absl::StatusOr<std::vector<Hypothesis>> BeamSearch(const BeamSearchOptions& options,
                                                   int64_t symbols, NextLogProbabilities next) {
  TFB_RETURN_IF_ERROR(Check(options, symbols));
  const size_t beam = static_cast<size_t>(options.beam);
  std::vector<Hypothesis> alive(1);
  Finished finished(options);
  std::vector<double> log_probabilities;
  for (int64_t length = 0; length < options.max_length; ++length) {
    if (finished.IsOver(alive)) break;
    log_probabilities.assign(alive.size() * static_cast<size_t>(symbols), kImpossible);
    TFB_RETURN_IF_ERROR(next(alive, absl::MakeSpan(log_probabilities)));
    if (options.force_end && length + 1 == options.max_length) {
      ForceEnd(symbols, options.end_symbol, &log_probabilities);
    }
    TFB_ASSIGN_OR_RETURN(const std::vector<Candidate> candidates,
                         Extensions(alive, log_probabilities, symbols, 2 * beam));
    std::vector<Hypothesis> extended;
    for (size_t rank = 0; rank < candidates.size(); ++rank) {
      const Candidate& candidate = candidates[rank];
      const bool ends = candidate.symbol == options.end_symbol;
      if (ends ? !finished.Admits(rank) : extended.size() == beam) continue;
      Hypothesis hypothesis = alive[candidate.from];
      hypothesis.symbols.push_back(candidate.symbol);
      hypothesis.log_probability = candidate.log_probability;
      hypothesis.finished = ends;
      if (ends) {
        finished.Add(std::move(hypothesis));
      } else {
        extended.push_back(std::move(hypothesis));
      }
    }
    alive = std::move(extended);
  }
  std::vector<Hypothesis>& best = finished.hypotheses().empty() ? alive : finished.hypotheses();
  if (best.size() == 1 && best[0].symbols.empty()) best.clear();
  std::stable_sort(best.begin(), best.end(), [&](const Hypothesis& a, const Hypothesis& b) {
    return finished.ScoreOf(a) > finished.ScoreOf(b);
  });
  return std::move(best);
}

}  // namespace tfb
