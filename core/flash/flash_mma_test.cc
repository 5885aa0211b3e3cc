// Tests the tensor-core kernels, called through their tables. flash_test.cc tests the engine around
// them.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/runtime.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/work_testing.h"
#include "core/flash/flash.h"
#include "core/flash/flash_kernels.h"
#include "core/flash/flash_mma_testing.h"
#include "core/random.h"
#include "core/schedule/block_schedule.h"
#include "core/status.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using flash_mma::Make;
using flash_mma::Sizes;
using flash_mma::Subject;

class FlashMma : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(In, FlashMma, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& dtype) { return std::string(Name(dtype.param)); });

TEST_P(FlashMma, MatchesLoopsForEveryHeadDim) {
  for (int64_t dim : {1, 7, 32, 40, 64, 80, 128, 256}) {
    Subject(Make(GetParam(), {70, 90, dim, dim})).ExpectMatchesLoops();
    Subject(Make(GetParam(), {70, 90, dim, 257 - dim})).ExpectMatchesLoops();
  }
}

TEST_P(FlashMma, MatchesLoopsAcrossTileEdges) {
  bool causal = GetParam() == DType::kF16;  // dtypes take turns, as they differ in rounding alone
  for (int64_t queries : {1, 16, 127, 128, 129, 257}) {
    for (int64_t keys : {1, 17, 63, 64, 65, 128, 300}) {
      Subject(Make(GetParam(), {queries, keys, 16, 24}, causal)).ExpectMatchesLoops();
      causal = !causal;
    }
  }
}

TEST_P(FlashMma, GroupedHeadsReadTheirKeyValueHead) {
  Subject(Make(GetParam(), {70, 90, 32, 32, 6, 2, 2}, true)).ExpectMatchesLoops();
  Subject(Make(GetParam(), {70, 90, 64, 32, 4, 1}, false)).ExpectMatchesLoops();
}

TEST_P(FlashMma, EmptySequencesAndBatchesAreDefined) {
  Subject no_keys(Make(GetParam(), {5, 0, 16, 16}));
  no_keys.ExpectMatchesLoops();
  EXPECT_EQ(MaxAbs(no_keys.out().view()), 0);
  Subject(Make(GetParam(), {0, 5, 16, 16})).ExpectMatchesLoops();
  Problem no_batch = Make(GetParam(), {5, 5, 16, 16});
  no_batch.batch = 0;
  Subject(no_batch).ExpectMatchesLoops();
}

TEST_P(FlashMma, BandsAndKeyMasksHideWhatTheyHide) {
  const BandPattern band(-70, 3);
  Subject subject(Make(GetParam(), {150, 150, 40, 40, 2, 2, 2}), &band);
  Tensor mask(DType::kU8, {2, 150});
  for (int64_t n = 0; n < 300; ++n) mask.span<uint8_t>()[n] = n % 7 != 0 && (n < 100 || n > 190);
  subject.call.key_mask = mask.view();
  subject.ExpectMatchesLoops();
}

TEST_P(FlashMma, BandsWithoutTablesGiveTheSameBits) {
  const BandPattern pattern(-100, 20);
  Subject subject(Make(GetParam(), {300, 300, 64, 64}), &pattern);
  subject.ExpectMatchesLoops();
  const Tensor expected = subject.out().Clone();
  const Band band = {0, -100, 20};
  subject.band = &band;
  Fill(subject.out().view(), NAN);
  subject.ExpectMatchesLoops();
  EXPECT_EQ(std::memcmp(expected.raw(), subject.out().raw(), expected.bytes()), 0);
}

// A pattern in which each head sees other keys.
class OwnPattern : public Pattern {
 public:
  int64_t heads() const override { return 2; }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    constexpr int64_t kMost = 1024;
    for (int64_t j = 0; j < kMost; ++j) {
      if (head == 0 ? j / 64 % 2 == i / 128 % 2 : j % 3 == 0) keys->Add(j, j + 1);
    }
    return i + 1;
  }
};
TEST_P(FlashMma, HeadsHavePatternsOfTheirOwn) {
  const OwnPattern pattern;
  Subject(Make(GetParam(), {200, 300, 32, 32, 4, 2}), &pattern).ExpectMatchesLoops();
}

