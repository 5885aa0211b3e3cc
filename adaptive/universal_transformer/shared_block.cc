#include "adaptive/universal_transformer/shared_block.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "adaptive/universal_transformer/universal_transformer_functors.h"
#include "core/cuda/for_each.h"
#include "core/status.h"

namespace tfb::universal_transformer {
namespace {

// Returns rows of T [steps, width] times the matrices side by side, in double, [steps, columns].
std::vector<float> TimesProjected(const Tensor& times,
                                  const std::vector<ConstTensorView>& matrices) {
  std::vector<float> rows;
  for (int64_t n = 0; n < times.dim(0); ++n) {
    for (const ConstTensorView& matrix : matrices) {
      std::vector<double> sums(static_cast<size_t>(matrix.dim(1)));
      for (int64_t k = 0; k < matrix.dim(0); ++k) {
        const double time = *times.view().At<float>(n, k);
        for (int64_t c = 0; c < matrix.dim(1); ++c) sums[c] += time * *matrix.At<float>(k, c);
      }
      rows.insert(rows.end(), sums.begin(), sums.end());
    }
  }
  return rows;
}

// Sums in several accumulators, so that an addition does not wait for the previous one.
float Dot(const float* a, const float* b, int64_t size) {
  constexpr int64_t kLanes = 16;
  float part[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= size; c += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) part[lane] += a[c + lane] * b[c + lane];
  }
  for (; c < size; ++c) part[0] += a[c] * b[c];
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
  }
  return part[0];
}

}  // namespace

float SharedBlock::HaltingProbability(const float* state, int64_t width) const {
  const float logit = Dot(halting_weight.data(), state, width) + halting_bias.data()[0];
  return 1 / (1 + std::exp(-logit));
}

StepsKept StepsKept::LayOut(const UniversalSizes& sizes, const UniversalTransformerOptions& options,
                            Workspace& workspace) {
  StepsKept kept;
  kept.states = workspace.Take<float>(options.steps * sizes.rows * sizes.width);
  kept.stop = workspace.Take<int32_t>(sizes.rows);
  kept.computed = workspace.Take<int32_t>(sizes.rows);
  if (options.halts()) kept.takes_remainder = workspace.Take<uint8_t>(sizes.rows);
  if (options.convolves()) {
    kept.shown = workspace.Take<float>(sizes.rows * sizes.width);
    kept.shown_inner = workspace.Take<float>(sizes.rows * sizes.inner);
  }
  return kept;
}

absl::Status StepsKept::KeepShown(Device device, const UniversalSizes& sizes, const float* from,
                                  const float* inner_from, const Execution& execution) const {
  if (shown == nullptr) return absl::OkStatus();
  TFB_RETURN_IF_ERROR(ForEachInRows(device, sizes.rows, sizes.width,
                                    KeepRowsOfTokens{stop, from, shown, sizes.width}, execution));
  return ForEachInRows(device, sizes.rows, sizes.inner,
                       KeepRowsOfTokens{stop, inner_from, shown_inner, sizes.inner}, execution);
}

UniversalSizes::UniversalSizes(const Problem& problem, const UniversalTransformerOptions& options)
    : rows(problem.batch * problem.query_tokens),
      width(problem.model_dim()),
      query_width(problem.query_heads * problem.head_dim),
      key_width(problem.kv_heads * problem.head_dim),
      value_width(problem.kv_heads * problem.value_dim),
      context_width(problem.query_heads * problem.value_dim),
      inner(FeedForwardDim(options.feed_forward_dim, problem.model_dim())) {}

absl::StatusOr<SharedBlock> SharedBlock::Create(Device device, const Problem& problem,
                                                const UniversalTransformerOptions& options,
                                                const NamedTensors& parameters) {
  const auto parameter = [&](const std::string& name) {
    return layers::FindParameter(parameters, name);
  };
  const auto floats = [&](const std::string& name) -> absl::StatusOr<DeviceArray<float>> {
    if (parameter(name).empty()) return DeviceArray<float>();
    return CopyFloats(device, parameter(name));
  };
  SharedBlock block;
  const ConstTensorView w_q = parameter("attention.w_q"), w_k = parameter("attention.w_k"),
                        w_v = parameter("attention.w_v");
  TFB_ASSIGN_OR_RETURN(block.queries,
                       PackedMatrix::Create(device, w_q, parameter("attention.b_q")));
  std::vector<float> biases;
  for (const char* name : {"attention.b_k", "attention.b_v"}) {
    const ConstTensorView bias = parameter(name);
    for (int64_t c = 0; !bias.empty() && c < bias.dim(0); ++c) biases.push_back(*bias.At<float>(c));
  }
  const ConstTensorView bias(biases.data(), DType::kF32, {static_cast<int64_t>(biases.size())});
  TFB_ASSIGN_OR_RETURN(block.keys_values,
                       PackedMatrix::Create(device, std::vector<ConstTensorView>{w_k, w_v},
                                            biases.empty() ? ConstTensorView() : bias));
  TFB_ASSIGN_OR_RETURN(block.output, PackedMatrix::Create(device, parameter("attention.w_o"),
                                                          parameter("attention.b_o")));
  TFB_ASSIGN_OR_RETURN(block.attention_norm,
                       layers::MakeLayerNorm(device, parameters, "attention_norm"));
  TFB_ASSIGN_OR_RETURN(block.first_kernel, floats("ff.k1"));
  TFB_ASSIGN_OR_RETURN(block.first,
                       PackedMatrix::Create(device, parameter("ff.w1"), parameter("ff.b1")));
  TFB_ASSIGN_OR_RETURN(block.second_kernel, floats("ff.k2"));
  TFB_ASSIGN_OR_RETURN(block.second,
                       PackedMatrix::Create(device, parameter("ff.w2"), parameter("ff.b2")));
  TFB_ASSIGN_OR_RETURN(block.transition_norm, layers::MakeLayerNorm(device, parameters, "ff_norm"));
  TFB_ASSIGN_OR_RETURN(block.halting_weight, floats("halting.w"));
  TFB_ASSIGN_OR_RETURN(block.halting_bias, floats("halting.b"));

  TFB_ASSIGN_OR_RETURN(const layers::Encodings encodings,
                       layers::PositionsAndTimes(options.encoding, problem.query_tokens,
                                                 options.steps, problem.model_dim(), parameters));
  TFB_ASSIGN_OR_RETURN(block.positions, CopyFloats(device, encodings.positions.view()));
  TFB_ASSIGN_OR_RETURN(block.times, CopyFloats(device, encodings.times.view()));
  TFB_ASSIGN_OR_RETURN(
      block.projected_times,
      DeviceArray<float>::Create(device, TimesProjected(encodings.times, {w_q, w_k, w_v})));
  return block;
}

}  // namespace tfb::universal_transformer
