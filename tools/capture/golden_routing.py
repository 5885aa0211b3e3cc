"""Writes attention/routing/testdata: see golden.py, whose rules hold here too.

routing-transformer makes vectors of unit length where the paper takes a layer norm without scale and bias. All
vectors here are permutations of one list of sum 0, so that both divide all of them by one number: memberships are
the same, and scores up to a factor, which the metadata's `scale` holds.
"""

import math
import pathlib
import unittest.mock

import numpy as np
import torch

import golden
from golden import attend, case, draw, f32, f64, in_float64

FIRST = len(golden.CASES)

NORM_EPSILON = 1e-5  # of the layer norm
MEAN_EPSILON = 1e-5  # the package's, added to the number of a token's clusters


def permutations(half, *shape):
    """Vectors of [half, -half] in random orders."""
    channels = torch.cat((half, -half))
    order = torch.rand(*shape, len(channels), dtype=torch.float64).argsort(-1)
    return channels[order]


def members_of(indices, shape, clusters):
    """Marks [batch, heads, tokens, clusters] of the package's list, one cluster after the other."""
    marks = torch.zeros(*shape, clusters, dtype=torch.int32)
    by_cluster = indices.reshape(*shape[:2], clusters, -1)
    return marks.scatter_(2, by_cluster.transpose(2, 3), 1)


def layer_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON)


def largest(x, centroids, size):
    order = np.argsort(-np.einsum("bhid,hcd->bhic", x, centroids), 2)
    marks = np.zeros(order.shape)
    np.put_along_axis(marks, order[:, :, :size], 1, 2)
    return marks


def new_centroids(q, k, centroids):
    """Sums of the vectors of unit length of the nearest centroid, in all batch rows, of unit length."""
    x = np.concatenate((q, k), 2)
    x = x / np.sqrt((x**2).sum(-1, keepdims=True))
    nearest = np.einsum("bhid,hcd->bhic", x, centroids).argmax(-1)
    is_nearest = np.arange(centroids.shape[1]) == nearest[..., None]
    assert is_nearest.any((0, 2)).all(), "a centroid that is nearest to none"
    sums = np.einsum("bhic,bhid->hcd", is_nearest, x)
    return sums / np.sqrt((sums**2).sum(-1, keepdims=True))


# ---- routing-transformer ----

ROUTING = "routing_transformer.routing_transformer.KmeansAttention"


