#include "harness/measure/sample_trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/random.h"
#include "core/status.h"
#include "harness/judge/errors.h"

namespace tfb {
namespace {

constexpr int64_t kRows = 4;  // of each sample, where the definition can evaluate single ones

// Copies a contiguous tensor with its next to last dimension turned by `steps`: element s goes to
// (s + steps) mod size.
void CopyTurned(const Tensor& from, int64_t steps, Tensor* to) {
  const Shape& shape = from.shape();
  const size_t rank = shape.size();
  const int64_t size = rank < 2 ? 1 : shape[rank - 2];
  const auto* source = static_cast<const std::byte*>(from.raw());
  auto* target = static_cast<std::byte*>(to->raw());
  if (from.bytes() == 0) return;
  const size_t row =
      rank < 2 ? from.bytes() : SizeOf(from.dtype()) * static_cast<size_t>(shape[rank - 1]);
  const size_t block = row * static_cast<size_t>(size);
  const size_t cut = row * static_cast<size_t>(steps % size);
  for (size_t begin = 0; begin < from.bytes(); begin += block) {
    std::memcpy(target + begin + cut, source + begin, block - cut);
    std::memcpy(target + begin, source + begin + block - cut, cut);
  }
}

bool SameBytes(const ConstTensorView& a, const Tensor& b) {
  return b.bytes() == 0 || std::memcmp(a.data, b.raw(), b.bytes()) == 0;
}

}  // namespace

SampleTrial::SampleTrial(Subject subject) : subject_(std::move(subject)) {
  for (const auto& [name, tensor] : *subject_.request.inputs) inputs_[name] = tensor.Clone();
  for (const auto& [name, tensor] : inputs_) before_[name] = tensor.Clone();
}

// Integers are labels and masks, which stay.
void SampleTrial::Turn() {
  const int64_t tokens = std::max<int64_t>(subject_.request.job.problem.query_tokens, 1);
  const RandomStream random(subject_.request.job.seed, "turned inputs");
  const int64_t steps =
      1 + static_cast<int64_t>(random.Uniform(trials_++) * static_cast<double>(tokens - 1));
  for (const auto& [name, original] : *subject_.request.inputs) {
    if (!IsFloating(original.dtype())) continue;
    CopyTurned(original, steps, &before_.at(name));
  }
  for (auto& [name, tensor] : inputs_) CopyElements(before_.at(name).view(), tensor.view());
}

absl::Status SampleTrial::Begin(const Outputs& outputs, absl::FunctionRef<absl::Status()> run) {
  Turn();
  for (const auto& [name, view] : outputs) {
    if (IsFloating(view.dtype)) Fill(view, std::numeric_limits<double>::quiet_NaN());
    if (copied_.count(name) == 0) copied_[name] = Tensor(view.dtype, view.shape());
  }
  TFB_RETURN_IF_ERROR(run());
  for (const auto& [name, view] : outputs) CopyElements(view, copied_.at(name).view());
  return absl::OkStatus();
}

absl::Status SampleTrial::End(const Outputs& outputs) {
  for (const auto& [name, tensor] : inputs_) {
    if (!SameBytes(before_.at(name).view(), tensor)) {
      return absl::InternalError(absl::StrCat("it wrote into its input ", name));
    }
  }
  EvaluateRequest request = subject_.request;
  request.inputs = &before_;
  const RandomStream random(request.job.seed, absl::StrCat("judged rows ", trials_));
  std::set<int64_t> rows;
  for (int64_t n = 0; n < kRows; ++n) {
    rows.insert(static_cast<int64_t>(random.Uniform(n) *
                                     static_cast<double>(request.job.problem.query_tokens)));
  }
  if (request.job.problem.query_tokens > kRows) request.rows.assign(rows.begin(), rows.end());
  TFB_ASSIGN_OR_RETURN(const Accuracy accuracy,
                       JudgeByDefinition(request, subject_.layer->parameters(), copied_));
  if (!accuracy.passed) {
    return absl::InternalError(
        absl::StrCat("a call on new inputs, while it was timed: ", accuracy.failure));
  }
  // An output that belongs to other inputs has a relative error of about 1.4.
  const double most = 0.1 + 2 * subject_.usual_error;
  const double relative = accuracy.against_definition.relative_frobenius;
  if (std::isinf(accuracy.definition_bound) && !(relative <= most)) {
    return absl::InternalError(
        absl::StrFormat("a call on new inputs, while it was timed: its relative error is %.3g, "
                        "that of its check %.3g",
                        relative, subject_.usual_error));
  }
  const std::string wrong = WhatIsWrong(outputs);
  if (wrong.empty()) return absl::OkStatus();
  return absl::InternalError(wrong);
}

// The timed calls had the inputs of the judged one. Sums may have been taken in another order.
std::string SampleTrial::WhatIsWrong(const Outputs& outputs) {
  const Problem& problem = subject_.request.job.problem;
  for (const auto& [name, view] : outputs) {
    const Tensor& judged = copied_.at(name);
    if (view.is_contiguous() && SameBytes(view, judged)) continue;
    const auto difference = MaxAbsError(view, judged.view(), {});
    const double most =
        AbsoluteBound(problem.dtype, std::max(problem.kv_tokens, problem.query_tokens)) *
        LargestMagnitude(judged.view());
    if (difference.ok() && *difference <= most) continue;
    return absl::StrCat("its timed calls gave another ", name,
                        " than the one before on the same inputs");
  }
  return "";
}

}  // namespace tfb
