#include "positional/shaw/shaw_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/workspace.h"

namespace tfb::shaw {
namespace {

// Queries of a task: with k = 16 it loads 94 keys for 64 queries.
constexpr int64_t kTile = 64;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// The scratch of a thread.
struct Scratch {
  float* query;   // [head_dim]
  float* keys;    // [keys of a tile][head_dim]
  float* values;  // [keys of a tile][value_row]
  uint8_t* seen;  // [keys of a tile]
  float* logits;  // [bins, padded]
  float* output;  // [value_row]
};

int64_t PaddedBins(const ShawSizes& sizes) { return RoundUp(sizes.bins(), kColumnQuantum); }

Scratch LayOut(const ShawSizes& sizes, Workspace& workspace) {
  const int64_t keys = std::min(kTile + 2 * sizes.max_distance, sizes.kv_tokens);
  Scratch scratch;
  scratch.query = workspace.Take<float>(sizes.head_dim);
  scratch.keys = workspace.Take<float>(keys * sizes.head_dim);
  scratch.values = workspace.Take<float>(keys * sizes.value_row);
  scratch.seen = workspace.Take<uint8_t>(keys);
  scratch.logits = workspace.Take<float>(PaddedBins(sizes));
  scratch.output = workspace.Take<float>(sizes.value_row);
  return scratch;
}

// One head of one batch row.
class ShawHead {
 public:
  ShawHead(const ShawSizes& sizes, const ShawCall& call, int64_t b, int64_t h,
           const Scratch& scratch)
      : sizes_(sizes),
        call_(call),
        kernels_(BestCpuKernels()),
        b_(b),
        h_(h),
        key_table_(call.key_table + h % sizes.table_heads * sizes.bins() * sizes.head_dim),
        value_table_(call.value_table == nullptr
                         ? nullptr
                         : call.value_table +
                               h % sizes.table_heads * sizes.bins() * sizes.value_row),
        scratch_(scratch) {}

  void RunTile(int64_t first_query, int64_t end_query) {
    first_key_ = sizes_.FirstNear(sizes_.Position(first_query));
    LoadKeys(sizes_.LastNear(sizes_.Position(end_query - 1)));
    for (int64_t i = first_query; i < end_query; ++i) RunQuery(i);
  }

 private:
  // Loads the keys from first_key_ to `last`.
  void LoadKeys(int64_t last) {
    const int64_t head = h_ / sizes_.group;
    for (int64_t j = first_key_; j <= last; ++j) {
      const int64_t row = j - first_key_;
      float* value = scratch_.values + row * sizes_.value_row;
      std::fill_n(value, sizes_.value_row, 0.0f);
      scratch_.seen[row] = call_.key_mask.empty() || *call_.key_mask.At<uint8_t>(b_, j) != 0;
      if (scratch_.seen[row] == 0) continue;  // its value has weight 0 and must not contribute NaN
      LoadRow(call_.k, call_.k.Offset(b_, head, j), call_.k.stride(3), sizes_.head_dim,
              scratch_.keys + row * sizes_.head_dim);
      LoadRow(call_.v, call_.v.Offset(b_, head, j), call_.v.stride(3), sizes_.value_dim, value);
    }
  }

  void RunQuery(int64_t i) {
    const int64_t position = sizes_.Position(i);
    const int64_t first = sizes_.FirstNear(position), last = sizes_.LastNear(position);
    LoadRow(call_.q, call_.q.Offset(b_, h_, i), call_.q.stride(3), sizes_.head_dim, scratch_.query);
    for (int64_t c = 0; c < sizes_.head_dim; ++c) scratch_.query[c] *= sizes_.scale;
    const int64_t first_bin = first - position + sizes_.max_distance;
    const int64_t near = std::max<int64_t>(last - first + 1, 0);
    FindLogits(i, first, first_bin, near);
    float max = kHidden, sum = 0, rescale = 1;
    kernels_.softmax({scratch_.logits, PaddedBins(sizes_), 1, PaddedBins(sizes_)},
                     {&max, &sum, &rescale}, nullptr);
    AddValues(i, first, first_bin, near);
    const float inverse = sum == 0 ? 0.0f : 1 / sum;
    for (int64_t c = 0; c < sizes_.value_dim; ++c) scratch_.output[c] *= inverse;
    StoreRow(scratch_.output, sizes_.value_dim, call_.out, call_.out.Offset(b_, h_, i),
             call_.out.stride(3));
    if (!call_.log_sum_exp.empty()) {
      *call_.log_sum_exp.MutableAt<float>(b_, h_, i) = sum == 0 ? kHidden : max + std::log(sum);
    }
  }

