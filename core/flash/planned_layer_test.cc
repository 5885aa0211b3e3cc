#include "core/flash/planned_layer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/backward_testing.h"
#include "core/definition.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

class Planned : public testing::TestWithParam<Device> {
 protected:
  absl::StatusOr<NamedTensors> Run(const Problem& problem, const std::vector<TensorSpec>& inputs,
                                   const NamedTensors& tensors,
                                   const PlannedLayer::Describe& describe) {
    TFB_ASSIGN_OR_RETURN(layer_, PlannedLayer::Create(problem, inputs, AttentionOutputs(problem),
                                                      {}, GetParam(), describe));
    return GetParam() == Device::kCpu ? RunLayer(*layer_, ViewsOf(tensors), 2)
                                      : RunCudaLayer(*layer_, GetParam(), ViewsOf(tensors));
  }

  // Runs a plan, and expects what the score defines.
  void ExpectMatches(const Problem& problem, const FlashPlan& plan, const PairScore& score) {
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
    const auto outputs =
        Run(problem, QkvInputs(problem), inputs, [&](const auto&) { return plan; });
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    NamedTensors expected;
    DefineMaskedAttention(problem, ViewsOf(inputs), {}, score, &expected);
    for (const char* name : {"out", "log_sum_exp"}) {
      EXPECT_LE(MaxDifference(outputs->at(name).view(), expected.at(name).view()),
                Fp32Bound(inputs.at("v").view()))
          << name << " of " << problem.ToString();
    }
  }

  std::unique_ptr<Layer> layer_;
};
INSTANTIATE_TEST_SUITE_P(On, Planned, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

TEST_P(Planned, APlanOfNothingElseIsDenseAttention) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 130, 16, causal);
    ExpectMatches(problem, FlashPlan(problem), {});
    ExpectMatches(problem, FlashPlan(problem, 0.5), {0.5, nullptr, nullptr, nullptr});
  }
}

TEST_P(Planned, TermsAddUpWithThePattern) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 16);
  FlashPlan plan(problem);
  const auto bias = [](int64_t h, int64_t distance) {
    return 0.01 * static_cast<double>((h + 1) * distance);
  };
  plan.Sees(BandPattern(-70, 3)).Add<DistanceBias>(bias);
  PairScore score;
  score.sees = [](int64_t, int64_t i, int64_t j) { return j - i >= -70 && j - i <= 3; };
  score.bias = [&](int64_t, int64_t h, int64_t i, int64_t j) { return bias(h, i - j); };
  ExpectMatches(problem, plan, score);
  // Two products of 16 channels, and the bias, for each pair of the band.
  double pairs = 0;
  for (int64_t i = 0; i < 150; ++i) {
    for (int64_t j = 0; j < 150; ++j) pairs += score.sees(0, i, j) ? 1 : 0;
  }
  EXPECT_EQ(layer_->cost().flops, 2 * 2 * pairs * (2 * 32 + 1));
}

// Keys before the window are reached in the order of their residues, and a third part has no keys.
TEST_P(Planned, PartsAreOneSoftmaxAndEmptyOnesAreLeftOut) {
  const Problem problem = Problem::SelfAttention(1, 2, 200, 16);
  std::vector<int32_t> even;
  for (int32_t j = 0; j < 200; j += 2) even.push_back(j);
  FlashPlan plan(problem);
  plan.Sees(BandPattern(-10, 10));
  plan.AddPart()
      .Sees(FunctionPattern([](int64_t, int64_t i, KeyList* keys) {
        keys->Add(0, (i - 10 + 1) / 2);  // place n is key 2 n < i - 10
        return i + 1;
      }))
      .KeyOrder(even);
  plan.AddPart().Sees(FunctionPattern([](int64_t, int64_t i, KeyList*) { return i + 1; }));
  PairScore score;
  score.sees = [](int64_t, int64_t i, int64_t j) {
    return std::abs(i - j) <= 10 || (j < i - 10 && j % 2 == 0);
  };
  ExpectMatches(problem, plan, score);
}

