#include "harness/judge/evaluate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "harness/inputs/inputs.h"
#include "harness/judge/errors.h"
#include "harness/judge/guarded.h"
#include "harness/testing/tiny_technique.h"

namespace tfb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A registry of the tiny technique and one faulty form of it.
class Evaluation : public ::testing::Test {
 protected:
  Evaluation() { registry_.Add(MakeTiny(TinyFault::kNone)); }

  absl::StatusOr<Accuracy> Run(TinyFault fault, const Problem& problem, const Options& options = {},
                               const std::vector<int64_t>& rows = {},
                               const NamedTensors* parameters = nullptr) {
    if (!registry_.Find(TinyName(fault)).ok()) registry_.Add(MakeTiny(fault));
    EvaluateRequest request;
    request.job.technique = *registry_.Find(TinyName(fault));
    request.job.options = options;
    request.job.problem = problem;
    request.rows = rows;
    request.pool = &pool_;
    request.registry = &registry_;
    inputs_ = *MakeInputs({}, *request.job.technique->InputSpecs(problem, options), problem, 3);
    request.inputs = &inputs_;
    TFB_ASSIGN_OR_RETURN(const std::unique_ptr<Layer> layer, request.job.CreateLayer());
    if (parameters != nullptr) TFB_RETURN_IF_ERROR(layer->SetParameters(*parameters));
    return EvaluateLayer(request, layer.get());
  }

  Registry registry_;
  ThreadPool pool_{2};
  NamedTensors inputs_;
};

const Problem kProblem = Problem::SelfAttention(2, 4, 70, 16, true);

TEST_F(Evaluation, ARightLayerPassesWithSmallErrors) {
  const auto accuracy = Run(TinyFault::kNone, kProblem);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_TRUE(accuracy->passed) << accuracy->failure;
  EXPECT_LT(accuracy->against_definition.max_abs_over_max_value, 2e-6);
  EXPECT_GT(accuracy->against_definition.max_abs, 0);
  EXPECT_GT(accuracy->against_definition.mean_cosine, 1 - 1e-9);
  ASSERT_TRUE(accuracy->log_sum_exp_error.has_value());
  EXPECT_LT(accuracy->log_sum_exp_error->value, 1e-5);
  EXPECT_EQ(accuracy->counterpart, "tiny");
  EXPECT_EQ(accuracy->parameters.count("gain"), 1u);
  EXPECT_EQ(accuracy->parameter_bytes, 16u);
  EXPECT_GT(accuracy->workspace_bytes.value_or(0), 0u);
  EXPECT_EQ(accuracy->outputs.at("out").shape(), Shape({2, 4, 70, 16}));
}

TEST_F(Evaluation, TheDenseCounterpartKeepsAllOfItself) {
  const auto accuracy = Run(TinyFault::kNone, kProblem);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  ASSERT_TRUE(accuracy->kept.has_value());
  EXPECT_NEAR(accuracy->kept->kept_mass, 1, 1e-12);
  EXPECT_NEAR(accuracy->kept->kl_divergence, 0, 1e-12);
  EXPECT_EQ(accuracy->kept->recall, 1);
  EXPECT_EQ(accuracy->against_dense->max_abs, accuracy->against_definition.max_abs);
}

TEST_F(Evaluation, AWindowCostsAgainstDenseAndNotAgainstItsDefinition) {
  const auto accuracy = Run(TinyFault::kNone, kProblem, {{"window", "4"}});
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_TRUE(accuracy->passed) << accuracy->failure;
  EXPECT_LT(accuracy->against_definition.relative_frobenius, 1e-5);
  EXPECT_GT(accuracy->against_dense->relative_frobenius, 0.1);
  EXPECT_LT(accuracy->kept->kept_mass, 0.6);
  EXPECT_GT(accuracy->kept->kept_mass, 0.05);
  EXPECT_LT(accuracy->kept->recall, 0.6);
  EXPECT_GT(accuracy->kept->kl_divergence, 0.1);
}

