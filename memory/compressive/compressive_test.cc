// Tests the Compressive Transformer against its definition, against Transformer-XL where the two
// are the same, and case by case against the contents that the queues must have.
//
// Tolerance. As in transformer_xl's test: each sublayer has the bound of fp32 attention, 2e-5 of
// the largest output, and sublayers add in quadrature. Compressed rows are means, maxima, copies,
// or products of a few hundred terms of rows of order 1.
#include "memory/compressive/compressive.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/backward_testing.h"
#include "core/flash/key_value_cache.h"
#include "core/layers/attention/relative_positions.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"
#include "memory/transformer_xl/stack_testing.h"
#include "memory/transformer_xl/transformer_xl.h"

namespace tfb::compressive {
namespace {

using transformer_xl::CausalProblem;
using transformer_xl::EvaluateInTwoRuns;
using transformer_xl::EvaluateStack;
using transformer_xl::ExpectTwoRunsAreOne;
using transformer_xl::PerturbedParameters;
using transformer_xl::RandomHidden;
using transformer_xl::StackBound;
using transformer_xl::StackOutcome;

constexpr const char* kFunctions[] = {"mean", "max", "convolution", "dilated_convolution",
                                      "most_used"};

void ExpectDefined(const StackOutcome& outcome, int64_t layers) {
  for (const auto& [name, tensor] : outcome.computed) {
    const ConstTensorView expected = outcome.defined.at(name).view();
    const double bound = name == "kept" ? 0 : StackBound(expected, layers);
    EXPECT_LE(MaxDifference(tensor.view(), expected), bound) << name;
  }
}

// ---- Against the definition ----

TEST(Compressive, RunEqualsTheDefinitionWithEveryFunctionAndOption) {
  const Compressive technique;
  const Problem problem = CausalProblem(2, 2, 150, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* function : kFunctions) {
    for (const Options& more : std::vector<Options>{
             {{"segment", "24"}, {"memory", "16"}, {"compressed_memory", "12"}},
             {{"segment", "10"},
              {"memory", "15"},
              {"compressed_memory", "5"},
              {"compression", "3"}},
             {{"segment", "7"}, {"memory", "5"}, {"pre_norm", "true"}, {"compression", "2"}},
             {{"segment", "32"}, {"memory", "0"}, {"compressed_memory", "3"}, {"layers", "3"}},
             {{"segment", "20"}, {"memory", "30"}, {"start_zero", "true"}, {"max_distance", "40"}},
             {{"segment", "20"}, {"memory", "20"}, {"start_zero", "true"}, {"pre_norm", "true"}},
             {{"segment", "1"}, {"memory", "8"}, {"compressed_memory", "100"}, {"layers", "1"}},
             {{"segment", "20"}, {"memory", "20"}, {"pre_norm", "true"}, {"final_norm", "true"}},
             {{"segment", "16"}, {"memory", "70"}, {"share_biases", "false"}},
             {{"segment", "16"}, {"memory", "16"}, {"compression", "1"}},
             {{"segment", "7"}, {"memory", "9"}, {"eviction", "whole_blocks"}},
             {{"segment", "5"},
              {"memory", "4"},
              {"eviction", "whole_blocks"},
              {"compression", "5"},
              {"start_zero", "true"},
              {"loss", "mean_square"}},
             {{"segment", "13"},
              {"memory", "10"},
              {"learned_positions", "true"},
              {"loss", "mean_square"},
              {"pre_norm", "true"}},
             {{"segment", "16"},
              {"memory", "16"},
              {"learned_positions", "true"},
              {"max_distance", "20"}}}) {
      Options options = more;
      options["function"] = function;
      SCOPED_TRACE(ToString(options));
      const NamedTensors parameters = PerturbedParameters(technique, problem, options);
      ExpectDefined(EvaluateStack(technique, problem, options, parameters, x, Device::kCpu, 2), 3);
    }
  }
}

TEST(Compressive, OnDevicesEveryFunctionEqualsTheDefinition) {
  const Compressive technique;
  const Problem problem = CausalProblem(2, 2, 70, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* function : kFunctions) {
    for (const char* pre_norm : {"false", "true"}) {
      const Options options = {{"function", function},   {"pre_norm", pre_norm},
                               {"start_zero", pre_norm}, {"segment", "18"},
                               {"memory", "13"},         {"compressed_memory", "9"}};
      Options others = options;
      others["eviction"] = "whole_blocks";
      others["loss"] = "mean_square";
      others["learned_positions"] = "true";
      for (const Options& chosen : {options, others}) {
        SCOPED_TRACE(ToString(chosen));
        const NamedTensors parameters = PerturbedParameters(technique, problem, chosen);
        ExpectDefined(EvaluateStack(technique, problem, chosen, parameters, x, KernelDevice()), 2);
      }
    }
  }
}

TEST(Compressive, HalfPrecisionIsRoundedAtTheEndsOnly) {
  const Compressive technique;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Problem problem = CausalProblem(1, 2, 100, 16, dtype);
    const Tensor x = RandomHidden(problem);
    for (const char* function : kFunctions) {
      const Options options = {{"function", function}, {"segment", "20"}, {"memory", "20"}};
      const NamedTensors parameters = PerturbedParameters(technique, problem, options);
      const StackOutcome outcome = EvaluateStack(technique, problem, options, parameters, x);
      for (const char* output : {"out", "context", "attention_loss", "autoencoding_loss"}) {
        const ConstTensorView expected = outcome.defined.at(output).view();
        EXPECT_LE(MaxDifference(outcome.computed.at(output).view(), expected),
                  StackBound(expected, 2) + UnitRoundoff(dtype) * MaxAbs(expected))
            << output << " of " << function;
      }
    }
  }
}

// ---- Streams ----

std::unique_ptr<StreamingLayer> MakeLayer(const Problem& problem, const Options& options,
                                          const NamedTensors& parameters) {
  auto layer = Compressive().Create(problem, options, Device::kCpu, 1);
  EXPECT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE((*layer)->SetParameters(parameters).ok());
  return std::unique_ptr<StreamingLayer>(static_cast<StreamingLayer*>(layer->release()));
}

// Returns the output of x appended in segments of the given lengths.
Tensor Stream(StreamingLayer& layer, const Tensor& x, const std::vector<int64_t>& split,
              int threads = 1) {
  ThreadPool pool(threads);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer.workspace_bytes(threads))});
  Execution execution;
  execution.pool = &pool;
  execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  const absl::Status setup = layer.Setup({{"x", x.view()}}, execution);
  EXPECT_TRUE(setup.ok()) << setup;
  Tensor out(x.dtype(), x.shape());
  Fill(out.view(), NAN);
  int64_t begin = 0;
  for (const int64_t tokens : split) {
    const absl::Status status =
        layer.Append({{"x", Slice(x.view(), 1, begin, tokens)}},
                     {{"out", Slice(out.view(), 1, begin, tokens)}}, execution);
    EXPECT_TRUE(status.ok()) << status;
    begin += tokens;
  }
  return out;
}

TEST(Compressive, AStreamInAnySegmentsEqualsTheDefinitionOfThoseSegments) {
  const Problem problem = CausalProblem(2, 2, 120, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* function : kFunctions) {
    for (const char* start_zero : {"false", "true"}) {
      const Options options = {{"function", function},     {"segment", "50"},
                               {"memory", "20"},           {"compressed_memory", "10"},
                               {"start_zero", start_zero}, {"compression", "3"}};
      SCOPED_TRACE(ToString(options));
      const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
      const auto layer = MakeLayer(problem, options, parameters);
      for (const std::vector<int64_t>& split :
           std::vector<std::vector<int64_t>>{std::vector<int64_t>(120, 1),
                                             {50, 50, 20},
                                             {1, 2, 49, 7, 11, 50},
                                             {19, 1, 1, 49, 50}}) {
        const NamedTensors defined =
            DefineCompressive(problem, ParseOptions<CompressiveOptions>(options).value(),
                              parameters, {{"x", x.view()}}, split)
                .value();
        const Tensor out = Stream(*layer, x, split);
        EXPECT_LE(MaxDifference(out.view(), defined.at("out").view()),
                  StackBound(defined.at("out").view(), 2));
      }
    }
  }
}

