// Engine linear against the formula of its header in float64, evaluated pair by pair.
#include "core/linear/linear.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/definition.h"
#include "core/random.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  Problem problem;
  FeatureMap map;
  double magnitude = 1;  // standard deviation of queries and keys
  bool masked = false;
  uint64_t seed = 1;
};

FeatureMap Map(Feature feature, int64_t projections, int64_t head_dim, double epsilon = 0) {
  FeatureMap map;
  map.feature = feature;
  map.projections = projections;
  map.input_scale = static_cast<float>(std::pow(static_cast<double>(head_dim), -0.25));
  map.constant = 1 / std::sqrt(static_cast<double>(map.features()));
  map.epsilon = epsilon;
  return map;
}

struct Tensors {
  explicit Tensors(const Case& c) {
    const Problem& p = c.problem;
    const auto draw = [&](const char* name, std::initializer_list<int64_t> shape,
                          double deviation) {
      Tensor tensor(DType::kF32, shape);
      FillNormal(&tensor, c.seed, name, 0, deviation);
      return tensor.CloneAs(p.dtype);
    };
    q = draw("q", {p.batch, p.query_heads, p.query_tokens, p.head_dim}, c.magnitude);
    k = draw("k", {p.batch, p.kv_heads, p.kv_tokens, p.head_dim}, c.magnitude);
    v = draw("v", {p.batch, p.kv_heads, p.kv_tokens, p.value_dim}, 1);
    w = Tensor(DType::kF32, {c.map.per_head ? p.kv_heads : 1, c.map.projections, p.head_dim});
    FillNormal(&w, c.seed, "w");
    if (!c.masked) return;
    key_mask = Tensor(DType::kU8, {p.batch, p.kv_tokens});
    const RandomStream stream(c.seed, "mask");
    for (int64_t n = 0; n < p.batch * p.kv_tokens; ++n) {
      key_mask.span<uint8_t>()[n] = stream.Uniform(n) < 0.7;
    }
  }
  LinearCall Call(const Case& c) const {
    LinearCall call;
    call.q = q.view();
    call.k = k.view();
    call.v = v.view();
    call.key_mask = key_mask.view();
    call.w = c.map.per_head
                 ? ConstTensorView(w.view())
                 : ConstTensorView(w.raw(), DType::kF32, {c.map.projections, c.problem.head_dim});
    call.map = c.map;
    return call;
  }
  Tensor q, k, v, w, key_mask;
};

struct Results {
  Tensor out, log_sum_exp;
};

