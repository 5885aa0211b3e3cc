#include "core/decoding/beam_search.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

using Symbols = std::vector<int64_t>;
constexpr double kImpossible = -std::numeric_limits<double>::infinity();

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