TEST_P(FlashMma, SplitKeysAreMerged) {
  for (int splits : {2, 3, 7}) {
    Subject subject(Make(GetParam(), {130, 500, 32, 40, 2, 1}, /*causal=*/true));
    subject.splits = splits;
    subject.ExpectMatchesLoops();
  }
  // Some rows see no key, and some parts have none.
  Subject few(Make(GetParam(), {200, 100, 16, 16}, /*causal=*/true));
  few.splits = 5;
  few.ExpectMatchesLoops();
}

TEST_P(FlashMma, ResultsAreBitwiseTheSameInAnyOrderAndOnAnyGrid) {
  Subject subject(Make(GetParam(), {200, 300, 64, 64, 2, 1}, /*causal=*/true));
  subject.Run(1);
  const Tensor first = subject.out().Clone(), sums = subject.log_sum_exp().Clone();
  for (auto [seed, max_blocks] : {std::pair<int, int>{2, 1 << 20}, {3, 1}, {4, 3}}) {
    Fill(subject.out().view(), NAN);
    subject.max_blocks = max_blocks;
    subject.Run(seed);
    EXPECT_EQ(std::memcmp(first.raw(), subject.out().raw(), first.bytes()), 0) << seed;
    EXPECT_EQ(std::memcmp(sums.raw(), subject.log_sum_exp().raw(), sums.bytes()), 0) << seed;
  }
}

TEST_P(FlashMma, StridedTransposedAndMisalignedViewsGiveTheSameBits) {
  const Problem problem = Make(GetParam(), {70, 150, 24, 16, 2, 2, 2});
  Subject plain(problem);
  plain.ExpectMatchesLoops();
  Subject strided(problem);
  // Queries and outputs as [batch, tokens, heads, channels] and keys with channels outermost.
  Tensor q(GetParam(), {2, 70, 2, 24}), k(GetParam(), {24, 2, 2, 150}),
      out(GetParam(), {2, 70, 2, 16});
  CopyElements(strided.call.q, Transpose(q.view(), 1, 2));
  strided.call.q = Transpose(std::as_const(q).view(), 1, 2);
  const TensorView keys(k.raw(), GetParam(), {2, 2, 150, 24}, {300, 150, 1, 600});
  CopyElements(strided.call.k, keys);
  strided.call.k = keys;
  strided.call.out = Transpose(out.view(), 1, 2);
  strided.Run();
  EXPECT_EQ(MaxDifference(plain.call.out, strided.call.out), 0);

  Subject misaligned(problem);
  misaligned.shift = 3;
  misaligned.Run();
  EXPECT_EQ(MaxDifference(plain.call.out, misaligned.call.out), 0);

  // One key serves all; tensors are also given as fp32 of the same numbers, with an fp32 result.
  Subject broadcast(problem);
  broadcast.call.k =
      ConstTensorView(broadcast.input("k").raw(), GetParam(), {2, 2, 150, 24}, {0, 0, 0, 1});
  broadcast.ExpectMatchesLoops();
  Subject converted(problem);
  const Tensor wide_q = plain.input("q").CloneAs(DType::kF32),
               wide_v = plain.input("v").CloneAs(DType::kF32);
  Tensor wide_out(DType::kF32, {2, 2, 70, 16});
  converted.call.q = wide_q.view();
  converted.call.v = wide_v.view();
  converted.call.out = wide_out.view();
  converted.ExpectMatchesLoops();
  EXPECT_LE(MaxDifference(plain.call.out, wide_out.view()),
            UnitRoundoff(GetParam()) * MaxAbs(wide_out.view()) * 1.01);
}

// Returns the elements as [batch, heads, tokens, channels] in `memory`, where one stride is one more
// than a multiple of 8 and those outside of it are multiples, so that it alone keeps rows apart from
// the addresses of 16 bytes.
TensorView WithOddStride(const TensorView& view, int odd_axis, Tensor* memory) {
  std::array<int64_t, 4> strides;
  int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    strides[axis] = stride + (axis == odd_axis ? 1 : 0);
    stride = (strides[axis] * view.dim(axis) + 7) / 8 * 8;
  }
  *memory = Tensor(view.dtype, {stride});
  const TensorView strided(memory->raw(), view.dtype, view.shape(),
                           {strides[0], strides[1], strides[2], strides[3]});
  CopyElements(view, strided);
  return strided;
}

