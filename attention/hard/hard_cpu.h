// Hard attention on the CPU.
#ifndef TFB_ATTENTION_HARD_HARD_CPU_H_
#define TFB_ATTENTION_HARD_HARD_CPU_H_

#include <cstddef>

#include "attention/hard/hard.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::hard {

// The tensors of hard.h, each of any strides.
struct HardCall {
  ConstTensorView q, k, v;
  ConstTensorView key_mask;  // or empty
  ConstTensorView noise;     // u or g; empty without sampling
  TensorView out;
  TensorView index;       // or empty
  TensorView kept_index;  // for the backward pass, or empty
  HardOptions::Sample sample = HardOptions::Sample::kNone;
  float scale = 1;
};

// Returns the workspace: packed keys of as many heads as fit 32 MiB, at least of one, and for each
// thread the scores of 64 queries against 512 keys.
size_t HardCpuWorkspaceBytes(const Problem& problem, int threads);
// Runs a call. It allocates nothing. The result does not depend on the number of threads.
void HardCpu(const Problem& problem, const HardCall& call, const Execution& execution);

}  // namespace tfb::hard

#endif  // TFB_ATTENTION_HARD_HARD_CPU_H_
