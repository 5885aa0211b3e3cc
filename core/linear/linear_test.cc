// Tests engine linear against the formula of its header in float64, evaluated pair by pair.
#include "core/linear/linear.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/linear/linear_testing.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

LinearResults RunEngine(const LinearCase& c, LinearCall call, int threads = 1) {
  ThreadPool pool(threads);
  GuardedMemory workspace(LinearWorkspaceBytes(c.problem, c.map, threads));
  LinearResults results = EmptyResults(c.problem);
  call.out = results.out.view();
  call.log_sum_exp = results.log_sum_exp.view();
  const absl::Status status = LinearCpu(c.problem, call, {&pool, workspace.span(), nullptr});
  EXPECT_TRUE(status.ok()) << status;
  return results;
}
LinearResults RunEngine(const LinearCase& c, const LinearTensors& tensors, int threads = 1) {
  return RunEngine(c, tensors.Call(c), threads);
}

void ExpectEqualsFormula(const LinearCase& c) {
  const LinearTensors tensors(c);
  const LinearResults one = RunEngine(c, tensors, 1);
  ExpectClose(c, one, DefineLinear(c, tensors));
  const LinearResults two = RunEngine(c, tensors, 2);
  EXPECT_TRUE(SameBits(one.out, two.out)) << Describe(c);
  EXPECT_TRUE(SameBits(one.log_sum_exp, two.log_sum_exp)) << Describe(c);
}

TEST(Linear, EqualsItsFormulaOnTokensAroundTheChunkEdges) {
  for (const int64_t tokens : {0, 1, 7, 63, 64, 65, 127, 128, 129, 200}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-4}) {
        ExpectEqualsFormula(
            {LinearProblem(tokens, tokens, causal), LinearMap(Feature::kExp, 24, 16, epsilon)});
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
            LinearCase c{LinearProblem(130, 130, causal), LinearMap(feature, 20, 16, epsilon)};
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
        LinearCase c{LinearProblem(70, 70, causal, 1, head_dim),
                     LinearMap(Feature::kExp, 48, head_dim, 1e-6)};
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
      ExpectEqualsFormula(
          {LinearProblem(66, 66, false), LinearMap(feature, projections, 16, 1e-5)});
      ExpectEqualsFormula({LinearProblem(66, 66, true), LinearMap(feature, projections, 16, 1e-5)});
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
            {LinearProblem(queries, keys, causal, heads), LinearMap(Feature::kExp, 16, 16, 1e-4)});
      }
    }
  }
}

TEST(Linear, EqualsItsFormulaWithGroupedHeadsBatchesAndAMatrixPerHead) {
  for (const auto& [query_heads, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{4, 1}, {6, 2}, {16, 8}}) {
    for (const bool per_head : {false, true}) {
      for (const bool causal : {false, true}) {
        LinearCase c{LinearProblem(150, 150, causal, query_heads),
                     LinearMap(Feature::kExp, 16, 16, 1e-4)};
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
    LinearCase c{LinearProblem(1300, 1300, causal, 1), LinearMap(Feature::kExp, 16, 16, 1e-6)};
    ExpectEqualsFormula(c);
  }
}

TEST(Linear, EqualsItsFormulaInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(100, 100, causal), LinearMap(Feature::kExp, 32, 16, 1e-6)};
      c.problem.dtype = dtype;
      ExpectEqualsFormula(c);
    }
  }
}

// The logarithms of features grow along the sequence by 60 or so: sums relative to one fixed
// reference would underflow or overflow.
TEST(Linear, EqualsItsFormulaOnDirectionsWithGatesAndWithout) {
  for (const Feature feature : {Feature::kSinCos, Feature::kRelu}) {
    for (const bool gated : {false, true}) {
      for (const int64_t tokens : {1, 64, 130, 1300}) {
        for (const int64_t heads : {1, 9}) {
          LinearCase c{LinearProblem(tokens, tokens, true, heads, 8),
                       DirectionMap(feature, 70, gated)};
          c.masked = tokens == 130;
          c.magnitude = 3;
          ExpectEqualsFormula(c);
          if (gated) continue;
          c.problem.causal = false;
          ExpectEqualsFormula(c);
        }
      }
    }
  }
}