TEST(Compressive, ResetBeginsAnewAndThreadsChangeNoBit) {
  const Problem problem = CausalProblem(2, 2, 100, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* function : kFunctions) {
    const Options options = {{"function", function}, {"segment", "16"}, {"memory", "16"}};
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    const auto layer = MakeLayer(problem, options, parameters);
    const std::vector<int64_t> split = {16, 16, 16, 16, 16, 16, 4};
    const Tensor once = Stream(*layer, x, split), again = Stream(*layer, x, split, 2);
    EXPECT_EQ(MaxDifference(once.view(), again.view()), 0) << function;
    const StackOutcome outcome = EvaluateStack(Compressive(), problem, options, parameters, x);
    EXPECT_EQ(MaxDifference(once.view(), outcome.computed.at("out").view()), 0) << function;
  }
}

// ---- Where it is Transformer-XL ----

void ExpectIsTransformerXl(const Options& options, const Options& theirs) {
  const Compressive technique;
  const transformer_xl::TransformerXl transformer_xl;
  const Problem problem = CausalProblem(2, 2, 130, 8);
  const Tensor x = RandomHidden(problem);
  const NamedTensors parameters = PerturbedParameters(technique, problem, options);
  NamedTensors shared = PerturbedParameters(transformer_xl, problem, theirs);
  for (auto& [name, tensor] : shared) tensor = parameters.at(name).Clone();
  const StackOutcome ours = EvaluateStack(technique, problem, options, parameters, x);
  const StackOutcome plain = EvaluateStack(transformer_xl, problem, theirs, shared, x);
  for (const char* output : {"out", "context"}) {
    const ConstTensorView expected = plain.defined.at(output).view();
    EXPECT_LE(MaxDifference(ours.defined.at(output).view(), expected), 1e-12) << output;
    EXPECT_LE(MaxDifference(ours.computed.at(output).view(), expected), StackBound(expected, 2))
        << output;
  }
}

TEST(Compressive, WithBlocksOfOneTokenItIsTransformerXlWithALongerMemory) {
  for (const char* function : {"mean", "max", "most_used"}) {
    for (const char* pre_norm : {"false", "true"}) {
      SCOPED_TRACE(testing::Message() << function << ", pre_norm=" << pre_norm);
      ExpectIsTransformerXl({{"function", function},
                             {"compression", "1"},
                             {"memory", "13"},
                             {"compressed_memory", "22"},
                             {"segment", "16"},
                             {"pre_norm", pre_norm}},
                            {{"memory", "35"}, {"segment", "16"}, {"pre_norm", pre_norm}});
    }
  }
}

TEST(Compressive, WithBlocksOfOneTokenNothingIsLost) {
  const Problem problem = CausalProblem(2, 2, 100, 8);
  const Options options = {{"compression", "1"}, {"memory", "16"}, {"segment", "16"}};
  const Compressive technique;
  const NamedTensors parameters = PerturbedParameters(technique, problem, options);
  const StackOutcome outcome =
      EvaluateStack(technique, problem, options, parameters, RandomHidden(problem));
  for (const char* loss : {"attention_loss", "autoencoding_loss"}) {
    EXPECT_EQ(MaxAbs(outcome.computed.at(loss).view()), 0) << loss;
    EXPECT_EQ(MaxAbs(outcome.defined.at(loss).view()), 0) << loss;
  }
}

TEST(Compressive, WithoutCompressedMemoryItIsTransformerXl) {
  for (const char* function : kFunctions) {
    SCOPED_TRACE(function);
    ExpectIsTransformerXl(
        {{"function", function}, {"compressed_memory", "0"}, {"memory", "20"}, {"segment", "16"}},
        {{"memory", "20"}, {"segment", "16"}});
  }
}

TEST(Compressive, AMemoryThatHoldsEverythingIsNeverCompressed) {
  ExpectIsTransformerXl({{"memory", "130"}, {"segment", "16"}},
                        {{"memory", "130"}, {"segment", "16"}});
}

// ---- The queues ----

// A layer with W_v = W_o = 1 and all else 0. Every row of the list has the same weight, and out - x
// is the mean of the normalised rows. Token t is sign(t) (1, 1, -1, -1), so that the mean of some
// tokens is m (1, 1, -1, -1), which is normalised to m / sqrt(m^2 + 1e-5) times (1, 1, -1, -1).
class MeansOfRows {
 public:
  explicit MeansOfRows(Options options) : options_(std::move(options)) {
    for (const auto& [name, value] :
         {std::pair("layers", "1"), std::pair("segment", "4"), std::pair("memory", "4"),
          std::pair("compressed_memory", "3"), std::pair("pre_norm", "true"),
          std::pair("feed_forward_dim", "4")}) {
      options_[name] = value;
    }
    NamedTensors parameters = PerturbedParameters(Compressive(), problem_, options_);
    for (auto& [name, tensor] : parameters) Fill(tensor.view(), 0);
    Fill(parameters["layer0.attention_norm.gamma"].view(), 1);
    for (int64_t c = 0; c < 4; ++c) {
      for (const char* name : {"layer0.w_v", "layer0.w_o"}) {
        *parameters[name].view().MutableAt<float>(c, c) = 1;
      }
    }
    Tensor x(DType::kF32, {1, kTokens, 4});
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t c = 0; c < 4; ++c) x.view().Set(t * 4 + c, c < 2 ? Sign(t) : -Sign(t));
    }
    outcome_ = EvaluateStack(Compressive(), problem_, options_, parameters, x);
  }
  static constexpr int64_t kTokens = 40;
  static double Sign(int64_t t) { return (t * t + t / 3) % 5 < 2 ? -1 : 1; }
  static double Normalized(double m) { return m / std::sqrt(m * m + 1e-5); }

  // Compares with the mean over the list that token t sees.
  void ExpectMean(int64_t t, const std::vector<double>& rows) const {
    double sum = 0;
    for (const double m : rows) sum += Normalized(m);
    const double expected = Sign(t) + sum / static_cast<double>(rows.size());
    EXPECT_NEAR(outcome_.computed.at("out").span<float>()[t * 4], expected, 1e-6) << t;
    EXPECT_NEAR(outcome_.defined.at("out").span<double>()[t * 4], expected, 1e-12) << t;
  }

 private:
  Problem problem_ = CausalProblem(1, 1, kTokens, 4);
  Options options_;
  StackOutcome outcome_;
};

TEST(Compressive, QueuesHoldTheLastTokensAndTheLastBlocksAndTheRestWaits) {
  for (const int64_t c : {1, 2, 3, 5}) {
    const MeansOfRows means({{"compression", std::to_string(c)}});
    for (int64_t t = 0; t < MeansOfRows::kTokens; ++t) {
      const int64_t left = std::max<int64_t>(t / 4 * 4 - 4, 0), blocks = left / c;
      std::vector<double> rows;
      for (int64_t block = std::max<int64_t>(blocks - 3, 0); block < blocks; ++block) {
        double sum = 0;
        for (int64_t j = block * c; j < (block + 1) * c; ++j) sum += MeansOfRows::Sign(j);
        rows.push_back(sum / static_cast<double>(c));
      }
      for (int64_t j = left; j <= t; ++j) rows.push_back(MeansOfRows::Sign(j));
      means.ExpectMean(t, rows);
    }
  }
}

