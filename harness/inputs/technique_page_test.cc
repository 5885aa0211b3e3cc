// The tensors and the page of a technique that is made for this: it has every kind of tensor,
// dimension, option and parameter.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/inputs/technique_help.h"
#include "harness/inputs/technique_tensors.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;

struct EveryOptions {
  int64_t window = 5;
  int64_t from = 0;
  bool shared = false;

  void Describe(OptionBinder& bind) {
    bind.Int("window", &window, 1, 40, "tokens that a query sees", {2, 4});
    bind.Int("from", &from, 0, 1, "the first of them");
    bind.Bool("shared", &shared, "whether heads share them");
  }
};

class EveryLayer : public Layer {
 public:
  EveryLayer(const Problem& p, const EveryOptions& options, uint64_t seed) : Layer(p, {}, {}) {
    const auto add = [&](const std::string& name, const Shape& shape, bool drawn) {
      Tensor& tensor = parameters_[name] = Tensor(DType::kF32, shape);
      Fill(tensor.view(), 1);
      if (drawn) FillNormal(&tensor, seed, name);
    };
    for (int layer = 0; layer < 3; ++layer) {
      add(absl::StrCat("layer", layer, ".w"), {p.model_dim(), 4 * p.model_dim()}, true);
    }
    add("slopes", {p.query_heads}, false);
    add("w", {options.window, p.head_dim + 1}, true);
    // Short sequences have another parameter in its place.
    add(p.query_tokens > 70 ? "long" : "short", {p.batch}, true);
  }
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }

 protected:
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution&) override {
    return absl::OkStatus();
  }
};

class EveryTechnique : public TechniqueOf<EveryOptions> {
 public:
  // `equal`: it refuses problems of other sizes for keys and values than for queries.
  explicit EveryTechnique(bool equal = false) : TechniqueOf(Info()), equal_(equal) {}

 protected:
  std::vector<TensorSpec> ReadTensors(const Problem& p, const EveryOptions& o) const override {
    return {{"q", {p.batch, p.query_heads, p.query_tokens, p.head_dim}},
            {"sizes", {p.kv_heads, p.kv_tokens, p.value_dim, p.model_dim()}, DType::kBF16},
            {"products",
             {p.query_heads * p.value_dim, p.kv_heads * p.head_dim, p.kv_heads * p.value_dim}},
            {"multiples", {2 * p.model_dim(), 3 * p.head_dim, 4 * p.query_tokens, 5 * p.batch}},
            {"options",
             {o.window, 7, p.query_tokens + o.window, 2 * o.window, o.from + 1},
             DType::kI32},
            {"from", {o.from}},
            {"u", {p.batch}, DType::kF32, false, Distribution::kUniform},
            {"g", {p.batch}, DType::kF32, false, Distribution::kGumbel},
            {"n", {p.batch}, DType::kF32, false, Distribution::kNormal},
            {"key_mask", {p.batch, p.kv_tokens}, DType::kU8, true}};
  }
  std::vector<TensorSpec> WrittenTensors(const Problem& p, const EveryOptions&) const override {
    return {{"out", {p.batch, p.query_tokens, p.model_dim()}},
            {"choices", {p.batch, p.query_tokens}, DType::kI32, true}};
  }
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& p, const EveryOptions& options,
                                                   Device, uint64_t seed) const override {
    if (equal_ && (p.kv_tokens != p.query_tokens || p.kv_heads != p.query_heads ||
                   p.value_dim != p.head_dim)) {
      return absl::UnimplementedError("sizes differ");
    }
    return std::make_unique<EveryLayer>(p, options, seed);
  }
  absl::Status Definition(const Problem&, const EveryOptions&, const NamedTensors&, const Inputs&,
                          const DefinitionRequest&, NamedTensors*) const override {
    return absl::UnimplementedError("has no definition");
  }

 private:
  static TechniqueInfo Info() {
    TechniqueInfo info;
    info.name = "every";
    info.title = "Every kind of tensor";
    info.citation = "Nobody 2020";
    return info;
  }
  bool equal_;
};

