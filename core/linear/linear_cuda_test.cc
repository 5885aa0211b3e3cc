// Tests engine linear's CUDA kernels against the formula in float64. The simulator also checks every
// run for races, unwritten reads and accesses out of bounds.
#include "core/linear/linear_cuda.h"

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cuda/mirror.h"
#include "core/cuda/simulator/simulator.h"
#include "core/cuda/work_testing.h"
#include "core/linear/linear_testing.h"
#include "core/status.h"
#include "core/workspace.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

CudaRuntime* Runtime() { return CudaRuntime::For(KernelDevice()).value(); }

// Sets the seed of the order of blocks and threads.
void SetSeed(uint64_t seed) {
  cuda_simulator::Settings settings;
  settings.seed = seed;
  cuda_simulator::Configure(settings);
}

// Copies a call's tensors to the device and calls `run` with a workspace full of NaN.
template <class RunCall>
absl::Status OnDevice(const LinearCase& c, LinearCall call, const RunCall& run) {
  DeviceMirror mirror(Runtime());
  for (ConstTensorView* view : {&call.q, &call.k, &call.v, &call.key_mask}) {
    TFB_ASSIGN_OR_RETURN(*view, mirror.Copy(*view));
  }
  for (TensorView* view : {&call.out, &call.log_sum_exp}) {
    TFB_ASSIGN_OR_RETURN(*view, mirror.CopyForWriting(*view));
  }
  const size_t bytes = LinearCuda::WorkspaceBytes(*Runtime(), c.problem, c.map);
  TFB_ASSIGN_OR_RETURN(const DeviceBuffer workspace, Runtime()->Allocate(bytes));
  Execution execution;
  execution.workspace = absl::MakeSpan(workspace.As<std::byte>(), bytes);
  TFB_RETURN_IF_ERROR(run(call, execution));
  return mirror.CopyBack();
}

LinearCuda Create(const LinearCase& c, const LinearTensors& tensors, bool streams = false) {
  const LinearCall call = tensors.Call(c);
  return LinearCuda::Create(Runtime(), c.problem, c.map, call.w, streams, call.gate).value();
}

LinearResults RunEngine(const LinearCase& c, LinearCall call, int64_t* without_weight = nullptr) {
  const LinearCuda linear =
      LinearCuda::Create(Runtime(), c.problem, c.map, call.w, /*streams=*/false, call.gate).value();
  LinearResults results = EmptyResults(c.problem);
  call.out = results.out.view();
  call.log_sum_exp = results.log_sum_exp.view();
  const absl::Status status =
      OnDevice(c, call, [&](const LinearCall& on_device, const Execution& e) {
        return linear.Run(c.problem, on_device, e);
      });
  EXPECT_TRUE(status.ok()) << status << " " << Describe(c);
  if (without_weight != nullptr) *without_weight = linear.RowsWithoutWeight().value();
  return results;
}
LinearResults RunEngine(const LinearCase& c, const LinearTensors& tensors) {
  return RunEngine(c, tensors.Call(c));
}

// Returns the rounding of the products of 16-bit problems: two bf16 of 8 bits each.
double ProductUnit(const LinearCase& c) {
  return c.problem.dtype == DType::kF32 ? 0 : std::ldexp(1, -17);
}

void ExpectEqualsFormula(const LinearCase& c) {
  const LinearTensors tensors(c);
  ExpectClose(c, RunEngine(c, tensors), DefineLinear(c, tensors), ProductUnit(c));
}

TEST(LinearCuda, EqualsItsFormulaOnTokensAroundTheChunkEdges) {
  for (const int64_t tokens : {0, 1, 7, 63, 64, 65, 127, 128, 129, 200}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-4}) {
        ExpectEqualsFormula({LinearProblem(tokens, tokens, causal, 1, 8),
                             LinearMap(Feature::kExp, 24, 8, epsilon)});
      }
    }
  }
}

TEST(LinearCuda, EqualsItsFormulaWithEachFeatureStabiliserAndEpsilon) {
  for (const Feature feature : kFeatures) {
    for (const KeyStabiliser stabiliser :
         {KeyStabiliser::kRunning, KeyStabiliser::kSequence, KeyStabiliser::kNone}) {
      for (const bool causal : {false, true}) {
        for (const double epsilon : {0.0, 1e-2}) {
          LinearCase c{LinearProblem(130, 130, causal, 1, 8), LinearMap(feature, 40, 8, epsilon)};
          c.map.stabiliser = stabiliser;
          c.map.denominator_epsilon = epsilon == 0 ? 1e-3 : 0;
          c.masked = true;
          ExpectEqualsFormula(c);
        }
      }
    }
  }
}

