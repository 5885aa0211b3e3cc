#include "core/flash/flash_parts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/definition.h"
#include "core/flash/rest_testing.h"
#include "core/random.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// A pattern over places n of the keys j = 3 n + residue, for queries in order or, reversed, from
// the last.
class ResiduePattern : public Pattern {
 public:
  ResiduePattern(const Problem& problem, int64_t residue, bool reversed, bool causal)
      : problem_(problem), residue_(residue), reversed_(reversed), causal_(causal) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t query = reversed_ ? problem_.query_tokens - 1 - i : i;
    // Key n is 3 n + residue.
    keys->Add(0, causal_ ? (query - residue_ + 3) / 3 : problem_.kv_tokens);
    return i + 1;
  }

 private:
  Problem problem_;
  int64_t residue_;
  bool reversed_;
  bool causal_;
};

// Self-attention in three parts: keys by their residue of 3, the middle part's queries reversed.
class ThirdsLayer : public Layer {
 public:
  ThirdsLayer(const Problem& problem, Device device, std::vector<TensorSpec> outputs)
      : Layer(problem, QkvInputs(problem), std::move(outputs)), device_(device) {
    for (int64_t r = 0; r < 3; ++r) {
      Problem part = problem;
      part.causal = false;
      part.kv_tokens = (problem.kv_tokens + 2 - r) / 3;
      problems_.push_back(part);
    }
  }
  size_t workspace_bytes(int threads) const override {
    return FlashParts::WorkspaceBytes(device_, problems_, false, threads);
  }
  Cost cost() const override { return {}; }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    std::vector<int32_t> reversed;
    for (int64_t i = problem().query_tokens; i > 0; --i) {
      reversed.push_back(static_cast<int32_t>(i - 1));
    }
    TFB_ASSIGN_OR_RETURN(reversed_, DeviceArray<int32_t>::Create(device_, reversed));
    std::vector<FlashEngine> engines;
    for (int64_t r = 0; r < 3; ++r) {
      std::vector<int32_t> keys;
      for (int64_t j = r; j < problem().kv_tokens; j += 3) keys.push_back(static_cast<int32_t>(j));
      TFB_ASSIGN_OR_RETURN(DeviceArray<int32_t> order, DeviceArray<int32_t>::Create(device_, keys));
      orders_.push_back(std::move(order));
      const ResiduePattern pattern(problems_[r], r, r == 1, problem().causal);
      TFB_ASSIGN_OR_RETURN(FlashEngine engine, FlashEngine::Create(device_, problems_[r], pattern));
      engines.push_back(std::move(engine));
    }
    parts_ = FlashParts(device_, std::move(engines));
    return absl::OkStatus();
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    std::vector<FlashCall> calls;
    for (int64_t r = 0; r < 3; ++r) {
      FlashCall call = parts_.engines()[r].NewCall(inputs, outputs);
      call.out_rest = outputs.Get("out_rest");
      call.key_order = {orders_[r].data(), 0, 0};
      if (r == 1) call.query_order = {reversed_.data(), 0, 0};
      calls.push_back(call);
    }
    return parts_.Run(calls, execution);
  }

 private:
  Device device_;
  std::vector<Problem> problems_;
  DeviceArray<int32_t> reversed_;
  std::vector<DeviceArray<int32_t>> orders_;
  FlashParts parts_;
};

class Parts : public testing::TestWithParam<Device> {
 protected:
  NamedTensors Run(const Problem& problem, const Inputs& inputs, int threads = 2) {
    return Run(problem, inputs, AttentionOutputs(problem), threads);
  }
  NamedTensors Run(const Problem& problem, const Inputs& inputs,
                   const std::vector<TensorSpec>& written, int threads = 2) {
    ThirdsLayer layer(problem, GetParam(), written);
    absl::StatusOr<NamedTensors> outputs = GetParam() == Device::kCpu
                                               ? RunLayer(layer, inputs, threads)
                                               : RunCudaLayer(layer, GetParam(), inputs);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return outputs.ok() ? *std::move(outputs) : NamedTensors();
  }

