#include "core/cuda/sum_in_runs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/cuda/run_sums.h"
#include "core/cuda/runtime.h"
#include "core/cuda/sum_in_runs_test_terms.h"
#include "core/tested_devices.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb::sum_in_runs_test {
namespace {

// ---- Runs ----

TEST(RunsOf, CoverEveryTermOnceInOrder) {
  for (const int64_t terms : {0, 1, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 100'000}) {
    for (const int64_t sums : {1, 64, 5000, 1'000'000}) {
      const TermRuns runs = RunsOf(sums, terms);
      int64_t next = 0;
      for (int64_t run = 0; run < runs.count(); ++run) {
        EXPECT_EQ(runs.Begin(run), next);
        EXPECT_GT(runs.End(run), next);
        next = runs.End(run);
      }
      EXPECT_EQ(next, terms) << sums;
    }
  }
}

// A thread of the first step adds `length` numbers, one of the second `count`.
TEST(RunsOf, FewSumsHaveChainsOfSomeTwoRoots) {
  for (const int64_t terms : {257, 1000, 4096, 4097, 32'768, 65'536, 1'000'000}) {
    const TermRuns runs = RunsOf(/*sums=*/4, terms);
    const double root = std::sqrt(static_cast<double>(terms));
    EXPECT_LE(static_cast<double>(runs.length), root + 1) << terms;
    EXPECT_LE(static_cast<double>(runs.count()), root + 1) << terms;
  }
  EXPECT_EQ(RunsOf(4, 4096).length, 64);
  EXPECT_EQ(RunsOf(4, 4096).count(), 64);
}

TEST(RunsOf, PartialSumsAreBounded) {
  for (const int64_t sums : {1, 100, 1000, 60'000, 70'000, 10'000'000}) {
    for (const int64_t terms : {1, 16, 17, 500, 4096, 1'000'000, 10'000'000}) {
      const TermRuns runs = RunsOf(sums, terms);
      EXPECT_TRUE(runs.count() == 1 || sums * runs.count() <= kMostPartialSums)
          << sums << " of " << terms;
    }
  }
  EXPECT_EQ(RunsOf(1024, 4096).count(), 64) << "just as many as are allowed";
  EXPECT_EQ(RunsOf(1025, 4096).count(), 63);
}

TEST(MostRuns, DoForFewerTerms) {
  for (const int64_t sums : {1, 100, 5000, 40'000}) {
    for (int64_t terms = 0; terms < 3000; ++terms) {
      EXPECT_LE(RunsOf(sums, terms).count(), MostRuns(sums, terms)) << terms;
      EXPECT_LE(MostRuns(sums, terms), MostRuns(sums, terms + 1)) << terms;
      EXPECT_EQ(MostRuns(sums, terms) > 1, RunsOf(sums, terms).count() > 1) << terms;
    }
  }
}

TEST(RootOf, IsTheLeastWhoseSquareIsNotBelow) {
  for (int64_t n = 1; n < 3000; ++n) {
    EXPECT_GE(RootOf(n) * RootOf(n), n);
    EXPECT_LT((RootOf(n) - 1) * (RootOf(n) - 1), n);
  }
  EXPECT_EQ(RootOf(int64_t{1} << 60), int64_t{1} << 30);
}

TEST(TermIndex, MovesOnAsTheQuotientAndTheRemainder) {
  for (const int64_t begin : {0, 4, 5, 29, 30, 31}) {
    TermIndex token(begin, 5), head(token.outer, 3);
    for (int64_t n = begin; n < begin + 70; ++n, head.Next(token.Next())) {
      EXPECT_EQ(token.inner, n % 5) << n;
      EXPECT_EQ(token.outer, n / 5) << n;
      EXPECT_EQ(head.inner, n / 5 % 3) << n;
      EXPECT_EQ(head.outer, n / 15) << n;
    }
  }
}

// ---- Sums ----

class SumInRunsOnDevice : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    if (GetParam() == Device::kCpu) return;
    const auto runtime = CudaRuntime::For(GetParam());
    ASSERT_TRUE(runtime.ok()) << runtime.status();
  }
};

struct Case {
  SumShape shape;
  int threads = 3;
};

// Returns the sums after a call, whose scratch has as many bytes as it asks for.
template <class Terms>
std::vector<typename Terms::Number> SumsOf(Device device, const Case& c,
                                           const std::vector<float>& numbers,
                                           std::vector<typename Terms::Number> before) {
  const SumShape& shape = c.shape;
  const auto from = DeviceArray<float>::Create(device, numbers);
  const auto to = DeviceArray<typename Terms::Number>::Create(device, before);
  // NaN where nothing is written.
  const std::vector<double> unwritten(SumInRunsBytes<Terms>(shape) / sizeof(double),
                                      std::numeric_limits<double>::quiet_NaN());
  const auto scratch = DeviceArray<double>::Create(device, unwritten);
  EXPECT_TRUE(from.ok() && to.ok() && scratch.ok());
  ThreadPool pool(c.threads);
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(reinterpret_cast<std::byte*>(scratch->mutable_data()),
                                       unwritten.size() * sizeof(double));
  const Terms terms = {from->data(), shape.terms, shape.columns, to->mutable_data()};
  EXPECT_EQ(SumInRuns(device, shape, terms, execution), absl::OkStatus());
  EXPECT_TRUE(to->Read(before.data()).ok());
  if (device != Device::kCpu) {
    EXPECT_TRUE(CudaRuntime::For(device).value()->Synchronize().ok());
  }
  return before;
}

std::vector<float> Numbers(const SumShape& shape) {
  std::vector<float> numbers;
  for (int64_t n = 0; n < shape.rows * shape.terms * shape.columns; ++n) {
    numbers.push_back(static_cast<float>(n * 37 % 101 - 50) / 7);
  }
  return numbers;
}

const int64_t kTerms[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 255, 256, 257, 1000, 1025};

// Sums of float64 are compared with those of long double, which are off by no more than terms / 2^53 of
// the sum of magnitudes; sums of places are exact.
TEST_P(SumInRunsOnDevice, SumsAreThoseOfAllTerms) {
  for (const int64_t terms : kTerms) {
    for (const int64_t columns : {1, 3, 257}) {
      const Case c = {{2, columns, terms}};
      const std::vector<float> numbers = Numbers(c.shape);
      const std::vector<double> sums =
          SumsOf<SumAndPlaces>(GetParam(), c, numbers, std::vector<double>(4 * columns, 1e9));
      for (int64_t row = 0; row < 2; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          long double sum = 0, magnitude = 0;
          for (int64_t n = 0; n < terms; ++n) {
            const float number = numbers[(row * terms + n) * columns + column];
            sum += number;
            magnitude += std::fabs(number);
          }
          const double bound =
              static_cast<double>(terms) * 0x1p-53 * static_cast<double>(magnitude);
          EXPECT_NEAR(sums[row * 2 * columns + column], static_cast<double>(sum), bound)
              << terms << " terms, " << columns << " columns";
          EXPECT_EQ(sums[(row * 2 + 1) * columns + column],
                    static_cast<double>(terms * (terms + 1) / 2))
              << terms << " terms, " << columns << " columns";
        }
      }
    }
  }
}