def clusters_case(causal, padded_from=None):
    from routing_transformer import routing_transformer as package
    batch, heads, tokens, channels, clusters = 2, 2, 45, 16, 4
    size = -(-tokens // clusters)
    shape = batch, heads, tokens
    half = draw(channels // 2)
    variance = float((half**2).sum() * 2 / channels)
    q = permutations(half, *shape)
    k = q if causal else permutations(half, *shape)
    v = draw(*shape, channels)
    centroids = draw(heads, clusters, channels)
    padding = torch.ones(batch, tokens)
    if padded_from is not None:
        padding[0, padded_from:] = 0
    recorded = []

    def record(*args, choose=package.distribution):
        recorded.append(choose(*args))
        return recorded[-1]

    with in_float64(), unittest.mock.patch.object(package, "distribution", record):
        module = package.KmeansAttention(clusters, size, heads, channels, causal=causal)
        module.num_mem_kv = 0  # learned keys and values, of which it wants one where causal
        module.mem_key = module.mem_value = torch.nn.Parameter(torch.zeros(heads, clusters, 0, channels))
        module.kmeans.means.copy_(centroids)
        module.kmeans.initted.fill_(True)
        mask = padding.bool() if padded_from is not None else None
        out, _ = module(q, k, v, query_mask=mask, key_mask=mask)
        new_means = module.kmeans.new_means
        module.kmeans.update()
    query_members, key_members = (members_of(indices, shape, clusters) for indices in recorded)
    if causal:
        assert (query_members == key_members).all()
    tensors = {"q": f32(q), "k": f32(k), "v": f32(v), "centroids": f32(centroids),
               "query_members": query_members.numpy(), "key_members": key_members.numpy(),
               "new_centroids": f64(new_means), "moved_centroids": f64(module.kmeans.means)}
    scale = (variance + NORM_EPSILON) / math.sqrt(channels)
    metadata = {
        "clusters": clusters, "causal": str(causal).lower(), "scale": repr(scale),
        "mean_epsilon": MEAN_EPSILON, "decay": module.kmeans.ema_decay,
        "formula": "members: of each cluster the ceil(tokens / clusters) tokens of largest LN(q) . centroid, and of "
                   "LN(k); out = 1 / (n + mean_epsilon) sum over the n clusters of a query of softmax(scale LN(q) . "
                   "LN(k)) v over the cluster's keys, j <= i where causal; LN a layer norm with epsilon 1e-5",
        "scale_is": "(variance + 1e-5) / sqrt(head_dim), since the package's scores are q . k / sqrt(head_dim)",
        "centroids_are": "new: sums of the vectors of unit length of q and k by their nearest centroid, of unit "
                         "length again; moved: decay old + (1 - decay) new",
        "memory": "without the package's learned keys and values",
    }
    if padded_from is not None:
        tensors["key_padding"] = padding.numpy().astype(np.int32)
        out = out * padding[:, None, :, None]
        metadata["mask"] = ("key_padding [batch, tokens]: 1 a real token, 0 a padded one, which is a member here but no "
                            "key; rows of padded tokens were set to 0")
    tensors["out"] = f64(out)

    def formula(t):
        allowed = np.tril(np.ones((tokens, tokens), bool)) if causal else np.ones((tokens, tokens), bool)
        allowed = allowed & (padding.numpy() > 0)[:, None, None, :]
        total = 0
        for c in range(clusters):
            is_query = t["query_members"][..., c:c + 1]
            # Rows that are not the cluster's see everything, and count for nothing.
            seen = np.where(is_query > 0, allowed & (t["key_members"][:, :, None, :, c] > 0), True)
            total = total + is_query * attend(layer_norm(t["q"]) * scale * math.sqrt(channels),
                                              layer_norm(t["k"]), t["v"], seen)
        count = t["query_members"].sum(-1, keepdims=True)
        new = new_centroids(t["q"], t["k"], t["centroids"])
        decay = module.kmeans.ema_decay
        return {"out": total / (count + MEAN_EPSILON) * padding.numpy()[:, None, :, None],
                "query_members": largest(layer_norm(t["q"]), t["centroids"], size),
                "key_members": largest(layer_norm(t["k"]), t["centroids"], size),
                "new_centroids": new,
                "moved_centroids": decay * t["centroids"] + (1 - decay) * new}

    return tensors, metadata, formula


@case("attention/routing/testdata/clusters", ROUTING, 111)
def clusters():
    return clusters_case(causal=False)


# Keys are the queries. By its option shared_qk, the usual one, it would hide a token from itself.
@case("attention/routing/testdata/clusters_causal", ROUTING, 112)
def clusters_causal():
    return clusters_case(causal=True)


@case("attention/routing/testdata/clusters_padded", ROUTING, 113)
def clusters_padded():
    return clusters_case(causal=False, padded_from=38)


# ---- routing-transformer, vectors of any length ----


def of_length_one(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True))


def given_case(shared):
    """`shared`: keys are the queries, in a causal layer, which hides a token from itself."""
    from routing_transformer import routing_transformer as package
    batch, heads, tokens, channels, clusters = 2, 2, 30, 8, 4
    size = -(-tokens // clusters)
    q, k, v = (draw(batch, heads, tokens, channels) for _ in range(3))
    centroids = draw(heads, clusters, channels)
    recorded = []

    def record(*args, choose=package.distribution):
        recorded.append(choose(*args))
        return recorded[-1]

    with in_float64(), unittest.mock.patch.object(package, "distribution", record):
        module = package.KmeansAttention(clusters, size, heads, channels, causal=shared, shared_qk=shared)
        assert module.num_mem_kv == 0
        module.kmeans.means.copy_(centroids)
        module.kmeans.initted.fill_(True)
        out, _ = module.eval()(q, q if shared else k, v)
    marks = [members_of(indices, (batch, heads, tokens), clusters) for indices in recorded]
    tensors = {"q": f32(q), "k": f32(q if shared else k), "v": f32(v), "centroids": f32(centroids),
               "query_members": marks[0].numpy(), "key_members": marks[-1].numpy(), "out": f64(out)}

    def formula(t):
        keys = of_length_one(t["q"]) if shared else t["k"]
        allowed = np.tril(np.ones((tokens, tokens), bool)) if shared else np.ones((tokens, tokens), bool)
        bias = -5e4 * np.eye(tokens) if shared else 0
        total = 0
        for c in range(clusters):
            is_query = t["query_members"][..., c:c + 1]
            seen = np.where(is_query > 0, allowed & (t["key_members"][:, :, None, :, c] > 0), True)
            total = total + is_query * attend(t["q"], keys, t["v"], seen, bias)
        count = t["query_members"].sum(-1, keepdims=True)
        return {"out": total / (count + MEAN_EPSILON),
                "query_members": largest(of_length_one(t["q"]), t["centroids"], size),
                "key_members": largest(of_length_one(t["k"]), t["centroids"], size)}

    return tensors, {
        "clusters": clusters, "causal": str(shared).lower(), "scale": "0", "mean_epsilon": MEAN_EPSILON,
        "norm": "unit", "scored": "given", "self_bias": "-5e4" if shared else "0",
        "formula": "members: of each cluster the ceil(tokens / clusters) tokens of largest q . centroid / |q|, and of "
                   "keys; out = 1 / (n + mean_epsilon) sum over the n clusters of a query of softmax(q k / "
                   "sqrt(head_dim) + self_bias [i = j]) v over the cluster's keys; where causal keys are q / |q|, and "
                   "j <= i",
        "self": "the package puts -5e4 in the place of a token's score with itself; the output is the same",
    }, formula


@case("attention/routing/testdata/given", ROUTING, 115)
def given():
    return given_case(shared=False)


@case("attention/routing/testdata/given_shared", ROUTING, 116)
def given_shared():
    return given_case(shared=True)


# ---- local-attention ----


@case("attention/routing/testdata/local", "local_attention.local_attention.LocalAttention", 114)
def local():
    from local_attention import LocalAttention
    batch, heads, tokens, channels, block = 2, 2, 40, 8, 8
    q, k, v = (draw(batch, heads, tokens, channels) for _ in range(3))
    with in_float64():
        out = LocalAttention(block)(q, k, v)
        causal_out = LocalAttention(block, causal=True)(q, q, v)
    i = np.arange(tokens) // block
    near = abs(i[:, None] - i) <= 1

    def formula(t):
        return {"out": attend(t["q"], t["k"], t["v"], near),
                "causal_out": attend(t["q"], t["q"], t["v"], np.tril(near))}

    return {"q": f32(q), "k": f32(k), "v": f32(v), "out": f64(out), "causal_out": f64(causal_out)}, {
        "local_block": block,
        "formula": "softmax(q k^T / sqrt(head_dim)) v over keys of the query's block of local_block tokens and of the "
                   "blocks beside it; causal_out: with keys q, j <= i",
    }, formula


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