TEST_F(Evaluation, AWrongLayerDoesNotPassAndSaysByHowMuch) {
  const auto scale = Run(TinyFault::kWrongScale, kProblem);
  ASSERT_TRUE(scale.ok()) << scale.status();
  EXPECT_FALSE(scale->passed);
  EXPECT_THAT(scale->failure, AllOf(HasSubstr("max error over max value is"), HasSubstr("2e-05")));
  const auto lse = Run(TinyFault::kWrongLogSumExp, kProblem);
  ASSERT_TRUE(lse.ok()) << lse.status();
  EXPECT_THAT(lse->failure, HasSubstr("error of log_sum_exp"));
}

TEST_F(Evaluation, BoundsGrowWithTheKeysThatARowCanHave) {
  Problem problem = Problem::SelfAttention(1, 1, 3, 4);
  problem.kv_tokens = 65536;
  const auto accuracy = Run(TinyFault::kNone, problem);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_DOUBLE_EQ(accuracy->definition_bound, 2 * 2e-5);
  EXPECT_GT(accuracy->log_sum_exp_error->bound, 2 * 2e-5);
}

TEST_F(Evaluation, RowsThatAreLeftUnwrittenDoNotPass) {
  Problem problem = kProblem;
  problem.kv_tokens = 60;  // the first ten queries see no key
  const auto accuracy = Run(TinyFault::kLeavesEmptyRows, problem);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_FALSE(accuracy->passed);
  EXPECT_TRUE(std::isinf(accuracy->against_definition.max_abs));
  EXPECT_THAT(accuracy->failure,
              HasSubstr("elements of out are NaN or infinite where the definition is finite"));
  EXPECT_TRUE(Run(TinyFault::kNone, problem)->passed);
}

TEST_F(Evaluation, AnOutputWithoutANumberDoesNotPass) {
  NamedTensors gain;
  gain["gain"] = Tensor(DType::kF32, {4});
  Fill(gain.at("gain").view(), std::numeric_limits<double>::quiet_NaN());
  const auto accuracy = Run(TinyFault::kNone, kProblem, {}, {}, &gain);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_FALSE(accuracy->passed);
  EXPECT_THAT(accuracy->failure, HasSubstr("nothing was compared"));
  EXPECT_EQ(accuracy->against_definition.not_finite, accuracy->against_definition.checked);
}

TEST_F(Evaluation, WritingOutOfBoundsIsAnError) {
  const auto out = Run(TinyFault::kWritesBehindOutput, kProblem);
  EXPECT_EQ(out.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(out.status().message()),
              HasSubstr("output out: byte 0 behind its end was written"));
  const auto workspace = Run(TinyFault::kWorkspaceOverrun, kProblem);
  EXPECT_THAT(std::string(workspace.status().message()), HasSubstr("workspace: byte 0 behind"));
}

TEST_F(Evaluation, ALayerThatReadsItsWorkspaceMeetsNan) {
  const auto accuracy = Run(TinyFault::kReadsWorkspace, Problem::SelfAttention(1, 1, 1, 1));
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_FALSE(accuracy->passed);
}

TEST_F(Evaluation, SixteenBitErrorsAreHeldAgainstTheCounterpartInThatPrecision) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Problem problem = kProblem;
    problem.dtype = dtype;
    const auto accuracy = Run(TinyFault::kNone, problem, {{"window", "16"}});
    ASSERT_TRUE(accuracy.ok()) << accuracy.status();
    EXPECT_TRUE(accuracy->passed) << accuracy->failure;
    ASSERT_TRUE(accuracy->ratio_to_dense_precision.has_value());
    EXPECT_LT(accuracy->ratio_to_dense_precision->value, 2);
    EXPECT_GT(accuracy->ratio_to_dense_precision->value, 0.1);
  }
}

