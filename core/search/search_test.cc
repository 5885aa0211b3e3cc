// Tests engine search against loops in float64, on all devices of this machine.
#include "core/search/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/allocations.h"
#include "core/cuda/device_array.h"
#include "core/cuda/mirror.h"
#include "core/random.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr SearchMetric kMetrics[] = {SearchMetric::kInnerProduct, SearchMetric::kSquaredDistance};

Tensor Normal(DType dtype, std::initializer_list<int64_t> shape, const char* name,
              uint64_t seed = 1) {
  Tensor tensor(dtype, shape);
  FillNormal(&tensor, seed, name);
  return tensor;
}

// A search on host tensors, and its results.
struct Case {
  Tensor keys;     // [key_heads, slots, dim]
  Tensor queries;  // [heads, queries, dim]
  int64_t k = 1;
  SearchMetric metric = SearchMetric::kInnerProduct;
  SearchSelection selection = SearchSelection::kExact;
  int64_t entries = -1;  // -1: all slots
  int64_t oldest = 0;

  int64_t rows() const { return queries.dim(0) * queries.dim(1); }
};
struct Found {
  std::vector<int32_t> slots;
  std::vector<float> scores;
};

SearchCall CallOf(const Case& c) {
  SearchCall call = {};
  call.keys = c.keys.view();
  call.queries = c.queries.view();
  call.entries = c.entries < 0 ? c.keys.dim(1) : c.entries;
  call.oldest = c.oldest;
  call.k = c.k;
  call.metric = c.metric;
  call.selection = c.selection;
  return call;
}
SearchSizes SizesOf(const Case& c) {
  return {c.keys.dim(0), c.queries.dim(0), c.queries.dim(1), c.keys.dim(2), c.keys.dim(1),
          c.k,           c.selection};
}

// Runs a search with a workspace of exactly the size that it asks for, full of NaN.
absl::StatusOr<Found> RunSearch(Device device, const Case& c, int threads = 2) {
  ThreadPool pool(threads);
  SearchCall call = CallOf(c);
  Found found;
  found.slots.assign(c.rows() * c.k, -7);
  found.scores.assign(c.rows() * c.k, kNan);
  const size_t bytes = SearchWorkspaceBytes(device, SizesOf(c), threads);
  TFB_ASSIGN_OR_RETURN(auto memory, DeviceArray<std::byte>::Create(
                                        device, std::vector<std::byte>(bytes, std::byte{0xFF})));
  TFB_ASSIGN_OR_RETURN(auto slots, DeviceArray<int32_t>::Create(device, found.slots));
  TFB_ASSIGN_OR_RETURN(auto scores, DeviceArray<float>::Create(device, found.scores));
  call.slots = slots.mutable_data();
  call.scores = scores.mutable_data();
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(memory.mutable_data(), bytes);
  std::unique_ptr<DeviceMirror> mirror;
  if (device != Device::kCpu) {
    mirror = std::make_unique<DeviceMirror>(CudaRuntime::For(device).value());
    TFB_ASSIGN_OR_RETURN(call.keys, mirror->Copy(call.keys));
    TFB_ASSIGN_OR_RETURN(call.queries, mirror->Copy(call.queries));
  }
  const int64_t allocations = AllocationCount();
  TFB_RETURN_IF_ERROR(Search(device, call, execution));
  if (device == Device::kCpu) {
    EXPECT_EQ(AllocationCount(), allocations);
  }
  TFB_RETURN_IF_ERROR(slots.Read(found.slots.data()));
  TFB_RETURN_IF_ERROR(scores.Read(found.scores.data()));
  return found;
}

