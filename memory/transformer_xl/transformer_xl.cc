#include "memory/transformer_xl/transformer_xl.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layers/stack/decoder_block.h"
#include "core/layers/stack/relative_stack.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_definition.h"
#include "core/layers/stack/stack_sizes.h"

namespace tfb::transformer_xl {
namespace {

const bool registered = RegisterTechnique<TransformerXl>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "transformer_xl";
  info.family = "memory";
  info.title = "Transformer-XL segment recurrence";
  info.citation = "Dai et al. 2019, arXiv:1901.02860v3, sections 3.2 and 3.3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kExact;
  info.budget_option = "memory";
  info.growth = 1;
  info.supports_noncausal = false;
  return info;
}

layers::RelativeStackShape ShapeWithSpans(const Problem& problem,
                                          const TransformerXlOptions& options) {
  layers::RelativeStackShape shape = layers::ShapeOf(problem, options, options.pre_norm);
  shape.sizes.span_ramp = options.span_ramp;
  return shape;
}

}  // namespace

// ---- The definition ----

absl::StatusOr<NamedTensors> DefineTransformerXl(
    const Problem& problem, const TransformerXlOptions& options, const NamedTensors& parameters,
    const ConstTensorView& x, absl::Span<const int64_t> begins, const DefinitionRequest& request,
    const ConstTensorView& memories) {
  const layers::StackSizes sizes = ShapeWithSpans(problem, options).sizes;
  TFB_RETURN_IF_ERROR(layers::CheckParameters(layers::StackParameters(sizes), parameters));
  if (problem.query_tokens > 0 && (begins.empty() || begins[0] != 0)) {
    return absl::InvalidArgumentError("the first segment does not begin at token 0");
  }
  const auto begin_of_segment = [&](int64_t p) {
    return *(std::upper_bound(begins.begin(), begins.end(), p) - 1);
  };
  const auto first_seen = [&](int64_t p) {
    const int64_t from = options.same_length ? p + 1 : begin_of_segment(p);
    return std::max<int64_t>(options.given_memory + from - options.memory, 0);
  };
  const layers::StackDefinition stack(sizes, parameters, options.max_distance, request.pool);
  NamedTensors outputs;
  for (const char* name : {"out", "context"}) outputs[name] = Tensor(DType::kF64, x.shape());
  layers::SequenceMemories::AddOutputs(layers::FinalMemories(problem, options), &outputs);
  for (int64_t b = 0; b < problem.batch; ++b) {
    const layers::SequenceMemories memory(memories, &outputs, b);
    const auto attention = [&](int64_t n, const layers::Rows& h, const layers::Rows& input) {
      memory.Keep(n, h);
      const auto read = [&](const layers::Rows& rows) {
        return options.pre_norm ? stack.AttentionNorm(n, rows) : rows;
      };
      const layers::Rows given = memory.Given(n, h.channels());
      if (request.stopped == nullptr) return stack.Attention(n, input, first_seen, read(given));
      layers::Rows list = given;
      list.Append(layers::Held(request, h));
      const layers::StackDefinition::Stopped stopped = {
          read(list), [&](int64_t p) { return options.given_memory + begin_of_segment(p); }};
      return stack.Attention(n, input, first_seen, read(given), &stopped);
    };
    layers::Rows context(0, problem.model_dim());
    const layers::Rows out =
        stack.Forward(layers::SequenceOf(x, b), options.pre_norm, attention, &context);
    layers::StoreSequence(out, b, outputs["out"].view());
    layers::StoreSequence(context, b, outputs["context"].view());
  }
  return outputs;
}

TransformerXl::TransformerXl() : TechniqueOf(Info()) {}

absl::Status TransformerXl::Check(const Problem& problem,
                                  const TransformerXlOptions& options) const {
  return layers::CheckRelativeStack("transformer_xl", problem, options);
}

absl::StatusOr<std::unique_ptr<Layer>> TransformerXl::MakeLayer(const Problem& problem,
                                                                const TransformerXlOptions& options,
                                                                Device device,
                                                                uint64_t seed) const {
  const layers::RelativeStackShape shape = ShapeWithSpans(problem, options);
  auto state = std::make_unique<layers::RelativeState>(device, problem, shape);
  const layers::RelativeState& shared = *state;
  return layers::MakeRelativeStack({std::move(state),
                                    layers::RelativeStackOutputs(problem, options),
                                    {},
                                    layers::GivenMemories(problem, options)},
                                   shared, layers::StackParameters(shape.sizes), seed,
                                   [&](const layers::LayerOfStack& layer,
                                       std::unique_ptr<layers::TransformerXlAttention> attention) {
                                     return std::make_unique<layers::DecoderBlock>(
                                         layer, options.pre_norm, std::move(attention));
                                   });
}

std::vector<TensorSpec> TransformerXl::ReadTensors(const Problem& problem,
                                                   const TransformerXlOptions& options) const {
  std::vector<TensorSpec> inputs = HiddenInputs(problem);
  for (TensorSpec& spec : layers::GivenMemories(problem, options))
    inputs.push_back(std::move(spec));
  return inputs;
}
std::vector<TensorSpec> TransformerXl::WrittenTensors(const Problem& problem,
                                                      const TransformerXlOptions& options) const {
  return layers::RelativeStackOutputs(problem, options);
}

absl::Status TransformerXl::Definition(const Problem& problem, const TransformerXlOptions& options,
                                       const NamedTensors& parameters, const Inputs& inputs,
                                       const DefinitionRequest& request,
                                       NamedTensors* outputs) const {
  std::vector<int64_t> begins;
  for (int64_t t = 0; t < problem.query_tokens; t += options.segment) begins.push_back(t);
  TFB_ASSIGN_OR_RETURN(
      *outputs, DefineTransformerXl(problem, options, parameters, inputs.Get("x"), begins, request,
                                    inputs.Get(layers::kMemories)));
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> TransformerXl::Counterpart(const Problem& problem,
                                                         const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole_past, Canonical(options));
  const int64_t tokens = std::max<int64_t>(problem.query_tokens, 1);
  TFB_ASSIGN_OR_RETURN(const auto parsed, ParseOptions<TransformerXlOptions>(options));
  whole_past["memory"] = absl::StrCat(parsed.given_memory + tokens);
  whole_past["segment"] = absl::StrCat(tokens);
  whole_past["same_length"] = "false";
  whole_past["span_ramp"] = "0";
  return TechniqueSpec{info().name, std::move(whole_past)};
}

}  // namespace tfb::transformer_xl
