"""Writes memory/memorizing/testdata: see golden.py, whose rules hold here too.

The stack is Hugging Face's Transformer-XL. What the second layer hands to its output projection is mixed with
what the Memorizing Transformer's authors' own functions read in their store.
"""

import math
import pathlib
import sys
import types

import jax
import numpy as np
import torch

import golden
from golden import (SOURCES, case, draw, f32, f64, in_float64, layer_norm, merge_heads,
                    redraw_parameters, split_heads)

FIRST = len(golden.CASES)
MELIAD = "meliad"
SOURCES[MELIAD] = "https://github.com/google-research/meliad"
LAYERS, HEADS, HEAD_DIM, INNER = 2, 4, 6, 48
WIDTH = HEADS * HEAD_DIM
SEGMENT, MEMORY, SEGMENTS, BATCH = 8, 6, 5, 2
STORE_LAYER, STORE, NEIGHBOURS = 1, 16, 4


def authors_modules():
    """(attention, memory_layer) of the clone; what they import beside jax and flax is not called."""
    jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, str(SOURCES[MELIAD]))
    for name in ("language_model", "nn_components", "position"):
        module = types.ModuleType(f"transformer.{name}")
        module.vshape = lambda x: None
        sys.modules[module.__name__] = module
        setattr(__import__("transformer"), name, module)
    from transformer import attention
    from transformer.memory import memory_layer
    return attention, memory_layer


class Store:
    """The authors' store, one data set for each batch row and head, in front of W_o."""

    def __init__(self, gate, scale):
        self.attention, memory_layer = authors_modules()
        self.gate, self.scale = gate, scale
        self.memory = memory_layer.MemoryOnTpu(
            num_datasets=BATCH * HEADS, database_size=STORE, dtype=jax.numpy.float64,
            key_features=HEAD_DIM, value_features=HEAD_DIM)
        self.state = None

    def watch(self, layer):
        layer.qkv_net.register_forward_hook(self.take_projections)
        layer.o_net.register_forward_pre_hook(self.mix)

    def take_projections(self, module, inputs, projections):
        self.q, self.k, self.v = projections[-SEGMENT:].chunk(3, -1)  # of the segment alone

    def mix(self, module, inputs):
        """o = g o_store + (1 - g) o_local, [tokens, batch, heads head_dim]; reads, and then writes."""
        local, = inputs
        unit = [torch.nn.functional.normalize(x.unflatten(-1, (HEADS, HEAD_DIM)), dim=-1).numpy()
                for x in (self.q, self.k)]
        queries, keys = (x.reshape(SEGMENT, BATCH * HEADS, HEAD_DIM) for x in unit)
        values = self.v.reshape(SEGMENT, BATCH * HEADS, HEAD_DIM).numpy()
        memory, mixed = self.memory, local
        if self.state is None:  # what theirs reads in an empty store are zeros
            self.state = memory.init(jax.random.PRNGKey(0), queries, NEIGHBOURS)
            # With 64-bit numbers on, their update takes indices of the type of a Python integer.
            self.state["database"]["database_index"] = np.zeros(BATCH * HEADS, np.int64)
        else:
            (found_keys, found_values), _ = memory.apply(
                self.state, queries, NEIGHBOURS, method=memory.topk_retrieval, mutable=["database"])
            shape = (SEGMENT, BATCH, HEADS, NEIGHBOURS, HEAD_DIM)
            read = self.attention.external_attention(
                found_keys.reshape(shape).swapaxes(0, 1), found_values.reshape(shape).swapaxes(0, 1),
                unit[0].swapaxes(0, 1), scale_factor=abs(self.scale.numpy()),
                dtype=jax.numpy.float64)
            read = torch.from_numpy(np.array(read)).transpose(0, 1)
            g = torch.sigmoid(self.gate)[:, None]
            mixed = (read * g + local.unflatten(-1, (HEADS, HEAD_DIM)) * (1 - g)).flatten(-2)
        _, self.state = memory.apply(self.state, keys, values, method=memory.update,
                                     mutable=["database"])
        return (mixed,)


def parameters_of(model):
    tensors = {"u": f32(model.r_w_bias), "v": f32(model.r_r_bias)}
    for n, layer in enumerate(model.layers):
        attention, ff = layer.dec_attn, layer.pos_ff
        w_q, w_k, w_v = attention.qkv_net.weight.chunk(3)
        parameters = {
            "w_q": w_q.T, "w_k": w_k.T, "w_v": w_v.T, "w_r": attention.r_net.weight.T,
            "w_o": attention.o_net.weight.T,
            "attention_norm.gamma": attention.layer_norm.weight,
            "attention_norm.beta": attention.layer_norm.bias,
            "ff.w1": ff.CoreNet[0].weight.T, "ff.b1": ff.CoreNet[0].bias,
            "ff.w2": ff.CoreNet[3].weight.T, "ff.b2": ff.CoreNet[3].bias,
            "ff_norm.gamma": ff.layer_norm.weight, "ff_norm.beta": ff.layer_norm.bias,
        }
        tensors.update({f"layer{n}.{name}": f32(p) for name, p in parameters.items()})
    return tensors


