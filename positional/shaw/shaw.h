// Shaw's relative positions: vectors of the clipped offset are added to the keys and the values.
//
//   s_ij  = q_i . (k_j + P^K[rho]) / sqrt(head_dim),     rho = clip(j - p_i, -k, k) + k
//   y_i   = sum_j a_ij (v_j + P^V[rho]),                 a_ij = softmax_j(s_ij)
//   p_i   = i + kv_tokens - query_tokens
//
// Evaluation. The offsets are 2k + 1 bins. The inner bins have one key each; the first and the last
// have all the far keys of their side, with the same vector. So far keys are plain attention, and
// with o_rho and l_rho the output and the log-sum-exp over the keys of a bin,
//
//   y_i = sum_rho b_rho (o_rho + P^V[rho]),   b = softmax_rho(l_rho + q_i . P^K[rho] / sqrt(head_dim))
//
// where o is v_j and l is q_i . k_j / sqrt(head_dim) for a near key. Engine flash finds o and l of
// each side under a band, without a score rule; a step of 2k + 1 terms a query does the rest.
//
// Source: Shaw, Uszkoreit, Vaswani 2018, "Self-attention with relative position representations",
// NAACL, arXiv:1803.02155v2, sections 3.1 to 3.3. Its base model has k = 16 and tables for each
// head, its big one k = 8 and tables that the heads share, as tensor2tensor's code has them. The
// authors found (table 3) that P^V may be left out.
//
// Cost: dense attention and 2 (2k + 1) (head_dim + value_dim) FLOPs a query. Memory: a copy of the
// output in fp32 for each side that has far keys.
//
// The backward pass (shaw_cpu.h) takes the gradients of y to those of o_rho and l_rho, for near
// keys to k, v and q, and to the tables; engine flash takes those of the far keys' o and l on.
//
// The parameters, f32, are T = query_heads tables where they are per head, else 1: key_positions
// [T, 2k + 1, head_dim] and, with `values`, value_positions [T, 2k + 1, value_dim]; drawn N(0,
// 0.1^2). Row rho is the offset rho - k.
#ifndef TFB_POSITIONAL_SHAW_SHAW_H_
#define TFB_POSITIONAL_SHAW_SHAW_H_

#include <cstdint>

#include "core/technique.h"

namespace tfb::shaw {

struct ShawOptions {
  int64_t max_distance = 16;
  bool per_head = true;
  bool values = true;

  void Describe(OptionBinder& bind) {
    bind.Int("max_distance", &max_distance, 0, 256, "k: larger distances count as this one");
    bind.Bool("per_head", &per_head, "tables for each head; else one for all");
    bind.Bool("values", &values, "positions join the values too, not the keys alone");
  }
};

}  // namespace tfb::shaw

#endif  // TFB_POSITIONAL_SHAW_SHAW_H_
