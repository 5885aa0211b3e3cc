#include "attention/etc/etc.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "attention/dense/dense.h"
#include "core/run_allocations.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::etc {
namespace {

const Technique& Etc() { return FindTechnique("etc"); }

using ::testing::HasSubstr;
using Keys = std::vector<int64_t>;

const Options kNoLabels = {{"max_distance", "-1"}};

Options With(Options options, const Options& more) {
  options.insert(more.begin(), more.end());
  return options;
}

NamedTensors RunEtc(const Problem& problem, const Inputs& inputs, const Options& options,
                    Device device = Device::kCpu, const NamedTensors* parameters = nullptr) {
  RunRequest request{options, device};
  request.parameters = parameters;
  return RunTechnique(Etc(), problem, inputs, request).value();
}
NamedTensors RunDense(const Problem& problem, const Inputs& inputs) {
  return RunTechnique(dense::Dense(), problem, inputs).value();
}

// Assigns long tokens to the global ones in runs of equal length, and every seventh to none.
NamedTensors Random(const Problem& problem, const Options& options, int64_t globals) {
  NamedTensors inputs = RandomInputs(Etc().InputSpecs(problem, options).value(), 11);
  const auto segment = inputs.find("segment");
  if (segment == inputs.end()) return inputs;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t i = 0; i < problem.kv_tokens; ++i) {
      int64_t id = i;
      if (i >= globals) id = (i - globals) * globals / (problem.kv_tokens - globals);
      if (i >= globals && (i + b) % 7 == 0) id = -1;
      *segment->second.view().MutableAt<int32_t>(b, i) = static_cast<int32_t>(id);
    }
  }
  return inputs;
}

void ExpectNear(const NamedTensors& ours, const NamedTensors& expected, double bound = 1e-5) {
  for (const char* name : {"out", "log_sum_exp"}) {
    EXPECT_LE(MaxDifference(ours.at(name).view(), expected.at(name).view()), bound) << name;
  }
}

Keys Seen(int64_t tokens, int64_t i, const Options& options) {
  return KeysSeen(Etc(), Problem::SelfAttention(1, 1, tokens, 8), options, 0, i);
}

TEST(Etc, LongTokensSeeGlobalOnesAndTheirNeighbours) {
  for (const char* max_distance : {"-1", "3"}) {
    const Options options = {
        {"global_tokens", "2"}, {"radius", "1"}, {"max_distance", max_distance}};
    EXPECT_EQ(Seen(10, 0, options).size(), 10u);
    EXPECT_EQ(Seen(10, 1, options).size(), 10u);
    EXPECT_EQ(Seen(10, 2, options), (Keys{0, 1, 2, 3}));
    EXPECT_EQ(Seen(10, 5, options), (Keys{0, 1, 4, 5, 6}));
    EXPECT_EQ(Seen(10, 9, options), (Keys{0, 1, 8, 9}));
  }
}

TEST(Etc, ARadiusCoveringTheLongInputEqualsDense) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16);
  const NamedTensors inputs = Random(problem, kNoLabels, 0);
  for (const char* radius : {"145", "1000000"}) {
    for (const char* globals : {"0", "5", "150", "1000"}) {
      const Options options = With(kNoLabels, {{"radius", radius}, {"global_tokens", globals}});
      if (std::string(globals) == "0" && std::string(radius) == "145") continue;
      ExpectNear(RunEtc(problem, ViewsOf(inputs), options), RunDense(problem, ViewsOf(inputs)));
    }
  }
}

TEST(Etc, ZeroTablesEqualNoLabels) {
  const Problem problem = Problem::SelfAttention(2, 2, 200, 16);
  const Options plain = {{"radius", "20"}, {"global_tokens", "9"}};
  for (const Device device : TestedDevices()) {
    const Options labelled = With(plain, {{"segments", "true"}});
    const NamedTensors inputs = Random(problem, labelled, 9);
    NamedTensors zeros;
    for (const auto& [name, rows] : {std::pair{"g2g", 25}, {"l2l", 25}, {"g2l", 2}, {"l2g", 2}}) {
      Fill((zeros[name] = Tensor(DType::kF32, {2, rows, 16})).view(), 0);
    }
    Inputs of_plain;
    for (const char* name : {"q", "k", "v"}) of_plain.Set(name, inputs.at(name).view());
    ExpectNear(RunEtc(problem, ViewsOf(inputs), labelled, device, &zeros),
               RunEtc(problem, of_plain, With(kNoLabels, plain), device));
  }
}

