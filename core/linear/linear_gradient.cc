#include "core/linear/linear_gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"

namespace tfb::linear_cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

}  // namespace

void LinearGradient::LoadChunkKeys(int64_t kv_head, int64_t first, Chunk& chunk,
                                   BackwardScratch& scratch) const {
  Keys& keys = chunk.keys;
  LoadKeys(kv_head, first, keys, scratch);
  std::fill_n(chunk.gate_gradient, kChunk, 0.0f);
  for (int64_t j = 0; j < keys.count; ++j) {
    const float* input = keys.tokens.inputs + j * sizes_.input_row;
    if (std::isfinite(keys.tokens.total[j]) && AllFinite(input, problem_.head_dim)) continue;
    ClearColumn(keys.tokens, j);
  }
}

void LinearGradient::LoadChunkQueries(int64_t b, int64_t h, int64_t first, int64_t rows,
                                      QueryChunk& queries, BackwardScratch& scratch) const {
  queries.first = first;
  queries.count = rows;
  if (rows == 0) return;
  const int64_t kept_row = (b * problem_.query_heads + h) * problem_.query_tokens + first;
  for (int64_t t = 0; t < rows; ++t) {
    queries.active[t] = kept_.inverse[kept_row + t] != 0 ? 1.0f : 0.0f;
  }
  const Rows inputs = LoadInputs(inputs_.q, b, h, first, rows, queries.active, scratch);
  MakeFeatures(inputs, rows, h / problem_.group(), nullptr, queries.tokens, scratch);
  std::fill_n(queries.rows, kChunk * sizes_.value_row, 0.0f);
  std::fill_n(queries.sum, kChunk, 0.0f);
  std::fill_n(queries.valid, kChunk, 1.0f);
  for (int64_t t = 0; t < rows; ++t) {
    if (queries.active[t] != 0) {
      LoadGradientRow(b, h, t, kept_.inverse[kept_row + t], kept_.slope[kept_row + t], queries);
    }
  }
}

void LinearGradient::SetVisible(const Keys& keys, QueryChunk& queries) const {
  const int64_t place = PlaceOf(keys, queries);
  for (int64_t t = 0; t < queries.count; ++t) {
    queries.visible[t] = static_cast<int32_t>(place + t + 1);
    queries.factors.reference[t] = keys.running_reference[place + t];
    queries.factors.key_maximum[t] = keys.running_maximum[place + t];
    if (map_.gated) queries.factors.decay[t] = keys.decay[place + t];
  }
}

void LinearGradient::ComputeRowFactors(QueryChunk& queries) const {
  QueryFactors& factors = queries.factors;
  ComputeFactors(queries.count, queries.tokens, factors);
  for (int64_t t = 0; t < queries.count; ++t) {
    queries.shift[t] = Shift(factors.reference[t]);
    queries.key[t] = queries.key_sum[t] = queries.constant[t] = queries.denominator_sum[t] = 0;
    if (queries.active[t] == 0) continue;
    const float valid = queries.valid[t];
    if (std::isnan(valid)) factors.query[t] = factors.query_epsilon[t] = 0;
    queries.key[t] = valid * factors.key[t];
    queries.key_sum[t] = queries.key[t] * queries.sum[t];
    queries.constant[t] = valid * factors.key_epsilon[t] * FeatureSum(queries, t);
    queries.denominator_sum[t] =
        map_.denominator_epsilon == 0
            ? 0
            : queries.sum[t] * static_cast<float>(QuerySumFactor(t, factors));
  }
}

void LinearGradient::AdvanceQueryHeader(Sums::Header& header, QueryChunk* queries,
                                        int64_t heads) const {
  float reference = header.reference;
  for (int64_t g = 0; g < heads; ++g) {
    for (int64_t t = 0; t < queries[g].count; ++t) {
      if (queries[g].active[t] == 0) continue;
      // Std::min returns its first argument where the other is NaN.
      reference = std::min(reference, queries[g].factors.reference[t]);
    }
  }
  // Empty sums are zeros at any scale.
  const float rescale = header.reference == kInfinity || header.reference == reference
                            ? 1
                            : std::exp(reference - header.reference);
  header.scaled_feature *= rescale;
  header.reference = reference;
  for (int64_t g = 0; g < heads; ++g) {
    QueryChunk& q = queries[g];
    q.rescale = g == 0 ? rescale : 1;
    for (int64_t t = 0; t < q.count; ++t) {
      const float weight =
          q.active[t] == 0 ? 0 : q.key[t] * std::exp(reference - q.factors.reference[t]);
      q.scale[t] = weight * q.factors.query[t];
      q.normaliser[t] = q.scale[t] * q.sum[t];
      q.scaled[t] = weight * q.factors.query_epsilon[t];
      header.scaled_feature += q.scaled[t] * q.sum[t];
    }
  }
}

