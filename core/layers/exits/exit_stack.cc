#include "core/layers/exits/exit_stack.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/runtime.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/rows_of.h"
#include "core/status.h"

namespace tfb::layers {
namespace {

constexpr int64_t kRowsOfTask = 64;  // of copies

// Calls body(row) for each row.
template <class Body>
void ForEachRow(int64_t rows, ThreadPool* pool, const Body& body) {
  pool->ParallelFor((rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task, int) {
    const int64_t end = std::min((task + 1) * kRowsOfTask, rows);
    for (int64_t row = task * kRowsOfTask; row < end; ++row) body(row);
  });
}

// Returns the tokens begin, ..., begin + count - 1; empty where there is no tensor.
template <class View>
View Tokens(const View& view, int64_t begin, int64_t count) {
  return view.empty() ? view : Slice(view, 1, begin, count);
}

std::vector<TensorSpec> Joined(std::vector<TensorSpec> specs, const std::vector<TensorSpec>& more) {
  specs.insert(specs.end(), more.begin(), more.end());
  return specs;
}

DeviceExits ToDeviceExits(const ConstTensorView& view) {
  if (view.empty()) return {};
  return {static_cast<int32_t*>(const_cast<void*>(view.data)), view.stride(0), view.stride(1)};
}

}  // namespace

std::string ExitPrefix(int64_t n) { return absl::StrCat("exit", n); }
std::string ExitNorm(int64_t n, int64_t layers) {
  return n == layers ? "final_norm" : ExitPrefix(n - 1) + ".norm";
}

std::vector<ParameterSpec> ExitStackParameters(const StackSizes& sizes) {
  std::vector<ParameterSpec> specs = StackParameters(sizes);
  for (int64_t n = 1; n <= sizes.layers; ++n) {
    AddSpecs(NormSpecs(ExitNorm(n, sizes.layers), sizes.width()), &specs);
  }
  return specs;
}

TensorSpec ExitsSpec(const Problem& problem, int64_t tokens) {
  return {kExits, {problem.batch, tokens}, DType::kI32, true};
}
TensorSpec ExitProbabilitiesSpec(const Problem& problem, int64_t layers, int64_t tokens) {
  return {kExitProbabilities, {problem.batch, tokens, layers}, DType::kF32, true};
}
std::vector<TensorSpec> ExitStackInputs(const Problem& problem, const ExitStackOptions& options) {
  return Joined({HiddenInputs(problem)[0], ExitsSpec(problem, problem.query_tokens)},
                GivenMemories(problem, options));
}
std::vector<TensorSpec> ExitStackOutputs(const Problem& problem, const ExitStackOptions& options,
                                         bool has_probabilities) {
  std::vector<TensorSpec> outputs = {HiddenOutputs(problem)[0],
                                     ExitsSpec(problem, problem.query_tokens)};
  if (has_probabilities) {
    outputs.push_back(ExitProbabilitiesSpec(problem, options.layers, problem.query_tokens));
  }
  return Joined(std::move(outputs), FinalMemories(problem, options));
}
std::vector<TensorSpec> ExitStackLayer::SegmentInputs(const Problem& problem,
                                                      const ExitStackOptions& options) {
  return Joined({ExitsSpec(problem, kSegmentTokens)}, GivenMemories(problem, options));
}
std::vector<TensorSpec> ExitStackLayer::SegmentOutputs(const Problem& problem,
                                                       const ExitStackOptions& options,
                                                       bool has_probabilities) {
  std::vector<TensorSpec> outputs = {ExitsSpec(problem, kSegmentTokens)};
  if (has_probabilities) {
    outputs.push_back(ExitProbabilitiesSpec(problem, options.layers, kSegmentTokens));
  }
  return outputs;
}

RelativeStackShape ExitStackLayer::ShapeFor(const Problem& problem, const ExitStackOptions& options,
                                            Device device) {
  RelativeStackShape shape = ShapeOf(problem, options, options.pre_norm);
  if (device == Device::kCpu) shape.queries = RelativeAttention::Queries::kSome;
  return shape;
}

absl::StatusOr<std::unique_ptr<Layer>> ExitStackLayer::Create(
    const Problem& problem, const ExitStackOptions& options, Device device, uint64_t seed,
    std::unique_ptr<ExitRule> rule, const std::vector<ParameterSpec>& of_rule) {
  auto layer = std::unique_ptr<ExitStackLayer>(
      new ExitStackLayer(problem, options, device, std::move(rule)));
  std::vector<ParameterSpec> specs = ExitStackParameters(layer->sizes());
  AddSpecs(of_rule, &specs);
  TFB_RETURN_IF_ERROR(layer->Initialize(specs, seed));
  if (device == Device::kCpu) {
    layer->active_.reserve(layer->max_rows());
    layer->leaving_.reserve(layer->max_rows());
    layer->row_of_token_.resize(layer->max_rows());
  } else {
    const int64_t rows = layer->max_rows();
    TFB_ASSIGN_OR_RETURN(layer->stays_, DeviceArray<uint8_t>::Allocate(device, rows));
    TFB_ASSIGN_OR_RETURN(layer->listed_, DeviceArray<int32_t>::Allocate(device, rows));
    TFB_ASSIGN_OR_RETURN(layer->list_begins_,
                         DeviceArray<int32_t>::Allocate(device, problem.batch + 1));
  }
  TFB_ASSIGN_OR_RETURN(layer->recorded_,
                       DeviceArray<int32_t>::Create(
                           device, std::vector<int32_t>(problem.batch * problem.query_tokens, 0)));
  return layer;
}

absl::Status ExitStackLayer::DoSetup(const Inputs& inputs, const Execution& execution) {
  TFB_RETURN_IF_ERROR(RelativeStackLayer::DoSetup(inputs, execution));
  exit_norms_.clear();
  for (int64_t n = 1; n <= sizes().layers; ++n) {
    const std::string norm = ExitNorm(n, sizes().layers);
    TFB_ASSIGN_OR_RETURN(LayerNorm of_exit, MakeLayerNorm(device(), parameters_, norm));
    exit_norms_.push_back(std::move(of_exit));
  }
  return rule_->Setup(parameters_);
}

int64_t ExitStackLayer::split_tokens() const {
  return rule_->reads_segments() ? max_segment_tokens() : RelativeStackLayer::split_tokens();
}

void ExitStackLayer::BeginSegment(const Segment& segment) {
  RelativeStackLayer::BeginSegment(segment);
  const auto of_segment = [&](const auto& view) {
    return Tokens(view, segment.begin, segment.tokens);
  };
  given_ = of_segment(segment.inputs.Get(kExits));
  out_ = of_segment(segment.outputs.Get("out"));
  exits_out_ = of_segment(segment.outputs.Get(kExits));
  probabilities_out_ = of_segment(segment.outputs.Get(kExitProbabilities));
  first_position_ = attention(0).tokens() - reach().given;
  has_run_ = true;
  if (device() != Device::kCpu) return;
  active_.resize(places());
  std::iota(active_.begin(), active_.end(), 0);
  std::iota(row_of_token_.begin(), row_of_token_.begin() + places(), 0);
}

ExitStackLayer::Scratch ExitStackLayer::LayOut(int64_t places, Workspace& workspace) const {
  const int64_t elements = places * problem().model_dim();
  Scratch scratch;
  scratch.normalized = workspace.Take<float>(elements);
  scratch.before = workspace.Take<float>(elements);
  scratch.after = workspace.Take<float>(elements);
  scratch.leaves = workspace.Take<uint8_t>(places);
  return scratch;
}

size_t ExitStackLayer::layer_workspace_bytes(int threads) const {
  return Workspace::Measure([&](Workspace& workspace) { LayOut(max_rows(), workspace); }) +
         std::max({RelativeStackLayer::layer_workspace_bytes(threads),
                   LayerNorm::workspace_bytes(device(), problem().model_dim(), threads),
                   rule_->workspace_bytes(max_rows(), threads)});
}

TensorView ExitStackLayer::Rows(float* rows, int64_t count) const {
  return TensorView(rows, DType::kF32, {count, problem().model_dim()});
}

absl::Status ExitStackLayer::RunLayer(int64_t n, const DecoderLayer::Call& call,
                                      const Execution& execution) {
  Workspace workspace(execution.workspace);
  const Scratch scratch = LayOut(places(), workspace);
  Execution rest = execution;
  rest.workspace = workspace.Rest();
  if (device() != Device::kCpu) {
    if (n == 0) {
      TFB_RETURN_IF_ERROR(
          FinishCuda(device(), 1, call.input, nullptr, Activation::kNone, {}, call.state, rest));
    }
    return RunOnCuda(n + 1, call.state, scratch, rest);
  }
  if (n == 0) {
    const RowsOf<ConstTensorView> x(call.input);
    float* states = call.state.MutableAt<float>(0);
    ForEachRow(x.rows(), rest.pool,
               [&](int64_t row) { x.Load(row, 0, x.channels(), states + row * x.channels()); });
  }
  return RunOnCpu(n + 1, call.state, scratch, rest);
}

absl::Status ExitStackLayer::RunOnCpu(int64_t n, const TensorView& state, const Scratch& scratch,
                                      const Execution& execution) {
  const int64_t width = problem().model_dim(), count = static_cast<int64_t>(active_.size());
  const TensorView before = Rows(scratch.before, count), after = Rows(scratch.after, count);
  float* states = state.MutableAt<float>(0);
  ForEachRow(count, execution.pool, [&](int64_t r) {
    std::copy_n(states + active_[r] * width, width, scratch.before + r * width);
  });
  ConstTensorView keys_from = state;
  if (pre_norm_) {
    const TensorView normalized(scratch.normalized, DType::kF32, state.shape());
    TFB_RETURN_IF_ERROR(layer(n - 1).attention_norm.Run(state, normalized, execution));
    keys_from = normalized;
  }
  const auto attend = [&](const ConstTensorView& x, const ConstTensorView& residual,
                          const TensorView& y, const Execution& rest) {
    return attention(n - 1).AppendFor(segment(), keys_from, {x, row_of_token_.data()}, residual, y,
                                      rest);
  };
  TFB_RETURN_IF_ERROR(layer(n - 1).Run(pre_norm_, {before, after, after, {}}, attend, execution));
  ForEachRow(count, execution.pool, [&](int64_t r) {
    std::copy_n(scratch.after + r * width, width, states + active_[r] * width);
  });
  if (IsLast(n)) {
    std::fill_n(scratch.leaves, count, 1);
  } else if (count > 0) {
    TFB_RETURN_IF_ERROR(
        Decide({n, after, before, active_.data(), segment().tokens(), first_position_},
               scratch.leaves, execution));
  }
  TFB_RETURN_IF_ERROR(Leave(n, scratch, execution));
  return WriteProbabilities(n, state, execution);
}

absl::Status ExitStackLayer::WriteProbabilities(int64_t n, const TensorView& state,
                                                const Execution& execution) {
  if (probabilities_out_.empty()) return absl::OkStatus();
  return rule_->WriteProbabilities(n, Rows(state.MutableAt<float>(0), places()), probabilities_out_,
                                   execution);
}

absl::Status ExitStackLayer::Decide(const ExitRows& rows, uint8_t* leaves,
                                    const Execution& execution) {
  if (CallsRule(rows.layer)) TFB_RETURN_IF_ERROR(rule_->Decide(rows, leaves, execution));
  if (given_.empty()) return absl::OkStatus();
  for (int64_t r = 0; r < rows.rows(); ++r) {
    const int64_t place = rows.places[r];
    leaves[r] = *given_.At<int32_t>(place / rows.tokens, place % rows.tokens) <= rows.layer;
  }
  return absl::OkStatus();
}

absl::Status ExitStackLayer::Leave(int64_t n, const Scratch& scratch, const Execution& execution) {
  const int64_t width = problem().model_dim(), count = static_cast<int64_t>(active_.size());
  leaving_.clear();
  int64_t staying = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int32_t place = active_[r];
    if (scratch.leaves[r] == 0) {
      row_of_token_[place] = static_cast<int32_t>(staying);
      active_[staying++] = place;
      continue;
    }
    row_of_token_[place] = -1;
    Record(place, n);
    std::copy_n(scratch.after + r * width, width, scratch.before + leaving_.size() * width);
    leaving_.push_back(place);
  }
  active_.resize(staying);
  const TensorView rows = Rows(scratch.before, static_cast<int64_t>(leaving_.size()));
  TFB_RETURN_IF_ERROR(exit_norms_[n - 1].Run(rows, rows, execution));
  const RowsOf<TensorView> out(out_);
  ForEachRow(rows.dim(0), execution.pool,
             [&](int64_t r) { out.Store(leaving_[r], 0, width, scratch.before + r * width); });
  return absl::OkStatus();
}

