#include "attention/lsh/lsh.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dense/dense.h"
#include "core/backward_testing.h"
#include "core/testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfb::lsh {
namespace {

using ::testing::HasSubstr;

const float kNan = std::numeric_limits<float>::quiet_NaN();

Options With(Options options, const Options& more) {
  for (const auto& [name, value] : more) options[name] = value;
  return options;
}

NamedTensors Random(const Problem& problem, uint64_t seed = 7) {
  return RandomInputs(Lsh().InputSpecs(problem, {}).value(), seed);
}
NamedTensors RunLsh(const Problem& problem, const NamedTensors& inputs, const Options& options,
                    Device device = Device::kCpu, const NamedTensors* parameters = nullptr) {
  return RunTechnique(Lsh(), problem, ViewsOf(inputs), {options, device, 1, parameters, 2}).value();
}
NamedTensors DefineLsh(const Problem& problem, const NamedTensors& inputs, const Options& options,
                       const NamedTensors* parameters = nullptr,
                       const DefinitionRequest& request = {}) {
  return DefineTechnique(Lsh(), problem, ViewsOf(inputs), {options, Device::kCpu, 1, parameters},
                         request)
      .value();
}

// The tolerance for the same sums in another order: 1e-5 is twenty roundings of a score of 8, the
// largest here.
constexpr double kNear = 1e-5;

// Returns the largest difference of outputs and of log-sum-exps, with `more` added to those of
// `other`. A token that sees only itself has a log-sum-exp of -1e5, which is known to 2^-24 of
// itself: differences there are divided by |log_sum_exp| / 64.
double Difference(const NamedTensors& ours, const NamedTensors& other, double more = 0) {
  double largest = MaxDifference(ours.at("out").view(), other.at("out").view());
  const ConstTensorView a = ours.at("log_sum_exp").view(), b = other.at("log_sum_exp").view();
  for (int64_t n = 0; n < a.num_elements(); ++n) {
    const double unit = std::max(1.0, std::abs(b.Get(n)) / 64);
    largest = std::fmax(largest, std::abs(a.Get(n) - b.Get(n) - more) / unit);
  }
  return largest;
}

// Sets values from which an output shows its weights: the value of token j is the j-th unit vector.
void SetUnitValues(NamedTensors* inputs) {
  const TensorView v = inputs->at("v").view();
  Fill(v, 0);
  for (int64_t b = 0; b < v.dim(0); ++b) {
    for (int64_t h = 0; h < v.dim(1); ++h) {
      for (int64_t j = 0; j < v.dim(2); ++j) *v.MutableAt<float>(b, h, j, j) = 1;
    }
  }
}

std::vector<int> BucketsOf(const NamedTensors& outputs) {
  const ConstTensorView view = outputs.at("buckets").view();
  std::vector<int> buckets;
  for (int64_t n = 0; n < view.num_elements(); ++n) {
    buckets.push_back(static_cast<int>(view.Get(n)));
  }
  return buckets;
}

// ---- The pairs that are seen, by hand ----

struct HandCase {
  std::vector<std::vector<int>> rounds;  // the bucket of each token
  Options options;
  bool causal = false;
  std::vector<int> padding = {};  // padding tokens
};

// Returns a row of digits N_ij for each query. Where all queries are 0, so are all scores, and the
// output is N_ij / sum_j N_ij, the log-sum-exp the logarithm of that sum.
std::vector<std::string> Digits(const NamedTensors& outputs) {
  const ConstTensorView out = outputs.at("out").view(), lse = outputs.at("log_sum_exp").view();
  std::vector<std::string> rows(out.dim(2));
  for (int64_t i = 0; i < out.dim(2); ++i) {
    for (int64_t j = 0; j < out.dim(3); ++j) {
      const double count = out.Get(out.Offset(0, 0, i, j)) * std::exp(lse.Get(i));
      EXPECT_NEAR(count, std::round(count), 1e-5) << i << " sees " << j;
      rows[i] += static_cast<char>('0' + std::lround(count));
    }
  }
  return rows;
}

void ExpectSeen(const HandCase& c, const std::vector<std::string>& expected) {
  const int64_t tokens = static_cast<int64_t>(c.rounds[0].size());
  const int64_t rounds = static_cast<int64_t>(c.rounds.size());
  Problem problem = Problem::SelfAttention(1, 1, tokens, 4, c.causal);
  problem.value_dim = tokens;
  NamedTensors inputs = Random(problem);
  Fill(inputs["q"].view(), 0);
  SetUnitValues(&inputs);
  Tensor buckets(DType::kI32, {1, 1, tokens, rounds});
  for (int64_t r = 0; r < rounds; ++r) {
    for (int64_t i = 0; i < tokens; ++i) {
      *buckets.view().MutableAt<int32_t>(0, 0, i, r) = c.rounds[r][i];
    }
  }
  inputs["buckets"] = std::move(buckets);
  if (!c.padding.empty()) {
    Tensor mask(DType::kU8, {1, tokens});
    Fill(mask.view(), 1);
    for (const int j : c.padding) mask.span<uint8_t>()[j] = 0;
    inputs["key_mask"] = std::move(mask);
  }
  const Options options = With({{"rounds", std::to_string(rounds)},
                                {"chunk", "2"},
                                {"buckets", "4"},
                                {"dedup", "false"},
                                {"self_bias", "0"}},
                               c.options);
  SCOPED_TRACE(ToString(options));
  EXPECT_EQ(Digits(DefineLsh(problem, inputs, options)), expected);
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(Digits(RunLsh(problem, inputs, options, device)), expected) << Name(device);
  }
}

// The sorted order is 1 3 | 6 0 | 2 5 | 7 4, where buckets 0, 1 and 3 are 1 3 6, 0 2 5 7 and 4.
const std::vector<int> kFirst = {1, 0, 1, 0, 3, 1, 0, 1};
// The sorted order is 0 1 | 2 6 | 7 3 | 4 5, where buckets 0, 1 and 2 are 0 1 2, 6 7 and 3 4 5.
const std::vector<int> kSecond = {0, 0, 0, 2, 2, 2, 1, 1};
const Options kNoMask = {{"bucket_mask", "false"}};
const Options kWrap = {{"bucket_mask", "false"}, {"wrap", "true"}};

TEST(Lsh, AQuerySeesItsBucketInItsChunkAndInTheOneBefore) {
  ExpectSeen({{kFirst}, {}}, {"10000000", "01010000", "10100100", "01010000",  //
                              "00001000", "10100100", "01010010", "00100101"});
  ExpectSeen({{kFirst}, {}, /*causal=*/true}, {"10000000", "01000000", "10100000", "01010000",  //
                                               "00001000", "10100100", "01010010", "00100101"});
}

TEST(Lsh, WithoutTheBucketMaskAQuerySeesBothChunksWhole) {
  ExpectSeen({{kFirst}, kNoMask}, {"11010010", "01010000", "10100110", "01010000",  //
                                   "00101101", "10100110", "11010010", "00101101"});
  ExpectSeen({{kFirst}, kNoMask, /*causal=*/true},
             {"10000000", "01000000", "10100000", "01010000",  //
              "00101000", "10100100", "11010010", "00101101"});
}

