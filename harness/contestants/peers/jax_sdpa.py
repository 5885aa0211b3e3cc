"""JAX's dot_product_attention, compiled: dense attention.

Tried with jax 0.10.2, whose implementation for CPUs is XLA's.
https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html

It computes dense attention exactly. JAX's layout is [batch, tokens, heads, channels]; the transposition from ours is
compiled with it. Its flag is_causal aligns the first query with the first key, so that a mask stands for it where there are
fewer queries than keys.
"""

import jax
import jax.numpy as jnp
from tfb.contestant import definition


@definition('dense', arrays='jax', packages=('jax', 'jaxlib'), title='JAX dot_product_attention')
class sdpa:

    def __init__(self, problem):
        queries, keys = problem.query_tokens, problem.kv_tokens
        causal = problem.causal and queries == keys
        bottom_right = problem.causal and not causal

        def attend(q, k, v, key_mask):
            mask = None if key_mask is None else key_mask[:, None, None, :] != 0
            if bottom_right:
                earlier = jnp.tri(queries, keys, keys - queries, dtype=bool)
                mask = earlier[None, None] if mask is None else mask & earlier
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal).swapaxes(1, 2)

        self.attend = jax.jit(attend)

    def __call__(self, q, k, v, key_mask):
        return self.attend(q, k, v, key_mask).block_until_ready()