TEST_F(Evaluation, LessPrecisionThanDenseAttentionHasDoesNotPassIn16Bits) {
  Problem problem = kProblem;
  problem.dtype = DType::kF16;
  const auto accuracy = Run(TinyFault::kRoundsScores, problem);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_FALSE(accuracy->passed);
  EXPECT_GT(accuracy->ratio_to_dense_precision->value, 2);
}

TEST_F(Evaluation, ChosenRowsGiveTheErrorsOfThoseRows) {
  const auto all = Run(TinyFault::kNone, kProblem);
  const auto some = Run(TinyFault::kNone, kProblem, {}, {0, 1, 69});
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_TRUE(some->passed) << some->failure;
  EXPECT_EQ(some->against_definition.rows_checked, 2 * 4 * 3);
  EXPECT_EQ(some->against_definition.rows, 2 * 4 * 70);
  EXPECT_LE(some->against_definition.max_abs, all->against_definition.max_abs);
}

TEST_F(Evaluation, ParametersOfTheCallerReplaceThoseOfTheSeed) {
  NamedTensors parameters;
  parameters["gain"] = Tensor(DType::kF32, {4});
  Fill(parameters["gain"].view(), 2);
  const auto own = Run(TinyFault::kNone, kProblem, {}, {}, &parameters);
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_TRUE(own->passed) << own->failure;
  EXPECT_EQ(own->parameters.at("gain").span<float>()[3], 2);
  EXPECT_NE(Run(TinyFault::kNone, kProblem)->against_definition.max_abs,
            own->against_definition.max_abs);
  EXPECT_FALSE(Run(TinyFault::kIgnoresParameters, kProblem, {}, {}, &parameters)->passed);
  NamedTensors unknown;
  unknown["loss"] = Tensor(DType::kF32, {4});
  EXPECT_THAT(std::string(Run(TinyFault::kNone, kProblem, {}, {}, &unknown).status().message()),
              HasSubstr("there is no parameter \"loss\""));
}

TEST_F(Evaluation, AMissingCounterpartIsAReasonAndNotAFailure) {
  Registry alone;
  alone.Add(MakeTiny(TinyFault::kWindowOffByOne));
  EvaluateRequest request;
  request.job.technique = *alone.Find(TinyName(TinyFault::kWindowOffByOne));
  request.job.problem = kProblem;
  request.pool = &pool_;
  request.registry = &alone;
  const NamedTensors inputs = *MakeInputs({}, QkvInputs(kProblem), kProblem, 3);
  request.inputs = &inputs;
  const auto accuracy = Evaluate(request);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_FALSE(accuracy->against_dense.has_value());
  EXPECT_THAT(accuracy->no_dense_reason, HasSubstr("there is no technique \"tiny\""));
}

TEST_F(Evaluation, EmptyProblemsPass) {
  for (const auto& [batch, queries, keys] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{0, 8, 8}, {1, 0, 8}, {1, 8, 0}}) {
    Problem problem = kProblem;
    problem.batch = batch;
    problem.query_tokens = queries;
    problem.kv_tokens = keys;
    const auto accuracy = Run(TinyFault::kNone, problem);
    ASSERT_TRUE(accuracy.ok()) << accuracy.status();
    EXPECT_TRUE(accuracy->passed) << accuracy->failure;
  }
}

TEST(SampledRows, HaveTheEndsAndTheEdgesOfTilesAndAreSpread) {
  EXPECT_TRUE(SampleRows(100, 100, 1).empty());
  const std::vector<int64_t> rows = SampleRows(4096, 128, 1);
  EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
  EXPECT_EQ(std::adjacent_find(rows.begin(), rows.end()), rows.end());
  EXPECT_LE(rows.size(), 128u);
  EXPECT_GE(rows.size(), 110u);  // a few draws fall together
  EXPECT_EQ(rows.front(), 0);
  EXPECT_EQ(rows.back(), 4095);
  for (const int64_t edge : {255, 256, 2047, 2048}) {
    EXPECT_TRUE(std::binary_search(rows.begin(), rows.end(), edge)) << edge;
  }
  for (size_t n = 1; n < rows.size(); ++n) EXPECT_LT(rows[n] - rows[n - 1], 150);
  EXPECT_EQ(rows, SampleRows(4096, 128, 1));
  EXPECT_NE(rows, SampleRows(4096, 128, 2));
}

