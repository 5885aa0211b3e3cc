#include "core/search/inverted_lists.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "core/allocations.h"
#include "core/random.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr SearchMetric kMetrics[] = {SearchMetric::kInnerProduct, SearchMetric::kSquaredDistance};

// Returns rows near `centers` points; row n is near point n % centers.
Tensor Clustered(int64_t rows, int64_t dim, int64_t centers, double spread, const char* name) {
  Tensor points(DType::kF32, {centers, dim}), tensor(DType::kF32, {rows, dim});
  FillNormal(&points, 1, "centers");
  FillNormal(&tensor, 2, name, 0, spread);
  for (int64_t n = 0; n < rows * dim; ++n) {
    tensor.span<float>()[n] += points.span<float>()[n / dim % centers * dim + n % dim];
  }
  return tensor;
}

struct Found {
  std::vector<int32_t> slots;
  std::vector<float> scores;
};

Found Exact(const Tensor& keys, const Tensor& queries, int64_t k, SearchMetric metric) {
  ThreadPool pool(2);
  Found found = {std::vector<int32_t>(queries.dim(0) * k), std::vector<float>(queries.dim(0) * k)};
  SearchCall call = {};
  call.keys = ConstTensorView(keys.raw(), keys.dtype(), {1, keys.dim(0), keys.dim(1)});
  call.queries =
      ConstTensorView(queries.raw(), queries.dtype(), {1, queries.dim(0), queries.dim(1)});
  call.entries = keys.dim(0);
  call.k = k;
  call.metric = metric;
  call.slots = found.slots.data();
  call.scores = found.scores.data();
  const SearchSizes sizes = {1, 1, queries.dim(0), keys.dim(1), keys.dim(0), k};
  Tensor workspace(DType::kU8,
                   {static_cast<int64_t>(SearchWorkspaceBytes(Device::kCpu, sizes, 2))});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  EXPECT_TRUE(Search(Device::kCpu, call, execution).ok());
  return found;
}

Found Approximate(const InvertedLists& index, const Tensor& queries, int64_t k, int64_t probes,
                  int threads = 2) {
  ThreadPool pool(threads);
  Found found = {std::vector<int32_t>(queries.dim(0) * k, -7),
                 std::vector<float>(queries.dim(0) * k)};
  const size_t bytes = index.WorkspaceBytes(queries.dim(0), k, probes, threads);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(bytes)});
  std::fill_n(static_cast<uint8_t*>(workspace.raw()), bytes, 0xFF);
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), bytes);
  const int64_t allocations = AllocationCount();
  EXPECT_TRUE(
      index.Search({queries.view(), k, probes, found.slots.data(), found.scores.data()}, execution)
          .ok());
  EXPECT_EQ(AllocationCount(), allocations);
  return found;
}

InvertedLists Build(const Tensor& keys, const InvertedListsOptions& options, int threads = 2) {
  ThreadPool pool(threads);
  return InvertedLists::Build(keys.view(), options, &pool).value();
}

TEST(InvertedLists, EveryEntryIsInOneList) {
  const Tensor keys = Clustered(3000, 12, 40, 0.3, "keys");
  InvertedListsOptions options;
  options.lists = 50;
  const InvertedLists index = Build(keys, options);
  ASSERT_EQ(index.lists(), 50);
  std::vector<int32_t> slots;
  for (int64_t n = 0; n < 50; ++n) {
    slots.insert(slots.end(), index.list(n).begin(), index.list(n).end());
    EXPECT_TRUE(std::is_sorted(index.list(n).begin(), index.list(n).end()));
  }
  std::sort(slots.begin(), slots.end());
  std::vector<int32_t> all(3000);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(slots, all);
}

TEST(InvertedLists, ProbingAllListsIsExactSearch) {
  for (const SearchMetric metric : kMetrics) {
    for (const int64_t queries : {1, 40}) {
      const Tensor keys = Clustered(2000, 20, 30, 0.5, "keys");
      const Tensor asked = Clustered(queries, 20, 30, 0.5, "queries");
      InvertedListsOptions options;
      options.lists = 33;
      options.metric = metric;
      const InvertedLists index = Build(keys, options);
      for (const int64_t k : {1, 10, 300}) {
        const Found exact = Exact(keys, asked, k, metric);
        for (const int64_t probes : {33, 100}) {
          const Found found = Approximate(index, asked, k, probes);
          EXPECT_EQ(found.slots, exact.slots);
          EXPECT_EQ(found.scores, exact.scores);
          EXPECT_EQ(index.WorkspaceBytes(queries, k, probes, 2),
                    index.WorkspaceBytes(queries, k, 33, 2));
        }
      }
    }
  }
}

// The list of each slot.
std::vector<int64_t> ListOfSlot(const InvertedLists& index, int64_t slots) {
  std::vector<int64_t> lists(slots, -1);
  for (int64_t n = 0; n < index.lists(); ++n) {
    for (const int32_t slot : index.list(n)) lists[slot] = n;
  }
  return lists;
}

