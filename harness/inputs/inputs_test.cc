#include "harness/inputs/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/definition.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

InputSource Drawn(const std::string& profile) { return {profile, nullptr}; }

Problem Small(bool causal = false, DType dtype = DType::kF32) {
  Problem problem = Problem::SelfAttention(2, 4, 300, 64, causal, dtype);
  problem.kv_heads = 2;
  return problem;
}

Tensor DenseWeights(const Problem& problem, const NamedTensors& inputs) {
  NamedTensors outputs;
  DefinitionRequest request;
  request.weights = true;
  DefineMaskedAttention(
      problem, ViewsOf(inputs), request, 0, [](int64_t, int64_t, int64_t) { return true; },
      [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, &outputs);
  return std::move(outputs["weights"]);
}

// Returns the mean over rows of the sum of the `count` largest weights, leaving out rows of few
// keys.
double MassOfLargest(const Problem& problem, const Tensor& weights, int64_t count) {
  double total = 0;
  int64_t rows = 0;
  for (int64_t row = 0; row < weights.num_elements() / problem.kv_tokens; ++row) {
    if (problem.causal && row % problem.query_tokens < 16) continue;
    const double* first = weights.view().At<double>() + row * problem.kv_tokens;
    std::vector<double> sorted(first, first + problem.kv_tokens);
    std::sort(sorted.rbegin(), sorted.rend());
    for (int64_t j = 0; j < count; ++j) total += sorted[j];
    ++rows;
  }
  return total / static_cast<double>(rows);
}

NamedTensors MakeOrDie(const InputSource& source, const Problem& problem, uint64_t seed = 1) {
  auto inputs = MakeInputs(source, QkvInputs(problem), problem, seed);
  EXPECT_TRUE(inputs.ok()) << inputs.status();
  return inputs.ok() ? *std::move(inputs) : NamedTensors();
}

TEST(Inputs, GaussianDrawsHaveMeanZeroAndVarianceOne) {
  const Problem problem = Small();
  const NamedTensors inputs = MakeOrDie(Drawn("gaussian"), problem);
  for (const char* name : {"q", "k", "v"}) {
    const Tensor& tensor = inputs.at(name);
    double sum = 0, squares = 0;
    for (float value : tensor.span<float>()) {
      sum += value;
      squares += double{value} * value;
    }
    // The bounds are five standard deviations of the mean, and of the mean square (whose variance
    // is 2 / n).
    const double n = static_cast<double>(tensor.num_elements());
    EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n)) << name;
    EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2 / n)) << name;
  }
  EXPECT_EQ(inputs.count("key_mask"), 0u);
}

TEST(Inputs, TheSameSeedGivesTheSameBitsAndAnotherSeedOthers) {
  for (const char* profile : {"gaussian", "peaked", "needle"}) {
    const NamedTensors a = MakeOrDie(Drawn(profile), Small(), 1);
    const NamedTensors b = MakeOrDie(Drawn(profile), Small(), 1);
    const NamedTensors c = MakeOrDie(Drawn(profile), Small(), 2);
    for (const char* name : {"q", "k", "v"}) {
      EXPECT_EQ(std::memcmp(a.at(name).raw(), b.at(name).raw(), a.at(name).bytes()), 0);
      EXPECT_NE(std::memcmp(a.at(name).raw(), c.at(name).raw(), a.at(name).bytes()), 0);
    }
  }
}

TEST(Inputs, ThreeKeysHoldMostOfThePeakedMassButNotAll) {
  for (const bool causal : {false, true}) {
    const Problem problem = Small(causal);
    const Tensor weights = DenseWeights(problem, MakeOrDie(Drawn("peaked"), problem));
    const double mass = MassOfLargest(problem, weights, 3);
    EXPECT_GT(mass, 0.7) << causal;  // 0.8 by design
    EXPECT_LT(mass, 0.9) << causal;
    EXPECT_LT(MassOfLargest(problem, weights, 1), 0.6) << causal;
  }
}

TEST(Inputs, OneDistantKeyHoldsNearlyAllOfTheNeedleMass) {
  for (const bool causal : {false, true}) {
    const Problem problem = Small(causal);
    const Tensor weights = DenseWeights(problem, MakeOrDie(Drawn("needle"), problem));
    EXPECT_GT(MassOfLargest(problem, weights, 1), 0.97) << causal;  // 0.99 by design
    std::vector<int64_t> found(4, 0);  // needles in each quarter of the keys
    for (int64_t i = 32; i < problem.query_tokens; ++i) {
      const double* row = weights.view().At<double>(1, 3, i);
      const int64_t needle = std::max_element(row, row + problem.kv_tokens) - row;
      const int64_t keys = causal ? i + 1 : problem.kv_tokens;
      EXPECT_GE(std::abs(needle - i), keys / 4) << i;
      ++found[4 * needle / problem.kv_tokens];
    }
    for (int64_t quarter = 0; quarter < (causal ? 3 : 4); ++quarter) {
      EXPECT_GT(found[quarter], 5) << quarter;
    }
  }
}

// Returns the score c of the header by bisection: the smaller root of c - c^2 m / 2d = log(r n / m)
// (0 where the right side is not above 0), or d / m where the left side never gets there.
double ScoreOfPeaks(double n, double m, double r, double d) {
  const double wanted = std::log(r * n / m);
  double low = 0, high = d / m;
  if (high - high * high * m / (2 * d) <= wanted) return high;
  for (int step = 0; step < 200; ++step) {
    const double middle = (low + high) / 2;
    (middle - middle * middle * m / (2 * d) < wanted ? low : high) = middle;
  }
  return low;
}

