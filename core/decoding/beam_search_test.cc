#include "core/decoding/beam_search.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <vector>

#include "core/safetensors.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using Symbols = std::vector<int64_t>;

// Probabilities of three symbols after each prefix; symbol 0 is the end symbol. A prefix that is
// not listed ends with certainty.
class Table {
 public:
  explicit Table(std::map<Symbols, std::vector<double>> rows) : rows_(std::move(rows)) {}

  absl::Status operator()(absl::Span<const Hypothesis> alive, absl::Span<double> next) const {
    for (size_t n = 0; n < alive.size(); ++n) {
      const auto row = rows_.find(alive[n].symbols);
      for (size_t y = 0; y < 3; ++y) {
        const double p = row == rows_.end() ? (y == 0 ? 1.0 : 0.0) : row->second[y];
        next[3 * n + y] = std::log(p);
      }
    }
    return absl::OkStatus();
  }

 private:
  std::map<Symbols, std::vector<double>> rows_;
};

// The greedy path 1 1 has 0.6 x 0.4; the path that begins with 2 has 0.4 x 0.9.
const Table kGarden({{{}, {0, 0.6, 0.4}},
                     {{1}, {0.3, 0.4, 0.3}},
                     {{2}, {0.05, 0.05, 0.9}},
                     {{1, 1}, {1, 0, 0}},
                     {{2, 2}, {1, 0, 0}}});

std::vector<Hypothesis> Search(const NextLogProbabilities& next, int64_t beam, double alpha,
                               int64_t max_length = 5) {
  BeamSearchOptions options;
  options.beam = beam;
  options.length_penalty = alpha;
  options.max_length = max_length;
  auto found = BeamSearch(options, 3, next);
  EXPECT_TRUE(found.ok()) << found.status();
  return *std::move(found);
}

// A model without structure: the logarithms of its probabilities come from a hash of the prefix.
absl::Status Arbitrary(absl::Span<const Hypothesis> alive, absl::Span<double> next) {
  for (size_t n = 0; n < alive.size(); ++n) {
    uint64_t state = 88172645463325252u;
    for (const int64_t symbol : alive[n].symbols) {
      state = (state ^ static_cast<uint64_t>(symbol + 1)) * 6364136223846793005u + 1442695u;
    }
    double sum = 0;
    for (size_t y = 0; y < 3; ++y) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      next[3 * n + y] = 0.05 + static_cast<double>(state >> 40) / (1 << 24);
      sum += next[3 * n + y];
    }
    for (size_t y = 0; y < 3; ++y) next[3 * n + y] = std::log(next[3 * n + y] / sum);
  }
  return absl::OkStatus();
}

// Enumerates every sequence of at most max_length symbols whose only end symbol is its last.
void Enumerate(Hypothesis prefix, int64_t max_length, std::vector<Hypothesis>* all) {
  if (prefix.finished) all->push_back(prefix);
  if (prefix.finished || static_cast<int64_t>(prefix.symbols.size()) == max_length) return;
  std::vector<double> next(3);
  ASSERT_TRUE(Arbitrary({prefix}, absl::MakeSpan(next)).ok());
  for (int64_t y = 0; y < 3; ++y) {
    Hypothesis longer = prefix;
    longer.symbols.push_back(y);
    longer.log_probability += next[y];
    longer.finished = y == 0;
    Enumerate(longer, max_length, all);
  }
}

TEST(BeamSearch, TheLengthPenaltyIsThePapers) {
  EXPECT_EQ(LengthPenalty(1, 0.6), 1);
  EXPECT_EQ(LengthPenalty(100, 0), 1);
  EXPECT_DOUBLE_EQ(LengthPenalty(7, 1), 2);
  EXPECT_DOUBLE_EQ(LengthPenalty(7, 0.5), std::sqrt(2));
  EXPECT_DOUBLE_EQ(Score({{1, 2, 1, 2, 1, 2, 0}, -3, true}, 1), -1.5);
}

