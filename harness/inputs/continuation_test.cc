#include "harness/inputs/continuation.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr int64_t kChannels = 3, kMemory = 4;

// A technique that declares what it hands over, and does nothing. Its state are two rows, whatever
// was read; its memory are the last four of all tokens, which the option counts.
class Carrying : public Technique {
 public:
  // `state_channels` other than kChannels: the state that comes out cannot be given.
  explicit Carrying(int64_t state_channels = kChannels)
      : Technique(Info()), state_channels_(state_channels) {}

  absl::StatusOr<Options> Canonical(const Options& options) const override {
    Options all = options;
    all.insert({{"given_state", "0"}, {"given_tokens", "0"}, {"rounds", "1"}});
    return all;
  }
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& p,
                                                     const Options& options) const override {
    std::vector<TensorSpec> specs = {{"x", {p.batch, p.query_tokens, kChannels}},
                                     {"table", {5}},
                                     {"key_mask", {p.batch, p.kv_tokens}, DType::kU8, true}};
    const int64_t state = Number(options, "given_state"), tokens = Number(options, "given_tokens");
    if (state > 0) specs.push_back({"state", {p.batch, state, kChannels}});
    if (tokens > 0) specs.push_back({"memory", {p.batch, std::min(tokens, kMemory), kChannels}});
    return specs;
  }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& p,
                                                      const Options& options) const override {
    const int64_t tokens = Number(options, "given_tokens") + p.query_tokens;
    return std::vector<TensorSpec>{
        {"out", {p.batch, p.query_tokens, kChannels}},
        {"pairs", {p.query_tokens, p.kv_tokens}},
        {"last", {p.batch}},
        {"state", {p.batch, 2, state_channels_}, DType::kF32, true},
        {"memory", {p.batch, std::min(tokens, kMemory), kChannels}, DType::kF32, true}};
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem&, const Options&, Device,
                                                uint64_t) const override {
    return absl::UnimplementedError("has no layer");
  }
  absl::Status Define(const Problem&, const Options&, const NamedTensors&, const Inputs&,
                      const DefinitionRequest&, NamedTensors*) const override {
    return absl::UnimplementedError("has no definition");
  }

 private:
  static TechniqueInfo Info() {
    TechniqueInfo info;
    info.name = "carrying";
    for (const char* option : {"rounds", "given_state", "given_tokens"}) {
      info.options.push_back({option, "int", "0", "", "", {}});
    }
    return info;
  }
  static int64_t Number(const Options& options, const std::string& name) {
    int64_t number = 0;
    const auto found = options.find(name);
    return found != options.end() && absl::SimpleAtoi(found->second, &number) ? number : 0;
  }
  int64_t state_channels_;
};

// Returns a tensor whose elements are numbered from `first` on.
Tensor Numbered(const Shape& shape, double first = 0) {
  Tensor tensor(DType::kF32, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    tensor.view().Set(i, first + static_cast<double>(i));
  }
  return tensor;
}

void ExpectSame(const ConstTensorView& view, const ConstTensorView& expected) {
  ASSERT_EQ(view.shape(), expected.shape());
  ForEachOffset(view, expected,
                [&](int64_t a, int64_t b) { EXPECT_EQ(view.Get(a), expected.Get(b)) << a; });
}

class Continuation : public ::testing::Test {
 protected:
  Continuation() {
    cut_.technique = &technique_;
    cut_.whole = Problem::SelfAttention(2, 1, 9, kChannels);
    cut_.first = 5;
    inputs_["x"] = Numbered({2, 9, kChannels});
    inputs_["table"] = Numbered({5});
  }

  Carrying technique_;
  CutSequence cut_;
  NamedTensors inputs_;
};

TEST_F(Continuation, OptionsAreKnownByWhatTheyAdd) {
  const auto handed_over = HandedOverBy(technique_, cut_.whole, {});
  ASSERT_TRUE(handed_over.ok()) << handed_over.status();
  EXPECT_THAT(*handed_over, ElementsAre(Pair("given_state", ElementsAre("state")),
                                        Pair("given_tokens", ElementsAre("memory"))));
}

