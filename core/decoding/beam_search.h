// Beam search for the most likely sequence of symbols, with a length penalty.
//
//   score(Y) = log P(Y) / lp(Y),  lp(Y) = ((5 + |Y|) / 6)^alpha,  log P(Y) = sum log p(y_t | y_<t)
//
// |Y| counts the symbols, the end symbol among them. alpha 0 leaves the log-probability, which
// longer sequences only lower; a larger one makes up for it.
//
// Every step extends each of the `beam` hypotheses that are alive by every symbol and ranks the
// extensions by log P; ties go to the hypothesis that ranked higher, then to the lower symbol.
// Extensions among the best `beam` with the end symbol are finished; the best `beam` of the
// others stay alive. 2 beam candidates hold them all, since at most one extension of a hypothesis
// ends. The search is over when `beam` are finished, none is alive, or max_length is reached.
//
//   beam = 1                        greedy decoding
//   beam >= symbols^max_length      every sequence: exact
//
// Source: Wu et al. 2016, "Google's neural machine translation system", arXiv:1609.08144v2, section
// 7, equation 14, without its coverage penalty; finishing as in fairseq. Not followed:
// Tensor2Tensor also finishes candidates behind the best `beam`, and goes on while an alive one may
// still score higher, so that its beam of 1 may end elsewhere than greedy decoding.
#ifndef TFB_CORE_DECODING_BEAM_SEARCH_H_
#define TFB_CORE_DECODING_BEAM_SEARCH_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tfb {

struct BeamSearchOptions {
  int64_t beam = 4;             // at least 1
  double length_penalty = 0.6;  // alpha, at least 0
  int64_t max_length = 50;      // symbols, the end symbol among them; at least 1
  int64_t end_symbol = 0;
};

struct Hypothesis {
  std::vector<int64_t> symbols;
  double log_probability = 0;
  bool finished = false;  // it ends with the end symbol
};

double LengthPenalty(int64_t length, double alpha);
double Score(const Hypothesis& hypothesis, double alpha);

// Writes log p of the symbols after each of the alive hypotheses, [alive][symbols], as natural
// logarithms. Symbols that it does not write keep -inf: they cannot follow.
using NextLogProbabilities =
    absl::FunctionRef<absl::Status(absl::Span<const Hypothesis> alive, absl::Span<double> next)>;

// Returns the best finished hypotheses by score, at most `beam`; where none is finished, the alive
// ones by score, which max_length has cut; and none where no symbol can follow. Returns
// InvalidArgument for an option out of its range, and for a log-probability that is NaN or above 0
// by more than rounding.
absl::StatusOr<std::vector<Hypothesis>> BeamSearch(const BeamSearchOptions& options,
                                                   int64_t symbols, NextLogProbabilities next);

}  // namespace tfb

#endif  // TFB_CORE_DECODING_BEAM_SEARCH_H_
