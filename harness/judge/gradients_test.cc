// Tests directional derivatives of definitions, and the bounds of errors, on attention whose
// gradients are known by formula or by hand.
#include "harness/judge/gradients.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/technique.h"
#include "gtest/gtest.h"
#include "harness/judge/errors.h"
#include "harness/testing/tiny_technique.h"

namespace tfb {
namespace {

// The tiny technique on a problem: its inputs, its parameter gain, and the gradients of its outputs.
struct Point {
  std::unique_ptr<Technique> technique = MakeTiny(TinyFault::kNone);
  Job job;
  NamedTensors inputs, parameters, output_gradients;

  explicit Point(const Problem& problem) {
    job.technique = technique.get();
    job.problem = problem;
    inputs = *job.LoadInputs();
    const std::unique_ptr<Layer> layer = *job.CreateLayer();
    for (const auto& [name, tensor] : layer->parameters()) {
      parameters[name] = tensor.Clone();
    }
    for (const TensorSpec& spec : AttentionOutputs(problem)) {
      FillNormal(&(output_gradients[spec.name] = Tensor(spec.dtype, spec.shape)), 1, spec.name);
    }
  }
  DefinitionGradient Definition() {
    return *DefinitionGradient::At(job, {&inputs, &parameters, &output_gradients}, nullptr);
  }
  double At(const NamedTensors& tensors, const char* name, int64_t row, int64_t c) const {
    const Tensor& tensor = tensors.at(name);
    return tensor.view().Get(row * tensor.dim(tensor.view().rank - 1) + c);
  }
  // The weights of row i of one head, in float64.
  std::vector<double> Weights(int64_t i) const {
    const Problem& p = job.problem;
    std::vector<double> weights(p.kv_tokens);
    double sum = 0;
    for (int64_t j = 0; j < p.kv_tokens; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) dot += At(inputs, "q", i, c) * At(inputs, "k", j, c);
      const double scale =
          parameters.at("gain").view().Get(0) / std::sqrt(static_cast<double>(p.head_dim));
      sum += weights[j] = std::exp(scale * dot);
    }
    for (double& weight : weights) weight /= sum;
    return weights;
  }
};

Problem OneHead(int64_t tokens, DType dtype = DType::kF32) {
  return Problem::SelfAttention(1, 1, tokens, 4, false, dtype);
}

TEST(DefinitionGradient, OfValuesIsTheSumOfWeightedOutputGradients) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Point point(OneHead(9, dtype));
    DefinitionGradient definition = point.Definition();
    const auto partial = definition.Partial({false, "v"});
    ASSERT_TRUE(partial.ok()) << partial.status();
    for (int64_t j = 0; j < 9; ++j) {
      for (int64_t c = 0; c < 4; ++c) {
        double expected = 0;
        for (int64_t i = 0; i < 9; ++i) {
          expected += point.Weights(i)[j] * point.At(point.output_gradients, "out", i, c);
        }
        EXPECT_NEAR(partial->view().Get(j * 4 + c), expected, 1e-9) << Name(dtype);
      }
    }
  }
}

TEST(DefinitionGradient, OfTheLogSumExpIsTheMeanKey) {
  Point point(OneHead(9));
  point.output_gradients.erase("out");
  const auto partial = point.Definition().Partial({false, "q"});
  ASSERT_TRUE(partial.ok()) << partial.status();
  const double scale = point.parameters.at("gain").view().Get(0) / 2;
  for (int64_t i = 0; i < 9; ++i) {
    const std::vector<double> weights = point.Weights(i);
    for (int64_t c = 0; c < 4; ++c) {
      double mean = 0;
      for (int64_t j = 0; j < 9; ++j) mean += weights[j] * point.At(point.inputs, "k", j, c);
      const double g = point.output_gradients.at("log_sum_exp").view().Get(i);
      EXPECT_NEAR(partial->view().Get(i * 4 + c), g * scale * mean, 1e-9);
    }
  }
}

TEST(DefinitionGradient, AlongADirectionIsTheProductOfDirectionAndPartials) {
  Point point(OneHead(9));
  DefinitionGradient definition = point.Definition();
  for (const Variable& variable :
       {Variable{false, "q"}, Variable{false, "k"}, Variable{false, "v"}, Variable{true, "gain"}}) {
    const auto partial = definition.Partial(variable);
    ASSERT_TRUE(partial.ok()) << partial.status();
    const std::vector<Tensor> directions = RandomDirections(partial->shape(), 3, 1, "any");
    const auto slopes = definition.Along(variable, directions);
    ASSERT_TRUE(slopes.ok()) << slopes.status();
    for (size_t n = 0; n < directions.size(); ++n) {
      EXPECT_NEAR(InnerProduct(directions[n].view(), directions[n].view()), 1, 1e-12);
      EXPECT_NEAR((*slopes)[n].value, InnerProduct(partial->view(), directions[n].view()), 1e-8)
          << variable.ToString();
    }
  }
}

