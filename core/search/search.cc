#include "core/search/search.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/search/search_cpu.h"

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

}  // namespace

size_t SearchWorkspaceBytes(Device device, const SearchSizes& sizes, int threads) {
  (void)device;
  return SearchCpuWorkspaceBytes(sizes, threads);
}

absl::Status Search(Device device, const SearchCall& call, const Execution& execution) {
  TFB_RETURN_IF_ERROR(Check(call));
  (void)device;
  SearchCpu(call, execution);
  return absl::OkStatus();
}

}  // namespace tfb
