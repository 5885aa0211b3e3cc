"""Writes memory/transformer_xl/testdata/labml: see golden.py, whose rules hold here too."""

import importlib.util
import math
import pathlib
import sys

import numpy as np
import torch

import golden
import golden_compressive
from golden import (attend, case, draw, f32, f64, in_float64, layer_norm, merge_heads,
                    redraw_parameters, split_heads)

FIRST = len(golden.CASES)
LAYERS, HEADS, HEAD_DIM, INNER = 2, 2, 6, 24
WIDTH = HEADS * HEAD_DIM
SEGMENT, MEMORY, SEGMENTS, BATCH = 6, 9, 4, 2


def network():
    """Pre-norm layers with memory, and a norm behind the last: the package's whole network."""
    package = golden_compressive.labml()
    folder = pathlib.Path(importlib.util.find_spec("labml_nn.transformers.feed_forward").origin)
    name = "labml_nn.transformers.xl"
    spec = importlib.util.spec_from_file_location(name, folder.parent / "xl/__init__.py",
                                                  submodule_search_locations=[])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layer = module.TransformerXLLayer(
        d_model=WIDTH, self_attn=package.RelativeMultiHeadAttention(HEADS, WIDTH, 0.0),
        feed_forward=package.FeedForward(WIDTH, INNER, 0.0), dropout_prob=0.0)
    return module.TransformerXL(layer, LAYERS).eval()


def positions(distances):
    angles = np.outer(np.arange(distances), 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
    return np.concatenate((np.sin(angles), np.cos(angles)), -1)


def set_positions(attention, w_r, u, v):
    """Its learned vector of distance d is row P - d: Transformer-XL's r_d W_r, and v with it."""
    r = torch.from_numpy(positions(MEMORY + SEGMENT)) @ w_r
    r = r.reshape(-1, HEADS, HEAD_DIM)
    place = attention.P - torch.arange(r.shape[0])
    attention.key_pos_embeddings[place] = r
    attention.key_pos_bias[place] = (r * v).sum(-1)
    attention.query_pos_bias.copy_(u)


def parameters_of(model, w_r, u, v):
    parameters = {"u": u, "v": v, "final_norm.gamma": model.norm.weight,
                  "final_norm.beta": model.norm.bias}
    for n, layer in enumerate(model.layers):
        attention, feed_forward = layer.self_attn, layer.feed_forward
        own = {"w_q": attention.query.linear.weight.T, "w_k": attention.key.linear.weight.T,
               "w_v": attention.value.linear.weight.T, "w_r": w_r[n],
               "w_o": attention.output.weight.T,
               "attention_norm.gamma": layer.norm_self_attn.weight,
               "attention_norm.beta": layer.norm_self_attn.bias,
               "ff_norm.gamma": layer.norm_ff.weight, "ff_norm.beta": layer.norm_ff.bias,
               "ff.w1": feed_forward.layer1.weight.T, "ff.b1": feed_forward.layer1.bias,
               "ff.w2": feed_forward.layer2.weight.T, "ff.b2": feed_forward.layer2.bias}
        parameters.update({f"layer{n}.{name}": p for name, p in own.items()})
    return parameters


def formula(t):
    """The whole sequence at once, under a mask: what the segments must equal."""
    total = SEGMENTS * SEGMENT
    i, j = np.mgrid[:total, :total]
    allowed = (j <= i) & (j >= i // SEGMENT * SEGMENT - MEMORY)
    h = t["x"]
    for n in range(LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}
        x = layer_norm(h, p["attention_norm.gamma"], p["attention_norm.beta"], 1e-5)
        q, k, v = (split_heads(x @ p[name], HEADS) for name in ("w_q", "w_k", "w_v"))
        r = split_heads((positions(total) @ p["w_r"])[None], HEADS)[0]
        by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
        bias = np.take_along_axis(
            by_distance, np.broadcast_to(np.maximum(i - j, 0), by_distance.shape), -1)
        context = attend(q + t["u"][:, None], k, v, allowed, bias / math.sqrt(HEAD_DIM))
        g = h + merge_heads(context) @ p["w_o"]
        inner = layer_norm(g, p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5) @ p["ff.w1"]
        h = g + np.maximum(inner + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
    return {"out": layer_norm(h, t["final_norm.gamma"], t["final_norm.beta"], 1e-5)}


@case("memory/transformer_xl/testdata/labml", "labml_nn.transformers.xl.TransformerXL", 702)
def labml_network():
    x = draw(BATCH, SEGMENTS * SEGMENT, WIDTH)
    u, v = (draw(HEADS, HEAD_DIM, scale=0.5) for _ in range(2))
    w_r = [draw(WIDTH, WIDTH, scale=WIDTH**-0.5) for _ in range(LAYERS)]
    with in_float64():
        model = network()
        redraw_parameters(model, 0.3)
        for layer, matrix in zip(model.layers, w_r):
            set_positions(layer.self_attn, matrix, u, v)
            layer.self_attn.value.linear.bias.zero_()  # ours have no biases there
            layer.self_attn.output.bias.zero_()
        memories, outs = [], []
        for s in range(SEGMENTS):
            segment = x[:, s * SEGMENT:(s + 1) * SEGMENT].transpose(0, 1)
            past = memories[0].shape[0] if memories else 0
            visible = torch.ones(SEGMENT, past + SEGMENT).tril(past)[:, :, None]
            out, inputs = model(segment, memories, visible)
            outs.append(out.transpose(0, 1))
            memories = [torch.cat([old, new])[-MEMORY:] for old, new in
                        zip(memories or [new[:0] for new in inputs], inputs)]
    tensors = {"x": f32(x), "out": f64(torch.cat(outs, 1))}
    tensors.update({name: f32(p) for name, p in parameters_of(model, w_r, u, v).items()})
    return tensors, {
        "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "model_dim": WIDTH,
        "inner_dim": INNER, "memory_tokens": MEMORY, "segment_tokens": SEGMENT,
        "formula": "pre-norm; keys and values of the memory are layer-normalised too, scores as in "
                   "segments; out is layer_norm(h, final_norm) of the last layer's h",
        "positions": "the package's learned key_pos_embeddings hold r_d w_r, its key_pos_bias v of "
                     "them, its query_pos_bias u; its biases of values and outputs are zero",
        "mask": "start of the segment - memory_tokens <= j <= i",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
