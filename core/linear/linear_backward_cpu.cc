// The backward pass of engine linear on the CPU.
//
// With y'_i and l'_i the gradients of row i of the outputs and D_i divided as in linear.h, so that
//
//   a_ij = b_i exp(rho_j - R_i) phi_i . E_j + b'_i sum_r phi_ir
//   phi_ir = (exp(lambda_i - s) F_ir + epsilon) / max(exp(lambda_i - s), epsilon)
//   b_i, b'_i = exp(R_i - S_i), epsilon, both divided by the larger of the two
//   D_i = sum_j a_ij + d'_i sum_r phi_ir
//
// the gradients of numerator, denominator and weights are
//
//   dN_i = y'_i / D_i,   dZ_i = (l'_i - y'_i . y_i) / D_i,   t_ij = dN_i . v_j + dZ_i
//
// where dZ_i is 0 if a floor holds D_i, and those of features and values
//
//   dphi_ir = b_i sum_j exp(rho_j - R_i) E_jr t_ij + b'_i sum_j t_ij + d'_i dZ_i
//   dE_jr = sum_i b_i exp(rho_j - R_i) phi_ir t_ij
//   dv_j = sum_i a_ij dN_i
//
// Sums over keys are those of the forward pass: of exp(rho_j - R) E_j (v_j, 1), and of (v_j, 1).
// Sums over queries have the same form with exp(R - R_i) b_i phi_i (dN_i, dZ_i), split into the part
// of F_i and that of epsilon, and b'_i sum_r phi_ir dN_i; their reference R is the least R_i, so that no
// exponent is above 0: a key's rho_j is at most the R_i of every row that sees it. The factors that
// divide numerator and denominator alike need no gradient.
//
// Projections and inputs. For exponentials d(w_r . x) = E_r dE_r (with both signs for pairs) and dx =
// W^T d(W x) - x sum_r E_r dE_r. The stabilisers are maxima, and with epsilon or d they do not cancel:
//
//   ds_i = epsilon / max(exp(lambda_i - s), epsilon) sum_r dphi_ir
//   dS_i = sum_r phi_ir (b'_i sum_j t_ij + d'_i dZ_i)
//
// which follow from the sums' homogeneity. ds_i goes to the query's largest projection, dS_i to the
// largest of the keys that S_i is of. A length u = x / (|x| + e) has dx = (du - u (u . du) / |u|) / (|x|
// + e), for |u| the length of u.
//
// Gates. With tau_ij = t_ij a_ij, the gradient of log g_l is the sum of tau_ij over rows i' >= l and
// keys j < l, hence sum_(i' >= l) sum_j tau_ij - sum_(j >= l) sum_i tau_ij, two running sums, in
// float64, of numbers a row and a key; they are sum_r phi_ir dphi_ir and sum_r E_jr dE_jr. That of log(1
// - g_j) is sum_i tau_ij.
//
// Evaluation. A causal head goes by blocks of 8 chunks of 64 keys, from the last to the first; the
// forward pass has kept the sums before each block. A block's features are computed once, then the
// sums over keys before each chunk, in order, and those over queries after each chunk, in reverse
// order; then each chunk is differentiated by itself. For a chunk of 64 tokens, m features and r rows
// of W, in units of 64 m FMA:
//
//   project queries and keys            2 head_dim r / m
//   sums over keys, over queries        2 value_dim
//   dphi, dE, dv from the sums          3 value_dim
//   pairs: F . E, and to dphi, dE       3 x 48, since a quarter of the 64 x 64 pairs is left out
//   dx of queries and keys              2 head_dim r / m
//   dW                                  2 head_dim r / m
//
// that is 11 of the forward pass's 4 products, and the pairs. Not causal: groups of queries read the
// head's sums, which were kept, and make sums of their own; then groups of keys read all of those.
//
// A row that is not finite (a NaN in its query or in what it sees) must not reach keys that it does
// not see through a product with a weight of 0: its vectors become 0 and its factor NaN. Features of
// keys that are not finite become 0, since every row that sees them is such a row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/cpu/kernels.h"
#include "core/flash/rows.h"
#include "core/linear/linear.h"
#include "core/linear/linear_backward_memory.h"
#include "core/linear/linear_memory.h"
#include "core/linear/linear_pass.h"
#include "core/status.h"
#include "core/workspace.h"

namespace tfb {
namespace linear_cpu {
namespace {

constexpr int64_t kPairBlock = 32;  // rows or keys of a triangle of pairs at a time
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The whole call; it does not change while its tasks run.
class LinearGradient : public Pass {
 public:
  LinearGradient(const Problem& problem, const LinearBackwardCall& call, const Sizes& sizes,
                 const Kept& kept, const BackwardMemory& memory)
      : Pass(problem, call, sizes),
        call_(call),
        kept_(kept),
        memory_(memory),
        has_maximum_gradient_(IsStabilised() &&
                              (call.map.epsilon != 0 || call.map.denominator_epsilon != 0)),
        is_sequence_maximum_(problem.causal && call.map.stabiliser == KeyStabiliser::kSequence) {}

