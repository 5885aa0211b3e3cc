#include "core/zeros.h"

#include <cstdint>
#include <cstring>

namespace tfb {

void SetToZero(absl::Span<std::byte> memory, ThreadPool* pool) {
  constexpr int64_t kPiece = int64_t{1} << 18;
  pool->ParallelForRanges(
      static_cast<int64_t>(memory.size()), kPiece,
      [&](int64_t begin, int64_t end, int) { std::memset(memory.data() + begin, 0, end - begin); });
}

void SetToZero(const TensorView& view, ThreadPool* pool) {
  const int64_t size = static_cast<int64_t>(SizeOf(view.dtype));
  auto* first = static_cast<std::byte*>(view.mutable_data());
  if (view.is_contiguous()) {
    return SetToZero({first, static_cast<size_t>(view.num_elements() * size)}, pool);
  }
  if (view.stride(view.rank - 1) != 1) return Fill(view, 0);
  constexpr int64_t kRows = 256;
  pool->ParallelForRanges(RowsOf(view), kRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      std::memset(first + RowOffset(view, row) * size, 0, view.dim(view.rank - 1) * size);
    }
  });
}

}  // namespace tfb
