#include "attention/sinkhorn/sinkhorn_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "Eigen/Core"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool IsToken(const SinkhornSizes& sizes, const ConstTensorView& key_mask, int64_t b, int64_t j) {
  return j < sizes.tokens && (key_mask.empty() || *key_mask.At<uint8_t>(b, j) != 0);
}

// ---- The matrix of one head ----

struct SortScratch {
  double* pooled;      // [blocks][width]
  double* before;      // [width]: the sum of the blocks before
  double* hidden;      // [hidden]
  double* logits;      // [blocks][blocks]: A
  double* column_max;  // [blocks]
  double* column_sum;  // [blocks]
  float* row;          // [width]
  float* exps;         // [blocks], padded
};

SortScratch LayOutSort(const SinkhornSizes& sizes, Workspace& workspace) {
  SortScratch scratch;
  scratch.pooled = workspace.Take<double>(sizes.blocks * sizes.width);
  scratch.before = workspace.Take<double>(sizes.width);
  scratch.hidden = workspace.Take<double>(sizes.hidden);
  scratch.logits = workspace.Take<double>(sizes.blocks * sizes.blocks);
  scratch.column_max = workspace.Take<double>(sizes.blocks);
  scratch.column_sum = workspace.Take<double>(sizes.blocks);
  scratch.row = workspace.Take<float>(sizes.width);
  scratch.exps = workspace.Take<float>(RoundUp(sizes.blocks, kColumnQuantum));
  return scratch;
}

size_t SortThreadBytes(const SinkhornSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutSort(sizes, workspace); });
}

using Doubles = Eigen::Map<Eigen::ArrayXd>;
using Floats = Eigen::Map<Eigen::ArrayXf>;
using ConstDoubles = Eigen::Map<const Eigen::ArrayXd>;

class Sorter {
 public:
  Sorter(const SortCall& call, const SortScratch& scratch, int64_t b, int64_t h)
      : call_(call), sizes_(call.sizes), scratch_(scratch), b_(b), h_(h) {}

  void Sort() const {
    Pool();
    if (sizes_.causal) SumPrefixes();
    for (int64_t u = 0; u < sizes_.blocks; ++u) Score(u);
    for (int64_t n = 0; n < sizes_.iterations; ++n) {
      for (int64_t u = 0; u < sizes_.blocks; ++u) NormaliseRow(u);
      if (sizes_.causal) {
        NormalisePrefixesOfColumns();
      } else {
        NormaliseColumns();
      }
    }
    for (int64_t u = 0; u < sizes_.blocks; ++u) StoreRow(u);
  }

 private:
  // A_u over its support.
  Doubles Logits(int64_t u) const {
    return Doubles(scratch_.logits + u * sizes_.blocks, sizes_.Support(u));
  }
  Doubles Pooled(int64_t u) const {
    return Doubles(scratch_.pooled + u * sizes_.width, sizes_.width);
  }

  // sum += x_j, where j is a token.
  void AddToken(int64_t j, double* sum) const {
    if (!IsToken(sizes_, call_.key_mask, b_, j)) return;
    for (const PooledRows& part : call_.pooled) {
      if (part.rows.empty()) continue;
      const int64_t channels = part.rows.dim(3);
      for (int64_t g = 0; g < part.heads_summed; ++g) {
        LoadRow(part.rows, part.rows.Offset(b_, h_ * part.heads_summed + g, j), part.rows.stride(3),
                channels, scratch_.row);
        Doubles(sum, channels) += Floats(scratch_.row, channels).cast<double>();
      }
      sum += channels;
    }
  }

  void Pool() const {
    std::fill_n(scratch_.pooled, sizes_.blocks * sizes_.width, 0.0);
    for (int64_t j = 0; j < sizes_.tokens; ++j) AddToken(j, Pooled(j / sizes_.block).data());
  }
  // From the sums of blocks to those of all tokens up to a block's first.
  void SumPrefixes() const {
    Doubles before(scratch_.before, sizes_.width);
    before.setZero();
    for (int64_t u = 0; u < sizes_.blocks; ++u) {
      before.swap(Pooled(u));
      before += Pooled(u);
      AddToken(u * sizes_.block, Pooled(u).data());
    }
  }

  // out[n] = bias[n] + sum_c in[c] weights[c][n], for some of the `columns` n.
  static void Multiply(const Doubles& in, const double* weights, int64_t columns,
                       const double* bias, Doubles out) {
    out = ConstDoubles(bias, out.size());
    for (int64_t c = 0; c < in.size(); ++c) {
      out += in[c] * ConstDoubles(weights + c * columns, out.size());
    }
  }

