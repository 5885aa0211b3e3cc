// What the tasks of engine linear's backward pass on the CPU do: formulas, and the work on chunks
// of tokens.
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
// Sums over queries have the same form with exp(R - R_i) b_i phi_i (dN_i, dZ_i), split into the
// part of F_i and that of epsilon, and b'_i sum_r phi_ir dN_i; their reference R is the least R_i,
// so that no exponent is above 0: a key's rho_j is at most the R_i of every row that sees it. The
// factors that divide numerator and denominator alike need no gradient.
//
// Projections and inputs. For exponentials d(w_r . x) = E_r dE_r (with both signs for pairs) and dx
// = W^T d(W x) - x sum_r E_r dE_r. The stabilisers are maxima, and with epsilon or d they do not
// cancel:
//
//   ds_i = epsilon / max(exp(lambda_i - s), epsilon) sum_r dphi_ir
//   dS_i = sum_r phi_ir (b'_i sum_j t_ij + d'_i dZ_i)
//
// which follow from the sums' homogeneity. ds_i goes to the query's largest projection, dS_i to the
// largest of the keys that S_i is of. A length u = x / (|x| + e) has dx = (du - u (u . du) / |u|) /
// (|x| + e), for |u| the length of u.
//
// Gates. With tau_ij = t_ij a_ij, the gradient of log g_l is the sum of tau_ij over rows i' >= l
// and keys j < l, hence sum_(i' >= l) sum_j tau_ij - sum_(j >= l) sum_i tau_ij, two running sums,
// in float64, of numbers a row and a key; they are sum_r phi_ir dphi_ir and sum_r E_jr dE_jr. That
// of log(1 - g_j) is sum_i tau_ij.
//
// A row that is not finite (a NaN in its query or in what it sees) must not reach keys that it does
// not see through a product with a weight of 0: its vectors become 0 and its factor NaN. Features
// of keys that are not finite become 0, since every row that sees them is such a row.
#ifndef TFB_CORE_LINEAR_LINEAR_GRADIENT_H_
#define TFB_CORE_LINEAR_LINEAR_GRADIENT_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/linear/linear.h"
#include "core/linear/linear_backward_memory.h"
#include "core/linear/linear_memory.h"
#include "core/linear/linear_pass.h"
#include "core/problem.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace tfb::linear_cpu {