TEST(Etc, HiddenGlobalTokensDoNotReachLongOnes) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  const Options options = {{"radius", "10"}, {"global_tokens", "7"}};
  NamedTensors inputs = Random(problem, options, 7);
  Tensor mask(DType::kU8, {1, 100});
  for (int64_t j = 0; j < 100; ++j) mask.span<uint8_t>()[j] = j >= 7;
  inputs["key_mask"] = std::move(mask);
  const NamedTensors before = RunEtc(problem, ViewsOf(inputs), options);
  for (const char* name : {"k", "v"}) Fill(Slice(inputs[name].view(), 2, 0, 7), 100);
  const NamedTensors after = RunEtc(problem, ViewsOf(inputs), options);
  EXPECT_EQ(MaxDifference(Slice(before.at("out").view(), 2, 7, 93),
                          Slice(after.at("out").view(), 2, 7, 93)),
            0);
}

TEST(Etc, WithoutGlobalTokensItIsLocalAttention) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  const Options options = With(kNoLabels, {{"radius", "10"}, {"global_tokens", "0"}});
  const NamedTensors inputs = Random(problem, options, 0);
  const NamedTensors ours = RunEtc(problem, ViewsOf(inputs), options);
  for (const int64_t i : {0, 3, 50, 99}) {
    const int64_t first = std::max<int64_t>(0, i - 10);
    Problem alone = problem;
    alone.query_tokens = 1;
    alone.kv_tokens = std::min<int64_t>(99, i + 10) - first + 1;
    const NamedTensors dense =
        RunDense(alone, {{"q", Slice(inputs.at("q").view(), 2, i, 1)},
                         {"k", Slice(inputs.at("k").view(), 2, first, alone.kv_tokens)},
                         {"v", Slice(inputs.at("v").view(), 2, first, alone.kv_tokens)}});
    EXPECT_LE(MaxDifference(Slice(ours.at("out").view(), 2, i, 1), dense.at("out").view()), 1e-5);
  }
}

TEST(Etc, SeparateProjectionsAreOneCallForEachTypeOfQuery) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16);
  const Options shared = {{"radius", "10"}, {"global_tokens", "7"}, {"segments", "true"}};
  const Options separate = With(shared, {{"projections", "own"}});
  const NamedTensors inputs = Random(problem, separate, 7);
  const NamedTensors ours = RunEtc(problem, ViewsOf(inputs), separate);
  Inputs local, global;
  for (const char* name : {"q", "segment"}) {
    local.Set(name, inputs.at(name).view());
    global.Set(name, inputs.at(name).view());
  }
  for (const std::string name : {"k", "v"}) {
    local.Set(name, inputs.at(name).view());
    global.Set(name, inputs.at(name + "_global").view());
  }
  const NamedTensors of_local = RunEtc(problem, local, shared);
  const NamedTensors of_global = RunEtc(problem, global, shared);
  for (const char* name : {"out", "log_sum_exp"}) {
    const ConstTensorView view = ours.at(name).view();
    EXPECT_EQ(MaxDifference(Slice(view, 2, 0, 7), Slice(of_global.at(name).view(), 2, 0, 7)), 0);
    EXPECT_EQ(MaxDifference(Slice(view, 2, 7, 143), Slice(of_local.at(name).view(), 2, 7, 143)), 0);
  }
}

TEST(Etc, SequencesUpToTheGlobalTokensAreAllGlobal) {
  for (const int64_t tokens : {1, 4, 16}) {
    const Problem problem = Problem::SelfAttention(1, 2, tokens, 16);
    const Options options = {{"radius", "0"}, {"segments", "true"}};
    const NamedTensors inputs = Random(problem, options, tokens);
    for (int64_t i = 0; i < tokens; ++i) {
      EXPECT_EQ(
          static_cast<int64_t>(Seen(tokens, i, {{"radius", "0"}, {"max_distance", "2"}}).size()),
          tokens);
    }
    ExpectNear(RunEtc(problem, ViewsOf(inputs), options),
               DefineTechnique(Etc(), problem, ViewsOf(inputs), {options}).value(), 2e-5);
  }
}

