// ALiBi: attention with linear biases instead of position embeddings.
//
//   s_ij = scale q_i . k_j - m_h |p_i - j|
//   p_i  = i + kv_tokens - query_tokens,   scale = 1 / sqrt(head_dim)
//
// with the fixed slopes, for H heads a power of two, m_h = 2^(-8 h / H), h = 1 .. H. For another H,
// with P the largest power of two below it: the P slopes of P heads, then the 1st, 3rd, 5th, ... of
// 2P heads. The bias is added after scaling. The paper is causal, where |p_i - j| = p_i - j;
// without a causal mask the bias is symmetric.
//
// Source: Press, Smith, Lewis 2022, "Train short, test long", ICLR, arXiv:2108.12409v2, section 3;
// slopes for other head counts: the authors' code.
// Cost: dense attention and one addition a score; memory heads (query_tokens + kv_tokens) floats.
// Parameters: slopes [query_heads].
#ifndef TFB_POSITIONAL_ALIBI_ALIBI_H_
#define TFB_POSITIONAL_ALIBI_ALIBI_H_

#endif  // TFB_POSITIONAL_ALIBI_ALIBI_H_
