#include "adaptive/calm/confidence_rule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cuda/runtime.h"
#include "core/layers/copy_tensor.h"
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

layers::RuleOutput LogitsOf(const CalmOptions& options) {
  if (options.confidence != Confidence::kClassifier || options.layers < 2) return {};
  return {kConfidenceLogits, options.layers - 1};
}

ConfidenceRule::ConfidenceRule(Device device, const Problem& problem, const CalmOptions& options)
    : device_(device),
      problem_(problem),
      options_(options),
      logits_(device, problem.model_dim(), options.vocabulary),
      threshold_(ThresholdOf(options, problem.query_tokens)),
      classifiers_(device, options.layers - 1, problem.model_dim()) {
  for (int64_t n = 1; n < options.layers; ++n) {
    names_.push_back(layers::ExitPrefix(n - 1) + ".confidence");
  }
}

absl::Status ConfidenceRule::Setup(const NamedTensors& parameters) {
  if (has_logits()) return logits_.Setup(parameters, options_.layers);
  if (options_.confidence != Confidence::kClassifier) return absl::OkStatus();
  const int64_t width = problem_.model_dim(), classes = classifiers_.classes();
  Tensor w(DType::kF32, {classes, width}), b(DType::kF32, {classes});
  for (int64_t n = 0; n < classes; ++n) {
    const ConstTensorView own = parameters.at(names_[n] + ".w").view();
    for (int64_t c = 0; c < width; ++c) w.view().Set(n * width + c, own.Get(own.Offset(c)));
    b.view().Set(n, parameters.at(names_[n] + ".b").view().Get(0));
  }
  return classifiers_.Setup(w.view(), b.view());
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
  const double asked = static_cast<double>(layers),
               width = static_cast<double>(problem_.model_dim());
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
  float* const confidences = scratch.confidences;
  if (options_.confidence == Confidence::kClassifier) {
    return classifiers_.ForEachLogit(
        rows.layer - 1, rows.state, execution.pool,
        [&](int64_t r, float z) { confidences[r] = 1 / (1 + std::exp(-z)); });
  }
  execution.pool->ParallelForRanges(rows.rows(), kRowsOfTask, [&](int64_t first, int64_t end, int) {
    for (int64_t r = first; r < end; ++r) {
      confidences[r] =
          has_logits()
              ? SoftmaxResponse(options_.vocabulary,
                                scratch.of_logits.logits + r * logits_.row_floats())
              : Cosine(rows.state.At<float>(r), rows.before.At<float>(r), problem_.model_dim());
    }
  });
}

void ConfidenceRule::SetClassifier(int64_t n, ConfidenceArguments* arguments) const {
  arguments->weights = classifiers_.weights(n - 1);
  arguments->bias = classifiers_.bias(n - 1);
}

absl::Status ConfidenceRule::DecideOnCuda(const ExitRows& rows, const Scratch& scratch,
                                          uint8_t* leaves, const Execution& execution) const {
  ConfidenceArguments arguments = {};
  arguments.confidence = options_.confidence;
  arguments.state = has_logits() ? scratch.of_logits.logits : rows.state.At<float>(0);
  arguments.channels = has_logits() ? options_.vocabulary : problem_.model_dim();
  arguments.before = rows.before.At<float>(0);
  if (options_.confidence == Confidence::kClassifier) SetClassifier(rows.layer, &arguments);
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

absl::Status ConfidenceRule::WriteOutput(int64_t n, const ConstTensorView& state,
                                         const TensorView& logits, const Execution& execution) {
  if (n == options_.layers) return absl::OkStatus();
  const int64_t tokens = logits.dim(1);
  if (device_ == Device::kCpu) {
    classifiers_.ForEachLogit(n - 1, state, execution.pool, [&](int64_t r, float z) {
      *logits.MutableAt<float>(r / tokens, r % tokens, n - 1) = z;
    });
    return absl::OkStatus();
  }
  ConfidenceArguments arguments = {};
  arguments.confidence = Confidence::kClassifier;
  arguments.state = state.At<float>(0);
  arguments.channels = problem_.model_dim();
  arguments.rows = state.dim(0);
  arguments.tokens = tokens;
  arguments.logits = {static_cast<float*>(logits.mutable_data()) + (n - 1) * logits.stride(2),
                      logits.stride(0), logits.stride(1)};
  SetClassifier(n, &arguments);
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(KernelsOn<CalmKernels>(runtime->target()).decide(arguments, execution.stream));
}

// ---- The backward pass of the logits ----

size_t ConfidenceRule::backward_memory_bytes() const {
  if (!output().exists()) return 0;
  return Workspace::Measure([this](Workspace& workspace) { LayOutBackward(workspace); }) +
         classifiers_.gradient_workspace_bytes(problem_.batch * problem_.query_tokens);
}

float* ConfidenceRule::LayOutBackward(Workspace& workspace) const {
  return workspace.Take<float>(problem_.batch * problem_.query_tokens * classifiers_.classes());
}

absl::Status ConfidenceRule::DifferentiateOutput(const OutputGradients& gradients,
                                                 const Execution& execution) const {
  const int64_t width = problem_.model_dim(), tokens = problem_.query_tokens;
  const int64_t rows = problem_.batch * tokens;
  Workspace workspace(gradients.memory);
  float* const of_logits = LayOutBackward(workspace);
  const TensorView copy(of_logits, DType::kF32, gradients.of_output.shape());
  TFB_RETURN_IF_ERROR(CopyTensor(device_, gradients.of_output, copy, execution));
  const layers::ClassifierRows read = {gradients.states.At<float>(0), rows * width,  tokens,
                                       /*segments=*/tokens,           /*segment=*/1, width};
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  for (int64_t n = 0; n < classifiers_.classes(); ++n) {
    TFB_RETURN_IF_ERROR(classifiers_.AddParameterGradients(
        read, of_logits, rows, n, gradients.parameters.Get(names_[n] + ".w"),
        gradients.parameters.Get(names_[n] + ".b"), rest));
  }
  return absl::OkStatus();
}

absl::Status ConfidenceRule::AddStateGradient(int64_t n, absl::Span<std::byte> memory,
                                              int64_t begin, const TensorView& gradient,
                                              const Execution& execution) const {
  if (n == options_.layers) return absl::OkStatus();
  Workspace workspace(memory);
  return classifiers_.AddStateGradient(LayOutBackward(workspace), problem_.query_tokens, begin,
                                       n - 1, n, gradient, execution);
}

}  // namespace tfb::calm
