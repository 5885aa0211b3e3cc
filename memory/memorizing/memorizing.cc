#include "memory/memorizing/memorizing.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/for_each.h"
#include "core/layers/attention/position_products.h"
#include "core/layers/attention/relative_attention.h"
#include "core/layers/copy_tensor.h"
#include "core/layers/heads.h"
#include "core/layers/layer_parameters.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/decoder_block.h"
#include "core/layers/stack/relative_stack.h"
#include "core/layers/stack/segmented_layer.h"
#include "core/layers/stack/stack_sizes.h"
#include "core/workspace.h"
#include "memory/memorizing/memorizing_definition.h"
#include "memory/memorizing/memory_store.h"
#include "memory/memorizing/store_reading.h"

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

// Returns the FLOPs beside Transformer-XL's: the products that score the store's tokens and mix the
// retrieved ones, less those of the projections that heads do without. A Backward scores and mixes
// what was retrieved again, with two products for gradients.
layers::RelativeState::MoreFlops MoreFlops(const Problem& problem,
                                           const MemorizingOptions& options) {
  const int64_t longest = layers::LongestSegment(problem, options.segment);
  double pairs = 0, read = 0;
  for (int64_t begin = 0; begin < problem.query_tokens; begin += longest) {
    const int64_t stored =
        std::clamp<int64_t>(options.given_store + begin - options.lag(), 0, options.store);
    const int64_t tokens = std::min(longest, problem.query_tokens - begin);
    pairs += static_cast<double>(tokens * (stored + std::min(stored, options.retrieved())));
    read += static_cast<double>(tokens * std::min(stored, options.retrieved()));
    if (!options.null_key || options.store == 0) continue;
    pairs += static_cast<double>(2 * tokens);
    read += static_cast<double>(tokens);
  }
  const double width = static_cast<double>(problem.model_dim());
  const double batch = static_cast<double>(problem.batch);
  double projections = 0;
  if (options.one_key_value_head) {
    projections = 4 * batch * static_cast<double>(problem.query_tokens) * width *
                  (width - static_cast<double>(problem.head_dim));
  }
  return {2 * pairs * batch * width - projections, 8 * read * batch * width - 3 * projections};
}

// ---- The layer ----

// The attention of the layer with the store, which it reads, and then writes.
class MemorizingAttention : public layers::SegmentAttention {
 public:
  static absl::StatusOr<std::unique_ptr<layers::SegmentAttention>> Create(
      Device device, const Problem& problem, const MemorizingOptions& options,
      std::unique_ptr<layers::TransformerXlAttention> base) {
    std::unique_ptr<MemorizingAttention> attention(
        new MemorizingAttention(problem, options, std::move(base)));
    if (options.store == 0) return attention;
    Problem of_store = problem;
    of_store.kv_heads = attention->key_heads();
    attention->reading_ = StoreReading(device, of_store, attention->StoreOf(), options.given_store,
                                       options.kept(options.given_store));
    TFB_ASSIGN_OR_RETURN(attention->store_,
                         MemoryStore::Create(device, of_store, attention->StoreOf()));
    return attention;
  }

  absl::Status Setup(const NamedTensors& parameters, const layers::Distances& distances,
                     const Execution& execution) override {
    if (options_.store > 0) {
      TFB_RETURN_IF_ERROR(store_.Setup(ParametersOfStore(parameters)));
    }
    return base_->Setup(parameters, distances, execution);
  }

  void Reset() override {
    store_.Clear();
    base_->Reset();
  }

  absl::Status Recall(const Inputs& given, const LayerNorm* norm,
                      const Execution& execution) override {
    TFB_RETURN_IF_ERROR(base_->Recall(given, norm, execution));
    const ConstTensorView keys = given.Get(kStoreKeys);
    if (keys.empty()) return absl::OkStatus();
    return store_.Recall(options_.given_store, keys, given.Get(kStoreValues), execution);
  }

