#include "memory/knn_lm/knn_lm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "core/cpu/kernels.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/rows.h"
#include "core/layers/log_softmax.h"
#include "core/layers/matmul_gradient.h"
#include "core/retrieval/retrieval_definition.h"
#include "core/status.h"
#include "core/workspace.h"
#include "memory/knn_lm/knn_lm_cuda.h"
#include "memory/knn_lm/mixture.h"

namespace tfb::knn_lm {
namespace {

const bool registered = RegisterTechnique<KnnLm>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "knn_lm";
  info.family = "memory";
  info.title = "kNN-LM: predictions mixed with those of the nearest states";
  info.citation = "Khandelwal et al. 2020, arXiv:1911.00172v2, section 2";
  info.input_kind = InputKind::kTokens;
  info.exactness = Exactness::kOwn;
  info.budget_option = "k";
  info.growth = 1;
  info.selection = "neighbours";
  return info;
}

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

constexpr char kLambda[] = "lambda";
std::vector<TensorSpec> InputsOf(const Problem& problem, const KnnLmOptions& options) {
  std::vector<TensorSpec> inputs = RetrievalInputs(problem, options);
  inputs.push_back({kLambda, {problem.batch, problem.query_tokens}, DType::kF32, true});
  return inputs;
}

class KnnLmLayer : public RetrievalLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const KnnLmOptions& options, Device device,
                                                       uint64_t seed) {
    auto layer = std::unique_ptr<KnnLmLayer>(new KnnLmLayer(problem, options, device));
    TFB_RETURN_IF_ERROR(layer->Initialize(seed));
    return layer;
  }

  Cost cost() const override {
    Cost cost = RetrievalLayer::cost();
    *cost.flops += 3.0 * static_cast<double>(problem().batch * problem().query_tokens *
                                             retrieval().k * problem().model_dim());
    return cost;
  }

  std::map<std::string, double> statistics() const override {
    std::vector<float> of_rows(static_cast<size_t>(statistics_.size()));
    if (last_rows_ == 0 || retrieval().k == 0 || !statistics_.Read(of_rows.data()).ok()) return {};
    double agreement = 0, mass = 0;
    for (int64_t row = 0; row < last_rows_; ++row) {
      agreement += of_rows[2 * row];
      mass += of_rows[2 * row + 1];
    }
    const double count = static_cast<double>(last_rows_);
    return {{"agreement", agreement / count}, {"neighbour_mass", mass / count}};
  }

 protected:
  size_t predict_workspace_bytes(int64_t rows, int threads) const override {
    const int64_t dim = problem().model_dim();
    const size_t mix = device() == Device::kCpu ? threads * MixBytes() : 0;
    return Workspace::Measure([&](Workspace& w) { LayOutLogP(problem().dtype, rows, w); }) +
           std::max({MatMulWorkspaceBytes(device(), rows, dim, retrieval().vocabulary, threads),
                     LogSoftmaxWorkspaceBytes(device(), retrieval().vocabulary, threads), mix});
  }

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    const int64_t rows = problem().batch * max_segment_tokens();
    TFB_ASSIGN_OR_RETURN(statistics_, DeviceArray<float>::Allocate(device(), 2 * rows));
    last_rows_ = 0;
    return RetrievalLayer::DoSetup(inputs, execution);
  }

  absl::Status Predict(const Tokens& tokens, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    float* scratch = LayOutLogP(tokens.out.dtype, tokens.rows(), workspace);
    const TensorView log_p =
        scratch == nullptr ? tokens.out : TensorView(scratch, DType::kF32, tokens.out.shape());
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    last_rows_ = tokens.rows();
    TFB_RETURN_IF_ERROR(MatMul(output(), {tokens.x, {}, log_p}, rest));
    TFB_RETURN_IF_ERROR(LogSoftmax(device(), log_p, log_p, rest));
    if (device() != Device::kCpu) return MixCuda(tokens, log_p, rest);
    MixCpu(tokens, log_p, rest);
    return absl::OkStatus();
  }

  size_t predict_backward_workspace_bytes(int64_t rows, int threads) const override {
    return Workspace::Measure([&](Workspace& w) { LayOutBackward(rows, threads, w); }) +
           OutputBackwardWorkspaceBytes(rows, threads);
  }

  absl::Status PredictBackward(const Tokens& tokens, const PredictionGradients& gradients,
                               const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch =
        LayOutBackward(tokens.rows(), execution.pool->threads(), workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const Shape shape = gradients.out.shape();
    const TensorView log_p(scratch.log_p, DType::kF32, shape);
    const TensorView gradient(scratch.gradient, DType::kF32, shape);
    TFB_RETURN_IF_ERROR(MatMul(output(), {tokens.x, {}, log_p}, rest));
    TFB_RETURN_IF_ERROR(LogSoftmax(device(), log_p, log_p, rest));
    if (device() == Device::kCpu) {
      MixBackwardCpu(tokens, gradients, scratch, rest.pool);
    } else {
      TFB_RETURN_IF_ERROR(MixBackwardCuda(tokens, gradients, log_p, scratch.gradient, rest));
    }
    TFB_RETURN_IF_ERROR(LogSoftmaxBackward(device(), log_p, gradient, gradient, rest));
    TFB_RETURN_IF_ERROR(MatMulGradient(
        device(), {gradient, tokens.x, gradients.parameters.Get("output"), {}}, rest));
    if (gradients.x.empty()) return absl::OkStatus();
    return MatMul(output_transposed(), {gradient, {}, gradients.x}, rest);
  }

 private:
  // The scratch of a thread for one row.
  struct Scratch {
    float* log_p;     // [vocabulary]
    float* log_mass;  // [vocabulary]: -inf between rows
    float* context;   // [model_dim]
    float* context_gradient;
    int32_t* entries;   // [k]
    double* distances;  // [k]
    float* exponents;   // [k]: logarithms of the weights, relative to the nearest
  };

  KnnLmLayer(const Problem& problem, const KnnLmOptions& options, Device device)
      : RetrievalLayer(problem, options, InputsOf(problem, options), device), options_(options) {}

  // ---- The backward pass ----

  struct BackwardScratch {
    float* log_p;           // of the model, [rows][vocabulary]
    float* gradient;        // of log p, then of log p_LM, then of the logits; likewise
    std::byte* of_threads;  // on the CPU
  };
  BackwardScratch LayOutBackward(int64_t rows, int threads, Workspace& workspace) const {
    const int64_t size = rows * retrieval().vocabulary;
    const size_t of_threads = device() == Device::kCpu ? threads * MixBytes() : 0;
    return {workspace.Take<float>(size), workspace.Take<float>(size),
            workspace.Take<std::byte>(static_cast<int64_t>(of_threads))};
  }

  // Turns the gradient of a row of log p into that of log p_LM, adds to that of the context, and
  // returns that of lambda.
  float MixBackward(const int32_t* neighbours, float lambda, const Scratch& scratch,
                    const float* log_p, float* gradient, float* context_gradient) const {
    const int64_t count = Weigh(neighbours, scratch), dim = problem().model_dim();
    if (count == 0) return 0;
    const float log_total = AddMasses(count, scratch);
    const Mixture mixture = MixtureOf(lambda);
    float of_lambda = 0;
    for (int64_t y = 0; y < retrieval().vocabulary; ++y) {
      const float log_p_knn = scratch.log_mass[y] - log_total;
      scratch.log_p[y] = mixture.LogP(log_p[y], log_p_knn);
      of_lambda += gradient[y] * Mixture::ByLambda(log_p[y], log_p_knn, scratch.log_p[y]);
    }
    // In double, in which products of floats are exact: those of a neighbour that is alone cancel.
    const auto product = [&](int64_t n) {
      const int32_t token = values()[scratch.entries[n]];
      return static_cast<double>(gradient[token]) *
             mixture.ByNeighbour(scratch.exponents[n] - log_total, scratch.log_p[token]);
    };
    double sum = 0;
    for (int64_t n = 0; n < count; ++n) sum += product(n);
    for (int64_t n = 0; n < count; ++n) {
      const double weight = std::exp(scratch.exponents[n] - log_total);
      const float factor = DifferenceFactor(product(n) - weight * sum, options_.temperature);
      const float* key = keys() + scratch.entries[n] * dim;
      for (int64_t c = 0; c < dim; ++c) {
        context_gradient[c] += factor * (scratch.context[c] - key[c]);
      }
    }
    for (int64_t y = 0; y < retrieval().vocabulary; ++y) {
      gradient[y] *= mixture.ByModel(log_p[y], scratch.log_p[y]);
    }
    for (int64_t n = 0; n < count; ++n) {
      scratch.log_mass[values()[scratch.entries[n]]] = kNegativeInfinity;
    }
    return of_lambda;
  }

  void MixBackwardCpu(const Tokens& tokens, const PredictionGradients& gradients,
                      const BackwardScratch& scratch, ThreadPool* pool) const {
    constexpr int64_t kRowsOfTask = 16;
    const int64_t vocabulary = retrieval().vocabulary, dim = problem().model_dim();
    const TensorView of_lambda = gradients.inputs.Get(kLambda);
    const ConstTensorView given = tokens.inputs.Get(kLambda);
    pool->ParallelForRanges(
        tokens.rows(), kRowsOfTask, [&](int64_t first, int64_t end, int worker) {
          Workspace workspace(absl::MakeSpan(scratch.of_threads + worker * MixBytes(), MixBytes()));
          const Scratch of_row = LayOut(workspace);
          std::fill_n(of_row.log_mass, vocabulary, kNegativeInfinity);
          for (int64_t row = first; row < end; ++row) {
            const int64_t b = row / tokens.x.dim(1), i = row % tokens.x.dim(1);
            float* gradient = scratch.gradient + row * vocabulary;
            LoadRow(gradients.out, gradients.out.Offset(b, i), gradients.out.stride(2), vocabulary,
                    gradient);
            LoadRow(tokens.context, tokens.context.Offset(b, i), tokens.context.stride(2), dim,
                    of_row.context);
            std::fill_n(of_row.context_gradient, dim, 0.0f);
            const float one =
                MixBackward(tokens.neighbours + row * retrieval().k, LambdaOf(tokens, row), of_row,
                            scratch.log_p + row * vocabulary, gradient, of_row.context_gradient);
            if (!of_lambda.empty()) {  // of the option, where no input replaces it
              const bool counts = given.empty() || *given.At<float>(b, i) == LambdaOf(tokens, row);
              *of_lambda.MutableAt<float>(b, i) = counts ? one : 0;
            }
            if (gradients.context.empty()) continue;
            StoreRow(of_row.context_gradient, dim, gradients.context,
                     gradients.context.Offset(b, i), gradients.context.stride(2));
          }
        });
  }

  absl::Status MixBackwardCuda(const Tokens& tokens, const PredictionGradients& gradients,
                               const TensorView& log_p, float* gradient,
                               const Execution& execution) const {
    KnnLmGradients of = {};
    of.out = ToDeviceView(gradients.out);
    of.log_p = gradient;
    of.context = ToDeviceView(gradients.context);
    of.lambda = ToDeviceView(gradients.inputs.Get(kLambda));
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(KernelsOn<KnnLmKernels>(runtime->target())
                        .differentiate(ToArguments(tokens, log_p), of, execution.stream));
  }

  // Returns memory for the model's log-probabilities where `out` cannot hold them in fp32.
  float* LayOutLogP(DType dtype, int64_t rows, Workspace& workspace) const {
    return dtype == DType::kF32 ? nullptr : workspace.Take<float>(rows * retrieval().vocabulary);
  }

  Scratch LayOut(Workspace& workspace) const {
    const int64_t vocabulary = retrieval().vocabulary, k = retrieval().k;
    return {workspace.Take<float>(vocabulary),
            workspace.Take<float>(vocabulary),
            workspace.Take<float>(problem().model_dim()),
            workspace.Take<float>(problem().model_dim()),
            workspace.Take<int32_t>(k),
            workspace.Take<double>(k),
            workspace.Take<float>(k)};
  }
  size_t MixBytes() const {
    return Workspace::Measure([this](Workspace& workspace) { LayOut(workspace); });
  }

  // Computes the exponents of the neighbours, leaving out entries without a finite distance.
  // Returns how many there are, and moves the nearest to the front.
  int64_t Weigh(const int32_t* neighbours, const Scratch& scratch) const {
    int64_t given = 0, count = 0;
    for (int64_t n = 0; n < retrieval().k; ++n) {
      if (neighbours[n] >= 0) scratch.entries[given++] = neighbours[n];
    }
    const int64_t dim = problem().model_dim();
    BestCpuKernels().exact_scores(/*distance=*/true, {keys(), dim, scratch.entries, given, dim},
                                  scratch.context, scratch.distances);
    for (int64_t n = 0; n < given; ++n) {
      if (!std::isfinite(scratch.distances[n])) continue;
      scratch.entries[count] = scratch.entries[n];
      scratch.distances[count++] = scratch.distances[n];
    }
    if (count == 0) return 0;
    const int64_t nearest =
        std::min_element(scratch.distances, scratch.distances + count) - scratch.distances;
    std::rotate(scratch.distances, scratch.distances + nearest, scratch.distances + nearest + 1);
    std::rotate(scratch.entries, scratch.entries + nearest, scratch.entries + nearest + 1);
    for (int64_t n = 0; n < count; ++n) {
      const double exponent = (scratch.distances[0] - scratch.distances[n]) / options_.temperature;
      scratch.exponents[n] = static_cast<float>(exponent);
    }
    return count;
  }

  // Adds the weights of neighbours to the masses of their tokens, in logarithms, as the weight of a
  // far neighbour may underflow fp32. Returns the logarithm of the sum of all.
  float AddMasses(int64_t count, const Scratch& scratch) const {
    float total = 0;
    for (int64_t n = 0; n < count; ++n) {
      total += std::exp(scratch.exponents[n]);
      float& log_mass = scratch.log_mass[values()[scratch.entries[n]]];
      log_mass = LogAdd(log_mass, scratch.exponents[n]);
    }
    return std::log(total);
  }

  // Returns lambda of a token.
  float LambdaOf(const Tokens& tokens, int64_t row) const {
    const ConstTensorView given = tokens.inputs.Get(kLambda);
    if (given.empty()) return static_cast<float>(options_.lambda);
    return InRange(*given.At<float>(row / tokens.x.dim(1), row % tokens.x.dim(1)));
  }

  // Evaluates the formula on a row of log p_LM; `statistics` are its agreement and mass.
  void MixRow(const int32_t* neighbours, float lambda, const Scratch& scratch,
              float* statistics) const {
    const int64_t count = Weigh(neighbours, scratch);
    statistics[0] = statistics[1] = 0;
    if (count == 0) return;
    const float log_total = AddMasses(count, scratch);
    const int64_t likely =
        std::max_element(scratch.log_p, scratch.log_p + retrieval().vocabulary) - scratch.log_p;
    statistics[0] = values()[scratch.entries[0]] == likely ? 1 : 0;
    statistics[1] = lambda * std::exp(scratch.log_mass[likely] - log_total);
    const Mixture mixture = MixtureOf(lambda);
    for (int64_t y = 0; y < retrieval().vocabulary; ++y) scratch.log_p[y] += mixture.log_model;
    for (int64_t n = 0; n < count; ++n) {
      const int32_t token = values()[scratch.entries[n]];
      if (scratch.log_mass[token] == kNegativeInfinity) continue;  // this token is done already
      scratch.log_p[token] =
          LogAdd(scratch.log_p[token], mixture.log_lambda + (scratch.log_mass[token] - log_total));
      scratch.log_mass[token] = kNegativeInfinity;
    }
  }

  void MixCpu(const Tokens& tokens, const TensorView& log_p, const Execution& execution) {
    constexpr int64_t kRowsOfTask = 16;
    const int64_t vocabulary = retrieval().vocabulary;
    const auto mix = [&](int64_t first, int64_t end, int worker) {
      Workspace workspace(execution.workspace.subspan(worker * MixBytes(), MixBytes()));
      const Scratch scratch = LayOut(workspace);
      std::fill_n(scratch.log_mass, vocabulary, kNegativeInfinity);
      for (int64_t row = first; row < end; ++row) {
        const int64_t b = row / tokens.x.dim(1), i = row % tokens.x.dim(1);
        LoadRow(tokens.context, tokens.context.Offset(b, i), tokens.context.stride(2),
                problem().model_dim(), scratch.context);
        LoadRow(log_p, log_p.Offset(b, i), log_p.stride(2), vocabulary, scratch.log_p);
        MixRow(tokens.neighbours + row * retrieval().k, LambdaOf(tokens, row), scratch,
               statistics_.mutable_data() + 2 * row);
        StoreRow(scratch.log_p, vocabulary, tokens.out, tokens.out.Offset(b, i),
                 tokens.out.stride(2));
      }
    };
    execution.pool->ParallelForRanges(tokens.rows(), kRowsOfTask, mix);
  }

  KnnLmArguments ToArguments(const Tokens& tokens, const TensorView& log_p) const {
    KnnLmArguments arguments = {};
    arguments.neighbours = tokens.neighbours;
    arguments.keys = keys();
    arguments.values = values();
    arguments.context = ToDeviceView(tokens.context);
    arguments.log_p = ToDeviceView(log_p);
    arguments.rows = tokens.rows();
    arguments.tokens = tokens.x.dim(1);
    arguments.dim = problem().model_dim();
    arguments.vocabulary = retrieval().vocabulary;
    arguments.k = static_cast<int>(retrieval().k);
    arguments.temperature = options_.temperature;
    arguments.lambda = static_cast<float>(options_.lambda);
    if (const ConstTensorView given = tokens.inputs.Get(kLambda); !given.empty()) {
      arguments.lambdas = given.At<float>(0);
      arguments.lambda_strides[0] = given.stride(0);
      arguments.lambda_strides[1] = given.stride(1);
    }
    return arguments;
  }

  absl::Status MixCuda(const Tokens& tokens, const TensorView& log_p,
                       const Execution& execution) const {
    const KnnLmOutputs outputs = {ToDeviceView(tokens.out), statistics_.mutable_data()};
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(KernelsOn<KnnLmKernels>(runtime->target())
                        .mix(ToArguments(tokens, log_p), outputs, execution.stream));
  }

  KnnLmOptions options_;
  DeviceArray<float> statistics_;  // [rows][2]: agreement and mass
  int64_t last_rows_ = 0;
};