void LinearGradient::AddQueries(const QueryChunk& queries, const Sums& from, const Sums& to,
                                int64_t first, int64_t last, BackwardScratch& scratch) const {
  AddToSlice({queries.tokens.features, queries.rows, 0, queries.count, queries.scale,
              queries.normaliser, queries.scaled, queries.constant, queries.rescale},
             from, to, first, last, scratch);
}

void LinearGradient::AdvanceKeyHeader(int64_t head, Sums::Header& header, Chunk& chunk) const {
  RunMaxima(header, is_sequence_maximum_ ? kept_.maximum + head : nullptr, chunk.keys);
  AdvanceHeader(header, 0, chunk.keys.count, chunk.keys);
}

void LinearGradient::AdvanceChunkHeader(Sums::Header& header, Chunk& chunk) const {
  for (int64_t g = 0; g < problem_.group(); ++g) {
    SetVisible(chunk.keys, chunk.queries[g]);
    ComputeRowFactors(chunk.queries[g]);
  }
  // The reference becomes relative to the chunk's beginning.
  header.reference -= DecayOf(chunk.keys);
  StateAt(chunk.after).header() = header;
  AdvanceQueryHeader(header, chunk.queries, problem_.group());
}

void LinearGradient::AddChunkKeys(const Chunk& chunk, const Sums& to, int64_t first, int64_t last,
                                  BackwardScratch& scratch) const {
  AddToSlice(AddendOf(chunk.keys, 0, chunk.keys.count), StateAt(chunk.before), to, first, last,
             scratch);
}

void LinearGradient::AddChunkQueries(const Chunk& chunk, const Sums& to, int64_t first,
                                     int64_t last, BackwardScratch& scratch) const {
  AddQueries(chunk.queries[0], StateAt(chunk.after), to, first, last, scratch);
  for (int64_t g = 1; g < problem_.group(); ++g) {
    AddQueries(chunk.queries[g], to, to, first, last, scratch);
  }
}

void LinearGradient::Differentiate(int64_t b, int64_t h, Chunk& chunk,
                                   BackwardScratch& scratch) const {
  ReadQuerySums(chunk.keys, StateAt(chunk.after), scratch);
  for (int64_t g = 0; g < problem_.group(); ++g) {
    QueryChunk& queries = chunk.queries[g];
    if (queries.count == 0) continue;
    MakePairs(chunk.keys, queries, scratch);
    float sums_of_pairs[kChunk];
    SumPairGradients(chunk.keys, queries, scratch, sums_of_pairs);
    kernels_.transpose64(scratch.pair_gradients, kChunk, kChunk, scratch.pair_columns);
    AddPairsToKeys(chunk.keys, queries, scratch);
    DifferentiateQueries(queries, StateAt(chunk.before), &chunk.keys, sums_of_pairs, scratch);
    StoreQueryGradients(b, h * problem_.group() + g, queries, scratch);
  }
  FinishKeys(b, h, StateAt(chunk.after), chunk, scratch);
}

void LinearGradient::AdvanceChain(int64_t kv_head, const Sums::Header& before, Chunk& chunk,
                                  HeadChain& chain, BackwardScratch& scratch) const {
  const Keys& keys = chunk.keys;
  for (int64_t j = keys.count - 1; j >= 0; --j) {
    for (int64_t g = 0; g < problem_.group(); ++g) {
      const QueryChunk& queries = chunk.queries[g];
      const int64_t t = j - PlaceOf(keys, queries);
      if (t < 0 || t >= queries.count) continue;
      chain.rows += queries.product[t];
      chain.maximum += queries.maximum_gradient[t];
    }
    if (keys.seen[j] == 0) continue;
    if (has_maximum_gradient_ && !is_sequence_maximum_ &&
        keys.tokens.max[j] > (j > 0 ? keys.running_maximum[j - 1] : before.maximum)) {
      AddMaximumGradient(chain.maximum, j, chunk);
      chain.maximum = 0;
    }
    if (!map_.gated) continue;
    chain.columns += chunk.product[j];
    const double keeps = 1 / (1 + std::exp(-static_cast<double>(keys.gate[j])));
    chunk.gate_gradient[j] =
        static_cast<float>((chain.rows - chain.columns) * (1 - keeps) - chunk.product[j] * keeps);
  }
  if (wants_gate()) SumGateGradients(kv_head, chunk, chain, scratch);
}