  void ExpectMatchesLoops(const Problem& problem, const Inputs& inputs, double bound) {
    const NamedTensors outputs = Run(problem, inputs);
    NamedTensors expected;
    DefineMaskedAttention(
        problem, inputs, {}, 0, [](int64_t, int64_t, int64_t) { return true; },
        [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, &expected);
    for (const char* name : {"out", "log_sum_exp"}) {
      EXPECT_LE(MaxDifference(outputs.at(name).view(), expected.at(name).view()), bound)
          << name << " of " << problem.ToString();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(On, Parts, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

TEST_P(Parts, TogetherAreOneSoftmax) {
  for (const bool causal : {false, true}) {
    for (const int64_t tokens : {1, 2, 63, 64, 200}) {
      const Problem problem = Problem::SelfAttention(2, 2, tokens, 24, causal);
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
      ExpectMatchesLoops(problem, ViewsOf(inputs), 2e-5);
    }
  }
}

TEST_P(Parts, SixteenBitOutputsAreRoundedOnce) {
  Problem problem = Problem::SelfAttention(1, 2, 150, 32, true);
  problem.dtype = DType::kBF16;
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  // The bound is half a unit in the last place of the largest value for the output, and as much for
  // the probabilities that tensor cores round to 16 bits.
  const double bound = 2 * MaxAbs(inputs.at("v").view()) / 256;
  ExpectMatchesLoops(problem, ViewsOf(inputs), bound);
}

TEST_P(Parts, OutputsOfSixteenBitsAndWhatRoundingTookFromThemAreThoseInF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t queries : {3, 150}) {
      Problem problem = Problem::SelfAttention(1, 2, queries, 32, false);
      problem.kv_tokens = 150;
      problem.dtype = dtype;
      const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
      std::vector<TensorSpec> specs = AttentionOutputs(problem);
      ASSERT_EQ(specs[0].name, "out");
      specs.push_back(specs[0]);
      specs.back().name = "out_rest";
      const NamedTensors both = Run(problem, ViewsOf(inputs), specs);
      specs.pop_back();
      specs[0].dtype = DType::kF32;
      const NamedTensors exact = Run(problem, ViewsOf(inputs), specs);
      EXPECT_LE(LargestErrorOfRest(exact.at("out").view(), both.at("out").view(),
                                   both.at("out_rest").view()),
                1)
          << problem.ToString();
    }
  }
}

TEST_P(Parts, FewQueriesSplitEachPartOnceMore) {
  for (const int64_t queries : {1, 3}) {
    Problem problem = Problem::SelfAttention(1, 1, queries, 32, false);
    problem.kv_tokens = 1500;
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
    ExpectMatchesLoops(problem, ViewsOf(inputs), 2e-5);
  }
}

TEST_P(Parts, RowsWithoutAKeyInAnyAreEmpty) {
  const Problem problem = Problem::SelfAttention(2, 1, 70, 16, true);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  Tensor mask(DType::kU8, {2, 70});
  Fill(mask.view(), 0);
  // Masks keys of batch row 0; batch row 1 has no masked ones.
  for (int64_t j = 40; j < 70; ++j) mask.span<uint8_t>()[j] = 1;
  inputs["key_mask"] = std::move(mask);
  ExpectMatchesLoops(problem, ViewsOf(inputs), 2e-5);
  const NamedTensors outputs = Run(problem, ViewsOf(inputs));
  EXPECT_EQ(MaxAbs(Slice(outputs.at("out").view(), 0, 1, 1)), 0);
  EXPECT_EQ(outputs.at("log_sum_exp").span<float>()[39], -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isfinite(outputs.at("log_sum_exp").span<float>()[40]));
}

TEST_P(Parts, AreTheSameForAnyNumberOfThreads) {
  const Problem problem = Problem::SelfAttention(2, 3, 130, 16, true);
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  const NamedTensors one = Run(problem, ViewsOf(inputs), 1),
                     many = Run(problem, ViewsOf(inputs), 5);
  EXPECT_EQ(MaxDifference(one.at("out").view(), many.at("out").view()), 0);
}

TEST_P(Parts, ANanInAVisibleKeyReachesTheOutput) {
  const Problem problem = Problem::SelfAttention(1, 1, 40, 16, true);
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 3);
  inputs["k"].span<float>()[20 * 16] = std::numeric_limits<float>::quiet_NaN();
  const NamedTensors outputs = Run(problem, ViewsOf(inputs));
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(std::isnan(outputs.at("out").span<float>()[i * 16]), i >= 20) << i;
  }
}

// Queries over two tensors of keys: k with relative keys, and, in a band, k2 with label keys.
class TwoRulesLayer : public Layer {
 public:
  TwoRulesLayer(const Problem& problem, int64_t more_keys, Device device)
      : Layer(problem, InputsOf(problem, more_keys), AttentionOutputs(problem)), device_(device) {
    problems_ = {problem, problem};
    problems_[1].kv_tokens = more_keys;
    const int64_t heads = problem.query_heads, head_dim = problem.head_dim;
    FillNormal(&(parameters_["offsets"] = Tensor(DType::kF32, {heads, 11, head_dim})), 3, "a");
    FillNormal(&(parameters_["labels"] = Tensor(DType::kF32, {heads, 2, head_dim})), 3, "b");
  }
  size_t workspace_bytes(int threads) const override {
    return FlashParts::WorkspaceBytes(device_, problems_, /*relative_keys=*/true, threads);
  }
  Cost cost() const override { return {}; }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    offsets_ = RelativeKeys(parameters_.at("offsets").view(), -5, 5,
                            [](int64_t offset) { return offset + 5; });
    ScoreRule by_offset, by_label;
    by_offset.relative_keys = &offsets_;
    by_label.label_keys = {parameters_.at("labels").span<float>().data(), problem().query_heads};
    TFB_ASSIGN_OR_RETURN(FlashEngine first,
                         FlashEngine::Create(device_, problems_[0], FullPattern(), by_offset));
    TFB_ASSIGN_OR_RETURN(FlashEngine second, FlashEngine::Create(device_, problems_[1],
                                                                 BandPattern(-20, 70), by_label));
    std::vector<FlashEngine> engines;
    engines.push_back(std::move(first));
    engines.push_back(std::move(second));
    parts_ = FlashParts(device_, std::move(engines));
    return absl::OkStatus();
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    std::vector<FlashCall> calls;
    for (const FlashEngine& engine : parts_.engines()) {
      FlashCall call = engine.NewCall();
      call.q = inputs.Get("q");
      call.out = outputs.Get("out");
      call.log_sum_exp = outputs.Get("log_sum_exp");
      calls.push_back(call);
    }
    calls[0].k = inputs.Get("k");
    calls[0].v = inputs.Get("v");
    calls[1].k = inputs.Get("k2");
    calls[1].v = inputs.Get("v2");
    calls[1].query_ids = inputs.Get("query_ids");
    calls[1].key_ids = inputs.Get("key_ids");
    return parts_.Run(calls, execution);
  }

