#include "attention/etc/etc.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/flash/flash_parts.h"
#include "core/random.h"

namespace tfb::etc {
namespace {

const bool registered = RegisterTechnique<Etc>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "etc";
  info.family = "attention";
  info.title = "ETC global-local attention";
  info.citation = "Ainslie, Ontanon et al. 2020, arXiv:2004.08483, section 3";
  info.exactness = Exactness::kExact;
  info.budget_option = "radius";
  info.growth = 1;
  info.devices = {Device::kCpu, Device::kCuda};
  info.supports_causal = false;
  return info;
}

bool HasDistances(const EtcOptions& options) { return options.max_distance >= 0; }
bool HasLabels(const EtcOptions& options) { return HasDistances(options) || options.segments; }
bool HasVectors(const EtcOptions& options) { return options.labels != EtcOptions::Labels::kBiases; }
bool HasBiases(const EtcOptions& options) { return options.labels != EtcOptions::Labels::kVectors; }
bool IsSeparate(const EtcOptions& options) {
  return options.projections == EtcOptions::Projections::kOwn;
}

constexpr const char* kPieces[] = {"g2g", "g2l", "l2g", "l2l"};
const char* Piece(bool of_long, bool to_long) { return kPieces[2 * of_long + to_long]; }

// Tokens begin to end - 1.
struct Tokens {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// A pattern of queries that begin at one token and keys that begin at another.
class EtcPattern : public Pattern {
 public:
  EtcPattern(int64_t global_tokens, int64_t radius, const Tokens& queries, const Tokens& keys)
      : globals_(global_tokens), radius_(radius), queries_(queries), keys_(keys) {}

  bool Allows(int64_t, int64_t query, int64_t key) const override {
    const int64_t i = queries_.begin + query, j = keys_.begin + key;
    return i < globals_ || j < globals_ || std::abs(i - j) <= radius_;
  }
  void KeyRanges(int64_t, int64_t query_begin, int64_t query_end,
                 std::vector<KeyRange>* ranges) const override {
    const int64_t first = queries_.begin + query_begin, last = queries_.begin + query_end - 1;
    if (first < globals_) {
      ranges->push_back({0, keys_.size(), last < globals_});
      return;
    }
    ranges->push_back(Range({0, globals_}, true));
    ranges->push_back(Range({std::max(globals_, first - radius_), last + radius_ + 1}, false));
    ranges->push_back(Range({std::max(globals_, last - radius_), first + radius_ + 1}, true));
  }

 private:
  KeyRange Range(const Tokens& tokens, bool all) const {
    return {tokens.begin - keys_.begin, tokens.end - keys_.begin, all};
  }

  int64_t globals_;
  int64_t radius_;
  Tokens queries_;
  Tokens keys_;
};

// Queries that share the parts of a softmax: calls of engine flash over the same queries.
struct QueryGroup {
  Tokens queries;
  std::vector<Tokens> keys;  // keys of each part
  std::vector<Problem> problems;
  FlashParts softmax;
  std::vector<FlashCall> calls;  // room for the calls of a Run
};

// The layer of ETC. Labels and masks differ from piece to piece, so that each piece is a part of
// its query's softmax. But where only distances have labels, and long queries are beyond the
// radius of all global tokens, relative keys beyond the radius are zero as those pairs need, and
// one call has both pieces. Without labels a query type is one part; and on the CPU, where the
// long rows of global tokens delay no others, both types are one call if they have the same keys.
class EtcLayer : public Layer {
 public:
  EtcLayer(const Problem& problem, std::vector<TensorSpec> inputs, const EtcOptions& options,
           NamedTensors parameters, Device device)
      : Layer(problem, std::move(inputs), AttentionOutputs(problem)),
        options_(options),
        device_(device) {
    parameters_ = std::move(parameters);
    const int64_t tokens = problem.query_tokens;
    globals_ = std::min(options.global_tokens, tokens);
    const Tokens all = {0, tokens}, global = {0, globals_}, local = {globals_, tokens};
    if (options.masks) {
      for (const Tokens& queries : {global, local}) AddGroup(queries, {global, local});
      return;
    }
    if (device == Device::kCpu && !HasLabels(options) && !IsSeparate(options)) {
      AddGroup(all, {all});
      return;
    }
    if (!HasLabels(options)) {
      for (const Tokens& queries : {global, local}) AddGroup(queries, {all});
      return;
    }
    const int64_t far = options.segments ? tokens : std::min(tokens, globals_ + options.radius);
    AddGroup(global, {global, local});
    AddGroup({globals_, far}, {global, local});
    AddGroup({far, tokens}, {all});
  }

