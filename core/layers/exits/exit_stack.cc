#include "core/layers/exits/exit_stack.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/cuda/for_each.h"
#include "core/cuda/runtime.h"
#include "core/layers/exits/exit_stack_cuda.h"
#include "core/layers/exits/exit_stack_functors.h"
#include "core/layers/layer_norm.h"
#include "core/layers/layers_cuda.h"
#include "core/layers/list_rows.h"
#include "core/layers/rows_of.h"
#include "core/layers/stack/block.h"
#include "core/layers/stack/decoder_block.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::layers {
namespace {

std::vector<TensorSpec> Joined(std::vector<TensorSpec> specs, const std::vector<TensorSpec>& more) {
  specs.insert(specs.end(), more.begin(), more.end());
  return specs;
}

TensorSpec SpecOf(const RuleOutput& output, const Problem& problem, int64_t tokens) {
  return {output.name, {problem.batch, tokens, output.columns}, DType::kF32, true};
}

constexpr int64_t kRowsOfTask = 64;  // of copies

// Calls body(row) for each row.
template <class Body>
void ForEachRow(int64_t rows, ThreadPool* pool, const Body& body) {
  pool->ParallelForRanges(rows, kRowsOfTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

DeviceExits ToDeviceExits(const ConstTensorView& view) {
  if (view.empty()) return {};
  return {static_cast<int32_t*>(const_cast<void*>(view.data)), view.stride(0), view.stride(1)};
}

// The segment of the stack: which of its tokens are still there, and what becomes of those that
// leave. All layers share it; they are counted from 1 to N.
class ExitState : public StackState {
 public:
  static absl::StatusOr<std::unique_ptr<ExitState>> Create(Device device, const Problem& problem,
                                                           const RelativeStackShape& shape,
                                                           std::unique_ptr<ExitRule> rule) {
    std::unique_ptr<ExitState> state(new ExitState(device, problem, shape, std::move(rule)));
    const int64_t rows = state->stack_.layer(0).max_rows();
    if (device == Device::kCpu) {
      state->active_.reserve(rows);
      state->leaving_.reserve(rows);
      state->row_of_token_.resize(rows);
    } else {
      TFB_ASSIGN_OR_RETURN(state->stays_, DeviceArray<uint8_t>::Allocate(device, rows));
      TFB_ASSIGN_OR_RETURN(state->listed_, DeviceArray<int32_t>::Allocate(device, rows));
      TFB_ASSIGN_OR_RETURN(state->list_begins_,
                           DeviceArray<int32_t>::Allocate(device, problem.batch + 1));
    }
    TFB_ASSIGN_OR_RETURN(
        state->recorded_,
        DeviceArray<int32_t>::Create(
            device, std::vector<int32_t>(problem.batch * problem.query_tokens, 0)));
    return state;
  }

  DistanceRange distances() const override { return stack_.distances(); }
  absl::Status Setup(const NamedTensors& parameters) override { return rule_->Setup(parameters); }
  void Reset() override { stack_.Reset(); }
  void Begin(const Segment& segment) override {
    stack_.Begin(segment);
    given_ = segment.Input(kExits);
    out_ = segment.Output("out");
    exits_out_ = segment.Output(kExits);
    if (rule_->output().exists()) rule_out_ = segment.Output(rule_->output().name);
    all_exits_out_ = segment.Output(kExitOutputs, /*axis=*/2);
    first_position_ = stack_.first_position();
    has_run_ = true;
    if (device_ != Device::kCpu) return;
    active_.resize(places());
    std::iota(active_.begin(), active_.end(), 0);
    std::iota(row_of_token_.begin(), row_of_token_.begin() + places(), 0);
  }

  std::optional<double> flops(const NamedTensors&) const override {
    if (!has_run_) return std::nullopt;
    const absl::StatusOr<Flops> flops = Count();
    return flops.ok() ? std::optional<double>(flops->spent) : std::nullopt;
  }

  std::map<std::string, double> statistics(const NamedTensors& parameters) const override {
    std::map<std::string, double> statistics = stack_.statistics(parameters);
    if (!has_run_) return statistics;
    if (const absl::StatusOr<Flops> flops = Count(); flops.ok()) {
      statistics["mean_layers"] = flops->layers;
      statistics["flops_saved"] = flops->of_all > 0 ? 1 - flops->spent / flops->of_all : 0;
    }
    return statistics;
  }

  absl::Status CheckBackward() const override { return stack_.CheckBackward(); }
  void SetUpBackward() override { stack_.SetUpBackward(); }
  std::optional<double> backward_flops(const NamedTensors&) const override {
    if (!has_run_) return std::nullopt;
    const absl::StatusOr<Flops> flops = Count();
    return flops.ok() ? std::optional<double>(flops->of_backward) : std::nullopt;
  }

  size_t backward_memory_bytes() const override { return rule_->backward_memory_bytes(); }
  absl::Status BeginBackward(const PastRun& run, absl::Span<std::byte> memory,
                             const Execution& execution) override {
    rule_memory_ = memory;
    ConstTensorView gradient;
    if (rule_->output().exists()) gradient = run.output_gradients.Get(rule_->output().name);
    differentiates_rule_ = !gradient.empty();
    if (!differentiates_rule_) return absl::OkStatus();
    return rule_->DifferentiateOutput({run.next_states, gradient, memory, run.parameter_gradients},
                                      execution);
  }
  // Adds what the rule's output gives to the gradient of h^n, [batch, segment.tokens, model_dim].
  absl::Status AddOfRule(int64_t n, const PastSegment& segment, const TensorView& gradient,
                         const Execution& execution) const {
    if (!differentiates_rule_) return absl::OkStatus();
    return rule_->AddStateGradient(n, rule_memory_, segment.begin, gradient, execution);
  }

  const RelativeState& stack() const { return stack_; }
  const ExitRule& rule() const { return *rule_; }

  // ---- A layer's steps ----

  // The memory of a layer.
  struct Scratch {
    float* other;     // [places, model_dim]; CPU: the states before the layer; CUDA: LN_n h^n
    float* after;     // [places, model_dim]
    uint8_t* leaves;  // [places]
  };
  static Scratch LayOut(int64_t places, int64_t width, Workspace& workspace) {
    return {workspace.Take<float>(places * width), workspace.Take<float>(places * width),
            workspace.Take<uint8_t>(places)};
  }

  int64_t places() const { return problem().batch * stack_.segment().tokens(); }

  // Writes the roles [batch, query_tokens] of layer n, which has run, for the tokens of a segment of a
  // Run.
  absl::Status KeepRoles(int64_t n, const Segment& segment, Role* roles,
                         const Execution& execution) const {
    WriteRoles write = {};
    write.of = {roles, problem().query_tokens, segment.begin, segment.tokens};
    if (device_ == Device::kCpu) {
      write.row_of_token = row_of_token_.data();
    } else {
      write.stays = stays_.data();
    }
    write.exits = recorded_.data();
    write.layer = static_cast<int32_t>(n);
    return ForEach(device_, places(), write, execution);
  }

  // Begins layer 1: `hidden`, f32 [batch, tokens, model_dim], becomes x. It is h^n after layer n.
  absl::Status Read(const ConstTensorView& x, const TensorView& hidden,
                    const Execution& execution) {
    hidden_ = hidden;
    if (device_ != Device::kCpu) {
      return FinishCuda(device_, 1, x, nullptr, Activation::kNone, {}, hidden, execution);
    }
    const RowsOf<ConstTensorView> rows(x);
    float* states = hidden.MutableAt<float>(0);
    ForEachRow(rows.rows(), execution.pool, [&](int64_t row) {
      rows.Load(row, 0, rows.channels(), states + row * rows.channels());
    });
    return absl::OkStatus();
  }

  // The rows that layer n computes. CPU: [rows, model_dim], those of the tokens that are there.
  // CUDA: [batch, tokens, model_dim], of which these are listed.
  struct LayerRows {
    TensorView before;
    TensorView after;
    SomeTokens some = {};
  };
  LayerRows RowsFor(int64_t n, const Scratch& scratch, const Execution& execution) const {
    if (device_ != Device::kCpu) {
      LayerRows rows = {hidden_, TensorView(scratch.after, DType::kF32, hidden_.shape())};
      if (n > 1 && may_leave()) {
        rows.some = {hidden_, nullptr, list_memory().list(problem().batch)};
      }
      return rows;
    }
    const int64_t width = problem().model_dim();
    const Shape shape = {static_cast<int64_t>(active_.size()), width};
    const float* states = hidden_.At<float>(0);
    ForEachRow(shape[0], execution.pool, [&](int64_t r) {
      std::copy_n(states + active_[r] * width, width, scratch.other + r * width);
    });
    return {TensorView(scratch.other, DType::kF32, shape),
            TensorView(scratch.after, DType::kF32, shape),
            {hidden_, row_of_token_.data()}};
  }

  // Makes the hidden state h^n, lets tokens leave and writes their outputs, normalised by `norm`.
  absl::Status Leave(int64_t n, const LayerRows& rows, const LayerNorm& norm,
                     const Scratch& scratch, const Execution& execution) {
    TFB_RETURN_IF_ERROR(device_ == Device::kCpu ? LeaveOnCpu(n, rows, norm, scratch, execution)
                                                : LeaveOnCuda(n, rows, norm, scratch, execution));
    if (!all_exits_out_.empty()) {
      TFB_RETURN_IF_ERROR(norm.Run(hidden_, OfLayer(all_exits_out_, n - 1), execution));
    }
    if (!rule_out_.empty()) {
      TFB_RETURN_IF_ERROR(rule_->WriteOutput(n, Flat(hidden_), rule_out_, execution));
    }
    if (device_ == Device::kCpu || IsLast(n) || !may_leave()) return absl::OkStatus();
    return ListRows(device_, list_memory(), problem().batch, stack_.segment().tokens(), execution);
  }

 private:
  ExitState(Device device, const Problem& problem, const RelativeStackShape& shape,
            std::unique_ptr<ExitRule> rule)
      : device_(device), stack_(device, problem, shape), rule_(std::move(rule)) {}

  const Problem& problem() const { return stack_.problem(); }
  RowListMemory list_memory() const {
    return {stays_.mutable_data(), listed_.mutable_data(), list_begins_.mutable_data()};
  }
  bool IsLast(int64_t n) const { return n == stack_.sizes().layers; }
  bool may_leave() const { return !given_.empty() || !rule_->never_leaves(); }
  // Tells whether the rule is called after layer n. Where exits are given, it is after the first
  // layer alone, whose states may say something of the next segment or of the rule's output.
  bool CallsRule(int64_t n) const {
    if (IsLast(n) || given_.empty()) return !IsLast(n);
    return n == 1 && (rule_->reads_segments() || !rule_out_.empty());
  }
  // Returns [places, model_dim] of a state.
  TensorView Flat(const TensorView& state) const {
    return TensorView(state.mutable_data(), DType::kF32, {places(), problem().model_dim()});
  }

  absl::Status LeaveOnCpu(int64_t n, const LayerRows& rows, const LayerNorm& norm,
                          const Scratch& scratch, const Execution& execution) {
    const int64_t width = problem().model_dim(), count = rows.after.dim(0);
    float* states = hidden_.MutableAt<float>(0);
    ForEachRow(count, execution.pool, [&](int64_t r) {
      std::copy_n(scratch.after + r * width, width, states + active_[r] * width);
    });
    if (IsLast(n)) {
      std::fill_n(scratch.leaves, count, 1);
    } else if (count > 0) {
      TFB_RETURN_IF_ERROR(Decide(
          {n, rows.after, rows.before, active_.data(), stack_.segment().tokens(), first_position_},
          scratch.leaves, execution));
    }
    return WriteLeaving(n, count, norm, scratch, execution);
  }

  // Writes the outputs of those of the `count` rows that leave, and closes the gaps that they leave
  // in active_.
  absl::Status WriteLeaving(int64_t n, int64_t count, const LayerNorm& norm, const Scratch& scratch,
                            const Execution& execution) {
    const int64_t width = problem().model_dim();
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
      std::copy_n(scratch.after + r * width, width, scratch.other + leaving_.size() * width);
      leaving_.push_back(place);
    }
    active_.resize(staying);
    const TensorView left(scratch.other, DType::kF32,
                          {static_cast<int64_t>(leaving_.size()), width});
    TFB_RETURN_IF_ERROR(norm.Run(left, left, execution));
    const RowsOf<TensorView> out(out_);
    ForEachRow(left.dim(0), execution.pool,
               [&](int64_t r) { out.Store(leaving_[r], 0, width, scratch.other + r * width); });
    return absl::OkStatus();
  }

  absl::Status Decide(const ExitRows& rows, uint8_t* leaves, const Execution& execution) {
    if (CallsRule(rows.layer)) TFB_RETURN_IF_ERROR(rule_->Decide(rows, leaves, execution));
    if (given_.empty()) return absl::OkStatus();
    for (int64_t r = 0; r < rows.rows(); ++r) {
      const int64_t place = rows.places[r];
      leaves[r] = *given_.At<int32_t>(place / rows.tokens, place % rows.tokens) <= rows.layer;
    }
    return absl::OkStatus();
  }

  void Record(int64_t place, int64_t n) {
    const int64_t b = place / stack_.segment().tokens(), t = place % stack_.segment().tokens();
    const int32_t exit = static_cast<int32_t>(n);
    if (!exits_out_.empty()) *exits_out_.MutableAt<int32_t>(b, t) = exit;
    const int64_t position = first_position_ + t;
    if (position < problem().query_tokens) {
      recorded_.mutable_data()[b * problem().query_tokens + position] = exit;
    }
  }

  absl::Status LeaveOnCuda(int64_t n, const LayerRows& rows, const LayerNorm& norm,
                           const Scratch& scratch, const Execution& execution) {
    if (CallsRule(n)) {
      TFB_RETURN_IF_ERROR(
          rule_->Decide({n, Flat(rows.after), Flat(hidden_), nullptr, stack_.segment().tokens(),
                         first_position_, rows.some.rows},
                        scratch.leaves, execution));
    }
    const TensorView normalized(scratch.other, DType::kF32, hidden_.shape());
    TFB_RETURN_IF_ERROR(norm.Run(rows.after, normalized, execution, rows.some.rows));
    const int64_t total = problem().query_tokens;
    LeaveArguments arguments = {};
    arguments.after = scratch.after;
    arguments.normalized = scratch.other;
    arguments.state = hidden_.MutableAt<float>(0);
    arguments.out = ToDeviceRows(out_);
    arguments.given = ToDeviceExits(given_);
    arguments.leaves = CallsRule(n) ? scratch.leaves : nullptr;
    arguments.stays = stays_.mutable_data();
    arguments.exits = ToDeviceExits(exits_out_);
    arguments.recorded = {recorded_.mutable_data() + std::min(first_position_, total), total, 1};
    arguments.recorded_tokens = total - first_position_;
    arguments.rows = places();
    arguments.tokens = stack_.segment().tokens();
    arguments.channels = problem().model_dim();
    arguments.layer = n;
    arguments.layers = stack_.sizes().layers;
    arguments.list = rows.some.rows;
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    return ToStatus(
        KernelsOn<ExitStackKernels>(runtime->target()).leave(arguments, execution.stream));
  }

  // The definition's FLOPs for tokens that leave after these layers, and for a stack in which all
  // stay.
  struct Flops {
    double spent = 0;
    double of_all = 0;
    double of_backward = 0;
    double layers = 0;  // mean
  };
  absl::StatusOr<Flops> Count() const {
    std::vector<int32_t> exits(recorded_.size());
    TFB_RETURN_IF_ERROR(recorded_.Read(exits.data()));
    const double width = static_cast<double>(problem().model_dim());
    StackSizes one = stack_.sizes();
    one.layers = 1;
    double layers = 0, pairs = 0, copied = 0, decisions = 0, all_pairs = 0, last = 0;
    for (size_t place = 0; place < exits.size(); ++place) {
      const int64_t t = stack_.reach().given + static_cast<int64_t>(place) % problem().query_tokens;
      const double keys = static_cast<double>(t - stack_.reach().FirstSeenBy(t) + 1),
                   n = exits[place];
      layers += n;
      last = std::max(last, n);
      pairs += n * keys;
      copied += static_cast<double>(stack_.sizes().layers) - n;
      decisions += rule_->flops(std::min<int64_t>(exits[place], stack_.sizes().layers - 1));
      all_pairs += keys;
    }
    const double rows = static_cast<double>(exits.size());
    Flops flops;
    flops.spent = StackFlops(one, layers, pairs) + copied * 4 * width * width +
                  (given_.empty() || rule_->reads_segments() ? decisions : 0);
    flops.of_all = StackFlops(stack_.sizes(), rows, all_pairs);
    StackBackwardWork work = {layers, pairs};
    work.earlier = static_cast<double>(stack_.sizes().layers) * stack_.earlier_rows();
    work.normalizes_earlier = stack_.shape().pre_norm;
    work.distances = last * stack_.distances_seen({});
    // A copied state's keys and values are made again, and have the gradients of two products.
    flops.of_backward = StackBackwardFlops(one, work) + copied * 3 * 4 * width * width;
    flops.layers = layers / std::max(rows, 1.0);
    return flops;
  }

  Device device_;
  RelativeState stack_;
  std::unique_ptr<ExitRule> rule_;

  // The segment's tensors.
  TensorView hidden_;
  ConstTensorView given_;  // exits; empty: the rule decides
  TensorView out_;
  TensorView exits_out_;
  TensorView rule_out_;  // of the rule
  TensorView all_exits_out_;
  int64_t first_position_ = 0;  // of the segment in the stream, without given memories
  bool has_run_ = false;

  // A backward pass.
  bool differentiates_rule_ = false;  // its output
  absl::Span<std::byte> rule_memory_;

  // CPU: places of the tokens that are there, ascending, and the reverse.
  std::vector<int32_t> active_;
  std::vector<int32_t> row_of_token_;
  std::vector<int32_t> leaving_;  // places of the tokens that leave after the layer that has run
  // CUDA: the flags and the list of the rows that are there.
  DeviceArray<uint8_t> stays_;
  DeviceArray<int32_t> listed_;
  DeviceArray<int32_t> list_begins_;
  DeviceArray<int32_t> recorded_;  // [batch, query_tokens] exits, 0 for tokens not read yet
};

// A decoder block for the tokens that are still there, and the exit behind it.
class ExitBlock : public Block {
 public:
  // The state outlives it.
  ExitBlock(const LayerOfStack& layer, ExitState* state,
            std::unique_ptr<SegmentAttention> attention)
      : layer_(layer),
        state_(state),
        block_(layer, state->stack().shape().pre_norm, std::move(attention)),
        names_(ExitNorm(layer.n + 1, layer.sizes.layers)) {}

  absl::Status Setup(const NamedTensors& parameters, const Distances& distances,
                     const Execution& execution) override {
    TFB_RETURN_IF_ERROR(block_.Setup(parameters, distances, execution));
    TFB_ASSIGN_OR_RETURN(norm_, MakeLayerNorm(layer_.device, parameters,
                                              ExitNorm(layer_.n + 1, layer_.sizes.layers)));
    return absl::OkStatus();
  }
  absl::Status Recall(const Inputs& given, const Execution& execution) override {
    return block_.Recall(given, execution);
  }

  absl::Status Run(const Call& call, const Execution& execution) override {
    Workspace workspace(execution.workspace);
    const ExitState::Scratch scratch =
        ExitState::LayOut(state_->places(), layer_.sizes.width(), workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    const int64_t n = layer_.n + 1;
    if (n == 1) TFB_RETURN_IF_ERROR(state_->Read(call.input, call.state, rest));
    const ExitState::LayerRows rows = state_->RowsFor(n, scratch, rest);
    TFB_RETURN_IF_ERROR(block_.Run(
        {call.segment, rows.before, rows.after, rows.after, {}, rows.some, OfBlock(call.kept)},
        rest));
    TFB_RETURN_IF_ERROR(state_->Leave(n, rows, norm_, scratch, rest));
    if (call.kept.empty()) return absl::OkStatus();
    return state_->KeepRoles(n, call.segment, reinterpret_cast<Role*>(call.kept.data()), rest);
  }

  size_t workspace_bytes(int threads) const override {
    const int64_t rows = layer_.max_rows(), width = layer_.sizes.width();
    return Workspace::Measure(
               [&](Workspace& workspace) { ExitState::LayOut(rows, width, workspace); }) +
           std::max({block_.workspace_bytes(threads),
                     LayerNorm::workspace_bytes(layer_.device, width, threads),
                     state_->rule().workspace_bytes(rows, threads)});
  }
  SegmentAttention& attention() override { return block_.attention(); }

  absl::Status CheckBackward() const override { return block_.CheckBackward(); }
  absl::Status SetUpBackward(const NamedTensors& parameters, const Distances& distances) override {
    return block_.SetUpBackward(parameters, distances);
  }
  size_t kept_bytes() const override { return role_bytes() + block_.kept_bytes(); }
  size_t backward_workspace_bytes(int threads) const override {
    const int64_t rows = layer_.max_rows(), width = layer_.sizes.width();
    return Workspace::Measure([&](Workspace& workspace) { LayOutBackward(rows, workspace); }) +
           std::max(block_.backward_workspace_bytes(threads),
                    LayerNorm::backward_workspace_bytes(layer_.device, rows, width, threads));
  }
  absl::Status Backward(const BackwardCall& call, const Execution& execution) override {
    const PastSegment& segment = call.segment;
    Workspace workspace(execution.workspace);
    const BackwardScratch scratch = LayOutBackward(layer_.batch * segment.tokens, workspace);
    Execution rest = execution;
    rest.workspace = workspace.Rest();
    TFB_RETURN_IF_ERROR(BackwardOfAllExits(call, rest));
    PastSegment of_block = segment;
    of_block.kept = OfBlock(segment.kept);
    if (layer_.device != Device::kCpu) {
      return BackwardOnCuda({of_block, call.gradient, {}}, RolesOf(segment), scratch, rest);
    }
    const Listed listed = ListTokens(segment, scratch);
    TFB_RETURN_IF_ERROR(BackwardOfLeaving(call, listed.leaving, scratch, rest));
    const TensorView input = RowsIn(scratch.states, listed.there);
    const TensorView gradient = RowsIn(scratch.gradients, listed.there);
    Gather(segment.input(), scratch.there, input, execution.pool);
    Gather(call.gradient, scratch.there, gradient, execution.pool);
    return block_.Backward(
        {of_block, call.gradient, {}, {input, gradient, scratch.row_of_token, scratch.there}},
        rest);
  }

 private:
  // The memory that a Run keeps begins with the roles of the tokens.
  size_t role_bytes() const {
    const Problem& problem = state_->stack().problem();
    return Workspace::Measure(
        [&](Workspace& workspace) { workspace.Take<Role>(problem.batch * problem.query_tokens); });
  }
  absl::Span<std::byte> OfBlock(absl::Span<std::byte> kept) const {
    return kept.empty() ? kept : kept.subspan(role_bytes());
  }

  RolesOfSegment RolesOf(const PastSegment& segment) const {
    return {reinterpret_cast<Role*>(segment.kept.data()), state_->stack().problem().query_tokens,
            segment.begin, segment.tokens};
  }

  // Tokens are numbered by their places, b * tokens + t.
  struct BackwardScratch {
    float* gradients;    // [places, model_dim]
    RowListMemory list;  // CUDA: of the tokens that are there
    // CPU.
    int32_t* row_of_token;  // [places], below 0 for tokens that have left before the layer
    int32_t* there;         // the places of the others
    int32_t* leaving;       // those of tokens that leave after the layer
    float* states;          // [places, model_dim]
  };
  BackwardScratch LayOutBackward(int64_t places, Workspace& workspace) const {
    const int64_t width = layer_.sizes.width();
    BackwardScratch scratch = {};
    scratch.gradients = workspace.Take<float>(places * width);
    if (layer_.device != Device::kCpu) {
      scratch.list = {workspace.Take<uint8_t>(places), workspace.Take<int32_t>(places),
                      workspace.Take<int32_t>(layer_.batch + 1)};
      return scratch;
    }
    scratch.row_of_token = workspace.Take<int32_t>(places);
    scratch.there = workspace.Take<int32_t>(places);
    scratch.leaving = workspace.Take<int32_t>(places);
    scratch.states = workspace.Take<float>(places * width);
    return scratch;
  }
  TensorView RowsIn(float* memory, int64_t rows) const {
    return TensorView(memory, DType::kF32, {rows, layer_.sizes.width()});
  }

  struct Listed {
    int64_t there = 0;
    int64_t leaving = 0;
  };
  Listed ListTokens(const PastSegment& segment, const BackwardScratch& scratch) const {
    const RolesOfSegment roles = RolesOf(segment);
    Listed listed;
    for (int64_t place = 0; place < layer_.batch * segment.tokens; ++place) {
      const Role role = roles.At(place);
      const bool is_there = role != Role::kGone;
      scratch.row_of_token[place] = is_there ? static_cast<int32_t>(listed.there) : -1;
      if (is_there) scratch.there[listed.there++] = static_cast<int32_t>(place);
      if (role == Role::kLeaves) scratch.leaving[listed.leaving++] = static_cast<int32_t>(place);
    }
    return listed;
  }
  // Copies rows of [batch, tokens, model_dim], which are at these places.
  static void Gather(const ConstTensorView& from, const int32_t* places, const TensorView& to,
                     ThreadPool* pool) {
    const RowsOf<ConstTensorView> rows(from);
    ForEachRow(to.dim(0), pool, [&](int64_t r) {
      rows.Load(places[r], 0, rows.channels(), to.MutableAt<float>(r));
    });
  }

  static ConstTensorView OfTokens(const PastSegment& segment, const ConstTensorView& tokens) {
    return Slice(tokens, 1, segment.begin, segment.tokens);
  }
  // Adds what this exit's outputs of all tokens give to the states.
  absl::Status BackwardOfAllExits(const BackwardCall& call, const Execution& execution) const {
    const PastSegment& segment = call.segment;
    TFB_RETURN_IF_ERROR(state_->AddOfRule(layer_.n + 1, segment, call.gradient, execution));
    const ConstTensorView of_all = segment.output_gradients.Get(kExitOutputs);
    if (of_all.empty()) return absl::OkStatus();
    return norm_.Backward(
        {OfTokens(segment, segment.next_states), OfTokens(segment, OfLayer(of_all, layer_.n)),
         call.gradient, call.gradient, segment.parameter_gradients.Get(names_.gamma),
         segment.parameter_gradients.Get(names_.beta), /*accumulate=*/true},
        execution);
  }

  // Lists the tokens that were there in the layer, on CUDA, where these may not be all.
  absl::StatusOr<RowList> ListThere(const PastSegment& segment, const RolesOfSegment& roles,
                                    const RowListMemory& memory, const Execution& execution) const {
    const bool may_have_left =
        !segment.inputs.Get(kExits).empty() || !state_->rule().never_leaves();
    if (layer_.n == 0 || !may_have_left) return RowList();
    TFB_RETURN_IF_ERROR(ForEach(layer_.device, layer_.batch * segment.tokens,
                                TellsThere{roles, memory.is_listed}, execution));
    TFB_RETURN_IF_ERROR(ListRows(layer_.device, memory, layer_.batch, segment.tokens, execution));
    return memory.list(layer_.batch);
  }

  // Differentiates the layer on CUDA, in tensors of all tokens.
  absl::Status BackwardOnCuda(BackwardCall call, const RolesOfSegment& roles,
                              const BackwardScratch& scratch, const Execution& execution) {
    const PastSegment& segment = call.segment;
    const int64_t places = layer_.batch * segment.tokens, width = layer_.sizes.width();
    const DeviceView gradient = ToDeviceView(call.gradient);
    TFB_ASSIGN_OR_RETURN(call.some.rows, ListThere(segment, roles, scratch.list, execution));
    const ConstTensorView of_out = segment.output_gradients.Get("out");
    if (!of_out.empty()) {
      const ConstTensorView of_leaving(scratch.gradients, DType::kF32, call.gradient.shape());
      TFB_RETURN_IF_ERROR(
          ForEachInRows(layer_.device, places, width,
                        GradientsOfLeaving{roles, ToDeviceView(OfTokens(segment, of_out)),
                                           scratch.gradients, width},
                        execution));
      TFB_RETURN_IF_ERROR(norm_.Backward(
          {OfTokens(segment, segment.next_states), of_leaving, call.gradient, call.gradient,
           segment.parameter_gradients.Get(names_.gamma),
           segment.parameter_gradients.Get(names_.beta), /*accumulate=*/true, call.some.rows},
          execution));
    }
    TFB_RETURN_IF_ERROR(ForEachInRows(layer_.device, places, width,
                                      HoldBackGone{roles, gradient, scratch.gradients, width},
                                      execution));
    TFB_RETURN_IF_ERROR(block_.Backward(call, execution));
    return ForEachInRows(layer_.device, places, width,
                         LetGonePass{roles, gradient, scratch.gradients, width}, execution);
  }

  // Adds what the outputs of the tokens that leave here give to their states, on the CPU.
  absl::Status BackwardOfLeaving(const BackwardCall& call, int64_t count,
                                 const BackwardScratch& scratch, const Execution& execution) const {
    const PastSegment& segment = call.segment;
    const ConstTensorView of_out = segment.output_gradients.Get("out");
    if (of_out.empty()) return absl::OkStatus();
    const TensorView states = RowsIn(scratch.states, count);
    const TensorView gradients = RowsIn(scratch.gradients, count);
    Gather(OfTokens(segment, segment.next_states), scratch.leaving, states, execution.pool);
    Gather(OfTokens(segment, of_out), scratch.leaving, gradients, execution.pool);
    TFB_RETURN_IF_ERROR(norm_.Backward({states,
                                        gradients,
                                        {},
                                        gradients,
                                        segment.parameter_gradients.Get(names_.gamma),
                                        segment.parameter_gradients.Get(names_.beta),
                                        /*accumulate=*/true},
                                       execution));
    const int64_t width = layer_.sizes.width();
    ForEachRow(count, execution.pool, [&](int64_t r) {
      const int64_t place = scratch.leaving[r];
      const float* from = gradients.At<float>(r);
      float* to = call.gradient.MutableAt<float>(place / segment.tokens, place % segment.tokens);
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
    });
    return absl::OkStatus();
  }

  LayerOfStack layer_;
  ExitState* state_;
  DecoderBlock block_;
  LayerNorm norm_;  // of what leaves
  NormNames names_;
};

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
TensorSpec ExitOutputsSpec(const Problem& problem, int64_t layers, int64_t tokens) {
  return {kExitOutputs, {problem.batch, layers, tokens, problem.model_dim()}, problem.dtype, true};
}
std::vector<TensorSpec> ExitStackInputs(const Problem& problem, const ExitStackOptions& options) {
  return Joined({HiddenInputs(problem)[0], ExitsSpec(problem, problem.query_tokens)},
                GivenMemories(problem, options));
}
std::vector<TensorSpec> ExitStackOutputs(const Problem& problem, const ExitStackOptions& options,
                                         const RuleOutput& of_rule) {
  std::vector<TensorSpec> outputs = {HiddenOutputs(problem)[0],
                                     ExitsSpec(problem, problem.query_tokens)};
  if (of_rule.exists()) outputs.push_back(SpecOf(of_rule, problem, problem.query_tokens));
  outputs.push_back(ExitOutputsSpec(problem, options.layers, problem.query_tokens));
  return Joined(std::move(outputs), FinalMemories(problem, options));
}

absl::StatusOr<std::unique_ptr<Layer>> MakeExitStack(const Problem& problem,
                                                     const ExitStackOptions& options, Device device,
                                                     uint64_t seed, std::unique_ptr<ExitRule> rule,
                                                     const std::vector<ParameterSpec>& of_rule) {
  RelativeStackShape shape = ShapeOf(problem, options, options.pre_norm);
  shape.some_tokens = true;
  std::vector<ParameterSpec> parameters = ExitStackParameters(shape.sizes);
  AddSpecs(of_rule, &parameters);
  SegmentedStack stack;
  const RuleOutput output = rule->output();
  stack.outputs = ExitStackOutputs(problem, options, output);
  stack.more_outputs = {ExitsSpec(problem, kSegmentTokens),
                        ExitOutputsSpec(problem, options.layers, kSegmentTokens)};
  stack.more_differentiable = {kExitOutputs};
  if (output.exists()) {
    stack.more_outputs.push_back(SpecOf(output, problem, kSegmentTokens));
    stack.more_differentiable.push_back(output.name);
  }
  stack.more_inputs = Joined({ExitsSpec(problem, kSegmentTokens)}, GivenMemories(problem, options));
  stack.depends_on_split = rule->reads_segments();
  stack.blocks_write_out = true;
  for (const ParameterSpec& spec : of_rule) {
    if (output.exists()) break;
    stack.more_stopped[spec.name] =
        "it decides which tokens leave, and nothing else; a backward pass is of the exits as found";
  }
  TFB_ASSIGN_OR_RETURN(std::unique_ptr<ExitState> state,
                       ExitState::Create(device, problem, shape, std::move(rule)));
  ExitState* shared = state.get();
  stack.state = std::move(state);
  return MakeRelativeStack(
      std::move(stack), shared->stack(), parameters, seed,
      [&](const LayerOfStack& layer, std::unique_ptr<TransformerXlAttention> attention) {
        return std::make_unique<ExitBlock>(layer, shared, std::move(attention));
      });
}

}  // namespace tfb::layers