void LinearGradient::StoreQueryGradients(int64_t b, int64_t h, QueryChunk& queries,
                                         BackwardScratch& scratch) const {
  if (call_.q_gradient.empty() || queries.count == 0) return;
  MultiplyByW(h / problem_.group(), queries.tokens, queries.count, scratch);
  for (int64_t t = 0; t < queries.count; ++t) {
    float* row = scratch.inputs + t * sizes_.input_row;
    const float* input = queries.tokens.inputs + t * sizes_.input_row;
    AddHalfSquare(queries.product[t], input, row);
    ThroughScale(queries.tokens.factor[t], queries.tokens.half_square[t], input, row);
    Store(row, queries.active[t] != 0, call_.q_gradient, b, h, queries.first + t);
  }
}

void LinearGradient::StoreKeyGradients(int64_t b, int64_t h, Chunk& chunk, HeadChain* chain,
                                       BackwardScratch& scratch) const {
  Keys& keys = chunk.keys;
  if (call_.k_gradient.empty() && chain == nullptr) return;
  MultiplyByW(h, keys.tokens, keys.count, scratch);
  const int64_t maximum_key =
      chain == nullptr ? -1 : kept_.maximum_key[b * problem_.kv_heads + h] - keys.first;
  for (int64_t j = 0; j < keys.count; ++j) {
    float* row = scratch.inputs + j * sizes_.input_row;
    const float* input = keys.tokens.inputs + j * sizes_.input_row;
    AddHalfSquare(chunk.product[j], input, row);
    if (j == maximum_key) {
      std::copy_n(row, sizes_.input_row, chain->gradient);
      std::copy_n(input, sizes_.input_row, chain->input);
      chain->factor = keys.tokens.factor[j];
      chain->half_square = keys.tokens.half_square[j];
      chain->maximum_row = chunk.maximum_row[j];
      continue;
    }
    ThroughScale(keys.tokens.factor[j], keys.tokens.half_square[j], input, row);
    for (int64_t c = 0; map_.gated && c < problem_.head_dim; ++c) {
      row[c] += chunk.gate_gradient[j] * inputs_.gate.At<float>(h)[c];
    }
    Store(row, keys.seen[j] != 0, call_.k_gradient, b, h, keys.first + j);
  }
}

void LinearGradient::StoreMaximumKey(int64_t b, int64_t h, HeadChain& chain,
                                     float* w_gradient) const {
  const int64_t key = kept_.maximum_key[b * problem_.kv_heads + h];
  if (key < 0) return;
  const int64_t r = chain.maximum_row % sizes_.projections;
  const float gradient = SignOf(chain.maximum_row) * static_cast<float>(chain.maximum);
  const float* w = MatrixOf(h) + r * sizes_.input_row;
  for (int64_t c = 0; c < sizes_.input_row; ++c) {
    chain.gradient[c] += gradient * w[c];
    w_gradient[r * sizes_.input_row + c] += gradient * chain.input[c];
  }
  ThroughScale(chain.factor, chain.half_square, chain.input, chain.gradient);
  Store(chain.gradient, true, call_.k_gradient, b, h, key);
}

void LinearGradient::AddToW(const Tokens& tokens, int64_t count, int64_t first, int64_t last,
                            float* w_gradient) const {
  float* to = w_gradient + first * sizes_.input_row;
  kernels_.gemm(last - first, sizes_.input_row, count, tokens.features + first * kChunk, kChunk, 1,
                tokens.inputs, sizes_.input_row, to, sizes_.input_row, true);
}

void LinearGradient::AddChunkToW(const Chunk& chunk, int64_t first, int64_t last,
                                 float* w_gradient) const {
  for (int64_t g = 0; g < problem_.group(); ++g) {
    AddToW(chunk.queries[g].tokens, chunk.queries[g].count, first, last, w_gradient);
  }
  AddToW(chunk.keys.tokens, chunk.keys.count, first, last, w_gradient);
}