std::vector<std::string> Texts(const std::vector<NamedTensorSpec>& tensors) {
  std::vector<std::string> texts;
  for (const NamedTensorSpec& one : tensors) {
    texts.push_back(absl::StrCat(one.spec.name, " [", absl::StrJoin(one.symbols, ", "), "]",
                                 one.drawn ? " drawn" : ""));
  }
  return texts;
}

TechniqueTensors Describe(const Technique& technique, const Problem& problem,
                          const Options& options = {}) {
  return DescribeTensors(technique, technique.Canonical(options).value(), problem, 1).value();
}

// Many sizes are 4 or 16 here, and the largest channels are half of what there may be.
TEST(TechniquePage, EachDimensionIsNamedAfterTheOneSizeThatDecidesIt) {
  for (const Problem& problem :
       {Problem::SelfAttention(4, 4, 64, 4), Problem::SelfAttention(1, 1, 64, 256)}) {
    for (const std::string window : {"1", "2", "40"}) {
      const TechniqueTensors tensors =
          Describe(EveryTechnique(), problem, {{"window", window}, {"from", "1"}});
      EXPECT_THAT(
          Texts(tensors.inputs),
          ElementsAre("q [batch, query_heads, query_tokens, head_dim]",
                      "sizes [kv_heads, kv_tokens, value_dim, model_dim]",
                      "products [query_heads value_dim, kv_heads head_dim, kv_heads value_dim]",
                      absl::StrCat("multiples [2 model_dim, 3 head_dim, 4 query_tokens, ",
                                   5 * problem.batch, "]"),
                      absl::StrCat("options [window, 7, ", 64 + std::stoi(window), ", ",
                                   2 * std::stoi(window), ", 2]"),
                      "from [from]", "u [batch]", "g [batch]", "n [batch]",
                      "key_mask [batch, kv_tokens]"));
      EXPECT_THAT(Texts(tensors.outputs), ElementsAre("out [batch, query_tokens, model_dim]",
                                                      "choices [batch, query_tokens]"));
    }
  }
}

TEST(TechniquePage, ParametersAreNamedByWhatSmallProblemsTellWhereThoseHaveTheSame) {
  const Problem problem = Problem::SelfAttention(3, 2, 40, 8);
  const std::vector<std::string> expected = {"layer0.w [model_dim, 4 model_dim] drawn",
                                             "layer1.w [model_dim, 4 model_dim] drawn",
                                             "layer2.w [model_dim, 4 model_dim] drawn",
                                             "short [batch] drawn",
                                             "slopes [query_heads]",
                                             "w [window, 9] drawn"};
  EXPECT_EQ(Texts(Describe(EveryTechnique(), problem).parameters), expected);
  // The sizes that such a technique wants to be equal cannot be told apart, and the first is taken.
  EXPECT_EQ(Texts(Describe(EveryTechnique(/*equal=*/true), problem).parameters), expected);
  // A long sequence has a parameter that the small problems lack: they tell nothing, but what is
  // drawn is found out all the same.
  const Problem other = Problem::SelfAttention(3, 2, 80, 8);
  EXPECT_THAT(
      Texts(Describe(EveryTechnique(), other).parameters),
      ElementsAre("layer0.w [16, 64] drawn", "layer1.w [16, 64] drawn", "layer2.w [16, 64] drawn",
                  "long [3] drawn", "slopes [2]", "w [5, 9] drawn"));
  // Keys that are longer than queries stay so.
  Problem cross = problem;
  cross.kv_tokens = 41;
  EXPECT_EQ(Texts(Describe(EveryTechnique(), cross).parameters), expected);
  const TechniqueTensors refused = Describe(EveryTechnique(/*equal=*/true), cross);
  EXPECT_EQ(refused.parameters_status.message(), "sizes differ");
  EXPECT_TRUE(refused.parameters.empty());
  EXPECT_THAT(DrawnParameters(EveryTechnique(), {}, problem, {}, 1), ElementsAre());
}