  // relu(W_1' X_u + b_1).
  Doubles Hidden(int64_t u) const {
    const int64_t units = sizes_.hidden;
    Doubles hidden(scratch_.hidden, units);
    Multiply(Pooled(u), call_.network.hidden_weights + h_ * sizes_.width * units, units,
             call_.network.hidden_bias + h_ * units, hidden);
    hidden = (hidden < 0).select(0, hidden);
    return hidden;
  }

  void Score(int64_t u) const {
    const SortNetwork& network = call_.network;
    const Doubles in = sizes_.hidden > 0 ? Hidden(u) : Pooled(u);
    Doubles logits = Logits(u);
    Multiply(in, network.score_weights + h_ * in.size() * sizes_.blocks, sizes_.blocks,
             network.score_bias + h_ * sizes_.blocks, logits);
    for (int64_t t = 0; t < logits.size(); ++t) {
      double score = logits[t];
      if (sizes_.scores != SortScores::kLinear && score < 0) score = 0;
      if (sizes_.scores == SortScores::kLogRelu) score = std::log(score + 1e-6);
      if (!call_.noise.empty()) score += static_cast<double>(*call_.noise.At<float>(b_, h_, u, t));
      logits[t] = score / sizes_.temperature;
    }
  }

  // In fp32.
  template <class Exponents>
  Floats Exp(const Exponents& exponents) const {
    const int64_t count = exponents.size(), padded = RoundUp(count, kColumnQuantum);
    Floats exps(scratch_.exps, count);
    exps = exponents.template cast<float>();
    std::fill(exps.data() + count, exps.data() + padded, -std::numeric_limits<float>::infinity());
    const float no_shift = 0;
    kernels_.exp({exps.data(), padded, 1, padded}, &no_shift);
    return exps;
  }

  void NormaliseRow(int64_t u) const {
    Doubles logits = Logits(u);
    if (logits.size() == 0) return;
    const double max = logits.maxCoeff();
    logits -= max + std::log(Exp(logits - max).template cast<double>().sum());
  }

  void NormaliseColumns() const {
    Doubles max(scratch_.column_max, sizes_.blocks), sum(scratch_.column_sum, sizes_.blocks);
    max.setConstant(-kInfinity);
    sum.setZero();
    for (int64_t u = 0; u < sizes_.blocks; ++u) max = max.max(Logits(u));
    for (int64_t u = 0; u < sizes_.blocks; ++u) sum += Exp(Logits(u) - max).cast<double>();
    max += sum.log();
    for (int64_t u = 0; u < sizes_.blocks; ++u) Logits(u) -= max;
  }

  // The sum of a column so far is exp(max) sum.
  void NormalisePrefixesOfColumns() const {
    Doubles(scratch_.column_max, sizes_.blocks).setConstant(-kInfinity);
    Doubles(scratch_.column_sum, sizes_.blocks).setZero();
    for (int64_t u = 1; u < sizes_.blocks; ++u) {
      Doubles logits = Logits(u), max(scratch_.column_max, u), sum(scratch_.column_sum, u);
      const Floats smaller = Exp(-(logits - max).abs());
      sum = (logits > max).select(sum * smaller.cast<double>() + 1, sum + smaller.cast<double>());
      max = (logits > max).select(logits, max);
      logits -= max + sum.cast<float>().log().cast<double>();
    }
  }

  void StoreRow(int64_t u) const {
    const Floats exps = Exp(Logits(u));
    for (int64_t t = 0; t < sizes_.blocks; ++t) {
      *call_.sort.MutableAt<float>(b_, h_, u, t) = t < exps.size() ? exps[t] : 0;
    }
  }

  const SortCall& call_;
  const SinkhornSizes& sizes_;
  const SortScratch& scratch_;
  int64_t b_;
  int64_t h_;
  const CpuKernels& kernels_ = BestCpuKernels();
};

// ---- Sums of blocks ----

constexpr int64_t kChannels = 64;  // of a task: 128 blocks of 64 floats are 32 KiB
constexpr int64_t kCausalRows = 16;

struct MixScratch {
  float* rows;  // [blocks][kChannels]: one row of every block
  float* sums;  // [mixed_blocks][kChannels]
};

MixScratch LayOutMix(const SinkhornSizes& sizes, Workspace& workspace) {
  return {workspace.Take<float>(sizes.blocks * kChannels),
          workspace.Take<float>(sizes.mixed_blocks * kChannels)};
}

size_t MixThreadBytes(const SinkhornSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutMix(sizes, workspace); });
}