// |x|^2 / 2 is that of the unit vector times input_scale, not of the input.
TEST(Linear, EqualsItsFormulaOnDirectionsWithExponentials) {
  for (const Feature feature : {Feature::kExp, Feature::kExpPair}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-2}) {
        for (const int64_t tokens : {3, 130}) {
          LinearCase c{LinearProblem(tokens, tokens, causal, 1, 8),
                       LinearMap(feature, 40, 8, epsilon)};
          c.map.unit = true;
          c.map.input_scale = 1.25;
          c.map.length_epsilon = epsilon == 0 ? 0 : 2;
          c.magnitude = 3;
          ExpectEqualsFormula(c);
        }
      }
    }
  }
}

TEST(Linear, GatesWorkWhereKeysAndQueriesDifferInNumberInSixteenBitsAndPerHead) {
  for (const int64_t queries : {30, 150}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      LinearCase c{LinearProblem(queries, 100, true, 4, 16),
                   DirectionMap(Feature::kSinCos, 40, true)};
      c.problem.kv_heads = 2;
      c.problem.value_dim = 24;
      c.problem.batch = 2;
      c.problem.dtype = dtype;
      c.map.per_head = true;
      ExpectEqualsFormula(c);
    }
  }
}

TEST(Linear, GatesThatForgetAllAndGatesThatKeepAll) {
  for (const float bias : {-30.0f, 30.0f}) {
    LinearCase c{LinearProblem(200, 200, true, 2, 8), DirectionMap(Feature::kSinCos, 70, true)};
    LinearTensors tensors(c);
    for (int64_t h = 0; h < 2; ++h) *tensors.gate.view().MutableAt<float>(h, 8) = bias;
    if (bias > 0) c.map.denominator_floor = 0;  // all sums are below the floor
    // Logarithms of 64 gates sum to 64 x 18, of which exponents keep 2^-14; few keys have any
    // weight.
    ExpectClose(c, RunEngine(c, tensors), DefineLinear(c, tensors),
                bias < 0 ? std::ldexp(1, -20) : 0);
  }
}

TEST(Linear, FollowsAMaximumThatRisesAndOneThatFalls) {
  for (const bool rising : {true, false}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-6}) {
        LinearCase c{LinearProblem(300, 300, causal, 1, 8),
                     LinearMap(Feature::kExp, 32, 8, epsilon)};
        LinearTensors tensors(c);
        for (int64_t j = 0; j < 300; ++j) {
          const double factor = 6.0 * static_cast<double>(rising ? j : 299 - j) / 300;
          for (int64_t n = 0; n < 8; ++n) {
            tensors.k.span<float>()[j * 8 + n] *= static_cast<float>(factor);
            tensors.q.span<float>()[j * 8 + n] *= 2;
          }
        }
        c.magnitude = 6;
        ExpectClose(c, RunEngine(c, tensors), DefineLinear(c, tensors));
      }
    }
  }
}

// exp(-|k|^2 / 2) is about e^-450, below fp32's range; the ratio of sums is not affected.
TEST(Linear, KeepsItsAccuracyWhereTheStabilisedFeaturesUnderflow) {
  for (const bool causal : {false, true}) {
    LinearCase c{LinearProblem(90, 90, causal, 1, 4), LinearMap(Feature::kExp, 16, 4, 0)};
    c.magnitude = 1;
    LinearTensors tensors(c);
    for (float& x : tensors.k.span<float>()) x = 20 + x;
    for (float& x : tensors.q.span<float>()) x = 0.1f * x;
    const LinearResults results = RunEngine(c, tensors);
    c.magnitude = 20;
    ExpectClose(c, results, DefineLinear(c, tensors));
  }
}

TEST(Linear, NeverReadsMaskedKeysAndValues) {
  for (const bool causal : {false, true}) {
    for (const int64_t heads : {1, 9}) {
      LinearCase c{LinearProblem(140, 140, causal, heads), LinearMap(Feature::kExp, 16, 16, 1e-4)};
      c.masked = true;
      LinearTensors tensors(c);
      const LinearResults clean = RunEngine(c, tensors);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t j = 0; j < 140; ++j) {
          if (tensors.key_mask.span<uint8_t>()[j] != 0) continue;
          Fill(Slice(Slice(tensors.k.view(), 1, h, 1), 2, j, 1), std::nan(""));
          Fill(Slice(Slice(tensors.v.view(), 1, h, 1), 2, j, 1), std::nan(""));
        }
      }
      const LinearResults poisoned = RunEngine(c, tensors);
      EXPECT_TRUE(SameBits(clean.out, poisoned.out));
      EXPECT_TRUE(SameBits(clean.log_sum_exp, poisoned.log_sum_exp));
    }
  }
}

