#include "core/flash/flash_parts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/device_array.h"
#include "core/definition.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

// Of place n among the keys j = 3 n + residue, seen from query i or, reversed, from the i-th last.
class ResiduePattern : public Pattern {
 public:
  ResiduePattern(const Problem& problem, int64_t residue, bool reversed, bool causal)
      : problem_(problem), residue_(residue), reversed_(reversed), causal_(causal) {}
  bool Allows(int64_t, int64_t i, int64_t n) const override {
    const int64_t query = reversed_ ? problem_.query_tokens - 1 - i : i;
    return !causal_ || 3 * n + residue_ <= query;
  }
  void KeyRanges(int64_t, int64_t, int64_t, std::vector<KeyRange>* ranges) const override {
    ranges->push_back({0, problem_.kv_tokens, false});
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
  ThirdsLayer(const Problem& problem, Device device)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)), device_(device) {
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
    ThirdsLayer layer(problem, GetParam());
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
INSTANTIATE_TEST_SUITE_P(On, Parts, testing::ValuesIn(kHostDevices),
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
  // Half a unit in the last place of the largest value for the output, and as much for the
  // probabilities that tensor cores take in 16 bits.
  const double bound = 2 * MaxAbs(inputs.at("v").view()) / 256;
  ExpectMatchesLoops(problem, ViewsOf(inputs), bound);
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
  for (int64_t j = 40; j < 70; ++j) mask.span<uint8_t>()[j] = 1;  // of batch 0; batch 1 has none
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

}  // namespace
}  // namespace tfb