TEST(LinearCuda, EqualsItsFormulaAtEveryHeadAndValueWidth) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [head_dim, value_dim] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 33}, {7, 1}, {40, 80}, {64, 64}, {80, 128}, {130, 7}, {256, 256}}) {
      for (const bool causal : {false, true}) {
        LinearCase c{LinearProblem(70, 70, causal, 1, head_dim),
                     LinearMap(Feature::kExp, 24, head_dim, 1e-6)};
        c.problem.value_dim = value_dim;
        c.problem.dtype = dtype;
        ExpectEqualsFormula(c);
      }
    }
  }
}

TEST(LinearCuda, EqualsItsFormulaWithAnyNumberOfFeatures) {
  for (const int64_t projections : {1, 31, 32, 33, 64, 65, 130}) {
    for (const Feature feature : kFeatures) {
      for (const bool causal : {false, true}) {
        ExpectEqualsFormula(
            {LinearProblem(66, 66, causal, 1, 8), LinearMap(feature, projections, 8, 1e-5)});
      }
    }
  }
}

// There are more features than fit on a multiprocessor, and more values than one block's columns:
// the walk keeps its sums in device memory.
TEST(LinearCuda, EqualsItsFormulaWhereTheSumsDoNotFitOnChip) {
  LinearCase many{LinearProblem(150, 150, true, 1, 4), LinearMap(Feature::kExp, 700, 4, 1e-5)};
  many.problem.value_dim = 61;
  ExpectEqualsFormula(many);
  many.problem.dtype = DType::kF16;
  ExpectEqualsFormula(many);
  LinearCase wide{LinearProblem(140, 140, true, 1, 4), LinearMap(Feature::kExp, 260, 4, 1e-5)};
  wide.problem.value_dim = 250;
  ExpectEqualsFormula(wide);
}

TEST(LinearCuda, EqualsItsFormulaWhereKeysAndQueriesDifferInNumber) {
  for (const auto& [queries, keys] : std::vector<std::pair<int64_t, int64_t>>{{1, 200},
                                                                              {5, 130},
                                                                              {64, 65},
                                                                              {65, 64},
                                                                              {130, 5},
                                                                              {0, 9},
                                                                              {9, 0},
                                                                              {70, 190},
                                                                              {190, 70}}) {
    for (const bool causal : {false, true}) {
      ExpectEqualsFormula(
          {LinearProblem(queries, keys, causal, 1, 8), LinearMap(Feature::kExp, 16, 8, 1e-4)});
    }
  }
}

TEST(LinearCuda, EqualsItsFormulaWithGroupedHeadsBatchesAndAMatrixPerHead) {
  for (const bool per_head : {false, true}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(80, 80, causal, 4, 8), LinearMap(Feature::kExp, 16, 8, 1e-4)};
      c.problem.batch = 2;
      c.problem.kv_heads = 2;
      c.map.per_head = per_head;
      c.masked = true;
      ExpectEqualsFormula(c);
    }
  }
}

TEST(LinearCuda, EqualsItsFormulaWithoutBatchesAndHeads) {
  for (const bool causal : {false, true}) {
    LinearCase c{LinearProblem(10, 10, causal), LinearMap(Feature::kExp, 16, 16, 1e-4)};
    c.problem.batch = 0;
    ExpectEqualsFormula(c);
  }
}

// The simulator has four multiprocessors: a head of 1100 keys is cut into four groups.
TEST(LinearCuda, EqualsItsFormulaWhereFewHeadsAreCutIntoGroups) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(1100, 1100, causal, 1, 8), LinearMap(Feature::kExp, 16, 8, 1e-6)};
      c.problem.dtype = dtype;
      c.masked = true;
      ExpectEqualsFormula(c);
    }
  }
  for (const int64_t queries : {3, 400}) {  // The queries are behind the keys of most groups.
    ExpectEqualsFormula(
        {LinearProblem(queries, 1100, true, 1, 8), LinearMap(Feature::kExp, 16, 8, 1e-6)});
  }
}

