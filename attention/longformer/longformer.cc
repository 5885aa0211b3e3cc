#include "attention/longformer/longformer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/longformer/global_tokens.h"
#include "core/flash/flash_technique.h"
#include "core/schedule/residue_order.h"

namespace tfb::longformer {
namespace {

// Tells whether global rows read tensors of their own, which they do not where there can be none.
bool OwnProjections(const LongformerOptions& options) {
  const bool may_have_globals =
      options.max_globals > 0 ||
      std::any_of(options.globals.begin(), options.globals.end(), [](int64_t g) { return g >= 0; });
  return may_have_globals && options.projections == LongformerOptions::Projections::kOwn;
}

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

// The residue orders of the dilations: one, or one for each key-value head.
class Orders {
 public:
  Orders(const LongformerOptions& options, int64_t tokens) {
    for (const int64_t dilation : options.dilation) {
      orders_.emplace_back(tokens, dilation);
      is_dilated_ |= dilation > 1;
    }
  }
  int64_t size() const { return static_cast<int64_t>(orders_.size()); }
  const ResidueOrder& Of(int64_t kv_head) const { return orders_[kv_head % size()]; }
  // Returns the tokens of the orders' places; none where all are in their own order.
  std::vector<int32_t> Tokens() const {
    std::vector<int32_t> tokens;
    if (!is_dilated_) return tokens;
    for (const ResidueOrder& order : orders_) {
      tokens.insert(tokens.end(), order.tokens().begin(), order.tokens().end());
    }
    return tokens;
  }

 private:
  std::vector<ResidueOrder> orders_;
  bool is_dilated_ = false;
};

// Returns the pattern of tokens that are not global, over places of the residue orders: within one
// residue, places count steps of the dilation. Global tokens have no keys.
FunctionPattern LocalPattern(const LongformerOptions& options, const Problem& problem,
                             const Orders& orders, const std::vector<int64_t>& globals) {
  const int64_t half = options.window / 2;
  const int64_t behind = problem.causal && options.one_sided >= 0 ? options.one_sided : half;
  const int64_t ahead = problem.causal ? 0 : half, group = problem.group();
  const bool causal = problem.causal;
  const auto add_keys = [=](int64_t head, int64_t i, KeyList* keys) {
    const ResidueOrder& order = orders.Of(head / group);
    const int64_t query = order.Token(i);
    if (std::binary_search(globals.begin(), globals.end(), query)) return i + 1;
    const auto [begin, end] = order.Residue(i);
    keys->Add(std::max(begin, i - behind), std::min(end, i + ahead + 1));
    for (const int64_t g : globals) {
      if (!causal || g <= query) keys->Add(order.Place(g), order.Place(g) + 1);
    }
    return i + 1;
  };
  return FunctionPattern(add_keys, orders.size() == 1 ? 1 : problem.query_heads);
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

class Longformer : public FlashTechnique<LongformerOptions> {
 public:
  Longformer()
      : FlashTechnique(SparseSelfAttention(
            {"longformer", "attention", "Longformer sliding window with global tokens",
             "Beltagy, Peters, Cohan 2020, arXiv:2004.05150v2, section 3"},
            /*budget_option=*/"window", /*growth=*/1)) {}

 private:
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const LongformerOptions& options) const override {
    std::vector<TensorSpec> tensors = QkvInputs(problem);
    if (OwnProjections(options)) {
      for (size_t n = 0; n < 3; ++n) {
        TensorSpec own = tensors[n];
        own.name += "_global";
        tensors.push_back(std::move(own));
      }
    }
    if (options.max_globals > 0) {
      tensors.push_back({"global_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
    }
    return tensors;
  }

  absl::Status Check(const Problem& problem, const LongformerOptions& options) const override {
    const int64_t dilations = static_cast<int64_t>(options.dilation.size());
    if (dilations == 1 || dilations == problem.kv_heads) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "dilation has ", dilations, " entries; allowed are 1 or kv_heads, ", problem.kv_heads));
  }

  // Local rows, and global rows over them, which may have tensors of their own.
  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    const std::vector<int64_t> globals = Globals(job.options, job.problem.query_tokens);
    if (job.options.max_globals > 0) return DescribeMarked(job, globals);
    const Orders orders(job.options, job.problem.query_tokens);
    FlashPlan plan(job.problem);
    plan.Sees(LocalPattern(job.options, job.problem, orders, globals))
        .Order(orders.Tokens(), orders.size());
    if (globals.empty()) return plan;
    plan.AddRows(std::vector<int32_t>(globals.begin(), globals.end()));
    if (OwnProjections(job.options)) plan.Tensors("q_global", "k_global", "v_global");
    if (job.problem.causal) {
      plan.Sees(FunctionPattern([globals](int64_t, int64_t i, KeyList* keys) {
        keys->Add(0, globals[i] + 1);
        return i + 1;
      }));
    }
    return plan;
  }

  // With a mask local rows have two parts of disjoint keys: the window, whose keys that are global
  // are hidden, and the list of global tokens.
  static FlashPlan DescribeMarked(const Job& job, const std::vector<int64_t>& positions) {
    const Orders orders(job.options, job.problem.query_tokens);
    const auto find =
        std::make_shared<GlobalTokens>(job.problem, positions, job.options.max_globals);
    FlashPlan plan(job.problem);
    plan.ShareStep(find)
        .Sees(LocalPattern(job.options, job.problem, orders, {}))
        .Order(orders.Tokens(), orders.size())
        .KeyMask("local_keys");
    plan.AddPart().KeyOrder("global_tokens", find->queries().most).KeyMask("global_keys").Causal();
    plan.AddMarkedRows(find->queries()).Causal();
    if (OwnProjections(job.options)) plan.Tensors("q_global", "k_global", "v_global");
    return plan;
  }

  absl::Status Definition(const Problem& problem, const LongformerOptions& options,
                          const NamedTensors&, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const KeyMask is_token(inputs);
    const std::vector<std::vector<bool>> is_global = DefineGlobals(problem, options, inputs);
    const int64_t behind =
        problem.causal && options.one_sided >= 0 ? options.one_sided : options.window / 2;
    const auto sees = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      if (!is_token(b, j) || (problem.causal && j > i)) return false;
      if (is_global[b][i] || is_global[b][j]) return true;
      const int64_t dilation = options.dilation.size() == 1 ? options.dilation[0]
                                                            : options.dilation[h / problem.group()];
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
    NamedTensors global;
    attend(WithOwnTensors(inputs, {"q", "k", "v"}, "_global"), &global);
    ReplaceRows(
        problem, request, [&](int64_t b, int64_t i) { return is_global[b][i]; }, global, outputs);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Longformer>();

}  // namespace
}  // namespace tfb::longformer