// Computes by loops what search.h defines. Sums are float64 in the order of the channels, so
// entries whose scores differ only in the last bits may come out in the other order; random entries
// do not.
Found Define(const Case& c) {
  const SearchCall call = CallOf(c);
  const int64_t dim = c.keys.dim(2), slots = c.keys.dim(1),
                share = c.queries.dim(0) / c.keys.dim(0);
  const bool distance = c.metric == SearchMetric::kSquaredDistance;
  Found found;
  for (int64_t row = 0; row < c.rows(); ++row) {
    const int64_t head = row / c.queries.dim(1) / share;
    struct Entry {
      double score;
      int64_t age;
      int64_t slot;
    };
    std::vector<Entry> entries;
    const auto before = [](const Entry& a, const Entry& b) {
      return a.score > b.score || (a.score == b.score && a.age < b.age);
    };
    for (int64_t age = 0; age < call.entries; ++age) {
      const int64_t slot = (call.oldest + age) % slots;
      double score = 0, query_square = 0, key_square = 0;
      for (int64_t i = 0; i < dim; ++i) {
        const auto q = static_cast<float>(call.queries.Get(row * dim + i));
        const auto e = static_cast<float>(call.keys.Get((head * slots + slot) * dim + i));
        const double difference = q - e;
        score += distance ? -difference * difference : double{q} * e;
        query_square += double{q} * q;
        key_square += double{e} * e;
      }
      if (query_square <= 0x1p120 && key_square <= 0x1p120) entries.push_back({score, age, slot});
    }
    if (c.selection == SearchSelection::kBucketed) {
      std::vector<Entry> best;
      for (int64_t bucket = 0; bucket < c.k; ++bucket) {
        std::vector<Entry> in_bucket;
        for (const Entry& entry : entries) {
          if (entry.slot % c.k == bucket) in_bucket.push_back(entry);
        }
        const auto first = std::min_element(in_bucket.begin(), in_bucket.end(), before);
        if (first != in_bucket.end()) best.push_back(*first);
      }
      entries = best;
    }
    std::sort(entries.begin(), entries.end(), before);
    for (int64_t n = 0; n < c.k; ++n) {
      const bool exists = n < static_cast<int64_t>(entries.size());
      const double none = -std::numeric_limits<double>::infinity();
      const double score = exists ? entries[n].score : none;
      found.slots.push_back(exists ? static_cast<int32_t>(entries[n].slot) : -1);
      found.scores.push_back(static_cast<float>(distance ? -score : score));
    }
  }
  return found;
}