TEST(LinearCuda, EqualsItsFormulaInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Feature feature : kFeatures) {
      for (const bool causal : {false, true}) {
        LinearCase c{LinearProblem(100, 100, causal, 1), LinearMap(feature, 70, 16, 1e-6)};
        c.problem.dtype = dtype;
        ExpectEqualsFormula(c);
      }
    }
  }
}

// Projections are exponents, so that their errors are those of log_sum_exp. Tensor cores cut their sums
// towards zero, which must not add up along the channels: the bound is that of the harness for scores
// in fp32 (harness/judge/errors.h), in 16 bits too.
TEST(LinearCuda, LogSumExpOfManyChannelsIsThatOfFp32WhereTensorCoresCutSums) {
  cuda_simulator::Settings settings;
  settings.mma_sums = cuda_simulator::MmaSums::kTruncated;
  cuda_simulator::Configure(settings);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t tokens : {1, 100}) {
      LinearCase c{LinearProblem(tokens, tokens, true, 1, 256),
                   LinearMap(Feature::kExp, 256, 256, 1e-6)};
      c.problem.dtype = dtype;
      const LinearTensors tensors(c);
      const Tensor found = RunEngine(c, tensors).log_sum_exp.Clone();
      const Tensor expected = DefineLinear(c, tensors).log_sum_exp.Clone();
      EXPECT_LE(MaxDifference(found.view(), expected.view()),
                2e-5 + std::ldexp(11, -24) * MaxAbs(expected.view()))
          << Describe(c);
    }
  }
  SetSeed(1);
}

