#include "harness/judge/guarded.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr std::byte kPoison{0xFF};
constexpr std::byte kIntegerPoison{0x80};

bool IsPoison(const std::byte* begin, size_t size, std::byte poison = kPoison) {
  return std::all_of(begin, begin + size, [poison](std::byte b) { return b == poison; });
}

// Returns the poison of the elements of a tensor.
std::byte PoisonOf(DType dtype) { return IsFloating(dtype) ? kPoison : kIntegerPoison; }

// Checks the bands that end at `begin` and begin at `end` of memory.
absl::Status CheckBands(absl::string_view what, const std::byte* begin, const std::byte* end) {
  for (size_t n = 0; n < GuardedMemory::kGuardBytes; ++n) {
    if (end[n] != kPoison) {
      return absl::InternalError(absl::StrCat(what, ": byte ", n, " behind its end was written"));
    }
    if (begin[-1 - static_cast<ptrdiff_t>(n)] != kPoison) {
      return absl::InternalError(
          absl::StrCat(what, ": byte ", n + 1, " before its beginning was written"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GuardedMemory> GuardedMemory::Allocate(size_t bytes, Device device) {
  GuardedMemory guarded;
  const int64_t whole = static_cast<int64_t>(bytes + 2 * kGuardBytes);
  TFB_ASSIGN_OR_RETURN(guarded.memory_, Tensor::Allocate(DType::kU8, {whole}));
  std::byte* memory = static_cast<std::byte*>(guarded.memory_.raw());
  std::memset(memory, 0xFF, static_cast<size_t>(whole));
  guarded.begin_ = memory + kGuardBytes;
  guarded.size_ = bytes;
  TFB_ASSIGN_OR_RETURN(guarded.twin_,
                       DeviceTwin::Make(device, absl::MakeSpan(memory, static_cast<size_t>(whole)),
                                        guarded.bytes()));
  return guarded;
}

void GuardedMemory::Poison() { std::memset(begin_, 0xFF, size_); }

absl::Status GuardedMemory::CheckGuards(absl::string_view what) const {
  return CheckBands(what, begin_, begin_ + size_);
}

absl::StatusOr<GuardedTensor> GuardedTensor::Allocate(DType dtype, absl::Span<const int64_t> shape,
                                                      bool gaps, Device device) {
  constexpr int64_t kGapElements = 3;  // odd, so that rows are not aligned
  GuardedTensor tensor;
  if (!gaps) {
    TFB_ASSIGN_OR_RETURN(tensor.memory_,
                         GuardedMemory::Allocate(NumElements(shape) * SizeOf(dtype), device));
    tensor.view_ = TensorView(tensor.memory_.bytes().data(), dtype, shape);
    tensor.Poison();
    return tensor;
  }
  Shape strides(shape.size(), 1);
  int64_t elements = shape.empty() ? 1 : shape.back() + kGapElements;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) {
    strides[axis] = elements;
    elements *= shape[axis];
  }
  TFB_ASSIGN_OR_RETURN(tensor.memory_, GuardedMemory::Allocate(elements * SizeOf(dtype), device));
  tensor.view_ = TensorView(tensor.memory_.bytes().data(), dtype, shape, strides);
  tensor.Poison();
  return tensor;
}

void GuardedTensor::Poison() {
  memory_.Poison();
  if (PoisonOf(view_.dtype) == kPoison) return;
  const size_t size = static_cast<size_t>(SizeOf(view_.dtype));
  ForEachOffset(view_, view_, [&](int64_t offset, int64_t) {
    std::memset(memory_.bytes().data() + offset * size, static_cast<int>(kIntegerPoison), size);
  });
}

absl::Status GuardedTensor::CheckGuards(absl::string_view what) const {
  TFB_RETURN_IF_ERROR(memory_.CheckGuards(what));
  if (view_.is_contiguous()) return absl::OkStatus();
  const absl::Span<std::byte> bytes = memory_.bytes();
  const size_t size = static_cast<size_t>(SizeOf(view_.dtype));
  std::vector<bool> is_element(bytes.size() / size, false);
  ForEachOffset(view_, view_, [&](int64_t offset, int64_t) { is_element[offset] = true; });
  for (size_t n = 0; n < is_element.size(); ++n) {
    if (!is_element[n] && !IsPoison(bytes.data() + n * size, size)) {
      return absl::InternalError(absl::StrCat(what, ": a gap between its rows was written, ", n,
                                              " elements from its beginning"));
    }
  }
  return absl::OkStatus();
}

int64_t GuardedTensor::CountUnwritten() const {
  const size_t size = static_cast<size_t>(SizeOf(view_.dtype));
  const std::byte* data = memory_.bytes().data();
  int64_t unwritten = 0;
  ForEachOffset(view_, view_, [&](int64_t offset, int64_t) {
    unwritten += IsPoison(data + offset * size, size, PoisonOf(view_.dtype)) ? 1 : 0;
  });
  return unwritten;
}

absl::StatusOr<GuardedWorkspace> GuardedWorkspace::Allocate(size_t bytes, Device device) {
  constexpr size_t kBand = GuardedMemory::kGuardBytes;
  GuardedWorkspace workspace;
  TFB_ASSIGN_OR_RETURN(workspace.runtime_, RuntimeOf(device));
  if (workspace.runtime_ == nullptr) {
    TFB_ASSIGN_OR_RETURN(workspace.host_, GuardedMemory::Allocate(bytes));
    workspace.bytes_ = workspace.host_.bytes();
  } else {
    TFB_ASSIGN_OR_RETURN(
        workspace.device_,
        FencedMemory::Allocate(workspace.runtime_, bytes + 2 * kBand, kBand, bytes));
    workspace.bytes_ = workspace.device_.part();
  }
  return workspace;
}

absl::Status GuardedWorkspace::Call(absl::string_view what,
                                    absl::FunctionRef<absl::Status()> body) {
  if (runtime_ != nullptr) return CallOnDevice(what, body);
  host_.Poison();
  TFB_RETURN_IF_ERROR(body());
  return host_.CheckGuards(what);
}

absl::Status GuardedWorkspace::CallOnDevice(absl::string_view what,
                                            absl::FunctionRef<absl::Status()> body) {
  const absl::Span<std::byte> whole = device_.whole();
  device_.TakeDown();
  TFB_RETURN_IF_ERROR(runtime_->Fill(whole.data(), 0xFF, whole.size()));
  device_.PutUp(Contents::kUnwritten);
  TFB_RETURN_IF_ERROR(body());
  TFB_RETURN_IF_ERROR(runtime_->Synchronize());
  device_.TakeDown();
  std::vector<std::byte> before(GuardedMemory::kGuardBytes), behind(GuardedMemory::kGuardBytes);
  TFB_RETURN_IF_ERROR(runtime_->CopyToHost(before.data(), whole.data(), before.size()));
  TFB_RETURN_IF_ERROR(
      runtime_->CopyToHost(behind.data(), bytes_.data() + bytes_.size(), behind.size()));
  return CheckBands(what, before.data() + before.size(), behind.data());
}

}  // namespace tfb
