// Engine linear: attention whose weights are products of features, in time and memory linear in
// tokens.
//
//   y_i  = sum_j a_ij v_j / D_i,   a_ij = phi_q(q_i) . phi_k(k_j)
//   D_i  = sum_j a_ij + d sum_r phi_q(q_i)_r
//
// The sums are over the keys j that are tokens (key mask) and, where the problem is causal, j <= i
// + kv_tokens - query_tokens. A row without any key, and a row whose D_i is 0, gives y_i = 0.
// log_sum_exp_i = log D_i with the stabilisers below undone, -inf where D_i is 0: with the softmax
// maps it estimates the log-sum-exp of dense attention.
//
// Features. x is the input times `input_scale`, w_r a row of W, c `constant`:
//
//   kExp       phi(x) = c [exp(w_r . x - |x|^2 / 2 - s) + epsilon]_r
//   kExpPair   phi(x) = c [exp(+-w_r . x - |x|^2 / 2 - s) + epsilon]_(r, both signs)
//   kRelu      phi(x) = c [max(w_r . x, 0) + epsilon]_r
//   kSinCos    phi(x) = c [sin(w_r . x), cos(w_r . x)]_r
//
// The first two: Choromanski et al., arXiv:2009.14794v4, lemma 1 and section 2.3; kRelu is the
// generalised attention of its section 2.2; kSinCos: Peng et al., arXiv:2103.02143v2, section 2.2.
// With `unit`, x is divided by its length plus `length_epsilon` before it is scaled; an input
// shorter than 2^-60 counts as zero, and one longer than 2^63, whose square is no fp32 number,
// gives NaN.
//
// Weights of kSinCos have either sign, and so have D_i, whose logarithm is that of |D_i|.
//
// Gates, for causal problems: the gate g_j = sigmoid(u . k_j + b) of a key's input, unscaled, with
// u and b of its head, makes sums decay:
//
//   a_ij = prod_(j < l <= i') g_l (1 - g_j) phi_q(q_i) . phi_k(k_j)
//
// where i' is the last key that row i sees. Padding has no gate.
//
// The stabiliser s of a query is max_r w_r . q (max_r |w_r . q| for kExpPair). The stabiliser of
// the keys is the same maximum over the rows of W *and* over keys, so that it is common to all keys
// of one sum:
//
//   kRunning   over the keys that row i sees. In a causal problem phi_k therefore depends on the
//              row, and row i on nothing after it. Without the causal mask it is kSequence.
//   kSequence  over all keys that are tokens, later ones too, as published codes do; not for
//              LinearAppend.
//   kNone      s = 0, for queries as well.
//
// s cancels in y_i where epsilon = d = 0.
//
// Evaluation. Let M_j = max_r w_r . k_j, E_jr = exp(w_r . k_j - M_j), so that max_r E_jr = 1, and
// rho_j = M_j - |k_j|^2 / 2; the same for queries: F_ir, M_i, lambda_i. With m features, S the
// keys' stabiliser and s that of query i,
//
//   a_ij / c^2 = sum_r (exp(lambda_i - s) F_ir + epsilon) (exp(rho_j - S) E_jr + epsilon)
//              = exp(lambda_i - s) exp(rho_j - S) F_i . E_j
//                + exp(lambda_i - s) epsilon sum_r F_ir
//                + epsilon exp(rho_j - S) sum_r E_jr
//                + epsilon^2 m
//
// So separate sums over keys are kept: of exp(rho_j - R) E_j (v_j, 1), of v_j and 1, and of
// exp(rho_j - R) (sum_r E_jr) (v_j, 1), where the reference R is the running maximum of rho_j (not
// of w_r . k_j: the sums then hold a term of order 1 whatever the norm of the keys). When R grows,
// the first and the last are multiplied by exp(R_old - R_new). S enters as one factor exp(R - S) a
// row, so a causal row may have its own, and whatever s and S are, no exponent above 0 is taken:
// the four terms are divided by max(exp(lambda_i - s), epsilon) max(exp(R - S), epsilon). Only F_i
// . E_j itself can underflow, when no feature is within e^87 of the largest of both q_i and k_j.
// The features of a key whose square is beyond fp32 are epsilon: its rho_j is -inf, and R the least
// fp32 number where no other key is seen. Without epsilon such keys have no weight.
//
// Causal problems go by chunks of 64 keys: the sums at the chunk's beginning stand for all earlier
// keys, and within the chunk a_ij is formed pair by pair with R_i = max over j <= i. No value of
// row i depends on a later key, so causality holds bit by bit; chunk edges change nothing but the
// order of additions.
//
// Gates are scales of keys. With G_j = sum of log g_l from the chunk's first key to j, the factor
// above is exp(log(1 - g_j) - G_j) exp(G_i'): the first joins exp(rho_j), the second is common to
// all keys of a row and enters log D_i and the floor alone. A chunk's sums are then made relative
// to its end: R falls by its G.
//
// FLOPs, for m features and r rows of W: 2 r head_dim a token and head to project queries and keys,
// 2 m (value_dim + 1) to add a key and as much to read for a query; causal adds some 90 (m +
// value_dim) a query for the pairs within its chunk, or 50 on the CPU, where chunks are halved.
// Decoding keeps m (value_dim + 1) floats a head.
#ifndef TFB_CORE_LINEAR_LINEAR_H_
#define TFB_CORE_LINEAR_LINEAR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/linear/feature_map.h"
#include "core/problem.h"
#include "core/technique.h"
#include "core/tensor.h"

