// Holds what the CPU's sorting of blocks and its backward pass share: the matrix of one head,
// and rows of blocks.
#ifndef TFB_ATTENTION_SINKHORN_SORTER_H_
#define TFB_ATTENTION_SINKHORN_SORTER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "Eigen/Core"
#include "attention/sinkhorn/sinkhorn_cpu.h"
#include "attention/sinkhorn/sinkhorn_sizes.h"
#include "core/flash/rows.h"
#include "core/tensor.h"
#include "core/workspace.h"

namespace tfb::sinkhorn {

inline bool IsToken(const SinkhornSizes& sizes, const ConstTensorView& key_mask, int64_t b,
                    int64_t j) {
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

inline SortScratch LayOutSort(const SinkhornSizes& sizes, Workspace& workspace) {
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

using Doubles = Eigen::Map<Eigen::ArrayXd>;
using ConstDoubles = Eigen::Map<const Eigen::ArrayXd>;

// The matrix of head h of sequence b, step by step, in the scratch.
class Sorter {
 public:
  Sorter(const SortCall& call, const SortScratch& scratch, int64_t b, int64_t h)
      : call_(call), sizes_(call.sizes), scratch_(scratch), b_(b), h_(h) {}

  // Makes A as it is before rows and columns are normalised.
  void ScoreBlocks() const {
    if (call_.logits.empty()) Pool();
    if (call_.logits.empty() && sizes_.causal) SumPrefixes();
    for (int64_t u = 0; u < sizes_.blocks; ++u) Score(u);
  }
  void NormaliseRows() const {
    for (int64_t u = 0; u < sizes_.blocks; ++u) NormaliseRow(u);
  }
  void NormaliseColumns() const {
    if (sizes_.causal) {
      NormalisePrefixesOfColumns();
    } else {
      NormaliseWholeColumns();
    }
  }
  // Writes S to the call's matrix. Numbers that are denormal in fp32 become 0: they would make
  // products slow, and change no sum.
  void Store() const {
    for (int64_t u = 0; u < sizes_.blocks; ++u) StoreRow(u);
  }

  // Returns A_u over its support.
  Doubles Logits(int64_t u) const {
    return Doubles(scratch_.logits + u * sizes_.Columns(), sizes_.Support(u));
  }
  Doubles Pooled(int64_t u) const {
    return Doubles(scratch_.pooled + u * sizes_.width, sizes_.width);
  }

  // Returns relu(W_1' X_u + b_1), in the scratch.
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

 private:
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

  void NormaliseWholeColumns() const {
    Doubles max(scratch_.column_max, sizes_.Columns()), sum(scratch_.column_sum, sizes_.Columns());
    max.setConstant(-std::numeric_limits<double>::infinity());
    sum.setZero();
    for (int64_t u = 0; u < sizes_.blocks; ++u) max = max.max(Logits(u));
    for (int64_t u = 0; u < sizes_.blocks; ++u) sum += (Logits(u) - max).exp();
    max += sum.log();
    for (int64_t u = 0; u < sizes_.blocks; ++u) Logits(u) -= max;
  }

  // Normalises columns. The sum of a column so far is exp(max) sum.
  void NormalisePrefixesOfColumns() const {
    Doubles(scratch_.column_max, sizes_.Columns())
        .setConstant(-std::numeric_limits<double>::infinity());
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

// ---- Rows of blocks ----

constexpr int64_t kChannels = 64;  // channels of a task: 128 blocks of 64 floats are 32 KiB
constexpr int64_t kCausalRows = 16;

// The channels of a task's row.
struct RowPart {
  int64_t first;
  int64_t count;
};

inline void LoadPart(const ConstTensorView& view, int64_t offset, const RowPart& part, float* to) {
  LoadRow(view, offset + part.first * view.stride(3), view.stride(3), part.count, to);
}
inline void LoadPart(const ConstTensorView& view, int64_t offset, const RowPart& part, double* to) {
  float row[kChannels];
  LoadPart(view, offset, part, row);
  std::copy_n(row, part.count, to);
}
inline void StorePart(const float* from, const RowPart& part, const TensorView& view,
                      int64_t offset) {
  StoreRow(from, part.count, view, offset + part.first * view.stride(3), view.stride(3));
}
inline void StorePart(const double* from, const RowPart& part, const TensorView& view,
                      int64_t offset) {
  float row[kChannels];
  std::copy_n(from, part.count, row);
  StorePart(row, part, view, offset);
}

// Rows [batch, heads, tokens, channels] of the blocks that are sorted, with the null block's row of
// each head, [heads][channels], where there is one.
struct BlockRows {
  const SinkhornSizes& sizes;
  const ConstTensorView& rows;
  const double* null_rows;
  const ConstTensorView& key_mask;
};

// Loads a part of row r of every block, the null block first, to rows [columns][kChannels]: zeros
// where it is no token, and behind the part.
template <class Real>
void LoadBlocks(const BlockRows& blocks, int64_t b, int64_t h, int64_t r, const RowPart& part,
                Real* rows) {
  const SinkhornSizes& sizes = blocks.sizes;
  for (int64_t n = 0; n < sizes.null_blocks; ++n) {
    Real* row = rows + n * kChannels;
    std::copy_n(blocks.null_rows + h * blocks.rows.dim(3) + part.first, part.count, row);
    std::fill(row + part.count, row + kChannels, Real{0});
  }
  for (int64_t t = 0; t < sizes.blocks; ++t) {
    const int64_t j = t * sizes.block + r;
    Real* row = rows + (sizes.null_blocks + t) * kChannels;
    const int64_t count = IsToken(sizes, blocks.key_mask, b, j) ? part.count : 0;
    if (count > 0) LoadPart(blocks.rows, blocks.rows.Offset(b, h, j), part, row);
    std::fill(row + count, row + kChannels, Real{0});
  }
}

}  // namespace tfb::sinkhorn

#endif  // TFB_ATTENTION_SINKHORN_SORTER_H_