TEST(SampledRows, HaveAQuarterAtEdgesOfTilesAndOneInEachPartOfTheRest) {
  struct Sample {
    int64_t tokens, count, step;  // between edges
  };
  for (const auto& [tokens, count, step] : std::vector<Sample>{{4096, 128, 256},
                                                               {5000, 40, 960},
                                                               {130, 10, 128},
                                                               {65, 8, 64},
                                                               {127, 7, 64},
                                                               {300, 200, 64}}) {
    const std::vector<int64_t> rows = SampleRows(tokens, count, 5);
    const std::set<int64_t> sampled(rows.begin(), rows.end());
    std::set<int64_t> fixed = {0, 1, tokens - 2, tokens - 1};
    for (int64_t edge = step; edge < tokens; edge += step) fixed.insert({edge - 1, edge});
    EXPECT_TRUE(std::includes(sampled.begin(), sampled.end(), fixed.begin(), fixed.end()));
    const int64_t parts = count - static_cast<int64_t>(fixed.size());
    for (int64_t part = 0; part < parts; ++part) {
      // A row of the part, of which the first and the last may be shared with its neighbours.
      const auto row = sampled.lower_bound(part * tokens / parts);
      ASSERT_NE(row, sampled.end());
      EXPECT_LE(*row * parts, (part + 1) * tokens) << tokens << ": part " << part;
    }
    EXPECT_LE(static_cast<int64_t>(rows.size()), count);
    EXPECT_EQ(SampleRows(count, count, 5).size(), 0u);
    EXPECT_NE(SampleRows(count + 1, count, 5).size(), 0u);
  }
}

TEST(Guards, FindWritesAroundATensorAndBetweenItsRows) {
  for (const bool gaps : {false, true}) {
    auto tensor = *GuardedTensor::Allocate(DType::kF16, {2, 3, 5}, gaps);
    EXPECT_EQ(tensor.CountUnwritten(), 30);
    Fill(tensor.view(), 1);
    EXPECT_EQ(tensor.CountUnwritten(), 0);
    EXPECT_TRUE(tensor.CheckGuards("t").ok());
    const int64_t last = tensor.view().Offset(1, 2, 4);
    tensor.view().Set(last + 1, 0);
    EXPECT_FALSE(tensor.CheckGuards("t").ok());
  }
  auto before = *GuardedTensor::Allocate(DType::kF16, {2, 3, 5}, true);
  before.view().Set(-1, 0);
  EXPECT_THAT(std::string(before.CheckGuards("t").message()), HasSubstr("before its beginning"));
  auto between = *GuardedTensor::Allocate(DType::kF16, {2, 3, 5}, true);
  between.view().Set(between.view().Offset(0, 0, 4) + 1, 0);
  EXPECT_THAT(std::string(between.CheckGuards("t").message()), HasSubstr("gap"));
}

TEST(Guards, MinusOneIsANumberThatWasWritten) {
  for (const bool gaps : {false, true}) {
    auto tensor = *GuardedTensor::Allocate(DType::kI32, {2, 3, 5}, gaps);
    EXPECT_EQ(tensor.CountUnwritten(), 30);
    Fill(tensor.view(), -1);
    EXPECT_EQ(tensor.CountUnwritten(), 0);
    EXPECT_TRUE(tensor.CheckGuards("t").ok());
    tensor.Poison();
    EXPECT_EQ(tensor.CountUnwritten(), 30);
    EXPECT_TRUE(tensor.CheckGuards("t").ok());
  }
}

TEST(Guards, ANanThatWasComputedCountsAsWritten) {
  auto tensor = *GuardedTensor::Allocate(DType::kF32, {4}, /*gaps=*/false);
  Fill(tensor.view(), std::nan(""));
  EXPECT_EQ(tensor.CountUnwritten(), 0);
}