TEST_P(Planned, RowsMayHaveTensorsOfTheirOwnAndRangesOfTokens) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  std::vector<TensorSpec> inputs = QkvInputs(problem);
  inputs.push_back(inputs[1]);
  inputs.back().name = "k_first";
  FlashPlan plan = FlashPlan::Empty(problem);
  plan.AddRows(TokenRange{0, 30});
  plan.AddPart({40, 100}).Tensors("q", "k_first", "v");
  plan.AddRows(TokenRange{30, 100});
  plan.AddPart({0, 20});
  plan.AddPart({50, 70});
  const NamedTensors tensors = RandomInputs(inputs, 3);
  const auto outputs = Run(problem, inputs, tensors, [&](const auto&) { return plan; });
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  for (const bool first : {false, true}) {
    Inputs views = ViewsOf(tensors);
    if (first) views.Set("k", tensors.at("k_first").view());
    PairScore score;
    score.sees = [first](int64_t, int64_t, int64_t j) {
      return first ? j >= 40 : j < 20 || (j >= 50 && j < 70);
    };
    NamedTensors expected;
    DefineMaskedAttention(problem, views, {}, score, &expected);
    const auto rows = [first](const ConstTensorView& view) {
      return first ? Slice(view, 2, 0, 30) : Slice(view, 2, 30, 70);
    };
    EXPECT_LE(MaxDifference(rows(outputs->at("out").view()),
                            rows(std::as_const(expected).at("out").view())),
              Fp32Bound(tensors.at("v").view()));
  }
}

// On a device the rows that see 1,000 keys are cut out of a window, where no other part shows them
// anything.
TEST_P(Planned, LongRowsAmongShortOnesAreExact) {
  const Problem problem = Problem::SelfAttention(1, 2, 1100, 8);
  const auto is_long = [](int64_t i) { return i == 3 || i == 700 || i == 1099; };
  for (const int64_t parts : {1, 2, 3}) {
    // The keys from 1,000 on that the second part shows: it may leave out the long rows or not.
    const auto further = [=](int64_t i) {
      return parts == 1 || (parts == 2 && is_long(i)) ? 0 : 1 + i % 3;
    };
    FlashPlan plan(problem);
    plan.Sees(FunctionPattern([=](int64_t, int64_t i, KeyList* keys) {
      if (is_long(i)) {
        keys->Add(0, 1000);
      } else {
        keys->Add(i - 5, std::min<int64_t>(i + 1, 1000));
      }
      return i + 1;
    }));
    if (parts > 1) {
      plan.AddPart().Sees(FunctionPattern([=](int64_t, int64_t i, KeyList* keys) {
        keys->Add(1000, 1000 + further(i));
        return i + 1;
      }));
    }
    PairScore score;
    score.sees = [=](int64_t, int64_t i, int64_t j) {
      if (j >= 1000) return j < 1000 + further(i);
      return is_long(i) || (j >= i - 5 && j <= i);
    };
    SCOPED_TRACE(parts);
    ExpectMatches(problem, plan, score);
  }
}