constexpr int64_t kPairBlock = 32;     // rows or keys of a triangle of pairs at a time
constexpr int64_t kFeatureBlock = 24;  // rows of products that stay in an L1 between two of them
// The reference of sums over no queries.
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
  void LoadChunkKeys(int64_t kv_head, int64_t first, Chunk& chunk, BackwardScratch& scratch) const;

  // Loads rows [first, first + rows) of query head h: features, dN and dZ.
  void LoadChunkQueries(int64_t b, int64_t h, int64_t first, int64_t rows, QueryChunk& queries,
                        BackwardScratch& scratch) const;

  // Let the products from now on ask for a chunk that is loaded next, or for the gradients of this one.
  void ExpectQueries(int64_t b, int64_t h, int64_t first, BackwardScratch& scratch) const {
    Expect(inputs_.q, b, h, first, scratch);
    Expect(call_.out, b, h, first, scratch);
    Expect(call_.out_gradient, b, h, first, scratch);
  }
  void ExpectKeys(int64_t b, int64_t h, int64_t first, BackwardScratch& scratch) const {
    Expect(inputs_.k, b, h, first, scratch);
    Expect(inputs_.v, b, h, first, scratch);
  }
  void ExpectQueryGradients(int64_t b, int64_t h, int64_t first, BackwardScratch& scratch) const {
    Expect(call_.q_gradient, b, h, first, scratch);
  }
  void ExpectKeyGradients(int64_t b, int64_t h, int64_t first, BackwardScratch& scratch) const {
    Expect(call_.v_gradient, b, h, first, scratch);
    Expect(call_.k_gradient, b, h, first, scratch);
  }

  // ---- What rows see, and sums over queries ----

  // Sets what the rows of a chunk see of the chunk's keys.
  void SetVisible(const Keys& keys, QueryChunk& queries) const;

  // Does the same for rows that see all keys of the sums.
  void SetVisible(const Sums::Header& header, QueryChunk& queries) const {
    std::fill_n(queries.factors.reference, kChunk, header.reference);
    std::fill_n(queries.factors.key_maximum, kChunk, header.maximum);
  }

  // Computes the rows' factors from what they see.
  void ComputeRowFactors(QueryChunk& queries) const;

  // Updates the header of sums over queries with those of a chunk, and finds the scales of the
  // queries and of the sums so far.
  void AdvanceQueryHeader(Sums::Header& header, QueryChunk* queries, int64_t heads) const;

  // Adds queries to features [first, last) of sums over queries.
  void AddQueries(const QueryChunk& queries, const Sums& from, const Sums& to, int64_t first,
                  int64_t last, BackwardScratch& scratch) const;

  // ---- The chunks of a block ----

  // Updates the header of the sums over keys with those of a chunk, whose scales it finds.
  void AdvanceKeyHeader(int64_t head, Sums::Header& header, Chunk& chunk) const;

  // Finds what the queries of a chunk see, writes the header of the sums over queries after the
  // chunk to those sums, and updates it with the chunk's.
  void AdvanceChunkHeader(Sums::Header& header, Chunk& chunk) const;

  // Computes features [first, last) of `to`, the sums over the keys before a chunk and its own.
  void AddChunkKeys(const Chunk& chunk, const Sums& to, int64_t first, int64_t last,
                    BackwardScratch& scratch) const;

  // Computes features [first, last) of `to`, the sums over the queries after a chunk and its own.
  void AddChunkQueries(const Chunk& chunk, const Sums& to, int64_t first, int64_t last,
                       BackwardScratch& scratch) const;

  // Returns the first feature of a slice of the sums.
  using Pass::SliceBegin;

  // Differentiates a chunk of a causal problem: its values, its queries and the projections of its
  // keys.
  void Differentiate(int64_t b, int64_t h, Chunk& chunk, BackwardScratch& scratch) const;

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

  // Goes through the places of a chunk in reverse order: distributes the gradients of the maxima
  // and computes those of the gates. `before` is the header of the sums before the chunk.
  void AdvanceChain(int64_t kv_head, const Sums::Header& before, Chunk& chunk, HeadChain& chain,
                    BackwardScratch& scratch) const;

  void ResetChain(HeadChain& chain) const {
    chain.rows = chain.columns = chain.maximum = 0;
    std::fill_n(chain.gate, problem_.head_dim + 1, 0.0f);
  }

  // ---- Inputs and W ----

  // Writes the gradients of a chunk's queries.
  void StoreQueryGradients(int64_t b, int64_t h, QueryChunk& queries,
                           BackwardScratch& scratch) const;

  // Clears the gradients of rows [begin, end) of a query head, which see no key.
  void ClearQueryGradients(int64_t b, int64_t h, int64_t begin, int64_t end,
                           BackwardScratch& scratch) const {
    for (int64_t i = begin; i < end; ++i) Store(scratch.inputs, false, call_.q_gradient, b, h, i);
  }

  // Writes the gradients of a chunk's keys. With the maximum of the sequence, that of the key which
  // has it is left to StoreMaximumKey, where `chain` is not null.
  void StoreKeyGradients(int64_t b, int64_t h, Chunk& chunk, HeadChain* chain,
                         BackwardScratch& scratch) const;

  // Writes the gradient of the key with the maximum of the sequence, and adds its part of W's.
  void StoreMaximumKey(int64_t b, int64_t h, HeadChain& chain, float* w_gradient) const;

  // Adds tokens to rows [first, last) of a gradient of W.
  void AddToW(const Tokens& tokens, int64_t count, int64_t first, int64_t last,
              float* w_gradient) const;

  // Does the same with the queries and the keys of a chunk.
  void AddChunkToW(const Chunk& chunk, int64_t first, int64_t last, float* w_gradient) const;
  // Returns the first row of a slice of W.
  int64_t RowSliceBegin(int64_t slice) const {
    return std::min(RoundUp(CeilDivide(sizes_.projections, kSumSlices), kTileRows) * slice,
                    sizes_.projections);
  }

  // Clears the sums of the gradients of W and of the gates.
  void ResetTotals(const BackwardPlan& plan) const {
    std::fill_n(memory_.w_gradient, plan.matrices * plan.matrix_floats, 0.0f);
    std::fill_n(memory_.gate_gradient, problem_.kv_heads * (problem_.head_dim + 1), 0.0f);
  }
  // Adds the parts of heads [first, first + heads), in order.
  void AddParts(int64_t first, int64_t heads, const BackwardPlan& plan, ThreadPool& pool) const;
  // Writes the sums to the caller's tensors.
  void StoreTotals() const;

  Sums StateAt(float* memory) const { return Sums(sizes_, memory); }
  bool NeedsMaximumKey() const { return has_maximum_gradient_ && is_sequence_maximum_; }
  // Adds the gradient of S to the largest projection of key j of a chunk that has been
  // differentiated.
  void AddMaximumGradient(double gradient, int64_t j, Chunk& chunk) const;
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
                       QueryChunk& queries) const;

  // Computes dE and dv, in scratch, from the sums over the queries after the keys, and transposes
  // the values.
  void ReadQuerySums(const Keys& keys, const Sums& sums, BackwardScratch& scratch) const;

  // Calls body(first feature, features) for blocks of features.
  template <class Body>
  void ForEachFeatureBlock(Body body) const {
    for (int64_t first = 0; first < sizes_.features; first += kFeatureBlock) {
      body(first, std::min(kFeatureBlock, sizes_.features - first));
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
  void MakePairs(const Keys& keys, const QueryChunk& queries, BackwardScratch& scratch) const;

  // Computes the sums of t_ij over the keys that row i sees, where they are needed, and then
  // replaces t_ij by b_i exp(rho_j - R_i) t_ij.
  void SumPairGradients(const Keys& keys, const QueryChunk& queries, BackwardScratch& scratch,
                        float* sums) const;

  // Adds the pairs to dE and dv, in scratch.
  void AddPairsToKeys(const Keys& keys, const QueryChunk& queries, BackwardScratch& scratch) const;

  // Replaces the features of queries by the gradients of their projections. The rows see the sums
  // and, where `keys` is not null, pairs with those keys, with scratch.pair_columns, whose t_ij sum
  // to sums_of_pairs.
  void DifferentiateQueries(QueryChunk& queries, const Sums& sums, const Keys* keys,
                            const float* sums_of_pairs, BackwardScratch& scratch) const;

  // Replaces the features of keys by the gradients of their projections, and writes those of the
  // values.
  void FinishKeys(int64_t b, int64_t h, const Sums& sums, Chunk& chunk,
                  BackwardScratch& scratch) const;

  // Finds each token's first feature that is the largest, which is 1.
  void FindMaximumRows(const Tokens& tokens, int64_t lanes, int32_t* rows) const;

  // Computes the products of gradients of projections with W, in scratch.inputs.
  void MultiplyByW(int64_t kv_head, const Tokens& tokens, int64_t count,
                   BackwardScratch& scratch) const;

  // Adds the gradient through |x|^2 / 2.
  void AddHalfSquare(float product, const float* input, float* gradient) const;
  // Turns the gradient of x, which is factor times the tensor's row, into the row's.
  void ThroughScale(float factor, float half_square, const float* input, float* gradient) const;
  void Store(float* row, bool has_gradient, const TensorView& view, int64_t b, int64_t h,
             int64_t token) const;

  // Adds a chunk to the gradients of u and b.
  void SumGateGradients(int64_t kv_head, const Chunk& chunk, HeadChain& chain,
                        BackwardScratch& scratch) const;

  const LinearBackwardCall& call_;
  const Kept& kept_;
  const BackwardMemory& memory_;
  const bool has_maximum_gradient_;  // of the keys' stabilisers
  const bool is_sequence_maximum_;
};

}  // namespace tfb::linear_cpu

#endif  // TFB_CORE_LINEAR_LINEAR_GRADIENT_H_
