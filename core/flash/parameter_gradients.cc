#include "core/flash/parameter_gradients.h"

#include <algorithm>
#include <cstddef>

#include "core/dtype.h"

namespace tfb {

ParameterGradients::ParameterGradients(const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters) {
    if (IsFloating(parameter.dtype())) sums_.push_back({&name, parameter.view(), nullptr});
  }
}

void ParameterGradients::LayOut(Workspace* workspace) {
  for (Sums& of : sums_) of.sums = workspace->Take<double>(of.parameter.num_elements());
}

void ParameterGradients::Clear() {
  for (Sums& of : sums_) std::fill_n(of.sums, of.parameter.num_elements(), 0.0);
}

double* ParameterGradients::Of(const void* element) const {
  for (const Sums& of : sums_) {
    const auto* begin = static_cast<const std::byte*>(of.parameter.data);
    const auto* at = static_cast<const std::byte*>(element);
    const int64_t size = SizeOf(of.parameter.dtype);
    if (at >= begin && at < begin + of.parameter.num_elements() * size) {
      return of.sums + (at - begin) / size;
    }
  }
  return nullptr;
}

void ParameterGradients::Write(const Outputs& gradients) const {
  for (const Sums& of : sums_) {
    const TensorView* gradient = gradients.Find(*of.name);
    if (gradient == nullptr || gradient->empty()) continue;
    if (gradient->is_contiguous()) {  // by far quicker, where tables are large
      std::copy_n(of.sums, gradient->num_elements(), static_cast<float*>(gradient->mutable_data()));
    } else {
      CopyElements(ConstTensorView(of.sums, DType::kF64, of.parameter.shape()), *gradient);
    }
  }
}

}  // namespace tfb