TEST(Compressive, WholeBlocksLeaveTheMemoryBeforeItOverflowsByThem) {
  // Of 8, 12, 16, ... tokens all but the last 4 overflow; blocks of 3 take 6 of 8, 9 of 12, 12 of 16.
  for (const int64_t c : {1, 2, 3, 5}) {
    const MeansOfRows means({{"compression", std::to_string(c)}, {"eviction", "whole_blocks"}});
    for (int64_t t = 0; t < MeansOfRows::kTokens; ++t) {
      const int64_t blocks = (std::max<int64_t>(t / 4 * 4 - 4, 0) + c - 1) / c;
      std::vector<double> rows;
      for (int64_t block = std::max<int64_t>(blocks - 3, 0); block < blocks; ++block) {
        double sum = 0;
        for (int64_t j = block * c; j < (block + 1) * c; ++j) sum += MeansOfRows::Sign(j);
        rows.push_back(sum / static_cast<double>(c));
      }
      for (int64_t j = blocks * c; j <= t; ++j) rows.push_back(MeansOfRows::Sign(j));
      means.ExpectMean(t, rows);
    }
  }
  const MeansOfRows means({{"compression", "3"}, {"eviction", "whole_blocks"}});
  const auto sign = MeansOfRows::Sign;
  means.ExpectMean(8, {(sign(0) + sign(1) + sign(2)) / 3, (sign(3) + sign(4) + sign(5)) / 3,
                       sign(6), sign(7), sign(8)});
}

TEST(Compressive, AMeanSquareIsTheSquareOfTheNormOverTheNumberOfElements) {
  // Segments of 20, 20 and 10 tokens of 16 channels; 5, 20 and 10 rows leave the memory of 15, of
  // which blocks of 3 take 3, 21 and 9.
  const Problem problem = CausalProblem(2, 2, 50, 8);
  const Tensor x = RandomHidden(problem);
  const double tokens[] = {20, 20, 10}, rows[] = {3, 21, 9};
  for (const char* function : {"mean", "convolution"}) {
    Options options = {
        {"function", function}, {"segment", "20"}, {"memory", "15"}, {"compression", "3"}};
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    const StackOutcome norms = EvaluateStack(Compressive(), problem, options, parameters, x);
    options["loss"] = "mean_square";
    const StackOutcome squares = EvaluateStack(Compressive(), problem, options, parameters, x);
    for (const char* loss : {"attention_loss", "autoencoding_loss"}) {
      const bool of_attention = std::string(loss) == "attention_loss";
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t s = 0; s < 3; ++s) {
          const double norm = *norms.defined.at(loss).view().At<double>(b, s, 0);
          const double square = *squares.defined.at(loss).view().At<double>(b, s, 0);
          const double elements = 16 * (of_attention ? tokens[s] : rows[s]);
          EXPECT_GT(norm, 0);
          EXPECT_NEAR(square, norm * norm / elements, 1e-12 * square) << loss << " " << s;
          EXPECT_NEAR(*squares.computed.at(loss).view().At<float>(b, s, 0), square, 1e-4 * square);
        }
      }
    }
  }
}

TEST(Compressive, LearnedVectorsThatAreTheProjectedSinusoidsChangeNoBit) {
  const Problem problem = CausalProblem(2, 2, 90, 8);
  const Tensor x = RandomHidden(problem);
  Options options = {{"segment", "10"}, {"memory", "12"}, {"compressed_memory", "5"}};
  NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  const StackOutcome sinusoids = EvaluateStack(Compressive(), problem, options, parameters, x);
  ThreadPool pool(1);
  for (const std::string layer : {"layer0.", "layer1."}) {
    const Tensor r = layers::SinusoidsOf({0, 26, 0}, problem.model_dim());
    const Tensor table =
        layers::ProjectSinusoids(r.view(), parameters.at(layer + "w_r").view(), &pool).value();
    parameters.erase(layer + "w_r");
    Tensor& learned = parameters[layer + "relative_keys"] = Tensor(DType::kF32, {27, 2, 8});
    std::copy_n(table.span<float>().data(), table.num_elements(), learned.span<float>().data());
  }
  options["learned_positions"] = "true";
  const StackOutcome learned = EvaluateStack(Compressive(), problem, options, parameters, x);
  EXPECT_EQ(MaxDifference(learned.computed.at("out").view(), sinusoids.computed.at("out").view()),
            0);
  // Only the table's rounding to fp32 divides the definitions.
  const ConstTensorView expected = sinusoids.defined.at("out").view();
  EXPECT_LE(MaxDifference(learned.defined.at("out").view(), expected), StackBound(expected, 2));
}

TEST(Compressive, ALearnedVectorDrawsQueriesToItsDistance) {
  // Scores are v . r_d with v = 1 and r_d = 0 but for r_3 = 100 in one channel of 4, scaled by 1 / 2:
  // a token's attention is all at the third token before it, where W_v = W_o = 1. Tokens 0 to 2 see
  // none at that distance and attend equally.
  const Problem problem = CausalProblem(1, 1, 30, 4);
  const Options options = {{"layers", "1"},           {"segment", "4"},
                           {"memory", "4"},           {"pre_norm", "true"},
                           {"feed_forward_dim", "4"}, {"learned_positions", "true"}};
  NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  for (auto& [name, tensor] : parameters) Fill(tensor.view(), 0);
  Fill(parameters["layer0.attention_norm.gamma"].view(), 1);
  for (int64_t c = 0; c < 4; ++c) {
    for (const char* name : {"layer0.w_v", "layer0.w_o"}) {
      *parameters[name].view().MutableAt<float>(c, c) = 1;
    }
  }
  *parameters["v"].view().MutableAt<float>(0, 1) = 1;
  *parameters["layer0.relative_keys"].view().MutableAt<float>(3, 0, 1) = 100;
  Tensor x(DType::kF32, {1, 30, 4});  // rows that are their own normalisation
  for (int64_t t = 0; t < 30; ++t) {
    for (int64_t c = 0; c < 4; ++c) x.view().Set(t * 4 + c, (c < 2) == (t % 7 < 3) ? 1 : -1);
  }
  const StackOutcome outcome = EvaluateStack(Compressive(), problem, options, parameters, x);
  for (int64_t t = 3; t < 30; ++t) {
    const double expected = x.view().Get(t * 4) + x.view().Get((t - 3) * 4);
    EXPECT_NEAR(outcome.computed.at("out").span<float>()[t * 4], expected, 1e-4) << t;
    EXPECT_NEAR(outcome.defined.at("out").span<double>()[t * 4], expected, 1e-4) << t;
  }
}

TEST(Compressive, TheCounterpartOfLearnedVectorsHasThemToo) {
  const Problem problem = CausalProblem(1, 2, 60, 8);
  const Tensor x = RandomHidden(problem);
  for (const char* segment : {"1", "8", "100"}) {
    const Options options = {{"segment", segment},
                             {"memory", "0"},
                             {"compressed_memory", "0"},
                             {"learned_positions", "true"}};
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    const TechniqueSpec counterpart = Compressive().Counterpart(problem, options).value();
    ExpectDefined(EvaluateStack(Compressive(), problem, counterpart.options, parameters, x), 2);
  }
}

TEST(Compressive, TheCounterpartKeepsTheOptionsThatHideNothing) {
  transformer_xl::ExpectCounterpartSeesAllTokens(
      Compressive(), {{"start_zero", "true"}, {"compression", "2"}, {"layers", "3"}},
      {{"start_zero", "false"}});
}

