"""The reference language model: a byte-level Transformer-XL with an exit after each layer.

    h^0_t = embedding[byte_t]
    g = h + Attention(LN h),  h' = g + FF(LN g)          layer n = 0 .. 5: memory/transformer_xl with
                                                         pre_norm, a bias u and v for each layer
    logits = LN(h^6) output^T                            of the next byte
    exit n = 0 .. 4: LN_n(h^(n+1)) output^T              after layer n, with the same matrix

The parameters are a dictionary; their names and shapes are those of the file. Tensors of heads are
[heads, batch, tokens, channels], so that one product with a head's distances serves the batch.
"""

import math

import torch
import torch.nn.functional as functional

LAYERS, HEADS, HEAD_DIM = 6, 6, 32
WIDTH, INNER = HEADS * HEAD_DIM, 4 * HEADS * HEAD_DIM
SEGMENT, MEMORY = 128, 256
BYTES = 256
TECHNIQUE = (f"transformer_xl:layers={LAYERS},segment={SEGMENT},memory={MEMORY},pre_norm=true,"
             "share_biases=false")


def exit_names():
    """The norms before the output matrix, in the order of the layers that they follow."""
    return [f"exit{n}.norm" for n in range(LAYERS - 1)] + ["final_norm"]


def initial_parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = {}

    def matrix(name, rows, columns, deviation):
        parameters[name] = torch.randn(rows, columns, generator=generator) * deviation

    def norm(name):
        parameters[name + ".gamma"] = torch.ones(WIDTH)
        parameters[name + ".beta"] = torch.zeros(WIDTH)

    of_branch = 1 / math.sqrt(2 * LAYERS)  # each of the 2 x 6 branches adds to the same h
    matrix("embedding", BYTES, WIDTH, 0.5)
    for n in range(LAYERS):
        layer = f"layer{n}."
        for name in ("w_q", "w_k", "w_v", "w_r"):
            matrix(layer + name, WIDTH, WIDTH, WIDTH ** -0.5)
        matrix(layer + "w_o", WIDTH, WIDTH, WIDTH ** -0.5 * of_branch)
        parameters[layer + "u"] = torch.zeros(HEADS, HEAD_DIM)
        parameters[layer + "v"] = torch.zeros(HEADS, HEAD_DIM)
        norm(layer + "attention_norm")
        matrix(layer + "ff.w1", WIDTH, INNER, WIDTH ** -0.5)
        parameters[layer + "ff.b1"] = torch.zeros(INNER)
        matrix(layer + "ff.w2", INNER, WIDTH, INNER ** -0.5 * of_branch)
        parameters[layer + "ff.b2"] = torch.zeros(WIDTH)
        norm(layer + "ff_norm")
    for name in exit_names():
        norm(name)
    matrix("output", BYTES, WIDTH, WIDTH ** -0.5)
    return parameters


