#include "attention/sinkhorn/sinkhorn_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>

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
  double* sum;         // [width] of the blocks before
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
  scratch.sum = workspace.Take<double>(sizes.width);
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
  double* Logits(int64_t u) const { return scratch_.logits + u * sizes_.blocks; }

  // sum += x_j, where j is a token.
  void AddToken(int64_t j, double* sum) const {
    if (!IsToken(sizes_, call_.key_mask, b_, j)) return;
    for (const PooledRows& part : call_.pooled) {
      if (part.rows.empty()) continue;
      const int64_t channels = part.rows.dim(3);
      for (int64_t g = 0; g < part.heads_summed; ++g) {
        LoadRow(part.rows, part.rows.Offset(b_, h_ * part.heads_summed + g, j), part.rows.stride(3),
                channels, scratch_.row);
        for (int64_t c = 0; c < channels; ++c) sum[c] += static_cast<double>(scratch_.row[c]);
      }
      sum += channels;
    }
  }

  void Pool() const {
    std::fill_n(scratch_.pooled, sizes_.blocks * sizes_.width, 0.0);
    for (int64_t j = 0; j < sizes_.tokens; ++j) {
      AddToken(j, scratch_.pooled + j / sizes_.block * sizes_.width);
    }
  }
  // From the sums of blocks to those of all tokens up to a block's first.
  void SumPrefixes() const {
    std::fill_n(scratch_.sum, sizes_.width, 0.0);
    for (int64_t u = 0; u < sizes_.blocks; ++u) {
      double* pooled = scratch_.pooled + u * sizes_.width;
      for (int64_t c = 0; c < sizes_.width; ++c) {
        const double before = scratch_.sum[c];
        scratch_.sum[c] += pooled[c];
        pooled[c] = before;
      }
      AddToken(u * sizes_.block, pooled);
    }
  }

  // out[n] = bias[n] + sum_c in[c] weights[c][n] for the first `count` of `columns` n.
  static void Multiply(int64_t depth, int64_t columns, int64_t count, const double* in,
                       const float* weights, const float* bias, double* out) {
    for (int64_t n = 0; n < count; ++n) out[n] = static_cast<double>(bias[n]);
    for (int64_t c = 0; c < depth; ++c) {
      const float* row = weights + c * columns;
      for (int64_t n = 0; n < count; ++n) out[n] += in[c] * static_cast<double>(row[n]);
    }
  }
  static double Relu(double x) { return x < 0 ? 0 : x; }

  void Score(int64_t u) const {
    const SortNetwork& network = call_.network;
    const double* in = scratch_.pooled + u * sizes_.width;
    int64_t depth = sizes_.width;
    if (sizes_.hidden > 0) {
      Multiply(depth, sizes_.hidden, sizes_.hidden, in,
               network.hidden_weights + h_ * depth * sizes_.hidden,
               network.hidden_bias + h_ * sizes_.hidden, scratch_.hidden);
      for (int64_t n = 0; n < sizes_.hidden; ++n) scratch_.hidden[n] = Relu(scratch_.hidden[n]);
      in = scratch_.hidden;
      depth = sizes_.hidden;
    }
    double* logits = Logits(u);
    const int64_t support = sizes_.Support(u);
    Multiply(depth, sizes_.blocks, support, in, network.score_weights + h_ * depth * sizes_.blocks,
             network.score_bias + h_ * sizes_.blocks, logits);
    for (int64_t t = 0; t < support; ++t) {
      double score = logits[t];
      if (sizes_.scores != SortScores::kLinear) score = Relu(score);
      if (sizes_.scores == SortScores::kLogRelu) score = std::log(score + 1e-6);
      if (!call_.noise.empty()) score += static_cast<double>(*call_.noise.At<float>(b_, h_, u, t));
      logits[t] = score / sizes_.temperature;
    }
  }

  // Pads on the right.
  void Exp(int64_t count, float* exponents) const {
    const int64_t padded = RoundUp(count, kColumnQuantum);
    std::fill(exponents + count, exponents + padded, -std::numeric_limits<float>::infinity());
    const float no_shift = 0;
    kernels_.exp({exponents, padded, 1, padded}, &no_shift);
  }

  void NormaliseRow(int64_t u) const {
    double* logits = Logits(u);
    const int64_t support = sizes_.Support(u);
    if (support == 0) return;
    double max = -kInfinity;
    for (int64_t t = 0; t < support; ++t) max = std::max(max, logits[t]);
    float* exps = scratch_.exps;
    for (int64_t t = 0; t < support; ++t) exps[t] = static_cast<float>(logits[t] - max);
    Exp(support, exps);
    double sum = 0;
    for (int64_t t = 0; t < support; ++t) sum += static_cast<double>(exps[t]);
    const double log_sum_exp = max + std::log(sum);
    for (int64_t t = 0; t < support; ++t) logits[t] -= log_sum_exp;
  }

  void NormaliseColumns() const {
    const int64_t blocks = sizes_.blocks;
    double* max = scratch_.column_max;
    double* sum = scratch_.column_sum;
    float* exps = scratch_.exps;
    std::fill_n(max, blocks, -kInfinity);
    std::fill_n(sum, blocks, 0.0);
    for (int64_t u = 0; u < blocks; ++u) {
      for (int64_t t = 0; t < blocks; ++t) max[t] = std::max(max[t], Logits(u)[t]);
    }
    for (int64_t u = 0; u < blocks; ++u) {
      for (int64_t t = 0; t < blocks; ++t) exps[t] = static_cast<float>(Logits(u)[t] - max[t]);
      Exp(blocks, exps);
      for (int64_t t = 0; t < blocks; ++t) sum[t] += static_cast<double>(exps[t]);
    }
    for (int64_t t = 0; t < blocks; ++t) max[t] += std::log(sum[t]);
    for (int64_t u = 0; u < blocks; ++u) {
      for (int64_t t = 0; t < blocks; ++t) Logits(u)[t] -= max[t];
    }
  }

  // The sum of a column so far is exp(max) sum.
  void NormalisePrefixesOfColumns() const {
    double* max = scratch_.column_max;
    double* sum = scratch_.column_sum;
    float* exps = scratch_.exps;
    std::fill_n(max, sizes_.blocks, -kInfinity);
    std::fill_n(sum, sizes_.blocks, 0.0);
    for (int64_t u = 1; u < sizes_.blocks; ++u) {
      double* logits = Logits(u);
      for (int64_t t = 0; t < u; ++t) exps[t] = static_cast<float>(-std::abs(logits[t] - max[t]));
      Exp(u, exps);
      for (int64_t t = 0; t < u; ++t) {
        const double smaller = static_cast<double>(exps[t]);
        const bool is_max = logits[t] > max[t];
        sum[t] = is_max ? sum[t] * smaller + 1 : sum[t] + smaller;
        if (is_max) max[t] = logits[t];
        logits[t] -= max[t] + static_cast<double>(std::log(static_cast<float>(sum[t])));
      }
    }
  }

  void StoreRow(int64_t u) const {
    const int64_t support = sizes_.Support(u);
    float* exps = scratch_.exps;
    for (int64_t t = 0; t < support; ++t) exps[t] = static_cast<float>(Logits(u)[t]);
    Exp(support, exps);
    for (int64_t t = 0; t < sizes_.blocks; ++t) {
      *call_.sort.MutableAt<float>(b_, h_, u, t) = t < support ? exps[t] : 0;
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

void CopySortCpu(const SinkhornSizes& sizes, const ConstTensorView& from, const TensorView& to) {
  for (int64_t b = 0; b < sizes.batch; ++b) {
    for (int64_t h = 0; h < sizes.heads; ++h) {
      for (int64_t u = 0; u < sizes.blocks; ++u) {
        const int64_t support = sizes.Support(u);
        for (int64_t t = 0; t < sizes.blocks; ++t) {
          *to.MutableAt<float>(b, h, u, t) = t < support ? *from.At<float>(b, h, u, t) : 0;
        }
      }
    }
  }
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
