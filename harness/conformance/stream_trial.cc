#include "harness/conformance/stream_trial.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"
#include "gtest/gtest.h"
#include "harness/conformance/allocation_meter.h"

namespace tfb::conformance {
namespace {

int SegmentAxis(const TensorSpec& spec) {
  const auto found = std::find(spec.shape.begin(), spec.shape.end(), kSegmentTokens);
  return static_cast<int>(found - spec.shape.begin());
}

}  // namespace

std::string WhyNoSegments(const Trial& trial, const StreamingLayer* layer) {
  if (layer == nullptr) return "the technique does not stream";
  if (trial.job().problem.query_tokens != trial.job().problem.kv_tokens) {
    return "a stream has as many queries as keys";
  }
  for (const TensorSpec& spec : layer->segment_inputs()) {
    if (spec.optional || trial.inputs().count(spec.name) > 0) continue;
    return absl::StrCat("segments have an input ", spec.name, " that the whole has not");
  }
  return "";
}

Inputs SegmentOf(const StreamingLayer& layer, const Inputs& whole, int64_t begin, int64_t count) {
  Inputs segment;
  for (const TensorSpec& spec : layer.segment_inputs()) {
    const ConstTensorView* input = whole.Find(spec.name);
    if (input == nullptr) continue;
    segment.Set(spec.name, Slice(*input, SegmentAxis(spec), begin, count));
  }
  return segment;
}

std::vector<TensorSpec> SegmentOutputs(const StreamingLayer& layer, int64_t count) {
  std::vector<TensorSpec> specs = layer.segment_outputs();
  for (TensorSpec& spec : specs) {
    std::replace(spec.shape.begin(), spec.shape.end(), kSegmentTokens, count);
  }
  return specs;
}

std::unique_ptr<StreamTrial> StreamTrial::Make(Trial* trial) {
  auto* layer = dynamic_cast<StreamingLayer*>(&trial->layer());
  if (const std::string reason = WhyNoSegments(*trial, layer); !reason.empty()) {
    Skip(reason);
    return nullptr;
  }
  std::unique_ptr<StreamTrial> stream(new StreamTrial(trial, layer));
  const absl::Status status = stream->Start();
  if (status.ok()) return stream;
  ADD_FAILURE() << status;
  return nullptr;
}

absl::Status StreamTrial::Start() {
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
  TFB_RETURN_IF_ERROR(workspace_.Call("workspace of Setup",
                                      [&] { return layer_->Setup(whole_.inputs(), execution_); }));
  return layer_->Reset();
}

absl::StatusOr<StreamTrial::Segment> StreamTrial::Place(int64_t begin, int64_t count) {
  Segment segment;
  segment.begin = begin;
  segment.count = count;
  segment.inputs = SegmentOf(*layer_, whole_.inputs(), begin, count);
  for (const TensorSpec& spec : SegmentOutputs(*layer_, count)) {
    TFB_ASSIGN_OR_RETURN(
        GuardedTensor output,
        GuardedTensor::Allocate(spec.dtype, spec.shape, /*gaps=*/false, trial_->job().device));
    TFB_RETURN_IF_ERROR(output.Upload(Contents::kUnwritten));
    segment.outputs.Set(spec.name, output.device_view());
    segment.written[spec.name] = std::move(output);
  }
  return segment;
}

absl::Status StreamTrial::Take(Segment* segment) {
  const int64_t begin = segment->begin, count = segment->count;
  for (const TensorSpec& spec : layer_->segment_outputs()) {
    GuardedTensor& output = segment->written[spec.name];
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

absl::Status StreamTrial::Append(int64_t begin, int64_t count) {
  TFB_ASSIGN_OR_RETURN(Segment segment, Place(begin, count));
  TFB_RETURN_IF_ERROR(workspace_.Call("workspace of Append", [&] {
    const AllocationMeter meter(runtime_);
    const absl::Status status = layer_->Append(segment.inputs, segment.outputs, execution_);
    allocations_ += meter.count();
    return status;
  }));
  return Take(&segment);
}

absl::Status StreamTrial::ForEachSegment(
    const std::vector<int64_t>& sizes,
    const std::function<absl::Status(int64_t, int64_t)>& act) const {
  const int64_t tokens = trial_->job().problem.query_tokens;
  int64_t begin = 0;
  for (size_t n = 0; begin < tokens; ++n) {
    const int64_t count = std::min(sizes[n % sizes.size()], tokens - begin);
    TFB_RETURN_IF_ERROR(act(begin, count));
    begin += count;
  }
  return absl::OkStatus();
}

absl::Status StreamTrial::AppendAll(const std::vector<int64_t>& sizes) {
  return ForEachSegment(sizes, [&](int64_t begin, int64_t count) { return Append(begin, count); });
}

absl::Status StreamTrial::CaptureAll(const std::vector<int64_t>& sizes) {
  captured_.clear();
  return ForEachSegment(sizes, [&](int64_t begin, int64_t count) -> absl::Status {
    TFB_ASSIGN_OR_RETURN(Segment segment, Place(begin, count));
    TFB_ASSIGN_OR_RETURN(segment.graph, DeviceGraph::Capture(runtime_, [&](void* stream) {
                           Execution execution = execution_;
                           execution.stream = stream;
                           return layer_->Append(segment.inputs, segment.outputs, execution);
                         }));
    captured_.push_back(std::move(segment));
    return absl::OkStatus();
  });
}

absl::Status StreamTrial::LaunchAll() {
  for (Segment& segment : captured_) {
    for (auto& [name, output] : segment.written) {
      TFB_RETURN_IF_ERROR(output.Upload(Contents::kUnwritten));
    }
    TFB_RETURN_IF_ERROR(
        workspace_.Call("workspace of a graph of Append", [&] { return segment.graph.Launch(); }));
    TFB_RETURN_IF_ERROR(Take(&segment));
  }
  return absl::OkStatus();
}

}  // namespace tfb::conformance
