#include "harness/guarded.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb {
namespace {

constexpr std::byte kPoison{0xFF};

bool IsPoison(const std::byte* begin, size_t size) {
  return std::all_of(begin, begin + size, [](std::byte b) { return b == kPoison; });
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
  for (size_t n = 0; n < kGuardBytes; ++n) {
    if (begin_[size_ + n] != kPoison) {
      return absl::InternalError(absl::StrCat(what, ": byte ", n, " behind its end was written"));
    }
    if (begin_[-1 - static_cast<ptrdiff_t>(n)] != kPoison) {
      return absl::InternalError(
          absl::StrCat(what, ": byte ", n + 1, " before its beginning was written"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<GuardedTensor> GuardedTensor::Allocate(DType dtype, absl::Span<const int64_t> shape,
                                                      bool gaps, Device device) {
  constexpr int64_t kGapElements = 3;  // odd, so that rows are not aligned
  GuardedTensor tensor;
  if (!gaps) {
    TFB_ASSIGN_OR_RETURN(tensor.memory_,
                         GuardedMemory::Allocate(NumElements(shape) * SizeOf(dtype), device));
    tensor.view_ = TensorView(tensor.memory_.bytes().data(), dtype, shape);
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
  return tensor;
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
    unwritten += IsPoison(data + offset * size, size) ? 1 : 0;
  });
  return unwritten;
}

absl::StatusOr<GuardedWorkspace> GuardedWorkspace::Allocate(size_t bytes, Device device) {
  GuardedWorkspace workspace;
  TFB_ASSIGN_OR_RETURN(workspace.runtime_, RuntimeOf(device));
  TFB_ASSIGN_OR_RETURN(workspace.memory_, GuardedMemory::Allocate(bytes, device));
  return workspace;
}

absl::Status GuardedWorkspace::Call(absl::string_view what,
                                    absl::FunctionRef<absl::Status()> body) {
  memory_.Poison();
  TFB_RETURN_IF_ERROR(memory_.Upload(DeviceTwin::Contents::kUnwritten));
  TFB_RETURN_IF_ERROR(body());
  TFB_RETURN_IF_ERROR(Synchronize(runtime_));
  TFB_RETURN_IF_ERROR(memory_.Download());
  return memory_.CheckGuards(what);
}

}  // namespace tfb
