#include "adaptive/decision_transformer/decision_transformer_cuda.h"
#include "core/cuda/warp.cuh"

namespace tfb::decision_transformer {
namespace {

constexpr int kThreads = 256;

// A thread copies one channel of one token; neighbours copy neighbouring channels.
__global__ void __launch_bounds__(kThreads) EmbedTimesteps(EmbedTimestepsArguments a) {
  const int64_t index = ThreadOfGrid();
  if (index >= a.batch * a.tokens_of_batch * a.channels) return;
  const int64_t row = index / a.channels;
  const int64_t batch = row / a.tokens_of_batch, step = row % a.tokens_of_batch / 3;
  const int64_t timestep = a.timesteps[batch * a.strides[0] + step * a.strides[1]];
  const int64_t table_row = min(max(timestep, int64_t{0}), a.table_rows - 1);
  a.tokens[index] = a.table[table_row * a.channels + index % a.channels];
}

const char* LaunchEmbedTimesteps(const EmbedTimestepsArguments& a, void* stream) {
  const int64_t blocks = CeilDiv(a.batch * a.tokens_of_batch * a.channels, kThreads);
  return Launch("EmbedTimesteps", &EmbedTimesteps, {blocks, kThreads}, stream, a);
}

}  // namespace

TFB_KERNEL_TABLE(DecisionTransformerKernels, {&LaunchEmbedTimesteps});

}  // namespace tfb::decision_transformer