void LinearGradient::AddParts(int64_t first, int64_t heads, const BackwardPlan& plan,
                              ThreadPool& pool) const {
  pool.ParallelFor(wants_w() ? kSumSlices : 0, [&](int64_t slice, int) {
    const int64_t begin = RowSliceBegin(slice) * sizes_.input_row,
                  end = RowSliceBegin(slice + 1) * sizes_.input_row;
    for (int64_t part = 0; part < heads * plan.groups; ++part) {
      const int64_t head = (first + part / plan.groups) % problem_.kv_heads;
      const float* from = memory_.w_parts + part * plan.matrix_floats;
      float* to = memory_.w_gradient + (map_.per_head ? head * plan.matrix_floats : 0);
      for (int64_t n = begin; n < end; ++n) to[n] += from[n];
    }
  });
  for (int64_t slot = 0; wants_gate() && slot < heads; ++slot) {
    const int64_t count = problem_.head_dim + 1;
    float* to = memory_.gate_gradient + (first + slot) % problem_.kv_heads * count;
    for (int64_t c = 0; c < count; ++c) to[c] += memory_.chains[slot].gate[c];
  }
}

void LinearGradient::StoreTotals() const {
  const TensorView& w = call_.w_gradient;
  for (int64_t r = 0; wants_w() && r < sizes_.matrices * sizes_.projections; ++r) {
    const int64_t offset =
        map_.per_head ? w.Offset(r / sizes_.projections, r % sizes_.projections) : w.Offset(r);
    StoreRow(memory_.w_gradient + r * sizes_.input_row, problem_.head_dim, w, offset,
             w.stride(w.rank - 1));
  }
  const TensorView& gate = call_.gate_gradient;
  for (int64_t h = 0; wants_gate() && h < problem_.kv_heads; ++h) {
    const int64_t count = problem_.head_dim + 1;
    StoreRow(memory_.gate_gradient + h * count, count, gate, gate.Offset(h), gate.stride(1));
  }
}

void LinearGradient::AddMaximumGradient(double gradient, int64_t j, Chunk& chunk) const {
  const int64_t row = chunk.maximum_row[j] % sizes_.projections;
  chunk.keys.tokens.features[row * kChunk + j] +=
      SignOf(chunk.maximum_row[j]) * static_cast<float>(gradient);
}

void LinearGradient::LoadGradientRow(int64_t b, int64_t h, int64_t t, float inverse, float slope,
                                     QueryChunk& queries) const {
  const int64_t i = queries.first + t;
  float product = 0, out[kDepthBlock];
  bool finite = std::isfinite(queries.tokens.total[t]) &&
                AllFinite(queries.tokens.inputs + t * sizes_.input_row, problem_.head_dim);
  ForEachPanel([&](int64_t panel, int64_t width) {
    if (call_.out_gradient.empty()) return;
    const int64_t channels = std::min(width, problem_.value_dim - panel);
    float* row = queries.rows + panel * kChunk + t * width;
    LoadRow(call_.out_gradient, call_.out_gradient.Offset(b, h, i, panel),
            call_.out_gradient.stride(3), channels, row);
    LoadRow(call_.out, call_.out.Offset(b, h, i, panel), call_.out.stride(3), channels, out);
    for (int64_t c = 0; c < channels; ++c) {
      product += row[c] * out[c];
      row[c] *= inverse;
    }
    finite = finite && AllFinite(row, channels);
  });
  const float of_log_sum_exp =
      call_.log_sum_exp_gradient.empty() ? 0 : *call_.log_sum_exp_gradient.At<float>(b, h, i);
  queries.sum[t] = slope == 0 ? 0 : slope * (of_log_sum_exp - product);
  if (finite && std::isfinite(queries.sum[t])) return;
  queries.valid[t] = kNaN;
  queries.sum[t] = 0;
  ClearColumn(queries.tokens, t);
  ForEachPanel([&](int64_t panel, int64_t width) {
    std::fill_n(queries.rows + panel * kChunk + t * width, width, 0.0f);
  });
}