TEST(Lsh, WrapShowsTheFirstChunkTheLastOneOfTheRoundBefore) {
  // With one round, 1 and 3 see 7 and 4 besides.
  ExpectSeen({{kFirst}, kWrap}, {"11010010", "01011001", "10100110", "01011001",  //
                                 "00101101", "10100110", "11010010", "00101101"});
  // With two rounds, 1 and 3 see 4 and 5 besides, and then 0 and 1 see 7 and 4.
  ExpectSeen({{kFirst, kSecond}, kWrap}, {"22011011", "12012101", "21200120", "01121111",  //
                                          "00112202", "10111211", "22110020", "00211112"});
  ExpectSeen({{kFirst, kSecond}, kWrap, /*causal=*/true},
             {"20000000", "12000000", "21200000", "01120000",  //
              "00112000", "10111200", "22110020", "00211112"});
}

TEST(Lsh, EachRoundThatShowsAKeyCountsItOnceMore) {
  ExpectSeen({{kFirst, kSecond}, {}}, {"21000000", "12010000", "21200100", "01020000",  //
                                       "00012100", "10111200", "01010020", "00100112"});
  ExpectSeen({{kFirst, kSecond}, kNoMask}, {"22010010", "12010000", "21200120", "01120011",  //
                                            "00112202", "10111211", "22110020", "00211112"});
}

TEST(Lsh, WithDedupAKeyCountsOnce) {
  const Options dedup = {{"dedup", "true"}};
  ExpectSeen({{kFirst, kSecond}, dedup}, {"11000000", "11010000", "11100100", "01010000",  //
                                          "00011100", "10111100", "01010010", "00100111"});
  ExpectSeen({{kFirst, kSecond}, With(dedup, kWrap)},
             {"11011011", "11011101", "11100110", "01111111",  //
              "00111101", "10111111", "11110010", "00111111"});
}

TEST(Lsh, PaddingTokensAreBehindAndNoKeys) {
  // Without tokens 3 and 4 the order is 1 6 | 0 2 | 5 7 | 3 4.
  HandCase c = {{kFirst}, kNoMask};
  c.padding = {3, 4};
  ExpectSeen(c, {"11100010", "01000010", "11100010", "00000101",  //
                 "00000101", "10100101", "01000010", "10100101"});
  c.options = {};
  ExpectSeen(c, {"10100000", "01000010", "10100000", "00000000",  //
                 "00000000", "10100101", "01000010", "10100101"});
}

TEST(Lsh, ATokenSeesItselfOnlyWhereItSeesNothingElse) {
  Problem problem = Problem::SelfAttention(1, 1, 8, 4);
  problem.value_dim = 8;
  NamedTensors inputs = Random(problem);
  SetUnitValues(&inputs);
  Tensor buckets(DType::kI32, {1, 1, 8, 1});
  std::copy(kFirst.begin(), kFirst.end(), buckets.span<int32_t>().begin());
  inputs["buckets"] = std::move(buckets);
  for (const Device device : TestedDevices()) {
    const NamedTensors outputs =
        RunLsh(problem, inputs, {{"rounds", "1"}, {"chunk", "2"}, {"buckets", "4"}}, device);
    for (int64_t i = 0; i < 8; ++i) {
      const bool alone = i == 0 || i == 4;
      EXPECT_EQ(*outputs.at("out").view().At<float>(0, 0, i, i), alone ? 1 : 0) << i;
      const float lse = outputs.at("log_sum_exp").span<float>()[i];
      if (alone) {
        const float* q = inputs.at("q").view().At<float>(0, 0, i);
        const double norm = std::sqrt(std::inner_product(q, q + 4, q, 0.0));
        EXPECT_NEAR(lse, norm - 1e5, 1e5 * 0x1p-23);
      } else {
        EXPECT_GT(lse, -100);
      }
    }
  }
}

// ---- Where it is attention over all tokens ----

// Runs dense attention with keys q / |q| and scale 1.
NamedTensors RunWhole(const Problem& problem, const NamedTensors& inputs) {
  Tensor keys = inputs.at("q").Clone();
  const int64_t channels = problem.head_dim;
  for (float* row = keys.span<float>().begin(); row < keys.span<float>().end(); row += channels) {
    const double norm = std::sqrt(std::inner_product(row, row + channels, row, 0.0));
    for (int64_t c = 0; c < channels; ++c) row[c] = static_cast<float>(row[c] / norm);
  }
  Inputs views = ViewsOf(inputs);
  views.Set("k", keys.view());
  return RunTechnique(dense::Dense(), problem, views, {{{"scale", "1"}}}).value();
}

TEST(Lsh, OneBucketAndOneChunkAreAttentionOverAllTokens) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(2, 2, 75, 16, causal);
    NamedTensors inputs = Random(problem);
    const NamedTensors dense = RunWhole(problem, inputs);
    for (const Device device : TestedDevices()) {
      EXPECT_LE(Difference(RunLsh(problem, inputs, {{"buckets", "1"}, {"self_bias", "0"}}, device),
                           dense),
                kNear);
      const NamedTensors whole = RunLsh(problem, inputs, {{"buckets", "1"}}, device);
      Tensor buckets(DType::kI32, {2, 2, 75, 2});
      Fill(buckets.view(), 3);
      inputs["buckets"] = std::move(buckets);
      for (const char* chunk : {"75", "1000"}) {
        const Options options = {{"rounds", "2"}, {"chunk", chunk}, {"buckets", "6"}};
        EXPECT_LE(Difference(RunLsh(problem, inputs, options, device), whole), kNear) << chunk;
      }
      inputs.erase("buckets");
    }
  }
}

TEST(Lsh, OneChunkThatWrapsSeesEachKeyTwice) {
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 75, 16, causal);
    const NamedTensors inputs = Random(problem);
    const NamedTensors whole = RunLsh(problem, inputs, {{"buckets", "1"}});
    for (const Device device : TestedDevices()) {
      Options options = With(kWrap, {{"rounds", "1"}, {"chunk", "80"}, {"dedup", "false"}});
      EXPECT_LE(Difference(RunLsh(problem, inputs, options, device), whole, std::log(2)), kNear);
      options["dedup"] = "true";
      EXPECT_LE(Difference(RunLsh(problem, inputs, options, device), whole), kNear);
    }
  }
}

TEST(Lsh, TwoChunksThatWrapAreAttentionOverAllTokens) {
  for (const bool causal : {false, true}) {
    for (const int64_t tokens : {41, 75, 80}) {
      const Problem problem = Problem::SelfAttention(1, 2, tokens, 16, causal);
      const NamedTensors inputs = Random(problem);
      const NamedTensors whole = RunLsh(problem, inputs, {{"buckets", "1"}});
      for (const Device device : TestedDevices()) {
        const Options options = With(kWrap, {{"rounds", "1"}, {"chunk", "40"}, {"dedup", "false"}});
        EXPECT_LE(Difference(RunLsh(problem, inputs, options, device), whole), kNear) << tokens;
      }
    }
  }
}

// ---- Hashing ----

