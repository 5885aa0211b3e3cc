// Tests token rules, on all devices of this machine, against loops.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/device_array.h"
#include "core/definition.h"
#include "core/flash/flash_parts.h"
#include "core/random.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kRounds = 3, kBuckets = 5;

struct Rule {
  bool causal;
  bool own;
  bool counts;
  float self_bias;
  // A mask [batch, tokens, tokens], or with `band` [batch, tokens, 2 kReach + 1] of the keys at most
  // kReach away.
  bool mask = false;
  bool band = false;
  // Tokens of a chunk: the engines' tiles of 64 cross the ends of the one and lie within the other.
  int64_t chunk = 40;
};
constexpr int64_t kChunkOfTiles = 128;
constexpr int64_t kReach = 30;

// Tells whether the masks show key j to query i.
bool MaskShows(int64_t b, int64_t i, int64_t j) { return (3 * i + 5 * j + b) % 7 != 2; }
bool Shows(const Rule& rule, int64_t b, int64_t i, int64_t j) {
  return !rule.mask || (rule.band && std::abs(i - j) > kReach) || MaskShows(b, i, j);
}
std::vector<uint8_t> MaskOf(const Rule& rule, const Problem& problem) {
  std::vector<uint8_t> mask;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      const int64_t begin = rule.band ? i - kReach : 0;
      const int64_t end = rule.band ? i + kReach + 1 : problem.kv_tokens;
      for (int64_t j = begin; j < end; ++j) mask.push_back(MaskShows(b, i, j) ? 1 : 0);
    }
  }
  return mask;
}

// Orders for every batch row, head and round: tokens in the order of drawn buckets, in chunks. A
// query sees its chunk and the previous one, and slots count the keys of its bucket there.
struct Sortings {
  Sortings(const Problem& problem, int64_t chunk) : problem(problem) {
    const int64_t rows = kRounds * problem.batch * problem.query_heads;
    for (int64_t row = 0; row < rows; ++row) {
      Tensor drawn(DType::kF32, {problem.query_tokens});
      FillUniform(&drawn, 5 + row, "buckets", 0, 1);
      std::vector<int32_t> bucket, order, code(problem.query_tokens);
      for (int64_t n = 0; n < problem.query_tokens; ++n) {
        bucket.push_back(std::min<int32_t>(drawn.span<float>()[n] * kBuckets, kBuckets - 1));
        order.push_back(static_cast<int32_t>(n));
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return bucket[a] < bucket[b]; });
      for (int64_t n = 0; n < problem.query_tokens; ++n) {
        code[order[n]] = static_cast<int32_t>(1000 * bucket[order[n]] + n / chunk);
      }
      orders.insert(orders.end(), order.begin(), order.end());
      codes.insert(codes.end(), code.begin(), code.end());
    }
  }
  int32_t Code(int64_t round, int64_t b, int64_t h, int64_t token) const {
    return codes[((round * problem.batch + b) * problem.query_heads + h) * problem.query_tokens +
                 token];
  }
  bool Shows(int64_t round, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int32_t difference = Code(round, b, h, i) - Code(round, b, h, j);
    return difference == 0 || difference == 1;
  }
  bool IsInWindow(int64_t round, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int32_t difference = Code(round, b, h, i) % 1000 - Code(round, b, h, j) % 1000;
    return difference == 0 || difference == 1;
  }

  Problem problem;
  std::vector<int32_t> orders;  // [rounds][batch][heads][tokens]
  std::vector<int32_t> codes;
};

class ChunkPattern : public Pattern {
 public:
  explicit ChunkPattern(int64_t chunk) : chunk_(chunk) {}
  int64_t AddKeys(int64_t, int64_t i, KeyList* keys) const override {
    const int64_t begin = i / chunk_ * chunk_;
    keys->Add(begin - chunk_, begin + chunk_);
    return begin + chunk_;
  }

 private:
  int64_t chunk_;
};

class SortedLayer : public Layer {
 public:
  SortedLayer(const Problem& problem, const Rule& rule, const Sortings& sortings, Device device)
      : Layer(problem, QkvInputs(problem), AttentionOutputs(problem)),
        rule_(rule),
        sortings_(sortings),
        device_(device),
        problems_(kRounds, problem) {}
  size_t workspace_bytes(int threads) const override {
    return FlashParts::WorkspaceBytes(device_, problems_, false, threads);
  }
  Cost cost() const override { return {}; }

