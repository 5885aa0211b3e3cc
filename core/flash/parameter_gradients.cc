#include "core/flash/parameter_gradients.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "core/cuda/for_each.h"
#include "core/dtype.h"
#include "core/flash/gradient_functors.h"
#include "core/layers/copy_tensor.h"
#include "core/status.h"

namespace tfb {

ParameterGradients::ParameterGradients(const NamedTensors& parameters,
                                       std::vector<std::string> written_by_steps)
    : written_by_steps_(std::move(written_by_steps)) {
  for (const auto& [name, parameter] : parameters) {
    if (!IsFloating(parameter.dtype()) || IsWrittenByStep(name)) continue;
    parameters_.push_back({&name, parameter.view(), count_});
    count_ += parameter.num_elements();
  }
}

bool ParameterGradients::IsWrittenByStep(const std::string& name) const {
  return std::find(written_by_steps_.begin(), written_by_steps_.end(), name) !=
         written_by_steps_.end();
}

TensorView ParameterGradients::Output(const std::string& name) const {
  return IsWrittenByStep(name) ? outputs_->Get(name) : TensorView();
}

void ParameterGradients::LayOut(Workspace* workspace) { sums_ = workspace->Take<double>(count_); }

int64_t ParameterGradients::PlaceOf(const void* element) const {
  for (const Parameter& parameter : parameters_) {
    const auto* begin = static_cast<const std::byte*>(parameter.values.data);
    const auto* at = static_cast<const std::byte*>(element);
    const int64_t size = SizeOf(parameter.values.dtype);
    if (at >= begin && at < begin + parameter.values.num_elements() * size) {
      return parameter.first + (at - begin) / size;
    }
  }
  return -1;
}

absl::Status ParameterGradients::Write(Device device, const Execution& execution) const {
  for (const Parameter& parameter : parameters_) {
    const TensorView* gradient = outputs_->Find(*parameter.name);
    if (gradient == nullptr || gradient->empty()) continue;
    const TensorRows rows(*gradient);
    TFB_RETURN_IF_ERROR(
        ForEachInRows(device, rows.rows(), rows.columns(),
                      WriteSums{sums_ + parameter.first, rows.columns(), rows.view()}, execution));
  }
  return absl::OkStatus();
}

absl::StatusOr<GradientMap> GradientMap::Create(Device device, std::vector<Slope> slopes,
                                                int64_t channels, int64_t stride) {
  std::stable_sort(slopes.begin(), slopes.end(), [](const Slope& a, const Slope& b) {
    return std::tie(a.element, a.number) < std::tie(b.element, b.number);
  });
  std::vector<int64_t> elements, begins, numbers;
  std::vector<double> values;
  for (const Slope& slope : slopes) {
    if (elements.empty() || elements.back() != slope.element) {
      elements.push_back(slope.element);
      begins.push_back(static_cast<int64_t>(numbers.size()));
    }
    numbers.push_back(slope.number);
    values.push_back(slope.value);
  }
  begins.push_back(static_cast<int64_t>(numbers.size()));
  GradientMap map;
  map.device_ = device;
  map.channels_ = channels;
  map.stride_ = stride;
  TFB_ASSIGN_OR_RETURN(map.elements_, DeviceArray<int64_t>::Create(device, elements));
  TFB_ASSIGN_OR_RETURN(map.begins_, DeviceArray<int64_t>::Create(device, begins));
  TFB_ASSIGN_OR_RETURN(map.numbers_, DeviceArray<int64_t>::Create(device, numbers));
  TFB_ASSIGN_OR_RETURN(map.slopes_, DeviceArray<double>::Create(device, values));
  return map;
}

absl::Status GradientMap::Add(const float* numbers, double* elements,
                              const Execution& execution) const {
  if (elements_.size() == 0) return absl::OkStatus();
  const AddMappedSums add = {elements_.data(), begins_.data(), numbers_.data(), slopes_.data(),
                             stride_,          numbers,        elements};
  return ForEachInRows(device_, elements_.size(), channels_, add, execution);
}

}  // namespace tfb
