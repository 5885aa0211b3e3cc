// Tests the decoding kernels on tensor cores, called through their table. flash_test.cc tests the engine
// around them.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/work_testing.h"
#include "core/flash/flash.h"
#include "core/flash/flash_mma_testing.h"
#include "core/testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

using flash_mma::Make;

// A call of up to 16 rows, of more than 128 channels up to 8.
class Decoding : public flash_mma::Subject {
 public:
  explicit Decoding(const Problem& problem, const Pattern* of_keys = nullptr)
      : Subject(problem, of_keys) {
    decodes = true;
  }
};

class FlashDecodeMma : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(In, FlashDecodeMma, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& dtype) { return std::string(Name(dtype.param)); });

TEST_P(FlashDecodeMma, MatchesLoopsForEveryHeadDim) {
  for (int64_t dim : {1, 7, 24, 32, 40, 64, 80, 128, 136, 200, 256}) {
    Decoding(Make(GetParam(), {2, 90, dim, dim, 6, 2})).ExpectMatchesLoops();
    Decoding(Make(GetParam(), {1, 90, dim, 257 - dim, 4})).ExpectMatchesLoops();
    if (dim > 128) continue;
    Decoding(Make(GetParam(), {3, 90, dim, 129 - dim, 8, 2})).ExpectMatchesLoops();
  }
}

TEST_P(FlashDecodeMma, MatchesLoopsForEveryNumberOfRowsAndKeys) {
  for (auto [queries, group] : {std::pair{1, 1},
                                {2, 1},
                                {1, 3},
                                {2, 2},
                                {5, 1},
                                {1, 6},
                                {7, 1},
                                {4, 2},
                                {1, 8},
                                {9, 1},
                                {2, 5},
                                {1, 12},
                                {13, 1},
                                {5, 3},
                                {16, 1},
                                {1, 16}}) {
    for (int64_t keys : {1, 3, 15, 16, 17, 47, 63, 64, 65, 200}) {
      for (bool causal : {false, true}) {
        Decoding(Make(GetParam(), {queries, keys, 64, 40, group * 2, 2, 2}, causal))
            .ExpectMatchesLoops();
      }
    }
  }
}

TEST_P(FlashDecodeMma, EmptySequencesAndBatchesAreDefined) {
  Decoding no_keys(Make(GetParam(), {2, 0, 16, 16}));
  no_keys.ExpectMatchesLoops();
  EXPECT_EQ(MaxAbs(no_keys.out().view()), 0);
  Problem no_batch = Make(GetParam(), {2, 5, 16, 16});
  no_batch.batch = 0;
  Decoding(no_batch).ExpectMatchesLoops();
}

// Edges of the band lie within the keys of a warp and of a lane; with and without tables of it.
TEST_P(FlashDecodeMma, BandsAndKeyMasksHideWhatTheyHide) {
  for (const int64_t low : {20, 21, 40, 100}) {
    const Band band = {0, low, low + 77};
    const BandPattern pattern(band.low, band.high);
    for (const int64_t queries : {4, 8, 12}) {
      Decoding subject(Make(GetParam(), {queries, 200, 40, 40, queries == 12 ? 2 : 4, 2, 2}),
                       &pattern);
      subject.band = low % 2 == 0 ? nullptr : &band;
      Tensor mask(DType::kU8, {2, 200});
      for (int64_t n = 0; n < 400; ++n) {
        mask.span<uint8_t>()[n] = n % 7 != 0 && (n < 130 || n > 290);
      }
      subject.call.key_mask = mask.view();
      subject.ExpectMatchesLoops();
    }
  }
}

// A pattern in which each head, and each query, sees other keys.
class OwnPattern : public Pattern {
 public:
  int64_t heads() const override { return 3; }
  int64_t AddKeys(int64_t head, int64_t i, KeyList* keys) const override {
    constexpr int64_t kMost = 256;
    for (int64_t j = 0; j < kMost; ++j) {
      if ((j / 8 + i) % 3 == head) keys->Add(j, j + 1);
    }
    return i + 1;
  }
};
TEST_P(FlashDecodeMma, HeadsHavePatternsOfTheirOwn) {
  const OwnPattern pattern;
  Decoding(Make(GetParam(), {5, 200, 32, 32, 3, 3}), &pattern).ExpectMatchesLoops();
  Decoding(Make(GetParam(), {11, 200, 32, 32, 3, 3}), &pattern).ExpectMatchesLoops();
}