// The formula, with every feature of every pair as the header defines it.
Results Naive(const Case& c, const Tensors& tensors) {
  const Problem& p = c.problem;
  const FeatureMap& map = c.map;
  const DoubleTensor q(tensors.q.view()), k(tensors.k.view()), v(tensors.v.view()),
      w(tensors.w.view());
  const double scale = map.input_scale;
  const bool exponential = map.feature != Feature::kRelu;
  const auto project = [&](const double* x, int64_t head, std::vector<double>* projections) {
    projections->clear();
    for (int64_t r = 0; r < map.projections; ++r) {
      projections->push_back(scale * Dot(w.Row(map.per_head ? head : 0, r), x, p.head_dim));
    }
    for (int64_t r = 0; map.feature == Feature::kExpPair && r < map.projections; ++r) {
      projections->push_back(-(*projections)[r]);
    }
  };
  const auto feature = [&](double projection, double half_square, double s) {
    const double value =
        exponential ? std::exp(projection - half_square - s) : std::max(projection, 0.0);
    return map.constant * (value + map.epsilon);
  };
  Results results{Tensor(DType::kF64, {p.batch, p.query_heads, p.query_tokens, p.value_dim}),
                  Tensor(DType::kF64, {p.batch, p.query_heads, p.query_tokens})};
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.query_heads; ++h) {
      const int64_t kv_head = h / p.group();
      std::vector<std::vector<double>> keys(p.kv_tokens);
      std::vector<double> half_squares(p.kv_tokens), maxima(p.kv_tokens);
      const auto seen = [&](int64_t i, int64_t j) {
        return (tensors.key_mask.empty() ||
                tensors.key_mask.span<uint8_t>()[b * p.kv_tokens + j] != 0) &&
               (!p.causal || j <= i + p.causal_offset());
      };
      for (int64_t j = 0; j < p.kv_tokens; ++j) {
        const double* x = k.Row(b, kv_head, j);
        project(x, kv_head, &keys[j]);
        half_squares[j] = scale * scale * Dot(x, x, p.head_dim) / 2;
        maxima[j] = *std::max_element(keys[j].begin(), keys[j].end());
      }
      for (int64_t i = 0; i < p.query_tokens; ++i) {
        std::vector<double> query;
        const double* x = q.Row(b, h, i);
        project(x, kv_head, &query);
        const bool stabilised = exponential && map.stabiliser != KeyStabiliser::kNone;
        const double query_s = stabilised ? *std::max_element(query.begin(), query.end()) : 0;
        double key_s = 0;
        if (stabilised) {
          key_s = -kInfinity;
          for (int64_t j = 0; j < p.kv_tokens; ++j) {
            const bool counts = map.stabiliser == KeyStabiliser::kSequence
                                    ? seen(p.query_tokens - 1, j)
                                    : seen(i, j);
            if (counts) key_s = std::max(key_s, maxima[j]);
          }
        }
        const double half_square = scale * scale * Dot(x, x, p.head_dim) / 2;
        for (double& f : query) f = feature(f, half_square, query_s);
        double* y = results.out.view().MutableAt<double>(b, h, i);
        std::fill_n(y, p.value_dim, 0.0);
        double sum = 0;
        bool any = false;
        for (int64_t j = 0; j < p.kv_tokens; ++j) {
          if (!seen(i, j)) continue;
          any = true;
          double weight = 0;
          for (size_t r = 0; r < query.size(); ++r) {
            weight += query[r] * feature(keys[j][r], half_squares[j], key_s);
          }
          sum += weight;
          for (int64_t n = 0; n < p.value_dim; ++n) y[n] += weight * v.Row(b, kv_head, j)[n];
        }
        for (double f : query) sum += any ? map.denominator_epsilon * f : 0;
        if (map.denominator_floor > 0 && any) sum = std::max(sum, map.denominator_floor);
        for (int64_t n = 0; n < p.value_dim; ++n) y[n] = sum == 0 ? 0 : y[n] / sum;
        *results.log_sum_exp.view().MutableAt<double>(b, h, i) =
            any ? std::log(sum) + query_s + key_s : -kInfinity;
      }
    }
  }
  return results;
}

// Memory full of NaN with a guard behind it.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes)
      : bytes_(bytes), tensor_(DType::kU8, {static_cast<int64_t>(bytes) + kGuard}) {
    std::memset(tensor_.raw(), 0xFF, bytes + kGuard);
  }
  ~GuardedMemory() {
    for (int64_t n = 0; n < kGuard; ++n) EXPECT_EQ(tensor_.span<uint8_t>()[bytes_ + n], 0xFF);
  }
  absl::Span<std::byte> span() {
    return absl::MakeSpan(static_cast<std::byte*>(tensor_.raw()), bytes_);
  }

 private:
  static constexpr int64_t kGuard = 256;
  size_t bytes_;
  Tensor tensor_;
};

Results EmptyResults(const Problem& p) {
  Results results{Tensor(p.dtype, {p.batch, p.query_heads, p.query_tokens, p.value_dim}),
                  Tensor(DType::kF32, {p.batch, p.query_heads, p.query_tokens})};
  Fill(results.out.view(), std::nan(""));
  Fill(results.log_sum_exp.view(), std::nan(""));
  return results;
}

