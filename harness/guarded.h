// Memory between guard bands, for finding writes beyond a tensor's ends and elements that were
// never written.
#ifndef TFB_HARNESS_GUARDED_H_
#define TFB_HARNESS_GUARDED_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/tensor.h"

namespace tfb {

// `bytes` bytes aligned to 64 with a band of kGuardBytes directly before and behind them. All of it
// holds 0xFF, which is a NaN in every floating-point dtype, -1 or 255 in integers, and far out of
// range as a size or an index.
class GuardedMemory {
 public:
  static constexpr size_t kGuardBytes = 4096;  // a tile of 16 rows of 64 floats

  // ResourceExhausted where there is no memory.
  static absl::StatusOr<GuardedMemory> Allocate(size_t bytes);

  absl::Span<std::byte> bytes() const { return absl::MakeSpan(begin_, size_); }
  void Poison();  // fills the bytes, not the bands, with 0xFF again
  // Internal, with the nearest changed byte, where a band has been written to. `what` begins the
  // message: "output out".
  absl::Status CheckGuards(absl::string_view what) const;

 private:
  Tensor memory_;
  std::byte* begin_ = nullptr;
  size_t size_ = 0;
};

// A tensor in guarded memory. With `gaps` its rows (of the last dimension) lie further apart than
// they are long and the dimensions before them are in reversed order of memory, so that no stride
// is what a contiguous tensor has; the gaps are guarded as well.
class GuardedTensor {
 public:
  static absl::StatusOr<GuardedTensor> Allocate(DType dtype, absl::Span<const int64_t> shape,
                                                bool gaps = false);

  TensorView view() const { return view_; }
  void Poison() { memory_.Poison(); }
  // Internal where a band or a gap has been written to.
  absl::Status CheckGuards(absl::string_view what) const;
  // Elements that still are what Poison wrote. A NaN that was computed has other bits.
  int64_t CountUnwritten() const;

 private:
  GuardedMemory memory_;
  TensorView view_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_GUARDED_H_