  size_t workspace_bytes(int threads) const override {
    size_t bytes = 0;
    for (const QueryGroup& group : groups_) {
      bytes = std::max(bytes, FlashParts::WorkspaceBytes(device_, group.problems,
                                                         HasDistances(options_), threads));
    }
    return bytes;
  }

  Cost cost() const override {
    const Problem& p = problem();
    Cost cost;
    if (is_set_up_ && !is_masked_) cost.flops = 2.0 * static_cast<double>(p.batch) * MultiplyAdds();
    cost.bytes = TensorBytes();
    return cost;
  }

 protected:
  absl::Status DoSetup(const Inputs& inputs, const Execution&) override {
    is_masked_ = std::any_of(std::begin(kPieces), std::end(kPieces), [&](const char* piece) {
      return !inputs.Get(absl::StrCat(piece, "_mask")).empty();
    });
    if (HasDistances(options_)) {
      const int64_t reach = std::min(options_.radius, problem().kv_tokens - globals_ - 1);
      if (HasVectors(options_)) {
        within_globals_ = Distances("g2g", globals_ - 1);
        within_long_ = Distances("l2l", reach);
      }
      if (HasBiases(options_)) {
        globals_bias_ = DistanceBiases("g2g_bias", globals_ - 1);
        long_bias_ = DistanceBiases("l2l_bias", reach);
      }
    }
    if (options_.segments) {
      global_to_long_ = SegmentVectors("g2l");
      long_to_global_ = SegmentVectors("l2g");
    }
    for (QueryGroup& group : groups_) {
      std::vector<FlashEngine> engines;
      for (size_t n = 0; n < group.keys.size(); ++n) {
        const EtcPattern pattern(globals_, options_.radius, group.queries, group.keys[n]);
        TFB_ASSIGN_OR_RETURN(FlashEngine engine,
                             FlashEngine::Create(device_, group.problems[n], pattern,
                                                 RuleOf(group.queries, group.keys[n])));
        engines.push_back(std::move(engine));
      }
      group.softmax = FlashParts(device_, std::move(engines));
    }
    is_set_up_ = true;
    return absl::OkStatus();
  }

  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    for (QueryGroup& group : groups_) {
      const bool own_keys = IsSeparate(options_) && IsGlobal(group.queries);
      const ConstTensorView k = inputs.Get(own_keys ? "k_global" : "k");
      const ConstTensorView v = inputs.Get(own_keys ? "v_global" : "v");
      for (size_t n = 0; n < group.calls.size(); ++n) {
        FlashCall& call = group.calls[n];
        call = group.softmax.engines()[n].NewCall();
        call.q = Of(group.queries, 2, inputs.Get("q"));
        call.k = Of(group.keys[n], 2, k);
        call.v = Of(group.keys[n], 2, v);
        call.key_mask = Of(group.keys[n], 1, inputs.Get("key_mask"));
        call.query_ids = Of(group.queries, 1, inputs.Get("segment"));
        call.key_ids = Of(group.keys[n], 1, inputs.Get("segment"));
        call.out = Of(group.queries, 2, outputs.Get("out"));
        call.log_sum_exp = Of(group.queries, 2, outputs.Get("log_sum_exp"));
        if (options_.masks) call.tokens.mask = MaskOf(inputs, group.queries, group.keys[n]);
      }
      TFB_RETURN_IF_ERROR(group.softmax.Run(group.calls, execution));
    }
    return absl::OkStatus();
  }

 private:
  // Adds a group without the parts that have no keys, and none where there are no queries.
  void AddGroup(const Tokens& queries, const std::vector<Tokens>& keys) {
    if (queries.size() == 0) return;
    QueryGroup group;
    group.queries = queries;
    for (const Tokens& part : keys) {
      if (part.size() == 0) continue;
      group.keys.push_back(part);
      Problem& of_part = group.problems.emplace_back(problem());
      of_part.query_tokens = queries.size();
      of_part.kv_tokens = part.size();
    }
    group.calls.resize(group.keys.size());
    groups_.push_back(std::move(group));
  }

  // Returns the multiply-adds of a batch row: two products a pair, and one of each query with each
  // label's vector.
  double MultiplyAdds() const {
    const Problem& p = problem();
    double pairs = 0, labels = 0;
    for (const QueryGroup& group : groups_) {
      for (const FlashEngine& engine : group.softmax.engines()) {
        pairs += engine.schedule().KeptPairs(p.query_heads);
        const ScoreRule rule = engine.NewCall().rule;
        const int64_t vectors = (rule.relative_keys ? 2 * options_.max_distance + 1 : 0) +
                                (rule.label_keys.keys && HasVectors(options_) ? 2 : 0);
        labels += static_cast<double>(p.query_heads * group.queries.size() * vectors);
      }
    }
    return static_cast<double>(p.head_dim + p.value_dim) * pairs +
           static_cast<double>(p.head_dim) * labels;
  }
  bool IsGlobal(const Tokens& tokens) const { return tokens.begin < globals_; }