// With q = (2, 0, 0, 0), head_dim 4 and keys of 0 the score of a pair is the first number of its
// label's vector. There are two global tokens and three long ones, of which the last belongs to
// none.
TEST(Etc, LabelsAreThoseOfTheirPiece) {
  const Problem problem = Problem::SelfAttention(1, 1, 5, 4);
  const Options options = {
      {"radius", "1"}, {"global_tokens", "2"}, {"max_distance", "1"}, {"segments", "true"}};
  NamedTensors inputs = Random(problem, options, 2);
  Fill(inputs["q"].view(), 0);
  Fill(Slice(inputs["q"].view(), 3, 0, 1), 2);
  Fill(inputs["k"].view(), 0);
  const int32_t segments[] = {0, 1, 0, 1, -1};
  std::copy_n(segments, 5, inputs["segment"].span<int32_t>().data());
  NamedTensors tables;
  const auto set = [&](const char* name, const std::vector<float>& values) {
    Tensor& table = tables[name] = Tensor(DType::kF32, {1, static_cast<int64_t>(values.size()), 4});
    Fill(table.view(), 0);
    for (size_t n = 0; n < values.size(); ++n) table.span<float>()[n * 4] = values[n];
  };
  set("g2g", {-1, 0.5f, 1});
  set("l2l", {-2, 0.25f, 2});
  set("g2l", {0.1f, 0.7f});
  set("l2g", {0.2f, 0.9f});
  const std::vector<std::vector<double>> scores = {{0.5, 1, 0.7, 0.1, 0.1},
                                                   {-1, 0.5, 0.1, 0.7, 0.1},
                                                   {0.9, 0.2, 0.25, 2},
                                                   {0.2, 0.9, -2, 0.25, 2},
                                                   {0.2, 0.2, -2, 0.25}};
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunEtc(problem, ViewsOf(inputs), options, device, &tables);
    for (int64_t i = 0; i < 5; ++i) {
      double sum = 0;
      for (const double score : scores[i]) sum += std::exp(score);
      EXPECT_NEAR(ours.at("log_sum_exp").span<float>()[i], std::log(sum), 1e-6) << i;
    }
  }
}

// As above, with numbers as labels: the score is half of them, since head_dim is 4.
TEST(Etc, BiasesAreAddedToTheProductsBeforeTheScale) {
  const Problem problem = Problem::SelfAttention(1, 1, 5, 4);
  for (const char* labels : {"biases", "both"}) {
    const Options options = {{"radius", "1"},
                             {"global_tokens", "2"},
                             {"max_distance", "1"},
                             {"segments", "true"},
                             {"labels", labels}};
    NamedTensors inputs = Random(problem, options, 2);
    Fill(inputs["q"].view(), 0);
    const int32_t segments[] = {0, 1, 0, 1, -1};
    std::copy_n(segments, 5, inputs["segment"].span<int32_t>().data());
    NamedTensors biases;
    const auto set = [&](const char* name, const std::vector<float>& values) {
      Tensor& table = biases[name] = Tensor(DType::kF32, {1, static_cast<int64_t>(values.size())});
      std::copy(values.begin(), values.end(), table.span<float>().begin());
    };
    set("g2g_bias", {-1, 0.5f, 1});
    set("l2l_bias", {-2, 0.25f, 2});
    set("g2l_bias", {0.1f, 0.7f});
    set("l2g_bias", {0.2f, 0.9f});
    const std::vector<std::vector<double>> numbers = {{0.5, 1, 0.7, 0.1, 0.1},
                                                      {-1, 0.5, 0.1, 0.7, 0.1},
                                                      {0.9, 0.2, 0.25, 2},
                                                      {0.2, 0.9, -2, 0.25, 2},
                                                      {0.2, 0.2, -2, 0.25}};
    for (const Device device : TestedDevices()) {
      const NamedTensors ours = RunEtc(problem, ViewsOf(inputs), options, device, &biases);
      for (int64_t i = 0; i < 5; ++i) {
        double sum = 0;
        for (const double number : numbers[i]) sum += std::exp(number / 2);
        EXPECT_NEAR(ours.at("log_sum_exp").span<float>()[i], std::log(sum), 1e-6) << i;
      }
    }
  }
}

