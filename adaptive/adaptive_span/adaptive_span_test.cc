#include "adaptive/adaptive_span/adaptive_span.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/dense/dense.h"
#include "core/random.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb::adaptive_span {
namespace {

const Technique& AdaptiveSpan() { return FindTechnique("adaptive_span"); }

constexpr int64_t kHeads = 3;

NamedTensors Inputs1(const Problem& problem, const Options& options = {}) {
  return RandomInputs(AdaptiveSpan().InputSpecs(problem, options).value(), 6);
}

// Returns the layer's own parameters with the spans replaced.
NamedTensors WithSpans(const Problem& problem, const Options& options, std::vector<float> spans) {
  std::unique_ptr<Layer> layer = AdaptiveSpan().Create(problem, options, Device::kCpu, 1).value();
  NamedTensors parameters;
  for (const auto& [name, tensor] : layer->parameters()) parameters[name] = tensor.Clone();
  std::copy(spans.begin(), spans.end(), parameters["span"].span<float>().begin());
  return parameters;
}

void ExpectMatchesDefinition(const Problem& problem, const Options& options,
                             const NamedTensors* parameters) {
  const NamedTensors inputs = Inputs1(problem, options);
  RunRequest request{options};
  request.parameters = parameters;
  request.threads = 2;
  const NamedTensors expected =
      DefineTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), request).value();
  for (const Device device : TestedDevices()) {
    request.device = device;
    const NamedTensors ours =
        RunTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), request).value();
    EXPECT_LE(MaxDifference(ours.at("out").view(), expected.at("out").view()),
              Fp32Bound(inputs.at("v").view()))
        << ToString(options) << " " << Name(device);
    // A score sums twice the products of plain attention.
    EXPECT_LE(MaxDifference(ours.at("log_sum_exp").view(), expected.at("log_sum_exp").view()), 4e-5)
        << ToString(options) << " " << Name(device);
  }
}

TEST(AdaptiveSpan, MatchesItsDefinitionForSpansOfEveryKind) {
  Problem problem = Problem::SelfAttention(1, kHeads, 300, 24, /*causal=*/true);
  const Options options = {{"max_span", "200"}, {"ramp", "16"}};
  for (std::vector<float> spans :
       {std::vector<float>{0, 0.25f, 200}, {31.5f, 64, 65}, {-5, 1000, 100}}) {
    const NamedTensors parameters = WithSpans(problem, options, spans);
    ExpectMatchesDefinition(problem, options, &parameters);
  }
  problem.query_tokens = 40;  // a suffix of the sequence
  ExpectMatchesDefinition(problem, options, nullptr);
  ExpectMatchesDefinition(problem, {{"max_span", "5000"}, {"positions", "false"}}, nullptr);
  ExpectMatchesDefinition(problem, {{"max_span", "1"}, {"ramp", "1"}}, nullptr);
}

TEST(AdaptiveSpan, DynamicSpansMatchTheirDefinition) {
  const Problem problem = Problem::SelfAttention(2, kHeads, 150, 16, /*causal=*/true);
  for (const char* span : {"8", "64", "120"}) {
    ExpectMatchesDefinition(
        problem, {{"dynamic", "true"}, {"max_span", "128"}, {"span", span}, {"ramp", "8"}},
        nullptr);
  }
}

// A device adds up in another order: its gradients differ from the CPU's by roundings, 2^-24 of the
// number of keys and tokens that are summed at most.
TEST(AdaptiveSpan, GradientsOfDynamicSpansAreTheCpusOnAllDevices) {
  const Problem problem = Problem::SelfAttention(2, kHeads, 150, 16, /*causal=*/true);
  const Options options = {{"dynamic", "true"}, {"max_span", "128"}, {"span", "40"}, {"ramp", "8"}};
  const NamedTensors inputs = Inputs1(problem, options);
  NamedTensors g;
  g["out"] = Tensor(DType::kF32, {2, kHeads, 150, 16});
  FillNormal(&g["out"], 5, "out_gradient");
  RunRequest request{options};
  const RunAndGradients expected =
      BackwardOfTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), g, request).value();
  for (const Device device : TestedDevices()) {
    request.device = device;
    const auto ours = BackwardOfTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), g, request);
    ASSERT_TRUE(ours.ok()) << ours.status();
    const auto compare = [&](const NamedTensors& some, const NamedTensors& others) {
      for (const auto& [name, gradient] : others) {
        const double largest = MaxAbs(gradient.view());
        EXPECT_GT(largest, 0) << name;
        EXPECT_LE(MaxDifference(some.at(name).view(), gradient.view()), 2 * 150 * 0x1p-24 * largest)
            << name << " " << Name(device);
      }
    };
    compare(ours->inputs, expected.inputs);
    compare(ours->parameters, expected.parameters);
  }
}