// Tells whether a drawn query is the sum of these keys that the header states. Entries are f32 of a
// few units; sums of other keys are far away.
bool IsSumOfKeys(const Problem& p, const NamedTensors& inputs, int64_t row, double score,
                 const std::vector<int64_t>& keys) {
  const ConstTensorView q = inputs.at("q").view(), k = inputs.at("k").view();
  const int64_t i = row % p.query_tokens, h = row / p.query_tokens % p.query_heads;
  const int64_t b = row / p.query_tokens / p.query_heads;
  for (int64_t c = 0; c < p.head_dim; ++c) {
    double sum = 0;
    for (const int64_t j : keys) sum += *k.At<float>(b, h / p.group(), j, c);
    const double stated = score / std::sqrt(static_cast<double>(p.head_dim)) * sum;
    if (std::abs(*q.At<float>(b, h, i, c) - stated) > 1e-4) return false;
  }
  return true;
}

// 200 sequences, so that each key that may be drawn for a position is.
TEST(Inputs, AQueryIsTheStatedSumOfKeysAndEveryKeyThatIsAllowedIsDrawn) {
  for (const bool causal : {false, true}) {
    for (const auto& [queries, keys, head_dim] :
         std::vector<std::tuple<int64_t, int64_t, int64_t>>{{7, 7, 5}, {9, 11, 40}, {11, 9, 40}}) {
      Problem p = Problem::SelfAttention(200, 4, queries, head_dim, causal);
      p.kv_heads = 2;
      p.kv_tokens = keys;
      for (const char* profile : {"peaked", "needle"}) {
        const bool peaked = std::string(profile) == "peaked";
        const NamedTensors inputs = MakeOrDie(Drawn(profile), p);
        const ConstTensorView k = inputs.at("k").view();
        for (int64_t row = 0; row < k.num_elements() / head_dim; row += 17) {
          double square = 0;
          for (int64_t c = 0; c < head_dim; ++c) square += std::pow(k.Get(row * head_dim + c), 2);
          EXPECT_NEAR(square, static_cast<double>(head_dim), 1e-4 * head_dim);
        }
        std::map<int64_t, std::set<std::vector<int64_t>>> drawn;  // by position
        for (int64_t row = 0; row < 200 * 4 * queries; ++row) {
          const int64_t position = row % queries + p.causal_offset();
          const int64_t seen = causal ? std::min(position + 1, keys) : keys;
          if (seen < 1) continue;
          const int64_t m = peaked ? std::min<int64_t>(3, seen) : 1;
          const double score = ScoreOfPeaks(seen, m, peaked ? 4 : 99, head_dim);
          int found = 0;
          const auto is_it = [&](const std::vector<int64_t>& chosen) {
            if (!IsSumOfKeys(p, inputs, row, score, chosen)) return;
            ++found;
            drawn[position].insert(chosen);
          };
          for (int64_t first = 0; first < seen; ++first) {
            if (m == 1) is_it({first});
            for (int64_t second = first + 1; second < seen && m > 1; ++second) {
              if (m == 2) is_it({first, second});
              for (int64_t third = second + 1; third < seen && m > 2; ++third) {
                is_it({first, second, third});
              }
            }
          }
          ASSERT_EQ(found, 1) << profile << " row " << row;
        }
        for (const auto& [position, all] : drawn) {
          const int64_t seen = causal ? std::min(position + 1, keys) : keys;
          std::set<std::vector<int64_t>> allowed;
          const auto in_part = [&](int64_t j, int64_t part, int64_t parts) {
            return j >= part * seen / parts && j < (part + 1) * seen / parts;
          };
          for (int64_t first = 0; first < seen; ++first) {
            const int64_t from = std::clamp<int64_t>(position, 0, seen - 1);
            if (!peaked && std::abs(first - from) >= seen / 4) allowed.insert({first});
            if (peaked && seen == 1) allowed.insert({first});
            for (int64_t second = first + 1; second < seen && peaked; ++second) {
              if (seen == 2) allowed.insert({first, second});
              for (int64_t third = second + 1; third < seen; ++third) {
                if (in_part(first, 0, 3) && in_part(second, 1, 3) && in_part(third, 2, 3)) {
                  allowed.insert({first, second, third});
                }
              }
            }
          }
          EXPECT_EQ(all, allowed) << profile << " position " << position << " of " << seen;
        }
      }
    }
  }
}

TEST(Inputs, QueriesThatAreTheKeysRepeatAfterAPeriodWithTheStatedLength) {
  for (const auto& [profile, m, r] :
       {std::tuple("peaked", 3, 4.0), std::tuple("needle", 1, 99.0)}) {
    for (const int64_t tokens : {1, 2, 7, 8, 40}) {
      Problem problem = Problem::SelfAttention(2, 3, tokens, 64);
      problem.value_dim = 5;
      std::vector<TensorSpec> specs = QkvInputs(problem);
      specs.erase(specs.begin() + 1);
      const NamedTensors inputs = MakeInputs({profile, nullptr}, specs, problem, 3).value();
      const ConstTensorView q = inputs.at("q").view();
      const int64_t period = std::max<int64_t>(1, (tokens + m) / (m + 1));
      const double n = static_cast<double>(tokens);
      const double length = ScoreOfPeaks(n, 1, r / m, 64);
      std::set<double> firsts;  // first channels of vectors that should differ
      for (int64_t row = 0; row < 2 * 3 * tokens; ++row) {
        double square = 0;
        for (int64_t c = 0; c < 64; ++c) {
          square += std::pow(q.Get(row * 64 + c), 2);
          if (row % tokens < period) continue;
          EXPECT_EQ(q.Get(row * 64 + c), q.Get((row - period) * 64 + c)) << tokens;
        }
        EXPECT_NEAR(std::sqrt(square), std::max(0.0, length), 1e-5 * length + 1e-12) << tokens;
        if (row % tokens < period) firsts.insert(q.Get(row * 64));
      }
      EXPECT_EQ(firsts.size(), static_cast<size_t>(2 * 3 * period));
    }
  }
}