Tensor RotationsOf(const Problem& problem, const Options& options, uint64_t seed = 1) {
  return Lsh()
      .Create(problem, options, Device::kCpu, seed)
      .value()
      ->parameters()
      .at("rotations")
      .Clone();
}
// Returns the rotations of the named rounds.
NamedTensors Rounds(const Tensor& rotations, const std::vector<int>& rounds) {
  NamedTensors parameters;
  Tensor& chosen = parameters["rotations"] = Tensor(
      DType::kF32, {rotations.dim(0), static_cast<int64_t>(rounds.size()), rotations.dim(2)});
  for (size_t n = 0; n < rounds.size(); ++n) {
    CopyElements(Slice(rotations.view(), 1, rounds[n], 1),
                 Slice(chosen.view(), 1, static_cast<int64_t>(n), 1));
  }
  return parameters;
}

TEST(Lsh, ARoundThatIsRepeatedChangesNothing) {
  const Problem problem = Problem::SelfAttention(1, 2, 90, 16, true);
  const NamedTensors inputs = Random(problem);
  for (const Options& kind : {Options{{"chunk", "8"}}, With(kWrap, {{"chunk", "8"}})}) {
    const Options one = With(kind, {{"rounds", "1"}});
    const NamedTensors parameters = Rounds(RotationsOf(problem, one), {0});
    const NamedTensors thrice = Rounds(parameters.at("rotations"), {0, 0, 0});
    for (const Device device : TestedDevices()) {
      const NamedTensors once = RunLsh(problem, inputs, one, device, &parameters);
      Options options = With(kind, {{"rounds", "3"}});
      EXPECT_LE(Difference(RunLsh(problem, inputs, options, device, &thrice), once), kNear);
      options["dedup"] = "false";
      const NamedTensors repeated = RunLsh(problem, inputs, options, device, &thrice);
      EXPECT_LE(Difference(repeated, once, std::log(3)), kNear);
    }
  }
}

TEST(Lsh, ABucketIsThatOfTheDirection) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16);
  const NamedTensors inputs = Random(problem);
  for (const Device device : TestedDevices()) {
    for (const char* count : {"2", "16", "144"}) {
      const Options options = {{"buckets", count}};
      const std::vector<int> buckets = BucketsOf(RunLsh(problem, inputs, options, device));
      NamedTensors other = Random(problem);
      const absl::Span<float> q = other["q"].span<float>();
      // The factors are powers of 2, with which every product has the same rounding.
      for (size_t n = 0; n < q.size(); ++n) q[n] *= std::ldexp(1.0f, static_cast<int>(n / 16 % 9));
      EXPECT_EQ(BucketsOf(RunLsh(problem, other, options, device)), buckets) << count;
    }
  }
}

TEST(Lsh, TheNegativeOfAVectorIsInTheOppositeBucket) {
  const Problem problem = Problem::SelfAttention(1, 2, 70, 16);
  const NamedTensors inputs = Random(problem);
  NamedTensors negative = Random(problem);
  for (float& x : negative["q"].span<float>()) x = -x;
  for (const Device device : TestedDevices()) {
    for (const int count : {2, 6, 64}) {
      const Options options = {{"buckets", std::to_string(count)}};
      const std::vector<int> buckets = BucketsOf(RunLsh(problem, inputs, options, device));
      const std::vector<int> opposite = BucketsOf(RunLsh(problem, negative, options, device));
      for (size_t n = 0; n < buckets.size(); ++n) {
        ASSERT_EQ(opposite[n], (buckets[n] + count / 2) % count) << count;
      }
    }
    // The rotations are of two factors of 12 each.
    const std::vector<int> buckets =
        BucketsOf(RunLsh(problem, inputs, {{"buckets", "144"}}, device));
    const std::vector<int> opposite =
        BucketsOf(RunLsh(problem, negative, {{"buckets", "144"}}, device));
    for (size_t n = 0; n < buckets.size(); ++n) {
      ASSERT_EQ(opposite[n], (buckets[n] % 12 + 6) % 12 + 12 * ((buckets[n] / 12 + 6) % 12));
    }
  }
}

TEST(Lsh, EqualVectorsShareBuckets) {
  const Problem problem = Problem::SelfAttention(1, 1, 140, 16);
  NamedTensors inputs = Random(problem);
  const TensorView q = inputs["q"].view();
  for (int64_t i = 70; i < 140; ++i) CopyElements(Slice(q, 2, i - 70, 1), Slice(q, 2, i, 1));
  for (const Device device : TestedDevices()) {
    const std::vector<int> buckets =
        BucketsOf(RunLsh(problem, inputs, {{"buckets", "64"}}, device));
    for (size_t n = 0; n < buckets.size() / 2; ++n) {
      ASSERT_EQ(buckets[n], buckets[n + buckets.size() / 2]);
    }
  }
}

TEST(Lsh, AVectorOfZerosIsInTheFirstBucket) {
  const Problem problem = Problem::SelfAttention(1, 1, 10, 16);
  NamedTensors inputs = Random(problem);
  Fill(inputs["q"].view(), 0);
  for (const Device device : TestedDevices()) {
    for (const char* count : {"8", "144"}) {
      const NamedTensors outputs = RunLsh(problem, inputs, {{"buckets", count}}, device);
      EXPECT_EQ(BucketsOf(outputs), std::vector<int>(40, 0));
    }
  }
}

TEST(Lsh, ABucketOutOfRangeIsTheNearest) {
  const Problem problem = Problem::SelfAttention(2, 2, 50, 16);
  NamedTensors inputs = Random(problem), inside = Random(problem);
  const Options options = {{"rounds", "3"}, {"chunk", "8"}, {"buckets", "6"}};
  Tensor given(DType::kI32, {2, 2, 50, 3}), nearest(DType::kI32, {2, 2, 50, 3});
  const int32_t numbers[] = {-2147483647, -1, 0, 3, 5, 6, 2147483647};
  for (int64_t n = 0; n < given.num_elements(); ++n) {
    given.span<int32_t>()[n] = numbers[n * n % 7];
    nearest.span<int32_t>()[n] = std::clamp(numbers[n * n % 7], 0, 5);
  }
  inputs["buckets"] = std::move(given);
  inside["buckets"] = std::move(nearest);
  for (const Device device : TestedDevices()) {
    const NamedTensors ours = RunLsh(problem, inputs, options, device);
    EXPECT_EQ(Difference(ours, RunLsh(problem, inside, options, device)), 0);
    EXPECT_EQ(MaxDifference(ours.at("buckets").view(), inside.at("buckets").view()), 0);
  }
  EXPECT_EQ(Difference(DefineLsh(problem, inputs, options), DefineLsh(problem, inside, options)),
            0);
}

TEST(Lsh, AllDevicesChooseTheSameBuckets) {
  const Problem problem = Problem::SelfAttention(2, 2, 150, 24, true);
  const NamedTensors inputs = Random(problem);
  for (const Options& options :
       {Options{{"chunk", "16"}}, Options{{"chunk", "16"}, {"buckets", "144"}},
        With(kWrap, {{"chunk", "16"}, {"dedup", "false"}, {"rounds", "2"}})}) {
    const NamedTensors cpu = RunLsh(problem, inputs, options);
    const NamedTensors cuda = RunLsh(problem, inputs, options, KernelDevice());
    EXPECT_EQ(BucketsOf(cuda), BucketsOf(cpu)) << ToString(options);
    EXPECT_LE(MaxDifference(cuda.at("out").view(), cpu.at("out").view()), kNear);
  }
}