  // Returns the relative keys of pairs at most `reach` apart.
  RelativeKeys Distances(const char* table, int64_t reach) const {
    const int64_t m = options_.max_distance;
    return RelativeKeys(parameters_.at(table).view(), -reach, reach,
                        [m](int64_t distance) { return std::clamp(distance, -m, m) + m; });
  }

  // Returns the terms of scores by distance for pairs at most `reach` apart.
  DistanceTable DistanceBiases(const char* name, int64_t reach) const {
    const Problem& p = problem();
    const ConstTensorView biases = parameters_.at(name).view();
    const int64_t m = options_.max_distance;
    const float scale = 1 / std::sqrt(static_cast<float>(p.head_dim));
    return DistanceTable(p.query_heads, p.query_tokens, p.kv_tokens,
                         [&](int64_t head, int64_t distance) {
                           if (std::abs(distance) > reach) return 0.0f;
                           return scale * *biases.At<float>(head, std::clamp(distance, -m, m) + m);
                         });
  }

  // Returns the vectors of the segments' labels in f32, which are 0 where labels are biases alone.
  Tensor SegmentVectors(const char* name) const {
    if (HasVectors(options_)) return parameters_.at(name).CloneAs(DType::kF32);
    Tensor zeros(DType::kF32, {problem().query_heads, 2, problem().head_dim});
    Fill(zeros.view(), 0);
    return zeros;
  }

  PairMask MaskOf(const Inputs& inputs, const Tokens& queries, const Tokens& keys) const {
    const bool of_long = !IsGlobal(queries), to_long = !IsGlobal(keys);
    const ConstTensorView view = inputs.Get(absl::StrCat(Piece(of_long, to_long), "_mask"));
    if (view.empty()) return {};
    const uint8_t* data = static_cast<const uint8_t*>(view.data);
    if (!of_long || !to_long) return {data, view.stride(0), view.stride(1), view.stride(2)};
    // Key i + c - w of query i is column c.
    const int64_t w = options_.radius, column = view.stride(2);
    return {data + w * column, view.stride(0), view.stride(1) - column, column, -w, w};
  }

  ScoreRule RuleOf(const Tokens& queries, const Tokens& keys) const {
    ScoreRule rule;
    if (!HasLabels(options_)) return rule;
    const bool has_both = keys.begin < globals_ && keys.end > globals_;
    if (has_both || IsGlobal(queries) == IsGlobal(keys)) {
      if (HasDistances(options_)) {
        const bool global = IsGlobal(queries);
        if (HasVectors(options_)) rule.relative_keys = global ? &within_globals_ : &within_long_;
        if (HasBiases(options_)) rule.bias = global ? &globals_bias_ : &long_bias_;
        rule.query_position = queries.begin - keys.begin;
      }
    } else if (options_.segments) {
      const bool global = IsGlobal(queries);
      const Tensor& table = global ? global_to_long_ : long_to_global_;
      rule.label_keys = {table.span<float>().data(), table.dim(0)};
      if (HasBiases(options_)) {
        const Tensor& biases = parameters_.at(global ? "g2l_bias" : "l2g_bias");
        rule.label_keys.biases = biases.span<float>().data();
      }
    }
    return rule;
  }

  template <class View>
  static View Of(const Tokens& tokens, int axis, const View& view) {
    return view.empty() ? view : Slice(view, axis, tokens.begin, tokens.size());
  }

  EtcOptions options_;
  Device device_;
  int64_t globals_;
  std::vector<QueryGroup> groups_;
  RelativeKeys within_globals_;
  RelativeKeys within_long_;
  Tensor global_to_long_;  // f32
  Tensor long_to_global_;
  DistanceTable globals_bias_;
  DistanceTable long_bias_;
  bool is_set_up_ = false;
  bool is_masked_ = false;  // Setup had a mask of a piece
};

absl::Status Check(const Problem& problem) {
  if (problem.query_tokens == problem.kv_tokens) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("etc is self-attention: query_tokens is ",
                                               problem.query_tokens, ", kv_tokens is ",
                                               problem.kv_tokens));
}