TEST(Inputs, PeaksExistForEveryShapeThatIsLegal) {
  for (const char* profile : {"peaked", "needle"}) {
    for (const auto& [query_tokens, kv_tokens] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 1}, {5, 2}, {2, 5}, {3, 0}}) {
      for (const int64_t head_dim : {1, 7, 256}) {
        Problem problem = Problem::SelfAttention(1, 2, query_tokens, head_dim, true, DType::kF16);
        problem.kv_tokens = kv_tokens;
        const NamedTensors inputs = MakeOrDie(Drawn(profile), problem);
        for (const Half value : inputs.at("q").span<Half>()) {
          EXPECT_TRUE(std::isfinite(static_cast<float>(value)));
        }
      }
    }
  }
}

TEST(Inputs, PeaksAmongQueriesThatAreTheKeysHoldTheirMass) {
  const Problem problem = Problem::SelfAttention(1, 2, 512, 64);
  std::vector<TensorSpec> specs = QkvInputs(problem);
  specs.erase(specs.begin() + 1);
  ASSERT_EQ(specs[1].name, "v");
  for (const auto& [profile, peers, least, most] :
       {std::tuple("peaked", 3, 0.7, 0.9), std::tuple("needle", 1, 0.97, 1.0)}) {
    const NamedTensors inputs = MakeInputs({profile, nullptr}, specs, problem, 3).value();
    const Tensor& q = inputs.at("q");
    const int64_t period = 512 / (peers + 1);
    double mean = 0;
    for (int64_t i = 0; i < 512; ++i) {
      double held = 0, all = 0;
      for (int64_t j = 0; j < 512; ++j) {
        if (j == i) continue;
        double dot = 0, square = 0;
        for (int64_t c = 0; c < 64; ++c) {
          const double key = q.view().Get(j * 64 + c);
          dot += q.view().Get(i * 64 + c) * key;
          square += key * key;
        }
        const double weight = std::exp(dot / std::sqrt(square));
        all += weight;
        if ((i - j) % period == 0) held += weight;
      }
      mean += held / all / 512;
    }
    EXPECT_GT(mean, least) << profile;
    EXPECT_LE(mean, most) << profile;
  }
}

TEST(Inputs, PeakedProfilesSayThatTheyNeedQueriesAndKeys) {
  const Problem problem = Small();
  const auto inputs = MakeInputs(Drawn("needle"), HiddenInputs(problem), problem, 1);
  EXPECT_EQ(inputs.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(inputs.status().message()),
              AllOf(HasSubstr("needle"), HasSubstr("reads x")));
}

TEST(Inputs, FurtherFloatTensorsAndIdsAreDrawnByTheirSpecs) {
  const Problem problem = Small();
  std::vector<TensorSpec> specs = QkvInputs(problem);
  specs.push_back({"q_global", {2, 4, 300, 64}, DType::kF32, false});
  specs.push_back({"tokens", {2, 300}, DType::kI32, false});
  const auto inputs = MakeInputs(Drawn("peaked"), specs, problem, 1);
  ASSERT_TRUE(inputs.ok()) << inputs.status();
  EXPECT_EQ(inputs->at("q_global").shape(), Shape({2, 4, 300, 64}));
  for (int32_t id : inputs->at("tokens").span<int32_t>()) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, kDrawnIds);
  }
}

