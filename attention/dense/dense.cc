#include "attention/dense/dense.h"

#include <memory>

#include "attention/dense/dense_cudnn.h"
#include "core/definition.h"
#include "core/flash/planned_layer.h"

namespace tfb::dense {
namespace {

const bool registered = RegisterTechnique<Dense>();

TechniqueInfo Info() {
  return {"dense", "attention", "Dense scaled dot-product attention",
          "Vaswani et al. 2017, arXiv:1706.03762v7, section 3.2.1"};
}

}  // namespace

Dense::Dense() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Dense::MakeLayer(const Problem& problem,
                                                        const DenseOptions& options, Device device,
                                                        uint64_t) const {
  if (options.backend == DenseOptions::Backend::kCudnn) {
    return MakeCudnnDense(problem, options.scale, device);
  }
  return PlannedLayer::Create(
      problem, QkvInputs(problem), AttentionOutputs(problem), NamedTensors(), device,
      [plan = FlashPlan(problem, options.scale)](const NamedTensors&) { return plan; });
}

absl::Status Dense::Definition(const Problem& problem, const DenseOptions& options,
                               const NamedTensors&, const Inputs& inputs,
                               const DefinitionRequest& request, NamedTensors* outputs) const {
  DefineMaskedAttention(
      problem, inputs, request, options.scale, [](int64_t, int64_t, int64_t) { return true; },
      [](int64_t, int64_t, int64_t, int64_t) { return 0.0; }, outputs);
  return absl::OkStatus();
}

}  // namespace tfb::dense