// ---- The definition ----

// Returns log(exp(a) + exp(b)).
double LogAddInDouble(double a, double b) {
  const double max = std::max(a, b);
  return std::isinf(max) ? max : max + std::log1p(std::exp(std::min(a, b) - max));
}

// Returns log p_kNN over the vocabulary; empty where there is no neighbour.
std::vector<double> NeighbourLogProbabilities(const std::vector<Neighbour>& neighbours,
                                              const ConstTensorView& values,
                                              const KnnLmOptions& options) {
  std::vector<double> log_p(options.vocabulary, -std::numeric_limits<double>::infinity());
  double total = -std::numeric_limits<double>::infinity();
  for (const Neighbour& neighbour : neighbours) {
    if (neighbour.entry < 0 || !std::isfinite(neighbour.distance)) continue;
    const double log_weight = -neighbour.distance / options.temperature;
    double& of_token = log_p[static_cast<int64_t>(values.Get(neighbour.entry))];
    of_token = LogAddInDouble(of_token, log_weight);
    total = LogAddInDouble(total, log_weight);
  }
  if (std::isinf(total)) return {};
  for (double& one : log_p) one -= total;
  return log_p;
}

}  // namespace

KnnLm::KnnLm() : RetrievalTechnique(Info()) {}

std::vector<TensorSpec> KnnLm::ReadTensors(const Problem& problem,
                                           const KnnLmOptions& options) const {
  return InputsOf(problem, options);
}

