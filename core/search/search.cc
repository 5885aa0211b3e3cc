#include "core/search/search.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/search/search_cpu.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr int64_t kMaxSlots = std::numeric_limits<int32_t>::max();

absl::Status CheckRange(absl::string_view what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("search: ", what, " is ", value, "; allowed are ", least, " to ", most));
}

absl::Status CheckTensor(absl::string_view what, const ConstTensorView& view) {
  const bool floating =
      view.dtype == DType::kF32 || view.dtype == DType::kF16 || view.dtype == DType::kBF16;
  if (view.rank == 3 && floating && (view.stride(2) == 1 || view.dim(2) <= 1)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "search: ", what, " are ", Name(view.dtype), " ", ShapeString(view.shape()),
      view.rank == 3 && view.stride(2) != 1 ? absl::StrCat(", channels ", view.stride(2), " apart")
                                            : "",
      "; allowed are f32, f16 and bf16 [heads, rows, dim], channels 1 apart"));
}

absl::Status Check(const SearchCall& call) {
  TFB_RETURN_IF_ERROR(CheckTensor("keys", call.keys));
  TFB_RETURN_IF_ERROR(CheckTensor("queries", call.queries));
  const int64_t key_heads = call.keys.dim(0), heads = call.queries.dim(0);
  if (key_heads < 1 || heads % key_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "search: ", heads, " heads of queries; allowed are multiples of the keys' ", key_heads));
  }
  if (call.queries.dim(2) != call.keys.dim(2)) {
    return absl::InvalidArgumentError(absl::StrCat("search: queries have ", call.queries.dim(2),
                                                   " channels and keys ", call.keys.dim(2)));
  }
  TFB_RETURN_IF_ERROR(CheckRange("number of slots", call.keys.dim(1), 0, kMaxSlots));
  TFB_RETURN_IF_ERROR(CheckRange("entries", call.entries, 0, call.keys.dim(1)));
  TFB_RETURN_IF_ERROR(
      CheckRange("oldest", call.oldest, 0, std::max<int64_t>(call.keys.dim(1) - 1, 0)));
  return CheckRange("k", call.k, 1, kMaxSlots);
}

// ---- CUDA ----

constexpr int64_t kBlocksOfMultiprocessor = 2;
constexpr int64_t kPartEntries = 4096;       // at least
constexpr int64_t kSlack = 4 * kSearchKeys;  // candidates beyond the hits, at the least

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t BlocksAtOnce(const CudaRuntime& runtime) {
  return kBlocksOfMultiprocessor * runtime.properties().multiprocessors;
}

// Returns the sizes of a call on a GPU that runs so many blocks at once, without its tensors.
SearchArguments PlanCuda(const SearchSizes& sizes, int64_t at_once) {
  SearchArguments a = {};
  a.key_heads = sizes.key_heads;
  a.heads = sizes.heads;
  a.query_count = sizes.queries;
  a.slots = sizes.slots;
  a.dim = sizes.dim;
  a.k = sizes.k;
  a.score_error = ScoreError(sizes.dim);
  a.bucketed = sizes.selection == SearchSelection::kBucketed;
  a.hits = a.bucketed ? 1 : std::min(sizes.k, sizes.slots);
  a.capacity = std::min(a.hits + std::max(a.hits, kSlack), sizes.slots + kSearchKeys);
  const int64_t tiles = std::max<int64_t>(sizes.heads * CeilDiv(sizes.queries, kSearchQueries), 1);
  const int64_t most = sizes.slots / std::max(kPartEntries, 4 * a.hits);
  a.parts = a.bucketed ? sizes.k : std::max<int64_t>(std::min(CeilDiv(at_once, tiles), most), 1);
  a.blocks = std::min(tiles * a.parts, at_once);
  return a;
}

void LayOut(Workspace& workspace, SearchArguments* a) {
  const int64_t candidates = a->blocks * kSearchQueries * a->capacity;
  a->max_squares = workspace.Take<int32_t>(a->key_heads);
  a->half_norms = workspace.Take<float>(a->key_heads * a->slots);
  a->candidate_scores = workspace.Take<float>(candidates);
  a->candidate_ages = workspace.Take<int32_t>(candidates);
  a->exact = workspace.Take<double>(a->blocks * kSearchWarps * a->capacity);
  a->found = workspace.Take<SearchHit>(a->heads * a->query_count * a->parts * a->hits);
}

absl::Status SearchCuda(CudaRuntime* runtime, const SearchCall& call, const Execution& execution) {
  const SearchSizes sizes = {call.keys.dim(0), call.queries.dim(0), call.queries.dim(1),
                             call.keys.dim(2), call.keys.dim(1),    call.k,
                             call.selection};
  SearchArguments a = PlanCuda(sizes, BlocksAtOnce(*runtime));
  Workspace workspace(execution.workspace);
  LayOut(workspace, &a);
  a.keys = ToDeviceView(call.keys);
  a.queries = ToDeviceView(call.queries);
  a.entries = call.entries;
  a.oldest = call.oldest;
  a.metric = call.metric;
  a.result_slots = call.slots;
  a.result_scores = call.scores;
  const auto& kernels = KernelsOn<SearchKernels>(runtime->target());
  void* stream = execution.stream;
  TFB_RETURN_IF_ERROR(
      runtime->Fill(a.max_squares, 0, a.key_heads * sizeof(*a.max_squares), stream));
  TFB_RETURN_IF_ERROR(ToStatus(kernels.measure(a, stream)));
  TFB_RETURN_IF_ERROR(ToStatus(kernels.search(a, stream)));
  return ToStatus(kernels.merge(a, stream));
}

}  // namespace

size_t SearchWorkspaceBytes(Device device, const SearchSizes& sizes, int threads) {
  CudaRuntime* runtime = nullptr;
  if (device != Device::kCpu) {
    const absl::StatusOr<CudaRuntime*> found = CudaRuntime::For(device);
    if (!found.ok()) return 0;  // Search returns the error
    runtime = *found;
  }
  const auto bytes_of = [&](const SearchSizes& call) {
    if (runtime == nullptr) return SearchCpuWorkspaceBytes(call, threads);
    return Workspace::Measure([&](Workspace& workspace) {
      SearchArguments a = PlanCuda(call, BlocksAtOnce(*runtime));
      LayOut(workspace, &a);
    });
  };
  // Fewer queries may need more memory where they are so few that the entries are cut into parts.
  // Plans change between multiples of kSearchQueries, and the largest of the queries that share a
  // plan needs most.
  size_t bytes = bytes_of(sizes);
  SearchSizes fewer = sizes;
  const int64_t most_cut =
      runtime == nullptr ? MostQueriesOfParts(threads) : kSearchQueries * BlocksAtOnce(*runtime);
  for (int64_t tiles = std::min(sizes.queries - 1, most_cut) / kSearchQueries; tiles > 0; --tiles) {
    fewer.queries = tiles * kSearchQueries;
    bytes = std::max(bytes, bytes_of(fewer));
  }
  return bytes;
}

absl::Status Search(Device device, const SearchCall& call, const Execution& execution) {
  TFB_RETURN_IF_ERROR(Check(call));
  if (device == Device::kCpu) {
    SearchCpu(call, execution);
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device));
  return SearchCuda(runtime, call, execution);
}

}  // namespace tfb
