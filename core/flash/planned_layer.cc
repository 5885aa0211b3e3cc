#include "core/flash/planned_layer.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/flash/crop.h"
#include "core/layers/copy_tensor.h"
#include "core/schedule/long_rows.h"
#include "core/status.h"

namespace tfb {
namespace {

// What is computed once in a Run is computed again in Backward, with the gradients of both operands.
constexpr double kBackwardFactor = 3;
constexpr absl::string_view kLogSumExp = "log_sum_exp";

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
    if (part.causal || !part.query_order.empty() || !rows.marked.tensor.empty()) return {};
    const Problem problem = plan.ProblemOf(rows, part, Device::kCuda);
    const std::shared_ptr<const Pattern> pattern = part.seen();
    const std::vector<int32_t> longest =
        LongRows(*pattern, BuildSchedule(problem, *pattern, FlashCudaQueries(problem.dtype)));
    if (!places.empty() && !longest.empty()) return {};
    if (places.empty()) places = longest;
  }
  if (places.empty()) return {};
  const auto shows_nothing = [&](const FlashPart& part) {
    return SeeNothing(*part.seen(), places);
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
    FlashRows& of_long = cut.emplace_back(rows);
    of_long.parts.clear();
    for (FlashPart& part : rows.parts) {
      const std::shared_ptr<const Pattern> pattern = part.seen();
      if (SeeNothing(*pattern, places)) continue;
      FlashPart& of_part = of_long.parts.emplace_back(part);
      of_part.pattern = RowsOf(pattern, places);
      of_part.query_order.tokens = places;
      part.pattern = WithoutRows(pattern, places);
    }
  }
  for (FlashRows& rows : cut) plan->rows().push_back(std::move(rows));
}

// Returns one order for all heads, or one for each key-value head, which `group` query heads share.
TokenOrder OrderOf(const PlaceOrder& order, const DeviceArray<int32_t>& tokens,
                   const Inputs& tensors, int64_t group) {
  if (!order.tensor.empty()) {
    const ConstTensorView tensor = tensors.Get(order.tensor);
    return {static_cast<const int32_t*>(tensor.data), tensor.stride(0),
            tensor.dim(1) > 1 ? tensor.stride(1) : 0, group};
  }
  if (tokens.size() == 0) return {};
  return {tokens.data(), 0, order.orders > 1 ? order.places() : 0, group};
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

// Writes the marked tokens of one sequence, and -1 behind them.
void ListMarked(const uint8_t* marks, int64_t tokens, absl::Span<int32_t> list) {
  size_t count = 0;
  for (int64_t i = 0; i < tokens && count < list.size(); ++i) {
    if (marks[i] != 0) list[count++] = static_cast<int32_t>(i);
  }
  std::fill(list.begin() + count, list.end(), -1);
}

}  // namespace

std::vector<std::string> PlannedLayer::WrittenBySteps(const FlashPlan& plan) {
  std::vector<std::string> names;
  for (const std::shared_ptr<FlashStep>& step : plan.steps()) {
    for (std::string& name : step->written_gradients()) names.push_back(std::move(name));
  }
  return names;
}

absl::StatusOr<std::unique_ptr<Layer>> PlannedLayer::Create(const Problem& problem,
                                                            std::vector<TensorSpec> inputs,
                                                            std::vector<TensorSpec> outputs,
                                                            NamedTensors parameters, Device device,
                                                            Describe describe, Fit fit) {
  TFB_ASSIGN_OR_RETURN(FlashPlan plan, describe(parameters));
  for (const FlashRows& rows : plan.rows()) {
    if (rows.heads.begin % problem.group() == 0 && rows.heads.end % problem.group() == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a softmax has the query heads ", rows.heads.begin, " to ", rows.heads.end - 1,
                     ", which are no whole groups of ", problem.group()));
  }
  std::unique_ptr<PlannedLayer> layer(new PlannedLayer(problem, std::move(inputs),
                                                       std::move(outputs), device,
                                                       std::move(describe), std::move(plan)));
  layer->sizes_ = layer->SizesOf(layer->plan_);
  layer->step_bytes_ =
      Workspace::Measure([&](Workspace& workspace) { layer->LayOut(Inputs(), &workspace); });
  layer->FindKept();
  layer->parameters_ = std::move(parameters);
  layer->fit_ = std::move(fit);
  layer->ListTerms();
  layer->parameter_gradients_ =
      ParameterGradients(layer->parameters_, WrittenBySteps(layer->plan_));
  layer->backward_bytes_ = Workspace::Measure(
      [&](Workspace& workspace) { layer->LayOutBackward(BackwardCall(), &workspace); });
  return layer;
}

