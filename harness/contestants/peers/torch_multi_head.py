"""PyTorch's nn.MultiheadAttention with our weights, on hidden states.

Tried with torch 2.15.0.
https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html

It computes multi_head with biases exactly. It is evaluated without weights, so that it uses
scaled_dot_product_attention, and without its fast path for inference, which does not: on CPUs that took up to 4 times as
long, and never less. It has as many key-value heads as query heads, and one size for all channels. A query that sees no
key, of a sequence that is nothing but padding, is NaN here, and the bias there.
"""

import torch
from tfb.contestant import definition

torch.backends.mha.set_fastpath_enabled(False)
ABOUT = {'arrays': 'torch', 'packages': ('torch',), 'title': 'PyTorch nn.MultiheadAttention'}


@definition('multi_head:bias=true', **ABOUT)
class attention:

    def __init__(self, problem, parameters):
        if problem.kv_heads != problem.query_heads or problem.value_dim != problem.head_dim:
            raise NotImplementedError('kv_heads other than query_heads, or value_dim other than head_dim')
        heads, p = problem.query_heads, parameters
        layer = torch.nn.MultiheadAttention(heads * problem.head_dim, heads, batch_first=True).eval()
        layer.load_state_dict({
            'in_proj_weight': torch.cat([p['w_q'].T, p['w_k'].T, p['w_v'].T]),
            'in_proj_bias': torch.cat([p['b_q'], p['b_k'], p['b_v']]),
            'out_proj.weight': p['w_o'].T,
            'out_proj.bias': p['b_o'],
        })
        self.layer = layer.to({'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16}[problem.dtype])
        self.hidden = None
        if problem.causal:
            self.hidden = torch.ones(problem.query_tokens, problem.kv_tokens, dtype=torch.bool).triu(
                1 + problem.kv_tokens - problem.query_tokens)

    @torch.inference_mode()
    def __call__(self, x, key_mask, memory=None):
        context = x if memory is None else memory
        padding = None if key_mask is None else key_mask == 0
        top_left = self.hidden is not None and x.shape[1] == context.shape[1]
        return self.layer(x, context, context, padding, need_weights=False, attn_mask=self.hidden, is_causal=top_left)[0]


@definition('multi_head:bias=true,cross=true', **ABOUT)
class cross_attention(attention):
    pass