// sums[u] = sum_t S_ut rows[t] over the support of u. Where causal, rows of S are taken by 16: what
// all of them sum is one product, and the last few blocks are each row's own, since a product with
// zeros there would let a NaN of the future through.
void SumBlocks(const SinkhornSizes& sizes, const float* sort, int64_t columns,
               const MixScratch& scratch) {
  const CpuKernels& kernels = BestCpuKernels();
  const auto add = [&](int64_t u, int64_t rows, int64_t first, int64_t last, bool accumulate) {
    kernels.gemm(rows, columns, last - first, sort + u * sizes.blocks + first, sizes.blocks, 1,
                 scratch.rows + first * kChannels, kChannels, scratch.sums + u * kChannels,
                 kChannels, accumulate);
  };
  if (!sizes.causal) {
    add(0, sizes.mixed_blocks, 0, sizes.blocks, false);
    return;
  }
  for (int64_t first = 0; first < sizes.mixed_blocks; first += kCausalRows) {
    const int64_t rows = std::min(kCausalRows, sizes.mixed_blocks - first);
    if (first > 0) {
      add(first, rows, 0, first, false);
    } else {
      std::fill_n(scratch.sums, rows * kChannels, 0.0f);
    }
    for (int64_t u = first + 1; u < first + rows; ++u) add(u, 1, first, u, true);
  }
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
    Sorter(call, scratch, task / call.sizes.heads, task % call.sizes.heads).Sort();
  });
}

void CopySortCpu(const SinkhornSizes& sizes, const ConstTensorView& from, const TensorView& to,
                 const Execution& execution) {
  execution.pool->ParallelFor(sizes.batch * sizes.heads, [&](int64_t task, int) {
    const int64_t b = task / sizes.heads, h = task % sizes.heads;
    for (int64_t u = 0; u < sizes.blocks; ++u) {
      const int64_t support = sizes.Support(u);
      for (int64_t t = 0; t < sizes.blocks; ++t) {
        *to.MutableAt<float>(b, h, u, t) = t < support ? *from.At<float>(b, h, u, t) : 0;
      }
    }
  });
}

size_t MixCpuWorkspaceBytes(const SinkhornSizes& sizes, int threads) {
  return threads * MixThreadBytes(sizes);
}

void MixCpu(const SinkhornSizes& sizes, const TensorView& sort, const ConstTensorView& from,
            const ConstTensorView& key_mask, const TensorView& to, const Execution& execution) {
  const size_t bytes = MixThreadBytes(sizes);
  const int64_t channels = from.dim(3);
  const int64_t chunks = (channels + kChannels - 1) / kChannels;
  // A task is a chunk of channels of row r of all blocks of a head.
  const int64_t tasks = sizes.batch * sizes.heads * sizes.block * chunks;
  execution.pool->ParallelFor(tasks, [&](int64_t task, int worker) {
    Workspace workspace(execution.workspace.subspan(worker * bytes, bytes));
    const MixScratch scratch = LayOutMix(sizes, workspace);
    const int64_t first = task % chunks * kChannels, r = task / chunks % sizes.block;
    const int64_t head = task / chunks / sizes.block;
    const int64_t b = head / sizes.heads, h = head % sizes.heads;
    const int64_t count = std::min(kChannels, channels - first);
    const int64_t columns = RoundUp(count, kColumnQuantum);
    for (int64_t t = 0; t < sizes.blocks; ++t) {
      const int64_t j = t * sizes.block + r;
      float* row = scratch.rows + t * kChannels;
      const int64_t loaded = IsToken(sizes, key_mask, b, j) ? count : 0;
      if (loaded > 0) LoadRow(from, from.Offset(b, h, j, first), from.stride(3), loaded, row);
      std::fill(row + loaded, row + columns, 0.0f);
    }
    SumBlocks(sizes, sort.At<float>(b, h), columns, scratch);
    for (int64_t u = 0; u < sizes.mixed_blocks; ++u) {
      StoreRow(scratch.sums + u * kChannels, count, to, to.Offset(b, h, u * sizes.block + r, first),
               to.stride(3));
    }
  });
}

void MaskMixedCpu(const SinkhornSizes& sizes, const ConstTensorView& key_mask, uint8_t* mask) {
  for (int64_t b = 0; b < sizes.batch; ++b, mask += sizes.mixed_blocks * sizes.block) {
    for (int64_t r = 0; r < sizes.block; ++r) {
      int64_t first = 0;  // the first block with a token in row r
      while (first < sizes.blocks && !IsToken(sizes, key_mask, b, first * sizes.block + r)) ++first;
      for (int64_t u = 0; u < sizes.mixed_blocks; ++u) {
        mask[u * sizes.block + r] = first < sizes.Support(u);
      }
    }
  }
}

}  // namespace tfb
