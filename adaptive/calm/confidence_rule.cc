#include "adaptive/calm/confidence_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/cuda/runtime.h"
#include "core/status.h"

namespace tfb::calm {
namespace {

using layers::ExitRows;

constexpr int64_t kLanes = 16;  // sums side by side, as many as the widest vector has lanes
constexpr int64_t kRowsOfTask = 16;

// Returns the largest probability minus the next; overwrites the row of logits.
float SoftmaxResponse(int64_t vocabulary, float* logits) {
  const layers::SoftmaxTop top = layers::TopOf(vocabulary, logits);
  return (1 - top.next) / top.sum;
}

// Sums of products, in several accumulators.
struct Products {
  float dot[kLanes] = {}, of_a[kLanes] = {}, of_b[kLanes] = {};

  void Add(int64_t lane, float a, float b) {
    dot[lane] += a * b;
    of_a[lane] += a * a;
    of_b[lane] += b * b;
  }
  static float Sum(const float* lanes) {
    float half[kLanes / 2], sum = 0;
    for (int64_t lane = 0; lane < kLanes / 2; ++lane) {
      half[lane] = lanes[lane] + lanes[lane + kLanes / 2];
    }
    for (const float value : half) sum += value;
    return sum;
  }
};

float Cosine(const float* a, const float* b, int64_t channels) {
  Products products;
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) products.Add(lane, a[c + lane], b[c + lane]);
  }
  for (int64_t lane = 0; c < channels; ++c, ++lane) products.Add(lane, a[c], b[c]);
  return Products::Sum(products.dot) /
         std::sqrt(Products::Sum(products.of_a) * Products::Sum(products.of_b));
}

}  // namespace

Threshold ThresholdOf(const CalmOptions& options, int64_t tokens) {
  using Schedule = CalmOptions::Schedule;
  const float lambda = static_cast<float>(options.threshold);
  if (options.schedule == Schedule::kConstant || lambda > 1) return {lambda, 0, 0, 2};
  const double rate = -options.temperature / static_cast<double>(std::max<int64_t>(tokens, 1));
  const float first = options.schedule == Schedule::kT5x ? lambda : 1;
  return {0.9f * lambda, 0.1f * first, static_cast<float>(rate), 1};
}

float ThresholdAt(const Threshold& threshold, int64_t t) {
  const float value =
      threshold.constant + threshold.scale * std::exp(threshold.rate * static_cast<float>(t));
  return std::min(std::max(value, 0.0f), threshold.most);
}

ConfidenceRule::ConfidenceRule(Device device, const Problem& problem, const CalmOptions& options)
    : device_(device),
      width_(problem.model_dim()),
      options_(options),
      logits_(device, problem.model_dim(), options.vocabulary),
      threshold_(ThresholdOf(options, problem.query_tokens)) {}

absl::Status ConfidenceRule::Setup(const NamedTensors& parameters) {
  if (has_logits()) return logits_.Setup(parameters, options_.layers);
  weights_.clear();
  biases_.clear();
  if (options_.confidence != Confidence::kClassifier) return absl::OkStatus();
  for (int64_t n = 1; n < options_.layers; ++n) {
    const std::string prefix = layers::ExitPrefix(n - 1) + ".confidence.";
    TFB_ASSIGN_OR_RETURN(DeviceArray<float> w,
                         CopyFloats(device_, parameters.at(prefix + "w").view()));
    weights_.push_back(std::move(w));
    biases_.push_back(static_cast<float>(parameters.at(prefix + "b").view().Get(0)));
  }
  return absl::OkStatus();
}

ConfidenceRule::Scratch ConfidenceRule::LayOut(int64_t rows, Workspace& workspace) const {
  Scratch scratch = {};
  scratch.confidences = workspace.Take<float>(rows);
  if (has_logits()) scratch.of_logits = logits_.LayOut(rows, workspace);
  return scratch;
}