TEST(Etc, LabelsOfBothKindsHaveBothParameters) {
  const auto names = [](const Options& options) {
    const auto layer =
        Etc().Create(Problem::SelfAttention(1, 1, 40, 4), options, Device::kCpu, 1).value();
    std::vector<std::string> result;
    for (const auto& entry : layer->parameters()) result.push_back(entry.first);
    return result;
  };
  using testing::ElementsAre;
  EXPECT_THAT(names({}), ElementsAre("g2g", "l2l"));
  EXPECT_THAT(names({{"labels", "biases"}}), ElementsAre("g2g_bias", "l2l_bias"));
  EXPECT_THAT(
      names({{"labels", "both"}, {"segments", "true"}}),
      ElementsAre("g2g", "g2g_bias", "g2l", "g2l_bias", "l2g", "l2g_bias", "l2l", "l2l_bias"));
}

// Draws masks of all pieces, in which one pair in three is hidden.
void AddMasks(const Problem& problem, const Options& options, NamedTensors* inputs) {
  const std::vector<TensorSpec> specs = Etc().InputSpecs(problem, options).value();
  for (const TensorSpec& spec : specs) {
    if (spec.name.size() != 8 || spec.name.substr(3) != "_mask" || spec.name == "key_mask")
      continue;
    Tensor& mask = (*inputs)[spec.name] = Tensor(DType::kU8, spec.shape);
    for (int64_t n = 0; n < mask.num_elements(); ++n) mask.span<uint8_t>()[n] = n * n % 31 % 3 != 1;
  }
}

TEST(Etc, MasksHidePairsOfTheirPiece) {
  const int64_t tokens = 9, g = 2, w = 1;
  Problem problem = Problem::SelfAttention(1, 1, tokens, 8);
  problem.value_dim = tokens;
  const Options options = {{"radius", "1"}, {"global_tokens", "2"}, {"masks", "true"}};
  NamedTensors inputs = Random(problem, options, g);
  Fill(inputs["v"].view(), 0);
  for (int64_t j = 0; j < tokens; ++j) *inputs["v"].view().MutableAt<float>(0, 0, j, j) = 1;
  const auto seen = [&](const NamedTensors& given, int64_t i, Device device) {
    const NamedTensors outputs = RunEtc(problem, ViewsOf(given), options, device);
    Keys keys;
    for (int64_t j = 0; j < tokens; ++j) {
      if (*outputs.at("out").view().At<float>(0, 0, i, j) > 0) keys.push_back(j);
    }
    return keys;
  };
  const auto hide = [&](const char* name, int64_t row, int64_t column) {
    const std::string piece = name;
    const int64_t rows = piece[0] == 'g' ? g : tokens - g;
    const int64_t columns = piece == "l2l_mask" ? 2 * w + 1 : piece[2] == 'g' ? g : tokens - g;
    Tensor& mask = inputs[name];
    if (mask.empty()) Fill((mask = Tensor(DType::kU8, {1, rows, columns})).view(), 1);
    *mask.view().MutableAt<uint8_t>(0, row, column) = 0;
  };
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    for (const char* name : {"g2g_mask", "g2l_mask", "l2g_mask", "l2l_mask"}) inputs.erase(name);
    EXPECT_EQ(seen(inputs, 0, device).size(), 9u);
    EXPECT_EQ(seen(inputs, 5, device), (Keys{0, 1, 4, 5, 6}));
    hide("g2g_mask", 0, 1);
    EXPECT_EQ(seen(inputs, 0, device), (Keys{0, 2, 3, 4, 5, 6, 7, 8}));
    EXPECT_EQ(seen(inputs, 1, device).size(), 9u);
    hide("g2l_mask", 0, 3);  // token 5
    EXPECT_EQ(seen(inputs, 0, device), (Keys{0, 2, 3, 4, 6, 7, 8}));
    EXPECT_EQ(seen(inputs, 5, device), (Keys{0, 1, 4, 5, 6}));
    hide("l2g_mask", 3, 0);
    EXPECT_EQ(seen(inputs, 5, device), (Keys{1, 4, 5, 6}));
    hide("l2l_mask", 3, 2);  // tokens 5 and 6
    EXPECT_EQ(seen(inputs, 5, device), (Keys{1, 4, 5}));
    EXPECT_EQ(seen(inputs, 6, device), (Keys{0, 1, 5, 6, 7}));
    hide("l2l_mask", 0, 0);  // beyond the first long token there is none to hide
    EXPECT_EQ(seen(inputs, 2, device), (Keys{0, 1, 2, 3}));
  }
}

