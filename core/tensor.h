// Tensors and strided views of them.
//
// A view is plain data: a pointer, a dtype, and per dimension a size and a stride in elements (0
// broadcasts). It can be handed to a kernel as it stands. A Tensor owns its memory, is contiguous,
// and is aligned to a cache line.
#ifndef TFB_CORE_TENSOR_H_
#define TFB_CORE_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/dtype.h"

namespace tfb {

constexpr int kMaxRank = 5;
using Shape = absl::InlinedVector<int64_t, 4>;

int64_t NumElements(absl::Span<const int64_t> shape);
std::string ShapeString(absl::Span<const int64_t> shape);  // "[2, 8, 512, 64]"

// A read-only view. It is trivially copyable.
struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> dims = {};
  std::array<int64_t, kMaxRank> strides = {};  // in elements

  ConstTensorView() = default;
  // Makes a view of contiguous memory, last dimension fastest.
  ConstTensorView(const void* data, DType dtype, absl::Span<const int64_t> shape);
  ConstTensorView(const void* data, DType dtype, absl::Span<const int64_t> shape,
                  absl::Span<const int64_t> strides);

  bool empty() const { return rank == 0; }  // Tells whether the view is of no tensor at all.
  Shape shape() const { return Shape(dims.begin(), dims.begin() + rank); }
  int64_t dim(int axis) const { return dims[axis]; }
  int64_t stride(int axis) const { return strides[axis]; }
  int64_t num_elements() const { return NumElements(absl::MakeSpan(dims.data(), rank)); }
  bool is_contiguous() const;

  // Returns the element's offset in elements from `data`. There is one index a dimension; missing
  // indices are 0.
  template <class... Index>
  int64_t Offset(Index... index) const {
    int64_t offset = 0;
    [[maybe_unused]] int axis = 0;  // without an index
    ((offset += static_cast<int64_t>(index) * strides[axis++]), ...);
    return offset;
  }
  template <class T, class... Index>
  const T* At(Index... index) const {
    return static_cast<const T*>(data) + Offset(index...);
  }
  // Returns the element as a double, whatever its dtype.
  double Get(int64_t offset) const;

 protected:
  // Implement the operations below in the base class, so that both kinds of view share them.
  void SliceInPlace(int axis, int64_t begin, int64_t size, int64_t step);
};

// A view that can be written through.
struct TensorView : ConstTensorView {
  using ConstTensorView::ConstTensorView;
  TensorView() = default;
  TensorView(void* data, DType dtype, absl::Span<const int64_t> shape)
      : ConstTensorView(data, dtype, shape) {}
  TensorView(void* data, DType dtype, absl::Span<const int64_t> shape,
             absl::Span<const int64_t> strides)
      : ConstTensorView(data, dtype, shape, strides) {}

  void* mutable_data() const { return const_cast<void*>(data); }
  template <class T, class... Index>
  T* MutableAt(Index... index) const {
    return static_cast<T*>(mutable_data()) + Offset(index...);
  }
  void Set(int64_t offset, double value) const;
};

// Returns a view of elements begin, begin + step, ... (size of them) of one dimension.
ConstTensorView Slice(ConstTensorView view, int axis, int64_t begin, int64_t size,
                      int64_t step = 1);
TensorView Slice(TensorView view, int axis, int64_t begin, int64_t size, int64_t step = 1);
// Returns a view of the same elements with two dimensions exchanged.
ConstTensorView Transpose(ConstTensorView view, int a, int b);
TensorView Transpose(TensorView view, int a, int b);
// Splits `axis` into two dimensions of sizes `outer` and dim / outer: [tokens, heads * channels] to
// [tokens, heads, channels].
ConstTensorView SplitAxis(ConstTensorView view, int axis, int64_t outer);
TensorView SplitAxis(TensorView view, int axis, int64_t outer);

// Calls visit(offset_a, offset_b) for each index of two views of the same shape, last dimension
// fastest.
void ForEachOffset(const ConstTensorView& a, const ConstTensorView& b,
                   const std::function<void(int64_t, int64_t)>& visit);