TEST(Compressive, QueuesThatStartWithZerosAreSeenFromTheFirstTokenOn) {
  const MeansOfRows means({{"compression", "2"}, {"start_zero", "true"}});
  const auto sign = MeansOfRows::Sign;
  means.ExpectMean(0, {0, 0, 0, 0, 0, 0, 0, sign(0)});
  means.ExpectMean(1, {0, 0, 0, 0, 0, 0, 0, sign(0), sign(1)});
  // After the first segment four zeros are two compressed ones, after the second two pairs of tokens
  // follow them.
  means.ExpectMean(4, {0, 0, 0, sign(0), sign(1), sign(2), sign(3), sign(4)});
  means.ExpectMean(8, {0, (sign(0) + sign(1)) / 2, (sign(2) + sign(3)) / 2, sign(4), sign(5),
                       sign(6), sign(7), sign(8)});
}

TEST(Compressive, RowsOfOneValueAreCompressedToIt) {
  // Pools and a choice return equal rows unchanged, so that nothing is lost.
  const Problem problem = CausalProblem(1, 2, 90, 8);
  Tensor x(DType::kF32, {1, 90, 16});
  for (int64_t t = 0; t < 90; ++t) {
    for (int64_t c = 0; c < 16; ++c) x.view().Set(t * 16 + c, 0.3 * static_cast<double>(c) - 2);
  }
  for (const char* function : {"mean", "max", "most_used"}) {
    const Options options = {
        {"function", function}, {"segment", "16"}, {"memory", "16"}, {"compression", "3"}};
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    const StackOutcome outcome = EvaluateStack(Compressive(), problem, options, parameters, x);
    // The first layer's rows are equal; the second layer's inputs need not be.
    for (int64_t s = 0; s < 6; ++s) {
      EXPECT_EQ(*outcome.computed.at("autoencoding_loss").view().At<float>(0, s, 0), 0) << s;
      EXPECT_LE(*outcome.computed.at("attention_loss").view().At<float>(0, s, 0), 1e-4) << s;
    }
  }
}

TEST(Compressive, MostUsedKeepsTheTokensThatQueriesAttendTo) {
  // There is one head of 4 channels in one layer. W_q = 0 and u = 1 times the first channel's
  // direction make the score of key j its first channel, whatever the query: so the most used of 8
  // rows are those with the largest first channels.
  const Problem problem = CausalProblem(1, 1, 24, 4);
  const Options options = {{"function", "most_used"}, {"layers", "1"},
                           {"segment", "8"},          {"memory", "8"},
                           {"compression", "4"},      {"feed_forward_dim", "4"},
                           {"compressed_memory", "8"}};
  NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  for (auto& [name, tensor] : parameters) Fill(tensor.view(), 0);
  for (int64_t c = 0; c < 4; ++c) *parameters["layer0.w_k"].view().MutableAt<float>(c, c) = 1;
  *parameters["u"].view().MutableAt<float>(0, 0) = 4;
  Tensor x(DType::kF32, {1, 24, 4});
  FillNormal(&x, 5, "x");
  const double first[] = {0.1, 3, -1, 0.5, 2, 0.2, 2.9, 1};  // tokens 0 to 7: 1 and 6 stay
  for (int64_t t = 0; t < 8; ++t) x.view().Set(t * 4, first[t]);
  x.view().Set(8 * 4, -5);
  for (int64_t t = 9; t < 16; ++t) x.view().Set(t * 4, t == 12 || t == 15 ? 4 : 1);
  const StackOutcome outcome = EvaluateStack(Compressive(), problem, options, parameters, x);
  const auto kept = [&](int64_t segment) {
    const int32_t* rows = outcome.computed.at("kept").view().At<int32_t>(0, segment, 0);
    return std::vector<int32_t>(rows, rows + 2);
  };
  EXPECT_EQ(kept(0), (std::vector<int32_t>{-1, -1}));  // nothing has left the memory
  EXPECT_EQ(kept(1), (std::vector<int32_t>{1, 6}));
  EXPECT_EQ(kept(2), (std::vector<int32_t>{4, 7}));
  ExpectDefined(outcome, 1);
}

TEST(Compressive, TheDefinitionFollowsALayersChoiceOnlyWhereItIsAsGood) {
  const Options options = {{"function", "most_used"}, {"layers", "1"},
                           {"segment", "8"},          {"memory", "8"},
                           {"compression", "4"},      {"feed_forward_dim", "1"},
                           {"compressed_memory", "8"}};
  // The third of three segments has 8 tokens, and two of the waiting rows are kept, or 4 and one.
  for (const int64_t tokens : {24, 20}) {
    const Problem problem = CausalProblem(1, 1, tokens, 4);
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    const Tensor x = RandomHidden(problem);
    const auto define = [&](const NamedTensors* computed) {
      NamedTensors outputs;
      DefinitionRequest request;
      request.computed = computed;
      Inputs inputs;
      inputs.Set("x", x.view());
      EXPECT_TRUE(
          Compressive().Define(problem, options, parameters, inputs, request, &outputs).ok());
      return outputs;
    };
    const NamedTensors own = define(nullptr);
    const auto kept = own.at("kept").span<double>();
    ASSERT_EQ(kept.size(), 6u);
    EXPECT_EQ(kept[5] < 0, tokens == 20);
    // Any other rows, of which none is number -1, are too few, too many, out of order or range, or
    // less used by more than roundings.
    for (const int64_t segment : {1, 2}) {
      for (int32_t a = -1; a < 8; ++a) {
        for (int32_t b = -1; b < 9; ++b) {
          NamedTensors computed;
          Tensor& choice = computed["kept"] = Tensor(DType::kI32, own.at("kept").shape());
          for (int64_t n = 0; n < 6; ++n) choice.view().Set(n, kept[n]);
          choice.view().Set(2 * segment, a);
          choice.view().Set(2 * segment + 1, b);
          const NamedTensors followed = define(&computed);
          EXPECT_EQ(MaxDifference(followed.at("kept").view(), own.at("kept").view()), 0)
              << tokens << " tokens, segment " << segment << ": " << a << ", " << b;
          EXPECT_EQ(MaxDifference(followed.at("out").view(), own.at("out").view()), 0);
        }
      }
    }
  }
}

TEST(Compressive, ADilatedConvolutionReadsEverySecondRowBackwards) {
  // The rate is c = 4: y_t = b + sum_i x_(4 t + 3 - 2 i) w_i. With w_i = i + 1 for one channel, and
  // old rows 0 to 7 of values 1 to 8: y_0 = 4 * 1 + 2 * 2 = 8 (rows -1 and -3 are zeros), y_1 = 8 +
  // 6 * 2 + 4 * 3 + 2 * 4 = 40. The decoded row 4 t + i is y_t w_i.
  const Problem problem = CausalProblem(1, 1, 16, 1);
  const Options options = {{"function", "dilated_convolution"},
                           {"layers", "1"},
                           {"segment", "8"},
                           {"memory", "8"},
                           {"compression", "4"},
                           {"feed_forward_dim", "1"}};
  NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  for (auto& [name, tensor] : parameters) Fill(tensor.view(), 0);
  for (int64_t i = 0; i < 4; ++i) {
    parameters["layer0.dilated_convolution.w"].span<float>()[i] = static_cast<float>(i + 1);
  }
  Tensor x(DType::kF32, {1, 16, 1});
  for (int64_t t = 0; t < 16; ++t) x.view().Set(t, static_cast<double>(t % 8 + 1));
  const StackOutcome outcome = EvaluateStack(Compressive(), problem, options, parameters, x);
  double squares = 0;
  for (int64_t t = 0; t < 8; ++t) {
    const double decoded = (t < 4 ? 8.0 : 40.0) * static_cast<double>(t % 4 + 1);
    squares += (static_cast<double>(t + 1) - decoded) * (static_cast<double>(t + 1) - decoded);
  }
  EXPECT_NEAR(*outcome.defined.at("autoencoding_loss").view().At<double>(0, 1, 0),
              std::sqrt(squares), 1e-12);
  EXPECT_NEAR(*outcome.computed.at("autoencoding_loss").view().At<float>(0, 1, 0),
              std::sqrt(squares), 1e-4);
}