TEST_P(FlashDecodeMma, DistanceBiasesAreReadAtTheirOffset) {
  const auto bias = [](int64_t h, int64_t offset) {
    return std::sin(0.1f * static_cast<float>(offset)) * static_cast<float>(h + 1);
  };
  for (const int64_t dim : {16, 128}) {
    for (const int64_t position : {0, 150}) {
      for (const int64_t group : {2, 5}) {
        Decoding subject(Make(GetParam(), {3, 200, dim, dim, 2 * group, 2, 2}));
        const DistanceTable table(2 * group, position + 3, 200, bias);
        subject.call.rule.bias = table.entries();
        subject.call.rule.query_position = position;
        subject.change = [&](int64_t, int64_t h, int64_t i, int64_t j, double s) {
          return s + bias(h, j - i - position);
        };
        subject.ExpectMatchesLoops();
      }
    }
  }
}

TEST_P(FlashDecodeMma, PartsOfTheKeysAreMerged) {
  for (int splits : {2, 3, 7}) {
    Decoding subject(Make(GetParam(), {3, 500, 32, 40, 4, 2}, /*causal=*/true));
    subject.splits = splits;
    subject.ExpectMatchesLoops();
  }
  // Some rows see no key, and some parts have none.
  Decoding few(Make(GetParam(), {10, 3, 16, 16}, /*causal=*/true));
  few.splits = 5;
  few.ExpectMatchesLoops();
}

TEST_P(FlashDecodeMma, ResultsAreBitwiseTheSameInAnyOrderAndOnAnyGrid) {
  for (const int64_t queries : {2, 4}) {
    Decoding subject(Make(GetParam(), {queries, 300, 64, 64, 8, 2, 3}, /*causal=*/true));
    subject.splits = 2;
    subject.Run(1);
    const Tensor first = subject.out().Clone(), sums = subject.log_sum_exp().Clone();
    for (auto [seed, max_blocks] : {std::pair<int, int>{2, 1 << 20}, {3, 1}, {4, 5}}) {
      Fill(subject.out().view(), NAN);
      subject.max_blocks = max_blocks;
      subject.Run(seed);
      EXPECT_EQ(std::memcmp(first.raw(), subject.out().raw(), first.bytes()), 0) << seed;
      EXPECT_EQ(std::memcmp(sums.raw(), subject.log_sum_exp().raw(), sums.bytes()), 0) << seed;
    }
  }
}

// Returns the elements as [batch, heads, tokens, channels] in `memory`, with rows of an odd stride.
TensorView WithOddRows(const TensorView& view, Tensor* memory) {
  *memory = Tensor(view.dtype, {view.dim(0), view.dim(1), view.dim(2), view.dim(3) | 1});
  const TensorView strided = Slice(memory->view(), 3, 0, view.dim(3));
  CopyElements(view, strided);
  return strided;
}

TEST_P(FlashDecodeMma, StridedTransposedAndMisalignedViewsGiveTheSameBits) {
  for (const int64_t dim : {20, 24, 64, 128}) {
    for (const int64_t heads : {4, 12}) {  // 4 and 12 rows
      const Problem problem = Make(GetParam(), {2, 150, dim, dim, heads, 2, 2});
      Decoding plain(problem);
      plain.ExpectMatchesLoops();
      Decoding strided(problem);
      // Queries and outputs as [batch, tokens, heads, channels] and keys with channels outermost.
      Tensor q(GetParam(), {2, 2, heads, dim}), k(GetParam(), {dim, 2, 2, 150}),
          out(GetParam(), {2, 2, heads, dim});
      CopyElements(strided.call.q, Transpose(q.view(), 1, 2));
      strided.call.q = Transpose(std::as_const(q).view(), 1, 2);
      const TensorView keys(k.raw(), GetParam(), {2, 2, 150, dim}, {300, 150, 1, 600});
      CopyElements(strided.call.k, keys);
      strided.call.k = keys;
      strided.call.out = Transpose(out.view(), 1, 2);
      strided.Run();
      EXPECT_EQ(MaxDifference(plain.call.out, strided.call.out), 0) << dim;

      Decoding odd(problem);
      Tensor k_rows, v_rows;
      odd.call.k = WithOddRows(odd.input("k").view(), &k_rows);
      odd.Run();
      EXPECT_EQ(MaxDifference(plain.call.out, odd.call.out), 0) << dim;
      odd.call.v = WithOddRows(odd.input("v").view(), &v_rows);
      odd.Run();
      EXPECT_EQ(MaxDifference(plain.call.out, odd.call.out), 0) << dim;

      // Rows of 4 more channels, and every second of twice as many, with NaN in between.
      for (const auto& [more, step] : {std::pair<int64_t, int64_t>{4, 1}, {8 + dim, 2}}) {
        Decoding apart(problem);
        Tensor k_of(GetParam(), {2, 2, 150, dim + more}), v_of(GetParam(), {2, 2, 150, dim + more});
        for (auto [view, memory] : {std::pair{&apart.call.k, &k_of}, {&apart.call.v, &v_of}}) {
          Fill(memory->view(), NAN);
          const TensorView own = Slice(memory->view(), 3, 0, dim, step);
          CopyElements(*view, own);
          *view = own;
        }
        apart.Run();
        EXPECT_EQ(MaxDifference(plain.call.out, apart.call.out), 0) << dim << " " << step;
      }

      for (const int64_t shift : {1, 4}) {  // from 16 bytes
        Decoding misaligned(problem);
        misaligned.shift = shift;
        misaligned.Run();
        EXPECT_EQ(MaxDifference(plain.call.out, misaligned.call.out), 0) << dim << " " << shift;
      }
    }
  }
}