// Copies element by element, converting through double (integers up to 2^53 are exact). The shapes
// must be equal.
void CopyElements(const ConstTensorView& from, const TensorView& to);
// Tells whether CopyElements can convert all elements to the dtype: to an integer only whole numbers
// in its range (of at most 2^53), to a floating-point number all.
bool CanConvert(const ConstTensorView& from, DType dtype);
void Fill(const TensorView& view, double value);

// Owns contiguous host memory, aligned to 64 bytes, or shares memory that another object owns.
// Tensors are movable; Clone() copies.
class Tensor {
 public:
  Tensor() = default;
  // Allocates memory with unspecified contents: Fill or write them. As a container does, it throws
  // std::bad_alloc where there is not enough memory, and std::length_error for a shape that no memory
  // holds (see WithMemory in core/status.h).
  Tensor(DType dtype, absl::Span<const int64_t> shape);
  Tensor(DType dtype, std::initializer_list<int64_t> shape)
      : Tensor(dtype, absl::MakeConstSpan(shape.begin(), shape.size())) {}
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;

  // Allocates like the constructor, for sizes that a caller chose: returns ResourceExhausted, with
  // the size, where there is not enough memory, and InvalidArgument where the product of the sizes
  // overflows.
  static absl::StatusOr<Tensor> Allocate(DType dtype, absl::Span<const int64_t> shape);

  // Returns a tensor of contiguous memory that `owner` keeps alive, such as a mapped file. It has
  // that memory's alignment.
  static Tensor Sharing(std::shared_ptr<void> owner, const TensorView& view);

  // Returns whether the bytes between the last element and the end of the memory, of which there are
  // 1 to 64, still hold what Allocate left there: a write close behind the tensor shows. It is true of
  // a tensor that shares memory.
  bool PaddingIsIntact() const;

  Tensor Clone() const;
  Tensor CloneAs(DType dtype) const;

  bool empty() const { return view_.empty(); }
  DType dtype() const { return view_.dtype; }
  Shape shape() const { return view_.shape(); }
  int64_t dim(int axis) const { return view_.dim(axis); }
  int64_t num_elements() const { return view_.num_elements(); }
  size_t bytes() const { return static_cast<size_t>(num_elements() * SizeOf(dtype())); }
  const void* raw() const { return view_.data; }
  void* raw() { return view_.mutable_data(); }

  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }

  template <class T>
  absl::Span<T> span() {
    return absl::MakeSpan(static_cast<T*>(view_.mutable_data()), num_elements());
  }
  template <class T>
  absl::Span<const T> span() const {
    return absl::MakeConstSpan(static_cast<const T*>(view_.data), num_elements());
  }

 private:
  std::shared_ptr<void> memory_;
  size_t padding_ = 0;  // bytes
  TensorView view_;
};

// Tensors by name, in the order of the names.
using NamedTensors = std::map<std::string, Tensor, std::less<>>;

// Views by name: the tensors that a Layer reads or writes. There are a handful of entries, which
// are searched linearly.
template <class View>
class NamedViews {
 public:
  NamedViews() = default;
  NamedViews(std::initializer_list<std::pair<std::string, View>> entries) : entries_(entries) {}

  void Set(absl::string_view name, View view) {
    for (auto& [key, value] : entries_) {
      if (key == name) {
        value = view;
        return;
      }
    }
    entries_.emplace_back(std::string(name), view);
  }
  // Returns null where there is no view of that name.
  const View* Find(absl::string_view name) const {
    for (const auto& [key, value] : entries_) {
      if (key == name) return &value;
    }
    return nullptr;
  }
  // Returns an empty view where there is none of that name.
  View Get(absl::string_view name) const {
    const View* view = Find(name);
    return view == nullptr ? View() : *view;
  }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  size_t size() const { return entries_.size(); }

 private:
  std::vector<std::pair<std::string, View>> entries_;
};
using Inputs = NamedViews<ConstTensorView>;
using Outputs = NamedViews<TensorView>;

// Returns the numbers as an f32 tensor of one dimension.
Tensor TensorOf(absl::Span<const double> values);

Inputs ViewsOf(const NamedTensors& tensors);
Outputs MutableViewsOf(NamedTensors& tensors);

}  // namespace tfb

#endif  // TFB_CORE_TENSOR_H_
