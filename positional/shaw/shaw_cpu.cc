#include "positional/shaw/shaw_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/flash/turn.h"
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
    LoadKeys(first_query, end_query);
    for (int64_t i = first_query; i < end_query; ++i) RunQuery(i);
  }

 protected:
  // The near keys of a query, in the order of their bins.
  struct Near {
    int64_t first;
    int64_t first_bin;
    int64_t count;
  };
  struct Softmax {
    Near near;
    float max = kHidden;
    float sum = 0;
  };

  // Loads the near keys of some queries; a masked one, and its value, as zeros.
  void LoadKeys(int64_t first_query, int64_t end_query) {
    first_key_ = sizes_.FirstNear(sizes_.Position(first_query));
    const int64_t last = sizes_.LastNear(sizes_.Position(end_query - 1));
    const int64_t head = h_ / sizes_.group;
    keys_ = std::max<int64_t>(last - first_key_ + 1, 0);
    for (int64_t j = first_key_; j <= last; ++j) {
      const int64_t row = j - first_key_;
      float* value = scratch_.values + row * sizes_.value_row;
      std::fill_n(value, sizes_.value_row, 0.0f);
      std::fill_n(scratch_.keys + row * sizes_.head_dim, sizes_.head_dim, 0.0f);
      scratch_.seen[row] = call_.key_mask.empty() || *call_.key_mask.At<uint8_t>(b_, j) != 0;
      if (scratch_.seen[row] == 0) continue;  // its value has weight 0 and must not contribute NaN
      LoadRow(call_.k, call_.k.Offset(b_, head, j), call_.k.stride(3), sizes_.head_dim,
              scratch_.keys + row * sizes_.head_dim);
      LoadRow(call_.v, call_.v.Offset(b_, head, j), call_.v.stride(3), sizes_.value_dim, value);
    }
  }

  // Loads a query, scaled, and replaces the logits of its bins by softmax numerators.
  Softmax Weigh(int64_t i) {
    const int64_t position = sizes_.Position(i);
    const int64_t first = sizes_.FirstNear(position), last = sizes_.LastNear(position);
    LoadRow(call_.q, call_.q.Offset(b_, h_, i), call_.q.stride(3), sizes_.head_dim, scratch_.query);
    for (int64_t c = 0; c < sizes_.head_dim; ++c) scratch_.query[c] *= sizes_.scale;
    Softmax softmax;
    softmax.near = {first, first - position + sizes_.max_distance,
                    std::max<int64_t>(last - first + 1, 0)};
    FindLogits(i, softmax.near.first, softmax.near.first_bin, softmax.near.count);
    float rescale = 1;
    kernels_.softmax({scratch_.logits, PaddedBins(sizes_), 1, PaddedBins(sizes_)},
                     {&softmax.max, &softmax.sum, &rescale}, nullptr);
    return softmax;
  }

  void RunQuery(int64_t i) {
    const auto [near, max, sum] = Weigh(i);
    AddValues(i, near.first, near.first_bin, near.count);
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
    const float content = call_.far.log_sum_exp[part][Row(i)];
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
      const float* row = call_.far.rows[part] + Row(i) * sizes_.value_dim;
      for (int64_t c = 0; c < sizes_.value_dim; ++c) output[c] += weight * row[c];
    }
  }

  int64_t Row(int64_t i) const { return (b_ * sizes_.query_heads + h_) * sizes_.query_tokens + i; }

  const ShawSizes& sizes_;
  const ShawCall& call_;
  const CpuKernels& kernels_;
  int64_t b_;
  int64_t h_;
  const float* key_table_;
  const float* value_table_;
  Scratch scratch_;
  int64_t first_key_ = 0;
  int64_t keys_ = 0;  // that are loaded, from first_key_ on
};

int64_t KeyRow(const ShawSizes& sizes) { return RoundUp(sizes.head_dim, kColumnQuantum); }