TEST(Inputs, UnknownWordsAreAnsweredWithTheKnownOnes) {
  const auto sources = ParseInputSources("gausian");
  EXPECT_EQ(sources.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(sources.status().message()),
              AllOf(HasSubstr("gausian"), HasSubstr("gaussian"), HasSubstr("FILE.safetensors")));
  EXPECT_EQ(ParseInputSources("absent.safetensors", ::testing::TempDir()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(Inputs, RealTensorsAreFoundWithTheirSizesAndModel) {
  const auto sources = ParseInputSources("real");
  ASSERT_TRUE(sources.ok()) << sources.status();
  ASSERT_EQ(sources->size(), 4u);
  EXPECT_EQ((*sources)[0].ToString(), "real minilm_512.safetensors layer0");
  EXPECT_EQ((*sources)[3].ToString(), "real minilm_4096.safetensors layer2");
  const CapturedLayer& first = *(*sources)[0].captured;
  EXPECT_EQ(first.query_heads, 12);
  EXPECT_EQ(first.query_tokens, 512);
  EXPECT_EQ(first.head_dim, 32);
  EXPECT_EQ(first.model_dim, 384);
  EXPECT_THAT(first.model(), HasSubstr("MiniLM"));
  EXPECT_FALSE((*sources)[3].captured->has_hidden());
}

TEST(Inputs, ProblemsAreFittedToWhatAFileHolds) {
  const auto sources = ParseInputSources("real");
  ASSERT_TRUE(sources.ok()) << sources.status();
  const Problem wanted = Problem::SelfAttention(4, 8, 2048, 64, true, DType::kBF16);
  for (const InputKind kind : {InputKind::kQkv, InputKind::kHidden}) {
    const auto fitted = FitProblem((*sources)[1], kind, wanted);
    ASSERT_TRUE(fitted.ok()) << fitted.status();
    EXPECT_EQ(*fitted, Problem::SelfAttention(1, 12, 512, 32, true, DType::kBF16));
  }
  const auto none = FitProblem((*sources)[3], InputKind::kHidden, wanted);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("has no x"));
  EXPECT_EQ(*FitProblem(Drawn("peaked"), InputKind::kQkv, wanted), wanted);
}

TEST(Inputs, APrefixOfTheTokensIsCutAndConverted) {
  const auto sources = ParseInputSources("real");
  ASSERT_TRUE(sources.ok()) << sources.status();
  const InputSource& source = (*sources)[2];
  const Problem problem = Problem::SelfAttention(1, 12, 100, 32);
  const NamedTensors inputs = MakeOrDie(source, problem);
  const Tensor* whole = source.captured->Find("k");
  ASSERT_NE(whole, nullptr);
  for (int64_t h : {0, 11}) {
    for (int64_t j : {0, 99}) {
      EXPECT_EQ(*inputs.at("k").view().At<float>(0, h, j, 31),
                static_cast<float>(*whole->view().At<Half>(0, h, j, 31)));
    }
  }
}

TEST(Inputs, WhatAFileHasNotIsNotFoundAndNotDrawn) {
  const auto sources = ParseInputSources("real");
  ASSERT_TRUE(sources.ok()) << sources.status();
  const Problem problem = Problem::SelfAttention(1, 12, 100, 32);
  std::vector<TensorSpec> specs = QkvInputs(problem);
  specs.push_back({"q_global", {1, 12, 100, 32}, DType::kF32, false});
  const auto inputs = MakeInputs((*sources)[0], specs, problem, 1);
  EXPECT_EQ(inputs.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(inputs.status().message()),
              AllOf(StartsWith("minilm_512.safetensors layer0: has no q_global;"),
                    HasSubstr("reads q, k, v, key_mask (where there is one), q_global;"),
                    HasSubstr("the file has k, q, v, x, tokens")));
  const auto other_size =
      MakeInputs((*sources)[0], QkvInputs(Problem::SelfAttention(1, 8, 100, 32)), problem, 1);
  EXPECT_EQ(other_size.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(other_size.status().message()),
              AllOf(HasSubstr("[1, 12, 512, 32]"), HasSubstr("[1, 8, 100, 32]")));
}

TEST(Inputs, NoiseIsDrawnFromItsDistributionForAFileToo) {
  const auto sources = ParseInputSources("real");
  ASSERT_TRUE(sources.ok()) << sources.status();
  const Problem problem = Problem::SelfAttention(1, 12, 100, 32);
  std::vector<TensorSpec> specs = QkvInputs(problem);
  specs.push_back({"u", {1, 12, 100}, DType::kF32, false, Distribution::kUniform});
  for (const InputSource& source : {Drawn("gaussian"), (*sources)[0]}) {
    const auto inputs = MakeInputs(source, specs, problem, 1);
    ASSERT_TRUE(inputs.ok()) << inputs.status();
    double mean = 0;
    for (float u : inputs->at("u").span<float>()) {
      EXPECT_GE(u, 0);
      EXPECT_LE(u, 1);
      mean += u / 1200;
    }
    EXPECT_NEAR(mean, 0.5, 4 * std::sqrt(1.0 / 12 / 1200));
  }
}

std::string WriteFile(const std::string& name, const NamedTensors& tensors) {
  const std::string path = ::testing::TempDir() + "/" + name;
  EXPECT_TRUE(WriteSafetensors(path, tensors).ok());
  return path;
}

Tensor Filled(DType dtype, std::initializer_list<int64_t> shape, double value = 1) {
  Tensor tensor(dtype, shape);
  Fill(tensor.view(), value);
  return tensor;
}

TEST(Inputs, AFileOfTheCallersOwnIsReadRelativeToItsFolder) {
  NamedTensors tensors;
  tensors["q"] = Filled(DType::kF64, {2, 4, 10, 8});
  tensors["k"] = Filled(DType::kF64, {2, 2, 12, 8});
  tensors["v"] = Filled(DType::kF64, {2, 2, 12, 5});
  tensors["key_mask"] = Filled(DType::kU8, {2, 12}, 0);
  tensors["tokens"] = Filled(DType::kI64, {2, 10}, 70000);
  WriteFile("own.safetensors", tensors);
  const auto sources = ParseInputSources("own.safetensors", ::testing::TempDir());
  ASSERT_TRUE(sources.ok()) << sources.status();
  ASSERT_EQ(sources->size(), 1u);
  const auto problem = FitProblem((*sources)[0], InputKind::kQkv, Small());
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->ToString(),
            "batch 2, 4 heads of 8 (values of 5) over 2 key-value heads, 10 tokens over 12 keys, "
            "f32");
  std::vector<TensorSpec> specs = QkvInputs(*problem);
  const auto inputs = MakeInputs((*sources)[0], specs, *problem, 1);
  ASSERT_TRUE(inputs.ok()) << inputs.status();
  EXPECT_EQ(inputs->at("key_mask").span<uint8_t>()[0], 0);  // optional, and the file has it
  specs.push_back({"tokens", {2, 10}, DType::kI32, false});
  EXPECT_TRUE(MakeInputs((*sources)[0], specs, *problem, 1).ok());
  specs.back().dtype = DType::kU8;
  EXPECT_THAT(std::string(MakeInputs((*sources)[0], specs, *problem, 1).status().message()),
              AllOf(StartsWith("own.safetensors: tensor \"tokens\""),  // the path as it was typed
                    HasSubstr("is i64 and cannot be converted to u8")));
}

// A technique that declares what it reads, and does nothing.
class Declaring : public Technique {
 public:
  absl::StatusOr<Options> Canonical(const Options& options) const override { return options; }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem&,
                                                      const Options&) const override {
    return std::vector<TensorSpec>();
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem&, const Options&, Device,
                                                uint64_t) const override {
    return absl::UnimplementedError("has no layer");
  }
  absl::Status Define(const Problem&, const Options&, const NamedTensors&, const Inputs&,
                      const DefinitionRequest&, NamedTensors*) const override {
    return absl::UnimplementedError("has no definition");
  }

 protected:
  Declaring(const std::string& name, InputKind kind) : Technique(Info(name, kind)) {}

 private:
  static TechniqueInfo Info(const std::string& name, InputKind kind) {
    TechniqueInfo info;
    info.name = name;
    info.input_kind = kind;
    return info;
  }
};

