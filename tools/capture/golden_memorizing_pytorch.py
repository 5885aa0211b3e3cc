"""Writes memory/memorizing/testdata/joint and joint_null_key: see golden.py, whose rules hold here too."""

import importlib.util
import math
import pathlib
import sys
import types

import numpy as np
import torch

import golden
from golden import (case, draw, f32, f64, in_float64, layer_norm, merge_heads, redraw_parameters,
                    split_heads)

FIRST = len(golden.CASES)
PACKAGE = "memorizing_transformers_pytorch"
HEADS, HEAD_DIM = 2, 4
WIDTH = HEADS * HEAD_DIM
SEGMENT, SEGMENTS, BATCH, NEIGHBOURS = 5, 4, 2, 3


def package():
    """The package's attention. Its own memory, which wants a library for the search, is not used."""
    for name, values in ((f"{PACKAGE}.knn_memory", ("KNNMemoryList",
                                                    "DEFAULT_KNN_MEMORY_MEMMAP_DIRECTORY")),):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update({value: None for value in values})
    folder = pathlib.Path(importlib.util.find_spec("einops").origin).parents[1] / PACKAGE
    parent = sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
    parent.__path__ = [str(folder)]
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.attention", folder / f"{PACKAGE}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Memory:
    """All tokens before the segment, searched one by one; and a null slot before what was found."""

    def __init__(self, null):
        self.entries, self.null = None, null

    def add(self, keys_values):  # [batch, tokens, 2, head_dim]
        self.entries = (keys_values if self.entries is None else
                        torch.cat([self.entries, keys_values], 1))

    def search(self, q, count):  # [batch, heads, tokens, head_dim]
        nulls = 0 if self.null is None else 1
        found = torch.zeros(*q.shape[:3], count, 2, HEAD_DIM)
        is_found = torch.zeros(*q.shape[:3], count, dtype=torch.bool)
        if nulls:
            found[..., 0, :, :], is_found[..., 0] = self.null, True
        if self.entries is not None:
            scores = torch.einsum("bhid,bjd->bhij", q, self.entries[:, :, 0])
            best = scores.topk(min(count - nulls, scores.shape[-1])).indices
            for b in range(q.shape[0]):
                found[b, :, :, nulls:nulls + best.shape[-1]] = self.entries[b][best[b]]
            is_found[..., nulls:nulls + best.shape[-1]] = True
        return found, is_found


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def own_scores(t, x):
    """Transformer-XL's, of one segment: [batch, heads, queries, keys]."""
    tokens = x.shape[1]
    q, k = split_heads(x @ t["layer0.w_q"], HEADS), x @ t["layer0.w_k"]
    angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
    positions = np.concatenate((np.sin(angles), np.cos(angles)), -1)
    r = split_heads((positions @ t["layer0.w_r"])[None], HEADS)[0]
    i, j = np.mgrid[:tokens, :tokens]
    by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
    by_distance = np.take_along_axis(
        by_distance, np.broadcast_to(np.maximum(i - j, 0), by_distance.shape), -1)
    content = np.einsum("bhid,bjd->bhij", q + t["u"][:, None], k)
    return (content + by_distance) / math.sqrt(HEAD_DIM)


def formula(t):
    x = layer_norm(t["x"], t["layer0.attention_norm.gamma"], t["layer0.attention_norm.beta"], 1e-5)
    q, k, v = split_heads(x @ t["layer0.w_q"], HEADS), x @ t["layer0.w_k"], x @ t["layer0.w_v"]
    scale = abs(t["layer0.memory.scale"])
    retrieval = scale[:, None, None] * np.einsum("bhid,bjd->bhij", unit(q), unit(k))
    outs = []
    for begin in range(0, x.shape[1], SEGMENT):
        rows = slice(begin, begin + SEGMENT)
        own = own_scores(t, x[:, rows])
        own[..., ~np.tril(np.ones((SEGMENT, SEGMENT), bool))] = -np.inf
        stored = retrieval[:, :, rows, :begin]
        least = np.sort(stored, -1)[..., -min(NEIGHBOURS, begin):][..., :1] if begin else 0
        stored = np.where(stored >= least, stored, -np.inf)
        values = np.concatenate((v[:, :begin], v[:, rows]), 1)[:, None]
        scores = np.concatenate((stored, own), -1)
        if "layer0.memory.null_key" in t:
            null = scale[:, None] * (unit(q)[:, :, rows] @ unit(t["layer0.memory.null_key"][0]))
            scores = np.concatenate((null[..., None], scores), -1)
            null_value = np.broadcast_to(t["layer0.memory.null_value"], (BATCH, 1, 1, HEAD_DIM))
            values = np.concatenate((null_value, values), 2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ values)
    return {"out": t["x"] + merge_heads(np.concatenate(outs, 2)) @ t["layer0.w_o"]}


