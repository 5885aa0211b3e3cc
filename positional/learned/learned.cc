#include "positional/learned/learned.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/layers/attention/encoded_attention.h"
#include "core/status.h"

namespace tfb::learned {
namespace {

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "learned";
  info.family = "positional";
  info.title = "Learned absolute position encoding";
  info.citation =
      "Gehring et al. 2017, arXiv:1705.03122v3; Al-Rfou et al. 2019, arXiv:1808.04444v2";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.self_attention = true;
  return info;
}

layers::EncodedAttentionPlan PlanOf(const Problem& problem, const LearnedOptions& options) {
  layers::EncodedAttentionPlan plan;
  plan.inner = options.inner;
  plan.bias = options.bias;
  plan.recompute = options.recompute;
  plan.applications = options.layers;
  plan.rows_added = options.tables() * problem.query_tokens;
  plan.positions_parameter = "p";
  plan.first_position = options.position_offset;
  return plan;
}

// Returns the rows of the problem's tokens.
absl::StatusOr<layers::Encodings> RowsOfTokens(const Problem& problem,
                                               const LearnedOptions& options,
                                               const NamedTensors& parameters) {
  const ConstTensorView rows = Slice(ConstTensorView(parameters.at("p").view()), 1,
                                     options.position_offset, problem.query_tokens);
  layers::Encodings encodings;
  TFB_ASSIGN_OR_RETURN(encodings.positions, Tensor::Allocate(DType::kF32, rows.shape()));
  CopyElements(rows, encodings.positions.view());
  return encodings;
}

class Learned : public TechniqueOf<LearnedOptions> {
 public:
  Learned() : TechniqueOf(Info()) {}

  absl::StatusOr<TechniqueSpec> Counterpart(const Problem& problem,
                                            const Options& options) const override {
    return layers::WithCounterpartInside<LearnedOptions>(*this, problem, options);
  }

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const LearnedOptions& options) const override {
    return layers::EncodedAttentionInputs(problem, PlanOf(problem, options));
  }

  absl::Status Check(const Problem& problem, const LearnedOptions& options) const override {
    if (options.position_offset + problem.query_tokens <= options.max_tokens) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "positions up to ", options.position_offset + problem.query_tokens - 1,
        " are beyond the table: with position_offset ", options.position_offset, ", tokens are ",
        problem.query_tokens, "; allowed by max_tokens ", options.max_tokens, " are at most ",
        std::max<int64_t>(options.max_tokens - options.position_offset, 0)));
  }

  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const LearnedOptions& options, Device device,
                                                   uint64_t seed) const override {
    const layers::ParameterSpec tables = {
        "p", {options.tables(), options.max_tokens, problem.model_dim()}, 0, 0.02};
    const auto encode = [=](const NamedTensors& parameters) {
      return RowsOfTokens(problem, options, parameters);
    };
    return layers::CreateEncodedAttention(problem, PlanOf(problem, options), {tables}, encode,
                                          device, seed);
  }

  absl::Status Definition(const Problem& problem, const LearnedOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const DoubleTensor tables(parameters.at("p").view());
    const auto encoding = [&](int64_t n, int64_t p, int64_t c) {
      if (n > 0 && !options.per_layer) return 0.0;
      return tables.Row(n, options.position_offset + p)[c];
    };
    return layers::DefineEncodedAttention(problem, PlanOf(problem, options), encoding, parameters,
                                          inputs, request, outputs);
  }
};

const bool registered = RegisterTechnique<Learned>();

}  // namespace
}  // namespace tfb::learned
