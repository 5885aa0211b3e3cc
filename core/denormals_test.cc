#include "core/denormals.h"

#include <atomic>
#include <cfenv>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "core/technique.h"
#include "core/thread_pool.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

#ifdef __x86_64__

constexpr float kSmallestNormal = 1.17549435e-38f;

// The operands are volatile, so that the compiler computes nothing itself.
float Quarter(float value) {
  volatile float x = value, factor = 0.25f;
  return x * factor;
}
float TimesTwoToThe100(float value) {
  volatile float x = value, factor = 0x1p100f;
  return x * factor;
}

TEST(Denormals, ResultsAndOperandsAreZeroWithinAScopeAndNumbersOutsideOfIt) {
  const float denormal = Quarter(kSmallestNormal);
  ASSERT_GT(denormal, 0);
  {
    const ScopedFlushDenormals flush;
    EXPECT_EQ(Quarter(kSmallestNormal), 0);
    EXPECT_EQ(TimesTwoToThe100(denormal), 0);
    {
      const ScopedFlushDenormals nested;
      EXPECT_EQ(Quarter(kSmallestNormal), 0);
    }
    EXPECT_EQ(Quarter(kSmallestNormal), 0);
  }
  EXPECT_EQ(Quarter(kSmallestNormal), denormal);
  EXPECT_EQ(TimesTwoToThe100(denormal), denormal * 0x1p100f);
}

TEST(Denormals, AScopeLeavesTheRoundingModeAndTheFlagsOfExceptions) {
  std::feclearexcept(FE_ALL_EXCEPT);
  std::fesetround(FE_UPWARD);
  {
    const ScopedFlushDenormals flush;
    EXPECT_EQ(std::fegetround(), FE_UPWARD);
    volatile float one = 1, zero = 0;
    volatile float infinity = one / zero;
    EXPECT_GT(infinity, 1);
  }
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  EXPECT_NE(std::fetestexcept(FE_DIVBYZERO), 0);
  std::fesetround(FE_TONEAREST);
  std::feclearexcept(FE_ALL_EXCEPT);
}

// How many of the pool's tasks flush denormals. Each task waits for the others, so that every thread
// of the pool has one.
int TasksThatFlush(ThreadPool* pool) {
  std::atomic<int> arrived{0}, flushing{0};
  pool->ParallelFor(pool->threads(), [&](int64_t, int) {
    if (Quarter(kSmallestNormal) == 0) ++flushing;
    ++arrived;
    while (arrived < pool->threads()) {
    }
  });
  return flushing;
}

TEST(Denormals, ThreadsOfAPoolTakeTheStateOfTheirCaller) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    EXPECT_EQ(TasksThatFlush(&pool), 0);
    {
      const ScopedFlushDenormals flush;
      EXPECT_EQ(TasksThatFlush(&pool), threads);
    }
    EXPECT_EQ(TasksThatFlush(&pool), 0) << "the pool's threads kept the state of an earlier call";
  }
}

// Writes down how many threads flush denormals in each of its calls.
class Observer : public StreamingLayer {
 public:
  explicit Observer(const Problem& problem)
      : StreamingLayer(problem, HiddenInputs(problem), HiddenOutputs(problem), Segment("x"),
                       Segment("out"), /*max_segment_tokens=*/8) {}
  size_t workspace_bytes(int) const override { return 0; }
  Cost cost() const override { return {}; }
  absl::Status Reset() override { return absl::OkStatus(); }

  int in_setup = -1, in_run = -1, in_append = -1;

 private:
  static std::vector<TensorSpec> Segment(const char* name) {
    return {{name, {1, kSegmentTokens, 4}}};
  }
  absl::Status DoSetup(const Inputs&, const Execution& execution) override {
    in_setup = TasksThatFlush(execution.pool);
    return absl::OkStatus();
  }
  absl::Status DoRun(const Inputs&, const Outputs&, const Execution& execution) override {
    in_run = TasksThatFlush(execution.pool);
    return absl::InternalError("a call that fails restores the caller's state too");
  }
  absl::Status DoAppend(int64_t, const Inputs&, const Outputs&,
                        const Execution& execution) override {
    in_append = TasksThatFlush(execution.pool);
    return absl::OkStatus();
  }
};

TEST(Denormals, EveryCallOfALayerFlushesThemOnAllThreadsAndRestoresTheCallersState) {
  Observer layer(Problem::SelfAttention(1, 1, 8, 4));
  ThreadPool pool(2);
  Execution execution;
  execution.pool = &pool;
  Tensor x(DType::kF32, {1, 8, 4}), out(DType::kF32, {1, 8, 4});
  Inputs inputs;
  inputs.Set("x", x.view());
  Outputs outputs;
  outputs.Set("out", out.view());
  const FloatingPointControl before = FloatingPointControl::Current();
  ASSERT_FALSE(before.flushes_denormals());

  ASSERT_TRUE(layer.Setup(inputs, execution).ok());
  EXPECT_EQ(FloatingPointControl::Current(), before);
  EXPECT_EQ(layer.Run(inputs, outputs, execution).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FloatingPointControl::Current(), before);
  ASSERT_TRUE(layer.Append(inputs, outputs, execution).ok());
  EXPECT_EQ(FloatingPointControl::Current(), before);
  EXPECT_EQ(layer.in_setup, 2);
  EXPECT_EQ(layer.in_run, 2);
  EXPECT_EQ(layer.in_append, 2);
}

#endif  // __x86_64__

}  // namespace
}  // namespace tfb