// Draws the parameters of a piece's labels: vectors in the problem's dtype, like the keys to which
// they are added, and biases.
absl::Status DrawTables(const std::string& piece, const Problem& problem, const EtcOptions& options,
                        int64_t labels, uint64_t seed, NamedTensors* parameters) {
  const auto draw = [&](const std::string& name, DType dtype, const Shape& shape) -> absl::Status {
    TFB_ASSIGN_OR_RETURN(Tensor table, Tensor::Allocate(dtype, shape));
    FillNormal(&table, seed, name, /*mean=*/0, /*deviation=*/0.5);
    (*parameters)[name] = std::move(table);
    return absl::OkStatus();
  };
  if (HasVectors(options)) {
    const Shape shape = {problem.query_heads, labels, problem.head_dim};
    TFB_RETURN_IF_ERROR(draw(piece, problem.dtype, shape));
  }
  if (!HasBiases(options)) return absl::OkStatus();
  return draw(piece + "_bias", DType::kF32, {problem.query_heads, labels});
}

// The tensors that the definition reads for the labels of a piece. One that is absent is empty.
struct PieceTables {
  DoubleTensor vectors;  // [query_heads, labels, head_dim]
  DoubleTensor biases;   // [query_heads, labels]

  static PieceTables Of(const char* piece, const NamedTensors& parameters) {
    PieceTables tables;
    const auto vectors = parameters.find(piece),
               biases = parameters.find(absl::StrCat(piece, "_bias"));
    if (vectors != parameters.end()) tables.vectors = DoubleTensor(vectors->second.view());
    if (biases != parameters.end()) tables.biases = DoubleTensor(biases->second.view());
    return tables;
  }
  // Returns q . P + the number of a label.
  double Score(const double* q, int64_t head_dim, int64_t h, int64_t label) const {
    const double product = vectors.size() == 0 ? 0 : Dot(q, vectors.Row(h, label), head_dim);
    return product + (biases.size() == 0 ? 0 : biases.Row(h)[label]);
  }
};

}  // namespace

Etc::Etc() : TechniqueOf(Info()) {}

std::vector<TensorSpec> Etc::ReadTensors(const Problem& problem, const EtcOptions& options) const {
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

absl::StatusOr<std::unique_ptr<Layer>> Etc::MakeLayer(const Problem& problem,
                                                      const EtcOptions& options, Device device,
                                                      uint64_t seed) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  NamedTensors parameters;
  if (HasDistances(options)) {
    const int64_t labels = 2 * options.max_distance + 1;
    for (const char* name : {"g2g", "l2l"}) {
      TFB_RETURN_IF_ERROR(DrawTables(name, problem, options, labels, seed, &parameters));
    }
  }
  if (options.segments) {
    for (const char* name : {"g2l", "l2g"}) {
      TFB_RETURN_IF_ERROR(DrawTables(name, problem, options, 2, seed, &parameters));
    }
  }
  return std::make_unique<EtcLayer>(problem, ReadTensors(problem, options), options,
                                    std::move(parameters), device);
}

absl::Status Etc::Definition(const Problem& problem, const EtcOptions& options,
                             const NamedTensors& parameters, const Inputs& inputs,
                             const DefinitionRequest& request, NamedTensors* outputs) const {
  TFB_RETURN_IF_ERROR(Check(problem));
  const int64_t g = options.global_tokens, m = options.max_distance;
  PieceTables tables[2][2];  // [query is long][key is long]
  ConstTensorView masks[2][2];
  for (const bool of_long : {false, true}) {
    for (const bool to_long : {false, true}) {
      tables[of_long][to_long] = PieceTables::Of(Piece(of_long, to_long), parameters);
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
      return (content + label_score(b, h, i, j)) / std::sqrt(static_cast<double>(problem.head_dim));
    };
    DefineAttention(problem, tensors, request, score, result);
  };
  attend(inputs, outputs);
  if (!IsSeparate(options)) return absl::OkStatus();

  // Computes global rows again with their own keys and values.
  Inputs own = inputs;
  for (const char* name : {"k", "v"}) own.Set(name, inputs.Get(absl::StrCat(name, "_global")));
  NamedTensors global;
  attend(own, &global);
  const std::vector<int64_t> rows = RowsOf(request, problem.query_tokens);
  const int64_t global_rows = std::lower_bound(rows.begin(), rows.end(), g) - rows.begin();
  for (auto& [name, tensor] : *outputs) {
    CopyElements(Slice(std::as_const(global.at(name)).view(), 2, 0, global_rows),
                 Slice(tensor.view(), 2, 0, global_rows));
  }
  return absl::OkStatus();
}

}  // namespace tfb::etc