void PlannedLayer::LayOut(const Inputs& inputs, Workspace* workspace) {
  for (const TensorSpec& input : this->inputs()) tensors_.Set(input.name, inputs.Get(input.name));
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) step->LayOut(workspace, &tensors_);
  marked_.resize(plan_.rows().size());
  for (size_t n = 0; n < marked_.size(); ++n) {
    const MarkedQueries& marked = plan_.rows()[n].marked;
    if (marked.tensor.empty()) continue;
    if (device_ == Device::kCpu) {
      marked_[n].queries = workspace->Take<int32_t>(problem().batch * marked.most);
    } else {
      marked_[n].rows.rows = workspace->Take<int32_t>(problem().batch * problem().query_tokens);
      marked_[n].rows.begins = workspace->Take<int32_t>(problem().batch + 1);
    }
  }
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

std::vector<PlannedLayer::Sizes> PlannedLayer::SizesOf(const FlashPlan& plan) const {
  std::vector<Sizes> all;
  for (const FlashRows& rows : plan.rows()) {
    Sizes& sizes = all.emplace_back();
    for (const FlashPart& part : rows.parts) {
      sizes.parts.push_back(plan.ProblemOf(rows, part, device_));
      sizes.has_relative_keys |= part.has_relative_keys();
      sizes.sums |= part.sums();
    }
  }
  return all;
}

Cost PlannedLayer::cost() const { return CostOf(Pass::kForward); }
Cost PlannedLayer::backward_cost() const { return CostOf(Pass::kBackward); }

Cost PlannedLayer::CostOf(Pass pass) const {
  // Backward reads what a Run reads and writes, the gradient of the output, and writes the others.
  const double times = pass == Pass::kForward ? 1 : 2;
  Cost cost;
  cost.bytes = 0;
  for (const TensorSpec& input : inputs()) {
    if (input.optional) continue;
    *cost.bytes += times * ShareRead(input) * static_cast<double>(NumElements(input.shape)) *
                   static_cast<double>(SizeOf(input.dtype));
  }
  for (const TensorSpec& output : outputs()) {
    if (!output.optional) {
      *cost.bytes += times * static_cast<double>(NumElements(output.shape) * SizeOf(output.dtype));
    }
  }
  for (const auto& [name, parameter] : parameters()) {
    *cost.bytes += times * static_cast<double>(parameter.bytes());
  }
  if (!is_set_up_ || hides_pairs_) return cost;
  double flops = 0;
  for (const Softmax& softmax : softmaxes_) {
    for (size_t n = 0; n < softmax.parts.size(); ++n) {
      const std::optional<double> of_part =
          FlopsOf(*softmax.parts[n].part, softmax.engines.engines()[n], pass);
      if (!of_part.has_value()) return cost;
      flops += *of_part;
    }
  }
  cost.flops = flops;
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    *cost.flops += pass == Pass::kForward ? step->flops() : step->backward_flops();
  }
  for (const ScoreTerm* term : terms_) {
    if (pass == Pass::kBackward) *cost.flops += term->GradientFlops(problem());
  }
  return cost;
}

std::optional<double> PlannedLayer::FlopsOf(const FlashPart& part, const FlashEngine& engine,
                                            Pass pass) const {
  const Problem& p = problem();
  const int64_t heads = engine.problem().query_heads;
  const double queries = static_cast<double>(p.batch * heads * engine.problem().query_tokens);
  std::optional<double> pairs = static_cast<double>(p.batch) * engine.schedule().KeptPairs(heads);
  double terms_of_pair = 0, of_query = 0;
  for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
    terms_of_pair += term->FlopsPerPair(p);
    of_query += term->FlopsPerQuery(p);
    if (term->decides_pairs()) pairs = term->KeptPairs();
  }
  if (!pairs.has_value()) return std::nullopt;
  if (pass == Pass::kForward) {
    const double products = 2.0 * static_cast<double>(p.head_dim + p.value_dim);
    return *pairs * (products + terms_of_pair) + queries * of_query;
  }
  // The scores again, the gradients of queries and keys; those of weights and values.
  const double products = 2.0 * static_cast<double>(3 * p.head_dim + 2 * p.value_dim);
  return *pairs * (products + kBackwardFactor * terms_of_pair) +
         queries * kBackwardFactor * of_query;
}

