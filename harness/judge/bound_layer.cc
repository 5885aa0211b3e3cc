#include "harness/judge/bound_layer.h"

#include <algorithm>
#include <utility>

#include "core/status.h"

namespace tfb {

absl::StatusOr<BoundLayer> Bind(Layer* layer, Device device, const Inputs& inputs, ThreadPool* pool,
                                bool optional_too) {
  auto memory = std::make_shared<BoundLayer::Memory>();
  BoundLayer bound;
  bound.layer = layer;
  bound.device = device;
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

}  // namespace tfb
