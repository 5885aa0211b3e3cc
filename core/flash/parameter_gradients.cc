#include "core/flash/parameter_gradients.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/dtype.h"

namespace tfb {

ParameterGradients::ParameterGradients(const NamedTensors& parameters,
                                       std::vector<std::string> written_by_steps)
    : written_by_steps_(std::move(written_by_steps)) {
  for (const auto& [name, parameter] : parameters) {
    if (IsFloating(parameter.dtype()) && !IsWrittenByStep(name)) {
      sums_.push_back({&name, parameter.view(), nullptr});
    }
  }
}

bool ParameterGradients::IsWrittenByStep(const std::string& name) const {
  return std::find(written_by_steps_.begin(), written_by_steps_.end(), name) !=
         written_by_steps_.end();
}

TensorView ParameterGradients::Output(const std::string& name) const {
  return IsWrittenByStep(name) ? outputs_->Get(name) : TensorView();
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

void ParameterGradients::Write() const {
  for (const Sums& of : sums_) {
    const TensorView* gradient = outputs_->Find(*of.name);
    if (gradient == nullptr || gradient->empty()) continue;
    if (gradient->is_contiguous()) {  // by far quicker, where tables are large
      std::copy_n(of.sums, gradient->num_elements(), static_cast<float*>(gradient->mutable_data()));
    } else {
      CopyElements(ConstTensorView(of.sums, DType::kF64, of.parameter.shape()), *gradient);
    }
  }
}

}  // namespace tfb
