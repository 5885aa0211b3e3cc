// Allocates memory between guard bands, which shows writes beyond a tensor's ends.
//
// A layer of a device gets device_bytes() and device_view(), a mirror of the host memory, bands
// included, in the memory of the device (harness/judge/device_memory.h). Upload copies the host's
// bytes there before a call, and Download copies them back for the checks after the call. On the
// CPU host and device memory are the same, and Upload and Download do nothing.
#ifndef TFB_HARNESS_JUDGE_GUARDED_H_
#define TFB_HARNESS_JUDGE_GUARDED_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "harness/judge/device_memory.h"

namespace tfb {

// `bytes` bytes aligned to 64 with a band of kGuardBytes directly before and behind them. All of it
// holds 0xFF, which is a NaN in every floating-point dtype, -1 or 255 in integers, and far out of
// range as a size or an index.
class GuardedMemory {
 public:
  static constexpr size_t kGuardBytes = 4096;  // a tile of 16 rows of 64 floats

  // Returns ResourceExhausted where there is no memory.
  static absl::StatusOr<GuardedMemory> Allocate(size_t bytes, Device device = Device::kCpu);

  absl::Span<std::byte> bytes() const { return absl::MakeSpan(begin_, size_); }
  absl::Span<std::byte> device_bytes() const {
    return absl::MakeSpan(static_cast<std::byte*>(twin_.On(begin_)), size_);
  }
  const DeviceTwin& twin() const { return twin_; }
  absl::Status Upload(Contents contents) { return twin_.Upload(contents); }
  absl::Status Download() { return twin_.Download(); }

  void Poison();  // fills the bytes, not the bands, with 0xFF again
  // Returns Internal, with the nearest changed byte, where a band has been written to. `what`
  // begins the message: "output out".
  absl::Status CheckGuards(absl::string_view what) const;

 private:
  Tensor memory_;
  std::byte* begin_ = nullptr;
  size_t size_ = 0;
  DeviceTwin twin_;  // of memory_
};

// A tensor in guarded memory. With `gaps` its rows (of the last dimension) lie further apart than
// they are long and the dimensions before them are in reversed order of memory, so that no stride
// is what a contiguous tensor has; the gaps are guarded as well. Elements of integers hold 0x80 in
// every byte instead, since -1 is a number that layers write.
class GuardedTensor {
 public:
  static absl::StatusOr<GuardedTensor> Allocate(DType dtype, absl::Span<const int64_t> shape,
                                                bool gaps, Device device = Device::kCpu);

  TensorView view() const { return view_; }
  TensorView device_view() const { return On(view_); }
  // Returns the device's view of the same elements as `view`, a view of this tensor's memory.
  TensorView On(TensorView view) const { return memory_.twin().On(view); }
  absl::Status Upload(Contents contents) { return memory_.Upload(contents); }
  absl::Status Download() { return memory_.Download(); }

  void Poison();
  // Returns Internal where a band or a gap has been written to.
  absl::Status CheckGuards(absl::string_view what) const;
  // Returns the number of elements that still hold the bits that Poison wrote. A computed NaN has
  // other bits.
  int64_t CountUnwritten() const;

 private:
  GuardedMemory memory_;
  TensorView view_;
};

// The workspace of a layer of a device between guard bands. It has no mirror on the host, since it
// may be larger than the host's memory.
class GuardedWorkspace {
 public:
  static absl::StatusOr<GuardedWorkspace> Allocate(size_t bytes, Device device);

  absl::Span<std::byte> bytes() const { return bytes_; }
  // Fills the workspace with 0xFF, calls `body`, waits for the device, and checks the bands. `what`
  // begins the message about a band.
  absl::Status Call(absl::string_view what, absl::FunctionRef<absl::Status()> body);

 private:
  absl::Status CallOnDevice(absl::string_view what, absl::FunctionRef<absl::Status()> body);

  GuardedMemory host_;  // of the CPU
  CudaRuntime* runtime_ = nullptr;
  FencedMemory device_;
  absl::Span<std::byte> bytes_;
};

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_GUARDED_H_
