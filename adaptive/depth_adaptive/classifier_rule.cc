#include "adaptive/depth_adaptive/classifier_rule.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "adaptive/depth_adaptive/depth_adaptive_cuda.h"
#include "adaptive/depth_adaptive/depth_adaptive_functors.h"
#include "core/cpu/kernels.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::depth_adaptive {
namespace {

constexpr int64_t kRowsOfTask = 16;

// Returns the first of the largest.
int32_t ArgMax(const float* scores, int64_t count) {
  return static_cast<int32_t>(std::max_element(scores, scores + count) - scores);
}

DeviceProbabilities ToDevice(const ConstTensorView& view) {
  return {static_cast<float*>(const_cast<void*>(view.data)), view.stride(0), view.stride(1),
          view.stride(2), view.dim(1)};
}

}  // namespace

bool HasProbabilities(const DepthAdaptiveOptions& options) {
  using Classifier = DepthAdaptiveOptions::Classifier;
  return options.classifier != Classifier::kConfidence && options.classifier != Classifier::kFixed;
}

layers::RuleOutput ProbabilitiesOf(const DepthAdaptiveOptions& options) {
  if (!HasProbabilities(options)) return {};
  return {kExitProbabilities, options.layers};
}

std::string ClassifierPrefix(const DepthAdaptiveOptions& options) {
  using Options = DepthAdaptiveOptions;
  const char* classifier = options.classifier == Options::Classifier::kSequence      ? "sequence"
                           : options.classifier == Options::Classifier::kMultinomial ? "multinomial"
                                                                                     : "geometric";
  return absl::StrCat(
      options.oracle == Options::Oracle::kLikelihood ? "likelihood." : "correctness.",
      options.level, ".", classifier, ".");
}

absl::StatusOr<std::unique_ptr<ClassifierRule>> ClassifierRule::Create(
    Device device, const Problem& problem, const DepthAdaptiveOptions& options) {
  std::unique_ptr<ClassifierRule> rule(new ClassifierRule(device, problem, options));
  const int64_t tokens = std::min(options.segment, std::max<int64_t>(problem.query_tokens, 1));
  const int64_t decisions = problem.batch * (rule->Is(Classifier::kMultinomial) ? tokens : 1);
  for (Decisions* of_segment : {&rule->here_, &rule->next_}) {
    TFB_ASSIGN_OR_RETURN(of_segment->scores,
                         DeviceArray<float>::Allocate(device, decisions * options.layers));
    TFB_ASSIGN_OR_RETURN(of_segment->exits, DeviceArray<int32_t>::Allocate(device, decisions));
  }
  return rule;
}

absl::Status ClassifierRule::Setup(const NamedTensors& parameters) {
  known_from_ = -1;
  if (Is(Classifier::kFixed)) return absl::OkStatus();
  ConstTensorView weights = parameters.at(ClassifierPrefix(options_) + "w").view();
  if (!Is(Classifier::kGeometric)) weights = Transpose(weights, 0, 1);
  return classifiers_.Setup(weights, parameters.at(ClassifierPrefix(options_) + "b").view());
}

size_t ClassifierRule::workspace_bytes(int64_t, int threads) const {
  return threads * Workspace::Measure([&](Workspace& workspace) {
           workspace.Take<float>(device_ == Device::kCpu ? problem_.model_dim() : 0);
         });
}

double ClassifierRule::flops(int64_t layers) const {
  const double width = static_cast<double>(problem_.model_dim());
  const double classes = static_cast<double>(options_.layers);
  if (layers == 0 || Is(Classifier::kFixed)) return 0;
  if (Is(Classifier::kGeometric)) return static_cast<double>(layers) * 2 * width;
  if (Is(Classifier::kMultinomial)) return 2 * width * classes;
  return width + 2 * width * classes / static_cast<double>(options_.segment);
}

absl::Status ClassifierRule::Decide(const layers::ExitRows& rows, uint8_t* leaves,
                                    const Execution& execution) {
  if (Is(Classifier::kFixed)) return Fill(rows, rows.layer >= options_.exit, leaves, execution);
  const bool geometric = Is(Classifier::kGeometric);
  if (!geometric && rows.layer == 1) TFB_RETURN_IF_ERROR(Classify(rows, execution));
  if (Is(Classifier::kSequence) && !known_) return Fill(rows, false, leaves, execution);
  const int64_t width = problem_.model_dim();
  const int64_t count = Is(Classifier::kSequence) ? rows.tokens : 1;
  if (device_ == Device::kCpu && geometric) {
    classifiers_.ForEachLogit(rows.layer - 1, rows.state, execution.pool,
                              [&](int64_t r, float z) { leaves[r] = z > 0 ? 1 : 0; });
    return absl::OkStatus();
  }
  if (device_ == Device::kCpu) {
    for (int64_t r = 0; r < rows.rows(); ++r) {
      leaves[r] = here_.exits.data()[rows.places[r] / count] <= rows.layer ? 1 : 0;
    }
    return absl::OkStatus();
  }
  ObeyArguments arguments = {};
  arguments.exits = here_.exits.data();
  arguments.rows = rows.state.At<float>(0);
  arguments.weights = geometric ? classifiers_.weights(rows.layer - 1) : nullptr;
  arguments.bias = geometric ? classifiers_.bias(rows.layer - 1) : nullptr;
  arguments.leaves = leaves;
  arguments.row_count = rows.rows();
  arguments.count = count;
  arguments.channels = width;
  arguments.layer = rows.layer;
  arguments.list = rows.list;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(
      KernelsOn<DepthAdaptiveKernels>(runtime->target()).obey(arguments, execution.stream));
}