TEST(Lsh, FactorsOfManyBucketsAreTwoEvenNumbersNearTheRoot) {
  const auto factors = [](int64_t buckets, int64_t tokens = 0, bool factorize = true) {
    LshOptions options;
    options.buckets = buckets;
    options.factorize = factorize;
    return LshFactors(options, tokens);
  };
  using Columns = std::vector<int64_t>;  // half as many columns as buckets
  EXPECT_EQ(factors(1), (Columns{}));
  // The default is 2 tokens / chunk, where chunks have 64 tokens.
  EXPECT_EQ(factors(0, 0), (Columns{1}));
  EXPECT_EQ(factors(0, 1), (Columns{1}));
  EXPECT_EQ(factors(0, 64), (Columns{1}));
  EXPECT_EQ(factors(0, 65), (Columns{2}));
  EXPECT_EQ(factors(0, 4096), (Columns{64}));
  EXPECT_EQ(factors(0, 4097), (Columns{5, 7}));  // 10 x 14 for 130
  EXPECT_EQ(factors(0, 4097, false), (Columns{65}));
  EXPECT_EQ(factors(0, 65536), (Columns{22, 24}));  // 44 x 48 for 2048
  // Numbers that the caller chose are kept.
  EXPECT_EQ(factors(2), (Columns{1}));
  EXPECT_EQ(factors(128), (Columns{64}));
  EXPECT_EQ(factors(132), (Columns{3, 11}));
  EXPECT_EQ(factors(144), (Columns{6, 6}));
  EXPECT_EQ(factors(144, 0, false), (Columns{72}));
  EXPECT_EQ(factors(512), (Columns{8, 16}));
  EXPECT_EQ(factors(65536), (Columns{128, 128}));
  EXPECT_EQ(factors(268), (Columns{1, 67}));  // 4 times a prime
  EXPECT_EQ(factors(130), (Columns{65}));     // twice an odd number is not a product of even ones
  EXPECT_EQ(factors(134), (Columns{67}));
}

TEST(Lsh, AHeadWithRotationsOfItsOwnHashesAsIfItWereAlone) {
  const Problem problem = Problem::SelfAttention(2, 3, 90, 16, true);
  const Problem alone = Problem::SelfAttention(2, 1, 90, 16, true);
  const NamedTensors inputs = Random(problem);
  for (const char* count : {"12", "144"}) {
    const Options shared = {{"rounds", "2"}, {"chunk", "8"}, {"buckets", count}};
    const Options own = With(shared, {{"per_head", "true"}});
    const Tensor rotations = RotationsOf(problem, own);
    ASSERT_EQ(rotations.dim(0), 3);
    const NamedTensors defined = DefineLsh(problem, inputs, own);
    for (int64_t h = 0; h < 3; ++h) {
      NamedTensors of_head, parameters;
      for (const char* name : {"q", "v"}) {
        of_head[name] = Tensor(DType::kF32, {2, 1, 90, 16});
        CopyElements(Slice(inputs.at(name).view(), 1, h, 1), of_head[name].view());
      }
      Tensor& its = parameters["rotations"] =
          Tensor(DType::kF32, {16, rotations.dim(2), rotations.dim(3)});
      CopyElements(Slice(rotations.view(), 0, h, 1), SplitAxis(its.view(), 0, 1));
      const auto head = [h](const NamedTensors& outputs, const char* name) {
        return Slice(outputs.at(name).view(), 1, h, 1);
      };
      const NamedTensors expected = DefineLsh(alone, of_head, shared, &parameters);
      for (const char* name : {"buckets", "out"}) {
        EXPECT_EQ(MaxDifference(head(defined, name), expected.at(name).view()), 0) << name;
      }
      for (const Device device : TestedDevices()) {
        const NamedTensors ours = RunLsh(problem, inputs, own, device);
        EXPECT_EQ(MaxDifference(head(ours, "buckets"), expected.at("buckets").view()), 0);
        EXPECT_LE(MaxDifference(head(ours, "out"), expected.at("out").view()),
                  Fp32Bound(inputs.at("v").view()));
      }
    }
  }
}

TEST(Lsh, HeadsHashWithTheSameRotationsUnlessTheyHaveTheirOwn) {
  const Problem problem = Problem::SelfAttention(1, 2, 200, 16);
  NamedTensors inputs = Random(problem);
  CopyElements(Slice(inputs["q"].view(), 1, 0, 1), Slice(inputs["q"].view(), 1, 1, 1));
  for (const Device device : TestedDevices()) {
    for (const char* own : {"false", "true"}) {
      const NamedTensors outputs =
          RunLsh(problem, inputs, {{"buckets", "16"}, {"per_head", own}}, device);
      const auto head = [&](int64_t h) { return Slice(outputs.at("buckets").view(), 1, h, 1); };
      EXPECT_EQ(MaxDifference(head(0), head(1)) > 0, std::string(own) == "true");
    }
  }
}

TEST(Lsh, ManyBucketsAreThoseOfTheDefinition) {
  const Problem problem = Problem::SelfAttention(1, 2, 130, 16, true);
  const NamedTensors inputs = Random(problem);
  for (const int count : {130, 132, 144, 200, 256, 500, 512}) {
    const Options options = {{"rounds", "2"}, {"chunk", "8"}, {"buckets", std::to_string(count)}};
    const NamedTensors defined = DefineLsh(problem, inputs, options);
    for (const int bucket : BucketsOf(defined)) ASSERT_LT(bucket, count);
    for (const Device device : TestedDevices()) {
      const NamedTensors ours = RunLsh(problem, inputs, options, device);
      EXPECT_EQ(BucketsOf(ours), BucketsOf(defined)) << count;
      EXPECT_LE(MaxDifference(ours.at("out").view(), defined.at("out").view()),
                Fp32Bound(inputs.at("v").view()));
    }
  }
}

TEST(Lsh, TheDefinitionTakesTheLayersWordForNearTiesOnly) {
  const Problem problem = Problem::SelfAttention(1, 1, 80, 16);
  for (const int count : {16, 144}) {
    const Options options = {{"buckets", std::to_string(count)}};
    NamedTensors inputs = Random(problem);
    NamedTensors computed = RunLsh(problem, inputs, options);
    const std::vector<int> buckets = BucketsOf(computed);
    DefinitionRequest request;
    request.computed = &computed;
    for (int32_t& bucket : computed["buckets"].span<int32_t>()) bucket = (bucket + 1) % count;
    EXPECT_EQ(BucketsOf(DefineLsh(problem, inputs, options, nullptr, request)), buckets);
    // For a vector of zeros all products are equal.
    Fill(inputs["q"].view(), 0);
    EXPECT_EQ(BucketsOf(DefineLsh(problem, inputs, options, nullptr, request)),
              BucketsOf(computed));
  }
}

