// A trial of a layer that reads its input in segments: outputs of segments in guarded memory, from
// calls of Append or from CUDA graphs of them.
#ifndef TFB_HARNESS_CONFORMANCE_STREAM_TRIAL_H_
#define TFB_HARNESS_CONFORMANCE_STREAM_TRIAL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/technique.h"
#include "core/tensor.h"
#include "core/thread_pool.h"
#include "harness/conformance/trial.h"
#include "harness/judge/device_memory.h"
#include "harness/judge/guarded.h"

namespace tfb::conformance {

// Returns why the trial's sequence cannot be appended in segments; nothing where it can.
std::string WhyNoSegments(const Trial& trial, const StreamingLayer* layer);
// Returns the inputs of the segment of tokens begin, ..., begin + count - 1 of those of the whole.
Inputs SegmentOf(const StreamingLayer& layer, const Inputs& whole, int64_t begin, int64_t count);
// Returns the specs of the outputs of a segment of as many tokens.
std::vector<TensorSpec> SegmentOutputs(const StreamingLayer& layer, int64_t count);

// A streaming layer that has been set up, and the outputs of its segments.
class StreamTrial {
 public:
  // Returns null, with the test skipped, where the technique does not stream or its segments cannot
  // be cut from the inputs of the whole.
  static std::unique_ptr<StreamTrial> Make(Trial* trial);

  StreamingLayer& layer() { return *layer_; }

  // Appends the tokens begin, ..., begin + count - 1 of the trial's inputs.
  absl::Status Append(int64_t begin, int64_t count);
  // Appends all tokens in segments of these sizes, which repeat.
  absl::Status AppendAll(const std::vector<int64_t>& sizes);

  // On a device: records the Append of each segment in a CUDA graph. The layer then takes them for
  // appended.
  absl::Status CaptureAll(const std::vector<int64_t>& sizes);
  // Launches the graphs in their order.
  absl::Status LaunchAll();

  const NamedTensors& outputs() const { return outputs_; }
  int64_t allocations() const { return allocations_; }

 private:
  // The tensors of one Append.
  struct Segment {
    int64_t begin = 0;
    int64_t count = 0;
    Inputs inputs;
    Outputs outputs;
    std::map<std::string, GuardedTensor> written;
    DeviceGraph graph;
  };

  StreamTrial(Trial* trial, StreamingLayer* layer) : trial_(trial), layer_(layer) {}
  absl::Status Start();
  // Returns a segment whose outputs are not written yet.
  absl::StatusOr<Segment> Place(int64_t begin, int64_t count);
  // Checks a segment's outputs, and copies them to those of the whole.
  absl::Status Take(Segment* segment);
  absl::Status ForEachSegment(const std::vector<int64_t>& sizes,
                              const std::function<absl::Status(int64_t, int64_t)>& act) const;

  Trial* trial_;
  StreamingLayer* layer_;
  ThreadPool pool_{2};
  CudaRuntime* runtime_ = nullptr;  // null on the CPU
  DeviceTensors whole_;             // the trial's inputs
  GuardedWorkspace workspace_;
  Execution execution_;
  NamedTensors outputs_;
  std::vector<Segment> captured_;
  int64_t allocations_ = 0;
};

}  // namespace tfb::conformance

#endif  // TFB_HARNESS_CONFORMANCE_STREAM_TRIAL_H_
