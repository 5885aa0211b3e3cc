#include "attention/dense/dense.h"

#include <memory>

#include "attention/dense/dense_cudnn.h"
#include "core/definition.h"
#include "core/flash/flash_layer.h"

namespace tfb::dense {
namespace {

const bool registered = RegisterTechnique<Dense>();

TechniqueInfo Info() {
  TechniqueInfo info;
  info.name = "dense";
  info.family = "attention";
  info.title = "Dense scaled dot-product attention";
  info.citation = "Vaswani et al. 2017, arXiv:1706.03762v7, section 3.2.1";
  info.exactness = Exactness::kExact;
  info.growth = 2;
  info.devices = {Device::kCpu, Device::kCuda};
  return info;
}

}  // namespace

Dense::Dense() : TechniqueOf(Info()) {}

absl::StatusOr<std::unique_ptr<Layer>> Dense::MakeLayer(const Problem& problem,
                                                        const DenseOptions& options, Device device,
                                                        uint64_t) const {
  if (options.backend == DenseOptions::Backend::kCudnn) {
    return MakeCudnnDense(problem, options.scale, device);
  }
  return std::make_unique<FlashLayer>(problem, QkvInputs(problem), AttentionOutputs(problem),
                                      device, std::make_unique<FullPattern>(problem.kv_tokens),
                                      options.scale);
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