absl::StatusOr<std::unique_ptr<Layer>> KnnLm::CreateLayer(const Problem& problem,
                                                          const KnnLmOptions& options,
                                                          Device device, uint64_t seed) const {
  return KnnLmLayer::Create(problem, options, device, seed);
}

absl::Status KnnLm::DefineChecked(const Problem& problem, const KnnLmOptions& options,
                                  const NamedTensors& parameters, const Inputs& inputs,
                                  const DefinitionRequest& request, NamedTensors* outputs) const {
  const DoubleTensor output(parameters.at("output").view()), x(inputs.Get("x"));
  const ConstTensorView values = parameters.at("datastore.values").view();
  const ConstTensorView given = inputs.Get(kLambda);
  DefineRetrieval(
      problem, options, parameters, inputs, request,
      [&](int64_t b, int64_t i, const std::vector<Neighbour>& neighbours) {
        std::vector<double> log_p =
            LogProbabilities(output, options, x.Row(b, i), problem.model_dim());
        const std::vector<double> log_p_knn =
            NeighbourLogProbabilities(neighbours, values, options);
        if (log_p_knn.empty()) return log_p;
        double lambda = options.lambda;
        if (!given.empty()) {
          lambda = given.Get(given.Offset(b, i));
          lambda = lambda < 0 ? 0 : lambda > 1 ? 1 : lambda;
        }
        for (int64_t y = 0; y < options.vocabulary; ++y) {
          log_p[y] =
              LogAddInDouble(std::log(1 - lambda) + log_p[y], std::log(lambda) + log_p_knn[y]);
        }
        return log_p;
      },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::knn_lm