TEST(Compressive, LaterTokensDoNotChangeEarlierOutputs) {
  const Problem problem = CausalProblem(1, 2, 100, 8);
  for (const char* function : kFunctions) {
    const Options options = {{"function", function}, {"segment", "16"}, {"memory", "16"}};
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    Tensor x = RandomHidden(problem);
    const StackOutcome before = EvaluateStack(Compressive(), problem, options, parameters, x);
    Fill(Slice(x.view(), 1, 70, 30), -3);
    const StackOutcome after = EvaluateStack(Compressive(), problem, options, parameters, x);
    EXPECT_EQ(MaxDifference(Slice(before.computed.at("out").view(), 1, 0, 70),
                            Slice(after.computed.at("out").view(), 1, 0, 70)),
              0)
        << function;
  }
}

TEST(Compressive, AStatisticKnowsTheFirstTokenThatMatters) {
  const Problem problem = CausalProblem(1, 1, 100, 4);
  for (const char* function : kFunctions) {
    const Options options = {{"function", function},     {"layers", "1"},
                             {"segment", "8"},           {"memory", "8"},
                             {"compressed_memory", "4"}, {"compression", "4"}};
    const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
    const auto layer = MakeLayer(problem, options, parameters);
    const int64_t reach = static_cast<int64_t>(layer->statistics().at("reach_tokens"));
    // Token 99 is in segment 96 to 103, its memory is 88 to 95, and rows 72 to 87 are compressed.
    EXPECT_EQ(reach, 99 - 72) << function;
    EXPECT_EQ(layer->statistics().at("compressed_rows"), 4);
    const Tensor x = RandomHidden(problem);
    const StackOutcome before = EvaluateStack(Compressive(), problem, options, parameters, x);
    for (const int64_t changed : {99 - reach - 1, 99 - reach}) {
      Tensor other = x.Clone();
      Fill(Slice(other.view(), 1, changed, 1), 4);
      const StackOutcome after = EvaluateStack(Compressive(), problem, options, parameters, other);
      const double difference = MaxDifference(Slice(before.computed.at("out").view(), 1, 99, 1),
                                              Slice(after.computed.at("out").view(), 1, 99, 1));
      // The attention by which rows are chosen depends on earlier tokens.
      if (std::strcmp(function, "most_used") == 0) continue;
      if (changed < 99 - reach) {
        EXPECT_EQ(difference, 0) << function;
        // The convolution reads every second row.
      } else if (std::strcmp(function, "dilated_convolution") != 0) {
        EXPECT_GT(difference, 0) << function;
      }
    }
  }
}

// ---- Costs, parameters, errors ----

TEST(Compressive, CostCountsTheProductsOfTheDefinition) {
  // There are 2 layers of width 4 and inner width 8, and 10 tokens in segments of 4, 4 and 2, with
  // memory 2 and 1 compressed row of 2 tokens. The keys seen are 1 to 4; then 2 + 1 + 1 to 4; then
  // 2 + 1 + 1 to 2. The compressed rows are 1, 2, 1.
  const Options options = {{"segment", "4"},           {"memory", "2"},
                           {"compressed_memory", "1"}, {"compression", "2"},
                           {"feed_forward_dim", "8"},  {"function", "convolution"}};
  const auto layer =
      Compressive().Create(CausalProblem(3, 2, 10, 2), options, Device::kCpu, 1).value();
  const double projections = 10 * 4 * 4 * 4, feed_forward = 10 * 2 * 4 * 8;
  const double pairs = 10 + 22 + 9, scores_and_values = pairs * 3 * 4;
  const double compressed = 4 * (2 * 4 * 4 + 2 * 4 * 4);  // keys and values; the convolution
  EXPECT_EQ(layer->cost().flops.value(),
            2.0 * 3 * 2 * (projections + feed_forward + scores_and_values + compressed));
  // A backward pass computes matrices' products again, with two for gradients, and 11 products a pair
  // for the 3 of a run. Two segments read 3 earlier rows, of whose keys and values there are two
  // products, and tokens are 0 to 6 rows from those that they see, in all batch rows.
  const double of_earlier = 2 * 3 * 2 * (2 * 4 * 4), of_distances = 7 * 4 * 4;
  EXPECT_EQ(
      layer->backward_cost().flops.value(),
      2.0 * 2 *
          (3 * (3 * (projections + feed_forward) + pairs * 11 * 4 + of_earlier) + of_distances));
  Options clamped = options;
  clamped["max_distance"] = "3";  // 0 to 3
  const auto of_clamped =
      Compressive().Create(CausalProblem(3, 2, 10, 2), clamped, Device::kCpu, 1).value();
  EXPECT_EQ(*layer->backward_cost().flops - *of_clamped->backward_cost().flops,
            2.0 * 2 * (of_distances - 4 * 4 * 4));
  Options learned = options;
  learned["learned_positions"] = "true";
  const auto of_learned =
      Compressive().Create(CausalProblem(3, 2, 10, 2), learned, Device::kCpu, 1).value();
  EXPECT_EQ(*layer->backward_cost().flops - *of_learned->backward_cost().flops,
            2.0 * 2 * of_distances);
}

TEST(Compressive, TheCacheHoldsKeysAndValuesOfBothQueuesAndTheTokensThatWait) {
  const Problem problem = CausalProblem(3, 2, 10, 2);
  const Options options = {
      {"segment", "4"}, {"memory", "2"}, {"compressed_memory", "1"}, {"compression", "2"}};
  const auto layer = Compressive().Create(problem, options, Device::kCpu, 1).value();
  // Six tokens of memory and segment, one compressed row and two of a segment. Eight tokens wait at
  // most: 2 + 4 and one of a block that is not whole, at both ends, in blocks of 2.
  const size_t tokens = KeyValueCache::Create(Device::kCpu, problem, 2 + 4).value().bytes();
  const size_t rows = KeyValueCache::Create(Device::kCpu, problem, 1 + 2).value().bytes();
  const size_t waiting = 3 * 8 * 4 * sizeof(float);
  EXPECT_EQ(layer->statistics().at("cache_bytes"),
            static_cast<double>(2 * (tokens + rows + waiting)));
}

TEST(Compressive, ParametersHaveTheNamesThatAreTrained) {
  const Problem problem = CausalProblem(1, 2, 10, 4);
  const auto parameters = [&](const char* function) {
    return PerturbedParameters(Compressive(), problem, {{"function", function}});
  };
  EXPECT_EQ(parameters("mean").count("layer0.convolution.w"), 0u);
  EXPECT_EQ(parameters("convolution").at("layer1.convolution.w").shape(), (Shape{4, 8, 8}));
  EXPECT_EQ(parameters("convolution").at("layer1.convolution.b").shape(), (Shape{8}));
  EXPECT_EQ(parameters("dilated_convolution").at("layer0.dilated_convolution.w").shape(),
            (Shape{4, 8, 8}));
}

