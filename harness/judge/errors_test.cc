#include "harness/judge/errors.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor Of(DType dtype, std::initializer_list<int64_t> shape, const std::vector<double>& values) {
  Tensor tensor(dtype, shape);
  for (size_t i = 0; i < values.size(); ++i) tensor.view().Set(static_cast<int64_t>(i), values[i]);
  return tensor;
}

OutputError Compare(const Tensor& output, const Tensor& reference, double max_value,
                    const std::vector<int64_t>& rows = {}) {
  const auto error = CompareOutput(output.view(), reference.view(), rows, max_value);
  EXPECT_TRUE(error.ok()) << error.status();
  return error.ok() ? *error : OutputError();
}

TEST(Errors, AreWhatTheyAreByHand) {
  const Tensor reference = Of(DType::kF64, {1, 2, 2}, {3, 4, 0, 5});
  const Tensor output = Of(DType::kF32, {1, 2, 2}, {4, 3, 0, 5});
  const OutputError error = Compare(output, reference, 10);
  EXPECT_DOUBLE_EQ(error.relative_frobenius, std::sqrt(2.0 / 50));
  EXPECT_DOUBLE_EQ(error.max_abs, 1);
  EXPECT_DOUBLE_EQ(error.max_abs_over_max_value, 0.1);
  EXPECT_DOUBLE_EQ(error.mean_cosine, (24.0 / 25 + 1) / 2);
  EXPECT_EQ(error.rows, 2);
  EXPECT_EQ(error.rows_checked, 2);
}

TEST(Errors, AnUnwrittenElementIsInfinitelyWrong) {
  const Tensor reference = Of(DType::kF64, {1, 2}, {0, 1});
  const OutputError error = Compare(Of(DType::kF32, {1, 2}, {kNan, 1}), reference, 1);
  EXPECT_EQ(error.max_abs, kInfinity);
  EXPECT_EQ(error.max_abs_over_max_value, kInfinity);
  EXPECT_EQ(error.relative_frobenius, kInfinity);
}

TEST(Errors, NanWhereNanIsDueIsRightAndInfinityNeedsItsSign) {
  const Tensor reference = Of(DType::kF64, {1, 3}, {kNan, 1, kInfinity});
  EXPECT_EQ(Compare(Of(DType::kF32, {1, 3}, {kNan, 1, kInfinity}), reference, 1).max_abs, 0);
  EXPECT_EQ(Compare(Of(DType::kF32, {1, 3}, {2, 1, kInfinity}), reference, 1).max_abs, kInfinity);
  EXPECT_EQ(Compare(Of(DType::kF32, {1, 3}, {kNan, 1, -kInfinity}), reference, 1).max_abs,
            kInfinity);
}

TEST(Errors, ElementsThatAreNotFiniteAreCountedAndNotAveraged) {
  const Tensor reference = Of(DType::kF64, {3, 2}, {kNan, kNan, 3, 4, kInfinity, 1});
  const Tensor output = Of(DType::kF32, {3, 2}, {kNan, kNan, kNan, 4, kInfinity, 1});
  const OutputError error = Compare(output, reference, 1);
  EXPECT_EQ(error.checked, 6);
  EXPECT_EQ(error.not_finite, 4);
  EXPECT_EQ(error.unexpected, 1);
  EXPECT_EQ(error.mean_cosine, 1);  // of two rows
  EXPECT_EQ(error.relative_frobenius, kInfinity);
}

TEST(Errors, NothingIsKnownWhereNothingIsFinite) {
  const Tensor nan = Of(DType::kF64, {2, 2}, {kNan, kNan, kNan, kInfinity});
  const OutputError error = Compare(nan, nan, 1);
  EXPECT_EQ(error.not_finite, 4);
  EXPECT_EQ(error.unexpected, 0);
  EXPECT_TRUE(std::isnan(error.mean_cosine));
  EXPECT_TRUE(std::isnan(error.relative_frobenius));
}

TEST(Errors, ZeroRowsAreRightWhenZeroIsDue) {
  const Tensor zero = Of(DType::kF64, {2, 2}, {0, 0, 0, 0});
  const OutputError right = Compare(zero, zero, 0);
  EXPECT_EQ(right.max_abs_over_max_value, 0);
  EXPECT_EQ(right.relative_frobenius, 0);
  EXPECT_EQ(right.mean_cosine, 1);
  const OutputError wrong = Compare(Of(DType::kF32, {2, 2}, {0, 0, 1, 0}), zero, 0);
  EXPECT_EQ(wrong.max_abs_over_max_value, kInfinity);
  EXPECT_EQ(wrong.mean_cosine, 0.5);
}

