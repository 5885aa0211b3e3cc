"""Writes attention/sinkhorn/testdata/given_logits and null_key: see golden.py, whose rules hold here too."""

import pathlib

import numpy as np
import torch

import golden
from golden import (attend, balance, case, draw, f32, f64, in_float64, redraw_parameters, rounded,
                    sinkhorn_attend)

FIRST = len(golden.CASES)
BATCH, HEADS, TOKENS, HEAD_DIM, BLOCK = 2, 2, 24, 4, 4


@case("attention/sinkhorn/testdata/given_logits", golden.SINKHORN, 105)
def given_logits():
    """The package's balance of drawn scores, in the place of those of its sorting network."""
    from sinkhorn_transformer import sinkhorn_transformer as package
    temperature, iterations = 0.5, 5
    q, k = (draw(BATCH, HEADS, TOKENS, HEAD_DIM) for _ in range(2))
    logits = draw(BATCH, HEADS, TOKENS // BLOCK, TOKENS // BLOCK, scale=2.0)
    with in_float64():
        sort = package.sinkhorn_sorting_operator(
            logits.reshape(-1, *logits.shape[2:]) / temperature, iterations)
        module = package.SinkhornAttention(BLOCK, HEADS * HEAD_DIM, HEAD_DIM, HEADS, TOKENS)
        module.sort_net.forward = lambda *_, **__: sort
        out = module(q, k, k)
    return {
        "q": f32(q), "k": f32(k), "v": f32(k), "logits": f32(logits),
        "sort": f64(sort.reshape(logits.shape)), "out": f64(out),
    }, {
        "block": BLOCK, "iterations": iterations, "temperature": temperature,
        "formula": "sort: of logits / temperature, rows and columns normalised by turns; out as in "
                   "balanced",
    }, lambda t: {"sort": balance(t["logits"] / temperature, iterations),
                  "out": sinkhorn_attend(t, BLOCK, 0)}


def null_key_formula(t):
    def sort_blocks(x, null):
        blocks = x.reshape(*x.shape[:2], -1, BLOCK, HEAD_DIM)
        null = np.broadcast_to(null[None, :, None, None], (*x.shape[:2], 1, BLOCK, HEAD_DIM))
        return np.einsum("bhut,bhtrc->bhurc", t["sort"],
                         np.concatenate((null, blocks), 2)).reshape(x.shape)
    i = np.arange(TOKENS)
    same = i[:, None] // BLOCK == i // BLOCK
    allowed = np.concatenate((same, same & (i <= i[:, None])), 1)
    return {"out": attend(
        t["q"], np.concatenate((sort_blocks(t["k"], t["null_key"]), t["k"]), 2),
        np.concatenate((sort_blocks(t["v"], t["null_value"]), t["v"]), 2), allowed)}


@case("attention/sinkhorn/testdata/null_key",
      "sinkhorn_transformer.sinkhorn_transformer.SinkhornCausalAttention", 106)
def null_key():
    """The first half of the package's heads: it rotates the tokens of the others."""
    from sinkhorn_transformer import sinkhorn_transformer as package
    q, k, v = (draw(BATCH, 2 * HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    recorded = []

    def record(*args):
        """Rounds the matrix, so that a test can give what the package used."""
        recorded.append(rounded(args[-1]))
        return recorded[0]

    with in_float64():
        module = package.SinkhornCausalAttention(
            BLOCK, 2 * HEADS * HEAD_DIM, HEAD_DIM, 2 * HEADS, TOKENS, use_simple_sort_net=True,
            n_top_buckets=1)
        redraw_parameters(module, 0.5)
        module.sort_net.register_forward_hook(record)
        out = module(q.clone(), k.clone(), v.clone())
    sort = recorded[0].reshape(BATCH, 2 * HEADS, *recorded[0].shape[1:])

    def half(x):
        return x[:, :HEADS].contiguous()

    return {
        "q": f32(half(q)), "k": f32(half(k)), "v": f32(half(v)), "sort": f32(half(sort)),
        "null_key": f32(module.null_keys[:HEADS, 0].contiguous()),
        "null_value": f32(module.null_values[:HEADS, 0].contiguous()), "out": f64(half(out)),
    }, {
        "block": BLOCK,
        "sort": "[batch, heads, blocks, 1 + blocks], of a softmax the largest entry of each row; "
                "column 0 is the null block's, whose rows all are null_key, or null_value",
        "formula": "sorted block u: sum_t sort[u, t] block t; a query attends to its sorted block, "
                   "and to its own block's tokens up to itself",
    }, null_key_formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