TEST(BeamSearch, ABeamOfOneIsGreedyWhateverThePenalty) {
  for (const double alpha : {0.0, 0.6, 3.0}) {
    const std::vector<Hypothesis> found = Search(kGarden, 1, alpha);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].symbols, (Symbols{1, 1, 0}));
    EXPECT_NEAR(found[0].log_probability, std::log(0.6 * 0.4), 1e-12);
    EXPECT_TRUE(found[0].finished);
  }
  // Where ending is likeliest, the search ends: it does not look for a longer hypothesis of a
  // better score.
  const Table ends({{{}, {0.5, 0.4, 0.1}}});
  EXPECT_EQ(Search(ends, 1, 3)[0].symbols, Symbols{0});
}

TEST(BeamSearch, ABeamOfTwoFindsWhatGreedyDecodingMisses) {
  const std::vector<Hypothesis> found = Search(kGarden, 2, 0);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].symbols, (Symbols{2, 2, 0}));
  EXPECT_NEAR(found[0].log_probability, std::log(0.4 * 0.9), 1e-12);
  EXPECT_EQ(found[1].symbols, (Symbols{1, 1, 0}));
}

TEST(BeamSearch, AWideEnoughBeamIsExhaustive) {
  constexpr int64_t kLength = 4;
  std::vector<Hypothesis> all;
  Enumerate({}, kLength, &all);
  ASSERT_EQ(all.size(), 1u + 2 + 4 + 8);
  for (const double alpha : {0.0, 0.6, 2.5}) {
    std::stable_sort(all.begin(), all.end(), [&](const Hypothesis& a, const Hypothesis& b) {
      return Score(a, alpha) > Score(b, alpha);
    });
    const std::vector<Hypothesis> found = Search(Arbitrary, 81, alpha, kLength);
    ASSERT_EQ(found.size(), all.size());
    for (size_t n = 0; n < all.size(); ++n) {
      EXPECT_EQ(found[n].symbols, all[n].symbols) << "rank " << n << ", alpha " << alpha;
    }
  }
}

TEST(BeamSearch, ThePenaltyDecidesBetweenShortAndLong) {
  // Ending at once has 0.5; 1 2 1 0 has 0.45.
  const Table table(
      {{{}, {0.5, 0.45, 0.05}}, {{1}, {0, 0, 1}}, {{1, 2}, {0, 1, 0}}, {{1, 2, 1}, {1, 0, 0}}});
  EXPECT_EQ(Search(table, 3, 0)[0].symbols, Symbols{0});
  EXPECT_EQ(Search(table, 3, 1)[0].symbols, (Symbols{1, 2, 1, 0}));
}

TEST(BeamSearch, WhatCannotFollowIsNeverTaken) {
  const Table table({{{}, {0, 1, 0}}, {{1}, {1, 0, 0}}});
  const std::vector<Hypothesis> found = Search(table, 4, 0.6);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].symbols, (Symbols{1, 0}));
  const Table nothing({{{}, {0, 0, 0}}});
  EXPECT_TRUE(Search(nothing, 2, 0).empty());
}

TEST(BeamSearch, WhereNothingEndsInTimeTheUnfinishedAreGiven) {
  const Table endless({{{}, {0, 0.7, 0.3}}, {{1}, {0, 0.2, 0.8}}, {{2}, {0, 0.9, 0.1}}});
  const std::vector<Hypothesis> found = Search(endless, 2, 0, /*max_length=*/2);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].symbols, (Symbols{1, 2}));
  EXPECT_EQ(found[1].symbols, (Symbols{2, 1}));
  EXPECT_FALSE(found[0].finished);
}

TEST(BeamSearch, TiesGoToTheHigherRankedAndThenToTheLowerSymbol) {
  const Table even({{{}, {0, 0.5, 0.5}}, {{1}, {0, 0.5, 0.5}}, {{2}, {0, 0.5, 0.5}}});
  const std::vector<Hypothesis> found = Search(even, 2, 0, /*max_length=*/2);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].symbols, (Symbols{1, 1}));
  EXPECT_EQ(found[1].symbols, (Symbols{1, 2}));
}