 protected:
  absl::Status DoSetup(const Inputs&, const Execution&) override {
    TFB_ASSIGN_OR_RETURN(orders_, DeviceArray<int32_t>::Create(device_, sortings_.orders));
    TFB_ASSIGN_OR_RETURN(codes_, DeviceArray<int32_t>::Create(device_, sortings_.codes));
    TFB_ASSIGN_OR_RETURN(mask_, DeviceArray<uint8_t>::Create(device_, MaskOf(rule_, problem())));
    std::vector<FlashEngine> engines;
    for (const Problem& part : problems_) {
      TFB_ASSIGN_OR_RETURN(FlashEngine engine,
                           FlashEngine::Create(device_, part, ChunkPattern(rule_.chunk)));
      engines.push_back(std::move(engine));
    }
    parts_ = FlashParts(device_, std::move(engines));
    return absl::OkStatus();
  }
  absl::Status DoRun(const Inputs& inputs, const Outputs& outputs,
                     const Execution& execution) override {
    const int64_t head = problem().query_tokens, batch = head * problem().query_heads;
    const int64_t round = batch * problem().batch;
    std::vector<FlashCall> calls;
    for (int64_t n = 0; n < kRounds; ++n) {
      FlashCall call = parts_.engines()[n].NewCall(inputs, outputs);
      call.query_order = {orders_.data() + n * round, batch, head};
      call.key_order = call.query_order;
      call.rule.tokens.causal = rule_.causal;
      call.rule.tokens.self_bias = rule_.self_bias;
      call.rule.tokens.counts = rule_.counts;
      if (rule_.own) call.rule.tokens.own = n;
      call.rule.tokens.query_codes = call.rule.tokens.key_codes = codes_.data();
      call.rule.tokens.slots = kRounds;
      call.rule.tokens.slot_stride = round;
      call.rule.tokens.batch_stride = batch;
      call.rule.tokens.head_stride = head;
      if (rule_.mask && rule_.band) {
        const int64_t row = 2 * kReach + 1;
        call.rule.tokens.mask = {mask_.data() + kReach, head * row, row - 1, 1, -kReach, kReach};
      } else if (rule_.mask) {
        call.rule.tokens.mask = {mask_.data(), head * head, head, 1};
      }
      calls.push_back(call);
    }
    return parts_.Run(calls, execution);
  }

 private:
  Rule rule_;
  Sortings sortings_;
  Device device_;
  std::vector<Problem> problems_;
  DeviceArray<int32_t> orders_, codes_;
  DeviceArray<uint8_t> mask_;
  FlashParts parts_;
};

// Counts each round that shows a key to a query, or all of them as one.
NamedTensors ByLoops(const Problem& problem, const Rule& rule, const Sortings& sortings,
                     const Inputs& inputs) {
  NamedTensors outputs;
  const DoubleTensor q(inputs.Get("q")), k(inputs.Get("k"));
  const auto score = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    int shown = 0, counted = 0;
    for (int64_t n = 0; n < kRounds; ++n) {
      shown += rule.own ? sortings.Shows(n, b, h, i, j) : sortings.IsInWindow(n, b, h, i, j);
      counted += sortings.Shows(n, b, h, i, j);
    }
    if (shown == 0 || (rule.causal && j > i) || !Shows(rule, b, i, j)) return kNotSeen;
    double s = Dot(q.Row(b, h, i), k.Row(b, h, j), problem.head_dim) / std::sqrt(problem.head_dim);
    if (i == j) s += rule.self_bias;
    if (rule.counts) s -= std::log(std::max(counted, 1));
    return s + std::log(shown);
  };
  DefineAttention(problem, inputs, {}, score, &outputs);
  return outputs;
}