size_t ConfidenceRule::workspace_bytes(int64_t rows, int threads) const {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(rows, workspace); }) +
         (has_logits() ? logits_.workspace_bytes(rows, threads) : 0);
}

double ConfidenceRule::flops(int64_t layers) const {
  const double asked = static_cast<double>(layers), width = static_cast<double>(width_);
  switch (options_.confidence) {
    case Confidence::kSoftmax:
      return asked * logits_.flops();
    case Confidence::kSaturation:
      return std::max(asked - 1, 0.0) * 6 * width;
    default:
      return asked * 2 * width;
  }
}

absl::Status ConfidenceRule::Decide(const ExitRows& rows, uint8_t* leaves,
                                    const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(rows.rows(), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  if (has_logits()) TFB_RETURN_IF_ERROR(logits_.Run(rows, scratch.of_logits, rest));
  if (device_ != Device::kCpu) return DecideOnCuda(rows, scratch, leaves, rest);
  ConfidencesOnCpu(rows, scratch, rest);
  const bool undefined = options_.confidence == Confidence::kSaturation && rows.layer == 1;
  for (int64_t r = 0; r < rows.rows(); ++r) {
    const int64_t t = rows.first_position + rows.places[r] % rows.tokens;
    leaves[r] = !undefined && scratch.confidences[r] >= ThresholdAt(threshold_, t) ? 1 : 0;
  }
  return absl::OkStatus();
}

void ConfidenceRule::ConfidencesOnCpu(const ExitRows& rows, const Scratch& scratch,
                                      const Execution& execution) const {
  execution.pool->ParallelForRanges(rows.rows(), kRowsOfTask, [&](int64_t first, int64_t end, int) {
    float* confidences = scratch.confidences + first;
    if (options_.confidence == Confidence::kClassifier) {
      return Classify(rows, first, end - first, confidences);
    }
    for (int64_t r = first; r < end; ++r) {
      *confidences++ = has_logits()
                           ? SoftmaxResponse(options_.vocabulary,
                                             scratch.of_logits.logits + r * logits_.row_floats())
                           : Cosine(rows.state.At<float>(r), rows.before.At<float>(r), width_);
    }
  });
}

void ConfidenceRule::Classify(const ExitRows& rows, int64_t first, int64_t count,
                              float* confidences) const {
  BestCpuKernels().matrix_vector(count, width_, rows.state.At<float>(first), width_,
                                 weights_[rows.layer - 1].data(), confidences, 1,
                                 /*accumulate=*/false);
  for (int64_t r = 0; r < count; ++r) {
    confidences[r] = 1 / (1 + std::exp(-(confidences[r] + biases_[rows.layer - 1])));
  }
}

absl::Status ConfidenceRule::DecideOnCuda(const ExitRows& rows, const Scratch& scratch,
                                          uint8_t* leaves, const Execution& execution) const {
  ConfidenceArguments arguments = {};
  arguments.confidence = options_.confidence;
  arguments.state = has_logits() ? scratch.of_logits.logits : rows.state.At<float>(0);
  arguments.channels = has_logits() ? options_.vocabulary : width_;
  arguments.before = rows.before.At<float>(0);
  if (options_.confidence == Confidence::kClassifier) {
    arguments.weights = weights_[rows.layer - 1].data();
    arguments.bias = biases_[rows.layer - 1];
  }
  arguments.leaves = leaves;
  arguments.rows = rows.rows();
  arguments.tokens = rows.tokens;
  arguments.first_position = rows.first_position;
  arguments.list = rows.list;
  arguments.threshold = threshold_;
  if (options_.confidence == Confidence::kSaturation && rows.layer == 1) {
    constexpr float kNever = std::numeric_limits<float>::infinity();
    arguments.threshold = {kNever, 0, 0, kNever};
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(KernelsOn<CalmKernels>(runtime->target()).decide(arguments, execution.stream));
}

}  // namespace tfb::calm