// ---- Rules of finishing, and of normalising ----

using Finishing = BeamSearchOptions::Finishing;

std::vector<Hypothesis> SearchWith(const BeamSearchOptions& options,
                                   const NextLogProbabilities& next) {
  auto found = BeamSearch(options, 3, next);
  EXPECT_TRUE(found.ok()) << found.status();
  return *std::move(found);
}

// Ending at once has 0.5, 2 six times and then the end 0.4.
absl::Status ShortOrLong(absl::Span<const Hypothesis> alive, absl::Span<double> next) {
  for (size_t n = 0; n < alive.size(); ++n) {
    const size_t length = alive[n].symbols.size();
    const double p[3] = {length == 0   ? 0.5
                         : length == 6 ? 1.0
                                       : 0.0,
                         length == 0 ? 0.1 : 0.0,
                         length == 0  ? 0.4
                         : length < 6 ? 1.0
                                      : 0.0};
    for (size_t y = 0; y < 3; ++y) next[3 * n + y] = std::log(p[y]);
  }
  return absl::OkStatus();
}

TEST(BeamSearch, WithoutEarlyStoppingABetterScoreReplacesTheWorstFinished) {
  // lp(7) = 2: log 0.4 / 2 = -0.458 is above log 0.5 / lp(1) = -0.693.
  const Symbols longer = {2, 2, 2, 2, 2, 2, 0};
  for (const Finishing finishing : {Finishing::kFairseq, Finishing::kTensor2Tensor}) {
    BeamSearchOptions options;
    options.beam = 1;
    options.length_penalty = 1;
    options.finishing = finishing;
    options.early_stopping = false;
    EXPECT_EQ(SearchWith(options, ShortOrLong)[0].symbols, longer);
    // After one symbol log 0.4 / lp(3) = -0.687 may still win, log 0.4 / lp(2) = -0.785 no longer.
    options.max_length = 3;
    EXPECT_EQ(SearchWith(options, ShortOrLong)[0].symbols, Symbols{0});
  }
  BeamSearchOptions options;
  options.beam = 1;
  options.length_penalty = 1;
  EXPECT_EQ(SearchWith(options, ShortOrLong)[0].symbols, Symbols{0});  // fairseq's
  options.finishing = Finishing::kTensor2Tensor;  // the best finished may still be beaten
  EXPECT_EQ(SearchWith(options, ShortOrLong)[0].symbols, longer);
}

TEST(BeamSearch, TheSearchEndsWhenNoneThatIsAliveCanScoreMore) {
  int calls = 0;
  const auto counted = [&](absl::Span<const Hypothesis> alive, absl::Span<double> next) {
    ++calls;
    return ShortOrLong(alive, next);
  };
  const auto steps = [&](Finishing finishing, bool early, int64_t max_length, int64_t beam) {
    BeamSearchOptions options;
    options.beam = beam;
    options.length_penalty = 1;
    options.finishing = finishing;
    options.early_stopping = early;
    options.max_length = max_length;
    calls = 0;
    SearchWith(options, counted);
    return calls;
  };
  // log 0.5 = -0.693 is above log 0.4 / lp(2) = -0.785, and below log 0.4 / lp(3) = -0.687.
  for (const Finishing finishing : {Finishing::kFairseq, Finishing::kTensor2Tensor}) {
    EXPECT_EQ(steps(finishing, false, 2, 1), 1);
    EXPECT_EQ(steps(finishing, false, 3, 1), 3);
    EXPECT_EQ(steps(finishing, false, 2, 2), 2);  // one of two is finished
  }
  EXPECT_EQ(steps(Finishing::kTensor2Tensor, true, 2, 2), 1);  // the best one is
  EXPECT_EQ(steps(Finishing::kTensor2Tensor, true, 3, 2), 3);
  EXPECT_EQ(steps(Finishing::kFairseq, true, 3, 1), 1);
}