TEST(DefinitionGradient, AlongSeveralVariablesIsTheSumOfTheirProducts) {
  Point point(OneHead(9));
  DefinitionGradient definition = point.Definition();
  const std::vector<Variable> variables = {{false, "q"}, {true, "gain"}};
  const Direction direction = definition.RandomDirection(variables, 1, "any");
  ASSERT_EQ(direction.size(), 2u);
  double expected = 0, squares = 0;
  std::vector<double> shares;
  for (const auto& [variable, tensor] : direction) {
    const double square = InnerProduct(tensor.view(), tensor.view());
    const Tensor& x = (variable.is_parameter ? point.parameters : point.inputs).at(variable.name);
    shares.push_back(square / InnerProduct(x.view(), x.view()));
    squares += square;
    expected += InnerProduct(definition.Partial(variable)->view(), tensor.view());
  }
  EXPECT_NEAR(squares, 1, 1e-12);
  EXPECT_NEAR(shares[0] / shares[1], 1, 1e-6);  // each changes by the same share of its length
  std::vector<Direction> directions(1);
  for (const auto& [variable, tensor] : direction) {
    directions[0].emplace_back(variable, tensor.Clone());
  }
  const auto slopes = definition.Along(directions);
  ASSERT_TRUE(slopes.ok()) << slopes.status();
  EXPECT_NEAR((*slopes)[0].value, expected, 1e-8);
}

// The gradient of a loss of some rows is that of output gradients which are 0 in the others.
TEST(DefinitionGradient, OfSomeRowsIsThatOfTheirOutputGradients) {
  const std::vector<int64_t> rows = {0, 4, 8};
  Point point(OneHead(9));
  for (auto& [name, gradient] : point.output_gradients) {
    const int64_t channels = gradient.num_elements() / 9;
    for (int64_t n = 0; n < gradient.num_elements(); ++n) {
      if (n / channels % 4 != 0) gradient.view().Set(n, 0);
    }
  }
  DefinitionGradient all = point.Definition();
  auto some = DefinitionGradient::At(
      point.job, {&point.inputs, &point.parameters, &point.output_gradients, nullptr, rows},
      nullptr);
  ASSERT_TRUE(some.ok()) << some.status();
  for (const Variable& variable :
       {Variable{false, "q"}, Variable{false, "v"}, Variable{true, "gain"}}) {
    const auto expected = all.Partial(variable), partial = some->Partial(variable);
    ASSERT_TRUE(expected.ok() && partial.ok()) << expected.status() << partial.status();
    for (int64_t n = 0; n < partial->num_elements(); ++n) {
      EXPECT_NEAR(partial->view().Get(n), expected->view().Get(n), 1e-8) << variable.ToString();
    }
  }
}

// The bound is a few times B of what is summed, neither none of it nor all.
TEST(DefinitionGradient, BoundsAreOfTheSizeOfTheForwardPassesErrors) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Point point(OneHead(40, dtype));
    DefinitionGradient definition = point.Definition();
    const double b = AbsoluteBound(dtype, 40);
    for (const char* name : {"q", "k", "v"}) {
      const Variable variable = {false, name};
      const Shape shape = point.inputs.at(name).shape();
      const auto slopes = definition.Along(variable, RandomDirections(shape, 8, 1, name));
      ASSERT_TRUE(slopes.ok()) << slopes.status();
      double squares = 0;
      for (const Slope& slope : *slopes) squares += slope.value * slope.value / 8;
      EXPECT_GT(slopes->front().bound, b * std::sqrt(squares)) << name;
      EXPECT_LT(slopes->front().bound, 30 * b * std::sqrt(squares)) << name;
      EXPECT_NEAR(slopes->front().bound / slopes->front().terms, 3 * b, 0.01 * b) << name;
    }
  }
}

