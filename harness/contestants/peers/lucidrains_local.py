"""local-attention's LocalAttention: blocks of queries that see their own block of keys and those beside it.

Tried with local-attention 1.11.2.
https://github.com/lucidrains/local-attention

With its defaults, and without positions, it computes image_local in one dimension with as many tokens of memory as in a
block exactly; with exact_windowsize, which hides what is farther off than a block, longformer with a window of two
blocks. It has as many key-value heads as query heads. In 16 bits it rounds scores, and is farther off than its
definition allows.
"""

import torch
from local_attention import LocalAttention
from tfb.contestant import definition

ABOUT = {'arrays': 'torch', 'packages': ('local-attention', 'torch'), 'title': 'local-attention'}


@definition('image_local:query_block=256,memory=256', **ABOUT)
class blocks:
    window, exact = 256, False

    def __init__(self, problem):
        if problem.kv_heads != problem.query_heads or problem.value_dim != problem.head_dim or problem.dtype != 'f32':
            raise NotImplementedError('kv_heads other than query_heads, value_dim other than head_dim, or 16 bits')
        self.attention = LocalAttention(self.window, causal=problem.causal, autopad=True, exact_windowsize=self.exact).eval()
        # What fills the last block is a key like any other, unless a mask says which keys are tokens.
        self.mask = None
        if problem.kv_tokens % self.window:
            self.mask = torch.ones(problem.batch, problem.kv_tokens, dtype=torch.bool)

    @torch.inference_mode()
    def __call__(self, q, k, v):
        return self.attention(q, k, v, mask=self.mask)


@definition('longformer:window=256', **ABOUT)
class window(blocks):
    window, exact = 128, True