TEST(BeamSearch, TensorToTensorFinishesCandidatesBehindTheBestBeam) {
  // The end symbol is the second best of the first step, and a beam of 1 has 2 candidates.
  const Table table({{{}, {0.3, 0.5, 0.2}}, {{1}, {0.2, 0.5, 0.3}}, {{1, 1}, {1, 0, 0}}});
  BeamSearchOptions options;
  options.beam = 1;
  options.length_penalty = 0;
  EXPECT_EQ(SearchWith(options, table)[0].symbols, (Symbols{1, 1, 0}));  // 0.25
  options.finishing = Finishing::kTensor2Tensor;
  EXPECT_EQ(SearchWith(options, table)[0].symbols, Symbols{0});  // 0.3
}

TEST(BeamSearch, FairseqKeepsTheFirstFinishedAndTensorToTensorTheBest) {
  // 0 ends in step 1 with log 0.3 = -1.204. In step 2 both hypotheses of a beam of 2 end: 1 0 with
  // log 0.36 / (7 / 6) = -0.876, 2 0 with log 0.3 / (7 / 6) = -1.032.
  const Table table({{{}, {0.3, 0.4, 0.3}}, {{1}, {0.9, 0.1, 0}}, {{2}, {1, 0, 0}}});
  BeamSearchOptions options;
  options.beam = 2;
  options.length_penalty = 1;
  const auto found = [&] {
    std::vector<Symbols> symbols;
    for (const Hypothesis& one : SearchWith(options, table)) symbols.push_back(one.symbols);
    return symbols;
  };
  EXPECT_EQ(found(), (std::vector<Symbols>{{1, 0}, {0}}));
  options.early_stopping = false;
  EXPECT_EQ(found(), (std::vector<Symbols>{{1, 0}, {2, 0}}));
  options.finishing = Finishing::kTensor2Tensor;
  EXPECT_EQ(found(), (std::vector<Symbols>{{1, 0}, {2, 0}}));
}

TEST(BeamSearch, APowerOfTheLengthFavoursLongerOnes) {
  EXPECT_DOUBLE_EQ(LengthPenalty(7, 2, Normalisation::kPower), 49);
  EXPECT_DOUBLE_EQ(LengthPenalty(1, 0.6, Normalisation::kPower), 1);
  EXPECT_DOUBLE_EQ(Score({{1, 2, 0}, -6, true}, 1, Normalisation::kPower), -2);
  // 0 has 0.5, 1 2 0 has 0.3: log 0.3 / (8 / 6) = -0.903 is below log 0.5 = -0.693, and log 0.3 / 3
  // = -0.401 above it.
  const Table table({{{}, {0.5, 0.3, 0.2}}, {{1}, {0, 0, 1}}, {{1, 2}, {1, 0, 0}}});
  BeamSearchOptions options;
  options.beam = 3;
  options.length_penalty = 1;
  EXPECT_EQ(SearchWith(options, table)[0].symbols, Symbols{0});
  options.normalisation = Normalisation::kPower;
  EXPECT_EQ(SearchWith(options, table)[0].symbols, (Symbols{1, 2, 0}));
}

TEST(BeamSearch, AForcedEndFinishesWhatMaxLengthWouldCut) {
  const Table endless(
      {{{}, {0.1, 0.6, 0.3}}, {{1}, {0.1, 0.2, 0.7}}, {{2}, {0.2, 0.7, 0.1}}, {{1, 2}, {0, 1, 0}}});
  BeamSearchOptions options;
  options.beam = 2;
  options.length_penalty = 0;
  options.max_length = 2;
  EXPECT_FALSE(SearchWith(options, endless)[0].finished);
  options.force_end = true;
  const std::vector<Hypothesis> found = SearchWith(options, endless);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(found[0].finished);
  EXPECT_EQ(found[0].symbols, (Symbols{1, 0}));  // 0.06 and 0.06: ties to the higher ranked
  EXPECT_NEAR(found[0].log_probability, std::log(0.06), 1e-12);
  EXPECT_EQ(found[1].symbols, (Symbols{2, 0}));
  options.max_length = 3;  // 1 2 cannot end there
  for (const Hypothesis& one : SearchWith(options, endless)) {
    EXPECT_NE(one.symbols, (Symbols{1, 2, 0}));
  }
}

