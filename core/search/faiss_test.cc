// Tests engine search and its inverted lists against FAISS. It is skipped where FAISS is not
// installed.
#include <faiss/IndexFlat.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/random.h"
#include "core/search/inverted_lists.h"
#include "core/search/search.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kEntries = 3000, kQueries = 50, kDim = 24, kNeighbours = 20;

class FaissTest : public testing::TestWithParam<SearchMetric> {
 protected:
  void SetUp() override {
    FillNormal(&keys_, 1, "keys");
    FillNormal(&queries_, 1, "queries");
    const bool distance = GetParam() == SearchMetric::kSquaredDistance;
    faiss::IndexFlat index(kDim, distance ? faiss::METRIC_L2 : faiss::METRIC_INNER_PRODUCT);
    index.add(kEntries, keys_.span<float>().data());
    index.search(kQueries, queries_.span<float>().data(), kNeighbours, faiss_scores_.data(),
                 faiss_slots_.data());
  }
  Execution With(size_t bytes) {
    memory_ = Tensor(DType::kU8, {static_cast<int64_t>(bytes)});
    Execution execution;
    execution.pool = &pool_;
    execution.workspace = absl::MakeSpan(static_cast<std::byte*>(memory_.raw()), bytes);
    return execution;
  }
  // FAISS's scores are fp32 sums of `kDim` products: their error is up to kDim 2^-24 of products
  // that may reach 100 here. Scores that lie closer may be in another order.
  void ExpectSame() {
    constexpr double kError = kDim * 0x1p-24 * 100;
    for (int64_t n = 0; n < kQueries * kNeighbours; ++n) {
      EXPECT_NEAR(scores_[n], faiss_scores_[n], kError);
      if (slots_[n] == faiss_slots_[n]) continue;
      const bool last = n % kNeighbours == kNeighbours - 1, first = n % kNeighbours == 0;
      EXPECT_TRUE(last || first || std::abs(scores_[n] - scores_[n + 1]) < 2 * kError ||
                  std::abs(scores_[n] - scores_[n - 1]) < 2 * kError);
    }
  }

  ThreadPool pool_{2};
  Tensor memory_;
  Tensor keys_{DType::kF32, {1, kEntries, kDim}};
  Tensor queries_{DType::kF32, {1, kQueries, kDim}};
  std::vector<float> faiss_scores_ = std::vector<float>(kQueries * kNeighbours);
  std::vector<int64_t> faiss_slots_ = std::vector<int64_t>(kQueries * kNeighbours);
  std::vector<float> scores_ = std::vector<float>(kQueries * kNeighbours);
  std::vector<int32_t> slots_ = std::vector<int32_t>(kQueries * kNeighbours);
};
INSTANTIATE_TEST_SUITE_P(By, FaissTest,
                         testing::Values(SearchMetric::kInnerProduct,
                                         SearchMetric::kSquaredDistance),
                         [](const auto& metric) {
                           return metric.param == SearchMetric::kInnerProduct ? "product"
                                                                              : "distance";
                         });

TEST_P(FaissTest, ExactSearchFindsWhatIndexFlatFinds) {
  SearchCall call = {};
  call.keys = keys_.view();
  call.queries = queries_.view();
  call.entries = kEntries;
  call.k = kNeighbours;
  call.metric = GetParam();
  call.slots = slots_.data();
  call.scores = scores_.data();
  const SearchSizes sizes = {1, 1, kQueries, kDim, kEntries, kNeighbours};
  ASSERT_TRUE(Search(Device::kCpu, call, With(SearchWorkspaceBytes(Device::kCpu, sizes, 2))).ok());
  ExpectSame();
}

TEST_P(FaissTest, AllInvertedListsHaveWhatIndexFlatFinds) {
  InvertedListsOptions options;
  options.lists = 30;
  options.metric = GetParam();
  const ConstTensorView keys(keys_.raw(), DType::kF32, {kEntries, kDim});
  const ConstTensorView queries(queries_.raw(), DType::kF32, {kQueries, kDim});
  const InvertedLists index = InvertedLists::Build(keys, options, &pool_).value();
  ASSERT_TRUE(index
                  .Search({queries, kNeighbours, 30, slots_.data(), scores_.data()},
                          With(index.WorkspaceBytes(kQueries, kNeighbours, 30, 2)))
                  .ok());
  ExpectSame();
}

}  // namespace
}  // namespace tfb