class SearchTest : public testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  void ExpectAsDefined(const Case& c, const std::string& what) {
    const absl::StatusOr<Found> found = RunSearch(device(), c);
    ASSERT_TRUE(found.ok()) << found.status();
    const Found expected = Define(c);
    EXPECT_EQ(found->slots, expected.slots) << what;
    for (size_t n = 0; n < expected.scores.size(); ++n) {
      if (std::isinf(expected.scores[n])) {
        EXPECT_EQ(found->scores[n], expected.scores[n]) << what << " " << n;
      } else {
        // Both scores are rounded once from sums in float64.
        EXPECT_NEAR(found->scores[n], expected.scores[n],
                    1e-12 + 0x1p-23 * std::abs(expected.scores[n]))
            << what << " " << n;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(On, SearchTest, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

TEST_P(SearchTest, FindsThreePointsOnALineByTheirDistance) {
  Case c;
  c.keys = Tensor(DType::kF32, {1, 3, 1});
  c.queries = Tensor(DType::kF32, {1, 2, 1});
  std::copy_n(std::vector<float>{5, 1, -2}.data(), 3, c.keys.span<float>().data());
  std::copy_n(std::vector<float>{0, 4}.data(), 2, c.queries.span<float>().data());
  c.k = 2;
  c.metric = SearchMetric::kSquaredDistance;
  Found found = RunSearch(device(), c).value();
  EXPECT_EQ(found.slots, (std::vector<int32_t>{1, 2, 0, 1}));
  EXPECT_EQ(found.scores, (std::vector<float>{1, 4, 1, 9}));
  c.metric = SearchMetric::kInnerProduct;
  found = RunSearch(device(), c).value();
  EXPECT_EQ(found.slots, (std::vector<int32_t>{0, 1, 0, 1}))
      << "all products of 0 are 0: the older";
  EXPECT_EQ(found.scores, (std::vector<float>{0, 0, 20, 4}));
}

TEST_P(SearchTest, FindsWhatLoopsFind) {
  struct Sizes {
    int64_t queries, slots, dim, k;
  };
  const Sizes cases[] = {{1, 1, 1, 1},     {3, 63, 7, 5},    {2, 64, 32, 64},  {5, 65, 64, 66},
                         {70, 300, 7, 40}, {3, 129, 192, 3}, {1, 4097, 32, 9}, {17, 4097, 16, 40}};
  for (const Sizes& sizes : cases) {
    for (const SearchMetric metric : kMetrics) {
      Case c;
      const int64_t heads = sizes.slots < 1000 ? 2 : 1;
      c.keys = Normal(DType::kF32, {heads, sizes.slots, sizes.dim}, "keys");
      c.queries = Normal(DType::kF32, {2 * heads, sizes.queries, sizes.dim}, "queries");
      c.k = sizes.k;
      c.metric = metric;
      ExpectAsDefined(c, absl::StrCat(sizes.queries, "x", sizes.slots, "x", sizes.dim,
                                      " k=", sizes.k, " metric ", static_cast<int>(metric)));
    }
  }
}

TEST_P(SearchTest, FindsAllEntriesWhereSoManyAreWanted) {
  for (const int64_t queries : {1, 4}) {
    Case c;
    c.keys = Normal(DType::kF32, {1, 500, 8}, "keys");
    c.queries = Normal(DType::kF32, {1, queries, 8}, "queries");
    for (const int64_t k : {499, 500, 501}) {
      c.k = k;
      ExpectAsDefined(c, absl::StrCat("k=", k));
    }
  }
}

TEST_P(SearchTest, ReadsHalvesAndStrides) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t queries : {2, 20}) {
      Case c;
      c.keys = Normal(dtype, {2, 300, 24}, "keys");
      c.queries = Normal(dtype, {2, queries, 24}, "queries");
      c.k = 7;
      c.metric = SearchMetric::kSquaredDistance;
      ExpectAsDefined(c, std::string(Name(dtype)));
    }
  }
}

TEST_P(SearchTest, OfEqualScoresTheOlderEntryIsFirstAcrossTheRingsEnd) {
  for (const int64_t queries : {1, 70}) {
    for (const SearchMetric metric : kMetrics) {
      Case c;
      c.keys = Normal(DType::kF32, {1, 1000, 6}, "keys");
      // There are seven different keys.
      for (int64_t n = 7; n < 1000; ++n) {
        std::copy_n(c.keys.span<float>().data() + n % 7 * 6, 6,
                    c.keys.span<float>().data() + n * 6);
      }
      c.queries = Normal(DType::kF32, {1, queries, 6}, "queries");
      c.k = 20;
      c.metric = metric;
      c.entries = 990;
      c.oldest = 777;
      ExpectAsDefined(c, absl::StrCat(queries, " queries"));
      c.entries = 100;
      ExpectAsDefined(c, "within the ring");
    }
  }
}

TEST_P(SearchTest, CopiesOfOneKeyAreFoundByAge) {
  for (const int64_t queries : {1, 3}) {
    Case c;
    c.keys = Tensor(DType::kF32, {1, 3000, 5});
    Fill(c.keys.view(), 0.3);
    c.queries = Normal(DType::kF32, {1, queries, 5}, "queries");
    c.k = 4;
    c.oldest = 2998;
    const Found found = RunSearch(device(), c).value();
    for (int64_t q = 0; q < queries; ++q) {
      EXPECT_EQ(std::vector<int32_t>(&found.slots[q * 4], &found.slots[q * 4] + 4),
                (std::vector<int32_t>{2998, 2999, 0, 1}));
    }
  }
}

// |q - e|^2 is 1e-10 of |q|^2: the product form in fp32 cannot tell the entries apart.
TEST_P(SearchTest, NearbyEntriesFarFromTheOriginAreToldApart) {
  Case c;
  c.keys = Normal(DType::kF32, {1, 2000, 16}, "keys");
  for (float& x : c.keys.span<float>()) x = 100 + 1e-3f * x;
  c.queries = Normal(DType::kF32, {1, 5, 16}, "queries");
  for (float& x : c.queries.span<float>()) x = 100 + 1e-3f * x;
  c.k = 10;
  c.metric = SearchMetric::kSquaredDistance;
  ExpectAsDefined(c, "distance");
  c.metric = SearchMetric::kInnerProduct;
  ExpectAsDefined(c, "product");
}

TEST_P(SearchTest, WhatIsNotFiniteIsNotFoundAndFindsNothing) {
  for (const int64_t queries : {2, 5}) {
    for (const SearchMetric metric : kMetrics) {
      Case c;
      c.keys = Normal(DType::kF32, {1, 40, 3}, "keys");
      c.queries = Normal(DType::kF32, {1, queries, 3}, "queries");
      const float strange[] = {kNan, kInfinity, -kInfinity, 2e18f, -3e38f};
      for (int64_t n = 0; n < 5; ++n) c.keys.span<float>()[n * 7 * 3 + n % 3] = strange[n];
      c.keys.span<float>()[36 * 3] = 1e17f;  // this entry is far, but is found
      c.queries.span<float>()[1] = kNan;
      c.k = 38;
      c.metric = metric;
      ExpectAsDefined(c, "");
      const Found found = RunSearch(device(), c).value();
      EXPECT_EQ(found.slots[0], -1);
      EXPECT_EQ(found.slots[38 + 34] >= 0, true);
      EXPECT_EQ(found.slots[38 + 35], -1);
    }
  }
}

TEST_P(SearchTest, NoEntriesAndNoQueries) {
  Case c;
  c.keys = Normal(DType::kF32, {1, 5, 4}, "keys");
  c.queries = Normal(DType::kF32, {1, 3, 4}, "queries");
  c.k = 2;
  c.entries = 0;
  ExpectAsDefined(c, "empty ring");
  c.keys = Tensor(DType::kF32, {1, 0, 4});
  c.entries = -1;
  ExpectAsDefined(c, "no ring");
  c.queries = Tensor(DType::kF32, {1, 0, 4});
  EXPECT_TRUE(RunSearch(device(), c)->slots.empty());
  c.queries = Tensor(DType::kF32, {0, 3, 4});
  EXPECT_TRUE(RunSearch(device(), c)->slots.empty());
  for (const SearchSizes& sizes : {SearchSizes{1, 0, 3, 4, 5, 2}, SearchSizes{1, 1, 0, 4, 5, 2},
                                   SearchSizes{1, 1, 3, 4, 0, 2}}) {
    EXPECT_EQ(SearchWorkspaceBytes(Device::kCpu, sizes, 2), 0u);
  }
}

TEST_P(SearchTest, ABucketGivesItsBest) {
  for (const int64_t queries : {1, 30}) {
    for (const SearchMetric metric : kMetrics) {
      Case c;
      c.keys = Normal(DType::kF32, {1, 1200, 16}, "keys");
      c.queries = Normal(DType::kF32, {1, queries, 16}, "queries");
      c.k = 6;
      c.metric = metric;
      c.selection = SearchSelection::kBucketed;
      ExpectAsDefined(c, "full");
      c.entries = 1000;
      c.oldest = 500;
      ExpectAsDefined(c, "ring");
      c.k = 7;
      ExpectAsDefined(c, "a number of buckets that does not divide the slots");
      c.entries = 5;
      ExpectAsDefined(c, "more buckets than entries");
    }
  }
}

// The numbers are small and whole: scores are often equal.
TEST(SearchCuda, FindsWhatTheCpuFindsBitForBit) {
  for (const SearchMetric metric : kMetrics) {
    for (const SearchSelection selection : {SearchSelection::kExact, SearchSelection::kBucketed}) {
      for (const int64_t dim : {2, 33}) {
        Case c;
        c.keys = Normal(DType::kF32, {1, 900, dim}, "keys");
        c.queries = Normal(DType::kF32, {2, 9, dim}, "queries");
        for (Tensor* tensor : {&c.keys, &c.queries}) {
          for (float& x : tensor->span<float>()) x = dim == 2 ? std::round(2 * x) : x;
        }
        c.k = 11;
        c.metric = metric;
        c.selection = selection;
        c.entries = 850;
        c.oldest = 300;
        const Found cpu = RunSearch(Device::kCpu, c).value();
        const Found cuda = RunSearch(KernelDevice(), c).value();
        EXPECT_EQ(cpu.slots, cuda.slots);
        EXPECT_EQ(cpu.scores, cuda.scores);
      }
    }
  }
}

TEST_P(SearchTest, SizesThatDoNotFitAreErrors) {
  Case c;
  c.keys = Normal(DType::kF32, {2, 5, 4}, "keys");
  c.queries = Normal(DType::kF32, {2, 3, 4}, "queries");
  c.entries = 6;
  EXPECT_EQ(RunSearch(device(), c).status().message(), "search: entries is 6; allowed are 0 to 5");
  c.entries = 5;
  c.oldest = 5;
  EXPECT_EQ(RunSearch(device(), c).status().message(), "search: oldest is 5; allowed are 0 to 4");
  c.oldest = 0;
  c.queries = Normal(DType::kF32, {2, 3, 5}, "queries");
  EXPECT_EQ(RunSearch(device(), c).status().message(),
            "search: queries have 5 channels and keys 4");
  c.queries = Normal(DType::kF32, {3, 3, 4}, "queries");
  EXPECT_EQ(RunSearch(device(), c).status().message(),
            "search: 3 heads of queries; allowed are multiples of the keys' 2");
  c.queries = Tensor(DType::kI32, {2, 3, 4});
  EXPECT_EQ(RunSearch(device(), c).status().message(),
            "search: queries are i32 [2, 3, 4]; allowed are f32, f16 and bf16 [heads, rows, dim], "
            "channels 1 apart");
}

TEST(SearchCpu, ViewsThatAreNotRowsSideBySideAreErrors) {
  const Tensor memory = Normal(DType::kF32, {64}, "memory");
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {1 << 20});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  int32_t slot;
  float score;
  const auto error = [&](const ConstTensorView& keys, int64_t dim, int64_t k) {
    SearchCall call = {};
    call.keys = keys;
    call.queries = ConstTensorView(memory.raw(), DType::kF32, {1, 1, dim});
    call.k = k;
    call.slots = &slot;
    call.scores = &score;
    return std::string(Search(Device::kCpu, call, execution).message());
  };
  const auto keys = [&](const Shape& shape, const Shape& strides) {
    return ConstTensorView(memory.raw(), DType::kF32, shape, strides);
  };
  EXPECT_EQ(error(keys({1, 3, 2}, {6, 2, 2}), 2, 1),
            "search: keys are f32 [1, 3, 2], channels 2 apart; allowed are f32, f16 and bf16 "
            "[heads, rows, dim], channels 1 apart");
  EXPECT_EQ(error(keys({3, 2}, {2, 1}), 2, 1),
            "search: keys are f32 [3, 2]; allowed are f32, f16 and bf16 [heads, rows, dim], "
            "channels 1 apart");
  const int64_t most = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(error(keys({0, 3, 2}, {6, 2, 1}), 2, 1),
            "search: 1 heads of queries; allowed are multiples of the keys' 0");
  EXPECT_THAT(error(keys({1, most + 1, 2}, {0, 2, 1}), 2, 1),
              testing::StartsWith("search: number of slots is 2147483648; allowed are 0 to "));
  EXPECT_THAT(error(keys({1, 3, 2}, {6, 2, 1}), 2, 0),
              testing::StartsWith("search: k is 0; allowed are 1 to "));
  // Where there is no entry, nothing is found; one channel may have any stride.
  EXPECT_EQ(error(keys({1, 3, 1}, {6, 2, 2}), 1, 1), "");
  EXPECT_EQ(slot, -1);
  EXPECT_EQ(score, -kInfinity);
}

