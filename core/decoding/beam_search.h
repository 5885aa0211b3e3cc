// Beam search for the most likely sequence of symbols, with a length penalty.
//
//   score(Y) = log P(Y) / lp(|Y|),  log P(Y) = sum log p(y_t | y_<t)
//   lp(n) = ((5 + n) / 6)^alpha   Normalisation::kGnmt, the paper's and Tensor2Tensor's
//   lp(n) = n^alpha               Normalisation::kPower, fairseq's
//
// |Y| counts the symbols, the end symbol among them. alpha 0 leaves the log-probability, which
// longer sequences only lower; a larger one makes up for it.
//
// Every step extends each of the `beam` hypotheses that are alive by every symbol and ranks the
// extensions by log P; ties go to the hypothesis that ranked higher, then to the lower symbol. The
// candidates are the best 2 beam; the best `beam` of those without the end symbol stay alive. The
// search is over when none is alive, when max_length is reached, or earlier by the rule of
// finishing. A hypothesis that is alive can score no more than b = log P / lp(max_length).
//
//                       kFairseq                            kTensor2Tensor
//   that finish         those among the best `beam`         all candidates with the end symbol
//                       candidates with the end symbol
//   are kept            the first `beam`                    the best `beam` by score
//   is over, with
//     early_stopping    when `beam` are finished            when the best finished scores above the
//                                                           b of the best alive
//     without           when `beam` are finished and the    when `beam` are finished and the worst
//                       worst scores at least that b; till  scores above that b
//                       then a better one replaces it
//
//   kFairseq, beam = 1, early_stopping   greedy decoding
//   beam >= symbols^max_length           every sequence: exact
//
// Source: Wu et al. 2016, "Google's neural machine translation system", arXiv:1609.08144v2, section
// 7, equation 14, without its coverage penalty. The paper does not say how a search ends. fairseq
// (sequence_generator.py) stops early; versions before 0.9 have a flag for going on. It takes the b
// of the best candidate where this takes that of the best alive, so that it may go on for a step
// that changes nothing, and forces the end symbol at the last step: force_end. Tensor2Tensor
// (utils/beam_search.py, version 1.15) goes on by default.
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
  enum class Normalisation : uint8_t { kGnmt, kPower };
  enum class Finishing : uint8_t { kFairseq, kTensor2Tensor };

  int64_t beam = 4;             // at least 1
  double length_penalty = 0.6;  // alpha, at least 0
  int64_t max_length = 50;      // symbols, the end symbol among them; at least 1
  int64_t end_symbol = 0;
  Normalisation normalisation = Normalisation::kGnmt;
  Finishing finishing = Finishing::kFairseq;
  bool early_stopping = true;
  // Symbol number max_length is the end symbol or none.
  bool force_end = false;
};

struct Hypothesis {
  std::vector<int64_t> symbols;
  double log_probability = 0;
  bool finished = false;  // it ends with the end symbol
};

using Normalisation = BeamSearchOptions::Normalisation;
double LengthPenalty(int64_t length, double alpha,
                     Normalisation normalisation = Normalisation::kGnmt);
double Score(const Hypothesis& hypothesis, double alpha,
             Normalisation normalisation = Normalisation::kGnmt);

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
