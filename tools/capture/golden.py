"""Writes what other people's implementations compute, as small safetensors files for the C++ tests.

Each file goes to <output>/<family>/<technique>/testdata/<case>.safetensors and holds the inputs, the
parameters and the outputs of one call; its metadata says which function of which package made it.
Inputs and parameters are drawn in float32, so that every precision can start from the same values;
what is computed from them is computed and stored in float64. README.md beside this file lists the
files, requirements.txt the packages.

Before a file is written, its outputs are recomputed from its own tensors with the formula that its
metadata states, in NumPy; a difference above 1e-12 of the largest value (3e-11 where positions reach
1e5) stops the run. So shapes, orientations and scales are as the metadata says.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import math
import pathlib
import platform
import subprocess
import sys
import types
import typing

import numpy as np
import torch

import tensor_file

TOLERANCE = 1e-12
MAX_FILE_BYTES = 200 * 1024

CASES = []

# What no package has: clones, by the flag that names their folder.
SOURCES = {
    "sparse_attention": "https://github.com/openai/sparse_attention",
    "random_feature_attention": "https://github.com/Noahs-ARK/RFA",
}


def case(path, made_by, seed, tolerance=TOLERANCE):
    """Registers a function that returns (tensors, metadata, formula) for one file.

    `formula` maps the tensors, as NumPy arrays in float64, to {name: expected value}.
    """
    def register(function):
        CASES.append((path, made_by, seed, tolerance, function))
        return function
    return register


# ---- Drawing, converting ----


def rounded(tensor):
    """To float32 and back; in NumPy, since in_float64 takes torch's casts away."""
    return torch.from_numpy(tensor.numpy().astype(np.float32).astype(np.float64))


def draw(*shape, scale=1.0):
    return rounded(torch.randn(*shape, dtype=torch.float64) * scale)


def redraw_parameters(module, scale):
    """Weights large enough that an error in any of them shows; norms near one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(rounded(centre + draw(*parameter.shape, scale=scale)))


def f32(tensor):
    array = tensor.detach().numpy()
    assert (array.astype(np.float32) == array).all(), "not drawn in float32"
    return array.astype(np.float32)


def f64(tensor):
    array = tensor.detach().numpy()
    assert array.dtype == np.float64, f"computed in {array.dtype}, not in float64"
    return array


@contextlib.contextmanager
def in_float64():
    """Turns the casts to float32 that modelling code makes "for stability" into casts to float64."""
    was = torch.get_default_dtype(), torch.float, torch.float32, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        with torch.no_grad():
            yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = was[1:]
        torch.set_default_dtype(was[0])


# ---- Formulas ----


def attend(q, k, v, allowed=None, bias=0.0):
    """softmax(q k^T / sqrt(head_dim) + bias) v over the allowed pairs; grouped heads by repetition."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1]) + bias
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)


def split_heads(x, heads):
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).swapaxes(1, 2)


def merge_heads(x):
    batch, heads, tokens, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, tokens, heads * width)


def layer_norm(x, gamma, beta, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * gamma + beta


# ---- attention/dense ----

SDPA = "torch.nn.functional._scaled_dot_product_attention"


def dense_case(batch, query_heads, kv_heads, query_tokens, kv_tokens, head_dim, value_dim,
               causal=False, key_padding=None):
    q = draw(batch, query_heads, query_tokens, head_dim)
    k = draw(batch, kv_heads, kv_tokens, head_dim)
    v = draw(batch, kv_heads, kv_tokens, value_dim)
    allowed = torch.ones(batch, query_heads, query_tokens, kv_tokens, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(kv_tokens - query_tokens)
    if key_padding is not None:
        allowed = allowed & key_padding[:, None, None, :].bool()
    group = query_heads // kv_heads
    out, _ = torch.nn.functional._scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=allowed)
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v)}
    if key_padding is not None:
        tensors["key_padding"] = key_padding.numpy().astype(np.int32)
    tensors["out"] = f64(out)
    metadata = {"causal": str(causal).lower(),
                "formula": "softmax(q k^T / sqrt(head_dim)) v; query head h reads kv head "
                           "h / (query_heads / kv_heads)"}
    if causal:
        metadata["mask"] = "query i sees keys j <= i + kv_tokens - query_tokens"
    if key_padding is not None:
        metadata["mask"] = "key_padding [batch, kv_tokens]: 1 a real key, 0 a padded one"
    return tensors, metadata, lambda t: {"out": attend(t["q"], t["k"], t["v"], allowed.numpy())}


@case("attention/dense/testdata/full", SDPA, 11)
def dense_full():
    return dense_case(2, 3, 3, 37, 53, 16, 24)


@case("attention/dense/testdata/causal_bottom_right", SDPA, 12)
def dense_causal():
    return dense_case(2, 3, 3, 19, 45, 16, 16, causal=True)


@case("attention/dense/testdata/key_padding", SDPA, 13)
def dense_key_padding():
    padding = torch.ones(3, 40)
    padding[0, 29:] = 0  # a padded tail
    padding[1, :5] = 0  # a padded head, and a hole
    padding[1, 17] = 0
    padding[2, 1:] = 0  # one key left
    return dense_case(3, 2, 2, 21, 40, 16, 16, key_padding=padding)


@case("attention/dense/testdata/grouped_heads_causal", SDPA, 14)
def dense_grouped():
    return dense_case(2, 6, 2, 33, 33, 16, 16, causal=True)


# ---- attention/longformer ----

LONGFORMER = "transformers.models.longformer.modeling_longformer.LongformerSelfAttention"