Results RunEngine(const Case& c, LinearCall call, int threads = 1) {
  ThreadPool pool(threads);
  GuardedMemory workspace(LinearWorkspaceBytes(c.problem, c.map, threads));
  Results results = EmptyResults(c.problem);
  call.out = results.out.view();
  call.log_sum_exp = results.log_sum_exp.view();
  const absl::Status status = LinearCpu(c.problem, call, {&pool, workspace.span(), nullptr});
  EXPECT_TRUE(status.ok()) << status;
  return results;
}
Results RunEngine(const Case& c, const Tensors& tensors, int threads = 1) {
  return RunEngine(c, tensors.Call(c), threads);
}

bool SameBits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

std::string Describe(const Case& c) {
  return absl::StrCat(c.problem.ToString(), ", feature ", static_cast<int>(c.map.feature), ", ",
                      c.map.projections, " projections, epsilon ", c.map.epsilon,
                      c.masked ? ", masked" : "", ", magnitude ", c.magnitude);
}

// fp32 against float64. A weight is a sum of positive products, so its relative error is that of its
// exponents: w . x and |x|^2 / 2 round in proportion to |w| |x| = head_dim^(3/4) magnitude and
// |x|^2 = head_dim^(1/2) magnitude^2, a few units in 2^-24 each; sums add about 10 more. Outputs are
// means of values of up to 5; those of 16 bits are rounded once more.
void ExpectClose(const Case& c, const Results& results, const Results& expected) {
  const double head_dim = static_cast<double>(c.problem.head_dim);
  const double exponent =
      std::pow(head_dim, 0.75) * c.magnitude + std::sqrt(head_dim) * c.magnitude * c.magnitude;
  const double relative = UnitRoundoff(DType::kF32) * (10 + 2 * exponent);
  const double rounding = c.problem.dtype == DType::kF32 ? 0 : UnitRoundoff(c.problem.dtype);
  for (int64_t n = 0; n < expected.out.num_elements(); ++n) {
    const double e = expected.out.view().Get(n), y = results.out.view().Get(n);
    ASSERT_NEAR(y, e, 5 * relative + rounding * std::abs(e)) << Describe(c) << ", element " << n;
  }
  for (int64_t n = 0; n < expected.log_sum_exp.num_elements(); ++n) {
    const double e = expected.log_sum_exp.view().Get(n), y = results.log_sum_exp.view().Get(n);
    if (std::isinf(e)) {
      ASSERT_EQ(y, e) << Describe(c) << ", row " << n;
    } else {
      ASSERT_NEAR(y, e, 2 * relative + UnitRoundoff(DType::kF32) * std::abs(e))
          << Describe(c) << ", row " << n;
    }
  }
}

void ExpectEqualsFormula(const Case& c) {
  const Tensors tensors(c);
  const Results one = RunEngine(c, tensors, 1);
  ExpectClose(c, one, Naive(c, tensors));
  const Results two = RunEngine(c, tensors, 2);
  EXPECT_TRUE(SameBits(one.out, two.out)) << Describe(c);
  EXPECT_TRUE(SameBits(one.log_sum_exp, two.log_sum_exp)) << Describe(c);
}

Problem Sizes(int64_t query_tokens, int64_t kv_tokens, bool causal, int64_t heads = 2,
              int64_t head_dim = 16) {
  Problem problem = Problem::SelfAttention(1, heads, query_tokens, head_dim, causal);
  problem.kv_tokens = kv_tokens;
  return problem;
}

constexpr Feature kFeatures[] = {Feature::kExp, Feature::kExpPair, Feature::kRelu};

TEST(Linear, EqualsItsFormulaOnTokensAroundTheChunkEdges) {
  for (const int64_t tokens : {0, 1, 7, 63, 64, 65, 127, 128, 129, 200}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-4}) {
        ExpectEqualsFormula({Sizes(tokens, tokens, causal), Map(Feature::kExp, 24, 16, epsilon)});
      }
    }
  }
}