// With a sample of all keys, the centroids of an iteration are the means of the lists before it.
TEST(InvertedLists, AnIterationPutsEachKeyIntoTheListWithTheNearestMean) {
  constexpr int64_t kKeys = 400, kDim = 3;
  const Tensor keys = Clustered(kKeys, kDim, kKeys, 1, "keys");
  InvertedListsOptions options;
  options.lists = 6;
  options.sample_per_list = kKeys;
  options.iterations = 0;
  std::vector<int64_t> before = ListOfSlot(Build(keys, options), kKeys);
  for (options.iterations = 1; options.iterations < 5; ++options.iterations) {
    std::vector<double> means(6 * kDim), counts(6);
    for (int64_t slot = 0; slot < kKeys; ++slot) {
      ++counts[before[slot]];
      for (int64_t c = 0; c < kDim; ++c) {
        means[before[slot] * kDim + c] += keys.span<float>()[slot * kDim + c];
      }
    }
    for (int64_t n = 0; n < 6 * kDim; ++n) means[n] /= counts[n / kDim];
    std::vector<int64_t> nearest;
    for (int64_t slot = 0; slot < kKeys; ++slot) {
      std::vector<double> distances(6);
      for (int64_t n = 0; n < 6 * kDim; ++n) {
        const double difference = keys.span<float>()[slot * kDim + n % kDim] - means[n];
        distances[n / kDim] += difference * difference;
      }
      nearest.push_back(std::min_element(distances.begin(), distances.end()) - distances.begin());
    }
    before = ListOfSlot(Build(keys, options), kKeys);
    EXPECT_EQ(before, nearest) << options.iterations;
  }
}

// All centroids are drawn from copies of one key, and all but one of them lose it to the first.
TEST(InvertedLists, ListsWithoutRowsMoveToTheFarthestOnes) {
  Tensor keys(DType::kF32, {60, 2});
  Fill(keys.view(), 1);
  keys.span<float>()[2 * 58] = 50;
  keys.span<float>()[2 * 59] = -80;
  keys.span<float>()[2 * 57] = std::numeric_limits<float>::quiet_NaN();
  InvertedListsOptions options;
  options.lists = 3;
  for (options.seed = 1; options.seed < 9; ++options.seed) {
    std::vector<int64_t> lists = ListOfSlot(Build(keys, options), 60);
    EXPECT_EQ(std::count(lists.begin(), lists.end(), lists[0]), 57) << options.seed;
    EXPECT_EQ(lists[57], -1);
    EXPECT_EQ(std::count(lists.begin(), lists.end(), lists[58]), 1);
    EXPECT_EQ(std::count(lists.begin(), lists.end(), lists[59]), 1);
  }
}

TEST(InvertedLists, CentroidsAreDrawnFromAllKeysWithoutReplacement) {
  const Tensor keys = Clustered(30, 4, 30, 1, "keys");
  InvertedListsOptions options;
  options.iterations = 0;
  options.lists = 30;
  const InvertedLists all = Build(keys, options);
  for (int64_t n = 0; n < 30; ++n) EXPECT_EQ(all.list(n).size(), 1u);
  EXPECT_EQ(all.bytes(), (30 * 4 + 31 + 30) * sizeof(float));
  options.lists = 5;
  const std::vector<int64_t> one = ListOfSlot(Build(keys, options), 30);
  options.seed = 2;
  EXPECT_NE(ListOfSlot(Build(keys, options), 30), one);
}

// Clusters lie |c_i - c_j| = sqrt(2 * 32) = 8 apart, and their points 0.1 sqrt(32) = 0.6 from their
// centers. No point of a query's cluster is in another list, so one list has the ten best.
TEST(InvertedLists, OneListHasTheNeighboursOfWellPartedClusters) {
  const Tensor keys = Clustered(4000, 32, 20, 0.1, "keys");
  const Tensor queries = Clustered(200, 32, 20, 0.1, "queries");
  InvertedListsOptions options;
  options.lists = 20;
  options.iterations = 20;
  const InvertedLists index = Build(keys, options);
  const Found exact = Exact(keys, queries, 1, SearchMetric::kSquaredDistance);
  // Where k-means has cut a cluster in two, only the queries near the cut find their best entry in
  // one list, and 20 random seeds leave a few such clusters; four lists hold any cluster.
  const Found one = Approximate(index, queries, 1, 1), four = Approximate(index, queries, 1, 4);
  int64_t of_one = 0, of_four = 0;
  for (int64_t q = 0; q < 200; ++q) {
    of_one += one.slots[q] == exact.slots[q];
    of_four += four.slots[q] == exact.slots[q];
  }
  EXPECT_GE(of_one, 140);
  EXPECT_EQ(of_four, 200);
}

TEST(InvertedLists, MoreProbesFindNoLess) {
  const Tensor keys = Clustered(4000, 24, 500, 1, "keys");
  const Tensor queries = Clustered(100, 24, 500, 1, "queries");
  InvertedListsOptions options;
  options.lists = 64;
  const InvertedLists index = Build(keys, options);
  const Found exact = Exact(keys, queries, 10, SearchMetric::kSquaredDistance);
  int64_t before = 0;
  for (const int64_t probes : {1, 4, 16, 64}) {
    const Found found = Approximate(index, queries, 10, probes);
    int64_t hits = 0;
    for (int64_t n = 0; n < 1000; ++n) {
      const int32_t* row = found.slots.data() + n / 10 * 10;
      hits += std::count(row, row + 10, exact.slots[n]);
    }
    EXPECT_GE(hits, before);
    before = hits;
  }
  EXPECT_EQ(before, 1000);
}

