// The oracles that depth-adaptive classifiers are trained to predict: arXiv:1910.10073v4, section
// 3.
//
// The value of exit n for token t is A^n_t = log p(y_t | exit n), the likelihood, or the correctness:
// 1 where the most likely token of exit n is y_t, else 0.
//
//   of a sequence   argmax_n (mean_t A^n_t - penalty n)
//   of a token      argmax_n (sum_t' exp(-|t - t'|^2 / sigma) A^n_t' - penalty n)
//
// Ties go to the smallest n; exits count from 1. sigma 0 does not smooth.
#ifndef TFB_ADAPTIVE_DEPTH_ADAPTIVE_ORACLE_H_
#define TFB_ADAPTIVE_DEPTH_ADAPTIVE_ORACLE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/tensor.h"

namespace tfb::depth_adaptive {

// [exits][tokens] for one sequence.
using ExitValues = std::vector<std::vector<double>>;

// Return the likelihood or the correctness, of logits [exits, tokens, vocabulary] of any floating
// dtype and the tokens y [tokens] that they predict, each below `vocabulary`. Of equally likely tokens
// the first is the most likely.
ExitValues LikelihoodOfExits(const ConstTensorView& logits, absl::Span<const int64_t> next);
ExitValues CorrectnessOfExits(const ConstTensorView& logits, absl::Span<const int64_t> next);

int64_t SequenceOracle(const ExitValues& values, double penalty);
std::vector<int32_t> TokenOracle(const ExitValues& values, double penalty, double sigma);

}  // namespace tfb::depth_adaptive

#endif  // TFB_ADAPTIVE_DEPTH_ADAPTIVE_ORACLE_H_