TEST_P(FlashMma, RowsThatBeginAtAnyElementGiveTheSameBits) {
  const Problem problem = Make(GetParam(), {20, 70, 16, 16, 2, 1, 2});
  Subject plain(problem);
  plain.Run();
  for (int axis : {0, 1, 2}) {
    Subject strided(problem);
    Tensor q, k, v, out;
    strided.call.q = WithOddStride(strided.input("q").view(), axis, &q);
    strided.Run();
    EXPECT_EQ(MaxDifference(plain.call.out, strided.call.out), 0) << "q " << axis;
    strided.call.k = WithOddStride(strided.input("k").view(), axis, &k);
    strided.Run();
    EXPECT_EQ(MaxDifference(plain.call.out, strided.call.out), 0) << "k " << axis;
    strided.call.v = WithOddStride(strided.input("v").view(), axis, &v);
    strided.Run();
    EXPECT_EQ(MaxDifference(plain.call.out, strided.call.out), 0) << "v " << axis;
    strided.call.out = WithOddStride(strided.out().view(), axis, &out);
    strided.Run();
    EXPECT_EQ(MaxDifference(plain.call.out, strided.call.out), 0) << "out " << axis;
  }
}

TEST_P(FlashMma, OutputsAndWhatRoundingTookFromThemAreTheOutputsInF32) {
  for (const int64_t dim : {7, 32, 40, 64, 80, 128, 136, 256}) {  // in chunks, or not; all kernels
    Subject(Make(GetParam(), {150, 90, dim, dim})).ExpectRest();
  }
  for (const int64_t dim : {7, 32}) {
    Subject(Make(GetParam(), {150, 90, dim, dim, 2, 1, 2})).ExpectRest();
  }
  Subject(Make(GetParam(), {200, 30, 64, 48}, /*causal=*/true)).ExpectRest();  // rows without keys
  Subject split(Make(GetParam(), {130, 500, 32, 40, 2, 1}, /*causal=*/true));
  split.splits = 3;
  split.ExpectRest();
  for (const int64_t dim : {16, 64}) {
    Subject misaligned(Make(GetParam(), {70, 90, dim, dim}));
    misaligned.shift = 3;
    misaligned.ExpectRest();
    // The rows of one of the two are whole chunks, and those of the other are not.
    for (const int64_t out_row : {dim, dim + 1}) {
      const int64_t rest_row = 2 * dim + 1 - out_row;
      Subject strided(Make(GetParam(), {70, 90, dim, dim, 2, 2}));
      Tensor out(GetParam(), {1, 2, 70, out_row}), rest(GetParam(), {1, 2, 70, rest_row});
      strided.call.out = Slice(out.view(), 3, 0, dim);
      strided.call.out_rest = Slice(rest.view(), 3, 0, dim);
      strided.ExpectRest();
    }
    // A rule has kernels of its own.
    const DistanceTable table(1, 70, 90, [](int64_t, int64_t offset) { return 0.01f * offset; });
    Subject rule(Make(GetParam(), {70, 90, dim, dim}));
    rule.call.rule.bias = table.entries();
    rule.ExpectRest();
    std::vector<int32_t> reversed(70);
    for (int32_t n = 0; n < 70; ++n) reversed[n] = 69 - n;
    Subject ordered(Make(GetParam(), {70, 90, dim, dim, 2, 2}));
    ordered.call.query_order = {reversed.data(), 0, 0};
    ordered.ExpectRest();
  }
}

TEST_P(FlashMma, TokenOrdersGatherAndScatter) {
  Subject(Make(GetParam(), {150, 70, 32, 16, 2, 2, 2})).ExpectOrdersGatherAndScatter();
}

TEST_P(FlashMma, RingsOfTilesAreReadFromTheirFirst) {
  Subject(Make(GetParam(), {130, 300, 32, 32, 2, 2, 2}, /*causal=*/true)).ExpectRingsGiveTheSame();
}

// ---- Score rules ----