TEST(Linear, EqualsItsFormulaWithEachFeatureStabiliserAndEpsilon) {
  for (const Feature feature : kFeatures) {
    for (const KeyStabiliser stabiliser :
         {KeyStabiliser::kRunning, KeyStabiliser::kSequence, KeyStabiliser::kNone}) {
      for (const bool causal : {false, true}) {
        for (const double epsilon : {0.0, 1e-6, 1e-2}) {
          for (const double denominator_epsilon : {0.0, 1e-3}) {
            Case c{Sizes(130, 130, causal), Map(feature, 20, 16, epsilon)};
            c.map.stabiliser = stabiliser;
            c.map.denominator_epsilon = denominator_epsilon;
            c.masked = true;
            ExpectEqualsFormula(c);
          }
        }
      }
    }
  }
}

TEST(Linear, EqualsItsFormulaAtEveryHeadAndValueWidth) {
  for (const int64_t head_dim : {1, 7, 40, 64, 80, 128, 256}) {
    for (const int64_t value_dim : {1, 33, 64, 80, 256}) {
      for (const bool causal : {false, true}) {
        Case c{Sizes(70, 70, causal, 1, head_dim), Map(Feature::kExp, 48, head_dim, 1e-6)};
        c.problem.value_dim = value_dim;
        c.seed = head_dim + value_dim;
        ExpectEqualsFormula(c);
      }
    }
  }
}

TEST(Linear, EqualsItsFormulaWithAnyNumberOfFeatures) {
  for (const int64_t projections : {1, 5, 63, 64, 65, 256}) {
    for (const Feature feature : kFeatures) {
      ExpectEqualsFormula({Sizes(66, 66, false), Map(feature, projections, 16, 1e-5)});
      ExpectEqualsFormula({Sizes(66, 66, true), Map(feature, projections, 16, 1e-5)});
    }
  }
}

TEST(Linear, EqualsItsFormulaWhereKeysAndQueriesDifferInNumber) {
  for (const auto& [queries, keys] : std::vector<std::pair<int64_t, int64_t>>{{1, 200},
                                                                              {3, 64},
                                                                              {5, 130},
                                                                              {64, 65},
                                                                              {65, 64},
                                                                              {130, 5},
                                                                              {200, 1},
                                                                              {0, 9},
                                                                              {9, 0},
                                                                              {70, 190},
                                                                              {190, 70}}) {
    for (const bool causal : {false, true}) {
      for (const int64_t heads : {1, 9}) {
        ExpectEqualsFormula(
            {Sizes(queries, keys, causal, heads), Map(Feature::kExp, 16, 16, 1e-4)});
      }
    }
  }
}

TEST(Linear, EqualsItsFormulaWithGroupedHeadsBatchesAndAMatrixPerHead) {
  for (const auto& [query_heads, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{4, 1}, {6, 2}, {16, 8}}) {
    for (const bool per_head : {false, true}) {
      for (const bool causal : {false, true}) {
        Case c{Sizes(150, 150, causal, query_heads), Map(Feature::kExp, 16, 16, 1e-4)};
        c.problem.batch = 2;
        c.problem.kv_heads = kv_heads;
        c.map.per_head = per_head;
        c.masked = true;
        ExpectEqualsFormula(c);
      }
    }
  }
}

TEST(Linear, EqualsItsFormulaWhereFewHeadsAreCutIntoGroupsAndSteps) {
  for (const bool causal : {false, true}) {
    Case c{Sizes(1300, 1300, causal, 1), Map(Feature::kExp, 16, 16, 1e-6)};
    ExpectEqualsFormula(c);
  }
}

TEST(Linear, EqualsItsFormulaInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool causal : {false, true}) {
      Case c{Sizes(100, 100, causal), Map(Feature::kExp, 32, 16, 1e-6)};
      c.problem.dtype = dtype;
      ExpectEqualsFormula(c);
    }
  }
}

// Keys grow along the sequence by e^60 or so in feature: sums kept against one fixed reference
// would underflow or overflow.
TEST(Linear, FollowsAMaximumThatRisesAndOneThatFalls) {
  for (const bool rising : {true, false}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-6}) {
        Case c{Sizes(300, 300, causal, 1, 8), Map(Feature::kExp, 32, 8, epsilon)};
        Tensors tensors(c);
        for (int64_t j = 0; j < 300; ++j) {
          const double factor = 6.0 * static_cast<double>(rising ? j : 299 - j) / 300;
          for (int64_t n = 0; n < 8; ++n) {
            tensors.k.span<float>()[j * 8 + n] *= static_cast<float>(factor);
            tensors.q.span<float>()[j * 8 + n] *= 2;
          }
        }
        c.magnitude = 6;
        ExpectClose(c, RunEngine(c, tensors), Naive(c, tensors));
      }
    }
  }
}

