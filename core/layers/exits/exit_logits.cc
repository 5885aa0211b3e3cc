#include "core/layers/exits/exit_logits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/cpu/kernels.h"
#include "core/status.h"

namespace tfb::layers {
namespace {

constexpr int64_t kLanes = 16;  // sums side by side, as many as the widest vector has lanes
static_assert(kLanes == kColumnQuantum, "rows of logits are whole lanes");

int64_t WholeLanes(int64_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

}  // namespace

absl::Status ExitLogits::Setup(const NamedTensors& parameters, int64_t layers) {
  norms_.clear();
  TFB_ASSIGN_OR_RETURN(
      output_, PackedMatrix::Create(device_, Transpose(parameters.at("output").view(), 0, 1)));
  for (int64_t n = 1; n < layers; ++n) {
    const std::string name = ExitNorm(n, layers);
    TFB_ASSIGN_OR_RETURN(LayerNorm norm, MakeLayerNorm(device_, parameters, name));
    norms_.push_back(std::move(norm));
  }
  return absl::OkStatus();
}

int64_t ExitLogits::row_floats() const {
  return device_ == Device::kCpu ? WholeLanes(vocabulary_) : vocabulary_;
}

ExitLogits::Scratch ExitLogits::LayOut(int64_t rows, Workspace& workspace) const {
  Scratch scratch;
  scratch.normalized = workspace.Take<float>(rows * width_);
  scratch.logits = workspace.Take<float>(rows * row_floats());
  return scratch;
}

size_t ExitLogits::workspace_bytes(int64_t rows, int threads) const {
  return std::max(LayerNorm::workspace_bytes(device_, width_, threads),
                  MatMulWorkspaceBytes(device_, rows, width_, vocabulary_, threads));
}

absl::Status ExitLogits::Run(const ExitRows& rows, const Scratch& scratch,
                             const Execution& execution) const {
  const TensorView normalized(scratch.normalized, DType::kF32, rows.state.shape());
  const TensorView logits(scratch.logits, DType::kF32, {rows.rows(), vocabulary_},
                          {row_floats(), 1});
  TFB_RETURN_IF_ERROR(norms_[rows.layer - 1].Run(rows.state, normalized, execution, rows.list));
  return MatMul(output_, {normalized, {}, logits, Activation::kNone, rows.list}, execution);
}

SoftmaxTop TopOf(int64_t vocabulary, float* logits) {
  const int64_t columns = WholeLanes(vocabulary);
  std::fill(logits + vocabulary, logits + columns, -std::numeric_limits<float>::infinity());
  float first[kLanes], second[kLanes];
  std::fill_n(first, kLanes, -std::numeric_limits<float>::infinity());
  std::copy_n(first, kLanes, second);
  for (int64_t v = 0; v < columns; v += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float z = logits[v + lane], low = first[lane] < z ? first[lane] : z;
      second[lane] = second[lane] < low ? low : second[lane];
      first[lane] = first[lane] < z ? z : first[lane];
    }
  }
  float largest = first[0], next = second[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) {
    next = std::max(std::max(next, second[lane]), std::min(largest, first[lane]));
    largest = std::max(largest, first[lane]);
  }
  float max = -std::numeric_limits<float>::infinity(), sum = 0, rescale = 1;
  BestCpuKernels().softmax({logits, columns, 1, columns}, {&max, &sum, &rescale}, nullptr);
  return {std::exp(next - largest), sum};
}

}  // namespace tfb::layers