// A technique on hidden states with a mask, which attends to `memory` where the option says so.
class Crossing : public Declaring {
 public:
  Crossing() : Declaring("crossing", InputKind::kHidden) {}
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options& options) const override {
    std::vector<TensorSpec> specs = HiddenInputs(problem);
    if (options.count("cross") > 0) {
      specs.push_back({"memory", {problem.batch, problem.kv_tokens, problem.model_dim()}});
    } else if (problem.kv_tokens != problem.query_tokens) {
      return absl::UnimplementedError("is self-attention");
    }
    specs.push_back({"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true});
    return specs;
  }
};

// A technique whose queries are the keys where the problem is causal.
class SharedKeys : public Declaring {
 public:
  SharedKeys() : Declaring("shared_keys", InputKind::kQkv) {}
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options&) const override {
    std::vector<TensorSpec> specs = QkvInputs(problem);
    if (problem.causal) specs.erase(specs.begin() + 1);
    return specs;
  }
};

// Two sorts of tokens that alternate, neither of which is x.
class Alternating : public Declaring {
 public:
  Alternating() : Declaring("alternating", InputKind::kHidden) {}
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options&) const override {
    return std::vector<TensorSpec>{
        {"even", {problem.batch, (problem.query_tokens + 1) / 2, 3}},
        {"odd", {problem.batch, problem.query_tokens / 2, 5}},
        {"key_mask", {problem.batch, problem.kv_tokens}, DType::kU8, true}};
  }
};

InputSource FileSource(const std::string& name, const NamedTensors& tensors) {
  return ParseInputSources(WriteFile(name, tensors)).value().at(0);
}

TEST(Inputs, KeysHaveTheLengthOfTheMemoryThatIsAttendedTo) {
  NamedTensors tensors;
  tensors["x"] = Filled(DType::kF32, {1, 48, 32});
  tensors["memory"] = Filled(DType::kF32, {1, 77, 32});
  tensors["key_mask"] = Filled(DType::kU8, {1, 77});
  const InputSource source = FileSource("cross.safetensors", tensors);
  Problem wanted = Problem::SelfAttention(8, 4, 1000, 8);
  const auto crossed = FitProblem(source, Crossing(), {{"cross", "1"}}, wanted);
  ASSERT_TRUE(crossed.ok()) << crossed.status();
  EXPECT_EQ(crossed->query_tokens, 48);
  EXPECT_EQ(crossed->kv_tokens, 77);
  wanted.query_tokens = wanted.kv_tokens = 60;  // a prefix may be asked for
  EXPECT_EQ(FitProblem(source, Crossing(), {{"cross", "1"}}, wanted)->kv_tokens, 60);
  // Without cross attention the keys are x, and the mask is too long for them.
  const auto alone = FitProblem(source, Crossing(), {}, wanted);
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(alone.status().message()),
              AllOf(HasSubstr("\"key_mask\" is [1, 77]"), HasSubstr("x [1, 48, 32]"),
                    HasSubstr("crossing reads [1, 48]")));
}

TEST(Inputs, KeysAreAskedForOnlyWhereTheyAreRead) {
  NamedTensors tensors;
  tensors["q"] = Filled(DType::kF32, {2, 4, 10, 8});
  tensors["v"] = Filled(DType::kF32, {2, 2, 12, 5});
  const InputSource source = FileSource("shared_keys.safetensors", tensors);
  Problem wanted = Problem::SelfAttention(9, 1, 1000, 64, /*causal=*/true);
  const auto fitted = FitProblem(source, SharedKeys(), {}, wanted);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  EXPECT_EQ(fitted->ToString(),
            "batch 2, 4 heads of 8 (values of 5) over 2 key-value heads, 10 tokens over 12 keys, "
            "causal, f32");
  const auto specs = SharedKeys().InputSpecs(*fitted, {});
  EXPECT_TRUE(MakeInputs(source, *specs, *fitted, 1).ok());
  wanted.causal = false;
  const absl::Status refused = FitProblem(source, SharedKeys(), {}, wanted).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("shared_keys.safetensors: has no k; shared_keys reads q, k, v, key_mask "
                        "(where there is one); the file has q, v"));
}

TEST(Inputs, SizesComeFromTensorsOfAnyNameWhereNeitherQueriesNorHiddenStatesAreRead) {
  NamedTensors tensors;
  tensors["even"] = Filled(DType::kF32, {2, 4, 3});
  tensors["odd"] = Filled(DType::kF32, {2, 3, 5});
  const InputSource source = FileSource("alternating.safetensors", tensors);
  Problem wanted = Problem::SelfAttention(9, 4, 1000, 16);
  EXPECT_EQ(*FitProblem(source, Alternating(), {}, wanted), Problem::SelfAttention(2, 4, 7, 16));
  wanted.query_tokens = wanted.kv_tokens = 5;
  EXPECT_EQ(*FitProblem(source, Alternating(), {}, wanted), Problem::SelfAttention(2, 4, 5, 16));
  tensors["odd"] = Filled(DType::kF32, {2, 9, 5});
  EXPECT_THAT(
      std::string(FitProblem(FileSource("uneven.safetensors", tensors), Alternating(), {}, wanted)
                      .status()
                      .message()),
      HasSubstr("\"odd\" is [2, 9, 5]; beside even [2, 4, 3] alternating reads [2, 4, 5]"));
}

