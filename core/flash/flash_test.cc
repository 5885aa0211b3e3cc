#include "core/flash/flash.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cuda/mirror.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/work_testing.h"
#include "core/definition.h"
#include "core/flash/flash_cuda.h"
#include "core/flash/rest_testing.h"
#include "core/random.h"
#include "core/schedule/pattern_testing.h"
#include "core/status.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

Problem Make(int64_t queries, int64_t keys, int64_t head_dim = 64, int64_t value_dim = 64,
             bool causal = false, int64_t heads = 2, int64_t kv_heads = 2) {
  Problem problem = Problem::SelfAttention(2, heads, queries, head_dim, causal);
  problem.kv_tokens = keys;
  problem.value_dim = value_dim;
  problem.kv_heads = kv_heads;
  return problem;
}

// A call with its tensors, and the plain float64 loops that it is compared with. The loops know
// nothing of tiles.
class Harness {
 public:
  explicit Harness(Device device, const Problem& problem, const Pattern* pattern = nullptr)
      : device_(device),
        problem_(problem),

        pattern_(pattern ? pattern : &full_) {
    inputs_ = RandomInputs(QkvInputs(problem), 5);
    outputs_ = NanOutputs(AttentionOutputs(problem));
    schedule_ = BuildSchedule(
        problem, *pattern_, device == Device::kCpu ? kFlashTile : FlashCudaQueries(problem.dtype));
    call.q = inputs_["q"].view();
    call.k = inputs_["k"].view();
    call.v = inputs_["v"].view();
    call.out = outputs_["out"].view();
    call.log_sum_exp = outputs_["log_sum_exp"].view();
    call.schedule = &schedule_;
  }

  // Adds to, or replaces, the score of a pair that the pattern shows.
  std::function<double(int64_t b, int64_t h, int64_t i, int64_t j, double score)> change =
      [](int64_t, int64_t, int64_t, int64_t, double score) { return score; };
  FlashCall call;
  // On CUDA: replaces call.k; it is in device memory already.
  ConstTensorView device_k;
  // On CUDA: the blocks of a grid, where not 0.
  int64_t max_blocks = 0;
  // On CUDA: whether each row of the call is asked for; empty where all are.
  std::vector<uint8_t> asked;

  Tensor& input(const char* name) { return inputs_[name]; }
  Tensor& out() { return outputs_["out"]; }
  Tensor& log_sum_exp() { return outputs_["log_sum_exp"]; }

  // `seed` is the number of threads on the CPU; in the simulator it sets the order of blocks and
  // threads.
  void Run(int seed = 2) {
    if (device_ == Device::kCpu) {
      RunOnCpu(seed);
    } else {
      cuda_simulator::Settings settings;
      settings.seed = seed;
      cuda_simulator::Configure(settings);
      const absl::Status status = RunOnCuda();
      ASSERT_TRUE(status.ok()) << status << " " << problem_.ToString();
    }
  }

  void ExpectMatchesLoops(double bound_factor = 1) {
    Run();
    NamedTensors expected;
    const double scale = call.scale != 0 ? call.scale : 1 / std::sqrt(problem_.head_dim);
    Inputs inputs{{"q", call.q}, {"k", call.k}, {"v", call.v}};
    if (!call.key_mask.empty()) inputs.Set("key_mask", call.key_mask);
    const KeyMask is_token(inputs);
    const ShownPairs shows(*pattern_, problem_.query_tokens, problem_.kv_tokens);
    const DoubleTensor q(call.q), k(call.k);
    DefineAttention(
        problem_, inputs, {},
        [&](int64_t b, int64_t h, int64_t i, int64_t j) {
          const bool causal = !problem_.causal || j <= i + problem_.causal_offset();
          if (!causal || !is_token(b, j) || !shows(h, i, j)) return kNone;
          const double dot =
              Dot(q.Row(b, h, i), k.Row(b, h / problem_.group(), j), problem_.head_dim);
          return change(b, h, i, j, scale * dot);
        },
        &expected);
    const double bound = bound_factor * Fp32Bound(call.v);
    EXPECT_LE(MaxDifference(out().view(), expected["out"].view()), bound) << problem_.ToString();
    // The bound covers the rounding of the scores, whose size the largest log-sum-exp shows.
    double size = 1;
    for (double lse : expected["log_sum_exp"].span<double>()) {
      if (std::isfinite(lse)) size = std::max(size, std::abs(lse));
    }
    EXPECT_LE(MaxDifference(log_sum_exp().view(), expected["log_sum_exp"].view()),
              bound_factor * 2e-5 * size)
        << problem_.ToString();
  }

  absl::Status RunOnCuda() {
    TFB_ASSIGN_OR_RETURN(CudaRuntime * runtime, CudaRuntime::For(device_));
    TFB_ASSIGN_OR_RETURN(FlashCuda flash,
                         FlashCuda::Create(runtime, problem_, &schedule_, call.rule));
    if (max_blocks > 0) flash.set_max_blocks(max_blocks);
    DeviceMirror mirror(runtime);
    FlashCall on_device = call;
    on_device.rule.soft_span.span = nullptr;  // Create has copied it
    for (ConstTensorView* view : {&on_device.q, &on_device.k, &on_device.v, &on_device.key_mask,
                                  &on_device.query_ids, &on_device.key_ids}) {
      TFB_ASSIGN_OR_RETURN(*view, mirror.Copy(*view));
    }
    for (TensorView* view : {&on_device.out, &on_device.out_rest, &on_device.log_sum_exp}) {
      TFB_ASSIGN_OR_RETURN(*view, mirror.CopyForWriting(*view));
    }
    for (auto [order, tokens] : {std::pair{&on_device.query_order, problem_.query_tokens},
                                 {&on_device.key_order, problem_.kv_tokens}}) {
      if (order->tokens == nullptr) continue;
      TFB_ASSIGN_OR_RETURN(const ConstTensorView copy,
                           mirror.Copy(ConstTensorView(order->tokens, DType::kI32, {tokens})));
      order->tokens = copy.At<int32_t>(0);
    }
    if (!device_k.empty()) on_device.k = device_k;
    TFB_ASSIGN_OR_RETURN(on_device.asked, ListAsked(mirror));
    const size_t bytes = FlashCuda::WorkspaceBytes(*runtime, problem_);
    TFB_ASSIGN_OR_RETURN(const DeviceBuffer workspace, runtime->Allocate(bytes));
    Execution execution;
    execution.workspace = absl::MakeSpan(workspace.As<std::byte>(), bytes);
    TFB_RETURN_IF_ERROR(flash.Run(problem_, on_device, execution));
    return mirror.CopyBack();
  }

