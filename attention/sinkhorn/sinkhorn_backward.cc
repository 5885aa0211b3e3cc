#include "attention/sinkhorn/sinkhorn_backward.h"

#include <algorithm>
#include <cmath>

#include "Eigen/Core"
#include "attention/sinkhorn/sinkhorn_device.h"
#include "attention/sinkhorn/sorter.h"
#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb::sinkhorn {
namespace {

constexpr int64_t kPanel = 64;  // columns of S at a time

// Adds floats to a row of a view.
void AddToRow(const float* from, int64_t channels, const TensorView& view, int64_t offset,
              int64_t stride) {
  float* to = static_cast<float*>(view.mutable_data()) + offset;
  if (stride == 1) {
    for (int64_t c = 0; c < channels; ++c) to[c] += from[c];
    return;
  }
  for (int64_t c = 0; c < channels; ++c) to[c * stride] += from[c];
}

// Holds what the tasks share. A head is counted as b heads + h.
struct Memory {
  float* sort;              // [heads][blocks][columns]: S
  double* matrix;           // of that shape: dS, and then the gradient of the network's output
  double* pooled;           // [heads][blocks][width]: X
  double* hidden;           // [heads][blocks][hidden]
  double* hidden_gradient;  // of that shape
  double* pooled_gradient;  // [heads][blocks + 1][width], where causal of the blocks from u on
  float* null_rows;         // [heads][block][channels]: parts of the null row's gradient
};

Memory LayOutMemory(const SinkhornSizes& s, const std::array<int64_t, 2>& channels,
                    Workspace& workspace) {
  const int64_t heads = s.batch * s.heads;
  Memory memory;
  memory.sort = workspace.Take<float>(heads * s.blocks * s.Columns());
  memory.matrix = workspace.Take<double>(heads * s.blocks * s.Columns());
  memory.pooled = workspace.Take<double>(heads * s.blocks * s.width);
  memory.hidden = workspace.Take<double>(heads * s.blocks * s.hidden);
  memory.hidden_gradient = workspace.Take<double>(heads * s.blocks * s.hidden);
  memory.pooled_gradient = workspace.Take<double>(heads * (s.blocks + 1) * s.width);
  memory.null_rows =
      workspace.Take<float>(s.null_blocks * heads * s.block * std::max(channels[0], channels[1]));
  return memory;
}

// The scratch of one thread for dS of one head.
struct MatrixScratch {
  float* rows;     // [columns up to whole panels][kChannels]: one row of every block
  float* panel;    // [kChannels][kPanel]
  float* sorted;   // [mixed_blocks][kChannels]
  float* product;  // [mixed_blocks][columns up to whole panels]
};
MatrixScratch LayOutMatrix(const SinkhornSizes& s, Workspace& workspace) {
  const int64_t columns = RoundUp(s.Columns(), kPanel);
  return {workspace.Take<float>(columns * kChannels), workspace.Take<float>(kChannels * kPanel),
          workspace.Take<float>(s.mixed_blocks * kChannels),
          workspace.Take<float>(s.mixed_blocks * columns)};
}

// The scratch of one thread for the gradients of one row of all blocks.
struct RowsScratch {
  float* sorted;  // [mixed_blocks][kChannels]
  float* sums;    // [columns][kChannels]
};
RowsScratch LayOutRows(const SinkhornSizes& s, Workspace& workspace) {
  return {workspace.Take<float>(s.mixed_blocks * kChannels),
          workspace.Take<float>(s.Columns() * kChannels)};
}

// The scratch of one thread for the gradient of one head's scores.
struct ScoreScratch {
  SortScratch sort;
  int64_t stride;    // iterations from one stored matrix to the next
  double* stored;    // [stored matrices][blocks][columns]
  double* rows;      // [blocks][columns]: a matrix whose rows are normalised
  double* sums;      // [columns]
  double* of_layer;  // [max(hidden, width)]: a gradient
};
ScoreScratch LayOutScores(const SinkhornSizes& s, Workspace& workspace) {
  const int64_t matrix = s.blocks * s.Columns();
  const StoredMatrices stored(s);
  ScoreScratch scratch;
  scratch.sort = LayOutSort(s, workspace);
  scratch.stride = stored.stride;
  scratch.stored = workspace.Take<double>(stored.count * matrix);
  scratch.rows = workspace.Take<double>(matrix);
  scratch.sums = workspace.Take<double>(s.Columns());
  scratch.of_layer = workspace.Take<double>(std::max(s.hidden, s.width));
  return scratch;
}

size_t ThreadBytes(const SinkhornSizes& sizes) {
  const auto bytes = [&](auto lay_out) {
    return Workspace::Measure([&](Workspace& workspace) { lay_out(sizes, workspace); });
  };
  return std::max({bytes(LayOutMatrix), bytes(LayOutRows), bytes(LayOutScores)});
}

class SortBackward {
 public:
  SortBackward(const SortBackwardCall& call, const Memory& memory)
      : call_(call), sizes_(call.forward.sizes), memory_(memory), kernels_(BestCpuKernels()) {}

