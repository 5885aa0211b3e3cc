#include "attention/sinkhorn/sinkhorn_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "Eigen/Core"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb::sinkhorn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool IsToken(const SinkhornSizes& sizes, const ConstTensorView& key_mask, int64_t b, int64_t j) {
  return j < sizes.tokens && (key_mask.empty() || *key_mask.At<uint8_t>(b, j) != 0);
}

// ---- The matrix of one head ----

struct SortScratch {
  double* pooled;      // [blocks][width]
  double* before;      // [width]: the sum of the earlier blocks
  double* hidden;      // [hidden]
  double* logits;      // [blocks][columns]: A
  double* column_max;  // [columns]
  double* column_sum;  // [columns]
  double* new_max;     // [columns]
  float* row;          // [width]
};

SortScratch LayOutSort(const SinkhornSizes& sizes, Workspace& workspace) {
  SortScratch scratch;
  scratch.pooled = workspace.Take<double>(sizes.blocks * sizes.width);
  scratch.before = workspace.Take<double>(sizes.width);
  scratch.hidden = workspace.Take<double>(sizes.hidden);
  scratch.logits = workspace.Take<double>(sizes.blocks * sizes.Columns());
  scratch.column_max = workspace.Take<double>(sizes.Columns());
  scratch.column_sum = workspace.Take<double>(sizes.Columns());
  scratch.new_max = workspace.Take<double>(sizes.Columns());
  scratch.row = workspace.Take<float>(sizes.width);
  return scratch;
}

size_t SortThreadBytes(const SinkhornSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutSort(sizes, workspace); });
}

using Doubles = Eigen::Map<Eigen::ArrayXd>;
using ConstDoubles = Eigen::Map<const Eigen::ArrayXd>;

class Sorter {
 public:
  Sorter(const SortCall& call, const SortScratch& scratch, int64_t b, int64_t h)
      : call_(call), sizes_(call.sizes), scratch_(scratch), b_(b), h_(h) {}