 private:
  void RunOnCpu(int threads) {
    ThreadPool pool(threads);
    const size_t bytes = FlashWorkspaceBytes(problem_, call.rule.relative_keys != nullptr, threads);
    Tensor workspace(DType::kU8, {static_cast<int64_t>(bytes) + 64});
    std::memset(workspace.raw(), 0xFF, workspace.bytes());
    Execution execution;
    execution.pool = &pool;
    execution.workspace = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), bytes);
    ASSERT_TRUE(FlashCpu(problem_, call, execution).ok());
    for (size_t n = bytes; n < workspace.bytes(); ++n) {
      ASSERT_EQ(workspace.span<uint8_t>()[n], 0xFF) << "written beyond the workspace";
    }
  }

  absl::StatusOr<RowList> ListAsked(DeviceMirror& mirror) const {
    RowList list;
    if (asked.empty()) return list;
    std::vector<int32_t> rows, begins(1, 0);
    for (int64_t row = 0; row < problem_.batch * problem_.query_tokens; ++row) {
      if (asked[row] != 0) rows.push_back(static_cast<int32_t>(row));
      if ((row + 1) % problem_.query_tokens == 0)
        begins.push_back(static_cast<int32_t>(rows.size()));
    }
    begins.push_back(begins.back());
    if (rows.empty()) rows.push_back(-1);  // an empty list still needs memory
    const auto copy = [&](const void* data, DType dtype, size_t size) {
      return mirror.Copy(ConstTensorView(data, dtype, {static_cast<int64_t>(size)}));
    };
    TFB_ASSIGN_OR_RETURN(const auto on_rows, copy(rows.data(), DType::kI32, rows.size()));
    TFB_ASSIGN_OR_RETURN(const auto on_begins, copy(begins.data(), DType::kI32, begins.size()));
    TFB_ASSIGN_OR_RETURN(const auto on_asked, copy(asked.data(), DType::kU8, asked.size()));
    list.rows = on_rows.At<int32_t>(0);
    list.begins = on_begins.At<int32_t>(0);
    list.count = list.begins + problem_.batch;
    list.is_listed = on_asked.At<uint8_t>(0);
    return list;
  }

  Device device_;
  Problem problem_;
  FullPattern full_;
  const Pattern* pattern_;
  NamedTensors inputs_;
  NamedTensors outputs_;
  BlockSchedule schedule_;
};

// Runs every test on the CPU, and with the CUDA kernels.
class Flash : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(On, Flash, testing::ValuesIn(TestedDevices()),
                         [](const auto& device) { return std::string(Name(device.param)); });

TEST_P(Flash, MatchesLoopsAcrossTileEdges) {
  // Fewer channels, since the simulator is slow.
  const int64_t dim = GetParam() == Device::kCpu ? 64 : 8;
  for (int64_t queries : {1, 5, 63, 64, 65, 129}) {
    for (int64_t keys : {1, 17, 64, 65, 513, 600}) {
      for (bool causal : {false, true})
        Harness(GetParam(), Make(queries, keys, dim, dim, causal)).ExpectMatchesLoops();
    }
  }
}

TEST_P(Flash, MatchesLoopsForEveryHeadDim) {
  for (int64_t dim : {1, 3, 7, 16, 40, 64, 80, 96, 128, 256}) {
    Harness(GetParam(), Make(70, 90, dim, dim)).ExpectMatchesLoops();
    Harness(GetParam(), Make(70, 90, dim, 257 - dim)).ExpectMatchesLoops();
  }
}

TEST_P(Flash, GroupedHeadsReadTheirKeyValueHead) {
  Harness(GetParam(), Make(70, 90, 32, 32, true, 6, 2)).ExpectMatchesLoops();
  Harness(GetParam(), Make(70, 90, 32, 32, false, 4, 1)).ExpectMatchesLoops();
}

TEST_P(Flash, EmptySequencesAndBatchesAreDefined) {
  Harness no_keys(GetParam(), Make(5, 0));
  no_keys.ExpectMatchesLoops();
  EXPECT_EQ(MaxAbs(no_keys.out().view()), 0);
  Harness(GetParam(), Make(0, 5)).ExpectMatchesLoops();
  Problem no_batch = Make(5, 5);
  no_batch.batch = 0;
  Harness(GetParam(), no_batch).ExpectMatchesLoops();
}

TEST_P(Flash, BandsAndKeyMasksHideWhatTheyHide) {
  const BandPattern band(-70, 3);
  Harness harness(GetParam(), Make(150, 150), &band);
  Tensor mask(DType::kU8, {2, 150});
  for (int64_t n = 0; n < 300; ++n) mask.span<uint8_t>()[n] = n % 7 != 0 && (n < 100 || n > 190);
  harness.call.key_mask = mask.view();
  harness.ExpectMatchesLoops();
}

// On CUDA a separate kernel does up to 8 rows of grouped heads in f32, for each dtype of keys and values,
// and another one row; flash_decode_mma_test has those of 16 bits.
TEST_P(Flash, FewQueriesOfGroupedHeadsReadTheirKeysOnce) {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  int n = 0;
  for (int64_t dim : {7, 24, 64, 128, 256}) {
    // 1, 4, 8 and 12 rows.
    for (auto [queries, kv_heads] : {std::pair{1, 8}, {1, 2}, {2, 2}, {3, 2}}) {
      for (bool causal : {false, true}) {
        Harness harness(GetParam(), Make(queries, 200, dim, dim, causal, 8, kv_heads));
        const DType dtype = dtypes[(n + n / 8) % 3];
        ++n;
        for (auto [name, view] : {std::pair{"k", &harness.call.k}, {"v", &harness.call.v}}) {
          harness.input(name) = harness.input(name).CloneAs(dtype);
          *view = harness.input(name).view();
        }
        Tensor mask(DType::kU8, {2, 200});
        for (int64_t t = 0; t < 400; ++t) mask.span<uint8_t>()[t] = t % 5 != 0;
        harness.call.key_mask = mask.view();
        const auto bias = [](int64_t h, int64_t offset) {
          return -0.01f * static_cast<float>((h + 1) * std::abs(199 - offset));
        };
        const DistanceTable table(8, queries, 200, bias);
        harness.call.rule.bias = table.entries();
        harness.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
          return s + bias(h, j - i);
        };
        harness.ExpectMatchesLoops();
      }
    }
  }
}

// One head's keys are cut into so many parts that several warps merge a row; the parts behind the
// band have no keys.
TEST_P(Flash, ManyPartsOfTheKeysOfFewQueriesAreMerged) {
  const BandPattern band(-3100, -200);
  for (const int64_t queries : {1, 3}) {
    Harness(GetParam(), Make(queries, 4000, 40, 72, false, 1, 1)).ExpectMatchesLoops();
    Harness(GetParam(), Make(queries, 4000, 40, 72, false, 1, 1), &band).ExpectMatchesLoops();
  }
}

// The band's edges lie within the keys of the second and the third warp of a tile.
TEST_P(Flash, FewQueriesSeeTheirBand) {
  const BandPattern band(20, 170);
  for (const int64_t queries : {1, 5}) {
    Harness(GetParam(), Make(queries, 200, 64, 64), &band).ExpectMatchesLoops();
  }
}

TEST_P(Flash, NansInHiddenValuesDoNotReachFewQueries) {
  const BandPattern band(-20, 0);
  Harness harness(GetParam(), Make(3, 90, 64, 64), &band);
  harness.Run();
  const Tensor clean = harness.out().Clone();
  for (const char* name : {"k", "v"}) {
    *harness.input(name).view().MutableAt<float>(0, 1, 2, 5) = NAN;  // seen by query 2 alone
  }
  harness.Run();
  for (int64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(*harness.out().view().At<float>(0, 1, i, 5), *clean.view().At<float>(0, 1, i, 5));
  }
  EXPECT_TRUE(std::isnan(*harness.out().view().At<float>(0, 1, 2, 5)));
}