TEST(Compressive, WhatItCannotDoIsSaidInOneLine) {
  const auto message = [](const Problem& problem, const Options& options) {
    const auto layer = Compressive().Create(problem, options, Device::kCpu, 1);
    return layer.ok() ? "ok" : std::string(layer.status().ToString());
  };
  Problem problem = CausalProblem(1, 4, 64, 16);
  EXPECT_EQ(message(problem, {{"compression", "0"}}),
            "INVALID_ARGUMENT: option compression is \"0\"; allowed are 1 to 64");
  EXPECT_EQ(
      message(problem, {{"function", "median"}}),
      "INVALID_ARGUMENT: option function is \"median\"; allowed are mean | max | convolution | "
      "dilated_convolution | most_used");
  EXPECT_EQ(message(problem, {{"eviction", "whole_blocks"}, {"memory", "2"}}),
            "INVALID_ARGUMENT: option memory is 2; allowed with eviction=whole_blocks, which takes "
            "up to 3 tokens more than the overflow, are 3 to 1048576");
  problem.kv_heads = 2;
  EXPECT_EQ(message(problem, {}),
            "INVALID_ARGUMENT: compressive is self-attention: kv_heads is 2; allowed is "
            "query_heads, 4");
}

TEST(Compressive, TheDefinitionRefusesSegmentsOfMoreOrFewerTokens) {
  const Problem problem = CausalProblem(1, 2, 8, 4);
  const NamedTensors parameters = PerturbedParameters(Compressive(), problem, {});
  const Tensor x = RandomHidden(problem);
  for (const std::vector<int64_t>& segments : std::vector<std::vector<int64_t>>{{4, 3}, {8, 1}}) {
    EXPECT_EQ(
        DefineCompressive(problem, {}, parameters, {{"x", x.view()}}, segments).status().message(),
        "segments have " + std::to_string(segments[0] + segments[1]) + " tokens; allowed are 8");
  }
}

// ---- Queues of an earlier run ----

TEST(Compressive, TwoRunsWithTheQueuesHandedOverAreOne) {
  for (const char* function : kFunctions) {
    for (const Options& more : std::vector<Options>{
             {{"memory", "10"}, {"compressed_memory", "6"}, {"compression", "3"}},
             {{"memory", "23"}, {"compressed_memory", "2"}, {"pre_norm", "true"}},
             {{"memory", "10"}, {"compressed_memory", "0"}, {"start_zero", "true"}},
             {{"memory", "60"}, {"compressed_memory", "30"}, {"start_zero", "true"}},
             {{"memory", "11"},
              {"compressed_memory", "9"},
              {"compression", "5"},
              {"start_zero", "true"},
              {"pre_norm", "true"},
              {"max_distance", "17"}},
             {{"memory", "9"}, {"eviction", "whole_blocks"}, {"learned_positions", "true"}},
             // The first of the two begins with what a still earlier run left.
             {{"memory", "10"},
              {"compressed_memory", "6"},
              {"given_memory", "12"},
              {"given_compressed", "5"}},
             {{"memory", "40"}, {"compressed_memory", "20"}, {"given_compressed", "19"}}}) {
      Options options = more;
      options["function"] = function;
      options["segment"] = "8";
      SCOPED_TRACE(ToString(options));
      ExpectTwoRunsAreOne(Compressive(), CausalProblem(2, 2, 70, 8), options, 40);
      ExpectTwoRunsAreOne(Compressive(), CausalProblem(1, 2, 19, 8), options, 8);
    }
  }
}

TEST(Compressive, OnGpusAndInHalfPrecisionTooTwoRunsAreOne) {
  for (const char* function : kFunctions) {
    SCOPED_TRACE(function);
    const Options options = {{"function", function}, {"segment", "8"},
                             {"memory", "10"},       {"compressed_memory", "6"},
                             {"given_memory", "12"}, {"pre_norm", "true"}};
    ExpectTwoRunsAreOne(Compressive(), CausalProblem(1, 2, 43, 8), options, 24, KernelDevice());
    // A choice by 16 bits may be another.
    if (function == std::string("most_used")) continue;
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      ExpectTwoRunsAreOne(Compressive(), CausalProblem(1, 2, 43, 16, dtype), options, 24);
    }
  }
}

TEST(Compressive, TheFinalQueuesAreTheLastTokensAndTheLastBlocks) {
  // Of 43 tokens 33 have left the memory and 32 are compressed: one waits.
  const Problem problem = CausalProblem(2, 2, 43, 4);
  const Options options = {
      {"layers", "1"}, {"segment", "8"}, {"memory", "10"}, {"compressed_memory", "3"}};
  const Tensor x = RandomHidden(problem);
  const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  const StackOutcome outcome = EvaluateStack(Compressive(), problem, options, parameters, x);
  const Tensor& memories = outcome.computed.at("memories");
  const Tensor& compressed = outcome.computed.at("compressed");
  ASSERT_EQ(memories.shape(), (Shape{2, 1, 11, 8}));
  ASSERT_EQ(compressed.shape(), (Shape{2, 1, 3, 8}));
  EXPECT_EQ(outcome.computed.count("waiting_use"), 0u);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t c = 0; c < 8; ++c) {
      for (int64_t t = 0; t < 11; ++t) {
        EXPECT_EQ(*memories.view().At<float>(b, 0, t, c), *x.view().At<float>(b, 32 + t, c));
      }
      for (int64_t t = 0; t < 3; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < 4; ++i) sum += *x.view().At<float>(b, 20 + 4 * t + i, c);
        EXPECT_NEAR(*compressed.view().At<float>(b, 0, t, c), sum / 4, 1e-6);
      }
    }
  }
}

TEST(Compressive, QueuesThatStartWithZerosEndWithThoseThatAreLeft) {
  const Problem problem = CausalProblem(1, 2, 6, 4);
  const Options options = {
      {"segment", "4"}, {"memory", "9"}, {"compressed_memory", "5"}, {"start_zero", "true"}};
  const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  for (const Device device : TestedDevices()) {
    const StackOutcome outcome =
        EvaluateStack(Compressive(), problem, options, parameters, RandomHidden(problem), device);
    // Six zeros have left the memory; four of them are one compressed row, and two wait.
    const ConstTensorView memories = outcome.computed.at("memories").view();
    ASSERT_EQ(memories.dim(2), 11);
    EXPECT_EQ(MaxAbs(Slice(memories, 2, 0, 5)), 0);
    EXPECT_GT(MaxAbs(Slice(memories, 2, 5, 1)), 0);
    EXPECT_EQ(outcome.computed.at("compressed").dim(2), 5);
    EXPECT_EQ(MaxAbs(outcome.computed.at("compressed").view()), 0);
  }
}

TEST(Compressive, AStreamReadsTheQueuesWithItsFirstSegment) {
  const Problem problem = CausalProblem(2, 2, 30, 8);
  const Options options = {{"segment", "8"},           {"memory", "10"},
                           {"compressed_memory", "6"}, {"given_memory", "12"},
                           {"given_compressed", "4"},  {"function", "most_used"}};
  const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  const NamedTensors inputs = RandomInputs(Compressive().InputSpecs(problem, options).value(), 5);
  ASSERT_EQ(inputs.count("waiting_use"), 1u);
  const auto layer = MakeLayer(problem, options, parameters);
  const auto run = RunLayer(*layer, ViewsOf(inputs), 1);
  ASSERT_TRUE(run.ok()) << run.status();
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(layer->workspace_bytes(1))});
  const Execution execution = {
      &pool, absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes()), nullptr};
  const ConstTensorView x = inputs.at("x").view();
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_TRUE(layer->Reset().ok());
    Tensor out(DType::kF32, x.shape());
    for (const int64_t begin : {0, 8, 16, 24}) {
      const int64_t count = std::min<int64_t>(8, 30 - begin);
      Inputs segment = {{"x", Slice(x, 1, begin, count)}};
      const Outputs written = {{"out", Slice(out.view(), 1, begin, count)}};
      for (const char* name : {"memories", "compressed", "waiting_use"}) {
        if (begin > 0) break;
        EXPECT_EQ(layer->Append(segment, written, execution).message(),
                  "input " + std::string(name) + " is missing; the first segment has need of it");
        segment.Set(name, inputs.at(name).view());
      }
      const absl::Status status = layer->Append(segment, written, execution);
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(MaxDifference(out.view(), run->at("out").view()), 0);
  }
}

