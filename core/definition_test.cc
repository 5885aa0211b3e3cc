#include "core/definition.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "core/random.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

std::vector<double> Drawn(uint64_t seed, int64_t size) {
  const RandomStream random(seed, "numbers");
  std::vector<double> numbers(size);
  for (int64_t n = 0; n < size; ++n) numbers[n] = random.Uniform(n) - 0.5;
  return numbers;
}

// Products of `size` terms below 1/4 have errors below this, in any order.
double Bound(int64_t size) {
  return static_cast<double>(size + 1) * 0x1p-53 * static_cast<double>(size) / 4;
}

TEST(Definition, DotIsTheSumOfProductsOfAnyLength) {
  for (int64_t size = 0; size <= 40; ++size) {
    const std::vector<double> a = Drawn(1, size), b = Drawn(2, size);
    long double sum = 0;
    for (int64_t c = 0; c < size; ++c) sum += static_cast<long double>(a[c]) * b[c];
    EXPECT_NEAR(Dot(a.data(), b.data(), size), static_cast<double>(sum), Bound(size)) << size;
  }
}

TEST(Definition, AddTimesAddsToEachElementAndNoOther) {
  for (int64_t size = 0; size <= 20; ++size) {
    const std::vector<double> x = Drawn(3, size + 1);
    std::vector<double> y = Drawn(4, size + 1);
    const std::vector<double> before = y;
    AddTimes(-0.75, x.data(), size, y.data());
    for (int64_t c = 0; c < size; ++c) EXPECT_NEAR(y[c], before[c] - 0.75 * x[c], 0x1p-52);
    EXPECT_EQ(y[size], before[size]);
  }
}

struct Sizes {
  int64_t rows, in, out;
};

// Around blocks of 64 rows, 32 terms and 128 channels, and without anything.
class Products : public ::testing::TestWithParam<Sizes> {};

TEST_P(Products, AreTheSumsWithTheBiasAndTheSameBitsOnAnyNumberOfThreads) {
  const auto [rows, in, out] = GetParam();
  const std::vector<double> x = Drawn(5, rows * in), w = Drawn(6, in * out), b = Drawn(7, out);
  const DoubleTensor matrix(ConstTensorView(w.data(), DType::kF64, {in, out}));
  const DoubleTensor bias(ConstTensorView(b.data(), DType::kF64, {out}));
  const std::vector<double> y = Affine(x.data(), rows, matrix, bias, nullptr);
  ASSERT_EQ(static_cast<int64_t>(y.size()), rows * out);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < out; ++c) {
      long double sum = b[c];
      for (int64_t k = 0; k < in; ++k)
        sum += static_cast<long double>(x[r * in + k]) * w[k * out + c];
      ASSERT_NEAR(y[r * out + c], static_cast<double>(sum), Bound(in + 4)) << r << ", " << c;
    }
  }
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    EXPECT_EQ(Affine(x.data(), rows, matrix, bias, &pool), y) << threads;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<double> row(y.begin() + r * out, y.begin() + (r + 1) * out);
    EXPECT_EQ(Affine(x.data() + r * in, 1, matrix, bias, nullptr), row) << "row " << r << " alone";
  }
  EXPECT_EQ(Affine(x.data(), rows, matrix, DoubleTensor(), nullptr).size(), y.size());
}

INSTANTIATE_TEST_SUITE_P(Sizes, Products,
                         ::testing::Values(Sizes{1, 1, 1}, Sizes{63, 31, 127}, Sizes{64, 32, 128},
                                           Sizes{65, 33, 129}, Sizes{130, 71, 260}, Sizes{0, 4, 8},
                                           Sizes{3, 0, 8}),
                         [](const auto& info) {
                           return std::to_string(info.param.rows) + "x" +
                                  std::to_string(info.param.in) + "x" +
                                  std::to_string(info.param.out);
                         });

TEST(Definition, EveryRowIsVisitedOnce) {
  for (const int threads : {0, 1, 3}) {
    const auto pool = threads == 0 ? nullptr : std::make_unique<ThreadPool>(threads);
    std::vector<std::atomic<int>> visits(2 * 3 * 5);
    ForEachRow(pool.get(), 2, 3, 5,
               [&](int64_t b, int64_t h, int64_t r) { ++visits[(b * 3 + h) * 5 + r]; });
    for (const auto& count : visits) EXPECT_EQ(count, 1);
    ForEachRow(pool.get(), 2, 0, 0, [](int64_t, int64_t, int64_t) { FAIL(); });
  }
}

// Memory runs out in a task of the pool as it does without one.
TEST(Definition, WhatATaskThrowsReachesTheCaller) {
  for (const int threads : {0, 1, 3}) {
    const auto pool = threads == 0 ? nullptr : std::make_unique<ThreadPool>(threads);
    const auto throws = [](int64_t n) {
      if (n == 7) throw std::bad_alloc();
    };
    EXPECT_THROW(ForEachOf(pool.get(), 20, throws), std::bad_alloc) << threads;
    std::atomic<int> calls(0);
    ForEachOf(pool.get(), 20, [&](int64_t) { ++calls; });
    EXPECT_EQ(calls, 20) << "after it";
  }
}

}  // namespace
}  // namespace tfb
