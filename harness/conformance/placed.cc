#include "harness/conformance/placed.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb::conformance {
namespace {

// Returns the shape in memory of a transposed tensor: the dimensions before the last reversed.
Shape Reversed(const Shape& shape) {
  Shape reversed = shape;
  if (reversed.size() > 1) std::reverse(reversed.begin(), reversed.end() - 1);
  return reversed;
}

TensorView Reverse(TensorView view) {
  for (int a = 0, b = view.rank - 2; a < b; ++a, --b) view = Transpose(view, a, b);
  return view;
}

}  // namespace

bool SameBits(const ConstTensorView& a, const ConstTensorView& b) {
  const size_t size = static_cast<size_t>(SizeOf(a.dtype));
  bool same = a.dtype == b.dtype && a.shape() == b.shape();
  if (!same) return false;
  ForEachOffset(a, b, [&](int64_t from, int64_t to) {
    same = same && std::memcmp(static_cast<const char*>(a.data) + from * size,
                               static_cast<const char*>(b.data) + to * size, size) == 0;
  });
  return same;
}

absl::StatusOr<PlacedTensors::Placed> PlacedTensors::Place(DType dtype, const Shape& shape,
                                                           Layout layout, Device device) {
  Placed placed;
  Shape stored = layout == Layout::kTransposed ? Reversed(shape) : shape;
  const bool broadcast = layout == Layout::kBroadcast && shape.size() == 4;
  if (broadcast && NumElements(shape) > 0) stored[0] = stored[1] = 1;
  TFB_ASSIGN_OR_RETURN(placed.memory,
                       GuardedTensor::Allocate(dtype, stored, layout == Layout::kGaps, device));
  placed.view = placed.memory.view();
  if (layout == Layout::kTransposed) placed.view = Reverse(placed.view);
  if (broadcast && NumElements(shape) > 0) {
    for (int axis : {0, 1}) {
      placed.view.dims[axis] = shape[axis];
      placed.view.strides[axis] = 0;
    }
  }
  if (layout == Layout::kOddStrides) {
    for (int axis = 0; axis < placed.view.rank; ++axis) {
      if (shape[axis] == 1) placed.view.strides[axis] = 12345;
    }
  }
  return placed;
}

absl::StatusOr<PlacedTensors> PlacedTensors::Of(const NamedTensors& tensors, Layout layout,
                                                Device device) {
  PlacedTensors all;
  for (const auto& [name, tensor] : tensors) {
    TFB_ASSIGN_OR_RETURN(Placed placed, Place(tensor.dtype(), tensor.shape(), layout, device));
    CopyElements(tensor.view(), placed.view);
    TFB_RETURN_IF_ERROR(all.Add(name, std::move(placed), Contents::kWritten));
  }
  return all;
}

absl::StatusOr<PlacedTensors> PlacedTensors::For(const std::vector<TensorSpec>& specs,
                                                 Layout layout, Device device) {
  PlacedTensors all;
  for (const TensorSpec& spec : specs) {
    TFB_ASSIGN_OR_RETURN(Placed placed, Place(spec.dtype, spec.shape, layout, device));
    TFB_RETURN_IF_ERROR(all.Add(spec.name, std::move(placed), Contents::kUnwritten));
  }
  return all;
}

absl::Status PlacedTensors::Add(const std::string& name, Placed placed, Contents contents) {
  TFB_RETURN_IF_ERROR(placed.memory.Upload(contents));
  inputs_.Set(name, placed.memory.On(placed.view));
  outputs_.Set(name, placed.memory.On(placed.view));
  placed_[name] = std::move(placed);
  return absl::OkStatus();
}

absl::Status PlacedTensors::Download(absl::string_view what) {
  for (auto& [name, placed] : placed_) {
    TFB_RETURN_IF_ERROR(placed.memory.Download());
    TFB_RETURN_IF_ERROR(placed.memory.CheckGuards(absl::StrCat(what, " ", name)));
  }
  return absl::OkStatus();
}

absl::Status PlacedTensors::CheckUnchanged(absl::string_view what, const NamedTensors& tensors) {
  TFB_RETURN_IF_ERROR(Download(what));
  for (const auto& [name, placed] : placed_) {
    if (!SameBits(placed.view, tensors.at(name).view())) {
      return absl::InternalError(absl::StrCat(what, " ", name, " was changed"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<NamedTensors> PlacedTensors::Written(absl::string_view what) {
  TFB_RETURN_IF_ERROR(Download(what));
  NamedTensors copies;
  for (const auto& [name, placed] : placed_) {
    if (const int64_t unwritten = placed.memory.CountUnwritten(); unwritten > 0) {
      return absl::InternalError(absl::StrCat(what, " ", name, ": ", unwritten, " of ",
                                              placed.view.num_elements(),
                                              " elements were not written"));
    }
    Tensor& copy = copies[name] = Tensor(placed.view.dtype, placed.view.shape());
    CopyElements(placed.view, copy.view());
  }
  return copies;
}

}  // namespace tfb::conformance
