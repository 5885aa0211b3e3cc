#include "core/flash/planned_layer.h"

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/schedule/long_rows.h"
#include "core/status.h"

namespace tfb {
namespace {

std::shared_ptr<const Pattern> PatternOf(const FlashPart& part) {
  return part.pattern != nullptr ? part.pattern : std::make_shared<FullPattern>();
}

bool SeeNothing(const Pattern& pattern, const std::vector<int32_t>& places) {
  KeyList keys;
  for (int64_t h = 0; h < pattern.heads(); ++h) {
    for (const int32_t place : places) pattern.AddKeys(h, place, &keys);
  }
  return keys.ranges().empty();
}

// Returns the places of the queries of a softmax whose rows are long (see LongRows) in one of its
// parts, where the others show them nothing: the engine lists queries for single parts alone.
std::vector<int32_t> LongRowsOf(const FlashPlan& plan, const FlashRows& rows) {
  std::vector<int32_t> places;
  for (const FlashPart& part : rows.parts) {
    if (part.causal || !part.query_order.tokens.empty()) return {};
    const Problem problem = plan.ProblemOf(rows, part);
    const std::shared_ptr<const Pattern> pattern = PatternOf(part);
    const std::vector<int32_t> longest =
        LongRows(*pattern, BuildSchedule(problem, *pattern, FlashCudaQueries(problem.dtype)));
    if (!places.empty() && !longest.empty()) return {};
    if (places.empty()) places = longest;
  }
  if (places.empty()) return {};
  const auto shows_nothing = [&](const FlashPart& part) {
    return SeeNothing(*PatternOf(part), places);
  };
  const auto silent = std::count_if(rows.parts.begin(), rows.parts.end(), shows_nothing);
  return silent + 1 == static_cast<int64_t>(rows.parts.size()) ? places : std::vector<int32_t>();
}

// Moves the long rows of a plan's softmaxes to softmaxes of their own.
void CutLongRows(FlashPlan* plan) {
  std::vector<FlashRows> cut;
  for (FlashRows& rows : plan->rows()) {
    const std::vector<int32_t> places = LongRowsOf(*plan, rows);
    if (places.empty()) continue;
    FlashRows& of_long = cut.emplace_back(FlashRows{rows.queries, {}});
    for (FlashPart& part : rows.parts) {
      const std::shared_ptr<const Pattern> pattern = PatternOf(part);
      if (SeeNothing(*pattern, places)) continue;
      FlashPart& of_part = of_long.parts.emplace_back(part);
      of_part.pattern = RowsOf(pattern, places);
      of_part.query_order.tokens = places;
      part.pattern = WithoutRows(pattern, places);
    }
  }
  for (FlashRows& rows : cut) plan->rows().push_back(std::move(rows));
}

// A part of one order for all heads, or of one for each key-value head, which `group` query heads
// share.
TokenOrder OrderOf(const PlaceOrder& order, const DeviceArray<int32_t>& tokens, int64_t group) {
  if (tokens.size() == 0) return {};
  return {tokens.data(), 0, order.orders > 1 ? order.places() : 0, group};
}

template <class View>
View Tokens(const View& view, int axis, const TokenRange& tokens) {
  if (view.empty() || (tokens.begin == 0 && tokens.end == view.dim(axis))) return view;
  return Slice(view, axis, tokens.begin, tokens.size());
}

PairMask MaskOf(const MaskInput& mask, const ConstTensorView& view) {
  if (view.empty()) return {};
  const uint8_t* data = static_cast<const uint8_t*>(view.data);
  if (!mask.is_band) return {data, view.stride(0), view.stride(1), view.stride(2)};
  // Key i + low + c of query i is column c.
  const int64_t column = view.stride(2);
  return {data - mask.low * column,
          view.stride(0),
          view.stride(1) - column,
          column,
          mask.low,
          mask.high};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Layer>> PlannedLayer::Create(const Problem& problem,
                                                            std::vector<TensorSpec> inputs,
                                                            std::vector<TensorSpec> outputs,
                                                            NamedTensors parameters, Device device,
                                                            Describe describe) {
  TFB_ASSIGN_OR_RETURN(FlashPlan plan, describe(parameters));
  std::unique_ptr<PlannedLayer> layer(new PlannedLayer(problem, std::move(inputs),
                                                       std::move(outputs), device,
                                                       std::move(describe), std::move(plan)));
  layer->sizes_ = SizesOf(layer->plan_);
  layer->step_bytes_ =
      Workspace::Measure([&](Workspace& workspace) { layer->LayOut(Inputs(), &workspace); });
  layer->parameters_ = std::move(parameters);
  return layer;
}

void PlannedLayer::LayOut(const Inputs& inputs, Workspace* workspace) {
  for (const TensorSpec& input : this->inputs()) tensors_.Set(input.name, inputs.Get(input.name));
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) step->LayOut(workspace, &tensors_);
}

size_t PlannedLayer::workspace_bytes(int threads) const {
  size_t bytes = 0;
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    bytes = std::max(bytes, step->workspace_bytes(device_, threads));
  }
  for (const Sizes& sizes : sizes_) {
    bytes = std::max(
        bytes, FlashParts::WorkspaceBytes(device_, sizes.parts, sizes.has_relative_keys, threads));
  }
  return step_bytes_ + bytes;
}

std::vector<PlannedLayer::Sizes> PlannedLayer::SizesOf(const FlashPlan& plan) {
  std::vector<Sizes> all;
  for (const FlashRows& rows : plan.rows()) {
    Sizes& sizes = all.emplace_back();
    for (const FlashPart& part : rows.parts) {
      sizes.parts.push_back(plan.ProblemOf(rows, part));
      sizes.has_relative_keys |= part.has_relative_keys();
    }
  }
  return all;
}

Cost PlannedLayer::cost() const {
  Cost cost;
  cost.bytes = 0;
  for (const TensorSpec& input : inputs()) {
    if (input.optional) continue;
    *cost.bytes += ShareRead(input) * static_cast<double>(NumElements(input.shape)) *
                   static_cast<double>(SizeOf(input.dtype));
  }
  for (const TensorSpec& output : outputs()) {
    if (!output.optional) {
      *cost.bytes += static_cast<double>(NumElements(output.shape) * SizeOf(output.dtype));
    }
  }
  for (const auto& [name, parameter] : parameters()) {
    *cost.bytes += static_cast<double>(parameter.bytes());
  }
  if (!is_set_up_ || hides_pairs_) return cost;
  double flops = 0;
  for (const Softmax& softmax : softmaxes_) {
    for (size_t n = 0; n < softmax.parts.size(); ++n) {
      const std::optional<double> of_part =
          FlopsOf(*softmax.parts[n].part, softmax.engines.engines()[n]);
      if (!of_part.has_value()) return cost;
      flops += *of_part;
    }
  }
  cost.flops = flops;
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) *cost.flops += step->flops();
  return cost;
}

