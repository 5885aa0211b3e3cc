// Tests layers that read their input in segments: any split of a sequence gives the same outputs.
#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "harness/conformance/stream_trial.h"
#include "harness/conformance/trial.h"

namespace tfb::conformance {
namespace {

void ASequenceInSegmentsIsTheWhole(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto stream = StreamTrial::Make(trial.get());
  if (stream == nullptr) return;
  const int64_t longest = stream->layer().max_segment_tokens();
  const int64_t only = stream->layer().split_tokens();
  std::vector<std::vector<int64_t>> sizes = {{1, 63, 65}, {7, 30, 2}, {longest}};
  if (job.device != Device::kSimulator || IsExhaustive()) {
    sizes.insert(sizes.end(), {{1}, {16}, {64}, {63, 1}});
  }
  std::set<std::vector<int64_t>> splits;
  for (std::vector<int64_t> split : sizes) {
    for (int64_t& size : split) size = std::min(size, longest);
    splits.insert(only > 0 ? std::vector<int64_t>{std::min(only, longest)} : split);
  }
  int appended = 0;
  for (const std::vector<int64_t>& split : splits) {
    SCOPED_TRACE(absl::StrCat("segments of ", absl::StrJoin(split, ", ")));
    ASSERT_TRUE(stream->layer().Reset().ok());
    const absl::Status status = stream->AppendAll(split);
    if (IsRefusal(status)) {
      std::cout << "  refused segments of " << absl::StrJoin(split, ", ") << ": "
                << status.message() << "\n";
      continue;
    }
    ASSERT_TRUE(status.ok()) << status;
    trial->ExpectMatchesDefinition(stream->outputs());
    ++appended;
  }
  EXPECT_GT(appended, 0) << "no split was accepted";
}

void ResetForgetsEverything(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto stream = StreamTrial::Make(trial.get());
  if (stream == nullptr) return;
  const int64_t size = std::min<int64_t>(32, stream->layer().max_segment_tokens());
  const absl::Status first = stream->AppendAll({size});
  if (IsRefusal(first)) return Skip(std::string(first.message()));
  ASSERT_TRUE(first.ok()) << first;
  const NamedTensors once = Copies(stream->outputs());
  ASSERT_TRUE(stream->layer().Reset().ok());
  ASSERT_TRUE(stream->Append(0, size).ok());  // a sequence that is interrupted
  ASSERT_TRUE(stream->layer().Reset().ok());
  ASSERT_TRUE(stream->AppendAll({size}).ok());
  ExpectSameBits(once, stream->outputs(), "before and after Reset");
}

void AppendAllocatesNothing(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto stream = StreamTrial::Make(trial.get());
  if (stream == nullptr) return;
  const absl::Status status =
      stream->AppendAll({std::min<int64_t>(32, stream->layer().max_segment_tokens())});
  if (IsRefusal(status)) return Skip(std::string(status.message()));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(stream->allocations(), 0);
}

void SegmentsOfNoTokensAreRefused(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto stream = StreamTrial::Make(trial.get());
  if (stream == nullptr) return;
  const absl::Status status = stream->Append(0, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "0 tokens")) << status;
}

void AppendBeforeSetupIsRefused(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  auto* layer = dynamic_cast<StreamingLayer*>(&trial->layer());
  if (layer == nullptr) return Skip("the technique does not stream");
  ThreadPool pool(1);
  const Execution execution = {&pool, {}, nullptr};
  EXPECT_EQ(layer->Append({}, {}, execution).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace

std::vector<Case> StreamingCases() {
  const std::vector<Problem> causal = {Usual(true)};
  std::vector<Problem> segments = causal;
  segments.push_back(Problem::SelfAttention(1, 4, 130, 16, true));
  segments.back().kv_heads = 2;
  segments.push_back(Problem::SelfAttention(1, 2, 5, 16, true));
  // More than four tiles: rings of keys wrap where the memory is short.
  segments.push_back(Problem::SelfAttention(1, 1, 277, 8, true));
  Case in_segments = {"ASequenceInSegmentsIsTheWhole", "", segments, ASequenceInSegmentsIsTheWhole};
  in_segments.simulated_size = SimulatedSize::kAsItIs;
  return {
      in_segments,
      {"ResetForgetsEverything", "", causal, ResetForgetsEverything},
      {"AppendAllocatesNothing", "", causal, AppendAllocatesNothing},
      {"SegmentsOfNoTokensAreRefused", "", causal, SegmentsOfNoTokensAreRefused},
      {"AppendBeforeSetupIsRefused", "", causal, AppendBeforeSetupIsRefused},
  };
}

}  // namespace tfb::conformance