  // Copies S of a head, and computes dS.
  void OfMatrix(int64_t head, const MatrixScratch& scratch) const {
    const int64_t columns = sizes_.Columns(), row = RoundUp(columns, kPanel);
    const ConstTensorView& sort = call_.forward.sort;
    for (int64_t n = 0; n < sizes_.blocks * columns; ++n) {
      SortOf(head)[n] = static_cast<float>(
          sort.Get(sort.Offset(BatchOf(head), HeadOf(head), n / columns, n % columns)));
    }
    std::fill_n(scratch.product, sizes_.mixed_blocks * row, 0.0f);
    std::fill_n(scratch.rows, row * kChannels, 0.0f);
    for (const MixedGradients& mixed : call_.mixed) {
      for (int64_t r = 0; r < sizes_.block; ++r) {
        for (int64_t first = 0; first < mixed.rows.dim(3); first += kChannels) {
          AddToMatrix(mixed, head, r, PartFrom(first, mixed), scratch);
        }
      }
    }
    double* to = MatrixOf(head);
    std::fill_n(to, sizes_.blocks * columns, 0.0);
    for (int64_t u = 0; u < sizes_.mixed_blocks; ++u) {
      std::copy_n(scratch.product + u * row, sizes_.Support(u), to + u * columns);
    }
  }

  // Adds sum_u S_ut of row r of the sorted blocks' gradients to row r of block t.
  void OfRows(const MixedGradients& mixed, int64_t head, int64_t r, const RowPart& part,
              const RowsScratch& scratch) const {
    const int64_t b = BatchOf(head), h = HeadOf(head);
    LoadSorted(mixed, head, r, part, scratch.sorted);
    SumSorted(head, RoundUp(part.count, kColumnQuantum), scratch);
    for (int64_t n = 0; n < sizes_.null_blocks; ++n) {
      std::copy_n(scratch.sums + n * kChannels, part.count, NullRow(mixed, head, r) + part.first);
    }
    if (mixed.gradient.empty()) return;
    const int64_t stride = mixed.gradient.stride(3);
    for (int64_t t = 0; t < sizes_.blocks; ++t) {
      const int64_t j = t * sizes_.block + r;
      if (!IsToken(sizes_, call_.forward.key_mask, b, j)) continue;
      AddToRow(scratch.sums + (sizes_.null_blocks + t) * kChannels, part.count, mixed.gradient,
               mixed.gradient.Offset(b, h, j) + part.first * stride, stride);
    }
  }
  // Takes dS back to the scores, and to the sums of rows that were pooled.
  void OfScores(int64_t head, ScoreScratch& scratch) const {
    scratch.sort.pooled = memory_.pooled + head * sizes_.blocks * sizes_.width;
    const Sorter sorter(call_.forward, scratch.sort, BatchOf(head), HeadOf(head));
    ThroughBalance(head, sorter, scratch);
  }
  // Takes the gradient of R + g, which OfScores has found, back to those of the sums of rows.
  void OfNetwork(int64_t head, ScoreScratch& scratch) const {
    scratch.sort.pooled = memory_.pooled + head * sizes_.blocks * sizes_.width;
    const Sorter sorter(call_.forward, scratch.sort, BatchOf(head), HeadOf(head));
    for (int64_t u = 0; u < sizes_.blocks; ++u) ThroughNetwork(head, u, sorter, scratch);
    Doubles(PooledGradient(head, sizes_.blocks), sizes_.width).setZero();
    for (int64_t u = sizes_.blocks - 1; sizes_.causal && u >= 0; --u) {
      Doubles(PooledGradient(head, u), sizes_.width) +=
          ConstDoubles(PooledGradient(head, u + 1), sizes_.width);
    }
  }