std::optional<double> PlannedLayer::FlopsOf(const FlashPart& part,
                                            const FlashEngine& engine) const {
  const Problem& p = problem();
  const double queries =
      static_cast<double>(p.batch * p.query_heads * engine.problem().query_tokens);
  std::optional<double> pairs =
      static_cast<double>(p.batch) * engine.schedule().KeptPairs(p.query_heads);
  double of_pair = 2.0 * static_cast<double>(p.head_dim + p.value_dim), of_query = 0;
  for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
    of_pair += term->FlopsPerPair(p);
    of_query += term->FlopsPerQuery(p);
    if (term->decides_pairs()) pairs = term->KeptPairs();
  }
  if (!pairs.has_value()) return std::nullopt;
  return *pairs * of_pair + queries * of_query;
}

std::map<std::string, double> PlannedLayer::statistics() const {
  std::map<std::string, double> all;
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) all.merge(step->statistics());
  return all;
}

double PlannedLayer::ShareRead(const TensorSpec& input) const {
  double queries = 0;
  for (const FlashRows& rows : plan_.rows()) {
    bool is_key = false;
    for (const FlashPart& part : rows.parts) is_key |= part.k == input.name || part.v == input.name;
    if (is_key || rows.parts[0].q != input.name) continue;
    queries += static_cast<double>(plan_.ProblemOf(rows, rows.parts[0]).query_tokens);
  }
  const double all = static_cast<double>(problem().query_tokens);
  return queries > 0 && queries < all ? queries / all : 1;
}

