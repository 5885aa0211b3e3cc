// Tests that gradients are judged by what the definition says, that faults of single gradients are
// found and named, and what a record holds of them.
#include "harness/judge/judge_gradients.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "core/technique.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"
#include "harness/judge/bound_layer.h"
#include "harness/judge/errors.h"
#include "harness/testing/tiny_technique.h"

namespace tfb {
namespace {

const Problem kProblem = Problem::SelfAttention(2, 4, 70, 16, true);

// A run of the tiny technique with its backward pass, as a sweep makes it.
class Judging {
 public:
  explicit Judging(TinyFault fault, const Problem& problem = kProblem,
                   std::vector<int64_t> rows = {})
      : technique_(MakeTiny(fault)) {
    request_.job.technique = technique_.get();
    request_.job.problem = problem;
    request_.rows = std::move(rows);
    request_.pool = &pool_;
    inputs_ = request_.job.LoadInputs().value();
    request_.inputs = &inputs_;
    layer_ = request_.job.CreateLayer().value();
    output_gradients_ = KeepRows(DrawOutputGradients(*layer_, 1).value(), problem, request_.rows);
    request_.output_gradients = &output_gradients_;
    run_ =
        RunOnce(layer_.get(), Device::kCpu, ViewsOf(inputs_), &pool_, &output_gradients_).value();
  }

  std::map<std::string, Bounded> Errors() {
    const auto judged = JudgeGradients(request_, *layer_, run_);
    EXPECT_TRUE(judged.ok()) << judged.status();
    std::map<std::string, Bounded> errors;
    for (const GradientError& one : *judged) errors[one.name] = one.error;
    return errors;
  }
  LayerRun& run() { return run_; }
  const NamedTensors& output_gradients() const { return output_gradients_; }

 private:
  std::unique_ptr<Technique> technique_;
  ThreadPool pool_{2};
  EvaluateRequest request_;
  NamedTensors inputs_, output_gradients_;
  std::unique_ptr<Layer> layer_;
  LayerRun run_;
};

// Returns the names of the gradients that fail.
std::vector<std::string> Failed(const std::map<std::string, Bounded>& errors) {
  std::vector<std::string> failed;
  for (const auto& [name, error] : errors) {
    if (!error.passed()) failed.push_back(name);
  }
  return failed;
}

TEST(JudgeGradients, RightGradientsPassWithSmallErrorsInUnitsOfTheirTerms) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Problem problem = kProblem;
    problem.dtype = dtype;
    const std::map<std::string, Bounded> errors = Judging(TinyFault::kNone, problem).Errors();
    ASSERT_EQ(errors.size(), 4u);
    const double b = AbsoluteBound(dtype, 70);
    for (const char* name : {"q", "k", "v", kParameters}) {
      const Bounded& error = errors.at(name);
      EXPECT_TRUE(error.passed()) << name << ", " << error.value << " of " << error.bound;
      EXPECT_GT(error.value, 0) << name;
      EXPECT_GE(error.bound, 3 * b) << name;  // three deviations, and what differences resolve
      EXPECT_LT(error.bound, 3.1 * b) << name;
    }
    if (dtype != DType::kF32) continue;
    EXPECT_LT(errors.at("v").value, b / 10);
  }
}

TEST(JudgeGradients, AFaultOfOneGradientIsNamed) {
  EXPECT_EQ(Failed(Judging(TinyFault::kGradientWrongScale).Errors()),
            std::vector<std::string>({"q"}));
  EXPECT_EQ(Failed(Judging(TinyFault::kGradientOfOneBatch).Errors()),
            std::vector<std::string>({kParameters}));
}

TEST(JudgeGradients, AGradientThatIsNoNumberFails) {
  Judging judging(TinyFault::kNone);
  judging.run().input_gradients.at("k").span<float>()[7] = std::nanf("");
  EXPECT_EQ(Failed(judging.Errors()), std::vector<std::string>({"k"}));
}

