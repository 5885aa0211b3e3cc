// Compares a stream through the cache with plain calls on the same keys and values. They must agree
// to the last bit: the arithmetic is the same, and only the packing differs.
#include "core/flash/key_value_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "core/cuda/mirror.h"
#include "core/flash/flash_engine.h"
#include "core/random.h"
#include "core/schedule/band_schedule.h"
#include "core/tested_devices.h"
#include "gtest/gtest.h"

namespace tfb {
namespace {

constexpr int64_t kWindow = 150;   // keys that a query sees, itself included
constexpr int64_t kSegment = 130;  // at most
constexpr int64_t kTokens = 700;

// The relative key of each distance, for two heads.
Tensor DistanceRows(int64_t head_dim) {
  Tensor table(DType::kF32, {2, kWindow, head_dim});
  FillNormal(&table, 7, "distances");
  return table;
}

class Stream {
 public:
  Stream(int64_t head_dim, int64_t value_dim) : problem_(GroupedHeads(head_dim, value_dim)) {
    for (Tensor* tensor : {&q_, &k_, &v_, &u_, &w_}) FillNormal(tensor, 3, "stream", 0, 1);
    cache_ = KeyValueCache::Create(Device::kCpu, problem_, kWindow + kSegment - 1).value();
    distances_ = DistanceRows(head_dim);
    by_distance_ = RelativeKeys(distances_.view(), -(kWindow - 1), 0, [](int64_t o) { return -o; });
  }

  // Appends the next tokens and attends with them both ways; returns false where the outputs
  // differ.
  bool AppendAndCompare(int64_t tokens) {
    const int64_t begin = cache_.tokens(), end = begin + tokens;
    Execution execution;
    execution.pool = &pool_;
    EXPECT_TRUE(cache_
                    .Append(Slice(k_.view(), 2, begin, tokens), Slice(v_.view(), 2, begin, tokens),
                            execution)
                    .ok());
    const int64_t first_seen = std::max<int64_t>(0, begin - (kWindow - 1));
    const int64_t first_key = KeyValueCache::TileBegin(first_seen);
    Problem problem = problem_;
    problem.query_tokens = tokens;
    problem.kv_tokens = end - first_key;
    const int64_t offset = problem.causal_offset();
    const Band band{first_seen - first_key, offset - (kWindow - 1), offset};

    FlashCall call;
    call.q = Slice(q_.view(), 2, begin, tokens);
    call.schedule = &schedule_.Build(tokens, problem.kv_tokens, band);
    call.rule.content_bias = u_.span<float>().data();
    call.rule.position_bias = w_.span<float>().data();
    call.rule.relative_keys = &by_distance_;
    call.rule.query_position = offset;
    cache_.SetKeys(first_seen, &call);
    const Tensor streamed = Run(
        problem, call,
        FlashWorkspaceBytesPacked(problem, call.rule.relative_keys != nullptr, pool_.threads()));

    const RelativeKeys by_offset(distances_.view(), offset - (kWindow - 1), offset,
                                 [=](int64_t o) { return offset - o; });
    call.packed = {};
    call.k = Slice(k_.view(), 2, first_key, problem.kv_tokens);
    call.v = Slice(v_.view(), 2, first_key, problem.kv_tokens);
    call.rule.relative_keys = &by_offset;
    call.rule.query_position = 0;
    const Tensor whole =
        Run(problem, call,
            FlashWorkspaceBytes(problem, call.rule.relative_keys != nullptr, pool_.threads()));
    return std::memcmp(streamed.raw(), whole.raw(), whole.bytes()) == 0;
  }

  Tensor& v() { return v_; }
  bool last_output_is_finite() const { return last_output_is_finite_; }
  KeyValueCache& cache() { return cache_; }