TEST_P(Planned, WhatNoEngineComputesIsRefusedWithItsReason) {
  const Problem problem = Problem::SelfAttention(1, 1, 20, 8);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  std::vector<int32_t> all(20);
  std::iota(all.begin(), all.end(), 0);
  const auto status = [&](const std::function<void(FlashPlan*)>& make) {
    return Run(problem, QkvInputs(problem), inputs,
               [&](const auto&) {
                 FlashPlan plan = FlashPlan::Empty(problem);
                 make(&plan);
                 return plan;
               })
        .status();
  };
  const absl::Status lists =
      absl::InternalError("a plan lists some queries of a softmax of several parts");
  const absl::Status marks =
      absl::InternalError("a plan's marked queries have several parts, an order or a pattern");
  const TokenRange rows{0, 20};
  const MarkedQueries marked{"key_mask", 0, 4};
  EXPECT_EQ(status([&](FlashPlan* plan) {
              plan->AddRows(rows).AddPart().QueryOrder({3, 4});
              plan->AddPart();
            }),
            lists);
  EXPECT_EQ(status([&](FlashPlan* plan) {
              plan->AddRows(rows).AddPart();
              plan->AddPart().QueryOrder({3, 4});
            }),
            lists);
  EXPECT_EQ(status([&](FlashPlan* plan) {
              plan->AddRows(rows).AddPart().QueryOrder({3, 4});
            }),
            absl::OkStatus());
  EXPECT_EQ(status([&](FlashPlan* plan) {
              plan->AddRows(rows).AddPart().QueryOrder(all);
              plan->AddPart();
            }),
            absl::OkStatus());
  EXPECT_EQ(status([&](FlashPlan* plan) { plan->AddMarkedRows(marked).Sees(BandPattern(0, 3)); }),
            marks);
  EXPECT_EQ(status([&](FlashPlan* plan) { plan->AddMarkedRows(marked).QueryOrder(all); }), marks);
  EXPECT_EQ(status([&](FlashPlan* plan) { plan->AddMarkedRows(marked).KeyOrder(all); }), marks);
  EXPECT_EQ(status([&](FlashPlan* plan) { plan->AddMarkedRows(marked).AddPart(); }), marks);
  int described = 0;
  EXPECT_EQ(status([&](FlashPlan* plan) {
              plan->AddRows(rows).AddPart();
              if (described++ > 0) plan->AddPart();
            }),
            absl::InternalError("a plan has other sizes in Setup than when the layer was created"));
}

// Tensors of a Run decide: here they are inputs, and else a step makes them.
TEST_P(Planned, OrdersAndKeyMasksMayBeTensors) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 130, 16, causal);
    std::vector<TensorSpec> specs = QkvInputs(problem);
    specs.push_back({"far_keys", {2, 1, 4}, DType::kI32});
    specs.push_back({"near_mask", {2, 130}, DType::kU8});
    NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
    Fill((inputs["near_mask"] = Tensor(DType::kU8, {2, 130})).view(), 1);
    const int32_t far_keys[] = {3, 50, 7, 129, 0, 1, 2, 128};
    inputs["far_keys"] = Tensor(DType::kI32, {2, 1, 4});
    for (int64_t n = 0; n < 8; ++n) {
      inputs["far_keys"].span<int32_t>()[n] = far_keys[n];
      *inputs["near_mask"].view().MutableAt<uint8_t>(n / 4, far_keys[n]) = 0;
    }
    FlashPlan plan(problem);
    plan.Sees(BandPattern(-9, 0)).QueryOrder({}).KeyMask("near_mask");
    plan.AddPart().KeyOrder("far_keys", 4).Causal();
    const auto outputs = Run(problem, specs, inputs, [&](const auto&) { return plan; });
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    const DoubleTensor q(inputs.at("q").view()), k(inputs.at("k").view());
    NamedTensors expected;
    DefineAttention(
        problem, ViewsOf(inputs), {},
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const bool is_far = std::count(far_keys + 4 * b, far_keys + 4 * b + 4, j) > 0;
          const bool sees = is_far ? !causal || j <= i : j <= i && j >= i - 9;
          return sees ? Dot(q.Row(b, h, i), k.Row(b, h, j), 16) / 4 : kNotSeen;
        },
        &expected);
    for (const char* name : {"out", "log_sum_exp"}) {
      EXPECT_LE(MaxDifference(outputs->at(name).view(), expected.at(name).view()),
                Fp32Bound(inputs.at("v").view()))
          << name;
    }
  }
}

