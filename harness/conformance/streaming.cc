// Tests layers that read their input in segments: any split of a sequence gives the same outputs.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/conformance/allocation_meter.h"
#include "harness/conformance/trial.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/guarded.h"

namespace tfb::conformance {
namespace {

int SegmentAxis(const TensorSpec& spec) {
  const auto found = std::find(spec.shape.begin(), spec.shape.end(), kSegmentTokens);
  return static_cast<int>(found - spec.shape.begin());
}

// A streaming layer that has been set up, and the outputs of its segments.
class Stream {
 public:
  // Returns null, with the test skipped, where the technique does not stream or its segments cannot
  // be cut from the inputs of the whole.
  static std::unique_ptr<Stream> Make(Trial* trial) {
    auto* layer = dynamic_cast<StreamingLayer*>(&trial->layer());
    const auto skip = [](const std::string& reason) {
      Skip(reason);
      return nullptr;
    };
    if (layer == nullptr) return skip("the technique does not stream");
    if (trial->job().problem.query_tokens != trial->job().problem.kv_tokens) {
      return skip("a stream has as many queries as keys");
    }
    for (const TensorSpec& spec : layer->segment_inputs()) {
      if (spec.optional || trial->inputs().count(spec.name) > 0) continue;
      return skip(absl::StrCat("segments have an input ", spec.name, " that the whole has not"));
    }
    std::unique_ptr<Stream> stream(new Stream(trial, layer));
    const absl::Status status = stream->Start();
    if (status.ok()) return stream;
    ADD_FAILURE() << status;
    return nullptr;
  }

  StreamingLayer& layer() { return *layer_; }

  // Appends the tokens begin, ..., begin + count - 1 of the trial's inputs.
  absl::Status Append(int64_t begin, int64_t count) {
    Inputs inputs;
    for (const TensorSpec& spec : layer_->segment_inputs()) {
      const ConstTensorView* whole = whole_.inputs().Find(spec.name);
      if (whole == nullptr) continue;
      inputs.Set(spec.name, Slice(*whole, SegmentAxis(spec), begin, count));
    }
    std::map<std::string, GuardedTensor> written;
    Outputs outputs;
    for (const TensorSpec& spec : layer_->segment_outputs()) {
      Shape shape = spec.shape;
      std::replace(shape.begin(), shape.end(), kSegmentTokens, count);
      TFB_ASSIGN_OR_RETURN(
          GuardedTensor output,
          GuardedTensor::Allocate(spec.dtype, shape, /*gaps=*/false, trial_->job().device));
      TFB_RETURN_IF_ERROR(output.Upload(Contents::kUnwritten));
      outputs.Set(spec.name, output.device_view());
      written[spec.name] = std::move(output);
    }
    TFB_RETURN_IF_ERROR(workspace_.Call("workspace of Append", [&] {
      const AllocationMeter meter(runtime_);
      const absl::Status status = layer_->Append(inputs, outputs, execution_);
      allocations_ += meter.count();
      return status;
    }));
    for (const TensorSpec& spec : layer_->segment_outputs()) {
      GuardedTensor& output = written[spec.name];
      TFB_RETURN_IF_ERROR(output.Download());
      TFB_RETURN_IF_ERROR(output.CheckGuards(absl::StrCat("segment output ", spec.name)));
      if (output.CountUnwritten() > 0) {
        return absl::InternalError(absl::StrCat("segment output ", spec.name, " of tokens ", begin,
                                                " to ", begin + count, " was not all written"));
      }
      const auto whole = outputs_.find(spec.name);
      if (whole == outputs_.end()) continue;
      const int axis = SegmentAxis(spec);
      if (whole->second.dim(axis) < begin + count) continue;
      CopyElements(output.view(), Slice(whole->second.view(), axis, begin, count));
    }
    return absl::OkStatus();
  }

  // Appends all tokens in segments of these sizes, which repeat.
  absl::Status AppendAll(const std::vector<int64_t>& sizes) {
    const int64_t tokens = trial_->job().problem.query_tokens;
    int64_t begin = 0;
    for (size_t n = 0; begin < tokens; ++n) {
      const int64_t count = std::min(sizes[n % sizes.size()], tokens - begin);
      TFB_RETURN_IF_ERROR(Append(begin, count));
      begin += count;
    }
    return absl::OkStatus();
  }

  const NamedTensors& outputs() const { return outputs_; }
  int64_t allocations() const { return allocations_; }

 private:
  Stream(Trial* trial, StreamingLayer* layer) : trial_(trial), layer_(layer) {}

  absl::Status Start() {
    for (const TensorSpec& spec : layer_->outputs()) {
      const auto same = [&spec](const TensorSpec& other) { return other.name == spec.name; };
      const auto& segments = layer_->segment_outputs();
      if (std::none_of(segments.begin(), segments.end(), same)) continue;
      outputs_[spec.name] = Tensor(spec.dtype, spec.shape);
    }
    const Device device = trial_->job().device;
    TFB_ASSIGN_OR_RETURN(runtime_, RuntimeOf(device));
    TFB_ASSIGN_OR_RETURN(whole_, DeviceTensors::Of(device, ViewsOf(trial_->inputs())));
    TFB_ASSIGN_OR_RETURN(
        workspace_, GuardedWorkspace::Allocate(layer_->workspace_bytes(pool_.threads()), device));
    execution_.pool = &pool_;
    execution_.workspace = workspace_.bytes();
    TFB_RETURN_IF_ERROR(workspace_.Call(
        "workspace of Setup", [&] { return layer_->Setup(whole_.inputs(), execution_); }));
    return layer_->Reset();
  }

  Trial* trial_;
  StreamingLayer* layer_;
  ThreadPool pool_{2};
  CudaRuntime* runtime_ = nullptr;  // null on the CPU
  DeviceTensors whole_;             // the trial's inputs
  GuardedWorkspace workspace_;
  Execution execution_;
  NamedTensors outputs_;
  int64_t allocations_ = 0;
};

void ASequenceInSegmentsIsTheWhole(const Job& job) {
  const auto trial = Trial::Make(job);
  if (trial == nullptr) return;
  const auto stream = Stream::Make(trial.get());
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
  const auto stream = Stream::Make(trial.get());
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
  const auto stream = Stream::Make(trial.get());
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
  const auto stream = Stream::Make(trial.get());
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
