#include "memory/memorizing/memorizing.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/layers/stack/decoder_layer.h"
#include "core/layers/stack/relative_stack.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/workspace.h"
#include "memory/memorizing/memorizing_definition.h"
#include "memory/memorizing/memory_store.h"

namespace tfb::memorizing {
namespace {

const bool registered = RegisterTechnique<Memorizing>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "memorizing";
  info.family = "memory";
  info.title = "Memorizing Transformer";
  info.citation = "Wu et al. 2022, arXiv:2203.08913v1, section 3";
  info.input_kind = InputKind::kHidden;
  info.exactness = Exactness::kOwn;
  info.budget_option = "store";
  info.growth = 1;
  info.supports_noncausal = false;
  return info;
}

std::string StorePrefix(const MemorizingOptions& options) {
  return absl::StrCat(layers::LayerPrefix(options.layer_with_store()), "memory.");
}

std::vector<layers::ParameterSpec> ParametersOf(const layers::StackSizes& sizes,
                                                const MemorizingOptions& options) {
  std::vector<layers::ParameterSpec> specs = layers::StackParameters(sizes);
  const std::string layer = layers::LayerPrefix(options.layer_with_store());
  const int64_t key_heads = options.one_key_value_head ? 1 : sizes.heads;
  for (layers::ParameterSpec& spec : specs) {
    if (spec.name == layer + "w_k" || spec.name == layer + "w_v") {
      spec = layers::MatrixSpec(spec.name, sizes.width(), key_heads * sizes.head_dim);
    }
  }
  if (options.store == 0) return specs;
  const std::string store = StorePrefix(options);
  const double scale = std::sqrt(static_cast<double>(sizes.head_dim));
  if (!options.joins()) specs.push_back({store + "gate", {sizes.heads}, 0, 1});
  specs.push_back({store + "scale", {sizes.heads}, scale, 1});
  for (const char* name : {"null_key", "null_value"}) {
    if (options.null_key) specs.push_back({store + name, {key_heads, sizes.head_dim}, 0, 1});
  }
  return specs;
}

// Returns the spec of the retrieved tokens of a Run, or of a segment.
std::vector<TensorSpec> RetrievedOutput(const Problem& problem, const MemorizingOptions& options,
                                        int64_t tokens) {
  if (options.store == 0) return {};
  return {{"retrieved",
           {problem.batch, problem.query_heads, tokens, options.retrieved()},
           DType::kI64,
           true}};
}

constexpr char kStoreKeys[] = "store_keys";
constexpr char kStoreValues[] = "store_values";

// Returns the specs of what the store keeps of so many tokens.
std::vector<TensorSpec> StoreSpecs(const Problem& problem, const MemorizingOptions& options,
                                   int64_t tokens, bool optional) {
  const int64_t heads = options.one_key_value_head ? 1 : problem.query_heads;
  const Shape shape = {problem.batch, heads, options.kept(tokens), problem.head_dim};
  if (shape[2] == 0) return {};
  return {{kStoreKeys, shape, problem.dtype, optional},
          {kStoreValues, shape, problem.dtype, optional}};
}

std::vector<TensorSpec> Joined(std::vector<TensorSpec> specs,
                               const std::vector<std::vector<TensorSpec>>& more) {
  for (const std::vector<TensorSpec>& each : more) {
    specs.insert(specs.end(), each.begin(), each.end());
  }
  return specs;
}

std::vector<TensorSpec> OutputsOf(const Problem& problem, const MemorizingOptions& options) {
  return Joined(
      layers::RelativeStackOutputs(problem, options),
      {StoreSpecs(problem, options, options.given_store + problem.query_tokens, /*optional=*/true),
       RetrievedOutput(problem, options, problem.query_tokens)});
}

std::vector<TensorSpec> GivenInputs(const Problem& problem, const MemorizingOptions& options) {
  return Joined(layers::GivenMemories(problem, options),
                {StoreSpecs(problem, options, options.given_store, /*optional=*/false)});
}

// ---- The layer ----

class MemorizingLayer : public layers::RelativeStackLayer {
 public:
  static absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem,
                                                       const MemorizingOptions& options,
                                                       Device device, uint64_t seed) {
    auto layer = std::unique_ptr<MemorizingLayer>(new MemorizingLayer(problem, options, device));
    TFB_RETURN_IF_ERROR(layer->Initialize(ParametersOf(layer->sizes(), options), seed));
    if (options.store > 0) {
      Problem of_store = problem;
      if (options.one_key_value_head) of_store.kv_heads = 1;
      TFB_ASSIGN_OR_RETURN(layer->store_, MemoryStore::Create(device, of_store, layer->StoreOf()));
    }
    return layer;
  }