  RowPart PartFrom(int64_t first, const MixedGradients& mixed) const {
    return {first, std::min(kChannels, mixed.rows.dim(3) - first)};
  }

 private:
  int64_t BatchOf(int64_t head) const { return head / sizes_.heads; }
  int64_t HeadOf(int64_t head) const { return head % sizes_.heads; }
  int64_t MatrixSize() const { return sizes_.blocks * sizes_.Columns(); }
  float* SortOf(int64_t head) const { return memory_.sort + head * MatrixSize(); }
  double* MatrixOf(int64_t head) const { return memory_.matrix + head * MatrixSize(); }
  Doubles MatrixRow(int64_t head, int64_t u) const {
    return Doubles(MatrixOf(head) + u * sizes_.Columns(), sizes_.Support(u));
  }
  double* PooledGradient(int64_t head, int64_t u) const {
    return memory_.pooled_gradient + (head * (sizes_.blocks + 1) + u) * sizes_.width;
  }
  float* NullRow(const MixedGradients& mixed, int64_t head, int64_t r) const {
    return memory_.null_rows + (head * sizes_.block + r) * mixed.rows.dim(3);
  }

  // Loads a part of row r of the sorted blocks' gradients.
  void LoadSorted(const MixedGradients& mixed, int64_t head, int64_t r, const RowPart& part,
                  float* rows) const {
    const ConstTensorView& from = mixed.sorted_gradient;
    for (int64_t u = 0; u < sizes_.mixed_blocks; ++u) {
      float* row = rows + u * kChannels;
      LoadPart(from, from.Offset(BatchOf(head), HeadOf(head), u * sizes_.block + r), part, row);
      std::fill(row + part.count, row + kChannels, 0.0f);
    }
  }

  void AddToMatrix(const MixedGradients& mixed, int64_t head, int64_t r, const RowPart& part,
                   const MatrixScratch& scratch) const {
    const int64_t row = RoundUp(sizes_.Columns(), kPanel);
    LoadSorted(mixed, head, r, part, scratch.sorted);
    LoadBlocks(BlockRows{sizes_, mixed.rows, mixed.null_rows, call_.forward.key_mask},
               BatchOf(head), HeadOf(head), r, part, scratch.rows);
    for (int64_t first = 0; first < row; first += kPanel) {
      kernels_.transpose64(scratch.rows + first * kChannels, kChannels, RoundUp(part.count, 4),
                           scratch.panel);
      kernels_.gemm(sizes_.mixed_blocks, kPanel, part.count, scratch.sorted, kChannels, 1,
                    scratch.panel, kPanel, scratch.product + first, row, true);
    }
  }

  // Returns the first sorted block that has column t in its sum.
  int64_t FirstWith(int64_t t) const {
    return sizes_.causal ? std::max<int64_t>(t - sizes_.null_blocks + 1, 0) : 0;
  }
  // sums[t] = sum_u S_ut sorted[u]. As in the forward pass, columns of S are taken by 16 where
  // causal, and the few blocks that only some of them are in are added one by one.
  void SumSorted(int64_t head, int64_t channels, const RowsScratch& scratch) const {
    const int64_t stride = sizes_.Columns();
    const int64_t at_a_time = sizes_.causal ? kCausalRows : stride;
    const auto add = [&](int64_t t, int64_t columns, int64_t first, int64_t last, bool accumulate) {
      kernels_.gemm(columns, channels, last - first, SortOf(head) + first * stride + t, 1, stride,
                    scratch.sorted + first * kChannels, kChannels, scratch.sums + t * kChannels,
                    kChannels, accumulate);
    };
    for (int64_t first = 0; first < stride; first += at_a_time) {
      const int64_t columns = std::min(at_a_time, stride - first);
      const int64_t shared = std::min(FirstWith(first + columns - 1), sizes_.mixed_blocks);
      if (shared < sizes_.mixed_blocks) {
        add(first, columns, shared, sizes_.mixed_blocks, false);
      } else {
        std::fill_n(scratch.sums + first * kChannels, columns * kChannels, 0.0f);
      }
      for (int64_t t = first; t < first + columns; ++t) {
        if (FirstWith(t) < shared) add(t, 1, FirstWith(t), shared, true);
      }
    }
  }