  void Sort() const {
    if (call_.logits.empty()) Pool();
    if (call_.logits.empty() && sizes_.causal) SumPrefixes();
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
  // Returns A_u over its support.
  Doubles Logits(int64_t u) const {
    return Doubles(scratch_.logits + u * sizes_.Columns(), sizes_.Support(u));
  }
  Doubles Pooled(int64_t u) const {
    return Doubles(scratch_.pooled + u * sizes_.width, sizes_.width);
  }

  // Adds x_j to the sum, where j is a token.
  void AddToken(int64_t j, double* sum) const {
    if (!IsToken(sizes_, call_.key_mask, b_, j)) return;
    for (const PooledRows& part : call_.pooled) {
      if (part.rows.empty()) continue;
      const int64_t channels = part.rows.dim(3);
      for (int64_t g = 0; g < part.heads_summed; ++g) {
        LoadRow(part.rows, part.rows.Offset(b_, h_ * part.heads_summed + g, j), part.rows.stride(3),
                channels, scratch_.row);
        Doubles(sum, channels) += Eigen::Map<Eigen::ArrayXf>(scratch_.row, channels).cast<double>();
      }
      sum += channels;
    }
  }

  void Pool() const {
    std::fill_n(scratch_.pooled, sizes_.blocks * sizes_.width, 0.0);
    for (int64_t j = 0; j < sizes_.tokens; ++j) AddToken(j, Pooled(j / sizes_.block).data());
  }
  // Turns the sums of blocks into those of all tokens up to a block's first.
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

  // Returns relu(W_1' X_u + b_1).
  Doubles Hidden(int64_t u) const {
    const int64_t units = sizes_.hidden;
    Doubles hidden(scratch_.hidden, units);
    Multiply(Pooled(u), call_.network.hidden_weights + h_ * sizes_.width * units, units,
             call_.network.hidden_bias + h_ * units, hidden);
    hidden = (hidden < 0).select(0, hidden);
    return hidden;
  }

  // Returns R_u, and for scores that are not given its last step is still to do.
  Doubles LastLayer(int64_t u) const {
    const int64_t columns = sizes_.Columns();
    Doubles logits = Logits(u);
    if (!call_.logits.empty()) {
      for (int64_t t = 0; t < logits.size(); ++t) {
        logits[t] = static_cast<double>(*call_.logits.At<float>(b_, h_, u, t));
      }
      return logits;
    }
    const Doubles in = sizes_.hidden > 0 ? Hidden(u) : Pooled(u);
    Multiply(in, call_.network.score_weights + h_ * in.size() * columns, columns,
             call_.network.score_bias + h_ * columns, logits);
    return logits;
  }

  void Score(int64_t u) const {
    const SortScores step = sizes_.scores;
    Doubles logits = LastLayer(u);
    for (int64_t t = 0; t < logits.size(); ++t) {
      double score = logits[t];
      if ((step == SortScores::kRelu || step == SortScores::kLogRelu) && score < 0) score = 0;
      if (step == SortScores::kLogRelu) score = std::log(score + 1e-6);
      if (!call_.noise.empty()) score += static_cast<double>(*call_.noise.At<float>(b_, h_, u, t));
      logits[t] = score / sizes_.temperature;
    }
  }

  void NormaliseRow(int64_t u) const {
    Doubles logits = Logits(u);
    if (logits.size() == 0) return;
    const double max = logits.maxCoeff();
    logits -= max + std::log((logits - max).exp().sum());
  }

  void NormaliseColumns() const {
    Doubles max(scratch_.column_max, sizes_.Columns()), sum(scratch_.column_sum, sizes_.Columns());
    max.setConstant(-kInfinity);
    sum.setZero();
    for (int64_t u = 0; u < sizes_.blocks; ++u) max = max.max(Logits(u));
    for (int64_t u = 0; u < sizes_.blocks; ++u) sum += (Logits(u) - max).exp();
    max += sum.log();
    for (int64_t u = 0; u < sizes_.blocks; ++u) Logits(u) -= max;
  }

  // Normalises columns. The sum of a column so far is exp(max) sum.
  void NormalisePrefixesOfColumns() const {
    Doubles(scratch_.column_max, sizes_.Columns()).setConstant(-kInfinity);
    Doubles(scratch_.column_sum, sizes_.Columns()).setZero();
    for (int64_t u = 0; u < sizes_.blocks; ++u) {
      Doubles logits = Logits(u);
      const int64_t columns = logits.size();
      Doubles max(scratch_.column_max, columns), sum(scratch_.column_sum, columns);
      Doubles new_max(scratch_.new_max, columns);
      new_max = max.max(logits);
      sum = sum * (max - new_max).exp() + (logits - new_max).exp();
      max = new_max;
      logits -= max + sum.log();
    }
  }

  // Stores S_u. Numbers that are denormal in fp32 become 0: they would make products slow, and
  // change no sum.
  void StoreRow(int64_t u) const {
    Doubles logits = Logits(u);
    logits = logits.exp();
    for (int64_t t = 0; t < sizes_.Columns(); ++t) {
      const bool counts = t < logits.size() && !(logits[t] < std::numeric_limits<float>::min());
      call_.sort.Set(call_.sort.Offset(b_, h_, u, t), counts ? logits[t] : 0);
    }
  }

  const SortCall& call_;
  const SinkhornSizes& sizes_;
  const SortScratch& scratch_;
  int64_t b_;
  int64_t h_;
};

// ---- Sums of blocks ----

constexpr int64_t kChannels = 64;  // channels of a task: 128 blocks of 64 floats are 32 KiB
constexpr int64_t kCausalRows = 16;

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

// The channels of a task's row.
struct RowPart {
  int64_t first;
  int64_t count;
};

void LoadPart(const ConstTensorView& view, int64_t offset, const RowPart& part, float* to) {
  LoadRow(view, offset + part.first * view.stride(3), view.stride(3), part.count, to);
}
void LoadPart(const ConstTensorView& view, int64_t offset, const RowPart& part, double* to) {
  float row[kChannels];
  LoadPart(view, offset, part, row);
  std::copy_n(row, part.count, to);
}
void StorePart(const float* from, const RowPart& part, const TensorView& view, int64_t offset) {
  StoreRow(from, part.count, view, offset + part.first * view.stride(3), view.stride(3));
}
void StorePart(const double* from, const RowPart& part, const TensorView& view, int64_t offset) {
  float row[kChannels];
  std::copy_n(from, part.count, row);
  StorePart(row, part, view, offset);
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
    for (int64_t n = 0; n < sizes.null_blocks; ++n) {
      Real* row = scratch.rows + n * kChannels;
      std::copy_n(null_rows + h * channels + part.first, part.count, row);
      std::fill(row + part.count, row + kChannels, Real{0});
    }
    for (int64_t t = 0; t < sizes.blocks; ++t) {
      const int64_t j = t * sizes.block + r;
      Real* row = scratch.rows + (sizes.null_blocks + t) * kChannels;
      const int64_t count = IsToken(sizes, key_mask, b, j) ? part.count : 0;
      if (count > 0) LoadPart(from, from.Offset(b, h, j), part, row);
      std::fill(row + count, row + kChannels, Real{0});
    }
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
    Sorter(call, scratch, task / call.sizes.heads, task % call.sizes.heads).Sort();
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
