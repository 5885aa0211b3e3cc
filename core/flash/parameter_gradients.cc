#include "core/flash/parameter_gradients.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "core/cuda/for_each.h"
#include "core/cuda/run_sums.h"
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

namespace {

// The slopes of an element, of those that are sorted by elements.
struct SlopesOfElement {
  int64_t element, begin, end;
  int64_t count() const { return end - begin; }
};

// Returns the most slopes of a run: the root of the largest number of slopes that an element has, or more
// where the partial sums of elements with several runs would not fit into the workspace.
int64_t RunLength(const std::vector<SlopesOfElement>& elements, int64_t channels) {
  constexpr auto kMost = static_cast<int64_t>(GradientMap::kWorkspaceBytes / sizeof(double));
  int64_t longest = 0;
  for (const SlopesOfElement& of : elements) longest = std::max(longest, of.count());
  int64_t length = std::max(kLeastRun, RootOf(longest));
  for (; length < longest; length *= 2) {
    int64_t rows = 0;
    for (const SlopesOfElement& of : elements) {
      if (of.count() > length) rows += TermRuns{of.count(), length}.count();
    }
    if (rows * channels <= kMost) break;
  }
  return length;
}

}  // namespace

absl::StatusOr<GradientMap> GradientMap::Create(Device device, std::vector<Slope> slopes,
                                                int64_t channels, int64_t stride) {
  std::stable_sort(slopes.begin(), slopes.end(), [](const Slope& a, const Slope& b) {
    return std::tie(a.element, a.number) < std::tie(b.element, b.number);
  });
  std::vector<SlopesOfElement> elements;
  std::vector<int64_t> numbers;
  std::vector<double> values;
  for (const Slope& slope : slopes) {
    const auto place = static_cast<int64_t>(numbers.size());
    if (elements.empty() || elements.back().element != slope.element) {
      elements.push_back({slope.element, place, place});
    }
    ++elements.back().end;
    numbers.push_back(slope.number);
    values.push_back(slope.value);
  }
  const int64_t length = RunLength(elements, channels);
  std::vector<int64_t> targets, begins, long_elements, partial_begins;
  int64_t rows = 0;  // of partial sums
  for (const SlopesOfElement& of : elements) {
    const TermRuns runs = {of.count(), length};
    if (runs.count() > 1) {
      long_elements.push_back(of.element);
      partial_begins.push_back(rows);
    }
    for (int64_t run = 0; run < runs.count(); ++run) {
      targets.push_back(runs.count() > 1 ? -1 - rows++ : of.element);
      begins.push_back(of.begin + runs.Begin(run));
    }
  }
  begins.push_back(static_cast<int64_t>(numbers.size()));
  partial_begins.push_back(rows);
  GradientMap map;
  map.device_ = device;
  map.channels_ = channels;
  map.stride_ = stride;
  const auto create = [device](const std::vector<int64_t>& from) {
    return DeviceArray<int64_t>::Create(device, from);
  };
  TFB_ASSIGN_OR_RETURN(map.targets_, create(targets));
  TFB_ASSIGN_OR_RETURN(map.begins_, create(begins));
  TFB_ASSIGN_OR_RETURN(map.numbers_, create(numbers));
  TFB_ASSIGN_OR_RETURN(map.slopes_, DeviceArray<double>::Create(device, values));
  TFB_ASSIGN_OR_RETURN(map.long_elements_, create(long_elements));
  TFB_ASSIGN_OR_RETURN(map.partial_begins_, create(partial_begins));
  return map;
}

absl::Status GradientMap::Add(const float* numbers, double* elements,
                              const Execution& execution) const {
  if (targets_.size() == 0) return absl::OkStatus();
  auto* const partial = reinterpret_cast<double*>(execution.workspace.data());
  const AddMappedSums add = {targets_.data(), begins_.data(), numbers_.data(),
                             slopes_.data(),  stride_,        numbers,
                             elements,        partial,        channels_};
  TFB_RETURN_IF_ERROR(ForEachInRows(device_, targets_.size(), channels_, add, execution));
  if (long_elements_.size() == 0) return absl::OkStatus();
  const AddPartialSums add_partial = {
      long_elements_.data(), partial_begins_.data(), partial, channels_, stride_, elements};
  return ForEachInRows(device_, long_elements_.size(), channels_, add_partial, execution);
}

}  // namespace tfb