TEST(TechniquePage, LayersAreJoinedWhereAllElseIsEqual) {
  const auto tensor = [](const std::string& name, Shape shape = {3}, const char* symbol = "a",
                         DType dtype = DType::kF32, bool drawn = true) {
    return NamedTensorSpec{{name, std::move(shape), dtype}, {symbol}, drawn};
  };
  const auto names = [](const std::vector<NamedTensorSpec>& tensors) {
    std::vector<std::string> all;
    for (const NamedTensorSpec& one : JoinLayers(tensors)) all.push_back(one.spec.name);
    return all;
  };
  EXPECT_THAT(names({}), ElementsAre());
  EXPECT_THAT(names({tensor("layer3.w"), tensor("layer10.w"), tensor("layer9.w")}),
              ElementsAre("layer{3,9,10}.w"));
  EXPECT_THAT(names({tensor("layer8.w"), tensor("layer10.w"), tensor("b"), tensor("layer9.w")}),
              ElementsAre("layer{8..10}.w", "b"));
  EXPECT_THAT(names({tensor("head1.w"), tensor("layer2.w"), tensor("head2.w")}),
              ElementsAre("head{1..2}.w", "layer2.w"));
  // Neither a number without letters, nor digits among letters, nor a name without a part behind the
  // dot is of a layer.
  EXPECT_THAT(
      names({tensor("1.w"), tensor("2.w"), tensor("a1b.w"), tensor("a2b.w"), tensor("layer1"),
             tensor("layer2"), tensor("a.layer1"), tensor("a.layer2")}),
      ElementsAre("1.w", "2.w", "a1b.w", "a2b.w", "layer1", "layer2", "a.layer1", "a.layer2"));
  EXPECT_THAT(names({tensor("layer1.w"), tensor("layer2.w", {4}), tensor("layer3.w", {3}, "b"),
                     tensor("layer4.w", {3}, "a", DType::kF16),
                     tensor("layer5.w", {3}, "a", DType::kF32, false)}),
              ElementsAre("layer1.w", "layer2.w", "layer3.w", "layer4.w", "layer5.w"));
  const std::string huge = "layer99999999999999999999.w";
  EXPECT_THAT(names({tensor("layer1.w"), tensor(huge)}), ElementsAre("layer1.w", huge));
}

std::string Page(Job job, const Options& options) {
  const EveryTechnique technique;
  job.technique = &technique;
  job.options = technique.Canonical(options).value();
  return TechniqueHelp(job, "by default").value();
}