TEST(Compressive, CostsCountTheGivenKeys) {
  // Tokens of the first segment see 3 + 1 given keys and 1, ..., 4 of the segment. Then four tokens
  // have left the memory and one waited: one block of 3 is compressed, and 2 rows are seen beside 3
  // tokens.
  const Options options = {{"segment", "4"},     {"memory", "3"},       {"compressed_memory", "2"},
                           {"compression", "3"}, {"given_memory", "4"}, {"given_compressed", "1"}};
  const auto layer =
      Compressive().Create(CausalProblem(1, 2, 6, 4), options, Device::kCpu, 1).value();
  EXPECT_EQ(layer->statistics().at("keys_per_token"), (5 + 6 + 7 + 8 + 6 + 7) / 6.0);
  EXPECT_EQ(layer->statistics().at("compressed_rows"), 2);
}

TEST(Compressive, MoreThanTheQueuesHoldCannotBeGiven) {
  const auto message = [](const Options& options) {
    return std::string(Compressive()
                           .Create(CausalProblem(1, 2, 8, 4), options, Device::kCpu, 1)
                           .status()
                           .message());
  };
  EXPECT_EQ(
      message({{"memory", "5"}, {"given_memory", "9"}}),
      "option given_memory is 9; allowed with memory=5 and up to 3 rows that wait are 0 to 8");
  EXPECT_EQ(message({{"memory", "5"}, {"given_memory", "6"}, {"eviction", "whole_blocks"}}),
            "option given_memory is 6; allowed with memory=5 are 0 to 5");
  EXPECT_EQ(message({{"compressed_memory", "5"}, {"given_compressed", "6"}}),
            "option given_compressed is 6; allowed with compressed_memory=5 are 0 to 5");
}

// ---- The backward pass ----

TEST(Compressive, GradientsStopAtTheQueues) {
  const auto expect = [&](Options options) {
    options.insert({{"layers", "2"}, {"segment", "20"}, {"memory", "7"}});
    options.insert({{"compressed_memory", "5"}, {"compression", "3"}});
    transformer_xl::ExpectGradientsStopAtTheMemory(
        Compressive(), transformer_xl::CausalProblem(2, 2, 2 * 20, 8), options);
  };
  for (const char* function : {"mean", "max", "most_used", "convolution", "dilated_convolution"}) {
    expect({{"function", function}});
    expect({{"function", function}, {"pre_norm", "true"}, {"loss", "mean_square"}});
  }
  expect({{"eviction", "whole_blocks"}, {"learned_positions", "true"}, {"max_distance", "12"}});
  expect({{"memory", "30"}, {"share_biases", "false"}, {"final_norm", "true"}});
}

// The losses train the compression alone, and nothing else trains it.
TEST(Compressive, EachLossHasItsGradientsAndTheOthersHaveNone) {
  const Problem problem = transformer_xl::CausalProblem(2, 2, 60, 8);
  const Options options = {
      {"segment", "20"}, {"memory", "20"}, {"function", "convolution"}, {"pre_norm", "true"}};
  const auto layer = Compressive().Create(problem, options, Device::kCpu, 1).value();
  const Tensor x = transformer_xl::RandomHidden(problem);
  for (const std::string& loss : layer->differentiable_outputs()) {
    SCOPED_TRACE(loss);
    NamedTensors drawn = RandomOutputGradients(*layer, 5), of_loss;
    of_loss[loss] = std::move(drawn.at(loss));
    const auto gradients = RunBackward(*layer, {{"x", x.view()}}, of_loss, 2);
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    const bool is_of_compression = loss == "attention_loss" || loss == "autoencoding_loss";
    EXPECT_EQ(MaxAbs(gradients->inputs.at("x").view()) == 0, is_of_compression);
    for (const auto& [name, gradient] : gradients->parameters) {
      // The context is read before the last layer's network.
      if (loss == "context" && name.find("layer1.ff") == 0) continue;
      const bool is_compression = name.find("convolution") != std::string::npos;
      EXPECT_EQ(MaxAbs(gradient.view()) > 0, is_compression == is_of_compression) << name;
    }
  }
  EXPECT_EQ(layer->differentiable_outputs().size(), 4u);
}

// Behind the second of three segments, and the third, rows are compressed that the third reads; where an
// earlier run left some, behind all of them.
TEST(Compressive, OnDevicesTheGradientsAreThoseOfTheCpu) {
  const auto expect = [](Options options, const std::vector<std::string>& outputs = {}) {
    options.insert({{"layers", "2"}, {"segment", "20"}, {"memory", "20"}});
    options.insert({{"compressed_memory", "8"}, {"compression", "3"}});
    const Problem problem = CausalProblem(2, 2, 50, 8);
    const auto layer = Compressive().Create(problem, options, KernelDevice(), 1).value();
    EXPECT_GT(layer->statistics().at("compressed_rows"), 0);
    transformer_xl::ExpectTheCpusGradientsOnDevices(Compressive(), problem, options, outputs);
  };
  for (const char* function : kFunctions) {
    expect({{"function", function}, {"pre_norm", "true"}, {"start_zero", "true"}});
    expect({{"function", function},
            {"given_memory", "21"},
            {"given_compressed", "5"},
            {"loss", "mean_square"}});
  }
  for (const char* function : {"convolution", "dilated_convolution"}) {
    for (const char* output : {"attention_loss", "autoencoding_loss"}) {
      const Options options = {{"function", function}, {"layers", "1"}};
      Options others = options;
      others["loss"] = "mean_square";
      others["pre_norm"] = "true";
      expect(options, {output});
      expect(others, {output});
    }
  }
  expect({{"eviction", "whole_blocks"}, {"learned_positions", "true"}, {"max_distance", "12"}});
  expect({{"memory", "30"}, {"share_biases", "false"}, {"final_norm", "true"}});
}

// In one layer no gradient of the losses by a convolution's parameters stops on its way.
TEST(Compressive, LossesHaveTheGradientsOfTheDefinition) {
  const Problem problem = CausalProblem(2, 2, 50, 8);
  const Tensor x = RandomHidden(problem);
  NamedTensors inputs;
  inputs["x"] = x.Clone();
  for (const Device device : TestedDevices()) {
    for (const std::string function : {"convolution", "dilated_convolution"}) {
      for (const char* loss : {"attention_loss", "autoencoding_loss"}) {
        for (const char* pre_norm : {"false", "true"}) {
          Options options = {{"segment", "20"},      {"memory", "20"}, {"function", function},
                             {"pre_norm", pre_norm}, {"layers", "1"},  {"compression", "3"}};
          options["loss"] = pre_norm == std::string("true") ? "mean_square" : "norm";
          SCOPED_TRACE(testing::Message() << Name(device) << " " << ToString(options) << loss);
          const NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
          const RunRequest request = {options, device, /*seed=*/1, &parameters, /*threads=*/1};
          NamedTensors g;
          g[loss] = Tensor(DType::kF32, {2, 3, 1});
          FillNormal(&g[loss], 9, "g");
          const auto pass =
              BackwardOfTechnique(Compressive(), problem, ViewsOf(inputs), g, request);
          ASSERT_TRUE(pass.ok()) << pass.status();
          for (const char* name : {".w", ".b"}) {
            const DirectionalDerivative slope = DerivativeOf(
                "layer0." + function + name, Compressive(), problem, inputs, g, *pass, request);
            EXPECT_NEAR(slope.of_layer, slope.of_definition, slope.bound) << name;
          }
        }
      }
    }
  }
}

