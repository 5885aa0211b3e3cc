#include "attention/longformer/longformer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/longformer/marked_globals.h"
#include "core/cuda/device_array.h"
#include "core/definition.h"
#include "core/flash/flash_engine.h"
#include "core/schedule/residue_order.h"

namespace tfb::longformer {
namespace {

const bool registered = RegisterTechnique<Longformer>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "longformer";
  info.family = "attention";
  info.title = "Longformer sliding window with global tokens";
  info.citation = "Beltagy, Peters, Cohan 2020, arXiv:2004.05150v2, section 3";
  info.exactness = Exactness::kExact;
  info.budget_option = "window";
  info.growth = 1;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

// Tells whether global rows read tensors of their own, which they do not where there can be none.
bool OwnProjections(const LongformerOptions& options) {
  const bool may_have_globals =
      options.max_globals > 0 ||
      std::any_of(options.globals.begin(), options.globals.end(), [](int64_t g) { return g >= 0; });
  return may_have_globals && options.projections == LongformerOptions::Projections::kOwn;
}

bool ReadsMask(const LongformerOptions& options) { return options.max_globals > 0; }

// Returns the global positions inside the sequence, ascending, each once.
std::vector<int64_t> Globals(const LongformerOptions& options, int64_t tokens) {
  std::vector<int64_t> globals;
  for (int64_t g : options.globals) {
    if (g >= 0 && g < tokens) globals.push_back(g);
  }
  std::sort(globals.begin(), globals.end());
  globals.erase(std::unique(globals.begin(), globals.end()), globals.end());
  return globals;
}

// The window's ends relative to the query, in steps of the dilation.
struct Window {
  Window(const LongformerOptions& options, bool causal)
      : low(causal ? -(options.one_sided >= 0 ? options.one_sided : options.window / 2)
                   : -(options.window / 2)),
        high(causal ? 0 : options.window / 2) {}
  int64_t low;
  int64_t high;
};

// The pattern of tokens that are not global, over places of the residue order of each key-value
// head.
class LocalPattern : public Pattern {
 public:
  // `globals` are the global tokens of all sequences, ascending.
  LocalPattern(const LongformerOptions& options, const Problem& problem,
               const std::vector<ResidueOrder>& orders, std::vector<int64_t> globals)
      : window_(options, problem.causal),
        causal_(problem.causal),
        heads_(orders.size() == 1 ? 1 : problem.query_heads),
        group_(orders.size() == 1 ? 1 : problem.group()),
        orders_(orders),
        globals_(std::move(globals)),
        is_global_(problem.query_tokens, false) {
    for (int64_t g : globals_) is_global_[g] = true;
  }

  int64_t heads() const override { return heads_; }

  bool Allows(int64_t head, int64_t i, int64_t j) const override {
    const ResidueOrder& order = orders_[head / group_];
    const int64_t query = order.Token(i), key = order.Token(j);
    if (is_global_[query]) return false;  // global rows have a call of their own
    if (is_global_[key]) return !causal_ || key <= query;
    // Within one residue, places count steps of the dilation.
    return order.Residue(i) == order.Residue(j) && j - i >= window_.low && j - i <= window_.high;
  }

  void KeyRanges(int64_t head, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    const ResidueOrder& order = orders_[head / group_];
    int64_t local_rows = 0;
    for (int64_t i = query_begin; i < query_end; ++i) local_rows += !is_global_[order.Token(i)];
    if (local_rows == 0) return;
    for (int64_t i = query_begin; i < query_end;) {
      const auto [begin, end] = order.Residue(i);
      const int64_t last = std::min(end, query_end) - 1;
      ranges->push_back(
          {std::max(begin, i + window_.low), std::min(end, last + window_.high + 1), false});
      // With one residue and no global query, the keys that all rows have in their bands make full
      // tiles.
      const bool whole =
          local_rows == query_end - query_begin && i == query_begin && last == query_end - 1;
      if (whole) {
        ranges->push_back(
            {std::max(begin, last + window_.low), std::min(end, i + window_.high + 1), true});
      }
      i = last + 1;
    }
    for (int64_t g : globals_) ranges->push_back({order.Place(g), order.Place(g) + 1, false});
  }

 private:
  Window window_;
  bool causal_;
  int64_t heads_;
  int64_t group_;
  const std::vector<ResidueOrder>& orders_;
  std::vector<int64_t> globals_;
  std::vector<bool> is_global_;
};

// The pattern of global tokens: row r is the r-th of them.
class GlobalPattern : public Pattern {
 public:
  GlobalPattern(std::vector<int64_t> globals, const Problem& problem)
      : globals_(std::move(globals)), causal_(problem.causal), tokens_(problem.kv_tokens) {}
  bool Allows(int64_t, int64_t i, int64_t j) const override { return !causal_ || j <= globals_[i]; }
  void KeyRanges(int64_t, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    ranges->push_back({0, causal_ ? globals_[query_begin] + 1 : tokens_, true});
    ranges->push_back({0, causal_ ? globals_[query_end - 1] + 1 : tokens_, false});
  }

