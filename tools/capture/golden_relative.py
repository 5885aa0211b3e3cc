"""Writes the testdata of the relative positions of Transformer-XL and of Shaw et al.: see golden.py,
whose rules hold here too."""

import math
import pathlib

import numpy as np
import torch

import golden
from golden import case, draw, f32, f64, in_float64

FIRST = len(golden.CASES)


# ---- positional/transformer_xl_relative ----

TRANSFO_XL = "transformers.models.transfo_xl.modeling_transfo_xl.RelPartialLearnableMultiHeadAttn"
XLNET = "transformers.models.xlnet.modeling_xlnet.XLNetRelativeAttention"
FOLDER = "positional/transformer_xl_relative/testdata/"


def sequence_first(x):
    """[batch, heads, tokens, channels] to [tokens, batch, heads, channels]."""
    return x.permute(2, 0, 1, 3)


def relative_formula(causal, clamp):
    def formula(t):
        q, k = t["q"], t["k"]
        heads, tokens, channels = q.shape[1:]
        keys, width = k.shape[2], heads * channels
        distance = np.arange(tokens)[:, None] + keys - tokens - np.arange(keys)[None]
        clamped = np.clip(distance, -clamp, clamp) if clamp else distance
        angles = clamped[..., None] / 10000 ** (np.arange(0, width, 2) / width)
        r = np.concatenate([np.sin(angles), np.cos(angles)], -1) @ t["w_r"]
        r = r.reshape(tokens, keys, heads, channels)
        scores = (np.einsum("bhid,bhjd->bhij", q + t["u"][:, None], k)
                  + np.einsum("bhid,ijhd->bhij", q + t["v_bias"][:, None], r))
        if causal:
            scores = np.where(distance >= 0, scores, -np.inf)
        scores /= math.sqrt(channels)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return {"out": np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True),
                                 t["v"])}
    return formula


def relative_case(compute, causal, clamp, tokens, keys):
    batch, heads, channels = 2, 3, 8
    width = heads * channels
    q = draw(batch, heads, tokens, channels)
    k, v = (draw(batch, heads, keys, channels) for _ in range(2))
    w_r = draw(width, width, scale=width**-0.5)
    u, v_bias = (draw(heads, channels, scale=0.5) for _ in range(2))
    with in_float64():
        out = compute(q, k, v, w_r, u, v_bias)
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "w_r": f32(w_r), "u": f32(u),
               "v_bias": f32(v_bias), "out": f64(out)}
    return tensors, {
        "causal": str(causal), "clamp_length": str(clamp),
        "formula": "softmax(((q_i + u) k_j + (q_i + v_bias) (r_d w_r)) / sqrt(head_dim)) v, "
                   "d = i + kv_tokens - query_tokens - j clipped to +-clamp_length where that is "
                   "not 0, r_d = [sines, cosines]",
    }, relative_formula(causal, clamp)


def transfo_xl_case(clamp, tokens, memory):
    """The package's layer: queries, keys and values take the place of its projection of the input."""
    from transformers.models.transfo_xl import modeling_transfo_xl as package
    keys = tokens + memory

    def compute(q, k, v, w_r, u, v_bias):
        batch, heads, _, channels = q.shape
        width = heads * channels
        module = package.RelPartialLearnableMultiHeadAttn(
            heads, width, channels, 0.0, pre_lnorm=True, r_r_bias=v_bias, r_w_bias=u).eval()
        # It drops the memory's rows of the queries.
        padded = torch.cat([torch.zeros(batch, heads, memory, channels), q], 2)
        projected = torch.cat([sequence_first(x).reshape(keys, batch, width)
                               for x in (padded, k, v)], -1)
        del module.qkv_net, module.o_net
        module.qkv_net = lambda _: projected
        module.o_net = lambda x: x
        module.r_net.weight.copy_(w_r.T)
        positions = torch.arange(keys - 1, -1, -1.0)
        if clamp:
            positions.clamp_(max=clamp)  # as TransfoXLModel.forward does
        r = package.PositionalEmbedding(width)(positions)
        mask = torch.triu(torch.ones(tokens, keys, dtype=torch.uint8), 1 + memory)[:, :, None]
        # Its residual connection adds nothing to zeros.
        out = module(torch.zeros(tokens, batch, width), r, mask.bool(),
                     torch.zeros(memory, batch, width))[0]
        return out.reshape(tokens, batch, heads, channels).permute(1, 2, 0, 3).contiguous()

    return relative_case(compute, True, clamp, tokens, keys)


def xlnet_case(clamp, tokens):
    from transformers import XLNetConfig
    from transformers.models.xlnet import modeling_xlnet as package

    def compute(q, k, v, w_r, u, v_bias):
        _, heads, _, channels = q.shape
        width = heads * channels
        config = XLNetConfig(vocab_size=2, d_model=width, n_layer=1, n_head=heads, d_inner=1,
                             clamp_len=clamp or -1, dropout=0.0)
        module = package.XLNetRelativeAttention(config).eval()
        module.r_w_bias.copy_(u)
        module.r_r_bias.copy_(v_bias)
        model = package.XLNetModel(config)
        r = model.relative_positional_encoding(tokens, tokens)
        r = torch.einsum("ibh,hnd->ibnd", r, w_r.reshape(width, heads, channels))
        out = module.rel_attn_core(*(sequence_first(x) for x in (q, k, v)), r)
        return out.permute(1, 2, 0, 3).contiguous()

    return relative_case(compute, False, clamp, tokens, tokens)


@case(FOLDER + "transfo_xl", TRANSFO_XL, 301)
def transfo_xl():
    return transfo_xl_case(0, 17, 11)


@case(FOLDER + "transfo_xl_clamped", TRANSFO_XL, 302)
def transfo_xl_clamped():
    return transfo_xl_case(6, 17, 11)


@case(FOLDER + "xlnet", XLNET, 303)
def xlnet():
    return xlnet_case(0, 19)


@case(FOLDER + "xlnet_clamped", XLNET, 304)
def xlnet_clamped():
    return xlnet_case(5, 19)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