  absl::Status Run(const Call& call, const Execution& execution) override {
    if (options_.store == 0) return base_->Run(call, execution);
    Workspace workspace(execution.workspace);
    const TensorView log_sum_exp = TakeLogSumExp(call.segment.tokens, workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    TFB_ASSIGN_OR_RETURN(const layers::RelativeAttention::Attended attended,
                         base_->own().Attend(base_->segment(), call.x, rest, log_sum_exp));
    // Where heads share one of keys and values, all of the layer's are copies of it.
    const TensorView k = Slice(attended.k, 1, 0, key_heads());
    const TensorView v = Slice(attended.v, 1, 0, key_heads());
    TFB_RETURN_IF_ERROR(Read(call, attended, log_sum_exp));
    if (!call.kept.empty()) {
      const StoreReading::Kept kept = KeptIn(call.kept);
      const int64_t begin = call.segment.begin;
      if (begin == 0) TFB_RETURN_IF_ERROR(reading_.KeepGiven(kept, store_, attended.rest));
      TFB_RETURN_IF_ERROR(reading_.Keep(kept, begin, k, v, attended.rest));
    }
    TFB_RETURN_IF_ERROR(store_.Append(k, v, attended.rest));
    return base_->own().Project(attended.context, call.residual, call.y, attended.rest);
  }

  absl::Status KeepState(const Inputs&, const Outputs& outputs,
                         const Execution& execution) const override {
    return store_.CopyTo(outputs.Get(kStoreKeys), outputs.Get(kStoreValues), execution);
  }

  size_t workspace_bytes(int threads) const override {
    const size_t of_store = options_.store > 0 ? store_.workspace_bytes(threads) : 0;
    const size_t of_scores = Workspace::Measure([this](Workspace& workspace) {
      TakeLogSumExp(layers::LongestSegment(problem_, options_.segment), workspace);
    });
    return of_scores + base_->own().workspace_bytes(threads, of_store);
  }

  absl::Status CheckBackward() const override { return base_->CheckBackward(); }

  absl::Status SetUpBackward(const NamedTensors& parameters,
                             const layers::Distances& distances) override {
    if (options_.store > 0) TFB_RETURN_IF_ERROR(reading_.SetUp(ParametersOfStore(parameters)));
    return base_->SetUpBackward(parameters, distances);
  }

  size_t kept_bytes() const override { return options_.store > 0 ? reading_.kept_bytes() : 0; }

  size_t sums_bytes() const override {
    if (options_.store == 0) return base_->sums_bytes();
    return base_->sums_bytes() +
           Workspace::Measure([this](Workspace& workspace) { reading_.LayOutSums(workspace); });
  }

  size_t again_bytes() const override {
    if (options_.store == 0) return base_->again_bytes();
    return base_->again_bytes() + Workspace::Measure([this](Workspace& workspace) {
             TakeRows(layers::LongestSegment(problem_, options_.segment), workspace);
           });
  }

  size_t backward_workspace_bytes(int threads) const override {
    if (options_.store == 0) return base_->backward_workspace_bytes(threads);
    const size_t scratch = Workspace::Measure([this](Workspace& workspace) {
      LayOutBackward(layers::LongestSegment(problem_, options_.segment), workspace);
    });
    return scratch + std::max(base_->backward_workspace_bytes(threads), reading_.workspace_bytes());
  }

  absl::Status RunAgain(const AgainCall& call, const Execution& execution) override {
    if (options_.store == 0) return base_->RunAgain(call, execution);
    const layers::ListAttention& past = base_->past();
    const Again again = LayOutAgain(call.segment, execution.kept);
    const auto earlier = base_->EarlierThan(call.segment);
    TFB_RETURN_IF_ERROR(past.Attend(base_->ListOf(call.segment, earlier, call.norm, call.x),
                                    again.attended, execution));
    const StoreReading::Kept kept = KeptIn(call.segment.kept);
    TFB_RETURN_IF_ERROR(reading_.Mix(SegmentOf(call.segment, kept, again.attended),
                                     OfHeads(again.mixed), execution));
    return past.Project(again.mixed, call.residual, call.y, execution);
  }

  absl::Status Backward(const BackwardCall& call, const Execution& execution) override {
    if (options_.store == 0) return base_->Backward(call, execution);
    const layers::ListAttention& past = base_->past();
    const Again again = LayOutAgain(call.segment, execution.kept);
    Workspace workspace(execution.workspace), of_sums(call.segment.sums);
    const BackwardScratch scratch = LayOutBackward(call.segment.tokens, workspace);
    of_sums.Take<std::byte>(static_cast<int64_t>(base_->sums_bytes()));
    const StoreReading::Sums sums = reading_.LayOutSums(of_sums);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const layers::ListAttention::Gradients gradients = base_->GradientsOf(call);
    TFB_RETURN_IF_ERROR(
        past.ProjectBackward(again.mixed, call.dy, scratch.of_context, gradients, rest));
    const StoreReading::Kept kept = KeptIn(call.segment.kept);
    const TensorView of_heads = OfHeads(scratch.of_context);
    TFB_RETURN_IF_ERROR(reading_.Backward(
        SegmentOf(call.segment, kept, again.attended),
        {of_heads, of_heads, OfHeads(scratch.of_queries), scratch.of_log_sum_exp, sums}, rest));
    if (call.segment.is_last()) {
      TFB_RETURN_IF_ERROR(AddSums(sums, call.segment.parameter_gradients, rest));
    }
    const auto earlier = base_->EarlierThan(call.segment);
    return past.Backward(
        base_->ListOf(call.segment, earlier, call.norm, call.x), again.attended,
        {scratch.of_context, scratch.of_log_sum_exp, scratch.of_queries, call.added, call.dx},
        gradients, rest);
  }

  // Returns the base's, and store_entries, the entries that the next segment finds, and
  // store_bytes.
  std::map<std::string, double> statistics() const override {
    std::map<std::string, double> statistics = base_->statistics();
    statistics["store_bytes"] = static_cast<double>(store_.bytes());
    statistics["store_entries"] = static_cast<double>(store_.entries());
    return statistics;
  }

 private:
  MemorizingAttention(const Problem& problem, const MemorizingOptions& options,
                      std::unique_ptr<layers::TransformerXlAttention> base)
      : problem_(problem),
        options_(options),
        base_(std::move(base)),
        names_(StorePrefix(options)) {}

  // Reads the store, and of a Run that a Backward follows notes what was read.
  absl::Status Read(const Call& call, const layers::RelativeAttention::Attended& attended,
                    const TensorView& log_sum_exp) {
    const TensorView output = call.segment.Output("retrieved", 2);
    TensorView retrieved = output;
    if (!call.kept.empty()) {
      retrieved = Slice(KeptIn(call.kept).retrieved, 2, call.segment.begin, call.segment.tokens);
    }
    TFB_RETURN_IF_ERROR(
        store_.Read(attended.q, attended.heads, log_sum_exp, retrieved, attended.rest));
    if (call.kept.empty() || output.empty()) return absl::OkStatus();
    return reading_.CopyRetrieved(retrieved, output, attended.rest);
  }

  // ---- The backward pass ----

  // The names of the parameters of the store.
  struct Names {
    explicit Names(const std::string& prefix)
        : gate(prefix + "gate"),
          scale(prefix + "scale"),
          null_key(prefix + "null_key"),
          null_value(prefix + "null_value") {}
    std::string gate, scale, null_key, null_value;
  };
  MemoryStore::Parameters ParametersOfStore(const NamedTensors& parameters) const {
    const auto parameter = [&](const std::string& name) {
      return layers::FindParameter(parameters, name);
    };
    return {parameter(names_.gate), parameter(names_.scale), parameter(names_.null_key),
            parameter(names_.null_value)};
  }
  StoreReading::Kept KeptIn(absl::Span<std::byte> memory) const {
    Workspace workspace(memory);
    return reading_.LayOutKept(workspace);
  }
  TensorView TakeRows(int64_t tokens, Workspace& workspace) const {
    const Shape shape = {problem_.batch, tokens, problem_.model_dim()};
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  }
  TensorView OfHeads(const TensorView& rows) const { return Heads(rows, problem_.query_heads); }
  // A segment between RunAgain and Backward.
  struct Again {
    layers::ListAttention::Memory attended;  // by the layer's own attention
    TensorView mixed;                        // with what the store gives: the input of W_o
  };
  Again LayOutAgain(const layers::PastSegment& segment, absl::Span<std::byte> memory) const {
    Workspace rest(memory.subspan(base_->again_bytes()));
    return {base_->MemoryOf(segment, memory), TakeRows(segment.tokens, rest)};
  }
  struct BackwardScratch {
    TensorView of_context;  // the gradient of what the heads give, and then of the local part of it
    TensorView of_queries;
    TensorView of_log_sum_exp;  // empty where the softmax is not joint
  };
  BackwardScratch LayOutBackward(int64_t tokens, Workspace& workspace) const {
    BackwardScratch scratch;
    scratch.of_context = TakeRows(tokens, workspace);
    scratch.of_queries = TakeRows(tokens, workspace);
    scratch.of_log_sum_exp = TakeLogSumExp(tokens, workspace);
    return scratch;
  }
  StoreReading::Segment SegmentOf(const layers::PastSegment& segment,
                                  const StoreReading::Kept& kept,
                                  const layers::ListAttention::Memory& attended) const {
    return {kept, segment.begin, OfHeads(attended.q), OfHeads(attended.context),
            attended.log_sum_exp};
  }
  absl::Status AddSums(const StoreReading::Sums& sums, const Outputs& gradients,
                       const Execution& execution) const {
    const auto add = [&](const std::string& name, const double* from) -> absl::Status {
      const TensorRows to(gradients.Get(name));
      const layers::AddDoubleRows rows = {from, to.columns(), to.view()};
      return ForEachInRows(base_->device(), to.rows(), to.columns(), rows, execution);
    };
    TFB_RETURN_IF_ERROR(add(names_.gate, sums.gate));
    TFB_RETURN_IF_ERROR(add(names_.scale, sums.scale));
    TFB_RETURN_IF_ERROR(add(names_.null_key, sums.null_key));
    return add(names_.null_value, sums.null_value);
  }

  // Returns the log-sum-exps of the layer's own scores, f32 [batch, heads, tokens]; empty where
  // they are not used.
  TensorView TakeLogSumExp(int64_t tokens, Workspace& workspace) const {
    if (!options_.joins() || options_.store == 0) return {};
    const Shape shape = {problem_.batch, problem_.query_heads, tokens};
    return TensorView(workspace.Take<float>(NumElements(shape)), DType::kF32, shape);
  }

  int64_t key_heads() const { return options_.one_key_value_head ? 1 : problem_.query_heads; }

  StoreShape StoreOf() const {
    StoreShape shape = {options_.store, options_.lag(), options_.retrieved(),
                        layers::LongestSegment(problem_, options_.segment)};
    if (options_.selection == MemorizingOptions::Selection::kBucketed) {
      shape.selection = SearchSelection::kBucketed;
    }
    shape.has_null = options_.null_key;
    shape.joins = options_.joins();
    return shape;
  }

  Problem problem_;
  MemorizingOptions options_;
  std::unique_ptr<layers::TransformerXlAttention> base_;
  MemoryStore store_;  // empty, where the option is 0
  StoreReading reading_;
  Names names_;
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
  const layers::RelativeStackShape shape = layers::ShapeOf(problem, options, options.pre_norm);
  auto state =
      std::make_unique<layers::RelativeState>(device, problem, shape, MoreFlops(problem, options));
  const layers::RelativeState& shared = *state;
  return layers::MakeRelativeStack(
      {std::move(state), OutputsOf(problem, options),
       RetrievedOutput(problem, options, kSegmentTokens), GivenInputs(problem, options),
       // The tokens that a segment finds in the store depend on where it begins.
       /*depends_on_split=*/options.store > 0},
      shared, ParametersOf(shape.sizes, options), seed,
      [&](const layers::LayerOfStack& layer, std::unique_ptr<layers::TransformerXlAttention> base)
          -> absl::StatusOr<std::unique_ptr<layers::Block>> {
        std::unique_ptr<layers::SegmentAttention> attention;
        if (layer.n == options.layer_with_store()) {
          TFB_ASSIGN_OR_RETURN(
              attention, MemorizingAttention::Create(device, problem, options, std::move(base)));
        } else {
          attention = std::move(base);
        }
        return std::make_unique<layers::DecoderBlock>(layer, options.pre_norm,
                                                      std::move(attention));
      });
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