  // Turns dS into the gradient of R + g.
  void ThroughBalance(int64_t head, const Sorter& sorter, const ScoreScratch& scratch) const {
    double* matrix = scratch.sort.logits;
    const auto iterate = [&](int64_t count) {
      for (int64_t n = 0; n < count; ++n) {
        sorter.NormaliseRows();
        sorter.NormaliseColumns();
      }
    };
    const auto stored = [&](int64_t n) {
      return scratch.stored + n / scratch.stride * MatrixSize();
    };
    sorter.ScoreBlocks();
    for (int64_t n = 0; n < sizes_.iterations; ++n) {
      if (n % scratch.stride == 0) std::copy_n(matrix, MatrixSize(), stored(n));
      iterate(1);
    }
    for (int64_t u = 0; u < sizes_.blocks; ++u) MatrixRow(head, u) *= sorter.Logits(u).exp();
    for (int64_t n = sizes_.iterations - 1; n >= 0; --n) {
      std::copy_n(stored(n), MatrixSize(), matrix);
      iterate(n % scratch.stride);
      sorter.NormaliseRows();
      std::copy_n(matrix, MatrixSize(), scratch.rows);
      sorter.NormaliseColumns();
      if (sizes_.causal) {
        ThroughPrefixesOfColumns(head, sorter, scratch);
      } else {
        ThroughColumns(head, sorter, scratch);
      }
      for (int64_t u = 0; u < sizes_.blocks; ++u) {
        Doubles gradient = MatrixRow(head, u);
        const double sum = gradient.sum();
        gradient -= sum * ConstDoubles(scratch.rows + u * sizes_.Columns(), gradient.size()).exp();
      }
    }
    for (int64_t u = 0; u < sizes_.blocks; ++u) MatrixRow(head, u) /= sizes_.temperature;
  }
  void ThroughColumns(int64_t head, const Sorter& sorter, const ScoreScratch& scratch) const {
    Doubles sum(scratch.sums, sizes_.Columns());
    sum.setZero();
    for (int64_t u = 0; u < sizes_.blocks; ++u) sum += MatrixRow(head, u);
    for (int64_t u = 0; u < sizes_.blocks; ++u) {
      MatrixRow(head, u) -= sorter.Logits(u).exp() * sum;
    }
  }
  void ThroughPrefixesOfColumns(int64_t head, const Sorter& sorter,
                                const ScoreScratch& scratch) const {
    Doubles(scratch.sums, sizes_.Columns()).setZero();
    for (int64_t u = sizes_.blocks - 1; u >= 0; --u) {
      Doubles gradient = MatrixRow(head, u), share = sorter.Logits(u);
      Doubles sum(scratch.sums, gradient.size());
      share = share.exp();
      sum += gradient;
      gradient -= share * sum;
      sum *= 1 - share;
    }
  }

  // Turns the gradient of R_u + g_u into that of the last layer's result, and takes it on to X_u.
  void ThroughNetwork(int64_t head, int64_t u, const Sorter& sorter,
                      const ScoreScratch& scratch) const {
    const int64_t hidden = sizes_.hidden, width = sizes_.width, h = HeadOf(head);
    Doubles gradient = MatrixRow(head, u);
    const Doubles result = sorter.LastLayer(u);
    for (int64_t t = 0; t < gradient.size() && sizes_.scores != SortScores::kLinear; ++t) {
      if (!(result[t] > 0)) gradient[t] = 0;
      if (sizes_.scores == SortScores::kLogRelu) gradient[t] /= std::max(result[t], 0.0) + 1e-6;
    }
    const int64_t depth = hidden > 0 ? hidden : width;
    Doubles of_input(hidden > 0 ? scratch.of_layer : PooledGradient(head, u), depth);
    MultiplyTransposed(call_.forward.network.score_weights + h * depth * sizes_.Columns(),
                       sizes_.Columns(), gradient, of_input);
    if (hidden == 0) return;
    const int64_t n = (head * sizes_.blocks + u) * hidden;
    const ConstDoubles units(scratch.sort.hidden, hidden);  // which LastLayer made
    Doubles(memory_.hidden + n, hidden) = units;
    Doubles of_units(memory_.hidden_gradient + n, hidden);
    of_units = (units > 0).select(of_input, 0);
    MultiplyTransposed(call_.forward.network.hidden_weights + h * width * hidden, hidden, of_units,
                       Doubles(PooledGradient(head, u), width));
  }
  // out[c] = sum_n weights[c][n] in[n], for the first of the `columns` n.
  static void MultiplyTransposed(const double* weights, int64_t columns, const Doubles& in,
                                 Doubles out) {
    for (int64_t c = 0; c < out.size(); ++c) {
      out[c] = (ConstDoubles(weights + c * columns, in.size()) * in).sum();
    }
  }