TEST(Inputs, NoiseThatTheFileLacksIsAmongTheDrawnInputs) {
  const auto names = [](const std::vector<TensorSpec>& specs) {
    std::vector<std::string> all;
    for (const TensorSpec& spec : specs) all.push_back(spec.name);
    return all;
  };
  std::vector<TensorSpec> specs = QkvInputs(Problem::SelfAttention(1, 2, 10, 8));
  specs.push_back({"u", {1, 2, 10}, DType::kF32, false, Distribution::kUniform});
  NamedTensors tensors;
  for (const char* name : {"q", "k", "v"}) tensors[name] = Filled(DType::kF32, {1, 2, 10, 8});
  EXPECT_THAT(names(DrawnInputs(FileSource("no_noise.safetensors", tensors), specs)),
              ElementsAre("u"));
  tensors["u"] = Filled(DType::kF32, {1, 2, 10});
  EXPECT_THAT(names(DrawnInputs(FileSource("noise.safetensors", tensors), specs)), IsEmpty());
  EXPECT_THAT(names(DrawnInputs(Drawn("gaussian"), specs)), ElementsAre("q", "k", "v", "u"));
}

TEST(Inputs, SizesThatDoNotAgreeAreNamedAndNotCut) {
  NamedTensors tensors;
  tensors["x"] = Filled(DType::kF32, {1, 30, 32});
  tensors["key_mask"] = Filled(DType::kU8, {2, 30});
  const InputSource source = FileSource("two_masks.safetensors", tensors);
  const auto fitted = FitProblem(source, Crossing(), {}, Problem::SelfAttention(1, 4, 10, 8));
  EXPECT_THAT(std::string(fitted.status().message()),
              AllOf(HasSubstr("\"key_mask\" is [2, 30]"), HasSubstr("reads [1, 30]")));
}

TEST(Inputs, TensorsThatNothingReadsAreNamedWithThoseThatAreRead) {
  const Problem problem = Problem::SelfAttention(1, 4, 30, 8);
  NamedTensors tensors;
  tensors["x"] = Filled(DType::kF32, {1, 30, 32});
  for (const char* name : {"q", "k", "v"}) tensors[name] = Filled(DType::kF32, {1, 4, 30, 8});
  const std::vector<TensorSpec> specs = *Crossing().InputSpecs(problem, {});
  EXPECT_TRUE(CheckTensorsAreRead(FileSource("all_read.safetensors", tensors), specs).ok());
  tensors["key_padding"] = Filled(DType::kU8, {1, 30});
  const absl::Status status =
      CheckTensorsAreRead(FileSource("misspelt.safetensors", tensors), specs);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("\"key_padding\" would not be read"),
                                                   HasSubstr("x, key_mask (where there is one)")));
  EXPECT_TRUE(CheckTensorsAreRead(ParseInputSources("real")->at(0), specs).ok());
}

TEST(Inputs, LayersComeInTheOrderOfTheirNumbersWithTheTensorsOfTheFileBeside) {
  NamedTensors tensors;
  for (const char* name : {"layer10.x", "layer9.x", "layer9.extra", "layerx.q", "layer-1.q",
                           "layer.q", "other.x", "shared"}) {
    tensors[name] = Filled(DType::kF32, {2, 6, 8});
  }
  tensors["layer9.x"] = Filled(DType::kF32, {3, 5, 8});
  tensors["layer11.extra"] = Filled(DType::kF32, {1});
  const auto layers = ReadCapturedLayers(WriteFile("layers.safetensors", tensors)).value();
  ASSERT_EQ(layers.size(), 2u);  // those that have q or x
  EXPECT_EQ(layers[0].layer, "layer9");
  EXPECT_EQ(layers[1].layer, "layer10");
  EXPECT_EQ(layers[0].file, "layers.safetensors");
  EXPECT_THAT(layers[0].names(),
              ::testing::UnorderedElementsAre("extra", "x", "layerx.q", "layer-1.q", "layer.q",
                                              "other.x", "shared"));
  EXPECT_EQ(layers[0].Find("x")->dim(1), 5);
  EXPECT_EQ(layers[1].Find("x")->dim(1), 6);
  EXPECT_EQ(layers[1].Find("extra"), nullptr);
  EXPECT_NE(layers[1].Find("shared"), nullptr);
  EXPECT_EQ(layers[0].batch, 3);
  EXPECT_EQ(layers[0].hidden_tokens, 5);
  EXPECT_EQ(layers[0].model_dim, 8);
  EXPECT_FALSE(layers[0].has_queries());
  EXPECT_TRUE(layers[0].has_hidden());
  EXPECT_EQ(layers[0].model(), "");
  // Where no layer has q or x, all of them count.
  NamedTensors others;
  others["layer2.a"] = Filled(DType::kF32, {1});
  others["b"] = Filled(DType::kF32, {1});
  const auto all = ReadCapturedLayers(WriteFile("others.safetensors", others)).value();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].layer, "");
  EXPECT_EQ(all[1].layer, "layer2");
  const InputSource source = ParseInputSources(WriteFile("layers.safetensors", tensors))->at(1);
  EXPECT_EQ(source.ToString(), "file layers.safetensors layer10");
}

