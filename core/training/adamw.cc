#include "core/training/adamw.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "core/training/gradients.h"

namespace tfb {
namespace {

constexpr int64_t kElementsOfTask = 4096;

absl::Status CheckSame(const NamedTensors& given, const NamedTensors& own, const char* what) {
  if (given.size() != own.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", given.size(), " tensors; expected are ", own.size()));
  }
  return CheckGradients(given, own, what);
}

}  // namespace

absl::StatusOr<AdamW> AdamW::Create(const NamedTensors& parameters, const AdamWOptions& options) {
  const auto is_rate = [](double beta) { return beta >= 0 && beta < 1; };
  if (!is_rate(options.beta1) || !is_rate(options.beta2)) {
    return absl::InvalidArgumentError(absl::StrCat("beta1 is ", options.beta1, " and beta2 ",
                                                   options.beta2,
                                                   "; allowed are 0 to 1, without 1"));
  }
  if (!(options.epsilon > 0) || !(options.decay >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat("epsilon is ", options.epsilon, " and decay ",
                                                   options.decay,
                                                   "; allowed are numbers above 0, and from 0 on"));
  }
  AdamW adam(options);
  for (const auto& [name, parameter] : parameters) {
    if (parameter.dtype() != DType::kF32) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", name, " is ", Name(parameter.dtype()), "; allowed is f32"));
    }
    for (NamedTensors* moments : {&adam.first_, &adam.second_}) {
      TFB_ASSIGN_OR_RETURN(Tensor zeros, Tensor::Allocate(DType::kF32, parameter.shape()));
      Fill(zeros.view(), 0);
      (*moments)[name] = std::move(zeros);
    }
  }
  return adam;
}

absl::Status AdamW::Step(double rate, const NamedTensors& gradients, NamedTensors* parameters,
                         ThreadPool* pool) {
  TFB_RETURN_IF_ERROR(CheckGradients(gradients, first_, "gradient"));
  TFB_RETURN_IF_ERROR(CheckGradients(gradients, *parameters, "gradient"));
  if (!std::isfinite(GlobalNorm(gradients))) {
    return absl::InvalidArgumentError("a gradient has numbers that are not finite");
  }
  ++steps_;
  const double t = static_cast<double>(steps_);
  const float beta1 = static_cast<float>(options_.beta1);
  const float beta2 = static_cast<float>(options_.beta2);
  const float more1 = static_cast<float>(1 - options_.beta1);
  const float more2 = static_cast<float>(1 - options_.beta2);
  const float step = static_cast<float>(rate / (1 - std::pow(options_.beta1, t)));
  const float root = static_cast<float>(std::sqrt(1 - std::pow(options_.beta2, t)));
  const float epsilon = static_cast<float>(options_.epsilon);
  const float kept = static_cast<float>(1 - rate * options_.decay);
  for (const auto& [name, gradient] : gradients) {
    const float* g = gradient.span<float>().data();
    float* m = first_.at(name).span<float>().data();
    float* v = second_.at(name).span<float>().data();
    float* w = parameters->at(name).span<float>().data();
    pool->ParallelForRanges(
        gradient.num_elements(), kElementsOfTask, [&](int64_t begin, int64_t end, int) {
          for (int64_t n = begin; n < end; ++n) {
            m[n] = beta1 * m[n] + more1 * g[n];
            v[n] = beta2 * v[n] + more2 * g[n] * g[n];
            w[n] = kept * w[n] - step * (m[n] / (std::sqrt(v[n]) / root + epsilon));
          }
        });
  }
  return absl::OkStatus();
}

absl::Status AdamW::Restore(int64_t steps, const NamedTensors& first, const NamedTensors& second) {
  if (steps < 0) {
    return absl::InvalidArgumentError(absl::StrCat(steps, " steps; allowed are numbers from 0 on"));
  }
  TFB_RETURN_IF_ERROR(CheckSame(first, first_, "first moment"));
  TFB_RETURN_IF_ERROR(CheckSame(second, second_, "second moment"));
  steps_ = steps;
  for (auto& [name, moment] : first_) moment = first.at(name).Clone();
  for (auto& [name, moment] : second_) moment = second.at(name).Clone();
  return absl::OkStatus();
}

}  // namespace tfb