// Few queries are searched in more parts than many.
TEST_P(SearchTest, AWorkspaceForManyQueriesServesFewer) {
  for (const SearchSelection selection : {SearchSelection::kExact, SearchSelection::kBucketed}) {
    for (const int threads : {2, 7}) {
      // Of 600 queries all calls are cut, and of 40,000 those of the fewest.
      for (const auto& [most, step] : {std::pair<int64_t, int64_t>(600, 1), {40000, 59}}) {
        SearchSizes sizes = {1, 1, most, 8, 20000, 32, selection};
        const size_t bytes = SearchWorkspaceBytes(device(), sizes, threads);
        for (sizes.queries = 1; sizes.queries < most; sizes.queries += step) {
          EXPECT_LE(SearchWorkspaceBytes(device(), sizes, threads), bytes) << sizes.queries;
        }
      }
    }
  }
}

// The case has parts of 8192 entries, the last of which is cut off, around the ring's end; queries
// of two panels, the last of which is not full; some rows that are no entries, and others nearly
// the same.
TEST_P(SearchTest, LongRingsAreSearchedPartByPart) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const SearchMetric metric : kMetrics) {
      if (device() != Device::kCpu && dtype != DType::kF32) continue;  // the simulator is slow
      Case c;
      c.keys = Normal(dtype, {1, 20000, 6}, "keys");
      c.queries = Normal(dtype, {1, device() == Device::kCpu ? 83 : 5, 6}, "queries");
      for (int64_t n = 1; n < 20000; ++n) {
        if (n % 501 == 0) c.keys.view().Set(6 * n + 2, kNan);
        const bool close = n % 3 == 0 && n > 9000;
        for (int64_t i = 0; close && i < 6; ++i) {
          const double first = c.keys.view().Get(i);
          c.keys.view().Set(6 * n + i, first + 1e-6 * c.keys.view().Get(6 * n + i));
        }
      }
      c.k = 40;
      c.metric = metric;
      c.entries = 19990;
      c.oldest = 12345;
      ExpectAsDefined(c, absl::StrCat(Name(dtype), " metric ", static_cast<int>(metric)));
    }
  }
}