TEST(TechniquePage, HasEveryOptionTensorAndParameterInTables) {
  Job job;
  job.problem = Problem::SelfAttention(3, 2, 40, 8, /*causal=*/true, DType::kBF16);
  EXPECT_EQ(
      Page(job, {{"window", "4"}}),
      "every: Every kind of tensor\n"
      "Nobody 2020\n"
      "\n"
      "Options\n"
      "option  given  default  range         meaning\n"
      "window  4      5        1 to 40       tokens that a query sees\n"
      "from           0        0 to 1        the first of them\n"
      "shared         false    true | false  whether heads share them\n"
      "\n"
      "Sizes by default: batch 3, query_heads 2, kv_heads 2, query_tokens 40, kv_tokens 40, "
      "head_dim 8,\n"
      "  value_dim 8, model_dim 16 = query_heads head_dim; causal\n"
      "\n"
      "Inputs\n"
      "input      shape                 here               type  is                   meaning\n"
      "q          [batch, query_heads,  [3, 2, 40, 8]      f32   required             queries\n"
      "             query_tokens,\n"
      "             head_dim]\n"
      "sizes      [kv_heads,            [2, 40, 8, 16]     bf16  required             see the text "
      "above\n"
      "             kv_tokens,\n"
      "             value_dim,\n"
      "             model_dim]\n"
      "products   [query_heads          [16, 16, 16]       f32   required             see the text "
      "above\n"
      "             value_dim,\n"
      "             kv_heads head_dim,\n"
      "             kv_heads\n"
      "             value_dim]\n"
      "multiples  [2 model_dim, 3       [32, 24, 160, 15]  f32   required             see the text "
      "above\n"
      "             head_dim, 4\n"
      "             query_tokens, 15]\n"
      "options    [window, 7, 44, 8,    [4, 7, 44, 8, 1]   i32   required             see the text "
      "above\n"
      "             1]\n"
      "from       [from]                [0]                f32   required             see the text "
      "above\n"
      "u          [batch]               [3]                f32   drawn where absent:  see the text "
      "above\n"
      "                                                            uniform between 0\n"
      "                                                            and 1\n"
      "g          [batch]               [3]                f32   drawn where absent:  see the text "
      "above\n"
      "                                                            Gumbel\n"
      "n          [batch]               [3]                f32   drawn where absent:  see the text "
      "above\n"
      "                                                            N(0, 1)\n"
      "key_mask   [batch, kv_tokens]    [3, 40]            u8    optional             1 where the "
      "key is a\n"
      "                                                                                 token, 0 "
      "where it\n"
      "                                                                                 is "
      "padding\n"
      "\n"
      "Outputs\n"
      "output   shape                             here         type  is        meaning\n"
      "out      [batch, query_tokens, model_dim]  [3, 40, 16]  f32   always    the result\n"
      "choices  [batch, query_tokens]             [3, 40]      i32   optional  see the text above\n"
      "\n"
      "Parameters (--parameters=FILE gives them, --dump_parameters=FILE writes them)\n"
      "parameter      shape                     here      type  is\n"
      "layer{0..2}.w  [model_dim, 4 model_dim]  [16, 64]  f32   drawn from the seed\n"
      "short          [batch]                   [3]       f32   drawn from the seed\n"
      "slopes         [query_heads]             [2]       f32   not drawn\n"
      "w              [window, 9]               [4, 9]    f32   drawn from the seed\n"
      "\n"
      "Example: write a file of drawn tensors with these names and shapes, put your own in their\n"
      "place, and apply the technique to them.\n"
      "\n"
      "  bazel run //harness:apply -- --technique=every:window=4 --causal --dtype=bf16 "
      "--draw_input=in.safetensors\n"
      "  bazel run //harness:apply -- --technique=every:window=4 --causal --dtype=bf16 "
      "--input=in.safetensors --output=out.safetensors\n");
  job.problem = Problem::SelfAttention(3, 2, 40, 8);
  const std::string plain = Page(job, {});
  EXPECT_EQ(plain.substr(0, plain.find("Inputs")),
            "every: Every kind of tensor\n"
            "Nobody 2020\n"
            "\n"
            "Options\n"
            "option  default  range         meaning\n"
            "window  5        1 to 40       tokens that a query sees\n"
            "from    0        0 to 1        the first of them\n"
            "shared  false    true | false  whether heads share them\n"
            "\n"
            "Sizes by default: batch 3, query_heads 2, kv_heads 2, query_tokens 40, kv_tokens 40, "
            "head_dim 8,\n"
            "  value_dim 8, model_dim 16 = query_heads head_dim; not causal\n"
            "\n");
  EXPECT_EQ(
      plain.substr(plain.find("Example")),
      "Example: write a file of drawn tensors with these names and shapes, put your own in their\n"
      "place, and apply the technique to them.\n"
      "\n"
      "  bazel run //harness:apply -- --technique=every --draw_input=in.safetensors\n"
      "  bazel run //harness:apply -- --technique=every --input=in.safetensors "
      "--output=out.safetensors\n");
}

TEST(TechniquePage, ALineOfDrawnParametersNamesEightAtMost) {
  NamedTensors parameters;
  std::vector<std::string> drawn, expected;
  for (int n = 0; n < 10; ++n) {
    drawn.push_back(std::string("p") + static_cast<char>('a' + n));
    parameters[drawn.back()] = Tensor(DType::kF32, {2});
    expected.push_back(drawn.back() + " [2]");
    const size_t named = std::min(expected.size(), size_t{8});
    const std::string more =
        expected.size() > 8 ? absl::StrCat(" and ", expected.size() - 8, " more") : "";
    EXPECT_THAT(
        DrawnLines({}, drawn, parameters, 3),
        ElementsAre(absl::StrCat("parameters are drawn from seed 3: ",
                                 absl::StrJoin(expected.begin(), expected.begin() + named, "; "),
                                 more, "; give them by these names in --parameters")));
  }
  EXPECT_THAT(DrawnLines({}, {}, parameters, 3), ElementsAre());
  EXPECT_THAT(DrawnLines({{"x", {1, 2}, DType::kBF16}}, {}, {}, 3),
              ElementsAre("input x [1, 2] bf16 is drawn from seed 3, N(0, 1); give it as tensor "
                          "\"x\" in --input"));
}

}  // namespace
}  // namespace tfb