TEST_P(FlashMma, DistanceBiasesAreReadAtTheirOffset) {
  const auto bias = [](int64_t h, int64_t offset) {
    return std::sin(0.1f * static_cast<float>(offset)) * static_cast<float>(h + 1);
  };
  for (auto [queries, keys, dim] :
       {std::array<int64_t, 3>{70, 70, 16}, {5, 200, 64}, {200, 5, 128}, {130, 300, 256}}) {
    Subject subject(Make(GetParam(), {queries, keys, dim, dim, 2, 2}));
    const DistanceTable table(2, queries, keys, bias);
    subject.call.rule.bias = table.entries();
    subject.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
      return s + bias(h, j - i);
    };
    subject.ExpectMatchesLoops();
  }
  // A call as in a stream: query 0 has position 230 among the table's keys.
  Subject stream(Make(GetParam(), {70, 300, 16, 16, 2, 2}, /*causal=*/true));
  const DistanceTable table(2, 300, 300, bias);
  stream.call.rule.bias = table.entries();
  stream.call.rule.query_position = 230;
  stream.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
    return s + bias(h, j - i - 230);
  };
  stream.ExpectMatchesLoops();
}

TEST_P(FlashMma, ReluMultipliersActOnScoresBelowAndAboveZero) {
  Subject subject(Make(GetParam(), {150, 150, 32, 16, 2, 2}));
  const auto factor = [](int64_t h, int64_t offset) {
    return 1.0f / (1.0f + static_cast<float>(h) + 0.01f * static_cast<float>(std::abs(offset)));
  };
  const DistanceTable table(2, 150, 150, factor);
  subject.call.rule.relu_multiplier = table.entries();
  subject.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
    return std::max(s, 0.0) * factor(h, j - i);
  };
  subject.ExpectMatchesLoops();
}

TEST_P(FlashMma, RelativeKeysAndQueryBiasesMatchAnExplicitGather) {
  for (auto [queries, keys, dim] : {std::array<int64_t, 3>{70, 200, 16},
                                    {200, 64, 64},
                                    {129, 400, 40},
                                    {130, 130, 128},
                                    {70, 130, 256}}) {
    const int64_t low = -100, high = 40, d = dim;  // offsets outside have a relative key of 0
    Subject subject(Make(GetParam(), {queries, keys, dim, 24, 2, 2}));
    subject.relative_keys = Tensor(GetParam(), {2, high - low + 1, dim});
    subject.low = low;
    FillNormal(&subject.relative_keys, 3, "table");
    Tensor u(DType::kF32, {2, dim}), w(DType::kF32, {2, dim});
    FillNormal(&u, 3, "u");
    FillNormal(&w, 3, "w");
    for (const bool with_biases : {false, true}) {
      subject.call.rule.content_bias = with_biases ? u.span<float>().data() : nullptr;
      subject.call.rule.position_bias = with_biases ? w.span<float>().data() : nullptr;
      const DoubleTensor r(subject.relative_keys.view()), du(u.view()), dw(w.view()),
          q(subject.call.q), k(subject.call.k);
      subject.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
        const double scale = 1 / std::sqrt(static_cast<double>(d));
        if (with_biases) s += Dot(du.Row(h), k.Row(b, h, j), d) * scale;
        if (j - i < low || j - i > high) return s;
        for (int64_t c = 0; c < d; ++c) {
          const double query = q.Row(b, h, i)[c] + (with_biases ? dw.Row(h)[c] : 0);
          s += query * r.Row(h, j - i - low)[c] * scale;
        }
        return s;
      };
      subject.ExpectMatchesLoops(3);  // three products are summed; the bound is derived for one
    }
  }
}

TEST_P(FlashMma, ContentBiasesAloneMatchLoops) {
  Subject subject(Make(GetParam(), {70, 200, 48, 24, 4, 2}));
  Tensor u(DType::kF32, {4, 48});
  FillNormal(&u, 3, "u");
  subject.call.rule.content_bias = u.span<float>().data();
  const DoubleTensor du(u.view()), k(subject.call.k);
  subject.change = [&](int64_t b, int64_t h, int64_t, int64_t j, double s) {
    return s + Dot(du.Row(h), k.Row(b, h / 2, j), 48) / std::sqrt(48.0);
  };
  subject.ExpectMatchesLoops(2);
}