// What a thread has for a backward pass beside the scratch of the forward pass. Rows of queries are
// a tile's; those of keys are the keys that Scratch has.
struct BackwardScratch {
  float* queries;           // [64][key_row], scaled
  float* gradients;         // [64][value_row], g
  float* weights;           // [64][bins, padded]
  float* score_gradients;   // [64][bins, padded], ds
  float* query_gradients;   // [64][key_row], unscaled
  float* key_rows;          // [keys of a tile][key_row]
  float* key_gradients;     // [keys of a tile][key_row]
  float* value_gradients;   // [keys of a tile][value_row]
  float* table_rows;        // [bins][key_row], P^K of the head
  float* key_table_sums;    // [bins][key_row]
  float* value_table_sums;  // [bins][value_row]
};

BackwardScratch LayOutBackward(const ShawSizes& sizes, Workspace& workspace) {
  const int64_t keys = std::min(kTile + 2 * sizes.max_distance, sizes.kv_tokens);
  const int64_t key_row = KeyRow(sizes), bins = sizes.bins();
  const auto take = [&](int64_t floats) { return workspace.Take<float>(floats); };
  BackwardScratch scratch;
  scratch.queries = take(kTile * key_row);
  scratch.gradients = take(kTile * sizes.value_row);
  scratch.weights = take(kTile * PaddedBins(sizes));
  scratch.score_gradients = take(kTile * PaddedBins(sizes));
  scratch.query_gradients = take(kTile * key_row);
  scratch.key_rows = take(keys * key_row);
  scratch.key_gradients = take(keys * key_row);
  scratch.value_gradients = take(keys * sizes.value_row);
  scratch.table_rows = take(bins * key_row);
  scratch.key_table_sums = take(bins * key_row);
  scratch.value_table_sums = take(bins * sizes.value_row);
  return scratch;
}

// The counts of the tasks that have added to common sums.
struct Turns {
  Turn* keys;    // [batch][kv_heads]
  Turn* tables;  // [table_heads]
};

// The gradients of one head of one batch row, a tile of queries at a time.
class ShawHeadBackward : public ShawHead {
 public:
  ShawHeadBackward(const ShawSizes& sizes, const ShawCall& call, const ShawGradients& gradients,
                   int64_t b, int64_t h, const Scratch& scratch, const BackwardScratch& own)
      : ShawHead(sizes, call, b, h, scratch),
        gradients_(gradients),
        own_(own),
        key_row_(KeyRow(sizes)),
        bin_row_(PaddedBins(sizes)) {}

  // Adds the gradients of queries, and of far keys, and sums the others.
  void RunTile(int64_t first_query, int64_t end_query) {
    LoadKeys(first_query, end_query);
    PadRows(scratch_.keys, keys_, own_.key_rows);
    PadRows(key_table_, sizes_.bins(), own_.table_rows);
    const int64_t rows = end_query - first_query, bins = sizes_.bins();
    std::fill_n(own_.query_gradients, rows * key_row_, 0.0f);
    std::fill_n(own_.key_gradients, keys_ * key_row_, 0.0f);
    std::fill_n(own_.value_gradients, keys_ * sizes_.value_row, 0.0f);
    for (int64_t r = 0; r < rows; ++r) RunQuery(first_query + r, r);
    kernels_.gemm(rows, key_row_, bins, own_.score_gradients, bin_row_, 1, own_.table_rows,
                  key_row_, own_.query_gradients, key_row_, true);
    kernels_.gemm(bins, key_row_, rows, own_.score_gradients, 1, bin_row_, own_.queries, key_row_,
                  own_.key_table_sums, key_row_, false);
    kernels_.gemm(bins, sizes_.value_row, rows, own_.weights, 1, bin_row_, own_.gradients,
                  sizes_.value_row, own_.value_table_sums, sizes_.value_row, false);
    for (int64_t r = 0; r < rows && !gradients_.q.empty(); ++r) {
      Add(sizes_.scale, own_.query_gradients + r * key_row_, sizes_.head_dim,
          gradients_.q.MutableAt<float>(b_, h_, first_query + r), gradients_.q.stride(3));
    }
  }