def longformer_case(batch, tokens, window, global_tokens, padded_from, marked=()):
    """`global_tokens` are global in all sequences, `marked` lists each sequence's own ones instead."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
    heads, head_dim = 2, 8
    config = LongformerConfig(
        hidden_size=heads * head_dim, num_attention_heads=heads, attention_window=[window],
        attention_probs_dropout_prob=0.0)
    x = draw(batch, tokens, heads * head_dim)
    with in_float64():
        module = LongformerSelfAttention(config, 0).eval()
        redraw_parameters(module, 0.4)
        mask = torch.zeros(batch, tokens)  # the module's code: 0 local, 10000 global, -10000 padded
        mask[:, global_tokens] = 10000
        for row, its_tokens in enumerate(marked):
            mask[row, its_tokens] = 10000
        marks = (mask > 0).numpy().astype(np.int32)
        for row, first in enumerate(padded_from):
            mask[row, first:] = -10000
        (out,) = module(
            x, attention_mask=mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0,
            is_global_attn=bool(global_tokens or marked))
        projections = {"q": "query", "k": "key", "v": "value", "q_global": "query_global",
                       "k_global": "key_global", "v_global": "value_global"}
        tensors = {"x": f32(x)}
        for name, theirs in projections.items():
            linear = getattr(module, theirs)
            tensors[f"w_{name}"] = f32(linear.weight.T)
            tensors[f"b_{name}"] = f32(linear.bias)
        for name, theirs in projections.items():
            projected = getattr(module, theirs)(x)
            tensors[name] = split_heads(f64(projected), heads)
    if global_tokens:
        tensors["global_tokens"] = np.array(global_tokens, np.int32)
    if marked:
        tensors["global_mask"] = marks
    if padded_from:
        tensors["key_padding"] = (mask >= 0).numpy().astype(np.int32)
    tensors["out"] = split_heads(f64(out), heads)

    def formula(t):
        projected = {
            name: split_heads(t["x"] @ t[f"w_{name}"] + t[f"b_{name}"], heads)
            for name in projections
        }
        i, j = np.mgrid[:tokens, :tokens]
        is_global = (mask > 0).numpy()[:, None, None, :]
        real = (mask >= 0).numpy()[:, None, None, :]
        local = attend(*(projected[n] for n in ("q", "k", "v")),
                       real & ((abs(i - j) <= window // 2) | is_global) | (i == j))
        wide = attend(*(projected[f"{n}_global"] for n in ("q", "k", "v")), real)
        expected = np.where(is_global.swapaxes(2, 3), wide, local)
        return {**projected, "out": expected * real.swapaxes(2, 3)}

    metadata = {
        "window": window, "one_sided": window // 2, "dilation": 1, "causal": "false",
        "orientation": "y = x W + b, W [in, out]; q, k, v and the global ones are the projections of "
                       "all tokens, [batch, heads, tokens, head_dim], not scaled",
        "formula": "token i not in global_tokens: softmax over |i - j| <= window / 2 or j global of "
                   "q_i k_j / sqrt(head_dim), with v; i global: softmax over all j of q_global_i "
                   "k_global_j / sqrt(head_dim), with v_global",
    }
    if marked:
        metadata["global_tokens"] = ("global_mask [batch, tokens]: 1 for a token of global_tokens; one "
                                     "that is padded as well is only padded")
    if padded_from:
        metadata["mask"] = ("key_padding [batch, tokens]: 1 a real token, 0 a padded one; rows of padded "
                            "tokens are 0 in `out`, which is that implementation's choice")
    return tensors, metadata, formula


@case("attention/longformer/testdata/no_global", LONGFORMER, 21)
def longformer_no_global():
    return longformer_case(1, 96, 16, [], [])


@case("attention/longformer/testdata/global", LONGFORMER, 22)
def longformer_global():
    return longformer_case(1, 96, 16, [0, 1, 50], [])


@case("attention/longformer/testdata/global_padded", LONGFORMER, 23)
def longformer_global_padded():
    return longformer_case(2, 64, 16, [0, 37], [51, 64])


@case("attention/longformer/testdata/global_each", LONGFORMER, 24)
def longformer_global_each():
    return longformer_case(2, 32, 8, [], [32, 22], marked=[[0, 17, 30], [5, 28]])


# ---- attention/bigbird ----

BIGBIRD = "transformers.models.big_bird.modeling_big_bird.BigBirdBlockSparseAttention"


def bigbird_case(batch, heads, blocks, block, random, padded_from, training):
    """`training` false: their table is then 0 throughout, and block 0 is counted 1 + random times."""
    from transformers import BigBirdConfig
    from transformers.models.big_bird import modeling_big_bird as package
    tokens, head_dim = blocks * block, 8
    config = BigBirdConfig(hidden_size=heads * head_dim, num_attention_heads=heads,
                           block_size=block, num_random_blocks=random)
    q, k, v = (draw(batch, heads, tokens, head_dim) for _ in range(3))
    padding = torch.ones(batch, tokens, dtype=torch.float64)
    for row, first in enumerate(padded_from):
        padding[row, first:] = 0
    seed = 5
    with in_float64():
        module = package.BigBirdBlockSparseAttention(config, seed).train(training)
        # The layer draws its table inside; drawn again from the same seed it is the same.
        np.random.seed(seed)
        plan = module._get_rand_attn_plan(tokens, block, random)
        table = np.stack(module._bigbird_block_rand_mask_with_head(
            tokens, tokens, block, block, heads, *plan))
        blocked, band, from_mask, to_mask = (
            package.BigBirdModel.create_masks_for_block_sparse_attn(padding, block))
        out, _ = module.bigbird_block_sparse_attention(
            q, k, v, band, from_mask, to_mask, blocked, blocked, heads, random, head_dim, block,
            block, batch, tokens, tokens, seed, None, None, False)

    def formula(t):
        """With log n added to the score of a key that the lists of a row name n times."""
        count = np.zeros((heads, blocks, blocks))
        count[:, [0, -1], :] = 1
        for u in range(1, blocks - 1):
            count[:, u, [0, blocks - 1]] = 1
            count[:, u, u - 1:u + 2] = 1
            for h in range(heads):
                np.add.at(count[h, u], table[h, u - 1], 1)
        count = count.repeat(block, 1).repeat(block, 2)
        if training:
            assert count.max() == 1, "their draw repeats a block: choose another seed"
        real = padding.numpy()[:, None, None, :] > 0
        with np.errstate(divide="ignore"):
            expected = attend(t["q"], t["k"], t["v"], real & (count > 0), np.log(count))
        return {"out": expected * real.swapaxes(2, 3)}

    return {
        "q": f32(q), "k": f32(k), "v": f32(v), "key_padding": padding.numpy().astype(np.int32),
        "random_blocks": table.astype(np.int32), "out": f64(out.transpose(1, 2)),
    }, {
        "block": block, "random": random, "causal": "false", "training": str(training).lower(),
        "formula": "query block 0 and the last one see all keys; query block u between them sees "
                   "blocks 0, u - 1, u, u + 1, the last one and random_blocks[head][u - 1]; softmax of "
                   "q k / sqrt(head_dim) over the keys listed, one that is listed n times counted n "
                   "times (here: " + ("each is listed once" if training else
                                      "block 0 is listed 1 + random times") + ")",
        "mask": "key_padding [batch, tokens]: 1 a real token, 0 a padded one; rows of padded tokens "
                "are 0 in `out`, which is that implementation's choice",
    }, formula


# Not of 1024, 3072 or 4096 tokens, for which that code draws from the first 1,024 positions only.
@case("attention/bigbird/testdata/block_sparse", BIGBIRD, 71)
def bigbird_block_sparse():
    return bigbird_case(2, 2, 10, 8, 2, [80, 59], training=True)


@case("attention/bigbird/testdata/repeated_blocks", BIGBIRD, 72)
def bigbird_repeated_blocks():
    return bigbird_case(1, 1, 8, 8, 2, [], training=False)


# ---- attention/image_local ----
#
# tensor2tensor itself needs TensorFlow 1. Its masks are built here again, over blocks of queries and
# the memory gathered for each, as tensor2tensor/layers/common_attention.py does.


def t2t_scatter(tokens, queries, memories, visible):
    """[tokens, tokens] from [blocks][query], [blocks][memory] with -1 for padding, and who sees whom."""
    allowed = np.zeros((tokens, tokens), bool)
    for query, memory in zip(queries, memories):
        for row, i in enumerate(query):
            if i >= 0:
                allowed[i, memory[visible[row] & (memory >= 0)]] = True
    return torch.from_numpy(allowed)


def t2t_1d_mask(tokens, block, memory, causal):
    """masked_local_attention_1d, where memory is block; local_attention_1d."""
    padded = -(-tokens // block) * block
    places = np.where(np.arange(padded) < tokens, np.arange(padded), -1)
    queries = places.reshape(-1, block)
    sides = np.pad(places, memory, constant_values=-1)
    if causal:
        memories = [sides[start:start + memory + block] for start in range(0, padded, block)]
        visible = np.concatenate(
            (np.ones((block, memory), bool), np.tril(np.ones((block, block), bool))), 1)
    else:
        memories = [sides[start:start + 2 * memory + block] for start in range(0, padded, block)]
        visible = np.ones((block, block + 2 * memory), bool)
    return t2t_scatter(tokens, queries, memories, visible)


def t2t_2d_mask(height, width, block, flange):
    """make_2d_block_raster_mask over the memory of each block, flange rows first."""
    (h, w), (f_h, f_w) = block, flange
    size = h * w
    triangle = np.tril(np.ones((size, size), bool))
    rows = [np.concatenate((np.ones((size, f_w), bool), part, np.zeros((size, f_w), bool)), 1)
            for part in np.split(triangle, h, 1)]
    visible = np.concatenate([np.ones((size, f_h * (w + 2 * f_w)), bool)] + rows, 1)
    image = np.arange(height * width).reshape(height, width)
    image = np.pad(image, ((f_h, -height % h), (f_w, -width % w + f_w)), constant_values=-1)
    queries, memories = [], []
    for top in range(0, height, h):
        for left in range(0, width, w):
            memory = image[top:top + f_h + h, left:left + w + 2 * f_w]
            memories.append(memory.reshape(-1))
            queries.append(memory[f_h:, f_w:f_w + w].reshape(-1))
    return t2t_scatter(height * width, queries, memories, visible)


def image_local_case(tokens, mask, predicate, metadata):
    q, k, v = (draw(1, 2, tokens, 8) for _ in range(3))
    out, _ = torch.nn.functional._scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])
    allowed = predicate(*np.mgrid[:tokens, :tokens])
    return {"q": f32(q), "k": f32(k), "v": f32(v), "out": f64(out)}, {
        "formula": "softmax(q k^T / sqrt(head_dim)) v over the keys of the mask",
        **metadata,
    }, lambda t: {"out": attend(t["q"], t["k"], t["v"], allowed)}


@case("attention/image_local/testdata/causal_1d", SDPA, 81)
def image_local_causal_1d():
    block = 16
    return image_local_case(
        75, t2t_1d_mask(75, block, block, causal=True),
        lambda i, j: (j <= i) & (j >= i // block * block - block),
        {"form": "1d", "query_block": block, "memory": block, "causal": "true",
         "mask": "of tensor2tensor's masked_local_attention_1d, block_length = query_block: a query "
                 "sees its block up to itself, and the block before"})


@case("attention/image_local/testdata/both_sides_1d", SDPA, 82)
def image_local_both_sides_1d():
    block, memory = 16, 10
    return image_local_case(
        75, t2t_1d_mask(75, block, memory, causal=False),
        lambda i, j: ((j >= i // block * block - memory) &
                      (j < i // block * block + block + memory)),
        {"form": "1d", "query_block": block, "memory": memory, "causal": "false",
         "mask": "of tensor2tensor's local_attention_1d, block_length = query_block, filter_width = "
                 "memory: a query sees its block and as many keys on each side"})


@case("attention/image_local/testdata/block_raster_2d", SDPA, 83)
def image_local_block_raster_2d():
    height, width, h, w, f_h, f_w = 10, 15, 4, 6, 3, 2

    def predicate(i, j):
        (r, c), (key_r, key_c) = divmod(i, width), divmod(j, width)
        r0, c0 = r // h * h, c // w * w
        above = (r0 - f_h <= key_r) & (key_r < r0) & (c0 - f_w <= key_c) & (key_c < c0 + w + f_w)
        beside = (r0 <= key_r) & (key_r < r0 + h) & (c0 - f_w <= key_c) & (key_c < c0)
        within = (key_r // h == r // h) & (key_c // w == c // w) & (j <= i)
        return above | beside | within

    return image_local_case(
        height * width, t2t_2d_mask(height, width, (h, w), (f_h, f_w)), predicate,
        {"form": "2d", "width": width, "block_height": h, "block_width": w, "flange_height": f_h,
         "flange_width": f_w, "causal": "true",
         "mask": "of tensor2tensor's make_2d_block_raster_mask, query_shape = (block_height, "
                 "block_width), memory_flange = (flange_height, flange_width): a query sees the flange "
                 "above its block, which is wider by flange_width columns on each side, the one to the "
                 "left, and its block up to itself in raster order"})


# ---- attention/etc ----


def etc_distance_ids(distances, largest):
    """etcmodel's: 0 .. largest to the right, then 1 .. largest to the left."""
    ahead, behind = distances.clamp(0, largest), (-distances).clamp(0, largest)
    return torch.where(distances >= 0, ahead, largest + behind)