std::map<std::string, double> PlannedLayer::statistics() const {
  std::map<std::string, double> all;
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) all.merge(step->statistics());
  return all;
}

double PlannedLayer::ShareRead(const TensorSpec& input) const {
  bool is_query = false;
  int64_t queries = 0;
  for (const FlashRows& rows : plan_.rows()) {
    for (const FlashPart& part : rows.parts) {
      if (part.k == input.name || part.v == input.name) return 1;
    }
    if (rows.parts[0].q != input.name) continue;
    is_query = true;
    queries += rows.marked.tensor.empty()
                   ? plan_.ProblemOf(rows, rows.parts[0], device_).query_tokens
                   : rows.marked.least;
  }
  if (!is_query || queries >= problem().query_tokens) return 1;
  return static_cast<double>(queries) / static_cast<double>(problem().query_tokens);
}

absl::Status PlannedLayer::DoSetup(const Inputs& inputs, const Execution& execution) {
  if (fit_ != nullptr) TFB_RETURN_IF_ERROR(fit_(device_, inputs, execution, &parameters_));
  TFB_ASSIGN_OR_RETURN(FlashPlan plan, describe_(parameters_));
  if (SizesOf(plan) != sizes_) {
    return absl::InternalError("a plan has other sizes in Setup than when the layer was created");
  }
  plan_ = std::move(plan);
  ListTerms();
  for (ScoreTerm* term : terms_) TFB_RETURN_IF_ERROR(term->Build(problem(), execution.pool));
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->Setup(device_, inputs, execution));
  }
  if (device_ != Device::kCpu) CutLongRows(&plan_);
  marked_.resize(plan_.rows().size());
  softmaxes_.clear();
  for (const FlashRows& rows : plan_.rows()) {
    if (plan_.ProblemOf(rows, rows.parts[0], device_).query_tokens == 0) continue;
    TFB_ASSIGN_OR_RETURN(Softmax softmax, Build(rows));
    softmaxes_.push_back(std::move(softmax));
  }
  hides_pairs_ = false;
  for (const FlashRows& rows : plan_.rows()) {
    hides_pairs_ |= !rows.marked.tensor.empty();
    for (const FlashPart& part : rows.parts) hides_pairs_ |= !inputs.Get(part.mask.name).empty();
  }
  is_set_up_ = true;
  return absl::OkStatus();
}

void PlannedLayer::ListTerms() {
  terms_.clear();
  for (const FlashRows& rows : plan_.rows()) {
    for (const FlashPart& part : rows.parts) {
      for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
        if (std::find(terms_.begin(), terms_.end(), term.get()) == terms_.end()) {
          terms_.push_back(term.get());
        }
      }
    }
  }
}

ScoreRule PlannedLayer::RuleOf(const FlashRows& rows, const FlashPart& part) const {
  ScoreRule rule;
  for (const std::shared_ptr<ScoreTerm>& term : part.terms) term->AddTo(&rule);
  rule.query_position = rows.queries.begin - part.keys.begin;
  return rule;
}

