// The sorting of sparse Sinkhorn attention on the CPU.
//
// One thread computes a head's matrix, in float64: scores grow with the tokens that are added up,
// and exp would amplify their roundings. The matrix is stored in fp32 for the sums of blocks of
// fp32. Where those are rounded to 16 bits, the matrix and the sums stay float64, as in the
// definition: fp32 would round one of some 10^4 elements the other way.
#ifndef TFB_ATTENTION_SINKHORN_SINKHORN_CPU_H_
#define TFB_ATTENTION_SINKHORN_SINKHORN_CPU_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb::sinkhorn {

// The channels of the pooled rows of [batch, heads, tokens, channels], where heads h heads_summed +
// 0, 1, ... are added up for head h.
struct PooledRows {
  ConstTensorView rows;  // empty: none
  int64_t heads_summed = 1;
};

struct SortCall {
  SinkhornSizes sizes = {};
  SortNetwork network = {};
  std::array<PooledRows, 2> pooled;  // side by side
  ConstTensorView key_mask;          // or empty
  ConstTensorView logits;            // f32 [batch, heads, N, columns]: given scores, or empty
  ConstTensorView noise;             // of that shape, or empty
  TensorView sort;                   // f32 or f64 of that shape: S, and 0 outside of the support
};

// These functions allocate nothing, and their results do not depend on the number of threads.

size_t SortCpuWorkspaceBytes(const SinkhornSizes& sizes, int threads);
void SortCpu(const SortCall& call, const Execution& execution);

// Computes, to [batch, heads, mixed_blocks block, channels], sum_t S_ut of the blocks of `from`
// [batch, heads, tokens, channels]. `sort` is contiguous; `null_rows` has the null block's row of
// each head, [heads][channels], where there is one.
size_t MixCpuWorkspaceBytes(const SinkhornSizes& sizes, DType sort, int threads);
void MixCpu(const SinkhornSizes& sizes, const TensorView& sort, const ConstTensorView& from,
            const double* null_rows, const ConstTensorView& key_mask, const TensorView& to,
            const Execution& execution);

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SINKHORN_CPU_H_