TEST_P(FlashMma, RelativeKeysAreFoundAgainBehindGapsOfTheSchedule) {
  const OwnPattern pattern;  // skips tiles
  Subject subject(Make(GetParam(), {300, 500, 16, 16, 2, 2}), &pattern);
  subject.low = -299;
  subject.relative_keys = Tensor(GetParam(), {1, 799, 16});
  FillNormal(&subject.relative_keys, 3, "table");
  Tensor w(DType::kF32, {2, 16});
  FillNormal(&w, 3, "w");
  subject.call.rule.position_bias = w.span<float>().data();
  const DoubleTensor r(subject.relative_keys.view()), dw(w.view()), q(subject.call.q);
  subject.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
    for (int64_t c = 0; c < 16; ++c) {
      s += (q.Row(b, h, i)[c] + dw.Row(h)[c]) * r.Row(0, j - i + 299)[c] / 4;
    }
    return s;
  };
  subject.ExpectMatchesLoops(3);
}

TEST_P(FlashMma, SoftSpansWeighTheirRampAndHideWhatIsBeyond) {
  for (const auto& [queries, keys] :
       {std::pair<int64_t, int64_t>{300, 300}, {200, 300}, {300, 170}}) {
    Subject subject(Make(GetParam(), {queries, keys, 16, 16, 2, 2, 2}, /*causal=*/true));
    std::vector<float> spans(2 * 2 * queries);
    for (size_t n = 0; n < spans.size(); ++n) spans[n] = static_cast<float>(n * 37 % 150);
    const float ramp = 20;
    SoftSpan& span = subject.call.rule.soft_span;
    span.span = spans.data();
    span.count = static_cast<int64_t>(spans.size());
    span.batch_stride = 2 * queries;
    span.head_stride = queries;
    span.query_stride = 1;
    span.ramp = ramp;
    subject.change = [&, queries = queries, keys = keys](int64_t b, int64_t h, int64_t i, int64_t j,
                                                         double s) {
      const double z = spans[(b * 2 + h) * queries + i];
      const auto distance = static_cast<double>(i + keys - queries - j);
      const double weight = std::min(1.0, (ramp + z - distance) / ramp);
      return weight <= 0 ? kNotSeen : s + std::log(weight);
    };
    subject.ExpectMatchesLoops();
    // A key beyond every span may hold anything, and so may its score.
    const Tensor before = subject.out().Clone();
    *static_cast<uint16_t*>(subject.input("k").raw()) = 0x7fff;  // a NaN in both dtypes
    *static_cast<uint16_t*>(subject.input("v").raw()) = 0x7fff;
    subject.Run();
    for (int64_t c = 0; c < 16; ++c) {
      EXPECT_EQ(before.view().Get(before.view().Offset(0, 0, queries - 1, c)),
                subject.Out(0, 0, queries - 1, c));
    }
  }
}

// The kernels that the simulated GPU runs, those of Hopper GPUs or of all others, are told by its
// compute capability: flash_mma_truncated_test has an A100.
TEST(FlashMmaCall, TheWorkOfACallIsAsOnRecord) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts work";
  const auto runtime = CudaRuntime::For(KernelDevice());
  ASSERT_TRUE(runtime.ok());
  const bool hopper = (*runtime)->properties().compute_capability_major == 9;
  const auto work = [](Subject&& subject) { return WorkOf([&] { subject.Run(); }); };
  const Sizes sizes = {300, 300, 40, 72, 2, 2};
  EXPECT_EQ(work(Subject(Make(DType::kBF16, sizes))),
            hopper ? "1 launches, 4 blocks, 32 barriers, 4626 collectives"
                   : "1 launches, 6 blocks, 84 barriers, 41736 collectives");
  EXPECT_EQ(work(Subject(Make(DType::kBF16, sizes, /*causal=*/true))),
            hopper ? "1 launches, 4 blocks, 20 barriers, 3228 collectives"
                   : "1 launches, 6 blocks, 68 barriers, 30664 collectives");
  const BandPattern band(-100, 0);
  EXPECT_EQ(work(Subject(Make(DType::kBF16, sizes), &band)),
            hopper ? "1 launches, 4 blocks, 16 barriers, 2762 collectives"
                   : "1 launches, 6 blocks, 60 barriers, 25128 collectives");
  Subject split(Make(DType::kBF16, {5, 500, 40, 72, 4, 2}));
  split.splits = 3;
  EXPECT_EQ(work(std::move(split)), hopper
                                        ? "2 launches, 9 blocks, 34 barriers, 5348 collectives"
                                        : "2 launches, 17 blocks, 122 barriers, 44820 collectives");
  Subject with_keys(Make(DType::kBF16, sizes));
  with_keys.relative_keys = Tensor(DType::kBF16, {1, 601, 40});
  Fill(with_keys.relative_keys.view(), 0.5);
  with_keys.low = -300;
  EXPECT_EQ(work(std::move(with_keys)), "1 launches, 6 blocks, 84 barriers, 86160 collectives");
}