namespace tfb {

constexpr int64_t kLinearChunk = 64;  // tokens taken together

struct LinearInputs {
  ConstTensorView q;         // [batch, query_heads, query_tokens, head_dim]
  ConstTensorView k;         // [batch, kv_heads, kv_tokens, head_dim]
  ConstTensorView v;         // [batch, kv_heads, kv_tokens, value_dim]
  ConstTensorView key_mask;  // u8 [batch, kv_tokens], or empty
  ConstTensorView w;         // W, f32, contiguous
  ConstTensorView gate;  // of a gated map: u and then b, f32 [kv_heads, head_dim + 1], contiguous
  FeatureMap map;
};

struct LinearCall : LinearInputs {
  TensorView out;          // [batch, query_heads, query_tokens, value_dim]
  TensorView log_sum_exp;  // f32 [batch, query_heads, query_tokens], or empty
  // Where not null, is raised by the number of rows that see a key and whose D_i is 0 or below, or
  // not above the floor.
  std::atomic<int64_t>* rows_without_weight = nullptr;
};

// The tensors of a backward pass. Gradients are those of a loss.
struct LinearBackwardCall : LinearInputs {
  ConstTensorView out;                   // as LinearCpu wrote it
  ConstTensorView out_gradient;          // like out, or empty: 0
  ConstTensorView log_sum_exp_gradient;  // f32 [batch, query_heads, query_tokens], or empty: 0
  // Written where they are not empty: gradients like q, k and v, and in f32 those of W and the
  // gates.
  TensorView q_gradient;
  TensorView k_gradient;
  TensorView v_gradient;
  TensorView w_gradient;
  TensorView gate_gradient;
};

// Returns Internal where the engines do not support W or the map.
absl::Status CheckLinearMap(const Problem& problem, const FeatureMap& map,
                            const ConstTensorView& w);

// Returns the scratch of one call in bytes. It suffices also for LinearAppend of at most
// problem.kv_tokens tokens.
size_t LinearWorkspaceBytes(const Problem& problem, const FeatureMap& map, int threads);

// Returns what a run keeps for LinearBackwardCpu, in bytes: sums of each head, all of them or,
// where causal, those before every 512th key, and two numbers a query row.
size_t LinearKeptBytes(const Problem& problem, const FeatureMap& map);

// Runs a call on the CPU. Where execution.kept is not empty, it is filled for LinearBackwardCpu.
// Tensors are of problem.dtype with any strides; arithmetic is fp32. The
// result does not depend on the number of threads, since the problem alone decides how tasks are
// cut. It allocates nothing.
absl::Status LinearCpu(const Problem& problem, const LinearCall& call, const Execution& execution);

// Returns the scratch of one backward pass in bytes.
size_t LinearBackwardWorkspaceBytes(const Problem& problem, const FeatureMap& map, int threads);
// Computes gradients on the CPU, from execution.kept as LinearCpu filled it for the same inputs;
// see linear_gradient.h for the formulas. Gradients of masked keys and values and of rows
// without weight are 0, whatever their tensors hold. The function to be differentiated is the
// definition: the stabilisers are maxima, whose gradient goes to the projection, of a key the
// first, that is the largest; a denominator that the floor holds is a constant.
//
// Sums are fp32, whose bits do not depend on the number of threads. It allocates nothing.
absl::Status LinearBackwardCpu(const Problem& problem, const LinearBackwardCall& call,
                               const Execution& execution);

// Returns the bytes of a decoding state: the sums of all heads so far. The size does not depend on
// the number of tokens.
size_t LinearStateBytes(const Problem& problem, const FeatureMap& map);
// Sets a state to no tokens. `state` is aligned to 64 bytes.
void LinearReset(const Problem& problem, const FeatureMap& map, absl::Span<std::byte> state);
// Appends `tokens` tokens, with queries, keys and values: q, k, v, out, log_sum_exp and key_mask
// have that many. Each sees itself and all before it, as in one causal call over all of them.
// problem.query_tokens and kv_tokens are ignored.
absl::Status LinearAppend(const Problem& problem, int64_t tokens, const LinearCall& call,
                          absl::Span<std::byte> state, const Execution& execution);

}  // namespace tfb

#endif  // TFB_CORE_LINEAR_LINEAR_H_
