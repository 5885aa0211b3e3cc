// The kernels of engine flash that change scores by their row and column, in every instruction set
// that this machine runs.
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
    // Ids need no alignment.
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

}  // namespace
}  // namespace tfb