  // Computes logits. The near keys from `first` on have the bins from first_bin on.
  void FindLogits(int64_t i, int64_t first, int64_t first_bin, int64_t near) {
    float* logits = scratch_.logits;
    const int64_t bins = sizes_.bins();
    std::fill(logits + bins, logits + PaddedBins(sizes_), kHidden);
    kernels_.matrix_vector(bins, sizes_.head_dim, key_table_, sizes_.head_dim, scratch_.query,
                           logits, 1, false);
    const float* keys = scratch_.keys + (first - first_key_) * sizes_.head_dim;
    kernels_.matrix_vector(near, sizes_.head_dim, keys, sizes_.head_dim, scratch_.query,
                           logits + first_bin, 1, true);
    for (int64_t n = 0; n < near; ++n) {
      if (scratch_.seen[first - first_key_ + n] == 0) logits[first_bin + n] = kHidden;
    }
    // The first and the last bin, which are the same where k = 0, are those of far keys.
    logits[0] = FarLogit(0, i, logits[0]);
    if (bins == 1) return;
    logits[bins - 1] = FarLogit(1, i, logits[bins - 1]);
    if (near == 0) first_bin = bins - 1;
    std::fill(logits + 1, logits + first_bin, kHidden);
    std::fill(logits + first_bin + near, logits + bins - 1, kHidden);
  }
  // Returns -inf for a part without keys, whatever the query is.
  float FarLogit(int64_t part, int64_t i, float position) const {
    if (part >= sizes_.far_parts) return kHidden;
    const float content = call_.far.log_sum_exp[FarRow(part, i)];
    return content == kHidden ? kHidden : content + position;
  }

  // The logits have been replaced by weights.
  void AddValues(int64_t i, int64_t first, int64_t first_bin, int64_t near) {
    const int64_t bins = sizes_.bins(), value_row = sizes_.value_row;
    const float* weights = scratch_.logits;
    float* output = scratch_.output;
    kernels_.gemm(1, value_row, near, weights + first_bin, near, 1,
                  scratch_.values + (first - first_key_) * value_row, value_row, output, value_row,
                  false);
    if (value_table_ != nullptr) {
      kernels_.gemm(1, value_row, bins, weights, bins, 1, value_table_, value_row, output,
                    value_row, true);
    }
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      const float weight = weights[part * (bins - 1)];
      const float* row = call_.far.rows + FarRow(part, i) * sizes_.value_dim;
      for (int64_t c = 0; c < sizes_.value_dim; ++c) output[c] += weight * row[c];
    }
  }

  int64_t FarRow(int64_t part, int64_t i) const {
    return ((part * sizes_.batch + b_) * sizes_.query_heads + h_) * sizes_.query_tokens + i;
  }

  const ShawSizes& sizes_;
  const ShawCall& call_;
  const CpuKernels& kernels_;
  int64_t b_;
  int64_t h_;
  const float* key_table_;
  const float* value_table_;
  Scratch scratch_;
  int64_t first_key_ = 0;
};

}  // namespace

size_t ShawCpuWorkspaceBytes(const ShawSizes& sizes, int threads) {
  return static_cast<size_t>(threads) *
         Workspace::Measure([&](Workspace& workspace) { LayOut(sizes, workspace); });
}

void ShawCpu(const ShawSizes& sizes, const ShawCall& call, const Execution& execution) {
  const size_t bytes = ShawCpuWorkspaceBytes(sizes, 1);
  const int64_t tiles = (sizes.query_tokens + kTile - 1) / kTile;
  execution.pool->ParallelFor(sizes.batch * sizes.query_heads * tiles, [&](int64_t task,
                                                                           int worker) {
    Workspace workspace(execution.workspace.subspan(static_cast<size_t>(worker) * bytes, bytes));
    const int64_t head = task / tiles, first = task % tiles * kTile;
    ShawHead(sizes, call, head / sizes.query_heads, head % sizes.query_heads,
             LayOut(sizes, workspace))
        .RunTile(first, std::min(first + kTile, sizes.query_tokens));
  });
}

}  // namespace tfb::shaw