// Marked queries see all keys, of a tensor of their own; the others a band.
TEST_P(Planned, QueriesThatATensorMarksHaveASoftmaxAndGradientsOfTheirOwn) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 130, 16, causal);
    std::vector<TensorSpec> specs = QkvInputs(problem);
    specs.push_back(specs[0]);
    specs.back().name = "q_marked";
    NamedTensors inputs = RandomInputs(specs, 3);
    specs.push_back({"marks", {2, 130}, DType::kU8});
    Fill((inputs["marks"] = Tensor(DType::kU8, {2, 130})).view(), 0);
    for (const int64_t i : {0, 64, 129}) *inputs["marks"].view().MutableAt<uint8_t>(1, i) = 1;
    FlashPlan plan(problem);
    plan.Sees(BandPattern(-9, 0)).AddMarkedRows({"marks", 0, 4}).Causal();
    plan.Tensors("q_marked", "k", "v");
    const auto outputs = Run(problem, specs, inputs, [&](const auto&) { return plan; });
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    // Of q_marked no row is known to be read.
    EXPECT_EQ(layer_->cost().bytes, 4 * 4 * 2 * 2 * 130 * 16 + 2 * 130);
    EXPECT_FALSE(layer_->cost().flops.has_value());
    const auto define = [&] {
      const DoubleTensor q(inputs.at("q").view()), q_marked(inputs.at("q_marked").view());
      const DoubleTensor k(inputs.at("k").view());
      NamedTensors outputs;
      DefineAttention(
          problem, ViewsOf(inputs), {},
          [&](int64_t b, int64_t h, int64_t i, int64_t j) {
            const bool is_marked = *inputs.at("marks").view().At<uint8_t>(b, i) != 0;
            const bool sees = is_marked ? !causal || j <= i : j <= i && j >= i - 9;
            const double* query = (is_marked ? q_marked : q).Row(b, h, i);
            return sees ? Dot(query, k.Row(b, h, j), 16) / 4 : kNotSeen;
          },
          &outputs);
      return outputs;
    };
    const NamedTensors expected = define();
    for (const char* name : {"out", "log_sum_exp"}) {
      EXPECT_LE(MaxDifference(outputs->at(name).view(), expected.at(name).view()),
                Fp32Bound(inputs.at("v").view()))
          << name;
    }
    const NamedTensors g = RandomOutputGradients(*layer_, 5);
    const auto gradients = GradientsOn(GetParam(), *layer_, ViewsOf(inputs), g);
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    // Each term of the four sums over keys or queries, of a pass and back, rounds once.
    const double bound =
        4 * 130 * 0x1p-24 * std::sqrt(SumOfProducts(g.at("out").view(), g.at("out").view()));
    for (const char* name : {"q", "q_marked", "k", "v"}) {
      Tensor kept = inputs.at(name).CloneAs(DType::kF64);
      std::swap(kept, inputs.at(name));
      const Tensor d = RandomDirection(kept.shape(), 23);
      const double slope = CentralDifference(&inputs.at(name), d.view(), [&] {
        const NamedTensors outputs = define();
        return SumOfProducts(outputs.at("out").view(), g.at("out").view()) +
               SumOfProducts(outputs.at("log_sum_exp").view(), g.at("log_sum_exp").view());
      });
      EXPECT_NEAR(SumOfProducts(gradients->at(name).view(), d.view()), slope, bound) << name;
      std::swap(kept, inputs.at(name));
    }
  }
}

TEST_P(Planned, HeadsMayHaveSoftmaxesOfTheirOwn) {
  Problem problem = Problem::SelfAttention(2, 6, 70, 16);
  problem.kv_heads = 3;
  FlashPlan plan = FlashPlan::Empty(problem);
  plan.AddRows(TokenRange{0, 70}).Heads({0, 4}).Scale(0.5).AddPart().Sees(BandPattern(-9, 9));
  plan.AddRows(TokenRange{0, 70}).Heads({4, 6}).AddPart();
  PairScore score;
  score.sees = [](int64_t h, int64_t i, int64_t j) { return h >= 4 || std::abs(i - j) <= 9; };
  score.of_product = [](int64_t h, int64_t, int64_t, double product) {
    return product * (h < 4 ? 0.5 : 0.25);
  };
  ExpectMatches(problem, plan, score);
  const double pairs = 4 * (70 * 19 - 2 * 45) + 2 * 70 * 70;
  EXPECT_EQ(layer_->cost().flops, 2 * pairs * 2 * (16 + 16));
}