// The logarithms of features grow along the sequence by 60 or so: sums relative to one fixed
// reference would underflow or overflow.
TEST(LinearCuda, EqualsItsFormulaOnDirectionsWithGatesAndWithout) {
  for (const Feature feature : {Feature::kSinCos, Feature::kRelu}) {
    for (const bool gated : {false, true}) {
      for (const int64_t heads : {1, 2}) {
        // The last are cut into three groups of one head, and two of each of two.
        for (const int64_t tokens : {1, 64, 130, heads == 1 ? 600 : 300}) {
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
TEST(LinearCuda, EqualsItsFormulaOnDirectionsWithExponentials) {
  for (const Feature feature : {Feature::kExp, Feature::kExpPair}) {
    for (const KeyStabiliser stabiliser : {KeyStabiliser::kRunning, KeyStabiliser::kNone}) {
      for (const bool causal : {false, true}) {
        for (const double epsilon : {0.0, 1e-2}) {
          LinearCase c{LinearProblem(130, 130, causal, 1, 8), LinearMap(feature, 40, 8, epsilon)};
          c.map.stabiliser = stabiliser;
          c.map.unit = true;
          c.map.input_scale = 1.25;
          c.map.length_epsilon = epsilon == 0 ? 0 : 2;
          c.masked = true;
          c.magnitude = 30;  // of the inputs; the features' exponents are those of 1
          const LinearTensors tensors(c);
          c.magnitude = 1;
          ExpectClose(c, RunEngine(c, tensors), DefineLinear(c, tensors));
        }
      }
    }
  }
}

TEST(LinearCuda, GatesWorkWhereKeysAndQueriesDifferInNumberInSixteenBitsAndPerHead) {
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

TEST(LinearCuda, GatesThatForgetAllAndGatesThatKeepAll) {
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

TEST(LinearCuda, FollowsAMaximumThatRisesAndOneThatFalls) {
  for (const bool rising : {true, false}) {
    for (const bool causal : {false, true}) {
      for (const double epsilon : {0.0, 1e-6}) {
        LinearCase c{LinearProblem(300, 300, causal, 1, 8),
                     LinearMap(Feature::kExp, 80, 8, epsilon)};
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
TEST(LinearCuda, KeepsItsAccuracyWhereTheStabilisedFeaturesUnderflow) {
  for (const bool causal : {false, true}) {
    LinearCase c{LinearProblem(90, 90, causal, 1, 4), LinearMap(Feature::kExp, 16, 4, 0)};
    LinearTensors tensors(c);
    for (float& x : tensors.k.span<float>()) x = 20 + x;
    for (float& x : tensors.q.span<float>()) x = 0.1f * x;
    const LinearResults results = RunEngine(c, tensors);
    c.magnitude = 20;
    ExpectClose(c, results, DefineLinear(c, tensors));
  }
}

TEST(LinearCuda, NeverReadsMaskedKeysAndValues) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(140, 140, causal, 1), LinearMap(Feature::kExp, 16, 16, 1e-4)};
      c.problem.dtype = dtype;
      c.masked = true;
      LinearTensors tensors(c);
      const LinearResults clean = RunEngine(c, tensors);
      for (int64_t j = 0; j < 140; ++j) {
        if (tensors.key_mask.span<uint8_t>()[j] != 0) continue;
        Fill(Slice(tensors.k.view(), 2, j, 1), std::nan(""));
        Fill(Slice(tensors.v.view(), 2, j, 1), std::nan(""));
      }
      const LinearResults poisoned = RunEngine(c, tensors);
      EXPECT_TRUE(SameBits(clean.out, poisoned.out));
      EXPECT_TRUE(SameBits(clean.log_sum_exp, poisoned.log_sum_exp));
    }
  }
}

TEST(LinearCuda, GivesZeroAndMinusInfinityWhereNoKeyIsSeen) {
  for (const bool causal : {false, true}) {
    for (const double epsilon : {0.0, 1e-4}) {
      LinearCase c{LinearProblem(70, 70, causal, 1), LinearMap(Feature::kExp, 16, 16, epsilon)};
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

TEST(LinearCuda, LetsANaNInASeenKeyOrValueReachExactlyTheRowsThatSeeIt) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (const bool in_values : {false, true}) {
      for (const Feature feature : kFeatures) {
        LinearCase c{LinearProblem(200, 200, true, 1), LinearMap(feature, 16, 16, 1e-4)};
        c.problem.dtype = dtype;
        LinearTensors tensors(c);
        const LinearResults clean = RunEngine(c, tensors);
        const int64_t poisoned = 77;
        const TensorView view = (in_values ? tensors.v : tensors.k).view();
        view.Set(view.Offset(0, 0, poisoned, 3), std::nan(""));
        const LinearResults results = RunEngine(c, tensors);
        for (int64_t i = 0; i < 200; ++i) {
          for (const int64_t column : {3, 4}) {
            const int64_t at = i * 16 + column;
            const double y = results.out.view().Get(at);
            if (i < poisoned || (in_values && column != 3)) {
              EXPECT_EQ(y, clean.out.view().Get(at)) << i;
            } else {
              EXPECT_TRUE(std::isnan(y)) << i;
            }
          }
        }
      }
    }
  }
}

TEST(LinearCuda, ARowThatSeesOnlyKeysOfNaNIsNaN) {
  ForEachNaNKeys(kKeysOfCudaGroups, [](const NaNKeys& keys) {
    ExpectNaNOfFormula(keys, RunEngine(keys.c, keys.tensors), RunEngine(keys.c, keys.clean));
  });
}

TEST(LinearCuda, EqualsItsFormulaWhereSquaresOfKeysAreBeyondFp32) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ForEachLongKeys(
        kKeysOfCudaGroups,
        [&](const LongKeys& keys) {
          // Other features differ in f32 alone.
          if (dtype != DType::kF32 && keys.c.map.feature != Feature::kExp) return;
          ExpectLongKeysOfFormula(keys, RunEngine(keys.c, keys.tensors), ProductUnit(keys.c));
        },
        dtype);
  }
}

TEST(LinearCuda, AKeyWhoseSquareIsJustWithinFp32HasWeightWithoutEpsilon) {
  for (const bool causal : {false, true}) {
    const OneLongKey one(causal);
    const LinearResults results = RunEngine(one.c, one.tensors);
    EXPECT_LE(MaxDifference(results.out.view(), one.tensors.v.view()), 1e-6);
  }
}

TEST(LinearCuda, LetsANaNInANonCausalKeyValueOrQueryReachTheOutput) {
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

TEST(LinearCuda, DoesNotLookAhead) {
  for (const Feature feature : kFeatures) {
    LinearCase c{LinearProblem(140, 140, true, 1, 8), LinearMap(feature, 80, 8, 1e-2)};
    const LinearResults before = RunEngine(c, LinearTensors(c));
    for (const int64_t t : {0, 63, 64, 100}) {
      LinearTensors changed(c);
      for (int64_t n = (t + 1) * 8; n < 140 * 8; ++n) {
        changed.q.span<float>()[n] = 1;
        changed.k.span<float>()[n] *= 9;
        changed.v.span<float>()[n] = -5;
      }
      const LinearResults after = RunEngine(c, changed);
      EXPECT_EQ(std::memcmp(before.out.raw(), after.out.raw(), (t + 1) * 8 * sizeof(float)), 0)
          << "token " << t;
    }
  }
}

TEST(LinearCuda, ReadsAndWritesViewsOfAnyStride) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(70, 70, causal, 3, 12), LinearMap(Feature::kExp, 16, 12, 1e-4)};
      c.problem.batch = 2;
      c.problem.dtype = dtype;
      const LinearTensors tensors(c);
      const LinearResults expected = RunEngine(c, tensors);
      // The layout is [batch, tokens, channels, heads], heads fastest, as after a projection
      // without a transpose.
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
      const LinearCuda linear = Create(c, tensors);
      const absl::Status status =
          OnDevice(c, call, [&](const LinearCall& on_device, const Execution& e) {
            return linear.Run(c.problem, on_device, e);
          });
      ASSERT_TRUE(status.ok()) << status;
      Tensor gathered(dtype, expected.out.shape());
      CopyElements(call.out, gathered.view());
      EXPECT_TRUE(SameBits(gathered, expected.out));
    }
  }
}

// Returns how many rows' denominators the floor held.
int64_t RowsHeldOnCpu(const LinearCase& c, const LinearTensors& tensors) {
  std::atomic<int64_t> held{0};
  LinearCall call = tensors.Call(c);
  call.rows_without_weight = &held;
  LinearResults results = EmptyResults(c.problem);
  call.out = results.out.view();
  ThreadPool pool(1);
  Tensor workspace(DType::kU8, {static_cast<int64_t>(LinearWorkspaceBytes(c.problem, c.map, 1))});
  const auto memory = absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
  EXPECT_TRUE(LinearCpu(c.problem, call, {&pool, memory, nullptr}).ok());
  return held.load();
}

TEST(LinearCuda, AFloorHoldsTheDenominatorAndCountsTheRowsItHeld) {
  for (const auto& [causal, value_dim] :
       {std::pair<bool, int64_t>{false, 16}, {true, 16}, {false, 200}, {true, 200}}) {
    LinearCase c{LinearProblem(80, 80, causal), LinearMap(Feature::kRelu, 8, 16, 0)};
    c.problem.value_dim = value_dim;  // 200 columns are those of several blocks
    c.map.denominator_floor = causal ? 2 : 20;
    const LinearTensors tensors(c);
    int64_t held = 0;
    ExpectClose(c, RunEngine(c, tensors.Call(c), &held), DefineLinear(c, tensors));
    EXPECT_EQ(held, RowsHeldOnCpu(c, tensors));
    EXPECT_GT(held, 0);
    EXPECT_LT(held, 160);
  }
}

// The number is asked for without a stream, and may be of a Run on one that the default stream does not
// wait for, whose work the simulator does here when it is waited for, and no earlier.
TEST(LinearCuda, TheRowsThatWereHeldAreThoseOfTheLastRunOnAnyStream) {
  LinearCase c{LinearProblem(80, 80, /*causal=*/true), LinearMap(Feature::kRelu, 8, 16, 0)};
  c.map.denominator_floor = 2;
  const LinearTensors tensors(c);
  const LinearCuda linear = Create(c, tensors);
  const DeviceStream stream = DeviceStream::Make(Runtime()).value();
  LinearResults results = EmptyResults(c.problem);
  LinearCall call = tensors.Call(c);
  call.out = results.out.view();
  cuda_simulator::Settings settings;
  settings.streams_are_late = true;
  cuda_simulator::Configure(settings);
  int64_t held = 0;
  const absl::Status status =
      OnDevice(c, call, [&](const LinearCall& on_device, Execution e) -> absl::Status {
        TFB_RETURN_IF_ERROR(Runtime()->SynchronizeAll());
        e.stream = stream.get();
        TFB_RETURN_IF_ERROR(linear.Run(c.problem, on_device, e));
        TFB_ASSIGN_OR_RETURN(held, linear.RowsWithoutWeight());
        return Runtime()->Synchronize(stream.get());
      });
  cuda_simulator::Configure({});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(held, RowsHeldOnCpu(c, tensors));
  EXPECT_GT(held, 0);
}

// Appends segments of the given lengths, over again until all tokens are taken.
LinearResults AppendAll(const LinearCase& c, const LinearTensors& tensors,
                        const std::vector<int64_t>& segments) {
  LinearCuda linear = Create(c, tensors, /*streams=*/true);
  LinearResults results = EmptyResults(c.problem);
  size_t next = 0;
  for (int64_t begin = 0; begin < c.problem.kv_tokens;) {
    const int64_t tokens =
        std::min(segments[next++ % segments.size()], c.problem.kv_tokens - begin);
    const LinearCall call = SegmentOf(tensors.Call(c), results, begin, tokens);
    const absl::Status status =
        OnDevice(c, call, [&](const LinearCall& on_device, const Execution& e) {
          return linear.Append(c.problem, tokens, on_device, e);
        });
    EXPECT_TRUE(status.ok()) << status << " " << Describe(c);
    begin += tokens;
  }
  return results;
}

TEST(LinearCuda, AppendingInAnySplitEqualsTheWholeSequence) {
  for (const Feature feature : kFeatures) {
    for (const double epsilon : {0.0, 1e-3}) {
      LinearCase c{LinearProblem(70, 70, true, 2, 8), LinearMap(feature, 40, 8, epsilon)};
      c.masked = true;
      const LinearTensors tensors(c);
      const LinearResults expected = DefineLinear(c, tensors);
      for (const auto& segments :
           std::vector<std::vector<int64_t>>{{1}, {4}, {5, 1, 40, 2}, {70}}) {
        ExpectClose(c, AppendAll(c, tensors, segments), expected);
      }
    }
  }
}

TEST(LinearCuda, AnAppendedRowThatSeesOnlyKeysOfNaNIsNaN) {
  ForEachAppendedNaNKeys([](const NaNKeys& keys, const std::vector<int64_t>& segments) {
    ExpectNaNOfFormula(keys, AppendAll(keys.c, keys.tensors, segments),
                       AppendAll(keys.c, keys.clean, segments));
  });
}

TEST(LinearCuda, AppendingKeysWhoseSquaresAreBeyondFp32EqualsTheFormula) {
  ForEachAppendedLongKeys([](const LongKeys& keys, const std::vector<int64_t>& segments) {
    ExpectLongKeysOfFormula(keys, AppendAll(keys.c, keys.tensors, segments));
  });
}

TEST(LinearCuda, AppendingDirectionsToExponentialsEqualsTheWholeSequence) {
  LinearCase c{LinearProblem(70, 70, true, 2, 8), LinearMap(Feature::kExp, 40, 8, 1e-2)};
  c.map.unit = true;
  c.map.input_scale = 1.25;
  c.magnitude = 3;
  const LinearTensors tensors(c);
  const LinearResults expected = DefineLinear(c, tensors);
  for (const auto& segments : std::vector<std::vector<int64_t>>{{1}, {5, 1, 40, 2}}) {
    ExpectClose(c, AppendAll(c, tensors, segments), expected);
  }
}

TEST(LinearCuda, AppendingUnderGatesEqualsTheWholeSequence) {
  for (const Feature feature : {Feature::kSinCos, Feature::kRelu}) {
    LinearCase c{LinearProblem(70, 70, true, 2, 8), DirectionMap(feature, 40, true)};
    c.masked = true;
    const LinearTensors tensors(c);
    const LinearResults expected = DefineLinear(c, tensors);
    for (const auto& segments : std::vector<std::vector<int64_t>>{{1}, {4}, {5, 1, 40, 2}, {70}}) {
      ExpectClose(c, AppendAll(c, tensors, segments), expected);
    }
  }
}

TEST(LinearCuda, AppendingWorksInSixteenBitsForGroupedHeadsAndAllWidths) {
  for (const auto& [heads, kv_heads, head_dim, value_dim] : std::vector<std::array<int64_t, 4>>{
           {4, 2, 16, 16}, {9, 1, 8, 8}, {8, 1, 7, 70}, {1, 1, 130, 256}}) {
    LinearCase c{LinearProblem(9, 9, true, heads, head_dim),
                 LinearMap(Feature::kExp, 70, head_dim, 1e-6)};
    c.problem.kv_heads = kv_heads;
    c.problem.value_dim = value_dim;
    c.problem.dtype = DType::kBF16;
    c.problem.batch = 2;
    const LinearTensors tensors(c);
    ExpectClose(c, AppendAll(c, tensors, {1, 2, 5}), DefineLinear(c, tensors), ProductUnit(c));
  }
}

TEST(LinearCuda, ResetForgetsAndTheStateDoesNotGrow) {
  LinearCase c{LinearProblem(6, 6, true, 2, 8), LinearMap(Feature::kExp, 16, 8, 1e-4)};
  const LinearTensors tensors(c);
  const LinearResults expected = DefineLinear(c, tensors);
  LinearCuda linear = Create(c, tensors, /*streams=*/true);
  LinearResults results = EmptyResults(c.problem);
  for (int round = 0; round < 2; ++round) {
    linear.Reset();
    const absl::Status status = OnDevice(c, SegmentOf(tensors.Call(c), results, 0, 6),
                                         [&](const LinearCall& on_device, const Execution& e) {
                                           return linear.Append(c.problem, 6, on_device, e);
                                         });
    ASSERT_TRUE(status.ok()) << status;
    ExpectClose(c, results, expected);
  }
  LinearCase longer = c;
  longer.problem.query_tokens = longer.problem.kv_tokens = 1000000;
  EXPECT_EQ(LinearCuda::StateBytes(c.problem, c.map),
            LinearCuda::StateBytes(longer.problem, longer.map));
}

// The walks are as many as the simulated device has multiprocessors, so that no head is cut into
// groups. Those of an Append read the sums so far of each head.
TEST(LinearCuda, AWalkNeedsMemoryForItsSumsOnlyWhereTheyDoNotFitOnChip) {
  constexpr int kWalks = 4;
  if (Runtime()->properties().multiprocessors != kWalks) {
    GTEST_SKIP() << "heads are cut into groups on " << Runtime()->properties().multiprocessors
                 << " multiprocessors";
  }
  const auto bytes = [](const LinearCase& c) {
    return LinearCuda::WorkspaceBytes(*Runtime(), c.problem, c.map);
  };
  LinearCase c{LinearProblem(300, 300, true, kWalks, 8), LinearMap(Feature::kExp, 16, 8, 1e-4)};
  const size_t sums = LinearCuda::StateBytes(c.problem, c.map);
  EXPECT_LT(bytes(c), sums + Workspace::kAlignment);
  c.map = LinearMap(Feature::kExp, 700, 8, 1e-4);
  c.problem.value_dim = 61;
  EXPECT_GE(bytes(c), 2 * LinearCuda::StateBytes(c.problem, c.map));
}

TEST(LinearCuda, AppendRefusesAMaximumOverTheWholeSequence) {
  LinearCase c{LinearProblem(8, 8, true), LinearMap(Feature::kExp, 8, 16, 1e-4)};
  c.map.stabiliser = KeyStabiliser::kSequence;
  const LinearTensors tensors(c);
  EXPECT_EQ(Create(c, tensors).Append(c.problem, 8, tensors.Call(c), {}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(LinearCuda, AnyOrderOfBlocksAndThreadsAndAnyGridGiveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool causal : {false, true}) {
      LinearCase c{LinearProblem(600, 600, causal, 1, 8), LinearMap(Feature::kExp, 70, 8, 1e-4)};
      c.problem.dtype = dtype;
      const LinearTensors tensors(c);
      const LinearResults expected = RunEngine(c, tensors);
      for (const uint64_t seed : {2, 3}) {
        SetSeed(seed);
        LinearCuda linear = Create(c, tensors);
        linear.set_max_blocks(static_cast<int64_t>(seed) - 1);
        LinearResults results = EmptyResults(c.problem);
        LinearCall call = tensors.Call(c);
        call.out = results.out.view();
        call.log_sum_exp = results.log_sum_exp.view();
        const absl::Status status =
            OnDevice(c, call, [&](const LinearCall& on_device, const Execution& e) {
              return linear.Run(c.problem, on_device, e);
            });
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_TRUE(SameBits(results.out, expected.out));
        EXPECT_TRUE(SameBits(results.log_sum_exp, expected.log_sum_exp));
      }
      SetSeed(1);
    }
  }
}

// In 16 bits no bank is met twice but by causal updates of sums; elsewhere conflicts are 1 of 25 wavefronts
// at most.
TEST(LinearCuda, WarpsSeldomMeetABankTwice) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator counts bank conflicts";
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool causal : {false, true}) {
      for (const int64_t dim : {64, 128}) {
        LinearCase c{LinearProblem(130, 130, causal, 1, dim), LinearMap(Feature::kExp, 128, dim)};
        c.problem.dtype = dtype;
        const LinearTensors tensors(c);
        cuda_simulator::Settings settings;
        settings.counts_bank_conflicts = true;
        cuda_simulator::Configure(settings);
        cuda_simulator::TakeBankUses();
        RunEngine(c, tensors);
        const std::vector<cuda_simulator::BankUse> uses = cuda_simulator::TakeBankUses();
        int64_t wavefronts = 0, extra = 0;
        for (const cuda_simulator::BankUse& use : uses) {
          wavefronts += use.wavefronts;
          extra += use.extra;
        }
        EXPECT_GT(wavefronts, 0);
        EXPECT_LE(extra, dtype == DType::kF32 || causal ? wavefronts / 25 : 0)
            << Describe(c) << "\n"
            << cuda_simulator::Describe(uses);
      }
    }
  }
  SetSeed(1);
}

TEST(LinearCuda, TheWorkOfACallIsAsOnRecord) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts work";
  const struct {
    DType dtype;
    bool causal;
    int64_t projections;
    std::string work;
  } kCases[] = {
      {DType::kF32, false, 40, "3 launches, 18 blocks, 266 barriers, 8392 collectives"},
      {DType::kF32, true, 40, "1 launches, 4 blocks, 228 barriers, 10580 collectives"},
      {DType::kF32, true, 700, "1 launches, 4 blocks, 860 barriers, 30956 collectives"},
      {DType::kBF16, false, 40, "3 launches, 18 blocks, 266 barriers, 49896 collectives"},
      {DType::kBF16, true, 40, "1 launches, 4 blocks, 228 barriers, 78164 collectives"},
      {DType::kBF16, false, 700, "2 launches, 30 blocks, 908 barriers, 324888 collectives"},
      {DType::kBF16, true, 700, "1 launches, 4 blocks, 860 barriers, 382828 collectives"},
  };
  for (const auto& one : kCases) {
    // Where there are few tiles of features, 260 keys are cut into groups.
    const bool is_small = one.projections == 40;
    LinearCase c{LinearProblem(is_small ? 300 : 150, is_small ? 260 : 130, one.causal, 4, 40),
                 LinearMap(Feature::kExp, one.projections, 40, 1e-4)};
    c.problem.dtype = one.dtype;
    c.problem.kv_heads = 2;
    c.problem.value_dim = 72;
    const LinearTensors tensors(c);
    EXPECT_EQ(WorkOf([&] { RunEngine(c, tensors); }), one.work) << Describe(c);
  }
}

