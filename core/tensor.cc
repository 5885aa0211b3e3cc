#include "core/tensor.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tfb {
namespace {

constexpr size_t kAlignment = 64;
constexpr unsigned char kPadding = 0x9B;  // a byte that numbers seldom consist of

// Calls `body` with a null pointer of the element type that `dtype` names.
template <class Body>
auto WithElementType(DType dtype, Body body) {
  switch (dtype) {
    case DType::kF64:
      return body(static_cast<double*>(nullptr));
    case DType::kF16:
      return body(static_cast<Half*>(nullptr));
    case DType::kBF16:
      return body(static_cast<BFloat16*>(nullptr));
    case DType::kI32:
      return body(static_cast<int32_t*>(nullptr));
    case DType::kI64:
      return body(static_cast<int64_t*>(nullptr));
    case DType::kU8:
      return body(static_cast<uint8_t*>(nullptr));
    case DType::kF32:
      break;
  }
  return body(static_cast<float*>(nullptr));
}

void Visit(const ConstTensorView& a, const ConstTensorView& b, int axis, int64_t offset_a,
           int64_t offset_b, const std::function<void(int64_t, int64_t)>& visit) {
  if (axis == a.rank) {
    visit(offset_a, offset_b);
    return;
  }
  for (int64_t i = 0; i < a.dim(axis); ++i) {
    Visit(a, b, axis + 1, offset_a + i * a.stride(axis), offset_b + i * b.stride(axis), visit);
  }
}

template <class View>
View TransposeImpl(View view, int a, int b) {
  std::swap(view.dims[a], view.dims[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

template <class View>
View SliceImpl(View view, int axis, int64_t begin, int64_t size, int64_t step) {
  assert(axis < view.rank && begin >= 0 && size >= 0);
  assert(size == 0 || begin + (size - 1) * step < view.dims[axis]);
  view.data = static_cast<const char*>(view.data) + begin * view.strides[axis] * SizeOf(view.dtype);
  view.dims[axis] = size;
  view.strides[axis] *= step;
  return view;
}

template <class View>
View SplitAxisImpl(View view, int axis, int64_t outer) {
  assert(view.rank < kMaxRank && view.dims[axis] % outer == 0);
  for (int i = view.rank; i > axis + 1; --i) {
    view.dims[i] = view.dims[i - 1];
    view.strides[i] = view.strides[i - 1];
  }
  ++view.rank;
  const int64_t inner = view.dims[axis] / outer;
  view.dims[axis + 1] = inner;
  view.strides[axis + 1] = view.strides[axis];
  view.dims[axis] = outer;
  view.strides[axis] *= inner;
  return view;
}

}  // namespace

int64_t NumElements(absl::Span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

std::string ShapeString(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

ConstTensorView::ConstTensorView(const void* data, DType dtype, absl::Span<const int64_t> shape)
    : data(data), dtype(dtype), rank(static_cast<int>(shape.size())) {
  assert(rank <= kMaxRank);
  int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    dims[axis] = shape[axis];
    strides[axis] = stride;
    stride *= shape[axis];
  }
}

ConstTensorView::ConstTensorView(const void* data, DType dtype, absl::Span<const int64_t> shape,
                                 absl::Span<const int64_t> stride)
    : data(data), dtype(dtype), rank(static_cast<int>(shape.size())) {
  assert(rank <= kMaxRank && shape.size() == stride.size());
  std::copy(shape.begin(), shape.end(), dims.begin());
  std::copy(stride.begin(), stride.end(), strides.begin());
}

bool ConstTensorView::is_contiguous() const {
  int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (dims[axis] != 1 && strides[axis] != stride) return false;
    stride *= dims[axis];
  }
  return true;
}

double ConstTensorView::Get(int64_t offset) const {
  return WithElementType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return static_cast<double>(static_cast<const T*>(data)[offset]);
  });
}

void TensorView::Set(int64_t offset, double value) const {
  WithElementType(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    static_cast<T*>(mutable_data())[offset] = static_cast<T>(value);
  });
}

ConstTensorView Slice(ConstTensorView view, int axis, int64_t begin, int64_t size, int64_t step) {
  return SliceImpl(view, axis, begin, size, step);
}
TensorView Slice(TensorView view, int axis, int64_t begin, int64_t size, int64_t step) {
  return SliceImpl(view, axis, begin, size, step);
}
ConstTensorView Transpose(ConstTensorView view, int a, int b) { return TransposeImpl(view, a, b); }
TensorView Transpose(TensorView view, int a, int b) { return TransposeImpl(view, a, b); }
ConstTensorView SplitAxis(ConstTensorView view, int axis, int64_t outer) {
  return SplitAxisImpl(view, axis, outer);
}
TensorView SplitAxis(TensorView view, int axis, int64_t outer) {
  return SplitAxisImpl(view, axis, outer);
}