TEST_P(Flash, ResultsAreBitwiseTheSameForAnyNumberOfThreads) {
  Harness harness(GetParam(), Make(200, 300, 64, 64, true, 4, 2));
  harness.Run(1);
  const Tensor first = harness.out().Clone();
  for (int threads : {1, 2, 3, 7}) {
    Fill(harness.out().view(), NAN);
    harness.Run(threads);
    EXPECT_EQ(std::memcmp(first.raw(), harness.out().raw(), first.bytes()), 0) << threads;
  }
}

TEST_P(Flash, StridedTransposedAndBroadcastViewsGiveTheSame) {
  const Problem problem = Make(70, 70, 8, 8);
  Harness plain(GetParam(), problem);
  plain.Run();
  Harness strided(GetParam(), problem);
  // Queries and outputs as [batch, tokens, heads, channels] and keys with channels outermost.
  Tensor q(DType::kF32, {2, 70, 2, 8}), k(DType::kF32, {8, 2, 2, 70}),
      out(DType::kF32, {2, 70, 2, 8});
  strided.call.q = Transpose(q.view(), 1, 2);
  CopyElements(strided.input("q").view(), Transpose(q.view(), 1, 2));
  const TensorView keys(k.raw(), DType::kF32, {2, 2, 70, 8}, {140, 70, 1, 280});
  CopyElements(strided.input("k").view(), keys);
  strided.call.k = keys;
  strided.call.out = Transpose(out.view(), 1, 2);
  strided.Run();
  EXPECT_EQ(MaxDifference(plain.out().view(), strided.call.out), 0);

  Harness broadcast(GetParam(), problem);  // one key for all: the mean of values
  broadcast.call.k =
      ConstTensorView(broadcast.input("k").raw(), DType::kF32, {2, 2, 70, 8}, {0, 0, 0, 1});
  broadcast.ExpectMatchesLoops();
}

TEST_P(Flash, SixteenBitInputsAreConvertedExactly) {
  for (auto [dtype, queries] : {std::pair<DType, int64_t>{DType::kBF16, 70},
                                {DType::kF16, 70},
                                {DType::kBF16, 2},
                                {DType::kF16, 2}}) {
    Harness harness(GetParam(), Make(queries, 130));
    const Tensor q = harness.input("q").CloneAs(dtype), k = harness.input("k").CloneAs(dtype),
                 v = harness.input("v").CloneAs(dtype);
    harness.call.q = q.view();
    harness.call.k = k.view();
    harness.call.v = v.view();
    harness.ExpectMatchesLoops();  // f32 output: the error is only arithmetic's
    Tensor out(dtype, harness.out().shape());
    const Tensor full = harness.out().Clone();
    harness.call.out = out.view();
    harness.Run();
    EXPECT_LE(MaxDifference(out.view(), full.view()),
              UnitRoundoff(dtype) * MaxAbs(full.view()) * 1.01);
  }
}

// The keys of few queries are one part, several, or so many that several warps merge them.
TEST_P(Flash, OutputsOfSixteenBitsAndWhatRoundingTookFromThemAreThoseInF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{70, 130}, {130, 40}, {1, 130}, {3, 130}, {1, 4000}}) {
      for (const int64_t dim : {64, 40}) {
        Harness harness(GetParam(), Make(queries, keys, dim, dim, /*causal=*/true));
        harness.Run();
        const Tensor exact = harness.out().Clone();
        Tensor out(dtype, exact.shape());
        // The rest has its heads between its tokens and channels.
        Tensor memory(dtype, {exact.dim(0), exact.dim(2), exact.dim(1), exact.dim(3)});
        const TensorView rest = Transpose(memory.view(), 1, 2);
        Fill(rest, NAN);
        harness.call.out = out.view();
        harness.call.out_rest = rest;
        harness.Run();
        EXPECT_LE(LargestErrorOfRest(exact.view(), out.view(), rest), 1)
            << queries << " queries, " << keys << " keys, " << dim << " channels";
      }
    }
  }
}

TEST_P(Flash, NansInHiddenKeysAndValuesDoNotReachTheOutput) {
  const BandPattern band(-5, 5);
  Harness harness(GetParam(), Make(100, 100), &band);
  harness.Run();
  const Tensor clean = harness.out().Clone();
  for (int64_t head = 0; head < 2; ++head) {  // seen by queries 85 to 95 only
    for (int64_t c = 0; c < 64; ++c) {
      *harness.input("k").view().MutableAt<float>(0, head, 90, c) = NAN;
      *harness.input("v").view().MutableAt<float>(0, head, 90, c) = INFINITY;
    }
  }
  harness.Run();
  for (int64_t i = 0; i < 100; ++i) {
    const float value = *harness.out().view().At<float>(0, 1, i, 7);
    if (i >= 85 && i <= 95) {
      EXPECT_TRUE(std::isnan(value)) << i;
    } else {
      EXPECT_EQ(value, *clean.view().At<float>(0, 1, i, 7)) << i;
    }
  }
}

TEST_P(Flash, NansInPaddedKeysDoNotReachTheOutput) {
  Harness harness(GetParam(), Make(10, 70));
  Tensor mask(DType::kU8, {2, 70});
  Fill(mask.view(), 1);
  for (int64_t b = 0; b < 2; ++b) {
    mask.span<uint8_t>()[b * 70 + 69] = 0;
    for (int64_t c = 0; c < 64; ++c) {
      for (int64_t h = 0; h < 2; ++h) {
        *harness.input("k").view().MutableAt<float>(b, h, 69, c) = NAN;
        *harness.input("v").view().MutableAt<float>(b, h, 69, c) = NAN;
      }
    }
  }
  harness.call.key_mask = mask.view();
  harness.Run();
  EXPECT_TRUE(
      std::isfinite(MaxDifference(harness.out().view(), Tensor(harness.out().Clone()).view())));
  for (float value : harness.out().span<float>()) EXPECT_TRUE(std::isfinite(value));
}

TEST_P(Flash, RowsWithoutAKeyAreZeroWithALogSumExpOfMinusInfinity) {
  Harness harness(GetParam(),
                  Make(100, 30, 64, 64, /*causal=*/true));  // the first 70 rows see nothing
  harness.ExpectMatchesLoops();
  EXPECT_EQ(*harness.out().view().At<float>(0, 0, 69, 0), 0);
  EXPECT_EQ(*harness.log_sum_exp().view().At<float>(0, 0, 69), -INFINITY);
  EXPECT_NE(*harness.out().view().At<float>(0, 0, 70, 0), 0);
}

TEST_P(Flash, ExtremeScoresAreSubtractedBeforeTheyAreScaled) {
  // All scores are -3.4e38, just above the lowest float: the softmax is uniform, and no finite mask
  // value would stay below the scores.
  Harness low(GetParam(), Make(3, 70, 1, 1));
  Fill(low.input("q").view(), -1);
  Fill(low.input("k").view(), 3.4e38);
  low.call.scale = 1;
  low.ExpectMatchesLoops();
  // Scores are +-1e4, and one dominates by 1e5.
  Harness wide(GetParam(), Make(9, 200, 1, 4));
  wide.call.scale = 1;
  Fill(wide.input("q").view(), 1);
  for (int64_t n = 0; n < wide.input("k").num_elements(); ++n) {
    wide.input("k").span<float>()[n] = n % 100 == 77 ? 1e5f : (n % 2 ? 1e4f : -1e4f);
  }
  wide.ExpectMatchesLoops();
}