// The tiny technique with further outputs: a whole number for each row, a number, and a difference
// of numbers of size 100.
class WithFurtherOutputs : public Technique {
 public:
  WithFurtherOutputs() : Technique(Info()), tiny_(MakeTiny(TinyFault::kNone)) {}

  absl::StatusOr<Options> Canonical(const Options& options) const override {
    return tiny_->Canonical(options);
  }
  absl::StatusOr<std::vector<TensorSpec>> InputSpecs(const Problem& problem,
                                                     const Options& options) const override {
    return tiny_->InputSpecs(problem, options);
  }
  absl::StatusOr<std::vector<TensorSpec>> OutputSpecs(const Problem& problem,
                                                      const Options& options) const override {
    return tiny_->OutputSpecs(problem, options);
  }
  absl::StatusOr<std::unique_ptr<Layer>> Create(const Problem& problem, const Options& options,
                                                Device device, uint64_t seed) const override {
    return tiny_->Create(problem, options, device, seed);
  }
  absl::Status Define(const Problem& problem, const Options& options,
                      const NamedTensors& parameters, const Inputs& inputs,
                      const DefinitionRequest& request, NamedTensors* outputs) const override {
    TFB_RETURN_IF_ERROR(tiny_->Define(problem, options, parameters, inputs, request, outputs));
    for (const auto& [name, value] : {std::pair<const char*, double>{"index", 3},
                                      {"number", 0.5},
                                      {"difference", 0.01},
                                      {"difference.scale", 100}}) {
      Fill(((*outputs)[name] = Tensor(DType::kF64, {problem.query_tokens})).view(), value);
    }
    return absl::OkStatus();
  }

 private:
  static TechniqueInfo Info() {
    TechniqueInfo info = MakeTiny(TinyFault::kNone)->info();
    info.name = "with_further_outputs";
    return info;
  }
  std::unique_ptr<Technique> tiny_;
};

TEST_F(Evaluation, EveryFurtherOutputIsJudgedInItsOwnUnits) {
  const WithFurtherOutputs technique;
  const auto own = Run(TinyFault::kNone, kProblem);
  ASSERT_TRUE(own.ok()) << own.status();
  EvaluateRequest request;
  request.job.technique = &technique;
  request.job.problem = kProblem;
  request.pool = &pool_;
  request.registry = &registry_;
  request.inputs = &inputs_;
  // Judges the outputs of the tiny layer, and further ones of which the last element is off.
  const auto judge = [&](const std::string& name, double off) {
    NamedTensors outputs;
    for (const auto& [output, tensor] : own->outputs) outputs[output] = tensor.Clone();
    Fill((outputs["index"] = Tensor(DType::kI32, {70})).view(), 3);
    Fill((outputs["number"] = Tensor(DType::kF32, {70})).view(), 0.5);
    Fill((outputs["difference"] = Tensor(DType::kF32, {70})).view(), 0.01);
    if (!name.empty()) outputs[name].view().Set(69, outputs[name].view().Get(69) + off);
    auto accuracy = Judge(request, own->parameters, outputs);
    EXPECT_TRUE(accuracy.ok()) << accuracy.status();
    return *std::move(accuracy);
  };
  const Accuracy right = judge("", 0);
  EXPECT_TRUE(right.passed) << right.failure;
  EXPECT_EQ(right.other_errors.size(), 3u);
  EXPECT_EQ(right.other_errors.at("index").value, 0);
  EXPECT_EQ(right.other_errors.at("index").bound, 0);
  EXPECT_DOUBLE_EQ(right.other_errors.at("number").bound, Fp32Bound(70));
  // The bound is 2e-5 of the largest number, which is 0.5, and of 100 for the difference.
  for (const auto& [name, wrong, fine] : {std::tuple<std::string, double, double>{"index", 1, 0},
                                          {"number", 1.1 * 2e-5 * 0.5, 0.9 * 2e-5 * 0.5},
                                          {"difference", 1.1 * 2e-5 * 100, 0.9 * 2e-5 * 100}}) {
    const Accuracy failed = judge(name, wrong);
    EXPECT_FALSE(failed.passed) << name;
    EXPECT_THAT(failed.failure, HasSubstr("error of output " + name));
    EXPECT_TRUE(judge(name, fine).passed) << name;
  }
}