// A product has head_dim roundings of the magnitude of its terms, and (1 + |rotation|) 2^-126 for
// each channel where numbers are denormal. Both products are that far off.
TEST(Lsh, TheDefinitionFollowsALayerUpToTheErrorsOfBothProducts) {
  struct NearTie {
    int64_t head_dim;
    float q, rotation_0, rotation_1;  // further channels are 0
    bool may_take_1;
  };
  const float u = 0x1p-24f, tiny = 0x1p-124f;
  const NearTie ties[] = {{1, 1, 1, 1 - u, true},     {1, 1, 1, 1 - 3 * u, false},
                          {1, -1, -1, -1 + u, true},  {1, -1, -1, -1 + 3 * u, false},
                          {2, 1, 1, 1 - 3 * u, true}, {2, 1, 1, 1 - 5 * u, false},
                          {1, tiny, 2, 1, true},      {1, tiny, 2.5, 1, false}};
  for (const NearTie& tie : ties) {
    Problem problem = Problem::SelfAttention(1, 1, 1, tie.head_dim);
    problem.value_dim = 5;
    NamedTensors inputs = Random(problem), parameters, computed;
    Fill(inputs["q"].view(), 0);
    inputs["q"].span<float>()[0] = tie.q;
    Fill((parameters["rotations"] = Tensor(DType::kF32, {tie.head_dim, 1, 2})).view(), 0);
    parameters["rotations"].span<float>()[0] = tie.rotation_0;
    parameters["rotations"].span<float>()[1] = tie.rotation_1;
    Fill((computed["buckets"] = Tensor(DType::kI32, {1, 1, 1, 1})).view(), 1);
    DefinitionRequest request;
    request.computed = &computed;
    EXPECT_EQ(BucketsOf(DefineLsh(problem, inputs, {{"buckets", "4"}, {"rounds", "1"}}, &parameters,
                                  request)),
              std::vector<int>{tie.may_take_1 ? 1 : 0})
        << tie.q << " on " << tie.rotation_0 << " and " << tie.rotation_1;
  }
}

// ---- Padding and NaN ----

TEST(Lsh, PaddingChangesNothingForTheTokensThereAre) {
  const Options options = {{"chunk", "8"}, {"buckets", "12"}};
  for (const bool causal : {false, true}) {
    const Problem problem = Problem::SelfAttention(1, 2, 100, 16, causal);
    NamedTensors inputs = Random(problem);
    Tensor mask(DType::kU8, {1, 100});
    std::vector<int64_t> tokens;
    for (int64_t j = 0; j < 100; ++j) {
      mask.span<uint8_t>()[j] = j % 3 != 1 && j < 90;
      if (mask.span<uint8_t>()[j] != 0) tokens.push_back(j);
    }
    const int64_t count = static_cast<int64_t>(tokens.size());
    const Problem alone = Problem::SelfAttention(1, 2, count, 16, causal);
    NamedTensors of_tokens = Random(alone);
    for (const char* name : {"q", "v"}) {
      for (int64_t n = 0; n < count; ++n) {
        CopyElements(Slice(inputs[name].view(), 2, tokens[n], 1),
                     Slice(of_tokens[name].view(), 2, n, 1));
      }
      for (int64_t j = 0; j < 100; ++j) {
        if (mask.span<uint8_t>()[j] == 0) Fill(Slice(inputs[name].view(), 2, j, 1), kNan);
      }
    }
    inputs["key_mask"] = std::move(mask);
    for (const Device device : TestedDevices()) {
      for (const Options& kind : {Options{}, kNoMask}) {
        const NamedTensors padded = RunLsh(problem, inputs, With(options, kind), device);
        const NamedTensors plain = RunLsh(alone, of_tokens, With(options, kind), device);
        for (const char* name : {"out", "log_sum_exp", "buckets"}) {
          for (int64_t n = 0; n < count; ++n) {
            ASSERT_LE(MaxDifference(Slice(padded.at(name).view(), 2, tokens[n], 1),
                                    Slice(plain.at(name).view(), 2, n, 1)),
                      kNear)
                << name << " " << n;
          }
        }
      }
    }
  }
}

// With one bucket a padded token's query sees all tokens, too.
TEST(Lsh, PaddingWithOneBucketMatchesTheDefinition) {
  const Problem problem = Problem::SelfAttention(2, 1, 70, 16);
  NamedTensors inputs = Random(problem);
  Fill((inputs["key_mask"] = Tensor(DType::kU8, {2, 70})).view(), 1);
  Fill(Slice(inputs["key_mask"].view(), 1, 60, 7), 0);
  const NamedTensors defined = DefineLsh(problem, inputs, {{"buckets", "1"}});
  for (const Device device : TestedDevices()) {
    EXPECT_LE(Difference(RunLsh(problem, inputs, {{"buckets", "1"}}, device), defined), kNear);
  }
}

// Checks that after `spoil` the rows with seen[i] are NaN, and the others unchanged.
void ExpectSpoiled(const Problem& problem, const NamedTensors& inputs, const Options& options,
                   const std::function<void(NamedTensors*)>& spoil, const std::vector<bool>& seen) {
  NamedTensors spoiled = Random(problem);
  for (const auto& [name, tensor] : inputs) spoiled[name] = tensor.Clone();
  spoil(&spoiled);
  for (const Device device : TestedDevices()) {
    const NamedTensors before = RunLsh(problem, inputs, options, device);
    const NamedTensors after = RunLsh(problem, spoiled, options, device);
    for (int64_t i = 0; i < problem.query_tokens; ++i) {
      const ConstTensorView row = Slice(after.at("out").view(), 2, i, 1);
      if (seen[i]) {
        EXPECT_TRUE(std::isnan(row.Get(0))) << i << " " << Name(device);
      } else {
        EXPECT_EQ(MaxDifference(row, Slice(before.at("out").view(), 2, i, 1)), 0)
            << i << " " << Name(device);
      }
    }
  }
}

TEST(Lsh, WhatIsNoNumberReachesOnlyThoseThatSeeIt) {
  Problem problem = Problem::SelfAttention(1, 1, 90, 8, true);
  problem.value_dim = 90;
  NamedTensors inputs = Random(problem);
  for (const Options& kind : {Options{}, Options{{"dedup", "false"}}, kNoMask, kWrap}) {
    const Options options = With(kind, {{"rounds", "3"}, {"chunk", "8"}});
    SCOPED_TRACE(ToString(options));
    inputs["buckets"] = std::move(RunLsh(problem, inputs, options).at("buckets"));
    SetUnitValues(&inputs);
    const NamedTensors weights = RunLsh(problem, inputs, With(options, {{"self_bias", "0"}}));
    const int64_t token = 37;
    std::vector<bool> seen;
    for (int64_t i = 0; i < 90; ++i) {
      seen.push_back(*weights.at("out").view().At<float>(0, 0, i, token) > 0);
    }
    EXPECT_GT(std::count(seen.begin(), seen.end(), true), 5);
    EXPECT_GT(std::count(seen.begin() + token, seen.end(), false), 5);
    for (const char* name : {"q", "v"}) {
      ExpectSpoiled(
          problem, inputs, options,
          [&](NamedTensors* spoiled) { Fill(Slice(spoiled->at(name).view(), 2, token, 1), kNan); },
          seen);
    }
    inputs.erase("buckets");
  }
}