TEST_F(Continuation, EachRunHasItsPartOfTheTokens) {
  EXPECT_EQ(cut_.Part(false), Problem::SelfAttention(2, 1, 5, kChannels));
  EXPECT_EQ(cut_.Part(true), Problem::SelfAttention(2, 1, 4, kChannels));
  const Inputs first = cut_.FirstInputs(ViewsOf(inputs_)).value();
  ExpectSame(first.Get("x"), Slice(std::as_const(inputs_.at("x")).view(), 1, 0, 5));
  ExpectSame(first.Get("table"), inputs_.at("table").view());
  EXPECT_EQ(first.Find("key_mask"), nullptr);
}

TEST_F(Continuation, TheSecondRunIsGivenWhatTheFirstOneEndsWith) {
  // The state is of two rows; of the memory the number counts the tokens before.
  EXPECT_THAT(*cut_.SecondOptions(), ElementsAre(Pair("given_state", "2"),
                                                 Pair("given_tokens", "5"), Pair("rounds", "1")));
  cut_.options = {{"given_tokens", "3"}};
  EXPECT_EQ(cut_.SecondOptions()->at("given_tokens"), "8");
  cut_.options = {{"given_tokens", "many"}};
  EXPECT_EQ(cut_.SecondOptions().status().message(), "option given_tokens is no number");
  cut_.options.clear();

  NamedTensors outputs;
  outputs["state"] = Numbered({2, 2, kChannels}, 100);
  EXPECT_EQ(cut_.SecondInputs(ViewsOf(inputs_), outputs).status().message(),
            "the first run has no output for the input memory");
  outputs["memory"] = Numbered({2, kMemory, kChannels}, 200);
  const Inputs second = cut_.SecondInputs(ViewsOf(inputs_), outputs).value();
  ExpectSame(second.Get("x"), Slice(std::as_const(inputs_.at("x")).view(), 1, 5, 4));
  ExpectSame(second.Get("table"), inputs_.at("table").view());
  for (const char* name : {"state", "memory"}) {
    ExpectSame(second.Get(name), outputs.at(name).view());
  }

  const Carrying wider(kChannels + 1);
  cut_.technique = &wider;
  EXPECT_EQ(cut_.SecondOptions().status().message(),
            "no value of given_state makes inputs of the outputs' shapes");
}

TEST_F(Continuation, AnInputThatDiffersInMoreThanTheTokensCannotBeCut) {
  inputs_["x"] = Numbered({2, 9, kChannels + 1});
  EXPECT_EQ(cut_.FirstInputs(ViewsOf(inputs_)).status().message(), "input x cannot be cut");
  inputs_["x"] = Numbered({2, 9});
  EXPECT_EQ(cut_.FirstInputs(ViewsOf(inputs_)).status().message(), "input x cannot be cut");
}

TEST_F(Continuation, OutputsAreJoinedAlongTheTokensOrAreTheSecondRuns) {
  NamedTensors first, second;
  first["out"] = Numbered({2, 5, kChannels});
  second["out"] = Numbered({2, 4, kChannels}, 100);
  for (NamedTensors* of : {&first, &second}) {
    const double begin = of == &first ? 0 : 100;
    const int64_t tokens = of == &first ? 5 : 4;
    (*of)["pairs"] = Numbered({tokens, tokens}, begin);
    (*of)["last"] = Numbered({2}, begin);
    (*of)["state"] = Numbered({2, 2, kChannels}, begin);
    (*of)["memory"] = Numbered({2, kMemory, kChannels}, begin);
  }
  const auto joined = cut_.Joined(first, second);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->count("pairs"), 0u);  // nobody has the pairs of both parts
  EXPECT_EQ(joined->size(), 4u);
  const ConstTensorView out = joined->at("out").view();
  ExpectSame(Slice(out, 1, 0, 5), first.at("out").view());
  ExpectSame(Slice(out, 1, 5, 4), second.at("out").view());
  for (const char* name : {"last", "state", "memory"}) {
    ExpectSame(joined->at(name).view(), second.at(name).view());
  }
  second["out"] = Numbered({2, 3, kChannels});
  EXPECT_EQ(cut_.Joined(first, second).status().message(),
            "out of the parts are [2, 5, 3] and [2, 3, 3], of the whole [2, 9, 3]");
  second.erase("out");
  EXPECT_EQ(cut_.Joined(first, second).status().message(), "the second run has no out");
}

}  // namespace
}  // namespace tfb