TEST(Inputs, HiddenStatesAreSplitIntoTheHeadsOfTheirQueriesOrIntoThoseThatAreWanted) {
  Problem wanted = Problem::SelfAttention(5, 4, 9, 100, true, DType::kF16);
  wanted.kv_tokens = 2;  // the keys are x, too
  const auto fit = [&wanted](const NamedTensors& tensors) {
    const auto problem =
        FitProblem(FileSource("hidden.safetensors", tensors), InputKind::kHidden, wanted);
    return problem.ok() ? problem->ToString() : std::string(problem.status().message());
  };
  const std::string path = ::testing::TempDir() + "/hidden.safetensors";
  NamedTensors tensors;
  tensors["x"] = Filled(DType::kF32, {2, 12, 24});
  EXPECT_EQ(fit(tensors), "batch 2, 4 heads of 6, 9 tokens, causal, f16");
  tensors["q"] = Filled(DType::kF32, {2, 6, 7, 4});
  tensors["k"] = Filled(DType::kF32, {2, 3, 11, 4});
  EXPECT_EQ(fit(tensors), "batch 2, 6 heads of 4 over 3 key-value heads, 9 tokens, causal, f16");
  tensors["q"] = Filled(DType::kF32, {2, 6, 7, 5});  // not of this width
  tensors["k"] = Filled(DType::kF32, {2, 3, 11, 5});
  EXPECT_EQ(fit(tensors), "batch 2, 4 heads of 6, 9 tokens, causal, f16");
  tensors.clear();
  tensors["x"] = Filled(DType::kF32, {7, 3, 22});
  EXPECT_EQ(fit(tensors),
            path + ": tensor \"x\" has a model_dim of 22, which 4 heads do not divide");
  tensors["x"] = Filled(DType::kF32, {7, 3, 4 * 257});
  EXPECT_EQ(fit(tensors), path + ": head_dim is 257; allowed are 1 to 256");
  tensors.erase("x");
  tensors["y"] = Filled(DType::kF32, {1});
  EXPECT_EQ(fit(tensors), "file hidden.safetensors has no x; it has y");
  EXPECT_EQ(FitProblem(FileSource("hidden.safetensors", tensors), InputKind::kQkv, wanted)
                .status()
                .message(),
            "file hidden.safetensors has no q; it has y");
}

TEST(Inputs, BatchAndTokensMayBeCutAndNothingElse) {
  struct Row {
    Shape from, to;
    bool may;
  };
  for (const Row& row : std::vector<Row>{{{4, 5, 6, 7}, {4, 5, 6, 7}, true},
                                         {{4, 5, 6, 7}, {3, 5, 2, 7}, true},
                                         {{4, 5, 6, 7}, {4, 4, 6, 7}, false},
                                         {{4, 5, 6, 7}, {4, 5, 6, 6}, false},
                                         {{4, 5, 6, 7}, {5, 5, 6, 7}, false},
                                         {{4, 5, 6, 7}, {4, 5, 7, 7}, false},
                                         {{4, 5, 6}, {3, 4, 6}, true},
                                         {{4, 5, 6}, {4, 5, 5}, false},
                                         {{4, 5}, {3, 4}, true},
                                         {{4, 5}, {4, 6}, false},
                                         {{4}, {3}, true},
                                         {{4}, {5}, false},
                                         {{4, 5}, {4}, false}}) {
    NamedTensors tensors;
    Tensor& tensor = tensors["t"] = Tensor(DType::kF64, row.from);
    for (int64_t i = 0; i < tensor.num_elements(); ++i) tensor.view().Set(i, i);
    const auto cut = MakeInputs(FileSource("cut.safetensors", tensors),
                                {{"t", row.to, DType::kF32, false}}, Problem(), 1);
    EXPECT_EQ(cut.ok(), row.may) << ShapeString(row.to);
    if (!cut.ok()) {
      EXPECT_EQ(cut.status().message(),
                ::testing::TempDir() + "/cut.safetensors: tensor \"t\" has shape " +
                    ShapeString(row.from) + "; asked for is " + ShapeString(row.to));
      continue;
    }
    // The first elements of every row are kept.
    ConstTensorView expected = std::as_const(tensor).view();
    for (int axis = 0; axis < expected.rank; ++axis) {
      expected = Slice(expected, axis, 0, row.to[axis]);
    }
    Tensor copy(DType::kF32, row.to);
    CopyElements(expected, copy.view());
    EXPECT_EQ(std::memcmp(copy.raw(), cut->at("t").raw(), copy.bytes()), 0) << ShapeString(row.to);
  }
}

TEST(Inputs, WhatCannotBeMadeIsSaidWhole) {
  const Problem problem = Problem::SelfAttention(1, 2, 6, 4);
  EXPECT_EQ(MakeInputs(Drawn("peeked"), QkvInputs(problem), problem, 1).status().message(),
            "input profile \"peeked\" is unknown; known are real, gaussian, peaked, needle, text");
  EXPECT_EQ(ParseInputSources("peeked").status().message(),
            "input \"peeked\" is unknown; known are real, gaussian, peaked, needle, text and "
            "FILE.safetensors");
  EXPECT_EQ(ParseInputSources("/no/a.safetensors", "/folder").status().message(),
            "/no/a.safetensors: cannot open: No such file or directory");
  EXPECT_EQ(ParseInputSources("no/a.safetensors", "/folder").status().message(),
            "/folder/no/a.safetensors: cannot open: No such file or directory");
  EXPECT_EQ(ParseInputSources("no/a.safetensors").status().message(),
            "no/a.safetensors: cannot open: No such file or directory");
  const auto peaks = [&](std::vector<TensorSpec> specs) {
    return std::string(MakeInputs(Drawn("peaked"), specs, problem, 1).status().message());
  };
  const Shape right = {1, 2, 6, 4}, wrong = {1, 2, 5, 4};
  const std::string refusal = "input profile peaked makes queries and keys; the technique reads ";
  EXPECT_EQ(peaks({{"q", right}, {"k", right}}), "");
  EXPECT_EQ(peaks({{"q", right}}), "");
  EXPECT_EQ(peaks({{"q", wrong}}), refusal + "q");
  EXPECT_EQ(peaks({{"k", right}, {"v", right}}), refusal + "k, v");
  EXPECT_EQ(peaks({{"q", wrong}, {"k", right}}), refusal + "q, k");
  EXPECT_EQ(peaks({{"q", right}, {"k", wrong}}), refusal + "q, k");
  // Nothing is asked of a source that has no file.
  EXPECT_TRUE(CheckTensorsAreThere(Drawn("peaked"), QkvInputs(problem)).ok());
  EXPECT_TRUE(CheckTensorsAreRead(Drawn("peaked"), {}).ok());
  const auto too_large = MakeInputs(Drawn("gaussian"), {{"x", {int64_t{1} << 40}}}, problem, 1);
  EXPECT_EQ(too_large.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(too_large.status().message()), StartsWith("input x: "));
}