// The first Append empties the state, which is a launch.
TEST(LinearCuda, TheWorkOfAnAppendIsAsOnRecordAndIndependentOfWhatCameBefore) {
  if (KernelDevice() != Device::kSimulator) GTEST_SKIP() << "the simulator alone counts work";
  LinearCase c{LinearProblem(300, 300, true, 4, 40), LinearMap(Feature::kExp, 40, 40, 1e-4)};
  c.problem.kv_heads = 2;
  for (const auto& [dtype, few, many] :
       {std::make_tuple(DType::kF32, "1 launches, 2 blocks, 20 barriers, 194 collectives",
                        "3 launches, 8 blocks, 194 barriers, 8000 collectives"),
        std::make_tuple(DType::kBF16, "1 launches, 2 blocks, 20 barriers, 194 collectives",
                        "3 launches, 8 blocks, 194 barriers, 44000 collectives")}) {
    c.problem.dtype = dtype;
    const LinearTensors tensors(c);
    LinearCuda linear = Create(c, tensors, /*streams=*/true);
    LinearResults results = EmptyResults(c.problem);
    const auto append = [&](int64_t begin, int64_t tokens) {
      return WorkOf([&] {
        const LinearCall call = SegmentOf(tensors.Call(c), results, begin, tokens);
        const absl::Status status =
            OnDevice(c, call, [&](const LinearCall& on_device, const Execution& e) {
              return linear.Append(c.problem, tokens, on_device, e);
            });
        EXPECT_TRUE(status.ok()) << status;
      });
    };
    EXPECT_EQ(append(0, 1), "2 launches, 4 blocks, 26 barriers, 194 collectives");
    EXPECT_EQ(append(1, 1), few);
    EXPECT_EQ(append(2, 1), few);
    EXPECT_EQ(append(3, 130), many);
    EXPECT_EQ(append(133, 130), many);
  }
}

}  // namespace
}  // namespace tfb