absl::StatusOr<PlannedLayer::Softmax> PlannedLayer::Build(const FlashRows& rows) const {
  Softmax softmax;
  softmax.rows = &rows;
  const bool is_marked = !rows.marked.tensor.empty();
  for (const FlashPart& part : rows.parts) {
    const bool lists_some =
        !part.query_order.empty() && part.query_order.places() != rows.queries.size();
    if (lists_some && rows.parts.size() > 1) {
      return absl::InternalError("a plan lists some queries of a softmax of several parts");
    }
    const bool is_plain =
        part.query_order.empty() && part.key_order.empty() && part.pattern == nullptr;
    if (is_marked && (rows.parts.size() > 1 || !is_plain)) {
      return absl::InternalError(
          "a plan's marked queries have several parts, an order or a pattern");
    }
  }
  std::vector<FlashEngine> engines;
  for (const FlashPart& part : rows.parts) {
    const ScoreRule rule = RuleOf(rows, part);
    const Problem problem = plan_.ProblemOf(rows, part, device_);
    const bool passes_over_rows = is_marked && device_ != Device::kCpu;
    TFB_ASSIGN_OR_RETURN(FlashEngine engine,
                         passes_over_rows
                             ? FlashEngine::CreateForStream(device_, problem, rule)
                             : FlashEngine::Create(device_, problem, *part.seen(), rule));
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

// A step's tensor is in the layer's workspace, so that it may be written.
TensorView PlannedLayer::Written(const std::string& name, const FlashRows& rows,
                                 const Outputs& outputs) const {
  TensorView view = kept_.Get(name);
  if (view.empty()) view = outputs.Get(name);
  if (view.empty()) static_cast<ConstTensorView&>(view) = tensors_.Get(name);
  return Crop(view, rows);
}

FlashCall PlannedLayer::CallOf(const Softmax& softmax, size_t n, const Outputs& outputs) const {
  const Part& on_device = softmax.parts[n];
  const FlashPart& part = *on_device.part;
  const FlashRows& rows = *softmax.rows;
  const int64_t group = problem().group();
  const TokenRange kv_heads = {rows.heads.begin / group, rows.heads.end / group};
  FlashCall call = softmax.engines.engines()[n].NewCall();
  call.q = Crop(tensors_.Get(part.q), rows.heads, rows.queries);
  call.k = Crop(tensors_.Get(part.k), kv_heads, part.keys);
  call.v = Crop(tensors_.Get(part.v), kv_heads, part.keys);
  call.key_mask = Crop(tensors_.Get(part.key_mask), 1, part.keys);
  call.out = Written(rows.out, rows, outputs);
  call.out_rest = Crop(kept_rests_.Get(rows.out), rows);
  call.log_sum_exp = Written(rows.log_sum_exp, rows, outputs);
  call.log_sum_exp_rest = Crop(kept_rests_.Get(rows.log_sum_exp), rows);
  call.out_by_row = rows.out_by_place;
  call.query_order = OrderOf(part.query_order, on_device.query_order, tensors_, group);
  call.key_order = OrderOf(part.key_order, on_device.key_order, tensors_, 1);
  call.rule.tokens.causal = part.causal && part.has_tensor_order();
  call.rule.tokens.mask = MaskOf(part.mask, tensors_.Get(part.mask.name));
  for (const std::shared_ptr<ScoreTerm>& term : part.terms) {
    term->Bind(tensors_, rows.queries, part.keys, &call);
  }
  call.scale = rows.scale;
  return call;
}

FlashCall PlannedLayer::MarkedCallOf(const Softmax& softmax, const Outputs& outputs) const {
  const MarkedQueries& marked = softmax.rows->marked;
  const MarkedList& list = marked_[softmax.rows - plan_.rows().data()];
  const int64_t tokens = problem().query_tokens;
  const auto* marks = static_cast<const uint8_t*>(tensors_.Get(marked.tensor).data);
  for (int64_t b = 0; b < problem().batch; ++b) {
    ListMarked(marks + b * tokens, tokens,
               {list.queries + b * marked.most, static_cast<size_t>(marked.most)});
  }
  FlashCall call = CallOf(softmax, 0, outputs);
  call.query_order = {list.queries, marked.most, 0};
  call.rule.tokens.causal = softmax.parts[0].part->causal;
  return call;
}

absl::Status PlannedLayer::RunMarked(const Softmax& softmax, const Outputs& outputs,
                                     const Execution& execution) const {
  const FlashEngine& engine = softmax.engines.engines()[0];
  if (device_ == Device::kCpu) return engine.Run(MarkedCallOf(softmax, outputs), execution);
  const MarkedQueries& marked = softmax.rows->marked;
  MarkedList list = marked_[softmax.rows - plan_.rows().data()];
  const int64_t batch = problem().batch, tokens = problem().query_tokens;
  const auto* marks = static_cast<const uint8_t*>(tensors_.Get(marked.tensor).data);
  FlashCall call = CallOf(softmax, 0, outputs);
  list.rows.is_listed = const_cast<uint8_t*>(marks);  // which ListRows reads
  TFB_RETURN_IF_ERROR(ListRows(device_, list.rows, batch, tokens, execution));
  Band band;
  band.high = softmax.parts[0].part->causal ? 0 : std::numeric_limits<int64_t>::max() / 2;
  call.band = &band;
  call.asked = list.rows.list(batch);
  return engine.Run(call, execution);
}

void PlannedLayer::FindKept() {
  const auto keep = [&](const KeptTensor& tensor) {
    const auto is_same = [&](const KeptTensor& kept) { return kept.name == tensor.name; };
    if (tensor.name.empty()) return;
    if (std::any_of(kept_tensors_.begin(), kept_tensors_.end(), is_same)) return;
    kept_tensors_.push_back(tensor);
  };
  const Problem& p = problem();
  for (const FlashRows& rows : plan_.rows()) {
    const Shape of_layer = {p.batch, p.query_heads, p.query_tokens};
    const auto is_output = [&](const std::string& name) { return tensors_.Get(name).empty(); };
    if (!is_output(rows.out)) {
      keep({rows.out, tensors_.Get(rows.out).shape(), DType::kF32, std::nullopt});
    }
    for (const TensorSpec& output : outputs()) {
      if (output.name != rows.out || SizeOf(output.dtype) != 2) continue;
      keep({rows.out, output.shape, std::nullopt, output.dtype});
    }
    keep({rows.log_sum_exp,
          is_output(rows.log_sum_exp) ? of_layer : tensors_.Get(rows.log_sum_exp).shape(),
          DType::kF32, DType::kF32});
  }
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    for (const std::string& name : step->kept_tensors()) {
      const ConstTensorView tensor = tensors_.Get(name);
      keep({name, tensor.shape(), tensor.dtype, std::nullopt});
    }
  }
  LayOutKept({});
}

PlannedLayer::KeptViews PlannedLayer::TakeKept(const KeptTensor& kept, Workspace* workspace) {
  const auto take = [&](DType dtype) {
    const int64_t bytes = NumElements(kept.shape) * static_cast<int64_t>(SizeOf(dtype));
    return TensorView(workspace->Take<std::byte>(bytes), dtype, kept.shape);
  };
  KeptViews views;
  if (kept.values.has_value()) views.values = take(*kept.values);
  if (kept.rest.has_value()) views.rest = take(*kept.rest);
  return views;
}

void PlannedLayer::LayOutKept(absl::Span<std::byte> memory) {
  Workspace workspace(memory);
  const bool keeps = !memory.empty() || kept_bytes() == 0;  // a layer without rows keeps nothing
  for (const KeptTensor& kept : kept_tensors_) {
    const KeptViews views = keeps ? TakeKept(kept, &workspace) : KeptViews();
    kept_.Set(kept.name, views.values);
    kept_rests_.Set(kept.name, views.rest);
    const bool is_output = tensors_.Get(kept.name).empty();
    if (!is_output && !views.values.empty()) tensors_.Set(kept.name, views.values);
  }
}

absl::Status PlannedLayer::DoRun(const Inputs& inputs, const Outputs& outputs,
                                 const Execution& execution) {
  Workspace workspace(execution.workspace);
  LayOut(inputs, &workspace);
  LayOutKept(execution.kept);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->Run(tensors_, outputs, rest));
  }
  for (Softmax& softmax : softmaxes_) {
    if (!softmax.rows->marked.tensor.empty()) {
      TFB_RETURN_IF_ERROR(RunMarked(softmax, outputs, rest));
      continue;
    }
    for (size_t n = 0; n < softmax.parts.size(); ++n) {
      softmax.calls[n] = CallOf(softmax, n, outputs);
    }
    TFB_RETURN_IF_ERROR(softmax.engines.Run(softmax.calls, rest));
  }
  for (const std::shared_ptr<FlashStep>& step : plan_.steps()) {
    TFB_RETURN_IF_ERROR(step->Finish(tensors_, outputs, rest));
  }
  const TensorView kept = kept_.Get(kLogSumExp), log_sum_exp = outputs.Get(kLogSumExp);
  if (kept.empty() || log_sum_exp.empty()) return absl::OkStatus();
  return CopyTensor(device_, kept, log_sum_exp, execution);
}

}  // namespace tfb