class TokenRules : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  NamedTensors Run(const Problem& problem, const Rule& rule, const Inputs& inputs,
                   int threads = 2) {
    const Device device = std::get<0>(GetParam());
    SortedLayer layer(problem, rule, Sortings(problem, rule.chunk), device);
    absl::StatusOr<NamedTensors> outputs = device == Device::kCpu
                                               ? RunLayer(layer, inputs, threads)
                                               : RunCudaLayer(layer, device, inputs);
    EXPECT_TRUE(outputs.ok()) << outputs.status();
    return outputs.ok() ? *std::move(outputs) : NamedTensors();
  }
  DType dtype() const { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(On, TokenRules,
                         testing::Combine(testing::ValuesIn(TestedDevices()),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         [](const auto& test) {
                           return absl::StrCat(Name(std::get<0>(test.param)), "_",
                                               Name(std::get<1>(test.param)));
                         });

constexpr Rule kRules[] = {{false, false, false, 0},
                           {true, false, false, 0},
                           {false, true, false, 0},
                           {true, true, false, -1e5f},
                           {false, false, false, 0.5},
                           {true, true, true, -1e5f},
                           {false, true, true, -2},
                           {false, false, false, 0, true},
                           {true, true, true, -2, true},
                           {false, true, false, 0, true, true},
                           {true, false, false, 0, false, false, kChunkOfTiles},
                           {false, true, true, 0.5, false, false, kChunkOfTiles},
                           {false, false, false, 0, true, false, kChunkOfTiles}};

TEST_P(TokenRules, AgreeWithLoops) {
  const double bound = dtype() == DType::kF32 ? 3e-6 : 2e-2;
  for (const Rule& rule : kRules) {
    // More than three chunks, or two: some chunks do not see others.
    const int64_t tokens = rule.chunk == kChunkOfTiles ? 270 : 150;
    const Problem problem = Problem::SelfAttention(2, 2, tokens, 16, false, dtype());
    const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
    SCOPED_TRACE(testing::Message()
                 << "causal " << rule.causal << ", own " << rule.own << ", counts " << rule.counts
                 << ", self " << rule.self_bias << ", mask " << rule.mask << ", band " << rule.band
                 << ", chunk " << rule.chunk);
    const NamedTensors outputs = Run(problem, rule, ViewsOf(inputs));
    const NamedTensors expected =
        ByLoops(problem, rule, Sortings(problem, rule.chunk), ViewsOf(inputs));
    EXPECT_LE(MaxDifference(outputs.at("out").view(), expected.at("out").view()), bound);
    // A row that sees only itself has a log-sum-exp of about -1e5.
    EXPECT_LE(MaxDifference(outputs.at("log_sum_exp").view(), expected.at("log_sum_exp").view()),
              rule.self_bias < -100 ? 2e-2 : bound);
  }
}

TEST_P(TokenRules, AHiddenNanDoesNotReachTheOutput) {
  const Problem problem = Problem::SelfAttention(1, 1, 230, 16, false, dtype());
  NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
  const Rule rule = {true, true, true, 0};
  const NamedTensors before = Run(problem, rule, ViewsOf(inputs));
  const int64_t last = 229;
  for (const char* name : {"k", "v"}) {
    const TensorView row = Slice(inputs[name].view(), 2, last, 1);
    Fill(row, std::numeric_limits<double>::quiet_NaN());
  }
  const NamedTensors after = Run(problem, rule, ViewsOf(inputs));
  for (int64_t i = 0; i < last; ++i) {
    for (int64_t c = 0; c < 16; ++c) {
      const int64_t n = i * 16 + c;
      EXPECT_EQ(before.at("out").view().Get(n), after.at("out").view().Get(n)) << i;
    }
  }
  EXPECT_TRUE(std::isnan(after.at("out").view().Get(last * 16)));
}

TEST_P(TokenRules, AreTheSameForAnyNumberOfThreads) {
  const Problem problem = Problem::SelfAttention(1, 2, 230, 16, false, dtype());
  const NamedTensors inputs = RandomInputs(QkvInputs(problem), 4);
  const NamedTensors one = Run(problem, kRules[5], ViewsOf(inputs), 1);
  const NamedTensors two = Run(problem, kRules[5], ViewsOf(inputs), 2);
  const Tensor &a = one.at("out"), &b = two.at("out");
  for (int64_t n = 0; n < a.num_elements(); ++n) EXPECT_EQ(a.view().Get(n), b.view().Get(n));
}

}  // namespace
}  // namespace tfb