void ExitStackLayer::Record(int64_t place, int64_t n) {
  const int64_t b = place / segment().tokens(), t = place % segment().tokens();
  const int32_t exit = static_cast<int32_t>(n);
  if (!exits_out_.empty()) *exits_out_.MutableAt<int32_t>(b, t) = exit;
  const int64_t position = first_position_ + t;
  if (position < problem().query_tokens) {
    recorded_.mutable_data()[b * problem().query_tokens + position] = exit;
  }
}

absl::Status ExitStackLayer::RunOnCuda(int64_t n, const TensorView& state, const Scratch& scratch,
                                       const Execution& execution) {
  const bool may_leave = !given_.empty() || !rule_->never_leaves();
  const RowList rows = n > 1 && may_leave ? list_memory().list(problem().batch) : RowList();
  const TensorView after(scratch.after, DType::kF32, state.shape());
  const TensorView normalized(scratch.normalized, DType::kF32, state.shape());
  ConstTensorView keys_from = state;
  if (pre_norm_ && rows.rows != nullptr) {
    TFB_RETURN_IF_ERROR(layer(n - 1).attention_norm.Run(state, normalized, execution));
    keys_from = normalized;
  }
  const auto attend = [&](const ConstTensorView& x, const ConstTensorView& residual,
                          const TensorView& y, const Execution& rest) {
    return rows.rows == nullptr
               ? attention(n - 1).Append(segment(), x, residual, y, rest)
               : attention(n - 1).AppendForListed(segment(), keys_from, rows, x, residual, y, rest);
  };
  TFB_RETURN_IF_ERROR(
      layer(n - 1).Run(pre_norm_, {state, after, after, {}, rows}, attend, execution));
  if (CallsRule(n)) {
    const auto of_places = [&](const TensorView& view) {
      return Rows(static_cast<float*>(view.mutable_data()), places());
    };
    TFB_RETURN_IF_ERROR(rule_->Decide(
        {n, of_places(after), of_places(state), nullptr, segment().tokens(), first_position_, rows},
        scratch.leaves, execution));
  }
  TFB_RETURN_IF_ERROR(exit_norms_[n - 1].Run(after, normalized, execution, rows));
  TFB_RETURN_IF_ERROR(LeaveOnCuda(n, state, scratch, CallsRule(n), rows, execution));
  TFB_RETURN_IF_ERROR(WriteProbabilities(n, state, execution));
  if (IsLast(n) || !may_leave) return absl::OkStatus();
  return ListRows(device(), list_memory(), problem().batch, segment().tokens(), execution);
}