// exp(-|k|^2 / 2) is about e^-450, below what fp32 holds; the ratio of sums does not mind.
TEST(Linear, KeepsItsAccuracyWhereTheStabilisedFeaturesUnderflow) {
  for (const bool causal : {false, true}) {
    Case c{Sizes(90, 90, causal, 1, 4), Map(Feature::kExp, 16, 4, 0)};
    c.magnitude = 1;
    Tensors tensors(c);
    for (float& x : tensors.k.span<float>()) x = 20 + x;
    for (float& x : tensors.q.span<float>()) x = 0.1f * x;
    const Results results = RunEngine(c, tensors);
    c.magnitude = 20;
    ExpectClose(c, results, Naive(c, tensors));
  }
}

TEST(Linear, NeverReadsMaskedKeysAndValues) {
  for (const bool causal : {false, true}) {
    for (const int64_t heads : {1, 9}) {
      Case c{Sizes(140, 140, causal, heads), Map(Feature::kExp, 16, 16, 1e-4)};
      c.masked = true;
      Tensors tensors(c);
      const Results clean = RunEngine(c, tensors);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t j = 0; j < 140; ++j) {
          if (tensors.key_mask.span<uint8_t>()[j] != 0) continue;
          Fill(Slice(Slice(tensors.k.view(), 1, h, 1), 2, j, 1), std::nan(""));
          Fill(Slice(Slice(tensors.v.view(), 1, h, 1), 2, j, 1), std::nan(""));
        }
      }
      const Results poisoned = RunEngine(c, tensors);
      EXPECT_TRUE(SameBits(clean.out, poisoned.out));
      EXPECT_TRUE(SameBits(clean.log_sum_exp, poisoned.log_sum_exp));
    }
  }
}

TEST(Linear, GivesZeroAndMinusInfinityWhereEveryKeyIsMasked) {
  for (const bool causal : {false, true}) {
    for (const double epsilon : {0.0, 1e-4}) {
      Case c{Sizes(70, 70, causal), Map(Feature::kExp, 16, 16, epsilon)};
      c.masked = true;
      Tensors tensors(c);
      Fill(tensors.key_mask.view(), 0);
      Fill(tensors.k.view(), std::nan(""));
      const Results results = RunEngine(c, tensors);
      for (const float y : results.out.span<float>()) EXPECT_EQ(y, 0);
      for (const float l : results.log_sum_exp.span<float>()) EXPECT_EQ(l, -kInfinity);
    }
  }
}

TEST(Linear, LetsANaNInASeenKeyOrValueReachExactlyTheRowsThatSeeIt) {
  for (const bool in_values : {false, true}) {
    for (const Feature feature : kFeatures) {
      for (const int64_t heads : {1, 9}) {
        Case c{Sizes(200, 200, true, heads), Map(feature, 16, 16, 1e-4)};
        Tensors tensors(c);
        const Results clean = RunEngine(c, tensors);
        const int64_t poisoned = 77;
        Tensor& tensor = in_values ? tensors.v : tensors.k;
        tensor.span<float>()[poisoned * 16 + 3] = std::nanf("");
        const Results results = RunEngine(c, tensors);
        for (int64_t i = 0; i < 200; ++i) {
          const float y = *results.out.view().At<float>(0, 0, i, 3);
          if (i < poisoned) {
            EXPECT_EQ(y, *clean.out.view().At<float>(0, 0, i, 3)) << i;
          } else {
            EXPECT_TRUE(std::isnan(y)) << i;
          }
        }
      }
    }
  }
}