void LinearGradient::ReadQuerySums(const Keys& keys, const Sums& sums,
                                   BackwardScratch& scratch) const {
  const Sums::Header& header = sums.header();
  const int64_t lanes = RoundUp(keys.count, kColumnQuantum);
  float scale[kChunk];
  std::copy_n(keys.log_scale, lanes, scale);
  kernels_.exp({scale, 0, 1, lanes}, &header.reference);
  std::fill_n(scratch.offset, kChunk, 0.0f);
  ForEachPanel([&](int64_t panel, int64_t width) {
    const float* values = keys.values + panel * kChunk;
    float* columns = scratch.value_columns + panel * kChunk;
    float* scaled = scratch.row_columns + panel * kChunk;
    kernels_.transpose64(values, width, width, columns);
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t j = 0; j < lanes; ++j)
        scaled[c * kChunk + j] = scale[j] * columns[c * kChunk + j];
    }
    const float* products = sums.products() + panel * sizes_.features;
    Multiply(sizes_.features, lanes, width, products, width, 1, scaled, kChunk,
             scratch.key_gradients, kChunk, panel > 0, scratch);
    if (epsilon_ != 0) {
      kernels_.gemm(1, lanes, width, sums.scaled_values() + panel, 0, 1, scaled, kChunk,
                    scratch.offset, kChunk, true);
    }
    if (call_.v_gradient.empty()) return;
    float* output = scratch.output + panel * kChunk;
    for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
      Multiply(keys.count, width, std::min(kDepthBlock, sizes_.features - r),
               keys.tokens.features + r * kChunk, 1, kChunk, products + r * width, width, output,
               width, r > 0, scratch);
    }
    kernels_.scale_rows({output, width, keys.count, width}, scale);
    for (int64_t j = 0; epsilon_ != 0 && j < keys.count; ++j) {
      const float total = scale[j] * keys.tokens.total[j];
      for (int64_t c = 0; c < width; ++c) {
        output[j * width + c] += total * sums.scaled_values()[panel + c] + sums.values()[panel + c];
      }
    }
  });
  for (int64_t j = 0; j < lanes; ++j) {
    scratch.offset[j] += scale[j] * header.scaled_feature;
    scratch.key_scale[j] = scale[j];
  }
}

void LinearGradient::MakePairs(const Keys& keys, const QueryChunk& queries,
                               BackwardScratch& scratch) const {
  ForEachRowBlock(keys, queries, [&](int64_t t, int64_t rows, int64_t columns) {
    float* weights = scratch.weights + t * kChunk;
    for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
      kernels_.gemm(rows, columns, std::min(kDepthBlock, sizes_.features - r),
                    queries.tokens.features + r * kChunk + t, 1, kChunk,
                    keys.tokens.features + r * kChunk, kChunk, weights, kChunk, r > 0);
    }
    float product[kPairBlock], total[kPairBlock], sum[kPairBlock];
    for (int64_t n = 0; n < rows; ++n) {
      product[n] = queries.key[t + n] * queries.factors.query[t + n];
      total[n] = queries.key[t + n] * queries.factors.query_epsilon[t + n];
    }
    kernels_.pair_weights({weights, kChunk, rows, columns},
                          {keys.log_scale, keys.tokens.total, keys.seen, queries.shift + t, product,
                           total, queries.constant + t, queries.visible + t, sum});
    ForEachPanel([&](int64_t panel, int64_t width) {
      kernels_.gemm(rows, columns, width, queries.rows + panel * kChunk + t * width, width, 1,
                    scratch.value_columns + panel * kChunk, kChunk,
                    scratch.pair_gradients + t * kChunk, kChunk, panel > 0);
    });
  });
}

void LinearGradient::SumPairGradients(const Keys& keys, const QueryChunk& queries,
                                      BackwardScratch& scratch, float* sums) const {
  const float none[kChunk] = {};
  ForEachRowBlock(keys, queries, [&](int64_t t, int64_t rows, int64_t columns) {
    float* pairs = scratch.pair_gradients + t * kChunk;
    for (int64_t n = 0; n < rows; ++n) {
      float sum = 0;
      for (int64_t j = 0; epsilon_ != 0 && j < queries.visible[t + n]; ++j) {
        sum += keys.seen[j] * (pairs[n * kChunk + j] + queries.sum[t + n]);
      }
      sums[t + n] = sum;
    }
    float sum[kPairBlock];
    kernels_.pair_weights({pairs, kChunk, rows, columns},
                          {keys.log_scale, keys.seen, keys.seen, queries.shift + t, queries.key + t,
                           queries.key_sum + t, none, queries.visible + t, sum});
  });
}

