#include "core/search/inverted_lists.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/random.h"
#include "core/search/search_cpu.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kChunk = 16384;  // keys whose lists are found at once

absl::Status CheckLeast(absl::string_view what, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("inverted lists: ", what, " is ", value, "; allowed are ", least, " or more"));
}

// Returns as many rows, drawn without replacement, in f32 [1, count, dim].
Tensor Sample(const ConstTensorView& keys, int64_t count, uint64_t seed) {
  std::vector<int32_t> order(static_cast<size_t>(keys.dim(1)));
  std::iota(order.begin(), order.end(), 0);
  const RandomStream random(seed, "inverted lists");
  Tensor sample(DType::kF32, {1, count, keys.dim(2)});
  for (int64_t n = 0; n < count; ++n) {
    const auto left = static_cast<uint64_t>(keys.dim(1) - n);
    std::swap(order[n], order[n + static_cast<int64_t>(random.Bits(n) % left)]);
    CopyElements(Slice(keys, 1, order[n], 1), Slice(sample.view(), 1, n, 1));
  }
  return sample;
}

// The nearest centroid of each row, and its squared distance; -1 for a row that is no entry.
struct Nearest {
  std::vector<int32_t> centroids;
  std::vector<float> distances;
};
absl::Status FindNearest(const ConstTensorView& rows, const Tensor& centroids, ThreadPool* pool,
                         Nearest* nearest) {
  nearest->centroids.resize(static_cast<size_t>(rows.dim(1)));
  nearest->distances.resize(static_cast<size_t>(rows.dim(1)));
  const SearchSizes sizes = {1, 1, std::min(kChunk, rows.dim(1)), rows.dim(2), centroids.dim(1), 1};
  Tensor workspace(DType::kU8,
                   {static_cast<int64_t>(SearchCpuWorkspaceBytes(sizes, pool->threads()))});
  Execution execution;
  execution.pool = pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  for (int64_t n = 0; n < rows.dim(1); n += kChunk) {
    SearchCall call = {};
    call.keys = centroids.view();
    call.queries = Slice(rows, 1, n, std::min(kChunk, rows.dim(1) - n));
    call.entries = centroids.dim(1);
    call.k = 1;
    call.metric = SearchMetric::kSquaredDistance;
    call.slots = nearest->centroids.data() + n;
    call.scores = nearest->distances.data() + n;
    TFB_RETURN_IF_ERROR(Search(Device::kCpu, call, execution));
  }
  return absl::OkStatus();
}

// Moves centroids to the means of their rows; those without rows move to the rows that are farthest
// from theirs.
void MoveCentroids(const Tensor& sample, const Nearest& nearest, Tensor* centroids) {
  const int64_t lists = centroids->dim(1), dim = centroids->dim(2);
  std::vector<double> sums(static_cast<size_t>(lists * dim));
  std::vector<int64_t> counts(static_cast<size_t>(lists));
  const float* rows = sample.span<float>().data();
  for (int64_t n = 0; n < sample.dim(1); ++n) {
    const int64_t list = nearest.centroids[n];
    if (list < 0) continue;
    ++counts[list];
    for (int64_t c = 0; c < dim; ++c) sums[list * dim + c] += rows[n * dim + c];
  }
  std::vector<int32_t> farthest(nearest.centroids.size());
  std::iota(farthest.begin(), farthest.end(), 0);
  const auto empty = std::count(counts.begin(), counts.end(), 0);
  std::partial_sort(farthest.begin(), farthest.begin() + empty, farthest.end(),
                    [&](int32_t a, int32_t b) {
                      const auto key = [&](int32_t n) {
                        return nearest.centroids[n] < 0 ? -1 : nearest.distances[n];
                      };
                      return key(a) > key(b) || (key(a) == key(b) && a < b);
                    });
  const int32_t* next = farthest.data();
  float* to = centroids->span<float>().data();
  for (int64_t list = 0; list < lists; ++list, to += dim) {
    if (counts[list] == 0) {
      std::copy_n(rows + *next++ * dim, dim, to);
      continue;
    }
    for (int64_t c = 0; c < dim; ++c) {
      to[c] = static_cast<float>(sums[list * dim + c] / static_cast<double>(counts[list]));
    }
  }
}

ConstTensorView WithHead(const ConstTensorView& rows) {
  return ConstTensorView(rows.data, rows.dtype, {1, rows.dim(0), rows.dim(1)},
                         {0, rows.stride(0), rows.stride(1)});
}

}  // namespace