TEST(Lsh, KeyNormSaysWhatKeysAreDividedBy) {
  // One token has |x|^2 = 4e-6: its score is 4e-6 scale / sqrt(4e-6), or / sqrt(4e-6 + 4e-6).
  const Problem problem = Problem::SelfAttention(1, 1, 1, 4);
  NamedTensors inputs = Random(problem);
  Fill(inputs["q"].view(), 1e-3);
  for (const Device device : TestedDevices()) {
    Options options = {{"scale", "1000"}, {"self_bias", "0"}};
    const auto score = [&] {
      return RunLsh(problem, inputs, options, device).at("log_sum_exp").span<float>()[0];
    };
    EXPECT_NEAR(score(), 2, 1e-6);
    options["key_norm"] = "epsilon";
    EXPECT_NEAR(score(), std::sqrt(2.0), 1e-6);
    options["scale"] = "0";
    // The bound is the precision of fp32 sums near 1.
    EXPECT_NEAR(score(), 5e-4 * std::sqrt(2.0), 1e-6);
  }
}

TEST(Lsh, AKeyIsAUnitVectorHoweverShortOrLongItsQueryIs) {
  const Problem problem = Problem::SelfAttention(1, 2, 60, 16);
  NamedTensors inputs = Random(problem);
  const float lengths[] = {1, 1e-25f, 1e-20f, 1e20f, 1e30f};
  for (int64_t n = 0; n < inputs.at("q").num_elements(); ++n) {
    inputs["q"].span<float>()[n] *= lengths[n / 16 % 5];
  }
  for (const Options& options : {Options{{"chunk", "8"}}, Options{{"buckets", "1"}}}) {
    const NamedTensors defined = DefineLsh(problem, inputs, options);
    for (const Device device : TestedDevices()) {
      EXPECT_LE(MaxDifference(RunLsh(problem, inputs, options, device).at("out").view(),
                              defined.at("out").view()),
                Fp32Bound(inputs.at("v").view()))
          << Name(device);
    }
  }
}

// ---- Pairs that rounds find ----

TEST(Lsh, MoreRoundsFindMoreKeysAndMissLessOfTheSoftmax) {
  Problem problem = Problem::SelfAttention(1, 1, 150, 16);
  problem.value_dim = 150;
  NamedTensors inputs = Random(problem);
  SetUnitValues(&inputs);
  const NamedTensors whole = RunLsh(problem, inputs, {{"buckets", "1"}, {"self_bias", "0"}});
  for (const char* bucket_mask : {"true", "false"}) {
    const Options options = {{"chunk", "8"}, {"bucket_mask", bucket_mask}, {"self_bias", "0"}};
    const Tensor rotations = RotationsOf(problem, With(options, {{"rounds", "16"}}));
    double missed = 150;
    std::vector<bool> found(150 * 150, false);
    for (const int rounds : {1, 2, 4, 8, 16}) {
      std::vector<int> first(rounds);
      std::iota(first.begin(), first.end(), 0);
      const NamedTensors parameters = Rounds(rotations, first);
      const NamedTensors ours =
          RunLsh(problem, inputs, With(options, {{"rounds", std::to_string(rounds)}}), Device::kCpu,
                 &parameters);
      double now_missed = 150;
      for (int64_t n = 0; n < 150 * 150; ++n) {
        const float weight = ours.at("out").span<float>()[n];
        ASSERT_TRUE(weight > 0 || !found[n]) << "a key was lost";
        found[n] = weight > 0;
        if (!found[n]) continue;
        // A found key has its weight of the attention over all keys, divided by the share of that
        // attention that the row has found.
        const double of_whole = whole.at("out").span<float>()[n];
        const double had = std::exp(ours.at("log_sum_exp").span<float>()[n / 150] -
                                    whole.at("log_sum_exp").span<float>()[n / 150]);
        ASSERT_NEAR(weight * had, of_whole, kNear * of_whole);
        now_missed -= of_whole;
      }
      EXPECT_LT(now_missed, 0.95 * missed) << rounds;
      missed = now_missed;
    }
  }
}

// Returns the probability that two unit vectors at distance t have the same bucket of 2 n. Their
// products with a column are a pair X, Y of normal numbers, of correlation 1 - t^2 / 2, and one
// pair has to be largest in both magnitudes, and of one sign:
//
//   p = 2 n int_(x > 0) int_(y > 0) phi(x, y) P(|X| < x, |Y| < y)^(n - 1) dx dy
//
// The integral is by the trapezoidal rule, whose error at this step is below 1e-4.
double CollisionProbability(int64_t n, double t) {
  constexpr int64_t kSteps = 700;
  constexpr double kStep = 0.01;
  const double rho = 1 - t * t / 2, rest = 1 - rho * rho;
  const auto phi = [&](double x, double y) {
    return std::exp(-(x * x - 2 * rho * x * y + y * y) / (2 * rest)) /
           (2 * std::acos(-1.0) * std::sqrt(rest));
  };
  std::vector<double> below(kSteps + 1, 0);  // P(|X| < x, |Y| < y) for each y
  double sum = 0;
  for (int64_t a = 1; a <= kSteps; ++a) {
    double strip = 0;
    for (int64_t b = 1; b <= kSteps; ++b) {
      const double x = (static_cast<double>(a) - 0.5) * kStep;
      const double y = (static_cast<double>(b) - 0.5) * kStep;
      strip += 2 * (phi(x, y) + phi(x, -y)) * kStep * kStep;
      below[b] += strip;
      sum += phi(x + kStep / 2, y + kStep / 2) * std::pow(below[b], n - 1);
    }
  }
  return 2 * static_cast<double>(n) * sum * kStep * kStep;
}

// Returns the share of `pairs` pairs of unit vectors at distance t, tokens 2 n and 2 n + 1, that no
// round shows to each other.
double ShareMissed(int64_t pairs, double t, int rounds, int buckets, uint64_t seed) {
  Problem problem = Problem::SelfAttention(1, 1, 2 * pairs, 16);
  problem.value_dim = 2 * pairs;
  NamedTensors inputs = Random(problem, seed);
  SetUnitValues(&inputs);
  const double cosine = 1 - t * t / 2, sine = std::sqrt(1 - cosine * cosine);
  for (int64_t n = 0; n < pairs; ++n) {
    float* x = inputs["q"].view().MutableAt<float>(0, 0, 2 * n);
    float* y = x + 16;
    const double of_x = std::sqrt(std::inner_product(x, x + 16, x, 0.0));
    const double along = std::inner_product(x, x + 16, y, 0.0) / of_x;
    for (int64_t c = 0; c < 16; ++c) x[c] = static_cast<float>(x[c] / of_x);
    for (int64_t c = 0; c < 16; ++c) y[c] = static_cast<float>(y[c] - along * x[c]);
    const double of_y = std::sqrt(std::inner_product(y, y + 16, y, 0.0));
    for (int64_t c = 0; c < 16; ++c) {
      y[c] = static_cast<float>(cosine * x[c] + sine * y[c] / of_y);
    }
  }
  // There is one chunk, so that only buckets hide keys.
  RunRequest request;
  request.options = {{"rounds", std::to_string(rounds)},
                     {"chunk", std::to_string(2 * pairs)},
                     {"buckets", std::to_string(buckets)}};
  request.seed = seed;
  const NamedTensors outputs = RunTechnique(Lsh(), problem, ViewsOf(inputs), request).value();
  double missed = 0;
  for (int64_t n = 0; n < pairs; ++n) {
    missed += *outputs.at("out").view().At<float>(0, 0, 2 * n, 2 * n + 1) == 0;
  }
  return missed / static_cast<double>(pairs);
}