TEST_P(Flash, ConstantValuesComeBackAndZeroQueriesGiveTheMean) {
  Harness harness(GetParam(), Make(66, 130));
  Fill(harness.input("v").view(), 3);
  Fill(harness.input("q").view(), 0);
  harness.Run();
  for (float value : harness.out().span<float>()) EXPECT_NEAR(value, 3, 1e-5);
}

TEST_P(Flash, DistanceBiasesAreReadAtTheirOffset) {
  for (auto [queries, keys] :
       // Of 40 queries the last group of 16 rows has 8: no others have an entry in the table.
       {std::pair<int64_t, int64_t>{70, 70}, {5, 200}, {200, 5}, {130, 700}, {40, 40}}) {
    Harness harness(GetParam(), Make(queries, keys, 16, 16));
    const auto bias = [](int64_t h, int64_t offset) {
      return std::sin(0.1f * static_cast<float>(offset)) * static_cast<float>(h + 1);
    };
    const DistanceTable table(2, queries, keys, bias);
    harness.call.rule.bias = table.entries();
    harness.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
      return s + bias(h, j - i);
    };
    harness.ExpectMatchesLoops();
  }
}

TEST_P(Flash, ReluMultipliersActOnScoresBelowAndAboveZero) {
  Harness harness(GetParam(), Make(100, 150, 16, 16));
  const auto factor = [](int64_t h, int64_t offset) {
    return 1.0f / (1.0f + static_cast<float>(h) + 0.01f * static_cast<float>(std::abs(offset)));
  };
  const DistanceTable table(2, 100, 150, factor);
  harness.call.rule.relu_multiplier = table.entries();
  harness.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
    return std::max(s, 0.0) * factor(h, j - i);
  };
  harness.ExpectMatchesLoops();
}

TEST_P(Flash, RelativeKeysAndQueryBiasesMatchAnExplicitGather) {
  for (auto [queries, keys] :
       {std::pair<int64_t, int64_t>{70, 70}, {64, 200}, {200, 64}, {65, 700}}) {
    const int64_t low = -100, high = 40;  // offsets outside have a relative key of 0
    Tensor table(DType::kF32, {2, high - low + 1, 16});
    FillNormal(&table, 3, "table");
    Tensor u(DType::kF32, {2, 16}), w(DType::kF32, {2, 16});
    FillNormal(&u, 3, "u");
    FillNormal(&w, 3, "w");
    const RelativeKeys relative(table.view(), low, high,
                                [&](int64_t offset) { return offset - low; });
    Harness harness(GetParam(), Make(queries, keys, 16, 24));
    harness.call.rule.relative_keys = &relative;
    harness.call.rule.content_bias = u.span<float>().data();
    harness.call.rule.position_bias = w.span<float>().data();
    const DoubleTensor r(table.view()), du(u.view()), dw(w.view()), q(harness.call.q),
        k(harness.call.k);
    harness.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
      s += Dot(du.Row(h), k.Row(b, h, j), 16) / 4;
      if (j - i < low || j - i > high) return s;
      for (int64_t c = 0; c < 16; ++c) {
        s += (q.Row(b, h, i)[c] + dw.Row(h)[c]) * r.Row(h, j - i - low)[c] / 4;
      }
      return s;
    };
    harness.ExpectMatchesLoops(3);  // three products are summed; the bound is derived for one
  }
}

TEST_P(Flash, RelativeKeysOfClippedDistancesRepeatTheirEnds) {
  for (const int64_t clip : {0, 7, 20}) {
    for (const int64_t reach : {0, 50, 400}) {  // beyond the reach, entries are 0
      const BandPattern band(-70, 90);
      Tensor table(DType::kF32, {1, 2 * clip + 1, 8});
      FillNormal(&table, 3, "table");
      const auto row = [&](int64_t offset) { return std::clamp(offset, -clip, clip) + clip; };
      const RelativeKeys relative(table.view(), -reach, reach, row);
      Harness harness(GetParam(), Make(200, 260, 8, 8), &band);
      harness.call.rule.relative_keys = &relative;
      const DoubleTensor r(table.view()), q(harness.call.q);
      harness.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
        if (std::abs(j - i) > reach) return s;
        return s + Dot(q.Row(b, h, i), r.Row(row(j - i)), 8) / std::sqrt(8.0);
      };
      harness.ExpectMatchesLoops(2);
    }
  }
}

// Returns ids of `tokens` tokens of two batch rows, with few different values and another order in
// each row.
Tensor IdsOf(int64_t tokens) {
  Tensor ids(DType::kI32, {2, tokens});
  for (int64_t n = 0; n < ids.num_elements(); ++n) {
    ids.span<int32_t>()[n] = static_cast<int32_t>(n * n % 11 % 4) - 1;
  }
  return ids;
}

TEST_P(Flash, LabelKeysGoByTheIdsOfQueryAndKey) {
  for (const int64_t dim : {16, 30, 150}) {
    for (auto [queries, keys] : {std::pair<int64_t, int64_t>{70, 70}, {2, 200}, {130, 30}}) {
      const BandPattern band(-60, 150);
      Harness harness(GetParam(), Make(queries, keys, dim, 16), &band);
      Tensor labels(DType::kF32, {1, 2, dim}), w(DType::kF32, {2, dim});
      FillNormal(&labels, 3, "labels");
      FillNormal(&w, 3, "w");
      const Tensor query_ids = IdsOf(queries), key_ids = IdsOf(keys);
      const float numbers[2] = {0.7f, -1.3f};
      const bool has_numbers = dim != 30;
      harness.call.rule.label_keys = {labels.span<float>().data(), 1,
                                      has_numbers ? numbers : nullptr};
      harness.call.rule.position_bias = w.span<float>().data();
      harness.call.query_ids = query_ids.view();
      harness.call.key_ids = key_ids.view();
      const DoubleTensor l(labels.view()), dw(w.view()), q(harness.call.q);
      harness.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
        const bool same = *query_ids.view().At<int32_t>(b, i) == *key_ids.view().At<int32_t>(b, j);
        double dot = Dot(q.Row(b, h, i), l.Row(same ? 1 : 0), dim);
        dot += Dot(dw.Row(h), l.Row(same ? 1 : 0), dim);
        if (has_numbers) dot += numbers[same ? 1 : 0];
        return s + dot / std::sqrt(static_cast<double>(dim));
      };
      harness.ExpectMatchesLoops(3);
    }
  }
}