absl::Status ClassifierRule::Classify(const layers::ExitRows& rows, const Execution& execution) {
  const bool sequence = Is(Classifier::kSequence);
  if (sequence) {
    known_ = rows.first_position == known_from_;
    known_from_ = rows.first_position + rows.tokens;
    std::swap(here_, next_);
  }
  const Decisions& decisions = sequence ? next_ : here_;
  const int64_t count = sequence ? rows.tokens : 1;
  if (device_ == Device::kCpu) {
    ClassifyOnCpu(rows, count, decisions.scores.mutable_data(), decisions.exits.mutable_data(),
                  execution);
    return absl::OkStatus();
  }
  ClassifyArguments arguments = {};
  arguments.rows = rows.state.At<float>(0);
  arguments.weights = classifiers_.weights(0);
  arguments.bias = classifiers_.bias(0);
  arguments.scores = decisions.scores.mutable_data();
  arguments.exits = decisions.exits.mutable_data();
  arguments.segments = rows.rows() / count;
  arguments.count = count;
  arguments.channels = problem_.model_dim();
  arguments.classes = options_.layers;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return ToStatus(
      KernelsOn<DepthAdaptiveKernels>(runtime->target()).classify(arguments, execution.stream));
}

void ClassifierRule::ClassifyOnCpu(const layers::ExitRows& rows, int64_t count, float* scores,
                                   int32_t* exits, const Execution& execution) const {
  const int64_t width = problem_.model_dim(), segments = rows.rows() / count;
  const size_t thread_bytes = workspace_bytes(0, 1);
  execution.pool->ParallelForRanges(
      segments, kRowsOfTask, [&](int64_t first, int64_t end, int worker) {
        Workspace workspace(execution.workspace.subspan(worker * thread_bytes, thread_bytes));
        float* mean = workspace.Take<float>(width);
        for (int64_t s = first; s < end; ++s) {
          std::fill_n(mean, width, 0.0f);
          for (int64_t r = s * count; r < (s + 1) * count; ++r) {
            const float* row = rows.state.At<float>(r);
            for (int64_t c = 0; c < width; ++c) mean[c] += row[c];
          }
          for (int64_t c = 0; c < width; ++c) mean[c] /= static_cast<float>(count);
          float* own = scores + s * options_.layers;
          std::copy_n(classifiers_.bias(0), options_.layers, own);
          BestCpuKernels().matrix_vector(options_.layers, width, classifiers_.weights(0), width,
                                         mean, own, 1, /*accumulate=*/true);
          exits[s] = ArgMax(own, options_.layers) + 1;
        }
      });
}

absl::Status ClassifierRule::WriteOutput(int64_t n, const ConstTensorView& state,
                                         const TensorView& probabilities,
                                         const Execution& execution) {
  const bool is_last = n == options_.layers;
  if (Is(Classifier::kGeometric) && !is_last) {
    return WriteGeometric(n, state, probabilities, execution);
  }
  if (n > 1) return absl::OkStatus();
  const bool has_scores = !is_last && (known_ || Is(Classifier::kMultinomial));
  return WriteSoftmax(has_scores ? here_.scores.data() : nullptr, probabilities, execution);
}

absl::Status ClassifierRule::WriteSoftmax(const float* scores, const TensorView& probabilities,
                                          const Execution& execution) const {
  const int64_t tokens = probabilities.dim(1), rows = probabilities.dim(0) * tokens;
  const int64_t count = Is(Classifier::kSequence) ? tokens : 1;
  const ExitSoftmax softmax = {scores, ToDevice(probabilities), count, options_.layers};
  return ForEach(device_, rows, softmax, execution);
}