TEST_P(Planned, HeadsThatAreNoWholeGroupsAreRefused) {
  Problem problem = Problem::SelfAttention(1, 6, 70, 16);
  problem.kv_heads = 3;
  FlashPlan plan = FlashPlan::Empty(problem);
  plan.AddRows(TokenRange{0, 70}).Heads({0, 3}).AddPart();
  plan.AddRows(TokenRange{0, 70}).Heads({3, 6}).AddPart();
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  EXPECT_EQ(Run(problem, QkvInputs(problem), inputs, [&](const auto&) { return plan; })
                .status()
                .message(),
            "a softmax has the query heads 0 to 2, which are no whole groups of 2");
}

// A step that makes the queries twice as large.
class Doubling : public FlashStep {
 public:
  explicit Doubling(const Problem& problem) : problem_(problem) {}
  void LayOut(Workspace* workspace, Inputs* tensors) override {
    const Shape shape = {problem_.batch, problem_.query_heads, problem_.query_tokens,
                         problem_.head_dim};
    doubled_ = TensorView(workspace->Take<float>(NumElements(shape)), DType::kF32, shape);
    tensors->Set("doubled", doubled_);
  }
  absl::Status Run(const Inputs& tensors, const Outputs&, const Execution&) override {
    const ConstTensorView q = tensors.Get("q");
    for (int64_t n = 0; n < q.num_elements(); ++n) {
      static_cast<float*>(doubled_.mutable_data())[n] = 2 * static_cast<const float*>(q.data)[n];
    }
    return absl::OkStatus();
  }
  double flops() const override { return 7; }
  std::map<std::string, double> statistics() const override { return {{"doubled", 1}}; }

 protected:
  TensorView doubled_;

 private:
  Problem problem_;
};

TEST(PlannedOnTheCpu, StepsMakeTensorsForTheParts) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  const auto describe = [&](const NamedTensors&) {
    return FlashPlan(problem).AddStep<Doubling>(problem).Tensors("doubled", "k", "v");
  };
  const std::unique_ptr<Layer> layer =
      PlannedLayer::Create(problem, QkvInputs(problem), AttentionOutputs(problem), {}, Device::kCpu,
                           describe)
          .value();
  const NamedTensors outputs = RunLayer(*layer, ViewsOf(inputs)).value();
  NamedTensors expected;
  DefineMaskedAttention(problem, ViewsOf(inputs), {}, {2 / 4.0, nullptr, nullptr, nullptr},
                        &expected);
  EXPECT_LE(MaxDifference(outputs.at("out").view(), expected.at("out").view()),
            Fp32Bound(inputs.at("v").view()));
  EXPECT_EQ(layer->cost().flops, 2 * 2 * 70 * 70 * 2 * 32 + 7);
  EXPECT_EQ(layer->statistics().at("doubled"), 1);
}

TEST(PlannedOnTheCpu, BackwardPassesNeedALogSumExpOfEachSoftmaxAndThoseOfSteps) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const auto check = [&](const FlashPlan& plan) {
    return PlannedLayer::Create(problem, QkvInputs(problem), AttentionOutputs(problem), {},
                                Device::kCpu, [&](const NamedTensors&) { return plan; })
        .value()
        ->CheckBackward();
  };
  EXPECT_EQ(check(FlashPlan(problem)), absl::OkStatus());
  EXPECT_EQ(check(FlashPlan(problem).Writes("out", "")),
            absl::UnimplementedError("there is no log-sum-exp of the softmax that writes out"));
  EXPECT_EQ(check(FlashPlan(problem).AddStep<Doubling>(problem)),
            absl::UnimplementedError("a step of the technique has no backward pass"));
}

// Such a step whose queries a Run keeps, with its backward pass.
class KeptDoubling : public Doubling {
 public:
  explicit KeptDoubling(const Problem& problem) : Doubling(problem) {}
  absl::Status Run(const Inputs& tensors, const Outputs& outputs,
                   const Execution& execution) override {
    static_cast<ConstTensorView&>(doubled_) = tensors.Get("doubled");
    return Doubling::Run(tensors, outputs, execution);
  }
  std::vector<std::string> kept_tensors() const override { return {"doubled"}; }
  absl::Status RunAgain(const Inputs&, const Execution&) override { return absl::OkStatus(); }
  absl::Status CheckBackward(Device) const override { return absl::OkStatus(); }
  absl::Status Backward(const Inputs&, const Outputs& gradients, const ParameterGradients&,
                        const Execution&) override {
    const TensorView from = gradients.Get("doubled"), to = gradients.Get("q");
    for (int64_t n = 0; n < to.num_elements(); ++n) {
      static_cast<float*>(to.mutable_data())[n] += 2 * static_cast<const float*>(from.data)[n];
    }
    return absl::OkStatus();
  }
};

