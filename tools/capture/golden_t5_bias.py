"""Writes positional/t5_bias/testdata: see golden.py, whose rules hold here too."""

import pathlib

import numpy as np
import torch

import golden
from golden import attend, case, draw, f32, f64, in_float64, merge_heads, split_heads

FIRST = len(golden.CASES)

T5_ATTENTION = "transformers.models.t5.modeling_t5.T5Attention"


def bucket_starts(buckets, max_distance):
    """Smallest n with (n/m)^(buckets-m) >= (D/m)^r, in Python's integers."""
    m = buckets // 2
    starts = list(range(m + 1))
    for r in range(1, buckets - m):
        n = starts[-1]
        while n**(buckets - m) < max_distance**r * m**(buckets - m - r):
            n += 1
        starts.append(n)
    return np.array(starts)


def buckets_of(relative, causal, buckets, max_distance):
    """Of j - i."""
    side = buckets if causal else buckets // 2
    distance = np.maximum(-relative, 0) if causal else abs(relative)
    found = np.searchsorted(bucket_starts(side, max_distance), distance, side="right") - 1
    return found if causal else found + side * (relative > 0)


@case("positional/t5_bias/testdata/buckets", f"{T5_ATTENTION}._relative_position_bucket", 101)
def buckets():
    """In the precision of its own, float32."""
    from transformers.models.t5.modeling_t5 import T5Attention
    relative = torch.arange(-300, 301)
    settings = [(causal, *sizes) for causal in (True, False)
                for sizes in ((32, 128), (20, 100), (10, 1000))]

    def name(causal, count, max_distance):
        return f"{'causal' if causal else 'bidirectional'}_{count}_{max_distance}"

    return {name(*s): T5Attention._relative_position_bucket(
        relative, not s[0], s[1], s[2]).numpy().astype(np.int32) for s in settings}, {
        "formula": "<direction>_<num_buckets>_<max_distance>[n]: the bucket of j - i = n - 300",
    }, lambda t: {name(*s): buckets_of(relative.numpy(), *s) for s in settings}


def attention_case(causal, query_tokens, kv_tokens):
    """Its attention without projections; queries short of keys come after its cache of keys."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention
    batch, heads, head_dim = 1, 3, 6
    width = heads * head_dim
    config = T5Config(d_model=width, d_kv=head_dim, num_heads=heads, is_decoder=causal,
                      dropout_rate=0.0)
    q = draw(batch, heads, query_tokens, head_dim, scale=0.6)
    k, v = (draw(batch, heads, kv_tokens, head_dim) for _ in range(2))
    beta = draw(config.relative_attention_num_buckets, heads)
    past = kv_tokens - query_tokens
    distance = np.subtract.outer(np.arange(past, kv_tokens), np.arange(kv_tokens))
    allowed = distance >= 0 if causal else np.ones_like(distance, dtype=bool)
    with in_float64():
        module = T5Attention(config, has_relative_attention_bias=True).eval()
        module.relative_attention_bias.weight.copy_(beta)
        for name, value in (("q", q), ("k", k[:, :, past:]), ("v", v[:, :, past:])):
            delattr(module, name)
            merged = torch.from_numpy(merge_heads(value.numpy()))
            setattr(module, name, lambda _, merged=merged: merged)
        del module.o
        module.o = lambda x: x
        mask = torch.where(torch.from_numpy(allowed), 0.0, -torch.inf)[None, None]
        cache = (k[:, :, :past], v[:, :, :past]) if past else None
        out = module(torch.zeros(batch, query_tokens, width), mask, past_key_value=cache)[0]

    def formula(t):
        found = buckets_of(-distance, causal, 32, 128)
        bias = t["beta"][found].transpose(2, 0, 1)
        return {"out": attend(t["q"] * np.sqrt(head_dim), t["k"], t["v"], allowed, bias)}

    return {
        "q": f32(q), "k": f32(k), "v": f32(v), "beta": f32(beta),
        "out": split_heads(f64(out), heads),
    }, {
        "causal": str(causal).lower(), "num_buckets": 32, "max_distance": 128,
        "formula": "softmax over j of q_i k_j + beta[bucket(i + kv_tokens - query_tokens - j), h], "
                   "times v, without 1/sqrt(head_dim)",
    }, formula


@case("positional/t5_bias/testdata/causal", f"{T5_ATTENTION}, compute_bias", 102)
def causal():
    return attention_case(True, 130, 130)


@case("positional/t5_bias/testdata/causal_after_cache", f"{T5_ATTENTION}, compute_bias", 103)
def causal_after_cache():
    return attention_case(True, 40, 170)


@case("positional/t5_bias/testdata/bidirectional", f"{T5_ATTENTION}, compute_bias", 104)
def bidirectional():
    return attention_case(False, 130, 130)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