double Norm(const Tensor& tensor) {
  double squares = 0;
  for (int64_t n = 0; n < tensor.num_elements(); ++n) {
    squares += tensor.view().Get(n) * tensor.view().Get(n);
  }
  return std::sqrt(squares);
}

// The tensors of a loss sum <g, out> + <e, log_sum_exp> of the tiny technique, in float64.
struct TinyLoss {
  const Technique& technique;
  const Problem problem;
  const Options options;
  const NamedTensors& gradients;  // g and e
  NamedTensors point;             // inputs, and the parameter gain

  NamedTensors Define() const {
    NamedTensors parameters, inputs, outputs;
    for (const auto& [name, tensor] : point) {
      (name == "gain" ? parameters : inputs)[name] = tensor.Clone();
    }
    DefinitionRequest request;
    request.weights = true;
    EXPECT_TRUE(
        technique.Define(problem, options, parameters, ViewsOf(inputs), request, &outputs).ok());
    return outputs;
  }

  double Value() const {
    const NamedTensors outputs = Define();
    double sum = 0;
    for (const auto& [name, g] : gradients) {
      const Tensor& y = outputs.at(name);
      for (int64_t n = 0; n < g.num_elements(); ++n) sum += g.view().Get(n) * y.view().Get(n);
    }
    return sum;
  }

  // Returns the sum of the sizes of all products that the derivative along the direction d of the
  // tensor consists of: with s' the derivative of the score,
  //   sum_ij p_ij (g_i . v'_j + s'_ij (g_i . v_j - g_i . y_i + e_i)).
  double TermsAlong(const std::string& name, const Tensor& d) const {
    const NamedTensors outputs = Define();
    const auto at = [](const Tensor& tensor, int64_t row, int64_t c) {
      return std::abs(tensor.view().Get(row * 16 + c));
    };
    const auto of = [&](const std::string& tensor) -> const Tensor& {
      return tensor == name ? d : point.at(tensor);
    };
    double sum = 0;
    for (int64_t bh = 0; bh < problem.batch * problem.query_heads; ++bh) {
      for (int64_t i = 0; i < problem.query_tokens; ++i) {
        const int64_t row = bh * problem.query_tokens + i;
        for (int64_t j = 0; j < problem.kv_tokens; ++j) {
          const int64_t key = bh * problem.kv_tokens + j;
          double score = 0, values = 0;
          for (int64_t c = 0; c < 16; ++c) {
            const double g = at(gradients.at("out"), row, c);
            score += at(of("q"), row, c) * at(of("k"), key, c) / 4;
            values += g * at(of("v"), key, c);
            if (name != "v") values += g * at(outputs.at("out"), row, c);
          }
          if (name != "v") {
            values += std::abs(gradients.at("log_sum_exp").view().Get(row));
            values *= score * std::abs(of("gain").view().Get(bh % problem.query_heads));
          }
          sum += outputs.at("weights").view().Get(row * problem.kv_tokens + j) * values;
        }
      }
    }
    return sum;
  }
};

