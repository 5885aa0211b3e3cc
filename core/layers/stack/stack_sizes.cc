#include "core/layers/stack/stack_sizes.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace tfb::layers {

std::string LayerPrefix(int64_t layer) { return absl::StrCat("layer", layer, "."); }
std::string BiasPrefix(const StackSizes& sizes, int64_t layer) {
  return sizes.share_biases ? "" : LayerPrefix(layer);
}

std::vector<ParameterSpec> StackParameters(const StackSizes& sizes) {
  const int64_t width = sizes.width();
  std::vector<ParameterSpec> specs;
  const auto biases = [&](const std::string& prefix) {
    for (const char* name : {"u", "v"}) {
      specs.push_back({prefix + name, {sizes.heads, sizes.head_dim}, 0, 0.5});
    }
  };
  if (sizes.share_biases) biases("");
  for (int64_t n = 0; n < sizes.layers; ++n) {
    const std::string layer = LayerPrefix(n);
    const bool learned = sizes.learned_distances > 0;
    for (const std::string name : {"w_q", "w_k", "w_v", "w_r", "w_o"}) {
      if (learned && name == "w_r") continue;
      specs.push_back(MatrixSpec(layer + name, width, width));
    }
    if (learned) {
      // The elements of r_d W_r have this deviation.
      specs.push_back({layer + "relative_keys",
                       {sizes.learned_distances, sizes.heads, sizes.head_dim},
                       0,
                       std::sqrt(0.5)});
    }
    if (!sizes.share_biases) biases(layer);
    if (sizes.span_ramp > 0) specs.push_back({layer + "span", {sizes.heads}, 48, 16});
    AddSpecs(NormSpecs(layer + "attention_norm", width), &specs);
    for (ParameterSpec& spec : FeedForwardSpecs(layer + "ff", width, sizes.inner)) {
      if (spec.shape.size() == 1) spec.deviation = 0;  // a bias
      specs.push_back(std::move(spec));
    }
    AddSpecs(NormSpecs(layer + "ff_norm", width), &specs);
  }
  if (sizes.final_norm) AddSpecs(NormSpecs(kFinalNorm, width), &specs);
  return specs;
}

absl::Status CheckSelfAttention(absl::string_view technique, const Problem& problem) {
  const auto same = [&](absl::string_view name, int64_t value, absl::string_view other,
                        int64_t allowed) {
    if (value == allowed) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(technique, " is self-attention: ", name, " is ",
                                                   value, "; allowed is ", other, ", ", allowed));
  };
  TFB_RETURN_IF_ERROR(same("kv_tokens", problem.kv_tokens, "query_tokens", problem.query_tokens));
  TFB_RETURN_IF_ERROR(same("kv_heads", problem.kv_heads, "query_heads", problem.query_heads));
  return same("value_dim", problem.value_dim, "head_dim", problem.head_dim);
}

double StackFlops(const StackSizes& sizes, double rows, double pairs) {
  const double width = static_cast<double>(sizes.width());
  const double inner = static_cast<double>(sizes.inner);
  return 2 * static_cast<double>(sizes.layers) *
         (rows * width * (4 * width + 2 * inner) + pairs * 3 * width);
}

double StackBackwardFlops(const StackSizes& sizes, const StackBackwardWork& work) {
  // The products of matrices again, and two for the gradients of each. The pairs' three products
  // again, two of them twice, and six for gradients.
  constexpr double kOfMatrix = 3, kOfPair = (3.0 + 2 + 6) / 3;
  const double width = static_cast<double>(sizes.width());
  const double of_earlier = (work.normalizes_earlier ? kOfMatrix : kOfMatrix - 1) * 2;
  const double of_distance = sizes.learned_distances > 0 ? 0 : 1;
  return kOfMatrix * StackFlops(sizes, work.rows, 0) + kOfPair * StackFlops(sizes, 0, work.pairs) +
         2 * static_cast<double>(sizes.layers) * width * width *
             (work.earlier * of_earlier + work.distances * of_distance);
}

}  // namespace tfb::layers