TEST(InvertedLists, ThreadsChangeNoBit) {
  const Tensor keys = Clustered(5000, 16, 100, 0.7, "keys");
  const Tensor queries = Clustered(77, 16, 100, 0.7, "queries");
  InvertedListsOptions options;
  options.lists = 40;
  const InvertedLists one = Build(keys, options, 1), three = Build(keys, options, 3);
  for (int64_t n = 0; n < 40; ++n) EXPECT_EQ(one.list(n), three.list(n));
  const Found a = Approximate(one, queries, 5, 3, 1), b = Approximate(three, queries, 5, 3, 4);
  EXPECT_EQ(a.slots, b.slots);
  EXPECT_EQ(a.scores, b.scores);
}

TEST(InvertedLists, FewKeysStrangeKeysAndNoKeys) {
  InvertedListsOptions options;
  Tensor keys = Clustered(7, 3, 7, 0.1, "keys");
  const Tensor queries = Clustered(2, 3, 7, 0.1, "queries");
  EXPECT_EQ(Build(keys, options).lists(), 7);
  keys.span<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  const InvertedLists index = Build(keys, options);
  const Found found = Approximate(index, queries, 7, 7);
  EXPECT_EQ(found.slots, Exact(keys, queries, 7, SearchMetric::kSquaredDistance).slots);
  EXPECT_EQ(found.slots[6], -1);
  const Tensor none(DType::kF32, {0, 3});
  EXPECT_EQ(Approximate(Build(none, options), queries, 1, 1).slots, (std::vector<int32_t>{-1, -1}));
}

TEST(InvertedLists, ReadsHalves) {
  const Tensor keys = Clustered(900, 10, 30, 0.4, "keys").CloneAs(DType::kF16);
  const Tensor queries = Clustered(9, 10, 30, 0.4, "queries");
  InvertedListsOptions options;
  options.lists = 16;
  EXPECT_EQ(Approximate(Build(keys, options), queries, 5, 16).slots,
            Exact(keys, queries, 5, SearchMetric::kSquaredDistance).slots);
}

TEST(InvertedLists, OptionsOutOfRangeAreErrors) {
  ThreadPool pool(1);
  const auto error = [&pool](const Shape& shape, int64_t InvertedListsOptions::*option,
                             int64_t value) {
    const Tensor keys(DType::kF32, shape);
    InvertedListsOptions options;
    options.*option = value;
    return std::string(InvertedLists::Build(keys.view(), options, &pool).status().message());
  };
  EXPECT_EQ(error({4, 2}, &InvertedListsOptions::lists, 0),
            "inverted lists: lists is 0; allowed are 1 or more");
  EXPECT_EQ(error({4, 2}, &InvertedListsOptions::iterations, -1),
            "inverted lists: iterations is -1; allowed are 0 or more");
  EXPECT_EQ(error({4, 2}, &InvertedListsOptions::sample_per_list, 0),
            "inverted lists: sample_per_list is 0; allowed are 1 or more");
  EXPECT_EQ(error({1, 4, 2}, &InvertedListsOptions::lists, 1),
            "inverted lists: keys have shape [1, 4, 2]; expected are [entries, dim]");
}

TEST(InvertedLists, CallsThatAreWrongAreErrorsAndWriteNothing) {
  ThreadPool pool(1);
  const Tensor keys = Clustered(100, 2, 10, 0.1, "keys");
  InvertedListsOptions options;
  options.lists = 10;
  const InvertedLists index = Build(keys, options);
  const auto error = [&](const Shape& shape, int64_t probes) {
    const Tensor queries = Clustered(3, 2, 3, 0.1, "queries");
    const ConstTensorView view(queries.raw(), DType::kF32, shape);
    std::vector<int32_t> slots(3, -7);
    std::vector<float> scores(3, -7);
    Tensor workspace(DType::kU8, {static_cast<int64_t>(index.WorkspaceBytes(3, 1, 10, 1))});
    Execution execution;
    execution.pool = &pool;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
    const absl::Status status =
        index.Search({view, /*k=*/1, probes, slots.data(), scores.data()}, execution);
    EXPECT_EQ(slots == std::vector<int32_t>(3, -7), !status.ok());
    EXPECT_EQ(scores == std::vector<float>(3, -7), !status.ok());
    return std::string(status.message());
  };
  EXPECT_EQ(error({3, 2}, 1), "");
  EXPECT_EQ(error({3, 2}, 0), "inverted lists: probes is 0; allowed are 1 or more");
  EXPECT_EQ(error({3, 2}, -1), "inverted lists: probes is -1; allowed are 1 or more");
  EXPECT_EQ(error({1, 3, 2}, 1),
            "inverted lists: queries have shape [1, 3, 2]; expected are [queries, dim]");
}

}  // namespace
}  // namespace tfb