  // Returns the cost including the products that score the store's tokens and mix the retrieved
  // ones.
  Cost cost() const override {
    double pairs = 0;
    for (int64_t begin = 0; begin < problem().query_tokens; begin += max_segment_tokens()) {
      const int64_t stored =
          std::clamp<int64_t>(options_.given_store + begin - options_.lag(), 0, options_.store);
      const int64_t tokens = std::min(max_segment_tokens(), problem().query_tokens - begin);
      pairs += static_cast<double>(tokens * (stored + std::min(stored, options_.retrieved())));
      if (options_.null_key && options_.store > 0) pairs += static_cast<double>(2 * tokens);
    }
    Cost cost = layers::RelativeStackLayer::cost();
    const double width = static_cast<double>(problem().model_dim());
    const double batch = static_cast<double>(problem().batch);
    *cost.flops += 2 * pairs * batch * width;
    if (options_.one_key_value_head) {  // the other heads have no projections
      *cost.flops -= 4 * batch * static_cast<double>(problem().query_tokens) * width *
                     (width - static_cast<double>(problem().head_dim));
    }
    return cost;
  }

  // Returns the stack's statistics and also store_entries, the entries that the next segment finds,
  // and store_bytes.
  std::map<std::string, double> statistics() const override {
    std::map<std::string, double> statistics = layers::RelativeStackLayer::statistics();
    statistics["store_bytes"] = static_cast<double>(store_.bytes());
    statistics["store_entries"] = static_cast<double>(store_.entries());
    return statistics;
  }

  // The tokens that a segment finds in the store depend on where it begins.
  int64_t split_tokens() const override {
    return options_.store > 0 ? max_segment_tokens() : layers::RelativeStackLayer::split_tokens();
  }

 protected:
  void Forget() override {
    store_.Clear();
    layers::RelativeStackLayer::Forget();
  }

  absl::Status DoSetup(const Inputs& inputs, const Execution& execution) override {
    if (options_.store > 0) {
      const std::string prefix = StorePrefix(options_);
      const auto parameter = [&](const char* name) {
        const auto found = parameters_.find(prefix + name);
        return found == parameters_.end() ? ConstTensorView() : found->second.view();
      };
      TFB_RETURN_IF_ERROR(store_.Setup(
          {parameter("gate"), parameter("scale"), parameter("null_key"), parameter("null_value")}));
    }
    return layers::RelativeStackLayer::DoSetup(inputs, execution);
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    TFB_RETURN_IF_ERROR(layers::RelativeStackLayer::DoRun(inputs, outputs, execution));
    return store_.CopyTo(outputs.Get(kStoreKeys), outputs.Get(kStoreValues), execution);
  }

  absl::Status RecallMore(const Inputs& inputs, const Execution& execution) override {
    const ConstTensorView keys = inputs.Get(kStoreKeys);
    if (keys.empty()) return absl::OkStatus();
    return store_.Recall(options_.given_store, keys, inputs.Get(kStoreValues), execution);
  }

  void BeginSegment(const Segment& segment) override {
    layers::RelativeStackLayer::BeginSegment(segment);
    retrieved_ = segment.outputs.Get("retrieved");
    if (!retrieved_.empty()) retrieved_ = Slice(retrieved_, 2, segment.begin, segment.tokens);
  }