TEST(Lsh, APairIsMissedByAllRoundsAsOftenAsThePowerSays) {
  constexpr int kSeeds = 128;
  for (const int buckets : {8, 64}) {
    double before = 1;
    for (const double t : {0.5, 1.0, std::sqrt(2.0)}) {
      const double p = CollisionProbability(buckets / 2, t);
      EXPECT_LT(p, before);
      before = p;
      for (const int rounds : {1, 2, 4, 8}) {
        double mean = 0, square = 0;
        for (int seed = 1; seed <= kSeeds; ++seed) {
          const double share = ShareMissed(32, t, rounds, buckets, seed);
          mean += share / kSeeds;
          square += share * share / kSeeds;
        }
        const double error = std::sqrt((square - mean * mean) / (kSeeds - 1));
        EXPECT_NEAR(mean, std::pow(1 - p, rounds), 4 * error)
            << "distance " << t << ", " << rounds << " rounds, " << buckets << " buckets";
      }
    }
  }
}

// Andoni et al., theorem 1: ln(1 / p) = t^2 / (4 - t^2) ln B + O(ln ln B). Below a right angle the
// first term is too small by less than ln ln B, and its relative error falls with B. Vectors at a
// right angle are hashed independently: p = 1 / B.
TEST(Lsh, TheChanceOfACommonBucketFallsWithTheDistance) {
  EXPECT_NEAR(CollisionProbability(8, std::sqrt(2.0)), 1.0 / 16, 1e-5);
  EXPECT_NEAR(CollisionProbability(32, std::sqrt(2.0)), 1.0 / 64, 1e-5);
  for (const double t : {0.3, 0.5, 1.0, 1.2}) {
    double ratio = std::numeric_limits<double>::infinity();
    for (const int64_t n : {8, 32, 256}) {
      const double log_buckets = std::log(2 * static_cast<double>(n));
      const double first_term = t * t / (4 - t * t) * log_buckets;
      const double exact = -std::log(CollisionProbability(n, t));
      EXPECT_GT(exact, first_term);
      EXPECT_LT(exact, first_term + std::log(log_buckets));
      EXPECT_LT(exact / first_term, ratio);
      ratio = exact / first_term;
    }
  }
}

// ---- Other implementations ----

// Sets rows of padded tokens to 0, as they are in the files.
void ZeroPadding(const NamedTensors& inputs, Tensor* out) {
  if (inputs.count("key_mask") == 0) return;
  const ConstTensorView mask = inputs.at("key_mask").view();
  for (int64_t b = 0; b < mask.dim(0); ++b) {
    for (int64_t i = 0; i < mask.dim(1); ++i) {
      if (*mask.At<uint8_t>(b, i) == 0) Fill(Slice(Slice(out->view(), 0, b, 1), 2, i, 1), 0);
    }
  }
}

class LshGolden : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Files, LshGolden,
                         testing::Values("own_bucket_once", "own_bucket", "across_buckets",
                                         "across_buckets_once", "hugging_face_causal",
                                         "hugging_face_padded", "hugging_face_factorized",
                                         "hugging_face_per_head", "per_head"),
                         [](const auto& file) { return std::string(file.param); });

TEST_P(LshGolden, DefinitionAndRunAreWhatOtherCodeComputes) {
  const SafetensorsFile golden =
      GoldenFile(std::string("attention/lsh/testdata/") + GetParam() + ".safetensors");
  const NamedTensors& tensors = golden.tensors;
  const Shape shape = tensors.at("q").shape();
  const Problem problem = Problem::SelfAttention(shape[0], shape[1], shape[2], shape[3],
                                                 golden.metadata.at("causal") == "true");
  Options options;
  for (const char* name :
       {"rounds", "chunk", "buckets", "bucket_mask", "dedup", "wrap", "scale", "key_norm"}) {
    options[name] = golden.metadata.at(name);
  }
  if (tensors.at("rotations").shape().size() == 4) options["per_head"] = "true";
  NamedTensors inputs, parameters;
  for (const char* name : {"q", "v"}) inputs[name] = tensors.at(name).Clone();
  parameters["rotations"] = tensors.at("rotations").Clone();
  if (tensors.count("key_padding") > 0) {
    inputs["key_mask"] = tensors.at("key_padding").CloneAs(DType::kU8);
  }
  Tensor their_buckets = tensors.at("buckets").Clone();
  ZeroPadding(inputs, &their_buckets);
  const double largest = MaxAbs(inputs.at("v").view());
  // reformer-pytorch divides by N + 1e-9.
  const double rounding = (options.at("dedup") == "true" ? 2e-9 : 1e-12) * largest;
  for (const bool given : {false, true}) {
    if (given) inputs["buckets"] = tensors.at("buckets").Clone();
    const auto expect_theirs = [&](NamedTensors ours, double bound) {
      ZeroPadding(inputs, &ours["buckets"]);
      ZeroPadding(inputs, &ours["out"]);
      EXPECT_EQ(MaxDifference(ours.at("buckets").view(), their_buckets.view()), 0);
      EXPECT_LE(MaxDifference(ours.at("out").view(), tensors.at("out").view()), bound);
    };
    expect_theirs(DefineLsh(problem, inputs, options, &parameters), rounding);
    for (const Device device : TestedDevices()) {
      SCOPED_TRACE(Name(device));
      expect_theirs(RunLsh(problem, inputs, options, device, &parameters),
                    Fp32Bound(inputs.at("v").view()));
    }
  }
}

// ---- What tools ask ----

TEST(Lsh, CostCountsWindowsAndHashes) {
  Problem problem = Problem::SelfAttention(2, 3, 7, 4);
  problem.value_dim = 5;
  const NamedTensors inputs = Random(problem);
  const auto flops = [&](const Options& options) {
    std::unique_ptr<Layer> layer = Lsh().Create(problem, options, Device::kCpu, 1).value();
    EXPECT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
    return *layer->cost().flops;
  };
  // The chunks are of 2, 2, 2 and 1 tokens: the first has 4 pairs, others 8 and the last 3.
  const Options options = {{"rounds", "5"}, {"chunk", "2"}, {"buckets", "8"}};
  EXPECT_EQ(flops(options), 2.0 * 2 * 3 * 5 * ((4 + 5) * (4 + 8 + 8 + 3) + 7 * 4 * 4));
  // The first chunk sees the last besides.
  EXPECT_EQ(flops(With(options, kWrap)),
            2.0 * 2 * 3 * 5 * ((4 + 5) * (4 + 8 + 8 + 3 + 2) + 7 * 4 * 4));
  EXPECT_EQ(flops({{"buckets", "1"}}), 2.0 * 2 * 3 * (4 + 5) * 49);
}