absl::Status ExitStackLayer::LeaveOnCuda(int64_t n, const TensorView& state, const Scratch& scratch,
                                         bool has_decided, const RowList& rows,
                                         const Execution& execution) {
  const int64_t total = problem().query_tokens;
  LeaveArguments arguments = {};
  arguments.after = scratch.after;
  arguments.normalized = scratch.normalized;
  arguments.state = state.MutableAt<float>(0);
  arguments.out = ToDeviceRows(out_);
  arguments.given = ToDeviceExits(given_);
  arguments.leaves = has_decided ? scratch.leaves : nullptr;
  arguments.stays = stays_.mutable_data();
  arguments.exits = ToDeviceExits(exits_out_);
  arguments.recorded = {recorded_.mutable_data() + std::min(first_position_, total), total, 1};
  arguments.recorded_tokens = total - first_position_;
  arguments.rows = places();
  arguments.tokens = segment().tokens();
  arguments.channels = problem().model_dim();
  arguments.layer = n;
  arguments.layers = sizes().layers;
  arguments.list = rows;
  TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device()));
  return ToStatus(
      KernelsOn<ExitStackKernels>(runtime->target()).leave(arguments, execution.stream));
}

absl::StatusOr<ExitStackLayer::Flops> ExitStackLayer::Count() const {
  std::vector<int32_t> exits(recorded_.size());
  TFB_RETURN_IF_ERROR(recorded_.Read(exits.data()));
  const double width = static_cast<double>(problem().model_dim());
  StackSizes one = sizes();
  one.layers = 1;
  double layers = 0, pairs = 0, copied = 0, decisions = 0, all_pairs = 0;
  for (size_t place = 0; place < exits.size(); ++place) {
    const int64_t t = reach().given + static_cast<int64_t>(place) % problem().query_tokens;
    const double keys = static_cast<double>(t - reach().FirstSeenBy(t) + 1), n = exits[place];
    layers += n;
    pairs += n * keys;
    copied += static_cast<double>(sizes().layers) - n;
    decisions += rule_->flops(std::min<int64_t>(exits[place], sizes().layers - 1));
    all_pairs += keys;
  }
  const double rows = static_cast<double>(exits.size());
  Flops flops;
  flops.spent = StackFlops(one, layers, pairs) + copied * 4 * width * width +
                (given_.empty() || rule_->reads_segments() ? decisions : 0);
  flops.of_all = StackFlops(sizes(), rows, all_pairs);
  flops.layers = layers / std::max(rows, 1.0);
  return flops;
}

Cost ExitStackLayer::cost() const {
  Cost cost = RelativeStackLayer::cost();
  cost.flops.reset();
  if (!has_run_) return cost;
  if (const absl::StatusOr<Flops> flops = Count(); flops.ok()) cost.flops = flops->spent;
  return cost;
}

std::map<std::string, double> ExitStackLayer::statistics() const {
  std::map<std::string, double> statistics = RelativeStackLayer::statistics();
  if (!has_run_) return statistics;
  if (const absl::StatusOr<Flops> flops = Count(); flops.ok()) {
    statistics["mean_layers"] = flops->layers;
    statistics["flops_saved"] = flops->of_all > 0 ? 1 - flops->spent / flops->of_all : 0;
  }
  return statistics;
}

}  // namespace tfb::layers