def retrieved(scores):
    """Of each bucket the best of the store's slots; [batch, heads, tokens, tokens] of bool."""
    taken = np.zeros(scores.shape, bool)
    for p in range(scores.shape[2]):
        begin = p // SEGMENT * SEGMENT
        stored = np.arange(max(0, begin - STORE), begin)
        for bucket in range(NEIGHBOURS):
            own = stored[stored % STORE % NEIGHBOURS == bucket]
            if len(own) > 0:
                best = own[scores[:, :, p, own].argmax(-1)]
                np.put_along_axis(taken[:, :, p], best[..., None], True, -1)
    return taken


def softmax_of(scores, allowed):
    scores = np.where(allowed, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def formula(t):
    """The whole sequence at once, under masks."""
    tokens = SEGMENTS * SEGMENT
    i, j = np.mgrid[:tokens, :tokens]
    seen = (j <= i) & (j >= i // SEGMENT * SEGMENT - MEMORY)
    angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH))
    positions = np.concatenate((np.sin(angles), np.cos(angles)), -1)
    h = t["x"]
    for n in range(LAYERS):
        p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}
        q, k, v = (split_heads(h @ p[name], HEADS) for name in ("w_q", "w_k", "w_v"))
        r = split_heads((positions @ p["w_r"])[None], HEADS)[0]
        by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
        by_distance = np.take_along_axis(
            by_distance, np.broadcast_to(np.maximum(i - j, 0), by_distance.shape), -1)
        content = (q + t["u"][:, None]) @ k.swapaxes(-1, -2)
        context = softmax_of((content + by_distance) / math.sqrt(HEAD_DIM), seen) @ v
        if n == STORE_LAYER:
            unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
            scores = unit[0] @ unit[1].swapaxes(-1, -2)
            read = softmax_of(abs(p["memory.scale"])[:, None, None] * scores, retrieved(scores)) @ v
            g = 1 / (1 + np.exp(-p["memory.gate"]))[:, None, None]
            g = np.where(np.arange(tokens)[:, None] < SEGMENT, 0, g)
            context = g * read + (1 - g) * context
        h = layer_norm(h + merge_heads(context) @ p["w_o"], p["attention_norm.gamma"],
                       p["attention_norm.beta"], 1e-5)
        core = np.maximum(h @ p["ff.w1"] + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
        h = layer_norm(h + core, p["ff_norm.gamma"], p["ff_norm.beta"], 1e-5)
    return {"out": h}


@case("memory/memorizing/testdata/buckets",
      "meliad.transformer.memory.memory_layer.MemoryOnTpu, attention.external_attention", 651)
def buckets():
    from transformers import TransfoXLConfig, TransfoXLModel
    config = TransfoXLConfig(
        vocab_size=8, cutoffs=[], d_model=WIDTH, d_embed=WIDTH, n_head=HEADS, d_head=HEAD_DIM,
        d_inner=INNER, n_layer=LAYERS, mem_len=MEMORY, clamp_len=0, same_length=False,
        untie_r=False, div_val=1, pre_lnorm=False, dropout=0.0, dropatt=0.0, attn_type=0)
    x, gate, scale = draw(BATCH, SEGMENTS * SEGMENT, WIDTH), draw(HEADS), draw(HEADS, scale=4.0)
    with in_float64():
        model = TransfoXLModel(config).eval()
        redraw_parameters(model, 0.2)
        Store(gate, scale).watch(model.layers[STORE_LAYER].dec_attn)
        mems = [torch.zeros(0, BATCH, WIDTH) for _ in range(LAYERS)]
        outs = []
        for s in range(SEGMENTS):
            result = model(inputs_embeds=x[:, s * SEGMENT:(s + 1) * SEGMENT], mems=mems)
            outs.append(result.last_hidden_state)
            mems = result.mems
    prefix = f"layer{STORE_LAYER}.memory."
    tensors = {"x": f32(x), "out": f64(torch.cat(outs, 1)), prefix + "gate": f32(gate),
               prefix + "scale": f32(scale), **parameters_of(model)}
    return tensors, {
        "layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "model_dim": WIDTH,
        "inner_dim": INNER, "memory_tokens": MEMORY, "segment_tokens": SEGMENT,
        "store_layer": STORE_LAYER, "store_tokens": STORE, "neighbours": NEIGHBOURS,
        "stack": "transformers.TransfoXLModel, as in transformer_xl's files; the authors' functions "
                 "change what the store's layer hands to its o_net",
        "formula": "o <- g read + (1 - g) o, g = sigmoid(gate), read = softmax(|scale| unit(q) "
                   "unit(k)) v over the best token of each bucket, before w_o; token j is in bucket "
                   "(j mod store_tokens) mod neighbours; the store holds the newest store_tokens "
                   "tokens before the segment; while it is empty, o <- o",
        "deviations": "unit(x) = x / |x| is torch's normalize, the authors' divides by sqrt(|x|^2 + "
                      "1e-6); the authors also normalise the local attention's keys and queries, and "
                      "read zeros in an empty store",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
