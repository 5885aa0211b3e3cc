#include "memory/spalm/spalm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "core/cpu/kernels.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/definition.h"
#include "core/flash/rows.h"
#include "core/layers/log_softmax.h"
#include "core/layers/matmul_gradient.h"
#include "core/random.h"
#include "core/retrieval/retrieval_definition.h"
#include "core/status.h"
#include "core/workspace.h"
#include "memory/spalm/spalm_cuda.h"
#include "memory/spalm/spalm_functors.h"

namespace tfb::spalm {
namespace {

const bool registered = RegisterTechnique<Spalm>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "spalm";
  info.family = "memory";
  info.title = "SPALM: states gated with embeddings of what followed the nearest states";
  info.citation = "Yogatama, de Masson d'Autume, Kong 2021, arXiv:2102.02557v1, section 2";
  info.input_kind = InputKind::kTokens;
  info.exactness = Exactness::kOwn;
  info.budget_option = "k";
  info.growth = 1;
  info.selection = "neighbours";
  return info;
}

class SpalmLayer : public RetrievalLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const SpalmOptions& options, Device device,
                                                       uint64_t seed) {
    auto layer = std::unique_ptr<SpalmLayer>(new SpalmLayer(problem, options, device));
    TFB_RETURN_IF_ERROR(layer->Initialize(seed));
    const int64_t dim = problem.model_dim();
    TFB_ASSIGN_OR_RETURN(Tensor gate, Tensor::Allocate(DType::kF32, {dim}));
    FillNormal(&gate, seed, "spalm.gate", 0, 1 / std::sqrt(static_cast<double>(dim)));
    layer->parameters_["spalm.gate"] = std::move(gate);
    return layer;
  }

  Cost cost() const override {
    Cost cost = RetrievalLayer::cost();
    const double tokens = static_cast<double>(problem().batch * problem().query_tokens);
    *cost.flops += tokens * static_cast<double>((4 * retrieval().k + 5) * problem().model_dim());
    return cost;
  }

  std::map<std::string, double> statistics() const override {
    std::vector<float> gates(static_cast<size_t>(statistics_.size()));
    if (last_rows_ == 0 || !statistics_.Read(gates.data()).ok()) return {};
    double sum = 0;
    for (int64_t row = 0; row < last_rows_; ++row) sum += gates[row];
    return {{"gate", sum / static_cast<double>(last_rows_)}};
  }

  std::map<std::string, std::string> stopped_gradients() const override {
    std::map<std::string, std::string> stopped = RetrievalLayer::stopped_gradients();
    stopped["context"] =
        "it finds the neighbours, and nothing else; they are those that were found";
    return stopped;
  }

 protected:
  size_t predict_backward_workspace_bytes(int64_t rows, int threads) const override {
    const int64_t dim = problem().model_dim();
    return Workspace::Measure([&](Workspace& w) { LayOutBackward(rows, w); }) +
           std::max(OutputBackwardWorkspaceBytes(rows, threads),
                    MatMulGradientWorkspaceBytes(device(), rows, dim, 1, threads));
  }

  absl::Status PredictBackward(const Tokens& tokens, const PredictionGradients& gradients,
                               const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch = LayOutBackward(tokens.rows(), workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const Shape states = tokens.x.shape(), of_vocabulary = gradients.out.shape();
    const TensorView z(scratch.z, DType::kF32, states);
    const TensorView dz(scratch.z_gradient, DType::kF32, states);
    const TensorView logits(scratch.logits, DType::kF32, of_vocabulary);
    const TensorView dlogits(scratch.logits_gradient, DType::kF32, of_vocabulary);
    TFB_RETURN_IF_ERROR(Prepare(tokens, scratch, rest));
    TFB_RETURN_IF_ERROR(MatMul(output(), {z, {}, logits}, rest));
    TFB_RETURN_IF_ERROR(LogSoftmaxBackward(device(), logits, gradients.out, dlogits, rest));
    TFB_RETURN_IF_ERROR(MatMul(output_transposed(), {dlogits, {}, dz}, rest));
    const TensorView of_output = gradients.parameters.Get("output");
    TFB_RETURN_IF_ERROR(MatMulGradient(device(), {dlogits, z, of_output, {}}, rest));
    TFB_RETURN_IF_ERROR(DifferentiateScores(tokens, scratch, rest));
    TFB_RETURN_IF_ERROR(ForEachInRows(device(), tokens.rows(), problem().model_dim(),
                                      ToThroughGate(tokens, scratch, gradients.x), rest));
    TFB_RETURN_IF_ERROR(
        DifferentiateGate(tokens, scratch, gradients.parameters.Get("spalm.gate"), rest));
    return of_output.empty() ? absl::OkStatus() : AddToOutput(tokens, scratch, of_output, rest);
  }

  size_t predict_workspace_bytes(int64_t rows, int threads) const override {
    const int64_t dim = problem().model_dim(), vocabulary = retrieval().vocabulary;
    const size_t aggregate = device() == Device::kCpu ? threads * AggregateBytes() : 0;
    return Workspace::Measure([&](Workspace& w) { LayOut(problem().dtype, rows, w); }) +
           std::max({MatMulWorkspaceBytes(device(), rows, dim, vocabulary, threads),
                     LogSoftmaxWorkspaceBytes(device(), vocabulary, threads), aggregate});
  }

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    const int64_t rows = problem().batch * max_segment_tokens();
    TFB_ASSIGN_OR_RETURN(statistics_, DeviceArray<float>::Allocate(device(), rows));
    TFB_ASSIGN_OR_RETURN(embeddings_, CopyFloats(device(), parameters_.at("output").view()));
    TFB_ASSIGN_OR_RETURN(gate_, CopyFloats(device(), parameters_.at("spalm.gate").view()));
    last_rows_ = 0;
    return RetrievalLayer::DoSetup(inputs, execution);
  }

  absl::Status Predict(const Tokens& tokens, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const Scratch scratch = LayOut(tokens.out.dtype, tokens.rows(), workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    last_rows_ = tokens.rows();
    if (device() == Device::kCpu) {
      AggregateCpu(tokens, scratch.z, rest);
    } else {
      TFB_RETURN_IF_ERROR(AggregateCuda(tokens, scratch.z, rest));
    }
    const TensorView z(scratch.z, DType::kF32, tokens.x.shape());
    const TensorView logits = scratch.logits == nullptr
                                  ? tokens.out
                                  : TensorView(scratch.logits, DType::kF32, tokens.out.shape());
    TFB_RETURN_IF_ERROR(MatMul(output(), {z, {}, logits}, rest));
    return LogSoftmax(device(), logits, tokens.out, rest);
  }

 private:
  struct Scratch {
    float* z;       // [rows][model_dim]
    float* logits;  // [rows][vocabulary], where `out` cannot hold them in fp32; else null
  };

  SpalmLayer(const Problem& problem, const SpalmOptions& options, Device device)
      : RetrievalLayer(problem, options, RetrievalInputs(problem, options), device) {}

  // ---- The backward pass ----

  struct BackwardScratch {
    float* x;            // [rows][model_dim] on the CPU
    float* mean;         // m [rows][model_dim]
    float* z;            // likewise
    float* z_gradient;   // likewise; then dm
    float* weights;      // w [rows][k]; unspecified for what is no neighbour
    float* scores;       // dc [rows][k]
    int32_t* places;     // [rows][k]: the neighbours' tokens; -1 for none
    float* gates;        // g [rows]
    float* gate_scores;  // ds [rows]
    float* logits;       // [rows][vocabulary]
    float* logits_gradient;
  };
  BackwardScratch LayOutBackward(int64_t rows, Workspace& workspace) const {
    const int64_t dim = problem().model_dim(), k = retrieval().k;
    const auto take = [&](int64_t channels) { return workspace.Take<float>(rows * channels); };
    BackwardScratch scratch = {};
    scratch.x = take(device() == Device::kCpu ? dim : 0);
    for (float** states : {&scratch.mean, &scratch.z, &scratch.z_gradient}) *states = take(dim);
    scratch.weights = take(k);
    scratch.scores = take(k);
    scratch.places = workspace.Take<int32_t>(rows * k);
    scratch.gates = take(1);
    scratch.gate_scores = take(1);
    scratch.logits = take(retrieval().vocabulary);
    scratch.logits_gradient = take(retrieval().vocabulary);
    return scratch;
  }

  ThroughGate ToThroughGate(const Tokens& tokens, const BackwardScratch& scratch,
                            const TensorView& x_gradient) const {
    return {
        scratch.places,      embeddings_.data(),    gate_.data(),       scratch.gates,
        scratch.gate_scores, scratch.scores,        scratch.z_gradient, ToDeviceView(x_gradient),
        tokens.x.dim(1),     problem().model_dim(), retrieval().k};
  }
  SpalmGradientArguments ToArguments(const Tokens& tokens, const BackwardScratch& scratch,
                                     const TensorView& of_output) const {
    SpalmGradientArguments arguments = {};
    arguments.places = scratch.places;
    arguments.embeddings = embeddings_.data();
    arguments.x = ToDeviceView(tokens.x);
    arguments.mean = scratch.mean;
    arguments.weights = scratch.weights;
    arguments.gates = scratch.gates;
    arguments.z_gradient = scratch.z_gradient;
    arguments.scores = scratch.scores;
    arguments.gate_scores = scratch.gate_scores;
    arguments.output = ToDeviceView(of_output);
    arguments.rows = tokens.rows();
    arguments.tokens = tokens.x.dim(1);
    arguments.dim = problem().model_dim();
    arguments.vocabulary = retrieval().vocabulary;
    arguments.k = static_cast<int>(retrieval().k);
    return arguments;
  }

  template <class Body>
  static absl::Status ForEachOfRows(int64_t rows, ThreadPool* pool, const Body& body) {
    constexpr int64_t kRowsOfTask = 16;
    pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t first, int64_t end, int) {
      for (int64_t row = first; row < end; ++row) body(row);
    });
    return absl::OkStatus();
  }
  static float Dot(const float* a, const float* b, int64_t dim) {
    float sum = 0;
    BestCpuKernels().matrix_vector(1, dim, a, dim, b, &sum, 1, false);
    return sum;
  }

  // Computes x, m, w, g and z again. Without neighbours m is x, and g 1.
  absl::Status Prepare(const Tokens& tokens, const BackwardScratch& scratch,
                       const Execution& execution) const {
    if (device() == Device::kCpu) {
      return ForEachOfRows(tokens.rows(), execution.pool,
                           [&](int64_t row) { PrepareRow(tokens, row, scratch); });
    }
    SpalmArguments arguments = ToArguments(tokens, scratch.z);
    arguments.gates = scratch.gates;
    arguments.mean = scratch.mean;
    arguments.weights = scratch.weights;
    arguments.places = scratch.places;
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(
        KernelsOn<SpalmKernels>(runtime->target()).aggregate(arguments, execution.stream));
  }
  void PrepareRow(const Tokens& tokens, int64_t row, const BackwardScratch& scratch) const {
    const int64_t dim = problem().model_dim(), k = retrieval().k;
    const int32_t* neighbours = tokens.neighbours + row * k;
    float *x = scratch.x + row * dim, *mean = scratch.mean + row * dim;
    float* weights = scratch.weights + row * k;
    LoadRow(tokens.x, tokens.x.Offset(row / tokens.x.dim(1), row % tokens.x.dim(1)),
            tokens.x.stride(2), dim, x);
    for (int64_t n = 0; n < k; ++n) {
      scratch.places[row * k + n] = neighbours[n] < 0 ? -1 : values()[neighbours[n]];
    }
    scratch.gates[row] = 1;
    if (Average(neighbours, x, weights, mean)) {
      float sum = 0;
      for (int64_t n = 0; n < k; ++n) sum += weights[n];
      for (int64_t n = 0; n < k; ++n) weights[n] /= sum;
      scratch.gates[row] = 1 / (1 + std::exp(-Dot(gate_.data(), x, dim)));
    } else {
      std::copy_n(x, dim, mean);
    }
    const float g = scratch.gates[row];
    for (int64_t c = 0; c < dim; ++c) {
      scratch.z[row * dim + c] = (1 - g) * mean[c] + g * x[c];
    }
  }

  // Computes dc and ds.
  absl::Status DifferentiateScores(const Tokens& tokens, const BackwardScratch& scratch,
                                   const Execution& execution) const {
    if (device() == Device::kCpu) {
      return ForEachOfRows(tokens.rows(), execution.pool,
                           [&](int64_t row) { DifferentiateScoresOfRow(row, scratch); });
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(KernelsOn<SpalmKernels>(runtime->target())
                        .differentiate_scores(ToArguments(tokens, scratch, {}), execution.stream));
  }
  void DifferentiateScoresOfRow(int64_t row, const BackwardScratch& scratch) const {
    const int64_t dim = problem().model_dim(), k = retrieval().k;
    const float *dz = scratch.z_gradient + row * dim, g = scratch.gates[row];
    const float dz_mean = Dot(dz, scratch.mean + row * dim, dim);
    scratch.gate_scores[row] = GateScoreGradient(Dot(dz, scratch.x + row * dim, dim), dz_mean, g);
    for (int64_t n = row * k; n < (row + 1) * k; ++n) {
      scratch.scores[n] = 0;
      if (scratch.places[n] < 0) continue;
      const float dz_embedding = Dot(dz, embeddings_.data() + scratch.places[n] * dim, dim);
      scratch.scores[n] = ScoreGradient(scratch.weights[n], dz_embedding, dz_mean, g);
    }
  }

  // Computes dw_g, which is a product: x^T ds.
  absl::Status DifferentiateGate(const Tokens& tokens, const BackwardScratch& scratch,
                                 const TensorView& of_gate, const Execution& execution) const {
    if (of_gate.empty()) return absl::OkStatus();
    const TensorView ds(scratch.gate_scores, DType::kF32, {tokens.x.dim(0), tokens.x.dim(1), 1});
    const TensorView column(of_gate.mutable_data(), DType::kF32, {of_gate.dim(0), 1},
                            {of_gate.stride(0), 1});
    return MatMulGradient(device(), {tokens.x, ds, column, {}}, execution);
  }

  // Adds dy_i to the rows of `output`, in an order that is fixed.
  absl::Status AddToOutput(const Tokens& tokens, const BackwardScratch& scratch,
                           const TensorView& of_output, const Execution& execution) const {
    if (device() == Device::kCpu) {
      AddToOutputCpu(tokens, scratch, of_output, execution.pool);
      return absl::OkStatus();
    }
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(KernelsOn<SpalmKernels>(runtime->target())
                        .add_to_output(ToArguments(tokens, scratch, of_output), execution.stream));
  }
  // A task has some of the channels.
  void AddToOutputCpu(const Tokens& tokens, const BackwardScratch& scratch,
                      const TensorView& of_output, ThreadPool* pool) const {
    constexpr int64_t kChannelsOfTask = 16;
    const int64_t dim = problem().model_dim(), k = retrieval().k;
    pool->ParallelForRanges(dim, kChannelsOfTask, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = 0; row < tokens.rows(); ++row) {
        const float *x = scratch.x + row * dim, *dm = scratch.z_gradient + row * dim;
        for (int64_t n = row * k; n < (row + 1) * k; ++n) {
          if (scratch.places[n] < 0) continue;
          const float weight = scratch.weights[n], score = scratch.scores[n];
          for (int64_t c = begin; c < end; ++c) {
            *of_output.MutableAt<float>(scratch.places[n], c) += weight * dm[c] + score * x[c];
          }
        }
      }
    });
  }

  Scratch LayOut(DType dtype, int64_t rows, Workspace& workspace) const {
    return {workspace.Take<float>(rows * problem().model_dim()),
            dtype == DType::kF32 ? nullptr : workspace.Take<float>(rows * retrieval().vocabulary)};
  }
  // Returns the scratch of a thread: a row of x, and the neighbours' weights.
  size_t AggregateBytes() const {
    return Workspace::Measure([this](Workspace& workspace) {
      workspace.Take<float>(problem().model_dim());
      workspace.Take<float>(retrieval().k);
    });
  }

  // Returns the row of `output` of a neighbour's token, or null where there is no neighbour.
  const float* EmbeddingOf(int32_t neighbour) const {
    if (neighbour < 0) return nullptr;
    return embeddings_.data() + values()[neighbour] * problem().model_dim();
  }

  // Computes m, into `mean`. Returns false where there is no neighbour.
  bool Average(const int32_t* neighbours, const float* x, float* weights, float* mean) const {
    const int64_t dim = problem().model_dim();
    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    bool found = false;
    for (int64_t n = 0; n < retrieval().k; ++n) {
      const float* embedding = EmbeddingOf(neighbours[n]);
      if (embedding == nullptr) continue;
      found = true;
      BestCpuKernels().matrix_vector(1, dim, embedding, dim, x, weights + n, 1, false);
      max = std::max(max, weights[n]);
    }
    if (!found) return false;
    for (int64_t n = 0; n < retrieval().k; ++n) {
      weights[n] = neighbours[n] < 0 ? 0 : std::exp(weights[n] - max);
      sum += weights[n];
    }
    std::fill_n(mean, dim, 0.0f);
    for (int64_t n = 0; n < retrieval().k; ++n) {
      const float* embedding = EmbeddingOf(neighbours[n]);
      const float weight = weights[n] / sum;
      for (int64_t c = 0; embedding != nullptr && c < dim; ++c) mean[c] += weight * embedding[c];
    }
    return true;
  }

  // Computes a row of z; returns g.
  float AggregateRow(const int32_t* neighbours, const float* x, float* weights, float* z) const {
    const int64_t dim = problem().model_dim();
    if (!Average(neighbours, x, weights, z)) {
      std::copy_n(x, dim, z);
      return 1;
    }
    float score = 0;
    BestCpuKernels().matrix_vector(1, dim, gate_.data(), dim, x, &score, 1, false);
    const float g = 1 / (1 + std::exp(-score));
    for (int64_t c = 0; c < dim; ++c) z[c] = (1 - g) * z[c] + g * x[c];
    return g;
  }

  void AggregateCpu(const Tokens& tokens, float* z, const Execution& execution) {
    constexpr int64_t kRowsOfTask = 16;
    const int64_t dim = problem().model_dim();
    const auto aggregate = [&](int64_t first, int64_t end, int worker) {
      Workspace workspace(execution.workspace.subspan(worker * AggregateBytes(), AggregateBytes()));
      float* x = workspace.Take<float>(dim);
      float* weights = workspace.Take<float>(retrieval().k);
      for (int64_t row = first; row < end; ++row) {
        const int64_t offset = tokens.x.Offset(row / tokens.x.dim(1), row % tokens.x.dim(1));
        LoadRow(tokens.x, offset, tokens.x.stride(2), dim, x);
        statistics_.mutable_data()[row] =
            AggregateRow(tokens.neighbours + row * retrieval().k, x, weights, z + row * dim);
      }
    };
    execution.pool->ParallelForRanges(tokens.rows(), kRowsOfTask, aggregate);
  }

  SpalmArguments ToArguments(const Tokens& tokens, float* z) const {
    SpalmArguments arguments = {};
    arguments.neighbours = tokens.neighbours;
    arguments.values = values();
    arguments.embeddings = embeddings_.data();
    arguments.gate = gate_.data();
    arguments.x = ToDeviceView(tokens.x);
    arguments.z = z;
    arguments.gates = statistics_.mutable_data();
    arguments.rows = tokens.rows();
    arguments.tokens = tokens.x.dim(1);
    arguments.dim = problem().model_dim();
    arguments.k = static_cast<int>(retrieval().k);
    return arguments;
  }

  absl::Status AggregateCuda(const Tokens& tokens, float* z, const Execution& execution) const {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(KernelsOn<SpalmKernels>(runtime->target())
                        .aggregate(ToArguments(tokens, z), execution.stream));
  }

  DeviceArray<float> embeddings_;  // the parameter `output`, a row a token
  DeviceArray<float> gate_;
  DeviceArray<float> statistics_;  // [rows]: g
  int64_t last_rows_ = 0;
};

