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
  if (!view.is_contiguous()) return Fill(view, 0);
  SetToZero({static_cast<std::byte*>(view.mutable_data()),
             static_cast<size_t>(view.num_elements() * SizeOf(view.dtype))},
            pool);
}

}  // namespace tfb