// Returns ids with few different values, in [batch, tokens].
Tensor IdsOf(int64_t batch, int64_t tokens) {
  Tensor ids(DType::kI32, {batch, tokens});
  for (int64_t n = 0; n < ids.num_elements(); ++n) {
    ids.span<int32_t>()[n] = static_cast<int32_t>(n * n % 11 % 4) - 1;
  }
  return ids;
}

TEST_P(FlashMma, LabelKeysGoByTheIdsOfQueryAndKey) {
  for (const int64_t dim : {16, 40, 128, 256}) {
    Subject subject(Make(GetParam(), {150, 90, dim, 32, 2, 1, 2}));
    Tensor labels(DType::kF32, {2, 2, dim}), w(DType::kF32, {2, dim});
    FillNormal(&labels, 3, "labels");
    FillNormal(&w, 3, "w");
    const Tensor query_ids = IdsOf(2, 150), key_ids = IdsOf(2, 90);
    const float numbers[2][2] = {{0.7f, -1.3f}, {2, 0.5f}};
    const bool has_numbers = dim != 40;
    subject.call.rule.label_keys = {labels.span<float>().data(), 2,
                                    has_numbers ? numbers[0] : nullptr};
    subject.call.rule.position_bias = w.span<float>().data();
    subject.call.query_ids = query_ids.view();
    subject.call.key_ids = key_ids.view();
    const DoubleTensor l(labels.view()), dw(w.view()), q(subject.call.q);
    subject.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
      const int64_t same =
          *query_ids.view().At<int32_t>(b, i) == *key_ids.view().At<int32_t>(b, j) ? 1 : 0;
      const double dot = Dot(q.Row(b, h, i), l.Row(h, same), dim) +
                         Dot(dw.Row(h), l.Row(h, same), dim) + (has_numbers ? numbers[h][same] : 0);
      return s + dot / std::sqrt(static_cast<double>(dim));
    };
    subject.ExpectMatchesLoops(3);
  }
}

