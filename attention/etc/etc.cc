#include "attention/etc/etc.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/flash/flash_technique.h"

namespace tfb::etc {
namespace {

bool HasDistances(const EtcOptions& options) { return options.max_distance >= 0; }
bool HasLabels(const EtcOptions& options) { return HasDistances(options) || options.segments; }
bool HasVectors(const EtcOptions& options) { return options.labels != EtcOptions::Labels::kBiases; }
bool HasBiases(const EtcOptions& options) { return options.labels != EtcOptions::Labels::kVectors; }
bool IsSeparate(const EtcOptions& options) {
  return options.projections == EtcOptions::Projections::kOwn;
}

constexpr const char* kPieces[] = {"g2g", "g2l", "l2g", "l2l"};
const char* Piece(bool of_long, bool to_long) { return kPieces[2 * of_long + to_long]; }

// Returns the pattern of queries and keys that begin at other tokens than the first.
FunctionPattern PatternOf(int64_t globals, int64_t radius, const TokenRange& queries,
                          const TokenRange& keys) {
  return FunctionPattern([=](int64_t, int64_t query, KeyList* list) {
    const int64_t i = queries.begin + query;
    if (i < globals) {
      list->AddAll();
      return globals - queries.begin;
    }
    list->Add(-keys.begin, globals - keys.begin);
    list->Add(i - radius - keys.begin, i + radius + 1 - keys.begin);
    return query + 1;
  });
}

// The plan of ETC. Labels and masks differ from piece to piece, so that each piece is a part of its
// query's softmax. But where only distances have labels, and long queries are beyond the radius of
// all global tokens, relative keys beyond the radius are zero as those pairs need, and one part has
// both pieces. Without labels a query type has one part, and both types one softmax if they have the
// same keys.
class EtcPlan {
 public:
  EtcPlan(const Problem& problem, const EtcOptions& options, const NamedTensors& parameters)
      : problem_(problem),
        options_(options),
        parameters_(parameters),
        globals_(std::min(options.global_tokens, problem.kv_tokens)),
        plan_(FlashPlan::Empty(problem)) {
    if (HasDistances(options)) {
      const int64_t reach = std::min(options.radius, problem.kv_tokens - globals_ - 1);
      within_globals_ = Distances("g2g", globals_ - 1);
      within_long_ = Distances("l2l", reach);
    }
  }

  FlashPlan Describe() {
    const int64_t tokens = problem_.query_tokens;
    const TokenRange all = {0, tokens}, global = {0, globals_}, local = {globals_, tokens};
    if (options_.masks) {
      for (const TokenRange& queries : {global, local}) Add(queries, {global, local});
    } else if (HasLabels(options_)) {
      const int64_t far = options_.segments ? tokens : std::min(tokens, globals_ + options_.radius);
      Add(global, {global, local});
      Add({globals_, far}, {global, local});
      Add({far, tokens}, {all});
    } else if (IsSeparate(options_)) {
      for (const TokenRange& queries : {global, local}) Add(queries, {all});
    } else {
      Add(all, {all});
    }
    return std::move(plan_);
  }

 private:
  using Terms = std::vector<std::shared_ptr<ScoreTerm>>;

  bool IsGlobal(const TokenRange& tokens) const { return tokens.begin < globals_; }

  // Adds a softmax without the parts that have no keys, and none where there are no queries.
  void Add(const TokenRange& queries, const std::vector<TokenRange>& parts) {
    if (queries.size() == 0) return;
    plan_.AddRows(queries);
    for (const TokenRange& keys : parts) {
      if (keys.size() == 0) continue;
      plan_.AddPart(keys).Sees(PatternOf(globals_, options_.radius, queries, keys));
      if (IsSeparate(options_) && IsGlobal(queries)) plan_.Tensors("q", "k_global", "v_global");
      if (options_.masks) plan_.HidePairs(MaskOf(!IsGlobal(queries), !IsGlobal(keys)));
      AddLabels(queries, keys);
    }
  }

  MaskInput MaskOf(bool of_long, bool to_long) const {
    MaskInput mask = {absl::StrCat(Piece(of_long, to_long), "_mask")};
    if (of_long && to_long) {
      mask.is_band = true;
      mask.low = -options_.radius;
      mask.high = options_.radius;
    }
    return mask;
  }