TEST(Linear, LetsANaNInANonCausalKeyValueOrQueryReachTheOutput) {
  for (const char which : {'q', 'k', 'v'}) {
    Case c{Sizes(100, 100, false), Map(Feature::kExp, 16, 16, 1e-4)};
    Tensors tensors(c);
    Tensor& tensor = which == 'q' ? tensors.q : which == 'k' ? tensors.k : tensors.v;
    tensor.span<float>()[70 * 16 + 3] = std::nanf("");
    const Results results = RunEngine(c, tensors);
    EXPECT_TRUE(std::isnan(*results.out.view().At<float>(0, 0, 70, 3)));
    EXPECT_EQ(std::isnan(*results.out.view().At<float>(0, 0, 71, 3)), which != 'q');
    EXPECT_FALSE(std::isnan(*results.out.view().At<float>(0, 1, 70, 3)));
  }
}

TEST(Linear, DoesNotLookAhead) {
  for (const Feature feature : kFeatures) {
    for (const int64_t heads : {1, 9}) {
      Case c{Sizes(260, 260, true, heads), Map(feature, 16, 16, 1e-2)};
      Tensors tensors(c);
      const Results before = RunEngine(c, tensors);
      for (const int64_t t : {0, 31, 63, 64, 200}) {
        Tensors changed(c);
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t n = (h * 260 + t + 1) * 16; n < (h + 1) * 260 * 16; ++n) {
            changed.q.span<float>()[n] = 1;
            changed.k.span<float>()[n] *= 9;
            changed.v.span<float>()[n] = -5;
          }
        }
        const Results after = RunEngine(c, changed);
        for (int64_t h = 0; h < heads; ++h) {
          EXPECT_EQ(std::memcmp(before.out.view().At<float>(0, h), after.out.view().At<float>(0, h),
                                (t + 1) * 16 * sizeof(float)),
                    0)
              << "token " << t << ", head " << h;
        }
      }
    }
  }
}

TEST(Linear, TheLastCausalRowIsTheNonCausalOne) {
  for (const Feature feature : kFeatures) {
    Case c{Sizes(150, 150, true), Map(feature, 32, 16, 1e-4)};
    const Tensors tensors(c);
    const Results causal = RunEngine(c, tensors);
    c.problem.causal = false;
    const Results all = RunEngine(c, tensors);
    for (int64_t n = 0; n < 16; ++n) {
      EXPECT_NEAR(*causal.out.view().At<float>(0, 1, 149, n),
                  *all.out.view().At<float>(0, 1, 149, n), 2e-5);
    }
  }
}

TEST(Linear, ReadsAndWritesViewsOfAnyStride) {
  for (const bool causal : {false, true}) {
    Case c{Sizes(100, 100, causal, 3, 12), Map(Feature::kExp, 16, 12, 1e-4)};
    c.problem.batch = 2;
    const Tensors tensors(c);
    const Results expected = RunEngine(c, tensors);
    // [batch, tokens, channels, heads]: heads fastest, as after a projection without a transpose,
    // and outputs likewise.
    const auto scatter = [](const Tensor& from, Tensor* storage) {
      const Shape s = from.shape();
      *storage = Tensor(from.dtype(), {s[0], s[2], s[3], s[1]});
      TensorView view = Transpose(Transpose(storage->view(), 1, 3), 2, 3);
      CopyElements(from.view(), view);
      return view;
    };
    Tensor q, k, v, out;
    LinearCall call = tensors.Call(c);
    call.q = scatter(tensors.q, &q);
    call.k = scatter(tensors.k, &k);
    call.v = scatter(tensors.v, &v);
    call.out = scatter(expected.out, &out);
    Fill(call.out, std::nan(""));
    ThreadPool pool(2);
    GuardedMemory workspace(LinearWorkspaceBytes(c.problem, c.map, 2));
    ASSERT_TRUE(LinearCpu(c.problem, call, {&pool, workspace.span(), nullptr}).ok());
    Tensor gathered(DType::kF32, expected.out.shape());
    CopyElements(call.out, gathered.view());
    EXPECT_TRUE(SameBits(gathered, expected.out));
  }
}