  const SortBackwardCall& call_;
  const SinkhornSizes& sizes_;
  const Memory& memory_;
  const CpuKernels& kernels_;
};

}  // namespace

size_t SortBackwardWorkspaceBytes(const SinkhornSizes& sizes,
                                  const std::array<int64_t, 2>& channels, int threads) {
  return threads * ThreadBytes(sizes) + Workspace::Measure([&](Workspace& workspace) {
           LayOutMemory(sizes, channels, workspace);
         });
}

absl::Status SortBackwardCpu(const SortBackwardCall& call, const Execution& execution) {
  const SinkhornSizes& sizes = call.forward.sizes;
  const size_t bytes = ThreadBytes(sizes);
  ThreadPool* pool = execution.pool;
  Workspace workspace(execution.workspace);
  std::byte* scratch = workspace.Take<std::byte>(pool->threads() * bytes);
  const Memory memory =
      LayOutMemory(sizes, {call.mixed[0].rows.dim(3), call.mixed[1].rows.dim(3)}, workspace);
  const SortBackward run(call, memory);
  const auto scratch_of = [&](int worker) {
    return Workspace(absl::MakeSpan(scratch + worker * bytes, bytes));
  };
  const auto add_matrix = [&](const TensorView& to) {
    return AddMatrixTo(Device::kCpu, sizes, memory.matrix, to, execution);
  };
  const int64_t heads = sizes.batch * sizes.heads;
  pool->ParallelFor(heads, [&](int64_t head, int worker) {
    Workspace own = scratch_of(worker);
    run.OfMatrix(head, LayOutMatrix(sizes, own));
  });
  for (const MixedGradients& mixed : call.mixed) {
    const int64_t chunks = (mixed.rows.dim(3) + kChannels - 1) / kChannels;
    pool->ParallelFor(heads * sizes.block * chunks, [&](int64_t task, int worker) {
      Workspace own = scratch_of(worker);
      run.OfRows(mixed, task / chunks / sizes.block, task / chunks % sizes.block,
                 run.PartFrom(task % chunks * kChannels, mixed), LayOutRows(sizes, own));
    });
    TFB_RETURN_IF_ERROR(AddNullRowsTo(Device::kCpu, sizes, mixed, memory.null_rows, execution));
  }
  if (call.sort_is_given) return add_matrix(call.sort_gradient);
  const auto for_each_head = [&](auto body) {
    pool->ParallelFor(heads, [&](int64_t head, int worker) {
      Workspace own = scratch_of(worker);
      ScoreScratch of_scores = LayOutScores(sizes, own);
      body(head, of_scores);
    });
  };
  for_each_head([&](int64_t head, ScoreScratch& own) { run.OfScores(head, own); });
  TFB_RETURN_IF_ERROR(add_matrix(call.noise_gradient));
  if (sizes.scores == SortScores::kGiven) return add_matrix(call.logits_gradient);
  for_each_head([&](int64_t head, ScoreScratch& own) { run.OfNetwork(head, own); });
  const NetworkPass pass = {memory.pooled, memory.hidden, memory.hidden_gradient, memory.matrix,
                            memory.pooled_gradient};
  return AddNetworkGradients(Device::kCpu, call, pass, execution);
}

}  // namespace tfb::sinkhorn