def etc_attend(queries, keys, values, ids, seen, table, numbers):
    """A query type over keys of its own for each query: [batch, heads, queries, keys, channels]."""
    content = torch.einsum("bhnc,bhnkc->bhnk", queries, keys)
    of_labels = torch.einsum("bhnc,hrc->bhnr", queries, table) + numbers[:, None, :]
    relative = of_labels.gather(3, ids[:, None].expand(content.shape))
    logits = (content + relative) / math.sqrt(queries.shape[-1]) - 10000.0 * ~seen[:, None]
    return torch.einsum("bhnk,bhnkc->bhnc", torch.softmax(logits, -1), values)


def etc_case(masked):
    """By pieces as google-research/etcmodel has them: windows of long keys, then the global ones.

    `masked`: with its masks of the pieces and its number a label.
    """
    batch, heads, first, tokens, channels, radius, m = 2, 2, 3, 33, 8, 4, 3
    drawn = {name: draw(batch, heads, tokens, channels)
             for name in ("q", "k", "v", "k_global", "v_global")}
    q, k, v, k_global, v_global = drawn.values()
    # Of each query type: its distances, then a pair of different segments, then one of the same.
    tables = {name: draw(heads, 2 * m + 3, channels, scale=0.5) for name in ("g", "l")}
    numbers = {name: draw(heads, 2 * m + 3) if masked else torch.zeros(heads, 2 * m + 3)
               for name in ("g", "l")}
    masks = {name: torch.rand(batch, *shape) < 0.7 if masked else torch.ones(batch, *shape).bool()
             for name, shape in (("g2g", (first, first)), ("g2l", (first, tokens - first)),
                                 ("l2g", (tokens - first, first)),
                                 ("l2l", (tokens - first, 2 * radius + 1)))}
    token = torch.arange(tokens)
    segment = torch.stack([torch.where(token < first, token, (token - first) // 10),
                           torch.where(token < first, token, (token * 7) % 4 - 1)])
    is_token = torch.ones(batch, tokens, dtype=torch.bool)
    is_token[0, 1] = False  # a global token
    is_token[1, 27:] = False
    labels = 2 * m + 1 + (segment[:, :, None] == segment[:, None, :]).long()

    def per_query(x, index):  # rows of [batch, heads, tokens, channels] or [batch, tokens]
        return x[:, :, index] if x.dim() == 4 else x[:, index]

    long, window = token[first:, None], torch.arange(-radius, radius + 1)
    index = long + window
    inside = (index >= first) & (index < tokens)
    index = index.clamp(first, tokens - 1)
    count = tokens - first
    side = token[:first].expand(count, first)
    both = torch.cat([index, side], 1)
    ids = torch.cat([etc_distance_ids(window, m).expand(batch, count, -1),
                     labels[:, first:, :first]], 2)
    seen = torch.cat([per_query(is_token, index) & inside & masks["l2l"],
                      per_query(is_token, side) & masks["l2g"]], 2)
    of_long = etc_attend(q[:, :, first:], per_query(k, both), per_query(v, both), ids, seen,
                         tables["l"], numbers["l"])

    every = token.expand(first, tokens)
    between = token[None, :first] - token[:first, None]
    ids = torch.cat([etc_distance_ids(between, m).expand(batch, -1, -1),
                     labels[:, :first, first:]], 2)
    of_global = etc_attend(q[:, :, :first], per_query(k_global, every), per_query(v_global, every),
                           ids, per_query(is_token, every) &
                           torch.cat([masks["g2g"], masks["g2l"]], 2), tables["g"], numbers["g"])

    ascending = etc_distance_ids(torch.arange(-m, m + 1), m)
    tensors = {name: f32(x) for name, x in drawn.items()}
    tensors |= {"g2g": f32(tables["g"][:, ascending]), "g2l": f32(tables["g"][:, 2 * m + 1:]),
                "l2l": f32(tables["l"][:, ascending]), "l2g": f32(tables["l"][:, 2 * m + 1:]),
                "segment": segment.numpy().astype(np.int32),
                "key_padding": is_token.numpy().astype(np.int32),
                "out": f64(torch.cat([of_global, of_long], 2))}
    if masked:
        tensors |= {f"{name}_mask": mask.numpy().astype(np.int32) for name, mask in masks.items()}
        tensors |= {"g2g_bias": f32(numbers["g"][:, ascending]), "g2l_bias": f32(numbers["g"][:, -2:]),
                    "l2l_bias": f32(numbers["l"][:, ascending]), "l2g_bias": f32(numbers["l"][:, -2:])}

    def hidden(t):
        """Pairs that the masks hide, [batch, tokens, tokens]."""
        whole = np.ones((batch, tokens, tokens), bool)
        whole[:, :first, :first] = t["g2g_mask"] > 0
        whole[:, :first, first:] = t["g2l_mask"] > 0
        whole[:, first:, :first] = t["l2g_mask"] > 0
        for c in range(2 * radius + 1):
            row = np.arange(max(0, radius - c), min(count, count + radius - c))
            whole[:, first + row, first + row + c - radius] = t["l2l_mask"][:, row, c] > 0
        return ~whole

    def formula(t):
        i, j = np.mgrid[:tokens, :tokens]
        same = (t["segment"][:, :, None] == t["segment"][:, None, :]).astype(int)
        near = np.broadcast_to(np.clip(j - i, -m, m) + m, same.shape)
        allowed = ((i < first) | (j < first) | (abs(i - j) <= radius)) & (t["key_padding"] > 0)[:, None]
        if masked:
            allowed = allowed & ~hidden(t)

        def attention(keys, values, inside, across):
            def products(name, rows):
                number = t[name + "_bias"][:, None, :] if masked else 0
                return np.take_along_axis(np.einsum("bhic,hrc->bhir", t["q"], t[name]) + number,
                                          np.broadcast_to(rows[:, None], (batch, heads) + i.shape), 3)
            relative = np.where((i < first) == (j < first), products(inside, near),
                                products(across, same))
            return attend(t["q"], keys, values, allowed[:, None], relative / math.sqrt(channels))

        of_global = attention(t["k_global"], t["v_global"], "g2g", "g2l")
        of_long = attention(t["k"], t["v"], "l2l", "l2g")
        return {"out": np.concatenate([of_global[:, :, :first], of_long[:, :, first:]], 2)}

    metadata = {
        "global_tokens": first, "radius": radius, "max_distance": m,
        "formula": "softmax_j(q_i . (k_j + P_ij) / sqrt(head_dim)) v_j over j with i < g or j < g or "
                   "|i - j| <= radius; P_ij is row clip(j - i, -m, m) + m of g2g or l2l, row "
                   "(segment_i = segment_j) of g2l or l2g; k_global and v_global where i < g",
        "after": "google-research/etcmodel: layers/attention.py, feature_utils.py; without its number "
                 "a label, which is 0",
        "mask": "key_padding [batch, tokens]: 1 a real key, 0 a padded one",
    }
    if masked:
        metadata["after"] = "google-research/etcmodel: layers/attention.py, feature_utils.py"
        metadata["formula"] += ("; the same row of g2g_bias, ... is added to q_i . (k_j + P_ij); pairs "
                                "with a 0 in their piece's mask are hidden, that of long tokens i and "
                                "i + c - radius being column c of l2l_mask")
    return tensors, metadata, formula


@case("attention/etc/testdata/pieces", "torch.softmax", 95)
def etc_pieces():
    return etc_case(masked=False)


@case("attention/etc/testdata/masked_pieces", "torch.softmax", 97)
def etc_masked_pieces():
    return etc_case(masked=True)


# ---- attention/strided and attention/fixed ----

SPARSE = "sparse_attention.attention"


def sparse_attention_module():
    """The published file, whose masks need none of what it imports but arrays."""
    class Transformer:
        def __init__(self, layout, block_size, mask_callback, heads):
            self.layout, self.block, self.callback, self.heads = layout, block_size, mask_callback, heads

    def band(x, below, above):
        i, j = np.indices(x.shape)
        return np.where((j >= i - (below if below >= 0 else len(x))) & (j <= i + above), x, 0)

    arrays = types.SimpleNamespace(
        ones=np.ones, zeros=np.zeros, reshape=np.reshape, transpose=np.transpose, equal=np.equal,
        minimum=min, floormod=np.mod, logical_and=np.logical_and, matrix_band_part=band,
        range=np.arange, cast=lambda x, dtype: x.astype(dtype), int32=np.int32, float32=np.float32)
    np.bool = bool  # NumPy's name for it when the file was written
    stubs = {
        "tensorflow": arrays,
        "blocksparse": types.SimpleNamespace(BlocksparseTransformer=Transformer),
        "utils": types.SimpleNamespace(shape_list=None, recomputable=lambda name: lambda f: f),
    }
    sys.modules.update(stubs)
    try:
        spec = importlib.util.spec_from_file_location(
            "sparse_attention", SOURCES["sparse_attention"] / "attention.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in stubs:
            del sys.modules[name]
    return module


@case("attention/strided/testdata/masks", SPARSE, 91)
def strided_masks():
    tokens, stride = 40, 8
    module = sparse_attention_module()
    tensors = {
        mode: module.get_attn_mask(tokens, mode, stride)[0, 0].astype(np.int32)
        for mode in ("local", "strided")
    }

    def formula(t):
        i, j = np.mgrid[:tokens, :tokens]
        return {"local": 1.0 * ((j <= i) & (j > i - stride)),
                "strided": 1.0 * ((j <= i) & ((i - j) % stride == 0))}

    metadata = {
        "stride": stride,
        "formula": "[query i, key j]: local i - stride < j <= i; strided j <= i and stride divides "
                   "i - j",
    }
    return tensors, metadata, formula


@case("attention/fixed/testdata/masks", SPARSE, 92)
def fixed_masks():
    tokens, stride, block, runs, heads = 48, 16, 2, 4, 4
    sparse = sparse_attention_module().get_blocksparse_obj(
        tokens, heads, "fixed", blocksize=block, local_attn_ctx=stride, num_verts=runs, vertsize=1)
    masks = np.zeros((heads, tokens, tokens), np.int32)
    for h, q, k in np.ndindex(heads, tokens // block, tokens // block):
        if sparse.layout[h, q, k]:
            masks[h, q * block:(q + 1) * block, k * block:(k + 1) * block] = sparse.callback(
                (block, block), h, q, k, 0)

    def formula(t):
        h, i, j = np.mgrid[:heads, :tokens, :tokens]
        run = h % runs
        summary = (j % stride >= stride - (run + 1) * block) & (j % stride < stride - run * block)
        return {"fixed": 1.0 * ((j <= i) & ((j // stride == i // stride) | summary))}

    metadata = {
        "stride": stride, "summary": block, "summaries": runs,
        "formula": "[head h, query i, key j], s = h mod summaries: j <= i and (floor(j / stride) = "
                   "floor(i / stride) or stride - (s + 1) summary <= j mod stride < stride - s "
                   "summary)",
    }
    return {"fixed": masks}, metadata, formula


# ---- attention/multi_head ----

MULTI_HEAD = "torch.nn.MultiheadAttention"


def attention_parameters(module):
    """Of a torch.nn.MultiheadAttention, as y = x W + b."""
    names = "qkv"
    parameters = {f"w_{n}": w.T for n, w in zip(names, module.in_proj_weight.chunk(3))}
    parameters.update({f"b_{n}": b for n, b in zip(names, module.in_proj_bias.chunk(3))})
    return {**parameters, "w_o": module.out_proj.weight.T, "b_o": module.out_proj.bias}


def attention_formula(p, x, memory, heads, allowed=None):
    q = split_heads(x @ p["w_q"] + p["b_q"], heads)
    k, v = (split_heads(memory @ p[f"w_{n}"] + p[f"b_{n}"], heads) for n in "kv")
    return merge_heads(attend(q, k, v, allowed)) @ p["w_o"] + p["b_o"]


def multi_head_case(batch, heads, head_dim, tokens, kv_tokens=None, causal=False, padding=None):
    width = heads * head_dim
    x = draw(batch, tokens, width)
    memory = x if kv_tokens is None else draw(batch, kv_tokens, width)
    keys = memory.shape[1]
    hidden = torch.ones(tokens, keys, dtype=torch.bool).triu(1) if causal else None
    real = torch.ones(batch, keys, dtype=torch.bool)
    for row, first, last in padding or []:
        real[row, first:last] = False
    with in_float64():
        module = torch.nn.MultiheadAttention(width, heads, batch_first=True).eval()
        redraw_parameters(module, 0.3)
        out, _ = module(x, memory, memory, key_padding_mask=~real if padding else None,
                        attn_mask=hidden, need_weights=True)
    tensors = {"x": f32(x)}
    if kv_tokens is not None:
        tensors["memory"] = f32(memory)
    if padding:
        tensors["key_padding"] = real.numpy().astype(np.int32)
    tensors.update({name: f32(p) for name, p in attention_parameters(module).items()})
    tensors["out"] = f64(out)

    def formula(t):
        allowed = real.numpy()[:, None, None, :] & (True if hidden is None else ~hidden.numpy())
        return {"out": attention_formula(t, t["x"], t.get("memory", t["x"]), heads, allowed)}

    return tensors, {
        "heads": heads, "head_dim": head_dim, "causal": str(causal).lower(),
        "cross": str(kv_tokens is not None).lower(),
        "orientation": "y = x W + b, W [in, out]; head h owns columns h head_dim to (h + 1) head_dim "
                       "- 1 of w_q, w_k, w_v and those rows of w_o",
        "formula": "concat over heads of softmax(q k^T / sqrt(head_dim)) v, times w_o, plus b_o; q = x "
                   "w_q + b_q; k and v are of the memory where there is one, else of x",
        "mask": "key_padding [batch, kv_tokens], where it is there: 1 a real key, 0 a padded one",
    }, formula


@case("attention/multi_head/testdata/self", MULTI_HEAD, 71)
def multi_head_self():
    return multi_head_case(2, 3, 8, 21)


@case("attention/multi_head/testdata/self_causal_padded", MULTI_HEAD, 72)
def multi_head_self_causal():
    return multi_head_case(2, 3, 8, 21, causal=True, padding=[(0, 17, 21), (1, 5, 6)])


@case("attention/multi_head/testdata/cross_padded", MULTI_HEAD, 73)
def multi_head_cross():
    return multi_head_case(2, 3, 8, 13, kv_tokens=34, padding=[(0, 29, 34), (1, 0, 7)])


# ---- attention/encoder_decoder ----

# Where PyTorch's layers and ours keep what belongs together.
ENCODER_NAMES = {"attention": "self_attn", "attention_norm": "norm1", "ff_norm": "norm2"}
DECODER_NAMES = {"self": "self_attn", "self_norm": "norm1", "cross": "multihead_attn",
                 "cross_norm": "norm2", "ff_norm": "norm3"}


def stack_parameters(prefix, module, names):
    """Of a torch.nn.TransformerEncoder or TransformerDecoder, by our names."""
    parameters = {}
    for n, layer in enumerate(module.layers):
        for ours, theirs in names.items():
            part = getattr(layer, theirs)
            values = ({"gamma": part.weight, "beta": part.bias} if ours.endswith("norm") else
                      attention_parameters(part))
            parameters.update({f"{prefix}{n}.{ours}.{name}": p for name, p in values.items()})
        parameters.update({
            f"{prefix}{n}.ff.w1": layer.linear1.weight.T, f"{prefix}{n}.ff.b1": layer.linear1.bias,
            f"{prefix}{n}.ff.w2": layer.linear2.weight.T, f"{prefix}{n}.ff.b2": layer.linear2.bias,
        })
    if module.norm is not None:
        parameters.update({f"{prefix}_norm.gamma": module.norm.weight,
                           f"{prefix}_norm.beta": module.norm.bias})
    return parameters


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def stack_formula(t, prefix, x, heads, layers, pre_norm, activation, allowed, memory=None,
                  memory_allowed=None):
    """One stack; `allowed` of self-attention, `memory_allowed` of attention to the memory. It ends
    with a norm where `t` has one."""
    def norm(h, name):
        return layer_norm(h, t[f"{name}.gamma"], t[f"{name}.beta"], 1e-5)

    def attention(name, h, other, mask):
        p = {key: t[f"{name}.{key}"] for key in
             ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")}
        return attention_formula(p, h, h if other is None else other, heads, mask)

    def feed_forward(name, h):
        return ACTIVATIONS[activation](h @ t[f"{name}.w1"] + t[f"{name}.b1"]) @ t[f"{name}.w2"] + \
            t[f"{name}.b2"]

    h = x
    for n in range(layers):
        first = "attention" if memory is None else "self"
        sublayers = [(first, lambda name, h: attention(name, h, None, allowed))]
        if memory is not None:
            sublayers.append(("cross", lambda name, h: attention(name, h, memory, memory_allowed)))
        sublayers.append(("ff", feed_forward))
        for name, compute in sublayers:
            name = f"{prefix}{n}.{name}"
            h = (h + compute(name, norm(h, f"{name}_norm")) if pre_norm else
                 norm(h + compute(name, h), f"{name}_norm"))
    return norm(h, f"{prefix}_norm") if f"{prefix}_norm.gamma" in t else h


def stack_metadata(part, block, final_norm, activation, heads, head_dim, inner, layers, causal):
    return {
        "part": part, "block": block, "final_norm": str(final_norm).lower(),
        "activation": activation, "heads": heads, "head_dim": head_dim, "inner_dim": inner, "layers": layers, "causal": str(causal).lower(),
        "layer_norm_epsilon": 1e-5,
        "orientation": "y = x W + b, W [in, out]; head h owns columns h head_dim to (h + 1) head_dim "
                       "- 1 of w_q, w_k, w_v and those rows of w_o",
        "formula": "per sublayer S (attention, in a decoder attention to the memory, feed-forward) "
                   "post_norm h <- norm(h + S(h)), else h <- h + S(norm(h)); where final_norm is "
                   "true a last norm; feed-forward activation(h w1 + b1) w2 + b2; gelu_sigmoid is x sigmoid(1.702 x)",
        "mask": "causal: of attention over x; key_padding [batch, kv_tokens], where it is there: 1 a "
                "real key of the memory, or of x where there is no memory, 0 a padded one",
    }


def stack_case(decodes, pre_norm, activation, tokens, kv_tokens=None, causal=False, padding=None,
               final_norm=None, heads=3, head_dim=8):
    batch, layers = 2, 2
    final_norm = pre_norm if final_norm is None else final_norm
    width, inner = heads * head_dim, 2 * heads * head_dim
    x = draw(batch, tokens, width)
    memory = draw(batch, kv_tokens, width) if decodes else None
    real = torch.ones(batch, kv_tokens if decodes else tokens, dtype=torch.bool)
    for row, first, last in padding or []:
        real[row, first:last] = False
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1) if causal else None
    settings = {"dropout": 0.0, "activation": activation, "batch_first": True,
                "norm_first": pre_norm}
    with in_float64():
        last = torch.nn.LayerNorm(width) if final_norm else None
        if decodes:
            layer = torch.nn.TransformerDecoderLayer(width, heads, inner, **settings)
            module = torch.nn.TransformerDecoder(layer, layers, norm=last)
        else:
            layer = torch.nn.TransformerEncoderLayer(width, heads, inner, **settings)
            module = torch.nn.TransformerEncoder(layer, layers, norm=last,
                                                 enable_nested_tensor=False)
        redraw_parameters(module, 0.2)
        ignored = ~real if padding else None
        out = (module(x, memory, tgt_mask=hidden, memory_key_padding_mask=ignored) if decodes else
               module(x, mask=hidden, src_key_padding_mask=ignored))
    prefix, names = ("decoder", DECODER_NAMES) if decodes else ("encoder", ENCODER_NAMES)
    tensors = {"x": f32(x)}
    if decodes:
        tensors["memory"] = f32(memory)
    if padding:
        tensors["key_padding"] = real.numpy().astype(np.int32)
    tensors.update({n: f32(p) for n, p in stack_parameters(prefix, module, names).items()})
    tensors["out"] = f64(out)

    def formula(t):
        keys = real.numpy()[:, None, None, :]
        over_x = np.ones((1, 1, tokens, tokens), bool) if hidden is None else ~hidden.numpy()
        return {"out": stack_formula(t, prefix, t["x"], heads, layers, pre_norm, activation,
                                     over_x if decodes else over_x & keys, t.get("memory"), keys)}

    return tensors, stack_metadata(prefix, "pre_norm" if pre_norm else "post_norm", final_norm,
                                   activation, heads, head_dim, inner, layers, causal), formula


@case("attention/encoder_decoder/testdata/encoder_post_norm", "torch.nn.TransformerEncoderLayer", 81)
def encoder_post_norm():
    return stack_case(False, False, "relu", 19, padding=[(0, 15, 19), (1, 2, 3)])


@case("attention/encoder_decoder/testdata/encoder_pre_norm", "torch.nn.TransformerEncoderLayer", 82)
def encoder_pre_norm():
    return stack_case(False, True, "gelu", 19, causal=True)


@case("attention/encoder_decoder/testdata/decoder_post_norm", "torch.nn.TransformerDecoderLayer", 83)
def decoder_post_norm():
    return stack_case(True, False, "gelu", 13, kv_tokens=22, causal=True)


@case("attention/encoder_decoder/testdata/decoder_pre_norm", "torch.nn.TransformerDecoderLayer", 84)
def decoder_pre_norm():
    return stack_case(True, True, "relu", 13, kv_tokens=22, causal=True,
                      padding=[(0, 17, 22), (1, 0, 4)])


@case("attention/encoder_decoder/testdata/encoder_pre_norm_no_final_norm",
      "torch.nn.TransformerEncoder", 86)
def encoder_pre_norm_no_final_norm():
    return stack_case(False, True, "relu", 9, causal=True, final_norm=False, heads=2, head_dim=4)


@case("attention/encoder_decoder/testdata/decoder_post_norm_final_norm",
      "torch.nn.TransformerDecoder", 87)
def decoder_post_norm_final_norm():
    return stack_case(True, False, "relu", 7, kv_tokens=11, causal=True, final_norm=True, heads=2,
                      head_dim=4)


@case("attention/encoder_decoder/testdata/sparse",
      "torch.nn.functional.layer_norm, linear, softmax (in the formulas of arXiv:1904.10509v1, "
      "section 5.2)", 85)
def sparse_block():
    """H_k = H_(k-1) + a + b with a = attention(LN(H)), b = FF(LN(H + a)), as the paper writes it."""
    from torch.nn import functional
    batch, heads, head_dim, layers, tokens = 2, 3, 8, 2, 19
    width, inner = heads * head_dim, 2 * heads * head_dim
    x = draw(batch, tokens, width)
    p = {}
    for n in range(layers):
        for name in "qkvo":
            p[f"encoder{n}.attention.w_{name}"] = draw(width, width, scale=0.2)
            p[f"encoder{n}.attention.b_{name}"] = draw(width, scale=0.2)
        p[f"encoder{n}.ff.w1"], p[f"encoder{n}.ff.b1"] = draw(width, inner, scale=0.2), draw(inner)
        p[f"encoder{n}.ff.w2"], p[f"encoder{n}.ff.b2"] = draw(inner, width, scale=0.2), draw(width)
    norms = [f"encoder{n}.{part}_norm" for n in range(layers) for part in ("attention", "ff")]
    for name in norms + ["encoder_norm"]:
        p[f"{name}.gamma"] = rounded(1 + draw(width, scale=0.2))
        p[f"{name}.beta"] = draw(width, scale=0.2)

    def norm(h, name):
        return functional.layer_norm(h, (width,), p[f"{name}.gamma"], p[f"{name}.beta"], 1e-5)

    def linear(h, name, which):
        return functional.linear(h, p[f"{name}.w{which}"].T, p[f"{name}.b{which}"])

    def attention(h, name):
        q, k, v = (linear(h, name, f"_{n}").reshape(batch, tokens, heads, head_dim).transpose(1, 2)
                   for n in "qkv")
        scores = q @ k.transpose(2, 3) / math.sqrt(head_dim)
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
        mixed = functional.softmax(scores, -1) @ v
        return linear(mixed.transpose(1, 2).reshape(batch, tokens, width), name, "_o")

    h = x
    for n in range(layers):
        a = attention(norm(h, f"encoder{n}.attention_norm"), f"encoder{n}.attention")
        f = linear(norm(h + a, f"encoder{n}.ff_norm"), f"encoder{n}.ff", "1")
        b = linear(f * torch.sigmoid(1.702 * f), f"encoder{n}.ff", "2")
        h = h + a + b
    out = norm(h, "encoder_norm")
    tensors = {"x": f32(x), **{name: f32(value) for name, value in p.items()}, "out": f64(out)}
    allowed = np.tril(np.ones((tokens, tokens), bool))
    return tensors, stack_metadata("encoder", "sparse", True, "gelu_sigmoid", heads, head_dim,
                                   inner, layers, True), lambda t: {
        "out": stack_formula(t, "encoder", t["x"], heads, layers, True, "gelu_sigmoid", allowed)}


# ---- attention/performer ----

PERFORMER = "performer_pytorch.performer_pytorch"
KERNEL_EPSILON = {"softmax": 1e-4, "relu": 1e-3}  # the package's defaults
CUMSUM_EPSILON = 1e-6  # likewise, of causal_linear_attention_noncuda
FEATURES = 20  # two whole orthogonal blocks of 8 rows and half a block


def performer_inputs():
    from performer_pytorch import performer_pytorch as package
    q, k = (draw(2, 2, 40, 8, scale=0.8) for _ in range(2))
    v = draw(2, 2, 40, 8)
    with in_float64():
        projection = package.gaussian_orthogonal_random_matrix(FEATURES, 8, scaling=0)
    return package, q, k, v, rounded(projection)


def linear_attention_outputs(package, query_features, key_features, v):
    args = query_features, key_features, v
    return {
        "out": f64(package.linear_attention(*args)),
        "causal_out": f64(package.causal_linear_attention_noncuda(*args, chunk_size=5, eps=0.0)),
        "causal_out_cumsum_epsilon": f64(
            package.causal_linear_attention_noncuda(*args, chunk_size=5, eps=CUMSUM_EPSILON)),
    }


def linear_attention_formula(query_features, key_features, v):
    products = np.einsum("bhim,bhjm->bhij", query_features, key_features)
    earlier = np.tril(products)
    extra = CUMSUM_EPSILON * query_features.sum(-1, keepdims=True)
    return {
        "out": products @ v / products.sum(-1, keepdims=True),
        "causal_out": earlier @ v / earlier.sum(-1, keepdims=True),
        "causal_out_cumsum_epsilon": earlier @ v / (earlier.sum(-1, keepdims=True) + extra),
    }


LINEAR_FORMULA = ("out = f_q (f_k^T v) / (f_q sum_j f_k_j); causal_out: the same over j <= i; "
                  "causal_out_cumsum_epsilon adds cumsum_epsilon to each prefix sum of f_k, in the "
                  "denominator only")


@case("attention/performer/testdata/softmax",
      f"{PERFORMER}.softmax_kernel, linear_attention, causal_linear_attention_noncuda, "
      "gaussian_orthogonal_random_matrix", 31)
def performer_softmax():
    package, q, k, v, projection = performer_inputs()
    epsilon = KERNEL_EPSILON["softmax"]
    with in_float64():
        features = [
            package.softmax_kernel(x, projection_matrix=projection, is_query=is_query, eps=epsilon)
            for x, is_query in ((q, True), (k, False))
        ]
        outputs = linear_attention_outputs(package, *features, v)

    def formula(t):
        def kernel(x, axes):
            x = x * x.shape[-1] ** -0.25
            dots = x @ t["projection"].T
            norms = (x**2).sum(-1, keepdims=True) / 2
            return FEATURES**-0.5 * (np.exp(dots - norms - dots.max(axes, keepdims=True)) + epsilon)
        query_features, key_features = kernel(t["q"], -1), kernel(t["k"], (-1, -2))
        return {"query_features": query_features, "key_features": key_features,
                **linear_attention_formula(query_features, key_features, t["v"])}

    return {
        "q": f32(q), "k": f32(k), "v": f32(v), "projection": f32(projection),
        "query_features": f64(features[0]), "key_features": f64(features[1]), **outputs,
    }, {
        "kernel_epsilon": epsilon, "cumsum_epsilon": CUMSUM_EPSILON,
        "formula": "x <- x head_dim^(-1/4); f(x) = m^(-1/2) (exp(w x - |x|^2 / 2 - stabiliser) + "
                   "kernel_epsilon), w a row of projection [m, head_dim]; the stabiliser is max over w "
                   "of w q for each query, and max over w and all keys of w k for each batch and head, "
                   "also where causal; " + LINEAR_FORMULA,
    }, formula


@case("attention/performer/testdata/relu",
      f"{PERFORMER}.generalized_kernel, linear_attention, causal_linear_attention_noncuda, "
      "gaussian_orthogonal_random_matrix", 32)
def performer_relu():
    package, q, k, v, projection = performer_inputs()
    epsilon = KERNEL_EPSILON["relu"]
    with in_float64():
        tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "projection": f32(projection)}
        for prefix, normalise in (("", True), ("unscaled.", False)):
            features = [
                package.generalized_kernel(
                    x, projection_matrix=projection, kernel_epsilon=epsilon, normalize_data=normalise)
                for x in (q, k)
            ]
            outputs = linear_attention_outputs(package, *features, v)
            tensors.update({f"{prefix}{name}": array for name, array in outputs.items()})

    def formula(t):
        expected = {}
        for prefix, scale in (("", 8**-0.25), ("unscaled.", 1.0)):
            features = [np.maximum(scale * t[name] @ t["projection"].T, 0) + epsilon for name in "qk"]
            outputs = linear_attention_formula(*features, t["v"])
            expected.update({f"{prefix}{name}": array for name, array in outputs.items()})
        return expected

    return tensors, {
        "kernel_epsilon": epsilon, "cumsum_epsilon": CUMSUM_EPSILON,
        "formula": "f(x) = relu(w x head_dim^(-1/4)) + kernel_epsilon, w a row of projection [m, "
                   "head_dim]; the outputs under unscaled. leave out head_dim^(-1/4); " + LINEAR_FORMULA,
    }, formula


# ---- attention/rfa ----

RFA = "random_feature_attention.causal_attention"
RFA_LENGTH_EPSILON = 1e-3  # of utils._normalize
RFA_FEATURE_SCALE, RFA_FLOOR = 0.1, 1.0  # utils.SCALE and EPS


def rfa_modules():
    """The authors' utils and causal_attention, with what those two lack or need not have here.

    utils names NamedTuple and upgrade_state_dict_named without importing them; causal_attention
    imports the CUDA extension.
    """
    folder = SOURCES["random_feature_attention"] / "random_feature_attention"
    package = types.ModuleType("random_feature_attention")
    package.__path__ = []
    sys.modules["random_feature_attention"] = package
    sys.modules["random_feature_attention.rfa"] = types.ModuleType("rfa")
    sys.modules["random_feature_attention.rfa"].RFA = None
    modules = []
    for name in ("utils", "causal_attention"):
        full_name = f"random_feature_attention.{name}"
        spec = importlib.util.spec_from_file_location(full_name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        if name == "utils":
            module.NamedTuple = typing.NamedTuple
            module.upgrade_state_dict_named = None
        spec.loader.exec_module(module)
        modules.append(module)
    return modules


@case("attention/rfa/testdata/gaussian",
      f"{RFA}.masked_rfa, incremental_rfa, utils.random_project, build_random_matrices", 33)
def rfa_gaussian():
    batch, heads, tokens, channels, rows, tau = 2, 2, 30, 8, 32, 0.8
    utils, attention = rfa_modules()
    q, k, v = (draw(batch, heads, tokens, channels) for _ in range(3))
    w = draw(heads, rows, channels)
    sigma = rounded(1 + 0.2 * torch.randn(heads, 1, channels, dtype=torch.float64))
    padding = torch.zeros(batch, tokens)
    padding[0, 23:] = 1
    padding[1, 5] = 1
    later = torch.full((tokens, tokens), -1.0).triu(1)
    with in_float64():
        matrices = utils.build_random_matrices(w, tau, sigma, reparam_proj=True)
        by_token = [x.permute(2, 0, 1, 3) for x in (q, k, v)]  # [tokens, batch, heads, channels]
        phi_q, phi_k = (utils.random_project(x=x, random_matrices=matrices) for x in by_token[:2])
        args = {"phi_q": phi_q, "phi_k": phi_k, "v": by_token[2]}

        def to_heads(out):
            return f64(out.view(tokens, batch, heads, channels).permute(1, 2, 0, 3).contiguous())
        outputs = {
            "out": to_heads(attention.masked_rfa(**args)),
            "padded_out": to_heads(attention.masked_rfa(**args, key_padding_mask=padding)),
            "causal_out": to_heads(attention.masked_rfa(**args, attn_mask=later)),
            "incremental_out": to_heads(attention.incremental_rfa(**args)[0]),
        }
        sums = torch.einsum("tbhk,tbhk->tbh", phi_q, phi_k.cumsum(0)).permute(1, 2, 0)

    def formula(t):
        matrices = t["w"] * t["channel_scale"][:, None, :] / tau

        def features(x):
            x = x / (np.sqrt((x**2).sum(-1, keepdims=True)) + RFA_LENGTH_EPSILON)
            x = np.einsum("bhtd,hkd->bhtk", x, matrices)
            return RFA_FEATURE_SCALE * np.concatenate([np.sin(x), np.cos(x)], -1)
        products = np.einsum("bhik,bhjk->bhij", features(t["q"]), features(t["k"]))
        padded = products * (1 - t["padding"][:, None, None, :])
        earlier = np.tril(products)

        def mean(weights, hold):
            return weights @ t["v"] / hold(weights.sum(-1, keepdims=True))
        masked = [mean(w, lambda x: np.maximum(abs(x), 1e-3)) for w in (products, padded, earlier)]
        return {"out": masked[0], "padded_out": masked[1], "causal_out": masked[2],
                "incremental_out": mean(earlier, lambda x: np.maximum(x, RFA_FLOOR)),
                "incremental_sums": earlier.sum(-1)}

    return {
        "q": f32(q), "k": f32(k), "v": f32(v), "w": f32(w),
        "channel_scale": f32(sigma[:, 0, :].contiguous()),
        "padding": padding.numpy().astype(np.int32),
        **outputs, "incremental_sums": f64(sums.contiguous()),
    }, {
        "tau": tau, "length_epsilon": RFA_LENGTH_EPSILON,
        "formula": "u = x / (|x| + length_epsilon); f(x) = 0.1 [sin(w channel_scale u / tau), "
                   "cos(w channel_scale u / tau)], w a row of a head's [rows, head_dim]; out = sum_j f_q "
                   "f_k_j v_j / max(|sum_j f_q f_k_j|, 1e-3) over all j; padded_out: over j whose padding "
                   "[batch, tokens] is 0; causal_out: over j <= i; incremental_out: the same divided by "
                   "max(incremental_sums, 1)",
    }, formula


# ---- attention/sinkhorn ----

SINKHORN = "sinkhorn_transformer.sinkhorn_transformer.SinkhornAttention"


def sinkhorn_attend(t, block, sorted_blocks):
    """Each block of queries on [its sorted block; its own], or all on the first sorted blocks."""
    batch, heads, tokens, channels = t["q"].shape
    blocks = tokens // block
    sorted_k, sorted_v = (
        np.einsum("bhut,bhtrc->bhurc", t["sort"],
                  t[name].reshape(batch, heads, blocks, block, channels)).reshape(t["q"].shape)
        for name in ("k", "v"))
    i = np.arange(tokens) // block
    own = i[:, None] == i
    if sorted_blocks > 0:
        return attend(t["q"], sorted_k, sorted_v, np.broadcast_to(i < sorted_blocks, own.shape))
    return attend(t["q"], np.concatenate((sorted_k, t["k"]), 2),
                  np.concatenate((sorted_v, t["v"]), 2), np.concatenate((own, own), 1))


def balance(a, iterations):
    for _ in range(iterations):
        for axis in (-1, -2):
            a = a - np.log(np.exp(a - a.max(axis, keepdims=True)).sum(axis, keepdims=True)) \
                - a.max(axis, keepdims=True)
    return np.exp(a)


def sinkhorn_sort(t, block, iterations, temperature):
    rows = np.concatenate((t["q"], t["k"]), -1)
    batch, heads, tokens, width = rows.shape
    pooled = rows.reshape(batch, heads, tokens // block, block, width).sum(3)
    scores = np.maximum(np.einsum("bhuc,hct->bhut", pooled, t["score_weights"]), 0)
    return balance((np.log(scores + 1e-6) + t["g"]) / temperature, iterations)


def sinkhorn_case(balanced, sorted_blocks=0):
    from sinkhorn_transformer import sinkhorn_transformer as package
    batch, heads, tokens, head_dim, block, temperature, iterations = 2, 2, 48, 8, 8, 0.75, 7
    q, k = (draw(batch, heads, tokens, head_dim) for _ in range(2))
    # Without SortCut the function takes sorted keys for sorted values, so values are the keys.
    v = draw(batch, heads, tokens, head_dim) if sorted_blocks > 0 else k
    g = rounded(-torch.log(-torch.log(torch.rand(batch, heads, tokens // block, tokens // block,
                                                 dtype=torch.float64))))
    recorded = []
    with in_float64():
        package.sample_gumbel = lambda *_: g.reshape(-1, *g.shape[2:])
        # With key blocks of the queries' size SortCut would add the queries' own block.
        module = package.SinkhornAttention(
            block * 2 if sorted_blocks > 0 else block, heads * head_dim, head_dim, heads, tokens,
            temperature=temperature, non_permutative=not balanced, sinkhorn_iter=iterations,
            n_sortcut=sorted_blocks, kv_bucket_size=block, use_simple_sort_net=balanced)
        redraw_parameters(module, 0.3)
        module.sort_net.register_forward_hook(lambda *args: recorded.append(args[-1]))
        out = module(q, k, v)
    sort = recorded[0].reshape(batch, heads, *recorded[0].shape[1:])
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "sort": f64(sort), "out": f64(out)}
    if balanced:
        tensors.update({"g": f32(g), "score_weights": f32(module.sort_net.linear[0])})

    def formula(t):
        expected = {"out": sinkhorn_attend(t, block, sorted_blocks)}
        if balanced:
            expected["sort"] = sinkhorn_sort(t, block, iterations, temperature)
        return expected

    return tensors, {
        "block": block, "sorted_blocks": sorted_blocks, "iterations": iterations,
        "temperature": temperature,
        "sort": ("rows of sums of a block's [q, k] times score_weights [heads, 2 head_dim, blocks]; "
                 "(log(relu + 1e-6) + g) / temperature, rows and columns normalised by turns"
                 if balanced else
                 "of a softmax over blocks' mean queries by mean keys, the largest entry of each row"),
        "formula": "sorted block u of k and v: sum_t sort[u, t] block t; softmax(q k^T / "
                   "sqrt(head_dim)) v over " +
                   ("the first sorted_blocks sorted blocks" if sorted_blocks > 0 else
                    "sorted block u and block u, for queries of block u"),
    }, formula


@case("attention/sinkhorn/testdata/balanced", SINKHORN, 71)
def sinkhorn_balanced():
    return sinkhorn_case(balanced=True)


@case("attention/sinkhorn/testdata/sortcut", SINKHORN, 72)
def sinkhorn_sortcut():
    return sinkhorn_case(balanced=True, sorted_blocks=2)


@case("attention/sinkhorn/testdata/largest_entries", SINKHORN, 73)
def sinkhorn_largest_entries():
    return sinkhorn_case(balanced=False)


# ---- positional/rope ----


def rope_formula(layout, rotary_dim):
    def rotate(x, positions):
        pairs = rotary_dim // 2
        angles = positions[:, None] * 10000.0 ** (-2 * np.arange(pairs) / rotary_dim)
        at = np.arange(pairs)
        first, second = (2 * at, 2 * at + 1) if layout == "interleaved" else (at, at + pairs)
        a, b = x[..., first], x[..., second]
        out = x.copy()
        out[..., first] = a * np.cos(angles) - b * np.sin(angles)
        out[..., second] = a * np.sin(angles) + b * np.cos(angles)
        return out
    return lambda t: {"q_rotated": rotate(t["q"], t["positions"]),
                      "k_rotated": rotate(t["k"], t["positions"])}


def rope_case(layout, head_dim, rotary_dim, offset, rotate):
    """`rotate(q, k, positions)` turns the first rotary_dim channels, [batch, heads, tokens, dim]."""
    tokens = 12
    q, k = draw(2, 3, tokens, head_dim), draw(2, 3, tokens, head_dim)
    positions = torch.arange(offset, offset + tokens)
    with in_float64():
        turned = rotate(q[..., :rotary_dim], k[..., :rotary_dim], positions)
        q_rotated, k_rotated = (
            torch.cat((part, x[..., rotary_dim:]), -1) for part, x in zip(turned, (q, k)))
    return {
        "q": f32(q), "k": f32(k), "positions": positions.numpy(),
        "q_rotated": f64(q_rotated), "k_rotated": f64(k_rotated),
    }, {
        "layout": layout, "rotary_dim": rotary_dim, "base": 10000, "position_offset": offset,
        "formula": "pair j of the first rotary_dim channels turns by position base^(-2j/rotary_dim): "
                   "(a, b) -> (a cos - b sin, a sin + b cos); pair j is channels "
                   + ("(2j, 2j+1)" if layout == "interleaved" else "(j, j + rotary_dim/2)"),
    }, rope_formula(layout, rotary_dim)


def rotate_gptj(q, k, positions):
    from transformers.models.gptj import modeling_gptj
    table = modeling_gptj.create_sinusoidal_positions(int(positions[-1]) + 1, q.shape[-1])
    sin, cos = table[positions][None].chunk(2, dim=-1)
    # That code has [batch, tokens, heads, dim].
    return [modeling_gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
            for x in (q, k)]


def rotate_llama(q, k, positions):
    from transformers.models.llama import modeling_llama
    count = int(positions[-1]) + 1
    cos, sin = modeling_llama.LlamaRotaryEmbedding(q.shape[-1], count)(q, seq_len=count)
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, positions[None].repeat(len(q), 1))


def rotate_neox(q, k, positions):
    from transformers.models.gpt_neox import modeling_gpt_neox
    count = int(positions[-1]) + 1
    cos, sin = modeling_gpt_neox.RotaryEmbedding(q.shape[-1], count)(q, seq_len=count)
    return modeling_gpt_neox.apply_rotary_pos_emb(
        q, k, cos, sin, positions[None].repeat(len(q), 1))


GPTJ = "transformers.models.gptj.modeling_gptj.create_sinusoidal_positions, apply_rotary_pos_emb"
LLAMA = "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding, apply_rotary_pos_emb"
NEOX = "transformers.models.gpt_neox.modeling_gpt_neox.RotaryEmbedding, apply_rotary_pos_emb"


@case("positional/rope/testdata/interleaved", GPTJ, 41)
def rope_interleaved():
    return rope_case("interleaved", 16, 16, 7, rotate_gptj)


@case("positional/rope/testdata/interleaved_partial", GPTJ, 42)
def rope_interleaved_partial():
    return rope_case("interleaved", 16, 8, 500, rotate_gptj)


@case("positional/rope/testdata/half_split", LLAMA, 43)
def rope_half_split():
    return rope_case("half_split", 16, 16, 7, rotate_llama)


# An angle of 1e5, rounded three times, is off by up to 3 * 1e5 * 2^-53 = 3e-11.
@case("positional/rope/testdata/half_split_far", LLAMA, 44, tolerance=3e-11)
def rope_half_split_far():
    return rope_case("half_split", 16, 16, 100000, rotate_llama)


@case("positional/rope/testdata/half_split_partial", NEOX, 45)
def rope_half_split_partial():
    return rope_case("half_split", 16, 4, 500, rotate_neox)


# ---- positional/alibi ----

BUILD_ALIBI = "transformers.models.bloom.modeling_bloom.build_alibi_tensor"


def alibi_bias(heads, tokens):
    """[heads, 1, tokens]: slope times key position."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    return build_alibi_tensor(torch.ones(1, tokens, dtype=torch.int64), heads, torch.float64)


def alibi_slopes(heads):
    """m_h = 2^(-8h/H); for other H, the list of the power of two below, then every other of 2P's."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return np.array(slopes + [2.0 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)])


@case("positional/alibi/testdata/slopes", BUILD_ALIBI, 51)
def alibi_slope_lists():
    counts = (1, 2, 3, 6, 8, 12, 16, 20)
    with in_float64():
        tensors = {f"slopes_{heads}": f64(alibi_bias(heads, 2)[:, 0, 1]) for heads in counts}
    return tensors, {
        "formula": "slopes_<H>[h]: the slope of head h of H",
    }, lambda t: {f"slopes_{heads}": alibi_slopes(heads) for heads in counts}


def alibi_attention(heads):
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention
    batch, tokens, head_dim = 1, 48, 8
    width = heads * head_dim
    config = BloomConfig(hidden_size=width, n_head=heads, attention_dropout=0.0, hidden_dropout=0.0)
    x = draw(batch, tokens, width)
    with in_float64():
        module = BloomAttention(config).eval()
        redraw_parameters(module, 1.5 / math.sqrt(width))
        # The output projection becomes the identity, so that the heads' outputs come out.
        module.dense.weight.copy_(torch.eye(width))
        module.dense.bias.zero_()
        bias = alibi_bias(heads, tokens)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
        out = module(x, torch.zeros_like(x), bias, future)[0]
        q, k, v = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(x)))

    def formula(t):
        distance = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        bias = -alibi_slopes(heads)[:, None, None] * distance
        return {"slopes": alibi_slopes(heads),
                "out": attend(t["q"], t["k"], t["v"], distance >= 0, bias)}

    return {
        "q": f64(q), "k": f64(k), "v": f64(v), "slopes": f64(bias[:, 0, 1]),
        "out": split_heads(f64(out), heads),
    }, {
        "causal": "true",
        "formula": "softmax over j <= i of q_i k_j / sqrt(head_dim) - slopes[h] (i - j), times v",
    }, formula


@case("positional/alibi/testdata/attention_8_heads",
      "transformers.models.bloom.modeling_bloom.BloomAttention, build_alibi_tensor", 52)
def alibi_attention_8():
    return alibi_attention(8)


@case("positional/alibi/testdata/attention_6_heads",
      "transformers.models.bloom.modeling_bloom.BloomAttention, build_alibi_tensor", 53)
def alibi_attention_6():
    return alibi_attention(6)


# ---- memory/transformer_xl ----

TRANSFO_XL = "transformers.models.transfo_xl.modeling_transfo_xl.TransfoXLModel"


def transformer_xl_case(same_length):
    from transformers import TransfoXLConfig, TransfoXLModel
    layers, heads, head_dim, width, inner = 2, 4, 8, 32, 64
    memory, segment, segments, batch = 16, 8, 4, 2
    config = TransfoXLConfig(
        vocab_size=8, cutoffs=[], d_model=width, d_embed=width, n_head=heads, d_head=head_dim,
        d_inner=inner, n_layer=layers, mem_len=memory, clamp_len=0, same_length=same_length,
        untie_r=False, div_val=1, pre_lnorm=False, dropout=0.0, dropatt=0.0, attn_type=0)
    x = draw(batch, segments * segment, width)
    with in_float64():
        model = TransfoXLModel(config).eval()
        redraw_parameters(model, 0.2)
        tensors = {"u": f32(model.r_w_bias), "v": f32(model.r_r_bias)}
        for index, layer in enumerate(model.layers):
            attention, feed_forward = layer.dec_attn, layer.pos_ff
            w_q, w_k, w_v = attention.qkv_net.weight.chunk(3)
            parameters = {
                "w_q": w_q.T, "w_k": w_k.T, "w_v": w_v.T, "w_r": attention.r_net.weight.T,
                "w_o": attention.o_net.weight.T,
                "ln1.gamma": attention.layer_norm.weight, "ln1.beta": attention.layer_norm.bias,
                "ff.w1": feed_forward.CoreNet[0].weight.T, "ff.b1": feed_forward.CoreNet[0].bias,
                "ff.w2": feed_forward.CoreNet[3].weight.T, "ff.b2": feed_forward.CoreNet[3].bias,
                "ln2.gamma": feed_forward.layer_norm.weight,
                "ln2.beta": feed_forward.layer_norm.bias,
            }
            tensors.update({f"layer{index}.{name}": f32(p) for name, p in parameters.items()})
        tensors["x"] = f32(x)
        # Given no memory, the model begins with `memory` zero vectors that queries do attend to; the
        # paper begins with none.
        mems = [torch.zeros(0, batch, width) for _ in range(layers)]
        outs = []
        for index in range(segments):
            rows = slice(index * segment, (index + 1) * segment)
            result = model(inputs_embeds=x[:, rows], mems=mems)
            outs.append(result.last_hidden_state)
            mems = result.mems
            tensors.update({
                f"segment{index}.layer{n}.memory": f64(memory_rows.transpose(0, 1))
                for n, memory_rows in enumerate(mems)
            })
    tensors["out"] = f64(torch.cat(outs, 1))
    epsilon = config.layer_norm_epsilon

    def formula(t):
        """The whole sequence at once, under a mask: what the segments must equal."""
        total = segments * segment
        i, j = np.mgrid[:total, :total]
        start = i // segment * segment
        allowed = (j <= i) & ((i - j < memory) if same_length else (j >= start - memory))
        angles = np.outer(np.arange(total), 10000.0 ** (-np.arange(0, width, 2) / width))
        positions = np.concatenate((np.sin(angles), np.cos(angles)), -1)
        h, expected = t["x"], {}
        for n in range(layers):
            p = {name.split(".", 1)[1]: a for name, a in t.items() if name.startswith(f"layer{n}.")}
            for s in range(segments):
                end = (s + 1) * segment
                expected[f"segment{s}.layer{n}.memory"] = h[:, max(0, end - memory):end]
            q, k, v = (split_heads(h @ p[name], heads) for name in ("w_q", "w_k", "w_v"))
            r = split_heads((positions @ p["w_r"])[None], heads)[0]  # [heads, distance, head_dim]
            by_distance = np.einsum("bhid,hcd->bhic", q + t["v"][:, None], r)
            bias = np.take_along_axis(
                by_distance, np.broadcast_to(np.maximum(i - j, 0), by_distance.shape), -1)
            context = attend(q + t["u"][:, None], k, v, allowed, bias / math.sqrt(head_dim))
            h = layer_norm(h + merge_heads(context) @ p["w_o"], p["ln1.gamma"], p["ln1.beta"],
                           epsilon)
            core = np.maximum(h @ p["ff.w1"] + p["ff.b1"], 0) @ p["ff.w2"] + p["ff.b2"]
            h = layer_norm(h + core, p["ln2.gamma"], p["ln2.beta"], epsilon)
        return {**expected, "out": h}

    return tensors, {
        "layers": layers, "heads": heads, "head_dim": head_dim, "model_dim": width,
        "inner_dim": inner, "memory_tokens": memory, "segment_tokens": segment,
        "segments": segments, "same_length": str(same_length).lower(), "clamp_len": "none",
        "layer_norm_epsilon": epsilon, "norm": "post", "activation": "relu",
        "orientation": "y = x W + b, W [in, out]; u (of the content term) and v (of the position term) "
                       "[heads, head_dim], shared by the layers; head h owns columns h head_dim to "
                       "(h + 1) head_dim - 1 of w_q, w_k, w_v, w_r and those rows of w_o; no biases in "
                       "the attention",
        "formula": "score ((q_i + u) k_j + (q_i + v) (r_(i-j) w_r)) / sqrt(head_dim), r_p = [sin(p f), "
                   "cos(p f)] with f_c = 10000^(-2c / model_dim), the sines first; h <- ln1(h + "
                   "attention w_o); h <- ln2(h + relu(h ff.w1 + ff.b1) ff.w2 + ff.b2); x and out "
                   "[batch, segments segment_tokens, model_dim]; segment<s>.layer<n>.memory is the "
                   "memory of layer n's inputs after segment s",
        "mask": ("0 <= i - j < memory_tokens" if same_length else
                 "max(0, start of the segment - memory_tokens) <= j <= i"),
        "first_memory": "empty (the package's default, memory_tokens zero vectors that are attended "
                        "to, was not used)",
    }, formula


@case("memory/transformer_xl/testdata/segments", TRANSFO_XL, 61)
def transformer_xl_segments():
    return transformer_xl_case(same_length=False)


@case("memory/transformer_xl/testdata/segments_same_length", TRANSFO_XL, 61)
def transformer_xl_same_length():
    return transformer_xl_case(same_length=True)


# ---- Writing ----


def worst_difference(tensors, formula):
    arrays = {name: array.astype(np.float64) for name, array in tensors.items()}
    worst = 0.0
    for name, expected in formula(arrays).items():
        if arrays[name].shape != expected.shape:
            raise SystemExit(f"{name} is {arrays[name].shape}, its formula {expected.shape}")
        difference = abs(arrays[name] - expected).max() / abs(expected).max()
        worst = max(worst, float(difference))
    return worst


def commit(clone):
    return subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], check=True, text=True,
                          capture_output=True).stdout.strip()


def main(cases=CASES, script="golden.py"):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the repository's root")
    for name, address in SOURCES.items():
        parser.add_argument(f"--{name}", type=pathlib.Path, help=f"a clone of {address}; without it "
                            "the files that it makes are left as they are")
    flags = parser.parse_args()
    for name in SOURCES:
        SOURCES[name] = getattr(flags, name)

    torch.set_num_threads(1)
    for path, made_by, seed, tolerance, function in cases:
        if SOURCES.get(made_by.split(".")[0], flags.output) is None:
            print(f"{path:<58} left as it is: no --{made_by.split('.')[0]}")
            continue
        torch.manual_seed(seed)
        tensors, metadata, formula = function()
        package = made_by.split(".")[0]
        # Debian's build of torch calls itself by another name in its metadata.
        version = (torch.__version__ if package == "torch" else
                   commit(SOURCES[package]) if package in SOURCES else
                   importlib.metadata.version(package.replace("_", "-")))
        worst = worst_difference(tensors, formula)
        if worst > tolerance:
            raise SystemExit(f"{path}: {made_by} differs from the stated formula by {worst:.1e}")
        target = flags.output / f"{path}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        size = tensor_file.write(target, tensors, {
            **metadata,
            "made_by": made_by,
            "package": f"{package} {version}",
            "seed": seed,
            "command": f"python3 tools/capture/{script} --output=.",
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}, numpy "
                        f"{np.__version__}",
            "precision": "inputs and parameters drawn in float32; computed in float64, with the "
                         "function's own casts to float32 turned into casts to float64",
        })
        if size > MAX_FILE_BYTES:
            raise SystemExit(f"{target} has {size} bytes, more than {MAX_FILE_BYTES}")
        print(f"{path:<58} {size:7d} bytes, formula differs by {worst:.1e}")


if __name__ == "__main__":
    main()