TEST_P(FlashDecodeMma, OutputsAndWhatRoundingTookFromThemAreTheOutputsInF32) {
  for (const int64_t dim : {7, 64, 256}) {
    Decoding subject(Make(GetParam(), {2, 90, dim, dim, 4, 2, 2}));
    subject.ExpectRest();
    subject.splits = 2;
    subject.ExpectRest();
  }
  Decoding(Make(GetParam(), {16, 90, 128, 128, 2, 2, 2})).ExpectRest();
}

TEST_P(FlashDecodeMma, TokenOrdersGatherAndScatter) {
  Decoding(Make(GetParam(), {3, 70, 32, 16, 4, 2, 2})).ExpectOrdersGatherAndScatter();
}

TEST_P(FlashDecodeMma, RingsOfTilesAreReadFromTheirFirst) {
  Decoding(Make(GetParam(), {2, 300, 32, 32, 4, 2, 2}, /*causal=*/true)).ExpectRingsGiveTheSame();
}

// ---- Numbers ----

TEST_P(FlashDecodeMma, InfiniteValuesReachTheRowsThatSeeThemWithTheirSign) {
  const BandPattern band(-4, 40);
  for (const auto& [dim, rows] :
       {std::pair<int64_t, int64_t>{32, 8}, {64, 8}, {256, 8}, {32, 16}, {128, 13}}) {
    Decoding subject(Make(GetParam(), {rows, 60, dim, dim}), &band);
    subject.Run();
    const Tensor clean = subject.out().Clone();
    // Keys 0 to 47 are of three warps; rows from 5 on do not see key 0, and so on.
    const auto set = [&, dim = dim](int64_t j, int64_t c, double value) {
      subject.input("v").view().Set(j * dim + c, value);
    };
    set(0, 3, INFINITY);
    set(1, 4, -INFINITY);
    set(2, 3, NAN);
    set(0, 9, INFINITY);
    set(3, 9, -INFINITY);
    set(44, dim - 1, INFINITY);
    set(43, dim - 2, NAN);
    const int64_t nan = 39 + rows;  // seen by the last row alone
    subject.input("k").view().Set(nan * dim, NAN);
    subject.Run();
    const auto sees = [](int64_t i, int64_t j) { return j - i >= -4 && j - i <= 40; };
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < dim; ++c) {
        double expected = clean.view().Get(clean.view().Offset(0, 0, i, c));
        if (c == 3 && sees(i, 0)) expected = INFINITY;
        if (c == 3 && sees(i, 2)) expected = NAN;
        if (c == 4 && sees(i, 1)) expected = -INFINITY;
        if (c == 9 && sees(i, 0)) expected = INFINITY;
        if (c == 9 && sees(i, 3)) expected = sees(i, 0) ? NAN : -INFINITY;
        if (c == dim - 1 && sees(i, 44)) expected = INFINITY;
        if (c == dim - 2 && sees(i, 43)) expected = NAN;
        if (sees(i, nan)) expected = NAN;
        const double value = subject.Out(0, 0, i, c);
        EXPECT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected)))
            << dim << " " << i << " " << c << ": " << value << ", not " << expected;
      }
    }
  }
}