 private:
  static Problem GroupedHeads(int64_t head_dim, int64_t value_dim) {
    Problem problem = Problem::SelfAttention(2, 4, 1, head_dim);
    problem.kv_heads = 2;
    problem.value_dim = value_dim;
    return problem;
  }
  Tensor Run(const Problem& problem, FlashCall call, size_t workspace_bytes) {
    Tensor out(DType::kF32, {2, 4, problem.query_tokens, problem.value_dim});
    Fill(out.view(), NAN);
    call.out = out.view();
    Tensor workspace(DType::kU8, {static_cast<int64_t>(workspace_bytes)});
    std::memset(workspace.raw(), 0xFF, workspace.bytes());
    Execution execution;
    execution.pool = &pool_;
    execution.workspace =
        absl::MakeSpan(static_cast<std::byte*>(workspace.raw()), workspace.bytes());
    EXPECT_TRUE(FlashCpu(problem, call, execution).ok());
    last_output_is_finite_ = true;
    for (const float value : out.span<float>()) {
      EXPECT_FALSE(std::isnan(value));
      last_output_is_finite_ = last_output_is_finite_ && std::isfinite(value);
    }
    return out;
  }

  Problem problem_;
  ThreadPool pool_{2};
  Tensor q_{DType::kF32, {2, 4, kTokens, problem_.head_dim}};
  Tensor k_{DType::kF32, {2, 2, kTokens, problem_.head_dim}};
  Tensor v_{DType::kBF16, {2, 2, kTokens, problem_.value_dim}};
  Tensor u_{DType::kF32, {4, problem_.head_dim}};
  Tensor w_{DType::kF32, {4, problem_.head_dim}};
  Tensor distances_;
  RelativeKeys by_distance_;
  KeyValueCache cache_;
  BandSchedule schedule_{kSegment};
  bool last_output_is_finite_ = true;
};

TEST(KeyValueCache, AStreamEqualsPlainCallsForSegmentsThatStraddleTilesAndTheRing) {
  for (int64_t head_dim : {7, 64}) {
    Stream stream(head_dim, 40);
    for (int64_t tokens : {1, 5, 58, 64, 1, 130, 63, 65, 130, 2, 128, 1}) {
      EXPECT_TRUE(stream.AppendAndCompare(tokens))
          << tokens << " tokens up to " << stream.cache().tokens() << ", head_dim " << head_dim;
    }
  }
}

TEST(KeyValueCache, AnInfiniteValueDoesNotReachQueriesThatDoNotSeeIt) {
  Stream stream(16, 16);
  stream.v().view().Set(stream.v().view().Offset(0, 0, 3, 5), INFINITY);
  // Token 3 is seen up to token 152. From 153 on its tile is still visited, and from 213 on it is
  // not.
  EXPECT_TRUE(stream.AppendAndCompare(130));
  EXPECT_TRUE(stream.AppendAndCompare(23));
  for (int64_t tokens : {1, 60, 100, 130}) {
    EXPECT_TRUE(stream.AppendAndCompare(tokens));
    EXPECT_TRUE(stream.last_output_is_finite()) << stream.cache().tokens();
  }
}

TEST(KeyValueCache, ClearBeginsANewStream) {
  Stream stream(16, 16);
  EXPECT_TRUE(stream.AppendAndCompare(100));
  stream.cache().Clear();
  EXPECT_EQ(stream.cache().tokens(), 0);
  EXPECT_TRUE(stream.AppendAndCompare(10));
}

// On CUDA the keys of a call are a ring instead of contiguous rows, and a band replaces the
// schedule.
class CudaStream {
 public:
  CudaStream(DType dtype, int64_t head_dim, int64_t value_dim) {
    largest_.dtype = dtype;
    largest_.head_dim = head_dim;
    largest_.value_dim = value_dim;
    largest_.query_tokens = kSegment;
    largest_.kv_tokens = kWindow + kSegment + kFlashTile;
    for (auto [tensor, heads, channels] :
         {std::tuple{&q_, int64_t{2}, head_dim}, {&k_, 1, head_dim}, {&v_, 1, value_dim}}) {
      // Tokens come before heads, as in projections of a hidden state.
      *tensor = Tensor(dtype, Shape{2, kTokens, heads, channels});
      FillNormal(tensor, 3, "stream");
    }
    const Tensor table = DistanceRows(head_dim);
    distances_ =
        RelativeKeys(table.view(), -(kWindow - 1), 0, [](int64_t offset) { return -offset; });
    ScoreRule rule;
    rule.relative_keys = &distances_;
    engine_ = FlashEngine::CreateForStream(KernelDevice(), largest_, rule).value();
    cache_ = KeyValueCache::Create(KernelDevice(), largest_, kWindow + kSegment - 1).value();
    runtime_ = CudaRuntime::For(KernelDevice()).value();
    workspace_ =
        runtime_->Allocate(FlashEngine::StreamWorkspaceBytes(KernelDevice(), largest_, true, 1))
            .value();
    q_on_device_ = ByHead(mirror_.Copy(q_.view()).value());
    k_on_device_ = ByHead(mirror_.Copy(k_.view()).value());
    v_on_device_ = ByHead(mirror_.Copy(v_.view()).value());
  }