// The gradients of the losses of one batch row are those of a run of that row alone, whose sums are of the
// same size.
TEST(Compressive, BatchRowsHaveGradientsOfTheirOwnLosses) {
  for (const Device device : TestedDevices()) {
    for (const char* measure : {"norm", "mean_square"}) {
      const Options options = {{"segment", "20"},
                               {"memory", "20"},
                               {"function", "convolution"},
                               {"layers", "1"},
                               {"loss", measure}};
      const Problem both = CausalProblem(2, 2, 40, 8), one = CausalProblem(1, 2, 40, 8);
      const NamedTensors parameters = PerturbedParameters(Compressive(), both, options);
      const RunRequest request = {options, device, /*seed=*/1, &parameters, /*threads=*/1};
      const Tensor x = RandomHidden(both);
      for (const int64_t b : {0, 1}) {
        NamedTensors of_both, of_one;
        for (const char* loss : {"attention_loss", "autoencoding_loss"}) {
          of_both[loss] = Tensor(DType::kF32, {2, 2, 1});
          of_one[loss] = Tensor(DType::kF32, {1, 2, 1});
          Fill(of_both[loss].view(), 0);
          Fill(Slice(of_both[loss].view(), 0, b, 1), 1);
          Fill(of_one[loss].view(), 1);
        }
        const auto together =
            BackwardOfTechnique(Compressive(), both, {{"x", x.view()}}, of_both, request).value();
        const auto alone = BackwardOfTechnique(Compressive(), one,
                                               {{"x", Slice(x.view(), 0, b, 1)}}, of_one, request)
                               .value();
        for (const char* name : {"layer0.convolution.w", "layer0.convolution.b"}) {
          const ConstTensorView expected = alone.parameters.at(name).view();
          EXPECT_GT(MaxAbs(expected), 0);
          EXPECT_LE(MaxDifference(together.parameters.at(name).view(), expected),
                    StackBound(expected, 2))
              << name << ", " << measure << ", batch row " << b;
        }
      }
    }
  }
}

// With the norm N and the mean square M = N^2 / E of E elements, dN = E / (2 N) dM = N / (2 M) dM.
TEST(Compressive, TheGradientOfANormIsThatOfTheMeanSquareTimesItsDerivative) {
  const Problem problem = transformer_xl::CausalProblem(1, 2, 40, 8);
  const Tensor x = transformer_xl::RandomHidden(problem);
  Options options = {
      {"segment", "20"}, {"memory", "20"}, {"function", "convolution"}, {"layers", "1"}};
  for (const std::string loss : {"attention_loss", "autoencoding_loss"}) {
    SCOPED_TRACE(loss);
    const auto gradients_of = [&](const char* measure) {
      options["loss"] = measure;
      const auto layer = Compressive().Create(problem, options, Device::kCpu, 1).value();
      NamedTensors of_loss;
      of_loss[loss] = Tensor(DType::kF32, {1, 2, 1});
      Fill(of_loss[loss].view(), 0);
      *of_loss[loss].view().MutableAt<float>(0, 1, 0) = 1;
      return RunBackward(*layer, {{"x", x.view()}}, of_loss, 1).value();
    };
    const LayerGradients of_norm = gradients_of("norm"), of_square = gradients_of("mean_square");
    const double norm = *of_norm.outputs.at(loss).view().At<float>(0, 1, 0);
    const double square = *of_square.outputs.at(loss).view().At<float>(0, 1, 0);
    ASSERT_GT(square, 0);
    const double factor = norm / (2 * square);
    for (const auto& [name, gradient] : of_norm.parameters) {
      if (name.find("convolution") == std::string::npos) continue;
      const ConstTensorView other = of_square.parameters.at(name).view();
      const double largest = MaxAbs(gradient.view());
      EXPECT_GT(largest, 0) << name;
      for (int64_t n = 0; n < NumElements(gradient.shape()); ++n) {
        EXPECT_NEAR(gradient.span<float>()[n], factor * static_cast<const float*>(other.data)[n],
                    1e-5 * largest)
            << name << " " << n;
      }
    }
  }
}

// ---- Golden files ----

void ExpectGolden(const std::string& file) {
  SafetensorsFile golden = GoldenFile("memory/compressive/testdata/" + file + ".safetensors");
  const auto number = [&](const char* name) { return std::stoll(golden.metadata.at(name)); };
  const Tensor& x = golden.tensors.at("x");
  const Problem problem = CausalProblem(x.dim(0), number("heads"), x.dim(1), number("head_dim"));
  const Options options = {{"layers", golden.metadata.at("layers")},
                           {"segment", golden.metadata.at("segment_tokens")},
                           {"memory", golden.metadata.at("memory_tokens")},
                           {"compressed_memory", golden.metadata.at("compressed_rows")},
                           {"compression", golden.metadata.at("compression")},
                           {"feed_forward_dim", golden.metadata.at("inner_dim")},
                           {"function", "convolution"},
                           {"eviction", golden.metadata.at("eviction")},
                           {"loss", golden.metadata.at("loss")},
                           {"start_zero", golden.metadata.at("start_zero")},
                           {"learned_positions", golden.metadata.at("learned_positions")},
                           {"pre_norm", golden.metadata.at("pre_norm")}};
  NamedTensors parameters = PerturbedParameters(Compressive(), problem, options);
  for (auto& [name, tensor] : parameters) tensor = golden.tensors.at(name).Clone();
  for (const Device device : TestedDevices()) {
    SCOPED_TRACE(Name(device));
    const StackOutcome outcome =
        EvaluateStack(Compressive(), problem, options, parameters, x, device);
    for (const char* output : {"out", "attention_loss", "memories", "compressed"}) {
      const ConstTensorView theirs = golden.tensors.at(output).view();
      EXPECT_LE(MaxDifference(outcome.defined.at(output).view(), theirs), 1e-13) << output;
      EXPECT_LE(MaxDifference(outcome.computed.at(output).view(), theirs), StackBound(theirs, 2))
          << output;
    }
    // The package hands its queues from each segment to the next, and so do two runs.
    const int64_t first = 3 * number("segment_tokens");
    const StackOutcome two = EvaluateInTwoRuns(Compressive(), problem, options, parameters,
                                               {{"x", x.view()}}, first, device);
    for (const char* output : {"out", "attention_loss", "memories", "compressed"}) {
      const ConstTensorView theirs = golden.tensors.at(output).view();
      EXPECT_LE(MaxDifference(two.defined.at(output).view(), theirs), 1e-13) << output;
      EXPECT_LE(MaxDifference(two.computed.at(output).view(), theirs), StackBound(theirs, 2))
          << output;
    }
  }
}

TEST(Compressive, LabmlsNetworkComputesTheSame) { ExpectGolden("labml"); }
TEST(Compressive, LabmlsNetworkEvictsWholeBlocks) { ExpectGolden("labml_whole_blocks"); }
TEST(Compressive, LucidrainsAttentionComputesTheSame) { ExpectGolden("lucidrains"); }

}  // namespace
}  // namespace tfb::compressive
