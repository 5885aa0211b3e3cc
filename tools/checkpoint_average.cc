#include "tools/checkpoint_average.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/dtype.h"
#include "core/status.h"

namespace tfb {

absl::Status CheckpointAverage::Check(const SafetensorsFile& checkpoint,
                                      const std::string& name) const {
  for (const auto& [tensor, value] : checkpoint.tensors) {
    const auto known = last_.tensors.find(tensor);
    if (known == last_.tensors.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": tensor \"", tensor, "\" is not in ", first_));
    }
    const Tensor& other = known->second;
    if (value.dtype() == other.dtype() && value.shape() == other.shape()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        name, ": tensor \"", tensor, "\" is ", Name(value.dtype()), " ", ShapeString(value.shape()),
        "; in ", first_, " it is ", Name(other.dtype()), " ", ShapeString(other.shape())));
  }
  for (const auto& entry : last_.tensors) {
    if (checkpoint.tensors.count(entry.first) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": tensor \"", entry.first, "\" of ", first_, " is not there"));
  }
  return absl::OkStatus();
}

absl::Status CheckpointAverage::Add(SafetensorsFile checkpoint, const std::string& name) {
  if (count_ == 0) {
    first_ = name;
  } else {
    TFB_RETURN_IF_ERROR(Check(checkpoint, name));
  }
  for (const auto& [tensor, value] : checkpoint.tensors) {
    if (!IsFloating(value.dtype())) continue;
    if (count_ == 0) {
      TFB_ASSIGN_OR_RETURN(sums_[tensor], Tensor::Allocate(DType::kF64, value.shape()));
      Fill(sums_[tensor].view(), 0);
    }
    const absl::Span<double> sum = sums_[tensor].span<double>();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += value.view().Get(static_cast<int64_t>(i));
  }
  ++count_;
  last_ = std::move(checkpoint);
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsFile> CheckpointAverage::Finish() && {
  if (count_ == 0) return absl::FailedPreconditionError("there are no checkpoints");
  for (const auto& [tensor, sum] : sums_) {
    const TensorView mean = last_.tensors.at(tensor).view();
    for (int64_t i = 0; i < sum.num_elements(); ++i) {
      mean.Set(i, sum.span<double>()[i] / static_cast<double>(count_));
    }
  }
  return std::move(last_);
}

}  // namespace tfb