// The workspace holds NaN when Backward begins.
TEST(PlannedOnTheCpu, TensorsThatAStepKeepsAreNotMadeAgain) {
  const Problem problem = Problem::SelfAttention(2, 2, 70, 16);
  const auto create = [&](const FlashPlan& plan) {
    return PlannedLayer::Create(problem, QkvInputs(problem), AttentionOutputs(problem), {},
                                Device::kCpu, [=](const NamedTensors&) { return plan; })
        .value();
  };
  const auto keeping =
      create(FlashPlan(problem).AddStep<KeptDoubling>(problem).Tensors("doubled", "k", "v"));
  const auto scaled = create(FlashPlan(problem, 2 / 4.0));
  EXPECT_EQ(keeping->kept_bytes(), scaled->kept_bytes() + 2 * 2 * 70 * 16 * sizeof(float));
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  const NamedTensors of_outputs = RandomOutputGradients(*scaled, 4);
  const NamedTensors gradients = GradientsOf(*keeping, ViewsOf(inputs), of_outputs, 2).value();
  const NamedTensors expected = GradientsOf(*scaled, ViewsOf(inputs), of_outputs, 2).value();
  for (const char* name : {"q", "k", "v"}) {
    EXPECT_LE(MaxDifference(gradients.at(name).view(), expected.at(name).view()), 1e-5) << name;
  }
}

double LargestOf(const ConstTensorView& view) {
  Tensor zeros(view.dtype, view.shape());
  Fill(zeros.view(), 0);
  return MaxDifference(view, zeros.view());
}

// Queries 128 to 191 see no key, and no query sees keys from 470 on. Gradients hold NaN before, and the
// parts that are the first to write to a token's set it.
TEST(PlannedOnTheCpu, GradientsOfSeveralRowsAndPartsAreThoseOfOne) {
  const Problem problem = Problem::SelfAttention(2, 2, 600, 16);
  const auto add_keys = [](int64_t i, int64_t first_key, KeyList* keys) {
    if (i < 70) {
      keys->Add(-first_key, 41 - first_key);
      keys->Add(300 - first_key, 341 - first_key);
    } else if (i < 128 || i >= 192) {
      keys->Add(i - 20 - first_key, std::min<int64_t>(i + 21, 470) - first_key);
    }
  };
  const auto pattern = [&](int64_t first_query, int64_t first_key) {
    return FunctionPattern([=](int64_t, int64_t query, KeyList* keys) {
      add_keys(first_query + query, first_key, keys);
      return query + 1;
    });
  };
  const auto gradients_of = [&](const FlashPlan& plan, const std::vector<TensorSpec>& specs) {
    const std::unique_ptr<Layer> layer =
        PlannedLayer::Create(problem, specs, AttentionOutputs(problem), {}, Device::kCpu,
                             [&](const NamedTensors&) { return plan; })
            .value();
    return GradientsOf(*layer, ViewsOf(RandomInputs(specs, 3)), RandomOutputGradients(*layer, 5), 2)
        .value();
  };
  FlashPlan one(problem), several = FlashPlan::Empty(problem);
  one.Sees(pattern(0, 0));
  several.AddRows(TokenRange{0, 70});
  several.AddPart({0, 100}).Sees(pattern(0, 0));
  several.AddPart({100, 290}).Sees(pattern(0, 100));  // nothing
  several.AddPart({290, 550}).Sees(pattern(0, 290));
  several.AddRows(TokenRange{70, 600});
  several.AddPart({0, 600}).Sees(pattern(70, 0));
  FlashPlan with_order(problem);
  std::vector<int32_t> places(600);
  std::iota(places.begin(), places.end(), 0);
  with_order.Sees(pattern(0, 0)).QueryOrder(places).KeyOrder(places);

  const std::vector<TensorSpec> specs = QkvInputs(problem);
  const NamedTensors expected = gradients_of(one, specs);
  for (const FlashPlan* plan : {&several, &with_order}) {
    const NamedTensors gradients = gradients_of(*plan, specs);
    for (const char* name : {"q", "k", "v"}) {
      EXPECT_LE(MaxDifference(gradients.at(name).view(), expected.at(name).view()), 2e-5) << name;
      EXPECT_GT(LargestOf(gradients.at(name).view()), 0.1) << name;
    }
    for (const char* name : {"k", "v"}) {
      EXPECT_EQ(LargestOf(Slice(gradients.at(name).view(), 2, 470, 130)), 0) << name;
    }
    EXPECT_EQ(LargestOf(Slice(gradients.at("q").view(), 2, 128, 64)), 0);
  }
}