void LinearGradient::AddPairsToKeys(const Keys& keys, const QueryChunk& queries,
                                    BackwardScratch& scratch) const {
  ForEachRowBlock(keys, queries, [&](int64_t t, int64_t rows, int64_t columns) {
    float* pairs = scratch.pair_gradients + t * kChunk;
    if (epsilon_ != 0) {
      kernels_.gemm(1, columns, rows, queries.factors.query_epsilon + t, 0, 1, pairs, kChunk,
                    scratch.offset, kChunk, true);
      kernels_.scale_rows({pairs, kChunk, rows, columns}, queries.factors.query + t);
    }
  });
  kernels_.gemm_triangle(sizes_.features, queries.count, queries.tokens.features, kChunk, 1,
                         scratch.pair_gradients, {true, PlaceOf(keys, queries)},
                         scratch.key_gradients);
  ForEachKeyBlock(keys, queries, [&](int64_t j, int64_t count, int64_t first_row) {
    if (call_.v_gradient.empty()) return;
    const int64_t rows = queries.count - first_row;
    ForEachPanel([&](int64_t panel, int64_t width) {
      kernels_.gemm(count, width, rows, scratch.weights + first_row * kChunk + j, 1, kChunk,
                    queries.rows + panel * kChunk + first_row * width, width,
                    scratch.output + panel * kChunk + j * width, width, true);
    });
  });
}

void LinearGradient::DifferentiateQueries(QueryChunk& queries, const Sums& sums, const Keys* keys,
                                          const float* sums_of_pairs,
                                          BackwardScratch& scratch) const {
  const Sums::Header& header = sums.header();
  const int64_t rows = queries.count, lanes = RoundUp(rows, kColumnQuantum);
  float coefficient[kChunk] = {}, factor[kChunk] = {}, offset[kChunk] = {}, scale[kChunk] = {};
  for (int64_t t = 0; t < rows; ++t) {
    coefficient[t] =
        header.reference == kNegativeInfinity || queries.active[t] == 0
            ? 0
            : queries.key[t] * std::exp(header.reference - queries.factors.reference[t]);
    factor[t] = coefficient[t] * queries.sum[t];
    scale[t] = queries.factors.query[t];
    offset[t] = sums_of_pairs[t] + queries.sum[t] * static_cast<float>(header.tokens);
  }
  ForEachPanel([&](int64_t panel, int64_t width) {
    const float* gradient_rows = queries.rows + panel * kChunk;
    float* columns = scratch.row_columns + panel * kChunk;
    kernels_.transpose64(gradient_rows, width, width, columns);
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t t = 0; t < lanes; ++t) {
        columns[c * kChunk + t] *= coefficient[t];
      }
    }
    if (epsilon_ != 0) {
      kernels_.matrix_vector(rows, width, gradient_rows, width, sums.values() + panel, offset, 1,
                             true);
    }
  });
  for (int64_t t = 0; t < rows; ++t) {
    offset[t] = queries.active[t] == 0
                    ? 0
                    : queries.factors.key_epsilon[t] * offset[t] + queries.denominator_sum[t];
    queries.maximum_gradient[t] =
        has_maximum_gradient_ ? queries.valid[t] * FeatureSum(queries, t) * offset[t] : 0;
  }
  float* gradients = scratch.query_gradients;
  ForEachFeatureBlock([&](int64_t first, int64_t count) {
    float* block = gradients + first * kChunk;
    ForEachPanel([&](int64_t panel, int64_t width) {
      Multiply(count, lanes, width, sums.products() + panel * sizes_.features + first * width,
               width, 1, scratch.row_columns + panel * kChunk, kChunk, block, kChunk, panel > 0,
               scratch);
    });
    if (keys == nullptr) return;
    kernels_.gemm_triangle(count, keys->count, keys->tokens.features + first * kChunk, kChunk, 1,
                           scratch.pair_columns, {false, PlaceOf(*keys, queries)}, block);
  });
  int32_t maximum_row[kChunk];
  const bool has_epsilon = has_maximum_gradient_ && epsilon_ != 0;
  if (has_epsilon) FindMaximumRows(queries.tokens, lanes, maximum_row);
  float sum[kChunk];
  kernels_.feature_gradients(
      map_.feature, {queries.tokens.features, kChunk, sizes_.projections, lanes},
      {gradients, sums.normaliser(), factor, offset, scale, sum, queries.product});
  for (int64_t t = 0; has_epsilon && t < rows; ++t) {
    queries.tokens.features[maximum_row[t] % sizes_.projections * kChunk + t] +=
        SignOf(maximum_row[t]) * queries.factors.query_epsilon[t] * sum[t];
  }
}