def sinusoids(distances):
    """Sines in the first half of the channels, cosines in the second; [distances, WIDTH]."""
    frequencies = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    angles = distances.to(torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(torch.get_default_dtype())


class Shift(torch.autograd.Function):
    """Moves row i of [.., queries, keys] left by queries - 1 - i, from distances to keys.

    Column c holds distance keys - 1 - c, query i has keys - queries keys before the segment's
    first: key j is at column queries - 1 - i + j. Rows laid end to end, that is one stride less
    than a row. What moves in from the next row belongs to keys after the query.
    """

    @staticmethod
    def forward(ctx, scores):
        *outer, queries, keys = scores.shape
        flat = scores.contiguous().flatten(-2)
        shifted = flat.as_strided((math.prod(outer), queries, keys),
                                  (queries * keys, keys - 1, 1), queries - 1)
        return shifted.reshape(scores.shape)

    @staticmethod
    def backward(ctx, gradient):
        *outer, queries, keys = gradient.shape
        flat = gradient.new_empty(*outer, queries * keys)
        flat[..., :queries - 1] = 0
        rows = flat[..., queries - 1:-1].unflatten(-1, (queries, keys - 1))
        rows.copy_(gradient[..., :-1])  # the last column is seen by the last query alone
        flat[..., -1] = gradient[..., -1, -1]
        return flat.view(gradient.shape)


def norm(parameters, name, x):
    return functional.layer_norm(x, (WIDTH,), parameters[name + ".gamma"],
                                 parameters[name + ".beta"])


def heads(x):
    """[batch, tokens, WIDTH] to [HEADS, batch, tokens, HEAD_DIM]."""
    return x.unflatten(-1, (HEADS, HEAD_DIM)).permute(2, 0, 1, 3)


def merge_heads(x):
    return x.permute(1, 2, 0, 3).flatten(2)


def keys_and_values(parameters, n, context):
    return tuple(heads(context @ parameters[f"layer{n}.{name}"]) for name in ("w_k", "w_v"))


def attention_weights(parameters, n, x, k):
    """softmax of the scores of x's tokens, the last of k's; [HEADS, batch, tokens, keys]."""
    layer = f"layer{n}."
    tokens, keys = x.shape[1], k.shape[2]
    scale = HEAD_DIM ** -0.5
    q = heads(x @ (parameters[layer + "w_q"] * scale))
    r = sinusoids(torch.arange(keys - 1, -1, -1)) @ parameters[layer + "w_r"]
    r = r.unflatten(-1, (HEADS, HEAD_DIM)).permute(1, 2, 0)
    content = (q + parameters[layer + "u"][:, None, None] * scale) @ k.transpose(-1, -2)
    by_distance = (q + parameters[layer + "v"][:, None, None] * scale).flatten(1, 2) @ r
    scores = content.add_(Shift.apply(by_distance.unflatten(1, (-1, tokens))))
    scores[..., keys - tokens:] += torch.full((tokens, tokens), -math.inf).triu(1)
    return scores.softmax(-1)


def feed_forward(parameters, n, x):
    ff = f"layer{n}.ff."
    inner = (x @ parameters[ff + "w1"] + parameters[ff + "b1"]).relu()
    return inner @ parameters[ff + "w2"] + parameters[ff + "b2"]


def plain_attention(parameters, n, x, context):
    """Before W_o, of the normalised tokens x over context, whose last tokens are x."""
    k, v = keys_and_values(parameters, n, context)
    return merge_heads(attention_weights(parameters, n, x, k) @ v)


def forward(parameters, tokens, memories=None, memory=MEMORY, attention=plain_attention):
    """Reads a segment [batch, tokens]; returns (hidden, memories, key of the last layer).

    hidden: h^0 .. h^6, [batch, tokens, WIDTH]. memories: for each layer the last `memory` tokens of
    what it read, constants for the next segment's gradients. key: the last feed-forward's input.
    """
    hidden = [functional.embedding(tokens, parameters["embedding"])]
    kept = []
    for n in range(LAYERS):
        layer, h = f"layer{n}.", hidden[-1]
        read = h if memories is None else torch.cat([memories[n], h], dim=1)
        kept.append(read[:, max(0, read.shape[1] - memory):].detach())
        context = norm(parameters, layer + "attention_norm", read)
        mixed = attention(parameters, n, context[:, -h.shape[1]:], context)
        g = h + mixed @ parameters[layer + "w_o"]
        key = norm(parameters, layer + "ff_norm", g)
        hidden.append(g + feed_forward(parameters, n, key))
    return hidden, kept, key


def all_logits(parameters, hidden):
    """[exits, batch, tokens, BYTES]; the last is the model's own."""
    normed = [norm(parameters, name, h) for name, h in zip(exit_names(), hidden[1:])]
    return torch.stack(normed) @ parameters["output"].T


def final_logits(parameters, hidden):
    return norm(parameters, "final_norm", hidden[-1]) @ parameters["output"].T


def segments(tokens, segment=SEGMENT):
    """(input, next byte) of consecutive segments of [batch, tokens + 1]."""
    for begin in range(0, tokens.shape[1] - 1, segment):
        end = min(begin + segment, tokens.shape[1] - 1)
        yield tokens[:, begin:end], tokens[:, begin + 1:end + 1]


@torch.no_grad()
def bits_per_byte(parameters, tokens, **options):
    """Of each exit, the model's own last, over [batch, tokens] streams from empty memories."""
    total, count, memories = torch.zeros(LAYERS, dtype=torch.float64), 0, None
    for x, y in segments(tokens):
        hidden, memories, _ = forward(parameters, x, memories, **options)
        log_p = all_logits(parameters, hidden).log_softmax(-1)
        picked = log_p.gather(-1, y.expand(LAYERS, *y.shape)[..., None])
        total -= picked.to(torch.float64).flatten(1).sum(1)
        count += y.numel()
    return (total / count / math.log(2)).tolist()
