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

DeviceProbabilities ToDevice(const TensorView& view) {
  return {view.MutableAt<float>(0), view.stride(0), view.stride(1), view.stride(2), view.dim(1)};
}

}  // namespace

bool HasProbabilities(const DepthAdaptiveOptions& options) {
  using Classifier = DepthAdaptiveOptions::Classifier;
  return options.classifier != Classifier::kConfidence && options.classifier != Classifier::kFixed;
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
  TFB_ASSIGN_OR_RETURN(weights_, CopyFloats(device_, weights));
  TFB_ASSIGN_OR_RETURN(bias_,
                       CopyFloats(device_, parameters.at(ClassifierPrefix(options_) + "b").view()));
  return absl::OkStatus();
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
    ForEachLogit(rows.layer, rows.state, execution,
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
  arguments.weights = geometric ? weights_.data() + (rows.layer - 1) * width : nullptr;
  arguments.bias = geometric ? bias_.data() + rows.layer - 1 : nullptr;
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
  arguments.weights = weights_.data();
  arguments.bias = bias_.data();
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
          std::copy_n(bias_.data(), options_.layers, own);
          BestCpuKernels().matrix_vector(options_.layers, width, weights_.data(), width, mean, own,
                                         1, /*accumulate=*/true);
          exits[s] = ArgMax(own, options_.layers) + 1;
        }
      });
}

template <class Body>
void ClassifierRule::ForEachLogit(int64_t n, const ConstTensorView& state,
                                  const Execution& execution, const Body& body) const {
  const int64_t width = problem_.model_dim(), rows = state.dim(0);
  const float* weights = weights_.data() + (n - 1) * width;
  execution.pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t first, int64_t end, int) {
    const int64_t count = end - first;
    float logits[kRowsOfTask];
    BestCpuKernels().matrix_vector(count, width, state.At<float>(first), width, weights, logits, 1,
                                   /*accumulate=*/false);
    for (int64_t r = 0; r < count; ++r) body(first + r, logits[r] + bias_.data()[n - 1]);
  });
}

absl::Status ClassifierRule::WriteProbabilities(int64_t n, const ConstTensorView& state,
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
            .geometric({state.At<float>(0), weights_.data() + (n - 1) * width, bias_.data() + n - 1,
                        ToDevice(probabilities), state.dim(0), width, n, options_.layers},
                       execution.stream));
  }
  ForEachLogit(n, state, execution, [&](int64_t r, float z) {
    float& rest = *probabilities.MutableAt<float>(r / tokens, r % tokens, options_.layers - 1);
    const float left = n == 1 ? 1 : rest;
    *probabilities.MutableAt<float>(r / tokens, r % tokens, n - 1) = left / (1 + std::exp(-z));
    rest = left / (1 + std::exp(z));
  });
  return absl::OkStatus();
}

// ---- The backward pass of the probabilities ----

namespace {

constexpr int64_t kMostLayers = 32;

float Dot(const float* a, const float* b, int64_t size) {
  double sum = 0;
  for (int64_t c = 0; c < size; ++c) sum += static_cast<double>(a[c]) * b[c];
  return static_cast<float>(sum);
}

}  // namespace

// With chi^n = sigmoid(z_n), q(n) = chi^n S_n, S_n = prod_(n' < n) (1 - chi^n') and g = dL/dq:
//
//   dz_n = g_n q(n) (1 - chi^n) - chi^n sum_(m > n) g_m q(m)
void ClassifierRule::GeometricBackward(const ProbabilityGradients& gradients, int64_t b,
                                       int64_t t) const {
  const int64_t width = problem_.model_dim(), last = options_.layers - 1;
  const ConstTensorView& g = gradients.of_probabilities;
  float chi[kMostLayers], q[kMostLayers], left = 1;
  for (int64_t n = 0; n < last; ++n) {
    const float z =
        Dot(weights_.data() + n * width, gradients.states(n + 1).At<float>(b, t), width) +
        bias_.data()[n];
    chi[n] = 1 / (1 + std::exp(-z));
    q[n] = left * chi[n];
    left /= 1 + std::exp(z);
  }
  float* const dz = LogitsOf(gradients, b, t);
  float later = *g.At<float>(b, t, last) * left;
  for (int64_t n = last - 1; n >= 0; --n) {
    const float own = *g.At<float>(b, t, n) * q[n];
    dz[n] = own * (1 - chi[n]) - chi[n] * later;
    later += own;
  }
}