void LinearGradient::FinishKeys(int64_t b, int64_t h, const Sums& sums, Chunk& chunk,
                                BackwardScratch& scratch) const {
  Keys& keys = chunk.keys;
  const int64_t lanes = RoundUp(keys.count, kColumnQuantum);
  if (has_maximum_gradient_) FindMaximumRows(keys.tokens, lanes, chunk.maximum_row);
  float ones[kChunk], sum[kChunk];
  std::fill_n(ones, kChunk, 1.0f);
  kernels_.feature_gradients(map_.feature,
                             {keys.tokens.features, kChunk, sizes_.projections, lanes},
                             {scratch.key_gradients, sums.normaliser(), scratch.key_scale,
                              scratch.offset, ones, sum, chunk.product});
  if (call_.v_gradient.empty()) return;
  ForEachPanel([&](int64_t panel, int64_t width) {
    for (int64_t j = 0; j < keys.count; ++j) {
      float* row = scratch.output + panel * kChunk + j * width;
      if (keys.seen[j] == 0) std::fill_n(row, width, 0.0f);
      StoreRow(row, std::min(width, problem_.value_dim - panel), call_.v_gradient,
               call_.v_gradient.Offset(b, h, keys.first + j, panel), call_.v_gradient.stride(3));
    }
  });
}

void LinearGradient::FindMaximumRows(const Tokens& tokens, int64_t lanes, int32_t* rows) const {
  std::fill_n(rows, kChunk, 0);
  for (int64_t r = sizes_.features - 1; r >= 0; --r) {
    const float* features = tokens.features + r * kChunk;
    for (int64_t t = 0; t < lanes; ++t) {
      rows[t] = features[t] == 1.0f ? static_cast<int32_t>(r) : rows[t];
    }
  }
}

void LinearGradient::MultiplyByW(int64_t kv_head, const Tokens& tokens, int64_t count,
                                 BackwardScratch& scratch) const {
  const float* w = MatrixOf(kv_head);
  for (int64_t r = 0; r < sizes_.projections; r += kDepthBlock) {
    Multiply(count, sizes_.input_row, std::min(kDepthBlock, sizes_.projections - r),
             tokens.features + r * kChunk, 1, kChunk, w + r * sizes_.input_row, sizes_.input_row,
             scratch.inputs, sizes_.input_row, r > 0, scratch);
  }
}

void LinearGradient::AddHalfSquare(float product, const float* input, float* gradient) const {
  for (int64_t c = 0; exponential_ && c < sizes_.input_row; ++c) {
    gradient[c] -= product * input[c];
  }
}

void LinearGradient::ThroughScale(float factor, float half_square, const float* input,
                                  float* gradient) const {
  float along = 0;
  if (map_.unit && half_square != 0) {
    for (int64_t c = 0; c < sizes_.input_row; ++c) along += input[c] * gradient[c];
    along /= map_.input_scale * std::sqrt(2 * half_square);
  }
  for (int64_t c = 0; c < sizes_.input_row; ++c) {
    gradient[c] = factor == 0 ? 0 : factor * (gradient[c] - along * input[c]);
  }
}

void LinearGradient::Store(float* row, bool has_gradient, const TensorView& view, int64_t b,
                           int64_t h, int64_t token) const {
  if (view.empty()) return;
  if (!has_gradient) std::fill_n(row, sizes_.input_row, 0.0f);
  StoreRow(row, problem_.head_dim, view, view.Offset(b, h, token), view.stride(3));
}

void LinearGradient::SumGateGradients(int64_t kv_head, const Chunk& chunk, HeadChain& chain,
                                      BackwardScratch& scratch) const {
  const int64_t b = kv_head / problem_.kv_heads, h = kv_head % problem_.kv_heads;
  const Keys& keys = chunk.keys;
  const Rows rows = LoadInputs(inputs_.k, b, h, keys.first, keys.count, keys.seen, scratch);
  for (int64_t j = 0; j < keys.count; ++j) {
    if (keys.seen[j] == 0) continue;
    for (int64_t c = 0; c < problem_.head_dim; ++c) {
      chain.gate[c] += chunk.gate_gradient[j] * rows.data[j * rows.stride + c];
    }
    chain.gate[problem_.head_dim] += chunk.gate_gradient[j];
  }
}

}  // namespace tfb::linear_cpu
