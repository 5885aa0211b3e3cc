#include "core/layers/exits/exit_classifiers.h"

#include <algorithm>

#include "core/cuda/device_view.h"
#include "core/cuda/for_each.h"
#include "core/cuda/sum_in_runs.h"
#include "core/status.h"

namespace tfb::layers {

absl::Status ExitClassifiers::Setup(const ConstTensorView& w, const ConstTensorView& b) {
  TFB_ASSIGN_OR_RETURN(weights_, CopyFloats(device_, w));
  TFB_ASSIGN_OR_RETURN(bias_, CopyFloats(device_, b));
  return absl::OkStatus();
}

absl::Status ExitClassifiers::Logits(const ClassifierRows& of, int64_t count, float* logits,
                                     const Execution& execution) const {
  const ClassifierLogits write = {of, weights_.data(), bias_.data(), logits, classes_};
  return ForEach(device_, count * classes_, write, execution);
}

// A part of the classes may be cut into more runs than all of them.
size_t ExitClassifiers::gradient_workspace_bytes(int64_t count) const {
  size_t most = 0;
  for (int64_t classes = 1; classes <= classes_; ++classes) {
    most = std::max({most, SumInRunsBytes<ClassifierWeightGradient>({classes, width_, count}),
                     SumInRunsBytes<ClassifierBiasGradient>({1, classes, count})});
  }
  return most;
}

absl::Status ExitClassifiers::AddParameterGradients(const ClassifierRows& of,
                                                    const float* of_logits, int64_t count,
                                                    int64_t first, const TensorView& w,
                                                    const TensorView& b,
                                                    const Execution& execution) const {
  if (!w.empty()) {
    const bool is_of_one = w.rank == 1;
    const ClassifierWeightGradient sums = {of,
                                           of_logits,
                                           static_cast<float*>(w.mutable_data()),
                                           is_of_one ? 0 : w.stride(0),
                                           w.stride(w.rank - 1),
                                           classes_,
                                           first};
    const SumShape shape = {is_of_one ? 1 : w.dim(0), width_, count};
    TFB_RETURN_IF_ERROR(SumInRuns(device_, shape, sums, execution));
  }
  if (b.empty()) return absl::OkStatus();
  const ClassifierBiasGradient sums = {of_logits, static_cast<float*>(b.mutable_data()),
                                       b.stride(0), classes_, first};
  return SumInRuns(device_, {1, b.dim(0), count}, sums, execution);
}

absl::Status ExitClassifiers::AddStateGradient(const float* of_logits, int64_t tokens,
                                               int64_t begin, int64_t first, int64_t end,
                                               const TensorView& gradient,
                                               const Execution& execution) const {
  const int64_t batch = gradient.dim(0), segment = gradient.dim(1);
  const ClassifierStateGradient add = {of_logits, weights_.data(), ToDeviceView(gradient),
                                       tokens,    begin,           segment,
                                       classes_,  width_,          first,
                                       end};
  return ForEachInRows(device_, batch * segment, width_, add, execution);
}

}  // namespace tfb::layers