  bool wants_w() const { return !call_.w_gradient.empty(); }
  bool wants_gate() const { return !call_.gate_gradient.empty(); }

  // ---- Loading ----

  // Loads a chunk of keys.
  void LoadChunkKeys(int64_t kv_head, int64_t first, Chunk& chunk, BackwardScratch& scratch) const {
    Keys& keys = chunk.keys;
    LoadKeys(kv_head, first, keys, scratch);
    std::fill_n(chunk.gate_gradient, kChunk, 0.0f);
    for (int64_t j = 0; j < keys.count; ++j) {
      const float* input = keys.tokens.inputs + j * sizes_.input_row;
      if (std::isfinite(keys.tokens.total[j]) && AllFinite(input, problem_.head_dim)) continue;
      ClearColumn(keys.tokens, j);
    }
  }

  // Loads rows [first, first + rows) of query head h: features, dN and dZ.
  void LoadChunkQueries(int64_t b, int64_t h, int64_t first, int64_t rows, QueryChunk& queries,
                        BackwardScratch& scratch) const {
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

  // ---- What rows see, and sums over queries ----

  // Sets what the rows of a chunk see of the chunk's keys.
  void SetVisible(const Keys& keys, QueryChunk& queries) const {
    const int64_t place = PlaceOf(keys, queries);
    for (int64_t t = 0; t < queries.count; ++t) {
      queries.visible[t] = static_cast<int32_t>(place + t + 1);
      queries.factors.reference[t] = keys.running_reference[place + t];
      queries.factors.key_maximum[t] = keys.running_maximum[place + t];
      if (map_.gated) queries.factors.decay[t] = keys.decay[place + t];
    }
  }

  // Does the same for rows that see all keys of the sums.
  void SetVisible(const Sums::Header& header, QueryChunk& queries) const {
    std::fill_n(queries.factors.reference, kChunk, header.reference);
    std::fill_n(queries.factors.key_maximum, kChunk, header.maximum);
  }

  // Computes the rows' factors from what they see.
  void ComputeRowFactors(QueryChunk& queries) const {
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

  // Updates the header of sums over queries with those of a chunk, and finds the scales of the
  // queries and of the sums so far.
  void AdvanceQueryHeader(Sums::Header& header, QueryChunk* queries, int64_t heads) const {
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

  // Adds queries to features [first, last) of sums over queries.
  void AddQueries(const QueryChunk& queries, const Sums& from, const Sums& to, int64_t first,
                  int64_t last, BackwardScratch& scratch) const {
    AddToSlice({queries.tokens.features, queries.rows, 0, queries.count, queries.scale,
                queries.normaliser, queries.scaled, queries.constant, queries.rescale},
               from, to, first, last, scratch);
  }

  // ---- The chunks of a block ----

  // Computes the headers of the sums before and after each chunk of a block, which lie at the
  // chunks but for the sums before the first, with `before`, and after the last, with `after`.
  // Returns the header of the sums after the block before.
  Sums::Header AdvanceHeaders(int64_t head, Chunk* chunks, int64_t count,
                              const Sums::Header& before, const Sums::Header& after) const {
    Sums::Header header = before;
    for (int64_t n = 0; n < count; ++n) {
      Chunk& chunk = chunks[n];
      if (n > 0) StateAt(chunk.before).header() = header;
      RunMaxima(header, is_sequence_maximum_ ? kept_.maximum + head : nullptr, chunk.keys);
      AdvanceHeader(header, 0, chunk.keys.count, chunk.keys);
      for (int64_t g = 0; g < problem_.group(); ++g) {
        SetVisible(chunk.keys, chunk.queries[g]);
        ComputeRowFactors(chunk.queries[g]);
      }
    }
    header = after;
    for (int64_t n = count - 1; n >= 0; --n) {
      // The reference becomes relative to the chunk's beginning.
      header.reference -= DecayOf(chunks[n].keys);
      StateAt(chunks[n].after).header() = header;
      AdvanceQueryHeader(header, chunks[n].queries, problem_.group());
    }
    return header;
  }

  // Computes slice `slice` of the sums over keys before each chunk of a block but the first.
  void AdvanceKeySlice(const Chunk* chunks, int64_t count, int64_t slice,
                       BackwardScratch& scratch) const {
    const int64_t first = SliceBegin(slice), last = SliceBegin(slice + 1);
    for (int64_t n = 0; first < last && n + 1 < count; ++n) {
      AddToSlice(AddendOf(chunks[n].keys, 0, chunks[n].keys.count), StateAt(chunks[n].before),
                 StateAt(chunks[n + 1].before), first, last, scratch);
    }
  }

  // Computes slice `slice` of the sums over queries after each chunk of a block but the last, and of
  // those after the block before, in `next`.
  void AdvanceQuerySlice(const Chunk* chunks, int64_t count, int64_t slice, const Sums& next,
                         BackwardScratch& scratch) const {
    const int64_t first = SliceBegin(slice), last = SliceBegin(slice + 1);
    for (int64_t n = count - 1; first < last && n >= 0; --n) {
      const Sums to = n > 0 ? StateAt(chunks[n - 1].after) : next;
      AddQueries(chunks[n].queries[0], StateAt(chunks[n].after), to, first, last, scratch);
      for (int64_t g = 1; g < problem_.group(); ++g) {
        AddQueries(chunks[n].queries[g], to, to, first, last, scratch);
      }
    }
  }

  // Differentiates a chunk of a causal problem: its values, and the projections of its keys and
  // queries.
  void Differentiate(int64_t b, int64_t h, Chunk& chunk, BackwardScratch& scratch) const {
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
    }
    FinishKeys(b, h, StateAt(chunk.after), chunk, scratch);
  }

  // Differentiates rows of queries that see all keys of the sums.
  void DifferentiateRows(QueryChunk& queries, const Sums& sums, BackwardScratch& scratch) const {
    const float none[kChunk] = {};
    DifferentiateQueries(queries, sums, nullptr, none, scratch);
  }

  // Differentiates keys that all queries of the sums see.
  void DifferentiateKeys(int64_t b, int64_t h, const Sums& sums, Chunk& chunk,
                         BackwardScratch& scratch) const {
    ReadQuerySums(chunk.keys, sums, scratch);
    FinishKeys(b, h, sums, chunk, scratch);
  }

  // ---- Maxima and gates ----

  // Goes through the places of a chunk in reverse order: distributes the gradients of the maxima and
  // computes those of the gates. `before` is the header of the sums before the chunk.
  void AdvanceChain(int64_t kv_head, const Sums::Header& before, Chunk& chunk, HeadChain& chain,
                    BackwardScratch& scratch) const {
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

  void ResetChain(HeadChain& chain) const {
    chain.rows = chain.columns = chain.maximum = 0;
    std::fill_n(chain.gate, problem_.head_dim + 1, 0.0f);
  }

  // ---- Inputs and W ----

  // Writes the gradients of a chunk's queries.
  void StoreQueryGradients(int64_t b, int64_t h, QueryChunk& queries,
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

  // Clears the gradients of rows [begin, end) of a query head, which see no key.
  void ClearQueryGradients(int64_t b, int64_t h, int64_t begin, int64_t end,
                           BackwardScratch& scratch) const {
    for (int64_t i = begin; i < end; ++i) Store(scratch.inputs, false, call_.q_gradient, b, h, i);
  }

  // Writes the gradients of a chunk's keys. With the maximum of the sequence, that of the key which
  // has it is left to StoreMaximumKey, where `chain` is not null.
  void StoreKeyGradients(int64_t b, int64_t h, Chunk& chunk, HeadChain* chain,
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

  // Writes the gradient of the key with the maximum of the sequence, and adds its part of W's.
  void StoreMaximumKey(int64_t b, int64_t h, HeadChain& chain, float* w_gradient) const {
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

  // Adds tokens to rows [first, last) of a gradient of W.
  void AddToW(const Tokens& tokens, int64_t count, int64_t first, int64_t last,
              float* w_gradient) const {
    float* to = w_gradient + first * sizes_.input_row;
    kernels_.gemm(last - first, sizes_.input_row, count, tokens.features + first * kChunk, kChunk,
                  1, tokens.inputs, sizes_.input_row, to, sizes_.input_row, true);
  }
  // Returns the first row of a slice of W.
  int64_t RowSliceBegin(int64_t slice) const {
    return std::min(RoundUp(CeilDivide(sizes_.projections, kSumSlices), kTileRows) * slice,
                    sizes_.projections);
  }

  // Clears the gradients of W and of the gates.
  void ResetTotals(const BackwardPlan& plan) const {
    std::fill_n(memory_.w_gradient, plan.matrices * plan.matrix_floats, 0.0f);
    std::fill_n(memory_.gate_gradient, problem_.kv_heads * (problem_.head_dim + 1), 0.0f);
  }
  // Adds those of heads [first, first + heads), in order.
  void AddParts(int64_t first, int64_t heads, const BackwardPlan& plan, ThreadPool& pool) const {
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
  void StoreTotals() const {
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

  Sums StateAt(float* memory) const { return Sums(sizes_, memory); }
  bool NeedsMaximumKey() const { return has_maximum_gradient_ && is_sequence_maximum_; }
  // Adds the gradient of S to the largest projection of key j of a chunk that has been
  // differentiated.
  void AddMaximumGradient(double gradient, int64_t j, Chunk& chunk) const {
    const int64_t row = chunk.maximum_row[j] % sizes_.projections;
    chunk.keys.tokens.features[row * kChunk + j] +=
        SignOf(chunk.maximum_row[j]) * static_cast<float>(gradient);
  }
  bool has_maximum_gradient() const { return has_maximum_gradient_; }

 private:
  // Returns the place, among the chunk's keys, of the first query.
  int64_t PlaceOf(const Keys& keys, const QueryChunk& queries) const {
    return queries.first + problem_.causal_offset() - keys.first;
  }
  // Returns sum_r phi_ir.
  float FeatureSum(const QueryChunk& queries, int64_t t) const {
    return static_cast<float>(QuerySum(t, queries.tokens, queries.factors));
  }
  // Returns the sign of the projection in a feature's exponent.
  float SignOf(int64_t feature) const { return feature < sizes_.projections ? 1.0f : -1.0f; }
  const float* MatrixOf(int64_t kv_head) const {
    return memory_.w + (map_.per_head ? kv_head * sizes_.projections * sizes_.input_row : 0);
  }
  void ClearColumn(const Tokens& tokens, int64_t t) const {
    for (int64_t r = 0; r < sizes_.features; ++r) tokens.features[r * kChunk + t] = 0;
  }

  // Computes dN and dZ of row t of a chunk, and clears a row that is not finite.
  void LoadGradientRow(int64_t b, int64_t h, int64_t t, float inverse, float slope,
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

  // Computes dE and dv, in scratch, from the sums over the queries after the keys, and transposes the
  // values.
  void ReadQuerySums(const Keys& keys, const Sums& sums, BackwardScratch& scratch) const {
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
      kernels_.gemm(sizes_.features, lanes, width, products, width, 1, scaled, kChunk,
                    scratch.key_gradients, kChunk, panel > 0);
      if (epsilon_ != 0) {
        kernels_.gemm(1, lanes, width, sums.scaled_values() + panel, 0, 1, scaled, kChunk,
                      scratch.offset, kChunk, true);
      }
      if (call_.v_gradient.empty()) return;
      float* output = scratch.output + panel * kChunk;
      for (int64_t r = 0; r < sizes_.features; r += kDepthBlock) {
        kernels_.gemm(keys.count, width, std::min(kDepthBlock, sizes_.features - r),
                      keys.tokens.features + r * kChunk, 1, kChunk, products + r * width, width,
                      output, width, r > 0);
      }
      for (int64_t j = 0; j < keys.count; ++j) {
        const float total = scale[j] * keys.tokens.total[j];
        for (int64_t c = 0; c < width; ++c) {
          float& gradient = output[j * width + c];
          gradient *= scale[j];
          if (epsilon_ == 0) continue;
          gradient += total * sums.scaled_values()[panel + c] + sums.values()[panel + c];
        }
      }
    });
    for (int64_t j = 0; j < lanes; ++j) {
      scratch.offset[j] += scale[j] * header.scaled_feature;
      scratch.key_scale[j] = scale[j];
    }
  }

  // Calls body(first row, rows, keys) for blocks of rows and the keys that they see, which are
  // rounded up to whole blocks.
  template <class Body>
  void ForEachRowBlock(const Keys& keys, const QueryChunk& queries, Body body) const {
    const int64_t place = PlaceOf(keys, queries), lanes = RoundUp(keys.count, kColumnQuantum);
    for (int64_t t = 0; t < queries.count; t += kPairBlock) {
      body(t, std::min(kPairBlock, queries.count - t),
           std::min(RoundUp(place + t + kPairBlock, kPairBlock), lanes));
    }
  }
  // Calls body(first key, keys, first row) for blocks of keys and the rows that see them.
  template <class Body>
  void ForEachKeyBlock(const Keys& keys, const QueryChunk& queries, Body body) const {
    const int64_t place = PlaceOf(keys, queries);
    for (int64_t j = 0; j < keys.count; j += kPairBlock) {
      const int64_t first_row = std::max<int64_t>(j - place, 0);
      if (first_row >= queries.count) return;
      body(j, std::min(kPairBlock, keys.count - j), first_row);
    }
  }

  // Computes a_ij and t_ij in scratch.weights and scratch.pair_gradients.
  void MakePairs(const Keys& keys, const QueryChunk& queries, BackwardScratch& scratch) const {
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
                            {keys.log_scale, keys.tokens.total, keys.seen, queries.shift + t,
                             product, total, queries.constant + t, queries.visible + t, sum});
      ForEachPanel([&](int64_t panel, int64_t width) {
        kernels_.gemm(rows, columns, width, queries.rows + panel * kChunk + t * width, width, 1,
                      scratch.value_columns + panel * kChunk, kChunk,
                      scratch.pair_gradients + t * kChunk, kChunk, panel > 0);
      });
    });
  }

  // Computes the sums of t_ij over the keys that row i sees, where they are needed, and then replaces
  // t_ij by b_i exp(rho_j - R_i) t_ij.
  void SumPairGradients(const Keys& keys, const QueryChunk& queries, BackwardScratch& scratch,
                        float* sums) const {
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
                            {keys.log_scale, keys.seen, keys.seen, queries.shift + t,
                             queries.key + t, queries.key_sum + t, none, queries.visible + t, sum});
    });
  }

  // Adds the pairs to dE and dv, in scratch.
  void AddPairsToKeys(const Keys& keys, const QueryChunk& queries, BackwardScratch& scratch) const {
    float* pairs = scratch.pair_gradients;
    ForEachKeyBlock(keys, queries, [&](int64_t j, int64_t count, int64_t first_row) {
      const int64_t rows = queries.count - first_row;
      const int64_t lanes = RoundUp(count, kColumnQuantum);
      if (epsilon_ != 0) {
        kernels_.gemm(1, lanes, rows, queries.factors.query_epsilon + first_row, 0, 1,
                      pairs + first_row * kChunk + j, kChunk, scratch.offset + j, kChunk, true);
        kernels_.scale_rows({pairs + first_row * kChunk + j, kChunk, rows, lanes},
                            queries.factors.query + first_row);
      }
      kernels_.gemm(sizes_.features, lanes, rows, queries.tokens.features + first_row, kChunk, 1,
                    pairs + first_row * kChunk + j, kChunk, scratch.key_gradients + j, kChunk,
                    true);
      if (call_.v_gradient.empty()) return;
      ForEachPanel([&](int64_t panel, int64_t width) {
        kernels_.gemm(count, width, rows, scratch.weights + first_row * kChunk + j, 1, kChunk,
                      queries.rows + panel * kChunk + first_row * width, width,
                      scratch.output + panel * kChunk + j * width, width, true);
      });
    });
  }

  // Replaces the features of queries by the gradients of their projections. The rows see the sums
  // and, where `keys` is not null, pairs with those keys, with scratch.pair_columns, whose t_ij sum
  // to sums_of_pairs.
  void DifferentiateQueries(QueryChunk& queries, const Sums& sums, const Keys* keys,
                            const float* sums_of_pairs, BackwardScratch& scratch) const {
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
    float* gradients = scratch.query_gradients;
    ForEachPanel([&](int64_t panel, int64_t width) {
      const float* gradient_rows = queries.rows + panel * kChunk;
      float* columns = scratch.row_columns + panel * kChunk;
      kernels_.transpose64(gradient_rows, width, width, columns);
      for (int64_t c = 0; c < width; ++c) {
        for (int64_t t = 0; t < lanes; ++t) {
          columns[c * kChunk + t] *= coefficient[t];
        }
      }
      kernels_.gemm(sizes_.features, lanes, width, sums.products() + panel * sizes_.features, width,
                    1, columns, kChunk, gradients, kChunk, panel > 0);
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
    if (keys != nullptr) {
      ForEachRowBlock(*keys, queries, [&](int64_t t, int64_t count, int64_t columns) {
        kernels_.gemm(sizes_.features, RoundUp(count, kColumnQuantum),
                      std::min(columns, keys->count), keys->tokens.features, kChunk, 1,
                      scratch.pair_columns + t, kChunk, gradients + t, kChunk, true);
      });
    }
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

  // Replaces the features of keys by the gradients of their projections, and writes those of the
  // values.
  void FinishKeys(int64_t b, int64_t h, const Sums& sums, Chunk& chunk,
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

  // Finds each token's first feature that is the largest, which is 1.
  void FindMaximumRows(const Tokens& tokens, int64_t lanes, int32_t* rows) const {
    std::fill_n(rows, kChunk, 0);
    for (int64_t r = sizes_.features - 1; r >= 0; --r) {
      const float* features = tokens.features + r * kChunk;
      for (int64_t t = 0; t < lanes; ++t) {
        rows[t] = features[t] == 1.0f ? static_cast<int32_t>(r) : rows[t];
      }
    }
  }

  // Computes the products of gradients of projections with W, in scratch.inputs.
  void MultiplyByW(int64_t kv_head, const Tokens& tokens, int64_t count,
                   BackwardScratch& scratch) const {
    const float* w = MatrixOf(kv_head);
    for (int64_t r = 0; r < sizes_.projections; r += kDepthBlock) {
      kernels_.gemm(count, sizes_.input_row, std::min(kDepthBlock, sizes_.projections - r),
                    tokens.features + r * kChunk, 1, kChunk, w + r * sizes_.input_row,
                    sizes_.input_row, scratch.inputs, sizes_.input_row, r > 0);
    }
  }

  // Adds the gradient through |x|^2 / 2.
  void AddHalfSquare(float product, const float* input, float* gradient) const {
    for (int64_t c = 0; exponential_ && c < sizes_.input_row; ++c) {
      gradient[c] -= product * input[c];
    }
  }
  // Turns the gradient of x, which is factor times the tensor's row, into the row's.
  void ThroughScale(float factor, float half_square, const float* input, float* gradient) const {
    float along = 0;
    if (map_.unit && half_square != 0) {
      for (int64_t c = 0; c < sizes_.input_row; ++c) along += input[c] * gradient[c];
      along /= map_.input_scale * std::sqrt(2 * half_square);
    }
    for (int64_t c = 0; c < sizes_.input_row; ++c) {
      gradient[c] = factor == 0 ? 0 : factor * (gradient[c] - along * input[c]);
    }
  }
  void Store(float* row, bool has_gradient, const TensorView& view, int64_t b, int64_t h,
             int64_t token) const {
    if (view.empty()) return;
    if (!has_gradient) std::fill_n(row, sizes_.input_row, 0.0f);
    StoreRow(row, problem_.head_dim, view, view.Offset(b, h, token), view.stride(3));
  }

  // Adds a chunk to the gradients of u and b.
  void SumGateGradients(int64_t kv_head, const Chunk& chunk, HeadChain& chain,
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

  const LinearBackwardCall& call_;
  const Kept& kept_;
  const BackwardMemory& memory_;
  const bool has_maximum_gradient_;  // of the keys' stabilisers
  const bool is_sequence_maximum_;
};

// Copies W, each row of it padded to whole vectors.
void PadMatrix(const ConstTensorView& w, const Sizes& sizes, float* to) {
  const int64_t head_dim = w.dim(w.rank - 1);
  const float* from = w.At<float>();
  for (int64_t r = 0; r < sizes.matrices * sizes.projections; ++r) {
    std::copy_n(from + r * head_dim, head_dim, to + r * sizes.input_row);
    std::fill(to + r * sizes.input_row + head_dim, to + (r + 1) * sizes.input_row, 0.0f);
  }
}

// Differentiates all queries of each head, then all keys.
void DifferentiateAll(const Problem& problem, const LinearGradient& run, const Sizes& sizes,
                      const BackwardPlan& plan, const Kept& kept, const BackwardMemory& memory,
                      ThreadPool& pool) {
  const auto group_tokens = [&](int64_t tokens) {
    return RoundUp(CeilDivide(tokens, plan.groups), kChunk);
  };
  for (int64_t first = 0; first < plan.heads; first += plan.held_heads) {
    const int64_t heads = std::min(plan.held_heads, plan.heads - first);
    const auto sums = [&](int64_t task) { return run.StateAt(memory.states + task * sizes.state); };
    const auto key_sums = [&](int64_t slot) {
      return run.StateAt(kept.states + (first + slot) * sizes.state);
    };
    const auto add_to_w = [&](const Tokens& tokens, int64_t count, int64_t task) {
      if (!run.wants_w()) return;
      run.AddToW(tokens, count, 0, sizes.projections, memory.w_parts + task * plan.matrix_floats);
    };
    pool.ParallelFor(heads * plan.groups, [&](int64_t task, int worker) {
      const int64_t slot = task / plan.groups, head = first + slot;
      const int64_t b = head / problem.kv_heads, kv_head = head % problem.kv_heads;
      const int64_t size = group_tokens(problem.query_tokens);
      const int64_t begin = task % plan.groups * size;
      const int64_t end = std::min(begin + size, problem.query_tokens);
      BackwardScratch& scratch = memory.scratch[worker];
      QueryChunk& queries = *memory.chunks[worker].queries;
      const Sums::Header& seen = key_sums(slot).header();
      sums(task).Reset();
      sums(task).header().reference = seen.tokens == 0 ? kInfinity : seen.reference;
      std::fill_n(memory.w_parts + task * plan.matrix_floats, plan.matrix_floats, 0.0f);
      memory.maximum_gradients[task] = 0;
      for (int64_t i = begin; i < end; i += kChunk) {
        for (int64_t g = 0; g < problem.group(); ++g) {
          const int64_t h = kv_head * problem.group() + g;
          run.LoadChunkQueries(b, h, i, std::min(kChunk, end - i), queries, scratch);
          run.SetVisible(seen, queries);
          run.ComputeRowFactors(queries);
          run.AdvanceQueryHeader(sums(task).header(), &queries, 1);
          run.AddQueries(queries, sums(task), sums(task), 0, sizes.features, scratch);
          run.DifferentiateRows(queries, key_sums(slot), scratch);
          for (int64_t t = 0; t < queries.count; ++t) {
            memory.maximum_gradients[task] += queries.maximum_gradient[t];
          }
          run.StoreQueryGradients(b, h, queries, scratch);
          add_to_w(queries.tokens, queries.count, task);
        }
      }
    });
    pool.ParallelFor(heads, [&](int64_t slot, int) {
      for (int64_t task = slot * plan.groups + 1; task < (slot + 1) * plan.groups; ++task) {
        run.Merge(sums(slot * plan.groups), sums(task));
        memory.maximum_gradients[slot * plan.groups] += memory.maximum_gradients[task];
      }
    });
    pool.ParallelFor(heads * plan.groups, [&](int64_t task, int worker) {
      const int64_t slot = task / plan.groups, head = first + slot;
      const int64_t b = head / problem.kv_heads, kv_head = head % problem.kv_heads;
      const int64_t size = group_tokens(problem.kv_tokens);
      const int64_t begin = task % plan.groups * size;
      const int64_t end = std::min(begin + size, problem.kv_tokens);
      BackwardScratch& scratch = memory.scratch[worker];
      Chunk& chunk = memory.chunks[worker];
      const int64_t maximum_key = key_sums(slot).header().maximum_key;
      for (int64_t j = begin; j < end; j += kChunk) {
        run.LoadChunkKeys(head, j, chunk, scratch);
        run.DifferentiateKeys(b, kv_head, sums(slot * plan.groups), chunk, scratch);
        if (run.has_maximum_gradient() && maximum_key >= j && maximum_key < j + chunk.keys.count) {
          run.AddMaximumGradient(memory.maximum_gradients[slot * plan.groups], maximum_key - j,
                                 chunk);
        }
        run.StoreKeyGradients(b, kv_head, chunk, nullptr, scratch);
        add_to_w(chunk.keys.tokens, chunk.keys.count, task);
      }
    });
    run.AddParts(first, heads, plan, pool);
  }
}

// Differentiates a block of chunks of several heads of a causal problem. `states` are the sums over
// the queries after the block and those after the block before, of which this function computes the
// second: [heads][2], first those at `which`.
void DifferentiateBlock(const Problem& problem, const LinearGradient& run, const Sizes& sizes,
                        const BackwardPlan& plan, const Kept& kept, const BackwardMemory& memory,
                        int64_t first_head, int64_t heads, int64_t block, int64_t which,
                        ThreadPool& pool) {
  const int64_t first_chunk = block * kKeptChunks, group = problem.group();
  const int64_t count = std::min(kKeptChunks, CeilDivide(problem.kv_tokens, kChunk) - first_chunk);
  const auto chunks = [&](int64_t slot) { return memory.chunks + slot * kKeptChunks; };
  const auto state = [&](int64_t slot, int64_t index) {
    return memory.states + (slot * 2 + index) * sizes.state;
  };
  for (int64_t slot = 0; slot < heads; ++slot) {
    for (int64_t n = 0; n < count; ++n) {
      Chunk& chunk = chunks(slot)[n];
      chunk.before =
          n > 0 ? chunk.own_before
                : kept.states + ((first_head + slot) * KeptBlocks(problem) + block) * sizes.state;
      chunk.after = n + 1 < count ? chunk.own_after : state(slot, which);
    }
  }
  // Calls body(batch, key-value head, chunk, index, worker), index 0 to group, for each chunk; index
  // `group` is for keys.
  const auto for_each_item = [&](int64_t more_tasks, auto body, auto more) {
    const int64_t items = heads * count * (group + 1);
    pool.ParallelFor(items + more_tasks, [&](int64_t task, int worker) {
      if (task >= items) return more(task - items);
      const int64_t slot = task / (group + 1) / count;
      const int64_t b = (first_head + slot) / problem.kv_heads;
      const int64_t h = (first_head + slot) % problem.kv_heads;
      body(b, h, slot, chunks(slot)[task / (group + 1) % count], task % (group + 1),
           memory.scratch[worker]);
    });
  };
  const auto nothing = [](int64_t) {};
  for_each_item(
      0,
      [&](int64_t b, int64_t h, int64_t, Chunk& chunk, int64_t g, BackwardScratch& scratch) {
        const int64_t n = &chunk - memory.chunks;
        const int64_t first_key = (first_chunk + n % kKeptChunks) * kChunk;
        if (g == group) {
          return run.LoadChunkKeys(b * problem.kv_heads + h, first_key, chunk, scratch);
        }
        const int64_t end = std::min(first_key + kChunk, problem.kv_tokens);
        const int64_t first = std::max<int64_t>(first_key - problem.causal_offset(), 0);
        const int64_t rows = std::max<int64_t>(end - problem.causal_offset() - first, 0);
        run.LoadChunkQueries(b, h * group + g, first, rows, chunk.queries[g], scratch);
      },
      nothing);
  pool.ParallelFor(heads, [&](int64_t slot, int) {
    const Sums next = run.StateAt(state(slot, 1 - which));
    next.header() = run.AdvanceHeaders(first_head + slot, chunks(slot), count,
                                       run.StateAt(chunks(slot)[0].before).header(),
                                       run.StateAt(state(slot, which)).header());
  });
  pool.ParallelFor(heads * 2 * kSumSlices, [&](int64_t task, int worker) {
    const int64_t slot = task / kSumSlices / 2, slice = task % kSumSlices;
    BackwardScratch& scratch = memory.scratch[worker];
    if (task / kSumSlices % 2 == 0) {
      run.AdvanceKeySlice(chunks(slot), count, slice, scratch);
    } else {
      run.AdvanceQuerySlice(chunks(slot), count, slice, run.StateAt(state(slot, 1 - which)),
                            scratch);
    }
  });
  pool.ParallelFor(heads * count, [&](int64_t task, int worker) {
    const int64_t head = first_head + task / count;
    run.Differentiate(head / problem.kv_heads, head % problem.kv_heads,
                      chunks(task / count)[task % count], memory.scratch[worker]);
  });
  pool.ParallelFor(heads, [&](int64_t slot, int worker) {
    for (int64_t n = count - 1; n >= 0; --n) {
      Chunk& chunk = chunks(slot)[n];
      run.AdvanceChain(first_head + slot, run.StateAt(chunk.before).header(), chunk,
                       memory.chains[slot], memory.scratch[worker]);
    }
  });
  for_each_item(
      run.wants_w() ? heads * kSumSlices : 0,
      [&](int64_t b, int64_t h, int64_t slot, Chunk& chunk, int64_t g, BackwardScratch& scratch) {
        if (g < group) return run.StoreQueryGradients(b, h * group + g, chunk.queries[g], scratch);
        run.StoreKeyGradients(b, h, chunk, run.NeedsMaximumKey() ? memory.chains + slot : nullptr,
                              scratch);
      },
      [&](int64_t task) {
        const int64_t slot = task / kSumSlices;
        const int64_t begin = run.RowSliceBegin(task % kSumSlices),
                      end = run.RowSliceBegin(task % kSumSlices + 1);
        float* to = memory.w_parts + slot * plan.matrix_floats;
        for (int64_t n = 0; begin < end && n < count; ++n) {
          const Chunk& chunk = chunks(slot)[n];
          for (int64_t g = 0; g < group; ++g) {
            run.AddToW(chunk.queries[g].tokens, chunk.queries[g].count, begin, end, to);
          }
          run.AddToW(chunk.keys.tokens, chunk.keys.count, begin, end, to);
        }
      });
}

// Differentiates a causal problem, several heads at a time, from their last block to their first.
void DifferentiateCausal(const Problem& problem, const LinearGradient& run, const Sizes& sizes,
                         const BackwardPlan& plan, const Kept& kept, const BackwardMemory& memory,
                         ThreadPool& pool) {
  const int64_t keyless_rows =
      std::clamp<int64_t>(-problem.causal_offset(), 0, problem.query_tokens);
  pool.ParallelFor(problem.batch * problem.query_heads, [&](int64_t task, int worker) {
    run.ClearQueryGradients(task / problem.query_heads, task % problem.query_heads, 0, keyless_rows,
                            memory.scratch[worker]);
  });
  for (int64_t first = 0; first < plan.heads; first += plan.held_heads) {
    const int64_t heads = std::min(plan.held_heads, plan.heads - first);
    int64_t which = 0;
    for (int64_t slot = 0; slot < heads; ++slot) {
      const Sums none = run.StateAt(memory.states + slot * 2 * sizes.state);
      none.Reset();
      none.header().reference = kInfinity;
      run.ResetChain(memory.chains[slot]);
    }
    std::fill_n(memory.w_parts, heads * plan.matrix_floats, 0.0f);
    for (int64_t block = KeptBlocks(problem) - 1; block >= 0; --block) {
      DifferentiateBlock(problem, run, sizes, plan, kept, memory, first, heads, block, which, pool);
      which = 1 - which;
    }
    for (int64_t slot = 0; run.NeedsMaximumKey() && slot < heads; ++slot) {
      run.StoreMaximumKey((first + slot) / problem.kv_heads, (first + slot) % problem.kv_heads,
                          memory.chains[slot], memory.w_parts + slot * plan.matrix_floats);
    }
    run.AddParts(first, heads, plan, pool);
  }
}

}  // namespace
}  // namespace linear_cpu

size_t LinearBackwardWorkspaceBytes(const Problem& problem, const FeatureMap& map, int threads) {
  const linear_cpu::Sizes sizes(problem, map);
  const linear_cpu::BackwardPlan plan(problem, sizes, threads);
  return Workspace::Measure([&](Workspace& workspace) {
    linear_cpu::LayOutBackward(problem, sizes, plan, threads, workspace);
  });
}

absl::Status LinearBackwardCpu(const Problem& problem, const LinearBackwardCall& call,
                               const Execution& execution) {
  TFB_RETURN_IF_ERROR(CheckLinearMap(problem, call.map, call.w));
  const linear_cpu::Sizes sizes(problem, call.map);
  const int threads = execution.pool->threads();
  const linear_cpu::BackwardPlan plan(problem, sizes, threads);
  Workspace workspace(execution.workspace), kept_memory(execution.kept);
  const linear_cpu::BackwardMemory memory =
      linear_cpu::LayOutBackward(problem, sizes, plan, threads, workspace);
  const linear_cpu::Kept kept = linear_cpu::LayOutKept(problem, sizes, kept_memory);
  const linear_cpu::LinearGradient run(problem, call, sizes, kept, memory);
  linear_cpu::PadMatrix(call.w, sizes, memory.w);
  run.ResetTotals(plan);
  if (problem.causal) {
    linear_cpu::DifferentiateCausal(problem, run, sizes, plan, kept, memory, *execution.pool);
  } else {
    linear_cpu::DifferentiateAll(problem, run, sizes, plan, kept, memory, *execution.pool);
  }
  run.StoreTotals();
  return absl::OkStatus();
}

}  // namespace tfb