TEST(Lsh, WhatItDoesNotDoIsRefusedWithAReason) {
  const auto message = [](const Problem& problem, const Options& options) {
    return std::string(Lsh().Create(problem, options, Device::kCpu, 1).status().message());
  };
  const Problem problem = Problem::SelfAttention(1, 4, 10, 8);
  EXPECT_THAT(message(problem, {{"buckets", "7"}}),
              HasSubstr("buckets is 7; allowed are 0, 1 and"));
  EXPECT_THAT(message(problem, {{"wrap", "true"}}), HasSubstr("wrap with bucket_mask=false"));
  Problem other = problem;
  other.kv_tokens = 20;
  EXPECT_THAT(message(other, {}), HasSubstr("query_tokens is 10, kv_tokens is 20"));
  other = problem;
  other.kv_heads = 2;
  EXPECT_THAT(message(other, {}), HasSubstr("query_heads is 4, kv_heads is 2"));
}

// ---- The backward pass ----

std::unique_ptr<Layer> LshLayer(const Problem& problem, const Options& options) {
  return Lsh().Create(problem, options, Device::kCpu, /*seed=*/1).value();
}

// Padding reaches nothing where the loss does not read its rows, and it has no gradient.
TEST(LshBackward, PaddingHasNoGradientAndGivesNone) {
  for (const bool causal : {false, true}) {
    for (const Options& kind : {Options{}, kNoMask, kWrap}) {
      const Options options = With({{"rounds", "2"}, {"chunk", "20"}}, kind);
      SCOPED_TRACE(absl::StrCat(causal ? "causal " : "", ToString(options)));
      const Problem problem = Problem::SelfAttention(1, 2, 150, 16, causal);
      NamedTensors inputs = Random(problem);
      Fill((inputs["key_mask"] = Tensor(DType::kU8, {1, 150})).view(), 1);
      Fill(Slice(inputs["key_mask"].view(), 1, 55, 30), 0);
      const std::unique_ptr<Layer> layer = LshLayer(problem, options);
      NamedTensors g = RandomOutputGradients(*layer, 3);
      for (auto& [name, gradient] : g) Fill(Slice(gradient.view(), 2, 55, 30), 0);
      const auto gradients_with = [&](double padding) {
        for (const char* name : {"q", "v"}) Fill(Slice(inputs[name].view(), 2, 55, 30), padding);
        return GradientsOf(*layer, ViewsOf(inputs), g).value();
      };
      const NamedTensors gradients = gradients_with(0.5);
      for (const auto& [name, gradient] : gradients) {
        EXPECT_GT(MaxAbs(gradient.view()), 0.1) << name;
        EXPECT_EQ(MaxAbs(Slice(gradient.view(), 2, 55, 30)), 0) << name;
      }
      for (const auto& [name, gradient] : gradients_with(kNan)) {
        EXPECT_EQ(MaxDifference(gradient.view(), gradients.at(name).view()), 0) << name;
      }
    }
  }
}

// A token that sees only itself, whose score of -1e5 is known to 0.004, gives its value all of its
// output's gradient.
TEST(LshBackward, AValueThatItsTokenAloneSeesHasTheGradientOfItsOutput) {
  const Problem problem = Problem::SelfAttention(1, 2, 1, 16, /*causal=*/true);
  for (const char* dedup : {"false", "true"}) {
    const NamedTensors inputs = Random(problem);
    const std::unique_ptr<Layer> layer = LshLayer(problem, {{"rounds", "3"}, {"dedup", dedup}});
    const NamedTensors g = RandomOutputGradients(*layer, 3);
    const NamedTensors gradients = GradientsOf(*layer, ViewsOf(inputs), g).value();
    // Three weights of 1 / 3, each with a few roundings.
    EXPECT_LE(MaxDifference(gradients.at("v").view(), g.at("out").view()),
              0x1p-21 * MaxAbs(g.at("out").view()));
  }
}

TEST(LshBackward, RotationsHaveNoGradient) {
  const Problem problem = Problem::SelfAttention(1, 2, 100, 16);
  const std::unique_ptr<Layer> layer = LshLayer(problem, {});
  EXPECT_EQ(layer->stopped_gradients().count("rotations"), 1u);
  EXPECT_TRUE(layer->parameter_gradients().empty());
  EXPECT_TRUE(LshLayer(problem, {{"buckets", "1"}})->stopped_gradients().empty());
}

// Buckets are found again, without gradients of their own; attention has five products for two.
TEST(LshBackward, CostCountsTheHashesOnce) {
  const Problem problem = Problem::SelfAttention(2, 3, 100, 16);
  const Options options = {{"rounds", "2"}, {"chunk", "10"}, {"buckets", "4"}};
  const std::unique_ptr<Layer> layer = LshLayer(problem, options);
  const NamedTensors inputs = Random(problem);
  ASSERT_TRUE(RunLayer(*layer, ViewsOf(inputs)).ok());
  const double hashes = 2.0 * 2 * 3 * 100 * 2 * 16 * 2;
  EXPECT_EQ(*layer->backward_cost().flops - hashes, 2.5 * (*layer->cost().flops - hashes));
}

// Gradients are those of the definition with the buckets that the forward pass found, whether they
// are given or not.
TEST(LshBackward, GradientsAreThoseOfTheDefinitionInTheBucketsThatWereFound) {
  for (const bool causal : {false, true}) {
    for (const Options& kind :
         {Options{}, Options{{"buckets", "1"}}, Options{{"dedup", "false"}, {"scale", "0"}},
          kNoMask, kWrap,
          Options{{"key_norm", "epsilon"}, {"per_head", "true"}, {"self_bias", "-1"}}}) {
      const Options options = With({{"rounds", "3"}, {"chunk", "20"}}, kind);
      Problem problem = Problem::SelfAttention(2, 2, 147, 12, causal);
      problem.value_dim = 7;
      SCOPED_TRACE(absl::StrCat(causal ? "causal " : "", ToString(options)));
      NamedTensors inputs = Random(problem);
      Fill((inputs["key_mask"] = Tensor(DType::kU8, {2, 147})).view(), 1);
      for (int64_t j = 60; j < 70; ++j) *inputs["key_mask"].view().MutableAt<uint8_t>(1, j) = 0;
      const Lsh technique;
      const std::unique_ptr<Layer> layer = LshLayer(problem, options);
      const NamedTensors g = RandomOutputGradients(*layer, 3);
      EXPECT_EQ(g.size(), 2u);
      const NamedTensors found = GradientsOf(*layer, ViewsOf(inputs), g).value();
      EXPECT_EQ(found.size(), 2u);  // of q and v
      inputs["buckets"] = std::move(RunLsh(problem, inputs, options).at("buckets"));
      const NamedTensors given = GradientsOf(*layer, ViewsOf(inputs), g, /*threads=*/3).value();
      for (const auto& [name, gradient] : found) {
        EXPECT_EQ(MaxDifference(gradient.view(), given.at(name).view()), 0) << name;
      }
      const auto slopes =
          SlopesOf({&technique, problem, options, &layer->parameters(), &inputs, &g}, found);
      ASSERT_TRUE(slopes.ok()) << slopes.status();
      for (const Slope& slope : *slopes) {
        EXPECT_NEAR(slope.of_layer, slope.of_definition, slope.bound) << slope.name;
      }
    }
  }
}

}  // namespace
}  // namespace tfb::lsh