TEST_P(FlashDecodeMma, NansInPaddedKeysDoNotReachTheOutput) {
  Decoding subject(Make(GetParam(), {2, 70, 16, 16}));
  Tensor mask(DType::kU8, {1, 70});
  Fill(mask.view(), 1);
  for (const int64_t key : {0, 5, 69}) {
    mask.span<uint8_t>()[key] = 0;
    for (int64_t c = 0; c < 16; ++c) {
      subject.input("k").view().Set(key * 16 + c, NAN);
      subject.input("v").view().Set(key * 16 + c, NAN);
    }
  }
  subject.call.key_mask = mask.view();
  subject.Run();
  for (int64_t n = 0; n < 32; ++n) EXPECT_TRUE(std::isfinite(subject.call.out.Get(n))) << n;
}

TEST_P(FlashDecodeMma, RowsWithoutAKeyAreZeroWithALogSumExpOfMinusInfinity) {
  Decoding subject(Make(GetParam(), {8, 3, 64, 64}, /*causal=*/true));  // 5 rows see nothing
  subject.ExpectMatchesLoops();
  EXPECT_EQ(subject.Out(0, 0, 4, 0), 0);
  EXPECT_EQ(subject.call.log_sum_exp.Get(4), -INFINITY);
  EXPECT_NE(subject.Out(0, 0, 5, 0), 0);
}

TEST_P(FlashDecodeMma, ExtremeScoresAreSubtractedBeforeTheyAreScaled) {
  // All scores are near the lowest float.
  Decoding low(Make(GetParam(), {3, 70, 1, 1}));
  Fill(low.input("q").view(), -1);
  Fill(low.input("k").view(), GetParam() == DType::kBF16 ? 3.38e38 : 65504);
  low.call.scale = GetParam() == DType::kBF16 ? 1 : 5e33;
  low.ExpectMatchesLoops();
  // Scores are +-1e4, and one key of a warp, or of another, dominates those before it.
  Decoding wide(Make(GetParam(), {7, 200, 1, 4}));
  wide.call.scale = 1;
  Fill(wide.input("q").view(), 1);
  for (int64_t n = 0; n < 200; ++n) {
    wide.input("k").view().Set(n, n % 100 == 77 ? 6e4 : (n % 2 != 0 ? 1e4 : -1e4));
  }
  wide.ExpectMatchesLoops();
  Decoding reversed(Make(GetParam(), {4, 100, 16, 16}));
  reversed.call.scale = -0.3;
  reversed.ExpectMatchesLoops();
}

TEST_P(FlashDecodeMma, ConstantValuesComeBackAndZeroQueriesGiveTheMean) {
  Decoding subject(Make(GetParam(), {3, 130, 64, 64, 2, 1}));
  Fill(subject.input("v").view(), 3);
  Fill(subject.input("q").view(), 0);
  subject.Run();
  for (int64_t n = 0; n < subject.out().num_elements(); ++n) {
    ASSERT_EQ(subject.call.out.Get(n), 3) << n;  // weights of 1 are exact
  }
}

// Of 5 tiles, whose last has keys for 3 of the 4 warps: a warp's 6 walks of 2 shuffles, and for each
// tile with keys 2 to find them, 6 to read them, 24 products of 128 channels or 6 of 32, 2 shuffles of the
// maximum, 2 votes, and 2 shuffles where the maximum has grown, which 29 times it has; at the end 2.
TEST(FlashDecodeMmaCall, TheWorkOfACallIsAsOnRecord) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts work";
  const auto work = [](int64_t dim) {
    Decoding subject(Make(DType::kBF16, {1, 300, dim, dim, 8, 2}));
    return WorkOf([&] { subject.Run(); });
  };
  EXPECT_EQ(work(128), "1 launches, 2 blocks, 8 barriers, 1542 collectives");
  EXPECT_EQ(work(32), "1 launches, 2 blocks, 8 barriers, 868 collectives");
  // A product with a value that is not finite takes two more, where a row does not see a key.
  Decoding causal(Make(DType::kBF16, {2, 64, 32, 32}, /*causal=*/true));
  EXPECT_EQ(WorkOf([&] { causal.Run(); }), "1 launches, 1 blocks, 4 barriers, 105 collectives");
  causal.input("v").view().Set(63 * 32, INFINITY);
  EXPECT_EQ(WorkOf([&] { causal.Run(); }), "1 launches, 1 blocks, 4 barriers, 109 collectives");
}

}  // namespace
}  // namespace tfb