TEST(Errors, AReferenceOfSomeRowsIsHeldAgainstThoseRows) {
  Tensor output(DType::kF32, {2, 3, 5, 2});
  Tensor reference(DType::kF64, {2, 3, 2, 2});
  const std::vector<int64_t> rows = {1, 4};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t i = 0; i < 5; ++i) {
        for (int64_t c = 0; c < 2; ++c) {
          const double value = static_cast<double>(1000 * b + 100 * h + 10 * i + c);
          output.view().Set(output.view().Offset(b, h, i, c), value);
          if (i == 1 || i == 4) {
            reference.view().Set(reference.view().Offset(b, h, i / 4, c), value);
          }
        }
      }
    }
  }
  const OutputError error = Compare(output, reference, 1, rows);
  EXPECT_EQ(error.max_abs, 0);
  EXPECT_EQ(error.rows_checked, 12);
  EXPECT_EQ(error.rows, 30);
  EXPECT_EQ(Compare(output, reference, 1, {0, 4}).max_abs, 10);
  // A view with other strides is read by them.
  Tensor turned(DType::kF32, {2, 5, 3, 2});
  CopyElements(Transpose(std::as_const(output).view(), 1, 2), turned.view());
  const auto strided =
      CompareOutput(Transpose(std::as_const(turned).view(), 1, 2), reference.view(), rows, 1);
  EXPECT_EQ(strided->max_abs, 0);
}

TEST(Errors, ShapesThatAreNotRelatedAreRefused) {
  const Tensor reference = Of(DType::kF64, {1, 2}, {0, 1});
  const Tensor output = Of(DType::kF32, {1, 3}, {0, 1, 2});
  EXPECT_FALSE(CompareOutput(output.view(), reference.view(), {}, 1).ok());
  EXPECT_FALSE(CompareOutput(output.view(), reference.view(), {0, 3}, 1).ok());
  EXPECT_TRUE(CompareOutput(output.view(), reference.view(), {0, 2}, 1).ok());
}

TEST(Errors, WhatCannotBeHeldAgainstOneAnotherIsNamed) {
  const Tensor output(DType::kF32, {1, 3, 4}), turned(DType::kF64, {1, 2, 3});
  const auto refusal = [&](const ConstTensorView& reference, const std::vector<int64_t>& rows) {
    return std::string(ComparedRows::Of(output.view(), reference, rows).status().message());
  };
  const Tensor two(DType::kF64, {1, 2, 4}), both(DType::kF64, {1, 2, 2}), flat(DType::kF64, {3, 4});
  const std::string kBegin = "output [1, 3, 4] cannot be held against reference ";
  EXPECT_EQ(refusal(two.view(), {0, 2}), "");
  EXPECT_EQ(refusal(two.view(), {}), kBegin + "[1, 2, 4] of 0 rows");
  EXPECT_EQ(refusal(two.view(), {0}), kBegin + "[1, 2, 4] of 1 rows");
  EXPECT_EQ(refusal(two.view(), {-1, 2}), kBegin + "[1, 2, 4] of 2 rows");
  EXPECT_EQ(refusal(two.view(), {0, 3}), kBegin + "[1, 2, 4] of 2 rows");
  EXPECT_EQ(refusal(both.view(), {0, 1}), kBegin + "[1, 2, 2] of 2 rows");
  EXPECT_EQ(refusal(flat.view(), {}), kBegin + "[3, 4] of 0 rows");
  // A reference is contiguous.
  EXPECT_EQ(refusal(Slice(Tensor(DType::kF64, {1, 3, 5}).view(), 2, 0, 4), {}),
            kBegin + "[1, 3, 4] of 0 rows");
  EXPECT_FALSE(MaxAbsError(output.view(), both.view(), {0, 1}).ok());
  const auto weights = [](const ConstTensorView& own, const ConstTensorView& dense) {
    return std::string(CompareWeights(own, dense).status().message());
  };
  const Tensor w(DType::kF64, {1, 2, 3, 4}), single(DType::kF32, {1, 2, 3, 4});
  const Tensor other(DType::kF64, {1, 2, 3, 5});
  EXPECT_EQ(weights(w.view(), w.view()), "");
  for (const auto& [own, dense] : {std::pair(w.view(), other.view()),
                                   {flat.view(), flat.view()},
                                   {w.view(), single.view()},
                                   {single.view(), w.view()},
                                   {Slice(other.view(), 3, 0, 4), w.view()},
                                   {w.view(), Slice(other.view(), 3, 0, 4)}}) {
    EXPECT_EQ(weights(own, dense), "weights " + ShapeString(own.shape()) +
                                       " cannot be held against dense weights " +
                                       ShapeString(dense.shape()));
  }
}

