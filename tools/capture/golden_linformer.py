"""Writes attention/linformer/testdata: see golden.py, whose rules hold here too."""

import importlib.util
import math
import pathlib

import numpy as np
import torch

import golden
from golden import case, draw, f32, f64, in_float64, merge_heads, rounded, split_heads

FIRST = len(golden.CASES)


def merged(x):
    return torch.from_numpy(merge_heads(x.numpy()))


def attend_to_slots(q, keys, values):
    scores = np.einsum("bhid,bhsd->bhis", q, keys) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhis,bhsd->bhid", weights / weights.sum(-1, keepdims=True), values)


def product_formula(t):
    group = t["q"].shape[1] // t["k"].shape[1]

    def slots(x, tables):
        return np.repeat(np.einsum("hsj,bhjd->bhsd", np.broadcast_to(
            tables, (x.shape[1], *tables.shape[1:])), x), group, axis=1)

    return {"out": attend_to_slots(t["q"], slots(t["k"], t["e"]), slots(t["v"], t["f"]))}


# ---- lucidrains' package ----

LUCIDRAINS = "linformer.LinformerSelfAttention"


def lucidrains_case(heads, kv_heads, tokens, longest, slots):
    """Its attention without the projections of hidden states, which are the identity here."""
    import linformer
    channels = 8
    q = draw(2, heads, tokens, channels)
    k, v = (draw(2, kv_heads, tokens, channels) for _ in range(2))
    with in_float64():
        module = linformer.LinformerSelfAttention(
            heads * channels, longest, k=slots, heads=heads, one_kv_head=kv_heads < heads)
        for parameter in (module.proj_k, module.proj_v):
            parameter.copy_(draw(longest, slots, scale=longest**-0.5))
        e, f = (p.detach()[:tokens].T[None].contiguous() for p in (module.proj_k, module.proj_v))
        for name, value in (("to_q", q), ("to_k", k), ("to_v", v)):
            delattr(module, name)
            setattr(module, name, lambda _, value=value: merged(value))
        del module.to_out
        module.to_out = lambda x: x
        out = torch.from_numpy(split_heads(module(merged(q)).numpy(), heads))
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "e": f32(e), "f": f32(f), "out": f64(out)}
    return tensors, {
        "sharing": "headwise", "longest": longest,
        "formula": "softmax(q (e k)^T / sqrt(head_dim)) (f v); e and f [1, slots, tokens] are the "
                   "package's proj_k and proj_v, cut to the tokens and transposed",
    }, product_formula


@case("attention/linformer/testdata/headwise", LUCIDRAINS, 91)
def headwise():
    return lucidrains_case(2, 2, 40, 40, 8)


@case("attention/linformer/testdata/shorter_input", LUCIDRAINS, 92)
def shorter_input():
    return lucidrains_case(3, 3, 27, 40, 8)


@case("attention/linformer/testdata/one_key_value_head", LUCIDRAINS, 93)
def one_key_value_head():
    return lucidrains_case(4, 1, 33, 33, 16)


# ---- tatp22's package ----

TATP22 = "linformer_pytorch.linformer_pytorch.LinearAttentionHead"


def tatp22_module():
    """The package's one file of attention: the package itself imports a visualiser's libraries."""
    folder = pathlib.Path(importlib.util.find_spec("linformer_pytorch").origin).parent
    spec = importlib.util.spec_from_file_location("linformer_attention",
                                                  folder / "linformer_pytorch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_bias(module):
    module.bias.zero_()
    return module


def tatp22_case(method, share_kv, tokens, slots):
    """One head of the package for each head, with projections of its own. Its get_EF has no depthwise
    convolution; its head takes any torch.nn.Conv1d."""
    package = tatp22_module()
    heads, channels = 2, 6
    q, k, v = (draw(2, heads, tokens, channels) for _ in range(3))
    outputs, tables = [], {"e": [], "f": []}

    def projection():
        if method != "depthwise":
            return package.get_EF(tokens, slots, method, channels)
        kernel = tokens // slots
        return torch.nn.Conv1d(channels, channels, kernel, stride=kernel, groups=channels)

    with in_float64():
        for h in range(heads):
            e = without_bias(projection())
            f = e if share_kv else without_bias(projection())
            for module in (e, f):
                module.weight.copy_(rounded(torch.randn_like(module.weight) * 0.3))
            head = package.LinearAttentionHead(channels, 0.0, e, f, None).eval()
            outputs.append(head(q[:, h].clone(), k[:, h].clone(), v[:, h].clone()))
            for name, module in (("e", e), ("f", f)):
                weight = module.weight.detach()
                tables[name].append(weight[:, 0] if method == "depthwise" else weight)
        out = torch.stack(outputs, 1)
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "out": f64(out)}
    tensors.update({name: f32(torch.stack(weights)) for name, weights in tables.items()})

    def convolution_formula(t):
        def compress(x, weights):
            window = weights.shape[-1]
            rows = x.reshape(*x.shape[:2], slots, window, channels)
            of = "hot,bhsto->bhso" if method == "depthwise" else "hoit,bhsti->bhso"
            return np.einsum(of, weights, rows)
        return {"out": attend_to_slots(t["q"], compress(t["k"], t["e"]), compress(t["v"], t["f"]))}

    convolves = method in ("convolution", "depthwise")
    return tensors, {
        "sharing": "none", "bias": "0",
        "formula": "softmax(q (e k)^T / sqrt(head_dim)) (f v); e and f " + (
            "[heads, out, in, kernel] convolve tokens with stride = kernel"
            if method == "convolution" else
            "[heads, channels, kernel] convolve each channel's tokens with stride = kernel"
            if convolves else
            "[heads, slots, tokens]"),
    }, convolution_formula if convolves else product_formula


@case("attention/linformer/testdata/each_head", f"{TATP22}, get_EF", 94)
def each_head():
    return tatp22_case("learnable", False, 40, 8)


@case("attention/linformer/testdata/convolution", f"{TATP22}, get_EF", 95)
def convolution():
    return tatp22_case("convolution", False, 40, 8)


@case("attention/linformer/testdata/depthwise_convolution", f"{TATP22}; torch.nn.Conv1d", 96)
def depthwise_convolution():
    return tatp22_case("depthwise", False, 40, 8)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