  // Adds the tile's sums to the gradients of near keys and values; a masked one has none.
  void AddKeys() const {
    const int64_t head = h_ / sizes_.group;
    const TensorView &k = gradients_.k, &v = gradients_.v;
    for (int64_t row = 0; row < keys_; ++row) {
      if (scratch_.seen[row] == 0) continue;
      const int64_t j = first_key_ + row;
      if (!k.empty()) {
        Add(1.0f, own_.key_gradients + row * key_row_, sizes_.head_dim,
            k.MutableAt<float>(b_, head, j), k.stride(3));
      }
      if (!v.empty()) {
        Add(1.0f, own_.value_gradients + row * sizes_.value_row, sizes_.value_dim,
            v.MutableAt<float>(b_, head, j), v.stride(3));
      }
    }
  }
  // Adds the tile's sums to those of the tables.
  void AddTables() const {
    const int64_t first_bin = h_ % sizes_.table_heads * sizes_.bins();
    for (int64_t bin = 0; bin < sizes_.bins(); ++bin) {
      Add(1.0, own_.key_table_sums + bin * key_row_, sizes_.head_dim,
          gradients_.key_table + (first_bin + bin) * sizes_.head_dim, 1);
      if (value_table_ == nullptr) continue;
      Add(1.0, own_.value_table_sums + bin * sizes_.value_row, sizes_.value_dim,
          gradients_.value_table + (first_bin + bin) * sizes_.value_dim, 1);
    }
  }

 private:
  template <class Sum>
  static void Add(Sum factor, const float* from, int64_t channels, Sum* to, int64_t stride) {
    for (int64_t c = 0; c < channels; ++c) to[c * stride] += factor * from[c];
  }
  // Copies rows of head_dim channels, each with zeros behind them.
  void PadRows(const float* from, int64_t rows, float* to) const {
    for (int64_t n = 0; n < rows; ++n) {
      std::copy_n(from + n * sizes_.head_dim, sizes_.head_dim, to + n * key_row_);
      std::fill(to + n * key_row_ + sizes_.head_dim, to + (n + 1) * key_row_, 0.0f);
    }
  }

  // Row r of the tile is query i.
  void RunQuery(int64_t i, int64_t r) {
    float* g = own_.gradients + r * sizes_.value_row;
    float* query = own_.queries + r * key_row_;
    float* weights = own_.weights + r * bin_row_;
    float* score_gradients = own_.score_gradients + r * bin_row_;
    LoadRow(gradients_.out, gradients_.out.Offset(b_, h_, i), gradients_.out.stride(3),
            sizes_.value_dim, g);
    std::fill(g + sizes_.value_dim, g + sizes_.value_row, 0.0f);
    std::fill_n(weights, bin_row_, 0.0f);
    std::fill_n(score_gradients, bin_row_, 0.0f);
    const float e =
        gradients_.log_sum_exp.empty() ? 0.0f : *gradients_.log_sum_exp.At<float>(b_, h_, i);
    if (e == 0 && std::all_of(g, g + sizes_.value_dim, [](float value) { return value == 0; })) {
      std::fill_n(query, key_row_, 0.0f);
      return;
    }
    const Softmax softmax = Weigh(i);
    PadRows(scratch_.query, 1, query);
    if (softmax.sum == 0) return;
    for (int64_t bin = 0; bin < sizes_.bins(); ++bin) {
      weights[bin] = scratch_.logits[bin] / softmax.sum;
    }
    DifferentiateScores(i, softmax.near, g, e, weights, score_gradients);
    AddFarKeys(i, g, weights, score_gradients);
    AddNearKeys(softmax.near, g, weights, query, score_gradients,
                own_.query_gradients + r * key_row_);
  }

