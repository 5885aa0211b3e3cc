// Tests the kernels of engine flash that change scores by their row and column, in every
// instruction set that this machine runs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/cpu/kernels.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kStride = 80, kRows = 5;

class ScoreKernels : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    kernels_ = FindCpuKernels(GetParam());
    if (kernels_ == nullptr) GTEST_SKIP() << "this machine does not run " << GetParam();
  }
  // Score c of row r is 100 r + c.
  static std::vector<float> Scores() {
    std::vector<float> scores(kRows * kStride);
    for (int64_t n = 0; n < kRows * kStride; ++n) {
      scores[n] = static_cast<float>(100 * (n / kStride) + n % kStride);
    }
    return scores;
  }
  const CpuKernels* kernels_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(In, ScoreKernels, testing::Values("generic", "avx2", "avx512"),
                         [](const auto& name) { return std::string(name.param); });

TEST_P(ScoreKernels, LabelsAddOneOfTwoTermsOfTheRow) {
  const int32_t row_ids[kRows] = {3, -1, 0, 3, 7};
  const float terms[kRows][2] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}, {9, 10}};
  std::vector<int32_t> column_ids(kStride);
  for (int64_t c = 0; c < kStride; ++c) column_ids[c] = static_cast<int32_t>(c % 6) - 1;
  for (const int64_t columns : {16, 48, 64}) {
    std::vector<float> scores = Scores();
    const std::vector<float> before = scores;
    // The id arrays need no alignment.
    kernels_->add_by_label({scores.data(), kStride, kRows, columns}, row_ids, column_ids.data() + 1,
                           terms);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kStride; ++c) {
        float expected = before[r * kStride + c];
        if (c < columns) expected += terms[r][column_ids[c + 1] == row_ids[r]];
        EXPECT_EQ(scores[r * kStride + c], expected) << r << " " << c;
      }
    }
  }
}

// The test uses many rows, since the last addition of a sum mostly rounds away the difference that
// another order of the first additions makes.
TEST_P(ScoreKernels, HiddenColumnsAtTheEndChangeNoBitOfASoftmax) {
  constexpr int64_t kMost = 192;
  for (int64_t seen = 1; seen <= 128; ++seen) {
    std::vector<float> sums;
    for (int64_t columns = (seen + 15) / 16 * 16; columns <= kMost; columns += 16) {
      std::vector<float> scores(kMost, -INFINITY);
      for (int64_t c = 0; c < seen; ++c) scores[c] = 3 * std::sin(static_cast<float>(c * c + seen));
      float max = -INFINITY, sum = 0, rescale;
      kernels_->softmax({scores.data(), kMost, 1, columns}, {&max, &sum, &rescale}, nullptr);
      sums.push_back(sum);
    }
    for (const float sum : sums) EXPECT_EQ(sum, sums[0]) << seen;
  }
}

TEST_P(ScoreKernels, MasksBeginAtTheirFirstBit) {
  uint64_t masks[kRows];
  for (int64_t r = 0; r < kRows; ++r) masks[r] = 0x9E3779B97F4A7C15u * (r + 1);
  for (const int64_t first : {0, 16, 48}) {
    for (int64_t columns = 16; first + columns <= 64; columns += 16) {
      std::vector<float> scores = Scores();
      const std::vector<float> before = scores;
      kernels_->mask({scores.data(), kStride, kRows, columns}, masks, first);
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kStride; ++c) {
          const bool hidden = c < columns && (masks[r] >> (first + c) & 1) == 0;
          EXPECT_EQ(scores[r * kStride + c], hidden ? -INFINITY : before[r * kStride + c]);
        }
      }
    }
  }
}

// Tokens and codes of rows and columns. They are small numbers, so that many are equal.
struct Pairs {
  Pairs() {
    uint32_t random = 1;
    for (std::vector<int32_t>* values : {&row_tokens, &column_tokens, &row_codes, &column_codes}) {
      for (int64_t n = 0; n < kSlots * kPairColumns; ++n) {
        random = random * 1664525 + 1013904223;
        values->push_back(static_cast<int32_t>(random >> 24) % 5);
      }
    }
  }
  TokenPairs view(int64_t slots) const {
    return {row_tokens.data(), column_tokens.data(), row_codes.data(), column_codes.data(), slots};
  }
  int Count(int64_t r, int64_t c, int64_t slots) const {
    int count = 0;
    for (int64_t n = 0; n < slots; ++n) {
      const int32_t difference =
          row_codes[n * kPairColumns + r] - column_codes[n * kPairColumns + c];
      count += difference == 0 || difference == 1;
    }
    return count;
  }
  static constexpr int64_t kSlots = 9;
  std::vector<int32_t> row_tokens, column_tokens, row_codes, column_codes;
};

TEST_P(ScoreKernels, PairsAreHiddenByTokensAndCodes) {
  const Pairs pairs;
  for (const bool causal : {false, true}) {
    for (const int64_t slots : {0, 1, 2}) {
      uint64_t masks[kRows];
      for (int64_t r = 0; r < kRows; ++r) masks[r] = ~(uint64_t{0xFF} << r * 8);
      kernels_->hide_pairs(kRows, pairs.view(slots), causal, masks);
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kPairColumns; ++c) {
          const bool seen = c / 8 != r && pairs.Count(r, c, slots) == slots &&
                            !(causal && pairs.column_tokens[c] > pairs.row_tokens[r]);
          EXPECT_EQ(masks[r] >> c & 1, seen) << r << " " << c << " of " << slots;
        }
      }
    }
  }
}

TEST_P(ScoreKernels, PairsGetTheSelfBiasAndAreDividedByTheirSlots) {
  const Pairs pairs;
  for (const int64_t slots : {0, 1, 9}) {
    for (const int64_t columns : {16, 64}) {
      std::vector<float> scores(kRows * kStride, 3);
      kernels_->adjust_pairs({scores.data(), kStride, kRows, columns}, pairs.view(slots), -100);
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kStride; ++c) {
          double expected = 3;
          if (c < columns) {
            if (pairs.row_tokens[r] == pairs.column_tokens[c]) expected -= 100;
            expected -= std::log(std::max(pairs.Count(r, c, slots), 1));
          }
          EXPECT_NEAR(scores[r * kStride + c], expected, 1e-6 * std::abs(expected))
              << r << " " << c;
        }
      }
    }
  }
}

TEST_P(ScoreKernels, LogarithmsOfAllCountsOfSlotsAreExactInFp32) {
  for (int32_t count = 1; count <= 64; ++count) {
    std::vector<int32_t> row(64 * kPairColumns, 0), column(64 * kPairColumns, 7);
    for (int64_t n = 0; n < count; ++n) column[n * kPairColumns] = 0;
    std::vector<float> scores(16, 0);
    const int32_t tokens[kPairColumns] = {1};
    const int32_t others[kPairColumns] = {};
    kernels_->adjust_pairs({scores.data(), 16, 1, 16},
                           {tokens, others, row.data(), column.data(), 64}, 0);
    EXPECT_NEAR(scores[0], -std::log(static_cast<double>(count)), 4e-7) << count;
  }
}

}  // namespace
}  // namespace tfb