TEST(Linear, GivesZeroAndMinusInfinityWhereEveryKeyIsMasked) {
  for (const bool causal : {false, true}) {
    for (const double epsilon : {0.0, 1e-4}) {
      LinearCase c{LinearProblem(70, 70, causal), LinearMap(Feature::kExp, 16, 16, epsilon)};
      c.masked = true;
      LinearTensors tensors(c);
      Fill(tensors.key_mask.view(), 0);
      Fill(tensors.k.view(), std::nan(""));
      tensors.q.span<float>()[5] = std::nanf("");
      const LinearResults results = RunEngine(c, tensors);
      for (const float y : results.out.span<float>()) EXPECT_EQ(y, 0);
      for (const float l : results.log_sum_exp.span<float>()) EXPECT_EQ(l, -kInfinity);
    }
  }
}

TEST(Linear, LetsANaNInASeenKeyOrValueReachExactlyTheRowsThatSeeIt) {
  for (const bool in_values : {false, true}) {
    for (const Feature feature : kFeatures) {
      for (const int64_t heads : {1, 9}) {
        LinearCase c{LinearProblem(200, 200, true, heads), LinearMap(feature, 16, 16, 1e-4)};
        LinearTensors tensors(c);
        const LinearResults clean = RunEngine(c, tensors);
        const int64_t poisoned = 77;
        Tensor& tensor = in_values ? tensors.v : tensors.k;
        tensor.span<float>()[poisoned * 16 + 3] = std::nanf("");
        const LinearResults results = RunEngine(c, tensors);
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

TEST(Linear, ARowThatSeesOnlyKeysOfNaNIsNaN) {
  ForEachNaNKeys(kKeysOfGroups, [](const NaNKeys& keys) {
    for (const int threads : {1, 3}) {
      ExpectNaNOfFormula(keys, RunEngine(keys.c, keys.tensors, threads),
                         RunEngine(keys.c, keys.clean, threads));
    }
  });
}

TEST(Linear, EqualsItsFormulaWhereSquaresOfKeysAreBeyondFp32) {
  ForEachLongKeys(kKeysOfGroups, [](const LongKeys& keys) {
    for (const int threads : {1, 3}) {
      ExpectLongKeysOfFormula(keys, RunEngine(keys.c, keys.tensors, threads));
    }
  });
}

TEST(Linear, AKeyWhoseSquareIsJustWithinFp32HasWeightWithoutEpsilon) {
  for (const bool causal : {false, true}) {
    const OneLongKey one(causal);
    const LinearResults results = RunEngine(one.c, one.tensors);
    EXPECT_LE(MaxDifference(results.out.view(), one.tensors.v.view()), 1e-6);
  }
}

TEST(Linear, LetsANaNInANonCausalKeyValueOrQueryReachTheOutput) {
  for (const char which : {'q', 'k', 'v'}) {
    LinearCase c{LinearProblem(100, 100, false), LinearMap(Feature::kExp, 16, 16, 1e-4)};
    LinearTensors tensors(c);
    Tensor& tensor = which == 'q' ? tensors.q : which == 'k' ? tensors.k : tensors.v;
    tensor.span<float>()[70 * 16 + 3] = std::nanf("");
    const LinearResults results = RunEngine(c, tensors);
    EXPECT_TRUE(std::isnan(*results.out.view().At<float>(0, 0, 70, 3)));
    EXPECT_EQ(std::isnan(*results.out.view().At<float>(0, 0, 71, 3)), which != 'q');
    EXPECT_FALSE(std::isnan(*results.out.view().At<float>(0, 1, 70, 3)));
  }
}

TEST(Linear, DoesNotLookAhead) {
  for (const Feature feature : kFeatures) {
    for (const int64_t heads : {1, 9}) {
      LinearCase c{LinearProblem(260, 260, true, heads), LinearMap(feature, 16, 16, 1e-2)};
      LinearTensors tensors(c);
      const LinearResults before = RunEngine(c, tensors);
      for (const int64_t t : {0, 31, 63, 64, 200}) {
        LinearTensors changed(c);
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t n = (h * 260 + t + 1) * 16; n < (h + 1) * 260 * 16; ++n) {
            changed.q.span<float>()[n] = 1;
            changed.k.span<float>()[n] *= 9;
            changed.v.span<float>()[n] = -5;
          }
        }
        const LinearResults after = RunEngine(c, changed);
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
    LinearCase c{LinearProblem(150, 150, true), LinearMap(feature, 32, 16, 1e-4)};
    const LinearTensors tensors(c);
    const LinearResults causal = RunEngine(c, tensors);
    c.problem.causal = false;
    const LinearResults all = RunEngine(c, tensors);
    for (int64_t n = 0; n < 16; ++n) {
      EXPECT_NEAR(*causal.out.view().At<float>(0, 1, 149, n),
                  *all.out.view().At<float>(0, 1, 149, n), 2e-5);
    }
  }
}

TEST(Linear, ReadsAndWritesViewsOfAnyStride) {
  for (const bool causal : {false, true}) {
    LinearCase c{LinearProblem(100, 100, causal, 3, 12), LinearMap(Feature::kExp, 16, 12, 1e-4)};
    c.problem.batch = 2;
    const LinearTensors tensors(c);
    const LinearResults expected = RunEngine(c, tensors);
    // The layout is [batch, tokens, channels, heads], heads fastest, as after a projection without
    // a transpose; that of the outputs is the same.
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
  LinearCase c{LinearProblem(80, 80, true), LinearMap(Feature::kRelu, 8, 16, 0)};
  c.map.denominator_floor = 2;
  const LinearTensors tensors(c);
  std::atomic<int64_t> held{0};
  LinearCall call = tensors.Call(c);
  call.rows_without_weight = &held;
  ExpectClose(c, RunEngine(c, call), DefineLinear(c, tensors));
  EXPECT_GT(held.load(), 0);
  EXPECT_LT(held.load(), 160);
}

// Appends segments of the given lengths, over again until all tokens are taken.
LinearResults AppendAll(const LinearCase& c, const LinearTensors& tensors,
                        const std::vector<int64_t>& segments, int threads) {
  const Problem& p = c.problem;
  ThreadPool pool(threads);
  GuardedMemory workspace(LinearWorkspaceBytes(p, c.map, threads));
  GuardedMemory state(LinearStateBytes(p, c.map));
  LinearReset(p, c.map, state.span());
  LinearResults results = EmptyResults(p);
  size_t next = 0;
  for (int64_t begin = 0; begin < p.kv_tokens;) {
    const int64_t tokens = std::min(segments[next++ % segments.size()], p.kv_tokens - begin);
    const LinearCall call = SegmentOf(tensors.Call(c), results, begin, tokens);
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
        LinearCase c{LinearProblem(260, 260, true, heads), LinearMap(feature, 20, 16, epsilon)};
        c.masked = true;
        const LinearTensors tensors(c);
        const LinearResults expected = DefineLinear(c, tensors);
        for (const auto& segments :
             std::vector<std::vector<int64_t>>{{1}, {3}, {5, 64, 1}, {200, 60}, {260}}) {
          const LinearResults one = AppendAll(c, tensors, segments, 1);
          ExpectClose(c, one, expected);
          EXPECT_TRUE(SameBits(one.out, AppendAll(c, tensors, segments, 3).out));
        }
      }
    }
  }
}

TEST(Linear, AppendingUnderGatesEqualsTheWholeSequence) {
  for (const Feature feature : {Feature::kSinCos, Feature::kRelu}) {
    LinearCase c{LinearProblem(260, 260, true, 2, 8), DirectionMap(feature, 40, true)};
    c.masked = true;
    const LinearTensors tensors(c);
    const LinearResults expected = DefineLinear(c, tensors);
    for (const auto& segments : std::vector<std::vector<int64_t>>{{1}, {4}, {5, 1, 40, 2}, {260}}) {
      ExpectClose(c, AppendAll(c, tensors, segments, 2), expected);
    }
  }
}

TEST(Linear, AnAppendedRowThatSeesOnlyKeysOfNaNIsNaN) {
  ForEachAppendedNaNKeys([](const NaNKeys& keys, const std::vector<int64_t>& segments) {
    ExpectNaNOfFormula(keys, AppendAll(keys.c, keys.tensors, segments, 2),
                       AppendAll(keys.c, keys.clean, segments, 2));
  });
}

TEST(Linear, AppendingKeysWhoseSquaresAreBeyondFp32EqualsTheFormula) {
  ForEachAppendedLongKeys([](const LongKeys& keys, const std::vector<int64_t>& segments) {
    ExpectLongKeysOfFormula(keys, AppendAll(keys.c, keys.tensors, segments, 2));
  });
}

TEST(Linear, MapsThatNoEngineHasAreRefused) {
  const Problem causal = LinearProblem(8, 8, true), not_causal = LinearProblem(8, 8, false);
  const FeatureMap exponential = LinearMap(Feature::kExp, 4, 16);
  const FeatureMap gated = DirectionMap(Feature::kSinCos, 4, true);
  FeatureMap floored = exponential, gated_exponential = exponential, with_epsilon = gated,
             with_denominator_epsilon = gated, without_rows = exponential;
  floored.denominator_floor = 0.1;
  gated_exponential.gated = true;
  with_epsilon.epsilon = with_denominator_epsilon.denominator_epsilon = 0.1;
  without_rows.projections = 0;
  const Tensor w(DType::kF32, {4, 16}), of_heads(DType::kF32, {2, 4, 16}),
      f64(DType::kF64, {4, 16}), wide(DType::kF32, {16, 4}), none(DType::kF32, {0, 16});
  const auto message = [](const Problem& problem, const FeatureMap& map, const ConstTensorView& w) {
    return std::string(CheckLinearMap(problem, map, w).message());
  };
  FeatureMap per_head = exponential;
  per_head.per_head = true;
  EXPECT_EQ(message(not_causal, exponential, w.view()), "");
  EXPECT_EQ(message(causal, per_head, of_heads.view()), "");
  const Tensor gates_w(DType::kF32, gated.per_head ? Shape{2, 4, 16} : Shape{4, 16});
  EXPECT_EQ(message(causal, gated, gates_w.view()), "");

  EXPECT_EQ(message(causal, per_head, w.view()),
            "W is f32 [4, 16]; expected is contiguous f32 [2, 4, 16]");
  EXPECT_EQ(message(causal, exponential, f64.view()),
            "W is f64 [4, 16]; expected is contiguous f32 [4, 16]");
  EXPECT_EQ(message(causal, exponential, Transpose(wide.view(), 0, 1)),
            "W is f32 [4, 16]; expected is contiguous f32 [4, 16]");
  EXPECT_EQ(message(causal, without_rows, none.view()),
            "W is f32 [0, 16]; expected is contiguous f32 [0, 16]");
  EXPECT_EQ(message(causal, floored, w.view()),
            "a floor of the denominator is not for exponential features");
  const char* const kGates = "gates are for causal problems, without epsilon or exponentials";
  EXPECT_EQ(message(not_causal, gated, gates_w.view()), kGates);
  EXPECT_EQ(message(causal, gated_exponential, w.view()), kGates);
  EXPECT_EQ(message(causal, with_epsilon, gates_w.view()), kGates);
  EXPECT_EQ(message(causal, with_denominator_epsilon, gates_w.view()), kGates);
}

TEST(Linear, AppendRefusesAMaximumOverTheWholeSequence) {
  LinearCase c{LinearProblem(8, 8, true), LinearMap(Feature::kExp, 8, 16, 1e-4)};
  c.map.stabiliser = KeyStabiliser::kSequence;
  const LinearTensors tensors(c);
  GuardedMemory state(LinearStateBytes(c.problem, c.map));
  EXPECT_EQ(LinearAppend(c.problem, 8, tensors.Call(c), state.span(), {}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Linear, TheStateDoesNotGrowWithTheSequence) {
  const FeatureMap map = LinearMap(Feature::kExp, 256, 64);
  EXPECT_EQ(LinearStateBytes(LinearProblem(100, 100, true, 8, 64), map),
            LinearStateBytes(LinearProblem(1000000, 1000000, true, 8, 64), map));
  // The scratch of a causal run does not depend on the tokens either, from the step of 16 chunks
  // on.
  EXPECT_EQ(LinearWorkspaceBytes(LinearProblem(2000, 2000, true, 1, 64), map, 2),
            LinearWorkspaceBytes(LinearProblem(2000000, 2000000, true, 1, 64), map, 2));
}

}  // namespace
}  // namespace tfb