absl::Status PlannedLayer::DoSetup(const Inputs& inputs, const Execution& execution) {
  TFB_ASSIGN_OR_RETURN(FlashPlan plan, describe_(parameters_));
  if (SizesOf(plan) != sizes_) {
    return absl::InternalError("a plan has other sizes in Setup than when the layer was created");
  }
  plan_ = std::move(plan);
  TFB_RETURN_IF_ERROR(BuildTerms(execution.pool));
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->Setup(device_, inputs, execution));
  }
  if (device_ != Device::kCpu) CutLongRows(&plan_);
  softmaxes_.clear();
  for (const FlashRows& rows : plan_.rows()) {
    if (plan_.ProblemOf(rows, rows.parts[0]).query_tokens == 0) continue;
    TFB_ASSIGN_OR_RETURN(Softmax softmax, Build(rows));
    softmaxes_.push_back(std::move(softmax));
  }
  hides_pairs_ = false;
  for (const FlashRows& rows : plan_.rows()) {
    for (const FlashPart& part : rows.parts) hides_pairs_ |= !inputs.Get(part.mask.name).empty();
  }
  is_set_up_ = true;
  return absl::OkStatus();
}

absl::Status PlannedLayer::BuildTerms(ThreadPool* pool) {
  std::set<ScoreTerm*> terms;
  for (const FlashRows& rows : plan_.rows()) {
    for (const FlashPart& part : rows.parts) {
      for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
        if (terms.insert(term.get()).second) TFB_RETURN_IF_ERROR(term->Build(problem(), pool));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PlannedLayer::Softmax> PlannedLayer::Build(const FlashRows& rows) const {
  Softmax softmax;
  softmax.queries = rows.queries;
  for (const FlashPart& part : rows.parts) {
    const bool lists_some =
        !part.query_order.tokens.empty() && part.query_order.places() != rows.queries.size();
    if (lists_some && rows.parts.size() > 1) {
      return absl::InternalError("a plan lists some queries of a softmax of several parts");
    }
  }
  std::vector<FlashEngine> engines;
  for (const FlashPart& part : rows.parts) {
    ScoreRule rule;
    for (const std::shared_ptr<ScoreTerm>& term : part.terms) term->AddTo(&rule);
    rule.query_position = rows.queries.begin - part.keys.begin;
    TFB_ASSIGN_OR_RETURN(
        FlashEngine engine,
        FlashEngine::Create(device_, plan_.ProblemOf(rows, part), *PatternOf(part), rule));
    // A part of which no query sees anything is left out; one part remains, to write the rows.
    if (engine.schedule().runs.empty() && &part != &rows.parts[0]) continue;
    Part on_device;
    on_device.part = &part;
    TFB_ASSIGN_OR_RETURN(on_device.query_order,
                         DeviceArray<int32_t>::Create(device_, part.query_order.tokens));
    TFB_ASSIGN_OR_RETURN(on_device.key_order,
                         DeviceArray<int32_t>::Create(device_, part.key_order.tokens));
    softmax.parts.push_back(std::move(on_device));
    engines.push_back(std::move(engine));
  }
  softmax.engines = FlashParts(device_, std::move(engines));
  softmax.calls.resize(softmax.parts.size());
  return softmax;
}

FlashCall PlannedLayer::CallOf(const Softmax& softmax, size_t n, const Outputs& outputs) const {
  const Part& on_device = softmax.parts[n];
  const FlashPart& part = *on_device.part;
  FlashCall call = softmax.engines.engines()[n].NewCall();
  call.q = Tokens(tensors_.Get(part.q), 2, softmax.queries);
  call.k = Tokens(tensors_.Get(part.k), 2, part.keys);
  call.v = Tokens(tensors_.Get(part.v), 2, part.keys);
  call.key_mask = Tokens(tensors_.Get("key_mask"), 1, part.keys);
  call.out = Tokens(outputs.Get("out"), 2, softmax.queries);
  call.log_sum_exp = Tokens(outputs.Get("log_sum_exp"), 2, softmax.queries);
  call.query_order = OrderOf(part.query_order, on_device.query_order, problem().group());
  call.key_order = OrderOf(part.key_order, on_device.key_order, 1);
  call.tokens.mask = MaskOf(part.mask, tensors_.Get(part.mask.name));
  for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
    term->Bind(tensors_, softmax.queries, part.keys, &call);
  }
  call.scale = plan_.scale();
  return call;
}

absl::Status PlannedLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                 const Execution& execution) {
  Workspace workspace(execution.workspace);
  LayOut(inputs, &workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->Run(tensors_, rest));
  }
  for (Softmax& softmax : softmaxes_) {
    for (size_t n = 0; n < softmax.parts.size(); ++n) {
      softmax.calls[n] = CallOf(softmax, n, outputs);
    }
    TFB_RETURN_IF_ERROR(softmax.engines.Run(softmax.calls, rest));
  }
  return absl::OkStatus();
}

}  // namespace tfb