// One tensor that is read twice has the sum of both gradients. The first queries see the last keys alone,
// so that a call writes to them as keys before it does as queries.
TEST(PlannedOnTheCpu, ATensorInTwoPlacesHasTheSumOfTheirGradients) {
  const Problem problem = Problem::SelfAttention(1, 2, 300, 16);
  const std::vector<TensorSpec> specs = QkvInputs(problem);
  const std::string names[] = {"q", "k", "v"};
  for (const auto& [first, second] : {std::make_pair(0, 1), std::make_pair(1, 2)}) {
    const std::string &kept = names[first], &replaced = names[second];
    NamedTensors inputs = RandomInputs(specs, 3);
    inputs.at(replaced) = inputs.at(kept).Clone();
    const auto gradients_of = [&](const std::string& q, const std::string& k,
                                  const std::string& v) {
      FlashPlan plan = FlashPlan::Empty(problem);
      plan.AddRows(TokenRange{0, 300});
      plan.AddPart({0, 300}).Tensors(q, k, v).Sees(
          FunctionPattern([](int64_t, int64_t i, KeyList* keys) {
            if (i < 64) {
              keys->Add(256, 300);
            } else {
              keys->Add(0, i + 1);
            }
            return i + 1;
          }));
      const std::unique_ptr<Layer> layer =
          PlannedLayer::Create(problem, specs, AttentionOutputs(problem), {}, Device::kCpu,
                               [&](const NamedTensors&) { return plan; })
              .value();
      return GradientsOf(*layer, ViewsOf(inputs), RandomOutputGradients(*layer, 5)).value();
    };
    const NamedTensors apart = gradients_of("q", "k", "v");
    const NamedTensors both =
        first == 0 ? gradients_of("q", "q", "v") : gradients_of("q", "k", "k");
    Tensor sum = apart.at(kept).Clone();
    for (int64_t n = 0; n < sum.num_elements(); ++n) {
      sum.span<float>()[n] += apart.at(replaced).span<float>()[n];
    }
    EXPECT_LE(MaxDifference(both.at(kept).view(), sum.view()), 1e-5) << kept;
    EXPECT_EQ(LargestOf(both.at(replaced).view()), 0) << replaced;
  }
}

TEST(PlannedOnTheCpu, PlansSayWhereGradientsStop) {
  const Problem problem = Problem::SelfAttention(1, 1, 70, 16);
  const std::unique_ptr<Layer> layer =
      PlannedLayer::Create(problem, QkvInputs(problem), AttentionOutputs(problem), {}, Device::kCpu,
                           [&](const NamedTensors&) {
                             return FlashPlan(problem).StopGradient("k", "keys are constants");
                           })
          .value();
  EXPECT_EQ(layer->stopped_gradients().at("k"), "keys are constants");
  std::vector<std::string> names;
  for (const TensorSpec& spec : layer->input_gradients()) names.push_back(spec.name);
  EXPECT_EQ(names, (std::vector<std::string>{"q", "v"}));
}

}  // namespace
}  // namespace tfb