TEST_P(Flash, LabelKeysActBeforeAReluAndGoByTokensOfAnOrder) {
  const int64_t tokens = 100;
  Harness harness(GetParam(), Make(tokens, tokens, 8, 8));
  Tensor labels(DType::kF32, {2, 2, 8}), table(DType::kF32, {2, 21, 8});
  FillNormal(&labels, 3, "labels");
  FillNormal(&table, 3, "table");
  const RelativeKeys relative(table.view(), -10, 10, [](int64_t offset) { return offset + 10; });
  const DistanceTable halves(1, tokens, tokens, [](int64_t, int64_t) { return 0.5f; });
  const Tensor ids = IdsOf(tokens);
  harness.call.rule.label_keys = {labels.span<float>().data(), 2};
  harness.call.rule.relative_keys = &relative;
  harness.call.rule.relu_multiplier = halves.entries();
  harness.call.query_ids = harness.call.key_ids = ids.view();
  const DoubleTensor l(labels.view()), r(table.view()), q(harness.call.q);
  harness.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
    const int64_t same = *ids.view().At<int32_t>(b, i) == *ids.view().At<int32_t>(b, j) ? 1 : 0;
    s += Dot(q.Row(b, h, i), l.Row(h, same), 8) / std::sqrt(8.0);
    if (std::abs(j - i) <= 10) s += Dot(q.Row(b, h, i), r.Row(h, j - i + 10), 8) / std::sqrt(8.0);
    return std::max(s, 0.0) / 2;
  };
  harness.ExpectMatchesLoops(3);

  // Any order of keys gives the same sums.
  Harness ordered(GetParam(), Make(tokens, tokens, 8, 8));
  ordered.call.rule.label_keys = harness.call.rule.label_keys;
  ordered.call.query_ids = ordered.call.key_ids = ids.view();
  ordered.Run();
  const Tensor expected = ordered.out().Clone();
  std::vector<int32_t> reversed(tokens), sevenths(tokens);
  for (int64_t n = 0; n < tokens; ++n) {
    reversed[n] = static_cast<int32_t>(tokens - 1 - n);
    sevenths[n] = static_cast<int32_t>(n * 7 % tokens);
  }
  ordered.call.query_order = {reversed.data(), 0, 0, 1};
  ordered.call.key_order = {sevenths.data(), 0, 0, 1};
  ordered.Run();
  EXPECT_LE(MaxDifference(expected.view(), ordered.out().view()), 1e-5);
}

TEST_P(Flash, SoftSpansWeighTheirRampAndHideWhatIsBeyond) {
  const int64_t tokens = 300;
  Harness harness(GetParam(), Make(tokens, tokens, 16, 16, /*causal=*/true));
  std::vector<float> spans(2 * 2 * tokens);
  for (size_t n = 0; n < spans.size(); ++n) spans[n] = static_cast<float>(n * 37 % 150);
  const float ramp = 20;
  harness.call.rule.soft_span = {
      spans.data(), static_cast<int64_t>(spans.size()), 2 * tokens, tokens, 1, ramp};
  harness.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
    const double z = spans[(b * 2 + h) * tokens + i];
    const double weight = std::min(1.0, (ramp + z - static_cast<double>(i - j)) / ramp);
    return weight <= 0 ? kNone : s + std::log(weight);
  };
  // A key beyond every span may hold anything, and so may its score.
  harness.ExpectMatchesLoops();
  Tensor before = harness.out().Clone();
  *harness.input("k").view().MutableAt<float>(0, 0, 0, 0) = 1e30f;
  harness.Run();
  EXPECT_EQ(*before.view().At<float>(0, 0, 299, 3), *harness.out().view().At<float>(0, 0, 299, 3));
}

// At position 8,191 fp32 keeps 2^-11 of a token, which is 1e-4 of these weights.
TEST_P(Flash, SoftSpansKeepTheirLowBitsAtLatePositions) {
  const int64_t queries = 70, keys = 8192;
  Harness harness(GetParam(), Make(queries, keys, 16, 16, /*causal=*/true));
  std::vector<float> spans(queries);
  for (int64_t i = 0; i < queries; ++i) spans[i] = 1.3f + static_cast<float>(i * 37 % 11) / 13;
  const float ramp = 2;
  harness.call.rule.soft_span = {spans.data(), queries, 0, 0, 1, ramp};
  harness.change = [&](int64_t, int64_t, int64_t i, int64_t j, double s) {
    const double distance = static_cast<double>(keys - queries + i - j);
    const double weight = std::min(1.0, (ramp + double{spans[i]} - distance) / ramp);
    return weight <= 0 ? kNone : s + std::log(weight);
  };
  harness.ExpectMatchesLoops();
}

TEST_P(Flash, TokenOrdersGatherAndScatter) {
  // Reversed queries over every third key give the same as attention over those keys with the
  // result reversed. Few queries are decoding's.
  const int64_t tokens = 100, keys = 34;
  for (const int64_t queries : {tokens, int64_t{6}}) {
    Harness harness(GetParam(), Make(queries, keys, 16, 16));
    Tensor k(DType::kF32, {2, 2, tokens, 16}), v(DType::kF32, {2, 2, tokens, 16});
    FillNormal(&k, 9, "k");
    FillNormal(&v, 9, "v");
    std::vector<int32_t> query_order(queries), key_order(keys);
    for (int64_t n = 0; n < queries; ++n) query_order[n] = static_cast<int32_t>(queries - 1 - n);
    for (int64_t n = 0; n < keys; ++n) key_order[n] = static_cast<int32_t>(3 * n);
    harness.call.k = Slice(std::as_const(k).view(), 2, 0, keys, 3);
    harness.call.v = Slice(std::as_const(v).view(), 2, 0, keys, 3);
    harness.ExpectMatchesLoops();
    const Tensor expected = harness.out().Clone();
    Fill(harness.out().view(), NAN);
    harness.call.k = k.view();
    harness.call.v = v.view();
    harness.call.query_order = {query_order.data(), 0, 0, 1};
    harness.call.key_order = {key_order.data(), 0, 0, 1};
    harness.Run();
    EXPECT_LE(MaxDifference(expected.view(), harness.out().view()), 1e-6) << queries;
  }
}