// Queries that are not checked have no output gradient, and the definition skips their rows.
TEST(JudgeGradients, SomeRowsAreJudgedByTheirOwnLoss) {
  const std::vector<int64_t> rows = {0, 3, 64, 69};
  Judging judging(TinyFault::kNone, kProblem, rows);
  const ConstTensorView g = judging.output_gradients().at("out").view();
  EXPECT_EQ(LargestMagnitude(Slice(g, 2, 4, 60)), 0);
  EXPECT_GT(LargestMagnitude(Slice(g, 2, 64, 1)), 0);
  EXPECT_EQ(LargestMagnitude(Slice(judging.run().input_gradients.at("q").view(), 2, 1, 2)), 0);
  EXPECT_EQ(Failed(judging.Errors()), std::vector<std::string>());
  EXPECT_EQ(Failed(Judging(TinyFault::kGradientWrongScale, kProblem, rows).Errors()),
            std::vector<std::string>({"q"}));
}

TEST(EvaluateGradients, TakesTheGivenGradientsOfTheRows) {
  const std::unique_ptr<Technique> technique = MakeTiny(TinyFault::kGradientForgetsLogSumExp);
  ThreadPool pool(2);
  EvaluateRequest request;
  request.job.technique = technique.get();
  request.job.problem = kProblem;
  request.rows = {3, 64};
  request.pool = &pool;
  const NamedTensors inputs = request.job.LoadInputs().value();
  request.inputs = &inputs;
  const std::unique_ptr<Layer> layer = request.job.CreateLayer().value();
  NamedTensors gradients = DrawOutputGradients(*layer, 1).value();
  request.output_gradients = &gradients;
  const auto failed = [&] {
    const std::vector<GradientError> errors = EvaluateGradients(request, layer.get()).value();
    std::vector<std::string> names;
    for (const GradientError& one : errors) {
      if (!one.error.passed()) names.push_back(one.name);
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  EXPECT_EQ(failed(), std::vector<std::string>());
  Tensor& of_lse = gradients["log_sum_exp"] = Tensor(DType::kF32, {2, 4, 70});
  Fill(of_lse.view(), 0);
  Fill(Slice(of_lse.view(), 2, 5, 1), 1);  // of a row that is not asked for
  EXPECT_EQ(failed(), std::vector<std::string>());
  Fill(Slice(of_lse.view(), 2, 64, 1), 1);
  EXPECT_EQ(failed(), std::vector<std::string>({"k", kParameters, "q"}));
}

// A problem of one key has no gradient of queries and keys, of which a layer rounds both sides.
TEST(JudgeGradients, GradientsThatVanishPass) {
  const std::map<std::string, Bounded> errors =
      Judging(TinyFault::kNone, Problem::SelfAttention(1, 1, 1, 4, false)).Errors();
  EXPECT_EQ(Failed(errors), std::vector<std::string>());
  EXPECT_EQ(errors.count("q"), 1u);
}

TEST(JudgeGradients, TensorsWithoutElementsAreLeftOut) {
  Judging judging(TinyFault::kNone, Problem::SelfAttention(1, 2, 0, 4, false));
  const std::map<std::string, Bounded> errors = judging.Errors();
  EXPECT_EQ(errors.count("q"), 0u);
  ASSERT_EQ(errors.count(kParameters), 1u);  // exactly 0
  EXPECT_EQ(errors.at(kParameters).value, 0);
  EXPECT_TRUE(errors.at(kParameters).passed());
}

TEST(RecordGradients, HasEachGradientAndTheFirstBeyondItsBoundAsTheReason) {
  Outcome outcome;
  RecordGradients({{"v", {1, 2}}, {"k", {3, 2}}, {kParameters, {5, 2}}}, &outcome);
  EXPECT_EQ(outcome.status(), Outcome::STATUS_FAILED);
  EXPECT_EQ(outcome.reason(), "error of the gradient of k is 3, its bound 2");
  EXPECT_EQ(outcome.ShortDebugString(),
            "status: STATUS_FAILED reason: \"error of the gradient of k is 3, its bound 2\" "
            "gradient_errors { name: \"v\" error { value: 1 bound: 2 passed: true } } "
            "gradient_errors { name: \"k\" error { value: 3 bound: 2 passed: false } } "
            "gradient_errors { name: \"parameters\" error { value: 5 bound: 2 passed: false } }");
  Outcome right;
  RecordGradients({{"v", {1, 2}}}, &right);
  EXPECT_EQ(right.status(), Outcome::STATUS_OK);
  EXPECT_EQ(right.reason(), "");
}

}  // namespace
}  // namespace tfb
