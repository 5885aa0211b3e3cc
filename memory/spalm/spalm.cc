#include "memory/spalm/spalm.h"

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
#include "core/random.h"
#include "core/retrieval/retrieval_definition.h"
#include "core/status.h"
#include "core/workspace.h"
#include "memory/spalm/spalm_cuda.h"

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

 protected:
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
      : RetrievalLayer(problem, options, device) {}

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

  absl::Status AggregateCuda(const Tokens& tokens, float* z, const Execution& execution) const {
    SpalmArguments arguments = {};
    arguments.neighbours = tokens.neighbours;
    arguments.values = values();
    arguments.embeddings = embeddings_.data();
    arguments.gate = gate_.data();
    arguments.x = ToDeviceView(tokens.x);
    arguments.z = z;
    arguments.statistics = statistics_.mutable_data();
    arguments.rows = tokens.rows();
    arguments.tokens = tokens.x.dim(1);
    arguments.dim = problem().model_dim();
    arguments.k = static_cast<int>(retrieval().k);
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
    return ToStatus(
        KernelsOn<SpalmKernels>(runtime->target()).aggregate(arguments, execution.stream));
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
