"""PyTorch's scaled_dot_product_attention: dense attention, on CPUs by its flash kernel where that supports the case.

Tried with torch 2.15.0.
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

It computes dense attention exactly. Its flag is_causal aligns the first query with the first key; ours aligns the last
ones, which is its `causal_lower_right` where there are fewer queries than keys. Masks of padding are attn_mask, True
for a key that is seen.
"""

import torch
from tfb.contestant import definition
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


@definition('dense', arrays='torch', packages=('torch',), title='PyTorch scaled_dot_product_attention')
@torch.inference_mode()
def sdpa(q, k, v, key_mask, causal):
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if key_mask is not None:
        mask = key_mask[:, None, None, :].bool()
        if causal:
            mask = mask & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    elif causal and queries != keys:
        mask = causal_lower_right(queries, keys)
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None,
                                        enable_gqa=q.shape[1] != k.shape[1])
