// Binds a layer to everything that its calls need. Code that calls layers (timing, judging,
// conformance, benchmarks) binds them first.
#ifndef TFB_HARNESS_JUDGE_BOUND_LAYER_H_
#define TFB_HARNESS_JUDGE_BOUND_LAYER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
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
  CudaRuntime* runtime = nullptr;  // of the device; null: the CPU
  Inputs inputs;
  Outputs outputs;
  Execution execution;
  // The tensors of the backward pass, where it is bound. execution.kept is then what a Run keeps
  // for it.
  BackwardCall backward;
  // The memory that Bind has allocated; null where the views refer to memory of another owner.
  struct Memory {
    DeviceTensors inputs, outputs;
    DeviceMemory workspace;
  };
  std::shared_ptr<const Memory> memory;

  Device device() const { return runtime == nullptr ? Device::kCpu : runtime->device(); }
  // These do not wait for a device.
  absl::Status Setup() const { return layer->Setup(inputs, execution); }
  absl::Status Run() const { return layer->Run(inputs, outputs, execution); }
  // Binds the backward pass to memory of the device, behind inputs and outputs.
  void BindBackward(const Inputs& output_gradients, const Outputs& input_gradients,
                    const Outputs& parameter_gradients, absl::Span<std::byte> kept);
  absl::Status SetUpBackward() const { return layer->SetUpBackward(inputs, execution); }
  absl::Status Backward() const { return layer->Backward(backward, execution); }
  absl::Status Synchronize() const { return tfb::Synchronize(runtime, execution.stream); }
  // Waits, and returns copies of the outputs that Bind has allocated, in the memory of the host.
  absl::StatusOr<NamedTensors> Results() const {
    return memory->outputs.Download(execution.stream);
  }
};

// Binds a layer to the inputs, and to new outputs and a new workspace, whose contents are
// unspecified. Optional outputs are included where `optional_too`. The inputs are in host memory;
// on the CPU they are not copied and must outlive the result, as must the layer and the pool.
absl::StatusOr<BoundLayer> Bind(Layer* layer, Device device, const Inputs& inputs, ThreadPool* pool,
                                bool optional_too);

// What a backward pass reads and writes beside the inputs and outputs of its Run.
struct BackwardMemory {
  DeviceTensors output_gradients, input_gradients, parameter_gradients;
  DeviceMemory kept;
};
// Binds the backward pass of a layer to the gradients of outputs, by the outputs' names, and to
// new memory for all gradients and for what a Run keeps, whose contents are unspecified. The output
// gradients are in host memory; on the CPU they are not copied and must outlive the result.
absl::StatusOr<BackwardMemory> BindBackward(const Inputs& output_gradients, BoundLayer* bound);

// Returns the size of the kept memory to bind: at least one byte, since a Run without kept memory
// has no backward pass.
size_t KeptMemoryBytes(const Layer& layer);
// Returns the bytes that a Run keeps for its backward pass: those that the layer asks for, and
// "out".
size_t KeptBytes(const Layer& layer);

// Draws normal gradients of the output "out", in its dtype.
absl::StatusOr<NamedTensors> DrawOutputGradients(const Layer& layer, uint64_t seed);

}  // namespace tfb

#endif  // TFB_HARNESS_JUDGE_BOUND_LAYER_H_