  // Computes ds.
  void DifferentiateScores(int64_t i, const Near& near, const float* g, float e,
                           const float* weights, float* gradients) const {
    const int64_t bins = sizes_.bins(), row = sizes_.value_row;
    if (value_table_ != nullptr) {
      kernels_.matrix_vector(bins, row, value_table_, row, g, gradients, 1, false);
    }
    kernels_.matrix_vector(near.count, row, scratch_.values + (near.first - first_key_) * row, row,
                           g, gradients + near.first_bin, 1, true);
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      float product = 0;
      kernels_.matrix_vector(1, sizes_.value_dim, call_.far.rows[part] + Row(i) * sizes_.value_dim,
                             sizes_.value_dim, g, &product, 1, false);
      gradients[part * (bins - 1)] += product;
    }
    double delta = -e;
    for (int64_t bin = 0; bin < bins; ++bin) {
      if (weights[bin] != 0) delta += double{weights[bin]} * gradients[bin];
    }
    for (int64_t bin = 0; bin < bins; ++bin) {
      gradients[bin] =
          weights[bin] == 0 ? 0.0f : weights[bin] * (gradients[bin] - static_cast<float>(delta));
    }
  }

  void AddFarKeys(int64_t i, const float* g, const float* weights,
                  const float* score_gradients) const {
    for (int64_t part = 0; part < sizes_.far_parts; ++part) {
      const int64_t bin = part * (sizes_.bins() - 1);
      if (weights[bin] == 0) continue;
      Add(weights[bin], g, sizes_.value_dim, gradients_.far_rows[part] + Row(i) * sizes_.value_dim,
          1);
      gradients_.far_log_sum_exp[part][Row(i)] += score_gradients[bin];
    }
  }

  void AddNearKeys(const Near& near, const float* g, const float* weights, const float* query,
                   const float* score_gradients, float* query_gradient) const {
    const int64_t row = near.first - first_key_, value_row = sizes_.value_row;
    const float* ds = score_gradients + near.first_bin;
    kernels_.gemm(near.count, key_row_, 1, ds, 1, 1, query, key_row_,
                  own_.key_gradients + row * key_row_, key_row_, true);
    kernels_.gemm(near.count, value_row, 1, weights + near.first_bin, 1, 1, g, value_row,
                  own_.value_gradients + row * value_row, value_row, true);
    kernels_.gemm(1, key_row_, near.count, ds, near.count, 1, own_.key_rows + row * key_row_,
                  key_row_, query_gradient, key_row_, true);
  }

  const ShawGradients& gradients_;
  const BackwardScratch own_;
  const int64_t key_row_;
  const int64_t bin_row_;
};

Turns LayOutTurns(const ShawSizes& sizes, Workspace& workspace) {
  const int64_t kv_heads = sizes.query_heads / sizes.group;
  return {workspace.Take<Turn>(sizes.batch * kv_heads), workspace.Take<Turn>(sizes.table_heads)};
}
size_t BackwardScratchBytes(const ShawSizes& sizes) {
  return Workspace::Measure([&](Workspace& workspace) {
    LayOut(sizes, workspace);
    LayOutBackward(sizes, workspace);
  });
}

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

size_t ShawCpuBackwardWorkspaceBytes(const ShawSizes& sizes, int threads) {
  return Workspace::Measure([&](Workspace& workspace) { LayOutTurns(sizes, workspace); }) +
         static_cast<size_t>(threads) * BackwardScratchBytes(sizes);
}

// Task n is of head n % query_heads, so that neighbours wait for each other only where heads share
// keys or tables.
void ShawCpuBackward(const ShawSizes& sizes, const ShawCall& call, const ShawGradients& gradients,
                     const Execution& execution) {
  const size_t bytes = BackwardScratchBytes(sizes);
  const int64_t heads = sizes.query_heads, group = sizes.group;
  const int64_t tiles = (sizes.query_tokens + kTile - 1) / kTile;
  Workspace workspace(execution.workspace);
  const Turns turns = LayOutTurns(sizes, workspace);
  std::uninitialized_value_construct_n(turns.keys, sizes.batch * heads / group);
  std::uninitialized_value_construct_n(turns.tables, sizes.table_heads);
  const absl::Span<std::byte> scratch = workspace.Rest();
  execution.pool->ParallelFor(sizes.batch * tiles * heads, [&](int64_t task, int worker) {
    const int64_t h = task % heads, tile = task / heads % tiles, b = task / heads / tiles;
    Workspace own(scratch.subspan(static_cast<size_t>(worker) * bytes, bytes));
    const Scratch of_forward = LayOut(sizes, own);
    ShawHeadBackward head(sizes, call, gradients, b, h, of_forward, LayOutBackward(sizes, own));
    head.RunTile(tile * kTile, std::min((tile + 1) * kTile, sizes.query_tokens));
    Turn& of_keys = turns.keys[(b * heads + h) / group];
    Await(of_keys, tile * group + h % group);
    head.AddKeys();
    Pass(of_keys, tile * group + h % group);
    Turn& of_table = turns.tables[h % sizes.table_heads];
    const int64_t number = sizes.table_heads == 1 ? task : task / heads;
    Await(of_table, number);
    head.AddTables();
    Pass(of_table, number);
  });
}

}  // namespace tfb::shaw