 private:
  static std::vector<TensorSpec> InputsOf(const Problem& p, int64_t more_keys) {
    std::vector<TensorSpec> inputs = QkvInputs(p);
    inputs.push_back({"k2", {p.batch, p.kv_heads, more_keys, p.head_dim}, p.dtype});
    inputs.push_back({"v2", {p.batch, p.kv_heads, more_keys, p.value_dim}, p.dtype});
    inputs.push_back({"query_ids", {p.batch, p.query_tokens}, DType::kI32});
    inputs.push_back({"key_ids", {p.batch, more_keys}, DType::kI32});
    return inputs;
  }

  Device device_;
  std::vector<Problem> problems_;
  RelativeKeys offsets_;
  FlashParts parts_;
};

TEST_P(Parts, HaveRulesAndKeysOfTheirOwn) {
  for (const int64_t queries : {3, 150}) {  // few on CUDA: their keys are split
    Problem problem = Problem::SelfAttention(2, 2, queries, 16);
    problem.kv_tokens = 200;
    const int64_t more_keys = 90;
    TwoRulesLayer layer(problem, more_keys, GetParam());
    NamedTensors inputs = RandomInputs(layer.inputs(), 3);
    for (const char* name : {"query_ids", "key_ids"}) {
      const absl::Span<int32_t> ids = inputs[name].span<int32_t>();
      for (size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<int32_t>(n * n % 3);
    }
    const absl::StatusOr<NamedTensors> outputs =
        GetParam() == Device::kCpu ? RunLayer(layer, ViewsOf(inputs), 2)
                                   : RunCudaLayer(layer, GetParam(), ViewsOf(inputs));
    ASSERT_TRUE(outputs.ok()) << outputs.status();

    // This problem has all keys in one tensor.
    Problem all = problem;
    all.kv_tokens += more_keys;
    Tensor v(DType::kF32, {2, 2, all.kv_tokens, 16});
    CopyElements(inputs["v"].view(), Slice(v.view(), 2, 0, 200));
    CopyElements(inputs["v2"].view(), Slice(v.view(), 2, 200, more_keys));
    const DoubleTensor q(inputs["q"].view()), k(inputs["k"].view()), k2(inputs["k2"].view()),
        offsets(layer.parameters().at("offsets").view()),
        labels(layer.parameters().at("labels").view());
    NamedTensors expected;
    DefineAttention(
        all, {{"v", v.view()}}, {},
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const double* const query = q.Row(b, h, i);
          if (j < 200) {
            const bool near = std::abs(j - i) <= 5;
            return (Dot(query, k.Row(b, h, j), 16) +
                    (near ? Dot(query, offsets.Row(h, j - i + 5), 16) : 0)) /
                   4;
          }
          j -= 200;
          if (j - i < -20 || j - i > 70) return kNotSeen;
          const bool same = *inputs["query_ids"].view().At<int32_t>(b, i) ==
                            *inputs["key_ids"].view().At<int32_t>(b, j);
          return (Dot(query, k2.Row(b, h, j), 16) + Dot(query, labels.Row(h, same), 16)) / 4;
        },
        &expected);
    for (const char* name : {"out", "log_sum_exp"}) {
      EXPECT_LE(MaxDifference(outputs->at(name).view(), expected.at(name).view()), 4e-5) << name;
    }
  }
}

}  // namespace
}  // namespace tfb