// In fp32 another order of the terms or of the partial sums gives other bits.
TEST_P(SumInRunsOnDevice, OrderIsThatOfTermsInRunsAndOfRuns) {
  for (const int64_t terms : kTerms) {
    for (const int64_t columns : {1, 5}) {
      const Case c = {{3, columns, terms}};
      const std::vector<float> numbers = Numbers(c.shape);
      const std::vector<float> sums =
          SumsOf<AddSums>(GetParam(), c, numbers, std::vector<float>(3 * columns, 0.1f));
      const TermRuns runs = RunsOf(3 * columns, terms);
      for (int64_t n = 0; n < 3 * columns; ++n) {
        float sum = 0;
        for (int64_t run = 0; run < runs.count(); ++run) {
          float partial = 0;
          for (int64_t term = runs.Begin(run); term < runs.End(run); ++term) {
            partial += numbers[(n / columns * terms + term) * columns + n % columns];
          }
          sum += partial;
        }
        EXPECT_EQ(sums[n], 0.1f + sum) << terms << " terms, " << columns << " columns";
      }
    }
  }
}

TEST_P(SumInRunsOnDevice, ThreadsDoNotMatter) {
  if (GetParam() != Device::kCpu) GTEST_SKIP() << "the pool is the CPU's";
  const Case one = {{4, 300, 2000}, /*threads=*/1};
  const std::vector<float> numbers = Numbers(one.shape), zeros(1200);
  const std::vector<float> expected = SumsOf<AddSums>(GetParam(), one, numbers, zeros);
  for (const int threads : {2, 5, 16}) {
    EXPECT_EQ(SumsOf<AddSums>(GetParam(), {one.shape, threads}, numbers, zeros), expected)
        << threads;
  }
}

TEST_P(SumInRunsOnDevice, NoRowsAndNoColumnsAreNoWork) {
  for (const SumShape& shape : {SumShape{0, 3, 100}, SumShape{3, 0, 100}}) {
    EXPECT_EQ(SumInRunsBytes<AddSums>(shape), size_t{0});
    EXPECT_TRUE(SumsOf<AddSums>(GetParam(), {shape}, {}, {}).empty());
  }
}

TEST(SumInRuns, FewTermsNeedNoWorkspace) {
  EXPECT_EQ(SumInRunsBytes<AddSums>({4, 64, 16}), size_t{0});
  EXPECT_EQ(SumInRunsBytes<AddSums>({4, 64, 17}), size_t{2 * 4 * 64 * sizeof(float)});
  EXPECT_EQ(SumInRunsBytes<SumAndPlaces>({4, 64, 17}), size_t{2 * 2 * 4 * 64 * sizeof(double)});
}

INSTANTIATE_TEST_SUITE_P(Devices, SumInRunsOnDevice, testing::ValuesIn(TestedDevices()),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace tfb::sum_in_runs_test
