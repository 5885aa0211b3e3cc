// Dense scaled dot-product attention, with which every other technique is compared.
//
//   y_i = sum_j a_ij v_j,   a_ij = exp(scale q_i . k_j) / sum_r exp(scale q_i . k_r),   scale = 1 /
//   sqrt(head_dim)
//
// The sums are over the keys j that are tokens and, where the problem is causal, j <= i + kv_tokens
// - query_tokens.
//
// Source: Vaswani et al. 2017, "Attention is all you need", arXiv:1706.03762v7, section 3.2.1,
// equation 1. Cost: 2 pairs (head_dim + value_dim) FLOPs, memory linear in tokens (engine flash).
#ifndef TFB_ATTENTION_DENSE_DENSE_H_
#define TFB_ATTENTION_DENSE_DENSE_H_

#include "core/technique.h"

namespace tfb::dense {

struct DenseOptions {
  enum class Backend { kOwn, kCudnn };
  double scale = 0;
  Backend backend = Backend::kOwn;

  void Describe(OptionBinder& bind) {
    bind.Real("scale", &scale, 0, 1e6, "factor on the scores; 0 means 1/sqrt(head_dim)");
    bind.Choice("backend", &backend, {{"own", Backend::kOwn}, {"cudnn", Backend::kCudnn}},
                "whose kernel: engine flash, or on a GPU that of NVIDIA's cuDNN (bf16 and f16)");
  }
};

class Dense : public TechniqueOf<DenseOptions> {
 public:
  Dense();

 protected:
  absl::StatusOr<std::unique_ptr<Layer>> MakeLayer(const Problem& problem,
                                                   const DenseOptions& options, Device device,
                                                   uint64_t seed) const override;
  absl::Status Definition(const Problem& problem, const DenseOptions& options,
                          const NamedTensors& parameters, const Inputs& inputs,
                          const DefinitionRequest& request, NamedTensors* outputs) const override;
};

}  // namespace tfb::dense

#endif  // TFB_ATTENTION_DENSE_DENSE_H_