TEST(Etc, ARowWithoutAnyPairIsZero) {
  const Problem problem = Problem::SelfAttention(1, 2, 40, 8);
  const Options options = {{"radius", "5"}, {"global_tokens", "3"}, {"masks", "true"}};
  NamedTensors inputs = Random(problem, options, 3);
  AddMasks(problem, options, &inputs);
  for (const char* name : {"l2g_mask", "l2l_mask"}) Fill(Slice(inputs[name].view(), 1, 7, 1), 0);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunEtc(problem, ViewsOf(inputs), options, device);
    EXPECT_EQ(MaxAbs(Slice(ours.at("out").view(), 2, 10, 1)), 0);
    EXPECT_EQ(ours.at("log_sum_exp").span<float>()[10], -INFINITY);
  }
}

TEST(Etc, WithMasksRunAllocatesNothing) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16);
  const Options options = {{"radius", "10"}, {"masks", "true"}, {"labels", "both"}};
  NamedTensors inputs = Random(problem, options, 16);
  AddMasks(problem, options, &inputs);
  const auto layer = Etc().Create(problem, options, Device::kCpu, 1).value();
  EXPECT_EQ(AllocationsOfRun(*layer, ViewsOf(inputs)).value(), 0);
}

TEST(Etc, MasksOfOnesChangeNothing) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16);
  const Options plain = {{"radius", "10"}, {"global_tokens", "7"}, {"segments", "true"}};
  const Options masked = With(plain, {{"masks", "true"}});
  NamedTensors inputs = Random(problem, plain, 7);
  const NamedTensors expected = RunEtc(problem, ViewsOf(inputs), plain);
  ExpectNear(RunEtc(problem, ViewsOf(inputs), masked), expected);
  AddMasks(problem, masked, &inputs);
  for (const char* name : {"g2g_mask", "g2l_mask", "l2g_mask", "l2l_mask"}) {
    Fill(inputs.at(name).view(), 1);
  }
  ExpectNear(RunEtc(problem, ViewsOf(inputs), masked), expected);
}

TEST(Etc, MatchesItsDefinitionWithMasksAndBiases) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Problem problem = Problem::SelfAttention(2, 4, 200, 24, /*causal=*/false, dtype);
    problem.kv_heads = 2;
    for (const Options& options :
         {Options{{"radius", "32"}, {"max_distance", "-1"}, {"masks", "true"}},
          Options{{"radius", "90"}, {"labels", "biases"}, {"global_tokens", "70"}},
          Options{{"radius", "20"}, {"labels", "both"}, {"masks", "true"}, {"segments", "true"}},
          Options{
              {"radius", "5"}, {"labels", "biases"}, {"projections", "own"}, {"segments", "true"}},
          Options{
              {"radius", "300"}, {"labels", "both"}, {"masks", "true"}, {"global_tokens", "0"}}}) {
      NamedTensors inputs = Random(problem, options, 16);
      AddMasks(problem, options, &inputs);
      Tensor padding(DType::kU8, {2, 200});
      for (int64_t n = 0; n < 400; ++n) padding.span<uint8_t>()[n] = n % 5 != 3 && n % 200 < 170;
      inputs["key_mask"] = std::move(padding);
      const NamedTensors expected =
          DefineTechnique(Etc(), problem, ViewsOf(inputs), {options}).value();
      // 16-bit outputs are rounded; so are the weights of values on a GPU.
      const double rounding = dtype == DType::kF32 ? 0 : 4 * UnitRoundoff(dtype);
      for (const Device device : TestedDevices()) {
        SCOPED_TRACE(ToString(options));
        ExpectNear(RunEtc(problem, ViewsOf(inputs), options, device), expected,
                   2 * Fp32Bound(inputs.at("v").view()) + rounding * MaxAbs(inputs.at("v").view()));
      }
    }
  }
}

