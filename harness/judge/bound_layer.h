// Binds a layer to everything that its calls need. Code that calls layers (timing, judging,
// conformance, benchmarks) binds them first.
#ifndef TFB_HARNESS_JUDGE_BOUND_LAYER_H_
#define TFB_HARNESS_JUDGE_BOUND_LAYER_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/runtime.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/thread_pool.h"
#include "harness/judge/device_memory.h"

namespace tfb {

// A layer, and views of the tensors that it reads and writes and of its workspace, all in the
// memory of its device.
struct BoundLayer {
  Layer* layer = nullptr;
  Device device = Device::kCpu;
  CudaRuntime* runtime = nullptr;  // of the device; null: the CPU
  Inputs inputs;
  Outputs outputs;
  Execution execution;
  // The memory that Bind has allocated; null where the views refer to memory of another owner.
  struct Memory {
    DeviceTensors inputs, outputs;
    DeviceMemory workspace;
  };
  std::shared_ptr<const Memory> memory;

  // These do not wait for a device.
  absl::Status Setup() const { return layer->Setup(inputs, execution); }
  absl::Status Run() const { return layer->Run(inputs, outputs, execution); }
  absl::Status Synchronize() const { return tfb::Synchronize(runtime); }
  // Waits, and returns copies of the outputs that Bind has allocated, in the memory of the host.
  absl::StatusOr<NamedTensors> Results() const { return memory->outputs.Download(); }
};

// Binds a layer to the inputs, and to new outputs and a new workspace, whose contents are
// unspecified. Optional outputs are included where `optional_too`. The inputs are in host memory;
// on the CPU they are not copied and must outlive the result, as must the layer and the pool.
absl::StatusOr<BoundLayer> Bind(Layer* layer, Device device, const Inputs& inputs, ThreadPool* pool,
                                bool optional_too);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_BOUND_LAYER_H_