// A batch holds the maximum of each four of a part's scores where there are at least 16 entries for
// each wanted hit, and where 32,768 of them are enough for that.
TEST(SearchCpu, MaximaOfScoresHaveRoomWhereASearchUsesThem) {
  for (const int64_t k : {1, 100, 512, 2048, 2049, 4000}) {
    const auto bytes = [k](int64_t slots) {
      return static_cast<int64_t>(
          SearchWorkspaceBytes(Device::kCpu, {1, 1, /*queries=*/64, 8, slots, k}, /*threads=*/1));
    };
    const int64_t least = 16 * k, maxima = 64 * (least / 4) * 4;
    EXPECT_EQ(bytes(least) - bytes(least - 1) >= maxima, k <= 2048) << k;
    // Without them the workspace is that of the candidates, whose number the slots no longer limit.
    EXPECT_EQ(bytes(least - 1), bytes(least / 2)) << k;
    EXPECT_EQ(bytes(64 * k) == bytes(least - 1), k > 2048) << k;
  }
}

TEST(SearchCpu, ThreadsChangeNoBit) {
  for (const int64_t queries : {1, 2, 3, 100, 300}) {
    Case c;
    c.keys = Normal(DType::kF32, {1, 20000, 24}, "keys");
    c.queries = Normal(DType::kF32, {1, queries, 24}, "queries");
    c.k = 33;
    c.metric = SearchMetric::kSquaredDistance;
    const Found one = RunSearch(Device::kCpu, c, 1).value();
    for (const int threads : {2, 3, 4, 5}) {
      const Found many = RunSearch(Device::kCpu, c, threads).value();
      EXPECT_EQ(one.slots, many.slots);
      EXPECT_EQ(one.scores, many.scores);
    }
  }
}

// The expected share of the k best that fall into different buckets is 1 - (1 - 1 / k)^k = 0.638 at k =
// 32; its standard deviation over 2,000 queries is below 0.002.
TEST(SearchCpu, BucketsFindTheShareOfTheBestThatChanceGivesThem) {
  Case c;
  c.keys = Normal(DType::kF32, {1, 8192, 16}, "keys");
  c.queries = Normal(DType::kF32, {1, 2000, 16}, "queries");
  c.k = 32;
  const Found exact = RunSearch(Device::kCpu, c).value();
  c.selection = SearchSelection::kBucketed;
  const Found bucketed = RunSearch(Device::kCpu, c).value();
  double found = 0;
  for (int64_t row = 0; row < c.rows(); ++row) {
    EXPECT_EQ(bucketed.slots[row * 32], exact.slots[row * 32]) << "the best is its bucket's";
    for (int64_t n = 0; n < 32; ++n) {
      const int32_t* begin = &bucketed.slots[row * 32];
      found += std::count(begin, begin + 32, exact.slots[row * 32 + n]) / (32.0 * 2000);
    }
  }
  EXPECT_NEAR(found, 1 - std::pow(31.0 / 32, 32), 0.01);
}

}  // namespace
}  // namespace tfb