TEST(Errors, ARowThatOneSideHasAsZeroHasNoCosineAndOppositeOnesMinusOne) {
  const Tensor reference = Of(DType::kF64, {4, 2}, {0, 0, 3, 4, 3, 4, 1e-200, 1e-200});
  const Tensor output = Of(DType::kF64, {4, 2}, {3, 4, 0, 0, -6, -8, 1e-200, 1e-200});
  // The squares of the last row are 0, as if both sides were.
  EXPECT_DOUBLE_EQ(Compare(output, reference, 1).mean_cosine, (0 + 0 - 1 + 1) / 4.0);
  EXPECT_EQ(Compare(output, reference, 0.5).max_abs_over_max_value, 24);
  EXPECT_EQ(LargestMagnitude(output.view()), 8);
  EXPECT_EQ(LargestMagnitude(Of(DType::kF64, {3}, {kNan, -kInfinity, -0.5}).view()), 0.5);
  EXPECT_EQ(LargestMagnitude(Tensor(DType::kF64, {0, 2}).view()), 0);
}

TEST(Errors, AnOutputWithoutChannelsHasNoRowsAndNoError) {
  const Tensor none(DType::kF64, {2, 3, 0});
  const OutputError error = Compare(none, none, 0);
  EXPECT_EQ(error.rows, 0);
  EXPECT_EQ(error.rows_checked, 0);
  EXPECT_EQ(error.checked, 0);
  EXPECT_EQ(error.not_finite, 0);
  EXPECT_EQ(error.unexpected, 0);
  EXPECT_EQ(error.max_abs, 0);
  EXPECT_EQ(error.max_abs_over_max_value, 0);
  EXPECT_EQ(error.relative_frobenius, 0);
  EXPECT_EQ(error.mean_cosine, 1);
}

TEST(Errors, EmptyOutputsHaveNoError) {
  const Tensor reference(DType::kF64, {1, 4, 0, 8});
  const Tensor output(DType::kF32, {1, 4, 0, 8});
  EXPECT_EQ(Compare(output, reference, 0).max_abs_over_max_value, 0);
  EXPECT_EQ(Compare(output, reference, 0).mean_cosine, 1);
}

TEST(Errors, LogSumExpOfRowsWithoutKeysIsMinusInfinityInBoth) {
  const Tensor reference = Of(DType::kF64, {1, 1, 2}, {-kInfinity, 1});
  EXPECT_DOUBLE_EQ(
      *MaxAbsError(Of(DType::kF32, {1, 1, 2}, {-kInfinity, 1.5}).view(), reference.view(), {}),
      0.5);
  EXPECT_EQ(*MaxAbsError(Of(DType::kF32, {1, 1, 2}, {-1e30, 1}).view(), reference.view(), {}),
            kInfinity);
}

std::optional<KeptAttention> Kept(const std::vector<double>& w, const std::vector<double>& p,
                                  int64_t rows, int64_t top = 2) {
  const int64_t keys = static_cast<int64_t>(w.size()) / rows;
  const auto kept = CompareWeights(Of(DType::kF64, {1, 1, rows, keys}, w).view(),
                                   Of(DType::kF64, {1, 1, rows, keys}, p).view(), top);
  EXPECT_TRUE(kept.ok()) << kept.status();
  return kept.ok() ? *kept : std::nullopt;
}

TEST(Errors, KeptAttentionHasTheSameBitsOnAnyNumberOfThreads) {
  Tensor w(DType::kF64, {1, 2, 9, 40}), p(DType::kF64, {1, 2, 9, 40});
  for (int64_t n = 0; n < w.num_elements(); ++n) {
    w.span<double>()[n] = n % 3 == 0 ? 0 : 1.0 / static_cast<double>(n + 1);
    p.span<double>()[n] = 1.0 / static_cast<double>(n % 17 + 1);
  }
  const auto alone = CompareWeights(w.view(), p.view());
  ASSERT_TRUE(alone.ok() && alone->has_value());
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const auto shared = CompareWeights(w.view(), p.view(), kRecallKeys, &pool);
    ASSERT_TRUE(shared.ok() && shared->has_value());
    EXPECT_EQ((*shared)->kept_mass, (*alone)->kept_mass);
    EXPECT_EQ((*shared)->kl_divergence, (*alone)->kl_divergence);
    EXPECT_EQ((*shared)->recall, (*alone)->recall);
  }
}

TEST(Errors, KeptMassDivergenceAndRecallAreWhatTheyAreByHand) {
  const auto kept = Kept({0, 0.5, 0.5, 0}, {0.4, 0.3, 0.1, 0.2}, 1);
  ASSERT_TRUE(kept.has_value());
  EXPECT_DOUBLE_EQ(kept->kept_mass, 0.4);
  EXPECT_DOUBLE_EQ(kept->kl_divergence, 0.5 * std::log(0.5 / 0.3) + 0.5 * std::log(0.5 / 0.1));
  EXPECT_DOUBLE_EQ(kept->recall, 0.5);  // of keys 0 and 1
}