// The gradients of the gate's weight and bias sum over the tokens of both sequences. Each of the three
// that are compared is rounded to fp32 once.
TEST(AdaptiveSpan, GradientsOfTheGateAreThoseOfEachSequenceAddedUp) {
  const Options options = {{"dynamic", "true"}, {"max_span", "128"}, {"span", "40"}, {"ramp", "8"}};
  const Problem both = Problem::SelfAttention(2, kHeads, 150, 16, /*causal=*/true);
  const NamedTensors inputs = Inputs1(both, options);
  NamedTensors g;
  g["out"] = Tensor(DType::kF32, {2, kHeads, 150, 16});
  FillNormal(&g["out"], 5, "out_gradient");
  const RunRequest request{options};  // parameters, too, are the same for both problems
  const RunAndGradients all =
      BackwardOfTechnique(AdaptiveSpan(), both, ViewsOf(inputs), g, request).value();
  const auto slice = [](const NamedTensors& of, int64_t b) {
    NamedTensors one;
    for (const auto& [name, tensor] : of) {
      const ConstTensorView view = Slice(tensor.view(), 0, b, 1);
      one[name] = Tensor(view.dtype, view.shape());
      CopyElements(view, one[name].view());
    }
    return one;
  };
  Problem single = both;
  single.batch = 1;
  std::vector<RunAndGradients> of_each;
  for (int64_t b = 0; b < 2; ++b) {
    const NamedTensors own = slice(inputs, b);
    of_each.push_back(
        BackwardOfTechnique(AdaptiveSpan(), single, ViewsOf(own), slice(g, b), request).value());
  }
  for (const char* name : {"span_weight", "span_bias"}) {
    const ConstTensorView sum = all.parameters.at(name).view();
    const ConstTensorView first = of_each[0].parameters.at(name).view();
    const ConstTensorView second = of_each[1].parameters.at(name).view();
    const double largest = std::max({MaxAbs(sum), MaxAbs(first), MaxAbs(second)});
    EXPECT_GT(MaxDifference(sum, first), 0.1 * MaxAbs(second)) << name;
    for (int64_t n = 0; n < sum.num_elements(); ++n) {
      EXPECT_NEAR(sum.Get(n), first.Get(n) + second.Get(n), 3 * 0x1p-24 * largest) << name;
    }
  }
}

TEST(AdaptiveSpan, TheFirstTokenSeesNothing) {
  const Problem problem = Problem::SelfAttention(1, kHeads, 10, 16, /*causal=*/true);
  const NamedTensors out = RunTechnique(AdaptiveSpan(), problem, ViewsOf(Inputs1(problem))).value();
  EXPECT_EQ(MaxAbs(Slice(out.at("out").view(), 2, 0, 1)), 0);
  EXPECT_EQ(*out.at("log_sum_exp").view().At<float>(0, 0, 0), -INFINITY);
}

TEST(AdaptiveSpan, AFullSpanWithoutPositionsIsDenseAttentionOverThePast) {
  // Query i of the suffix that begins at token 1 sees keys 0 to i: dense with the keys shifted by
  // one.
  const int64_t tokens = 130;
  const Problem problem = Problem::SelfAttention(1, kHeads, tokens, 16, /*causal=*/true);
  const Options options = {{"max_span", "1000"}, {"positions", "false"}};
  const NamedTensors inputs = Inputs1(problem);
  const NamedTensors parameters = WithSpans(problem, options, {1000, 1000, 1000});
  RunRequest request{options};
  request.parameters = &parameters;
  const NamedTensors ours = RunTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), request).value();
  const Problem past = Problem::SelfAttention(1, kHeads, tokens - 1, 16, /*causal=*/true);
  const NamedTensors dense = RunTechnique(dense::Dense(), past,
                                          {{"q", Slice(inputs.at("q").view(), 2, 1, tokens - 1)},
                                           {"k", Slice(inputs.at("k").view(), 2, 0, tokens - 1)},
                                           {"v", Slice(inputs.at("v").view(), 2, 0, tokens - 1)}})
                                 .value();
  EXPECT_LE(MaxDifference(Slice(ours.at("out").view(), 2, 1, tokens - 1), dense.at("out").view()),
            1e-5);
}