// The test uses every rule that reads offsets, a soft span and a mask: rows keep their places. The
// rows of q and out lie one after the other, those of both batch rows together.
TEST(FlashOrder, RowsWithoutATokenAreLeftOutAndTheOthersKeepTheirOffsets) {
  constexpr int64_t kQueries = 150, kKeys = 200, kLow = -190;
  Problem problem = Make(kQueries, kKeys, 16, 24);
  Tensor table(DType::kF32, {2, 400, 16});
  FillNormal(&table, 3, "table");
  const RelativeKeys relative(table.view(), kLow, kLow + 399, [](int64_t o) { return o - kLow; });
  const auto wave = [](int64_t h, int64_t offset) {
    return 1.5f + std::sin(0.1f * static_cast<float>(offset + h));
  };
  const DistanceTable waves(2, kQueries, kKeys, wave);
  const std::vector<float> spans(kQueries, 90.0f);
  const BandPattern band(-120, 60);
  for (int rule = 0; rule < 5; ++rule) {
    Harness whole(Device::kCpu, problem, &band), some(Device::kCpu, problem, &band);
    FlashCall& call = whole.call;
    if (rule == 0 || rule == 3) call.rule.relative_keys = &relative;
    if (rule == 1 || rule == 3) call.rule.bias = waves.entries();
    if (rule == 2) call.rule.relu_multiplier = waves.entries();
    if (rule == 4) call.rule.soft_span = {spans.data(), kQueries, 0, 0, 1, 16};
    some.call.rule = call.rule;
    for (const int64_t kept : {int64_t{1}, int64_t{3}, int64_t{60}, kQueries}) {
      std::vector<int32_t> order(2 * kQueries, -1);
      int32_t rows = 0;
      // `kept` rows of each batch row; those of the second begin later.
      for (size_t n = 0; n < order.size(); ++n) {
        const int64_t i = static_cast<int64_t>(n) % kQueries;
        if (kept == kQueries || (i * 7 + 5) % kQueries < kept) order[n] = rows++;
      }
      Tensor q(DType::kF32, {2, rows, 16}), out(DType::kF32, {2, rows, 24});
      for (size_t n = 0; n < order.size(); ++n) {
        const int64_t b = static_cast<int64_t>(n) / kQueries,
                      i = static_cast<int64_t>(n) % kQueries;
        if (order[n] < 0) continue;
        for (int64_t h = 0; h < 2; ++h) {
          std::copy_n(call.q.At<float>(b, h, i), 16, q.view().MutableAt<float>(h, order[n]));
        }
      }
      const auto shared = [&](Tensor& rows_of_heads) {
        const TensorView view = rows_of_heads.view();
        return TensorView(view.mutable_data(), DType::kF32, {2, 2, view.dim(1), view.dim(2)},
                          {0, view.stride(0), view.stride(1), 1});
      };
      some.call.q = shared(q);
      some.call.out = shared(out);
      some.call.log_sum_exp = {};
      some.call.query_order = {order.data(), kQueries, 0, 1};
      whole.Run();
      some.Run();
      const double bound = Fp32Bound(call.v);
      for (size_t n = 0; n < order.size(); ++n) {
        const int64_t b = static_cast<int64_t>(n) / kQueries,
                      i = static_cast<int64_t>(n) % kQueries;
        for (int64_t h = 0; h < 2 && order[n] >= 0; ++h) {
          const float* expected = whole.out().view().At<float>(b, h, i);
          const float* found = out.view().At<float>(h, order[n]);
          for (int64_t c = 0; c < 24; ++c) {
            ASSERT_NEAR(found[c], expected[c], bound) << rule << " " << kept << " " << i;
            if (kept == kQueries) {
              ASSERT_EQ(found[c], expected[c]) << rule;
            }
          }
        }
      }
    }
  }
}

TEST(FlashCudaCall, ABandAndARingGiveWhatAScheduleOverAllKeysGives) {
  const BandPattern pattern(-70, 3);
  Harness harness(KernelDevice(), Make(150, 150, 16, 16), &pattern);
  harness.Run();
  const Tensor expected = harness.out().Clone();
  Fill(harness.out().view(), NAN);
  const Band band{0, -70, 3};
  harness.call.band = &band;
  // Key tile t is tile (t + 3) % 4 of the ring: the second and third of three tiles come first in
  // memory.
  Tensor k(DType::kF32, {2, 2, 256, 16}), v(DType::kF32, {2, 2, 256, 16});
  Fill(k.view(), NAN);
  Fill(v.view(), NAN);
  for (int64_t tile = 0; tile < 3; ++tile) {
    const int64_t tokens = std::min<int64_t>(64, 150 - tile * 64);
    for (auto [from, to] : {std::pair{"k", &k}, {"v", &v}}) {
      CopyElements(Slice(harness.input(from).view(), 2, tile * 64, tokens),
                   Slice(to->view(), 2, (tile + 3) % 4 * 64, tokens));
    }
  }
  harness.call.k = k.view();
  harness.call.v = v.view();
  harness.call.ring = {4, 3};
  harness.Run();
  EXPECT_EQ(std::memcmp(expected.raw(), harness.out().raw(), expected.bytes()), 0);
}

// Returns flags of two batch rows: one token in `one_in` is set, in the second row only after the
// first `silent`.
std::vector<uint8_t> Some(int64_t tokens, int64_t one_in, int64_t silent) {
  std::vector<uint8_t> asked(2 * tokens);
  for (int64_t n = 0; n < 2 * tokens; ++n) {
    asked[n] = n % one_in == 0 && (n < tokens || n - tokens >= silent);
  }
  return asked;
}