 private:
  std::vector<int64_t> globals_;
  bool causal_;
  int64_t tokens_;
};

// A layer that makes two calls of engine flash: local rows, then the global ones over them. Where
// the input says which tokens are global, local rows are the softmax of two parts, see
// MarkedGlobals.
class LongformerLayer : public Layer {
 public:
  LongformerLayer(const Problem& problem, std::vector<TensorSpec> inputs,
                  const LongformerOptions& options, Device device)
      : Layer(problem, std::move(inputs), AttentionOutputs(problem)),
        options_(options),
        device_(device),
        globals_(Globals(options, problem.query_tokens)),
        marked_(device, problem, globals_, options.max_globals),
        local_problem_(problem),
        global_problem_(problem) {
    // The patterns contain the mask; their rows are not in the order of tokens.
    local_problem_.causal = global_problem_.causal = false;
    global_problem_.query_tokens = static_cast<int64_t>(globals_.size());
  }

  size_t workspace_bytes(int threads) const override {
    const size_t bytes =
        std::max(FlashEngine::WorkspaceBytes(device_, local_problem_, false, threads),
                 FlashEngine::WorkspaceBytes(device_, global_problem_, false, threads));
    return ReadsMask(options_) ? std::max(bytes, marked_.workspace_bytes(threads)) : bytes;
  }

  Cost cost() const override {
    Cost cost;
    if (is_set_up_ && !is_marked_) {
      const Problem& p = problem();
      const double pairs =
          local_.schedule().KeptPairs(p.query_heads) + global_.schedule().KeptPairs(p.query_heads);
      cost.flops = 2.0 * static_cast<double>(p.batch * (p.head_dim + p.value_dim)) * pairs;
    }
    // Where global rows have tensors of their own, all of k_global and v_global are read.
    cost.bytes = AttentionBytes(problem()) +
                 (OwnProjections(options_) ? AttentionBytes(global_problem_) : 0.0);
    return cost;
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution&) override {
    const Problem& p = problem();
    orders_.clear();
    std::vector<int32_t> order_tokens;
    for (int64_t dilation : options_.dilation) {
      const ResidueOrder& order = orders_.emplace_back(p.query_tokens, dilation);
      order_tokens.insert(order_tokens.end(), order.tokens().begin(), order.tokens().end());
    }
    TFB_ASSIGN_OR_RETURN(order_tokens_,
                         DeviceArray<int32_t>::Create(device_, std::move(order_tokens)));
    TFB_ASSIGN_OR_RETURN(global_tokens_,
                         DeviceArray<int32_t>::Create(device_, {globals_.begin(), globals_.end()}));
    TFB_ASSIGN_OR_RETURN(local_, FlashEngine::Create(device_, local_problem_,
                                                     LocalPattern(options_, p, orders_, globals_)));
    TFB_ASSIGN_OR_RETURN(global_,
                         FlashEngine::Create(device_, global_problem_, GlobalPattern(globals_, p)));
    is_marked_ = ReadsMask(options_) && !inputs.Get("global_mask").empty();
    if (ReadsMask(options_)) {
      TFB_RETURN_IF_ERROR(marked_.Setup(LocalPattern(options_, p, orders_, {})));
    }
    is_set_up_ = true;
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    FlashCall call = local_.NewCall(inputs, outputs);
    const bool dilated = std::any_of(options_.dilation.begin(), options_.dilation.end(),
                                     [](int64_t dilation) { return dilation > 1; });
    if (dilated) {
      const int64_t stride = orders_.size() == 1 ? 0 : problem().kv_tokens;
      call.key_order = {order_tokens_.data(), 0, stride};
      // A query head reads its key-value head's order.
      call.query_order = {order_tokens_.data(), 0, stride, problem().group()};
    }
    FlashCall of_globals = global_.NewCall(inputs, outputs);
    if (OwnProjections(options_)) {
      of_globals.q = inputs.Get("q_global");
      of_globals.k = inputs.Get("k_global");
      of_globals.v = inputs.Get("v_global");
    }
    const ConstTensorView global_mask = inputs.Get("global_mask");
    if (!global_mask.empty()) return marked_.Run(global_mask, call, of_globals, execution);
    TFB_RETURN_IF_ERROR(local_.Run(call, execution));
    if (globals_.empty()) return absl::OkStatus();
    of_globals.query_order = {global_tokens_.data(), 0, 0};
    return global_.Run(of_globals, execution);
  }