// The derivative along a direction of length 1 is the central difference of the definition with a
// step of 1e-5 of the tensor's length. Each product in it has at most the relative error that the
// forward pass's bound allows a term p_ij v_j. One direction is that of the gradient itself, along
// which an error of its size shows most; another one is random.
TEST_F(Evaluation, GradientsAreThoseOfTheDefinition) {
  const Technique& technique = **registry_.Find("tiny");
  const Problem problem = Problem::SelfAttention(2, 4, 20, 16, true);
  EvaluateRequest request;
  request.job.technique = &technique;
  request.job.options = {{"window", "12"}};
  request.job.problem = problem;
  request.pool = &pool_;
  request.registry = &registry_;
  NamedTensors inputs = *MakeInputs({}, *technique.InputSpecs(problem, {}), problem, 3);
  request.inputs = &inputs;
  NamedTensors gradients;
  FillNormal(&(gradients["out"] = Tensor(DType::kF32, {2, 4, 20, 16})), 5, "g");
  FillNormal(&(gradients["log_sum_exp"] = Tensor(DType::kF32, {2, 4, 20})), 5, "e");
  request.output_gradients = &gradients;
  const auto accuracy = Evaluate(request);
  ASSERT_TRUE(accuracy.ok()) << accuracy.status();
  EXPECT_TRUE(accuracy->passed) << accuracy->failure;
  EXPECT_EQ(accuracy->input_gradients.size(), 3u);
  EXPECT_EQ(accuracy->parameter_gradients.size(), 1u);

  TinyLoss loss = {technique, problem, request.job.options, gradients, {}};
  for (const auto& [name, tensor] : inputs) loss.point[name] = tensor.CloneAs(DType::kF64);
  loss.point["gain"] = accuracy->parameters.at("gain").CloneAs(DType::kF64);
  for (const std::string name : {"q", "k", "v", "gain"}) {
    const Tensor& gradient =
        (name == "gain" ? accuracy->parameter_gradients : accuracy->input_gradients).at(name);
    Tensor& x = loss.point.at(name);
    ASSERT_EQ(gradient.shape(), x.shape());
    const Tensor before = x.Clone();
    const double h = 1e-5 * Norm(before);
    for (const bool is_random : {false, true}) {
      Tensor direction = gradient.CloneAs(DType::kF64);
      if (is_random) FillNormal(&direction, 7, name);
      const double length = Norm(direction);
      double along = 0;
      for (int64_t n = 0; n < x.num_elements(); ++n) {
        direction.view().Set(n, direction.view().Get(n) / length);
        along += gradient.view().Get(n) * direction.view().Get(n);
      }
      const auto value_at = [&](double step) {
        for (int64_t n = 0; n < x.num_elements(); ++n) {
          x.view().Set(n, before.view().Get(n) + step * direction.view().Get(n));
        }
        return loss.Value();
      };
      const double difference = (value_at(h) - value_at(-h)) / (2 * h);
      CopyElements(before.view(), x.view());
      const double bound = AbsoluteBound(DType::kF32, 20) * loss.TermsAlong(name, direction);
      EXPECT_NEAR(along, difference, bound) << name;
      EXPECT_TRUE(is_random || 20 * bound < difference) << name << ": the bound shows nothing";
    }
  }
}

TEST_F(Evaluation, ALayerWithoutABackwardPassSaysWhy) {
  registry_.Add(MakeTiny(TinyFault::kWrongScale));
  EvaluateRequest request;
  request.job.technique = *registry_.Find("tiny_wrong_scale");
  request.job.problem = kProblem;
  request.pool = &pool_;
  request.registry = &registry_;
  inputs_ = *MakeInputs({}, *request.job.technique->InputSpecs(kProblem, {}), kProblem, 3);
  request.inputs = &inputs_;
  const NamedTensors gradients;
  request.output_gradients = &gradients;
  EXPECT_EQ(Evaluate(request).status(),
            absl::UnimplementedError("a layer with a fault has no backward pass"));
}

// A layer whose backward pass writes one element behind what it may.
class OverrunningLayer : public Layer {
 public:
  enum class Where { kNowhere, kGradient, kParameter, kKept, kWorkspace };
  OverrunningLayer(const Problem& problem, Where where)
      : Layer(problem, HiddenInputs(problem), HiddenOutputs(problem)), where_(where) {
    parameters_["w"] = Tensor(DType::kF32, {3});
    Fill(parameters_["w"].view(), 1);
  }
  size_t workspace_bytes(int) const override { return 8; }
  size_t backward_workspace_bytes(int) const override { return 16; }
  size_t kept_bytes() const override { return 4; }
  Cost cost() const override { return {}; }
  absl::Status CheckBackward() const override { return absl::OkStatus(); }