// The gradient of the query is g.v - g.y = 0 there at any point, of which a layer rounds both sides.
TEST(DefinitionGradient, AQueryOfOneKeyHasASlopeOfZeroAndABound) {
  Point point(OneHead(1));
  point.output_gradients.erase("log_sum_exp");
  const Tensor& q = point.inputs.at("q");
  std::vector<Tensor> directions = RandomDirections(q.shape(), 1, 1, "q");
  const auto slopes = point.Definition().Along({false, "q"}, directions);
  ASSERT_TRUE(slopes.ok()) << slopes.status();
  EXPECT_EQ((*slopes)[0].value, 0);
  // 3 B |(g_c v_c)_c| times the direction's score: gain k.d / 2.
  double squares = 0, score = 0;
  for (int64_t c = 0; c < 4; ++c) {
    const double term =
        point.At(point.output_gradients, "out", 0, c) * point.At(point.inputs, "v", 0, c);
    squares += term * term;
    score += point.At(point.inputs, "k", 0, c) * directions[0].view().Get(c);
  }
  score *= point.parameters.at("gain").view().Get(0) / 2;
  const double expected = 3 * AbsoluteBound(DType::kF32, 1) * std::sqrt(squares) * std::abs(score);
  EXPECT_NEAR((*slopes)[0].bound, expected, 1e-3 * expected);
}

// log_sum_exp is -inf on both sides.
TEST(DefinitionGradient, RowsWithoutKeysHaveNone) {
  Point point(OneHead(5));
  Tensor& mask = point.inputs["key_mask"] = Tensor(DType::kU8, {1, 5});
  Fill(mask.view(), 0);
  DefinitionGradient definition = point.Definition();
  for (const char* name : {"q", "k", "v"}) {
    const auto slopes = definition.Along(
        {false, name}, RandomDirections(point.inputs.at(name).shape(), 2, 1, name));
    ASSERT_TRUE(slopes.ok()) << slopes.status();
    EXPECT_EQ((*slopes)[0].value, 0);
    EXPECT_EQ((*slopes)[1].bound, 0);
  }
}

// A tensor of zeros has no length to take a step of.
TEST(DefinitionGradient, OfZerosIsAsOfOthers) {
  Point point(OneHead(9));
  Fill(point.inputs.at("q").view(), 0);
  const auto partial = point.Definition().Partial({false, "q"});
  ASSERT_TRUE(partial.ok()) << partial.status();
  EXPECT_GT(LargestMagnitude(partial->view()), 1e-3);
}

class WithoutLayer : public TechniqueOf<NoOptions> {
 protected:
  explicit WithoutLayer(const char* name) : TechniqueOf(Info(name)) {}

 private:
  static TechniqueInfo Info(const char* name) {
    TechniqueInfo info;
    info.name = name;
    return info;
  }
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem&, const NoOptions&, Device,
                                                   uint64_t) const override {
    return absl::UnimplementedError("there is no layer");
  }
};

// out = q stop(q) and the larger of q and 0, which is a choice: its derivatives are q, and 1 or 0.
class Holding : public WithoutLayer {
 public:
  Holding() : WithoutLayer("holding") {}

 private:
  absl::Status Definition(const Problem&, const NoOptions&, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest& request,
                          NamedTensors* outputs) const override {
    const ConstTensorView q = inputs.Get("q");
    std::vector<double> held, chosen;
    for (int64_t n = 0; n < q.num_elements(); ++n) {
      held.push_back(q.Get(n));
      chosen.push_back(q.Get(n) > 0 ? 1 : 0);
    }
    if (request.stopped != nullptr) {
      request.stopped->Hold(absl::MakeSpan(held));
      request.stopped->Choose(absl::MakeSpan(chosen));
    }
    Tensor& out = (*outputs)["out"] = Tensor(DType::kF64, q.shape());
    for (int64_t n = 0; n < q.num_elements(); ++n) {
      out.span<double>()[n] = q.Get(n) * (held[n] + chosen[n]);
    }
    return absl::OkStatus();
  }
};

TEST(DefinitionGradient, WhatADefinitionHoldsIsConstantAndWhatItChoosesIsSo) {
  const Holding technique;
  Job job;
  job.technique = &technique;
  job.problem = OneHead(9);
  NamedTensors inputs, parameters, output_gradients;
  for (NamedTensors* of : {&inputs, &output_gradients}) {
    Tensor& tensor = (*of)[of == &inputs ? "q" : "out"] =
        Tensor(DType::kF32, {1, 1, 9, job.problem.head_dim});
    FillNormal(&tensor, 1, of == &inputs ? "q" : "out");
  }
  inputs["q"].span<float>()[3] = 1e-9F;  // a difference of q would choose anew
  auto definition = DefinitionGradient::At(job, {&inputs, &parameters, &output_gradients}, nullptr);
  ASSERT_TRUE(definition.ok()) << definition.status();
  const auto partial = definition->Partial({false, "q"});
  ASSERT_TRUE(partial.ok()) << partial.status();
  for (int64_t n = 0; n < partial->num_elements(); ++n) {
    const double q = inputs["q"].view().Get(n), g = output_gradients["out"].view().Get(n);
    EXPECT_NEAR(partial->view().Get(n), g * (q + (q > 0 ? 1 : 0)), 1e-9) << n;
  }
}