TEST(AdaptiveSpan, KeysBeyondTheSpanDoNotMatterAndAreNotCounted) {
  const Problem problem = Problem::SelfAttention(1, kHeads, 256, 16, /*causal=*/true);
  const Options options = {{"max_span", "200"}, {"ramp", "8"}};
  const NamedTensors parameters = WithSpans(problem, options, {10, 10, 10});
  NamedTensors inputs = Inputs1(problem);
  RunRequest request{options};
  request.parameters = &parameters;
  const NamedTensors before =
      RunTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), request).value();
  // The weights are above 0 for distances below 18: queries 1 to 17 see key 0.
  for (int64_t h = 0; h < kHeads; ++h) *inputs["v"].view().MutableAt<float>(0, h, 0, 0) = NAN;
  const NamedTensors after =
      RunTechnique(AdaptiveSpan(), problem, ViewsOf(inputs), request).value();
  for (int64_t i = 0; i < 256; ++i) {
    const float value = *after.at("out").view().At<float>(0, 1, i, 0);
    if (i >= 1 && i <= 17) {
      EXPECT_TRUE(std::isnan(value)) << i;
    } else {
      EXPECT_EQ(value, *before.at("out").view().At<float>(0, 1, i, 0)) << i;
    }
  }
  std::unique_ptr<Layer> layer = AdaptiveSpan().Create(problem, options, Device::kCpu, 1).value();
  ASSERT_TRUE(layer->SetParameters(parameters).ok());
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  double pairs = 0;  // min(i, 17) keys a query
  for (int64_t i = 0; i < 256; ++i) pairs += static_cast<double>(std::min<int64_t>(i, 17));
  EXPECT_EQ(*layer->cost().flops, kHeads * pairs * 2 * (16 + 16 + 16));
  EXPECT_EQ(layer->statistics().at("mean_span"), 10);
}

TEST(AdaptiveSpan, DynamicFlopsCountTheSpansOfTheLastRun) {
  const Options options = {
      {"dynamic", "true"}, {"max_span", "64"}, {"ramp", "4"}, {"positions", "false"}};
  NamedTensors parameters;
  Fill((parameters["span_weight"] = Tensor(DType::kF32, {1, 8})).view(), 0);
  Fill((parameters["span_bias"] = Tensor(DType::kF32, {1})).view(),
       0);  // z is 32 everywhere: distances below 36 have weight
  for (const int64_t queries : {100, 90, 20}) {  // behind 100 - queries other keys
    Problem problem = Problem::SelfAttention(1, 1, 100, 8, /*causal=*/true);
    problem.query_tokens = queries;
    const NamedTensors inputs = Inputs1(problem, options);
    double pairs = 0;
    for (int64_t i = 100 - queries; i < 100; ++i) {
      pairs += static_cast<double>(std::min<int64_t>(i, 35));
    }
    for (const Device device : TestedDevices()) {
      std::unique_ptr<Layer> layer = AdaptiveSpan().Create(problem, options, device, 1).value();
      ASSERT_TRUE(layer->SetParameters(parameters).ok());
      EXPECT_FALSE(layer->cost().flops.has_value());
      const auto outputs = device == Device::kCpu ? RunLayer(*layer, ViewsOf(inputs))
                                                  : RunCudaLayer(*layer, device, ViewsOf(inputs));
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_EQ(*layer->cost().flops, pairs * 2 * 16 + 2.0 * static_cast<double>(queries) * 8);
      EXPECT_NEAR(layer->statistics().at("mean_span"), 32, 1e-4);
    }
  }
}

TEST(AdaptiveSpan, SeededSpansHaveTheAskedMean) {
  const Problem problem = Problem::SelfAttention(1, 4096, 1, 1, /*causal=*/true);
  std::unique_ptr<Layer> layer =
      AdaptiveSpan()
          .Create(problem, {{"span", "100"}, {"max_span", "100000"}}, Device::kCpu, 3)
          .value();
  double mean = 0;
  for (float z : layer->parameters().at("span").span<float>()) mean += z / 4096;
  EXPECT_NEAR(mean, 100, 5 * 100 / std::sqrt(4096.0));  // five standard errors of an exponential
}

TEST(AdaptiveSpan, WithoutACausalMaskItIsRefused) {
  EXPECT_EQ(AdaptiveSpan()
                .Create(Problem::SelfAttention(1, 1, 4, 4), {}, Device::kCpu, 1)
                .status()
                .message(),
            "adaptive_span is causal only");
}

}  // namespace
}  // namespace tfb::adaptive_span