TEST_P(FlashMma, AllPartsOfARuleActTogether) {
  const int64_t queries = 140, keys = 200, position = 60;
  Subject subject(Make(GetParam(), {queries, keys, 32, 32, 2, 2}, /*causal=*/true));
  const auto bias = [](int64_t h, int64_t offset) {
    return 0.01f * static_cast<float>((offset + 1000) % 17) * static_cast<float>(h + 1);
  };
  const auto factor = [](int64_t, int64_t offset) {
    return 1.0f + 0.1f * static_cast<float>((offset + 1000) % 5);
  };
  const DistanceTable biases(2, 200, 200, bias), factors(1, 200, 200, factor);
  subject.call.rule.bias = biases.entries();
  subject.call.rule.relu_multiplier = factors.entries();
  subject.call.rule.query_position = position;
  subject.low = -199;
  subject.relative_keys = Tensor(GetParam(), {2, 200, 32});
  FillNormal(&subject.relative_keys, 3, "table");
  Tensor u(DType::kF32, {2, 32}), w(DType::kF32, {2, 32});
  FillNormal(&u, 3, "u");
  FillNormal(&w, 3, "w");
  subject.call.rule.content_bias = u.span<float>().data();
  subject.call.rule.position_bias = w.span<float>().data();
  Tensor labels(DType::kF32, {1, 2, 32});
  FillNormal(&labels, 3, "labels");
  const Tensor query_ids = IdsOf(1, queries), key_ids = IdsOf(1, keys);
  subject.call.rule.label_keys = {labels.span<float>().data(), 1};
  subject.call.query_ids = query_ids.view();
  subject.call.key_ids = key_ids.view();
  const float span = 90.5f, ramp = 32;
  subject.call.rule.soft_span.span = &span;
  subject.call.rule.soft_span.count = 1;
  subject.call.rule.soft_span.ramp = ramp;
  Tensor mask(DType::kU8, {1, keys});
  for (int64_t n = 0; n < keys; ++n) mask.span<uint8_t>()[n] = n % 5 != 0;
  subject.call.key_mask = mask.view();
  const DoubleTensor r(subject.relative_keys.view()), du(u.view()), dw(w.view()), q(subject.call.q),
      k(subject.call.k), l(labels.view());
  subject.change = [&](int64_t b, int64_t h, int64_t i, int64_t j, double s) {
    const int64_t offset = j - i - position;
    const double* label =
        l.Row(*query_ids.view().At<int32_t>(b, i) == *key_ids.view().At<int32_t>(b, j) ? 1 : 0);
    const double scale = 1 / std::sqrt(32.0);
    s += Dot(du.Row(h), k.Row(b, h, j), 32) * scale;
    for (int64_t c = 0; c < 32 && offset >= -199 && offset <= 0; ++c) {
      s += (q.Row(b, h, i)[c] + dw.Row(h)[c]) * r.Row(h, offset + 199)[c] * scale;
    }
    s += (Dot(q.Row(b, h, i), label, 32) + Dot(dw.Row(h), label, 32)) * scale;
    s = std::max(s, 0.0) * factor(h, offset) + bias(h, offset);
    const double weight =
        std::min(1.0, (ramp + span - static_cast<double>(i + position - j)) / ramp);
    return weight <= 0 ? kNotSeen : s + std::log(weight);
  };
  for (int splits : {1, 2}) {
    subject.splits = splits;
    subject.ExpectMatchesLoops(4);  // the multiplier amplifies the products' error
  }
}

// ---- Numbers ----

TEST_P(FlashMma, NansInHiddenKeysAndValuesDoNotReachTheOutput) {
  const BandPattern band(-5, 5);
  for (int64_t dim : {32, 256}) {  // kernels with 32 and with 16 queries a warp
    Subject subject(Make(GetParam(), {150, 150, dim, dim, 2, 2}), &band);
    subject.Run();
    const Tensor clean = subject.out().Clone();
    for (int64_t c = 0; c < dim; ++c) {  // seen by queries 85 to 95 only
      subject.input("k").view().Set((150 + 90) * dim + c, NAN);
      subject.input("v").view().Set((150 + 90) * dim + c, INFINITY);
    }
    subject.Run();
    for (int64_t i = 0; i < 150; ++i) {
      for (int64_t c : {int64_t{0}, int64_t{7}, dim - 1}) {
        const double value = subject.Out(0, 1, i, c);
        if (i >= 85 && i <= 95) {
          EXPECT_TRUE(std::isnan(value)) << i;
        } else {
          EXPECT_EQ(value, clean.view().Get(clean.view().Offset(0, 1, i, c))) << i;
        }
      }
    }
  }
}