  void AddLabels(const TokenRange& queries, const TokenRange& keys) {
    const bool has_both = keys.begin < globals_ && keys.end > globals_;
    if (has_both || IsGlobal(queries) == IsGlobal(keys)) {
      for (const auto& term : IsGlobal(queries) ? within_globals_ : within_long_) plan_.Share(term);
    } else if (options_.segments) {
      const std::string piece = Piece(!IsGlobal(queries), !IsGlobal(keys));
      static const Tensor* const kNone = new Tensor();
      plan_.Add<LabelTerm>(HasVectors(options_) ? parameters_.at(piece) : *kNone,
                           HasBiases(options_) ? &parameters_.at(piece + "_bias") : nullptr,
                           "segment");
    }
  }

  // Returns the terms of the distances of a piece, for pairs at most `reach` apart.
  Terms Distances(const std::string& piece, int64_t reach) const {
    Terms terms;
    const int64_t m = options_.max_distance;
    if (HasVectors(options_)) {
      const auto make = [=, table = parameters_.at(piece).view()](ThreadPool*) {
        return RelativeKeys(table, -reach, reach,
                            [m](int64_t offset) { return std::clamp(offset, -m, m) + m; });
      };
      terms.push_back(std::make_shared<RelativeKeyTerm>(make, /*vectors=*/2 * m + 1));
    }
    if (HasBiases(options_)) {
      const double scale = 1 / std::sqrt(static_cast<double>(problem_.head_dim));
      const auto bias = [=, biases = parameters_.at(piece + "_bias").view()](
                            int64_t head, int64_t distance) -> Traced {
        if (std::abs(distance) > reach) return 0.0;
        return scale * Trace(*biases.At<float>(head, std::clamp(-distance, -m, m) + m));
      };
      terms.push_back(std::make_shared<DistanceBias>(bias));
    }
    return terms;
  }

  const Problem& problem_;
  const EtcOptions& options_;
  const NamedTensors& parameters_;
  int64_t globals_;
  FlashPlan plan_;
  Terms within_globals_;
  Terms within_long_;
};

// The tensors that the definition reads for the labels of a piece. One that is absent is empty.
struct PieceTables {
  DoubleTensor vectors;  // [query_heads, labels, head_dim]
  DoubleTensor biases;   // [query_heads, labels]

  PieceTables() = default;
  PieceTables(const std::string& piece, const NamedTensors& parameters)
      : vectors(parameters, piece), biases(parameters, piece + "_bias") {}
  // Returns q . P + the number of a label.
  double Score(const double* q, int64_t head_dim, int64_t h, int64_t label) const {
    const double product = vectors.size() == 0 ? 0 : Dot(q, vectors.Row(h, label), head_dim);
    return product + (biases.size() == 0 ? 0 : biases.Row(h)[label]);
  }
};

class Etc : public FlashTechnique<EtcOptions> {
 public:
  Etc()
      : FlashTechnique(SparseSelfAttention(
            {"etc", "attention", "ETC global-local attention",
             "Ainslie, Ontanon et al. 2020, arXiv:2004.08483, section 3"},
            /*budget_option=*/"radius", /*growth=*/1, Masking::kBidirectional)) {}

 private:
  static constexpr double kDeviation = 0.5;  // of labels

  // Where `projections` is own, global queries read k_global and v_global; with `segments` there is
  // the input segment, and with `masks` the masks of the pieces.
  std::vector<TensorSpec> ReadTensors(const Problem& problem,
                                      const EtcOptions& options) const override {
    std::vector<TensorSpec> tensors = QkvInputs(problem);
    if (IsSeparate(options)) {
      for (const size_t n : {1, 2}) {
        TensorSpec own = tensors[n];
        own.name += "_global";
        tensors.push_back(std::move(own));
      }
    }
    if (options.segments) {
      tensors.push_back({"segment", {problem.batch, problem.kv_tokens}, DType::kI32});
    }
    if (!options.masks) return tensors;
    const int64_t global = std::min(options.global_tokens, problem.kv_tokens);
    const int64_t sizes[] = {global, problem.kv_tokens - global};
    for (const bool of_long : {false, true}) {
      for (const bool to_long : {false, true}) {
        const int64_t keys = of_long && to_long ? 2 * options.radius + 1 : sizes[to_long];
        tensors.push_back({absl::StrCat(Piece(of_long, to_long), "_mask"),
                           {problem.batch, sizes[of_long], keys},
                           DType::kU8,
                           /*optional=*/true});
      }
    }
    return tensors;
  }