absl::Status ClassifierRule::WriteGeometric(int64_t n, const ConstTensorView& state,
                                            const TensorView& probabilities,
                                            const Execution& execution) const {
  const int64_t width = problem_.model_dim(), tokens = probabilities.dim(1);
  if (device_ != Device::kCpu) {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(
        KernelsOn<DepthAdaptiveKernels>(runtime->target())
            .geometric({state.At<float>(0), classifiers_.weights(n - 1), classifiers_.bias(n - 1),
                        ToDevice(probabilities), state.dim(0), width, n, options_.layers},
                       execution.stream));
  }
  classifiers_.ForEachLogit(n - 1, state, execution.pool, [&](int64_t r, float z) {
    float& rest = *probabilities.MutableAt<float>(r / tokens, r % tokens, options_.layers - 1);
    const float left = n == 1 ? 1 : rest;
    *probabilities.MutableAt<float>(r / tokens, r % tokens, n - 1) = left / (1 + std::exp(-z));
    rest = left / (1 + std::exp(z));
  });
  return absl::OkStatus();
}

// ---- The backward pass of the probabilities ----

ClassifierRule::Memory ClassifierRule::LayOut(Workspace& workspace) const {
  Memory memory = {};
  memory.of_logits = workspace.Take<float>(problem_.batch * problem_.query_tokens * classes());
  if (Is(Classifier::kSequence)) {
    memory.means = workspace.Take<float>(problem_.batch * segments() * problem_.model_dim());
  }
  return memory;
}

size_t ClassifierRule::backward_memory_bytes() const {
  if (!HasProbabilities(options_)) return 0;
  return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); }) +
         classifiers_.gradient_workspace_bytes(problem_.batch * problem_.query_tokens);
}

absl::Status ClassifierRule::DifferentiateLogits(const ConstTensorView& of_probabilities,
                                                 const Memory& memory,
                                                 const Execution& execution) const {
  const int64_t rows = problem_.batch * problem_.query_tokens;
  const DeviceProbabilities g = ToDevice(of_probabilities);
  if (Is(Classifier::kGeometric)) {
    return ForEach(device_, rows, GeometricGradient{g, memory.of_logits, classes()}, execution);
  }
  const int64_t constant = Is(Classifier::kSequence) ? options_.segment : 0;
  return ForEach(device_, rows, SoftmaxGradient{g, memory.of_logits, classes(), constant},
                 execution);
}

absl::Status ClassifierRule::DifferentiateOutput(const OutputGradients& gradients,
                                                 const Execution& execution) const {
  const int64_t width = problem_.model_dim(), tokens = problem_.query_tokens;
  const int64_t rows = problem_.batch * tokens;
  Workspace workspace(gradients.memory);
  const Memory memory = LayOut(workspace);
  layers::ClassifierRows read = {};
  read.rows = gradients.states.At<float>(0);
  read.class_stride = Is(Classifier::kGeometric) ? rows * width : 0;
  read.tokens = tokens;
  read.segments = segments();
  read.segment = segment();
  read.channels = width;
  if (Is(Classifier::kSequence)) {
    const MeansOfSegments means = {read.rows, memory.means, tokens, segments(), segment(), width};
    TFB_RETURN_IF_ERROR(
        ForEachInRows(device_, problem_.batch * segments(), width, means, execution));
    read.rows = memory.means;
  }
  TFB_RETURN_IF_ERROR(classifiers_.Logits(read, rows, memory.of_logits, execution));
  TFB_RETURN_IF_ERROR(DifferentiateLogits(gradients.of_output, memory, execution));
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  TensorView w = gradients.parameters.Get(names_.w);
  if (!w.empty() && !Is(Classifier::kGeometric)) w = Transpose(w, 0, 1);
  return classifiers_.AddParameterGradients(read, memory.of_logits, rows, /*first=*/0, w,
                                            gradients.parameters.Get(names_.b), rest);
}

// A sequence's classifier reads the segment before, where gradients stop.
absl::Status ClassifierRule::AddStateGradient(int64_t n, absl::Span<std::byte> memory,
                                              int64_t begin, const TensorView& gradient,
                                              const Execution& execution) const {
  const bool reads =
      Is(Classifier::kGeometric) ? n <= classes() : Is(Classifier::kMultinomial) && n == 1;
  if (!reads) return absl::OkStatus();
  Workspace workspace(memory);
  const bool geometric = Is(Classifier::kGeometric);
  return classifiers_.AddStateGradient(LayOut(workspace).of_logits, problem_.query_tokens, begin,
                                       geometric ? n - 1 : 0, geometric ? n : classes(), gradient,
                                       execution);
}

absl::Status ClassifierRule::Fill(const layers::ExitRows& rows, bool leave, uint8_t* leaves,
                                  const Execution& execution) const {
  if (device_ == Device::kCpu) {
    std::fill_n(leaves, rows.rows(), leave ? 1 : 0);
    return absl::OkStatus();
  }
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
  return runtime->Fill(leaves, leave ? 1 : 0, static_cast<size_t>(rows.rows()), execution.stream);
}

}  // namespace tfb::depth_adaptive
