#include "harness/judge/bound_layer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/random.h"
#include "core/status.h"

namespace tfb {

absl::StatusOr<BoundLayer> Bind(Layer* layer, Device device, const Inputs& inputs, ThreadPool* pool,
                                bool optional_too) {
  auto memory = std::make_shared<BoundLayer::Memory>();
  BoundLayer bound;
  bound.layer = layer;
  TFB_ASSIGN_OR_RETURN(bound.runtime, RuntimeOf(device));
  TFB_ASSIGN_OR_RETURN(memory->inputs, DeviceTensors::Of(device, inputs));
  TFB_ASSIGN_OR_RETURN(memory->outputs,
                       DeviceTensors::Allocate(device, layer->outputs(), optional_too));
  // There is at least one byte, so that there is an address.
  const size_t bytes = std::max<size_t>(layer->workspace_bytes(pool->threads()), 1);
  TFB_ASSIGN_OR_RETURN(memory->workspace, DeviceMemory::Allocate(device, bytes));
  bound.inputs = memory->inputs.inputs();
  bound.outputs = memory->outputs.outputs();
  bound.execution.pool = pool;
  bound.execution.workspace = memory->workspace.bytes();
  bound.memory = std::move(memory);
  return bound;
}

void BoundLayer::BindBackward(const Inputs& output_gradients, const Outputs& input_gradients,
                              const Outputs& parameter_gradients, absl::Span<std::byte> kept) {
  execution.kept = kept;
  backward = {inputs, {}, output_gradients, input_gradients, parameter_gradients};
  for (const auto& [name, view] : outputs) backward.outputs.Set(name, view);
}

size_t KeptMemoryBytes(const Layer& layer) { return std::max<size_t>(layer.kept_bytes(), 1); }

absl::StatusOr<BackwardMemory> BindBackward(const Inputs& output_gradients, BoundLayer* bound) {
  const Layer& layer = *bound->layer;
  const Device device = bound->device();
  BackwardMemory memory;
  TFB_ASSIGN_OR_RETURN(memory.output_gradients, DeviceTensors::Of(device, output_gradients));
  TFB_ASSIGN_OR_RETURN(
      memory.input_gradients,
      DeviceTensors::Allocate(device, layer.input_gradients(), /*optional_too=*/true));
  TFB_ASSIGN_OR_RETURN(
      memory.parameter_gradients,
      DeviceTensors::Allocate(device, layer.parameter_gradients(), /*optional_too=*/true));
  TFB_ASSIGN_OR_RETURN(memory.kept, DeviceMemory::Allocate(device, KeptMemoryBytes(layer)));
  bound->BindBackward(memory.output_gradients.inputs(), memory.input_gradients.outputs(),
                      memory.parameter_gradients.outputs(), memory.kept.bytes());
  return memory;
}

namespace {

const TensorSpec* FindOut(const std::vector<TensorSpec>& specs) {
  const auto found = std::find_if(specs.begin(), specs.end(),
                                  [](const TensorSpec& spec) { return spec.name == "out"; });
  return found == specs.end() ? nullptr : &*found;
}

}  // namespace

size_t KeptBytes(const Layer& layer) {
  const TensorSpec* out = FindOut(layer.outputs());
  const int64_t bytes = out == nullptr ? 0 : NumElements(out->shape) * SizeOf(out->dtype);
  return layer.kept_bytes() + static_cast<size_t>(bytes);
}

absl::StatusOr<NamedTensors> DrawOutputGradients(const Layer& layer, uint64_t seed) {
  NamedTensors gradients;
  const TensorSpec* out = FindOut(layer.outputs());
  if (out == nullptr) return gradients;
  TFB_ASSIGN_OR_RETURN(Tensor drawn, Tensor::Allocate(out->dtype, out->shape));
  FillNormal(&drawn, seed, "gradient of out");
  gradients.emplace(out->name, std::move(drawn));
  return gradients;
}

}  // namespace tfb
