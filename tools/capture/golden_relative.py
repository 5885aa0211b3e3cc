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
        "causal": str(causal), "max_distance": str(clamp),
        "formula": "softmax(((q_i + u) k_j + (q_i + v_bias) (r_d w_r)) / sqrt(head_dim)) v, "
                   "d = i + kv_tokens - query_tokens - j clipped to +-max_distance where that is "
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


# ---- positional/shaw ----

T2T = "torch.softmax, in tensor2tensor's dot_product_attention_relative (common_attention.py)"
# Its functions by name, restated in PyTorch: tensor2tensor itself needs TensorFlow 1. With tables
# that the heads share, or one of each head as its heads_share_relative_embedding=False has them.


def generate_relative_positions_matrix(length, max_relative_position):
    range_vec = torch.arange(length)
    distance_mat = range_vec[None, :] - range_vec[:, None]
    return distance_mat.clamp(-max_relative_position, max_relative_position) + max_relative_position


def relative_attention_inner(x, y, z, transpose):
    """x [batch, heads, length, depth or length], z [heads, length, length, depth]."""
    if transpose:
        return x @ y.transpose(-1, -2) + torch.einsum("bhid,hijd->bhij", x, z)
    return x @ y + torch.einsum("bhij,hijd->bhid", x, z)


def dot_product_attention_relative(q, k, v, bias, tables_keys, tables_values, k_max):
    matrix = generate_relative_positions_matrix(q.shape[2], k_max)

    def embeddings(tables):
        return tables.expand(q.shape[1], -1, -1)[:, matrix]

    logits = relative_attention_inner(q, k, embeddings(tables_keys), True) + bias
    weights = torch.softmax(logits, -1)
    return relative_attention_inner(weights, v, embeddings(tables_values), False)


def shaw_formula(causal, k_max):
    def formula(t):
        q, k, v = t["q"], t["k"], t["v"]
        batch, heads, tokens, channels = q.shape
        keys, values = t["key_positions"], t["value_positions"]
        out = np.zeros(v.shape)
        for b, h, i in np.ndindex(batch, heads, tokens):
            seen = range(i + 1 if causal else tokens)
            rows = [min(max(j - i, -k_max), k_max) + k_max for j in seen]
            table = h % len(keys)
            scores = np.array([q[b, h, i] @ (k[b, h, j] + keys[table, r])
                               for j, r in zip(seen, rows)]) / math.sqrt(channels)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[b, h, i] = sum(w * (v[b, h, j] + values[table, r])
                               for w, j, r in zip(weights, seen, rows))
        return {"out": out}
    return formula


def shaw_case(causal, k_max, tokens, per_head, has_values=True):
    batch, heads, channels = 2, 3, 8
    q, k, v = (draw(batch, heads, tokens, channels) for _ in range(3))
    shape = (heads if per_head else 1, 2 * k_max + 1, channels)
    keys, values = draw(*shape), draw(*shape, scale=1.0 if has_values else 0.0)
    with in_float64():
        bias = torch.zeros(tokens, tokens)
        if causal:
            bias = torch.triu(torch.full((tokens, tokens), -1e9), 1)
        # It scales queries before, in multihead_attention.
        out = dot_product_attention_relative(q * channels**-0.5, k, v, bias, keys, values, k_max)
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "key_positions": f32(keys),
               "value_positions": f32(values), "out": f64(out)}
    return tensors, {
        "causal": str(causal), "max_distance": str(k_max), "per_head": str(per_head).lower(),
        "values": str(has_values).lower(),
        "formula": "s_ij = q_i . (k_j + key_positions[r]) / sqrt(head_dim), r = clip(j - i, -k, k) "
                   "+ k; sum_j softmax_j(s_ij) (v_j + value_positions[r])",
    }, shaw_formula(causal, k_max)


@case("positional/shaw/testdata/causal", T2T, 311)
def causal():
    return shaw_case(True, 4, 19, per_head=True)


@case("positional/shaw/testdata/both_sides", T2T, 312)
def both_sides():
    return shaw_case(False, 5, 21, per_head=False)


@case("positional/shaw/testdata/keys_only", T2T, 313)
def keys_only():
    return shaw_case(False, 3, 17, per_head=True, has_values=False)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