// dz_n = q(n) (g_n - sum_m g_m q(m)); without scores the probabilities are constants.
void ClassifierRule::SoftmaxBackward(const ProbabilityGradients& gradients, const float* scores,
                                     int64_t b, int64_t t) const {
  const ConstTensorView& g = gradients.of_probabilities;
  float* const dz = LogitsOf(gradients, b, t);
  if (scores == nullptr) {
    std::fill_n(dz, options_.layers, 0.0f);
    return;
  }
  const float largest = *std::max_element(scores, scores + options_.layers);
  float sum = 0, mean = 0;
  for (int64_t n = 0; n < options_.layers; ++n) sum += std::exp(scores[n] - largest);
  for (int64_t n = 0; n < options_.layers; ++n) {
    dz[n] = std::exp(scores[n] - largest) / sum;
    mean += *g.At<float>(b, t, n) * dz[n];
  }
  for (int64_t n = 0; n < options_.layers; ++n) dz[n] *= *g.At<float>(b, t, n) - mean;
}

float ClassifierRule::MeanBefore(const ConstTensorView& states, int64_t b, int64_t begin,
                                 int64_t c) const {
  float sum = 0;
  for (int64_t t = begin - options_.segment; t < begin; ++t) sum += *states.At<float>(b, t, c);
  return sum / static_cast<float>(options_.segment);
}

void ClassifierRule::DifferentiateProbabilities(const ProbabilityGradients& gradients,
                                                ThreadPool* pool) const {
  const int64_t width = problem_.model_dim(), layers = options_.layers;
  const int64_t total = problem_.query_tokens;
  const ConstTensorView first = gradients.states(1);
  const int64_t classes = Is(Classifier::kGeometric) ? layers - 1 : layers;
  // The tokens that share their logits: a segment, or one.
  const int64_t count = Is(Classifier::kSequence) ? options_.segment : 1;
  const int64_t parts = (total + count - 1) / count;
  pool->ParallelForRanges(problem_.batch * parts, kRowsOfTask, [&](int64_t from, int64_t to, int) {
    for (int64_t part = from; part < to; ++part) {
      const int64_t b = part / parts, begin = part % parts * count;
      float scores[kMostLayers];
      const bool has_scores = !Is(Classifier::kSequence) || begin > 0;
      for (int64_t n = 0; n < layers && has_scores && !Is(Classifier::kGeometric); ++n) {
        const float* weights = weights_.data() + n * width;
        scores[n] = bias_.data()[n];
        if (Is(Classifier::kMultinomial)) {
          scores[n] += Dot(weights, first.At<float>(b, begin), width);
          continue;
        }
        for (int64_t c = 0; c < width; ++c) {
          scores[n] += weights[c] * MeanBefore(first, b, begin, c);
        }
      }
      for (int64_t t = begin; t < std::min(begin + count, total); ++t) {
        if (Is(Classifier::kGeometric)) {
          GeometricBackward(gradients, b, t);
        } else {
          SoftmaxBackward(gradients, has_scores ? scores : nullptr, b, t);
        }
      }
    }
  });

  // The sums over tokens, in their order: a task has some of the channels.
  const TensorView w = gradients.parameters.Get(names_.w);
  const TensorView bias = gradients.parameters.Get(names_.b);
  const auto at = [&](int64_t n, int64_t c) -> float& {
    return Is(Classifier::kGeometric) ? *w.MutableAt<float>(n, c) : *w.MutableAt<float>(c, n);
  };
  pool->ParallelForRanges(w.empty() ? 0 : width, kRowsOfTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t b = 0; b < problem_.batch; ++b) {
        float mean = 0;
        for (int64_t t = 0; t < total; ++t) {
          if (Is(Classifier::kSequence) && t % count == 0) {
            mean = t == 0 ? 0 : MeanBefore(first, b, t, c);
          }
          const float* dz = LogitsOf(gradients, b, t);
          for (int64_t n = 0; n < classes; ++n) {
            const float x = Is(Classifier::kSequence) ? mean
                            : Is(Classifier::kGeometric)
                                ? *gradients.states(n + 1).At<float>(b, t, c)
                                : *first.At<float>(b, t, c);
            at(n, c) += dz[n] * x;
          }
        }
      }
    }
  });
  for (int64_t row = 0; row < problem_.batch * total && !bias.empty(); ++row) {
    for (int64_t n = 0; n < classes; ++n) {
      *bias.MutableAt<float>(n) += gradients.of_logits[row * layers + n];
    }
  }
}

// A sequence's classifier reads the segment before, where gradients stop.
void ClassifierRule::AddStateGradient(int64_t n, const float* of_logits, float* gradient) const {
  const int64_t width = problem_.model_dim();
  const auto add = [&](int64_t of_class) {
    const float* weights = weights_.data() + of_class * width;
    for (int64_t c = 0; c < width; ++c) gradient[c] += of_logits[of_class] * weights[c];
  };
  if (Is(Classifier::kGeometric) && n < options_.layers) add(n - 1);
  for (int64_t m = 0; m < options_.layers && n == 1 && Is(Classifier::kMultinomial); ++m) add(m);
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