absl::StatusOr<InvertedLists> InvertedLists::Build(const ConstTensorView& keys,
                                                   const InvertedListsOptions& options,
                                                   ThreadPool* pool) {
  TFB_RETURN_IF_ERROR(CheckLeast("lists", options.lists, 1));
  TFB_RETURN_IF_ERROR(CheckLeast("iterations", options.iterations, 0));
  TFB_RETURN_IF_ERROR(CheckLeast("sample_per_list", options.sample_per_list, 1));
  if (keys.rank != 2) {
    return absl::InvalidArgumentError(absl::StrCat("inverted lists: keys have shape ",
                                                   ShapeString(keys.shape()),
                                                   "; expected are [entries, dim]"));
  }
  InvertedLists index;
  index.keys_ = WithHead(keys);
  index.metric_ = options.metric;
  const int64_t lists = std::min(options.lists, keys.dim(0));
  const Tensor sample =
      Sample(index.keys_, std::min(lists * options.sample_per_list, keys.dim(0)), options.seed);
  index.centroids_ = Tensor(DType::kF32, {1, lists, keys.dim(1)});
  CopyElements(Slice(sample.view(), 1, 0, lists), index.centroids_.view());
  Nearest nearest;
  for (int64_t n = 0; n < options.iterations; ++n) {
    TFB_RETURN_IF_ERROR(FindNearest(sample.view(), index.centroids_, pool, &nearest));
    MoveCentroids(sample, nearest, &index.centroids_);
  }
  TFB_RETURN_IF_ERROR(FindNearest(index.keys_, index.centroids_, pool, &nearest));
  index.Fill(nearest.centroids);
  return index;
}

void InvertedLists::Fill(const std::vector<int32_t>& list_of_slot) {
  begins_.assign(static_cast<size_t>(lists() + 1), 0);
  for (const int32_t list : list_of_slot) {
    if (list >= 0) ++begins_[list + 1];
  }
  std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
  slots_.resize(static_cast<size_t>(begins_.back()));
  std::vector<int32_t> next(begins_.begin(), begins_.end());
  for (size_t slot = 0; slot < list_of_slot.size(); ++slot) {
    if (list_of_slot[slot] >= 0) slots_[next[list_of_slot[slot]]++] = static_cast<int32_t>(slot);
  }
}

absl::Span<const int32_t> InvertedLists::list(int64_t n) const {
  return absl::MakeConstSpan(slots_.data() + begins_[n], slots_.data() + begins_[n + 1]);
}

size_t InvertedLists::bytes() const {
  return centroids_.bytes() + (begins_.size() + slots_.size()) * sizeof(int32_t);
}

namespace {

struct Probes {
  int32_t* lists;  // [queries][probes]
  float* scores;   // likewise
};
Probes LayOut(int64_t count, Workspace& workspace) {
  return {workspace.Take<int32_t>(count), workspace.Take<float>(count)};
}

}  // namespace

size_t InvertedLists::WorkspaceBytes(int64_t queries, int64_t k, int64_t probes,
                                     int threads) const {
  return WorkspaceBytes(keys_.dim(1), keys_.dim(2), lists(), queries, k, probes, threads);
}

size_t InvertedLists::WorkspaceBytes(int64_t entries, int64_t dim, int64_t lists, int64_t queries,
                                     int64_t k, int64_t probes, int threads) {
  lists = std::min(lists, entries);
  probes = std::min(probes, lists);
  const size_t own = Workspace::Measure([&](Workspace& w) { LayOut(queries * probes, w); });
  // The two steps use the same memory, one after the other.
  return own + std::max(SearchCpuWorkspaceBytes({1, 1, queries, dim, lists, probes}, threads),
                        SearchListsWorkspaceBytes({1, 1, queries, dim, entries, k}, lists, probes,
                                                  threads));
}

absl::Status InvertedLists::Search(const Call& call, const Execution& execution) const {
  TFB_RETURN_IF_ERROR(CheckLeast("probes", call.probes, 1));
  if (call.queries.rank != 2) {
    return absl::InvalidArgumentError(absl::StrCat("inverted lists: queries have shape ",
                                                   ShapeString(call.queries.shape()),
                                                   "; expected are [queries, dim]"));
  }
  const int64_t queries = call.queries.dim(0), probes = std::min(call.probes, lists());
  Workspace workspace(execution.workspace);
  const Probes probed = LayOut(queries * probes, workspace);
  Execution step = execution;
  step.workspace = workspace.Rest();

  SearchCall coarse = {};
  coarse.keys = centroids_.view();
  coarse.queries = WithHead(call.queries);
  coarse.entries = lists();
  coarse.k = probes;
  coarse.metric = metric_;
  coarse.slots = probed.lists;
  coarse.scores = probed.scores;
  if (lists() > 0) TFB_RETURN_IF_ERROR(tfb::Search(Device::kCpu, coarse, step));

  SearchCall fine = coarse;
  fine.keys = keys_;
  fine.entries = keys_.dim(1);
  fine.k = call.k;
  fine.slots = call.slots;
  fine.scores = call.scores;
  if (lists() == 0) return tfb::Search(Device::kCpu, fine, step);  // it finds nothing
  SearchLists(fine, {begins_.data(), slots_.data(), lists(), probed.lists, probes}, step);
  return absl::OkStatus();
}

}  // namespace tfb