  // Computes the attention. In the layer with the store it reads the store, and then writes it.
  absl::Status Attend(int64_t n, const ConstTensorView& x, const ConstTensorView& residual,
                      const TensorView& y, const Execution& execution) override {
    if (options_.store == 0 || n != options_.layer_with_store()) {
      return layers::RelativeStackLayer::Attend(n, x, residual, y, execution);
    }
    layers::RelativeAttention& own = attention(n);
    Workspace workspace(execution.workspace);
    const TensorView log_sum_exp = TakeLogSumExp(x.dim(1), workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    TFB_ASSIGN_OR_RETURN(const layers::RelativeAttention::Attended attended,
                         own.Attend(segment(), x, rest, log_sum_exp));
    TFB_RETURN_IF_ERROR(
        store_.Read(attended.q, attended.heads, log_sum_exp, retrieved_, attended.rest));
    // Where heads share one of keys and values, all of the layer's are copies of it.
    const int64_t key_heads = options_.one_key_value_head ? 1 : problem().query_heads;
    TFB_RETURN_IF_ERROR(store_.Append(Slice(attended.k, 1, 0, key_heads),
                                      Slice(attended.v, 1, 0, key_heads), attended.rest));
    return own.Project(attended.context, residual, y, attended.rest);
  }

  size_t layer_workspace_bytes(int threads) const override {
    const size_t store_bytes = options_.store > 0 ? store_.workspace_bytes(threads) : 0;
    const size_t of_scores = Workspace::Measure(
        [this](Workspace& workspace) { TakeLogSumExp(max_segment_tokens(), workspace); });
    return of_scores + WorkspaceWith(attention(0).workspace_bytes(threads, store_bytes), threads);
  }

 private:
  MemorizingLayer(const Problem& problem, const MemorizingOptions& options, Device device)
      : layers::RelativeStackLayer(
            problem, layers::ShapeOf(problem, options, options.pre_norm),
            {OutputsOf(problem, options), RetrievedOutput(problem, options, kSegmentTokens),
             GivenInputs(problem, options)},
            device),
        options_(options) {}

  // Returns the log-sum-exps of the layer's own scores, f32 [batch, heads, tokens]; empty where
  // they are not used.
  TensorView TakeLogSumExp(int64_t tokens, Workspace& workspace) const {
    if (!options_.joins() || options_.store == 0) return {};
    const Shape shape = {problem().batch, problem().query_heads, tokens};
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  }

  StoreShape StoreOf() const {
    StoreShape shape = {options_.store, options_.lag(), options_.retrieved(), max_segment_tokens()};
    if (options_.selection == MemorizingOptions::Selection::kBucketed) {
      shape.selection = SearchSelection::kBucketed;
    }
    shape.has_null = options_.null_key;
    shape.joins = options_.joins();
    return shape;
  }

  MemorizingOptions options_;
  MemoryStore store_;     // empty, where the option is 0
  TensorView retrieved_;  // of the segment; empty where the caller does not want it
};

}  // namespace

Memorizing::Memorizing() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Memorizing::WrittenTensors(const Problem& problem,
                                                   const MemorizingOptions& options) const {
  return OutputsOf(problem, options);
}

std::vector<TensorSpec> Memorizing::ReadTensors(const Problem& problem,
                                                const MemorizingOptions& options) const {
  return Joined(HiddenInputs(problem), {GivenInputs(problem, options)});
}

absl::Status Memorizing::Check(const Problem& problem, const MemorizingOptions& options) const {
  if (options.memory_layer >= options.layers) {
    return absl::InvalidArgumentError(absl::StrCat("option memory_layer is ", options.memory_layer,
                                                   "; allowed with layers=", options.layers,
                                                   " are -1 to ", options.layers - 1));
  }
  return layers::CheckRelativeStack("memorizing", problem, options);
}

absl::StatusOr<std::unique_ptr<Layer>> Memorizing::MakeLayer(const Problem& problem,
                                                             const MemorizingOptions& options,
                                                             Device device, uint64_t seed) const {
  return MemorizingLayer::Create(problem, options, device, seed);
}

absl::Status Memorizing::Definition(const Problem& problem, const MemorizingOptions& options,
                                    const NamedTensors& parameters, const Inputs& inputs,
                                    const DefinitionRequest& request, NamedTensors* outputs) const {
  const layers::StackSizes sizes = layers::ShapeOf(problem, options).sizes;
  TFB_RETURN_IF_ERROR(layers::CheckParameters(ParametersOf(sizes, options), parameters));
  *outputs = DefineMemorizing(problem, options, sizes, parameters, inputs, request);
  return absl::OkStatus();
}

absl::StatusOr<TechniqueSpec> Memorizing::Counterpart(const Problem& problem,
                                                      const Options& options) const {
  TFB_ASSIGN_OR_RETURN(Options whole_past, Canonical(options));
  TFB_ASSIGN_OR_RETURN(const auto parsed, ParseOptions<MemorizingOptions>(options));
  const int64_t tokens = std::max<int64_t>(problem.query_tokens, 1);
  whole_past["memory"] = absl::StrCat(parsed.given_memory + tokens);
  whole_past["segment"] = absl::StrCat(tokens);
  whole_past["same_length"] = "false";
  return TechniqueSpec{info().name, std::move(whole_past)};
}

}  // namespace tfb::memorizing