  bool AppendAndCompare(int64_t tokens) {
    const int64_t begin = cache_.tokens(), end = begin + tokens;
    const absl::Status appended = cache_.Append(Slice(k_on_device_, 2, begin, tokens),
                                                Slice(v_on_device_, 2, begin, tokens), execution_);
    EXPECT_TRUE(appended.ok()) << appended;
    const int64_t first_seen = std::max<int64_t>(0, begin - (kWindow - 1));
    const int64_t first_key = KeyValueCache::TileBegin(first_seen);
    Problem problem = largest_;
    problem.query_tokens = tokens;
    problem.kv_tokens = end - first_key;
    const int64_t offset = problem.causal_offset();
    const Band band{first_seen - first_key, offset - (kWindow - 1), offset};
    FlashCall call = engine_.NewCall();
    call.q = Slice(q_on_device_, 2, begin, tokens);
    call.band = &band;
    call.rule.query_position = offset;
    cache_.SetKeys(first_seen, &call);
    const Tensor streamed = Run(problem, call);
    call.ring = {};
    call.k = Slice(k_on_device_, 2, first_key, problem.kv_tokens);
    call.v = Slice(v_on_device_, 2, first_key, problem.kv_tokens);
    const Tensor whole = Run(problem, call);
    return std::memcmp(streamed.raw(), whole.raw(), whole.bytes()) == 0;
  }
  KeyValueCache& cache() { return cache_; }

 private:
  static constexpr int64_t kWindow = 70;
  static constexpr int64_t kSegment = 66;
  static constexpr int64_t kTokens = 330;

  static ConstTensorView ByHead(const ConstTensorView& view) { return Transpose(view, 1, 2); }
  Tensor Run(const Problem& problem, FlashCall call) {
    Tensor out(DType::kF32, {2, 2, problem.query_tokens, problem.value_dim});
    Fill(out.view(), NAN);
    DeviceMirror mirror(runtime_);
    call.out = mirror.CopyForWriting(out.view()).value();
    Execution execution;
    execution.workspace = absl::MakeSpan(workspace_.As<std::byte>(), workspace_.bytes());
    const absl::Status status = engine_.Run(problem, call, execution);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(mirror.CopyBack().ok());
    for (const float value : out.span<float>()) EXPECT_FALSE(std::isnan(value));
    return out;
  }

  Problem largest_ = [] {
    Problem problem = Problem::SelfAttention(2, 2, 1, 1);
    problem.kv_heads = 1;
    return problem;
  }();
  Tensor q_, k_, v_;
  RelativeKeys distances_;
  FlashEngine engine_;
  KeyValueCache cache_;
  CudaRuntime* runtime_ = nullptr;
  DeviceBuffer workspace_;
  DeviceMirror mirror_{CudaRuntime::For(KernelDevice()).value()};
  ConstTensorView q_on_device_, k_on_device_, v_on_device_;
  Execution execution_;
};

TEST(KeyValueCache, OnCudaAStreamEqualsPlainCallsForSegmentsThatStraddleTilesAndTheRing) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t head_dim : {7, 16}) {
      CudaStream stream(dtype, head_dim, 24);
      for (int64_t tokens : {1, 5, 58, 64, 1, 66, 63, 65}) {
        EXPECT_TRUE(stream.AppendAndCompare(tokens))
            << Name(dtype) << ", " << tokens << " tokens up to " << stream.cache().tokens()
            << ", head_dim " << head_dim;
      }
      stream.cache().Clear();
      EXPECT_TRUE(stream.AppendAndCompare(3));
    }
  }
}

TEST(KeyValueCache, AWindowThatDoesNotFitTheMemoryIsAnError) {
  const Problem problem = Problem::SelfAttention(1, 8, 1, 64);
  for (const Device device : TestedDevices()) {
    EXPECT_EQ(KeyValueCache::Create(device, problem, int64_t{1} << 50).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
}

}  // namespace
}  // namespace tfb