void ForEachOffset(const ConstTensorView& a, const ConstTensorView& b,
                   const std::function<void(int64_t, int64_t)>& visit) {
  assert(a.shape() == b.shape());
  Visit(a, b, 0, 0, 0, visit);
}

void CopyElements(const ConstTensorView& from, const TensorView& to) {
  const bool contiguous = from.is_contiguous() && to.is_contiguous();
  if (contiguous && from.dtype == to.dtype) {
    std::copy_n(static_cast<const char*>(from.data), from.num_elements() * SizeOf(from.dtype),
                static_cast<char*>(to.mutable_data()));
    return;
  }
  if (contiguous && from.dtype == DType::kF32 && to.dtype == DType::kF64) {
    // Definitions convert all inputs and parameters.
    std::copy_n(static_cast<const float*>(from.data), from.num_elements(),
                static_cast<double*>(to.mutable_data()));
    return;
  }
  ForEachOffset(from, to, [&](int64_t a, int64_t b) { to.Set(b, from.Get(a)); });
}

bool CanConvert(const ConstTensorView& from, DType dtype) {
  if (IsFloating(dtype) || from.dtype == dtype) return true;
  const auto [min, max] = dtype == DType::kU8    ? std::make_pair(0.0, 255.0)
                          : dtype == DType::kI32 ? std::make_pair(-0x1p31, 0x1p31 - 1)
                                                 : std::make_pair(-0x1p53, 0x1p53);
  bool can = true;
  ForEachOffset(from, from, [&, min = min, max = max](int64_t offset, int64_t) {
    const double value = from.Get(offset);
    can = can && value >= min && value <= max && value == std::trunc(value);
  });
  return can;
}

void Fill(const TensorView& view, double value) {
  ForEachOffset(view, view, [&](int64_t offset, int64_t) { view.Set(offset, value); });
}

Tensor::Tensor(DType dtype, absl::Span<const int64_t> shape) {
  absl::StatusOr<Tensor> tensor = Allocate(dtype, shape);
  if (absl::IsResourceExhausted(tensor.status())) throw std::bad_alloc();
  if (!tensor.ok()) throw std::length_error(std::string(tensor.status().message()));
  *this = *std::move(tensor);
}

absl::StatusOr<Tensor> Tensor::Allocate(DType dtype, absl::Span<const int64_t> shape) {
  if (shape.size() > kMaxRank) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape ", ShapeString(shape), " has more than ", kMaxRank, " dimensions"));
  }
  int64_t bytes = SizeOf(dtype);
  for (int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ShapeString(shape), " is negative or overflows 64 bits"));
    }
  }
  const size_t padded = (static_cast<size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
  Tensor tensor;
  tensor.memory_.reset(std::aligned_alloc(kAlignment, padded), std::free);
  if (tensor.memory_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a tensor ", ShapeString(shape), " of ", bytes, " bytes"));
  }
  tensor.view_ = TensorView(tensor.memory_.get(), dtype, shape);
  tensor.padding_ = padded - static_cast<size_t>(bytes);
  std::memset(static_cast<std::byte*>(tensor.memory_.get()) + bytes, kPadding, tensor.padding_);
  return tensor;
}

bool Tensor::PaddingIsIntact() const {
  if (padding_ == 0) return true;
  const auto* end = static_cast<const std::byte*>(raw()) + bytes();
  return std::all_of(end, end + padding_, [](std::byte b) { return b == std::byte{kPadding}; });
}

Tensor Tensor::Sharing(std::shared_ptr<void> owner, const TensorView& view) {
  assert(view.is_contiguous());
  Tensor tensor;
  tensor.memory_ = std::move(owner);
  tensor.view_ = view;
  return tensor;
}

Tensor Tensor::Clone() const { return CloneAs(dtype()); }

Tensor Tensor::CloneAs(DType dtype) const {
  Tensor copy(dtype, shape());
  CopyElements(view(), copy.view());
  return copy;
}

Tensor TensorOf(absl::Span<const double> values) {
  Tensor tensor(DType::kF32, {static_cast<int64_t>(values.size())});
  std::transform(values.begin(), values.end(), tensor.span<float>().begin(),
                 [](double value) { return static_cast<float>(value); });
  return tensor;
}

Inputs ViewsOf(const NamedTensors& tensors) {
  Inputs inputs;
  for (const auto& [name, tensor] : tensors) inputs.Set(name, tensor.view());
  return inputs;
}

Outputs MutableViewsOf(NamedTensors& tensors) {
  Outputs outputs;
  for (auto& [name, tensor] : tensors) outputs.Set(name, tensor.view());
  return outputs;
}

}  // namespace tfb