TEST(Linear, AFloorHoldsTheDenominatorAndCountsTheRowsItHeld) {
  Case c{Sizes(80, 80, true), Map(Feature::kRelu, 8, 16, 0)};
  c.map.denominator_floor = 2;
  const Tensors tensors(c);
  std::atomic<int64_t> held{0};
  LinearCall call = tensors.Call(c);
  call.rows_without_weight = &held;
  ExpectClose(c, RunEngine(c, call), Naive(c, tensors));
  EXPECT_GT(held.load(), 0);
  EXPECT_LT(held.load(), 160);
}

// Appends in the given segments, over again until all tokens are taken.
Results AppendAll(const Case& c, const Tensors& tensors, const std::vector<int64_t>& segments,
                  int threads) {
  const Problem& p = c.problem;
  ThreadPool pool(threads);
  GuardedMemory workspace(LinearWorkspaceBytes(p, c.map, threads));
  GuardedMemory state(LinearStateBytes(p, c.map));
  LinearReset(p, c.map, state.span());
  Results results = EmptyResults(p);
  size_t next = 0;
  for (int64_t begin = 0; begin < p.kv_tokens;) {
    const int64_t tokens = std::min(segments[next++ % segments.size()], p.kv_tokens - begin);
    LinearCall call = tensors.Call(c);
    call.q = Slice(call.q, 2, begin, tokens);
    call.k = Slice(call.k, 2, begin, tokens);
    call.v = Slice(call.v, 2, begin, tokens);
    if (!call.key_mask.empty()) call.key_mask = Slice(call.key_mask, 1, begin, tokens);
    call.out = Slice(results.out.view(), 2, begin, tokens);
    call.log_sum_exp = Slice(results.log_sum_exp.view(), 2, begin, tokens);
    const absl::Status status =
        LinearAppend(p, tokens, call, state.span(), {&pool, workspace.span(), nullptr});
    EXPECT_TRUE(status.ok()) << status;
    begin += tokens;
  }
  return results;
}

TEST(Linear, AppendingInAnySplitEqualsTheWholeSequence) {
  for (const Feature feature : kFeatures) {
    for (const int64_t heads : {1, 9}) {
      for (const double epsilon : {0.0, 1e-3}) {
        Case c{Sizes(260, 260, true, heads), Map(feature, 20, 16, epsilon)};
        c.masked = true;
        const Tensors tensors(c);
        const Results expected = Naive(c, tensors);
        for (const auto& segments :
             std::vector<std::vector<int64_t>>{{1}, {3}, {5, 64, 1}, {200, 60}, {260}}) {
          const Results one = AppendAll(c, tensors, segments, 1);
          ExpectClose(c, one, expected);
          EXPECT_TRUE(SameBits(one.out, AppendAll(c, tensors, segments, 3).out));
        }
      }
    }
  }
}

TEST(Linear, AppendRefusesAMaximumOverTheWholeSequence) {
  Case c{Sizes(8, 8, true), Map(Feature::kExp, 8, 16, 1e-4)};
  c.map.stabiliser = KeyStabiliser::kSequence;
  const Tensors tensors(c);
  GuardedMemory state(LinearStateBytes(c.problem, c.map));
  EXPECT_EQ(LinearAppend(c.problem, 8, tensors.Call(c), state.span(), {}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Linear, TheStateDoesNotGrowWithTheSequence) {
  const FeatureMap map = Map(Feature::kExp, 256, 64);
  EXPECT_EQ(LinearStateBytes(Sizes(100, 100, true, 8, 64), map),
            LinearStateBytes(Sizes(1000000, 1000000, true, 8, 64), map));
  // The scratch of a causal run does not either, from the step of 16 chunks on.
  EXPECT_EQ(LinearWorkspaceBytes(Sizes(2000, 2000, true, 1, 64), map, 2),
            LinearWorkspaceBytes(Sizes(2000000, 2000000, true, 1, 64), map, 2));
}

}  // namespace
}  // namespace tfb