// ---- The definition ----

// Computes z of a token.
std::vector<double> Gated(const std::vector<Neighbour>& neighbours, const ConstTensorView& values,
                          const DoubleTensor& output, const DoubleTensor& gate, const double* x,
                          int64_t dim) {
  std::vector<const double*> embeddings;
  std::vector<double> scores;
  for (const Neighbour& neighbour : neighbours) {
    if (neighbour.entry < 0) continue;
    embeddings.push_back(output.Row(static_cast<int64_t>(values.Get(neighbour.entry))));
    scores.push_back(Dot(embeddings.back(), x, dim));
  }
  if (embeddings.empty()) return std::vector<double>(x, x + dim);
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - max);
  const double g = 1 / (1 + std::exp(-Dot(gate.data(), x, dim)));
  std::vector<double> z;
  for (int64_t c = 0; c < dim; ++c) {
    double mean = 0;
    for (size_t n = 0; n < scores.size(); ++n) {
      mean += std::exp(scores[n] - max) / sum * embeddings[n][c];
    }
    z.push_back((1 - g) * mean + g * x[c]);
  }
  return z;
}

}  // namespace

Spalm::Spalm() : RetrievalTechnique(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Spalm::CreateLayer(const Problem& problem,
                                                          const SpalmOptions& options,
                                                          Device device, uint64_t seed) const {
  return SpalmLayer::Create(problem, options, device, seed);
}

absl::Status Spalm::DefineChecked(const Problem& problem, const SpalmOptions& options,
                                  const NamedTensors& parameters, const Inputs& inputs,
                                  const DefinitionRequest& request, NamedTensors* outputs) const {
  const DoubleTensor output(parameters.at("output").view()), x(inputs.Get("x"));
  const DoubleTensor gate(parameters.at("spalm.gate").view());
  const ConstTensorView values = parameters.at("datastore.values").view();
  const int64_t dim = problem.model_dim();
  DefineRetrieval(
      problem, options, parameters, inputs, request,
      [&](int64_t b, int64_t i, const std::vector<Neighbour>& neighbours) {
        const std::vector<double> z = Gated(neighbours, values, output, gate, x.Row(b, i), dim);
        return LogProbabilities(output, options, z.data(), dim);
      },
      outputs);
  return absl::OkStatus();
}

}  // namespace tfb::spalm