 private:
  LongformerOptions options_;
  Device device_;
  std::vector<int64_t> globals_;
  MarkedGlobals marked_;
  Problem local_problem_;
  Problem global_problem_;
  std::vector<ResidueOrder> orders_;   // one, or one per key-value head
  DeviceArray<int32_t> order_tokens_;  // the residue orders, one after the other
  DeviceArray<int32_t> global_tokens_;
  FlashEngine local_;
  FlashEngine global_;
  bool is_set_up_ = false;
  bool is_marked_ = false;  // Setup had a global_mask
};

absl::Status Check(const Problem& problem, const LongformerOptions& options) {
  if (problem.query_tokens != problem.kv_tokens) {
    return absl::UnimplementedError(absl::StrCat("longformer is self-attention: query_tokens is ",
                                                 problem.query_tokens, ", kv_tokens is ",
                                                 problem.kv_tokens));
  }
  const int64_t dilations = static_cast<int64_t>(options.dilation.size());
  if (dilations != 1 && dilations != problem.kv_heads) {
    return absl::InvalidArgumentError(absl::StrCat(
        "dilation has ", dilations, " entries; allowed are 1 or kv_heads, ", problem.kv_heads));
  }
  return absl::OkStatus();
}

// Tells for each token of each sequence whether it is global.
std::vector<std::vector<bool>> DefineGlobals(const Problem& problem,
                                             const LongformerOptions& options,
                                             const Inputs& inputs) {
  const KeyMask is_token(inputs);
  const ConstTensorView mask = inputs.Get("global_mask");
  std::vector<std::vector<bool>> is_global(problem.batch,
                                           std::vector<bool>(problem.kv_tokens, false));
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t g : options.globals) {
      if (g >= 0 && g < problem.kv_tokens) is_global[b][g] = true;
    }
    int64_t marked = 0;
    for (int64_t i = 0; !mask.empty() && i < problem.kv_tokens; ++i) {
      if (is_global[b][i] || !is_token(b, i) || *mask.At<uint8_t>(b, i) == 0) continue;
      if (marked++ < options.max_globals) is_global[b][i] = true;
    }
  }
  return is_global;
}

}  // namespace

Longformer::Longformer() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Longformer::ReadTensors(const Problem& problem,
                                                const LongformerOptions& options) const {
  std::vector<TensorSpec> tensors = QkvInputs(problem);
  if (OwnProjections(options)) {
    for (size_t n = 0; n < 3; ++n) {
      TensorSpec own = tensors[n];
      own.name += "_global";
      tensors.push_back(std::move(own));
    }
  }
  if (ReadsMask(options)) {
    tensors.push_back({"global_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
  }
  return tensors;
}

absl::StatusOr<std::unique_ptr<Layer>> Longformer::MakeLayer(const Problem& problem,
                                                             const LongformerOptions& options,
                                                             Device device, uint64_t) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  return std::make_unique<LongformerLayer>(problem, ReadTensors(problem, options), options, device);
}

absl::Status Longformer::Definition(const Problem& problem, const LongformerOptions& options,
                                    const NamedTensors&, const Inputs& inputs,
                                    const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem, options));
  const KeyMask is_token(inputs);
  const std::vector<std::vector<bool>> is_global = DefineGlobals(problem, options, inputs);
  const int64_t behind =
      problem.causal && options.one_sided >= 0 ? options.one_sided : options.window / 2;
  const auto sees = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!is_token(b, j) || (problem.causal && j > i)) return false;
    if (is_global[b][i] || is_global[b][j]) return true;
    const int64_t dilation =
        options.dilation.size() == 1 ? options.dilation[0] : options.dilation[h / problem.group()];
    return (i - j) % dilation == 0 && std::abs(i - j) / dilation <= behind;
  };
  const double scale = 1 / std::sqrt(static_cast<double>(problem.head_dim));
  const auto attend = [&](const Inputs& tensors, NamedTensors* result) {
    const DoubleTensor q(tensors.Get("q")), k(tensors.Get("k"));
    const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      if (!sees(b, h, i, j)) return kNotSeen;
      return scale * Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
    };
    DefineAttention(problem, tensors, request, score, result);
  };
  attend(inputs, outputs);
  if (!OwnProjections(options)) return absl::OkStatus();

  // Computes global rows again with their own tensors, all of which they see.
  Inputs own = inputs;
  for (const char* name : {"q", "k", "v"}) own.Set(name, inputs.Get(absl::StrCat(name, "_global")));
  NamedTensors global;
  attend(own, &global);
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  for (auto& [name, tensor] : *outputs) {
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (size_t r = 0; r < rows.size(); ++r) {
        if (!is_global[b][rows[r]]) continue;
        const auto row = [b, r](const auto& view) { return Slice(Slice(view, 0, b, 1), 2, r, 1); };
        CopyElements(row(std::as_const(global.at(name)).view()), row(tensor.view()));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tfb::longformer
