"""Writes attention/lsh/testdata: see golden.py, whose rules hold here too."""

import math
import pathlib
import unittest.mock

import numpy as np
import torch

import golden
from golden import attend, case, draw, f32, f64, in_float64, merge_heads, split_heads

FIRST = len(golden.CASES)

DUPLICATES_EPSILON = 1e-9  # reformer-pytorch subtracts log(N + this) for a key that N rounds find


def with_rotations(rotations):
    """The packages draw theirs inside; here all heads have these, or each its own in all sequences."""
    def given(shape, **_):
        if rotations.dim() == 3:
            return rotations.expand(*shape)
        assert list(shape[1:]) == list(rotations.shape[1:])
        return rotations.repeat(shape[0] // len(rotations), 1, 1, 1)
    return unittest.mock.patch.object(torch, "randn", given)


def hashes(q, rotations, factors):
    """Buckets [batch, heads, tokens, rounds] of products of hashes of `factors` buckets each."""
    bucket, first, step = 0, 0, 1
    for factor in factors:
        columns = rotations[..., first:first + factor // 2]
        heads = "h" if rotations.ndim == 4 else ""
        product = np.einsum(f"bhic,{heads}crn->bhirn", q, columns)
        bucket = bucket + step * np.concatenate([product, -product], -1).argmax(-1)
        first, step = first + factor // 2, step * factor
    return bucket


def times_seen(buckets, chunk, bucket_mask, wrap):
    """N [batch, heads, tokens, tokens]: in how many rounds query i has key j in its window."""
    by_round = np.moveaxis(buckets, -1, 0)
    order = np.argsort(by_round, -1, kind="stable")
    chunks = np.argsort(order, -1) // chunk
    back = chunks[..., :, None] - chunks[..., None, :]
    seen = (back == 0) | (back == 1)
    if bucket_mask:
        seen &= by_round[..., :, None] == by_round[..., None, :]
    count = seen.sum(0)
    if wrap:
        in_last = np.roll(chunks, 1, 0) == chunks.max()
        count += ((chunks == 0)[..., :, None] & in_last[..., None, :]).sum(0)
    return count


def lsh_case(self_score, q, v, rotations, factors, options, out, buckets, padding=None):
    """The tensors, metadata and formula of a file; `buckets` [batch, heads, tokens, rounds]."""
    batch, heads, tokens, channels = q.shape
    flags = {name: options[name] == "true" for name in ("causal", "bucket_mask", "dedup", "wrap")}
    scale = channels**-0.5 if options["scale"] == "0" else 1.0
    is_token = np.ones((batch, tokens), bool) if padding is None else padding.numpy() > 0

    def formula(t):
        hashed = np.where(is_token[:, None, :, None], hashes(t["q"], t["rotations"], factors),
                          math.prod(factors))
        count = times_seen(hashed, options["chunk"], flags["bucket_mask"], flags["wrap"])
        allowed = (count > 0) & is_token[:, None, None, :]
        if flags["causal"]:
            allowed &= np.tril(np.ones((tokens, tokens), bool))
        weight = count / (count + DUPLICATES_EPSILON) if flags["dedup"] else count
        epsilon = channels * 1e-6 if options["key_norm"] == "epsilon" else 0.0
        keys = t["q"] / np.sqrt((t["q"]**2).sum(-1, keepdims=True) + epsilon)
        with np.errstate(divide="ignore"):
            bias = np.log(weight) - 1e5 * np.eye(tokens)
        expected = attend(t["q"] * scale * math.sqrt(channels), keys, t["v"], allowed, bias)
        return {"buckets": hashed, "out": expected * is_token[:, None, :, None]}

    tensors = {"q": f32(q), "v": f32(v), "rotations": f32(rotations),
               "buckets": buckets.numpy().astype(np.int32)}
    count_term = f", times N / (N + {DUPLICATES_EPSILON})" if flags["dedup"] else " + log N"
    metadata = {
        **options, "buckets": math.prod(factors), "factors": factors,
        "formula": "bucket h_1 + factor_1 h_2 of hashes argmax [q R; -q R], R the next factor / 2 "
                   f"columns of rotations [{'heads, ' * (rotations.dim() == 4)}head_dim, rounds, "
                   "columns]; keys q / |q|, or q / "
                   "sqrt(|q|^2 + head_dim 1e-6) where key_norm is epsilon; softmax over keys that "
                   f"N > 0 rounds show, of scale q k{count_term}; scale 0 is 1 / sqrt(head_dim)",
        "self": f"{self_score} in the place of a token's score with itself; the formula adds -1e5, "
                "which gives the same output: weight 0 beside other keys, 1 alone",
    }
    if padding is not None:
        tensors["key_padding"] = padding.numpy().astype(np.int32)
        out = out * padding[:, None, :, None]
        metadata["mask"] = ("key_padding [batch, tokens]: 1 a real token, 0 a padded one, sorted "
                            "behind; rows of padded tokens were set to 0")
    tensors["out"] = f64(out)
    return tensors, metadata, formula


def of_rounds(buckets, batch, heads, rounds, step):
    """From one list in which round r counts from r step."""
    by_round = buckets.reshape(batch, heads, rounds, -1) - step * torch.arange(rounds)[:, None]
    return by_round.transpose(2, 3)


# ---- reformer-pytorch ----

LUCIDRAINS = "reformer_pytorch.reformer_pytorch.LSHAttention"


def lucidrains_case(rounds, causal, across_buckets, duplicates, per_head=False):
    from reformer_pytorch import LSHAttention
    batch, heads, tokens, channels, chunk = 2, 2, 48, 8, 4
    q = draw(batch, heads, tokens, channels)
    v = draw(batch, heads, tokens, channels)
    count = tokens // chunk
    rotations = draw(*[heads] * per_head, channels, rounds, count // 2)
    with in_float64(), with_rotations(rotations):
        module = LSHAttention(
            random_rotations_per_head=per_head,
            bucket_size=chunk, n_hashes=rounds, causal=causal, attend_across_buckets=across_buckets,
            allow_duplicate_attention=duplicates).eval()
        out, _, buckets = module(q.flatten(0, 1), v.flatten(0, 1))
    options = {"rounds": rounds, "chunk": chunk, "causal": str(causal).lower(), "scale": "0",
               "bucket_mask": str(not across_buckets).lower(), "dedup": str(not duplicates).lower(),
               "wrap": str(across_buckets).lower(), "key_norm": "unit"}
    return lsh_case("-5e4", q, v, rotations, [count], options, out.reshape(v.shape),
                    of_rounds(buckets, batch, heads, rounds, count))


@case("attention/lsh/testdata/own_bucket_once", LUCIDRAINS, 101)
def own_bucket_once():
    return lucidrains_case(3, causal=True, across_buckets=False, duplicates=False)


@case("attention/lsh/testdata/own_bucket", LUCIDRAINS, 102)
def own_bucket():
    return lucidrains_case(4, causal=False, across_buckets=False, duplicates=True)


@case("attention/lsh/testdata/across_buckets", LUCIDRAINS, 103)
def across_buckets():
    return lucidrains_case(3, causal=True, across_buckets=True, duplicates=True)


# Of one round: in several, their count leaves out what the first chunk sees of the round before.
@case("attention/lsh/testdata/across_buckets_once", LUCIDRAINS, 104)
def across_buckets_once():
    return lucidrains_case(1, causal=False, across_buckets=True, duplicates=False)


@case("attention/lsh/testdata/per_head", LUCIDRAINS, 108)
def per_head():
    return lucidrains_case(4, causal=False, across_buckets=False, duplicates=True, per_head=True)


# ---- Hugging Face transformers ----

HUGGING_FACE = "transformers.models.reformer.modeling_reformer.LSHSelfAttention"


def hugging_face_case(rounds, causal, chunk, factors, padded_from, per_head=False):
    """Its layer without the projections of hidden states, which pick q and v here."""
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention
    batch, heads, tokens, channels = len(padded_from), 2, 48, 8
    width = heads * channels
    q = draw(batch, heads, tokens, channels)
    v = draw(batch, heads, tokens, channels)
    rotations = draw(*[heads] * per_head, channels, rounds, sum(factors) // 2)
    padding = torch.ones(batch, tokens)
    for row, first in enumerate(padded_from):
        padding[row, first:] = 0
    padded = min(padded_from) < tokens
    config = ReformerConfig(
        num_attention_heads=heads, attention_head_size=channels, hidden_size=2 * width,
        lsh_attn_chunk_length=chunk, lsh_num_chunks_before=1, lsh_num_chunks_after=0,
        num_hashes=rounds, num_buckets=factors if len(factors) > 1 else factors[0],
        is_decoder=causal, lsh_attention_probs_dropout_prob=0.0, hash_seed=None)
    with in_float64(), with_rotations(rotations):
        module = LSHSelfAttention(config).eval()
        module.query_key.weight.copy_(torch.eye(2 * width)[:width])
        module.value.weight.copy_(torch.eye(2 * width)[width:])
        hidden = np.concatenate([merge_heads(q.numpy()), merge_heads(v.numpy())], -1)
        result = module(torch.from_numpy(hidden), attention_mask=padding if padded else None)
    options = {"rounds": rounds, "chunk": chunk, "causal": str(causal).lower(), "scale": "1",
               "bucket_mask": "false", "dedup": "false", "wrap": "true", "key_norm": "epsilon"}
    out = torch.from_numpy(split_heads(result.hidden_states.numpy(), heads))
    step = math.prod(factors) + padded  # padded tokens have a bucket of their own
    return lsh_case("-1e5", q, v, rotations, factors, options, out,
                    of_rounds(result.buckets, batch, heads, rounds, step),
                    padding if padded else None)


@case("attention/lsh/testdata/hugging_face_causal", HUGGING_FACE, 105)
def hugging_face_causal():
    return hugging_face_case(3, True, 6, [8], [48, 48])


@case("attention/lsh/testdata/hugging_face_padded", HUGGING_FACE, 106)
def hugging_face_padded():
    return hugging_face_case(2, False, 8, [12], [37, 48])


@case("attention/lsh/testdata/hugging_face_factorized", HUGGING_FACE, 107)
def hugging_face_factorized():
    return hugging_face_case(2, False, 4, [12, 12], [48])


@case("attention/lsh/testdata/hugging_face_per_head", HUGGING_FACE, 109)
def hugging_face_per_head():
    return hugging_face_case(2, False, 6, [8], [48], per_head=True)


if __name__ == "__main__":
    golden.main(golden.CASES[FIRST:], pathlib.Path(__file__).name)