TEST(Errors, RecallIsOfTheHeaviestKeysAndNotOfAllThatHaveSomeWeight) {
  const auto kept = Kept({0.1, 0.2, 0.3, 0.4}, {0.4, 0.3, 0.2, 0.1}, 1, 3);
  ASSERT_TRUE(kept.has_value());
  EXPECT_DOUBLE_EQ(kept->recall, 2.0 / 3);  // keys 1 and 2 of 0, 1 and 2
}

TEST(Errors, TheLowerKeyWinsATieAndTheUsualNumberOfKeysIsThirtyTwo) {
  EXPECT_DOUBLE_EQ(Kept({0.1, 0.4, 0.4, 0.1}, {0.3, 0.3, 0.2, 0.2}, 1, 1)->recall, 0);
  EXPECT_DOUBLE_EQ(Kept({0.4, 0.4, 0.1, 0.1}, {0.3, 0.3, 0.2, 0.2}, 1, 1)->recall, 1);
  // All 40 keys are seen, and of the 32 heaviest of either side 24 are the other's.
  Tensor falling(DType::kF64, {1, 1, 1, 40}), rising(DType::kF64, {1, 1, 1, 40});
  for (int64_t j = 0; j < 40; ++j) {
    falling.view().Set(j, static_cast<double>(40 - j));
    rising.view().Set(j, static_cast<double>(j + 1));
  }
  EXPECT_DOUBLE_EQ((*CompareWeights(falling.view(), rising.view()))->recall, 24.0 / 32);
  // Nothing is there to compare.
  for (const Shape& shape : {Shape{1, 2, 3, 0}, Shape{1, 2, 0, 3}}) {
    const Tensor empty(DType::kF64, shape);
    const auto kept = CompareWeights(empty.view(), empty.view());
    ASSERT_TRUE(kept.ok()) << kept.status();
    EXPECT_FALSE(kept->has_value());
  }
}

TEST(Errors, DenseAttentionKeepsAllOfItself) {
  const std::vector<double> p = {0.4, 0.3, 0.1, 0.2, 1, 0, 0, 0};
  const auto kept = Kept(p, p, 2, 3);
  ASSERT_TRUE(kept.has_value());
  EXPECT_DOUBLE_EQ(kept->kept_mass, 1);
  EXPECT_DOUBLE_EQ(kept->kl_divergence, 0);
  EXPECT_DOUBLE_EQ(kept->recall, 1);  // the second row has one key, not three
}

TEST(Errors, RowsWithoutKeysCountForNothing) {
  EXPECT_FALSE(Kept({0, 0, 1, 0}, {1, 0, 0, 0}, 2).has_value());
  const auto kept = Kept({0, 0, 1, 0}, {1, 0, 0.5, 0.5}, 2);
  ASSERT_TRUE(kept.has_value());
  EXPECT_DOUBLE_EQ(kept->kept_mass, 0.5);
}

TEST(Errors, AttendingToWhatDenseDoesNotSeeDivergesInfinitely) {
  EXPECT_EQ(Kept({0.5, 0.5}, {1, 0}, 1)->kl_divergence, kInfinity);
}

TEST(Errors, BoundsGrowWithTheRootOfTheKeysBeyond16K) {
  EXPECT_DOUBLE_EQ(Fp32Bound(1), 2e-5);
  EXPECT_DOUBLE_EQ(Fp32Bound(16384), 2e-5);
  EXPECT_DOUBLE_EQ(Fp32Bound(4 * 16384), 4e-5);
  EXPECT_NEAR(AbsoluteBound(DType::kBF16, 512), 2e-2, 1e-3);
  EXPECT_NEAR(AbsoluteBound(DType::kF16, 512), 2.5e-3, 1e-4);
  EXPECT_DOUBLE_EQ(RatioBound(DType::kF16, 1e-3, 1), 2e-3);
  EXPECT_DOUBLE_EQ(RatioBound(DType::kF16, 0, 1), std::ldexp(1, -11));
  EXPECT_DOUBLE_EQ(RatioBound(DType::kF16, 1e-5, 0.5), std::ldexp(1, -12));
}

TEST(Errors, TheBoundOfLogSumExpIsThatOfItsScoresAndElevenRoundingsOfItself) {
  const double rounding = std::ldexp(1, -24);
  EXPECT_DOUBLE_EQ(LogSumExpBound(512, 0), 2e-5);
  EXPECT_DOUBLE_EQ(LogSumExpBound(4 * 16384, 0), 4e-5);
  EXPECT_DOUBLE_EQ(LogSumExpBound(512, 100), 2e-5 + 11 * rounding * 100);
  EXPECT_DOUBLE_EQ(LogSumExpBound(512, 1e5), 2e-5 + 11 * rounding * 1e5);
}

}  // namespace
}  // namespace tfb