TEST(BeamSearch, EveryRuleIsExactWithAWideEnoughBeam) {
  constexpr int64_t kLength = 4;
  std::vector<Hypothesis> all;
  Enumerate({}, kLength, &all);
  for (const Normalisation normalisation : {Normalisation::kGnmt, Normalisation::kPower}) {
    for (const double alpha : {0.0, 0.6, 2.5}) {
      std::stable_sort(all.begin(), all.end(), [&](const Hypothesis& a, const Hypothesis& b) {
        return Score(a, alpha, normalisation) > Score(b, alpha, normalisation);
      });
      for (const Finishing finishing : {Finishing::kFairseq, Finishing::kTensor2Tensor}) {
        for (const bool early : {false, true}) {
          BeamSearchOptions options;
          options.beam = 81;
          options.length_penalty = alpha;
          options.max_length = kLength;
          options.normalisation = normalisation;
          options.finishing = finishing;
          options.early_stopping = early;
          const std::vector<Hypothesis> found = SearchWith(options, Arbitrary);
          // Tensor2Tensor may stop early once it has the best.
          const bool best_alone = finishing == Finishing::kTensor2Tensor && early;
          ASSERT_GE(found.size(), best_alone ? 1 : all.size());
          for (size_t n = 0; n < (best_alone ? 1 : found.size()); ++n) {
            EXPECT_EQ(found[n].symbols, all[n].symbols) << n << " of alpha " << alpha;
          }
        }
      }
    }
  }
}

// ---- Golden file ----

TEST(BeamSearch, TheRulesOfBothPackagesFindTheSame) {
  const SafetensorsFile golden = GoldenFile("core/decoding/testdata/rules.safetensors");
  const ConstTensorView tables = golden.tensors.at("log_probabilities").view();
  const ConstTensorView cases = golden.tensors.at("cases").view();
  const ConstTensorView alphas = golden.tensors.at("alphas").view();
  const ConstTensorView expected = golden.tensors.at("symbols").view();
  const ConstTensorView scores = golden.tensors.at("scores").view();
  const int64_t max_length = tables.dim(1), symbols = tables.dim(3);
  for (int64_t n = 0; n < cases.dim(0); ++n) {
    SCOPED_TRACE(n);
    const int32_t* one = cases.At<int32_t>(n);  // table, rule, beam, early_stopping
    const bool fairseq = one[1] == 0;
    BeamSearchOptions options;
    options.beam = one[2];
    options.length_penalty = alphas.Get(n);
    options.max_length = max_length;
    options.finishing = fairseq ? Finishing::kFairseq : Finishing::kTensor2Tensor;
    options.normalisation = fairseq ? Normalisation::kPower : Normalisation::kGnmt;
    options.early_stopping = one[3] == 1;
    options.force_end = fairseq;
    const auto next = [&](absl::Span<const Hypothesis> alive, absl::Span<double> to) {
      for (size_t a = 0; a < alive.size(); ++a) {
        const Symbols& before = alive[a].symbols;
        const int64_t last = before.empty() ? 0 : before.back();
        for (int64_t y = 0; y < symbols; ++y) {
          to[a * static_cast<size_t>(symbols) + y] =
              *tables.At<double>(one[0], static_cast<int64_t>(before.size()), last, y);
        }
      }
      return absl::OkStatus();
    };
    const auto found = BeamSearch(options, symbols, next);
    ASSERT_TRUE(found.ok()) << found.status();
    const auto count = static_cast<int64_t>(golden.tensors.at("counts").view().Get(n));
    ASSERT_EQ(static_cast<int64_t>(found->size()), count);
    for (int64_t rank = 0; rank < count; ++rank) {
      const Hypothesis& hypothesis = (*found)[rank];
      const double score = hypothesis.finished
                               ? Score(hypothesis, options.length_penalty, options.normalisation)
                               : hypothesis.log_probability;
      EXPECT_NEAR(score, scores.Get(scores.Offset(n, rank)), 1e-12);
      const int32_t* theirs = expected.At<int32_t>(n, rank);
      for (size_t t = 0; t < hypothesis.symbols.size(); ++t) {
        EXPECT_EQ(hypothesis.symbols[t], theirs[t]) << "rank " << rank << " symbol " << t;
      }
    }
  }
}