 protected:
  absl::Status DoRun(const Inputs&, const Outputs& outputs, const Execution&) override {
    Fill(outputs.Get("out"), 1);
    return absl::OkStatus();
  }
  absl::Status DoBackward(const BackwardCall& call, const Execution& execution) override {
    const TensorView dx = call.input_gradients.Get("x"), dw = call.parameter_gradients.Get("w");
    Fill(dx, 2);
    Fill(dw, 3);
    if (where_ == Where::kGradient) dx.Set(dx.num_elements(), 0);
    if (where_ == Where::kParameter) dw.Set(dw.num_elements(), 0);
    if (where_ == Where::kKept) execution.kept.data()[4] = std::byte{0};
    if (where_ == Where::kWorkspace) execution.workspace.data()[16] = std::byte{0};
    return absl::OkStatus();
  }

 private:
  const Where where_;
};

TEST(RunOnce, ABackwardPassWritesWhatIsItsOwnAlone) {
  using Where = OverrunningLayer::Where;
  const Problem problem = Problem::SelfAttention(1, 2, 5, 4);
  ThreadPool pool(1);
  NamedTensors inputs, gradients;
  Fill((inputs["x"] = Tensor(DType::kF32, {1, 5, 8})).view(), 1);
  Fill((gradients["out"] = Tensor(DType::kF32, {1, 5, 8})).view(), 1);
  const auto run = [&](Where where) {
    OverrunningLayer layer(problem, where);
    return RunOnce(&layer, Device::kCpu, ViewsOf(inputs), &pool, &gradients);
  };
  const absl::StatusOr<LayerRun> right = run(Where::kNowhere);
  ASSERT_TRUE(right.ok()) << right.status();
  EXPECT_EQ(right->outputs.at("out").view().Get(39), 1);
  EXPECT_EQ(right->input_gradients.at("x").view().Get(39), 2);
  EXPECT_EQ(right->parameter_gradients.at("w").view().Get(2), 3);
  for (const auto& [where, what] : {std::pair(Where::kGradient, "gradient of input x"),
                                    {Where::kParameter, "gradient of parameter w"},
                                    {Where::kKept, "kept memory"},
                                    {Where::kWorkspace, "workspace of Backward"}}) {
    const absl::Status status = run(where).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }
}

TEST_F(Evaluation, ABoundIsHeldByWhatIsBelowItAlone) {
  const auto judge_lse = [&](double factor) {
    const auto own = Run(TinyFault::kNone, kProblem);
    EvaluateRequest request;
    request.job.technique = *registry_.Find(TinyName(TinyFault::kNone));
    request.job.problem = kProblem;
    request.pool = &pool_;
    request.registry = &registry_;
    request.inputs = &inputs_;
    NamedTensors defined, outputs;
    DefinitionRequest all;
    EXPECT_TRUE(request.job.technique
                    ->Define(kProblem, {}, own->parameters, ViewsOf(inputs_), all, &defined)
                    .ok());
    for (const auto& [name, tensor] : defined) {
      if (own->outputs.count(name) > 0) outputs[name] = tensor.CloneAs(DType::kF64);
    }
    Tensor& sums = outputs.at("log_sum_exp");
    const double bound = LogSumExpBound(70, LargestMagnitude(sums.view()));
    sums.view().Set(5, sums.view().Get(5) + factor * bound);
    const auto accuracy = Judge(request, own->parameters, outputs);
    EXPECT_TRUE(accuracy.ok()) << accuracy.status();
    return accuracy->passed;
  };
  EXPECT_TRUE(judge_lse(0.99));
  EXPECT_FALSE(judge_lse(1.01));
}

}  // namespace
}  // namespace tfb