// Attention by one head whose log_sum_exp is no output, as within a network.
class Within : public WithoutLayer {
 public:
  Within() : WithoutLayer("within") {}

 private:
  absl::Status Definition(const Problem& p, const NoOptions&, const NamedTensors&,
                          const Inputs& inputs, const DefinitionRequest&,
                          NamedTensors* outputs) const override {
    const ConstTensorView q = inputs.Get("q"), k = inputs.Get("k"), v = inputs.Get("v");
    Tensor& out = (*outputs)["out"] = Tensor(DType::kF64, q.shape());
    for (int64_t i = 0; i < p.query_tokens; ++i) {
      std::vector<double> sums(p.head_dim);
      double weights = 0;
      for (int64_t j = 0; j < p.kv_tokens; ++j) {
        double score = 0;
        for (int64_t c = 0; c < p.head_dim; ++c) {
          score += q.Get(i * p.head_dim + c) * k.Get(j * p.head_dim + c);
        }
        const double weight = std::exp(score);
        weights += weight;
        for (int64_t c = 0; c < p.head_dim; ++c) sums[c] += weight * v.Get(j * p.head_dim + c);
      }
      for (int64_t c = 0; c < p.head_dim; ++c) {
        out.span<double>()[i * p.head_dim + c] = sums[c] / weights;
      }
    }
    return absl::OkStatus();
  }
};

// The keys' first coordinates are nearly the same, so that the terms of the queries' are small where
// they are known. A layer that forms g.v - g.y first has errors there as in the other coordinates.
TEST(DefinitionGradient, ACoordinateThatASoftmaxWithinANetworkCancelsHasTheBoundOfOthers) {
  const Within technique;
  Job job;
  job.technique = &technique;
  job.problem = OneHead(9);
  NamedTensors inputs, parameters, output_gradients;
  for (const char* name : {"q", "k", "v"}) {
    FillNormal(&(inputs[name] = Tensor(DType::kF32, {1, 1, 9, 4})), 1, name);
  }
  FillNormal(&(output_gradients["out"] = Tensor(DType::kF32, {1, 1, 9, 4})), 1, "out");
  for (int64_t j = 0; j < 9; ++j) {
    float& first = inputs["k"].span<float>()[4 * j];
    first = 1 + 1e-5F * first;
  }
  auto definition = DefinitionGradient::At(job, {&inputs, &parameters, &output_gradients}, nullptr);
  ASSERT_TRUE(definition.ok()) << definition.status();
  const Shape shape = inputs["q"].shape();
  std::vector<Tensor> first, second;
  first.push_back(CoordinateDirection(shape, 0));
  second.push_back(CoordinateDirection(shape, 1));
  const auto random = definition->Along({false, "q"}, RandomDirections(shape, 4, 1, "q"));
  const auto cancelled = definition->Along({false, "q"}, first);
  const auto other = definition->Along({false, "q"}, second);
  ASSERT_TRUE(random.ok() && cancelled.ok() && other.ok());
  EXPECT_LT(std::abs((*cancelled)[0].value), 1e-4 * std::abs((*other)[0].value));
  EXPECT_EQ((*cancelled)[0].terms, (*random)[0].terms);
  EXPECT_GE((*other)[0].terms, (*random)[0].terms);
  // A coordinate that comes first has its own terms, as no others are known.
  auto anew = DefinitionGradient::At(job, {&inputs, &parameters, &output_gradients}, nullptr);
  ASSERT_TRUE(anew.ok()) << anew.status();
  const auto alone = anew->Along({false, "q"}, first);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_LT((*alone)[0].terms, 0.1 * (*random)[0].terms);
}

TEST(DefinitionGradient, AProblemThatTheDefinitionRefusesIsAnError) {
  Point point(OneHead(9));
  DefinitionGradient definition = point.Definition();
  point.job.problem.head_dim = 0;
  EXPECT_EQ(definition.Partial({false, "q"}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tfb