// f32 kernels fill tiles from the list, with relative keys too; among 16-bit kernels only the one
// without a rule does, and the others skip tiles. The decoding kernel takes few queries, and splits
// their keys.
TEST(FlashCudaCall, QueriesThatAreAskedGetWhatTheyGetAmongAllAndOthersAreNotTouched) {
  constexpr int64_t kLow = -400;
  Tensor table(DType::kF32, {2, 800, 16});
  FillNormal(&table, 3, "table");
  const RelativeKeys relative(table.view(), kLow, kLow + 799, [](int64_t o) { return o - kLow; });
  const std::vector<float> u(2 * 16, 0.3f), w(2 * 16, -0.2f);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{3, 100}, {3, 330}, {300, 330}}) {
      for (const bool has_rule : {false, true}) {
        Problem problem = Make(queries, keys, 16, 24);
        problem.dtype = dtype;
        const BandPattern pattern(-200, 30);
        const Band band{0, -200, 30};
        Harness harness(KernelDevice(), problem, &pattern);
        harness.call.band = &band;
        if (has_rule) {
          harness.call.rule.relative_keys = &relative;
          harness.call.rule.content_bias = u.data();
          harness.call.rule.position_bias = w.data();
        }
        harness.Run();
        const Tensor all = harness.out().Clone();
        const bool is_f32 = dtype == DType::kF32;
        // A tile that is filled from the list rounds the weights relative to other maxima.
        const double bound = is_f32 ? Fp32Bound(harness.call.v) : 0.03;
        for (const auto& asked :
             {Some(queries, 1, 0), Some(queries, 3, 0), Some(queries, 7, 200),
              Some(queries, 1, queries), std::vector<uint8_t>(2 * queries, 0)}) {
          harness.asked = asked;
          Fill(harness.out().view(), NAN);
          harness.Run();
          const bool are_all = std::count(asked.begin(), asked.end(), 0) == 0;
          for (int64_t n = 0; n < 2 * queries; ++n) {
            const int64_t b = n / queries, i = n % queries;
            for (int64_t h = 0; h < 2; ++h) {
              for (int64_t c = 0; c < 24; ++c) {
                const double found = harness.out().view().Get(all.view().Offset(b, h, i, c));
                const double expected = all.view().Get(all.view().Offset(b, h, i, c));
                if (asked[n] == 0) {
                  ASSERT_TRUE(std::isnan(found)) << n << " " << Name(dtype) << has_rule;
                } else if (are_all) {
                  ASSERT_EQ(found, expected) << n << " " << Name(dtype) << has_rule;
                } else {
                  ASSERT_NEAR(found, expected, bound) << n << " " << Name(dtype) << has_rule;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(FlashCudaCall, AskingForSomeQueriesWantsABand) {
  Harness harness(KernelDevice(), Make(3, 3, 8, 8));
  harness.asked = Some(3, 2, 0);
  CudaRuntime* runtime = CudaRuntime::For(KernelDevice()).value();
  const BlockSchedule schedule = BuildSchedule(Make(3, 3, 8, 8), FullPattern(), kFlashTile);
  const FlashCuda flash = FlashCuda::Create(runtime, Make(3, 3, 8, 8), &schedule, {}).value();
  const int32_t rows[6] = {};
  harness.call.asked.rows = rows;
  EXPECT_EQ(flash.Run(Make(3, 3, 8, 8), harness.call, {}).message(),
            "a call that asks for some queries has no band");
}

// The simulator counts loads and stores: the same number for each tile of queries and keys.
TEST(FlashCudaCall, AccessesFallWithTheQueriesThatAreAsked) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts accesses";
  Tensor table(DType::kF32, {1, 1024, 32});
  FillNormal(&table, 3, "table");
  const RelativeKeys relative(table.view(), -512, 511, [](int64_t o) { return o + 512; });
  for (const bool has_rule : {false, true}) {
    Harness harness(KernelDevice(), Make(512, 512, 32, 32));
    const Band band{0, -1024, 1024};
    harness.call.band = &band;
    if (has_rule) harness.call.rule.relative_keys = &relative;
    const auto accesses = [&](int64_t one_in) {
      harness.asked = Some(512, one_in, 0);
      const int64_t before = cuda_simulator::TotalCounts().accesses;
      harness.Run();
      return static_cast<double>(cuda_simulator::TotalCounts().accesses - before);
    };
    const double of_all = accesses(1), of_half = accesses(2), of_quarter = accesses(4);
    // Two of the four products of a tile are with relative keys, see AddPositions.
    const double half = has_rule ? (2.0 / 2 + 2 * 3.0 / 4) / 4 : 1.0 / 2;
    const double quarter = has_rule ? (2.0 / 4 + 2 * 5.0 / 8) / 4 : 1.0 / 4;
    EXPECT_NEAR(of_half / of_all, half, 0.05) << has_rule;
    EXPECT_NEAR(of_quarter / of_all, quarter, 0.05) << has_rule;
  }
}

TEST(FlashCudaCall, TheWorkOfACallIsAsOnRecord) {
  const auto work = [](const Problem& problem, const Pattern* pattern = nullptr) {
    Harness harness(Device::kSimulator, problem, pattern);
    return WorkOf([&] { harness.Run(); });
  };
  EXPECT_EQ(work(Make(200, 300, 40, 72)), "1 launches, 16 blocks, 368 barriers, 12320 collectives");
  EXPECT_EQ(work(Make(300, 300, 40, 72, /*causal=*/true)),
            "1 launches, 20 blocks, 300 barriers, 10280 collectives");
  EXPECT_EQ(work(Make(5, 1000, 40, 72)), "2 launches, 17 blocks, 58 barriers, 36123 collectives");
  EXPECT_EQ(work(Make(5, 1000, 40, 72, /*causal=*/false, /*heads=*/4, /*kv_heads=*/2)),
            "1 launches, 8 blocks, 536 barriers, 17424 collectives");
  const BandPattern band(-100, 0);
  EXPECT_EQ(work(Make(300, 300, 40, 72), &band),
            "1 launches, 20 blocks, 280 barriers, 8800 collectives");
}

// 2 to 16 rows of 16 bits that read the same keys are multiplied on tensor cores, one by another kernel,
// and those of a problem in f32 as it is.
TEST(FlashCudaCall, TheKernelForFewRowsGoesByTheirNumberAndTheProblemsDType) {
  const auto work = [](DType dtype, DType of_keys, int64_t heads) {
    Problem problem = Make(1, 200, 64, 64, /*causal=*/false, heads, 2);
    problem.dtype = dtype;
    Harness harness(Device::kSimulator, problem);
    for (auto [name, view] : {std::pair{"k", &harness.call.k}, {"v", &harness.call.v}}) {
      harness.input(name) = harness.input(name).CloneAs(of_keys);
      *view = harness.input(name).view();
    }
    return WorkOf([&] { harness.Run(); });
  };
  EXPECT_EQ(work(DType::kBF16, DType::kBF16, 8),
            "2 launches, 12 blocks, 40 barriers, 1704 collectives");
  EXPECT_EQ(work(DType::kBF16, DType::kBF16, 32),
            "2 launches, 24 blocks, 64 barriers, 2484 collectives");
  EXPECT_EQ(work(DType::kBF16, DType::kF32, 32),
            "2 launches, 20 blocks, 684 barriers, 31120 collectives");
  EXPECT_EQ(work(DType::kBF16, DType::kBF16, 34),
            "1 launches, 4 blocks, 144 barriers, 31364 collectives");
  EXPECT_EQ(work(DType::kBF16, DType::kBF16, 2),
            "2 launches, 9 blocks, 34 barriers, 1864 collectives");
  EXPECT_EQ(work(DType::kF32, DType::kBF16, 8),
            "2 launches, 12 blocks, 40 barriers, 5460 collectives");
  EXPECT_EQ(work(DType::kBF16, DType::kF32, 8),
            "2 launches, 12 blocks, 40 barriers, 5704 collectives");
}

TEST(FlashCudaCall, TheWorkOfARuleIsAsOnRecord) {
  Tensor table(DType::kF32, {1, 600, 40});
  FillNormal(&table, 3, "table");
  const RelativeKeys relative(table.view(), -300, 299, [](int64_t o) { return o + 300; });
  const std::vector<float> spans = {50, 150};
  Harness with_keys(Device::kSimulator, Make(300, 300, 40, 72));
  with_keys.call.rule.relative_keys = &relative;
  EXPECT_EQ(WorkOf([&] { with_keys.Run(); }),
            "1 launches, 20 blocks, 1060 barriers, 15400 collectives");
  Harness with_spans(Device::kSimulator, Make(300, 300, 40, 72, /*causal=*/true));
  with_spans.call.rule.soft_span = {spans.data(), 2, 0, 1, 0, 32};
  EXPECT_EQ(WorkOf([&] { with_spans.Run(); }),
            "1 launches, 20 blocks, 290 barriers, 9300 collectives");
}

TEST(FlashCudaCall, KeysFarApartHave64BitOffsets) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "a GPU has no 16 GiB without pages";
  // Heads lie 2^32 + 64 elements apart: 16 GiB of addresses, of which few pages exist. The
  // simulator's device memory is host memory.
  const int64_t stride = (int64_t{1} << 32) + 64;
  const size_t bytes = static_cast<size_t>(stride + 70 * 8) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Problem problem = Make(10, 70, 8, 8);
  problem.batch = 1;
  Harness harness(KernelDevice(), problem);
  harness.Run();
  const Tensor expected = harness.out().Clone();
  Fill(harness.out().view(), NAN);
  const TensorView k(memory, DType::kF32, {1, 2, 70, 8}, {2 * stride, stride, 8, 1});
  CopyElements(harness.input("k").view(), k);
  cuda_simulator::RegisterBuffer(memory, bytes, /*written=*/true);
  harness.device_k = k;
  harness.Run();
  cuda_simulator::UnregisterBuffer(memory);
  munmap(memory, bytes);
  EXPECT_EQ(std::memcmp(expected.raw(), harness.out().raw(), expected.bytes()), 0);
}

TEST(FlashCudaCall, BlocksTakeFurtherTilesWhereTheGridIsSmaller) {
  // A grid has fewer blocks here than there are tiles.
  Harness harness(KernelDevice(), Make(200, 200, 8, 8, /*causal=*/true));
  harness.Run();
  const Tensor expected = harness.out().Clone();
  for (int64_t blocks : {1, 3}) {
    Fill(harness.out().view(), NAN);
    harness.max_blocks = blocks;
    harness.Run();
    EXPECT_EQ(std::memcmp(expected.raw(), harness.out().raw(), expected.bytes()), 0) << blocks;
  }
}

TEST(FlashCall, WhatDoesNotFitIsRefusedOnBothDevices) {
  const Problem problem = Make(5, 7, 8, 8);
  const BlockSchedule schedule = BuildSchedule(problem, FullPattern(), kFlashTile);
  CudaRuntime* runtime = CudaRuntime::For(KernelDevice()).value();
  const float labels[2 * 8] = {};
  const int32_t codes[1] = {};
  const ConstTensorView ids(codes, DType::kI32, {1, 1});
  // Expects that both engines refuse the call with this reason.
  const auto expect_refused = [&](const FlashCall& call, const std::string& reason) {
    const absl::Status expected = absl::InternalError(reason);
    EXPECT_EQ(FlashCpu(problem, call, Execution()), expected);
    const FlashCuda flash = FlashCuda::Create(runtime, problem, &schedule, call.rule).value();
    EXPECT_EQ(flash.Run(problem, call, {}), expected);
  };
  FlashCall call;
  call.schedule = &schedule;
  call.rule.label_keys.keys = labels;
  for (const auto& [query_ids, key_ids] : {std::pair(ConstTensorView(), ConstTensorView()),
                                           {ids, ConstTensorView()},
                                           {ConstTensorView(), ids}}) {
    call.query_ids = query_ids;
    call.key_ids = key_ids;
    expect_refused(call, "a call whose rule has label keys has no ids of queries or keys");
  }
  call.rule = {};
  const struct {
    int64_t slots, own;
    bool counts, query_codes, key_codes;
  } rules[] = {{kMaxTokenSlots + 1, -1, true, true, true},
               {kMaxTokenSlots + 1, 0, false, true, true},
               {2, 2, false, true, true},
               {2, 1, false, false, true},
               {2, 1, false, true, false},
               {2, -1, true, false, true},
               {2, -1, true, true, false}};
  for (const auto& rule : rules) {
    TokenRule& tokens = call.rule.tokens;
    tokens.slots = rule.slots;
    tokens.own = rule.own;
    tokens.counts = rule.counts;
    tokens.query_codes = rule.query_codes ? codes : nullptr;
    tokens.key_codes = rule.key_codes ? codes : nullptr;
    expect_refused(call,
                   absl::StrCat("a token rule of ", rule.slots, " slots, of which slot ", rule.own,
                                " is the call's own; allowed are 1 to 64 slots with codes"));
  }
}

TEST(FlashCall, ASchedulesTilesAndTokensAreThoseOfTheEngineAndTheProblem) {
  const Problem problem = Make(5, 7, 8, 8);
  for (int64_t BlockSchedule::*size : {&BlockSchedule::query_tile, &BlockSchedule::key_tile,
                                       &BlockSchedule::query_tokens, &BlockSchedule::kv_tokens}) {
    BlockSchedule schedule = BuildSchedule(problem, FullPattern());
    ++(schedule.*size);
    FlashCall call;
    call.schedule = &schedule;
    EXPECT_EQ(FlashCpu(problem, call, Execution()),
              absl::InternalError(
                  absl::StrCat("schedule of ", schedule.query_tokens, " x ", schedule.kv_tokens,
                               " tokens does not fit the problem ", problem.ToString())));
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Problem on_cuda = problem;
    on_cuda.dtype = dtype;
    const int64_t queries = FlashCudaQueries(dtype);
    for (int64_t BlockSchedule::*size : {&BlockSchedule::query_tile, &BlockSchedule::key_tile}) {
      BlockSchedule schedule = BuildSchedule(on_cuda, FullPattern(), queries);
      ++(schedule.*size);
      EXPECT_EQ(FlashCuda::Create(CudaRuntime::For(KernelDevice()).value(), on_cuda, &schedule, {})
                    .status(),
                absl::InternalError(absl::StrCat("schedule of ", schedule.query_tile, " x ",
                                                 schedule.key_tile, " tiles; CUDA wants ", queries,
                                                 " x 64")));
    }
  }
}

TEST(FlashCall, TheLargestTokenRuleIsTaken) {
  const int32_t codes[1] = {};
  TokenRule rule;
  EXPECT_TRUE(CheckTokenRule(rule).ok());
  rule.slots = kMaxTokenSlots + 1;  // does not matter to a rule that reads no codes
  EXPECT_TRUE(CheckTokenRule(rule).ok());
  rule.slots = kMaxTokenSlots;
  rule.own = kMaxTokenSlots - 1;
  rule.query_codes = rule.key_codes = codes;
  for (const bool counts : {false, true}) {
    rule.counts = counts;
    EXPECT_TRUE(CheckTokenRule(rule).ok());
  }
}

// Runs a call with heads of so many channels on a simulated GPU.
absl::Status RunOn(const char* gpu, DType dtype, int64_t dim, bool has_token_rule) {
  cuda_simulator::Settings settings;
  settings.gpu = *cuda_simulator::FindGpu(gpu);
  cuda_simulator::Configure(settings);
  Problem problem = Make(40, 40, dim, dim);  // too many queries for the kernels of few
  problem.dtype = dtype;
  Harness harness(Device::kSimulator, problem);
  harness.call.rule.tokens.causal = has_token_rule;
  const absl::Status status = harness.RunOnCuda();
  cuda_simulator::Configure({});
  return status;
}

// A block of heads of 256 channels holds 160 KiB of 16-bit numbers, or 156 of 32-bit ones, and what
// a rule needs besides. An A100 has 163 KiB for a block, an RTX 4090 99, an H100 227.
TEST(FlashCudaCall, HeadsThatNeedMoreSharedMemoryThanABlockHasAreRefusedWithBothNumbers) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const bool has_token_rule : {false, true}) {
      for (const char* gpu : {"sm_80", "sm_89", "sm_90"}) {
        EXPECT_EQ(RunOn(gpu, dtype, 128, has_token_rule), absl::OkStatus()) << gpu;
      }
      EXPECT_EQ(RunOn("sm_90", dtype, 256, has_token_rule), absl::OkStatus());
      const absl::Status refused = RunOn("sm_89", dtype, 256, has_token_rule);
      EXPECT_THAT(std::string(refused.message()),
                  testing::ContainsRegex("shared memory is 1[5-8][0-9]{4} bytes a block, of which "
                                         "1[5-8][0-9]{4} are dynamic; sm_89 allows 101376"));
    }
    EXPECT_EQ(RunOn("sm_80", dtype, 256, false), absl::OkStatus());
  }
  EXPECT_THAT(std::string(RunOn("sm_80", DType::kBF16, 256, true).message()),
              testing::HasSubstr("; sm_80 allows 166912"));
}

TEST(FlashWorkspace, IsLinearInTokens) {
  const auto bytes = [](int64_t tokens) {
    return static_cast<double>(FlashWorkspaceBytes(Make(tokens, tokens), false, 2));
  };
  EXPECT_LT(bytes(1 << 20) / bytes(1 << 18), 4.1);
}

}  // namespace
}  // namespace tfb
