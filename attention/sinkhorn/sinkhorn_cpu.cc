#include "attention/sinkhorn/sinkhorn_cpu.h"

#include <algorithm>

#include "Eigen/Core"
#include "attention/sinkhorn/sorter.h"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb::sinkhorn {
namespace {

size_t SortThreadBytes(const SinkhornSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutSort(sizes, workspace); });
}

// ---- Sums of blocks ----

template <class Real>
struct MixScratch {
  Real* rows;  // [columns][kChannels]: one row of every block
  Real* sums;  // [mixed_blocks][kChannels]
};

template <class Real>
MixScratch<Real> LayOutMix(const SinkhornSizes& sizes, Workspace& workspace) {
  return {workspace.Take<Real>(sizes.Columns() * kChannels),
          workspace.Take<Real>(sizes.mixed_blocks * kChannels)};
}

template <class Real>
size_t MixThreadBytes(const SinkhornSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutMix<Real>(sizes, workspace); });
}

// sums[u] = sum_t S_ut rows[t] over the support of u. Where causal, rows of S are taken by 16: the
// blocks that all of them sum are one product, and the last few blocks are done row by row, since a
// product with zeros there would let a NaN of the future through.
void SumBlocks(const SinkhornSizes& sizes, const float* sort, int64_t columns,
               const MixScratch<float>& scratch) {
  const CpuKernels& kernels = BestCpuKernels();
  const int64_t stride = sizes.Columns();
  const auto add = [&](int64_t u, int64_t rows, int64_t first, int64_t last, bool accumulate) {
    kernels.gemm(rows, columns, last - first, sort + u * stride + first, stride, 1,
                 scratch.rows + first * kChannels, kChannels, scratch.sums + u * kChannels,
                 kChannels, accumulate);
  };
  if (!sizes.causal) {
    add(0, sizes.mixed_blocks, 0, stride, false);
    return;
  }
  for (int64_t first = 0; first < sizes.mixed_blocks; first += kCausalRows) {
    const int64_t rows = std::min(kCausalRows, sizes.mixed_blocks - first);
    const int64_t shared = sizes.Support(first);
    if (shared > 0) {
      add(first, rows, 0, shared, false);
    } else {
      std::fill_n(scratch.sums, rows * kChannels, 0.0f);
    }
    for (int64_t u = first + 1; u < first + rows; ++u) add(u, 1, shared, sizes.Support(u), true);
  }
}
// Does the same in doubles; a row's sums stay in registers.
void SumBlocks(const SinkhornSizes& sizes, const double* sort, int64_t,
               const MixScratch<double>& scratch) {
  using Row = Eigen::Array<double, kChannels, 1>;
  for (int64_t u = 0; u < sizes.mixed_blocks; ++u) {
    Row sum = Row::Zero();
    for (int64_t t = 0; t < sizes.Support(u); ++t) {
      sum += sort[u * sizes.Columns() + t] * Eigen::Map<const Row>(scratch.rows + t * kChannels);
    }
    Eigen::Map<Row>(scratch.sums + u * kChannels) = sum;
  }
}

// A task is a part of the channels of row r of all blocks of a head.
template <class Real>
void Mix(const SinkhornSizes& sizes, const TensorView& sort, const ConstTensorView& from,
         const double* null_rows, const ConstTensorView& key_mask, const TensorView& to,
         const Execution& execution) {
  const size_t bytes = MixThreadBytes<Real>(sizes);
  const int64_t channels = from.dim(3);
  const int64_t chunks = (channels + kChannels - 1) / kChannels;
  const int64_t tasks = sizes.batch * sizes.heads * sizes.block * chunks;
  execution.pool->ParallelFor(tasks, [&](int64_t task, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * bytes, bytes));
    const MixScratch<Real> scratch = LayOutMix<Real>(sizes, workspace);
    const int64_t first = task % chunks * kChannels, r = task / chunks % sizes.block;
    const int64_t head = task / chunks / sizes.block;
    const int64_t b = head / sizes.heads, h = head % sizes.heads;
    const RowPart part = {first, std::min(kChannels, channels - first)};
    LoadBlocks(BlockRows{sizes, from, null_rows, key_mask}, b, h, r, part, scratch.rows);
    SumBlocks(sizes, sort.At<Real>(b, h), RoundUp(part.count, kColumnQuantum), scratch);
    for (int64_t u = 0; u < sizes.mixed_blocks; ++u) {
      StorePart(scratch.sums + u * kChannels, part, to, to.Offset(b, h, u * sizes.block + r));
    }
  });
}

}  // namespace

size_t SortCpuWorkspaceBytes(const SinkhornSizes& sizes, int threads) {
  return threads * SortThreadBytes(sizes);
}

void SortCpu(const SortCall& call, const Execution& execution) {
  const size_t bytes = SortThreadBytes(call.sizes);
  execution.pool->ParallelFor(call.sizes.batch * call.sizes.heads, [&](int64_t task, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * bytes, bytes));
    const SortScratch scratch = LayOutSort(call.sizes, workspace);
    const Sorter sorter(call, scratch, task / call.sizes.heads, task % call.sizes.heads);
    sorter.ScoreBlocks();
    for (int64_t n = 0; n < call.sizes.iterations; ++n) {
      sorter.NormaliseRows();
      sorter.NormaliseColumns();
    }
    sorter.Store();
  });
}

size_t MixCpuWorkspaceBytes(const SinkhornSizes& sizes, DType sort, int threads) {
  return threads *
         (sort == DType::kF64 ? MixThreadBytes<double>(sizes) : MixThreadBytes<float>(sizes));
}

void MixCpu(const SinkhornSizes& sizes, const TensorView& sort, const ConstTensorView& from,
            const double* null_rows, const ConstTensorView& key_mask, const TensorView& to,
            const Execution& execution) {
  if (sort.dtype == DType::kF64) {
    Mix<double>(sizes, sort, from, null_rows, key_mask, to, execution);
  } else {
    Mix<float>(sizes, sort, from, null_rows, key_mask, to, execution);
  }
}

}  // namespace tfb::sinkhorn