TEST(Etc, MatchesItsDefinitionWithMixedOptions) {
  Problem problem = Problem::SelfAttention(2, 4, 200, 24);
  problem.kv_heads = 2;
  for (const Options& options :
       {Options{{"radius", "32"}, {"max_distance", "-1"}},
        Options{{"radius", "32"}, {"max_distance", "-1"}, {"segments", "true"}},
        Options{{"radius", "90"}, {"max_distance", "70"}, {"global_tokens", "70"}},
        Options{{"radius", "5"}, {"projections", "own"}, {"segments", "true"}},
        Options{{"radius", "9"}, {"max_distance", "0"}, {"global_tokens", "1"}}}) {
    NamedTensors inputs = Random(problem, options, 16);
    Tensor mask(DType::kU8, {2, 200});
    for (int64_t n = 0; n < 400; ++n) mask.span<uint8_t>()[n] = n % 5 != 3 && n % 200 < 170;
    inputs["key_mask"] = std::move(mask);
    const NamedTensors expected =
        DefineTechnique(Etc(), problem, ViewsOf(inputs), {options}).value();
    for (const Device device : TestedDevices()) {
      SCOPED_TRACE(ToString(options));
      ExpectNear(RunEtc(problem, ViewsOf(inputs), options, device), expected,
                 2 * Fp32Bound(inputs.at("v").view()));
    }
  }
}

// The file's outputs were computed by pieces as the authors' code does; its metadata say how.
class EtcGolden : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Files, EtcGolden, testing::Values("pieces", "masked_pieces"),
                         [](const auto& file) { return std::string(file.param); });

TEST_P(EtcGolden, DefinitionAndEnginesMatchThePiecesOfTheAuthorsCode) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/etc/testdata/") + GetParam() + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  const Shape shape = tensors.at("q").shape();
  const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3]);
  Options options = {{"projections", "own"}, {"segments", "true"}};
  for (const char* name : {"radius", "global_tokens", "max_distance"}) {
    options[name] = golden.metadata.at(name);
  }
  NamedTensors inputs, tables;
  for (const char* name : {"q", "k", "v", "k_global", "v_global", "segment"}) {
    inputs[name] = tensors.at(name).Clone();
  }
  inputs["key_mask"] = tensors.at("key_padding").CloneAs(DType::kU8);
  for (const std::string piece : {"g2g", "g2l", "l2g", "l2l"}) {
    tables[piece] = tensors.at(piece).Clone();
    if (tensors.count(piece + "_mask") == 0) continue;
    options["masks"] = "true";
    options["labels"] = "both";
    inputs[piece + "_mask"] = tensors.at(piece + "_mask").CloneAs(DType::kU8);
    tables[piece + "_bias"] = tensors.at(piece + "_bias").Clone();
  }
  NamedTensors defined;
  ASSERT_TRUE(Etc().Define(problem, options, tables, ViewsOf(inputs), {}, &defined).ok());
  EXPECT_LE(MaxDifference(defined.at("out").view(), tensors.at("out").view()), 1e-12);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunEtc(problem, ViewsOf(inputs), options, device, &tables);
    EXPECT_LE(MaxDifference(ours.at("out").view(), tensors.at("out").view()),
              Fp32Bound(inputs.at("v").view()))
        << Name(device);
  }
}

TEST(Etc, FlopsCountPairsAndLabels) {
  const Problem problem = Problem::SelfAttention(1, 2, 60, 16);
  for (const bool labels : {false, true}) {
    const Options options = {{"radius", "3"},
                             {"global_tokens", "4"},
                             {"max_distance", labels ? "5" : "-1"},
                             {"segments", labels ? "true" : "false"}};
    std::unique_ptr<Layer> layer = Etc().Create(problem, options, Device::kCpu, 1).value();
    const NamedTensors inputs = Random(problem, options, 4);
    ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
    // The pairs are counted without the corners of the window beyond the ends.
    const double pairs = 56 * 7 - 2 * (1 + 2 + 3) + 2 * 56 * 4 + 4 * 4;
    const double of_labels = labels ? 60 * (11 + 2) : 0;
    EXPECT_EQ(*layer->cost().flops, 2.0 * 2 * (32 * pairs + 16 * of_labels));
  }
}

TEST(Etc, CausalAndCrossAttentionAreRefusedWithAReason) {
  EXPECT_THAT(
      std::string(Etc()
                      .Create(Problem::SelfAttention(1, 2, 10, 8, true), {}, Device::kCpu, 1)
                      .status()
                      .message()),
      HasSubstr("causal"));
  Problem cross = Problem::SelfAttention(1, 2, 10, 8);
  cross.kv_tokens = 20;
  EXPECT_THAT(std::string(Etc().Create(cross, {}, Device::kCpu, 1).status().message()),
              HasSubstr("query_tokens is 10, kv_tokens is 20"));
}

}  // namespace
}  // namespace tfb::etc