// Writes the same log-probabilities after each hypothesis, of which there is one at least.
std::function<absl::Status(absl::Span<const Hypothesis>, absl::Span<double>)> Always(
    const std::vector<double>& log_probabilities) {
  return [log_probabilities](absl::Span<const Hypothesis> alive, absl::Span<double> next) {
    EXPECT_FALSE(alive.empty());
    for (size_t n = 0; n < next.size(); ++n) {
      next[n] = log_probabilities[n % log_probabilities.size()];
    }
    return absl::OkStatus();
  };
}
constexpr double kNever = -std::numeric_limits<double>::infinity();

TEST(BeamSearch, IsOverWhereAllHypothesesHaveEnded) {
  for (const Finishing finishing : {Finishing::kTensor2Tensor, Finishing::kFairseq}) {
    for (const bool early_stopping : {false, true}) {
      BeamSearchOptions options;
      options.beam = 2;
      options.max_length = 5;
      options.finishing = finishing;
      options.early_stopping = early_stopping;
      const std::vector<Hypothesis> found = SearchWith(options, Always({0, kNever, kNever}));
      ASSERT_EQ(found.size(), 1u);
      EXPECT_EQ(found[0].symbols, Symbols{0});
    }
  }
}

TEST(BeamSearch, AForcedEndLeavesNoOtherSymbolPossible) {
  BeamSearchOptions options;
  options.beam = 3;
  options.max_length = 1;
  options.end_symbol = 1;
  options.force_end = true;
  const std::vector<Hypothesis> found =
      SearchWith(options, Always({std::log(0.6), std::log(0.3), std::log(0.1)}));
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].symbols, Symbols{1});
}

TEST(BeamSearch, AProbabilityMayBeRoundedALittleAboveOne) {
  BeamSearchOptions options;
  options.max_length = 2;
  EXPECT_TRUE(BeamSearch(options, 3, Always({1e-4, kNever, kNever})).ok());
  EXPECT_FALSE(BeamSearch(options, 3, Always({std::nextafter(1e-4, 1), kNever, kNever})).ok());
}

TEST(BeamSearch, WrongOptionsAndProbabilitiesAreRefusedWithTheRange) {
  const auto message = [](const BeamSearchOptions& options, const NextLogProbabilities& next) {
    return std::string(BeamSearch(options, 3, next).status().message());
  };
  BeamSearchOptions options;
  options.beam = 0;
  EXPECT_EQ(message(options, kGarden), "beam search: beam is 0; allowed is 1 or more");
  options = {};
  options.length_penalty = -1;
  EXPECT_EQ(message(options, kGarden), "beam search: length_penalty is -1; allowed is 0 or more");
  options = {};
  options.end_symbol = 3;
  EXPECT_EQ(message(options, kGarden), "beam search: end_symbol is 3; allowed is 0 to 2");
  options = {};
  options.max_length = 0;
  EXPECT_EQ(message(options, kGarden), "beam search: max_length is 0; allowed is 1 or more");
  const auto broken = [](absl::Span<const Hypothesis>, absl::Span<double> next) {
    next[1] = std::nan("");
    return absl::OkStatus();
  };
  EXPECT_EQ(message({}, broken),
            "beam search: the log-probability of symbol 1 is nan; allowed is 0 or less");
  const auto failing = [](absl::Span<const Hypothesis>, absl::Span<double>) {
    return absl::InternalError("the model");
  };
  EXPECT_EQ(message({}, failing), "the model");
}

}  // namespace
}  // namespace tfb