  // Vectors have the problem's dtype, like the keys to which they are added.
  absl::StatusOr<NamedTensors> Draw(const Job& job) const override {
    const EtcOptions& options = job.options;
    const int64_t heads = job.problem.query_heads;
    std::vector<NormalParameter> tables;
    const auto add = [&](const std::string& piece, int64_t labels) {
      const Shape shape = {heads, labels, job.problem.head_dim};
      if (HasVectors(options)) tables.push_back({piece, shape, kDeviation, job.problem.dtype});
      if (HasBiases(options)) {
        tables.push_back({piece + "_bias", {heads, labels}, kDeviation});
      }
    };
    for (const char* piece : {"g2g", "l2l"}) {
      if (HasDistances(options)) add(piece, 2 * options.max_distance + 1);
    }
    for (const char* piece : {"g2l", "l2g"}) {
      if (options.segments) add(piece, 2);
    }
    return DrawNormal(job.seed, tables);
  }

  absl::StatusOr<FlashPlan> Describe(const Job& job) const override {
    return EtcPlan(job.problem, job.options, job.parameters).Describe();
  }

  absl::Status Definition(const Problem& problem, const EtcOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override {
    const int64_t g = options.global_tokens, m = options.max_distance;
    PieceTables tables[2][2];  // [query is long][key is long]
    ConstTensorView masks[2][2];
    for (const bool of_long : {false, true}) {
      for (const bool to_long : {false, true}) {
        tables[of_long][to_long] = PieceTables(Piece(of_long, to_long), parameters);
        masks[of_long][to_long] = inputs.Get(absl::StrCat(Piece(of_long, to_long), "_mask"));
      }
    }
    const DoubleTensor q(inputs.Get("q"));
    const ConstTensorView segment = inputs.Get("segment");
    const KeyMask is_token(inputs);
    const auto sees = [&](int64_t b, int64_t i, int64_t j) {
      const bool in_window = i < g || j < g || std::abs(i - j) <= options.radius;
      if (!in_window || !is_token(b, j)) return false;
      const ConstTensorView& mask = masks[i >= g][j >= g];
      if (mask.empty()) return true;
      const int64_t row = i < g ? i : i - g;
      const int64_t column = j < g ? j : i < g ? j - g : j - i + options.radius;
      return *mask.At<uint8_t>(b, row, column) != 0;
    };
    const auto label_score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const bool same_input = (i >= g) == (j >= g);
      if (same_input ? m < 0 : !options.segments) return 0.0;
      const int64_t label = same_input ? std::min(std::max(j - i, -m), m) + m
                                       : *segment.At<int32_t>(b, i) == *segment.At<int32_t>(b, j);
      return tables[i >= g][j >= g].Score(q.Row(b, h, i), problem.head_dim, h, label);
    };
    const auto attend = [&](const Inputs& tensors, NamedTensors* result) {
      const DoubleTensor k(tensors.Get("k"));
      const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
        if (!sees(b, i, j)) return kNotSeen;
        const double content =
            Dot(q.Row(b, h, i), k.Row(b, h / problem.group(), j), problem.head_dim);
        return (content + label_score(b, h, i, j)) /
               std::sqrt(static_cast<double>(problem.head_dim));
      };
      DefineAttention(problem, tensors, request, score, result);
    };
    attend(inputs, outputs);
    if (!IsSeparate(options)) return absl::OkStatus();

    // Computes global rows again with their own keys and values.
    NamedTensors global;
    attend(WithOwnTensors(inputs, {"k", "v"}, "_global"), &global);
    ReplaceRows(
        problem, request, [g](int64_t, int64_t i) { return i < g; }, global, outputs);
    return absl::OkStatus();
  }
};

const bool registered = RegisterTechnique<Etc>();

}  // namespace
}  // namespace tfb::etc