TEST_P(FlashMma, InfiniteValuesReachWhoSeesThemWithTheirSign) {
  const BandPattern band(-40, 40);
  for (int64_t dim : {64, 256}) {
    Subject subject(Make(GetParam(), {140, 140, dim, dim}), &band);
    subject.Run();
    const Tensor clean = subject.out().Clone();
    subject.input("v").view().Set(20 * dim + 3, INFINITY);
    subject.input("v").view().Set(70 * dim + 4, -INFINITY);
    subject.input("v").view().Set(100 * dim + 3, NAN);
    subject.input("v").view().Set(30 * dim + 9, INFINITY);
    subject.input("v").view().Set(33 * dim + 9, -INFINITY);
    subject.Run();
    const auto sees = [](int64_t i, int64_t j) { return std::abs(i - j) <= 40; };
    for (int64_t i = 0; i < 140; ++i) {
      for (int64_t c = 0; c < 12; ++c) {
        double expected = clean.view().Get(clean.view().Offset(0, 0, i, c));
        if (c == 3 && sees(i, 20)) expected = INFINITY;
        if (c == 3 && sees(i, 100)) expected = NAN;
        if (c == 4 && sees(i, 70)) expected = -INFINITY;
        if (c == 9 && sees(i, 30)) expected = INFINITY;
        if (c == 9 && sees(i, 33)) expected = sees(i, 30) ? NAN : -INFINITY;
        const double value = subject.Out(0, 0, i, c);
        EXPECT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected)))
            << i << " " << c << ": " << value << ", not " << expected;
      }
    }
  }
}

TEST_P(FlashMma, NansInPaddedKeysDoNotReachTheOutput) {
  Subject subject(Make(GetParam(), {10, 70, 16, 16}));
  Tensor mask(DType::kU8, {1, 70});
  Fill(mask.view(), 1);
  mask.span<uint8_t>()[69] = 0;
  for (int64_t c = 0; c < 16; ++c) {
    subject.input("k").view().Set(69 * 16 + c, NAN);
    subject.input("v").view().Set(69 * 16 + c, NAN);
  }
  subject.call.key_mask = mask.view();
  subject.Run();
  for (int64_t n = 0; n < 160; ++n) EXPECT_TRUE(std::isfinite(subject.call.out.Get(n))) << n;
}

TEST_P(FlashMma, RowsWithoutAKeyAreZeroWithALogSumExpOfMinusInfinity) {
  Subject subject(Make(GetParam(), {200, 30, 64, 64}, /*causal=*/true));  // 170 rows see nothing
  subject.ExpectMatchesLoops();
  EXPECT_EQ(subject.Out(0, 0, 169, 0), 0);
  EXPECT_EQ(subject.call.log_sum_exp.Get(169), -INFINITY);
  EXPECT_NE(subject.Out(0, 0, 170, 0), 0);
}

TEST_P(FlashMma, ExtremeScoresAreSubtractedBeforeTheyAreScaled) {
  // All scores are near the lowest float: the softmax is uniform, and no finite mask value would
  // stay below the scores.
  const double largest = GetParam() == DType::kBF16 ? 3.38e38 : 65504;
  Subject low(Make(GetParam(), {3, 70, 1, 1}));
  Fill(low.input("q").view(), -1);
  Fill(low.input("k").view(), largest);
  low.call.scale = GetParam() == DType::kBF16 ? 1 : 5e33;
  low.ExpectMatchesLoops();
  // These products overflow f16.
  Subject products(Make(GetParam(), {3, 70, 16, 1}));
  Fill(products.input("q").view(), 60000);
  for (int64_t n = 0; n < 70 * 16; ++n)
    products.input("k").view().Set(n, n / 16 == 9 ? 60000 : 59000);
  products.ExpectMatchesLoops();
  // Scores are +-1e4, and one key dominates.
  Subject wide(Make(GetParam(), {9, 200, 1, 4}));
  wide.call.scale = 1;
  Fill(wide.input("q").view(), 1);
  for (int64_t n = 0; n < 200; ++n) {
    wide.input("k").view().Set(n, n % 100 == 77 ? 6e4 : (n % 2 != 0 ? 1e4 : -1e4));
  }
  wide.ExpectMatchesLoops();
  // The scale is negative.
  Subject reversed(Make(GetParam(), {40, 100, 16, 16}));
  reversed.call.scale = -0.3;
  reversed.ExpectMatchesLoops();
}

TEST_P(FlashMma, ConstantValuesComeBackAndZeroQueriesGiveTheMean) {
  Subject subject(Make(GetParam(), {66, 130, 64, 64}));
  Fill(subject.input("v").view(), 3);
  Fill(subject.input("q").view(), 0);
  subject.Run();
  for (int64_t n = 0; n < subject.out().num_elements(); ++n) {
    ASSERT_EQ(subject.call.out.Get(n), 3) << n;  // weights of 1 are exact
  }
}

}  // namespace
}  // namespace tfb