TEST(Inputs, TextServesHiddenStatesOfTheModelsSizes) {
  const InputSource text = ParseInputSources("text").value().at(0);
  EXPECT_EQ(text.ToString(), "text");
  const Problem wanted = Problem::SelfAttention(2, 4, 9, 100, true);
  EXPECT_EQ(FitProblem(text, InputKind::kHidden, wanted)->ToString(),
            "batch 2, 6 heads of 32, 9 tokens, causal, f32");
  EXPECT_EQ(FitProblem(text, InputKind::kQkv, wanted).status().message(),
            "text makes hidden states; the technique reads q, k and v");
  EXPECT_THAT(DrawnInputs(text, {{"x", {1}}}), IsEmpty());
}

TEST(Inputs, ContradictorySizesOfAFileAreNamed) {
  const std::string path = ::testing::TempDir() + "/bad.safetensors";
  const auto error = [](NamedTensors tensors) {
    const auto layers = ReadCapturedLayers(WriteFile("bad.safetensors", tensors));
    return std::string(layers.status().message());
  };
  struct Row {
    Shape q, k, v, x;  // empty: there is none
    std::string message;
  };
  const std::string form = "; expected is floating point [batch, heads, tokens, channels]";
  for (const Row& row : std::vector<Row>{
           {{1, 4, 10, 8}, {1, 2, 11, 8}, {1, 2, 11, 3}, {1, 5, 6}, ""},
           {{1, 4, 10, 8}, {}, {1, 2, 11, 3}, {}, ""},
           {{1, 4, 10, 8}, {1, 2, 11, 8}, {}, {}, ""},
           {{1, 4, 10, 8}, {}, {}, {}, ""},
           {{1, 4, 10}, {}, {}, {}, ": tensor \"q\" is f32 [1, 4, 10]" + form},
           {{1, 4, 10, 8}, {4, 10, 8}, {}, {}, ": tensor \"k\" is f32 [4, 10, 8]" + form},
           {{1, 4, 10, 8},
            {},
            {1, 4, 10, 8, 1},
            {},
            ": tensor \"v\" is f32 [1, 4, 10, 8, 1]" + form},
           {{1, 4, 10, 8},
            {2, 4, 10, 8},
            {},
            {},
            ": tensor \"k\" is f32 [2, 4, 10, 8]; expected is the batch and channels of q [1, 4, "
            "10, 8]"},
           {{1, 4, 10, 8},
            {1, 4, 10, 7},
            {},
            {},
            ": tensor \"k\" is f32 [1, 4, 10, 7]; expected is the batch and channels of q [1, 4, "
            "10, 8]"},
           {{1, 4, 10, 8},
            {},
            {2, 4, 10, 8},
            {},
            ": tensor \"v\" is f32 [2, 4, 10, 8]; expected is the batch of q [1, 4, 10, 8]"},
           {{1, 4, 10, 8},
            {1, 4, 10, 8},
            {2, 4, 10, 8},
            {},
            ": tensor \"v\" is f32 [2, 4, 10, 8]; expected is the sizes of k [1, 4, 10, 8] but for "
            "the channels"},
           {{1, 4, 10, 8},
            {1, 4, 10, 8},
            {1, 2, 10, 8},
            {},
            ": tensor \"v\" is f32 [1, 2, 10, 8]; expected is the sizes of k [1, 4, 10, 8] but for "
            "the channels"},
           {{1, 4, 10, 8},
            {1, 4, 10, 8},
            {1, 4, 9, 8},
            {},
            ": tensor \"v\" is f32 [1, 4, 9, 8]; expected is the sizes of k [1, 4, 10, 8] but for "
            "the channels"},
           {{1, 4, 10, 8},
            {1, 3, 10, 8},
            {1, 3, 10, 8},
            {},
            ": query_heads is 4, which kv_heads (3) does not divide"},
           {{1, 4, 10, 300}, {1, 4, 10, 300}, {}, {}, ": head_dim is 300; allowed are 1 to 256"},
           {{},
            {},
            {},
            {4, 10},
            ": tensor \"x\" is f32 [4, 10]; expected is floating point [batch, tokens, model_dim]"},
           {{1, 4, 10, 8},
            {},
            {},
            {2, 5, 6},
            ": tensor \"x\" is f32 [2, 5, 6]; expected is the batch of q, 1"}}) {
    NamedTensors tensors;
    for (const auto& [name, shape] :
         {std::pair("q", row.q), {"k", row.k}, {"v", row.v}, {"x", row.x}}) {
      if (!shape.empty()) Fill((tensors[name] = Tensor(DType::kF32, shape)).view(), 1);
    }
    EXPECT_EQ(error(std::move(tensors)), row.message.empty() ? "" : path + row.message);
  }
  NamedTensors tensors;
  tensors["layer3.x"] = Filled(DType::kI32, {1, 4, 10});
  EXPECT_EQ(error(std::move(tensors)),
            path +
                ": tensor \"layer3.x\" is i32 [1, 4, 10]; expected is floating point [batch, "
                "tokens, model_dim]");
  tensors.clear();
  tensors["q"] = Filled(DType::kI32, {1, 4, 10, 8});
  EXPECT_EQ(error(std::move(tensors)), path + ": tensor \"q\" is i32 [1, 4, 10, 8]" + form);
  EXPECT_EQ(error(NamedTensors()), path + ": has no tensors");
}

}  // namespace
}  // namespace tfb