def joint_case(has_null):
    x = draw(BATCH, SEGMENTS * SEGMENT, WIDTH)
    t = {"u": draw(HEADS, HEAD_DIM), "v": draw(HEADS, HEAD_DIM),
         "layer0.w_r": draw(WIDTH, WIDTH, scale=WIDTH**-0.5)}
    scale = golden.rounded(3 + draw(HEADS))
    slots = NEIGHBOURS + has_null
    with in_float64():
        module = package().KNNAttention(dim=WIDTH, heads=HEADS, dim_head=HEAD_DIM,
                                        num_retrieved_memories=slots).eval()
        redraw_parameters(module, 0.5)
        module.scale.copy_(scale.log()[:, None, None])
        norm = torch.nn.LayerNorm(WIDTH)
        norm.weight.copy_(golden.rounded(1 + draw(WIDTH, scale=0.2)))
        norm.bias.copy_(draw(WIDTH, scale=0.2))
        null_key, null_value = draw(1, HEAD_DIM), draw(1, HEAD_DIM)
        w_k, w_v = module.to_kv.weight.chunk(2)
        t.update({"layer0.w_q": module.to_q.weight.T, "layer0.w_k": w_k.T, "layer0.w_v": w_v.T,
                  "layer0.w_o": module.to_out.weight.T,
                  "layer0.attention_norm.gamma": norm.weight,
                  "layer0.attention_norm.beta": norm.bias, "layer0.memory.scale": scale})
        if has_null:
            t.update({"layer0.memory.null_key": null_key, "layer0.memory.null_value": null_value})
        memory = Memory(torch.stack((null_key[0] / null_key.norm(), null_value[0]))
                        if has_null else None)
        arrays = {name: value.detach().numpy() for name, value in t.items()}
        outs = []
        for s in range(SEGMENTS):
            h = norm(x[:, s * SEGMENT:(s + 1) * SEGMENT])
            # Its own scores are of unit vectors; the bias of positions makes them Transformer-XL's.
            q, k = (torch.nn.functional.normalize(rows, dim=-1) for rows in (
                (h @ t["layer0.w_q"]).unflatten(-1, (HEADS, HEAD_DIM)), h @ t["layer0.w_k"]))
            theirs = torch.einsum("bihd,bjd->bhij", q, k) * scale[:, None, None]
            bias = torch.from_numpy(own_scores(arrays, h.detach().numpy())) - theirs
            outs.append(module(h, knn_memory=memory, rel_pos_bias=bias)[0])
        out = x + torch.cat(outs, 1)
    tensors = {"x": f32(x), "out": f64(out), **{name: f32(value) for name, value in t.items()}}
    return tensors, {
        "layers": 1, "heads": HEADS, "head_dim": HEAD_DIM, "segment_tokens": SEGMENT,
        "memory_tokens": 0, "neighbours": NEIGHBOURS,
        "formula": "out = x + y w_o; y: one softmax over the scores of Transformer-XL of the "
                   "segment's keys up to the token, and scale unit(q) unit(k) of the best "
                   "`neighbours` keys of all earlier segments" +
                   (", and of the null key" if has_null else "") + "; one head of keys and values",
        "deviations": "the package's scores of the segment's own keys are of unit vectors; the script "
                      "gives it the difference as its bias of positions" +
                      ("; the null slot, which the package has at version 0.1.0, is put before what "
                       "is retrieved by the script" if has_null else ""),
    }, formula


@case("memory/memorizing/testdata/joint", f"{PACKAGE}.KNNAttention", 652)
def joint():
    return joint_case(has_null=False)


@case("memory/memorizing/testdata/joint_null_key", f"{PACKAGE}.KNNAttention", 653)
def joint_null_key():
    return joint_case(has_null=True)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
